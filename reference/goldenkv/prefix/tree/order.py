"""The order in which things leave: lowest score first, O(log n) each.

Scores rise while things wait. An entry keeps the score it was made with; when it comes up, the score is
looked at again, and the entry goes back if it has risen. So a use costs nothing here, and no score is ever
computed for all.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Generator
from typing import Generic, Protocol, TypeVar

from ..strategies import Score


class Queued(Protocol):
    """Anything with a slot `queued`: the number of its entry, 0 for none."""

    queued: int


T = TypeVar("T", bound=Queued)


class EvictionOrder(Generic[T]):
    """A heap of things that may leave.

    Args:
        score: of a thing now. It may only rise, unless the thing is pushed again.
        ready: whether a thing may leave now. One that may not is dropped when it comes up.
        exempt: whether a thing is to stay as long as anything else can leave.
    """

    def __init__(
        self, score: Callable[[T], Score], ready: Callable[[T], bool], exempt: Callable[[T], bool]
    ) -> None:
        self._score, self._ready, self._exempt = score, ready, exempt
        self._heap: list[tuple[Score, int, T]] = []
        self._number = 0
        self._live = 0

    def push(self, item: T) -> None:
        """Enters a thing with its score of now; an entry that it had counts no longer."""
        self.discard(item)
        self._number += 1
        item.queued = self._number
        heapq.heappush(self._heap, (self._score(item), item.queued, item))
        self._live += 1

    def discard(self, item: T) -> None:
        """Takes a thing out."""
        if item.queued:
            item.queued = 0
            self._live -= 1
            if len(self._heap) > 2 * self._live + 64:
                self._heap = [entry for entry in self._heap if entry[2].queued == entry[1]]
                heapq.heapify(self._heap)

    def drain(self) -> Generator[T, None, None]:
        """Takes things out, lowest score first, exempt ones last. What is pushed meanwhile counts.

        Close it when done: exempt things that were passed over go back.
        """
        spared: list[tuple[Score, int, T]] = []
        try:
            while (entry := self._pop()) or spared:
                if entry is None:
                    entry = heapq.heappop(spared)
                    if entry[2].queued or not self._ready(entry[2]):
                        continue  # it was entered again, or left with something else
                elif self._exempt(entry[2]):
                    heapq.heappush(spared, entry)
                    continue
                yield entry[2]
        finally:
            for _, _, item in spared:
                if not item.queued and self._ready(item):
                    self.push(item)

    def _pop(self) -> tuple[Score, int, T] | None:
        """The entry with the lowest score of now, or None."""
        while self._heap:
            score, number, item = self._heap[0]
            if item.queued != number:
                heapq.heappop(self._heap)
            elif not self._ready(item):
                heapq.heappop(self._heap)
                self.discard(item)
            elif (now := self._score(item)) > score:
                heapq.heapreplace(self._heap, (now, number, item))
            else:
                heapq.heappop(self._heap)
                self.discard(item)
                return score, number, item
        return None

    def __len__(self) -> int:
        return len(self._heap)
