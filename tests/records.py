"""A benchmark's record made up from a few numbers, but consistent: what its runs say, its summary sums up."""

from __future__ import annotations

import itertools
import random
from typing import Any

from cascade.bench.figures import summarise

LEVELS = ("ngram", "draft", "target")
WORDS = [
    "def",
    " sort",
    "(",
    "items",
    "):",
    "\n",
    "    ",
    "return",
    " sorted",
    "<b>",
    "&amp;",
    " naïve",
    " 漢字",
    " 🙂",
    "\n\n",
]
ENVIRONMENT = {
    "cascade": "0.1.0", "python": "3.11.7", "platform": "Linux-6.1-x86_64", "processor": "AMD EPYC 9B14",
    "cores": 2, "threads": 2, "cuda": None, "torch": "2.13.0", "transformers": "5.24.0", "numba": "0.68.1",
}  # fmt: skip


def round_(draw: random.Random, number: int, position: int, room: int, hope: float) -> dict[str, Any]:
    """One round of the target: the n-gram level is bypassed now and then, the draft model never in the first."""
    origins, levels = [], []
    for index, name in enumerate(LEVELS[:-1]):
        idle = (number == 0 and name == "draft") or (number // 6) % 3 == 2 - index
        k = draw.randint(1, 6) if not idle else draw.choice([None, 4])
        verdicts = []
        if not idle and room > 1:
            drafted = min(k, room - 1)
            accepted = next((i for i in range(drafted) if draw.random() > hope), drafted)
            verdicts.append([drafted, min(accepted + 1, drafted), accepted])
        sums = [sum(column) for column in zip(*verdicts, strict=True)] or [0, 0, 0]
        changed = number in (6 * (2 - index), 6 * (3 - index))
        reason = (
            f"alpha {hope:.2f}, gain {0.8 if idle else 1.3} of what it costs, after {number} rounds"
            if changed
            else None
        )
        levels.append(
            {"name": name, "k": k, "drafted": sums[0], "tested": sums[1], "accepted": sums[2],
             "forwards": int(name == "draft" and not idle), "bypassed": idle and k is not None, "reason": reason,
             "verdicts": verdicts}
        )  # fmt: skip
        if verdicts:
            origins = [index] * sums[2]
    levels.append(
        {"name": "target", "k": None, "drafted": 0, "tested": 0, "accepted": 0, "forwards": 1, "bypassed": False,
         "reason": None, "verdicts": []}
    )  # fmt: skip
    origins = [*origins, len(LEVELS) - 1][:room]
    return {
        "round": number, "position": position, "tokens": [draw.randrange(len(WORDS)) for _ in origins],
        "origins": origins, "batch": 1, "seconds": 0.04 + 0.002 * len(origins), "levels": levels,
    }  # fmt: skip


def rounds(draw: random.Random, tokens: int, hope: float, prompt: int = 20) -> list[dict[str, Any]]:
    """Rounds until there are so many tokens."""
    made: list[dict[str, Any]] = []
    while (have := sum(len(one["tokens"]) for one in made)) < tokens:
        made.append(round_(draw, len(made), prompt + have, tokens - have, hope))
    return made


def stats(own: list[dict[str, Any]], wall: float) -> dict[str, Any]:
    """The request's figures that follow from its rounds."""
    levels = []
    for index, name in enumerate(LEVELS):
        parts = [one["levels"][index] for one in own]
        total = {key: sum(part[key] for part in parts) for key in ("drafted", "tested", "accepted", "forwards")}
        ks = [part["k"] for part in parts if part["verdicts"]]
        time = {"ngram": 0.004, "draft": 0.17, "target": 0.74}[name] * wall
        levels.append(
            {"name": name, **total, "accept_rate": None, "alpha": None,
             "tokens_fed": 3 * total["forwards"], "time_s": time,
             "k_mean": sum(ks) / len(ks) if ks else None, "bypassed_rounds": sum(part["bypassed"] for part in parts),
             "asks": len(parts), "proposals": len(ks),
             "dropped": 0, "decisions": []}
        )  # fmt: skip
    tokens = sum(len(one["tokens"]) for one in own)
    return {
        "new_tokens": tokens, "target_forwards": len(own), "tokens_per_forward": tokens / len(own), "wall_s": wall,
        "first_token_s": 0.1, "own_work_s": 0.03 * wall, "levels": levels,
    }  # fmt: skip


def run(system: str, category: str, question: int, own: list[dict[str, Any]], speed: float) -> dict[str, Any]:
    """One run of a system on a question; the tokens are the cascade's in every system."""
    tokens = [token for one in own for token in one["tokens"]]
    ours = system in ("cascade", "plain")
    wall = 0.1 + len(tokens) * 0.04 / speed
    record = {
        "system": system, "category": category, "question_id": question, "repeat": 0, "batch": None,
        "prompt_tokens": 20, "new_tokens": len(tokens), "wall_s": wall, "first_token_s": 0.1, "first_tokens": 1,
        "target_forwards": len(own), "finish_reason": "length", "tokens": tokens,
        "text": "".join(WORDS[token] for token in tokens), "origins": None, "stats": None,
        "forwards": {"target": len(own)}, "tokens_fed": {"target": 3 * len(own)}, "pieces": None, "rounds": None,
    }  # fmt: skip
    if ours:
        record |= {"origins": [o for one in own for o in one["origins"]], "stats": stats(own, wall)}
    if system == "cascade":
        record |= {"pieces": [WORDS[token] for token in tokens], "rounds": own}
    return record


def bench(
    categories: tuple[str, ...] = ("code", "chat"),
    systems: tuple[str, ...] = ("cascade", "plain", "hf-pld"),
    questions: int = 2,
    tokens: int = 40,
) -> dict[str, Any]:
    """A whole record. Speeds differ by category and system, and some are losses."""
    draw, runs = random.Random(7), []
    for index, (category, _) in enumerate(itertools.product(categories, range(questions))):
        own = rounds(draw, tokens, 0.9 - 0.4 * categories.index(category) / max(len(categories) - 1, 1))
        for system in systems:
            wobble = draw.uniform(0.9, 1.1)
            best = 2.6 - 1.7 * categories.index(category) / max(len(categories) - 1, 1)
            speed = {"cascade": best, "plain": 1.0, "hf-plain": 0.9}.get(
                system, best * 0.75 + 0.1 * systems.index(system) - 0.3
            )
            runs.append(run(system, category, index + 1, own, speed * (wobble if system != "plain" else 1)))
    setup = {
        "levels": [
            {"name": "ngram", "kind": "drafter", "what": "NGram", "dtype": None, "parameters": None},
            {"name": "draft", "kind": "model", "what": "self", "dtype": "int8", "parameters": 135_000_000},
            {"name": "target", "kind": "model", "what": "SmolLM2-135M", "dtype": "bfloat16", "parameters": 135_000_000},
        ],
        "rule": "coupled", "summary": "level ngram: NGram\ntarget: torch.bfloat16, bit-exact: yes, from width 2",
        "questions": {"file": "questions.jsonl", "sha256": "0" * 64}, "limit_per_category": None,
        "max_new_tokens": tokens, "batch": 1, "repeats": 1, "temperature": 0.0, "top_p": 1.0, "seed": None,
        "systems": {name: {"description": f"what {name} is", "settings": {"k": 3}} for name in systems},
        "skipped": {"hf-nested": "there is no model below the target"},
    }  # fmt: skip
    return {
        "format": 1,
        "environment": dict(ENVIRONMENT),
        "setup": setup,
        "runs": runs,
        "summary": summarise(runs, setup),
    }
