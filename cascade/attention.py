"""Attention over packed rows: each row's queries see that row's own keys, and nothing is padded."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from cascade.kvrows import BLOCK, KVRow, padded_view
from cascade.trees import Ints, ancestors, depths

if TYPE_CHECKING:
    from torch import Tensor

    Attention = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

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
        parents: of the last `len(parents)` real tokens, cached ones included; see `Feed`.
        dummies: how many tokens at the end are there only for the width.
        by_path: whether a tree may be attended to path by path; see `PathRun`.
    """

    row: KVRow
    tokens: list[int]
    parents: Sequence[int] | None = None
    dummies: int = 0
    by_path: bool = False

    @cached_property
    def depths(self) -> Ints:
        """How deep each node of the tree lies, cached ones included, [N]."""
        return depths(self.parents) if self.parents else np.zeros(0, np.int64)

    @property
    def root(self) -> int:
        """The length of the context that all nodes see, which is where the first node lies."""
        return self.row.length + len(self.tokens) - self.dummies - len(self.depths)

    @property
    def nodes(self) -> slice:
        """Which tokens are nodes of the tree."""
        end = len(self.tokens) - self.dummies
        return slice(max(0, end - len(self.depths)), end)

    @cached_property
    def cuts(self) -> list[int]:
        """At which tokens the paths begin that are attended to one after another; [0] for all at once.

        A path is a run of nodes each of which is the child of the one before; the context belongs to the
        first. In depth-first order a path hangs on the latest node of some depth; other trees are not cut.
        """
        if not self.by_path or not self.parents or self.root < self.row.length:
            return [0]
        starts = [node for node, parent in enumerate(self.parents) if parent != node - 1]
        latest = [-1, *range(starts[0] if starts else 0)]  # per depth, behind the context's end
        for start, stop in pairwise([*starts, len(self.parents)]):
            depth = int(self.depths[start])
            if latest[depth : depth + 1] != [self.parents[start]]:
                return [0]
            latest[depth + 1 :] = range(start, stop)
        return [0, *(self.nodes.start + start for start in starts)]

    def positions(self) -> Ints:
        """The position of each token, [Q]: a tree node's is the context's length plus its depth."""
        nodes, positions = self.nodes, np.arange(self.row.length, self.row.length + len(self.tokens))
        if self.parents:
            positions[nodes] = self.root + self.depths[nodes.start - nodes.stop :]
        return positions

    def view(self, reach: Reach, fine: bool) -> tuple[int, int]:
        """The slots that a layer has to look at, in whole blocks from the first that a token sees."""
        last = int(self.positions().max()) if len(self.cuts) > 1 else self.row.length + len(self.tokens) - 1
        return reach.first(min(self.row.length, self.root)) // BLOCK * BLOCK, padded_view(last + 1, fine)

    def visible(self, start: int, stop: int, reach: Reach, device: torch.device) -> Tensor:
        """Which of the slots from `start` to `stop` each token sees, bool [Q, stop - start]."""
        slots = torch.arange(start, stop, device=device)
        own = torch.from_numpy(self.positions()).to(device)[:, None]
        seen = slots <= own
        if self.parents and len(self.cuts) == 1:
            base, nodes = self.row.length, self.nodes
            column = slice(self.root - start, self.root - start + len(self.depths))
            seen = slots <= torch.arange(base, base + len(self.tokens), device=device)[:, None]
            seen[nodes, column] = torch.from_numpy(ancestors(self.parents)[nodes.start - nodes.stop :]).to(device)
            # a node counts where it stands in the text, not where it is stored
            slots[column] = torch.from_numpy(self.root + self.depths).to(device)
        allowed = reach.allows(own, slots)
        return seen if allowed is None else seen & allowed

    def mask(self, start: int, stop: int, reach: Reach, rows: Ints, query: Tensor) -> Tensor:
        """What is added to scores, [M, stop - start], where row i is of token rows[i]; of the queries' dtype."""
        hidden = self.visible(start, stop, reach, query.device).logical_not_()
        mask = query.new_zeros(hidden.shape).masked_fill_(hidden, float("-inf"))
        return mask.index_select(0, torch.from_numpy(rows).to(query.device))


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

    def attend(
        self, attention: Attention, layer: int, reach: Reach, fine: bool, query: Tensor, key: Tensor, value: Tensor
    ) -> Tensor:
        """What the queries of these rows see, [1, tokens, Hq, Dv]; `attention` takes one row's [1, H, M, D]."""
        heads, groups = key.shape[1], query.shape[1] // key.shape[1]
        views = self.views(reach, groups, query, fine)
        results = [
            attention(q, keys[layer], values[layer], mask)
            for q, (keys, values, mask) in zip(self.fold(query, heads, groups), views, strict=True)
        ]
        return self.unfold(results, groups)

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
            rows = np.minimum(np.arange(_padded(self.width * groups)) // groups, self.width - 1)
            for span in self.spans:
                ends = span.view(reach, fine)
                found.append((*span.row.view(*ends), span.mask(*ends, reach, rows, query)))
            self._views[key] = found
        return self._views[key]


class PathRun(Run):
    """One row with a tree, attended to path by path: each node as in the chain it ends, hence with a chain's bits.

    A sum over keys depends on where they lie. So a path's keys and values are written to the slots of their
    positions, over those of earlier branches, before its queries look at the row; with nodes in depth-first
    order, all that a path descends from is in place. In the end all lie where those of other trees do.
    """

    def __init__(self, start: int, span: Span) -> None:
        super().__init__(start, len(span.tokens))
        self.spans, places = [span], span.positions()
        self.sizes = [stop - cut for cut, stop in pairwise([*span.cuts, self.width])]
        firsts = places[span.cuts].tolist()
        self.slots = [span.row.span(at, at + size) for at, size in zip(firsts, self.sizes, strict=True)]
        self.stored = span.row.span(span.row.length, span.row.length + self.width)
        self._laid: dict[Any, tuple[Any, ...]] = {}

    def attend(
        self, attention: Attention, layer: int, reach: Reach, fine: bool, query: Tensor, key: Tensor, value: Tensor
    ) -> Tensor:
        """See `Run.attend`."""
        heads, groups = key.shape[1], query.shape[1] // key.shape[1]
        taken, places, heights, keys, values, masks = self._layout(reach, groups, query, fine)
        query, key, value = (x.narrow(2, self.start, self.width) for x in (query, key, value))
        rows = query[0].view(heads, groups, self.width, -1).transpose(1, 2).reshape(1, heads, self.width * groups, -1)
        queries = rows.index_select(2, taken).split(heights, 2)
        new = zip(key.split(self.sizes, 2), value.split(self.sizes, 2), strict=True)
        results = []
        for slots, pair, q, mask in zip(self.slots, new, queries, masks, strict=True):
            torch._foreach_copy_([slots[0][layer], slots[1][layer]], pair)
            results.append(attention(q, keys[layer], values[layer], mask))
        torch._foreach_copy_([self.stored[0][layer], self.stored[1][layer]], [key, value])
        return self.unfold([torch.cat(results, 2).index_select(2, places)], groups)

    def _layout(self, reach: Reach, groups: int, query: Tensor, fine: bool) -> tuple[Any, ...]:
        """Query rows, each path's padded by themselves: which one each place takes, the place of each, places per
        path; keys and values by layer; per path its mask [places, view].
        """
        key = (reach, groups, query.dtype, query.device)
        if key not in self._laid:
            span, sizes = self.spans[0], np.array(self.sizes) * groups
            heights = -(-sizes // QUERY_ROWS) * QUERY_ROWS
            places = np.arange(sizes.sum()) + np.repeat(np.cumsum(heights - sizes) - (heights - sizes), sizes)
            taken = np.zeros(heights.sum(), np.int64)  # what fills up is the first row once more
            taken[places] = np.arange(len(places))
            ends, split = span.view(reach, fine), heights.tolist()
            masks = span.mask(*ends, reach, taken // groups, query).split(split)
            orders = (torch.from_numpy(order).to(query.device) for order in (taken, places))
            self._laid[key] = *orders, split, *span.row.view(*ends), masks
        return self._laid[key]


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
            span.row.reserve(span.row.length + width)
            self.targets.append(span.row.span(span.row.length, span.row.length + width))
            if len(span.cuts) > 1:
                self.runs.append(PathRun(token, span))
            else:
                if not self.runs or isinstance(self.runs[-1], PathRun) or self.runs[-1].width != width:
                    self.runs.append(Run(token, width))
                self.runs[-1].spans.append(span)
            token += width

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
        targets = [target[0][layer] for target in self.targets] + [target[1][layer] for target in self.targets]
        new: tuple[Tensor, ...] = (key, value)
        if len(self.widths) > 1:
            new = (*key.split_with_sizes(self.widths, 2), *value.split_with_sizes(self.widths, 2))
        torch._foreach_copy_(targets, new)
        fused = softcap is None and s_aux is None and key.shape[-1] == value.shape[-1]

        def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
            if fused:
                return scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)
            return blocked_attention(query, key, value, mask, scale, softcap, s_aux)

        reach = self.reaches[layer]
        out = [run.attend(attend, layer, reach, self.fine, query, key, value) for run in self.runs]
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
