"""Feeds become packed forwards: prompts in pieces, rows by width, dummies up to the invariant width."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from cascade.attention import Span
from cascade.kvrows import KVRow, Layout
from cascade.rows import Feed

CHUNK = 512  # prompts are fed in pieces of at most this many tokens...
MASKED = 1 << 22  # ...and of fewer where a piece's mask, tokens by keys, would have more elements


class PackedModel:
    """What a model adapter shares whatever library computes: `CausalModel` but for `_compute`.

    Attributes:
        width: no forward is narrower; dummy tokens fill it.
        fine: whether attention may look at less than whole blocks of keys; see `padded_view`.
        by_path: whether a tree is attended to path by path, so that its nodes have plain decoding's bits; one
            path costs each layer one call. Trees must come whole and in depth-first order: others are
            attended to at once, with a mask.
    """

    vocab_size: int
    max_length: int | None
    layout: Layout
    width = 1
    fine = True
    by_path = False

    def new_row(self) -> KVRow:
        """An empty cache for one request."""
        return KVRow(self.layout)

    def forward(self, feeds: Sequence[Feed]) -> Tensor:
        """Feeds all rows at once; returns logits [sum of keep, vocab_size], rows in order.

        Each row then holds all the tokens it was fed, draft nodes included; the caller crops. Where
        the forward raises, rows hold what they held before, or whole pieces of their prompt more.
        """
        with torch.inference_mode():
            logits = self._score([self._last_piece(feed) for feed in feeds])
        return logits.clone()  # made outside of inference mode: an ordinary tensor

    def _last_piece(self, feed: Feed) -> Feed:
        """Feeds all but the last piece of a prompt."""
        nodes = 0 if feed.parents is None else len(feed.parents)
        tokens, needed = list(feed.tokens), max(feed.keep, nodes, 1)
        while len(tokens) > needed:
            piece = max(64, min(CHUNK, MASKED // (feed.row.length + CHUNK)))
            if len(tokens) <= piece:
                break
            size = min(piece, len(tokens) - needed)
            self._score([Feed(feed.row, tokens[:size], 0)])
            tokens = tokens[size:]
        return Feed(feed.row, tokens, feed.keep, feed.parents)

    def _score(self, feeds: Sequence[Feed]) -> Tensor:
        order = sorted(range(len(feeds)), key=lambda i: len(feeds[i].tokens))
        spans = [self._span(feeds[i]) for i in order]
        missing = self.width - sum(len(span.tokens) for span in spans)
        if missing > 0:
            spans[-1].tokens += [0] * missing
            spans[-1].dummies = missing
        starts: dict[int, int] = {}
        ids: list[int] = []
        positions: list[int] = []
        for i, span in zip(order, spans, strict=True):
            starts[i] = len(ids)
            ids += span.tokens
            positions += span.positions().tolist()
        if missing > 0 and self.max_length is not None:  # the rest of a full context is dummies
            positions[-missing:] = [min(p, self.max_length - 1) for p in positions[-missing:]]
        index: list[int] = []
        for i, feed in enumerate(feeds):
            end = starts[i] + len(feed.tokens)
            index += range(end - feed.keep, end)
        wanted = len(index)
        index += index[-1:] * (self.width - wanted)  # the head's matrix product must not be narrower either
        logits = self._compute(spans, ids, positions, index)
        for feed in feeds:
            feed.row.append(feed.tokens)
        return logits[:wanted, : self.vocab_size]

    def _span(self, feed: Feed) -> Span:
        parents = None if feed.parents is None else list(feed.parents)
        return Span(cast(KVRow, feed.row), list(feed.tokens), parents, by_path=self.by_path)

    def _compute(self, spans: Sequence[Span], ids: list[int], positions: list[int], index: list[int]) -> Tensor:
        """Logits at the places `index` of the packed tokens, [len(index), at least vocab_size]."""
        raise NotImplementedError
