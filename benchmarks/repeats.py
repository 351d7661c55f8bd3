"""How often drafted tokens hold, by how much the prompt repeats itself: what `cascade.control.repeats` begins with.

    python benchmarks/repeats.py --questions question.jsonl --tokenizer FOLDER [NAME ...]

Reads the answers of results that were kept (five, other, sweep, systems, batch4, unless named), looks each token up in
the n-gram table as it stood then, and takes the draft model's alpha from the run's figures.
"""

from __future__ import annotations

import argparse
import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
from page import results, table

from cascade import SamplingParams
from cascade.bench.questions import read_questions
from cascade.control.repeats import repetitiveness
from cascade.draft import Ask, Context
from cascade.noise import Noise
from drafters.ngram import NgramDrafter

KEPT = ("five", "other", "sweep", "systems", "batch4")
EDGES = (0.0, 0.05, 0.1, 1.0)


def looked_up(prompt: list[int], answer: list[int]) -> tuple[int, int]:
    """(proposed, right) of the n-gram table, one token at a time on the true text."""
    text, drafter, params = np.array([*prompt, *answer]), NgramDrafter(), SamplingParams()
    drafter.start(0, params)
    proposed = right = 0
    for end in range(len(prompt), len(text)):
        [draft] = drafter.propose([Ask(Context(0, text[:end]), 1, 1, params, Noise(0))])
        proposed += bool(len(draft))
        right += bool(len(draft)) and draft.tokens[0] == text[end]
    return proposed, right


def measured(names: list[str], questions: Path, tokenizer: Any) -> list[tuple[float, ...]]:
    """A row per question: repetitiveness, table's (proposed, right), draft model's (tested, accepted)."""
    known, rows = {question.key: question for question in read_questions(questions)}, {}
    for name in names:
        for run in results(name)["runs"]:
            key = (run["category"], run["question_id"])
            if run["system"] != "cascade" or key in rows or key not in known:
                continue
            message = [{"role": "user", "content": known[key].prompt}]
            prompt = tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=True)["input_ids"]
            draft = next(level for level in run["stats"]["levels"] if level["name"] == "draft")
            table_counts = looked_up(list(prompt), run["tokens"])
            rows[key] = (repetitiveness(np.array(prompt)), *table_counts, draft["tested"], draft["accepted"])
    return list(rows.values())


def main() -> None:
    from transformers import AutoTokenizer

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--questions", required=True, type=Path)
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("names", nargs="*", default=[])
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(Path(args.tokenizer).expanduser())
    found, lines = measured(args.names or list(KEPT), args.questions, tokenizer), []
    for low, high in itertools.pairwise(EDGES):
        kind = [row for row in found if low <= row[0] < high]
        _, proposed, right, tested, accepted = (sum(part) for part in zip(*kind, strict=True)) if kind else (0,) * 5
        alphas = [a / b if b else math.nan for a, b in ((right, proposed), (accepted, tested))]
        lines.append([f"{low:g} to {high:g}", str(len(kind)), f"{alphas[0]:.2f}", f"{alphas[1]:.2f}"])
    print(table(["prompt's repetitiveness", "questions", "alpha of the table", "of the draft model"], lines))


if __name__ == "__main__":
    main()
