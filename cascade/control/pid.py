"""A PID controller on the share of drafted tokens that are accepted, with the predicted best K as its feed-forward.

The share r = accepted / drafted falls as K grows, so K can steer it; accepted / tested hardly moves with K and
cannot be steered. Where r should be depends on what drafting costs: the set point is the r that the K of the largest
predicted speedup would show (`theory.best_k`). With a drafted token at 0.05 of a forward that is 0.29 for alpha 0.5
and 0.52 for alpha 0.9, so no fixed number will do.

That best K is the feed-forward: it follows alpha within a few tests, and would be all there is to do if tokens held
independently of each other. They do not: text that is easy stays easy for a while, so that long drafts hold more
often than alpha says. The PID sees this in r, and corrects.

What is not textbook, and why:
- The error is divided by the model's dr/dK, so that gains are in tokens per token and hold from K = 1
  to 16, over which the slope changes thirtyfold.
- r is a rolling figure over rounds that had other K. The error is therefore taken against the
  operating point those rounds had (a Smith predictor): K that just moved is not judged by old rounds.
- The derivative acts on the measurement, not on the error: a moving set point gives no kick.
- Conditional integration: the integral stands still while K is at a bound and the error pushes on, and in rounds
  that drafted fewer tokens than K, for whatever reason: they say nothing about r at K.
- K moves only when the wish leaves a band around it, of half a token and a share of K: the speedup is flat there, and
  a K off by a fifth costs about 2 %.

Tuning. The defaults leave the work to the feed-forward and correct slowly (`benchmarks/control.py` compares it with
`goodput`, which is the feed-forward alone). `ki` decides how fast the correction follows, `kp` reacts at once, and both
follow noise as they grow. `kd` helps a little when the kind of text changes. `half_life` (rounds) smooths r, `memory`
(tested tokens) the request's own alpha: shorter follows sooner and flaps more. `trust` is how many tested tokens the
engine-wide alpha is worth against the request's own, once it rests on many itself. A `setpoint` of the user's has no
feed-forward but the first K: larger gains (`kp` 0.3, `ki` 0.15) get there sooner.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from cascade.control.base import Controller, Estimates, Outcome
from cascade.control.options import number
from cascade.control.rolling import RollingAlpha
from cascade.control.theory import accept_rate, accept_rate_slope, best_k

PRIOR_ROUNDS = 2.0  # that showed what the model says stand before those that were seen: the first moves nothing much
BAND = 0.2  # half-width of the dead band around K beyond half a token, as a share of K
SLOPE_ALPHA = (0.1, 0.97)  # outside, dr/dK is too close to 0 to divide by


class Pid(Controller):
    """Steers the rolling accepted / drafted of one request to its set point by moving K.

    Options: gains `kp`, `ki`, `kd` (tokens of K per token of error, per round for `ki`), `setpoint` in
    (0, 1) for accepted / drafted instead of the derived one, `half_life` of the rolling figure in
    rounds, `memory` and `trust` in tested tokens. The module's docstring says how they act. The first K is
    the level's `k`, or the K of the largest predicted speedup. Same inputs, same K: there is no clock.
    """

    defaults: ClassVar[Mapping[str, Any]] = {
        "kp": 0.1,
        "ki": 0.05,
        "kd": 0.1,
        "setpoint": None,
        "half_life": 5.0,
        "memory": 32.0,
        "trust": 16.0,
    }

    def __init__(self, *, k: int | None, k_min: int, k_max: int, **options: Any) -> None:
        super().__init__(k=k, k_min=k_min, k_max=k_max, **options)
        self.kp, self.ki, self.kd = (number(self, name, 0.0) for name in ("kp", "ki", "kd"))
        self.setpoint = None if self.options["setpoint"] is None else number(self, "setpoint", 0.0, 1.0, open_low=True)
        self.optimises = self.setpoint is None
        self._keep = 0.5 ** (1.0 / number(self, "half_life", 0.0, open_low=True))
        memory, trust = (number(self, name, 0.0, open_low=True) for name in ("memory", "trust"))
        self._alpha = RollingAlpha(memory, trust)
        self._first = self.first_k  # until the first proposal was judged
        self._k: int | None = None
        self._start: int | None = None  # the feed-forward of a set point of the user's
        self._pending = False  # a round was judged since K was last set
        self._rounds = self._drafted = self._accepted = 0.0  # rolling sums
        self._clear()

    def next_k(self, estimates: Estimates) -> int:
        """K for the coming round; moves at most once per judged round."""
        if self._k is None or self._pending:
            self._k, self._pending = self._step(estimates), False
        return self._k

    def observe(self, outcome: Outcome) -> None:
        """Takes in one judged proposal.

        One with fewer tokens than K says nothing about r at K, nor did K limit it: neither the
        rolling r nor the integral takes it in. Its tests still say something about alpha.
        """
        self._alpha.observe(outcome)
        self._pending = True
        if outcome.drafted == 0:
            return
        self._first = None
        if outcome.drafted >= outcome.k:
            self._rounds = self._rounds * self._keep + 1.0
            self._drafted = self._drafted * self._keep + outcome.drafted
            self._accepted = self._accepted * self._keep + outcome.accepted
            self._fresh = True

    def restart(self) -> None:
        """Forgets K and its correction, not the request's alpha: the next K is the best for that."""
        self._k = None
        self._clear()

    def _clear(self) -> None:
        self._integral = 0.0  # in tokens: what is added to the feed-forward in the long run
        self._rounds = self._drafted = self._accepted = 0.0
        self._last_r: float | None = None
        self._fresh = False  # a round of K tokens or more was judged since the last step

    def _step(self, estimates: Estimates) -> int:
        alpha = self._alpha.value(estimates)
        feed = best_k(alpha, estimates.price, estimates.verify, self.k_min, self.k_max)[0]
        target = accept_rate(alpha, feed) if self.setpoint is None else self.setpoint
        if self.setpoint is not None:  # nothing is known of the K that leads there: the loop finds it by itself
            feed = self._start = self._start or min(max(self.first_k or feed, self.k_min), self.k_max)
        wish = feed + self._correction(alpha, target, feed)
        if self._first is not None:
            return min(max(self._first, self.k_min), self.k_max)
        wish = min(float(self.k_max), max(float(self.k_min), wish))
        distance = 1.0 if self._k is None else abs(wish - self._k)
        band = 0.5 + BAND * (self._k or 0)
        # The bounds are reachable from one token away, whatever the band.
        if self._k is None or distance > band or (distance >= 1.0 and wish in (self.k_min, self.k_max)):
            return round(wish)
        return self._k

    def _correction(self, alpha: float, target: float, feed: int) -> float:
        """Tokens to add to the feed-forward; every quantity is in tokens of K."""
        if not self._rounds:
            return 0.0
        operating = self._drafted / self._rounds
        before = PRIOR_ROUNDS * operating
        usual = accept_rate(alpha, operating) if self.setpoint is None else target
        r = (self._accepted + before * usual) / (self._drafted + before)
        slope = -accept_rate_slope(min(SLOPE_ALPHA[1], max(SLOPE_ALPHA[0], alpha)), operating)
        # The slope holds nearby only: no wish beyond half or double of what was seen.
        error = min(operating, max(-operating / 2.0, (r - target) / slope)) + operating - feed - self._integral
        last = r if self._last_r is None else self._last_r
        change = min(operating / 2.0, max(-operating / 2.0, (r - last) / slope))
        self._last_r = r
        integral = self._integral + self.ki * error if self._fresh else self._integral
        self._fresh = False
        correction = integral + self.kp * error + self.kd * change
        low, high = float(self.k_min - feed), float(self.k_max - feed)
        if not (correction > high and error > 0.0) and not (correction < low and error < 0.0):
            self._integral = min(high, max(low, integral))
        return correction
