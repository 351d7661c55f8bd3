"""Simulations against obviously right loops, and against the engine that was recorded."""

import numpy as np
import pytest
import torch

from cascade import (
    BypassConfig,
    CascadeConfig,
    ConfigError,
    Draft,
    Drafter,
    Engine,
    LevelConfig,
    SamplingParams,
    Verdict,
    hookimpl,
)
from cascade import plugins as plugin_module
from cascade.costs import CostModel, FixedCosts
from cascade.recording import Recording, Said, overhead_of, record, synthetic
from cascade.replay import Replay, VirtualClock, as_they_are, logits_of, numbered, positions
from cascade.rows import Feed, Row, Scores
from cascade.rules import Rule
from cascade.simulate import simulate
from cascade.testing import ManualClock, ToyModel

ALWAYS = BypassConfig(threshold=0.0, gain=False)
V = 24


@pytest.fixture(scope="module")
def plugins():
    return plugin_module.create(entry_points=False)


# -- against a loop ----------------------------------------------------------------------------------------


def loop(texts, k, prompt, target, draft):
    """Seconds of greedy speculation with chains of k tokens; texts: of each, where the draft is right."""
    seconds, done = target(prompt * len(texts)), [1] * len(texts)
    cached = [0] * len(texts)  # tokens that the draft model has read
    while active := [i for i, rights in enumerate(texts) if done[i] < len(rights)]:
        drafted = {i: min(k, len(texts[i]) - done[i] - 1) for i in active}
        for step in range(max(drafted.values())):
            drafting = [i for i in active if drafted[i] > step]
            seconds += draft(len(drafting) if step else sum(prompt + done[i] - cached[i] for i in drafting))
        seconds += target(sum(1 + drafted[i] for i in active))
        for i in active:
            rights = texts[i][done[i] : done[i] + drafted[i]]
            held = len(rights) if rights.all() else int(rights.argmin())
            if drafted[i]:
                cached[i] = prompt + done[i] + min(held, drafted[i] - 1)
            done[i] += held + 1
    return seconds


def fixed(k, **settings):
    draft = LevelConfig(model="draft", name="draft", controller="fixed", k=k, tree="chain", bypass=ALWAYS)
    return CascadeConfig([draft, LevelConfig(model="target", name="target")], **settings)


def sloped(target, draft):
    return FixedCosts(lambda level, tokens: (target if level == "target" else draft)(tokens))


@pytest.mark.parametrize("k", [1, 3, 8])
@pytest.mark.parametrize(("cost", "slope"), [(0.02, 0.0), (0.1, 0.01), (0.05, 0.05)])
@pytest.mark.parametrize("rows", [1, 3])
def test_fixed_chains_take_what_a_loop_says(plugins, k, cost, slope, rows):
    def target(tokens):
        return 1.0 + slope * (tokens - 1)

    def draft(tokens):
        return cost * target(tokens)

    texts = [np.random.default_rng(seed).random(60) < 0.8 for seed in range(rows)]
    recordings = [synthetic(rights, prompt=16, seed=seed) for seed, rights in enumerate(texts)]
    found = simulate(fixed(k), recordings, sloped(target, draft), batch=rows, plugins=plugins)
    assert found.seconds == pytest.approx(loop(texts, k, 16, target, draft), rel=1e-9)
    assert found.new_tokens == 60 * rows


def test_requests_wait_for_their_turn(plugins):
    texts = [np.random.default_rng(seed).random(40) < 0.7 for seed in range(3)]
    recordings = [synthetic(rights, seed=seed) for seed, rights in enumerate(texts)]

    def target(tokens):
        return 1.0 + tokens / 64

    def draft(tokens):
        return 0.1

    found = simulate(fixed(4), recordings, sloped(target, draft), plugins=plugins)
    assert found.seconds == pytest.approx(sum(loop([one], 4, 32, target, draft) for one in texts))


def test_overhead_passes_after_every_forward_and_costs_do_not_see_it(plugins):
    recording = synthetic(np.ones(20, bool), prompt=4)
    plain = CascadeConfig([LevelConfig(model="target", name="target")])
    costs = CostModel()
    found = simulate(
        plain, [recording], sloped(lambda n: 1.0, lambda n: 1.0), overhead=0.25, plugins=plugins, engine_costs=costs
    )
    assert found.seconds == pytest.approx(20 * 1.25)
    assert costs.seconds("target", 1) == pytest.approx(1.0)
    assert overhead_of(found.results) == pytest.approx(0.25, rel=0.1)  # of the last round it passes when it is over


def test_drafters_take_their_time(plugins):
    recording = Recording((1, 2, 3) * 4, (1, 2, 3) * 8)
    below = LevelConfig(drafter="ngram", controller="fixed", k=4, bypass=ALWAYS)
    config = CascadeConfig([below, LevelConfig(model="x", name="target")])
    free = simulate(config, [recording], FixedCosts(lambda level, n: 1.0), plugins=plugins)
    costs = FixedCosts(lambda level, n: 1.0, lambda level, n: 0.01 if level == "ngram" else 1.0)
    timed = simulate(config, [recording], costs, plugins=plugins)
    drafted = timed.results[0].stats.levels[0].drafted
    assert drafted > 10
    assert timed.seconds - free.seconds == pytest.approx(0.01 * drafted)
    assert timed.results[0].stats.levels[0].time_s == pytest.approx(0.01 * drafted)


def test_drafters_take_their_time_once_for_all_rows(plugins):
    recording = Recording((1, 2, 3) * 4, (1, 2, 3) * 8)
    below = LevelConfig(drafter="ngram", controller="fixed", k=4, bypass=ALWAYS)
    config = CascadeConfig([below, LevelConfig(model="x", name="target")])

    def run(each):
        costs = FixedCosts(lambda level, n: 1.0, lambda level, n: each)
        return simulate(config, [recording] * 2, costs, batch=2, plugins=plugins)

    free, timed = run(0.0), run(0.01)
    drafted = sum(result.stats.levels[0].drafted for result in timed.results)
    assert timed.seconds - free.seconds == pytest.approx(0.01 * drafted / 2)


# -- against an engine that was recorded -------------------------------------------------------------------


def cost(level, tokens):
    return {"target": 1.0, "middle": 0.3, "draft": 0.1}[level] * (1 + 0.03 * (tokens - 1))


@pytest.fixture(scope="module", params=[0.0, 1.0], ids=["greedy", "sampled"])
def world(request, plugins):
    """Toy models that take their time, prompts, and recordings of them."""
    clock = ManualClock()

    def toy(name, **settings):
        return ToyModel(V, order=2, scale=4.0, clock=clock, cost=lambda n: cost(name, n), **settings)

    target = toy("target", seed=1)
    models = {"target": target, "middle": toy("middle", seed=2, mix=(target, 0.9))}
    models["draft"] = toy("draft", seed=3, mix=(target, 0.8))
    levels = [LevelConfig(model=models[name], name=name) for name in ("draft", "middle", "target")]
    engine = Engine(CascadeConfig(levels), plugins=plugins, clock=clock)
    prompts = [np.random.default_rng(seed).integers(0, V, 12).tolist() for seed in range(8)]
    params = SamplingParams(max_new_tokens=96, temperature=request.param, seed=5)
    return models, clock, prompts, params, record(engine, prompts, params)


def cascades(models):
    """By name: levels, and by how much a simulation may be off."""

    def of(name, **settings):
        return LevelConfig(model=models[name], name=name, **settings)

    def fix(k, tree):
        return of("draft", controller="fixed", k=k, tree=tree, bypass=ALWAYS)

    ngram = LevelConfig(drafter="ngram")
    return {
        "plain": ([], 0.0),
        "ngram": ([ngram], 0.0),
        "fixed 1": ([fix(1, "chain")], 0.0),
        "fixed 4": ([fix(4, "chain")], 0.0),
        "tree": ([fix(3, (3, 2, 1))], 0.05),
        "chain": ([of("draft", tree="chain")], 0.1),
        "dynamic": ([of("draft")], 0.1),
        "ngram and draft": ([ngram, of("draft")], 0.1),
        "two models": ([of("draft"), of("middle")], 0.1),
        "four levels": ([ngram, of("draft"), of("middle")], 0.1),
        "merged": ([LevelConfig(drafter=["ngram", of("draft")], name="merged")], 0.1),
    }


@pytest.mark.parametrize("name", cascades(dict.fromkeys(("draft", "middle"), object())))
def test_a_simulation_takes_what_the_engine_took(plugins, world, name):
    models, clock, prompts, params, recordings = world
    levels, off = cascades(models)[name]
    config = CascadeConfig([*levels, LevelConfig(model=models["target"], name="target")])
    engine = Engine(config, plugins=plugins, clock=clock)
    began = clock()
    real = [engine.generate(prompt, params) for prompt in prompts]
    seconds = clock() - began
    found = simulate(config, recordings, FixedCosts(cost), plugins=plugins)
    assert found.seconds == pytest.approx(seconds, rel=max(off, 1e-9))
    took, takes = ([result.stats.target_forwards for result in results] for results in (real, found.results))
    assert takes == took if not off else sum(takes) == pytest.approx(sum(took), rel=0.2)


@pytest.mark.parametrize("name", ["ngram", "fixed 4", "ngram and draft", "merged"])
def test_numbers_stand_for_ids(plugins, world, name, monkeypatch):
    """The numbers make simulations fast, and change nothing."""
    models, _, _, _, recordings = world
    levels, _ = cascades(models)[name]
    config = CascadeConfig([*levels, LevelConfig(model=models["target"], name="target")])
    fast = simulate(config, recordings, FixedCosts(cost), plugins=plugins)
    monkeypatch.setattr("cascade.simulate.numbered", as_they_are)
    monkeypatch.setattr("cascade.simulate._Stage._by_first", lambda self, row: self._by_all(row))
    slow = simulate(config, recordings, FixedCosts(cost), plugins=plugins)
    assert [tuple(result.tokens) for result in slow.results] == [one.tokens for one in recordings]
    # What never comes in a text shares numbers: a copy of it may be right by accident.
    assert slow.seconds == pytest.approx(fast.seconds, rel=0.005 if name == "merged" else 1e-4)


def test_levels_of_a_request_may_be_left_out(plugins, world):
    models, _, _, _, recordings = world
    levels, _ = cascades(models)["ngram and draft"]
    config = CascadeConfig([*levels, LevelConfig(model=models["target"], name="target")])
    some = simulate(config, recordings, FixedCosts(cost), params=SamplingParams(levels=["ngram"]), plugins=plugins)
    none = simulate(config, recordings, FixedCosts(cost), params=SamplingParams(speculate=False), plugins=plugins)
    assert all(result.stats.levels[1].forwards == 0 for result in some.results)
    assert all(result.stats.target_forwards == len(result.tokens) for result in none.results)


def test_one_prompt_may_have_several_answers(plugins):
    a, b = (synthetic(np.random.default_rng(seed).random(30) < 0.6, seed=seed) for seed in (1, 2))
    b = Recording(a.prompt, b.tokens, b.said)
    found = simulate(fixed(3), [a, b, a], sloped(lambda n: 1.0, lambda n: 0.1), batch=2, plugins=plugins)
    assert found.new_tokens == 90


# -- other drafters, options, refusals ---------------------------------------------------------------------


class Knows(Drafter):
    """Proposes by id: the next numbers. Notes what it was told."""

    def __init__(self, step=1):
        self.step, self.told = step, []

    def propose(self, asks):
        return [Draft([int(ask.context.tokens[-1]) + self.step * (i + 1) for i in range(ask.want)]) for ask in asks]

    def start(self, row_id, params):
        self.told.append("start")

    def observe(self, row_id, verdict):
        self.told += verdict.chain

    def end(self, row_id):
        self.told.append("end")


def counting():
    return Recording((5, 6, 7), tuple(range(8, 40)), {"draft": Said(np.arange(8, 40)[:, None], np.ones((32, 1)))})


def test_other_drafters_see_the_ids_that_there_were(plugins):
    drafter = Knows()
    levels = [LevelConfig(drafter=drafter, name="knows", controller="fixed", k=4, bypass=ALWAYS), "target"]
    found = simulate(CascadeConfig(levels), [counting()], FixedCosts(lambda level, n: 1.0), plugins=plugins)
    assert found.seconds == 1 + 31 // 5 + 1
    assert drafter.told == []  # a copy served
    again = simulate(CascadeConfig(levels), [counting()], FixedCosts(lambda level, n: 1.0), plugins=plugins)
    assert again.seconds == found.seconds


def test_a_drafter_hears_of_its_requests(plugins, monkeypatch):
    monkeypatch.setattr("cascade.simulate.copy.deepcopy", lambda drafter: drafter)
    drafter = Knows()
    levels = [LevelConfig(drafter=drafter, controller="fixed", k=4, bypass=ALWAYS), "target"]
    simulate(CascadeConfig(levels), [counting()], FixedCosts(lambda level, n: 1.0), plugins=plugins)
    assert drafter.told == ["start", *range(8, 40), "end"]


def test_options_reach_the_drafter_and_the_controller(plugins):
    recording = Recording((1, 2) * 8, (1, 2) * 10)
    costs = FixedCosts(lambda level, n: 1.0)
    for options, forwards in (({"n_min": 2}, 9), ({"n_min": 30, "n_max": 30}, 20)):
        level = LevelConfig(drafter="ngram", k=4, k_max=4, bypass=ALWAYS, options=options)
        found = simulate(CascadeConfig([level, "target"]), [recording], costs, plugins=plugins)
        assert found.results[0].stats.target_forwards <= forwards
    with pytest.raises(ConfigError, match="no option 'n_mim'"):
        simulate(
            CascadeConfig([LevelConfig(drafter="ngram", options={"n_mim": 1}), "target"]), [recording], costs,
            plugins=plugins,
        )  # fmt: skip


def seconds_of(plugins, levels, recordings, costs=None, **settings):
    costs = sloped(lambda n: 1.0 + n / 64, lambda n: 0.05) if costs is None else costs
    return simulate(CascadeConfig(levels, **settings), recordings, costs, plugins=plugins).seconds


def test_members_of_a_merged_level_go_by_their_names_alone(plugins):
    class Some(FixedCosts):
        def draft_seconds(self, level, tokens=1, rows=1):
            return {"ngram": 0.01, "merged": 1.0}.get(level)

    recording = Recording((1, 2, 3) * 4, (1, 2, 3) * 8)
    merged = LevelConfig(drafter=["ngram", "ngram"], name="merged", controller="fixed", k=4, bypass=ALWAYS)
    free = seconds_of(plugins, [merged, "target"], [recording], FixedCosts(lambda level, n: 1.0))
    took = seconds_of(plugins, [merged, "target"], [recording], Some(lambda level, n: 1.0))
    assert took > free + 0.1  # "merged/ngram" is "ngram"; "merged/ngram-2" is nobody known


@pytest.mark.parametrize("rule", ["rejection", "block", "traversal"])
def test_every_rule_is_judged_as_coupled(plugins, rule):
    recording = synthetic(np.random.default_rng(3).random(40) < 0.7)
    levels = fixed(4).levels
    assert seconds_of(plugins, levels, [recording], rule=rule) == seconds_of(plugins, levels, [recording])


class Anything(Rule):
    """Accepts whatever is drafted."""

    lossless = False

    def walk(self, draft, verifier, ends):
        nodes = list(range(len(draft)))
        return Verdict(nodes, verifier(len(draft) - 1), len(draft), len(draft), len(draft))


class Lossy:
    """A plugin with that rule."""

    @hookimpl
    def cascade_register_rules(self):
        return {"anything": Anything}


def test_rules_that_change_the_text_are_not_simulated():
    plugins, recording = plugin_module.create(Lossy(), entry_points=False), synthetic(np.zeros(20, bool))
    levels = fixed(4).levels
    assert seconds_of(plugins, levels, [recording], rule="anything") == seconds_of(plugins, levels, [recording])


def test_the_cascades_bypass_counts(plugins):
    recording, levels = synthetic(np.random.default_rng(3).random(60) < 0.7), ["draft", "target"]
    strict = BypassConfig(threshold=0.99)
    assert seconds_of(plugins, levels, [recording], bypass=strict) > seconds_of(plugins, levels, [recording])


def test_model_objects_say_what_they_can_do(plugins):
    recording = synthetic(np.random.default_rng(3).random(40) < 0.5)

    def took(tree, **target):
        draft = LevelConfig(model="x", name="draft", tree=tree)
        return seconds_of(plugins, [draft, LevelConfig(name="target", **target)], [recording])

    flat = ToyModel(V)
    flat.trees = False
    assert took(None, model=flat) == took("chain", model="y") != took(None, model="y")


def test_a_text_may_be_longer_than_a_drafts_context(plugins):
    recording = synthetic(np.ones(60, bool), prompt=10)
    draft = LevelConfig(model=ToyModel(V, max_length=20), name="draft", controller="fixed", k=4, bypass=ALWAYS)
    found = simulate(
        CascadeConfig([draft, "target"]), [recording], sloped(lambda n: 1.0, lambda n: 0.1), plugins=plugins
    )
    assert "longer than the context" in found.results[0].stats.levels[0].decisions[-1][2]


def test_a_copy_of_the_target_starts_with_more_trust(plugins):
    recording = synthetic(np.ones(20, bool), level="copy")
    costs = FixedCosts(lambda level, n: 1.0 if level == "target" else 0.5)
    reasons = []
    for model in ("self", "x"):
        levels = [LevelConfig(model=model, name="copy"), LevelConfig(model="y", name="target")]
        found = simulate(CascadeConfig(levels), [recording], costs, plugins=plugins)
        reasons.append(found.results[0].stats.levels[0].decisions[0])
    assert reasons[0] != reasons[1]


@pytest.mark.parametrize(
    ("config", "recordings", "costs", "message"),
    [
        (fixed(2), [], FixedCosts(lambda level, n: 1.0), "nothing to simulate"),
        (fixed(2), [synthetic(np.ones(4, bool), level="graft")], FixedCosts(lambda level, n: 1.0), "Did you mean 'gra"),
        (fixed(2), [counting()], CostModel(), "the costs say nothing of level 'draft'"),
        (
            CascadeConfig([Knows(), "target"]),
            [Recording((1,), (2,)), Recording((1,), (3,))],
            FixedCosts(lambda level, n: 1.0),
            "recordings 0 and 1 answer one prompt in two ways",
        ),
        (CascadeConfig([LevelConfig(drafter=Knows), "target"]), [counting()], FixedCosts(lambda n, t: 1.0), "a class"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(plugins, config, recordings, costs, message):
    with pytest.raises(ConfigError, match=message) as refused:
        simulate(config, recordings, costs, plugins=plugins)
    assert "\n" not in str(refused.value)


# -- the models --------------------------------------------------------------------------------------------


def random_feed(rng, row):
    """Feeds a row context and a tree, perhaps with nodes that it holds already; as a list of feeds in order."""
    chain, nodes = rng.integers(1, 5), rng.integers(0, 6)
    tokens = rng.integers(0, V, chain + nodes).tolist()
    parents = [int(rng.integers(-1, i)) for i in range(nodes)]
    if not nodes:
        return [Feed(row, tokens, int(rng.integers(1, chain + 1)))]
    if rng.random() < 0.5:
        return [Feed(row, tokens, int(rng.integers(1, chain + nodes + 1)), parents)]
    held = int(rng.integers(0, nodes))
    feeds = [Feed(row, tokens[:chain], 1)]
    if held:
        feeds.append(Feed(row, tokens[chain : chain + held], held, parents[:held]))
    return [*feeds, Feed(row, tokens[chain + held :], nodes - held, parents)]


def test_nodes_stand_where_their_paths_end():
    toy, rng = ToyModel(V, order=1 << 40), np.random.default_rng(0)
    for _ in range(300):
        row = Row()
        row.append(rng.integers(0, V, rng.integers(0, 9)).tolist())
        for feed in random_feed(rng, row):
            assert positions(feed) == [len(prefix) - 1 for prefix in toy._prefixes(feed)]
            row.append(feed.tokens)


@pytest.mark.parametrize("vocab", [V, 1 << 20], ids=["kept", "made when asked"])
def test_a_replay_says_what_stands_after_each_node(vocab):
    toy, rng, clock = ToyModel(V, order=1 << 40), np.random.default_rng(1), VirtualClock()
    prompt, n = 3, 12 if vocab > V else 40
    said = Said(rng.integers(0, V, (n, 2)), np.tile(np.float32([[0.6, 0.3]]), (n, 1)))
    costs = FixedCosts(lambda level, tokens: float(tokens))
    model = Replay("draft", [(prompt, said)], lambda row: 0, costs, clock, 0.0, vocab)
    lines = logits_of(said, vocab)
    for _ in range(40 if vocab == V else 3):
        rows, spent = [model.new_row() for _ in range(3)], 0
        for row in rows:
            row.append([0] * int(rng.integers(0, 5)))
        todo = [random_feed(rng, row) for row in rows]
        for step in range(max(map(len, todo))):
            feeds = [feeds[step] for feeds in todo if step < len(feeds)]
            places = [len(prefix) - prompt for feed in feeds for prefix in toy._prefixes(feed)[-feed.keep :]]
            before = clock()
            out = model.forward(feeds)
            spent = clock() - before
            assert spent == sum(len(feed.tokens) for feed in feeds)
            assert (out.numpy() == lines[np.clip(places, 0, n - 1)]).all()


def test_a_fork_goes_on_where_its_row_is():
    said = Said(np.arange(4)[:, None], np.ones((4, 1), np.float32))
    model = Replay("x", [(2, said)], lambda row: 0, FixedCosts(lambda level, n: 1.0), VirtualClock(), 0.0, V)
    row = model.new_row()
    model.forward([Feed(row, [3, 4, 5], 1)])
    assert model.forward([Feed(row.fork(), [6], 1)]).argmax() == 2
    row.check(np.array([3, 4, 5, 9]))
    assert row.length == 3


def test_logits_have_the_chances_that_were_recorded():
    said = Said(np.array([[3, 5], [2, 1], [4, 4], [0, 0]]), np.float32([[0.6, 0.3], [0.2, 0.7], [1, 0], [0, 0]]))
    lines = torch.from_numpy(logits_of(said, 50))
    shares = lines.softmax(-1)
    assert lines.argmax(-1).tolist()[:3] == [3, 2, 4]
    assert Scores.of(lines, greedy=False, sure=True).chances[:3] == pytest.approx([0.6, 0.2, 1.0], rel=0.02)
    assert shares[0, 5] == pytest.approx(0.3, rel=1e-4)
    assert shares[1, 1] < shares[1, 2]  # what was said first stays the likeliest


def test_texts_in_numbers_are_told_apart_by_their_first_token():
    one = synthetic(np.array([True, False, True]), prompt=4, seed=1)
    texts, size = numbered([one, one, one], ["draft"])
    assert [int(text.prompt[0]) for text in texts] == [0, 1, 2]
    assert size > 7
    for text in texts:
        right = text.said["draft"].ids[:, 0] == text.tokens
        assert right.tolist() == [True, False, True]


def test_what_two_levels_say_stays_equal_or_different():
    ids = np.array([[7, 8], [9, 2]]), np.array([[8, 7], [1, 9]])
    chances = np.full((2, 2), 0.5, np.float32)
    one = Recording((1, 2), (1, 3), {"a": Said(ids[0], chances), "b": Said(ids[1], chances)})
    [text], _ = numbered([one], ["a", "b"])
    a, b = text.said["a"].ids, text.said["b"].ids
    assert a[0, 0] == b[0, 1] != a[0, 1] == b[0, 0]
    assert a[1, 0] == b[1, 1] not in text.tokens
    assert a[1, 1] == text.prompt[1]
    assert b[1, 0] == text.prompt[0] == text.tokens[0]
