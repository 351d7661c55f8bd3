"""Times a model's forwards where no request does."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

from cascade.costs import SURE
from cascade.rows import CausalModel, Feed

if TYPE_CHECKING:
    from cascade.costs import Costs

WIDTHS = (1, 4, 8, 16, 64)  # tokens of a forward
SHARE = 0.005  # of the time may go into measuring again


class Timing:
    """Keeps the costs of a level's model measured: at load, and again while the level is left out.

    A machine that was busy at load would else keep a level out for good: unused, it is not measured.

    Args:
        name: the level's.
        model: its model.
        costs: where times go.
        clock: seconds, monotonic.

    Attributes:
        known: widths whose costs were brought along from another process.
    """

    def __init__(self, name: str, model: CausalModel, costs: Costs, clock: Callable[[], float]) -> None:
        self._name, self._model, self._costs, self._clock = name, model, costs, clock
        limit = model.max_length or max(WIDTHS)
        self._widths = [width for width in WIDTHS if width <= limit]
        self._not_before = 0.0
        self.known: Collection[int] = ()

    def warm_up(self) -> None:
        """Times forwards of a few widths, so that the first decisions rest on measured costs.

        Of widths that are known already only the narrowest is timed: by how much all of them have changed.
        """
        began, known = self._clock(), [width for width in self._widths if width in self.known]
        if known:
            self._costs.observe(self._name, known[0], 1, self._quickest(known[0]))
        for width in self._widths:
            if width not in known:
                quickest = self._quickest(width)
                for _ in range(SURE):
                    self._costs.observe(self._name, width, 1, quickest)
        now = self._clock()
        self._not_before = now + (now - began) / SURE / SHARE

    def again(self) -> None:
        """Times a forward of every width, unless that were more than `SHARE` of the time since it was last done."""
        began = self._clock()
        if began < self._not_before:
            return
        for width in self._widths:
            self._costs.observe(self._name, width, 1, self._forward(width))
        now = self._clock()
        self._not_before = now + (now - began) / SHARE

    def _quickest(self, width: int) -> float:
        """The quickest of three: the first also allocates, and a busy machine must not look slow for good."""
        return min(self._forward(width) for _ in range(SURE))

    def _forward(self, width: int) -> float:
        began = self._clock()
        self._model.forward([Feed(self._model.new_row(), [0] * width, 1)]).max(-1).indices.tolist()
        return self._clock() - began
