"""From a configuration to a chain of levels: loads models, makes drafters, checks that they fit."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from cascade.config import CascadeConfig, LevelConfig, members_of, normalise_levels
from cascade.control.base import Controller
from cascade.drafter import Drafter
from cascade.errors import ConfigError, LoadError
from cascade.governor import Governor
from cascade.growth import Shape, shape_of
from cascade.level import Level
from cascade.merged import Merged
from cascade.rows import CausalModel
from cascade.rules import Rule

if TYPE_CHECKING:
    from cascade.costs import Costs
    from cascade.plugins import Plugins

Progress = Callable[[str], None]


def build_levels(
    config: CascadeConfig,
    plugins: Plugins,
    costs: Costs,
    clock: Callable[[], float],
    progress: Progress | None = None,
) -> Level:
    """Builds the cascade and returns its target level. Raises ConfigError, LoadError or PluginError."""
    levels = normalise_levels(config, plugins.drafter_names())
    rule: Rule = plugins.rule(config.rule)()
    kinds: list[type[Controller]] = [plugins.controller(level.controller) for level in levels]
    controllers = [_controller(level, kind) for level, kind in zip(levels, kinds, strict=True)]
    places = [members_of(level, plugins.drafter_names()) or [level] for level in levels]
    for level, kind in zip(levels, kinds, strict=True):
        if level.tree not in (None, "chain") and kind.doubt is not Controller.doubt:
            raise ConfigError(
                f"level {level.name!r}: the controller {level.controller} stops chains: leave out its tree"
            )
    for i, level in enumerate(levels):
        _check_place(level, places[i], is_bottom=i == 0, is_target=i == len(levels) - 1)
    parts = {(i, j): part for i, place in enumerate(places) for j, part in enumerate(place)}
    drafters = {
        (i, j): _drafter(part, kinds[i] if len(places[i]) == 1 else Controller, plugins)
        for (i, j), part in parts.items()
        if part.model is None
    }
    models = _load_all({key: part for key, part in parts.items() if part.model is not None}, config, plugins, progress)
    target = models[len(levels) - 1, 0]
    governor: Governor | None = None
    for i, level in enumerate(levels):
        verifier = models.get((i + 1, 0))
        made: list[Drafter] = []
        for j, part in enumerate(places[i]):
            if (drafter := drafters.get((i, j))) is None:
                drafter = Level(
                    i,
                    str(part.name),
                    models[i, j],
                    governor if len(places[i]) == 1 else None,
                    rule,
                    costs,
                    clock,
                    is_target=i == len(levels) - 1,
                    end_ids=target.end_ids,
                    tail=part.tail,
                    shape=_shape(part, kinds[i], models[i, j], verifier, bits=i + 2 == len(levels)),
                    vocab_size=target.vocab_size,
                )
            made.append(drafter)
        if i == len(levels) - 1:
            break
        one = made[0] if len(made) == 1 else Merged(made, [str(part.name) for part in places[i]], target.vocab_size)
        governor = Governor(i, level, one, controllers[i], config.bypass, costs, clock, target.vocab_size)
    for taken in drafters.values():
        taken._cascade_taken = True  # type: ignore[attr-defined]
    return cast("Level", made[0])


def _shape(
    level: LevelConfig, kind: type[Controller], model: CausalModel, verifier: CausalModel | None, bits: bool
) -> Shape | None:
    """The shape of what a level proposes to `verifier`, of which the bits matter or not; None for chains."""
    if verifier is None or not (model.trees and verifier.trees):
        return None
    if level.tree is not None:
        return shape_of(level.tree)
    found = getattr(verifier, "probed", None)
    exact = not bits or found is None or found.tree_bits or found.width is None
    weighs = kind.adapts and kind.doubt is Controller.doubt  # what stops by entropy stops chains
    return shape_of("dynamic") if exact and weighs and level.k_min <= 1 else None


def _check_place(level: LevelConfig, parts: Sequence[LevelConfig], is_bottom: bool, is_target: bool) -> None:
    """Raises ConfigError for what a level cannot be where it stands."""
    if level.tail and (level.model is None or is_bottom or is_target):
        raise ConfigError(
            f"tail=True at level {level.name!r}: only a model between a drafter and the target has a tail"
        )
    if level.model is None and not is_bottom:
        raise ConfigError(
            f"level {level.name!r} is a drafter without a model: it verifies nothing, so it must stand "
            "at the bottom, below every model"
        )
    for part in {level.name: level, **{part.name: part for part in parts}}.values():
        if part.tree not in (None, "chain") and (part.model is None or is_target):
            raise ConfigError(f"tree={part.tree!r} at level {part.name!r}: only a model that drafts grows a tree")


def _split_options(level: LevelConfig, kind: type[Controller]) -> tuple[dict[str, Any], dict[str, Any]]:
    """A level's options for its controller and for its drafter: each takes those it knows.

    What the controller does not know is the drafter's; a model or a drafter object takes no options,
    so there the controller refuses them by name.
    """
    if not isinstance(level.drafter, str):
        return dict(level.options), {}
    mine = {key: value for key, value in level.options.items() if key in kind.defaults}
    return mine, {key: value for key, value in level.options.items() if key not in mine}


def _controller(level: LevelConfig, kind: type[Controller]) -> Callable[[], Controller]:
    """A factory of controllers for this level, tried once so that bad options are refused now."""
    options, _ = _split_options(level, kind)

    def make() -> Controller:
        return kind(k=level.k or None, k_min=level.k_min, k_max=level.k_max, **options)

    make()
    return make


def _drafter(level: LevelConfig, kind: type[Controller], plugins: Plugins) -> Drafter:
    if isinstance(level.drafter, str):
        return plugins.drafter(level.drafter, **_split_options(level, kind)[1])
    if isinstance(level.drafter, type):
        raise ConfigError(
            f"level {level.name!r}: {level.drafter.__name__} is a class: give an object, {level.drafter.__name__}()"
        )
    if not hasattr(level.drafter, "propose"):
        raise ConfigError(f"level {level.name!r}: {type(level.drafter).__name__} has no propose() and is no Drafter")
    if getattr(level.drafter, "_cascade_taken", False):
        raise ConfigError(f"level {level.name!r}: this drafter object serves another engine; make one for each")
    drafter: Drafter = level.drafter
    return drafter


def _load_all(
    levels: Mapping[tuple[int, int], LevelConfig], config: CascadeConfig, plugins: Plugins, progress: Progress | None
) -> dict[tuple[int, int], CausalModel]:
    """The models by place, the target (the last one) loaded first; if one fails, the others are given back."""
    models: dict[tuple[int, int], CausalModel] = {}
    last = max(levels)
    try:
        for key in sorted(levels, reverse=True):
            models[key] = _load(levels[key], config, plugins, models.get(last), progress)
    except BaseException:
        for model in models.values():
            getattr(model, "close", lambda: None)()
        raise
    return models


def _load(
    level: LevelConfig, config: CascadeConfig, plugins: Plugins, target: CausalModel | None, progress: Progress | None
) -> CausalModel:
    if progress:
        progress(f"loading {level.name}")
    if hasattr(level.model, "forward") and hasattr(level.model, "new_row"):  # already of our protocol
        model: CausalModel = level.model
    else:
        found = plugins.load_model(level.model, level.device, level.dtype) if isinstance(level.model, str) else None
        model = found if found is not None else _load_transformers(level, config, target, progress)
    if target is not None:
        check_vocabulary(str(level.name), model, target)
    return model


def _load_transformers(
    level: LevelConfig, config: CascadeConfig, target: CausalModel | None, progress: Progress | None
) -> CausalModel:
    from cascade.model import load

    loaded: CausalModel = load(
        level.model,
        device=level.device,
        dtype=level.dtype,
        tokenizer=level.tokenizer,
        target=target,
        max_length=config.max_length,
        progress=progress,
    )
    loaded.name = str(level.name)  # what errors call it from now on
    return loaded


def check_vocabulary(name: str, model: CausalModel, target: CausalModel) -> None:
    """Refuses a draft whose tokens mean something else than the target's."""
    mine, theirs = getattr(model, "tokenizer", None), getattr(target, "tokenizer", None)
    if mine is not None and theirs is not None:
        from cascade.model import same_tokenizer

        same_tokenizer(model, target)
    elif model.vocab_size != target.vocab_size and (mine is None) == (theirs is None):
        raise LoadError(
            f"level {name!r} has {model.vocab_size} token ids and the target {target.vocab_size}: "
            "a draft model needs the target's tokenizer"
        )
