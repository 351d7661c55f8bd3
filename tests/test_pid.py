"""The PID controller (and `fixed`): goodput, settling, calm, bounds, refusals. Run with -s for the tables."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest

from cascade.control import Controller, Estimates, Fixed, Outcome, Pid
from cascade.control.theory import accept_rate, best_k, expected_tokens
from cascade.errors import ConfigError

ALPHAS = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
COSTS = (0.02, 0.05, 0.1, 0.2, 0.35, 0.5)
Acceptance = Callable[[int, int], int]  # (round, K) -> accepted


def verify(n: int) -> float:
    return 1.0 + 0.005 * (n - 1)


def pid(k: int | None = None, k_min: int = 1, k_max: int = 16, **options: Any) -> Pid:
    return Pid(k=k, k_min=k_min, k_max=k_max, **options)


def outcome(k: int, accepted: int) -> Outcome:
    return Outcome(k, k, min(k, accepted + 1), accepted)


def drive(controller: Controller, estimates: Estimates, acceptance: Acceptance, rounds: int) -> list[int]:
    ks = []
    for i in range(rounds):
        k = controller.next_k(estimates)
        controller.observe(outcome(k, acceptance(i, k)))
        ks.append(k)
    return ks


def independent(alphas: Sequence[float], seed: int) -> Acceptance:
    """Each token holds with the round's alpha."""
    rng = random.Random(seed)

    def draw(i: int, k: int) -> int:
        held = 0
        while held < k and rng.random() < alphas[i]:
            held += 1
        return held

    return draw


def noiseless(alphas: Sequence[float]) -> Acceptance:
    """The expected number, its fractions carried over to later rounds."""
    carry = 0.0

    def draw(i: int, k: int) -> int:
        nonlocal carry
        carry += k * accept_rate(alphas[i], k)
        held = min(k, int(carry))
        carry -= held
        return held

    return draw


def goodput(alphas: Sequence[float], ks: Sequence[int], c: float) -> float:
    """Expected tokens per time of these K, so that luck does not count."""
    tokens = sum(expected_tokens(alpha, k) for alpha, k in zip(alphas, ks, strict=True))
    return tokens / sum(k * c + verify(k + 1) for k in ks)


def turns(ks: Sequence[int]) -> int:
    steps = [b - a for a, b in pairwise(ks) if b != a]
    return sum((a > 0) != (b > 0) for a, b in pairwise(steps))


def settled(ks: Sequence[int], start: int) -> int:
    """Rounds after `start` until K stays within a token and a fifth of where it ends."""
    end = sum(ks[-20:]) / 20
    off = [i for i, k in enumerate(ks) if i >= start and abs(k - end) > 1 + 0.2 * end]
    return off[-1] - start + 1 if off else 0


@pytest.mark.parametrize(
    ("scale", "shift", "worst", "mean"),
    [(1, 0.0, 0.95, 0.98), (1, 0.15, 0.92, 0.97), (1, -0.15, 0.9, 0.97), (0, 0.7, 0.9, 0.97)],
)
def test_goodput_near_the_best_fixed_k_in_hindsight(scale: int, shift: float, worst: float, mean: float) -> None:
    """60 rounds with the engine-wide alpha being right, off either way, or a prior."""
    print(f"\ngoodput over that of the best fixed K; the engine-wide alpha is {scale} * alpha + {shift}")
    print("alpha  " + "".join(f"c={c:<7}" for c in COSTS))
    shares = []
    for alpha in ALPHAS:
        said = min(0.97, max(0.05, scale * alpha + shift))
        row = []
        for c in COSTS:
            runs = [drive(pid(), Estimates(said, c, verify), independent([alpha] * 60, s), 60) for s in range(4)]
            row.append(sum(goodput([alpha] * 60, ks, c) for ks in runs) / 4 / best_k(alpha, c, verify, 1, 16)[1])
        print(f"{alpha:<7}" + "".join(f"{share:<9.3f}" for share in row))
        shares += row
    assert min(shares) >= worst
    assert sum(shares) / len(shares) >= mean


@pytest.mark.parametrize(("before", "after"), [(0.85, 0.4), (0.4, 0.85), (0.9, 0.6), (0.6, 0.9)])
def test_text_that_changes_within_a_request(before: float, after: float) -> None:
    alphas = [before] * 40 + [after] * 40
    for c in (0.05, 0.1, 0.2):
        runs = [drive(pid(), Estimates(0.7, c, verify), independent(alphas, seed), 80) for seed in range(8)]
        mine = sum(goodput(alphas, ks, c) for ks in runs) / 8
        best = max(goodput(alphas, [k] * 80, c) for k in range(1, 17))
        print(f"alpha {before} -> {after}, c={c}: {mine / best:.3f} of the best fixed K in hindsight")
        assert mine >= 0.93 * best


@pytest.mark.parametrize(("before", "after"), [(0.5, 0.8), (0.8, 0.5), (0.7, 0.9), (0.9, 0.6)])
def test_step_settles_without_much_overshoot(before: float, after: float) -> None:
    alphas = [before] * 80 + [after] * 120
    ks = drive(pid(), Estimates(before, 0.05, verify), noiseless(alphas), 200)
    end, rounds = sum(ks[-20:]) / 20, settled(ks, 80)
    overshoot = max((k - end) * (1 if after > before else -1) for k in ks[80:])
    best = best_k(after, 0.05, verify, 1, 16)[0]
    print(f"step {before} -> {after}: K {ks[79]} -> {end:.1f} (best {best}), {rounds} rounds, over by {overshoot:.1f}")
    assert rounds <= 40
    assert overshoot <= 1 + 0.35 * end
    assert abs(end - best) <= 1 + 0.3 * best


def test_ramp_is_followed() -> None:
    alphas = [0.4 + 0.5 * i / 199 for i in range(200)]
    ks = drive(pid(), Estimates(0.6, 0.05, verify), noiseless(alphas), 200)
    lag = [best_k(a, 0.05, verify, 1, 16)[0] - k for a, k in zip(alphas, ks, strict=True)]
    print(f"ramp 0.4 -> 0.9 in 200 rounds: K {ks[0]} -> {ks[-1]}, behind by {max(lag)} at most, {turns(ks)} turns")
    assert max(lag) <= 5
    assert min(lag) >= -3
    assert turns(ks) <= 6


@pytest.mark.parametrize("options", [{}, {"setpoint": 0.5}])
@pytest.mark.parametrize("kind", ["tokens", "rounds", "binomial"])
def test_half_accepted_at_random_is_calm(kind: str, options: dict[str, Any]) -> None:
    """500 rounds at 50 %: by token, all or nothing, or independently of position (r then ignores K)."""
    for seed in range(6):
        rng = random.Random(seed)
        kinds: dict[str, Acceptance] = {
            "tokens": independent([0.5] * 500, seed),
            "rounds": lambda i, k, rng=rng: k * (rng.random() < 0.5),  # type: ignore[misc]
            "binomial": lambda i, k, rng=rng: sum(rng.random() < 0.5 for _ in range(k)),  # type: ignore[misc]
        }
        controller = pid(**options)
        ks = drive(controller, Estimates(0.6, 0.1, verify), kinds[kind], 500)
        assert turns(ks) <= 50
        assert 1 <= min(ks) <= max(ks) <= 16
        assert abs(controller._integral) <= 16.0


@pytest.mark.parametrize("k", [2, 4, 10])
def test_exactly_at_the_set_point_nothing_moves(k: int) -> None:
    controller = pid(k, setpoint=0.5)
    assert drive(controller, Estimates(0.7, 0.1, verify), lambda i, k: k // 2, 500) == [k] * 500
    assert controller._integral == pytest.approx(0, abs=0.01)


def test_a_single_outlier_moves_k_little_and_once() -> None:
    controller = pid(4, setpoint=0.5)
    ks = drive(controller, Estimates(0.7, 0.1, verify), lambda i, k: 0 if i == 100 else k // 2 + (k % 2) * (i % 2), 300)
    assert max(ks) - min(ks) <= 2
    assert turns(ks) <= 1


def test_saturation_leaves_no_debt() -> None:
    alphas = [1.0] * 400 + [0.4] * 60
    controller = pid()
    ks = drive(controller, Estimates(0.7, 0.05, verify), noiseless(alphas), 460)
    assert set(ks[100:400]) == {16}
    assert controller._integral <= 16.0
    back = next(i for i, k in enumerate(ks[400:]) if k <= 8)
    print(f"after 400 rounds at K = 16: half of it within {back} rounds of bad text")
    assert back <= 15

    alphas = [0.0] * 400 + [0.9] * 60
    ks = drive(pid(), Estimates(0.7, 0.05, verify), noiseless(alphas), 460)
    assert set(ks[50:400]) == {1}
    assert next(i for i, k in enumerate(ks[400:]) if k >= 4) <= 25


def test_bounds_hold_and_zero_is_not_its_business() -> None:
    for alpha in (0.0, 1.0):
        for k_min, k_max in ((0, 16), (1, 1), (3, 5), (5, 5)):
            ks = drive(pid(None, k_min, k_max), Estimates(0.5, 0.1, verify), noiseless([alpha] * 100), 100)
            assert max(1, k_min) <= min(ks) <= max(ks) <= k_max
    assert pid(0, 0, 16).next_k(Estimates(0.5, 0.1, verify)) == 1
    assert pid(None, 0, 0).next_k(Estimates(0.5, 0.1, verify)) == 0, "k_max has the last word"


def test_short_rounds_do_not_count() -> None:
    """Whatever cut them short, r at K is unknown; alpha is not, and the feed-forward follows it alone."""
    estimates = Estimates(0.7, 0.05, verify)
    for accepted, alpha in ((0, 0.0), (2, 1.0)):
        controller = pid()
        for _ in range(100):
            k = controller.next_k(estimates)
            controller.observe(Outcome(k + 1, 2, 2, accepted))
        assert controller._integral == 0.0
        assert controller.next_k(estimates) == best_k(alpha, 0.05, verify, 1, 16)[0]


def test_longer_proposals_than_asked_are_no_bias() -> None:
    """A level hands up what its own verifier added; K still settles where r is right."""
    controller, estimates = pid(4), Estimates(0.7, 0.05, verify)
    draw = noiseless([0.7] * 400)
    for i in range(400):
        k = controller.next_k(estimates)
        accepted = draw(i, k + 2)
        controller.observe(Outcome(k, k + 2, min(k + 2, accepted + 1), accepted))
    assert k + 2 == pytest.approx(best_k(0.7, 0.05, verify, 1, 16)[0], abs=2)


def test_a_fixed_set_point_is_reached() -> None:
    ks = drive(pid(setpoint=0.6), Estimates(0.8, 0.05, verify), noiseless([0.8] * 300), 300)
    assert accept_rate(0.8, ks[-1]) == pytest.approx(0.6, abs=0.08)


def test_k_follows_the_request_not_only_the_engine() -> None:
    for alpha, engine in ((0.8, 0.7), (0.6, 0.7), (0.5, 0.65), (0.9, 0.8)):
        for c in (0.05, 0.1, 0.2):
            ks = drive(pid(), Estimates(engine, c, verify), noiseless([alpha] * 150), 150)
            best = best_k(alpha, c, verify, 1, 16)[0]
            assert sum(ks[-20:]) / 20 == pytest.approx(best, abs=1 + 0.2 * best), (alpha, engine, c)


def test_first_k() -> None:
    estimates = Estimates(0.8, 0.05, verify)
    assert pid(7).next_k(estimates) == 7
    assert pid().next_k(estimates) == best_k(0.8, 0.05, verify, 1, 16)[0]
    assert pid().next_k(Estimates(0.8, 0.05, verify, round_cost=0.5)) > pid().next_k(estimates)


def test_restart_takes_the_best_k_for_what_is_known() -> None:
    controller, estimates = pid(3), Estimates(0.5, 0.05, verify)
    drive(controller, estimates, noiseless([0.0] * 40), 40)
    assert controller.next_k(estimates) == 1
    controller.observe(Outcome(0, 0, 200, 180))  # free tests
    controller.restart()
    assert controller._integral == 0.0
    assert controller.next_k(estimates) == pytest.approx(best_k(0.9, 0.05, verify, 1, 16)[0], abs=1)


def test_same_inputs_same_k() -> None:
    runs = [drive(pid(), Estimates(0.7, 0.1, verify), independent([0.6] * 200, 5), 200) for _ in range(2)]
    assert runs[0] == runs[1]
    controller, estimates = pid(4), Estimates(0.7, 0.1, verify)
    controller.next_k(estimates)
    controller.observe(outcome(4, 4))
    assert len({controller.next_k(estimates) for _ in range(50)}) == 1, "asking again changes nothing"


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"kp": -0.1}, "kp .*-0.1"),
        ({"ki": float("nan")}, "ki .*nan"),
        ({"kd": "big"}, "kd .*'big'"),
        ({"kp": float("inf")}, "kp .*inf"),
        ({"kp": True}, "kp .*True"),
        ({"setpoint": 0}, "setpoint .*not 0"),
        ({"setpoint": 1.0}, "setpoint .*1.0"),
        ({"setpoint": float("nan")}, "setpoint .*nan"),
        ({"half_life": 0}, "half_life .*0"),
        ({"trust": -3}, "trust .*-3"),
        ({"setpiont": 0.5}, "Pid has no option 'setpiont'.*'setpoint'"),
    ],
)
def test_what_is_refused(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        pid(**options)


def test_fixed() -> None:
    estimates = Estimates(0.7, 0.1, verify)
    assert drive(Fixed(k=6, k_min=1, k_max=16), estimates, lambda i, k: 0, 5) == [6] * 5
    assert Fixed(k=None, k_min=1, k_max=16).next_k(estimates) == 4
    assert Fixed(k=None, k_min=1, k_max=2).next_k(estimates) == 2
    assert Fixed(k=0, k_min=1, k_max=2).next_k(estimates) == 0
    with pytest.raises(ConfigError, match="Fixed has no option 'kp'"):
        Fixed(k=None, k_min=1, k_max=2, kp=1)


def test_a_decision_costs_microseconds() -> None:
    controller, estimates, draw = pid(), Estimates(0.7, 0.1, verify), independent([0.7] * 1000, 1)
    best = 1.0
    for start in range(0, 1000, 100):
        began = time.perf_counter()
        for i in range(start, start + 100):
            k = controller.next_k(estimates)
            controller.observe(outcome(k, draw(i, k)))
        best = min(best, (time.perf_counter() - began) / 100)
    print(f"a decision costs {best * 1e6:.1f} us")
    assert best < 100e-6, "some 6 us on an idle machine"
