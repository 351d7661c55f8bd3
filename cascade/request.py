"""A request: what it owns while it runs."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from cascade.config import SamplingParams
from cascade.draft import Ask, Context, Tokens
from cascade.errors import cause_of
from cascade.noise import Noise
from cascade.result import Chunk, Result, Stats
from cascade.text import TextStream

if TYPE_CHECKING:
    from cascade.rows import Row


@dataclass(eq=False)
class Request:
    """A request's own state. Levels keep its caches, governors its control state, under `id`.

    Attributes:
        params: its parameters, with processors and criteria of its own (`SamplingParams.for_request`).
        limit: at most this many tokens in all.
        parent: sample 0 of the same prompt, whose prefill this one shares.
        kept: a session's caches by level: the request begins with them, and leaves its own there.
        inherited: caches by level that it begins with, of a sample of the same prompt that has ended.
        refused: why it cannot run, or not go on: it ends with this error.
        deliver: takes its chunks, in order; None where nobody follows it.
        buffer: int64, the prompt, then committed tokens, then room for tentative ones.
        length: committed tokens, prompt included.
    """

    id: int
    prompt: Sequence[int]
    params: SamplingParams
    seed: int
    end_ids: frozenset[int]
    limit: int
    decode: Callable[[Sequence[int]], str] | None = None
    parent: Request | None = None
    kept: dict[str, Row] | None = None
    inherited: dict[str, Row] = field(default_factory=dict)
    refused: str | None = None
    deliver: Callable[[Chunk], None] | None = None
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
        self.params = self.params.for_request()
        self.noise = Noise(self.seed)
        self.text = None if self.decode is None else TextStream(self.decode, self.params.stop)
        self._handed = self._shown = 0  # tokens and characters that whoever follows has had
        self._touched = False  # by a round that has not been handed over yet
        self._judged: deque[tuple[int, bool]] = deque()  # tokens about to be committed, and whether one is the last
        self._failure: Exception | None = None  # of a criterion or the tokenizer

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

    @property
    def over(self) -> bool:
        """Whether the request has ended, its figures are frozen and its caches freed."""
        return self.stats is not None

    def ask(self) -> Ask:
        """What the engine asks the target for in a round: at least one token."""
        # The walk must stop where a stop string is complete, or processors would run past the text's end.
        own_ends = bool(self.params.stop or self.params.stopping_criteria)
        ends = self._judge if own_ends else None
        return Ask(self.context, 1, self.remaining, self.params, self.noise, len(self.prompt), ends)

    def commit(self, tokens: Iterable[int], origins: Sequence[int], logprobs: Sequence[dict[int, float]]) -> Chunk:
        """Appends tokens one by one until one of them ends the text; returns what is new.

        A stopping criterion that raises ends the request with its error, and the token that it was asked about.
        """
        self._touched, before = True, self.length
        for token in tokens:
            over = self._ends_with(token)
            self._append(token)
            if over:
                self.finish_reason = "stop"
                break
        if self._failure is not None:
            self.fail(self._failure)
        if self.finish_reason is None and self.remaining <= 0:
            self.finish_reason = "length"
        self.origins += origins[: self.length - before]
        self.logprobs += logprobs[: self.length - before]
        return self._chunk()

    def _chunk(self) -> Chunk:
        """What has not been handed over yet."""
        piece = self._piece()
        tokens = self.buffer[len(self.prompt) + self._handed : self.length].tolist()
        return Chunk(piece, tuple(tokens), tuple(self.origins[self._handed :]), self.finish_reason, self.id)

    def handed_over(self, chunk: Chunk) -> None:
        """Whoever follows the request, if anybody, has this."""
        self._handed += len(chunk.tokens)
        self._shown += len(chunk.text)
        self._touched = False

    def _append(self, token: int) -> None:
        if self.length == len(self.buffer):
            self.buffer = np.concatenate([self.buffer, np.zeros(len(self.buffer), np.int64)])
        self.buffer[self.length] = token
        self.length += 1

    def _ends_with(self, token: int) -> bool:
        """Whether this next token ends the text, for whatever reason."""
        held = self.length + 1 - len(self.prompt) < self.params.min_new_tokens
        if not self._judged:
            self._judge(token)
        judged, over = self._judged.popleft()
        assert judged == token, "a token is committed that was not walked"
        return over or (token in self.end_ids and not held)

    def _judge(self, token: int) -> bool:
        """Whether a stop string or criterion ends the text with this token: asked once per token, in order.

        The walk asks about accepted tokens before they are committed; `commit` asks about the rest.
        """
        self._touched, over = True, False
        try:
            over = self._meets_criterion(token) if self.params.stopping_criteria else False
        except Exception as error:
            self._failure, over = error, True
        try:
            over |= self.text is not None and self.text.push(token)
        except Exception as error:
            self._failure, over = error, True
            self._give_up_text()
        self._judged.append((token, over))
        return over

    def _meets_criterion(self, token: int) -> bool:
        ahead = [*(earlier for earlier, _ in self._judged), token]
        ids = torch.from_numpy(np.concatenate([self.buffer[: self.length], ahead]))[None]
        verdicts = [criterion(ids, None) for criterion in self.params.stopping_criteria]  # all of them: some count
        return any(bool(v.all()) if isinstance(v, torch.Tensor) else bool(v) for v in verdicts)

    def _piece(self) -> str:
        """The text that is safe to show and has not been handed over."""
        if self.text is None:
            return ""
        end = len(self._whole_text()) if self.finish_reason else self.text.safe
        return self.text.text[self._shown : end]

    def _whole_text(self) -> str:
        if self.text is None:
            return ""
        try:
            return self.text.finish()
        except Exception as error:
            self._give_up_text()
            self.fail(error)
            return self.text.text

    def _give_up_text(self) -> None:
        """The tokenizer failed: what it has decoded so far is the text."""
        if self.text is not None:
            self.text.stopped = True

    def broken_off(self, error: BaseException) -> None:
        """A round of the request was broken off: it ends unless it is as it was before that round.

        Tokens may have been judged and not committed, committed and not handed over, or shown to processors that
        keep a state.
        """
        if self.finish_reason is not None:
            self.cancelled = True
        elif self._touched or self.params.logits_processors:
            self.refuse(error)

    def refuse(self, error: BaseException) -> None:
        """Ends the request with this error when the next round begins, or as soon as it would begin itself."""
        self.refused, self.cancelled = cause_of(error), True

    def fail(self, error: BaseException) -> None:
        """Notes what the request failed of, in one line."""
        self.finish_reason = "error"
        self.error = cause_of(error)

    def close(self, reason: str) -> Chunk:
        """Ends the request, for this reason unless it has one; returns the last chunk."""
        if self.refused is not None and self.finish_reason is None:
            self.finish_reason, self.error = "error", self.refused
        self.finish_reason = self.finish_reason or reason
        return self._chunk()

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
            text=self._whole_text(),
            finish_reason=self.finish_reason or "cancelled",
            stats=self.stats,
            origins=self.origins,
            logprobs=self.logprobs if self.params.logprobs is not None else None,
            error=self.error,
        )
