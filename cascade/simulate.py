"""Runs a cascade in virtual time: the real engine, on models that repeat what was recorded.

Everything but the models is what serves requests: the rounds, the drafters, control. A forward takes as long as a
cost model says, so a minute of decoding takes a second, on machines that nobody has.
"""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from cascade.config import CascadeConfig, LevelConfig, SamplingParams, members_of, normalise_levels
from cascade.control.base import Controller
from cascade.drafter import Drafter
from cascade.engine import Engine
from cascade.errors import ConfigError, cause_of, did_you_mean
from cascade.governor import PRIOR_ALPHA_SELF
from cascade.recording import Recording, Said
from cascade.replay import Replay, Timed, VirtualClock, as_they_are, numbered
from cascade.result import Result
from cascade.rows import Row

if TYPE_CHECKING:
    from cascade.costs import Costs
    from cascade.plugins import Plugins


@dataclass(frozen=True)
class Simulated:
    """What came of a simulation.

    Attributes:
        seconds: virtual time until all requests were over.
        results: one per recording, in order, with stats in virtual time.
        new_tokens: of all requests.
    """

    seconds: float
    results: tuple[Result, ...]
    new_tokens: int


def simulate(
    config: CascadeConfig,
    recordings: Sequence[Recording],
    costs: Costs,
    *,
    batch: int = 1,
    overhead: float = 0.0,
    params: SamplingParams | None = None,
    plugins: Plugins | None = None,
    engine_costs: Costs | None = None,
) -> Simulated:
    """Decodes what was recorded through a cascade, in virtual time.

    Whatever the rule and the temperature were, drafts are judged as `Coupled` does at temperature 0: what was recorded
    are the tokens that models chose, chance included. Rules that weigh distributions accept other shares of a draft
    than that.

    Args:
        config: the cascade. Its models are not loaded; those that are objects say whether they do trees, and how long
            a text they take. Its other drafters are made anew and draft for real, each time.
        recordings: a request each. All must have what the config's model levels said, by their names; a member of a
            merged level may go by its name alone.
        costs: how long forwards and proposals take, in truth. Not changed.
        batch: requests decoded at once; others wait, in order.
        overhead: seconds that pass after each forward and are nobody's.
        params: its `levels`, `bypass_threshold` and `speculate` count.
        plugins: a plugin manager; by default one as an engine makes it.
        engine_costs: the cost model of the engine itself; by default one that measures, as in a real engine.

    Raises:
        ConfigError: recordings, costs and config do not fit together, or as an engine would.
    """
    from cascade import plugins as plugin_module

    if not recordings:
        raise ConfigError("there is nothing to simulate: give at least one recording")
    plugins = plugin_module.create(*config.plugins) if plugins is None else plugins
    levels = normalise_levels(config, plugins.drafter_names())
    stage = _Stage(recordings, levels, plugins, costs, overhead)
    rule = plugins.rule(config.rule)
    played = CascadeConfig(
        levels=[stage.level(level) for level in levels],
        rule=config.rule if rule.coupled and rule.lossless else "coupled",
        bypass=config.bypass,
        max_batch=batch,
        seed=0,
    )
    engine = Engine(played, plugins=plugins, clock=stage.clock, costs=engine_costs)
    copies = {level.name for level in levels if isinstance(level.model, str) and level.model == "self"}
    for governor in engine.chain.governors:
        if governor.name in copies:  # which it would read off its model's name
            governor.prior = governor.alpha = PRIOR_ALPHA_SELF
    began = stage.clock.settled()
    with _unlogged():
        results = engine.generate([text.prompt.tolist() for text in stage.texts], _requests(recordings, params))
    for number, (text, result) in enumerate(zip(stage.texts, results, strict=True)):
        assert result.error is None, f"recording {number}: {result.error}"
        assert result.tokens == text.tokens.tolist(), f"recording {number}: the text is not what was recorded"
    new_tokens = sum(result.stats.new_tokens for result in results)
    return Simulated(stage.clock.settled() - began, tuple(results), new_tokens)


@contextlib.contextmanager
def _unlogged() -> Iterator[None]:
    """What an engine warns of is no news in a simulation."""
    logger = logging.getLogger("cascade")
    logger.addFilter(_nothing)
    try:
        yield
    finally:
        logger.removeFilter(_nothing)


def _nothing(record: logging.LogRecord) -> bool:
    return False


def _requests(recordings: Sequence[Recording], params: SamplingParams | None) -> list[SamplingParams]:
    kept = SamplingParams() if params is None else params
    return [
        SamplingParams(
            max_new_tokens=len(recording.tokens),
            ignore_eos=True,
            speculate=kept.speculate,
            levels=kept.levels,
            bypass_threshold=kept.bypass_threshold,
        )
        for recording in recordings
    ]


class _Stage:
    """What a simulation is played with: the texts, the clock, and what stands for a config's levels."""

    def __init__(
        self,
        recordings: Sequence[Recording],
        levels: Sequence[LevelConfig],
        plugins: Plugins,
        costs: Costs,
        overhead: float,
    ) -> None:
        self.clock = VirtualClock()
        self._plugins, self._costs, self._overhead = plugins, costs, overhead
        self._names = plugins.drafter_names()
        parts = [part for level in levels for part in members_of(level, self._names) or [level]]
        models = [str(part.name) for part in parts[:-1] if part.model is not None]
        self._known = {name: _known_as(name, recordings) for name in models}
        self._plain = all(part.drafter == "ngram" for part in parts if part.model is None)
        said = list(dict.fromkeys(self._known.values()))
        self.texts, self._size = (numbered if self._plain else as_they_are)(recordings, said)
        self._size = max(self._size, 0 if self._plain else getattr(levels[-1].model, "vocab_size", 0))

    def level(self, level: LevelConfig) -> LevelConfig:
        """The level with what stands for its model or its drafters."""
        members = members_of(level, self._names)
        if not members:
            return self._part(level, self._plugins.controller(level.controller))
        prefix = len(f"{level.name}/")
        parts = [replace(self._part(one, Controller), name=str(one.name)[prefix:]) for one in members]
        return replace(level, drafter=tuple(parts))

    def _part(self, part: LevelConfig, kind: type[Controller]) -> LevelConfig:
        """What stands for a level of one model or drafter; `kind` takes its options, the drafter those it does not."""
        name, drafter, options = str(part.name), part.drafter, dict(part.options)
        if part.model is not None:
            return replace(part, model=self._model(name, part.model), dtype=None, device=None, tokenizer=None)
        if isinstance(drafter, str):
            options = {key: value for key, value in part.options.items() if key in kind.defaults}
            theirs = {key: value for key, value in part.options.items() if key not in options}
            drafter = self._plugins.drafter(drafter, **theirs)
        elif isinstance(drafter, type) or not hasattr(drafter, "propose"):
            return part  # an engine says what is wrong with it
        else:
            drafter = _copied(name, drafter)
        alone = name.rpartition("/")[2]
        told = alone if self._costs.draft_seconds(name, 1, 1) is None else name
        return replace(part, drafter=Timed(told, drafter, self._costs, self.clock), options=options)

    def _model(self, name: str, model: Any) -> Replay:
        known = self._known.get(name)
        if known is None:  # the target, whose text it is
            said = [Said(text.tokens[:, None], np.ones((len(text.tokens), 1), np.float32)) for text in self.texts]
        else:
            said = [text.said[known] for text in self.texts]
        told = next((one for one in (known, name) if one and self._costs.seconds(one, 1, 1) is not None), None)
        if told is None:
            raise ConfigError(f"the costs say nothing of level {name!r}: measure it first")
        texts = [(len(text.prompt), one) for text, one in zip(self.texts, said, strict=True)]
        find = self._by_first if self._plain else self._by_all
        return Replay(told, texts, find, self._costs, self.clock, self._overhead, self._size, model)

    def _by_first(self, row: Row) -> int | None:
        """Of numbered texts, the first token is the text's number."""
        number = int(row.ids[0])
        return number if number < len(self.texts) else None

    def _by_all(self, row: Row) -> int | None:
        """The text that agrees with a row on most tokens, its prompt among them."""
        best, most = None, (-1, -1)
        for number, text in enumerate(self.texts):
            whole = np.concatenate([text.prompt, text.tokens])[: row.length]
            differs = whole != row.ids[: len(whole)]
            common = int(differs.argmax()) if differs.any() else len(whole)
            if common >= len(text.prompt) and (common, len(text.prompt)) > most:
                best, most = number, (common, len(text.prompt))
        return best


def _copied(name: str, drafter: Drafter) -> Drafter:
    """A copy of a drafter object, which serves one engine only. Raises ConfigError."""
    try:
        return copy.deepcopy(drafter)
    except Exception as error:
        raise ConfigError(
            f"level {name!r}: this drafter cannot be copied for a simulation: {cause_of(error)}"
        ) from error


def _known_as(name: str, recordings: Sequence[Recording]) -> str:
    """What recordings call a level: its name, or that of a member without what it is merged in. Raises ConfigError."""
    last = name.rpartition("/")[2]
    have = [other for other in recordings[0].said if all(other in one.said for one in recordings)]
    near = [other for other in have if other.rpartition("/")[2] == last]
    found = next((one for one in (name, last, *near) if one in have), None)
    if found is None:
        raise ConfigError(f"the recordings say nothing of level {name!r}.{did_you_mean(name, have)}")
    return found
