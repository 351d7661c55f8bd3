"""The rule that says when a lower model's prompt is prefilled. Run with -s for the figures."""

from __future__ import annotations

import pytest

from cascade.control import Investment
from cascade.control.gate import LOOK, USUAL_LENGTH


def buy_at(prefill: float, token: float, gain: float, length: int, typical: float | None = None) -> int | None:
    rule = Investment()
    return next((n for n in range(length) if rule.worth(prefill, token, gain, n, 10**6, typical)[0]), None)


@pytest.mark.parametrize("prefill", [0.3, 2.0, 7.0, 40.0])
@pytest.mark.parametrize("gain", [1.05, 1.3, 2.0, 4.0])
def test_never_more_than_twice_the_best_in_hindsight(prefill: float, gain: float) -> None:
    worst = 1.0
    for length in (1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144, 233, 377, 610):
        bought = buy_at(prefill, 1.0, gain, length)
        cost = float(length) if bought is None else bought + prefill + (length - bought) / gain
        best = min(float(length), prefill + length / gain)
        one_token = 1.0 - 1.0 / gain  # the price may be reached in the middle of a token
        assert cost <= 2.0 * best + one_token + 1e-9, (length, bought)
        worst = max(worst, cost / best)
    print(f"prefill {prefill}, gain {gain}: at most {worst:.2f} of the best in hindsight")


def test_nothing_is_bought_before_the_first_token() -> None:
    assert Investment().worth(0.0, 1.0, 4.0, 0, 100, 500.0) == (False, "the first token is not out yet")


def test_nothing_is_bought_without_gain_or_tokens_to_come() -> None:
    rule = Investment()
    assert not rule.worth(0.1, 1.0, 1.0, 50, 100)[0]
    assert not rule.worth(0.1, 1.0, float("nan"), 50, 100)[0]
    assert not rule.worth(0.1, float("nan"), 2.0, 50, 100)[0]
    assert not rule.worth(5.0, 1.0, 2.0, 50, 9)[0]
    assert rule.worth(5.0, 1.0, 2.0, 50, 10)[0]


def test_a_typical_length_brings_it_forward_and_never_puts_it_off() -> None:
    assert buy_at(10.0, 1.0, 2.0, 200) == 20
    assert buy_at(10.0, 1.0, 2.0, 200, typical=100.0) == 1
    assert buy_at(10.0, 1.0, 2.0, 200, typical=5.0) == 20


def test_the_reason_names_the_figures() -> None:
    verdict, reason = Investment().worth(4.0, 0.25, 2.0, 40, 100)
    assert verdict
    assert reason == "prefill of 4 s pays: about 5 s saved over 40 tokens at predicted gain 2.00"


def test_typical_length_is_learned() -> None:
    rule = Investment()
    for length in (10, 20, 30, 40):
        rule.finished(length)
    assert rule.typical_length == USUAL_LENGTH
    rule.finished(1000)
    assert rule.typical_length == 30.0


def test_a_dear_prefill_waits_for_a_look_at_the_drafter_below() -> None:
    rule = Investment()
    for emitted in range(1, 40):
        worth, reason = rule.worth(20.0, 1.0, 3.0, emitted, 1000, 500.0, look=True)
        assert worth == (emitted >= LOOK * 20.0)
        assert worth or reason == "prefill of 20 s: first a look at how the drafter below does"
    assert rule.worth(20.0, 1.0, 3.0, 1, 1000, 500.0)[0], "with nothing below there is nothing to look at"
    assert rule.worth(1.0, 1.0, 3.0, 1, 1000, 500.0, look=True)[0], "a cheap one waits for nothing"
