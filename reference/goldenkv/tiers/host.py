"""Objects in host memory: one arena, touched once, in blocks.

Fresh memory is slow: its first touch takes several times as long as a copy into it. So all of the arena is
written at the start, and objects come and go in blocks of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from .memory import Held, MemoryStore


class HostStore(MemoryStore):
    """Objects in numpy memory. What is put is copied in: no array of the caller is ever kept.

    Args:
        capacity: bytes of all heads and payloads together, at most. That much memory is taken at once.
        block: bytes. A payload takes whole blocks, so that there may be no room before `capacity` is reached.
        copy: `copy(to, source)`, both uint8 [n]; tests stop it half-way.
        clock, verify: see `VerifiedStore`.
    """

    name = "host"

    def __init__(
        self,
        capacity: int,
        *,
        block: int = 64 << 10,
        copy: Callable[[np.ndarray, np.ndarray], None] = np.copyto,
        clock: Callable[[], float] = time.time,
        verify: bool = True,
    ) -> None:
        super().__init__(capacity, clock, verify)
        if block < 1:
            raise ValueError(f"{block=} must be bytes, 1 or more")
        self._block, self._copy = block, copy
        self._arena = np.full(capacity // block * block, 0, np.uint8)
        self._blocks = list(reversed(range(capacity // block)))
        """Those that are free. The last goes first, so that an object mostly has neighbours."""

    @property
    def free(self) -> int:
        """Bytes in free blocks."""
        return len(self._blocks) * self._block

    def _needed(self, payload: int) -> int:
        return -(-payload // self._block)

    def _room(self, payload: int, without: Held | None) -> bool:
        freed = self._needed(without.payload) if without and not without.readers else 0
        return len(self._blocks) + freed >= self._needed(payload)

    def _take(self, entry: Held) -> None:
        rest = len(self._blocks) - self._needed(entry.payload)
        entry.memory = self._blocks[rest:][::-1]
        del self._blocks[rest:]

    def _free(self, entry: Held) -> None:
        self._blocks.extend(reversed(entry.memory))

    def _copy_in(self, entry: Held, payload: np.ndarray) -> None:
        at = 0
        for piece in self._pieces(entry):
            self._copy(piece, payload[at : at + len(piece)])
            at += len(piece)

    def _copy_out(self, entry: Held, buffer: np.ndarray) -> None:
        at = 0
        for piece in self._pieces(entry):
            self._copy(buffer[at : at + len(piece)], piece)
            at += len(piece)

    def _pieces(self, entry: Held) -> list[np.ndarray]:
        """The memory of an entry, in order; neighbouring blocks are one piece."""
        runs: list[list[int]] = []
        for block in entry.memory:
            if runs and runs[-1][1] == block:
                runs[-1][1] += 1
            else:
                runs.append([block, block + 1])
        pieces = [self._arena[first * self._block : stop * self._block] for first, stop in runs]
        if pieces:
            spare = len(entry.memory) * self._block - entry.payload
            pieces[-1] = pieces[-1][: len(pieces[-1]) - spare]
        return pieces
