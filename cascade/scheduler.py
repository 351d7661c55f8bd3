"""The batch of an engine: all its live requests, whoever made them, a round at a time."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from cascade.chain import Chain
from cascade.errors import DecodeError
from cascade.progress import LevelRow, Progress
from cascade.request import Request
from cascade.result import Chunk, Result
from cascade.stats import Ledger

if TYPE_CHECKING:
    from cascade.plugins import Plugins

log = logging.getLogger("cascade")


class Scheduler:
    """Runs rounds of the target over all live requests.

    Whoever waits for a request of its own runs rounds, and a round serves everybody: callers in several
    threads take turns, and while one runs a round, the others wait for what it brings them.

    Args:
        chain: the levels.
        plugins: make the observers of a request.
        clock: seconds, monotonic.
        max_batch: requests decoded at once; more wait their turn.
        check: verify every level's cache after every round.

    Attributes:
        live: the requests that are not over, by id.
    """

    def __init__(
        self, chain: Chain, plugins: Plugins, clock: Callable[[], float], max_batch: int, check: bool = False
    ) -> None:
        self.live: dict[int, Request] = {}
        self._chain, self._target = chain, chain.target
        self._plugins, self._clock, self._max_batch, self._check = plugins, clock, max_batch, check
        self._ledger = Ledger(chain)
        self._waiting: deque[Request] = deque()
        self._active: list[Request] = []
        self._turn = threading.Condition()
        self._runner: int | None = None  # the thread that runs a round
        self._served: list[Request] = []
        self._server: threading.Thread | None = None

    # -- what callers do -----------------------------------------------------------------------------

    def submit(self, requests: Sequence[Request]) -> None:
        """Adds requests to the batch, behind those that wait already."""
        self.live.update({request.id: request for request in requests})
        self._waiting.extend(requests)

    def run(self, requests: Sequence[Request]) -> list[Result]:
        """Decodes requests to their ends, and returns their results."""
        self.submit(requests)
        try:
            self.run_until(lambda: all(request.over for request in requests))
        finally:
            self.drop(requests)
        return [request.result() for request in requests]

    def run_until(self, done: Callable[[], object]) -> None:
        """Runs rounds, or waits for those that another thread runs, until `done`."""
        while self._take_turn(done):
            try:
                self._round()
            finally:
                self._pass_turn()

    def drop(self, requests: Sequence[Request]) -> None:
        """Ends those of the requests that are not over, and frees what is kept of them."""
        left = [request for request in requests if not request.over]
        for request in left:
            request.cancelled = True
        # Called from inside a round, by an observer or the garbage collector: the next round ends them.
        if left and self._runner != threading.get_ident() and self._take_turn(lambda: all(r.over for r in left)):
            try:
                self._sweep()
            finally:
                self._pass_turn()

    def serve(self, request: Request) -> None:
        """Runs rounds in a thread of the scheduler's own until the request is over: nobody has to wait for it."""
        with self._turn:
            self._served.append(request)
            if self._server is None:
                self._server = threading.Thread(target=self._run_served, name="cascade", daemon=True)
                self._server.start()

    def check_integrity(self) -> None:
        """Raises AssertionError unless every level's cache is a prefix of its request's tokens."""
        for request in list(self.live.values()):
            for level in self._chain.levels:
                row = level.rows.get(request.id)
                if row is not None:
                    row.cache.check(request.context.tokens)
                    assert row.cache.length <= request.length - 1, f"{level.name} caches past the last token"

    # -- turns ---------------------------------------------------------------------------------------

    def _take_turn(self, done: Callable[[], object]) -> bool:
        """Waits until no round is running and makes the turn this thread's; False if `done` came first."""
        with self._turn:
            if self._runner == threading.get_ident():
                raise DecodeError("an engine was called from inside one of its own rounds: wait until that is over")
            self._turn.wait_for(lambda: self._runner is None or done())
            if done():
                return False
            self._runner = threading.get_ident()
            return True

    def _pass_turn(self) -> None:
        with self._turn:
            self._runner = None
            self._turn.notify_all()

    def _run_served(self) -> None:
        while True:
            with self._turn:
                self._served = [request for request in self._served if not request.over]
                if not self._served:
                    self._server = None
                    return
            first = self._served[0]
            try:
                self.run_until(lambda request=first: request.over)  # type: ignore[misc]
            except BaseException as error:  # nobody else could tell who waits
                log.exception("a round failed")
                served = list(self._served)
                for request in served:
                    request.refuse(error)
                try:
                    self.drop(served)
                except BaseException:  # what is not over yet is dropped in the next round
                    log.exception("a request could not be ended")

    # -- a round -------------------------------------------------------------------------------------

    def _round(self) -> None:
        """Ends what was cancelled, starts what waits, and lets the target advance once."""
        self._sweep()
        self._admit()
        if self._active:
            try:
                self._step(list(self._active))
            except BaseException as error:
                for request in self._active:
                    request.broken_off(error)
                raise
            finally:
                self._active = [request for request in self._active if not request.over]

    def _sweep(self) -> None:
        """Ends the cancelled requests."""
        for request in [request for request in list(self._waiting) if request.cancelled]:
            self._waiting.remove(request)  # not a new queue: another thread may be adding to this one
            self._end(request, "cancelled")
        for request in [request for request in self._active if request.cancelled]:
            self._active.remove(request)
            self._end(request, "cancelled")

    def _admit(self) -> None:
        """Starts the next requests; a sample waits until its prompt's first sample has been prefilled."""
        for request in list(self._waiting):
            if len(self._active) >= self._max_batch:
                break
            parent = request.parent
            if parent is not None and not (parent.rounds or parent.over):
                continue
            self._waiting.remove(request)
            request.began = self._clock()
            try:
                self._start(request)
            except BaseException as error:
                if not request.over:
                    request.refuse(error)
                    self._end(request, "error")
                if not isinstance(error, Exception):
                    raise

    def _start(self, request: Request) -> None:
        request.observers = self._plugins.observers(request)
        if request.refused is not None or request.remaining <= 0:
            self._end(request, "length")
            return
        self._give_caches(request)
        self._target.start(request.id, request.params)
        self._active.append(request)

    def _give_caches(self, request: Request) -> None:
        """Caches that the request begins with: its session's, or copies of the ones of its prompt's first sample."""
        for level in self._chain.levels:
            cache = (request.inherited if request.kept is None else request.kept).pop(level.name, None)
            if request.parent is not None and request.parent.id in level.rows:
                cache = level.rows[request.parent.id].cache.fork()
            if cache is not None:
                level.rows[request.id] = LevelRow(cache)

    def _step(self, rows: Sequence[Request]) -> None:
        """One round of the target for all rows: advance, commit, settle, then tell whoever follows."""
        before = [self._ledger.snapshot(request.id) if request.observers else None for request in rows]
        began, model_seconds = self._clock(), self._model_seconds()
        progress = self._target.advance([request.ask() for request in rows])
        chunks = [self._commit(request, row) for request, row in zip(rows, progress, strict=True)]
        if self._check:
            self.check_integrity()
        now = self._clock()
        own_work = now - began - (self._model_seconds() - model_seconds)
        for request, chunk, snapshot in zip(rows, chunks, before, strict=True):
            request.note_round(now, own_work)
            if snapshot is not None:
                self._tell(request, "on_round", self._ledger.round(request, chunk, snapshot, len(rows), now - began))
            try:
                if request.finish_reason is not None:
                    self._finish(request)
            finally:
                self._deliver(request, chunk)

    def _commit(self, request: Request, row: Progress) -> Chunk:
        """Appends what the target decided and lets every level know, whether it proposed or not."""
        chunk = request.commit(row.tokens, row.origins, row.logprobs)
        if row.error is not None and request.finish_reason is None:
            request.fail(row.error)
            chunk = request.close("error")
        self._target.settle(request.context, request.length - len(request.prompt))
        for governor in self._chain.governors:
            for _, verdict in row.verdicts:
                governor.tell(request.id, verdict)
        return chunk

    def _end(self, request: Request, reason: str) -> None:
        """Ends a request outside of its rounds; one that is refused, with its error."""
        chunk = request.close(reason)
        try:
            self._finish(request)
        finally:
            self._deliver(request, chunk)

    def _finish(self, request: Request) -> None:
        """Freezes a finished request's figures and frees what levels kept of it; a session takes its caches."""
        request.ended = self._clock()
        request.stats = self._ledger.stats(request)
        self.live.pop(request.id, None)
        self._bequeath(request)
        if request.kept is not None:
            for level in self._chain.levels:
                if request.id in level.rows:
                    request.kept[level.name] = level.rows[request.id].cache
                    level.rows[request.id].cache.sync(request.context.tokens)  # a round may have been broken off
        self._target.end(request.id)
        self._tell(request, "on_end", request.stats)

    def _bequeath(self, request: Request) -> None:
        """Of the prompt's samples that still wait, the first gets the caches, and the others wait for it."""
        heir: Request | None = None
        for other in [one for one in list(self._waiting) if one.parent is request and not one.cancelled]:
            other.parent = heir
            if heir is None:
                heir, heir.inherited = other, request.inherited
                for level in self._chain.levels:
                    if request.id in level.rows:
                        cache = level.rows[request.id].cache
                        heir.inherited[level.name] = cache if request.kept is None else cache.fork()
        request.inherited = {}

    @staticmethod
    def _deliver(request: Request, chunk: Chunk) -> None:
        request.handed_over(chunk)
        if request.deliver is not None:
            try:
                request.deliver(chunk)
            except Exception as error:  # an event loop that was closed: nobody is there any more
                log.warning("a stream was abandoned: %s: %s", type(error).__name__, error)
                request.deliver, request.cancelled = None, True

    @staticmethod
    def _tell(request: Request, what: str, record: Any) -> None:
        """Tells observers; one that raises is told no more, and costs the request nothing."""
        for observer in request.observers:
            try:
                getattr(observer, what)(record)
            except Exception as error:
                log.warning("an observer failed and is dropped: %s: %s", type(error).__name__, error)
                request.observers = tuple(other for other in request.observers if other is not observer)

    def _model_seconds(self) -> float:
        return sum(level.forward_seconds for level in self._chain.levels)
