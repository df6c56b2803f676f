"""Which ids the tree holds: one place each."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from ..strategies import grown


class Owned:
    """A set of small integers, one byte for each up to the largest. Ids index a pool, so they lie close."""

    def __init__(self) -> None:
        self._table = np.zeros(0, bool)
        self._count = 0

    def add(self, ids: np.ndarray) -> None:
        """Enters ids that are not in the set."""
        self._table = grown(self._table, ids)
        assert not self._table[ids].any(), "an id is held already"
        self._table[ids] = True
        self._count += len(ids)

    def remove(self, ids: Iterable[int]) -> None:
        """Takes ids out that are in the set."""
        for i in ids:
            assert self._table[i], f"id {i} was freed already"
            self._table[i] = False
            self._count -= 1

    def held(self, ids: np.ndarray) -> np.ndarray:
        """Those of these ids that are in the set."""
        known = ids[ids < len(self._table)]
        return known[self._table[known]]

    def all(self) -> set[int]:
        """Every id."""
        return set(np.flatnonzero(self._table).tolist())

    def __len__(self) -> int:
        return self._count
