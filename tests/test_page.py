"""The benchmark page says what its results say, and these are what their runs come to."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from cascade.bench.figures import summarise
from tests.records import bench

ROOT = Path(__file__).parent.parent
spec = importlib.util.spec_from_file_location("page", ROOT / "benchmarks" / "page.py")
page = importlib.util.module_from_spec(spec)
spec.loader.exec_module(page)

RESULTS = sorted(page.RESULTS.glob("*.json"))
BENCHES = [path for path in RESULTS if "setup" in json.loads(path.read_text())]


def test_the_pages_tables_are_those_of_its_results() -> None:
    text = page.PAGE.read_text()
    assert page.made(text) == text
    named = {match[3] for match in page.BLOCK.finditer(text)}
    assert named == {path.stem for path in RESULTS}, "every result is shown, and what is shown is there"


@pytest.mark.parametrize("path", BENCHES, ids=lambda path: path.stem)
def test_a_results_summary_follows_from_its_runs(path: Path) -> None:
    kept = json.loads(path.read_text())
    assert json.loads(json.dumps(summarise(kept["runs"], kept["setup"]))) == kept["summary"]


@pytest.mark.parametrize("path", BENCHES, ids=lambda path: path.stem)
def test_a_result_tells_nothing_of_whose_machine_it_was(path: Path) -> None:
    assert "/" not in "".join(str(level["what"]) for level in json.loads(path.read_text())["setup"]["levels"])


@pytest.mark.parametrize("kind", sorted(page.KINDS.keys() - {"rules", "kinds", "control", "hostile", "predictions"}))
def test_every_kind_of_table_can_be_made(kind: str, tmp_path: Path, monkeypatch) -> None:
    out = tmp_path / "out.json"
    out.write_text(json.dumps(bench()))
    monkeypatch.setattr(page, "RESULTS", tmp_path / "results")
    page.keep(out, "some")
    kept = page.results("some")
    assert "text" not in kept["runs"][0]
    assert kept["summary"].keys() == bench()["summary"].keys()
    text = page.made(f"<!-- table {kind} some -->\nold\n<!-- end -->\n")
    assert "old" not in text
    if kind != "environment":
        figures = kept["summary"]["cascade"]["overall"]
        assert f"{figures['speedup']:.2f}x" in text or kind not in ("overall", "categories")
        assert len({line.count("|") for line in text.splitlines() if line.startswith("|")}) == 1


def test_what_rules_bring_is_counted_against_plain_decoding() -> None:
    def run(variant: str, temperature: float, question: int, seconds: float, forwards: int) -> dict[str, object]:
        same = {"variant": variant, "temperature": temperature, "category": "qa", "question": question}
        return {**same, "tokens": 11, "seconds": seconds, "first": 1.0, "forwards": forwards, "same_text": True}

    variants = {"plain": (11.0, 11), "chain, coupled": (6.0, 4)}
    runs = [run(v, t, q, *figures) for v, figures in variants.items() for t in (0.0, 1.0) for q in range(2)]
    made = page.rules({"runs": runs})
    assert "| chain, coupled | 2.75 | 1.83x | 2.00x | 100% | 2.75 | 1.83x | 2.00x | 100% |" in made
    assert "| qa | 1.83x | 1.83x |" in page.kinds({"runs": runs})


def test_controllers_are_a_line_per_kind_of_drafter() -> None:
    best = {"median": 1.0123, "p95": 1.1, "p99": 1.2, "max": 1.3, "mean": 1.02}
    plain = {"median": 0.8, "p95": 1.0, "p99": 1.01, "max": 1.0449, "over": 0.001}
    line = {"controller": "pid", "drafter": "silent", "workloads": 300, "best": best, "plain": plain}
    made = page.control({"summary": [line, {**line, "drafter": "tree", "workloads": 1000}]})
    assert "up to 1000 made-up texts" in made
    assert "| pid | silent | 300 | 1.012 | 1.100 | 1.020 | 1.300 | 1.010 | 1.045 | 0.1% |" in made
    assert len({line.count("|") for line in made.splitlines() if line.startswith("|")}) == 1


def test_what_drafters_cost_and_what_was_predicted_are_shown() -> None:
    rows = [
        {"setting": "a wrong table", "ratio": 1.01, "bypassed": 1.0, "back_after": [None]},
        {"setting": "a table, right from token 200 on", "ratio": 0.6, "bypassed": 0.5, "back_after": [33]},
    ]
    made = page.hostile({"rows": rows})
    assert "| a wrong table | 1.010x | 1.000x | - |" in made
    assert "| a table, right from token 200 on | 0.600x | - | 33 |" in made
    line = {"measured_s": 10.0, "predicted_s": 9.0, "measured_forwards": 5, "predicted_forwards": 6}
    fast = {**line, "configuration": "fast", "measured_s": 5.0, "predicted_s": 5.0}
    made = page.predictions({"lines": [{**line, "configuration": "plain"}, fast]})
    assert "| fast | 5.0 | 5.0 | 1.000 | 2.00x | 1.80x | 5, 6 |" in made
