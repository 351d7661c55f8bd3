"""`cascade plan`: which levels pay, with which K, on your questions, and on machines that are not at hand."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cascade.cli import OK, check_counts, generate, levels
from cascade.cli.files import check_writable, write_json
from cascade.errors import ConfigError

if TYPE_CHECKING:
    from cascade.bench.questions import Question
    from cascade.config import CascadeConfig, SamplingParams
    from cascade.planning.measuring import Measured
    from cascade.planning.planner import Plan
    from cascade.planning.what_if import WhatIf
    from cascade.plugins import Plugins

WHAT_IF = (
    "assumed costs instead of measured ones; may be repeated. NAME is a level, with keys seconds=12ms and "
    "per_token=0.1ms, or params=70B, dtype=bf16|fp8|int8|int4 (or bytes= of a parameter), "
    "gpu=h100|h200|a100|l40s|4090|mi300x (or bandwidth=3.35TB/s and flops=990T), gpus=8, layers=80, hidden=8192, "
    "launch=20us, efficiency=0.7, and placement=same|own|remote; or interconnect or link, with latency=10us and "
    "bandwidth=100GB/s; or engine:overhead=1ms"
)


def add(subparsers: Any) -> None:
    """Adds the command."""
    parser = subparsers.add_parser(
        "plan",
        help="find out which levels pay, before serving",
        description="Decodes some questions once, and finds out by simulation which levels pay, and with which K.",
    )
    parser.set_defaults(run=run)
    parser.add_argument(
        "--questions", metavar="FILE.jsonl", help="JSON lines as of Spec-Bench or HumanEval (default: six of our own)"
    )
    parser.add_argument("--limit-per-category", type=int, metavar="N", help="only the first N questions of each")
    parser.add_argument("--batch", type=int, default=1, metavar="N", help="requests decoded at a time (default: 1)")
    parser.add_argument("--what-if", action="append", default=[], metavar="NAME:KEY=VALUE,...", help=WHAT_IF)
    parser.add_argument(
        "--recordings", metavar="FILE.jsonl",
        help="keep what was decoded in this file; where it exists, plan from it without loading a model",
    )  # fmt: skip
    parser.add_argument("--save", metavar="COSTS.json", help="save what was measured, for CascadeConfig(costs=...)")
    parser.add_argument("--costs", metavar="COSTS.json", help="measured costs that an earlier plan saved")
    parser.add_argument("--out", metavar="FILE.py", help="write the configuration to this file instead of the screen")
    parser.add_argument("--json", metavar="OUT.json", help="write the plan to this file as well")
    levels.add_arguments(parser)
    generate.add_sampling(parser)


def run(args: argparse.Namespace) -> int:
    """Runs the command: everything that can be refused is, before a model is loaded."""
    from cascade.cli import plan_report, show
    from cascade.planning import planner
    from cascade.planning.what_if import read_what_if

    files = {
        option: check_writable(f"--{option}", value)
        for option in ("save", "out", "json")
        if (value := vars(args)[option])
    }
    params = generate.sampling(args)
    check_counts(args, "max_new_tokens", "batch", "limit_per_category")
    task = _task(args, params)
    places = planner.places_of(task.config, task.plugins)
    names = {name: None for place, parts in places.items() for name in (*(str(part.name) for part in parts), place)}
    what_if = read_what_if(args.what_if, list(names))
    notes = show.console(sys.stderr)
    if task.built_in:
        notes.print(f"no --questions: {len(task.questions)} short ones of our own, for a first look", soft_wrap=True)
    count = len(task.config.levels)
    steps = 3 * count + len(task.questions) + min(2**count, 5 * count)  # about: a bar needs an end
    with show.loading(steps, lines=True) as progress:
        made = _plan(args, task, what_if, files.get("save"), progress)
    screen = show.console()
    plan_report.print_plan(made, screen, bool(what_if.levels))
    _conclude(args, task, made, files, screen)
    return OK


@dataclass(frozen=True)
class Task:
    """What is asked.

    Attributes:
        config, original: the cascade that is planned, and as the user wrote it.
        plugins: its plugins.
        questions: to be recorded; none where there are recordings.
        built_in: whether they are ours.
        params: how answers are decoded.
        recorded: the file of recordings; None where there is none yet.
    """

    config: CascadeConfig
    original: CascadeConfig
    plugins: Plugins
    questions: list[Question]
    built_in: bool
    params: SamplingParams
    recorded: Path | None


def _task(args: argparse.Namespace, params: SamplingParams) -> Task:
    """What the arguments ask for. Raises CascadeError."""
    from cascade.bench.questions import read_questions
    from cascade.planning.measuring import built_in
    from cascade.planning.planner import check_tokens

    recorded = Path(args.recordings) if args.recordings and Path(args.recordings).is_file() else None
    for option in ("questions", "save"):
        if recorded and vars(args)[option]:
            why = "is planned from as it is, and nothing is measured"
            raise ConfigError(
                f"--recordings {recorded}: this file exists, so it {why}: leave out --{option}, or name a new file"
            )
    if args.recordings and not recorded:
        check_writable("--recordings", args.recordings)
    if args.costs and not Path(args.costs).is_file():
        raise ConfigError(f"--costs {args.costs}: there is no such file: --save writes one")
    questions: list[Question] = []
    if not recorded:
        questions = read_questions(args.questions, args.limit_per_category) if args.questions else built_in()
        check_tokens(len(questions) * params.max_new_tokens)
    original, plugins = levels.configured(args)
    config = original
    if args.batch > 1:
        config = replace(config, max_batch=args.batch)
    if args.costs:
        config = replace(config, costs=args.costs)
    if files := [*args.early_plugin, *args.plugin]:
        config = replace(config, plugins=[*config.plugins, *files])
    return Task(config, original, plugins, questions, not args.questions and not recorded, params, recorded)


def _plan(
    args: argparse.Namespace, task: Task, what_if: WhatIf, save: Path | None, tell: Callable[[str], None]
) -> Plan:
    """Measures, or reads what was recorded, and plans."""
    from cascade.planning import planner

    measured = _read(task) if task.recorded else _measure(args, task, save, tell)
    return planner.plan(
        task.config,
        measured,
        batch=args.batch,
        what_if=what_if,
        plugins=task.plugins,
        sampled=not task.params.greedy,
        tell=tell,
    )


def _read(task: Task) -> Measured:
    """What an earlier plan left. Raises ConfigError."""
    from cascade.planning.measuring import Measured, read_costs
    from cascade.recording import load_recordings

    assert task.recorded is not None
    costs = task.config.costs
    return Measured(load_recordings(task.recorded), None if costs is None else read_costs(costs))


def _measure(args: argparse.Namespace, task: Task, save: Path | None, tell: Callable[[str], None]) -> Measured:
    """Loads the engine, and has it answer the questions."""
    from cascade.bench.runner import check_prompts
    from cascade.engine import Engine
    from cascade.planning.measuring import measure
    from cascade.recording import save_recordings

    with contextlib.ExitStack() as stack:
        engine = stack.enter_context(Engine(task.config, plugins=task.plugins, progress=tell))
        check_prompts(engine, task.questions)
        measured = measure(engine, task.questions, task.params, batch=args.batch, tell=tell)
        if args.recordings:
            save_recordings(args.recordings, measured.recordings)
        if save is not None:
            engine.save_costs(save)
    return measured


def _conclude(args: argparse.Namespace, task: Task, made: Plan, files: dict[str, Path], screen: Any) -> None:
    """Says what to do, and writes the files."""
    from cascade.cli.plan_report import verdict
    from cascade.planning.source import config_source

    costs = str(files["save"]) if "save" in files else task.config.costs
    config = replace(made.config, costs=costs if made.best else None)
    source = config_source(config, task.original, task.plugins.drafter_names(), args.config)
    screen.print()
    screen.print(verdict(made), style="bold", soft_wrap=True)
    if "out" in files:
        files["out"].write_text(source, encoding="utf-8")
        screen.print(f"The configuration is in {args.out}.", soft_wrap=True)
    else:
        screen.print()
        screen.print(source, soft_wrap=True, end="")
    if "json" in files:
        write_json(files["json"], {"format": 1, **made.as_dict(), "config": source})
