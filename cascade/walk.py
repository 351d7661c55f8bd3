"""What a rule sees of the level that judges a draft: the model's tokens and distributions, and fresh chance."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from cascade.draft import Context, Draft, Verdict
from cascade.errors import DecodeError
from cascade.noise import Noise, sample_seed
from cascade.rows import Scores
from cascade.sampling import Sampler

_DICE = 1 << 40  # above every token id: dice never show what a token's own number is


class Dice:
    """One level's fresh random numbers for one request: a count goes up, and no number comes twice.

    Args:
        noise: the request's.
        name: the level's: each has dice of its own.
    """

    def __init__(self, noise: Noise, name: str) -> None:
        self._noise, self._token, self._count = noise, _DICE + zlib.crc32(name.encode()), 0

    def uniform(self) -> float:
        """A number strictly between 0 and 1."""
        self._count += 1
        return float(self._noise.uniform(self._count, [self._token])[0])

    def flip(self, chance: float) -> bool:
        """True with this probability."""
        return self.uniform() < chance

    def draw(self, weights: Tensor) -> int:
        """An index with probability proportional to `weights` [V], which are not negative, and not all 0."""
        sums = weights.double().cumsum(0)
        goal = sums.new_tensor([self.uniform() * float(sums[-1])])
        index = int(torch.searchsorted(sums, goal, right=True))
        return index if index < len(sums) else int(weights.nonzero()[-1])  # the product was rounded up to the sum

    def fresh(self) -> Noise:
        """Noise for one more draft."""
        self._count += 1
        return Noise(sample_seed(self._noise.key(self._count), self._token))


class Walk:
    """A `Verifier`: one row's scores of one draft, and what was asked of them.

    Args:
        context: what the draft continues.
        draft: N nodes.
        sampler: turns logits into tokens and distributions.
        scores: of N + 1 positions, the context's end first.
        dice: for rules that are not coupled.

    Attributes:
        walked: the nodes asked about, -1 left out.
        logprobs: of each own token taken by `__call__`, where the request asks for them.
    """

    def __init__(self, context: Context, draft: Draft, sampler: Sampler, scores: Scores, dice: Dice) -> None:
        self._context, self._draft, self._sampler, self._scores = context, draft, sampler, scores
        self.flip, self.draw = dice.flip, dice.draw
        self.walked: list[int] = []
        self.logprobs: list[dict[int, float]] = []
        self._weighed: dict[int, tuple[Tensor, Callable[[int], dict[int, float]] | None]] = {}

    def __call__(self, node: int) -> int:
        """The level's own token after a node; see `Verifier`."""
        if node >= 0:
            self.walked.append(node)
        if self._sampler.plain:
            return self._pick(node)
        token = self._sampler.sample(self._scores.logits[node + 1], self._prefix(node))
        if self._sampler.logprobs is not None:
            self.logprobs.append(self._sampler.logprobs)
        return token

    def distribution(self, node: int) -> Tensor:
        """What the level samples from after a node, float64 [V]; computed once."""
        if node not in self._weighed:
            if node >= 0:
                self.walked.append(node)
            self._weighed[node] = self._sampler.weigh(self._scores.logits[node + 1], self._prefix(node))
        return self._weighed[node][0]

    def report(self, verdict: Verdict) -> list[dict[int, float]]:
        """The log-probabilities of each token of `verdict.chain`, where the request asks for them."""
        if not self._weighed or not self._sampler.reports:
            return self.logprobs
        reports = []
        for node, token in zip([-1, *verdict.path], verdict.chain, strict=False):
            self.distribution(node)
            report = self._weighed[node][1]
            assert report is not None
            reports.append(report(token))
        return reports

    def q(self, verdict: Verdict) -> list[Tensor]:
        """The distributions [V] that the tokens of `verdict.chain` were drawn from."""
        return [self.distribution(node) for node in [-1, *verdict.path][: len(verdict.chain)]]

    def _pick(self, node: int) -> int:
        assert self._scores.picks is not None
        pick = self._scores.picks[node + 1]
        if pick is None:
            raise DecodeError("the model's logits are not numbers: NaN or infinite")
        return pick

    def _prefix(self, node: int) -> Any:
        """The tokens before what comes after a node, [L]: valid until the next call."""
        if node < 0:
            return self._context.tokens
        return self._context.extended([self._draft.tokens[i] for i in self._draft.path(node)]).tokens
