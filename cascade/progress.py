"""What a level keeps of a row: while it is asked, and for as long as the request lives."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from cascade.draft import Ask, Context, Verdict
from cascade.governed import Proposal

if TYPE_CHECKING:
    import torch

    from cascade.rows import Row
    from cascade.sampling import Sampler
    from cascade.walk import Dice


@dataclass(slots=True)
class Progress:
    """How far one ask has come within one call of `Level.advance`.

    Attributes:
        context: the ask's context with the tokens held so far appended.
        tokens, origins: what is held, and the level that first proposed each token.
        logprobs: per token, where the request asks for them (target only).
        verdicts: how each draft fared, with the proposal it came from.
        chances: how sure this level was of each token, if it was asked: its best token's probability, which for
            sampled rows says more than the token's own.
        confidence: by these, the chance that all tokens held are its verifier's too.
        lines: the logits [V] of each token, where siblings may be added to it.
        q: what each token was drawn from [V], if whoever asks needs it.
        ended: the text is over, or this level cannot continue it.
        error: why the row failed.
    """

    ask: Ask
    context: Context
    tokens: list[int] = field(default_factory=list)
    origins: list[int] = field(default_factory=list)
    logprobs: list[dict[int, float]] = field(default_factory=list)
    verdicts: list[tuple[Proposal, Verdict]] = field(default_factory=list)
    chances: list[float] = field(default_factory=list)
    confidence: float = 1.0
    lines: list[torch.Tensor] = field(default_factory=list)
    q: list[torch.Tensor] = field(default_factory=list)
    ended: bool = False
    error: Exception | None = None

    @property
    def room(self) -> int:
        """How many more tokens the asker can use."""
        return self.ask.cap - len(self.tokens)

    @property
    def wants(self) -> bool:
        """Whether the row stays in the loop: it leaves on want, cap, doubt, end or error, each on its own."""
        enough = len(self.tokens) >= max(self.ask.want, 1) or self.confidence < self.ask.floor
        return not self.ended and not enough and self.room > 0


@dataclass(slots=True)
class LevelRow:
    """What a level keeps of one request: its cache, its sampler, its dice and its counters."""

    cache: Row
    sampler: Sampler | None = None
    dice: Dice | None = None
    forwards: int = 0
    tokens_fed: int = 0
    seconds: float = 0.0
