"""From a name, a folder, a file or an object to a model that has been tried out."""

from __future__ import annotations

import copy
import functools
import importlib.util
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear

from cascade.errors import LoadError, first_line
from cascade.int8 import narrow
from cascade.lean import lean
from cascade.model import TransformersModel, read_module, read_tokenizer
from cascade.prepack import PackedLinear, prepack
from cascade.probe import ProbeResult, probe
from cascade.quantize import quantized

HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
QUANTISED = ("int8", "int4")
FASTER = 1.25  # float32 must be this much faster before it is preferred to half the memory


def load_model(
    ref: Any,
    device: Any,
    dtype: str | None,
    tokenizer: Any,
    target: Any,
    max_length: int | None,
    role: str | None,
    progress: Callable[[str], None],
) -> TransformersModel:
    """See `cascade.model.load`."""
    if dtype is not None:
        dtype = str(dtype).removeprefix("torch.")
    if device is not None:
        try:
            torch.empty(0, device=device)
        except Exception as error:
            raise LoadError(f"device {str(device)!r} cannot be used here: {first_line(error)}") from error
    if isinstance(ref, str) and ref == "self":
        name, module, tokenizer = _copy_of(target, dtype, tokenizer)
    elif isinstance(ref, nn.Module):
        name, module = _name_of(ref), _converted(ref, device, dtype)
    elif isinstance(ref, (str, os.PathLike)):
        name, module, tokenizer = _read(os.fspath(ref), device, dtype, tokenizer, progress)
    else:
        raise LoadError(
            f"cannot make a model of a {type(ref).__name__}: give a hub name, a folder, a GGUF file or a "
            "transformers model"
        )
    _refuse(module, name)
    if isinstance(tokenizer, (str, os.PathLike)):
        tokenizer = read_tokenizer(os.fspath(tokenizer), None, required=True)
    if tokenizer is not None and not hasattr(tokenizer, "get_vocab"):
        raise LoadError(
            f"{name}: tokenizer must be a transformers tokenizer or where to find one, not {tokenizer!r:.60}"
        )
    parameters = _count(module)
    if dtype in QUANTISED:
        progress(f"quantising {name}")
        module = quantized(module, name)
    model = TransformersModel(module, name, tokenizer, dtype="int8" if dtype in QUANTISED else None)
    model.parameters = parameters
    if dtype in QUANTISED:
        lean(module)
    target_wanted = (role or ("draft" if target else "target")) == "target"
    model.by_path = target_wanted  # a draft's bits matter to nobody, and a mask is faster
    progress(f"trying out {name}")
    try:
        found = _try_out(model)
    except BaseException:
        model.close()
        raise
    if target_wanted and (dtype == "int4" or (dtype == "int8" and found.width is None)):
        raise LoadError(f"{name} in {dtype} cannot be a target: a token's logits depend on what shares its forward")
    if dtype == "int4":
        # After the trial, which compares forwards of all widths: few tokens now get coarser weights than many.
        narrow(module)
        model.dtype, model.exactness = "int4", "no: forwards on few tokens have coarser weights"
    # After the trial, too: what a model is does not depend on how much of its context is used.
    model.max_length = min((limit for limit in (model.max_length, max_length) if limit is not None), default=None)
    return model


def _read(
    ref: str, device: Any, dtype: str | None, tokenizer: Any, progress: Callable[[str], None]
) -> tuple[str, nn.Module, Any]:
    path, file = Path(ref).expanduser(), None
    if path.is_file():
        folder, file, name = str(path.parent), path.name, path.stem
        missing = [package for package in ("accelerate", "gguf") if importlib.util.find_spec(package) is None]
        if missing:
            raise LoadError(f"reading the GGUF file {ref!r} needs {' and '.join(missing)}: pip install accelerate gguf")
        progress(f"converting {path.name}")
    elif path.is_dir():
        folder, name = str(path), path.resolve().name
        if not (path / "config.json").is_file():
            raise LoadError(f"no model at {ref!r}: the folder has no config.json")
    elif HUB_NAME.fullmatch(ref) and not ref.startswith(".") and not ref.endswith(".gguf"):
        folder, name = ref, ref.rpartition("/")[2]
        progress(f"looking for {ref} on the Hugging Face hub")
    else:
        raise LoadError(f"no model at {ref!r}: no such file or folder")
    chosen = "bfloat16" if dtype in QUANTISED else dtype or preferred_dtype(str(device or "cpu"))
    module = read_module(folder, getattr(torch, chosen), file, device)
    if file is None and dtype not in QUANTISED:
        prepack(module)  # not what comes from a GGUF file: that is what one may want to save
    return name, module, tokenizer if tokenizer is not None else read_tokenizer(folder, file)


def _copy_of(target: Any, dtype: str | None, tokenizer: Any) -> tuple[str, nn.Module, Any]:
    if not isinstance(target, TransformersModel):
        raise LoadError('model="self" is a copy of the target, which must be a transformers model')
    if dtype is None:
        raise LoadError('model="self" needs a dtype, for example dtype="int8"')
    if target.dtype in QUANTISED:
        raise LoadError(f'model="self": the target is {target.dtype} already, there is no {dtype} copy of it')
    return f"{target.name} in {dtype}", _converted(target.module, None, dtype), tokenizer or target.tokenizer


def _converted(module: nn.Module, device: Any, dtype: str | None) -> nn.Module:
    """The module itself where it fits, else a copy; int8 is made of it later."""
    first = next(module.parameters())
    wanted = first.dtype if dtype in (None, *QUANTISED) else getattr(torch, str(dtype))
    place = first.device if device is None else torch.device(device)
    if wanted == first.dtype and place == first.device:
        return module
    memo: dict[int, Any] = {}
    for part in module.modules():
        if isinstance(part, PackedLinear):  # its blocks suit one dtype only
            memo[id(part)] = part.plain()
    return copy.deepcopy(module, memo).to(device=place, dtype=wanted)


def _count(module: Any) -> int:
    """How many parameters a model has, those in packed layers included and a tied head once."""
    tied = getattr(module.config.get_text_config(), "tie_word_embeddings", False)
    head = module.get_output_embeddings() if tied else None
    packed = [part for part in module.modules() if isinstance(part, PackedLinear) and part is not head]
    return sum(p.numel() for p in module.parameters()) + sum(p.in_features * p.out_features for p in packed)


def _name_of(module: nn.Module) -> str:
    path = str(getattr(getattr(module, "config", None), "_name_or_path", ""))
    return path.rstrip("/").rpartition("/")[2] or type(module).__name__


def _refuse(module: Any, name: str) -> None:
    """Raises LoadError for what is no causal model, or cannot go back to an earlier token."""
    if not hasattr(module, "config") or not callable(getattr(module, "get_output_embeddings", None)):
        raise LoadError(f"{name} is no language model of transformers")
    config = module.config.get_text_config()
    if getattr(module.config, "is_encoder_decoder", False):
        raise LoadError(f"{name} is an encoder-decoder model: cascade drives decoder-only language models")
    if module.get_output_embeddings() is None:
        raise LoadError(f"{name} has no language model head: load it as a model for causal language modelling")
    kinds = [kind for kind in getattr(config, "layer_types", None) or () if not str(kind).endswith("attention")]
    kinds += [kind for kind in getattr(config, "layer_types", None) or () if str(kind).startswith("linear")]
    if getattr(module, "_is_stateful", False) or kinds:
        what = f"layers of the kind {kinds[0]!r}" if kinds else f"a running state ({type(module).__name__})"
        raise LoadError(
            f"{name} has {what}, which cannot be rewound to an earlier token: speculation needs attention layers only"
        )


def _try_out(model: TransformersModel) -> ProbeResult:
    """Finds out how the model can be driven. Raises LoadError, naming it, if it cannot."""
    failure: LoadError | None = None
    for packed in (True, False) if getattr(model.module, "_supports_attention_backend", False) else (False,):
        try:
            model.survey(packed)
            found = probe(model)
        except LoadError as error:
            failure = error
        except Exception as error:  # whatever the model's own code raises
            failure = LoadError(f"cascade cannot drive {model.name}: {type(error).__name__}: {first_line(error)}")
            failure.__cause__ = error
        else:
            model.probed, model.trees, model.exactness = found, found.trees, found.exactness
            if not packed:
                model.exactness += "; its attention code is its own: one row per forward"
            model.width, model.fine = found.width or 1, found.fine
            model.by_path = model.by_path and found.tree_bits
            return found
    assert failure is not None
    raise failure


@functools.cache
def preferred_dtype(device: str) -> str:
    """bfloat16, unless float32 is faster: on CPUs that have no instructions for bfloat16.

    One matrix product of a middling model's size stands for a decode forward, which consists of them.
    """
    if not device.startswith("cpu"):
        return "bfloat16"
    x, weight = torch.ones(2, 1024), torch.full((4096, 1024), 0.01)

    def best(dtype: torch.dtype) -> float:
        a, b, times = x.to(dtype), weight.to(dtype), []
        for _ in range(8):
            began = time.perf_counter()
            linear(a, b)
            times.append(time.perf_counter() - began)
        return min(times)

    return "float32" if best(torch.bfloat16) > FASTER * best(torch.float32) else "bfloat16"
