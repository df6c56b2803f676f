"""One object: every bit comes back, into memory that the caller has or not, and no memory is shared."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from ..tiers.errors import Foreign, Missing, StoreError
from ..tiers.objects import Item, Kind, Label, Tensor, make_head
from ..tiers.store import LARGEST, Store
from .hooks import Hooks, make_arrays, make_item

SIZES = [0, 1, 4095, 4096, 4097, (256 << 10) - 1, 256 << 10, (256 << 10) + 1, LARGEST - 1, LARGEST]


def check_same(store: Store, item: Item) -> None:
    """Both ways to read give the bits that were put, and the label with them."""
    found = store.get(item.label.address)
    assert found.label == item.label
    assert_equal(found.payload, item.payload)
    buffer = np.full(len(item.payload), 0xA5, np.uint8)
    head = store.get_into(item.label.address, buffer)
    assert head.label == item.label
    assert head.payload == len(item.payload)
    assert head.xxh3 == found.xxh3 == item.xxh3
    assert_equal(buffer, item.payload)


def assert_equal(found: np.ndarray, expected: np.ndarray) -> None:
    """Equal bytes; says where the first wrong one is."""
    assert found.dtype == np.uint8 and found.shape == expected.shape
    wrong = np.flatnonzero(found != expected)
    assert not len(wrong), f"{len(wrong)} of {len(expected)} bytes differ, the first at {wrong[0]}"


class Objects(Hooks):
    """One object at a time."""

    @pytest.mark.parametrize("nbytes", SIZES)
    def test_bits_come_back(self, store: Store, nbytes: int) -> None:
        """Finds lost, padded or repeated ends of payloads around every block and object size."""
        item = make_item(self.address(), nbytes if self.largest is None else min(nbytes, self.largest))
        taken = store.put(item)
        assert taken > len(item.payload), "put must count the head too"
        check_same(store, item)

    def test_all_bit_patterns_come_back(self, store: Store) -> None:
        """Finds a store that takes payloads for numbers: NaN payloads, -0, subnormals, every byte."""
        words = np.random.default_rng(0).integers(0, 2**32, 1024, np.uint32)
        words[:6] = [0x7F800001, 0xFFC12345, 0x7FFFFFFF, 0x80000000, 0x00000001, 0xFF800000]
        arrays = {
            "bytes": np.arange(256, dtype=np.uint8)[1:],  # an odd size: what follows is not aligned
            "singles": words.view(np.float32).reshape(4, 256),
            "halves": np.arange(2**16, dtype=np.uint16).view(ml_dtypes.bfloat16),
            "none": np.zeros((0, 7), np.float32),
            "one": np.array(-0.0, np.float32),
        }
        item = make_arrays(self.address(), arrays)
        store.put(item)
        check_same(store, item)
        for name, view in store.get(item.label.address).arrays().items():
            assert view.shape == arrays[name].shape and view.dtype == arrays[name].dtype
            assert view.tobytes() == arrays[name].tobytes(), name

    @pytest.mark.parametrize("kind", list(Kind), ids=lambda kind: kind.value)
    def test_labels_come_back(self, store: Store, kind: Kind) -> None:
        """Finds a store that rebuilds labels from its own index and forgets a part of them."""
        tensors = (
            Tensor('"q" ü', "float32", (1, 2)),
            Tensor("b", "bfloat16", ()),
            Tensor("c", "uint8", (0,)),
        )
        label = Label(self.address(), kind, 2**20 + 1, "another layout", tensors, extra=(("who", "I"),))
        item = Item(label, np.arange(label.nbytes, dtype=np.uint8))
        store.put(item)
        check_same(store, item)

    @pytest.mark.parametrize("difference", [-100, -1, 1, 4096])
    def test_a_buffer_of_another_size_is_refused(self, store: Store, difference: int) -> None:
        """Finds payloads that are cut to the buffer, or leave its end as it was."""
        item = make_item(self.address(), 100)
        store.put(item)
        with pytest.raises(Foreign):
            store.get_into(item.label.address, np.zeros(100 + difference, np.uint8))
        check_same(store, item)

    @pytest.mark.parametrize("bad", ["float32", "2-d", "strided", "read only"])
    def test_memory_that_cannot_be_filled_is_refused(self, store: Store, bad: str) -> None:
        """Finds bytes that are cast, or written to a copy that nobody looks at."""
        item = make_item(self.address(), 64)
        store.put(item)
        buffers: dict[str, np.ndarray] = {
            "float32": np.zeros(64, np.float32),
            "2-d": np.zeros((8, 8), np.uint8),
            "strided": np.zeros(128, np.uint8)[::2],
            "read only": np.frombuffer(bytes(64), np.uint8),
        }
        with pytest.raises(ValueError):
            store.get_into(item.label.address, buffers[bad])

    def test_what_was_put_is_not_aliased(self, store: Store) -> None:
        """Finds a store that keeps the caller's memory, which is reused for the next page. jax#37830"""
        item = make_item(self.address(), 5000)
        kept = Item(item.label, item.payload.copy())
        store.put(item)
        item.payload[:] = 0
        check_same(store, kept)

    def test_what_was_read_is_not_aliased(self, store: Store) -> None:
        """Finds a store that hands out its own memory: who writes to it changes what others read."""
        item = make_item(self.address(), 5000)
        store.put(item)
        found = store.get(item.label.address).payload
        if found.flags.writeable:
            found[:] = 0
        buffer = np.zeros(5000, np.uint8)
        store.get_into(item.label.address, buffer)
        buffer[:] = 0
        check_same(store, item)

    def test_the_last_put_counts(self, store: Store) -> None:
        """Finds a store that keeps the first object of an address, or counts both."""
        address = self.address()
        for seed, nbytes in enumerate([100, 100, 5000, 1, 0, 100]):
            item = make_item(address, nbytes, seed)
            taken = store.put(item)
            check_same(store, item)
            stats = store.stats(address.owner)
            assert (stats.objects, stats.nbytes) == (1, taken)

    def test_what_was_never_put_is_missing(self, store: Store) -> None:
        """Finds empty or invented objects. Mooncake#3465"""
        address = self.address()
        with pytest.raises(Missing):
            store.get(address)
        for nbytes in (0, 100):
            with pytest.raises(Missing):
                store.get_into(address, np.zeros(nbytes, np.uint8))

    def test_what_is_too_large(self, store: Store) -> None:
        """Finds large payloads that are cut without a word. They are refused, or come back."""
        if self.largest is None:
            item = make_item(self.address(), LARGEST + 1)
            store.put(item)
            check_same(store, item)
            return
        item = make_item(self.address(), self.largest + 1)
        with pytest.raises(ValueError):
            store.put(item)
        assert store.exists([item.label.address]) == [False]

    def test_the_checksum_goes_along(self, store: Store) -> None:
        """Finds a store that vouches for what it got: bytes that changed before `put` are never served."""
        item = make_item(self.address(), 5000)
        item.payload[4321] ^= 1
        with pytest.raises(StoreError):
            store.put(item)  # may refuse it ...
            store.get(item.label.address)  # ... or keep it for nothing
        with pytest.raises(StoreError):
            store.get_into(item.label.address, np.zeros(5000, np.uint8))

    def test_put_counts_what_it_takes(self, store: Store) -> None:
        """Finds bytes counted without heads: many small objects would pass any quota."""
        item = make_item(self.address(), 0)
        assert store.put(item) >= len(make_head(item, None))
