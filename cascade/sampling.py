"""From a row of logits to one token: processors, filters and the race against the noise.

Dimension key: L tokens of the prefix, V vocabulary, n tokens that survive the filters.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from cascade.config import SamplingParams
from cascade.draft import Tokens
from cascade.errors import DecodeError, name_of
from cascade.filters import largest, nucleus, where
from cascade.noise import Noise, race

Report = Callable[[int], dict[int, float]]  # of a token: the log-probabilities that go with it


class Branch(NamedTuple):
    """One of several tokens that may follow a text.

    Attributes:
        share: its part, in [0, 1], of what the likeliest of them leaves to others.
        q: the distribution it was drawn from without those before it, float64 [V], if it was drawn from one.
    """

    token: int
    share: float
    q: torch.Tensor | None = None


# transformers' processors that look at nothing but their arguments and are done in a fraction of a forward.
_FOR_DRAFTS = {
    *("ForcedBOSTokenLogitsProcessor", "ForcedEOSTokenLogitsProcessor", "ExponentialDecayLengthPenalty"),
    *("MinLengthLogitsProcessor", "MinNewTokensLengthLogitsProcessor", "NoBadWordsLogitsProcessor"),
    *("NoRepeatNGramLogitsProcessor", "RepetitionPenaltyLogitsProcessor", "SequenceBiasLogitsProcessor"),
    *("SuppressTokensLogitsProcessor", "SuppressTokensAtBeginLogitsProcessor", "WatermarkLogitsProcessor"),
    *("TemperatureLogitsWarper", "TopKLogitsWarper", "MinPLogitsWarper"),
}


class Sampler:
    """Chooses the tokens of one request from one model's logits.

    Steps, each only where the parameters ask for it: repetition penalty, the user's processors, end tokens
    made impossible before `min_new_tokens`; then the likeliest token, or temperature, top-k, top-p, min-p
    and argmax(log p + Gumbel noise) over what is left, the noise's position being the prefix's length. Of
    equals the lowest id wins. Logits are taken to float32 (float64 stays) and weighed in float64.

    Args:
        params: the request's sampling parameters.
        noise: the request's random numbers; samplers with equal noise and equal logits choose equal tokens.
        end_ids: the model's own end tokens.
        prompt_length: how many tokens of every prefix are the prompt.
        draft: only guesses the target's choice: leaves out logprobs, and of the user's processors those that
            may be slow or keep state.

    Attributes:
        greedy: no chance is involved.
        plain: greedy, and the logits count as they come whatever the prefix: a caller may take the
            argmax of whole blocks instead of calling `sample`.
        logprobs: after `sample`, if `params.logprobs` asks for it: token -> log-probability of the
            likeliest tokens, falling, and of the chosen one; after processors and temperature (at
            temperature 0 as at 1), before top-k, top-p and min-p. Impossible tokens are left out.
    """

    def __init__(
        self, params: SamplingParams, noise: Noise, end_ids: Sequence[int], prompt_length: int, draft: bool = False
    ) -> None:
        self.params = params
        self.noise = noise
        self.prompt_length = prompt_length
        self.logprobs: dict[int, float] | None = None
        self.greedy = params.greedy
        self._temperature = float(params.temperature) or 1.0
        self._draft = draft
        self._processors = processors_for_drafts(params) if draft else tuple(params.logits_processors)
        self._logprobs = None if draft else params.logprobs
        self._ends = params.ends(end_ids)
        self.plain = (
            self.greedy
            and not self._processors
            and self._logprobs is None
            and params.repetition_penalty == 1
            and params.min_new_tokens == 0
        )
        self._all_ids = np.arange(0, dtype=np.int64)

    def ends(self, token: int) -> bool:
        """Whether `token` ends the text: a stop token, or an end token that is not ignored."""
        return token in self._ends

    def sample(self, logits: torch.Tensor, tokens: Tokens) -> int:
        """The token that follows `tokens`.

        Args:
            logits: [V], any floating dtype, any device; not changed.
            tokens: int64 [L], the true prefix, prompt included; not changed.

        Raises:
            DecodeError: the logits are NaN or +inf where it matters, or nothing is possible.
        """
        scores = self._processed(logits, tokens)
        lead, top = largest(scores)
        token = lead if self.greedy else self._race(scores, lead, top, len(tokens))
        if self._logprobs is not None:
            self.logprobs = self._top_logprobs(scores, top, token, self._logprobs)
        return token

    def weigh(self, logits: torch.Tensor, tokens: Tokens) -> tuple[torch.Tensor, Report | None]:
        """The distribution that `sample` draws from, float64 [V] on the logits' device, and what reports on a token.

        The report gives what `logprobs` would be, had the token been chosen; None where nobody asks. Raises as
        `sample` does.
        """
        scores = self._processed(logits, tokens)
        lead, top = largest(scores)
        count, p = self._logprobs, self._spread(scores, lead, top)
        return p, None if count is None else lambda token: self._top_logprobs(scores, top, token, count)

    def probabilities(self, logits: torch.Tensor, tokens: Tokens) -> torch.Tensor:
        """The distribution that `sample` draws from: float64 [V], on the logits' device. Raises as it does."""
        return self.weigh(logits, tokens)[0]

    def scores(self, logits: torch.Tensor, tokens: Tokens) -> torch.Tensor:
        """What `sample` takes the largest of: float64 [V], on the logits' device. Raises as it does.

        Log-probabilities after everything that changes them, -inf where nothing is possible; with the
        noise on top unless the choice is greedy.
        """
        scores = self._processed(logits, tokens)
        _, top = largest(scores)
        ids = None if self.greedy else self._survivors(scores, top)
        kept = ... if ids is None else ids
        out = torch.full(scores.shape, -math.inf, dtype=torch.float64, device=scores.device)
        out[kept] = self._relative(scores, top, ids).log_softmax(0)
        if not self.greedy:
            out += torch.from_numpy(self.noise.gumbel(len(tokens), np.arange(len(out)))).to(out.device)
        return out

    def branches(self, logits: torch.Tensor, tokens: Tokens, count: int, noise: Noise) -> list[Branch]:
        """Up to `count` tokens that may follow `tokens`, likeliest first. Raises as `sample` does.

        The first is the one that `sample` takes, the second the one that it would take without the first, and so
        on: draws without replacement (Kool et al. 2019). Where no chance is involved, the most probable ones.
        Drawn with noise other than the sampler's own they have their q.
        """
        scores = self._processed(logits, tokens)
        lead, top = largest(scores)
        if self.greedy:
            return self._likeliest(scores, top, count)
        ids, host, first = self._field(scores, lead, top)
        host, key, found = host.copy(), np.uint64(noise.key(len(tokens))), []
        for _ in range(min(count, len(host))):
            if host[first] == -math.inf:
                break
            found.append(race(host, ids, key, top, self._temperature, first))
            host[found[-1]] = -math.inf
            first = int(host.argmax())
        chosen = ids[found]
        relative = (scores[torch.from_numpy(chosen).to(scores.device)].double().cpu().numpy() - top) / self._temperature
        values = relative + noise.gumbel(len(tokens), chosen)
        shares = [(int(t), math.exp(v - values[0])) for t, v in zip(chosen, values, strict=True)]
        if noise is self.noise:
            return [Branch(token, share) for token, share in shares]
        q = self._spread(scores, lead, top)  # where it has rounded to 0, nothing was drawn
        return [Branch(token, share, q) for token, share in shares if float(q[token]) > 0.0]

    @property
    def reports(self) -> bool:
        """Whether log-probabilities are asked for."""
        return self._logprobs is not None

    def _likeliest(self, scores: torch.Tensor, top: float, count: int) -> list[Branch]:
        host = scores.cpu().numpy().copy()
        others = max(float(np.exp((host - top) / self._temperature).sum()) - 1.0, 1e-30)  # the likeliest one's is 1
        found: list[Branch] = []
        for _ in range(min(count, len(host))):
            lead = int(host.argmax())
            if host[lead] == -math.inf:
                break
            found.append(Branch(lead, min(1.0, math.exp((host[lead] - top) / self._temperature) / others)))
            host[lead] = -math.inf
        return found

    # -- before the filters --------------------------------------------------------------------------

    def _processed(self, logits: torch.Tensor, tokens: Tokens) -> torch.Tensor:
        """The scores [V] after everything that looks at the prefix; never a view of `logits` if changed."""
        scores = logits.detach()
        if scores.dtype != torch.float64:
            scores = scores.float()
        min_new = len(tokens) - self.prompt_length < self.params.min_new_tokens
        penalty = self.params.repetition_penalty
        if penalty != 1 or min_new or self._processors:
            scores = scores.clone()  # float() may have returned the model's own logits
        if penalty != 1:
            # A repeated id is written twice with one value: cheaper than finding the distinct ids. A draft
            # model's head may be smaller than the ids of the text.
            seen = torch.from_numpy(tokens[tokens < len(scores)]).to(scores.device)
            values = scores[seen]
            scores[seen] = torch.where(values < 0, values * penalty, values / penalty)
        if self._processors:
            scores = self._user_processed(scores, torch.tensor(tokens, device=scores.device)[None])
        if min_new:
            scores[[end for end in self._ends if end < len(scores)]] = -math.inf
        return scores

    def _user_processed(self, scores: torch.Tensor, input_ids: torch.Tensor) -> torch.Tensor:
        rows = scores[None]
        for processor in self._processors:
            try:
                rows = _apply(processor, input_ids, rows)
            except Exception:
                if not self._draft:
                    raise
                # Made for the target's head, perhaps. A guess does without it from now on.
                self._processors = tuple(other for other in self._processors if other is not processor)
        # A copy: the processor may have returned a tensor it keeps, and ends are masked in place.
        return rows[0].detach().to(torch.float64 if rows.dtype == torch.float64 else torch.float32, copy=True)

    # -- the filters and the race --------------------------------------------------------------------

    def _race(self, scores: torch.Tensor, lead: int, top: float, position: int) -> int:
        ids, host, lead = self._field(scores, lead, top)
        return int(ids[race(host, ids, np.uint64(self.noise.key(position)), top, self._temperature, lead)])

    def _field(self, scores: torch.Tensor, lead: int, top: float) -> tuple[Tokens, Any, int]:
        """Who races: the ids [n] that survive, ascending, their scores [n], and where among them the leader is."""
        ids = self._survivors(scores, top)
        if ids is not None:
            host = scores[ids].cpu().numpy()
            return ids.cpu().numpy(), host, int(host.argmax())
        host = scores.cpu().numpy()
        if len(self._all_ids) != len(host):
            self._all_ids = np.arange(len(host), dtype=np.int64)
        return self._all_ids, host, lead

    def _spread(self, scores: torch.Tensor, lead: int, top: float) -> torch.Tensor:
        """The distribution after all filters, float64 [V]."""
        out = torch.zeros(len(scores), dtype=torch.float64, device=scores.device)
        if self.greedy:
            out[lead] = 1
        else:
            ids = self._survivors(scores, top)
            out[... if ids is None else ids] = self._relative(scores, top, ids).softmax(0)
        return out

    def _relative(self, scores: torch.Tensor, top: float, ids: torch.Tensor | None) -> torch.Tensor:
        """(scores - top) / temperature, float64: logits up to a constant, without overflow at any temperature."""
        wide = (scores if ids is None else scores[ids]).double()
        return (wide - top).div_(self._temperature)  # not sub_: double() may have returned the model's logits

    def _survivors(self, scores: torch.Tensor, top: float) -> torch.Tensor | None:
        """The ids [n] that top-k, top-p and min-p leave, ascending; None is all of them."""
        params, ids = self.params, None
        if 0 < params.top_k < len(scores):
            ids = where(scores >= scores.topk(params.top_k).values[-1])
        if params.top_p == 1 and params.min_p == 0:
            return ids
        relative = self._relative(scores, top, ids)
        if params.top_p < 1:
            kept = nucleus(relative, params.top_p)
            relative, ids = relative[kept], kept if ids is None else ids[kept]
        if params.min_p > 0:
            kept = where(relative >= math.log(params.min_p))
            ids = kept if ids is None else ids[kept]
        return ids

    def _top_logprobs(self, scores: torch.Tensor, top: float, token: int, n: int) -> dict[int, float]:
        relative = self._relative(scores, top, None)
        total = math.log(float(relative.exp().sum()))
        likeliest: list[int] = []
        if n > 0:
            # torch.topk takes any of equals: fetch all of them, the stable sort puts the lowest ids first.
            ids = where(scores >= scores.topk(min(n, len(scores))).values[-1])
            likeliest = ids[scores[ids].sort(descending=True, stable=True).indices][:n].tolist()
        reported = list(dict.fromkeys([*likeliest, token]))
        values = (relative[reported] - total).tolist()
        return {i: value for i, value in zip(reported, values, strict=True) if value > -math.inf}


def processors_for_drafts(params: SamplingParams) -> tuple[Callable[..., Any], ...]:
    """Those of the user's processors that a draft model applies, to guess better what the target will choose.

    Copies: some size themselves by the first scores that they see, and a draft's head may be another one.
    """
    mine = [one for one in params.logits_processors if for_drafts(one)]
    return tuple(one.for_request() if hasattr(one, "for_request") else copy.copy(one) for one in mine)


def for_drafts(processor: Any) -> bool:
    """Whether draft models may apply a processor: it is cheap and keeps no state."""
    kind = type(processor)
    known = kind.__module__.startswith("transformers.") and kind.__name__ in _FOR_DRAFTS
    return bool(getattr(processor, "for_drafts", known))


def _apply(processor: Callable[..., Any], input_ids: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """What a processor makes of scores [1, V]. Raises DecodeError unless it is as many scores."""
    result = processor(input_ids, rows)
    if isinstance(result, torch.Tensor) and result.shape == rows.shape:
        return result
    what = tuple(result.shape) if isinstance(result, torch.Tensor) else type(result).__name__
    raise DecodeError(f"logits processor {name_of(processor)} must return scores {tuple(rows.shape)}, not {what}")
