"""How much a prompt repeats itself: a look at the text before the first token of the answer is out.

What repeats itself in the prompt (code, tables, a text to be edited) tends to do so in the answer, where lookups and
drafts then hold more often.
"""

from __future__ import annotations

from bisect import bisect

import numpy as np

from cascade.draft import Tokens

LATEST = 4096  # tokens of a prompt that are looked at: some 0.3 ms
EDGES = (0.02, 0.05, 0.1, 0.25)  # between kinds of prompts
SELDOM, OFTEN = 0.6, 0.1  # a lookup's alpha where nothing repeats itself; from here on it is as any drafter's
TRUST = 32.0  # tests that the alpha of all prompts counts for beside those of one kind
MEMORY = 512.0  # tests of a kind until one counts half


def repetitiveness(tokens: Tokens) -> float:
    """The share of a text's tokens, in [0, 1], that its own latest continuation of the two before would have told."""
    tokens = tokens[-LATEST:]
    if len(tokens) < 4:
        return 0.0
    pairs = tokens[:-2] * (1 << 32) + tokens[1:-1]  # token i + 2 comes after pair i
    order = np.argsort(pairs, kind="stable")
    again = pairs[order[1:]] == pairs[order[:-1]]
    told = tokens[order[1:] + 2] == tokens[order[:-1] + 2]
    return float((again & told).sum() / len(pairs))


class ByRepeats:
    """A level's alpha by how much the prompt repeats itself: what a request begins with.

    Over 80 questions of Spec-Bench a lookup table's alpha was 0.63 where the prompt told less than a twentieth of
    itself, and 0.77 to 0.79 where it told more; a draft model's was 0.79 either way. So it is learned, per level and
    kind of prompt, on top of the engine-wide alpha, and before that only lookups begin with what was seen there.

    Args:
        lookup: the drafter has no model.
    """

    def __init__(self, lookup: bool) -> None:
        self._lookup = lookup
        self._tested = [0.0] * (len(EDGES) + 1)
        self._accepted = [0.0] * (len(EDGES) + 1)

    def first(self, repeats: float, prior: float) -> float:
        """alpha before anything was tested, `prior` where the prompt says nothing of it."""
        return SELDOM + (prior - SELDOM) * min(1.0, repeats / OFTEN) if self._lookup and prior > SELDOM else prior

    def alpha(self, repeats: float, usual: float) -> float:
        """alpha of prompts of this kind, `usual` being that of all."""
        kind = bisect(EDGES, repeats)
        return (TRUST * usual + self._accepted[kind]) / (TRUST + self._tested[kind])

    def observe(self, repeats: float, tested: int, accepted: int) -> None:
        """Tests in a request whose prompt repeats itself so much."""
        kind = bisect(EDGES, repeats)
        keep = 0.5 ** (tested / MEMORY)
        self._tested[kind] = self._tested[kind] * keep + tested
        self._accepted[kind] = self._accepted[kind] * keep + accepted
