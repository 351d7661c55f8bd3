"""Drafts as long as the drafter's entropy says that its tokens will hold."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from cascade.control.base import Outcome
from cascade.control.goodput import Goodput
from cascade.control.options import number
from cascade.draft import Doubt

STEP = 0.02  # by which a round moves the threshold
HIGHEST = 0.95  # a threshold that leaves nothing to draft would never learn again


class Entropy(Goodput):
    """Stops before a token is drawn whose chance to hold, 1 - sqrt(gamma * H), is under a threshold.

    H is the entropy of the drafter's logits in nats, before temperature and filters: AdaEDL (Agrawal et al. 2024, arXiv
    2410.18351). The threshold moves so that the share `target` of what is drafted is accepted: in text where draft and
    target differ drafts are short, in boilerplate long. Whether a token is kept depends on the distribution before it,
    not on the token, so that what is kept keeps its q.

    K is that of `goodput`, and a model may go on for several times as many tokens while it is sure and they can pay;
    drafters without a distribution keep to K.

    Options: `gamma` > 0, the `threshold` of the beginning in [0, 1), `target` in (0, 1), and those of `goodput`.
    """

    defaults: ClassVar[Mapping[str, Any]] = {**Goodput.defaults, "gamma": 0.2, "threshold": 0.4, "target": 0.7}

    def __init__(self, *, k: int | None, k_min: int, k_max: int, **options: Any) -> None:
        super().__init__(k=k, k_min=k_min, k_max=k_max, **options)
        self._gamma = number(self, "gamma", 0.0, open_low=True)
        self._threshold = number(self, "threshold", 0.0, 1.0)
        self._target = number(self, "target", 0.0, 1.0, open_low=True)

    @property
    def doubt(self) -> Doubt:
        """When to stop in the coming round."""
        return Doubt(self._gamma, self._threshold)

    def observe(self, outcome: Outcome) -> None:
        """Moves the threshold towards the target; a draft that came to nothing had too high a one."""
        super().observe(outcome)
        if outcome.tested and outcome.drafted:
            step = STEP if outcome.accepted < self._target * outcome.drafted else -STEP
        elif outcome.k and not outcome.drafted:
            step = -STEP
        else:
            return
        self._threshold = min(HIGHEST, max(0.0, self._threshold + step))
