"""The drafter "bigram": proposes what most often followed the last token in this text so far."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cascade import Ask, Draft, Drafter, hookimpl


class BigramDrafter(Drafter):
    """Follows the most frequent pairs of the context; `min_count` says how often one must have been seen."""

    costly = False  # proposing takes next to nothing, so it may be tried for free

    def __init__(self, min_count: int = 1) -> None:
        self.min_count = min_count

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        return [self._draft(ask) for ask in asks]

    def _draft(self, ask: Ask) -> Draft:
        known = ask.context.tokens[: ask.context.committed]  # the rest are guesses: never learn from those
        last, tokens = int(ask.context.tokens[-1]), []
        while len(tokens) < min(ask.want, ask.cap):
            followers, counts = np.unique(known[1:][known[:-1] == last], return_counts=True)
            if len(counts) == 0 or counts.max() < self.min_count:
                break
            last = int(followers[counts.argmax()])
            tokens.append(last)
        return Draft(tokens)


@hookimpl
def cascade_register_drafters() -> dict[str, type[Drafter]]:
    return {"bigram": BigramDrafter}
