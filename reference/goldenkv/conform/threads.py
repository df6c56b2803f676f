"""Several threads at once: what is read is one version whole, what is listed can be read, nothing is lost."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from ..tiers.errors import Missing, StoreError
from ..tiers.store import Store
from .hooks import Hooks, make_item
from .objects import check_same

NBYTES = 100_000


def together(writers: list[Callable[[], None]], readers: list[Callable[[], None]]) -> None:
    """Runs writers once, and readers again and again until the last writer has ended."""
    start, done = threading.Barrier(len(writers) + len(readers)), threading.Event()

    def write(writer: Callable[[], None]) -> None:
        start.wait()
        writer()

    def read(reader: Callable[[], None]) -> None:
        start.wait()
        last = False
        while not last:
            last = done.is_set()  # so it reads once more after the last write
            reader()

    with ThreadPoolExecutor(len(writers) + len(readers)) as pool:
        reading = [pool.submit(read, reader) for reader in readers]
        writing = [pool.submit(write, writer) for writer in writers]
        try:
            for future in writing:
                future.result()
        finally:
            done.set()
        for future in reading:
            future.result()


class Threads(Hooks):
    """Every call may come from several threads."""

    def test_what_is_read_is_one_version(self, store: Store) -> None:
        """Finds objects that are overwritten in place, and heads that do not belong to the payload read."""
        address = self.address()
        versions = [make_item(address, NBYTES, seed) for seed in range(4)]
        known = {version.payload.tobytes() for version in versions}
        not_now = Missing if self.supports_reads_while_replaced else StoreError
        store.put(versions[0])

        def writer(mine: int) -> Callable[[], None]:
            def write() -> None:
                for _ in range(8):
                    store.put(versions[mine])
                    store.put(versions[mine + 1])

            return write

        def get() -> None:
            try:
                found = store.get(address)
            except not_now:
                return
            assert found.payload.tobytes() in known, "a mix of versions"

        def get_into() -> None:
            buffer = np.zeros(NBYTES, np.uint8)
            try:
                store.get_into(address, buffer)
            except not_now:
                return
            assert buffer.tobytes() in known, "a mix of versions"

        together([writer(0), writer(2)], [get, get_into])
        assert store.get(address).payload.tobytes() in known
        assert store.stats(address.owner).objects == 1

    def test_what_is_listed_can_be_read(self, store: Store) -> None:
        """Finds objects that are announced before they are whole: a look-up that get breaks. Mooncake#2827"""
        owner = self.owner()
        items = [make_item(self.address(owner), NBYTES, seed) for seed in range(12)]
        by_address = {item.label.address: item for item in items}

        def write() -> None:
            for item in items:
                store.put(item)

        def listed_by_exists() -> None:
            for address, there in zip(by_address, store.exists(list(by_address)), strict=True):
                if there:
                    check_same(store, by_address[address])

        def listed_by_scan() -> None:
            for entry in list(store.scan(owner)):
                check_same(store, by_address[entry.address])

        together([write], [listed_by_exists, listed_by_scan])
        assert store.exists(list(by_address)) == [True] * len(items)

    def test_nothing_is_lost_among_writers(self, store: Store) -> None:
        """Finds an index or a count that one thread reads and another one has changed since."""
        owner = self.owner()
        items = [make_item(self.address(owner), 1000, seed) for seed in range(32)]
        taken: list[int] = []

        def writer(mine: int) -> Callable[[], None]:
            def write() -> None:
                for item in items[mine::4]:
                    taken.append(store.put(item))

            return write

        together([writer(mine) for mine in range(4)], [])
        stats = store.stats(owner)
        assert (stats.objects, stats.nbytes) == (len(items), sum(taken))
        for item in items:
            check_same(store, item)
        deleted: list[int] = []

        def delete() -> None:
            for item in items[:16]:
                deleted.append(store.delete([item.label.address]))

        together([delete, delete, delete], [])
        if self.supports_counted_deletions:
            assert sum(deleted) == 16, "one object was deleted twice, or not at all"
        stats = store.stats(owner)
        assert (stats.objects, stats.nbytes) == (16, sum(taken) * 16 // len(items))
