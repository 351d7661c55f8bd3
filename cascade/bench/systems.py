"""What is measured: a system answers questions and says what that took. Here those that this engine is."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any, Protocol

from cascade.bench.questions import Question, prompt_for
from cascade.errors import DecodeError, PromptError
from cascade.level import Level
from cascade.trace import Observer, Round

if TYPE_CHECKING:
    from cascade.config import SamplingParams
    from cascade.drafter import Drafter
    from cascade.engine import Engine
    from cascade.request import Request
    from cascade.result import Result

Run = dict[str, Any]  # one answer and what it took, as it stands in the file


class PeerError(Exception):
    """A system that is not ours failed, for the reason given: it is measured no more, the others are."""


class System(Protocol):
    """One way to answer questions.

    Attributes:
        name: as in `--against`; "cascade" for the configuration itself.
        description: in words, for people.
        settings: what it was told, as plain values.
    """

    name: str
    description: str
    settings: Mapping[str, Any]

    def run(self, questions: Sequence[Question], params: SamplingParams, detailed: bool = False) -> list[Run]:
        """Answers the questions in one call, and measures it from their text to the answers' text.

        Args:
            questions: one, or several that share the batch as places in it become free.
            params: how, for all of them.
            detailed: whether rounds and the text of each token are wanted as well, from systems that know.

        Raises:
            DecodeError: an answer of this engine failed.
            PeerError: another system did.
        """
        ...


class Rounds(Observer):
    """A plugin that keeps the rounds of the requests that begin within `watching`; others cost nothing."""

    def __init__(self) -> None:
        self._kept: list[Round] | None = None

    def cascade_make_observer(self, request: Request) -> Observer | None:
        """Itself, while somebody watches."""
        return None if self._kept is None else self

    def on_round(self, round: Round) -> None:
        """Keeps the record as it is: turning it into plain values can wait until no clock runs."""
        if self._kept is not None:
            self._kept.append(round)

    @contextlib.contextmanager
    def watching(self) -> Iterator[list[Round]]:
        """Yields the list that rounds go to, of all requests in the order in which they happen."""
        kept = self._kept = []
        try:
            yield kept
        finally:
            self._kept = None


class EngineSystem:
    """An engine of ours; see `System`.

    Args:
        name, description, settings: what it is.
        engine: answers, at most its `max_batch` questions at a time.
        speculate: False for plain decoding.
        rounds: the plugin, registered with the engine, that detailed runs take their rounds from.
    """

    def __init__(
        self,
        name: str,
        description: str,
        settings: Mapping[str, Any],
        engine: Engine,
        *,
        speculate: bool = True,
        rounds: Rounds | None = None,
    ) -> None:
        self.name, self.description, self.settings = name, description, settings
        self._engine, self._speculate, self._rounds = engine, speculate, rounds
        self._models = [name for name, part in chain(engine) if isinstance(part, Level)]

    def run(self, questions: Sequence[Question], params: SamplingParams, detailed: bool = False) -> list[Run]:
        """See `System.run`."""
        prompts = [prompt_for(self._engine, question) for question in questions]
        params = replace(params, speculate=self._speculate)
        watch = self._rounds.watching() if detailed and self._rounds is not None else contextlib.nullcontext()
        with watch as rounds:
            began, forwards = time.perf_counter(), self._engine.target.forwards
            results = self._engine.generate(prompts, params)
            wall = time.perf_counter() - began
        # What a lone request's own time does not cover went by before, while its prompt became ids.
        reading = wall - results[0].stats.wall_s if len(results) == 1 else 0.0
        runs = [
            self._run(question, prompt, result, reading)
            for question, prompt, result in zip(questions, prompts, results, strict=True)
        ]
        if len(runs) > 1:
            batch = {"size": len(runs), "wall_s": wall, "forwards": self._engine.target.forwards - forwards}
            for run in runs:
                run["batch"] = batch
        if rounds is not None:
            self._detail(runs, rounds)
        return runs

    def _run(self, question: Question, prompt: Any, result: Result, reading: float) -> Run:
        """The figures of one answer; `reading` is how long the prompts took to become ids."""
        if result.error is not None:
            raise DecodeError(f"{self.name} failed on question {question.id!r}: {result.error}")
        stats = result.stats
        models = [level for level in stats.levels if level.name in self._models]
        return {
            "batch": None,
            "prompt_tokens": len(token_ids(self._engine, prompt)),
            "new_tokens": stats.new_tokens,
            "wall_s": reading + stats.wall_s,
            "first_token_s": reading + (stats.first_token_s or 0.0),
            "first_tokens": 1,  # no level proposes before the first token is out
            "target_forwards": stats.target_forwards,
            "finish_reason": result.finish_reason,
            "tokens": result.tokens,
            "text": result.text,
            "origins": result.origins,
            "stats": stats.as_dict(),
            "forwards": {level.name: level.forwards for level in models},
            "tokens_fed": {level.name: level.tokens_fed for level in models},
            "pieces": None,
            "rounds": None,
        }

    def _detail(self, runs: Sequence[Run], rounds: Sequence[Round]) -> None:
        """Adds the rounds of each answer and the text of each token."""
        requests = sorted({round.request for round in rounds})  # they are counted in the order of the prompts
        for run, request in zip(runs, requests, strict=True):
            own = [asdict(round) for round in rounds if round.request == request]
            for record in own:
                del record["request"]
            run["rounds"], run["pieces"] = own, pieces(self._engine.model, run["tokens"])


def chain(engine: Engine) -> list[tuple[str, Drafter]]:
    """(name, drafter or level) of a cascade, bottom to top, the target last: what `origins` index."""
    top_down = [(engine.target.name, engine.target), *((one.name, one.drafter) for one in engine.chain.governors)]
    return top_down[::-1]


def token_ids(engine: Engine, prompt: Any) -> list[int]:
    """The ids of a prompt as the engine's target reads it. Raises PromptError."""
    encode = getattr(engine.model, "encode", None)
    if encode is None:
        raise PromptError(f"{engine.target.name} has no tokenizer, and questions are texts: give its level a tokenizer")
    ids: list[int] = encode(prompt)
    return ids


def pieces(model: Any, tokens: Sequence[int]) -> list[str]:
    """The text of each token, special tokens shown; joined they are exactly the text of all.

    A token that ends inside a character gives what is certain, and a later one the rest.
    """
    whole = _shown(model, tokens)
    ends = [0]
    for count in range(1, len(tokens)):
        shown = _shown(model, tokens[:count])
        same = next((i for i, pair in enumerate(zip(shown, whole, strict=False)) if pair[0] != pair[1]), len(shown))
        ends.append(max(ends[-1], min(same, len(whole))))
    return [whole[start:end] for start, end in zip(ends, [*ends[1:], len(whole)], strict=True)][: len(tokens)]


def _shown(model: Any, tokens: Sequence[int]) -> str:
    try:
        text: str = model.decode(tokens, skip_special_tokens=False)
    except TypeError:  # a plugin's model that knows no special tokens
        text = model.decode(tokens)
    return text
