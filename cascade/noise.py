"""Random numbers as a function of (seed, position, token), and the race they decide.

Drawing from p by the Gumbel-max trick is argmax(log p + g) with independent standard Gumbel g
(Gumbel 1954; Maddison et al. 2014). Here g belongs to a token at a position of a text, not to a call:
every model of a cascade that looks at the same position meets the same numbers, so models that agree
on p agree on the token, and a text depends on its seed only, never on who was asked how often.

Each number hashes its arguments with the 64-bit finaliser of SplitMix64 (Steele et al. 2014, constants
of Stafford's variant 13), `mix`:

    key  = mix(mix(seed + PHI) ^ mix(position * PHI + ROOT2))
    hash = mix(mix(key + token * PHI) ^ key)
    u    = (hash // 4096 + 0.5) / 2**52

The inner mix alone would make every key a window on one and the same orbit, and two keys shifted
copies of each other; the key goes into the outer mix as well, so that equal inner values under
different keys part again. For the same reason seed and position are mixed apart before they meet.
"""

from __future__ import annotations

import hashlib
import math
import operator
from typing import Any

import numpy as np
from numba import njit
from numpy.typing import ArrayLike, NDArray

Ids = NDArray[np.int64]
Floats = NDArray[np.floating[Any]]

_MASK = (1 << 64) - 1
_PHI = 0x9E3779B97F4A7C15  # 2**64 / golden ratio, made odd
_ROOT2 = 0x6A09E667F3BCC909  # the fractional bits of the square roots of 2 and 3: nothing up the sleeve
_ROOT3 = 0xBB67AE8584CAA73B
_M1, _M2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB

# The same constants where numba must not promote them to float64.
_U_PHI, _U_M1, _U_M2 = np.uint64(_PHI), np.uint64(_M1), np.uint64(_M2)
_S12, _S27, _S30, _S31 = np.uint64(12), np.uint64(27), np.uint64(30), np.uint64(31)

_BLOCK = 64
_CELLS = 16  # table cells per unit of `behind`
_LIMIT = 37.0  # no Gumbel number of ours reaches it: the largest is -log(-log(1 - 2**-53)) = 36.74
_SLACK = 2.0**-10  # far above every rounding error in `behind`, which is a difference of numbers < 80


def _mix(x: int) -> int:
    x = ((x ^ (x >> 30)) * _M1) & _MASK
    x = ((x ^ (x >> 27)) * _M2) & _MASK
    return x ^ (x >> 31)


def _fold(seed: int) -> int:
    """The seed itself if it has 64 bits, else a 64-bit hash: -1 and 2**64 - 1 are different seeds."""
    seed = operator.index(seed)
    if 0 <= seed <= _MASK:
        return seed
    return int.from_bytes(hashlib.blake2b(hex(seed).encode(), digest_size=8).digest(), "little")


def sample_seed(seed: int, i: int) -> int:
    """The seed of sample `i` of a request with n > 1: the seed itself for i = 0, else a 64-bit hash."""
    if i == 0:
        return seed
    return _mix(_mix(_fold(seed) ^ _ROOT3) ^ _mix((i * _PHI) & _MASK))


class Noise:
    """One request's random numbers. It has no state: the same arguments give the same number, always.

    Args:
        seed: any integer. Those from 0 to 2**64 - 1 are taken as they are, others are hashed.
    """

    __slots__ = ("_seed", "seed")

    def __init__(self, seed: int) -> None:
        self.seed = operator.index(seed)
        self._seed = _mix((_fold(seed) + _PHI) & _MASK)

    def __repr__(self) -> str:
        return f"Noise({self.seed})"

    def key(self, position: int) -> int:
        """The 64-bit key of a position: the index in the request's tokens, prompt included."""
        return _mix(self._seed ^ _mix((position * _PHI + _ROOT2) & _MASK))

    def uniform(self, position: int, tokens: ArrayLike) -> NDArray[np.float64]:
        """Uniform numbers of `tokens` at `position`, float64 in the shape of `tokens`.

        Multiples of 2**-53 strictly between 0 and 1, symmetric about 1/2.
        """
        ids, out = _ids_and_out(tokens)
        _uniform(ids.reshape(-1), np.uint64(self.key(position)), out.reshape(-1))
        return out

    def gumbel(self, position: int, tokens: ArrayLike) -> NDArray[np.float64]:
        """Standard Gumbel numbers -log(-log(u)) of the same u, float64 in the shape of `tokens`."""
        ids, out = _ids_and_out(tokens)
        _gumbel(ids.reshape(-1), np.uint64(self.key(position)), out.reshape(-1))
        return out


def _ids_and_out(tokens: ArrayLike) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    ids = np.array(tokens, dtype=np.int64, order="C")  # a copy: numba compiles read-only arrays anew
    return ids, np.empty(ids.shape, np.float64)


@njit(cache=True)
def _hash(key: np.uint64, token: np.int64) -> np.uint64:
    x = key + np.uint64(token) * _U_PHI
    x = (x ^ (x >> _S30)) * _U_M1
    x = (x ^ (x >> _S27)) * _U_M2
    x = x ^ (x >> _S31) ^ key
    x = (x ^ (x >> _S30)) * _U_M1
    x = (x ^ (x >> _S27)) * _U_M2
    return x ^ (x >> _S31)


@njit(cache=True)
def _unit(hashed: np.uint64) -> float:
    return (np.float64(hashed >> _S12) + 0.5) * 2.0**-52


@njit(cache=True)
def _uniform(tokens: Ids, key: np.uint64, out: Floats) -> None:
    for i in range(len(tokens)):
        out[i] = _unit(_hash(key, tokens[i]))


@njit(cache=True)
def _gumbel(tokens: Ids, key: np.uint64, out: Floats) -> None:
    for i in range(len(tokens)):
        out[i] = -math.log(-math.log(_unit(_hash(key, tokens[i]))))


def _hash_floors() -> NDArray[np.uint64]:
    """[i]: a Gumbel number above i / _CELLS takes a hash of at least this.

    g > d means u > exp(-exp(-d)), that is 1 - u < -expm1(-exp(-d)); the 2 covers rounding.
    """
    behind = np.arange(int(_LIMIT * _CELLS)) / _CELLS
    short = np.ceil(-np.expm1(-np.exp(-behind)) * 2.0**52) + 2
    return np.maximum(2.0**52 - short, 0).astype(np.uint64) << _S12


_FLOORS = _hash_floors()


@njit(cache=True, fastmath={"nnan", "nsz"})
def _peak(scores: Floats, start: int, stop: int) -> float:
    # The flags let LLVM vectorise the maximum. There is no NaN here: the caller looked.
    peak = scores[start]
    for i in range(start + 1, stop):
        if scores[i] > peak:
            peak = scores[i]
    return peak


@njit(cache=True)
def _highest(key: np.uint64, ids: Ids, start: int, stop: int) -> np.uint64:
    highest = np.uint64(0)
    for i in range(start, stop):
        highest = max(highest, _hash(key, ids[i]))
    return highest


@njit(cache=True)
def race(scores: Floats, ids: Ids, key: np.uint64, top: float, temperature: float, lead: int) -> int:
    """The index i that maximises (scores[i] - top) / temperature + gumbel(ids[i]); the first of equals.

    scores [n] float32 or float64, finite or -inf; ids [n] int64, ascending; key uint64; top float64, the
    largest score; temperature float64 > 0; lead: where a largest score stands.

    Two logarithms per token of a vocabulary would cost milliseconds. A token that is `behind` the best
    so far needs a Gumbel number above that, hence a hash above a floor: blocks of tokens are dismissed
    on their largest score and largest hash, in vectorised loops, and few tokens pay the logarithms.
    Equivalent and left for reference: argmax((scores - top) / temperature + noise.gumbel(position, ids)).
    """
    n = len(scores)
    best_at = lead
    best = (scores[lead] - top) / temperature - math.log(-math.log(_unit(_hash(key, ids[lead]))))
    for start in range(0, n, _BLOCK):
        stop = min(start + _BLOCK, n)
        behind = best - (_peak(scores, start, stop) - top) / temperature - _SLACK
        if behind >= _LIMIT:
            continue
        if behind > 0 and _highest(key, ids, start, stop) < _FLOORS[int(behind * _CELLS)]:
            continue
        for i in range(start, stop):
            score = (scores[i] - top) / temperature
            behind = best - score - _SLACK
            if behind >= _LIMIT:
                continue
            hashed = _hash(key, ids[i])
            if behind > 0 and hashed < _FLOORS[int(behind * _CELLS)]:
                continue
            value = score - math.log(-math.log(_unit(hashed)))
            if value > best or (value == best and i < best_at):
                best, best_at = value, i
    return best_at


def warm_up() -> None:
    """Compiles the kernels, or loads them from numba's cache, so that no request has to wait for it."""
    noise = Noise(0)
    noise.uniform(0, [0])
    noise.gumbel(0, [0])
    for dtype in (np.float32, np.float64):
        race(np.zeros(1, dtype), np.zeros(1, np.int64), np.uint64(0), 0.0, 1.0, 0)
