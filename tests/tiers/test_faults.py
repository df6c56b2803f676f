"""Faults on purpose: each happens to the call that was named, does what it says, and nothing else happens."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import numpy as np
import pytest

from goldenkv.tiers.errors import Corrupt, Full, Missing, ReadOnly, StoreError, Unavailable
from goldenkv.tiers.faults import OPERATIONS, Delay, Fail, Fault, Faulty, Flip, Lose, Pause, Plan
from goldenkv.tiers.host import HostStore
from goldenkv.tiers.objects import Address, Item, Kind, Label, Tensor

OWNER = b"o" * 32


def item(seed: int = 0, nbytes: int = 100) -> Item:
    address = Address(OWNER, b"n" * 32, bytes([seed]) * 32)
    payload = np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)
    return Item(Label(address, Kind.PAGE, 256, "layout", (Tensor("t", "uint8", (nbytes,)),)), payload)


ONE = item()
AT = ONE.label.address


@pytest.fixture
def store() -> Faulty:
    return Faulty(HostStore(1 << 20, block=1024))


def same(store: Faulty, expected: Item) -> bool:
    return store.get(expected.label.address).payload.tobytes() == expected.payload.tobytes()


CALLS: dict[str, list[Callable[[Faulty], object]]] = {
    "put": [lambda s: s.put(ONE)],
    "get": [lambda s: s.get(AT), lambda s: s.get_into(AT, np.zeros(100, np.uint8))],
    "exists": [lambda s: s.exists([AT])],
    "delete": [lambda s: s.delete([AT]), lambda s: s.delete_owner(OWNER)],
    "scan": [lambda s: list(s.scan())],
    "stats": [lambda s: s.stats()],
}


@pytest.mark.parametrize("operation", OPERATIONS)
def test_the_named_call_fails_and_does_nothing(store: Faulty, operation: str) -> None:
    inner = store.inner
    for call in CALLS[operation]:
        inner.put(ONE)
        before = inner.stats()
        store.add(Fail(operation, ReadOnly), nth=2, times=2)
        call(store)
        inner.put(ONE)
        for _ in range(2):
            with pytest.raises(ReadOnly):
                call(store)
            assert inner.stats() == before and inner.exists([AT]) == [True]
        call(store)
    assert store.met[Fail(operation, ReadOnly)] == 2 * len(CALLS[operation])
    assert store.calls[operation] == 4 * len(CALLS[operation])


@pytest.mark.parametrize("operation", OPERATIONS)
def test_nothing_answers_while_it_is_down(store: Faulty, operation: str) -> None:
    store.put(ONE)
    store.down()
    for call in CALLS[operation]:
        with pytest.raises(Unavailable):
            call(store)
    store.up()
    assert same(store, ONE)
    for call in CALLS[operation]:
        store.inner.put(ONE)
        call(store)


def test_a_list_ends_where_the_store_dies(store: Faulty) -> None:
    for seed in range(3):
        store.put(item(seed))
    entries = store.scan()
    next(entries)
    store.down()
    with pytest.raises(Unavailable):
        next(entries)


@pytest.mark.parametrize("dies", [False, True], ids=["lives", "dies"])
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_a_paused_put_waits(store: Faulty, after: bool, dies: bool) -> None:
    """Visible only if it is stopped after it was done. If the store dies meanwhile, the caller hears so."""
    pause = store.add(Pause("put", after))
    with ThreadPoolExecutor(1) as pool:
        put = pool.submit(store.put, ONE)
        assert pause.reached.wait(10)
        assert store.exists([AT]) == [after]
        assert not put.done()
        if dies:
            store.down()
        pause.release.set()
        if dies:
            with pytest.raises(Unavailable):
                put.result(10)
        else:
            assert put.result(10) > 100
    store.up()
    assert store.exists([AT]) == [after or not dies]


def test_clearing_lets_go_what_is_paused(store: Faulty) -> None:
    pause, other = store.add(Pause("exists")), store.add(Fail("put"))
    with ThreadPoolExecutor(1) as pool:
        exists = pool.submit(store.exists, [AT])
        assert pause.reached.wait(10)
        store.clear()
        assert exists.result(10) == [False]
    store.put(ONE)
    assert store.met == {pause: 1} and other not in store.met


def test_two_pauses_are_two() -> None:
    assert Pause("get") != Pause("get")


def test_a_delay_goes_by_the_sleep_that_was_given() -> None:
    slept: list[float] = []
    store = Faulty(HostStore(1 << 20, block=1024), sleep=slept.append)
    store.add(Delay("put", 0.25))
    store.put(ONE)
    store.put(ONE)
    assert slept == [0.25]
    assert same(store, ONE)


def test_a_lost_put_is_answered_and_missing(store: Faulty) -> None:
    """Mooncake puts past its capacity return OK and evict silently: completed is not kept."""
    taken = store.put(ONE)
    store.add(Lose())
    assert store.put(ONE) == taken
    with pytest.raises(Missing):
        store.get(AT)
    store.put(ONE)
    assert same(store, ONE)


@pytest.mark.parametrize("bit", [0, 7, 8, 399, -1, 800, -801])
def test_a_flipped_bit_is_one_bit(store: Faulty, bit: int) -> None:
    store.put(ONE)
    store.add(Flip(bit=bit), times=2)
    buffer = np.zeros(100, np.uint8)
    store.get_into(AT, buffer)
    item = store.get(AT)
    with pytest.raises(Corrupt):
        item.check()
    for found in (buffer, item.payload):
        wrong = np.unpackbits(found ^ ONE.payload, bitorder="little")
        assert list(np.flatnonzero(wrong)) == [bit % 800]
    assert same(store, ONE), "what is stored has not changed"


def test_an_empty_payload_has_no_bit_to_flip(store: Faulty) -> None:
    empty = item(1, 0)
    store.put(empty)
    store.add(Flip())
    assert same(store, empty)


def test_without_faults_it_is_the_store_inside(store: Faulty) -> None:
    store.put(ONE)
    assert same(store, ONE)
    assert store.stats() == store.inner.stats()
    assert list(store.scan()) == list(store.inner.scan())
    assert not store.met


@pytest.mark.parametrize(
    "make",
    [
        lambda s: Fail("write"),
        lambda s: Lose("get"),
        lambda s: Flip("put"),
        lambda s: Plan(0, {Fail("put"): 1.1}),
        lambda s: Plan(0, {Fail("put"): float("nan")}),
        lambda s: s.add(Fail("put"), nth=0),
        lambda s: s.add(Fail("put"), times=0),
    ],
    ids=["operation", "lost get", "flipped put", "rate", "nan", "nth", "times"],
)
def test_what_makes_no_sense_is_refused(store: Faulty, make: Callable[[Faulty], object]) -> None:
    with pytest.raises(ValueError):
        make(store)


# Plans ------------------------------------------------------------------------------------------------------

RATES: dict[Fault, float] = {Fail("put", Full): 0.2, Fail("get"): 0.1, Lose(): 0.3, Flip(bit=3): 0.5}


def outcomes(plan: Plan, calls: int = 200) -> list[list[Fault]]:
    return [plan.faults(operation, call) for call in range(1, calls + 1) for operation in ("put", "get")]


def test_a_plan_is_the_same_for_the_same_seed() -> None:
    assert outcomes(Plan(7, RATES)) == outcomes(Plan(7, dict(RATES)))
    assert outcomes(Plan(7, RATES)) != outcomes(Plan(8, RATES))


def test_a_plan_keeps_its_rates() -> None:
    met = Counter(fault for faults in outcomes(Plan(7, RATES), 4000) for fault in faults)
    for fault, rate in RATES.items():
        assert abs(met[fault] / 4000 - rate) < 0.03  # four standard deviations
    assert not any(outcomes(Plan(7, dict.fromkeys(RATES, 0.0))))
    assert all(len(faults) == 2 for faults in outcomes(Plan(7, dict.fromkeys(RATES, 1.0))))


def run_plan(threads: int) -> tuple[Counter[Fault], int]:
    """Puts and gets under a plan; returns what was met, and how many puts raised."""
    store = Faulty(HostStore(1 << 20, block=1024), Plan(3, RATES))
    lock, failed = threading.Lock(), []

    def work(mine: int) -> None:
        for number in range(mine, 120, threads):
            try:
                store.put(item(number))
            except Full as error:
                with lock:
                    failed.append(error)
            with suppress(StoreError):
                store.get(item(number).label.address)

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(work, range(threads)))
    return store.met, len(failed)


def test_threads_meet_what_one_thread_meets() -> None:
    """The n-th call meets the same faults, whoever makes it: a soak that fails can be run again."""
    met, failed = run_plan(1)
    assert (met, failed) == run_plan(4)
    assert failed == met[Fail("put", Full)] > 0


def test_what_a_plan_lets_through_is_right() -> None:
    store = Faulty(
        HostStore(1 << 20, block=1024), Plan(5, {Fail("put", Full): 0.3, Lose(): 0.3, Fail("get"): 0.3})
    )
    for number in range(60):
        try:
            store.put(item(number))
            assert same(store, item(number))
        except (Full, Missing, Unavailable):
            pass
    assert min(store.met.values()) > 5
    store.plan = None
    assert all(same(store, item(e.address.key[0])) for e in store.scan())
