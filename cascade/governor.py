"""The governor of a proposing level: whether it is asked for a request at all, and for how many tokens.

One stands between each level and its drafter. It holds what control needs and what stats report, per
request; the level above only sees drafts. A bypassed level is not a branch anywhere else: its
governor passes the question on to the one below.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from cascade.config import BypassConfig, LevelConfig
from cascade.control.base import FIRST_TESTS, Controller, Outcome
from cascade.control.calibration import Calibration
from cascade.control.gate import Gate, Investment
from cascade.control.repeats import ByRepeats
from cascade.costs import Costs
from cascade.deciding import decide, estimates_for
from cascade.draft import Ask, Context, Draft, Verdict, first_path
from cascade.draft_checks import check_draft
from cascade.drafter import Drafter
from cascade.governed import NOTHING, GovernedRow, Proposal
from cascade.level import Level
from cascade.merged import Merged

if TYPE_CHECKING:
    from cascade.config import SamplingParams


log = logging.getLogger("cascade")
PRIOR_ALPHA = 0.8  # before anything was tested: hopeful, since only a level that is tried can show what it is worth
PRIOR_ALPHA_SELF = 0.95  # of a quantised copy of the target
FORGET = 0.02  # share by which alpha returns to the prior per request that tested nothing: one day it is tried again
WAITED = 8  # rounds without a level that say that it has been left out
STRETCH = 4  # a drafter that stops when in doubt is asked for so many times K
SLOW = 512  # tested tokens that the engine-wide alpha remembers
RECENT_WIDTH = 0.1  # weight of one proposal in the usual width of trees


class Governor:
    """Stands between a drafter and the level that verifies it. See the module's docstring.

    Args:
        index: the drafter's level, bottom is 0.
        config: its LevelConfig, name filled in.
        drafter: what it governs: a Level, or any Drafter.
        controller: makes a controller for a request.
        bypass: the cascade's bypass settings.
        costs, clock: injectable.
        vocab_size: ids that the target may emit.
    """

    def __init__(
        self,
        index: int,
        config: LevelConfig,
        drafter: Drafter,
        controller: Callable[[], Controller],
        bypass: BypassConfig,
        costs: Costs,
        clock: Callable[[], float],
        vocab_size: int,
    ) -> None:
        self.index = index
        self.name = str(config.name)
        self.config = config
        self.drafter = drafter
        self.below = drafter.source if isinstance(drafter, Level) else None
        self.controller = controller
        self.bypass = config.bypass or bypass
        self.costs = costs
        self.clock = clock
        self.vocab_size = vocab_size
        self.investment = Investment()
        self.rows: dict[int, GovernedRow] = {}
        self.prior = PRIOR_ALPHA_SELF if isinstance(config.model, str) and config.model == "self" else PRIOR_ALPHA
        self.alpha = self.prior  # engine-wide, slow
        self.calibrations = {False: Calibration(), True: Calibration()}  # of greedy rows, and of sampled ones
        self.width = 1.0  # nodes per token of depth in recent proposals: 1 for chains
        self.tests = FIRST_TESTS  # how many tests alpha stands for
        lookup = not any(isinstance(one, Level) for one in getattr(drafter, "members", [drafter]))
        self.kinds = ByRepeats(lookup)

    def usual_alpha(self, row: GovernedRow) -> float:
        """The engine-wide alpha for a request with such a prompt."""
        repeats = row.repeats or 0.0
        first = (self.kinds.first(repeats, self.prior) - self.prior) * FIRST_TESTS / self.tests  # what is left of it
        return min(1.0, max(0.0, self.kinds.alpha(repeats, self.alpha + first)))

    # -- the life of a row ---------------------------------------------------------------------------

    def start(self, row_id: int, params: SamplingParams) -> None:
        """A request begins, here and below."""
        bypass, own = self.bypass, params.bypass_threshold
        bypass = bypass if own is None else replace(bypass, threshold=own, gain=None)
        barred = None
        if not params.speculate:
            barred = "the request asked for plain decoding"
        elif params.levels is not None and self.name not in params.levels:
            barred = "the request's levels leave it out"
        elif self.config.k == 0:
            barred = "k=0 in the configuration"
        gate = Gate(bypass, costly=getattr(self.drafter, "costly", True))
        row = GovernedRow(self.controller(), gate, self.calibrations[params.temperature > 0], barred)
        if barred:
            row.decide("off", barred)
        self.rows[row_id] = row
        try:
            self.drafter.start(row_id, params)
        except Exception as error:
            row.barred = f"its start() failed: {type(error).__name__}: {error}"
            row.decide("off", row.barred)
            self._complain(row, error)

    def settle(self, context: Context, emitted: int) -> None:
        """The target committed: score what was proposed in the shadow, drop what is now wrong."""
        row = self.rows[context.row_id]
        row.rounds += 1
        row.emitted = emitted
        tested, accepted = row.shadow_score(context)
        self._learn(row, tested, accepted)
        if tested:
            row.controller.observe(Outcome(0, 0, tested, accepted))
        if isinstance(self.drafter, (Level, Merged)):
            self.drafter.settle(context, emitted)

    def end(self, row_id: int) -> None:
        """A request ended, here and below."""
        row = self.rows.pop(row_id, None)
        if row is not None:
            self.investment.finished(row.emitted)
            if not row.gate.tests:
                self.alpha += FORGET * (self.prior - self.alpha)
            left_out = not row.gate.tests and row.barred is None and row.bypassed_rounds == row.asks >= WAITED
            try:
                self.drafter.end(row_id)
                if left_out:
                    self.drafter.timing.again() if isinstance(self.drafter, Level) else self.costs.relax(self.name)
            except Exception as error:
                self._complain(row, error)

    # -- proposing -----------------------------------------------------------------------------------

    def draft(self, asks: Sequence[Ask], verifier: Level, batch: int = 0) -> list[Proposal]:
        """One proposal per ask: from this level where it is open for the row, else from the one below.

        Args:
            asks: of the rows that this level may draft for.
            verifier: who asks.
            batch: how many rows its forward serves; 0: those of `asks`.
        """
        batch = batch or len(asks)
        proposals = [NOTHING] * len(asks)
        own: list[tuple[int, Ask]] = []
        passed: list[tuple[int, Ask]] = []
        drafting = sum(self._drafts(self.rows[ask.context.row_id]) for ask in asks)
        among, joining = (  # those that draft, and one more
            (estimates_for(self, verifier, batch, rows), rows)
            for rows in (min(max(rows, 1), len(asks)) for rows in (drafting, drafting + 1))
        )
        for i, ask in enumerate(asks):
            # A prompt's own forward is bound by arithmetic: drafts would delay the first token, and soon
            # there are plenty of rounds.
            if ask.cap <= 0 or ask.context.committed == ask.prompt_length:
                continue
            k = decide(self, ask, *(among if self._drafts(self.rows[ask.context.row_id]) else joining))
            if k:
                # A level may hand up more than K: what its own model verified on the way is good to have.
                cap = min(ask.cap, max(k, self.config.k_max))
                row = self.rows[ask.context.row_id]
                stops = row.floor or (isinstance(self.drafter, Level) and row.controller.doubt)
                want = min(max(k, int(min(k * STRETCH, row.most))) if stops else k, cap)
                weighed = {"floor": row.floor, "price": row.price, "doubt": row.controller.doubt}
                weighed |= {"chance": row.calibration.chance, "share": row.calibration.share}
                own.append((i, ask.below(ask.context, want, cap, nodes=self.config.budget, **weighed)))
            else:
                passed.append((i, ask))
        if own:
            made = self._propose([ask for _, ask in own], verifier.model.trees)
            self._note_width(made)
            for (i, _), proposal in zip(own, made, strict=True):
                proposals[i] = proposal
        if passed and self.below is not None:
            below = self.below.draft([ask for _, ask in passed], verifier, batch)
            for (i, _), proposal in zip(passed, below, strict=True):
                proposals[i] = proposal
        return proposals

    def _propose(self, asks: Sequence[Ask], trees: bool) -> list[Proposal]:
        """Asks the drafter, cuts and checks what it says; whatever is wrong costs that proposal only.

        Without `trees`, of a tree only its first path is kept.
        """
        began = self.clock()
        try:
            drafts = self.drafter.propose(asks)
            if len(drafts) != len(asks):
                raise ValueError(f"{len(drafts)} drafts for {len(asks)} asks")
        except Exception as error:
            self._charge(asks, (self.clock() - began) / len(asks))
            return [self._drop(ask, error) for ask in asks]
        seconds = self.clock() - began
        if not isinstance(self.drafter, Level):
            nothing = [isinstance(draft, Draft) and not len(draft) for draft in drafts]
            self._charge([ask for ask, one in zip(asks, nothing, strict=True) if one], seconds / len(asks))
        proposals = []
        for ask, draft in zip(asks, drafts, strict=True):
            row = self.rows[ask.context.row_id]
            try:
                if draft.error is not None:  # what came before it may still hold
                    self._complain(row, draft.error, not len(draft))
                checked = check_draft(draft, ask.cap, self.vocab_size, ask.nodes, ask.needs_q)
                if checked.origin is None or not isinstance(self.drafter, Level):
                    checked.origin = self.index  # only a level knows of others below it
                if not trees:
                    checked = first_path(checked)
            except Exception as error:
                proposals.append(self._drop(ask, error))
                continue
            row.seconds += seconds / len(asks)
            proposals.append(Proposal(checked, self, row.k or ask.want, self._extra(row, ask, checked)))
        drafted = sum(p.draft.depth for p in proposals)
        if drafted:
            self.costs.observe_draft(self.name, 1, seconds * len(asks) / drafted, len(asks))
        return proposals

    def _charge(self, asks: Sequence[Ask], seconds: float) -> None:
        """Books time in which nothing was proposed: a drafter that looks for long and finds nothing is no gift."""
        for ask in asks:
            row = self.rows[ask.context.row_id]
            row.seconds += seconds
            if row.estimates is not None and row.estimates.token_seconds:
                row.gate.charge(-seconds / row.estimates.token_seconds)

    def _extra(self, row: GovernedRow, ask: Ask, draft: Draft) -> float:
        """What a proposal takes beyond a plain forward of its verifier, in such forwards."""
        known, looked = row.estimates, draft.depth
        if isinstance(self.drafter, Level) and row.controller.doubt is not None and looked < min(ask.want, ask.cap):
            looked += 1  # the position at which it stopped
        if known is None or not looked:
            return 0.0
        return known.price(looked) + known.verify(1 + round(len(draft) / self.width)) - 1.0

    def _note_width(self, proposals: Sequence[Proposal]) -> None:
        """Notes how many nodes proposals have per token of depth; of a drafter that prunes, more are there to pay."""
        depth = sum(p.draft.depth for p in proposals)
        if depth and not (isinstance(self.drafter, Level) and self.drafter.prunes):
            self.width += RECENT_WIDTH * (sum(len(p.draft) for p in proposals) / depth - self.width)

    def _drop(self, ask: Ask, error: Exception) -> Proposal:
        row = self.rows[ask.context.row_id]
        self._complain(row, error, True)
        return Proposal(Draft(()), self, row.k or ask.want)

    def _complain(self, row: GovernedRow, error: Exception, nothing: bool = False) -> None:
        """Counts what a drafter did wrong; the first time in a request it is also logged.

        A proposal that came to nothing is a test that failed: else no gate would ever close on a level that only fails.
        It says nothing of other requests.
        """
        row.dropped += 1
        row.gate.observe_tests(int(nothing), 0)
        if row.dropped == 1:
            log.warning(
                "level %s failed, and only its proposal is lost: %s: %s", self.name, type(error).__name__, error
            )

    @staticmethod
    def _drafts(row: GovernedRow) -> bool:
        """Whether a row drafted at this level when it was last asked: those share what it takes."""
        return row.asks > 0 and not row.bypassed

    # -- learning ------------------------------------------------------------------------------------

    def observe(self, row_id: int, proposal: Proposal, verdict: Verdict) -> None:
        """A draft of this level was judged, by whichever level asked for it."""
        row = self.rows[row_id]
        row.count(proposal, verdict)
        row.usual.observe(len(proposal.draft), verdict.accepted)
        row.gate.charge(verdict.accepted - proposal.extra)
        row.controller.observe(Outcome(proposal.k, proposal.draft.depth, verdict.tested, verdict.accepted))
        self._learn(row, verdict.tested, verdict.accepted)

    def _learn(self, row: GovernedRow, tested: int, accepted: int) -> None:
        if tested:
            row.gate.observe_tests(tested, accepted)
            self.kinds.observe(row.repeats or 0.0, tested, accepted)
            self.tests = min(self.tests + tested, SLOW)
            self.alpha += (accepted - tested * self.alpha) / self.tests

    def probe(self, row: GovernedRow, ask: Ask, k: int) -> None:
        """Tests that cost no proposal: a model catches up, anything else proposes in the shadow."""
        if isinstance(self.drafter, Level):
            try:
                tested, accepted = self.drafter.probe(ask)
            except Exception as error:
                self._complain(row, error, True)
            else:
                self._learn(row, tested, accepted)
                row.controller.observe(Outcome(0, 0, tested, accepted))
        else:
            draft = self._propose([ask.below(ask.context, k, min(k, ask.cap), nodes=self.config.budget)], False)[
                0
            ].draft
            row.shadow = (len(ask.context), list(first_path(draft).tokens))

    def tell(self, row_id: int, verdict: Verdict) -> None:
        """The target committed `verdict.chain`; the drafter hears of it whoever proposed."""
        try:
            self.drafter.observe(row_id, verdict)
        except Exception as error:
            self._complain(self.rows[row_id], error)
