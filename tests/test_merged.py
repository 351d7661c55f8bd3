"""Several drafters at one place: one tree of all they propose, and a broken one costs only its own part."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from cascade.config import SamplingParams
from cascade.draft import Ask, Context, Draft, Verdict, first_path
from cascade.draft_checks import check_draft
from cascade.drafter import Drafter
from cascade.errors import ConfigError, DraftError
from cascade.merged import Merged
from cascade.noise import Noise
from cascade.testing import ScriptedDrafter, check_drafter
from drafters.ngram import NgramDrafter
from tests import reference

PARAMS, VOCAB = SamplingParams(), 32
TEXT = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]
PROMPT = TEXT[:3]


def ask(tokens: Sequence[int] = PROMPT, want: int = 4, cap: int = 8, nodes: int = 64, row: int = 0) -> Ask:
    return Ask(Context(row, tokens), want, cap, PARAMS, Noise(0), nodes=nodes)


def scripted(kind: str, text: Sequence[int] = TEXT) -> ScriptedDrafter:
    return ScriptedDrafter([text], kind, VOCAB)


def merged(*members: Drafter, vocab_size: int | None = VOCAB) -> Merged:
    made = Merged(members, [f"m{i}" for i in range(len(members))])
    made.vocab_size = vocab_size
    return made


def paths(draft: Draft) -> dict[tuple[int, ...], int]:
    """The tokens from the root to each node, and who proposed it, in the order of the nodes."""
    assert draft.by is not None
    parents = list(range(-1, len(draft) - 1)) if draft.parents is None else draft.parents
    lines = [reference.line(parents, node) for node in range(len(draft))]
    return {tuple(draft.tokens[n] for n in line): by for line, by in zip(lines, draft.by, strict=True)}


def random_tree(rng: np.random.Generator) -> tuple[list[int], list[int]]:
    """Up to 8 nodes in depth-first order, since what is checked is."""
    parents = [int(rng.integers(-1, node)) for node in range(rng.integers(0, 9))]
    order = reference.depth_first(parents)
    return rng.integers(0, 3, len(order)).tolist(), [order.index(parents[n]) if parents[n] >= 0 else -1 for n in order]


class Fixed(Drafter):
    """Says what it was made with, and notes what it hears."""

    costly = False

    def __init__(self, *drafts: Any) -> None:
        self.drafts, self.heard = list(drafts), []

    def propose(self, asks: Sequence[Ask]) -> Any:
        self.heard.append(("propose", *asks))
        return self.drafts

    def start(self, *args: Any) -> None:
        self.heard.append(("start", *args))

    def observe(self, *args: Any) -> None:
        self.heard.append(("observe", *args))

    def end(self, *args: Any) -> None:
        self.heard.append(("end", *args))


class Model(Fixed):
    """One with what a draft model's level has besides."""

    costly = True

    def settle(self, *args: Any) -> None:
        self.heard.append(("settle", *args))

    def warm_up(self) -> None:
        self.heard.append(("warm_up",))


class Broken(Model):
    """Raises whatever it is told, after hearing it."""

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if name not in ("start", "observe", "end", "settle", "warm_up"):
            return found

        def fail(*args: Any) -> None:
            found(*args)
            raise RuntimeError(f"no {name}\nwith details")

        return fail


# -- one tree ----------------------------------------------------------------------------------------


def test_an_oracle_and_a_wrong_drafter_are_two_branches() -> None:
    (draft,) = merged(scripted("oracle"), scripted("wrong")).propose([ask()])
    right, wrong = (4, 5, 6, 7), (5, 6, 7, 8)
    assert paths(draft) == {right[:n]: 1 for n in range(1, 5)} | {wrong[:n]: 2 for n in range(1, 5)}
    assert list(draft.parents or ()) == [-1, 0, 1, 2, -1, 4, 5, 6]
    assert draft.q is draft.chances is draft.error is None
    assert list(first_path(draft).tokens) == list(right)


def test_two_ngram_drafters_share_the_path_on_which_they_agree() -> None:
    text = [7, 1, 2, 3, 4, 5, 9, 2, 3, 4, 6, 9, 7, 1, 2, 3]
    long, short = NgramDrafter(4, 4), NgramDrafter(2, 2)
    alone = [list(drafter.propose([ask(text, 3)])[0].tokens) for drafter in (long, short)]
    assert alone == [[4, 5, 9], [4, 6, 9]]
    (draft,) = merged(long, short).propose([ask(text, 3)])
    assert paths(draft) == {(4,): 3, (4, 5): 1, (4, 5, 9): 1, (4, 6): 2, (4, 6, 9): 2}
    assert list(draft.tokens) == [4, 5, 9, 6, 9]
    assert check_draft(draft, 8, VOCAB, 64) == draft


def test_those_who_agree_make_a_chain_that_all_of_them_proposed() -> None:
    (draft,) = merged(scripted("oracle"), scripted("empty"), scripted("oracle", TEXT[:5])).propose([ask()])
    assert (draft.tokens, draft.parents) == ([4, 5, 6, 7], None)
    assert draft.by == [5, 5, 1, 1]


def test_trees_of_members_are_merged_too_and_lose_their_q() -> None:
    tree = Draft([4, 6, 5], [-1, -1, 0], np.full((3, VOCAB), 1 / VOCAB), [0, 1, 0], [0.9, 0.1, 0.5])
    (draft,) = merged(Fixed(tree), Fixed(Draft([6, 7]))).propose([ask()])
    assert paths(draft) == {(4,): 1, (4, 5): 1, (6,): 3, (6, 7): 2}
    assert draft.q is draft.chances is draft.origin is None


def test_every_ask_has_a_tree_of_its_own() -> None:
    asks = [ask(TEXT[:3]), ask(TEXT[:5], want=1, row=1), ask([31], row=2)]
    drafts = merged(scripted("oracle"), scripted("wrong")).propose(asks)
    assert [len(draft) for draft in drafts] == [8, 2, 4]
    assert paths(drafts[1]) == {(6,): 1, (7,): 2}
    assert merged(scripted("oracle")).propose([]) == []


def test_no_proposal_is_an_empty_chain() -> None:
    (draft,) = merged(scripted("empty"), NgramDrafter()).propose([ask()])
    assert (len(draft), draft.parents, draft.by, draft.error) == (0, None, [], None)


# -- its limits --------------------------------------------------------------------------------------


@pytest.mark.parametrize("cap", [0, 1, 3])
def test_nothing_is_deeper_than_the_cap(cap: int) -> None:
    members = [Fixed(Draft([4, 5, 6, 7])), Fixed(Draft([4, 8, 9, 9, 10], [-1, 0, 1, 0, -1]))]
    (draft,) = merged(*members).propose([ask(cap=cap)])
    assert max(map(len, paths(draft)), default=0) == cap
    (whole,) = merged(*members).propose([ask()])
    assert list(paths(draft)) == [path for path in paths(whole) if len(path) <= cap]


def test_too_large_a_tree_loses_its_deepest_nodes_and_of_those_the_later_members() -> None:
    members = [Fixed(Draft([4, 5, 6])), Fixed(Draft([7, 8])), Fixed(Draft([4, 9, 10], [-1, 0, -1]))]
    kept = []
    for nodes in range(1, 9):
        (draft,) = merged(*members).propose([ask(nodes=nodes)])
        assert len(draft) == min(nodes, 7)
        assert check_draft(draft, 8, VOCAB, nodes) == draft
        kept.append(set(paths(draft)))
    assert [list(more - less) for less, more in zip([set(), *kept], kept, strict=False)] == [
        *([(4,)], [(7,)], [(10,)], [(4, 5)], [(7, 8)], [(4, 9)], [(4, 5, 6)], []),
    ]


def test_a_chain_may_be_longer_than_a_tree_has_nodes() -> None:
    (draft,) = merged(scripted("oracle"), scripted("oracle")).propose([ask(nodes=2)])
    assert draft.tokens == [4, 5, 6, 7]


@pytest.mark.parametrize("seed", range(3))
def test_random_members_are_all_there_as_far_as_there_is_room(seed: int) -> None:
    rng = np.random.default_rng(seed)
    for _ in range(200):
        drafts = [random_tree(rng) for _ in range(rng.integers(1, 4))]
        nodes, cap = int(rng.integers(8, 24)), int(rng.integers(1, 6))
        (draft,) = merged(*(Fixed(Draft(*one)) for one in drafts)).propose([ask(nodes=nodes, cap=cap)])
        whole = {ids: sum(1 << i for i in who) for ids, who in reference.merged(drafts) if len(ids) <= cap}
        found = paths(draft)
        assert len(draft) == len(found) == min(nodes, len(whole))
        assert found.items() <= whole.items()
        assert max(map(len, found), default=0) <= min((len(p) for p in whole.keys() - found.keys()), default=cap)
        assert list(found) == [path for path in whole if path in found]


def test_more_members_than_bits_are_refused() -> None:
    with pytest.raises(ConfigError, match="64 drafters at one level, but at most 63"):
        merged(*[scripted("oracle")] * 64)
    assert merged(*[scripted("oracle")] * 63).propose([ask()])[0].by == [2**63 - 1] * 4


# -- broken members ----------------------------------------------------------------------------------

BAD = {
    "raises": (scripted("raise"), "m1: RuntimeError: scripted to fail"),
    "too many drafts": (Fixed(Draft([1]), Draft([2])), "m1: 2 drafts for 1 asks"),
    "no drafts": (Fixed(), "m1: 0 drafts for 1 asks"),
    "None": (Fixed(None), "m1: AttributeError: "),
    "no integers": (Fixed(Draft([1.5])), "m1: a draft's tokens must be integers"),
    "foreign id": (Fixed(Draft([VOCAB])), f"m1: a draft has token id {VOCAB}, outside the vocabulary"),
    "cycle": (Fixed(Draft([1, 2], [1, 0])), "m1: a draft tree"),
    "too large": (Fixed(Draft([1, 2, 3], [-1, -1, -1])), "m1: a draft tree has 3 nodes, and the budget is 2"),
}


@pytest.mark.parametrize("what", BAD)
def test_a_broken_member_costs_only_its_own_part(what: str) -> None:
    member, message = BAD[what]
    made = merged(scripted("oracle"), member, scripted("oracle", TEXT[:5]), scripted("raise"))
    (draft,) = made.propose([ask(nodes=2)])
    assert (draft.tokens, draft.by) == ([4, 5, 6, 7], [5, 5, 1, 1])
    assert isinstance(draft.error, DraftError)
    assert str(draft.error).startswith(message)
    assert "\n" not in str(draft.error)


def test_a_bad_draft_costs_one_row_and_not_the_others() -> None:
    odd = Fixed(Draft([9]), Draft([-5]), Draft([9]))
    drafts = merged(odd, scripted("oracle")).propose([ask(row=row) for row in range(3)])
    assert [draft.by for draft in drafts] == [[1, 2, 2, 2, 2], [2, 2, 2, 2], [1, 2, 2, 2, 2]]
    assert [draft.error is None for draft in drafts] == [True, False, True]


def test_a_member_that_says_what_went_wrong_keeps_what_came_before() -> None:
    member = Fixed(Draft([4, 9], error=ValueError("two\nlines")))
    (draft,) = merged(scripted("oracle"), member).propose([ask(want=2)])
    assert paths(draft) == {(4,): 3, (4, 5): 1, (4, 9): 2}
    assert str(draft.error) == "m1: ValueError: two lines"
    assert isinstance(draft.error.__cause__, ValueError)


def test_ids_are_whoever_asks_to_look_at_where_the_vocabulary_is_not_known() -> None:
    (draft,) = merged(Fixed(Draft([10**6])), vocab_size=None).propose([ask()])
    assert draft.tokens == [10**6]
    (draft,) = merged(Fixed(Draft([-1])), vocab_size=None).propose([ask()])
    assert draft.error is not None


def test_what_a_member_gave_is_copied_before_the_next_one_is_asked() -> None:
    shared = np.array([4, 5])

    class Writer(Drafter):
        def propose(self, asks: Sequence[Ask]) -> list[Draft]:
            shared[:] = 9
            return [Draft([]) for _ in asks]

    (draft,) = merged(Fixed(Draft(shared)), Writer()).propose([ask()])
    assert draft.tokens == [4, 5]


# -- what members hear -------------------------------------------------------------------------------


def test_members_hear_everything() -> None:
    members = [Fixed(Draft([])), Model(Draft([]))]
    made, question = merged(*members), ask()
    verdict, context = Verdict([], 5, 0, 0, chain=[5]), Context(7, TEXT)
    made.warm_up()
    made.start(7, PARAMS)
    made.propose([question])
    made.observe(7, verdict)
    made.settle(context, 1)
    made.end(7)
    assert members[0].heard == [("start", 7, PARAMS), ("propose", question), ("observe", 7, verdict), ("end", 7)]
    assert members[1].heard[:1] == [("warm_up",)]
    assert members[1].heard[4:5] == [("settle", context, 1)]
    assert [call for call in members[1].heard if call[0] not in ("warm_up", "settle")] == members[0].heard
    assert made.scores(context) is None


@pytest.mark.parametrize("method", ["start", "observe", "end", "settle", "warm_up"])
def test_all_are_told_even_if_one_raises(method: str) -> None:
    members = [Model(), Broken(), Broken(), Model()]
    arguments = {"start": (7, PARAMS), "observe": (7, Verdict([], 5, 0, 0)), "settle": (Context(7, TEXT), 1)}
    args = arguments.get(method, (7,) if method == "end" else ())
    with pytest.raises(DraftError) as caught:
        getattr(merged(*members), method)(*args)
    assert str(caught.value) == f"m1: RuntimeError: no {method} with details"
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert [member.heard for member in members] == [[(method, *args)]] * 4


def test_it_is_costly_if_a_member_is() -> None:
    assert not merged(NgramDrafter(), Fixed()).costly
    assert merged(NgramDrafter(), Model()).costly
    made = merged(NgramDrafter(), Model())
    assert [type(member) for member in made.members] == [NgramDrafter, Model]
    assert made.names == ("m0", "m1")


def test_it_keeps_a_drafters_contract() -> None:
    check_drafter(lambda: merged(NgramDrafter(1, 2), NgramDrafter(3, 5)))
