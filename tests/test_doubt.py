"""Stopping in doubt: a draft level's own probabilities, what they turn out to be worth, and the tokens they save."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch

from cascade import CascadeConfig, Draft, Drafter, Engine, LevelConfig, SamplingParams
from cascade.control.calibration import BINS, Calibration
from cascade.control.theory import least_confidence
from cascade.draft import first_path
from cascade.draft_checks import check_draft
from cascade.errors import DraftError
from cascade.rows import Scores
from cascade.testing import FixedCosts, ToyModel

PROMPT = [1, 2, 3, 4]


# -- when one more token pays ----------------------------------------------------------------------------


@pytest.mark.parametrize("cost", [0.05, 0.2, 0.4])
@pytest.mark.parametrize("alpha", [0.5, 0.8])
def test_under_the_least_confidence_a_token_never_pays(cost: float, alpha: float) -> None:
    """Rounds of drafts of known chance: stopping at the bound is never worse than one token later."""

    def speed(chances: list[float]) -> float:
        tokens = 1.0 + sum(math.prod(chances[: i + 1]) for i in range(len(chances)))
        return tokens / (1.0 + cost * len(chances))

    chances = [alpha] * 12
    best = max(speed(chances[:k]) for k in range(13))
    stop = next(k for k in range(1, 13) if math.prod(chances[:k]) < least_confidence(cost, best))
    assert speed(chances[:stop]) >= speed(chances[: stop + 1]) - 1e-12


def test_the_least_confidence_is_a_probability() -> None:
    assert least_confidence(0.0, 3.0) == 0.0
    assert least_confidence(0.9, 3.0) == 1.0


# -- what a probability is worth -------------------------------------------------------------------------


def test_a_probability_counts_as_it_is_until_tests_say_otherwise() -> None:
    fresh = Calibration()
    for p in (0.04, 0.31, 0.77, 1.0):
        assert fresh.chance(p) == pytest.approx(p, abs=0.5 / BINS + 1e-9)


def test_the_share_that_held_is_learned_by_probability() -> None:
    generator, learned = random.Random(0), Calibration()
    for _ in range(4000):
        p = generator.random()
        learned.observe(p, generator.random() < 0.9)  # right nine times in ten, whatever it thinks
    assert all(abs(learned.chance((i + 0.5) / BINS) - 0.9) < 0.12 for i in range(BINS))
    for _ in range(2000):
        learned.observe(0.55, False)  # the text has changed: what is old is forgotten
    assert learned.chance(0.55) < 0.05
    assert learned.chance(0.95) > 0.7


def test_probabilities_at_the_edges_have_a_bin() -> None:
    learned = Calibration()
    for p in (0.0, 1.0, 1.0 + 1e-9, -1e-9):
        learned.observe(p, True)
        assert 0.0 < learned.chance(p) <= 1.0


# -- what a forward says ---------------------------------------------------------------------------------


def test_scores_hold_the_probability_of_each_pick() -> None:
    logits = torch.tensor([[0.0, 1.0, 3.0], [float("nan"), 0.0, 0.0], [50.0, -50.0, 0.0]])
    scores = Scores.of(logits, greedy=True, sure=True)
    assert scores.picks == [2, None, 0]
    assert scores.chances is not None
    assert scores.chances[0] == pytest.approx(math.exp(3) / (1 + math.e + math.exp(3)))
    assert scores.chances[2] <= 1.0
    part = scores.part(2, 3)
    assert (part.picks, part.chances) == ([0], [scores.chances[2]])
    assert Scores.of(logits, greedy=True, sure=False).chances is None
    assert Scores.of(logits, greedy=False, sure=True).picks is None


# -- drafts that say how sure they are -------------------------------------------------------------------


def test_chances_travel_with_their_tokens() -> None:
    draft = check_draft(Draft(np.array([4, 5, 6]), chances=[0.9, 0.5, 0.1]), 2, 10)
    assert (list(draft.tokens), draft.chances) == ([4, 5], [0.9, 0.5])
    tree = Draft([1, 2, 3], parents=[-1, -1, 0], origin=0, chances=[0.1, 0.2, 0.3])
    assert first_path(tree).chances == [0.1, 0.3]


@pytest.mark.parametrize("chances", [[0.5], [0.5] * 4])
def test_a_drafter_with_too_few_chances_loses_its_proposal_and_nothing_else(chances: list[float]) -> None:
    class Odd(Drafter):
        def propose(self, asks):
            return [Draft([5, 6, 7], parents=[-1, -1, 0], chances=chances) for _ in asks]

    model = ToyModel()
    model.trees = False
    result = Engine(CascadeConfig([Odd(), model])).generate(PROMPT, SamplingParams(max_new_tokens=9, ignore_eos=True))
    assert result.error is None
    assert result.stats.levels[0].dropped > 0
    assert len(result.tokens) == 9


@pytest.mark.parametrize("bad", [[1.5], [-0.1], [float("nan")]])
def test_chances_that_are_no_probabilities_cost_the_proposal(bad: list[float]) -> None:
    with pytest.raises(DraftError, match="must be probabilities"):
        check_draft(Draft([1], chances=bad), 4, 10)


# -- in a cascade ----------------------------------------------------------------------------------------


class Peaked(ToyModel):
    """Agrees with the target, and is sure of it or not by the last token's parity."""

    def __init__(self, target: ToyModel, doubt: float) -> None:
        super().__init__(vocab_size=target.vocab_size, order=4)
        self.name, self._target, self._doubt = "peaked", target, doubt

    def logits(self, prefix):
        best = int(self._target.logits(prefix).argmax())
        sure = prefix[-1] % 2 == 0
        wrong = (best + 1) % self.vocab_size
        out = np.full(self.vocab_size, -30.0)
        out[best], out[wrong] = (30.0, 0.0) if sure else (0.1, 0.0)  # nearly even where it doubts
        if not sure and (prefix[-1] * 7919 + prefix[-2]) % 100 < 100 * self._doubt:
            out[best], out[wrong] = out[wrong], out[best]  # and then often wrong
        return out


def run(doubt: float, controller: str = "pid") -> tuple[list[int], object, Engine]:
    target = ToyModel(order=4, seed=3)
    costs = FixedCosts(
        lambda level, tokens: 1.0 if level == "target" else 0.25,
        lambda level, tokens: 0.25 * tokens,
    )
    draft = LevelConfig(model=Peaked(target, doubt), name="draft", controller=controller, k=6, tree="chain")
    engine = Engine(CascadeConfig([draft, LevelConfig(model=target, name="target")]), costs=costs, check=True)
    result = engine.generate(PROMPT, SamplingParams(max_new_tokens=300, ignore_eos=True))
    return result.tokens, result.stats.levels[0], engine


def test_a_draft_model_stops_where_its_doubts_have_proved_right() -> None:
    plain = ToyModel(order=4, seed=3)
    truth = Engine(CascadeConfig([plain])).generate(PROMPT, SamplingParams(max_new_tokens=300, ignore_eos=True)).tokens
    doubtful, fixed = run(0.5), run(0.5, "fixed")
    assert doubtful[0] == fixed[0] == truth
    assert doubtful[1].accept_rate > fixed[1].accept_rate + 0.15
    calibration = doubtful[2].target.source.calibrations[False]
    assert calibration.chance(0.52) < 0.65
    assert calibration.chance(0.99) > 0.9


def test_doubts_that_prove_idle_stop_nothing() -> None:
    """As of a quantised copy of the target, which hesitates where the target hesitates too."""
    tokens, level, engine = run(0.0)
    assert engine.target.source.calibrations[False].chance(0.52) > 0.85
    assert level.accept_rate > 0.99
    assert level.drafted / (len(tokens) - level.accepted) > 4  # long drafts, in spite of a probability of a half


def test_a_fixed_k_is_kept_whatever_the_doubts() -> None:
    _, level, _ = run(0.5, "fixed")
    assert level.k_mean > 5.5  # only the text's end shortens it


def test_a_sampled_row_stops_in_doubt_as_well_and_keeps_its_text() -> None:
    target = ToyModel(order=4, seed=3)
    costs = FixedCosts(lambda level, tokens: 1.0 if level == "target" else 0.25, lambda level, tokens: 0.25 * tokens)
    params = SamplingParams(max_new_tokens=300, ignore_eos=True, temperature=0.7, seed=5)
    draft = LevelConfig(model=Peaked(target, 0.5), name="draft")
    engine = Engine(CascadeConfig([draft, LevelConfig(model=target, name="target")]), costs=costs, check=True)
    plain = Engine(CascadeConfig([ToyModel(order=4, seed=3)])).generate(PROMPT, params)
    result = engine.generate(PROMPT, params)
    assert result.tokens == plain.tokens
    assert engine.target.source.calibrations[True].chance(0.52) != Calibration().chance(0.52)
    assert engine.target.source.calibrations[False].chance(0.52) == Calibration().chance(0.52)


def test_a_least_k_is_kept_whatever_the_doubts() -> None:
    target = ToyModel(order=4, seed=3)
    costs = FixedCosts(lambda level, tokens: 1.0 if level == "target" else 0.25, lambda level, tokens: 0.25 * tokens)
    draft = LevelConfig(model=Peaked(target, 0.5), name="draft", k_min=6, k_max=6)
    engine = Engine(CascadeConfig([draft, LevelConfig(model=target, name="target")]), costs=costs)
    level = engine.generate(PROMPT, SamplingParams(max_new_tokens=100, ignore_eos=True)).stats.levels[0]
    assert level.drafted / level.proposals > 5.5
