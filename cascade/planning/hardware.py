"""Costs of machines that are not at hand: what a forward takes by arithmetic, and what crosses a link.

A forward on n tokens, those of all rows together, of a model with P parameters of b bytes on g GPUs takes

    max(P b / (g W e), 2 P n / (g F e)) + launch + reduce(n)    seconds

    W       memory bandwidth of one GPU, bytes/s: every weight is read once, whatever n
    F       its dense floating-point operations/s: one multiplication and one addition per parameter and token
    e       the share of both that real kernels reach
    launch  what every forward takes besides, such as starting kernels
    reduce  where g > 1, two all-reduces per layer (tensor parallelism, Shoeybi et al. 2019, section 3), each of
            latency + 2 (g - 1) / g * hidden * n * 2 bytes / bandwidth of the interconnect (a ring, 16-bit activations)

Left out: reading the K/V cache, which long contexts and large batches make dear, and experts of which a forward reads a
part. All of it rises with n, so costs do.

Peak figures of `GPUS`, dense and without sparsity, 16-bit with 32-bit sums, are from the makers' data sheets:
NVIDIA H100 SXM, H200 SXM, A100 80GB SXM and L40S data sheets; Ada GPU architecture white paper, appendix A (RTX 4090);
AMD Instinct MI300X data sheet. `between` is the makers' figure of what leads from one GPU to others, one direction.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from cascade.costs import Costs

EFFICIENCY = 0.7  # of the peak: what well-written kernels reach on large matrices
ACTIVATION = 2  # bytes of a number that GPUs exchange
TOKEN_ID = 4  # bytes
PROBABILITY = 2  # bytes, of a token in a distribution that is sent along


@dataclass(frozen=True)
class Gpu:
    """One GPU.

    Attributes:
        bandwidth: of its memory, bytes/s.
        flops: dense 16-bit operations/s.
        flops8: dense 8-bit ones; those of 16 bits where it has none.
        between: bytes/s to other GPUs, one direction.
    """

    bandwidth: float
    flops: float
    flops8: float
    between: float


GPUS: Mapping[str, Gpu] = {
    "h100": Gpu(3.35e12, 989e12, 1979e12, 450e9),
    "h200": Gpu(4.8e12, 989e12, 1979e12, 450e9),
    "a100": Gpu(2.039e12, 312e12, 624e12, 300e9),
    "l40s": Gpu(0.864e12, 362e12, 733e12, 32e9),
    "4090": Gpu(1.008e12, 165.2e12, 330.3e12, 32e9),
    "mi300x": Gpu(5.3e12, 1307e12, 2615e12, 448e9),
}
#: Bytes of a parameter, and whether operations are of 8 bits. Weights of 4 bits are unpacked to 16 bits first.
DTYPES: Mapping[str, tuple[float, bool]] = {
    "bf16": (2.0, False),
    "fp8": (1.0, True),
    "int8": (1.0, True),
    "int4": (0.5, False),
}


@dataclass(frozen=True)
class Link:
    """What joins two places.

    Attributes:
        latency: seconds until the first byte is there.
        bandwidth: bytes/s.
    """

    latency: float
    bandwidth: float

    def seconds(self, size: float) -> float:
        """Time of a message of `size` bytes."""
        return self.latency + size / self.bandwidth


INTERCONNECT_LATENCY = 10e-6  # of an all-reduce of few bytes between the GPUs of one machine
LINK = Link(50e-6, 12.5e9)  # to another machine: 100 Gbit/s Ethernet, and two network stacks


class Forward(Protocol):
    """What a forward takes."""

    def seconds(self, tokens: int) -> float:
        """Time of a forward on so many tokens; never falls as they grow."""


@dataclass(frozen=True)
class Told:
    """A forward whose time somebody knows.

    Attributes:
        one: seconds on one token.
        per_token: on each further one.
    """

    one: float
    per_token: float = 0.0

    def seconds(self, tokens: int) -> float:
        """See `Forward.seconds`."""
        return self.one + self.per_token * max(0, tokens - 1)


@dataclass(frozen=True)
class Roofline:
    """A forward by the arithmetic at the head of this module, with its letters.

    Attributes:
        params: P.
        bytes: b.
        bandwidth, flops: W and F.
        gpus: g.
        efficiency: e.
        launch: seconds.
        layers, hidden: of the model; 0 leaves the all-reduces out.
        interconnect: between its GPUs.
    """

    params: float
    bytes: float
    bandwidth: float
    flops: float
    gpus: int = 1
    efficiency: float = EFFICIENCY
    launch: float = 0.0
    layers: int = 0
    hidden: int = 0
    interconnect: Link = LINK

    def seconds(self, tokens: int) -> float:
        """See `Forward.seconds`."""
        reached = self.gpus * self.efficiency
        memory = self.params * self.bytes / (reached * self.bandwidth)
        arithmetic = 2.0 * self.params * tokens / (reached * self.flops)
        return max(memory, arithmetic) + self.launch + self._reduce(tokens)

    def _reduce(self, tokens: int) -> float:
        """What the GPUs tell each other."""
        if self.gpus == 1 or not self.layers:
            return 0.0
        size = 2.0 * (self.gpus - 1) / self.gpus * self.hidden * tokens * ACTIVATION
        return 2 * self.layers * self.interconnect.seconds(size)


@dataclass(frozen=True)
class Away:
    """A drafter that is not on its verifier's GPUs: what is new goes there, and its proposal comes back.

    Attributes:
        link: between the two.
        per_token: bytes that come back for each proposed token.
    """

    link: Link
    per_token: float = TOKEN_ID

    def seconds(self, tokens: int, rows: int, first: bool) -> float:
        """What a forward on so many tokens adds to a proposal's way; the first one the way there and back itself."""
        size = tokens * TOKEN_ID + rows * self.per_token
        return first * 2 * self.link.latency + size / self.link.bandwidth


class AssumedCosts:
    """Costs of some levels by arithmetic, of the others as somebody measured them; see `cascade.costs.Costs`.

    Args:
        forwards: by level: what its forwards take; of a level without a model, what a proposed token takes.
        otherwise: costs of the other levels.
    """

    def __init__(self, forwards: Mapping[str, Forward], otherwise: Costs | None = None) -> None:
        self._forwards, self._otherwise = dict(forwards), otherwise

    def observe(self, level: str, tokens: int, rows: int, seconds: float) -> None:
        """Changes nothing."""

    def seconds(self, level: str, tokens: int, rows: int = 1) -> float | None:
        """Expected time of a forward, None where nothing is known."""
        if level in self._forwards:
            return self._forwards[level].seconds(tokens)
        return None if self._otherwise is None else self._otherwise.seconds(level, tokens, rows)

    def observe_draft(self, level: str, tokens: int, seconds: float, rows: int = 1) -> None:
        """Changes nothing."""

    def draft_seconds(self, level: str, tokens: int = 1, rows: int = 1) -> float | None:
        """Expected time of such proposals, None where nothing is known."""
        if level in self._forwards:
            return tokens * self._forwards[level].seconds(rows)
        return None if self._otherwise is None else self._otherwise.draft_seconds(level, tokens, rows)

    def relax(self, level: str) -> None:
        """Changes nothing."""


class OnTheWay(AssumedCosts):
    """The same, with what proposals from elsewhere spend on the way; for a clock that asks about every forward once.

    A forward of a drafter that follows one of a level above it begins a proposal.

    Args:
        costs: of forwards.
        away: by level: those that are elsewhere.
        levels: names of all, bottom to top.
    """

    def __init__(self, costs: Costs, away: Mapping[str, Away], levels: Sequence[str]) -> None:
        super().__init__({}, costs)
        self._away, self._levels = dict(away), list(levels)
        self._begins = set(away)

    def seconds(self, level: str, tokens: int, rows: int = 1) -> float | None:
        """Time of the forward that comes now."""
        found = super().seconds(level, tokens, rows)
        above = self._levels[: self._levels.index(level)] if level in self._levels else []
        self._begins.update(name for name in above if name in self._away)
        if found is not None and level in self._away:
            found += self._away[level].seconds(tokens, rows, level in self._begins)
            self._begins.discard(level)
        return found
