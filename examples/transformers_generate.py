"""For people who already have a transformers call: one more argument, and an engine decodes it.

python examples/transformers_generate.py
"""

from transformers import TextStreamer, set_seed

from cascade import CascadeConfig, Engine, LevelConfig

# With a model object of your own it is LevelConfig(model=model, tokenizer=tokenizer).
config = CascadeConfig(levels=["ngram", LevelConfig(model="HuggingFaceTB/SmolLM2-135M-Instruct")])

with Engine(config) as engine:
    model, tokenizer = engine.model.module, engine.model.tokenizer
    prompt = tokenizer("The sea is blue. The sky is blue. The sea is", return_tensors="pt")
    inputs = {"input_ids": prompt["input_ids"], "attention_mask": prompt["attention_mask"]}

    # Whatever generate takes holds: penalties, processors, stopping criteria, several rows, scores.
    custom = engine.as_custom_generate()
    ids = model.generate(**inputs, custom_generate=custom, max_new_tokens=24, repetition_penalty=1.1)
    print(tokenizer.decode(ids[0], skip_special_tokens=True))
    print(f"{custom.results[0].stats.tokens_per_forward:.2f} tokens per forward of the model")

    # What generate keeps to itself on this route is given here: a streamer, stop strings, levels.
    streaming = engine.as_custom_generate(streamer=TextStreamer(tokenizer, skip_prompt=True), stop=["\n\n"])
    set_seed(7)
    model.generate(**inputs, custom_generate=streaming, max_new_tokens=24, do_sample=True, temperature=0.7)
