"""Constrained output: always legal, complete and the target's own, whatever is proposed."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import itertools
import json
import math
import re
import sys
from collections.abc import Callable, Sequence
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from cascade import (
    BypassConfig,
    CascadeConfig,
    ConfigError,
    Draft,
    Drafter,
    Engine,
    LevelConfig,
    SamplingParams,
)
from cascade.grammar import ForcedTokens, Grammar
from cascade.testing import FixedCosts, ManualClock, ScriptedDrafter, ToyModel
from tests.tiny import tiny, tokenizer

needs_library = pytest.mark.skipif(
    importlib.util.find_spec("llguidance") is None, reason="needs llguidance: pip install -e '.[grammar]'"
)
GREEDY = SamplingParams(max_new_tokens=400)
SAMPLED = dataclasses.replace(GREEDY, temperature=0.9, seed=3)
BOTH = pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
SIZE, END = 259, 2
PROMPT = [*b"json: "]

COMPACT = {"whitespace_flexible": False}
PET = {
    "x-guidance": COMPACT,
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "kind": {"enum": ["cat", "dog"]},
        "age": {"type": "integer", "minimum": 0, "maximum": 30},
    },
    "required": ["name", "kind", "age"],
    "additionalProperties": False,
}
NUMBERS = {"type": "array", "items": {"type": "integer", "minimum": -5, "maximum": 99}, "minItems": 2, "maxItems": 4}
ANSWER = {"x-guidance": COMPACT, "anyOf": [{"const": "yes"}, {"const": None}, {"type": "boolean"}]}
SCHEMAS = {"pet": PET, "numbers": NUMBERS, "answer": ANSWER}


def fits(value, schema) -> bool:
    """Whether a value is what these schemas describe: the keywords that they use, spelt out."""
    if "anyOf" in schema:
        return any(fits(value, one) for one in schema["anyOf"])
    if "const" in schema or "enum" in schema:
        return value in schema.get("enum", [schema.get("const")])
    if schema["type"] == "object":
        each = schema["properties"]
        return list(value) == list(each) and all(fits(value[key], each[key]) for key in each)
    if schema["type"] == "array":
        return schema["minItems"] <= len(value) <= schema["maxItems"] and all(
            fits(item, schema["items"]) for item in value
        )
    if schema["type"] == "integer":
        return type(value) is int and schema["minimum"] <= value <= schema["maximum"]
    return type(value) is bool if schema["type"] == "boolean" else len(value) <= schema["maxLength"]


@functools.cache
def words():
    return tokenizer(SIZE)


class Speaker(ToyModel):
    """A toy model whose tokens are bytes."""

    def __init__(self, **options) -> None:
        super().__init__(vocab_size=SIZE, end_ids=(END,), **options)
        self.tokenizer = words()

    def decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(list(ids), skip_special_tokens=True)


def build(*levels, **options) -> Engine:
    """An engine whose levels stay open, however often they are wrong."""
    cheap = FixedCosts(lambda level, tokens: 0.1 if level == "draft" else 1.0)
    config = CascadeConfig(levels, bypass=BypassConfig(threshold=0.0), **options)
    return Engine(config, clock=ManualClock(), costs=cheap, check=True)


def proposing(drafter, target: ToyModel, k: int) -> Engine:
    return build(LevelConfig(drafter=drafter, k=k, controller="fixed"), LevelConfig(model=target, name="target"))


def with_grammar(params: SamplingParams, grammar, **changes) -> SamplingParams:
    return dataclasses.replace(params, logits_processors=[grammar], **changes)


def next_tokens(grammar: Grammar, prompt: Sequence[int], text: Sequence[int], width: int = SIZE) -> list[int]:
    """What a grammar allows after `text`, read afresh."""
    state = grammar.for_request()
    for ids in [[*prompt], [*prompt, *text]]:
        allowed = state(torch.tensor([ids]), torch.zeros(1, width)) == 0
    return allowed[0].nonzero()[:, 0].tolist()


class Blocks(Drafter):
    """Proposes blocks that are legal, illegal, or legal at first.

    `legal` gives the legal tokens after (prompt, generated tokens).
    """

    def __init__(self, kind: str, legal: Callable[[list[int], list[int]], list[int]], vocab: int) -> None:
        self.kind, self.legal, self.vocab = kind, legal, vocab
        self.coins = np.random.default_rng(1)

    def propose(self, asks):
        return [self._one(ask) for ask in asks]

    def _one(self, ask) -> Draft:
        tokens = ask.context.tokens.tolist()
        prompt, text = tokens[: ask.prompt_length], tokens[ask.prompt_length :]
        length = min(ask.want, ask.cap)
        switch = {"legal": length, "illegal": 0, "partly": length // 2}[self.kind]
        for i in range(length):
            legal = self.legal(prompt, text) if i <= switch else []
            choice = legal if i < switch else [t for t in range(self.vocab) if t not in legal]
            if not choice:
                break
            text.append(int(self.coins.choice(choice)))
        return Draft(text[len(tokens) - ask.prompt_length :])


# -- the report: a user's own automaton ------------------------------------------------------------

OPEN, CLOSE, LETTER, STOP = {0: 1, 2: 3}, {1: 0, 3: 2}, 4, 5
BUDGET = 40


def bracket_tokens(prompt: Sequence[int], text: Sequence[int]) -> list[int]:
    """What may follow: brackets match, and what is open can still be closed within the budget."""
    opened: list[int] = []
    for token in text:
        if token in OPEN:
            opened.append(token)
        elif token in CLOSE:
            assert opened.pop() == CLOSE[token]
    left = BUDGET - len(text) - len(opened) - 1  # after closing everything and the end
    legal = [OPEN[opened[-1]]] if opened else [STOP]
    return sorted([*legal, *([LETTER] if left >= 1 else []), *(OPEN if left >= 2 else [])])


class Brackets:
    """The constraint as a user would write it: with state, advanced by each token."""

    def __init__(self) -> None:
        self.before: list[int] | None = None
        self.prompt = 0

    def for_request(self) -> Brackets:
        return Brackets()

    def __call__(self, input_ids, scores):
        ids = input_ids[0].tolist()
        if self.before is None:
            self.prompt = len(ids)
        else:
            assert ids[:-1] == self.before, "once per emitted token, on its true prefix, in order"
        self.before = ids
        out = torch.full_like(scores, -math.inf)
        legal = bracket_tokens(ids[: self.prompt], ids[self.prompt :])
        out[0, legal] = scores[0, legal]
        return out


@BOTH
@pytest.mark.parametrize("kind", ["legal", "illegal", "partly", "oracle", "mixed"])
def test_an_illegal_proposal_is_a_plain_rejection(kind: str, params: SamplingParams) -> None:
    """vllm-project/vllm#10442: drafting and a constraint together cut the text short or killed the server."""
    target, prompts = ToyModel(vocab_size=6, seed=2, end_ids=(STOP,)), [[4, 0, 1], [2, 3], [4]]
    params = dataclasses.replace(params, max_new_tokens=BUDGET, logits_processors=[Brackets()])
    plain = [r.tokens for r in build(LevelConfig(model=target)).generate(prompts, params)]
    for prompt, text in zip(prompts, plain, strict=True):
        assert text[-1] == STOP
        assert all(token in bracket_tokens(prompt, text[:i]) for i, token in enumerate(text))
    assert max(map(len, plain)) > 8
    for k in range(1, 9):
        texts = [[*p, *t] for p, t in zip(prompts, plain, strict=True)]
        scripted = ScriptedDrafter(texts, kind, vocab_size=6) if kind in ("oracle", "mixed") else None
        engine = proposing(scripted or Blocks(kind, bracket_tokens, 6), target, k)
        for _ in range(2):  # the same parameters again: what the first requests left must not matter
            results = engine.generate(prompts, params)
            assert [r.tokens for r in results] == plain
            assert {(r.finish_reason, r.error) for r in results} == {("stop", None)}
        levels = [result.stats.levels[0] for result in results]
        assert sum(level.tested for level in levels) > 0
        assert sum(level.dropped for level in levels) == 0
        if kind == "illegal":
            assert sum(level.accepted for level in levels) == 0


# -- JSON by schema --------------------------------------------------------------------------------


@needs_library
@BOTH
@pytest.mark.parametrize("name", SCHEMAS)
def test_json_is_complete_and_fits_its_schema(name: str, params: SamplingParams) -> None:
    engine = build(LevelConfig(model=Speaker()))
    grammar = Grammar.json(SCHEMAS[name], engine)
    results = engine.generate(PROMPT, with_grammar(params, grammar, n=3))
    for result in results:
        assert (result.finish_reason, result.tokens[-1]) == ("stop", END)
        assert fits(json.loads(result.text), SCHEMAS[name]), result.text
    if params.temperature and name != "answer":
        assert len({result.text for result in results}) == 3


@needs_library
@BOTH
@pytest.mark.parametrize("kind", ["legal", "illegal", "partly", "oracle", "wrong", "mixed"])
def test_drafts_never_change_constrained_text(kind: str, params: SamplingParams) -> None:
    target = Speaker()
    grammar = Grammar.json(PET, words())
    params = with_grammar(params, grammar)
    plain = build(LevelConfig(model=target)).generate(PROMPT, params)
    legal = functools.partial(next_tokens, grammar)
    for k in range(1, 9):
        own = kind in ("legal", "illegal", "partly")
        scripted = None if own else ScriptedDrafter([[*PROMPT, *plain.tokens]], kind, vocab_size=SIZE)
        result = proposing(scripted or Blocks(kind, legal, SIZE), target, k).generate(PROMPT, params)
        level = result.stats.levels[0]
        assert (result.tokens, result.text, result.finish_reason) == (plain.tokens, plain.text, "stop")
        assert level.tested > 0
        assert (level.dropped, result.error) == (0, None)
        if kind in ("illegal", "wrong"):
            assert level.accepted == 0
        if kind == "oracle":
            assert level.accept_rate == 1


@needs_library
@BOTH
@pytest.mark.parametrize("tail", [False, True])
def test_draft_models_follow_the_grammar_too(tail: bool, params: SamplingParams) -> None:
    """A copy of the target drafts what the constrained target says, wherever the levels' prefixes go."""
    target = Speaker()
    params = with_grammar(params, Grammar.json(PET, words()))
    plain = build(LevelConfig(model=target)).generate(PROMPT, params)
    for forced, k in itertools.product([False, True], [1, 4, 8]):
        engine = build(
            LevelConfig(drafter=ForcedTokens() if forced else "ngram", k=3, controller="fixed"),
            LevelConfig(model=Speaker(), name="draft", k=k, controller="fixed", tail=tail),
            LevelConfig(model=target, name="target"),
        )
        result = engine.generate(PROMPT, params)
        assert result.tokens == plain.tokens
        assert result.stats.levels[1].tested > 0
        if not tail:
            assert result.stats.levels[1].accept_rate == 1


@needs_library
@BOTH
def test_requests_keep_their_grammars_apart(params: SamplingParams) -> None:
    """Other schemas, other samples and other requests in the batch; the parameters are used again."""
    target = Speaker()
    draft = Speaker(seed=7, mix=(target, 0.6))
    engine = build(
        LevelConfig(drafter="ngram", k=3), LevelConfig(model=draft, name="draft", k=4), LevelConfig(model=target)
    )
    many = [with_grammar(params, Grammar.json(schema, engine), n=3, seed=5) for schema in SCHEMAS.values()]
    many.append(SamplingParams(max_new_tokens=30, ignore_eos=True))
    prompts = [PROMPT, [*b"a list"], [7, 8, 7], [9]]
    alone = [
        engine.generate(prompt, dataclasses.replace(one, speculate=False))
        for prompt, one in zip(prompts, many, strict=True)
    ]
    want = [r.tokens for one in alone for r in (one if isinstance(one, list) else [one])]
    for _ in range(2):
        results = engine.generate(prompts, many)
        assert [r.tokens for r in results] == want
    for i, schema in enumerate(SCHEMAS.values()):
        assert all(fits(json.loads(r.text), schema) for r in results[3 * i : 3 * i + 3])


@needs_library
def test_a_transformers_model_and_a_padded_head() -> None:
    changes = {"vocab_size": SIZE + 13, "tie_word_embeddings": False, "max_position_embeddings": 512}
    target = tiny("llama", **changes)
    target.lm_head.weight.data[SIZE:] *= 50  # rows without a token, which would win every argmax
    engine = build(
        LevelConfig(drafter="ngram", k=4),
        LevelConfig(model=tiny("llama", seed=1, **changes), name="draft", k=4),
        LevelConfig(model=target, tokenizer=words(), name="target"),
    )
    grammar = Grammar.json(PET, engine)
    for params in (GREEDY, SAMPLED):
        one = with_grammar(params, grammar)
        result = engine.generate("A pet: ", one)
        assert fits(json.loads(result.text), PET)
        assert result.tokens == engine.generate("A pet: ", dataclasses.replace(one, speculate=False)).tokens
        assert result.tokens[-1] in engine.model.end_ids
    ids = torch.tensor([words()("A pet: ")["input_ids"]])
    theirs = target.generate(ids, max_new_tokens=400, do_sample=False, logits_processor=[Grammar.json(PET, engine)])
    assert theirs[0, ids.shape[1] :].tolist() == engine.generate("A pet: ", with_grammar(GREEDY, grammar)).tokens


@needs_library
def test_a_budget_that_is_too_small_leaves_a_legal_beginning() -> None:
    engine = build(LevelConfig(drafter="ngram"), LevelConfig(model=Speaker()))
    params = with_grammar(GREEDY, Grammar.json(PET, engine))
    whole = engine.generate(PROMPT, params)
    cut = engine.generate(PROMPT, dataclasses.replace(params, max_new_tokens=12))
    assert (cut.finish_reason, cut.tokens) == ("length", whole.tokens[:12])


@needs_library
def test_white_space_has_an_end() -> None:
    """A model that likes new lines best must go on at some time: generative-computing/mellea#1515."""
    grammar = Grammar.json({"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}, words())
    line = words().convert_tokens_to_ids("Ċ")
    text = words()("{")["input_ids"]
    while line in next_tokens(grammar, PROMPT, text) and len(text) < 99:
        text.append(line)
    assert len(text) == 33
    assert next_tokens(grammar, PROMPT, text) == words()('"')["input_ids"]


@needs_library
def test_regular_expressions_and_grammars() -> None:
    engine = build(LevelConfig(drafter="ngram"), LevelConfig(model=Speaker()))
    date = Grammar.regex(r"(19|20)\d\d-(0[1-9]|1[0-2])", engine)
    total = Grammar.lark('start: term ("+" term)~2\nterm: /[0-9]{1,3}/ | "(" term ")"', engine)
    for seed in range(5):
        params = dataclasses.replace(SAMPLED, seed=seed)
        assert re.fullmatch(r"(19|20)\d\d-(0[1-9]|1[0-2])", engine.generate(PROMPT, with_grammar(params, date)).text)
        found = engine.generate(PROMPT, with_grammar(params, total))
        assert found.finish_reason == "stop"
        assert re.fullmatch(r"\(*\d{1,3}\)*(\+\(*\d{1,3}\)*){2}", found.text)
        assert found.text.count("(") == found.text.count(")")


# -- the object ------------------------------------------------------------------------------------


@needs_library
def test_a_grammar_is_a_function_of_the_text() -> None:
    """Drafts take it forward and back; nothing of that is left."""
    grammar, coins = Grammar.json(PET, words()), np.random.default_rng(0)
    texts = []
    for _ in range(4):
        text: list[int] = []
        while (legal := next_tokens(grammar, PROMPT, text)) != [END]:
            text.append(int(coins.choice([token for token in legal if token != END])))
        texts.append([*text, END, END])
    state = grammar.for_request()
    state(torch.tensor([PROMPT]), torch.zeros(1, SIZE))
    for _ in range(150):
        text = texts[coins.integers(4)]
        text = text[: coins.integers(len(text) + 1)]
        scores = torch.zeros(1, SIZE)
        allowed = (state(torch.tensor([[*PROMPT, *text]]), scores) == 0)[0].nonzero()[:, 0].tolist()
        assert allowed == next_tokens(grammar, PROMPT, text)
        assert (scores == 0).all(), "the scores it is given are not its own"
        if END in text:
            assert allowed == [END]


@needs_library
def test_a_prefix_with_another_prompt_begins_anew() -> None:
    grammar = Grammar.regex("ab", words())
    a, b = words()("ab")["input_ids"]
    steps = [([9], a), ([9, a], b), ([9, a, b], END), ([8], a), ([8, 7], a), ([9, 8, 7], a), ([9, 8, 7, a], b)]
    grammar(torch.tensor([[9]]), torch.zeros(1, SIZE))
    for prefix, only in [*steps[:4], *steps[5:]]:
        out = grammar(torch.tensor([prefix]), torch.zeros(1, SIZE))
        assert (out[0] == 0).nonzero().tolist() == [[only]]


@needs_library
def test_a_token_from_elsewhere_is_an_error_that_names_it() -> None:
    target = Speaker()
    grammar = Grammar.regex("a{5}", words())

    def meddle(input_ids, scores):
        out = torch.full_like(scores, -math.inf)
        out[0, 77] = 0
        return out

    engine = build(LevelConfig(model=target))
    results = engine.generate([PROMPT, PROMPT], [SamplingParams(logits_processors=[grammar, meddle]), GREEDY])
    assert results[0].finish_reason == "error"
    assert "token 77 is not allowed by the grammar" in results[0].error
    assert results[1].error is None


@needs_library
def test_a_vocabulary_that_cannot_spell_the_grammar_is_an_error() -> None:
    """Its tokenizer says <pad> for what it does not know, and the library takes it at its word."""
    small = ToyModel(vocab_size=211, end_ids=(END,))
    small.tokenizer, small.decode = tokenizer(211), lambda ids: ""
    engine = build(LevelConfig(model=small))
    result = engine.generate([9], with_grammar(GREEDY, Grammar.regex("a b", engine)))
    assert result.finish_reason == "error"
    assert "no token of this vocabulary" in result.error


@needs_library
def test_where_the_library_gives_up_the_text_is_not_cut_in_silence() -> None:
    engine = build(LevelConfig(model=Speaker()))
    grammar = Grammar.regex("a{30}", engine)

    class GivesUp:
        def __init__(self, inner):
            self.inner, self.left = inner, 5

        def deep_copy(self):
            return GivesUp(self.inner.deep_copy())

        def is_error(self):
            self.left -= 1
            return self.left < 0

        def get_error(self):
            return "too complex\nmany details"

        def __getattr__(self, name):
            return getattr(self.inner, name)

    grammar._start = GivesUp(grammar._start)
    result = engine.generate(PROMPT, with_grammar(GREEDY, grammar))
    assert (result.finish_reason, result.text) == ("error", "aaaaa")
    assert result.error == "DecodeError: the grammar cannot go on here: too complex"


@needs_library
@pytest.mark.parametrize("width", [200, SIZE, 300, 1000])
def test_scores_of_any_width(width: int) -> None:
    allowed = next_tokens(Grammar.regex("[^a]", words()), PROMPT, [], width)
    assert allowed[0] >= 3, "special tokens are not text"
    assert max(allowed) < SIZE
    assert words()("b")["input_ids"][0] in allowed
    assert words()("a")["input_ids"][0] not in allowed


@needs_library
def test_all_end_tokens_and_only_when_complete() -> None:
    """A text token that ends the text is kept out of it, or the text would end before it is complete."""
    [b] = words()("b")["input_ids"]
    grammar = Grammar.regex("[abc]{2}", words(), end_ids=[END, b, 5000])
    a, c = words()("ac")["input_ids"]
    assert next_tokens(grammar, PROMPT, []) == [a, c]
    assert next_tokens(grammar, PROMPT, [a]) == [a, c]
    assert next_tokens(grammar, PROMPT, [a, c]) == sorted([END, b])
    more = Grammar.regex("[abc]+", words())
    assert next_tokens(more, PROMPT, [a]) == [END, a, b, c]
    assert next_tokens(more, PROMPT, [a, END]) == [END], "nothing comes after the end"


@needs_library
def test_the_vocabulary_is_read_once(monkeypatch) -> None:
    import llguidance

    made = []

    def count(*args, **options):
        made.append(args)
        return real(*args, **options)

    real = llguidance.LLTokenizer
    monkeypatch.setattr(llguidance, "LLTokenizer", count)
    mine = tokenizer(SIZE)
    for pattern in ("a", "b"):
        Grammar.regex(pattern, mine).for_request()
    assert len(made) == 1
    Grammar.regex("a", mine, end_ids=[1])
    mine.add_tokens(["<|new|>"])
    Grammar.regex("a", mine)
    assert len(made) == 3, "another end token, another size"


# -- forced tokens ---------------------------------------------------------------------------------


@needs_library
@BOTH
def test_forced_tokens_hold(params: SamplingParams) -> None:
    target = Speaker()
    params = with_grammar(params, Grammar.json(PET, words()))
    plain = build(LevelConfig(model=target)).generate(PROMPT, params)
    result = proposing(ForcedTokens(), target, 8).generate(PROMPT, params)
    level = result.stats.levels[0]
    assert result.tokens == plain.tokens
    assert level.accept_rate == 1
    assert level.accepted >= len('"name":"","kind":"","age":')
    assert result.stats.target_forwards < plain.stats.target_forwards / 2


@needs_library
def test_what_is_forced_follows_the_text() -> None:
    grammar = Grammar.regex("a[bc]de", words())
    a, b, d, e = words()("abde")["input_ids"]
    for text, forced in [([], [a]), ([a], []), ([a, b], [d, e]), ([a, b, d], [e]), ([a, b, d, e], []), ([END], [])]:
        assert grammar.for_request().forced(np.array([*PROMPT, *text]), len(PROMPT)) == forced


@needs_library
def test_where_nothing_is_forced_the_other_drafter_is_asked() -> None:
    target = Speaker()
    params = with_grammar(GREEDY, Grammar.json(PET, words()))
    free = SamplingParams(max_new_tokens=20)
    texts = [build(LevelConfig(model=target)).generate(PROMPT, one).tokens for one in (params, free)]
    oracle = ScriptedDrafter([[*PROMPT, *text] for text in texts], vocab_size=SIZE)
    drafter = ForcedTokens(oracle)
    engine = proposing(drafter, target, 4)
    results = engine.generate([PROMPT, PROMPT], [params, free])
    assert [result.tokens for result in results] == texts
    for result in results:
        assert result.stats.levels[0].accept_rate == 1
        assert result.stats.tokens_per_forward > 3
    assert all(oracle.observed.values())
    assert not oracle.live
    assert not drafter._grammars, "nothing is kept of requests that ended"


# -- refusals --------------------------------------------------------------------------------------


@needs_library
@pytest.mark.parametrize(
    ("schema", "says"),
    [
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"type": "object", "if": {}, "then": {}}, "if"),
        ({"type": "string", "format": "colour"}, "colour"),
        ({"type": "strin"}, "strin"),
        ({"$ref": "https://example.com/schema.json"}, "example.com"),
        ({"type": "integer", "minimum": 3, "maximum": 1}, "minimum"),
        ({"enum": []}, "Unsatisfiable"),
        ({"type": "string", "pattern": "(?=a)b"}, "look-ahead"),
        ('{"type": ', "not JSON"),
        ({"type": {1, 2}}, "not JSON"),
        ({"minimum": math.nan}, "not JSON"),
        ([], "object"),
        (True, "object"),
        (None, "object"),
    ],
)
def test_a_schema_that_cannot_be_enforced_is_refused_in_one_line(schema, says: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(says)) as caught:
        Grammar.json(schema, words())
    assert "\n" not in str(caught.value)
    assert "JSON schema" in str(caught.value)


@needs_library
@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Grammar.regex("a(", words()), "unclosed group"),
        (lambda: Grammar.regex("(?<=a)b", words()), "the regular expression '(?<=a)b'"),
        (lambda: Grammar.regex(3, words()), "must be a string, not 3"),
        (lambda: Grammar.lark("start: missing", words()), "missing"),
        (lambda: Grammar.lark("", words()), "cannot use the grammar: no start"),
        (lambda: Grammar.lark(None, words()), "must be a string"),
    ],
)
def test_grammars_that_are_none_are_refused_in_one_line(make, says: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(says)) as caught:
        make()
    assert "\n" not in str(caught.value)


@needs_library
def test_tokenizers_that_cannot_be_read_are_refused_by_name() -> None:
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    wordpiece = Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1, "##b": 2}, unk_token="[UNK]"))
    wordpiece.decoder = decoders.WordPiece()
    strange = PreTrainedTokenizerFast(tokenizer_object=wordpiece, eos_token="[UNK]")
    strange.name_or_path = "strange"
    slow = SimpleNamespace(name_or_path="slow", eos_token_id=1)
    endless = tokenizer(SIZE)
    endless.eos_token = None
    wordless = build(LevelConfig(model=ToyModel(), name="toy"))
    speaker = Speaker()
    speaker.end_ids = ()
    for source, says in [
        (strange, "llguidance cannot use the tokenizer of strange: "),
        (slow, "the tokenizer of slow is a SimpleNamespace, and grammars need a fast tokenizer"),
        (endless, "no end token"),
        (wordless, "toy has no tokenizer"),
        (build(LevelConfig(model=speaker, name="mute")), "mute has no end token"),
        (None, "no tokenizer"),
    ]:
        with pytest.raises(ConfigError, match=re.escape(says)) as caught:
            Grammar.regex("a", source)
        assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match=r"no end token \[900\] is one: give end_ids"):
        Grammar.regex("a", words(), end_ids=[900])


def test_without_the_library_one_line_says_how_to_get_it(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    for make in (Grammar.regex, Grammar.json, Grammar.lark):
        with pytest.raises(ConfigError, match=re.escape("pip install 'cascade-spec[grammar]'")):
            make("{}", tokenizer(SIZE))
