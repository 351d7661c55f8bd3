"""A request's own alpha, which starts from the engine's and follows the text."""

from __future__ import annotations

from cascade.control.base import FIRST_TESTS, Estimates, Outcome

LEAST_TRUST = 4.0  # tests: what an engine-wide alpha counts for that rests on nothing yet
TRUSTED = 64.0  # tests of the engine-wide alpha that count for all of that trust


class RollingAlpha:
    """Accepted / tested with exponential forgetting, filled up with the engine-wide alpha.

    Args:
        half_life: tested tokens until a test counts half.
        trust: tested tokens that the engine-wide alpha counts for at most; while it rests on few itself, for less.
    """

    __slots__ = ("_accepted", "_half_life", "_tested", "_trust")

    def __init__(self, half_life: float, trust: float) -> None:
        self._half_life, self._trust = half_life, trust
        self._tested = self._accepted = 0.0

    def observe(self, outcome: Outcome) -> None:
        """Takes in the tests of one outcome."""
        keep = 0.5 ** (outcome.tested / self._half_life)
        self._tested = self._tested * keep + outcome.tested
        self._accepted = self._accepted * keep + outcome.accepted

    def value(self, estimates: Estimates) -> float:
        """alpha in [0, 1], as far as is known now."""
        trust = min(self._trust, LEAST_TRUST + max(0.0, estimates.tests - FIRST_TESTS) / TRUSTED * self._trust)
        prior = min(1.0, max(0.0, estimates.alpha))
        return (trust * prior + self._accepted) / (trust + self._tested)
