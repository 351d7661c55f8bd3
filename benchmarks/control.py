"""How far each controller stays behind the best fixed K in hindsight, on made-up texts, in virtual time.

    python benchmarks/control.py [--workloads 1000] [--controllers pid,goodput,hedge,ema,entropy,fixed] [--json OUT]

A workload is a text in which the draft is right here and there, and what forwards cost. The real engine decodes it with
three kinds of drafters; a loop says what chains of every fixed K, 0 among them, would have taken. `pid:1000` among
`--controllers` gives one of them a number of workloads of its own.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
from numpy.typing import NDArray

from cascade import BypassConfig, CascadeConfig, Draft, Drafter, LevelConfig, SamplingParams
from cascade import plugins as plugin_module
from cascade.cli.environment import environment
from cascade.costs import FixedCosts
from cascade.recording import Recording, Said
from cascade.simulate import Simulated, simulate

KINDS = ("constant", "wrong", "steps", "ramp", "walk", "bursts")
DRAFTERS = ("tree", "chain", "silent")
CONTROLLERS = ("pid", "goodput", "hedge", "ema", "entropy", "fixed")
PROMPT, VOCAB, K_MOST = 32, 64, 16
ALWAYS = BypassConfig(threshold=0.0, gain=False)

Record = dict[str, Any]


# -- workloads -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Workload:
    """A text and what decoding it costs, in plain forwards of the target.

    Attributes:
        kind: how its alpha goes, one of KINDS.
        rights: [N], where the draft's first token is right.
        chances: [N], how sure the draft is there; calibrated.
        c: what a forward of the draft model, or a token of the silent drafter, costs.
        slope: what each further token of a forward costs, as a share of the first.
        seed: of all that was left to chance.
        seconds: the share of the places with a wrong first token where the second one, which trees have, is right.
    """

    kind: str
    rights: NDArray[np.bool_] = field(repr=False)
    chances: NDArray[np.float64] = field(repr=False)
    c: float
    slope: float
    seed: int
    seconds: float = 0.35

    def verify(self, tokens: int) -> float:
        """What a forward of the target costs."""
        return 1.0 + self.slope * (tokens - 1)


def alphas(rng: np.random.Generator, kind: str, n: int) -> NDArray[np.float64]:
    """How often the draft is right, by position. [n]"""
    t = np.arange(n)
    if kind == "constant":
        return np.full(n, rng.uniform(0, 1))
    if kind == "wrong":
        return np.full(n, rng.uniform(0, 0.15))
    if kind == "steps":
        cuts = np.sort(rng.choice(n, rng.integers(1, 5), replace=False))
        return rng.uniform(0, 1, len(cuts) + 1)[np.searchsorted(cuts, t, side="right")]
    if kind == "ramp":
        a, b = rng.uniform(0, 1, 2)
        return a + (b - a) * t / n
    if kind == "walk":
        return 1 / (1 + np.exp(-(np.cumsum(rng.normal(0, 0.25, n)) + rng.normal(0, 1))))
    period, low, high = rng.integers(16, 96), rng.uniform(0, 0.5), rng.uniform(0.5, 1)
    return np.where((t // period) % 2 == 0, low, high)


def workload(seed: int) -> Workload:
    """128 to 512 tokens, c from 0.02 to 0.6, verification from free to as dear as plain decoding."""
    rng, kind = np.random.default_rng(seed), KINDS[seed % len(KINDS)]
    n = int(rng.integers(128, 513))
    alpha = np.clip(alphas(rng, kind, n), 0, 1)
    told = float(np.exp(rng.uniform(np.log(0.5), np.log(50))))  # the less, the more its chances tell
    spread = rng.beta(np.maximum(alpha * told, 1e-3), np.maximum((1 - alpha) * told, 1e-3))
    chances = np.where((alpha > 0) & (alpha < 1), spread, alpha)
    rights = rng.random(n) < chances
    c = float(np.exp(rng.uniform(np.log(0.02), np.log(0.6))))
    extreme = [0.0, 1.0][int(rng.integers(2))] if rng.random() < 0.2 else None
    slope = float(np.exp(rng.uniform(np.log(0.002), np.log(1)))) if extreme is None else extreme
    return Workload(kind, rights, chances, c, slope, seed)


def recorded(work: Workload) -> Recording:
    """The workload's text, and what the level "draft" says of it."""
    rng, n, size = np.random.default_rng(work.seed + 10**6), len(work.rights), VOCAB - 1
    tokens, prompt = rng.integers(0, size, n), rng.integers(0, size, PROMPT)
    wrong = (tokens + 1 + rng.integers(0, size - 1, n)) % size
    first = np.where(work.rights, tokens, wrong)
    second = np.where(rng.random(n) < work.seconds, tokens, (wrong + 3) % size)
    second = np.where(work.rights, (tokens + 5) % size, second)
    second = np.where(second == first, (first + 7) % size, second)
    sure = np.clip(work.chances, 0.02, 0.98)
    chances = np.stack([sure, np.minimum((1 - sure) * work.seconds, sure)], 1)
    said = Said(np.stack([first, second], 1), chances.astype(np.float32))
    return Recording(tuple(prompt.tolist()), tuple(tokens.tolist()), {"draft": said})


def fixed_seconds(work: Workload, k: int, silent: bool = False) -> float:
    """What chains of K take, of a level that is never bypassed: arithmetic, no engine."""
    rights, n = work.rights.tolist(), len(work.rights)
    seconds, done, unread = work.verify(PROMPT), 1, PROMPT + 1
    while done < n:
        drafted = min(k, n - done - 1)
        if drafted:  # a model reads what it has not seen with its first forward
            seconds += work.c * drafted + (0.0 if silent else work.c * work.slope * (unread - 1))
        seconds += work.verify(1 + drafted)
        held = 0
        while held < drafted and rights[done + held]:
            held += 1
        unread = (2 if held == drafted else 1) if drafted else unread + 1
        done += held + 1
    return seconds


# -- through the engine ----------------------------------------------------------------------------------


class Silent(Drafter):
    """Proposes what was recorded, and does not say how sure it is."""

    def __init__(self, ids: list[int]) -> None:
        self.ids = ids

    def propose(self, asks: Sequence[Any]) -> list[Draft]:
        """By position."""
        starts = [len(ask.context) - PROMPT for ask in asks]
        return [Draft(self.ids[i : i + min(ask.want, ask.cap)]) for i, ask in zip(starts, asks, strict=True)]


@lru_cache
def plugins() -> Any:
    """The built-in ones."""
    return plugin_module.create(entry_points=False)


def played(
    work: Workload, drafter: str, controller: str, params: SamplingParams | None = None, **options: Any
) -> Simulated:
    """The workload through the engine; `options` are those of the level."""
    text = recorded(work)
    if drafter == "silent":
        level = LevelConfig(drafter=Silent(text.said["draft"].ids[:, 0].tolist()), name="draft")
    else:
        level = LevelConfig(model="draft", name="draft", tree="dynamic" if drafter == "tree" else "chain")
    costs = FixedCosts(
        lambda name, tokens: work.verify(tokens) * (1.0 if name == "target" else work.c),
        lambda name, tokens: work.c * tokens,
    )
    config = CascadeConfig([replace(level, controller=controller, **options), LevelConfig(model="t", name="target")])
    return simulate(config, [text], costs, params=params, plugins=plugins())


def one(seed: int, pairs: Sequence[tuple[str, str, int]]) -> Record:
    """A workload's row: for each kind of drafter the best K and plain decoding's time over its time, and ratios."""
    work = workload(seed)
    row: Record = {"seed": seed, "kind": work.kind, "c": round(work.c, 4), "slope": round(work.slope, 4)}
    for drafter, controller, count in pairs:
        found = hindsight(seed, drafter == "silent")
        best = min(found)
        row.setdefault(drafter, {"k": found.index(best), "plain": round(found[0] / best, 4)})
        if seed < count:
            row[drafter][controller] = round(played(work, drafter, controller).seconds / best, 4)
    return row


@lru_cache
def hindsight(seed: int, silent: bool) -> list[float]:
    """What every fixed K takes."""
    return [fixed_seconds(workload(seed), k, silent) for k in range(K_MOST + 1)]


def summary(rows: Sequence[Record]) -> list[Record]:
    """Per kind of drafter and controller: time over the best fixed K's, and over plain decoding's."""
    found = []
    for controller in CONTROLLERS:
        for drafter in DRAFTERS:
            mine = [row[drafter] for row in rows if controller in row.get(drafter, ())]
            if mine:
                best = np.array([figures[controller] for figures in mine])
                plain = best / np.array([figures["plain"] for figures in mine])
                found.append(
                    {
                        "controller": controller,
                        "drafter": drafter,
                        "workloads": len(mine),
                        "best": {**spread(best), "mean": round(float(best.mean()), 4)},
                        "plain": {**spread(plain), "over": round(float((plain > 1.05).mean()), 4)},
                    }
                )
    return found


def spread(ratios: NDArray[np.float64]) -> dict[str, float]:
    """How ratios are spread."""
    parts = {"median": 50, "p95": 95, "p99": 99, "max": 100}
    return {name: round(float(np.percentile(ratios, part)), 4) for name, part in parts.items()}


def printed(found: Sequence[Record]) -> str:
    """The summary as a table."""
    lines = ["controller drafter workloads | over the best fixed K: median p95 mean max | over plain: p99 max >1.05"]
    for f in found:
        b, p = f["best"], f["plain"]
        lines.append(
            f"{f['controller']:10} {f['drafter']:7} {f['workloads']:9} | {b['median']:29.3f} {b['p95']:.3f} "
            f"{b['mean']:.3f} {b['max']:.3f} | {p['p99']:16.3f} {p['max']:.3f} {p['over']:.1%}"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", type=int, default=1000)
    parser.add_argument("--controllers", default=",".join(CONTROLLERS))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    asked = [word.partition(":") for word in args.controllers.split(",")]
    counts = {name: int(count or args.workloads) for name, _, count in asked}
    if unknown := counts.keys() - set(CONTROLLERS):
        parser.error(f"no such controller: {', '.join(sorted(unknown))}")
    pairs = [(d, c, counts[c]) for c in counts for d in DRAFTERS if (d, c) != ("tree", "entropy")]  # which it refuses
    rows = []
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        for row in pool.imap(partial(one, pairs=pairs), range(max(counts.values())), chunksize=4):
            rows.append(row)
            if len(rows) % 50 == 0:
                print(f"{len(rows)} workloads", file=sys.stderr)
    found = summary(rows)
    print(printed(found))
    if args.json:
        lines = ",\n".join(json.dumps(row) for row in rows)
        head = json.dumps({"environment": environment(), "summary": found}, indent=1)
        args.json.write_text(head[:-2] + ',\n "rows": [\n' + lines + "\n]}\n")


if __name__ == "__main__":
    main()
