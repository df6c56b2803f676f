"""Objects in host memory: nothing is aliased, no room is lost, and what is being read stays until then."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from goldenkv.conform import StoreSuite
from goldenkv.tiers.errors import Corrupt, Full, Missing, StoreError
from goldenkv.tiers.host import HostStore
from goldenkv.tiers.memory import Held
from goldenkv.tiers.objects import Address, Item, Kind, head_size
from goldenkv.tiers.store import Store

BLOCK = 100


def address(key: int = 0, owner: bytes = b"o") -> Address:
    return Address(owner * 32, b"n" * 32, key.to_bytes(32, "big"))


def item(nbytes: int, key: int = 0, seed: int = 0) -> Item:
    rows = np.random.default_rng([seed, nbytes]).integers(0, 256, nbytes, np.uint8)
    return Item.of(address(key), Kind.PAGE, 256, "plain", {"rows": rows})


def blocks(count: int, **options: object) -> HostStore:
    """A store of so many blocks, in which heads take no room that matters."""
    store = HostStore(count * BLOCK, block=BLOCK, **options)  # type: ignore[arg-type]
    store.capacity = 1 << 30
    return store


def same(store: Store, expected: Item) -> bool:
    return np.array_equal(store.get(expected.label.address).payload, expected.payload)


def test_room_is_counted_in_blocks() -> None:
    """Empty payloads take none."""
    store = blocks(3)
    store.put(item(2 * BLOCK + 1))
    assert store.free == 0
    with pytest.raises(Full):
        store.put(item(1, key=1))
    store.put(item(0, key=2))


class TestHostStore(StoreSuite):
    supports_capacity = True
    supports_damage = True

    def open_store(self, folder: Path, clock: Callable[[], float], capacity: int | None) -> HostStore:
        if capacity is None:
            return HostStore(50 << 20, block=4096, clock=clock)
        return HostStore(capacity, block=BLOCK, clock=clock)

    def read_raw(self, store: Store, address: Address) -> bytes:
        assert isinstance(store, HostStore)
        held = store._lease(address)
        payload = np.empty(held.payload, np.uint8)
        store._copy_out(held, payload)
        store._release(held)
        return held.head + payload.tobytes()

    def write_raw(self, store: Store, address: Address, raw: bytes) -> None:
        assert isinstance(store, HostStore)
        try:
            size = head_size(raw, len(raw))
        except StoreError:
            size = len(raw)
        store._write(address, raw[:size], np.frombuffer(raw[size:], np.uint8), None)


class TestLargeBlocks(TestHostStore):
    """Most objects are smaller than a block."""

    supports_capacity = False
    examples = 10

    def open_store(self, folder: Path, clock: Callable[[], float], capacity: int | None) -> HostStore:
        return HostStore(64 << 20, block=1 << 20, clock=clock)


# Room -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("capacity", [0, 1, BLOCK - 1, BLOCK, BLOCK + 1])
def test_capacities_around_a_block(capacity: int) -> None:
    store = HostStore(capacity, block=BLOCK)
    assert store.free == capacity // BLOCK * BLOCK
    assert store.stats().capacity == capacity
    with pytest.raises(Full):
        store.put(item(1))
    assert store.exists([address()]) == [False] and store.stats().objects == 0


def test_bad_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="capacity=-1"):
        HostStore(-1)
    with pytest.raises(ValueError, match="block=0"):
        HostStore(100, block=0)


def test_heads_count() -> None:
    """Else any number of empty objects would find room."""
    first = item(0)
    one = HostStore(1 << 20).put(first)
    store = HostStore(3 * one, block=BLOCK)
    for key in range(3):
        assert store.put(item(0, key)) == one
    assert store.stats().nbytes == store.capacity
    with pytest.raises(Full):
        store.put(item(0, 3))


SIZES = st.sampled_from([0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK - 1, 3 * BLOCK, 5 * BLOCK + 1])
STEPS = st.lists(st.tuples(st.integers(0, 5), st.none() | SIZES), max_size=30)


def play(store: HostStore, steps: list[tuple[int, int | None]]) -> None:
    """Puts and deletes; checks every object and the free room after each step, against a dictionary."""
    total = store.free
    model: dict[int, Item] = {}
    for seed, (key, nbytes) in enumerate(steps):
        if nbytes is None:
            assert store.delete([address(key)]) == (model.pop(key, None) is not None)
        else:
            new = item(nbytes, key, seed)
            others = sum(-(-len(o.payload) // BLOCK) for k, o in model.items() if k != key)
            if (others + -(-nbytes // BLOCK)) * BLOCK <= total:
                store.put(new)
                model[key] = new
            else:
                with pytest.raises(Full):
                    store.put(new)
        used = sum(-(-len(o.payload) // BLOCK) for o in model.values()) * BLOCK
        assert store.free == total - used
        assert all(same(store, expected) for expected in model.values())
        assert {entry.address for entry in store.scan()} == {address(key) for key in model}
    store.close()
    assert store.free == total


@given(STEPS)
def test_no_room_is_lost_and_none_given_twice(steps: list[tuple[int, int | None]]) -> None:
    play(blocks(9), steps)


class Leaking(HostStore):
    def _free(self, entry: Held) -> None:
        entry.memory = entry.memory[1:]
        super()._free(entry)


class Doubling(HostStore):
    def _take(self, entry: Held) -> None:
        super()._take(entry)
        self._blocks[:0] = entry.memory[:1]


@pytest.mark.parametrize("broken", [Leaking, Doubling])
def test_the_game_finds(broken: type[HostStore]) -> None:
    store = broken(9 * BLOCK, block=BLOCK)
    store.capacity = 1 << 30
    with pytest.raises(AssertionError):
        play(store, [(0, 2 * BLOCK), (1, BLOCK), (0, None), (2, 5 * BLOCK + 1), (3, BLOCK), (1, BLOCK)])


def test_what_does_not_fit_in_place_of_another_leaves_that_one() -> None:
    store, old = blocks(4), item(2 * BLOCK)
    other = item(BLOCK, key=1)
    store.put(old)
    store.put(other)
    with pytest.raises(Full):
        store.put(item(4 * BLOCK, seed=1))
    assert same(store, old) and same(store, other)
    new = item(3 * BLOCK, seed=2)  # there is no room for both
    store.put(new)
    assert same(store, new) and same(store, other) and store.free == 0


def test_what_has_expired_makes_room() -> None:
    now = [1000.0]
    store = blocks(2, clock=lambda: now[0])
    store.put(item(BLOCK, 0), ttl=10)
    store.put(item(BLOCK, 1), ttl=20)
    now[0] = 1010.0
    store.put(item(BLOCK, 2))
    assert store.exists([address(k) for k in range(3)]) == [False, True, True]
    with pytest.raises(Missing):
        store.get(address(0))
    with pytest.raises(Full):
        store.put(item(BLOCK, 3))


def test_a_copy_that_fails_keeps_nothing() -> None:
    fail = [False]

    def copy(to: np.ndarray, source: np.ndarray) -> None:
        np.copyto(to, source)
        if fail[0]:
            raise OSError("no more")

    store, old = blocks(6, copy=copy), item(2 * BLOCK)
    before = store.put(old)
    fail[0] = True
    with pytest.raises(OSError, match="no more"):
        store.put(item(3 * BLOCK, seed=1))
    with pytest.raises(OSError, match="no more"):
        store.put(item(BLOCK, key=1))
    with pytest.raises(OSError, match="no more"):
        store.get(address())
    fail[0] = False
    assert same(store, old) and store.free == 4 * BLOCK and store.stats().nbytes == before
    assert store.delete([address()]) == 1 and store.free == 6 * BLOCK  # nobody holds a lease any more


# Aliases --------------------------------------------------------------------------------------------------


def overwritten(store: HostStore) -> bool:
    """Whether an object changes with the array that it was put from. jax#37830"""
    source = item(3 * BLOCK)
    expected = source.payload.copy()
    store.put(source)
    source.payload[:] ^= 0xFF
    return not np.array_equal(store.get(address()).payload, expected)


class Aliasing(HostStore):
    def _copy_in(self, entry: Held, payload: np.ndarray) -> None:
        self.kept = payload

    def _copy_out(self, entry: Held, buffer: np.ndarray) -> None:
        buffer[:] = self.kept


def test_what_was_put_is_a_copy() -> None:
    assert not overwritten(blocks(4, verify=False))
    assert overwritten(Aliasing(4096, block=BLOCK, verify=False))  # the control


# Reading what goes away -----------------------------------------------------------------------------------


class Pause:
    """Copies; the next time after `armed` it stops half-way until `go`."""

    def __init__(self) -> None:
        self.armed, self.reached, self.go = False, threading.Event(), threading.Event()

    def __call__(self, to: np.ndarray, source: np.ndarray) -> None:
        if not self.armed:
            return np.copyto(to, source)
        self.armed = False
        half = len(to) // 2
        np.copyto(to[:half], source[:half])
        self.reached.set()
        assert self.go.wait(30)
        np.copyto(to[half:], source[half:])


class NoLeases(HostStore):
    """The control: memory goes back at once, whoever reads it."""

    def _lease(self, address: Address) -> Held:
        entry = super()._lease(address)
        entry.readers = 0
        return entry

    def _release(self, entry: Held) -> None:
        pass


def evict(store: HostStore) -> None:
    store.delete([address(0)])


def replace(store: HostStore) -> None:
    store.put(item(2 * BLOCK, 0, seed=9))
    store.delete([address(0)])


def read_during(store: HostStore, pause: Pause, lose: Callable[[HostStore], None]) -> np.ndarray:
    """Loads an object; half-way it goes, and all free room is given to others. Returns what was loaded."""
    store.put(item(2 * BLOCK, 0))
    pause.armed = True
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(store.get, address(0))
        try:
            assert pause.reached.wait(30)
            lose(store)
            with pytest.raises(Full):
                for key in range(1, 10):
                    store.put(item(BLOCK, key, seed=key))
            with pytest.raises(Missing):
                store.get(address(0))
        finally:
            pause.go.set()
        return reading.result().payload


@pytest.mark.parametrize("lose", [evict, replace])
def test_a_page_that_goes_while_it_is_read_is_read_whole(lose: Callable[[HostStore], None]) -> None:
    """sglang#31427: evicted and overwritten during load-back."""
    pause = Pause()
    store = blocks(4, copy=pause)
    assert np.array_equal(read_during(store, pause, lose), item(2 * BLOCK, 0).payload)
    store.delete([address(key) for key in range(10)])
    assert store.free == 4 * BLOCK


@pytest.mark.parametrize("lose", [evict, replace])
def test_without_leases_it_is_torn(lose: Callable[[HostStore], None]) -> None:
    """The control: verification catches it; without verification, wrong bits are served."""
    for verify in (True, False):
        pause = Pause()
        store = NoLeases(4 * BLOCK, block=BLOCK, copy=pause, verify=verify)
        store.capacity = 1 << 30
        if verify:
            with pytest.raises(Corrupt, match="payload"):
                read_during(store, pause, lose)
        else:
            assert not np.array_equal(read_during(store, pause, lose), item(2 * BLOCK, 0).payload)


def test_no_room_is_taken_from_a_reader() -> None:
    """The object that would have to give its place is being read: no room, and it stays."""
    pause = Pause()
    store, old = blocks(2, copy=pause), item(2 * BLOCK)
    store.put(old)
    pause.armed = True
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(store.get, address())
        try:
            assert pause.reached.wait(30)
            with pytest.raises(Full):
                store.put(item(2 * BLOCK, seed=1))
            assert same(store, old)
        finally:
            pause.go.set()
        assert np.array_equal(reading.result().payload, old.payload)
    new = item(2 * BLOCK, seed=1)
    store.put(new)
    assert same(store, new)


def test_nothing_is_there_before_all_of_it_is() -> None:
    """A put that is half-way: lookups miss, or find what was there before."""
    pause = Pause()
    store = blocks(4, copy=pause)
    for seed in range(2):
        pause.armed, pause.reached, pause.go = True, threading.Event(), threading.Event()
        with ThreadPoolExecutor(1) as pool:
            writing = pool.submit(store.put, item(2 * BLOCK, seed=seed))
            try:
                assert pause.reached.wait(30)
                if seed:
                    assert same(store, item(2 * BLOCK, seed=0))
                else:
                    assert store.exists([address()]) == [False] and list(store.scan()) == []
                    with pytest.raises(Missing):
                        store.get(address())
            finally:
                pause.go.set()
            writing.result()
        assert same(store, item(2 * BLOCK, seed=seed))
