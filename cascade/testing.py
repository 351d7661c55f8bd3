"""For authors of plugins, and for our own tests: toy models with exact distributions, scripted
drafters, a clock and costs that can be set, and checks of what a drafter or a rule must keep.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from cascade.config import SamplingParams
from cascade.costs import FixedCosts
from cascade.draft import Ask, Context, Draft
from cascade.draft_checks import check_draft
from cascade.drafter import Drafter
from cascade.noise import Noise
from cascade.rows import Feed, Row

if TYPE_CHECKING:
    from cascade.engine import Engine
    from cascade.rules import Rule

__all__ = [
    "FixedCosts",
    "ManualClock",
    "ScriptedDrafter",
    "ToyModel",
    "assert_lossless",
    "assert_same_text",
    "check_drafter",
]


class ManualClock:
    """A clock that moves only when told: `clock.advance(0.01)`, `clock()` -> seconds."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        """The time now, in seconds."""
        return self.now

    def advance(self, seconds: float) -> None:
        """Moves the clock forward."""
        self.now += seconds


class ToyModel:
    """A tiny language model whose next-token logits are a fixed random function of the last tokens.

    Exact in float64 for any packing, so whatever differs is the engine's doing.

    Args:
        vocab_size: V.
        seed: of the table.
        order: how many last tokens decide.
        scale: spread of the logits; larger is more certain.
        mix: another ToyModel and a share in [0, 1] of its logits: a draft that agrees more or less.
        max_length: context, None is unbounded.
        end_ids: ids that end a text.
        clock, cost: a ManualClock that every forward advances by cost(tokens) seconds.
    """

    trees = True
    dtype = "float64"
    exactness = "yes, a table"

    def __init__(
        self,
        vocab_size: int = 32,
        seed: int = 0,
        order: int = 2,
        scale: float = 2.0,
        mix: tuple[ToyModel, float] | None = None,
        max_length: int | None = None,
        end_ids: Sequence[int] = (),
        clock: ManualClock | None = None,
        cost: Callable[[int], float] = lambda tokens: 0.0,
    ) -> None:
        self.name = f"toy-{seed}"
        self.vocab_size = vocab_size
        self.max_length = max_length
        self.end_ids = tuple(end_ids)
        self.forwards = 0
        self._seed, self._order, self._scale, self._mix = seed, order, scale, mix
        self._clock, self._cost = clock, cost
        self._rows: dict[tuple[int, ...], np.ndarray] = {}

    def logits(self, prefix: Sequence[int]) -> np.ndarray:
        """Next-token logits [V], float64, after the tokens of `prefix`."""
        key = tuple(int(t) for t in prefix[-self._order :])
        if key not in self._rows:
            out = np.random.default_rng((self._seed, *key)).normal(size=self.vocab_size) * self._scale
            if self._mix is not None:
                other, share = self._mix
                out = (1 - share) * out + share * other.logits(key)
            self._rows[key] = out
        return self._rows[key]

    def new_row(self) -> Row:
        """An empty cache."""
        return Row()

    def forward(self, feeds: Sequence[Feed]) -> torch.Tensor:
        """See `CausalModel.forward`."""
        self.forwards += 1
        out: list[np.ndarray] = []
        for feed in feeds:
            row, tokens = feed.row, [int(t) for t in feed.tokens]
            assert tokens, "an empty feed"
            held = max(0, len(feed.parents or ()) - len(tokens))
            assert row.length - held + (len(tokens) if feed.parents is None else 1) <= (self.max_length or 1 << 60)
            out += [self.logits(prefix) for prefix in self._prefixes(feed)[-feed.keep :]]
            row.append(tokens)
        if self._clock is not None:
            self._clock.advance(self._cost(sum(len(feed.tokens) for feed in feeds)))
        return torch.from_numpy(np.stack(out))

    def _prefixes(self, feed: Feed) -> list[list[int]]:
        """For each fed token the last tokens of its own path, itself included."""
        parents = feed.parents or []
        held = max(0, len(parents) - len(feed.tokens))
        start = feed.row.length - held
        chain = [*feed.row.ids[max(0, start - self._order) : start].tolist()]
        tokens = [*feed.row.ids[start : feed.row.length].tolist(), *feed.tokens]
        prefixes: list[list[int]] = []
        for token in tokens[: len(tokens) - len(parents)]:
            chain = [*chain, int(token)][-self._order - 1 :]
            prefixes.append(chain)
        nodes: list[list[int]] = []
        for token, parent in zip(tokens[len(tokens) - len(parents) :], parents, strict=True):
            nodes.append([*(chain if parent < 0 else nodes[parent]), int(token)][-self._order - 1 :])
        return (prefixes + nodes)[held:]


class ScriptedDrafter(Drafter):
    """Follows a script instead of thinking.

    Args:
        texts: full texts (prompt and the target's own continuation), to be right about.
        kind: "oracle" (always right), "wrong" (never), "mixed" (each token right with probability
            `share`, by a seeded coin), "empty" (no proposal), or "raise".
        vocab_size: V, to be wrong within.
    """

    def __init__(
        self,
        texts: Sequence[Sequence[int]] = (),
        kind: str = "oracle",
        vocab_size: int = 32,
        share: float = 0.6,
        seed: int = 0,
    ) -> None:
        self.kind, self.share, self.vocab_size = kind, share, vocab_size
        self._texts = [np.asarray(text, np.int64) for text in texts]
        self._coins = np.random.default_rng(seed)
        self.observed: dict[int, list[int]] = {}
        self.live: set[int] = set()

    def start(self, row_id: int, params: SamplingParams) -> None:
        """Notes the row, so that a test can see whether it was ended."""
        self.live.add(row_id)
        self.observed[row_id] = []

    def end(self, row_id: int) -> None:
        """Forgets the row."""
        self.live.discard(row_id)

    def observe(self, row_id: int, verdict: object) -> None:
        """Keeps what was committed."""
        self.observed[row_id] += verdict.chain  # type: ignore[attr-defined]

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        """By the script."""
        if self.kind == "raise":
            raise RuntimeError("scripted to fail")
        return [self._one(ask) for ask in asks]

    def _one(self, ask: Ask) -> Draft:
        context = ask.context.tokens
        n = min(ask.want, ask.cap)
        if self.kind == "empty":
            return Draft([])
        truth = next((t for t in self._texts if len(t) > len(context) and (t[: len(context)] == context).all()), None)
        if truth is None:
            return Draft([] if self.kind == "oracle" else [0] * n)
        right = truth[len(context) : len(context) + n].copy()
        if self.kind == "wrong":
            right = (right + 1) % self.vocab_size
        elif self.kind == "mixed":
            right = np.where(self._coins.random(len(right)) < self.share, right, (right + 1) % self.vocab_size)
        return Draft(right.tolist())


def check_drafter(make: Callable[[], Drafter], vocab_size: int = 32, rounds: int = 40, seed: int = 0) -> None:
    """Raises AssertionError unless a drafter keeps the contract: for a plugin's own test suite.

    One draft per ask, in order and within the vocabulary; rows do not influence each other; a row
    that ended leaves nothing behind; contexts may shrink, hold tentative tokens, or be one token long.
    """
    rng = np.random.default_rng(seed)
    drafter, alone = make(), make()
    texts = {row: rng.integers(0, min(4, vocab_size), 400) for row in range(3)}
    for row in texts:
        drafter.start(row, SamplingParams())
    alone.start(0, SamplingParams())
    lengths = dict.fromkeys(texts, 1)
    for _ in range(rounds):
        asks = [_ask(row, texts[row][: lengths[row]], rng) for row in texts]
        drafts = drafter.propose(asks)
        assert len(drafts) == len(asks), f"{len(drafts)} drafts for {len(asks)} asks"
        for ask, draft in zip(asks, drafts, strict=True):
            check_draft(draft, ask.cap, vocab_size, ask.nodes, needs_q=True)
        solo = alone.propose(asks[:1])[0]
        assert list(solo.tokens) == list(drafts[0].tokens), "a row's draft depends on the other rows"
        for row in texts:
            lengths[row] = int(np.clip(lengths[row] + rng.integers(-1, 7), 1, 390))
    assert list(drafter.propose([])) == [], "no asks must give no drafts"
    for row in texts:
        drafter.end(row)


def _ask(row: int, tokens: np.ndarray, rng: np.random.Generator) -> Ask:
    committed = int(rng.integers(max(1, len(tokens) - 3), len(tokens) + 1))
    want = int(rng.integers(1, 9))
    return Ask(Context(row, tokens, committed), want, want + int(rng.integers(0, 3)), SamplingParams(), Noise(row))


def assert_lossless(rule: Rule, vocab_size: int = 3, depth: int = 3, seed: int = 0) -> None:
    """Raises AssertionError unless a rule emits exactly what the verifier would, whatever is drafted.

    A coupled rule must emit the verifier's own samples: every draft (every chain, and every pair of branches) meets
    every sequence of samples. Since each sequence comes with the verifier's own probability, equality for all of
    them is equality in distribution, also for drafts that share the verifier's random numbers.

    Of any other rule all random outcomes are enumerated, of the draft and of the rule, for chains and trees with their
    q, tokens without q, merged trees and tails: the text must have the verifier's distribution to 1e-12.

    Args:
        rule: the rule.
        vocab_size: V; 3 shows whatever a rule does.
        depth: of the drafts, 1 to 3.
        seed: of the distributions.
    """
    from cascade import enumeration

    if rule.coupled:
        _assert_own_samples(rule, vocab_size, depth)
        return
    for ends in (False, True):
        world = enumeration.World(vocab_size, seed, ends)
        for kind, makers in enumeration.makers(vocab_size, depth).items():
            for make in makers:
                off = enumeration.difference(rule, make, world, depth + 2)
                assert off < enumeration.PRECISION, f"{type(rule).__name__}, {kind}: a text is off by {off:.2g}"


def _assert_own_samples(rule: Rule, vocab_size: int, depth: int) -> None:
    from cascade.enumeration import own_tokens

    samples = list(itertools.product(range(vocab_size), repeat=depth + 1))
    for draft in _drafts(vocab_size, depth):
        for own in samples:
            verdict = rule.walk(draft, own_tokens(draft, own), lambda token: False)
            out = [draft.tokens[node] for node in verdict.path] + [verdict.extra]
            assert out == list(own[: len(out)]), f"draft {draft}: emitted {out}, the verifier's samples are {own}"
            assert verdict.accepted == len(verdict.path) <= verdict.tested


def _drafts(vocab_size: int, depth: int) -> list[Draft]:
    chains = [Draft(list(c)) for k in range(depth + 1) for c in itertools.product(range(vocab_size), repeat=k)]
    pairs = itertools.product(range(vocab_size), repeat=2 * min(depth, 2))
    half = min(depth, 2)
    return chains + [Draft(list(pair), [*range(-1, half - 1), -1, *range(half, 2 * half - 1)]) for pair in pairs]


def assert_same_text(engine: Engine, prompts: Sequence[object], params: SamplingParams) -> None:
    """Raises AssertionError unless the cascade's tokens equal plain decoding's, request by request."""
    import dataclasses

    fast = engine.generate(list(prompts), params)
    plain = engine.generate(list(prompts), dataclasses.replace(params, speculate=False))
    for i, (a, b) in enumerate(zip(fast, plain, strict=True)):
        assert a.tokens == b.tokens, f"prompt {i}: {a.tokens} with speculation, {b.tokens} without"
        assert (a.finish_reason, a.text) == (b.finish_reason, b.text)
