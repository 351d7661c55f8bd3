"""int8 copies of models: a draft level without a second model, at half the memory traffic of bfloat16."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from cascade.errors import LoadError

STEPS = 127.0


class Int8Linear(nn.Module):
    """A linear layer with int8 weights, one scale per output, and activations rounded to 8 bits per token.

    torch's dynamic operator takes one scale from all tokens of a forward, so that a token's result
    depends on its company, and the huge first token of a text coarsens every other one. Here each token
    is divided by its own largest magnitude first, and the operator is given the scale 1/127: then sums
    are exact integers and a token's result has the same bits whatever shares the forward.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self._packed = _pack(weight)
        self.register_buffer("bias", None if bias is None else bias.detach().float().clone(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out], float32."""
        x = x.float()
        scale = x.abs().amax(-1, keepdim=True).clamp_min_(1e-20)
        out = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32(x / scale, 1 / STEPS, 128, self._packed)
        out.mul_(scale)
        return out if self.bias is None else out.add_(self.bias)

    def __deepcopy__(self, memo: dict) -> Int8Linear:
        return self  # nothing in it ever changes


class Float32Output(nn.Module):
    """An embedding whose table stays in its own dtype, shared with whoever has it, and gives float32."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    @property
    def weight(self) -> Tensor:
        """The table."""
        return self.inner.weight  # type: ignore[return-value]

    def forward(self, ids: Tensor) -> Tensor:
        """[...] -> [..., size], float32."""
        return self.inner(ids).float()


def quantized(module: nn.Module, name: str) -> nn.Module:
    """An int8 copy of a model: linear layers quantised, embeddings shared, all the rest in float32.

    The model itself is left as it is. Linear layers are those of torch, the head included, and the
    transposed ones of GPT-2.

    Args:
        module: a transformers model.
        name: how errors call it.

    Raises:
        LoadError: this device or build of torch has no int8 kernels, or there is nothing to quantise.
    """
    check_supported(next(module.parameters()).device)
    shared = {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())}
    twin = copy.deepcopy(module, dict(shared))
    if not _replace(twin):
        raise LoadError(f"{name} has no linear layers to quantise: int8 is not for this model")
    for owner in twin.modules():
        if not isinstance(owner, nn.Embedding):
            _to_float32(owner)
    return twin.requires_grad_(False).eval()


def check_supported(device: torch.device) -> None:
    """Raises LoadError where int8 cannot be computed."""
    if device.type != "cpu":
        raise LoadError(f'dtype="int8" runs on CPUs only, not on {device}: use "bfloat16" there')
    try:
        Int8Linear(torch.eye(2), None)(torch.ones(1, 2))
    except Exception as error:  # an operator that is missing raises AttributeError or RuntimeError, as torch likes
        raise LoadError(f'dtype="int8" needs quantised kernels, which this build of torch lacks: {error}') from error


def _replace(twin: nn.Module) -> int:
    """Puts Int8Linear in place of linear layers, each shared one once; returns how many."""
    made: dict[int, nn.Module] = {}
    for parent in list(twin.modules()):
        for key, child in list(parent.named_children()):
            if id(child) not in made:
                found = _linear(child)
                if found is not None:
                    made[id(child)] = Int8Linear(*found)
                elif isinstance(child, nn.Embedding):
                    made[id(child)] = Float32Output(child)
                else:
                    continue
            setattr(parent, key, made[id(child)])
    return sum(isinstance(new, Int8Linear) for new in made.values())


def _linear(child: nn.Module) -> tuple[Tensor, Tensor | None] | None:
    """Weight [out, in] and bias of a linear layer; None for everything else."""
    kind = type(child)
    if kind.__name__ == "Conv1D" and kind.__module__.startswith("transformers"):
        return child.weight.detach().t(), child.bias  # type: ignore[operator, return-value]
    if kind is nn.Linear or kind.__name__ == "PackedLinear":
        return child.weight.detach(), child.bias  # type: ignore[operator, return-value]
    return None


def _to_float32(owner: nn.Module) -> None:
    for store in (owner._parameters, owner._buffers):
        for key, tensor in store.items():
            if tensor is not None and tensor.is_floating_point() and tensor.dtype != torch.float32:
                wide = tensor.detach().float()
                store[key] = nn.Parameter(wide, requires_grad=False) if store is owner._parameters else wide


def _pack(weight: Tensor) -> object:
    """The weight [out, in] in the layout of the int8 kernels."""
    weight = weight.detach().float()
    scales = (weight.abs().amax(1) / STEPS).clamp_min(1e-20).double()
    with warnings.catch_warnings():
        # torch calls the tensors deprecated; what takes their place has no kernel for few tokens that is as fast
        warnings.simplefilter("ignore")
        zeros = torch.zeros(len(scales), dtype=torch.long)
        return torch.ops.quantized.linear_prepack(
            torch.quantize_per_channel(weight, scales, zeros, 0, torch.qint8), None
        )


def linears(module: nn.Module) -> Iterator[nn.Module]:
    """The quantised layers of a model."""
    return (child for child in module.modules() if isinstance(child, Int8Linear))
