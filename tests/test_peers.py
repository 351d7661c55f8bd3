"""What transformers offers: the same text under the same rules, what it took, and nothing left behind."""

import logging

import pytest
import torch

from cascade import CascadeConfig, Engine, LevelConfig, SamplingParams
from cascade.bench.peers import RECIPES, Timeline, peers
from cascade.bench.questions import Question
from cascade.bench.systems import EngineSystem, PeerError
from cascade.testing import ToyModel
from tests.tiny import NESTS, tiny, tokenizer

NAMES = [name for name in RECIPES if NESTS or name != "hf-nested"]
SIZE = 259
PARAMS = SamplingParams(max_new_tokens=24)
# Defaults as instruct models ship them, and worse: none of them may be in force.
HOSTILE = {
    "do_sample": True, "temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.5, "max_length": 7,
    "min_new_tokens": 3, "suppress_tokens": [5, 6], "no_repeat_ngram_size": 2, "num_assistant_tokens": 3,
    "prompt_lookup_num_tokens": 4,
}  # fmt: skip
QUESTION = Question(1, "qa", "the sea is blue the sky is blue the sea")
OTHER = Question(2, "qa", "abc abc")


def build(draft=True, end=None, **config):
    target = tiny("llama", torch.float64, vocab_size=SIZE)
    modules = [tiny("llama", torch.float64, vocab_size=SIZE, seed=0, num_hidden_layers=1)] if draft else []
    modules.append(target)
    for module in modules:
        for name, value in HOSTILE.items():
            setattr(module.generation_config, name, value)
        if end is not None:
            module.generation_config.eos_token_id = end
    names = ["draft", "target"][-len(modules) :]
    shared = tokenizer(SIZE)
    levels = [LevelConfig(model=m, tokenizer=shared, name=n) for m, n in zip(modules, names, strict=True)]
    return Engine(CascadeConfig(levels, **config))


@pytest.fixture(scope="module")
def engine():
    with build() as engine:
        yield engine


def plain(engine, *questions, params=PARAMS):
    return EngineSystem("plain", "", {}, engine, speculate=False).run(questions, params)


def peer(engine, name, batch=1):
    [found], skipped = peers(engine, [name], batch)
    assert skipped == {}
    return found


def state(engine):
    """Everything that a call could leave changed."""
    level, out = engine.target, [torch.get_rng_state().tolist(), logging.getLogger("transformers").level]
    while level is not None:
        module = level.model.module
        out += [id(module.generation_config), module.generation_config.to_dict(), module.config.to_dict()]
        out += [len(part._forward_pre_hooks) + len(part._forward_hooks) for part in module.modules()]
        out += [part.training for part in module.modules()]
        level = level.source.drafter if level.source is not None else None
    return out


@pytest.mark.parametrize("name", NAMES)
def test_greedy_text_is_this_engines_own_and_nothing_is_left_behind(engine, name):
    before = state(engine)
    [mine] = plain(engine, QUESTION)
    [run] = peer(engine, name).run([QUESTION], PARAMS)
    assert (run["tokens"], run["text"], run["finish_reason"]) == (mine["tokens"], mine["text"], "length")
    assert (run["new_tokens"], run["prompt_tokens"]) == (24, mine["prompt_tokens"])
    assert run["forwards"]["target"] == run["target_forwards"] <= 24
    assert 0 < run["first_token_s"] < run["wall_s"]
    assert (run["origins"], run["stats"], run["batch"]) == (None, None, None)
    assert (run["forwards"]["draft"] > 0) == (RECIPES[name].assistant is not None)
    assert state(engine) == before


def test_plain_feeds_the_prompt_and_then_a_token_a_forward(engine):
    [run] = peer(engine, "hf-plain").run([QUESTION], PARAMS)
    assert run["forwards"] == {"draft": 0, "target": 24}
    assert run["tokens_fed"] == {"draft": 0, "target": run["prompt_tokens"] + 23}
    assert (run["target_forwards"], run["first_tokens"]) == (24, 1)


def test_prompt_lookup_needs_fewer_forwards_where_the_text_repeats_itself(engine):
    [run] = peer(engine, "hf-pld").run([QUESTION], PARAMS)
    assert run["target_forwards"] < 24


@pytest.mark.parametrize(("name", "lookup"), [("hf-assisted", None), ("hf-nested", 10)][: 1 + NESTS])
def test_only_nested_drafts_look_up(engine, name, lookup):
    """Lookup in the target's own config would replace the draft model."""
    target, draft = engine.target.model.module, engine.target.source.drafter.model.module
    seen = {"target": set(), "draft": set()}
    handles = [
        module.register_forward_pre_hook(
            lambda module, args, name=name: seen[name].add(module.generation_config.prompt_lookup_num_tokens)
        )
        for name, module in (("target", target), ("draft", draft))
    ]
    peer(engine, name).run([QUESTION], PARAMS)
    for handle in handles:
        handle.remove()
    assert seen == {"target": {None}, "draft": {lookup}}


@pytest.mark.parametrize("name", NAMES)
def test_answers_end_with_this_engines_end_token(engine, name):
    end = plain(engine, QUESTION)[0]["tokens"][5]
    with build(end=[end, 2]) as ending:
        [mine] = plain(ending, QUESTION)
        [run] = peer(ending, name).run([QUESTION], PARAMS)
    assert (run["tokens"], run["finish_reason"]) == (mine["tokens"], "stop")
    assert run["new_tokens"] == mine["new_tokens"] < 24


@pytest.mark.parametrize("name", NAMES)
def test_answers_end_with_the_context(name):
    params = SamplingParams(max_new_tokens=500)
    with build(max_length=80) as engine:
        [mine] = plain(engine, QUESTION, params=params)
        [run] = peer(engine, name).run([QUESTION], params)
    assert run["tokens"] == mine["tokens"]
    assert run["prompt_tokens"] + run["new_tokens"] == 80


def test_a_batch_is_padded_and_each_row_ends_on_its_own(engine):
    ended = plain(engine, QUESTION)[0]["tokens"][5]
    with build(end=ended) as ending:
        mine = plain(ending, QUESTION, OTHER)
        runs = peer(ending, "hf-plain", batch=2).run([QUESTION, OTHER], PARAMS)
    assert [run["tokens"] for run in runs] == [run["tokens"] for run in mine]
    short, long = sorted(runs, key=lambda run: run["new_tokens"])
    assert short["new_tokens"] < long["new_tokens"]
    for run in runs:
        assert run["batch"] == {"size": 2, "wall_s": run["batch"]["wall_s"], "forwards": long["new_tokens"]}
        assert run["target_forwards"] == run["new_tokens"]
        width = max(run["prompt_tokens"] for run in runs)
        assert run["tokens_fed"]["target"] == width + long["new_tokens"] - 1  # padding is fed too
    assert short["wall_s"] < long["wall_s"] <= long["batch"]["wall_s"]


def test_more_questions_than_a_batch_holds_are_several_calls_with_one_record(engine):
    runs = peer(engine, "hf-plain", batch=2).run([QUESTION, OTHER, QUESTION], PARAMS)
    assert runs[0]["tokens"] == runs[2]["tokens"]
    batch = runs[0]["batch"]
    assert batch["size"] == 3
    assert batch["forwards"] == max(runs[0]["new_tokens"], runs[1]["new_tokens"]) + runs[2]["new_tokens"]
    assert all(run["batch"] == batch and run["wall_s"] < batch["wall_s"] for run in runs)
    assert peer(engine, "hf-plain", batch=2).run([QUESTION], PARAMS)[0]["batch"] is None


def test_assisted_generation_has_no_batches(engine):
    found, skipped = peers(engine, list(RECIPES), batch=2)
    assert [system.name for system in found] == ["hf-plain"]
    assert set(skipped) == {"hf-pld", "hf-assisted", "hf-nested"}
    assert all("batch 1 only" in reason for reason in skipped.values())


def test_without_a_draft_model_nothing_assists():
    with build(draft=False) as engine:
        found, skipped = peers(engine, list(RECIPES), batch=1)
    assert [system.name for system in found] == ["hf-plain", "hf-pld"]
    assert skipped["hf-assisted"] == skipped["hf-nested"] == "there is no draft model below the target"


def test_a_model_of_another_kind_is_none_of_transformers():
    engine = Engine(CascadeConfig([ToyModel()]))
    assert peers(engine, ["hf-plain"], 1) == (
        [], {"hf-plain": "level ToyModel is no transformers model that can generate"}
    )  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_samples_come_from_the_seed_alone(engine, name):
    params = SamplingParams(max_new_tokens=24, temperature=0.9, top_p=0.95, seed=3)
    system = peer(engine, name)
    before = state(engine)
    first = system.run([QUESTION], params)[0]["tokens"]
    torch.rand(3)
    again = system.run([QUESTION], params)[0]["tokens"]
    other = system.run([QUESTION], SamplingParams(max_new_tokens=24, temperature=0.9, top_p=0.95, seed=4))[0]["tokens"]
    assert first == again != other
    torch.set_rng_state(torch.tensor(before[0], dtype=torch.uint8))
    assert state(engine) == before


def test_sampling_has_no_filters_but_those_that_are_asked_for(engine):
    """The checkpoint's top_k of 20, or the library's own of 50, would leave fewer different first tokens."""
    params = [SamplingParams(max_new_tokens=1, temperature=50.0, seed=seed) for seed in range(90)]
    system = peer(engine, "hf-plain")
    assert len({system.run([OTHER], one)[0]["tokens"][0] for one in params}) > 55


@pytest.mark.parametrize("name", NAMES)
def test_a_failure_has_a_reason_and_leaves_nothing_behind(engine, name, monkeypatch):
    before = state(engine)
    module, forward, calls = engine.target.model.module, engine.target.model.module.forward, []

    def failing(*args, **options):
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("out of memory,\nhere")
        return forward(*args, **options)

    monkeypatch.setattr(module, "forward", failing)
    for params in (PARAMS, SamplingParams(max_new_tokens=24, temperature=1.0, seed=1)):
        calls.clear()
        with pytest.raises(PeerError, match=r"^RuntimeError: out of memory,$"):
            peer(engine, name).run([QUESTION], params)
    assert state(engine) == before


def test_an_interruption_stays_one_and_leaves_nothing_behind(engine, monkeypatch):
    def interrupted(*args, **options):
        raise KeyboardInterrupt

    before = state(engine)
    monkeypatch.setattr(engine.target.model.module, "forward", interrupted)
    with pytest.raises(KeyboardInterrupt):
        peer(engine, "hf-assisted").run([QUESTION], PARAMS)
    assert state(engine) == before


def test_a_timeline_knows_when_each_token_came():
    timeline = Timeline()
    timeline.put(torch.zeros(1, 9))  # the prompt
    timeline.put(torch.zeros(1, 3))
    timeline.put(torch.zeros(1))
    timeline.put(torch.zeros(1, 4))
    assert timeline.first_tokens == 3
    assert [timeline.of(count)[2] for count in (1, 3, 4, 5, 8)] == [1, 1, 2, 3, 3]
    first, last, _ = timeline.of(8)
    assert first < last
    rows = Timeline()
    rows.put(torch.zeros(2, 9))
    rows.put(torch.zeros(2))
    rows.put(torch.zeros(2))
    assert (rows.first_tokens, rows.of(2)[2]) == (1, 2)
