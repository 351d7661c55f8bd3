"""What `cascade plan` prints."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.text import Text

from cascade.cli import show

if TYPE_CHECKING:
    from rich.console import Console

    from cascade.planning.planner import LevelPlan, Plan
    from cascade.planning.search import Ks

BEST = "<- best"
LOSS = "!"  # beside a speedup below 1, since not every reader sees colours
PACE = 1.1  # by how much a clock and a simulation may differ without a word


def print_plan(plan: Plan, screen: Console, assumed: bool) -> None:
    """Prints the tables and lines of a plan.

    Args:
        plan: what was found.
        screen: where to.
        assumed: whether costs are assumed, not measured.
    """
    _sets(plan, screen, assumed)
    _levels(plan, screen)
    _categories(plan, screen)
    screen.print()
    for line in (*plan.remarks, *_conditions(plan)):
        screen.print(line, soft_wrap=True)


def _sets(plan: Plan, screen: Console, assumed: bool) -> None:
    numbers = ("tokens/s", "speedup", "tau", "at fixed K:\nspeedup", "\ntau")
    made = show.table("levels", *numbers, "\nK", "", right=numbers)
    plain = plan.plain
    made.add_row(
        "plain", f"{plain.tokens_per_s:.1f}", "1.00x", f"{plain.tau:.2f}", "", "", "", "" if plan.best else BEST
    )
    for choice in plan.choices:
        own, fixed = choice.adaptive, choice.fixed
        best = plan.best is not None and choice.levels == plan.best.levels
        made.add_row(
            " + ".join(choice.levels),
            f"{own.tokens_per_s:.1f}",
            _speedup(own.speedup),
            f"{own.tau:.2f}",
            _speedup(fixed.speedup),
            f"{fixed.tau:.2f}",
            _ks(fixed.ks),
            BEST if best else "",
            style="bold" if best else "",
        )
    screen.print()
    screen.print("What each set of levels would come to" + (", on the assumed machine" * assumed), style="bold")
    screen.print(made)
    screen.print(
        "Simulated: the engine itself, on recorded answers, in the time that forwards take. tau: tokens per forward of "
        f"{plan.target}. At fixed K: without its controllers, with the K that is best in hindsight, level by level. "
        f"{LOSS}: slower than plain."
    )


def _levels(plan: Plan, screen: Console) -> None:
    numbers = (
        "acceptance",
        "tested",
        "a token\ncosts",
        "alone",
        "at no\ncost",
        "always\nright",
        "the best set\nwith it",
    )
    made = show.table("level", *numbers, "", right=numbers)
    inside = plan.best.levels if plan.best else ()
    for level in plan.levels:
        made.add_row(
            level.name,
            _acceptance(level),
            str(level.acceptance.tested),
            f"{level.cost:.3f}",
            _speedup(level.alone),
            _speedup(level.free),
            f"{level.right:.2f}x",
            "-" if level.adds is None else f"{100 * level.adds:+.1f} %",
            "is in it" if level.name in inside else "is not",
        )
    screen.print()
    screen.print("Level by level", style="bold")
    screen.print(made)
    screen.print(
        f"A token costs: to propose, in rounds of plain decoding ({plan.round_s * 1e3:.3g} ms). Alone: "
        "speedup with this level and no other; if its proposals took no time; and if all of them held. Always right "
        f"and free: {plan.ideal:.2f}x, at K {plan.ideal_k}: with up to 16 tokens a round, no drafter can bring more."
    )


def _categories(plan: Plan, screen: Console) -> None:
    if not plan.categories or plan.best is None:
        return
    made = show.table("category", "questions", "speedup", right=("questions", "speedup"))
    for category, (questions, speedup) in plan.categories.items():
        made.add_row(category or "-", str(questions), _speedup(speedup))
    screen.print()
    screen.print(f"By category: {' + '.join(plan.best.levels)}", style="bold")
    screen.print(made)


def verdict(plan: Plan) -> str:
    """What to do, in a sentence."""
    if plan.best is None:
        most = max((choice.adaptive.speedup for choice in plan.choices), default=None)
        found = "there is no level to try" if most is None else f"the best set of levels would come to {most:.2f}x"
        return f"Nothing pays: {found}. Decode plainly:"
    out = [level.name for level in plan.levels if level.name not in plan.best.levels]
    pay = " and ".join(plan.best.levels) + (" pay" if len(plan.best.levels) > 1 else " pays")
    leave = f"; leave out {' and '.join(out)}" if out else ""
    return f"{pay}: {plan.best.adaptive.speedup:.2f}x of plain decoding{leave}."


def _conditions(plan: Plan) -> Iterator[str]:
    """What the plan rests on."""
    if plan.measured_plain and plan.simulated_plain:
        yield _beside("plain decoding", plan.measured_plain, plan.simulated_plain)
    if plan.measured_all and plan.simulated_all:
        yield _beside("all levels, while they were recorded", plan.measured_all, plan.simulated_all)
    yield (
        f"On {_count(plan.questions, 'question')} with {plan.tokens} tokens of answers, batch {plan.batch}; "
        f"the engine's own work {plan.overhead * 1e3:.2f} ms per forward."
    )


def _beside(what: str, clock: float, simulated: float) -> str:
    """A measured speed and a simulated one."""
    off = max(clock, simulated) > PACE * min(clock, simulated)
    why = " (far apart: plan again when the machine is quiet, or ask cascade bench)" if off else ""
    return f"By the clock, {what}: {clock:.1f} tokens/s; simulated {simulated:.1f}{why}."


def _acceptance(level: LevelPlan) -> str:
    found = level.acceptance
    return "-" if found.alpha is None else f"{found.alpha:.2f} +- {found.width:.2f}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}" + ("s" if number != 1 else "")


def _ks(ks: Ks | None) -> str:
    return ", ".join(str(k) for k in (ks or {}).values())


def _speedup(value: float) -> Text:
    lost = value < 0.995
    return Text(f"{value:.2f}x{LOSS * lost}", "red" if lost else "")
