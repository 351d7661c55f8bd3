"""One request over its course: K, what was accepted, bypassed stretches and decisions, a panel per level."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import plotly.graph_objects as go

from cascade.report import palette
from cascade.report.charts import Figure, plain, safe, wrapped
from cascade.report.source import Request

PANEL, GAP, TOP, BOTTOM = 120, 46, 40, 52  # pixels


@dataclass(frozen=True)
class Step:
    """A level's part in one round, which emitted the tokens from `start` to `end`."""

    round: int
    start: int
    end: int
    part: Mapping[str, Any]

    @property
    def asked(self) -> bool:
        """Whether the level had a K and used it."""
        return self.part["k"] is not None and not self.part["bypassed"]


def steps(request: Request, level: int) -> list[Step]:
    """A level's rounds in order; positions count from the request's first new token."""
    first = request.rounds[0]["position"]
    return [
        Step(one["round"], one["position"] - first, one["position"] - first + len(one["tokens"]), one["levels"][level])
        for one in request.rounds
    ]


def stretches(rounds: Sequence[Step]) -> Iterator[list[Step]]:
    """The rounds, cut wherever the level begins or ceases to be asked."""
    run: list[Step] = []
    for step in rounds:
        if run and run[-1].asked != step.asked:
            yield run
            run = []
        run.append(step)
    if run:
        yield run


def timeline(request: Request, levels: Sequence[str]) -> Figure:
    """K of every lower level as steps over the tokens emitted so far; the level nearest to the target on top."""
    lower = list(range(len(levels) - 1))[::-1]
    inner = len(lower) * PANEL + (len(lower) - 1) * GAP
    figure = go.Figure(layout={"height": inner + TOP + BOTTOM, "showlegend": False, "hovermode": "closest"})
    for place, level in enumerate(lower):
        axis = "" if place == 0 else str(place + 1)
        top = 1 - place * (PANEL + GAP) / inner
        rounds = steps(request, level)
        peak = max([1, *(max(step.part["k"] or 0, step.part["accepted"]) for step in rounds)])
        colour = palette.level(level, len(levels))
        figure.add_traces([*_panel(rounds, colour, peak, f"y{axis}"), _decisions(rounds, colour, peak, f"y{axis}")])
        figure.layout[f"yaxis{axis}"] = {
            "domain": [max(top - PANEL / inner, 0), top], "range": [-0.04 * peak, 1.32 * peak],
            "dtick": max(1, round(peak / 4)), "tick0": 0, "anchor": "x",
        }  # fmt: skip
        figure.add_annotation(
            text=f"<b>{safe(levels[level])}</b>", x=0, xref="paper", xanchor="left", y=top, yref="paper",
            yanchor="bottom", yshift=4, showarrow=False, font={"size": 13, "color": colour},
        )  # fmt: skip
    end = max(len(request.tokens), 1)
    figure.update_layout(
        margin={"t": TOP, "b": BOTTOM},
        barmode="overlay",
        xaxis={
            "range": [-0.01 * end, 1.01 * end],
            "title": {"text": "tokens emitted"},
            "fixedrange": False,
            "anchor": "free",
            "position": 0,
        },
    )
    return plain(figure)


def _panel(rounds: Sequence[Step], colour: str, peak: int, axis: str) -> list[go.Bar | go.Scatter]:
    """Bypassed stretches, bars of accepted tokens, and the steps of K."""
    asked = [step for step in rounds if step.asked]
    idle = [run for run in stretches(rounds) if not run[0].asked]
    bars = {"yaxis": axis, "xaxis": "x", "showlegend": False}
    shade = go.Bar(
        x=[(run[0].start + run[-1].end) / 2 for run in idle], width=[run[-1].end - run[0].start for run in idle],
        y=[1.32 * peak] * len(idle), marker={"color": palette.page("own"), "opacity": 0.28, "line": {"width": 0}},
        customdata=[[run[0].round, run[-1].round, _idle(run[0].part)] for run in idle],
        hovertemplate="%{customdata[2]} in rounds %{customdata[0]} to %{customdata[1]}<extra></extra>",
        name="bypassed", **bars,
    )  # fmt: skip
    accepted = go.Bar(
        x=[(step.start + step.end) / 2 for step in asked], width=[max(step.end - step.start, 0.2) for step in asked],
        y=[step.part["accepted"] for step in asked],
        marker={"color": colour, "opacity": 0.35, "line": {"width": 0}},
        hoverinfo="skip", name="accepted", **bars,
    )  # fmt: skip
    return [shade, accepted, _k(rounds, colour, axis)]


def _idle(part: Mapping[str, Any]) -> str:
    return "bypassed" if part["bypassed"] else "not asked"


def _k(rounds: Sequence[Step], colour: str, axis: str) -> go.Scatter:
    """The steps of K; a gap where the level was not asked."""
    x: list[float | None] = []
    y: list[float | None] = []
    about: list[Any] = []
    for run in stretches(rounds):
        if not run[0].asked:
            continue
        for step in (*run, run[-1]):  # the last one twice: its step has an end as well
            x.append(step.start)
            y.append(step.part["k"])
            about.append([step.round, step.part["drafted"], step.part["tested"], step.part["accepted"]])
        x[-1] = run[-1].end
        x.append(None)
        y.append(None)
        about.append(None)
    return go.Scatter(
        x=x, y=y, customdata=about, mode="lines+markers", line={"shape": "hv", "color": colour, "width": 2},
        marker={"size": 5}, yaxis=axis, xaxis="x", showlegend=False, name="K",
        hovertemplate="<b>round %{customdata[0]}</b>: K %{y}<br>%{customdata[1]} drafted, %{customdata[2]} tested<br>"
        "%{customdata[3]} accepted<extra></extra>",
    )  # fmt: skip


def _decisions(rounds: Sequence[Step], colour: str, peak: int, axis: str) -> go.Scatter:
    """A mark where the level's governor changed its mind, with its reason."""
    told = [step for step in rounds if step.part["reason"]]
    return go.Scatter(
        x=[step.start for step in told], y=[1.18 * peak] * len(told), mode="markers", cliponaxis=False,
        marker={"symbol": "triangle-down", "size": 11, "color": colour},
        customdata=[[step.round, wrapped(step.part["reason"])] for step in told],
        hovertemplate="<b>round %{customdata[0]}</b><br>%{customdata[1]}<extra></extra>",
        yaxis=axis, xaxis="x", showlegend=False, name="decisions",
    )  # fmt: skip


def view(request: Request, levels: Sequence[str]) -> dict[str, Any]:
    """What the page's script shows of a request: its tokens, and of each round every lower level's part.

    Returns:
        `rounds` holds [round, tokens emitted, batch, seconds, parts] with a part of
        [k, drafted, tested, accepted, bypassed, reason] per level below the target, bottom to top.
    """
    keys = ("k", "drafted", "tested", "accepted", "bypassed", "reason")
    rounds = [
        [one["round"], len(one["tokens"]), one["batch"], one["seconds"],
         [[part[key] for key in keys] for part in one["levels"][:-1]]]
        for one in request.rounds
    ]  # fmt: skip
    return {
        "label": request.label,
        "tokens": list(request.tokens),
        "pieces": None if request.pieces is None else list(request.pieces),
        "origins": list(request.origins),
        "rounds": rounds,
        "figure": timeline(request, levels),
    }
