"""What a report is made of: a benchmark's record, what there is of an unfinished one, or a trace."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cascade.bench.figures import FORMAT, summarise
from cascade.errors import ConfigError

BENCH = {"environment": dict, "setup": dict, "runs": list, "summary": dict}
RUN = ("system", "category", "question_id", "repeat", "tokens", "origins", "stats")
ROUND = ("round", "position", "tokens", "origins", "levels")


@dataclass(frozen=True)
class Request:
    """One request whose rounds are known.

    Attributes:
        label: tells it from the others.
        category: its question's, empty in a trace.
        tokens, origins: ids, and for each the index of the level that first proposed it.
        pieces: the text of each token, None where only ids are known.
        rounds: as `cascade.trace.Round`, each a dict.
    """

    label: str
    category: str
    tokens: Sequence[int]
    origins: Sequence[int]
    pieces: Sequence[str] | None
    rounds: Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Source:
    """Everything a page shows.

    Attributes:
        name: of the file.
        levels: names bottom to top, the target last.
        requests: those whose rounds are known.
        bench: the benchmark's record, None for a trace.
        unfinished: how far it came, if it did not come to its end.
    """

    name: str
    levels: Sequence[str]
    requests: Sequence[Request]
    bench: Mapping[str, Any] | None = None
    unfinished: str | None = None


def read(file: str) -> Source:
    """What a file holds. Raises ConfigError where it is neither a benchmark nor a trace, or cannot be read."""
    path = Path(file)
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"there is no file {file!r}") from None
    except IsADirectoryError:
        raise ConfigError(f"{file} is a folder: give the file that `cascade bench --json` wrote") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{file} is not text: give the file that `cascade bench --json` wrote") from None
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}") from None
    records, torn = _records(file, text)
    first = records[0]
    if "runs" in first and "summary" in first:
        return _bench(path.name, file, first)
    if "setup" in first:
        return _partial(path.name, file, records)
    if all(key in first for key in ROUND):
        return _trace(path.name, file, records, torn)
    raise ConfigError(
        f"{file} is neither a benchmark (`cascade bench --json`) nor a trace (`cascade generate --trace`)"
    )


def _records(file: str, text: str) -> tuple[list[dict[str, Any]], bool]:
    """The objects of one JSON document or of JSON lines, and whether the last line is torn."""
    try:
        whole = [_loads(text)]
        lines, torn = whole, False
    except ValueError:
        lines, torn = [], False
        rows = [(number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
        for number, line in rows:
            try:
                lines.append(_loads(line))
            except ValueError:
                # Whoever wrote it may have been killed in the middle of its last line.
                torn = bool(lines) and number == rows[-1][0]
                if not torn:
                    raise ConfigError(f"{file} is not JSON: see line {number}") from None
    if not lines or not all(isinstance(line, dict) for line in lines):
        raise ConfigError(f"{file} is neither a benchmark nor a trace: it should hold JSON objects")
    return lines, torn


def _loads(text: str) -> Any:
    try:
        return json.loads(text, parse_constant=lambda name: None)  # NaN and Infinity: not known
    except RecursionError:
        raise ValueError("nested too deeply") from None


# -- benchmarks ------------------------------------------------------------------------------------------


def _bench(name: str, file: str, record: dict[str, Any]) -> Source:
    _check_format(file, record)
    for key, kind in BENCH.items():
        if not isinstance(record.get(key), kind):
            raise ConfigError(f"{file} is not a whole benchmark: it has no {key!r}; run `cascade bench` again")
    return _measured(name, file, record, None)


def _partial(name: str, file: str, records: Sequence[dict[str, Any]]) -> Source:
    """What OUT.partial.jsonl holds: the setup, then a line per question (or batch of them) with its runs."""
    header, *lines = records
    _check_format(file, header)
    # A system that failed on the way is told of where it did.
    skipped = {name: why for line in records for name, why in line.get("skipped", {}).items()}
    setup = {**header["setup"], "skipped": {**header["setup"].get("skipped", {}), **skipped}}
    runs = [run for line in lines for run in line.get("runs", ())]
    _check_runs(file, runs)
    record = {**header, "setup": setup, "runs": runs, "summary": summarise(runs, setup) if runs else {}}
    done = len({(run["category"], run["question_id"]) for run in runs})
    return _measured(name, file, record, f"{done} question{'s' if done != 1 else ''} so far")


def _check_format(file: str, record: Mapping[str, Any]) -> None:
    if record.get("format") != FORMAT:
        found = record.get("format", "without a number")
        raise ConfigError(f"{file} has format {found}, and this cascade reads {FORMAT}: use the version that wrote it")


def _check_runs(file: str, runs: Sequence[Any]) -> None:
    for number, run in enumerate(runs, 1):
        missing = next((key for key in RUN if not isinstance(run, dict) or key not in run), None)
        if missing is not None:
            raise ConfigError(f"{file} is damaged: its run {number} has no {missing!r}; run `cascade bench` again")


def _measured(name: str, file: str, record: Mapping[str, Any], unfinished: str | None) -> Source:
    _check_runs(file, record["runs"])
    repeated = any(run["repeat"] for run in record["runs"])
    requests = [
        Request(
            label=f"{run['category']} · {run['question_id']}" + (f" · repeat {run['repeat'] + 1}" if repeated else ""),
            category=run["category"],
            tokens=run["tokens"],
            origins=run["origins"],
            pieces=run.get("pieces"),
            rounds=run["rounds"],
        )
        for run in record["runs"]
        if run.get("rounds") and run["origins"] is not None
    ]
    levels = [level["name"] for level in record["setup"].get("levels", ())]
    return Source(name, levels, requests, record, unfinished)


# -- traces ----------------------------------------------------------------------------------------------


def _trace(name: str, file: str, records: Sequence[dict[str, Any]], torn: bool) -> Source:
    """Rounds of one or several requests, each with its number, and a line of figures where one ended."""
    rounds: dict[int, list[dict[str, Any]]] = {}
    ended = 0
    for number, record in enumerate(records, 1):
        if "stats" in record:
            ended += 1
        elif all(key in record for key in ROUND):
            rounds.setdefault(record.get("request", 0), []).append(record)
        else:
            raise ConfigError(f"{file} is damaged: line {number} is neither a round nor a request's figures")
    requests = [
        Request(
            label=f"request {number}",
            category="",
            tokens=[token for one in own for token in one["tokens"]],
            origins=[origin for one in own for origin in one["origins"]],
            pieces=None,
            rounds=own,
        )
        for number, own in rounds.items()
    ]
    levels = [level["name"] for level in requests[0].rounds[0]["levels"]]
    over = f"{ended} of {len(requests)} requests ended" if torn or ended < len(requests) else None
    return Source(name, levels, requests, None, over)
