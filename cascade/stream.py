"""Requests to iterate over while they run: `Stream`, and `AsyncStream` for servers."""

from __future__ import annotations

import asyncio
import functools
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

from cascade.errors import ConfigError
from cascade.result import Chunk, Result

if TYPE_CHECKING:
    from cascade.request import Request
    from cascade.scheduler import Scheduler


def only(requests: Sequence[Request], what: str) -> Request:
    """The one request that can be followed. Raises ConfigError for several samples."""
    if len(requests) != 1:
        raise ConfigError(f"{what} follows one sample: use n=1, or generate() for several")
    return requests[0]


class Stream:
    """A request as it goes on: iterate over its `Chunk`s, close it to end it early.

    Its rounds are run by whoever iterates, or by other callers of the engine meanwhile.

    Args:
        requests: the one request to follow.
        scheduler: the engine's.

    Attributes:
        request_id: what `engine.cancel` takes.
    """

    def __init__(self, requests: Sequence[Request], scheduler: Scheduler) -> None:
        request = self._request = only(requests, "stream()")
        self.request_id, self._scheduler = request.id, scheduler
        self._chunks: deque[Chunk] = deque()
        self._ended = False
        request.deliver = self._chunks.append
        scheduler.submit([request])

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> Chunk:
        if self._ended:
            raise StopIteration
        try:
            # Not until the request is over: another thread may have ended it and be about to hand over its last chunk.
            self._scheduler.run_until(lambda: self._chunks or self._ended)
        except BaseException:
            self.close()
            raise
        try:  # another thread may close the stream at any time
            chunk = self._chunks.popleft()
        except IndexError:
            raise StopIteration from None
        if chunk.finish_reason is not None:
            self._ended = True
        return chunk

    def close(self) -> None:
        """Ends the request where it is and frees what levels keep of it; harmless when it is over."""
        self._request.deliver, self._ended = None, True
        self._chunks.clear()
        self._scheduler.drop([self._request])

    def __del__(self) -> None:
        if hasattr(self, "_chunks") and not self._request.over:
            self.close()

    @property
    def result(self) -> Result | None:
        """The outcome once the request is over, however it ended; None before."""
        return self._request.result() if self._request.over else None


class AsyncStream:
    """A request as it goes on, for a server: `async for chunk in engine.astream(prompt, params)`.

    Rounds run in a thread of the engine's own, for all streams at once; the event loop is never kept
    waiting. A task that is cancelled while it waits for a chunk cancels its request.

    Args:
        requests: the one request to follow.
        scheduler: the engine's.

    Attributes:
        request_id: what `engine.cancel` takes.

    Raises:
        ConfigError: there is no running event loop.
    """

    def __init__(self, requests: Sequence[Request], scheduler: Scheduler) -> None:
        request = self._request = only(requests, "astream()")
        self.request_id = request.id
        self._chunks: asyncio.Queue[Chunk] = asyncio.Queue()
        self._ended = False
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            raise ConfigError("astream() needs a running event loop: call it in a coroutine, or use stream()") from None
        # Without a reference to self: a stream that nobody holds any more must be collected.
        request.deliver = functools.partial(_hand_over, loop, self._chunks)
        scheduler.submit([request])
        scheduler.serve(request)

    def __aiter__(self) -> AsyncStream:
        return self

    async def __anext__(self) -> Chunk:
        if self._ended:
            raise StopAsyncIteration
        try:
            chunk = await self._chunks.get()
        except asyncio.CancelledError:
            self._request.cancelled = True
            raise
        if self._ended:
            self._chunks.put_nowait(chunk)  # there may be more who wait
            raise StopAsyncIteration
        if chunk.finish_reason is not None:
            self._ended = True
            self._chunks.put_nowait(chunk)  # to wake another task that waits, as in aclose()
        return chunk

    async def aclose(self) -> None:
        """Ends the request where it is; returns when what levels kept of it is freed."""
        self._request.cancelled = True
        async for _ in self:
            pass

    def __del__(self) -> None:
        if hasattr(self, "_request"):
            self._request.cancelled = True  # means nothing for a request that is over

    @property
    def result(self) -> Result | None:
        """The outcome once the request is over, however it ended; None before."""
        return self._request.result() if self._request.over else None


def _hand_over(loop: asyncio.AbstractEventLoop, chunks: asyncio.Queue[Chunk], chunk: Chunk) -> None:
    loop.call_soon_threadsafe(chunks.put_nowait, chunk)
