"""Many objects: which are there, whose they are, and that nothing of one owner is another's."""

from __future__ import annotations

import traceback
from pathlib import Path

import numpy as np
import pytest

from ..tiers.errors import Missing, StoreError
from ..tiers.objects import Address
from ..tiers.store import Entry, Store
from .hooks import Hooks, make_item
from .objects import check_same


class Directory(Hooks):
    """What is there."""

    def test_exists_answers_in_order(self, store: Store) -> None:
        """Finds answers that are sorted, made unique, or cut to a batch."""
        owner = self.owner()
        there = [self.address(owner) for _ in range(3)]
        for address in there:
            store.put(make_item(address, 10))
        other = [self.address(owner) for _ in range(3)]
        assert store.exists([]) == []
        assert store.exists(there[:1]) == [True]
        assert store.exists(other[:1]) == [False]
        batch = [there[0], other[0], there[0], other[0], *there, *other, there[2]] * 40
        assert store.exists(batch) == [address in there for address in batch]

    def test_empty_payloads_exist(self, store: Store) -> None:
        """Finds a store that takes no bytes for no object, or the other way round. Mooncake#3465"""
        address = self.address()
        assert store.exists([address]) == [False]
        store.put(make_item(address, 0))
        assert store.exists([address]) == [True]
        assert store.delete([address]) == 1
        assert store.exists([address]) == [False]

    def test_what_is_deleted_is_missing(self, store: Store) -> None:
        """Finds objects that are taken from a list and still served, and deletions that last too long."""
        owner = self.owner()
        first, second = make_item(self.address(owner), 100), make_item(self.address(owner), 200)
        store.put(first)
        store.put(second)
        address = first.label.address
        assert store.delete([address]) == 1
        assert store.exists([address, second.label.address]) == [False, True]
        with pytest.raises(Missing):
            store.get(address)
        with pytest.raises(Missing):
            store.get_into(address, np.zeros(100, np.uint8))
        check_same(store, second)
        store.put(first)
        check_same(store, first)

    def test_deletions_are_counted_by_what_was_there(self, store: Store) -> None:
        """Finds counts of requests: quotas that go by them become negative."""
        owner = self.owner()
        there, other = self.address(owner), self.address(owner)
        store.put(make_item(there, 100))
        assert store.delete([]) == 0
        assert store.delete([other]) == 0
        assert store.exists([there]) == [True]
        assert store.delete([other, there, there]) == 1
        assert store.delete([there]) == 0

    def test_an_owner_who_guesses_a_key_finds_nothing(self, store: Store) -> None:
        """Finds a store that goes by the key alone, or by namespace and key. vllm#44250"""
        mine = self.address()
        self.check_apart(store, mine, mine._replace(owner=self.owner()))

    def test_a_namespace_is_part_of_the_address(self, store: Store) -> None:
        """Finds state of another model, adapter or layout under equal keys. vllm#55191"""
        mine = self.address()
        self.check_apart(store, mine, self.address(mine.owner)._replace(key=mine.key))

    def check_apart(self, store: Store, mine: Address, other: Address) -> None:
        """Nothing done under one address shows under the other."""
        item = make_item(mine, 100, seed=1)
        store.put(item)
        assert store.exists([mine, other]) == [True, False]
        with pytest.raises(Missing):
            store.get(other)
        with pytest.raises(Missing):
            store.get_into(other, np.zeros(100, np.uint8))
        assert store.delete([other]) == 0
        check_same(store, item)
        another = make_item(other, 100, seed=2)
        store.put(another)
        check_same(store, item)
        check_same(store, another)
        assert store.delete([other]) == 1
        check_same(store, item)

    def test_scan_lists_what_is_asked_for(self, store: Store) -> None:
        """Finds lists that lack some, repeat some, or show one owner another's. Across pages of a server."""
        owners = [self.owner(), self.owner()]
        shared = self.address().namespace
        entries: set[Entry] = set()
        for owner in owners:
            for namespace in (shared, self.address().namespace):
                for seed in range(8):
                    item = make_item(self.address(owner, namespace), 10 * seed)
                    entries.add(Entry(item.label.address, store.put(item)))
        for owner in owners:
            for within in (None, *{entry.address.namespace for entry in entries}):
                found = list(store.scan(owner, within))
                assert len(found) == len(set(found)), "an object is listed twice"
                assert set(found) == {
                    entry
                    for entry in entries
                    if entry.address.owner == owner and within in (None, entry.address.namespace)
                }
        found = [entry for entry in store.scan(namespace=shared) if entry.address.owner in owners]
        assert len(found) == len(set(found)), "an object is listed twice"
        assert set(found) == {entry for entry in entries if entry.address.namespace == shared}
        assert list(store.scan(self.owner())) == []

    def test_stats_are_those_of_the_owner(self, store: Store) -> None:
        """Finds totals that leave out heads or mix owners."""
        owners = [self.owner(), self.owner()]
        for count, owner in enumerate(owners):
            taken = [store.put(make_item(self.address(owner), 50 * seed)) for seed in range(count + 2)]
            stats = store.stats(owner)
            assert (stats.objects, stats.nbytes) == (len(taken), sum(taken))
        nothing = store.stats(self.owner())
        assert (nothing.objects, nothing.nbytes) == (0, 0)
        total = store.stats()
        if self.alone:
            assert total.objects == sum(store.stats(owner).objects for owner in owners)
            assert total.nbytes == sum(store.stats(owner).nbytes for owner in owners)

    def test_deleting_an_owner_leaves_the_others(self, store: Store) -> None:
        """Finds deletion by a part of the name: the neighbours differ in the first byte, or the last."""
        owner = self.owner()
        neighbours = [bytes([owner[0] ^ 1]) + owner[1:], owner[:-1] + bytes([owner[-1] ^ 1])]
        self.owners.extend(neighbours)
        gone = [make_item(self.address(owner), 100 + seed) for seed in range(5)]
        kept = [make_item(item.label.address._replace(owner=n), 100) for n in neighbours for item in gone]
        for item in gone + kept:
            store.put(item)
        assert store.delete_owner(owner) == len(gone)
        assert store.exists([item.label.address for item in gone]) == [False] * len(gone)
        assert store.stats(owner).objects == 0
        assert list(store.scan(owner)) == []
        for item in kept:
            check_same(store, item)
        assert store.delete_owner(owner) == 0

    def test_errors_say_nothing_of_what_is_stored(self, store: Store, tmp_path: Path) -> None:
        """Finds keys, owners and paths in what ends up in logs, also from the errors behind an error."""
        address = self.address()
        with pytest.raises(Missing) as missing:
            store.get(address)
        store.put(make_item(address, 100))
        with pytest.raises(StoreError) as foreign:
            store.get_into(address, np.zeros(99, np.uint8))
        for error in (missing.value, foreign.value):
            text = "".join(traceback.format_exception(error)) + repr(error)
            for part in (*address, address.key[:8], address.owner[:8]):
                assert part.hex() not in text and repr(part)[2:-1] not in text
            assert str(tmp_path) not in text
            assert error.reason and not set(error.reason) & set("0123456789")
