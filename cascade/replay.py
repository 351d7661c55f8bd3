"""Models that repeat what was recorded, in virtual time, and the texts as they read them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from cascade.draft import Ask, Context, Draft, Tokens, Verdict
from cascade.drafter import Drafter
from cascade.errors import ConfigError
from cascade.recording import Recording, Said
from cascade.rows import Feed, Row
from cascade.testing import ManualClock

if TYPE_CHECKING:
    from cascade.config import SamplingParams
    from cascade.costs import Costs

LEAST = 1e-9  # probability under which all is alike
AT_ONCE = 1 << 22  # logits that a row may keep: with real vocabularies it would be 100 MB
NOTHING = Said(np.zeros((1, 1), np.int64), np.zeros((1, 1), np.float32))


class VirtualClock(ManualClock):
    """A clock that models and drafters move on.

    Attributes:
        owed: seconds that pass as soon as somebody has read the time: own work, which comes after a forward was timed.
    """

    def __init__(self) -> None:
        super().__init__()
        self.owed = 0.0

    def __call__(self) -> float:
        """The time now, in seconds."""
        now = self.now
        self.now += self.owed
        self.owed = 0.0
        return now

    def settled(self) -> float:
        """The time now, once all that is owed has passed."""
        self()
        return self.now


@dataclass(frozen=True)
class Text:
    """A recording as models read it.

    Attributes:
        prompt, tokens: int64, the ids of `recording`, or numbers instead of them.
        said: by level name.
    """

    prompt: Tokens
    tokens: Tokens
    said: Mapping[str, Said]


def as_they_are(recordings: Sequence[Recording], names: Sequence[str]) -> tuple[list[Text], int]:
    """The texts with their own ids, and a vocabulary's size. Raises ConfigError."""
    seen: dict[tuple[int, ...], int] = {}
    texts, most = [], 0
    for number, one in enumerate(recordings):
        first = seen.setdefault(one.prompt, number)
        if recordings[first].tokens != one.tokens:
            raise ConfigError(f"recordings {first} and {number} answer one prompt in two ways: simulate them apart")
        said = {name: one.said[name] for name in names}
        texts.append(Text(np.array(one.prompt, np.int64), np.array(one.tokens, np.int64), said))
        most = max(most, *one.prompt, *one.tokens, *(int(other.ids.max(initial=0)) for other in said.values()))
    return texts, most + 1


def numbered(recordings: Sequence[Recording], names: Sequence[str]) -> tuple[list[Text], int]:
    """The texts with small numbers instead of ids, and how many numbers there are.

    For drafters that only look whether tokens of a text are equal. The j-th new token of text i is number i + j, so
    that the first token tells which text it is.
    """
    made = [_numbered(one, names) for one in recordings]
    size = max(len(recordings), *(count for _, count in made)) + 1
    texts = []
    for i, (text, _) in enumerate(made):
        said = {name: Said((one.ids + i) % size, one.chances) for name, one in text.said.items()}
        texts.append(Text((text.prompt + i) % size, (text.tokens + i) % size, said))
    return texts, size


def _numbered(one: Recording, names: Sequence[str]) -> tuple[Text, int]:
    """A text with numbers from 0 on, and how many.

    What was said and never comes in the text shares numbers with what was said at other positions: it can be equal to
    nothing but to what another level said at the same one.
    """
    numbers = {token: number for number, token in enumerate(dict.fromkeys((*one.prompt, *one.tokens)))}
    columns = {name: one.said[name].ids.tolist() for name in names}
    most = 0
    for place in range(len(one.tokens)):
        strays: dict[int, int] = {}
        for ids in columns.values():
            ids[place] = [
                numbers[token] if token in numbers else len(numbers) + strays.setdefault(token, len(strays))
                for token in ids[place]
            ]
        most = max(most, len(strays))
    prompt, tokens = (np.array([numbers[token] for token in ids], np.int64) for ids in (one.prompt, one.tokens))
    said = {
        name: Said(np.array(ids, np.int64).reshape(one.said[name].ids.shape), one.said[name].chances)
        for name, ids in columns.items()
    }
    return Text(prompt, tokens, said), len(numbers) + most


def logits_of(said: Said, vocab_size: int) -> NDArray[np.float32]:
    """Logits [N, V] of which softmax gives the chances, the first of a line the largest.

    What the chances leave is spread over all other ids, of which none is likelier than one that was said. Where the
    chances of a line come to more than 1, those behind the first shrink.
    """
    count, best = said.ids.shape
    chances = said.chances.astype(np.float64).clip(0.0, 1.0)
    first, others = chances[:, :1].clip(LEAST), chances[:, 1:]
    others = np.minimum(others, others * (1.0 - first) / np.maximum(others.sum(1, keepdims=True), LEAST))
    others = np.minimum(others, first * 0.999 ** np.arange(1, best))  # falling, so that no ids decide
    rest = _rest(1.0 - first, others, vocab_size - best).clip(LEAST / vocab_size, 0.5 * first)
    values = np.concatenate([first, np.maximum(others, rest * (1.0 + 1e-4 * np.arange(best - 1, 0, -1)))], 1)
    lines = np.repeat(np.log(rest).astype(np.float32), vocab_size, axis=1)
    rows, values = np.arange(count), np.log(values).astype(np.float32)
    for column in reversed(range(best)):  # what was said of an id first counts
        lines[rows, said.ids[:, column]] = values[:, column]
    return lines


def _rest(left: NDArray[Any], others: NDArray[Any], blank: int) -> NDArray[Any]:
    """What each of `blank` ids has of `left` [N, 1], if none of `others` [N, B - 1] has less. [N, 1]"""
    rest = np.zeros_like(left)
    for _ in range(others.shape[1] + 1):  # whoever has less is lifted, and leaves less to the others
        low = others < rest
        rest = (left - np.where(low, 0.0, others).sum(1, keepdims=True)) / np.maximum(
            blank + low.sum(1, keepdims=True), 1
        )
    return rest


class Replay:
    """A model that says at each position of a text what was recorded there, whatever precedes it.

    That is all control can tell of a model: what a draft says behind a token that is wrong already decides nothing.

    Args:
        name: what its costs are known by.
        texts: of each the length of its prompt, and what this model said in it.
        find: f(row) -> the number of the text that a row repeats, or None.
        costs, clock: its forwards advance the clock by these...
        overhead: ...and owe it so many seconds of somebody's own work.
        vocab_size: V.
        like: the model that was recorded, or anything: says what it can do.
    """

    dtype = "recorded"
    exactness = "yes, a recording"
    end_ids = ()

    def __init__(
        self,
        name: str,
        texts: Sequence[tuple[int, Said]],
        find: Callable[[Row], int | None],
        costs: Costs,
        clock: VirtualClock,
        overhead: float,
        vocab_size: int,
        like: Any = None,
    ) -> None:
        self.name, self.vocab_size = name, vocab_size
        self.trees: bool = getattr(like, "trees", True)
        self.max_length: int | None = getattr(like, "max_length", None)
        self.probed = getattr(like, "probed", None)
        self._texts, self._find = texts, find
        self._costs, self._clock, self._overhead = costs, clock, overhead

    def new_row(self) -> Row:
        """An empty cache."""
        return ReplayRow()

    def forward(self, feeds: Sequence[Feed]) -> torch.Tensor:
        """See `CausalModel.forward`."""
        lines = [self._lines(feed) for feed in feeds]
        seconds = self._costs.seconds(self.name, sum(len(feed.tokens) for feed in feeds), len(feeds))
        self._clock.advance(seconds or 0.0)
        self._clock.owed += self._overhead
        return torch.from_numpy(lines[0] if len(lines) == 1 else np.concatenate(lines))

    def _lines(self, feed: Feed) -> NDArray[np.float32]:
        """Feeds one row; logits [keep, V], a view where they lie side by side."""
        row, keep = feed.row, feed.keep
        assert isinstance(row, ReplayRow)
        nodes = None if feed.parents is None else positions(feed)[-keep:]
        row.append(feed.tokens)
        if row.said is None:
            self._open(row)
        assert row.said is not None
        last = len(row.said) - 1
        if nodes is None:
            start = row.length - keep + 1 - row.prompt
            if row.lines is not None and 0 <= start <= last + 1 - keep:
                return row.lines[start : start + keep]
            nodes = list(range(row.length - keep, row.length))
        places = [min(max(node + 1 - row.prompt, 0), last) for node in nodes]
        return logits_of(row.said.at(places), self.vocab_size) if row.lines is None else row.lines[places]

    def _open(self, row: ReplayRow) -> None:
        """Lets a row know what it repeats."""
        number = self._find(row)
        row.said = NOTHING
        if number is not None and len(self._texts[number][1]):
            row.prompt, row.said = self._texts[number]
        if len(row.said) * self.vocab_size <= AT_ONCE:
            row.lines = logits_of(row.said, self.vocab_size)


class ReplayRow(Row):
    """A row that knows what it repeats, once its prompt is there.

    Attributes:
        said: at the positions of the answer; None before.
        lines: the same as logits [N, V], unless these are too many.
        prompt: tokens before those.
    """

    def __init__(self) -> None:
        super().__init__()
        self.said: Said | None = None
        self.lines: NDArray[np.float32] | None = None
        self.prompt = 0


def positions(feed: Feed) -> list[int]:
    """Where in its text each fed token stands, the row not fed yet: a tree's nodes by their depth. [Q]"""
    parents = feed.parents or ()
    held = max(0, len(parents) - len(feed.tokens))  # nodes that the row holds already, as its last ones
    chain = held + len(feed.tokens) - len(parents)  # tokens that are fed before the first node
    start = feed.row.length - held
    places = list(range(start, start + chain))
    root, nodes = start + chain, list[int]()
    for parent in parents:
        nodes.append(root if parent < 0 else nodes[parent] + 1)
    return places + nodes[held:]


class Timed(Drafter):
    """A drafter whose proposals take as long as a cost model says.

    Args:
        name: what its costs are known by.
        drafter: what proposes.
        costs, clock: the clock is advanced by `draft_seconds` for each token.
    """

    def __init__(self, name: str, drafter: Drafter, costs: Costs, clock: ManualClock) -> None:
        self._name, self._drafter, self._costs, self._clock = name, drafter, costs, clock

    @property
    def costly(self) -> bool:  # type: ignore[override]
        """The drafter's own."""
        return getattr(self._drafter, "costly", True)

    def propose(self, asks: Sequence[Ask]) -> Sequence[Draft]:
        """The drafter's own proposals."""
        drafts = self._drafter.propose(asks)
        each = self._costs.draft_seconds(self._name, 1, len(asks))
        if each:
            self._clock.advance(each * sum(draft.depth for draft in drafts) / len(asks))
        return drafts

    def warm_up(self) -> None:
        """See `propose`."""
        getattr(self._drafter, "warm_up", lambda: None)()

    def start(self, row_id: int, params: SamplingParams) -> None:
        """A request begins."""
        self._drafter.start(row_id, params)

    def observe(self, row_id: int, verdict: Verdict) -> None:
        """The target committed."""
        self._drafter.observe(row_id, verdict)

    def end(self, row_id: int) -> None:
        """A request ended."""
        self._drafter.end(row_id)

    def scores(self, context: Context) -> Any:
        """The drafter's own."""
        return self._drafter.scores(context)
