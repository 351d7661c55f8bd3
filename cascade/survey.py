"""What a model's attention layers are, found by running one forward in which nothing is computed.

A model knows best which of its layers look how far back: it is asked to build its own masks, and the
rule behind each mask is read off by trying it on positions. No configuration field is interpreted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from cascade.attention import Reach
from cascade.kvrows import LayerShape, Layout

if TYPE_CHECKING:
    from torch import Tensor, nn

LONGEST = 1 << 17  # positions on which a mask's rule is tried where a model has no limit of its own


class Survey:
    """Attention layers in the order they run: their modules, shapes and reach.

    Attributes:
        layers: the index of each attention module.
        shapes, reaches: one per layer.
    """

    def __init__(self, max_length: int | None) -> None:
        self.limit = min(max_length or LONGEST, LONGEST)
        self.layers: dict[nn.Module, int] = {}
        self.shapes: list[LayerShape] = []
        self.reaches: list[Reach] = []
        self._known = [Reach()]

    @property
    def layout(self) -> Layout:
        """The shapes, as rows need them."""
        return Layout(self.shapes)

    def mask(self, rule: Callable[..., Tensor], device: Any) -> Tensor:
        """A stand-in for the mask of one kind of layer; its size says which kind it stands for."""
        self._known.append(reach_of(rule, self.limit))
        return torch.ones(1, 1, 1, len(self._known), dtype=torch.bool, device=device)

    def attention(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any
    ) -> Tensor:
        """Notes a layer; returns zeros of the right shape, [1, S, Hq, Dv]."""
        if module in self.layers:
            raise NotImplementedError("one attention module runs more than once per token")
        if options.get("position_bias") is not None or options.get("is_causal") is False:
            raise NotImplementedError("its attention is biased by position or not causal")
        self.layers[module] = len(self.shapes)
        self.note(key, value)
        self.reaches.append(self._known[0 if mask is None else mask.shape[-1] - 1])
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3])

    def note(self, key: Tensor, value: Tensor) -> None:
        """Notes a layer's shape from its new keys and values, [1, H, S, D]."""
        if key.shape[0] != 1 or key.shape[1] != value.shape[1]:
            raise NotImplementedError("its keys and values have an unusual shape")
        self.shapes.append(LayerShape(key.shape[1], key.shape[3], value.shape[3], key.dtype, key.device))


def reach_of(rule: Callable[..., Tensor], limit: int) -> Reach:
    """How far back `rule` (batch, head, query position, key position) -> bool lets a query look.

    Raises:
        NotImplementedError: the rule is none of: everything before, a window, chunks.
    """
    zero = torch.zeros(1, 1, 1, 1, dtype=torch.long)
    positions = torch.arange(limit)

    def sees(query: Tensor, key: Tensor) -> Tensor:
        seen = rule(zero, zero, query[None, None, :, None], key[None, None, None, :])
        return seen.expand(1, 1, len(query), len(key))[0, 0]

    first = sees(positions, positions[:1])[:, 0]
    size = int((~first).nonzero()[0]) if not first.all() else 0
    queries = torch.tensor(sorted({limit - 1, limit - 2, limit // 2, min(size, limit - 1), 0}))
    found = sees(queries, positions)
    for reach in (Reach("window", size), Reach("chunk", size)) if size else (Reach(),):
        allowed = reach.allows(queries[:, None], positions)
        causal = positions <= queries[:, None]
        if torch.equal(found, causal if allowed is None else causal & allowed):
            return reach
    raise NotImplementedError("one of its attention masks is neither causal nor a window nor chunks")
