"""A level: a model that scores what its drafter proposes and hands up what it agrees with.

`Level.advance` is the one round loop, for every depth, rule, batch and tree: the target is the top
level, and a level asked by another level is a drafter like any other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.nn import functional

from cascade.draft import Ask, Context, Draft, Verdict, extended, first_nodes, first_path
from cascade.drafter import Drafter
from cascade.governed import NOTHING, Proposal
from cascade.growth import Shape, grow
from cascade.leaves import with_leaves
from cascade.progress import LevelRow, Progress
from cascade.rows import CausalModel, Feed, Scores
from cascade.rules import Rule, rule_for
from cascade.sampling import Sampler
from cascade.timing import Timing
from cascade.walk import Dice, Walk

if TYPE_CHECKING:
    from cascade.config import SamplingParams
    from cascade.costs import Costs
    from cascade.governor import Governor


PROBE_TOKENS = 16  # positions a probe compares at most: the latest ones, which say most about what comes


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
        shape: of the trees that it hands up, grown by its own model; a dynamic one above a drafter is the chain that it
            came to with that drafter, and leaves. None: chains.
        vocab_size: ids that the target may emit: what a larger head has beyond them is impossible.
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
        shape: Shape | None = None,
        vocab_size: int | None = None,
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
        self.shape = shape
        self.vocab_size = vocab_size or model.vocab_size
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
        """This model's own continuation of each context, at least `want` tokens deep where it can."""
        if self.shape is not None and not (self.source is not None and self.prunes):
            drafts = grow(self, asks, self.shape)
        else:
            drafts = [self._draft(progress) for progress in self.advance(asks)]
        return self._with_tails(asks, drafts) if self.tail else drafts

    def _draft(self, progress: Progress) -> Draft:
        """What a row holds, as a proposal. q travels only with tokens that were truly drawn from it.

        How many tokens a round yields depends on them, but on none after the one where it stops: that a token is
        there says nothing of it.
        """
        tokens, count = progress.tokens, len(progress.tokens)
        chances = progress.chances if len(progress.chances) == count else None
        q = torch.stack(progress.q) if progress.q and len(progress.q) == count else None
        draft = Draft(tokens, None, q, progress.origins, chances, progress.error)
        if self.shape is None or chances is None or progress.error is not None:
            return draft
        return with_leaves(self, progress, draft)

    @property
    def prunes(self) -> bool:
        """Whether it leaves out of its trees what does not pay."""
        return self.shape is not None and self.shape.prunes

    def score(self, feeds: Sequence[Feed]) -> torch.Tensor:
        """One packed forward: logits [sum of keep, vocab_size], whatever the size of the model's head."""
        logits = self.model.forward(feeds)[:, : self.vocab_size]
        missing = self.vocab_size - logits.shape[1]
        return functional.pad(logits, (0, missing), value=-math.inf) if missing else logits

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

    def _with_tails(self, asks: Sequence[Ask], drafts: Sequence[Draft]) -> list[Draft]:
        """The drafts, each first path with what the drafter below would say next, as far as there is room."""
        out, longer = list(drafts), []
        for i, (ask, draft) in enumerate(zip(asks, drafts, strict=True)):
            path = first_nodes(draft)
            tokens = [draft.tokens[node] for node in path]
            if path and len(path) < ask.cap and not self._sampler(ask).ends(tokens[-1]):
                longer.append((i, path, Progress(ask, ask.context.extended(tokens), tokens)))
        if longer:
            proposals = self._ask_below([row for _, _, row in longer], keep=0)
            for (i, path, _), proposal in zip(longer, proposals, strict=True):
                room = len(proposal.draft) if out[i].parents is None else max(asks[i].nodes - len(out[i]), 0)
                guesses = first_path(proposal.draft)
                out[i] = extended(out[i], path[-1], guesses.picked(range(min(room, len(guesses)))))
        return out

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
            fresh = {}
            if not self._rule(row.ask).coupled:
                fresh = {"noise": self.dice(row.ask).fresh(), "needs_q": self.rule.needs_q and keep > 0}
            asks.append(row.ask.below(row.context, cap, cap, **fresh))
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
        logits = self.score(feeds)
        sure = self.shape is not None or any(row.ask.floor for row in active)
        doubt = any(row.ask.doubt is not None for row in active)
        scores = Scores.of(logits, greedy=greedy, sure=sure, doubt=doubt)
        self.account([self.rows[row.context.row_id] for row in active], feeds, self.clock() - began)
        return scores

    def account(self, states: Sequence[LevelRow], feeds: Sequence[Feed], seconds: float) -> None:
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
        state, draft, rule = self.rows[row.context.row_id], proposal.draft, self._rule(row.ask)
        sampler = self._sampler(row.ask)
        walk = Walk(row.context, draft, sampler, scores, self.dice(row.ask))

        def ends(token: int) -> bool:
            return sampler.ends(token) or (row.ask.ends is not None and row.ask.ends(token))

        base = len(row.context)
        try:
            verdict = rule.walk(draft, walk, ends)
        except Exception as error:  # a processor that raises, logits that are not numbers: this row alone fails
            row.error, row.ended = error, True
            held = walk.walked if rule.lazy else []
            verdict = Verdict(held, None, len(held), len(held), len(draft))  # what held, holds
        if draft.parents is not None:
            state.cache.keep(base, verdict.path)
        state.cache.crop(base + verdict.accepted)
        self._append(row, draft, verdict, walk, scores)
        row.ended = row.ended or (bool(verdict.chain) and sampler.ends(verdict.chain[-1]))
        if proposal.governor is not None:
            proposal.governor.observe(row.context.row_id, proposal, verdict)
        row.verdicts.append((proposal, verdict))

    def _append(self, row: Progress, draft: Draft, verdict: Verdict, walk: Walk, scores: Scores) -> None:
        """Appends what a draft came to, with what is known of each token."""
        origins = draft.origins()
        verdict.chain = [draft.tokens[node] for node in verdict.path]
        row.origins += [origins[node] for node in verdict.path]
        if verdict.extra is not None:
            verdict.chain.append(verdict.extra)
            row.origins.append(self.index)
        if self.is_target:
            row.logprobs += walk.report(verdict)
        elif row.ask.needs_q and not self._rule(row.ask).coupled and self.rule.lossless:
            row.q += walk.q(verdict)
        self._stop_in_doubt(row, verdict, scores)
        row.tokens += verdict.chain
        row.context = row.context.extended(verdict.chain)
        if scores.chances is not None:
            scored = [0, *(node + 1 for node in verdict.path)]
            chances = [scores.chances[i] for i in scored[: len(verdict.chain)]]
            row.chances += chances
            row.lines += [scores.logits[i] for i in scored[: len(verdict.chain)]] if self.shape is not None else []
            row.confidence *= math.prod(map(row.ask.chance, chances))

    @staticmethod
    def _stop_in_doubt(row: Progress, verdict: Verdict, scores: Scores) -> None:
        """Leaves out the first token whose distribution was too wide to draw from, and what comes after it.

        That distribution depends on the tokens before it, not on itself, so what is left keeps its q.
        """
        if row.ask.doubt is None or scores.entropies is None:
            return
        scored = [0, *(node + 1 for node in verdict.path)][: len(verdict.chain)]
        stop = next((i for i, line in enumerate(scored) if row.ask.doubt.stops(scores.entropies[line])), None)
        if stop is not None:
            drop = len(verdict.chain) - stop
            del verdict.chain[stop:]
            for held in (row.origins, row.q):
                del held[len(held) - min(drop, len(held)) :]
            row.ended = True

    def _rule(self, ask: Ask) -> Rule:
        """The rule by which a row's drafts are judged."""
        return rule_for(ask.params, self.rule)

    def state(self, ask: Ask) -> tuple[LevelRow, Sampler]:
        """What is kept of a row, and its sampler."""
        return self.rows[ask.context.row_id], self._sampler(ask)

    def dice(self, ask: Ask) -> Dice:
        """This level's fresh random numbers for a row."""
        state = self.rows[ask.context.row_id]
        if state.dice is None:
            state.dice = Dice(ask.noise, self.name)
        return state.dice

    def _sampler(self, ask: Ask) -> Sampler:
        """The row's sampler; its noise, in a draft that is drawn with fresh noise, is that of its first ask."""
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
        logits = self.score([feed])
        self.account([state], [feed], self.clock() - began)
        sampler, first = self._sampler(ask), len(tokens) - keep + 1
        state.cache.crop(len(tokens) - 1)
        if sampler.plain or not self.rule.coupled:  # which draw from p and from q by themselves
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
