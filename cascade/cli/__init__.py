"""The command line. One module per command, each with `add(subparsers)` and `run(args) -> int`.

Nothing heavy is imported to parse, to help or to list plugins; a command imports what it needs when
it runs. Status 0 is success, 1 that the work failed, 2 wrong usage, 130 an interruption.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import importlib
import logging
import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import cascade
from cascade.errors import CascadeError, ConfigError, LoadError, PluginError, PromptError, did_you_mean, one_line

#: The built-in commands: modules of this package, in the order in which `--help` lists them.
COMMANDS = ("demo", "generate", "bench", "plan", "audit", "report", "plugins")

OK, FAILED, WRONG_USAGE, INTERRUPTED = 0, 1, 2, 130
USAGE_ERRORS = (ConfigError, PromptError, LoadError, PluginError)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status; never raises."""
    words = list(sys.argv[1:] if argv is None else argv)
    _never_fail_on_characters()
    try:
        with _warnings_to_stderr():
            status = _guarded(words)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has seen enough: `cascade ... | head`
        _mute_stdout()
        return OK
    return status


def _guarded(words: list[str]) -> int:
    """Runs the command; every exception but a closed pipe becomes one line and a status."""
    debug = "--debug" in words
    try:
        return _dispatch(words)
    except CascadeError as error:
        return _fail(str(error), WRONG_USAGE if isinstance(error, USAGE_ERRORS) else FAILED, debug)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        raise
    except SystemExit as stop:  # argparse's --help and --version
        return stop.code if isinstance(stop.code, int) else OK
    except Exception as error:
        hint = "" if debug else " (--debug shows where)"
        return _fail(f"{type(error).__name__}: {error}{hint}", FAILED, debug)


def _dispatch(words: list[str]) -> int:
    command, files = _preview(words)
    parser, commands = _parser()
    if command not in commands.choices and "--version" not in words:
        # Only now does a plugin have to be asked: it may know the command, or `--help` lists its own.
        _add_plugin_commands(commands, files, must=command is not None)
    if command is not None and command not in commands.choices:
        raise ConfigError(f"there is no command {command!r}.{did_you_mean(command, commands.choices)}")
    args, rest = parser.parse_known_args(words)
    if rest:
        raise ConfigError(_unexpected(rest[0], commands.choices.get(command or "", parser)))
    if command is None:
        parser.print_help(sys.stderr)
        return WRONG_USAGE
    status = args.run(args)
    return status if isinstance(status, int) else OK  # a plugin's command may return nothing


def _preview(words: Sequence[str]) -> tuple[str | None, list[str]]:
    """The command, and the plugin files named before it: they may bring that very command."""
    files: list[str] = []
    rest = iter(words)
    for word in rest:
        if word == "--plugin":
            files += [value] if (value := next(rest, None)) else []
        elif word.startswith("--plugin="):
            files.append(word.removeprefix("--plugin="))
        elif not word.startswith("-"):
            return word, files
    return None, files


# -- the parser ------------------------------------------------------------------------------------------


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are ours; every command's parser is one and knows `--debug`."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**{"allow_abbrev": False, **kwargs})
        self.add_argument("--debug", action="store_true", help="show the traceback of an error")

    def error(self, message: str) -> NoReturn:
        """Raises ConfigError instead of printing the usage and leaving."""
        raise ConfigError(f"{message} ({self.prog} --help lists what there is)")


class Commands(argparse._SubParsersAction):
    """What commands are added to. It lists those without a help text too, and lets none replace another."""

    def add_parser(self, name: str, **kwargs: Any) -> Any:
        """The parser of a new command."""
        if name in self.choices:
            raise ValueError(f"there is a command {name!r} already")
        return super().add_parser(name, **{"help": "", **kwargs})


def check_counts(args: argparse.Namespace, *names: str) -> None:
    """Raises ConfigError for an option, named as its attribute, that is a number under 1; None is no number."""
    for name in names:
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ConfigError(f"--{name.replace('_', '-')} must be at least 1, not {value}")


def _parser() -> tuple[Parser, Any]:
    """The parser with the built-in commands, and what further ones are added to."""
    parser = Parser(prog="cascade", description="Multi-level speculative decoding.")
    parser.add_argument("--version", action="version", version=f"cascade-spec {cascade.__version__}")
    parser.add_argument(
        "--plugin", action="append", default=[], metavar="FILE", dest="early_plugin",
        help="a one-file plugin that brings commands (before the command; may be repeated)",
    )  # fmt: skip
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", action=Commands)
    for name in COMMANDS:
        importlib.import_module(f"cascade.cli.{name}").add(commands)
    return parser, commands


def _add_plugin_commands(commands: Any, files: Sequence[str], must: bool) -> None:
    """Lets plugins add theirs. With `must` false, for `--help`, a failure is only a warning."""
    from cascade import plugins

    try:
        plugins.create(*files).add_commands(commands)
    except CascadeError as error:
        if must:
            raise
        print(f"cascade: warning: {one_line(error)}", file=sys.stderr)


def _unexpected(word: str, parser: argparse.ArgumentParser) -> str:
    if not word.startswith("-"):
        return f"unexpected {word!r}: put quotes around a prompt of several words"
    known = [option for action in parser._actions for option in action.option_strings]
    close = difflib.get_close_matches(word.split("=")[0], known, n=1)
    hint = f"Did you mean {close[0]!r}?" if close else f"{parser.prog} --help lists what there is."
    return f"unknown option {word!r}. {hint}"


# -- what goes to the terminal ---------------------------------------------------------------------------


def _fail(message: str, status: int, debug: bool) -> int:
    if debug:
        traceback.print_exc()
    print(f"cascade: error: {one_line(message)}", file=sys.stderr)
    return status


@contextlib.contextmanager
def _warnings_to_stderr() -> Iterator[None]:
    """What cascade logs, such as an installed plugin that fails, as lines like the errors'."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("cascade: %(levelname)s: %(message)s"))
    handler.addFilter(_lower_level)
    logger = logging.getLogger("cascade")
    logger.addHandler(handler)
    propagate, logger.propagate = logger.propagate, False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagate


def _lower_level(record: logging.LogRecord) -> bool:
    record.levelname = record.levelname.lower()
    return True


def _never_fail_on_characters() -> None:
    """A model writes what it likes; a terminal that cannot show it shows a question mark."""
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="replace")


def _mute_stdout() -> None:
    """Sends the rest nowhere, or the interpreter complains when it flushes at its end."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
