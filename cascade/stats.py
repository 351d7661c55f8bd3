"""Figures of a request, read from the counters that levels and governors keep."""

from __future__ import annotations

import logging
from typing import NamedTuple

from cascade.chain import Chain, Place, levels_of
from cascade.governed import GovernedRow
from cascade.governor import Governor
from cascade.merged import Merged
from cascade.progress import LevelRow
from cascade.request import Request
from cascade.result import Chunk, LevelStats, Stats
from cascade.trace import LevelRound, Round

LOW = 1.5  # tokens per forward of the target under which speculation hardly pays
LONG = 32  # rounds that say so
AGAIN = 100  # such requests until the log hears of it again

log = logging.getLogger("cascade")


class Counts(NamedTuple):
    """One level's counters for one request at one moment."""

    drafted: int
    tested: int
    accepted: int
    proposals: int
    forwards: int
    decisions: int


class Ledger:
    """Reads the counters of a chain of levels.

    Args:
        chain: the levels.
    """

    def __init__(self, chain: Chain) -> None:
        self._places = chain.places
        self._low = 0  # requests that stayed under

    def snapshot(self, row_id: int) -> tuple[Counts, ...]:
        """The counters now, bottom to top, to be compared with later ones."""
        return tuple(self._counts(row_id, place) for place in self._places)

    @staticmethod
    def _counts(row_id: int, place: Place) -> Counts:
        own = place.governor.rows.get(row_id) if place.governor is not None else None
        forwards = sum(row.forwards for row in _models(place, row_id))
        if own is None:
            return Counts(0, 0, 0, 0, forwards, 0)
        return Counts(own.drafted, own.tested, own.accepted, len(own.verdicts), forwards, len(own.decisions))

    def round(self, request: Request, chunk: Chunk, before: tuple[Counts, ...], batch: int, seconds: float) -> Round:
        """The record of the round that just ended, from the counters before and after it."""
        levels = []
        for (name, governor, _), old, new in zip(self._places, before, self.snapshot(request.id), strict=True):
            own = governor.rows.get(request.id) if governor is not None else None
            levels.append(
                LevelRound(
                    name=name,
                    k=own.k if own is not None else None,
                    drafted=new.drafted - old.drafted,
                    tested=new.tested - old.tested,
                    accepted=new.accepted - old.accepted,
                    verdicts=tuple(own.verdicts[old.proposals :]) if own is not None else (),
                    forwards=new.forwards - old.forwards,
                    bypassed=own.bypassed if own is not None else False,
                    reason=own.decisions[-1][2] if own is not None and new.decisions > old.decisions else None,
                )
            )
        position = request.length - len(chunk.tokens)
        return Round(
            request.id, request.rounds - 1, position, chunk.tokens, chunk.origins, batch, seconds, tuple(levels)
        )

    def stats(self, request: Request) -> Stats:
        """The figures of a request that is over, before its rows are freed."""
        new, rounds = len(request.tokens), request.rounds
        first = None if request.first_token is None else request.first_token - request.began
        each = new / rounds if rounds else 0.0
        return Stats(
            new_tokens=new,
            target_forwards=rounds,
            tokens_per_forward=each,
            warning=self._warning(request, rounds, each),
            wall_s=request.ended - request.began,
            first_token_s=first,
            own_work_s=request.own_work,
            levels=tuple(self._level(request, place) for place in self._places),
        )

    def _warning(self, request: Request, rounds: int, each: float) -> str | None:
        """What to say of a request that speculation did not help; the log hears of the first, and of few later ones."""
        may = [name for name, governor, _ in self._places if governor is not None and self._may(request, governor)]
        if rounds < LONG or not may or each >= LOW:
            return None
        warning = (
            f"{each:.2f} tokens per forward of the target over {rounds} forwards: with {', '.join(may)} speculation "
            "hardly pays here; stats.decisions says why, and `cascade plan` which levels would"
        )
        if self._low % AGAIN == 0:
            log.warning("request %s: %s", request.id, warning)
        self._low += 1
        return warning

    @staticmethod
    def _may(request: Request, governor: Governor) -> bool:
        row = governor.rows.get(request.id)
        return row is not None and row.barred is None

    @staticmethod
    def _level(request: Request, place: Place) -> LevelStats:
        name, governor, level = place
        own = governor.rows.get(request.id) if governor is not None else None
        model = level.rows.get(request.id) if level is not None else None
        models = _models(place, request.id)
        drafted, tested, accepted = (own.drafted, own.tested, own.accepted) if own is not None else (0, 0, 0)
        return LevelStats(
            name=name,
            drafted=drafted,
            tested=tested,
            accepted=accepted,
            accept_rate=accepted / drafted if drafted else None,
            alpha=accepted / tested if tested else None,
            forwards=sum(row.forwards for row in models),
            tokens_fed=sum(row.tokens_fed for row in models),
            time_s=model.seconds if model is not None else own.seconds if own is not None else 0.0,
            k_mean=own.k_sum / len(own.verdicts) if own is not None and own.verdicts else None,
            bypassed_rounds=own.bypassed_rounds if own is not None else 0,
            asks=own.asks if own is not None else 0,
            proposals=len(own.verdicts) if own is not None else 0,
            dropped=own.dropped if own is not None else 0,
            decisions=tuple(own.decisions) if own is not None else (),
            members=_members(governor, own) if governor is not None and own is not None else (),
        )


def _models(place: Place, row_id: int) -> list[LevelRow]:
    """What the models at a place keep of a request: one, several that are merged, or none."""
    return [level.rows[row_id] for level in levels_of(place) if row_id in level.rows]


def _members(governor: Governor, row: GovernedRow) -> tuple[tuple[str, int, int], ...]:
    names = governor.drafter.names if isinstance(governor.drafter, Merged) else ()
    return tuple((name, *row.members.get(i, (0, 0))) for i, name in enumerate(names))
