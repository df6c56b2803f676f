"""How much an owner may store: exact at the limit, by what is really there, of each owner alone."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from goldenkv.conform import StoreSuite
from goldenkv.tiers.errors import Full, Missing, OverQuota, Unavailable
from goldenkv.tiers.host import HostStore
from goldenkv.tiers.keyring import KeyRing
from goldenkv.tiers.objects import Address, Item, Kind
from goldenkv.tiers.parts import Parts
from goldenkv.tiers.quota import Quota
from goldenkv.tiers.seal import Sealed
from goldenkv.tiers.store import Stats, Store, Wrapper

ALICE, BOB = b"a" * 32, b"b" * 32


def address(key: int = 0, owner: bytes = ALICE) -> Address:
    return Address(owner, b"n" * 32, key.to_bytes(32, "big"))


def item(nbytes: int = 1000, key: int = 0, owner: bytes = ALICE, seed: int = 0) -> Item:
    rows = np.random.default_rng([seed, nbytes]).integers(0, 256, nbytes, np.uint8)
    return Item.of(address(key, owner), Kind.PAGE, 256, "plain", {"rows": rows})


def host() -> HostStore:
    return HostStore(1 << 20, block=64)


def taken(one: Item) -> int:
    """Bytes of an object, with its head."""
    return host().put(one)


def same(store: Store, expected: Item) -> bool:
    return np.array_equal(store.get(expected.label.address).payload, expected.payload)


class TestQuota(StoreSuite):
    supports_capacity = True
    examples = 15

    def open_store(self, folder: Path, clock: Callable[[], float], capacity: int | None) -> Store:
        return Quota(HostStore(capacity or 50 << 20, block=64, clock=clock), 1 << 30)


# The limit ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("less", [0, 1, 100, 1000, 1001])
def test_around_the_limit(less: int) -> None:
    """Two objects fit to the byte. With less, the second is refused, before or after it was written."""
    inner, first, second = host(), item(key=0), item(key=1)
    store = Quota(inner, taken(first) + taken(second) - less)
    store.put(first)
    if not less:
        assert store.put(second) == taken(second)
        assert store.stats(ALICE).nbytes == store.limit(ALICE)
        with pytest.raises(OverQuota):
            store.put(item(0, key=2))
        return
    free = inner.free
    with pytest.raises(OverQuota):
        store.put(second)
    assert same(store, first) and store.stats() == Stats(1, taken(first), inner.capacity)
    assert inner.free == free and store.exists([address(1)]) == [False]


def test_nobody_may_have_anything() -> None:
    store = Quota(host(), 0)
    for nbytes in (0, 1, 1000):
        with pytest.raises(OverQuota):
            store.put(item(nbytes))
    assert list(store.inner.scan()) == []
    with pytest.raises(ValueError, match="limit=-1"):
        Quota(host(), -1)


def test_an_owner_at_the_limit_can_make_room() -> None:
    store = Quota(host(), 2 * taken(item()))
    store.put(item(key=0))
    store.put(item(key=1))
    for round in range(2, 6):
        with pytest.raises(OverQuota):
            store.put(item(key=round))
        assert store.delete([address(round - 2)]) == 1
        store.put(item(key=round))
        assert store.stats(ALICE).objects == 2
    assert store.delete_owner(ALICE) == 2
    store.put(item(key=0))
    store.put(item(key=1))


def test_an_object_in_place_of_another_counts_the_difference() -> None:
    store = Quota(host(), taken(item()) + taken(item(key=1)))
    store.put(item(key=1))
    for seed in range(5):
        store.put(item(seed=seed))
        assert same(store, item(seed=seed))
    with pytest.raises(OverQuota):
        store.put(item(2000))
    assert same(store, item(seed=4)), "a larger one leaves what was there"


def test_owners_have_limits_of_their_own() -> None:
    limits = {ALICE: taken(item()), BOB: 0}
    store = Quota(host(), lambda owner: limits[owner])
    store.put(item())
    for refused in (item(key=1), item(owner=BOB)):
        with pytest.raises(OverQuota):
            store.put(refused)
    limits[BOB] = taken(item(owner=BOB))
    store.put(item(owner=BOB))
    assert same(store, item()) and same(store, item(owner=BOB))


SIZES = st.sampled_from([0, 1, 999, 1000, 1500])
STEPS = st.lists(st.tuples(st.sampled_from([ALICE, BOB]), st.integers(0, 3), st.none() | SIZES), max_size=25)


def play(store: Quota, steps: list[tuple[bytes, int, int | None]]) -> None:
    """Against a dictionary of what each owner has."""
    model: dict[Address, Item] = {}
    for seed, (owner, key, nbytes) in enumerate(steps):
        where = address(key, owner)
        if nbytes is None:
            assert store.delete([where]) == (model.pop(where, None) is not None)
            continue
        new = item(nbytes, key, owner, seed)
        others = sum(taken(o) for a, o in model.items() if a.owner == owner and a != where)
        if others + taken(new) <= store.limit(owner):
            assert store.put(new) == taken(new)
            model[where] = new
        else:
            with pytest.raises(OverQuota):
                store.put(new)
            if others + nbytes <= store.limit(owner):
                model.pop(where, None)
        assert {entry.address for entry in store.scan()} == set(model)
        assert all(same(store, expected) for expected in model.values())


@given(STEPS)
def test_refused_is_what_would_be_too_much(steps: list[tuple[bytes, int, int | None]]) -> None:
    play(Quota(host(), 4000), steps)


class CountsOnly(Quota):
    """Never looks at what is there."""

    def _look(self, account: object, owner: bytes) -> int:
        return account.used or 0  # type: ignore[attr-defined]


class LooksOnce(Quota):
    """Trusts its first look."""

    def put(self, item: Item, ttl: float | None = None) -> int:
        return self.inner.put(item, ttl) if self._accounts else super().put(item, ttl)


class NoDifference(Quota):
    def _fits(self, account: object, item: Item) -> bool:
        return self.inner.stats(item.label.address.owner).nbytes + len(item.payload) <= self.limit(b"")


class AllTogether(Quota):
    def _look(self, account: object, owner: bytes) -> int:
        account.used = self.inner.stats().nbytes  # type: ignore[attr-defined]
        return account.used  # type: ignore[attr-defined]


@pytest.mark.parametrize("broken", [CountsOnly, LooksOnce, NoDifference, AllTogether])
def test_the_game_finds(broken: type[Quota]) -> None:
    steps = [
        (BOB, 0, 1500),
        (BOB, 1, 1500),
        (ALICE, 0, 1500),
        (ALICE, 0, None),
        (ALICE, 0, 1500),
        (ALICE, 1, 999),
    ]
    steps += [(ALICE, 1, 1500), (ALICE, 0, 1000), (ALICE, 2, 1500), (ALICE, 1, None), (ALICE, 1, 1500)]
    with pytest.raises((AssertionError, OverQuota, pytest.fail.Exception)):
        play(broken(host(), 4000), steps)


# Others ---------------------------------------------------------------------------------------------------


def test_others_are_seen_at_the_latest_when_it_would_refuse() -> None:
    """Two processes, each with its count: together at most twice the limit; then neither takes more."""
    inner, one = host(), taken(item())
    stores = [Quota(inner, 3 * one) for _ in range(2)]
    for store in stores:
        store.put(item(key=0))  # both have looked: one object
    for key in range(1, 10):
        for number, store in enumerate(stores):
            try:
                store.put(item(key=10 * number + key))
            except OverQuota:
                continue
    assert 3 * one <= inner.stats(ALICE).nbytes <= 2 * 3 * one
    inner.delete_owner(ALICE)
    for store in stores:
        for key in (1, 2, 3):  # it had counted what is gone now
            store.put(item(key=key))


class Gate(Wrapper):
    """Stops puts of one owner until it is opened; then they pass, or fail."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.owner, self.fail = ALICE, False
        self.reached, self.go = threading.Event(), threading.Event()

    def put(self, item: Item, ttl: float | None = None) -> int:
        if item.label.address.owner == self.owner and not self.go.is_set():
            self.reached.set()
            assert self.go.wait(30)
            if self.fail:
                raise Unavailable("gone")
        return super().put(item, ttl)


@pytest.mark.parametrize("fail", [False, True], ids=["it passes", "it fails"])
def test_what_is_being_put_counts(fail: bool) -> None:
    """A second put that has room only if the first one fails waits for it."""
    gate = Gate(host())
    gate.fail = fail
    store = Quota(gate, taken(item()))
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(store.put, item(key=0))
        try:
            assert gate.reached.wait(30)
            second = pool.submit(store.put, item(key=1))
            store.put(item(key=0, owner=BOB))  # others go on
            assert not second.done()
        finally:
            gate.go.set()
        results = [future.exception(30) for future in (first, second)]
    if fail:
        assert isinstance(results[0], Unavailable) and results[1] is None
    else:
        assert results[0] is None and isinstance(results[1], OverQuota)
    assert store.stats(ALICE).objects == 1


def test_threads_fill_the_limit_and_no_more() -> None:
    inner, one = host(), taken(item())
    store = Quota(inner, 10 * one)

    def put(key: int) -> bool:
        try:
            store.put(item(key=key))
        except OverQuota:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        kept = list(pool.map(put, range(60)))
    assert sum(kept) == 10 and inner.stats(ALICE).nbytes == 10 * one
    assert store.exists([address(key) for key in range(60)]) == kept


def test_a_put_that_fails_takes_nothing_of_the_limit() -> None:
    inner = HostStore(3000, block=64)
    store = Quota(inner, 10_000)
    store.put(item(1000))
    for _ in range(20):
        with pytest.raises(Full) as raised:
            store.put(item(2500, key=1))
        assert type(raised.value) is Full
    store.put(item(500, key=2))


# All together ---------------------------------------------------------------------------------------------


def test_wrappers_on_wrappers() -> None:
    """Limited, encrypted, in parts: what is counted is what is really stored."""
    inner = HostStore(1 << 20, block=64)
    total = inner.free
    store = Quota(Sealed(Parts(inner, largest=1000), KeyRing()), 20_000)
    small, large = item(500, key=0), item(10_000, key=1)
    sizes = [store.put(small), store.put(large)]
    assert same(store, small) and same(store, large)
    buffer = np.zeros(10_000, np.uint8)
    assert store.get_into(address(1), buffer).label == large.label and np.array_equal(buffer, large.payload)
    assert store.stats(ALICE) == Stats(2, sum(sizes), inner.capacity)
    assert inner.stats(ALICE).nbytes == sum(sizes)
    assert {entry.address: entry.nbytes for entry in store.scan()} == dict(
        zip((address(0), address(1)), sizes, strict=True)
    )
    assert inner.stats().objects == 1 + 12  # 10,028 bytes are 11 parts and a first one
    with pytest.raises(OverQuota):
        store.put(item(10_000, key=2))
    assert inner.stats().objects == 13
    assert store.delete([address(1)]) == 1 and inner.stats().objects == 1
    with pytest.raises(Missing):
        store.get(address(1))
    store.put(item(10_000, key=2))
    assert store.delete_owner(ALICE) == 2 and inner.free == total
