"""Linear layers with int8 weights, fast where decoding needs it: for one to a dozen tokens.

A product takes as long as its weights take to come from memory; what is done around it can be made short, and
for very few tokens the weights smaller. Qwen2.5-0.5B, 2 threads of an AVX-512 CPU, 300 cached tokens, the best of
several runs in milliseconds per forward (`benchmarks/widths.py` measures the like):

    tokens                                                            1      4      8
    each layer by itself, torch operators around each product        38     41     48
    layers with the same input in one product, compiled loops        36     38     43
    and int4 weights for up to three tokens                          26     38     43
    the last on another machine                                      17     26     31
    there, int4 for up to four, and layers written out (`lean`)      15     20     30
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

from cascade.errors import LoadError

Floats = NDArray[np.float32]

NARROW = 4  # tokens up to which int4 weights are faster: their kernel computes four at a time
GROUP = 32  # inputs that share an int4 scale
TINY = 1e-20  # keeps the scale of zeros from being zero


class Int8Linear(nn.Module):
    """A linear layer with int8 weights, one scale per output, and activations in 8 bits, one scale per token.

    Each token is mapped to [0, 1] by its own extremes, so the operator is told one scale for all and
    its sums are exact integers: a token's result has the same bits whatever shares the forward.
    """

    bias: Tensor
    _sums: Tensor
    narrow: Narrow | None = None  # what computes forwards on few tokens instead

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
        flat = x.detach().reshape(-1, self.in_features)
        if self.narrow is not None and len(flat) <= NARROW:
            return (self.narrow(flat) + self.bias).view(*x.shape[:-1], self.out_features)
        flat = flat.float().contiguous()
        scaled = np.empty(flat.shape, np.float32)
        low, size = np.empty((2, len(flat)), np.float32)
        _spread(flat.numpy(), scaled, low, size)
        out = _product(torch.from_numpy(scaled), self._steps, self._packed)
        _restore(out.numpy(), low, size, self._sums.numpy(), self.bias.numpy())
        return out.view(*x.shape[:-1], self.out_features)


class Narrow:
    """int4 weights, a scale and a zero per group of inputs, with activations in bfloat16.

    Args:
        weight: [out, in]; both must divide evenly, see `fits`.
    """

    def __init__(self, weight: Tensor) -> None:
        groups = weight.view(len(weight), -1, GROUP)
        low, high = torch.aminmax(groups, dim=-1)
        scale = ((high - low) / 15).clamp_min_(TINY)
        codes = ((groups - low[..., None]) / scale[..., None]).round_().to(torch.int32)
        self._packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes.view(weight.shape), 1)
        # The kernel counts from the middle of the 16 codes.
        self._scales = torch.stack([scale, low + 8 * scale], -1).transpose(0, 1).contiguous().bfloat16()

    def __call__(self, x: Tensor) -> Tensor:
        """[R, in] -> [R, out], bfloat16."""
        return torch.ops.aten._weight_int4pack_mm_for_cpu(x.bfloat16(), self._packed, GROUP, self._scales)

    @staticmethod
    def fits(weight: Tensor) -> bool:
        """Whether the kernel takes a weight of this shape."""
        return weight.shape[0] % 16 == 0 and weight.shape[1] % GROUP == 0


def narrow(module: nn.Module) -> None:
    """Gives the int8 layers of a model int4 weights for forwards on few tokens: they take up half as much memory.

    Raises:
        LoadError: this build of torch has no int4 kernels.
    """
    try:
        Narrow(torch.ones(16, GROUP))(torch.ones(1, GROUP))
    except Exception as error:  # a missing operator is an AttributeError or a RuntimeError, as torch likes
        reason = str(error).splitlines()[0]
        raise LoadError(f'dtype="int4" needs kernels that this torch lacks ({reason}): use "int8"') from error
    for part in module.modules():
        if isinstance(part, Int8Linear):
            weight = torch.ops.quantized.linear_unpack(part._packed)[0].dequantize()
            part.narrow = Narrow(weight) if Narrow.fits(weight) else None


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
def _spread(x: Floats, out: Floats, low: Floats, size: Floats) -> None:
    """Maps each row of x [R, in] to [0, 1] by its extremes; `low` gets the lower one, `size` their distance."""
    for row in range(len(x)):
        least, most = _extremes(x[row])
        distance = max(most - least, np.float32(TINY))
        for i in range(x.shape[1]):
            out[row, i] = (x[row, i] - least) / distance
        low[row], size[row] = least, distance


@njit(cache=True, fastmath={"nnan", "nsz"})
def _least_and_most(x: Floats) -> tuple[np.float32, np.float32]:
    # The flags let LLVM vectorise the comparisons. There is no NaN here: the caller looked.
    least = most = x[0]
    for i in range(len(x)):
        least, most = min(least, x[i]), max(most, x[i])
    return least, most


@njit(cache=True)
def _extremes(x: Floats) -> tuple[np.float32, np.float32]:
    """The least and the largest of x; NaN if one of them is NaN."""
    bad = 0
    for i in range(len(x)):
        bad += x[i] != x[i]
    if bad:
        return np.float32(np.nan), np.float32(np.nan)
    return _least_and_most(x)


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
