"""What happened in a round: the records that observers read, and the JSON-lines trace."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from cascade.hookspecs import hookimpl

if TYPE_CHECKING:
    from cascade.request import Request
    from cascade.result import Stats


@dataclass(frozen=True, slots=True)
class LevelRound:
    """What one level did for one request in one round of the target.

    Attributes:
        k: tokens the controller asked for last, None where the level was not asked.
        drafted, tested, accepted: of what it handed up to whoever verified it.
        verdicts: the same per proposal, [(drafted, tested, accepted)]: a level may propose several times in a
            round of the target, to a level in between.
        forwards: of its own model.
        bypassed: whether it passed the question on to the drafter below.
        reason: why it changed its mind in this round, if it did.
    """

    name: str
    k: int | None
    drafted: int
    tested: int
    accepted: int
    verdicts: tuple[tuple[int, int, int], ...]
    forwards: int
    bypassed: bool
    reason: str | None


@dataclass(frozen=True, slots=True)
class Round:
    """One round of the target for one request.

    Attributes:
        request: the request's id.
        round: counted from 0; round 0 contains the prompt.
        position: tokens the request had before.
        tokens, origins: what was emitted, and the level that first proposed each token.
        batch: requests in the same forward.
        seconds: the round's wall time, shared by the batch.
        levels: bottom to top, the target last.
    """

    request: int
    round: int
    position: int
    tokens: tuple[int, ...]
    origins: tuple[int, ...]
    batch: int
    seconds: float
    levels: tuple[LevelRound, ...]


class Observer:
    """Follows one request. Observers run after a round is complete, never inside one."""

    def on_round(self, round: Round) -> None:
        """A round is over."""

    def on_end(self, stats: Stats) -> None:
        """The request is over."""


class TraceObserver(Observer):
    """Writes one JSON line per round, and one with the stats at the end."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def on_round(self, round: Round) -> None:
        """Writes the round."""
        self._write(asdict(round))

    def on_end(self, stats: Stats) -> None:
        """Writes the request's figures."""
        self._write({"stats": stats.as_dict()})

    def _write(self, record: dict[str, Any]) -> None:
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()


class JsonTrace:
    """A plugin that traces every request into one JSON-lines file: `plugins=[JsonTrace("t.jsonl")]`."""

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self._file: TextIO | None = None

    @hookimpl
    def cascade_make_observer(self, request: Request) -> Observer:
        """Opens the file when the first request begins."""
        if self._file is None:
            self._file = self._path.open("w", encoding="utf-8")
        return TraceObserver(self._file)

    def close(self) -> None:
        """Closes the file; a later request starts it anew."""
        if self._file is not None:
            self._file.close()
            self._file = None
