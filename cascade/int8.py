"""Linear layers with int8 weights, fast where decoding needs it: for one to a dozen tokens.

A product takes as long as its weights take to come from memory, so what counts is what is done around it.
Qwen2.5-0.5B, 2 threads, 300 cached tokens, milliseconds per forward:

    tokens                                          1      4      8
    torch operators before and after each product   TODO
    the same by two compiled loops
    and layers with the same input in one product
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Sequence

import numpy as np
import torch
from numba import njit
from numpy.typing import NDArray
from torch import Tensor, nn

Floats = NDArray[np.float32]

TINY = 1e-20  # keeps the scale of zeros from being zero


class Int8Linear(nn.Module):
    """A linear layer with int8 weights, one scale per output, and activations in 8 bits, one scale per token.

    Each token is mapped to [0, 1] by its own extremes, so the operator is told one scale for all and
    its sums are exact integers: a token's result has the same bits whatever shares the forward.
    """

    bias: Tensor
    _sums: Tensor

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self._steps = activation_steps()
        self._packed, sums = _pack(weight)
        shift = torch.zeros(self.out_features) if bias is None else bias.detach().float().clone()
        self.register_buffer("_sums", sums, persistent=False)
        self.register_buffer("bias", shift, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out], float32."""
        flat = x.detach().reshape(-1, self.in_features).float().contiguous()
        low, high = torch.aminmax(flat, dim=-1)
        scaled, size = torch.empty_like(flat), torch.empty_like(low)
        lows, sizes = low.numpy(), size.numpy()
        _spread(flat.numpy(), lows, high.numpy(), scaled.numpy(), sizes)
        out = _product(scaled, self._steps, self._packed)
        _restore(out.numpy(), lows, sizes, self._sums.numpy(), self.bias.numpy())
        return out.view(*x.shape[:-1], self.out_features)


class Joint(nn.Module):
    """Linear layers that read the same input, computed in one product when the first of them is asked.

    Args:
        layers: (weight [out, in], bias [out] or None) of each.
    """

    def __init__(self, layers: Sequence[tuple[Tensor, Tensor | None]]) -> None:
        super().__init__()
        self.sizes = [len(weight) for weight, _ in layers]
        biases = [torch.zeros(len(weight)) if bias is None else bias.float() for weight, bias in layers]
        self.product = Int8Linear(torch.cat([weight for weight, _ in layers]), torch.cat(biases))
        self._input: Tensor | None = None
        self._outputs: list[Tensor | None] = []

    def part(self, index: int, x: Tensor) -> Tensor:
        """What layer `index` makes of `x` [..., in]: a view of the product, which is kept until all have theirs."""
        if x is not self._input or self._outputs[index] is None:
            self._input, self._outputs = x, list(self.product(x).split(self.sizes, -1))
        output, self._outputs[index] = self._outputs[index], None
        if not any(other is not None for other in self._outputs):
            self._input = None
        assert output is not None
        return output


class JointLinear(nn.Module):
    """One of the layers of a `Joint`, in its place in the model."""

    def __init__(self, joint: Joint, index: int, in_features: int) -> None:
        super().__init__()
        self.joint, self.index = joint, index
        self.in_features, self.out_features = in_features, joint.sizes[index]

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out], float32."""
        return self.joint.part(self.index, x)


@njit(cache=True)
def _spread(x: Floats, low: Floats, high: Floats, out: Floats, size: Floats) -> None:
    """Maps each row of x [R, in] to [0, 1] by its extremes [R]; notes their distances in `size`."""
    for row in range(len(x)):
        size[row] = max(high[row] - low[row], np.float32(TINY))
        for i in range(x.shape[1]):
            out[row, i] = (x[row, i] - low[row]) / size[row]


@njit(cache=True)
def _restore(out: Floats, low: Floats, size: Floats, sums: Floats, bias: Floats) -> None:
    """Makes of products with mapped rows, out [R, out], the layer's outputs: puts back what every `low` contributes."""
    for row in range(len(out)):
        for i in range(out.shape[1]):
            out[row, i] = out[row, i] * size[row] + (low[row] * sums[i] + bias[i])


@functools.cache
def activation_steps() -> int:
    """Into how many steps activations may be divided: 255, or 127 on CPUs whose kernels overflow."""
    packed, _ = _pack(torch.ones(8, 256))
    exact = bool((_product(torch.ones(1, 256), 255, packed) - 256).abs().max() < 1)
    return 255 if exact else 127


def _product(x: Tensor, steps: int, packed: object) -> Tensor:
    """x [..., in] in [0, 1] times the packed weight."""
    return torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32(x, 1 / steps, 0, packed)


def _pack(weight: Tensor) -> tuple[object, Tensor]:
    """The weight [out, in] in the layout of the int8 kernels, and its sum over inputs [out], as rounded."""
    weight = weight.detach().float()
    scales = (weight.abs().amax(1) / 127).clamp_min(TINY).double()
    zeros = torch.zeros(len(scales), dtype=torch.long)
    with warnings.catch_warnings():
        # torch calls these tensors deprecated, and has nothing yet that is as fast for a few tokens
        warnings.simplefilter("ignore", UserWarning)
        rounded = torch.quantize_per_channel(weight, scales, zeros, 0, torch.qint8)
        packed = torch.ops.quantized.linear_prepack(rounded, None)
    return packed, (rounded.int_repr().sum(1) * scales).float()
