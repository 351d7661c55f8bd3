"""Following one request of an engine, with its figures at the end however it ended."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cascade.config import SamplingParams
from cascade.request import Chunk, Request, Result

if TYPE_CHECKING:
    from cascade.engine import Engine


class Capture:
    """A plugin that remembers the requests, so that an interrupted one still has a result."""

    def __init__(self) -> None:
        self._requests: list[Request] = []

    def cascade_make_observer(self, request: Request) -> None:
        """Notes the request; wants no rounds, so it costs none."""
        self._requests.append(request)

    def take(self) -> list[Result]:
        """The results of the requests that are over, and forgets them."""
        over = [request.result() for request in self._requests if request.stats is not None]
        self._requests.clear()
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


def follow(
    engine: Engine, capture: Capture, prompt: Any, params: SamplingParams, show: Callable[[Chunk], None] | None = None
) -> Timed:
    """Streams one prompt, gives each chunk to `show`, and measures only what the engine did."""
    seconds, first = 0.0, 0.0
    capture.take()
    with contextlib.closing(engine.stream(prompt, params)) as chunks:  # type: ignore[type-var]
        began = time.perf_counter()
        for chunk in chunks:
            seconds += time.perf_counter() - began
            first = first or seconds
            if show is not None:
                show(chunk)
            began = time.perf_counter()
    return Timed(capture.take()[0], seconds, first)
