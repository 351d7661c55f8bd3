"""How long a model's forward takes by how many tokens it carries: what speculation stands on.

    python benchmarks/widths.py MODEL [--dtype bfloat16|int8|int4] [--cached 300]

Medians over rounds in which every width has its turn, after a text of `--cached` tokens.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time

os.environ.setdefault("OMP_NUM_THREADS", "2")

import torch

from cascade.model import load
from cascade.rows import Feed

WIDTHS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32)


def measure(model, cached: int, rounds: int) -> dict[int, float]:
    """Median milliseconds by width."""
    row = model.new_row()
    model.forward([Feed(row, [5] * cached, 1)])
    times: dict[int, list[float]] = {width: [] for width in WIDTHS}
    for _ in range(rounds):
        for width in WIDTHS:
            row.crop(cached)
            began = time.perf_counter()
            model.forward([Feed(row, list(range(7, 7 + width)), width)]).max(-1).indices.tolist()
            times[width].append(1e3 * (time.perf_counter() - began))
    return {width: statistics.median(values) for width, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--dtype")
    parser.add_argument("--cached", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    model = load(args.model, dtype=args.dtype, role="draft")
    found = measure(model, args.cached, args.rounds)
    print("| tokens | " + " | ".join(map(str, found)) + " |")
    print("|---|" + "---:|" * len(found))
    print(f"| {model.dtype}, ms | " + " | ".join(f"{ms:.0f}" for ms in found.values()) + " |")


if __name__ == "__main__":
    main()
