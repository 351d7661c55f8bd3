"""Usual times of forwards and the pace now: interpolation, monotony, forgetting, and what is not known."""

from __future__ import annotations

import random
import time

import pytest

from cascade.costs import SURE, WINDOW, CostModel, Costs, FixedCosts, estimate


def fed(*pairs: tuple[int, float], rows: int = 1) -> CostModel:
    costs = CostModel()
    for tokens, seconds in pairs:
        costs.observe("m", tokens, rows, seconds)
    return costs


def test_nothing_known() -> None:
    costs = CostModel()
    assert costs.seconds("m", 1) is None
    assert costs.draft_seconds("m") is None
    costs.observe("other", 1, 1, 0.1)
    assert costs.seconds("m", 1) is None


def test_interpolates_between_and_extrapolates_beyond() -> None:
    costs = fed((1, 1.0), (5, 1.4), (9, 1.8), (64, 7.3))
    assert costs.seconds("m", 1) == 1.0
    assert costs.seconds("m", 3) == pytest.approx(1.2)
    assert costs.seconds("m", 7) == pytest.approx(1.6)
    assert costs.seconds("m", 20) == pytest.approx(1.8 + 0.1 * 11)
    assert costs.seconds("m", 700) == pytest.approx(7.3 + 0.1 * (700 - 64))


def test_below_the_smallest_size_time_stays_level() -> None:
    assert fed((2, 0.3), (8, 0.4)).seconds("m", 1) == 0.3


def test_prompts_alone_say_nothing_of_short_forwards() -> None:
    costs = fed((512, 3.0), (200, 1.2))
    assert costs.seconds("m", 2) is None
    assert costs.seconds("m", 300) == pytest.approx(1.2 + 1.8 * 100 / 312)
    costs.observe("m", 1, 1, 0.2)
    assert costs.seconds("m", 1) == 0.2


def test_one_known_size_gives_a_guess() -> None:
    costs = fed((1, 0.32))
    assert costs.seconds("m", 1) == 0.32
    ratio = (costs.seconds("m", 700) or 0.0) / 0.32
    assert 13 <= ratio <= 30


def test_a_median_ignores_stalls_and_forgets() -> None:
    costs = fed(*[(4, 1.0)] * 10, *[(4, 50.0)] * 4)
    assert costs.seconds("m", 4) == 1.0
    for _ in range(WINDOW):
        costs.observe("m", 4, 1, 2.0)
    assert costs.seconds("m", 4) == 2.0


def test_a_stall_at_one_size_does_not_lift_all_larger_ones() -> None:
    costs = fed(*[(n, 1.0 + 0.01 * n) for n in range(1, 17) for _ in range(15)])
    costs.observe("m", 20, 1, 1.2)
    fresh = fed((5, 10.0), *[(n, 1.0 + 0.01 * n) for n in range(1, 17) if n != 5 for _ in range(15)])
    assert fresh.seconds("m", 16) == pytest.approx(costs.seconds("m", 16), rel=0.1)


def test_never_falls_with_size_and_equals_a_full_fit() -> None:
    rng = random.Random(3)
    costs, again = CostModel(), CostModel()
    for step in range(600):
        tokens = rng.choice([1, 2, 3, 4, 5, 8, 9, 16, 17, 33, 100, 400])
        seconds = (1 + 0.02 * tokens) * rng.uniform(0.7, 1.5)
        costs.observe("m", tokens, 1, seconds)
        again.observe("m", tokens, 1, seconds)
        for table in again._tables.values():
            table.stale = True  # the shortcut is not taken
        read = [costs.seconds("m", n) or 0.0 for n in range(1, 500, 7)]
        assert read == pytest.approx([again.seconds("m", n) or 0.0 for n in range(1, 500, 7)])
        assert read == sorted(read), step


def test_rows_have_their_own_tables_once_they_know_two_sizes() -> None:
    costs = fed((1, 1.0), (8, 1.7))
    assert costs.seconds("m", 8, rows=4) == 1.7
    costs.observe("m", 8, 4, 3.0)
    assert costs.seconds("m", 8, rows=4) == 1.7, "one size is not a table yet"
    costs.observe("m", 4, 4, 2.0)
    assert costs.seconds("m", 8, rows=4) == 3.0
    assert costs.seconds("m", 8, rows=1) == 1.7


def test_nonsense_is_ignored() -> None:
    costs = fed((1, float("nan")), (1, -1.0), (-1, 1.0), (1, float("inf")))
    assert costs.seconds("m", 1) is None


def test_proposals_have_a_price_of_their_own() -> None:
    costs = fed((1, 1.0))
    costs.observe_draft("m", 4, 0.002)
    assert costs.draft_seconds("m", 4) == 0.002
    assert costs.seconds("m", 1) == 1.0


def test_fixed_costs() -> None:
    costs: Costs = FixedCosts(lambda level, tokens: tokens * (2.0 if level == "big" else 1.0))
    costs.observe("big", 3, 1, 99.0)
    costs.observe_draft("big", 3, 99.0)
    assert costs.seconds("big", 3, rows=2) == 6.0
    assert costs.seconds("small", 3) == 3.0
    assert costs.draft_seconds("small", 3) == 0.0
    assert FixedCosts(lambda level, tokens: 1.0, lambda level, tokens: 0.1).draft_seconds("small", 3) == 0.1


def test_in_a_batch_those_who_draft_pay_for_all() -> None:
    costs = FixedCosts(lambda level, tokens: 1.0 + 0.02 * tokens, lambda level, tokens: 0.1 + 0.01 * tokens)
    alone, one_of_eight, all_of_eight = (
        estimate(costs, "draft", "target", 0.8, batch, rows) for batch, rows in ((1, 1), (8, 1), (8, 8))
    )
    assert alone.draft_cost == pytest.approx(0.11 / 1.02)
    assert one_of_eight.draft_cost == pytest.approx(8 * 0.11 / 1.16)  # eight rows wait for it
    assert all_of_eight.draft_cost == pytest.approx(0.18 / 1.16)
    assert one_of_eight.verify(4) == pytest.approx(1 + 8 * 0.06 / 1.16)
    assert all_of_eight.verify(4) == pytest.approx((1 + 0.02 * 32) / 1.16)
    assert {e.verify(1) for e in (alone, one_of_eight, all_of_eight)} == {1.0}


def test_drafts_for_several_rows_have_a_price_of_their_own() -> None:
    costs = CostModel()
    costs.observe_draft("draft", 1, 0.015)
    assert costs.draft_seconds("draft", rows=8) == 0.015, "the nearest that is known"
    costs.observe_draft("draft", 1, 0.03, rows=8)
    assert costs.draft_seconds("draft", rows=8) == 0.03
    assert costs.draft_seconds("draft") == 0.015


def test_costs_little_itself() -> None:
    costs = fed(*[(n, 1.0 + n) for n in (*range(1, 17), 30, 60, 100, 200, 400)])
    best = 1.0
    for _ in range(5):
        began = time.perf_counter()
        for i in range(200):
            costs.observe("m", 1 + i % 16, 1, 1.0 + i % 7)
            costs.seconds("m", 9)
        best = min(best, (time.perf_counter() - began) / 400)
    print(f"a call costs {best * 1e6:.1f} us")
    assert best < 50e-6, "some 4 us on an idle machine"


def test_times_of_a_busy_machine_do_not_keep_an_unused_level_out_for_good() -> None:
    costs = CostModel()
    for _ in range(SURE):
        costs.observe("draft", 1, 1, 0.03)
    for _ in range(40):
        costs.observe("draft", 1, 1, 0.5)  # whatever else ran meanwhile
        costs.observe_draft("draft", 1, 0.6)
        costs.observe("target", 1, 1, 0.5)
    assert costs.seconds("draft", 1) == 0.5
    for _ in range(15):
        costs.relax("draft")
    assert costs.seconds("draft", 1) == 0.03
    assert costs.draft_seconds("draft") == 0.6  # never seen faster
    assert costs.seconds("target", 1) == 0.5
    for _ in range(15):
        costs.observe("draft", 1, 1, 0.2)
    assert costs.seconds("draft", 1) == 0.2  # what is measured counts as ever


def test_relaxing_keeps_times_rising() -> None:
    costs = CostModel()
    generator = random.Random(0)
    for _ in range(300):
        tokens = generator.choice((1, 2, 4, 8, 30, 200))
        costs.observe("a", tokens, 1, (1 + tokens / 10) * generator.choice((1.0, 1.0, 5.0)))
    for _ in range(20):
        costs.relax("a")
        times = [costs.seconds("a", n) for n in range(1, 300)]
        assert times == sorted(times)


def test_one_lucky_time_is_not_what_a_level_relaxes_to() -> None:
    costs = CostModel()
    for i in range(40):
        costs.observe("draft", 1, 1, 0.002 if i == 17 else 0.01)
    for _ in range(30):
        costs.relax("draft")
    assert costs.seconds("draft", 1) == 0.002 or costs.seconds("draft", 1) == 0.01


@pytest.mark.parametrize("pace", [0.6, 1.0, 1.7])
@pytest.mark.parametrize("size", [1, 40], ids=["narrow", "wide"])
def test_a_machine_that_changes_its_pace_changes_it_for_all_sizes(pace: float, size: int) -> None:
    usual = {n: 1.0 + 0.02 * n for n in (1, 2, 4, 8, 16, 40, 64)}
    costs = fed(*[pair for pair in usual.items() for _ in range(SURE)])
    for _ in range(40):
        costs.observe("m", size, 1, usual[size] * pace)
    for tokens, seconds in usual.items():
        assert costs.seconds("m", tokens) == pytest.approx(seconds * pace, rel=0.03)
    for _ in range(5):  # and back, at once
        costs.observe("m", size, 1, usual[size])
    assert costs.seconds("m", 8) == pytest.approx(usual[8], rel=0.03)


def test_a_size_that_was_measured_in_a_stall_is_put_right() -> None:
    costs = fed((1, 1.0), (4, 5.0), (8, 1.2))
    for _ in range(20):
        for tokens, seconds in ((1, 1.0), (4, 1.1), (8, 1.2)):
            costs.observe("m", tokens, 1, seconds)
    assert [costs.seconds("m", n) for n in (1, 4, 8)] == pytest.approx([1.0, 1.1, 1.2])
    costs.observe("m", 6, 1, 6.0)
    for _ in range(30):  # no other size is there to tell
        costs.observe("m", 6, 1, 1.15)
    assert [costs.seconds("m", n) for n in (1, 4, 6, 8)] == pytest.approx([1.0, 1.1, 1.15, 1.2])


def test_a_stall_at_one_size_does_not_move_the_pace() -> None:
    costs = fed(*[(1, 1.0)] * 15, *[(4, 5.0)] * 3, *[(8, 1.2)] * 150)
    assert costs.seconds("m", 1) == pytest.approx(1.0)


def test_a_clock_that_stands_still_is_no_division_by_zero() -> None:
    costs = fed((1, 1.0), (1, 1.0), (1, 1.0), *[(1, 0.0)] * 40, (1, 1.0))
    assert costs.seconds("m", 1) is not None
