"""Decoder layers written out: as good as the modules they stand for, and only where they are of that kind."""

from __future__ import annotations

import random

import pytest
import torch

from cascade import lean as lean_file
from cascade.driving import current_job, driving
from cascade.lean import LeanLayer, lean
from cascade.model import load
from cascade.rows import Feed
from tests.test_quantize import pytestmark as pytestmark  # int8 kernels are needed here, too
from tests.tiny import VOCAB, tiny

USUAL = {"llama": {}, "qwen2": {}, "mistral": {}}
TEXT = random.Random(3).choices(range(VOCAB), k=40)


def layers(model) -> list[torch.nn.Module]:
    return list(model.module.model.layers)


def logits(model, text=TEXT, widths=(40,)) -> torch.Tensor:
    row, start, found = model.new_row(), 0, []
    for width in widths:
        found.append(model.forward([Feed(row, text[start : start + width], width)]).float())
        start += width
    return torch.cat(found)


@pytest.fixture
def draft(monkeypatch):
    def build(family: str, usual: bool = True, dtype: str = "int8", **changes):
        if not usual:
            monkeypatch.setattr("cascade.loading.lean", lambda module: 0)
        model = load("self", dtype=dtype, target=load(tiny(family, torch.bfloat16, **changes)))
        monkeypatch.undo()
        return model

    return build


@pytest.mark.parametrize("family", USUAL)
@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_the_usual_layers_are_written_out_and_compute_what_their_modules_do(draft, family: str, dtype: str) -> None:
    found, wanted = draft(family, dtype=dtype), draft(family, usual=False, dtype=dtype)
    assert all(isinstance(layer, LeanLayer) for layer in layers(found))
    assert not any(isinstance(layer, LeanLayer) for layer in layers(wanted))
    ours, theirs = logits(found), logits(wanted)
    assert (ours - theirs).norm() <= 0.01 * theirs.norm()
    assert (ours.argmax(-1) == theirs.argmax(-1)).float().mean() >= 0.9


def test_a_token_has_the_same_bits_in_any_company(draft) -> None:
    model = draft("llama")
    assert model.exactness.startswith("yes")
    whole = logits(model)
    for widths in ((1,) * 40, (7, 20, 13), (3, 37)):
        assert torch.equal(logits(model, widths=widths), whole)


def test_a_window_is_kept(draft) -> None:
    model = draft("mistral")  # each of 2 layers sees 8 tokens back: what lies 16 back cannot matter
    changed = [(token + 1) % VOCAB for token in TEXT[:20]] + TEXT[20:]
    assert torch.equal(logits(model)[-1], logits(model, changed)[-1])
    assert not torch.equal(logits(model)[25], logits(model, changed)[25])


@pytest.mark.parametrize("family", ["gemma2", "gemma3", "gpt2", "gpt_oss"])
def test_other_layers_stay_as_they_are(draft, family: str) -> None:
    model = draft(family)
    assert not any(isinstance(part, LeanLayer) for part in model.module.modules())


def capped(forward):
    """An attention that asks for soft-capped scores."""

    def call(*args, **options):
        job = current_job()
        attention = job.attention
        job.attention = lambda *given, **more: attention(*given, softcap=30.0, **more)
        try:
            return forward(*args, **options)
        finally:
            del job.attention

    return call


@pytest.mark.parametrize("changed", ["norm", "scale", "order", "soft cap"])
def test_a_layer_that_looks_usual_and_is_not_stays_as_it_is(draft, monkeypatch, changed: str) -> None:
    model = draft("llama", usual=False)
    block = layers(model)[0]
    if changed == "norm":
        norm = block.input_layernorm
        monkeypatch.setattr(norm, "forward", lambda x, own=norm.forward: own(x) * 1.1)
    elif changed == "scale":
        monkeypatch.setattr(block.mlp, "forward", lambda x, own=block.mlp.forward: 0.9 * own(x))
    elif changed == "soft cap":  # of the scores, which are not computed where layers are compared
        monkeypatch.setattr(block.self_attn, "forward", capped(block.self_attn.forward))
    else:
        rotate = block.self_attn.forward
        monkeypatch.setattr(
            block.self_attn,
            "forward",
            lambda *args, position_embeddings, **rest: rotate(
                *args, position_embeddings=position_embeddings[::-1], **rest
            ),
        )
    assert lean(model.module) == 1
    assert [isinstance(layer, LeanLayer) for layer in layers(model)] == [False, True]


def test_outside_of_the_engines_forwards_a_layer_is_itself(draft, monkeypatch) -> None:
    found, wanted = draft("qwen2"), draft("qwen2", usual=False)
    monkeypatch.setattr(lean_file, "_norm", None)  # would fail if it were called
    assert torch.equal(found.reference([TEXT]), wanted.reference([TEXT]))


def test_positions_that_turn_part_of_a_head_are_left_to_the_layer(draft, monkeypatch) -> None:
    layer = layers(draft("llama"))[0]
    monkeypatch.setattr(layer.layer, "forward", lambda x, **options: x + 1)
    x, half = torch.zeros(1, 3, 64), torch.ones(1, 3, 8)
    with torch.inference_mode(), driving([], object()):
        for angles in ((half, half), None):
            assert torch.equal(layer(x, position_embeddings=angles), x + 1)


def test_a_layer_still_has_what_models_read_off_it(draft) -> None:
    layer = layers(draft("qwen2"))[0]
    layer.layer.attention_type = "full_attention"
    assert layer.attention_type == "full_attention"
    with pytest.raises(AttributeError):
        layer.nothing_like_it  # noqa: B018


def test_what_is_no_number_stays_none(draft) -> None:
    model = draft("llama")
    layers(model)[0].layer.input_layernorm.weight.data.fill_(float("nan"))
    assert logits(model).isnan().all()
