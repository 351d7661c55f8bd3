"""`cascade plan`: what pays and what does not, on recordings whose answer is known, and the command on a toy model."""

import functools
import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from cascade import BypassConfig, CascadeConfig, Engine, LevelConfig, SamplingParams, load_config
from cascade.bench.questions import Question
from cascade.cli import main
from cascade.config import normalise_levels
from cascade.costs import CostModel, FixedCosts
from cascade.errors import ConfigError
from cascade.planning.figures import acceptance
from cascade.planning.measuring import WIDTHS, Measured, built_in, measure, spread
from cascade.planning.planner import plan
from cascade.planning.search import KS, Simulator, choices
from cascade.planning.source import config_source
from cascade.planning.what_if import read_what_if
from cascade.plugins import create
from cascade.recording import synthetic
from cascade.testing import ManualClock, ToyModel

# A model of letters, as a plugin brings one.
TOY = """
from cascade import hookimpl
from cascade.testing import ToyModel

class Letters(ToyModel):
    tokenizer = "letters"

    def encode(self, prompt):
        return [c if isinstance(c, int) else ord(c) % 27 for c in prompt]

    def decode(self, ids):
        return "".join(chr(97 + i) if i < 26 else " " for i in ids)

@hookimpl
def cascade_load_model(ref, device, dtype):
    target = Letters(vocab_size=27, seed=1, order=1, max_length=400)
    if ref == "toy":
        return target
    if ref == "toy-draft":
        return ToyModel(vocab_size=27, seed=2, order=1, mix=(target, 0.9))
"""
PAIR = CascadeConfig(levels=[LevelConfig(model="draft"), LevelConfig(model="target")])


def recordings(share, level="draft", count=4, tokens=40):
    """Answers in which a draft is right at a share of the places, evenly spread."""
    rights = np.floor(np.arange(1, tokens + 1) * share) > np.floor(np.arange(tokens) * share)
    return [
        replace(synthetic(rights, level=level, prompt=8, seed=i), category="ab"[i % 2], question_id=i)
        for i in range(count)
    ]


def costs(**each):
    """A forward takes so many seconds, whatever its width."""
    return FixedCosts(lambda level, tokens: each.get(level))


@functools.cache
def planned(share=0.8, draft=0.1, config=PAIR, what_if=(), **options):
    measured = Measured(recordings(share), costs(draft=draft, target=1.0), 0.0)
    assumed = read_what_if(what_if, ["draft", "target"])
    return plan(config, measured, what_if=assumed, **options)


# -- what pays ---------------------------------------------------------------------------------------


def test_a_cheap_draft_that_is_often_right_pays():
    found = planned()
    assert found.best is not None
    assert found.best.levels == ("draft",)
    assert found.best.adaptive.speedup > 1.5
    assert found.plain.tokens_per_s == pytest.approx(1.0)
    assert [level.name for level in normalise_levels(found.config, [])] == ["draft", "target"]
    assert found.config.levels[0].k == found.first_ks["draft"] == found.best.fixed.ks["draft"]
    assert found.levels[0].adds == pytest.approx(found.best.adaptive.speedup - 1)


def test_a_draft_as_dear_as_its_target_does_not_pay():
    found = planned(draft=1.0)
    assert found.best is None
    assert [level.model for level in found.config.levels] == ["target"]
    assert found.first_ks == {}
    assert found.levels[0].adds < 0.02
    assert not found.categories


def test_k_grows_with_what_is_right():
    ks = [planned(share).best.fixed.ks["draft"] for share in (0.5, 0.95)]
    assert ks[0] < ks[1]
    assert set(ks) <= set(KS)


def test_bounds_are_those_of_the_formulas():
    """Target 1, draft 0.1, nothing dearer when wide: K + 1 tokens in 1 + K / 10; K 16 is the last."""
    found = planned(share=1.0)
    one, first = found.levels[0], 1 / 40  # of plain decoding, what comes before the first token
    assert found.ideal == pytest.approx(1 / (first + (1 - first) / 17))
    assert (found.ideal_k, one.right_k) == (16, 16)
    assert one.right == pytest.approx(1 / (first + (1 - first) * 2.6 / 17))
    assert one.cost == pytest.approx(0.1)
    assert one.alone <= one.right
    assert one.alone < one.free <= found.ideal
    assert one.acceptance.alpha == 1.0


def test_own_work_is_counted_for_every_forward():
    busy = plan(PAIR, Measured(recordings(0.8), costs(draft=0.1, target=1.0), 0.5))
    assert busy.plain.tokens_per_s == pytest.approx(1 / 1.5)
    assert busy.levels[0].cost == pytest.approx(0.6 / 1.5)
    assert busy.best.adaptive.speedup < planned().best.adaptive.speedup


def test_categories_and_counts():
    found = planned()
    assert {name: count for name, (count, _) in found.categories.items()} == {"a": 2, "b": 2}
    assert (found.questions, found.tokens, found.batch) == (4, 160, 1)
    json.dumps(found.as_dict())


def test_a_batch_is_planned_as_a_batch():
    alone, four = planned(), planned(batch=4)
    assert four.plain.tokens_per_s == pytest.approx(4 * alone.plain.tokens_per_s)
    assert not four.categories  # none fills a batch


def test_a_table_is_judged_by_what_it_proposes():
    config = CascadeConfig(levels=["ngram", *PAIR.levels])
    found = planned.__wrapped__(config=config)
    assert [choice.levels for choice in found.choices] == [("ngram",), ("draft",), ("ngram", "draft")]
    assert found.best.levels == ("draft",)  # made-up texts repeat nothing
    assert found.levels[0].acceptance.alpha in (None, 0.0)
    assert found.levels[0].adds == pytest.approx(
        found.choices[2].adaptive.speedup / found.choices[1].adaptive.speedup - 1
    )


def test_of_many_levels_not_all_sets_are_tried():
    names = [f"d{i}" for i in range(5)]
    config = CascadeConfig(levels=[LevelConfig(model=name, name=name) for name in names] + ["target"])
    one = recordings(0.7, level="d0", count=1)[0]
    every = [replace(one, said=dict.fromkeys(names, one.said["d0"]))]
    table = costs(target=1.0, **{name: 0.1 * (i + 1) for i, name in enumerate(names)})
    simulator = Simulator(config, every, lambda: table, 1, 0.0, create(entry_points=False))
    simulator.best_ks = lambda levels: dict.fromkeys(levels, 2)  # the search is tested above
    tried = [choice.levels for choice in choices(simulator)]
    assert tried[:6] == [(name,) for name in names] + [tuple(names)]
    assert all(tuple(other for other in names if other != name) in tried for name in names)
    assert len(tried) < 2**5 - 1


def test_levels_that_are_off_are_not_tried():
    config = CascadeConfig(levels=[LevelConfig(model="draft", k=0), "target"])
    assert planned.__wrapped__(config=config).choices == ()


# -- what it rests on --------------------------------------------------------------------------------


def test_the_interval_of_one_question_is_that_of_its_tokens():
    found = acceptance([(100, 70)])
    assert found.alpha == 0.7
    assert found.width == pytest.approx(1.96 * (72 / 104 * 32 / 104 / 104) ** 0.5)  # 0.0887
    assert found.questions == 4  # (0.0887 / 0.05)^2 is 3.15


def test_questions_that_differ_tell_less_than_their_tokens():
    # Off by 15 of 50 each: variance 2 / 1 * (15^2 + 15^2) / 100^2.
    found = acceptance([(50, 50), (50, 20), (0, 0)])
    assert found.width == pytest.approx(1.96 * (2 * 450 / 1e4) ** 0.5)
    assert found.questions == -(-2 * found.width**2 // 0.05**2)


def test_enough_is_enough():
    assert acceptance([(1000, 900)] * 9).questions == 0
    assert acceptance([]).alpha is None
    assert acceptance([(4, 4)]).width > 0.2  # four of four are no certainty


def test_too_few_tokens_say_how_many_are_needed():
    with pytest.raises(ConfigError, match=r"from 40 answer tokens .* at least 50"):
        plan(PAIR, Measured(recordings(0.8, count=1, tokens=40), costs(draft=0.1, target=1.0)))
    found = planned(share=0.6)
    assert any("acceptance of draft is 0.6" in line and "ask about" in line for line in found.remarks)


def test_unknown_costs_are_refused_with_a_way_out():
    with pytest.raises(ConfigError, match=r"level 'draft'.*--what-if draft:seconds=12ms.*--costs"):
        plan(PAIR, Measured(recordings(0.8), costs(target=1.0), 0.0))


def test_measuring_learns_what_every_width_takes():
    clock = ManualClock()
    target = ToyModel(vocab_size=27, seed=1, order=1, clock=clock, cost=lambda n: 1.0 + 0.01 * n)
    draft = ToyModel(vocab_size=27, mix=(target, 0.9), clock=clock, cost=lambda n: 0.1 + 0.01 * n)
    target.encode = lambda prompt: [c if isinstance(c, int) else ord(c) % 27 for c in prompt]
    config = CascadeConfig(levels=[LevelConfig(model=draft, name="draft"), LevelConfig(model=target, name="target")])
    questions = [Question(i, "a", f"question {i}") for i in range(6)]
    with Engine(config, clock=clock, costs=CostModel()) as engine:
        found = measure(engine, questions, SamplingParams(max_new_tokens=16), batch=2)
    for width in WIDTHS:
        if width <= 8:  # wider ones of two rows share a size with others
            assert found.costs.seconds("target", 2 * width, 2) == pytest.approx(1.0 + 0.02 * width)
            assert found.costs.seconds("draft", 2 * width, 2) == pytest.approx(0.1 + 0.02 * width)
    assert [len(one.tokens) for one in found.recordings] == [16] * 6
    assert found.plain == pytest.approx(2 / 1.02, rel=0.05)
    assert plan(config, found, batch=2).simulated_plain == pytest.approx(found.plain, rel=0.05)


def test_categories_take_turns():
    four = recordings(0.5)
    assert [one.question_id for one in spread(four, 3)] == [0, 1, 2]
    assert [one.question_id for one in spread([four[0], four[2], four[1]], 2)] == [0, 1]


# -- machines that are not at hand -------------------------------------------------------------------


def test_assumed_costs_decide_who_pays():
    slow = planned(what_if=("draft:seconds=2s",))
    assert slow.best is None
    fast = planned(draft=2.0, what_if=("draft:seconds=50ms", "target:seconds=1s,per_token=1ms"))
    assert fast.best is not None
    assert not any("not assumed" in line for line in fast.remarks)
    assert any(line.startswith("target is not assumed") for line in slow.remarks)


def test_a_link_costs_each_proposal_once():
    """Always right with K 12: of 40 tokens 39 in 3 rounds, each with one way there and one back."""
    near, far = (
        planned(share=1.0, what_if=("draft:seconds=100ms", *more))
        for more in ([], ["draft:placement=remote", "link:latency=250ms,bandwidth=1TB/s"])
    )

    def seconds(found):
        return found.tokens / found.best.fixed.tokens_per_s

    assert far.best.fixed.ks["draft"] == near.best.fixed.ks["draft"] == 12
    rounds = 4 * 3  # four answers
    assert seconds(far) - seconds(near) == pytest.approx(rounds * 0.5, abs=1e-3)
    assert far.levels[0].right < near.levels[0].right


def test_tables_have_neither_parameters_nor_a_place():
    config = CascadeConfig(levels=["ngram", *PAIR.levels])
    measured = Measured(recordings(0.8), costs(draft=0.1, target=1.0), 0.0)
    for text in ("ngram:seconds=1us,placement=remote", "ngram:params=1B,gpu=h100"):
        assumed = read_what_if([text], ["ngram", "draft", "target"])
        with pytest.raises(ConfigError, match="a drafter without a model"):
            plan(config, measured, what_if=assumed)


def test_costs_of_a_merged_level_are_those_of_its_drafters():
    config = CascadeConfig(levels=[LevelConfig(drafter=["ngram", LevelConfig(model="draft")], name="both"), "target"])
    every = recordings(0.8)
    names = ["both/ngram", "both/draft", "both", "target"]
    measured = Measured(every, costs(target=1.0), 0.0)
    found = plan(config, measured, what_if=read_what_if(["both/draft:seconds=100ms,placement=remote"], names))
    [one] = found.levels
    assert one.cost == pytest.approx(0.1)
    assert one.alone < one.free
    assert one.alone < one.right
    assert [line for line in found.remarks if "not assumed" in line] == [
        "both/ngram is not assumed: it keeps its measured costs",
        "target is not assumed: it keeps its measured costs",
    ]
    with pytest.raises(ConfigError, match="merged there: both/ngram, both/draft"):
        plan(config, measured, what_if=read_what_if(["both:seconds=100ms"], names))


# -- the configuration as Python ---------------------------------------------------------------------

WHOLE = CascadeConfig(
    levels=[
        LevelConfig(drafter="ngram", options={"n_max": 6}),
        LevelConfig(drafter=["ngram", LevelConfig(model="self", dtype="int8", name="copy")], name="both", budget=8),
        LevelConfig(model='a "b"/model', dtype="int8", k=5, tail=True, tree=(2, 1), bypass=BypassConfig(threshold=0.2)),
        "a/model",
    ],
    rule="block",
    max_batch=4,
    bypass=BypassConfig(min_tests=3),
)


def loaded(tmp_path, source):
    file = tmp_path / "made.py"
    file.write_text(source)
    return load_config(file)


@pytest.mark.parametrize("kept", [(0, 1, 2, 3), (1, 3), (2, 3), (3,)])
def test_a_configuration_survives_as_python(tmp_path, kept):
    named = normalise_levels(WHOLE, ["ngram"])
    config = replace(WHOLE, levels=[named[i] for i in kept], costs="c.json")
    again = loaded(tmp_path, config_source(config, WHOLE, ["ngram"]))
    assert normalise_levels(again, ["ngram"]) == list(config.levels)
    assert replace(again, levels=config.levels) == config


def test_names_are_written_where_the_user_gave_them_or_they_would_change():
    original = CascadeConfig(
        levels=[LevelConfig(model="x/m"), LevelConfig(model="y/m"), LevelConfig(model="t", name="big")]
    )
    named = normalise_levels(original, [])
    assert [level.name for level in named] == ["m", "m-2", "big"]
    source = config_source(replace(original, levels=named[1:]), original)
    assert 'name="m-2"' in source
    assert 'name="big"' in source
    assert 'name="m"' not in config_source(replace(original, levels=named), original)


def test_objects_are_taken_from_the_file_they_are_in(tmp_path):
    file = tmp_path / "own.py"
    file.write_text(
        "from cascade import CascadeConfig, LevelConfig\nfrom cascade.testing import ScriptedDrafter, ToyModel\n"
        "target = ToyModel()\nmodel = ToyModel(seed=1, mix=(target, 0.5))\n"
        "config = CascadeConfig(levels=[ScriptedDrafter(), LevelConfig(model=model, name='d', tail=True), target])\n"
    )
    original = load_config(file)
    named = normalise_levels(original, [])
    config = replace(original, levels=[replace(named[1], k=3, tail=False), named[2]], max_batch=2)
    again = loaded(tmp_path, config_source(config, original, (), str(file)))
    assert [type(level.model).__name__ for level in normalise_levels(again, [])] == ["ToyModel", "ToyModel"]
    assert (again.levels[0].k, again.levels[0].tail, again.levels[0].name, again.max_batch) == (3, False, "d", 2)
    whole = replace(original, levels=[replace(named[0], k=7), *named[1:]])
    assert loaded(tmp_path, config_source(whole, original, (), str(file))).levels[0].k == 7
    with pytest.raises(ConfigError, match="an object"):
        config_source(config, original)


# -- the command -------------------------------------------------------------------------------------


@pytest.fixture
def command(tmp_path, capsys, monkeypatch):
    """Runs `cascade plan` on the toy model; returns status, out, err."""
    (tmp_path / "toy.py").write_text(TOY)
    monkeypatch.chdir(tmp_path)

    def run(*words, levels=("ngram", "toy-draft", "toy")):
        chosen = [word for level in levels for word in ("--level", level)]
        status = main(["plan", "--plugin", "toy.py", *chosen, "--max-new-tokens", "12", *words])
        out, err = capsys.readouterr()
        return SimpleNamespace(status=status, out=out, err=err)

    return run


@pytest.fixture
def small(monkeypatch, tmp_path):
    """Questions that the toy model can hold."""
    questions = [{"question_id": i, "category": "ab"[i % 2], "turns": [f"{'what is it ' * (i + 1)}"]} for i in range(6)]
    (tmp_path / "q.jsonl").write_text("".join(json.dumps(one) + "\n" for one in questions))
    return ["--questions", "q.jsonl"]


FAST = [
    word
    for text in ("ngram:seconds=5us", "toy-draft:seconds=1ms", "toy:seconds=10ms", "engine:overhead=0ms")
    for word in ("--what-if", text)
]


def test_a_plan_end_to_end(command, small, tmp_path):
    ran = command(*small, *FAST, "--recordings", "r.jsonl", "--save", "c.json", "--out", "made.py", "--json", "p.json")
    assert ran.status == 0, ran.err
    assert "What each set of levels would come to, on the assumed machine" in ran.out
    assert "By category" in ran.out
    assert "The configuration is in made.py." in ran.out
    record = json.loads((tmp_path / "p.json").read_text())
    assert record["questions"] == 6
    assert "toy-draft" in record["best"]["levels"]
    assert record["config"] == (tmp_path / "made.py").read_text()
    assert (tmp_path / "c.json").is_file()
    config = load_config(tmp_path / "made.py")
    assert config.costs == "c.json"
    with Engine(config) as engine:
        assert engine.generate("what is it", SamplingParams(max_new_tokens=8)).error is None


def test_a_second_plan_loads_no_model(command, small, monkeypatch):
    first = command(*small, *FAST, "--recordings", "r.jsonl", "--save", "c.json")
    assert first.status == 0, first.err

    def loaded(*args, **options):
        raise AssertionError("a model was loaded")

    monkeypatch.setattr("cascade.cli.plan._measure", loaded)
    monkeypatch.setattr("cascade.plugins.Plugins.load_model", loaded)
    again = command(*FAST, "--recordings", "r.jsonl")
    assert again.status == 0, again.err
    assert again.out.split("By category")[0].replace("c.json", "") == first.out.split("By category")[0]
    slow = command("--recordings", "r.jsonl", "--costs", "c.json", "--what-if", "toy-draft:seconds=9s")
    assert slow.status == 0, slow.err
    assert "toy is not assumed: it keeps its measured costs" in slow.out
    nobody = command("--recordings", "r.jsonl")
    assert (nobody.status, nobody.out) == (2, "")
    assert "nobody has measured level 'toy-draft'" in nobody.err


def test_where_nothing_pays_it_says_so(command, small, tmp_path):
    ran = command(
        *small, "--what-if", "toy-draft:seconds=1s", "--what-if", "toy:seconds=10ms", levels=("toy-draft", "toy")
    )
    assert ran.status == 0, ran.err
    assert "Nothing pays: the best set of levels would come to" in ran.out
    source = ran.out[ran.out.index("from cascade import") :]
    assert [level.model for level in loaded(tmp_path, source).levels] == ["toy"]


def test_without_questions_it_asks_its_own(command):
    ran = command("--batch", "2", *FAST)
    assert ran.status == 0, ran.err
    assert f"no --questions: {len(built_in())} short ones of our own" in ran.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--max-new-tokens", "8"], "a plan from 48 answer tokens would be a guess"),
        (["--what-if", "toi:seconds=1ms"], "no level is named 'toi'. Did you mean 'toy'?"),
        (["--what-if", "toy:seconds=1"], "must be written like 12ms"),
        (["--batch", "0"], "--batch must be at least 1"),
        (["--costs", "none.json"], "--costs none.json: there is no such file"),
        (["--out", "no/where.py"], "--out no/where.py: there is no folder"),
        (["--recordings", "toy.py", "--save", "c.json"], "--recordings toy.py: this file exists"),
        (["--recordings", "toy.py", *FAST], "no recording"),
    ],
)
def test_what_cannot_be_planned_is_refused_early(command, monkeypatch, words, message):
    monkeypatch.setattr("cascade.cli.plan._measure", lambda *args: pytest.fail("a model was loaded"))
    ran = command(*words)
    assert (ran.status, ran.out) == (2, ""), ran.err
    assert message in ran.err
    assert ran.err.count("cascade: error") == 1
