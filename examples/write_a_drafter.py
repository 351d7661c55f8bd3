"""A drafter of your own: propose tokens, and leave the rest to the levels above.

python examples/write_a_drafter.py

Whatever it proposes, the text stays the target's; `check_drafter` tests the rest of the contract.
"""

from collections.abc import Sequence

from cascade import Ask, CascadeConfig, Draft, Drafter, Engine, LevelConfig, SamplingParams
from cascade.testing import ToyModel, check_drafter


class Echo(Drafter):
    """Proposes that the last few tokens come again."""

    costly = False  # scoring it in the shadow is free, so a bypassed level can come back

    def __init__(self, period: int = 4) -> None:
        self.period = period

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        return [self._one(ask) for ask in asks]

    def _one(self, ask: Ask) -> Draft:
        tail = ask.context.tokens[-self.period :].tolist()
        return Draft([tail[i % len(tail)] for i in range(min(ask.want, ask.cap))])


check_drafter(Echo)
engine = Engine(CascadeConfig(levels=[LevelConfig(drafter=Echo(period=3), k=6), ToyModel(order=1)]))
result = engine.generate([1, 2, 3], SamplingParams(max_new_tokens=200))
print("accepted", result.stats.levels[0].accepted, "of", result.stats.levels[0].drafted)
