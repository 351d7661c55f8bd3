"""`cascade demo`: three tasks through a three-level cascade, measured against plain decoding."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from cascade.cli import FAILED, OK, generate
from cascade.cli.files import check_writable, write_json
from cascade.errors import ConfigError, DecodeError

if TYPE_CHECKING:
    from rich.console import Console

    from cascade.cli.demo_report import Outcome
    from cascade.cli.tasks import Task
    from cascade.config import CascadeConfig, SamplingParams
    from cascade.engine import Engine

LOADING_STEPS = 7  # what the engine reports while it loads two models, and the warm-up: a bar needs an end


def add(subparsers: Any) -> None:
    """Adds the command."""
    parser = subparsers.add_parser(
        "demo",
        help="see a cascade work on a small model",
        description="Three tasks through a three-level cascade, coloured by level, measured against plain decoding.",
    )
    parser.set_defaults(run=run)
    parser.add_argument("--json", metavar="OUT.json", help="write the figures to this file as well")
    generate.add_sampling(parser)


def run(args: argparse.Namespace) -> int:
    """Runs the command. Status 1 if any text differs from plain decoding's."""
    # Both decodings of a task need the same seed; any will do.
    params = replace(generate.sampling(args), seed=0 if args.seed is None else args.seed)
    if params.max_new_tokens < 1:
        raise ConfigError("--max-new-tokens must be at least 1: there would be nothing to compare")
    out = check_writable("--json", args.json) if args.json else None
    from cascade.cli import demo_report, show
    from cascade.cli.tasks import TASKS

    screen = show.console()
    with _load() as engine:
        _introduce(engine, screen)
        outcomes = [_compare(engine, task, params, screen, i % 2) for i, task in enumerate(TASKS)]
    demo_report.show(outcomes, screen)
    if out is not None:
        write_json(out, demo_report.record(outcomes))
    return OK if all(outcome.identical for outcome in outcomes) else FAILED


def cascade_of(model: str) -> CascadeConfig:
    """The demo's cascade, bottom to top: a table, an int8 copy of the target, the target."""
    from cascade.config import CascadeConfig, LevelConfig

    return CascadeConfig(
        levels=[
            LevelConfig(drafter="ngram"),
            LevelConfig(model="self", dtype="int8"),
            LevelConfig(model=model, dtype="bfloat16"),
        ]
    )


def _load() -> Engine:
    """The engine, warmed up: the first use of anything costs what no later one does."""
    from cascade.cli import show
    from cascade.cli.tasks import WARM_UP
    from cascade.config import SamplingParams
    from cascade.demo_model import NAME, cache_root, complete, demo_model
    from cascade.engine import Engine

    fresh = not complete(cache_root() / NAME)
    with show.loading(LOADING_STEPS + fresh, lines=True) as progress:
        folder = demo_model(progress)
        config = cascade_of(str(folder))
        engine = Engine(config, progress=progress)
        progress("warming up")
        for speculate in (True, False):
            engine.generate(WARM_UP, SamplingParams(max_new_tokens=24, ignore_eos=True, speculate=speculate))
    return engine


def _introduce(engine: Engine, screen: Console) -> None:
    """The levels, and the colours that their text will have."""
    from rich.text import Text

    from cascade.cli import show

    screen.print(engine.summary(), soft_wrap=True)
    screen.print(
        "The model is tiny, and so is its wit: watch who writes what, and that nothing changes.", soft_wrap=True
    )
    if show.has_colours(screen):
        legend = show.legend(engine.level_names)
        screen.print(Text("\nColours by author: ").append_text(legend), soft_wrap=True)


def _compare(engine: Engine, task: Task, params: SamplingParams, screen: Console, first: int) -> Outcome:
    """Decodes one task both ways, in turns; the cascade's text is shown as it comes."""
    from cascade.cli import show
    from cascade.cli.demo_report import Outcome
    from cascade.cli.stream import race

    screen.print(f"\n{task.about}\n", style="bold")
    prompt, params = [{"role": "user", "content": task.prompt}], replace(params, stop=task.stop)
    painter = generate.painter(engine, screen)
    try:
        ways = [params, replace(params, speculate=False)]
        fast, plain = race(engine, prompt, ways, painter.chunk, first)
    finally:  # also after Ctrl-C, so that the shell's prompt begins a line
        screen.print("\n")
    for timed in (fast, plain):
        if timed.result.error is not None:
            raise DecodeError(f"task {task.name!r}: {timed.result.error}")
    screen.print(show.authors(fast.result))
    return Outcome(task, fast, plain)
