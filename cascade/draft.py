"""The values that cross boundaries between levels: Context, Ask, Draft and Verdict.

Dimension key, used in every docstring: B rows (requests), L tokens so far, K drafted tokens,
N tree nodes, V vocabulary, Q query tokens of one row in one forward, D head size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from cascade.config import SamplingParams
    from cascade.noise import Noise

Tokens = NDArray[np.int64]


def free(nodes: int) -> float:
    """What verification costs where nobody knows."""
    return 0.0


@dataclass(frozen=True, slots=True)
class Doubt:
    """When a drafter stops by its entropy: AdaEDL (Agrawal et al. 2024, section 3).

    Attributes:
        gamma: of the bound 1 - sqrt(gamma * H) on the chance that a token holds, H in nats.
        least: the bound under which no token is drawn.
    """

    gamma: float
    least: float

    def stops(self, entropy: float) -> bool:
        """Whether a token of a distribution with this entropy is not worth drawing."""
        return max(0.0, 1.0 - math.sqrt(self.gamma * max(entropy, 0.0))) < self.least


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
        share: the same of a token beside the best one: its share of the rest, once that has failed.
        price: what it costs to verify so many nodes, in emitted tokens: a node of a tree that is less likely to hold
            than it adds to that does not pay.
        nodes: how many nodes a draft may have if it is a tree; `want` and `cap` are its depth then.
        doubt: a drafter that has distributions stops before the first token that this says is not worth drawing.
        needs_q: whether the asker can use the distributions that the tokens are drawn from. Such tokens are drawn with
            `noise` too, which is fresh then: no number is used for two drafts.
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
    share: Callable[[float], float] = float
    price: Callable[[int], float] = free
    nodes: int = 64
    doubt: Doubt | None = None
    needs_q: bool = False

    def below(self, context: Context, want: int, cap: int, **changes: Any) -> Ask:
        """The same request's question to a drafter below: how the text ends is the target's business."""
        kept = {"noise": self.noise, "needs_q": self.needs_q, **changes}
        return Ask(context, want, cap, self.params, prompt_length=self.prompt_length, **kept)


@dataclass(slots=True)
class Draft:
    """Tokens proposed to continue a context: a chain, or a tree in topological order.

    Attributes:
        tokens: [N] token ids.
        parents: [N] index of each node's parent, -1 for the context's end; None means a chain.
        q: [N, V] the distributions the tokens were drawn from, a row None where it is not known; or None
            for a point mass, which is exact however the tokens were made. Siblings are drawn in the order given,
            each without those before it; whoever merges, prunes or sorts by what was drawn must leave q out.
        origin: index of the level that first proposed the tokens, or one index per token.
            None: filled in by the engine with the level the drafter sits at.
        chances: [N] the probability that the drafter gives each token, None where it does not say; of one beside
            others, its share of what the first of them leaves. Only control reads it.
        error: why the drafter had no more to say, if something went wrong: it is counted and logged.
        by: [N] where several drafters proposed together: which of them proposed the node, a bit for each.
    """

    tokens: Sequence[int]
    parents: Sequence[int] | None = None
    q: Any = None
    origin: int | Sequence[int] | None = None
    chances: Sequence[float | None] | None = None
    error: Exception | None = None
    by: Sequence[int] | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def depth(self) -> int:
        """How many tokens can hold at most: the length of the longest path."""
        if self.parents is None:
            return len(self.tokens)
        from cascade.trees import depths  # compiled code: a plugin that only imports `Draft` need not wait for it

        return int(depths(self.parents).max(initial=-1)) + 1

    def parent(self, node: int) -> int:
        """The node before this one, -1 for the context's end."""
        return node - 1 if self.parents is None else self.parents[node]

    def path(self, node: int) -> list[int]:
        """The nodes from the root to this one; none for -1."""
        nodes: list[int] = []
        while node >= 0:
            nodes.append(node)
            node = self.parent(node)
        return nodes[::-1]

    def picked(self, nodes: Sequence[int], parents: Sequence[int] | None = None) -> Draft:
        """Some of the nodes, in this order, with all that belongs to them."""

        def of(values: Any) -> Any:
            return None if values is None else [values[node] for node in nodes]

        origin = of(self.origins()) if self.origin is not None else None
        return Draft(of(self.tokens), parents, of(self.q), origin, of(self.chances), self.error, of(self.by))

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


def first_nodes(draft: Draft) -> list[int]:
    """The nodes from a tree's first root down along first children."""
    if draft.parents is None:
        return list(range(len(draft)))
    path: list[int] = []
    for node, parent in enumerate(draft.parents):
        if parent == (path[-1] if path else -1):
            path.append(node)
    return path


def first_path(draft: Draft) -> Draft:
    """The chain of a tree's first nodes: what a model without trees can verify.

    Which nodes these are does not depend on their tokens, so that q stays true.
    """
    return draft if draft.parents is None else draft.picked(first_nodes(draft))


def extended(draft: Draft, node: int, more: Draft) -> Draft:
    """The draft with a chain of guesses behind one of its nodes."""
    count = len(draft)
    tokens, origin = [*draft.tokens, *more.tokens], [*draft.origins(), *more.origins()]
    unknown = [None] * len(more)
    q = None if draft.q is None else [*draft.q, *unknown]
    chances = None if draft.chances is None else [*draft.chances, *unknown]
    by = None if draft.by is None else [*draft.by, *[0] * len(more)]
    parents = None
    if draft.parents is not None or node != count - 1:
        parents = [draft.parent(i) for i in range(count)] + [node, *range(count, count + len(more) - 1)][: len(more)]
    return Draft(tokens, parents, q, origin, chances, draft.error, by)


def _read_only(tokens: Tokens) -> Tokens:
    view = tokens[:]
    view.flags.writeable = False
    return view
