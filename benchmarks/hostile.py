"""What drafters that are wrong cost, and how soon one is back that has become right.

    python benchmarks/hostile.py [--tokens N] [--repeats N] [--json OUT]

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

from cascade import BypassConfig, CascadeConfig, Engine, LevelConfig, SamplingParams, load_config
from cascade.cli.environment import environment
from cascade.hookspecs import hookimpl
from cascade.testing import ScriptedDrafter
from cascade.trace import Observer, Round

PROMPT = [{"role": "user", "content": "Write a long story about a lighthouse keeper who repairs clocks."}]
TURN = 200  # token of the answer from which the turning drafter is right


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


class Turning(ScriptedDrafter):
    """A table that is wrong before a position and right from there on."""

    def __init__(self, text: list[int], at: int, vocab_size: int) -> None:
        super().__init__([text], "wrong", vocab_size)
        self._at = at

    def _one(self, ask: Any) -> Any:
        self.kind = "wrong" if len(ask.context) < self._at else "oracle"
        return super()._one(ask)


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
        "bypassed from the 8th test on": engine(shifted(1 << 40), bypass=BypassConfig(threshold=1.0)),
        f"a table, right from token {TURN} on": engine(
            LevelConfig(drafter=Turning(full, len(prompt) + TURN, target.vocab_size), name="scripted")
        ),
        f"a draft model, itself from token {TURN} on": engine(shifted(len(prompt) + TURN)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    base, watch = Engine(load_config(str(Path(__file__).parent / "pair.py"))), Watch()
    params = SamplingParams(max_new_tokens=args.tokens, ignore_eos=True)
    plain = dataclasses.replace(params, speculate=False)
    prompt = base.model.encode(PROMPT)
    text = base.generate(prompt, plain).tokens
    rows, before = [], base.generate(prompt, plain).stats.wall_s
    for name, engine in settings(base, prompt, text, watch).items():
        ratios, gaps = [], []
        for _ in range(args.repeats):
            result = engine.generate(prompt, params)
            after = base.generate(prompt, plain).stats.wall_s
            assert result.tokens == text, f"{name}: another text than plain decoding's"
            ratios.append(2 * result.stats.wall_s / (before + after))
            before = after
            back = next((at for at in watch.proposed if at >= len(prompt) + TURN), None)
            gaps.append(None if back is None else back - len(prompt) - TURN)
        levels = result.stats.levels[:-1]
        row = {"setting": name, "ratio": statistics.median(ratios), "ratios": ratios, "back_after": gaps}
        rows.append({**row, "decisions": {level.name: level.decisions for level in levels}})
        late = f", back after {gaps} tokens" if "right" in name or "itself" in name else ""
        print(
            f"{name:44} {row['ratio']:.3f} of plain decoding's time {[round(r, 3) for r in ratios]}{late}", flush=True
        )
        for level in levels:
            print(f"    {level.name}: {level.decisions[-3:]}")
        if args.json:
            args.json.write_text(json.dumps({"environment": environment(), "tokens": args.tokens, "rows": rows}))


if __name__ == "__main__":
    main()
