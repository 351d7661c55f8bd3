"""Any causal language model of transformers behind the `CausalModel` protocol. No other file imports transformers.

A forward is packed: the tokens of all rows side by side as [1, S], with positions of their own, and an
attention function that lets each row's tokens see that row's keys only. transformers believes that it
computes one sequence under a mask somebody has prepared. Models that keep attention code of their own
run one row per forward instead.
"""

from __future__ import annotations

import inspect
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM, AutoTokenizer
from transformers.cache_utils import Cache
from transformers.masking_utils import sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import logging as transformers_logging

from cascade.attention import Plan, Span
from cascade.driving import NAME, current_job, driving, give_back, own_attention, take
from cascade.errors import LoadError, first_line
from cascade.kvrows import KVRow
from cascade.packing import PackedModel
from cascade.probe import ProbeResult, narrowest_product
from cascade.prompts import encode
from cascade.prompts import same_tokenizer as same_tokenizer
from cascade.rows import Feed
from cascade.survey import Survey


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """The attention that transformers calls: query [1, Hq, S, D] and keys [1, H, S, D] -> [1, S, Hq, Dv]."""
    job = current_job()
    if job is None:  # another thread uses the model by itself while one of ours is in a forward
        return _own_attention(module)(module, query, key, value, attention_mask, scaling=scaling, **options)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return job.attention(module, query, key, value, attention_mask, scale=scale, **options), None


def _mask(**options: Any) -> Tensor | None:
    """The mask that models build for this attention: a stand-in during a survey, else the usual one."""
    job = current_job()
    if isinstance(job, Survey):
        return job.mask(options["mask_function"], options.get("device"))
    return sdpa_mask(**options)


def _own_attention(module: nn.Module) -> Callable[..., Any]:
    """The attention function that a module would use if nobody drove it."""
    eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    name = own_attention(getattr(module, "config", None))
    return ALL_ATTENTION_FUNCTIONS.get(name, eager) or ALL_ATTENTION_FUNCTIONS["sdpa"]


class _Through(Cache):
    """The cache of packed forwards: hands keys and values on, since the attention function stores them."""

    base = 0

    def __init__(self) -> None:
        super().__init__(layers=[])

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Keys and values that the layer attends to."""
        return key_states, value_states

    def get_seq_length(self, *args: Any, **kwargs: Any) -> int:
        """Tokens cached before this forward."""
        return self.base

    get_query_offset = get_seq_length

    def get_mask_sizes(self, query_length: Any, *args: Any, **kwargs: Any) -> tuple[int, int]:
        """(keys attended to, position of the first)."""
        return self.base + int(query_length), 0

    def get_max_length(self, *args: Any, **kwargs: Any) -> int:
        """-1: no maximum."""
        return -1

    get_max_cache_shape = get_max_length  # its name up to transformers 5.15


class _RowCache(_Through):
    """The cache of a forward of one row, for attention code that is a model's own."""

    def __init__(self, row: KVRow, new: int, places: dict[int, int]) -> None:
        super().__init__()
        self.base, end = row.length, row.length + new
        row.reserve(end)
        self._new, self._all, self._places = row.span(self.base, end), row.span(0, end), places

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Writes the new keys and values into the row, and returns all of them."""
        layer = self._places[layer_idx]
        self._new[0][layer].copy_(key_states)
        self._new[1][layer].copy_(value_states)
        return self._all[0][layer], self._all[1][layer]


class _Recorder(_Through):
    """Notes which layers ask for a cache, and their shapes."""

    def __init__(self, survey: Survey) -> None:
        super().__init__()
        self.survey = survey
        self.places: dict[int, int] = {}

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Hands on what it notes."""
        self.places[layer_idx] = len(self.places)
        self.survey.note(key_states, value_states)
        return key_states, value_states


class TransformersModel(PackedModel):
    """A causal language model of transformers; see `CausalModel`.

    Attributes:
        module: the transformers model. It is in evaluation mode from the first engine's build to the last
            one's close; else, outside of forwards, it works as its owner left it.
        tokenizer: its tokenizer, or None.
        packed: whether one forward carries all rows; else there is one per row.
        parameters: how many the model has, whatever their precision.
        probed: what the probe found, or None.
    """

    def __init__(
        self,
        module: Any,
        name: str,
        tokenizer: Any = None,
        dtype: str | None = None,
    ) -> None:
        AttentionInterface.register(NAME, _attention)
        AttentionMaskInterface.register(NAME, _mask)
        self.module = module
        self.name, self.tokenizer = name, tokenizer
        config = module.config.get_text_config()
        limits = [getattr(config, key, None) for key in ("max_position_embeddings", "n_positions")]
        self.max_length = min((limit for limit in limits if isinstance(limit, int) and limit > 0), default=None)
        first = next(module.parameters())
        self.device, self.dtype = first.device, dtype or str(first.dtype).removeprefix("torch.")
        self.trees, self.exactness, self.parameters = True, "not probed", 0
        self.probed: ProbeResult | None = None
        take(module)
        self._taken = True
        parameters = inspect.signature(module.forward).parameters
        # transformers 5.24 renamed the keyword; the old name is still accepted there, with a warning
        self._cache_key = "cache" if "cache" in parameters else "past_key_values"
        self._takes_positions, self._takes_places = "position_ids" in parameters, "logits_to_keep" in parameters
        self._configs = list({id(m.config): m.config for m in module.modules() if hasattr(m, "config")}.values())
        self._through = _Through()
        self._stand_in = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=self.device)
        self.vocab_size = self._head_size()
        if tokenizer is not None:
            self.vocab_size = min(self.vocab_size, len(tokenizer))
        self.end_ids = self._end_ids()

    def _head_size(self) -> int:
        head = self.module.get_output_embeddings()
        size = getattr(head, "out_features", None)
        return int(size or self.module.config.get_text_config().vocab_size)

    def _end_ids(self) -> tuple[int, ...]:
        for config in (getattr(self.module, "generation_config", None), self.module.config.get_text_config()):
            found = getattr(config, "eos_token_id", None)
            if found is not None:
                return tuple(int(i) for i in found) if isinstance(found, (list, tuple)) else (int(found),)
        return ()

    def encode(self, prompt: Any) -> list[int]:
        """The ids of a prompt: a str as it is, chat messages through the template, ids unchanged."""
        return encode(self.tokenizer, prompt, self.name)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of `ids`; without a tokenizer the ids themselves, with spaces between."""
        if self.tokenizer is None:
            return " ".join(map(str, ids))
        return self.tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def close(self) -> None:
        """Gives the module back: every part in the mode (training or not) it was in."""
        if self._taken:
            self._taken = False
            give_back(self.module)

    def survey(self, packed: bool) -> None:
        """Runs one forward to learn the layers. Must be called before anything is fed."""
        survey, ids = Survey(self.max_length), torch.zeros(1, 2, dtype=torch.long, device=self.device)
        with torch.inference_mode():
            if packed:
                with driving(self._configs, survey):
                    self._call(ids, ids, None, self._through)
            else:
                recorder = _Recorder(survey)
                self._call(ids, torch.arange(2, device=self.device)[None], None, recorder)
                self._places = recorder.places
        if not survey.shapes:
            raise NotImplementedError("it has no attention layers with keys and values")
        self._survey, self.layout, self.packed = survey, survey.layout, packed
        self.trees = packed  # a model's own attention code may count slots where a tree needs positions

    def reference(self, texts: Sequence[Sequence[int]]) -> Tensor:
        """Logits of texts of one length [R, L] as the module computes them by itself: [R, L, vocab_size]."""
        self.module.eval()
        with torch.inference_mode():
            logits = self.module(input_ids=torch.tensor(texts, device=self.device), use_cache=False).logits
        return logits[..., : self.vocab_size].clone()

    def narrowest(self) -> int:
        """From how many tokens on the module's layers give the same bits as for more."""
        return narrowest_product(self.module)

    def _score(self, feeds: Sequence[Feed]) -> Tensor:
        if self.packed or len(feeds) == 1:
            return super()._score(feeds)
        return torch.cat([super(TransformersModel, self)._score([feed]) for feed in feeds])

    def _compute(self, spans: Sequence[Span], ids: list[int], positions: list[int], index: list[int]) -> Tensor:
        numbers = torch.tensor([ids, positions]).to(self.device)
        places = torch.tensor(index or [0]).to(self.device)
        if self.packed:
            plan = Plan(spans, self._survey.layers, self._survey.reaches, self.fine)
            with driving(self._configs, plan):
                logits = self._call(numbers[:1], numbers[1:], self._stand_in, self._through, places)
        else:
            cache = _RowCache(spans[0].row, len(ids), self._places)
            logits = self._call(numbers[:1], numbers[1:], None, cache, places)
        return logits[0]

    def _call(
        self, ids: Tensor, positions: Tensor, mask: Tensor | None, cache: Cache, places: Tensor | None = None
    ) -> Tensor:
        """Logits [1, len(places) or S, head size] of `ids` [1, S] at `positions` [1, S]."""
        if self.module.training:
            self.module.eval()
        options: dict[str, Any] = {"attention_mask": mask, self._cache_key: cache, "use_cache": True}
        if self._takes_positions:
            options["position_ids"] = positions
        if self._takes_places and places is not None:
            options["logits_to_keep"] = places
        logits = self.module(input_ids=ids, **options).logits
        return logits if places is None or self._takes_places else logits[:, places]


def load(
    ref: Any,
    device: Any = None,
    dtype: str | None = None,
    tokenizer: Any = None,
    target: Any = None,
    max_length: int | None = None,
    role: str | None = None,
    progress: Callable[[str], None] | None = None,
) -> TransformersModel:
    """Loads a model, tries it out, and returns what a level can use.

    Args:
        ref: a hub name, a folder, a GGUF file, a transformers model (used as it is, unless it must be
            copied for `device` or `dtype`), or "self", a copy of `target`.
        device: as torch names it.
        dtype: one of `cascade.config.DTYPES`. None: what an object has; for the rest bfloat16, or
            float32 on CPUs that are faster with it.
        tokenizer: a tokenizer, or where to find one; None: the model's own, if it comes with one.
        target: the cascade's target, when a lower level is loaded.
        max_length: an upper limit for the context, besides the model's own.
        role: "target" or "draft"; by default a target unless there is one.
        progress: called with a line of text before what takes long.

    Raises:
        LoadError: in one line, what cannot be loaded or driven, and why.
    """
    from cascade.loading import load_model

    with _quiet():
        return load_model(ref, device, dtype, tokenizer, target, max_length, role, progress or (lambda text: None))


def read_module(folder: str, dtype: torch.dtype, file: str | None, device: Any) -> nn.Module:
    """A model from a folder or the hub, or from the GGUF file `file` in a folder."""
    options = {"gguf_file": file} if file else {}
    try:
        module = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **options)
    except Exception as error:  # from a bad file to a lost connection: each library has its own
        where = f"{folder}/{file}" if file else folder
        hint = "" if os.path.isdir(folder) else ". A folder works offline"
        raise LoadError(f"cannot load the model {where!r}: {first_line(error).rstrip('.')}{hint}") from None
    if file:  # the weights are ordinary ones now
        module.hf_quantizer = None
        if hasattr(module.config, "quantization_config"):
            del module.config.quantization_config
    return module.to(device) if device is not None else module


def read_tokenizer(folder: str, file: str | None, required: bool = False) -> Any:
    """The tokenizer beside a model; None where there is none, unless it is `required`."""
    try:
        return AutoTokenizer.from_pretrained(folder, **({"gguf_file": file} if file else {}))
    except Exception as error:
        if required:
            raise LoadError(f"cannot load the tokenizer {folder!r}: {first_line(error)}") from error
        return None


@contextmanager
def _quiet() -> Iterator[None]:
    """Silences what libraries print and draw while they load."""
    hub, level, bars = logging.getLogger("huggingface_hub"), transformers_logging.get_verbosity(), transformers_logging
    shown, hub_level = bars.is_progress_bar_enabled(), hub.level
    transformers_logging.set_verbosity_error()
    hub.setLevel(logging.ERROR)
    bars.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        transformers_logging.set_verbosity(level)
        hub.setLevel(hub_level)
        if shown:
            bars.enable_progress_bar()
