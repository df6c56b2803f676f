"""The way up: objects come from the fastest tier that gives them, verified, in time or not at all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from concurrent.futures import TimeoutError as NotYet
from dataclasses import dataclass

import numpy as np

from .epochs import Epochs
from .errors import Foreign, Late, Missing, StoreError, Unavailable
from .metrics import TierMetrics
from .objects import Address, Item, Label
from .shelf import Shelf
from .staging import Staging


@dataclass(frozen=True, slots=True, eq=False)
class Loaded:
    """An object that came up: its bytes are those that were put, and whose they are was checked.

    Attributes:
        item: label and payload. The payload is staging memory: `release` takes it back.
        tier: where it was found.
    """

    item: Item
    tier: str


class Loader:
    """Copies objects up; arguments are those of the mover."""

    def __init__(
        self,
        shelves: Sequence[Shelf],
        workers: Executor,
        metrics: TierMetrics,
        epochs: Epochs,
        clock: Callable[[], float],
        verify: bool,
    ) -> None:
        self._shelves, self._workers, self._metrics = shelves, workers, metrics
        self._epochs, self._clock, self._verify = epochs, clock, verify
        self._staging = Staging()
        self._loading: set[Future] = set()

    def futures(self) -> list[Future]:
        """Copies under way."""
        return list(self._loading)

    def find(self, addresses: Sequence[Address], deadline: float | None = None) -> list[bool]:
        """Which of these some tier has: a promise that `load` may not keep.

        Args:
            addresses: any number; one round trip a tier at most.
            deadline: on the mover's clock; what has not answered by then has nothing.
        """
        found = [False] * len(addresses)
        for shelf in self._shelves:
            unknown = [i for i, there in enumerate(found) if not there]
            if not unknown:
                break
            if not shelf.up:
                continue
            asked = self._workers.submit(shelf.exists, [addresses[i] for i in unknown])
            try:
                answers = asked.result(self._left(deadline))
            except NotYet:
                asked.cancel()
                self._metrics.failed(shelf.name, "exists", Late.reason)
                break
            for i, there in zip(unknown, answers, strict=True):
                found[i] = there
        return found

    def load(self, labels: Sequence[Label], deadline: float | None = None) -> list[Loaded | StoreError]:
        """Brings objects up, each from the fastest tier that has it.

        Args:
            labels: what is wanted; an object with another label is `Foreign`.
            deadline: on the mover's clock. What has not come by then is `Late`.

        Returns:
            For each of them, what was loaded or why it was not.
        """
        futures = [self._start(label) for label in labels]
        found: list[Loaded | StoreError] = []
        for future in futures:
            try:
                found.append(future.result(self._left(deadline)))
            except NotYet:
                future.cancel()
                future.add_done_callback(self._throw_away)
                self._metrics.failed("device", "get", Late.reason)
                found.append(Late("it had not come by its deadline"))
        return found

    def pin(self, addresses: Sequence[Address]) -> None:
        """No tier chooses these to make room, until `unpin`. They need not be there."""
        for shelf in self._shelves:
            for address in addresses:
                shelf.pin(address)

    def unpin(self, addresses: Sequence[Address]) -> None:
        """Ends one `pin`."""
        for shelf in self._shelves:
            for address in addresses:
                shelf.unpin(address)

    def prefetch(self, labels: Sequence[Label]) -> None:
        """Copies objects up into the tiers that what is found is promoted to, in the background.

        A later `load` finds them there. Nobody waits for it, and nothing is counted as used.
        """
        self._track(self._workers.submit(self._prefetch, labels))

    def _prefetch(self, labels: Sequence[Label]) -> None:
        """In a worker: starts loading what the first tier lacks and another has."""
        missing = labels
        for place, shelf in enumerate(self._shelves):
            there = shelf.exists([label.address for label in missing])
            for label, has in zip(missing, there, strict=True):
                if has and place:
                    self._start(label).add_done_callback(self._throw_away)
            missing = [label for label, has in zip(missing, there, strict=True) if not has]

    def release(self, loaded: Sequence[Loaded]) -> None:
        """Takes the memory of payloads back, once their bytes have been copied out."""
        for each in loaded:
            self._staging.give(each.item.payload)

    def _start(self, label: Label) -> Future[Loaded | StoreError]:
        """Starts loading. The object is pinned on every tier from now until it has come or failed."""
        self.pin([label.address])
        future = self._workers.submit(self._load, label)
        future.add_done_callback(lambda _: self.unpin([label.address]))
        self._track(future)
        return future

    def _track(self, future: Future) -> None:
        self._loading.add(future)
        future.add_done_callback(self._loading.discard)

    def _load(self, label: Label) -> Loaded | StoreError:
        """In a worker: from the fastest tier that gives it, then up into the tiers above."""
        failure: StoreError = Missing("no tier has it")
        epoch = self._epochs.of(label.address)
        for place, shelf in enumerate(self._shelves):
            if not shelf.up:
                if isinstance(failure, Missing):
                    failure = Unavailable(f"{shelf.name} does not answer")
                continue
            buffer = self._staging.take(label.nbytes)
            try:
                item = self._got(shelf, label, buffer)
            except StoreError as error:
                self._staging.give(buffer)
                if not isinstance(error, Missing):
                    failure = error
                continue
            loaded = Loaded(item, shelf.name)
            above = [s for s in self._shelves[:place] if s.tier.promote and s.up]
            if above:  # nobody waits for that
                self._staging.share(buffer)
                self._track(self._workers.submit(self._promote, loaded, above, epoch))
            return loaded
        return failure

    def _got(self, shelf: Shelf, label: Label, buffer: np.ndarray) -> Item:
        """Reads an object from a tier, and believes nothing that the store says of it."""
        head = shelf.get_into(label.address, buffer)
        item = Item(label, buffer, head.xxh3)
        with shelf.counted("get"):
            if head.label != label:
                shelf.discard(label.address)
                raise Foreign("the object has another label than the one that was asked for")
            if self._verify:
                item.check()  # it may have been damaged on its way from the store
        return item

    def _promote(self, loaded: Loaded, shelves: Sequence[Shelf], epoch: tuple[int, int]) -> None:
        """In a worker: keeps what was found further down in these tiers as well."""
        for shelf in shelves:
            try:
                shelf.put(loaded.item)
                self._metrics.promoted(shelf.name)
            except StoreError:
                continue
        self.release([loaded])
        if self._epochs.late(loaded.item.label.address, epoch):
            for shelf in self._shelves:
                shelf.discard(loaded.item.label.address)

    def _throw_away(self, future: Future[Loaded | StoreError]) -> None:
        """What came too late, or was only wanted further up: its memory can be used again."""
        if not future.cancelled() and isinstance(found := future.result(), Loaded):
            self._staging.give(found.item.payload)

    def _left(self, deadline: float | None) -> float | None:
        return None if deadline is None else max(0.0, deadline - self._clock())
