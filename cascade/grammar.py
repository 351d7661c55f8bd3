"""Text that a grammar allows: JSON by schema, regular expressions, context-free grammars.

The grammars are llguidance's. It refuses a JSON schema that it cannot enforce (xgrammar drops keywords such as
`allOf` in silence), builds a mask where it is needed instead of all of them first, can be rewound, and is one
wheel of 3 MB that depends on nothing (xgrammar needs triton).

A `Grammar` is a function of the text: what it keeps is only how far it has read, and it reads back where a level
drafted something that did not hold. So the target is constrained in its walk, on the true prefix, one token after
the other; draft models are constrained as well; and a draft the grammar forbids is a draft that is not the
target's choice, no more.
"""

from __future__ import annotations

import json
import math
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from itertools import takewhile
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from cascade.draft import Ask, Draft, Tokens, Verdict
from cascade.drafter import Drafter
from cascade.errors import ConfigError, DecodeError, first_line

if TYPE_CHECKING:
    from cascade.config import SamplingParams

# JSON allows white space without end, and a model may well write it until its tokens are used up.
WHITE_SPACE = r"[ \t\n\r]{1,32}"

# tokenizer -> (an end token, its size) -> its tokens as llguidance wants them, which takes a second for 150,000.
_vocabularies: weakref.WeakKeyDictionary[Any, dict[tuple[int, int], Any]] = weakref.WeakKeyDictionary()


class Grammar:
    """Keeps what is generated within a grammar: `SamplingParams(logits_processors=[Grammar.json(...)])`.

    Made by `Grammar.json`, `Grammar.regex` or `Grammar.lark`, which compile the grammar, so that whatever is wrong
    with it is said before anything is decoded. The grammar is about the generated text; the prompt is not part of it.
    Once the text is complete and nothing can follow, only end tokens are possible, and the request ends with "stop".

    Its text is always a beginning of one that the grammar allows. It is complete unless something else ends it:
    `max_new_tokens` (with "length"), a stop string, a stop token that is not among the end tokens. So give what may
    grow without end a bound (`maxLength`, `maxItems`, `maximum`), and let the budget be larger.

    One object serves any number of requests: each takes a state of its own, `for_request`. Tokens after an end token
    (`ignore_eos`) are end tokens; where `min_new_tokens` forbids them, a complete text has no next token.
    """

    #: Draft models follow the grammar too: it is cheap, and a function of the text.
    for_drafts = True

    def __init__(self, start: Any, words: int, end_ids: Sequence[int], in_use: bool = False) -> None:
        self._start = start  # shared by all requests, never advanced
        self._words = words
        self._end_ids = frozenset(end_ids)
        self._in_use = in_use  # by a request
        self._matcher: Any = None
        self._prompt: Tokens | None = None
        self._read: list[int] = []  # generated tokens that the matcher has consumed

    # -- what users call -----------------------------------------------------------------------------

    @classmethod
    def json(cls, schema: Mapping[str, Any] | str, engine: Any, *, end_ids: Iterable[int] = ()) -> Grammar:
        """The JSON that a JSON schema (draft 2020-12) describes, properties in the schema's order.

        White space is allowed where JSON allows it, at most 32 characters in one place. The schema's own key
        "x-guidance" sets it otherwise: `{"x-guidance": {"whitespace_flexible": False}, "type": "object", ...}`.

        Args:
            schema: as a dict or as JSON text.
            engine: the engine whose target writes the text, or a tokenizer of transformers.
            end_ids: tokens that end the text; by default the target's, for a tokenizer its eos token.

        Raises:
            ConfigError: the schema is none, or uses what llguidance does not enforce; there is no tokenizer, or one
                that llguidance cannot read; llguidance is not installed.
        """
        try:
            found = json.loads(schema) if isinstance(schema, str) else schema
            text = json.dumps(found, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise ConfigError(f"the JSON schema is not JSON: {first_line(error)}") from None
        if not isinstance(found, Mapping):
            raise ConfigError(f"a JSON schema must be an object such as {{'type': 'object'}}, not {text:.60}")
        bounded = {"x-guidance": {"whitespace_pattern": WHITE_SPACE}, **found}
        return cls._compiled("the JSON schema", json.dumps({"grammars": [{"json_schema": bounded}]}), engine, end_ids)

    @classmethod
    def regex(cls, pattern: str, engine: Any, *, end_ids: Iterable[int] = ()) -> Grammar:
        """The texts that a regular expression matches as a whole; no lookaround, no references back.

        Args:
            pattern: in the syntax of Rust's `regex`, which is nearly Python's.
            engine, end_ids: see `json`.

        Raises:
            ConfigError: as `json` does.
        """
        _check_text(pattern, "a regular expression")
        grammar = _library().LLMatcher.grammar_from_regex(pattern)
        return cls._compiled(f"the regular expression {pattern!r:.60}", grammar, engine, end_ids)

    @classmethod
    def lark(cls, text: str, engine: Any, *, end_ids: Iterable[int] = ()) -> Grammar:
        """The texts of a context-free grammar.

        Args:
            text: in llguidance's variant of the syntax of Lark; it begins at the rule `start`.
            engine, end_ids: see `json`.

        Raises:
            ConfigError: as `json` does.
        """
        _check_text(text, "a grammar")
        return cls._compiled("the grammar", json.dumps({"grammars": [{"lark_grammar": text}]}), engine, end_ids)

    def for_request(self) -> Grammar:
        """The same grammar at its beginning, for one request. A request's own gives itself: its levels share it."""
        return self if self._in_use else Grammar(self._start, self._words, tuple(self._end_ids), in_use=True)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Makes impossible what the grammar does not allow next.

        The first call says what the prompt is: all of its tokens. A prefix with another prompt begins anew.

        Args:
            input_ids: int64 [1, L], the prompt and the generated tokens.
            scores: float [1, V]; not changed. V may be larger than the vocabulary: the surplus becomes impossible.

        Returns:
            Scores [1, V], -inf for every token that is not allowed.

        Raises:
            DecodeError: the generated tokens have left the grammar, or the grammar has become too complex.
        """
        over = self._follow(input_ids[0].cpu().numpy(), input_ids.shape[1])
        forbidden = torch.from_numpy(self._forbidden(scores.shape[1], over)).to(scores.device)
        return torch.where(forbidden, -math.inf, scores)  # a third less time than masked_fill

    def forced(self, tokens: Tokens, prompt_length: int) -> list[int]:
        """The tokens about which the grammar leaves no choice after `tokens` [L], often none."""
        if self._follow(tokens, prompt_length):
            return []
        forced: list[int] = self._matcher.compute_ff_tokens()
        return forced

    # -- how it works --------------------------------------------------------------------------------

    @classmethod
    def _compiled(cls, what: str, grammar: str, engine: Any, end_ids: Iterable[int]) -> Grammar:
        tokenizer, name, ends = _source(engine, end_ids)
        vocabulary = _vocabulary(tokenizer, name, ends)
        with _named(what):
            start = _library().LLMatcher(vocabulary, grammar, log_level=0)
            if start.is_error():
                raise ValueError(start.get_error())
        return cls(start, -(-vocabulary.vocab_size // 32), ends)

    def _follow(self, ids: Tokens, prompt_length: int) -> bool:
        """Brings the matcher to the end of `ids` [L], forward or back; returns whether an end token came before."""
        known = 0 if self._prompt is None else len(self._prompt)
        if self._prompt is None or not np.array_equal(ids[:known], self._prompt):
            self._prompt, self._read, known = ids[:prompt_length].copy(), [], prompt_length
            self._matcher = self._start.deep_copy()
        text, held = ids[known:].tolist(), len(self._read)
        if text[:held] != self._read:
            kept = next((i for i, token in enumerate(text[:held]) if token != self._read[i]), min(held, len(text)))
            self._matcher.rollback(held - kept)
            del self._read[kept:]
        new = list(takewhile(lambda token: token not in self._end_ids, text[len(self._read) :]))
        read = self._matcher.try_consume_tokens(new) if new else 0
        self._read += new[:read]
        if read < len(new):
            raise DecodeError(
                f"token {new[read]} is not allowed by the grammar: something else has chosen it, or no token of this "
                "vocabulary is what must come here"
            )
        return len(self._read) < len(text)

    def _forbidden(self, width: int, over: bool) -> NDArray[np.bool_]:
        """For each of `width` tokens whether it is impossible next, bool [width]; `over` after an end token."""
        words = np.zeros(max(self._words, -(-width // 32)), np.uint32)
        if not over:
            # Where the library fails, it allows its end token: unseen, the text would be cut short.
            self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, 4 * self._words)
            if self._matcher.is_error():
                raise DecodeError(f"the grammar cannot go on here: {_reason(self._matcher.get_error())}")
        forbidden = np.unpackbits((~words).view(np.uint8), bitorder="little")[:width].view(np.bool_)
        may_end = over or self._matcher.is_accepting()
        for token in self._end_ids:
            if token < width:
                forbidden[token] = not may_end
        return forbidden


class _Silent(Drafter):
    """Proposes nothing."""

    costly = False

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        """An empty draft per ask."""
        return [Draft([]) for _ in asks]


class ForcedTokens(Drafter):
    """Proposes what a request's grammar leaves no choice about: the keys, quotes and brackets of JSON.

    What it proposes holds, so a run of forced tokens costs one forward of the level above. Where nothing is forced,
    and for requests without a grammar, another drafter is asked.

    Args:
        otherwise: that drafter, or None.
    """

    def __init__(self, otherwise: Drafter | None = None) -> None:
        self._otherwise = _Silent() if otherwise is None else otherwise
        self.costly = self._otherwise.costly
        self._grammars: dict[int, Grammar] = {}

    def warm_up(self) -> None:
        """Lets the other drafter compile what it compiles."""
        getattr(self._otherwise, "warm_up", lambda: None)()

    def start(self, row_id: int, params: SamplingParams) -> None:
        """A request begins, with a grammar or without."""
        found = next((one for one in params.logits_processors if isinstance(one, Grammar)), None)
        if found is not None:
            self._grammars[row_id] = found.for_request()
        self._otherwise.start(row_id, params)

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        """Forced tokens where there are any, else what the other drafter says."""
        forced = [self._forced(ask) for ask in asks]
        others = iter(self._otherwise.propose([ask for ask, tokens in zip(asks, forced, strict=True) if not tokens]))
        return [Draft(tokens) if tokens else next(others) for tokens in forced]

    def _forced(self, ask: Ask) -> list[int]:
        grammar = self._grammars.get(ask.context.row_id)
        return [] if grammar is None else grammar.forced(ask.context.tokens, ask.prompt_length)

    def observe(self, row_id: int, verdict: Verdict) -> None:
        """For the other drafter."""
        self._otherwise.observe(row_id, verdict)

    def end(self, row_id: int) -> None:
        """Forgets the row."""
        self._grammars.pop(row_id, None)
        self._otherwise.end(row_id)


def _library() -> Any:
    try:
        import llguidance
    except ImportError:
        raise ConfigError("grammars need the library llguidance: pip install 'cascade-spec[grammar]'") from None
    return llguidance


@contextmanager
def _named(what: str) -> Iterator[None]:
    """Whatever the library raises becomes one line that names `what`."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic of its Rust code is no Exception
        raise ConfigError(f"llguidance cannot use {what}: {_reason(str(error))}") from None


def _reason(message: str) -> str:
    """The library's message in one line: the first, and what it says below a picture of the place."""
    first, *rest = message.splitlines() or ["no reason given"]
    return " ".join([first, *(line.removeprefix("error: ") for line in rest if line.startswith("error: "))])


def _check_text(text: Any, what: str) -> None:
    if not isinstance(text, str):
        raise ConfigError(f"{what} must be a string, not {text!r:.60}")


def _source(engine: Any, end_ids: Iterable[int]) -> tuple[Any, str, tuple[int, ...]]:
    """The tokenizer, what errors call its owner, and the end tokens."""
    from cascade.engine import Engine

    if isinstance(engine, Engine):
        tokenizer, name, own = getattr(engine.model, "tokenizer", None), engine.target.name, engine.model.end_ids
    else:
        eos = getattr(engine, "eos_token_id", None)
        tokenizer, name = engine, getattr(engine, "name_or_path", "") or type(engine).__name__
        own = () if eos is None else (eos,)
    if tokenizer is None:
        raise ConfigError(f"{name} has no tokenizer, and a grammar needs one: give its level a tokenizer=...")
    ends = tuple(end_ids) or tuple(own)
    if not ends:
        raise ConfigError(f"{name} has no end token: give end_ids=[...], and requests the same as stop_token_ids")
    return tokenizer, name, ends


def _vocabulary(tokenizer: Any, name: str, ends: Sequence[int]) -> Any:
    """The tokenizer as llguidance wants it, made once."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        kind = type(tokenizer).__name__
        raise ConfigError(f"the tokenizer of {name} is a {kind}, and grammars need a fast tokenizer of transformers")
    size = len(tokenizer)
    end = next((token for token in ends if 0 <= token < size), None)
    if end is None:
        raise ConfigError(f"{name} has {size} tokens, and no end token {list(ends)} is one: give end_ids=[...]")
    made = _vocabularies.setdefault(tokenizer, {})
    if (end, size) not in made:
        library = _library()
        with _named(f"the tokenizer of {name}"):
            plain = copy(backend)
            plain.no_padding()
            plain.no_truncation()
            made[end, size] = library.LLTokenizer(plain.to_str(), eos_token=end)
    return made[end, size]
