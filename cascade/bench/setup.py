"""What was measured, as plain values: what two runs must have in common to stand in one file, and what they found."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cascade.bench.questions import digest
from cascade.bench.systems import System, chain
from cascade.config import BypassConfig, CascadeConfig, LevelConfig, SamplingParams, normalise_levels
from cascade.level import Level

if TYPE_CHECKING:
    from cascade.engine import Engine


@dataclass(frozen=True)
class Plan:
    """What a bench is asked to do.

    Attributes:
        config: the cascade.
        questions: their file.
        params: how answers are decoded.
        against: the systems besides "cascade", in the order in which they are shown.
        sweep: whether every fixed setting of the cascade is measured too.
        limit: questions per category, None for all.
        batch: questions decoded at a time.
        repeats: how often each question is asked.
        files: config and plugin files, which decide what is measured as well.
    """

    config: CascadeConfig
    questions: Path
    params: SamplingParams
    against: Sequence[str] = ("plain",)
    sweep: bool = False
    limit: int | None = None
    batch: int = 1
    repeats: int = 1
    files: Sequence[Path] = ()

    def asked(self) -> dict[str, Any]:
        """What was asked of every answer, apart from the limit."""
        return {
            "max_new_tokens": self.params.max_new_tokens,
            "batch": self.batch,
            "repeats": self.repeats,
            "temperature": self.params.temperature,
            "top_k": self.params.top_k,
            "top_p": self.params.top_p,
            "seed": self.params.seed,
        }

    def configuration(self, drafter_names: Sequence[str]) -> dict[str, Any]:
        """What must be equal where a file is continued; known before a model is loaded. Raises ConfigError."""
        return {
            "levels": [
                _plain(level) | {"weights": _weights(level.model)}
                for level in normalise_levels(self.config, drafter_names)
            ],
            "rule": self.config.rule,
            "bypass": _plain(self.config.bypass),
            "max_length": self.config.max_length,
            "questions": digest(self.questions),
            "files": {path.name: digest(path) for path in self.files if path.is_file()},
            "systems": ["cascade", *self.against],
            "sweep": self.sweep,
            **self.asked(),
        }


def setup(plan: Plan, engine: Engine, systems: Sequence[System], skipped: Mapping[str, str]) -> dict[str, Any]:
    """The record of what is measured, for the file's head."""
    names = engine.plugins.drafter_names()
    levels = normalise_levels(engine.config, names)
    return {
        "levels": [_level(level, part) for level, (_, part) in zip(levels, chain(engine), strict=True)],
        "rule": engine.config.rule,
        "summary": engine.summary(),
        "questions": {"file": plan.questions.name, "sha256": digest(plan.questions)},
        "limit_per_category": plan.limit,
        **plan.asked(),
        "systems": {
            system.name: {"description": system.description, "settings": dict(system.settings)} for system in systems
        },
        "skipped": dict(skipped),
        "configuration": plan.configuration(names),
    }


def _level(level: LevelConfig, part: Any) -> dict[str, Any]:
    if not isinstance(part, Level):
        what = {"kind": "drafter", "what": type(part).__name__, "dtype": None, "parameters": None}
        return {"name": level.name, **what}
    module = getattr(part.model, "module", None)
    return {
        "name": level.name,
        "kind": "model",
        "what": level.model if isinstance(level.model, str) else type(module or level.model).__name__,
        "dtype": part.model.dtype,
        "parameters": getattr(part.model, "parameters", None),
    }


def _weights(model: Any) -> str | None:
    """A mark of a model's files, which changes when they do; None where they are not in a folder of the user's."""
    path = Path(model).expanduser() if isinstance(model, str) else None
    if path is None or not path.exists():
        return None
    found = sorted(path.iterdir()) if path.is_dir() else [path]
    marks = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in found if file.is_file()]
    return hashlib.sha256(repr(marks).encode()).hexdigest()[:16]


def _plain(value: Any) -> Any:
    """A field of a configuration as JSON has it; an object is the name of its class."""
    if isinstance(value, BypassConfig):
        return asdict(value)
    if isinstance(value, LevelConfig):  # of drafters that are merged
        return {field.name: _plain(getattr(value, field.name)) for field in fields(LevelConfig)}
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value if value is None or isinstance(value, (str, int, float, bool)) else type(value).__name__
