"""Cascade: multi-level speculative decoding.

The names below are the public surface. They are imported when they are first used (PEP 562), so that
a plugin's `from cascade import hookimpl`, or a command line that only lists plugins, costs no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOME = {
    "Ask": "cascade.draft",
    "AsyncStream": "cascade.stream",
    "BypassConfig": "cascade.config",
    "CascadeConfig": "cascade.config",
    "CascadeError": "cascade.errors",
    "Chunk": "cascade.result",
    "ConfigError": "cascade.errors",
    "Context": "cascade.draft",
    "CustomGenerate": "cascade.custom_generate",
    "DecodeError": "cascade.errors",
    "Draft": "cascade.draft",
    "DraftError": "cascade.errors",
    "Drafter": "cascade.drafter",
    "Engine": "cascade.engine",
    "LevelConfig": "cascade.config",
    "LevelStats": "cascade.result",
    "LoadError": "cascade.errors",
    "PluginError": "cascade.errors",
    "PromptError": "cascade.errors",
    "Result": "cascade.result",
    "SamplingParams": "cascade.config",
    "Session": "cascade.session",
    "Stats": "cascade.result",
    "Stream": "cascade.stream",
    "Verdict": "cascade.draft",
    "hookimpl": "cascade.hookspecs",
    "load_config": "cascade.config_file",
}

# For readers and type checkers; tests/test_architecture.py compares it with the table above.
if TYPE_CHECKING:
    from cascade.config import BypassConfig, CascadeConfig, LevelConfig, SamplingParams
    from cascade.config_file import load_config
    from cascade.custom_generate import CustomGenerate
    from cascade.draft import Ask, Context, Draft, Verdict
    from cascade.drafter import Drafter
    from cascade.engine import Engine
    from cascade.errors import (
        CascadeError,
        ConfigError,
        DecodeError,
        DraftError,
        LoadError,
        PluginError,
        PromptError,
    )
    from cascade.hookspecs import hookimpl
    from cascade.result import Chunk, LevelStats, Result, Stats
    from cascade.session import Session
    from cascade.stream import AsyncStream, Stream

__all__ = [
    "Ask",
    "AsyncStream",
    "BypassConfig",
    "CascadeConfig",
    "CascadeError",
    "Chunk",
    "ConfigError",
    "Context",
    "CustomGenerate",
    "DecodeError",
    "Draft",
    "DraftError",
    "Drafter",
    "Engine",
    "LevelConfig",
    "LevelStats",
    "LoadError",
    "PluginError",
    "PromptError",
    "Result",
    "SamplingParams",
    "Session",
    "Stats",
    "Stream",
    "Verdict",
    "__version__",
    "hookimpl",
    "load_config",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value  # the next access does not come here
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
