"""Conversations: what was cached of one turn serves the next, on every level, and the text is the same."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from cascade import CascadeConfig, ConfigError, Engine, LevelConfig, PromptError, SamplingParams
from cascade.testing import FixedCosts, ToyModel
from tests.tiny import tiny, tokenizer

PARAMS = SamplingParams(max_new_tokens=20, temperature=0.7, seed=3)
GREEDY = SamplingParams(max_new_tokens=20)


def toys() -> Engine:
    levels = [
        LevelConfig(model=ToyModel(), name="draft", k=4, tree="chain"),
        LevelConfig(model=ToyModel(), name="target"),
    ]
    return Engine(CascadeConfig(levels), costs=FixedCosts(lambda *_: 1.0), check=True)


def fed(result) -> list[int]:
    """Tokens fed per level, bottom to top."""
    return [level.tokens_fed for level in result.stats.levels]


@pytest.mark.parametrize("params", [GREEDY, PARAMS], ids=["greedy", "sampled"])
def test_turns_read_only_what_is_new_on_every_level(params: SamplingParams) -> None:
    """vllm-project/vllm#47930: the target's prefix was kept, the draft's was not, and acceptance fell to nothing."""
    engine = toys()
    first = [i % 7 for i in range(100)]
    with engine.session() as chat:
        one = chat.generate(first, params)
        second = [*first, *one.tokens, 9, 8, 7]
        two = chat.generate(second, params)
        changed = [*first[:-5], 1, 1, 1, 1, 1, *one.tokens]
        three = chat.generate(changed, params)
        assert not engine.target.rows, "between turns the caches are the session's"
    fresh = [toys().generate(prompt, params) for prompt in (first, second, changed)]
    assert [r.tokens for r in (one, two, three)] == [r.tokens for r in fresh]
    for result, new in ((two, 5), (three, 26)):  # what differs, and the last token of before
        draft, target = fed(result)
        whole = fed(toys().generate(second, params))
        assert target <= whole[1] - (len(second) - new)
        assert draft <= whole[0] - (len(second) - new)
        assert result.stats.levels[0].accept_rate == 1.0


def test_a_shorter_or_equal_prompt_rewinds() -> None:
    engine = toys()
    with engine.session() as chat:
        long = chat.generate([1, 2, 3, 4, 5, 6], PARAMS)
        assert chat.generate([1, 2, 3], PARAMS).tokens == toys().generate([1, 2, 3], PARAMS).tokens
        assert chat.generate([1, 2, 3, 4, 5, 6], PARAMS).tokens == long.tokens
        assert chat.generate([9], PARAMS).tokens == toys().generate([9], PARAMS).tokens


def test_chat_turns_on_a_real_architecture() -> None:
    tok = tokenizer(259)
    target, draft = tiny("llama", torch.float64, vocab_size=259), tiny("llama", torch.float64, vocab_size=259)
    levels = [
        LevelConfig(drafter="ngram"),
        LevelConfig(model=draft, tokenizer=tok, name="draft", k=3, controller="fixed"),
        LevelConfig(model=target, tokenizer=tok, name="target"),
    ]
    with Engine(CascadeConfig(levels), costs=FixedCosts(lambda *_: 1.0), check=True) as engine:
        messages = [{"role": "user", "content": "Tell me about the sea, and about the sky above the sea."}]
        with engine.session() as chat:
            for question in ("And the land?", "Thanks."):
                got = chat.generate(messages, GREEDY)
                assert got.tokens == engine.generate(messages, GREEDY).tokens
                messages = [*messages, {"role": "assistant", "content": "Blue."}, {"role": "user", "content": question}]
            streamed = [token for chunk in chat.stream(messages, GREEDY) for token in chunk.tokens]
            assert streamed == engine.generate(messages, GREEDY).tokens
        assert not engine.target.rows


def test_samples_in_a_session() -> None:
    engine = toys()
    with engine.session() as chat:
        three = dataclasses.replace(PARAMS, n=3)
        want = toys().generate([1, 2, 3], three)
        assert [r.tokens for r in chat.generate([1, 2, 3], three)] == [r.tokens for r in want]
        longer = [1, 2, 3, *want[0].tokens, 4]
        assert chat.generate(longer, PARAMS).tokens == toys().generate(longer, PARAMS).tokens


def test_what_a_session_refuses() -> None:
    engine = toys()
    chat = engine.session()
    with pytest.raises(ConfigError, match="one prompt"):
        chat.generate([[1], [2]], PARAMS)
    with pytest.raises(PromptError, match="empty"):
        chat.generate([], PARAMS)
    with pytest.raises(ConfigError, match="one sample"):
        chat.stream([1, 2], dataclasses.replace(PARAMS, n=2))
    stream = chat.stream([1, 2], PARAMS)
    next(stream)
    with pytest.raises(ConfigError, match="still running"):
        chat.generate([1], PARAMS)
    stream.close()
    assert len(chat.generate([1, 2], PARAMS).tokens) == 20
    open_one = chat.stream([1, 2], PARAMS)
    next(open_one)
    chat.close()
    assert open_one.result.finish_reason == "cancelled"
    with pytest.raises(ConfigError, match="closed"):
        chat.generate([1], PARAMS)
    assert not engine.scheduler.live
    assert not engine.target.rows


def test_a_turn_that_fails_or_is_cancelled_leaves_the_session_usable() -> None:
    def fail(ids, scores):
        raise ValueError("no")

    engine = toys()
    with engine.session() as chat:
        chat.generate([1, 2, 3], PARAMS)
        failed = chat.generate([1, 2, 3, 4], dataclasses.replace(PARAMS, logits_processors=[fail]))
        assert failed.error == "ValueError: no"
        stream = chat.stream([1, 2, 3, 4, 5], PARAMS)
        next(stream)
        engine.cancel(stream.request_id)
        list(stream)
        assert chat.generate([1, 2, 3, 4, 5], PARAMS).tokens == toys().generate([1, 2, 3, 4, 5], PARAMS).tokens
