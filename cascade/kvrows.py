"""A row with its keys and values: preallocated buffers that grow, rewind by a number and compact a tree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from cascade.rows import Row

if TYPE_CHECKING:
    from torch import Tensor

BLOCK = 512
"""Keys are attended to in blocks of this many at absolute positions."""

_LAST_BLOCK = (64, 128, 192, 384)
KEPT_VIEWS = 8  # of a row; each is a small object per layer


def padded_view(slots: int, fine: bool = True) -> int:
    """How many slots attention looks at when `slots` are in use; the surplus is masked.

    A sum over keys has the same bits for every view that matrix kernels split alike. Whole blocks of
    512 always are. The CPU kernels measured here split up to 192 keys not at all, from 384 on in
    runs of 192, and in between in two halves, so that only those in between would differ: `fine`
    allows the shorter last blocks, and a load-time probe says whether it may.
    """
    whole, rest = divmod(slots, BLOCK)
    if rest and fine:
        return whole * BLOCK + next((size for size in _LAST_BLOCK if rest <= size), BLOCK)
    return (whole + bool(rest)) * BLOCK


@dataclass(frozen=True)
class LayerShape:
    """What one attention layer caches per token: H heads of `key_size` and `value_size` numbers."""

    heads: int
    key_size: int
    value_size: int
    dtype: torch.dtype
    device: torch.device


@dataclass
class Layout:
    """The shapes of all attention layers in the order they run; layers of one shape share a buffer.

    Attributes:
        shapes: one per layer.
        groups: for each distinct shape the layers that have it.
        places: for each layer its group and its index in it.
    """

    shapes: list[LayerShape]
    groups: dict[LayerShape, list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for layer, shape in enumerate(self.shapes):
            self.groups.setdefault(shape, []).append(layer)

    def spread(self, per_group: Sequence[Sequence[Tensor]]) -> list[Tensor]:
        """Tensors listed by group and place in it, listed by layer instead."""
        if len(per_group) == 1:
            return list(per_group[0])
        spread: dict[int, Tensor] = {}
        for layers, tensors in zip(self.groups.values(), per_group, strict=True):
            spread.update(zip(layers, tensors, strict=True))
        return [spread[layer] for layer in range(len(self.shapes))]


class KVRow(Row):
    """One request's cache of one model: ids, and per layer keys and values of `capacity` slots.

    Slot i holds the token at index i of `ids`; only while a tree is being verified do positions differ
    from slots. Buffers are zero-initialised, since a masked NaN still poisons what attends to it.
    """

    def __init__(self, layout: Layout) -> None:
        super().__init__()
        self.layout = layout
        self.capacity = 0
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []
        self._views: dict[tuple[int, int], tuple[list[Tensor], list[Tensor]]] = {}

    def reserve(self, slots: int) -> None:
        """Makes room for `slots` slots; doubles, so that growing costs nothing in the long run."""
        if slots <= self.capacity:
            return
        capacity = padded_view(max(slots, 2 * self.capacity), fine=False)
        with torch.inference_mode():
            self._keys = self._grown(self._keys, capacity, [s.key_size for s in self.layout.groups])
            self._values = self._grown(self._values, capacity, [s.value_size for s in self.layout.groups])
        self.capacity = capacity
        self._views.clear()

    def _grown(self, old: list[Tensor], capacity: int, sizes: list[int]) -> list[Tensor]:
        new = []
        for i, (shape, layers) in enumerate(self.layout.groups.items()):
            dims = (len(layers), 1, shape.heads, capacity, sizes[i])
            buffer = torch.zeros(dims, dtype=shape.dtype, device=shape.device)
            if old and self.length:
                buffer[..., : self.length, :] = old[i][..., : self.length, :]
            new.append(buffer)
        return new

    def view(self, start: int, stop: int) -> tuple[list[Tensor], list[Tensor]]:
        """As `span`, kept for the forwards to come: views change once in many tokens."""
        key = (start, stop)
        if key not in self._views:
            if len(self._views) >= KEPT_VIEWS:
                self._views.clear()
            self._views[key] = self.span(start, stop)
        return self._views[key]

    def span(self, start: int, stop: int) -> tuple[list[Tensor], list[Tensor]]:
        """Keys and values of slots `start` to `stop`, per layer [1, H, stop - start, D]; not copies."""
        return tuple(  # type: ignore[return-value]
            self.layout.spread([buffer.narrow(3, start, stop - start).unbind(0) for buffer in buffers])
            for buffers in (self._keys, self._values)
        )

    def keep(self, base: int, path: Sequence[int]) -> None:
        """Moves the draft nodes in `path` together, in all layers; see `Row.keep`."""
        if list(path) != list(range(len(path))):
            with torch.inference_mode():
                for buffer in (*self._keys, *self._values):
                    slots = torch.tensor(path, device=buffer.device) + base
                    buffer[..., base : base + len(path), :] = buffer.index_select(3, slots)
        super().keep(base, path)

    def fork(self) -> KVRow:
        """A copy that shares nothing, as large as what is cached needs."""
        other = KVRow(self.layout)
        other.ids = self.ids.copy()
        other.reserve(self.length)
        with torch.inference_mode():
            for mine, theirs in zip((*self._keys, *self._values), (*other._keys, *other._values), strict=True):
                theirs[..., : self.length, :] = mine[..., : self.length, :]
        other.length = self.length
        return other

    def stretch(self, length: int) -> None:
        """Repeats what is cached until `length` slots are filled.

        For probes: a context of any length without the cost of reading one.
        """
        have = self.length
        self.reserve(length)
        source = torch.arange(have, length) % have
        with torch.inference_mode():
            for buffer in (*self._keys, *self._values):
                buffer[..., have:length, :] = buffer.index_select(3, source.to(buffer.device))
        self.append(self.ids[source.numpy()])
