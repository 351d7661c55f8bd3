"""What drafters that are wrong cost, and how soon one is back that has become right.

    python benchmarks/hostile.py [--tokens N] [--repeats N] [--only NAME]... [--json OUT]

The pair of `pair.py` (DRAFT and TARGET may name folders). Every setting decodes a text of N tokens (400) beside plain
decoding, a round of one and a round of the other, so that each figure is a ratio of times on a machine of one pace.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import time
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
    """Notes where the answer was when a level proposed."""

    def __init__(self) -> None:
        self.proposed: list[int] = []

    def on_round(self, round: Round) -> None:
        """Notes a round."""
        if any(level.drafted for level in round.levels):
            self.proposed.append(round.position)

    @hookimpl
    def cascade_make_observer(self, request: Any) -> Observer:
        """This object, for every request."""
        self.proposed.clear()
        return self


def race(runners: list[tuple[Engine, SamplingParams]], prompt: list[int]) -> list[list[tuple[int, float]]]:
    """(tokens so far, seconds of the round) of each runner, a round at a time: whoever is behind goes on.

    A machine whose pace changes within seconds changes it for both.
    """
    streams = [engine.stream_alone(prompt, params) for engine, params in runners]
    rounds: list[list[tuple[int, float]]] = [[] for _ in runners]
    texts: list[list[int]] = [[] for _ in runners]
    open_ = set(range(len(runners)))
    while open_:
        one = min(open_, key=lambda i: len(texts[i]))
        began = time.perf_counter()
        chunk = next(streams[one], None)
        took = time.perf_counter() - began
        if chunk is None:
            open_.remove(one)
            continue
        texts[one] += chunk.tokens
        rounds[one].append((len(texts[one]), took))
    assert all(text == texts[0] for text in texts), "another text than plain decoding's"
    return rounds


def seconds(rounds: list[tuple[int, float]], start: int = 0) -> float:
    """Seconds per token, of the rounds after the first `start` tokens."""
    late = [took for done, took in rounds if done > start]
    first = max((done for done, _ in rounds if done <= start), default=0)
    return sum(late) / (rounds[-1][0] - first)


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
    watch, base = Watch(), Engine(load_config(str(Path(__file__).parent / "pair.py")))
    params = SamplingParams(max_new_tokens=args.tokens, ignore_eos=True)
    plain = dataclasses.replace(params, speculate=False)
    prompt = base.model.encode(PROMPT)
    text = base.generate(prompt, plain).tokens
    rows = []
    for name, engine in settings(base, prompt, text, watch).items():
        if args.only and name not in args.only:
            continue
        ratios, lates, gaps = [], [], []
        for _ in range(args.repeats):
            mine, alone = race([(engine, params), (base, plain)], prompt)
            ratios.append(seconds(mine) / seconds(alone))
            lates.append(seconds(mine, EARLY) / seconds(alone, EARLY))
            again = next((at for at in watch.proposed if at >= len(prompt) + TURN), None)
            gaps.append(None if again is None else again - len(prompt) - TURN)
        row = {"setting": name, "ratio": statistics.median(ratios), "ratios": ratios, "back_after": gaps}
        rows.append({**row, "bypassed": statistics.median(lates)})
        each = [round(ratio, 3) for ratio in ratios]
        back = (
            f"back after {gaps} tokens"
            if f"token {TURN}" in name
            else f"from token {EARLY} on {statistics.median(lates):.3f}"
        )
        print(f"{name:44} {row['ratio']:.3f} of plain decoding's time {each}, {back}", flush=True)
        if args.json:
            args.json.write_text(json.dumps({"environment": environment(), "tokens": args.tokens, "rows": rows}))


if __name__ == "__main__":
    main()
