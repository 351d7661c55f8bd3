"""The sampler against its twin, against transformers' own warpers, and against its promises."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LogitsProcessorList
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from cascade.config import SamplingParams
from cascade.errors import DecodeError
from cascade.noise import Noise
from cascade.sampling import Sampler
from tests import reference

PREFIX = np.array([3, 1, 2])


def sampler(
    seed: int = 0, end_ids: tuple[int, ...] = (), prompt_length: int = 3, draft: bool = False, **params: Any
) -> Sampler:
    return Sampler(SamplingParams(**params), Noise(seed), end_ids, prompt_length, draft)


@st.composite
def coarse_logits(draw: st.DrawFn) -> list[float]:
    """Logits with many ties, as bf16 makes them, and some impossible tokens; the largest is finite."""
    grid = st.integers(-40, 40).map(lambda i: i / 4)
    logits = draw(st.lists(grid | grid | st.just(-math.inf), min_size=1, max_size=40))
    logits[draw(st.integers(0, len(logits) - 1))] = draw(grid)
    return logits


FILTERS = {
    "temperature": st.sampled_from([0.0, 1e-30, 1e-3, 0.3, 0.7, 1.0, 2.5, 100.0, 1e30]),
    "top_k": st.integers(0, 45),
    "top_p": st.sampled_from([1.0, 1e-9, 0.01, 0.2, 0.5, 0.8, 0.9, 0.95, 0.999]),
    "min_p": st.sampled_from([0.0, 0.0, 1e-6, 0.01, 0.1, 0.6, 1.0]),
}


# -- twins -------------------------------------------------------------------------------------------


@given(
    coarse_logits(), st.fixed_dictionaries(FILTERS), st.integers(-5, 2**64), st.sampled_from(["float32", "bfloat16"])
)
@settings(max_examples=300, deadline=None)
def test_sample_equals_its_twin(logits: list[float], filters: dict[str, Any], seed: int, dtype: str) -> None:
    fast = sampler(seed % 2**64, **filters)
    assert fast.sample(torch.tensor(logits, dtype=getattr(torch, dtype)), PREFIX) == reference.sample(
        logits, seed % 2**64, len(PREFIX), **filters
    )


@given(coarse_logits(), st.fixed_dictionaries(FILTERS))
@settings(max_examples=200, deadline=None)
def test_survivors_equal_their_twin(logits: list[float], filters: dict[str, Any]) -> None:
    fast = sampler(**filters)
    if fast.greedy:
        return
    ids = fast._survivors(torch.tensor(logits, dtype=torch.float64), max(logits))
    assert list(range(len(logits)) if ids is None else ids.tolist()) == reference.survivors(logits, **filters)


@pytest.mark.parametrize(
    "filters", [{}, {"top_p": 0.9}, {"top_k": 50, "top_p": 0.95}, {"top_p": 0.999}, {"min_p": 0.02}]
)
@pytest.mark.parametrize("peak", [0.0, 9.0, 25.0])
def test_equals_its_twin_at_the_size_of_a_vocabulary(filters: dict[str, Any], peak: float) -> None:
    torch.manual_seed(int(peak))
    logits = torch.randn(8_000).mul(2.5).bfloat16()
    logits[77] += peak
    scores = logits.float().tolist()
    for seed in range(2):
        fast = sampler(seed, temperature=0.8, **filters)
        assert fast.sample(logits, PREFIX) == reference.sample(scores, seed, 3, temperature=0.8, **filters)


@pytest.mark.parametrize("peak", [0.0, 4.0, 12.0])
def test_the_nucleus_is_found_behind_every_bound(peak: float) -> None:
    """From peaked to flat, with hundreds of ties: the sets that are sorted end before, at and after the nucleus."""
    torch.manual_seed(0)
    logits = torch.randn(3_000).mul(2).bfloat16()
    logits[5] += peak
    scores = logits.float().tolist()
    for top_p in (0.3, 0.6, 0.8, 0.9, 0.97, 0.99, 0.995, 0.999, 0.9999):
        ids = sampler(temperature=1.0, top_p=top_p)._survivors(logits.float(), max(scores))
        assert ids is not None
        assert ids.tolist() == reference.survivors(scores, 1.0, top_p=top_p)


@given(coarse_logits(), st.lists(st.integers(0, 60), min_size=1, max_size=30), st.sampled_from([0.5, 1.1, 1.3, 7.0]))
@settings(max_examples=100, deadline=None)
def test_repetition_penalty_counts_an_id_once(logits: list[float], tokens: list[int], penalty: float) -> None:
    fast = sampler(repetition_penalty=penalty)
    scores = fast._processed(torch.tensor(logits), np.array(tokens))
    assert scores.tolist() == reference.penalised(logits, tokens, penalty)


@given(coarse_logits(), st.sampled_from([0.0, 0.5, 2.0]), st.integers(0, 45))
@settings(max_examples=100, deadline=None)
def test_logprobs_equal_their_twin(logits: list[float], temperature: float, n: int) -> None:
    fast = sampler(temperature=temperature, logprobs=n)
    token = fast.sample(torch.tensor(logits), PREFIX)
    twin = reference.logprobs(logits, temperature or 1.0, token, n)
    assert fast.logprobs == pytest.approx(twin, abs=1e-9)
    assert list(fast.logprobs or {}) == list(twin)


# -- transformers ------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.7])
@pytest.mark.parametrize(
    "filters", [{"top_k": 7}, {"top_p": 0.8}, {"min_p": 0.05}, {"top_k": 40, "top_p": 0.9, "min_p": 0.02}]
)
def test_survivors_are_those_of_transformers(temperature: float, filters: dict[str, Any]) -> None:
    warpers = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
    if "top_k" in filters:
        warpers.append(TopKLogitsWarper(filters["top_k"]))
    if "top_p" in filters:
        warpers.append(TopPLogitsWarper(filters["top_p"]))
    if "min_p" in filters:
        warpers.append(MinPLogitsWarper(filters["min_p"]))
    for seed in range(20):
        logits = torch.randn(500, generator=torch.Generator().manual_seed(seed)) * 3
        theirs = warpers(torch.from_numpy(PREFIX)[None], logits[None].clone())[0].softmax(-1)
        ours = sampler(temperature=temperature, **filters).probabilities(logits, PREFIX)
        assert torch.equal(ours > 0, theirs > 0)
        torch.testing.assert_close(ours, theirs.double(), atol=1e-6, rtol=1e-5)


def test_top_k_keeps_ties_as_transformers_does() -> None:
    logits = torch.tensor([1.0, 2.0, 1.0, 3.0, 1.0, 0.0])
    theirs = TopKLogitsWarper(3)(torch.from_numpy(PREFIX)[None], logits[None])[0].isfinite()
    assert torch.equal(sampler(temperature=1.0, top_k=3).probabilities(logits, PREFIX) > 0, theirs)


def test_repetition_penalty_is_that_of_transformers() -> None:
    logits, tokens = torch.randn(50, generator=torch.Generator().manual_seed(1)), np.array([4, 4, 9, 30, 4])
    theirs = RepetitionPenaltyLogitsProcessor(1.3)(torch.from_numpy(tokens)[None], logits[None].clone())[0]
    assert torch.equal(sampler(repetition_penalty=1.3)._processed(logits, tokens), theirs)


# -- promises ----------------------------------------------------------------------------------------


def test_samples_follow_the_filtered_distribution() -> None:
    logits = torch.tensor([2.0, 1.5, 1.5, 0.5, 0.0, -1.0, -math.inf])
    params = SamplingParams(temperature=0.9, top_p=0.9)
    p = Sampler(params, Noise(0), (), 3).probabilities(logits, PREFIX).numpy()
    n, counts = 5_000, np.zeros(len(logits))
    for seed in range(n):
        counts[Sampler(params, Noise(seed), (), 3).sample(logits, PREFIX)] += 1
    assert (counts[p == 0] == 0).all()
    expected = n * p[p > 0]
    # 3 degrees of freedom: true randomness fails with probability 1e-6.
    assert len(expected) == 4
    assert ((counts[p > 0] - expected) ** 2 / expected).sum() < 30.7


def test_the_same_noise_and_logits_choose_the_same_token_on_every_level() -> None:
    for seed in range(20):
        logits = torch.randn(300, generator=torch.Generator().manual_seed(seed))
        target, draft = (sampler(seed, temperature=1.0, top_p=0.95, draft=draft) for draft in (False, True))
        assert target.sample(logits, PREFIX) == draft.sample(logits, PREFIX)
        # Nor do other dtypes of the same numbers matter.
        assert target.sample(logits.bfloat16(), PREFIX) == draft.sample(logits.bfloat16().double(), PREFIX)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_leaves_its_arguments_alone(dtype: torch.dtype) -> None:
    def spoil(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        ids.fill_(0)
        return scores.fill_(0)

    logits, tokens = torch.randn(20).to(dtype), PREFIX.copy()
    before = logits.clone()
    for params in ({}, {"top_p": 0.5}, {"logits_processors": [spoil]}, {"logprobs": 2}):
        sampler(temperature=1.0, min_new_tokens=2, end_ids=(0,), **params).sample(logits, tokens)
        sampler(temperature=1.0, repetition_penalty=2.0, **params).sample(logits, tokens)
        sampler(temperature=1.0, **params).sample(logits, tokens)
    assert torch.equal(logits, before)
    assert tokens.tolist() == PREFIX.tolist()
    kept = torch.zeros(1, 20)  # a processor's own
    sampler(logits_processors=[lambda ids, scores: kept], end_ids=(0,), min_new_tokens=2).sample(logits, tokens)
    assert kept.isfinite().all()


def test_works_on_inference_tensors_and_on_tensors_with_gradients() -> None:
    with torch.inference_mode():
        frozen = torch.randn(20)
    for logits in (frozen, torch.randn(20, requires_grad=True)):
        sampler(temperature=1.0, top_p=0.9, repetition_penalty=1.1, logprobs=1).sample(logits, PREFIX)


def test_processors_see_the_true_prefix_once_per_token_and_drafts_leave_them_out() -> None:
    seen: list[list[list[int]]] = []

    def only_five(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        assert ids.dtype == torch.long
        assert scores.shape == (1, 8)
        seen.append(ids.tolist())
        out = torch.full_like(scores, -math.inf)
        out[0, 5] = 0
        return out

    logits = torch.arange(8.0)
    assert sampler(logits_processors=[only_five]).sample(logits, PREFIX) == 5
    assert sampler(logits_processors=[only_five], temperature=1.0, top_p=0.5).sample(logits, PREFIX) == 5
    assert seen == [[[3, 1, 2]]] * 2
    assert sampler(logits_processors=[only_five], draft=True).sample(logits, PREFIX) == 7
    assert len(seen) == 2


@pytest.mark.parametrize("result", [None, torch.zeros(8), torch.zeros(1, 7)])
def test_a_processor_that_returns_something_else_is_named(result: object) -> None:
    def broken(ids: torch.Tensor, scores: torch.Tensor) -> object:
        return result

    with pytest.raises(DecodeError, match=r"logits processor broken must return scores \(1, 8\)"):
        sampler(logits_processors=[broken]).sample(torch.zeros(8), PREFIX)


def test_end_tokens_are_impossible_before_min_new_tokens() -> None:
    logits = torch.tensor([0.0, 5.0, 4.0, 3.0])
    params: dict[str, Any] = {"end_ids": (1, 99), "stop_token_ids": [2], "min_new_tokens": 2}
    assert [sampler(prompt_length=n, **params).sample(logits, PREFIX) for n in (3, 2, 1)] == [3, 3, 1]
    assert sampler(ignore_eos=True, **params).sample(logits, PREFIX) == 1
    assert sampler(min_new_tokens=1).sample(logits, PREFIX) == 1  # no end tokens at all


def test_ends() -> None:
    assert [sampler(end_ids=(1,), stop_token_ids=[2]).ends(t) for t in range(4)] == [False, True, True, False]
    assert [sampler(end_ids=(1,), stop_token_ids=[2], ignore_eos=True).ends(t) for t in (1, 2)] == [False, True]


@pytest.mark.parametrize(
    ("params", "greedy", "plain"),
    [
        ({}, True, True),
        ({"temperature": 1.0, "top_k": 1}, True, True),
        ({"top_p": 0.5, "min_p": 0.5}, True, True),
        ({"temperature": 1.0}, False, False),
        ({"repetition_penalty": 1.1}, True, False),
        ({"min_new_tokens": 1}, True, False),
        ({"logprobs": 0}, True, False),
        ({"logits_processors": [lambda ids, scores: scores]}, True, False),
    ],
)
def test_greedy_and_plain(params: dict[str, Any], greedy: bool, plain: bool) -> None:
    assert (sampler(**params).greedy, sampler(**params).plain) == (greedy, plain)
    # A draft has no use for logprobs and processors.
    assert sampler(draft=True, **params).plain == (plain or "logprobs" in params or "logits_processors" in params)


@pytest.mark.parametrize("params", [{}, {"temperature": 1.0}, {"temperature": 1.0, "top_k": 2, "top_p": 0.5}])
def test_logits_that_are_not_numbers_are_an_error(params: dict[str, Any]) -> None:
    for bad in (math.nan, math.inf):
        for dtype in (torch.bfloat16, torch.float32, torch.float64):
            for place in (0, 499):
                logits = torch.zeros(500, dtype=dtype)
                logits[place] = bad
                with pytest.raises(DecodeError, match="logits are not numbers"):
                    sampler(**params).sample(logits, PREFIX)
    with pytest.raises(DecodeError, match="no token is possible"):
        sampler(**params).sample(torch.full((5,), -math.inf), PREFIX)


def test_greedy_takes_the_lowest_id_of_equals() -> None:
    logits = torch.zeros(1000)
    logits[[400, 700]] = 1.0
    assert sampler().sample(logits, PREFIX) == 400
    assert sampler(temperature=1.0, top_k=1).sample(logits, PREFIX) == 400
    assert sampler().probabilities(logits, PREFIX).argmax() == 400


def test_logprobs_are_of_the_processed_scores() -> None:
    logits = torch.tensor([1.0, 3.0, 2.0, 0.0])
    fast = sampler(temperature=0.5, top_k=2, logprobs=1, end_ids=(1,), min_new_tokens=1)
    token = fast.sample(logits, PREFIX)
    expected = torch.tensor([2.0, -math.inf, 4.0, 0.0]).log_softmax(0)
    assert fast.logprobs == pytest.approx({i: float(expected[i]) for i in {2, token}})
    assert sampler(logprobs=0).logprobs is None
    draft = sampler(logprobs=2, draft=True)
    draft.sample(logits, PREFIX)
    assert draft.logprobs is None
