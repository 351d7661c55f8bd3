"""A configuration as a Python file that `load_config` takes."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import MISSING, fields, replace
from typing import Any

from cascade.config import BypassConfig, CascadeConfig, LevelConfig, normalise_levels
from cascade.errors import ConfigError

IMPORTED = ("BypassConfig", "CascadeConfig", "LevelConfig", "load_config")


def config_source(
    config: CascadeConfig, original: CascadeConfig, drafters: Collection[str] = (), file: str | None = None
) -> str:
    """Python that assigns a configuration to `config`.

    Args:
        config: with every level's name.
        original: the configuration that it was made from, by leaving out levels and changing values.
        drafters: names of drafters, as plugins know them.
        file: assigns `original`: what is an object there cannot be written out, and is taken from that file.

    Raises:
        ConfigError: it holds an object, and there is no file to take it from.
    """
    levels = _levels(config, original, list(drafters))
    if all(map(_is_plain, (config.plugins, *levels))):
        changed, made, before = _changed(config, ("levels",)), "CascadeConfig(", ""
        written = [_text(level) for level in levels]
    elif file is None:
        raise ConfigError("this cascade has an object in its configuration, and no file to take it from")
    else:
        changed, made, before = (
            _differing(config, original),
            "replace(\n    whole,",
            f"whole = load_config({_text(file)})\n",
        )
        written = [_text(level) if _is_plain(level) else _taken(level, original, list(drafters)) for level in levels]
    body = "".join(f"        {level},\n" for level in written)
    body = f"{before}config = {made}\n    levels=[\n{body}    ],\n" + "".join(f"    {part},\n" for part in changed)
    names = [name for name in IMPORTED if re.search(rf"\b{name}\(", body)]
    head = "from dataclasses import replace\n\n" if before else ""
    return f"{head}from cascade import {', '.join(names)}\n\n{body})\n"


def _levels(config: CascadeConfig, original: CascadeConfig, drafters: Sequence[str]) -> list[LevelConfig]:
    """The levels, with a name only where the user gave one, or where without it the level would have another now."""
    named = zip(original.levels, normalise_levels(original, drafters), strict=True)
    own = {str(level.name) for item, level in named if isinstance(item, LevelConfig) and item.name is not None}
    levels = [level if level.name in own else replace(level, name=None) for level in config.levels]
    found = normalise_levels(CascadeConfig(levels=levels), drafters)
    return [
        level if now.name == whole.name else whole
        for level, now, whole in zip(levels, found, config.levels, strict=True)
    ]


def _taken(level: LevelConfig, original: CascadeConfig, drafters: Sequence[str]) -> str:
    """A level that is in `whole`, with what was changed."""
    named = normalise_levels(original, drafters)
    place = next(i for i, other in enumerate(named) if (other.model, other.drafter) == (level.model, level.drafter))
    old, there = original.levels[place], f"whole.levels[{place}]"
    if isinstance(old, LevelConfig):
        changes = ", ".join(_differing(level, old))
        return f"replace({there}, {changes})" if changes else there
    kind = "drafter" if level.model is None else "model"
    changes = ", ".join(_changed(level, (kind,)))
    return f"LevelConfig({kind}={there}{', ' + changes if changes else ''})" if changes else there


def _differing(value: Any, old: Any) -> list[str]:
    """The fields that are not as they were, as keyword arguments."""
    parts = []
    for field in fields(value):
        now, before = getattr(value, field.name), getattr(old, field.name)
        if field.name == "levels" or now is before or now == before:
            continue
        if field.name == "plugins":  # of which there are only more
            parts.append(f"plugins=[*whole.plugins, {', '.join(map(_text, now[len(before) :]))}]")
        else:
            parts.append(f"{field.name}={_text(now)}")
    return parts


def _changed(value: Any, skip: tuple[str, ...] = ()) -> list[str]:
    """The fields that are not at their default, as keyword arguments."""
    parts = []
    for field in fields(value):
        default = field.default if field.default_factory is MISSING else field.default_factory()
        found = getattr(value, field.name)
        if field.name not in skip and found is not default and found != default:
            parts.append(f"{field.name}={_text(found)}")
    return parts


def _text(value: Any) -> str:
    if isinstance(value, (LevelConfig, BypassConfig)):
        return f"{type(value).__name__}({', '.join(_changed(value))})"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_text, value))}]"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)


def _is_plain(value: Any) -> bool:
    """Whether a value can be written out."""
    if isinstance(value, (LevelConfig, BypassConfig)):
        return all(_is_plain(getattr(value, field.name)) for field in fields(value))
    if isinstance(value, Mapping):
        return all(_is_plain(part) for part in value.items())
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (str, int, float, bool))
