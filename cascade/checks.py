"""How configuration dataclasses refuse what they are given: early, in one line, in the user's words."""

from __future__ import annotations

import inspect
import math
import os
from collections.abc import Callable
from dataclasses import fields
from typing import Any

from cascade.errors import ConfigError, did_you_mean


def strict(cls: type) -> type:
    """Class decorator: an unknown keyword is a ConfigError with a suggestion, not a TypeError."""
    names = {f.name for f in fields(cls)}
    init = cls.__init__  # type: ignore[misc]
    signature = inspect.signature(init)

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        for key in kwargs:
            if key not in names:
                raise ConfigError(f"{cls.__name__} has no field {key!r}.{did_you_mean(key, names)}")
        try:
            signature.bind(self, *args, **kwargs)
        except TypeError as error:
            raise ConfigError(f"{cls.__name__}: {error}") from None
        init(self, *args, **kwargs)

    __init__.__wrapped__ = init  # type: ignore[attr-defined]
    cls.__init__ = __init__  # type: ignore[misc]
    return cls


def require(ok: bool, message: str) -> None:
    """Raises ConfigError with this message unless `ok`."""
    if not ok:
        raise ConfigError(message)


def check(config: Any, name: str, ok: Callable[[Any], bool], must: str, of: str = "") -> None:
    """Raises ConfigError unless the value of a field is `ok`; `must` says what it has to do, `of` whose it is."""
    value = getattr(config, name)
    require(ok(value), f"{of}{name} must {must}, not {value!r}")


def is_int(value: Any) -> bool:
    """An integer that is no bool."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_name(value: Any) -> bool:
    """A string with something in it."""
    return isinstance(value, str) and value != ""


def is_path(value: Any) -> bool:
    """Where a file is or could be: a non-empty string or a path object."""
    return is_name(value) or isinstance(value, os.PathLike)


def is_share(value: Any) -> bool:
    """A number in [0, 1]."""
    return is_number(value) and 0 <= value <= 1


def is_threshold(value: Any) -> bool:
    """What a bypass may go by: a number in [0, 1], "auto", or None for the usual."""
    return value is None or value == "auto" or is_share(value)


def at_least(least: int) -> Callable[[Any], bool]:
    """Whether a value is an integer >= `least`."""
    return lambda value: is_int(value) and value >= least


def is_number(value: Any) -> bool:
    """A finite number that is no bool."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
