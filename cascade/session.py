"""A conversation: what all levels cached of one turn serves the next."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from cascade.config import SamplingParams
from cascade.errors import ConfigError
from cascade.request import Request
from cascade.result import Result
from cascade.scheduler import Scheduler
from cascade.stream import Stream, only

if TYPE_CHECKING:
    from cascade.rows import Row


class Session:
    """Keeps the caches of all levels between turns; made by `engine.session()`, and a context manager.

    Every turn gives the whole conversation, as without a session; what its beginning has in common with what
    is cached is not computed again, on any level. The text is the same as without.

    Args:
        scheduler: the engine's.
        samples: makes the requests of one prompt.
    """

    def __init__(self, scheduler: Scheduler, samples: Callable[[Any, SamplingParams | None], list[Request]]) -> None:
        self._scheduler, self._samples = scheduler, samples
        self._caches: dict[str, Row] = {}
        self._latest: Request | None = None
        self._closed = False

    def generate(self, prompt: Any, params: SamplingParams | None = None) -> Result | list[Result]:
        """The next turn, see `Engine.generate`; of n samples the first is the one that goes on.

        Raises:
            ConfigError: the session is closed, its last turn still runs, or there are several prompts.
        """
        results = self._scheduler.run(self._turn(prompt, params))
        return results[0] if len(results) == 1 else results

    def stream(self, prompt: Any, params: SamplingParams | None = None) -> Stream:
        """The next turn as a stream, see `Engine.stream`. Raises as `generate` does."""
        return Stream(self._turn(prompt, params, one=True), self._scheduler)

    def _turn(self, prompt: Any, params: SamplingParams | None, one: bool = False) -> list[Request]:
        if self._closed:
            raise ConfigError("this session is closed: open another one with engine.session()")
        if self._latest is not None and not self._latest.over:
            raise ConfigError("the last turn of this session is still running: finish or close its stream first")
        samples = self._samples(prompt, params)
        if one:
            only(samples, "stream()")
        self._latest = samples[0]
        self._latest.kept = self._caches
        return samples

    def close(self) -> None:
        """Ends a turn that still runs, and frees the caches."""
        self._closed = True
        if self._latest is not None:
            self._scheduler.drop([self._latest])
        self._caches.clear()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *exc: Any) -> None:
        self.close()
