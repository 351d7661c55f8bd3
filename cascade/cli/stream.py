"""Following one request of an engine, with its figures at the end however it ended."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cascade.config import SamplingParams
from cascade.request import Request
from cascade.result import Chunk, Result

if TYPE_CHECKING:
    from cascade.engine import Engine


class Capture:
    """A plugin that remembers the requests, so that an interrupted one still has a result."""

    def __init__(self) -> None:
        self.requests: list[Request] = []

    def cascade_make_observer(self, request: Request) -> None:
        """Notes the request; wants no rounds, so it costs none."""
        self.requests.append(request)

    def take(self) -> list[Result]:
        """The results of the requests that are over, and forgets them."""
        over = [request.result() for request in self.requests if request.stats is not None]
        self.requests.clear()
        return over


@dataclass(frozen=True)
class Timed:
    """A request that was followed to its end.

    Attributes:
        seconds, first_token_s: spent in the engine; what it took to show the text is not in it.
    """

    result: Result
    seconds: float
    first_token_s: float


class Stopwatch:
    """One request, decoded a round at a time, with a clock that runs only while the engine works."""

    def __init__(self, engine: Engine, prompt: Any, params: SamplingParams) -> None:
        self._stream = engine.stream_alone(prompt, params)  # else the rounds of one would decode the other as well
        self._seconds = 0.0
        self._first = 0.0
        self.tokens = 0
        self.over = False

    def step(self) -> Chunk | None:
        """The next round; None, once, when there is none."""
        began = time.perf_counter()
        chunk: Chunk | None = next(self._stream, None)
        self._seconds += time.perf_counter() - began
        self._first = self._first or self._seconds
        self.over = chunk is None
        self.tokens += len(chunk.tokens) if chunk is not None else 0
        return chunk

    def close(self) -> None:
        """Ends the request where it is."""
        self._stream.close()

    def timed(self) -> Timed:
        """The figures of a request that is over."""
        result = self._stream.result
        assert result is not None
        return Timed(result, self._seconds, self._first)


def race(
    engine: Engine,
    prompt: Any,
    params: Sequence[SamplingParams],
    show: Callable[[Chunk], None],
    first: int = 0,
) -> list[Timed]:
    """Decodes one prompt in several ways, round by round in turn, and measures each.

    Whoever has the fewest tokens goes next. So whatever else the machine does while this runs slows
    all of them alike, and their ratios stay true.

    Args:
        engine: decodes all of them.
        prompt: as `Engine.stream` takes it.
        params: one for each way; the chunks of the first go to `show`.
        show: called with each chunk, while no clock runs.
        first: which way begins.
    """
    with contextlib.ExitStack() as stack:
        runs = [stack.enter_context(contextlib.closing(Stopwatch(engine, prompt, each))) for each in params]
        while waiting := [run for run in runs if not run.over]:
            run = min(waiting, key=lambda run: (run.tokens, run is not runs[first]))
            chunk = run.step()
            if run is runs[0] and chunk is not None:
                show(chunk)
        return [run.timed() for run in runs]
