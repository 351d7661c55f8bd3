"""Which K would have been best so far, K = 0 included: a choice with full information."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from cascade.control.base import Controller, Estimates, Outcome
from cascade.control.options import number
from cascade.control.rolling import RollingAlpha
from cascade.control.theory import expected_tokens

HALF_LIFE = 32.0  # tested tokens of the alpha that stands for what was not tested
PRIOR_ROUNDS = 4.0  # that the engine-wide alpha counts for
ARMS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32)


class Hedge(Controller):
    """Follows the K that would have been best on this request's own text so far; 0 leaves the level out.

    After a verification every K can be scored, whichever was played: how many tokens of a longer or shorter draft
    would have held is known or, where all held, expected. That is the full information of Not-a-Bandit (Liu et al.
    2025, arXiv 2510.20064), with which exponential weights (Hedge, Freund and Schapire 1997) stay near the best choice
    in hindsight. No chance is involved here: the K of the largest weight is played, whatever the rate at which weights
    follow losses, and what happened long ago is forgotten, so that it follows the text.

    Every level weighs its own Ks against none, on the tests that it gets while proposing, in the shadow or by catching
    up, and against what the levels below reach without it: so a request's levels together choose among their subsets.

    Options: `memory` in rounds, after which one counts half; `margin`, the share by which another K must be better than
    the one that is played.
    """

    defaults: ClassVar[Mapping[str, Any]] = {"memory": 24.0, "margin": 0.03}
    chooses: ClassVar[bool] = True

    def __init__(self, *, k: int | None, k_min: int, k_max: int, **options: Any) -> None:
        super().__init__(k=k, k_min=k_min, k_max=k_max, **options)
        self._keep = 0.5 ** (1.0 / number(self, "memory", 0.0, open_low=True))
        self._margin = number(self, "margin", 0.0)
        inside = [arm for arm in ARMS if self.k_min <= arm < self.k_max]
        self._arms = [0, *inside, self.k_max] if self.k_max else [0]
        self._tokens = [0.0] * len(self._arms)  # discounted sums, as is the number of rounds
        self._rounds = 0.0
        self._alpha = RollingAlpha(HALF_LIFE, PRIOR_ROUNDS)
        self._estimates: Estimates | None = None
        self._played = -1  # none yet

    def next_k(self, estimates: Estimates) -> int:
        """The K of the largest weight; at first the level's `k`, or what the engine-wide alpha says is best."""
        self._estimates = estimates
        if not self._rounds:
            self._add([expected_tokens(estimates.alpha, arm) for arm in self._arms], PRIOR_ROUNDS)
            if self.first_k:
                self._played = min(max(self.first_k, self.k_min), self.k_max)
                return self._played
        times = self._times(estimates)
        prices = [time / tokens for time, tokens in zip(times, self._tokens, strict=True)]  # of a token
        best = min(range(len(prices)), key=prices.__getitem__)
        if self._played in self._arms and prices[best] > prices[self._arms.index(self._played)] * (1.0 - self._margin):
            return self._played
        self._played = self._arms[best]
        return self._played

    def observe(self, outcome: Outcome) -> None:
        """Scores every K by what was tested."""
        if self._estimates is None or not outcome.tested:
            return
        self._alpha.observe(outcome)
        if outcome.drafted:
            self._add([self._would_hold(arm, outcome) + 1.0 for arm in self._arms], 1.0)
        else:  # tests by themselves: as many rounds as there were tokens that failed
            alpha = outcome.accepted / outcome.tested
            rounds = max(1.0, float(outcome.tested - outcome.accepted))
            self._add([expected_tokens(alpha, arm) for arm in self._arms], rounds)

    def _would_hold(self, arm: int, outcome: Outcome) -> float:
        """Tokens of a draft of `arm` that would have held, seeing that so many did."""
        if arm <= outcome.accepted or outcome.tested > outcome.accepted or self._estimates is None:
            return float(min(arm, outcome.accepted))
        alpha = self._alpha.value(self._estimates)
        return outcome.accepted + expected_tokens(alpha, arm - outcome.accepted) - 1.0

    def _times(self, estimates: Estimates) -> list[float]:
        """What the rounds would have taken with every K, at today's costs."""
        each = [estimates.price(arm) + estimates.verify(arm + 1) if arm else 1.0 for arm in self._arms]
        return [self._rounds * time for time in each]

    def _add(self, tokens: list[float], rounds: float) -> None:
        estimates, keep = self._estimates, self._keep**rounds
        assert estimates is not None
        self._rounds = self._rounds * keep + rounds
        for i, arm in enumerate(self._arms):
            self._tokens[i] = self._tokens[i] * keep + rounds * (tokens[i] if arm else estimates.without)
