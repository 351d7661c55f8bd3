"""The kernels for token trees against their obvious twins, and what a round pays for them."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from cascade import trees
from tests import reference

BUDGET_S = 100e-6  # for 64 nodes, lists to arrays included


def random_parents(rng: np.random.Generator, nodes: int) -> list[int]:
    """Bushy, deep, or anything between."""
    reach = int(rng.integers(1, nodes + 2))
    return [int(rng.integers(max(-1, node - reach), node)) for node in range(nodes)]


def random_draft(rng: np.random.Generator, most: int = 8, vocab: int = 3) -> tuple[list[int], list[int]]:
    nodes = int(rng.integers(0, most + 1))
    return rng.integers(0, vocab, nodes).tolist(), random_parents(rng, nodes)


def paths(trie: trees.Trie) -> list[tuple[tuple[int, ...], list[int]]]:
    """A trie as its twin tells it."""
    parents, tokens = trie.parents.tolist(), trie.tokens.tolist()
    lines = [reference.line(parents, node) for node in range(len(parents))]
    bits = [[i for i in range(63) if mask >> i & 1] for mask in trie.proposers.tolist()]
    return [(tuple(tokens[n] for n in line), who) for line, who in zip(lines, bits, strict=True)]


# -- the twins ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
def test_depths_ancestors_and_order_equal_their_twins(seed: int) -> None:
    rng = np.random.default_rng(seed)
    for trial in range(1000):
        parents = random_parents(rng, trial % 24)
        lines = [reference.line(parents, node) for node in range(len(parents))]
        assert trees.depths(parents).tolist() == [len(line) - 1 for line in lines]
        seen = trees.ancestors(np.array(parents, np.int64))
        assert seen.shape == (len(parents), len(parents))
        assert [np.flatnonzero(row).tolist() for row in seen] == lines
        assert trees.depth_first(parents).tolist() == reference.depth_first(parents)


@pytest.mark.parametrize("seed", range(4))
def test_merge_equals_its_twin(seed: int) -> None:
    rng = np.random.default_rng(seed)
    shared = 0
    for _ in range(1000):
        drafts = [random_draft(rng) for _ in range(rng.integers(0, 5))]
        trie, twin = trees.merge(drafts), reference.merged(drafts)
        assert paths(trie) == twin
        assert trie.owners.tolist() == [who[0] for _, who in twin]
        assert trees.depth_first(trie.parents).tolist() == list(range(len(twin)))
        shared += any(len(who) > 1 for _, who in twin)
    assert shared > 300


def test_merge_takes_chains_and_arrays() -> None:
    frozen = np.array([1, 2, 4])
    frozen.flags.writeable = False
    trie = trees.merge([([1, 2, 3], None), (frozen, np.array([-1, 0, 1])), (np.arange(10, 0, -5), None), ([], None)])
    assert trie.tokens.tolist() == [1, 2, 3, 4, 10, 5]
    assert trie.parents.tolist() == [-1, 0, 1, 1, -1, 4]
    assert trie.owners.tolist() == [0, 0, 0, 1, 2, 2]
    assert trie.proposers.tolist() == [3, 3, 1, 2, 4, 4]
    assert {column.dtype for column in trie} == {np.dtype(np.int64)}


def test_a_draft_that_says_something_twice_says_it_once() -> None:
    trie = trees.merge([([7, 7, 8, 8, 9], [-1, -1, 0, 1, 3])])
    assert (trie.tokens.tolist(), trie.parents.tolist()) == ([7, 8, 9], [-1, 0, 1])


def test_the_last_of_63_drafts_has_a_bit_and_one_more_is_refused() -> None:
    trie = trees.merge([([2**40], None)] * 63)
    assert trie.tokens.tolist() == [2**40]
    assert trie.proposers.tolist() == [2**63 - 1]
    assert trees.merge([([i], None) for i in range(63)]).proposers[-1] == 1 << 62
    with pytest.raises(ValueError, match="64 drafts to merge, but at most 63"):
        trees.merge([([1], None)] * 64)


def test_nothing_has_no_nodes() -> None:
    assert [trees.depths([]).shape, trees.ancestors([]).shape, trees.depth_first([]).shape] == [(0,), (0, 0), (0,)]
    for drafts in ([], [([], None)], [([], []), ([], None)]):
        assert [column.shape for column in trees.merge(drafts)] == [(0,)] * 4


@pytest.mark.parametrize("parents", [[0], [1, -1], [-1, 1], [-1, 5], [-2], [[-1]], [-1, 2, 1]])
@pytest.mark.parametrize("function", [trees.depths, trees.ancestors, trees.depth_first])
def test_parents_that_would_read_past_an_array_are_refused(function: Callable[[Any], Any], parents: Any) -> None:
    with pytest.raises(ValueError, match="come before their children"):
        function(parents)
    with pytest.raises(ValueError, match="come before their children"):
        trees.merge([([1], None), ([1] * len(parents), parents)])


def test_merge_refuses_parents_of_another_length() -> None:
    with pytest.raises(ValueError, match="a draft has 2 tokens but 1 parents"):
        trees.merge([([1, 2], [-1])])


# -- what they cost ----------------------------------------------------------------------------------


def least_seconds(work: Callable[[], object]) -> float:
    """The best of many: other processes can only add to it."""
    trees.warm_up()
    best = float("inf")
    for _ in range(300):
        began = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - began)
    return best


def test_a_tree_of_64_nodes_costs_microseconds() -> None:
    parents = random_parents(np.random.default_rng(0), 64)
    seconds = least_seconds(lambda: (trees.depths(parents), trees.ancestors(parents), trees.depth_first(parents)))
    assert seconds < BUDGET_S, f"{seconds * 1e6:.0f} us"


@pytest.mark.parametrize("vocab", [2, 100_000])
def test_merging_64_nodes_costs_microseconds(vocab: int) -> None:
    rng = np.random.default_rng(0)
    drafts = [(rng.integers(0, vocab, nodes).tolist(), random_parents(rng, nodes)) for nodes in (20, 20, 24)]
    seconds = least_seconds(lambda: trees.merge(drafts))
    assert seconds < BUDGET_S, f"{seconds * 1e6:.0f} us"


def test_importing_compiles_nothing_and_loads_no_torch() -> None:
    code = """
        import sys
        from numba.core.dispatcher import Dispatcher
        from cascade import trees
        kernels = [one for one in vars(trees).values() if isinstance(one, Dispatcher)]
        assert kernels and not any(kernel.signatures for kernel in kernels)
        assert "torch" not in sys.modules
        trees.warm_up()
        assert all(len(kernel.signatures) == 1 for kernel in kernels)
        import numpy as np
        frozen = np.array([-1, 9, 0, 9, 1])[::2]
        frozen.flags.writeable = False
        trees.merge([(frozen, frozen)])
        trees.depths(np.arange(-1, 5, dtype=np.int32))
        assert all(len(kernel.signatures) == 1 for kernel in kernels), "compiled in the middle of a request"
    """
    lines = "\n".join(line.removeprefix(" " * 8) for line in code.splitlines())
    done = subprocess.run([sys.executable, "-c", lines], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
