"""The distribution of sampled text through the whole engine: levels, trees, merged drafters, doubt, bypass, limits.

Twice. `test_every_outcome` walks through all that chance can do to a request of a few tokens, each outcome with its
probability, and compares the text's distribution with the target's: to 1e-12, so that it never fails by bad luck.
`test_many_texts` leaves chance as it is, and compares how often each run of three tokens came, given the token before
it, by a chi-square test over 1,600 runs. Its seeds are fixed: it holds or it does not. With other seeds a right
engine would fail with a chance of 1e-4 per comparison, of which there are 48: once in about 200 such files.

A prompt's own round drafts nothing, so texts are longer than two tokens. That a test means something is asserted too:
every level's drafts were tested, some held and some did not.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from cascade import BypassConfig, CascadeConfig, Engine, LevelConfig, Result, SamplingParams, hookimpl
from cascade import level as level_module
from cascade.draft import Draft, Verdict
from cascade.enumeration import PRECISION, Chance, outcomes
from cascade.plugins import create
from cascade.rejection import Rejection
from cascade.sampling import Branch, Sampler
from cascade.testing import FixedCosts, ManualClock, ToyModel
from cascade.walk import Dice
from tests import reference, twin
from tests.strategies import LOSSLESS

NGRAM = {"n_min": 1, "n_max": 2}
CLOSING = BypassConfig(threshold=0.9, min_tests=1, probe_every=1, probe_max=2)
SECONDS = {"target": 1.0, "draft": 1e-3}  # everything below costs next to nothing
IMPROBABLE = 1e-4


# -- rules that are wrong --------------------------------------------------------------------------------


class Eager(Rejection):
    """Takes whatever is proposed."""

    def walk(self, draft: Draft, verifier: Any, ends: Any) -> Verdict:
        path = draft.path(0) if len(draft) else []
        p = [verifier.distribution(node) for node in [-1, *path]]
        return Verdict(path, verifier.draw(p[-1]), len(path), len(path), len(draft))


class Softened(Rejection):
    """What p leaves over q goes through a softmax instead of a division: huggingface/transformers#28508."""

    @staticmethod
    def _choose(draft: Draft, options: list[int], p: torch.Tensor, verifier: Any) -> tuple[int, torch.Tensor]:
        node, rest = Rejection._choose(draft, options, p, verifier)
        return node, rest if rest is p else torch.softmax(rest, 0)


class Wrong:
    @hookimpl
    def cascade_register_rules(self) -> dict[str, Any]:
        return {"eager": Eager, "softened": Softened}


PLUGINS = create(Wrong(), entry_points=False)


# -- engines ---------------------------------------------------------------------------------------------


def fixed(k: int, drafter: Any = None, name: str = "draft", **options: Any) -> LevelConfig:
    """A level that always proposes K tokens, by a model or by another drafter."""
    source = "model" if hasattr(drafter, "forward") else "drafter"
    return LevelConfig(**{source: drafter}, name=name, controller="fixed", k=k, **options)


def engine(rule: str, levels: Sequence[LevelConfig], target: ToyModel, doubt: bool = False, **options: Any) -> Engine:
    """With `doubt` a drafted token costs a quarter of the target's forward, so that a draft model stops in doubt."""
    config = CascadeConfig([*levels, LevelConfig(model=target, name="target")], rule=rule, **options)
    price = {"draft": 0.25 / config.max_batch} if doubt else {}  # of a token of one row
    costs = FixedCosts(
        lambda level, tokens: SECONDS.get(level, 1e-8), lambda level, tokens: tokens * price.get(level, 1e-8)
    )
    return Engine(config, plugins=PLUGINS, clock=ManualClock(), costs=costs, check=True)


def spread(model: ToyModel, ids: list[int], params: SamplingParams, new: int, ends: Sequence[int]) -> dict[int, float]:
    """What plain decoding draws the next token from, by the slow twin."""
    scores = twin.processed(model.logits(ids), ids, params, [])
    if new < params.min_new_tokens:
        scores = [-math.inf if one in ends else score for one, score in enumerate(scores)]
    kept = reference.survivors(scores, params.temperature, params.top_k, params.top_p, params.min_p)
    weights = {one: math.exp((scores[one] - max(scores)) / params.temperature) for one in kept}
    return {one: weight / sum(weights.values()) for one, weight in weights.items() if weight > 0}


def judged(results: Sequence[Result], unjudged: Sequence[str] = (), flawless: bool = True) -> None:
    """Every level but the target, and but those that nobody judges, had drafts that held and drafts that did not."""
    for levels in zip(*(result.stats.levels[:-1] for result in results), strict=True):
        accepted, tested = (sum(getattr(one, what) for one in levels) for what in ("accepted", "tested"))
        name = levels[0].name
        assert tested == 0 if name in unjudged else 0 < accepted < tested, name
        assert not (flawless and any(one.dropped for one in levels))


# -- every outcome ---------------------------------------------------------------------------------------


class World:
    """Chance that is enumerated: what dice and trees draw is looked up in a script.

    Trees draw by a race of noise, which is a draw without replacement (see `test_growth.py`); here it is one.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.chance = Chance()
        world, branches = self, Sampler.branches

        class Scripted(Dice):
            def flip(self, chance: float) -> bool:
                if min(chance, 1.0 - chance) < 1e-14:  # rounding: no outcome of its own
                    return chance > 0.5
                return world.chance.flip(chance)

            def draw(self, weights: torch.Tensor) -> int:
                return world.chance.draw(weights.numpy())

        def scripted(self: Sampler, logits: Any, tokens: Any, count: int, noise: Any) -> list[Branch]:
            if self.greedy or noise is None or noise is self.noise:
                return branches(self, logits, tokens, count, noise)
            q, made = self.probabilities(logits, tokens), []
            left = q.clone()
            while len(made) < count and float(left.sum()) > 0.0:
                made.append(Branch(world.chance.draw(left.numpy()), 0.5, q))
                left[made[-1].token] = 0.0
            return made

        monkeypatch.setattr(level_module, "Dice", Scripted)
        monkeypatch.setattr(Sampler, "branches", scripted)

    def texts(
        self, make: Callable[[], Engine], params: SamplingParams
    ) -> tuple[dict[tuple[int, ...], float], list[Result]]:
        """Every text that a request can come to with its probability, and the result of every outcome."""
        results: list[Result] = []

        def run(chance: Chance) -> tuple[int, ...]:
            self.chance = chance
            results.append(make().generate([0, 1], params))
            return tuple(results[-1].tokens)

        found: dict[tuple[int, ...], float] = defaultdict(float)
        for probability, text in outcomes(run):
            found[text] += probability
        return found, results


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


def off(found: dict[tuple[int, ...], float], target: ToyModel, params: SamplingParams) -> float:
    """How far a text's probability is from what plain decoding gives it, at most."""
    assert sum(found.values()) == pytest.approx(1.0, abs=PRECISION)
    worst = 0.0
    for text, probability in found.items():
        wanted = 1.0
        for i, token in enumerate(text):
            wanted *= spread(target, [0, 1, *text[:i]], params, i, target.end_ids).get(token, 0.0)
        worst = max(worst, abs(probability - wanted))
    return worst


def toy(seed: int, size: int = 2, kind: type[ToyModel] = ToyModel, **options: Any) -> ToyModel:
    return kind(size, seed=seed, order=2, scale=1.2, **options)


class Silent(ToyModel):
    """Says nothing after some texts."""

    def logits(self, prefix: Sequence[int]) -> np.ndarray:
        out = super().logits(prefix)
        return np.full_like(out, np.nan) if [int(token) for token in prefix[-2:]] == [1, 0] else out


class Worded(ToyModel):
    """With a tokenizer: drafts without one may have heads of another size."""

    tokenizer = "words"

    def encode(self, prompt: Sequence[int]) -> list[int]:
        return list(prompt)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return ""


def pair(low: int, high: int, below: dict[str, Any] | None = None, **options: Any) -> Callable[[int], Any]:
    """A draft model under a draft model, for a vocabulary of some size."""
    return lambda size: [
        fixed(low, toy(3, size), "lowest", **(below or {})),
        fixed(high, toy(2, size), **options),
    ]


def over_table(k: int, **options: Any) -> Callable[[int], Any]:
    return lambda size: [fixed(3, "ngram", "lowest", options=NGRAM), fixed(k, toy(2, size), **options)]


def alone(k: int, **options: Any) -> Callable[[int], Any]:
    return lambda size: [fixed(k, toy(2, size), **options)]


def adaptive(*trees: Any) -> Callable[[int], Any]:
    """Draft models with the default controller, the upper one last."""
    names = ("lowest", "draft")[-len(trees) :]
    made = list(zip(names, (3, 2)[-len(trees) :], trees, strict=True))
    return lambda size: [LevelConfig(model=toy(seed, size), name=name, tree=tree, k_max=3) for name, seed, tree in made]


def merging(k: int) -> Callable[[int], Any]:
    return lambda size: [fixed(k, ["ngram", LevelConfig(model=toy(3, size), tree=(2, 1))], "lowest")]


#: Levels, size of the vocabulary, tokens, and what else: parameters, end tokens, doubt, the engine's options.
OUTCOMES: dict[str, tuple[Callable[[int], Any], int, int, dict[str, Any]]] = {
    "chain": (alone(3), 2, 5, {}),
    "chain, three tokens": (alone(2), 3, 4, {}),
    "chain, top-k": (alone(2), 3, 4, {"params": {"top_k": 2}}),
    "chain in doubt": (adaptive("chain"), 2, 5, {"doubt": True}),
    "tree": (alone(2, tree=(2, 1)), 3, 3, {}),
    "tree, top-p": (alone(2, tree=(2, 2)), 3, 3, {"params": {"top_p": 0.8}}),
    "tree, cut by the budget": (alone(2, tree=(2, 2), budget=3), 3, 4, {}),
    "tree, cut where a text may end": (alone(3, tree=(2, 1, 1), budget=4), 3, 4, {"ends": (0,)}),
    "tree in doubt": (adaptive((2, 1)), 2, 4, {"doubt": True}),
    "dynamic tree": (alone(3, tree="dynamic", budget=4), 2, 5, {}),
    "dynamic tree in doubt": (adaptive("dynamic"), 2, 5, {"doubt": True}),
    "middle level, K small": (pair(3, 1), 2, 4, {}),
    "middle level": (pair(2, 2), 2, 5, {}),
    "middle level, three tokens": (pair(2, 2), 3, 4, {}),
    "middle level, top-k": (pair(2, 2), 3, 4, {"params": {"top_k": 2}}),
    "middle level, penalty": (pair(2, 1), 2, 4, {"params": {"repetition_penalty": 1.5}}),
    "middle level in doubt": (adaptive("chain", "chain"), 2, 4, {"doubt": True}),
    "middle level, end": (pair(2, 2), 3, 4, {"ends": (0,)}),
    "middle level, end comes late": (pair(2, 2), 3, 4, {"ends": (0,), "params": {"min_new_tokens": 3}}),
    "middle level over a table": (over_table(1), 2, 5, {}),
    "middle level over a tree": (pair(1, 1, {"tree": (2,)}), 3, 4, {}),
    "middle level over a dynamic tree": (pair(2, 1, {"tree": "dynamic", "budget": 4}), 2, 4, {}),
    "middle level over merged ones": (lambda size: [*merging(2)(size), fixed(1, toy(2, size))], 2, 5, {}),
    "merged": (merging(2), 2, 5, {}),
    "tail": (pair(2, 1, tail=True), 2, 4, {}),
    "tail on a tree": (pair(2, 1, tail=True, tree=(2,), budget=8), 3, 4, {}),
    "short context": (lambda size: [fixed(2, toy(3), "lowest"), fixed(2, toy(2, max_length=4))], 2, 5, {}),
    "short context, tree": (lambda size: [fixed(2, toy(2, max_length=4), tree=(2, 1))], 2, 5, {}),
    "larger head": (lambda size: [fixed(2, toy(3, 3), "lowest"), fixed(1, toy(2, 4))], 2, 4, {}),
    "smaller head": (lambda size: [fixed(2, toy(3, 4), "lowest"), fixed(1, toy(2, 2))], 3, 4, {}),
    "smaller head below": (lambda size: [fixed(2, toy(3, 2), "lowest"), fixed(1, toy(2, 4))], 3, 4, {}),
    "smaller head, tree": (lambda size: [fixed(2, toy(2, 2), tree=(2, 1))], 3, 4, {}),
    "no numbers": (lambda size: [fixed(2, toy(2, 2, Silent))], 2, 4, {}),
    "no numbers, tree": (lambda size: [fixed(2, toy(2, 3, Silent), tree=(1, 2))], 3, 4, {}),
    "middle level, no numbers": (lambda size: [fixed(2, toy(3), "lowest"), fixed(2, toy(2, 2, Silent))], 2, 4, {}),
    "middle level, no numbers below": (
        lambda size: [fixed(2, toy(3, 2, Silent), "lowest"), fixed(2, toy(2))],
        2,
        4,
        {},
    ),
    "tree over a level": (pair(1, 1, tree="dynamic", budget=3), 3, 4, {}),
    "tree over a level in doubt": (adaptive("chain", "dynamic"), 3, 3, {"doubt": True}),
    "fixed tree over a level": (pair(2, 2, tree=(2,), budget=8), 3, 3, {}),
    "tree over a table": (over_table(1, tree="dynamic", budget=3), 3, 4, {}),
    "tail on a dynamic tree": (pair(1, 1, tail=True, tree="dynamic", budget=4), 2, 4, {}),
    "bypass and probes": (pair(2, 2), 2, 5, {"bypass": CLOSING}),
    "bypass and probes over a table": (over_table(2), 2, 6, {"bypass": CLOSING}),
}


#: Levels whose tokens are judged as those of the level above, or that it never asks.
UNJUDGED = {
    "tail on a tree": ("lowest",),
    "fixed tree over a level": ("lowest",),
    "tree over a level in doubt": ("lowest",),
}


def every_outcome(world: World, rule: str, case: str) -> tuple[float, list[Result]]:
    """How far off a text's probability is at most, and all results."""
    levels, size, tokens, options = OUTCOMES[case]
    options = dict(options)
    params = SamplingParams(temperature=1.0, max_new_tokens=tokens, seed=7, **options.pop("params", {}))
    target = toy(1, size, Worded, end_ids=options.pop("ends", ()))
    found, results = world.texts(lambda: engine(rule, levels(size), target, **{"max_batch": 1, **options}), params)
    return off(found, target, params), results


@pytest.mark.parametrize("case", OUTCOMES)
@pytest.mark.parametrize("rule", ["rejection", "traversal"])  # block judges as traversal does
def test_every_outcome(world: World, rule: str, case: str) -> None:
    worst, results = every_outcome(world, rule, case)
    assert worst < PRECISION
    judged(results, unjudged=UNJUDGED.get(case, ()), flawless="no numbers" not in case)


@pytest.mark.parametrize("rule", ["eager", "softened"])
@pytest.mark.parametrize("case", ["chain", "tree", "middle level, top-k", "merged", "tail", "chain in doubt"])
def test_every_outcome_of_a_wrong_rule(world: World, rule: str, case: str) -> None:
    assert every_outcome(world, rule, case)[0] > 1e-3


# -- many texts ------------------------------------------------------------------------------------------

SIZE, ROWS, NEW, RUN = 4, 200, 13, 3  # a prompt's own token, then four runs of three
PARAMS = [
    SamplingParams(temperature=1.0, max_new_tokens=NEW),
    SamplingParams(temperature=1.0, top_k=3, max_new_tokens=NEW),
]


def target_model() -> ToyModel:
    return ToyModel(SIZE, seed=3, order=1, scale=1.3)


def guess(seed: int, share: float) -> ToyModel:
    """A draft model that has so much of the target's logits."""
    return ToyModel(SIZE, seed=seed, order=1, scale=1.5, mix=(target_model(), share))


TEXTS: dict[str, tuple[Callable[[], list[LevelConfig]], bool]] = {
    "chain": (lambda: [fixed(3, guess(5, 0.5))], False),
    "tree": (lambda: [fixed(3, guess(5, 0.5), tree=(2, 2, 1), budget=8)], False),
    "dynamic": (lambda: [fixed(3, guess(5, 0.5), tree="dynamic", budget=6)], False),
    "merged": (
        lambda: [fixed(3, ["ngram", LevelConfig(model=guess(6, 0.3)), LevelConfig(model=guess(5, 0.5), tree=(2,))])],
        False,
    ),
    "three levels": (lambda: [fixed(3, "ngram", "lowest", options=NGRAM), fixed(2, guess(5, 0.5))], False),
    "doubt": (lambda: [LevelConfig(model=guess(5, 0.5), name="draft", tree="chain")], True),
}


def texts(rule: str, case: str) -> tuple[list[Result], list[float]]:
    """Results of seeded requests, half with each parameters, and the floors that the draft model met."""
    levels, doubt = TEXTS[case]
    made = engine(rule, levels(), target_model(), doubt, max_batch=100)
    floors: list[float] = []
    propose = made.target.source.drafter.propose

    def note(asks: Sequence[Any]) -> Any:
        floors.extend(ask.floor for ask in asks)
        return propose(asks)

    made.target.source.drafter.propose = note
    params = [dataclasses.replace(PARAMS[i % 2], seed=i) for i in range(2 * ROWS)]
    return made.generate([[0, 1]] * len(params), params), floors


def likelihood(results: Sequence[Result], params: SamplingParams) -> float:
    """The chance that a right sampler is at least as far off: of the runs of three, by the token before each."""
    counts: dict[int, Counter[tuple[int, ...]]] = defaultdict(Counter)
    for result in results:
        assert len(result.tokens) == NEW
        for at in range(1, NEW, RUN):
            counts[result.tokens[at - 1]][tuple(result.tokens[at : at + RUN])] += 1
    statistic, freedom = 0.0, 0
    for token, found in counts.items():
        wanted = dict(runs(target_model(), token, params))
        if not set(found) <= set(wanted):
            return 0.0
        cells = list(pooled(found, wanted))
        statistic += sum((seen - wanted) ** 2 / wanted for seen, wanted in cells)
        freedom += len(cells) - 1
    assert freedom > 20
    return exceeded(statistic, freedom)


def runs(model: ToyModel, token: int, params: SamplingParams) -> Iterator[tuple[tuple[int, ...], float]]:
    """Every run after a token, with the product of the target's probabilities."""
    paths = {(token,): 1.0}
    for _ in range(RUN):
        paths = {
            (*path, after): chance * p
            for path, chance in paths.items()
            for after, p in spread(model, [*path], params, NEW, ()).items()
        }
    return ((path[1:], chance) for path, chance in paths.items())


def pooled(found: Counter[tuple[int, ...]], wanted: dict[tuple[int, ...], float]) -> Iterator[tuple[float, float]]:
    """Seen and expected, cell by cell; the rarest are one cell, so that at least five are expected in each."""
    total, rest = sum(found.values()), (0.0, 0.0)
    for run in sorted(wanted, key=lambda run: wanted[run]):
        cell = (float(found[run]), total * wanted[run])
        if rest[1] < 5.0:
            rest = (rest[0] + cell[0], rest[1] + cell[1])
        else:
            yield cell
    yield rest


def exceeded(statistic: float, freedom: int) -> float:
    """The chance that a chi-square variable is larger (Wilson and Hilferty 1931)."""
    spread = 2.0 / (9.0 * freedom)
    return 0.5 * math.erfc(((statistic / freedom) ** (1 / 3) - 1.0 + spread) / math.sqrt(2.0 * spread))


@pytest.mark.parametrize("case", TEXTS)
@pytest.mark.parametrize("rule", LOSSLESS)
def test_many_texts(rule: str, case: str) -> None:
    results, floors = texts(rule, case)
    for i, params in enumerate(PARAMS):
        assert likelihood(results[i::2], params) > IMPROBABLE
    judged(results)
    assert any(floors) == TEXTS[case][1], "a controller that adapts lets a draft model stop in doubt"


@pytest.mark.parametrize("rule", ["eager", "softened"])
@pytest.mark.parametrize("case", ["chain", "tree", "doubt"])
def test_many_texts_of_a_wrong_rule(rule: str, case: str) -> None:
    results, _ = texts(rule, case)
    assert min(likelihood(results[i::2], params) for i, params in enumerate(PARAMS)) < IMPROBABLE / 100


@pytest.mark.parametrize(("freedom", "at"), [(10, 18.307), (30, 43.773), (100, 124.342)])
def test_the_chance_of_a_chi_square(freedom: int, at: float) -> None:
    """Tables have these for 5 %."""
    assert exceeded(at, freedom) == pytest.approx(0.05, abs=5e-4)
