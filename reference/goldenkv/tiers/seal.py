"""Encryption at rest: AES-256-GCM with keys of each owner.

What a store under `Sealed` gets keeps its address, kind, position, layout and component table in the clear,
for the store and its tools; tensors, what other wrappers added, and the payload are encrypted:

================  =======================================================================================
tensor "sealed"   nonce (12 bytes), encrypted payload, tag (16 bytes)
extra "key"       the name of the key
extra "inside"    base64 of nonce, encrypted description (see `wrapped`), tag
================  =======================================================================================

All that is in the clear is bound to both as associated data, and the description to the payload: what is
moved to another address, relabelled, or put together from two objects does not decrypt. The time to live is
not bound, nor is an object known to be the newest of its address: who can write to the store can bring back
an old one.
"""

from __future__ import annotations

import base64
import json
import os
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import xxhash

from ..errors import MissingExtra
from .errors import Corrupt, Foreign, Missing, StoreError, Unreadable
from .keyring import KeyRing
from .objects import Address, Head, Item, Label, Tensor
from .store import Store, Wrapper, check_buffer
from .wrapped import describe, restore

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

NONCE_BYTES, TAG_BYTES = 12, 16
OVERHEAD = NONCE_BYTES + TAG_BYTES
"""Bytes by which a payload grows. One of more than `store.LARGEST` less this needs `Parts` under `Sealed`."""


class Resealed(NamedTuple):
    """What `rewrap` did: objects sealed anew, those that had the newest key, and those it could not read."""

    anew: int
    kept: int
    failed: tuple[tuple[Address, StoreError], ...]


class Sealed(Wrapper):
    """Objects of `inner`, encrypted with the keys of their owner.

    Args:
        inner: sees no byte of a payload.
        ring: the keys.
        random: so many random bytes; for nonces.

    Raises:
        MissingExtra: `cryptography` is not installed.
    """

    def __init__(self, inner: Store, ring: KeyRing, random: Callable[[int], bytes] = os.urandom) -> None:
        super().__init__(inner)
        self.ring, self._random = ring, random
        _aes()

    def put(self, item: Item, ttl: float | None = None) -> int:
        """As `Store.put`.

        Raises:
            KeyUsedUp: `KeyRing.rotate` first.
            BadKeyFile: there are no keys.
        """
        key = self.ring.take(item.label.address.owner)
        cipher, bound = _aes()(key.secret), _bound(item.label, key.id)
        description = describe(item).encode()
        nonce = self._nonce()
        inside = nonce + cipher.encrypt(nonce, description, bound + b"inside")
        nonce = self._nonce()
        sealed = np.empty(len(item.payload) + OVERHEAD, np.uint8)
        sealed[:NONCE_BYTES] = np.frombuffer(nonce, np.uint8)
        cipher.encrypt_into(nonce, item.payload.data, bound + description, sealed[NONCE_BYTES:].data)
        label = replace(
            item.label,
            tensors=(Tensor("sealed", "uint8", sealed.shape),),
            extra=(("key", key.id), ("inside", base64.b64encode(inside).decode())),
        )
        return self.inner.put(Item(label, sealed), ttl)

    def get_into(self, address: Address, buffer: np.ndarray) -> Head:
        check_buffer(buffer)
        sealed = np.empty(len(buffer) + OVERHEAD, np.uint8)
        head = self.inner.get_into(address, sealed)
        return self._open(head.label, head.expires, sealed, buffer)

    def get(self, address: Address) -> Item:
        return self._opened(self.inner.get(address))

    def rewrap(self, owner: bytes, clock: Callable[[], float] = time.time) -> Resealed:
        """Seals all of an owner's objects with its newest key, so that the older ones can be destroyed.

        What cannot be read stays as it is, and is listed: with its key destroyed it is lost. It can be called
        again after it was interrupted. An object that is deleted at the same moment may come back.

        Args:
            owner: whose.
            clock: of the store: an object keeps the rest of its time to live.
        """
        names = self.ring.names(owner)
        anew, kept, failed = 0, 0, []
        for entry in list(self.inner.scan(owner)):
            try:
                outer = self.inner.get(entry.address)
                if dict(outer.label.extra).get("key") in names[-1:]:
                    kept += 1
                    continue
                expires = self.inner.get_into(entry.address, outer.payload).expires
                item = self._opened(outer)
                rest = None if expires is None else expires - clock()
                if rest is None or rest > 0:
                    self.put(item, rest)
                    anew += 1
            except Missing:
                continue
            except StoreError as error:
                failed.append((entry.address, error))
        return Resealed(anew, kept, tuple(failed))

    def _nonce(self) -> bytes:
        nonce = self._random(NONCE_BYTES)
        if len(nonce) != NONCE_BYTES:
            raise ValueError(f"random({NONCE_BYTES}) gave {len(nonce)} bytes")
        return nonce

    def _opened(self, outer: Item) -> Item:
        payload = np.empty(max(0, len(outer.payload) - OVERHEAD), np.uint8)
        head = self._open(outer.label, None, outer.payload, payload)
        return Item(head.label, payload, head.xxh3)

    def _open(self, outer: Label, expires: float | None, sealed: np.ndarray, buffer: np.ndarray) -> Head:
        """Decrypts into a buffer. Only keys of the owner in the address are tried."""
        from cryptography.exceptions import InvalidTag

        extra = dict(outer.extra)
        if [tensor.name for tensor in outer.tensors] != ["sealed"] or not {"key", "inside"} <= extra.keys():
            raise Foreign("the object there is not encrypted")
        key = self.ring.find(outer.address.owner, extra["key"])
        cipher, bound = _aes()(key.secret), _bound(outer, key.id)
        try:
            inside = base64.b64decode(extra["inside"], validate=True)
            description = cipher.decrypt(inside[:NONCE_BYTES], inside[NONCE_BYTES:], bound + b"inside")
            nonce = sealed[:NONCE_BYTES].tobytes()
            cipher.decrypt_into(nonce, sealed[NONCE_BYTES:].data, bound + description, buffer.data)
        except (InvalidTag, ValueError):
            raise Unreadable("it does not decrypt: it is altered, moved, or of another key") from None
        head = restore(description, outer, expires)
        if xxhash.xxh3_128_hexdigest(buffer.data) != head.xxh3:
            raise Corrupt("the payload was not that of its checksum when it was encrypted")
        return head


def _bound(label: Label, key: str) -> bytes:
    """What stays in the clear, as associated data. A JSON list ends where it ends: more can follow."""
    address = [part.hex() for part in label.address]
    return json.dumps([*address, label.kind.value, label.position, label.layout, label.table, key]).encode()


def _aes() -> type[AESGCM]:
    try:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    except ImportError as error:
        raise MissingExtra("tiers", "encryption at rest") from error
    return AESGCM
