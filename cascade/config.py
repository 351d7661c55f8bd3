"""The configuration a user writes: frozen dataclasses that refuse early, in the user's words."""

from __future__ import annotations

import math
import runpy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from cascade.errors import CascadeError, ConfigError, did_you_mean

DTYPES = ("bfloat16", "float32", "float16", "float64", "int8")


def strict(cls: type) -> type:
    """Class decorator: an unknown keyword is a ConfigError with a suggestion, not a TypeError."""
    names = {f.name for f in fields(cls)}
    init = cls.__init__  # type: ignore[misc]

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        for key in kwargs:
            if key not in names:
                raise ConfigError(f"{cls.__name__} has no field {key!r}.{did_you_mean(key, names)}")
        init(self, *args, **kwargs)

    __init__.__wrapped__ = init  # type: ignore[attr-defined]
    cls.__init__ = __init__  # type: ignore[misc]
    return cls


def _require(ok: bool, message: str) -> None:
    if not ok:
        raise ConfigError(message)


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


@strict
@dataclass(frozen=True)
class SamplingParams:
    """How one request is decoded. Temperature 0 is greedy.

    Attributes:
        max_new_tokens: at most this many tokens are generated.
        min_new_tokens: end tokens are impossible before this many.
        temperature, top_k, top_p, min_p: the usual filters, applied in this order; 0, 0, 1 and 0
            switch them off. top_k keeps ties; top_p orders by (probability falling, id rising).
        repetition_penalty: as in CTRL (Keskar et al. 2019, section 4.1), over prompt and output.
        seed: decides the text under the rule `coupled`; None draws a fresh one.
        n: how many samples of the prompt; sample 0 uses the seed itself.
        stop: strings that end the text; it is cut before the earliest.
        stop_token_ids: ids that end the text, beside the model's own end tokens.
        ignore_eos: the model's own end tokens are ordinary tokens.
        logprobs: report the chosen token and this many of the likeliest, per token.
        logits_processors: objects called as f(input_ids [1, L], scores [1, V]) -> scores, once per
            emitted token on its true prefix, before the filters above.
        speculate: False is plain decoding.
        levels: names of the levels that may propose for this request; None means all.
        bypass_threshold: overrides the levels' bypass threshold, and is obeyed alone.
    """

    max_new_tokens: int = 128
    min_new_tokens: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    n: int = 1
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    logits_processors: Sequence[Callable[..., Any]] = ()
    speculate: bool = True
    levels: Sequence[str] | None = None
    bypass_threshold: float | None = None

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        for name in ("stop", "stop_token_ids", "logits_processors"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        for name in ("max_new_tokens", "min_new_tokens", "top_k"):
            value = getattr(self, name)
            _require(_is_int(value) and value >= 0, f"{name} must be an integer >= 0, not {value!r}")
        if self.min_new_tokens > self.max_new_tokens:
            raise ConfigError(
                f"min_new_tokens ({self.min_new_tokens}) must not exceed max_new_tokens ({self.max_new_tokens})"
            )
        _require(
            _is_number(self.temperature) and self.temperature >= 0,
            f"temperature must be a number >= 0, not {self.temperature!r}",
        )
        _require(_is_number(self.top_p) and 0 < self.top_p <= 1, f"top_p must lie in (0, 1], not {self.top_p!r}")
        _require(_is_number(self.min_p) and 0 <= self.min_p <= 1, f"min_p must lie in [0, 1], not {self.min_p!r}")
        _require(
            _is_number(self.repetition_penalty) and self.repetition_penalty > 0,
            f"repetition_penalty must be a number > 0, not {self.repetition_penalty!r}",
        )
        _require(self.seed is None or _is_int(self.seed), f"seed must be an integer or None, not {self.seed!r}")
        _require(_is_int(self.n) and self.n >= 1, f"n must be an integer >= 1, not {self.n!r}")
        for text in self.stop:
            _require(isinstance(text, str) and text != "", f"a stop string must be a non-empty string, not {text!r}")
        for token in self.stop_token_ids:
            _require(_is_int(token) and token >= 0, f"stop_token_ids must be ids >= 0, not {token!r}")
        _require(
            self.logprobs is None or (_is_int(self.logprobs) and self.logprobs >= 0),
            f"logprobs must be an integer >= 0 or None, not {self.logprobs!r}",
        )
        for processor in self.logits_processors:
            _require(callable(processor), f"logits_processors must be callable, not {processor!r}")
        if isinstance(self.levels, str):
            object.__setattr__(self, "levels", (self.levels,))
        _require(
            self.bypass_threshold is None or (_is_number(self.bypass_threshold) and 0 <= self.bypass_threshold <= 1),
            f"bypass_threshold must lie in [0, 1], not {self.bypass_threshold!r}",
        )


@strict
@dataclass(frozen=True)
class BypassConfig:
    """When a level stops proposing for a request.

    Attributes:
        threshold: the level is bypassed where alpha (accepted / tested) is below it. One that the
            user sets is obeyed alone; left out, it is 0.3 (the figure that practice uses) and the
            measured cost must agree that speculation brings nothing.
        gain: whether the measured cost has a say; follows from `threshold` unless given.
        min_tests: no verdict before this many tested tokens.
        probe_every: a bypassed level is tested again after this many tokens, at first...
        probe_max: ...and after at most so many, unless a probe would cost more than 1.5 % then.
    """

    threshold: float | None = None
    gain: bool | None = None
    min_tests: int = 8
    probe_every: int = 8
    probe_max: int = 32

    def __post_init__(self) -> None:
        if self.gain is None:
            object.__setattr__(self, "gain", self.threshold is None)
        if self.threshold is None:
            object.__setattr__(self, "threshold", 0.3)
        _require(
            _is_number(self.threshold) and 0 <= float(self.threshold or 0) <= 1,
            f"bypass threshold must lie in [0, 1], not {self.threshold!r}",
        )
        for name in ("min_tests", "probe_every", "probe_max"):
            value = getattr(self, name)
            _require(_is_int(value) and value >= 1, f"bypass {name} must be an integer >= 1, not {value!r}")


@strict
@dataclass(frozen=True)
class LevelConfig:
    """One level of a cascade: exactly one of `drafter` and `model`.

    Attributes:
        drafter: a registered name, or a Drafter object.
        model: a hub name, a folder, a GGUF file, a transformers model object, or "self" (a copy of
            the target in `dtype`).
        name: how stats call the level; made unique if left out.
        dtype: "bfloat16", "float32", "float16", "float64" or "int8" (a quantised draft).
        device: as torch names it.
        tokenizer: for a model object, or where the model's folder has none.
        k: the first number of tokens to propose; with the controller `fixed` the only one.
        k_min, k_max: bounds of K.
        controller: the registered name of the policy that sets K.
        bypass: overrides the cascade's.
        tail: reserved for the level's appended guesses.
        options: reach the drafter's and the controller's constructors as keyword arguments.
    """

    drafter: Any = None
    model: Any = None
    name: str | None = None
    dtype: Any = None
    device: Any = None
    tokenizer: Any = None
    k: int | None = None
    k_min: int = 1
    k_max: int = 16
    controller: str = "pid"
    bypass: BypassConfig | None = None
    tail: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if (self.drafter is None) == (self.model is None):
            raise ConfigError("a level needs exactly one of drafter=... and model=...")
        if self.dtype is not None:
            name = str(self.dtype).removeprefix("torch.")
            if name not in DTYPES:
                raise ConfigError(f"unknown dtype {name!r}.{did_you_mean(name, DTYPES)}")
            object.__setattr__(self, "dtype", name)
        for key in ("k_min", "k_max"):
            value = getattr(self, key)
            _require(_is_int(value) and value >= 0, f"{key} must be an integer >= 0, not {value!r}")
        _require(self.k_min <= self.k_max, f"k_min ({self.k_min}) must not exceed k_max ({self.k_max})")
        if self.k is not None:
            _require(
                _is_int(self.k) and (self.k == 0 or self.k_min <= self.k <= self.k_max),
                f"k must lie between k_min ({self.k_min}) and k_max ({self.k_max}), not {self.k!r}",
            )


@strict
@dataclass(frozen=True)
class CascadeConfig:
    """A cascade, bottom to top; the last level is the target.

    In `levels` a bare string is a registered drafter if one has that name, else a model; a bare
    object is a Drafter or a model. `seed` seeds the sequence of requests that bring no seed.
    """

    levels: Sequence[Any]
    rule: str = "coupled"
    bypass: BypassConfig = field(default_factory=BypassConfig)
    max_batch: int = 8
    max_length: int | None = None
    seed: int | None = None
    plugins: Sequence[Any] = ()

    def __post_init__(self) -> None:
        if isinstance(self.levels, str) or not isinstance(self.levels, Sequence):
            raise ConfigError("levels must be a list, bottom to top, with the target last")
        object.__setattr__(self, "levels", tuple(self.levels))
        object.__setattr__(self, "plugins", tuple(self.plugins))
        _require(len(self.levels) > 0, "a cascade needs a target: levels is empty")
        _require(
            _is_int(self.max_batch) and self.max_batch >= 1,
            f"max_batch must be an integer >= 1, not {self.max_batch!r}",
        )
        _require(
            self.max_length is None or (_is_int(self.max_length) and self.max_length >= 2),
            f"max_length must be an integer >= 2 or None, not {self.max_length!r}",
        )
        _require(self.seed is None or _is_int(self.seed), f"seed must be an integer or None, not {self.seed!r}")


def normalise_levels(config: CascadeConfig, drafter_names: Sequence[str]) -> list[LevelConfig]:
    """The levels as `LevelConfig`s with unique names; checks that the last one is a model."""
    levels: list[LevelConfig] = []
    for item in config.levels:
        if isinstance(item, LevelConfig):
            level = item
        elif isinstance(item, str):
            level = LevelConfig(drafter=item) if item in drafter_names else LevelConfig(model=item)
        else:
            level = LevelConfig(drafter=item) if hasattr(item, "propose") else LevelConfig(model=item)
        levels.append(level)
    if levels[-1].model is None:
        raise ConfigError("a cascade needs a target: its last level must be a model")
    if levels[-1].model == "self":
        raise ConfigError('model="self" is a copy of the target: it cannot be the target itself')
    return [replace(level, name=name) for level, name in zip(levels, _unique_names(levels), strict=True)]


def _unique_names(levels: Sequence[LevelConfig]) -> list[str]:
    given = [level.name for level in levels if level.name]
    for name in given:
        if given.count(name) > 1:
            raise ConfigError(f"two levels are named {name!r}: give each its own name")
    names: list[str] = []
    for level in levels:
        name = base = level.name or _default_name(level)
        number = 2
        while level.name is None and (name in names or name in given):
            name, number = f"{base}-{number}", number + 1
        names.append(name)
    return names


def _default_name(level: LevelConfig) -> str:
    source = level.drafter if level.model is None else level.model
    if isinstance(source, str):
        base = Path(source).name.removesuffix(".gguf") or source
        return f"{base}-{level.dtype}" if source == "self" and level.dtype else base
    if isinstance(source, (list, tuple)):
        return "+".join(s if isinstance(s, str) else type(s).__name__ for s in source)
    where = getattr(getattr(source, "config", None), "_name_or_path", "")
    return Path(where).name if where else type(source).__name__


def load_config(path: str | Path) -> CascadeConfig:
    """Runs a Python file and returns its `config`. Raises ConfigError, naming the file and the line."""
    file = Path(path)
    if not file.is_file():
        raise ConfigError(f"no config file {str(path)!r}")
    try:
        names = runpy.run_path(str(file))
    except CascadeError as error:
        raise ConfigError(f"{file}: {error}") from None
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{file}:{_line_in(file, error)}: {type(error).__name__}: {error}") from error
    config = names.get("config")
    if not isinstance(config, CascadeConfig):
        raise ConfigError(f"{file} must assign a CascadeConfig to the name 'config'")
    return config


def _line_in(file: Path, error: BaseException) -> int:
    if isinstance(error, SyntaxError) and error.lineno:
        return error.lineno
    line, trace = 0, error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == str(file):
            line = trace.tb_lineno
        trace = trace.tb_next
    return line
