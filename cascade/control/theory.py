"""What a proposal of K tokens is worth: closed forms for independent acceptance.

The model is that of Leviathan et al. (2023, sections 3.1 to 3.3): every drafted token holds with
probability alpha, independently, and the round ends at the first that does not. Times are in units
of the verifier's forward on one token, so a plain decoding step costs 1.

    E      expected tokens per verify round, the verifier's own included
    r      accepted / drafted, which falls with K
    alpha  accepted / tested, which does not
"""

from __future__ import annotations

import math
from collections.abc import Callable

#: Price of K drafted tokens: a number c means K * c, a function is asked for K >= 1.
DraftCost = float | Callable[[int], float]
#: Relative time of a verifier forward on n tokens; verify(1) is 1.
VerifyCost = Callable[[int], float]


def expected_tokens(alpha: float, k: float) -> float:
    """E: tokens that a round with `k` drafted ones yields, (1 - alpha^(k+1)) / (1 - alpha), in [1, k + 1]."""
    return 1.0 + k * accept_rate(alpha, k)


def accept_rate(alpha: float, k: float) -> float:
    """r: the expected share of `k` drafted tokens that are accepted; alpha at k = 1, falling with k.

    `k` may be any number: the closed form is smooth in it, which is what lets a controller move in
    fractions of a token. At k <= 0 nothing is drafted, and the answer is alpha.
    """
    if k <= 0.0 or not 0.0 < alpha < 1.0:
        return min(1.0, max(0.0, alpha))
    # expm1 keeps the digits that 1 - alpha loses near alpha = 1.
    log = math.log(alpha)
    return alpha * math.expm1(k * log) / (k * math.expm1(log))


def accept_rate_slope(alpha: float, k: float) -> float:
    """dr/dK in 1 / token, <= 0: how fast the accepted share falls when one more token is drafted."""
    if not 0.0 < alpha < 1.0 or k <= 0.0:
        return 0.0
    log = math.log(alpha)
    y = -k * log
    # y e^-y - (1 - e^-y) cancels to -y^2/2 where y is small.
    top = y * math.exp(-y) + math.expm1(-y) if y > 1e-4 else y * y * (y / 3.0 - 0.5)
    return alpha * top / (k * k * -math.expm1(log))


def speedup(alpha: float, k: int, draft_cost: DraftCost, verify: VerifyCost) -> float:
    """How many times faster than plain decoding rounds with `k` drafted tokens are; 1 at k = 0."""
    if k <= 0:
        return 1.0
    draft = draft_cost(k) if callable(draft_cost) else k * draft_cost
    return expected_tokens(alpha, k) / (draft + verify(k + 1))


def least_confidence(token_cost: float, speed: float) -> float:
    """The chance, in [0, 1], that a whole draft holds under which one more token cannot pay.

    A token more costs `token_cost`, to draft and to verify. It counts only if all before it hold, and then saves at
    most the time of one emitted token, 1 / `speed`: so it can pay only while P(all before hold) / speed >= token_cost.
    """
    return min(1.0, token_cost * speed)


def best_k(alpha: float, draft_cost: DraftCost, verify: VerifyCost, k_min: int, k_max: int) -> tuple[int, float]:
    """The K in [k_min, k_max] with the largest speedup, and that speedup; the smaller K of equals.

    Every K is tried: measured verify times have steps, so the speedup can have several peaks.
    """
    best, best_speedup = (0, 1.0) if k_min <= 0 else (k_min, 0.0)
    tokens, power = 1.0, 1.0
    for k in range(1, k_max + 1):
        power *= alpha
        tokens += power
        if k < k_min:
            continue
        draft = draft_cost(k) if callable(draft_cost) else k * draft_cost
        value = tokens / (draft + verify(k + 1))
        # The margin makes equals of what differs by rounding alone.
        if value > best_speedup * (1.0 + 1e-12):
            best, best_speedup = k, value
    return best, best_speedup
