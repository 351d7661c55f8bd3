"""The charts of a report, as plotly figures: plain dicts of `data` and `layout`, in the light palette."""

from __future__ import annotations

import html
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import plotly.graph_objects as go

from cascade.bench.figures import OVERALL
from cascade.report import palette
from cascade.report.measures import Position, Shares, compared

Figure = dict[str, Any]
FEW = 20  # tests; a share of fewer is drawn hollow
ROW = 17  # pixels for each mark in a category's group
PADDING = 16  # between the groups
HEAD, FOOT = 8, 52  # pixels above a plot and below it

#: What all figures share. The page applies it, so that it is not repeated in each.
TEMPLATE: Figure = {
    "layout": {
        "font": {"family": "system-ui, sans-serif", "size": 13, "color": palette.page("ink")},
        "paper_bgcolor": palette.page("page"),
        "plot_bgcolor": palette.page("page"),
        "hoverlabel": {
            "bgcolor": palette.page("panel"),
            "bordercolor": palette.page("line"),
            "font": {"family": "system-ui, sans-serif", "size": 13, "color": palette.page("ink")},
            "align": "left",
        },
        "margin": {"l": 8, "r": 22, "t": HEAD, "b": FOOT},
        "xaxis": {
            "automargin": True, "gridcolor": palette.page("line"), "linecolor": palette.page("line"),
            "zeroline": False, "title": {"font": {"size": 13}, "standoff": 8}, "fixedrange": True,
        },
        "yaxis": {
            "automargin": True, "gridcolor": palette.page("line"), "linecolor": palette.page("line"),
            "zeroline": False, "title": {"font": {"size": 13}, "standoff": 8}, "fixedrange": True,
        },
        "dragmode": False,
        "showlegend": False,
    }
}  # fmt: skip


def plain(figure: go.Figure) -> Figure:
    """A figure as JSON's own types, without plotly's default look."""
    record: Figure = figure.to_plotly_json()
    record["layout"].pop("template", None)
    return record


def safe(text: str) -> str:
    """Text that plotly shows as it is: it takes a subset of HTML for markup."""
    return html.escape(text, quote=False)


def label(text: Any, width: int = 16) -> str:
    """A name that fits beside an axis: at most two lines, and nothing that plotly takes for markup."""
    words = str(text).replace("_", "_ ").replace("-", "- ")
    lines = [line.replace("_ ", "_").replace("- ", "-") for line in textwrap.wrap(words, width)] or [""]
    if len(lines) > 2:
        lines = [lines[0], lines[1][: width - 1] + "…"]
    return "<br>".join(safe(line) for line in lines)


def wrapped(text: str, width: int = 28) -> str:
    """A sentence in lines that fit a phone."""
    return "<br>".join(safe(line) for line in textwrap.wrap(text, width))


def _rows(names: Sequence[str], marks: int) -> Figure:
    """The layout of horizontal groups, one for each name, the first on top."""
    ticks = [f"<b>{label(name)}</b>" if name == OVERALL else label(name) for name in names]
    axis = {
        "type": "category", "categoryorder": "array", "categoryarray": list(names), "range": [len(names) - 0.5, -0.5],
        "tickmode": "array", "tickvals": list(names), "ticktext": ticks, "showgrid": False,
    }  # fmt: skip
    lines = [
        {"type": "line", "x0": 0, "x1": 1, "xref": "paper", "y0": place - 0.5, "y1": place - 0.5, "layer": "below",
         "line": {"color": palette.page("line"), "width": 1}}
        for place in range(1, len(names) if marks > 1 else 0)
    ]  # fmt: skip
    return {"yaxis": axis, "shapes": lines, "height": HEAD + FOOT + len(names) * max(ROW * marks + PADDING, 38)}


# -- speedups --------------------------------------------------------------------------------------------


def speedups(bench: Mapping[str, Any], names: Sequence[str], baseline: str) -> Figure:
    """Speedup against the baseline, a mark per category and system with its 90 % interval."""
    systems = compared(bench)
    figure = go.Figure(layout=_rows(names, len(systems)))
    edges = [1.0]
    for index, system in enumerate(systems):
        rows = [(name, bench["summary"][system][name]) for name in names if name in bench["summary"][system]]
        rows = [(name, row) for name, row in rows if row.get("speedup") is not None]
        ends = [row.get("speedup_interval") or [row["speedup"]] * 2 for _, row in rows]
        edges += [edge for pair in ends for edge in pair]
        figure.add_trace(_speeds(system, index, rows, ends))
    left, right = min(edges), max(edges)
    pad = 0.06 * (right - left) + 0.02
    span = [max(0.0, left - pad), right + pad]
    figure.update_layout(
        scattermode="group",
        scattergap=0.3,
        xaxis={"range": span, "title": {"text": f"speedup over {safe(baseline)}"}, "ticksuffix": "x"},
    )
    figure.add_shape(
        type="rect", x0=span[0], x1=1, y0=0, y1=1, yref="paper", layer="below", line_width=0,
        fillcolor=palette.page("loss"), opacity=0.09,
    )  # fmt: skip
    figure.add_shape(
        type="line", x0=1, x1=1, y0=0, y1=1, yref="paper", line={"color": palette.page("loss"), "width": 2}
    )
    return plain(figure)


def _speeds(system: str, index: int, rows: Sequence[tuple[str, Any]], ends: Sequence[Sequence[float]]) -> go.Scatter:
    """One system's marks; those below 1 have a red rim."""
    speed = [row["speedup"] for _, row in rows]
    colour = palette.system(index)
    rims = [palette.page("loss") if value < 1 else colour for value in speed]
    return go.Scatter(
        name=safe(system), x=speed, y=[name for name, _ in rows], orientation="h", mode="markers",
        offsetgroup=system,
        error_x={
            "type": "data", "symmetric": False, "thickness": 2, "width": 4, "color": colour,
            "array": [high - value for (_, high), value in zip(ends, speed, strict=True)],
            "arrayminus": [value - low for (low, _), value in zip(ends, speed, strict=True)],
        },
        marker={
            "symbol": palette.SYMBOLS[index % len(palette.SYMBOLS)], "size": 11 if index == 0 else 9,
            "color": colour, "line": {"color": rims, "width": [2.5 if value < 1 else 0 for value in speed]},
        },
        customdata=[[low, high, row["questions"], row["tokens_per_s"], safe(name)]
                    for (name, row), (low, high) in zip(rows, ends, strict=True)],
        hovertemplate="<b>%{fullData.name}</b>, %{customdata[4]}<br>%{x:.2f}x<br>90 % interval %{customdata[0]:.2f} to "
        "%{customdata[1]:.2f}<br>%{customdata[2]} questions<br>%{customdata[3]:.1f} tokens/s<extra></extra>",
    )  # fmt: skip


# -- acceptance ------------------------------------------------------------------------------------------


def positions(parts: Mapping[str, Sequence[Position]], levels: Sequence[str]) -> Figure:
    """Conditional acceptance by draft position, a line per level."""
    figure = go.Figure(layout={"height": 330})
    for name, rows in parts.items():
        index = list(levels).index(name)
        symbol = palette.SYMBOLS[palette.mark(index)]
        figure.add_trace(
            go.Scatter(
                name=safe(name), x=[row.position for row in rows], y=[row.held / row.tested for row in rows],
                customdata=[[row.held, row.tested] for row in rows], mode="lines+markers",
                line={"color": palette.level(index, len(levels)), "width": 2},
                marker={"size": 9, "symbol": [symbol if row.tested >= FEW else f"{symbol}-open" for row in rows]},
                hovertemplate="<b>%{fullData.name}</b>, position %{x}<br>%{customdata[0]} of %{customdata[1]} held "
                "(%{y:.0%})<extra></extra>",
            )
        )  # fmt: skip
    deepest = max((len(rows) for rows in parts.values()), default=1)
    figure.update_xaxes(
        title_text="position in the draft", dtick=1 if deepest <= 12 else 4, tick0=0, range=[0.6, deepest + 0.4]
    )
    figure.update_yaxes(range=[-0.04, 1.04], tickformat=".0%", title_text="held, of those that got there")
    return plain(figure)


def alphas(bench: Mapping[str, Any], names: Sequence[str], levels: Sequence[str]) -> Figure:
    """Alpha, accepted of tested tokens, per category and level."""
    lower = levels[:-1]
    figure = go.Figure(layout=_rows(names, len(lower)))
    for index, level in enumerate(lower):
        found = [(name, _level(bench, name, level)) for name in names]
        rows = [(name, part) for name, part in found if part is not None and part["alpha"] is not None]
        symbol = palette.SYMBOLS[palette.mark(index)]
        figure.add_trace(
            go.Scatter(
                name=safe(level), x=[part["alpha"] for _, part in rows], y=[name for name, _ in rows],
                orientation="h", mode="markers", offsetgroup=level,
                marker={"size": 10, "color": palette.level(index, len(levels)), "symbol": symbol},
                customdata=[[part["accepted"], part["tested"], part["drafted"], part["k_mean"], safe(name)]
                            for name, part in rows],
                hovertemplate="<b>%{fullData.name}</b>, %{customdata[4]}<br>alpha %{x:.2f}<br>%{customdata[0]} of "
                "%{customdata[1]} tested accepted<br>%{customdata[2]} drafted, mean K %{customdata[3]:.1f}"
                "<extra></extra>",
            )
        )  # fmt: skip
    figure.update_layout(scattermode="group", scattergap=0.3)
    figure.update_xaxes(range=[-0.03, 1.03], title_text="alpha: accepted of tested tokens", dtick=0.25)
    return plain(figure)


def _level(bench: Mapping[str, Any], category: str, level: str) -> Any:
    parts = bench["summary"].get("cascade", {}).get(category, {}).get("levels") or ()
    return next((part for part in parts if part["name"] == level), None)


# -- time ------------------------------------------------------------------------------------------------


def time(shares: Mapping[str, Shares], levels: Sequence[str]) -> Figure:
    """Where the wall time went: a bar per category, the target's share first."""
    figure = go.Figure(layout=_rows(list(shares), 1))
    order = range(len(levels) - 1, -1, -1)
    parts = [(levels[i], palette.level(i, len(levels)), [row.levels[i] for row in shares.values()]) for i in order]
    parts.append(("engine's own work", palette.page("own"), [row.own for row in shares.values()]))
    parts.append(("rest", palette.page("rest"), [row.rest for row in shares.values()]))
    for name, colour, values in parts:
        figure.add_trace(
            go.Bar(
                name=safe(name), x=values, y=list(shares), orientation="h", width=0.62,
                marker={"color": colour, "line": {"color": palette.page("page"), "width": 1}},
                customdata=[safe(category) for category in shares],
                hovertemplate="<b>%{fullData.name}</b>, %{customdata}<br>%{x:.1%} of the wall time<extra></extra>",
            )
        )  # fmt: skip
    figure.update_layout(barmode="stack")
    figure.update_xaxes(range=[0, 1.001], dtick=0.25, tickformat=".0%", title_text="share of the wall time")
    return plain(figure)
