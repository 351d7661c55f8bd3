"""What `cascade bench` prints: tables of the figures in its record, and what one must know to read them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from cascade.bench.figures import FIXED, OVERALL, PEER, baseline_of
from cascade.cli import show

LOSS = "!"  # beside a speedup below 1, since not every reader sees colours
MANY = 6  # systems beside each other; of more, the fixed settings are left to their own table
ONE_LINE = 4  # systems up to which a speedup and its interval share a line of 100 columns
FACTS = ("processor", "cuda", "cores", "threads", "python", "torch", "transformers", "cascade")

Record = Mapping[str, Any]


def print_table(record: Record, screen: Console | None = None) -> None:
    """Prints the figures of a benchmark's record, from its `summary` and `setup` alone.

    Args:
        record: what `cascade bench --json` writes.
        screen: where to; by default stdout.
    """
    screen = show.console() if screen is None else screen
    summary, setup = record["summary"], record["setup"]
    if not summary:
        screen.print("No system finished a question: there are no figures.")
    else:
        baseline = baseline_of(summary)
        _speed(screen, summary, setup, baseline)
        _work(screen, summary)
        _by_category(screen, summary, baseline)
        _levels(screen, summary)
        _regret(screen, summary)
    screen.print()
    for line in (*_remarks(summary, setup), *_conditions(record)):
        screen.print(line, soft_wrap=True)


# -- all questions together ------------------------------------------------------------------------------


def _speed(screen: Console, summary: Record, setup: Record, baseline: str | None) -> None:
    numbers = (
        "tokens/s",
        "speedup",
        "90 %",
        "\npooled",
        "decode\nspeedup",
        "latency\nP50 s",
        "\nP95 s",
        "1st token\ntime",
    )
    made = show.table("system", *numbers, right=numbers)
    brief = max(figures["latency_p50_s"] for _, figures in _overall(summary)) < 1
    for name, figures in _overall(summary):
        made.add_row(
            name,
            _number(figures["tokens_per_s"], 1),
            _speedup(figures["speedup"]),
            _interval(figures["speedup_interval"]),
            _speedup(figures["pooled_speedup"]),
            _speedup(figures["decode_speedup"]),
            _number(figures["latency_p50_s"], 3 if brief else 2),
            _number(figures["latency_p95_s"], 3 if brief else 2),
            _times(figures["first_token_ratio"]),
        )
    caption = "speedup: tokens/s"
    if baseline is not None:
        caption += f" against {baseline} on the same {'batches' if setup['batch'] > 1 else 'questions'}"
    _section(screen, "Speed", made, caption, "90 %: where the speedup lies for nine of ten draws of such questions.")
    screen.print(
        "pooled: the same of all tokens in all the time, in which long answers and slow questions weigh more.",
        soft_wrap=True,
    )
    screen.print(
        "decode: after the first token. latency: of a request, half and 95 % are below. 1st token: its time, "
        f"against {baseline or 'nothing'}; less is better. {LOSS}: slower than {baseline or 'plain'}."
    )


def _work(screen: Console, summary: Record) -> None:
    numbers = ("tau", "target\nforwards/token", "own work\nms", "compute/token\nforwards", "\ntokens fed", "same\ntext")
    made = show.table("system", *numbers, right=numbers)
    for name, figures in _overall(summary):
        compute = figures["compute_per_token"] or {"forwards": None, "tokens": None}
        made.add_row(
            name,
            _number(figures["tau"]),
            _number(figures["target_forwards_per_token"]),
            _number(figures["own_work_ms"]),
            _number(compute["forwards"]),
            _number(compute["tokens"]),
            _percent(figures["identical"]),
        )
    caption = "tau: tokens per forward of the target. own work: the engine's, beside its models, per target forward."
    _section(screen, "What it took", made, caption)
    screen.print(
        "compute: of all models, each by its size over the target's. same text: requests with the very tokens of plain."
    )


def _overall(summary: Record) -> Iterator[tuple[str, Record]]:
    return ((name, categories[OVERALL]) for name, categories in summary.items())


# -- by category -----------------------------------------------------------------------------------------


def _by_category(screen: Console, summary: Record, baseline: str | None) -> None:
    names = [name for name in summary if name != baseline]
    if len(names) > MANY:
        names = [name for name in names if not name.startswith(FIXED)]
    if baseline is None or not names:
        return
    made = show.table("category", "questions", *names, right=("questions", *names))
    for column in made.columns:
        column.vertical = "top"  # the speedup beside the category, its interval below
    for category in _categories(summary):
        cells = [_with_interval(summary[name].get(category), " " if len(names) <= ONE_LINE else "\n") for name in names]
        made.add_row(category, str(summary[baseline][category]["questions"]), *cells)
    _section(screen, "Speedup by category", made, f"against {baseline}; in brackets or below: the 90 % interval.")


def _levels(screen: Console, summary: Record) -> None:
    numbers = ("alpha", "accepted/\ndrafted", "K", "share of\ntime", "bypassed")
    made = show.table("category", "level", *numbers, right=numbers)
    for category in _categories(summary):
        for i, level in enumerate(summary.get("cascade", {}).get(category, {}).get("levels") or ()):
            made.add_row(
                "" if i else category,
                level["name"],
                _number(level["alpha"]),
                _number(level["accept_rate"]),
                _number(level["k_mean"], 1),
                _percent(level["time_share"]),
                _percent(level["bypassed_share"]),
            )
    if made.row_count:
        caption = "alpha: tokens that held, of those tested. K: its controller's. bypassed: of the times it was asked."
        _section(screen, "Levels of the cascade", made, caption)


def _regret(screen: Console, summary: Record) -> None:
    names = [name for name in ("cascade", "plain") if summary.get(name, {OVERALL: {}})[OVERALL].get("regret")]
    if not names:
        return
    made = show.table("category", *names, "the best", right=names)
    for category in (*_categories(summary), OVERALL):
        found = [summary[name].get(category, {}) for name in names]
        best = next((figures["regret_best"] for figures in found if figures.get("regret_best")), "of each category")
        made.add_row(category, *(_times(figures.get("regret")) for figures in found), best)
    caption = "Time over that of the best fixed setting, which one only knows afterwards: 1.00x is as good."
    _section(screen, "Regret", made, caption)


def _categories(summary: Record) -> list[str]:
    return [name for name in dict.fromkeys(c for part in summary.values() for c in part) if name != OVERALL]


# -- below the tables ------------------------------------------------------------------------------------


def _remarks(summary: Record, setup: Record) -> Iterator[str]:
    """Whose text differs, and what is missing."""
    for name, figures in _overall(summary):
        found = [(figures["identical"], "plain")]
        if name.startswith(PEER) and name != "hf-plain":
            found.append((figures["identical_hf_plain"], "hf-plain"))
        parts = [f"{_percent(1 - share)} from {other}'s" for share, other in found if share is not None and share < 1]
        if parts:
            yield f"The text of {name} differs in " + ", ".join(parts) + "."
        if figures["questions"] < figures["asked"]:
            shared = f"{figures['questions']} of {figures['asked']} questions"
            yield f"{name} is over {shared}: those it shares with the baseline."
    for name, reason in setup["skipped"].items():
        yield f"{name}: {reason}" if name in summary else f"{name} was not run: {reason}"


def _conditions(record: Record) -> Iterator[str]:
    """What was measured, how, and on what."""
    setup = record["setup"]
    for name, system in setup["systems"].items():
        if not name.startswith(FIXED):
            yield f"{name}: {_joined(system['description'], _settings(system['settings']))}"
    yield "levels: " + " > ".join(_level(level) for level in setup["levels"]) + f" (target), rule {setup['rule']}"
    sampled = f"temperature {setup['temperature']:g}, top-p {setup['top_p']:g}, seed {setup['seed']}"
    per_category = setup["limit_per_category"]
    yield _joined(
        f"questions: {setup['questions']['file']}",
        f"{per_category} per category" if per_category is not None else "",
        f"at most {setup['max_new_tokens']} new tokens",
        sampled if setup["temperature"] else "greedy",
        f"batch {setup['batch']}",
        f"repeats {setup['repeats']}",
    )
    facts = record["environment"]
    yield "on: " + _joined(*(_fact(key, facts[key]) for key in FACTS if facts.get(key) is not None))


def _level(level: Record) -> str:
    size = level["parameters"]
    scale, unit = (1e9, "B") if size and size >= 1e9 else (1e6, "M")
    return f"{level['name']} ({_joined(level['dtype'] or level['what'], f'{size / scale:.3g}{unit}' if size else '')})"


def _fact(key: str, value: Any) -> str:
    return str(value) if key in ("processor", "cuda") else f"{key} {value}"


def _settings(settings: Record) -> str:
    return ", ".join(f"{key} {value}" for key, value in settings.items())


def _joined(*parts: str) -> str:
    return ", ".join(part for part in parts if part)


# -- cells -----------------------------------------------------------------------------------------------


def _section(screen: Console, title: str, made: Any, *captions: str) -> None:
    screen.print()
    screen.print(title, style="bold")
    screen.print(made)
    screen.print("; ".join(captions))


def _number(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _times(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}x"


def _percent(share: float | None) -> str:
    """A share in per cent; what is not quite none or all is not shown as that."""
    if share is None:
        return "-"
    percent = min(max(100 * share, 0.1), 99.9) if 0 < share < 1 else 100 * share
    return f"{percent:.0f} %" if share in (0, 1) or 0.5 < percent < 99.5 else f"{percent:.1f} %"


def _speedup(value: float | None) -> Text:
    """A speedup, marked where it is a loss."""
    lost = value is not None and value < 1
    return Text().append(_times(value) + LOSS * lost, "red" if lost else None)


def _interval(interval: Sequence[float] | None) -> str:
    return "-" if interval is None else "-".join(f"{edge:.2f}" for edge in interval)


def _with_interval(figures: Record | None, between: str) -> Text:
    cell = _speedup(None if figures is None else figures["speedup"])
    if figures is not None and figures["speedup_interval"] is not None:
        cell.append(between + _interval(figures["speedup_interval"]))
    return cell
