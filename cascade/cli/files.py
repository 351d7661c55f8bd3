"""Files that commands write: refused before the work begins, not after it."""

from __future__ import annotations

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


def write_json(path: Path, record: Any) -> None:
    """Writes a record, readable for people too."""
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
