"""`generate(..., custom_generate=engine.as_custom_generate())` against transformers' own `generate`, in float64."""

from __future__ import annotations

import inspect
import itertools
import threading

import numpy as np
import pytest
import torch
import transformers as hf
from transformers.generation import logits_process as lp
from transformers.generation import stopping_criteria as sc

from cascade import CascadeConfig, ConfigError, DecodeError, Engine, LevelConfig, PromptError
from cascade.noise import Noise
from cascade.sampling import Sampler
from cascade.testing import FixedCosts, ScriptedDrafter, ToyModel
from tests.tiny import VOCAB, padded_head, tiny, tokenizer

NEW = 16
PAD = 0
PROMPTS = [[7, 8, 7, 8, 7, 20, 31], [9, 4, 9, 5]]
BYTES = 3 + 256


def cost(level: str, tokens: int) -> float:
    """A draft that is cheap enough to stay open: tiny models would switch every level off."""
    return 0.05 if level == "draft" else 1.0


def noisy(family: str, dtype: torch.dtype = torch.float64, **changes):
    """A draft that agrees with the model of this family often, and not always."""
    draft = tiny(family, dtype, **changes)
    with torch.no_grad():
        for i, parameter in enumerate(draft.parameters()):
            noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(i))
            parameter.add_(noise.to(dtype) * parameter.std() * 0.02)
    return draft


def cascade_on(model, *below, **options) -> Engine:
    """An engine whose target is this very model, with levels below it."""
    target = LevelConfig(model=model, name="target", tokenizer=options.pop("tokenizer", None))
    return Engine(CascadeConfig([*below, target], **options), costs=FixedCosts(cost), check=True)


def drafting(model, draft, **options) -> Engine:
    return cascade_on(model, LevelConfig(model=draft, name="draft", k=4, controller="fixed"), **options)


@pytest.fixture(scope="module")
def llama():
    model = tiny("llama")
    with drafting(model, noisy("llama")) as engine:
        yield model, engine


@pytest.fixture(scope="module")
def gpt2():
    model = tiny("gpt2")
    with drafting(model, noisy("gpt2")) as engine:
        yield model, engine


@pytest.fixture(scope="module")
def talking():
    """A model with a tokenizer of bytes."""
    model, texts = tiny("llama", vocab_size=BYTES), tokenizer(BYTES)
    with drafting(model, noisy("llama", vocab_size=BYTES), tokenizer=texts) as engine:
        yield model, texts, engine


def batch(prompts=PROMPTS, right: bool = False):
    """Prompts padded on the left (or the right), and their mask."""
    longest = max(map(len, prompts))
    rows, masks = [], []
    for prompt in prompts:
        gap = longest - len(prompt)
        rows.append(prompt + [PAD] * gap if right else [PAD] * gap + prompt)
        masks.append([1] * len(prompt) + [0] * gap if right else [0] * gap + [1] * len(prompt))
    return {"input_ids": torch.tensor(rows), "attention_mask": torch.tensor(masks)}


def one(prompt=PROMPTS[0]):
    return batch([prompt])


def defaults(options):
    return {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": PAD, **options}


def both(pair, inputs, **options):
    """(what generate returns by itself, what it returns by an engine). Stateful options come as functions."""
    model, engine = pair

    def fresh():
        return {name: value() if name in ("logits_processor", "stopping_criteria") else value for name, value in given}

    given = list(defaults(options).items())
    want = model.generate(**inputs, **fresh())
    return want, model.generate(**inputs, **fresh(), custom_generate=engine.as_custom_generate())


def text_of(pair, prompt=PROMPTS[0], **options) -> list[int]:
    """The model's own greedy tokens."""
    ids = pair[0].generate(**one(prompt), **defaults(options))
    return ids[0, len(prompt) :].tolist()


# -- greedy ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("prompts", [PROMPTS[:1], PROMPTS], ids=["one", "padded"])
def test_greedy_ids_are_those_of_generate(family: str, prompts, request) -> None:
    pair = request.getfixturevalue(family)
    want, got = both(pair, batch(prompts))
    assert got.dtype == want.dtype
    assert got.tolist() == want.tolist()


def test_the_engine_speculates_and_says_so(llama) -> None:
    model, engine = llama
    custom = engine.as_custom_generate()
    assert custom.results == []
    ids = model.generate(**batch(), **defaults({}), custom_generate=custom)
    assert [result.tokens for result in custom.results] == ids[:, 7:].tolist()
    assert all(result.stats.tokens_per_forward > 1.2 for result in custom.results)
    plain = engine.as_custom_generate(speculate=False)
    assert model.generate(**batch(), **defaults({}), custom_generate=plain).tolist() == ids.tolist()
    assert all(result.stats.tokens_per_forward == 1 for result in plain.results)
    alone = engine.as_custom_generate(levels=["target"])
    model.generate(**batch(), **defaults({}), custom_generate=alone)
    assert all(result.stats.levels[0].drafted == 0 for result in alone.results)


def test_a_mask_is_not_needed_where_nothing_is_padded(gpt2) -> None:
    want, got = both(gpt2, {"input_ids": torch.tensor([PROMPTS[0]])})
    assert got.tolist() == want.tolist()
    want, got = both(gpt2, {"inputs": torch.tensor([PROMPTS[0], PROMPTS[0][::-1]])})
    assert got.tolist() == want.tolist()


def test_padding_on_the_right_is_left_out(llama) -> None:
    """Blaizzy/mlx-vlm#1155: padding is never attended to, on whichever side it is."""
    model, engine = llama
    out = model.generate(**batch(right=True), **defaults({}), custom_generate=engine.as_custom_generate())
    assert out[:, :7].tolist() == batch(right=True)["input_ids"].tolist()
    assert out[1, 7:].tolist() == text_of(llama, PROMPTS[1])


def test_threads_can_share_the_object(llama, monkeypatch) -> None:
    model, engine = llama
    custom, both_decoded = engine.as_custom_generate(), threading.Barrier(2, timeout=20)
    output, got = type(custom)._output, {}

    def meet(self, *args):
        both_decoded.wait()
        return output(self, *args)

    monkeypatch.setattr(type(custom), "_output", meet)

    def work(i: int) -> None:
        got[i] = model.generate(**one(PROMPTS[i]), **defaults({}), custom_generate=custom)[0].tolist()

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    monkeypatch.undo()
    assert got == {i: PROMPTS[i] + text_of(llama, PROMPTS[i]) for i in range(2)}


def test_samples_of_a_prompt_are_rows(llama) -> None:
    model, engine = llama
    torch.manual_seed(0)
    options = defaults({"do_sample": True, "num_return_sequences": 3, "temperature": 1.5})
    out = model.generate(**batch(), **options, custom_generate=engine.as_custom_generate())
    assert out[:, :7].tolist() == batch()["input_ids"].repeat_interleave(3, 0).tolist()
    assert len({tuple(row) for row in out[:, 7:].tolist()}) == 6


# -- ends ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("places", [[3], [1, 6]])
def test_end_ids_are_the_callers(places: list[int], llama) -> None:
    text = text_of(llama)
    ends = [text[place] for place in places]
    want, got = both(llama, batch(), eos_token_id=ends if len(ends) > 1 else ends[0])
    assert got.tolist() == want.tolist()
    assert got[0].tolist()[7:] == text[: places[0] + 1] + [PAD] * (got.shape[1] - 7 - places[0] - 1)


def test_without_end_ids_the_models_own_do_not_end_a_text(llama) -> None:
    model, engine = llama
    ends = engine.model.end_ids
    config = hf.GenerationConfig(max_new_tokens=NEW, do_sample=False, pad_token_id=PAD)
    own, model.generation_config = model.generation_config, hf.GenerationConfig()
    try:
        engine.model.end_ids = (text_of(llama)[2],)
        engine.target.end_ids = engine.model.end_ids
        out = model.generate(**one(), generation_config=config, custom_generate=engine.as_custom_generate())
    finally:
        model.generation_config, engine.model.end_ids, engine.target.end_ids = own, ends, ends
    assert out[0, 7:].tolist() == text_of(llama)


def test_a_padded_batch_ends_row_by_row(llama) -> None:
    """An end in the shorter row, early; generate fills up with padding."""
    end = text_of(llama, PROMPTS[1])[1]
    want, got = both(llama, batch(), eos_token_id=end, pad_token_id=5)
    assert got.tolist() == want.tolist()


def test_max_length_counts_the_padding(llama) -> None:
    want, got = both(llama, batch(), max_new_tokens=None, max_length=12)
    assert got.shape == (2, 12)
    assert got.tolist() == want.tolist()


def test_a_length_criterion_of_the_caller_comes_before_the_config(llama) -> None:
    want, got = both(llama, batch(), stopping_criteria=lambda: [sc.MaxLengthCriteria(10)])
    assert got.shape == (2, 10)
    assert got.tolist() == want.tolist()


def test_the_engines_context_ends_a_text(llama) -> None:
    model, _ = llama
    with cascade_on(model, max_length=12) as engine:
        out = model.generate(**batch(), **defaults({}), custom_generate=engine.as_custom_generate())
    assert out[0].tolist()[7:] == [*text_of(llama)[:5], PAD, PAD, PAD]
    assert out[1].tolist()[7:] == text_of(llama, PROMPTS[1])[:8]


# -- processors ------------------------------------------------------------------------------------


def third(input_ids, scores):
    """A caller's own function: every third token is 50."""
    if input_ids.shape[1] % 3:
        return scores
    out = torch.full_like(scores, -1e9)
    out[:, 50] = 0
    return out


class Counting(lp.LogitsProcessor):
    """Keeps state: at its every third call the likeliest token is impossible."""

    def __init__(self) -> None:
        self.calls = []

    def __call__(self, input_ids, scores):
        self.calls.append(input_ids.shape[1])
        if len(self.calls) % 3:
            return scores
        return scores.scatter(1, scores.argmax(1, keepdim=True), -torch.inf)


SYNTHID = {"keys": [654, 400, 836, 123], "ngram_len": 3}
# name -> options of generate, given the model's own text; each of them changes it, but for the last few.
PROCESSORS = {
    "repetition_penalty": lambda text: {"repetition_penalty": 1.8},
    "encoder_repetition_penalty": lambda text: {"encoder_repetition_penalty": 3.0},
    "no_repeat_ngram_size": lambda text: {"no_repeat_ngram_size": 1},
    "encoder_no_repeat_ngram_size": lambda text: {
        "encoder_no_repeat_ngram_size": 2,
        "sequence_bias": [[[20, 31], 60.0], [[20], 30.0]],
    },
    "bad_words_ids": lambda text: {"bad_words_ids": [[text[0]], text[4:6]]},
    "sequence_bias": lambda text: {"sequence_bias": [[[text[1]], -30.0], [[text[2], 77], 60.0]]},
    "min_length": lambda text: {"min_length": 7 + 8, "eos_token_id": text[2]},
    "min_new_tokens": lambda text: {"min_new_tokens": 8, "eos_token_id": [text[2], text[5]]},
    "forced_eos_token_id": lambda text: {"forced_eos_token_id": 44},
    "suppress_tokens": lambda text: {"suppress_tokens": [text[0], text[3]]},
    "begin_suppress_tokens": lambda text: {"begin_suppress_tokens": [text[0]]},
    "exponential_decay": lambda text: {"exponential_decay_length_penalty": (2, 3.0), "eos_token_id": 30},
    "prefix_allowed_tokens_fn": lambda text: {
        "prefix_allowed_tokens_fn": lambda row, ids: [30 + row, 40 + row, 50 + len(ids)]
    },
    "watermarking_config": lambda text: {"watermarking_config": hf.WatermarkingConfig(bias=20.0)},
    "selfhash": lambda text: {"watermarking_config": hf.WatermarkingConfig(bias=20.0, seeding_scheme="selfhash")},
    "synthid": lambda text: {"watermarking_config": hf.SynthIDTextWatermarkingConfig(**SYNTHID)},
    "guidance_scale": lambda text: {"guidance_scale": 3.0},
    "typical": lambda text: {"logits_processor": lambda: [lp.TypicalLogitsWarper(0.05)]},
    "function": lambda text: {"logits_processor": lambda: [third]},
    "state": lambda text: {"logits_processor": lambda: [Counting()]},
    "several": lambda text: {
        **{"repetition_penalty": 1.4, "min_new_tokens": 9, "eos_token_id": text[2], "bad_words_ids": [[text[1]]]},
        "logits_processor": lambda: [Counting(), third],
    },
    "remove_invalid_values": lambda text: {"remove_invalid_values": True},
    "renormalize_logits": lambda text: {"renormalize_logits": True},
    "warpers": lambda text: {
        "logits_processor": lambda: [lp.TemperatureLogitsWarper(0.5), lp.TopKLogitsWarper(4), lp.TopPLogitsWarper(0.7)]
    },
}
HARMLESS = {"remove_invalid_values", "renormalize_logits", "warpers"}


@pytest.mark.parametrize("inputs", [one(), batch()], ids=["one", "padded"])
@pytest.mark.parametrize("name", PROCESSORS)
def test_processors_hold_as_in_generate(name: str, inputs, llama) -> None:
    text = text_of(llama)
    want, got = both(llama, inputs, **PROCESSORS[name](text))
    assert got.tolist() == want.tolist()
    assert (want[0, 7:].tolist() == text) == (name in HARMLESS)


@pytest.mark.parametrize("name", ["repetition_penalty", "prefix_allowed_tokens_fn", "encoder_repetition_penalty"])
def test_processors_of_a_batch_with_several_samples_each(name: str, llama) -> None:
    """What is kept per prompt belongs to all of its samples. Nearly at temperature 0, nothing is left to chance."""
    model, engine = llama
    options = defaults(PROCESSORS[name](text_of(llama)))
    cold = {**options, "do_sample": True, "temperature": 1e-7, "num_return_sequences": 2}
    if name == "prefix_allowed_tokens_fn":
        want = model.generate(**batch(), **cold)  # whether its rows are prompts or samples depends on the version
    else:
        want = model.generate(**batch(), **options).repeat_interleave(2, 0)
    out = model.generate(**batch(), **cold, custom_generate=engine.as_custom_generate())
    assert out.tolist() == want.tolist()
    assert out[0].tolist() != out[2].tolist()


def test_a_forced_first_token(llama) -> None:
    want, got = both(llama, batch([[9], [11]]), forced_bos_token_id=60)
    assert got.tolist() == want.tolist()
    assert got[:, 1].tolist() == [60, 60]


@pytest.mark.parametrize("rows", [1, 2])
def test_guidance_with_a_negative_prompt(rows: int, llama) -> None:
    negative = batch([[100, 101, 102], [90, 91]][:rows])
    names = {"negative_prompt_ids": "input_ids", "negative_prompt_attention_mask": "attention_mask"}
    options = {name: negative[key] for name, key in names.items()}
    want, got = both(llama, batch(PROMPTS[:rows]), guidance_scale=2.5, **options)
    assert got.tolist() == want.tolist()
    assert got[0, 7:].tolist() != text_of(llama)


def test_a_processor_of_the_callers_is_its_own_object_and_is_called_once_per_token(llama) -> None:
    model, engine = llama
    processor = Counting()
    custom = engine.as_custom_generate()
    model.generate(**one(), **defaults({"logits_processor": [processor]}), custom_generate=custom)
    assert processor.calls == list(range(7, 7 + NEW))
    assert custom.results[0].stats.levels[0].accepted > 0


def test_each_row_has_a_copy_of_a_processor_that_may_keep_state(llama) -> None:
    """Models and tokenizers in it are not copied."""
    model, engine = llama

    class Holding(Counting):
        def __init__(self) -> None:
            super().__init__()
            self.critic = model

        def __deepcopy__(self, memo):
            assert memo[id(model)] is model
            copies.append(Counting())
            return copies[-1]

    copies = []
    processor = Holding()
    options = defaults({"logits_processor": [processor]})
    model.generate(**batch(), **options, custom_generate=engine.as_custom_generate())
    assert processor.calls == []
    assert [each.calls for each in copies] == [list(range(7, 7 + NEW))] * 2


def test_a_processor_made_for_requests_is_asked_for_one_per_row_and_sees_no_padding(llama) -> None:
    model, engine = llama

    class Native(Counting):
        def for_request(self):
            made.append(Counting())
            return made[-1]

    made = []
    options = defaults({"logits_processor": [Native()]})
    model.generate(**batch(), **options, custom_generate=engine.as_custom_generate())
    assert [each.calls[0] for each in made] == [7, 4]


def test_scores_wider_than_the_vocabulary_of_the_tokenizer() -> None:
    """The head has 45 rows that no token belongs to: processors see its width, and nothing there is chosen."""
    model = padded_head()
    model.lm_head.weight.data[VOCAB:] = 0
    texts = tokenizer(VOCAB)
    with cascade_on(model, LevelConfig(model=noisy("llama"), name="draft", k=3), tokenizer=texts) as engine:
        for options in (
            {"watermarking_config": hf.WatermarkingConfig(bias=3.0)},
            {"suppress_tokens": [VOCAB + 40, 8], "sequence_bias": [[[VOCAB + 3], -5.0], [[8, 9], 40.0]]},
        ):
            want, got = both((model, engine), batch(), **options)
            assert got.tolist() == want.tolist()
        want, got = both((model, engine), one(), return_dict_in_generate=True, output_scores=True)
        assert got.scores[0].shape == want.scores[0].shape == (1, VOCAB + 45)
        assert (got.scores[0][:, VOCAB:] == -torch.inf).all()


# -- sampling --------------------------------------------------------------------------------------


class CapturedError(Exception):
    pass


def captured(pair, inputs, monkeypatch, **options):
    """The parameters of the requests that a call becomes."""
    model, engine = pair

    def spy(prompts, params):
        found.extend(zip(prompts, params, strict=True))
        raise CapturedError

    found: list = []
    monkeypatch.setattr(engine, "generate", spy)
    with pytest.raises(CapturedError):
        model.generate(**inputs, **defaults(options), custom_generate=engine.as_custom_generate())
    monkeypatch.undo()
    return found


SAMPLED = {
    "plain": ({"top_k": 0}, {}),
    "temperature": ({"top_k": 0, "temperature": 0.6}, {"temperature": 0.6}),
    "top_k": ({"top_k": 7}, {"top_k": 7}),
    "top_p": ({"top_k": 0, "top_p": 0.7}, {"top_p": 0.7}),
    "min_p": ({"top_k": 0, "min_p": 0.05}, {"min_p": 0.05}),
    "all": (
        {"temperature": 2.5, "top_k": 40, "top_p": 0.9, "min_p": 0.02, "repetition_penalty": 1.3},
        {"temperature": 2.5, "top_k": 40, "top_p": 0.9, "min_p": 0.02},
    ),
    "typical_p": ({"temperature": 2.0, "typical_p": 0.6}, None),
    "epsilon_cutoff": ({"temperature": 2.0, "epsilon_cutoff": 0.02}, None),
    "eta_cutoff": ({"temperature": 2.0, "eta_cutoff": 0.05}, None),
    "top_h": ({"temperature": 2.0, "top_h": 0.5}, {"top_k": 50}),
    "top_k_1": ({"top_k": 1}, None),
    "renormalize": ({"temperature": 2.0, "renormalize_logits": True}, None),
    "watermark": ({"top_p": 0.9, "watermarking_config": hf.WatermarkingConfig(bias=2.0)}, None),
    "synthid": ({"top_k": 30, "watermarking_config": hf.SynthIDTextWatermarkingConfig(**SYNTHID)}, None),
    "own top-k first": ({"logits_processor": [lp.TopKLogitsWarper(5)], "top_k": 0}, {"top_k": 5}),
    "own filter value": ({"logits_processor": [lp.TopKLogitsWarper(5, -9.0)], "top_k": 0}, None),
    "out of order": (
        {"logits_processor": [lp.TopPLogitsWarper(0.8)], "temperature": 3.0, "top_k": 0},
        {"temperature": 3.0},
    ),
}


@pytest.mark.parametrize("inputs", [one(), batch()], ids=["one", "padded"])
@pytest.mark.parametrize("name", SAMPLED)
def test_the_distribution_of_a_token_is_that_of_generate(name: str, inputs, llama, monkeypatch) -> None:
    options, fields = SAMPLED[name]
    options = {"do_sample": True, "max_new_tokens": 1, **options}
    model, _ = llama
    plain = model.generate(**inputs, **defaults(options), return_dict_in_generate=True, output_scores=True)
    for row, (prompt, params) in enumerate(captured(llama, inputs, monkeypatch, **options)):
        logits = model(torch.tensor([prompt])).logits[0, -1]
        found = Sampler(params, Noise(0), (), len(prompt)).probabilities(logits, np.array(prompt))
        want = plain.scores[0][row].softmax(-1)
        assert ((found > 0) == (want > 0)).all()
        torch.testing.assert_close(found, want.double(), rtol=1e-5, atol=1e-7)
        usual = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | (fields or {})
        assert {field: getattr(params, field) for field in usual} == usual
        assert bool(params.logits_processors) == (fields is None or name in ("all", "out of order", "top_h"))


def test_torchs_seed_repeats_a_call(llama) -> None:
    model, engine = llama
    options = defaults({"do_sample": True, "temperature": 1.5})

    def sample(seed: int, **more):
        hf.set_seed(seed)
        return model.generate(**batch(), **options, **more, custom_generate=engine.as_custom_generate()).tolist()

    first = sample(3)
    assert sample(3) == first
    assert sample(4) != first
    torch.manual_seed(3)
    plain = engine.as_custom_generate(speculate=False)
    assert model.generate(**batch(), **options, custom_generate=plain).tolist() == first
    # Filters that stay processors choose the same tokens.
    assert sample(3, return_dict_in_generate=False, renormalize_logits=True) == first


def test_greedy_calls_draw_nothing(llama) -> None:
    model, engine = llama
    before = torch.get_rng_state()
    model.generate(**batch(), **defaults({}), custom_generate=engine.as_custom_generate())
    assert torch.equal(torch.get_rng_state(), before)


# -- what generate returns -------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_scores_and_logits(family: str, request) -> None:
    pair = request.getfixturevalue(family)
    text = text_of(pair, PROMPTS[1])
    end = next(token for token in text[3:] if token not in text[:3] and token not in text_of(pair))
    options = {"repetition_penalty": 1.01, "eos_token_id": end, "return_dict_in_generate": True}
    want, got = both(pair, batch(), **options, output_scores=True, output_logits=True)
    assert type(got) is type(want) is hf.generation.GenerateDecoderOnlyOutput
    assert got.sequences.tolist() == want.sequences.tolist()
    over = int((got.sequences[1, 7:] != PAD).sum())
    assert 0 < over < NEW == len(got.scores) == len(got.logits)
    for name in ("scores", "logits"):
        for step, (mine, own) in enumerate(zip(got[name], want[name], strict=True)):
            assert mine.dtype == own.dtype == torch.float32
            assert mine.shape == own.shape == (2, VOCAB)
            rows = 2 if step < over else 1
            torch.testing.assert_close(mine[:rows], own[:rows], rtol=0, atol=1e-6)
    assert any((mine != raw).any() for mine, raw in zip(got.scores, got.logits, strict=True))
    chances = pair[0].compute_transition_scores(got.sequences, got.scores, normalize_logits=True)
    own = pair[0].compute_transition_scores(want.sequences, want.scores, normalize_logits=True)
    torch.testing.assert_close(chances[0], own[0])
    torch.testing.assert_close(chances[1, :over], own[1, :over])
    assert (chances[1, over:] == 0).all()
    got.scores[0].add_(1)  # an ordinary tensor, not one of inference mode


def test_an_output_holds_what_was_asked_for(llama) -> None:
    want, got = both(llama, one(), return_dict_in_generate=True)
    assert got.sequences.tolist() == want.sequences.tolist()
    assert (got.scores, got.logits, got.attentions, got.hidden_states) == (None, None, None, None)
    assert list(got.keys()) == ["sequences"]
    _, got = both(llama, one(), output_scores=True)
    assert isinstance(got, torch.Tensor)


def test_logits_are_those_before_a_processor_that_writes_into_its_scores() -> None:
    model = tiny("llama", torch.float32)

    def writing(input_ids, scores):
        return scores.fill_(1.0)

    options = defaults({"logits_processor": [writing], "return_dict_in_generate": True, "output_logits": True})
    with drafting(model, noisy("llama", torch.float32)) as engine:
        out = model.generate(**one(), **options, custom_generate=engine.as_custom_generate())
    assert out.sequences[0, 7:].tolist() == [0] * NEW
    torch.testing.assert_close(out.logits[0], model(**one()).logits[:, -1])


def test_scores_of_sampled_text(llama) -> None:
    """They are those after all filters, and say how likely what was drawn is."""
    model, engine = llama
    options = {"do_sample": True, "top_k": 5, "temperature": 0.7, "output_scores": True, "output_logits": True}
    options = defaults(options | {"return_dict_in_generate": True})
    torch.manual_seed(1)
    out = model.generate(**batch(), **options, custom_generate=engine.as_custom_generate())
    for step, (scores, logits) in enumerate(zip(out.scores, out.logits, strict=True)):
        assert ((scores > -torch.inf).sum(1) == 5).all()
        assert torch.equal(scores, lp.TopKLogitsWarper(5)(None, logits / 0.7))
        assert (scores.gather(1, out.sequences[:, 7 + step, None]) > -torch.inf).all()


# -- stopping criteria -----------------------------------------------------------------------------


class StopAt(sc.StoppingCriteria):
    """Counts its calls, and stops at the n-th."""

    def __init__(self, n: int) -> None:
        self.n, self.lengths, self.scores = n, [], []

    def __call__(self, input_ids, scores, **kwargs):
        self.lengths.append(input_ids.shape[1])
        self.scores.append(scores)
        return torch.full((len(input_ids),), len(self.lengths) >= self.n)


@pytest.mark.parametrize("n", range(1, 9))
def test_a_criterion_is_asked_once_per_token(n: int, llama) -> None:
    model, engine = llama
    criterion = StopAt(n)
    options = defaults({"stopping_criteria": [criterion]})
    out = model.generate(**one(), **options, custom_generate=engine.as_custom_generate())
    assert out[0, 7:].tolist() == text_of(llama)[:n]
    assert criterion.lengths == list(range(8, 8 + n))
    assert criterion.scores == [None] * n


def test_a_criterion_judges_each_row_with_its_padding(llama) -> None:
    """As in generate, where a batch's criterion gives a verdict per row."""
    stops = [text_of(llama)[2], text_of(llama, PROMPTS[1])[5]]

    class Seen(sc.StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            assert input_ids.shape[1] > 7
            return torch.isin(input_ids[:, -1], torch.tensor(stops))

    want, got = both(llama, batch(), eos_token_id=209, stopping_criteria=lambda: [Seen()])
    assert got.tolist() == want.tolist()


def test_a_criterion_gets_scores_where_generate_gives_them(llama) -> None:
    criterion = StopAt(5)
    options = {"return_dict_in_generate": True, "output_scores": True, "repetition_penalty": 1.5}
    model, engine = llama
    options = defaults(options | {"stopping_criteria": [criterion]})
    out = model.generate(**one(), **options, custom_generate=engine.as_custom_generate())
    assert [len(scores) for scores in criterion.scores] == [1, 2, 3, 4, 5]
    assert all(torch.equal(a, b) for a, b in zip(criterion.scores[-1], out.scores, strict=True))


def test_max_time(llama) -> None:
    want, got = both(llama, batch(), max_time=1e-9)
    assert got.shape == (2, 8)
    assert got.tolist() == want.tolist()


def test_stop_strings(talking) -> None:
    """transformers wants its tokenizer for them, which it does not hand over; both other ways lead there."""
    model, texts, engine = talking
    inputs = {"input_ids": torch.tensor([[70, 75, 80]])}
    text = text_of(talking, [70, 75, 80])
    stop = [texts.decode(next(pair for pair in itertools.pairwise(text) if max(pair) < 90))]  # two letters
    want = model.generate(**inputs, **defaults({}), stop_strings=stop, tokenizer=texts)
    criteria = [hf.StopStringCriteria(tokenizer=texts, stop_strings=stop)]
    got = model.generate(
        **inputs, **defaults({}), stopping_criteria=criteria, custom_generate=engine.as_custom_generate()
    )
    assert got.tolist() == want.tolist()
    custom = engine.as_custom_generate(stop=stop)
    assert model.generate(**inputs, **defaults({}), custom_generate=custom).tolist() == want.tolist()
    assert custom.results[0].finish_reason == "stop"
    assert want.shape[1] < 3 + NEW


# -- pipelines and streamers -----------------------------------------------------------------------


def test_pipelines(talking) -> None:
    model, texts, engine = talking
    pipe = hf.pipeline("text-generation", model=model, tokenizer=texts)
    prompts = ["The sea is", "A"]
    options = {"max_new_tokens": NEW, "do_sample": False}
    custom = engine.as_custom_generate()
    assert pipe(prompts, **options, custom_generate=custom) == pipe(prompts, **options)
    assert len(custom.results) == 1
    together = pipe(prompts, **options, batch_size=2, custom_generate=custom)
    assert together == pipe(prompts, **options)
    assert len(custom.results) == 2
    chat = [{"role": "user", "content": "Hi"}]
    assert pipe(chat, **options, custom_generate=custom) == pipe(chat, **options)


class Recorder:
    def __init__(self) -> None:
        self.puts, self.ends = [], 0

    def put(self, ids) -> None:
        assert not self.ends
        self.puts.append(ids)

    def end(self) -> None:
        self.ends += 1


def test_a_streamer_gets_the_prompt_and_then_tokens_by_the_round(llama) -> None:
    model, engine = llama
    streamer = Recorder()
    custom = engine.as_custom_generate(streamer=streamer)
    out = model.generate(**one(), **defaults({}), custom_generate=custom)
    prompt, *rounds = streamer.puts
    assert prompt.tolist() == [PROMPTS[0]]
    assert torch.cat(rounds).tolist() == out[0, 7:].tolist() == text_of(llama)
    assert len(rounds) == custom.results[0].stats.target_forwards < NEW
    assert streamer.ends == 1


def test_transformers_streamers(talking, capsys) -> None:
    model, texts, engine = talking
    inputs = {"input_ids": torch.tensor([[70, 75, 80]])}
    model.generate(**inputs, **defaults({}), streamer=hf.TextStreamer(texts))
    want = capsys.readouterr().out
    custom = engine.as_custom_generate(streamer=hf.TextStreamer(texts))
    model.generate(**inputs, **defaults({}), custom_generate=custom)
    assert capsys.readouterr().out == want != ""

    streamer = hf.TextIteratorStreamer(texts, skip_prompt=True, timeout=60)
    options = defaults({"custom_generate": engine.as_custom_generate(streamer=streamer)})
    thread = threading.Thread(target=model.generate, kwargs={**inputs, **options})
    thread.start()
    assert "".join(streamer) == texts.decode(text_of(talking, [70, 75, 80]))
    thread.join()


def test_a_streamer_ends_however_the_call_ends(llama) -> None:
    model, engine = llama

    def run(streamer, **options):
        model.generate(**one(), **defaults(options), custom_generate=engine.as_custom_generate(streamer=streamer))

    failing = Recorder()
    with pytest.raises(DecodeError):
        run(failing, logits_processor=[lambda ids, scores: scores[:, 1:]])
    refused = Recorder()
    with pytest.raises(ConfigError):
        run(refused, num_beams=2)
    assert (len(failing.puts), failing.ends) == (1, 1)
    assert (refused.puts, refused.ends) == ([], 1)

    class Full(Recorder):
        def put(self, ids) -> None:
            super().put(ids)
            if len(self.puts) == 3:
                raise BufferError("full")

    full = Full()
    with pytest.raises(BufferError, match="full"):
        run(full)
    assert full.ends == 1
    assert not engine.scheduler.live


# -- other models ----------------------------------------------------------------------------------


def test_a_model_in_training_is_evaluated_and_given_back_as_it_was() -> None:
    model = tiny("gpt2")
    assert model.config.resid_pdrop > 0
    want = model.generate(**batch(), **defaults({}))
    model.train()
    with drafting(model, noisy("gpt2")) as engine:
        model.train()  # somebody's training step in between
        got = model.generate(**batch(), **defaults({}), custom_generate=engine.as_custom_generate())
    assert got.tolist() == want.tolist()
    assert model.training
    assert all(part.training for part in model.modules())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_draft_in_another_dtype(dtype: torch.dtype, llama) -> None:
    model, _ = llama
    with drafting(model, noisy("llama", dtype)) as engine:
        want, got = both((model, engine), batch(), repetition_penalty=1.3)
        assert got.tolist() == want.tolist()


def test_a_target_in_bfloat16() -> None:
    """Its scores are float32, as generate's are; its text is that of the engine without speculation."""
    model = tiny("llama", torch.bfloat16)
    with drafting(model, noisy("llama", torch.bfloat16)) as engine:
        options = defaults({"return_dict_in_generate": True, "output_scores": True, "repetition_penalty": 1.2})
        plain = model.generate(**batch(), **options, custom_generate=engine.as_custom_generate(speculate=False))
        out = model.generate(**batch(), **options, custom_generate=engine.as_custom_generate())
    assert out.scores[0].dtype == torch.float32
    assert out.sequences.tolist() == plain.sequences.tolist()


def test_draft_models_apply_cheap_processors(llama) -> None:
    """Padded rows too: a draft that ignores the penalty would be wrong at nearly every token."""
    model, _ = llama
    with drafting(model, tiny("llama")) as engine:
        custom = engine.as_custom_generate()
        model.generate(**batch(), **defaults({"repetition_penalty": 3.0}), custom_generate=custom)
    assert all(result.stats.levels[0].accept_rate == 1 for result in custom.results)


def test_a_draft_with_a_larger_head_applies_processors_too(llama) -> None:
    """One that sizes itself by the first scores must not take the target's size for the draft's."""
    model, _ = llama
    draft = tiny("llama")
    draft.resize_token_embeddings(VOCAB + 45, mean_resizing=False)
    draft.lm_head.weight.data[VOCAB:] = 0
    text = text_of(llama)
    with drafting(model, draft, tokenizer=tokenizer(VOCAB)) as engine:
        custom = engine.as_custom_generate()
        bias = {"sequence_bias": [[[text[0]], -30.0], [[text[1], 77], 60.0]]}
        model.generate(**batch(), **defaults(bias), custom_generate=custom)
    assert all(result.stats.levels[0].accept_rate == 1 for result in custom.results)


def test_an_n_gram_level_and_a_scripted_one(llama) -> None:
    model, _ = llama
    text = PROMPTS[0] + text_of(llama)
    for below in ("ngram", LevelConfig(drafter=ScriptedDrafter([text], "mixed", VOCAB), k=3, controller="fixed")):
        with cascade_on(model, below) as engine:
            want, got = both((model, engine), batch())
            assert got.tolist() == want.tolist()


# -- refusals --------------------------------------------------------------------------------------


def filled(model):
    cache = hf.DynamicCache(config=model.config)
    model(torch.tensor([[5, 6, 7]]), **{model_cache_key(model): cache})
    return cache


def model_cache_key(model) -> str:
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


class NeedsMore:
    def __call__(self, input_ids, scores, attention):
        return scores


class Uncopyable(Counting):
    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()


HOLES = {"input_ids": torch.tensor([[5, 6, 7, 8]]), "attention_mask": torch.tensor([[1, 0, 1, 1]])}
EMPTY = {"input_ids": torch.tensor([[5, 6], [7, 8]]), "attention_mask": torch.tensor([[1, 1], [0, 0]])}
REFUSED = {
    "beams": ({"num_beams": 3}, "num_beams=3 asks for beam search"),
    "contrastive": ({"penalty_alpha": 0.6, "top_k": 4}, "penalty_alpha=0.6 asks for contrastive search"),
    "dola": ({"dola_layers": "low"}, "dola_layers='low' asks for DoLa"),
    "lookup": ({"prompt_lookup_num_tokens": 3}, "prompt_lookup_num_tokens=3 asks for prompt lookup; an engine drafts"),
    "attentions": ({"output_attentions": True, "return_dict_in_generate": True}, "does not keep attentions"),
    "hidden": ({"output_hidden_states": True, "return_dict_in_generate": True}, "does not keep hidden states"),
    "processor": ({"logits_processor": [5]}, r"logits processor 5 cannot be called as f\(input_ids, scores\)"),
    "processor class": ({"logits_processor": [Counting]}, r"logits processor Counting is a class: give an object of"),
    "processor arguments": ({"logits_processor": [NeedsMore()]}, "logits processor NeedsMore cannot be called"),
    "criterion": ({"stopping_criteria": ["stop"]}, "stopping criterion 'stop' cannot be called"),
    "criterion class": ({"stopping_criteria": [StopAt]}, "stopping criterion StopAt is a class"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_an_engine_does_not_do_is_refused_by_name(name: str, llama) -> None:
    options, match = REFUSED[name]
    refused(llama, one(), options, ConfigError, match)


def refused(pair, inputs, options, kind, match, **custom) -> None:
    """Refused in one line, before any forward."""
    model, engine = pair
    before = engine.target.forwards
    with pytest.raises(kind, match=match) as error:
        model.generate(**inputs, **defaults(options), custom_generate=engine.as_custom_generate(**custom))
    assert "\n" not in str(error.value)
    assert engine.target.forwards == before


def test_inputs_that_are_not_ids_are_refused(llama) -> None:
    model, _ = llama
    embedded = {"inputs_embeds": model.get_input_embeddings()(torch.tensor([PROMPTS[0]]))}
    refused(llama, embedded, {}, ConfigError, "the call brings inputs_embeds")
    positions = one() | {"position_ids": torch.arange(7)[None] + 2}
    refused(llama, positions, {}, ConfigError, "leave position_ids out")
    refused(llama, HOLES, {}, PromptError, "attention_mask of row 0 has holes")
    refused(llama, EMPTY, {}, PromptError, "row 1 has no tokens")
    bad = {"input_ids": torch.tensor([[5, 6], [7, VOCAB]])}
    refused(llama, bad, {}, PromptError, f"row 1 has token id {VOCAB}, outside the vocabulary of {VOCAB}")
    cache = one() | {model_cache_key(model): filled(model)}
    refused(llama, cache, {}, ConfigError, "(cache|past_key_values) holds 3 tokens already")


def test_a_prompt_beyond_the_context_is_refused(llama) -> None:
    model, _ = llama
    with cascade_on(model, max_length=12) as engine:
        long = batch([[5, 6], list(range(5, 18))])
        refused((model, engine), long, {}, PromptError, "row 1 has 13 tokens, and the context holds 12")


def test_a_cache_that_is_empty_stays_empty(llama) -> None:
    model, engine = llama
    cache = hf.DynamicCache(config=model.config)
    options = defaults({model_cache_key(model): cache})
    out = model.generate(**one(), **options, custom_generate=engine.as_custom_generate())
    assert out[0, 7:].tolist() == text_of(llama)
    assert cache.get_seq_length() == 0


def test_another_model_is_refused(llama) -> None:
    _, engine = llama
    refused((tiny("llama"), engine), one(), {}, ConfigError, r"LevelConfig\(model=model\)")


def test_a_streamer_follows_one_row(llama) -> None:
    refused(llama, batch(), {}, ConfigError, "a streamer follows one row, and this call has 2", streamer=Recorder())


def test_a_processor_that_cannot_be_copied_is_refused_for_a_batch(llama) -> None:
    match = "logits processor Uncopyable cannot be copied for each of 2 rows .*for_request"
    refused(llama, batch(), {"logits_processor": [Uncopyable()]}, ConfigError, match)
    _, got = both(llama, one(), logits_processor=lambda: [Uncopyable()])
    assert got.shape == (1, 7 + NEW)


OPTIONS = {
    "streamer": ({"streamer": print}, "a streamer has methods put and end"),
    "streamer class": ({"streamer": hf.TextStreamer}, "the streamer TextStreamer is a class"),
    "unknown": ({"streamr": None}, "no option 'streamr'. Did you mean 'streamer'"),
    "tokenizer": ({"tokenizer": None}, "no option 'tokenizer'"),
    "stop": ({"stop": ["\n"]}, "stop strings need a tokenizer"),
    "speculate": ({"speculate": "yes"}, "speculate must be True or False"),
    "levels": ({"levels": 5}, "levels must be a list"),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options_are_checked_at_once(name: str, llama) -> None:
    options, match = OPTIONS[name]
    with pytest.raises(ConfigError, match=match):
        llama[1].as_custom_generate(**options)


def test_an_unknown_level_is_refused(llama) -> None:
    refused(llama, one(), {}, ConfigError, "no level is named 'draf'. Did you mean 'draft'", levels=["draf"])


def test_a_target_that_is_no_model_of_transformers_is_refused() -> None:
    with (
        Engine(CascadeConfig([ToyModel()]), costs=FixedCosts(cost)) as engine,
        pytest.raises(ConfigError, match="needs a model of transformers as the target, and this is a ToyModel"),
    ):
        engine.as_custom_generate()


# -- failures --------------------------------------------------------------------------------------


def test_a_row_that_fails_raises_its_error_with_its_cause(llama) -> None:
    model, engine = llama

    def failing(input_ids, scores):
        if input_ids.shape[1] > 9 and input_ids[0, 0] == PAD:
            raise KeyError("no such state")
        return scores

    custom = engine.as_custom_generate()
    with pytest.raises(DecodeError, match=r"^row 1: logits processor failing failed: KeyError") as error:
        model.generate(**batch(), **defaults({"logits_processor": [failing]}), custom_generate=custom)
    assert isinstance(error.value.__cause__, KeyError)
    assert custom.results[0].tokens == text_of(llama)
    assert custom.results[1].finish_reason == "error"


@pytest.mark.parametrize(
    ("criterion", "match"),
    [
        (lambda ids, scores: 1 / 0, "stopping criterion <lambda> failed: ZeroDivisionError"),
        (lambda ids, scores: torch.tensor([True, False]), r"must return one bool per row, not \[2\]"),
        (lambda ids, scores: None, "stopping criterion <lambda> failed"),
    ],
)
def test_a_criterion_that_fails(criterion, match: str, llama) -> None:
    model, engine = llama
    options = defaults({"stopping_criteria": [criterion]})
    with pytest.raises(DecodeError, match=match):
        model.generate(**one(), **options, custom_generate=engine.as_custom_generate())
    assert not engine.scheduler.live
