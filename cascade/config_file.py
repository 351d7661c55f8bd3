"""A cascade written as a Python file."""

from __future__ import annotations

import runpy
from pathlib import Path

from cascade.config import CascadeConfig
from cascade.errors import CascadeError, ConfigError, one_line


def load_config(path: str | Path) -> CascadeConfig:
    """Runs a Python file and returns its `config`. Raises ConfigError, naming the file and the line."""
    file = Path(path)
    if not file.is_file():
        raise ConfigError(f"no config file {str(path)!r}")
    try:
        names = runpy.run_path(str(file))
    except (Exception, SystemExit) as error:
        kind = "" if isinstance(error, CascadeError) else f"{type(error).__name__}: "
        message = one_line(error)
        raise ConfigError(f"{file}:{_line_in(file, error)}: {kind}{message}") from error
    config = names.get("config")
    if not isinstance(config, CascadeConfig):
        raise ConfigError(f"{file} must assign a CascadeConfig to the name 'config'")
    return config


def _line_in(file: Path, error: BaseException) -> int:
    if isinstance(error, SyntaxError) and error.lineno:
        return error.lineno
    line, trace = 0, error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == str(file):
            line = trace.tb_lineno
        trace = trace.tb_next
    return line
