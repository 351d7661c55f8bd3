"""What-if: machines that are not at hand, as a user writes them, such as "target:params=70B,gpu=h100,gpus=8".

NAME:KEY=VALUE,KEY=VALUE where NAME is a level, or one of
- `interconnect`: between the GPUs of one machine (latency, bandwidth);
- `link`: to another machine (latency, bandwidth);
- `engine`: what the engine itself takes (overhead, per forward).

A level says either what a forward takes (seconds, per_token), or what it is (params and the rest); what the keys mean
is in `cascade.planning.hardware`. One that says only its placement keeps its measured costs. Of a level without a
model, `seconds` is the time of a proposed token.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from cascade.errors import ConfigError, did_you_mean
from cascade.planning.hardware import (
    DTYPES,
    EFFICIENCY,
    GPUS,
    INTERCONNECT_LATENCY,
    LINK,
    PROBABILITY,
    TOKEN_ID,
    AssumedCosts,
    Away,
    Forward,
    Gpu,
    Link,
    Roofline,
    Told,
)

if TYPE_CHECKING:
    from cascade.costs import Costs

PREFIXES = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
TIMES = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0}
RATES = {f"{p}B/s": size for p, size in PREFIXES.items()} | {f"{p}bit/s": size / 8 for p, size in PREFIXES.items()}
COUNTS = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "B": 1e9, "G": 1e9, "T": 1e12}
SPEEDS = {f"{p}{unit}": size for p, size in PREFIXES.items() if p for unit in ("", "FLOPS", "FLOP/s")}
PLAIN = {"": 1.0}
PLACEMENTS = ("same", "own", "remote")
NUMBER = re.compile(r"([0-9.]+(?:e[-+]?[0-9]+)?)\s*(.*)")

Values = Mapping[str, Any]


@dataclass(frozen=True)
class WhatIf:
    """What is assumed.

    Attributes:
        levels: by level: its keys and values, in seconds, bytes and operations.
        interconnect, link: what is known of the two.
        overhead: seconds of the engine's own work for each forward; None as measured.
    """

    levels: Mapping[str, Values] = field(default_factory=dict)
    interconnect: Values = field(default_factory=dict)
    link: Values = field(default_factory=dict)
    overhead: float | None = None


# -- values ----------------------------------------------------------------------------------------------


def _quantity(units: Mapping[str, float], example: str, zero: bool = False) -> Callable[[str], float]:
    """Reads a number with one of these units; raises ValueError, saying how one is written."""

    def read(text: str) -> float:
        found = NUMBER.fullmatch(text)
        try:
            value = float(found[1]) * units[found[2]] if found else -1.0
        except (KeyError, ValueError):
            value = -1.0
        if value < 0 or (value == 0 and not zero) or value == float("inf"):
            raise ValueError(f"must be written like {example}")
        return value

    return read


def _whole(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ValueError("must be an integer of at least 1")
    return int(text)


def _share(text: str) -> float:
    value = _quantity(PLAIN, "0.7")(text)
    if value > 1:
        raise ValueError("must lie between 0 and 1, such as 0.7")
    return value


def _one_of(known: Sequence[str]) -> Callable[[str], str]:
    def read(text: str) -> str:
        if text.lower() not in known:
            raise ValueError(f"must be one of {', '.join(known)}")
        return text.lower()

    return read


_TIME = _quantity(TIMES, "12ms, 30us or 0.2s", zero=True)
_RATE = _quantity(RATES, "3.35TB/s, 100GB/s or 100Gbit/s")
LEVEL_KEYS: Mapping[str, Callable[[str], Any]] = {
    "seconds": _quantity(TIMES, "12ms, 30us or 0.2s"),
    "per_token": _TIME,
    "params": _quantity(COUNTS, "70B, 1.5B or 135M"),
    "bytes": _quantity(PLAIN, "2 (of a parameter)"),
    "dtype": _one_of(tuple(DTYPES)),
    "gpus": _whole,
    "gpu": _one_of(tuple(GPUS)),
    "bandwidth": _RATE,
    "flops": _quantity(SPEEDS, "990T or 1.98P (operations per second)"),
    "layers": _whole,
    "hidden": _whole,
    "launch": _TIME,
    "efficiency": _share,
    "placement": _one_of(PLACEMENTS),
}
LINK_KEYS: Mapping[str, Callable[[str], Any]] = {"latency": _TIME, "bandwidth": _RATE}
ENGINE_KEYS: Mapping[str, Callable[[str], Any]] = {"overhead": _TIME}
OTHERS = {"interconnect": LINK_KEYS, "link": LINK_KEYS, "engine": ENGINE_KEYS}
EXAMPLE = "such as target:params=70B,dtype=bf16,gpu=h100,gpus=8 or draft:seconds=2ms"


def read_what_if(texts: Sequence[str], levels: Sequence[str]) -> WhatIf:
    """What is assumed, from one text or several. Those of one name are joined.

    Args:
        texts: as a user writes them.
        levels: names of the cascade's levels; one that is called as one of `OTHERS` comes first.

    Raises:
        ConfigError: says which text is wrong, and how it is written.
    """
    found: dict[str, dict[str, Any]] = {}
    for text in texts:
        name, colon, rest = text.rpartition(":")
        if not colon or not name or not rest:
            raise ConfigError(f"--what-if {text}: write NAME:KEY=VALUE,KEY=VALUE, {EXAMPLE}")
        if name not in levels and name not in OTHERS:
            raise ConfigError(f"--what-if {text}: no level is named {name!r}.{did_you_mean(name, [*levels, *OTHERS])}")
        values = found.setdefault(name, {})
        for part in rest.split(","):
            key, value = _pair(part, text, LEVEL_KEYS if name in levels else OTHERS[name])
            if key in values:
                raise ConfigError(f"--what-if {text}: {key} of {name} is given twice")
            values[key] = value
    own = {name: found[name] for name in levels if name in found}
    for name, values in own.items():
        _check(name, values, is_target=name == levels[-1])
    rest_of = {name: found.get(name, {}) if name not in own else {} for name in OTHERS}
    return WhatIf(own, rest_of["interconnect"], rest_of["link"], rest_of["engine"].get("overhead"))


def _pair(part: str, text: str, keys: Mapping[str, Callable[[str], Any]]) -> tuple[str, Any]:
    """One key and its value."""
    key, _, value = (word.strip() for word in part.partition("="))
    if key not in keys:
        raise ConfigError(f"--what-if {text}: there is no key {key!r}.{did_you_mean(key, keys)}")
    try:
        return key, keys[key](value)
    except ValueError as error:
        raise ConfigError(f"--what-if {text}: {key} {error}, not {value!r}") from None


def _check(name: str, values: Values, is_target: bool) -> None:
    """Raises ConfigError for a level that says too little, or too much."""
    told = [key for key in ("seconds", "per_token") if key in values]
    machine = [key for key in values if key not in ("seconds", "per_token", "placement")]
    if told and machine:
        raise ConfigError(
            f"--what-if {name}: give {told[0]}= or {machine[0]}=, not both: each says what a forward takes"
        )
    if told == ["per_token"]:
        raise ConfigError(f"--what-if {name}: per_token= needs seconds=, the time of a forward on one token")
    if machine and "params" not in values:
        raise ConfigError(f"--what-if {name}: {machine[0]}= needs params=, such as params=70B")
    for key in ("bandwidth", "flops"):
        if machine and "gpu" not in values and key not in values:
            raise ConfigError(f"--what-if {name}: params= needs gpu=, such as gpu=h100, or bandwidth= and flops=")
    if "dtype" in values and "bytes" in values:
        raise ConfigError(f"--what-if {name}: give dtype= or bytes=, not both")
    if ("layers" in values) != ("hidden" in values):
        raise ConfigError(f"--what-if {name}: layers= and hidden= go together, such as layers=80,hidden=8192")
    if is_target and values.get("placement", "same") != "same":
        raise ConfigError(f"--what-if {name}: the target is where it is: placement= is for the levels below it")


# -- costs -----------------------------------------------------------------------------------------------


def assumed_costs(what_if: WhatIf, otherwise: Costs | None) -> AssumedCosts:
    """Costs of forwards that follow from what is assumed; `otherwise` are those of levels that are not mentioned."""
    interconnect, _ = links(what_if)
    forwards: dict[str, Forward] = {}
    for name, values in what_if.levels.items():
        if "seconds" in values:
            forwards[name] = Told(values["seconds"], values.get("per_token", 0.0))
        elif "params" in values:
            forwards[name] = _roofline(values, what_if.interconnect, interconnect)
    return AssumedCosts(forwards, otherwise)


def away(what_if: WhatIf, q_tokens: int = 0) -> dict[str, Away]:
    """By level: those that are not where their verifier is.

    Args:
        what_if: what is assumed.
        q_tokens: size of the distribution that comes with a proposed token, where the rule needs one; else 0.
    """
    between = dict(zip(("own", "remote"), links(what_if), strict=True))
    size = TOKEN_ID + q_tokens * PROBABILITY
    places = {name: values.get("placement", "same") for name, values in what_if.levels.items()}
    return {name: Away(between[place], size) for name, place in places.items() if place in between}


def links(what_if: WhatIf) -> tuple[Link, Link]:
    """What joins the GPUs of one machine, and what leads to another."""
    fast = max((_gpu(values).between for values in what_if.levels.values() if "gpu" in values), default=LINK.bandwidth)
    interconnect = Link(
        what_if.interconnect.get("latency", INTERCONNECT_LATENCY), what_if.interconnect.get("bandwidth", fast)
    )
    link = Link(what_if.link.get("latency", LINK.latency), what_if.link.get("bandwidth", LINK.bandwidth))
    return interconnect, link


def _gpu(values: Values) -> Gpu:
    return GPUS[values["gpu"]]


def _roofline(values: Values, given: Values, interconnect: Link) -> Roofline:
    """A level's forwards from what it is."""
    size, narrow = DTYPES[values.get("dtype", "bf16")]
    bandwidth, flops = values.get("bandwidth"), values.get("flops")
    if "gpu" in values:
        gpu = _gpu(values)
        bandwidth = bandwidth or gpu.bandwidth
        flops = flops or (gpu.flops8 if narrow else gpu.flops)
        interconnect = Link(interconnect.latency, given.get("bandwidth", gpu.between))
    assert bandwidth is not None  # `_check` has seen to both
    assert flops is not None
    return Roofline(
        values["params"],
        values.get("bytes", size),
        bandwidth,
        flops,
        gpus=values.get("gpus", 1),
        efficiency=values.get("efficiency", EFFICIENCY),
        launch=values.get("launch", 0.0),
        layers=values.get("layers", 0),
        hidden=values.get("hidden", 0),
        interconnect=interconnect,
    )


def remarks(what_if: WhatIf, levels: Sequence[str], measured: bool) -> list[str]:
    """What a reader must know of the assumptions, a line each."""
    lines = []
    for name in levels:
        values = what_if.levels.get(name, {})
        if "seconds" not in values and "params" not in values:
            kept = "keeps its measured costs" if measured else "has no costs: what it does is free"
            lines.append(f"{name} is not assumed: it {kept}")
        if values.get("gpus", 1) > 1 and "layers" not in values:
            lines.append(
                f"{name}: what its {values['gpus']} GPUs tell each other is left out: give layers= and hidden="
            )
    return lines
