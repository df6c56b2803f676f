"""The mover: it copies objects between the device and the tiers, and from tier to tier.

Copies run in workers, which touch nothing but their own memory and stores. All that is decided is decided in
the caller's thread. What comes up has been verified and carries exactly the label that was asked for; what is
missing, late, damaged or not our own comes back as an error, and the caller recomputes.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait

from .epochs import Epochs
from .errors import StoreError, Unavailable
from .loader import Loader
from .metrics import TierMetrics
from .objects import Address
from .saver import Saver
from .shelf import Shelf, Tier, Write
from .store import Stats


class Mover:
    """Moves objects between the device and tiers. All calls come from one thread.

    Args:
        tiers: the fastest first.
        page_size: tokens a page.
        metrics: where everything is counted; a new one by default.
        workers: runs copies; four threads by default. A test passes one that it steps.
        in_flight: bytes on their way down, at most. What comes then waits, see `patience`, or is dropped.
        patience: seconds that `down.save` waits for room among those bytes.
        clock: seconds, for deadlines.
        verify: compare checksums of what comes up, whatever the store has verified. False is for controls.

    Attributes:
        down, up: the two ways.

    Raises:
        ValueError: no tiers, or two of one name.
    """

    def __init__(
        self,
        tiers: Sequence[Tier],
        page_size: int,
        *,
        metrics: TierMetrics | None = None,
        workers: Executor | None = None,
        in_flight: int = 256 << 20,
        patience: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
        verify: bool = True,
    ) -> None:
        names = [tier.store.name for tier in tiers]
        if not tiers or len(set(names)) != len(names):
            raise ValueError(f"tiers must be at least one, whose stores have different names, got {names}")
        self.metrics = metrics or TierMetrics()
        self.page_size = page_size
        self._clock = clock
        self._lost: deque[Address] = deque()
        self._epochs = Epochs()
        self._shelves = [
            Shelf(tier, page_size, self.metrics, self._lost.append, clock, self._epochs) for tier in tiers
        ]
        for upper, lower in zip(self._shelves, self._shelves[1:], strict=False):
            upper.below = lower if lower.tier.write is Write.BACK else None
        self._own = ThreadPoolExecutor(4, thread_name_prefix="goldenkv-mover") if workers is None else None
        executor = workers or self._own
        assert executor is not None
        self.down = Saver(self._shelves, executor, self.metrics, self._epochs, clock, in_flight, patience)
        self.up = Loader(self._shelves, executor, self.metrics, self._epochs, clock, verify)

    @property
    def names(self) -> list[str]:
        """Of the tiers, the fastest first."""
        return [shelf.name for shelf in self._shelves]

    def now(self) -> float:
        """The time by which deadlines go."""
        return self._clock()

    def poll(self) -> list[Address]:
        """Tells those who saved what has become of it. Returns what has left a tier since the last call."""
        self.down.poll()
        return [self._lost.popleft() for _ in range(len(self._lost))]

    def forget(self, owner: bytes, namespace: bytes | None = None, timeout: float = 10.0) -> int:
        """Deletes all of an owner, or of one of its namespaces, on every tier. Late writes do not undo it.

        But one can: a put that a server was asked for and did not answer in time, and carries out afterwards.
        A time to live bounds that.

        Returns:
            How many objects there were.

        Raises:
            Unavailable: a tier could not do it, or copies were under way after `timeout` seconds: call again.
        """
        scope = owner if namespace is None else namespace
        self._epochs.advance(scope)
        count, failed = 0, []
        # All copies, whosever they are, and those that they begin: they can bring something of it up or down.
        if not self.drain(timeout):
            failed.append("copies under way")
        for shelf in self._shelves:
            try:
                count += shelf.delete_all(owner, namespace)
            except StoreError as error:
                failed.append(f"{shelf.name}: {error.reason}")
        self._epochs.advance(scope)
        self.down.poll()  # what had been saved is told before anything is saved anew
        if failed:
            raise Unavailable(f"not everything is known to be deleted ({', '.join(failed)})")
        return count

    def drain(self, timeout: float | None = None) -> bool:
        """Waits until nothing is on its way. Returns whether that was so within `timeout` seconds."""
        deadline = None if timeout is None else self._clock() + timeout
        while futures := [*self.down.futures(), *self.up.futures()]:
            if not _ended(futures, None if deadline is None else max(0.0, deadline - self._clock())):
                return False
            self.down.poll()
        return True

    def close(self) -> None:
        """Waits for what is on its way, then ends the workers and closes the stores."""
        self.drain()
        if self._own is not None:
            self._own.shutdown()
        for shelf in self._shelves:
            shelf.store.close()

    def stats(self) -> dict[str, Stats]:
        """What every tier holds that answers."""
        found = {}
        for shelf in self._shelves:
            try:
                found[shelf.name] = shelf.stats()
            except StoreError:
                continue
        return found


def _ended(futures: Sequence[Future], timeout: float | None) -> bool:
    """Whether all of these ended in time."""
    return not wait(futures, timeout).not_done
