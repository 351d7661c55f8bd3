"""The cascade of the benchmark page: Qwen2.5-Coder, 0.5B under 1.5B. DRAFT and TARGET may name other places."""

import os

from cascade import CascadeConfig, LevelConfig

config = CascadeConfig(
    levels=[
        LevelConfig(drafter="ngram"),
        LevelConfig(model=os.environ.get("DRAFT", "Qwen/Qwen2.5-Coder-0.5B-Instruct"), dtype="int4", name="draft"),
        LevelConfig(
            model=os.environ.get("TARGET", "Qwen/Qwen2.5-Coder-1.5B-Instruct"), dtype="bfloat16", name="target"
        ),
    ]
)
