"""What recorded selections are worth to eviction and prefetch: the strategies side by side."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from ..prefix import LRU, FadingSelection, SelectionDriven, SpeculativePrefetch
from .residency import Belady, ByStrategy, Policy, RandomPage, Residency, Speculative, Step, replay

HALF_LIFE = 32.0
"""Of the fading strategy, in steps."""


def policies(steps: Sequence[Step], room: int) -> Mapping[str, tuple[int, Callable[[], Policy]]]:
    """Those that are compared: for each name the pages that it keeps aside to prefetch, and how to make one.

    Args:
        steps: what will be replayed; only Belady's rule looks at them.
        room: pages of the capacity that speculative prefetch may fill ahead.
    """
    return {
        "random": (0, lambda: RandomPage(np.random.default_rng(0))),
        "LRU, not fed": (0, lambda: ByStrategy(LRU(), fed=False)),
        "LRU + first page, not fed": (0, lambda: ByStrategy(LRU(sinks=1), fed=False)),
        "selection-driven": (0, lambda: ByStrategy(SelectionDriven(), fed=True)),
        "fading selection": (0, lambda: ByStrategy(FadingSelection(HALF_LIFE), fed=True)),
        "speculative": (room, lambda: Speculative(SpeculativePrefetch(), room)),
        "Belady": (0, lambda: Belady(steps)),
    }


def compare_policies(
    steps: Sequence[Step], capacities: Sequence[int], *, since: int
) -> dict[str, list[Residency]]:
    """Every policy at every capacity; an eighth of it, at least a page, is what is prefetched.

    Args:
        steps: of `residency.page_steps`.
        capacities: pages on the device, each at least 2.
        since: the first step that counts.
    """
    out: dict[str, list[Residency]] = {}
    for capacity in capacities:
        for name, (aside, make) in policies(steps, max(1, capacity // 8)).items():
            found = replay(steps, capacity - aside, make(), since=since)
            out.setdefault(name, []).append(found)
    return out


def tune(steps: Sequence[Step], capacity: int, *, since: int) -> dict[str, Residency]:
    """Speculative prefetch with one of its three signals alone, and other half lives of its history.

    Args as `compare_policies`.
    """
    room = max(1, capacity // 8)
    variants = {
        "as it is": SpeculativePrefetch,
        "structure only": lambda: SpeculativePrefetch(history=0, correlation=0),
        "history only": lambda: SpeculativePrefetch(structure=0, correlation=0),
        "correlation only": lambda: SpeculativePrefetch(structure=0, history=0),
        "history only, half life 8": lambda: SpeculativePrefetch(structure=0, correlation=0, half_life=8),
        "history only, half life 512": lambda: SpeculativePrefetch(structure=0, correlation=0, half_life=512),
    }
    return {
        name: replay(steps, capacity - room, Speculative(make(), room), since=since)
        for name, make in variants.items()
    }
