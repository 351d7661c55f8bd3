"""The gate of a proposing level: whether it proposes at all for a request, and when it may try again.

Both answers rest on tests: a drafted or free-scored token that was compared with what the verifier took.
alpha = accepted / tested is the estimate of largest likelihood for the chance that a token holds; the
gate forgets old tests exponentially, so it follows the text within a request.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

from cascade.config import BypassConfig

HALF_LIFE = 32.0  # tested tokens until a test counts half, while open
HALF_LIFE_CLOSED = 8.0  # and while closed: tests come in rare batches, and one batch must be able to convince
NO_GAIN = 0.03  # how far under 1 a predicted speedup closes by itself, whatever alpha is...
DOUBT = 0.8  # ...or, while tests are few, this divided by their number
START = 3.0  # what a level may cost a request before it has shown anything, in plainly decoded tokens
SHARE = 0.01  # of the request's tokens: what it may cost beyond that
CREDIT = 8.0  # what it may have saved of that, in tokens
MOST_WANTED = 64  # fresh tests that are asked for at most
RETRY = 1.0  # what it may cost once it was opened again, in tokens
GAIN = 0.05  # how far over 1 a predicted speedup opens a closed gate
ALPHA_MARGIN = 0.05  # the same for alpha, above the threshold
PROBE_SHARE = 0.018  # of the time between two probes, what a probe may cost: reading what it missed is half of that
LOOK = 0.5  # of a prefill's price, the time spent looking how well the request does without
USUAL_LENGTH = 64.0  # tokens of an answer, until five have been seen
SOON = 64  # tokens: a gate that closes again this soon was opened in error


@dataclass(frozen=True, slots=True)
class Decision:
    """What the gate says for one round.

    Attributes:
        open: the level may propose.
        probe: the level is closed and a probe is due: test it on committed text, without proposing.
        reason: why the state has just changed, in words; None while it stays.
    """

    open: bool
    probe: bool = False
    reason: str | None = None


OPEN, CLOSED, PROBE = Decision(True), Decision(False), Decision(False, probe=True)


class Gate:
    """Opens and closes one level for one request.

    It closes where
    - alpha is under the threshold, after `min_tests` tests, and (unless the user set the threshold)
      the predicted gain is at most 1.0; or
    - the predicted gain alone is under 0.97, after three times as many tests: a drafter may be right
      often and still too slow, and a level must never cost more than it brings.

    Closed, it asks for a probe every `probe_every` tokens, twice as long after each that fails, up to
    `probe_max`, and never so often that probes take more than 2 % of the time. It opens again
    once `min_tests` fresh tests (half of them, if all held) show a gain over 1.05, or, where gain is
    unknown or has no say, an alpha of 0.05 over the threshold. A high alpha with a known lack of gain
    does not open it. After that it stays open for at least `min_tests` tests, and probes start at twice
    the distance if it closes within 64 tokens.

    Args:
        config: the thresholds; a request's own bypass threshold comes as a config of its own.
        costly: False for a drafter whose tests cost next to nothing: a probe is then due every round.

    Attributes:
        probe_cost: what a probe costs in units of the time of one plainly decoded token; the
            caller sets it when it knows.
        tests: tested tokens so far.
        closed: whether the level is bypassed.
    """

    __slots__ = (
        "_accepted",
        "_distance",
        "_first_distance",
        "_fresh",
        "_fresh_accepted",
        "_least",
        "_opened_at",
        "_probed_at",
        "_tested",
        "_wanted",
        "balance",
        "closed",
        "config",
        "costly",
        "probe_cost",
        "tests",
    )

    def __init__(self, config: BypassConfig, *, costly: bool) -> None:
        self.config = config
        self.costly = costly
        self.probe_cost = 0.0
        self.tests = 0
        self.balance = 0.0
        self.closed = False
        self._least = 0.0
        self._wanted = config.min_tests  # fresh tests before a policy may open what has cost more than it may
        self._tested = self._accepted = 0.0  # rolling sums
        self._fresh = self._fresh_accepted = 0  # since the state last changed
        self._opened_at: int | None = None
        self._probed_at = 0
        self._first_distance = self._distance = config.probe_every

    @property
    def alpha(self) -> float:
        """Rolling accepted / tested; 0 before the first test."""
        return self._accepted / self._tested if self._tested else 0.0

    def observe_tests(self, tested: int, accepted: int) -> None:
        """`accepted` of `tested` tokens held, in a proposal or in a probe."""
        if tested <= 0:
            return
        keep = 0.5 ** (tested / (HALF_LIFE_CLOSED if self.closed else HALF_LIFE))
        self._tested = self._tested * keep + tested
        self._accepted = self._accepted * keep + accepted
        self._fresh += tested
        self._fresh_accepted += accepted
        self.tests += tested

    def decide(self, tokens_done: int, gain: float | None, may_probe: bool = True) -> Decision:
        """Says whether the level proposes in this round. Called once per round.

        Args:
            tokens_done: tokens the request has emitted.
            gain: predicted speedup of having this level over not having it, at the best K for the
                rolling alpha; None if unknown.
            may_probe: whether a probe could be made now.
        """
        if self.closed:
            reason = self._why_open(tokens_done, gain)
            if reason is None:
                return PROBE if may_probe and self._probe_due(tokens_done) else CLOSED
            self._change(tokens_done, closed=False)
            self._opened_at = tokens_done
            self._least = self.balance - RETRY
            return Decision(True, reason=reason)
        reason = self._why_close(tokens_done, gain)
        if reason is None:
            return OPEN
        again = self._opened_at is not None and tokens_done - self._opened_at < SOON
        self._first_distance = self._grown(self._first_distance) if again else self.config.probe_every
        self._distance = self._first_distance
        self._probed_at = tokens_done
        self._change(tokens_done, closed=True)
        return Decision(False, reason=reason)

    def follow(self, tokens_done: int, k: int, gain: float, may_probe: bool = True) -> Decision:
        """As `decide`, for a policy that chooses itself whether to propose: 0 tokens are none."""
        overdrawn = self._overdrawn(tokens_done)
        open = k > 0 and not (overdrawn and (not self.closed or self._fresh < self._evidence(tokens_done)))
        if open != self.closed:
            return OPEN if open else PROBE if may_probe and self._probe_due(tokens_done) else CLOSED
        self._change(tokens_done, closed=not open)
        self._distance, self._probed_at, self._least = self.config.probe_every, tokens_done, self.balance - RETRY
        what = f"{k} tokens pay best" if open else overdrawn or "no draft pays"
        return Decision(open, reason=f"{what}, at alpha {self.alpha:.2f} and predicted gain {gain:.2f}")

    def _change(self, tokens_done: int, closed: bool) -> None:
        if closed and self.left(tokens_done) < 0.0:
            self._wanted = min(2 * self._wanted, MOST_WANTED)
        self.closed = closed
        self._fresh = self._fresh_accepted = 0

    def _why_close(self, tokens_done: int, gain: float | None) -> str | None:
        tests, alpha, threshold = self._fresh, self.alpha, self.config.threshold or 0.0
        if overdrawn := self._overdrawn(tokens_done):
            return f"{overdrawn}: bypassed"
        if tests < self.config.min_tests:
            return None
        if alpha < threshold:
            if not self.config.gain:
                return f"alpha {alpha:.2f} under threshold {threshold:.2f}: bypassed"
            if gain is not None and gain <= 1.0:
                return f"alpha {alpha:.2f} under threshold {threshold:.2f}, predicted gain {gain:.2f}: bypassed"
        if self.config.gain and gain is not None and gain < 1.0 - max(NO_GAIN, DOUBT / tests):
            return f"predicted gain {gain:.2f} at alpha {alpha:.2f}: bypassed"
        return None

    def charge(self, tokens: float) -> None:
        """Books what the level saved the request, or cost it, in plainly decoded tokens; old merits do not pile up."""
        self.balance = min(self.balance + tokens, CREDIT)

    def left(self, tokens_done: int) -> float:
        """What the level may still cost, in plainly decoded tokens; nobody counts where a threshold alone decides."""
        if not self.config.gain:
            return math.inf
        return self.balance - min(-START - SHARE * tokens_done, self._least)

    def _overdrawn(self, tokens_done: int) -> str | None:
        """What the level has cost, if that is more than it may."""
        if self.left(tokens_done) >= 0.0:
            return None
        return f"it has cost the time of {-self.balance:.1f} tokens more than it saved"

    def _evidence(self, tokens_done: int) -> int:
        """Fresh tests that it takes to open: more, each time, for what has cost more than it may."""
        return self._wanted if self.left(tokens_done) < 0.0 else self.config.min_tests

    def _why_open(self, tokens_done: int, gain: float | None) -> str | None:
        tests, alpha, threshold = self._fresh, self.alpha, self.config.threshold or 0.0
        needed = self._evidence(tokens_done)
        strong = self._fresh_accepted == tests and tests >= (needed + 1) // 2
        if tests < needed and not strong:
            return None
        if self.config.gain and gain is not None:
            enough = 1.0 + max(GAIN, DOUBT / tests)
            return f"probe: alpha {alpha:.2f}, predicted gain {gain:.2f}: proposing again" if gain > enough else None
        if alpha < min(threshold + ALPHA_MARGIN, (1.0 + threshold) / 2.0):
            return None
        return f"probe: alpha {alpha:.2f} over threshold {threshold:.2f}: proposing again"

    def _probe_due(self, tokens_done: int) -> bool:
        distance = self._distance if self.costly else 1
        if tokens_done - self._probed_at < max(distance, self.probe_cost / PROBE_SHARE):
            return False
        self._probed_at = tokens_done
        self.charge(-self.probe_cost)
        # A probe that looked good but was too short to convince is repeated soon.
        promising = self._fresh > 0 and self._fresh < self.config.min_tests and 2 * self._fresh_accepted > self._fresh
        if not promising:
            self._distance = self._grown(self._distance)
        return True

    def _grown(self, distance: int) -> int:
        return max(distance, min(2 * distance, self.config.probe_max))


class Investment:
    """When a lower model's prompt is worth prefilling for a request: once it pays within what is to come.

    Nobody knows how long a text will be. The rule is that of ski rental (Karlin et al. 1988): go without
    until the time that would have been saved equals the price, then pay it. Whatever the length,
    that costs at most twice what the best choice in hindsight does, and texts that stop early pay
    nothing. It amounts to expecting the text to go on for as long as it already has. A typical length,
    where known, may bring the purchase forward, never put it off; the bound is then as good as the
    guess. Where a drafter below already helps, a dear prefill waits until it has shown how much.

    One object serves an engine: it learns the typical length from the requests that finish.
    """

    def __init__(self) -> None:
        self._lengths: deque[int] = deque(maxlen=15)

    def finished(self, length: int) -> None:
        """A request ended after `length` emitted tokens."""
        self._lengths.append(length)

    @property
    def typical_length(self) -> float:
        """Median of the latest requests' lengths, in tokens; a guess before five of them."""
        return float(sorted(self._lengths)[len(self._lengths) // 2]) if len(self._lengths) >= 5 else USUAL_LENGTH

    def worth(
        self,
        prefill_seconds: float,
        token_seconds_now: float,
        predicted_gain: float,
        emitted: int,
        remaining_cap: int,
        typical_length: float | None = None,
        look: bool = False,
    ) -> tuple[bool, str]:
        """Whether to prefill now, and why.

        Args:
            prefill_seconds: time to feed the prompt and text to the lower model.
            token_seconds_now: time per emitted token without it.
            predicted_gain: speedup that it is expected to bring.
            emitted: tokens out already; before the first the answer is no, so that it comes on time.
            remaining_cap: at most so many tokens may follow.
            typical_length: of whole answers, in tokens, if known.
            look: whether another drafter, below, is showing what it is worth.
        """
        if emitted < 1:
            return False, "the first token is not out yet"
        if not predicted_gain > 1.0:
            return False, f"predicted gain {predicted_gain:.2f}: not worth a prefill"
        if look and emitted * token_seconds_now < LOOK * prefill_seconds:
            return False, f"prefill of {prefill_seconds:.3g} s: first a look at how the drafter below does"
        expected = max(float(emitted), (typical_length or 0.0) - emitted)
        expected = max(0.0, min(float(remaining_cap), expected))
        saving = expected * token_seconds_now * (1.0 - 1.0 / predicted_gain)
        if not math.isfinite(saving):
            return False, "no sensible costs known"
        verdict = saving >= prefill_seconds
        return verdict, (
            f"prefill of {prefill_seconds:.3g} s {'pays' if verdict else 'does not pay yet'}: about {saving:.3g} s "
            f"saved over {expected:.0f} tokens at predicted gain {predicted_gain:.2f}"
        )
