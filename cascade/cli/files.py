"""Files that commands write: refused before the work begins, not after it."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

from cascade.errors import ConfigError


def check_writable(option: str, file: str) -> Path:
    """The file as a path. Raises ConfigError, naming the option, where it could not be written."""
    path = Path(file)
    if path.is_dir():
        raise ConfigError(f"{option} {file}: this is a folder")
    if not path.parent.is_dir():
        raise ConfigError(f"{option} {file}: there is no folder {str(path.parent)!r}")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError(f"{option} {file}: this file cannot be written")
    return path


def as_json(record: Any) -> str:
    """A record as the text of a file, readable for people too."""
    return json.dumps(record, indent=1) + "\n"


def write_json(path: Path, record: Any) -> None:
    """Writes a record."""
    path.write_text(as_json(record), encoding="utf-8")


def write_at_once(path: Path, text: str) -> None:
    """Writes a file whole or not at all: nobody ever finds half of it. Raises OSError, ValueError."""
    fresh = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with fresh.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(fresh, path)
    except BaseException:
        with contextlib.suppress(OSError):
            fresh.unlink(missing_ok=True)
        raise
