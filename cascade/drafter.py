"""The one page a drafter's author must read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from cascade.draft import Ask, Context, Draft, Verdict

if TYPE_CHECKING:
    from cascade.config import SamplingParams


class Drafter:
    """Proposes tokens. Nothing a drafter does can change the text, only the speed.

    Subclasses define `propose`; every other method may stay as it is. Options of the level
    (`LevelConfig(options={...})`) reach the constructor as keyword arguments. One object serves one
    engine; it may be asked for several requests (rows) at once.
    """

    #: False for a drafter whose proposals cost next to nothing: it may then be scored for free on
    #: text that was decoded without it, to learn when it is worth asking again.
    costly: bool = True

    def propose(self, asks: Sequence[Ask]) -> Sequence[Draft]:
        """One `Draft` per ask, in order. An empty draft is normal; one longer than `ask.cap` is cut.

        Raising costs this proposal, never the request, and counts as a test that failed.
        """
        raise NotImplementedError

    def start(self, row_id: int, params: SamplingParams) -> None:
        """A request begins."""

    def observe(self, row_id: int, verdict: Verdict) -> None:
        """The target committed `verdict.chain` for this row, whoever proposed it."""

    def end(self, row_id: int) -> None:
        """A request ended: forget what belongs to it. Called once for every `start`."""

    def scores(self, context: Context) -> Any:
        """Next-token scores [V] for free scoring, or None where the drafter has none."""
        return None
