"""What the suite must be told of a store: how it is opened, what it can, and where its raw bytes are."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path

import numpy as np
import pytest

from ..tiers.objects import DIGEST_BYTES, Address, Item, Kind, Label, Tensor
from ..tiers.store import LARGEST, Store


class Clock:
    """Seconds since 1970, as a test says. It starts now: some servers drop what has expired by their own."""

    def __init__(self) -> None:
        self.now = float(int(time.time()))

    def __call__(self) -> float:
        return self.now


class Hooks:
    """Everything that a suite asks of its subclass. Only `open_store` must be there."""

    supports_ttl: bool = True
    """Time goes by the clock that `open_store` gets. Without it, tests of expiry are skipped."""

    supports_expiry_in_lists: bool = True
    """`exists` goes by that clock too, not only by one of a server."""

    supports_counted_deletions: bool = True
    """What several delete at once is counted once."""

    supports_reads_while_replaced: bool = True
    """Who reads an object that is being replaced gets one or `Missing`; without it, any error will do."""

    supports_restart: bool = False
    """A store that is opened in the same folder after `close` has the same objects."""

    supports_processes: bool = False
    """Another process can open it in the same folder at once. The suite object is sent there, by pickle."""

    supports_capacity: bool = False
    """`open_store` heeds `capacity`, and a put that finds no room raises `Full`."""

    supports_damage: bool = False
    """`read_raw` and `write_raw` are there."""

    largest: int | None = LARGEST
    """Bytes of the largest payload that is taken; None if any is."""

    alone: bool = True
    """Nobody else writes to what is opened, so `stats()` and `scan()` over all owners are compared too."""

    examples: int = 40
    """Sequences of operations that the state machine tries."""

    def open_store(self, folder: Path, clock: Callable[[], float], capacity: int | None) -> Store:
        """The store under test.

        Args:
            folder: its own, for stores that need one; empty at first.
            clock: seconds since 1970.
            capacity: bytes, heads included; None for what the tests need, 16 MiB.
        """
        raise NotImplementedError("a subclass of the suite must say how its store is opened")

    def read_raw(self, store: Store, address: Address) -> bytes:
        """The bytes that are kept for an address, whatever they are: head, payload and all."""
        raise NotImplementedError("supports_damage needs read_raw")

    def write_raw(self, store: Store, address: Address, raw: bytes) -> None:
        """Puts other bytes in their place, behind the store's back."""
        raise NotImplementedError("supports_damage needs write_raw")

    # For the tests ----------------------------------------------------------------------------------------

    @pytest.fixture
    def clock(self) -> Clock:
        return Clock()

    @pytest.fixture
    def store(self, tmp_path: Path, clock: Clock) -> Iterator[Store]:
        with self.opened(tmp_path / "store", clock) as store:
            yield store

    @contextmanager
    def reopened(
        self, folder: Path, clock: Callable[[], float], capacity: int | None = None
    ) -> Iterator[Store]:
        """The store, with what is in it; closed afterwards."""
        folder.mkdir(exist_ok=True)
        store = self.open_store(folder, clock, capacity)
        try:
            yield store
        finally:
            store.close()

    @contextmanager
    def opened(
        self, folder: Path, clock: Callable[[], float], capacity: int | None = None
    ) -> Iterator[Store]:
        """The same, and afterwards nothing of ours is left: others may use the same server."""
        with self.reopened(folder, clock, capacity) as store:
            yield store
            for owner in self.owners:
                store.delete_owner(owner)

    def need(self, what: str) -> None:
        """Skips the test for stores without something: "ttl" for `supports_ttl`."""
        if not getattr(self, f"supports_{what}"):
            pytest.skip(f"{type(self).__name__}.supports_{what} is False")

    @cached_property
    def owners(self) -> list[bytes]:
        """All that this test has used."""
        return []

    def owner(self) -> bytes:
        """An owner that nobody has used before, in this run or another one on the same server."""
        self.owners.append(os.urandom(DIGEST_BYTES))
        return self.owners[-1]

    def address(self, owner: bytes | None = None, namespace: bytes | None = None) -> Address:
        """An address that nobody has used before."""
        return Address(owner or self.owner(), namespace or os.urandom(DIGEST_BYTES), os.urandom(DIGEST_BYTES))


def make_item(address: Address, nbytes: int, seed: int = 0) -> Item:
    """A page of one tensor with random bytes."""
    payload = np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)
    tensors = (Tensor("layers.0.window_kv", "uint8", (nbytes,)),)
    return Item(Label(address, Kind.PAGE, 256, "a layout", tensors), payload)


def make_arrays(address: Address, arrays: Mapping[str, np.ndarray]) -> Item:
    """A page of these tensors."""
    return Item.of(address, Kind.PAGE, 256, "a layout", arrays)
