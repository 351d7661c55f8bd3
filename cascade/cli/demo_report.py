"""What the demo found: one table, a line on each level, and the figures as plain values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from cascade.cli import show as screen_parts
from cascade.cli.environment import environment

if TYPE_CHECKING:
    from rich.table import Table

    from cascade.cli.stream import Timed
    from cascade.cli.tasks import Task
    from cascade.result import LevelStats

#: What a level's last decision can be where it does not propose, in words.
LEFT_OUT = {"wait": "never began", "bypass": "bypassed in the end", "off": "off"}
NOTEWORTHY = 0.01  # share of a task's plain time from which a level's savings or losses are named
WIDE = 100  # columns from which the table has room to breathe


@dataclass(frozen=True)
class Outcome:
    """One task, decoded both ways."""

    task: Task
    cascade: Timed
    plain: Timed

    @property
    def identical(self) -> bool:
        """Whether the two are the same, token by token."""
        return self.cascade.result.tokens == self.plain.result.tokens

    @property
    def ratio(self) -> float:
        """How many times faster the cascade was, from the request to its last token."""
        return self.plain.seconds / self.cascade.seconds if self.cascade.seconds else 1.0

    @property
    def first_token_ratio(self) -> float:
        """The cascade's time to the first token over plain decoding's."""
        return self.cascade.first_token_s / self.plain.first_token_s if self.plain.first_token_s else 1.0

    @property
    def levels(self) -> Sequence[LevelStats]:
        """The levels' figures, bottom to top."""
        return self.cascade.result.stats.levels

    def written_by(self, level: int) -> int:
        """How many of the tokens this level was the first to propose."""
        return self.cascade.result.origins.count(level)

    def saved_by(self, level: int) -> float:
        """Seconds: what its tokens would have cost by plain decoding, less what it spent itself."""
        later = max(len(self.plain.result.tokens) - 1, 1)  # the first token's time is mostly the prompt's
        token = (self.plain.seconds - self.plain.first_token_s) / later
        return self.written_by(level) * token - self.levels[level].time_s


def show(outcomes: Sequence[Outcome], screen: Console) -> None:
    """Prints the table and what follows from it."""
    screen.print()
    screen.print(table(outcomes, gap=2 if screen.width >= WIDE else 1))
    screen.print(
        "alpha: drafted tokens that held, of those tested. K: tokens asked for at a time. speed, time: against plain "
        "decoding, by turns in this run; more speed and less time is better."
    )
    screen.print()
    for line in conclusions(outcomes):
        screen.print(line)


def table(outcomes: Sequence[Outcome], gap: int = 2) -> Table:
    """A row per task. Acceptance is alpha = accepted / tested, K the mean number of tokens asked for."""
    lower = outcomes[0].levels[:-1]
    numbers = ["tokens", "tokens/\nforward", *(f"{level.name}\nalpha/K" for level in lower)]
    numbers += ["cascade\nseconds", "plain\nseconds", "\nspeed", "1st token\ntime"]
    made = screen_parts.table("task", *numbers, "same\ntext", right=numbers, gap=gap)
    for outcome in outcomes:
        stats = outcome.cascade.result.stats
        made.add_row(
            outcome.task.name,
            str(stats.new_tokens),
            f"{stats.tokens_per_forward:.2f}",
            *(_judged(level) for level in outcome.levels[:-1]),
            f"{outcome.cascade.seconds:.2f}",
            f"{outcome.plain.seconds:.2f}",
            f"{outcome.ratio:.2f}x",
            f"{outcome.first_token_ratio:.2f}x",
            "yes" if outcome.identical else "NO",
        )
    return made


def _judged(level: LevelStats) -> str:
    alpha = "-" if level.alpha is None else f"{level.alpha:.2f}"
    return f"{alpha}/" + ("-" if level.k_mean is None else f"{level.k_mean:.1f}")


def conclusions(outcomes: Sequence[Outcome]) -> list[Text]:
    """Which level paid, which was bypassed, and why; then whether the texts are the same."""
    lines = [_verdict(outcomes, index) for index in range(len(outcomes[0].levels) - 1)]
    wrong = [outcome.task.name for outcome in outcomes if not outcome.identical]
    if wrong:
        lines.append(Text(f"The text DIFFERS from plain decoding's in: {', '.join(wrong)}.", "bold"))
    else:
        lines.append(Text("Every text is the one that plain decoding writes, token by token."))
    return lines


def _verdict(outcomes: Sequence[Outcome], index: int) -> Text:
    """One level in words: what it saved or cost per task, and where and why it was out of use in the end."""
    line = Text(outcomes[0].levels[index].name, screen_parts.style_of(index, len(outcomes[0].levels)))
    parts = [part for outcome in outcomes if (part := _balance(outcome, index))]
    line.append(": " + ("; ".join(parts) if parts else "nothing to gain in any task"))
    return line.append(".")


def _balance(outcome: Outcome, index: int) -> str:
    """What a level did for one task; empty where it made no difference worth a word."""
    saved, last = outcome.saved_by(index), _last(outcome.levels[index])
    words = []
    if abs(saved) > NOTEWORTHY * outcome.plain.seconds:
        tokens = f"{outcome.written_by(index)} of {len(outcome.cascade.result.tokens)} tokens"
        words.append(f"{tokens}, {abs(saved):.2f} s {'saved' if saved > 0 else 'lost'}")
    if last is not None and last[1] in LEFT_OUT:
        words.append(f"{LEFT_OUT[last[1]]} ({last[2].removesuffix(': bypassed')})")
    return f"{outcome.task.name} {', '.join(words)}" if words else ""


def _last(level: LevelStats) -> tuple[int, str, str] | None:
    """The last decision on a level: (round, what, reason)."""
    return level.decisions[-1] if level.decisions else None


def record(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Everything measured, for `--json`."""
    return {
        "environment": environment(),
        "levels": [level.name for level in outcomes[0].levels],
        "identical": all(outcome.identical for outcome in outcomes),
        "tasks": [
            {
                "task": outcome.task.name,
                "prompt": outcome.task.prompt,
                "text": outcome.cascade.result.text,
                "identical": outcome.identical,
                "ratio": outcome.ratio,
                "first_token_ratio": outcome.first_token_ratio,
                "cascade": _timed(outcome.cascade),
                "plain": _timed(outcome.plain),
            }
            for outcome in outcomes
        ],
    }


def _timed(timed: Timed) -> dict[str, Any]:
    result = timed.result
    return {
        "seconds": timed.seconds,
        "first_token_s": timed.first_token_s,
        "finish_reason": result.finish_reason,
        "tokens": result.tokens,
        "origins": result.origins,
        "stats": result.stats.as_dict(),
    }
