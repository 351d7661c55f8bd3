"""What settings of a cascade come to, by simulation, and the search among them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from cascade.config import BypassConfig, CascadeConfig, LevelConfig, SamplingParams, normalise_levels
from cascade.costs import FixedCosts
from cascade.planning.hardware import AssumedCosts, Told
from cascade.planning.measuring import spread
from cascade.recording import Recording
from cascade.simulate import Simulated, simulate

if TYPE_CHECKING:
    from cascade.costs import Costs
    from cascade.plugins import Plugins

KS = (1, 2, 3, 4, 6, 8, 12, 16)
MANY = 4  # lower levels up to which all subsets are tried; of more, what is left when one after the other goes
SEARCH_TOKENS = 1024  # of answers: enough to tell the K of one setting from another's
PASSES = 3  # over the levels of a setting

Ks = Mapping[str, int]


@dataclass(frozen=True)
class Setting:
    """A way to run a cascade, and what it comes to.

    Attributes:
        levels: those that propose, bottom to top; none is plain decoding.
        ks: by level the K that is fixed; None: the controllers decide.
        tokens_per_s: of all tokens in all the time.
        speedup: against plain decoding.
        tau: tokens per forward of the target.
    """

    levels: tuple[str, ...]
    ks: Ks | None
    tokens_per_s: float
    speedup: float
    tau: float


@dataclass(frozen=True)
class Choice:
    """A set of levels: under its own controllers, and with the best K that is fixed."""

    levels: tuple[str, ...]
    adaptive: Setting
    fixed: Setting


class Simulator:
    """Runs settings of a cascade in virtual time, each once.

    Args:
        config: the cascade.
        recordings: what is decoded.
        costs: makes the true costs, for each simulation anew.
        batch, overhead, plugins: see `simulate`.

    Attributes:
        batch, overhead: the same.
        config: the same, every level with its name.
        lower: the levels that may propose, bottom to top.
    """

    def __init__(
        self,
        config: CascadeConfig,
        recordings: Sequence[Recording],
        costs: Callable[[], Costs],
        batch: int,
        overhead: float,
        plugins: Plugins,
    ) -> None:
        *lower, self._target = normalise_levels(config, plugins.drafter_names())
        self.config = replace(config, levels=[*lower, self._target], costs=None)
        self.lower = {str(level.name): level for level in lower if level.k != 0}
        self.recordings = list(recordings)
        self._costs, self.batch, self.overhead, self._plugins = costs, batch, overhead, plugins
        self._some = spread(recordings, max(_enough(recordings), batch))
        self._seen: dict[Any, Setting] = {}
        self._trials: dict[Any, float] = {}

    def run(
        self, levels: Sequence[str], ks: Ks | None = None, recordings: Sequence[Recording] | None = None
    ) -> Simulated:
        """A simulation of some levels, at fixed K or under their own controllers, on all recordings or on some."""
        # Costs that nobody knows: no level is left out, or waits, for its price.
        unknown = None if ks is None else FixedCosts(lambda level, tokens: None)
        return self.simulated(self.config_of(levels, ks), recordings, engine_costs=unknown)

    def simulated(
        self,
        config: CascadeConfig,
        recordings: Sequence[Recording] | None = None,
        costs: Costs | None = None,
        engine_costs: Costs | None = None,
    ) -> Simulated:
        """A simulation of a configuration of these levels."""
        return simulate(
            config,
            self.recordings if recordings is None else recordings,
            self._costs() if costs is None else costs,
            batch=self.batch,
            overhead=self.overhead,
            params=SamplingParams(speculate=len(config.levels) > 1),
            plugins=self._plugins,
            engine_costs=engine_costs,
        )

    def setting(self, levels: Sequence[str], ks: Ks | None = None) -> Setting:
        """What a setting comes to on all recordings."""
        key = tuple(levels), None if ks is None else tuple(sorted(ks.items()))
        if key not in self._seen:
            done = self.run(levels, ks)
            rate = done.new_tokens / done.seconds
            plain = rate if not levels else self.setting(()).tokens_per_s
            forwards = sum(result.stats.target_forwards for result in done.results)
            self._seen[key] = Setting(tuple(levels), ks, rate, rate / plain, done.new_tokens / forwards)
        return self._seen[key]

    def choice(self, levels: Sequence[str]) -> Choice:
        """A set of levels both ways."""
        return Choice(tuple(levels), self.setting(levels), self.setting(levels, self.best_ks(levels)))

    def best_ks(self, levels: Sequence[str]) -> dict[str, int]:
        """The K of each level that together are fastest, one level's searched after the other's."""
        alone = len(levels) == 1
        ks = {name: self._first_k(name) if alone else self.best_ks([name])[name] for name in levels}
        for _ in range(PASSES):
            before = dict(ks)
            for name in reversed(levels):
                rates = {k: self._trial(levels, {**ks, name: k}) for k in self._allowed(name)}
                ks[name] = max(rates, key=rates.__getitem__)
            if ks == before or alone:
                break
        return ks

    def config_of(self, levels: Sequence[str], ks: Ks | None = None, first: Ks | None = None) -> CascadeConfig:
        """The cascade with some of its levels: at fixed K, or with a first K of their own."""
        chosen = [self.lower[name] for name in levels]
        chosen = [replace(level, tail=level.tail and i > 0) for i, level in enumerate(chosen)]
        if first is not None:
            chosen = [replace(level, k=first.get(str(level.name), level.k)) for level in chosen]
        bypass = self.config.bypass
        if ks is not None:
            chosen = [self._fixed(level, ks[str(level.name)]) for level in chosen]
            bypass = BypassConfig(threshold=0.0)  # one that is set is obeyed alone, and no alpha is under 0
        return replace(self.config, levels=[*chosen, self._target], bypass=bypass)

    def free(self, level: str, parts: Sequence[LevelConfig]) -> Simulated:
        """A level alone whose drafters, these, take no time."""
        names = [str(part.name) for part in parts]
        nothing = {name: Told(0.0) for name in (level, *names, *(name.rpartition("/")[2] for name in names))}
        return self.simulated(self.config_of([level]), costs=AssumedCosts(nothing, self._costs()))

    def _trial(self, levels: Sequence[str], ks: Ks) -> float:
        """Tokens per second on some of the recordings."""
        key = tuple(levels), tuple(sorted(ks.items()))
        if key not in self._trials:
            done = self.run(levels, ks, self._some)
            self._trials[key] = done.new_tokens / done.seconds
        return self._trials[key]

    def _allowed(self, name: str) -> list[int]:
        level = self.lower[name]
        return [k for k in KS if max(level.k_min, 1) <= k <= level.k_max] or [max(level.k_max, 1)]

    def _first_k(self, name: str) -> int:
        return self._allowed(name)[0]

    def _fixed(self, level: LevelConfig, k: int) -> LevelConfig:
        """A level that always proposes `k` tokens."""
        taken = set(self._plugins.controller(level.controller).defaults)  # options of the controller it no longer has
        options = {key: value for key, value in level.options.items() if key not in taken}
        return replace(
            level,
            controller="fixed",
            k=k,
            k_min=min(level.k_min, k),
            k_max=max(level.k_max, k),
            bypass=None,
            options=options if level.model is None else {},
        )


def _enough(recordings: Sequence[Recording]) -> int:
    """How many recordings, those of each category in turn, have tokens enough for a search."""
    total = 0
    for count, one in enumerate(spread(recordings, len(recordings)), 1):
        total += len(one.tokens)
        if total >= SEARCH_TOKENS:
            return count
    return len(recordings)


def choices(simulator: Simulator, tell: Callable[[str], None] = lambda text: None) -> list[Choice]:
    """The sets of levels that are worth a look, each both ways.

    Of up to `MANY` lower levels all sets that are not empty. Of more: each alone, all, and from there on whatever one
    level less makes of the best so far, until that is slower.
    """
    names = list(simulator.lower)
    found: dict[tuple[str, ...], Choice] = {}

    def look(levels: Sequence[str]) -> Choice:
        key = tuple(levels)
        if key not in found:
            tell(f"trying {' + '.join(levels)}")
            found[key] = simulator.choice(levels)
        return found[key]

    if len(names) <= MANY:
        for subset in subsets(names):
            look(subset)
        return list(found.values())
    for name in names:
        look([name])
    best = look(names)
    while len(best.levels) > 1:
        fewer = max((look(without(best.levels, name)) for name in best.levels), key=speed)
        if speed(fewer) < speed(best):
            break
        best = fewer
    return list(found.values())


def subsets(names: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """All subsets that are not empty, in order."""
    return itertools.chain.from_iterable(itertools.combinations(names, size) for size in range(1, len(names) + 1))


def without(levels: Sequence[str], name: str) -> tuple[str, ...]:
    """The levels but one."""
    return tuple(level for level in levels if level != name)


def speed(choice: Choice) -> float:
    """What a set of levels comes to under its own controllers: how it will be run."""
    return choice.adaptive.speedup
