"""Which cascade a command works on: `--config F.py`, or `--level` repeated bottom to top."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import difflib
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cascade.config import CascadeConfig, LevelConfig
from cascade.config_file import load_config
from cascade.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from cascade.plugins import Plugins

TEXTS = ("drafter", "model", "name", "dtype", "device", "tokenizer", "controller", "tree")
NUMBERS = ("k", "k_min", "k_max", "budget")
OPTIONS = "options."
WORDS = {"true": True, "false": False, "none": None}

LEVEL_HELP = (
    "a level, bottom to top, the target last: a drafter or a model, then key=value pairs after commas "
    f"({', '.join(TEXTS + NUMBERS)}, {OPTIONS}ANY), as in: --level ngram,k=8 --level model=PATH,dtype=int8 --level PATH"
    ". A tree is dynamic, or children by depth such as 3x2x1; drafters joined by + are merged into one tree"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of every command that builds a cascade."""
    group = parser.add_argument_group("the cascade")
    group.add_argument("--config", metavar="FILE.py", help="a Python file that assigns a CascadeConfig to `config`")
    group.add_argument("--level", action="append", default=[], metavar="LEVEL", help=LEVEL_HELP)
    group.add_argument("--rule", metavar="NAME", help="the verification rule (default: the config's, or coupled)")
    group.add_argument(
        "--plugin", action="append", default=[], metavar="FILE", help="a one-file plugin, or a module; may be repeated"
    )


def configured(args: argparse.Namespace, *extra: Any) -> tuple[CascadeConfig, Plugins]:
    """The cascade that the arguments describe, and the plugins it needs.

    Args:
        args: with the attributes that `add_arguments` gives.
        extra: further plugins, of the command's own.

    Raises:
        CascadeError: for whatever is wrong with either. No model has been loaded then.
    """
    from cascade import plugins

    if bool(args.config) == bool(args.level):
        fault = "both --config and --level are given" if args.config else "no cascade is given"
        raise ConfigError(f"{fault}: use --config FILE.py, or --level for each level, bottom to top, the target last")
    config = load_config(args.config) if args.config else None
    files = [*args.early_plugin, *args.plugin]
    known = plugins.create(*(config.plugins if config else ()), *files, *extra)
    if config is None:
        names = known.drafter_names()
        config = CascadeConfig(levels=[parse_level(text, names) for text in args.level])
    return (dataclasses.replace(config, rule=args.rule) if args.rule else config), known


def parse_level(text: str, drafters: Collection[str]) -> LevelConfig:
    """A level from "ngram", "PATH", or "model=PATH,dtype=int8,k=4,options.n_max=6".

    A first part without "=" is a drafter if one has that name, else a model.

    Raises:
        ConfigError: names the part that cannot be used, with a suggestion.
    """
    fields: dict[str, Any] = {}
    options: dict[str, Any] = {}
    # A folder may have commas and equals signs in its name, and is worth more than our grammar.
    parts = [text] if Path(text).exists() else text.split(",")
    for number, part in enumerate(parts):
        key, value = _pair(part, text, drafters, bare=number == 0)
        if key.startswith(OPTIONS):
            _set_option(options, key.removeprefix(OPTIONS), value, text)
        elif key in fields:
            raise ConfigError(f"--level {text}: {key} is given twice")
        else:
            fields[key] = _number(key, value, text) if key in NUMBERS else value
    if "x" in fields.get("tree", "") or fields.get("tree", "").isdigit():
        fields["tree"] = tuple(_number("tree", count, text) for count in fields["tree"].split("x"))
    if fields.get("drafter") not in drafters and "+" in fields.get("drafter", ""):
        fields["drafter"] = fields["drafter"].split("+")
    try:
        return LevelConfig(**fields, options=options)
    except ConfigError as error:
        raise ConfigError(f"--level {text}: {error}") from None


def _pair(part: str, text: str, drafters: Collection[str], *, bare: bool) -> tuple[str, str]:
    """The key and the value of one part of a level."""
    key, equals, value = (word.strip() for word in part.partition("="))
    if bare and part.strip() and (not equals or Path(text).exists()):
        return _bare(part.strip(), drafters)
    if not equals or not value:
        raise ConfigError(f"--level {text}: {part!r} should be key=value, or first a drafter or a model alone")
    if key not in TEXTS + NUMBERS and not key.startswith(OPTIONS):
        hint = did_you_mean(key, TEXTS + NUMBERS)
        raise ConfigError(
            f"--level {text}: a level has no key {key!r}.{hint} "
            f"A drafter's own options are written {OPTIONS}{key}={value}"
        )
    return key, value


def _bare(word: str, drafters: Collection[str]) -> tuple[str, str]:
    """A drafter by name, else a model; a near miss of a drafter is refused instead of searched on the hub."""
    if word in drafters or ("+" in word and all(part in drafters for part in word.split("+"))):
        return "drafter", word
    close = difflib.get_close_matches(word, drafters, n=1)
    if close and "/" not in word and not Path(word).exists():
        raise ConfigError(
            f"--level {word}: there is no drafter {word!r}. Did you mean {close[0]!r}? "
            f"(A model of that name is written model={word}.)"
        )
    return "model", word


def _number(key: str, value: str, text: str) -> int:
    try:
        return int(value)
    except ValueError:
        raise ConfigError(f"--level {text}: {key} must be an integer, not {value!r}") from None


def _set_option(options: dict[str, Any], path: str, value: str, text: str) -> None:
    """Sets options["a"]["b"] for the path "a.b"; a value that reads as a Python literal is one."""
    *folders, name = path.split(".")
    for folder in folders:
        options = options.setdefault(folder, {})
        if not isinstance(options, dict):
            raise ConfigError(f"--level {text}: {OPTIONS}{folder} is a value already")
    if not name or name in options:
        raise ConfigError(f"--level {text}: {OPTIONS}{path} " + ("is given twice" if name else "needs a name"))
    options[name] = _literal(value)


def _literal(value: str) -> Any:
    if value.lower() in WORDS:
        return WORDS[value.lower()]
    try:
        return ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return value
