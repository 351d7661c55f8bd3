"""What an audit has found, kept in a `Journal`: for each rule a line about it, then one for each question."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cascade.journal import Journal, check_same

FORMAT = 2  # of the file that --json writes

Case = dict[str, Any]


class Found:
    """The cases of an audit, in memory and, given a file, on disk. A context manager.

    Args:
        out: the file of the finished audit; None keeps everything in memory.
        configuration: what a file that exists must share, as plain values.
        environment: where this runs; what counts of it, a file that exists must share.

    Attributes:
        audits: rule -> what is said about it, and its "cases", as they stand in the file.
        finished: whether `out` holds all of them.

    Raises:
        ConfigError: the file holds something else, or another process is writing it.
    """

    def __init__(self, out: Path | None, configuration: Mapping[str, Any], environment: Mapping[str, Any]) -> None:
        self.audits: dict[str, dict[str, Any]] = {}
        self.finished = False
        self._configuration = json.loads(json.dumps(configuration))
        self._environment = dict(environment)
        self._journal: Journal | None = None
        if out is not None:
            self._journal = Journal(out, "audit")
            self._journal.read(self._adopt, self._take_finished, self._take)

    @property
    def partial(self) -> Path | None:
        """Where cases go until the audit is finished."""
        return None if self._journal is None else self._journal.partial

    def done(self, rule: str) -> set[tuple[str, str | int]]:
        """(category, id) of the questions that have been compared under a rule."""
        return {(case["category"], case["question_id"]) for case in self.cases(rule)}

    def cases(self, rule: str) -> list[Case]:
        """Those of a rule, in the order in which they were found."""
        found: list[Case] = self.audits[rule]["cases"] if rule in self.audits else []
        return found

    def begin(self, rule: str, about: Mapping[str, Any]) -> None:
        """Says under what a rule is audited; one that goes on keeps what was said at first."""
        if self._journal is not None and self._journal.empty:
            self._journal.write(self._head())
        if rule not in self.audits:
            self.audits[rule] = {"rule": rule, **about, "cases": []}
            self._write({"rule": rule, "about": dict(about)})

    def append(self, rule: str, cases: Sequence[Case]) -> None:
        """Keeps the cases of a question."""
        self.audits[rule]["cases"] += cases
        self._write({"rule": rule, "cases": list(cases)})

    def finish(self) -> None:
        """Writes the finished file, at once or not at all, where there is something new in it."""
        if self._journal is not None and not self.finished:
            self._journal.finish({**self._head(), "audits": list(self.audits.values())})
            self.finished = True

    def __enter__(self) -> Found:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._journal is not None:
            self._journal.close(remove=self.finished)  # an interruption between the two files' last steps leaves both

    # -- the file ------------------------------------------------------------------------------------

    def _head(self) -> dict[str, Any]:
        return {"format": FORMAT, "environment": self._environment, "configuration": self._configuration}

    def _write(self, line: Mapping[str, Any]) -> None:
        self.finished = False
        if self._journal is not None:
            self._journal.write(line)

    def _adopt(self, path: Path, head: Mapping[str, Any]) -> None:
        check_same(path, head, FORMAT, self._configuration, self._environment)
        self._environment = head["environment"]

    def _take_finished(self, record: Any) -> None:
        self.audits = {audit["rule"]: {**audit, "cases": list(map(dict, audit["cases"]))} for audit in record["audits"]}
        self.finished = True

    def _take(self, line: Any) -> None:
        """One line of the unfinished file."""
        if "about" in line:
            self.audits.setdefault(line["rule"], {"rule": line["rule"], **line["about"], "cases": []})
        else:
            done = self.done(line["rule"])
            fresh = [dict(case) for case in line["cases"] if (case["category"], case["question_id"]) not in done]
            self.audits[line["rule"]]["cases"] += fresh
            self.finished = self.finished and not fresh
