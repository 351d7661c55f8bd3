"""`cascade bench`: a cascade against plain decoding and against transformers, question by question."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cascade.cli import INTERRUPTED, OK, check_counts, generate, levels
from cascade.cli.files import check_writable
from cascade.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from rich.console import Console

    from cascade.bench.questions import Question
    from cascade.bench.runner import Group
    from cascade.bench.setup import Plan
    from cascade.bench.store import Store
    from cascade.bench.systems import Rounds, Run, System
    from cascade.engine import Engine
    from cascade.plugins import Plugins


def add(subparsers: Any) -> None:
    """Adds the command."""
    parser = subparsers.add_parser(
        "bench",
        help="measure a cascade on questions of yours",
        description="Measures a cascade against plain decoding and transformers, on the same weights, in turns.",
    )
    parser.set_defaults(run=run)
    parser.add_argument(
        "--questions", required=True, metavar="FILE.jsonl", help="JSON lines as of Spec-Bench or HumanEval"
    )
    parser.add_argument("--limit-per-category", type=int, metavar="N", help="only the first N questions of each")
    parser.add_argument("--batch", type=int, default=1, metavar="N", help="questions decoded at a time (default: 1)")
    parser.add_argument("--repeats", type=int, default=1, metavar="N", help="how often each is asked (default: 1)")
    parser.add_argument(
        "--against", action="append", metavar="NAME,NAME",
        help="plain (the default: this engine without speculation), hf-plain, hf-pld, hf-assisted, hf-nested",
    )  # fmt: skip
    parser.add_argument("--sweep", action="store_true", help="measure every fixed setting of the cascade as well")
    parser.add_argument(
        "--json", metavar="OUT.json", help="write all measurements to this file; where it exists, go on with it"
    )
    levels.add_arguments(parser)
    generate.add_sampling(parser)


def run(args: argparse.Namespace) -> int:
    """Runs the command: everything that can be refused is, before a model is loaded."""
    out = check_writable("--json", args.json) if args.json else None
    params = generate.sampling(args)
    if params.temperature > 0 and params.seed is None:
        params = replace(params, seed=0)  # all systems and repeats need the same one; any will do
    check_counts(args, "max_new_tokens", "batch", "repeats", "limit_per_category")
    from cascade.bench.questions import read_questions

    questions = read_questions(args.questions, args.limit_per_category)
    against = _against(args.against)
    from cascade.bench.setup import Plan
    from cascade.bench.store import Store
    from cascade.bench.systems import Rounds
    from cascade.cli.environment import environment

    rounds = Rounds()
    config, plugins = levels.configured(args, rounds)
    if args.batch > 1:
        config = replace(config, max_batch=args.batch)
    plan = Plan(
        config,
        Path(args.questions),
        params,
        against,
        sweep=args.sweep,
        limit=args.limit_per_category,
        batch=args.batch,
        repeats=args.repeats,
        files=[Path(file) for file in (args.config, *args.early_plugin, *args.plugin) if file],
    )
    configuration = plan.configuration(plugins.drafter_names())
    with Store(out, configuration, environment()) as store:
        missing = [question for question in questions if question.key not in store.done]
        if missing:
            try:
                _measure(plan, plugins, rounds, missing, store)
            except KeyboardInterrupt:
                return _interrupted(store)
        _conclude(plan, store)
    return OK


def _against(given: list[str] | None) -> list[str]:
    """The systems to measure besides "cascade", each once. Raises ConfigError."""
    from cascade.bench.runner import AGAINST

    names = [name.strip() for text in given or ["plain"] for name in text.split(",") if name.strip()]
    for name in names:
        if name not in AGAINST:
            raise ConfigError(f"--against: there is no system {name!r}.{did_you_mean(name, AGAINST)}")
    return list(dict.fromkeys(names))


def _measure(plan: Plan, plugins: Plugins, rounds: Rounds, missing: list[Question], store: Store) -> None:
    """Loads the engine, and measures what is missing in the store."""
    from cascade.bench import runner
    from cascade.bench.setup import setup
    from cascade.cli import show
    from cascade.engine import Engine

    notes = show.console(sys.stderr)
    with contextlib.ExitStack() as stack:
        with show.loading(2 * len(plan.config.levels), lines=True) as progress:
            engine = stack.enter_context(Engine(plan.config, plugins=plugins, progress=progress))
            runner.check_prompts(engine, missing)
            systems, skipped = runner.systems_of(plan, engine, rounds)
            systems = [system for system in systems if system.name not in store.skipped]
            groups = runner.groups(missing, plan.batch, first=_first_id(store))
            progress("warming up")
            failed = runner.warm_up(systems, groups[0], plan.params)
        systems = [system for system in systems if system.name not in failed]
        store.begin(setup(plan, engine, systems, {**skipped, **failed}))
        if failed.keys() - store.skipped.keys():  # it has worked when this bench began
            store.append([], failed)
        _introduce(notes, engine, systems, store.skipped)
        if store.done:
            notes.print(f"going on: {len(store.done)} questions have been measured before", soft_wrap=True)
        bar = stack.enter_context(_progress(notes, len(store.done), len(missing)))
        for group in groups:
            runs, failed = runner.measure(systems, group, plan.params, plan.repeats, bar.system)
            store.append(runs, failed)
            systems = [system for system in systems if system.name not in failed]
            bar.done(group, runs, failed)


def _first_id(store: Store) -> int:
    """The number of the first group: groups that an earlier run measured keep theirs."""
    ids = [run["batch"]["id"] for run in store.runs if run["batch"] is not None]
    return max(ids) + 1 if ids else len(store.done)


def _introduce(notes: Console, engine: Engine, systems: list[System], skipped: dict[str, str]) -> None:
    """What is about to be measured, and what cannot be."""
    notes.print(engine.summary(), soft_wrap=True)
    for system in systems:
        settings = ", ".join(f"{key} {value}" for key, value in system.settings.items())
        notes.print(f"{system.name}: {system.description}" + (f" ({settings})" if settings else ""), soft_wrap=True)
    for name, reason in skipped.items():
        notes.print(f"skipped {name}: {reason}", soft_wrap=True)


def _conclude(plan: Plan, store: Store) -> None:
    """Shows the table, and writes the file where there is something new in it."""
    from cascade.bench.figures import summarise
    from cascade.cli.bench_report import print_table

    head = store.head
    if not store.finished:
        head["setup"]["limit_per_category"] = plan.limit
    record = {**head, "runs": store.runs, "summary": summarise(store.runs, head["setup"])}
    if not store.finished:
        store.finish(record)
    print_table(record)


def _interrupted(store: Store) -> int:
    kept = "nothing is kept"
    if store.out is not None and store.done:
        kept = f"{len(store.done)} questions are kept in {store.partial}; the same command goes on from there"
    print(f"cascade: interrupted: {kept}", file=sys.stderr)
    return INTERRUPTED


# -- progress --------------------------------------------------------------------------------------------


class _Lines:
    """Progress where there is no terminal: a line for each question."""

    def __init__(self, done: int, missing: int) -> None:
        self._done, self._all = done, done + missing

    def system(self, name: str) -> None:
        """Who is at work."""

    def done(self, group: Group, runs: list[Run], failed: dict[str, str]) -> None:
        """A question, or a batch, has been answered by everybody."""
        self._done += len(group.questions)
        for name, reason in failed.items():
            self._line(f"skipped {name} from now on: {reason}")
        ids = ", ".join(str(question.id) for question in group.questions)
        self._line(f"{self._done}/{self._all} {group.category} {ids}: {_speeds(runs)}")

    def _line(self, text: str) -> None:
        print(f"cascade: {text}", file=sys.stderr, flush=True)


class _Bar(_Lines):
    """Progress on a terminal: a bar with the system at work and the time left."""

    def __init__(self, done: int, missing: int, bar: Any) -> None:
        super().__init__(done, missing)
        self._bar = bar
        self._task = bar.add_task("", total=missing)

    def system(self, name: str) -> None:
        """Who is at work."""
        self._bar.update(self._task, description=name)

    def done(self, group: Group, runs: list[Run], failed: dict[str, str]) -> None:
        """A question, or a batch, has been answered by everybody."""
        for name, reason in failed.items():
            self._bar.console.print(f"skipped {name} from now on: {reason}", soft_wrap=True)
        self._bar.advance(self._task, len(group.questions))


@contextlib.contextmanager
def _progress(screen: Console, done: int, missing: int) -> Iterator[_Lines]:
    """Follows a bench on stderr: a bar on a terminal, else lines."""
    if not screen.is_terminal:
        yield _Lines(done, missing)
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    # Redrawn as rarely as a person can bear: the thread that draws takes time from what is measured.
    with Progress(*columns, console=screen, transient=True, refresh_per_second=1, speed_estimate_period=3600) as bar:
        yield _Bar(done, missing, bar)


def _speeds(runs: list[Run]) -> str:
    """Tokens per second of each system on what was just measured."""
    from cascade.bench.figures import FIXED

    tokens: dict[str, int] = {}
    seconds: dict[str, float] = {}
    for run in runs:
        name, batch = run["system"], run["batch"]
        tokens[name] = tokens.get(name, 0) + run["new_tokens"]
        wall = run["wall_s"] if batch is None else batch["wall_s"] / batch["size"]
        seconds[name] = seconds.get(name, 0.0) + wall
    shown = [name for name in sorted(tokens) if not name.startswith(FIXED)]  # who began differs; a sweep has many
    return ", ".join(f"{name} {tokens[name] / seconds[name]:.1f}" for name in shown) + " tokens/s"
