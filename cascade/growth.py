"""Trees that a draft model grows from its own probabilities, with one forward per depth.

A wide tree costs the draft model little more than a chain, since a forward of a few tokens takes about as long as
one of one; what it costs the verifier is a question of the budget.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from cascade.draft import Ask, Draft
from cascade.errors import DecodeError
from cascade.noise import Noise, sample_seed
from cascade.rows import Feed, Scores
from cascade.sampling import Branch

if TYPE_CHECKING:
    from cascade.level import Level
    from cascade.progress import LevelRow
    from cascade.sampling import Sampler


class Shape:
    """How wide a tree is.

    Attributes:
        prunes: nodes are left out after their tokens are known: what is left has no q.
    """

    prunes: bool = False

    def for_draws(self) -> Shape:
        """The shape for tokens that are handed up with their q."""
        return self

    def children(self, depth: int, sure: float, share: int) -> list[int]:
        """How many nodes each child of a node may have below it; as long as there are to be children.

        Must not depend on the tokens that these children get.

        Args:
            depth: of the node; -1 is the context's end.
            sure: the chance that the node's likeliest child holds.
            share: how many nodes the node may have below it.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class Fixed(Shape):
    """Every node of a depth has as many children; beyond the depths given, one.

    Attributes:
        branching: children of the context's end, of each of its children, and so on.
    """

    branching: tuple[int, ...]

    def children(self, depth: int, sure: float, share: int) -> list[int]:
        """See `Shape.children`. A budget that is too small for all is shared alike."""
        count = min(self.branching[depth + 1] if depth + 1 < len(self.branching) else 1, share)
        return [(share - count) // count] * count


class Dynamic(Shape):
    """The nodes that are most likely to be accepted, as many as the budget allows.

    Above a drafter a level does not grow it: it adds the next best tokens to the chain that this drafter made cheap.

    A node's chance is the product of the draft model's own on its path. Keeping the likeliest nodes maximises the
    expected number of accepted tokens if these are right: OPT-Tree (Wang et al., TACL 2025), EAGLE-2 (Li et al. 2024,
    section 4).
    """

    prunes = True
    WIDTH = 4  # children of a node that are considered: a fifth is hardly ever the one

    def for_draws(self) -> Shape:
        """Which nodes are likeliest shows only once they are drawn, and then q is lost: shares are split before."""
        return Split()

    def children(self, depth: int, sure: float, share: int) -> list[int]:
        """See `Shape.children`."""
        return [share] * self.WIDTH


class Split(Shape):
    """A budget split among children before they are drawn, by the chance that each of them will be needed.

    The first child holds with the chance `sure`, the next is asked only if it does not, and so on. There is another
    one as long as that is likelier than that the last node holds which the first child could have below it instead.
    Nothing here looks at other branches: what one of them shows must not decide what there is in another.
    """

    def children(self, depth: int, sure: float, share: int) -> list[int]:
        """See `Shape.children`."""
        sure = min(max(sure, 0.01), 0.99)
        count = 1
        while count < min(Dynamic.WIDTH, share) and (1.0 - sure) ** count >= sure ** (share - count - 1):
            count += 1
        weights = [(1.0 - sure) ** rank for rank in range(count)]
        rest = share - count
        below = [int(rest * weight / sum(weights)) for weight in weights]
        return [below[0] + rest - sum(below), *below[1:]]


def shape_of(tree: Any) -> Shape | None:
    """The shape that a configuration asks for: None for "chain"."""
    if tree == "chain":
        return None
    return Dynamic() if tree == "dynamic" else Fixed(tuple(tree))


@dataclass(slots=True)
class Node:
    """A node while its tree grows.

    Attributes:
        parent: its index, -1 for the context's end.
        chance: what the draft model says of it; of one beside others, its share of what the first of them leaves.
        value: that it and all above it hold.
        share: how many nodes there may be below it.
        slot: where it is among the nodes that the draft model has read; -1: not read.
    """

    token: int
    parent: int
    chance: float | None
    value: float
    share: int
    q: Any = None
    slot: int = -1


@dataclass(slots=True)
class Tree:
    """One row's tree while it grows."""

    ask: Ask
    shape: Shape
    state: LevelRow
    sampler: Sampler
    nodes: list[Node] = field(default_factory=list)
    read: list[int] = field(default_factory=list)  # nodes whose keys the draft model holds, in their order there
    frontier: list[int] = field(default_factory=lambda: [-1])  # nodes to be read next
    error: Exception | None = None

    def path(self, node: int) -> list[int]:
        """The tokens from the root to a node."""
        tokens: list[int] = []
        while node >= 0:
            tokens.append(self.nodes[node].token)
            node = self.nodes[node].parent
        return tokens[::-1]

    def feed(self) -> Feed:
        """What the draft model reads next: at first the context, then the frontier."""
        cache, tokens = self.state.cache, self.ask.context.tokens
        if self.frontier == [-1]:
            return Feed(cache, tokens[cache.sync(tokens) :].tolist(), 1)
        for node in self.frontier:
            self.nodes[node].slot = len(self.read)
            self.read.append(node)
        ups = [self.nodes[node].parent for node in self.read]
        parents = [-1 if up < 0 else self.nodes[up].slot for up in ups]
        return Feed(cache, [self.nodes[node].token for node in self.frontier], len(self.frontier), parents)


def grow(level: Level, asks: Sequence[Ask], shape: Shape) -> list[Draft]:
    """A tree per ask, at most `want` deep: all rows grow together, a forward per depth.

    Raises nothing for what is wrong with one row: its draft says so.
    """
    trees = [Tree(ask, shape.for_draws() if ask.needs_q else shape, *level.state(ask)) for ask in asks]
    try:
        _grow(level, trees)
    except BaseException:
        for tree in trees:  # what was read of a tree is no text
            tree.state.cache.crop(len(tree.ask.context))
        raise
    return [_finished(level, tree) for tree in trees]


def _grow(level: Level, trees: Sequence[Tree]) -> None:
    for depth in range(max((tree.ask.want for tree in trees), default=0)):
        growing = [tree for tree in trees if tree.frontier and _has_room(level, tree, depth)]
        if not growing:
            break
        scores = _read(level, growing)
        start = 0
        for tree in growing:
            stop = start + len(tree.frontier)
            _branch(tree, scores.part(start, stop), depth)
            start = stop


def _has_room(level: Level, tree: Tree, depth: int) -> bool:
    limit, length = level.model.max_length, len(tree.ask.context)
    return depth < min(tree.ask.want, tree.ask.cap) and (limit is None or length + depth <= limit)


def _read(level: Level, trees: Sequence[Tree]) -> Scores:
    """One packed forward over the frontiers of all rows."""
    began = level.clock()
    feeds = [tree.feed() for tree in trees]
    logits = level.score(feeds)
    scores = Scores.of(logits, greedy=False, sure=True)
    level.account([tree.state for tree in trees], feeds, level.clock() - began)
    return scores


def _branch(tree: Tree, scores: Scores, depth: int) -> None:
    """Gives each node of the frontier its children, and finds the next frontier."""
    ask, shape, new = tree.ask, tree.shape, []
    assert scores.chances is not None
    for i, node in enumerate(tree.frontier):
        value, share = (tree.nodes[node].value, tree.nodes[node].share) if node >= 0 else (1.0, ask.nodes)
        if not math.isfinite(scores.chances[i]):
            tree.error = DecodeError("the model's logits are not numbers: NaN or infinite")
            break
        sure = ask.chance(scores.chances[i])
        shares = shape.children(depth - 1, sure, share) if share > 0 else []
        if not shape.prunes:  # what does not pay is not drawn at all, but for the first: that there is one was decided
            odds = [value * sure * (1.0 - sure) ** rank for rank in range(len(shares))]
            least = least_chance(ask)
            shares = [s for rank, s in enumerate(shares) if odds[rank] >= least or rank == 0 > node]
        try:
            branches = _children(tree, node, scores.logits[i], len(shares)) if shares else []
        except Exception as error:  # logits that are not numbers: what has grown so far may hold
            tree.error = error
            break
        for rank, (branch, share) in enumerate(zip(branches, shares, strict=False)):
            chance = sure if rank == 0 else (1.0 - sure) * ask.share(branch.share)
            new.append(len(tree.nodes))
            said = scores.chances[i] if rank == 0 else branch.share
            tree.nodes.append(Node(branch.token, node, said, value * chance, share, branch.q))
    kept = set(_likeliest(tree)) if shape.prunes else None
    tree.frontier = [node for node in new if _goes_on(tree, tree.nodes[node]) and (kept is None or node in kept)]


def _goes_on(tree: Tree, node: Node) -> bool:
    return node.share > 0 and node.value >= tree.ask.floor and not tree.sampler.ends(node.token)


def _children(tree: Tree, node: int, logits: Any, count: int) -> list[Branch]:
    """The tokens after a node, likeliest first, each with its share of what the first one leaves."""
    ask = tree.ask
    prefix = ask.context.extended(tree.path(node)).tokens
    # A number belongs to a position. Where q counts, nodes side by side must not share it: what one shows would bias
    # the other.
    noise = Noise(sample_seed(ask.noise.seed, node + 2)) if ask.needs_q else tree.sampler.noise
    return tree.sampler.branches(logits, prefix, count, noise)


def _likeliest(tree: Tree) -> list[int]:
    """The nodes to keep, in order. A parent is never less likely than its children, so that these form a tree."""
    values, ask = [node.value for node in tree.nodes], tree.ask
    order = sorted(range(len(values)), key=lambda node: -values[node])[: ask.nodes]
    return sorted(order[: max(most_worth([values[node] for node in order], ask.price), 1)])


def most_worth(values: Sequence[float], price: Callable[[int], float]) -> int:
    """How many nodes together bring most; values [N] fall, price(n) is what n of them cost, in tokens."""
    best, most, tokens = 0, -price(0), 0.0
    for count, value in enumerate(values, start=1):
        tokens += value
        if tokens - price(count) > most:
            best, most = count, tokens - price(count)
    return best


def least_chance(ask: Ask) -> float:
    """The chance under which a node hardly pays, for trees that must not look at what they got: one for all."""
    few, many = 4, 16
    return (ask.price(many) - ask.price(few)) / (many - few)


def _finished(level: Level, tree: Tree) -> Draft:
    """The tree as a draft; the draft model keeps the keys of its first path, which most likely is the text."""
    kept = _likeliest(tree) if tree.shape.prunes else list(range(len(tree.nodes)))
    places = {node: place for place, node in enumerate(kept)}
    nodes = [tree.nodes[node] for node in kept]
    path: list[int] = []
    for slot, node in enumerate(tree.read):
        if tree.nodes[node].parent == (tree.read[path[-1]] if path else -1):
            path.append(slot)
    if tree.read:
        tree.state.cache.keep(len(tree.ask.context), path)
    parents = [places[node.parent] if node.parent >= 0 else -1 for node in nodes]
    q = [node.q for node in nodes] if nodes and nodes[0].q is not None else None
    return Draft([n.token for n in nodes], parents, q, level.index, _chances(tree, kept), tree.error)


def _chances(tree: Tree, kept: Sequence[int]) -> list[float | None]:
    """What the draft model says of each node kept; nothing of one whose likeliest sibling was left out."""
    likeliest: dict[int, int] = {}  # child by parent
    for node, one in enumerate(tree.nodes):
        likeliest.setdefault(one.parent, node)
    there = set(kept)
    return [tree.nodes[node].chance if likeliest[tree.nodes[node].parent] in there else None for node in kept]
