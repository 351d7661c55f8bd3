"""What each verification rule and each shape of draft brings: tokens per target forward, and speed against plain.

    python benchmarks/rules.py --questions question.jsonl [--limit-per-category N] [--max-new-tokens N]
        [--temperature T]... [--only NAME]... [--json OUT]

The pair of `pair.py` (DRAFT and TARGET may name folders), loaded once: all variants share the models and take turns on
every question, plain decoding among them.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "2")

from page import rule_summary

from cascade import CascadeConfig, Engine, LevelConfig, SamplingParams, load_config
from cascade.bench.questions import prompt_for, read_questions
from cascade.cli.environment import environment

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


def run(engine: Engine, prompt: Any, params: SamplingParams) -> tuple[list[int], dict[str, Any]]:
    """One answer, and its figures."""
    result = engine.generate(prompt, params)
    assert result.error is None, result.error
    stats = result.stats
    names = ("name", "drafted", "tested", "accepted", "k_mean", "bypassed_rounds", "dropped")
    levels = [{name: getattr(level, name) for name in names} for level in stats.levels]
    figures = {"tokens": stats.new_tokens, "forwards": stats.target_forwards, "seconds": stats.wall_s}
    return result.tokens, {**figures, "first": stats.first_token_s, "levels": levels}


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
    record = {"environment": environment(), "runs": runs}
    questions = read_questions(args.questions, args.limit_per_category)
    for number, question in enumerate(questions):
        for temperature in args.temperature or [0.0, 1.0]:
            params = SamplingParams(max_new_tokens=args.max_new_tokens, temperature=temperature, seed=number)
            order = list(made)[number % len(made) :] + list(made)[: number % len(made)]
            texts = {}
            for name in order:
                one = dataclasses.replace(params, speculate=name != "plain")
                texts[name], figures = run(made[name], prompt_for(made[name], question), one)
                asked = {"variant": name, "temperature": temperature, "category": question.category}
                runs.append({**asked, "question": number, **figures})
            for figures in runs[-len(order) :]:
                figures["same_text"] = texts[figures["variant"]] == texts["plain"]
        print(f"{number + 1} of {len(questions)}", file=sys.stderr)
        if args.json:
            args.json.write_text(json.dumps(record, indent=None).replace('}, {"variant"', '},\n{"variant"'))
    for temperature in args.temperature or [0.0, 1.0]:
        for name in made:
            f = rule_summary(runs, name, temperature)
            print(
                f"T={temperature:g} {name:30} tau {f['tau']:.2f}  speedup {f['speedup']:.2f}x  "
                f"decode {f['decode']:.2f}x  same text {f['same_text']:.0%}"
            )


if __name__ == "__main__":
    main()
