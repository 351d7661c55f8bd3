"""What each verification rule and each shape of draft brings: tokens per target forward, and speed against plain.

    python benchmarks/rules.py --questions question.jsonl [--limit-per-category N] [--max-new-tokens N]
        [--temperature T]... [--only NAME]... [--json OUT]

The pair of `pair.py` (DRAFT and TARGET may name folders), loaded once: all variants share the models and take turns on
every question, plain decoding among them.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "2")

from cascade import CascadeConfig, Engine, LevelConfig, SamplingParams, load_config
from cascade.bench.questions import prompt_for, read_questions

#: name: the rule, the shape of what the draft model proposes, whether n-grams are merged with it
VARIANTS: dict[str, tuple[str, Any, bool]] = {
    "chain, coupled": ("coupled", "chain", False),
    "chain, rejection": ("rejection", "chain", False),
    "chain, block": ("block", "chain", False),
    "tree 2x1, coupled": ("coupled", (2, 1), False),
    "tree 2x2x1, coupled": ("coupled", (2, 2, 1), False),
    "tree dynamic, coupled": ("coupled", "dynamic", False),
    "tree 2x2x1, rejection": ("rejection", (2, 2, 1), False),
    "tree 2x2x1, traversal": ("traversal", (2, 2, 1), False),
    "tree dynamic, traversal": ("traversal", "dynamic", False),
    "merged with n-grams, chain": ("coupled", "chain", True),
    "merged with n-grams, dynamic": ("coupled", "dynamic", True),
}


def engines(only: list[str]) -> dict[str, Engine]:
    """An engine per variant, all on the same two models."""
    pair = load_config(str(Path(__file__).parent / "pair.py"))
    base = Engine(pair)
    draft, target = (level.model for level in reversed(base.chain.levels))
    made = {"plain": base}
    for name, (rule, tree, merged) in VARIANTS.items():
        if only and name not in only:
            continue
        model = LevelConfig(model=draft, name="draft", tree=tree)
        lower = (
            [LevelConfig(drafter=["ngram", model], name="merged")] if merged else [LevelConfig(drafter="ngram"), model]
        )
        made[name] = Engine(CascadeConfig([*lower, LevelConfig(model=target, name="target")], rule=rule))
    return made


def run(engine: Engine, prompt: Any, params: SamplingParams) -> dict[str, Any]:
    """One answer's figures."""
    result = engine.generate(prompt, params)
    assert result.error is None, result.error
    stats = result.stats
    names = ("name", "drafted", "tested", "accepted", "k_mean", "bypassed_rounds", "dropped")
    levels = [{name: getattr(level, name) for name in names} for level in stats.levels]
    figures = {"tokens": stats.new_tokens, "forwards": stats.target_forwards, "seconds": stats.wall_s}
    return {**figures, "first": stats.first_token_s, "levels": levels, "text": result.tokens}


def summary(runs: list[dict[str, Any]], name: str, temperature: float) -> dict[str, float]:
    """Of one variant at one temperature: tau, and speed over plain decoding's, all and without the first token."""
    mine = {r["question"]: r for r in runs if (r["variant"], r["temperature"]) == (name, temperature)}
    plain = {r["question"]: r for r in runs if (r["variant"], r["temperature"]) == ("plain", temperature)}

    def speed(r: dict[str, Any]) -> float:
        return float(r["tokens"] / r["seconds"])

    def decoding(r: dict[str, Any]) -> float:
        return float((r["tokens"] - 1) / (r["seconds"] - r["first"])) if r["tokens"] > 1 else 0.0

    long = [q for q in mine if mine[q]["tokens"] > 1 and plain[q]["tokens"] > 1]
    return {
        "tau": sum(r["tokens"] for r in mine.values()) / sum(r["forwards"] for r in mine.values()),
        "speedup": statistics.mean(map(speed, mine.values())) / statistics.mean(map(speed, plain.values())),
        "decode": statistics.mean(decoding(mine[q]) for q in long) / statistics.mean(decoding(plain[q]) for q in long),
        "same_text": statistics.mean(mine[q]["text"] == plain[q]["text"] for q in mine),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--questions", required=True, type=Path)
    parser.add_argument("--limit-per-category", type=int, default=1)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, action="append")
    parser.add_argument("--only", action="append", default=[])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    made, runs = engines(args.only), []
    questions = read_questions(args.questions, args.limit_per_category)
    for number, question in enumerate(questions):
        for temperature in args.temperature or [0.0, 1.0]:
            params = SamplingParams(max_new_tokens=args.max_new_tokens, temperature=temperature, seed=number)
            order = list(made)[number % len(made) :] + list(made)[: number % len(made)]
            for name in order:
                plain = name == "plain"
                one = SamplingParams(**{**vars(params), "speculate": not plain})
                figures = run(made[name], prompt_for(made[name], question), one)
                same = {"variant": name, "temperature": temperature, "category": question.category}
                runs.append({**same, "question": number, **figures})
        print(f"{number + 1} of {len(questions)}", file=sys.stderr)
        if args.json:
            args.json.write_text(json.dumps({"runs": runs}))
    for temperature in args.temperature or [0.0, 1.0]:
        for name in made:
            f = summary(runs, name, temperature)
            print(
                f"T={temperature:g} {name:30} tau {f['tau']:.2f}  speedup {f['speedup']:.2f}x  "
                f"decode {f['decode']:.2f}x  same text {f['same_text']:.0%}"
            )


if __name__ == "__main__":
    main()
