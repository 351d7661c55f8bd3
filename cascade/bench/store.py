"""The measurements of a bench, kept in a `Journal`: a line for each question, or batch, with all its runs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cascade.bench.figures import FORMAT
from cascade.bench.systems import Run
from cascade.journal import Journal, check_same

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


class Store:
    """What has been measured, in memory and, given a file, on disk. A context manager.

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
        self._journal: Journal | None = None
        if out is not None:
            self._journal = Journal(out, "bench")
            self._journal.read(self._adopt, self._take_finished, self._take)

    @property
    def partial(self) -> Path | None:
        """Where measurements go until the bench is finished."""
        return None if self._journal is None else self._journal.partial

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
        if self._journal is not None and self._journal.empty:
            self._journal.write(self.head)

    def append(self, runs: Sequence[Run], failed: Mapping[str, str]) -> None:
        """Keeps the runs of a question or a batch, and which systems failed for good."""
        self.runs += runs
        self.skipped.update(failed)
        self.finished = False
        if self._journal is not None:
            self._journal.write({"runs": list(runs), "skipped": dict(failed)})

    def finish(self, record: Mapping[str, Any]) -> None:
        """Writes the finished file, at once or not at all, and removes the unfinished one."""
        if self._journal is not None:
            self._journal.finish(record)
            self.finished = True

    def close(self) -> None:
        """Lets go of the file; an empty one is removed."""
        if self._journal is not None:
            self._journal.close(remove=self.finished)  # an interruption between the two files' last steps leaves both

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # -- reading -------------------------------------------------------------------------------------

    def _take_finished(self, record: Any) -> None:
        self.runs, self.finished = _checked(record["runs"]), True

    def _take(self, line: Any) -> None:
        """One line of the unfinished file."""
        done, runs = self.done, _checked(line["runs"])
        fresh = [run for run in runs if (run["category"], run["question_id"]) not in done]
        self.runs += fresh  # an interruption between the two files' last steps leaves runs in both
        self.skipped.update(line["skipped"])
        self.finished = self.finished and not fresh

    def _adopt(self, path: Path, head: Mapping[str, Any]) -> None:
        """Goes on with the setup of a file. Raises ConfigError where it is of something else."""
        check_same(path, {**head.get("setup", {}), **head}, FORMAT, self._configuration, self.environment)
        self.setup, self.environment = head["setup"], head["environment"]
        self.skipped.update(head["setup"]["skipped"])


def _checked(runs: Any) -> list[Run]:
    """Runs from a file. Raises ValueError for one that no figures could be made of."""
    for run in runs:
        for key, kind in FIELDS.items():
            if not isinstance(run, dict) or not isinstance(run.get(key, ...), kind):
                raise ValueError(f"a run without {key}")
    return list(runs)
