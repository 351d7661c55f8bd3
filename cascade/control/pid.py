"""A PID controller on the share of drafted tokens that are accepted.

The share r = accepted / drafted falls as K grows, so K can steer it; accepted / tested hardly moves
with K and cannot be steered. Where r should be depends on what drafting costs: the set point is
the r that the K of the largest predicted speedup would show (`theory.best_k`). With a drafted token
at 0.05 of a forward that is 0.29 for alpha 0.5 and 0.52 for alpha 0.9, so no fixed number will do.

What is not textbook, and why:
- The error is divided by the model's dr/dK, so that gains are in tokens per token and hold from K = 1
  to 16, over which the slope changes thirtyfold.
- r is a rolling figure over rounds that had other K. The error is therefore taken against the
  operating point those rounds had (a Smith predictor): K that just moved is not judged by old rounds.
- The derivative acts on the measurement, not on the error: a moving set point gives no kick.
- Conditional integration: the integral stands still while K is at a bound and the error pushes on.
- K moves only when the wish leaves a band around it. The band grows with K because the speedup is flat
  there: a K off by a fifth costs about 2 %.

Tuning. `ki` decides how fast K follows the text: 0.15 settles in 10 to 30 rounds. `kp` reacts at once,
to noise as well; beyond 0.6 K starts to flap. `kd` helps a little when the kind of text changes.
`half_life` (rounds) smooths r: shorter follows sooner and flaps more. `trust` is how many tested tokens
the engine-wide alpha is worth against the request's own; 1e9 leaves the set point engine-wide.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

from cascade.control.base import Controller, Estimates, Outcome
from cascade.control.theory import accept_rate, accept_rate_slope, best_k
from cascade.errors import ConfigError

PRIOR_ROUNDS = 2.0  # the rolling r starts at the set point, with this weight: the first round moves nothing much
BAND = 0.2  # half-width of the dead band around K beyond half a token, as a share of K
OWN_HALF_LIFE = 128.0  # tested tokens: the request's own alpha is slow too, only fresher than the engine's
REFRESH = 8  # rounds: costs drift, so the set point is derived afresh at least this often
SLOPE_ALPHA = (0.1, 0.97)  # outside, dr/dK is too close to 0 to divide by


def _number(name: str, value: Any, low: float, high: float = math.inf, *, open_low: bool = False) -> float:
    """`value` as a float if it lies in [low, high) or, with `open_low`, in (low, high)."""
    ok = isinstance(value, (int, float)) and not isinstance(value, bool)
    if ok and (value > low if open_low else value >= low) and value < high:
        return float(value)
    bounds = f"{'> ' if open_low else '>= '}{low:g}" + (f" and < {high:g}" if high < math.inf else " and finite")
    raise ConfigError(f"option {name} of the controller pid must be a number {bounds}, not {value!r}")


class Pid(Controller):
    """Steers the rolling accepted / drafted of one request to its set point by moving K.

    Options: gains `kp`, `ki`, `kd` (tokens of K per token of error, per round for `ki`), `setpoint` in
    (0, 1) for accepted / drafted instead of the derived one, `half_life` of the rolling figure in
    rounds, and `trust` in tested tokens. The module's docstring says how they act. The first K is
    the level's `k`, or the K of the largest predicted speedup. Same inputs, same K: there is no clock.
    """

    defaults: ClassVar[Mapping[str, Any]] = {
        "kp": 0.3,
        "ki": 0.15,
        "kd": 0.1,
        "setpoint": None,
        "half_life": 5.0,
        "trust": 16.0,
    }

    def __init__(self, *, k: int | None, k_min: int, k_max: int, **options: Any) -> None:
        super().__init__(k=k, k_min=k_min, k_max=k_max, **options)
        given = self.options
        self.kp, self.ki, self.kd = (_number(name, given[name], 0.0) for name in ("kp", "ki", "kd"))
        fixed = given["setpoint"]
        self.setpoint = None if fixed is None else _number("setpoint", fixed, 0.0, 1.0, open_low=True)
        self._keep = 0.5 ** (1.0 / _number("half_life", given["half_life"], 0.0, open_low=True))
        self._trust = _number("trust", given["trust"], 0.0, open_low=True)
        self._first = self.first_k
        self._k: int | None = None
        self._pending = False  # a round was judged since K was last set
        self._integral = 0.0  # in tokens: K without the proportional and derivative parts
        self._rounds = self._asked = self._drafted = self._accepted = 0.0  # rolling sums
        self._own_tested = self._own_accepted = 0.0
        self._last_r = 0.0
        self._target, self._target_alpha, self._target_cost, self._target_age = 0.0, -1.0, -1.0, 0

    def next_k(self, estimates: Estimates) -> int:
        """K for the coming round; moves at most once per judged round."""
        alpha = self._alpha(estimates)
        if self._k is None:
            return self._start(alpha, estimates)
        if self._pending:
            self._pending = False
            self._step(alpha, self._set_point(alpha, estimates))
        return self._k

    def observe(self, outcome: Outcome) -> None:
        """Takes in one judged proposal.

        One with fewer tokens than K says nothing about r at K, nor did K limit it: neither the
        rolling r nor the integral takes it in. Its tests still say something about alpha.
        """
        keep = 0.5 ** (outcome.tested / OWN_HALF_LIFE)
        self._own_tested = self._own_tested * keep + outcome.tested
        self._own_accepted = self._own_accepted * keep + outcome.accepted
        if self._k is None or outcome.drafted < max(outcome.k, self._k):
            return
        self._rounds = self._rounds * self._keep + 1.0
        self._asked = self._asked * self._keep + outcome.k
        self._drafted = self._drafted * self._keep + outcome.drafted
        self._accepted = self._accepted * self._keep + outcome.accepted
        self._pending = True

    def restart(self) -> None:
        """Forgets K and the rolling r, not the request's alpha: the next K is the best for that."""
        self._k, self._pending = None, False

    def _alpha(self, estimates: Estimates) -> float:
        """The engine-wide alpha, shifted by the request's own tests as they outweigh it."""
        prior = min(1.0, max(0.0, estimates.alpha))
        return (self._trust * prior + self._own_accepted) / (self._trust + self._own_tested)

    def _start(self, alpha: float, estimates: Estimates) -> int:
        first, self._first = self._first, None
        if first is None:
            first = best_k(alpha, estimates.price, estimates.verify, self.k_min, self.k_max)[0]
        self._k = first = min(max(first, self.k_min), self.k_max)
        r = self._set_point(alpha, estimates)
        self._integral = float(first)
        self._rounds, self._asked = PRIOR_ROUNDS, PRIOR_ROUNDS * first
        self._drafted, self._accepted, self._last_r = self._asked, self._asked * r, r
        return first

    def _set_point(self, alpha: float, estimates: Estimates) -> float:
        """r where the predicted speedup is largest; derived afresh when alpha or the costs moved."""
        if self.setpoint is not None:
            return self.setpoint
        cost = estimates.price(1)
        self._target_age += 1
        moved = abs(alpha - self._target_alpha) > 0.01 or abs(cost - self._target_cost) > 0.05 * self._target_cost
        if moved or self._target_age >= REFRESH:
            k = best_k(alpha, estimates.price, estimates.verify, self.k_min, self.k_max)[0]
            self._target = accept_rate(alpha, k)
            self._target_alpha, self._target_cost, self._target_age = alpha, cost, 0
        return self._target

    def _step(self, alpha: float, target: float) -> None:
        """One step of the loop; every quantity is in tokens of K."""
        low, high = float(self.k_min), float(self.k_max)
        r, asked, drafted = self._accepted / self._drafted, self._asked / self._rounds, self._drafted / self._rounds
        slope = -accept_rate_slope(min(SLOPE_ALPHA[1], max(SLOPE_ALPHA[0], alpha)), drafted)
        # The slope holds nearby only: no wish beyond half or double of what was seen.
        error = min(asked, max(-asked / 2.0, (r - target) / slope)) + asked - self._integral
        change = min(asked / 2.0, max(-asked / 2.0, (r - self._last_r) / slope))
        self._last_r = r
        integral = self._integral + self.ki * error
        wish = integral + self.kp * error + self.kd * change
        if not (wish > high and error > 0.0) and not (wish < low and error < 0.0):
            self._integral = min(high, max(low, integral))
        self._move(min(high, max(low, wish)))

    def _move(self, wish: float) -> None:
        k = self._k or self.k_min
        distance = abs(wish - k)
        # The bounds are reachable from one token away, whatever the band.
        if distance > 0.5 + BAND * k or (distance >= 1.0 and wish in (self.k_min, self.k_max)):
            self._k = round(wish)
