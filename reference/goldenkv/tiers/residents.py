"""What one tier holds, as far as this process knows, and in which order it leaves.

The same strategies order a tier and the device; see `prefix.strategies`. An object gets a number when it
comes, as a page of the device has one.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from ..prefix import LRU, Strategy, Victim
from ..prefix.strategies import Score
from .objects import Address


@dataclass(slots=True)
class _Resident:
    number: int
    nbytes: int
    page: int
    boundary: bool
    last_use: int
    hits: int = 0
    queued: bool = False


class Residents:
    """Objects of one tier. Not safe for threads: its tier has a lock.

    Args:
        strategy: the order in which they leave; least recently used by default.
    """

    def __init__(self, strategy: Strategy | None = None) -> None:
        self.strategy = strategy or LRU()
        self._known: dict[Address, _Resident] = {}
        self._queue: list[tuple[Score, int, Address]] = []
        self._pins: Counter[Address] = Counter()
        self._now = self._next = 0

    def __contains__(self, address: Address) -> bool:
        return address in self._known

    def __len__(self) -> int:
        return len(self._known)

    def add(self, address: Address, nbytes: int, page: int = 0, boundary: bool = False) -> None:
        """An object came, or came again.

        Args:
            address, nbytes: of the object.
            page: its place in its sequence, in pages; 0 if nothing is known of it.
            boundary: it is a boundary state.
        """
        self.remove(address)
        self._now += 1
        self._next += 1
        self._known[address] = found = _Resident(self._next, nbytes, page, boundary, self._now)
        self.strategy.inserted(np.array([found.number]), self._now)
        self._offer(address, found)

    def use(self, address: Address) -> None:
        """It was read."""
        found = self._known.get(address)
        if found is not None:
            self._now += 1
            found.last_use = self._now
            found.hits += 1
            self.strategy.used(np.array([found.number]), self._now)

    def remove(self, address: Address) -> None:
        """It is gone; unknown ones are passed over."""
        found = self._known.pop(address, None)
        if found is not None:
            self.strategy.freed([found.number])

    def forget(self, owner: bytes, namespace: bytes | None) -> None:
        """All of an owner, or of one of its namespaces, is gone."""
        for address in [a for a in self._known if a.owner == owner and namespace in (None, a.namespace)]:
            self.remove(address)

    def pin(self, address: Address) -> None:
        """It stays until `unpin`, however often it is pinned. It need not be here, or not yet."""
        self._pins[address] += 1

    def unpin(self, address: Address) -> None:
        """Ends one `pin`."""
        assert self._pins[address] > 0, "unpinned more often than pinned"
        self._pins[address] -= 1
        if not self._pins[address]:
            del self._pins[address]

    def victims(self, nbytes: int) -> list[Address]:
        """Objects of so many bytes or more, if so many may leave, in the strategy's order.

        What the strategy exempts goes last. Nothing is removed: the caller does that, or `stay`s.
        """
        exempt: list[tuple[Score, int, Address]] = []
        pinned: list[tuple[Score, int, Address]] = []
        chosen: list[Address] = []
        while self._queue and nbytes > 0:
            score, number, address = heapq.heappop(self._queue)
            found = self._known.get(address)
            if found is None or found.number != number:
                continue
            found.queued = False
            current = self._score(found)
            if current > score:
                self._offer(address, found)
            elif self._pins[address]:
                pinned.append((score, number, address))
            elif self.strategy.exempt(self._victim(found), self._now):
                exempt.append((score, number, address))
            else:
                chosen.append(address)
                nbytes -= found.nbytes
        for place, (_, _, address) in enumerate(exempt):
            if nbytes <= 0:
                pinned += exempt[place:]
                break
            chosen.append(address)
            nbytes -= self._known[address].nbytes
        self.stay(address for _, _, address in pinned)
        return chosen

    def stay(self, addresses: Iterable[Address]) -> None:
        """Chosen victims that did not leave."""
        for address in addresses:
            found = self._known.get(address)
            if found is not None and not found.queued:
                self._offer(address, found)

    def _offer(self, address: Address, found: _Resident) -> None:
        found.queued = True
        heapq.heappush(self._queue, (self._score(found), found.number, address))
        if len(self._queue) > 2 * len(self._known) + 64:  # mostly of objects that are gone
            self._queue = [entry for entry in self._queue if self._is_current(entry)]
            heapq.heapify(self._queue)

    def _is_current(self, entry: tuple[Score, int, Address]) -> bool:
        found = self._known.get(entry[2])
        return found is not None and found.number == entry[1]

    def _score(self, found: _Resident) -> Score:
        return self.strategy.score(self._victim(found))

    @staticmethod
    def _victim(found: _Resident) -> Victim:
        return Victim(found.number, found.page, found.boundary, found.last_use, found.hits, 1)
