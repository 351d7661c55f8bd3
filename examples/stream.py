"""Streaming: pieces of text as rounds end, and who proposed each token.

python examples/stream.py
"""

from cascade import CascadeConfig, Engine, SamplingParams

engine = Engine(CascadeConfig(levels=["ngram", "HuggingFaceTB/SmolLM2-135M-Instruct"]))
prompt = "The sea is blue. The sky is blue. The sea is"
params = SamplingParams(max_new_tokens=48, temperature=0.7, top_p=0.95, seed=7, stop=["\n\n"])

proposed = 0
for chunk in engine.stream(prompt, params):
    print(chunk.text, end="", flush=True)
    proposed += sum(origin == 0 for origin in chunk.origins)
print(f"\n[{chunk.finish_reason}; {proposed} tokens came from the n-gram level]")
engine.close()
