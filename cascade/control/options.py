"""Checks of controllers' options: what is wrong is said in the user's words."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from cascade.errors import ConfigError

if TYPE_CHECKING:
    from cascade.control.base import Controller


def number(controller: Controller, name: str, low: float, high: float = math.inf, *, open_low: bool = False) -> float:
    """An option as a float, if it lies in [low, high) or, with `open_low`, in (low, high). Raises ConfigError."""
    value = controller.options[name]
    ok = isinstance(value, (int, float)) and not isinstance(value, bool)
    if ok and (value > low if open_low else value >= low) and value < high:
        return float(value)
    bounds = f"{'> ' if open_low else '>= '}{low:g}" + (f" and < {high:g}" if high < math.inf else " and finite")
    kind = type(controller).__name__.lower()
    raise ConfigError(f"option {name} of the controller {kind} must be a number {bounds}, not {value!r}")
