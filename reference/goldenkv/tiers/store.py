"""One protocol for every store: of host memory, of a local disk, and of other machines.

`Store` is what callers see and what a store of your own can implement. `VerifiedStore` does for all of ours
what must not be forgotten: it makes heads, and it believes nothing that it reads. All calls may come from
several threads at once.
"""

from __future__ import annotations

import math
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import xxhash

from ..state import table_version
from .errors import Corrupt, Expired, Foreign
from .objects import Address, Head, Item, make_head, read_head

LARGEST = 4 << 20
"""Bytes of a payload, at most. Stores over a network fall off above; larger objects go in parts."""


@dataclass(frozen=True, slots=True)
class Entry:
    """An object as `scan` lists it: where it is, all of its bytes (head included), and until when."""

    address: Address
    nbytes: int
    expires: float | None = None


@dataclass(frozen=True, slots=True)
class Stats:
    """Objects and their bytes, heads included; `capacity` in bytes, or None where the store knows none."""

    objects: int
    nbytes: int
    capacity: int | None = None


class Store(ABC):
    """Objects by address.

    An object is there whole or not at all: nothing can be found before it is complete, and a `put` that
    raises leaves nothing of its object (what was under that address before may be gone). Over a network one
    more thing can happen: a `put` that was not answered in time, `Unavailable`, is carried out later, whole.

    What is read is verified: what comes back has the bits that were put under exactly this address, or an
    error is raised.
    """

    name: str = "store"
    """For metrics, tables and errors."""

    persistent: bool = False
    """Whether objects outlive the process."""

    capacity: int | None = None
    """Bytes of all objects, heads included, at most; None where the store sets no limit itself."""

    @abstractmethod
    def put(self, item: Item, ttl: float | None = None) -> int:
        """Keeps an object, in place of what has its address; for `ttl` seconds, or until it is deleted.

        Returns:
            The bytes that it takes, head included.

        Raises:
            Full, OverQuota, ReadOnly, Unavailable: not kept.
            ValueError: a time to live that is not positive, or a payload of more than `LARGEST` bytes.
        """

    @abstractmethod
    def get_into(self, address: Address, buffer: np.ndarray) -> Head:
        """Reads an object into memory that the caller has: uint8, contiguous, of exactly the payload's size.

        The content of `buffer` is undefined if an error is raised.

        Raises:
            Missing, Expired: it is not there.
            Corrupt, Truncated, Foreign, Unreadable: what is there cannot be used.
            Unavailable: the store does not answer.
        """

    @abstractmethod
    def get(self, address: Address) -> Item:
        """As `get_into`, into memory of its own."""

    @abstractmethod
    def exists(self, addresses: Sequence[Address]) -> list[bool]:
        """Which of these are there, in one round trip. A hint: an object can go, or be damaged, at any time.

        Raises:
            Unavailable: the store does not answer.
        """

    @abstractmethod
    def delete(self, addresses: Sequence[Address]) -> int:
        """Takes objects out; afterwards they are missing. Returns how many there were.

        Raises:
            ReadOnly, Unavailable: some may be gone.
        """

    @abstractmethod
    def scan(self, owner: bytes | None = None, namespace: bytes | None = None) -> Iterator[Entry]:
        """All objects, or those of an owner or namespace. What comes or goes meanwhile may be listed."""

    def stats(self, owner: bytes | None = None) -> Stats:
        """Of all objects, or of an owner's."""
        entries = list(self.scan(owner))
        return Stats(len(entries), sum(entry.nbytes for entry in entries))

    def delete_owner(self, owner: bytes) -> int:
        """Takes out all that an owner has. Returns how many objects."""
        return self.delete([entry.address for entry in self.scan(owner)])

    def close(self) -> None:  # noqa: B027 - not every store has something to end
        """Ends connections and files. The store cannot be used afterwards."""


def check_buffer(buffer: np.ndarray) -> None:
    """Raises ValueError unless `get_into` can read into it."""
    if buffer.dtype != np.uint8 or buffer.ndim != 1 or not buffer.flags.c_contiguous:
        raise ValueError(f"the buffer must be contiguous uint8[n], got {buffer.dtype}{list(buffer.shape)}")
    if not buffer.flags.writeable:
        raise ValueError("the buffer must be writable")


class VerifiedStore(Store):
    """A store over two operations of a place that just keeps bytes.

    Args:
        clock: seconds since 1970. A clock that goes back does not bring back what has expired: the latest
            time that was seen counts.
        verify: False shows what a store without verification would serve; for controls only.
    """

    largest: int | None = LARGEST

    def __init__(self, clock: Callable[[], float] = time.time, verify: bool = True) -> None:
        self._clock, self.verify = clock, verify
        self._latest, self._looking = 0.0, threading.Lock()

    def now(self) -> float:
        """The latest time that the clock has shown."""
        with self._looking:
            self._latest = max(self._latest, self._clock())
            return self._latest

    @abstractmethod
    def _write(self, address: Address, head: bytes, payload: np.ndarray, expires: float | None) -> None:
        """Keeps head and payload, whole or not at all.

        Args:
            address: in place of what is there.
            head, payload: the bytes; payload is uint8 and may be changed by its owner after the call.
            expires: seconds since 1970, for stores that can drop things by themselves.
        """

    @abstractmethod
    def _read(self, address: Address, allot: Callable[[bytes], np.ndarray]) -> None:
        """Finds an object and reads it.

        Calls `allot(head)`, which verifies the head and returns the memory for the payload, and fills that.
        `objects.head_size` tells the size of the head. A payload of another size than that memory is
        `Truncated`, or `Corrupt` if it is longer.

        Raises:
            Missing: nothing is there.
        """

    def put(self, item: Item, ttl: float | None = None) -> int:
        if ttl is not None and not 0 < ttl < math.inf:
            raise ValueError(f"{ttl=} must be positive seconds, or None")
        if self.largest is not None and len(item.payload) > self.largest:
            raise ValueError(
                f"a payload of {len(item.payload)} bytes, at most {self.largest}: store it in parts"
            )
        expires = None if ttl is None else self.now() + ttl
        head = make_head(item, expires)
        self._write(item.label.address, head, item.payload, expires)
        return len(head) + len(item.payload)

    def get_into(self, address: Address, buffer: np.ndarray) -> Head:
        check_buffer(buffer)
        return self._get(address, buffer)[0]

    def get(self, address: Address) -> Item:
        head, payload = self._get(address, None)
        return Item(head.label, payload, head.xxh3)

    def _get(self, address: Address, buffer: np.ndarray | None) -> tuple[Head, np.ndarray]:
        found: list[tuple[Head, np.ndarray]] = []

        def allot(raw: bytes) -> np.ndarray:
            head = read_head(raw)
            if self.verify:
                self._check(head, address)
            if buffer is not None and head.payload != len(buffer):
                raise Foreign(f"a payload of {head.payload} bytes, {len(buffer)} were expected")
            found[:] = [(head, np.empty(head.payload, np.uint8) if buffer is None else buffer)]
            return found[0][1]

        self._read(address, allot)
        head, payload = found[0]
        if self.verify and xxhash.xxh3_128_hexdigest(payload.data) != head.xxh3:
            raise Corrupt("the payload does not match its checksum")
        return head, payload

    def _check(self, head: Head, address: Address) -> None:
        """Raises Foreign or Expired unless a verified head is that of this address, and still good."""
        if head.label.address != address:
            raise Foreign("the object there carries another address")
        if head.label.table != table_version():
            raise Foreign(f"component table {head.label.table!r}, this code has {table_version()!r}")
        if head.expires is not None and head.expires <= self.now():
            raise Expired("its time is over")


class Wrapper(Store):
    """A store that does something to what goes through to another one. By itself it does nothing."""

    def __init__(self, inner: Store) -> None:
        self.inner = inner
        self.name, self.persistent, self.capacity = inner.name, inner.persistent, inner.capacity

    def put(self, item: Item, ttl: float | None = None) -> int:
        return self.inner.put(item, ttl)

    def get_into(self, address: Address, buffer: np.ndarray) -> Head:
        return self.inner.get_into(address, buffer)

    def get(self, address: Address) -> Item:
        return self.inner.get(address)

    def exists(self, addresses: Sequence[Address]) -> list[bool]:
        return self.inner.exists(addresses)

    def delete(self, addresses: Sequence[Address]) -> int:
        return self.inner.delete(addresses)

    def scan(self, owner: bytes | None = None, namespace: bytes | None = None) -> Iterator[Entry]:
        return self.inner.scan(owner, namespace)

    def stats(self, owner: bytes | None = None) -> Stats:
        return self.inner.stats(owner)

    def delete_owner(self, owner: bytes) -> int:
        return self.inner.delete_owner(owner)

    def close(self) -> None:
        self.inner.close()
