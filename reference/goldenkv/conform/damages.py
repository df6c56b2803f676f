"""Damage behind the store's back: whatever happens to raw bytes, nobody gets them as if they were good."""

from __future__ import annotations

import numpy as np
import pytest

from ..tiers.errors import StoreError
from ..tiers.objects import Address, Item, head_size
from ..tiers.store import Store
from .hooks import Hooks, make_item
from .objects import check_same


class Damages(Hooks):
    """Every test changes raw bytes through `write_raw`."""

    def put_two(self, store: Store) -> tuple[Item, Item]:
        """Two objects of one owner and of equal size."""
        self.need("damage")
        owner = self.owner()
        items = make_item(self.address(owner), 5000, seed=1), make_item(self.address(owner), 5000, seed=2)
        for item in items:
            store.put(item)
        return items

    def check_refused(self, store: Store, address: Address, raw: bytes) -> None:
        """These bytes are an error with a name, however they are read."""
        for read in (lambda: store.get(address), lambda: store.get_into(address, np.zeros(5000, np.uint8))):
            self.write_raw(store, address, raw)  # again: a store may take out what it has found damaged
            with pytest.raises(StoreError) as refused:
                read()
            assert refused.type is not StoreError, "the error must say what is wrong"

    def test_a_flipped_bit_is_found(self, store: Store) -> None:
        """Finds checks of the size alone, and heads without a checksum. vllm#57912, mesh-llm#1228"""
        item, other = self.put_two(store)
        address = item.label.address
        raw = self.read_raw(store, address)
        head = head_size(raw[:8], len(raw)) if raw[8:9] == b"{" else len(raw) // 10
        generator = np.random.default_rng(0)
        places = [*range(16), *generator.integers(16, head, 60), *generator.integers(head, len(raw), 40)]
        for place in map(int, [*places, head - 1, head, len(raw) - 1]):
            changed = bytearray(raw)
            changed[place] ^= 1 << int(generator.integers(8))
            self.check_refused(store, address, bytes(changed))
        self.write_raw(store, address, raw)
        check_same(store, item)
        check_same(store, other)

    def test_a_cut_object_is_found(self, store: Store) -> None:
        """Finds short reads that are filled up, and empty objects. Mooncake#3465"""
        item, _ = self.put_two(store)
        raw = self.read_raw(store, item.label.address)
        generator = np.random.default_rng(0)
        for size in [0, 1, 7, 8, 9, *map(int, generator.integers(10, len(raw), 30)), len(raw) - 1]:
            self.check_refused(store, item.label.address, raw[:size])

    def test_what_is_too_long_is_found(self, store: Store) -> None:
        """Finds readers that stop at the expected size: what follows may be of another version."""
        item, _ = self.put_two(store)
        raw = self.read_raw(store, item.label.address)
        for more in (b"\0", bytes(4096), raw):
            self.check_refused(store, item.label.address, raw + more)

    def test_another_object_in_its_place_is_found(self, store: Store) -> None:
        """Finds a store that believes its index: both objects are whole, each is the other. LMCache#4385"""
        first, second = self.put_two(store)
        raws = [self.read_raw(store, item.label.address) for item in (first, second)]
        self.check_refused(store, first.label.address, raws[1])
        self.check_refused(store, second.label.address, raws[0])

    def test_the_payload_of_another_object_is_found(self, store: Store) -> None:
        """Finds checks that do not tie head and payload together: each has the size that is expected."""
        first, second = self.put_two(store)
        raws = [self.read_raw(store, item.label.address) for item in (first, second)]
        assert len(raws[0]) == len(raws[1])
        for tail in (5000, 2500, 1):
            self.check_refused(store, first.label.address, raws[0][:-tail] + raws[1][-tail:])

    def test_a_damaged_object_can_be_put_again(self, store: Store) -> None:
        """Finds a put that is passed over as something is there: never usable again. Mooncake#2827"""
        item, other = self.put_two(store)
        address = item.label.address
        raw = self.read_raw(store, address)
        for broken in (b"", raw[:100], raw[:-1], raw[:-1] + bytes([raw[-1] ^ 1]), bytes(len(raw))):
            self.check_refused(store, address, broken)
            store.put(item)
            check_same(store, item)
        self.check_refused(store, address, b"not an object")
        store.delete([address])
        assert store.exists([address]) == [False]
        store.put(item)
        check_same(store, item)
        check_same(store, other)
        assert store.stats(address.owner).objects == 2
