"""Every lossless rule, by enumeration: each draft, each branch and each random outcome, with its probability.

`test_broken_on_purpose` breaks a line of the rules at a time (the residual by a softmax instead of a division, the
position of the residual off by one, q before top-k while sampling after it, one random number used twice, ...): each
time the same proof has to fail. The list of lines is `BROKEN`.
"""

from __future__ import annotations

import inspect
import types
from typing import Any

import numpy as np
import pytest
import torch

from cascade import rejection
from cascade.draft import Draft, Verdict
from cascade.enumeration import CHAINS, TREES, Judge, World, accepted, difference, drawn, emitted, given, makers
from cascade.rejection import Block, Rejection, Traversal
from cascade.rules import Coupled, Rule
from cascade.testing import assert_lossless
from tests import reference
from tests.strategies import LOSSLESS, PLUGINS

DRAWN = [name for name in LOSSLESS if not PLUGINS.rule(name).coupled]
KINDS = list(makers(3, 3))
WORLDS = [World(seed=seed, ends=bool(seed % 2)) for seed in range(4)]


def rule_of(name: str) -> Rule:
    return PLUGINS.rule(name)()


# -- lossless ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rule", DRAWN)
def test_the_text_has_the_verifiers_distribution(rule: str, kind: str, depth: int) -> None:
    for world in WORLDS:
        for make in makers(3, depth)[kind]:
            assert difference(rule_of(rule), make, world, depth + 2) < 1e-12


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("rule", LOSSLESS)
def test_rules_that_say_so_are_lossless(rule: str, depth: int) -> None:
    assert_lossless(rule_of(rule), depth=depth, seed=depth)


def test_every_way_to_draft_is_tried() -> None:
    assert KINDS == ["chain with q", "chain without", "tree with q", "tree without", "merged", "tail"]
    assert {len(shape) for shape in CHAINS} == {0, 1, 2, 3}
    assert {shape[0] for shape in TREES} == {1, 2, 3}
    assert DRAWN == ["block", "rejection", "traversal"]


@pytest.mark.parametrize("rule", DRAWN)
def test_a_draft_that_the_verifier_agrees_with_always_holds(rule: str) -> None:
    class Agreed(World):
        def table(self, which: str, path: tuple[int, ...]) -> np.ndarray:
            return super().table("p", path)

    for shape in CHAINS:
        assert accepted(rule_of(rule), drawn(shape), Agreed()) == pytest.approx(len(shape), abs=1e-12)


# -- against each other, and against the obvious -------------------------------------------------------


@pytest.mark.parametrize("seed", range(12))
def test_block_accepts_at_least_as_much_as_rejection(seed: int) -> None:
    """Sun et al. (2025), theorem 2; and at depth 1 both are the same."""
    world = World(seed=seed)
    for shape in CHAINS:
        block, rejected = accepted(Block(), drawn(shape), world), accepted(Rejection(), drawn(shape), world)
        assert block >= rejected - 1e-12
        if len(shape) <= 1:
            assert block == pytest.approx(rejected, abs=1e-12)


@pytest.mark.parametrize("seed", range(12))
def test_traversal_accepts_at_least_as_much_as_recursive_rejection(seed: int) -> None:
    world = World(seed=seed)
    for shape in TREES:
        assert accepted(Traversal(), drawn(shape), world) >= accepted(Rejection(), drawn(shape), world) - 1e-12


def test_whole_blocks_gain_something() -> None:
    worlds = [World(seed=seed) for seed in range(12)]
    chain = [accepted(Block(), drawn((1, 1, 1)), w) - accepted(Rejection(), drawn((1, 1, 1)), w) for w in worlds]
    tree = [accepted(Traversal(), drawn((2, 2)), w) - accepted(Rejection(), drawn((2, 2)), w) for w in worlds]
    assert max(chain) > 0.01
    assert max(tree) > 0.01


@pytest.mark.parametrize("seed", range(6))
def test_traversal_on_a_chain_is_block_verification(seed: int) -> None:
    """The twin follows algorithm 2 of Sun et al. (2025) line by line, front to back."""

    class Twin(Block):
        def walk(self, draft: Draft, verifier: Any, ends: Any) -> Verdict:
            return reference.block_verification(draft, verifier)

    world = World(seed=seed)
    for shape in CHAINS[1:]:
        found, wanted = emitted(Traversal(), drawn(shape), world), emitted(Twin(), drawn(shape), world)
        for text in found.keys() | wanted.keys():
            assert found[text] == pytest.approx(wanted[text], abs=1e-12)


@pytest.mark.parametrize("seed", range(6))
def test_a_certain_proposal_holds_with_the_verifiers_probability(seed: int) -> None:
    world = World(seed=seed)
    for rule in DRAWN:
        for token in range(3):
            found = accepted(rule_of(rule), given(Draft([token])), world)
            assert found == pytest.approx(float(world.table("p", ())[token]), abs=1e-12)


# -- what must be caught -------------------------------------------------------------------------------

BROKEN = [
    ("weights / total if total > 0.0 else otherwise", "torch.softmax(weights, 0)"),  # huggingface/transformers#28508
    ("over if q is None else over / float(q[token])", "over if q is None else over"),
    ("over if q is None else over / float(q[token])", "over if q is None else over / float(q.max())"),
    ("over if q is None else over / float(q[token])", "1.0"),
    ("torch.sub(p * weight, q.to(p.device)).clamp_(min=0.0)", "p * weight"),
    ("torch.sub(p * weight, q.to(p.device)).clamp_(min=0.0)", "torch.sub(p * weight, q.to(p.device)).abs_()"),
    ("torch.sub(p * weight, q.to(p.device)).clamp_(min=0.0)", "torch.sub(p, q.to(p.device)).clamp_(min=0.0)"),
    ("rest[token] = 0.0  # 1 was taken away, and more is not there", "pass"),
    ("rest = p * weight", "rest = p.clone()"),
    ("q[tried] = 0.0", "pass"),  # with replacement
    ("return q / q.sum()", "return q"),  # what is left of q, but not a distribution
    ("if q is None or not tried:", "if True:"),
    ("p = normalised(left(p, q, token), p)", "pass"),  # a rejected token's mass comes back
    ("tried.append(token)", "pass"),
    ("verifier.draw(p), tested", "verifier.draw(verifier.distribution(-1)), tested"),
    ("return child, p", "return options[0], p"),  # another sibling than the one tested
    ("path.append(node)", "path.insert(0, node)"),
    ("found = self.visit(child, ratio(p, q, token, weight))", "found = self.visit(child, ratio(p, q, token))"),
    ("rest = left(p, q, token, weight)", "rest = left(p, q, token)"),
    ("self.rest[node] = normalised(rest, p)", "pass"),  # the residual is that of the context, one position off
    ("self.rest[node] = normalised(rest, p)", "self.rest[child] = normalised(rest, p)"),
    ("weight = 1.0 if node < 0 else _weight(float(rest.sum()), weight)", "pass"),
    ("rest / (rest + 1.0 - weight) if rest > 0.0", "rest if rest > 0.0"),
    ("judged.draw(last)", "judged.draw(-1)"),
    ("self.verifier.draw(self.distribution(node))", "self.verifier.draw(self.verifier.distribution(node))"),
    ("node < 0 or self.verifier.flip(weight)", "node < 0 or weight > 0.5"),
    ("if ends(draft.tokens[node]):", "if False:"),
    ("return Verdict(path[:depth], None, depth, depth", "return Verdict(path, None, len(path), len(path)"),
]


def broken(line: str, instead: str) -> list[Rule]:
    """The rules with one line changed."""
    source = inspect.getsource(rejection)
    assert line in source, "the line to break is not there any more"
    module = types.ModuleType("broken")
    exec(compile(source.replace(line, instead), "broken", "exec"), module.__dict__)
    return [module.Rejection(), module.Traversal()]


def caught(rule: Rule, depth: int, seed: int = 0) -> bool:
    try:
        assert_lossless(rule, depth=depth, seed=seed)
    except (AssertionError, RuntimeError, ValueError, IndexError):
        return True
    return False


@pytest.mark.parametrize(("line", "instead"), BROKEN)
def test_broken_on_purpose(line: str, instead: str) -> None:
    rules = broken(line, instead)
    shallow = (caught(rule, depth=2, seed=seed) for seed in range(2) for rule in rules)
    assert any(shallow) or any(caught(rule, depth=3) for rule in rules)


def test_one_random_number_used_twice() -> None:
    """The draft's own number decides whether it is accepted: conditioned on the token, it is not uniform."""

    class Reuse(Rejection):
        def walk(self, draft: Draft, verifier: Any, ends: Any) -> Verdict:
            first = draft.tokens[0] if draft.tokens else 0
            verifier.flip = lambda chance: chance > first / 3  # what the draw of `first` left of its number
            return super().walk(draft, verifier, ends)

    assert caught(Reuse(), depth=1)


def test_q_before_the_filters_while_sampling_after_them() -> None:
    """huggingface/transformers#47932: the draft sampled after top-k and told its raw probabilities."""

    def make(chance: Any, world: World) -> Draft:
        draft = drawn((1, 1))(chance, world)
        raw = torch.full((3,), 0.1, dtype=torch.float64)
        return Draft(draft.tokens, None, [(q + raw) / (q + raw).sum() for q in draft.q])

    for rule in DRAWN:
        assert max(difference(rule_of(rule), make, World(seed=seed), 4) for seed in range(4)) > 0.001


@pytest.mark.parametrize("rule", DRAWN)
def test_pruning_by_what_was_drawn_needs_q_to_go(rule: str) -> None:
    """The likelier of two draws, with its q, is biased; as a point mass it is not."""

    def likelier(tell: bool) -> Any:
        def make(chance: Any, world: World) -> Draft:
            one, other = (chance.draw(world.table("q", ())) for _ in range(2))
            q = world.table("q", ())
            best = one if q[one] >= q[other] else other
            return Draft([best], None, [torch.from_numpy(q)] if tell else None)

        return make

    off = [[difference(rule_of(rule), likelier(tell), World(seed=s), 3) for s in range(4)] for tell in (True, False)]
    assert max(off[0]) > 0.01
    assert max(off[1]) < 1e-12


class Eager(Rule):
    """Takes whatever is proposed, and claims to be lossless."""

    lossless = True

    def walk(self, draft: Draft, verifier: Any, ends: Any) -> Verdict:
        path = draft.path(0) if len(draft) else []
        return Verdict(path, verifier(path[-1] if path else -1), len(path), len(path), len(draft))


class Fixed(Rejection):
    """Emits the likeliest token: p is not what it draws from."""

    def walk(self, draft: Draft, verifier: Any, ends: Any) -> Verdict:
        return Verdict([], int(verifier.distribution(-1).argmax()), 0, 0, len(draft))


class Impatient(Coupled):
    """Asks about a node that its path does not reach."""

    coupled = False

    def walk(self, draft: Draft, verifier: Any, ends: Any) -> Verdict:
        verifier.distribution(len(draft) - 1)
        return Verdict([], verifier.draw(verifier.distribution(-1)), 0, 0, len(draft))


@pytest.mark.parametrize("rule", [Eager, Fixed, Impatient])
def test_a_rule_that_is_not_lossless_is_found_out(rule: type[Rule]) -> None:
    with pytest.raises(AssertionError):
        assert_lossless(rule())


def test_a_rule_that_emits_own_samples_needs_no_enumeration() -> None:
    world = World()
    with pytest.raises(AssertionError, match="must use flip and draw"):
        Judge(world, Draft([0]), None)(-1)
