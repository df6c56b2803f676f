"""The mover: what goes down and comes up, when, from where, and what becomes of late copies.

Most tests run workers step by step, so that nothing depends on the time that a thread takes.
"""

from __future__ import annotations

import inspect
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from goldenkv.tiers.epochs import Epochs
from goldenkv.tiers.errors import Corrupt, Foreign, Full, Late, StoreError, Unavailable
from goldenkv.tiers.faults import Delay, Fail, Faulty, Flip, Pause
from goldenkv.tiers.host import HostStore
from goldenkv.tiers.loader import Loaded, Loader
from goldenkv.tiers.mover import Mover
from goldenkv.tiers.objects import Address, Item, Kind, Label, Tensor
from goldenkv.tiers.saver import Saver, Source
from goldenkv.tiers.shelf import Tier, Write
from goldenkv.tiers.staging import Staging

OWNER, OTHER, SPACE, SPACE_2 = (bytes([i]) * 32 for i in range(4))
PAYLOAD = 1000
THROUGH, BACK, NEVER = Write.THROUGH, Write.BACK, Write.NEVER


def item(number: int, owner: bytes = OWNER, namespace: bytes = SPACE, position: int = 16) -> Item:
    address = Address(owner, namespace, number.to_bytes(32, "little"))
    payload = np.random.default_rng(number).integers(0, 256, PAYLOAD, np.uint8)
    return Item(Label(address, Kind.PAGE, position, "layout", (Tensor("t", "uint8", (PAYLOAD,)),)), payload)


class Steps(Executor):
    """Nothing runs before `step`, or at once if it is `inline`."""

    def __init__(self, inline: bool = False) -> None:
        self.inline, self.tasks = inline, list[tuple[Future, Callable, tuple]]()

    def submit(self, fn: Callable, /, *args: Any, **kwargs: Any) -> Future:
        self.tasks.append((Future(), fn, args))
        future = self.tasks[-1][0]
        if self.inline:
            self.step()
        return future

    def step(self, count: int = 1 << 20) -> None:
        while self.tasks and count:
            future, fn, args = self.tasks.pop(0)
            count -= 1
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(fn(*args))
                except BaseException as error:
                    future.set_exception(error)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def store(name: str, objects: float = 100) -> Faulty:
    found = Faulty(HostStore(int(objects * 1700), block=8))
    found.name = name
    return found


class Bench:
    """A mover over stores "a", "b" and so on, and what it told."""

    def __init__(
        self, *writes: Write, sizes: tuple[float, ...] = (), workers: Executor | None = None, **options: Any
    ) -> None:
        names = "abc"[: len(writes)]
        self.stores = [store(n, s) for n, s in zip(names, sizes or [100] * len(names), strict=True)]
        self.clock, self.steps = Clock(), workers or Steps(inline=True)
        tiers = [
            Tier(store=s, write=w, **options.pop(s.name, {}))
            for s, w in zip(self.stores, writes, strict=True)
        ]
        self.mover = Mover(tiers, 16, workers=self.steps, **{"clock": self.clock} | options)
        self.told: dict[int, bool] = {}
        self.fetched: list[int] = []

    def save(self, number: int, error: type[StoreError] | None = None, **how: Any) -> bool:
        source = item(number, **{k: how.pop(k) for k in ("owner", "namespace") if k in how})

        def fetch() -> Item:
            self.fetched.append(number)
            if error is not None:
                raise error("on purpose")
            return source

        def done(ok: bool) -> None:
            assert number not in self.told, "told twice"
            self.told[number] = ok

        return self.mover.down.save(Source(source.label, fetch), done, **how)

    def where(self, number: int, **how: bytes) -> str:
        """Names of the stores that have it whole."""
        address, found = item(number, **how).label.address, ""
        for each in self.stores:
            if each.inner.exists([address])[0]:
                assert each.inner.get(address).payload.tobytes() == item(number).payload.tobytes()
                found += each.name
        return found

    def put(self, where: str, *numbers: int, **how: bytes) -> None:
        """Behind the mover's back, or on one of its shelves where there is one."""
        for shelf in self.mover._shelves:
            for number in numbers if shelf.name in where else ():
                shelf.put(item(number, **how))

    def load(self, *numbers: int, deadline: float | None = None) -> list[Loaded | StoreError]:
        return self.mover.up.load([item(n).label for n in numbers], deadline)

    def tier(self, number: int) -> str:
        """Where it was found, with the right bits; or why it was not."""
        (found,) = self.load(number)
        if isinstance(found, StoreError):
            return found.reason
        assert found.item.payload.tobytes() == item(number).payload.tobytes()
        self.mover.up.release([found])
        return found.tier

    def count(self, metric: str, *labels: str) -> int:
        found = self.mover.metrics.to_json()[metric]
        for label in labels:
            found = found.get(label, {})
        return found or 0


@contextmanager
def fault(owner: type, method: str, old: str, new: str) -> Iterator[None]:
    """Other text in one of its methods."""
    real = owner.__dict__[method]
    source = textwrap.dedent(inspect.getsource(real))
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


# Down -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "writes, leaving, expected",
    [
        ((THROUGH, BACK, NEVER), False, "a"),
        ((THROUGH, BACK, THROUGH), False, "ac"),
        ((THROUGH, BACK, THROUGH), True, "ac"),
        ((BACK, BACK), False, ""),
        ((BACK, BACK), True, "a"),
        ((NEVER, BACK), True, "b"),
        ((NEVER, NEVER), True, ""),
    ],
    ids=lambda value: "-".join(w.name for w in value) if isinstance(value, tuple) else str(value),
)
def test_who_gets_what(writes: tuple[Write, ...], leaving: bool, expected: str) -> None:
    bench = Bench(*writes)
    started = bench.save(0, leaving=leaving)
    bench.mover.poll()
    assert started == (leaving or THROUGH in writes)
    assert bench.where(0) == expected and bench.told == ({0: bool(expected)} if started else {})
    assert bench.fetched == [0] * bool(expected)  # nothing is fetched for nobody


def test_what_leaves_and_is_on_a_tier_is_not_fetched() -> None:
    def check() -> None:
        bench = Bench(THROUGH, BACK)
        bench.put("b", 0)
        bench.save(0, leaving=True)
        bench.mover.poll()
        assert bench.told == {0: True} and bench.fetched == [] and bench.where(0) == "b"

    finds(check, Saver, "_save", "leaving and any(", "False and any(")


def test_completed_is_not_succeeded() -> None:
    def check() -> None:
        bench = Bench(THROUGH, THROUGH)
        bench.stores[0].add(Fail("put", Full), times=None)
        bench.save(0)
        bench.stores[1].add(Fail("put", Unavailable))
        bench.save(1)
        bench.clock.now += 9
        bench.save(2, error=Corrupt)
        bench.mover.poll()
        assert bench.told == {0: True, 1: False, 2: False}
        assert [bench.where(n) for n in range(3)] == ["b", "", ""]
        assert bench.count("failures", "device", "get", "corrupt") == 1

    finds(check, Saver, "_save", "continue  #", "kept = True  #")


def test_a_tier_that_is_down_is_passed_over() -> None:
    bench = Bench(THROUGH, THROUGH)
    bench.stores[0].down()
    for number in range(3):
        bench.save(number)
    bench.mover.poll()
    assert bench.told == {0: True, 1: True, 2: True} and bench.stores[0].calls.total() <= 3
    bench.stores[1].down()
    bench.save(3)
    bench.save(4)
    bench.mover.poll()
    assert bench.told[3] is bench.told[4] is False and bench.fetched == [0, 1, 2, 3]


def test_only_poll_tells() -> None:
    def check() -> None:
        bench = Bench(THROUGH)
        bench.save(0)
        assert bench.where(0) == "a" and not bench.told
        assert bench.mover.down.on_their_way == PAYLOAD
        bench.mover.poll()
        assert bench.told == {0: True} and bench.mover.down.on_their_way == 0

    check()
    real = Saver.save
    with pytest.MonkeyPatch.context() as patch, pytest.raises(AssertionError):
        patch.setattr(Saver, "save", lambda self, *a, **k: (real(self, *a, **k), self.poll())[0])
        check()


def test_no_more_than_so_many_bytes_are_on_their_way() -> None:
    def check() -> None:
        bench = Bench(THROUGH, workers=Steps(), in_flight=2 * PAYLOAD)
        assert [bench.save(n) for n in range(4)] == [True, True, False, False]
        assert bench.count("dropped_stores", "a") == 2 and bench.count("transfers_in_flight", "device") == 2
        bench.steps.step()
        assert bench.save(4)
        bench.steps.step()
        bench.mover.poll()
        assert bench.told == {0: True, 1: True, 4: True}  # nobody is told of what was dropped
        assert bench.count("transfers_in_flight", "device") == 0

    finds(check, Saver, "_wait_for_room", "+ nbytes <=", "<=")


def test_one_larger_than_the_limit_goes_alone() -> None:
    bench = Bench(THROUGH, workers=Steps(), in_flight=PAYLOAD - 1)
    assert [bench.save(n) for n in range(2)] == [True, False]


def test_what_is_on_its_way_is_not_sent_again() -> None:
    bench = Bench(THROUGH, workers=Steps())
    assert [bench.save(0), bench.save(0), bench.save(0, leaving=True)] == [True, False, False]
    bench.steps.step()
    bench.mover.poll()
    assert bench.save(0)  # it has ended


def test_what_leaves_right_after_it_was_published_goes_down() -> None:
    """A tier written back has nothing to do with what is published: that must not stand in the way."""

    def check() -> None:
        bench = Bench(BACK, workers=Steps())
        bench.save(0)
        bench.save(0, leaving=True)
        bench.steps.step()
        assert bench.where(0) == "a"

    finds(check, Saver, "save", "or not (leaving or self.writes_through)", "")


def test_patience() -> None:
    """Whoever has it waits for room; if none comes in time the object is dropped, and nothing is raised."""
    with ThreadPoolExecutor(2) as pool:
        for patience, expected in ((0.01, False), (60.0, True)):
            bench = Bench(THROUGH, workers=pool, in_flight=PAYLOAD, patience=patience, clock=time.monotonic)
            pause = bench.stores[0].add(Pause("put"))
            assert bench.save(0) and pause.reached.wait(60)
            timer = threading.Timer(0.05, pause.release.set)
            if expected:
                timer.start()
            assert bench.save(1) is expected
            pause.release.set()
            assert bench.mover.drain(60)
            assert bench.told == ({0: True, 1: True} if expected else {0: True})


def test_what_must_go_waits() -> None:
    with ThreadPoolExecutor(2) as pool:
        bench = Bench(THROUGH, workers=pool, in_flight=PAYLOAD)
        bench.stores[0].add(Delay("put", 0.01), times=None)
        assert all(bench.save(n, must=True) for n in range(5))
        assert bench.mover.drain(60) and bench.told == dict.fromkeys(range(5), True)


def test_a_mistake_of_a_worker_is_raised_where_it_can_be_seen() -> None:
    bench = Bench(THROUGH)

    def mistake(ok: bool) -> None: ...

    bench.mover.down.save(Source(item(0).label, lambda: 1 // 0), mistake)
    with pytest.raises(ZeroDivisionError):
        bench.mover.poll()
    assert bench.mover.poll() == []


# Up ---------------------------------------------------------------------------------------------------------


def test_the_fastest_tier_that_has_it() -> None:
    def check() -> None:
        bench = Bench(THROUGH, BACK, NEVER, a=dict(promote=False), b=dict(promote=False))
        bench.put("abc", 0)
        bench.put("bc", 1)
        bench.put("c", 2)
        assert [bench.tier(n) for n in range(4)] == ["a", "b", "c", "missing"]
        assert [bench.where(n) for n in range(4)] == ["abc", "bc", "c", ""]  # none was copied up

    finds(check, Loader, "_load", "enumerate(self._shelves)", "reversed(list(enumerate(self._shelves)))")
    finds(check, Loader, "_load", "if s.tier.promote and s.up", "if s.up")


def test_promotion() -> None:
    def check() -> None:
        bench = Bench(THROUGH, BACK, NEVER, b=dict(promote=False))
        bench.put("c", 0)
        assert [bench.tier(0), bench.where(0), bench.tier(0)] == ["c", "ac", "a"]
        assert bench.count("promotions", "a") == 1

    finds(check, Loader, "_load", "self._shelves[:place]", "[]")


def test_a_damaged_object_is_mended_from_below() -> None:
    bench = Bench(THROUGH, THROUGH)
    bench.put("ab", 0)
    bench.stores[0].inner._arena[:] ^= 1
    assert bench.tier(0) == "b" and bench.where(0) == "ab" and bench.tier(0) == "a"
    assert bench.count("failures", "a", "get", "corrupt") == 1


def test_damage_on_the_way_from_a_store_is_seen() -> None:
    """The store has verified what it read; a bit is another one when it arrives. It is not passed on."""

    def check() -> None:
        bench = Bench(THROUGH, THROUGH)
        bench.put("b", 0)
        bench.stores[1].add(Flip(bit=4321))
        assert bench.tier(0) == "corrupt" and bench.where(0) == "b"
        assert bench.tier(0) == "b" and bench.where(0) == "ab"
        assert bench.count("failures", "b", "get", "corrupt") == 1

    finds(check, Loader, "_got", "if self._verify", "if False")


@pytest.mark.parametrize("error", [Corrupt, Unavailable, Foreign])
def test_the_reason_is_the_failure_and_not_the_missing(error: type[StoreError]) -> None:
    bench = Bench(THROUGH, THROUGH)
    bench.put("a", 0)
    bench.stores[0].add(Fail("get", error))
    assert bench.tier(0) == error.reason


def test_a_tier_that_is_down_is_a_reason_too() -> None:
    bench = Bench(THROUGH, THROUGH)
    bench.stores[0].add(Fail("get", Unavailable))
    assert bench.tier(0) == "unavailable"
    asked = bench.stores[0].calls["get"]
    assert bench.tier(0) == "unavailable" and bench.stores[0].calls["get"] == asked
    bench.clock.now += 9
    assert bench.tier(0) == "missing"


def test_another_label_is_foreign() -> None:
    """What lies there is whole and has this address; but it is not what was asked for."""

    def check() -> None:
        bench = Bench(THROUGH, THROUGH)
        bench.mover._shelves[0].put(item(0, position=32))
        assert bench.tier(0) == "foreign" and bench.where(0) == ""  # it does not stand in the way
        bench.mover._shelves[0].put(item(0, position=32))
        bench.put("b", 0)
        assert bench.tier(0) == "b" and bench.tier(0) == "a"

    finds(check, Loader, "_got", "head.label != label", "False")
    finds(check, Loader, "_got", "shelf.discard(label.address)", "pass")


def test_what_has_not_come_by_its_deadline() -> None:
    """It is late, and the copy reaches nobody: its memory is used again once it has ended, and not before."""

    def check() -> None:
        pause, main = Pause("get"), threading.get_ident()

        def clock() -> float:
            """Stands at 1, where who loads looks at it once the copy has begun."""
            return float(loading and threading.get_ident() == main and pause.reached.wait(60))

        with ThreadPoolExecutor(3) as pool:
            loading = False
            bench = Bench(THROUGH, workers=pool, clock=clock)
            bench.put("a", 0, 1)
            bench.stores[0].add(pause)
            loading = True
            try:
                (late,) = bench.load(0, deadline=1.0)
                assert isinstance(late, Late)
                (other,) = bench.load(1)
                assert isinstance(other, Loaded)
            finally:
                pause.release.set()
            assert bench.mover.drain(60)
            assert other.item.payload.tobytes() == item(1).payload.tobytes()
            kept = bench.mover.up._staging._free.get(PAYLOAD, [])
            assert len(kept) == 1 and not np.shares_memory(kept[0], other.item.payload)
            bench.mover.up.release([other])
            assert len(kept) == 2
            assert bench.count("failures", "device", "get", "late") == 1

    check()
    one = np.empty(PAYLOAD, np.uint8)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(AssertionError):
        patch.setattr(Staging, "take", lambda self, nbytes: one)
        check()
    with pytest.MonkeyPatch.context() as patch, pytest.raises(AssertionError):
        patch.setattr(Loader, "_throw_away", lambda self, future: None)
        check()


def test_what_had_not_begun_by_its_deadline_does_not_begin() -> None:
    bench = Bench(THROUGH, workers=Steps())
    bench.put("a", 0)
    (late,) = bench.load(0, deadline=bench.clock.now - 1)
    bench.steps.step()
    assert isinstance(late, Late) and bench.stores[0].calls["get"] == 0
    assert not bench.mover._shelves[0]._residents._pins


def test_what_is_loaded_is_pinned() -> None:
    def check() -> None:
        steps = Steps()
        bench = Bench(THROUGH, sizes=(2.5,), workers=steps)
        bench.put("a", 0, 1)
        future = bench.mover.up._start(item(0).label)
        bench.put("a", 2)
        assert [bench.where(n) for n in range(3)] == ["a", "", "a"]
        steps.step()
        assert isinstance(future.result(), Loaded)
        bench.put("a", 3)  # the pin is gone: of the three the first one was used last
        bench.put("a", 4)
        assert [bench.where(n) for n in range(5)] == ["", "", "", "a", "a"]

    finds(check, Loader, "_start", "self.pin([label.address])", "pass")
    finds(check, Loader, "_start", "self.unpin([label.address])", "None")


def test_find_asks_each_tier_for_what_is_unknown() -> None:
    bench = Bench(THROUGH, BACK, NEVER)
    bench.put("a", 0)
    bench.put("b", 1)
    bench.put("ac", 2)
    addresses = [item(n).label.address for n in (3, 2, 1, 0, 1)]
    assert bench.mover.up.find(addresses) == [False, True, True, True, True]
    assert bench.mover.up.find(addresses[1:]) == [True] * 4
    assert [s.calls["exists"] for s in bench.stores] == [2, 2, 1] and bench.mover.up.find([]) == []
    bench.stores[1].down()
    assert bench.mover.up.find(addresses) == [False, True, False, True, False]


def test_find_with_a_deadline() -> None:
    bench = Bench(THROUGH, THROUGH, workers=Steps())
    bench.put("ab", 0)
    assert bench.mover.up.find([item(0).label.address], bench.clock.now) == [False]
    bench.steps.step()
    assert bench.stores[0].calls["exists"] == bench.stores[1].calls["exists"] == 0
    assert bench.count("failures", "a", "exists", "late") == 1


def test_prefetch() -> None:
    """What is further down is copied up; nothing is counted as used, and what is nowhere is no failure."""

    def check() -> None:
        bench = Bench(THROUGH, BACK, NEVER, b=dict(promote=False))
        bench.put("c", 0)
        bench.put("b", 1)
        bench.put("a", 2)
        bench.mover.up.prefetch([item(n).label for n in range(4)])
        assert [bench.where(n) for n in range(4)] == ["ac", "ab", "a", ""]
        assert bench.mover.metrics.sources() == {} and bench.stores[0].calls["get"] == 2
        assert [bench.tier(n) for n in range(3)] == ["a", "a", "a"]
        assert bench.mover.drain(0) and not bench.count("failures")

    finds(check, Loader, "_prefetch", "if has and place", "if False")


# The whole --------------------------------------------------------------------------------------------------


def test_bad_tiers() -> None:
    with pytest.raises(ValueError, match=r"at least one, .* got \[\]"):
        Mover([], 16)
    with pytest.raises(ValueError, match=r"different names, got \['a', 'a'\]"):
        Mover([Tier(store=store("a")), Tier(store=store("a"))], 16)


def test_what_has_left_is_told_once() -> None:
    bench = Bench(THROUGH, sizes=(1.5,))
    for number in range(3):
        bench.save(number)
    assert bench.mover.poll() == [item(0).label.address, item(1).label.address] and bench.mover.poll() == []
    assert bench.mover.names == ["a"]


@pytest.mark.parametrize("namespace, left", [(None, "2"), (SPACE, "12")], ids=["owner", "namespace"])
def test_forget(namespace: bytes | None, left: str) -> None:
    bench = Bench(THROUGH, BACK, THROUGH)
    whose = [dict(owner=OWNER, namespace=SPACE), dict(owner=OWNER, namespace=SPACE_2), dict(owner=OTHER)]
    for number, how in enumerate(whose):
        bench.put("abc", number, **how)
    assert bench.mover.forget(OWNER, namespace) == 3 * (3 - len(left))
    assert "".join(str(n) for n in range(3) if bench.where(n, **whose[n])) == left
    assert bench.mover.forget(OWNER, namespace) == 0


def test_what_is_late() -> None:
    """A copy that began before a deletion, or during it; not one that began behind it, or of others."""

    def check() -> None:
        for scope in (OWNER, SPACE):
            epochs, address, other = Epochs(), item(0).label.address, item(0, OTHER, SPACE_2).label.address
            before, others = epochs.of(address), epochs.of(other)
            assert not epochs.late(address, before)
            epochs.advance(scope)
            during = epochs.of(address)
            assert epochs.late(address, before) and epochs.late(address, during)
            epochs.advance(scope)
            after = epochs.of(address)
            assert epochs.late(address, before) and epochs.late(address, during)
            assert not epochs.late(address, after) and not epochs.late(other, others)

    finds(check, Epochs, "late", "count % 2", "False")
    finds(check, Epochs, "late", "self.of(address) != epoch", "False")


def test_a_write_that_is_late_does_not_come_back() -> None:
    def check() -> None:
        bench = Bench(THROUGH, THROUGH, workers=Steps())
        bench.save(0)
        bench.save(1, owner=OTHER)
        with pytest.raises(Unavailable, match="copies under way"):
            bench.mover.forget(OWNER, timeout=0.0)
        bench.steps.step()
        bench.mover.poll()
        assert bench.where(0) == "" and bench.where(1, owner=OTHER) == "ab"
        assert bench.told == {0: False, 1: True}
        assert bench.mover.forget(OWNER, timeout=0.0) == 0
        bench.save(0)  # what comes after that is not late
        bench.steps.step()
        assert bench.where(0) == "ab"

    finds(check, Epochs, "advance", "+ 1", "+ 0")


def test_a_promotion_that_is_late_does_not_come_back() -> None:
    def check() -> None:
        steps = Steps()
        bench = Bench(THROUGH, THROUGH, workers=steps)
        bench.put("b", 0)
        future = bench.mover.up._start(item(0).label)
        steps.step(1)
        assert isinstance(future.result(), Loaded)
        with pytest.raises(Unavailable):
            bench.mover.forget(OWNER, SPACE, timeout=0.0)
        steps.step()
        assert bench.where(0) == ""

    finds(check, Loader, "_promote", "self._epochs.late(loaded.item.label.address, epoch)", "False")


def test_a_demotion_that_is_late_is_waited_for() -> None:
    """An object of somebody else makes room, and pushes one down that is deleted meanwhile."""

    def check() -> None:
        with ThreadPoolExecutor(2) as pool:
            bench = Bench(THROUGH, BACK, sizes=(1.5, 9), workers=pool)
            bench.put("a", 0)
            pause = bench.stores[1].add(Pause("put"))
            try:
                bench.save(1, owner=OTHER)
                assert pause.reached.wait(60)
                with pytest.raises(Unavailable, match="copies under way"):
                    bench.mover.forget(OWNER, timeout=0.01)
            finally:
                pause.release.set()
            assert bench.mover.drain(60)
            bench.mover.forget(OWNER)
            assert bench.where(0) == "" and bench.where(1, owner=OTHER) == "a"

    saving = "[f for address, (f, _, _) in self.down._saving.items() if address.owner == owner]"
    own = f"_ended([*{saving}, *self.up.futures()], timeout)"
    finds(check, Mover, "forget", "self.drain(timeout)", own)


def test_forgetting_where_a_tier_fails() -> None:
    bench = Bench(THROUGH, THROUGH)
    bench.put("ab", 0)
    bench.stores[0].add(Fail("delete", Unavailable))
    with pytest.raises(Unavailable, match=r"\(a: unavailable\)"):
        bench.mover.forget(OWNER)
    assert bench.where(0) == "a"  # the other one has done it
    assert bench.mover.forget(OWNER) == 1 and bench.where(0) == ""


def test_drain_and_close() -> None:
    bench = Bench(THROUGH, workers=Steps())
    assert bench.mover.drain() and bench.mover.drain(0.0)
    bench.save(0)
    assert not bench.mover.drain(0.0) and bench.told == {}
    bench.steps.step()
    assert bench.mover.drain(0.0) and bench.told == {0: True}

    with pytest.MonkeyPatch.context() as patch:
        ended = []
        patch.setattr(HostStore, "close", lambda self: ended.append(len(self._entries)))
        slow = store("slow")
        slow.add(Delay("put", 0.05))
        mover = Mover([Tier(store=slow)], 16)
        mover.down.save(Source(item(0).label, lambda: item(0)), lambda ok: ended.append(ok))
        mover.close()
        assert ended == [True, 1]  # what was on its way has arrived before the store was closed


def test_stats_of_those_who_answer() -> None:
    bench = Bench(THROUGH, THROUGH)
    bench.put("ab", 0)
    bench.stores[1].down()
    assert list(bench.mover.stats()) == ["a"] and bench.mover.stats()["a"].objects == 1
