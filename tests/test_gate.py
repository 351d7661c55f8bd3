"""The gate on scripted texts.

A text is a list of alphas, one per emitted token. Run with -s for the figures.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from cascade.config import BypassConfig
from cascade.control import Decision, Gate
from cascade.control.theory import best_k
from cascade.deciding import STAKE

DEFAULT = BypassConfig()


def verify(n: int) -> float:
    return 1.0 + 0.005 * (n - 1)


@dataclass
class Story:
    """What happened to one request."""

    changes: list[tuple[int, bool, str]] = field(default_factory=list)  # (token, open, reason)
    drafted: list[tuple[int, int]] = field(default_factory=list)  # (token, K) of each proposal
    probes: list[int] = field(default_factory=list)
    time: float = 0.0  # in plainly decoded tokens

    def drafted_after(self, token: int) -> int:
        return sum(k for at, k in self.drafted if at >= token)


def decode(
    text: Sequence[float], c: float, config: BypassConfig = DEFAULT, *, probe_cost: float = 0.1, seed: int = 0
) -> Story:
    """Decodes a text with K = 4, or what may be at stake, while open; a probe tests every token since the last test."""
    rng, gate, story = random.Random(seed), Gate(config, costly=True), Story()
    gate.probe_cost = probe_cost
    done = tested_to = 0
    while done < len(text):
        alpha = gate.alpha if gate.tests else 0.7
        decision = gate.decide(done, best_k(alpha, c, verify, 1, 16)[1])
        if decision.reason:
            story.changes.append((done, decision.open, decision.reason))
        if decision.open:
            k, held = int(max(1, min(4, STAKE * gate.left(done) / c))), 0
            while held < k and rng.random() < text[done]:
                held += 1
            gate.observe_tests(min(k, held + 1), held)
            gate.charge(held - (k * c + verify(k + 1) - 1))
            story.drafted.append((done, k))
            story.time += k * c + verify(k + 1)
            done += held + 1
            tested_to = done
            continue
        if decision.probe:
            gate.observe_tests(done - tested_to, sum(rng.random() < alpha for alpha in text[tested_to:done]))
            story.probes.append(done)
            story.time += probe_cost
            tested_to = done
        story.time += 1.0
        done += 1
    return story


def test_a_wrong_drafter_is_closed_soon_and_costs_next_to_nothing() -> None:
    story = decode([0.0] * 256, c=0.1)
    (closed, is_open, reason), *more = story.changes
    assert (closed, is_open, more) == (8, False, [])
    assert reason == "alpha 0.00 under threshold 0.30, predicted gain 0.90: bypassed"
    assert story.drafted_after(closed) == 0
    assert story.drafted_after(0) <= 0.2 * 256
    assert story.time / 256 <= 1.02


@pytest.mark.parametrize("alpha", [0.05, 0.1, 0.15])
def test_a_bad_drafter_drafts_little(alpha: float) -> None:
    for seed in range(8):
        story = decode([alpha] * 512, c=0.2, seed=seed)
        assert story.drafted_after(story.changes[0][0]) <= 0.2 * 512
        assert story.time / 512 <= 1.06


def test_a_good_drafter_is_never_closed() -> None:
    for alpha, c in ((0.6, 0.1), (0.7, 0.2), (0.95, 0.3)):
        for seed in range(8):
            assert decode([alpha] * 1000, c, seed=seed).changes == [], (alpha, c, seed)


def test_opens_within_64_tokens_after_the_text_turns_friendly() -> None:
    for turn in range(180, 215, 5):
        for seed in range(4):
            story = decode([0.02] * turn + [0.8] * 200, c=0.1, seed=seed)
            opened, _, reason = next(change for change in story.changes if change[0] >= turn and change[1])
            assert opened <= turn + 64
            assert re.fullmatch(r"probe: alpha 0\.\d\d, predicted gain \d\.\d\d: proposing again", reason)


def test_no_flapping_at_the_threshold() -> None:
    for alpha, c in ((0.3, 0.28), (0.3, 0.3), (0.5, 0.48)):
        counts = [len(decode([alpha] * 1000, c, seed=seed).changes) for seed in range(10)]
        print(f"alpha {alpha}, c {c}: {sum(counts) / 10} changes per 1000 tokens")
        assert sum(counts) / len(counts) <= 20
    for alpha in (0.25, 0.3, 0.35):
        counts = [len(decode([alpha] * 1000, 0.05, BypassConfig(threshold=0.3), seed=s).changes) for s in range(10)]
        print(f"alpha {alpha}, threshold 0.3 of the user's: {sum(counts) / 10} changes per 1000 tokens")
        assert sum(counts) / len(counts) <= 20


def test_under_the_threshold_but_gaining_stays_open() -> None:
    gate = Gate(DEFAULT, costly=True)
    gate.observe_tests(100, 20)
    assert gate.decide(50, 1.2) == Decision(True)
    assert gate.decide(50, None) == Decision(True), "an unknown gain does not close"
    assert not gate.decide(50, 1.0).open


def test_a_threshold_of_the_users_is_obeyed_alone() -> None:
    gate = Gate(BypassConfig(threshold=0.5), costly=True)
    gate.observe_tests(40, 30)
    assert gate.decide(50, 0.5).open, "cost has no say"
    gate.observe_tests(100, 20)
    assert gate.decide(51, 3.0) == Decision(False, False, "alpha 0.22 under threshold 0.50: bypassed")
    gate.observe_tests(60, 32)
    assert not gate.decide(60, 3.0).open, "within the margin"
    gate.observe_tests(60, 50)
    assert gate.decide(61, 0.5).reason == "probe: alpha 0.83 over threshold 0.50: proposing again"


def test_threshold_zero_never_closes_and_one_needs_perfection() -> None:
    gate = Gate(BypassConfig(threshold=0.0), costly=True)
    gate.observe_tests(500, 0)
    assert gate.decide(500, 0.1).open
    gate = Gate(BypassConfig(threshold=1.0), costly=True)
    gate.observe_tests(500, 499)
    assert not gate.decide(500, 9.0).open
    gate.observe_tests(100_000, 100_000)
    assert gate.decide(600, 9.0).open


def test_often_right_but_too_slow_is_closed_on_cost_alone() -> None:
    gate = Gate(DEFAULT, costly=True)
    gate.observe_tests(7, 6)
    assert gate.decide(20, 0.5).open, "too few tests"
    gate.observe_tests(1, 1)
    assert gate.decide(20, 0.92).open, "not clear yet, from so few tests"
    gate.observe_tests(16, 14)
    assert gate.decide(20, 0.98).open, "no clear margin"
    assert gate.decide(20, 0.92).reason == "predicted gain 0.92 at alpha 0.88: bypassed"
    gate.observe_tests(40, 39)
    assert not gate.decide(40, 0.8).open, "a high alpha does not open it"


def test_what_a_level_may_cost_is_bounded_whatever_its_alpha() -> None:
    """Three tokens and 1 % of the text; once that is spent, one token more each time it is opened again."""
    gate = Gate(DEFAULT, costly=True)
    gate.observe_tests(2, 2)
    gate.balance = -3.9
    assert gate.decide(100, 2.0).open
    gate.balance = -4.1
    assert gate.decide(100, 2.0).reason == "it has cost the time of 4.1 tokens more than it saved: bypassed"
    gate.observe_tests(16, 16)
    assert gate.decide(110, 2.0).open
    gate.balance -= 0.9
    assert gate.decide(112, 2.0).open
    gate.balance -= 0.2
    assert not gate.decide(114, 2.0).open
    alone = Gate(BypassConfig(threshold=0.3), costly=True)
    alone.balance = -100.0
    assert alone.decide(100, 0.5).open, "a threshold of the user's is obeyed alone"


def test_what_probes_cost_counts_too() -> None:
    gate = closed_gate(probe_cost=0.2)
    assert gate.decide(40, 0.5).probe
    assert gate.balance == -0.2


def test_no_verdict_before_min_tests_also_after_opening_again() -> None:
    gate = Gate(BypassConfig(threshold=0.5, min_tests=10), costly=True)
    gate.observe_tests(9, 0)
    assert gate.decide(9, 0.5).open
    gate.observe_tests(1, 0)
    assert not gate.decide(10, 0.5).open
    gate.observe_tests(12, 12)
    assert gate.decide(30, 1.5).open
    gate.observe_tests(9, 0)
    assert gate.decide(39, 0.5).open
    gate.observe_tests(1, 0)
    assert not gate.decide(40, 0.5).open


def test_a_few_tests_that_all_hold_open_it() -> None:
    gate = Gate(DEFAULT, costly=True)
    gate.observe_tests(8, 0)
    gate.decide(8, 0.5)
    gate.observe_tests(3, 3)
    assert not gate.decide(11, 2.0).open
    gate.observe_tests(1, 1)
    assert gate.decide(12, 2.0).open


def closed_gate(config: BypassConfig = DEFAULT, *, costly: bool = True, probe_cost: float = 0.0) -> Gate:
    gate = Gate(config, costly=costly)
    gate.probe_cost = probe_cost
    gate.observe_tests(100, 0)
    assert not gate.decide(0, 0.5).open
    return gate


def probes(gate: Gate, tokens: int) -> list[int]:
    due = []
    for token in range(1, tokens):
        if gate.decide(token, 0.5).probe:
            due.append(token)
            gate.observe_tests(8, 0)
    return due


def test_probes_grow_apart() -> None:
    assert probes(closed_gate(), 160) == [8, 24, 56, 88, 120, 152]


def test_probes_never_cost_more_than_their_share() -> None:
    due = probes(closed_gate(probe_cost=0.9), 300)
    assert all(50 <= b - a <= 51 for a, b in zip([0, *due], due, strict=False))
    assert 0.9 * len(due) <= 0.018 * 300


def test_a_free_drafter_is_tested_every_round() -> None:
    assert probes(closed_gate(costly=False), 6) == [1, 2, 3, 4, 5]


def test_closing_again_soon_doubles_the_first_distance() -> None:
    gate = closed_gate()
    token = 0
    for distance in (16, 32, 32):
        gate.observe_tests(64, 64)
        assert gate.decide(token, 2.0).open
        gate.observe_tests(100, 0)
        assert not gate.decide(token + 10, 0.5).open
        assert next(t for t in range(1, 100) if gate.decide(token + 10 + t, 0.5).probe) == distance
        token += 10 + distance
    gate.observe_tests(64, 64)
    assert gate.decide(token, 2.0).open
    gate.observe_tests(100, 0)
    assert not gate.decide(token + 100, 0.5).open
    assert next(t for t in range(1, 100) if gate.decide(token + 100 + t, 0.5).probe) == 8, "this time it had paid"


def test_alpha_follows_the_text() -> None:
    gate = Gate(DEFAULT, costly=True)
    assert gate.alpha == 0.0
    gate.observe_tests(0, 0)
    assert gate.tests == 0
    for _ in range(100):
        gate.observe_tests(4, 3)
    assert gate.alpha == pytest.approx(0.75)
    for _ in range(32):
        gate.observe_tests(1, 0)
    assert gate.alpha == pytest.approx(0.375, abs=0.01), "32 tests later, half of it is new"
