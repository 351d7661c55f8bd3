"""Whatever is drawn, what comes out is plain decoding: models, prompts, parameters, drafters, K, depth, batch, rule.

Each example is compared with two references: the same request alone on an engine without a cascade, and the
slow twin in `tests/twin.py`, which knows nothing of engines. "ci" runs 2,000 examples over all tests here, the
same ones every time; HYPOTHESIS_PROFILE=long looks for new ones, twenty times as many.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cascade import Engine, Result, SamplingParams
from tests import reference, strategies, twin
from tests.strategies import ALWAYS, DRAWN, LAZY, LOSSLESS, NEVER, OFTEN, SHAPES, Case, cases, plainly, take_calls
from tests.twin import Outcome

EACH = settings(max_examples=settings.default.max_examples * 154 // 100)  # thirteen tests of 154 in "ci"
SAMPLED = (0.3, 0.7, 1.0, 1.5)
REPLACEMENT = "\ufffd"


# -- what is compared -----------------------------------------------------------------------------------


def same(found: Result, want: Outcome, params: SamplingParams) -> None:
    """The text, how it ended, and what was reported of each token."""
    assert found.tokens == want.tokens
    assert found.text == want.text
    assert found.finish_reason == want.finish_reason
    assert (found.error or "").partition(":")[0] == (want.error or "")
    assert "\n" not in (found.error or "")
    if params.logprobs is None:
        assert found.logprobs is None
        return
    assert found.logprobs is not None
    assert [list(one) for one in found.logprobs] == [list(one) for one in want.logprobs]
    for one, other in zip(found.logprobs, want.logprobs, strict=True):
        assert all(math.isclose(one[i], other[i], rel_tol=1e-12, abs_tol=1e-9) for i in one)


def consistent(result: Result, params: SamplingParams, tails: bool) -> None:
    """Figures that add up, for one request."""
    stats, count, top = result.stats, len(result.tokens), len(result.stats.levels) - 1
    failed = result.finish_reason == "error"
    assert stats.new_tokens == count == len(result.origins)
    assert result.logprobs is None or len(result.logprobs) == count
    assert stats.target_forwards == stats.levels[top].forwards
    assert stats.target_forwards <= count + failed
    assert stats.tokens_per_forward == (count / stats.target_forwards if stats.target_forwards else 0.0)
    assert set(result.origins) <= set(range(top + 1))
    assert result.origins.count(top) <= stats.target_forwards, "one token of its own in a round, at most"
    for i, level in enumerate(stats.levels):
        assert 0 <= level.accepted <= level.tested <= level.drafted
        assert level.accept_rate == (level.accepted / level.drafted if level.drafted else None)
        assert level.alpha == (level.accepted / level.tested if level.tested else None)
        assert 0 <= level.bypassed_rounds <= level.asks
        if i < top and not tails:  # what a tail hands on is judged as the level's above
            assert result.origins.count(i) <= (level.accepted if level.forwards == 0 else level.drafted)
        used = params.speculate and (params.levels is None or level.name in params.levels)
        if i < top and not used:
            assert level.drafted == 0
            assert i not in result.origins
    if not params.speculate:
        assert stats.target_forwards == count + (failed and count < params.max_new_tokens)


def nothing_left(engine: Engine) -> None:
    assert not engine.scheduler.live
    assert all(not level.rows for level in engine.chain.levels)
    assert all(not governor.rows for governor in engine.chain.governors)


def check(case: Case) -> None:
    """A case as one batch, and each of its prompts alone without speculation, against the twin."""
    engine = case.engine()
    results = engine.generate(case.prompts, case.params)
    assert take_calls(case.params) == case.calls, "processors and criteria: once per token, on its own prefix"
    nothing_left(engine)
    rest = list(results)
    tails = any(level.tail for level in case.levels)
    for prompt, params, wanted in zip(case.prompts, case.params, case.wanted, strict=True):
        mine, rest = rest[: params.n], rest[params.n :]
        lonely = case.alone().generate(prompt, plainly(params))
        for found, plain, want in zip(mine, [lonely] if params.n == 1 else lonely, wanted, strict=True):
            same(plain, want, params)
            consistent(plain, plainly(params), tails=False)
            same(found, want, params)
            consistent(found, params, tails)
            assert found.error == plain.error
            assert not case.flawless or not any(level.dropped for level in found.stats.levels)
    assert rest == []
    assert take_calls(case.params) == case.calls


def plausible(result: Result, case: Case, prompt: list[int], params: SamplingParams) -> None:
    """A text that plain decoding could have come to: each token possible, reported and, if it is the last, an end."""
    target, limits = case.target, [case.config.get("max_length"), case.target.max_length]
    limit = min([limit for limit in limits if limit is not None] + [len(prompt) + params.max_new_tokens])
    ends = {*params.stop_token_ids, *(() if params.ignore_eos else target.end_ids)}
    ids, reason = list(prompt), "length"
    for i, token in enumerate(result.tokens):
        assert reason == "length", "nothing comes after the end"
        scores = twin.processed(target.logits(ids), ids, params, [])
        if early := i < params.min_new_tokens:
            scores = [-math.inf if one in ends else score for one, score in enumerate(scores)]
        kept = reference.survivors(scores, params.temperature, params.top_k, params.top_p, params.min_p)
        assert token in kept
        assert scores[token] > -math.inf
        if params.logprobs is not None:
            want = reference.logprobs(scores, params.temperature, token, params.logprobs)
            found = result.logprobs[i]
            assert list(found) == list(want)
            assert all(math.isclose(found[one], want[one], rel_tol=1e-12, abs_tol=1e-9) for one in want)
        ids.append(token)
        text, stopped = twin.cut(strategies.decode(result.tokens[: i + 1]), params.stop)
        reason = "stop" if stopped or (token in ends and not early) else "length"
    assert (result.finish_reason, result.error) == (reason, None)
    assert reason == "stop" or len(ids) == max(limit, len(prompt))
    assert result.text == (text if result.tokens else "")


# -- the properties -------------------------------------------------------------------------------------


@EACH
@given(cases())
def test_anything(case: Case) -> None:
    check(case)


@EACH
@given(cases(rules=LOSSLESS, temperatures=(0.0,), models=(0, 3)))
def test_greedy_text_under_every_lossless_rule(case: Case) -> None:
    check(case)


@EACH
@given(cases(temperatures=SAMPLED, leaves=("none", "ngram"), models=(1, 2), n=(1, 2, 3), rules=("coupled",)))
def test_sampled_text_of_draft_models(case: Case) -> None:
    check(case)


@EACH
@given(cases(models=(2, 3), rows=(1, 1)))
def test_deep_cascades(case: Case) -> None:
    check(case)


@EACH
@given(cases(leaves=("trees",), models=(0, 1)))
def test_trees(case: Case) -> None:
    check(case)


@EACH
@given(cases(leaves=("none", "ngram", "merged"), models=(1, 2), shapes=SHAPES[1:], rules=("coupled",)))
def test_trees_of_draft_models(case: Case) -> None:
    check(case)


@EACH
@given(cases(leaves=("merged",), models=(0, 1)))
def test_merged_drafters(case: Case) -> None:
    check(case)


@EACH
@given(cases(rules=DRAWN, drawn=True, temperatures=SAMPLED, processors=NEVER, models=(0, 2), n=(1, 1, 2)))
def test_sampled_text_under_the_other_rules(case: Case) -> None:
    """Its distribution is for `test_rules_engine.py`; here each text must be possible, and the same once more."""
    results, again = (case.engine().generate(case.prompts, case.params) for _ in range(2))
    assert [(one.tokens, one.origins) for one in results] == [(one.tokens, one.origins) for one in again]
    requests = [(prompt, params) for prompt, params in zip(case.prompts, case.params, strict=True)]
    every = [request for request in requests for _ in range(request[1].n)]
    for found, (prompt, params) in zip(results, every, strict=True):
        plausible(found, case, prompt, params)
        consistent(found, params, tails=any(level.tail for level in case.levels))
        assert not case.flawless or not any(level.dropped for level in found.stats.levels)


@EACH
@given(cases(stops=ALWAYS, leaves=("oracle", "mixed", "ngram", "trees"), models=(0, 1)))
def test_stop_strings(case: Case) -> None:
    check(case)


@EACH
@given(cases(ends=ALWAYS, leaves=("oracle", "mixed", "trees"), models=(0, 1)))
def test_ends_and_limits(case: Case) -> None:
    check(case)


@EACH
@given(cases(processors=ALWAYS, leaves=("oracle", "mixed", "ngram", "trees"), models=(0, 1), rules=LAZY))
def test_processors_and_criteria(case: Case) -> None:
    check(case)


@EACH
@given(cases(rows=(3, 5), models=(0, 1), n=(1, 1, 2)), st.lists(st.sampled_from(["id", "empty", "long"]), max_size=2))
def test_mixed_batches(case: Case, spoilt: list[str]) -> None:
    """Every row with parameters of its own; prompts that cannot be used end alone."""
    check(case)
    engine = case.engine()
    bad = {"id": [1, case.target.vocab_size], "empty": [], "long": [1] * 99}
    if spoilt and (engine.max_length is not None or "long" not in spoilt):
        prompts = [*case.prompts, *(bad[kind] for kind in spoilt)]
        plain = SamplingParams(max_new_tokens=3)
        results = engine.generate(prompts, [*case.params, *[plain] * len(spoilt)])
        take_calls(case.params)
        for result in results[-len(spoilt) :]:
            assert (result.finish_reason, result.tokens, result.text) == ("error", [], "")
            assert result.error
        every = [(params, want) for params, row in zip(case.params, case.wanted, strict=True) for want in row]
        for found, (params, want) in zip(results, every, strict=False):
            same(found, want, params)
        nothing_left(engine)


@EACH
@given(cases(rows=(1, 4), models=(0, 1), n=(1,), stops=OFTEN), st.data())
def test_streams_side_by_side(case: Case, data: st.DataObject) -> None:
    """Streams of one engine, read in any order, some cancelled on the way."""
    engine = case.engine()
    streams = [engine.stream(prompt, params) for prompt, params in zip(case.prompts, case.params, strict=True)]
    chunks: list[list[Any]] = [[] for _ in streams]
    cancelled = set()
    going = list(range(len(streams)))
    while going:
        i = data.draw(st.sampled_from(going))
        chunk = next(streams[i], None)
        if chunk is None:
            going.remove(i)
            continue
        chunks[i].append(chunk)
        if len(chunks[i]) == 2 and i % 2 and data.draw(st.booleans()):
            engine.cancel(chunk.request_id)
            cancelled.add(i)
    for i, (stream, seen) in enumerate(zip(streams, chunks, strict=True)):
        params, [want] = case.params[i], case.wanted[i]
        result = stream.result
        assert result is not None
        assert "".join(chunk.text for chunk in seen) == result.text
        assert [t for chunk in seen for t in chunk.tokens] == result.tokens
        assert [o for chunk in seen for o in chunk.origins] == result.origins
        assert [chunk.finish_reason for chunk in seen] == [None] * (len(seen) - 1) + [result.finish_reason]
        whole = strategies.decode(result.tokens)
        assert REPLACEMENT in whole or not any(REPLACEMENT in chunk.text for chunk in seen)
        if i in cancelled and result.finish_reason == "cancelled":
            assert result.tokens == want.tokens[: len(result.tokens)]
            assert result.text == twin.cut(whole, params.stop)[0]
        else:
            same(result, want, params)
        consistent(result, params, tails=any(level.tail for level in case.levels))
    nothing_left(engine)


@pytest.mark.parametrize("sample", [0, 1, 5])
def test_the_twin_counts_samples_as_the_engine_does(sample: int) -> None:
    """One seed, several samples: the twin's seeds are derived by themselves, so they must agree."""
    target = strategies.Reader(16, seed=3)
    params = SamplingParams(max_new_tokens=6, temperature=1.0, seed=2**64 - 1, n=sample + 1)
    case = Case(target, [[1, 2]], [params], {}, ("none", 0), [], {}, {})
    found = case.engine().generate([[1, 2]], [dataclasses.replace(params, n=6)])
    assert found[sample].tokens == twin.plain(target, [1, 2], params, sample).tokens
