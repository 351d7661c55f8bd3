"""The audit: that it finds nothing where nothing is, and what it says of engines that are broken on purpose."""

import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from cascade import BypassConfig, CascadeConfig, Engine, LevelConfig, SamplingParams
from cascade.audit import THRESHOLDS, audit, bit_exact, threshold_of
from cascade.bench.questions import read_questions
from cascade.cli import main
from cascade.draft import Verdict
from cascade.errors import ConfigError
from cascade.hookspecs import hookimpl
from cascade.noise import Noise
from cascade.result import Result
from cascade.rules import Coupled, Rule
from cascade.sampling import Sampler
from cascade.testing import FixedCosts, ScriptedDrafter, ToyModel
from tests.tiny import tiny, tokenizer

GREEDY = SamplingParams(max_new_tokens=12)
PROMPT = [1, 2, 3]
COSTS = FixedCosts(lambda level, tokens: 1.0)
ALWAYS = BypassConfig(threshold=0.0)  # no level is ever bypassed


class Gullible(Rule):
    """Accepts whatever is proposed, and claims to be lossless."""

    lossless = True

    def walk(self, draft, choose, ends):
        for node in range(-1, len(draft)):
            own = choose(node)
        return Verdict([*range(len(draft))], own, len(draft), len(draft), len(draft))


class Frank(Gullible):
    lossless = False


class Rules:
    @hookimpl
    def cascade_register_rules(self):
        return {"gullible": Gullible, "frank": Frank}


def engine_of(target, drafter="ngram", rule="coupled"):
    levels = [LevelConfig(drafter=drafter, k=4, controller="fixed"), target]
    return Engine(CascadeConfig(levels, rule=rule, bypass=ALWAYS, plugins=[Rules()]), costs=COSTS)


def greedy_text(model, prompt, n):
    text = list(prompt)
    for _ in range(n):
        text.append(int(model.logits(text).argmax()))
    return text


class Wavering(ToyModel):
    """Two tokens are nearly tied everywhere, and in forwards of several tokens the wrong one leads.

    Prompts are read as they are: the cascade and plain decoding read them alike.
    """

    dtype, exactness = "bfloat16", "no: a token's logits depend on what shares its forward"
    tie, push, other = 0.01, 0.02, 1

    def logits(self, prefix):
        out = super().logits(prefix).copy()
        best = int(out.argmax())
        out[(best + 1) % self.vocab_size] = out[best] - self.tie
        return out

    def forward(self, feeds):
        inside = any(feed.row.length > 0 and len(feed.tokens) > 1 for feed in feeds)
        logits = super().forward(feeds)
        if inside:
            best = logits.argmax(-1)
            logits[range(len(best)), (best + self.other) % self.vocab_size] += self.push
        return logits


def wavering(**changes):
    """An engine whose third token is the first to be scored beside a draft, and its case."""
    target = type("Target", (Wavering,), changes)(seed=3)
    text = greedy_text(target, PROMPT, 14)
    return engine_of(target, ScriptedDrafter([text])), text


# -- what is found ---------------------------------------------------------------------------------------


def test_an_engine_that_keeps_its_promise():
    target = ToyModel(order=1)
    engine = engine_of(target)
    sampled = [replace(GREEDY, temperature=1.0, seed=seed) for seed in (0, 1)]
    seen = []
    cases = audit(engine, [PROMPT, [5]], [GREEDY, *sampled], on_case=seen.append)
    assert seen == cases
    assert [(case.prompt, case.params.seed) for case in cases] == [(p, s) for p in (0, 1) for s in (None, 0, 1)]
    assert {case.verdict for case in cases} == {"identical"}
    assert all(case.divergence is None and not case.failed and case.new_tokens == 12 for case in cases)
    text = greedy_text(target, PROMPT, 12)
    assert cases[0].drafted == sum(origin == 0 for origin in engine.generate(PROMPT, GREEDY).origins) > 0
    assert engine.generate(PROMPT, GREEDY).tokens == text[3:]


def test_a_rule_that_accepts_everything_is_found_out():
    target = ToyModel(seed=5)
    text = greedy_text(target, PROMPT, 12)
    engine = engine_of(target, ScriptedDrafter([text], "wrong"), "gullible")
    [case] = audit(engine, [PROMPT], [GREEDY])
    assert (case.verdict, case.failed) == ("defect", True)
    found = case.divergence
    assert found.position == 1  # nothing is drafted in the prompt's own round
    assert (found.token, found.plain_token) == ((text[4] + 1) % 32, text[4])
    logp = torch.from_numpy(target.logits(text[:4])).log_softmax(0)
    best, second = logp.sort(descending=True).values[:2].tolist()
    assert found.gap == pytest.approx(best - second)
    assert found.behind == pytest.approx(float(best - logp[found.token]))


def test_a_rule_that_promises_nothing_is_not_judged():
    target = ToyModel(seed=5)
    engine = engine_of(target, ScriptedDrafter([greedy_text(target, PROMPT, 12)], "wrong"), "frank")
    [case] = audit(engine, [PROMPT], [GREEDY])
    assert (case.verdict, case.failed, case.divergence.position) == ("not judged", False, 1)


def test_a_near_tie_is_told_from_a_defect_by_the_distance():
    engine, text = wavering()
    [case] = audit(engine, [PROMPT], [GREEDY])
    assert (case.verdict, case.failed) == ("near-tie", False)
    assert case.divergence.position == 1
    assert (case.divergence.token, case.divergence.plain_token) == ((text[4] + 1) % 32, text[4])
    assert case.divergence.gap == case.divergence.behind == pytest.approx(0.01)
    assert audit(engine, [PROMPT], [GREEDY], threshold=0.011)[0].verdict == "near-tie"
    assert audit(engine, [PROMPT], [GREEDY], threshold=0.009)[0].verdict == "defect"


def test_on_a_bit_exact_engine_there_are_no_near_ties():
    engine, _ = wavering(exactness="yes, says the model")
    [case] = audit(engine, [PROMPT], [GREEDY], threshold=10)
    assert (case.verdict, case.divergence.gap) == ("defect", pytest.approx(0.01))


def test_a_token_that_was_not_second_is_judged_by_its_own_distance():
    engine, text = wavering(other=2, push=20)
    [case] = audit(engine, [PROMPT], [GREEDY])
    assert case.divergence.token == (text[4] + 2) % 32
    assert case.divergence.gap == pytest.approx(0.01)
    assert case.divergence.behind > THRESHOLDS["bfloat16"]
    assert case.verdict == "defect"


@pytest.mark.parametrize("temperature", [1.0, 0.25])
def test_a_sampled_gap_is_between_scores_with_their_noise(temperature):
    """There the second by probability may be far from the second in the race."""
    engine = engine_of(type("Target", (Wavering,), {"push": 1.0})(seed=3), ScriptedDrafter(kind="mixed"))
    params = [SamplingParams(max_new_tokens=12, temperature=temperature, seed=seed) for seed in range(16)]
    cases = [case for case in audit(engine, [PROMPT], params) if case.divergence is not None]
    assert len(cases) > 4
    for case in cases:
        found, seed = case.divergence, case.params.seed
        plain = engine.generate(PROMPT, replace(case.params, speculate=False)).tokens
        prefix = PROMPT + plain[: found.position]
        logp = torch.from_numpy(engine.model.logits(prefix) / temperature).log_softmax(0)
        race = np.sort(logp.numpy() + Noise(seed).gumbel(len(prefix), np.arange(32)))
        assert found.gap == pytest.approx(race[-1] - race[-2])
        assert found.behind >= found.gap - 1e-12
        assert found.plain_token == plain[found.position]
        # Logits are divided by the temperature, and so is their rounding.
        assert (case.verdict == "near-tie") == (found.behind <= 0.5 / temperature)
    assert {case.verdict for case in cases} == {"near-tie", "defect"}


class Edge(ToyModel):
    """Three tokens; in wide forwards the last is a little likelier."""

    dtype, exactness = "bfloat16", "no"
    shares, push = (0.6, 0.3005, 0.0995), 0.1

    def __init__(self):
        super().__init__(vocab_size=3)

    def logits(self, prefix):
        return np.log(np.array(self.shares))

    def forward(self, feeds):
        wide = any(feed.row.length > 0 and len(feed.tokens) > 1 for feed in feeds)
        logits = super().forward(feeds)
        logits[:, 2] += self.push * wide
        return logits


@pytest.mark.parametrize(("top_p", "push", "verdict"), [(0.9, 0.1, "near-tie"), (0.8, 3.0, "defect")])
def test_at_the_edge_of_top_p_a_token_may_slip_in(top_p, push, verdict):
    """The third token has 0.9005 of the mass before it: out at 0.9 by a hair, at 0.8 by far."""
    target = type("Target", (Edge,), {"push": push})()
    engine = engine_of(target, ScriptedDrafter([[0]], "mixed"))  # always drafts something: 0
    params = [SamplingParams(max_new_tokens=20, temperature=1.0, top_p=top_p, seed=seed) for seed in range(8)]
    cases = audit(engine, [[0]], params)
    slipped = [case for case in cases if case.divergence and case.divergence.token == 2]
    assert slipped
    assert {case.verdict for case in slipped} == {verdict}
    if verdict == "near-tie":
        assert all(case.divergence.behind <= 0.5 for case in slipped)


# -- ends and errors -------------------------------------------------------------------------------------


def scripted(monkeypatch, engine, fast, plain):
    """Lets an engine answer with these: (tokens, finish_reason)."""

    def generate(prompt, params):
        tokens, reason = fast if params.speculate else plain
        error = "DecodeError: scripted" if reason == "error" else None
        return Result(list(tokens), "", reason, None, [0] * len(tokens), error=error)

    monkeypatch.setattr(engine, "generate", generate)


@pytest.mark.parametrize(
    ("fast", "plain", "position", "token", "plain_token"),
    [
        (([4, 5], "stop"), ([4, 5, 6], "length"), 2, None, 6),
        (([4, 5, 6], "length"), ([4, 5], "stop"), 2, 6, None),
        (([4, 5], "stop"), ([4, 5], "length"), 2, None, None),
        (([], "length"), ([4], "length"), 0, None, 4),
    ],
)
def test_another_end_is_a_defect_however_close_it_was(monkeypatch, fast, plain, position, token, plain_token):
    engine, _ = wavering()
    scripted(monkeypatch, engine, fast, plain)
    [case] = audit(engine, [PROMPT], [GREEDY], threshold=100)
    found = case.divergence
    assert (case.verdict, found.position, found.token, found.plain_token) == ("defect", position, token, plain_token)
    assert found.behind is None
    assert (found.gap is None) == (plain_token is None)


def test_plain_decoding_that_does_not_repeat_itself_is_no_near_tie(monkeypatch):
    engine, text = wavering()
    unlikely = int(engine.model.logits(PROMPT).argmin())
    scripted(monkeypatch, engine, ([text[3]], "length"), ([unlikely], "length"))
    [case] = audit(engine, [PROMPT], [GREEDY])
    assert (case.verdict, case.divergence.behind) == ("defect", None)


@pytest.mark.parametrize("failing", [0, 1])
def test_a_run_that_failed_is_an_error(monkeypatch, failing):
    engine, _ = wavering()
    runs = [([4], "length"), ([4], "length")]
    runs[failing] = ([4], "error")
    scripted(monkeypatch, engine, *runs)
    [case] = audit(engine, [PROMPT], [GREEDY])
    assert (case.verdict, case.failed, case.error) == ("error", True, "DecodeError: scripted")


# -- what is refused, and what decides -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("params", "rule", "said"),
    [
        (SamplingParams(temperature=1.0), "coupled", "needs a seed"),
        (SamplingParams(n=2), "coupled", "one sample with one"),
        (SamplingParams(temperature=1.0, seed=0), "gullible", "rule 'gullible' can only be audited at temperature 0"),
    ],
)
def test_what_cannot_be_compared_is_refused_before_anything_is_decoded(params, rule, said):
    target = ToyModel()
    engine = engine_of(target, rule=rule)
    with pytest.raises(ConfigError, match=said):
        audit(engine, [PROMPT], [GREEDY, params])
    assert target.forwards == 0


def test_who_is_bit_exact():
    model = SimpleNamespace(exactness="no", probed=None)
    assert not bit_exact(model)
    assert bit_exact(SimpleNamespace(exactness="yes, a table"))
    for trees, tree_bits, exact in ((True, True, True), (True, False, False), (False, False, True)):
        found = SimpleNamespace(width=2, trees=trees, tree_bits=tree_bits)
        assert bit_exact(SimpleNamespace(exactness="?", probed=found)) == exact
    found = SimpleNamespace(width=None, trees=False, tree_bits=False)
    assert not bit_exact(SimpleNamespace(exactness="yes", probed=found))


def test_thresholds_follow_the_formats_precision():
    for dtype in ("bfloat16", "float16"):
        assert threshold_of(SimpleNamespace(dtype=dtype)) == 64 * torch.finfo(getattr(torch, dtype)).eps
    for dtype in ("float32", "float64"):
        assert threshold_of(SimpleNamespace(dtype=dtype)) == 64**2 * torch.finfo(getattr(torch, dtype)).eps
    assert threshold_of(SimpleNamespace(dtype="int8")) == THRESHOLDS["bfloat16"]


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.7},
        {"temperature": 1.3, "top_k": 5, "top_p": 0.8},
        {"temperature": 1.0, "min_p": 0.1, "repetition_penalty": 1.5},
        {"temperature": 1.0, "min_new_tokens": 9},
    ],
)
def test_scores_are_what_sampling_takes_the_largest_of(params):
    tokens = np.array([3, 1, 4], np.int64)
    for seed in range(30):
        logits = torch.from_numpy(np.random.default_rng(seed).normal(size=40) * 3)
        sampler = Sampler(SamplingParams(**params), Noise(seed), (7,), 1)
        before = logits.clone()
        scores = sampler.scores(logits, tokens)
        assert torch.equal(logits, before)
        assert int(scores.argmax()) == sampler.sample(logits, tokens)
        p = sampler.probabilities(logits, tokens)
        if sampler.greedy:
            assert torch.allclose(scores, logits.log_softmax(0))
        else:
            noise = torch.from_numpy(sampler.noise.gumbel(3, np.arange(40)))
            assert torch.allclose(scores.exp(), (p.log() + noise).exp())


def test_a_transformers_model_is_judged_by_its_probe():
    levels = [LevelConfig(drafter="ngram", k=4, controller="fixed"), LevelConfig(model=tiny("llama", torch.bfloat16))]
    with Engine(CascadeConfig(levels, bypass=ALWAYS), costs=COSTS) as engine:
        assert bit_exact(engine.model) == (engine.model.probed.width is not None)
        prompts = [[5, 6, 7, 8] * 4, [9] * 20]
        cases = audit(engine, prompts, [replace(GREEDY, ignore_eos=True), replace(GREEDY, temperature=1.0, seed=1)])
        allowed = {"identical"} if bit_exact(engine.model) else {"identical", "near-tie"}
        assert {case.verdict for case in cases} <= allowed
        assert engine.target.rows == {}


# -- the command -----------------------------------------------------------------------------------------

CONFIG = """
from cascade import BypassConfig, CascadeConfig, LevelConfig
from cascade.hookspecs import hookimpl
from cascade.testing import ScriptedDrafter
from tests.test_audit import Frank, Gullible, Wavering, greedy_text

class Letters(Wavering):
    tokenizer, max_length = "letters", 120

    def encode(self, prompt):
        return [ord(c) - 97 if "a" <= c <= "z" else 26 for c in prompt]

    def decode(self, ids):
        return "".join(chr(97 + i) if i < 26 else "\\x1b" for i in ids)

    def forward(self, feeds):
        begun = any(feed.row.length for feed in feeds)
        return super().forward(feeds) * (float("nan") if BREAK and begun else 1)

class Rules:
    @hookimpl
    def cascade_register_rules(self):
        return {"gullible": Gullible, "frank": Frank}

target = Letters(vocab_size=27, seed=1)
target.max_length = 120
target.exactness, target.push = EXACT, PUSH
texts = [greedy_text(target, target.encode(prompt), 40) for prompt in ("hello", "world", "xyz")]
config = CascadeConfig(
    [LevelConfig(drafter=ScriptedDrafter(texts, KIND, 27), name="script", k=4, controller="fixed"), target],
    rule=RULE, bypass=BypassConfig(threshold=0.0), plugins=[Rules()],
)
"""


@pytest.fixture
def cascade(tmp_path, capsys, monkeypatch):
    """Runs `cascade audit` on a config with these changes; returns status, out and err."""
    for name in ("NO_COLOR", "FORCE_COLOR", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)
    questions = tmp_path / "q.jsonl"
    lines = [("1", "qa", "hello"), ("b", "qa", "world"), ("7", "edit", "xyz")]
    questions.write_text(
        "".join(json.dumps({"question_id": i, "category": c, "turns": [t]}) + "\n" for i, c, t in lines)
    )

    def run(*words, EXACT="yes, a table", PUSH=0.0, KIND="oracle", RULE="coupled", BREAK=False):
        config = tmp_path / "config.py"
        settings = {"EXACT": EXACT, "PUSH": PUSH, "KIND": KIND, "RULE": RULE, "BREAK": BREAK}
        config.write_text("".join(f"{key} = {value!r}\n" for key, value in settings.items()) + CONFIG)
        words = ["audit", "--config", str(config), "--questions", str(questions), "--max-new-tokens", "10", *words]
        status = main(words)
        out, err = capsys.readouterr()
        return SimpleNamespace(status=status, out=out, err=err, lines=out.splitlines())

    return run


def test_a_clean_audit_is_a_line_per_case_and_a_closing_one(cascade, tmp_path):
    out = tmp_path / "out.json"
    ran = cascade("--seeds", "2", "--json", str(out))
    assert (ran.status, ran.err) == (0, "")
    assert ran.lines[0] == "rule coupled; the target is bit-exact: any difference is a defect"
    assert ran.lines[1:4] == [
        "qa 1, coupled, greedy: identical, 10 tokens",
        "qa 1, coupled, temperature 1 seed 0: identical, 10 tokens",
        "qa 1, coupled, temperature 1 seed 1: identical, 10 tokens",
    ]
    conditions = "rule coupled, target bfloat16, bit-exact; up to 10 tokens, greedy and temperature 1"
    assert ran.lines[-1].startswith(f"9 of 9 identical ({conditions}). ")
    assert len(ran.lines) == 11
    record = json.loads(out.read_text())
    [one] = record["audits"]
    assert record["environment"]["python"]
    assert (one["rule"], one["bit_exact"], one["threshold"], len(one["cases"])) == ("coupled", True, None, 9)
    assert one["cases"][1]["seed"] == 0
    assert {key: one["cases"][-1][key] for key in ("category", "question_id", "temperature", "verdict")} == {
        "category": "edit", "question_id": "7", "temperature": 1.0, "verdict": "identical",
    }  # fmt: skip


def test_a_broken_rule_fails_with_place_and_tokens(cascade, tmp_path):
    out = tmp_path / "out.json"
    ran = cascade("--rule", "gullible", "--limit-per-category", "1", "--json", str(out), KIND="wrong")
    assert ran.status == 1
    target = Wavering(vocab_size=27, seed=1)
    text = greedy_text(target, [ord(c) - 97 for c in "hello"], 2)
    case = json.loads(out.read_text())["audits"][0]["cases"][0]
    assert case["verdict"] == "defect"
    assert case["divergence"]["position"] == 1
    assert (case["divergence"]["token"], case["divergence"]["plain_token"]) == ((text[6] + 1) % 27, text[6])
    shown = re.escape(repr(chr(97 + text[6]) if text[6] < 26 else "\x1b"))
    assert re.match(rf"qa 1, gullible, greedy: DEFECT at token 1: .* \(id \d+\), plain decoding {shown} ", ran.lines[1])
    assert "top-2 gap 0.01 nats" in ran.lines[1]
    assert ran.lines[-1].startswith("0 of 2 identical (rule gullible, target bfloat16, bit-exact; up to 10 tokens, ")
    assert "greedy), 2 defects." in ran.lines[-1]


def test_near_ties_are_no_failure_unless_the_threshold_says_so(cascade):
    ran = cascade("--temperature", "0", EXACT="no: who knows", PUSH=0.02)
    assert ran.status == 0
    assert "not bit-exact (no: who knows)" in ran.lines[0]
    assert "at most 0.5 nats apart" in ran.lines[0]
    assert all("greedy: near-tie at token 1: " in line for line in ran.lines[1:4])
    assert "0 of 3 identical (rule coupled, target bfloat16, not bit-exact; " in ran.lines[-1]
    assert ", 3 near-ties" in ran.lines[-1]
    assert cascade("--temperature", "0", "--threshold", "0.001", EXACT="no", PUSH=0.02).status == 1
    assert cascade("--temperature", "0", EXACT="yes", PUSH=0.02).status == 1


def test_a_request_that_fails_fails_the_audit(cascade):
    ran = cascade("--temperature", "0", "--limit-per-category", "1", BREAK=True)
    assert ran.status == 1
    assert re.match("qa 1, coupled, greedy: ERROR: DecodeError: .* logits are not numbers", ran.lines[1])
    assert "0 of 2 identical " in ran.lines[-1]
    assert ", 2 errors" in ran.lines[-1]


def test_every_rule_is_audited_at_what_it_can_promise(cascade):
    ran = cascade("--rule", "all", "--limit-per-category", "1", KIND="wrong")
    closing = {re.search(r"\(rule (\w+)", line).group(1): line for line in ran.lines if " identical (rule " in line}
    assert ran.status == 1  # of gullible
    assert list(closing) == ["block", "coupled", "frank", "gullible", "rejection", "traversal"]
    assert "4 of 4 identical" in closing["coupled"]
    assert all("2 of 2 identical" in closing[rule] for rule in ("block", "rejection", "traversal"))
    assert "2 not judged, since the rule is not lossless" in closing["frank"]
    assert "frank, greedy: not lossless: not judged at token 1" in ran.out
    assert "greedy), 2 defects" in closing["gullible"]


def test_a_defect_is_not_forgotten_over_the_next_rule(cascade):
    ran = cascade("--rule", "gullible", "--rule", "coupled", "--temperature", "0", KIND="wrong")
    assert (ran.status, ran.lines[-1][:18]) == (1, "3 of 3 identical (")


def test_an_audit_without_a_held_draft_says_that_it_shows_little(cascade):
    ran = cascade("--temperature", "0", KIND="wrong")
    assert ran.status == 0
    assert ran.lines[-1].endswith("so this audit shows little.")
    assert "of 30 tokens came from below the target." in cascade("--temperature", "0").lines[-1]


@pytest.fixture
def stopping(monkeypatch):
    """Interrupts the audit at its n-th case."""
    import cascade.audit as module

    state, real = SimpleNamespace(cases=0, at=None), module._case

    def case(*args):
        if state.cases == state.at:
            raise KeyboardInterrupt
        state.cases += 1
        return real(*args)

    monkeypatch.setattr(module, "_case", case)
    return state


def without_environment(path):
    record = json.loads(path.read_text())
    del record["environment"]
    return record


@pytest.mark.parametrize("at", [0, 1, 2, 5, 7])
def test_an_interrupted_audit_goes_on_where_it_stopped(cascade, tmp_path, stopping, at):
    whole, out = tmp_path / "whole.json", tmp_path / "out.json"
    partial = tmp_path / "out.json.partial.jsonl"
    rules = ["--rule", "coupled", "--rule", "gullible", "--temperature", "0"]
    assert cascade(*rules, "--json", str(whole)).status == 1 - 1
    stopping.cases, stopping.at = 0, at
    ran = cascade(*rules, "--json", str(out))
    if at < 6:
        assert ran.status == 130
        assert (f"kept in {partial}" if at else "nothing is kept") in ran.err
        assert not out.exists()
    stopping.cases, stopping.at = 0, None
    again = cascade(*rules, "--json", str(out))
    assert again.status == 0
    assert stopping.cases == max(0, 6 - at)
    assert "3 of 3 identical" in again.lines[-1]
    assert without_environment(out) == without_environment(whole)
    assert not partial.exists()
    stopping.cases = 0
    assert cascade(*rules, "--json", str(out)).lines[-1] == again.lines[-1]
    assert stopping.cases == 0, "a finished one is only shown"


def test_a_torn_line_of_an_audit_loses_its_question_only(cascade, tmp_path, stopping):
    out, partial = tmp_path / "out.json", tmp_path / "out.json.partial.jsonl"
    stopping.at = 2
    cascade("--temperature", "0", "--json", str(out))
    partial.write_bytes(partial.read_bytes()[:-9])
    stopping.cases, stopping.at = 0, None
    assert "3 of 3 identical" in cascade("--temperature", "0", "--json", str(out)).lines[-1]
    assert stopping.cases == 2


def test_another_audits_file_is_refused_and_a_defect_in_it_is_not_forgotten(cascade, tmp_path):
    out = tmp_path / "out.json"
    words = ("--temperature", "0", "--rule", "gullible", "--json", str(out))
    assert cascade(*words, KIND="wrong").status == 1
    kept = out.read_bytes()
    assert cascade(*words, KIND="wrong").status == 1, "from the file"
    refused = cascade("--temperature", "0", "--json", str(out), KIND="wrong")
    assert (refused.status, refused.err.count("\n")) == (2, 1)
    assert "rules.gullible" in refused.err
    assert "files.config.py" in cascade(*words, KIND="oracle").err
    out.write_text("{}")
    assert "is no audit's file" in cascade(*words, KIND="wrong").err
    out.write_bytes(kept)
    assert out.read_bytes() == kept


def test_a_terminal_shows_only_what_is_not_identical(cascade, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "100")
    clean = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", cascade("--temperature", "0").out)
    assert "greedy: identical" not in clean
    assert "3 of 3 identical" in clean
    found = cascade("--temperature", "0", "--rule", "gullible", KIND="wrong")
    assert found.out.count("greedy: DEFECT at token 1") == 3
    assert found.status == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--rule", "gullible", "--temperature", "1"], "rule 'gullible' can only be audited at temperature 0"),
        (["--rule", "copled"], "Did you mean 'coupled'?"),
        (["--seeds", "0"], "--seeds must be at least 1, not 0"),
        (["--max-new-tokens", "0"], "--max-new-tokens must be at least 1"),
        (["--threshold", "-1"], "--threshold must be a number of at least 0"),
        (["--threshold", "nan"], "--threshold must be a number of at least 0"),
        (["--top-p", "0"], "top_p must lie in (0, 1]"),
        (["--temperature", "-1"], "temperature must be a number >= 0"),
        (["--json", "/nowhere/out.json"], "there is no folder"),
        (["--questions", "nothing.jsonl"], "nothing.jsonl"),
    ],
)
def test_wrong_usage_is_refused_in_one_line(cascade, words, said):
    ran = cascade(*words)
    assert (ran.status, ran.out) == (2, "")
    assert said in ran.err
    assert ran.err.count("\n") == 1


def test_a_prompt_that_does_not_fit_is_refused_by_its_id_before_anything_runs(cascade, tmp_path):
    file = tmp_path / "long.jsonl"
    prompts = {"short": "abc", "long": "a" * 121}
    file.write_text("".join(json.dumps({"task_id": key, "prompt": text}) + "\n" for key, text in prompts.items()))
    ran = cascade("--questions", str(file))
    assert (ran.status, ran.out) == (2, "")
    assert "question 'long' of category 'humaneval' has 121 tokens, and the context holds 120" in ran.err


# -- the questions that come with it ---------------------------------------------------------------------

EXAMPLES = Path(__file__).parents[1] / "examples" / "questions.jsonl"
CATEGORIES = ["edit", "code", "extraction", "summary", "question-answering", "arithmetic", "writing", "chat"]


def test_the_example_questions_are_three_of_each_kind():
    questions = read_questions(EXAMPLES)
    assert [question.category for question in questions] == [kind for kind in CATEGORIES for _ in range(3)]
    assert [question.id for question in questions] == list(range(1, 25))
    assert len({question.prompt for question in questions}) == 24
    assert any(ord(c) > 0xFFFF for question in questions for c in question.prompt)  # an emoji, say
    assert sum(question.prompt.isascii() for question in questions) >= 16


@pytest.mark.parametrize(
    "question", [q for q in read_questions(EXAMPLES) if q.category in ("edit", "summary")], ids=str
)
def test_what_the_example_questions_give_to_work_on_is_long_enough(question):
    if question.category == "edit":
        [code] = re.findall(r"```\w*\n(.*?)```", question.prompt, re.DOTALL)
        assert 20 <= code.count("\n") <= 40
    else:
        words = len(question.prompt.partition("\n\n")[2].split())
        assert 150 <= words <= 250, words


def test_the_example_questions_fit_a_small_context():
    made = tokenizer(3 + 256)
    assert max(len(made(question.prompt)["input_ids"]) for question in read_questions(EXAMPLES)) < 2000


def test_a_rule_that_changes_what_stands_without_a_draft_is_found() -> None:
    """The reference is decoded without the rule: a rule that spoils plain decoding too must not look identical."""

    class Shifting(Coupled):
        name = "shifting"

        def walk(self, draft, choose, ends):
            return super().walk(draft, lambda node: 5 + choose(node) % 7, ends)

    engine = Engine(CascadeConfig([ToyModel()]))
    engine.target.rule = Shifting()
    [case] = audit(engine, [[1, 2, 3]], [SamplingParams(max_new_tokens=8, ignore_eos=True)])
    assert case.verdict == "defect"
    assert isinstance(engine.target.rule, Shifting), "put back"
