"""Several drafters at one place: what they propose becomes one tree, which one forward of the verifier scores."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from cascade.draft import Ask, Context, Draft, Verdict
from cascade.draft_checks import check_draft
from cascade.drafter import Drafter
from cascade.errors import ConfigError, DraftError, cause_of, one_line
from cascade.trees import MAX_DRAFTS, Trie, depths, merge
from cascade.trees import warm_up as warm_up_trees

if TYPE_CHECKING:
    from cascade.config import SamplingParams


class Merged(Drafter):
    """Asks all its members and merges their proposals: `LevelConfig(drafter=["ngram", other])`.

    Where members agree they share a path; where they differ the tree branches, the first member's branch first.
    A member that fails costs its own part of the tree.

    What is handed up has no q. Recursive rejection is exact for siblings that were drawn one after the other, each
    tested in the order drawn (SpecInfer, Miao et al. 2024, section 4.3); here equal tokens have become one and the
    budget has cut others, both by what was drawn. As a point mass each node is exact however it came about.

    Args:
        members: the drafters, the most trusted first; a draft model's level is one like any other.
        names: what errors call them.
        vocab_size: ids that the target may emit, or None: then whoever asks looks.

    Raises:
        ConfigError: for more members than a mask of `Draft.by` has bits.
    """

    def __init__(self, members: Sequence[Drafter], names: Sequence[str], vocab_size: int | None = None) -> None:
        assert len(members) == len(names)
        if len(members) > MAX_DRAFTS:
            raise ConfigError(f"{len(members)} drafters at one level, but at most {MAX_DRAFTS} can be merged")
        self.members = tuple(members)
        self.names = tuple(names)
        self.costly = any(member.costly for member in self.members)
        self.vocab_size = vocab_size

    def warm_up(self) -> None:
        """Compiles what merging needs, and lets the members prepare."""
        warm_up_trees()
        self._tell("warm_up")

    def start(self, row_id: int, params: SamplingParams) -> None:
        """A request begins."""
        self._tell("start", row_id, params)

    def observe(self, row_id: int, verdict: Verdict) -> None:
        """The target committed, whoever proposed it."""
        self._tell("observe", row_id, verdict)

    def settle(self, context: Context, emitted: int) -> None:
        """Members that keep a model's cache drop what is now wrong."""
        self._tell("settle", context, emitted)

    def end(self, row_id: int) -> None:
        """A request ended."""
        self._tell("end", row_id)

    def _tell(self, method: str, *args: Any) -> None:
        """Calls `method` of every member that has it, then raises the first error that one of them raised."""
        errors = []
        for name, member in zip(self.names, self.members, strict=True):
            try:
                getattr(member, method, _nothing)(*args)
            except Exception as error:
                errors.append(_of(name, error))
        if errors:
            raise errors[0]

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        """One tree per ask, at most `ask.cap` deep and of at most `ask.nodes` nodes, or a chain."""
        asks = [replace(ask, needs_q=False) for ask in asks]
        answers = [self._ask(name, member, asks) for name, member in zip(self.names, self.members, strict=True)]
        return [_merged(ask, [answer[i] for answer in answers]) for i, ask in enumerate(asks)]

    def _ask(self, name: str, member: Drafter, asks: Sequence[Ask]) -> list[Draft]:
        """A member's drafts, one per ask and checked; an empty one with the error where something is wrong.

        They are copied here and now: the next member may write where this one's arrays are.
        """
        try:
            drafts = member.propose(asks)
            if len(drafts) != len(asks):
                raise DraftError(f"{len(drafts)} drafts for {len(asks)} asks")
        except Exception as error:
            return [Draft((), error=_of(name, error)) for _ in asks]
        return [self._checked(name, ask, draft) for ask, draft in zip(asks, drafts, strict=True)]

    def _checked(self, name: str, ask: Ask, draft: Draft) -> Draft:
        vocab_size = sys.maxsize if self.vocab_size is None else self.vocab_size
        try:
            checked = check_draft(draft, ask.cap, vocab_size, ask.nodes)
        except Exception as error:
            return Draft((), error=_of(name, error))
        checked.error = None if draft.error is None else _of(name, draft.error)  # what came before it may still hold
        return checked


def _merged(ask: Ask, drafts: Sequence[Draft]) -> Draft:
    """The drafts of one ask as one, with the first of their errors."""
    trie = merge([(draft.tokens, draft.parents) for draft in drafts])
    if len(trie.tokens) > ask.nodes and not _is_chain(trie):
        trie = _cut(trie, ask.nodes)
    error = next((draft.error for draft in drafts if draft.error is not None), None)
    parents = None if _is_chain(trie) else trie.parents.tolist()
    return Draft(trie.tokens.tolist(), parents, error=error, by=trie.proposers.tolist())


def _is_chain(trie: Trie) -> bool:
    return bool((trie.parents == np.arange(-1, len(trie.parents) - 1)).all())


def _cut(trie: Trie, nodes: int) -> Trie:
    """The `nodes` nodes that are least deep, of equally deep ones those of earlier members; still in preorder."""
    order = np.lexsort((trie.owners, depths(trie.parents)))  # parents are less deep than their children: they stay
    kept = np.sort(order[: max(nodes, 0)])
    places = np.full(len(trie.parents) + 1, -1)  # its last entry, at -1, is the context's end
    places[kept] = np.arange(len(kept))
    return Trie(trie.tokens[kept], places[trie.parents[kept]], trie.owners[kept], trie.proposers[kept])


def _nothing(*args: Any) -> None:
    pass


def _of(name: str, error: Exception) -> DraftError:
    """A member's error in one line that says whose it is."""
    told = DraftError(f"{name}: {one_line(error) if isinstance(error, DraftError) else cause_of(error)}")
    told.__cause__ = error
    return told
