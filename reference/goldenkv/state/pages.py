"""Who holds the pages of a pool: reference counts, and a free list.

A page can be held by several sequences and by a cache at once. Whoever writes into a page must be its only
holder: others get a copy first (`Sequences` does that). The device arrays themselves are in `pool`.
"""

from __future__ import annotations

from collections.abc import Sequence


class CapacityError(RuntimeError):
    """No free slot, too few free pages, or a sequence past the maximum length. Nothing has changed."""


class Pages:
    """Reference counts of the pages 0 .. count - 1.

    Every operation takes time in proportion to the pages it names, whatever the size of the pool.
    """

    def __init__(self, count: int) -> None:
        self._holders = [0] * count
        self._free = list(range(count - 1, -1, -1))  # the lowest number first

    def __len__(self) -> int:
        return len(self._holders)

    @property
    def free(self) -> int:
        """Pages that nobody holds."""
        return len(self._free)

    def holders(self, page: int) -> int:
        """How many hold a page."""
        return self._holders[page]

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
                self._free.append(page)
                freed.append(page)
        return freed
