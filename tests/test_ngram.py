"""The n-gram drafter against a brute-force scan, while texts grow, are guessed at and rewound."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cascade.config import SamplingParams
from cascade.draft import Ask, Context
from cascade.errors import ConfigError
from cascade.noise import Noise
from drafters import ngram
from drafters.ngram import NgramDrafter
from tests import reference

PARAMS, NOISE = SamplingParams(), Noise(0)


def ask(tokens: Any, want: int = 4, cap: int = 100, committed: int | None = None, row: int = 0) -> Ask:
    return Ask(Context(row, tokens, committed), want, cap, PARAMS, NOISE)


def propose(drafter: NgramDrafter, tokens: Any, want: int = 4, committed: int | None = None, row: int = 0) -> list[int]:
    (draft,) = drafter.propose([ask(tokens, want, committed=committed, row=row)])
    assert draft.parents is None
    assert draft.q is None
    return list(draft.tokens)


# -- the twin ----------------------------------------------------------------------------------------

TOKENS = st.lists(st.integers(0, 2), max_size=12)
STEPS = st.tuples(
    st.integers(0, 1),  # row
    st.one_of(st.just(0), st.just(0), st.just(0), st.integers(0, 200)),  # tokens to rewind first
    TOKENS,  # committed next
    st.lists(st.integers(0, 2), max_size=3),  # tentative for this one call
    st.integers(1, 6),  # want
)


@given(st.integers(1, 3), st.integers(0, 3), st.lists(TOKENS, min_size=2, max_size=2), st.lists(STEPS, max_size=25))
@settings(max_examples=200, deadline=None)
def test_equals_its_twin(n_min: int, more: int, prompts: list[list[int]], steps: list[Any]) -> None:
    drafter, texts = NgramDrafter(n_min, n_min + more), [list(prompt) for prompt in prompts]
    for row, rewind, committed, tentative, want in steps:
        if rewind:
            del texts[row][max(len(texts[row]) - rewind, 0) :]
            assert propose(drafter, texts[row], want, row=row) == reference.ngram_continuation(
                texts[row], len(texts[row]), n_min, n_min + more, want
            )
        texts[row] += committed
        known = texts[row] + tentative
        twin = reference.ngram_continuation(known, len(texts[row]), n_min, n_min + more, want)
        assert propose(drafter, known, want, committed=len(texts[row]), row=row) == twin


def test_equals_its_twin_while_the_table_grows() -> None:
    rng = np.random.default_rng(0)
    text, drafter, length, matched = rng.integers(0, 12, 3000), NgramDrafter(), 1, 0
    while length < len(text):
        drafted = propose(drafter, text[:length])
        assert drafted == reference.ngram_continuation(text[:length].tolist(), length, 2, 4, 4)
        matched += len(drafted) > 0
        length += int(rng.integers(1, 12))
    assert matched > 300


@given(TOKENS, TOKENS, TOKENS)
@settings(max_examples=100, deadline=None)
def test_a_rewind_that_nobody_saw_costs_matches_but_proposes_nothing_foreign(
    first: list[int], second: list[int], third: list[int]
) -> None:
    """The text differs far back, the last tokens do not: the index is stale and cannot know."""
    drafter, same = NgramDrafter(), [1] * ngram._TAIL
    text = [*second, *same]
    propose(drafter, [*(token + 3 for token in second), *same])
    text += first + third
    drafted = propose(drafter, text)
    assert all(token in text for token in drafted)


# -- what it promises --------------------------------------------------------------------------------


def test_continues_a_repetition_to_any_length() -> None:
    assert propose(NgramDrafter(), [7, 8, 9, 7, 8, 9, 7], want=10) == [8, 9, 7, 8, 9, 7, 8, 9, 7, 8]
    assert propose(NgramDrafter(1, 1), [5, 5], want=3) == [5, 5, 5]


def test_the_longest_match_wins_and_of_equally_long_ones_the_latest() -> None:
    assert propose(NgramDrafter(1, 3), [1, 2, 3, 40, 9, 3, 50, 1, 2, 3], want=1) == [40]
    assert propose(NgramDrafter(1, 3), [1, 2, 3, 40, 1, 2, 3, 50, 1, 2, 3], want=1) == [50]
    assert propose(NgramDrafter(2, 3), [3, 40, 9, 3], want=1) == []


def test_tentative_tokens_are_matched_but_never_stored() -> None:
    drafter = NgramDrafter(1, 2)
    assert propose(drafter, [1, 2, 3, 1], committed=3) == [2, 3, 1, 2]
    # 8 -> 9 was only a guess: nothing follows the committed 8.
    assert propose(drafter, [1, 2, 3, 8, 9, 8], committed=4) == []
    assert propose(drafter, [1, 2, 3, 8, 7, 8], committed=5) == [7, 8, 7, 8]


def test_what_is_no_longer_committed_is_forgotten() -> None:
    drafter, text = NgramDrafter(), [1, 2, 3, 4, 5, 3, 4]
    assert propose(drafter, text, want=1) == [5]
    assert propose(drafter, text, want=1, committed=3) == []
    assert propose(drafter, text, want=1, committed=5) == [5]


@pytest.mark.parametrize("tokens", [[], [5], [5, 6]])
def test_short_contexts_match_nothing(tokens: list[int]) -> None:
    assert propose(NgramDrafter(), tokens) == []


def test_want_and_cap() -> None:
    text = [1, 2, 3, 1, 2]
    drafts = NgramDrafter().propose([ask(text, 5, 3), ask(text, 0, 3), ask(text, 3, 0), ask(text, 2, 9)])
    assert [list(draft.tokens) for draft in drafts] == [[3, 1, 2], [], [], [3, 1]]


def test_large_ids() -> None:
    big = 2**31
    assert propose(NgramDrafter(), [big, big - 1, 7, big, big - 1], want=2) == [7, big]


def test_rows_do_not_see_each_other() -> None:
    drafter = NgramDrafter()
    asks = [ask([1, 2, 3, 1, 2], row=4), ask([1, 2, 9, 1, 2], row=5), ask([1, 2], row=6)]
    assert [list(draft.tokens)[:1] for draft in drafter.propose(asks)] == [[3], [9], []]


def test_a_number_that_is_used_again_starts_afresh() -> None:
    drafter = NgramDrafter()
    drafter.start(1, PARAMS)
    assert propose(drafter, [1, 2, 3, 1, 2], row=1)
    drafter.end(1)
    assert not drafter._rows
    assert propose(drafter, [1, 2], row=1) == []
    # Even unannounced, and longer than before.
    assert propose(drafter, [6, 7, 8, 9, 9, 6, 7], row=1, want=1) == [8]
    assert propose(drafter, [4, 5, 8, 9, 9, 6, 7, 1, 4, 5], row=1, want=1) == [8]
    drafter.start(1, PARAMS)
    assert not drafter._rows


def test_what_the_table_says_is_checked_against_the_text() -> None:
    drafter = NgramDrafter()
    text = [1, 2, 3, 4, 5, 6, 7, 8, 1, 2]
    assert propose(drafter, text, want=1) == [3]
    index = drafter._rows[0]
    index.ends[index.ends > 0] = 5  # as if every hash collided
    assert propose(drafter, text, want=1) == []
    index.ends[index.ends > 0] = 10**6
    assert propose(drafter, text, want=1) == []


@pytest.mark.parametrize("bounds", [(0, 4), (3, 2), (2, 2.5), (True, 4), ("2", 4)])
def test_refuses_bounds_that_make_no_sense(bounds: Any) -> None:
    with pytest.raises(ConfigError, match=r"ngram: n_m"):
        NgramDrafter(*bounds)
