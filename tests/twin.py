"""Plain decoding, slow and obvious: one token at a time, no engine, nothing of it. See also `reference.py`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from tests import reference


@dataclass
class Outcome:
    """What a request must come to."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str = "length"
    logprobs: list[dict[int, float]] = field(default_factory=list)
    error: str | None = None  # the kind of the error, without its message


def seed_of(seed: int, sample: int) -> int:
    """The seed of one of several samples of a prompt; seed from 0 to 2**64 - 1."""
    if sample == 0:
        return seed
    number = reference.mix(sample * 0x9E3779B97F4A7C15 & reference.MASK)
    return reference.mix(reference.mix(seed ^ 0xBB67AE8584CAA73B) ^ number)


def own(things: Sequence[Any]) -> list[Any]:
    """A request's own processors or criteria."""
    return [thing.for_request() if hasattr(thing, "for_request") else thing for thing in things]


def batch_of(ids: Sequence[int]) -> torch.Tensor:
    return torch.tensor([list(ids)], dtype=torch.int64)


def processed(scores: Sequence[float], ids: Sequence[int], params: Any, processors: Sequence[Any]) -> list[float]:
    """The logits after repetition penalty and processors."""
    out = [float(s) for s in scores]
    for token in set(ids) & set(range(len(out))):
        factor = params.repetition_penalty
        out[token] = out[token] * factor if out[token] < 0 else out[token] / factor
    rows = torch.tensor([out], dtype=torch.float64)
    for processor in processors:
        rows = processor(batch_of(ids), rows)
    return [float(s) for s in rows[0].tolist()]


def cut(text: str, stops: Sequence[str]) -> tuple[str, bool]:
    """The text before the first stop string, and whether there is one."""
    places = [text.index(stop) for stop in stops if stop in text]
    return (text[: min(places)], True) if places else (text, False)


def plain(
    model: Any, prompt: Sequence[int], params: Any, sample: int = 0, max_length: int | None = None, beyond: int = 0
) -> Outcome:
    """What `params` make of `prompt`, by the model's `logits(ids)` and, where it has one, `decode(ids)`.

    With `beyond` nothing ends the text but its limit, which is so many tokens further off: what an oracle
    would propose past the end.
    """
    limits = [max_length or math.inf, model.max_length or math.inf, len(prompt) + params.max_new_tokens + beyond]
    ends = {*params.stop_token_ids, *(() if params.ignore_eos else model.end_ids)}
    processors, criteria = own(params.logits_processors), own(getattr(params, "stopping_criteria", ()))
    decode = getattr(model, "decode", lambda ids: "")
    seed = seed_of(params.seed or 0, sample)
    ids, out = list(prompt), Outcome()
    while len(ids) < min(limits) and out.finish_reason == "length":
        early = len(out.tokens) < params.min_new_tokens
        try:
            scores = processed(model.logits(ids), ids, params, processors)
        except Exception as error:
            out.finish_reason, out.error = "error", type(error).__name__
            break
        if early:
            scores = [-math.inf if i in ends else s for i, s in enumerate(scores)]
        if max(scores) == -math.inf:
            out.finish_reason, out.error = "error", "DecodeError"
            break
        filters = (params.temperature, params.top_k, params.top_p, params.min_p)
        token = reference.sample(scores, seed, len(ids), *filters)
        if params.logprobs is not None:
            out.logprobs.append(reference.logprobs(scores, params.temperature or 1.0, token, params.logprobs))
        out.tokens.append(token)
        ids.append(token)
        out.text, found = cut(decode(out.tokens), () if beyond else params.stop)
        said = [bool(criterion(batch_of(ids), scores=None)) for criterion in criteria]  # each hears of each token
        if not beyond and (found or any(said) or (token in ends and not early)):
            out.finish_reason = "stop"
    return out
