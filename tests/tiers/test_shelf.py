"""One tier at work: watermarks, what leaves and where it goes, a store that is down, damaged or shared."""

from __future__ import annotations

import inspect
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from goldenkv.prefix import LRU
from goldenkv.tiers.disk import DiskStore
from goldenkv.tiers.errors import Corrupt, Expired, Foreign, Full, Missing, OverQuota, Unavailable
from goldenkv.tiers.faults import Fail, Faulty
from goldenkv.tiers.host import HostStore
from goldenkv.tiers.metrics import TierMetrics
from goldenkv.tiers.objects import Address, Item, Kind, Label, Tensor
from goldenkv.tiers.quota import Quota
from goldenkv.tiers.residents import Residents
from goldenkv.tiers.shelf import Shelf, Tier, Write
from goldenkv.tiers.store import Store

OWNER, SPACE = b"o" * 32, b"n" * 32
PAYLOAD = 1000


def item(number: int, nbytes: int = PAYLOAD, owner: bytes = OWNER, page: int = 1) -> Item:
    address = Address(owner, SPACE, number.to_bytes(32, "little"))
    payload = np.random.default_rng(number).integers(0, 256, nbytes, np.uint8)
    tensors = (Tensor("t", "uint8", (nbytes,)),)
    return Item(Label(address, Kind.PAGE, 16 * page, "layout", tensors), payload)


def at(number: int) -> Address:
    return item(number, 0).label.address


SIZE = HostStore(1 << 20, block=64).put(item(0))
"""Bytes of any of these objects, head included."""


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Bench:
    """A shelf over a store, and what it told."""

    def __init__(self, store: Store, below: Shelf | None = None, **tier: object) -> None:
        self.metrics, self.lost, self.clock = TierMetrics(), list[Address](), Clock()
        self.shelf = Shelf(Tier(store=store, **tier), 16, self.metrics, self.lost.append, self.clock)
        self.shelf.below, self.store = below, store

    def has(self, numbers: range | list[int]) -> list[int]:
        return [n for n in numbers if self.shelf.store.exists([at(n)])[0]]

    def count(self, metric: str, *labels: str) -> int:
        """What was counted so far."""
        found = self.metrics.to_json()[metric]
        for label in labels:
            found = found.get(label, {})
        return found or 0

    def same(self, number: int) -> bool:
        buffer = np.zeros(PAYLOAD, np.uint8)
        self.shelf.get_into(at(number), buffer)
        return buffer.tobytes() == item(number).payload.tobytes()


def host(objects: float) -> HostStore:
    return HostStore(int(objects * SIZE), block=8)


@contextmanager
def fault(owner: type, method: str, old: str, new: str) -> Iterator[None]:
    """Other text in one of its methods."""
    real = owner.__dict__[method]
    source = textwrap.dedent(inspect.getsource(real.fget if isinstance(real, property) else real))
    assert source.count(old) == 1, f"{old!r} is not in {method} once"
    scope = dict(vars(sys.modules[owner.__module__]))
    exec("from __future__ import annotations\n" + source.replace(old, new), scope)
    setattr(owner, method, scope[method])
    try:
        yield
    finally:
        setattr(owner, method, real)


def finds(test: Callable[[], None], owner: type, method: str, old: str, new: str) -> None:
    """With that fault the test fails, and without it passes."""
    test()
    with fault(owner, method, old, new), pytest.raises((AssertionError, pytest.fail.Exception)):
        test()


# Watermarks -------------------------------------------------------------------------------------------------

CAPACITY = 1 << 14
"""A power of two, so that its shares are exact."""


def kept_at(high: int, low: int, objects: int = 4) -> list[int]:
    """Which objects are there after one more was put, with watermarks of so many bytes."""
    bench = Bench(HostStore(CAPACITY, block=8), high=high / CAPACITY, low=low / CAPACITY)
    for n in range(objects + 1):
        bench.shelf.put(item(n))
    found = bench.has(range(objects + 1))
    gone = [n for n in range(objects + 1) if n not in found]
    assert [at(n) for n in gone] == bench.lost
    assert bench.count("evicted_objects", "host") == len(gone)
    assert len(bench.shelf._residents) == len(found)
    return found


def test_the_watermarks_are_exact() -> None:
    def check() -> None:
        full = 4 * SIZE + PAYLOAD  # what the fifth put makes of it
        assert kept_at(full, full) == [0, 1, 2, 3, 4]
        assert kept_at(full - 1, full - 1) == [1, 2, 3, 4]
        assert kept_at(full - 1, full - SIZE) == [1, 2, 3, 4]
        assert kept_at(full - 1, full - SIZE - 1) == [2, 3, 4]
        assert kept_at(full - 1, full - 4 * SIZE) == [4]
        assert kept_at(full, 1) == [0, 1, 2, 3, 4]

    finds(check, Shelf, "_make_room", "<= self.tier.high", "< self.tier.high")
    finds(check, Shelf, "_make_room", "- int(self.tier.low", "+ 1 - int(self.tier.low")
    finds(check, Shelf, "_make_room", "held + needed <=", "held <=")


def test_less_than_one_object_of_room() -> None:
    bench = Bench(host(1.5))
    for n in range(3):
        bench.shelf.put(item(n))
        assert bench.has(range(3)) == [n] and bench.same(n)


@pytest.mark.parametrize("high, low", [(0.5, 0.6), (1.1, 0.9), (0.5, 0.0)])
def test_bad_watermarks(high: float, low: float) -> None:
    with pytest.raises(ValueError, match="must be shares"):
        Tier(store=host(1), high=high, low=low)


@pytest.mark.parametrize("bad", [dict(ttl=0.0), dict(ttl=-1.0), dict(cool_down=-1.0)])
def test_bad_times(bad: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="seconds"):
        Tier(store=host(1), **bad)


def test_without_a_capacity_nothing_leaves_and_nothing_is_remembered(tmp_path: Path) -> None:
    bench = Bench(DiskStore(tmp_path))
    for n in range(5):
        bench.shelf.put(item(n))
    assert bench.has(range(5)) == list(range(5)) and len(bench.shelf._residents) == 0
    bench.store.close()


def test_a_store_that_is_full_before_its_capacity() -> None:
    """Blocks have rests: 4 objects fill a host store to a third. More come all the same, one for one."""

    def check() -> None:
        bench = Bench(HostStore(4 * 8192, block=8192))
        for n in range(9):
            try:
                bench.shelf.put(item(n))
            except Full:
                pytest.fail("nothing left, though it could")
        assert bench.has(range(9)) == [5, 6, 7, 8]

    finds(check, Shelf, "_make_room", "max(wanted, needed, 1)", "wanted")


def test_too_much_for_the_store_moves_nobody() -> None:
    def check() -> None:
        bench = Bench(host(3))
        bench.shelf.put(item(0))
        with pytest.raises(Full):
            bench.shelf.put(item(1, 4 * SIZE))
        assert bench.has([0, 1]) == [0] and not bench.lost
        assert bench.count("failures", "host", "put", "full") == 1

    finds(check, Shelf, "_make_room", "needed > capacity", "False")


def test_an_owner_over_its_quota_moves_nobody() -> None:
    def check() -> None:
        bench = Bench(Quota(host(10), 2 * SIZE))
        bench.shelf.put(item(0, owner=b"p" * 32))
        for n in (1, 2):
            bench.shelf.put(item(n))
        with pytest.raises(OverQuota):
            bench.shelf.put(item(3))
        assert bench.has([1, 2, 3]) == [1, 2] and not bench.lost

    finds(check, Shelf, "_put", "except OverQuota", "except Corrupt")


def test_order_and_sinks_and_pins() -> None:
    bench = Bench(host(3.2), strategy=LRU(sinks=1), low=0.95)
    for n, page in ((0, 1), (1, 2), (2, 2)):  # the first is a sink
        bench.shelf.put(item(n, page=page))
    assert bench.same(1)
    bench.shelf.put(item(3, page=2))
    assert bench.lost == [at(2)]
    bench.shelf.pin(at(1))
    bench.shelf.put(item(4, page=2))
    assert bench.lost == [at(2), at(3)]
    bench.shelf.unpin(at(1))
    bench.shelf.put(item(5, page=2))
    assert bench.lost == [at(2), at(3), at(1)]


def test_all_pinned_means_full() -> None:
    bench = Bench(host(2.2))
    for n in range(2):
        bench.shelf.put(item(n))
        bench.shelf.pin(at(n))
    with pytest.raises(Full):
        bench.shelf.put(item(2))
    assert bench.has(range(3)) == [0, 1] and not bench.lost


# Down to the tier below -------------------------------------------------------------------------------------


def two(upper: Store, lower: Store, **tier: object) -> tuple[Bench, Bench]:
    below = Bench(lower, write=Write.BACK)
    return Bench(upper, below.shelf, **tier), below


def test_what_leaves_goes_down() -> None:
    def check() -> None:
        upper, lower = two(host(2.2), host(10))
        for n in range(5):
            upper.shelf.put(item(n))
        assert upper.has(range(5)) == [3, 4] and lower.has(range(5)) == [0, 1, 2]
        assert all(lower.same(n) for n in range(3)) and not upper.lost
        assert upper.count("demotions", "host") == 3

    finds(check, Shelf, "_leave", "below.put(", "(")
    finds(check, Shelf, "_leave", "if not kept:", "if True:")


def test_what_is_below_already_is_not_copied_again() -> None:
    upper, lower = two(host(1.2), Faulty(host(10)))
    lower.shelf.put(item(0))
    upper.shelf.put(item(0))
    upper.shelf.put(item(1))
    assert upper.has([0, 1]) == [1] and lower.has([0, 1]) == [0] and not upper.lost
    assert lower.store.calls["put"] == 1 and upper.count("demotions", "host") == 0


@pytest.mark.parametrize("error", [Full, Unavailable, Corrupt])
def test_a_failed_demotion_leaves_nothing_half(error: type) -> None:
    """It is nowhere then: in no store, in no list, and whoever asks is told."""
    store = Faulty(host(10))
    upper, lower = two(host(1.2), store)
    upper.shelf.put(item(0))
    store.add(Fail("put", error))
    upper.shelf.put(item(1))
    assert upper.has([0, 1]) == [1] and lower.has([0, 1]) == []
    assert upper.lost == [at(0)] and at(0) not in upper.shelf._residents
    assert upper.count("failures", "host", "demote", error.reason) == 1
    with pytest.raises(Missing):
        upper.same(0)
    lower.clock.now = 2.0
    upper.shelf.put(item(2))  # the next one goes down
    assert lower.has([0, 1, 2]) == [1] and lower.same(1)


def test_a_tier_that_is_down_is_not_waited_for() -> None:
    def check() -> None:
        store = Faulty(host(10))
        upper, _ = two(host(1.2), store)
        store.down()
        for n in range(2):
            upper.shelf.put(item(n))
        asked = store.calls.total()
        for n in range(2, 4):
            upper.shelf.put(item(n))
        assert upper.lost == [at(0), at(1), at(2)] and store.calls.total() == asked

    finds(check, Shelf, "_leave", "and self.below.up", "and True")


def test_one_that_cannot_leave_can_leave_later() -> None:
    def check() -> None:
        store = Faulty(host(2.2))
        bench = Bench(store)
        for n in range(2):
            bench.shelf.put(item(n))
        store.add(Fail("delete", Unavailable))
        with pytest.raises(Unavailable):
            bench.shelf.put(item(2))
        assert bench.has(range(3)) == [0, 1]
        bench.clock.now = 5.0
        bench.shelf.put(item(2))
        assert bench.has(range(3)) == [1, 2]

    finds(check, Shelf, "_make_room", "self._residents.stay(chosen[place:])", "self._rescan")


# Down, damaged, shared --------------------------------------------------------------------------------------


def test_a_store_that_did_not_answer_is_left_alone_for_a_while() -> None:
    def check() -> None:
        store = Faulty(host(10))
        bench = Bench(store, cool_down=3.0)
        bench.shelf.put(item(0))
        store.add(Fail("get", Unavailable))
        with pytest.raises(Unavailable):
            bench.same(0)
        for now, up in ((0.0, False), (2.9, False), (3.0, True), (9.0, True)):
            bench.clock.now = now
            assert bench.shelf.up is up
            asked = store.calls["exists"]
            assert bench.shelf.exists([at(0)]) == [up]
            assert store.calls["exists"] - asked == up
        assert bench.same(0)
        assert bench.count("failures", "host", "get", "unavailable") == 1

    finds(check, Shelf, "up", ">=", ">")
    finds(check, Shelf, "counted", "isinstance(error, Unavailable)", "False")


def test_missing_is_no_failure_and_full_is_not_down() -> None:
    bench = Bench(Faulty(host(1)))
    with pytest.raises(Missing):
        bench.same(0)
    with pytest.raises(Full):
        bench.shelf.put(item(0, 4 * SIZE))
    assert bench.shelf.up and set(bench.metrics.to_json()["failures"]["host"]) == {"put"}


def test_exists_of_a_failing_store() -> None:
    bench = Bench(Faulty(host(3)))
    bench.shelf.put(item(0))
    bench.store.add(Fail("exists", Corrupt))
    assert bench.shelf.exists([at(0)]) == [False] and bench.shelf.exists([at(0), at(1)]) == [True, False]
    assert bench.shelf.exists([]) == [] and bench.count("failures", "host", "exists", "corrupt") == 1


def test_what_is_damaged_is_taken_out() -> None:
    def check() -> None:
        store = host(5)
        bench = Bench(store)
        bench.shelf.put(item(0))
        store._arena[:] ^= 4
        with pytest.raises(Corrupt):
            bench.same(0)
        assert bench.has([0]) == [] and at(0) not in bench.shelf._residents
        bench.shelf.put(item(0))
        assert bench.same(0)

    finds(check, Shelf, "get_into", "self.discard(address)", "pass")


def test_another_size_is_foreign_and_taken_out() -> None:
    bench = Bench(host(5))
    bench.shelf.put(item(0, 500))
    with pytest.raises(Foreign):
        bench.same(0)
    assert bench.has([0]) == []


def test_what_others_put_can_leave(tmp_path: Path) -> None:
    """Two shelves over one folder: what others put is found at the start and when full."""

    def check() -> None:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        one, other = (Bench(DiskStore(folder, 3 * SIZE + 99), low=0.99) for _ in range(2))
        for n in range(3):
            one.shelf.put(item(n))
        assert len(other.shelf._residents) == 0
        other.shelf.put(item(3))
        assert other.has(range(4)) == [1, 2, 3] and other.same(3)
        assert len(Bench(other.store).shelf._residents) == 3
        one.shelf.put(item(4))  # of what it knows, the first object is gone already
        assert one.has(range(5)) == [2, 3, 4] and one.count("evicted_objects", "disk") == 1
        one.store.close()
        other.store.close()

    check()
    with fault(Shelf, "_rescan", "for entry in entries", "for entry in []"), pytest.raises(Full):
        check()
    finds(check, Shelf, "_leave", "self.name, there)", "self.name)")


def test_a_read_only_tier_gets_nothing() -> None:
    store = Faulty(host(5))
    store.inner.put(item(0))
    bench = Bench(store, write=Write.NEVER, promote=False)
    bench.shelf.put(item(1))
    assert bench.same(0) and bench.has([0, 1]) == [0] and store.calls["put"] == 0


def test_time_to_live() -> None:
    clock = Clock()
    clock.now = 100.0
    bench = Bench(HostStore(1 << 16, clock=clock), ttl=10.0)
    bench.shelf.put(item(0))
    clock.now = 109.0
    assert bench.same(0)
    clock.now = 110.0
    with pytest.raises(Expired):
        bench.same(0)
    assert at(0) not in bench.shelf._residents


@pytest.mark.parametrize("namespace", [None, SPACE], ids=["owner", "namespace"])
def test_delete_all(namespace: bytes | None) -> None:
    """What is deleted does not count as evicted later, and room is made by what is really there."""

    def check() -> None:
        bench = Bench(host(4.2), low=0.99)
        other = item(9, owner=b"p" * 32)
        bench.shelf.put(other)
        for n in range(3):
            bench.shelf.put(item(n))
        assert bench.shelf.delete_all(OWNER, namespace) == 3
        assert len(bench.shelf._residents) == 1
        for n in range(3, 7):
            bench.shelf.put(item(n))
        assert bench.lost == [other.label.address] and bench.has(range(7)) == [3, 4, 5, 6]

    finds(check, Residents, "forget", "self.remove(address)", "pass")


def test_stats_go_into_the_metrics() -> None:
    bench = Bench(host(4))
    bench.shelf.put(item(0))
    assert bench.shelf.stats() == bench.store.stats()
    assert (bench.count("objects", "host"), bench.count("held_bytes", "host")) == (1, SIZE)
    assert bench.count("moved_bytes", "host", "put") == PAYLOAD
