"""One row of a batch that transformers prepared: its ids, and the batch's processors and criteria made for it.

transformers calls processors and stopping criteria with all rows at once, padding included. A request is one
row, so whatever is kept per row in such an object is cut to this one, and prefixes get their padding back: an
object sees what it would see in the whole batch, one row high.

Dimension key: B rows of the batch, L tokens of a prefix with its padding, V scores of the target's head.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from cascade.errors import CascadeError, ConfigError, DecodeError, PromptError, first_line, name_of
from cascade.sampling import for_drafts

# transformers' filters that a request has fields for, in the order in which both apply them.
_WARPERS = {
    "TemperatureLogitsWarper": "temperature",
    "TopKLogitsWarper": "top_k",
    "TopPLogitsWarper": "top_p",
    "MinPLogitsWarper": "min_p",
}


@dataclass(eq=False)
class BatchRow:
    """One row of a batch.

    Attributes:
        index: which one.
        count: B.
        ids: its tokens without padding.
        left, right: int64 [1, n], the padding around them.
        width: V, the size of the head; scores of fewer ids are filled up with -inf.
        logits, scores: float32 [1, V] per new token, before and after the processors, where they are kept.
        failure: what a processor or criterion raised.
    """

    index: int
    count: int
    ids: list[int]
    left: Tensor
    right: Tensor
    width: int
    logits: list[Tensor] = field(default_factory=list)
    scores: list[Tensor] = field(default_factory=list)
    failure: Exception | None = None

    def padded(self, input_ids: Tensor) -> Tensor:
        """A prefix of the request, int64 [1, n], as it stands in the batch: int64 [1, L], on the batch's device."""
        ids, prompt = input_ids.to(self.left.device), len(self.ids)
        return torch.cat([self.left, ids[:, :prompt], self.right, ids[:, prompt:]], dim=1)

    def widened(self, scores: Tensor) -> Tensor:
        """Scores [1, n] as float32 [1, V], on the batch's device."""
        wide, missing = scores.to(self.left.device, torch.float32), self.width - scores.shape[1]
        return nn.functional.pad(wide, (0, missing), value=-math.inf) if missing > 0 else wide

    def part(self, value: Any) -> Any:
        """This row's part of what is kept per row of the batch, or per prompt of several samples each."""
        if isinstance(value, Tensor) and not value.dim():
            return value
        if not isinstance(value, (Tensor, list)) or not len(value):
            return value
        place = self.index // max(1, self.count // len(value))
        return value[place : place + 1]


def split_rows(input_ids: Tensor, mask: Tensor | None, width: int) -> list[BatchRow]:
    """The rows of a batch, without their padding.

    Args:
        input_ids: int64 [B, L].
        mask: [B, L], 0 where there is padding; None without any.
        width: V.

    Raises:
        PromptError: the mask has another shape, leaves nothing of a row, or has holes.
    """
    if mask is None:
        mask = torch.ones_like(input_ids)
    if mask.shape != input_ids.shape:
        raise PromptError(
            f"attention_mask is {list(mask.shape)}, input_ids are {list(input_ids.shape)}: give a mask of their shape"
        )
    rows = []
    for i, kept in enumerate((mask != 0).tolist()):
        if True not in kept:
            raise PromptError(f"row {i} has no tokens: its attention_mask is all zeros")
        first, end = kept.index(True), len(kept) - kept[::-1].index(True)
        if not all(kept[first:end]):
            raise PromptError(f"the attention_mask of row {i} has holes: only padding at its ends can be left out")
        row = input_ids[i : i + 1].long()
        ids = row[0, first:end].tolist()
        rows.append(BatchRow(i, len(input_ids), ids, row[:, :first], row[:, end:], width))
    return rows


# -- what transformers calls for a whole batch, for one row --------------------------------------------


def for_row(kind: Callable[..., Any], given: Iterable[Any], row: BatchRow, *options: Any) -> list[Any]:
    """Processors or criteria for one row, each in a `kind(one, row, *options)`.

    One with a method `for_request()` knows what a request is: it goes to the engine as it is.
    """
    return [one if hasattr(one, "for_request") else kind(one, row, *options) for one in given]


class RowProcessor:
    """A logits processor of a batch, for one row: f(input_ids [1, n], scores [1, n]) -> scores [1, n].

    Args:
        processor: as the caller gave it, or transformers made it.
        row: the row.

    Raises:
        ConfigError: each row needs a copy of it, and it cannot be copied.
    """

    def __init__(self, processor: Callable[..., Any], row: BatchRow) -> None:
        self._processor, self._row = _made_for(processor, row), row
        self.for_drafts = for_drafts(self._processor)
        self._unused = copy.copy(self._processor) if self.for_drafts else self._processor
        self.__name__ = name_of(processor)

    def __copy__(self) -> RowProcessor:
        # For a draft model: its head may have another size, some processors size themselves by what they see first,
        # and if this one fails there, that is nobody's error.
        other = object.__new__(RowProcessor)
        other.__dict__ = {**self.__dict__, "_processor": copy.copy(self._unused), "_row": copy.copy(self._row)}
        return other

    @torch.no_grad()  # rounds can run in a thread that did not call generate
    def __call__(self, input_ids: Tensor, scores: Tensor) -> Any:
        """The scores as the processor makes them; raises DecodeError, with its name, where it fails."""
        wide = self._row.widened(scores)
        try:
            result = self._processor(self._row.padded(input_ids), wide)
        except CascadeError:
            raise
        except Exception as error:
            self._row.failure = error
            raise DecodeError(f"logits processor {self.__name__} failed: {type(error).__name__}: {error}") from error
        if not isinstance(result, Tensor) or result.shape != wide.shape:
            return result  # refused by name, as every processor's
        return result[:, : scores.shape[1]].to(scores.device)


class RowCriterion:
    """A stopping criterion of a batch, for one row: f(input_ids [1, n], None) -> bool.

    It is the caller's own object for every row: a criterion is often a switch that somebody else flips.

    Args:
        criterion: as the caller gave it, or transformers made it.
        row: the row.
        scores: hand the row's kept scores over, a tuple of float32 [1, V], one per new token.
    """

    def __init__(self, criterion: Callable[..., Any], row: BatchRow, scores: bool) -> None:
        self._criterion, self._row, self._scores = criterion, row, scores
        self.__name__ = name_of(criterion)

    @torch.no_grad()
    def __call__(self, input_ids: Tensor, scores: Any = None) -> bool:
        """Whether the last token ends the text; raises DecodeError, with the criterion's name, where it fails."""
        seen = tuple(self._row.scores[: input_ids.shape[1] - len(self._row.ids)]) if self._scores else None
        try:
            found = torch.as_tensor(self._criterion(self._row.padded(input_ids), seen))
        except Exception as error:
            self._row.failure = error
            raise DecodeError(f"stopping criterion {self.__name__} failed: {type(error).__name__}: {error}") from error
        if found.numel() != 1:
            what = list(found.shape)
            raise DecodeError(f"stopping criterion {self.__name__} must return one bool per row, not {what}")
        return bool(found)


class Tap:
    """A processor that changes nothing and keeps what it sees, one entry per new token.

    Args:
        row: the row.
        kept: where to keep it.
        name: the option that asked for it.
    """

    def __init__(self, row: BatchRow, kept: list[Tensor], name: str) -> None:
        self._row, self._kept, self.__name__ = row, kept, name

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """The scores, as float32: what is kept is what is chosen from."""
        del self._kept[input_ids.shape[1] - len(self._row.ids) :]
        self._kept.append(self._row.widened(scores).clone())
        return scores.float()


def split_warpers(processors: Iterable[Any]) -> tuple[list[Any], dict[str, float]]:
    """Takes transformers' usual filters off the end of a chain, where a request's own mean the same.

    Returns:
        The rest of the chain, and fields of `SamplingParams`.
    """
    rest, fields, names = list(processors), {}, list(_WARPERS)
    while rest and (name := _kind(rest[-1])) in names and _is_usual(rest[-1], _WARPERS[name]):
        fields[_WARPERS[name]] = getattr(rest.pop(), _WARPERS[name])
        names = names[: names.index(name)]  # what a filter comes before, a request applies before it too
    return rest, fields


def split_criteria(criteria: Iterable[Any]) -> tuple[list[Any], int | None, set[int]]:
    """Takes the criteria out that a request has fields for.

    Returns:
        The rest, the length that ends a text (padding included; None without one), and the ids that do.
    """
    rest: list[Any] = []
    lengths: list[int] = []
    ends: set[int] = set()
    for one in criteria:
        if _kind(one) == "MaxLengthCriteria":
            lengths.append(int(one.max_length))
        elif _kind(one) == "EosTokenCriteria":
            ends.update(one.eos_token_id.flatten().tolist())
        else:
            rest.append(one)
    return rest, min(lengths, default=None), ends


def _kind(one: Any) -> str:
    """The name of a class of transformers; "" for whatever is not exactly of one."""
    return type(one).__name__ if type(one).__module__.startswith("transformers.") else ""


def _is_usual(warper: Any, name: str) -> bool:
    """Whether a filter does what the field `name` of `SamplingParams` does, where top-k 1 is greedy, ties or not."""
    usual = getattr(warper, "filter_value", -math.inf) == -math.inf and getattr(warper, "min_tokens_to_keep", 1) == 1
    value = getattr(warper, name, 0)
    return usual and (value > 1 if name == "top_k" else value > 0)


# -- processors with something for each row ------------------------------------------------------------


def _made_for(processor: Any, row: BatchRow) -> Any:
    """The processor that one row needs: the one that was given wherever it will do."""
    if row.count == 1:
        return processor
    kinds = {kind.__name__ for kind in type(processor).__mro__ if kind.__module__.startswith("transformers.")}
    changes = [change for name, change in _PER_ROW.items() if name in kinds]
    if not _kind(processor):
        processor = _copied(processor, row.count)
    elif changes:
        processor = copy.copy(processor)
    for change in changes:
        change(processor, row)
    return processor


def _copied(processor: Any, count: int) -> Any:
    """A copy of a processor nobody knows: it may keep state. Models and tokenizers in it are shared."""
    owner = getattr(processor, "__self__", processor)
    shared = [
        value
        for value in getattr(owner, "__dict__", {}).values()
        if isinstance(value, nn.Module) or hasattr(value, "get_vocab")
    ]
    try:
        return copy.deepcopy(processor, {id(value): value for value in shared})
    except Exception as error:
        raise ConfigError(
            f"logits processor {name_of(processor)} cannot be copied for each of {count} rows ({first_line(error)}): "
            "give it a method for_request() that returns a fresh one, or generate one row at a time"
        ) from None


def _prefix(processor: Any, row: BatchRow) -> None:
    allowed, batch = processor._prefix_allowed_tokens_fn, row.index // processor._num_beams
    processor._prefix_allowed_tokens_fn, processor._num_beams = lambda _, ids: allowed(batch, ids), 1


def _repetition(processor: Any, row: BatchRow) -> None:
    processor.prompt_ignore_length = row.part(processor.prompt_ignore_length)


def _encoder_repetition(processor: Any, row: BatchRow) -> None:
    processor.encoder_input_ids = row.part(processor.encoder_input_ids)


def _encoder_ngrams(processor: Any, row: BatchRow) -> None:
    processor.generated_ngrams, processor.batch_size = row.part(processor.generated_ngrams), 1


def _guidance(processor: Any, row: BatchRow) -> None:
    context = processor.unconditional_context
    processor.unconditional_context = {name: row.part(value) for name, value in context.items()}


def _synthid(processor: Any, row: BatchRow) -> None:
    processor.state = None


_PER_ROW: dict[str, Callable[[Any, BatchRow], None]] = {
    "PrefixConstrainedLogitsProcessor": _prefix,
    "RepetitionPenaltyLogitsProcessor": _repetition,
    "EncoderRepetitionPenaltyLogitsProcessor": _encoder_repetition,
    "EncoderNoRepeatNGramLogitsProcessor": _encoder_ngrams,
    "UnbatchedClassifierFreeGuidanceLogitsProcessor": _guidance,
    "SynthIDTextWatermarkLogitsProcessor": _synthid,
}
