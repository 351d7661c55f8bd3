"""`cascade plugins`: what is registered, and by whom."""

from __future__ import annotations

import argparse
import json
import logging
from typing import Any


def add(subparsers: Any) -> None:
    """Adds the command."""
    parser = subparsers.add_parser(
        "plugins", help="what is registered, by whom", description="Lists drafters, rules, controllers and hooks."
    )
    parser.set_defaults(run=run)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--plugin", action="append", default=[], metavar="FILE", help="a one-file plugin, or a module; may be repeated"
    )


def run(args: argparse.Namespace) -> int:
    """Runs the command. An installed plugin that fails is part of the answer, not an error."""
    from cascade import plugins

    log = logging.getLogger("cascade.plugins")
    log.addFilter(_silent)  # failures are listed below: no need to warn as well
    try:
        found = plugins.create(*args.early_plugin, *args.plugin)
    finally:
        log.removeFilter(_silent)
    if args.json:
        rows = [row._asdict() for row in found.listing()]
        print(json.dumps({"registered": rows, "failures": found.failures}, indent=1))
        return 0
    _show(found)
    return 0


def _silent(record: logging.LogRecord) -> bool:
    return False


def _show(found: Any) -> None:
    from rich.text import Text

    from cascade.cli import show

    screen = show.console()
    table = show.table("kind", "name", "plugin", "distribution")
    for row in found.listing():
        table.add_row(*(Text(cell) for cell in (row.kind, row.name, row.plugin, row.distribution or row.module)))
    screen.print(table)
    for failure in found.failures:
        screen.print(Text(f"\nfailed: {failure}"), soft_wrap=True)
