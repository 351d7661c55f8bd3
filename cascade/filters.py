"""Which tokens of a row of logits survive: nuclei without a full sort, the largest without a surprise.

Dimension key: V vocabulary, n tokens looked at.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from cascade.errors import DecodeError

# Bounds on p below which top-p looks for its nucleus, as logarithms; the last one is p > 0.
_NUCLEUS_BOUNDS = (-10 * math.log(2), -14 * math.log(2), -18 * math.log(2), -math.inf)


def nucleus(relative: torch.Tensor, top_p: float) -> torch.Tensor:
    """Positions, ascending, of the tokens with less than `top_p` of the probability before them.

    relative [n] float64: logits less their maximum. The order is: probability falling, then position
    rising. The tokens above a bound are a prefix of that order with its ties complete, so if they hold
    `top_p` of the mass, they are all that needs sorting.
    """
    weights = relative.exp()
    total = float(weights.sum())
    goal = top_p * total
    for bound in _NUCLEUS_BOUNDS:
        inside = where(relative > math.log(total) + bound)
        if bound == -math.inf or float(weights[inside].sum()) >= goal:
            break
    order = inside[relative[inside].sort(descending=True, stable=True).indices]
    sums = weights[order].cumsum(0)
    count = 1 + int((sums[:-1] < goal).sum())
    return order[:count].sort().values


def where(mask: torch.Tensor) -> torch.Tensor:
    """Positions [n] of the true entries of a mask [V], ascending."""
    if mask.device.type == "cpu":
        return torch.from_numpy(np.flatnonzero(mask.numpy()))  # a quarter of torch's time on a CPU
    return mask.nonzero()[:, 0]


def largest(scores: torch.Tensor) -> tuple[int, float]:
    """The first position of the largest score, and its value. Raises DecodeError where it is no number."""
    if scores.device.type == "cpu":
        host = scores.numpy()
        lead = int(host.argmax())  # a tenth of torch's time on a CPU; both find a NaN first
        top = float(host[lead])
    else:
        value, index = scores.max(0)
        lead, top = int(index), float(value)
    if math.isnan(top) or top == math.inf:
        raise DecodeError("the model's logits are not numbers: NaN or infinite")
    if top == -math.inf:
        raise DecodeError("no token is possible: every logit is -inf")
    return lead, top
