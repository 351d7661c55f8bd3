"""int8 copies: close to their model, the same bits in any company, and nothing taken from the original."""

from __future__ import annotations

import copy
import random

import pytest
import torch
from torch import nn

from cascade import int8, quantize
from cascade.errors import LoadError
from cascade.int8 import Int8Linear, Joint, JointLinear
from cascade.model import load
from cascade.quantize import Float32Embedding, quantized
from cascade.rows import Feed
from tests.tiny import FOUR, VOCAB, tiny

pytestmark = pytest.mark.skipif(
    "onednn" not in torch.backends.quantized.supported_engines
    and "fbgemm" not in torch.backends.quantized.supported_engines,
    reason="this build of torch has no int8 kernels",
)


def linear(inputs: int = 96, outputs: int = 80, bias: bool = True) -> tuple[nn.Linear, torch.Generator]:
    generator = torch.Generator().manual_seed(0)
    layer = nn.Linear(inputs, outputs, bias=bias)
    for parameter in layer.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator)
    return layer, generator


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shift", [0.0, 3.0, -20.0])
def test_a_layer_is_close_to_the_one_it_stands_for(bias: bool, shift: float) -> None:
    layer, generator = linear(bias=bias)
    x = torch.randn(2, 7, 96, generator=generator) + shift
    x[0, 0] *= 1000  # one huge token must not coarsen the others
    found, wanted = Int8Linear(layer.weight, layer.bias)(x), layer(x)
    assert found.dtype == torch.float32
    error = (found - wanted).norm(dim=-1) / (x.norm(dim=-1) * layer.weight.norm())
    assert error.max() < 0.003


def test_a_token_has_the_same_bits_in_any_company() -> None:
    layer, generator = linear()
    eight, x = Int8Linear(layer.weight, layer.bias), torch.randn(40, 96, generator=generator)
    x[5] *= 100
    alone = torch.cat([eight(row[None]) for row in x])
    for count in (2, 3, 8, 40):
        assert torch.equal(eight(x[:count]), alone[:count])


def test_constant_and_empty_inputs_are_no_special_case() -> None:
    layer, _ = linear()
    eight = Int8Linear(layer.weight, layer.bias)
    torch.testing.assert_close(eight(torch.zeros(3, 96)), layer.bias.expand(3, -1).detach())
    torch.testing.assert_close(eight(torch.full((1, 96), 2.0)), layer(torch.full((1, 96), 2.0)), rtol=0.02, atol=0.5)
    assert eight(torch.zeros(0, 96)).shape == (0, 80)


@pytest.mark.parametrize("steps", [255, 127])
def test_both_ranges_of_activations_work(steps: int, monkeypatch) -> None:
    monkeypatch.setattr(int8, "activation_steps", lambda: steps)
    layer, generator = linear()
    x = torch.randn(3, 96, generator=generator)
    torch.testing.assert_close(Int8Linear(layer.weight, layer.bias)(x), layer(x).detach(), rtol=0, atol=1.5)


@pytest.mark.parametrize("family", FOUR)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_copy_agrees_with_its_model(family: str, dtype: torch.dtype) -> None:
    target = load(tiny(family, dtype))
    draft = load("self", dtype="int8", target=target)
    assert (draft.dtype, draft.vocab_size, draft.end_ids) == ("int8", VOCAB, target.end_ids)
    text = random.Random(1).choices(range(VOCAB), k=60)
    found, wanted = (m.forward([Feed(m.new_row(), text, 60)]).float() for m in (draft, target))
    assert found.dtype == torch.float32
    assert ((found - wanted).norm(dim=-1) / wanted.norm(dim=-1)).mean() < 0.1
    assert (found.argmax(-1) == wanted.argmax(-1)).float().mean() > 0.8


@pytest.mark.parametrize("family", FOUR)
def test_embeddings_are_shared_and_the_original_is_left_alone(family: str) -> None:
    module = tiny(family, torch.bfloat16).train()
    before = {key: (value.data_ptr(), value.clone()) for key, value in module.state_dict().items()}
    twin = quantized(module, family)
    table = module.get_input_embeddings().weight
    assert twin.get_input_embeddings().weight.data_ptr() == table.data_ptr()
    assert not [name for name, part in twin.named_modules() if type(part).__name__ in ("Linear", "Conv1D", "Embedding")]
    assert isinstance(twin.get_output_embeddings(), Int8Linear)
    assert {tensor.dtype for tensor in (*twin.parameters(), *twin.buffers()) if tensor.is_floating_point()} <= {
        torch.float32
    }
    assert all(part.training for part in module.modules())
    for key, value in module.state_dict().items():
        assert (value.data_ptr(), value.dtype) == (before[key][0], torch.bfloat16)
        assert torch.equal(value, before[key][1])


def test_a_copy_is_a_target_only_where_the_probe_allows_it(monkeypatch) -> None:
    module = tiny("llama", torch.float32)
    assert load(module, dtype="int8").probed.width  # integer sums: the same bits in any company

    def per_forward(self: Int8Linear, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.quantized.linear_dynamic(x.float(), self._packed, False)

    monkeypatch.setattr(Int8Linear, "forward", per_forward)
    monkeypatch.setitem(__import__("cascade.probe").probe.TOLERANCE, "int8", 2.0)
    with pytest.raises(LoadError, match="LlamaForCausalLM in int8 cannot be a target"):
        load(module, dtype="int8")
    assert load(module, dtype="int8", role="draft").exactness.startswith("no: ")


def test_what_cannot_be_quantised_is_refused(monkeypatch) -> None:
    with pytest.raises(LoadError, match="runs on CPUs only, not on meta"):
        quantized(nn.Linear(2, 2, device="meta"), "there")
    with pytest.raises(LoadError, match="thing has no linear layers"):
        quantized(nn.Embedding(2, 2), "thing")

    def missing() -> int:
        raise RuntimeError("Didn't find engine for operation\nsecond line")

    monkeypatch.setattr(quantize, "activation_steps", missing)
    with pytest.raises(LoadError, match=r"lacks \(Didn't find engine for operation\)"):
        quantized(nn.Linear(2, 2), "here")


def test_a_shared_layer_stays_shared() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = self.two = nn.Linear(8, 8)
            self.table = nn.Embedding(4, 8)

    twin = quantized(Twice(), "twice")
    assert twin.one is twin.two
    assert isinstance(twin.table, Float32Embedding)
    assert copy.deepcopy(twin).one(torch.ones(1, 8)).shape == (1, 8)


def test_the_compiled_loops_do_what_torch_would() -> None:
    layer, generator = linear(960, 200)
    eight = Int8Linear(layer.weight, layer.bias)
    for rows in (1, 3, 40):
        x = torch.randn(rows, 960, generator=generator) * torch.randn(rows, 1, generator=generator)
        low, high = torch.aminmax(x, dim=-1, keepdim=True)
        size = (high - low).clamp_min(int8.TINY)
        product = int8._product((x - low) / size, eight._steps, eight._packed)
        torch.testing.assert_close(eight(x), product * size + (low * eight._sums + layer.bias), rtol=1e-6, atol=1e-5)


def test_what_is_no_number_stays_none() -> None:
    layer, generator = linear()
    x = torch.randn(3, 96, generator=generator)
    x[1, 5] = float("nan")
    found = Int8Linear(layer.weight, layer.bias)(x).isnan()
    assert found[1].all()
    assert not found[[0, 2]].any()


def test_layers_with_one_input_are_one_product_and_give_what_each_would(monkeypatch) -> None:
    layers = [linear(64, outputs, bias=outputs != 32)[0] for outputs in (96, 32, 48)]
    joint = Joint([(layer.weight.detach(), layer.bias) for layer in layers])
    parts = [JointLinear(joint, i, 64) for i in range(3)]
    products = []
    forward = Int8Linear.forward
    monkeypatch.setattr(Int8Linear, "forward", lambda self, x: products.append(self) or forward(self, x))
    first, second = torch.randn(2, 5, 64), torch.randn(2, 5, 64)
    for x in (first, second, first):
        found = [parts[i](x) for i in (1, 0, 2)]
        for out, i in zip(found, (1, 0, 2), strict=True):
            assert torch.equal(out, forward(Int8Linear(layers[i].weight, layers[i].bias), x))
    assert len(products) == 3
    parts[0](first), parts[0](first)  # asked twice for the same: computed anew, never another's part
    assert len(products) == 5
    for i in (1, 2):
        parts[i](first)
    assert joint._input is None  # nothing is kept alive


def test_a_model_has_its_sibling_layers_joined() -> None:
    twin = quantized(tiny("llama", torch.bfloat16), "twin")
    attention, mlp = twin.model.layers[0].self_attn, twin.model.layers[0].mlp
    assert attention.q_proj.joint is attention.k_proj.joint is attention.v_proj.joint
    assert mlp.gate_proj.joint is mlp.up_proj.joint
    assert isinstance(mlp.down_proj, Int8Linear)


def test_few_tokens_get_int4_weights_and_many_int8_ones() -> None:
    layer, generator = linear(128, 80)
    eight, four = Int8Linear(layer.weight, layer.bias), Int8Linear(layer.weight, layer.bias)
    int8.narrow(four)
    for rows in range(1, 3 * int8.NARROW):
        x = torch.randn(rows, 128, generator=generator)
        exact = layer(x).detach()
        error = float((four(x) - exact).norm() / exact.norm())
        assert torch.equal(four(x), eight(x)) == (rows > int8.NARROW)
        assert error < (0.1 if rows <= int8.NARROW else 0.01)
    assert four(torch.randn(1, 2, 128)).shape == (1, 2, 80)


def test_weights_that_int4_had_come_back_as_they_were() -> None:
    """A 4-bit checkpoint, de-quantised and quantised again, loses next to nothing."""
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 16, (48, 4, int8.GROUP), generator=generator)
    codes[..., 0], codes[..., 1] = 0, 15  # the whole range is in use
    weight = ((codes - 7) * 0.01).float().view(48, -1)
    four = Int8Linear(weight, None)
    int8.narrow(four)
    x = torch.randn(2, weight.shape[1], generator=generator)
    exact = x @ weight.t()
    assert (four(x) - exact).norm() / exact.norm() < 0.01


def test_a_shape_without_int4_kernel_stays_int8() -> None:
    layer, generator = linear(100, 80)
    four, eight = Int8Linear(layer.weight, layer.bias), Int8Linear(layer.weight, layer.bias)
    int8.narrow(four)
    x = torch.randn(1, 100, generator=generator)
    assert torch.equal(four(x), eight(x))


def test_int4_is_for_drafts_only_and_says_what_it_is() -> None:
    target = load(tiny("llama", torch.float32))
    draft = load("self", dtype="int4", target=target)
    assert draft.dtype == "int4"
    assert draft.exactness == "no: forwards on few tokens have coarser weights"
    with pytest.raises(LoadError, match="in int4 cannot be a target"):
        load(tiny("llama", torch.float32), dtype="int4")
    with pytest.raises(LoadError, match=r"the target is int8 already, there is no int4 copy"):
        load("self", dtype="int4", target=load(tiny("llama", torch.float32), dtype="int8"))


def test_a_torch_without_int4_kernels_is_named(monkeypatch) -> None:
    layer, _ = linear(64, 80)

    def missing(self, weight: torch.Tensor) -> None:
        raise RuntimeError("no such operator\nsecond line")

    monkeypatch.setattr(int8.Narrow, "__init__", missing)
    with pytest.raises(LoadError, match=r'dtype="int4" needs kernels that this torch lacks \(no such operator\)'):
        int8.narrow(Int8Linear(layer.weight, layer.bias))
