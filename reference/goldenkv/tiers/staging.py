"""Host memory that payloads pass through.

It is used again and again: the first touch of new memory costs more than a copy.
"""

from __future__ import annotations

import threading

import numpy as np


class Staging:
    """Buffers by size. One that several need is shared, and comes back once the last of them gives it.

    A buffer that a worker still writes into is not in here, so a late copy can reach no other object.

    Args:
        most: bytes that are kept for later.
    """

    def __init__(self, most: int = 256 << 20) -> None:
        self._most, self._kept = most, 0
        self._free: dict[int, list[np.ndarray]] = {}
        self._shares: dict[int, int] = {}
        self._lock = threading.Lock()

    def take(self, nbytes: int) -> np.ndarray:
        """Memory of so many bytes, uint8; what is in it is undefined."""
        with self._lock:
            if self._free.get(nbytes):
                self._kept -= nbytes
                return self._free[nbytes].pop()
        return np.empty(nbytes, np.uint8)

    def share(self, buffer: np.ndarray) -> None:
        """One more needs what is in it."""
        with self._lock:
            self._shares[id(buffer)] = self._shares.get(id(buffer), 0) + 1

    def give(self, buffer: np.ndarray) -> None:
        """One of those who need it does not read or write it any more."""
        with self._lock:
            others = self._shares.pop(id(buffer), 0)
            if others:
                if others > 1:
                    self._shares[id(buffer)] = others - 1
            elif self._kept + len(buffer) <= self._most:
                self._kept += len(buffer)
                self._free.setdefault(len(buffer), []).append(buffer)
