"""JSON by schema: whatever is proposed, the answer fits the schema and is complete.

pip install 'cascade-spec[grammar]' && python examples/json_output.py
"""

import json

from cascade import CascadeConfig, Engine, LevelConfig, SamplingParams
from cascade.grammar import ForcedTokens, Grammar

SCHEMA = {
    # On one line, as json.dumps writes it; without this, white space is free, and less is forced.
    "x-guidance": {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "},
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},  # bounds: what may grow without end may not end in time
        "species": {"enum": ["cat", "dog", "crow"]},
        "age": {"type": "integer", "minimum": 0, "maximum": 30},
        "likes": {"type": "array", "items": {"type": "string", "maxLength": 12}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "species", "age", "likes"],
    "additionalProperties": False,
}

levels = [LevelConfig(drafter=ForcedTokens()), LevelConfig(model="HuggingFaceTB/SmolLM2-135M-Instruct")]
with Engine(CascadeConfig(levels=levels)) as engine:
    pet = Grammar.json(SCHEMA, engine)  # compiled here; a schema that cannot be enforced is refused here
    chat = [{"role": "user", "content": "Invent a pet. Answer in JSON: name, species, age, likes."}]
    for seed in (1, 2):
        params = SamplingParams(max_new_tokens=1000, temperature=0.7, seed=seed, logits_processors=[pet])
        result = engine.generate(chat, params)
        print(json.loads(result.text))
        forced = result.stats.levels[0]
        print(f"{len(result.tokens)} tokens in {result.stats.target_forwards} forwards, {forced.accepted} forced ones")
