"""What a draft must be: whoever asked for it checks it, and what is wrong costs that proposal only."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import numpy as np

from cascade.draft import Draft
from cascade.errors import DraftError, one_line

TOLERATED = 1e-3  # how far a q may be from 1 in all: what float16 leaves of a softmax over a large vocabulary


def check_draft(draft: Draft, cap: int, vocab_size: int, nodes: int | None = None, needs_q: bool = False) -> Draft:
    """The draft as plain ints, a tree in depth-first order, without what lies deeper than `cap`.

    Args:
        draft: as a drafter made it.
        cap: how many tokens the asker can use.
        vocab_size: V.
        nodes: how many nodes a tree may have; None: any number.
        needs_q: q is wanted: it becomes float64 [V] for each node, or None. Else it is dropped unseen.

    Raises:
        DraftError: in one line, where the draft breaks its contract.
    """
    tokens = _ints(draft.tokens, "tokens")
    parents = None if draft.parents is None else _checked_parents(draft.parents, len(tokens))
    bad = next((t for t in tokens if not 0 <= t < vocab_size), None)
    if bad is not None:
        raise DraftError(f"a draft has token id {bad}, outside the vocabulary of {vocab_size}")
    origin, chances, by = draft.origin, draft.chances, draft.by
    if isinstance(origin, (int, np.integer)):
        origin = int(origin)
    elif origin is not None:
        origin = _ints(_aligned(origin, tokens, "origins"), "origins")
    if chances is not None:
        chances = _aligned(chances, tokens, "chances")
        known = [chance for chance in chances if chance is not None]
        if not all(isinstance(chance, (int, float)) and 0.0 <= chance <= 1.0 for chance in known):
            raise DraftError("a draft's chances must be probabilities")
    by = None if by is None else _ints(_aligned(by, tokens, "proposers"), "proposers")
    q = _aligned(draft.q, tokens, "rows of q") if needs_q and draft.q is not None else None
    checked = _shaped(Draft(tokens, parents, q, origin, chances, draft.error, by), cap)
    if checked.parents is not None and nodes is not None and len(checked) > nodes:
        raise DraftError(f"a draft tree has {len(checked)} nodes, and the budget is {nodes}")
    if checked.q is not None:
        checked.q = _checked_q(checked, vocab_size)
    return checked


def _checked_q(draft: Draft, vocab_size: int) -> list[Any]:
    """The distributions of a draft, per node float64 [V] or None. Raises DraftError where one is none."""
    rows = [None if row is None else _distribution(row, vocab_size) for row in draft.q]
    before: set[tuple[int, int]] = set()
    for node, row in enumerate(rows):
        place = draft.parent(node), draft.tokens[node]
        if row is not None and place in before:
            raise DraftError("a draft with q repeats a token among siblings: they must be drawn without replacement")
        before.add(place)
    for token, row in zip(draft.tokens, rows, strict=True):
        if row is not None and not float(row[token]) > 0.0:
            raise DraftError(f"a draft has token {token}, to which its q gives no probability")
    return rows


def _distribution(row: Any, vocab_size: int) -> Any:
    """A row of q as float64 [V] that sums to 1. Raises DraftError unless it does so but for rounding."""
    import torch

    try:
        values = row.detach() if isinstance(row, torch.Tensor) else torch.from_numpy(np.array(row, np.float64))
        values = values.double()
    except (TypeError, ValueError):
        raise DraftError(f"a draft's q must be numbers, not {one_line(repr(row)):.60}") from None
    if values.shape != (vocab_size,):
        raise DraftError(f"a draft's q has {tuple(values.shape)} entries, the vocabulary {vocab_size}")
    total, least = float(values.sum()), float(values.min())
    if not (abs(total - 1.0) <= TOLERATED and least >= 0.0):
        raise DraftError(f"a draft's q is no distribution: it sums to {total:.6g}, least {least:.6g}")
    return values / total


def _checked_parents(values: Any, count: int) -> list[int] | None:
    """Parents [N] of a tree, None if it is a chain. Raises DraftError unless they come before their children."""
    parents = _ints(values, "parents")
    if len(parents) != count:
        raise DraftError(f"a draft has {count} tokens but {len(parents)} parents")
    for node, parent in enumerate(parents):
        if not -1 <= parent < count:
            raise DraftError(f"a draft tree has {count} nodes, and none is {parent}, the parent of node {node}")
        if parent >= node:
            raise DraftError(f"a draft tree's parents must come before their children, not {parent} before {node}")
    return None if parents == list(range(-1, count - 1)) else parents


def _shaped(draft: Draft, cap: int) -> Draft:
    """The nodes that are not too deep, depth first, siblings in their order: neither depends on the tokens."""
    if draft.parents is None:
        return draft if len(draft) <= cap else draft.picked(range(max(cap, 0)))
    from cascade.trees import depth_first, depths

    deep = depths(draft.parents)
    kept = [node for node in depth_first(draft.parents).tolist() if deep[node] < cap]
    places = {node: place for place, node in enumerate(kept)}
    parents = [places.get(draft.parents[node], -1) for node in kept]
    return draft.picked(kept, None if parents == list(range(-1, len(kept) - 1)) else parents)


def _aligned(values: Any, tokens: Sequence[int], what: str) -> list[Any]:
    try:
        aligned = list(values.tolist() if what == "chances" and hasattr(values, "tolist") else values)
    except TypeError:
        raise DraftError(f"a draft's {what} must be a list, not {one_line(repr(values)):.60}") from None
    if len(aligned) != len(tokens):
        raise DraftError(f"a draft has {len(tokens)} tokens but {len(aligned)} {what}")
    return aligned


def _ints(values: Any, what: str) -> list[int]:
    plain = values.tolist() if hasattr(values, "tolist") else values
    try:
        return [operator.index(value) for value in plain]
    except TypeError:
        raise DraftError(f"a draft's {what} must be integers, not {one_line(repr(values)):.60}") from None
