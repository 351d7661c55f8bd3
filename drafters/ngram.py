"""Prompt lookup: proposes what followed the last tokens when they last occurred in the text.

After Saxena (2023), "Prompt Lookup Decoding", and Yang et al. (2023), "Inference with Reference":
no model at all, and worth most where the answer repeats the prompt. The text is indexed as it grows, so
the cost of a proposal does not depend on how long it is.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numba import njit
from numpy.typing import NDArray

from cascade.config import SamplingParams
from cascade.draft import Ask, Context, Draft, Tokens
from cascade.drafter import Drafter
from cascade.errors import ConfigError

Keys = NDArray[np.uint64]

_TAIL = 32  # how many indexed tokens are compared to see whether a context is the one that was indexed
_MIN_SLOTS = 256
_SEED, _FACTOR, _SHIFT = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xD6E8FEB86659FD93), np.uint64(32)


class NgramDrafter(Drafter):
    """Continues the longest suffix of the text that occurred before, as it went on at the latest occurrence.

    An occurrence counts if it and the token after it are committed. The copy may run over the end of the
    text: it then goes on through its own tokens, so a text that repeats itself is continued to any length.

    Args:
        n_min: the shortest suffix, in tokens, that is looked up.
        n_max: the longest one, tried first.

    Raises:
        ConfigError: unless 1 <= n_min <= n_max.
    """

    costly = False

    def __init__(self, n_min: int = 2, n_max: int = 4) -> None:
        for name, value in (("n_min", n_min), ("n_max", n_max)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"ngram: {name} must be an integer >= 1, not {value!r}")
        if n_min > n_max:
            raise ConfigError(f"ngram: n_min ({n_min}) must not exceed n_max ({n_max})")
        self.n_min, self.n_max = n_min, n_max
        self._rows: dict[int, _Index] = {}

    def warm_up(self) -> None:
        """Compiles the kernels, or loads them from numba's cache, so that no request has to wait for it."""
        _Index(1, 2).continuation(Context(0, np.zeros(2 * _MIN_SLOTS, np.int64)), 1)

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        """One chain per ask, of min(want, cap) tokens, or empty where nothing matches."""
        return [self._propose(ask) for ask in asks]

    def _propose(self, ask: Ask) -> Draft:
        count = min(ask.want, ask.cap)
        if count <= 0:
            return Draft([])
        index = self._rows.get(ask.context.row_id)
        if index is None:
            index = self._rows[ask.context.row_id] = _Index(self.n_min, self.n_max)
        return Draft(index.continuation(ask.context, count))

    def start(self, row_id: int, params: SamplingParams) -> None:
        """A request begins: nothing of an earlier one with its number may be left."""
        self._rows.pop(row_id, None)

    def end(self, row_id: int) -> None:
        """A request ended: forgets its index."""
        self._rows.pop(row_id, None)


class _Index:
    """Where the n-grams of one row's committed tokens last ended: an open-addressing hash table.

    `keys` [slots] are hashes of n-grams of all lengths, `ends` [slots] the positions after them, 0 where a
    slot is free. The text itself is not stored: what the table says is checked against the context.
    """

    __slots__ = ("ends", "indexed", "keys", "n_max", "n_min", "tail", "used")

    def __init__(self, n_min: int, n_max: int) -> None:
        self.n_min, self.n_max = n_min, n_max
        self._clear()

    def _clear(self) -> None:
        self.keys: Keys = np.zeros(_MIN_SLOTS, np.uint64)
        self.ends: Tokens = np.zeros(_MIN_SLOTS, np.int64)
        self.used = 0
        self.indexed = 0  # n-grams that end before this position are in the table
        self.tail = b""  # the last tokens that were indexed

    def continuation(self, context: Context, count: int) -> list[int]:
        """The `count` tokens that the index suggests after `context`, or none."""
        self._catch_up(context.tokens, min(context.committed, len(context)))
        out = np.empty(count, np.int64)
        found = _continue(context.tokens, self.keys, self.ends, self.n_min, self.n_max, out)
        return out.tolist() if found else []

    def _catch_up(self, tokens: Tokens, committed: int) -> None:
        """Indexes what was committed since the last call; starts again if the text is another one.

        Another text with the same last tokens at the same place passes for the same. That costs matches,
        never correctness: whatever is proposed is read from the context at hand.
        """
        if committed < self.indexed or tokens[max(self.indexed - _TAIL, 0) : self.indexed].tobytes() != self.tail:
            self._clear()
        if committed == self.indexed:
            return
        self._reserve((committed - self.indexed) * (self.n_max - self.n_min + 1))
        self.used += _insert(tokens, self.indexed, committed, self.n_min, self.n_max, self.keys, self.ends)
        self.indexed = committed
        self.tail = tokens[max(committed - _TAIL, 0) : committed].tobytes()

    def _reserve(self, more: int) -> None:
        """Grows the table so that `more` n-grams leave it at most half full."""
        slots = len(self.keys)
        while slots < 2 * (self.used + more):
            slots *= 2
        if slots > len(self.keys):
            keys, ends = np.zeros(slots, np.uint64), np.zeros(slots, np.int64)
            _move(self.keys, self.ends, keys, ends)
            self.keys, self.ends = keys, ends


@njit(cache=True)
def _extend(hashed: np.uint64, token: np.int64) -> np.uint64:
    hashed = (hashed ^ np.uint64(token)) * _FACTOR
    return hashed ^ (hashed >> _SHIFT)


@njit(cache=True)
def _slot(keys: Keys, ends: Tokens, key: np.uint64) -> np.uint64:
    """The slot that holds `key`, or the free one where it belongs. keys, ends [slots], a power of two."""
    mask = np.uint64(len(keys) - 1)
    slot = key & mask
    while ends[slot] != 0 and keys[slot] != key:
        slot = (slot + np.uint64(1)) & mask
    return slot


@njit(cache=True)
def _insert(tokens: Tokens, start: int, stop: int, n_min: int, n_max: int, keys: Keys, ends: Tokens) -> int:
    """Indexes the n-grams of tokens [L] that end at start..stop-1; returns how many of them were new.

    One that ends at `stop` has no committed token after it yet: it is indexed by the next call. So the
    suffix that is looked up never finds itself.
    """
    new = 0
    for end in range(max(start, n_min), stop):
        hashed = _SEED
        for n in range(1, min(n_max, end) + 1):
            hashed = _extend(hashed, tokens[end - n])
            if n >= n_min:
                slot = _slot(keys, ends, hashed)
                new += ends[slot] == 0
                keys[slot], ends[slot] = hashed, end
    return new


@njit(cache=True)
def _move(keys: Keys, ends: Tokens, new_keys: Keys, new_ends: Tokens) -> None:
    for i in range(len(keys)):
        if ends[i] != 0:
            slot = _slot(new_keys, new_ends, keys[i])
            new_keys[slot], new_ends[slot] = keys[i], ends[i]


@njit(cache=True)
def _continue(tokens: Tokens, keys: Keys, ends: Tokens, n_min: int, n_max: int, out: Tokens) -> bool:
    """Fills out [K] with what followed the latest occurrence of the longest known suffix of tokens [L].

    Returns whether there is one. tokens are committed and tentative; only committed n-grams are known.
    """
    length, found = len(tokens), 0
    hashed = _SEED
    for n in range(1, min(n_max, length) + 1):
        hashed = _extend(hashed, tokens[length - n])
        if n >= n_min:
            end = ends[_slot(keys, ends, hashed)]
            # Hashes collide, and the index may be of an earlier state of this text: compare the tokens.
            if end >= n and end < length and np.all(tokens[end - n : end] == tokens[length - n :]):
                found = end
    if found == 0:
        return False
    for i in range(len(out)):
        source = found + i
        out[i] = tokens[source] if source < length else out[source - length]
    return True
