"""K by rules of thumb: a moving average of what is accepted, and two thresholds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from cascade.control.base import Controller, Estimates, Outcome
from cascade.control.fixed import DEFAULT_K
from cascade.control.options import number
from cascade.errors import ConfigError


class Ema(Controller):
    """One token more while the average of accepted / drafted is over `up`, one less while it is under `down`.

    Between the two nothing moves, nor within `patience` rounds of the last step: that is the hysteresis. Costs have no
    say, so that the thresholds must fit them. Rounds that drafted fewer than K do not count.

    Options: `up` and `down` in (0, 1), `weight` of one round in the average in (0, 1], `patience` in rounds.
    """

    optimises = False
    defaults: ClassVar[Mapping[str, Any]] = {"up": 0.6, "down": 0.4, "weight": 0.2, "patience": 2}

    def __init__(self, *, k: int | None, k_min: int, k_max: int, **options: Any) -> None:
        super().__init__(k=k, k_min=k_min, k_max=k_max, **options)
        self._up, self._down = (number(self, name, 0.0, 1.0, open_low=True) for name in ("up", "down"))
        if self._down >= self._up:
            raise ConfigError(f"option down of the controller ema ({self._down}) must be under up ({self._up})")
        self._weight = min(number(self, "weight", 0.0, 1.0 + 1e-9, open_low=True), 1.0)
        self._patience = number(self, "patience", 0.0)
        self._k = min(max(self.first_k or DEFAULT_K, self.k_min), self.k_max)
        self._rate = (self._up + self._down) / 2.0
        self._since = 0

    def next_k(self, estimates: Estimates) -> int:
        """K as it is."""
        return self._k

    def observe(self, outcome: Outcome) -> None:
        """Moves K by one where the average has left the band."""
        if not outcome.drafted or outcome.drafted < outcome.k:
            return
        self._rate += self._weight * (outcome.accepted / outcome.drafted - self._rate)
        self._since += 1
        if self._since > self._patience and not self._down <= self._rate <= self._up:
            self._k = min(max(self._k + (1 if self._rate > self._up else -1), self.k_min), self.k_max)
            self._since = 0
