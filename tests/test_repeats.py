"""What a prompt's repetitions tell of the answer, and what becomes of it."""

from __future__ import annotations

import numpy as np
import pytest

from cascade import CascadeConfig, Engine, LevelConfig, SamplingParams
from cascade.control.repeats import LATEST, ByRepeats, repetitiveness
from cascade.testing import FixedCosts, ManualClock, ScriptedDrafter, ToyModel


def twin(tokens: list[int]) -> float:
    """By a dictionary, token by token."""
    told, latest = 0, {}
    for i in range(2, len(tokens)):
        pair = (tokens[i - 2], tokens[i - 1])
        told += latest.get(pair) == tokens[i]
        latest[pair] = tokens[i]
    return told / (len(tokens) - 2) if len(tokens) > 3 else 0.0


@pytest.mark.parametrize("vocab", [1, 2, 5, 50, 150_000])
def test_it_equals_its_twin(vocab: int) -> None:
    rng = np.random.default_rng(vocab)
    for length in (0, 1, 2, 3, 4, 5, 17, 100, 1000):
        tokens = rng.integers(0, vocab, length)
        assert repetitiveness(tokens) == pytest.approx(twin(tokens.tolist()))


def test_a_text_twice_is_half_told_and_only_the_latest_part_counts() -> None:
    once = np.random.default_rng(0).permutation(1000)
    assert repetitiveness(np.tile(once, 2)) == pytest.approx(0.5, abs=0.01)
    assert repetitiveness(np.concatenate([np.zeros(5000, np.int64), np.arange(LATEST)])) == 0.0


def test_alpha_by_kind_of_prompt() -> None:
    kinds = ByRepeats(lookup=True)
    assert kinds.alpha(0.0, 0.5) == kinds.alpha(0.5, 0.5) == 0.5
    for _ in range(40):
        kinds.observe(0.5, 10, 9)
        kinds.observe(0.0, 10, 1)
    assert kinds.alpha(0.5, 0.5) == pytest.approx(0.87, abs=0.03)
    assert kinds.alpha(0.0, 0.5) == pytest.approx(0.13, abs=0.03)
    assert kinds.alpha(0.07, 0.5) == 0.5, "another kind"


def test_before_anything_was_tested_only_lookups_go_by_the_prompt() -> None:
    assert ByRepeats(lookup=True).first(0.0, 0.8) == 0.6
    assert ByRepeats(lookup=True).first(0.05, 0.8) == pytest.approx(0.7)
    assert ByRepeats(lookup=True).first(0.3, 0.8) == 0.8
    assert ByRepeats(lookup=False).first(0.0, 0.8) == 0.8


class Noted(ScriptedDrafter):
    """Notes what it is asked for."""

    costly = False
    wants: list[int]

    def propose(self, asks):  # type: ignore[no-untyped-def]
        self.wants = [*getattr(self, "wants", []), *(ask.want for ask in asks)]
        return super().propose(asks)


def test_the_first_k_follows_from_the_prompt() -> None:
    first = {}
    for name, prompt in {"new": list(range(30)), "again": [1, 2, 3, 4, 5] * 6}.items():
        drafter = Noted()
        levels = [LevelConfig(drafter=drafter, name="table"), LevelConfig(model=ToyModel(), name="target")]
        costs = FixedCosts(lambda level, tokens: 1.0 + 0.05 * (tokens - 1), lambda level, tokens: 0.02 * tokens)
        engine = Engine(CascadeConfig(levels=levels), clock=ManualClock(), costs=costs)
        engine.generate(prompt, SamplingParams(max_new_tokens=40))
        first[name] = drafter.wants[0]
    assert first["new"] < first["again"]
