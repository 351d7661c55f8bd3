"""One batch for all who ask: open streams, threads, coroutines; each text as if it were alone."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import threading
import time

import pytest
import torch

from cascade import CascadeConfig, ConfigError, DecodeError, Engine, LevelConfig, PromptError, SamplingParams
from cascade.testing import FixedCosts, ToyModel
from tests.tiny import tiny

PARAMS = SamplingParams(max_new_tokens=30, temperature=0.8, seed=5)
PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 5, 6, 7], [2, 2], [9, 1, 4, 4, 1]]


def engine(**options) -> Engine:
    target = ToyModel()
    levels = [
        LevelConfig(drafter="ngram", k=3),
        LevelConfig(model=ToyModel(seed=7, mix=(target, 0.7)), name="draft", k=3),
        LevelConfig(model=target, name="target"),
    ]
    return Engine(CascadeConfig(levels, **options), costs=FixedCosts(lambda *_: 1.0), check=True)


WANT = [engine().generate(prompt, PARAMS).tokens for prompt in PROMPTS]


def idle(made: Engine) -> bool:
    """Whether nothing is kept of any request."""
    return not (made.scheduler.live or any(l.rows for l in made.chain.levels) or made.chain.governors[0].rows)


def drain(stream) -> list[int]:
    return [token for chunk in stream for token in chunk.tokens]


def test_open_streams_share_their_rounds() -> None:
    made = engine()
    streams = [made.stream(prompt, PARAMS) for prompt in PROMPTS]
    got: list[list[int]] = [[] for _ in streams]
    forwards = made.target.forwards
    while any(stream.result is None for stream in streams):
        for tokens, stream in zip(got, streams, strict=True):
            tokens += next(stream, None).tokens if stream.result is None else ()
    got = [tokens + drain(stream) for tokens, stream in zip(got, streams, strict=True)]
    assert got == WANT
    assert [stream.result.tokens for stream in streams] == WANT
    longest = max(stream.result.stats.target_forwards for stream in streams)
    assert made.target.forwards - forwards == longest, "a forward carries all of them"
    assert idle(made)


def test_a_call_advances_an_open_stream_as_well() -> None:
    made = engine()
    stream = made.stream(PROMPTS[0], PARAMS)
    first = next(stream)
    assert made.generate(PROMPTS[1], PARAMS).tokens == WANT[1]
    assert [*first.tokens, *drain(stream)] == WANT[0]
    assert idle(made)


@pytest.mark.parametrize("max_batch", [1, 3, 8])
def test_threads_share_the_batch(max_batch: int) -> None:
    made = engine(max_batch=max_batch)
    got: dict[tuple[int, int], list[int]] = {}

    def work(i: int) -> None:
        for turn in range(3):
            got[i, turn] = made.generate(PROMPTS[i], PARAMS).tokens

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(PROMPTS))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == {(i, turn): WANT[i] for i in range(len(PROMPTS)) for turn in range(3)}
    assert idle(made)


def test_coroutines_share_the_batch_and_leave_the_loop_free() -> None:
    made = engine(max_batch=2)

    async def one(i: int) -> list[int]:
        stream = made.astream(PROMPTS[i], PARAMS)
        tokens = [token async for chunk in stream for token in chunk.tokens]
        assert stream.result.tokens == tokens
        return tokens

    async def all_of_them() -> list[list[int]]:
        return await asyncio.gather(*(one(i) for i in range(len(PROMPTS))))

    assert asyncio.run(all_of_them()) == WANT
    assert idle(made)
    assert asyncio.run(all_of_them()) == WANT, "another loop, another thread"


def test_a_cancelled_task_and_a_closed_stream_end_their_requests_alone() -> None:
    made, long = engine(), dataclasses.replace(PARAMS, max_new_tokens=100_000)

    async def main() -> list[int]:
        async def endless() -> None:
            async for _ in made.astream(PROMPTS[0], long):
                pass

        task = asyncio.create_task(endless())
        other = made.astream(PROMPTS[1], long)
        await anext(other)
        kept = made.astream(PROMPTS[2], PARAMS)
        tokens = [token async for chunk in kept for token in chunk.tokens]
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await other.aclose()
        assert other.result.finish_reason == "cancelled"
        await other.aclose()
        while made.scheduler.live:
            await asyncio.sleep(0.001)
        return tokens

    assert asyncio.run(main()) == WANT[2]
    assert idle(made)


def test_an_async_stream_that_nobody_holds_is_cancelled() -> None:
    made = engine()

    async def main() -> None:
        await anext(made.astream(PROMPTS[0], dataclasses.replace(PARAMS, max_new_tokens=100_000)))
        gc.collect()
        while made.scheduler.live:
            await asyncio.sleep(0.001)

    asyncio.run(asyncio.wait_for(main(), 60))
    assert idle(made)


def test_an_async_stream_tells_what_failed() -> None:
    made = engine()
    made.model.forward = None  # nothing that a request could have done

    async def main() -> str:
        stream = made.astream(PROMPTS[0], PARAMS)
        chunks = [chunk async for chunk in stream]
        assert chunks[-1].finish_reason == "error"
        return stream.result.error

    assert "TypeError" in asyncio.run(main())
    assert idle(made)


def test_astream_outside_of_a_loop_is_refused() -> None:
    made = engine()
    with pytest.raises(ConfigError, match="event loop"):
        made.astream(PROMPTS[0], PARAMS)
    assert idle(made)


def test_cancel_from_another_thread_at_any_time() -> None:
    made, long = engine(), dataclasses.replace(PARAMS, max_new_tokens=100_000)
    streams = [made.stream(prompt, long) for prompt in PROMPTS]
    canceller = threading.Thread(target=lambda: [made.cancel(stream.request_id) for stream in streams[:-1]])
    for stream in streams:
        next(stream)
    canceller.start()
    reasons = [[chunk.finish_reason for chunk in stream][-1] for stream in streams[:-1]]
    canceller.join()
    assert set(reasons) == {"cancelled"}
    streams[-1].close()
    assert streams[-1].result.finish_reason == "cancelled"
    assert all(level.accepted >= 0 for stream in streams for level in stream.result.stats.levels)
    assert idle(made)


def test_a_stream_that_nobody_holds_is_freed() -> None:
    made = engine()
    next(made.stream(PROMPTS[0], PARAMS))
    gc.collect()
    assert idle(made)


def test_a_call_from_inside_a_round_is_refused_and_fails_its_request_alone() -> None:
    made = engine()
    params = dataclasses.replace(PARAMS, logits_processors=[lambda ids, scores: made.generate([1]) and scores])
    results = made.generate([PROMPTS[0], PROMPTS[1]], [params, PARAMS])
    assert results[0].error.startswith(f"{DecodeError.__name__}: an engine was called from inside")
    assert results[1].tokens == WANT[1]
    assert idle(made) or made.generate(PROMPTS[1], PARAMS).tokens == WANT[1]
    assert idle(made)


def test_in_a_list_a_prompt_that_cannot_be_decoded_fails_alone() -> None:
    made = engine(max_length=64)
    results = made.generate([PROMPTS[0], [1, 99], [], [0] * 65, PROMPTS[1]], PARAMS)
    assert [r.finish_reason for r in results] == ["length", "error", "error", "error", "length"]
    assert [r.tokens for r in results] == [WANT[0], [], [], [], WANT[1]]
    for result, word in zip(results[1:4], ("99", "empty", "65 tokens"), strict=True):
        assert result.error.startswith(f"{PromptError.__name__}: ")
        assert word in result.error
    assert idle(made)
    with pytest.raises(PromptError, match="99"):
        made.generate([1, 99], PARAMS)


def test_a_stream_has_its_last_chunk_whoever_ends_it() -> None:
    class Slow:
        def cascade_make_observer(self, request):
            return self

        def on_round(self, record):
            pass

        def on_end(self, stats):
            time.sleep(0.05)  # the request is over, and its last chunk not handed over yet

    with engine(plugins=[Slow()]) as made:
        stream = made.stream(PROMPTS[0], dataclasses.replace(PARAMS, max_new_tokens=3))
        other = threading.Thread(target=made.generate, args=(PROMPTS[1], PARAMS))
        other.start()
        chunks = list(stream)
        other.join()
    assert [token for chunk in chunks for token in chunk.tokens] == WANT[0][:3]
    assert chunks[-1].finish_reason == "length"


def test_an_async_stream_can_be_closed_while_a_task_waits_for_it() -> None:
    async def main(made: Engine) -> list:
        stream = made.astream(PROMPTS[0], dataclasses.replace(PARAMS, max_new_tokens=3000))

        async def read() -> list:
            return [chunk async for chunk in stream]

        readers = [asyncio.create_task(read()) for _ in range(3)]
        await asyncio.sleep(0.05)
        await stream.aclose()
        return [chunk for chunks in await asyncio.gather(*readers) for chunk in chunks]

    with engine() as made:
        chunks = asyncio.run(asyncio.wait_for(main(made), 20))
    assert [chunk.finish_reason for chunk in chunks].count("cancelled") <= 1


def test_an_async_stream_whose_round_is_broken_off_ends_and_others_can_follow() -> None:
    def leave(ids, scores):
        raise SystemExit

    async def main(made: Engine) -> tuple:
        stream = made.astream(PROMPTS[0], dataclasses.replace(PARAMS, logits_processors=[leave]))
        chunks = [chunk async for chunk in stream]
        return chunks, stream.result, [chunk async for chunk in made.astream(PROMPTS[1], PARAMS)]

    with engine() as made:
        chunks, result, after = asyncio.run(asyncio.wait_for(main(made), 20))
        assert chunks[-1].finish_reason == result.finish_reason == "error"
        assert [token for chunk in after for token in chunk.tokens] == WANT[1]
        assert idle(made)


def short_requests(made: Engine, count: int, new: int):
    """Answers requests one after the other, some cancelled, some closed, some bypassed; yields after each."""
    modes = [PARAMS, dataclasses.replace(PARAMS, speculate=False), dataclasses.replace(PARAMS, bypass_threshold=1.0)]
    for i in range(count):
        params = dataclasses.replace(modes[i % 3], max_new_tokens=new, seed=i)
        if i % 4 == 3:
            stream = made.stream(PROMPTS[i % 5], params)
            next(stream)
            made.cancel(stream.request_id) if i % 8 == 3 else stream.close()
            list(stream)
        else:
            assert len(made.generate(PROMPTS[i % 5], params).tokens) == new
        assert idle(made)
        yield i


def test_400_short_requests_on_a_real_architecture_leave_no_tensors() -> None:
    def live() -> int:
        gc.collect()
        return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())

    levels = [LevelConfig(drafter="ngram"), LevelConfig(model=tiny("llama", seed=1), name="draft", k=2)]
    target = LevelConfig(model=tiny("llama", eos_token_id=None))
    with Engine(CascadeConfig([*levels, target]), costs=FixedCosts(lambda *_: 1.0)) as made:
        before = None
        for i in short_requests(made, 400, 4):
            if i == 39:
                before = live()
        assert live() == before


def test_400_short_requests_leave_nothing_behind() -> None:
    assert len(list(short_requests(engine(), 400, 6))) == 400
