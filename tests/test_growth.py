"""Trees that a draft model grows, against slow twins: which nodes, in which order, how likely, drawn from what."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from cascade import CascadeConfig, Engine, LevelConfig, SamplingParams
from cascade.control.calibration import Calibration
from cascade.draft import Ask, Context, Draft
from cascade.draft_checks import check_draft
from cascade.growth import Dynamic, Fixed, Shape
from cascade.level import Level
from cascade.noise import Noise
from cascade.rules import Coupled
from cascade.sampling import Sampler
from cascade.testing import FixedCosts, ManualClock, ToyModel
from tests import reference

GREEDY, SAMPLED = SamplingParams(), SamplingParams(temperature=0.8)
PROMPT, BRANCHINGS = [3, 1, 2], [(2,), (3, 2, 1), (1, 3), (4, 4)]
Path = tuple[int, ...]


def grower(model: ToyModel, shape: Shape, end_ids: Sequence[int] = (), vocab_size: int | None = None) -> Level:
    costs, clock = FixedCosts(lambda level, tokens: 1.0), ManualClock()
    return Level(0, "draft", model, None, Coupled(), costs, clock, shape=shape, end_ids=end_ids, vocab_size=vocab_size)


def ask(
    want: int = 3, tokens: Sequence[int] = PROMPT, row: int = 0, seed: int = 0, cost: float = 0, **options: Any
) -> Ask:
    """An ask; verifying a node costs the same whatever their number."""
    options = {"params": GREEDY, "cap": 16, "nodes": 32, "price": lambda nodes: cost * nodes, **options}
    return Ask(Context(row, tokens), want, noise=Noise(seed), prompt_length=len(tokens), **options)


def grown(model: ToyModel, shape: Shape, *asks: Ask, **options: Any) -> list[Draft]:
    level = grower(model, shape, **options)
    for one in asks:
        level.start(one.context.row_id, one.params)
    return level.propose(asks)


def nodes(draft: Draft) -> list[tuple[Path, float | None]]:
    """Each node's tokens from the root and what the model said of it, depth first, siblings in their order."""
    checked = check_draft(draft, 99, 1 << 30)
    assert checked.chances is not None
    return [
        (tuple(checked.tokens[one] for one in checked.path(node)), checked.chances[node])
        for node in range(len(checked))
    ]


def same(draft: Draft, wanted: Sequence[tuple[Path, float]]) -> None:
    found = nodes(draft)
    assert [path for path, _ in found] == [path for path, _ in wanted]
    firsts: dict[Path, float] = {}
    for (path, said), (_, chance) in zip(found, wanted, strict=True):
        left = 1.0 - firsts[path[:-1]] if path[:-1] in firsts else 1.0  # beside the likeliest: its share of the rest
        firsts.setdefault(path[:-1], chance)
        assert said is None or said * left == pytest.approx(chance, rel=1e-4, abs=1e-6), path


# -- the twins -------------------------------------------------------------------------------------------


def children(model: ToyModel, one: Ask, path: Path) -> list[tuple[int, float]]:
    """All tokens after a path, in the order in which they would be chosen, each with its chance.

    The first holds as often as the model's best token is likely; another takes of what is left its share: as it
    compares with all others where the row is greedy, as it compares with the first in the race where chance decides.
    """
    ids = [*one.context.tokens.tolist(), *path]
    logits = model.logits(ids).tolist()
    p = np.exp(np.array(logits) - max(logits))
    sure = 1.0 / p.sum()
    if one.params.temperature == 0:
        order = sorted(range(len(p)), key=lambda token: (-p[token], token))
        return [(token, sure if i == 0 else p[token] * sure) for i, token in enumerate(order)]
    scores = {
        token: (logits[token] - max(logits)) / one.params.temperature
        + reference.gumbel(one.noise.seed, len(ids), token)
        for token in reference.survivors(logits, one.params.temperature, one.params.top_k)
    }
    order = sorted(scores, key=lambda token: -scores[token])
    chances = [(1.0 - sure) * math.exp(scores[token] - scores[order[0]]) for token in order]
    return list(zip(order, [sure, *chances[1:]], strict=True))


def fixed_twin(
    model: ToyModel, one: Ask, branching: Sequence[int], ends: Sequence[int] = (), path: Path = (), share: int = -1
) -> list[tuple[Path, float]]:
    """So many children at each node; where the budget is too small, it is shared alike among siblings."""
    share = one.nodes if share < 0 else share
    depth = len(path)
    count = min(branching[depth] if depth < len(branching) else 1, share)
    if depth >= min(one.want, one.cap) or count == 0 or (path and path[-1] in ends):
        return []
    found = []
    for token, chance in children(model, one, path)[:count]:
        below = fixed_twin(model, one, branching, ends, (*path, token), (share - count) // count)
        found += [((*path, token), chance), *below]
    return found


def dynamic_twin(model: ToyModel, one: Ask, ends: Sequence[int] = ()) -> list[tuple[Path, float]]:
    """The likeliest nodes of the whole tree with four children everywhere.

    The engine only expands what it would keep. That comes to the same where every node costs as much: no node is
    likelier than its parent, so what is not among the likeliest of the nodes so far, or does not pay, never will, nor
    does what is below it. (Equal values could be cut either way; random ones are not equal.)
    """

    def whole(path: Path, value: float) -> list[tuple[float, Path, float]]:
        if len(path) >= min(one.want, one.cap) or (path and (path[-1] in ends or value < one.floor)):
            return []
        found = []
        for token, chance in children(model, one, path)[:4]:
            found += [(value * chance, (*path, token), chance), *whole((*path, token), value * chance)]
        return found

    every = whole((), 1.0)
    order = sorted(range(len(every)), key=lambda i: -every[i][0])[: one.nodes]
    kept = {i for rank, i in enumerate(order) if rank == 0 or every[i][0] > one.price(1)}
    return [(path, chance) for i, (_, path, chance) in enumerate(every) if i in kept]


# -- against them ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "params", [GREEDY, SAMPLED, dataclasses.replace(SAMPLED, top_k=3)], ids=["greedy", "0.8", "top-k"]
)
@pytest.mark.parametrize("branching", BRANCHINGS)
def test_fixed_trees_equal_their_twin(branching: tuple[int, ...], params: SamplingParams) -> None:
    for seed in range(5):
        model = ToyModel(12, seed=seed)
        for nodes_ in (1, 2, 5, 8, 32):
            for want in (1, 2, 4):
                one = ask(want, seed=seed, params=params, nodes=nodes_)
                [draft] = grown(model, Fixed(branching), one)
                same(draft, fixed_twin(model, one, branching))
                assert len(draft) <= nodes_
                assert draft.depth <= want
                assert draft.q is None


@pytest.mark.parametrize(
    "params", [GREEDY, SAMPLED, dataclasses.replace(SAMPLED, top_k=3)], ids=["greedy", "0.8", "top-k"]
)
def test_dynamic_trees_equal_their_twin(params: SamplingParams) -> None:
    for seed in range(8):
        model = ToyModel(12, seed=seed, scale=1.0 + seed % 3)
        for nodes_ in (1, 3, 8, 32):
            for want in (1, 3, 5):
                one = ask(want, seed=seed, params=params, nodes=nodes_)
                same(grown(model, Dynamic(), one)[0], dynamic_twin(model, one))


@pytest.mark.parametrize("cost", [0.0, 0.02, 0.2])
@pytest.mark.parametrize("floor", [0.0, 0.05, 0.3])
def test_doubt_ends_branches(floor: float, cost: float) -> None:
    total = 0
    for seed in range(8):
        model = ToyModel(12, seed=seed)
        one = ask(4, floor=floor, cost=cost)
        [draft] = grown(model, Dynamic(), one)
        same(draft, dynamic_twin(model, one))
        total += len(draft)
    assert total < 250 or (cost == 0.0 and floor < 0.1)


@pytest.mark.parametrize("seed", range(4))
def test_nodes_are_kept_as_long_as_they_pay_together(seed: int) -> None:
    """A kernel's next tile costs as much for one node as for eight."""
    model = ToyModel(12, seed=seed)
    one = ask(3, price=lambda nodes: 0.4 * math.ceil(nodes / 8))
    [draft] = grown(model, Dynamic(), one)
    assert len(draft) % 8 == 0
    every = dynamic_twin(model, ask(3))
    assert set(nodes(draft)[0][0]) <= {token for path, _ in every for token in path}


def test_a_models_chances_are_corrected_by_what_they_were_worth() -> None:
    """For what is kept; what is handed up is what the model said, or it would be corrected twice."""
    model = ToyModel(12, seed=1)
    [plain], [halved] = (
        grown(model, Dynamic(), ask(6, floor=0.35, chance=chance)) for chance in (float, lambda p: p / 2)
    )
    assert halved.chances[0] == plain.chances[0]
    assert halved.depth < plain.depth, "doubts come earlier"


@pytest.mark.parametrize("params", [GREEDY, SAMPLED, dataclasses.replace(SAMPLED, top_k=2)])
@pytest.mark.parametrize("shape", [Fixed((3, 2)), Dynamic()])
def test_a_first_child_is_the_token_that_would_be_chosen(shape: Shape, params: SamplingParams) -> None:
    model = ToyModel(12, seed=2)
    for seed in range(20):
        one = ask(2, seed=seed, params=params)
        [draft] = grown(model, shape, one)
        sampler = Sampler(params, one.noise, (), len(PROMPT), draft=True)
        for path in {path[:-1] for path, _ in nodes(draft)}:
            first = next(one for one, _ in nodes(draft) if one[:-1] == path)
            ids = np.array([*PROMPT, *path])
            assert first[-1] == sampler.sample(torch.from_numpy(model.logits(ids)), ids)


# -- forwards --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [Fixed((3, 2, 1)), Dynamic()])
def test_a_forward_per_depth(shape: Shape) -> None:
    model = ToyModel(12)
    level = grower(model, shape)
    level.start(0, GREEDY)
    for want in (1, 2, 4):
        model.forwards = 0
        level.propose([ask(want)])
        assert model.forwards == want
    model.forwards = 0
    assert len(level.propose([ask(2, cap=1)])[0]) <= 4
    assert model.forwards == 1
    assert [len(draft) for draft in level.propose([ask(2, cap=0)])] == [0]


@pytest.mark.parametrize("shape", [Fixed((3, 2, 1)), Dynamic()])
def test_rows_grow_together_and_alone_alike(shape: Shape) -> None:
    model = ToyModel(12, seed=5)
    asks = [
        ask(want, [want, 7, row], row, seed=row, params=[GREEDY, SAMPLED][row % 2], needs_q=row == 3, nodes=9 + row)
        for row, want in enumerate([1, 4, 2, 3])
    ]
    together = grown(model, shape, *asks)
    for one, draft in zip(asks, together, strict=True):
        [alone] = grown(model, shape, one)
        assert nodes(alone) == nodes(draft)
    assert len({draft.depth for draft in together}) > 1


@pytest.mark.parametrize("branching", [(3, 2), (2, 2, 1)])
def test_no_forward_for_nodes_that_may_have_none_below_them(branching: tuple[int, ...]) -> None:
    for nodes_ in (1, 3, 5, 8):
        model = ToyModel(12)
        [draft] = grown(model, Fixed(branching), ask(6, nodes=nodes_))
        assert model.forwards == draft.depth


@pytest.mark.parametrize("shape", [Fixed((2, 2)), Dynamic()])
def test_the_first_path_stays_in_the_cache(shape: Shape) -> None:
    """It most likely is the text: the next forward feeds what is new."""
    model = ToyModel(12, seed=5)
    level = grower(model, shape)
    level.start(0, GREEDY)
    [draft] = level.propose([ask(3)])
    first = [path for path, _ in nodes(draft)]
    first = [path for path in first if path == first[len(path) - 1]]  # depth first: each below the one before
    cache = level.rows[0].cache
    text = cache.ids[: cache.length].tolist()
    assert text[: len(PROMPT)] == PROMPT
    assert tuple(text[len(PROMPT) :]) in first
    cache.check(np.array([*text, 0]))
    [again] = level.propose([ask(3)])
    assert nodes(again) == nodes(draft), "what is cached is true"


# -- limits, ends, and no numbers ------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [Fixed((2, 2)), Dynamic()])
def test_no_deeper_than_the_context(shape: Shape) -> None:
    for room in range(4):
        [draft] = grown(ToyModel(12, max_length=len(PROMPT) + room), shape, ask(6))
        assert draft.depth == room + 1, "the last position decides one more token"
        assert draft.error is None
    [draft] = grown(ToyModel(12, max_length=len(PROMPT) - 1), shape, ask(6))
    assert (len(draft), draft.error) == (0, None)


def test_nothing_comes_after_an_end() -> None:
    seen = 0
    for seed in range(6):
        model, one = ToyModel(6, seed=seed), ask(3, nodes=64)
        [fixed], [dynamic] = (grown(model, shape, one, end_ids=(0, 4)) for shape in (Fixed((3, 3)), Dynamic()))
        same(fixed, fixed_twin(model, one, (3, 3), ends=(0, 4)))
        same(dynamic, dynamic_twin(model, one, ends=(0, 4)))
        for path, _ in [*nodes(fixed), *nodes(dynamic)]:
            assert not {0, 4} & set(path[:-1])
            seen += path[-1] in (0, 4)
    assert seen > 5


class Silent(ToyModel):
    """Says nothing after token 1."""

    def logits(self, prefix: Sequence[int]) -> np.ndarray:
        out = super().logits(prefix)
        return np.full_like(out, np.nan) if int(prefix[-1]) == 1 else out


@pytest.mark.parametrize("chance", [float, Calibration().chance], ids=["float", "calibrated"])
@pytest.mark.parametrize("needs_q", [False, True])
@pytest.mark.parametrize("shape", [Fixed((3, 2)), Dynamic()])
def test_logits_that_are_no_numbers_cost_what_comes_after_them(
    shape: Shape, needs_q: bool, chance: Callable[[float], float]
) -> None:
    for seed in range(12):
        model = Silent(5, seed=seed)
        asks = [ask(3, [2, row], row, seed, params=SAMPLED, needs_q=needs_q, chance=chance) for row in (0, 1, 2)]
        drafts = grown(model, shape, *asks)
        assert len(drafts[1]) == 0, "its context ends with the token"
        assert "not numbers" in str(drafts[1].error)
        for one, draft in zip(asks, drafts, strict=True):
            [alone] = grown(model, shape, one)
            assert nodes(draft) == nodes(alone)
            assert not any(1 in path[:-1] for path, _ in nodes(draft))
        assert len(drafts[0]) > 0


# -- trees that are drawn --------------------------------------------------------------------------------


class Table(ToyModel):
    """The same distribution after every text."""

    def __init__(self, p: Sequence[float]) -> None:
        super().__init__(len(p))
        self.fixed = np.log(np.asarray(p, np.float64))

    def logits(self, prefix: Sequence[int]) -> np.ndarray:
        return self.fixed


P = np.array([0.5, 0.3, 0.15, 0.05])
DRAWN = SamplingParams(temperature=1.0)


@pytest.mark.parametrize("shape", [Fixed((2, 2)), Dynamic()])
def test_drawn_trees_say_what_they_were_drawn_from(shape: Shape) -> None:
    params = dataclasses.replace(SAMPLED, top_k=3)
    model = ToyModel(6, seed=3)
    for seed in range(10):
        one = ask(3, seed=seed, params=params, needs_q=True, nodes=12)
        [draft] = grown(model, shape, one, vocab_size=8)
        assert [row.shape for row in draft.q] == [(8,)] * len(draft), "the target's head is larger"
        sampler = Sampler(params, Noise(0), (), len(PROMPT), draft=True)
        for node in range(len(draft)):
            ids = np.array([*PROMPT, *(draft.tokens[i] for i in draft.path(node)[:-1])])
            want = sampler.probabilities(torch.from_numpy(model.logits(ids)), ids)
            assert torch.equal(draft.q[node][:6], want)
            assert float(draft.q[node][6:].sum()) == 0.0
        check_draft(draft, 99, 8, one.nodes, needs_q=True)


def excess(found: Counter[Any], wanted: dict[Any, float]) -> float:
    """Chi-square over its degrees of freedom, as a number of standard deviations (Wilson and Hilferty 1931)."""
    total, freedom = sum(found.values()), len(wanted) - 1
    assert set(found) <= set(wanted)
    assert min(wanted.values()) * total > 5
    statistic = sum((found[key] - total * p) ** 2 / (total * p) for key, p in wanted.items())
    return ((statistic / freedom) ** (1 / 3) - 1 + 2 / (9 * freedom)) / math.sqrt(2 / (9 * freedom))


def test_siblings_are_drawn_without_replacement_and_branches_apart() -> None:
    """With fixed seeds; new ones would exceed four deviations once in 30,000 times."""
    level = grower(Table(P), Fixed((2, 2)))
    level.start(0, DRAWN)
    pairs: Counter[Any] = Counter()
    below: Counter[Any] = Counter()
    cousins: Counter[Any] = Counter()
    for seed in range(4000):
        [draft] = level.propose([ask(2, seed=seed, params=DRAWN, needs_q=True)])
        a, b, c, d, e, f = draft.tokens  # two roots, two children of each
        assert list(draft.parents) == [-1, -1, 0, 0, 1, 1]
        pairs[a, b] += 1
        below[c, d] += 1
        assert e != f
        cousins[c, e] += 1
    pair = {(a, b): P[a] * P[b] / (1 - P[a]) for a in range(4) for b in range(4) if a != b}
    assert excess(pairs, pair) < 4
    assert excess(below, pair) < 4
    assert excess(cousins, {(c, e): P[c] * P[e] for c in range(4) for e in range(4)}) < 4


@pytest.mark.parametrize("shape", [Fixed((2, 2, 1)), Fixed((3, 1)), Dynamic()])
@pytest.mark.parametrize("nodes_", [3, 5, 8, 20])
def test_the_shape_of_a_drawn_tree_does_not_depend_on_what_is_drawn(shape: Shape, nodes_: int) -> None:
    """Where every text has the same distribution, whatever differs would be the tokens' doing."""
    for cost, floor in [(0.0, 0.0), (0.1, 0.0), (0.0, 0.2)]:
        shapes = set()
        for seed in range(60):
            one = ask(3, seed=seed, params=DRAWN, needs_q=True, nodes=nodes_, cost=cost, floor=floor)
            [draft] = grown(Table(P), shape, one)
            assert len(draft) <= nodes_
            shapes.add(len([parent for parent in draft.parents or range(-1, len(draft) - 1) if parent < 0]))
        assert len(shapes) == 1, "as many roots, whatever they are"


@pytest.mark.parametrize("shape", [Fixed((2,)), Fixed((1, 2)), Dynamic()])
def test_what_has_no_probability_is_not_drawn(shape: Shape) -> None:
    """exp(-900) is no number above 0: a node drawn from that would cost the tree, and by what it is made of."""

    class Certain(ToyModel):
        def logits(self, prefix: Sequence[int]) -> np.ndarray:
            return np.array([0.0, -900.0, -900.0] if prefix[-1] == 0 else [1.0, 0.0, 0.5])

    for seed in range(20):
        for start in (0, 1):
            one = ask(2, [1, start], seed=seed, params=DRAWN, needs_q=True)
            [draft] = grown(Certain(3), shape, one)
            checked = check_draft(draft, 9, 3, one.nodes, needs_q=True)
            assert len(checked) >= 2


# -- in engines ------------------------------------------------------------------------------------------


def engine(*levels: Any, target: ToyModel, **options: Any) -> Engine:
    costs = FixedCosts(lambda level, tokens: 1.0 if level == "target" else 0.01)
    config = CascadeConfig([*levels, LevelConfig(model=target, name="target")], **options)
    return Engine(config, clock=ManualClock(), costs=costs, check=True)


def proposals(made: Engine) -> list[Draft]:
    """What the level under the target will have proposed."""
    seen: list[Draft] = []
    propose = made.target.source.drafter.propose

    def note(asks: Any) -> Any:
        seen.extend(found := propose(asks))
        return found

    made.target.source.drafter.propose = note
    return seen


@pytest.mark.parametrize("params", [GREEDY, dataclasses.replace(SAMPLED, seed=5)], ids=["greedy", "sampled"])
@pytest.mark.parametrize("tree", ["dynamic", (3, 2, 1)])
def test_a_text_is_the_same_with_trees(tree: Any, params: SamplingParams) -> None:
    target = ToyModel(12, seed=1)
    draft = LevelConfig(model=ToyModel(12, seed=2, mix=(target, 0.6)), name="draft", tree=tree, k=3)
    made = engine(draft, target=target)
    seen = proposals(made)
    params = dataclasses.replace(params, max_new_tokens=40)
    prompts = [[1, 2, 3], [4], [5, 6]]
    results = made.generate(prompts, params)
    plain = made.generate(prompts, dataclasses.replace(params, speculate=False))
    assert [one.tokens for one in results] == [one.tokens for one in plain]
    assert any(one.parents is not None for one in seen)
    assert all(level.accepted > 0 for result in results for level in result.stats.levels[:-1])


@pytest.mark.parametrize("who", ["draft", "target"])
def test_models_without_trees_meet_chains(who: str) -> None:
    target = ToyModel(12, seed=1)
    model = ToyModel(12, seed=2, mix=(target, 0.6))
    {"draft": model, "target": target}[who].trees = False
    made = engine(LevelConfig(model=model, name="draft", tree=(3, 2), k=3), target=target)
    seen = proposals(made)
    result = made.generate([1, 2, 3], SamplingParams(max_new_tokens=30))
    assert any(len(one) > 1 for one in seen)
    assert all(one.parents is None for one in seen)
    assert result.tokens == made.generate([1, 2, 3], SamplingParams(max_new_tokens=30, speculate=False)).tokens
    assert not any(level.dropped for level in result.stats.levels)
