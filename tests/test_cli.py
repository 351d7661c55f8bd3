"""The command line: what it accepts and refuses, what it prints, and with which status it ends."""

import io
import json
import os
import re
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest

from cascade.cli import main, show
from cascade.cli.levels import parse_level
from cascade.config import LevelConfig
from cascade.errors import ConfigError
from cascade.result import Chunk

# A model of letters, found under names that begin with "toy".
TOY = """
import time
from cascade import hookimpl

@hookimpl
def cascade_load_model(ref, device, dtype):
    from cascade.testing import ToyModel

    class Letters(ToyModel):
        tokenizer, interrupt_at, nap = "letters", None, 0.0

        def encode(self, prompt):
            chat = not isinstance(prompt, str)
            text = "".join(f"{m['role']} {m['content']} " for m in prompt) if chat else prompt
            return [ord(c) - 97 if "a" <= c <= "z" else 26 for c in text]

        def decode(self, ids):
            return "".join(chr(97 + i) if i < 26 else " " for i in ids)

        def forward(self, feeds):
            time.sleep(self.nap)
            if self.forwards == self.interrupt_at:
                raise KeyboardInterrupt
            if self.interrupt_at == -1:
                raise RuntimeError("scripted to fail,\\nin two lines")
            return super().forward(feeds)

    if not ref.startswith("toy"):
        return None
    target = Letters(vocab_size=27, seed=1, order=1)
    if ref == "toy-draft":
        return ToyModel(vocab_size=27, seed=2, order=1, mix=(target, 0.7))
    target.interrupt_at = {"toy-interrupted": 20, "toy-broken": -1}.get(ref)
    target.nap = 0.05 if ref == "toy-slow" else 0.0
    return target

@hookimpl
def cascade_add_commands(subparsers):
    parser = subparsers.add_parser("greet")
    parser.add_argument("name")
    parser.set_defaults(run=lambda args: print(f"hello {args.name}"))
"""


@pytest.fixture
def toy(tmp_path):
    file = tmp_path / "toy.py"
    file.write_text(TOY)
    return str(file)


@pytest.fixture
def cascade(capsys, toy, monkeypatch):
    """Runs `cascade generate` on the toy model, or with `command`, any command; returns status, out, err."""
    for name in ("NO_COLOR", "FORCE_COLOR", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)

    def run(*words, command=None, levels=("ngram", "toy-draft", "toy")):
        if command is None:
            words = ["generate", "--plugin", toy, *(w for level in levels for w in ("--level", level)), *words]
        else:
            words = [*command, *words]
        status = main(words)
        out, err = capsys.readouterr()
        return SimpleNamespace(status=status, out=out, err=err)

    return run


def refused(ran, status=2):
    """The one line on stderr; nothing is on stdout."""
    assert ran.status == status
    assert ran.out == ""
    assert ran.err.startswith("cascade: error: ")
    assert ran.err.count("\n") == 1
    return ran.err


# -- --level ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "level"),
    [
        ("ngram", LevelConfig(drafter="ngram")),
        ("some/model", LevelConfig(model="some/model")),
        ("model=self,dtype=int8", LevelConfig(model="self", dtype="int8")),
        ("self,dtype=int8", LevelConfig(model="self", dtype="int8")),
        ("ngram,k=4,k_max=8,controller=fixed", LevelConfig(drafter="ngram", k=4, k_max=8, controller="fixed")),
        ("drafter=ngram, name=table", LevelConfig(drafter="ngram", name="table")),
        (
            "ngram,options.n_max=6,options.setpoint=0.5,options.how=wild,options.on=true,options.controller.gain=2",
            LevelConfig(
                drafter="ngram",
                options={"n_max": 6, "setpoint": 0.5, "how": "wild", "on": True, "controller": {"gain": 2}},
            ),
        ),
        ("model=x,device=cuda:0,k_min=0,k=0", LevelConfig(model="x", device="cuda:0", k_min=0, k=0)),
    ],
)
def test_a_level_is_read(text, level):
    assert parse_level(text, ["ngram"]) == level


def test_a_path_that_exists_is_a_model_whatever_its_name(tmp_path):
    folder = tmp_path / "a,k=1"
    folder.mkdir()
    assert parse_level(str(folder), ["ngram"]) == LevelConfig(model=str(folder))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("ngrm", "Did you mean 'ngram'?"),
        ("ngram,kmax=3", "Did you mean 'k_max'?"),
        ("ngram,n_max=3", "options.n_max=3"),
        ("ngram,k=three", "k must be an integer, not 'three'"),
        ("ngram,k=99", "k must lie between"),
        ("ngram,k_min=5,k_max=2", "k_min (5) must not exceed k_max (2)"),
        ("model=x,dtype=int7", "Did you mean 'int8'?"),
        ("model=x,drafter=ngram", "exactly one of drafter"),
        ("ngram,k=1,k=2", "k is given twice"),
        ("ngram,options.a=1,options.a=2", "options.a is given twice"),
        ("ngram,options.a=1,options.a.b=2", "options.a is a value already"),
        ("ngram,options.=1", "needs a name"),
        ("ngram,fixed", "'fixed' should be key=value"),
        ("model=", "'model=' should be key=value"),
        ("k=3", "exactly one of drafter"),
        ("", "should be key=value"),
    ],
)
def test_a_bad_level_is_refused_with_what_to_change(text, said):
    with pytest.raises(ConfigError, match=r"^--level") as error:
        parse_level(text, ["ngram"])
    assert said in str(error.value)


# -- generate --------------------------------------------------------------------------------------------


def test_text_goes_to_stdout_as_it_is_and_one_line_to_stderr(cascade):
    ran = cascade("hello there", "--max-new-tokens", "40")
    assert ran.status == 0
    assert re.fullmatch(r"[a-z ]{40}\n", ran.out)
    assert ran.err.count("\n") == 1
    assert re.match(r"40 tokens, \d+\.\d\d per target forward, \S+ tokens/s \| ngram .*\| toy-draft .*\| toy ", ran.err)


def test_the_text_is_plain_decodings(cascade):
    words = ("hello there", "--max-new-tokens", "40", "--temperature", "0.9", "--top-k", "9", "--top-p", "0.9")
    fast = cascade(*words, "--seed", "5")
    plain = cascade(*words, "--seed", "5", "--no-speculate")
    other = cascade(*words, "--seed", "6")
    assert fast.out == plain.out != other.out
    assert "40 forwards" in plain.err


def test_json_is_the_result(cascade):
    ran = cascade("hello there", "--json", "--max-new-tokens", "12")
    assert ran.err == ""
    record = json.loads(ran.out)
    assert set(record) == {"tokens", "text", "finish_reason", "error", "origins", "stats"}
    assert len(record["tokens"]) == len(record["origins"]) == record["stats"]["new_tokens"] == 12
    assert record["text"] + "\n" == cascade("hello there", "--max-new-tokens", "12").out
    assert [level["name"] for level in record["stats"]["levels"]] == ["ngram", "toy-draft", "toy"]


def test_several_samples(cascade):
    words = ("hello", "--n", "3", "--temperature", "1", "--seed", "2", "--max-new-tokens", "9")
    texts = [json.loads(line)["text"] for line in cascade(*words, "--json").out.splitlines()]
    assert len(set(texts)) == 3
    ran = cascade(*words)
    assert ran.out == "\n\n".join(texts) + "\n"
    assert ran.err.count("\n") == 3


def test_stop_strings_cut_the_text(cascade):
    whole = cascade("hello there", "--max-new-tokens", "40").out
    stop = whole[5:7]
    assert cascade("hello there", "--stop", stop, "--stop", "0").out == whole[: whole.index(stop)] + "\n"


def test_nothing_to_generate(cascade):
    ran = cascade("hello", "--max-new-tokens", "0")
    assert (ran.status, ran.out) == (0, "\n")


def test_the_prompt_from_standard_input(cascade, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello there"))
    assert cascade("-").out == cascade("hello there").out


def test_chat_goes_through_the_template(cascade):
    assert cascade("x", "--chat").out == cascade("user x ").out
    assert cascade("x", "--chat").out != cascade("x").out


def test_a_config_file_and_a_rule(cascade, toy, tmp_path):
    file = tmp_path / "config.py"
    file.write_text(f"from cascade import CascadeConfig\nconfig = CascadeConfig(['ngram', 'toy'], plugins=[{toy!r}])")
    ran = cascade("hello there", command=["generate", "--config", str(file)])
    assert ran.out == cascade("hello there").out
    wrong = cascade("x", "--rule", "couplet", command=["generate", "--config", str(file)])
    assert "Did you mean 'coupled'?" in refused(wrong)


def test_a_trace_has_a_line_per_round(cascade, tmp_path):
    file = tmp_path / "rounds.jsonl"
    ran = cascade("hello there", "--trace", str(file), "--json")
    *rounds, last = map(json.loads, file.read_text().splitlines())
    stats = json.loads(ran.out)["stats"]
    assert len(rounds) == stats["target_forwards"]
    assert last == {"stats": stats}


def test_ctrl_c_keeps_what_was_printed(cascade):
    whole = cascade("hello there").out
    ran = cascade("hello there", "--no-speculate", levels=["toy-interrupted"])
    assert ran.status == 130
    assert whole.startswith(ran.out.removesuffix("\n"))
    assert len(ran.out) > 1
    assert ran.err.count("\n") == 1
    assert "cancelled" in ran.err
    record = json.loads(cascade("hello there", "--json", levels=["toy-interrupted"]).out)
    assert record["finish_reason"] == "cancelled"


# -- colours ---------------------------------------------------------------------------------------------

ANSI = re.compile(r"\x1b\[[0-9;]*m")


def test_on_a_terminal_the_levels_have_colours(cascade, monkeypatch):
    plain = cascade("hello there").out
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    ran = cascade("hello there")
    assert "\x1b[32m" in ran.out  # the first level's green
    assert ANSI.sub("", ran.out) == plain
    assert "\x1b[32mngram" in ran.err  # the line below serves as the legend
    monkeypatch.setenv("NO_COLOR", "1")
    assert cascade("hello there").out == plain


def painted(chunks, monkeypatch, terminal=True):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    screen = show._Console(file=io.StringIO(), force_terminal=terminal, color_system="standard" if terminal else None)
    pieces = ["ab", "é\n", "\x1b[2J", "c", "d"]
    painter = show.Painter(screen, lambda ids: "".join(pieces[i] for i in ids), 3)
    for chunk in chunks:
        painter.chunk(chunk)
    return screen.file.getvalue()


def test_each_token_has_the_colour_of_its_level(monkeypatch):
    chunks = [Chunk("abé\n", (0, 1), (0, 1)), Chunk("c", (3, 4), (2, 0)), Chunk("d", (), ())]  # "d" was held back
    out = painted(chunks, monkeypatch)
    assert out == "\x1b[32mab\x1b[0m\x1b[35mé\x1b[0m\nc\x1b[32md\x1b[0m"
    assert painted(chunks, monkeypatch, terminal=False) == "abé\ncd"


def test_a_model_cannot_drive_the_terminal(monkeypatch):
    chunks = [Chunk("\x1b[2J", (2,), (2,))]
    assert painted(chunks, monkeypatch) == "\ufffd[2J"
    assert painted(chunks, monkeypatch, terminal=False) == "\x1b[2J"


# -- what is refused -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["genrate"], "no command 'genrate'. Did you mean 'generate'?"),
        (["generate", "--levle", "x", "y"], "unknown option '--levle'. Did you mean '--level'?"),
        (["generate", "--level", "toy", "two", "words"], "quotes around a prompt"),
        (["generate", "x"], "no cascade is given"),
        (["generate", "--level", "toy", "--config", "c.py", "x"], "both --config and --level"),
        (["generate", "--config", "nowhere.py", "x"], "no config file 'nowhere.py'"),
        (["generate", "--level", "toy"], "PROMPT"),
        (["generate", "--level", "toy", ""], "the prompt is empty"),
        (["generate", "--level", "toy", "x", "--max-new-tokens", "-1"], "max_new_tokens must be"),
        (["generate", "--level", "toy", "x", "--temperature", "hot"], "--temperature"),
        (["generate", "--level", "toy", "x", "--top-p", "2"], "top_p must lie in"),
        (["generate", "--level", "toy", "x", "--trace", "no/such/folder.jsonl"], "no folder 'no/such'"),
        (["generate", "--level", "drafter=ngrm", "--level", "toy", "x"], "Did you mean 'ngram'?"),
        (["generate", "--level", "ngram,controller=pidd", "--level", "toy", "x"], "Did you mean 'pid'?"),
        (["generate", "--level", "ngram,options.n_maxx=3", "--level", "toy", "x"], "n_maxx"),
        (["generate", "--level", "ngram", "x"], "needs a target"),
        (["generate", "--level", "toy", "--plugin", "missing.py", "x"], "no plugin file 'missing.py'"),
        (["plugins", "--plugin", "no_such_module"], "no_such_module"),
        (["demo", "--max-new-tokens", "0"], "at least 1"),
        (["demo", "--json", "no/such/out.json"], "no folder 'no/such'"),
    ],
)
def test_wrong_usage_is_one_line_and_status_2(cascade, words, said, toy):
    more = ["--plugin", toy] if words[0] == "generate" else []
    assert said in refused(cascade(command=[words[0], *more, *words[1:]]))


def test_a_config_file_that_raises(cascade, tmp_path):
    file = tmp_path / "config.py"
    file.write_text("x = 1\n1 / 0\n")
    assert "config.py:2: ZeroDivisionError" in refused(cascade("x", command=["generate", "--config", str(file)]))


def test_a_plugin_that_fails_or_takes_a_name(cascade, tmp_path):
    for text, said in [
        ("import no_such_thing", "No module named 'no_such_thing'"),
        ("def cascade_register_drafter(): return {}", "Did you mean 'cascade_register_drafters'?"),
        ("def cascade_register_drafters(): return {'ngram': 'a:B'}", "'ngram' is registered twice"),
    ]:
        file = tmp_path / "bad.py"
        file.write_text(text)
        assert said in refused(cascade(command=["plugins", "--plugin", str(file)]))


def test_a_request_that_fails_is_status_1(cascade):
    ran = cascade("hello", levels=["toy-broken"])
    assert ran.status == 1
    assert "scripted to fail, in two lines" in ran.err.splitlines()[-1]


def test_an_unforeseen_error_is_one_line_too_and_debug_shows_where(cascade, tmp_path):
    file = tmp_path / "command.py"
    file.write_text(
        "def cascade_add_commands(subparsers):\n"
        "    subparsers.add_parser('fail').set_defaults(run=lambda args: {}['a key'])\n"
    )
    ran = cascade("fail", command=["--plugin", str(file)])
    assert "KeyError: 'a key'" in refused(ran, status=1)
    debugged = cascade("fail", "--debug", command=["--plugin", str(file)])
    assert "Traceback" in debugged.err
    assert debugged.err.splitlines()[-1] == "cascade: error: KeyError: 'a key'"


# -- plugins and their commands --------------------------------------------------------------------------


def test_plugins_are_listed(cascade, toy):
    ran = cascade(command=["plugins", "--plugin", toy])
    rows = [line.split() for line in ran.out.splitlines()]
    assert rows[0] == ["kind", "name", "plugin", "distribution"]
    assert ["drafter", "ngram", "drafters", "cascade-spec"] in [row[:4] for row in rows]
    assert ["hook", "cascade_load_model", "toy"] in [row[:3] for row in rows]
    listed = json.loads(cascade(command=["plugins", "--json"]).out)
    assert listed["failures"] == []
    assert ("rule", "coupled", "cascade.builtin") in [(r["kind"], r["name"], r["plugin"]) for r in listed["registered"]]


def test_a_failed_plugin_is_listed_and_the_others_work(cascade, monkeypatch):
    point = SimpleNamespace(name="bad", value="no_such_module", dist=SimpleNamespace(name="cascade-bad", version="1"))
    point.load = lambda: __import__("no_such_module")
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: [point])
    ran = cascade(command=["plugins"])
    assert ran.status == 0
    assert ran.err == ""
    assert "ngram" in ran.out
    assert re.search(r"failed: .*'bad'.*cascade-bad 1.*No module named 'no_such_module'", ran.out)
    assert json.loads(cascade(command=["plugins", "--json"]).out)["failures"]
    warned = cascade("hello")
    assert warned.status == 0
    assert warned.err.startswith("cascade: warning: plugin 'bad'")


def test_a_plugin_brings_commands(cascade, toy):
    ran = cascade("greet", "you", command=["--plugin", toy])
    assert (ran.status, ran.out) == (0, "hello you\n")
    assert "greet" in cascade("--help", command=["--plugin", toy]).out
    assert "Did you mean 'greet'?" in refused(cascade("gret", command=["--plugin", toy]))
    assert "name" in refused(cascade("greet", command=["--plugin", toy]))


def test_a_plugin_cannot_take_a_command(cascade, tmp_path):
    file = tmp_path / "thief.py"
    file.write_text("def cascade_add_commands(subparsers): subparsers.add_parser('generate')")
    said = refused(cascade("other", command=["--plugin", str(file)]))
    assert "plugin 'thief'" in said
    assert "there is a command 'generate' already" in said
    assert main(["--plugin", str(file), "--help"]) == 0


def test_help_and_version(cascade):
    assert re.fullmatch(r"cascade-spec \d+\.\d+\.\d+\n", cascade(command=["--version"]).out)
    assert "generate" in cascade(command=["--help"]).out
    for command in ("demo", "generate", "plugins"):
        ran = cascade(command=[command, "--help"])
        assert ran.status == 0
        assert ran.out.startswith(f"usage: cascade {command}")
    nothing = cascade(command=[])
    assert (nothing.status, nothing.out) == (2, "")
    assert "usage: cascade" in nothing.err


# -- as processes ----------------------------------------------------------------------------------------


def process(*words, **options):
    return subprocess.Popen(
        [sys.executable, "-m", "cascade", *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options
    )


def test_listing_costs_no_heavy_import():
    code = (
        "import sys; from cascade.cli import main\n"
        "assert [main([w]) for w in ('plugins', '--help', '--version')] == [0, 0, 0]\n"
        "sys.exit(' '.join({'torch', 'numba', 'transformers'} & sys.modules.keys()))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ran.stderr.strip() == ""


def test_a_real_ctrl_c(toy):
    run = process("generate", "--level", "toy-slow", "--plugin", toy, "hello", "--max-new-tokens", "4000")
    first = run.stdout.read(3)
    os.kill(run.pid, signal.SIGINT)
    out, err = run.communicate(timeout=60)
    assert run.returncode == 130
    assert re.fullmatch(r"[a-z ]+\n", first + out)
    assert re.fullmatch(r"\d+ tokens?, .*cancelled.*\n", err)


def test_a_closed_pipe_ends_quietly(toy):
    run = process("generate", "--level", "toy-slow", "--plugin", toy, "hello", "--max-new-tokens", "4000")
    run.stdout.read(3)
    run.stdout.close()
    assert run.wait(timeout=60) == 0
    assert run.stderr.read() == ""
    run.stderr.close()


@pytest.mark.parametrize(
    ("text", "tree", "drafter"),
    [
        ("model=M,tree=dynamic,budget=12", "dynamic", None),
        ("model=M,tree=3x2x1", (3, 2, 1), None),
        ("model=M,tree=2", (2,), None),
        ("ngram+suffix", None, ("ngram", "suffix")),
        ("drafter=ngram+suffix,k=4", None, ("ngram", "suffix")),
    ],
)
def test_trees_and_merged_drafters_of_the_command_line(text, tree, drafter):
    level = parse_level(text, ["ngram", "suffix"])
    assert (level.tree, level.drafter) == (tree, drafter)
    assert level.budget == (12 if "budget" in text else 32)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("model=M,tree=3x", "tree must be an integer, not ''"),
        ("model=M,tree=bush", 'tree must be "chain", "dynamic" or numbers'),
        ("model=M,tree=0x2", "tree must be"),
        ("model=M,budget=0", "budget must be an integer >= 1"),
    ],
)
def test_trees_that_are_refused(text, words):
    with pytest.raises(ConfigError, match=re.escape(words)):
        parse_level(text, ["ngram"])
