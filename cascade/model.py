"""Any causal language model of transformers behind the `CausalModel` protocol. No other file imports transformers.

A forward is packed: the tokens of all rows side by side as [1, S], with positions of their own, and an
attention function that lets each row's tokens see that row's keys only. transformers believes that it
computes one sequence under a mask somebody has prepared. Models that keep attention code of their own
run one row per forward instead.
"""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache
from transformers.masking_utils import sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from cascade.attention import Plan, Reach, Span
from cascade.kvrows import KVRow
from cascade.packing import PackedModel
from cascade.survey import Survey

NAME = "cascade"

_thread = threading.local()
_lock = threading.Lock()
_driven: dict[int, list[Any]] = {}  # id of a config -> [forwards under way, the attention it came with]


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
    job = getattr(_thread, "job", None)
    if job is None:  # another thread uses the model by itself while one of ours is in a forward
        return _own_attention(module)(module, query, key, value, attention_mask, scaling=scaling, **options)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return job.attention(module, query, key, value, attention_mask, scale=scale, **options), None


def _mask(**options: Any) -> Tensor | None:
    """The mask that models build for this attention: a stand-in during a survey, else the usual one."""
    job = getattr(_thread, "job", None)
    if isinstance(job, Survey):
        return job.mask(options["mask_function"], options.get("device"))
    return sdpa_mask(**options)


def _own_attention(module: nn.Module) -> Callable[..., Any]:
    """The attention function that a module would use if nobody drove it."""
    entry = _driven.get(id(getattr(module, "config", None)))
    eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    name = entry[1] if entry else "sdpa"
    return ALL_ATTENTION_FUNCTIONS.get(name, eager) or ALL_ATTENTION_FUNCTIONS["sdpa"]


@contextmanager
def _driving(configs: Sequence[Any], job: Any) -> Iterator[None]:
    """Routes attention to `job` on this thread; outside a forward a model is as its owner left it."""
    with _lock:
        for config in configs:
            entry = _driven.setdefault(id(config), [0, config._attn_implementation])
            entry[0] += 1
            config._attn_implementation_internal = NAME
    _thread.job = job
    try:
        yield
    finally:
        _thread.job = None
        with _lock:
            for config in configs:
                entry = _driven[id(config)]
                entry[0] -= 1
                if not entry[0]:
                    config._attn_implementation_internal = entry[1]
                    del _driven[id(config)]


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
        module: the transformers model; outside of forwards it works as its owner left it.
        tokenizer: its tokenizer, or None.
        packed: whether one forward carries all rows.
    """

    def __init__(self, module: nn.Module, name: str, tokenizer: Any = None, max_length: int | None = None) -> None:
        _register()
        self.module: Any = module
        self.name, self.tokenizer = name, tokenizer
        self.max_length = max_length
        self.trees, self.exactness = True, "not probed"
        parameters = inspect.signature(module.forward).parameters
        # transformers 5.24 renamed the keyword; the old name is still accepted there, with a warning
        self._cache_key = "cache" if "cache" in parameters else "past_key_values"
        self._has_positions = "position_ids" in parameters
        self._has_index = "logits_to_keep" in parameters
        self._configs = list({id(m.config): m.config for m in module.modules() if hasattr(m, "config")}.values())
        self._through = _Through()
        self._modes = {m: m.training for m in module.modules()}
        self.device = next(module.parameters()).device
        self.packed = False

    def survey(self, packed: bool) -> None:
        """Runs one forward to learn the layers; must be called before anything is fed."""
        survey = Survey(self.max_length)
        self._fake = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=self.device)
        ids = torch.zeros(1, 2, dtype=torch.long, device=self.device)
        with torch.inference_mode():
            if packed:
                with _driving(self._configs, survey):
                    self._call(ids, ids, None, self._through)
            else:
                recorder = _Recorder(survey)
                self._call(ids, torch.arange(2, device=self.device)[None], None, recorder)
                self._places = recorder.places
        self._survey, self.layout, self.packed = survey, survey.layout, packed

    def _call(
        self, ids: Tensor, positions: Tensor, mask: Tensor | None, cache: Cache, index: Tensor | None = None
    ) -> Tensor:
        """Logits [1, len(index) or S, head size]."""
        if self.module.training:
            self.module.eval()
        options: dict[str, Any] = {"attention_mask": mask, self._cache_key: cache, "use_cache": True}
        if self._has_positions:
            options["position_ids"] = positions
        if self._has_index and index is not None:
            options["logits_to_keep"] = index
        logits = self.module(input_ids=ids, **options).logits
        return logits if self._has_index or index is None else logits[:, index]

    def _compute(self, spans: Sequence[Span], ids: list[int], positions: list[int], index: list[int]) -> Tensor:
        plan = Plan(spans, self._survey.layers, self._survey.reaches, self.fine)
        numbers = torch.tensor([ids, positions]).to(self.device)
        places = torch.tensor(index or [0]).to(self.device)
        with _driving(self._configs, plan):
            return self._call(numbers[:1], numbers[1:], self._fake, self._through, places)[0]


def _register():
    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, _mask)
