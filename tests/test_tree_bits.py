"""A tree's nodes have the bits of plain decoding where a target attends to it path by path."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import pytest
import torch

from cascade.attention import PathRun, Plan, Reach, Span
from cascade.kvrows import KVRow
from cascade.model import TransformersModel, load
from cascade.rows import Feed
from cascade.trees import depth_first
from tests.tiny import VOCAB, tiny

Tree = tuple[list[int], list[int]]  # tokens, parents

CONTEXTS = (5, 190, 505, 1018)  # the last three: nodes on both sides of 192, 512 and 1,024 keys
CASES = [("llama", {}), ("gpt2", {}), ("gemma3", {}), ("mistral", {"sliding_window": 300}), ("gemma2", {})]
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "f32"])
MODELS = pytest.mark.parametrize(("family", "changes"), CASES, ids=[name for name, _ in CASES])


def target(family: str, dtype: torch.dtype, **changes: object) -> TransformersModel:
    """A target that the probe has found to be bit-exact, in trees too."""
    limit = "n_positions" if family == "gpt2" else "max_position_embeddings"
    model = load(tiny(family, dtype, **{limit: 2048}, **changes))
    if not model.probed.tree_bits:
        pytest.skip(f"the probe says {model.exactness}")
    assert model.by_path
    return model


def tree_of(rng: random.Random, size: int, branching: float = 0.4) -> Tree:
    """A random tree in depth-first order; siblings may have the same token, which is nobody's business here."""
    parents = [node - 1 if rng.random() > branching else rng.randint(-1, node - 1) for node in range(size)]
    order = depth_first(parents).tolist()
    return rng.choices(range(VOCAB), k=size), [-1 if parents[i] < 0 else order.index(parents[i]) for i in order]


def path_to(parents: Sequence[int], node: int) -> list[int]:
    return [*(path_to(parents, parents[node]) if parents[node] >= 0 else []), node]


def leaves(parents: Sequence[int]) -> Iterator[int]:
    return (node for node in range(len(parents)) if node not in parents)


def rows_of(model: TransformersModel) -> list[KVRow]:
    first = model.new_row()
    model.forward([Feed(first, random.Random(1).choices(range(VOCAB), k=5), 1)])
    rows = [first.fork() for _ in CONTEXTS]
    for row, length in zip(rows, CONTEXTS, strict=True):
        row.stretch(length)
    return rows


def decoded(model: TransformersModel, row: KVRow, tokens: Sequence[int]) -> torch.Tensor:
    """Logits after each token, one token per forward; [tokens, V]."""
    return torch.cat([model.forward([Feed(row, [token], 1)]) for token in tokens])


def node_by_node(model: TransformersModel, row: KVRow, context: Sequence[int], tree: Tree) -> torch.Tensor:
    """Logits after the context and after each node, [1 + N, V], by plain decoding that goes back for each branch."""
    out, base = [decoded(model, row, context)[-1:]], row.length
    for node, token in enumerate(tree[0]):
        row.crop(base + len(path_to(tree[1], node)) - 1)
        out.append(decoded(model, row, [token]))
    return torch.cat(out)


def fed(row: KVRow, context: Sequence[int], tree: Tree) -> Feed:
    return Feed(row, [*context, *tree[0]], len(tree[0]) + 1, tree[1])


def chain_by_chain(model: TransformersModel, row: KVRow, context: Sequence[int], tree: Tree) -> Iterator[torch.Tensor]:
    """For each leaf the logits of the nodes above it and of itself, read as one chain."""
    for leaf in leaves(tree[1]):
        path = path_to(tree[1], leaf)
        yield model.forward([Feed(row.fork(), [*context, *(tree[0][i] for i in path)], len(path))])


@DTYPES
@MODELS
@pytest.mark.parametrize("fine", [True, False], ids=["fine", "blocks"])
def test_nodes_have_plain_bits_alone_and_in_company(family: str, changes: dict, dtype: torch.dtype, fine: bool) -> None:
    model, rng = target(family, dtype, **changes), random.Random(7)
    if fine and not model.fine:
        pytest.skip("the probe says that bits depend on the view")
    model.fine = fine
    rows = rows_of(model)
    for size in (2, 8, 24):
        contexts = [rng.choices(range(VOCAB), k=rng.choice((1, 1, 4))) for _ in rows]
        trees = [tree_of(rng, size if i % 2 else rng.randint(2, size)) for i in range(len(rows))]
        given = list(zip(rows, contexts, trees, strict=True))
        wanted = [node_by_node(model, row.fork(), context, tree) for row, context, tree in given]
        for (row, context, tree), plain in zip(given, wanted, strict=True):
            assert torch.equal(model.forward([fed(row.fork(), context, tree)]), plain)
            for leaf, chain in zip(leaves(tree[1]), chain_by_chain(model, row, context, tree), strict=True):
                assert torch.equal(chain, plain[[1 + node for node in path_to(tree[1], leaf)]])
        chain = rng.choices(
            range(VOCAB), k=len(contexts[1]) + size
        )  # as wide as a tree: widths alone must not join them
        feeds = [fed(row.fork(), context, tree) for row, context, tree in given]
        feeds.insert(2, Feed(rows[0].fork(), chain, len(chain)))
        wanted.insert(2, decoded(model, rows[0].fork(), chain))
        assert torch.equal(model.forward(feeds), torch.cat(wanted))


@DTYPES
@MODELS
def test_what_follows_a_kept_path_has_plain_bits(family: str, changes: dict, dtype: torch.dtype) -> None:
    model, rng = target(family, dtype, **changes), random.Random(8)
    for row in rows_of(model):
        context, tree, after = [3, 4], tree_of(rng, 10), rng.choices(range(VOCAB), k=4)
        base, used = row.length + len(context), row.fork()
        model.forward([fed(used, context, tree), fed(row.fork(), context[:1], tree)])
        for node in range(len(tree[0])):
            path, kept, plain = path_to(tree[1], node), used.fork(), row.fork()
            kept.keep(base, path)
            wanted = decoded(model, plain, [*context, *(tree[0][i] for i in path), *after])[-len(after) :]
            assert kept.ids[: kept.length].tolist() == plain.ids[: plain.length - len(after)].tolist()
            assert torch.equal(model.forward([Feed(kept, after, len(after))]), wanted)


@pytest.mark.parametrize("size", [5, 16, 600])
def test_layers_that_see_chunks_count_positions(size: int) -> None:
    """Dummies included, which must see something, or what is no number gets into the cache."""
    model, rng = target("llama", torch.bfloat16), random.Random(size)
    model._survey.reaches = [Reach("chunk", size), Reach()]
    for width in (model.width, 40):
        model.width = width
        for row in rows_of(model):
            context, tree = [5, 6, 7], tree_of(rng, 20)
            wanted, used = node_by_node(model, row.fork(), context, tree), row.fork()
            assert torch.equal(model.forward([fed(used, context, tree)]), wanted)
            assert all(buffer.isfinite().all() for buffer in (*used._keys, *used._values))


def test_only_whole_trees_in_depth_first_order_are_cut() -> None:
    model = target("llama", torch.float32)
    row = rows_of(model)[0]

    def cuts(count: int, parents: list[int] | None, by_path: bool = True, dummies: int = 0) -> list[int]:
        return Span(row, [7] * (count + dummies), parents, dummies, by_path).cuts

    assert cuts(9, [-1, 0, 1, 0, 3, -1, 5]) == [0, 5, 7]
    assert cuts(9, [-1, 0, 1, 0, 3, -1, 5], dummies=3) == [0, 5, 7]
    assert cuts(9, [-1, 0, 1, 0, 3, -1, 5], by_path=False) == [0]
    assert cuts(9, None) == cuts(9, []) == cuts(4, [-1, 0, 1, 2]) == [0]
    assert cuts(3, [-1, -1, -1]) == [0, 1, 2]
    assert cuts(5, [-1, -1, 0, 1, 0]) == cuts(4, [-1, -1, 0, 0]) == cuts(4, [-1, 0, -1, 1]) == [0]
    assert cuts(2, [-1, -1, 1]) == [0]  # its first node is cached already


def test_trees_and_chains_of_one_width_do_not_share_a_run() -> None:
    model = target("llama", torch.float32)
    spans = [Span(row, [7] * 4, [-1, -1] if i == 1 else None, 0, True) for i, row in enumerate(rows_of(model))]
    runs = Plan(spans, {}, [], True).runs
    assert [(isinstance(run, PathRun), run.start, len(run.spans)) for run in runs] == [
        (False, 0, 1),
        (True, 4, 1),
        (False, 8, 2),
    ]


@MODELS
def test_attended_to_at_once_a_tree_has_other_bits(family: str, changes: dict) -> None:
    """Which is why there are two ways; if a kernel gave the same bits with a mask, one would do."""
    model, rng, other = target(family, torch.bfloat16, **changes), random.Random(9), 0
    model.by_path = False
    for row in rows_of(model):
        tree = tree_of(rng, 24)
        plain = node_by_node(model, row.fork(), [3], tree)
        found = model.forward([fed(row.fork(), [3], tree)])
        torch.testing.assert_close(found.float(), plain.float(), rtol=0.2, atol=0.2)
        other += int((found != plain).any(-1).sum())
    assert other > 0
