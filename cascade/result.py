"""What a user gets of a request: its chunks while it runs, its result, and the figures of what it took."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


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
        members: of drafters that are merged at this level: (name, nodes proposed, nodes accepted), a node that several
            proposed counted for each.
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
    members: tuple[tuple[str, int, int], ...] = ()


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
        warning: a sentence, where speculation stayed under 1.5 tokens per forward for long enough to say so.
    """

    new_tokens: int
    target_forwards: int
    tokens_per_forward: float
    wall_s: float
    first_token_s: float | None
    own_work_s: float
    levels: tuple[LevelStats, ...]
    warning: str | None = None

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
