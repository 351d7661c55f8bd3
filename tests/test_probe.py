"""What the probe says is true of real models, and it notices what is wrong with made-up ones."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from cascade.errors import LoadError
from cascade.model import load
from cascade.probe import probe
from cascade.rows import Feed, Row
from tests.tiny import FAMILIES, LENGTH, VOCAB, tiny

CASES = [(family, torch.float64) for family in FAMILIES if family not in ("mamba", "gpt_oss")]
CASES += [(family, torch.bfloat16) for family in FAMILIES if family != "mamba"]
CASES += [("llama", torch.float32), ("gpt2", torch.float32), ("gemma3", torch.float32)]


@pytest.mark.parametrize(("family", "dtype"), CASES, ids=lambda value: str(value).removeprefix("torch."))
def test_what_the_probe_claims_is_true(family: str, dtype: torch.dtype) -> None:
    model = load(tiny(family, dtype))
    found = model.probed
    assert found is not None
    assert (model.trees, model.width) == (found.trees, found.width or 1)
    assert model.exactness.startswith(f"yes, from width {model.width}" if found.width else "no: ")
    assert found.trees == (family != "bloom")
    assert found.tree_bits == (found.trees and found.width is not None) == model.by_path
    assert "but not in trees" not in model.exactness
    if found.width:
        assert found.longest == LENGTH
        assert_bits_do_not_depend_on_company(model, random.Random(1))


def assert_bits_do_not_depend_on_company(model: Any, rng: random.Random) -> None:
    """Four texts read in random pieces with random company have the bits of reading each token alone."""
    texts = [rng.choices(range(VOCAB), k=rng.randint(30, 50)) for _ in range(4)]
    alone = []
    for text in texts:
        row = model.new_row()
        alone.append(torch.cat([model.forward([Feed(row, [token], 1)]) for token in text]))
    for _ in range(3):
        rows = [model.new_row() for _ in texts]
        while pending := [i for i, text in enumerate(texts) if rows[i].length < len(text)]:
            feeds, places = [], []
            for i in rng.sample(pending, rng.randint(1, len(pending))):
                start = rows[i].length
                piece = texts[i][start : start + rng.choice((1, 1, 2, 3, 5, 8, 20))]
                feeds.append(Feed(rows[i], piece, len(piece)))
                places.append(alone[i][start : start + len(piece)])
            assert torch.equal(model.forward(feeds), torch.cat(places))


# -- made-up models --------------------------------------------------------------------------------


class Hashing:
    """Logits are a function of all tokens a node may see, so whatever is seen wrongly shows."""

    name, dtype, vocab_size, trees, exactness, end_ids = "made-up", "float64", 53, True, "", ()

    def __init__(self, max_length: int | None = None) -> None:
        self.max_length = max_length
        self.longest = 0

    def new_row(self) -> Row:
        return Row()

    def logits(self, prefix: Sequence[int]) -> torch.Tensor:
        seed = [len(prefix), *prefix]
        return torch.from_numpy(np.random.default_rng(seed).standard_normal(self.vocab_size))

    def noise(self, total: int) -> float:
        return 0.0

    def forward(self, feeds: Sequence[Feed]) -> torch.Tensor:
        out = []
        total = sum(len(feed.tokens) for feed in feeds)
        for feed in feeds:
            row, base = feed.row, feed.row.length
            prefixes: list[list[int]] = []
            context = len(feed.tokens) - len(feed.parents or ())
            for i, token in enumerate(feed.tokens):
                if feed.parents is None or i < context:
                    before = self.cached(row)[:base] + list(feed.tokens[:i])
                else:
                    parent = feed.parents[i - context]
                    before = prefixes[context + parent if parent >= 0 else context - 1]
                prefixes.append([*before, token])
                self.longest = max(self.longest, len(prefixes[-1]))
            row.append(feed.tokens)
            out += [self.logits(prefix) + self.noise(total) for prefix in prefixes[len(prefixes) - feed.keep :]]
        return torch.stack(out)

    def cached(self, row: Row) -> list[int]:
        return row.ids[: row.length].tolist()


def test_a_sound_model_passes() -> None:
    found = probe(Hashing())
    assert (found.trees, found.width, found.chain_error, found.tree_error) == (True, 1, 0, 0)
    assert found.exactness == "yes, from width 1"


@pytest.mark.parametrize("limit", [17, 24, 40, 64])
def test_a_short_context_is_never_exceeded(limit: int) -> None:
    model = Hashing(limit)
    found = probe(model)
    assert (found.width, found.tree_bits) == (1, True)
    assert model.longest <= limit


@pytest.mark.parametrize(("narrow", "width"), [(1, 2), (2, 4), (3, 4), (4, 8), (5, 8), (8, None), (16, None)])
def test_the_width_is_the_smallest_from_which_bits_hold(narrow: int, width: int | None) -> None:
    class Narrow(Hashing):
        def noise(self, total: int) -> float:
            return 1e-14 if total <= narrow else 0.0

    found = probe(Narrow())
    assert found.width == width
    assert found.exactness.startswith(f"yes, from width {width}" if width else "no: ")


def test_rows_that_see_each_other_are_noticed() -> None:
    class Leaking(Hashing):
        def forward(self, feeds: Sequence[Feed]) -> torch.Tensor:
            logits = super().forward(feeds)
            return logits if len(feeds) == 1 else logits + logits.roll(1, 0)

    with pytest.raises(LoadError, match="made-up gives other logits with cached keys"):
        probe(Leaking())


def test_a_model_that_cannot_go_back_is_noticed() -> None:
    class Stubborn(Hashing):
        """Keeps in mind what was cropped."""

        def __init__(self) -> None:
            super().__init__()
            self.highest: dict[int, int] = {}

        def forward(self, feeds: Sequence[Feed]) -> torch.Tensor:
            back = any(feed.row.length < self.highest.get(id(feed.row), 0) for feed in feeds)
            for feed in feeds:
                self.highest[id(feed.row)] = feed.row.length + len(feed.tokens)
            if back:
                return super().forward(feeds).flip(-1)
            return super().forward(feeds)

        def new_row(self) -> Row:
            row = super().new_row()
            self.highest[id(row)] = 0
            return row

    with pytest.raises(LoadError, match="made-up"):
        probe(Stubborn())


def test_a_tree_misread_means_chains_only() -> None:
    class Chains(Hashing):
        def forward(self, feeds: Sequence[Feed]) -> torch.Tensor:
            return super().forward([Feed(feed.row, feed.tokens, feed.keep) for feed in feeds])

    found = probe(Chains())
    assert not found.trees
    assert found.width == 1


@pytest.mark.parametrize("feeds", [(1, 3), (1,), (3,)], ids=["always", "alone", "in company"])
def test_a_tree_with_bits_of_its_own_is_noticed(feeds: Sequence[int]) -> None:
    wrong = feeds

    class Rounding(Hashing):
        def forward(self, feeds: Sequence[Feed]) -> torch.Tensor:
            logits = super().forward(feeds)
            if feeds[-1].parents is not None and len(feeds) in wrong:
                logits[-1] += 1e-14
            return logits

    found = probe(Rounding())
    assert (found.trees, found.width, found.tree_bits) == (True, 1, False)
    assert found.exactness == "yes, from width 1, but not in trees"
    assert probe(Hashing()).tree_bits


def test_not_a_number_is_not_close() -> None:
    class Broken(Hashing):
        def forward(self, feeds: Sequence[Feed]) -> torch.Tensor:
            logits = super().forward(feeds)
            logits[-1] = float("nan")
            return logits

    with pytest.raises(LoadError, match="made-up"):
        probe(Broken())
