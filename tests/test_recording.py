"""Recordings: what models say of a text, compared with asking them token by token; and the files."""

import dataclasses
import subprocess
import sys

import numpy as np
import pytest
import torch

from cascade import CascadeConfig, ConfigError, DecodeError, Engine, LevelConfig, PromptError, SamplingParams
from cascade.noise import Noise
from cascade.recording import (
    BEST,
    SPAN,
    Recording,
    Said,
    heard,
    load_recordings,
    overhead_of,
    record,
    save_recordings,
    synthetic,
)
from cascade.sampling import Sampler
from cascade.testing import FixedCosts, ToyModel
from tests.tiny import tiny

V = 24
COSTS = FixedCosts(lambda level, n: 1.0 if level == "target" else 0.1)
PROMPT = [3, 1, 4, 1, 5, 9]
GREEDY = SamplingParams(max_new_tokens=2 * SPAN + 5)
SAMPLED = dataclasses.replace(GREEDY, temperature=0.8, seed=11)


def toys(**settings):
    target = ToyModel(V, seed=1, scale=3.0)
    return target, ToyModel(V, seed=2, scale=3.0, mix=(target, 0.7), **settings)


def engine_of(target, draft, **settings):
    levels = [LevelConfig(drafter="ngram"), LevelConfig(model=draft, name="draft", **settings)]
    return Engine(CascadeConfig([*levels, LevelConfig(model=target, name="target")]), costs=COSTS)


# -- what is said ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("speculate", [True, False])
def test_a_recording_holds_what_the_draft_would_have_said(params, speculate):
    target, draft = toys()
    [one] = record(engine_of(target, draft), [PROMPT], params, ["qa"], speculate=speculate, question_ids=[7])
    assert (one.prompt, one.category, one.question_id) == (tuple(PROMPT), "qa", 7)
    assert one.tokens == tuple(one.result.tokens)
    assert len(one.tokens) == params.max_new_tokens
    assert (one.result.stats.levels[1].forwards > 0) == speculate
    said, sampler = one.said["draft"], Sampler(params, Noise(params.seed or 0), (), len(PROMPT), draft=True)
    for place in range(len(one.tokens)):
        prefix = np.array([*PROMPT, *one.tokens[:place]])
        logits = torch.from_numpy(draft.logits(prefix))
        branches = sampler.branches(logits, prefix, BEST, sampler.noise)
        assert said.ids[place, 0] == sampler.sample(logits, prefix)
        assert said.ids[place].tolist() == [branch.token for branch in branches]
        best = float(logits.softmax(0).max())
        assert said.chances[place, 0] == pytest.approx(best, rel=1e-5)
        shares = [(1 - best) * branch.share for branch in branches[1:]]
        assert said.chances[place, 1:] == pytest.approx(shares, rel=1e-4)


def test_greedy_chances_are_probabilities():
    target, draft = toys()
    [one] = record(engine_of(target, draft), [PROMPT], GREEDY)
    place = 9
    logits = torch.from_numpy(draft.logits([*PROMPT, *one.tokens[:place]]))
    assert one.said["draft"].chances[place] == pytest.approx(logits.softmax(0)[one.said["draft"].ids[place]], rel=1e-4)


def test_the_models_that_are_merged_at_a_level_are_heard_too():
    target, draft = toys()
    merged = LevelConfig(drafter=["ngram", LevelConfig(model=draft, name="one"), ToyModel(V, seed=9)], name="merged")
    engine = Engine(CascadeConfig([merged, LevelConfig(model=target, name="target")]), costs=COSTS)
    [one] = record(engine, [PROMPT], SamplingParams(max_new_tokens=12))
    assert sorted(one.said) == ["merged/ToyModel", "merged/one"]
    assert all(said.ids.shape == (12, BEST) for said in one.said.values())


@pytest.mark.parametrize("length", [4, 20])
def test_a_short_context_says_nothing_beyond_its_end(length):
    target, draft = toys(max_length=length)
    [one] = record(engine_of(target, draft), [PROMPT], SamplingParams(max_new_tokens=30))
    known = (one.said["draft"].chances > 0).any(1)
    assert known.tolist() == [len(PROMPT) + place <= length for place in range(30)]


def test_a_transformers_draft_is_heard_as_it_speaks():
    target, draft = tiny("llama"), tiny("llama", seed=1)
    engine = engine_of(target, draft, tree="chain")
    [one] = record(engine, [PROMPT], SamplingParams(max_new_tokens=20, ignore_eos=True))
    with torch.no_grad():
        logits = draft(torch.tensor([[*PROMPT, *one.tokens]])).logits[0, len(PROMPT) - 1 : -1]
    assert one.said["draft"].ids.tolist() == logits.topk(BEST).indices.tolist()
    assert one.said["draft"].chances == pytest.approx(logits.softmax(-1).topk(BEST).values.numpy(), rel=1e-3)
    engine.close()


def test_seeds_are_the_prompts_numbers_unless_given():
    engine = engine_of(*toys())
    params = SamplingParams(max_new_tokens=8, temperature=1.0)
    first, second = record(engine, [PROMPT, PROMPT], params)
    assert first.tokens != second.tokens
    alone = engine.generate(PROMPT, dataclasses.replace(params, seed=1))
    assert second.tokens == tuple(alone.tokens)


def test_an_answer_without_tokens_is_a_recording():
    [one] = record(engine_of(*toys()), [PROMPT], SamplingParams(max_new_tokens=0))
    assert one.tokens == ()
    assert len(one.said["draft"]) == 0


def test_nothing_of_a_recording_stays_in_the_engine():
    engine = engine_of(*toys())
    record(engine, [PROMPT], SamplingParams(max_new_tokens=4))
    assert all(not level.rows for level in engine.chain.levels)


@pytest.mark.parametrize(
    ("prompts", "params", "error", "message"),
    [
        ([PROMPT], SamplingParams(n=2), ConfigError, "n must be 1, not 2"),
        ([[]], SamplingParams(), PromptError, "empty"),
        ([PROMPT], SamplingParams(logits_processors=[lambda ids, scores: scores / 0 * 0]), DecodeError, "recorded"),
    ],
)
def test_what_cannot_be_recorded_is_refused(prompts, params, error, message):
    with pytest.raises(error, match=message) as refused:
        record(engine_of(*toys()), prompts, params)
    assert "\n" not in str(refused.value)


def test_fewer_tokens_than_asked_for_are_all_there_are():
    target, draft = ToyModel(3, seed=1), ToyModel(3, seed=2)
    engine = engine_of(target, draft)
    said = heard(engine.chain.levels[1], [0, 1], [2, 0], SamplingParams())
    assert (said.chances > 0).sum(1).tolist() == [3, 3]


def test_own_work_is_counted_per_forward():
    results = [one.result for one in record(engine_of(*toys()), [PROMPT, PROMPT[::-1]], SamplingParams())]
    forwards = sum(level.forwards for result in results for level in result.stats.levels)
    drafting = sum(result.stats.levels[0].time_s for result in results)
    own = sum(result.stats.own_work_s for result in results)
    assert overhead_of(results) == pytest.approx((own - drafting) / forwards)
    assert overhead_of([]) == 0.0


def test_importing_it_imports_no_torch():
    code = "import sys, cascade.recording; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# -- files -------------------------------------------------------------------------------------------------


def test_recordings_survive_a_file(tmp_path):
    engine = engine_of(*toys())
    made = record(engine, [PROMPT, PROMPT[::-1]], SAMPLED, ["qa", "math"], question_ids=["a", 2])
    made += [*record(engine, [PROMPT], SamplingParams(max_new_tokens=0)), Recording((1,), (2, 3))]
    save_recordings(tmp_path / "r.jsonl", made)
    read = load_recordings(tmp_path / "r.jsonl")
    assert len(read) == 4
    for a, b in zip(made, read, strict=True):
        assert dataclasses.replace(a, said={}) == dataclasses.replace(b, said={})
        assert a.said.keys() == b.said.keys()
        for name, said in a.said.items():
            assert (b.said[name].ids == said.ids).all() or not len(said)
            assert b.said[name].ids.dtype == np.int64
            assert b.said[name].chances.dtype == np.float32
            assert b.said[name].chances == pytest.approx(said.chances, rel=1e-3) or not len(said)
    save_recordings(tmp_path / "again.jsonl", read)
    assert (tmp_path / "again.jsonl").read_bytes() == (tmp_path / "r.jsonl").read_bytes()


GOOD = '{"prompt":[1],"tokens":[2],"said":{"draft":{"ids":[[2,3]],"chances":[[0.5,0.25]]}}}'


@pytest.mark.parametrize(
    "bad",
    [
        "{",
        "[]",
        "7",
        '{"prompt":[1]}',
        GOOD.replace("[1]", "[]"),
        GOOD.replace("[1]", "1"),
        GOOD.replace("[1]", "[1.5]"),
        GOOD.replace("[1]", "[-1]"),
        GOOD.replace("[1]", '["a"]'),
        GOOD.replace('"tokens":[2]', '"tokens":[2,3]'),
        GOOD.replace("[[2,3]]", "[[2,-3]]"),
        GOOD.replace("[[2,3]]", "[[2]]"),
        GOOD.replace("[[2,3]]", "[[2.5,3]]"),
        GOOD.replace("[[2,3]]", "[[]]").replace("[[0.5,0.25]]", "[[]]"),
        GOOD.replace("0.25", "1.25"),
        GOOD.replace("0.25", "NaN"),
        GOOD.replace("0.25", "null"),
        GOOD.replace('{"prompt"', '{"category":1,"prompt"'),
        GOOD.replace('{"prompt"', '{"question_id":[1],"prompt"'),
        '{"prompt":[1],"tokens":[2],"said":[]}',
    ],
)
def test_a_broken_file_is_refused_with_the_line(tmp_path, bad):
    path = tmp_path / "r.jsonl"
    path.write_text(f"{GOOD}\n\n{bad}\n")
    with pytest.raises(ConfigError, match="line 3: this is no recording") as refused:
        load_recordings(path)
    assert "\n" not in str(refused.value)
    path.write_text(GOOD)
    assert len(load_recordings(path)) == 1


def test_files_that_cannot_be_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot read the recordings .*none.jsonl"):
        load_recordings(tmp_path / "none.jsonl")
    with pytest.raises(ConfigError, match="cannot write the recordings"):
        save_recordings(tmp_path, [])
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(ConfigError, match="has no recordings"):
        load_recordings(tmp_path / "empty.jsonl")


# -- synthetic ---------------------------------------------------------------------------------------------


def test_a_synthetic_draft_is_right_where_told():
    rights = np.random.default_rng(0).random(4000) < 0.7
    one = synthetic(rights, level="d", prompt=5, second_right=0.4, seed=3)
    said, tokens = one.said["d"], np.array(one.tokens)
    assert len(one.prompt) == 5
    assert ((said.ids[:, 0] == tokens) == rights).all()
    seconds = said.ids[:, 1] == tokens
    assert not seconds[rights].any()
    assert seconds[~rights].mean() == pytest.approx(0.4, abs=0.04)
    assert (said.ids[:, 0] != said.ids[:, 1]).all()
    again = synthetic(rights, level="d", prompt=5, second_right=0.4, seed=3)
    assert (again.prompt, again.tokens) == (one.prompt, one.tokens)


@pytest.mark.parametrize("share", [0.3, 0.6, 0.9])
def test_synthetic_chances_are_calibrated(share):
    rights = np.random.default_rng(1).random(20000) < share
    sure = synthetic(rights).said["draft"].chances[:, 0]
    for low in np.arange(0.1, 0.9, 0.2):
        inside = (sure >= low) & (sure < low + 0.2)
        assert rights[inside].mean() == pytest.approx(sure[inside].mean(), abs=0.05)


@pytest.mark.parametrize("rights", [np.zeros(20, bool), np.ones(20, bool), np.zeros(0, bool)])
def test_synthetic_extremes(rights):
    said = synthetic(rights).said["draft"]
    assert isinstance(said, Said)
    assert said.ids.shape == (len(rights), 2)
    assert ((said.chances > 0) & (said.chances <= 1)).all()
