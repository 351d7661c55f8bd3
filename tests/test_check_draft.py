"""What is refused about a draft, in which words, and what comes of one that is in order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from cascade.draft import Draft, first_path
from cascade.draft_checks import TOLERATED, check_draft
from cascade.errors import DraftError
from tests import reference

VOCAB = 8
BUSHY = [-1, 0, 0, -1, 3, 1]  # node 5 lies below node 1: depth first is 0 1 5 2 3 4


def q_of(tokens: Sequence[int], vocab: int = VOCAB) -> np.ndarray:
    """A distribution per token, float32 [N, V], that likes it and differs from node to node."""
    rows = np.random.default_rng(len(tokens)).random((len(tokens), vocab)).astype(np.float32)
    rows[np.arange(len(tokens)), list(tokens)] += 1
    return rows / rows.sum(1, keepdims=True)


def check(draft: Draft, cap: int = 10, nodes: int | None = 16, needs_q: bool = True) -> Draft:
    return check_draft(draft, cap, VOCAB, nodes, needs_q)


def refused(draft: Draft, message: str, **options: Any) -> None:
    with pytest.raises(DraftError) as caught:
        check(draft, **options)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 120


# -- what is refused ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "tokens", [[1.0, 2.0], [1, "2"], ["a"], [None], "ab", 5, None, [[1, 2]], np.array([0.5]), torch.ones(2)]
)
def test_tokens_are_integers(tokens: Any) -> None:
    refused(Draft(tokens), "a draft's tokens must be integers, not ")


@pytest.mark.parametrize("bad", [-1, VOCAB, 10**6, 2**70, -(2**70)])
@pytest.mark.parametrize("place", [0, 2])
def test_ids_are_of_the_vocabulary(bad: int, place: int) -> None:
    tokens = [1, 2, 3]
    tokens[place] = bad
    refused(Draft(tokens), f"a draft has token id {bad}, outside the vocabulary of {VOCAB}")
    refused(Draft(tokens), f"token id {bad},", cap=1)  # even where it would be cut: who says such a thing is broken
    refused(Draft(tokens, [-1, -1, 0]), f"token id {bad},")


@pytest.mark.parametrize("parents", [[-1.0, 0.0], ["x", "y"], [None, 0], 7, np.array([-1.0, np.nan])])
def test_parents_are_integers(parents: Any) -> None:
    refused(Draft([1, 2], parents), "a draft's parents must be integers, not ")


@pytest.mark.parametrize("parents", [[], [-1], [-1, 0, 1]])
def test_there_are_as_many_parents_as_tokens(parents: list[int]) -> None:
    refused(Draft([1, 2], parents), f"a draft has 2 tokens but {len(parents)} parents")


@pytest.mark.parametrize(
    ("parents", "message"),
    [
        ([-2, 0, 1], "a draft tree has 3 nodes, and none is -2, the parent of node 0"),
        ([-1, 0, 3], "a draft tree has 3 nodes, and none is 3, the parent of node 2"),
        ([-1, 2**70, 0], f"a draft tree has 3 nodes, and none is {2**70}, the parent of node 1"),
        ([0, -1, -1], "a draft tree's parents must come before their children, not 0 before 0"),
        ([-1, 2, 1], "a draft tree's parents must come before their children, not 2 before 1"),
        ([1, 0, -1], "a draft tree's parents must come before their children, not 1 before 0"),
        ([2, 0, 1], "a draft tree's parents must come before their children, not 2 before 0"),
    ],
)
def test_parents_come_before_their_children(parents: list[int], message: str) -> None:
    refused(Draft([1, 2, 3], parents), message)


def test_a_tree_keeps_its_budget_and_a_chain_has_none() -> None:
    refused(Draft([1, 2, 3], [-1, -1, 0]), "a draft tree has 3 nodes, and the budget is 2", nodes=2)
    assert len(check(Draft([1, 2, 3], [-1, -1, 0]), nodes=3)) == 3
    assert len(check(Draft([1] * 9, [-1] * 9), nodes=None)) == 9
    for chain in (Draft([1, 2, 3]), Draft([1, 2, 3], [-1, 0, 1])):
        assert check(chain, nodes=1).tokens == [1, 2, 3]


@pytest.mark.parametrize(
    ("field", "what"), [("origin", "origins"), ("chances", "chances"), ("by", "proposers"), ("q", "rows of q")]
)
@pytest.mark.parametrize("count", [0, 1, 3])
def test_what_belongs_to_nodes_is_there_for_each(field: str, what: str, count: int) -> None:
    values = q_of([1] * count) if field == "q" else [1] * count
    for parents in (None, [-1, -1]):
        refused(Draft([1, 2], parents, **{field: values}), f"a draft has 2 tokens but {count} {what}")


@pytest.mark.parametrize("chance", [-0.01, 1.01, float("nan"), float("inf"), -float("inf")])
def test_chances_are_probabilities(chance: float) -> None:
    refused(Draft([1, 2], chances=[0.5, chance]), "a draft's chances must be probabilities")


def altered(**changes: float) -> np.ndarray:
    """A q of tokens 1, 2 whose second row has other values: `t3=0.5` is that of token 3."""
    q = np.zeros((2, VOCAB))
    q[0, 1] = q[1, 2] = 1.0
    for name, value in changes.items():
        q[1, int(name[1:])] = value
    return q


@pytest.mark.parametrize(
    ("q", "message"),
    [
        (altered(t2=0.0), "a draft's q is no distribution: it sums to 0, least 0"),
        (altered(t2=0.9), "a draft's q is no distribution: it sums to 0.9, least 0"),
        (altered(t3=0.01), "a draft's q is no distribution: it sums to 1.01, least 0"),
        (altered(t2=1.5, t3=-0.5), "a draft's q is no distribution: it sums to 1, least -0.5"),
        (altered(t5=np.nan), "a draft's q is no distribution: it sums to nan"),
        (altered(t5=np.inf), "a draft's q is no distribution: it sums to inf"),
        (altered(t5=-np.inf), "a draft's q is no distribution: it sums to -inf"),
        (altered(t5=np.inf, t6=-np.inf), "a draft's q is no distribution: it sums to nan"),
        (altered(t2=0.0, t3=1.0), "a draft has token 2, to which its q gives no probability"),
        (altered()[:, :-1], f"a draft's q has (7,) entries, the vocabulary {VOCAB}"),
        (np.pad(altered(), ((0, 0), (0, 1))), f"a draft's q has (9,) entries, the vocabulary {VOCAB}"),
        (altered()[:, None], f"a draft's q has (1, 8) entries, the vocabulary {VOCAB}"),
        (altered()[:, 0], f"a draft's q has () entries, the vocabulary {VOCAB}"),
    ],
)
def test_q_is_a_distribution_over_the_vocabulary_that_its_token_can_come_from(q: np.ndarray, message: str) -> None:
    for given in (q, torch.from_numpy(q), torch.from_numpy(q).float(), q.tolist(), list(q)):
        refused(Draft([1, 2], q=given), message)
    assert check(Draft([1, 2], q=q), needs_q=False).q is None  # dropped unseen


def test_what_rounding_leaves_of_a_softmax_is_tolerated_and_made_good() -> None:
    for error in (TOLERATED / 2, -TOLERATED / 2):
        (_, row) = check(Draft([1, 2], q=altered(t2=1.0 + error))).q
        assert row.sum() == 1.0
    refused(Draft([1, 2], q=altered(t2=1.0 + 2 * TOLERATED)), "a draft's q is no distribution")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_softmax_over_a_large_vocabulary_passes(dtype: torch.dtype) -> None:
    size = 150_000
    row = torch.softmax(torch.linspace(-9, 9, size, dtype=dtype), 0)
    draft = check_draft(Draft([7], q=row[None]), 1, size, None, True)
    assert draft.q[0].dtype == torch.float64
    assert abs(float(draft.q[0].sum()) - 1.0) < 1e-12


def test_siblings_with_q_are_drawn_without_replacement() -> None:
    tokens, parents = [3, 3, 4, 4], [-1, 0, 1, 1]
    refused(Draft(tokens, parents, q_of(tokens)), "a draft with q repeats a token among siblings")
    refused(Draft([5, 5], [-1, -1], q_of([5, 5])), "a draft with q repeats a token among siblings")
    below = Draft([3, 4, 5, 5], [-1, -1, 0, 1])  # cousins are none
    below.q = q_of(below.tokens)
    assert len(check(below).q) == 4


def test_siblings_that_say_the_same_are_no_harm_without_q() -> None:
    draft = Draft([5, 5, 6, 7], [-1, -1, 0, 1], by=[1, 2, 1, 2])
    assert check(draft).tokens == [5, 6, 5, 7]
    assert check(draft).parents == [-1, 0, -1, 2]
    draft.q = q_of(draft.tokens)
    assert check(draft, needs_q=False).q is None


# -- what comes of the others ------------------------------------------------------------------------


@pytest.mark.parametrize("make", [list, tuple, np.array, torch.tensor, lambda v: np.array(v, np.int32), iter])
def test_whatever_holds_integers_becomes_plain_ones(make: Any) -> None:
    draft = check(Draft(make([1, 2, 3]), make([-1, -1, 0])))
    assert (draft.tokens, draft.parents) == ([1, 3, 2], [-1, 0, -1])
    assert {type(value) for value in [*draft.tokens, *draft.parents]} == {int}


@pytest.mark.parametrize("tokens", [[], (), np.zeros(0, np.int64), torch.zeros(0, dtype=torch.long)])
def test_an_empty_draft_is_in_order(tokens: Any) -> None:
    for draft in (Draft(tokens), Draft(tokens, [], np.zeros((0, VOCAB)), [], [], by=[])):
        checked = check(draft, cap=0)
        assert (checked.tokens, checked.parents, checked.depth) == ([], None, 0)


def test_a_tree_that_is_a_chain_becomes_one() -> None:
    assert check(Draft([1, 2, 3], [-1, 0, 1])).parents is None
    assert check(Draft([1], [-1])).parents is None
    assert check(Draft([1, 2, 3], [-1, 0, 0]), cap=1).parents is None  # what is left of it


def test_what_is_checked_shares_nothing_with_what_was_given() -> None:
    tokens, parents, chances = [1, 2, 3], [-1, -1, 0], [0.5, 0.5, 0.5]
    for draft in (Draft(tokens, chances=chances), Draft(tokens, parents, chances=chances)):
        before = check(draft)
        kept = list(before.tokens)
        tokens[0] = chances[0] = 0
        assert (before.tokens, list(before.chances or ())[:1]) == (kept, [0.5])
        tokens[0], chances[0] = 1, 0.5


def test_an_error_stays_with_what_came_before_it() -> None:
    error = ValueError("no more")
    assert check(Draft([1, 2], error=error)).error is error
    assert check(Draft([1, 2, 3], [-1, -1, 0], error=error), cap=1).error is error


def labelled(tokens: Sequence[int], parents: Sequence[int] | None) -> Draft:
    """A draft in which all that belongs to node i says i."""
    places = range(len(tokens))
    return Draft(
        tokens, parents, q_of(tokens), [100 + i for i in places], [i / 64 for i in places], by=[1 << i for i in places]
    )


def assert_nodes(checked: Draft, draft: Draft, nodes: Sequence[int]) -> None:
    """Whether `checked` is these nodes of a labelled draft, in this order, with all that belongs to them."""
    assert checked.tokens == [draft.tokens[node] for node in nodes]
    assert checked.origin == checked.origins() == [100 + node for node in nodes]
    assert checked.chances == [node / 64 for node in nodes]
    assert checked.by == [1 << node for node in nodes]
    assert len(checked.q) == len(nodes)
    for row, node in zip(checked.q, nodes, strict=True):
        assert row.dtype == torch.float64
        np.testing.assert_allclose(row.numpy(), draft.q[node], rtol=1e-6)
    above = [nodes.index(draft.parent(node)) if draft.parent(node) >= 0 else -1 for node in nodes]
    assert checked.parents == (None if above == list(range(-1, len(nodes) - 1)) else above)


@pytest.mark.parametrize(("cap", "kept"), [(0, 0), (-3, 0), (1, 1), (3, 3), (4, 4), (9, 4)])
def test_a_chain_is_cut_at_the_cap(cap: int, kept: int) -> None:
    draft = labelled([1, 2, 3, 4], None)
    assert_nodes(check(draft, cap), draft, range(kept))


@pytest.mark.parametrize(
    ("cap", "kept"), [(0, []), (-1, []), (1, [0, 3]), (2, [0, 1, 2, 3, 4]), (3, [0, 1, 5, 2, 3, 4])]
)
def test_a_tree_loses_what_is_too_deep_and_comes_depth_first(cap: int, kept: list[int]) -> None:
    draft = labelled([1, 2, 3, 4, 5, 6], BUSHY)
    assert_nodes(check(draft, cap), draft, kept)


@pytest.mark.parametrize("seed", range(3))
def test_random_trees_are_pruned_as_their_twin_says(seed: int) -> None:
    rng = np.random.default_rng(seed)
    for _ in range(150):
        count, cap = int(rng.integers(0, VOCAB + 1)), int(rng.integers(0, 5))
        parents = [int(rng.integers(-1, node)) for node in range(count)]
        draft = labelled(rng.permutation(VOCAB)[:count].tolist(), parents)
        kept = [node for node in reference.depth_first(parents) if len(reference.line(parents, node)) <= cap]
        checked = check(draft, cap)
        assert_nodes(checked, draft, kept)
        assert checked.depth == max((len(reference.line(parents, node)) for node in kept), default=0)
        again = check(checked, cap)
        assert (again.tokens, again.parents, again.by) == (checked.tokens, checked.parents, checked.by)


def test_an_origin_for_all_stays_one() -> None:
    assert check(Draft([1, 2], origin=3)).origin == 3
    assert check(Draft([1, 2])).origin is None
    assert check(Draft([1, 2, 3], [-1, -1, 0], origin=3), cap=1).origins() == [3, 3]


def test_q_may_be_known_for_some_nodes_only() -> None:
    q = q_of([1, 2, 3])
    checked = check(Draft([1, 2, 3], [-1, -1, 0], [q[0], None, q[2]]))
    assert [row is None for row in checked.q] == [False, False, True]
    refused(Draft([1, 2, 3], q=[None, None, 2 * q[2]]), "a draft's q is no distribution")


def test_the_first_path_keeps_what_belongs_to_its_nodes() -> None:
    draft = labelled([1, 2, 3, 4, 5, 6], BUSHY)
    path = first_path(check(draft))
    assert_nodes(path, draft, [0, 1, 5])
    assert first_path(path) is path
    assert path.tokens == [1, 2, 6]
