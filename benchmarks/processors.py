"""What penalties and filters cost: decoding time with them over decoding time without, side by side in one run.

    python benchmarks/processors.py [--model FOLDER] [--repeats N] [--tokens N] [--json OUT]

Without --model it takes the demo's model (SmolLM2-135M-Instruct, see README). Plain decoding and the cascade
(n-gram, an int8 copy, the target in bf16), each with and without a repetition penalty of 1.1 and top-p 0.9 at
temperature 0.8. Filters change the text, and with it what is accepted: times are per forward of the target.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics

os.environ.setdefault("OMP_NUM_THREADS", "2")

from cascade import CascadeConfig, Engine, LevelConfig, SamplingParams
from cascade.cli.tasks import TASKS
from cascade.demo_model import demo_model

WITHOUT = SamplingParams(temperature=0.8, seed=1)
WITH = dataclasses.replace(WITHOUT, repetition_penalty=1.1, top_p=0.9)


def decode_seconds(engine: Engine, prompt: str, params: SamplingParams) -> tuple[float, float]:
    """Seconds of one round after the first, and of the engine's own work in it."""
    stats = engine.generate([{"role": "user", "content": prompt}], params).stats
    rounds = stats.target_forwards - 1
    assert stats.first_token_s is not None
    return (stats.wall_s - stats.first_token_s) / rounds, stats.own_work_s / (rounds + 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a folder (default: the demo's model)")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--json", help="write the figures to this file")
    args = parser.parse_args()
    levels = [
        LevelConfig(drafter="ngram"),
        LevelConfig(model="self", dtype="int8"),
        LevelConfig(model=args.model or str(demo_model()), dtype="bfloat16", name="target"),
    ]
    prompt = TASKS[0].prompt
    figures = {}
    with Engine(CascadeConfig(levels)) as engine:
        for name, speculate in (("plain", False), ("cascade", True)):
            same = {"max_new_tokens": args.tokens, "ignore_eos": True, "speculate": speculate}
            cases = [dataclasses.replace(params, **same) for params in (WITHOUT, WITH)]
            runs = []
            for repeat in range(args.repeats + 1):
                order = cases if repeat % 2 else cases[::-1]
                done = {id(case): decode_seconds(engine, prompt, case) for case in order}
                runs.append([done[id(case)] for case in cases])
            pairs = runs[1:]  # the first one warms up
            figures[name] = {
                "ratio": statistics.median(b[0] / a[0] for a, b in pairs),
                "own_ms_without": statistics.median(a[1] for a, _ in pairs) * 1e3,
                "own_ms_with": statistics.median(b[1] for _, b in pairs) * 1e3,
            }
            shown = figures[name]
            print(
                f"{name}: {shown['ratio']:.3f}x the time per round with penalty and top-p; own work per round "
                f"{shown['own_ms_without']:.2f} ms without, {shown['own_ms_with']:.2f} ms with"
            )
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(figures, file, indent=2)


if __name__ == "__main__":
    main()
