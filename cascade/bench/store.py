"""The measurements of a bench, kept question by question, so that an interrupted one goes on where it stopped.

Beside the file OUT that a finished bench leaves stands, until then, `OUT.partial.jsonl`: a line that says what
is measured, then one for each question (of batches, one for each batch) with all its runs.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from cascade.bench.figures import FORMAT
from cascade.bench.setup import SAME
from cascade.bench.systems import Run
from cascade.cli.files import write_json
from cascade.errors import ConfigError

#: What every run must have for its figures, and of which type.
NUMBER = (int, float)
FIELDS: dict[str, Any] = {
    "system": str,
    "category": str,
    "question_id": (str, int),
    "repeat": int,
    "batch": (dict, type(None)),
    "new_tokens": int,
    "wall_s": NUMBER,
    "first_token_s": (*NUMBER, type(None)),
    "first_tokens": int,
    "target_forwards": int,
    "tokens": list,
    "forwards": dict,
    "tokens_fed": dict,
    "stats": (dict, type(None)),
}

log = logging.getLogger("cascade")


class Store:
    """What has been measured, in memory and, given a file, on disk. A context manager; see the module's docstring.

    Args:
        out: the file of the finished bench; None keeps everything in memory.
        configuration: `Plan.configuration`, which a file that exists must share.
        environment: where this runs; of a file that exists, `SAME` of it must be equal.

    Attributes:
        out: the file of the finished bench, or None.
        setup: what is measured, from the file or from `begin`; None before.
        runs: all of them, as they were measured.
        skipped: systems that cannot be had, or failed on the way, with the reason.
        finished: whether `out` holds all of the runs.

    Raises:
        ConfigError: the file holds something else, or another process is writing it.
    """

    def __init__(self, out: Path | None, configuration: Mapping[str, Any], environment: Mapping[str, Any]) -> None:
        self.out = out
        self.setup: dict[str, Any] | None = None
        self.environment = dict(environment)
        self.runs: list[Run] = []
        self.skipped: dict[str, str] = {}
        self.finished = False
        self._configuration = json.loads(json.dumps(configuration))
        self._file: BinaryIO | None = None
        if out is not None:
            try:
                self._open(out)
            except BaseException:
                self.close()
                raise

    @property
    def partial(self) -> Path | None:
        """Where measurements go until the bench is finished."""
        return None if self.out is None else self.out.with_name(f"{self.out.name}.partial.jsonl")

    @property
    def done(self) -> set[tuple[str, str | int]]:
        """(category, id) of the questions that have been measured."""
        return {(run["category"], run["question_id"]) for run in self.runs}

    @property
    def head(self) -> dict[str, Any]:
        """All but the runs and the summary; `setup` must be known."""
        assert self.setup is not None
        setup = {**self.setup, "skipped": dict(self.skipped)}
        return {"format": FORMAT, "environment": self.environment, "setup": setup}

    def begin(self, setup: Mapping[str, Any]) -> None:
        """Says what is measured, before the first question; a bench that goes on keeps what it said at first."""
        if self.setup is None:
            self.setup, self.skipped = dict(setup), dict(setup["skipped"])
        if self._file is not None and not self._file.tell():
            self._write(self.head)

    def append(self, runs: Sequence[Run], failed: Mapping[str, str]) -> None:
        """Keeps the runs of a question or a batch, and which systems failed for good."""
        self.runs += runs
        self.skipped.update(failed)
        self.finished = False
        self._write({"runs": list(runs), "skipped": dict(failed)})

    def finish(self, record: Mapping[str, Any]) -> None:
        """Writes the finished file, at once or not at all, and removes the unfinished one."""
        if self.out is None:
            return
        fresh = self.out.with_name(f"{self.out.name}.tmp")
        write_json(fresh, record)
        os.replace(fresh, self.out)
        self.finished = True
        self.close(remove=True)

    def close(self, remove: bool = False) -> None:
        """Lets go of the file; an empty one is removed."""
        if self._file is not None and self.partial is not None:
            if remove or not os.fstat(self._file.fileno()).st_size:
                self.partial.unlink(missing_ok=True)
            self._file.close()
            self._file = None

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # -- reading -------------------------------------------------------------------------------------

    def _open(self, out: Path) -> None:
        partial = self.partial
        assert partial is not None
        try:
            self._file = partial.open("a+b")
        except OSError as error:
            raise ConfigError(f"--json {out}: cannot write {partial.name!r} beside it: {error.strerror}") from None
        if not _locked(self._file) or not partial.exists():
            busy, self._file = self._file, None  # not ours to remove
            busy.close()
            raise ConfigError(f"--json {out}: another bench is writing this file: give another one, or wait")
        if out.exists():
            self._read_finished(out)
        self._read_partial(partial)
        self._file.seek(0, os.SEEK_END)

    def _read_finished(self, out: Path) -> None:
        try:
            record = json.loads(out.read_text(encoding="utf-8"))
            self._adopt(out, record)
            self.runs = _checked(record["runs"])
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ConfigError(f"{out} exists and is no bench's file: give another --json, or delete it") from None
        self.finished = True

    def _read_partial(self, partial: Path) -> None:
        """Takes in the lines; a last one that is torn is cut off, and its questions will be measured again."""
        assert self._file is not None
        self._file.seek(0)
        lines = self._file.read().splitlines(keepends=True)
        start = 0
        for number, line in enumerate(lines, 1):
            last, whole = number == len(lines), line.endswith(b"\n")
            try:
                content = json.loads(line) if whole else None
            except (ValueError, RecursionError):
                content = None
            if content is None and last and (number > 1 or not whole):
                log.warning("%s ended in a torn line: what it was for is measured again", partial)
                self._file.truncate(start)
                return
            try:
                self._take(partial, content, first=number == 1)
            except (ValueError, KeyError, TypeError, AttributeError):
                what = "delete that line to measure its question again, or the file to measure all of them"
                what = "it says what was measured: delete the file, or give another --json" if number == 1 else what
                raise ConfigError(f"{partial}, line {number} cannot be read: {what}") from None
            start += len(line)

    def _take(self, partial: Path, line: Any, first: bool) -> None:
        """One line of the unfinished file."""
        if first:
            self._adopt(partial, line)
            return
        done, runs = self.done, _checked(line["runs"])
        fresh = [run for run in runs if (run["category"], run["question_id"]) not in done]
        self.runs += fresh  # an interruption between the two files' last steps leaves runs in both
        self.skipped.update(line["skipped"])
        self.finished = self.finished and not fresh

    def _adopt(self, path: Path, head: Mapping[str, Any]) -> None:
        """Goes on with the setup of a file. Raises ConfigError where it is of something else."""
        if head["format"] != FORMAT:
            raise ConfigError(f"{path} has format {head['format']!r}, and this is {FORMAT}: give another --json")
        setup, environment = head["setup"], head["environment"]
        here = {key: self.environment.get(key) for key in SAME}
        there = {key: environment.get(key) for key in SAME}
        found = difference(setup["configuration"], self._configuration) or difference(there, here)
        if found is not None:
            name, old, new = found
            raise ConfigError(
                f"{path} was measured with {name} {old!r}, and this run has {new!r}: figures of both would not "
                "compare. Give another --json, or delete the file"
            )
        self.setup, self.environment = setup, environment
        self.skipped.update(setup["skipped"])

    # -- writing -------------------------------------------------------------------------------------

    def _write(self, line: Mapping[str, Any]) -> None:
        """Appends a line and waits until it is on the disk."""
        if self._file is not None:
            self._file.write(json.dumps(line).encode() + b"\n")
            self._file.flush()
            os.fsync(self._file.fileno())


def _checked(runs: Any) -> list[Run]:
    """Runs from a file. Raises ValueError for one that no figures could be made of."""
    for run in runs:
        for key, kind in FIELDS.items():
            if not isinstance(run, dict) or not isinstance(run.get(key, ...), kind):
                raise ValueError(f"a run without {key}")
    return list(runs)


def difference(old: Any, new: Any, name: str = "") -> tuple[str, Any, Any] | None:
    """(path, old, new) of the first value in which two trees of plain values differ; None where they do not."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in [*old, *(key for key in new if key not in old)]:
            found = difference(old.get(key), new.get(key), f"{name}.{key}" if name else key)
            if found is not None:
                return found
        return None
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        pairs = enumerate(zip(old, new, strict=True))
        return next((found for i, pair in pairs if (found := difference(*pair, f"{name}[{i}]"))), None)
    return None if old == new else (name, old, new)


def _locked(file: BinaryIO) -> bool:
    """Locks a file for this process, where the system can; False if another one holds it."""
    with contextlib.suppress(ImportError):
        import fcntl

        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
    return True
