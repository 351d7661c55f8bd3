"""Bypass, investment and reasons, on toy models with costs that are told and a clock that is moved."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from cascade import BypassConfig, CascadeConfig, Draft, Drafter, Engine, LevelConfig, SamplingParams
from cascade.control.gate import PROBE_SHARE
from cascade.errors import ConfigError
from cascade.testing import FixedCosts, ManualClock, ScriptedDrafter, ToyModel
from cascade.trace import JsonTrace

PROMPT = [1, 2, 3, 4]
LONG = SamplingParams(max_new_tokens=400, ignore_eos=True)
DRAFT_COST = 0.2


def cost(level: str, tokens: int) -> float:
    """Seconds of a forward: flat to 8 tokens, then rising; the draft model costs a fifth."""
    seconds = 1.0 + 0.05 * max(0, tokens - 8)
    return seconds * (DRAFT_COST if level == "draft" else 1.0)


def draft_cost(level: str, tokens: int) -> float:
    """Seconds of a proposal: the draft model's forward per token, nothing for scripted drafters."""
    return DRAFT_COST * tokens if level == "draft" else 0.0


class Bench:
    """A cascade on toy models whose clock moves by the cost table, so that time is exact."""

    def __init__(self, *levels: LevelConfig, target: ToyModel | None = None, **config) -> None:
        self.clock = ManualClock()
        self.target = target or ToyModel(clock=self.clock, cost=lambda n: cost("target", n))
        self.target._clock = self.clock
        all_levels = [*levels, LevelConfig(model=self.target, name="target")]
        self.engine = Engine(
            CascadeConfig(all_levels, **config), clock=self.clock, costs=FixedCosts(cost, draft_cost), check=True
        )

    def seconds(self, params: SamplingParams) -> tuple[float, object]:
        before = self.clock.now
        result = self.engine.generate(PROMPT, params)
        return self.clock.now - before, result


def draft_level(bench_clock: ManualClock, target: ToyModel, share: float, **config) -> LevelConfig:
    model = ToyModel(seed=9, mix=(target, share), clock=bench_clock, cost=lambda n: cost("draft", n))
    return LevelConfig(model=model, name="draft", **config)


def with_draft(share: float, *below: LevelConfig, **config) -> Bench:
    clock, target = ManualClock(), ToyModel(cost=lambda n: cost("target", n))
    bench = Bench.__new__(Bench)
    bench.clock, bench.target = clock, target
    target._clock = clock
    levels = [*below, draft_level(clock, target, share, **config), LevelConfig(model=target, name="target")]
    bench.engine = Engine(CascadeConfig(levels), clock=clock, costs=FixedCosts(cost, draft_cost), check=True)
    return bench


def test_a_wrong_drafter_is_bypassed_and_costs_next_to_nothing() -> None:
    """snowflakedb/ArcticInference#185: drafting made things slower at low acceptance."""
    truth = Bench().engine.generate(PROMPT, LONG).tokens
    bench = Bench(LevelConfig(drafter=ScriptedDrafter([PROMPT + truth], "wrong"), name="wrong", k=4))
    plain, _ = bench.seconds(dataclasses.replace(LONG, speculate=False))
    seconds, result = bench.seconds(LONG)
    level = result.stats.levels[0]
    assert result.tokens == truth
    assert level.drafted <= 0.2 * len(truth)
    assert seconds <= 1.03 * plain
    assert any(what == "bypass" and "alpha 0.00" in reason for _, what, reason in level.decisions)


def test_few_tokens_per_forward_are_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    truth = Bench().engine.generate(PROMPT, LONG).tokens
    bench = Bench(LevelConfig(drafter=ScriptedDrafter([PROMPT + truth], "wrong"), name="wrong", k=4))
    for _ in range(2):
        warning = bench.engine.generate(PROMPT, LONG).stats.warning
        assert warning.startswith("1.00 tokens per forward of the target over 400 forwards: with wrong speculation")
    assert [record.message for record in caplog.records if "per forward" in record.message] == [f"request 0: {warning}"]
    for params in (dataclasses.replace(LONG, speculate=False), dataclasses.replace(LONG, max_new_tokens=20)):
        assert bench.engine.generate(PROMPT, params).stats.warning is None, "plain, or too short to say"
    right = Bench(LevelConfig(drafter=ScriptedDrafter([PROMPT + truth]), name="right"))
    assert right.engine.generate(PROMPT, LONG).stats.warning is None


def test_auto_lets_cost_alone_decide() -> None:
    """A drafter that is right in one of five, and free, pays: a threshold closes it, cost does not."""
    truth = Bench().engine.generate(PROMPT, LONG).tokens

    def bypassed(**options) -> int:
        script = ScriptedDrafter([PROMPT + truth], "mixed", share=0.2)
        bench = Bench(LevelConfig(drafter=script, name="seldom", k=2, k_max=3), **options)
        return bench.engine.generate(PROMPT, LONG).stats.levels[0].bypassed_rounds

    assert bypassed(bypass=BypassConfig(threshold=0.3)) > 200
    assert bypassed(bypass=BypassConfig(threshold="auto")) < 10
    bench = Bench(LevelConfig(drafter=ScriptedDrafter([PROMPT + truth], "mixed", share=0.2), k=2, k_max=3))
    own = bench.engine.generate(PROMPT, dataclasses.replace(LONG, bypass_threshold="auto")).stats.levels[0]
    assert own.bypassed_rounds < 10
    for refused in (1.5, -0.1, "autp", float("nan"), True):
        with pytest.raises(ConfigError, match="threshold must lie in \\[0, 1\\] or be"):
            BypassConfig(threshold=refused)
        with pytest.raises(ConfigError, match="bypass_threshold must lie in"):
            SamplingParams(bypass_threshold=refused)
    with pytest.raises(ConfigError, match="gain=True"):
        BypassConfig(threshold="auto", gain=False)


@pytest.mark.parametrize("fails", [False, True])
def test_a_drafter_that_looks_for_long_and_finds_nothing_is_no_gift(fails: bool) -> None:
    """It proposes nothing, so nothing is ever tested: only its time tells."""
    bench = Bench()

    class Slow(Drafter):
        def propose(self, asks):
            bench.clock.advance(0.3 * len(asks))
            if fails:
                raise RuntimeError("not there")
            return [Draft(()) for _ in asks]

    slow, target = LevelConfig(drafter=Slow(), name="slow"), LevelConfig(model=bench.target, name="target")
    bench.engine = Engine(CascadeConfig([slow, target]), clock=bench.clock, costs=FixedCosts(cost, draft_cost))
    plain, _ = bench.seconds(dataclasses.replace(LONG, speculate=False))
    seconds, result = bench.seconds(LONG)
    assert seconds <= 1.03 * plain
    assert result.stats.levels[0].bypassed_rounds > 350


class Broken(ToyModel):
    """A model whose logits are no numbers."""

    def logits(self, prefix):
        return np.full(self.vocab_size, np.nan)


class Raising(Drafter):
    def propose(self, asks):
        raise ValueError("never")


@pytest.mark.parametrize("kind", ["broken model", "raising drafter"])
def test_what_only_fails_is_bypassed(kind: str) -> None:
    truth = Bench().engine.generate(PROMPT, LONG).tokens
    broken = Broken(cost=lambda n: cost("draft", n))
    level = LevelConfig(model=broken, name="draft") if kind == "broken model" else LevelConfig(drafter=Raising())
    bench = Bench(level)
    broken._clock = bench.clock
    plain, _ = bench.seconds(dataclasses.replace(LONG, speculate=False))
    seconds, result = bench.seconds(LONG)
    stats = result.stats.levels[0]
    assert result.tokens == truth
    assert stats.dropped >= 4
    assert stats.bypassed_rounds >= 0.9 * len(truth)
    assert seconds <= 1.03 * plain


def test_a_good_draft_model_is_never_bypassed_and_pays() -> None:
    bench = with_draft(0.9)
    plain, _ = bench.seconds(dataclasses.replace(LONG, speculate=False))
    seconds, result = bench.seconds(LONG)
    assert [what for _, what, _ in result.stats.levels[0].decisions] == ["propose"]
    assert seconds < 0.75 * plain


def test_a_bad_draft_model_is_bypassed_and_probed_cheaply() -> None:
    bench = with_draft(0.0)
    plain, _ = bench.seconds(dataclasses.replace(LONG, speculate=False))
    seconds, result = bench.seconds(LONG)
    level = result.stats.levels[0]
    assert level.bypassed_rounds > 300
    assert level.forwards > 0
    assert seconds <= 1.04 * plain


def test_a_level_comes_back_when_the_text_turns_friendly() -> None:
    """Wrong for 150 tokens, then right: proposing again within 64 tokens of the turn."""
    truth = Bench().engine.generate(PROMPT, LONG).tokens
    text = PROMPT + truth

    class Turns(Drafter):
        costly = False

        def propose(self, asks):
            return [Draft(self.one(len(a.context), min(a.want, a.cap))) for a in asks]

        def one(self, at: int, n: int) -> list[int]:
            right = text[at : at + n]
            return right if at > 150 else [(t + 1) % 32 for t in right]

    bench = Bench(LevelConfig(drafter=Turns(), name="turns", k=4))
    _, result = bench.seconds(LONG)
    assert result.tokens == truth
    changes = [(rounds, what) for rounds, what, _ in result.stats.levels[0].decisions]
    assert [what for _, what in changes] == ["bypass", "propose"]
    # Before it comes back every round emits one token, so rounds count tokens.
    assert 150 - len(PROMPT) < changes[1][0] < 150 - len(PROMPT) + 64


def test_a_users_threshold_is_obeyed_alone() -> None:
    share = 0.75  # a draft that pays, with an alpha far from 1
    pays = with_draft(share, tree="chain").seconds(LONG)[1].stats.levels[0]
    assert pays.alpha is not None
    strict = with_draft(share, tree="chain", bypass=BypassConfig(threshold=0.99)).seconds(LONG)[1].stats.levels[0]
    assert strict.bypassed_rounds > 200 > pays.bypassed_rounds
    own = dataclasses.replace(LONG, bypass_threshold=0.99)
    per_request = with_draft(share, tree="chain").seconds(own)[1].stats.levels[0]
    assert per_request.bypassed_rounds > 200
    never = with_draft(0.0).seconds(dataclasses.replace(LONG, bypass_threshold=0.0))[1].stats.levels[0]
    assert never.bypassed_rounds < 10


def test_a_lower_models_prompt_waits_until_it_pays() -> None:
    bench = with_draft(0.9)
    long_prompt = [i % 11 for i in range(300)]
    short = bench.engine.generate(long_prompt, SamplingParams(max_new_tokens=3)).stats.levels[0]
    assert short.forwards == 0, "three tokens never earn a prompt of 300"
    assert short.decisions[-1][1] == "wait"
    trace = bench.engine.generate(long_prompt, LONG).stats.levels[0]
    assert trace.forwards > 0
    first = next(rounds for rounds, what, _ in trace.decisions if what == "propose")
    assert first >= 1, "never before the first token is out"


def test_a_bypassed_level_passes_the_question_on() -> None:
    truth = with_draft(0.0).seconds(LONG)[1].tokens
    oracle = ScriptedDrafter([PROMPT + truth], "oracle")
    bench = with_draft(0.0, LevelConfig(drafter=oracle, name="oracle", k=4, controller="fixed"))
    _, result = bench.seconds(LONG)
    oracle_level, draft = result.stats.levels[0], result.stats.levels[1]
    assert result.tokens == truth
    assert draft.bypassed_rounds > 0
    assert oracle_level.accepted > 200
    assert result.origins.count(0) > 200


def test_every_level_hears_what_was_committed() -> None:
    """ggml-org/llama.cpp#23269: drafters that had not produced the draft were not told."""
    truth = with_draft(0.9).seconds(LONG)[1].tokens
    oracle = ScriptedDrafter([PROMPT + truth], "mixed")
    heard: list[int] = []
    end = oracle.end
    oracle.end = lambda row_id: (heard.extend(oracle.observed[row_id]), end(row_id))
    bench = with_draft(0.9, LevelConfig(drafter=oracle, name="mixed", k=4))
    bench.seconds(LONG)
    assert heard == truth


def test_a_probe_is_no_dearer_than_its_share() -> None:
    bench = with_draft(0.0, bypass=BypassConfig(threshold=1.0))
    plain, _ = bench.seconds(dataclasses.replace(LONG, speculate=False))
    seconds, result = bench.seconds(LONG)
    probes = result.stats.levels[0].time_s
    assert probes / plain <= 2 * PROBE_SHARE + 0.02
    assert seconds <= 1.04 * plain


def test_a_trace_holds_one_line_a_round(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    trace = JsonTrace(path)
    truth = Bench().engine.generate(PROMPT, LONG).tokens
    drafter = ScriptedDrafter([PROMPT + truth], "mixed")
    bench = Bench(LevelConfig(drafter=drafter, name="mixed", k=4), plugins=[trace])
    _, result = bench.seconds(LONG)
    trace.close()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    rounds, stats = lines[:-1], lines[-1]["stats"]
    assert len(rounds) == result.stats.target_forwards
    assert [t for r in rounds for t in r["tokens"]] == result.tokens
    assert [o for r in rounds for o in r["origins"]] == result.origins
    assert [r["round"] for r in rounds] == list(range(len(rounds)))
    for key in ("drafted", "tested", "accepted"):
        assert sum(r["levels"][0][key] for r in rounds) == stats["levels"][0][key]
    for place, key in enumerate(("drafted", "tested", "accepted")):
        for level in (r["levels"][0] for r in rounds):
            assert sum(verdict[place] for verdict in level["verdicts"]) == level[key]
    assert rounds[1]["position"] == len(PROMPT) + len(rounds[0]["tokens"])
    assert rounds[0]["levels"][-1]["name"] == "target"


def test_nothing_is_left_behind_after_many_requests() -> None:
    """vllm-project/vllm#15506: per-request tables were freed on one path only."""
    bench = with_draft(0.5, LevelConfig(drafter="ngram"))
    params = SamplingParams(max_new_tokens=6)
    for i in range(40):
        if i % 3 == 0:
            stream = bench.engine.stream(PROMPT, params)
            next(stream)
            stream.close()
        else:
            bench.engine.generate([PROMPT] * 3, params)
    engine = bench.engine
    assert not engine.scheduler.live
    for level in engine.chain.levels:
        assert not level.rows
    for governor in engine.chain.governors:
        assert not governor.rows


@pytest.mark.parametrize("batch", [1, 4])
def test_own_work_is_small_next_to_the_budget(batch: int) -> None:
    """Not a benchmark (see benchmarks/speed.py): it catches work that grows by an order of magnitude."""
    import time

    target = ToyModel()
    levels = [LevelConfig(drafter="ngram"), LevelConfig(model=ToyModel(), name="draft"), LevelConfig(model=target)]
    engine = Engine(CascadeConfig(levels), clock=time.perf_counter, costs=FixedCosts(cost, draft_cost))
    results = engine.generate([PROMPT] * batch, LONG)
    own = sum(r.stats.own_work_s for r in results) / sum(r.stats.target_forwards for r in results)
    assert own < 0.05


def test_a_level_under_another_is_asked_several_times_a_round() -> None:
    bench = with_draft(0.9, LevelConfig(drafter="ngram", k_max=1))
    ngram, draft, target = bench.engine.generate([1, 2, 3] * 8, LONG).stats.levels
    assert ngram.bypassed_rounds <= ngram.asks
    assert ngram.asks > target.forwards > 0
    assert draft.asks == target.forwards - 1, "not in the prompt's own round"
    assert draft.proposals <= draft.asks


def timed(draft_cost: float) -> tuple[Engine, ToyModel, ManualClock]:
    """A draft model under a target whose forwards take 0.1 s."""
    clock = ManualClock()
    target = ToyModel(clock=clock, cost=lambda tokens: 0.1)
    draft = ToyModel(clock=clock, cost=lambda tokens: draft_cost)
    levels = [LevelConfig(model=draft, name="draft"), LevelConfig(model=target, name="target")]
    return Engine(CascadeConfig(levels), clock=clock), draft, clock


def test_a_machine_that_was_busy_at_load_keeps_no_level_out_for_good() -> None:
    engine, _, _ = timed(draft_cost=0.01)
    for width in (1, 4, 8, 16, 64) * 8:
        engine.costs.observe("draft", width, 1, 0.3)  # as if something else had kept the machine busy
    params = SamplingParams(max_new_tokens=60, ignore_eos=True)
    used = [engine.generate(PROMPT, params).stats.levels[0].forwards > 0 for _ in range(12)]
    assert not used[0]
    assert used[-1]


def test_a_level_that_is_left_out_is_timed_again_for_a_hundredth_of_the_time() -> None:
    engine, draft, clock = timed(draft_cost=0.5)
    before, began = draft.forwards, clock()
    engine.generate(PROMPT, SamplingParams(max_new_tokens=4, ignore_eos=True))
    assert draft.forwards == before, "three rounds say nothing"
    engine.generate(PROMPT, SamplingParams(max_new_tokens=40, ignore_eos=True, speculate=False))
    assert draft.forwards == before
    for _ in range(200):
        stats = engine.generate(PROMPT, SamplingParams(max_new_tokens=40, ignore_eos=True)).stats
        assert stats.levels[0].forwards == 0
    spent = (draft.forwards - before) * 0.5
    assert draft.forwards - before >= 5
    assert spent <= 0.01 * (clock() - began) + 5 * 0.5


def test_a_texts_length_is_its_own_whether_or_not_it_speculated() -> None:
    bench = with_draft(0.9)
    prompt, params = [i % 11 for i in range(200)], SamplingParams(max_new_tokens=9)
    for speculate in (True, False, False, False, True, False):
        bench.engine.generate(prompt, dataclasses.replace(params, speculate=speculate))
    assert bench.engine.target.source.investment.typical_length == 9
