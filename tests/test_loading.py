"""From names, folders, files and objects to models; prompts to ids; what is refused, in one line."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from cascade.errors import LoadError, PromptError
from cascade.model import TransformersModel, load, same_tokenizer
from cascade.rows import Feed
from tests.tiny import LENGTH, VOCAB, padded_head, tiny, tiny_folder, tokenizer


def plain(model: TransformersModel, ids: Sequence[int]) -> torch.Tensor:
    return model.reference([ids])[0]


def ids_of(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(3, VOCAB), k=length)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_folder(tmp_path_factory)


def test_a_folder_is_loaded_with_its_tokenizer(folder) -> None:
    lines: list[str] = []
    model = load(str(folder), dtype="bfloat16", progress=lines.append)
    assert (model.name, model.dtype, model.end_ids, model.max_length) == (folder.name, "bfloat16", (2,), LENGTH)
    assert model.vocab_size == len(model.tokenizer) == 259
    ids = model.encode("héllo")
    assert model.decode(ids) == "héllo"
    chat = model.encode([{"role": "user", "content": "hi"}])
    assert model.decode(chat) == "user: hi\nassistant: "
    assert model.decode([*ids, 2]) == "héllo"
    assert model.decode([2], skip_special_tokens=False) == "</s>"
    assert model.encode([5, 6]) == [5, 6]
    assert any("trying out" in line for line in lines)
    assert load(folder, dtype="float32", max_length=100).max_length == 100
    assert load(folder, dtype="float32", max_length=5).max_length == 5, "less than a model is tried out with"


def test_surplus_of_a_padded_head_is_cut_off() -> None:
    model = load(padded_head(), tokenizer=tokenizer())
    assert model.vocab_size == VOCAB
    assert load(padded_head()).vocab_size == VOCAB + 45
    logits = model.forward([Feed(model.new_row(), ids_of(1, 30), 30)])
    assert logits.shape == (30, VOCAB)
    assert model.reference([ids_of(1, 30)]).argmax(-1).max() < VOCAB


def test_self_is_a_copy_in_another_dtype(folder) -> None:
    target = load(str(folder), dtype="bfloat16")
    wide = load("self", dtype="float64", target=target)
    assert (wide.dtype, wide.name) == ("float64", "tiny-llama in float64")
    assert wide.tokenizer is target.tokenizer
    assert load("self", dtype="bfloat16", target=target).module is target.module
    text = ids_of(1, 20)
    torch.testing.assert_close(plain(wide, text).bfloat16(), plain(target, text), rtol=0.05, atol=0.05)
    with pytest.raises(LoadError, match="needs a dtype"):
        load("self", target=target)
    with pytest.raises(LoadError, match="copy of the target"):
        load("self", dtype="int8")


def test_an_int8_copy_of_a_loaded_model(folder) -> None:
    target = load(str(folder), dtype="bfloat16")
    draft = load("self", dtype="int8", target=target)
    assert (draft.name, draft.dtype, draft.vocab_size) == ("tiny-llama in int8", "int8", target.vocab_size)
    alike = load(str(folder), dtype="int8", target=target)
    text = ids_of(1, 20)
    assert torch.equal(plain(draft, text), plain(alike, text))
    with pytest.raises(LoadError, match="the target is int8 already"):
        load("self", dtype="bfloat16", target=draft)


def test_a_model_object_is_copied_only_where_it_must_be() -> None:
    module = tiny("llama", torch.float32)
    assert load(module).dtype == "float32"
    copied = load(module, dtype="bfloat16")
    assert copied.module is not module
    assert (copied.dtype, module.dtype) == ("bfloat16", torch.float32)


@pytest.mark.parametrize(
    ("ref", "message"),
    [
        ("./nothing", "no model at './nothing': no such file or folder"),
        ("some/where/else", "no model at 'some/where/else': no such file or folder"),
        ("model.gguf", "no model at 'model.gguf': no such file or folder"),
        ("what is this", "no model at 'what is this': no such file or folder"),
        (7, "cannot make a model of a int"),
    ],
)
def test_what_is_no_model_is_refused_in_one_line(ref: Any, message: str) -> None:
    with pytest.raises(LoadError, match=message.replace(".", r"\.")) as caught:
        load(ref)
    assert "\n" not in str(caught.value)


def test_a_folder_or_file_without_a_model_is_refused(tmp_path) -> None:
    with pytest.raises(LoadError, match=r"the folder has no config\.json"):
        load(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(LoadError, match="cannot load the model") as caught:
        load(str(tmp_path))
    assert "\n" not in str(caught.value)
    (tmp_path / "bad.gguf").write_text("no")
    with pytest.raises(LoadError, match=r"bad\.gguf"):
        load(str(tmp_path / "bad.gguf"))


def test_an_unreachable_hub_is_one_line(monkeypatch) -> None:
    def unreachable(*args: Any, **kwargs: Any) -> None:
        raise OSError("We couldn't connect to 'https://huggingface.co'.\nCheck your internet connection.")

    monkeypatch.setattr("cascade.model.AutoModelForCausalLM.from_pretrained", unreachable)
    with pytest.raises(
        LoadError, match=r"^cannot load the model 'some/model': We couldn't connect to '[^']*'(\. [^\n]*)?$"
    ):
        load("some/model", dtype="float32")


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (lambda: tiny("mamba"), "MambaForCausalLM has .* cannot be rewound"),
        (lambda: tiny("llama").model, "LlamaModel has no language model head"),
        (lambda: torch.nn.Linear(2, 2), "Linear is no language model"),
    ],
)
def test_models_that_cannot_serve_are_refused_by_name(module: Any, message: str) -> None:
    with pytest.raises(LoadError, match=message):
        load(module())


def test_a_gguf_file_becomes_an_ordinary_model(tmp_path) -> None:
    gguf = pytest.importorskip("gguf")
    pytest.importorskip("accelerate")
    module = tiny("llama", torch.float32, tie_word_embeddings=False)
    write_gguf(gguf, module, tmp_path / "small.gguf")
    model = load(str(tmp_path / "small.gguf"), dtype="float32")
    assert (model.name, model.dtype, model.tokenizer) == ("small", "float32", None)
    text = ids_of(1, 12)
    torch.testing.assert_close(plain(model, text), plain(load(module), text), rtol=0, atol=1e-4)
    model.module.save_pretrained(tmp_path / "saved")
    assert load(str(tmp_path / "saved"), dtype="float32").vocab_size == VOCAB


def write_gguf(gguf: Any, module: Any, path: Any) -> None:
    config, writer = module.config, gguf.GGUFWriter(str(path), "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(config.vocab_size)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for key, tensor in module.state_dict().items():
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
        for part, count in heads.items():  # GGUF interleaves what rotates together
            if part in key:
                tensor = tensor.view(count, 2, -1, tensor.shape[1]).transpose(1, 2).reshape(tensor.shape)
        name = names.get_name(key.removesuffix(".weight")) + ".weight"
        writer.add_tensor(name, tensor.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


# -- prompts ---------------------------------------------------------------------------------------


def test_prompts_that_need_what_is_missing_are_refused() -> None:
    bare = TransformersModel(tiny("llama"), "llama")
    assert bare.decode([5, 6]) == "5 6"
    with pytest.raises(PromptError, match="llama has no tokenizer"):
        bare.encode("hello")
    with pytest.raises(PromptError, match="a list of token ids or chat messages, not int"):
        bare.encode(7)
    bare.tokenizer = tokenizer()
    bare.tokenizer.chat_template = None
    with pytest.raises(PromptError, match="no chat template"):
        bare.encode([{"role": "user", "content": "hi"}])
    bare.tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(PromptError, match="refuses these messages: roles must alternate"):
        bare.encode([{"role": "user", "content": "hi"}])


def test_tokenizers_are_compared_by_what_ids_mean() -> None:
    class Named:
        def __init__(self, name: str, tokenizer: Any) -> None:
            self.name, self.tokenizer = name, tokenizer

    same_tokenizer(Named("a", tokenizer()), Named("b", tokenizer()))
    same_tokenizer(Named("a", tokenizer()), Named("b", None))
    with pytest.raises(LoadError, match=r"a and b .* id 211 is unused in the one and '.*' in the other"):
        same_tokenizer(Named("a", tokenizer()), Named("b", tokenizer(230)))
