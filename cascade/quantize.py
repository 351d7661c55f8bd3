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
from typing import Any

import torch
from torch import Tensor, nn

from cascade.errors import LoadError
from cascade.int8 import Int8Linear, Joint, JointLinear, activation_steps

#: Layers that read the same input wherever a module has all of them: the names are those of nearly all families.
JOINT = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


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
        replaced.update(_joined(part))
        linear = _linear(part)
        if linear is not None and id(part) not in replaced:
            replaced[id(part)] = Int8Linear(*linear)
        elif isinstance(part, nn.Embedding):
            replaced[id(part)] = Float32Embedding(part)
    if not any(isinstance(new, (Int8Linear, JointLinear)) for new in replaced.values()):
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


def _joined(parent: nn.Module) -> dict[int, Any]:
    """The replacements, by id, of those of a module's layers that can be computed together."""
    replaced = {}
    for names in JOINT:
        children = [getattr(parent, name, None) for name in names]
        linears = [linear for child in children if child is not None and (linear := _linear(child)) is not None]
        if len(linears) == len(names) and len({weight.shape[1] for weight, _ in linears}) == 1:
            joint = Joint(linears)
            for index, child in enumerate(children):
                replaced[id(child)] = JointLinear(joint, index, linears[0][0].shape[1])
    return replaced


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
