"""`model.generate(..., custom_generate=engine.as_custom_generate())`: transformers' own call, decoded by an engine.

transformers prepares everything as always (ids, mask, generation config, processors, criteria) and then calls a
`CustomGenerate` instead of its own loop. Each row of the batch becomes one request.

Dimension key: B rows of the batch, L tokens of the padded prompts, V size of the target's head.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from cascade.callables import check_callables
from cascade.config import SamplingParams
from cascade.errors import ConfigError, DecodeError, PromptError, did_you_mean
from cascade.per_row import (
    BatchRow,
    RowCriterion,
    RowProcessor,
    Tap,
    for_row,
    split_criteria,
    split_rows,
    split_warpers,
)
from cascade.prompts import check_ids

if TYPE_CHECKING:
    from cascade.engine import Engine
    from cascade.result import Result

OPTIONS = ("streamer", "stop", "speculate", "levels")

# Fields of a generation config that ask for another way of decoding, and what each means when it is off.
_SEARCHES = {
    "num_beams": ("beam search", 1),
    "num_beam_groups": ("group beam search", 1),
    "constraints": ("constrained beam search", None),
    "force_words_ids": ("constrained beam search", None),
    "penalty_alpha": ("contrastive search", 0),
    "dola_layers": ("DoLa", None),
}
_DRAFTS = {
    "prompt_lookup_num_tokens": "prompt lookup",
    "assistant_early_exit": "drafts of the model's first layers",
    "use_mtp": "multi-token prediction",
}
_OUTPUTS = {"output_attentions": "attentions", "output_hidden_states": "hidden states"}
_CACHES = ("cache", "past_key_values")
# What else transformers hands over and an engine takes care of, or that says how to compute and not what.
_KNOWN = ("attention_mask", "position_ids", "use_cache", "logits_to_keep", "return_dict", *_CACHES)


class CustomGenerate:
    """What `engine.as_custom_generate()` gives, for the `custom_generate` of transformers' `generate` or pipelines.

    The caller's generation config, logits processors and stopping criteria hold as they do in `generate`, and
    what is returned is what `generate` returns: ids int64 [B, L + new], padded on the right, or with
    `return_dict_in_generate` a `GenerateDecoderOnlyOutput`, with `scores` and `logits` where they are asked for.

    transformers does not hand everything over on this route. What it keeps to itself is given here instead:

    - `streamer=`: `as_custom_generate(streamer=...)`. generate's own shows its streamer the prompt, and then nothing.
    - `stop_strings=` and `tokenizer=`: `as_custom_generate(stop=["..."])`, and the target's level a tokenizer.
    - `assistant_model=` is ignored: drafts come from the engine's levels.
    - `synced_gpus=` is ignored: an engine is one process.

    What differs from `generate`:

    - Sampled text has the same distribution, but is not the text that generate draws from the same seed.
      `torch.manual_seed` or `transformers.set_seed` make a call repeatable; greedy calls draw nothing.
    - A row that is over takes no part any more: no processor or criterion is asked about it. At its further steps
      `scores` and `logits` say that padding is certain. A criterion judges one row, never the batch.
    - With several rows, each has a copy of a processor that is not transformers' own, since it may keep state.
      Processors and criteria with a method `for_request()` are an engine's own: they see rows without padding.
    - Padding on the right is left out like padding on the left, where generate goes on from the padding.
    - The end of the context that the engine holds ends a text, as `max_length` does.
    - A cache that is given stays empty, and none is returned: the engine keeps its own.

    Args:
        engine: its target must be the very model whose `generate` is called: `LevelConfig(model=model)`.
        streamer: an object with `put` and `end`, such as a `TextStreamer`, for one row at a time: it gets the
            prompt [1, L], the tokens [n] of every round as soon as they are certain, and an end however it ends.
        stop: strings that end a text, with the token that completes one.
        speculate: False is plain decoding.
        levels: names of the levels that may propose; None means all.

    Attributes:
        results: per row of the last call its `Result`: the new tokens, who proposed them, and what they took.

    Raises:
        ConfigError: an option cannot be used, or the engine's target is no model of transformers.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        streamer: Any = None,
        stop: Sequence[str] = (),
        speculate: bool = True,
        levels: Sequence[str] | None = None,
        **unknown: Any,
    ) -> None:
        for name in unknown:
            raise ConfigError(f"as_custom_generate has no option {name!r}.{did_you_mean(name, OPTIONS)}")
        target: Any = engine.model
        if getattr(target, "module", None) is None:
            kind = type(target).__name__
            raise ConfigError(f"as_custom_generate needs a model of transformers as the target, and this is a {kind}")
        if stop and target.tokenizer is None:
            raise ConfigError("stop strings need a tokenizer: LevelConfig(model=model, tokenizer=...) for the target")
        _check_streamer(streamer)
        self._engine, self._target, self._streamer = engine, target, streamer
        self._common = SamplingParams(stop=stop, speculate=speculate, levels=levels, ignore_eos=True)
        self.results: list[Result] = []

    def __call__(
        self,
        model: Any,
        input_ids: Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        **model_kwargs: Any,
    ) -> Any:
        """What transformers calls, all arguments prepared by `generate`; returns what `generate` returns.

        Raises:
            ConfigError, PromptError: the call asks for something an engine does not do; nothing has begun.
            DecodeError: a row failed, for example in a processor.
        """
        try:
            self._check_model(model)
            _check_call(model.config, generation_config, input_ids, model_kwargs)
            rows = self._rows(model, input_ids, model_kwargs)
            params = self._params(rows, input_ids, logits_processor, stopping_criteria, generation_config)
            results = self._decode(rows, params, input_ids)
        finally:
            if self._streamer is not None:
                self._streamer.end()
        self.results = results
        for row, result in zip(rows, results, strict=True):
            if result.error is not None:
                where = f"row {row.index}: " if row.count > 1 else ""
                raise DecodeError(where + result.error.removeprefix("DecodeError: ")) from row.failure
        return self._output(model, input_ids, rows, results, generation_config)

    # -- from a call to requests -----------------------------------------------------------------------

    def _check_model(self, model: Any) -> None:
        if model is not self._target.module:
            raise ConfigError(
                "the engine's target is another model object than the one whose generate is called: build the engine "
                "on that very object, LevelConfig(model=model), without a dtype or device that needs a copy"
            )

    def _rows(self, model: Any, input_ids: Tensor, model_kwargs: Mapping[str, Any]) -> list[BatchRow]:
        """The rows, checked: a batch is refused before any of it is decoded."""
        vocabulary, limit = self._target.vocab_size, self._engine.max_length
        head = model.get_output_embeddings()
        rows = split_rows(input_ids, model_kwargs.get("attention_mask"), getattr(head, "out_features", vocabulary))
        _check_positions(model_kwargs.get("position_ids"), rows)
        if self._streamer is not None and len(rows) > 1:
            raise ConfigError(f"a streamer follows one row, and this call has {len(rows)}: generate one at a time")
        for row in rows:
            check_ids(f"row {row.index}", row.ids, vocabulary, limit)
        return rows

    def _params(
        self, rows: Sequence[BatchRow], input_ids: Tensor, processors: Any, criteria: Any, config: Any
    ) -> list[SamplingParams]:
        """One request's parameters per row: what `SamplingParams` has no field for goes along as it is."""
        check_callables("logits processor", processors)
        check_callables("stopping criterion", criteria)
        criteria, length, ends = split_criteria(criteria)
        length = config.max_length if length is None else length
        filters: dict[str, Any] = {"temperature": 0.0}
        seeds = [0] * len(rows)
        if config.do_sample:
            # Kept scores are those after all filters, so then all of them stay processors.
            processors, taken = (processors, {}) if _keeps(config, "scores") else split_warpers(processors)
            filters = {"temperature": 1.0, **taken}
            seeds = torch.randint(2**63 - 1, (len(rows),)).tolist()
        return [
            replace(
                self._common,
                **filters,
                seed=seed,
                max_new_tokens=max(1, length - input_ids.shape[1]),  # a length is looked at after a token
                stop_token_ids=[end for end in sorted(ends) if 0 <= end < self._target.vocab_size],
                logits_processors=[
                    *([Tap(row, row.logits, "output_logits")] if _keeps(config, "logits") else []),
                    *for_row(RowProcessor, processors, row),
                    *([Tap(row, row.scores, "output_scores")] if _keeps(config, "scores") else []),
                ],
                stopping_criteria=for_row(RowCriterion, criteria, row, _keeps(config, "scores")),
            )
            for row, seed in zip(rows, seeds, strict=True)
        ]

    def _decode(self, rows: Sequence[BatchRow], params: list[SamplingParams], input_ids: Tensor) -> list[Result]:
        if self._streamer is None:
            results: list[Result] = self._engine.generate([row.ids for row in rows], params)
            return results
        with closing(self._engine.stream(rows[0].ids, params[0])) as stream:
            self._streamer.put(input_ids.cpu())
            for chunk in stream:
                if chunk.tokens:
                    self._streamer.put(torch.tensor(chunk.tokens))
            assert stream.result is not None
            return [stream.result]

    # -- from results to what generate returns ---------------------------------------------------------

    def _output(
        self, model: Any, input_ids: Tensor, rows: Sequence[BatchRow], results: Sequence[Result], config: Any
    ) -> Any:
        """int64 [B, L + new], or transformers' own output around it."""
        pad = _pad_id(config)
        new = [torch.tensor(result.tokens, dtype=torch.long) for result in results]
        padded = pad_sequence(new, batch_first=True, padding_value=pad).to(input_ids.device)
        sequences = torch.cat([input_ids, padded], dim=1)
        if not config.return_dict_in_generate:
            return sequences
        kept = {
            name: _steps([getattr(row, name)[: len(ids)] for row, ids in zip(rows, new, strict=True)], pad)
            for name in ("scores", "logits")
            if _keeps(config, name)
        }
        return _output_class(model)(sequences=sequences, **kept)


def _check_streamer(streamer: Any) -> None:
    if isinstance(streamer, type):
        raise ConfigError(f"the streamer {streamer.__name__} is a class: give an object of it")
    if streamer is not None and not all(callable(getattr(streamer, name, None)) for name in ("put", "end")):
        raise ConfigError(f"a streamer has methods put and end, as a TextStreamer does: not {streamer!r:.60}")


def _check_call(model_config: Any, config: Any, input_ids: Tensor, model_kwargs: Mapping[str, Any]) -> None:
    """Raises ConfigError for whatever a call asks for that an engine does not do."""
    if getattr(model_config, "is_encoder_decoder", False):
        raise ConfigError("an engine decodes decoder-only models, and this is an encoder-decoder")
    _check_config(config)
    for name in _CACHES:
        held = _cached(model_kwargs.get(name))
        if held:
            raise ConfigError(
                f"{name} holds {held} tokens already, and an engine keeps caches of its own: leave it out, or use "
                "engine.session() for a conversation"
            )
    for name, value in model_kwargs.items():
        empty = value is None or value is False or (name.endswith("token_type_ids") and not value.any())
        if name not in _KNOWN and not empty:
            raise ConfigError(f"an engine decodes token ids alone, and the call brings {name}: leave it out")
    if input_ids.dim() != 2 or not input_ids.numel():
        raise PromptError(f"input_ids must be [rows, tokens], at least one token each, not {list(input_ids.shape)}")


def _check_config(config: Any) -> None:
    for name, (what, off) in _SEARCHES.items():
        value = getattr(config, name, None)
        ignored = name == "penalty_alpha" and (config.do_sample or (config.top_k or 0) <= 1)  # as generate does
        if value is not None and value != off and not ignored:
            raise ConfigError(f"{name}={value!r} asks for {what}; an engine decodes greedily or samples: leave it out")
    for name, what in _DRAFTS.items():
        if value := getattr(config, name, None):
            raise ConfigError(f"{name}={value!r} asks for {what}; an engine drafts by its own levels: leave it out")
    for name, what in _OUTPUTS.items():
        if config.return_dict_in_generate and getattr(config, name, None):
            raise ConfigError(f"{name}=True: an engine does not keep {what}: leave it out")


def _cached(cache: Any) -> int:
    """How many tokens a cache holds, as far as it knows."""
    try:
        return 0 if cache is None else int(cache.get_seq_length())
    except (AttributeError, ValueError):  # none of transformers' caches, or one that does not count
        return 0


def _check_positions(positions: Any, rows: Sequence[BatchRow]) -> None:
    """Raises ConfigError unless the positions [..., B or 1, L] count each row's tokens from 0."""
    if positions is None:
        return
    for row in rows:
        own = positions[..., row.index if positions.shape[-2] == row.count else 0, :]
        first, count = row.left.shape[1], len(row.ids)
        counted = torch.arange(count, device=own.device)
        if own.shape[-1] < first + count or (own[..., first : first + count] != counted).any():
            raise ConfigError("an engine counts positions from 0 in each row: leave position_ids out")


def _keeps(config: Any, name: str) -> bool:
    """Whether the call asks for "scores" or "logits" of every step."""
    return bool(config.return_dict_in_generate and getattr(config, f"output_{name}", False))


def _pad_id(config: Any) -> int:
    """The id that fills rows up: as generate prepared it (the padding, else the first end token), else 0."""
    prepared = getattr(config, "_pad_token_tensor", None)
    return 0 if prepared is None else int(prepared)


def _steps(rows: Sequence[Sequence[Tensor]], pad: int) -> tuple[Tensor, ...]:
    """Per step float32 [B, V] of what rows kept, [1, V] per token; where a row is over, padding is certain."""
    if not any(rows):
        return ()
    over = torch.full_like(next(row[0] for row in rows if row), -math.inf)
    over[0, min(pad, over.shape[1] - 1)] = 0.0
    return tuple(torch.cat([row[i] if i < len(row) else over for row in rows]) for i in range(max(map(len, rows))))


def _output_class(model: Any) -> Any:
    """transformers' own class of outputs, from the module that the model has its `generate` from."""
    home = next(kind.__module__ for kind in type(model).__mro__ if kind.__name__ == "GenerationMixin")
    return sys.modules[home].GenerateDecoderOnlyOutput
