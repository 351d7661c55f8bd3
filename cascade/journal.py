"""Work that is kept piece by piece in a file, so that what was interrupted goes on where it stopped.

Beside the file OUT that finished work leaves stands, until then, `OUT.partial.jsonl`: a line that says what is
being done, then one for each piece.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from cascade.cli.files import as_json, write_at_once
from cascade.errors import ConfigError

#: Of the environment, what results depend on so much that a file holds those of one kind only.
SAME = ("cascade", "torch", "transformers", "processor", "threads", "cuda")

log = logging.getLogger("cascade")


class Journal:
    """The unfinished file. A context manager; see the module's docstring.

    Args:
        out: the file of the finished work.
        what: how errors call the work: "bench", "audit".

    Attributes:
        partial: where pieces go until the work is finished.

    Raises:
        ConfigError: the file cannot be written, or another process is writing it.
    """

    def __init__(self, out: Path, what: str) -> None:
        self.out, self.what = out, what
        self.partial = out.with_name(f"{out.name}.partial.jsonl")
        try:
            file = self.partial.open("a+b")
        except OSError as error:
            raise ConfigError(f"--json {out}: cannot write {self.partial.name!r} beside it: {error.strerror}") from None
        if not _locked(file) or not self.partial.exists():
            file.close()  # not ours to remove
            raise ConfigError(f"--json {out}: another {what} is writing this file: give another one, or wait")
        self._file: BinaryIO | None = file

    @property
    def empty(self) -> bool:
        """Whether nothing has been written yet."""
        return self._file is None or not self._file.tell()

    def read(
        self, adopt: Callable[[Path, Any], None], finished: Callable[[Any], None], take: Callable[[Any], None]
    ) -> None:
        """Reads what is kept: the finished file, then the unfinished one. Lets go of the file where that fails.

        Args:
            adopt: f(path, head) goes on with what a file says is being done, or refuses it.
            finished: f(record) takes the pieces of the finished file, whose head the record is too.
            take: f(line) takes a piece of the unfinished one. A torn last line is cut off: its piece is done again.

        Raises:
            ConfigError: something is no JSON, or lacks a value that one of them wants.
        """
        try:
            if self.out.exists():
                self._read_finished(adopt, finished)
            self._read_lines(lambda line, first: adopt(self.partial, line) if first else take(line))
        except BaseException:
            self.close()
            raise

    def _read_finished(self, adopt: Callable[[Path, Any], None], finished: Callable[[Any], None]) -> None:
        try:
            record = json.loads(self.out.read_text(encoding="utf-8"))
            adopt(self.out, record)
            finished(record)
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ConfigError(
                f"{self.out} exists and is no {self.what}'s file: give another --json, or delete it"
            ) from None

    def _read_lines(self, take: Callable[[Any, bool], None]) -> None:
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
                log.warning("%s ended in a torn line: what it was for is done again", self.partial)
                self._file.truncate(start)
                break
            try:
                take(content, number == 1)
            except (ValueError, KeyError, TypeError, AttributeError):
                what = "delete that line to do its question again, or the file to do all of them"
                what = "it says what was asked: delete the file, or give another --json" if number == 1 else what
                raise ConfigError(f"{self.partial}, line {number} cannot be read: {what}") from None
            start += len(line)
        self._file.seek(0, os.SEEK_END)

    def write(self, line: Mapping[str, Any]) -> None:
        """Appends a line and waits until it is on the disk."""
        if self._file is not None:
            self._file.write(json.dumps(line).encode() + b"\n")
            self._file.flush()
            os.fsync(self._file.fileno())

    def finish(self, record: Mapping[str, Any]) -> None:
        """Writes the finished file, at once or not at all, and removes the unfinished one."""
        write_at_once(self.out, as_json(record))
        self.close(remove=True)

    def close(self, remove: bool = False) -> None:
        """Lets go of the file; an empty one is removed."""
        if self._file is not None:
            if remove or not os.fstat(self._file.fileno()).st_size:
                self.partial.unlink(missing_ok=True)
            self._file.close()
            self._file = None

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def check_same(
    path: Path, head: Mapping[str, Any], fmt: int, configuration: Any, environment: Mapping[str, Any]
) -> None:
    """Checks that a file's format and configuration, and what counts of its environment, are those of now.

    Raises:
        ConfigError: they are not; names the first difference.
    """
    if head["format"] != fmt:
        raise ConfigError(f"{path} has format {head['format']!r}, and this is {fmt}: give another --json")
    here = {key: environment.get(key) for key in SAME}
    there = {key: head["environment"].get(key) for key in SAME}
    found = difference(head["configuration"], configuration) or difference(there, here)
    if found is not None:
        name, old, new = found
        raise ConfigError(
            f"{path} was measured with {name} {old!r}, and this run has {new!r}: figures of both would not "
            "compare. Give another --json, or delete the file"
        )


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
