"""Proof by enumeration that a verification rule is lossless: every draft, every branch, every random outcome.

On a vocabulary of a few tokens all that can happen is walked through, each time with its probability. What is emitted,
and then continued by the verifier alone, must have the verifier's own distribution: not to the eye, but to 1e-12.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from cascade.draft import Draft
from cascade.rules import Rule, children
from cascade.trees import merge

Path = tuple[int, ...]
Maker = Callable[["Chance", "World"], Draft]

PRECISION = 1e-12
END = 0  # the token that ends a text, in worlds where one does

CHAINS = ((), (1,), (1, 1), (1, 1, 1))
TREES = ((2,), (3,), (2, 1), (1, 2), (2, 2), (1, 1, 2), (2, 1, 1))


class Chance:
    """Random outcomes as a script has them, and the first possible one after its end.

    Attributes:
        probability: of all outcomes so far.
        others: scripts for what could have happened instead.
    """

    def __init__(self, script: Path = ()) -> None:
        self._script, self._taken = script, 0
        self.probability = 1.0
        self.others: list[Path] = []
        self._outcomes: list[int] = []

    def draw(self, weights: Any) -> int:
        """An index, by weights [n] that need not sum to 1."""
        p = np.asarray(weights, np.float64)
        p = p / p.sum()
        if len(self._outcomes) < len(self._script):
            outcome = self._script[len(self._outcomes)]
        else:
            outcome, *rest = np.flatnonzero(p > 0).tolist()
            self.others += [(*self._outcomes, other) for other in rest]
        self._outcomes.append(outcome)
        self.probability *= float(p[outcome])
        return outcome

    def flip(self, chance: float) -> bool:
        """True with this probability."""
        return self.draw([chance, 1.0 - chance]) == 0


def outcomes(run: Callable[[Chance], Any]) -> Iterator[tuple[float, Any]]:
    """Everything that `run` can come to, each with its probability; `run` may use no other chance."""
    scripts: list[Path] = [()]
    while scripts:
        chance = Chance(scripts.pop())
        result = run(chance)
        yield chance.probability, result
        scripts += chance.others


@dataclass
class World:
    """A verifier's distribution p after every text, and a drafter's q: tables drawn once, some entries 0."""

    size: int = 3
    seed: int = 0
    ends: bool = False
    _tables: dict[tuple[str, Path], np.ndarray] = field(default_factory=dict)

    def table(self, which: str, path: Path) -> np.ndarray:
        """[size], what `which` ("p" or "q") has after a path."""
        key = (which, path)
        if key not in self._tables:
            dice = np.random.default_rng((self.seed, ord(which), len(path), *path))
            values = dice.dirichlet(np.ones(self.size)) * (dice.random(self.size) < 0.8)
            self._tables[key] = values / values.sum() if values.sum() > 0 else np.eye(self.size)[0]
        return self._tables[key]

    def over(self, path: Path) -> bool:
        """Whether a text ends with its last token."""
        return self.ends and END in path

    def texts(self, length: int, path: Path = ()) -> Iterator[Path]:
        """All texts of so many tokens, those that end earlier as far as they go."""
        if len(path) == length or self.over(path):
            yield path
        else:
            for token in range(self.size):
                yield from self.texts(length, (*path, token))

    def chance(self, text: Path, after: int = 0) -> float:
        """The verifier's probability of a text, given its first tokens."""
        return float(np.prod([self.table("p", text[:i])[text[i]] for i in range(after, len(text))]))


@dataclass
class Judge:
    """A `Verifier` in a world, whose outcomes are enumerated."""

    world: World
    draft: Draft
    dice: Chance
    asked: list[int] = field(default_factory=list)

    def __call__(self, node: int) -> int:
        """A rule that is not coupled has no use for the verifier's own token."""
        raise AssertionError("a rule that is not coupled must use flip and draw, not the verifier's own token")

    def distribution(self, node: int) -> torch.Tensor:
        """p after a node."""
        self.asked.append(node)
        path = tuple(self.draft.tokens[i] for i in self.draft.path(node))
        return torch.from_numpy(self.world.table("p", path))

    def flip(self, chance: float) -> bool:
        """One more outcome."""
        assert -PRECISION <= chance <= 1 + PRECISION, f"{chance} is no probability"
        return self.dice.flip(min(max(chance, 0.0), 1.0))

    def draw(self, weights: torch.Tensor) -> int:
        """One more outcome."""
        return self.dice.draw(weights.numpy())


# -- drafts -----------------------------------------------------------------------------------------------


def drawn(branching: Sequence[int], tell: bool = True) -> Maker:
    """Trees drawn from q without replacement, node by node; a chain is one child after the other."""

    def make(chance: Chance, world: World) -> Draft:
        tokens: list[int] = []
        parents: list[int] = []
        q: list[torch.Tensor] = []
        level: list[tuple[int, Path]] = [(-1, ())]
        for count in branching:
            after: list[tuple[int, Path]] = []
            for parent, path in level:
                table = world.table("q", path)
                left = table.copy()
                for _ in range(min(count, int((table > 0).sum()))):
                    token = chance.draw(left)
                    left[token] = 0.0
                    after.append((len(tokens), (*path, token)))
                    tokens.append(token)
                    parents.append(parent)
                    q.append(torch.from_numpy(table))
            level = after
        return _ordered(Draft(tokens, parents, q if tell else None))

    return make


def given(draft: Draft) -> Maker:
    """One draft, whatever happens: tokens without q."""
    return lambda chance, world: draft


def merged(first: Sequence[int], second: Sequence[int]) -> Draft:
    """Two chains as one tree."""
    trie = merge([(list(first), None), (list(second), None)])
    return Draft(trie.tokens.tolist(), trie.parents.tolist())


def tailed(branching: Sequence[int], tail: Sequence[int]) -> Maker:
    """What was drawn, and behind its first path guesses without q."""

    def make(chance: Chance, world: World) -> Draft:
        from cascade.draft import extended, first_nodes

        draft = drawn(branching)(chance, world)
        return _ordered(extended(draft, first_nodes(draft)[-1], Draft(list(tail))))

    return make


def _ordered(draft: Draft) -> Draft:
    """Depth first, as rules are given it."""
    from cascade.draft_checks import check_draft

    q = draft.q
    draft.q = None
    draft.by = range(len(draft))  # to see where each node went
    out = check_draft(draft, cap=99, vocab_size=99)
    order, out.by = list(out.by or ()), None
    out.q = None if q is None else [q[node] for node in order]
    return out


def makers(size: int, depth: int) -> dict[str, list[Maker]]:
    """Every kind of draft, by name, up to a depth."""
    chains = [shape for shape in CHAINS if len(shape) <= depth]
    trees = [shape for shape in TREES if len(shape) <= depth]
    paths = [list(p) for k in range(1, min(depth, 2) + 1) for p in itertools.product(range(size), repeat=k)]
    long = [list(p) for p in itertools.product(range(size), repeat=depth)]
    pairs = [*itertools.product(paths, repeat=2), *zip(long, long[::-1], strict=True)]
    return {
        "chain with q": [drawn(shape) for shape in chains],
        "chain without": [given(Draft(path)) for path in [*paths, *long]],
        "tree with q": [drawn(shape) for shape in trees],
        "tree without": [drawn(shape, tell=False) for shape in trees if np.prod(shape) < 4],
        "merged": [given(merged(a, b)) for a, b in pairs],
        "tail": [tailed(shape, [1, 0]) for shape in [*chains[1:2], *trees[:1]]] if depth > 1 else [],
    }


# -- the proof --------------------------------------------------------------------------------------------


def emitted(rule: Rule, make: Maker, world: World) -> dict[Path, float]:
    """What one round of a rule emits, with probabilities. Raises AssertionError where its verdict is none."""

    def run(chance: Chance) -> Path:
        draft = make(chance, world)
        judge = Judge(world, draft, chance)
        verdict = rule.walk(draft, judge, lambda token: world.ends and token == END)
        path = [draft.tokens[node] for node in verdict.path]
        _check(draft, verdict, judge, rule, world)
        return tuple(path if verdict.extra is None else [*path, verdict.extra])

    found: dict[Path, float] = defaultdict(float)
    for probability, text in outcomes(run):
        found[text] += probability
    return found


def _check(draft: Draft, verdict: Any, judge: Judge, rule: Rule, world: World) -> None:
    path = verdict.path
    assert path == draft.path(path[-1] if path else -1), f"{path} is no path of the draft"
    assert verdict.accepted == len(path) <= verdict.tested <= len(path) + 1
    tokens = tuple(draft.tokens[node] for node in path)
    assert (verdict.extra is None) == world.over(tokens), "one more token, unless the text is over"
    assert not world.over(tokens[:-1]), "nothing comes after the end"
    if rule.lazy:
        assert judge.asked == [-1, *path][: len(judge.asked)], "a lazy rule asks along the path, each node once"


def difference(rule: Rule, make: Maker, world: World, length: int) -> float:
    """How far any text of so many tokens is from its probability under p, once the verifier has gone on alone."""
    found = emitted(rule, make, world)
    total = 0.0
    for text in world.texts(length):
        starts = (text[:i] for i in range(len(text) + 1))
        mine = sum(found[start] * world.chance(text, len(start)) for start in starts if start in found)
        total = max(total, abs(mine - world.chance(text)))
    return total


def accepted(rule: Rule, make: Maker, world: World) -> float:
    """How many drafted tokens a rule accepts in expectation."""

    def run(chance: Chance) -> int:
        draft = make(chance, world)
        return len(rule.walk(draft, Judge(world, draft, chance), lambda token: False).path)

    return sum(probability * count for probability, count in outcomes(run))


def own_tokens(draft: Draft, samples: Sequence[int]) -> Any:
    """A `Verifier` for coupled rules: its own token at a node is the sample of its depth. No node is asked twice."""
    asked: set[int] = set()
    nodes = len(children(draft))

    class Own:
        def __call__(self, node: int) -> int:
            assert node not in asked, f"node {node} was sampled twice: random numbers may be used once"
            assert -1 <= node < nodes - 1, f"there is no node {node}"
            asked.add(node)
            return samples[len(draft.path(node))]

        def distribution(self, node: int) -> torch.Tensor:
            raise AssertionError("a coupled rule must take the verifier's own tokens and no other chance")

        flip = draw = distribution

    return Own()
