"""The promise, on tiny random transformers models of four families: the target's own ids, whatever speculates."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from cascade import CascadeConfig, Engine, LevelConfig, SamplingParams
from cascade.testing import FixedCosts, ScriptedDrafter
from tests.tiny import FOUR, VOCAB, tiny

NEW = 24
GREEDY = SamplingParams(max_new_tokens=NEW, ignore_eos=True)
SAMPLED = dataclasses.replace(GREEDY, temperature=0.8, seed=5)
PROMPTS = [[9], [3, 4, 5], [7, 8, 7, 8, 7], [i % 13 + 3 for i in range(17)], [100, 3, 100, 3, 9, 200, 9]]
PARAMS = pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])


def cost(level: str, tokens: int) -> float:
    """A draft that is cheap enough to stay open: toy models would switch every level off."""
    return 0.05 if level == "draft" else 1.0


def engine(*levels: LevelConfig, **options) -> Engine:
    return Engine(CascadeConfig(levels, **options), costs=FixedCosts(cost), check=True)


@pytest.fixture(scope="module")
def models():
    """Per family: the target and a draft that agrees with it often, as its noisy copy does."""
    made = {}

    def of(family: str):
        if family not in made:
            target, draft = tiny(family), tiny(family)
            with torch.no_grad():
                for i, parameter in enumerate(draft.parameters()):
                    torch.manual_seed(i)
                    parameter.add_(torch.randn_like(parameter) * parameter.std() * 0.02)
            made[family] = target, draft
        return made[family]

    return of


def plain(target, prompts, params) -> list[list[int]]:
    """transformers' own greedy ids, or, sampled, this engine without a cascade, one prompt at a time."""
    if params.temperature:
        alone = engine(LevelConfig(model=target))
        return [alone.generate(prompt, params).tokens for prompt in prompts]
    out = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        text = target.generate(ids, max_new_tokens=NEW, do_sample=False, eos_token_id=None, pad_token_id=0)
        out.append(text[0, len(prompt) :].tolist())
    return out


@PARAMS
@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("family", FOUR)
def test_same_ids_for_any_depth_k_and_batch(family: str, depth: int, params: SamplingParams, models) -> None:
    """huggingface/transformers#30042: wrong positions after a rewind; Blaizzy/mlx-vlm#1155: ragged rows."""
    target, draft = models(family)
    want = plain(target, PROMPTS, params)
    for k in (1, 3, 16):
        table = LevelConfig(drafter="ngram", k=k, controller="fixed")
        middle = LevelConfig(model=draft, name="draft", k=k, controller="pid" if k == 3 else "fixed")
        levels = {1: [], 2: [middle], 3: [table, middle]}[depth]
        made = engine(*levels, LevelConfig(model=target, name="target"))
        assert [made.generate(prompt, params).tokens for prompt in PROMPTS] == want
        assert [result.tokens for result in made.generate(PROMPTS, params)] == want


@PARAMS
@pytest.mark.parametrize("kind", ["oracle", "wrong", "mixed", "empty"])
@pytest.mark.parametrize("family", ["gpt2", "gemma3"])
def test_scripted_drafters(family: str, kind: str, params: SamplingParams, models) -> None:
    """huggingface/transformers#48280: windows that fill up while drafts are rejected."""
    target, _ = models(family)
    want = plain(target, PROMPTS, params)
    texts = [prompt + tokens for prompt, tokens in zip(PROMPTS, want, strict=True)]
    drafter = ScriptedDrafter(texts, kind, vocab_size=VOCAB)
    made = engine(LevelConfig(drafter=drafter, k=5, controller="fixed"), LevelConfig(model=target))
    results = made.generate(PROMPTS, params)
    assert [result.tokens for result in results] == want
    if kind == "oracle":
        assert results[0].stats.levels[0].accept_rate == 1.0


@PARAMS
@pytest.mark.parametrize("family", FOUR)
def test_a_copy_of_the_target_is_always_accepted(family: str, params: SamplingParams, models) -> None:
    target, _ = models(family)
    for k in (1, 4, 16):
        draft = LevelConfig(model=tiny(family), name="draft", k=k, controller="fixed")
        stats = engine(draft, LevelConfig(model=target, name="target")).generate(PROMPTS[3], params).stats
        assert stats.levels[0].drafted > 0
        assert stats.levels[0].accept_rate == 1.0


def test_the_draft_cache_keeps_up_after_rejections(models) -> None:
    """lablup/mlxcel#994: a draft cache rewound too far fell behind; acceptance decayed."""
    target, _ = models("llama")

    class Spoiled(ScriptedDrafter):
        """The oracle, spoiling its last token every third time."""

        calls = 0

        def _one(self, ask):
            draft = super()._one(ask)
            self.calls += 1
            if self.calls % 3 == 0 and draft.tokens:
                draft.tokens[-1] = (draft.tokens[-1] + 1) % VOCAB
            return draft

    params = dataclasses.replace(GREEDY, max_new_tokens=120)
    want = engine(LevelConfig(model=target)).generate(PROMPTS[1], params).tokens
    spoiled = Spoiled([PROMPTS[1] + want], vocab_size=VOCAB)
    made = engine(
        LevelConfig(drafter=spoiled, name="spoiled", k=4, controller="fixed"),
        LevelConfig(model=tiny("llama"), name="draft", k=4, controller="fixed"),
        LevelConfig(model=target, name="target"),
    )
    result = made.generate(PROMPTS[1], params)
    assert result.tokens == want
    assert result.stats.levels[1].accept_rate == 1.0
    assert 0 < result.stats.levels[0].accept_rate < 1


@PARAMS
def test_padded_heads_never_emit_the_surplus(params: SamplingParams) -> None:
    """vllm-project/vllm#7252: one tokenizer, heads padded to different sizes."""
    from tests.tiny import padded_head, tokenizer

    words = tokenizer(VOCAB)
    target, draft = padded_head(), tiny("llama")
    want = engine(LevelConfig(model=target, tokenizer=words)).generate(PROMPTS[2], params).tokens
    for top, below in ((target, draft), (draft, target)):
        made = engine(
            LevelConfig(model=below, name="draft", tokenizer=words, k=4, controller="fixed"),
            LevelConfig(model=top, name="target", tokenizer=words),
        )
        result = made.generate(PROMPTS[2], params)
        assert max(result.tokens) < VOCAB
        if top is target:
            assert result.tokens == want


@pytest.mark.parametrize("length", [60, 63, 64])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_the_context_limit_with_real_positions(family: str, length: int) -> None:
    """turboderp-org/exllamav2#274: look-ahead not bounded by the context."""
    name = "n_positions" if family == "gpt2" else "max_position_embeddings"
    target = tiny(family, **{name: 64})
    prompt = [i % 50 + 3 for i in range(length)]
    want = engine(LevelConfig(model=target)).generate(prompt, dataclasses.replace(GREEDY, max_new_tokens=100))
    assert len(want.tokens) == 64 - length
    made = engine(
        LevelConfig(drafter="ngram", k=5, controller="fixed"),
        LevelConfig(model=tiny(family, **{name: 64}), name="draft", k=5, controller="fixed"),
        LevelConfig(model=target, name="target"),
    )
    result = made.generate(prompt, dataclasses.replace(GREEDY, max_new_tokens=100))
    assert (result.tokens, result.finish_reason) == (want.tokens, "length")


def test_a_tree_from_a_drafter_is_verified_on_each_path(models) -> None:
    """lablup/mlxcel#1214: nodes placed by index instead of depth."""
    from cascade import Draft, Drafter

    target, _ = models("llama")
    want = plain(target, PROMPTS[1:2], GREEDY)[0]
    text = PROMPTS[1] + want

    class Tree(Drafter):
        """A wrong branch first, the right one beside it."""

        def propose(self, asks):
            return [self.one(text[len(a.context) : len(a.context) + 3], a.cap) for a in asks]

        def one(self, right, cap):
            if len(right) < 3 or cap < 5:
                return Draft([])
            wrong = [(t + 1) % VOCAB for t in right[:2]]
            return Draft([wrong[0], right[0], wrong[1], right[1], right[2]], parents=[-1, -1, 0, 1, 3])

    for limit in (GREEDY, SAMPLED):
        made = engine(LevelConfig(drafter=Tree(), k=8, controller="fixed"), LevelConfig(model=target))
        result = made.generate(PROMPTS[1], limit)
        if limit is GREEDY:
            assert result.tokens == want
            assert result.stats.levels[0].accepted >= 3 * (NEW // 4 - 1)
        else:
            assert result.tokens == plain(target, PROMPTS[1:2], SAMPLED)[0]


def assert_same_bits(target, prompts: list[list[int]], new: int) -> None:
    """Every emitted token's logits: plain and alone, against cascades of several K, alone and in company."""
    params = SamplingParams(max_new_tokens=new, ignore_eos=True)

    def run(*levels: LevelConfig, batch: bool) -> list[tuple[list[int], list[torch.Tensor]]]:
        made = engine(*levels, LevelConfig(model=target, name="target"))
        if made.model.probed.width is None:
            pytest.skip(f"the probe says {made.model.exactness}")
        kept: dict[int, list[torch.Tensor]] = {}

        def keep(number: int):
            """A processor that sees each emitted token's logits, once, in order."""
            return lambda ids, scores: (kept.setdefault(number, []).append(scores.clone()), scores)[1]

        each = [dataclasses.replace(params, logits_processors=[keep(i)]) for i in range(len(prompts))]
        alone = [made.generate(p, e) for p, e in zip(prompts, each, strict=True)] if not batch else []
        results = made.generate(prompts, each) if batch else alone
        made.close()
        return [(result.tokens, kept[i]) for i, result in enumerate(results)]

    want = run(batch=False)
    texts = [prompt + tokens for prompt, (tokens, _) in zip(prompts, want, strict=True)]
    for k, batch in ((1, True), (4, False), (11, True)):
        mixed = ScriptedDrafter(texts, "mixed", vocab_size=VOCAB, share=0.8, seed=k)
        found = run(LevelConfig(drafter=mixed, name="mixed", k=k, controller="fixed"), batch=batch)
        for (tokens, logits), (ids, bits) in zip(found, want, strict=True):
            assert tokens == ids
            assert len(logits) == len(bits) == new
            assert all(torch.equal(a, b) for a, b in zip(logits, bits, strict=True))


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_bits_are_equal_where_the_probe_says_so(family: str) -> None:
    """bf16, prompts read in pieces, past 1,024 keys."""
    limit = "n_positions" if family == "gpt2" else "max_position_embeddings"
    target = tiny(family, torch.bfloat16, **{limit: 1400})
    assert_same_bits(target, [[i * 7 % 200 + 3 for i in range(1010)], PROMPTS[3], PROMPTS[2]], 30)


@pytest.mark.slow
def test_bits_are_equal_on_the_demos_model() -> None:
    """bf16, past 1,024 and 2,048 keys."""
    from cascade.demo_model import demo_model
    from cascade.errors import LoadError

    try:
        folder = str(demo_model())
    except LoadError as error:
        pytest.skip(str(error))
    prompts = [[(i * i * 31 + 7 * i) % 40000 for i in range(n)] for n in (2040, 1015, 40)]
    assert_same_bits(folder, prompts, 16)
