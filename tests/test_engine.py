"""The round loop on toy models with exact distributions: any depth, K, batch and drafter, same text."""

from __future__ import annotations

import dataclasses

import pytest

from cascade import CascadeConfig, ConfigError, DecodeError, Engine, LevelConfig, PromptError, SamplingParams
from cascade.testing import FixedCosts, ManualClock, ScriptedDrafter, ToyModel

GREEDY = SamplingParams(max_new_tokens=40)
SAMPLED = SamplingParams(max_new_tokens=40, temperature=0.8, seed=11)
PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 5, 6, 7], [2, 2], [9, 1, 4, 4, 1]]


def costs() -> FixedCosts:
    return FixedCosts(lambda level, tokens: {"draft": 0.1}.get(level, 1.0) * (1 + 0.01 * tokens))


def build(levels, **options) -> Engine:
    return Engine(CascadeConfig(levels, **options), clock=ManualClock(), costs=costs(), check=True)


def plain(model: ToyModel, prompts, params) -> list[list[int]]:
    """The obvious twin: one token at a time, one prompt at a time, no engine."""
    import numpy as np
    import torch

    from cascade.noise import Noise
    from cascade.sampling import Sampler

    out = []
    for prompt in prompts:
        ids = list(prompt)
        sampler = Sampler(params, Noise(params.seed or 0), model.end_ids, len(prompt))
        while len(ids) - len(prompt) < params.max_new_tokens and len(ids) < (model.max_length or 1 << 30):
            token = sampler.sample(torch.from_numpy(model.logits(ids)), np.array(ids, np.int64))
            ids.append(token)
            if token in model.end_ids:
                break
        out.append(ids[len(prompt) :])
    return out


def cascade_levels(depth: int, target: ToyModel, k: int, controller: str, drafter="ngram") -> list[LevelConfig]:
    levels = [LevelConfig(drafter=drafter, k=k, controller=controller)]
    draft = ToyModel(seed=7, mix=(target, 0.7), end_ids=target.end_ids)
    if depth == 3:
        levels.append(LevelConfig(model=draft, name="draft", k=k, controller=controller))
    if depth == 1:
        levels = []
    return [*levels, LevelConfig(model=target, name="target")]


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("controller", ["fixed", "pid"])
@pytest.mark.parametrize("k", [1, 2, 5, 16])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_same_ids_as_plain_decoding(depth: int, k: int, controller: str, params: SamplingParams) -> None:
    target = ToyModel(end_ids=(31,))
    want = plain(target, PROMPTS, params)
    engine = build(cascade_levels(depth, target, k, controller))
    assert [engine.generate(p, params).tokens for p in PROMPTS] == want
    assert [r.tokens for r in engine.generate(PROMPTS, params)] == want


@pytest.mark.parametrize("kind", ["oracle", "wrong", "mixed", "empty", "raise"])
@pytest.mark.parametrize("depth", [2, 3])
def test_no_drafter_changes_the_text(kind: str, depth: int) -> None:
    target = ToyModel()
    want = plain(target, PROMPTS, SAMPLED)
    drafter = ScriptedDrafter([p + w for p, w in zip(PROMPTS, want, strict=True)], kind)
    engine = build(cascade_levels(depth, target, 4, "fixed", drafter))
    results = engine.generate(PROMPTS, SAMPLED)
    assert [r.tokens for r in results] == want
    assert not drafter.live, "every row that started has ended"
    first = results[0].stats.levels[0]
    if depth == 2 and kind == "oracle":
        assert first.accept_rate == 1.0
        assert results[0].stats.tokens_per_forward > 4
    if depth == 2 and kind == "wrong":
        assert first.accepted == 0
    if kind in ("empty", "raise"):
        assert first.accept_rate is None
    if kind == "raise":
        assert first.dropped > 0


@pytest.mark.parametrize("k", [1, 3, 8, 16])
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_copy_of_the_target_is_always_accepted(k: int, params: SamplingParams) -> None:
    copy, target = ToyModel(), ToyModel()
    engine = build(
        [LevelConfig(model=copy, name="draft", k=k, controller="fixed"), LevelConfig(model=target, name="target")]
    )
    level = engine.generate(PROMPTS[0], params).stats.levels[0]
    assert level.drafted > 0
    assert level.accept_rate == 1.0
    assert level.alpha == 1.0


def test_a_seed_decides_the_text_whatever_else_runs() -> None:
    target = ToyModel()
    alone = build(cascade_levels(3, target, 4, "pid")).generate(PROMPTS[2], SAMPLED).tokens
    engine = build(cascade_levels(2, target, 9, "fixed"), max_batch=3)
    mixed = [
        GREEDY,
        dataclasses.replace(SAMPLED, seed=5),
        SAMPLED,
        dataclasses.replace(SAMPLED, speculate=False),
        GREEDY,
    ]
    batch = engine.generate([PROMPTS[0], PROMPTS[2], PROMPTS[2], PROMPTS[2], PROMPTS[4]], mixed)
    assert batch[2].tokens == alone == batch[3].tokens
    assert batch[1].tokens != alone


def test_unseeded_requests_differ_and_the_engine_seed_fixes_their_sequence() -> None:
    params = dataclasses.replace(SAMPLED, seed=None, n=3)
    first, again, other = (
        [r.tokens for r in build([LevelConfig(model=ToyModel(), name="target")], seed=seed).generate([1, 2], params)]
        for seed in (3, 3, 4)
    )
    assert first == again != other
    assert len({tuple(tokens) for tokens in first}) == 3


def test_samples_of_one_prompt_share_its_prefill() -> None:
    target = ToyModel()
    engine = build([LevelConfig(model=target, name="target")])
    fed: list[int] = []
    forward = target.forward
    target.forward = lambda feeds: (fed.extend(len(f.tokens) for f in feeds), forward(feeds))[1]
    results = engine.generate(list(range(20)), dataclasses.replace(SAMPLED, n=4, max_new_tokens=3))
    assert len(results) == 4
    assert fed.count(20) == 1
    assert max(f for f in fed if f != 20) == 1


@pytest.mark.parametrize(
    ("n", "new", "max_batch"), [(4, 1, 8), (3, 5, 1), (5, 4, 2)], ids=["one token each", "one at a time", "two"]
)
def test_samples_share_a_prefill_whose_sample_has_ended(n: int, new: int, max_batch: int) -> None:
    prompt, params = list(range(20)), dataclasses.replace(SAMPLED, max_new_tokens=new)
    target, draft = ToyModel(), LevelConfig(model=ToyModel(), name="draft", tree="chain")
    engine = build([draft, LevelConfig(model=target, name="target")], max_batch=max_batch)
    fed: list[int] = []
    forward = target.forward
    target.forward = lambda feeds: (fed.extend(len(feed.tokens) for feed in feeds), forward(feeds))[1]
    results = engine.generate(prompt, dataclasses.replace(params, n=n))
    assert sum(count >= 20 for count in fed) == 1
    assert not engine.target.rows
    alone = build([LevelConfig(model=ToyModel(), name="target")])
    want = [one.tokens for one in alone.generate(prompt, dataclasses.replace(params, n=n))]
    assert [one.tokens for one in results] == want


@pytest.mark.parametrize("cut", [0, 1, 2, 6, 7, 30])
@pytest.mark.parametrize("k", [1, 4, 16])
def test_an_end_token_inside_a_block_ends_the_text(cut: int, k: int) -> None:
    free = plain(ToyModel(), PROMPTS[:1], GREEDY)[0]
    end = free[cut]
    want = free[: free.index(end) + 1]
    drafter = ScriptedDrafter([PROMPTS[0] + free], "oracle")
    engine = build([LevelConfig(drafter=drafter, k=k), LevelConfig(model=ToyModel(end_ids=(end,)), name="target")])
    result = engine.generate(PROMPTS[0], GREEDY)
    assert result.tokens == want
    assert result.finish_reason == "stop"
    assert len(result.origins) == len(want)
    ignoring = engine.generate(PROMPTS[0], dataclasses.replace(GREEDY, ignore_eos=True))
    assert ignoring.tokens == free
    assert ignoring.finish_reason == "length"


@pytest.mark.parametrize("limit", [0, 1, 2, 3, 6])
@pytest.mark.parametrize("k", [1, 5, 8])
def test_never_more_tokens_than_asked(limit: int, k: int) -> None:
    free = plain(ToyModel(), PROMPTS[:1], GREEDY)[0]
    engine = build(
        [LevelConfig(drafter=ScriptedDrafter([PROMPTS[0] + free]), k=k), LevelConfig(model=ToyModel(), name="target")]
    )
    result = engine.generate(PROMPTS[0], dataclasses.replace(GREEDY, max_new_tokens=limit))
    assert result.tokens == free[:limit]
    assert result.finish_reason == "length"


@pytest.mark.parametrize("length", [60, 63, 64])
@pytest.mark.parametrize("small", [None, 62, 61])
def test_the_context_limit_holds_on_every_level(length: int, small: int | None) -> None:
    """turboderp-org/exllamav2#274: look-ahead was not bounded by the cache size."""
    target = ToyModel(max_length=64)
    prompt = [i % 7 for i in range(length)]
    want = plain(target, [prompt], dataclasses.replace(GREEDY, max_new_tokens=100))[0]
    draft = ToyModel(max_length=small)
    engine = build(
        [
            LevelConfig(drafter="ngram", k=5, controller="fixed"),
            LevelConfig(model=draft, name="draft", k=5, controller="fixed"),
            LevelConfig(model=target, name="target"),
        ]
    )
    result = engine.generate(prompt, dataclasses.replace(GREEDY, max_new_tokens=100))
    assert result.tokens == want
    assert len(want) == 64 - length
    assert result.finish_reason == "length"


def test_origins_name_the_level_that_first_proposed() -> None:
    target = ToyModel()
    free = plain(target, PROMPTS[:1], GREEDY)[0]
    oracle = ScriptedDrafter([PROMPTS[0] + free], "oracle")
    engine = build(
        [
            LevelConfig(drafter=oracle, k=2, controller="fixed"),
            LevelConfig(model=ToyModel(), name="draft", k=5, controller="fixed"),
            LevelConfig(model=target, name="target"),
        ]
    )
    origins = engine.generate(PROMPTS[0], GREEDY).origins
    # The prompt's round drafts nothing. Then, per round of the target: two rounds of the draft model
    # (two tokens of the oracle, one of its own), and the target's own token.
    assert origins[:8] == [2, 0, 0, 1, 0, 0, 1, 2]


def test_a_tail_is_verified_by_the_level_above() -> None:
    target = ToyModel()
    free = plain(target, PROMPTS[:1], GREEDY)[0]
    for kind in ("oracle", "mixed", "wrong"):
        levels = [
            LevelConfig(drafter=ScriptedDrafter([PROMPTS[0] + free], kind), name="script", k=2, controller="fixed"),
            LevelConfig(model=ToyModel(), name="draft", k=3, controller="fixed", tail=True),
            LevelConfig(model=target, name="target"),
        ]
        result = build(levels).generate(PROMPTS[0], GREEDY)
        assert result.tokens == free
        assert [level.dropped for level in result.stats.levels] == [0, 0, 0], "even where no room is left for a tail"
        if kind == "oracle":
            assert result.origins[:8] == [2, 0, 0, 1, 0, 0, 2, 0]  # 3 of the draft model, a tail of 2, one own
    with pytest.raises(ConfigError, match="tail=True"):
        build([LevelConfig(model=ToyModel(), name="draft", tail=True), LevelConfig(model=target, name="target")])


def test_stats_add_up() -> None:
    target = ToyModel()
    engine = build(cascade_levels(3, target, 4, "pid"))
    result = engine.generate(PROMPTS[2], SAMPLED)
    stats = result.stats
    assert stats.new_tokens == len(result.tokens) == len(result.origins)
    assert stats.target_forwards == stats.levels[-1].forwards
    assert stats.tokens_per_forward == stats.new_tokens / stats.target_forwards
    for level in stats.levels[:-1]:
        assert 0 <= level.accepted <= level.tested
        assert level.accepted <= level.drafted
        assert level.accept_rate is None or 0 <= level.accept_rate <= 1
    assert sum(o == 2 for o in result.origins) <= stats.target_forwards
    assert stats.as_dict()["levels"][0]["name"] == "ngram"


def test_speculate_false_is_plain_decoding() -> None:
    target = ToyModel()
    engine = build(cascade_levels(3, target, 4, "pid"))
    stats = engine.generate(PROMPTS[0], dataclasses.replace(GREEDY, speculate=False)).stats
    assert stats.target_forwards == stats.new_tokens == 40
    assert stats.levels[0].drafted == stats.levels[1].forwards == 0
    assert stats.levels[0].decisions == ((0, "off", "the request asked for plain decoding"),)
    only = engine.generate(PROMPTS[0], dataclasses.replace(GREEDY, levels=["ngram"])).stats
    assert only.levels[1].forwards == 0


def test_a_stream_joins_to_the_result_and_can_be_closed() -> None:
    target = ToyModel()
    engine = build(cascade_levels(3, target, 4, "pid"))
    want = engine.generate(PROMPTS[0], SAMPLED)
    stream = engine.stream(PROMPTS[0], SAMPLED)
    chunks = list(stream)
    assert [t for c in chunks for t in c.tokens] == want.tokens == stream.result.tokens
    assert [o for c in chunks for o in c.origins] == stream.result.origins
    assert chunks[-1].finish_reason == want.finish_reason
    stream = engine.stream(PROMPTS[0], SAMPLED)
    next(stream)
    stream.close()
    assert not engine.target.rows
    assert not engine.target.source.rows


def test_a_request_that_fails_ends_alone() -> None:
    def broken(ids, scores):
        if ids.shape[1] > 6:
            raise ValueError("no more")
        return scores

    target = ToyModel()
    want = plain(target, PROMPTS, GREEDY)
    engine = build(cascade_levels(2, target, 4, "fixed"))
    params = [GREEDY, dataclasses.replace(GREEDY, logits_processors=[broken]), *[GREEDY] * 3]
    results = engine.generate(PROMPTS, params)
    assert results[1].finish_reason == "error"
    assert results[1].error == "ValueError: no more"
    assert [r.tokens for i, r in enumerate(results) if i != 1] == [w for i, w in enumerate(want) if i != 1]


def test_logits_that_are_not_numbers_fail_the_request_by_name() -> None:
    class Broken(ToyModel):
        def logits(self, prefix):
            return super().logits(prefix) * (float("nan") if prefix[-1] == 3 else 1.0)

    engine = build([LevelConfig(model=Broken(), name="target")])
    result = engine.generate([1, 2, 3], GREEDY)
    assert result.finish_reason == "error"
    assert DecodeError.__name__ in result.error


def test_processors_see_the_true_prefix_once_per_token() -> None:
    seen: list[int] = []

    def ban(ids, scores):
        seen.append(ids.shape[1])
        scores = scores.clone()
        scores[:, 5] = float("-inf")
        return scores

    target = ToyModel()
    params = dataclasses.replace(SAMPLED, logits_processors=[ban])
    free = build([LevelConfig(model=target, name="target")]).generate(PROMPTS[0], params).tokens
    assert seen == list(range(3, 43))
    seen.clear()
    drafter = ScriptedDrafter([PROMPTS[0] + free], "mixed")
    engine = build([LevelConfig(drafter=drafter, k=4, controller="fixed"), LevelConfig(model=target, name="target")])
    assert engine.generate(PROMPTS[0], params).tokens == free
    assert seen == list(range(3, 43))
    assert 5 not in free


@pytest.mark.parametrize(
    ("prompt", "word"),
    [([], "empty"), ([1, 99], "99"), ([-1], "-1"), ("text", "tokenizer"), ([0] * 65, "65 tokens")],
)
def test_bad_prompts_are_refused_in_one_line(prompt: object, word: str) -> None:
    engine = build([LevelConfig(model=ToyModel(max_length=64), name="target")])
    with pytest.raises(PromptError, match=word) as caught:
        engine.generate(prompt, GREEDY)
    assert "\n" not in str(caught.value)
    assert not engine.target.rows


def test_a_level_that_is_not_there_is_refused() -> None:
    engine = build(cascade_levels(2, ToyModel(), 4, "pid"))
    with pytest.raises(ConfigError, match="Did you mean 'ngram'"):
        engine.generate([1], dataclasses.replace(GREEDY, levels=["ngam"]))


def test_cancel_ends_one_request_and_is_harmless_afterwards() -> None:
    """vllm-project/vllm#28473: an abort between drafting and commit left negative counters."""
    target = ToyModel()
    engine = build(cascade_levels(3, target, 4, "pid"))
    stream = engine.stream(PROMPTS[0], dataclasses.replace(GREEDY, max_new_tokens=400))
    request_id = next(stream).request_id
    engine.cancel(request_id)
    engine.cancel(request_id)
    rest = list(stream)
    assert rest[-1].finish_reason == "cancelled"
    engine.cancel(request_id)
    assert not engine.scheduler.live
    assert engine.generate(PROMPTS[0], GREEDY).tokens == plain(target, PROMPTS[:1], GREEDY)[0]
