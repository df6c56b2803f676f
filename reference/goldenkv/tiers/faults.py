"""Faults on purpose: a store that fails as it is told, for tests, soaks and drills in a notebook.

    broken = Faulty(HostStore(1 << 20))
    broken.add(Fail("put", Full))              # the next put
    broken.add(Delay("get", 0.5), times=None)  # every get from now on
    pause = broken.add(Pause("get"))           # the next get stops ...
    pause.reached.wait(); broken.down()        # ... the store dies meanwhile ...
    pause.release.set()                        # ... and the get raises Unavailable

A store verifies what it reads before anybody sees it. So `Flip` is damage on the way from the store to who
asked: it shows what the next layer catches (the seal of a tenant, whoever calls `Item.check`). To damage what
is stored, change the raw bytes: see `goldenkv.conform.Hooks.write_raw`.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

from .errors import StoreError, Unavailable
from .objects import Address, Head, Item
from .store import Entry, Stats, Store, Wrapper

F = TypeVar("F", bound="Fault")

OPERATIONS = ("put", "get", "exists", "delete", "scan", "stats")
"""`get` is `get_into` too, and `delete` is `delete_owner` too."""


@dataclass(frozen=True, slots=True)
class Fault:
    """What happens to a call of one of the `OPERATIONS`."""

    operation: str

    def __post_init__(self) -> None:
        if self.operation not in OPERATIONS:
            raise ValueError(f"operation={self.operation!r} must be one of {OPERATIONS}")


@dataclass(frozen=True, slots=True)
class Fail(Fault):
    """It raises, and nothing is done."""

    error: type[StoreError] = Unavailable


@dataclass(frozen=True, slots=True)
class Delay(Fault):
    """It takes so many seconds longer, before anything is done."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Pause(Fault):
    """It stops until `release` is set: before anything is done, or, `after` it, before the caller knows.

    Attributes:
        reached: set as soon as a call has stopped here.
        release: set it to let it go on.
    """

    after: bool = False
    reached: threading.Event = field(default_factory=threading.Event)
    release: threading.Event = field(default_factory=threading.Event)


@dataclass(frozen=True, slots=True)
class Lose(Fault):
    """A put that is answered as if it were kept, and is missing later: some engines evict without a word."""

    operation: str = "put"

    def __post_init__(self) -> None:
        if self.operation != "put":
            raise ValueError("only a put can be lost")


@dataclass(frozen=True, slots=True)
class Flip(Fault):
    """A bit of the payload is another one when it arrives; an empty payload has none. The checksum stays.

    Attributes:
        bit: its number, modulo the bits of the payload; negative ones count from the end.
    """

    operation: str = "get"
    bit: int = 0

    def __post_init__(self) -> None:
        if self.operation != "get":
            raise ValueError("only what is got can be damaged on its way")


@dataclass(frozen=True, slots=True)
class Plan:
    """Faults by chance: the n-th call of an operation meets the same faults in every run.

    Which thread makes that call does not matter.

    Attributes:
        seed: another one gives other calls.
        rates: for each fault, the share of the calls of its operation that meet it.
    """

    seed: int
    rates: Mapping[Fault, float]

    def __post_init__(self) -> None:
        for fault, rate in self.rates.items():
            if not 0 <= rate <= 1:
                raise ValueError(f"the rate of {fault} must be a share, got {rate}")

    def faults(self, operation: str, call: int) -> list[Fault]:
        """What happens to a call, which is counted from 1."""
        return [
            fault
            for number, (fault, rate) in enumerate(self.rates.items())
            if fault.operation == operation and random.Random(f"{self.seed}/{number}/{call}").random() < rate
        ]


class Faulty(Wrapper):
    """A store with faults. Without any it does what the store inside does.

    Args:
        inner: the store.
        plan: faults by chance. The attribute can be changed at any time.
        sleep: how to wait for a `Delay`.

    Attributes:
        calls: how many there were of each operation.
        met: how many calls have met each fault.
    """

    def __init__(
        self, inner: Store, plan: Plan | None = None, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        super().__init__(inner)
        self.plan, self._sleep = plan, sleep
        self.calls: Counter[str] = Counter()
        self.met: Counter[Fault] = Counter()
        self._added: list[tuple[Fault, int, float]] = []  # with its first call, and that at which it is over
        self._down = threading.Event()
        self._lock = threading.Lock()

    def add(self, fault: F, nth: int = 1, times: int | None = 1) -> F:
        """Adds a fault for the `nth` call of its operation from now on, and for `times` calls (None: all).

        Returns:
            The fault, for the events of a `Pause`.
        """
        if nth < 1 or (times is not None and times < 1):
            raise ValueError(f"{nth=} and {times=} must be 1 or more")
        with self._lock:
            first = self.calls[fault.operation] + nth
            self._added.append((fault, first, float("inf") if times is None else first + times))
        return fault

    def clear(self) -> None:
        """Takes back what was added, and lets go what is paused. The plan stays."""
        with self._lock:
            added, self._added = self._added, []
        for fault, _, _ in added:
            if isinstance(fault, Pause):
                fault.release.set()

    def down(self) -> None:
        """From now on every operation raises Unavailable, also one that is paused, or lists objects now."""
        self._down.set()

    def up(self) -> None:
        """The store is back, with what it had."""
        self._down.clear()

    def put(self, item: Item, ttl: float | None = None) -> int:
        with self._call("put") as faults:
            nbytes = self.inner.put(item, ttl)
            if any(isinstance(fault, Lose) for fault in faults):
                self.inner.delete([item.label.address])
            return nbytes

    def get_into(self, address: Address, buffer: np.ndarray) -> Head:
        with self._call("get") as faults:
            head = self.inner.get_into(address, buffer)
            _flip(buffer, faults)
            return head

    def get(self, address: Address) -> Item:
        with self._call("get") as faults:
            item = self.inner.get(address)
            payload = item.payload.copy()
            _flip(payload, faults)
            return Item(item.label, payload, item.xxh3)

    def exists(self, addresses: Sequence[Address]) -> list[bool]:
        with self._call("exists"):
            return self.inner.exists(addresses)

    def delete(self, addresses: Sequence[Address]) -> int:
        with self._call("delete"):
            return self.inner.delete(addresses)

    def scan(self, owner: bytes | None = None, namespace: bytes | None = None) -> Iterator[Entry]:
        with self._call("scan"):
            entries = self.inner.scan(owner, namespace)
        return self._while_up(entries)

    def stats(self, owner: bytes | None = None) -> Stats:
        with self._call("stats"):
            return self.inner.stats(owner)

    def delete_owner(self, owner: bytes) -> int:
        with self._call("delete"):
            return self.inner.delete_owner(owner)

    def _while_up(self, entries: Iterator[Entry]) -> Iterator[Entry]:
        for entry in entries:
            self._check_up()
            yield entry

    @contextmanager
    def _call(self, operation: str) -> Iterator[list[Fault]]:
        """One call: what it meets before and after what it does."""
        faults = self._due(operation)
        for fault in faults:
            if isinstance(fault, Delay):
                self._sleep(fault.seconds)
            elif isinstance(fault, Pause) and not fault.after:
                self._stop(fault)
        self._check_up()
        for fault in faults:
            if isinstance(fault, Fail):
                raise fault.error(f"{operation} fails, as it was told to")
        yield faults
        for fault in faults:
            if isinstance(fault, Pause) and fault.after:
                self._stop(fault)
                self._check_up()

    def _due(self, operation: str) -> list[Fault]:
        with self._lock:
            self.calls[operation] += 1
            call = self.calls[operation]
            due = [f for f, first, over in self._added if f.operation == operation and first <= call < over]
            if self.plan is not None:
                due += self.plan.faults(operation, call)
            self.met.update(due)
        return due

    def _stop(self, pause: Pause) -> None:
        pause.reached.set()
        pause.release.wait()

    def _check_up(self) -> None:
        if self._down.is_set():
            raise Unavailable("the store is down, as it was told to be")


def _flip(payload: np.ndarray, faults: list[Fault]) -> None:
    for fault in faults:
        if isinstance(fault, Flip) and len(payload):
            byte, bit = divmod(fault.bit % (8 * len(payload)), 8)
            payload[byte] ^= 1 << bit
