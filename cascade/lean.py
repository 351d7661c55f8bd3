"""Decoder layers of quantised copies, computed without the many small steps of their modules.

With weights this small, a forward on one token spends much of its time between the products: on Qwen2.5-0.5B in
int4, 15 ms instead of 17 when it is done like this. What most families share (Llama, Mistral, Qwen2: RMS norms,
rotary positions, a gated feed-forward) is written out here, with compiled loops for what torch has no one operator
for. Whether a layer is of that kind is not read off its name: both ways are computed at load, and a layer that
differs is left as it is.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba import njit
from numpy.typing import NDArray
from torch import Tensor, nn

from cascade.driving import current_job, driving
from cascade.int8 import Int8Linear, JointLinear

Floats = NDArray[np.float32]

TOLERANCE = 1e-4  # of what a layer adds to half of the tokens: rounding the other way changes some by more
TOKENS = 16


class LeanLayer(nn.Module):
    """A decoder layer in its place in the model.

    Outside of the engine's forwards it is the layer itself, and where positions do not turn whole heads.

    Args:
        layer: with joint projections, see `cascade.quantize`.
        scale: of the attention scores.

    Raises:
        AttributeError, TypeError: the layer does not have the parts of the usual kind.
    """

    def __init__(self, layer: Any, scale: float) -> None:
        super().__init__()
        attention, mlp = layer.self_attn, layer.mlp
        self.layer, self.attention, self.activation = layer, attention, mlp.act_fn
        self._scale, self._head_size = scale, attention.head_dim
        self._heads = [size // self._head_size for size in attention.q_proj.joint.sizes]
        self.project, self.output = attention.q_proj.joint.product, attention.o_proj
        self.rise, self.fall = mlp.gate_proj.joint.product, mlp.down_proj
        if not all(isinstance(part, Int8Linear) for part in (self.output, self.fall)):
            raise TypeError("a projection is not quantised")
        norms = layer.input_layernorm, layer.post_attention_layernorm
        self._norms = [(norm.weight.detach().numpy(), float(norm.variance_epsilon)) for norm in norms]

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:  # models read what kind of attention a layer has off the layer
            return getattr(super().__getattr__("layer"), name)

    def forward(
        self, hidden_states: Tensor, attention_mask: Any = None, position_embeddings: Any = None, **options: Any
    ) -> Tensor:
        """[1, S, hidden] -> [1, S, hidden], as the layer does."""
        job = current_job()
        if job is None or position_embeddings is None or position_embeddings[0].shape[-1] != self._head_size:
            options.update(attention_mask=attention_mask, position_embeddings=position_embeddings)
            return self.layer(hidden_states, **options)
        query, key, value = self._rotated(self.project(self._normed(hidden_states, 0)), *position_embeddings)
        seen = job.attention(self.attention, query, key, value, attention_mask, scale=self._scale)
        hidden_states = hidden_states + self.output(seen.flatten(2))
        gate, up = self.rise(self._normed(hidden_states, 1)).chunk(2, -1)
        return hidden_states + self.fall(self.activation(gate) * up)

    def _normed(self, x: Tensor, which: int) -> Tensor:
        out = torch.empty_like(x)
        _norm(x.numpy()[0], *self._norms[which], out.numpy()[0])
        return out

    def _rotated(self, joint: Tensor, cos: Tensor, sin: Tensor) -> list[Tensor]:
        """Queries [1, Hq, S, D], keys and values [1, H, S, D] from their common product [1, S, (Hq + 2 H) D]."""
        parts = [torch.empty(1, heads, joint.shape[1], self._head_size) for heads in self._heads]
        _rotate(joint.numpy()[0], cos.numpy()[0], sin.numpy()[0], *(part.numpy()[0] for part in parts))
        return parts


def lean(module: nn.Module) -> int:
    """Replaces those layers of a quantised model that are of the usual kind; returns how many."""
    count = 0
    for layers in [part for part in module.modules() if isinstance(part, nn.ModuleList)]:
        for index, layer in enumerate(layers):
            found = _lean(layer)
            if found is not None:
                layers[index], count = found, count + 1
    return count


class _Trial:
    """Stands for a forward: notes how a layer calls its attention, and mixes what it hands over, all of it."""

    def __init__(self) -> None:
        self.scale, self.usual = 0.0, False

    def attention(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, scale: float, **options: Any
    ) -> Tensor:
        self.scale = scale
        self.usual = options.get("softcap") is None and options.get("s_aux") is None
        groups = query.shape[1] // key.shape[1]
        return (query + (2 * key + 3 * value).repeat_interleave(groups, 1)).transpose(1, 2) / 8


def _lean(layer: Any) -> LeanLayer | None:
    """What can stand in the place of `layer`; None unless it computes the same."""
    if not isinstance(getattr(getattr(layer, "self_attn", None), "q_proj", None), JointLinear):
        return None
    theirs, attention = _Trial(), layer.self_attn
    try:
        size, head = attention.q_proj.in_features, attention.head_dim
        x = torch.linspace(-99, 99, TOKENS * size).view(1, TOKENS, size).sin()
        angles = torch.linspace(0, 99, TOKENS * head).view(1, TOKENS, head)
        given = {"attention_mask": None, "position_embeddings": (angles.cos(), angles.sin())}
        with torch.inference_mode(), driving([attention.config], theirs):
            expected = layer(x, **given)
        found = LeanLayer(layer, theirs.scale)
        with torch.inference_mode(), driving([attention.config], _Trial()):
            error = ((found(x, **given) - expected).norm(dim=-1) / (expected - x).norm(dim=-1)).median()
    except Exception:  # whatever the code of a model wants that is not given to it here
        return None
    return found if theirs.usual and error <= TOLERANCE else None


@njit(cache=True, fastmath={"reassoc", "contract", "nsz"})
def _norm(x: Floats, weight: Floats, epsilon: float, out: Floats) -> None:
    """The RMS norm of each row of x [S, hidden]."""
    for row in range(len(x)):
        total = np.float32(0)
        for i in range(x.shape[1]):
            total += x[row, i] * x[row, i]
        factor = np.float32(1 / np.sqrt(total / x.shape[1] + epsilon))
        for i in range(x.shape[1]):
            out[row, i] = weight[i] * (x[row, i] * factor)


@njit(cache=True, fastmath={"contract", "nsz"})
def _rotate(joint: Floats, cos: Floats, sin: Floats, query: Floats, key: Floats, value: Floats) -> None:
    """Splits joint [S, (Hq + 2 H) D] into heads [., S, D], and turns queries and keys by the angles of their position.

    Rotary positions (Su et al. 2021, section 3.4.2) in the layout of transformers: an angle's pair is D/2 apart.
    """
    half = cos.shape[1] // 2
    for row in range(len(joint)):
        start = 0
        for part in (query, key):
            for head in range(len(part)):
                for i in range(half):
                    a, b = joint[row, start + i], joint[row, start + half + i]
                    part[head, row, i] = a * cos[row, i] - b * sin[row, i]
                    part[head, row, half + i] = b * cos[row, half + i] + a * sin[row, half + i]
                start += 2 * half
        for head in range(len(value)):
            for i in range(2 * half):
                value[head, row, i] = joint[row, start + i]
            start += 2 * half
