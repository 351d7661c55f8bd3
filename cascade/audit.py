"""Checks the promise: every request is decoded with speculation and without, and the tokens are compared.

Where two texts part, the plain run is repeated up to there, and what it chose from is looked at. On an
engine whose logits are the same bits whatever shares a forward there is no excuse. Elsewhere two tokens
whose scores lie closer than rounding can move them may change places, and that is called a near-tie.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import numpy as np

from cascade.config import SamplingParams
from cascade.errors import ConfigError
from cascade.noise import Noise
from cascade.prompts import encode
from cascade.rows import CausalModel, Feed
from cascade.rules import Coupled
from cascade.sampling import Sampler

if TYPE_CHECKING:
    from cascade.engine import Engine
    from cascade.result import Result

IDENTICAL, NEAR_TIE, DEFECT, ERROR, NOT_JUDGED = "identical", "near-tie", "defect", "error", "not judged"

THRESHOLDS = {
    "bfloat16": 64 * 2.0**-7,
    "float16": 64 * 2.0**-10,
    "float32": 64 * 64 * 2.0**-23,
    "float64": 64 * 64 * 2.0**-52,
}
"""Up to which gap, in nats, rounding alone may let two tokens change places.

Two logits of a magnitude up to 32, each off by a unit in its last place, move by 64 times the format's
relative precision against each other. 16-bit formats add up in float32, so that is all; sums of
thousands of terms in the format itself lose their square root more, about 64 times.
"""

REPEATS = 1e-9  # nats that adding up in another order may move a score computed from the same logits


@dataclass(frozen=True)
class Divergence:
    """Where two runs of a request part.

    Attributes:
        position: tokens generated before, the same in both.
        token, plain_token: what came next, with speculation and without; None where a text was over.
        text, plain_text: the same as text; empty without a tokenizer.
        gap: nats between the two best scores of the plain run there: log-probabilities, or for a sampled
            request log-probabilities and noise, whose largest is chosen. None where nothing was chosen.
        behind: nats that `token` was behind the plain run's choice, by the same scores; the gap if it was
            second. At the edge of top-p or min-p, what it is with the edge moved by the threshold. None
            where there is no such token, it was impossible, or plain decoding does not repeat itself.
    """

    position: int
    token: int | None
    plain_token: int | None
    text: str
    plain_text: str
    gap: float | None
    behind: float | None


@dataclass(frozen=True)
class Case:
    """One request, decoded both ways.

    Attributes:
        prompt: its place in the list of prompts.
        params: of the run with speculation.
        verdict: "identical", "near-tie", "defect", "error" (a run failed), or "not judged" (they differ, but
            the rule does not promise otherwise).
        new_tokens: of the run with speculation.
        drafted: how many of these a level below the target was the first to propose.
        finish_reason, plain_finish_reason: of the two runs.
        divergence: where they part, if they do.
        error: of the run that failed, in one line.
    """

    prompt: int
    params: SamplingParams
    verdict: str
    new_tokens: int
    drafted: int
    finish_reason: str
    plain_finish_reason: str
    divergence: Divergence | None = None
    error: str | None = None

    @property
    def failed(self) -> bool:
        """Whether this is a finding: a defect, or a request that ended in an error."""
        return self.verdict in (DEFECT, ERROR)

    def as_dict(self) -> dict[str, Any]:
        """Plain values; of the parameters those that decide the text."""
        record = {key: value for key, value in vars(self).items() if key not in ("params", "divergence")}
        params = {key: getattr(self.params, key) for key in ("temperature", "top_k", "top_p", "min_p", "seed")}
        return {**record, **params, "divergence": None if self.divergence is None else asdict(self.divergence)}


def audit(
    engine: Engine,
    prompts: Sequence[Any],
    params_list: Sequence[SamplingParams],
    threshold: float | None = None,
    on_case: Callable[[Case], None] | None = None,
) -> list[Case]:
    """Decodes every prompt with every parameters, with speculation and without; a `Case` for each pair.

    Args:
        engine: decodes one request at a time.
        prompts: each as `Engine.generate` takes one.
        params_list: for each prompt; sampled ones with a seed. `speculate` is set both ways here.
        threshold: nats at temperature 1 up to which a divergence is a near-tie where the target is not
            bit-exact; None: by the target's dtype, see `THRESHOLDS`.
        on_case: called with each case as it is done.

    Raises:
        ConfigError: for parameters that cannot be compared, before anything is decoded.
    """
    for params in params_list:
        _check(engine, params)
    limit = threshold_of(engine.model) if threshold is None else threshold
    cases = []
    for index, prompt in enumerate(prompts):
        for params in params_list:
            cases.append(_case(engine, index, prompt, replace(params, speculate=True), limit))
            if on_case is not None:
                on_case(cases[-1])
    return cases


def bit_exact(model: CausalModel) -> bool:
    """Whether a token's logits were found to have the same bits whatever shares its forward."""
    probed = getattr(model, "probed", None)
    if probed is None:
        return model.exactness.startswith("yes")
    return probed.width is not None and (probed.tree_bits or not probed.trees)


def threshold_of(model: CausalModel) -> float:
    """The default threshold for a model's dtype, in nats at temperature 1; a quantised one computes in bfloat16."""
    return THRESHOLDS.get(model.dtype, THRESHOLDS["bfloat16"])


def _check(engine: Engine, params: SamplingParams) -> None:
    if params.n != 1:
        raise ConfigError(f"an audit compares one sample with one: use n=1 and several seeds, not n={params.n}")
    if params.greedy:
        return
    if not isinstance(engine.target.rule, Coupled):
        raise ConfigError(sampled_refusal(engine.config.rule))
    if params.seed is None:
        raise ConfigError("a sampled audit needs a seed, or both runs draw their own: SamplingParams(seed=0)")


def sampled_refusal(rule: str) -> str:
    """Why a rule is not audited above temperature 0."""
    return (
        f"rule {rule!r} can only be audited at temperature 0: above, another text than plain decoding's is "
        "no fault of it; rule 'coupled' promises the same"
    )


def _case(engine: Engine, index: int, prompt: Any, params: SamplingParams, threshold: float) -> Case:
    fast = engine.generate(prompt, params)
    with _unruled(engine):
        plain = engine.generate(prompt, replace(params, speculate=False))
    target = len(engine.level_names) - 1
    case = Case(
        prompt=index,
        params=params,
        verdict=IDENTICAL,
        new_tokens=len(fast.tokens),
        drafted=sum(origin != target for origin in fast.origins),
        finish_reason=fast.finish_reason,
        plain_finish_reason=plain.finish_reason,
        error=fast.error or plain.error,
    )
    if case.error is not None:
        return replace(case, verdict=ERROR)
    if (fast.tokens, fast.finish_reason) == (plain.tokens, plain.finish_reason):
        return case
    # Logits are divided by the temperature, and so is what rounding does to them.
    limit = threshold / (params.temperature or 1.0)
    divergence = _divergence(engine, prompt, params, fast, plain, limit)
    near = not bit_exact(engine.model) and divergence.behind is not None and divergence.behind <= limit
    judged = NEAR_TIE if near else DEFECT
    return replace(case, verdict=judged if engine.target.rule.lossless else NOT_JUDGED, divergence=divergence)


@contextmanager
def _unruled(engine: Engine) -> Iterator[None]:
    """Decodes without the rule that is audited: what it makes of no draft at all would be no reference."""
    rule, engine.target.rule = engine.target.rule, Coupled()
    try:
        yield
    finally:
        engine.target.rule = rule


def _divergence(
    engine: Engine, prompt: Any, params: SamplingParams, fast: Result, plain: Result, limit: float
) -> Divergence:
    """Where the runs part, and how close it was there."""
    pairs = list(zip_longest(fast.tokens, plain.tokens))
    position = next((i for i, (one, other) in enumerate(pairs) if one != other), len(pairs))
    token, plain_token = pairs[position] if position < len(pairs) else (None, None)
    gap = behind = None
    if plain_token is not None:
        gap, behind = _closeness(engine, prompt, params, plain.tokens[: position + 1], token, limit)
    return Divergence(position, token, plain_token, _text(engine, token), _text(engine, plain_token), gap, behind)


def _text(engine: Engine, token: int | None) -> str:
    from cascade.bench.systems import pieces

    if token is None or getattr(engine.model, "tokenizer", None) is None:
        return ""
    return pieces(engine.model, [token])[0]


# -- how close it was ------------------------------------------------------------------------------------


def _closeness(
    engine: Engine, prompt: Any, params: SamplingParams, tokens: Sequence[int], token: int | None, limit: float
) -> tuple[float | None, float | None]:
    """`Divergence.gap` and `behind`: what plain decoding chose the last of its `tokens` from."""
    model: Any = engine.model
    ids = model.encode(prompt) if hasattr(model, "encode") else encode(None, prompt, engine.target.name)
    *before, chosen = tokens
    logits = _plain_logits(model, ids, before)
    prefix = np.array([*ids, *before], np.int64)

    def scores(shift: float) -> Any:
        sampler = Sampler(_shifted(params, shift), Noise(params.seed or 0), model.end_ids, len(ids))
        return sampler.scores(logits, prefix)

    own = scores(0.0)
    best = own.topk(min(2, len(own))).values.tolist()
    gap = _finite(best[0] - best[-1]) if len(best) == 2 else None
    if token is None or best[0] - float(own[chosen]) > REPEATS:
        return gap, None
    filtered = params.top_p < 1 or params.min_p > 0
    tried = [own, scores(limit), scores(-limit)] if filtered else [own]
    return gap, _finite(min(float(each.max() - each[token]) for each in tried))


def _plain_logits(model: CausalModel, ids: Sequence[int], tokens: Sequence[int]) -> Any:
    """Logits [V] after the prompt and `tokens`, by the very forwards of plain decoding: one token each."""
    row = model.new_row()
    logits = model.forward([Feed(row, list(ids), 1)])
    for token in tokens:
        logits = model.forward([Feed(row, [token], 1)])
    return logits[0]


def _shifted(params: SamplingParams, shift: float) -> SamplingParams:
    """The filters as they are for logits off by `shift` nats: wider for positive ones, else narrower."""
    odds = params.top_p / (1 - params.top_p) * math.exp(shift) if params.top_p < 1 else math.inf
    top_p = odds / (1 + odds) if math.isfinite(odds) else 1.0
    return replace(params, top_p=top_p, min_p=min(params.min_p * math.exp(-shift), 1.0))


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
