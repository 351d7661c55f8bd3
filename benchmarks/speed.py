"""Speed of the engine on a real model, as ratios measured side by side in one run.

    python benchmarks/speed.py [--model FOLDER] [--repeats N] [--tokens N] [--json OUT]

Without --model it takes the demo's model (SmolLM2-135M-Instruct, see README). Greedy, bf16, 2 threads.
Everything that is compared runs in this process on the same weights, interleaved repeat by repeat;
medians are shown. Claims checked:

- plain decoding of this engine against `model.generate`, at batch 1, 4 and 8;
- the three-level cascade against plain decoding, on each of the demo's tasks and at batch 4 and 8;
- time to first token against plain; the engine's own work per round, greedy and with top-p.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable

os.environ.setdefault("OMP_NUM_THREADS", "2")

import torch

from cascade import CascadeConfig, Engine, LevelConfig, Result, SamplingParams
from cascade.cli.tasks import TASKS
from cascade.demo_model import demo_model

FILLER = (
    "The harbour lay still that morning. Boats leaned on their ropes, gulls walked the quay, and the first "
    "lorries came down from the market with crates of apples, lamps, rope, and letters for the islands. "
)


def build(folder: str, max_batch: int) -> Engine:
    levels = [
        LevelConfig(drafter="ngram"),
        LevelConfig(model="self", dtype="int8"),
        LevelConfig(model=folder, dtype="bfloat16", name="target"),
    ]
    return Engine(CascadeConfig(levels, max_batch=max_batch))


def median_ratio(a: list[float], b: list[float]) -> float:
    """Median of the ratios a/b, pair by pair: a machine that slows down slows both."""
    return statistics.median(x / y for x, y in zip(a, b, strict=True))


def interleave(repeats: int, *runs: Callable[[], float]) -> list[list[float]]:
    """Calls every run once to warm up, then `repeats` times in turn, order alternating."""
    for run in runs:
        run()
    times: list[list[float]] = [[] for _ in runs]
    for repeat in range(repeats):
        order = range(len(runs)) if repeat % 2 == 0 else reversed(range(len(runs)))
        for i in order:
            times[i].append(runs[i]())
    return times


def against_generate(engine: Engine, batch: int, tokens: int, repeats: int) -> dict[str, float]:
    """Plain decoding here against the library's `generate`, prompts of equal length, no end tokens."""
    model = engine.model.module
    ids = engine.model.encode(FILLER * 6)[:200]
    prompts = [[*ids[i:], *ids[:i]] for i in range(batch)]
    params = SamplingParams(max_new_tokens=tokens, ignore_eos=True, speculate=False)
    stacked = torch.tensor(prompts)

    def ours() -> float:
        began = time.perf_counter()
        engine.generate(prompts, params)
        return time.perf_counter() - began

    def theirs() -> float:
        began = time.perf_counter()
        model.generate(
            stacked,
            attention_mask=torch.ones_like(stacked),
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            do_sample=False,
        )
        return time.perf_counter() - began

    a, b = interleave(repeats, ours, theirs)
    return {"plain_s": statistics.median(a), "generate_s": statistics.median(b), "speed": median_ratio(b, a)}


def against_plain(engine: Engine, prompts: list, params: SamplingParams, repeats: int) -> dict[str, float]:
    """The cascade against plain decoding of the same prompts in one batch."""
    off = dataclasses.replace(params, speculate=False)
    kept: dict[bool, list[list[Result]]] = {True: [], False: []}

    def run(speculate: bool) -> float:
        began = time.perf_counter()
        results = engine.generate(prompts, params if speculate else off)
        seconds = time.perf_counter() - began
        kept[speculate].append(results)
        return seconds

    fast, plain = interleave(repeats, lambda: run(True), lambda: run(False))
    ours, theirs = kept[True][-1], kept[False][-1]
    rounds = [r.stats.own_work_s / r.stats.target_forwards for results in kept[True][1:] for r in results]
    first = [
        [statistics.fmean(r.stats.first_token_s or 0 for r in results) for results in kept[on][1:]]
        for on in (True, False)
    ]
    return {
        "tokens": sum(r.stats.new_tokens for r in ours),
        "tau": sum(r.stats.new_tokens for r in ours) / sum(r.stats.target_forwards for r in ours),
        "cascade_s": statistics.median(fast),
        "plain_s": statistics.median(plain),
        "speed": median_ratio(plain, fast),
        "first_token": median_ratio(first[0], first[1]),
        "own_work_ms": 1e3 * statistics.median(rounds),
        "identical": [r.tokens for r in ours] == [r.tokens for r in theirs],
    }


def show(name: str, figures: dict[str, float]) -> None:
    parts = [f"{k} {v:.3f}" if isinstance(v, float) else f"{k} {v}" for k, v in figures.items()]
    print(f"{name:24s} " + "  ".join(parts), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--only", choices=("generate", "tasks", "batch"), help="one part of it")
    parser.add_argument("--json")
    args = parser.parse_args()
    torch.set_num_threads(2)
    engine = build(args.model or str(demo_model()), max_batch=8)
    print(f"{platform.processor() or platform.machine()}, torch {torch.__version__}, {torch.get_num_threads()} threads")
    print(engine.summary())
    out: dict[str, dict[str, float]] = {}

    def note(name: str, figures: dict[str, float]) -> None:
        out[name] = figures
        show(name, figures)

    parts = (args.only,) if args.only else ("generate", "tasks", "batch")
    for batch in (1, 4, 8) if "generate" in parts else ():
        note(f"generate, batch {batch}", against_generate(engine, batch, args.tokens // (1 + batch // 4), args.repeats))
    greedy = SamplingParams(max_new_tokens=args.tokens)
    sampled = dataclasses.replace(greedy, temperature=0.8, top_p=0.9, seed=1)
    chats = [[{"role": "user", "content": task.prompt}] for task in TASKS]
    for task, chat in zip(TASKS, chats, strict=True) if "tasks" in parts else ():
        note(f"{task.name}, greedy", against_plain(engine, [chat], greedy, args.repeats))
        note(f"{task.name}, sampled", against_plain(engine, [chat], sampled, args.repeats))
    for batch in (4, 8) if "batch" in parts else ():
        many = [chats[i % len(chats)] for i in range(batch)]
        note(f"tasks, batch {batch}", against_plain(engine, many, greedy, args.repeats))
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(out, file, indent=1)
    return 0 if all(figures.get("identical", True) for figures in out.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
