"""`cascade report`: pictures of a benchmark or a trace, in one HTML page."""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path
from typing import Any

from cascade.cli import OK
from cascade.cli.files import check_writable
from cascade.errors import ConfigError


def add(subparsers: Any) -> None:
    """Adds the command."""
    parser = subparsers.add_parser(
        "report",
        help="draw a benchmark or a trace as a web page",
        description="Draws what `cascade bench --json` or `cascade generate --trace` wrote: one page for any browser.",
    )
    parser.set_defaults(run=run)
    parser.add_argument("file", metavar="OUT.json", help="the benchmark, its OUT.partial.jsonl, or a trace")
    parser.add_argument("--html", required=True, metavar="FILE", help="where to write the page")


def run(args: argparse.Namespace) -> int:
    """Runs the command: everything that can be refused is, before anything is drawn."""
    path = check_writable("--html", args.html)
    if path.exists() and Path(args.file).exists() and path.samefile(args.file):
        raise ConfigError(f"--html {args.html}: this is the file to be drawn; choose another")
    if importlib.util.find_spec("plotly") is None:
        raise ConfigError("the pictures need plotly: pip install 'plotly>=6,<8'")
    from cascade.report.page import render
    from cascade.report.source import read

    source = read(args.file)
    try:
        page = render(source)
    except (AttributeError, IndexError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{args.file} is damaged: {type(error).__name__} {error}; run `cascade bench` again, or see --debug"
        ) from error
    path.write_text(page, encoding="utf-8")
    print(f"{path}: {len(page.encode()) / 1e6:.1f} MB, opens in any browser, offline")
    return OK
