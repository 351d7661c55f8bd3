"""Tiny random transformers models of several families, seeded, and a folder with one of them and a tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers as hf
from torch import nn

#: transformers 5.17 cannot stop a draft model in doubt while it looks up itself: the bench says so, and goes on.
NESTS = tuple(map(int, hf.__version__.split(".")[:2])) > (5, 17)
VOCAB = 211
LENGTH = 256
WINDOW = 8
COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": LENGTH,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GPT2 = {"vocab_size": VOCAB, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": LENGTH, "eos_token_id": 2}
SLIDING = {"sliding_window": WINDOW, "head_dim": 16}
MIXED = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "num_hidden_layers": 3}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "qwen2": ("Qwen2", {}),
    "gpt2": ("GPT2", GPT2),  # learned positions, as many key heads as query heads
    "gemma3": ("Gemma3Text", SLIDING | MIXED),
    "mistral": ("Mistral", SLIDING),  # every layer sliding
    "gemma2": ("Gemma2", SLIDING | {"query_pre_attn_scalar": 16}),  # soft-capped scores
    "gpt_oss": ("GptOss", SLIDING | MIXED | EXPERTS),  # attention sinks
    "bloom": ("Bloom", GPT2 | {"hidden_size": 64}),  # attention code of its own
    "mamba": ("Mamba", {"vocab_size": VOCAB, "hidden_size": 64, "num_hidden_layers": 2, "state_size": 8}),
}
FOUR = ("llama", "qwen2", "gpt2", "gemma3")
CLASSES = {"GPT2": "GPT2LMHeadModel", "Gemma3Text": "Gemma3ForCausalLM"}


def tiny(family: str, dtype: torch.dtype = torch.float64, seed: int = 0, **changes: Any) -> nn.Module:
    """A random model of a family, in evaluation mode. Weights are large enough that every layer matters."""
    name, options = FAMILIES[family]
    base = {} if name in ("GPT2", "Bloom", "Mamba") else COMMON
    config = getattr(hf, f"{name}Config")(**{**base, **options, **changes})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = getattr(hf, CLASSES.get(name, f"{name}ForCausalLM"))(config)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.mul_(3)
    return model.to(dtype).eval()


def padded_head(dtype: torch.dtype = torch.float64) -> nn.Module:
    """A Llama whose head has 45 more rows than there are tokens; the surplus would win every argmax."""
    model = tiny("llama", dtype, vocab_size=VOCAB + 45, tie_word_embeddings=False)
    model.lm_head.weight.data[VOCAB:] = model.lm_head.weight.data[:45] * 50
    return model


def tokenizer(vocab: int = VOCAB) -> Any:
    """A tokenizer of bytes with `vocab` tokens and a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = ["<pad>", "<s>", "</s>", *alphabet, *(f"<unused{i}>" for i in range(vocab))][:vocab]
    fast = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, [], unk_token="<pad>"))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    made = hf.PreTrainedTokenizerFast(tokenizer_object=fast, pad_token="<pad>", bos_token="<s>", eos_token="</s>")
    made.chat_template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    return made


def tiny_folder(tmp_path_factory: Any, family: str = "llama", **changes: Any) -> Path:
    """A folder with a tiny model in bfloat16 and a tokenizer of all bytes, as `save_pretrained` writes them."""
    folder: Path = tmp_path_factory.mktemp("tiny") / f"tiny-{family}"
    size = 3 + 256
    tiny(family, torch.bfloat16, vocab_size=size, **changes).save_pretrained(folder)
    tokenizer(size).save_pretrained(folder)
    return folder
