"""The transformers adapter on tiny random models: packed rows, trees, windows, rewinds, and models left alone."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from cascade.attention import Reach
from cascade.kvrows import BLOCK, KVRow, padded_view
from cascade.model import TransformersModel, load
from cascade.rows import Feed, Row
from cascade.survey import reach_of
from cascade.testing import ToyModel
from cascade.trees import depth_first, depths
from tests.tiny import FAMILIES, FOUR, LENGTH, VOCAB, WINDOW, tiny

EVERY = [name for name in FAMILIES if name != "mamba"]
TREES = [name for name in EVERY if name != "bloom"]
CLOSE = {"rtol": 0, "atol": 1e-4}  # float64; but some models take their softmax in float32


def driven(family: str, **changes: Any) -> TransformersModel:
    """A model that has been surveyed, not probed: these tests check what the probe checks, and more."""
    dtype = torch.float32 if family == "gpt_oss" else torch.float64  # its experts know no float64
    model = TransformersModel(tiny(family, dtype, **changes), family)
    model.survey(packed=family != "bloom")
    return model


def plain(model: TransformersModel, ids: Sequence[int]) -> torch.Tensor:
    return model.reference([ids])[0]


def ids_of(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(3, VOCAB), k=length)


# -- packed rows -----------------------------------------------------------------------------------


@pytest.mark.parametrize("family", EVERY)
def test_ragged_rows_give_what_each_gives_alone(family: str) -> None:
    model, rng = driven(family), random.Random(1)
    texts = [ids_of(seed, 40 + 3 * seed) for seed in range(4)]  # well past the windows
    rows = [model.new_row() for _ in texts]
    found: list[list[torch.Tensor]] = [[] for _ in texts]
    while any(row.length < len(text) for row, text in zip(rows, texts, strict=True)):
        feeds, who = [], []
        for i, (row, text) in enumerate(zip(rows, texts, strict=True)):
            count = min(rng.choice((0, 1, 1, 2, 5, 13)), len(text) - row.length)
            if count:
                feeds.append(Feed(row, text[row.length : row.length + count], count))
                who.append(i)
        if feeds:
            logits = model.forward(feeds).split([feed.keep for feed in feeds])
            for i, part in zip(who, logits, strict=True):
                found[i].append(part)
    for text, parts in zip(texts, found, strict=True):
        torch.testing.assert_close(torch.cat(parts), plain(model, text), **CLOSE)


@pytest.mark.parametrize("family", FOUR)
def test_only_kept_tokens_have_logits_in_the_order_of_the_feeds(family: str) -> None:
    model = driven(family)
    texts = [ids_of(1, 9), ids_of(2, 3), ids_of(3, 17), ids_of(4, 3)]
    feeds = [Feed(model.new_row(), text, keep) for text, keep in zip(texts, (2, 3, 0, 1), strict=True)]
    logits = model.forward(feeds)
    wanted = [plain(model, texts[0])[-2:], plain(model, texts[1]), plain(model, texts[3])[-1:]]
    torch.testing.assert_close(logits, torch.cat(wanted), **CLOSE)
    assert [feed.row.length for feed in feeds] == [9, 3, 17, 3]
    assert model.forward([Feed(model.new_row(), texts[0], 0)]).shape == (0, VOCAB)


@pytest.mark.parametrize("family", ["llama", "gemma3", "bloom"])
def test_long_prompts_go_in_pieces_and_buffers_grow(family: str) -> None:
    model = driven(family, **({} if family == "bloom" else {"max_position_embeddings": 2048}))
    text = ids_of(1, 1100)
    row = model.new_row()
    logits = [model.forward([Feed(row, text[:1030], 6)])]  # 512 + 512 + 6
    logits.append(model.forward([Feed(row, text[1030:], 70), Feed(model.new_row(), text[:2], 0)]))
    torch.testing.assert_close(torch.cat(logits), plain(model, text)[1024:], **CLOSE)
    assert row.length == 1100
    assert row.capacity % BLOCK == 0
    assert row.ids[:1100].tolist() == text


@pytest.mark.parametrize("length", [511, 512, 513, 520])
def test_pieces_leave_what_must_stay_together(length: int) -> None:
    model = driven("llama", max_position_embeddings=1024)
    text = ids_of(1, length)
    row = model.new_row()
    logits = model.forward([Feed(row, text, 9, parents=[-1, 0, 1, 2, 3, 4, 5, 6])])
    torch.testing.assert_close(logits, plain(model, text)[-9:], **CLOSE)


def test_logits_are_ordinary_tensors() -> None:
    model = driven("llama")
    logits = model.forward([Feed(model.new_row(), [5, 6], 2)])
    logits.mul_(2)  # forbidden on tensors of inference mode
    assert not logits.requires_grad
    assert not logits.is_inference()


@pytest.mark.parametrize("family", ["llama", "gpt2", "bloom"])
@pytest.mark.parametrize("width", [2, 8])
def test_dummies_fill_the_width_up_to_the_last_position(family: str, width: int) -> None:
    limit = {"gpt2": "n_positions", "bloom": "seq_length"}.get(family, "max_position_embeddings")
    model = driven(family, **{limit: 24})
    model.width, text = width, ids_of(1, 24)
    row, found = model.new_row(), []
    for token in text:
        found.append(model.forward([Feed(row, [token], 1)]))
        assert row.length == len(found)
    torch.testing.assert_close(torch.cat(found), plain(model, text), **CLOSE)


def test_a_failed_forward_leaves_rows_as_they_were(monkeypatch) -> None:
    model, text = driven("llama"), ids_of(1, 12)
    row = model.new_row()
    model.forward([Feed(row, text[:8], 1)])
    with monkeypatch.context() as patch:
        patch.setattr(model.module.lm_head, "forward", lambda x: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model.forward([Feed(row, text[8:], 4)])
    assert row.length == 8
    torch.testing.assert_close(model.forward([Feed(row, text[8:], 4)]), plain(model, text)[8:], **CLOSE)


# -- rewinding, trees, copies ----------------------------------------------------------------------


@pytest.mark.parametrize("family", EVERY)
def test_a_rewound_row_is_as_good_as_new(family: str) -> None:
    model, text = driven(family), ids_of(1, 50)
    row = model.new_row()
    model.forward([Feed(row, text[:30] + ids_of(2, 20), 1)])
    row.crop(30)
    torch.testing.assert_close(model.forward([Feed(row, text[30:], 20)]), plain(model, text)[30:], **CLOSE)


def random_tree(rng: random.Random, size: int) -> list[int]:
    return [rng.randint(-1, node - 1) for node in range(size)]


def path_to(parents: Sequence[int], node: int) -> list[int]:
    path = [node]
    while parents[path[0]] >= 0:
        path.insert(0, parents[path[0]])
    return path


def in_preorder(parents: Sequence[int]) -> list[int]:
    order = depth_first(parents).tolist()
    return [-1 if parents[i] < 0 else order.index(parents[i]) for i in order]


@pytest.mark.parametrize("layout", ["mask", "path", "path, not in order"])
@pytest.mark.parametrize("family", TREES)
@pytest.mark.parametrize("context", [5, 30])
def test_every_path_of_a_tree_is_a_chain(family: str, context: int, layout: str) -> None:
    model, rng = driven(family), random.Random(context)
    model.width, model.by_path = 8, layout != "mask"
    texts, sizes = [ids_of(i, context + i) for i in range(3)], (1, 6, 12)
    trees = [(ids_of(9 + size, size), random_tree(rng, size)) for size in sizes]
    if layout == "path":
        trees = [(nodes, in_preorder(parents)) for nodes, parents in trees]
    rows = [model.new_row() for _ in texts]
    model.forward([Feed(row, text[:-2], 1) for row, text in zip(rows, texts, strict=True)])
    feeds = [
        Feed(row, text[-2:] + nodes, len(nodes) + 1, parents)
        for row, text, (nodes, parents) in zip(rows, texts, trees, strict=True)
    ]
    logits = model.forward(feeds).split([feed.keep for feed in feeds])
    for row, text, (nodes, parents), found in zip(rows, texts, trees, logits, strict=True):
        torch.testing.assert_close(found[:1], plain(model, text)[-1:], **CLOSE)
        for node in range(len(nodes)):
            chain = text + [nodes[i] for i in path_to(parents, node)]
            torch.testing.assert_close(found[node + 1], plain(model, chain)[-1], **CLOSE)
        path = path_to(parents, rng.randrange(len(nodes)))
        row.keep(len(text), path)
        kept = text + [nodes[i] for i in path] + ids_of(77, 3)
        assert row.ids[: row.length].tolist() == kept[:-3]
        found = model.forward([Feed(row, kept[-3:], 3)])
        torch.testing.assert_close(found, plain(model, kept)[-3:], **CLOSE)


def by_depth(parents: Sequence[int]) -> tuple[list[list[int]], list[int]]:
    """The nodes of a tree in the order they grow in, a list per depth, and each one's parent in that order."""
    deep = depths(parents).tolist()
    order = sorted(range(len(parents)), key=lambda node: deep[node])
    grown = [-1 if parents[i] < 0 else order.index(parents[i]) for i in order]
    return [[i for i in range(len(order)) if deep[order[i]] == d] for d in range(max(deep) + 1)], grown


@pytest.mark.parametrize("reach", [None, Reach("chunk", 8)], ids=["its own", "chunks"])
@pytest.mark.parametrize("family", TREES)
@pytest.mark.parametrize("context", [5, 30, 505])  # the last: what is held begins in an earlier block of keys
def test_a_tree_that_grows_depth_by_depth_is_a_tree(family: str, context: int, reach: Reach | None) -> None:
    """Three rows of one forward: two trees of different depth, and a chain that is read on meanwhile."""
    limit = "n_positions" if family == "gpt2" else "max_position_embeddings"
    model, rng, once = driven(family, **{limit: 1024}), random.Random(context), []
    model._survey.reaches = model._survey.reaches if reach is None else [reach for _ in model._survey.reaches]
    texts, chain = [ids_of(i, context + i) for i in range(2)], ids_of(5, 40)
    trees = [(ids_of(9 + size, size), by_depth(random_tree(rng, size))) for size in (5, 14)]
    for text, (nodes, (_, parents)) in zip(texts, trees, strict=True):
        once.append(model.forward([Feed(model.new_row(), text + nodes, len(nodes), parents)]))
        for node in range(len(nodes)):
            path = text + [nodes[i] for i in path_to(parents, node)]
            torch.testing.assert_close(
                once[-1][node], model.forward([Feed(model.new_row(), path, 1)])[0], rtol=0, atol=CLOSE["atol"]
            )
    model.width, model.by_path = 8, True
    rows, other = [model.new_row() for _ in texts], model.new_row()
    model.forward([Feed(row, text[:-2], 1) for row, text in zip(rows, texts, strict=True)])
    for depth in range(max(len(levels) for _, (levels, _) in trees)):
        feeds, wanted = [], []
        for row, text, (nodes, (levels, parents)), whole in zip(rows, texts, trees, once, strict=True):
            if depth < len(levels):
                new, end = levels[depth], levels[depth][-1] + 1
                tokens = ([] if depth else text[-2:]) + [nodes[i] for i in new]
                feeds.append(Feed(row, tokens, len(new), parents[:end]))
                wanted.append(whole[new])
        feeds.append(Feed(other, chain[2 * depth : 2 * depth + 2], 0))
        torch.testing.assert_close(model.forward(feeds), torch.cat(wanted), **CLOSE)
    for row, text, (nodes, (_, parents)) in zip(rows, texts, trees, strict=True):
        path = path_to(parents, len(nodes) - 1)
        row.keep(len(text), path)
        kept = text + [nodes[i] for i in path] + ids_of(77, 3)
        found = model.forward([Feed(row, kept[-3:], 3)])
        torch.testing.assert_close(found, model.forward([Feed(model.new_row(), kept, 3)]), **CLOSE)


def test_toys_grow_trees_too() -> None:
    model, rng = ToyModel(order=4), random.Random(2)
    for size in (1, 5, 14):
        text, nodes = ids_of(size, 6), ids_of(9 + size, size)
        levels, parents = by_depth(random_tree(rng, size))
        whole, row = model.forward([Feed(Row(), text + nodes, size, parents)]), Row()
        for depth, new in enumerate(levels):
            tokens = ([] if depth else text) + [nodes[i] for i in new]
            found = model.forward([Feed(row, tokens, len(new), parents[: new[-1] + 1])])
            assert torch.equal(found, whole[new])
        for node in range(size):
            path = [nodes[i] for i in path_to(parents, node)]
            assert torch.equal(whole[node], torch.from_numpy(model.logits(text + path)))


def test_a_fork_shares_nothing() -> None:
    model, text = driven("gemma3"), ids_of(1, 30)
    row = model.new_row()
    model.forward([Feed(row, text[:20], 1)])
    fork = row.fork()
    model.forward([Feed(row, ids_of(2, 10), 1)])
    torch.testing.assert_close(model.forward([Feed(fork, text[20:], 10)]), plain(model, text)[20:], **CLOSE)
    assert isinstance(fork, KVRow)
    assert (row.length, fork.length) == (30, 30)


# -- layers and views ------------------------------------------------------------------------------


def test_layers_are_asked_how_far_they_see() -> None:
    assert driven("llama")._survey.reaches == [Reach(), Reach()]
    assert driven("mistral")._survey.reaches == [Reach("window", WINDOW)] * 2
    assert driven("gemma3")._survey.reaches == [Reach("window", WINDOW), Reach(), Reach("window", WINDOW)]
    assert driven("mistral", sliding_window=LENGTH)._survey.reaches == [Reach(), Reach()]


@pytest.mark.parametrize("limit", [24, 4096])
@pytest.mark.parametrize("reach", [Reach(), Reach("window", 7), Reach("chunk", 8), Reach("chunk", 5)])
def test_a_masks_rule_is_recognised(reach: Reach, limit: int) -> None:
    def rule(batch, head, query, key):
        allowed = reach.allows(query, key)
        return (key <= query) if allowed is None else (key <= query) & allowed

    assert reach_of(rule, limit) == reach


def test_a_rule_of_another_kind_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="neither causal nor a window nor chunks"):
        reach_of(lambda batch, head, query, key: key <= query + 3, 64)


def test_views_are_never_smaller_than_what_is_used() -> None:
    for slots in range(1, 2000):
        assert slots <= padded_view(slots) <= padded_view(slots, fine=False) < slots + BLOCK
    assert [padded_view(n) for n in (1, 65, 193, 385, 513)] == [64, 128, 384, 512, 576]


@pytest.mark.parametrize("size", [100, 600])
def test_far_blocks_are_skipped_and_nothing_changes(size: int) -> None:
    model = driven("mistral", sliding_window=size, max_position_embeddings=4096)
    text, row = ids_of(1, 1600), model.new_row()
    model.forward([Feed(row, text[:-9], 1)])
    found = model.forward([Feed(row, text[-9:], 9)])
    torch.testing.assert_close(found, plain(model, text)[-9:], **CLOSE)
    assert max(start for start, _ in row._views) == (1591 - size + 1) // BLOCK * BLOCK


# -- a model object stays its owner's --------------------------------------------------------------


def greedy(module: Any) -> list[int]:
    ids = torch.tensor([ids_of(1, 12)])
    return module.generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=0, eos_token_id=None)[0].tolist()


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", FOUR)
def test_a_models_owner_can_go_on_using_it(family: str, attention: str) -> None:
    module = tiny(family)
    module.set_attn_implementation(attention)
    before = greedy(module)
    model = load(module)
    model.forward([Feed(model.new_row(), ids_of(1, 12), 1)])
    assert model.module is module
    assert module.config._attn_implementation == attention
    assert greedy(module) == before


def test_training_mode_neither_drops_out_nor_gets_lost() -> None:
    module = tiny("gpt2", resid_pdrop=0.5, embd_pdrop=0.5, attn_pdrop=0.5)
    module.train()
    module.transformer.drop.eval()
    model, text = load(module), ids_of(1, 12)
    module.train()
    module.transformer.drop.eval()
    first = model.forward([Feed(model.new_row(), text, 12)])
    assert torch.equal(first, model.forward([Feed(model.new_row(), text, 12)]))
    model.close()
    assert module.training
    assert not module.transformer.drop.training


def test_threads_do_not_meet() -> None:
    """Two threads drive one model while its owner generates with it in a third."""
    module = tiny("llama")
    model, text = load(module), ids_of(1, 20)
    wanted, alone = plain(model, text), greedy(module)
    wrong: list[str] = []

    def drive() -> None:
        for _ in range(25):
            row = model.new_row()
            model.forward([Feed(row, text[:13], 1)])
            found = model.forward([Feed(row, text[13:], 7)])
            if not torch.allclose(found, wanted[13:], atol=1e-6):
                wrong.append("driven")

    def own() -> None:
        for _ in range(6):
            if greedy(module) != alone:
                wrong.append("generated")

    threads = [threading.Thread(target=work) for work in (drive, drive, own)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert module.config._attn_implementation == "sdpa"
