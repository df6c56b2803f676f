"""Objects larger than a store takes, in parts.

A large object is stored as parts of `largest` bytes, each an object of its own, and a first one without any
bytes, which is written last: it says how large the parts and the whole are, and has the XXH3 of the whole.
Until it is there, nothing is; once it is deleted, nothing is any more. The key of a part is made of four:

========  ============================================================================================
12 bytes  BLAKE2b of the object's key: to which it belongs
8 bytes   of the XXH3 of the whole: to which version. So parts of two versions are never taken for one
4 bytes   its number
8 bytes   BLAKE2b of these 24 bytes: a listing tells parts from other objects, whose keys are digests
========  ============================================================================================
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import xxhash

from .errors import Corrupt, Foreign, Missing, StoreError, Unreadable
from .objects import DIGEST_BYTES, Address, Head, Item, Label, Tensor
from .store import LARGEST, Entry, Stats, Store, Wrapper, check_buffer
from .wrapped import describe, restore

_LINK, _BODY = 12, 24
"""Bytes of a part's key that say to which object it belongs, and those before its mark."""


class _Parts(NamedTuple):
    """What the first object says of a large one: the head of the whole, and bytes of a part."""

    head: Head
    size: int

    @staticmethod
    def of(first: Label, expires: float | None) -> _Parts | None:
        """From the label of what is under an object's address; None where that is the object itself.

        Raises:
            Corrupt: it is one, and says too little.
        """
        extra = dict(first.extra)
        if "part_bytes" not in extra:
            return None
        try:
            found = _Parts(restore(extra["whole"], first, expires), int(extra["part_bytes"]))
            if found.size > 0:
                return found
        except (ValueError, KeyError):
            pass
        raise Corrupt("it does not say what its parts are")

    @property
    def addresses(self) -> list[Address]:
        """Where the parts are, in order."""
        address, version = self.head.label.address, bytes.fromhex(self.head.xxh3)[:8]
        count = -(-self.head.payload // self.size)
        bodies = [_link(address.key) + version + number.to_bytes(4, "big") for number in range(count)]
        return [address._replace(key=body + _mark(body)) for body in bodies]


class Parts(Wrapper):
    """Objects of any size over a store that takes `largest` bytes at a time; smaller ones go through as are.

    Stores that are opened again need the same `largest`: with another, an object of a size between the two is
    Foreign. A put first looks for parts of what it replaces.

    Args:
        inner: where all goes.
        largest: bytes of a payload that is stored in one piece, and of a part.
    """

    def __init__(self, inner: Store, largest: int = LARGEST) -> None:
        super().__init__(inner)
        if largest < 1:
            raise ValueError(f"{largest=} must be bytes, 1 or more")
        self.largest = largest
        self._changed = threading.Condition()
        self._changing: set[Address] = set()

    def put(self, item: Item, ttl: float | None = None) -> int:
        """As `Store.put`, of any size."""
        address = item.label.address
        with self._alone([address]):
            old = self._parts(address)
            if len(item.payload) <= self.largest:
                new, taken = set[Address](), self.inner.put(item, ttl)
            else:
                new, taken = self._put_parts(item, ttl)
            with contextlib.suppress(StoreError):  # it is there; `collect` finds what stays
                self._delete([part for part in (old.addresses if old else ()) if part not in new])
        return taken

    def _put_parts(self, item: Item, ttl: float | None) -> tuple[set[Address], int]:
        label, payload, largest = item.label, item.payload, self.largest
        addresses = _Parts(Head(label, len(payload), item.xxh3, None), largest).addresses
        extra = (("part_bytes", str(largest)), ("whole", describe(item)))
        first = replace(label, tensors=(Tensor("parts", "uint8", (0,)),), extra=extra)
        taken = 0
        try:
            for number, address in enumerate(addresses):
                piece = payload[number * largest : (number + 1) * largest]
                tensors = (Tensor("part", "uint8", piece.shape),)
                part = replace(label, address=address, tensors=tensors, extra=())
                taken += self.inner.put(Item(part, piece), ttl)
            taken += self.inner.put(Item(first, payload[:0]), ttl)
        except BaseException:
            with contextlib.suppress(StoreError):
                # What was there goes too: it may have had the same parts.
                self._delete_whole([label.address])
                self._delete(addresses)
            raise
        return set(addresses), taken

    def get_into(self, address: Address, buffer: np.ndarray) -> Head:
        check_buffer(buffer)
        lost = None
        while True:
            small = len(buffer) <= self.largest
            head = self.inner.get_into(address, buffer if small else np.empty(0, np.uint8))
            parts = _Parts.of(head.label, head.expires)
            if parts is None and small:
                return head
            found = 0 if parts is None else parts.head.payload
            if parts is None or found != len(buffer):
                raise Foreign(f"a payload of {found} bytes, {len(buffer)} were expected")
            try:
                return self._join(parts, buffer)
            except Missing:
                if parts == lost:
                    raise
                lost = parts  # another version may have come in between: once more

    def get(self, address: Address) -> Item:
        lost = None
        while True:
            item = self.inner.get(address)
            parts = _Parts.of(item.label, None)
            if parts is None:
                return item
            payload = np.empty(parts.head.payload, np.uint8)
            try:
                head = self._join(parts, payload)
                return Item(head.label, payload, head.xxh3)
            except Missing:
                if parts == lost:
                    raise
                lost = parts

    def _join(self, parts: _Parts, buffer: np.ndarray) -> Head:
        for number, address in enumerate(parts.addresses):
            self.inner.get_into(address, buffer[number * parts.size : (number + 1) * parts.size])
        if xxhash.xxh3_128_hexdigest(buffer.data) != parts.head.xxh3:
            raise Corrupt("the parts do not make the whole")
        return parts.head

    def _parts(self, address: Address) -> _Parts | None:
        """Where the parts of an object are, if it is a large one and can be read."""
        try:
            head = self.inner.get_into(address, np.empty(0, np.uint8))
            return _Parts.of(head.label, head.expires)
        except (Missing, Corrupt, Foreign, Unreadable):
            return None

    def delete(self, addresses: Sequence[Address]) -> int:
        """As `Store.delete`; of every large object first what makes it visible."""
        with self._alone(addresses):
            return self._delete_whole(addresses)

    def _delete_whole(self, addresses: Sequence[Address]) -> int:
        found = [self._parts(address) for address in addresses]
        count = self.inner.delete(addresses)
        self._delete([part for parts in found if parts for part in parts.addresses])
        return count

    def _delete(self, parts: list[Address]) -> None:
        if parts:
            self.inner.delete(parts)

    def scan(self, owner: bytes | None = None, namespace: bytes | None = None) -> Iterator[Entry]:
        """As `Store.scan`, of whole objects: the bytes of a large one are those of all its parts."""
        wholes, pieces = self._listed(owner, namespace)
        for entry in wholes:
            linked = pieces.get(_linked(entry.address), [])
            parts = self._parts(entry.address) if linked else None
            own = set(parts.addresses) if parts else set()
            nbytes = entry.nbytes + sum(piece.nbytes for piece in linked if piece.address in own)
            yield replace(entry, nbytes=nbytes)

    def stats(self, owner: bytes | None = None) -> Stats:
        entries = list(self.scan(owner))
        return Stats(len(entries), sum(entry.nbytes for entry in entries), self.inner.stats(owner).capacity)

    def delete_owner(self, owner: bytes) -> int:
        objects = len(self._listed(owner, None)[0])
        self.inner.delete_owner(owner)
        return objects

    def collect(self, owner: bytes | None = None) -> int:
        """Deletes parts of no object, which a process left that ended in the middle. Returns how many.

        They are in no listing and no count before. What another process is putting may be among them: that
        object is then a miss.
        """
        _, pieces = self._listed(owner, None)
        with self._changed:
            changing = {_linked(address) for address in self._changing}
        # Listed again: an object of which parts are in the first list is being changed, or is visible by now.
        wholes, _ = self._listed(owner, None)
        needed: set[Address] = set()
        for entry in wholes:
            if _linked(entry.address) in pieces:
                parts = self._parts(entry.address)
                needed.update(parts.addresses if parts else ())
        left = [
            piece.address
            for link, found in pieces.items()
            if link not in changing
            for piece in found
            if piece.address not in needed
        ]
        self._delete(left)
        return len(left)

    def _listed(
        self, owner: bytes | None, namespace: bytes | None
    ) -> tuple[list[Entry], dict[Address, list[Entry]]]:
        """Objects; and parts, by an address whose key is the beginning of theirs."""
        wholes: list[Entry] = []
        pieces: dict[Address, list[Entry]] = defaultdict(list)
        for entry in self.inner.scan(owner, namespace):
            key = entry.address.key
            if key[_BODY:] == _mark(key[:_BODY]):
                pieces[entry.address._replace(key=key[:_LINK])].append(entry)
            else:
                wholes.append(entry)
        return wholes, pieces

    @contextlib.contextmanager
    def _alone(self, addresses: Sequence[Address]) -> Iterator[None]:
        """Nobody else in this process changes these objects."""
        wanted = set(addresses)
        with self._changed:
            self._changed.wait_for(lambda: not wanted & self._changing)
            self._changing |= wanted
        try:
            yield
        finally:
            with self._changed:
                self._changing -= wanted
                self._changed.notify_all()


def _linked(address: Address) -> Address:
    """An object's address, with the beginning of its parts' keys."""
    return address._replace(key=_link(address.key))


def _link(key: bytes) -> bytes:
    return hashlib.blake2b(key, digest_size=_LINK, person=b"gkv1.part").digest()


def _mark(body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=DIGEST_BYTES - _BODY, person=b"gkv1.part.mark").digest()
