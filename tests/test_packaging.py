"""What is shipped: a wheel with our two packages and nothing else."""

import importlib.util
import shutil
import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

import cascade

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """A wheel, built offline from a copy, so that the checkout gets no build folder."""
    if importlib.util.find_spec("setuptools") is None:
        pytest.skip("setuptools is not installed here: pip install 'setuptools>=77'")
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, source)
    for name in ("cascade", "drafters", "plugins", "tests", "examples", "benchmarks"):
        if (ROOT / name).exists():
            ignore = shutil.ignore_patterns("__pycache__", "*.egg-info", "build")
            shutil.copytree(ROOT / name, source / name, ignore=ignore)
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", out, source]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    [file] = out.iterdir()
    with zipfile.ZipFile(file) as opened:
        yield opened


@pytest.fixture(scope="module")
def metadata(wheel):
    [name] = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
    return Parser().parsestr(wheel.read(name).decode())


def test_the_wheel_holds_cascade_and_drafters_only(wheel):
    tops = {name.partition("/")[0] for name in wheel.namelist()}
    assert tops == {"cascade", "drafters", f"cascade_spec-{cascade.__version__}.dist-info"}


def test_the_wheel_holds_every_module_and_the_type_markers(wheel):
    here = {
        str(path.relative_to(ROOT))
        for package in ("cascade", "drafters")
        for pattern in ("*.py", "py.typed", "page.*")
        for path in (ROOT / package).rglob(pattern)
    }
    assert here <= set(wheel.namelist())
    assert {"cascade/py.typed", "drafters/py.typed"} <= set(wheel.namelist())


def test_metadata(wheel, metadata):
    assert (metadata["Name"], metadata["Version"]) == ("cascade-spec", cascade.__version__)
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.10"
    assert any(name.endswith("LICENSE") for name in wheel.namelist())
    [points] = [name for name in wheel.namelist() if name.endswith("entry_points.txt")]
    assert wheel.read(points).decode().split() == ["[console_scripts]", "cascade", "=", "cascade.cli:main"]


def test_every_dependency_has_a_floor(metadata):
    for line in metadata.get_all("Requires-Dist"):
        assert ">=" in line or line.startswith("cascade-spec["), line


def test_the_oldest_constraints_are_the_floors(metadata):
    """So that `make oldest` tests what pyproject.toml promises."""
    floors = {}
    for line in metadata.get_all("Requires-Dist"):
        requirement, _, marker = line.partition(";")
        if ">=" in requirement and "dev" not in marker:
            name, _, rest = requirement.partition(">=")
            floors[name.strip(" <,0123456789")] = rest.split(",")[0].strip()
    pins = dict(
        line.split("#")[0].strip().split("==")
        for line in (ROOT / "constraints-oldest.txt").read_text(encoding="utf-8").splitlines()
        if "==" in line
    )
    for name, floor in floors.items():
        assert pins[name].startswith(floor), f"{name}: pyproject.toml says >={floor}, constraints-oldest {pins[name]}"
