"""Who computes attention: the job that drives a model on this thread, or the model by itself.

A model is switched to our attention only while one of its forwards runs, so its owner may use it for
anything else in between. Another thread that uses it at that very moment finds no job of its own and
gets the attention that the model came with.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

NAME = "cascade"  # our attention, as transformers knows it

_thread = threading.local()
_lock = threading.Lock()
_driven: dict[int, list[Any]] = {}  # id of a config -> [forwards under way, the attention it came with]


def current_job() -> Any:
    """What computes attention for the forward that runs on this thread; None if nobody drives it."""
    return getattr(_thread, "job", None)


def own_attention(config: Any) -> str:
    """The name of the attention that a model with this config would use if nobody drove it."""
    entry = _driven.get(id(config))
    return entry[1] if entry else "sdpa"


@contextmanager
def driving(configs: Sequence[Any], job: Any) -> Iterator[None]:
    """Routes attention of the models with these configs to `job`, on this thread."""
    with _lock:
        for config in configs:
            entry = _driven.setdefault(id(config), [0, config._attn_implementation])
            entry[0] += 1
            config._attn_implementation_internal = NAME
    _thread.job = job
    try:
        yield
    finally:
        _thread.job = None
        with _lock:
            for config in configs:
                entry = _driven[id(config)]
                entry[0] -= 1
                if not entry[0]:
                    config._attn_implementation_internal = entry[1]
                    del _driven[id(config)]


_users: weakref.WeakKeyDictionary[Any, list[Any]] = weakref.WeakKeyDictionary()  # module -> [users, modes of parts]


def take(module: Any) -> None:
    """Notes in which mode (training or not) the parts of a module are when the first engine takes it."""
    with _lock:
        entry = _users.setdefault(module, [0, [(weakref.ref(part), part.training) for part in module.modules()]])
        entry[0] += 1


def give_back(module: Any) -> None:
    """Restores those modes once the last engine that drives the module is done with it."""
    with _lock:
        entry = _users.get(module)
        if entry is None:
            return
        entry[0] -= 1
        if not entry[0]:
            del _users[module]
            for part, training in entry[1]:
                if (alive := part()) is not None:
                    alive.training = training
