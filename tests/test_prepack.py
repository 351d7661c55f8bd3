"""Packed weights: the same bits, and nothing changed where they cannot be had."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from cascade import prepack as prepack_module
from cascade.prepack import PackedLinear, prepack, unpacked


def model(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    out = nn.Sequential(nn.Linear(64, 96), nn.Sequential(nn.SiLU(), nn.Linear(96, 32, bias=False)))
    return out.to(dtype).requires_grad_(False)


def test_packed_weights_keep_every_bit_at_every_width() -> None:
    plain, packed = model(torch.bfloat16), model(torch.bfloat16)
    count = prepack(packed)
    assert count in (0, 2), "all or none: the kernels are there or not"
    for width in range(1, 40):
        x = torch.randn(1, width, 64).bfloat16()
        same = torch.equal(plain(x), packed(x))
        assert same or width == 1 or not count
    if count:
        assert isinstance(packed[0], PackedLinear)
        assert torch.equal(packed[0].weight, plain[0].weight)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_other_dtypes_stay(dtype: torch.dtype) -> None:
    assert prepack(model(dtype)) == 0


def test_nothing_happens_without_the_kernels(monkeypatch) -> None:
    monkeypatch.setattr(prepack_module, "_supported", lambda: False)
    layers = model(torch.bfloat16)
    assert prepack(layers) == 0
    assert type(layers[0]) is nn.Linear


def test_unpacked_for_a_while_is_the_model_as_it_was_loaded() -> None:
    plain, packed = model(torch.bfloat16), model(torch.bfloat16)
    prepack(packed)
    before = list(packed.modules())
    with unpacked(packed):
        assert all(type(part) is not PackedLinear for part in packed.modules())
        for width in (1, 2, 8):
            x = torch.randn(width, 64).bfloat16()
            assert torch.equal(plain(x), packed(x))
    assert [id(part) for part in packed.modules()] == [id(part) for part in before]


@pytest.mark.parametrize("trained", [True, False])
def test_an_unpacked_weight_is_as_trainable_as_it_was(trained: bool) -> None:
    layers = model(torch.bfloat16).requires_grad_(trained)
    prepack(layers)
    with unpacked(layers):
        assert layers[0].weight.requires_grad is trained
