"""Eviction strategies: which page or boundary leaves first.

The tree decides what may leave: no page before those behind it, nothing that is locked or being written. A
strategy orders what is left. Time is whatever counter the tree was given; nothing reads a clock.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

Score = tuple[float, ...]


class StrategyError(ValueError):
    """A parameter that a strategy cannot have."""


class Victim(NamedTuple):
    """What may leave next: the last page of a path, or a boundary.

    Attributes:
        page: its id; of a boundary, that of the page which it ends. -1 where that page is not on the device.
        number: of the page in its sequence.
        boundary: it is the boundary that may leave, not the page.
        last_use: of the page, or of the boundary: a hit that ended exactly there.
        hits: hits so far.
        references: sequences that inserted the page.
    """

    page: int
    number: int
    boundary: bool
    last_use: int
    hits: int
    references: int


class Strategy:
    """The interface; by itself plain LRU.

    `score` and `exempt` answer the tree. The others are told what happens, `selected` by the engine, the rest
    by the tree; each gets page ids and the time.
    """

    def score(self, victim: Victim) -> Score:
        """Lowest leaves first; equal ones in the order they became free to leave.

        While a page stays its score may only rise: it is looked at again when it comes up, not before.
        """
        return (victim.last_use,)

    def exempt(self, victim: Victim, now: int) -> bool:
        """Whether it stays as long as anything else can leave. Asked for few: those that come up."""
        return False

    def inserted(self, pages: np.ndarray, now: int) -> None:
        """The tree adopted these pages."""

    def used(self, pages: np.ndarray, now: int) -> None:
        """A hit used these pages."""

    def selected(self, pages: np.ndarray, now: int) -> None:
        """Attention selected CSA entries of these pages."""

    def freed(self, pages: Iterable[int]) -> None:
        """The tree gave these pages back; the ids will name others."""


class LRU(Strategy):
    """Least recently used first, without attention sinks and without the recent window.

    Both are exempt only as long as anything else can leave: a pool full of first pages must not lock up. The
    window is one of uses, not of positions: a path loses its end first, so that a window of positions would
    exempt everything. Recent pages go last, sinks before them.

    Args:
        sinks: the first so many pages of every sequence are exempt. Boundaries have no sinks.
        recent: pages used or inserted within so many ticks are exempt.

    Raises:
        StrategyError: a negative number.
    """

    def __init__(self, sinks: int = 0, recent: int = 0) -> None:
        if sinks < 0 or recent < 0:
            raise StrategyError(f"{sinks=} and {recent=} must not be negative")
        self.sinks, self.recent = sinks, recent

    def score(self, victim: Victim) -> Score:
        sink = victim.number < self.sinks and not victim.boundary
        return (sink, victim.last_use)

    def exempt(self, victim: Victim, now: int) -> bool:
        return victim.last_use > now - self.recent


class SelectionDriven(Strategy):
    """Pages whose CSA entries were not selected lately go first.

    A page counts as selected when it is inserted: nothing is known of it yet. What no selection tells apart
    goes by last use; boundaries hold no entries and go by last use alone.
    """

    def __init__(self) -> None:
        self._last = np.zeros(0, np.int64)

    def score(self, victim: Victim) -> Score:
        if victim.boundary:
            return (victim.last_use,)
        return (self.last_selected(victim.page), victim.last_use)

    def last_selected(self, page: int) -> int:
        """When an entry of a page was last selected; 0 for never."""
        return int(self._last[page]) if page < len(self._last) else 0

    def inserted(self, pages: np.ndarray, now: int) -> None:
        self._last = grown(self._last, pages)
        self._last[pages] = now

    def selected(self, pages: np.ndarray, now: int) -> None:
        """See `Strategy`. Ids below 0 stand for no entry and are left out.

        Raises:
            StrategyError: ids that are not integers.
        """
        ids = np.asarray(pages)
        if ids.size and not np.issubdtype(ids.dtype, np.integer):
            raise StrategyError(f"page ids must be integers, got {ids.dtype}")
        ids = ids[ids >= 0].astype(np.int64)
        self._last = grown(self._last, ids)
        self._last[ids] = np.maximum(self._last[ids], now)


class FadingSelection(Strategy):
    """Selection-driven with a memory: pages selected often *and* lately stay.

    A selection at time t counts 2^(t / half_life); the score is the logarithm of the sum, so that it only
    rises, as the tree asks. A short half life gives `SelectionDriven`, a long one plain frequency.

    Args:
        half_life: ticks.

    Raises:
        StrategyError: it is not positive.
    """

    def __init__(self, half_life: float) -> None:
        if not half_life > 0:
            raise StrategyError(f"{half_life=} must be positive")
        self.half_life = half_life
        self._score: dict[int, float] = {}

    def score(self, victim: Victim) -> Score:
        if victim.boundary:
            return (victim.last_use,)
        return (self._score.get(victim.page, -math.inf), victim.last_use)

    def inserted(self, pages: np.ndarray, now: int) -> None:
        self.selected(
            np.array([p for p in np.asarray(pages).tolist() if p not in self._score], np.int64), now
        )

    def freed(self, pages: Iterable[int]) -> None:
        for page in pages:
            self._score.pop(page, None)

    def selected(self, pages: np.ndarray, now: int) -> None:
        for page in np.asarray(pages).tolist():
            if page >= 0:
                before = self._score.get(page, -math.inf)
                self._score[page] = float(np.logaddexp2(before, now / self.half_life))


class Composite(Strategy):
    """Reference count, last use and hit history in one score.

    score = last use + hit_ticks * log2(1 + hits) + reference_ticks * log2(references)

    So each doubling of the hits, or of the sequences that share a page, is worth as much as a use so many
    ticks later. What is no longer used falls behind in any case: fame fades. Live references are not weighed:
    what is locked cannot leave at all.

    Args:
        hit_ticks, reference_ticks: 0 or more; with both 0 it is LRU.

    Raises:
        StrategyError: a negative or infinite weight.
    """

    def __init__(self, hit_ticks: float = 16, reference_ticks: float = 16) -> None:
        if not (0 <= hit_ticks < math.inf and 0 <= reference_ticks < math.inf):
            raise StrategyError(f"{hit_ticks=} and {reference_ticks=} must be finite and not negative")
        self.hit_ticks, self.reference_ticks = hit_ticks, reference_ticks

    def score(self, victim: Victim) -> Score:
        history = self.hit_ticks * math.log2(1 + victim.hits)
        sharing = self.reference_ticks * math.log2(max(victim.references, 1))
        return (victim.last_use + history + sharing,)


def grown(table: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """The table, or a larger one with zeros behind its values, that has a place for every id."""
    needed = int(ids.max()) + 1 if len(ids) else 0
    if needed <= len(table):
        return table
    larger = np.zeros(max(needed, 2 * len(table), 64), table.dtype)
    larger[: len(table)] = table
    return larger
