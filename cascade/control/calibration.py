"""What a drafter's own probability of a token is worth: the chance that the token holds, learned from tests.

A draft model that was trained like its target is right about as often as it thinks; a quantised copy of the
target is right far more often, for it doubts where the target doubts too.
"""

from __future__ import annotations

BINS = 10  # of probabilities, equally wide
PRIOR = 4.0  # tests of a bin that speak for the probability as it is
MEMORY = 128.0  # tests that a bin remembers at most
SIBLINGS = 2.0  # expected tokens beside the best one that speak for their probabilities as they are


class Calibration:
    """Accepted / tested by the probability that the drafter gave its token; engine-wide, for one level."""

    def __init__(self) -> None:
        middles = [(i + 0.5) / BINS for i in range(BINS)]
        self._tested = [PRIOR] * BINS
        self._held = [PRIOR * middle for middle in middles]
        self._beside = self._beside_held = SIBLINGS

    def observe(self, probability: float, held: bool) -> None:
        """A token that the drafter gave this probability was tested."""
        i = self._bin(probability)
        if self._tested[i] >= MEMORY:
            keep = 1.0 - 1.0 / MEMORY
            self._tested[i] *= keep
            self._held[i] *= keep
        self._tested[i] += 1.0
        self._held[i] += held

    def chance(self, probability: float) -> float:
        """The chance, in [0, 1], that a token of this probability holds."""
        i = self._bin(probability)
        return self._held[i] / self._tested[i]

    def observe_beside(self, share: float, held: bool) -> None:
        """The best token failed; others stood beside it that had `share` of the rest, and one of them held or none."""
        keep = 1.0 - share / MEMORY
        self._beside = self._beside * keep + share
        self._beside_held = self._beside_held * keep + held

    def share(self, share: float) -> float:
        """The chance that a token holds that stands beside the best one, once that has failed."""
        return min(1.0, share * self._beside_held / self._beside)

    @staticmethod
    def _bin(probability: float) -> int:
        return min(BINS - 1, max(0, int(probability * BINS)))
