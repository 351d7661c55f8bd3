"""bfloat16 weights in the layout that the CPU's matrix kernels want, so that no forward has to reorder them.

torch's own `Linear` hands oneDNN a plain matrix, which it works through in a slower way each time. With the
weight reordered once, a forward of SmolLM2-135M on 2 to 8 tokens takes 0.67 to 0.73 of the time (2 cores,
AVX-512 with bf16), and every logit keeps its bits; `prepack` checks both before it keeps the change.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class PackedLinear(nn.Module):
    """A `Linear` without gradients whose bfloat16 weight [out, in] is stored in blocks."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = linear.bias
        self._trained = linear.weight.requires_grad
        self._blocks = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach())

    @property
    def weight(self) -> Tensor:
        """The plain weight again, a copy."""
        return self._blocks.to_dense()

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        return torch.ops.mkldnn._linear_pointwise(x, self._blocks, self.bias, "none", [], "")

    def plain(self) -> nn.Linear:
        """An ordinary layer with the same weights, a copy.

        As trainable as the original: torch multiplies by a weight without gradients in another way, which for the
        head and the last position of a prompt copies all of it.
        """
        linear = nn.Linear(self.in_features, self.out_features, bias=self.bias is not None, device="meta")
        linear.weight = nn.Parameter(self.weight, requires_grad=self._trained)
        linear.bias = self.bias
        return linear


@contextmanager
def unpacked(module: nn.Module) -> Iterator[None]:
    """Puts ordinary layers in the place of packed ones for a while: the model as transformers itself runs it."""
    places = [
        (parent, name, child)
        for parent in module.modules()
        for name, child in parent.named_children()
        if isinstance(child, PackedLinear)
    ]
    try:
        for parent, name, child in places:
            setattr(parent, name, child.plain())
        yield
    finally:
        for parent, name, child in places:
            setattr(parent, name, child)


def prepack(module: nn.Module) -> int:
    """Replaces a model's bfloat16 `Linear`s on the CPU by packed ones; returns how many.

    Changes nothing where the kernels are missing or give other bits. Weights that several modules
    share (a tied head) stay where the others expect them, and the packed one is a copy.
    """
    packed = 0
    if not _supported():
        return packed
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear and child.weight.dtype == torch.bfloat16 and child.weight.device.type == "cpu":
                replacement = PackedLinear(child)
                if _same_bits(child, replacement):
                    setattr(parent, name, replacement)
                    packed += 1
    return packed


def _supported() -> bool:
    ops = torch.ops.mkldnn
    try:
        return bool(torch.backends.mkldnn.is_available() and ops._is_mkldnn_bf16_supported() and ops._linear_pointwise)
    except (AttributeError, RuntimeError):  # another build of torch
        return False


def _same_bits(plain: nn.Linear, packed: PackedLinear) -> bool:
    """Whether both give the same bits for a few tokens: widths that decoding uses."""
    with torch.inference_mode():
        x = torch.linspace(-2, 2, 8 * plain.in_features).view(8, -1).sin().to(plain.weight.dtype)
        try:
            return all(torch.equal(plain(x[:width]), packed(x[:width])) for width in (2, 8))
        except RuntimeError:
            return False
