"""What a forward costs: its usual time by how many tokens it carried, and the pace of the machine now.

Machines that are shared run faster and slower by half within minutes, and most sizes are rarely measured:
were each size's time followed by itself, those in use would look slow, or fast, beside the rest. So times are
kept at the pace of the first ones, and whatever was measured last says by how much all of a level's have changed.

All times are in seconds, all sizes in tokens summed over the packed rows of one forward. Nothing here
reads a clock: whoever measures calls `observe`, and tests hand in `FixedCosts` instead.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

from cascade.control.base import Estimates

WINDOW = 15  # observations per bucket: a median over them ignores seven stalls
RECENT = 9  # forwards whose median is the pace: it ignores four stalls
PACED = 64  # sizes up to here say something of the pace: longer forwards are prompts
SURE = 3  # times of a size from which on its median is to be trusted
EXACT = 16  # sizes up to here have a bucket each, larger ones share one per power of two
GUESSED_SLOPE = 1 / 32  # of the only known time, per token: 700 tokens took 13 to 30 one-token forwards on CPUs


class Costs(Protocol):
    """What control asks of a cost model. `CostModel` measures, `FixedCosts` is told."""

    def observe(self, level: str, tokens: int, rows: int, seconds: float) -> None:
        """A forward of `level` on `tokens` tokens of `rows` rows took `seconds`."""

    def seconds(self, level: str, tokens: int, rows: int = 1) -> float | None:
        """Expected time of such a forward, None where nothing is known."""

    def observe_draft(self, level: str, tokens: int, seconds: float, rows: int = 1) -> None:
        """The drafter at `level` took `seconds` to propose `tokens` tokens to each of `rows` rows."""

    def draft_seconds(self, level: str, tokens: int = 1, rows: int = 1) -> float | None:
        """Expected time of such proposals, None where nothing is known."""

    def relax(self, level: str) -> None:
        """A request went by in which this level was left out: what once made it slow may be over."""


class Known(NamedTuple):
    """What is known of one size: how many tokens, the usual time, and over how many forwards."""

    tokens: float
    seconds: float
    times: int


class CostModel:
    """Measured costs, per level name and number of rows.

    A time is kept divided by the pace in the middle of the `RECENT` forwards around it, so that a machine that has
    become slower changes the pace, not the table.

    Attention runs once per row, so rows have tables of their own, one per power of two; while one
    knows fewer than two sizes, the nearest that knows more answers for it.
    """

    def __init__(self) -> None:
        self._tables: dict[tuple[str, int], _Table] = {}
        self._paces: dict[str, _Pace] = {}
        self._answering: dict[tuple[str, int], _Table | None] = {}
        self._unmeasured: list[_Pace] = []  # of what was restored

    def observe(self, level: str, tokens: int, rows: int, seconds: float) -> None:
        """A forward of `level` on `tokens` tokens of `rows` rows took `seconds`. Nonsense is ignored."""
        if tokens < 0 or not 0.0 <= seconds < float("inf"):
            return
        key = (level, rows.bit_length())
        table = self._tables.get(key)
        if table is None:
            table = self._tables[key] = _Table()
            self._paces.setdefault(level, _Pace())
        pace = self._paces[level]
        usual = table.usual(tokens)
        if usual and seconds:
            pace.observe(table, tokens, seconds, seconds / usual)
            if self._unmeasured:  # the latest pace of something else is the best guess at theirs
                self._unmeasured = [other for other in self._unmeasured if other is not pace]
                for other in self._unmeasured:
                    other.now = pace.now
        elif table.add(tokens, seconds / pace.now):
            self._answering.clear()

    def seconds(self, level: str, tokens: int, rows: int = 1) -> float | None:
        """Expected time of a forward, None where nothing is known that bears on it.

        Never falls as `tokens` grows: linear between known sizes, and beyond the largest by the
        last slope. Below the smallest it stays level, except that long prompts say nothing of short forwards.
        """
        key = (level, rows.bit_length())
        if key not in self._answering:
            self._answering[key] = self._nearest(*key)
        table = self._answering[key]
        time = None if table is None else table.at(tokens)
        return None if time is None else time * self._paces[level].now

    def observe_draft(self, level: str, tokens: int, seconds: float, rows: int = 1) -> None:
        """The drafter at `level` took `seconds` to propose `tokens` tokens to each of `rows` rows."""
        self.observe(f"draft of {level}", tokens, rows, seconds)

    def draft_seconds(self, level: str, tokens: int = 1, rows: int = 1) -> float | None:
        """Expected time of such proposals, None where nothing is known."""
        return self.seconds(f"draft of {level}", tokens, rows)

    def relax(self, level: str) -> None:
        """Lets the level's pace go towards the fastest there was.

        Times that a busy machine made long would else keep a level out for good: unused, it is not measured.
        """
        for name in (level, f"draft of {level}"):
            if name in self._paces:
                self._paces[name].relax()

    def known(self, level: str, drafts: bool = False) -> tuple[dict[int, list[Known]], float]:
        """What forwards, or drafts, of a level take now: for each least number of rows its sizes, rising.

        And the least pace there was, as a share of that of now.
        """
        level = f"draft of {level}" if drafts else level
        pace = self._paces.get(level) or _Pace()
        tables = {rows: table for (name, rows), table in sorted(self._tables.items()) if name == level}
        found = {(1 << rows) >> 1: table.known(pace.now) for rows, table in tables.items()}
        return found, min(pace.least / pace.now, 1.0)

    def restore(self, level: str, found: Mapping[int, Sequence[Known]], least: float, drafts: bool = False) -> None:
        """Takes in what another cost model's `known` gave. The next forward says at what pace the machine is now."""
        level = f"draft of {level}" if drafts else level
        assert level not in self._paces, f"{level} has been measured"
        for rows, sizes in found.items():
            table = self._tables[level, rows.bit_length()] = _Table()
            for tokens, seconds, times in sizes:
                for _ in range(min(times, WINDOW)):
                    table.add(tokens, seconds)
        pace = self._paces[level] = _Pace(least, ())
        self._unmeasured.append(pace)
        self._answering.clear()

    def _nearest(self, level: str, rows: int) -> _Table | None:
        known = {r: table for (name, r), table in self._tables.items() if name == level}
        if not known:
            return None
        return known[min(known, key=lambda r: (len(known[r].keys) < 2, abs(r - rows), r))]


class FixedCosts:
    """Costs that are told, not measured: for tests, and for toy models whose real ones mean nothing.

    Args:
        table: table(level, tokens) -> seconds of a forward, None where nobody knows.
        draft: the same for a proposal; None: proposals cost nothing.
    """

    def __init__(
        self, table: Callable[[str, int], float | None], draft: Callable[[str, int], float] | None = None
    ) -> None:
        self._table = table
        self._draft = draft

    def observe(self, level: str, tokens: int, rows: int, seconds: float) -> None:
        """Changes nothing."""

    def seconds(self, level: str, tokens: int, rows: int = 1) -> float | None:
        """What the table says, whatever the number of rows."""
        return self._table(level, tokens)

    def observe_draft(self, level: str, tokens: int, seconds: float, rows: int = 1) -> None:
        """Changes nothing."""

    def draft_seconds(self, level: str, tokens: int = 1, rows: int = 1) -> float | None:
        """What the draft table says for the tokens of all rows; 0 without one."""
        return 0.0 if self._draft is None else self._draft(level, tokens * rows)

    def relax(self, level: str) -> None:
        """Changes nothing."""


def estimate(costs: Costs, drafter: str, verifier: str, alpha: float, batch: int, rows: int) -> Estimates:
    """What drafting costs one row of a batch, in units of the verifier's plain forward for all of it.

    A drafter's time keeps the whole batch waiting, and rows that draft share it: alone among many, hardly any pays.
    So what drafting and wider forwards take is divided by the `rows` that draft, and counts `batch` times.

    Args:
        costs: measured, or told.
        drafter, verifier: names of the two levels.
        alpha: the drafter's, engine-wide.
        batch: rows that are decoded.
        rows: how many of them draft at this level, from 1 to `batch`.
    """
    unit, share = costs.seconds(verifier, batch, batch), batch / rows

    def verify(tokens: int) -> float:
        seconds = costs.seconds(verifier, batch + rows * (tokens - 1), batch)
        return 1.0 if seconds is None or not unit else 1.0 + share * (seconds / unit - 1.0)

    step = costs.draft_seconds(drafter, rows=rows)
    if step is None:  # nothing drafted yet: a model's own forward; for a table next to nothing
        step = costs.seconds(drafter, rows, rows) or 0.0
    cost, now = (share * step / unit, unit / batch) if unit else (0.0, None)
    return Estimates(alpha, cost, verify, token_seconds=now)


class _Pace:
    """How much longer a level's forwards take now than its tables say.

    Attributes:
        now: the median over the last `RECENT` forwards; 1 in the beginning.
        least: the least there was.
    """

    __slots__ = ("_latest", "_ratios", "least", "now")

    def __init__(self, least: float = 1.0, ratios: Iterable[float] = (1.0,) * RECENT) -> None:
        self.now, self.least = 1.0, least
        self._ratios = deque(ratios, maxlen=RECENT)
        self._latest: deque[tuple[_Table, int, float]] = deque()

    def observe(self, table: _Table, tokens: int, seconds: float, ratio: float) -> None:
        """A forward took `ratio` times what the table has for it; the middle one of the recent goes into its table."""
        self._ratios.append(ratio)
        self._latest.append((table, tokens, seconds))
        self._settle()
        self.least = min(self.least, self.now)
        if len(self._latest) > RECENT // 2:
            of, size, time = self._latest.popleft()
            of.add(size, time / self.now)

    def relax(self) -> None:
        """Puts the least pace ever in the place of the largest recent ratio."""
        if len(self._ratios) == RECENT:
            self._ratios.remove(max(self._ratios))
        self._ratios.appendleft(self.least)
        self._settle()

    def _settle(self) -> None:
        self.now = sorted(self._ratios)[(len(self._ratios) - 1) // 2]  # of two the lower: the other may be a stall


class _Table:
    """Time by size for one level and number of rows: a rising line through the buckets' medians."""

    __slots__ = ("keys", "medians", "sizes", "stale", "times", "tokens", "windows")

    def __init__(self) -> None:
        self.keys: list[int] = []  # of the buckets, rising, as are all lists here
        self.windows: list[deque[float]] = []  # latest times
        self.sizes: list[deque[float]] = []  # and how many tokens each was for
        self.tokens: list[float] = []  # medians of the two
        self.medians: list[float] = []
        self.times: list[float] = []  # the medians made to rise
        self.stale = False

    def usual(self, tokens: int) -> float | None:
        """The time of a size that has been measured often enough to compare another with it; None for others."""
        i, known = self._place(tokens)
        if tokens > PACED or not known or len(self.windows[i]) < SURE:
            return None
        time = self.at(tokens)  # which fits the times
        # Its own median, not one that a stall at a smaller size has lifted.
        return time * self.medians[i] / self.times[i] if time and self.times[i] else None

    def known(self, pace: float) -> list[Known]:
        """The buckets, at a pace."""
        buckets = zip(self.tokens, self.medians, self.windows, strict=True)
        return [Known(tokens, median * pace, len(window)) for tokens, median, window in buckets]

    def _place(self, tokens: float) -> tuple[int, bool]:
        """Where the bucket of a size is or would be, and whether it is."""
        key = bucket(tokens)
        i = bisect_left(self.keys, key)
        return i, i < len(self.keys) and self.keys[i] == key

    def add(self, tokens: float, seconds: float) -> bool:
        """Takes in one observation; True if it opened a bucket."""
        i, known = self._place(tokens)
        if not known:
            self.keys.insert(i, bucket(tokens))
            self.windows.insert(i, deque(maxlen=WINDOW))
            self.sizes.insert(i, deque(maxlen=WINDOW))
            for values in (self.tokens, self.medians, self.times):
                values.insert(i, 0.0)
            self.stale = True
        self.windows[i].append(seconds)
        self.sizes[i].append(tokens)
        before, now = self.medians[i], _median(sorted(self.windows[i]))
        self.medians[i] = now
        self.tokens[i] = float(tokens) if tokens <= EXACT else _median(sorted(self.sizes[i]))
        times = self.times
        # A bucket that stands alone and keeps its place changes no other: the usual case, and a cheap one.
        alone = times[i] == before and (i == 0 or times[i - 1] < min(before, now))
        if not self.stale and alone and (i + 1 == len(times) or max(before, now) < times[i + 1]):
            times[i] = now
        else:
            self.stale = True
        return not known

    def at(self, tokens: int) -> float | None:
        """Time of a forward on so many tokens; None where only much longer ones are known."""
        if self.stale:
            self._fit()
        xs, ys = self.tokens, self.times
        i = bisect_left(xs, tokens)
        if i == 0:
            return ys[0] if tokens > EXACT or xs[0] <= EXACT else None
        if i < len(xs):
            x, y = xs[i - 1], ys[i - 1]
            return y + (ys[i] - y) * (tokens - x) / (xs[i] - x)
        return ys[-1] + (tokens - xs[-1]) * self._slope_beyond()

    def _slope_beyond(self) -> float:
        """Seconds per token beyond the largest size, from one half as large: close ones differ by noise alone."""
        xs, ys = self.tokens, self.times
        if len(xs) < 2:
            return GUESSED_SLOPE * ys[0]
        i = max(0, bisect_right(xs, xs[-1] / 2.0) - 1)
        return (ys[-1] - ys[i]) / (xs[-1] - xs[i])

    def _fit(self) -> None:
        """Makes the medians rise: neighbours that fall share a weighted mean (pool adjacent violators)."""
        pools: list[tuple[float, int, int]] = []  # (mean, observations, buckets)
        for mean, window in zip(self.medians, self.windows, strict=True):
            weight, size = len(window), 1
            while pools and pools[-1][0] > mean:
                before, other, width = pools.pop()
                mean = (mean * weight + before * other) / (weight + other)
                weight, size = weight + other, size + width
            pools.append((mean, weight, size))
        self.times = [mean for mean, _, size in pools for _ in range(size)]
        self.stale = False


def bucket(tokens: float) -> int:
    """The bucket of a size."""
    return int(tokens) if tokens <= EXACT else EXACT + (int(tokens) - 1).bit_length()


def _median(ordered: list[float]) -> float:
    middle = len(ordered) // 2
    return float(ordered[middle]) if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2.0
