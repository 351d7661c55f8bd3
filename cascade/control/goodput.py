"""K where the predicted goodput is largest: expected tokens over measured time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from cascade.control.base import Controller, Estimates, Outcome
from cascade.control.options import number
from cascade.control.rolling import RollingAlpha
from cascade.control.theory import best_k


class Goodput(Controller):
    """The K of the largest E(alpha, K) / (price(K) + verify(K + 1)), afresh every round: TurboSpec (Liu et al. 2024).

    All levels are weighed together: what a token costs is what it costs with the best K of the levels below, for this
    row's text (`cascade.deciding.for_row`), and cheaper tokens never make any K of the level above worse.

    Options: `half_life` of the request's own alpha and `trust` in the engine-wide one, both in tested tokens.
    """

    defaults: ClassVar[Mapping[str, Any]] = {"half_life": 64.0, "trust": 16.0}

    def __init__(self, *, k: int | None, k_min: int, k_max: int, **options: Any) -> None:
        super().__init__(k=k, k_min=k_min, k_max=k_max, **options)
        half_life = number(self, "half_life", 0.0, open_low=True)
        self._alpha = RollingAlpha(half_life, number(self, "trust", 0.0, open_low=True))
        self._judged = False

    def next_k(self, estimates: Estimates) -> int:
        """The best K for what is known; at first the level's own `k`, if it has one."""
        if self.first_k is not None and not self._judged:
            return min(max(self.first_k, self.k_min), self.k_max)
        alpha = self._alpha.value(estimates)
        return best_k(alpha, estimates.price, estimates.verify, self.k_min, self.k_max)[0]

    def observe(self, outcome: Outcome) -> None:
        """Takes in its tests."""
        self._judged = True
        self._alpha.observe(outcome)
