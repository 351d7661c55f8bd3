"""Puts the page together: sections of words, tables and places for charts, then the data its script draws."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from importlib.resources import files
from string import Template
from typing import Any

from plotly.offline import get_plotlyjs

import cascade
from cascade.report import charts, measures, palette, tables, timeline
from cascade.report.source import Source
from cascade.report.tables import escape


def render(source: Source) -> str:
    """The whole page as text. It asks nothing of any other file or server."""
    drawn: dict[str, charts.Figure] = {}
    bench = [] if source.bench is None else [*_results(source.bench, drawn), *_levels(source, drawn)]
    figures = [] if source.bench is None else [_figures(source.bench)]
    sections = [*bench, _request(source), *figures]
    data = {
        "levels": list(source.levels),
        "charts": drawn,
        "template": charts.TEMPLATE,
        "dark": palette.DARK,
        "requests": [timeline.view(request, source.levels) for request in source.requests],
    }
    page = Template(_file("page.html")).substitute(
        title=escape(f"{source.name} · cascade report"),
        styles=palette.variables(len(source.levels)) + _file("page.css"),
        header=_header(source),
        sections="\n".join(sections),
        version=escape(cascade.__version__),
        data=as_json(data),
        plotly=get_plotlyjs(),
        script=_file("page.js"),
    )
    return page.encode("utf-8", "replace").decode("utf-8")  # half a character, a lone surrogate, has no UTF-8


def as_json(data: Any) -> str:
    """JSON that can stand inside a script element: nothing in it ends the element or begins a comment."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"), ensure_ascii=False)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _file(name: str) -> str:
    return (files("cascade.report") / name).read_text(encoding="utf-8")


# -- sections --------------------------------------------------------------------------------------------


def _section(name: str, title: str, *parts: str) -> str:
    heading = f'<h2 id="{name}-title">{escape(title)}</h2>'
    return f'<section id="{name}" aria-labelledby="{name}-title">{heading}{"".join(parts)}</section>'


def _chart(drawn: dict[str, charts.Figure], name: str, figure: charts.Figure, caption: str, legend: str) -> str:
    """The place of a chart, which keeps its height before it is drawn, under its legend and over its caption."""
    drawn[name] = figure
    height = figure["layout"]["height"]
    return (
        f'<figure>{legend}<div class=chart id="chart-{name}" role=img aria-label="{escape(caption)}" '
        f'style="min-height:{height}px"></div><figcaption>{escape(caption)}</figcaption></figure>'
    )


def _legend(entries: Iterable[tuple[str, str, str]]) -> str:
    """What the marks of a chart mean: names, glyphs and colours, the latter as CSS variables."""
    items = "".join(
        f'<li><i style="color:var(--{colour})">{glyph}</i>{escape(name)}</li>' for name, glyph, colour in entries
    )
    return f"<ul class=legend>{items}</ul>"


def _system_marks(names: Sequence[str]) -> str:
    count = len(palette.SYSTEMS)
    return _legend((name, palette.GLYPHS[i % count], f"system-{i % count}") for i, name in enumerate(names))


def _level_marks(levels: Sequence[str]) -> str:
    marks = enumerate(levels[:-1])
    return _legend((name, palette.GLYPHS[palette.mark(index)], f"level-{index}") for index, name in marks)


def _time_marks(levels: Sequence[str]) -> str:
    parts = [(name, "■", f"level-{index}") for index, name in enumerate(levels)]
    return _legend([*reversed(parts), ("engine's own work", "■", "own"), ("rest", "■", "rest")])


def _missing(text: str) -> str:
    return f"<p class=missing>{escape(text)}</p>"


def _header(source: Source) -> str:
    note = f"<p class=unfinished>unfinished: {escape(source.unfinished)}</p>" if source.unfinished else ""
    if source.bench is None:
        rounds = sum(len(request.rounds) for request in source.requests)
        tokens = sum(len(request.tokens) for request in source.requests)
        said = f"{tokens} tokens in {rounds} rounds of {source.levels[-1]}: {tokens / rounds:.2f} per round"
        chain = " → ".join(source.levels)
        return f"<p class=kind>trace · {escape(source.name)}</p><h1>{escape(said)}</h1>{note}<p>{escape(chain)}</p>"
    return (
        f"<p class=kind>benchmark · {escape(source.name)}</p><h1>{escape(tables.headline(source.bench))}</h1>"
        f"{note}{tables.setup(source.bench)}"
    )


def _results(bench: Mapping[str, Any], drawn: dict[str, charts.Figure]) -> list[str]:
    """Speedups, and how far they are from the best fixed settings."""
    base, names, systems = measures.baseline(bench), measures.categories(bench), measures.compared(bench)
    if base is None:
        parts = [_missing("No speedups: neither plain nor hf-plain was run (cascade bench --against plain).")]
    elif not systems:
        parts = [_missing(f"Nothing but {base} was run, so there is nothing to compare.")]
    else:
        caption = (
            f"Each mark is a system's speed over {base}'s on one category, the bar its 90\u00a0% interval over "
            "questions. Right of the line is faster; marks in the shaded part, with a red rim, are slower."
        )
        parts = [_chart(drawn, "speedup", charts.speedups(bench, names, base), caption, _system_marks(systems))]
        parts += [f"<ul>{''.join(f'<li>{escape(line)}</li>' for line in tables.losses(bench, systems, names))}</ul>"]
    sections = [_section("speedup", "Speedup by category", *parts, tables.systems(bench))]
    if regret := tables.regret(bench):
        about = (
            "<p>Regret is the time taken over the time of the best fixed levels and K of that category, which only "
            "the sweep knows, afterwards. 1.00x means: as good as the best fixed setting.</p>"
        )
        sections.append(_section("regret", "Regret against fixed settings", about, regret))
    return sections


def _levels(source: Source, drawn: dict[str, charts.Figure]) -> list[str]:
    """Acceptance and time by level, as far as they were recorded."""
    bench = source.bench or {}
    names, levels = measures.categories(bench), source.levels
    if len(levels) < 2 or not (bench["summary"].get("cascade", {}).get("overall") or {}).get("levels"):
        return [_section("acceptance", "Acceptance by level", _missing("No figures of levels below the target."))]
    found = {name: measures.by_position(source.requests, name) for name in levels[:-1]}
    parts = {name: rows for name, rows in found.items() if rows}
    if parts:
        caption = (
            "Of the proposals that were tested as far as a position, the share whose token held there. "
            f"Hollow marks stand for fewer than {charts.FEW} tests."
        )
        first = _chart(drawn, "positions", charts.positions(parts, levels), caption, _level_marks(levels))
    else:
        first = _missing("Acceptance by position is not in the file: it has no rounds with verdicts.")
    caption = "Alpha is the share of tested tokens that were accepted. The further right, the better the drafts."
    second = _chart(drawn, "alpha", charts.alphas(bench, names, levels), caption, _level_marks(levels))
    sections = [_section("acceptance", "Acceptance by level and draft position", first, second)]
    shares = {name: share for name in names if (share := measures.time_shares(bench, name)) is not None}
    if shares:
        caption = (
            "Shares of the cascade's wall time: forwards of each model, or proposals of a level without one; the "
            "engine's own work between them; the rest is spent outside of rounds."
        )
        drawing = _chart(drawn, "time", charts.time(shares, levels), caption, _time_marks(levels))
        sections.append(_section("time", "Where the time goes", drawing))
    return sections


def _request(source: Source) -> str:
    """The section that shows one request at a time; its script fills it."""
    if not source.requests:
        return _section("request", "One request", _missing("No rounds are in the file, so no request can be followed."))
    options = "".join(f'<option value="{i}">{escape(one.label)}</option>' for i, one in enumerate(source.requests))
    ids = (
        ""
        if any(one.pieces is not None for one in source.requests)
        else "Tokens are shown as ids: the file has no text. "
    )
    lower = len(source.levels) > 1
    steps = (
        "<h3>K and bypass</h3><figure><div class=chart id=timeline role=img aria-label='K of each level over the "
        "request'></div><figcaption>The line is the controller's K, the bars are the tokens accepted in a "
        "round; a model hands up more than K where it is sure, and fewer where it is in doubt. Grey: "
        "bypassed, or not asked. Triangles: a decision; hover or tap for its reason.</figcaption></figure>"
    )
    text = (
        "<h3>The text, by the level that proposed it</h3><ul id=legend class=legend></ul>"
        "<div id=text tabindex=0 role=group aria-label='Generated tokens; walk with the arrow keys' "
        "aria-describedby=detail></div>"
        f"<p id=detail aria-live=polite style='--lower:{len(source.levels) - 1}'></p>"
        f"<p class=caption>{ids}Prompts are not in the file.</p>"
    )
    choose = f"<p><label for=choose>Request</label> <select id=choose>{options}</select></p>"
    return _section("request", "One request, token by token", choose, steps if lower else "", text)


def _figures(bench: Mapping[str, Any]) -> str:
    """All figures, as tables."""
    fixed, levels = tables.figures(bench, fixed=True), tables.levels(bench)
    main = tables.figures(bench) or _missing("No figures yet.")
    parts = [f"<h3>Systems</h3>{main}", f"<h3>Levels of the cascade</h3>{levels}" if levels else ""]
    if fixed:
        parts.append(f"<details><summary>Fixed settings of the sweep</summary>{fixed}</details>")
    return _section("figures", "All figures", *parts)
