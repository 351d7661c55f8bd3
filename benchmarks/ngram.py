"""Times one `NgramDrafter.propose` call as a text of 1k, 8k and 32k tokens grows by four tokens a round.

    python benchmarks/ngram.py [--calls 400]

The time includes Python, the indexing of the new tokens and the copy of the proposal.
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np

from cascade.config import SamplingParams
from cascade.draft import Ask, Context
from cascade.noise import Noise
from drafters.ngram import NgramDrafter


def text(length: int) -> np.ndarray:
    """Tokens as unevenly frequent as words, with passages of 8 to 40 tokens that come back."""
    rng = np.random.default_rng(0)
    tokens = (rng.zipf(1.3, length) % 50_000).astype(np.int64)
    for _ in range(length // 100):
        size, source, to = rng.integers(8, 40), rng.integers(length // 2), rng.integers(length // 2, length - 40)
        tokens[to : to + size] = tokens[source : source + size]
    return tokens


def measure(length: int, calls: int, per_call: int = 4) -> tuple[float, float, float]:
    """Microseconds of a call: the first (which indexes the whole text), the median, the slowest."""
    tokens, drafter, times = text(length + calls * per_call), NgramDrafter(), []
    params, noise = SamplingParams(), Noise(0)
    for end in range(length, length + calls * per_call, per_call):
        asks = [Ask(Context.over(0, tokens, end, end), 8, 8, params, noise)]
        began = time.perf_counter()
        drafter.propose(asks)
        times.append(1e6 * (time.perf_counter() - began))
    return times[0], statistics.median(times[1:]), max(times[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=400, help="rounds to time at each length (default 400)")
    calls = parser.parse_args().calls
    NgramDrafter().warm_up()
    measure(100, 20)  # Python's own warm-up
    print("context   first call   median call   slowest call   (microseconds)")
    for length in (1_000, 8_000, 32_000):
        first, median, slowest = measure(length, calls)
        print(f"{length:7,}   {first:10.0f}   {median:11.1f}   {slowest:12.0f}")


if __name__ == "__main__":
    main()
