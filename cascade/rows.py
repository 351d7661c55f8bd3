"""What a level keeps of one request, and the model that fills it: the protocol of the model layer.

A model sees packed rows: one forward over `[1, sum of Q]` tokens, each row with its own cache and
length, no padding between them. `Row` is the part without tensors; toy models use it as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from cascade.draft import Tokens

if TYPE_CHECKING:
    import torch


class Row:
    """The ids that one level has cached of one request.

    Attributes:
        ids: int64 buffer; `ids[:length]` are cached.
        length: cached tokens. Between rounds 0 <= length <= L - 1 once synced: the last token of a
            context is always fed, since its logits are what decides the next one.
    """

    def __init__(self) -> None:
        self.ids: Tokens = np.zeros(256, np.int64)
        self.length = 0

    def sync(self, tokens: Tokens) -> int:
        """Crops to the common prefix of what is cached and `tokens[:-1]`; returns the new length.

        This is the only way anything is ever rewound: nobody is told about rejections.
        """
        n = min(self.length, len(tokens) - 1)
        differs = self.ids[:n] != tokens[:n]
        self.crop(int(differs.argmax()) if differs.any() else n)
        return self.length

    def crop(self, to: int) -> None:
        """Forgets everything from index `to` on; cropping to more than is cached changes nothing."""
        self.length = min(self.length, to)

    def append(self, tokens: Sequence[int]) -> None:
        """Notes that `tokens` are cached behind the rest; grows the buffers as needed."""
        end = self.length + len(tokens)
        if end > len(self.ids):
            grown = np.zeros(max(2 * len(self.ids), end), np.int64)
            grown[: self.length] = self.ids[: self.length]
            self.ids = grown
        self.ids[self.length : end] = tokens
        self.length = end

    def keep(self, base: int, path: Sequence[int]) -> None:
        """Keeps of the draft nodes cached from index `base` on only those in `path`, in that order."""
        kept = self.ids[base + np.asarray(path, np.int64)]
        self.ids[base : base + len(kept)] = kept
        self.length = base + len(kept)

    def fork(self) -> Row:
        """A copy that shares nothing: another sample of the same prompt starts from it."""
        other = type(self)()
        other.ids, other.length = self.ids.copy(), self.length
        return other

    def check(self, tokens: Tokens) -> None:
        """Raises AssertionError unless this row holds its invariants against the request's tokens."""
        n = self.length
        assert 0 <= n <= len(self.ids), f"row length {n} outside its buffer of {len(self.ids)}"
        common = min(n, len(tokens))
        assert (self.ids[:common] == tokens[:common]).all(), "cached ids differ from the context"


@dataclass(slots=True)
class Feed:
    """One row's part of a packed forward.

    Attributes:
        row: receives the keys and values; must be synced.
        tokens: the ids to feed, [Q]: context that is not cached yet, then draft nodes.
        keep: logits are wanted for the last `keep` of them.
        parents: for a tree: parent of each of the last `len(parents)` tokens, among themselves, -1
            for the end of the context. None: everything is one chain. There may be more parents than
            `tokens`: the first nodes are cached then, as the row's last ones, and `tokens` are the others.
    """

    row: Row
    tokens: Sequence[int]
    keep: int
    parents: Sequence[int] | None = None


@dataclass(slots=True)
class Scores:
    """What a forward says, a line for each position that was scored.

    Attributes:
        logits: [N, V].
        picks: the best token of each, None where the logits are no numbers; None unless a row is greedy.
        chances: the probability of the best token of each; None unless somebody asks how sure the model is.
        entropies: of each distribution, in nats; None unless somebody asks.
    """

    logits: torch.Tensor
    picks: Sequence[int | None] | None = None
    chances: Sequence[float] | None = None
    entropies: Sequence[float] | None = None

    @classmethod
    def of(cls, logits: torch.Tensor, *, greedy: bool, sure: bool, doubt: bool = False) -> Scores:
        """Reads off the logits what is needed, for all positions at once."""
        entropies = _entropies(logits) if doubt else None
        if not greedy and not sure:
            return cls(logits, entropies=entropies)
        best = logits.max(-1)
        bad = (~best.values.isfinite()).tolist()
        picks = [None if wrong else pick for pick, wrong in zip(best.indices.tolist(), bad, strict=True)]
        chances = (best.values.float() - logits.float().logsumexp(-1)).clamp(max=0).exp().tolist() if sure else None
        return cls(logits, picks if greedy else None, chances, entropies)

    def part(self, start: int, stop: int) -> Scores:
        """Those of some positions."""
        picks = None if self.picks is None else self.picks[start:stop]
        chances = None if self.chances is None else self.chances[start:stop]
        entropies = None if self.entropies is None else self.entropies[start:stop]
        return Scores(self.logits[start:stop], picks, chances, entropies)


def _entropies(logits: torch.Tensor) -> list[float]:
    logs = logits.float().log_softmax(-1)
    return (-(logs.exp() * logs.clamp(min=-1e4)).sum(-1)).tolist()  # impossible tokens add 0, not 0 * inf


class CausalModel(Protocol):
    """What a `Level` needs of a model. `cascade_load_model` plugins return an object like this.

    Attributes:
        vocab_size: ids at or above it are never proposed nor emitted (padded heads).
        max_length: positions the model can hold, or None.
        trees: whether a forward may carry a tree (`Feed.parents`).
        exactness: a sentence for `engine.summary()`: "yes, from width 2" or why not.
        end_ids: ids that end a text by the model's own configuration.
    """

    name: str
    dtype: str
    vocab_size: int
    max_length: int | None
    trees: bool
    exactness: str
    end_ids: tuple[int, ...]

    def new_row(self) -> Row:
        """An empty cache for one request."""
        ...

    def forward(self, feeds: Sequence[Feed]) -> torch.Tensor:
        """Feeds all rows at once; returns logits [sum of keep, vocab_size], rows in order.

        Each row then holds all the tokens it was fed, draft nodes included; the caller crops.
        """
        ...
