"""Plans a cascade: which of its levels pay, with which K, on some questions and on some machine.

A plan rests on recordings: every question is decoded once, and each level's model says what it would have proposed
(`cascade.planning.measuring`). All else is simulation with measured or assumed costs (`cascade.simulate`), so a plan
for a machine that is not at hand needs no model at all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from cascade.config import CascadeConfig, LevelConfig, members_of, normalise_levels
from cascade.errors import ConfigError
from cascade.planning.figures import SURE, Acceptance, Bound, acceptance, right_in
from cascade.planning.hardware import OnTheWay
from cascade.planning.measuring import OWN_WORK, Measured
from cascade.planning.search import Choice, Ks, Setting, Simulator, choices, speed, without
from cascade.planning.what_if import WhatIf, assumed_costs, away, remarks
from cascade.recording import Recording

if TYPE_CHECKING:
    from cascade.costs import Costs
    from cascade.plugins import Plugins

LEAST_TOKENS = 50  # of answers in all, under which nothing can be said
PAYS = 1.02  # speedup from which on a cascade is worth its memory
ALIKE = 0.01  # relative difference under which fewer levels are as good
FIXED_IS_BETTER = 0.03  # from which on a fixed K is worth a line


@dataclass(frozen=True)
class LevelPlan:
    """What is known of one level below the target, and of what it could be at best.

    Attributes:
        name: the level's.
        acceptance: of a model, at every position of the answers; of another drafter, of what it proposes alone.
        cost: of a proposed token, in rounds of plain decoding.
        alone: speedup with this level alone, under its own controller.
        free: the same if its proposals took no time.
        right, right_k: speedup if all of them held, and the K for it.
        adds: what it adds to the speed of the best set, or would add, as a share; None where that was not tried.
    """

    name: str
    acceptance: Acceptance
    cost: float
    alone: float
    free: float
    right: float
    right_k: int
    adds: float | None


@dataclass(frozen=True)
class Plan:
    """What `plan` found.

    Attributes:
        target: its name.
        round_s: seconds of a round of plain decoding, the engine's own work included.
        plain: plain decoding, simulated.
        measured_plain, simulated_plain: tokens per second of what was decoded plainly, by a clock and by simulation.
        measured_all, simulated_all: the same of all levels, on all recordings.
        choices: the sets of levels, bottom to top each.
        best: the one to run; None where none pays.
        first_ks: its first K by level.
        levels: one by one, bottom to top.
        ideal, ideal_k: speedup with a drafter that is always right and takes no time, and the K for it.
        categories: by category: questions, and the best set's speedup.
        config: the cascade to run: the levels that pay, or the target alone.
        questions, tokens, batch: what it rests on.
        overhead: the engine's own work, seconds per forward.
        remarks: what a reader must know, a line each.
    """

    target: str
    round_s: float
    plain: Setting
    measured_plain: float | None
    simulated_plain: float | None
    measured_all: float | None
    simulated_all: float | None
    choices: tuple[Choice, ...]
    best: Choice | None
    first_ks: Ks
    levels: tuple[LevelPlan, ...]
    ideal: float
    ideal_k: int
    categories: Mapping[str, tuple[int, float]]
    config: CascadeConfig
    questions: int
    tokens: int
    batch: int
    overhead: float
    remarks: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """Plain values, without the config."""
        found = asdict(replace(self, config=CascadeConfig(levels=[self.target])))
        del found["config"]
        return found


def plan(
    config: CascadeConfig,
    measured: Measured,
    *,
    batch: int = 1,
    what_if: WhatIf | None = None,
    plugins: Plugins | None = None,
    sampled: bool = False,
    tell: Callable[[str], None] = lambda text: None,
) -> Plan:
    """Finds out which levels of a cascade pay, and how they should run. Loads no model.

    Args:
        config: the cascade.
        measured: recordings of its levels, and their costs.
        batch: rows decoded at once.
        what_if: what is assumed of the machine.
        plugins: a plugin manager; by default one as an engine makes it.
        sampled: whether answers are drawn at a temperature: rules that weigh distributions then send them.
        tell: called with a line before each step.

    Raises:
        ConfigError: too few tokens, or a level without costs or recordings.
    """
    from cascade import plugins as plugin_module

    plugins = plugin_module.create(*config.plugins) if plugins is None else plugins
    check_tokens(sum(len(one.tokens) for one in measured.recordings))
    what_if = WhatIf() if what_if is None else what_if
    simulator, bound, places = _grounds(config, measured, what_if, plugins, batch, sampled)
    names = [str(part.name) for parts in places.values() for part in parts]
    recordings = simulator.recordings
    tell("trying plain decoding")
    plain = simulator.setting(())
    tried = choices(simulator, tell)
    best = _best(tried)
    first = _first_ks(simulator, best)
    tell("what each level adds")
    levels = [_level(simulator, name, places[name], tried, best, bound) for name in simulator.lower]
    ideal, ideal_k = bound.whole(0.0)
    return Plan(
        target=names[-1],
        round_s=bound.round,
        plain=plain,
        measured_plain=None if what_if.levels else measured.plain,
        simulated_plain=_simulated_plain(simulator, measured),
        measured_all=None if what_if.levels or batch > 1 else measured.cascade,
        simulated_all=simulator.setting(tuple(simulator.lower)).tokens_per_s,
        choices=tuple(tried),
        best=best,
        first_ks=first,
        levels=tuple(levels),
        ideal=ideal,
        ideal_k=ideal_k,
        categories=_categories(simulator, best),
        config=simulator.config_of(best.levels, first=first) if best else simulator.config_of(()),
        questions=len(recordings),
        tokens=sum(len(one.tokens) for one in recordings),
        batch=batch,
        overhead=simulator.overhead,
        remarks=tuple(_remarks(what_if, names, measured, levels, best, len(recordings))),
    )


def _grounds(
    config: CascadeConfig, measured: Measured, what_if: WhatIf, plugins: Plugins, batch: int, sampled: bool
) -> tuple[Simulator, Bound, dict[str, list[LevelConfig]]]:
    """What simulates settings, what is known of drafters at best, and the places of the cascade."""
    recordings = [one for one in measured.recordings if one.tokens]
    check_batch(len(recordings), batch)
    costs, places = assumed_costs(what_if, measured.costs), places_of(config, plugins)
    _check_costs(places, costs, what_if)
    names = [str(part.name) for parts in places.values() for part in parts]
    needs_q = sampled and plugins.rule(config.rule).needs_q
    vocab_size = measured.vocab_size or 1 + max(max(one.prompt + one.tokens) for one in recordings)
    elsewhere = away(what_if, vocab_size if needs_q else 0)
    known = measured.overhead if what_if.overhead is None else what_if.overhead
    overhead = OWN_WORK if known is None else known
    simulator = Simulator(config, recordings, lambda: OnTheWay(costs, elsewhere, names), batch, overhead, plugins)
    return simulator, Bound(costs, elsewhere, names[-1], simulator.run(()), batch, overhead), places


def check_tokens(tokens: int) -> None:
    """Raises ConfigError where answers have, or can have, too few tokens in all."""
    if tokens < LEAST_TOKENS:
        raise ConfigError(
            f"a plan from {tokens} answer tokens would be a guess: it needs at least {LEAST_TOKENS}, and some hundreds "
            f"to be sure: ask at least {math.ceil(LEAST_TOKENS / max(tokens, 1))} times as many questions, or let the "
            "answers be longer"
        )


def check_batch(questions: int, batch: int) -> None:
    """Raises ConfigError where the questions do not fill a batch."""
    if questions < batch:
        raise ConfigError(f"a plan for {batch} requests at a time needs at least {batch} questions, not {questions}")


def places_of(config: CascadeConfig, plugins: Plugins) -> dict[str, list[LevelConfig]]:
    """By level, bottom to top: itself, or the drafters that are merged at it, each with its whole name."""
    drafters = plugins.drafter_names()
    return {str(level.name): members_of(level, drafters) or [level] for level in normalise_levels(config, drafters)}


def _check_costs(places: Mapping[str, Sequence[LevelConfig]], costs: Costs, what_if: WhatIf) -> None:
    """Raises ConfigError for a level whose costs nobody knows, and for costs that a level cannot have."""
    for place, parts in places.items():
        names = [str(part.name) for part in parts]
        if place in what_if.levels and place not in names:
            raise ConfigError(f"--what-if {place}: assume costs of what is merged there: {', '.join(names)}")
        for part, name in zip(parts, names, strict=True):
            known = any(costs.seconds(one, 1) is not None for one in (name, name.rpartition("/")[2]))
            if part.model is not None and not known:
                raise ConfigError(
                    f"nobody has measured level {name!r} here: assume its costs, such as "
                    f"--what-if {name}:seconds=12ms, or bring measured ones: --costs COSTS.json"
                )
            values = what_if.levels.get(name, {})
            if part.model is None and values.get("placement", "same") != "same":
                raise ConfigError(f"--what-if {name}: a drafter without a model is where its verifier is")
            if part.model is None and "params" in values:
                raise ConfigError(f"--what-if {name}: a drafter without a model has no params: give seconds=")


# -- one level -------------------------------------------------------------------------------------------


def _level(
    simulator: Simulator,
    name: str,
    parts: Sequence[LevelConfig],
    tried: Sequence[Choice],
    best: Choice | None,
    bound: Bound,
) -> LevelPlan:
    """What is known of one level, of which these are the drafters."""
    config, plain = simulator.lower[name], simulator.setting(())
    alone = next(choice for choice in tried if choice.levels == (name,))
    if config.model is not None:
        found = acceptance(right_in(one, name) for one in simulator.recordings)
    else:
        results = simulator.run([name], alone.fixed.ks).results
        found = acceptance((stats.tested, stats.accepted) for r in results for stats in r.stats.levels[:1])
    cost, way = bound.token_cost(parts), bound.way(parts)
    free = simulator.free(name, parts)
    right, right_k = bound.whole(lambda k: k * cost + way, config.k_max)
    rate = free.new_tokens / free.seconds
    return LevelPlan(
        name=name,
        acceptance=found,
        cost=cost,
        alone=alone.adaptive.speedup,
        free=rate / plain.tokens_per_s,
        right=right,
        right_k=right_k,
        adds=_adds(simulator, name, tried, best),
    )


def _adds(simulator: Simulator, name: str, tried: Sequence[Choice], best: Choice | None) -> float | None:
    """What a level adds to the best set, or would add if it is not in it."""
    base = () if best is None else best.levels
    known: dict[tuple[str, ...], float] = {choice.levels: speed(choice) for choice in tried} | {(): 1.0}
    more = tuple(level for level in simulator.lower if level == name or level in base)
    less = without(base, name)
    if more not in known or less not in known:
        return None
    return known[more] / known[less] - 1.0


# -- all of them -----------------------------------------------------------------------------------------


def _best(tried: Sequence[Choice]) -> Choice | None:
    """The set to run: the fastest under its own controllers, or one with fewer levels that is as fast."""
    if not tried or (most := max(speed(choice) for choice in tried)) < PAYS:
        return None
    near = [choice for choice in tried if speed(choice) >= max(most * (1.0 - ALIKE), PAYS)]
    return min(near, key=lambda choice: (len(choice.levels), -speed(choice)))


def _first_ks(simulator: Simulator, best: Choice | None) -> Ks:
    """The first K of each level: the best fixed one, unless beginning with it is slower."""
    if best is None or best.fixed.ks is None:
        return {}
    done = simulator.simulated(simulator.config_of(best.levels, first=best.fixed.ks))
    rate = done.new_tokens / done.seconds
    return dict(best.fixed.ks) if rate >= best.adaptive.tokens_per_s * (1.0 - ALIKE) else {}


def _simulated_plain(simulator: Simulator, measured: Measured) -> float | None:
    """What simulation makes of that which was decoded plainly."""
    if not measured.plain_of:
        return None
    done = simulator.run((), None, measured.plain_of)
    return done.new_tokens / done.seconds


def _categories(simulator: Simulator, best: Choice | None) -> dict[str, tuple[int, float]]:
    """By category, if there are several: questions, and the best set's speedup; not of those that fill no batch."""
    groups: dict[str, list[Recording]] = {}
    for one in simulator.recordings:
        groups.setdefault(one.category, []).append(one)
    if best is None or len(groups) < 2:
        return {}
    found = {}
    for category, some in groups.items():
        if len(some) < simulator.batch:
            continue
        fast, plain = simulator.run(best.levels, None, some), simulator.run((), None, some)
        found[category] = len(some), plain.seconds / fast.seconds
    return found


def _remarks(
    what_if: WhatIf,
    names: Sequence[str],
    measured: Measured,
    levels: Sequence[LevelPlan],
    best: Choice | None,
    questions: int,
) -> Iterable[str]:
    """What a reader must know."""
    for level in levels:
        found = level.acceptance
        if found.alpha is None:
            yield f"{level.name} proposed nothing on these questions: ask some that are like your work."
        elif found.questions:
            yield (
                f"Too little to be sure: the acceptance of {level.name} is {found.alpha:.2f} +- {found.width:.2f} "
                f"(95 %). For +- {SURE:.2f}, ask about {found.questions} questions like these {questions}."
            )
    if best is not None and best.fixed.speedup > best.adaptive.speedup * (1.0 + FIXED_IS_BETTER):
        ks = ", ".join(f"{name} {k}" for name, k in (best.fixed.ks or {}).items())
        gain = best.fixed.speedup / best.adaptive.speedup - 1.0
        yield f'With controller="fixed" and K {ks}, the best set would be {gain:.0%} faster than with its own.'
    if what_if.levels:
        yield from remarks(what_if, names, measured.costs is not None)
    if what_if.overhead is None and measured.overhead is None:
        yield f"The engine's own work is assumed: {OWN_WORK * 1e3:g} ms per forward. engine:overhead= says otherwise."
