"""From which length on a reload is faster than computing again."""

from __future__ import annotations

import math
from collections.abc import Sequence


def crossover(tokens: Sequence[int], reload: Sequence[float], recompute: Sequence[float]) -> float | None:
    """The length of a prompt from which on a reload takes less time than computing, between logarithms.

    Args:
        tokens: lengths, ascending.
        reload, recompute: seconds at each length.

    Returns:
        The first length where a reload is always faster; None where it is not faster at the last one.
    """
    slower = [i for i, (a, b) in enumerate(zip(reload, recompute, strict=True)) if a >= b]
    if not slower:
        return float(tokens[0])
    last = slower[-1]
    if last == len(tokens) - 1:
        return None
    ahead, behind = (math.log(reload[i] / recompute[i]) for i in (last, last + 1))
    share = ahead / (ahead - behind)
    return math.exp((1 - share) * math.log(tokens[last]) + share * math.log(tokens[last + 1]))
