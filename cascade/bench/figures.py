"""From the runs of a benchmark to its figures: a pure function of what the JSON file holds.

Ratios are taken as Spec-Bench takes them (Xia et al. 2024): each unit, a question with its repeats, has a
speed; a system's is the mean over units, and a speedup is the ratio of two such means over the same units.
The uncertainty that matters is which questions were asked, so intervals resample units, in pairs.
"""

from __future__ import annotations

from collections.abc import Container, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

FORMAT = 1  # of the record that the figures are part of
OVERALL = "overall"
BASELINES = ("plain", "hf-plain")  # what speedups are against: the first that was run
PEER, FIXED = "hf-", "fixed:"  # how their systems' names begin
RESAMPLES = 2000
INTERVAL = (5.0, 95.0)  # percentiles: 90 % of the resamples lie between

Run = Mapping[str, Any]
Figures = dict[str, Any]
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Unit:
    """What is averaged and resampled: a question, or the questions of one batch; repeats are summed.

    Attributes:
        runs: its requests.
        calls: how often it was run; as many as its runs without batches.
        tokens, wall: generated tokens, and seconds of its calls.
        later, later_wall: the same after a call's first tokens.
        first: mean seconds to a request's first token, None where there was none.
    """

    runs: tuple[Run, ...]
    calls: int
    tokens: int
    wall: float
    later: int
    later_wall: float
    first: float | None

    @property
    def rate(self) -> float | None:
        """Tokens per second; None where no time passed."""
        return self.tokens / self.wall if self.wall > 0 else None

    @property
    def decode_rate(self) -> float | None:
        """Tokens per second after the first; None where there are none."""
        return self.later / self.later_wall if self.later > 0 and self.later_wall > 0 else None


Units = dict[Hashable, Unit]


def summarise(runs: Sequence[Run], setup: Mapping[str, Any]) -> dict[str, dict[str, Figures]]:
    """The figures of every system, per category and overall: {system: {category or "overall": figures}}.

    A system's figures are over the units that it and the baseline both finished; what ended in an error is
    as if it had not been run. A system or category without such units is left out.

    Args:
        runs: as `cascade bench` records them.
        setup: of the same record: `levels` with their parameters, and `systems` in order.
    """
    done = [run for run in runs if run["finish_reason"] != "error"]
    names = dict.fromkeys(chain(setup["systems"], (run["system"] for run in done)))
    table = {name: _units([run for run in done if run["system"] == name]) for name in names}
    baseline = baseline_of({name for name, units in table.items() if units})
    if baseline is not None:
        table = {name: {key: units[key] for key in units if key in table[baseline]} for name, units in table.items()}
    parts = {name: _by_category(units) for name, units in table.items() if units}
    plain, peers_plain = _texts(done, "plain"), _texts(done, "hf-plain")
    asked = {(run["category"], run["question_id"]) for run in runs}
    summary: dict[str, dict[str, Figures]] = {}
    for name, categories in parts.items():
        summary[name] = {}
        for category, units in categories.items():
            base = None if baseline is None else [parts[baseline][category][key] for key in units]
            figures = _figures(list(units.values()), base, setup["levels"])
            figures["asked"] = len({q for q in asked if category in (OVERALL, q[0])})
            figures["identical"] = _identical(units, plain)
            figures["identical_hf_plain"] = _identical(units, peers_plain) if name.startswith(PEER) else None
            summary[name][category] = figures
        _add_regret(summary[name], name, parts)
    return summary


# -- units -----------------------------------------------------------------------------------------------


def _units(runs: Iterable[Run]) -> Units:
    """One system's units, by the questions in them: what pairs a system's with another's."""
    calls: dict[Hashable, list[Run]] = {}
    for run in runs:
        alone = (run["category"], run["question_id"])
        company = alone if run["batch"] is None else run["batch"]["id"]
        calls.setdefault((run["repeat"], run["batch"] is None, company), []).append(run)
    groups: dict[Hashable, list[list[Run]]] = {}
    for rows in calls.values():
        groups.setdefault(frozenset((run["category"], run["question_id"]) for run in rows), []).append(rows)
    return {key: _unit(group) for key, group in groups.items()}


def _unit(calls: Sequence[Sequence[Run]]) -> Unit:
    runs = tuple(run for rows in calls for run in rows)
    firsts = [float(run["first_token_s"]) for run in runs if run["first_token_s"] is not None]
    wall = sum(wall_of(rows) for rows in calls)
    return Unit(
        runs=runs,
        calls=len(calls),
        tokens=sum(run["new_tokens"] for run in runs),
        wall=wall,
        later=sum(max(run["new_tokens"] - run["first_tokens"], 0) for run in runs),
        later_wall=wall - sum(max(run["first_token_s"] or 0.0 for run in rows) for rows in calls),
        first=sum(firsts) / len(firsts) if firsts else None,
    )


def wall_of(rows: Sequence[Run]) -> float:
    """Seconds of one call: a batch's own, or its only request's."""
    return float(rows[0]["wall_s"] if rows[0]["batch"] is None else rows[0]["batch"]["wall_s"])


def baseline_of(names: Container[str]) -> str | None:
    """The system that speedups are against, None where none was run."""
    return next((name for name in BASELINES if name in names), None)


def _by_category(units: Units) -> dict[str, Units]:
    """The units of each category, and all of them; a batch of mixed ones is in the latter only."""
    parts: dict[str, Units] = {}
    for key, unit in units.items():
        categories = {run["category"] for run in unit.runs}
        if len(categories) == 1:
            parts.setdefault(categories.pop(), {})[key] = unit
    return {**parts, OVERALL: units}


# -- figures ---------------------------------------------------------------------------------------------


def _figures(units: Sequence[Unit], base: Sequence[Unit] | None, levels: Sequence[Mapping[str, Any]]) -> Figures:
    """What follows from a system's units and the baseline's, in the same order."""
    runs = [run for unit in units for run in unit.runs]
    tokens = sum(run["new_tokens"] for run in runs)
    forwards = sum(run["target_forwards"] for run in runs)
    walls = [run["wall_s"] for run in runs]
    firsts = [run["first_token_s"] for run in runs if run["first_token_s"] is not None]
    pairs = [] if base is None else list(zip(units, base, strict=True))
    return {
        "questions": len({(run["category"], run["question_id"]) for run in runs}),
        "runs": len(runs),
        "new_tokens": tokens,
        "tokens_per_s": _mean(unit.rate for unit in units),
        **_speedup("speedup", [(unit.rate, other.rate) for unit, other in pairs]),
        "pooled_speedup": _pooled(pairs),
        "decode_tokens_per_s": _mean(unit.decode_rate for unit in units),
        **_speedup("decode_speedup", [(unit.decode_rate, other.decode_rate) for unit, other in pairs]),
        "tau": _ratio(tokens, forwards),
        "target_forwards_per_token": _ratio(forwards, tokens),
        "latency_p50_s": float(np.percentile(walls, 50)),
        "latency_p95_s": float(np.percentile(walls, 95)),
        "first_token_s": _median(firsts),
        "first_token_ratio": _median([a.first / b.first for a, b in pairs if a.first is not None and b.first]),
        "own_work_ms": _median(
            [
                1000 * run["stats"]["own_work_s"] / run["target_forwards"]
                for run in runs
                if run["stats"] is not None and run["target_forwards"]
            ]
        ),
        "levels": _levels(runs, sum(unit.wall for unit in units)),
        "compute_per_token": _compute(runs, levels),
        "regret": None,
        "regret_best": None,
    }


def _pooled(pairs: Sequence[tuple[Unit, Unit]]) -> float | None:
    """The speedup in tokens over time of all units together, in which long answers weigh more."""
    tokens, wall = (sum(getattr(unit, key) for unit, _ in pairs) for key in ("tokens", "wall"))
    base_tokens, base_wall = (sum(getattr(other, key) for _, other in pairs) for key in ("tokens", "wall"))
    return _ratio(tokens * base_wall, wall * base_tokens)


def _speedup(name: str, pairs: Sequence[tuple[float | None, float | None]]) -> Figures:
    """The ratio of the mean speeds, and its interval, over the units where both systems have one."""
    both = np.array([pair for pair in pairs if None not in pair], np.float64).reshape(-1, 2)
    ratio = _ratio(both[:, 0].sum(), both[:, 1].sum())
    return {name: ratio, f"{name}_interval": None if ratio is None else _interval(both)}


def _interval(pairs: Floats) -> list[float] | None:
    """Where 90 % of the ratios of means lie when the units [n, 2] are drawn again; None for fewer than two."""
    if len(pairs) < 2:
        return None
    drawn = np.random.default_rng(0).integers(0, len(pairs), (RESAMPLES, len(pairs)))
    sums = pairs[drawn].sum(1)
    sums = sums[sums[:, 1] > 0]
    return [float(edge) for edge in np.percentile(sums[:, 0] / sums[:, 1], INTERVAL)]


def _levels(runs: Sequence[Run], wall: float) -> list[Figures] | None:
    """Each level's part in all the runs; None for peers, which have none."""
    if any(run["stats"] is None for run in runs):
        return None
    tokens = sum(run["new_tokens"] for run in runs)
    return [_level(rows, tokens, wall) for rows in zip(*(run["stats"]["levels"] for run in runs), strict=True)]


def _level(rows: Sequence[Mapping[str, Any]], tokens: int, wall: float) -> Figures:
    """One level's figures from its `LevelStats` in every run."""

    def total(key: str) -> Any:
        return sum(row[key] for row in rows)

    return {
        "name": rows[0]["name"],
        "drafted": total("drafted"),
        "tested": total("tested"),
        "accepted": total("accepted"),
        "alpha": _ratio(total("accepted"), total("tested")),
        "accept_rate": _ratio(total("accepted"), total("drafted")),
        "k_mean": _ratio(sum(row["k_mean"] * row["proposals"] for row in rows if row["k_mean"]), total("proposals")),
        "time_share": _ratio(total("time_s"), wall),
        "bypassed_share": _ratio(total("bypassed_rounds"), total("asks")),
        "forwards_per_token": _ratio(total("forwards"), tokens),
        "tokens_fed_per_token": _ratio(total("tokens_fed"), tokens),
    }


def _compute(runs: Sequence[Run], levels: Sequence[Mapping[str, Any]]) -> dict[str, float] | None:
    """Forwards and fed tokens per generated one, each weighed by its model's size over the target's.

    None where a model that took part, or the target, is of unknown size.
    """
    tokens, target = sum(run["new_tokens"] for run in runs), levels[-1]["parameters"]
    forwards = fed = 0.0
    for level in levels:
        ours, inputs = (sum(run[key].get(level["name"], 0) for run in runs) for key in ("forwards", "tokens_fed"))
        if ours and not (level["parameters"] and target):
            return None
        share = level["parameters"] / target if ours else 0.0
        forwards, fed = forwards + share * ours, fed + share * inputs
    return {"forwards": forwards / tokens, "tokens": fed / tokens} if tokens else None


# -- comparisons -----------------------------------------------------------------------------------------


def _texts(runs: Iterable[Run], system: str) -> dict[Hashable, list[int]]:
    """The tokens of each of a system's requests."""
    return {_request(run): list(run["tokens"]) for run in runs if run["system"] == system}


def _request(run: Run) -> Hashable:
    return run["category"], run["question_id"], run["repeat"]


def _identical(units: Units, texts: Mapping[Hashable, list[int]]) -> float | None:
    """The share of requests with the very tokens that `texts` has for them, of those it has any for."""
    same = [
        list(run["tokens"]) == texts[_request(run)]
        for unit in units.values()
        for run in unit.runs
        if _request(run) in texts
    ]
    return _ratio(sum(same), len(same))


def _add_regret(summary: dict[str, Figures], name: str, parts: Mapping[str, Mapping[str, Units]]) -> None:
    """Compares a system's time with the best fixed setting's of each category, known only afterwards.

    Plain decoding is such a setting too: K = 0. One that did not finish every unit is no candidate.
    """
    fixed = [other for other in parts if other.startswith(FIXED)]
    if not fixed or name not in ("cascade", "plain"):
        return
    spent = least = 0.0
    for category, units in parts[name].items():
        walls = {
            other: sum(theirs[key].wall / theirs[key].calls for key in units)
            for other in (*fixed, "plain")
            if (theirs := parts.get(other, {}).get(category)) is not None and theirs.keys() >= units.keys()
        }
        if category == OVERALL or not walls:
            continue
        best, own = min(walls, key=walls.__getitem__), sum(unit.wall / unit.calls for unit in units.values())
        spent, least = spent + own, least + walls[best]
        summary[category] |= {"regret": _ratio(own, walls[best]), "regret_best": best}
    summary[OVERALL]["regret"] = _ratio(spent, least)


# -- numbers ---------------------------------------------------------------------------------------------


def _ratio(above: float, below: float) -> float | None:
    return float(above / below) if below else None


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known else None


def _median(values: Sequence[float]) -> float | None:
    return float(np.median(values)) if values else None
