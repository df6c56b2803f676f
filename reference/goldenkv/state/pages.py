"""Who holds the pages of a pool: reference counts, and a free list.

A page can be held by several sequences and by a cache at once. Whoever writes into a page must be its only
holder: others get a copy first (`Sequences` does that). The device arrays themselves are in `pool`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class CapacityError(RuntimeError):
    """No free slot, too few free pages, or a sequence past the maximum length. Nothing has changed."""


class StaleLease(RuntimeError):
    """A late write: the page was freed, and perhaps given to somebody else, since it was leased."""


class Lease(NamedTuple):
    """A page as it was when it was taken: `epoch` counts how often it had been freed until then."""

    page: int
    epoch: int


class Pages:
    """Reference counts of the pages 0 .. count - 1.

    Every operation takes time in proportion to the pages it names, whatever the size of the pool.
    """

    def __init__(self, count: int) -> None:
        self._holders = [0] * count
        self._free = list(range(count - 1, -1, -1))  # the lowest number first
        self._epochs = [0] * count

    def __len__(self) -> int:
        return len(self._holders)

    @property
    def free(self) -> int:
        """Pages that nobody holds."""
        return len(self._free)

    def holders(self, page: int) -> int:
        """How many hold a page."""
        return self._holders[page]

    def lease(self, page: int) -> Lease:
        """A page that somebody holds, as it is now.

        Raises:
            ValueError: nobody holds it.
        """
        if self._holders[page] < 1:
            raise ValueError(f"page {page} is free and cannot be leased")
        return Lease(page, self._epochs[page])

    def check(self, leases: Sequence[Lease]) -> None:
        """Raises StaleLease if any of these pages was freed since."""
        stale = [lease.page for lease in leases if self._epochs[lease.page] != lease.epoch]
        if stale:
            raise StaleLease(f"pages {stale} were freed since they were leased: nothing was written")

    def take(self, count: int) -> list[int]:
        """Pages that nobody held, each now held once.

        Raises:
            CapacityError: fewer are free. None was taken.
        """
        if count > len(self._free):
            raise CapacityError(f"{count} pages needed, {len(self._free)} free of {len(self)}")
        taken = [self._free.pop() for _ in range(count)]
        for page in taken:
            self._holders[page] = 1
        return taken

    def hold(self, pages: Sequence[int]) -> None:
        """One more holder of each.

        Raises:
            ValueError: a page that nobody holds: its content may be anything.
        """
        for page in pages:
            if self._holders[page] < 1:
                raise ValueError(f"page {page} is free and cannot be shared")
        for page in pages:
            self._holders[page] += 1

    def drop(self, pages: Sequence[int]) -> list[int]:
        """One holder of each less. Returns those that are free now.

        Raises:
            ValueError: a page that nobody holds.
        """
        for page in pages:
            if self._holders[page] < 1:
                raise ValueError(f"page {page} is free already")
        freed = []
        for page in pages:
            self._holders[page] -= 1
            if not self._holders[page]:
                self._epochs[page] += 1
                self._free.append(page)
                freed.append(page)
        return freed
