"""A cascade in five lines, and what it tells about itself.

python examples/quickstart.py
"""

from cascade import CascadeConfig, Engine, LevelConfig, SamplingParams

MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"  # or a folder, a GGUF file, a transformers model object

config = CascadeConfig(
    levels=[
        LevelConfig(drafter="ngram"),  # bottom: copies what followed the same words before
        LevelConfig(model="self", dtype="int8"),  # middle: a quantised copy of the target checks and drafts
        LevelConfig(model=MODEL),  # top: the target, whose text this is
    ]
)

with Engine(config) as engine:
    print(engine.summary())
    chat = [{"role": "user", "content": "Name three things to pack for a walk in the rain."}]
    result = engine.generate(chat, SamplingParams(max_new_tokens=64))
    print(result.text)
    print(f"{result.stats.tokens_per_forward:.2f} tokens per forward of the target")
    for level in result.stats.levels:
        print(level.name, "drafted", level.drafted, "accepted", level.accepted, *level.decisions)
