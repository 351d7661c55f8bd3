"""What drafters that are wrong cost, and how soon one is back that has become right.

    python benchmarks/hostile.py [--tokens N] [--repeats N] [--only NAME]... [--json OUT]

The pair of `pair.py` (DRAFT and TARGET may name folders). Every setting takes turns with plain decoding on one text of
N tokens (400), so each figure is a ratio of times in one run. In all of them the text must be plain decoding's.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "2")

import torch

from cascade import CascadeConfig, Engine, LevelConfig, SamplingParams, load_config
from cascade.cli.environment import environment
from cascade.hookspecs import hookimpl
from cascade.testing import ScriptedDrafter
from cascade.trace import Observer, Round

PROMPT = [{"role": "user", "content": "Write a Python class for a binary search tree, with docstrings and unit tests."}]
TURN = 200  # token of the answer from which the turning drafter is right
EARLY = 50  # tokens by which what is wrong has been left out


class Shifted:
    """A model whose every choice is one token beside its own, up to a position: as dear as it is, and wrong."""

    def __init__(self, model: Any, until: int) -> None:
        self._model, self._until = model, until

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def forward(self, feeds: Any) -> Any:
        """See `CausalModel.forward`."""
        parts = self._model.forward(feeds).split([feed.keep for feed in feeds])
        return torch.cat(
            [
                part.roll(1, -1) if feed.row.length <= self._until else part
                for feed, part in zip(feeds, parts, strict=True)
            ]
        )


class Watch(Observer):
    """Notes where the answer was when a level proposed, and what every round took."""

    def __init__(self) -> None:
        self.proposed: list[int] = []
        self.rounds: list[tuple[int, int, float]] = []  # position, tokens, seconds

    def on_round(self, round: Round) -> None:
        """Notes a round."""
        self.rounds.append((round.position, len(round.tokens), round.seconds))
        if any(level.drafted for level in round.levels):
            self.proposed.append(round.position)

    @hookimpl
    def cascade_make_observer(self, request: Any) -> Observer:
        """This object, for every request."""
        self.proposed.clear()
        self.rounds.clear()
        return self


class Turning(ScriptedDrafter):
    """A table that is wrong before a position and right from there on."""

    def __init__(self, text: list[int], at: int, vocab_size: int) -> None:
        super().__init__([text], "wrong", vocab_size)
        self._at = at

    def _one(self, ask: Any) -> Any:
        self.kind = "wrong" if len(ask.context) < self._at else "oracle"
        return super()._one(ask)


def per_token(watch: Watch, start: int) -> float:
    """Seconds per token from a position on."""
    late = [(tokens, seconds) for position, tokens, seconds in watch.rounds if position >= start]
    return sum(seconds for _, seconds in late) / sum(tokens for tokens, _ in late)


def settings(base: Engine, prompt: list[int], text: list[int], watch: Watch) -> dict[str, Engine]:
    """An engine per setting, all on the same two models."""
    draft, target = (level.model for level in reversed(base.chain.levels))
    full = [*prompt, *text]

    def engine(*levels: Any, **options: Any) -> Engine:
        made = CascadeConfig([*levels, LevelConfig(model=target, name="target")], plugins=[watch], **options)
        return Engine(made)

    def wrong() -> LevelConfig:
        return LevelConfig(drafter=ScriptedDrafter([full], "wrong", target.vocab_size), name="scripted")

    def shifted(until: int) -> LevelConfig:
        return LevelConfig(model=Shifted(draft, until), name="draft")

    return {
        "a wrong table": engine(wrong()),
        "a wrong draft model": engine(shifted(1 << 40)),
        "both": engine(wrong(), shifted(1 << 40)),
        f"a table, right from token {TURN} on": engine(
            LevelConfig(drafter=Turning(full, len(prompt) + TURN, target.vocab_size), name="scripted")
        ),
        f"a draft model, itself from token {TURN} on": engine(shifted(len(prompt) + TURN)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--only", action="append", default=[], help="a setting; may be repeated")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    watch, pair = Watch(), load_config(str(Path(__file__).parent / "pair.py"))
    base = Engine(dataclasses.replace(pair, plugins=[watch]))
    params = SamplingParams(max_new_tokens=args.tokens, ignore_eos=True)
    plain = dataclasses.replace(params, speculate=False)
    prompt = base.model.encode(PROMPT)
    text = base.generate(prompt, plain).tokens
    rows, before, start = [], base.generate(prompt, plain).stats.wall_s, len(prompt) + EARLY
    late_before = per_token(watch, start)
    for name, engine in settings(base, prompt, text, watch).items():
        if args.only and name not in args.only:
            continue
        ratios, gaps, lates = [], [], []
        for _ in range(args.repeats):
            result = engine.generate(prompt, params)
            assert result.tokens == text, f"{name}: another text than plain decoding's"
            late = per_token(watch, start)
            again = next((at for at in watch.proposed if at >= len(prompt) + TURN), None)
            gaps.append(None if again is None else again - len(prompt) - TURN)
            after = base.generate(prompt, plain).stats.wall_s
            late_after = per_token(watch, start)
            lates.append(2 * late / (late_before + late_after))
            ratios.append(2 * result.stats.wall_s / (before + after))
            before, late_before = after, late_after
        levels = result.stats.levels[:-1]
        row = {"setting": name, "ratio": statistics.median(ratios), "ratios": ratios, "back_after": gaps}
        row["bypassed"] = statistics.median(lates)
        rows.append({**row, "decisions": {level.name: level.decisions for level in levels}})
        each = [round(ratio, 3) for ratio in ratios]
        back = (
            f"back after {gaps} tokens" if f"token {TURN}" in name else f"from token {EARLY} on {row['bypassed']:.3f}"
        )
        print(f"{name:44} {row['ratio']:.3f} of plain decoding's time {each}, {back}", flush=True)
        for level in levels:
            print(f"    {level.name}: {level.decisions[-3:]}")
        if args.json:
            args.json.write_text(json.dumps({"environment": environment(), "tokens": args.tokens, "rows": rows}))


if __name__ == "__main__":
    main()
