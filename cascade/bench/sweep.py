"""Every fixed setting of a cascade: which levels take part, and how many tokens the highest of them proposes.

The best of them, known only afterwards, is what the controllers are compared with. Each is an engine of its own
on the first engine's models.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from cascade.bench.systems import EngineSystem, System, chain
from cascade.config import BypassConfig, LevelConfig, normalise_levels
from cascade.costs import FixedCosts
from cascade.engine import Engine
from cascade.level import Level

if TYPE_CHECKING:
    from cascade.rows import CausalModel

MODEL_KS = (2, 3, 5, 8)
TABLE_KS = (3, 6, 10)
TABLE_K = 8  # of a table under a model, where the configuration says nothing
MANY = 3  # from more lower levels than this on, not every subset is tried


def sweep(engine: Engine) -> tuple[list[System], dict[str, str]]:
    """The fixed settings of an engine's cascade as systems, and why some levels have none.

    The engines behind them borrow the models and must not be closed; they are over when the first one is.
    """
    *lower, target = normalise_levels(engine.config, engine.plugins.drafter_names())
    lower = [level for level in lower if level.k != 0]
    skipped = {
        f"fixed:{level.name}": f"level {level.name} is a drafter object and serves one engine only: register its class"
        for level in lower
        if level.drafter is not None and not isinstance(level.drafter, str)
    }
    usable = [level for level in lower if f"fixed:{level.name}" not in skipped]
    if not lower:
        skipped["fixed"] = "there is no level below the target"
    models = {name: part.model for name, part in chain(engine) if isinstance(part, Level)}
    found: list[System] = []
    for subset in subsets(usable):
        for k in TABLE_KS if subset[-1].model is None else MODEL_KS:
            found.append(_fixed(engine, subset, k, target, models))
    return found, skipped


def subsets(levels: Sequence[LevelConfig]) -> Iterator[tuple[LevelConfig, ...]]:
    """All subsets that are not empty; of many levels only each alone, and all."""
    for size in range(1, len(levels) + 1):
        if len(levels) <= MANY or size in (1, len(levels)):
            yield from itertools.combinations(levels, size)


def _fixed(
    engine: Engine, subset: Sequence[LevelConfig], k: int, target: LevelConfig, models: dict[str, CausalModel]
) -> EngineSystem:
    """The system in which the levels of `subset`, bottom to top, always propose, the highest of them `k` tokens."""
    levels = [
        _level(engine, level, k if level is subset[-1] else None, i == 0, models) for i, level in enumerate(subset)
    ]
    levels.append(replace(target, model=models[str(target.name)]))
    always = BypassConfig(threshold=0.0)  # one that is set is obeyed alone, and no alpha is under 0
    config = replace(engine.config, levels=levels, bypass=always)
    names = "+".join(str(level.name) for level in subset)
    settings = {str(level.name): f"K {level.k}" for level in levels[:-1]}
    # Costs that nobody knows: nothing is warmed up for, and no level is left out for its price.
    unknown = FixedCosts(lambda level, tokens: None)
    own = Engine(config, plugins=engine.plugins, clock=engine.clock, costs=unknown)
    return EngineSystem(f"fixed:{names}={k}", f"{names} always proposing, fixed K", settings, own)


def _level(
    engine: Engine, level: LevelConfig, k: int | None, lowest: bool, models: dict[str, CausalModel]
) -> LevelConfig:
    """A lower level that proposes a fixed number of tokens: `k`, or its own where another level is above it."""
    own = level.k or (TABLE_K if level.model is None else None)
    k = own if k is None else k
    taken = set(engine.plugins.controller(level.controller).defaults)  # options of the controller it no longer has
    options: dict[str, Any] = {key: value for key, value in level.options.items() if key not in taken}
    return replace(
        level,
        model=None if level.model is None else models[str(level.name)],
        controller="fixed",
        k=k,
        k_min=min(level.k_min, k or level.k_min),
        k_max=max(level.k_max, k or level.k_max),
        bypass=None,
        tail=level.tail and not lowest,
        options=options if level.model is None else {},
    )
