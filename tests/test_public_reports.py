"""What users reported of other engines, each as its report describes it: "Try" is done, "Right" is asserted.

Reports about chance are in `test_public_reports_chance.py`. A report is cited as owner/repository#number.
"""

from __future__ import annotations

import dataclasses
import gc
import logging
import random
from collections.abc import Sequence
from importlib import metadata
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf

from cascade import (
    BypassConfig,
    CascadeConfig,
    ConfigError,
    Draft,
    Drafter,
    Engine,
    LevelConfig,
    LoadError,
    PluginError,
    Result,
    SamplingParams,
)
from cascade.control import Estimates, Outcome
from cascade.plugins import create
from cascade.testing import FixedCosts, ManualClock, ScriptedDrafter, ToyModel
from drafters.ngram import NgramDrafter
from tests import twin
from tests.strategies import CONTROLLERS, LOSSLESS, PLUGINS, Reader
from tests.tiny import VOCAB, tiny, tokenizer

NEW = 40
GREEDY = SamplingParams(max_new_tokens=NEW)
SAMPLED = dataclasses.replace(GREEDY, temperature=0.8, seed=11)
BOTH = pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
CHAINS = ("ngram", "draft", "cascade")
EVERY_CHAIN = pytest.mark.parametrize("chain", CHAINS)
PROMPT = [1, 2, 3, 1, 2]


def engine(*levels: Any, **options: Any) -> Engine:
    """Every cache checked after every round; a draft model that pays, so that no level is switched off."""
    costs = FixedCosts(lambda level, tokens: 0.05 if level == "draft" else 1.0)
    config = CascadeConfig([*levels], **options)
    return Engine(config, clock=ManualClock(), costs=costs, check=True, plugins=create(*config.plugins))


def fixed(drafter: Any = None, k: int = 4, **options: Any) -> LevelConfig:
    return LevelConfig(drafter=drafter, k=k, controller="fixed", **options)


def below(chain: str, target: ToyModel, k: int = 4) -> list[LevelConfig]:
    """What stands under a toy target: a table, a draft model, or both."""
    table = fixed("ngram", k, options={"n_min": 1, "n_max": 3})
    draft = fixed(k=k, model=ToyModel(target.vocab_size, seed=7, mix=(target, 0.7)), name="draft")
    return {"ngram": [table], "draft": [draft], "cascade": [table, draft]}[chain]


def oracle(prompt: Sequence[int], tokens: Sequence[int], kind: str = "oracle", vocab_size: int = 32) -> ScriptedDrafter:
    return ScriptedDrafter([[*prompt, *tokens]], kind, vocab_size)


def equal(found: Result, want: Result | twin.Outcome) -> None:
    assert found.tokens == want.tokens
    assert (found.text, found.finish_reason) == (want.text, want.finish_reason)


class Speller(ToyModel):
    """Goes on from a prompt of one token with these bytes, whatever is sampled; then with what it likes."""

    tokenizer = "bytes"

    def __init__(self, text: str, **options: Any) -> None:
        super().__init__(256, order=10**6, scale=1.0, **options)
        self.spelt = list(text.encode())

    def encode(self, prompt: Sequence[int]) -> list[int]:
        return list(prompt)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return bytes(ids).decode("utf-8", errors="replace")

    def logits(self, prefix: Sequence[int]) -> np.ndarray:
        out = super().logits(prefix).copy()
        if len(prefix) <= len(self.spelt):
            out[self.spelt[len(prefix) - 1]] += 60
        return out


# -- greedy output, positions ---------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_prompt_of_one_token_has_the_right_positions(family: str) -> None:
    """huggingface/transformers#30042: wrong positions after a rewind."""
    target, other = tiny(family), tiny(family, seed=1)
    want = target.generate(torch.tensor([[9]]), max_new_tokens=NEW, do_sample=False, eos_token_id=None, pad_token_id=0)
    fed: list[tuple[int, int]] = []

    def note(module: Any, args: Any, options: dict[str, Any]) -> None:
        fed.extend(zip(options["position_ids"][0].tolist(), options["input_ids"][0].tolist(), strict=True))

    made = engine(fixed(k=5, model=other, name="draft"), LevelConfig(model=target, name="target"))
    handle = target.register_forward_pre_hook(note, with_kwargs=True)
    result = made.generate([9], dataclasses.replace(GREEDY, ignore_eos=True))
    handle.remove()
    text = want[0].tolist()
    assert [9, *result.tokens] == text
    assert result.stats.levels[0].drafted > 0
    assert set(enumerate(text[:-1])) <= set(fed), "every token of the text was fed at its own place"
    assert {position for position, _ in fed} <= set(range(len(text)))


# -- numerics -------------------------------------------------------------------------------------------


@EVERY_CHAIN
@pytest.mark.parametrize(
    "options",
    [{"temperature": 0.0}, {"temperature": 0.0, "top_p": 0.9}, {"temperature": 1.0, "top_k": 1}],
    ids=["zero", "zero and top-p", "top-k 1"],
)
def test_temperature_zero_is_greedy_however_it_is_said(options: dict[str, Any], chain: str) -> None:
    """ggml-org/llama.cpp#5657: temperature 0 broke drafting, or raised an invalid-probability error."""
    target = ToyModel()
    want = twin.plain(target, PROMPT, GREEDY).tokens
    for rule in LOSSLESS:
        made = engine(*below(chain, target), target, rule=rule)
        result = made.generate(PROMPT, dataclasses.replace(GREEDY, seed=5, **options))
        assert (result.tokens, result.error) == (want, None)
        assert result.stats.levels[-2].drafted > 0


# -- caches ---------------------------------------------------------------------------------------------


@BOTH
def test_a_draft_cache_is_rewound_to_the_token(params: SamplingParams) -> None:
    """lablup/mlxcel#994: rewound too far on each rejection, the draft fell behind and acceptance decayed."""
    params = dataclasses.replace(params, max_new_tokens=200)
    target = ToyModel()
    made = engine(fixed(k=4, model=ToyModel(), name="draft"), LevelConfig(model=target, name="target"))
    draft, rounds = made.target.source.drafter, []
    propose, settle = draft.propose, made.target.settle

    def spoiled(asks: Any) -> list[Draft]:
        [proposal] = propose(asks)
        if len(rounds) % 3 == 2 and proposal.tokens:
            proposal.tokens[len(rounds) % len(proposal.tokens)] ^= 1
        return [proposal]

    def note(context: Any, emitted: int) -> None:
        settle(context, emitted)
        row = draft.rows.get(context.row_id)
        rounds.append((emitted, None if row is None else len(context) - row.cache.length))

    draft.propose, made.target.settle = spoiled, note
    result = made.generate(PROMPT, params)
    assert result.tokens == twin.plain(target, PROMPT, params).tokens
    added = [b - a for (a, _), (b, _) in pairwise(rounds)]
    whole = [n for i, n in enumerate(added, 1) if i % 3 != 2]
    assert whole[:-1] == [5] * (len(whole) - 1), "what is not spoiled is accepted to the last, to the very end"
    assert {n for i, n in enumerate(added[:-1], 1) if i % 3 == 2} <= {1, 2, 3, 4}
    # Behind by the last token, or by two where all were accepted: the last one drafted was never fed.
    assert {behind for _, behind in rounds[1:]} <= {1, 2}


@pytest.mark.parametrize(
    ("where", "attention"), [("target", "sdpa"), ("draft", "sdpa"), ("both", "sdpa"), ("both", "eager")]
)
@pytest.mark.parametrize("family", ["mistral", "gemma3"])
def test_windows_that_fill_up_while_drafting(family: str, where: str, attention: str) -> None:
    """huggingface/transformers#48280: at the window's edge eager attention crashed and SDPA was silently wrong."""
    kinds = {"target": (family, "llama"), "draft": ("llama", family), "both": (family, family)}[where]
    target, draft = (tiny(kind) for kind in kinds)
    for module in (target, draft):
        module.set_attn_implementation(attention)
    prompts = [[i * 7 % 90 + 3 for i in range(length)] for length in (6, 8, 20)]
    ways = [dataclasses.replace(params, ignore_eos=True) for params in (GREEDY, SAMPLED)]
    alone = engine(LevelConfig(model=target))
    want = [[alone.generate(prompt, params).tokens for prompt in prompts] for params in ways]
    for prompt, tokens in zip(prompts, want[0], strict=True):
        ids = torch.tensor([prompt])
        own = target.generate(ids, max_new_tokens=NEW, do_sample=False, eos_token_id=None, pad_token_id=0)
        assert tokens == own[0, len(prompt) :].tolist()
    texts = [prompt + tokens for row in want for prompt, tokens in zip(prompts, row, strict=True)]
    mixed = fixed(ScriptedDrafter(texts, "mixed", VOCAB), k=4, name="mixed")
    for levels in ([mixed], [fixed(k=4, model=draft, name="draft")]):
        made = engine(*levels, LevelConfig(model=target, name="target"))
        for params, row in zip(ways, want, strict=True):
            results = [made.generate(prompt, params) for prompt in prompts]
            assert [result.tokens for result in results] == row
            assert all(result.stats.levels[0].drafted for result in results)


@pytest.mark.parametrize("place", ["target", "draft"])
@pytest.mark.parametrize("kind", ["recurrent", "hybrid"])
def test_a_model_that_cannot_be_rewound_is_refused_when_the_engine_is_built(kind: str, place: str) -> None:
    """ml-explore/mlx-lm#1446: accepted at start, it failed inside the first request."""
    if kind == "recurrent":
        model = tiny("mamba")
    else:
        config = hf.Lfm2Config(
            **{"vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2},
            **{"num_attention_heads": 4, "num_key_value_heads": 2, "layer_types": ["conv", "full_attention"]},
        )
        model = hf.Lfm2ForCausalLM(config).double().eval()
    levels = [LevelConfig(model=model, name="odd")]
    if place == "draft":
        levels.append(LevelConfig(model=tiny("llama"), name="target"))
    with pytest.raises(LoadError, match=rf"{type(model).__name__} has .*, which cannot be rewound") as caught:
        engine(*levels)
    assert "\n" not in str(caught.value)


# -- the end of a text ----------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("k", [1, 4, 16])
def test_nothing_follows_an_end_token_inside_a_block(k: int, params: SamplingParams) -> None:
    """huggingface/transformers#47912: the whole block was appended and streamed, only its last token checked."""
    targets = [Reader(40, seed=seed, order=3) for seed in range(40)]
    free = {target: twin.plain(target, PROMPT, params).tokens for target in targets}
    target = next(target for target in targets if free[target].index(free[target][6]) == 6)
    text = free[target]
    target.end_ids = (text[6],)
    for rule in LOSSLESS if params is GREEDY else ["coupled"]:
        made = engine(fixed(oracle(PROMPT, text), k), target, rule=rule)
        result = made.generate(PROMPT, params)
        assert (result.tokens, result.finish_reason) == (text[:7], "stop")
        assert result.text == target.decode(text[:7])
        assert len(result.origins) == result.stats.new_tokens == 7
        chunks = list(made.stream(PROMPT, params))
        assert [token for chunk in chunks for token in chunk.tokens] == text[:7]
        assert "".join(chunk.text for chunk in chunks) == result.text
        assert chunks[-1].finish_reason == "stop"


@BOTH
@EVERY_CHAIN
def test_a_model_without_an_end_token(chain: str, params: SamplingParams) -> None:
    """huggingface/transformers#46790: n-gram drafting crashed where no EOS id was set."""
    none = {"eos_token_id": None, "pad_token_id": None, "bos_token_id": None}
    target, draft = tiny("llama", **none), tiny("llama", **none)
    target.generation_config.eos_token_id = None
    ids = [5, 6, 7, 8, 9, 10, 11, 7, 8]
    params = dataclasses.replace(params, max_new_tokens=15)
    table, model = fixed("ngram", k=3), fixed(k=3, model=draft, name="draft")
    levels = {"ngram": [table], "draft": [model], "cascade": [table, model]}[chain]
    made = engine(*levels, LevelConfig(model=target, name="target"))
    assert made.model.end_ids == ()
    result = made.generate(ids, params)
    assert (len(result.tokens), result.finish_reason) == (15, "length")
    assert result.tokens == engine(LevelConfig(model=target)).generate(ids, params).tokens


@BOTH
@pytest.mark.parametrize("kind", ["oracle", "ngram"])
@pytest.mark.parametrize("k", range(1, 9))
def test_never_more_tokens_than_were_asked_for(k: int, kind: str, params: SamplingParams) -> None:
    """huggingface/transformers#46993: n-gram drafting returned more than the asked number."""
    target = ToyModel(8, order=1, scale=4.0)
    prompt = [1, 2, 3] * 6
    free = twin.plain(target, prompt, params).tokens
    table = {"options": {"n_min": 1}} if kind == "ngram" else {}
    made = engine(fixed("ngram" if kind == "ngram" else oracle(prompt, free), k, **table), target)
    for asked in range(7):
        result = made.generate(prompt, dataclasses.replace(params, max_new_tokens=asked))
        assert (result.tokens, result.finish_reason) == (free[:asked], "length")
    with_end = ToyModel(8, order=1, scale=4.0, end_ids=(free[3],))
    made = engine(fixed("ngram" if kind == "ngram" else oracle(prompt, free), k, **table), with_end)
    for asked in range(7):
        params = dataclasses.replace(params, max_new_tokens=asked)
        equal(made.generate(prompt, params), twin.plain(with_end, prompt, params))


@BOTH
@pytest.mark.parametrize("least", range(9))
def test_a_minimum_counts_tokens_and_not_rounds(least: int, params: SamplingParams) -> None:
    """sgl-project/sglang#33643: it was advanced once per round, so EOS stayed forbidden several times too long."""

    class Eager(ToyModel):
        def logits(self, prefix):
            out = super().logits(prefix).copy()
            out[9] += 60
            return out

    target = Eager(end_ids=(9,))
    params = dataclasses.replace(params, min_new_tokens=least)
    want = twin.plain(target, PROMPT, params)
    assert len(want.tokens) == least + 1, "the first place where it may end"
    assert want.tokens.index(9) == least
    beyond = twin.plain(target, PROMPT, params, beyond=12).tokens
    result = engine(fixed(oracle(PROMPT, beyond), k=4), target).generate(PROMPT, params)
    equal(result, want)
    assert result.stats.levels[0].alpha == (1.0 if least else None)


@BOTH
@pytest.mark.parametrize("kind", ["oracle", "mixed"])
def test_penalties_are_as_strong_with_a_good_drafter(kind: str, params: SamplingParams) -> None:
    """sgl-project/sglang#33643: they were advanced once per round too."""
    target = ToyModel(24, scale=1.0)
    free = twin.plain(target, PROMPT, params).tokens
    params = dataclasses.replace(params, repetition_penalty=2.0)
    want = twin.plain(target, PROMPT, params)
    assert len(set(want.tokens)) > len(set(free)), "it matters"
    result = engine(fixed(oracle(PROMPT, want.tokens, kind, 24), k=4), target).generate(PROMPT, params)
    equal(result, want)
    assert result.stats.levels[0].accepted > 0


# -- stop strings ---------------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize(
    ("stops", "want"),
    [
        (["ab"], "."),  # ends with the 2nd of 12 accepted tokens
        (["mn"], ".abcdefghijkl"),  # the last of one block and the first of the next
        (["hi", "cd"], ".ab"),  # two in one block
        (["cd", "hi"], ".ab"),
        (["zz", "n.abc"], ".abcdefghijklm"),
    ],
)
@pytest.mark.parametrize("drafter", ["oracle", "model"])
def test_a_stop_string_anywhere_in_a_block(drafter: str, stops: list[str], want: str, params: SamplingParams) -> None:
    """sgl-project/sglang#23802: only a short tail was searched, so one that ended early was missed."""
    target = Speller(".abcdefghijklmn.abcdefghijklmn")
    script = fixed(oracle([0], target.spelt), k=12)
    made = engine(script if drafter == "oracle" else fixed(k=12, model=Speller(".abcdefghijklmn" * 2)), target)
    params = dataclasses.replace(params, stop=stops, max_new_tokens=30)
    result = made.generate([0], params)
    assert (result.text, result.finish_reason) == (want, "stop")
    equal(result, twin.plain(target, [0], params))
    assert result.stats.levels[0].accepted > 0


@BOTH
def test_nothing_beyond_a_stop_string_is_returned(params: SamplingParams) -> None:
    """vllm-project/vllm#47616: the text was cut, but ids and logprobs beyond it were returned."""
    target = Speller("some words. And more of them")
    made = engine(fixed(oracle([0], target.spelt), k=7), target)
    params = dataclasses.replace(params, stop=["s. A"], logprobs=2)
    want = twin.plain(target, [0], params)
    result = made.generate([0], params)
    equal(result, want)
    assert result.text == "some word"
    assert len(result.tokens) == len(result.logprobs) == len(result.origins) == result.stats.new_tokens == 13
    for one, other in zip(result.logprobs, want.logprobs, strict=True):
        assert one == pytest.approx(other, abs=1e-9)
    chunks = list(made.stream([0], params))
    assert [token for chunk in chunks for token in chunk.tokens] == want.tokens
    assert "".join(chunk.text for chunk in chunks) == want.text
    assert chunks[-1].finish_reason == "stop"


# -- processors -----------------------------------------------------------------------------------------


@BOTH
def test_a_processor_holds_whatever_is_proposed(params: SamplingParams) -> None:
    """sgl-project/sglang#26330: a custom processor was skipped when drafting was on."""
    prefixes: list[list[int]] = []

    def rules(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        prefixes.append(input_ids[0].tolist())
        scores = scores.clone()
        scores[:, 5] = -torch.inf
        if input_ids.shape[1] == len(PROMPT) + 10:
            scores[:, :9] = scores[:, 10:] = -torch.inf
        return scores

    class Five(Drafter):
        def propose(self, asks):
            return [Draft([5] * ask.want) for ask in asks]

    targets = (ToyModel(12, seed=seed, scale=1.0) for seed in range(20))
    target = next(target for target in targets if 5 in twin.plain(target, PROMPT, params).tokens[:10])
    params = dataclasses.replace(params, logits_processors=[rules])
    want = twin.plain(target, PROMPT, params).tokens
    for drafter in (Five(), oracle(PROMPT, want, "oracle", 12), oracle(PROMPT, want, "mixed", 12)):
        prefixes.clear()
        result = engine(fixed(drafter, k=4), target).generate(PROMPT, params)
        assert result.tokens == want
        assert 5 not in result.tokens
        assert result.tokens[10] == 9
        assert prefixes == [[*PROMPT, *want[:n]] for n in range(NEW)]


# -- vocabularies ---------------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize(("below_size", "size"), [(104, 112), (112, 104)])
def test_heads_padded_to_different_sizes(below_size: int, size: int, params: SamplingParams) -> None:
    """vllm-project/vllm#7252: one tokenizer, heads of two sizes: refused, or a reshape error."""
    params = dataclasses.replace(params, ignore_eos=True)
    words = tokenizer(100)
    target, draft = (tiny("llama", vocab_size=n, tie_word_embeddings=False) for n in (size, below_size))
    with torch.no_grad():
        for mine, theirs in zip(draft.parameters(), target.parameters(), strict=True):
            rows = min(len(mine), len(theirs))
            mine[:rows] = theirs[:rows]
    for model in (target, draft):
        model.lm_head.weight.data[100:] = model.lm_head.weight.data[:1] * 50  # they would win
    want = engine(LevelConfig(model=target, tokenizer=words)).generate(PROMPT, params).tokens
    made = engine(
        fixed("ngram", k=3),
        fixed(k=4, model=draft, name="draft", tokenizer=words),
        LevelConfig(model=target, name="target", tokenizer=words),
    )
    proposed: list[int] = []
    propose = made.target.source.drafter.propose

    def note(asks: Any) -> list[Draft]:
        drafts = propose(asks)
        proposed.extend(token for draft in drafts for token in draft.tokens)
        return drafts

    made.target.source.drafter.propose = note
    result = made.generate(PROMPT, params)
    assert result.tokens == want
    assert max(result.tokens) < 100
    assert proposed
    assert max(proposed) < 100


@pytest.mark.parametrize("finer", ["target", "draft"])
def test_a_draft_with_another_tokenizer_is_refused(finer: str) -> None:
    """huggingface/transformers#46936: it crashed on position ids that were made for the target's tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    table = {token: i for i, token in enumerate([*alphabet, "th", "he"])}
    words = Tokenizer(models.BPE(table, [("t", "h"), ("h", "e")]))
    words.pre_tokenizer, words.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    coarse, fine = hf.PreTrainedTokenizerFast(tokenizer_object=words), tokenizer(259)
    assert len(coarse("the thing")["input_ids"]) < len(fine("the thing")["input_ids"])
    first, second = (fine, coarse) if finer == "target" else (coarse, fine)
    with pytest.raises(LoadError, match="draft and target have different tokenizers: id 0 is") as caught:
        engine(
            LevelConfig(model=tiny("llama", vocab_size=259), name="draft", tokenizer=second),
            LevelConfig(model=tiny("llama", vocab_size=259), name="target", tokenizer=first),
        )
    assert "\n" not in str(caught.value)


# -- nothing proposed, context limits, batches -----------------------------------------------------------


class Alternate(ScriptedDrafter):
    """Proposes on every second round."""

    rounds = 0

    def propose(self, asks):
        self.rounds += 1
        return super().propose(asks) if self.rounds % 2 else [Draft([]) for _ in asks]


@BOTH
def test_empty_proposals_are_plain_decoding(params: SamplingParams) -> None:
    """NVIDIA/TensorRT-LLM#2684: an empty draft list tripped an assertion."""
    target = ToyModel()
    prompts = [PROMPT, [4], [7, 7]]
    want = [twin.plain(target, prompt, params).tokens for prompt in prompts]
    texts = [prompt + tokens for prompt, tokens in zip(prompts, want, strict=True)]
    for rule in LOSSLESS if params is GREEDY else ["coupled"]:
        off = LevelConfig(drafter=ScriptedDrafter(texts), k=0)
        for level in (fixed(ScriptedDrafter(kind="empty"), k=4), off):
            results = engine(level, target, rule=rule).generate(prompts, params)
            assert [result.tokens for result in results] == want
            for stats in (result.stats for result in results):
                assert stats.target_forwards == stats.new_tokens == NEW
                assert (stats.levels[0].drafted, stats.levels[0].accept_rate, stats.levels[0].alpha) == (0, None, None)
        [result] = [engine(fixed(Alternate(texts), k=3), target, rule=rule).generate(PROMPT, params)]
        assert result.tokens == want[0]
        assert result.stats.levels[0].accept_rate == 1.0
        assert result.stats.target_forwards == 16, "one token, then four and one in turn: 1 + 7 * (4 + 1) + 4"
        # A batch in which the drafter knows nothing of one row.
        results = engine(fixed(ScriptedDrafter(texts[:2]), k=3), target, rule=rule).generate(prompts, params)
        assert [result.tokens for result in results] == want
        assert [result.stats.levels[0].accept_rate for result in results] == [1.0, 1.0, None]


@BOTH
@pytest.mark.parametrize("chain", [*CHAINS, "oracle", "short draft"])
@pytest.mark.parametrize("length", [60, 63, 64])
def test_drafts_shrink_to_what_the_context_holds(length: int, chain: str, params: SamplingParams) -> None:
    """turboderp-org/exllamav2#274: look-ahead was not bounded, and it crashed four tokens from the end."""
    target = ToyModel(8, order=1, max_length=64)
    prompt = [i % 5 for i in range(length)]
    params = dataclasses.replace(params, max_new_tokens=100)
    want = twin.plain(target, prompt, params)
    ahead = fixed(oracle(prompt, want.tokens + [0] * 9), k=5)
    if chain == "oracle":
        levels = [ahead]
    elif chain == "short draft":  # whose own context ends before the target's
        levels = [ahead, fixed(k=5, model=ToyModel(8, order=1, max_length=61), name="draft")]
    else:
        levels = below(chain, target, k=5)
    result = engine(*levels, LevelConfig(model=target, name="target")).generate(prompt, params)
    assert result.tokens == want.tokens
    assert (len(result.tokens), result.finish_reason) == (64 - length, "length")
    assert [level.dropped for level in result.stats.levels] == [0] * len(result.stats.levels), "none was too long"


@BOTH
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_rows_that_accept_differently(family: str, params: SamplingParams) -> None:
    """Blaizzy/mlx-vlm#1155: rows that accepted fewer tokens kept the shared offset."""
    target = tiny(family)
    prompts = [[9, 10, 11], [i * 5 % 80 + 3 for i in range(7)], [i * 11 % 70 + 3 for i in range(12)]]
    alone = engine(LevelConfig(model=target))
    free = dataclasses.replace(params, ignore_eos=True)
    texts = [prompt + alone.generate(prompt, free).tokens for prompt in prompts]
    new = texts[2][12:]
    early = next(i for i, token in enumerate(new) if i > 3 and new.index(token) == i)
    ends = dataclasses.replace(free, stop_token_ids=[new[early]])  # the row that is always right ends early
    rows = [free, free, ends]
    want = [alone.generate(prompt, one) for prompt, one in zip(prompts, rows, strict=True)]
    assert len(want[2].tokens) == early + 1 < NEW

    class ByRow(Drafter):
        """Wrong, half right and right, by the row's prompt."""

        def propose(self, asks):
            return [self.one(ask) for ask in asks]

        def one(self, ask):
            row = next(i for i, prompt in enumerate(prompts) if ask.context.tokens[: len(prompt)].tolist() == prompt)
            at = len(ask.context)
            right = texts[row][at : at + ask.want]
            spoil = {0: 1, 1: at % 2, 2: 0}[row]
            return Draft([(token + spoil) % VOCAB for token in right])

    results = engine(fixed(ByRow(), k=4), LevelConfig(model=target, name="target")).generate(prompts, rows)
    for found, alike in zip(results, want, strict=True):
        equal(found, alike)
    rates = [result.stats.levels[0].accept_rate for result in results]
    assert rates[0] == 0.0
    assert 0.2 < rates[1] < 0.8
    assert results[2].stats.levels[0].alpha == 1.0
    assert results[2].finish_reason == "stop"


# -- figures and logprobs -------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("controller", CONTROLLERS)
def test_acceptance_counts_drafted_tokens_only(controller: str, params: SamplingParams) -> None:
    """sgl-project/sglang#11572: the rate went over 1, because the target's own token was counted."""
    target = ToyModel()
    free = twin.plain(target, PROMPT, params).tokens
    never = BypassConfig(threshold=0.0)
    for kind, rate in (("oracle", 1.0), ("wrong", 0.0), ("empty", None)):
        script = LevelConfig(drafter=oracle(PROMPT, free, kind), controller=controller, bypass=never)
        copy = LevelConfig(model=ToyModel(), name="draft", controller=controller, bypass=never, tree="chain")
        for levels in ([script], [dataclasses.replace(script, drafter=oracle(PROMPT, free, kind)), copy]):
            stats = engine(*levels, LevelConfig(model=target, name="target")).generate(PROMPT, params).stats
            assert [level.accept_rate for level in stats.levels[:-1]] == [rate, 1.0][: len(levels)]
            assert stats.new_tokens == stats.levels[len(levels) - 1].accepted + stats.target_forwards
            assert all(0 <= level.accepted <= level.tested <= level.drafted for level in stats.levels)
    assert "accept_rate: accepted / drafted, None when nothing was drafted" in " ".join(
        type(stats.levels[0]).__doc__.split()
    )


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("kind", ["mixed", "model"])
def test_logprobs_are_the_targets(kind: str, temperature: float) -> None:
    """ggml-org/llama.cpp#27972: every token's logprob was reported as 0.0 with drafting on."""
    module = tiny("llama")
    params = dataclasses.replace(SAMPLED, temperature=temperature, logprobs=5, ignore_eos=True)
    want = engine(LevelConfig(model=module)).generate(PROMPT, params)
    draft = tiny("llama", seed=1)
    draft.load_state_dict({key: value * 1.02 for key, value in module.state_dict().items()})
    script = oracle(PROMPT, want.tokens, "mixed", VOCAB)
    level = fixed(script, k=4) if kind == "mixed" else fixed(k=4, model=draft, name="draft")
    result = engine(level, LevelConfig(model=module, name="target")).generate(PROMPT, params)
    assert result.tokens == want.tokens
    assert {0, 1} == set(result.origins), "accepted tokens and the target's own"
    with torch.no_grad():
        logits = module(input_ids=torch.tensor([[*PROMPT, *result.tokens]])).logits[0, len(PROMPT) - 1 : -1]
    own = (logits / (temperature or 1.0)).log_softmax(-1)
    for token, row, found, plain in zip(result.tokens, own, result.logprobs, want.logprobs, strict=True):
        assert found == pytest.approx(plain, abs=1e-4)
        assert set(row.topk(5).indices.tolist()) <= set(found)
        assert token in found
        assert found == pytest.approx({i: float(row[i]) for i in found}, abs=1e-4)
        assert min(found.values()) < -1e-6


# -- devices, modes, memory -----------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize(
    ("target_place", "draft_place"),
    [
        (("cpu", "float32"), ("cpu", "bfloat16")),
        *(
            pytest.param(*places, marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))
            for places in [(("cuda", "float32"), ("cpu", "float32")), (("cpu", "float32"), ("cuda", "bfloat16"))]
        ),
    ],
)
def test_models_in_different_places(target_place: Any, draft_place: Any, params: SamplingParams) -> None:
    """huggingface/transformers#35099: draft and target on different devices crashed in several places."""
    params = dataclasses.replace(params, ignore_eos=True)
    (device, dtype), (other, other_dtype) = target_place, draft_place
    target = {"model": tiny("llama", torch.float32), "device": device, "dtype": dtype, "name": "target"}
    want = engine(LevelConfig(**target)).generate(PROMPT, params).tokens
    draft = fixed(k=4, model=tiny("llama", torch.float32), device=other, dtype=other_dtype, name="draft")
    result = engine(fixed("ngram"), draft, LevelConfig(**target)).generate(PROMPT, params)
    assert result.tokens == want
    assert result.stats.levels[1].accepted > 0


@BOTH
def test_models_in_training_mode_do_not_drop_out(params: SamplingParams) -> None:
    """ai2cm/ace#1019: a model that was left in training mode had its dropout active."""
    noisy = {"resid_pdrop": 0.5, "embd_pdrop": 0.5, "attn_pdrop": 0.5}
    want = engine(LevelConfig(model=tiny("gpt2"))).generate(PROMPT, params).tokens
    for training in ((True, False), (False, True), (True, True)):
        draft, target = (tiny("gpt2", **noisy).train(mode) for mode in training)
        made = engine(fixed(k=4, model=draft, name="draft"), LevelConfig(model=target, name="target"))
        for _ in range(2):
            result = made.generate(PROMPT, params)
            assert result.tokens == want
            assert result.stats.levels[0].accept_rate == 1.0
        made.close()
        assert (draft.training, target.training) == training
        assert all(parameter.grad is None for model in (draft, target) for parameter in model.parameters())


@pytest.mark.parametrize("bypassed", [True, False])
def test_nothing_grows_from_request_to_request(bypassed: bool) -> None:
    """vllm-project/vllm#15506: what a request kept was freed on the drafting path only."""
    target = ToyModel()
    bypass = BypassConfig(threshold=1.0 if bypassed else 0.0, min_tests=1)
    levels = [fixed("ngram", options={"n_min": 1}), fixed(k=2, model=ToyModel(seed=5, mix=(target, 0.5)), name="draft")]
    made = engine(*levels, LevelConfig(model=target, name="target"), bypass=bypass)
    params = SamplingParams(max_new_tokens=4)

    def alive() -> int:
        gc.collect()
        kinds = [type(thing) for thing in gc.get_objects()]  # not isinstance: torch has objects that complain
        return sum(issubclass(kind, (torch.Tensor, np.ndarray)) for kind in kinds)

    def sizes() -> list[int]:
        tables = [*made.chain.levels, *made.chain.governors]
        return [len(made.scheduler.live), *(len(table.rows) for table in tables)]

    start, counts = sizes(), []
    for i in range(1, 401):
        stream = made.stream([1 + i % 3, 2, 1, 2], params)
        next(stream)
        if i % 5 == 0:
            made.cancel(stream.request_id)
        list(stream)
        if i in (50, 400):
            counts.append(alive())
            assert sizes() == start
    assert counts[1] <= counts[0] + 70, "the toys' own tables of logits may still fill up"


# -- control, cancelling, streaming ---------------------------------------------------------------------


@pytest.mark.parametrize("batch", [1, 16])
def test_a_drafter_that_is_always_wrong_costs_next_to_nothing(batch: int) -> None:
    """snowflakedb/ArcticInference#185: drafting was slower at low acceptance, and worse in a batch."""
    clock = ManualClock()
    target = ToyModel(clock=clock, cost=lambda tokens: 1.0 + 0.05 * tokens)
    params = SamplingParams(max_new_tokens=400, ignore_eos=True)
    prompts = [[1, 2, 3, i] for i in range(batch)]
    texts = [prompt + twin.plain(target, prompt, params).tokens for prompt in prompts]
    config = CascadeConfig([LevelConfig(drafter=ScriptedDrafter(texts, "wrong")), target], max_batch=16)
    made = Engine(config, clock=clock, costs=FixedCosts(lambda level, tokens: 1.0 + 0.05 * tokens), plugins=PLUGINS)
    took = []
    for speculate in (False, True):
        before = clock.now
        results = made.generate(prompts, dataclasses.replace(params, speculate=speculate))
        took.append(clock.now - before)
        assert [prompt + result.tokens for prompt, result in zip(prompts, results, strict=True)] == texts
    for level in (result.stats.levels[0] for result in results):
        assert level.drafted <= 0.2 * 400
        assert any(what == "bypass" for _, what, _ in level.decisions)
    assert all(result.stats.target_forwards <= 400 for result in results)
    assert took[1] <= 1.15 * took[0]


def turns(ks: Sequence[int]) -> int:
    steps = [b - a for a, b in pairwise(ks) if b != a]
    return sum((a > 0) != (b > 0) for a, b in pairwise(steps))


@pytest.mark.parametrize("controller", CONTROLLERS)
def test_k_does_not_flap(controller: str) -> None:
    """sgl-project/sglang#27508: the length flipped up and down where acceptance sat near a threshold."""

    def run(**options: Any) -> list[int]:
        made = PLUGINS.controller(controller)(k=None, k_min=1, k_max=12, **options)
        dice, ks, carry = random.Random(3), [], 0.0

        def tell(accepted: int) -> None:
            made.observe(Outcome(ks[-1], ks[-1], min(ks[-1], accepted + 1), accepted))

        def ask() -> int:
            ks.append(made.next_k(Estimates(0.5, 0.05, lambda n: 1.0 + 0.01 * (n - 1))))
            return ks[-1]

        for _ in range(500):  # every token holds with an even chance
            k = ask()
            tell(next((i for i in range(k) if dice.random() < 0.5), k))
        for _ in range(200):  # exactly at the set point
            carry += ask() * options.get("setpoint", 0.3)
            tell(int(carry))
            carry -= int(carry)
        ask()
        tell(ks[-1])  # one outlier
        for _ in range(100):
            carry += ask() * options.get("setpoint", 0.3)
            tell(int(carry))
            carry -= int(carry)
        return ks

    for options in ({}, {"setpoint": 0.3}) if controller == "pid" else ({},):
        ks = run(**options)
        assert all(isinstance(k, int) and 1 <= k <= 12 for k in ks)
        assert turns(ks[:500]) <= 50
        assert turns(ks[500:]) <= 30
        assert abs(ks[-1] - ks[699]) <= 1 + 0.25 * ks[699], "an outlier is forgotten"
        assert ks == run(**options)


def test_cancelling_in_the_middle_of_company() -> None:
    """vllm-project/vllm#28473: an abort between drafting and commit counted -1, and one too late killed the server."""
    target = ToyModel()
    prompts = [[i, i + 1, i] for i in range(20)]
    want = [twin.plain(target, prompt, SAMPLED).tokens for prompt in prompts]
    holder: dict[str, Engine] = {}

    class Plugin:
        """Cancels every second request from inside its own round, each in another one, and twice."""

        def cascade_make_observer(self, request):
            return type("Observer", (), {"on_round": lambda _, r: self.round(request), "on_end": lambda _, s: None})()

        def round(self, request):
            if request.id % 2 and request.rounds > request.id // 4:
                holder["engine"].cancel(request.id)
                holder["engine"].cancel(request.id)

    levels = [*below("cascade", target), LevelConfig(model=target, name="target")]
    made = holder["engine"] = engine(*levels, max_batch=20, plugins=[Plugin()])
    results = made.generate(prompts, SAMPLED)
    for i, (result, tokens) in enumerate(zip(results, want, strict=True)):
        if i % 2:
            assert result.finish_reason == "cancelled"
            assert 0 < len(result.tokens) < NEW
            assert result.tokens == tokens[: len(result.tokens)]
        else:
            assert (result.tokens, result.finish_reason) == (tokens, "length")
        for level in result.stats.levels:
            assert 0 <= level.accepted <= level.tested <= level.drafted
    for request_id in range(25):  # over, or never there
        made.cancel(request_id)
    assert made.generate(prompts[0], dataclasses.replace(SAMPLED, seed=11)).tokens == want[0]
    assert not made.scheduler.live


@BOTH
@pytest.mark.parametrize("k", range(1, 7))
def test_streaming_never_shows_half_a_character(k: int, params: SamplingParams) -> None:
    """ai-dynamo/dynamo#12630: replacement characters where a character was split over tokens or blocks."""
    text = "né 😀 한국어, où ça? 👩‍👩‍👧 fin é"
    target = Speller(text)
    size = len(target.spelt)
    made = engine(fixed(oracle([0], target.spelt), k), target)
    chunks = list(made.stream([0], dataclasses.replace(params, max_new_tokens=size)))
    pieces = [chunk.text for chunk in chunks]
    assert "".join(pieces) == text == target.decode([t for chunk in chunks for t in chunk.tokens])
    assert not any("\ufffd" in piece for piece in pieces)
    assert max(len(chunk.tokens) for chunk in chunks) == k + 1
    # Ended inside a character: the tail is flushed as the whole decodes.
    short = list(made.stream([0], dataclasses.replace(params, max_new_tokens=6)))
    tokens = [t for chunk in short for t in chunk.tokens]
    assert "".join(chunk.text for chunk in short) == target.decode(tokens) == "né \ufffd"


# -- one request after another --------------------------------------------------------------------------


@BOTH
def test_a_table_holds_nothing_of_the_request_before(params: SamplingParams) -> None:
    """ggml-org/llama.cpp#27852: a shorter next prompt was never indexed, acceptance fell from 86 % to 11 %."""

    class Kept(NgramDrafter):
        """Keeps what it proposes."""

        def propose(self, asks):
            drafts = super().propose(asks)
            self.seen += [(ask.context.tokens.tolist(), draft.tokens) for ask, draft in zip(asks, drafts, strict=True)]
            return drafts

    def make() -> tuple[Engine, Kept]:
        drafter = Kept(n_min=1)
        drafter.seen = []
        return engine(fixed(drafter, k=4), target, bypass=BypassConfig(threshold=0.0)), drafter

    target = ToyModel(24, order=1, scale=5.0)
    long, short = [i * 7 % 12 for i in range(300)], [20, 21, 22, 20, 21, 22, 20]
    one, drafter = make()
    runs = []
    for prompt in (long, short, long):
        drafter.seen = []
        result = one.generate(prompt, params)
        runs.append((result.tokens, result.stats.levels[0], drafter.seen))
    for (tokens, stats, seen), prompt in zip(runs, (long, short, long), strict=True):
        fresh, alone = make()
        result = fresh.generate(prompt, params)
        assert tokens == result.tokens
        assert seen == alone.seen
        assert stats.drafted == result.stats.levels[0].drafted > 0
        assert stats.accepted == result.stats.levels[0].accepted > 0
    text = {*short, *runs[1][0]}
    assert all(set(draft) <= text for _, draft in runs[1][2]), "nothing of the text before"


@BOTH
def test_a_second_turn_keeps_what_is_common_on_every_level(params: SamplingParams) -> None:
    """vllm-project/vllm#47930: the target's prefix was restored, the draft's was not; acceptance fell to nothing."""
    target, copy = ToyModel(), ToyModel()
    made = engine(fixed(k=4, model=copy, name="draft"), LevelConfig(model=target, name="target"))
    fed: dict[str, list[list[int]]] = {"draft": [], "target": []}
    for name, model in (("draft", copy), ("target", target)):

        def note(feeds: Any, name: str = name, forward: Any = model.forward) -> torch.Tensor:
            fed[name] += [list(feed.tokens) for feed in feeds]
            return forward(feeds)

        model.forward = note
    first = [i * 5 % 17 for i in range(50)]
    with made.session() as chat:
        one = chat.generate(first, params)
        changed = [*first[:-4], 30, 29, 28, 27, *one.tokens, 3, 2, 1]
        for seen in fed.values():
            seen.clear()
        two = chat.generate(changed, params)
    assert fed["target"][0] == changed[46:], "all but the common beginning"
    assert fed["draft"][0][: len(changed) - 46] == changed[46:]
    assert two.tokens == twin.plain(target, changed, params).tokens
    assert [turn.stats.levels[0].accept_rate for turn in (one, two)] == [1.0, 1.0]


# -- cascades, plugins, configuration -------------------------------------------------------------------


@BOTH
def test_every_drafter_of_a_chain_knows_the_text(params: SamplingParams) -> None:
    """ggml-org/llama.cpp#23269: drafters that had not produced a draft were not told what was accepted."""
    params = dataclasses.replace(params, max_new_tokens=100)
    target = ToyModel(16, order=1, scale=3.0)
    free = twin.plain(target, PROMPT, params).tokens

    class Sometimes(ScriptedDrafter):
        """Knows the text, but speaks in two of three rounds only."""

        asked = 0
        heard: list[int]

        def propose(self, asks):
            self.asked += 1
            for ask in asks:
                assert ask.context.tokens.tolist() == [*PROMPT, *free][: len(ask.context)]
            return super().propose(asks) if self.asked % 3 else [Draft([]) for _ in asks]

        def end(self, row_id):
            self.heard = self.observed[row_id]

    script = Sometimes([PROMPT + free])
    made = engine(
        fixed(script, k=2, name="script"),
        fixed(k=5, model=ToyModel(16, order=1, scale=3.0), name="draft"),
        LevelConfig(model=target, name="target"),
    )
    result = made.generate(PROMPT, params)
    assert result.tokens == free == script.heard
    assert result.stats.levels[1].accept_rate == 1.0
    assert set(result.origins) == {0, 1, 2}


@BOTH
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_siblings_do_not_shift_what_follows(family: str, attention: str, params: SamplingParams) -> None:
    """lablup/mlxcel#1214: nodes were placed by their index in the flattened tree, not by their depth."""
    target = tiny(family)
    target.set_attn_implementation(attention)
    params = dataclasses.replace(params, ignore_eos=True)
    want = engine(LevelConfig(model=target)).generate(PROMPT, params).tokens
    text = [*PROMPT, *want]

    class Bushy(Drafter):
        """Two branches at every node, three deep, one path right: the nodes in any order, parents first."""

        dice = random.Random(5)

        def propose(self, asks):
            return [self.one(text[len(ask.context) :]) for ask in asks if ask.cap >= 14] or [Draft([]) for _ in asks]

        def one(self, right):
            tokens, parents, ready = [], [], [(-1, 0, True), (-1, 0, False)]
            while ready:
                parent, depth, true = ready.pop(self.dice.randrange(len(ready)))
                tokens.append(right[depth] if true else (right[depth] + 1 + self.dice.randrange(9)) % VOCAB)
                parents.append(parent)
                if depth < 2:
                    ready += [(len(tokens) - 1, depth + 1, true), (len(tokens) - 1, depth + 1, False)]
            return Draft(tokens, parents)

    made = engine(fixed(Bushy(), k=14), LevelConfig(model=target, name="target"))
    result = made.generate(PROMPT, params)
    assert result.tokens == want
    assert result.stats.levels[0].alpha == 1.0
    assert result.stats.levels[0].accepted >= 3 * ((NEW - 15) // 4)


PLUGIN = """
from cascade import Draft, Drafter, hookimpl

class Echo(Drafter):
    def propose(self, asks):
        return [Draft(ask.context.tokens[-2:]) for ask in asks]

@hookimpl
def cascade_register_drafters({arguments}):
    return {{"{name}": Echo}}
"""


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """installed(distribution=(module, source), ...) leaves what pip would leave behind."""
    version = "3.4.dev7"

    def install(**distributions: tuple[str, str]) -> None:
        for name, (module, source) in distributions.items():
            folder = tmp_path / f"{name}-{version}.dist-info"
            folder.mkdir()
            (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
            (folder / "entry_points.txt").write_text(f"[cascade_spec.plugins]\n{module}_point = {module}\n")
            (tmp_path / f"{module}.py").write_text(source)
        monkeypatch.syspath_prepend(tmp_path)

    real = metadata.entry_points
    monkeypatch.setattr(metadata, "entry_points", lambda **kw: [p for p in real(**kw) if p.dist.version == version])
    return install


def test_one_broken_plugin_stops_nothing_else(installed, caplog) -> None:
    """simonw/llm#1351: one broken plugin stopped everything from loading."""
    installed(
        reports_broken=("reports_m1", "import nothing_of_this_name\n"),
        reports_odd=("reports_m2", PLUGIN.format(arguments="whatever", name="odd")),
        reports_fine=("reports_m3", PLUGIN.format(arguments="", name="echo")),
    )
    with caplog.at_level(logging.WARNING, "cascade"):
        found = create()
    assert found.drafter_names() == ["echo", "ngram"]
    messages = [record.getMessage() for record in caplog.records]
    for words in (("reports_m1_point", "reports_broken", "nothing_of_this_name"), ("reports_m2_point", "whatever")):
        [message] = [message for message in messages if words[0] in message]
        assert all(word in message for word in words)
        assert "\n" not in message
    assert len(messages) == 2
    target = ToyModel(6, order=1)
    config = CascadeConfig([LevelConfig(drafter="echo", k=2), target])
    result = Engine(config, plugins=found, costs=FixedCosts(lambda *_: 1.0)).generate(PROMPT, GREEDY)
    assert result.tokens == twin.plain(target, PROMPT, GREEDY).tokens
    assert result.stats.levels[0].drafted > 0


def test_two_plugins_of_one_name_are_an_error(installed) -> None:
    """simonw/llm#1351: of two with one name the later one won, without a word."""
    installed(
        reports_first=("reports_m4", PLUGIN.format(arguments="", name="twice")),
        reports_second=("reports_m5", PLUGIN.format(arguments="", name="twice")),
    )
    with pytest.raises(PluginError, match="'twice' is registered twice") as caught:
        create()
    assert "reports_first" in str(caught.value)
    assert "reports_second" in str(caught.value)


@BOTH
def test_a_drafter_that_raises_in_its_third_round_costs_that_proposal(params: SamplingParams) -> None:
    """simonw/llm#1351, while proposing."""

    class Third(ScriptedDrafter):
        rounds = 0

        def propose(self, asks):
            self.rounds += 1
            if self.rounds == 3:
                raise RuntimeError("third")
            return super().propose(asks)

    target = ToyModel()
    want = twin.plain(target, PROMPT, params).tokens
    result = engine(fixed(Third([PROMPT + want]), k=4), target).generate(PROMPT, params)
    assert result.tokens == want
    assert result.stats.levels[0].dropped == 1
    assert result.stats.levels[0].accept_rate == 1.0
    assert result.stats.target_forwards == 1 + 1 + -(-(NEW - 2) // 5), "one round of one token"


def test_what_is_given_is_used_or_said_to_be_off() -> None:
    """ggml-org/llama.cpp#25345: a draft model was loaded, and drafting off because of another switch's default."""
    target = ToyModel()
    draft = ToyModel(seed=7, mix=(target, 0.9))
    made = engine(LevelConfig(model=draft, name="draft"), LevelConfig(model=target, name="target"))
    stats = made.generate(PROMPT, GREEDY).stats
    assert stats.levels[0].drafted > 0
    assert "draft" in made.summary()
    assert "off" not in made.summary()
    off = engine(LevelConfig(model=draft, name="draft", k=0), LevelConfig(model=target, name="target"))
    stats = off.generate(PROMPT, GREEDY).stats
    assert "level draft is off: k=0" in off.summary()
    assert stats.levels[0].drafted == 0
    assert stats.levels[0].decisions == ((0, "off", "k=0 in the configuration"),)
    for refused in ({"options": {"n_max": 3}}, {"options": {"kp": 1.0}, "controller": "fixed"}, {"k": 99}):
        with pytest.raises(ConfigError):
            engine(LevelConfig(model=draft, name="draft", **refused), LevelConfig(model=target, name="target"))
    with pytest.raises(ConfigError, match="tail=True"):
        engine(LevelConfig(model=draft, name="draft", tail=True), LevelConfig(model=target, name="target"))
