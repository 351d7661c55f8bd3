"""What is shown is run: the README's Python, its commands, and the examples, offline on tiny models."""

from __future__ import annotations

import re
import runpy
import shlex
from pathlib import Path

import pytest

import cascade.model
from tests.tiny import tiny_folder

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.S | re.M)


@pytest.fixture(autouse=True)
def _tiny_hub(tmp_path_factory, monkeypatch):
    """Hub names lead to a tiny random model with a tokenizer and a chat template: no network in tests."""
    folder = tiny_folder(tmp_path_factory, max_position_embeddings=4096)
    load = cascade.model.load

    def offline(ref, **options):
        return load(str(folder) if isinstance(ref, str) and "/" in ref and not Path(ref).exists() else ref, **options)

    monkeypatch.setattr(cascade.model, "load", offline)
    monkeypatch.chdir(ROOT)


@pytest.mark.parametrize("number", range(len(blocks("python"))))
def test_the_readmes_python_runs(number: int, capsys, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)  # for what it writes
    exec(compile(blocks("python")[number], f"README block {number}", "exec"), {"__name__": "__main__"})
    assert capsys.readouterr().out


def commands(block: str) -> list[str]:
    return [line for line in block.replace("\\\n", " ").splitlines() if line.startswith("cascade ")]


@pytest.mark.parametrize("block", [block for block in blocks("sh") if commands(block)])
def test_the_readmes_commands_run(block: str, capsys, tmp_path, monkeypatch) -> None:
    """In a folder of its own, in order: a later command may read what an earlier one wrote."""
    from cascade.cli import main

    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    for command in commands(block):
        assert main(shlex.split(command)[1:]) == 0, command
        assert capsys.readouterr().out


def test_the_readmes_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"^make (\w+)", "\n".join(blocks("sh")), re.M):
        assert re.search(rf"^{target}:", makefile, re.M)


@pytest.mark.parametrize("name", [p.name for p in sorted((ROOT / "examples").glob("*.py"))])
def test_examples_run(name: str, capsys) -> None:
    runpy.run_path(str(ROOT / "examples" / name), run_name="__main__")
    if name != "three_levels.py":
        assert capsys.readouterr().out


def test_links_lead_somewhere() -> None:
    for page in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md"):
        for target in re.findall(r"\]\((?!http)([^)#]+)", (ROOT / page).read_text()):
            assert (ROOT / target).exists(), f"{page} links to {target}"


def test_the_code_map_names_files_that_exist() -> None:
    for name in re.findall(
        r"`((?:cascade|drafters|tests|plugins|benchmarks)/[\w/.-]+)`", (ROOT / "ARCHITECTURE.md").read_text()
    ):
        assert (ROOT / name).exists(), name
