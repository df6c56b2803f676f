"""How long objects stay: until their time is over, until there is no room, over restarts and processes."""

from __future__ import annotations

import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from ..tiers.errors import Full, Missing
from ..tiers.objects import Address, Item
from ..tiers.store import Store
from .hooks import Clock, Hooks, make_item
from .objects import check_same


class Lifetimes(Hooks):
    """When objects go, and when they must not."""

    def test_time_to_live_ends(self, store: Store, clock: Clock) -> None:
        """Finds expiry that is ignored, or comes early, or takes more than what has expired."""
        self.need("ttl")
        owner, began = self.owner(), clock.now
        short, long = make_item(self.address(owner), 100), make_item(self.address(owner), 200)
        forever = make_item(self.address(owner), 300)
        store.put(short, ttl=100)
        store.put(long, ttl=1000)
        store.put(forever)
        for later, there in ((0, [short, long, forever]), (99, [short, long, forever]),
                             (100, [long, forever]), (999, [long, forever]), (1000, [forever]),
                             (10**9, [forever])):  # fmt: skip
            clock.now = began + later
            for item in (short, long, forever):
                if item in there:
                    check_same(store, item)
                else:
                    with pytest.raises(Missing):
                        store.get(item.label.address)
        store.put(short)
        check_same(store, short)

    def test_what_has_expired_is_not_there(self, store: Store, clock: Clock) -> None:
        """Finds a look-up that promises what get then refuses. LMCache#4133"""
        self.need("expiry_in_lists")
        address = self.address()
        store.put(make_item(address, 100), ttl=100)
        assert store.exists([address]) == [True]
        clock.now += 99
        assert store.exists([address]) == [True]
        clock.now += 1
        assert store.exists([address]) == [False]

    def test_scan_says_until_when(self, store: Store, clock: Clock) -> None:
        """Finds lists by which what has expired cannot be told from what has not."""
        self.need("ttl")
        address = self.address()
        store.put(make_item(address, 100), ttl=100)
        (entry,) = store.scan(address.owner)
        assert entry.expires is None or abs(entry.expires - (clock.now + 100)) < 1
        if self.supports_expiry_in_lists:
            clock.now += 100
            for entry in store.scan(address.owner):  # it may be listed for as long as it takes room
                assert entry.expires is None or entry.expires < clock.now + 1

    def test_a_clock_that_goes_back_revives_nothing(self, store: Store, clock: Clock) -> None:
        """Finds expiry that a corrected clock takes back."""
        self.need("ttl")
        address, began = self.address(), clock.now
        store.put(make_item(address, 100), ttl=100)
        clock.now = began + 100
        with pytest.raises(Missing):
            store.get(address)
        clock.now = began
        with pytest.raises(Missing):
            store.get(address)

    def test_each_put_has_its_own_time(self, store: Store, clock: Clock) -> None:
        """Finds an expiry that outlives its object: with it goes what came after."""
        self.need("ttl")
        began = clock.now
        item, other = make_item(self.address(), 100), make_item(self.address(), 100)
        store.put(item, ttl=10)
        store.put(item)
        store.put(other)
        store.put(other, ttl=10)
        clock.now = began + 20
        check_same(store, item)
        with pytest.raises(Missing):
            store.get(other.label.address)

    @pytest.mark.parametrize("ttl", [0, -1, float("nan"), float("inf")])
    def test_a_time_to_live_must_be_one(self, store: Store, ttl: float) -> None:
        """Finds times that are taken for "forever"."""
        item = make_item(self.address(), 100)
        with pytest.raises(ValueError):
            store.put(item, ttl)
        assert store.exists([item.label.address]) == [False]

    def test_what_finds_no_room_is_not_there(self, tmp_path: Path, clock: Clock) -> None:
        """Finds halves of refused objects, and other objects that went for nothing. LMCache#4991"""
        self.need("capacity")
        with self.opened(tmp_path, clock, capacity=300_000) as store:
            owner, kept = self.owner(), list[Item]()
            while True:
                item = make_item(self.address(owner), 65_536, seed=len(kept))
                try:
                    store.put(item)
                except Full:
                    break
                kept.append(item)
                assert len(kept) * 65_536 <= 300_000, "more than its capacity"
            assert len(kept) >= 2
            stats = store.stats()
            assert stats.objects == len(kept)
            assert stats.capacity is not None and stats.nbytes <= stats.capacity <= 300_000
            assert store.exists([item.label.address]) == [False]
            with pytest.raises(Missing):
                store.get(item.label.address)
            for there in kept:
                check_same(store, there)
            with pytest.raises(Full):
                store.put(make_item(self.address(owner), 400_000))
            assert store.stats() == stats

    def test_room_comes_back(self, tmp_path: Path, clock: Clock) -> None:
        """Finds bytes that stay taken after deletions, overwrites and refusals."""
        self.need("capacity")
        with self.opened(tmp_path, clock, capacity=300_000) as store:
            address = self.address()
            for seed in range(10):
                item = make_item(address, 100_000, seed)
                store.put(item)  # in place of the one before, or after it is deleted
                check_same(store, item)
                with pytest.raises(Full):
                    store.put(make_item(self.address(address.owner), 300_001))
                if seed % 2:
                    assert store.delete([address]) == 1

    def test_a_restart_changes_nothing(self, tmp_path: Path, clock: Clock) -> None:
        """Finds an index that is only in memory, and deleted or older objects that return. LMCache#4778"""
        self.need("restart")
        owner = self.owner()
        items = [make_item(self.address(owner), nbytes, seed=nbytes) for nbytes in (0, 1, 4097, 5, 6)]
        newer = make_item(items[2].label.address, 300, seed=1)
        with self.reopened(tmp_path, clock) as store:
            for item in items[:4]:
                store.put(item)
            store.put(newer)
            store.delete([items[3].label.address])
            store.put(items[4], ttl=100)
            stats, sizes = store.stats(owner), self.sizes(store, owner)
        for _ in range(2):
            with self.reopened(tmp_path, clock) as store:
                assert store.stats(owner) == stats
                assert self.sizes(store, owner) == sizes
                for item in (items[0], items[1], newer, items[4]):
                    check_same(store, item)
                with pytest.raises(Missing):
                    store.get(items[3].label.address)
        clock.now += 100
        with self.opened(tmp_path, clock) as store, pytest.raises(Missing):
            store.get(items[4].label.address)

    def sizes(self, store: Store, owner: bytes) -> dict[Address, int]:
        return {entry.address: entry.nbytes for entry in store.scan(owner)}

    def test_processes_see_each_other(self, tmp_path: Path, clock: Clock) -> None:
        """Finds what a process believes of its own index while another one writes."""
        self.need("processes")
        address = self.address()
        first, second = make_item(address, 5000, seed=1), make_item(address, 7000, seed=2)
        with (
            self.opened(tmp_path, clock) as store,
            ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as other,
        ):
            other.submit(put_there, self, tmp_path, first).result()
            assert store.exists([address]) == [True]
            check_same(store, first)
            store.put(second)
            other.submit(check_there, self, tmp_path, second).result()
            other.submit(put_there, self, tmp_path, first).result()
            check_same(store, first)
            assert store.stats(address.owner).objects == 1
            assert other.submit(delete_there, self, tmp_path, address).result() == 1
            assert store.exists([address]) == [False]
            with pytest.raises(Missing):
                store.get(address)


# In the other process, which has a store of its own open for the time of one call.


def put_there(suite: Hooks, folder: Path, item: Item) -> None:
    with suite.reopened(folder, time.time) as store:
        store.put(item)


def check_there(suite: Hooks, folder: Path, item: Item) -> None:
    with suite.reopened(folder, time.time) as store:
        check_same(store, item)


def delete_there(suite: Hooks, folder: Path, address: Address) -> int:
    with suite.reopened(folder, time.time) as store:
        return store.delete([address])
