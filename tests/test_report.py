"""`cascade report`: the numbers in the page are the file's, whatever is in it stays text, and mistakes are told."""

import copy
import importlib.util
import json
import random
import re
from html.parser import HTMLParser
from types import SimpleNamespace

import pytest

from cascade import CascadeConfig, Engine, LevelConfig, SamplingParams
from cascade.bench.figures import summarise
from cascade.cli import main
from cascade.report import palette, tables
from cascade.report.measures import time_shares
from cascade.report.source import Request
from cascade.report.timeline import timeline
from cascade.testing import ToyModel
from cascade.trace import JsonTrace
from tests.records import LEVELS, bench, rounds


class Page(HTMLParser):
    """A page taken apart: its elements with their attributes, its text, its tables, and the data of its script."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.words, self.tables, self._open, self.scripts = [], [], [], [], []
        self.feed(text)
        self.close()
        [data] = [body for attributes, body in self.scripts if attributes.get("id") == "data"]
        self.data = json.loads(data)
        self.text = " ".join(" ".join(self.words).split())

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        self._open.append((tag, dict(attrs)))
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("th", "td"):
            self.tables[-1][-1].append([])

    def handle_endtag(self, tag):
        while self._open and self._open.pop()[0] != tag:
            pass

    def handle_data(self, data):
        tag, attributes = self._open[-1] if self._open else ("", {})
        if tag == "script":
            self.scripts.append((attributes, data))
        elif tag != "style":
            self.words.append(data)
            if any(one == "table" for one, _ in self._open) and data.strip():
                self.tables[-1][-1][-1].append(data)

    def traces(self, chart):
        return {trace["name"]: trace for trace in self.data["charts"][chart]["data"]}


@pytest.fixture
def draw(tmp_path, capsys):
    """Writes a record, or text as it is, and draws it: the page, or what was said instead of one."""

    def run(record, name="out.json"):
        file, html = tmp_path / name, tmp_path / "out.html"
        file.write_text(record if isinstance(record, str) else json.dumps(record), encoding="utf-8")
        status = main(["report", str(file), "--html", str(html)])
        out, err = capsys.readouterr()
        if status:
            assert not html.exists()
            return SimpleNamespace(status=status, out=out, err=err)
        assert err == ""
        return Page(html.read_text(encoding="utf-8"))

    return run


def resummed(record):
    """The record with a summary of the runs it has now."""
    return {**record, "summary": summarise(record["runs"], record["setup"])}


# -- the numbers are the file's --------------------------------------------------------------------------


def test_speedups_and_their_intervals(draw):
    record = bench(("code", "qa", "chat"), ("cascade", "plain", "hf-pld", "fixed:ngram=3"))
    traces = draw(record).traces("speedup")
    assert list(traces) == ["cascade", "hf-pld"]  # plain is the line at 1, and a sweep's grid has no place
    for system, trace in traces.items():
        figures = record["summary"][system]
        assert trace["y"] == ["overall", "code", "qa", "chat"]
        assert trace["x"] == [figures[name]["speedup"] for name in trace["y"]]
        for i, name in enumerate(trace["y"]):
            low, high = figures[name]["speedup_interval"]
            assert trace["x"][i] + trace["error_x"]["array"][i] == pytest.approx(high)
            assert trace["x"][i] - trace["error_x"]["arrayminus"][i] == pytest.approx(low)


def test_losses_are_marked_and_told(draw):
    record = bench(("code", "chat"))
    page = draw(record)
    speeds = {name: record["summary"]["cascade"][name]["speedup"] for name in ("overall", "code", "chat")}
    assert speeds["chat"] < 1 < speeds["code"]
    trace = page.traces("speedup")["cascade"]
    rims = dict(
        zip(
            trace["y"],
            zip(trace["marker"]["line"]["color"], trace["marker"]["line"]["width"], strict=True),
            strict=True,
        )
    )
    assert rims["chat"] == (palette.page("loss"), 2.5)
    assert rims["code"][1] == 0
    assert f"cascade is slower in 1 of 2: chat {speeds['chat']:.2f}x." in page.text
    shade, line = page.data["charts"]["speedup"]["layout"]["shapes"][-2:]
    assert (shade["x1"], line["x0"], line["x1"]) == (1, 1, 1)


def test_acceptance_by_position_is_counted_from_the_verdicts(draw):
    record = bench(questions=4)
    traces = draw(record).traces("positions")
    assert list(traces) == ["ngram", "draft"]
    for index, trace in enumerate(traces.values()):
        reached, held = {}, {}
        for run in record["runs"]:
            for one in run["rounds"] or ():
                for _, tested, accepted in one["levels"][index]["verdicts"]:
                    for j in range(1, tested + 1):
                        reached[j] = reached.get(j, 0) + 1
                        held[j] = held.get(j, 0) + (j <= accepted)
        assert trace["x"] == sorted(reached)
        assert trace["customdata"] == [[held[j], reached[j]] for j in trace["x"]]
        assert trace["y"] == [held[j] / reached[j] for j in trace["x"]]
        assert [mark.endswith("-open") for mark in trace["marker"]["symbol"]] == [reached[j] < 20 for j in trace["x"]]
        assert reached[1] > max(reached[j] for j in trace["x"][3:]) > 0


def test_alpha_by_category(draw):
    record = bench()
    for index, (name, trace) in enumerate(draw(record).traces("alpha").items()):
        assert name == LEVELS[index]
        assert trace["y"] == ["overall", "code", "chat"]
        assert trace["x"] == [record["summary"]["cascade"][c]["levels"][index]["alpha"] for c in trace["y"]]


def test_where_the_time_goes(draw):
    record = bench()
    traces = draw(record).traces("time")
    assert list(traces) == ["target", "draft", "ngram", "engine's own work", "rest"]
    # As tests/records.py has it; the n-gram's proposals are part of the rounds' own work, and not counted twice.
    for name, share in {
        "target": 0.74,
        "draft": 0.17,
        "ngram": 0.004,
        "engine's own work": 0.026,
        "rest": 0.06,
    }.items():
        assert traces[name]["x"] == pytest.approx([share] * 3)
        assert traces[name]["y"] == ["overall", "code", "chat"]


def test_the_time_of_a_batch_is_that_of_its_call():
    record = bench(systems=("cascade",), questions=2)
    for run in record["runs"]:
        run["batch"] = {"id": 0 if run["category"] == "code" else 1, "size": 2, "wall_s": 10.0, "forwards": 30}
        run["stats"]["own_work_s"] = 1.0 if run["question_id"] % 2 else 0.5  # all of its rounds', whoever was in them
        for level, seconds in zip(run["stats"]["levels"], (0.1, 1.0, 3.0), strict=True):
            level["time_s"] = seconds
    shares = time_shares(resummed(record), "code")
    assert shares.levels == pytest.approx((0.02, 0.2, 0.6))
    assert shares.own == pytest.approx(0.1 - 0.02)
    assert shares.rest == pytest.approx(1 - 0.82 - 0.08)


def part(k, accepted=0, bypassed=False, reason=None):
    counts = {"drafted": k or 0, "tested": accepted + 1, "accepted": accepted, "forwards": 0, "verdicts": []}
    return {"name": "a", "k": k, **counts, "bypassed": bypassed, "reason": reason}


def test_the_steps_of_k():
    parts = [
        part(None),
        part(3, 2),
        part(4, 1),
        part(4, 0, True, "does not pay"),
        part(4, 0, True),
        part(2, 2, False, "pays <now>"),
    ]
    counts = (1, 3, 2, 1, 1, 3)
    made, position = [], 50
    for number, (one, count) in enumerate(zip(parts, counts, strict=True)):
        made.append(
            {
                "round": number,
                "position": position,
                "tokens": [9] * count,
                "origins": [1] * count,
                "levels": [one, part(None)],
            }
        )
        position += count
    figure = timeline(Request("r", "", [9] * 11, [1] * 11, None, made), ("a", "target"))
    idle, accepted, k, decisions = figure["data"]
    assert list(k["x"]) == [1, 4, 6, None, 8, 11, None]
    assert list(k["y"]) == [3, 4, 4, None, 2, 2, None]
    assert [list(about) for about in k["customdata"] if about] == [
        [1, 3, 3, 2],
        [2, 4, 2, 1],
        [2, 4, 2, 1],
        [5, 2, 3, 2],
        [5, 2, 3, 2],
    ]
    assert list(zip(idle["x"], idle["width"], strict=True)) == [(0.5, 1), (7, 2)]
    assert [list(about) for about in idle["customdata"]] == [[0, 0, "not asked"], [3, 4, "bypassed"]]
    assert list(zip(accepted["x"], accepted["width"], accepted["y"], strict=True)) == [
        (2.5, 3, 2),
        (5, 2, 1),
        (9.5, 3, 2),
    ]
    assert list(decisions["x"]) == [6, 8]
    assert [list(about) for about in decisions["customdata"]] == [[3, "does not pay"], [5, "pays &lt;now&gt;"]]


def test_the_text_of_a_request(draw):
    record = bench()
    page = draw(record)
    own = [run for run in record["runs"] if run["rounds"]]
    assert [view["label"] for view in page.data["requests"]] == ["code · 1", "code · 2", "chat · 3", "chat · 4"]
    for run, view in zip(own, page.data["requests"], strict=True):
        assert "".join(view["pieces"]) == run["text"]
        assert (view["tokens"], view["origins"]) == (run["tokens"], run["origins"])
        assert [count for _, count, *_ in view["rounds"]] == [len(one["tokens"]) for one in run["rounds"]]
        for one, (number, _, batch, seconds, parts) in zip(run["rounds"], view["rounds"], strict=True):
            assert (number, batch, seconds) == (one["round"], one["batch"], one["seconds"])
            keys = ("k", "drafted", "tested", "accepted", "bypassed", "reason")
            assert parts == [[level[key] for key in keys] for level in one["levels"][:-1]]
    options = [attributes["value"] for tag, attributes in page.elements if tag == "option"]
    assert options == ["0", "1", "2", "3"]


def test_the_tables_hold_every_figure(draw):
    record = bench(systems=("cascade", "plain", "hf-pld", "fixed:ngram=3"))
    regret, main_table, levels, fixed = draw(record).tables
    for table, names in ((main_table, ["cascade", "plain", "hf-pld"]), (fixed, ["fixed:ngram=3"])):
        assert [row[0] for row in table[1:]] == [[c, name] for c in ("overall", "code", "chat") for name in names]
        heads = [cell[0] for cell in table[0]]
        for row in table[1:]:
            figures = record["summary"][row[0][1]][row[0][0]]
            shown = dict(zip(heads, (" ".join(cell) for cell in row), strict=True))
            low, high = figures["speedup_interval"]
            sign = "▼ " if figures["speedup"] < 1 else ""
            assert shown["speedup"] == f"{sign}{figures['speedup']:.2f}x ({low:.2f}–{high:.2f})"
            assert shown["tokens/s"] == f"{figures['tokens_per_s']:.1f}"
            assert shown["tau"] == f"{figures['tau']:.2f}"
            assert shown["P95 latency"] == f"{figures['latency_p95_s']:.2f} s"
            assert shown["tokens"] == str(figures["new_tokens"])
            assert shown["same text"] == "100 %"
    assert [row[0][1] for row in levels[1:4]] == list(LEVELS)
    assert levels[1][1] == [f"{record['summary']['cascade']['overall']['levels'][0]['alpha']:.2f}"]
    shown = {tuple(row[0]): row[1:] for row in regret[1:]}
    for category in ("code", "chat"):
        figures = record["summary"]["cascade"][category]
        assert shown[category, "cascade"] == [[f"{figures['regret']:.2f}x"], [figures["regret_best"]]]


def test_the_setup_is_told(draw):
    text = draw(bench()).text
    for said in (
        "ngram (NGram) → draft (self, int8, 135 M parameters) → target (SmolLM2-135M, bfloat16, 135 M parameters)",
        "AMD EPYC 9B14; 2 threads on 2 cores; cascade 0.1.0, torch 2.13.0",
        "up to 40 tokens, 1 repeat, batch 1, greedy",
        "bit-exact: yes, from width 2",
        "what hf-pld is k=3",
        "hf-nested not run : there is no model below the target",
    ):
        assert said in text


# -- the headline ----------------------------------------------------------------------------------------


def summed(**figures):
    overall = {"questions": 26, "runs": 26, "tokens_per_s": 41.23, "speedup": None, "identical": None} | figures
    return {"summary": {"cascade": {"overall": overall}, "plain": {}}}


@pytest.mark.parametrize(
    ("record", "said"),
    [
        (
            summed(speedup=2.3, speedup_interval=[2.1, 2.5], identical=1.0),
            "2.30x plain decoding over 26 questions, 90\u00a0% interval 2.10–2.50; the same text in 26 of 26",
        ),
        (
            summed(speedup=0.8, speedup_interval=[0.7, 0.9], identical=25 / 26),
            "0.80x plain decoding over 26 questions, 90\u00a0% interval 0.70–0.90: slower; the same text in 25 of 26",
        ),
        (
            summed(speedup=1.02, speedup_interval=[0.97, 1.06]),
            "1.02x plain decoding over 26 questions, 90\u00a0% interval 0.97–1.06: no clear difference",
        ),
        (summed(speedup=2.0, speedup_interval=None, questions=1), "2.00x plain decoding over 1 question"),
        (summed(speedup=0.8, speedup_interval=None, questions=1), "0.80x plain decoding over 1 question: slower"),
        ({"summary": {"hf-plain": {}}}, "There are no figures of the cascade yet"),
        (
            {"summary": {"cascade": summed()["summary"]["cascade"]}},
            "41.2 tokens/s over 26 questions; without plain decoding there is no speedup",
        ),
        (
            {"summary": summed(speedup=1.5)["summary"] | {"hf-plain": {}, "plain": {}}},
            "1.50x plain decoding over 26 questions",
        ),
        (
            {"summary": {"cascade": summed(speedup=1.5)["summary"]["cascade"], "hf-plain": {}}},
            "1.50x hf-plain over 26 questions",
        ),
    ],
)
def test_the_headline(record, said):
    assert tables.headline(record) == said


# -- what is in the file stays text ----------------------------------------------------------------------

EVIL = "</script><script>window.pwned = 1</script><!-- <img src=x onerror='window.pwned = 1'> & \u2028 \ud800 $title"


def evil():
    """A record with markup wherever a file can hold text."""
    record = bench(("code", EVIL))
    record["environment"]["processor"] = record["setup"]["summary"] = EVIL
    record["setup"]["skipped"] = {"hf-nested": EVIL}
    record["setup"]["systems"]["hf-pld"] = {"description": EVIL, "settings": {"k": EVIL}}
    for run in record["runs"]:
        run["question_id"] = EVIL + str(run["question_id"])
        if run["rounds"]:
            run["pieces"][0] = EVIL
            run["rounds"][0]["levels"][0]["reason"] = EVIL
    return json.loads(json.dumps(resummed(record)).replace('"ngram"', json.dumps(EVIL)))  # a level's name


def test_markup_in_the_file_is_text_in_the_page(draw):
    page = draw(evil())
    tags = [tag for tag, _ in page.elements]
    assert (tags.count("script"), tags.count("img"), tags.count("section")) == (3, 0, 6 - 1)
    assert page.data["requests"][0]["pieces"][0] == EVIL.replace("\ud800", "?")
    assert page.words.count(EVIL.replace("\ud800", "?")) >= 2
    for attributes in (attributes for _, attributes in page.elements):
        assert not any(name.startswith("on") for name in attributes)


def test_markup_does_not_reach_plotly_as_markup(draw):
    """It takes a subset of HTML in labels and hover texts."""
    for trace in (trace for view in draw(evil()).data["requests"] for trace in view["figure"]["data"]):
        for about in trace.get("customdata", ()):
            assert not re.search("<(?!br>)", str(about))
    charts = draw(evil()).data["charts"]
    shown = [
        *charts["speedup"]["layout"]["yaxis"]["ticktext"],
        *(t["name"] for c in charts.values() for t in c["data"]),
    ]
    assert all(not re.search("<(?!br>|b>|/b>)", text) for text in shown)


def test_the_page_refers_to_nothing_outside(draw, tmp_path):
    page = draw(bench())
    links = {value for _, attributes in page.elements for name, value in attributes.items() if name in ("src", "href")}
    assert links == {"data:,"}
    [policy] = [attributes["content"] for _, attributes in page.elements if "http-equiv" in attributes]
    assert policy.startswith("default-src 'none';")
    text = (tmp_path / "out.html").read_text(encoding="utf-8")
    [style] = re.findall("<style>(.*?)</style>", text, re.S)
    assert "url(" not in style
    assert "@import" not in style
    assert ("html", {"lang": "en"}) in page.elements
    assert ("meta", {"name": "viewport", "content": "width=device-width, initial-scale=1"}) in page.elements


# -- colours ---------------------------------------------------------------------------------------------


def luminance(colour):
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return sum(part * weight for part, weight in zip(linear, (0.2126, 0.7152, 0.0722), strict=True))


def contrast(one, other):
    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("side", [0, 1])
def test_colours_can_be_seen_on_both_pages(side):
    """By the figures of WCAG 2: 3 for marks, 4.5 for text."""
    for pair in (*palette.LEVELS, palette.TARGET, *palette.SYSTEMS):
        assert contrast(pair[side], palette.PAGE["page"][side]) >= 3
    for ground in ("page", "panel"):
        for name in ("ink", "soft", "loss"):
            assert contrast(palette.PAGE[name][side], palette.PAGE[ground][side]) >= 4.5


def test_every_colour_has_a_partner(draw):
    """Also of what only the page's script puts together."""
    page = draw(bench(systems=("cascade", "plain", "hf-plain", "hf-pld", "hf-assisted", "hf-nested")))
    used = set(re.findall(r'"(#\w+)"', json.dumps([page.data[key] for key in ("charts", "template", "requests")])))
    assert len(used) > 8
    assert used <= palette.DARK.keys()
    pairs = [*palette.LEVELS, palette.TARGET, *palette.SYSTEMS, *palette.PAGE.values()]
    assert all(palette.DARK[light] == dark for light, dark in pairs)  # no light one stands for two dark ones


# -- what a file may lack --------------------------------------------------------------------------------


def test_without_rounds(draw):
    record = bench()
    for run in record["runs"]:
        run["rounds"] = run["pieces"] = None
    page = draw(record)
    assert set(page.data["charts"]) == {"speedup", "alpha", "time"}
    assert "No rounds are in the file" in page.text
    assert "Acceptance by position is not in the file" in page.text


def test_without_verdicts(draw):
    record = bench()
    for run in record["runs"]:
        for level in (level for one in run["rounds"] or () for level in one["levels"]):
            del level["verdicts"]
    page = draw(record)
    assert "Acceptance by position is not in the file" in page.text
    assert len(page.data["requests"]) == 4


def test_without_a_baseline(draw):
    page = draw(bench(systems=("cascade", "hf-pld")))
    assert "speedup" not in page.data["charts"]
    assert "neither plain nor hf-plain was run" in page.text


def test_only_peers(draw):
    page = draw(bench(systems=("hf-plain", "hf-pld")))
    assert list(page.traces("speedup")) == ["hf-pld"]
    assert "No figures of levels below the target." in page.text
    assert page.data["requests"] == []


def test_only_the_baseline(draw):
    assert "Nothing but plain was run" in draw(bench(systems=("plain",))).text


def test_a_target_alone(draw):
    record = bench(systems=("cascade", "plain"))
    record["setup"]["levels"] = record["setup"]["levels"][-1:]
    for run in record["runs"]:
        run["origins"] = [0] * len(run["tokens"])
        run["stats"]["levels"] = run["stats"]["levels"][-1:]
        for one in run["rounds"] or ():
            one["levels"] = one["levels"][-1:]
    page = draw(resummed(record))
    assert page.data["levels"] == ["target"]
    assert "timeline" not in [attributes.get("id") for _, attributes in page.elements]


def test_repeats_are_told_apart(draw):
    record = bench(questions=1)
    again = copy.deepcopy(record["runs"])
    for run in again:
        run |= {"repeat": 1, "rounds": None, "pieces": None}
    record["runs"] += again
    assert [view["label"] for view in draw(resummed(record)).data["requests"]] == [
        "code · 1 · repeat 1",
        "chat · 2 · repeat 1",
    ]


# -- unfinished ones, and traces -------------------------------------------------------------------------


def partial(record, questions, skipped=None):
    """What is there after so many questions."""
    head = {key: record[key] for key in ("format", "environment", "setup")}
    asked = sorted({run["question_id"] for run in record["runs"]})[:questions]
    lines = [{"runs": [run for run in record["runs"] if run["question_id"] == one], "skipped": {}} for one in asked]
    if skipped:
        lines[-1]["skipped"] = skipped
    return "".join(json.dumps(line) + "\n" for line in [head, *lines])


@pytest.mark.parametrize("tail", ["", '{"runs": [{"sys'])
def test_an_unfinished_benchmark(draw, tail):
    record = bench(questions=4)
    page = draw(partial(record, 5, {"hf-pld": "failed on question 5: no"}) + tail, "out.json.partial.jsonl")
    assert "unfinished: 5 questions so far" in page.text
    assert "hf-pld not run : failed on question 5: no" in page.text
    runs = [run for run in record["runs"] if run["question_id"] <= 5]
    assert (
        page.traces("speedup")["cascade"]["x"][0] == summarise(runs, record["setup"])["cascade"]["overall"]["speedup"]
    )
    assert len(page.data["requests"]) == 5


def test_a_benchmark_that_has_only_begun(draw):
    page = draw(partial(bench(), 0))
    assert "unfinished: 0 questions so far" in page.text
    assert "There are no figures of the cascade yet" in page.text


@pytest.fixture
def trace(tmp_path):
    """A real trace of three samples."""
    file = tmp_path / "trace.jsonl"
    config = CascadeConfig([LevelConfig(drafter="ngram", k=3), ToyModel(order=1)], plugins=[JsonTrace(file)])
    with Engine(config) as engine:
        results = engine.generate([1, 2, 3], SamplingParams(max_new_tokens=30, n=3, temperature=1.0, seed=3))
    for plugin in config.plugins:
        plugin.close()
    return file.read_text(), results


def test_a_trace(draw, trace):
    text, results = trace
    page = draw(text, "trace.jsonl")
    assert page.data["charts"] == {}
    assert [view["tokens"] for view in page.data["requests"]] == [result.tokens for result in results]
    assert [view["origins"] for view in page.data["requests"]] == [result.origins for result in results]
    assert all(view["pieces"] is None for view in page.data["requests"])
    rounds = sum(result.stats.target_forwards for result in results)
    assert f"90 tokens in {rounds} rounds of" in page.text
    assert "Tokens are shown as ids" in page.text
    assert "unfinished" not in page.text


def test_a_trace_that_breaks_off(draw, trace):
    lines = trace[0].splitlines()
    ended = sum("stats" in json.loads(line) for line in lines[:-1])
    page = draw("\n".join(lines[:-1]) + "\n" + lines[-1][:40], "trace.jsonl")
    assert f"unfinished: {ended} of 3 requests ended" in page.text


# -- what is refused -------------------------------------------------------------------------------------

ROUND = json.dumps({"request": 0, **rounds(random.Random(0), 3, 0.5)[0]})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is neither a benchmark nor a trace"),
        ("hello", "is not JSON: see line 1"),
        ("[1, 2]", "should hold JSON objects"),
        ('{"a": 1}', "is neither a benchmark (`cascade bench --json`) nor a trace"),
        ('{"stats": {}}', "is neither a benchmark"),
        (f"{ROUND}\nhello\n{ROUND}", "is not JSON: see line 2"),
        (f'{ROUND}\n{{"a": 1}}', "line 2 is neither a round nor a request's figures"),
        (json.dumps(bench() | {"format": 2}), "has format 2, and this cascade reads 1: use the version that wrote it"),
        (json.dumps({"runs": [], "summary": {}}), "has format without a number"),
        (json.dumps(bench() | {"setup": None}), "is not a whole benchmark: it has no 'setup'"),
        (json.dumps(bench() | {"runs": [{"system": "plain"}]}), "its run 1 has no 'category'"),
        ('{"setup": {}, "format": 7}', "has format 7"),
    ],
)
def test_files_that_are_something_else(draw, text, said):
    ran = draw(text)
    assert (ran.status, ran.out) == (2, "")
    assert ran.err.startswith("cascade: error: ")
    assert ran.err.count("\n") == 1
    assert said in ran.err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["{tmp}/none.json", "--html", "{tmp}/o.html"], "there is no file"),
        (["{tmp}", "--html", "{tmp}/o.html"], "is a folder: give the file"),
        (["{tmp}/bytes.json", "--html", "{tmp}/o.html"], "is not text"),
        (["{tmp}/none.json", "--html", "{tmp}/none/o.html"], "--html {tmp}/none/o.html: there is no folder"),
        (["{tmp}/none.json", "--html", "{tmp}"], "--html {tmp}: this is a folder"),
        (["{tmp}/bytes.json", "--html", "{tmp}/bytes.json"], "this is the file to be drawn"),
        (["{tmp}/none.json"], "the following arguments are required: --html"),
    ],
)
def test_words_that_cannot_be(tmp_path, capsys, words, said):
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe\x00")
    assert main(["report", *(word.format(tmp=tmp_path) for word in words)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert said.format(tmp=tmp_path) in err


def test_without_plotly(draw, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "plotly" else find(name))
    assert "the pictures need plotly: pip install 'plotly" in draw(bench()).err
