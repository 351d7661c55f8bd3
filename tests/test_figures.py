"""The figures of a benchmark, computed by hand, and the table that prints them."""

import copy
import io
import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cascade.bench.figures import summarise
from cascade.cli import show
from cascade.cli.bench_report import print_table

LEVELS = [
    {"name": "ngram", "kind": "drafter", "what": "NgramDrafter", "dtype": None, "parameters": None},
    {"name": "draft", "kind": "model", "what": "small", "dtype": "int8", "parameters": 25_000_000},
    {"name": "target", "kind": "model", "what": "large", "dtype": "bfloat16", "parameters": 100_000_000},
]


def setup_of(*systems, skipped=None, batch=1):
    return {
        "levels": LEVELS,
        "rule": "coupled",
        "summary": "",
        "questions": {"file": "q.jsonl", "sha256": "0" * 64},
        "limit_per_category": None,
        "max_new_tokens": 16,
        "batch": batch,
        "repeats": 1,
        "temperature": 0.0,
        "top_p": 1.0,
        "seed": None,
        "systems": {name: {"description": f"what {name} is", "settings": {"knob": 7}} for name in systems},
        "skipped": skipped or {},
    }


def level(name, **figures):
    zero = dict.fromkeys(
        ("drafted", "tested", "accepted", "forwards", "tokens_fed", "bypassed_rounds", "asks", "proposals"), 0
    )
    return {"name": name, **zero, "time_s": 0.0, "k_mean": None, **figures}


def stats(own_work_s=0.0, levels=()):
    return {"own_work_s": own_work_s, "levels": list(levels)}


def run(system, question, wall, new=10, *, category="qa", repeat=0, first=0.5, forwards=None, tokens=None, **more):
    ours = not system.startswith("hf-")
    return {
        "system": system,
        "category": category,
        "question_id": question,
        "repeat": repeat,
        "batch": None,
        "prompt_tokens": 5,
        "new_tokens": new,
        "wall_s": wall,
        "first_token_s": first,
        "first_tokens": min(new, 1),
        "target_forwards": new if forwards is None else forwards,
        "finish_reason": "length",
        "tokens": list(range(new)) if tokens is None else tokens,
        "text": "",
        "origins": [2] * new if ours else None,
        "stats": stats(levels=[level(each["name"]) for each in LEVELS]) if ours else None,
        "forwards": {"target": new if forwards is None else forwards},
        "tokens_fed": {"target": 5 + new},
        "pieces": None,
        "rounds": None,
        **more,
    }


def overall(runs, system="cascade", **setup):
    names = dict.fromkeys(each["system"] for each in runs)
    return summarise(runs, setup_of(*names, **setup))[system]["overall"]


# -- speed -----------------------------------------------------------------------------------------------


def test_a_speedup_is_the_ratio_of_mean_speeds():
    runs = [run("cascade", 1, 1.0), run("plain", 1, 2.0), run("cascade", 2, 5.0, new=20), run("plain", 2, 5.0, new=20)]
    figures = overall(runs)
    assert figures["tokens_per_s"] == pytest.approx((10 + 4) / 2)
    assert figures["speedup"] == pytest.approx(7 / 4.5)  # not the mean of 2 and 1, nor 7 s / 6 s
    assert (figures["questions"], figures["runs"], figures["new_tokens"]) == (2, 2, 30)


def test_repeats_of_a_question_are_one_unit():
    runs = [run("cascade", 1, 1.0), run("cascade", 1, 3.0, repeat=1), run("cascade", 2, 1.0), run("plain", 1, 4.0)]
    runs += [run("cascade", 2, 1.0, repeat=1), run("plain", 2, 2.0)]
    figures = overall(runs)
    assert figures["tokens_per_s"] == pytest.approx((20 / 4 + 20 / 2) / 2)
    assert figures["speedup"] == pytest.approx(7.5 / ((2.5 + 5) / 2))
    assert (figures["questions"], figures["runs"]) == (2, 4)


def batched(system, ids, wall, rows, number=0, repeat=0, category="qa"):
    batch = {"id": number, "size": len(ids), "wall_s": wall, "forwards": 10}
    return [
        run(system, each, row, batch=batch, repeat=repeat, category=category)
        for each, row in zip(ids, rows, strict=True)
    ]


def test_a_batch_is_one_unit_with_the_time_of_its_call():
    runs = batched("cascade", [1, 2], 2.0, [1.5, 2.0]) + batched("cascade", [3], 1.0, [1.0], number=1)
    runs += batched("plain", [1, 2], 4.0, [4.0, 4.0], number=7) + batched("plain", [3], 2.0, [2.0], number=8)
    figures = overall(runs, batch=2)
    assert figures["tokens_per_s"] == pytest.approx((20 / 2 + 10 / 1) / 2)
    assert figures["speedup"] == pytest.approx(10 / 5)
    assert figures["decode_tokens_per_s"] == pytest.approx((18 / 1.5 + 9 / 0.5) / 2)
    assert figures["latency_p50_s"] == 1.5  # of requests, not of calls
    assert figures["questions"] == 3


def test_equal_batch_numbers_of_other_repeats_are_other_calls():
    runs = batched("plain", [1, 2], 4.0, [4.0, 4.0]) + batched("plain", [1, 2], 1.0, [1.0, 1.0], repeat=1)
    assert overall(runs, "plain")["tokens_per_s"] == pytest.approx(40 / 5)


def test_a_batch_of_several_categories_counts_only_overall():
    runs = batched("plain", [1, 2], 4.0, [4.0, 4.0])
    runs[1]["category"] = "edit"
    assert summarise(runs, setup_of("plain")).keys() == {"plain"}
    assert summarise(runs, setup_of("plain"))["plain"].keys() == {"overall"}


def test_decode_speed_leaves_the_first_tokens_out():
    runs = [run("cascade", 1, 1.5), run("cascade", 2, 1.0, new=1), run("plain", 1, 5.0), run("plain", 2, 2.0, new=1)]
    runs += [run("hf-pld", 1, 2.5, first_tokens=4), run("hf-pld", 2, 1.0, new=1)]
    figures = overall(runs)
    assert figures["decode_tokens_per_s"] == pytest.approx(9 / 1.0)  # the second has none
    assert figures["decode_speedup"] == pytest.approx(9 / 2)
    assert figures["decode_speedup_interval"] is None  # one unit
    assert overall(runs, "hf-pld")["decode_tokens_per_s"] == pytest.approx(6 / 2.0)


def test_a_peer_that_failed_midway_is_compared_where_both_finished():
    runs = [run("plain", 1, 2.0), run("plain", 2, 10.0), run("cascade", 1, 1.0), run("cascade", 2, 5.0)]
    runs += [run("hf-pld", 1, 1.0), run("hf-pld", 2, 0.1, new=3, finish_reason="error")]
    summary = summarise(runs, setup_of("cascade", "plain", "hf-pld", "hf-nested"))
    assert summary["hf-pld"]["overall"]["speedup"] == pytest.approx(2)
    assert summary["hf-pld"]["overall"]["questions"] == 1
    assert summary["plain"]["overall"]["questions"] == 2
    assert list(summary) == ["cascade", "plain", "hf-pld"]  # in the setup's order, without what never ran


def test_without_plain_the_baseline_is_hf_plain_and_without_both_there_is_none():
    runs = [run("hf-plain", 1, 4.0), run("cascade", 1, 1.0)]
    assert overall(runs)["speedup"] == pytest.approx(4)
    assert overall(runs)["identical"] is None
    alone = overall([run("cascade", 1, 1.0)])
    assert alone["tokens_per_s"] == pytest.approx(10)
    assert [alone[key] for key in ("speedup", "speedup_interval", "decode_speedup", "first_token_ratio")] == [None] * 4


def test_no_tokens_and_no_time_are_no_division_by_zero():
    empty = run("cascade", 1, 0.0, new=0, first=None, first_token_s=None, forwards=0)
    figures = overall([empty, run("plain", 1, 0.0, new=0, forwards=0)])
    missing = {"tokens_per_s", "speedup", "decode_speedup", "tau", "first_token_s", "own_work_ms", "compute_per_token"}
    assert {key for key in missing if figures[key] is None} == missing
    assert figures["new_tokens"] == 0
    assert figures["identical"] == 1
    json.dumps(figures, allow_nan=False)


def test_latencies_and_first_tokens():
    walls = [1.0, 2.0, 3.0, 4.0, 5.0]
    runs = [run("cascade", i, wall, first=0.1 * (i + 1)) for i, wall in enumerate(walls)]
    runs += [run("plain", i, 4.0, first=0.2) for i in range(5)]
    figures = overall(runs)
    assert figures["latency_p50_s"] == 3
    assert figures["latency_p95_s"] == pytest.approx(4.8)
    assert figures["first_token_s"] == pytest.approx(0.3)
    assert figures["first_token_ratio"] == pytest.approx(1.5)  # the median of 0.5, 1, 1.5, 2 and 2.5


# -- intervals -------------------------------------------------------------------------------------------

WALLS = st.lists(st.tuples(st.floats(0.6, 2.0), st.floats(0.6, 2.0)), min_size=8, max_size=30)


@settings(max_examples=25)
@given(WALLS)
def test_an_interval_is_around_the_speedup_and_the_baselines_is_exactly_one(walls):
    runs = [run(name, i, pair[j]) for i, pair in enumerate(walls) for j, name in enumerate(("cascade", "plain"))]
    summary = summarise(runs, setup_of("cascade", "plain"))
    cascade, plain = summary["cascade"]["overall"], summary["plain"]["overall"]
    low, high = cascade["speedup_interval"]
    assert low <= cascade["speedup"] * 1.0001
    assert high >= cascade["speedup"] * 0.9999
    assert min(b / a for a, b in walls) <= low * 1.0001
    assert max(b / a for a, b in walls) >= high * 0.9999
    for key in ("speedup", "decode_speedup"):
        assert (plain[key], plain[f"{key}_interval"]) == (1.0, [1.0, 1.0])
    assert plain["first_token_ratio"] == 1.0


def test_units_are_drawn_in_pairs():
    """Questions differ by a factor of 100 while every speedup is 2: drawn apart, the interval would be wide."""
    runs = [run("cascade", i, 10.0**i) for i in range(3)] + [run("plain", i, 2 * 10.0**i) for i in range(3)]
    assert overall(runs)["speedup_interval"] == pytest.approx([2, 2])


def test_an_interval_has_nine_tenths_of_the_draws():
    """Two units: a quarter of the draws takes either alone, so the interval reaches from one to the other."""
    runs = [run("cascade", 1, 1.0), run("cascade", 2, 1.0), run("plain", 1, 1.0), run("plain", 2, 4.0)]
    assert overall(runs)["speedup_interval"] == pytest.approx([1, 4])
    many = [run(name, i, 1.0) for name in ("cascade", "plain") for i in range(60)]
    for each in many[:3]:  # 3 of 60 tripled in speed; 92 % of draws have at most 5 of them, 97 % at most 6
        each["wall_s"] = 1 / 3
    low, high = overall(many)["speedup_interval"]
    assert 1.0 <= low <= 1 + 2 / 60
    assert high == pytest.approx(1 + 2 * 6 / 60)


def test_one_unit_has_no_interval():
    assert overall([run("cascade", 1, 1.0), run("plain", 1, 1.0)])["speedup_interval"] is None


# -- work ------------------------------------------------------------------------------------------------


def test_tau_and_own_work():
    runs = [
        run("cascade", 1, 1.0, new=12, forwards=4, stats=stats(0.008)),
        run("cascade", 2, 1.0, new=8, forwards=1, stats=stats(0.003)),
        run("cascade", 3, 1.0, new=10, forwards=5, stats=stats(0.020)),
    ]
    figures = overall(runs)
    assert figures["tau"] == pytest.approx(3)
    assert figures["target_forwards_per_token"] == pytest.approx(1 / 3)
    assert figures["own_work_ms"] == pytest.approx(3)  # the median of 2, 3 and 4
    peer = overall([run("hf-pld", 1, 1.0)], "hf-pld")
    assert (peer["own_work_ms"], peer["levels"]) == (None, None)


def test_levels_are_sums_over_the_runs():
    one = [
        level(
            "draft",
            drafted=10,
            tested=8,
            accepted=6,
            k_mean=5.0,
            time_s=0.5,
            bypassed_rounds=1,
            asks=3,
            proposals=2,
            forwards=12,
        ),
        level("target", time_s=1.0, forwards=5, tokens_fed=20),
    ]
    two = [
        level(
            "draft",
            drafted=30,
            tested=12,
            accepted=9,
            k_mean=10.0,
            time_s=0.1,
            bypassed_rounds=3,
            asks=7,
            proposals=3,
            forwards=8,
        ),
        level("target", time_s=2.0, forwards=5, tokens_fed=40),
    ]
    runs = [
        run("cascade", 1, 2.0, new=10, forwards=5, stats=stats(levels=one)),
        run("cascade", 2, 4.0, new=20, forwards=5, stats=stats(levels=two)),
    ]
    draft, target = overall(runs)["levels"]
    assert (draft["drafted"], draft["tested"], draft["accepted"]) == (40, 20, 15)
    assert (draft["alpha"], draft["accept_rate"]) == (pytest.approx(0.75), pytest.approx(0.375))
    assert draft["k_mean"] == pytest.approx(8)  # 2 proposals of 5 and 3 of 10
    assert draft["time_share"] == pytest.approx(0.1)
    assert draft["bypassed_share"] == pytest.approx(0.4)
    assert draft["forwards_per_token"] == pytest.approx(20 / 30)
    assert target["tokens_fed_per_token"] == pytest.approx(2)
    assert (target["alpha"], target["accept_rate"], target["k_mean"]) == (None, None, None)
    assert target["time_share"] == pytest.approx(0.5)


def test_compute_weighs_each_models_work_by_its_size():
    runs = [
        run("cascade", 1, 1.0) | {"forwards": {"draft": 16, "target": 4}, "tokens_fed": {"draft": 40, "target": 30}},
        run("cascade", 2, 1.0) | {"forwards": {"draft": 0, "target": 6}, "tokens_fed": {"draft": 0, "target": 20}},
    ]
    found = overall(runs)["compute_per_token"]
    assert found == pytest.approx({"forwards": (0.25 * 16 + 10) / 20, "tokens": (0.25 * 40 + 50) / 20})
    setup = setup_of("cascade")
    setup["levels"] = [LEVELS[0], LEVELS[1] | {"parameters": None}, LEVELS[2]]
    assert summarise(runs, setup)["cascade"]["overall"]["compute_per_token"] is None
    alone = summarise(runs[1:], setup)["cascade"]["overall"]["compute_per_token"]
    assert alone == pytest.approx({"forwards": 0.6, "tokens": 2.0})  # a model that did nothing need not be known


# -- texts and regret ------------------------------------------------------------------------------------


def test_identical_is_the_share_of_requests_with_the_tokens_of_plain():
    runs = [run("plain", 1, 1.0), run("plain", 2, 1.0), run("hf-plain", 1, 1.0), run("hf-plain", 2, 1.0, tokens=[7])]
    runs += [run("cascade", 1, 1.0), run("cascade", 1, 1.0, repeat=1), run("cascade", 2, 1.0)]
    runs += [run("hf-pld", 1, 1.0), run("hf-pld", 2, 1.0, tokens=[7])]
    summary = summarise(runs, setup_of("cascade", "plain", "hf-plain", "hf-pld"))
    keys = ("identical", "identical_hf_plain")
    found = {name: tuple(part["overall"][key] for key in keys) for name, part in summary.items()}
    assert found == {"cascade": (1, None), "plain": (1, None), "hf-plain": (0.5, 1), "hf-pld": (0.5, 1)}
    runs[4]["tokens"] = [0, 1]
    assert overall(runs)["identical"] == 0.5  # the second repeat has no counterpart


def swept():
    runs = []
    for system, walls in {
        "cascade": {("qa", 1): 1.1, ("qa", 2): 2.2, ("edit", 1): 1.0},
        "plain": {("qa", 1): 2.0, ("qa", 2): 2.5, ("edit", 1): 3.0},
        "fixed:ngram=8": {("qa", 1): 2.9, ("qa", 2): 2.9, ("edit", 1): 1.25},
        "fixed:draft=3": {("qa", 1): 1.0, ("qa", 2): 2.0, ("edit", 1): 2.0},
        "fixed:draft=9": {("qa", 1): 0.1, ("edit", 1): 9.0},  # did not finish
    }.items():
        runs += [run(system, question, wall, category=category) for (category, question), wall in walls.items()]
    return runs


def test_regret_is_against_the_best_fixed_setting_of_each_category():
    summary = summarise(swept(), setup_of("cascade", "plain"))
    cascade, plain = summary["cascade"], summary["plain"]
    assert cascade["qa"]["regret"] == pytest.approx(3.3 / 3.0)
    assert cascade["qa"]["regret_best"] == "fixed:draft=3"
    assert cascade["edit"]["regret"] == pytest.approx(1.0 / 1.25)
    assert cascade["edit"]["regret_best"] == "fixed:ngram=8"
    assert cascade["overall"]["regret"] == pytest.approx((3.3 + 1.0) / (3.0 + 1.25))
    assert cascade["overall"]["regret_best"] is None
    assert plain["overall"]["regret"] == pytest.approx((4.5 + 3.0) / (3.0 + 1.25))
    assert summary["fixed:ngram=8"]["overall"]["regret"] is None


def test_plain_decoding_can_be_the_best_setting():
    runs = [run("cascade", 1, 1.5), run("plain", 1, 1.0), run("fixed:ngram=8", 1, 2.0)]
    assert overall(runs)["regret"] == pytest.approx(1.5)
    assert summarise(runs, setup_of())["cascade"]["qa"]["regret_best"] == "plain"
    assert overall(runs[:2])["regret"] is None  # no sweep, no regret


def test_categories_are_kept_apart_and_overall_weighs_questions_equally():
    runs = [run("plain", 1, 1.0), run("plain", 2, 1.0), run("plain", 3, 2.0, category="edit")]
    part = summarise(runs, setup_of("plain"))["plain"]
    assert list(part) == ["qa", "edit", "overall"]
    assert part["edit"]["tokens_per_s"] == 5
    assert part["overall"]["tokens_per_s"] == pytest.approx((10 + 10 + 5) / 3)


def test_equal_ids_in_other_categories_are_other_questions():
    runs = [run("plain", 1, 1.0), run("plain", 1, 2.0, category="edit")]
    assert overall(runs, "plain")["questions"] == 2


def test_the_runs_are_left_as_they_are():
    runs = swept()
    before = copy.deepcopy(runs)
    summarise(runs, setup_of("cascade"))
    assert runs == before


# -- the printed table -----------------------------------------------------------------------------------


def record_of(runs, **more):
    setup = setup_of(*dict.fromkeys(each["system"] for each in runs), **more)
    environment = {"processor": "Some CPU", "cuda": None, "threads": 2, "torch": "2.9.0", "cascade": "0.1.0"}
    return {"format": 1, "environment": environment, "setup": setup, "runs": runs, "summary": summarise(runs, setup)}


def bench_runs():
    """Two categories, four systems of which one fails midway, with levels that did something."""
    drafted = [
        level("ngram", drafted=10, tested=8, accepted=6, k_mean=5.0, bypassed_rounds=1, asks=5, proposals=2),
        level("draft", drafted=4, tested=4, accepted=1, k_mean=2.0, time_s=0.2, forwards=4),
        level("target", time_s=0.5, forwards=5),
    ]
    runs = []
    for i, category in enumerate(("qa", "qa", "edit", "edit")):
        runs.append(run("plain", i, 2.0, category=category))
        wall = 1.0 if category == "qa" else 2.2
        more = {"stats": stats(0.01, drafted), "forwards": {"draft": 4, "target": 5}, "target_forwards": 5}
        runs.append(run("cascade", i, wall, category=category) | more)
        runs.append(run("hf-plain", i, 2.5, category=category, tokens=[9] * 10 if i == 3 else None))
        if i < 3:
            runs.append(run("hf-pld", i, 4.0, category=category))
    return runs


def printed(record, width=None):
    out = io.StringIO()
    screen = show.console(out)
    if width is not None:
        screen = type(screen)(file=out, width=width, force_terminal=True, color_system="standard", highlight=False)
    print_table(record, screen)
    return out.getvalue()


def row(text, title, name):
    """The words of a table's row."""
    part = text[text.index(f"{title}\n") :]
    return next(line.split() for line in part.splitlines() if line.startswith(name))


def test_the_table_says_what_was_measured():
    text = printed(record_of(bench_runs(), skipped={"hf-nested": "needs a draft model"}))
    assert "\x1b" not in text
    speed = row(text, "Speed", "cascade")
    assert speed[1:3] == ["7.3", "1.45x"]
    assert row(text, "Speed", "hf-pld")[2] == "0.50x!"
    assert row(text, "What it took", "cascade") == ["cascade", "2.00", "0.50", "2.00", "0.60", "1.50", "100", "%"]
    assert row(text, "What it took", "hf-plain")[-2:] == ["75", "%"]
    spread = ["2.00x", "2.00-2.00", "0.80x!", "0.80-0.80", "0.50x!", "0.50-0.50"]
    assert row(text, "Speedup by category", "qa") == ["qa", "2", *spread]
    assert row(text, "Speedup by category", "edit")[2] == "0.91x!"
    assert row(text, "Levels of the cascade", "qa") == ["qa", "ngram", "0.75", "0.60", "5.0", "0", "%", "20", "%"]
    assert "The text of hf-plain differs in 25 % from plain's." in text
    assert "hf-pld is over 3 of 4 questions" in text
    assert "hf-nested was not run: needs a draft model" in text
    assert "hf-pld: what hf-pld is, knob 7" in text
    assert "on: Some CPU, threads 2, torch 2.9.0, cascade 0.1.0" in text
    assert "ngram (NgramDrafter) > draft (int8, 25M) > target (bfloat16, 100M) (target), rule coupled" in text
    assert "Regret" not in text


def test_a_sweep_has_its_own_table():
    text = printed(record_of(swept()))
    assert row(text, "Regret", "qa") == ["qa", "1.10x", "1.50x", "fixed:draft=3"]
    assert row(text, "Regret", "overall") == ["overall", "1.01x", "1.76x", "of", "each", "category"]
    assert "fixed:draft=9" in text[text.index("Speedup by category") :].splitlines()[1]


def test_a_large_grid_is_left_to_its_own_table():
    runs = swept() + [run(f"fixed:ngram={k}", 1, 1.0) for k in range(1, 5)]
    header = printed(record_of(runs)).partition("Speedup by category\n")[2].splitlines()[0]
    assert "cascade" in header
    assert "fixed" not in header


def test_in_a_terminal_it_fits_100_columns_and_losses_are_red():
    runs = bench_runs() + [run(name, 0, 1.0) for name in ("hf-assisted", "hf-nested")]
    for each in runs:
        each["category"] = {"qa": "question-answering", "edit": "edit"}[each["category"]]
    text = printed(record_of(runs), width=100)
    assert "\x1b[31m0.91x!\x1b[0m" in text
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text)
    tables = [line for line in plain.partition("\n\nhf")[0].splitlines() if "  " in line]
    assert max(map(len, tables)) <= 100
    assert row(plain, "Speedup by category", "question-answering")[1:3] == ["2", "2.00x"]


def test_everything_printed_is_in_the_record():
    """The table knows the summary only, and the summary follows from the runs, also after a trip through JSON."""
    record = json.loads(json.dumps(record_of(bench_runs() + swept()), allow_nan=False))
    assert summarise(record["runs"], record["setup"]) == record["summary"]
    assert printed({**record, "runs": None}) == printed(record)


def test_nothing_finished_is_said():
    text = printed(record_of([run("cascade", 1, 1.0, finish_reason="error")], skipped={"hf-pld": "no"}))
    assert "No system finished a question" in text
    assert "hf-pld was not run: no" in text


@pytest.mark.parametrize(
    ("share", "shown"), [(0.999, "99.9 %"), (0.004, "0.4 %"), (1.0, "100 %"), (0.99999, "99.9 %"), (0.76, "76 %")]
)
def test_almost_all_is_not_shown_as_all(share, shown):
    record = record_of([run("cascade", 1, 1.0)])
    record["summary"]["cascade"]["overall"]["identical"] = share
    assert " ".join(row(printed(record), "What it took", "cascade")).endswith(shown)
