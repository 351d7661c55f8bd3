"""The values that cross boundaries between levels: Context, Ask, Draft and Verdict.

Dimension key, used in every docstring: B rows (requests), L tokens so far, K drafted tokens,
N tree nodes, V vocabulary, Q query tokens of one row in one forward, D head size.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from cascade.errors import DraftError

if TYPE_CHECKING:
    from cascade.config import SamplingParams
    from cascade.noise import Noise

Tokens = NDArray[np.int64]


class Context:
    """The tokens of one request as a drafter sees them: committed ones, then tentative ones.

    Attributes:
        row_id: the request's number, unique within its engine.
        tokens: int64 [L], a view; read it, never write it, and copy what you keep.
        committed: how many of `tokens` are certain. The rest are guesses of levels below the asker
            that a level above may still reject: match them as context, never store them.
    """

    __slots__ = ("_buffer", "committed", "row_id", "tokens")

    def __init__(self, row_id: int, tokens: Any, committed: int | None = None) -> None:
        self._buffer: Tokens = np.ascontiguousarray(tokens, dtype=np.int64)
        self.row_id = row_id
        self.tokens = _read_only(self._buffer)
        self.committed = len(self.tokens) if committed is None else committed

    @classmethod
    def over(cls, row_id: int, buffer: Tokens, length: int, committed: int) -> Context:
        """A context that views the first `length` tokens of a request's preallocated `buffer`."""
        context = cls.__new__(cls)
        context._buffer, context.row_id, context.committed = buffer, row_id, committed
        context.tokens = _read_only(buffer[:length])
        return context

    def __len__(self) -> int:
        return len(self.tokens)

    def extended(self, tokens: Sequence[int]) -> Context:
        """A context with tentative `tokens` appended.

        Writes behind its own end into the shared buffer: levels nest, so whoever extends a context
        is the only one to look past it until it returns.
        """
        start, end = len(self.tokens), len(self.tokens) + len(tokens)
        buffer = self._buffer
        if end > len(buffer):
            buffer = np.zeros(max(2 * len(buffer), end), np.int64)
            buffer[:start] = self.tokens
        buffer[start:end] = tokens
        return Context.over(self.row_id, buffer, end, self.committed)


@dataclass(frozen=True, slots=True)
class Ask:
    """One row's request for tokens that continue `context`.

    Attributes:
        want: how many tokens the asker would like (K).
        cap: how many it can use at most; a longer draft is cut.
        params: the request's sampling parameters.
        noise: the request's random numbers, a function of (position, token).
        prompt_length: how many of the context's tokens are the prompt.
        ends: whether a token ends the text for a reason that only the request knows (a stop string);
            called once per token, in order. None below the target.
        floor: a drafter that knows how sure it is may stop once the chance that all it has drafted holds has
            fallen under this: the next token would cost more than it could bring. 0: never.
        chance: what a probability that the drafter gives its token is worth, by earlier tests.
    """

    context: Context
    want: int
    cap: int
    params: SamplingParams
    noise: Noise
    prompt_length: int = 0
    ends: Callable[[int], bool] | None = None
    floor: float = 0.0
    chance: Callable[[float], float] = float

    def below(self, context: Context, want: int, cap: int, floor: float = 0.0, chance: Any = float) -> Ask:
        """The same request's question to a drafter below: how the text ends is the target's business."""
        return Ask(context, want, cap, self.params, self.noise, self.prompt_length, floor=floor, chance=chance)


@dataclass(slots=True)
class Draft:
    """Tokens proposed to continue a context: a chain, or a tree in topological order.

    Attributes:
        tokens: [N] token ids.
        parents: [N] index of each node's parent, -1 for the context's end; None means a chain.
        q: [N, V] the distributions the tokens were drawn from, or None for a point mass, which is
            exact however the tokens were made.
        origin: index of the level that first proposed the tokens, or one index per token.
            None: filled in by the engine with the level the drafter sits at.
        chances: [N] the probability that the drafter gives each token, where it says; only control reads it.
        error: why the drafter had no more to say, if something went wrong: it is counted and logged.
    """

    tokens: Sequence[int]
    parents: Sequence[int] | None = None
    q: Any = None
    origin: int | Sequence[int] | None = None
    chances: Sequence[float] | None = None
    error: Exception | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    def origins(self) -> list[int]:
        """The origin of each token, [N]."""
        if isinstance(self.origin, int) or self.origin is None:
            return [-1 if self.origin is None else self.origin] * len(self.tokens)
        return list(self.origin)


@dataclass(slots=True)
class Verdict:
    """What a level made of a draft.

    Attributes:
        path: indices of the accepted nodes, root first.
        extra: the token the verifier adds after the path (its correction, or the bonus), None if
            the path itself ends the text or the verifier cannot say.
        tested: how many draft positions the verifier compared (in a tree: depths walked).
        accepted: how many of them held; len(path).
        proposed: how many tokens the draft had.
        chain: the accepted tokens and `extra`: what was appended.
    """

    path: list[int]
    extra: int | None
    tested: int
    accepted: int
    proposed: int = 0
    chain: list[int] = field(default_factory=list)

    @property
    def rejected(self) -> bool:
        """Whether the walk ended because the draft was wrong (and not because it was over)."""
        return self.tested > self.accepted


def first_path(draft: Draft) -> Draft:
    """The chain from a tree's first root down along first children: what a model without trees can verify."""
    if draft.parents is None:
        return draft
    path: list[int] = []
    for node, parent in enumerate(draft.parents):
        if parent == (path[-1] if path else -1):
            path.append(node)
    origins = draft.origins()
    chances = None if draft.chances is None else [draft.chances[node] for node in path]
    return Draft([draft.tokens[node] for node in path], origin=[origins[node] for node in path], chances=chances)


def check_draft(draft: Draft, cap: int, vocab_size: int) -> Draft:
    """The draft as plain ints, cut to `cap`; raises DraftError where it breaks its contract."""
    tokens = _ints(draft.tokens, "tokens")
    parents = None if draft.parents is None else _ints(draft.parents, "parents")
    if parents is not None:
        if len(parents) != len(tokens):
            raise DraftError(f"a draft has {len(tokens)} tokens but {len(parents)} parents")
        if any(not -1 <= p < i for i, p in enumerate(parents)):
            raise DraftError("a draft tree's parents must come before their children")
        if parents == list(range(-1, len(tokens) - 1)):
            parents = None
    bad = next((t for t in tokens if not 0 <= t < vocab_size), None)
    if bad is not None:
        raise DraftError(f"a draft has token id {bad}, outside the vocabulary of {vocab_size}")
    origin = draft.origin
    if not (origin is None or isinstance(origin, int)):
        origin = list(origin)
        if len(origin) != len(tokens):
            raise DraftError(f"a draft has {len(tokens)} tokens but {len(origin)} origins")
        origin = origin[:cap]
    q = None if draft.q is None else draft.q[:cap]
    chances = None if draft.chances is None else [float(chance) for chance in draft.chances]
    if chances is not None and len(chances) != len(tokens):
        raise DraftError(f"a draft has {len(tokens)} tokens but {len(chances)} chances")
    if not all(0.0 <= chance <= 1.0 for chance in chances or ()):
        raise DraftError("a draft's chances must be probabilities")
    chances = None if chances is None else chances[:cap]
    return Draft(tokens[:cap], None if parents is None else parents[:cap], q, origin, chances)


def _ints(values: Any, what: str) -> list[int]:
    plain = values.tolist() if hasattr(values, "tolist") else values
    try:
        return [operator.index(value) for value in plain]
    except TypeError:
        raise DraftError(f"a draft's {what} must be integers, not {values!r:.60}") from None


def _read_only(tokens: Tokens) -> Tokens:
    view = tokens[:]
    view.flags.writeable = False
    return view
