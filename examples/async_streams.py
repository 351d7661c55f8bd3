"""Streams for a server: coroutines that share one batch, while the event loop stays free.

python examples/async_streams.py
"""

import asyncio

from cascade import CascadeConfig, Engine, SamplingParams

PROMPTS = ["The sea is blue. The sky is blue. The sea is", "One, two, three, one, two, three, one,"]


async def answer(engine: Engine, prompt: str) -> str:
    text = ""
    async for chunk in engine.astream(prompt, SamplingParams(max_new_tokens=32)):
        text += chunk.text  # a server would send it on
    return text


async def main() -> None:
    with Engine(CascadeConfig(levels=["ngram", "HuggingFaceTB/SmolLM2-135M-Instruct"])) as engine:
        for text in await asyncio.gather(*(answer(engine, prompt) for prompt in PROMPTS)):
            print(text)


asyncio.run(main())
