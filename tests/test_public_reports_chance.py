"""What users reported of other engines about chance: distributions, seeds, and probabilities that are no numbers.

Every case is asked of every lossless rule that is registered. Targets here are tables without memory, so one
text of 1,000 tokens is 1,000 draws, and all seeds are fixed: a bound holds or it does not, and never by luck.
With V tokens and N draws the total variation of a right sampler is about sqrt(V / (2 pi N)).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from cascade import CascadeConfig, Draft, Drafter, Engine, LevelConfig, Result, SamplingParams
from cascade.testing import FixedCosts, ManualClock, ToyModel
from tests import reference, twin
from tests.strategies import LOSSLESS, PLUGINS
from tests.tiny import tiny

DRAWS, ROWS = 20_000, 20
SAMPLED = SamplingParams(max_new_tokens=DRAWS // ROWS, temperature=1.0, ignore_eos=True)
EVERY_RULE = pytest.mark.parametrize("rule", LOSSLESS)


class Table(ToyModel):
    """The same distribution after every text."""

    def __init__(self, probabilities: Sequence[float], **options: Any) -> None:
        super().__init__(len(probabilities), **options)
        with np.errstate(divide="ignore"):
            self.fixed = np.log(np.asarray(probabilities, np.float64))

    def logits(self, prefix: Sequence[int]) -> np.ndarray:
        return self.fixed


class Drawn(Drafter):
    """Draws from q with dice of its own; says so, or keeps it to itself."""

    def __init__(self, q: Sequence[float], tell: bool = True, seed: int = 0) -> None:
        self.q, self.tell, self.dice = np.asarray(q, np.float64), tell, np.random.default_rng(seed)
        self.latest: dict[int, list[int]] = {}
        self.replaced: list[tuple[int, int]] = []  # a rejected token, and what came instead

    def propose(self, asks: Sequence[Any]) -> list[Draft]:
        return [self.one(ask) for ask in asks]

    def one(self, ask: Any) -> Draft:
        count = min(ask.want, ask.cap)
        tokens = self.dice.choice(len(self.q), size=count, p=self.q).tolist()
        self.latest[ask.context.row_id] = tokens
        return Draft(tokens, q=np.tile(self.q, (count, 1)) if self.tell else None)

    def observe(self, row_id: int, verdict: Any) -> None:
        tokens = self.latest.pop(row_id, [])
        if tokens and verdict.rejected:
            self.replaced.append((tokens[verdict.accepted], verdict.extra))


def engine(rule: str, *levels: Any, **options: Any) -> Engine:
    costs = FixedCosts(lambda level, tokens: 1.0 if level == "target" else 0.05)
    config = CascadeConfig([*levels], rule=rule, max_batch=ROWS, **options)
    return Engine(config, clock=ManualClock(), costs=costs, plugins=PLUGINS)


def fixed(k: int, drafter: Any = None, **options: Any) -> LevelConfig:
    options = {"drafter": drafter, **options} if drafter is not None else options
    return LevelConfig(k=k, controller="fixed", **options)


def draw(made: Engine, params: SamplingParams = SAMPLED, rows: int = ROWS) -> tuple[np.ndarray, list[Result]]:
    """How often each token came, over rows with seeds of their own, and the results."""
    results = made.generate([[0]] * rows, [dataclasses.replace(params, seed=seed) for seed in range(rows)])
    tokens = [token for result in results for token in result.tokens[1:]]  # a prompt's own round drafts nothing
    assert not any(result.error for result in results)
    return np.bincount(tokens, minlength=made.model.vocab_size) / len(tokens), results


def distance(found: np.ndarray, wanted: Sequence[float]) -> float:
    """Total variation."""
    return float(np.abs(found - np.asarray(wanted)).sum() / 2)


def filtered(p: Sequence[float], **filters: Any) -> np.ndarray:
    """What the filters leave of p, by the slow twin."""
    scores = np.log(np.asarray(p)).tolist()
    temperature = filters.get("temperature", 1.0)
    out = np.zeros(len(p))
    kept = reference.survivors(scores, **{"temperature": temperature, **filters})
    out[kept] = np.exp(np.asarray(scores)[kept] / temperature)
    return out / out.sum()


def noted(level: Any) -> list[Draft]:
    """What a drafter will have proposed."""
    drafts: list[Draft] = []
    propose = level.propose

    def note(asks: Any) -> Any:
        found = propose(asks)
        drafts.extend(found)
        return found

    level.propose = note
    return drafts


# -- distributions --------------------------------------------------------------------------------------

P8 = np.array([0.30, 0.22, 0.16, 0.11, 0.09, 0.06, 0.04, 0.02])
Q8 = np.array([0.05, 0.30, 0.10, 0.20, 0.02, 0.18, 0.05, 0.10])


@EVERY_RULE
@pytest.mark.parametrize(
    ("depth", "filters", "draws"),
    [
        (2, {"top_k": 3}, DRAWS),
        (2, {"top_k": 3, "top_p": 0.7}, 8_000),
        (3, {"top_k": 3}, 8_000),
        (3, {"top_p": 0.7}, 8_000),
    ],
)
def test_filters_shift_nothing(depth: int, filters: dict[str, Any], draws: int, rule: str) -> None:
    """huggingface/transformers#47932: raw probabilities were reported although the draft had sampled after top-k."""
    filters = {"temperature": 0.8, **filters}
    middle = fixed(2, model=Table(Q8), name="draft")
    lowest = [fixed(2, model=Table(Q8[::-1]), name="lowest")] if depth == 3 else []
    made = engine(rule, *lowest, middle, LevelConfig(model=Table(P8), name="target"))
    drafts = noted(made.target.source.drafter)
    found, results = draw(made, dataclasses.replace(SAMPLED, max_new_tokens=draws // ROWS, **filters))
    assert distance(found, filtered(P8, **filters)) < 0.02
    assert all(result.stats.levels[-2].tested > 100 for result in results)
    possible = filtered(Q8, **filters) > 0
    tokens = {token for one in drafts for token in one.tokens}
    assert tokens == set(np.flatnonzero(possible)), "the draft filters as the target does"
    told = [np.asarray(torch.as_tensor(one.q)) for one in drafts if one.q is not None and len(one)]
    assert bool(told) == PLUGINS.rule(rule).needs_q
    for q in told:
        assert q.sum(-1) == pytest.approx(1.0, abs=1e-6)
        assert (q[:, ~possible] == 0).all()


@EVERY_RULE
@pytest.mark.parametrize("tell", [True, False])
def test_a_drafter_that_filters_where_the_target_does_not(tell: bool, rule: str) -> None:
    """huggingface/transformers#47932, with a drafter that has filters of its own."""
    params = dataclasses.replace(SAMPLED, temperature=0.8)
    drafter = Drawn(filtered(Q8, temperature=0.8, top_k=3), tell)
    found, results = draw(engine(rule, fixed(3, drafter), Table(P8)), params)
    assert distance(found, filtered(P8, temperature=0.8)) < 0.02
    drafted, accepted = (sum(getattr(one.stats.levels[0], what) for one in results) for what in ("drafted", "accepted"))
    assert 0 < accepted < drafted


@EVERY_RULE
@pytest.mark.parametrize("k", [1, 3])
def test_what_replaces_a_rejected_token(k: int, rule: str) -> None:
    """huggingface/transformers#28508: what p leaves over q went through a softmax instead of a division."""
    p, q = (0.7, 0.2, 0.1), (0.1, 0.2, 0.7)
    drafter = Drawn(q)
    found, _ = draw(engine(rule, fixed(k, drafter), Table(p)))
    assert distance(found, p) < 0.02
    assert len(drafter.replaced) > 1000
    if PLUGINS.rule(rule).needs_q:  # only token 0 is likelier for the target than for the draft
        assert {instead for rejected, instead in drafter.replaced if rejected == 2} == {0}
    else:
        assert all(rejected != instead for rejected, instead in drafter.replaced)


@EVERY_RULE
@pytest.mark.parametrize("k", [1, 3])
def test_a_drafted_end_is_as_likely_as_the_target_has_it(k: int, rule: str) -> None:
    """huggingface/transformers#28508: the bonus step was wrong after a drafted EOS."""
    p, q, rows = (0.7, 0.2, 0.1), (0.1, 0.6, 0.3), 2000
    made = engine(rule, fixed(k, Drawn(q)), Table(p, end_ids=(1,)))
    params = SamplingParams(max_new_tokens=8, temperature=1.0)
    texts = [r.tokens for r in made.generate([[0]] * rows, [dataclasses.replace(params, seed=s) for s in range(rows)])]
    assert all(1 not in text[:-1] for text in texts)
    assert all(text[-1] == 1 or len(text) == 8 for text in texts)
    for place in range(4):  # of those that come so far
        tokens = [text[place] for text in texts if len(text) > place]
        assert distance(np.bincount(tokens, minlength=3) / len(tokens), p) < 0.04
    found = np.bincount([token for text in texts for token in text[1:]], minlength=3)
    assert distance(found / found.sum(), p) < 0.02


@EVERY_RULE
@pytest.mark.parametrize("k", [1, 3])
def test_a_drafter_that_always_takes_its_favourite(k: int, rule: str) -> None:
    """huggingface/transformers#33534: it proposed its argmax, and its softmax was taken for what it drew from."""

    class Favourite(Drafter):
        def propose(self, asks):
            return [Draft([0] * min(ask.want, ask.cap)) for ask in asks]

    found, results = draw(engine(rule, fixed(k, Favourite()), Table((0.5, 0.5))))
    assert distance(found, (0.5, 0.5)) < 0.02
    tested = sum(result.stats.levels[0].tested for result in results)
    accepted = sum(result.stats.levels[0].accepted for result in results)
    assert accepted / tested == pytest.approx(0.5, abs=0.02), "a certain proposal holds with the target's probability"


@EVERY_RULE
def test_a_draft_model_that_is_colder_than_the_request(rule: str) -> None:
    """huggingface/transformers#33534: a draft at temperature 0 under a request at temperature 1."""
    cold = Table((1.0, 1e-12))  # whatever is asked of it, token 0
    found, _ = draw(
        engine(rule, fixed(3, model=cold, name="draft"), LevelConfig(model=Table((0.5, 0.5)), name="target"))
    )
    assert distance(found, (0.5, 0.5)) < 0.02


@EVERY_RULE
def test_a_padded_head_shifts_nothing(rule: str) -> None:
    """vllm-project/vllm#7252: the draft's head has entries that the target knows nothing of."""

    class Named(Table):
        tokenizer = "words"

        def encode(self, prompt):
            return list(prompt)

        def decode(self, ids):
            return ""

    wide = np.append(Q8, [0.5, 0.5])
    made = engine(
        rule, fixed(3, model=Table(wide / wide.sum()), name="draft"), LevelConfig(model=Named(P8), name="target")
    )
    found, results = draw(made)
    assert len(found) == 8
    assert distance(found, P8) < 0.02
    assert any(result.stats.levels[0].accepted for result in results)


# -- what is no number ----------------------------------------------------------------------------------

ODD = pytest.mark.parametrize("odd", [np.nan, 0.0, np.inf, -np.inf], ids=["nan", "zeros", "inf", "-inf"])
HEALTHY = np.array([1e-22, 0.4, 0.3, 0.2, 0.1 - 1e-22])


def healthy(result: Result, found: np.ndarray, params: SamplingParams) -> None:
    assert (result.finish_reason, result.error) == ("length", None)
    assert 0 not in result.tokens
    assert distance(found, filtered(HEALTHY, temperature=params.temperature)) < 0.05


@EVERY_RULE
@ODD
def test_a_drafter_whose_probabilities_are_none(odd: float, rule: str) -> None:
    """vllm-project/vllm#41834: a NaN row left nothing over, and token 0 was emitted at a probability of 1e-22."""

    class Odd(Drafter):
        def propose(self, asks):
            return [Draft([1] * ask.want, q=np.full((ask.want, 5), odd)) for ask in asks]

    params = dataclasses.replace(SAMPLED, temperature=0.7, max_new_tokens=2001)
    found, [result] = draw(engine(rule, fixed(3, Odd()), Table(HEALTHY)), params, rows=1)
    healthy(result, found, params)
    if PLUGINS.rule(rule).needs_q:
        assert result.stats.levels[0].dropped > 0


@EVERY_RULE
@pytest.mark.parametrize("temperature", [0.0, 0.7])
@ODD
def test_a_draft_model_whose_logits_are_none(odd: float, temperature: float, rule: str, caplog: Any) -> None:
    """vllm-project/vllm#41834, from a model: the proposal is dropped, and that is counted."""
    broken = Table([0.2] * 5)
    broken.fixed = np.full(5, odd)
    params = dataclasses.replace(SAMPLED, temperature=temperature, max_new_tokens=2001 if temperature else 40)
    made = engine(rule, fixed(3, model=broken, name="draft"), LevelConfig(model=Table(HEALTHY), name="target"))
    found, [result] = draw(made, params, rows=1)
    if temperature:
        healthy(result, found, params)
    else:
        assert result.tokens == [1] * 40
    level = result.stats.levels[0]
    assert level.accepted == 0 or odd == 0.0  # equal logits are as good as any
    if odd != 0.0:
        assert level.dropped > 0
        assert any("draft" in record.getMessage() for record in caplog.records)


# -- seeds ----------------------------------------------------------------------------------------------


@EVERY_RULE
@pytest.mark.parametrize("model", ["toy", "tiny"])
def test_a_requests_seed_is_its_own(model: str, rule: str) -> None:
    """vllm-project/vllm#6038: the per-request seed was ignored with drafting on."""
    params = SamplingParams(max_new_tokens=30, temperature=0.9, seed=7, ignore_eos=True)
    other, prompt = dataclasses.replace(params, seed=8), [3, 4, 5, 3, 4]
    target = ToyModel() if model == "toy" else tiny("llama")
    draft = ToyModel(seed=7, mix=(target, 0.7)) if model == "toy" else tiny("llama", seed=1)

    def make() -> Engine:
        return engine(
            rule, fixed(3, "ngram"), fixed(3, model=draft, name="draft"), LevelConfig(model=target, name="target")
        )

    made = make()
    first = made.generate(prompt, params).tokens
    assert made.generate(prompt, params).tokens == first == make().generate(prompt, params).tokens
    assert made.generate(prompt, other).tokens != first
    made.generate([[9, 9], [1]], [other, dataclasses.replace(other, seed=None)])
    assert made.generate(prompt, params).tokens == first, "after other requests"
    if rule == "coupled":  # the others promise this for one request at a time
        batch = made.generate([[8, 7], prompt, [5], prompt], [other, params, dataclasses.replace(params, n=2), other])
        assert batch[1].tokens == first != batch[4].tokens
        assert batch[2].tokens != batch[3].tokens, "samples of one seed"
        assert made.generate(prompt, dataclasses.replace(params, speculate=False)).tokens == first


@EVERY_RULE
def test_requests_without_a_seed_differ(rule: str) -> None:
    """NVIDIA/TensorRT-LLM#19487: they shared one stream of numbers, and the samples were identical."""
    levels = [fixed(3, model=Table(Q8), name="draft"), LevelConfig(model=Table(P8), name="target")]
    made = engine(rule, *levels, seed=1)
    params = SamplingParams(max_new_tokens=12, temperature=1.0)
    together = [tuple(r.tokens) for r in made.generate([0], dataclasses.replace(params, n=8))]
    apart = [tuple(made.generate([0], params).tokens) for _ in range(8)]
    assert len({*together, *apart}) == 16
    short = dataclasses.replace(params, max_new_tokens=3)
    many = [r.tokens for r in made.generate([0], dataclasses.replace(short, n=1000))]
    many += [r.tokens for r in made.generate([[0]] * 1000, short)]
    for place in range(3):  # the second may be drafted, the third is the target's own
        found = np.bincount([tokens[place] for tokens in many], minlength=8) / 2000
        assert distance(found, P8) < 0.05


@pytest.mark.parametrize("seed", [0, 1, 2**63])
def test_plain_decoding_draws_from_the_targets_distribution(seed: int) -> None:
    """The ground all of this stands on: no speculation, and the slow twin's noise."""
    made = engine("coupled", Table(P8))
    plain = made.generate([0], dataclasses.replace(SAMPLED, seed=seed, max_new_tokens=300, speculate=False))
    want = twin.plain(Table(P8), [0], dataclasses.replace(SAMPLED, seed=seed, max_new_tokens=300))
    assert plain.tokens == want.tokens
