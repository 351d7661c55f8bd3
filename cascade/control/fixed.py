"""The controller that does not control."""

from __future__ import annotations

from cascade.control.base import Controller, Estimates

DEFAULT_K = 4  # within 8 % of the best K for alpha 0.5 to 0.8 where a drafted token costs 0.05 to 0.1


class Fixed(Controller):
    """Always the same K: the level's `k`, or 4 within the level's bounds if that is left out."""

    adapts = False

    def next_k(self, estimates: Estimates) -> int:
        """The K of every round."""
        if self.first_k is not None:
            return self.first_k
        return min(max(DEFAULT_K, self.k_min), self.k_max)
