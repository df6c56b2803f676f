"""What stores in memory share: entries by address within a capacity, and leases on what is being read.

Copies run without the lock. So an entry that is deleted or replaced while somebody reads it keeps its memory
until the last reader has let go of it; only then can another object have that memory.
"""

from __future__ import annotations

import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .errors import Corrupt, Full, Missing, Truncated
from .objects import Address
from .store import Entry, Stats, VerifiedStore


@dataclass(slots=True, eq=False)
class Held:
    """An object in memory.

    Attributes:
        head: its head.
        payload: bytes of its payload.
        expires: seconds since 1970, or None.
        memory: where the payload is; what that is, the store knows.
        readers: leases on it.
        gone: it cannot be found any more.
    """

    head: bytes
    payload: int
    expires: float | None
    memory: Any = None
    readers: int = 0
    gone: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of head and payload."""
        return len(self.head) + self.payload


class MemoryStore(VerifiedStore):
    """Objects in memory, of this process alone.

    Where room lacks, what has expired goes first; nothing else is evicted. An object that is put in place of
    another is written beside it where there is room, else in its stead.

    Args:
        capacity: bytes of all heads and payloads together, at most.
        clock, verify: see `VerifiedStore`.
    """

    def __init__(self, capacity: int, clock: Callable[[], float] = time.time, verify: bool = True) -> None:
        if capacity < 0:
            raise ValueError(f"{capacity=} must be bytes, 0 or more")
        super().__init__(clock, verify)
        self.capacity: int = capacity
        self._lock = threading.Lock()
        self._entries: dict[Address, Held] = {}
        self._used = 0

    # What a kind of memory does. `_room`, `_take` and `_free` are called under the lock, the copies are not.

    def _room(self, payload: int, without: Held | None) -> bool:
        """Whether there is memory for a payload, now or once the entry `without` is gone."""
        return True

    def _take(self, entry: Held) -> None:
        """Takes memory for an entry; there is room."""

    @abstractmethod
    def _copy_in(self, entry: Held, payload: np.ndarray) -> None:
        """Copies a payload into an entry; afterwards nothing of it is aliased."""

    @abstractmethod
    def _copy_out(self, entry: Held, buffer: np.ndarray) -> None:
        """Copies the payload of an entry into a buffer of its size."""

    @abstractmethod
    def _free(self, entry: Held) -> None:
        """Gives the memory of an entry back: nobody reads it. `_copy_in` may have failed."""

    # ------------------------------------------------------------------------------------------------------

    def _write(self, address: Address, head: bytes, payload: np.ndarray, expires: float | None) -> None:
        entry = Held(head, len(payload), expires)
        with self._lock:
            self._make_room(address, entry)
            self._used += entry.nbytes
            self._take(entry)
        try:
            self._copy_in(entry, payload)
        except BaseException:
            with self._lock:
                self._used -= entry.nbytes
                self._free(entry)
            raise
        with self._lock:
            self._remove(address)
            self._entries[address] = entry

    def _read(self, address: Address, allot: Callable[[bytes], np.ndarray]) -> None:
        entry = self._lease(address)
        try:
            buffer = allot(entry.head)
            if len(buffer) != entry.payload:
                error = Truncated if entry.payload < len(buffer) else Corrupt
                raise error(f"a payload of {entry.payload} bytes, its head says {len(buffer)}")
            self._copy_out(entry, buffer)
        finally:
            self._release(entry)

    def _lease(self, address: Address) -> Held:
        """Finds an entry whose memory nobody else gets before `_release`."""
        with self._lock:
            entry = self._entries.get(address)
            if entry is None:
                raise Missing("not in memory")
            entry.readers += 1
            return entry

    def _release(self, entry: Held) -> None:
        with self._lock:
            entry.readers -= 1
            if entry.gone and not entry.readers:
                self._free(entry)

    def _make_room(self, address: Address, entry: Held) -> None:
        """Raises Full, with everything as it was, or takes out what must go."""
        if self._fits(entry, None):
            return
        now = self.now()
        for other, held in list(self._entries.items()):
            if held.expires is not None and held.expires <= now:
                self._remove(other)
        if self._fits(entry, None):
            return
        old = self._entries.get(address)
        if old is None or not self._fits(entry, old):
            raise Full(f"no room for {entry.nbytes} bytes: {self._used} of {self.capacity} are taken")
        self._remove(address)

    def _fits(self, entry: Held, without: Held | None) -> bool:
        used = self._used - (without.nbytes if without else 0)
        return used + entry.nbytes <= self.capacity and self._room(entry.payload, without)

    def _remove(self, address: Address) -> bool:
        entry = self._entries.pop(address, None)
        if entry is None:
            return False
        self._used -= entry.nbytes
        entry.gone = True
        if not entry.readers:
            self._free(entry)
        return True

    def exists(self, addresses: Sequence[Address]) -> list[bool]:
        with self._lock:
            now = self.now()
            found = [self._entries.get(address) for address in addresses]
            return [e is not None and (e.expires is None or e.expires > now) for e in found]

    def delete(self, addresses: Sequence[Address]) -> int:
        with self._lock:
            return sum(self._remove(address) for address in addresses)

    def scan(self, owner: bytes | None = None, namespace: bytes | None = None) -> Iterator[Entry]:
        with self._lock:
            entries = [Entry(address, held.nbytes, held.expires) for address, held in self._entries.items()]
        now = self.now()
        for entry in entries:
            asked = owner in (None, entry.address.owner) and namespace in (None, entry.address.namespace)
            if asked and (entry.expires is None or entry.expires > now):
                yield entry

    def stats(self, owner: bytes | None = None) -> Stats:
        if owner is None:
            with self._lock:
                return Stats(len(self._entries), self._used, self.capacity)
        found = super().stats(owner)
        return Stats(found.objects, found.nbytes, self.capacity)

    def close(self) -> None:
        with self._lock:
            for address in list(self._entries):
                self._remove(address)
