"""The tables of benchmarks/README.md, made from results of `cascade bench`.

    python benchmarks/page.py keep OUT.json NAME    put a bench file into benchmarks/results, without texts and rounds
    python benchmarks/page.py write                 make the page's tables anew; `check` says whether they are true

On the page, `<!-- table KIND NAME -->` begins a table and `<!-- end -->` ends it.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cascade.bench.figures import FIXED, summarise

HERE = Path(__file__).parent
PAGE, RESULTS = HERE / "README.md", HERE / "results"
BLOCK = re.compile(r"(<!-- table (\w+) ([\w-]+) -->\n).*?(<!-- end -->)", re.S)
BULK = ("text", "pieces", "rounds")  # of a run: most of the file's size, and in no table

SHOWN = ("chain, coupled", "tree dynamic, coupled", "chain, block", "tree dynamic, traversal")  # by category

Record = dict[str, Any]


def keep(out: Path, name: str) -> None:
    """Writes a bench file without its bulk, one run a line."""
    record = json.loads(out.read_text())
    runs = [{key: value for key, value in run.items() if key not in BULK} for run in record["runs"]]
    for run in runs:
        for level in (run["stats"] or {}).get("levels", ()):
            level.pop("decisions", None)
    head = {key: value for key, value in record.items() if key != "runs"}
    head["setup"].pop("configuration", None)
    for level in head["setup"]["levels"]:
        level["what"] = Path(level["what"]).name  # where a model lay is nobody's business
    head["summary"] = summarise(runs, record["setup"])
    lines = ",\n".join(json.dumps(run) for run in runs)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps(head, indent=1)[:-2] + ',\n "runs": [\n' + lines + "\n]}\n")


def results(name: str) -> Record:
    """A result that was kept."""
    record: Record = json.loads((RESULTS / f"{name}.json").read_text())
    return record


# -- tables ----------------------------------------------------------------------------------------------


def table(head: list[str], rows: list[list[str]]) -> str:
    """A markdown table; all columns but the first are numbers."""
    rule = ["---", *["---:"] * (len(head) - 1)]
    return "".join(f"| {' | '.join(row)} |\n" for row in [head, rule, *rows])


def number(value: float | None, form: str = ".2f", unit: str = "") -> str:
    """A figure, or a dash where there is none."""
    return "-" if value is None else f"{value:{form}}{unit}"


def speedup(figures: Record, key: str = "speedup") -> str:
    """A speedup with its interval; one under 1 stands out."""
    value, interval = figures[key], figures.get(f"{key}_interval")
    if value is None:
        return "-"
    text = f"{value:.2f}x"
    if interval is not None:
        text += f" ({interval[0]:.2f}-{interval[1]:.2f})"
    return f"**{text}** slower" if value < 1 else text


def overall(record: Record) -> str:
    """A line per system."""
    head = [
        "system",
        "questions",
        "tokens/s",
        "speedup",
        "pooled",
        "decode",
        "tokens/forward",
        "P50 s",
        "P95 s",
        "first token",
    ]
    head += ["own work ms", "compute/token", "same text"]
    rows = []
    for name, parts in record["summary"].items():
        if name.startswith(FIXED):
            continue
        f = parts["overall"]
        compute = f["compute_per_token"]
        rows.append(
            [
                name,
                str(f["questions"]),
                number(f["tokens_per_s"], ".1f"),
                speedup(f),
                number(f["pooled_speedup"], ".2f", "x"),
                speedup(f, "decode_speedup"),
                number(f["tau"]),
                number(f["latency_p50_s"], ".1f"),
                number(f["latency_p95_s"], ".1f"),
                number(f["first_token_ratio"], ".2f", "x"),
                number(f["own_work_ms"]),
                number(None if compute is None else compute["forwards"]),
                number(f["identical"], ".0%"),
            ]
        )
    return table(head, rows)


def categories(record: Record) -> str:
    """Speedups per category, a column per system."""
    names = [n for n in record["summary"] if n not in ("plain",) and not n.startswith(FIXED)]
    kinds = [c for c in record["summary"]["cascade"] if c != "overall"]
    rows = []
    for kind in [*kinds, "overall"]:
        cells = [record["summary"][n].get(kind) for n in names]
        decode = record["summary"]["cascade"][kind]
        rows.append(
            [kind, *("-" if f is None else speedup(f) for f in cells), number(decode["decode_speedup"], ".2f", "x")]
        )
    return table(["category", *names, "cascade, decode"], rows)


def levels(record: Record) -> str:
    """What each level did, per category."""
    rows = []
    for kind, figures in record["summary"]["cascade"].items():
        for level in figures["levels"]:
            rows.append(
                [
                    kind,
                    level["name"],
                    number(level["alpha"]),
                    number(level["accept_rate"]),
                    number(level["k_mean"], ".1f"),
                    number(level["time_share"], ".0%"),
                    number(level["bypassed_share"], ".0%"),
                ]
            )
    head = ["category", "level", "alpha", "accepted/drafted", "K", "share of time", "bypassed rounds"]
    return table([head[0], head[1], *head[2:]], rows)


def regret(record: Record) -> str:
    """How far the controllers stay behind the best fixed setting in hindsight."""
    rows = []
    for kind, figures in record["summary"]["cascade"].items():
        plain = record["summary"]["plain"][kind]
        best = figures["regret_best"] or "-"
        rows.append([kind, number(figures["regret"]), number(plain["regret"]), best.removeprefix(FIXED)])
    return table(["category", "cascade", "plain", "best fixed setting"], rows)


def rule_summary(runs: list[dict[str, Any]], name: str, temperature: float) -> dict[str, float]:
    """Of one variant at one temperature: tau, and speed over plain decoding's, all and without the first token."""
    mine = {r["question"]: r for r in runs if (r["variant"], r["temperature"]) == (name, temperature)}
    plain = {r["question"]: r for r in runs if (r["variant"], r["temperature"]) == ("plain", temperature)}

    def speed(r: dict[str, Any]) -> float:
        return float(r["tokens"] / r["seconds"])

    def decoding(r: dict[str, Any]) -> float:
        return float((r["tokens"] - 1) / (r["seconds"] - r["first"])) if r["tokens"] > 1 else 0.0

    long = [q for q in mine if mine[q]["tokens"] > 1 and plain[q]["tokens"] > 1]
    return {
        "tau": sum(r["tokens"] for r in mine.values()) / sum(r["forwards"] for r in mine.values()),
        "speedup": statistics.mean(map(speed, mine.values())) / statistics.mean(map(speed, plain.values())),
        "decode": statistics.mean(decoding(mine[q]) for q in long) / statistics.mean(decoding(plain[q]) for q in long),
        "same_text": statistics.mean(r["same_text"] for r in mine.values()),
    }


def rules(record: Record) -> str:
    """A line per rule and shape, greedy and at temperature 1; see rules.py."""
    names = list(dict.fromkeys(run["variant"] for run in record["runs"]))
    rows = []
    for name in names:
        cells = [name]
        for temperature in (0.0, 1.0):
            f = rule_summary(record["runs"], name, temperature)
            cells += [number(f["tau"]), number(f["speedup"], ".2f", "x"), number(f["decode"], ".2f", "x")]
            cells.append(number(f["same_text"], ".0%"))
        rows.append(cells)
    figures = ["speedup", "decode", "same text"]
    return table(["drafts, rule", "T = 0: tokens/forward", *figures, "T = 1: tokens/forward", *figures], rows)


def kinds(record: Record) -> str:
    """Speedups of some rules and shapes per category, greedy and at temperature 1."""
    names = [name for name in SHOWN if any(run["variant"] == name for run in record["runs"])]
    rows = []
    for category in dict.fromkeys(run["category"] for run in record["runs"]):
        runs = [run for run in record["runs"] if run["category"] == category]
        found = [rule_summary(runs, name, t)["speedup"] for t in (0.0, 1.0) for name in names]
        rows.append([category, *(number(value, ".2f", "x") for value in found)])
    return table(["category", *(f"T = {t}: {name}" for t in (0, 1) for name in names)], rows)


def control(record: Record) -> str:
    """Controllers in simulation; see control.py."""
    most = max(f["workloads"] for f in record["summary"])
    rows = []
    for f in record["summary"]:
        best, plain = f["best"], f["plain"]
        cells = [*(best[part] for part in ("median", "p95", "mean", "max")), plain["p99"], plain["max"]]
        figures = [number(cell, ".3f") for cell in cells]
        rows.append([f["controller"], f["drafter"], str(f["workloads"]), *figures, number(plain["over"], ".1%")])
    head = ["controller", "drafter", "texts", "over the best fixed K: median", "95 %", "mean", "worst"]
    head += ["over plain decoding: 99 %", "worst", "share over 1.05"]
    return (
        f"Controllers in simulation: the engine in virtual time on up to {most} made-up texts. Each figure is a "
        "controller's time over that of the best fixed K in hindsight, no drafts at all among them, or over plain "
        f"decoding's; under 1 it was faster.\n\n{table(head, rows)}"
    )


def hostile(record: Record) -> str:
    """What drafters that are wrong cost; see hostile.py."""
    rows = []
    for row in record["rows"]:
        back = ", ".join("never" if at is None else str(at) for at in row["back_after"])
        turns = "from token" in row["setting"]
        late = "-" if turns else number(row["bypassed"], ".3f", "x")
        rows.append([row["setting"], number(row["ratio"], ".3f", "x"), late, back if turns else "-"])
    head = ["drafter", "time over plain decoding's", "from token 50 on, bypassed", "tokens until it is back"]
    return table(head, rows)


def predictions(record: Record) -> str:
    """Predicted and measured seconds of some configurations; see predict.py."""
    lines, rows = record["lines"], []
    plain = next(line for line in lines if line["configuration"] == "plain")
    for line in lines:
        real, told = line["measured_s"], line["predicted_s"]
        speeds = [number(plain[key] / line[key], ".2f", "x") for key in ("measured_s", "predicted_s")]
        forwards = f"{line['measured_forwards']}, {line['predicted_forwards']}"
        rows.append([line["configuration"], *(number(s, ".1f") for s in (real, told)), number(told / real, ".3f")])
        rows[-1] += [*speeds, forwards]
    head = ["configuration", "measured s", "predicted s", "ratio", "speedup: measured", "predicted", "target forwards"]
    return table(head, rows)


def environment(record: Record) -> str:
    """What it was measured on, in one line."""
    e = record["environment"]
    return (
        f"{e['processor']}, {e['cores']} cores, {e['threads']} threads; torch {e['torch']}, transformers "
        f"{e['transformers']}, Python {e['python']}, cascade {e['cascade']}.\n"
    )


KINDS: dict[str, Callable[[Record], str]] = {
    made.__name__: made
    for made in (overall, categories, levels, regret, rules, kinds, control, hostile, predictions, environment)
}


def made(page: str) -> str:
    """The page with its tables made anew."""

    def block(match: re.Match[str]) -> str:
        return f"{match[1]}{KINDS[match[2]](results(match[3]))}{match[4]}"

    return BLOCK.sub(block, page)


def main(words: list[str]) -> int:
    """Runs one of the three; 1 if a check fails."""
    if words[:1] == ["keep"] and len(words) == 3:
        keep(Path(words[1]), words[2])
        return 0
    if words not in (["write"], ["check"]):
        print(__doc__, file=sys.stderr)
        return 2
    old = PAGE.read_text()
    new = made(old)
    if words == ["write"]:
        PAGE.write_text(new)
    return int(words == ["check"] and new != old)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
