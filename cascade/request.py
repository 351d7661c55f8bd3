"""A request: what it owns while it runs, and what its user gets of it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from cascade.config import SamplingParams
from cascade.draft import Ask, Context, Tokens
from cascade.noise import Noise
from cascade.text import TextStream


@dataclass(frozen=True)
class LevelStats:
    """One level's part in one request; the last level is the target.

    Attributes:
        name: the level's.
        drafted, tested, accepted: of what it handed up to whoever verified it (0 for the target).
        accept_rate: accepted / drafted, None when nothing was drafted.
        alpha: accepted / tested, None when nothing was tested.
        forwards, tokens_fed: of its own model; 0 for a drafter without one.
        time_s: its share of its own forwards, or of its proposals where it has no model.
        k_mean: mean K of its proposals: what the controller chose. A model that stops when in doubt is asked
            for more, and hands up what it is sure of.
        bypassed_rounds: how often it was asked and passed the question on.
        asks: how often it was asked: once a round, but for levels under another one.
        proposals: how many of its proposals were judged.
        dropped: proposals that failed or broke the contract.
        decisions: (round, what, reason) whenever its governor changed its mind. `what` is "wait" (a
            model whose prompt is not worth prefilling yet), "propose", "bypass" or "off".
    """

    name: str
    drafted: int
    tested: int
    accepted: int
    accept_rate: float | None
    alpha: float | None
    forwards: int
    tokens_fed: int
    time_s: float
    k_mean: float | None
    bypassed_rounds: int
    asks: int = 0
    proposals: int = 0
    dropped: int = 0
    decisions: tuple[tuple[int, str, str], ...] = ()


@dataclass(frozen=True)
class Stats:
    """What one request took.

    Attributes:
        new_tokens: tokens generated.
        target_forwards: rounds of the target; the prompt counts as one, however chunked.
        tokens_per_forward: tau, the target's own token included.
        wall_s, first_token_s: seconds from the request's admission.
        own_work_s: its rounds' wall time outside of model forwards, shared by the batch.
        levels: bottom to top.
    """

    new_tokens: int
    target_forwards: int
    tokens_per_forward: float
    wall_s: float
    first_token_s: float | None
    own_work_s: float
    levels: tuple[LevelStats, ...]

    def as_dict(self) -> dict[str, Any]:
        """Plain dicts, lists and numbers."""
        return asdict(self)


@dataclass(frozen=True)
class Chunk:
    """What one round added to a stream.

    `text` joins over the chunks to the result's text; it can be empty while a character or a possible
    stop string is incomplete. `request_id` is what `engine.cancel` takes.
    """

    text: str
    tokens: tuple[int, ...]
    origins: tuple[int, ...]
    finish_reason: str | None = None
    request_id: int = -1


@dataclass(frozen=True)
class Result:
    """The outcome of one request.

    Attributes:
        tokens: generated ids; ends with the end token, or the token that completed a stop string.
        text: cut before the stop string, special tokens skipped; empty without a tokenizer.
        finish_reason: "stop", "length", "cancelled" or "error".
        error: one line, if it failed.
        logprobs: per token {id: logprob}, where asked for.
        origins: per token the index of the level that first proposed it.
        stats: what it took.
    """

    tokens: list[int]
    text: str
    finish_reason: str
    stats: Stats
    origins: list[int]
    logprobs: list[dict[int, float]] | None = None
    error: str | None = None


@dataclass
class Request:
    """A request's own state. Levels keep its caches, governors its control state, under `id`.

    Attributes:
        buffer: int64, the prompt, then committed tokens, then room for tentative ones.
        length: committed tokens, prompt included.
        limit: at most this many tokens in all.
    """

    id: int
    prompt: Sequence[int]
    params: SamplingParams
    seed: int
    end_ids: frozenset[int]
    limit: int
    decode: Callable[[Sequence[int]], str] | None = None
    parent: Request | None = None  # sample 0 of the same prompt, whose prefill this one shares
    observers: tuple[Any, ...] = ()
    finish_reason: str | None = None
    error: str | None = None
    cancelled: bool = False
    rounds: int = 0
    began: float = 0.0
    first_token: float | None = None
    ended: float = 0.0
    own_work: float = 0.0
    origins: list[int] = field(default_factory=list)
    logprobs: list[dict[int, float]] = field(default_factory=list)
    stats: Stats | None = None

    def __post_init__(self) -> None:
        room = min(self.limit, len(self.prompt) + 4096)  # grows beyond, see `commit`
        self.buffer: Tokens = np.zeros(room + 1, np.int64)
        self.length = len(self.prompt)
        self.buffer[: self.length] = self.prompt
        self.noise = Noise(self.seed)
        self.text = None if self.decode is None else TextStream(self.decode, self.params.stop)
        self._shown = 0

    @property
    def context(self) -> Context:
        """The committed tokens, as levels see them."""
        return Context.over(self.id, self.buffer, self.length, self.length)

    @property
    def tokens(self) -> list[int]:
        """The generated ids."""
        out: list[int] = self.buffer[len(self.prompt) : self.length].tolist()
        return out

    @property
    def remaining(self) -> int:
        """How many tokens may still come."""
        return self.limit - self.length

    def ask(self) -> Ask:
        """What the engine asks the target for in a round: at least one token."""
        # The walk must stop where a stop string is complete, or processors would run past the text's end.
        ends = copy.deepcopy(self.text).push if self.text is not None and self.params.stop else None
        return Ask(self.context, 1, self.remaining, self.params, self.noise, len(self.prompt), ends)

    def commit(self, tokens: Iterable[int], origins: Sequence[int], logprobs: Sequence[dict[int, float]]) -> Chunk:
        """Appends tokens one by one until one of them ends the text; returns what was added."""
        added: list[int] = []
        for token in tokens:
            self._append(token)
            added.append(token)
            if self._stops_at(token):
                self.finish_reason = "stop"
                break
        if self.finish_reason is None and self.remaining <= 0:
            self.finish_reason = "length"
        self.origins += origins[: len(added)]
        self.logprobs += logprobs[: len(added)]
        return Chunk(self._piece(), tuple(added), tuple(origins[: len(added)]), self.finish_reason, self.id)

    def _append(self, token: int) -> None:
        if self.length == len(self.buffer):
            self.buffer = np.concatenate([self.buffer, np.zeros(len(self.buffer), np.int64)])
        self.buffer[self.length] = token
        self.length += 1

    def _stops_at(self, token: int) -> bool:
        """Whether this token ends the text: an end id, or the token that completes a stop string."""
        held = self.length - len(self.prompt) < self.params.min_new_tokens
        found = self.text is not None and self.text.push(token)
        return found or (token in self.end_ids and not held)

    def _piece(self) -> str:
        """The text that became safe to show since the last call."""
        if self.text is None:
            return ""
        end = len(self.text.finish()) if self.finish_reason else self.text.safe
        piece = self.text.text[self._shown : end]
        self._shown = max(end, self._shown)
        return piece

    def close(self, reason: str, error: str | None = None) -> Chunk:
        """Ends the request early, with a reason; returns the last chunk."""
        self.finish_reason = reason
        self.error = None if error is None else " ".join(error.split())
        return Chunk(self._piece(), (), (), reason, self.id)

    def note_round(self, now: float, own_work: float) -> None:
        """A round is over at time `now`, of which `own_work` seconds were not model forwards."""
        self.rounds += 1
        self.own_work += own_work
        if self.first_token is None:
            self.first_token = now

    def result(self) -> Result:
        """What the user gets."""
        assert self.stats is not None
        return Result(
            tokens=self.tokens,
            text="" if self.text is None else self.text.finish(),
            finish_reason=self.finish_reason or "cancelled",
            stats=self.stats,
            origins=self.origins,
            logprobs=self.logprobs if self.params.logprobs is not None else None,
            error=self.error,
        )


class Stream:
    """A request as it goes on: iterate over its `Chunk`s, close it to end it early.

    Attributes:
        request_id: what `engine.cancel` takes.
    """

    def __init__(self, request: Request, rounds: Generator[tuple[Request, Chunk], None, None]) -> None:
        self.request_id = request.id
        self._request = request
        self._rounds = rounds

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> Chunk:
        return next(self._rounds)[1]

    def close(self) -> None:
        """Ends the request where it is and frees what levels keep of it; harmless when it is over."""
        self._rounds.close()

    @property
    def result(self) -> Result | None:
        """The outcome once the request is over, however it ended; None before."""
        return self._request.result() if self._request.stats is not None else None
