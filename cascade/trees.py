"""Token trees: depths, ancestors, depth-first order, and several proposals merged into one trie.

A tree is `parents` [N]: each node's parent, -1 for the context's end, parents before children. N is small and
every round pays for it, so the loops are compiled; all of a round's together take microseconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

Ints = NDArray[np.int64]
IntsLike = Sequence[int] | Ints

MAX_DRAFTS = 63  # bits of an int64 that are not its sign


class Trie(NamedTuple):
    """Proposals that were made at the same place as one tree, in depth-first preorder.

    Attributes:
        tokens: int64 [N]; siblings have different ones.
        parents: int64 [N].
        owners: int64 [N], the first draft that proposed each node.
        proposers: int64 [N], all drafts that did: bit i stands for draft i.
    """

    tokens: Ints
    parents: Ints
    owners: Ints
    proposers: Ints


def depths(parents: IntsLike) -> Ints:
    """How deep each node of a tree lies, int64 [N]: 0 for children of the context."""
    return _depths(_checked(parents))


def ancestors(parents: IntsLike) -> NDArray[np.bool_]:
    """Which nodes each node of a tree descends from, itself included; bool [N, N]."""
    return _ancestors(_checked(parents))


def depth_first(parents: IntsLike) -> Ints:
    """The nodes of a tree in depth-first preorder, int64 [N]: a first child directly follows its parent.

    Siblings keep the order they have. What comes out is old indices in the new order.
    """
    return _depth_first(_checked(parents))


def merge(drafts: Sequence[tuple[IntsLike, IntsLike | None]]) -> Trie:
    """Drafts of one context, each tokens [N] and parents [N] (None: a chain), as one trie.

    Nodes with the same parent and the same token become one. Siblings are in the order in which they first
    appear, draft after draft.

    Raises:
        ValueError: for parents that do not come before their children, or more drafts than a mask has bits.
    """
    if len(drafts) > MAX_DRAFTS:
        raise ValueError(f"{len(drafts)} drafts to merge, but at most {MAX_DRAFTS} can be told apart")
    tokens, parents, ends = [], [], []
    total = 0
    for ids, above in drafts:
        tokens.append(np.asarray(ids, np.int64))
        parents.append(np.arange(-1, len(ids) - 1, dtype=np.int64) if above is None else _checked(above))
        if len(parents[-1]) != len(tokens[-1]):
            raise ValueError(f"a draft has {len(tokens[-1])} tokens but {len(parents[-1])} parents")
        total += len(ids)
        ends.append(total)
    if not total:
        return Trie(*np.zeros((4, 0), np.int64))
    return Trie(*_merge(np.concatenate(tokens), np.concatenate(parents), np.array(ends, np.int64)))


def warm_up() -> None:
    """Compiles the kernels, or loads them from numba's cache, so that no request has to wait for it."""
    depths([-1])
    ancestors([-1])
    merge([([0], [-1])])
    depth_first([-1])


def _checked(parents: IntsLike) -> Ints:
    """A copy as int64 [N], since numba compiles read-only arrays anew; the kernels do not look again."""
    out = np.array(parents, np.int64, order="C")
    if out.ndim != 1 or not _in_order(out):
        raise ValueError("a tree's parents must be a list of integers, and come before their children")
    return out


@njit(cache=True)
def _in_order(parents: Ints) -> bool:
    wrong = 0
    for node in range(len(parents)):
        wrong += parents[node] < -1 or parents[node] >= node
    return wrong == 0


@njit(cache=True)
def _depths(parents: Ints) -> Ints:
    out = np.zeros(len(parents), np.int64)
    for node in range(len(parents)):
        if parents[node] >= 0:
            out[node] = out[parents[node]] + 1
    return out


@njit(cache=True)
def _ancestors(parents: Ints) -> NDArray[np.bool_]:
    nodes = len(parents)
    out = np.zeros((nodes, nodes), np.bool_)
    for node in range(nodes):
        parent = parents[node]
        for other in range(parent + 1):
            out[node, other] = out[parent, other]
        out[node, node] = True
    return out


@njit(cache=True)
def _depth_first(parents: Ints) -> Ints:
    """A node's place is known once those before it have theirs: a subtree fills as many as it has nodes.

    Shifted by one, so that index 0 is the context's end.
    """
    nodes = len(parents)
    sizes = np.ones(nodes + 1, np.int64)
    for node in range(nodes - 1, -1, -1):
        sizes[parents[node] + 1] += sizes[node + 1]
    free = np.zeros(nodes + 1, np.int64)  # where each node's next child goes
    out = np.empty(nodes, np.int64)
    for node in range(nodes):
        place = free[parents[node] + 1]
        free[parents[node] + 1] += sizes[node + 1]
        free[node + 1] = place + 1
        out[place] = node
    return out


@njit(cache=True)
def _merge(tokens: Ints, parents: Ints, ends: Ints) -> Ints:
    """The columns of a Trie, [4, N], of drafts that stand one after another; draft i stops at ends[i].

    A node's children are a linked list, the latest first, and compared one by one: they are few.
    """
    total, start, count = len(tokens), 0, 0
    out = np.empty((4, total), np.int64)
    ids, above, owners, proposers = out[0], out[1], out[2], out[3]
    known = np.empty(total, np.int64)  # which node of the trie each proposed one is
    latest, before = np.full(total + 1, -1), np.empty(total, np.int64)  # latest[0] is the context's
    for draft in range(len(ends)):
        for i in range(start, ends[draft]):
            parent = known[start + parents[i]] if parents[i] >= 0 else -1
            node = latest[parent + 1]
            while node >= 0 and ids[node] != tokens[i]:
                node = before[node]
            if node < 0:
                node = count
                before[node], latest[parent + 1] = latest[parent + 1], node
                ids[node], above[node], owners[node], proposers[node] = tokens[i], parent, draft, 0
                count += 1
            known[i] = node
            proposers[node] |= 1 << draft
        start = ends[draft]
    order = _depth_first(above[:count])
    place = np.empty(count + 1, np.int64)
    place[0] = -1
    for i in range(count):
        place[order[i] + 1] = i
    out = out[:, order]
    out[1] = place[out[1] + 1]
    return out
