"""Leaves beside a chain: a tree for nothing, where a drafter below made the chain cheap.

The model has scored every position of its chain already, so that its next best tokens there cost no forward of its
own: each may catch the verifier where the chain goes wrong, and the verifier's own token comes after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from cascade.draft import Draft
from cascade.growth import least_chance, most_worth

if TYPE_CHECKING:
    from cascade.level import Level
    from cascade.progress import Progress

LEAVES = 2  # beside one of the chain's tokens, at most so many others
LEAST = 0.03  # a leaf that is less likely to be right is not worth the call of attention that a path costs
PLACES = 4  # beside at most so many of its tokens: finding the next best ones of a vocabulary takes a while


class Leaf(NamedTuple):
    """A token beside a chain's own at a depth.

    Attributes:
        value: the chance that it and all before it hold.
        share: what the model gave it of what the chain's own token leaves.
    """

    depth: int
    token: int
    value: float
    share: float | None = None
    q: Any = None


def with_leaves(level: Level, row: Progress, draft: Draft) -> Draft:
    """The chain with the leaves that pay.

    Args:
        level: whose model it is.
        row: with the logits of each token of the chain.
        draft: the chain, with chances.
    """
    places: list[tuple[float, int]] = []  # (chance that a leaf is needed, depth)
    value, count, room = 1.0, len(draft), row.ask.nodes - len(draft)
    least = max(LEAST, row.ask.price(count + 1) - row.ask.price(count))
    for depth, chance in enumerate(row.chances):
        sure = row.ask.chance(chance)
        if value * (1.0 - sure) >= least:
            places.append((value * (1.0 - sure), depth))
        value *= sure
    if draft.q is not None:
        return _with_draws(level, row, draft, [place for place in places if place[0] >= least_chance(row.ask)])
    found = [leaf for place in sorted(places, reverse=True)[:PLACES] for leaf in _next_best(level, row, draft, *place)]
    leaves = sorted((leaf for leaf in found if leaf.value >= LEAST), key=lambda leaf: -leaf.value)[: max(room, 0)]
    worth = most_worth([leaf.value for leaf in leaves], lambda nodes: row.ask.price(count + nodes))
    return _joined(draft, leaves[:worth], level.index) if worth else draft


def _next_best(level: Level, row: Progress, draft: Draft, needed: float, depth: int) -> list[Leaf]:
    """What the model, and the row's random numbers, would have come to without the chain's own token."""
    sampler = level.state(row.ask)[1]
    prefix = row.ask.context.extended(draft.tokens[:depth]).tokens
    branches = sampler.branches(row.lines[depth], prefix, 1 + LEAVES, sampler.noise)
    others = [branch for branch in branches if branch.token != draft.tokens[depth]][:LEAVES]
    return [Leaf(depth, one.token, needed * row.ask.share(one.share), one.share) for one in others]


def _with_draws(level: Level, row: Progress, draft: Draft, places: Sequence[tuple[float, int]]) -> Draft:
    """The chain with leaves that are drawn as it was: at most one each, and those first that are least deep.

    Which places get one must not depend on what is drawn there, nor on what comes deeper.
    """
    dice, leaves = level.dice(row.ask), []
    for needed, depth in places[: max(row.ask.nodes - len(draft), 0)]:
        rest = draft.q[depth].clone()
        rest[draft.tokens[depth]] = 0.0
        if float(rest.sum()) > 0.0:
            leaves.append(Leaf(depth, dice.draw(rest), needed, q=draft.q[depth]))
    return _joined(draft, leaves, level.index) if leaves else draft


def _joined(draft: Draft, leaves: Sequence[Leaf], origin: int) -> Draft:
    """The chain and the leaves."""
    tokens = [*draft.tokens, *(leaf.token for leaf in leaves)]
    parents = [*range(-1, len(draft) - 1), *(leaf.depth - 1 for leaf in leaves)]
    chances = [*(draft.chances or ()), *(leaf.share for leaf in leaves)]
    q = None if draft.q is None else [*draft.q, *(leaf.q for leaf in leaves)]
    return Draft(tokens, parents, q, [*draft.origins(), *[origin] * len(leaves)], chances, draft.error)
