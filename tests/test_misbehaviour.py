"""Drafters, processors, observers and models that misbehave cost what they do, and nothing else."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from cascade import CascadeConfig, ConfigError, Draft, Drafter, Engine, LevelConfig, LoadError, SamplingParams
from cascade.testing import FixedCosts, ScriptedDrafter, ToyModel
from tests.tiny import VOCAB, tiny

PROMPT = [1, 2, 3]
PARAMS = SamplingParams(max_new_tokens=30)


def engine(*levels, **options) -> Engine:
    return Engine(CascadeConfig(levels, **options), costs=FixedCosts(lambda *_: 1.0), check=True)


def truth(params: SamplingParams = PARAMS) -> list[int]:
    return engine(ToyModel()).generate(PROMPT, params).tokens


class Odd(Drafter):
    """Does one odd thing, else proposes the truth."""

    def __init__(self, what: str) -> None:
        self.what, self.text = what, PROMPT + truth()

    def start(self, row_id, params):
        if self.what == "start raises":
            raise RuntimeError("start")

    def observe(self, row_id, verdict):
        if self.what == "observe raises":
            raise RuntimeError("observe")

    def end(self, row_id):
        if self.what == "end raises":
            raise RuntimeError("end")

    def propose(self, asks):
        return [self.one(ask) for ask in asks]

    def one(self, ask):
        right = self.text[len(ask.context) : len(ask.context) + 3]
        if self.what == "writes":
            ask.context.tokens[0] = 9
        odd = {
            "floats": Draft(np.array([3.0, 4.0])),
            "nan": Draft(np.array([1.0, np.nan])),
            "short origin": Draft(right, origin=[]),
            "far origin": Draft(right, origin=99),
            "negative id": Draft([-1]),
            "none": None,
            "cycle": Draft(right, parents=[1, 0, 0][: len(right)]),
        }
        return odd.get(self.what, Draft(right))


@pytest.mark.parametrize(
    "what",
    [
        *("start raises", "observe raises", "end raises", "writes", "floats", "nan"),
        *("short origin", "far origin", "negative id", "none", "cycle"),
    ],
)
def test_an_odd_drafter_costs_its_proposals_only(what: str) -> None:
    made = engine(LevelConfig(drafter=Odd(what), k=3, controller="fixed"), ToyModel())
    for _ in range(2):
        result = made.generate(PROMPT, PARAMS)
        assert result.tokens == truth()
        assert set(result.origins) <= {0, 1}
    assert not made.scheduler.live
    assert not made.target.rows
    assert not made.target.source.rows


def test_a_tree_for_a_model_without_trees_becomes_its_first_path() -> None:
    text = PROMPT + truth()

    class Tree(Drafter):
        def propose(self, asks):
            return [Draft(self.one(text[len(a.context) : len(a.context) + 2]), parents=[-1, -1, 0]) for a in asks]

        def one(self, right):
            right = [*right, 0, 0][:2]
            return [right[0], (right[0] + 1) % 32, right[1]]

    model = ToyModel()
    model.trees = False
    forward = model.forward
    model.forward = lambda feeds: forward(feeds) if all(f.parents is None for f in feeds) else pytest.fail("a tree")
    result = engine(LevelConfig(drafter=Tree(), k=3, controller="fixed"), model).generate(PROMPT, PARAMS)
    assert result.tokens == truth()
    assert result.stats.levels[0].accepted > 10


class Words(ToyModel):
    """A toy with a tokenizer: token i is a letter."""

    tokenizer = object()

    def encode(self, prompt):
        return list(prompt)

    def decode(self, ids, skip_special_tokens=True):
        return "".join(chr(97 + i) for i in ids)


@pytest.mark.parametrize("kind", [None, "oracle", "mixed"])
def test_processors_stop_where_a_stop_string_does(kind: str | None) -> None:
    """sgl-project/sglang#26330: called once per emitted token, never past the text's end."""
    calls: list[int] = []

    def count(ids, scores):
        calls.append(ids.shape[1])
        if len(calls) > 8:
            raise RuntimeError("past the end")
        return scores

    free = truth()
    stop = Words().decode(free[6:8])
    params = dataclasses.replace(PARAMS, stop=[stop], logits_processors=[count])
    drafter = [LevelConfig(drafter=ScriptedDrafter([PROMPT + free], kind), k=9, controller="fixed")] if kind else []
    result = engine(*drafter, Words()).generate(PROMPT, params)
    assert (result.finish_reason, result.tokens) == ("stop", free[:8])
    assert calls == list(range(3, 11))


def test_a_processor_that_raises_keeps_what_came_before() -> None:
    def broken(ids, scores):
        if ids.shape[1] == 13:
            raise ValueError("no\nmore")
        return scores

    params = dataclasses.replace(PARAMS, logits_processors=[broken])
    free = truth()
    drafter = ScriptedDrafter([PROMPT + free], "oracle")
    made = engine(LevelConfig(drafter=drafter, k=6, controller="fixed"), ToyModel())
    for result in (engine(ToyModel()).generate(PROMPT, params), made.generate(PROMPT, params)):
        assert (result.tokens, result.finish_reason) == (free[:10], "error")
        assert result.error == "ValueError: no more"


def test_a_draft_model_that_fails_while_it_is_bypassed_costs_nothing() -> None:
    class Dies(ToyModel):
        def forward(self, feeds):
            if self.forwards > 12:
                raise RuntimeError("gone")
            return super().forward(feeds)

    draft = LevelConfig(model=Dies(seed=5), name="draft")
    assert (
        engine(draft, ToyModel()).generate(PROMPT, dataclasses.replace(PARAMS, max_new_tokens=120)).tokens[:30]
        == truth()
    )


def test_observers_that_raise_are_dropped() -> None:
    class Plugin:
        def cascade_make_observer(self, request):
            return self

        def on_round(self, record):
            raise ValueError("round")

        def on_end(self, stats):
            raise ValueError("end")

    made = engine(ToyModel(), plugins=[Plugin()])
    assert made.generate(PROMPT, PARAMS).tokens == truth()
    assert not made.scheduler.live
    assert not made.target.rows


def test_an_observer_that_cannot_be_made_fails_its_request_alone() -> None:
    class Plugin:
        def cascade_make_observer(self, request):
            if request.prompt[0] == 9:
                raise ValueError("not\nthis one")

    made = engine(ToyModel(), plugins=[Plugin()])
    bad, good = made.generate([[9, 9], PROMPT], PARAMS)
    assert good.tokens == truth()
    assert bad.finish_reason == "error"
    assert "not this one" in bad.error
    assert not made.scheduler.live
    assert not made.target.rows


def test_a_tokenizer_that_fails_costs_its_request_alone() -> None:
    class Fails(Words):
        def decode(self, ids, skip_special_tokens=True):
            if bad in ids:
                raise ValueError("no such piece")
            return super().decode(ids)

    free = truth()
    bad = next(token for i, token in enumerate(free) if i > 4 and free.index(token) == i)
    made = engine(Fails())
    other = next(p for i in range(30) if bad not in made.generate(p := [i, 5], SamplingParams(max_new_tokens=9)).tokens)
    for stop in ([], ["zzzz"]):
        params = dataclasses.replace(PARAMS, stop=stop)
        first, second = made.generate([PROMPT, other], [params, SamplingParams(max_new_tokens=9)])
        assert (first.finish_reason, first.tokens) == ("error", free[: free.index(bad) + 1])
        assert "no such piece" in first.error
        assert first.text == Words().decode(free[: free.index(bad)])
        assert second.finish_reason == "length"
        assert not made.scheduler.live


@pytest.mark.parametrize("stop", [(), ("zzzz",)])
def test_a_round_that_is_broken_off_leaves_no_request_where_it_cannot_go_on(stop) -> None:
    free = truth()
    drafter = LevelConfig(drafter=ScriptedDrafter([PROMPT + free], "oracle"), k=4, controller="fixed")
    made = engine(drafter, Words())

    def leave(ids, scores):
        if ids.shape[1] > 4:
            raise SystemExit
        return scores

    stream = made.stream(PROMPT, dataclasses.replace(PARAMS, stop=stop))
    with pytest.raises(SystemExit):
        made.generate([7, 7], dataclasses.replace(PARAMS, logits_processors=[leave]))
    tokens = [token for chunk in stream for token in chunk.tokens]
    result = stream.result
    assert result.tokens == tokens == free[: len(tokens)]
    assert result.finish_reason == ("length" if not stop else "error")
    assert "SystemExit" in (result.error or "SystemExit")
    assert not made.scheduler.live


def test_a_round_broken_off_between_two_commits_loses_nothing_of_the_first() -> None:
    def leave(ids, scores):
        if ids.shape[1] > 5:
            raise SystemExit
        return False

    made = engine(Words())
    whole = made.stream(PROMPT, dataclasses.replace(PARAMS, max_new_tokens=4))  # ends in the round that is broken off
    torn = made.stream(PROMPT, PARAMS)
    with pytest.raises(SystemExit):
        made.generate([7, 7], dataclasses.replace(PARAMS, stopping_criteria=[leave]))
    for stream, reason in ((whole, "length"), (torn, "error")):
        chunks = list(stream)
        assert [token for chunk in chunks for token in chunk.tokens] == truth()[:4] == stream.result.tokens
        assert "".join(chunk.text for chunk in chunks) == stream.result.text == Words().decode(truth()[:4])
        assert stream.result.finish_reason == reason
    assert not made.scheduler.live
    assert made.generate(PROMPT, PARAMS).tokens == truth()


@pytest.mark.parametrize("where", ["cascade_make_observer", "on_round", "on_end"])
def test_an_observer_that_leaves_breaks_nothing_for_others(where: str) -> None:
    class Leaves:
        on = True

        def cascade_make_observer(self, request):
            self.leave("cascade_make_observer")
            return self

        def on_round(self, record):
            self.leave("on_round")

        def on_end(self, stats):
            self.leave("on_end")

        def leave(self, at):
            if at == where and self.on:
                self.on = False
                raise SystemExit

    made = engine("ngram", ToyModel(), plugins=[Leaves()])
    stream = made.stream(PROMPT, PARAMS)
    with pytest.raises(SystemExit):
        made.generate([5, 5], PARAMS)
    tokens = [token for chunk in stream for token in chunk.tokens]
    assert stream.result.tokens == tokens == truth()[: len(tokens)]
    assert made.generate(PROMPT, PARAMS).tokens == truth()
    assert not made.scheduler.live
    assert not made.target.rows


@pytest.mark.parametrize("nested", [False, True])
def test_processors_of_transformers_that_keep_a_state_keep_it_per_request(nested: bool) -> None:
    from transformers import LogitsProcessorList, SynthIDTextWatermarkLogitsProcessor

    mark = SynthIDTextWatermarkLogitsProcessor(
        ngram_len=3,
        keys=[1, 2, 3],
        sampling_table_size=64,
        sampling_table_seed=0,
        context_history_size=16,
        device="cpu",
    )
    params = SamplingParams(max_new_tokens=20, temperature=1.0, seed=7, logits_processors=[mark])
    if nested:
        params = dataclasses.replace(params, logits_processors=[LogitsProcessorList([mark])])
    made = engine(ToyModel())
    alone = made.generate(PROMPT, params).tokens
    assert made.generate(PROMPT, params).tokens == alone
    assert [result.tokens for result in made.generate([PROMPT, PROMPT], params)] == [alone, alone]
    assert alone != made.generate(PROMPT, dataclasses.replace(params, logits_processors=[])).tokens
    assert mark.state is None


def test_a_failed_build_changes_nothing(tmp_path) -> None:
    drafter, module = ScriptedDrafter(), tiny("llama").train()
    with pytest.raises(LoadError):
        engine(drafter, str(tmp_path / "none"))
    with pytest.raises(LoadError):
        engine(LevelConfig(model=tiny("mamba")), LevelConfig(model=module))
    assert module.training
    with pytest.raises(ConfigError, match="is a class"):
        engine(LevelConfig(drafter=ScriptedDrafter), ToyModel())
    engine(drafter, ToyModel()).generate(PROMPT, PARAMS)
    with pytest.raises(ConfigError, match="serves another engine"):
        engine(drafter, ToyModel())


def test_a_module_gets_its_mode_back_from_the_last_engine() -> None:
    """ai2cm/ace#1019: a model left in another mode than its owner's."""
    module = tiny("gpt2", resid_pdrop=0.5).train()
    first, second = engine(LevelConfig(model=module)), engine(LevelConfig(model=module))
    want = first.generate(PROMPT, PARAMS).tokens
    assert second.generate(PROMPT, PARAMS).tokens == want
    first.close()
    assert not module.training
    second.close()
    assert module.training
    assert max(want) < VOCAB


def test_a_refused_batch_draws_no_seed() -> None:
    params = dataclasses.replace(PARAMS, temperature=1.0)
    want = engine(ToyModel(), seed=1).generate(PROMPT, params).tokens
    made = engine(ToyModel(), seed=1)
    with pytest.raises(ConfigError, match="nobody"):
        made.generate([[1], [2]], [params, dataclasses.replace(params, levels=["nobody"])])
    assert made.generate([[999]], params)[0].error is not None
    assert made.generate(PROMPT, params).tokens == want


@pytest.mark.parametrize("params", [{"max_new_tokens": 3}, 5, SamplingParams])
def test_params_of_another_type_are_refused(params) -> None:
    with pytest.raises(ConfigError, match="params must be SamplingParams"):
        engine(ToyModel()).generate([PROMPT], [params])


def test_prompts_may_be_arrays() -> None:
    for prompt in (np.array(PROMPT), torch.tensor(PROMPT), tuple(PROMPT)):
        assert engine(ToyModel()).generate(prompt, PARAMS).tokens == truth()


def test_max_length_holds_for_any_model() -> None:
    result = engine(ToyModel(), max_length=10).generate(PROMPT, PARAMS)
    assert (len(result.tokens), result.finish_reason) == (7, "length")


def test_a_closed_engine_ends_its_streams() -> None:
    made = engine(ToyModel())
    stream = made.stream(PROMPT, PARAMS)
    next(stream)
    made.close()
    assert [chunk.finish_reason for chunk in stream] == ["cancelled"]
    assert stream.result.finish_reason == "cancelled"
