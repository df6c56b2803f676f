"""Late writes: what was deleted while a copy of it was under way must not come back with that copy."""

from __future__ import annotations

from .objects import Address


class Epochs:
    """Counts the deletions of every owner and namespace. A copy remembers the count with which it began."""

    def __init__(self) -> None:
        self._deleted: dict[bytes, int] = {}

    def of(self, address: Address) -> tuple[int, int]:
        """The count now."""
        return self._deleted.get(address.owner, 0), self._deleted.get(address.namespace, 0)

    def advance(self, scope: bytes) -> None:
        """All of an owner or namespace is being deleted: copies that began before are late."""
        self._deleted[scope] = self._deleted.get(scope, 0) + 1
