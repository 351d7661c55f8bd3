"""What a simulation says that configurations take, beside what they take: `cascade.simulate` against the real engine.

    python benchmarks/predict.py --questions question.jsonl [--limit-per-category N] [--max-new-tokens N]
        [--temperature T] [--only NAME]... [--json OUT]

The pair of `pair.py` (DRAFT and TARGET may name folders), loaded once. Answers are recorded first; then all
configurations take turns on every question, on the same models, and all that they measure goes into one cost model, at
the mean pace of the run. With that and the recordings, each configuration is simulated, over the same questions in the
same order. What is fixed is never bypassed.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "2")

from cascade import BypassConfig, CascadeConfig, Engine, LevelConfig, SamplingParams, load_config
from cascade.bench.questions import prompt_for, read_questions
from cascade.cli.environment import environment
from cascade.costs import CostModel
from cascade.recording import Recording, overhead_of, record
from cascade.result import Result
from cascade.simulate import simulate

NGRAM, DRAFT = "ngram", "draft"
FIXED = {"controller": "fixed", "bypass": BypassConfig(threshold=0.0, gain=False)}
#: name: what stands below the target, bottom to top, each with its settings; requests at once
CONFIGURATIONS: dict[str, tuple[list[tuple[str, dict[str, Any]]], int]] = {
    "plain": ([], 1),
    "ngram, fixed 4": ([(NGRAM, {**FIXED, "k": 4})], 1),
    "ngram, pid": ([(NGRAM, {})], 1),
    "draft, fixed 2": ([(DRAFT, {**FIXED, "k": 2, "tree": "chain"})], 1),
    "draft, fixed 4": ([(DRAFT, {**FIXED, "k": 4, "tree": "chain"})], 1),
    "draft, fixed 8": ([(DRAFT, {**FIXED, "k": 8, "tree": "chain"})], 1),
    "draft, tree 2x2x1": ([(DRAFT, {**FIXED, "k": 3, "tree": (2, 2, 1)})], 1),
    "draft, pid, chain": ([(DRAFT, {"tree": "chain"})], 1),
    "draft, pid, dynamic": ([(DRAFT, {"tree": "dynamic"})], 1),
    "both, pid, chain": ([(NGRAM, {}), (DRAFT, {"tree": "chain"})], 1),
    "both, pid, dynamic": ([(NGRAM, {}), (DRAFT, {"tree": "dynamic"})], 1),
    "both, pid, batch 2": ([(NGRAM, {}), (DRAFT, {})], 2),
}


class Truth:
    """What forwards took on the average: a cost model's table, at the pace that makes the sum of all times right.

    A machine's pace of the last few forwards, by which cost models go, says little of the hours before.

    Args:
        table: learns of all forwards.
    """

    def __init__(self, table: CostModel) -> None:
        self._table = table
        self._seen: dict[str, Counter[tuple[int, int]]] = {}
        self._seconds: Counter[str] = Counter()
        self._pace: dict[str, float] = {}

    def observe(self, level: str, tokens: int, rows: int, seconds: float) -> None:
        self._table.observe(level, tokens, rows, seconds)
        self._seen.setdefault(level, Counter())[tokens, rows] += 1
        self._seconds[level] += seconds

    def settle(self) -> None:
        """All has been observed."""
        for level, seen in self._seen.items():
            told = sum(count * (self._table.seconds(level, *size) or 0.0) for size, count in seen.items())
            self._pace[level] = self._seconds[level] / told if told else 1.0

    def seconds(self, level: str, tokens: int, rows: int = 1) -> float | None:
        usual = self._table.seconds(level, tokens, rows)
        return None if usual is None else usual * self._pace.get(level, 1.0)

    def observe_draft(self, level: str, tokens: int, seconds: float, rows: int = 1) -> None:
        self.observe(f"draft of {level}", tokens, rows, seconds)

    def draft_seconds(self, level: str, tokens: int = 1, rows: int = 1) -> float | None:
        return self.seconds(f"draft of {level}", tokens, rows)

    def relax(self, level: str) -> None:
        pass


class World:
    """The pair, an engine per configuration on its models, and what all of them measure.

    Attributes:
        base: the engine that records.
        truth: the costs that all engines measure together.
    """

    def __init__(self, only: list[str]) -> None:
        self.base = Engine(load_config(str(Path(__file__).parent / "pair.py")), progress=_say)
        self.begin = copy.deepcopy(self.base.costs)
        assert isinstance(self.begin, CostModel)
        self.truth = Truth(copy.deepcopy(self.begin))
        self._models = {level.name: level.model for level in self.base.chain.levels}
        self.configs = {name: self._config(*CONFIGURATIONS[name]) for name in CONFIGURATIONS if _wanted(name, only)}
        self.engines = {name: self._engine(config) for name, config in self.configs.items()}

    def _config(self, below: list[tuple[str, dict[str, Any]]], batch: int) -> CascadeConfig:
        levels = []
        for name, settings in below:
            what = {"drafter": NGRAM} if name == NGRAM else {"model": self._models[name]}
            levels.append(LevelConfig(**what, name=name, **settings))
        target = LevelConfig(model=self._models[self.base.target.name], name=self.base.target.name)
        return CascadeConfig([*levels, target], max_batch=batch)

    def _engine(self, config: CascadeConfig) -> Engine:
        """An engine that starts with what the first one measured at load, and tells `truth` what it measures."""
        costs = copy.deepcopy(self.begin)
        own = costs.observe

        def observe(*args: Any) -> None:
            own(*args)
            self.truth.observe(*args)

        costs.observe = observe  # type: ignore[method-assign]
        return Engine(config, costs=costs)


def measure(world: World, recordings: list[Recording], params: SamplingParams) -> dict[str, list[Result]]:
    """Results of all configurations, one per question: they take turns, but for batches, which come last."""
    single = [name for name, config in world.configs.items() if config.max_batch == 1]
    results: dict[str, list[Result]] = {name: [] for name in world.configs}
    for number, recording in enumerate(recordings):
        shift = number % max(len(single), 1)
        for name in single[shift:] + single[:shift]:
            results[name].append(world.engines[name].generate(list(recording.prompt), _seeded(params, number)))
        _say(f"{number + 1} of {len(recordings)}")
    for name in world.configs.keys() - single:
        many = [_seeded(params, number) for number in range(len(recordings))]
        results[name] = world.engines[name].generate([list(recording.prompt) for recording in recordings], many)
    for found in results.values():
        assert [tuple(result.tokens) for result in found] == [recording.tokens for recording in recordings]
    return results


def seconds_of(results: list[Result], batch: int) -> float:
    """Wall time of requests one after the other; in a batch, of all rounds, each shared by those in it."""
    return sum(result.stats.wall_s for result in results) / batch


def predict(world: World, recordings: list[Recording], measured: dict[str, list[Result]]) -> list[dict[str, Any]]:
    """A line per configuration: what was measured and what is predicted."""
    overhead = overhead_of(result for results in measured.values() for result in results)
    world.truth.settle()
    lines = []
    for name, config in world.configs.items():
        began, batch = time.perf_counter(), config.max_batch
        own, costs = copy.deepcopy(world.begin), world.truth
        found = simulate(config, recordings, costs, batch=batch, overhead=overhead, engine_costs=own)
        took, pairs = time.perf_counter() - began, list(zip(measured[name], found.results, strict=True))
        lines.append(
            {
                "configuration": name,
                "measured_s": seconds_of(measured[name], batch),
                "predicted_s": seconds_of(list(found.results), batch),
                "measured_forwards": sum(real.stats.target_forwards for real, _ in pairs),
                "predicted_forwards": sum(told.stats.target_forwards for _, told in pairs),
                "questions": [[real.stats.wall_s, told.stats.wall_s] for real, told in pairs],
                "simulation_s": took,
            }
        )
    return lines


def show(lines: list[dict[str, Any]]) -> None:
    plain = next((line for line in lines if line["configuration"] == "plain"), None)
    print(f"{'configuration':22} measured  predicted  ratio   speedup: measured  predicted   forwards")
    for line in lines:
        measured, predicted = line["measured_s"], line["predicted_s"]
        speed = [plain[key] / line[key] if plain else float("nan") for key in ("measured_s", "predicted_s")]
        print(
            f"{line['configuration']:22} {measured:7.1f}s {predicted:9.1f}s  {predicted / measured:5.3f} "
            f"{speed[0]:17.2f}x {speed[1]:9.2f}x   {line['measured_forwards']} {line['predicted_forwards']}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--questions", required=True, type=Path)
    parser.add_argument("--limit-per-category", type=int, default=1)
    parser.add_argument("--limit", type=int, help="at most so many questions in all")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--only", action="append", default=[], help="a configuration; may be repeated")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    world = World(args.only)
    questions = read_questions(args.questions, args.limit_per_category)[: args.limit]
    params = SamplingParams(max_new_tokens=args.max_new_tokens, temperature=args.temperature)
    prompts, categories = [prompt_for(world.base, one) for one in questions], [one.category for one in questions]
    recordings = record(world.base, prompts, params, categories, progress=_say)
    lines = predict(world, recordings, measure(world, recordings, params))
    show(lines)
    if args.json:
        asked = {"max_new_tokens": args.max_new_tokens, "temperature": args.temperature, "categories": categories}
        args.json.write_text(json.dumps({"environment": environment(), **asked, "lines": lines}, indent=1) + "\n")


def _seeded(params: SamplingParams, number: int) -> SamplingParams:
    """Parameters with the seed that `record` gives a prompt."""
    return SamplingParams(max_new_tokens=params.max_new_tokens, temperature=params.temperature, seed=number)


def _wanted(name: str, only: list[str]) -> bool:
    return not only or name in only


def _say(line: str) -> None:
    print(line, file=sys.stderr)


if __name__ == "__main__":
    main()
