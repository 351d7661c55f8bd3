"""Measured costs in a file, so that the next process need not begin by measuring.

A file is of one machine, and each level in it of one model: what differs now is measured anew, and a warning says
what it was. A file that cannot be read is no reason not to decode, so that is a warning as well.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import torch

from cascade.checks import at_least, is_int, is_name, is_number, is_path, require
from cascade.cli.environment import processor
from cascade.cli.files import write_at_once
from cascade.config import LevelConfig, members_of, normalise_levels
from cascade.costs import EXACT, SURE, CostModel, Known, bucket
from cascade.errors import ConfigError, one_line
from cascade.journal import difference
from cascade.level import Level
from cascade.timing import WIDTHS

if TYPE_CHECKING:
    from cascade.engine import Engine

FORMAT = 1
#: What `read` raises for a file that is none of ours, or broken.
UNREADABLE = (OSError, ValueError, OverflowError, RecursionError, LookupError, TypeError, ConfigError)
SHORTEST, LONGEST = 1e-12, 1e6  # seconds that a forward can take: what divides or multiplies them stays a number

log = logging.getLogger("cascade")


class Saved(NamedTuple):
    """What `CostModel.known` gave of a level's forwards or drafts."""

    tables: Mapping[int, list[Known]]
    least: float


@dataclass(frozen=True)
class Entry:
    """What a file says of one level.

    Attributes:
        what: its model or drafter, as plain values.
        forwards, drafts: their costs, by rows; None where nothing was measured.
    """

    what: Any
    forwards: Saved | None
    drafts: Saved | None

    def restore(self, costs: CostModel, name: str) -> None:
        """Puts these costs into a model that has none of the level yet."""
        for saved, drafts in ((self.forwards, False), (self.drafts, True)):
            if saved is not None:
                costs.restore(name, saved.tables, saved.least, drafts)


def save_costs(path: Any, engine: Engine) -> None:
    """Writes what an engine has measured, at once or not at all. Call it while nothing is decoded.

    Raises:
        ConfigError: the engine measures nothing, or has not yet; the file cannot be written.
    """
    costs = engine.costs
    if not isinstance(costs, CostModel):
        raise ConfigError(f"only measured costs can be saved: this engine was given {type(costs).__name__}")
    require(is_path(path), f"costs are saved to a path, not {path!r}")
    levels = []
    for name, what in _levels(engine).items():
        found = {"forwards": costs.known(name), "drafts": costs.known(name, drafts=True)}
        levels.append({"name": name, "is": what, **{kind: _plain(*of) for kind, of in found.items() if of[0]}})
    require(any(kind in level for level in levels for kind in ("forwards", "drafts")), "no costs were measured yet")
    text = json.dumps({"format": FORMAT, "machine": machine(), "levels": levels}, indent=1, ensure_ascii=False)
    text = re.sub(r'\[\n([^]["{}]*)\]', lambda numbers: f"[{' '.join(numbers[1].split())}]", text)  # on one line
    path = Path(path).expanduser()
    try:
        write_at_once(path, text + "\n")
    except (OSError, ValueError) as error:
        raise ConfigError(f"costs cannot be saved to {path}: {_reason(error)}") from None


def load_costs(path: Any, engine: Engine) -> list[str]:
    """Takes in the costs that a file has of an engine's levels; call it before anything is measured.

    Returns:
        The names of the levels whose costs were taken. For all others a warning says why they were not.
    """
    costs = engine.costs
    assert isinstance(costs, CostModel)
    try:
        there, entries = read(Path(path).expanduser())
    except FileNotFoundError:
        log.warning("saved costs %s: there is no such file yet: measured anew; engine.save_costs writes it", path)
        return []
    except UNREADABLE as error:
        log.warning("saved costs %s cannot be used (%s): ignored, measured anew", path, _reason(error))
        return []
    here = machine()
    other = [f"{key} {there.get(key)!r}, here {here[key]!r}" for key in here if there.get(key) != here[key]]
    if other:
        log.warning("saved costs %s are of another machine (%s): ignored, measured anew", path, "; ".join(other))
        return []
    taken = []
    for name, what in _levels(engine).items():
        if name not in entries:
            log.warning("saved costs %s have no level %r, only %s: measured anew", path, name, list(entries))
        elif (found := difference(entries[name].what, what)) is not None:
            where = f"level {name!r} ({found[0]} {found[1]!r}, here {found[2]!r})"
            log.warning("saved costs %s are of another %s: ignored, measured anew", path, where)
        else:
            taken.append(name)
    for name in taken:
        entries[name].restore(costs, name)
    for level in engine.chain.levels:
        forwards = entries[level.name].forwards if level.name in taken else None
        if forwards is not None:
            sure = {bucket(size.tokens) for size in forwards.tables.get(1, ()) if size.times >= SURE}
            level.timing.known = [width for width in WIDTHS if bucket(width) in sure]
    return taken


def machine() -> dict[str, Any]:
    """What all times depend on here, as plain values."""
    return {
        "processor": processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "torch": str(torch.__version__),
    }


# -- what a level is -------------------------------------------------------------------------------------


def _levels(engine: Engine) -> dict[str, dict[str, Any]]:
    """By name, what each place of a cascade and each model that is merged at one is."""
    configs: dict[str, LevelConfig] = {}
    drafters = engine.plugins.drafter_names()
    for config in normalise_levels(engine.config, drafters):
        configs |= {str(one.name): one for one in (config, *members_of(config, drafters))}
    target = configs[engine.target.name]
    parts: dict[str, Any] = {governor.name: governor.drafter for governor in engine.chain.governors}
    parts |= {level.name: level for level in engine.chain.levels}
    return {name: _what(parts[name], configs[name], target) for name in configs if name in parts}


def _what(part: Any, config: LevelConfig, target: LevelConfig) -> dict[str, Any]:
    """A level's model, or its drafter, as plain values that are equal where costs are."""
    if not isinstance(part, Level):
        members = [_class(member) for member in getattr(part, "members", ())]
        return {"drafter": _class(part), **({"members": members} if members else {})}
    model = part.model
    device = getattr(model, "device", None)
    device = str(device) if isinstance(device, (str, torch.device)) else ""
    source = f"a copy of {_source(target.model)}" if config.model == "self" else _source(config.model)
    found = {
        "model": source,
        "class": _class(model),
        "vocabulary": model.vocab_size,
        "parameters": getattr(model, "parameters", None),
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": device or None,
        "gpu": torch.cuda.get_device_name(device) if device.startswith("cuda") else None,
    }
    # A model object need not keep what others do, nor as others do.
    return {key: value for key, value in found.items() if isinstance(value, str) or is_int(value)}


def _source(model: Any) -> str:
    """Where a model is from: its path or name, or what the object calls itself."""
    if isinstance(model, (str, os.PathLike)):
        path = Path(model).expanduser()
        return str(path.resolve()) if path.exists() else os.fspath(model)
    return str(getattr(getattr(model, "config", None), "_name_or_path", "") or getattr(model, "name", _class(model)))


def _class(one: Any) -> str:
    return f"{type(one).__module__}.{type(one).__qualname__}"


# -- the file --------------------------------------------------------------------------------------------


def _plain(tables: Mapping[int, list[Known]], least: float) -> dict[str, Any]:
    """One level's costs as plain values: a line for the sizes of all its forwards on so many rows or more."""
    return {
        "least pace": _rounded(least),
        "tables": [
            {
                "rows": rows,
                "tokens": [int(size.tokens) if size.tokens.is_integer() else size.tokens for size in sizes],
                "seconds": [_rounded(size.seconds) for size in sizes],
                "times": [size.times for size in sizes],
            }
            for rows, sizes in tables.items()
        ],
    }


def _rounded(value: float) -> float:
    return float(f"{value:.7g}")


def read(path: Path) -> tuple[dict[str, Any], dict[str, Entry]]:
    """The machine that a file is of, and its levels by name; checks every value. Raises one of `UNREADABLE`."""
    record = json.loads(path.read_text(encoding="utf-8"), parse_constant=_no_number)
    require(isinstance(record, dict), "it is no object")
    require(record["format"] == FORMAT, f"it has format {record['format']!r}, and this is {FORMAT}")
    there, entries = record["machine"], {}
    require(_is_flat(there), "its machine is not told in plain values")
    for level in record["levels"]:
        name = level["name"]
        require(is_name(name) and name not in entries, f"a level cannot be named {name!r}, or not twice")
        require(_is_flat(level["is"]), f"what level {name!r} is, is not told in plain values")
        saved = {kind: _saved(level[kind]) if kind in level else None for kind in ("forwards", "drafts")}
        entries[name] = Entry(level["is"], **saved)
    require(any(entry.forwards or entry.drafts for entry in entries.values()), "it holds no costs")
    return there, entries


def _is_flat(found: Any) -> bool:
    values = found.values() if isinstance(found, dict) else [found]
    many = [one for value in values for one in (value if isinstance(value, list) else [value])]
    return isinstance(found, dict) and all(isinstance(one, (str, int, type(None))) for one in many)


def _saved(costs: Any) -> Saved:
    least, tables = costs["least pace"], {}
    require(is_number(least) and 0 < least <= 1, f"a least pace of {least!r}")
    for table in costs["tables"]:
        rows = table["rows"]
        require(at_least(0)(rows) and not rows & (rows - 1) and rows not in tables, f"a table for {rows!r} rows")
        tables[rows] = [_size(*size) for size in zip(table["tokens"], table["seconds"], table["times"], strict=True)]
        require(len(tables[rows]) > 0, f"an empty table for {rows} rows")
        buckets = [bucket(size.tokens) for size in tables[rows]]
        require(buckets == sorted(set(buckets)), f"sizes that do not rise, in the table for {rows} rows")
    require(bool(tables), "a level without tables")
    return Saved(tables, float(least))


def _size(tokens: Any, seconds: Any, times: Any) -> Known:
    require(is_number(tokens) and tokens >= 0 and (tokens > EXACT or tokens == int(tokens)), f"{tokens!r} tokens")
    require(is_number(seconds) and (not seconds or SHORTEST <= seconds <= LONGEST), f"{seconds!r} seconds")
    require(at_least(1)(times), f"a time measured {times!r} times")
    return Known(float(tokens), float(seconds), times)


def _no_number(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no number")


def _reason(error: Exception) -> str:
    """Why a file cannot be used, in one line."""
    if isinstance(error, OSError):
        return one_line(error.strerror or error)
    if isinstance(error, json.JSONDecodeError):
        return f"no JSON: {one_line(error)}"
    if isinstance(error, KeyError):
        return f"it lacks {error.args[0]!r}"
    return one_line(error)
