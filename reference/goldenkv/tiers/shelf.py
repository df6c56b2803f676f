"""One tier at work: its store, what leaves it when it is full, and what becomes of that."""

from __future__ import annotations

import enum
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import numpy as np

from ..prefix import Strategy
from .epochs import Epochs
from .errors import Corrupt, Foreign, Full, Missing, OverQuota, StoreError, Unavailable
from .metrics import TierMetrics
from .objects import Address, Head, Item, Kind
from .residents import Residents
from .store import Stats, Store


class Write(enum.Enum):
    """When a tier gets an object."""

    THROUGH = "as soon as it is published"
    BACK = "when it leaves the tier above"
    NEVER = "never: the tier is read only"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tier:
    """A store, and how it is used.

    Attributes:
        store: where the bytes are.
        write: when objects come.
        promote: what is found further down is copied up into this tier.
        strategy: the order in which objects leave; None for least recently used. Not to be shared.
        high, low: shares of the store's capacity. A put that would pass `high` makes room to `low`.
        ttl: seconds that objects stay, or None.
        cool_down: seconds in which a store that did not answer is not asked again.
    """

    store: Store
    write: Write = Write.THROUGH
    promote: bool = True
    strategy: Strategy | None = None
    high: float = 1.0
    low: float = 0.9
    ttl: float | None = None
    cool_down: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.low <= self.high <= 1:
            raise ValueError(f"low={self.low} and high={self.high} must be shares, 0 < low <= high <= 1")
        if self.cool_down < 0 or (self.ttl is not None and self.ttl <= 0):
            raise ValueError(f"cool_down={self.cool_down} and ttl={self.ttl} must be positive seconds")


class Shelf:
    """One tier. Every call may come from several threads at once.

    Args:
        tier: what it is.
        page_size: tokens a page.
        metrics: where it counts.
        lost: told what has left this tier without getting into the one below.
        clock: seconds, from anywhere.
        epochs: of what is deleted while copies are under way.
    """

    below: Shelf | None = None
    """Where objects go that leave this tier; None where they just go."""

    def __init__(
        self,
        tier: Tier,
        page_size: int,
        metrics: TierMetrics,
        lost: Callable[[Address], None],
        clock: Callable[[], float] = time.monotonic,
        epochs: Epochs | None = None,
    ) -> None:
        self.tier, self.store, self.name = tier, tier.store, tier.store.name
        self._page_size, self._metrics, self._lost, self._clock = page_size, metrics, lost, clock
        self._epochs = epochs or Epochs()
        self._residents = Residents(tier.strategy)
        self._lock = threading.Lock()
        self._down_until = -float("inf")
        self._rescan()

    @property
    def up(self) -> bool:
        """Whether it is asked at all: not for a while after it did not answer."""
        return self._clock() >= self._down_until

    def exists(self, addresses: Sequence[Address]) -> list[bool]:
        """Which of these are there, as far as the store says; none while it is down."""
        if not addresses or not self.up:
            return [False] * len(addresses)
        try:
            with self.counted("exists"):
                return self.store.exists(addresses)
        except StoreError:
            return [False] * len(addresses)

    def get_into(self, address: Address, buffer: np.ndarray) -> Head:
        """As `Store.get_into`. What cannot be used is taken out, so that it does not stand in the way."""
        began = self._clock()
        try:
            with self.counted("get"):
                head = self.store.get_into(address, buffer)
        except Missing:
            with self._lock:
                self._residents.remove(address)
            raise
        except (Corrupt, Foreign):
            self.discard(address)
            raise
        with self._lock:
            self._residents.use(address)
        self._metrics.moved(self.name, "get", len(buffer), self._clock() - began)
        return head

    def put(self, item: Item) -> None:
        """As `Store.put`, after making room.

        Raises:
            StoreError: it was not kept.
        """
        if self.tier.write is Write.NEVER and not self.tier.promote:
            return
        with self.counted("put"):
            self._make_room(len(item.payload))
            began = self._clock()
            nbytes = self._put(item)
        label = item.label
        page = (label.position - 1) // self._page_size
        if self.store.capacity is not None:
            with self._lock:
                self._residents.add(label.address, nbytes, page, label.kind is Kind.BOUNDARY)
        self._metrics.moved(self.name, "put", len(item.payload), self._clock() - began)

    def _put(self, item: Item) -> int:
        """As `Store.put`. A store can be full before its capacity: others fill it, and blocks have rests."""
        while True:
            try:
                return self.store.put(item, self.tier.ttl)
            except OverQuota:
                raise  # what others have would leave in vain
            except Full:
                if not self._make_room(len(item.payload), full=True):
                    raise

    def delete(self, addresses: Sequence[Address]) -> None:
        """As `Store.delete`."""
        with self._lock:
            for address in addresses:
                self._residents.remove(address)
        with self.counted("delete"):
            self.store.delete(addresses)

    def discard(self, address: Address) -> None:
        """Deletes it if that can be done; a failure is counted."""
        with suppress(StoreError):
            self.delete([address])

    def delete_all(self, owner: bytes, namespace: bytes | None) -> int:
        """Takes out all of an owner, or of one of its namespaces. Returns how many objects."""
        with self.counted("delete"):
            if namespace is None:
                count = self.store.delete_owner(owner)
            else:
                count = self.store.delete([e.address for e in self.store.scan(owner, namespace)])
        with self._lock:
            self._residents.forget(owner, namespace)
        return count

    def pin(self, address: Address) -> None:
        """It is not chosen to leave until `unpin`."""
        with self._lock:
            self._residents.pin(address)

    def unpin(self, address: Address) -> None:
        """Ends one `pin`."""
        with self._lock:
            self._residents.unpin(address)

    def stats(self) -> Stats:
        """Of the store, also into the metrics."""
        stats = self.store.stats()
        self._metrics.holds(self.name, stats)
        return stats

    # Room ----------------------------------------------------------------------------------------------

    def _make_room(self, needed: int, *, full: bool = False) -> bool:
        """Evicts down to the low watermark if `needed` bytes more would pass the high one, or it is full.

        Returns:
            Whether anything left.

        Raises:
            Full: it is more than there is room for at all. Nothing left.
        """
        capacity = self.store.capacity
        if capacity is None:
            return False  # nothing ever has to leave
        if needed > capacity:
            raise Full(f"{needed} bytes are more than the capacity of {capacity}")
        held = self.store.stats().nbytes
        if not full and held + needed <= self.tier.high * capacity:
            return False
        wanted = held + needed - int(self.tier.low * capacity)
        if full:
            wanted = max(wanted, needed, 1)
        with self._lock:
            chosen = self._residents.victims(wanted)
        if not chosen:
            self._rescan()  # what other processes put
            with self._lock:
                chosen = self._residents.victims(wanted)
        for place, address in enumerate(chosen):
            try:
                self._leave(address)
            except StoreError:
                with self._lock:
                    self._residents.stay(chosen[place:])
                raise
        return bool(chosen)

    def _leave(self, address: Address) -> None:
        """One object leaves: down if the tier below takes what leaves, and only then it goes here."""
        below = self.below if self.below is not None and self.below.up else None
        kept = below is not None and below.exists([address])[0]
        if below is not None and not kept:
            try:
                epoch = self._epochs.of(address)
                item = self.store.get(address)
                item.check()  # it may have been damaged on its way from the store
                below.put(item)
                if self._epochs.late(address, epoch):
                    below.discard(address)
                else:
                    self._metrics.demoted(self.name)
                    kept = True
            except StoreError as error:  # it could not be kept: then it is nowhere, not half there
                if not isinstance(error, Missing):
                    self._metrics.failed(self.name, "demote", error.reason)
        there = self.store.delete([address])
        if not kept:
            self._lost(address)
        with self._lock:
            self._residents.remove(address)
        self._metrics.evicted(self.name, there)  # not if others had taken it out before

    def _rescan(self) -> None:
        """Learns what is there that this process has not put: from before it started, or from others."""
        if self.store.capacity is None:
            return
        try:
            with self.counted("scan"):
                entries = list(self.store.scan())
        except StoreError:
            return
        with self._lock:
            for entry in entries:
                if entry.address not in self._residents:
                    self._residents.add(entry.address, entry.nbytes)

    @contextmanager
    def counted(self, operation: str) -> Iterator[None]:
        """Counts failures, and remembers that the store did not answer."""
        try:
            yield
        except Missing:
            raise
        except StoreError as error:
            self._metrics.failed(self.name, operation, error.reason)
            if isinstance(error, Unavailable):
                self._down_until = self._clock() + self.tier.cool_down
            raise
