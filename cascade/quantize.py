"""int8 copies of models: a draft level without a second model, at half the memory traffic of bfloat16.

SmolLM2-135M, 2 cores with AVX-512 and VNNI, one thread, 200 cached tokens; agreement is the share of the
bfloat16 model's 672 greedy tokens on 14 chat prompts that the copy would choose too:

    scale of the activations                     agreement   1 token    8 tokens
    one per forward (torch's dynamic operator)        0.82     26 ms       30 ms
    same, the text's first token fed alone            0.89
    one per token, symmetric                          0.91     29 ms       34 ms
    one per token, from its least to its largest      0.94     30 ms       38 ms
    bfloat16 itself                                   1.00     54 ms       65 ms

So the last is what `Int8Linear` does. The prompts were read in one piece; only a scale per token gives
the same numbers however they are read. (These weights had been 4-bit once: others may agree less.)
"""

from __future__ import annotations

import copy
import functools
import warnings
from typing import Any

import torch
from torch import Tensor, nn

from cascade.errors import LoadError

TINY = 1e-20  # keeps the scale of zeros from being zero


class Int8Linear(nn.Module):
    """A linear layer with int8 weights, one scale per output, and activations in 8 bits, one scale per token.

    Each token is mapped to [0, 1] by its own extremes, so the operator is told one scale for all and
    its sums are exact integers: a token's result has the same bits whatever shares the forward.
    """

    bias: Tensor | None
    _sums: Tensor

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self._steps = activation_steps()
        self._packed, sums = _pack(weight)
        self.register_buffer("_sums", sums, persistent=False)
        self.register_buffer("bias", None if bias is None else bias.detach().float().clone(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out], float32."""
        x = x.float()
        low, high = torch.aminmax(x, dim=-1, keepdim=True)
        size = (high - low).clamp_min_(TINY)
        out = _product((x - low) / size, self._steps, self._packed)
        out = torch.addcmul(low * self._sums, out, size)  # what every input's `low` contributes, put back
        return out if self.bias is None else out.add_(self.bias)


class Float32Embedding(nn.Module):
    """An embedding that gives float32 while its table stays where and what it is, shared with its model."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self._inner = (inner,)  # in a tuple it is no part of this module: nothing done to us is done to it

    @property
    def weight(self) -> Tensor:
        """The table."""
        return self._inner[0].weight  # type: ignore[return-value]

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """What the embedding gives, in float32."""
        return self._inner[0](*args, **kwargs).float()


def quantized(module: nn.Module, name: str) -> nn.Module:
    """An int8 copy of a model: linear layers quantised, embeddings shared, all the rest in float32.

    The model itself is left as it is. Linear layers are torch's, the head included, and the transposed
    ones of GPT-2.

    Args:
        module: a transformers model on the CPU.
        name: how errors call it.

    Raises:
        LoadError: this device or build of torch has no int8 kernels, or there is nothing to quantise.
    """
    check_supported(next(module.parameters()).device)
    replaced: dict[int, Any] = {}
    for part in module.modules():
        linear = _linear(part)
        if linear is not None:
            replaced[id(part)] = Int8Linear(*linear)
        elif isinstance(part, nn.Embedding):
            replaced[id(part)] = Float32Embedding(part)
    if not any(isinstance(new, Int8Linear) for new in replaced.values()):
        raise LoadError(f"{name} has no linear layers to quantise: int8 is not for this model")
    twin = copy.deepcopy(module, replaced)  # what has been replaced counts as copied already
    for owner in twin.modules():
        _to_float32(owner)
    return twin.eval()


def check_supported(device: torch.device) -> None:
    """Raises LoadError where int8 cannot be computed."""
    if device.type != "cpu":
        raise LoadError(f'dtype="int8" runs on CPUs only, not on {device}: use "bfloat16" there')
    try:
        activation_steps()
    except Exception as error:  # a missing operator is an AttributeError or a RuntimeError, as torch likes
        reason = str(error).splitlines()[0]
        raise LoadError(
            f'dtype="int8" needs quantised kernels, which this torch lacks ({reason}): use "bfloat16"'
        ) from error


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


def _linear(child: nn.Module) -> tuple[Tensor, Tensor | None] | None:
    """Weight [out, in] and bias of a linear layer; None for everything else."""
    kind = type(child).__name__
    if kind == "Conv1D" and hasattr(child, "nf"):  # GPT-2's: a linear layer with its weight transposed
        return child.weight.detach().t(), child.bias  # type: ignore[operator, return-value]
    if type(child) is nn.Linear or kind == "PackedLinear":
        return child.weight.detach(), child.bias  # type: ignore[operator, return-value]
    return None


def _to_float32(owner: nn.Module) -> None:
    stores: tuple[dict[str, Any], ...] = (owner._parameters, owner._buffers)
    for store in stores:
        for key, tensor in store.items():
            if tensor is not None and tensor.is_floating_point() and tensor.dtype != torch.float32:
                wide = tensor.detach().float()
                store[key] = nn.Parameter(wide, requires_grad=False) if store is owner._parameters else wide
