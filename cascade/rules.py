"""Verification rules: how a level turns a draft and its own choices into accepted tokens."""

from __future__ import annotations

from collections.abc import Callable

from cascade.draft import Draft, Verdict


class Rule:
    """Base of the verification rules.

    Attributes:
        lossless: whether the text follows the target's own distribution under this rule.
        needs_q: whether the rule uses the distributions a draft's tokens were drawn from.
        lazy: whether it draws one token after the other, each on its true prefix. A rule that must see a whole
            block at once is not: it cannot serve requests with processors or criteria of the user's own.
    """

    lossless: bool = False
    lazy: bool = True
    needs_q: bool = False

    def walk(self, draft: Draft, choose: Callable[[int], int], ends: Callable[[int], bool]) -> Verdict:
        """Walks a draft from its root as far as the verifier agrees.

        Args:
            draft: a chain or tree of N nodes.
            choose: gives the verifier's own token after a node (-1: after the context). It must be
                called along one path, root first, each node once: that is what makes processors
                with state, penalties and grammars run exactly as in plain decoding.
            ends: whether a token ends the text.
        """
        raise NotImplementedError


class Coupled(Rule):
    """Accepts a drafted token exactly if it is the one the verifier itself samples there.

    The verifier samples by argmax(log p + Gumbel noise), the noise being a function of (seed,
    position, token id) that drafters share: common random numbers make agreement likely, and
    whatever is proposed, the emitted tokens are the verifier's own samples. At temperature 0 this is
    greedy decoding; trees need nothing more.
    """

    lossless = True

    def walk(self, draft: Draft, choose: Callable[[int], int], ends: Callable[[int], bool]) -> Verdict:
        """See `Rule.walk`."""
        children = _children(draft)
        path: list[int] = []
        node, tested = -1, 0
        while True:
            token: int | None = choose(node)
            options = children[node + 1]
            if not options:
                break
            tested += 1
            child = options.get(token)
            if child is None:
                break
            path.append(child)
            node = child
            if ends(draft.tokens[child]):
                token = None
                break
        return Verdict(path, token, tested, len(path), len(draft))


def _children(draft: Draft) -> list[dict[int | None, int]]:
    """For the context's end and for each node: token -> child node; of equal siblings the first."""
    children: list[dict[int | None, int]] = [{} for _ in range(len(draft) + 1)]
    for node, token in enumerate(draft.tokens):
        parent = node - 1 if draft.parents is None else draft.parents[node]
        children[parent + 1].setdefault(token, node)
    return children
