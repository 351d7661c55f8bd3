"""What a governor hands up, and what it keeps of one request."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import TYPE_CHECKING

from cascade.control.base import Controller, Estimates
from cascade.control.gate import Gate
from cascade.draft import Context, Draft, Verdict, free
from cascade.rules import children

if TYPE_CHECKING:
    from cascade.control.calibration import Calibration
    from cascade.governor import Governor


@dataclass(slots=True)
class Proposal:
    """A draft on its way up, with the governor that hands it up and the K it had asked for.

    Attributes:
        extra: what drafting it takes, and judging it beyond a plain forward, in plain forwards of who judges.
    """

    draft: Draft
    governor: Governor | None = None
    k: int = 0
    extra: float = 0.0


NOTHING = Proposal(Draft(()))
USUAL_PRIOR, USUAL_ROUNDS = 4.0, 24.0  # rounds that a usual one begins with, and that it remembers


@dataclass(slots=True)
class Usual:
    """Means over a request's rounds, forgetting; a few rounds without any draft stand before the first.

    Attributes:
        drafted, accepted: tokens per round of whoever verifies.
    """

    drafted: float = 0.0
    accepted: float = 0.0
    _rounds: float = USUAL_PRIOR

    def observe(self, drafted: int, accepted: int) -> None:
        """A round went by."""
        self._rounds = min(self._rounds + 1.0, USUAL_ROUNDS)
        self.drafted += (drafted - self.drafted) / self._rounds
        self.accepted += (accepted - self.accepted) / self._rounds


@dataclass(slots=True)
class GovernedRow:
    """What a governor keeps of one request."""

    controller: Controller
    gate: Gate
    calibration: Calibration
    barred: str | None = None  # why the request may not use this level at all
    invested: bool = False  # a model level: its prompt has been (or is being) prefilled
    bypassed: bool = False  # in the latest round
    shadow: tuple[int, list[int]] | None = None  # (position, tokens) proposed for free scoring only
    rounds: int = 0
    asks: int = 0  # how often it was asked: several times a round, where another level is between it and the target
    emitted: int = 0
    k: int | None = None
    floor: float = 0.0  # confidence under which the drafter should stop before K
    price: Callable[[int], float] = free  # what verifying so many nodes costs, in emitted tokens
    estimates: Estimates | None = None  # what its latest decision rested on
    repeats: float | None = None  # how much its prompt repeats itself, once somebody has looked
    most: float = math.inf  # tokens that a proposal may have at most, by what the level may still cost the request
    k_sum: int = 0
    drafted: int = 0
    tested: int = 0
    accepted: int = 0
    verdicts: list[tuple[int, int, int]] = field(default_factory=list)  # per proposal: proposed, tested, accepted
    dropped: int = 0
    bypassed_rounds: int = 0
    seconds: float = 0.0
    usual: Usual = field(default_factory=Usual)  # what its usual round takes and brings
    decisions: list[tuple[int, str, str]] = field(default_factory=list)
    members: dict[int, tuple[int, int]] = field(default_factory=dict)  # of merged drafters: nodes proposed, accepted

    def shadow_score(self, context: Context) -> tuple[int, int]:
        """(tested, accepted) of what was proposed unseen, once the text is long enough to say; (0, 0) until then."""
        if self.shadow is None:
            return 0, 0
        position, guess = self.shadow
        truth = context.tokens[position : position + len(guess)].tolist()
        accepted = next((i for i, (a, b) in enumerate(zip(guess, truth, strict=False)) if a != b), len(truth))
        if accepted == len(truth) < len(guess):
            return 0, 0
        self.shadow = None
        return min(accepted + 1, len(truth)), accepted

    def count(self, proposal: Proposal, verdict: Verdict) -> None:
        """Takes a judged proposal into the figures."""
        self.drafted += verdict.proposed
        self.tested += verdict.tested
        self.accepted += verdict.accepted
        if verdict.proposed:
            self.verdicts.append((verdict.proposed, verdict.tested, verdict.accepted))
            self.k_sum += proposal.k
        self._calibrate(proposal.draft, verdict)
        for node, mask in enumerate(proposal.draft.by or ()):
            for member in range(mask.bit_length()):
                if mask >> member & 1:
                    nodes, held = self.members.get(member, (0, 0))
                    self.members[member] = (nodes + 1, held + (node in verdict.path))

    def _calibrate(self, draft: Draft, verdict: Verdict) -> None:
        """Compares what a drafter thought of its best tokens with what came of them, at each depth that was tested."""
        if draft.chances is None:
            return
        below = children(draft)
        for node, held in zip_longest([-1, *verdict.path[: verdict.tested - 1]][: verdict.tested], verdict.path):
            first, *others = below[node + 1] if node is not None and below[node + 1] else [-1]
            chance = draft.chances[first] if first >= 0 else None
            if chance is not None:
                self.calibration.observe(chance, held == first)
            shares = [share for other in others if (share := draft.chances[other]) is not None]
            if held != first and chance is not None and shares:
                self.calibration.observe_beside(min(sum(shares), 1.0), held is not None)

    def decide(self, what: str, reason: str) -> None:
        """Notes a change of mind; while the mind stays, only its latest reason is kept."""
        if self.decisions and self.decisions[-1][1] == what:
            self.decisions[-1] = (self.decisions[-1][0], what, reason)
        else:
            self.decisions.append((self.rounds, what, reason))
