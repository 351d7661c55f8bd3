"""The configuration a user writes: frozen dataclasses that refuse early, in the user's words."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from cascade.callables import check_callables, for_request
from cascade.checks import at_least, check, is_int, is_name, is_number, is_path, is_share, is_threshold, require, strict
from cascade.errors import ConfigError, did_you_mean

TREES = ("chain", "dynamic")
DTYPES = ("bfloat16", "float32", "float16", "float64", "int8", "int4")
A_BYPASS = "be a BypassConfig, such as BypassConfig(threshold=0.3)"


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
            emitted token on its true prefix, in order, before the filters above: transformers' own, or any
            others. One with a method `for_request()` is asked for a copy per request, which may keep state;
            those of transformers' own that keep one are copied.
            One with a true attribute `for_drafts` promises to be cheap and to keep none: draft models apply it
            as well. Of transformers' own these are known.
        stopping_criteria: objects called as f(input_ids [1, L], None) -> bool, or a tensor of one, once per
            emitted token, which is the last of `input_ids`: True ends the text there. `for_request()` as above.
        speculate: False is plain decoding.
        levels: names of the levels that may propose for this request; None means all.
        bypass_threshold: overrides the levels' bypass threshold, and is obeyed alone; "auto": measured cost decides.
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
    stopping_criteria: Sequence[Callable[..., Any]] = ()
    speculate: bool = True
    levels: Sequence[str] | None = None
    bypass_threshold: float | str | None = None

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        if isinstance(self.levels, str):
            object.__setattr__(self, "levels", (self.levels,))
        for name in ("stop", "stop_token_ids", "logits_processors", "stopping_criteria", "levels"):
            value = getattr(self, name)
            require(value is None or isinstance(value, Iterable), f"{name} must be a list, not {value!r}")
            if value is not None or name != "levels":  # None means no stop strings, but all levels
                object.__setattr__(self, name, () if value is None else tuple(value))
        for name in ("ignore_eos", "speculate"):
            check(self, name, lambda v: isinstance(v, bool), "be True or False")
        for name in ("max_new_tokens", "min_new_tokens", "top_k"):
            check(self, name, at_least(0), "be an integer >= 0")
        require(
            self.min_new_tokens <= self.max_new_tokens,
            f"min_new_tokens ({self.min_new_tokens}) must not exceed max_new_tokens ({self.max_new_tokens})",
        )
        check(self, "temperature", lambda v: is_number(v) and v >= 0, "be a number >= 0")
        check(self, "top_p", lambda v: is_number(v) and 0 < v <= 1, "lie in (0, 1]")
        check(self, "min_p", is_share, "lie in [0, 1]")
        check(self, "repetition_penalty", lambda v: is_number(v) and v > 0, "be a number > 0")
        check(self, "seed", lambda v: v is None or is_int(v), "be an integer or None")
        check(self, "n", at_least(1), "be an integer >= 1")
        check(self, "logprobs", lambda v: v is None or at_least(0)(v), "be an integer >= 0 or None")
        check(self, "bypass_threshold", is_threshold, 'lie in [0, 1] or be "auto"')
        for text in self.stop:
            require(is_name(text), f"a stop string must be a non-empty string, not {text!r}")
        for token in self.stop_token_ids:
            require(at_least(0)(token), f"stop_token_ids must be ids >= 0, not {token!r}")
        check_callables("logits_processors:", self.logits_processors)
        check_callables("stopping_criteria:", self.stopping_criteria)
        for level in self.levels or ():
            require(isinstance(level, str), f"levels must be names of levels, not {level!r}")

    def for_request(self) -> SamplingParams:
        """The same with processors and criteria of one request's own."""
        if not self.logits_processors and not self.stopping_criteria:
            return self
        given = self.logits_processors, self.stopping_criteria
        processors, criteria = (tuple(map(for_request, some)) for some in given)
        return replace(self, logits_processors=processors, stopping_criteria=criteria)

    @property
    def greedy(self) -> bool:
        """Whether no chance is involved."""
        return self.temperature == 0 or self.top_k == 1

    def ends(self, end_ids: Iterable[int]) -> frozenset[int]:
        """The ids that end a text: `stop_token_ids`, and the model's own unless they are ignored."""
        return frozenset(self.stop_token_ids) | frozenset(() if self.ignore_eos else end_ids)


@strict
@dataclass(frozen=True)
class BypassConfig:
    """When a level stops proposing for a request.

    Attributes:
        threshold: the level is bypassed where alpha (accepted / tested) is below it. One that the
            user sets is obeyed alone; left out, it is 0.3 (the figure that practice uses) and the
            measured cost must agree that speculation brings nothing; with "auto" cost alone decides.
        gain: whether the measured cost has a say; follows from `threshold` unless given.
        min_tests: no verdict before this many tested tokens.
        probe_every: a bypassed level is tested again after this many tokens, at first...
        probe_max: ...and after at most so many, unless a probe would cost more than 2 % then.
    """

    threshold: Any = None
    gain: bool | None = None
    min_tests: int = 8
    probe_every: int = 8
    probe_max: int = 32

    def __post_init__(self) -> None:
        by_cost = self.threshold in (None, "auto")
        object.__setattr__(self, "gain", by_cost if self.gain is None else self.gain)
        check(self, "threshold", is_threshold, 'lie in [0, 1] or be "auto"', "bypass ")
        require(self.threshold != "auto" or self.gain is True, 'bypass threshold "auto" leaves all to gain=True')
        object.__setattr__(self, "threshold", (0.3 if self.threshold is None else 0.0) if by_cost else self.threshold)
        require(isinstance(self.gain, bool), f"bypass gain must be True, False or None, not {self.gain!r}")
        for name in ("min_tests", "probe_every", "probe_max"):
            value = getattr(self, name)
            require(at_least(1)(value), f"bypass {name} must be an integer >= 1, not {value!r}")
        require(
            self.probe_every <= self.probe_max,
            f"bypass probe_every ({self.probe_every}) must not exceed probe_max ({self.probe_max})",
        )


@strict
@dataclass(frozen=True)
class LevelConfig:
    """One level of a cascade: exactly one of `drafter` and `model`.

    Attributes:
        drafter: a registered name, a Drafter object, or a list of such and of `LevelConfig`s whose proposals are
            merged into one tree.
        model: a hub name, a folder, a GGUF file, a transformers model object, or "self" (a copy of
            the target in `dtype`).
        name: how stats call the level; made unique if left out.
        dtype: "bfloat16", "float32", "float16", "float64", "int8" or "int4" (quantised drafts).
        device: as torch names it.
        tokenizer: for a model object, or where the model's folder has none.
        k: the first number of tokens to propose; with the controller `fixed` the only one.
        k_min, k_max: bounds of K.
        controller: the registered name of the policy that sets K.
        bypass: overrides the cascade's.
        tail: a middle level appends guesses of the drafter below to its own tokens, for the level above to verify.
        tree: the shape of what a model proposes: "chain"; "dynamic", the nodes most likely to be accepted, as many as
            pay; or numbers of children by depth, such as (3, 2, 1): then a drafter below is only asked when this level
            is bypassed. K is its depth.
            None: dynamic where a controller that adapts weighs it and trees keep the target's bits, else a chain.
        budget: how many nodes a tree may have, of a model as of any drafter that proposes one.
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
    tree: Any = None
    budget: int = 32
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        one = (self.drafter is None) != (self.model is None)
        require(one, "a level needs exactly one of drafter=... and model=...")
        if isinstance(self.drafter, (list, tuple)):
            object.__setattr__(self, "drafter", tuple(self.drafter))
            require(len(self.drafter) > 0, "drafter is an empty list: name at least one drafter")
        require(self.name is None or is_name(self.name), f"a level's name must be a string, not {self.name!r}")
        check(self, "controller", is_name, "be a registered name")
        require(
            isinstance(self.options, Mapping) and all(isinstance(key, str) for key in self.options),
            f"options must be a dict with strings as keys, not {self.options!r}",
        )
        check(self, "bypass", lambda v: v is None or isinstance(v, BypassConfig), A_BYPASS)
        if self.dtype is not None:
            name = str(self.dtype).removeprefix("torch.")
            if name not in DTYPES:
                raise ConfigError(f"unknown dtype {name!r}.{did_you_mean(name, DTYPES)}")
            object.__setattr__(self, "dtype", name)
        for key in ("k_min", "k_max"):
            check(self, key, at_least(0), "be an integer >= 0")
        require(self.k_min <= self.k_max, f"k_min ({self.k_min}) must not exceed k_max ({self.k_max})")
        check(self, "budget", at_least(1), "be an integer >= 1")
        if self.tree is not None and not isinstance(self.tree, str):
            many = isinstance(self.tree, (list, tuple))
            object.__setattr__(self, "tree", tuple(self.tree) if many else (self.tree,))
        require(
            self.tree in (None, *TREES)
            or (isinstance(self.tree, tuple) and self.tree != () and all(map(at_least(1), self.tree))),
            f'tree must be "chain", "dynamic" or numbers of children by depth such as (3, 2, 1), not {self.tree!r}',
        )
        if self.k is not None:
            require(
                is_int(self.k) and (self.k == 0 or self.k_min <= self.k <= self.k_max),
                f"k must lie between k_min ({self.k_min}) and k_max ({self.k_max}), not {self.k!r}",
            )


@strict
@dataclass(frozen=True)
class CascadeConfig:
    """A cascade, bottom to top; the last level is the target.

    Attributes:
        levels: `LevelConfig`s. A bare string is a registered drafter if one has that name, else a model;
            a bare object is a Drafter or a model.
        rule: the registered verification rule.
        bypass: when levels stop proposing; a level or a request can have its own.
        max_batch: requests decoded at once; more wait their turn.
        max_length: an upper limit for prompt and output together, besides the models' own.
        seed: seeds the sequence of requests that bring no seed.
        plugins: module names, files, modules or objects with hooks, besides the installed ones.
        costs: a file that `Engine.save_costs` wrote, or will: where it fits, an engine starts with its costs.
    """

    levels: Sequence[Any]
    rule: str = "coupled"
    bypass: BypassConfig = field(default_factory=BypassConfig)
    max_batch: int = 8
    max_length: int | None = None
    seed: int | None = None
    plugins: Sequence[Any] = ()
    costs: Any = None

    def __post_init__(self) -> None:
        if isinstance(self.levels, str) or not isinstance(self.levels, Sequence):
            raise ConfigError("levels must be a list, bottom to top, with the target last")
        object.__setattr__(self, "levels", tuple(self.levels))
        many = isinstance(self.plugins, (list, tuple))
        object.__setattr__(self, "plugins", tuple(self.plugins) if many else (self.plugins,))
        require(len(self.levels) > 0, "a cascade needs a target: levels is empty")
        check(self, "rule", is_name, "be a registered name")
        check(self, "bypass", lambda v: isinstance(v, BypassConfig), A_BYPASS)
        check(self, "max_batch", at_least(1), "be an integer >= 1")
        check(self, "max_length", lambda v: v is None or at_least(2)(v), "be an integer >= 2 or None")
        check(self, "seed", lambda v: v is None or is_int(v), "be an integer or None")
        check(self, "costs", lambda v: v is None or is_path(v), "be a path or None")


def normalise_levels(config: CascadeConfig, drafter_names: Sequence[str]) -> list[LevelConfig]:
    """The levels as `LevelConfig`s with unique names; checks that the last one is a model."""
    levels = [as_level(item, drafter_names) for item in config.levels]
    if levels[-1].model is None:
        raise ConfigError("a cascade needs a target: its last level must be a model")
    if levels[-1].model == "self":
        raise ConfigError('model="self" is a copy of the target: it cannot be the target itself')
    return [replace(level, name=name) for level, name in zip(levels, _unique_names(levels), strict=True)]


def as_level(item: Any, drafter_names: Sequence[str]) -> LevelConfig:
    """What a user wrote as a level, or as a member of a merged one, as a `LevelConfig`."""
    if isinstance(item, LevelConfig):
        return item
    if not isinstance(item, str):
        return LevelConfig(drafter=item) if hasattr(item, "propose") else LevelConfig(model=item)
    level = LevelConfig(drafter=item) if item in drafter_names else LevelConfig(model=item)
    if level.model is not None and (near := difflib.get_close_matches(item, drafter_names, 1, 0.75)):
        raise ConfigError(f"no drafter is named {item!r}. Did you mean {near[0]!r}? A model: model={item!r}")
    return level


_OF_A_LEVEL = ("k", "k_min", "k_max", "controller", "bypass", "budget", "tail")  # whatever is merged at it


def members_of(level: LevelConfig, drafter_names: Sequence[str]) -> list[LevelConfig]:
    """The drafters that are merged at one level, with unique names; none where it is a single one.

    Raises:
        ConfigError: what one of them cannot be.
    """
    if not isinstance(level.drafter, tuple):
        return []
    members = [as_level(item, drafter_names) for item in level.drafter]
    for member in members:
        if isinstance(member.drafter, tuple):
            raise ConfigError(f"level {level.name!r} merges a list within a list: write one list")
        whole = next((key for key in _OF_A_LEVEL if getattr(member, key) != getattr(LevelConfig, key)), None)
        why = f"level {level.name!r}: write {whole}= at the level, not at one of the drafters it merges"
        require(whole is None, why)
    return [
        replace(member, name=f"{level.name}/{name}")
        for member, name in zip(members, _unique_names(members), strict=True)
    ]


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
    if isinstance(source, tuple):
        parts = [s if isinstance(s, LevelConfig) else LevelConfig(drafter=s) for s in source]
        return "+".join(part.name or _default_name(part) for part in parts)
    where = getattr(getattr(source, "config", None), "_name_or_path", "")
    return Path(where).name if where else type(source).__name__
