"""Rules that weigh the verifier's distribution p against q, the one that a draft was drawn from.

A drafted token x is accepted with min(1, p(x) / q(x)), and what is left of p, relu(p - q), replaces it: the text
follows p, and q only says how much of it can be drafted. A token without q is a point mass on itself, which is
exact however it was made. Siblings are drawn without replacement: each from q without those before it.

All randomness is fresh: a draft that was looked at says something of the numbers behind it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from cascade.draft import Draft, Verdict
from cascade.errors import DecodeError
from cascade.rules import Rule, Verifier, children


class Rejection(Rule):
    """Rejection sampling token by token, on trees recursively without replacement.

    Leviathan et al. (2023), algorithm 1, and Chen et al. (2023), algorithm 2, for chains; for trees SpecInfer (Miao et
    al. 2024, section 4.3) and RSD (Jeon et al. 2024): the siblings of a rejected token are tried in turn
    on what is left of p.
    """

    lossless = True
    coupled = False
    needs_q = True

    def walk(self, draft: Draft, verifier: Verifier, ends: Callable[[int], bool]) -> Verdict:
        """See `Rule.walk`."""
        below = children(draft)
        path: list[int] = []
        node, tested = -1, 0
        while True:
            p, options = verifier.distribution(node), below[node + 1]
            tested += bool(options)
            node, p = self._choose(draft, options, p, verifier)
            if node < 0:
                return Verdict(path, verifier.draw(p), tested, len(path), len(draft))
            path.append(node)
            if ends(draft.tokens[node]):
                return Verdict(path, None, tested, len(path), len(draft))

    @staticmethod
    def _choose(draft: Draft, options: list[int], p: Tensor, verifier: Verifier) -> tuple[int, Tensor]:
        """The child that is accepted, -1 for none, and what is left of p [V] after those that are not."""
        tried: list[int] = []
        for child in options:
            token = draft.tokens[child]
            q = remaining(draft, child, tried)
            if verifier.flip(ratio(p, q, token)):
                return child, p
            p = normalised(left(p, q, token), p)
            tried.append(token)
        return -1, p


class Traversal(Rule):
    """Traversal verification: a tree is judged from its leaves up, by whole paths.

    Weng et al. (NeurIPS 2025, arXiv 2505.12398). A path may be accepted although one of its tokens, by
    itself, would have been rejected, if the others make up for it. On a chain it is block verification
    (Sun et al., ICLR 2025, algorithm 2). It accepts at least as many tokens as `Rejection` in expectation.

    Every node has a weight, the chance that it is accepted once all below it are rejected: min(1, w p(x) / q(x)) of its
    parent's w. When a node is rejected, its parent's p and w become what is left of them.
    """

    lossless = True
    coupled = False
    needs_q = True
    lazy = False

    def walk(self, draft: Draft, verifier: Verifier, ends: Callable[[int], bool]) -> Verdict:
        """See `Rule.walk`."""
        judged = _Judged(draft, verifier)
        last = judged.visit(-1, 1.0)
        assert last is not None, "the context itself always holds"
        path = draft.path(last)
        for depth, node in enumerate(path, start=1):
            if ends(draft.tokens[node]):
                return Verdict(path[:depth], None, depth, depth, len(draft))
        tested = len(path) + bool(judged.below[last + 1])
        return Verdict(path, judged.draw(last), tested, len(path), len(draft))


class Block(Traversal):
    """Block verification (Sun et al., ICLR 2025, algorithm 2): a chain is judged as a whole.

    Walked as `Traversal`, which is the same on a chain and goes on where block verification is not defined, on trees.
    """


class _Judged:
    """One draft while it is traversed.

    Attributes:
        below: children by node.
        rest: per node what is left of p there [V], once one of its children was rejected.
    """

    def __init__(self, draft: Draft, verifier: Verifier) -> None:
        self.draft, self.verifier = draft, verifier
        self.below = children(draft)
        self.rest: dict[int, Tensor] = {}

    def distribution(self, node: int) -> Tensor:
        """What is left of p after this node, [V]."""
        return self.rest[node] if node in self.rest else self.verifier.distribution(node)

    def visit(self, node: int, weight: float) -> int | None:
        """The node of this subtree that ends the accepted path, None if none does; its own weight is `weight`."""
        tried: list[int] = []
        for child in self._options(node):
            token, p = self.draft.tokens[child], self.distribution(node)
            q = remaining(self.draft, child, tried)
            found = self.visit(child, ratio(p, q, token, weight))
            if found is not None:
                return found
            rest = left(p, q, token, weight)
            self.rest[node] = normalised(rest, p)
            weight = 1.0 if node < 0 else _weight(float(rest.sum()), weight)
            tried.append(token)
        return node if node < 0 or self.verifier.flip(weight) else None

    def draw(self, node: int) -> int | None:
        """The token after the accepted path, None if the verifier cannot say: its next forward will tell why."""
        try:
            return self.verifier.draw(self.distribution(node))
        except DecodeError:
            if node < 0:
                raise
            return None

    def _options(self, node: int) -> list[int]:
        """The node's children: none where the verifier cannot say what follows, which only matters if it gets there."""
        try:
            if self.below[node + 1]:
                self.distribution(node)
        except DecodeError:
            self.below[node + 1] = []
        return self.below[node + 1]


def _weight(rest: float, weight: float) -> float:
    """The chance that a node is accepted, after a child of it was rejected; `rest` is the sum of what is left."""
    return rest / (rest + 1.0 - weight) if rest > 0.0 else 0.0


def remaining(draft: Draft, node: int, tried: list[int]) -> Tensor | None:
    """The distribution [V] that a node was drawn from: its q without the siblings tried before. None: a point mass."""
    q: Tensor | None = None if draft.q is None else draft.q[node]
    if q is None or not tried:
        return q
    q = q.clone()
    q[tried] = 0.0
    return q / q.sum()


def ratio(p: Tensor, q: Tensor | None, token: int, weight: float = 1.0) -> float:
    """The chance to accept a token: weight * p / q, at most 1."""
    over = weight * float(p[token])
    return min(1.0, over if q is None else over / float(q[token]))


def left(p: Tensor, q: Tensor | None, token: int, weight: float = 1.0) -> Tensor:
    """What is left of weight * p [V] where q was taken away: relu(weight * p - q)."""
    if q is not None:
        return torch.sub(p * weight, q.to(p.device)).clamp_(min=0.0)
    rest = p * weight
    rest[token] = 0.0  # 1 was taken away, and more is not there
    return rest


def normalised(weights: Tensor, otherwise: Tensor) -> Tensor:
    """Weights [V] with the sum 1; `otherwise` where nothing is left, which rounding alone can bring about."""
    total = float(weights.sum())
    return weights / total if total > 0.0 else otherwise
