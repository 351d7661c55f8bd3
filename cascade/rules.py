"""Verification rules: how a level turns a draft and its own choices into accepted tokens.

`Coupled`, the default, is here; those that weigh a draft's distribution q against the verifier's are in
`cascade/rejection.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from cascade.draft import Draft, Verdict

if TYPE_CHECKING:
    import torch

    from cascade.config import SamplingParams


class Verifier(Protocol):
    """The model that judges a draft, as a rule sees it. Node -1 is the context's end.

    A rule whose `lazy` is true must ask about nodes along one path only, root first and each once: that is what makes
    processors with state, penalties and grammars run exactly as in plain decoding.
    """

    def __call__(self, node: int) -> int:
        """The verifier's own token after a node: p sampled with the request's noise, which drafters share."""
        ...

    def distribution(self, node: int) -> torch.Tensor:
        """p, what the verifier samples from after a node: float64 [V], not to be changed. Raises DecodeError."""
        ...

    def flip(self, chance: float) -> bool:
        """True with this probability; a fresh random number each time."""
        ...

    def draw(self, weights: torch.Tensor) -> int:
        """A token with probability proportional to `weights` [V]; a fresh random number each time."""
        ...


class Rule:
    """Base of the verification rules.

    Attributes:
        lossless: whether the text follows the target's own distribution under this rule.
        coupled: whether it takes the verifier's own tokens, `verifier(node)`, and no other chance. Drafters then share
            the request's noise, and lossless means that the text is what the verifier samples alone. Else every draft
            is drawn with fresh noise, lossless means the distribution, and the rule uses `flip` and `draw`.
        needs_q: whether the rule uses the distributions a draft's tokens were drawn from.
        lazy: whether it draws one token after the other, each on its true prefix. A rule that must see a whole
            block at once is not: it cannot serve sampled requests with processors that may keep state.
    """

    lossless: bool = False
    coupled: bool = True
    needs_q: bool = False
    lazy: bool = True

    def walk(self, draft: Draft, verifier: Verifier, ends: Callable[[int], bool]) -> Verdict:
        """Walks a draft from its root as far as the verifier agrees.

        Where the verifier is greedy, lossless rules that draw are not asked: there, all of them are `Coupled`.

        Args:
            draft: a chain or tree of N nodes, a tree in depth-first order. `draft.q` is None, or holds per node
                a float64 tensor [V] or None.
            verifier: gives the verifier's tokens and distributions; `verifier(node)` is its own token.
            ends: whether a token ends the text. To be asked about accepted tokens, in order.
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

    def walk(self, draft: Draft, verifier: Verifier, ends: Callable[[int], bool]) -> Verdict:
        """See `Rule.walk`."""
        below = children(draft)
        path: list[int] = []
        node, tested = -1, 0
        while True:
            token: int | None = verifier(node)
            options = below[node + 1]
            if not options:
                break
            tested += 1
            child = next((child for child in options if draft.tokens[child] == token), None)
            if child is None:
                break
            path.append(child)
            node = child
            if ends(draft.tokens[child]):
                token = None
                break
        return Verdict(path, token, tested, len(path), len(draft))


COUPLED = Coupled()


def rule_for(params: SamplingParams, rule: Rule) -> Rule:
    """The rule that judges a request's drafts: without chance, every lossless rule that draws is `Coupled`."""
    return COUPLED if params.greedy and rule.lossless and not rule.coupled else rule


def children(draft: Draft) -> list[list[int]]:
    """For the context's end and for each node: its child nodes, in order. [N + 1]"""
    below: list[list[int]] = [[] for _ in range(len(draft) + 1)]
    for node in range(len(draft)):
        below[draft.parent(node) + 1].append(node)
    return below
