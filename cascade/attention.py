"""Attention over packed rows: each row's queries see that row's own keys, and nothing is padded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.nn.functional import scaled_dot_product_attention

from cascade.kvrows import BLOCK, KVRow, padded_view

if TYPE_CHECKING:
    from torch import Tensor

QUERY_ROWS = 4
"""Query rows are padded to a multiple of this.

Matrix kernels treat the last one to three rows differently, and a single row as a vector: without the
padding a token's result would depend on how many tokens of its row share the forward.
"""


class Reach(NamedTuple):
    """Which earlier positions a layer sees: all, the last `size` ("window") or its own `size` ("chunk")."""

    kind: str = "all"
    size: int = 0

    def allows(self, query: Tensor, key: Tensor) -> Tensor | None:
        """Whether positions `query` [Q, 1] may see positions `key` [V]; bool [Q, V], or None for all."""
        if self.kind == "window":
            return query - key < self.size
        if self.kind == "chunk":
            return torch.div(query, self.size, rounding_mode="floor") == torch.div(
                key, self.size, rounding_mode="floor"
            )
        return None

    def first(self, query: int) -> int:
        """The first position that position `query` sees."""
        if self.kind == "window":
            return max(0, query - self.size + 1)
        return query // self.size * self.size if self.kind == "chunk" else 0


@dataclass
class Span:
    """One row's part of a packed forward.

    Attributes:
        row: where the keys and values go, behind its first `row.length` slots.
        tokens: ids [Q], dummies included.
        parents: of the last `len(parents)` real tokens; see `Feed`.
        dummies: how many tokens at the end are there only for the width.
    """

    row: KVRow
    tokens: list[int]
    parents: Sequence[int] | None = None
    dummies: int = 0

    def positions(self) -> list[int]:
        """The position of each token, [Q]: a tree node's is the context's length plus its depth."""
        base, width = self.row.length, len(self.tokens)
        if self.parents is None:
            return list(range(base, base + width))
        root = base + width - self.dummies - len(self.parents)
        positions = list(range(base, root))
        for parent in self.parents:
            positions.append(root if parent < 0 else positions[root - base + parent] + 1)
        return positions + list(range(base + width - self.dummies, base + width))

    def view(self, reach: Reach, fine: bool) -> tuple[int, int]:
        """The slots that a layer has to look at, in whole blocks from the first that a token sees."""
        return reach.first(self.row.length) // BLOCK * BLOCK, padded_view(self.row.length + len(self.tokens), fine)

    def visible(self, start: int, stop: int, reach: Reach, device: torch.device) -> Tensor:
        """Which of the slots from `start` to `stop` each token sees, bool [Q, stop - start]."""
        base, width = self.row.length, len(self.tokens)
        slots = torch.arange(start, stop, device=device)
        own = torch.arange(base, base + width, device=device)[:, None]
        seen = slots <= own
        if self.parents is not None:
            nodes = len(self.parents)
            first = width - self.dummies - nodes
            column = base + first - start
            seen[first : first + nodes, column : column + nodes] = ancestors(self.parents).to(device)
            # from here on a node counts where it stands in the text, not where it is stored
            own = torch.tensor(self.positions(), device=device)[:, None]
            slots[base - start : base - start + width] = own[:, 0]
        allowed = reach.allows(own, slots)
        return seen if allowed is None else seen & allowed


def ancestors(parents: Sequence[int]) -> Tensor:
    """Which nodes each node of a tree descends from, itself included; bool [N, N]."""
    seen = torch.eye(len(parents), dtype=torch.bool)
    for node, parent in enumerate(parents):
        if parent >= 0:
            seen[node] |= seen[parent]
    return seen


class Run:
    """Rows of one packed forward that have the same width, side by side: they share tensor operations.

    Attributes:
        spans: the rows.
        start: where their tokens begin.
        width: tokens per row.
    """

    def __init__(self, start: int, width: int) -> None:
        self.spans: list[Span] = []
        self.start, self.width = start, width
        self._scratch: dict[Any, tuple[Tensor, tuple[Tensor, ...]]] = {}
        self._views: dict[Any, list[tuple[list[Tensor], list[Tensor], Tensor]]] = {}

    def fold(self, query: Tensor, heads: int, groups: int) -> Sequence[Tensor]:
        """The queries [1, Hq, S, D], per row [1, H, M, D]: those that share keys stacked, and padded.

        Row i * groups + g is token i, query head g of its group: stacked, they read the keys once.
        """
        rows, width, size = len(self.spans), self.width, query.shape[-1]
        key = (heads, groups, size, query.dtype, query.device)
        if key not in self._scratch:
            scratch = query.new_zeros(rows, heads, _padded(width * groups), size)
            target = scratch[:, :, : width * groups].view(rows, heads, width, groups, size)
            self._scratch[key] = target, scratch.split(1)
        target, parts = self._scratch[key]
        source = query[0, :, self.start : self.start + rows * width].view(heads, groups, rows, width, size)
        target.copy_(source.permute(2, 0, 3, 1, 4))
        return parts

    def unfold(self, results: Sequence[Tensor], groups: int) -> Tensor:
        """The inverse for what was attended: per row [1, H, M, Dv] -> [1, tokens, Hq, Dv]."""
        turned = [result.transpose(1, 2) for result in results]
        result = turned[0] if len(turned) == 1 else torch.cat(turned)
        rows, _, heads, size = result.shape
        result = result[:, : self.width * groups].reshape(rows, self.width, groups, heads, size).transpose(2, 3)
        return result.reshape(1, rows * self.width, heads * groups, size)

    def views(
        self, reach: Reach, groups: int, query: Tensor, fine: bool
    ) -> list[tuple[list[Tensor], list[Tensor], Tensor]]:
        """Per row: keys and values by layer, and the additive mask [M, view] in the dtype of the queries."""
        key = (reach, groups, query.dtype, query.device)
        if key not in self._views:
            found = []
            for span in self.spans:
                start, stop = span.view(reach, fine)
                seen = span.visible(start, stop, reach, query.device).repeat_interleave(groups, 0)
                mask = query.new_zeros(_padded(len(seen)), stop - start)
                mask[: len(seen)].masked_fill_(~seen, float("-inf"))
                found.append((*span.row.view(start, stop), mask))
            self._views[key] = found
        return self._views[key]


class Plan:
    """One packed forward: where each row's tokens go and what they may see.

    Built once per forward and used by every layer; what layers share is made once.

    Args:
        spans: the rows, sorted by width.
        layers: the index of each attention module.
        reaches: how far back each layer looks.
        fine: see `padded_view`.
    """

    def __init__(self, spans: Sequence[Span], layers: Mapping[Any, int], reaches: Sequence[Reach], fine: bool) -> None:
        self.layers, self.reaches, self.fine = layers, reaches, fine
        self.widths = [len(span.tokens) for span in spans]
        self.runs: list[Run] = []
        self.targets: list[tuple[list[Tensor], list[Tensor]]] = []
        token = 0
        for span, width in zip(spans, self.widths, strict=True):
            if not self.runs or self.runs[-1].width != width:
                self.runs.append(Run(token, width))
            self.runs[-1].spans.append(span)
            token += width
            span.row.reserve(span.row.length + width)
            self.targets.append(span.row.span(span.row.length, span.row.length + width))

    def attention(
        self,
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Any,
        scale: float,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        **ignored: Any,
    ) -> Tensor:
        """Stores the new keys and values [1, H, S, D]; what the queries [1, Hq, S, D] see, [1, S, Hq, Dv]."""
        layer = self.layers[module]
        heads, groups = key.shape[1], query.shape[1] // key.shape[1]
        targets = [target[0][layer] for target in self.targets] + [target[1][layer] for target in self.targets]
        new: tuple[Tensor, ...] = (key, value)
        if len(self.widths) > 1:
            new = (*key.split_with_sizes(self.widths, 2), *value.split_with_sizes(self.widths, 2))
        torch._foreach_copy_(targets, new)
        fused = softcap is None and s_aux is None and key.shape[-1] == value.shape[-1]
        out = []
        for run in self.runs:
            views = run.views(self.reaches[layer], groups, query, self.fine)
            results = [
                scaled_dot_product_attention(q, keys[layer], values[layer], attn_mask=mask, scale=scale)
                if fused
                else blocked_attention(q, keys[layer], values[layer], mask, scale, softcap, s_aux)
                for q, (keys, values, mask) in zip(run.fold(query, heads, groups), views, strict=True)
            ]
            out.append(run.unfold(results, groups))
        return out[0] if len(out) == 1 else torch.cat(out, 1)


def _padded(rows: int) -> int:
    return -(-rows // QUERY_ROWS) * QUERY_ROWS


def blocked_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention written out, for what the fused operator cannot do; query [1, H, M, D] -> [1, H, M, Dv]."""
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    scores = torch.matmul(query, key.transpose(2, 3)).to(wide) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores + mask
    if sinks is not None:
        # A sink is one more key that gives nothing: query row i * groups + g belongs to query head h * groups + g.
        heads, rows = scores.shape[1:3]
        sinks = sinks.to(wide).view(1, heads, 1, -1).expand(1, heads, -(-rows // (sinks.numel() // heads)), -1)
        sinks = sinks.reshape(1, heads, -1, 1)[:, :, :rows]
        scores = torch.cat((scores, sinks), -1)
    weights = torch.softmax(scores, -1).to(value.dtype)
    out = torch.zeros((), dtype=wide, device=query.device)
    for start in range(0, value.shape[2], BLOCK):
        stop = min(start + BLOCK, value.shape[2])
        out = out + torch.matmul(weights[..., start:stop], value[:, :, start:stop]).to(wide)
    return out.to(value.dtype)
