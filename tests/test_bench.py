"""`cascade bench`: questions, who is measured and in which order, what is kept, and how it goes on."""

import json
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

from cascade import CascadeConfig, Engine, LevelConfig, SamplingParams, hookimpl
from cascade.bench import runner
from cascade.bench.figures import summarise
from cascade.bench.peers import Peer
from cascade.bench.questions import Question, digest, prompt_for, read_questions
from cascade.bench.runner import Group, groups, measure
from cascade.bench.sweep import subsets, sweep
from cascade.bench.systems import EngineSystem, Rounds, pieces
from cascade.cli import main
from cascade.cli.bench import _Bar
from cascade.drafter import Drafter
from cascade.errors import ConfigError, DecodeError
from cascade.journal import difference
from cascade.model import load
from cascade.testing import ToyModel
from tests.tiny import NESTS, tiny, tiny_folder, tokenizer

# A model of letters, as a plugin brings one.
TOY = """
from cascade import hookimpl
from cascade.testing import ToyModel

class Letters(ToyModel):
    tokenizer = "letters"

    def encode(self, prompt):
        return [ord(c) - 97 if "a" <= c <= "z" else 26 for c in prompt]

    def decode(self, ids):
        return "".join(chr(97 + i) if i < 26 else " " for i in ids)

@hookimpl
def cascade_load_model(ref, device, dtype):
    target = Letters(vocab_size=27, seed=1, order=1, max_length=200)
    if ref == "toy":
        return target
    if ref == "toy-draft":
        return ToyModel(vocab_size=27, seed=2, order=1, mix=(target, 0.7))
"""

LINES = [
    {"question_id": 1, "category": "qa", "turns": ["what is it", "and then"]},
    {"question_id": 2, "category": "qa", "turns": ["who was it"]},
    {"question_id": 1, "category": "edit", "turns": ["change this and this"]},
    {"question_id": 3, "category": "qa", "turns": ["where"]},
    {"question_id": "b", "category": "edit", "turns": ["again and again"]},
]


def write(path, lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture
def bench(tmp_path, capsys):
    """Runs `cascade bench` on the toy model; returns status, out, err."""
    plugin = tmp_path / "toy.py"
    plugin.write_text(TOY)
    write(tmp_path / "questions.jsonl", LINES)

    def run(*words, levels=("ngram", "toy-draft", "toy"), questions="questions.jsonl"):
        chosen = [word for level in levels for word in ("--level", level)]
        head = ["bench", "--plugin", str(plugin), *chosen, "--questions", str(tmp_path / questions)]
        status = main([*head, "--max-new-tokens", "12", *words])
        out, err = capsys.readouterr()
        return SimpleNamespace(status=status, out=out, err=err)

    return run


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out.json"


def refused(ran):
    """The one line on stderr; nothing is on stdout."""
    assert (ran.status, ran.out) == (2, ""), ran.err
    assert ran.err.startswith("cascade: error: ")
    assert ran.err.count("\n") == 1
    return ran.err


@pytest.fixture
def asked(monkeypatch):
    """(system, question ids) of every recorded call, in order; `stop_after` interrupts."""
    log = SimpleNamespace(calls=[], stop_after=None)
    original = runner.measure

    class Watched:
        def __init__(self, system):
            self.name, self.run_ = system.name, system.run

        def run(self, questions, params, detailed=False):
            if len(log.calls) == log.stop_after:
                raise KeyboardInterrupt
            log.calls.append((self.name, [question.id for question in questions]))
            return self.run_(questions, params, detailed)

    monkeypatch.setattr(
        runner, "measure", lambda systems, *rest: original([Watched(system) for system in systems], *rest)
    )
    return log


@pytest.fixture
def no_engine(monkeypatch):
    def built(*args, **options):
        raise AssertionError("an engine was built")

    monkeypatch.setattr(Engine, "__init__", built)


# -- questions -------------------------------------------------------------------------------------------


def test_questions_of_both_forms_in_the_files_order(tmp_path):
    human = {"task_id": "HumanEval/0", "prompt": "def f():", "entry_point": "f"}
    path = write(tmp_path / "q.jsonl", [*LINES[:3], human])
    path.write_text("\n" + path.read_text() + "  \n")
    assert read_questions(path) == [
        Question(1, "qa", "what is it"),
        Question(2, "qa", "who was it"),
        Question(1, "edit", "change this and this"),
        Question("HumanEval/0", "humaneval", "def f():"),
    ]
    assert [question.key for question in read_questions(path, 1)] == [
        ("qa", 1), ("edit", 1), ("humaneval", "HumanEval/0")
    ]  # fmt: skip
    assert digest(path) != digest(write(tmp_path / "r.jsonl", LINES))


GOOD = json.dumps(LINES[0])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "has no questions"),
        ("\n \n", "has no questions"),
        ("what is it", "line 1: this is no JSON object"),
        (f"{GOOD}\n[1]", "line 2: this is no JSON object"),
        (f"{GOOD}\n{{", "line 2: this is no JSON object"),
        (f"{GOOD}\n\xff".encode("latin-1"), "line 2: this is no JSON object"),
        ("[" * 100_000, "line 1: this is no JSON object"),
        ('{"question_id": 1}', "line 1: a question has"),
        ('{"question_id": 1, "category": "a", "turns": []}', 'line 1: "turns" must be'),
        ('{"question_id": 1, "category": "a", "turns": "b"}', 'line 1: "turns" must be'),
        ('{"question_id": 1, "category": "a", "turns": ["b", 1]}', 'line 1: "turns" must be'),
        ('{"question_id": 1, "category": "a", "turns": [" "]}', "line 1: the prompt must be"),
        ('{"question_id": 1, "category": "a", "turns": ["\\ud800"]}', "line 1: the prompt must be"),
        ('{"question_id": 1.5, "category": "a", "turns": ["b"]}', 'line 1: "question_id" must be'),
        ('{"question_id": true, "category": "a", "turns": ["b"]}', 'line 1: "question_id" must be'),
        ('{"category": "a", "turns": ["b"]}', 'line 1: "question_id" must be'),
        ('{"question_id": 1, "turns": ["b"]}', 'line 1: "category" must be'),
        ('{"question_id": 1, "category": "overall", "turns": ["b"]}', 'line 1: "category" must be'),
        ('{"task_id": 1, "prompt": null}', "line 1: the prompt must be"),
        (f"{GOOD}\n\n{GOOD}", "line 3: question 1 of category 'qa' stands on line 1 already"),
    ],
)
def test_a_bad_questions_file_is_refused_with_the_line(tmp_path, text, said):
    path = tmp_path / "q.jsonl"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError) as error:
        read_questions(path)
    assert said in str(error.value)
    assert str(error.value).startswith(str(path))


@pytest.mark.parametrize(("name", "said"), [("none.jsonl", "No such file"), (".", "Is a directory")])
def test_a_questions_file_that_cannot_be_read(tmp_path, name, said, bench, no_engine):
    assert said in refused(bench(questions=name))


def test_questions_go_through_the_chat_template_where_there_is_one():
    question = Question(1, "qa", "what")
    chat, base = tokenizer(), tokenizer()
    base.chat_template = None
    asked = [prompt_for(SimpleNamespace(model=SimpleNamespace(tokenizer=t)), question) for t in (chat, base, None)]
    assert asked == [[{"role": "user", "content": "what"}], "what", "what"]


def test_groups_are_of_one_category_and_in_order():
    questions = [Question(i, category, "x") for i, category in enumerate("aabab" + 7 * "a")]
    made = groups(questions, 2, first=7)
    assert [(group.id, group.category, [q.id for q in group.questions]) for group in made] == [
        (7, "a", [0, 1, 3, 5, 6, 7, 8, 9]), (8, "b", [2, 4]), (9, "a", [10, 11])
    ]  # fmt: skip
    assert [[q.id for q in group.questions] for group in groups(questions, 1)] == [[i] for i in range(12)]


# -- systems ---------------------------------------------------------------------------------------------


def test_pieces_join_to_the_text_whatever_a_token_holds():
    shared = tokenizer(259)
    model = SimpleNamespace(decode=lambda ids, skip_special_tokens: shared.decode(ids, skip_special_tokens=False))
    ids = [*shared("aé 漢")["input_ids"], 2, *shared("🙂x")["input_ids"], *shared("🙂")["input_ids"][:2]]
    found = pieces(model, ids)
    assert len(found) == len(ids)
    assert "".join(found) == shared.decode(ids, skip_special_tokens=False)
    assert found[:3] == ["a", "", "é"]
    assert "</s>" in found
    assert pieces(model, []) == []


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_weights_are_counted_once_in_whatever_form(tied, dtype):
    module = tiny("llama", torch.float32, tie_word_embeddings=tied)
    expected = sum(parameter.numel() for parameter in module.parameters())
    assert load(module, dtype=dtype, role="draft").parameters == expected


def test_rounds_are_kept_only_while_somebody_watches():
    rounds = Rounds()
    assert rounds.cascade_make_observer(None) is None
    with rounds.watching() as kept:
        assert rounds.cascade_make_observer(None) is rounds
        rounds.on_round("one")
    assert kept == ["one"]
    assert rounds.cascade_make_observer(None) is None


@pytest.mark.parametrize("count", [1, 2, 3, 5, 6, 7, 17])
def test_each_system_follows_every_other_equally_often(count):
    follows, begins = {}, {}
    for turn in range(2 * count):
        places = runner.order(count, turn)
        assert sorted(places) == list(range(count))
        begins[places[0]] = begins.get(places[0], 0) + 1
        for pair in pairwise(places):
            follows[pair] = follows.get(pair, 0) + 1
    assert begins.keys() == set(range(count))
    assert len(follows) == count * (count - 1)
    assert len(set(follows.values())) <= 1


def test_whoever_begins_changes_and_a_failed_peer_leaves_no_half_figures():
    calls = []

    class System:
        description, settings = "", {}

        def __init__(self, name):
            self.name = name

        def run(self, questions, params, detailed=False):
            calls.append((self.name, detailed))
            if self.name == "b" and len(calls) > 5:
                raise runner.PeerError("too much")
            return [{"batch": None} for _ in questions]

    systems, question = [System(name) for name in "abc"], Question(5, "qa", "x")
    runs, failed = measure(systems, Group(1, "qa", (question,)), SamplingParams(), 3)
    assert calls == [("b", True), ("c", True), ("a", True), ("c", False), ("a", False), ("b", False), ("c", False),
                     ("a", False)]  # fmt: skip
    assert failed == {"b": "failed on question 5: too much"}
    assert sorted((run["system"], run["repeat"]) for run in runs) == [(name, i) for name in "ac" for i in range(3)]
    assert runs[0] == {"system": "c", "category": "qa", "question_id": 5, "repeat": 0, "batch": None}


def test_a_failed_answer_of_ours_is_an_error():
    class Broken(ToyModel):
        def encode(self, prompt):
            return [1]

        def forward(self, feeds):
            return super().forward(feeds) * float("nan")

    engine = Engine(CascadeConfig([Broken()]))
    with pytest.raises(DecodeError, match=r"plain failed on question 3: .*not numbers"):
        EngineSystem("plain", "", {}, engine).run([Question(3, "qa", "x")], SamplingParams())


# -- the sweep -------------------------------------------------------------------------------------------


class Letters(ToyModel):
    tokenizer = "letters"

    def encode(self, prompt):
        return [ord(c) % 27 for c in prompt]

    def decode(self, ids):
        return " ".join(map(str, ids))


class Hopeless(Drafter):
    """Never right, and never closed by a fixed setting."""

    def propose(self, asks):
        from cascade import Draft

        return [Draft([26] * min(ask.want, ask.cap)) for ask in asks]


class Registers:
    @hookimpl
    def cascade_register_drafters(self):
        return {"hopeless": Hopeless}


def toy_engine(*lower, **config):
    target = Letters(vocab_size=27, seed=1, order=1)
    return Engine(CascadeConfig([*lower, LevelConfig(model=target, name="target")], **config))


def test_fixed_settings_always_propose_and_never_differ_in_text():
    draft = LevelConfig(model=ToyModel(vocab_size=27, seed=5, order=1), name="draft")  # hopeless as well
    lower = [LevelConfig(drafter="hopeless"), draft]
    engine = toy_engine(*lower, plugins=[Registers()])
    systems, skipped = sweep(engine)
    assert skipped == {}
    assert [system.name for system in systems] == [
        *(f"fixed:hopeless={k}" for k in (3, 6, 10)),
        *(f"fixed:draft={k}" for k in (2, 3, 5, 8)),
        *(f"fixed:hopeless+draft={k}" for k in (2, 3, 5, 8)),
    ]
    question, params = Question(1, "qa", "what"), SamplingParams(max_new_tokens=40)
    plain = EngineSystem("plain", "", {}, engine, speculate=False).run([question], params)[0]["tokens"]
    for system in systems:
        [run] = system.run([question], params)
        assert run["tokens"] == plain
        *levels, target = run["stats"]["levels"]
        assert [level["bypassed_rounds"] for level in levels] == [0] * len(levels)
        k = int(system.name.partition("=")[2])
        assert 0.8 * k < levels[-1]["k_mean"] <= k  # the last rounds ask for what there is room for
        assert levels[-1]["drafted"] > 0.8 * (target["forwards"] - 1) * k
        assert levels[-1]["alpha"] < 0.3  # at which a gate would have closed
    assert systems[-1].settings == {"hopeless": "K 8", "draft": "K 8"}


def test_levels_that_cannot_take_part_in_a_sweep():
    off, mine = LevelConfig(drafter="ngram", k=0), LevelConfig(drafter=Hopeless(), name="mine")
    assert sweep(toy_engine(off)) == ([], {"fixed": "there is no level below the target"})
    systems, skipped = sweep(toy_engine(mine))
    assert systems == []
    assert "serves one engine only" in skipped["fixed:mine"]


def test_options_of_the_controller_are_not_the_drafters():
    level = LevelConfig(drafter="ngram", k=4, options={"setpoint": 0.5, "n_max": 5})
    draft = LevelConfig(model=ToyModel(vocab_size=27), name="draft", options={"setpoint": 0.5}, k=3, k_max=4)
    systems, _ = sweep(toy_engine(level, draft))
    assert systems[-1].settings == {"ngram": "K 4", "draft": "K 8"}


def test_of_many_levels_not_every_subset_is_tried():
    assert [len(one) for one in subsets([1, 2, 3])] == [1, 1, 1, 2, 2, 2, 3]
    assert [len(one) for one in subsets([1, 2, 3, 4])] == [1, 1, 1, 1, 4]


# -- the command -----------------------------------------------------------------------------------------


def test_every_system_on_transformers_models(tmp_path, tmp_path_factory, capsys):
    target, draft = tiny_folder(tmp_path_factory), tiny_folder(tmp_path_factory, num_hidden_layers=1)
    write(tmp_path / "q.jsonl", LINES[:3])
    file = tmp_path / "out.json"
    names = ["plain", "hf-plain", "hf-pld", "hf-assisted", "hf-nested"][: 4 + NESTS]
    words = ["--level", "ngram", "--level", f"model={draft},dtype=float32,name=draft", "--level"]
    words += [f"model={target},dtype=float32,name=target", "--questions", str(tmp_path / "q.jsonl"), "--repeats", "2"]
    words += ["--against", ",".join(names[:3]), "--against", ",".join(names[3:]), "--max-new-tokens", "10"]
    assert main(["bench", *words, "--sweep", "--json", str(file), "--limit-per-category", "1"]) == 0
    shown, notes = capsys.readouterr()
    record = json.loads(file.read_text())
    systems = list(record["setup"]["systems"])
    assert systems[: 5 + NESTS] == ["cascade", *names]
    assert len(systems) == 5 + NESTS + 3 + 4 + 4
    assert record["setup"]["skipped"] == {}
    assert len(record["runs"]) == len(systems) * 2 * 2
    assert {run["question_id"] for run in record["runs"]} == {1}
    plain = {run["category"]: run["tokens"] for run in record["runs"] if run["system"] == "plain"}
    for run in record["runs"]:
        assert run["tokens"] == plain[run["category"]]
        assert run["new_tokens"] == len(run["tokens"]) == 10
        assert 0 < run["first_token_s"] < run["wall_s"]
        used = {"target"} | ({"draft"} if "ngram=" not in run["system"] else set())
        assert set(run["forwards"]) == set(run["tokens_fed"]) == used
        assert (run["stats"] is None) == run["system"].startswith("hf-")
        assert (run["rounds"] is not None) == (run["system"] == "cascade" and run["repeat"] == 0)
        if run["rounds"] is not None:
            assert [t for r in run["rounds"] for t in r["tokens"]] == run["tokens"]
            assert len(run["pieces"]) == 10
    assert summarise(record["runs"], record["setup"]) == record["summary"]
    assert record["summary"]["cascade"]["overall"]["regret"] > 0
    levels = record["setup"]["levels"]
    assert [(level["name"], level["kind"], level["dtype"]) for level in levels] == [
        ("ngram", "drafter", None), ("draft", "model", "float32"), ("target", "model", "float32")
    ]  # fmt: skip
    assert levels[1]["parameters"] < levels[2]["parameters"]
    assert all(name in shown for name in (names[-1], "fixed:ngram+draft=8"))
    assert "cascade: 2/2 edit 1: cascade " in notes
    assert list(tmp_path.glob("out*")) == [file]


def test_without_a_file_everything_stays_in_memory(bench, tmp_path):
    before = set(tmp_path.iterdir())
    ran = bench("--against", "plain")
    assert ran.status == 0
    assert "plain" in ran.out
    assert set(tmp_path.iterdir()) - before == {tmp_path / "toy.py", tmp_path / "questions.jsonl"} - before
    assert "cascade: 5/5 edit b: " in ran.err


def test_peers_that_cannot_be_had_are_named(bench, out):
    ran = bench("--against", "plain,hf-plain,hf-nested", "--json", str(out))
    reason = "level toy is no transformers model that can generate"
    assert f"skipped hf-plain: {reason}" in ran.err
    assert json.loads(out.read_text())["setup"]["skipped"] == {"hf-plain": reason, "hf-nested": reason}


def test_batches(bench, out, asked):
    assert bench("--batch", "2", "--json", str(out), "--repeats", "2").status == 0
    qa = [1, 2, 3]
    assert asked.calls[:4] == [("cascade", qa), ("plain", qa), ("plain", qa), ("cascade", qa)]
    runs = json.loads(out.read_text())["runs"]
    assert len(runs) == 5 * 2 * 2
    by_call = {}
    for run in runs:
        by_call.setdefault((run["system"], run["repeat"], run["batch"]["id"]), []).append(run)
    assert len(by_call) == 2 * 2 * 2
    for rows in by_call.values():
        assert all((row["batch"], row["category"]) == (rows[0]["batch"], rows[0]["category"]) for row in rows)
        batch = rows[0]["batch"]
        assert batch["size"] == len(rows)
        assert max(row["wall_s"] for row in rows) <= batch["wall_s"]
        assert max(row["target_forwards"] for row in rows) <= batch["forwards"]
        assert sum(row["target_forwards"] for row in rows) <= 2 * batch["forwards"]
    for row in (run for run in runs if run["rounds"]):
        assert all(round["batch"] <= 2 for round in row["rounds"])
    for system in ("cascade", "plain"):
        texts = {(r["category"], r["question_id"]): r["tokens"] for r in runs if r["system"] == system}
        assert texts == {(r["category"], r["question_id"]): r["tokens"] for r in runs}


def test_a_batch_larger_than_the_configurations_is_one_call(bench, out, tmp_path):
    lines = [{"question_id": i, "category": "qa", "turns": ["what is it"]} for i in range(9)]
    write(tmp_path / "nine.jsonl", lines)
    bench("--batch", "9", "--json", str(out), questions="nine.jsonl")
    runs = [run for run in json.loads(out.read_text())["runs"] if run["system"] == "cascade"]
    assert [run["question_id"] for run in runs] == list(range(9))
    assert {run["rounds"][0]["batch"] for run in runs} == {9}


def test_a_seed_is_chosen_where_samples_need_one(bench, out):
    bench("--temperature", "1", "--json", str(out))
    record = json.loads(out.read_text())
    assert (record["setup"]["seed"], record["setup"]["temperature"]) == (0, 1.0)
    assert record["summary"]["cascade"]["overall"]["identical"] == 1.0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--against", "hf-assited"], "there is no system 'hf-assited'. Did you mean 'hf-assisted'?"),
        (["--batch", "0"], "--batch must be at least 1, not 0"),
        (["--repeats", "0"], "--repeats must be at least 1"),
        (["--limit-per-category", "-1"], "--limit-per-category must be at least 1"),
        (["--max-new-tokens", "0"], "--max-new-tokens must be at least 1"),
        (["--temperature", "-1"], "temperature must be a number >= 0"),
        (["--json", "/nowhere/out.json"], "there is no folder"),
        (["--config", "x.py"], "both --config and --level"),
    ],
)
def test_wrong_usage_is_refused_before_anything_is_loaded(bench, no_engine, words, said):
    assert said in refused(bench(*words))


def test_a_question_longer_than_the_context_is_named(bench, tmp_path):
    write(tmp_path / "long.jsonl", [*LINES, {"question_id": 9, "category": "qa", "turns": ["x" * 200]}])
    ran = bench(questions="long.jsonl")
    assert ran.status == 2
    assert "question 9 of category 'qa' has 200 tokens, and the context holds 200" in ran.err


# -- going on --------------------------------------------------------------------------------------------


def test_an_interrupted_bench_goes_on_where_it_stopped(bench, out, tmp_path, asked):
    asked.stop_after = 5  # in the middle of the third question
    ran = bench("--json", str(out))
    partial = tmp_path / "out.json.partial.jsonl"
    assert (ran.status, ran.out) == (130, "")
    assert f"2 questions are kept in {partial}; the same command goes on from there" in ran.err
    head, *lines = map(json.loads, partial.read_text().splitlines())
    assert set(head) == {"format", "environment", "setup"}
    assert [[run["question_id"] for run in line["runs"]] for line in lines] == [[1, 1], [2, 2]]
    assert not out.exists()

    asked.calls.clear()
    asked.stop_after = None
    ran = bench("--json", str(out))
    assert ran.status == 0
    assert "going on: 2 questions have been measured before" in ran.err
    assert [call[1] for call in asked.calls] == [[1], [1], [3], [3], ["b"], ["b"]]
    assert asked.calls[0][0] == "cascade"  # whoever's turn it would have been
    assert asked.calls[2][0] == "plain"
    assert not partial.exists()
    record = json.loads(out.read_text())
    assert len(record["runs"]) == 10
    assert record["summary"]["cascade"]["overall"]["questions"] == 5


def test_a_finished_bench_is_only_shown_again(bench, out, monkeypatch):
    first = bench("--json", str(out))
    kept = out.read_bytes()
    monkeypatch.setattr(Engine, "__init__", None)
    again = bench("--json", str(out))
    assert again.out == first.out
    assert (again.status, again.err, out.read_bytes()) == (0, "", kept)
    assert [path.name for path in out.parent.glob("out*")] == ["out.json"]


def test_more_questions_per_category_measure_only_what_is_missing(bench, out, asked):
    bench("--json", str(out), "--limit-per-category", "1")
    asked.calls.clear()
    bench("--json", str(out), "--limit-per-category", "2")
    assert {call[1][0] for call in asked.calls} == {2, "b"}
    record = json.loads(out.read_text())
    assert record["setup"]["limit_per_category"] == 2
    assert len(record["runs"]) == 8


def test_an_interrupted_extension_leaves_the_finished_file_and_goes_on(bench, out, asked):
    bench("--json", str(out), "--limit-per-category", "1")
    kept = out.read_bytes()
    asked.stop_after = 6  # four calls were before, so in the middle of the second question that is missing
    assert bench("--json", str(out)).status == 130
    assert out.read_bytes() == kept
    asked.stop_after = None
    assert bench("--json", str(out)).status == 0
    runs = json.loads(out.read_text())["runs"]
    assert [run["question_id"] for run in runs[::2]] == [1, 1, 2, 3, "b"]


def test_an_interruption_without_a_file_says_that_nothing_is_kept(bench, asked):
    asked.stop_after = 3
    ran = bench()
    assert (ran.status, ran.out) == (130, "")
    assert ran.err.endswith("cascade: interrupted: nothing is kept\n")


@pytest.mark.parametrize("tail", [b'{"runs": [{"sys', b"\x00\x00\x00\n"])
def test_a_torn_last_line_loses_its_question_only(bench, out, tmp_path, asked, tail):
    asked.stop_after = 4
    bench("--json", str(out))
    partial = tmp_path / "out.json.partial.jsonl"
    partial.write_bytes(partial.read_bytes() + tail)
    asked.calls.clear()
    asked.stop_after = 2
    ran = bench("--json", str(out))
    assert ran.err.count("ended in a torn line") == 1
    assert [len(json.loads(line).get("runs", [])) for line in partial.read_text().splitlines()] == [0, 2, 2, 2]


def test_a_torn_first_line_begins_anew(bench, out, tmp_path):
    partial = tmp_path / "out.json.partial.jsonl"
    partial.write_bytes(b'{"format": 1, "envi')
    assert bench("--json", str(out)).status == 0
    assert len(json.loads(out.read_text())["runs"]) == 10


def test_an_unreadable_line_in_the_middle_is_an_error(bench, out, tmp_path, asked):
    asked.stop_after = 6
    bench("--json", str(out))
    partial = tmp_path / "out.json.partial.jsonl"
    lines = partial.read_bytes().splitlines(keepends=True)
    damaged = b"".join([*lines[:2], b"what\n", *lines[3:]])
    partial.write_bytes(damaged)
    assert f"{partial}, line 3 cannot be read" in refused(bench("--json", str(out)))
    assert partial.read_bytes() == damaged


def test_a_run_without_its_figures_is_found_before_anything_is_measured(bench, out, tmp_path, asked):
    asked.stop_after = 4
    bench("--json", str(out))
    partial = tmp_path / "out.json.partial.jsonl"
    head, *lines = partial.read_text().splitlines(keepends=True)
    last = json.loads(lines[-1])
    del last["runs"][0]["wall_s"]
    damaged = "".join([head, *lines[:-1], json.dumps(last) + "\n"])
    partial.write_text(damaged)
    asked.calls.clear()
    number = len(lines) + 1
    assert f"line {number} cannot be read: delete that line" in refused(bench("--json", str(out)))
    assert (asked.calls, partial.read_text()) == ([], damaged)
    partial.write_text("nonsense\n" + "".join(lines))
    assert "line 1 cannot be read: it says what was asked: delete the file" in refused(bench("--json", str(out)))
    partial.unlink()
    out.write_text(json.dumps({**json.loads(head), "runs": [1, 2], "summary": {}}))
    assert f"{out} exists and is no bench's file" in refused(bench("--json", str(out)))


def test_other_weights_or_another_plugin_are_another_configuration(bench, out, tmp_path, tmp_path_factory, asked):
    folder = tiny_folder(tmp_path_factory, max_position_embeddings=512)
    levels = ("ngram", str(folder))
    asked.stop_after = 4
    bench("--json", str(out), levels=levels)
    before = (tmp_path / "toy.py").read_text()
    (tmp_path / "toy.py").write_text(before + "\n# changed\n")
    assert "was measured with files.toy.py" in refused(bench("--json", str(out), levels=levels))
    (tmp_path / "toy.py").write_text(before)
    (folder / "model.safetensors").touch()
    assert "was measured with levels[1].weights" in refused(bench("--json", str(out), levels=levels))


@pytest.mark.parametrize(
    ("words", "levels", "said"),
    [
        (["--max-new-tokens", "13"], ("ngram", "toy"), "max_new_tokens 12, and this run has 13"),
        (["--repeats", "2"], ("ngram", "toy"), "repeats 1"),
        (["--batch", "2"], ("ngram", "toy"), "batch 1"),
        (["--temperature", "1"], ("ngram", "toy"), "temperature 0.0"),
        (["--against", "hf-plain"], ("ngram", "toy"), "systems[1] 'plain', and this run has 'hf-plain'"),
        (["--sweep"], ("ngram", "toy"), "sweep False"),
        ([], ("ngram,k=3", "toy"), "levels[0].k None, and this run has 3"),
        ([], ("ngram", "toy-draft", "toy"), "levels ["),
    ],
)
def test_a_file_of_another_configuration_is_refused(bench, out, asked, words, levels, said, request):
    asked.stop_after = 2
    bench("--json", str(out), levels=("ngram", "toy"))
    kept = {path: path.read_bytes() for path in out.parent.glob("out*")}
    assert len(kept) == 1
    request.getfixturevalue("no_engine")
    error = refused(bench("--json", str(out), *words, levels=levels))
    assert said in error
    assert "Give another --json, or delete the file" in error
    assert {path: path.read_bytes() for path in out.parent.glob("out*")} == kept


def test_a_file_of_other_questions_or_another_machine_is_refused(bench, out, tmp_path, monkeypatch):
    bench("--json", str(out))
    write(tmp_path / "other.jsonl", LINES[:2])
    assert "was measured with questions '" in refused(bench("--json", str(out), questions="other.jsonl"))
    monkeypatch.setattr("cascade.cli.environment.processor", lambda: "an abacus")
    assert "and this run has 'an abacus'" in refused(bench("--json", str(out)))


@pytest.mark.parametrize("content", ["what", "[]", "{}", '{"format": 2}', '{"format": 1, "setup": 3, "runs": []}'])
def test_a_file_that_is_no_benchs_is_left_alone(bench, out, no_engine, content):
    out.write_text(content)
    error = refused(bench("--json", str(out)))
    assert str(out) in error
    assert out.read_text() == content
    assert [path.name for path in out.parent.glob("out*")] == ["out.json"]


def test_two_benches_do_not_share_a_file(bench, out, asked, monkeypatch):
    inner = []
    original = runner.warm_up

    def meanwhile(*args):
        monkeypatch.setattr(runner, "warm_up", original)
        inner.append(main([*words, "--json", str(out)]))
        return original(*args)

    monkeypatch.setattr(runner, "warm_up", meanwhile)
    words = ["bench", "--plugin", str(out.parent / "toy.py"), "--level", "ngram", "--level", "toy"]
    words += ["--questions", str(out.parent / "questions.jsonl"), "--max-new-tokens", "12"]
    ran = bench("--json", str(out), levels=("ngram", "toy"))
    assert (inner, ran.status) == ([2], 0)
    assert "another bench is writing this file" in ran.err
    assert len(json.loads(out.read_text())["runs"]) == 10


def test_an_interruption_while_the_file_is_finished_repeats_nothing(bench, out, tmp_path, monkeypatch):
    """The finished file is in place, and the other one has not been removed yet."""
    partial, real = tmp_path / "out.json.partial.jsonl", runner.measure
    copies = []

    def measured(*args):
        copies.append(partial.read_bytes())
        return real(*args)

    monkeypatch.setattr(runner, "measure", measured)
    bench("--json", str(out))
    kept = json.loads(out.read_text())
    partial.write_bytes(copies[-1])
    again = bench("--json", str(out))
    assert again.status == 0
    assert json.loads(out.read_text()) == kept


def test_a_peer_that_fails_is_left_out_from_then_on_also_after_an_interruption(
    tmp_path, tmp_path_factory, monkeypatch, capsys
):
    folder, file = tiny_folder(tmp_path_factory), tmp_path / "out.json"
    write(tmp_path / "q.jsonl", LINES)
    words = ["bench", "--level", f"model={folder},name=target", "--questions", str(tmp_path / "q.jsonl"), "--against"]
    words += ["plain,hf-plain,hf-pld", "--max-new-tokens", "4", "--json", str(file)]
    generate, asked = Peer._generate, []

    def failing(self, texts, *rest):
        asked.append(self.name)
        if self.name == "hf-pld" and asked.count("hf-pld") == 3:  # to warm up, on the first and on the second question
            raise RuntimeError("no more")
        if asked.count("hf-plain") == 5:
            raise KeyboardInterrupt
        return generate(self, texts, *rest)

    monkeypatch.setattr(Peer, "_generate", failing)
    assert main(words) == 130
    assert "skipped hf-pld from now on: failed on question 2: RuntimeError: no more" in capsys.readouterr().err
    monkeypatch.setattr(Peer, "_generate", generate)
    assert main(words) == 0
    record = json.loads(file.read_text())
    assert record["setup"]["skipped"] == {"hf-pld": "failed on question 2: RuntimeError: no more"}
    of = {
        name: [r["question_id"] for r in record["runs"] if r["system"] == name] for name in record["setup"]["systems"]
    }
    assert of == {
        "cascade": [1, 2, 1, 3, "b"],
        "plain": [1, 2, 1, 3, "b"],
        "hf-plain": [1, 2, 1, 3, "b"],
        "hf-pld": [1],
    }


def test_a_peer_that_cannot_even_warm_up_is_skipped(tmp_path, tmp_path_factory, monkeypatch, capsys):
    def failing(self, *rest):
        raise ValueError("not with this model")

    monkeypatch.setattr(Peer, "_generate", failing)
    write(tmp_path / "q.jsonl", LINES[:1])
    file = tmp_path / "out.json"
    words = ["bench", "--level", f"model={tiny_folder(tmp_path_factory)}", "--questions", str(tmp_path / "q.jsonl")]
    assert main([*words, "--max-new-tokens", "4", "--against", "plain,hf-plain", "--json", str(file)]) == 0
    reason = "failed while it was warmed up: ValueError: not with this model"
    assert json.loads(file.read_text())["setup"]["skipped"] == {"hf-plain": reason}
    assert f"skipped hf-plain: {reason}" in capsys.readouterr().err


def test_a_difference_is_named_by_its_path():
    assert difference({"a": [1, {"b": 2}]}, {"a": [1, {"b": 2}]}) is None
    assert difference({"a": [1, {"b": 2}]}, {"a": [1, {"b": 3}]}) == ("a[1].b", 2, 3)
    assert difference({"a": 1}, {"a": 1, "b": 2}) == ("b", None, 2)
    assert difference({"a": [1]}, {"a": [1, 2]}) == ("a", [1], [1, 2])


def test_on_a_terminal_there_is_a_bar(bench, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    advanced = []
    done = _Bar.done
    monkeypatch.setattr(_Bar, "done", lambda self, *rest: (advanced.append(1), done(self, *rest)))
    ran = bench()
    assert ran.status == 0
    assert len(advanced) == 5
    assert "5/5 edit" not in ran.err
