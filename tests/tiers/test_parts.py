"""Objects in parts: there whole or not at all, whatever is interrupted, replaced or mixed."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from goldenkv.conform import StoreSuite
from goldenkv.tiers.errors import Corrupt, Expired, Foreign, Full, Missing, StoreError, Unavailable
from goldenkv.tiers.host import HostStore
from goldenkv.tiers.objects import Address, Head, Item, Kind
from goldenkv.tiers.parts import Parts
from goldenkv.tiers.store import LARGEST, Stats, Store, Wrapper

PART = 1000


def address(key: int = 0, owner: bytes = b"o") -> Address:
    return Address(owner * 32, b"n" * 32, key.to_bytes(32, "big"))


def item(nbytes: int, key: int = 0, seed: int = 0) -> Item:
    payload = np.random.default_rng([seed, nbytes]).integers(0, 256, nbytes, np.uint8)
    made = Item.of(address(key), Kind.BOUNDARY, 256, "plain", {"a": payload[:7], "b": payload[7:]})
    return Item(replace(made.label, extra=(("who", "another wrapper"),)), made.payload)


def same(store: Store, expected: Item) -> bool:
    found = store.get(expected.label.address)
    buffer = np.zeros(len(expected.payload), np.uint8)
    head = store.get_into(expected.label.address, buffer)
    payloads = [found.payload.tobytes(), buffer.tobytes(), expected.payload.tobytes()]
    return found.label == head.label == expected.label and len(set(payloads)) == 1


def host(**options: object) -> HostStore:
    return HostStore(1 << 20, block=64, **options)  # type: ignore[arg-type]


class TestParts(StoreSuite):
    supports_capacity = True
    largest = None
    examples = 15
    part = 50_000

    def open_store(self, folder: Path, clock: Callable[[], float], capacity: int | None) -> Store:
        return Parts(
            HostStore(capacity or 100 << 20, block=4096 if capacity is None else 64, clock=clock), self.part
        )


class TestSmallParts(TestParts):
    """Of what the state machine puts, most in several; and 4 MiB in a thousand."""

    part = 4095
    examples = 5


# Sizes ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "nbytes", [7, PART - 1, PART, PART + 1, 2 * PART - 1, 2 * PART, 2 * PART + 1, 5 * PART]
)
def test_around_the_size_of_a_part(nbytes: int) -> None:
    inner, plain, expected = host(), host(), item(nbytes)
    store = Parts(inner, PART)
    size, usual = store.put(expected), plain.put(expected)
    assert same(store, expected)
    if nbytes <= PART:
        assert same(inner, expected) and size == usual
        number = 1
    else:
        assert len(inner.get(address()).payload) == 0
        number = 1 + -(-nbytes // PART)
    assert inner.stats() == Stats(number, size, inner.capacity)
    assert store.stats() == Stats(1, size, inner.capacity)
    assert [(entry.address, entry.nbytes) for entry in store.scan()] == [(address(), size)]
    assert max(len(inner.get(entry.address).payload) for entry in inner.scan()) <= PART
    buffer = np.zeros(nbytes, np.uint8)
    assert store.get_into(address(), buffer) == plain.get_into(address(), buffer)
    assert store.delete([address(), address(1)]) == 1
    assert list(inner.scan()) == [] and store.exists([address()]) == [False]


@pytest.mark.parametrize("nbytes", [0, 1, PART, PART + 1, 3 * PART - 1, 3 * PART + 1, 10 * PART])
def test_a_buffer_of_another_size(nbytes: int) -> None:
    """Also an empty one, although a large object begins with an empty one."""
    store = Parts(host(), PART)
    store.put(item(3 * PART))
    with pytest.raises(Foreign, match=f"{nbytes} were expected"):
        store.get_into(address(), np.zeros(nbytes, np.uint8))


def test_a_store_alone_refuses_what_goes_in_parts() -> None:
    inner = HostStore(16 << 20)
    with pytest.raises(ValueError, match="in parts"):
        inner.put(item(LARGEST + 1))
    store = Parts(inner)
    store.put(item(LARGEST + 1))
    assert same(store, item(LARGEST + 1)) and inner.stats().objects == 3
    with pytest.raises(ValueError, match="largest=0"):
        Parts(inner, 0)


@pytest.mark.parametrize("other", [1, PART - 1, PART + 1, 3 * PART, 10 * PART])
@pytest.mark.parametrize("nbytes", [7, PART, 3 * PART])
def test_opened_with_another_size(nbytes: int, other: int) -> None:
    """What is read is right, or refused."""
    inner = host()
    Parts(inner, PART).put(item(nbytes))
    store = Parts(inner, other)
    assert np.array_equal(store.get(address()).payload, item(nbytes).payload)
    try:
        assert same(store, item(nbytes))
    except Foreign:
        assert min(other, PART) < nbytes <= max(other, PART)


def test_time_to_live() -> None:
    now = [1000.0]
    store = Parts(host(clock=lambda: now[0]), PART)
    store.put(item(3 * PART), ttl=10)
    assert store.get_into(address(), np.zeros(3 * PART, np.uint8)).expires == 1010
    assert [entry.expires for entry in store.scan()] == [1010]
    now[0] = 1010.0
    with pytest.raises(Expired):
        store.get(address())
    assert store.exists([address()]) == [False] and list(store.scan()) == []


# Keys of parts --------------------------------------------------------------------------------------------


def stored(*items: Item) -> set[Address]:
    """All addresses, after these were put one after the other."""
    inner = host()
    store = Parts(inner, PART)
    for one in items:
        store.put(one)
    return {entry.address for entry in inner.scan()}


def test_no_part_is_another_ones() -> None:
    """Of another number, object, version, owner or namespace."""
    versions = [item(3 * PART, key, seed) for key in range(3) for seed in range(3)]
    versions += [item(4 * PART)]
    for change in ({"owner": b"p" * 32}, {"namespace": b"m" * 32}):
        label = versions[0].label
        versions.append(Item(replace(label, address=label.address._replace(**change)), versions[0].payload))
    apart = [stored(version) for version in versions]
    assert [len(found) for found in apart] == [4] * 9 + [5] + [4] * 2
    assert len(set.union(*apart)) == 5 + 9 * 3 + 4 + 2 * 3  # five addresses of their own
    assert all(len(key) == 32 for found in apart for where in found for key in where)
    assert stored(versions[0]) == stored(versions[0], versions[0]), "the same again has the same parts"
    assert {a.owner for a in stored(versions[0])} == {address().owner}


@given(st.binary(min_size=32, max_size=32))
def test_no_key_is_taken_for_that_of_a_part(key: bytes) -> None:
    store = Parts(host(), PART)
    where = address()._replace(key=key)
    store.put(Item(replace(item(10).label, address=where), item(10).payload))
    assert [entry.address for entry in store.scan()] == [where] and store.collect() == 0


# Interrupted ----------------------------------------------------------------------------------------------


class Steps(Wrapper):
    """Calls that change the store below, in order; from one on the store is gone, or refuses once."""

    def __init__(self, inner: Store, stop: int = 10**9, error: type[StoreError] = Unavailable) -> None:
        super().__init__(inner)
        self.stop, self.error, self.log = stop, error, list[tuple[str, int]]()
        self.before: Callable[[], object] = lambda: None

    def _step(self, name: str, number: int) -> None:
        self.before()
        self.log.append((name, number))
        late = len(self.log) > self.stop if self.error is Unavailable else len(self.log) == self.stop + 1
        if late:
            raise self.error("as the test says")

    def put(self, item: Item, ttl: float | None = None) -> int:
        self._step("put", len(item.payload))
        return super().put(item, ttl)

    def delete(self, addresses: Sequence[Address]) -> int:
        self._step("delete", len(addresses))
        return super().delete(addresses)


def test_what_makes_it_visible_is_written_last_and_deleted_first() -> None:
    inner = host()
    steps = Steps(inner)
    store = Parts(steps, PART)
    seen: list[tuple[list[bool], int, int]] = []
    steps.before = lambda: seen.append(
        (store.exists([address()]), len(list(store.scan())), store.stats().objects)
    )
    store.put(item(2 * PART + 1))
    assert steps.log == [("put", PART), ("put", PART), ("put", 1), ("put", 0)]
    assert seen == [([False], 0, 0)] * 4 and store.exists([address()]) == [True]
    store.delete([address()])
    assert steps.log[4:] == [("delete", 1), ("delete", 3)]
    assert seen[4:] == [([True], 1, 1), ([False], 0, 0)] and list(inner.scan()) == []


@pytest.mark.parametrize(
    "old", [None, item(3 * PART), item(2 * PART, seed=1), item(10)], ids=["none", "same", "other", "small"]
)
@pytest.mark.parametrize("stop", range(5))
def test_a_store_that_is_gone_in_the_middle_of_a_put(stop: int, old: Item | None) -> None:
    """What is there afterwards is what was there, or nothing; the rest is found and collected.

    In the last step only parts of what was replaced are deleted: the object is there, and put says so.
    """
    inner, new = host(), item(3 * PART)
    if old is not None:
        Parts(inner, PART).put(old)
    if stop == 4:
        Parts(Steps(inner, stop), PART).put(new)
        old = new
    else:
        with pytest.raises(Unavailable):
            Parts(Steps(inner, stop), PART).put(new)

    store = Parts(inner, PART)
    if old is None:
        assert store.exists([address()]) == [False] and list(store.scan()) == []
        with pytest.raises(Missing):
            store.get(address())
    else:
        assert same(store, old)
    needed = {e.address for e in inner.scan()} & (stored(old) if old is not None else set())
    left = inner.stats().objects - len(needed)
    assert store.collect() == left and store.collect() == 0
    assert {e.address for e in inner.scan()} == needed
    store.put(item(3 * PART))
    assert same(store, item(3 * PART))


@pytest.mark.parametrize("stop", range(2))
def test_a_store_that_is_gone_in_the_middle_of_a_delete(stop: int) -> None:
    inner = host()
    Parts(inner, PART).put(item(3 * PART))
    with pytest.raises(Unavailable):
        Parts(Steps(inner, stop), PART).delete([address()])
    store = Parts(inner, PART)
    if stop == 0:
        assert same(store, item(3 * PART)) and store.collect() == 0
    else:
        assert store.exists([address()]) == [False] and list(store.scan()) == []
        assert store.collect() == 3
    store.delete([address()])
    assert list(inner.scan()) == []


@pytest.mark.parametrize("stop", range(4))
def test_a_refused_part_leaves_nothing(stop: int) -> None:
    """Full in the middle, also where the same object was there: never half of it."""
    for old in (None, item(3 * PART)):
        inner = host()
        store = Parts(Steps(inner, stop, Full), PART)
        if old is not None:
            Parts(inner, PART).put(old)
        with pytest.raises(Full):
            store.put(item(3 * PART))
        assert list(inner.scan()) == []
        store.put(item(3 * PART))
        assert same(store, item(3 * PART))


def test_collecting_leaves_what_is_being_put() -> None:
    inner = host()
    steps = Steps(inner)
    store = Parts(steps, PART)
    left = item(3 * PART, key=1)
    with pytest.raises(Unavailable):
        Parts(Steps(inner, 2), PART).put(left)
    collected: list[int] = []
    steps.before = lambda: collected.append(collect(store, steps))
    store.put(item(3 * PART))
    assert collected == [2, 0, 0, 0] and same(store, item(3 * PART))

    store = Careless(steps, PART)
    store.delete([address()])
    collected.clear()
    store.put(item(3 * PART))
    assert collected == [0, 1, 1, 1], "the control"
    with pytest.raises(Missing):
        store.get(address())


def collect(store: Parts, steps: Steps) -> int:
    """Collects without the test's own steps."""
    before, steps.before = steps.before, lambda: None
    try:
        return store.collect()
    finally:
        steps.before = before


class Careless(Parts):
    """Forgets what it is putting when it collects."""

    def collect(self, owner: bytes | None = None) -> int:
        self._changing.clear()
        return super().collect(owner)


# Versions -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "new",
    [item(2 * PART, seed=1), item(5 * PART, seed=1), item(3 * PART, seed=1), item(10)],
    ids=["fewer", "more", "equal", "one"],
)
def test_another_version(new: Item) -> None:
    inner = host()
    store = Parts(inner, PART)
    store.put(item(3 * PART))
    store.put(item(3 * PART, key=1))
    size = store.put(new)
    assert same(store, new) and same(store, item(3 * PART, key=1))
    assert {e.address: e.nbytes for e in store.scan()}[address()] == size
    assert store.stats().objects == 2
    assert store.collect() == 0
    assert {e.address for e in inner.scan()} == stored(new) | stored(item(3 * PART, key=1))
    assert same(store, new) and same(store, item(3 * PART, key=1))


def test_deleting_an_owner_takes_parts_along() -> None:
    inner = host()
    store = Parts(inner, PART)
    for key in range(3):
        store.put(item(3 * PART, key))
    with pytest.raises(Unavailable):
        Parts(Steps(inner, 2), PART).put(item(3 * PART, seed=1))  # two parts are left of it
    other = Item(replace(item(3 * PART).label, address=address(owner=b"p")), item(3 * PART).payload)
    store.put(other)
    assert store.delete_owner(address().owner) == 3
    assert {e.address.owner for e in inner.scan()} == {other.label.address.owner} and same(store, other)


def mixed(store: Parts, inner: HostStore, how: str) -> Item:
    """Two versions in one place: one part of the first is another's, or is gone."""
    store.put(item(3 * PART))
    first = {e.address: inner.get(e.address) for e in inner.scan() if e.address != address()}
    store.put(item(3 * PART, seed=1))
    second = {e.address: inner.get(e.address) for e in inner.scan() if e.address not in {*first, address()}}
    ours = sorted(second, key=lambda where: where.key[20:24])
    theirs = sorted(first, key=lambda where: where.key[20:24])
    if how == "gone":
        inner.delete([ours[1]])
    elif how == "of another version":
        inner.put(Item(replace(first[theirs[1]].label, address=ours[1]), first[theirs[1]].payload))
    else:
        for to, source in ((ours[1], ours[2]), (ours[2], ours[1])):
            inner.put(Item(replace(second[source].label, address=to), second[source].payload))
    return store.get(address())


class Unchecked(Parts):
    """The control: believes that parts fit together."""

    def _join(self, parts: object, buffer: np.ndarray) -> Head:
        for number, where in enumerate(parts.addresses):  # type: ignore[attr-defined]
            self.inner.get_into(where, buffer[number * PART : (number + 1) * PART])
        return parts.head  # type: ignore[attr-defined]


@pytest.mark.parametrize("how", ["gone", "of another version", "in another order"])
def test_mixed_parts_are_refused(how: str) -> None:
    inner = host()
    with pytest.raises(Missing if how == "gone" else Corrupt):
        mixed(Parts(inner, PART), inner, how)
    if how != "gone":
        inner = host()
        assert not np.array_equal(
            mixed(Unchecked(inner, PART), inner, how).payload, item(3 * PART, seed=1).payload
        )


@pytest.mark.parametrize(
    "extra", [{"part_bytes": "x"}, {"part_bytes": "0"}, {"part_bytes": "-1"}, {"whole": "x"}, {"whole": None}]
)
def test_a_first_object_that_makes_no_sense_is_refused(extra: dict[str, str | None]) -> None:
    inner = host()
    store = Parts(inner, PART)
    store.put(item(3 * PART))
    first = inner.get(address())
    changed = {
        name: value for name, value in {**dict(first.label.extra), **extra}.items() if value is not None
    }
    inner.put(Item(replace(first.label, extra=tuple(changed.items())), first.payload))
    for read in (
        lambda: store.get(address()),
        lambda: store.get_into(address(), np.zeros(3 * PART, np.uint8)),
    ):
        with pytest.raises(Corrupt):
            read()
    assert store.exists([address()]) == [True] and store.delete([address()]) == 1
    assert store.collect() == 3 and list(inner.scan()) == []


@pytest.mark.parametrize("how", ["get", "get_into"])
@pytest.mark.parametrize("then", ["replaced", "deleted"])
def test_what_goes_while_its_parts_are_read(then: str, how: str) -> None:
    """The reader has one part of the first version: it gets the second one, or misses; never half of each."""
    armed, reached, go = [False], threading.Event(), threading.Event()

    def copy(to: np.ndarray, source: np.ndarray) -> None:
        np.copyto(to, source)
        if armed[0]:
            armed[0] = False
            reached.set()
            assert go.wait(30)

    store = Parts(HostStore(1 << 20, copy=copy), PART)
    store.put(item(3 * PART))
    armed[0] = True
    with ThreadPoolExecutor(1) as pool:
        buffer = np.zeros(3 * PART, np.uint8)
        reading = (
            pool.submit(store.get, address())
            if how == "get"
            else pool.submit(store.get_into, address(), buffer)
        )
        try:
            assert reached.wait(30)
            store.put(item(3 * PART, seed=1)) if then == "replaced" else store.delete([address()])
        finally:
            go.set()
        if then == "deleted":
            with pytest.raises(Missing):
                reading.result()
            return
        found = reading.result()
        payload = buffer if isinstance(found, Head) else found.payload
        assert np.array_equal(payload, item(3 * PART, seed=1).payload)
