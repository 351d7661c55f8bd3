"""The parts of a report that are words and tables: headline, setup, figures. All text is escaped here."""

from __future__ import annotations

import html
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from cascade.bench.figures import FIXED
from cascade.report.measures import baseline, categories

Bench = Mapping[str, Any]
Cell = tuple[str, str]  # what it says, and its CSS class
DASH = "–"


def escape(text: Any) -> str:
    """Text as HTML."""
    return html.escape(str(text))


# -- words -----------------------------------------------------------------------------------------------


def headline(bench: Bench) -> str:
    """The result in a sentence or two, as plain text."""
    overall = bench["summary"].get("cascade", {}).get("overall")
    if overall is None:
        return "There are no figures of the cascade yet"
    base, speed = baseline(bench), overall.get("speedup")
    asked = _count(overall["questions"], "question")
    if base is None or speed is None:
        return f"{number(overall['tokens_per_s'], 1)} tokens/s over {asked}; without plain decoding there is no speedup"
    against = "plain decoding" if base == "plain" else base
    said = f"{speed:.2f}x {against} over {asked}"
    interval = overall.get("speedup_interval")
    if interval is not None:
        said += f", 90\u00a0% interval {interval[0]:.2f}–{interval[1]:.2f}"
    if interval is not None and interval[0] <= 1 <= interval[1]:
        said += ": no clear difference"
    elif speed < 1:
        said += ": slower"
    same = overall.get("identical")
    return said if same is None else f"{said}; the same text in {round(same * overall['runs'])} of {overall['runs']}"


def losses(bench: Bench, systems: Iterable[str], names: Sequence[str]) -> list[str]:
    """A plain sentence per system: where it is slower than the baseline."""
    said = []
    for system in systems:
        rows = [(name, bench["summary"][system].get(name, {}).get("speedup")) for name in names if name != "overall"]
        known = [(name, speed) for name, speed in rows if speed is not None]
        lost = sorted((speed, name) for name, speed in known if round(speed, 2) < 1)
        if lost:
            where = ", ".join(f"{name} {speed:.2f}x" for speed, name in lost)
            said.append(f"{system} is slower in {len(lost)} of {len(known)}: {where}.")
        elif known:
            said.append(f"{system} is slower in none of {_count(len(known), 'category', 'categories')}.")
    return said


def _count(n: int, one: str, many: str | None = None) -> str:
    return f"{n} {one if n == 1 else many or one + 's'}"


def environment(bench: Bench) -> str:
    """One line on the machine and the versions, as plain text."""
    found = bench["environment"]
    processor = found.get("cuda") or found.get("processor")
    said = [str(processor)] if processor else []
    if found.get("threads"):
        said.append(f"{_count(found['threads'], 'thread')} on {_count(found.get('cores') or 0, 'core')}")
    versions = [f"{name} {found[name]}" for name in ("cascade", "torch", "transformers", "python") if found.get(name)]
    return "; ".join([*said, ", ".join(versions), *([found["platform"]] if found.get("platform") else [])])


def setup(bench: Bench) -> str:
    """What was measured, as a list of terms."""
    found = bench["setup"]
    levels = " → ".join(_level(level) for level in found.get("levels", ()))
    questions = found.get("questions") or {}
    limit = found.get("limit_per_category")
    terms = [
        ("levels, bottom to top", levels),
        ("rule", found.get("rule")),
        ("questions", f"{questions.get('file')}" + (f", at most {limit} of a category" if limit else "")),
        ("per question", f"up to {found.get('max_new_tokens')} tokens, {_count(found.get('repeats') or 1, 'repeat')}, "
                         f"batch {found.get('batch')}, {_sampling(found)}"),
        ("machine", environment(bench)),
    ]  # fmt: skip
    rows = "".join(f"<dt>{escape(term)}</dt><dd>{escape(said)}</dd>" for term, said in terms if said)
    more = f"<pre>{escape(found['summary'])}</pre>" if found.get("summary") else ""
    return (
        f"<dl>{rows}</dl><details><summary>What the probes found</summary>{more}</details>"
        if more
        else f"<dl>{rows}</dl>"
    )


def _level(level: Mapping[str, Any]) -> str:
    size = level.get("parameters")
    weights = None if not size else f"{size / 1e6:,.0f} M parameters" if size >= 1e6 else f"{size:,} parameters"
    about = [level.get("what"), level.get("dtype"), weights]
    said = ", ".join(str(part) for part in about if part and part != level["name"])
    return f"{level['name']} ({said})" if said else str(level["name"])


def _sampling(found: Mapping[str, Any]) -> str:
    if not found.get("temperature"):
        return "greedy"
    seed = "" if found.get("seed") is None else f", seed {found['seed']}"
    return f"temperature {found['temperature']:g}, top-p {found.get('top_p', 1.0):g}{seed}"


def systems(bench: Bench) -> str:
    """What each system is, with its settings, and which were left out and why."""
    rows = []
    for name, about in bench["setup"].get("systems", {}).items():
        if not name.startswith(FIXED):
            settings = ", ".join(f"{key}={value}" for key, value in (about.get("settings") or {}).items())
            said = escape(about.get("description", "")) + (f" <code>{escape(settings)}</code>" if settings else "")
            rows.append(f"<dt>{escape(name)}</dt><dd>{said}</dd>")
    for name, reason in (bench["setup"].get("skipped") or {}).items():
        rows.append(f"<dt>{escape(name)}</dt><dd><b class=skipped>not run</b>: {escape(reason)}</dd>")
    return f"<dl>{''.join(rows)}</dl>" if rows else ""


# -- tables ----------------------------------------------------------------------------------------------


def number(value: float | None, digits: int = 2, suffix: str = "") -> str:
    """A number, or a dash where there is none."""
    return DASH if value is None else f"{value:,.{digits}f}{suffix}"


def _speed(key: str) -> Callable[[Mapping[str, Any]], Cell]:
    def cell(row: Mapping[str, Any]) -> Cell:
        value, interval = row.get(key), row.get(f"{key}_interval")
        if value is None:
            return DASH, ""
        said = f"{value:.2f}x" + (f" ({interval[0]:.2f}–{interval[1]:.2f})" if interval else "")
        return (f"▼ {said}", "loss") if value < 1 else (said, "")

    return cell


def _plain(key: str, digits: int = 2, suffix: str = "", scale: float = 1) -> Callable[[Mapping[str, Any]], Cell]:
    def cell(row: Mapping[str, Any]) -> Cell:
        value = row.get(key)
        return number(None if value is None else value * scale, digits, suffix), ""

    return cell


def _compute(row: Mapping[str, Any]) -> Cell:
    value = row.get("compute_per_token")
    return (f"{value['forwards']:.2f} / {value['tokens']:.2f}" if value else DASH), ""


FIGURES: Sequence[tuple[str, str, Callable[[Mapping[str, Any]], Cell]]] = (
    ("tokens/s", "mean over questions", _plain("tokens_per_s", 1)),
    ("speedup", "against the baseline, with its 90 % interval", _speed("speedup")),
    ("pooled speedup", "all tokens in all the time", _plain("pooled_speedup", 2, "x")),
    ("decode speedup", "after the first token", _speed("decode_speedup")),
    ("tau", "tokens per forward of the target", _plain("tau")),
    ("forwards/token", "of the target", _plain("target_forwards_per_token")),
    ("P50 latency", "of a request, seconds", _plain("latency_p50_s", 2, " s")),
    ("P95 latency", "of a request, seconds", _plain("latency_p95_s", 2, " s")),
    ("first token", "median, milliseconds", _plain("first_token_s", 0, " ms", 1000)),
    ("first token ratio", "to the baseline's, median", _plain("first_token_ratio", 2, "x")),
    ("own work", "of the engine in a round of the target, median", _plain("own_work_ms", 2, " ms")),
    ("compute/token", "forwards / tokens fed per token, weighed by model size, target = 1", _compute),
    ("same text", "as plain decoding", _plain("identical", 0, " %", 100)),
    ("as hf-plain", "same text as hf-plain", _plain("identical_hf_plain", 0, " %", 100)),
    ("questions", "", _plain("questions", 0)),
    ("tokens", "generated in all", _plain("new_tokens", 0)),
)
LEVELS: Sequence[tuple[str, str, Callable[[Mapping[str, Any]], Cell]]] = (
    ("alpha", "accepted of tested", _plain("alpha")),
    ("accept rate", "accepted of drafted", _plain("accept_rate")),
    ("mean K", "its controller's", _plain("k_mean", 1)),
    ("drafted", "tokens", _plain("drafted", 0)),
    ("tested", "tokens", _plain("tested", 0)),
    ("accepted", "tokens", _plain("accepted", 0)),
    ("time share", "of the wall time", _plain("time_share", 1, " %", 100)),
    ("bypassed", "share of the times it was asked", _plain("bypassed_share", 0, " %", 100)),
    ("forwards/token", "of its own model", _plain("forwards_per_token")),
    ("tokens fed/token", "to its own model", _plain("tokens_fed_per_token")),
)
REGRET: Sequence[tuple[str, str, Callable[[Mapping[str, Any]], Cell]]] = (
    ("regret", "time over the best fixed setting's", _plain("regret", 2, "x")),
    ("best fixed setting", "known only afterwards", lambda row: (str(row.get("regret_best") or DASH), "text")),
)


def table(
    columns: Sequence[tuple[str, str, Callable[[Mapping[str, Any]], Cell]]],
    rows: Sequence[tuple[str, str, Mapping[str, Any]]],
    second: str,
) -> str:
    """A table with a row per category and system (or level), which `second` names."""
    shown = [column for column in columns if any(column[2](row)[0] != DASH for _, _, row in rows)]
    heads = "".join(f"<th scope=col>{escape(name)}<small>{escape(about)}</small></th>" for name, about, _ in shown)
    body, previous = [], None
    for category, name, row in rows:
        start = ' class="start"' if category != previous else ""
        cells = "".join(
            f"<td{f' class={kind}' if kind else ''}>{escape(said)}</td>"
            for said, kind in (cell(row) for _, _, cell in shown)
        )
        body.append(f"<tr{start}><th scope=row><b>{escape(category)}</b><span>{escape(name)}</span></th>{cells}</tr>")
        previous = category
    head = f"<tr><th scope=col>category<small>{escape(second)}</small></th>{heads}</tr>"
    inside = f"<table><thead>{head}</thead><tbody>{''.join(body)}</tbody></table>"
    return f'<div class=wide tabindex=0 role=region aria-label="{escape(second)} by category">{inside}</div>'


def figures(bench: Bench, *, fixed: bool = False) -> str:
    """Every figure of every system, or of a sweep's fixed settings; empty where there are none."""
    names = [name for name in bench["summary"] if name.startswith(FIXED) == fixed]
    rows = [
        (category, name, bench["summary"][name][category])
        for category in categories(bench)
        for name in names
        if category in bench["summary"][name]
    ]
    return table(FIGURES, rows, "system") if rows else ""


def levels(bench: Bench) -> str:
    """What each level of the cascade did, by category."""
    summary = bench["summary"].get("cascade", {})
    rows = [
        (category, level["name"], level)
        for category in categories(bench)
        for level in summary.get(category, {}).get("levels") or ()
    ]
    return table(LEVELS, rows, "level") if rows else ""


def regret(bench: Bench) -> str:
    """How far the cascade and plain decoding are from the best fixed setting; empty without a sweep."""
    rows = [
        (category, name, bench["summary"][name][category])
        for category in categories(bench)
        for name in ("cascade", "plain")
        if bench["summary"].get(name, {}).get(category, {}).get("regret") is not None
    ]
    return table(REGRET, rows, "system") if rows else ""
