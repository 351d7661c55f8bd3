"""Every logits processor of transformers that decodes text, given to a request: as plain decoding applies it."""

from __future__ import annotations

import pytest
import torch
from transformers.generation import logits_process as lp

from cascade import CascadeConfig, Engine, LevelConfig, SamplingParams
from cascade.testing import FixedCosts, ToyModel
from tests import twin
from tests.tiny import VOCAB, tiny

PROMPTS = [[1, 2, 3, 1, 2], [7]]
END = 5
TEXT = torch.tensor([[1, 2, 3, 1, 2]])
MARK = {"ngram_len": 3, "keys": [1, 2], "sampling_table_size": 64, "sampling_table_seed": 0, "context_history_size": 16}
PROCESSORS = {
    "temperature": lambda: lp.TemperatureLogitsWarper(0.5),
    "top k": lambda: lp.TopKLogitsWarper(4),
    "top p": lambda: lp.TopPLogitsWarper(0.7),
    "top h": lambda: lp.TopHLogitsWarper(0.5),
    "min p": lambda: lp.MinPLogitsWarper(0.2),
    "typical": lambda: lp.TypicalLogitsWarper(0.5),
    "epsilon": lambda: lp.EpsilonLogitsWarper(0.03),
    "eta": lambda: lp.EtaLogitsWarper(0.05),
    "repetition penalty": lambda: lp.RepetitionPenaltyLogitsProcessor(1.5),
    "encoder repetition penalty": lambda: lp.EncoderRepetitionPenaltyLogitsProcessor(1.5, TEXT),
    "no repeated n-gram": lambda: lp.NoRepeatNGramLogitsProcessor(2),
    "no repeated n-gram of the encoder": lambda: lp.EncoderNoRepeatNGramLogitsProcessor(2, TEXT),
    "bad words": lambda: lp.NoBadWordsLogitsProcessor([[3], [4, 9], [11, 12, 13]], END),
    "sequence bias": lambda: lp.SequenceBiasLogitsProcessor({(3,): 4.0, (4, 9): -6.0}),
    "min length": lambda: lp.MinLengthLogitsProcessor(12, END),
    "min new tokens": lambda: lp.MinNewTokensLengthLogitsProcessor(5, 9, END),
    "length penalty": lambda: lp.ExponentialDecayLengthPenalty((4, 1.3), END, 5),
    "forced first token": lambda: lp.ForcedBOSTokenLogitsProcessor(6),
    "forced end": lambda: lp.ForcedEOSTokenLogitsProcessor(18, END),
    "suppressed": lambda: lp.SuppressTokensLogitsProcessor([1, 4, 8]),
    "suppressed at the beginning": lambda: lp.SuppressTokensAtBeginLogitsProcessor([2, 3, 4], 5),
    "allowed by prefix": lambda: lp.PrefixConstrainedLogitsProcessor(
        lambda _, ids: [(ids[-1] + i) % 32 for i in (1, 5)], 1
    ),
    "normalized": lambda: lp.LogitNormalization(),
    "NaN and inf removed": lambda: lp.InfNanRemoveLogitsProcessor(),
    "watermark": lambda: lp.WatermarkLogitsProcessor(32, "cpu", greenlist_ratio=0.4, bias=3.0),
    "SynthID watermark": lambda: lp.SynthIDTextWatermarkLogitsProcessor(**MARK, device="cpu"),
}


def params(name: str, temperature: float) -> SamplingParams:
    return SamplingParams(max_new_tokens=20, temperature=temperature, seed=11, logits_processors=[PROCESSORS[name]()])


@pytest.mark.parametrize("name", PROCESSORS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_processor_of_transformers_decodes_as_without_speculation(name: str, temperature: float) -> None:
    target = ToyModel(end_ids=(END,))
    draft = LevelConfig(model=ToyModel(seed=7, mix=(target, 0.8)), name="draft", k=4, controller="fixed")
    made = Engine(
        CascadeConfig([LevelConfig(drafter="ngram", k=3), draft, target]), costs=FixedCosts(lambda *_: 1.0), check=True
    )
    want = [twin.plain(target, prompt, params(name, temperature)) for prompt in PROMPTS]
    results = made.generate(PROMPTS, params(name, temperature))
    assert [result.tokens for result in results] == [one.tokens for one in want]
    assert [result.finish_reason for result in results] == [one.finish_reason for one in want]


def test_guidance_keeps_its_cache_per_request() -> None:
    model = tiny("llama")
    guidance = lp.UnbatchedClassifierFreeGuidanceLogitsProcessor(3.0, model, torch.tensor([[4, 9, 2]]))
    guided = SamplingParams(max_new_tokens=12, logits_processors=[guidance])
    draft = LevelConfig(model=tiny("llama", seed=1), name="draft", k=3, controller="fixed")
    with Engine(CascadeConfig([draft, LevelConfig(model=model)]), costs=FixedCosts(lambda *_: 1.0)) as made:
        prompt = [i * 7 % VOCAB for i in range(3, 9)]
        want = model.generate(
            torch.tensor([prompt]),
            guidance_scale=3.0,
            negative_prompt_ids=torch.tensor([[4, 9, 2]]),
            max_new_tokens=12,
            do_sample=False,
            pad_token_id=0,
        )[0, len(prompt) :].tolist()
        assert made.generate(prompt, guided).tokens == want
        assert [one.tokens for one in made.generate([prompt, prompt], guided)] == [want, want]
