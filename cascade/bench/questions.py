"""Questions from JSON lines, as Spec-Bench and HumanEval write them."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cascade.errors import ConfigError

if TYPE_CHECKING:
    from cascade.engine import Engine

HUMANEVAL = "humaneval"
FORMS = 'a question has "question_id", "category" and "turns" (Spec-Bench), or "task_id" and "prompt" (HumanEval)'


@dataclass(frozen=True)
class Question:
    """One line of a questions file.

    Attributes:
        id: its `question_id` or `task_id`, unique within the category.
        category: its task; "humaneval" for HumanEval's lines.
        prompt: the first turn, or HumanEval's prompt, as text.
    """

    id: str | int
    category: str
    prompt: str

    @property
    def key(self) -> tuple[str, str | int]:
        """(category, id): what tells it from every other question of the file."""
        return self.category, self.id


def prompt_for(engine: Engine, question: Question) -> Any:
    """What `engine.generate` takes: a user's message where the target has a chat template, else the text.

    Base models get a text to continue, instruct models are asked in the form they were trained on.
    """
    if getattr(getattr(engine.model, "tokenizer", None), "chat_template", None):
        return [{"role": "user", "content": question.prompt}]
    return question.prompt


def read_questions(path: str | Path, limit_per_category: int | None = None) -> list[Question]:
    """The questions of a file, in its order; with a limit the first so many of each category.

    Raises:
        ConfigError: names the file, and the line where one is at fault. Lines beyond the limit are checked too.
    """
    taken: Counter[str] = Counter()
    lines: dict[tuple[str, str | int], int] = {}
    questions = []
    for number, question in _parsed(path):
        first = lines.setdefault(question.key, number)
        if first != number:
            raise ConfigError(
                f"{path}, line {number}: question {question.id!r} of category {question.category!r} stands on "
                f"line {first} already: give each an id of its own"
            )
        taken[question.category] += 1
        if limit_per_category is None or taken[question.category] <= limit_per_category:
            questions.append(question)
    if not questions:
        raise ConfigError(f"{path} has no questions: {FORMS}, one JSON object on each line")
    return questions


def digest(path: str | Path) -> str:
    """The SHA-256 of the file's bytes, in hexadecimal. Raises ConfigError."""
    return hashlib.sha256(_read(path)).hexdigest()


def _read(path: str | Path) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read the questions {str(path)!r}: {error.strerror}") from None


def _parsed(path: str | Path) -> Iterator[tuple[int, Question]]:
    """(line number, question) of every line that is not blank. Lines end with a line feed and nothing else."""
    for number, line in enumerate(_read(path).split(b"\n"), 1):
        if line.strip():
            try:
                yield number, _question(json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8")))
            except ConfigError as error:
                raise ConfigError(f"{path}, line {number}: {error}") from None
            except (ValueError, RecursionError):  # not UTF-8, not JSON, or JSON nested beyond reason
                raise ConfigError(f"{path}, line {number}: this is no JSON object: {FORMS}") from None


def _question(line: Any) -> Question:
    """The question that a line's value is. Raises ConfigError, without saying where."""
    if not isinstance(line, dict):
        raise ConfigError(f"this is no JSON object: {FORMS}")
    if "turns" in line:
        turns = line["turns"]
        if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) for turn in turns):
            raise ConfigError('"turns" must be a list of texts, with at least one')
        name, id, category, text = "question_id", line.get("question_id"), line.get("category"), turns[0]
    elif "task_id" in line and "prompt" in line:
        name, id, category, text = "task_id", line["task_id"], HUMANEVAL, line["prompt"]
    else:
        raise ConfigError(FORMS)
    if isinstance(id, bool) or not isinstance(id, (str, int)) or id == "":
        raise ConfigError(f'"{name}" must be a text or a whole number')
    if not isinstance(category, str) or category in ("", "overall"):
        raise ConfigError('"category" must be a text, and not "overall", which stands for all of them')
    if not isinstance(text, str) or not text.strip() or not _encodable(text):
        raise ConfigError("the prompt must be a text that is not empty")
    return Question(id, category, text)


def _encodable(text: str) -> bool:
    """Whether a text is one of characters: JSON may hold halves of pairs, which no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
