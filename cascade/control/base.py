"""What every controller is: an object per level and request that says how many tokens to draft."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from cascade.draft import Doubt
from cascade.errors import ConfigError, did_you_mean

FIRST_TESTS = 16.0  # tests that an engine-wide alpha counts for before there were any


@dataclass(slots=True)
class Estimates:
    """The slow, engine-wide view of one proposing level, handed to its controllers each round.

    Attributes:
        alpha: accepted / tested over recent requests, in [0, 1].
        draft_cost: c, the time of one drafted token (all levels below included) in units of the
            verifier's forward on one token.
        verify: verify(n), the verifier's time on n tokens in the same unit; verify(1) is 1.
        round_cost: c0, the fixed time of one proposal in the same unit.
        token_seconds: what the verifier takes per token of one request decoding plainly, in a batch like
            this one; None where nothing is known.
        tests: how many tests `alpha` rests on.
        without: speed of the verifier without this level, with those below it, against plain decoding.
    """

    alpha: float
    draft_cost: float
    verify: Callable[[int], float]
    round_cost: float = 0.0
    token_seconds: float | None = None
    tests: float = FIRST_TESTS
    without: float = 1.0

    def price(self, k: int) -> float:
        """Time of a proposal of `k` >= 1 tokens, in units of the verifier's forward on one token."""
        return self.round_cost + k * self.draft_cost


@dataclass(slots=True)
class Outcome:
    """What became of one proposal.

    Attributes:
        k: tokens asked for.
        drafted: tokens proposed; fewer than `k` (no match, a limit) or more (a level hands up what
            its own verifier added).
        tested: positions compared, accepted + 1 if the round ended in a rejection.
        accepted: positions that held.
    """

    k: int
    drafted: int
    tested: int
    accepted: int


class Controller:
    """Sets K for one proposing level in one request.

    Subclasses define `next_k`, and `observe` if they learn. They name their options and the
    defaults in `defaults`; an option that is not there is refused.

    Args:
        k: the first K, None where the controller may choose.
        k_min, k_max: bounds of K, in tokens. A controller proposes at least one token: whether to
            propose at all is the gate's business.
    """

    defaults: ClassVar[Mapping[str, Any]] = {}

    #: Whether K moves.
    adapts: ClassVar[bool] = True

    #: Whether K goes where the predicted speedup is largest; else a level is judged at the K it has.
    optimises: bool = True

    #: Whether it says itself if the level proposes: its K may be 0 then, and the gate only sees to the probes.
    chooses: ClassVar[bool] = False

    def __init__(self, *, k: int | None, k_min: int, k_max: int, **options: Any) -> None:
        for key in options:
            if key not in self.defaults:
                raise ConfigError(
                    f"controller {type(self).__name__} has no option {key!r}.{did_you_mean(key, self.defaults)}"
                )
        self.first_k = k
        self.k_min = min(max(1, k_min), k_max)
        self.k_max = k_max
        self.options = {**self.defaults, **options}

    @property
    def doubt(self) -> Doubt | None:
        """When the drafter should stop before K, if this policy goes by its entropy. None: by its confidence."""
        return None

    def next_k(self, estimates: Estimates) -> int:
        """Tokens to ask for in the coming round. Called once a round; costs microseconds."""
        raise NotImplementedError

    def observe(self, outcome: Outcome) -> None:
        """One proposal was judged. Free tests come as an outcome with `drafted` 0."""

    def restart(self) -> None:
        """The level proposes again after a bypass: rolling figures from before it are stale."""
