"""The engine: requests in, the target's own text out, a round at a time."""

from __future__ import annotations

import itertools
import logging
import random
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from cascade.build import build_levels
from cascade.config import CascadeConfig, SamplingParams
from cascade.costs import CostModel, Costs
from cascade.errors import ConfigError, PromptError, did_you_mean
from cascade.governor import Governor
from cascade.level import Level, Progress
from cascade.noise import sample_seed
from cascade.noise import warm_up as warm_up_noise
from cascade.prompts import encode
from cascade.request import Chunk, Request, Stream
from cascade.stats import Ledger

if TYPE_CHECKING:
    from cascade.plugins import Plugins

log = logging.getLogger("cascade")

Prompt = Any  # str | list[int] | list[dict[str, Any]]


class Engine:
    """Decodes prompts through a cascade.

    An engine serves one caller at a time: use it from one thread, or guard it with a lock. Several
    prompts decode together as one batch; `cancel` may be called from any thread.

    Args:
        config: the cascade.
        plugins: a plugin manager made by `cascade.plugins.create`; by default one with the built-ins,
            the installed plugins and `config.plugins`.
        clock: seconds, monotonic; costs: a cost model. Both injectable for tests and simulation.
        check: verify every level's cache after every round.
        progress: called with a line of text while models load.

    Raises:
        CascadeError: for whatever a user can have got wrong; nothing is loaded half.
    """

    def __init__(
        self,
        config: CascadeConfig,
        *,
        plugins: Plugins | None = None,
        clock: Callable[[], float] = time.perf_counter,
        costs: Costs | None = None,
        check: bool = False,
        progress: Callable[[str], None] | None = None,
    ) -> None:
        from cascade import plugins as plugin_module

        if not isinstance(config, CascadeConfig):
            raise ConfigError(f"Engine takes a CascadeConfig, not {type(config).__name__}: use load_config for a file")
        self.config = config
        self.plugins = plugin_module.create(*config.plugins) if plugins is None else plugins
        self.clock = clock
        self.costs = CostModel() if costs is None else costs
        self.check = check
        self.target: Level = build_levels(config, self.plugins, self.costs, clock, progress)
        self.model = self.target.model
        limits = [limit for limit in (config.max_length, self.model.max_length) if limit is not None]
        self.max_length = min(limits, default=None)
        self._ids = itertools.count()
        self._seeds = random.Random(config.seed)
        self._live: dict[int, Request] = {}
        self._ledger = Ledger(self.target)
        if costs is None:
            if progress:
                progress("measuring")
            self._warm_up()

    # -- what users call -----------------------------------------------------------------------------

    def generate(self, prompt: Prompt, params: Any = None) -> Any:
        """Decodes one prompt, or a list of prompts as one batch.

        Args:
            prompt: a str, token ids, chat messages, or a list of those.
            params: SamplingParams, or one per prompt.

        Returns:
            A `Result` for one prompt with n = 1; otherwise a flat list, prompts in order and samples
            of one prompt adjacent.
        """
        single = not self._is_batch(prompt)
        prompts = [prompt] if single else list(prompt)
        requests = self._requests(prompts, params)
        for _ in self._run(requests):
            pass
        results = [request.result() for request in requests]
        return results[0] if single and len(results) == 1 else results

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Stream:
        """A request to iterate over: a `Chunk` per round. Closing it ends it and frees its caches.

        Raises:
            ConfigError, PromptError: at once, not at the first chunk.
        """
        requests = self._requests([prompt], params)
        if len(requests) != 1:
            raise ConfigError("stream() follows one sample: use n=1, or generate() for several")
        return Stream(requests[0], self._run(requests))

    def cancel(self, request_id: int) -> None:
        """Ends a request at its next round; one that is already over stays as it is."""
        request = self._live.get(request_id)
        if request is not None:
            request.cancelled = True

    @property
    def level_names(self) -> tuple[str, ...]:
        """The levels bottom to top, the target last: what `origins` index."""
        return (*(governor.name for governor in reversed(list(self.governors()))), self.target.name)

    def summary(self) -> str:
        """The levels, their models, dtypes and what the load-time probes found, a line each."""
        lines = [f"rule {self.config.rule}" + ("" if self.target.rule.lossless else " (NOT lossless)")]
        for level in self._levels():
            model, role = level.model, "target" if level.is_target else "level"
            trees = "yes" if model.trees else "no"
            lines.append(f"{role} {level.name}: {model.dtype}, bit-exact: {model.exactness}, trees: {trees}")
        for governor in self.governors():
            if not isinstance(governor.drafter, Level):
                lines.append(f"level {governor.name}: {type(governor.drafter).__name__}")
            if governor.config.k == 0:
                lines.append(f"level {governor.name} is off: k=0")
        return "\n".join(reversed(lines))

    def check_integrity(self) -> None:
        """Raises AssertionError unless every level's cache is a prefix of its request's tokens."""
        for request in self._live.values():
            for level in self._levels():
                row = level.rows.get(request.id)
                if row is not None:
                    row.cache.check(request.context.tokens)
                    assert row.cache.length <= request.length - 1, f"{level.name} caches past the last token"

    def close(self) -> None:
        """Frees the models' caches and gives model objects back as they were."""
        for request in list(self._live.values()):
            if request.finish_reason is None:
                self._finish(request, request.close("cancelled"))
        for level in self._levels():
            level.rows.clear()
            close = getattr(level.model, "close", None)
            if close is not None:
                close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # -- from prompts to requests --------------------------------------------------------------------

    @staticmethod
    def _is_batch(prompt: Prompt) -> bool:
        """A list of prompts, as opposed to one prompt that is a list of ids or of messages."""
        return isinstance(prompt, (list, tuple)) and bool(prompt) and isinstance(prompt[0], (str, list, tuple))

    def _requests(self, prompts: Sequence[Prompt], params: Any) -> list[Request]:
        many = list(params) if isinstance(params, (list, tuple)) else [params] * len(prompts)
        if len(many) != len(prompts):
            raise ConfigError(f"{len(prompts)} prompts but {len(many)} SamplingParams: give one, or one per prompt")
        for one in many:
            if one is not None and not isinstance(one, SamplingParams):
                raise ConfigError(f"params must be SamplingParams, not {one!r:.60}")
        encoded = [self._encode(prompt) for prompt in prompts]  # all are checked before a seed is drawn
        return [
            request
            for ids, one in zip(encoded, many, strict=True)
            for request in self._samples(ids, one or SamplingParams())
        ]

    def _samples(self, ids: list[int], params: SamplingParams) -> list[Request]:
        """The n requests of one prompt; unseeded ones get fresh seeds."""
        names = self.level_names
        for name in params.levels or ():
            if name not in names:
                raise ConfigError(f"no level is named {name!r}.{did_you_mean(name, names)}")
        decode = getattr(self.model, "decode", None) if getattr(self.model, "tokenizer", None) is not None else None
        if params.stop and decode is None:
            raise ConfigError("stop strings need a tokenizer, and this target has none: use stop_token_ids")
        limit = len(ids) + params.max_new_tokens
        if self.max_length is not None:
            limit = min(limit, self.max_length)
        ends = params.ends(self.model.end_ids)
        seed = self._seeds.getrandbits(64) if params.seed is None else params.seed
        samples: list[Request] = []
        for i in range(params.n):
            parent = samples[0] if samples else None
            samples.append(Request(next(self._ids), ids, params, sample_seed(seed, i), ends, limit, decode, parent))
        return samples

    def _encode(self, prompt: Prompt) -> list[int]:
        """Ids of a prompt, checked. Raises PromptError."""
        own = getattr(self.model, "encode", None)
        ids = own(prompt) if own is not None else encode(None, prompt, self.target.name)
        if not ids:
            raise PromptError("the prompt is empty: give at least one token")
        bad = next((t for t in ids if not 0 <= t < self.model.vocab_size), None)
        if bad is not None:
            raise PromptError(f"the prompt has token id {bad}, outside the vocabulary of {self.model.vocab_size}")
        if self.max_length is not None and len(ids) > self.max_length:
            raise PromptError(f"the prompt has {len(ids)} tokens, and the context holds {self.max_length}: shorten it")
        return ids

    # -- the run -------------------------------------------------------------------------------------

    def _run(self, requests: Sequence[Request]) -> Generator[tuple[Request, Chunk], None, None]:
        """Rounds until every request is over; yields what each round added, request by request."""
        waiting = deque(requests)
        active: list[Request] = []
        self._live.update({request.id: request for request in requests})
        try:
            while waiting or active:
                yield from self._admit(waiting, active)
                if active:
                    yield from self._step(active)
                active = [request for request in active if request.finish_reason is None]
        finally:
            for request in [*active, *waiting]:
                if request.finish_reason is None:
                    self._finish(request, request.close("cancelled"))

    def _admit(self, waiting: deque[Request], active: list[Request]) -> list[tuple[Request, Chunk]]:
        """Starts the next requests; a sample waits until its prompt's first sample has been prefilled."""
        over = []
        for request in list(waiting):
            if len(active) >= self.config.max_batch:
                break
            if request.parent is not None and not (request.parent.rounds or request.parent.finish_reason):
                continue
            waiting.remove(request)
            request.began = self.clock()
            request.observers = self.plugins.observers(request)
            if request.remaining <= 0 or request.cancelled:
                reason = "cancelled" if request.cancelled else "length"
                over.append((request, self._finish(request, request.close(reason))))
                continue
            active.append(request)  # before anything is kept for it, so that whatever fails frees it
            if request.parent is not None:
                self.target.fork(request.parent.id, request.id)
            self.target.start(request.id, request.params)
        return over

    def _step(self, active: Sequence[Request]) -> list[tuple[Request, Chunk]]:
        """One round of the target for all active rows: advance, commit, settle, then tell observers."""
        done = [(r, self._finish(r, r.close("cancelled"))) for r in active if r.cancelled]
        rows = [request for request in active if request.finish_reason is None]
        if not rows:
            return done
        before = [self._ledger.snapshot(request.id) if request.observers else None for request in rows]
        began, model_seconds = self.clock(), self._model_seconds()
        progress = self.target.advance([request.ask() for request in rows])
        chunks = [self._commit(request, row) for request, row in zip(rows, progress, strict=True)]
        if self.check:
            self.check_integrity()
        now = self.clock()
        own_work = now - began - (self._model_seconds() - model_seconds)
        for request, chunk, snapshot in zip(rows, chunks, before, strict=True):
            request.note_round(now, own_work)
            if snapshot is not None:
                self._tell(request, "on_round", self._ledger.round(request, chunk, snapshot, len(rows), now - began))
            done.append((request, self._finish(request, chunk) if request.finish_reason else chunk))
        return done

    def _commit(self, request: Request, row: Progress) -> Chunk:
        """Appends what the target decided and lets every level know, whether it proposed or not."""
        chunk = request.commit(row.tokens, row.origins, row.logprobs)
        if row.error is not None and request.finish_reason is None:
            end = request.close("error", f"{type(row.error).__name__}: {row.error}")
            chunk = replace(chunk, text=chunk.text + end.text, finish_reason=end.finish_reason)
        self.target.settle(request.context, request.length - len(request.prompt))
        for governor in self.governors():
            for _, verdict in row.verdicts:
                governor.tell(request.id, verdict)
        return chunk

    def _finish(self, request: Request, chunk: Chunk) -> Chunk:
        """Freezes a finished request's figures and frees what levels kept of it."""
        request.ended = self.clock()
        request.stats = self._ledger.stats(request)
        self._live.pop(request.id, None)
        self.target.end(request.id)
        self._tell(request, "on_end", request.stats)
        return chunk

    @staticmethod
    def _tell(request: Request, what: str, record: Any) -> None:
        """Tells observers; one that raises is told no more, and costs the request nothing."""
        for observer in request.observers:
            try:
                getattr(observer, what)(record)
            except Exception as error:
                log.warning("an observer failed and is dropped: %s: %s", type(error).__name__, error)
                request.observers = tuple(other for other in request.observers if other is not observer)

    def _warm_up(self) -> None:
        """Compiles what is compiled and times what is timed, so that no request pays for it."""
        warm_up_noise()
        for governor in self.governors():
            getattr(governor.drafter, "warm_up", lambda: None)()
        self.target.warm_up()

    # -- the chain -----------------------------------------------------------------------------------

    def _levels(self) -> Iterator[Level]:
        """Levels with a model, the target first."""
        level: Level | None = self.target
        while level is not None:
            yield level
            below = level.source.drafter if level.source is not None else None
            level = below if isinstance(below, Level) else None

    def governors(self) -> Iterator[Governor]:
        """The governors, top to bottom."""
        governor = self.target.source
        while governor is not None:
            yield governor
            governor = governor.below

    def _model_seconds(self) -> float:
        return sum(level.forward_seconds for level in self._levels())
