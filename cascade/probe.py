"""What a model can do, found at load by trying it, through the `CausalModel` protocol alone.

The text is nonsense, but every check compares the model with itself: packed rows with plain reading, a
cache that was rewound with one that was not, a tree with the chain in it, and the bits of one token's
logits across forwards of other widths. Rows share forwards wherever they can: a probe costs about as
much as decoding 16 tokens.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cascade.errors import LoadError
from cascade.rows import Feed, Row

TOLERANCE = {"float64": 1e-4, "float32": 2e-3, "float16": 0.15, "bfloat16": 0.15, "int8": 0.4}
"""How far a token's logits may lie apart on average, as a share of their spread.

Rounding alone, amplified by 30 layers over a nonsense text, makes 0.05 in bfloat16 and 0.2 in int8; and
some models take a softmax in float32 whatever their dtype.
"""

LENGTH = 24  # tokens of the texts; longer than the windows of small test models
PIECES = (40, 11)  # a prompt is read in these, and at once
STEPS = 16  # tokens compared for their bits
LONG = (1016, 2040)  # contexts from which STEPS tokens cross 1,024 and 2,048 keys
WIDTHS = (1, 2, 4, 8)
MIXES = ((7, 1, 8), (3, 5, 1), (1, 5, 2), (2, 1, 2), (0, 4, 0), (1, 1, 1), (2, 0, 0), (0, 1, 1), (0, 0, 1))
"""Forwards whose bits are compared: tokens per row, 16 down to 1 in all."""

PRODUCTS = (17, 16, 12, 9, 8, 7, 6, 5, 4, 3, 2, 1)
"""Tokens in the matrix products whose bits are compared."""

TREE = (-1, 0, 1, 2, 1, 4, -1, 6)
"""Parents of the tree whose bits are compared with those of its paths."""

BEFORE = 6  # tokens before it: from LONG on its nodes cross 1,024 and 2,048 keys


@dataclass(frozen=True)
class ProbeResult:
    """What was found; see `CausalModel` for `trees` and `exactness`.

    Attributes:
        width: the smallest number of tokens in a forward from which on a token's logits have the same
            bits whatever else is in it; None where there is none.
        fine: whether that holds for views of less than whole blocks; see `padded_view`.
        tree_bits: whether a tree's nodes have the same bits as the chains they end.
        chain_error, rewind_error, tree_error: distance from plain reading, as in `TOLERANCE`.
        longest: the longest context at which bits were compared.
        seconds: how long it took.
    """

    trees: bool
    width: int | None
    fine: bool
    tree_bits: bool
    exactness: str
    chain_error: float
    rewind_error: float
    tree_error: float
    longest: int
    seconds: float


def probe(model: Any) -> ProbeResult:
    """Tries a model out. Its `width` must be 1 meanwhile; `fine`, where it has it, is tried both ways.

    Trees are fed as the model is set up for them; see `PackedModel.by_path`.

    Args:
        model: a `CausalModel`. Where it has `reference(texts) -> logits [R, L, V]`, that is what packed
            forwards are compared with, else with reading one row at once. Where it has `narrowest()`,
            no smaller width is believed: see `narrowest_product`.

    Raises:
        LoadError: packed rows or a rewound cache give other logits than plain reading does.
    """
    began = time.perf_counter()
    trial, limit = _Trial(model), TOLERANCE.get(model.dtype, 0.15)
    chain_error, rewind_error = trial.chains()
    if not chain_error <= limit:
        raise LoadError(
            f"{model.name} gives other logits with cached keys than without ({chain_error:.2g} of their spread): "
            "cascade cannot drive this model"
        )
    if not rewind_error <= limit:
        raise LoadError(
            f"{model.name} cannot be rewound to an earlier token (logits are off by {rewind_error:.2g} of their "
            "spread): speculation needs a model that can"
        )
    tree_error = trial.tree() if model.trees else float("inf")
    trees, (width, fine, longest) = tree_error <= limit, trial.bits()
    tree_bits = trees and width is not None and trial.tree_bits()
    exactness = f"yes, from width {width}" if width else "no: a token's logits depend on what shares its forward"
    return ProbeResult(
        trees=trees,
        width=width,
        fine=fine,
        tree_bits=tree_bits,
        exactness=exactness + (", but not in trees" if width and trees and not tree_bits else ""),
        chain_error=chain_error,
        rewind_error=rewind_error,
        tree_error=tree_error,
        longest=longest,
        seconds=time.perf_counter() - began,
    )


class _Trial:
    """One model, two texts, their logits read plainly, and rows in the middle of them."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.texts = [self._text(LENGTH, seed) for seed in (1, 2)]
        self.expected = self._plain()
        self.half = len(self.texts[0]) // 2

    def _text(self, length: int, seed: int) -> list[int]:
        room = length if self.model.max_length is None else min(length, self.model.max_length)
        return [(i * i * 7919 + (i + 1) * 104729 * seed) % self.model.vocab_size for i in range(room)]

    def _plain(self) -> list[Tensor]:
        if hasattr(self.model, "reference"):
            return list(self.model.reference(self.texts))
        return [self.model.forward([Feed(self.model.new_row(), text, len(text))]) for text in self.texts]

    def chains(self) -> tuple[float, float]:
        """Three ragged rows in two packed forwards; and beside them a row that reads two texts in turn."""
        (text, other), n, half = self.texts, len(self.texts[0]), self.half
        pieces = [(text, 0, 2 * n // 3, 3), (other, 1, n // 3, 1), (text, 0, n // 8 + 1, 2)]
        rows = [self.model.new_row() for _ in range(4)]
        first = [Feed(row, t[:start], 1) for row, (t, _, start, _) in zip(rows[:3], pieces, strict=True)]
        found = [self.model.forward([*first, Feed(rows[3], text[:half] + other[half:], 1)])[:3]]
        rows[3].crop(half)
        then = [Feed(row, t[i : i + q], q) for row, (t, _, i, q) in zip(rows[:3], pieces, strict=True)]
        logits = self.model.forward([*then, Feed(rows[3], text[half:], n - half)])
        found.append(logits[: half - n])
        wanted = [self.expected[which][start - 1 : start] for _, which, start, _ in pieces]
        wanted += [self.expected[which][i : i + q] for _, which, i, q in pieces]
        chain_error = _distance(torch.cat(found), torch.cat(wanted))
        return chain_error, _distance(logits[half - n :], self.expected[0][half:])

    def tree(self) -> float:
        """Two branches side by side, of which one is the text; then that branch is kept and read on."""
        row, (text, other), half = self.model.new_row(), self.texts, self.half
        self.model.forward([Feed(row, text[: half - 1], 1)])
        tokens = [text[half - 1], other[0], text[half], other[1], text[half + 1]]
        found = [self.model.forward([Feed(row, tokens, 5, parents=[-1, -1, 0, 1])])[[0, 2, 4]]]
        row.keep(half, [1, 3])
        found.append(self.model.forward([Feed(row, text[half + 2 : half + 4], 2)]))
        return _distance(torch.cat(found), self.expected[0][half - 1 : half + 4])

    def bits(self) -> tuple[int | None, bool, int]:
        """The smallest width from which bits stay the same, with which views, and the longest context tried."""
        longest, least = 0, self.model.narrowest() if hasattr(self.model, "narrowest") else 1
        if least > max(WIDTHS):
            return None, True, longest
        for fine in (True, False) if hasattr(self.model, "fine") else (True,):
            if hasattr(self.model, "fine"):
                self.model.fine = fine
            rows, steps = self._rows()
            self.rows, self.steps = rows[:3], steps
            longest = max(row.length for row in rows) + steps
            *wanted, whole, pieces = self._step(rows, (steps, steps, steps, 2, 2))
            if not torch.equal(whole, pieces):
                continue
            mixes = [mix for mix in MIXES if max(mix) <= steps and sum(mix) >= least]
            different = next((sum(mix) for mix in mixes if not self._same(rows[:3], mix, wanted)), 0)
            for width in WIDTHS:
                if width > different and width >= least:
                    return width, fine, longest
        return None, True, longest

    def tree_bits(self) -> bool:
        """Whether a tree's nodes, alone and beside others, have the bits of its paths fed as chains.

        Each forward is wider than the largest of `WIDTHS`.
        """
        paths, rows, tokens = ((0, 1, 2, 3), (0, 1, 4, 5), (6, 7)), self.rows, self.texts[1][: len(TREE) + 1]
        before = min(BEFORE, self.steps - 1 - len(paths[0]))
        if before < 1 or len(tokens) <= len(TREE):
            return False  # its context is too short for any of this
        self.model.forward([Feed(row, self.texts[0][:before], 1) for row in rows])
        wanted: list[dict[int, Tensor]] = [{} for _ in rows]
        for path in paths:
            chain = [tokens[0], *(tokens[node + 1] for node in path)]
            for found, part in zip(wanted, self._fed(rows, chain), strict=True):
                found.update(zip((-1, *path), part, strict=True))
        beside, alone = self._fed(rows, tokens, TREE), self._fed(rows[-1:], tokens, TREE)
        return all(
            torch.equal(line, nodes[node])
            for part, nodes in zip((*beside, *alone), (*wanted, wanted[-1]), strict=True)
            for node, line in enumerate(part, -1)
        )

    def _fed(self, rows: Sequence[Row], tokens: Sequence[int], parents: Sequence[int] | None = None) -> list[Tensor]:
        """Logits of the same tokens in each row, [rows][tokens, V]; the rows are left as they were."""
        lengths = [row.length for row in rows]
        logits = self.model.forward([Feed(row, tokens, len(tokens), parents) for row in rows])
        for row, length in zip(rows, lengths, strict=True):
            row.crop(length)
        return list(logits.split(len(tokens)))

    def _rows(self) -> tuple[list[Row], int]:
        """A short row, two as long as the model can hold, two that read one prompt whole and in pieces; and
        how many steps fit behind.
        """
        limit, prompt = self.model.max_length, self._text(sum(PIECES), 3)
        prompt = prompt if limit is None else prompt[: limit - 2]
        short, whole, pieces = (self.model.new_row() for _ in range(3))
        cut = min(PIECES[0], max(1, len(prompt) - PIECES[1]))
        texts = (self.texts[0][: self.half], prompt, prompt[:cut])
        self.model.forward([Feed(row, text, 1) for row, text in zip((short, whole, pieces), texts, strict=True)])
        self.model.forward([Feed(pieces, prompt[cut:], 1)])
        steps = STEPS if limit is None else min(STEPS, limit - self.half)
        rows: list[Row] = [short]
        for length in LONG:
            row = short.fork()
            if hasattr(row, "stretch"):
                row.stretch(max(row.length, length if limit is None else min(length, limit - steps)))
            rows.append(row)
        return [*rows, whole, pieces], steps

    def _step(self, rows: Sequence[Row], mix: Sequence[int]) -> list[Tensor]:
        """Logits of each row's next tokens, as many as `mix` says; the rows are left as they were."""
        lengths = [row.length for row in rows]
        feeds = [Feed(row, self.texts[0][:count], count) for row, count in zip(rows, mix, strict=True) if count]
        logits = self.model.forward(feeds)
        for row, length in zip(rows, lengths, strict=True):
            row.crop(length)
        return list(logits.split(list(mix)))

    def _same(self, rows: Sequence[Row], mix: Sequence[int], wanted: Sequence[Tensor]) -> bool:
        found = self._step(rows, mix)
        return all(torch.equal(part, whole[: len(part)]) for part, whole in zip(found, wanted, strict=True))


def _distance(found: Tensor, expected: Tensor) -> float:
    """How far apart logits [n, V] are on average, as a share of a token's spread; infinite for NaN."""
    found, expected = found.double(), expected.double()
    spread = (expected - expected.mean(-1, keepdim=True)).square().mean(-1).sqrt()
    errors = (found - expected).square().mean(-1).sqrt() / spread.clamp_min(1e-30)
    return float(errors.mean()) if errors.isfinite().all() else float("inf")


def narrowest_product(module: Any) -> int:
    """From how many tokens on the linear layers' products have the same bits as wider ones.

    Layers show by themselves what a whole model may hide for a long while in its rounding: one of each
    shape is tried. The head is left out, since its products are the logits.
    """
    head = module.get_output_embeddings() if hasattr(module, "get_output_embeddings") else None
    layers: dict[Any, tuple[Any, int, int]] = {}
    for part in module.modules():
        outputs = getattr(part, "out_features", None) or getattr(part, "nf", None)  # nf: GPT-2's transposed layer
        if outputs and part is not head:
            inputs = getattr(part, "in_features", None) or part.weight.shape[0]
            layers.setdefault((type(part), inputs, outputs), (part, inputs, outputs))
    dtype = next((p.dtype for p in module.parameters() if p.is_floating_point()), torch.float32)
    # In 16 bits one token alone takes another kernel on every CPU we know. It shows in one of hundreds of tokens where
    # layers are small, too rarely to be tried out.
    least = 1 if dtype.itemsize == 2 and next(module.parameters()).device.type == "cpu" else 0
    with torch.inference_mode():
        return max([least, *(_widest_difference(*layer, dtype) for layer in layers.values())]) + 1


def _widest_difference(layer: Any, inputs: int, outputs: int, dtype: torch.dtype) -> int:
    """The largest tried number of tokens with other bits than 32 at once have; 0 for none."""
    x = _revealing(layer, inputs, outputs).to(dtype)
    whole = layer(x)
    tries = min(max(2, (1 << 24) // (inputs * outputs)), 8)
    for count in PRODUCTS:
        for start in range(0, min(32 - count, tries * count), count):
            if not torch.equal(layer(x[:, start : start + count]), whole[:, start : start + count]):
                return count
    return 0


def _revealing(layer: Any, inputs: int, outputs: int) -> Tensor:
    """32 tokens [1, 32, inputs] that almost cancel in the first outputs of a layer.

    What is left there of large terms is small, so a sum taken in another order shows in its first digits.
    """
    weight = getattr(layer, "weight", None)
    device = torch.device("cpu") if weight is None else weight.device
    x = (torch.arange(32 * inputs, device=device) * 7919 % 1013 / 256 - 2).sin().view(32, inputs)
    if weight is not None:
        rows = (weight if weight.shape[0] == outputs else weight.t())[: min(16, inputs // 2)].float()
        basis = torch.linalg.qr(rows.t()).Q
        x = x - x @ basis @ basis.t()
    return x[None]
