"""Figures of one level: how often its proposals hold, how sure that is, and what it could bring at best."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cascade.config import LevelConfig
from cascade.control.theory import DraftCost, best_k
from cascade.planning.hardware import Away
from cascade.recording import Recording
from cascade.simulate import Simulated

if TYPE_CHECKING:
    from cascade.costs import Costs

SURE = 0.05  # half of the 95 % interval of an acceptance that decisions can rest on
Z95 = 1.96


@dataclass(frozen=True)
class Acceptance:
    """How often a level's proposals hold.

    Attributes:
        alpha: accepted / tested; None where nothing was tested.
        tested: positions.
        width: half of its 95 % interval, texts being alike in themselves.
        questions: how many like these it takes for `SURE`; 0 where these do.
    """

    alpha: float | None
    tested: int
    width: float
    questions: int


def acceptance(pairs: Iterable[tuple[int, int]]) -> Acceptance:
    """A level's acceptance from (tested, accepted) of each question.

    The 95 % interval is the larger of two: as if every token stood for itself, with two more that held and two that
    did not (Agresti and Coull 1998); and as a ratio of sums over questions, since the tokens of one are alike.
    """
    known = [(tested, accepted) for tested, accepted in pairs if tested]
    tested, accepted = (sum(values) for values in zip(*known, strict=True)) if known else (0, 0)
    if not tested:
        return Acceptance(None, 0, 1.0, 0)
    alpha, count = accepted / tested, len(known)
    middle = (accepted + 2) / (tested + 4)
    variance = middle * (1 - middle) / (tested + 4)
    if count > 1:
        spread = sum((held - alpha * of) ** 2 for of, held in known)
        variance = max(variance, count / (count - 1) * spread / tested**2)
    width = Z95 * math.sqrt(variance)
    return Acceptance(alpha, tested, width, math.ceil(count * (width / SURE) ** 2) if width > SURE else 0)


def right_in(recording: Recording, level: str) -> tuple[int, int]:
    """How many tokens of an answer a model could have proposed, and would have. The first comes with the prompt."""
    said = recording.said.get(level)
    if said is None:
        return 0, 0
    pairs = list(zip(said.ids[1:, 0].tolist(), recording.tokens[1:], said.chances[1:, 0].tolist(), strict=True))
    return sum(chance > 0 for _, _, chance in pairs), sum(mine == own for mine, own, chance in pairs if chance > 0)


class Bound:
    """What a drafter could bring at best, in closed form: rounds of K tokens of which all hold.

    Args:
        costs, target, batch, overhead: what rounds take.
        away: by level: those that are not where their verifier is.
        plain: plain decoding; what comes before the first token no drafter makes faster.

    Attributes:
        round: seconds of a round of plain decoding.
    """

    def __init__(
        self, costs: Costs, away: Mapping[str, Away], target: str, plain: Simulated, batch: int, overhead: float
    ) -> None:
        self._costs, self._away, self._target = costs, away, target
        self._batch, self._overhead = batch, overhead
        forward = costs.seconds(target, batch, batch) or 0.0
        self.round = forward + overhead
        whole = sum(result.stats.wall_s for result in plain.results)
        first = sum(result.stats.first_token_s or 0.0 for result in plain.results)
        self._first = first / whole if whole else 0.0

    def token_cost(self, parts: Sequence[LevelConfig]) -> float:
        """The time of a token proposed by these drafters, in rounds of plain decoding: of a model, a forward on one."""
        return sum(self._seconds(part) for part in parts) / self.round if self.round else 0.0

    def way(self, parts: Sequence[LevelConfig]) -> float:
        """What a proposal spends between two places, in the same unit."""
        ways = [self._away[str(part.name)].seconds(0, 0, True) for part in parts if part.name in self._away]
        return sum(ways) / self.round if self.round else 0.0

    def _seconds(self, part: LevelConfig) -> float:
        name, rows = str(part.name), self._batch
        if part.model is None:
            return self._costs.draft_seconds(name, rows=rows) or 0.0
        known = (self._costs.seconds(one, rows, rows) for one in (name, name.rpartition("/")[2]))
        return next((seconds for seconds in known if seconds is not None), 0.0) + self._overhead

    def whole(self, cost: DraftCost, k_max: int = 16) -> tuple[float, int]:
        """The best speedup of whole answers if all tokens hold that are proposed at this cost, and its K."""

        def verify(tokens: int) -> float:
            seconds = self._costs.seconds(self._target, self._batch * tokens, self._batch) or 0.0
            return (seconds + self._overhead) / self.round if self.round else 1.0

        k, speedup = best_k(1.0, cost, verify, 1, max(k_max, 1))
        return 1.0 / (self._first + (1.0 - self._first) / speedup), k
