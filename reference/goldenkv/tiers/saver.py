"""The way down: objects go to the tiers, in the background, as the tiers' `Write` says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, wait
from dataclasses import dataclass

from .epochs import Epochs
from .errors import StoreError
from .metrics import TierMetrics
from .objects import Address, Item, Label
from .shelf import Shelf, Write


@dataclass(frozen=True, slots=True, eq=False)
class Source:
    """An object that is still on the device.

    Attributes:
        label: of the object.
        fetch: called in a worker: waits for the computation that makes the bytes, and returns the object.
    """

    label: Label
    fetch: Callable[[], Item]


class Saver:
    """Copies objects down.

    Args:
        shelves, workers, metrics, epochs, clock: of the mover.
        in_flight: bytes on their way, at most.
        patience: seconds that `save` waits for room among them.
    """

    def __init__(
        self,
        shelves: Sequence[Shelf],
        workers: Executor,
        metrics: TierMetrics,
        epochs: Epochs,
        clock: Callable[[], float],
        in_flight: int,
        patience: float,
    ) -> None:
        self._shelves, self._workers, self._metrics = shelves, workers, metrics
        self._epochs, self._clock = epochs, clock
        self._in_flight, self._patience = in_flight, patience
        self._saving: dict[Address, tuple[Future[bool], int, Callable[[bool], None]]] = {}

    @property
    def on_their_way(self) -> int:
        """Bytes."""
        return sum(size for _, size, _ in self._saving.values())

    def futures(self) -> list[Future]:
        """Copies under way."""
        return [future for future, _, _ in self._saving.values()]

    @property
    def writes_through(self) -> bool:
        """Whether any tier gets what does not leave the device."""
        return any(shelf.tier.write is Write.THROUGH for shelf in self._shelves)

    def save(
        self, source: Source, done: Callable[[bool], None], *, leaving: bool = False, must: bool = False
    ) -> bool:
        """Copies an object down, in the background: to every tier that is written through.

        Args:
            source: the object.
            done: called by `poll`, with whether any tier has it now.
            leaving: it leaves the device: if no tier has it, the first one that takes what leaves gets it.
            must: waits for room as long as it takes.

        Returns:
            False if nothing was started: no tier wants it, it is on its way already, or too much is. `done`
            is not called then.
        """
        address = source.label.address
        if address in self._saving or not (leaving or self.writes_through):
            return False
        nbytes = source.label.nbytes
        if not self._wait_for_room(nbytes, None if must else self._patience):
            self._metrics.dropped(self._shelves[0].name)
            return False
        epoch = self._epochs.of(address)
        future = self._workers.submit(self._save, source, leaving, epoch)
        self._saving[address] = (future, nbytes, done)
        self._metrics.in_flight("device", len(self._saving))
        return True

    def _save(self, source: Source, leaving: bool, epoch: tuple[int, int]) -> bool:
        """In a worker. Completed is not succeeded: the result says whether a tier has it."""
        address, kept = source.label.address, False
        if leaving and any(shelf.exists([address])[0] for shelf in self._shelves):
            return True
        up = [shelf for shelf in self._shelves if shelf.up]
        wanted = [shelf for shelf in up if shelf.tier.write is Write.THROUGH]
        if leaving and not wanted:
            wanted = [shelf for shelf in up if shelf.tier.write is Write.BACK][:1]
        if not wanted:
            return False
        try:
            item = source.fetch()
        except StoreError as error:
            self._metrics.failed("device", "get", error.reason)
            return False
        for shelf in wanted:
            try:
                shelf.put(item)
                kept = True
            except StoreError:
                continue  # the shelf has counted it
        if self._epochs.late(address, epoch):  # its namespace was deleted meanwhile: a late write
            for shelf in self._shelves:  # others can have pushed it down already
                shelf.discard(address)
            return False
        return kept

    def _wait_for_room(self, nbytes: int, patience: float | None) -> bool:
        """Whether so many bytes more may be on their way down, after waiting for it."""
        until = None if patience is None else self._clock() + patience
        while True:
            self.poll()
            if not self._saving or self.on_their_way + nbytes <= self._in_flight:
                return True
            left = None if until is None else until - self._clock()
            if left is not None and left <= 0:
                return False
            wait(self.futures(), left, return_when=FIRST_COMPLETED)

    def poll(self) -> None:
        """Tells those who saved what has become of it."""
        for address, (future, _, done) in list(self._saving.items()):
            if future.done():
                del self._saving[address]
                self._metrics.in_flight("device", len(self._saving))
                done(not future.cancelled() and future.result())
