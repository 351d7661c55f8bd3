"""The closed forms of cascade.control.theory against counting, differences and simulation."""

from __future__ import annotations

import math
import random
from itertools import product

import pytest

from cascade.control.theory import accept_rate, accept_rate_slope, best_k, expected_tokens, speedup

ALPHAS = (0.0, 0.05, 0.3, 0.5, 0.7, 0.9, 0.99, 0.999999, 1.0)


def flat(n: int) -> float:
    return 1.0


def enumerated_tokens(alpha: float, k: int) -> float:
    """E by summing over how many tokens are accepted before the first rejection."""
    stops = sum((j + 1) * alpha**j * (1 - alpha) for j in range(k))
    return stops + (k + 1) * alpha**k


@pytest.mark.parametrize(("alpha", "k"), list(product(ALPHAS, (1, 2, 5, 16, 64))))
def test_rates_equal_the_enumeration(alpha: float, k: int) -> None:
    expected = enumerated_tokens(alpha, k)
    assert expected_tokens(alpha, k) == pytest.approx(expected, rel=1e-9)
    assert accept_rate(alpha, k) == pytest.approx((expected - 1) / k, rel=1e-8, abs=1e-15)


@pytest.mark.parametrize(("alpha", "k"), list(product((0.05, 0.3, 0.5, 0.9, 0.99, 0.9999), (1.0, 2.5, 8.0, 16.0))))
def test_slope_is_the_derivative(alpha: float, k: float) -> None:
    h = 1e-4 * k
    difference = (accept_rate(alpha, k + h) - accept_rate(alpha, k - h)) / (2 * h)
    assert accept_rate_slope(alpha, k) == pytest.approx(difference, rel=1e-4)


def test_slope_at_the_edges() -> None:
    assert accept_rate_slope(0.0, 4) == accept_rate_slope(1.0, 4) == accept_rate_slope(0.5, 0) == 0.0
    nearly_one = 1 - 1e-9
    assert -1e-8 < accept_rate_slope(nearly_one, 4) < 0.0
    assert math.isclose(accept_rate_slope(nearly_one, 4), -0.5e-9, rel_tol=1e-3)


def test_rates_at_the_edges() -> None:
    assert expected_tokens(0.0, 8) == 1.0
    assert expected_tokens(1.0, 8) == 9.0
    assert expected_tokens(0.6, 0) == 1.0
    assert accept_rate(0.4, 1) == pytest.approx(0.4)
    assert accept_rate(0.4, 0) == 0.4


@pytest.mark.parametrize(("alpha", "k"), [(0.3, 2), (0.7, 6), (0.9, 13)])
def test_rates_against_simulation(alpha: float, k: int) -> None:
    rng = random.Random(1)
    rounds, accepted, rejections = 20_000, 0, 0
    for _ in range(rounds):
        held = 0
        while held < k and rng.random() < alpha:
            held += 1
        accepted += held
        rejections += held < k
    assert 1 + accepted / rounds == pytest.approx(expected_tokens(alpha, k), rel=0.02)
    assert accepted / (accepted + rejections) == pytest.approx(alpha, rel=0.02)


@pytest.mark.parametrize(
    ("c", "alpha", "k", "rate", "gain"),
    [
        (0.05, 0.5, 3, 0.29, 1.63),
        (0.05, 0.7, 6, 0.34, 2.35),
        (0.05, 0.8, 8, 0.42, 3.09),
        (0.05, 0.9, 13, 0.52, 4.67),
        (0.2, 0.5, 2, 0.38, 1.25),
        (0.2, 0.8, 4, 0.59, 1.87),
    ],
)
def test_known_optima(c: float, alpha: float, k: int, rate: float, gain: float) -> None:
    best, best_gain = best_k(alpha, c, flat, 0, 32)
    assert best == (1 if (c, alpha) == (0.2, 0.5) else k), "there K = 1 and K = 2 give 1.25 alike"
    assert best_gain == pytest.approx(gain, abs=0.005)
    assert speedup(alpha, k, c, flat) == pytest.approx(best_gain)
    assert accept_rate(alpha, k) == pytest.approx(rate, abs=0.0051)


def test_best_k_is_the_argmax_also_over_steps() -> None:
    def steps(n: int) -> float:
        return 1.0 if n <= 4 else 1.1 if n <= 8 else 2.0

    for alpha, c in product((0.1, 0.5, 0.8, 0.95), (0.0, 0.05, 0.3)):
        best, gain = best_k(alpha, c, steps, 1, 16)
        values = [speedup(alpha, k, c, steps) for k in range(1, 17)]
        assert gain == pytest.approx(max(values))
        assert values[best - 1] == pytest.approx(max(values))


def test_best_k_respects_its_bounds() -> None:
    assert best_k(0.0, 0.1, flat, 0, 8) == (0, 1.0)
    assert best_k(0.0, 0.1, flat, 2, 8)[0] == 2
    assert best_k(1.0, 0.1, flat, 0, 8)[0] == 8
    assert best_k(0.9, 0.0, flat, 3, 3)[0] == 3
    assert best_k(0.0, 0.0, flat, 1, 8)[0] == 1, "of equals, the smaller K"


def test_speedup_with_a_cost_per_round() -> None:
    def draft(k: int) -> float:
        return 0.5 + 0.1 * k

    assert speedup(0.8, 0, draft, flat) == 1.0
    assert speedup(0.8, 4, draft, flat) == pytest.approx(enumerated_tokens(0.8, 4) / 1.9)
    assert best_k(0.8, draft, flat, 1, 16)[0] > best_k(0.8, 0.1, flat, 1, 16)[0], "a fixed cost asks for longer drafts"
