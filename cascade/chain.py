"""The cascade as a line of places, for whoever has to visit them all."""

from __future__ import annotations

from typing import NamedTuple

from cascade.governor import Governor
from cascade.level import Level


class Place(NamedTuple):
    """One place of the cascade: what governs it (nothing does the target), and its model, if it has one."""

    name: str
    governor: Governor | None
    level: Level | None


class Chain:
    """The places from a target down.

    Attributes:
        target: the top level.
        places: bottom to top, the target last: what `origins` index.
        levels: those with a model, the target first; models that are merged with other drafters too.
        governors: top to bottom.
    """

    def __init__(self, target: Level) -> None:
        self.target = target
        self.places = [Place(target.name, None, target)]
        governor = target.source
        while governor is not None:
            level = governor.drafter if isinstance(governor.drafter, Level) else None
            self.places.insert(0, Place(governor.name, governor, level))
            governor = governor.below
        self.levels = [level for place in reversed(self.places) for level in levels_of(place)]
        self.governors = [place.governor for place in reversed(self.places) if place.governor is not None]


def levels_of(place: Place) -> list[Level]:
    """The models at a place: one, several that are merged there with other drafters, or none."""
    if place.level is not None:
        return [place.level]
    members = getattr(place.governor.drafter, "members", ()) if place.governor is not None else ()
    return [member for member in members if isinstance(member, Level)]
