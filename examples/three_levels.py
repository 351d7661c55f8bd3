"""A cascade as a config file: n-gram, a quantised draft model, the target.

cascade generate --config examples/three_levels.py --chat "Write a quicksort in Python."
"""

from cascade import BypassConfig, CascadeConfig, LevelConfig

config = CascadeConfig(
    levels=[
        LevelConfig(drafter="ngram", k=8, options={"n_min": 2, "n_max": 4}),
        LevelConfig(model="Qwen/Qwen2.5-Coder-0.5B-Instruct", dtype="int8", k=4, k_max=16),
        LevelConfig(model="Qwen/Qwen2.5-Coder-1.5B-Instruct", dtype="bfloat16"),
    ],
    rule="coupled",
    bypass=BypassConfig(threshold=0.3),
    max_batch=8,
)
