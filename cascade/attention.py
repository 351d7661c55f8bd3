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

    def visible(self, view: int, reach: Reach, device: torch.device) -> Tensor:
        """Which of the first `view` slots each token sees, bool [Q, view]."""
        base, width = self.row.length, len(self.tokens)
        slots = torch.arange(view, device=device)
        seen = slots <= torch.arange(base, base + width, device=device)[:, None]
        position = slots
        if self.parents is not None:
            nodes = len(self.parents)
            first = width - self.dummies - nodes
            seen[first : first + nodes, base + first : base + first + nodes] = ancestors(self.parents).to(device)
            position = slots.clone()
            position[base : base + width] = torch.tensor(self.positions(), device=device)
        allowed = reach.allows(position[base : base + width, None], position)
        return seen if allowed is None else seen & allowed


def ancestors(parents: Sequence[int]) -> Tensor:
    """Which nodes each node of a tree descends from, itself included; bool [N, N]."""
    seen = torch.eye(len(parents), dtype=torch.bool)
    for node, parent in enumerate(parents):
        if parent >= 0:
            seen[node] |= seen[parent]
    return seen


class Plan:
    """One packed forward: where each row's tokens go and what they may see.

    Built once per forward and used by every layer, so everything that layers share is made here.

    Args:
        spans: the rows, sorted by width: rows of one width share tensor operations.
        layers: the index of each attention module.
        reaches: how far back each layer looks.
        fine: see `padded_view`.
    """

    def __init__(self, spans: Sequence[Span], layers: Mapping[Any, int], reaches: Sequence[Reach], fine: bool) -> None:
        self.spans, self.layers, self.reaches = spans, layers, reaches
        self.widths = [len(span.tokens) for span in spans]
        ends = [span.row.length + width for span, width in zip(spans, self.widths, strict=True)]
        self.views = [padded_view(end, fine) for end in ends]
        keys: list[list[Tensor]] = []
        values: list[list[Tensor]] = []
        targets = []
        for span, view, end in zip(spans, self.views, ends, strict=True):
            span.row.reserve(view)
            for store, tensors in zip((keys, values), span.row.view(view), strict=True):
                store.append(tensors)
            targets.append(span.row.span(span.row.length, end))
        self.keys = list(zip(*keys, strict=True))
        self.values = list(zip(*values, strict=True))
        self.targets = [
            (*new_keys, *new_values)
            for new_keys, new_values in zip(
                zip(*(t[0] for t in targets), strict=True), zip(*(t[1] for t in targets), strict=True), strict=True
            )
        ]
        self.runs = self._runs()
        self._masks: dict[tuple, list[Tensor]] = {}
        self._scratch: dict[tuple, Tensor] = {}

    def _runs(self) -> list[tuple[int, int, int, int]]:
        """Stretches of rows of one width: (first row, rows, first token, width)."""
        runs: list[tuple[int, int, int, int]] = []
        token = 0
        for row, width in enumerate(self.widths):
            if runs and runs[-1][3] == width:
                first, rows, start, _ = runs[-1]
                runs[-1] = (first, rows + 1, start, width)
            else:
                runs.append((row, 1, token, width))
            token += width
        return runs

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
        torch._foreach_copy_(self.targets[layer], key.split(self.widths, 2) + value.split(self.widths, 2))
        return self._attend(layer, self.reaches[layer], query, scale, softcap, s_aux)

    def _attend(
        self, layer: int, reach: Reach, query: Tensor, scale: float, softcap: float | None, sinks: Tensor | None
    ) -> Tensor:
        out = []
        for number, (first, rows, _, width) in enumerate(self.runs):
            keys, values = self.keys[layer][first : first + rows], self.values[layer][first : first + rows]
            heads = keys[0].shape[1]
            groups = query.shape[1] // heads
            masks = self._mask(number, reach, groups, query)
            folded = self._fold(number, query, heads, groups)
            if softcap is None and sinks is None and keys[0].shape[-1] == values[0].shape[-1]:
                results = [
                    scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
                    for q, k, v, mask in zip(folded, keys, values, masks, strict=True)
                ]
            else:
                results = [
                    blocked_attention(q, k, v, mask, scale, softcap, sinks)
                    for q, k, v, mask in zip(folded, keys, values, masks, strict=True)
                ]
            results = [result.transpose(1, 2) for result in results]
            result = results[0] if rows == 1 else torch.cat(results)
            size = result.shape[-1]
            result = result[:, : width * groups].reshape(rows, width, groups, heads, size).transpose(2, 3)
            out.append(result.reshape(1, rows * width, heads * groups, size))
        return out[0] if len(out) == 1 else torch.cat(out, 1)

    def _fold(self, number: int, query: Tensor, heads: int, groups: int) -> Sequence[Tensor]:
        """The queries of one run, per row [1, H, M, D]: those that share keys stacked, and padded.

        Row i * groups + g is token i, query head g of its group: stacking them reads the keys once.
        """
        _, rows, start, width = self.runs[number]
        size = query.shape[-1]
        key = (number, heads, groups, size, query.dtype, query.device)
        scratch = self._scratch.get(key)
        if scratch is None:
            padded = -(-width * groups // QUERY_ROWS) * QUERY_ROWS
            scratch = self._scratch[key] = query.new_zeros(rows, heads, padded, size)
        source = query[0, :, start : start + rows * width].view(heads, groups, rows, width, size)
        target = scratch[:, :, : width * groups].view(rows, heads, width, groups, size)
        target.copy_(source.permute(2, 0, 3, 1, 4))
        return scratch.split(1)

    def _mask(self, number: int, reach: Reach, groups: int, query: Tensor) -> list[Tensor]:
        """Additive masks of one run, per row [M, view], in the dtype of the queries."""
        key = (number, reach, groups, query.dtype, query.device)
        masks = self._masks.get(key)
        if masks is None:
            first, rows, _, width = self.runs[number]
            padded = -(-width * groups // QUERY_ROWS) * QUERY_ROWS
            masks = []
            for span, view in zip(self.spans[first : first + rows], self.views[first : first + rows], strict=True):
                seen = span.visible(view, reach, query.device).repeat_interleave(groups, 0)
                mask = query.new_zeros(padded, view)
                mask[: width * groups].masked_fill_(~seen, float("-inf"))
                masks.append(mask)
            self._masks[key] = masks
        return masks


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
