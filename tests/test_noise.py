"""The noise: fixed for ever by vectors, equal to its twin, and as random as it claims.

Every statistical bound below is passed by true randomness but for a probability under 1e-5; the seeds
are fixed, so each passes always or never.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from cascade.noise import Noise, race, sample_seed
from tests import reference

# (seed, position, token, u), u exact. A change here changes the text of every seeded request.
VECTORS = [
    (0, 0, 0, 0.1354966520076858),
    (0, 0, 1, 0.7161301401059977),
    (0, 1, 0, 0.2537593294460784),
    (1, 0, 0, 0.6017040735679976),
    (7, 1000, 151_935, 0.596170713533618),
    (2**64 - 1, 2**31, 2**31, 0.41473826809853975),
    # Outside 64 bits the seed is hashed first.
    (-1, 3, 5, 0.3535931516885661),
    (2**64, 3, 5, 0.4956358952696637),
    (-(2**70), 3, 5, 0.06276731112065026),
    (10**100, 3, 5, 0.8201891850858652),
]
SEEDS = st.integers(0, 2**64 - 1)


@pytest.mark.parametrize(("seed", "position", "token", "u"), VECTORS)
def test_published_vectors(seed: int, position: int, token: int, u: float) -> None:
    assert Noise(seed).uniform(position, token) == u
    assert Noise(seed).gumbel(position, token) == pytest.approx(-math.log(-math.log(u)), rel=1e-15)


def test_sample_seeds_are_fixed_and_sample_0_is_the_seed() -> None:
    assert [sample_seed(7, i) for i in range(3)] == [7, 18118800167219180132, 8844090834777020931]
    assert sample_seed(-1, 0) == -1
    assert sample_seed(-1, 1) == 2481599830710041038
    seeds = {sample_seed(seed, i) for seed in range(-50, 50) for i in range(50)}
    assert len(seeds) == 100 * 50


@given(SEEDS, st.integers(0, 2**40), st.lists(st.integers(0, 2**40), min_size=1, max_size=9))
@settings(max_examples=100, deadline=None)
def test_equals_its_twin(seed: int, position: int, tokens: list[int]) -> None:
    noise = Noise(seed)
    assert noise.key(position) == reference.key(seed, position)
    assert noise.uniform(position, tokens).tolist() == [reference.uniform(seed, position, t) for t in tokens]
    twin = [reference.gumbel(seed, position, t) for t in tokens]
    np.testing.assert_allclose(noise.gumbel(position, tokens), twin, rtol=1e-13, atol=1e-15)


def test_keeps_shapes_and_takes_any_integers() -> None:
    noise = Noise(np.int64(3))  # type: ignore[arg-type]
    assert noise.uniform(0, np.arange(6, dtype=np.int32).reshape(2, 3)).shape == (2, 3)
    assert noise.gumbel(0, []).shape == (0,)
    assert noise.uniform(0, 4).shape == ()
    frozen = np.arange(4)
    frozen.setflags(write=False)
    assert noise.uniform(0, frozen).tolist() == noise.uniform(0, [0, 1, 2, 3]).tolist()


# -- as random as it claims --------------------------------------------------------------------------


def _ks(u: NDArray[np.float64]) -> float:
    """The Kolmogorov-Smirnov distance to the uniform distribution, times the root of n."""
    n = len(u)
    u = np.sort(u)
    return float(max((np.arange(1, n + 1) / n - u).max(), (u - np.arange(n) / n).max()) * math.sqrt(n))


def _grid(seeds: range, positions: range, tokens: range) -> NDArray[np.float64]:
    ids = np.arange(tokens.start, tokens.stop)
    return np.array([[Noise(seed).uniform(position, ids) for position in positions] for seed in seeds])


@pytest.mark.parametrize("first", [0, 2**63, 10**12])
def test_marginals_are_uniform_along_every_argument(first: int) -> None:
    # P(distance > 2.6) = 2 exp(-2 * 2.6**2) = 3e-6
    assert _ks(_grid(range(first, first + 40), range(first, first + 40), range(40)).ravel()) < 2.6
    assert _ks(_grid(range(first, first + 4000), range(1), range(1)).ravel()) < 2.6
    assert _ks(_grid(range(1), range(first, first + 4000), range(1)).ravel()) < 2.6
    assert _ks(_grid(range(1), range(1), range(first % 2**31, first % 2**31 + 4000)).ravel()) < 2.6


def test_neighbours_are_uncorrelated() -> None:
    grid = _grid(range(30), range(30), range(60)) - 0.5
    for axis in range(3):
        for lag in (1, 2, 8):
            a, b = np.moveaxis(grid, axis, 0)[:-lag].ravel(), np.moveaxis(grid, axis, 0)[lag:].ravel()
            for x, y in ((a, b), (a**2 - 1 / 12, b**2 - 1 / 12)):
                score = (x * y).sum() / math.sqrt((x**2).sum() * (y**2).sum()) * math.sqrt(len(x))
                assert abs(score) < 5  # normal: 6e-7


def test_no_stream_is_a_shifted_copy_of_another() -> None:
    # Streams that share an orbit would share numbers; 2**18 of 2**52 numbers collide with probability 8e-6.
    grid = _grid(range(8), range(8), range(4096))
    assert len(np.unique(grid)) == grid.size


@pytest.mark.parametrize("vary", ["seed", "position"])
def test_argmax_of_log_p_plus_noise_follows_p(vary: str) -> None:
    p = np.array([0.4, 0.2, 0.15, 0.1, 0.08, 0.04, 0.02, 0.01])
    n = 20_000
    counts = np.zeros(len(p))
    for i in range(n):
        noise, position = (Noise(i), 17) if vary == "seed" else (Noise(17), i)
        counts[np.argmax(np.log(p) + noise.gumbel(position, np.arange(len(p))))] += 1
    chi_square = ((counts - n * p) ** 2 / (n * p)).sum()
    assert chi_square < 40.5  # 7 degrees of freedom: 1e-6


# -- the race ----------------------------------------------------------------------------------------


def _race(scores: NDArray[np.floating], ids: NDArray[np.int64], noise: Noise, temperature: float) -> tuple[int, int]:
    """The race's winner and the twin's, as indices."""
    top, lead = float(scores.max()), int(scores.argmax())
    winner = race(scores, ids, np.uint64(noise.key(5)), top, temperature, lead)
    with np.errstate(over="ignore"):
        values = (scores.astype(np.float64) - top) / temperature + noise.gumbel(5, ids)
    return winner, int(values.argmax())


@given(
    seed=st.integers(0, 2**32),
    n=st.sampled_from([1, 2, 63, 64, 65, 200, 1000]),
    spread=st.sampled_from([0.0, 0.5, 3.0, 12.0]),
    temperature=st.sampled_from([1e-300, 1e-3, 0.3, 1.0, 5.0, 1e300]),
    dtype=st.sampled_from([np.float32, np.float64]),
    holes=st.booleans(),
)
@settings(max_examples=150, deadline=None)
def test_race_equals_its_twin(seed: int, n: int, spread: float, temperature: float, dtype: type, holes: bool) -> None:
    rng = np.random.default_rng(seed)
    scores = (np.round(rng.standard_normal(n) * 4) / 4 * spread).astype(dtype)
    if holes:
        scores[rng.random(n) < 0.5] = -np.inf
        scores[rng.integers(n)] = 1.0
    ids = np.sort(rng.choice(10 * n, n, replace=False))
    winner, twin = _race(scores, ids, Noise(seed), temperature)
    assert winner == twin


@pytest.mark.parametrize("margin", [1e-9, 0.0, -1e-9])
def test_race_never_dismisses_a_winner(margin: float) -> None:
    """Any token can be lifted to just above, or just below, the leader, however far behind its logit is."""
    ids, noise = np.arange(4096), Noise(11)
    gumbel = noise.gumbel(5, ids)
    for token in (*np.argsort(gumbel)[-40:], *range(0, 4096, 200)):
        scores = np.full(4096, -60.0)
        scores[0] = 0.0
        scores[token] = min(gumbel[0] - gumbel[token] + margin, 0.0)
        winner, twin = _race(scores, ids, noise, 1.0)
        assert winner == twin


def test_equals_go_to_the_lowest_id() -> None:
    # One id at two places has one Gumbel number: an exact tie, whichever of the two leads.
    scores, ids = np.zeros(2), np.array([4, 4])
    for lead in (0, 1):
        assert race(scores, ids, np.uint64(1), 0.0, 1.0, lead) == 0


def test_race_at_the_size_of_a_vocabulary() -> None:
    rng = np.random.default_rng(0)
    scores = (rng.standard_normal(151_936) * 2.5).astype(np.float32)
    for seed, peak in enumerate([6.0, 12.0, 18.0, 30.0]):
        scores[1000 * seed + 7] = peak
        winner, twin = _race(scores, np.arange(len(scores)), Noise(seed), 1.0)
        assert winner == twin
