"""Controllers on made-up texts, through the whole engine in virtual time. Run with -s for the figures."""

from __future__ import annotations

import importlib.util
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cascade import CascadeConfig, Engine, LevelConfig, SamplingParams, deciding
from cascade.testing import FixedCosts, ManualClock, ToyModel

ROOT = Path(__file__).parent.parent
spec = importlib.util.spec_from_file_location("control", ROOT / "benchmarks" / "control.py")
control = importlib.util.module_from_spec(spec)
sys.modules["control"] = control  # its dataclass looks there
spec.loader.exec_module(control)

TEXTS = 36
COSTS = (0.03, 0.1, 0.4)


def over_plain(work: Any, drafter: str, params: SamplingParams | None = None) -> float:
    """Time with pid over that of plain decoding."""
    plain = control.fixed_seconds(work, 0, drafter == "silent")
    return float(control.played(work, drafter, "pid", params).seconds / plain)


def text(alpha: list[float], c: float, seed: int) -> Any:
    """A workload that is right with these chances and tells them; second tokens are always wrong."""
    chances = np.array(alpha)
    rights = np.random.default_rng(seed).random(len(chances)) < chances
    return control.Workload("constant", rights, chances, c, 0.01, seed, seconds=0.0)


@pytest.mark.parametrize("k", [0, 3, 9])
@pytest.mark.parametrize("drafter", ["chain", "silent"])
def test_a_fixed_k_takes_what_the_loop_says(drafter: str, k: int) -> None:
    for seed in range(2):
        work = control.workload(seed)
        params = SamplingParams(speculate=k > 0)
        found = control.played(work, drafter, "fixed", params, k=max(k, 1), bypass=control.ALWAYS)
        assert found.seconds == pytest.approx(control.fixed_seconds(work, k, drafter == "silent"), rel=1e-9)


@pytest.mark.parametrize("drafter", control.DRAFTERS)
@pytest.mark.parametrize(
    ("controller", "texts", "median", "p95", "plain"),
    [("pid", TEXTS, 1.05, 1.15, 1.05), ("goodput", 9, 1.08, 1.25, 1.10), ("hedge", 9, 1.08, 1.25, 1.10)],
)
def test_time_near_the_best_fixed_k_in_hindsight(
    drafter: str, controller: str, texts: int, median: float, p95: float, plain: float
) -> None:
    rows = [control.one(seed, [(drafter, controller, texts)]) for seed in range(texts)]
    [found] = control.summary(rows)
    print("\n" + control.printed([found]))
    worst = max(rows, key=lambda row: row[drafter][controller])
    lost = max(rows, key=lambda row: row[drafter][controller] / row[drafter]["plain"])
    assert found["best"]["median"] <= median
    assert found["best"]["p95"] <= p95, worst
    assert found["plain"]["max"] <= plain, lost


@pytest.mark.parametrize("c", COSTS)
@pytest.mark.parametrize("drafter", control.DRAFTERS)
def test_a_hostile_drafter_costs_next_to_nothing(drafter: str, c: float) -> None:
    found = [over_plain(text([0.02] * 400, c, seed), drafter) for seed in range(2)]
    print(f"\n{drafter}, c={c}: {max(found):.4f} of plain decoding")
    assert max(found) <= 1.03


@pytest.mark.parametrize("c", COSTS)
@pytest.mark.parametrize("drafter", control.DRAFTERS)
def test_a_bypassed_request_costs_next_to_nothing(drafter: str, c: float) -> None:
    """A bypass threshold of 1 that no text meets: all that is left are probes."""
    found = over_plain(text([0.5] * 400, c, 3), drafter, SamplingParams(bypass_threshold=1.0))
    print(f"\n{drafter}, c={c}: {found:.4f} of plain decoding")
    assert found <= 1.02


def noted(monkeypatch: pytest.MonkeyPatch, note: Callable[[str, int, int, float], None]) -> None:
    """Lets `note` hear of every decision: whose, after how many tokens, its K, and how many seconds it took."""

    def decide(governor: Any, ask: Any, *others: Any) -> int:
        began = time.perf_counter()
        k = deciding.decide(governor, ask, *others)
        note(governor.name, ask.context.committed - ask.prompt_length, k, time.perf_counter() - began)
        return k

    monkeypatch.setattr("cascade.governor.decide", decide)


# A silent drafter's probe costs what its proposals do, and may take 2 % of the time: where it is dear, it waits.
TURNS = [(drafter, c, 64) for drafter in ("tree", "chain") for c in COSTS]
TURNS += [("silent", 0.03, 64), ("silent", 0.1, 64), ("silent", 0.2, 128)]


@pytest.mark.parametrize(("drafter", "c", "limit"), TURNS)
def test_it_proposes_again_soon_after_the_text_turns_friendly(
    monkeypatch: pytest.MonkeyPatch, drafter: str, c: float, limit: int
) -> None:
    for seed in range(2):
        ks: list[tuple[int, int]] = []
        noted(monkeypatch, lambda name, at, k, took, ks=ks: ks.append((at, k)))
        control.played(text([0.02] * 200 + [0.9] * 200, c, seed), drafter, "pid")
        assert [k for at, k in ks if 150 <= at < 200].count(0) >= 40, "it was left out"
        soon = next(at for at, k in ks if at >= 200 and k) - 200
        print(f"\n{drafter}, c={c}: {soon} tokens")
        assert soon <= limit, seed
        assert np.mean([k > 0 for at, k in ks if at >= 200 + limit]) > 0.75


def test_deciding_for_all_levels_of_a_request_costs_microseconds(monkeypatch: pytest.MonkeyPatch) -> None:
    times: dict[str, list[float]] = {"small": [], "middle": []}
    noted(monkeypatch, lambda name, at, k, took: times[name].append(took))
    clock, target = ManualClock(), ToyModel(seed=1, scale=3.0)
    small, middle = (ToyModel(seed=seed, scale=3.0, mix=(target, share)) for seed, share in ((2, 0.6), (3, 0.85)))
    cost = {"small": 0.02, "middle": 0.15, "target": 1.0}
    models = {"small": small, "middle": middle, "target": target}
    engine = Engine(
        CascadeConfig([LevelConfig(model=model, name=name) for name, model in models.items()]),
        clock=clock,
        costs=FixedCosts(lambda level, n: cost[level] * (1 + 0.01 * n)),
    )
    engine.generate([1, 2, 3], SamplingParams(max_new_tokens=500))
    best = {name: min(sum(took[i : i + 10]) / 10 for i in range(len(took) - 10)) for name, took in times.items()}
    print("\n" + ", ".join(f"{name}: {took * 1e6:.0f} us" for name, took in best.items()))
    assert sum(best.values()) < 100e-6


def test_the_results_summary_follows_from_its_rows() -> None:
    path = ROOT / "benchmarks" / "results" / "control.json"
    kept = json.loads(path.read_text())
    assert control.summary(kept["rows"]) == kept["summary"]
