"""Logits processors and stopping criteria as objects: what may be one, and one for each request."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterable
from typing import Any

from cascade.errors import ConfigError, name_of


def check_callables(kind: str, given: Iterable[Any]) -> None:
    """Raises ConfigError unless all of them are objects to be called with (input_ids, scores)."""
    for one in given:
        if isinstance(one, type):
            raise ConfigError(f"{kind} {one.__name__} is a class: give an object of it, {one.__name__}(...)")
        if not callable(one):
            raise ConfigError(f"{kind} {one!r:.60} cannot be called as f(input_ids, scores)")
        try:
            inspect.signature(one).bind(None, None)
        except ValueError:  # some built-in callables have no signature
            continue
        except TypeError:
            raise ConfigError(f"{kind} {name_of(one)} cannot be called as f(input_ids, scores)") from None


def for_request(one: Any) -> Any:
    """What a request uses of a processor or criterion.

    Its own where it has a method `for_request()`; a fresh copy of those of transformers that keep a state; else itself.
    """
    if hasattr(one, "for_request"):
        return one.for_request()
    if not type(one).__module__.startswith("transformers."):
        return one
    own = copy.copy(one)
    if isinstance(own, list):
        own[:] = map(for_request, own)
    elif hasattr(own, "unconditional_context"):  # where guidance keeps its cache
        own.unconditional_context = dict(own.unconditional_context)
    elif hasattr(own, "state"):  # of a watermark, made on the first call
        own.state = None
    else:
        return one
    return own
