"""Late writes: what was deleted while a copy of it was under way must not come back with that copy."""

from __future__ import annotations

from .objects import Address


class Epochs:
    """Counts the beginnings and the ends of deletions of every owner and namespace.

    A copy remembers the counts with which it began. It is late if one has changed, or was odd: a copy that
    begins while all is being deleted can have read what is gone by now.
    """

    def __init__(self) -> None:
        self._counts: dict[bytes, int] = {}

    def of(self, address: Address) -> tuple[int, int]:
        """The counts now."""
        return self._counts.get(address.owner, 0), self._counts.get(address.namespace, 0)

    def late(self, address: Address, epoch: tuple[int, int]) -> bool:
        """Whether what a copy has written must go again, which began when `of` gave `epoch`."""
        return self.of(address) != epoch or any(count % 2 for count in epoch)

    def advance(self, scope: bytes) -> None:
        """The deletion of all of an owner or namespace begins or ends."""
        self._counts[scope] = self._counts.get(scope, 0) + 1
