"""The other policies: `ema`, `goodput`, `entropy` and `hedge`. Run with -s for the figures."""

from __future__ import annotations

import itertools
import math
import random
from typing import Any

import pytest
import torch

from cascade import BypassConfig, CascadeConfig, Engine, LevelConfig, SamplingParams
from cascade.control import Controller, Estimates, Outcome
from cascade.control.ema import Ema
from cascade.control.entropy import Entropy
from cascade.control.goodput import Goodput
from cascade.control.hedge import Hedge
from cascade.control.theory import best_k
from cascade.draft import Doubt
from cascade.errors import ConfigError
from cascade.rows import Scores
from cascade.testing import FixedCosts, ManualClock, ScriptedDrafter, ToyModel, assert_same_text


def verify(n: int) -> float:
    return 1.0 + 0.02 * (n - 1)


def estimates(alpha: float = 0.7, cost: float = 0.1, without: float = 1.0) -> Estimates:
    return Estimates(alpha, cost, verify, without=without)


def made(kind: type[Controller], k: int | None = None, k_min: int = 1, k_max: int = 16, **options: Any) -> Controller:
    return kind(k=k, k_min=k_min, k_max=k_max, **options)


def drive(
    controller: Controller, alpha: float, rounds: int, known: Estimates | None = None, seed: int = 0
) -> list[int]:
    dice, ks = random.Random(seed), []
    for _ in range(rounds):
        ks.append(k := controller.next_k(known or estimates()))
        held = 0
        while held < k and dice.random() < alpha:
            held += 1
        if k:
            controller.observe(Outcome(k, k, min(k, held + 1), held))
        else:
            controller.observe(Outcome(0, 0, 8, sum(dice.random() < alpha for _ in range(8))))
    return ks


@pytest.mark.parametrize("kind", [Goodput, Hedge])
@pytest.mark.parametrize("cost", [0.03, 0.1, 0.3])
@pytest.mark.parametrize("alpha", [0.5, 0.7, 0.9])
def test_it_ends_near_the_best_k(kind: type[Controller], alpha: float, cost: float) -> None:
    known = estimates(0.7, cost)
    ks = drive(made(kind), alpha, 200, known)[100:]
    best = best_k(alpha, cost, verify, 1, 16)[0]
    assert sum(ks) / len(ks) == pytest.approx(best, abs=1 + 0.35 * best)


def test_goodput_begins_with_the_levels_own_k() -> None:
    controller = made(Goodput, k=9)
    assert controller.next_k(estimates(0.2)) == 9
    controller.observe(Outcome(9, 9, 1, 0))
    assert controller.next_k(estimates(0.2)) < 9


def test_ema_steps_one_at_a_time_and_waits_between() -> None:
    controller = made(Ema, k=6)
    ks = drive(controller, 1.0, 60)
    assert all(b - a in (0, 1) for a, b in itertools.pairwise(ks))
    assert ks[-1] == 16
    changes = [i for i, (a, b) in enumerate(itertools.pairwise(ks)) if a != b]
    assert all(b - a >= 3 for a, b in itertools.pairwise(changes)), "hysteresis in time"
    assert drive(controller, 0.0, 80)[-1] == 1


def test_ema_stays_within_its_band() -> None:
    controller = made(Ema, k=4)
    for i in range(200):
        assert controller.next_k(estimates()) == 4
        controller.observe(Outcome(4, 4, 3 if i % 2 else 4, 2))
    controller.observe(Outcome(4, 1, 1, 0))
    assert controller.next_k(estimates()) == 4, "a round that drafted less than K says nothing"


def test_hedge_leaves_out_what_does_not_pay_and_comes_back() -> None:
    controller, known = made(Hedge), estimates(0.7, 0.3)
    assert 0 in drive(controller, 0.05, 30, known)
    assert drive(controller, 0.05, 30, known)[-1] == 0
    back = drive(controller, 0.95, 30, known)
    assert back[-1] > 1
    print(f"hedge: back after {back.index(next(k for k in back if k))} probes of 8 tokens")


def test_hedge_counts_what_the_levels_below_reach_without_it() -> None:
    """Full information about subsets: with a good level below, the same drafter is not worth its time."""
    assert drive(made(Hedge), 0.6, 60, estimates(0.6, 0.3))[-1] > 0
    assert drive(made(Hedge), 0.6, 60, estimates(0.6, 0.3, without=1.8))[-1] == 0


def test_hedge_scores_every_k_by_every_outcome() -> None:
    """It never played 8, yet knows that 8 would have been best: all tokens always held."""
    controller, known = made(Hedge, k=2), estimates(0.9, 0.02)
    controller.next_k(known)
    for _ in range(6):
        controller.observe(Outcome(2, 2, 2, 2))
    assert controller.next_k(known) >= 8


# -- entropy ---------------------------------------------------------------------------------------------


def test_entropies_are_those_of_the_softmax() -> None:
    logits = torch.tensor([[0.0, 0.0, 0.0, 0.0], [50.0, 0.0, 0.0, 0.0], [1.0, 2.0, -math.inf, 0.5]])
    found = Scores.of(logits, greedy=False, sure=False, doubt=True).entropies
    wanted = [torch.distributions.Categorical(logits=line).entropy().item() for line in logits[:2]]
    wanted.append(torch.distributions.Categorical(logits=logits[2, [0, 1, 3]]).entropy().item())
    assert found == pytest.approx(wanted, abs=1e-5)


def test_doubt_is_the_bound_of_adaedl() -> None:
    assert not Doubt(0.2, 0.5).stops(1.2), "1 - sqrt(0.24) = 0.51"
    assert Doubt(0.2, 0.5).stops(1.3), "1 - sqrt(0.26) = 0.49"


def test_the_threshold_moves_towards_the_target() -> None:
    controller = made(Entropy)
    before = controller.doubt.least  # type: ignore[union-attr]
    for _ in range(5):
        controller.observe(Outcome(4, 4, 1, 0))
    assert controller.doubt.least == pytest.approx(before + 0.1)  # type: ignore[union-attr]
    for _ in range(100):
        controller.observe(Outcome(4, 4, 4, 4))
    assert controller.doubt.least == 0.0  # type: ignore[union-attr]
    for _ in range(100):
        controller.observe(Outcome(4, 4, 1, 0))
    assert controller.doubt.least == 0.95  # type: ignore[union-attr]
    controller.observe(Outcome(4, 0, 0, 0))
    assert controller.doubt.least == pytest.approx(0.93), "nothing drafted: too high"  # type: ignore[union-attr]


def toys(rule: str = "coupled", **options: Any) -> Engine:
    clock, target = ManualClock(), ToyModel(seed=1, scale=3.0)
    draft = ToyModel(seed=2, scale=3.0, mix=(target, 0.8))
    costs = FixedCosts(lambda level, tokens: (1.0 if level == "target" else 0.1) * (1 + 0.01 * tokens))
    config = CascadeConfig(
        levels=[
            LevelConfig(model=draft, name="draft", bypass=BypassConfig(threshold=0.0), **options),
            LevelConfig(model=target, name="target"),
        ],
        rule=rule,
    )
    return Engine(config, clock=clock, costs=costs, check=True)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("controller", ["ema", "goodput", "entropy", "hedge"])
def test_texts_are_the_targets_own(controller: str, temperature: float) -> None:
    params = SamplingParams(max_new_tokens=80, temperature=temperature, seed=3)
    assert_same_text(toys(controller=controller), [[1, 2, 3], [4, 5], [6]], params)


def listened(engine: Engine) -> list[tuple[Any, Any]]:
    """What the draft model is asked for and what it says, as pairs, while the engine runs."""
    level = engine.target.source.drafter  # type: ignore[union-attr]
    propose, heard = level.propose, []

    def noted(asks: Any) -> Any:
        drafts = propose(asks)
        heard.extend((ask, ask.context.tokens.tolist(), draft) for ask, draft in zip(asks, drafts, strict=True))
        return drafts

    level.propose = noted  # type: ignore[method-assign]
    return heard


def test_a_model_stops_before_it_draws_from_a_wide_distribution() -> None:
    engine = toys(controller="entropy", options={"gamma": 0.3, "threshold": 0.55})
    heard, stopped = listened(engine), 0
    model = engine.target.source.drafter.model  # type: ignore[union-attr]
    engine.generate([1, 2], SamplingParams(max_new_tokens=200, seed=1))
    for ask, text, draft in heard:
        wide = [
            ask.doubt.stops(torch.distributions.Categorical(logits=torch.tensor(model.logits(prefix))).entropy().item())
            for i in range(len(draft) + 1)
            for prefix in [[*text, *draft.tokens[:i]]]
        ]
        assert not any(wide[:-1]), "nothing was drawn where it should not have been"
        stopped += wide[-1]
    assert stopped > 20


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_tokens_kept_keep_their_q(rule: str) -> None:
    """Under a rule that needs q, a draft that was cut short still has one distribution per token."""
    engine = toys(rule, controller="entropy", options={"threshold": 0.6})
    heard = listened(engine)
    engine.generate([1, 2], SamplingParams(max_new_tokens=100, temperature=1.0, seed=1))
    kept = [draft for _, _, draft in heard if len(draft)]
    assert kept
    assert all(draft.q is not None and len(draft.q) == len(draft) for draft in kept)


def test_it_refuses_trees() -> None:
    with pytest.raises(ConfigError, match="controller entropy stops chains: leave out its tree"):
        toys(controller="entropy", tree="dynamic")


@pytest.mark.parametrize(
    ("kind", "options", "named"),
    [
        (Ema, {"up": 1.0}, "up of the controller ema .*1.0"),
        (Ema, {"down": 0.7}, "down .*0.7.* under up"),
        (Ema, {"weight": 0}, "weight"),
        (Ema, {"patience": -1}, "patience .*-1"),
        (Goodput, {"half_life": float("nan")}, "half_life of the controller goodput .*nan"),
        (Goodput, {"trust": -1}, "trust .*-1"),
        (Entropy, {"gamma": 0}, "gamma .*0"),
        (Entropy, {"threshold": 1.5}, "threshold .*1.5"),
        (Entropy, {"target": float("nan")}, "target .*nan"),
        (Hedge, {"memory": 0}, "memory"),
        (Hedge, {"margin": -0.1}, "margin .*-0.1"),
        (Hedge, {"margn": 0.1}, "no option 'margn'.*'margin'"),
    ],
)
def test_what_is_refused(kind: type[Controller], options: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        made(kind, **options)


def test_a_request_of_few_levels_chooses_among_their_subsets() -> None:
    """A wrong drafter below a right one: the wrong one is left out, the right one is not, each by its own weights."""
    clock, target = ManualClock(), ToyModel(seed=1, clock=None)
    text = Engine(CascadeConfig(levels=[target])).generate([1, 2], SamplingParams(max_new_tokens=200)).tokens
    costs = FixedCosts(
        lambda level, tokens: (1.0 if level == "target" else 0.2) * (1 + 0.02 * tokens),
        lambda level, tokens: (0.05 if level == "wrong" else 0.2) * tokens,
    )
    config = CascadeConfig(
        levels=[
            LevelConfig(drafter=ScriptedDrafter([[1, 2, *text]], "wrong"), name="wrong", controller="hedge"),
            LevelConfig(model=ToyModel(seed=2, mix=(target, 0.95)), name="right", controller="hedge"),
            LevelConfig(model=target, name="target"),
        ]
    )
    stats = Engine(config, clock=clock, costs=costs).generate([1, 2], SamplingParams(max_new_tokens=200)).stats
    wrong, right, _ = stats.levels
    assert wrong.bypassed_rounds > 0.5 * wrong.asks
    assert right.bypassed_rounds < 0.2 * right.asks
