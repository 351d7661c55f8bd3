"""What the charts show that is not in a benchmark's summary: acceptance by position, and where time went."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from typing import Any, NamedTuple

from cascade.bench.figures import FIXED, OVERALL, baseline_of, wall_of
from cascade.report.source import Request


class Position(NamedTuple):
    """A position in drafts, counted from 1: how many proposals were tested there, and how many held."""

    position: int
    tested: int
    held: int


def by_position(requests: Iterable[Request], level: str) -> list[Position]:
    """A level's conditional acceptance: of the proposals that reached a position, how many held there.

    A proposal of which t tokens were tested and a accepted was tested at positions 1 to t and held at 1 to a.
    """
    verdicts = [
        (int(tested), int(accepted))
        for request in requests
        for one in request.rounds
        for part in one["levels"]
        if part["name"] == level
        for _, tested, accepted in part.get("verdicts") or ()
    ]
    deepest = max((tested for tested, _ in verdicts), default=0)
    return [
        Position(
            j,
            sum(tested >= j for tested, _ in verdicts),
            sum(tested >= j and accepted >= j for tested, accepted in verdicts),
        )
        for j in range(1, deepest + 1)
    ]


class Shares(NamedTuple):
    """Where a category's wall time went, as shares of it.

    Attributes:
        levels: bottom to top: forwards, or proposals where a level has no model.
        own: the engine's own work, without those proposals.
        rest: outside of rounds.
    """

    levels: tuple[float, ...]
    own: float
    rest: float


def time_shares(bench: Mapping[str, Any], category: str) -> Shares | None:
    """How the cascade spent its time on a category, or on all of it; None where that is not known."""
    figures = bench["summary"].get("cascade", {}).get(category)
    calls = _calls(
        run
        for run in bench["runs"]
        if run["system"] == "cascade" and run["stats"] is not None and category in (run["category"], OVERALL)
    )
    wall = sum(wall_of(rows) for rows in calls)
    if not figures or not figures.get("levels") or wall <= 0:
        return None
    models = {level["name"] for level in bench["setup"]["levels"] if level["kind"] == "model"}
    parts = [(level["name"], level["time_share"] or 0.0) for level in figures["levels"]]
    proposals = sum(share for name, share in parts if name not in models)
    # Each row of a batch is told all of a round's work; the row that lives longest was told all of the call's.
    rounds = sum(max(run["stats"]["own_work_s"] for run in rows) for rows in calls) / wall
    own = max(rounds - proposals, 0.0)
    shares = tuple(share for _, share in parts)
    return Shares(shares, own, max(1.0 - sum(shares) - own, 0.0))


def _calls(runs: Iterable[Mapping[str, Any]]) -> list[list[Mapping[str, Any]]]:
    """The runs, those of one batch together."""
    calls: dict[Hashable, list[Mapping[str, Any]]] = {}
    for number, run in enumerate(runs):
        batch = run.get("batch")
        calls.setdefault(("alone", number) if batch is None else (run["repeat"], batch["id"]), []).append(run)
    return list(calls.values())


def baseline(bench: Mapping[str, Any]) -> str | None:
    """The system that speedups are against, None where none was run."""
    return baseline_of(bench["summary"])


def categories(bench: Mapping[str, Any]) -> list[str]:
    """The categories in the order of the questions, "overall" first."""
    seen = dict.fromkeys(run["category"] for run in bench["runs"])
    known = {category for figures in bench["summary"].values() for category in figures}
    return [OVERALL, *(category for category in seen if category in known)]


def compared(bench: Mapping[str, Any]) -> list[str]:
    """The systems worth a place in a chart: neither the baseline, which is the line at 1, nor a sweep's grid."""
    order = dict.fromkeys([*bench["setup"].get("systems", ()), *bench["summary"]])
    return [
        name for name in order if name in bench["summary"] and name != baseline(bench) and not name.startswith(FIXED)
    ]
