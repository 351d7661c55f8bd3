"""A level: a model that scores what its drafter proposes and hands up what it agrees with.

`Level.advance` is the one round loop, for every depth, rule, batch and tree: the target is the top
level, and a level asked by another level is a drafter like any other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from cascade.draft import Ask, Context, Draft, Verdict
from cascade.drafter import Drafter
from cascade.errors import DecodeError
from cascade.governed import NOTHING, Proposal
from cascade.rows import CausalModel, Feed, Row, Scores
from cascade.rules import Rule
from cascade.sampling import Sampler
from cascade.timing import Timing

if TYPE_CHECKING:
    from cascade.config import SamplingParams
    from cascade.costs import Costs
    from cascade.governor import Governor

PROBE_TOKENS = 16  # positions a probe compares at most: the latest ones, which say most about what comes


@dataclass(slots=True)
class Progress:
    """How far one ask has come within one call of `Level.advance`.

    Attributes:
        context: the ask's context with the tokens held so far appended.
        tokens, origins: what is held, and the level that first proposed each token.
        logprobs: per token, where the request asks for them (target only).
        verdicts: how each draft fared, with the proposal it came from.
        chances: how sure this level was of each token, if it was asked: its best token's probability, which for
            sampled rows says more than the token's own.
        confidence: by these, the chance that all tokens held are its verifier's too.
        ended: the text is over, or this level cannot continue it.
        error: why the row failed.
    """

    ask: Ask
    context: Context
    tokens: list[int] = field(default_factory=list)
    origins: list[int] = field(default_factory=list)
    logprobs: list[dict[int, float]] = field(default_factory=list)
    verdicts: list[tuple[Proposal, Verdict]] = field(default_factory=list)
    chances: list[float] = field(default_factory=list)
    confidence: float = 1.0
    ended: bool = False
    error: Exception | None = None

    @property
    def room(self) -> int:
        """How many more tokens the asker can use."""
        return self.ask.cap - len(self.tokens)

    @property
    def wants(self) -> bool:
        """Whether the row stays in the loop: it leaves on want, cap, doubt, end or error, each on its own."""
        enough = len(self.tokens) >= max(self.ask.want, 1) or self.confidence < self.ask.floor
        return not self.ended and not enough and self.room > 0


@dataclass(slots=True)
class LevelRow:
    """What a level keeps of one request: its cache, its sampler and its counters."""

    cache: Row
    sampler: Sampler | None = None
    forwards: int = 0
    tokens_fed: int = 0
    seconds: float = 0.0


class Level(Drafter):
    """A model with the drafter below it, and the rule by which it judges that drafter's tokens.

    Args:
        index, name: its place in the cascade, bottom is 0.
        model: scores packed rows.
        source: what proposes to it, None for a level that decodes alone.
        rule: turns its choices and a draft into accepted tokens.
        costs: keeps how long forwards take.
        clock: seconds, monotonic.
        is_target: the target applies the request's own processors; inner levels what is cheap.
        end_ids: tokens that end a text.
        tail: after its own tokens, hand up guesses of the drafter below as well, unverified: the level
            above verifies a few more tokens for almost nothing while it is bound by memory.
    """

    def __init__(
        self,
        index: int,
        name: str,
        model: CausalModel,
        source: Governor | None,
        rule: Rule,
        costs: Costs,
        clock: Callable[[], float],
        *,
        is_target: bool = False,
        end_ids: Sequence[int] = (),
        tail: bool = False,
    ) -> None:
        self.index = index
        self.name = name
        self.model = model
        self.source = source
        self.rule = rule
        self.costs = costs
        self.clock = clock
        self.is_target = is_target
        self.end_ids = tuple(end_ids)
        self.tail = tail
        self.timing = Timing(name, model, costs, clock)
        self.rows: dict[int, LevelRow] = {}
        self.forwards = 0  # of all rows together, ever
        self.forward_seconds = 0.0  # the same: what is not model time is the engine's own work

    # -- the life of a row ---------------------------------------------------------------------------

    def start(self, row_id: int, params: SamplingParams) -> None:
        """A request begins, here and below."""
        if row_id not in self.rows:
            self.rows[row_id] = LevelRow(self.model.new_row())
        if self.source is not None:
            self.source.start(row_id, params)

    def settle(self, context: Context, emitted: int) -> None:
        """Drops what the cache holds beyond the committed tokens, here and below; `emitted` of them are new."""
        row = self.rows.get(context.row_id)
        if row is not None:
            row.cache.sync(context.tokens)
        if self.source is not None:
            self.source.settle(context, emitted)

    def end(self, row_id: int) -> None:
        """A request ended: its cache is freed, here and below."""
        self.rows.pop(row_id, None)
        if self.source is not None:
            self.source.end(row_id)

    # -- the round loop ------------------------------------------------------------------------------

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        """This model's own continuation of each context, at least `want` tokens where it can."""
        progress = self.advance(asks)
        if self.tail:
            self._append_tails(progress)
        return [
            Draft(
                p.tokens,
                origin=p.origins,
                chances=p.chances if len(p.chances) == len(p.tokens) else None,
                error=p.error,
            )
            for p in progress
        ]

    def advance(self, asks: Sequence[Ask]) -> list[Progress]:
        """Rounds of ask, score, walk and append, until every row holds what it was asked for."""
        progress = [Progress(ask, ask.context) for ask in asks]
        while active := [p for p in progress if p.wants and self.fits(p.context)]:
            proposals = self._ask_below(active)
            scores = self._score(active, proposals)
            start = 0
            for row, proposal in zip(active, proposals, strict=True):
                stop = start + len(proposal.draft) + 1
                self._judge(row, proposal, scores.part(start, stop))
                start = stop
        return progress

    def _append_tails(self, progress: Sequence[Progress]) -> None:
        """Appends what the drafter below would say next, as far as there is room."""
        rows = [row for row in progress if row.tokens and not row.ended and row.room > 0]
        if not rows:
            return
        for row, proposal in zip(rows, self._ask_below(rows, keep=0), strict=True):
            if proposal.draft.parents is None:
                row.tokens += proposal.draft.tokens
                row.origins += proposal.draft.origins()

    def fits(self, context: Context) -> bool:
        """Whether the model can score the position after this context."""
        return self.model.max_length is None or len(context) <= self.model.max_length

    def _ask_below(self, active: Sequence[Progress], keep: int = 1) -> list[Proposal]:
        """One proposal per row, never longer than its room; `keep` places are this level's own token's."""
        if self.source is None:
            return [NOTHING] * len(active)
        asks = []
        for row in active:
            cap = row.room - keep
            if self.model.max_length is not None:
                cap = min(cap, self.model.max_length - len(row.context))
            asks.append(row.ask.below(row.context, cap, cap))
        return self.source.draft(asks, self)

    def _score(self, active: Sequence[Progress], proposals: Sequence[Proposal]) -> Scores:
        """One packed forward over all rows, N + 1 positions of each."""
        began = self.clock()
        feeds = []
        for row, proposal in zip(active, proposals, strict=True):
            state, draft = self.rows[row.context.row_id], proposal.draft
            cached = state.cache.sync(row.context.tokens)
            tokens = row.context.tokens[cached:].tolist() + list(draft.tokens)
            feeds.append(Feed(state.cache, tokens, len(draft) + 1, draft.parents))
        greedy = any(self._sampler(row.ask).plain for row in active)
        scores = Scores.of(self.model.forward(feeds), greedy=greedy, sure=any(row.ask.floor for row in active))
        self._account([self.rows[row.context.row_id] for row in active], feeds, self.clock() - began)
        return scores

    def _account(self, states: Sequence[LevelRow], feeds: Sequence[Feed], seconds: float) -> None:
        """Books a forward: each row bears an equal share of its time."""
        self.forwards += 1
        self.forward_seconds += seconds
        self.costs.observe(self.name, sum(len(feed.tokens) for feed in feeds), len(feeds), seconds)
        for state, feed in zip(states, feeds, strict=True):
            state.forwards += 1
            state.tokens_fed += len(feed.tokens)
            state.seconds += seconds / len(feeds)

    def _judge(self, row: Progress, proposal: Proposal, scores: Scores) -> None:
        """Walks the draft, appends what held and this level's own token, and crops the cache."""
        state, draft = self.rows[row.context.row_id], proposal.draft
        sampler = self._sampler(row.ask)
        choose = self._greedy(scores.picks) if sampler.plain else self._lazy(row, draft, sampler, scores.logits)
        walked: list[int] = []  # nodes that held so far

        def step(node: int) -> int:
            if node >= 0:
                walked.append(node)
            return choose(node)

        def ends(token: int) -> bool:
            return sampler.ends(token) or (row.ask.ends is not None and row.ask.ends(token))

        base = len(row.context)
        try:
            verdict = self.rule.walk(draft, step, ends)
        except Exception as error:  # a processor that raises, logits that are not numbers: this row alone fails
            row.error, row.ended = error, True
            verdict = Verdict(walked, None, len(walked), len(walked), len(draft))  # what held, holds
        if draft.parents is not None:
            state.cache.keep(base, verdict.path)
        state.cache.crop(base + verdict.accepted)
        origins = draft.origins()
        verdict.chain = [draft.tokens[node] for node in verdict.path]
        row.origins += [origins[node] for node in verdict.path]
        if verdict.extra is not None:
            verdict.chain.append(verdict.extra)
            row.origins.append(self.index)
        row.ended = row.ended or (bool(verdict.chain) and sampler.ends(verdict.chain[-1]))
        row.tokens += verdict.chain
        row.context = row.context.extended(verdict.chain)
        row.verdicts.append((proposal, verdict))
        if scores.chances is not None:
            scored = [0, *(node + 1 for node in verdict.path)]
            chances = [scores.chances[i] for i in scored[: len(verdict.chain)]]
            row.confidence *= math.prod(map(row.ask.chance, chances))
            row.chances += chances
        if proposal.governor is not None:
            proposal.governor.observe(row.context.row_id, proposal, verdict)

    @staticmethod
    def _greedy(picks: Sequence[int | None] | None) -> Callable[[int], int]:
        assert picks is not None

        def choose(node: int) -> int:
            pick = picks[node + 1]
            if pick is None:
                raise DecodeError("the model's logits are not numbers: NaN or infinite")
            return pick

        return choose

    def _lazy(self, row: Progress, draft: Draft, sampler: Sampler, logits: torch.Tensor) -> Callable[[int], int]:
        """Samples one node at a time, on the true prefix: each token only after the one before it held."""
        prefix = row.context

        def choose(node: int) -> int:
            nonlocal prefix
            if node >= 0:
                prefix = prefix.extended([draft.tokens[node]])
            token = sampler.sample(logits[node + 1], prefix.tokens)
            if self.is_target and sampler.logprobs is not None:
                row.logprobs.append(sampler.logprobs)
            return token

        return choose

    def _sampler(self, ask: Ask) -> Sampler:
        row = self.rows[ask.context.row_id]
        if row.sampler is None:
            row.sampler = Sampler(ask.params, ask.noise, self.end_ids, ask.prompt_length, draft=not self.is_target)
        return row.sampler

    # -- learning without proposing ------------------------------------------------------------------

    def probe(self, ask: Ask) -> tuple[int, int]:
        """Catches up on committed tokens; returns (tested, accepted) of this level's own choices there.

        One forward over what is not cached yet: the tests are free, nothing is proposed.
        """
        state, tokens = self.rows[ask.context.row_id], ask.context.tokens
        cached = state.cache.sync(tokens)
        fed = tokens[cached:].tolist()
        keep = min(len(fed), PROBE_TOKENS + 1)
        began = self.clock()
        feed = Feed(state.cache, fed, keep)
        logits = self.model.forward([feed])
        self._account([state], [feed], self.clock() - began)
        sampler, first = self._sampler(ask), len(tokens) - keep + 1
        state.cache.crop(len(tokens) - 1)
        if sampler.plain:
            choices = logits[:-1].argmax(-1).cpu().numpy()
        else:
            choices = np.array([sampler.sample(logits[i], tokens[: first + i]) for i in range(keep - 1)], np.int64)
        return len(choices), int((choices == tokens[first:]).sum())

    def uncached(self, context: Context) -> int:
        """How many tokens a forward for this context would have to feed."""
        row = self.rows.get(context.row_id)
        return len(context) if row is None else len(context) - row.cache.sync(context.tokens)

    def warm_up(self) -> None:
        """Times forwards of a few widths, so that the first decisions rest on measured costs."""
        self.timing.warm_up()
