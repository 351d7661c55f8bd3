"""What a governor decides for a request in a round: whether its level is asked, and for how many tokens.

Everything is weighed in the verifier's plain forwards: what a proposal takes, what judging it takes, what it saves.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from cascade.control.base import Estimates
from cascade.control.repeats import repetitiveness
from cascade.control.theory import best_k, least_confidence, speedup
from cascade.costs import estimate
from cascade.draft import Ask
from cascade.level import Level

if TYPE_CHECKING:
    from cascade.governed import GovernedRow
    from cascade.governor import Governor

PROBE_LEAST, PROBE_MOST = 2, 8  # tokens that a probe proposes in the shadow...
PROBE_BUDGET = 0.5  # ...for about so much of the time of a plainly decoded one
STAKE = 0.5  # of what a level may still cost a request, at most so much in one proposal
PRIOR_TESTS = 8  # from so many tests on a request's own alpha stands alone


def decide(governor: Governor, ask: Ask, estimates: Estimates, rows: int) -> int:
    """K for this row now; 0 where the level is bypassed.

    Args:
        governor: of the level.
        ask: of the row.
        estimates: as `estimates_for` has them.
        rows: how many rows draft at this level.
    """
    row, k = governor.rows[ask.context.row_id], 0
    if not row.barred:
        _read_prompt(governor, ask)
        row.estimates = for_row(governor, ask, estimates, rows)
        k = _gated(governor, row, ask, row.estimates)
    row.asks += 1
    row.bypassed = k == 0
    row.k = k or None
    row.bypassed_rounds += row.bypassed
    return k


def _read_prompt(governor: Governor, ask: Ask) -> None:
    """Looks at the prompt, once in a request for all levels."""
    row_id, repeats = ask.context.row_id, governor.rows[ask.context.row_id].repeats
    if repeats is None:
        repeats = repetitiveness(ask.context.tokens[: ask.prompt_length])
        one: Governor | None = governor
        while one is not None:
            one.rows[row_id].repeats = repeats
            one = one.below


def estimates_for(governor: Governor, verifier: Level, batch: int, rows: int) -> Estimates:
    """What drafting costs a row where `rows` of `batch` do; K tokens of a tree are the nodes it usually has."""
    found = estimate(governor.costs, governor.name, verifier.name, governor.alpha, batch, rows)
    width, tests = governor.width, governor.tests
    if width == 1.0:
        return replace(found, tests=tests)
    return replace(found, tests=tests, verify=lambda tokens: found.verify(1 + round((tokens - 1) * width)))


def for_row(governor: Governor, ask: Ask, estimates: Estimates, rows: int) -> Estimates:
    """The same for one row: how cheap its tokens are depends on how well the levels below know its text.

    A level's tokens cost it one forward each, divided by the best speed that the levels below can give it. What is
    measured is the usual cost over all rows, so it is scaled by the ratio of the two speeds. K of all levels is thereby
    chosen together: the lower ones make a token as cheap as they can, and the upper ones take as many as pay.
    """
    without, below, level = _without(governor, ask, estimates), governor.below, governor.drafter
    cost = estimates.draft_cost
    row = None if below is None else below.rows.get(ask.context.row_id)
    if below is not None and row is not None and not row.barred and row.gate.tests and isinstance(level, Level):
        inner = estimates_for(below, level, rows, rows)
        usual, own = (
            best_k(alpha, inner.draft_cost, inner.verify, 0, below.config.k_max)[1]
            for alpha in (below.alpha, alpha_of(below, row))
        )
        cost *= usual / own
    alpha = governor.usual_alpha(governor.rows[ask.context.row_id])
    return replace(estimates, alpha=alpha, draft_cost=cost, without=without)


def _gated(governor: Governor, row: GovernedRow, ask: Ask, estimates: Estimates) -> int:
    level = governor.drafter if isinstance(governor.drafter, Level) else None
    if level is not None and not level.fits(ask.context):
        row.decide("off", f"the text is longer than the context of {level.name}")
        return 0
    k = _next_k(governor, row, estimates)
    speed = _speedup(governor, row, k, estimates)
    gain = speed / estimates.without
    _weigh(governor, row, k, speed, estimates)
    emitted = ask.context.committed - ask.prompt_length
    if level is not None and not row.invested:
        worth, reason = _invest(governor, row, ask, level, gain, emitted, estimates)
        row.decide("propose" if worth else "wait", reason)
        if not worth:
            return 0
        row.invested = True
    if row.gate.closed:
        tests = _probe_tokens(estimates.draft_cost * estimates.without)
        row.gate.probe_cost = _probe_cost(governor, ask, level, tests, estimates)
    chooses = row.controller.chooses and row.gate.config.gain
    # One probe at a time, and on what is certain: it is scored by what comes after.
    free = row.shadow is None and len(ask.context) == ask.context.committed
    decision = row.gate.follow(emitted, k, gain, free) if chooses else row.gate.decide(emitted, gain, free)
    if decision.reason:
        row.decide("propose" if decision.open else "bypass", decision.reason)
        if decision.open and not chooses:  # what K was before the bypass says nothing now
            row.controller.restart()
            k = _next_k(governor, row, estimates)
    if decision.probe:
        governor.probe(row, ask, tests)
    return max(row.controller.k_min, int(min(k, row.most))) if decision.open else 0


def _weigh(governor: Governor, row: GovernedRow, k: int, speed: float, estimates: Estimates) -> None:
    """What a draft's next token, or a tree's next node, must be worth, and how many tokens may be at stake."""
    width, wider = governor.width, (estimates.verify(k + 1) - 1) / max(k, 1)  # what one more makes the verifier take
    token = estimates.price(1) + wider
    if row.controller.adapts:
        row.most = max(1.0, STAKE * row.gate.left(row.emitted) / token) if token > 0.0 else math.inf
    if row.controller.adapts and row.controller.k_min == 1:  # else more are wanted at any rate
        row.price = lambda nodes: speed * estimates.verify(1 + round(nodes / width))
        if isinstance(governor.drafter, Level):
            row.floor = least_confidence(token, speed)


def _next_k(governor: Governor, row: GovernedRow, estimates: Estimates) -> int:
    least = 0 if row.controller.chooses and row.gate.config.gain else 1
    k = min(max(row.controller.next_k(estimates), least), governor.config.k_max)
    if row.controller.adapts and not isinstance(governor.drafter, Level) and getattr(governor.drafter, "costly", True):
        known = governor.costs.draft_seconds(governor.name) is not None
        return k if known else min(k, row.controller.k_min)  # one proposal shows what it costs
    return k


def _speedup(governor: Governor, row: GovernedRow, k: int, estimates: Estimates) -> float:
    """Predicted speed of the verifier with this level, against plain: at the best K, if K goes there."""
    alpha, cost, verify = alpha_of(governor, row), estimates.draft_cost, estimates.verify
    if row.controller.adapts and row.controller.optimises:
        return best_k(alpha, cost, verify, row.controller.k_min, row.controller.k_max)[1]
    return speedup(alpha, max(k, 1), cost, verify)


def alpha_of(governor: Governor, row: GovernedRow) -> float:
    """The row's own rolling alpha; while tests are few, the engine-wide one fills up to PRIOR_TESTS."""
    own = min(row.gate.tests / PRIOR_TESTS, 1.0)
    return own * row.gate.alpha + (1.0 - own) * governor.usual_alpha(row)


def _invest(
    governor: Governor, row: GovernedRow, ask: Ask, level: Level, gain: float, emitted: int, estimates: Estimates
) -> tuple[bool, str]:
    """Whether prefilling this level's model for the row will pay within what is likely to come."""
    if not row.gate.config.gain:
        return emitted >= 1, "the threshold alone decides"
    seconds, now = governor.costs.seconds(level.name, level.uncached(ask.context)), estimates.token_seconds
    if seconds is None or now is None:
        return emitted >= 1, "no costs known yet: tried"
    typical, look = governor.investment.typical_length, governor.below is not None
    return governor.investment.worth(seconds, now / estimates.without, gain, emitted, ask.cap + 1, typical, look)


def _probe_tokens(cost: float) -> int:
    """How many tokens a bypassed drafter without a model is tested on: fewer where each is dear."""
    return max(PROBE_LEAST, min(PROBE_MOST, int(PROBE_BUDGET / cost) if cost > 0.0 else PROBE_MOST))


def _probe_cost(governor: Governor, ask: Ask, level: Level | None, k: int, estimates: Estimates) -> float:
    """What testing a bypassed level takes now, in plainly decoded tokens: a model has to read all since the last."""
    now = estimates.token_seconds
    if not now:
        return 0.0
    if level is None:
        return k * (governor.costs.draft_seconds(governor.name) or 0.0) / now
    return (governor.costs.seconds(level.name, level.uncached(ask.context)) or 0.0) / now


def _without(governor: Governor, ask: Ask, estimates: Estimates) -> float:
    """Speed without this level, against plain: what the drafter below would reach on its own.

    It may be asked by this level's model now; what that takes of its tokens the verifier would about as well.
    """
    lower = governor.below
    below = None if lower is None else lower.rows.get(ask.context.row_id)
    if lower is None or below is None or below.barred or below.gate.closed or not below.usual.drafted:
        return 1.0
    seconds, now = governor.costs.draft_seconds(lower.name), estimates.token_seconds
    drafted = below.usual.drafted
    cost = drafted * seconds / now if seconds and now else 0.0
    return max((1.0 + below.usual.accepted) / (cost + estimates.verify(1 + round(drafted / governor.width))), 1.0)
