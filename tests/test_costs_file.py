"""Costs that one process saves and the next begins with: what is taken, what is not, and what a warning says."""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path

import pytest

from cascade import CascadeConfig, ConfigError, Engine, LevelConfig, SamplingParams
from cascade.costs import RECENT, CostModel, Known
from cascade.costs_file import load_costs, machine
from cascade.testing import FixedCosts, ManualClock, ScriptedDrafter, ToyModel
from cascade.timing import WIDTHS
from tests.tiny import tiny

COLD, WARM = 3 * len(WIDTHS), 3  # forwards that a level times without a file, and with one
PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 5, 6, 7], [2, 2], [9, 1, 4, 4, 1]]
PARAMS = SamplingParams(max_new_tokens=60)


class Bench:
    """An engine of toys on a clock that their forwards move, and how many forwards building it took."""

    def __init__(self, costs: object = None, slow: float = 1.0, seed: int = 7, name: str = "draft", **options) -> None:
        self.clock, self.slow = ManualClock(), slow
        target = ToyModel(clock=self.clock, cost=lambda n: self.slow * (0.05 + 0.001 * n), **options)
        draft = ToyModel(seed=seed, mix=(target, 0.8), clock=self.clock, cost=lambda n: self.slow * (0.01 + 0.0002 * n))
        levels = ["ngram", LevelConfig(model=draft, name=name), LevelConfig(model=target, name="target")]
        self.engine = Engine(CascadeConfig(levels, costs=costs), clock=self.clock, check=True)
        self.costs = self.engine.costs
        self.forwards = draft.forwards, target.forwards

    def used(self) -> Bench:
        """After some requests, alone and together."""
        for prompts in ([PROMPTS[0]], PROMPTS):
            self.engine.generate(list(prompts), PARAMS)
        return self

    def table(self) -> list[float]:
        """Costs of forwards and drafts of many sizes and rows; -1 for what is not known."""
        sizes = [(n, rows) for n in (1, 2, 3, 5, 8, 13, 16, 17, 30, 64, 100, 900) for rows in (1, 2, 3, 5, 8)]
        forwards = [self.costs.seconds(level, *size) for level in ("draft", "target") for size in sizes]
        drafts = [self.costs.draft_seconds(level, 1, rows) for level in ("ngram", "draft") for rows in (1, 5)]
        return [-1.0 if seconds is None else seconds for seconds in forwards + drafts]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "costs.json"
    Bench().used().engine.save_costs(path)
    return path


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    found = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert all("\n" not in text for text in found)
    return [text for text in found if "tokens per forward" not in text]  # toys have little to gain


# -- what is taken ---------------------------------------------------------------------------------------


def test_an_engine_begins_with_what_another_measured(tmp_path, caplog):
    before = Bench().used()
    before.engine.save_costs(tmp_path / "costs.json")
    after = Bench(tmp_path / "costs.json")
    assert after.table() == pytest.approx(before.table(), rel=1e-5)
    assert after.table() != pytest.approx(Bench().table(), rel=1e-5), "a new engine knows less than a used one"
    assert warnings(caplog) == []


def test_sizes_that_are_no_integers_and_noise_come_back(tmp_path):
    bench = Bench()
    for i, n in enumerate([17, 20, 20, 23, 30, 31, 40, 300, 301, 2, 3, 3, 5] * 3):
        bench.costs.observe("target", n, 4, (0.1 + 0.01 * n) * (1 + i % 7 / 10))
    bench.engine.save_costs(str(tmp_path / "costs.json"))
    after = Bench()
    after.costs = after.engine.costs = CostModel()
    load_costs(str(tmp_path / "costs.json"), after.engine)
    assert after.table() == pytest.approx(bench.table(), rel=1e-5)
    assert [size.tokens for size in after.costs.known("target")[0][4]] == [2, 3, 5, 20, 40, 300.5]


def test_building_with_a_file_takes_fewer_forwards(file):
    assert Bench().forwards == (COLD, COLD)
    assert Bench(file).forwards == (WARM, WARM)


def test_what_the_file_lacks_is_timed_at_the_pace_of_now(tmp_path):
    path = tmp_path / "costs.json"
    Bench(max_length=8).engine.save_costs(path)  # whose target is never as wide as 16
    bench = Bench(path, slow=2.0)
    assert bench.forwards == (WARM, WARM + 2 * 3)
    assert [bench.costs.seconds("target", n) for n in WIDTHS] == pytest.approx([0.1 + 0.002 * n for n in WIDTHS])


def test_merged_drafters_and_drafter_objects(tmp_path, caplog):
    def build(costs=None):
        target = ToyModel(clock=clock, cost=lambda n: 0.05)
        draft = ToyModel(seed=7, mix=(target, 0.8), clock=clock, cost=lambda n: 0.01)
        merged = LevelConfig(drafter=[LevelConfig(model=draft, name="a"), ScriptedDrafter(kind="wrong")], name="both")
        return Engine(CascadeConfig([merged, target], costs=costs), clock=clock), draft

    clock = ManualClock()
    before, _ = build()
    before.generate(list(PROMPTS), PARAMS)
    before.save_costs(tmp_path / "costs.json")
    after, draft = build(tmp_path / "costs.json")
    assert draft.forwards == WARM
    assert after.costs.seconds("both/a", 4) == pytest.approx(0.01)
    assert after.costs.draft_seconds("both", 1, 5) == pytest.approx(before.costs.draft_seconds("both", 1, 5))
    assert after.costs.draft_seconds("both", 1, 5)
    assert warnings(caplog) == []


def test_models_of_transformers_are_told_apart_by_size_and_precision(tmp_path, caplog):
    def build(costs=None, **changes):
        model = tiny("llama", **changes)
        with Engine(CascadeConfig([LevelConfig(model=model, name="target")], costs=costs)) as engine:
            return engine

    path = tmp_path / "costs.json"
    build().save_costs(path)
    [level] = json.loads(path.read_text())["levels"]
    told = [level["is"][key] for key in ("model", "vocabulary", "dtype", "device")]
    assert told == ["transformers.models.llama.modeling_llama.LlamaForCausalLM", 211, "float64", "cpu"]
    assert len(build(path).target.timing.known) == len(WIDTHS)
    assert warnings(caplog) == []
    build(path, num_hidden_layers=1)
    [text] = warnings(caplog)
    assert f"another level 'target' (parameters {level['is']['parameters']}, here" in text


# -- the pace --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("slow", [2.0, 0.5])
def test_a_machine_at_another_pace_is_believed_from_the_first_request_on(tmp_path, slow):
    before, after = Bench().used(), None
    before.engine.save_costs(tmp_path / "costs.json")
    after = Bench(tmp_path / "costs.json", slow)
    assert after.table() == pytest.approx([slow * seconds for seconds in before.table()], rel=1e-5)


def test_a_pace_that_changes_after_the_start_is_followed(file):
    bench = Bench(file)
    usual = bench.costs.seconds("target", 4)
    bench.slow = 2.0
    bench.engine.generate([1, 2, 3], SamplingParams(max_new_tokens=4, speculate=False))
    assert bench.costs.seconds("target", 4) == pytest.approx(2.0 * usual, rel=1e-5)


def restored(least: float = 1.0) -> CostModel:
    costs = CostModel()
    costs.restore("m", {1: [Known(1, 0.1, 15), Known(8, 0.17, 15)]}, least)
    return costs


def test_one_stall_is_not_believed():
    costs = restored()
    costs.observe("m", 1, 1, 0.2)
    costs.observe("m", 8, 1, 17.0)
    assert costs.seconds("m", 8) == pytest.approx(0.34)


def test_the_pace_of_another_level_is_a_guess_until_there_is_one():
    costs = restored()
    costs.restore("other", {1: [Known(1, 0.01, 15)]}, 1.0)
    costs.observe("m", 1, 1, 0.2)
    assert costs.seconds("other", 1) == pytest.approx(0.02)
    costs.observe("other", 1, 1, 0.03)
    costs.observe("m", 1, 1, 0.2)
    assert costs.seconds("other", 1) == pytest.approx(0.03)


def test_restored_times_stay_while_the_pace_moves():
    costs = restored()
    for _ in range(50):
        costs.observe("m", 1, 1, 0.2)
    for _ in range(RECENT):
        costs.observe("m", 8, 1, 0.17)
    assert costs.seconds("m", 1) == pytest.approx(0.1)


def test_the_least_pace_comes_along():
    before = restored()
    for _ in range(20):
        before.observe("m", 1, 1, 0.05)
    for _ in range(20):
        before.observe("m", 1, 1, 0.2)
    found, least = before.known("m")
    assert least == pytest.approx(0.25)
    after = CostModel()
    after.restore("m", found, least)
    after.relax("m")
    assert after.seconds("m", 1) == pytest.approx(0.05)


# -- what is not taken -----------------------------------------------------------------------------------


def test_another_machine(file, caplog, monkeypatch):
    here = machine()
    monkeypatch.setattr("cascade.costs_file.machine", lambda: {**here, "processor": "Xeon", "threads": 99})
    bench = Bench(file)
    assert bench.forwards == (COLD, COLD)
    assert bench.table() == Bench().table()
    assert warnings(caplog) == [
        f"saved costs {file} are of another machine (processor {here['processor']!r}, here 'Xeon'; "
        f"threads {here['threads']}, here 99): ignored, measured anew"
    ]


def test_another_model_at_one_level(file, caplog):
    bench = Bench(file, seed=8)
    assert bench.forwards == (COLD, WARM)
    assert warnings(caplog) == [
        f"saved costs {file} are of another level 'draft' (model 'toy-7', here 'toy-8'): ignored, measured anew"
    ]
    assert bench.costs.draft_seconds("draft") is None, "how long its drafts take is not known either"


def test_another_drafter(file, caplog):
    levels = [LevelConfig(drafter=ScriptedDrafter(), name="ngram"), LevelConfig(model=ToyModel(), name="target")]
    Engine(CascadeConfig(levels, costs=file))
    [text] = warnings(caplog)
    assert "another level 'ngram' (drafter 'drafters.ngram.NgramDrafter', here 'cascade.testing.Scripted" in text


def test_another_name(file, caplog):
    assert Bench(file, name="small").forwards == (COLD, WARM)
    have = "['ngram', 'draft', 'target']"
    assert warnings(caplog) == [f"saved costs {file} have no level 'small', only {have}: measured anew"]


def test_a_file_that_is_yet_to_be_written(tmp_path, caplog):
    path = tmp_path / "costs.json"
    bench = Bench(path)
    assert bench.forwards == (COLD, COLD)
    assert warnings(caplog) == [
        f"saved costs {path}: there is no such file yet: measured anew; engine.save_costs writes it"
    ]
    bench.engine.save_costs(path)
    assert Bench(path).forwards == (WARM, WARM)


def changed(at: list[object], value: object):
    """A file with one value replaced, at a path of keys and indices; by a default deep in the draft model's tables."""

    def change(text: str) -> str:
        record = json.loads(text)
        inner = record
        for key in at[:-1]:
            inner = inner[key]
        inner[at[-1]] = value
        return json.dumps(record)

    return change


TARGET = ["levels", 2, "forwards"]  # the last level: what comes before it has been read by then
TABLE = [*TARGET, "tables", 0]
BROKEN = {
    "empty": (lambda text: "", "no JSON"),
    "torn": (lambda text: text[: len(text) // 2], "no JSON"),
    "binary": (lambda text: "\udcff", "utf-8"),
    "deep": (lambda text: "[" * 100_000, "recursion"),
    "a list": (lambda text: "[]", "it is no object"),
    "other format": (changed(["format"], 2), "it has format 2, and this is 1"),
    "no format": (lambda text: "{}", "it lacks 'format'"),
    "no machine": (changed(["machine"], None), "machine is not told"),
    "nested machine": (changed(["machine", "threads"], {"a": []}), "machine is not told"),
    "no levels": (changed(["levels"], []), "holds no costs"),
    "odd levels": (changed(["levels"], 3), "not iterable"),
    "a level twice": (changed(["levels", 2, "name"], "draft"), "cannot be named 'draft'"),
    "nested model": (changed(["levels", 2, "is"], [[]]), "what level 'target' is"),
    "no tables": (changed([*TARGET, "tables"], []), "a level without tables"),
    "an empty table": (changed(TABLE, {"rows": 1, "tokens": [], "seconds": [], "times": []}), "an empty table"),
    "odd table": (changed(TABLE, 3), "not subscriptable"),
    "NaN": (changed([*TABLE, "seconds", 0], math.nan), "NaN is no number"),
    "infinite": (changed([*TABLE, "seconds", 0], math.inf), "Infinity is no number"),
    "1e999": (
        lambda text: text.replace('"least pace": 1.0', '"least pace": 1e999'),
        "least pace of inf",
    ),
    "huge": (changed([*TABLE, "seconds", 0], 1e300), "1e+300 seconds"),
    "too large for a float": (changed([*TABLE, "seconds", 0], 10**400), "too large"),
    "negative": (changed([*TABLE, "seconds", 0], -0.1), "-0.1 seconds"),
    "text": (changed([*TABLE, "seconds", 0], "0.1"), "'0.1' seconds"),
    "a bool": (changed([*TABLE, "seconds", 0], True), "True seconds"),
    "negative size": (changed([*TABLE, "tokens", 0], -1), "-1 tokens"),
    "half a token": (changed([*TABLE, "tokens", 0], 1.5), "1.5 tokens"),
    "sizes that fall": (changed([*TABLE, "tokens", 0], 900), "do not rise"),
    "never measured": (changed([*TABLE, "times", 0], 0), "measured 0 times"),
    "too few": (changed([*TABLE, "seconds"], [0.1]), "shorter"),
    "odd rows": (changed([*TABLE, "rows"], 3), "a table for 3 rows"),
    "a pace of 0": (changed([*TARGET, "least pace"], 0), "a least pace of 0"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_file_is_told_and_ignored_as_a_whole(file, caplog, what):
    change, reason = BROKEN[what]
    text = change(file.read_text(encoding="utf-8"))
    assert text != file.read_text(encoding="utf-8")
    file.write_bytes(text.encode("utf-8", "surrogateescape"))
    bench = Bench(file)
    [told] = warnings(caplog)
    assert told.startswith(f"saved costs {file} cannot be used (")
    assert told.endswith("): ignored, measured anew")
    assert reason in told
    assert bench.forwards == (COLD, COLD)
    assert bench.table() == Bench().table()


def test_a_folder_is_told_and_ignored(tmp_path, caplog):
    assert Bench(tmp_path).forwards == (COLD, COLD)
    assert warnings(caplog) == [f"saved costs {tmp_path} cannot be used (Is a directory): ignored, measured anew"]


# -- refusals, and the file itself -----------------------------------------------------------------------


@pytest.mark.parametrize("value", [3, "", True, ["costs.json"]])
def test_costs_must_be_a_path(value):
    with pytest.raises(ConfigError, match="costs must be a path or None, not"):
        CascadeConfig(["m"], costs=value)


def test_only_what_was_measured_can_be_saved(tmp_path):
    def build(costs):
        return Engine(CascadeConfig([ToyModel()], costs=tmp_path / "absent.json"), costs=costs)

    path = tmp_path / "costs.json"
    with pytest.raises(ConfigError, match="only measured costs can be saved: this engine was given FixedCosts"):
        build(FixedCosts(lambda *_: 1.0)).save_costs(path)
    with pytest.raises(ConfigError, match="no costs were measured yet"):
        build(CostModel()).save_costs(path)
    assert not path.exists()


def test_costs_of_ones_own_go_before_the_file(file, caplog):
    target = ToyModel()
    engine = Engine(CascadeConfig([target], costs=file), costs=FixedCosts(lambda *_: 1.0))
    assert (target.forwards, engine.costs.seconds("target", 1), warnings(caplog)) == (0, 1.0, [])


@pytest.mark.parametrize("where", ["absent/costs.json", "", "costs.json/more.json"])
def test_a_place_that_cannot_be_written(file, where):
    with pytest.raises(ConfigError, match=r"costs cannot be saved to|costs are saved to a path") as caught:
        Bench().engine.save_costs(file.parent / where if where else where)
    assert "\n" not in str(caught.value)


def test_the_old_file_stays_where_a_new_one_fails(file, monkeypatch):
    def fails(*paths):
        raise OSError(28, "No space left on device")

    before, bench = file.read_bytes(), Bench()
    monkeypatch.setattr("os.replace", fails)
    with pytest.raises(ConfigError, match="No space left on device"):
        bench.engine.save_costs(file)
    assert [path.name for path in file.parent.iterdir()] == ["costs.json"]
    assert file.read_bytes() == before


def test_people_can_read_it_and_names_stay_as_they_are(tmp_path):
    path, name = tmp_path / "costs.json", 'a [1,  2] "ö"'
    Bench(name=name).engine.save_costs(path)
    text = path.read_text(encoding="utf-8")
    assert '"tokens": [1, 4, 8, 16, 64],' in text
    assert [level["name"] for level in json.loads(text)["levels"]] == ["ngram", name, "target"]
    assert Bench(path, name=name).forwards == (WARM, WARM)


def test_loading_says_what_it_took(file):
    bench = Bench(seed=8)
    bench.engine.costs = CostModel()
    assert load_costs(file, bench.engine) == ["ngram", "target"]
