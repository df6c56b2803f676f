"""Paths through the tiers: state leaves the device, comes back from a store, and has the cold run's bits.

Two kinds of lines. The first restore from a tier, two of them from delta frames, the last from what a process
left on disk that was killed (kill -9) while it was writing. The second kill a store in the middle of a load:
the request must then compute what it did not get, say why, and give the same bits.
"""

from __future__ import annotations

import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from ..delta import DeltaCodec
from ..engine import Request, TieredCache, replay_length
from ..errors import MissingExtra
from ..state import compare
from ..tiers.coded import Coded
from ..tiers.disk import DiskStore
from ..tiers.errors import StoreError
from ..tiers.faults import Faulty
from ..tiers.host import HostStore
from ..tiers.mover import Mover
from ..tiers.objects import Address, Head, Item
from ..tiers.redis import RedisStore
from ..tiers.server import RedisServer
from ..tiers.shelf import Tier
from ..tiers.store import Store, Wrapper
from .cold import ColdRun
from .process import PATIENCE, namespace_of, reload_elsewhere, store_and_die
from .report import Result

Kill = Callable[[], None]
"""Ends a store while it is being read."""


def lines(gate: ColdRun) -> dict[str, Callable[[ColdRun], Result]]:
    """The lines, for a prompt of which at least a page is stored.

    Those of a store whose package or server is missing say so instead of running.
    """
    if _stored_tokens(gate) < gate.engine.geometry.page_size:
        return {}
    found: dict[str, Callable[[ColdRun], Result]] = {"tier: device": _device}
    for name, stores in STORES.items():
        found[f"tier: {name}"] = partial(_through, name, stores)
    for name in ("host", "disk"):
        found[f"delta codec: {name}"] = partial(_coded, name)
    found["disk, after kill -9"] = _after_kill
    for name, stores in STORES.items():
        found[f"{name} killed mid-load"] = partial(_killed, name, stores)
    return found


@contextmanager
def _host() -> Iterator[tuple[Store, Kill]]:
    """Host memory cannot die alone: it is told to answer no more."""
    store = Faulty(HostStore(256 << 20))
    yield store, store.down


@contextmanager
def _disk() -> Iterator[tuple[Store, Kill]]:
    """The folder vanishes, as that of a disk which is taken out."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        yield DiskStore(Path(folder, "tier")), lambda: shutil.rmtree(Path(folder, "tier"))


@contextmanager
def _redis() -> Iterator[tuple[Store, Kill]]:
    """A real server, and kill -9."""
    with RedisServer() as server:
        yield RedisStore(server.client()), server.kill


STORES = {"host": _host, "disk": _disk, "redis": _redis}


def _stored_tokens(gate: ColdRun) -> int:
    """How many tokens of the prompt a tier gets."""
    return len(gate.tokens) * 9 // 10


@contextmanager
def _stored(gate: ColdRun, store: Store, *, clear: bool = True) -> Iterator[TieredCache]:
    """A cache whose tier has the first nine tenths of the prompt; if `clear`, its device has nothing."""
    mover = Mover([Tier(store=store)], gate.engine.geometry.page_size)
    cache = TieredCache(gate.engine, mover, deadline=lambda tokens: PATIENCE)
    try:
        before = cache.begin(namespace_of(gate.engine), gate.tokens[: _stored_tokens(gate)])
        cache.run(before)
        cache.finish(before)
        mover.drain()
        if clear:
            _clear(gate, cache)
        gate.soil()
        yield cache
    finally:
        _clear(gate, cache)
        with suppress(StoreError):  # a store that was killed cannot be closed
            mover.close()


def _clear(gate: ColdRun, cache: TieredCache) -> None:
    """The device forgets, the tiers do not."""
    cache.evict(pages=gate.engine.geometry.pages, boundaries=gate.engine.geometry.boundaries)


def _served(gate: ColdRun, cache: TieredCache, name: str) -> tuple[Result, Request]:
    """The whole prompt, from whatever the cache finds."""
    began = time.perf_counter()
    request = cache.begin(namespace_of(gate.engine), gate.tokens)
    cache.run(request)
    seconds = gate.ready(began)
    reused = 0 if request.plan is None else request.plan.start
    moved = cache.mover.metrics.to_json()["moved_bytes"].get(cache.mover.names[0], {}).get("get", 0)
    found = gate.finish(request.seq, partial(cache.decode, request), close=False)
    cache.cancel(request)
    return gate.result(name, found, seconds, reused=reused, nbytes=moved), request


def _device(gate: ColdRun) -> Result:
    """The pages have not left: a lower tier is there, and is not read."""
    with _host() as (store, _), _stored(gate, store, clear=False) as cache:
        return _served(gate, cache, "tier: device")[0]


def _through(name: str, stores: Callable, gate: ColdRun) -> Result:
    """Up from one tier."""
    try:
        with stores() as (store, _), _stored(gate, store) as cache:
            return _served(gate, cache, f"tier: {name}")[0]
    except MissingExtra as error:
        return Result.skip(f"tier: {name}", str(error))


def _coded(name: str, gate: ColdRun) -> Result:
    """Up from one tier that keeps delta frames. The bytes are theirs, as the store gave them."""
    line = f"delta codec: {name}"
    try:
        codec = DeltaCodec()
    except MissingExtra as error:
        return Result.skip(line, str(error))
    with STORES[name]() as (store, _):
        counted = _Counted(store)
        with _stored(gate, Coded(counted, codec)) as cache:
            result, _ = _served(gate, cache, line)
    return replace(result, nbytes=counted.nbytes)


def _after_kill(gate: ColdRun) -> Result:
    """A process stores the prompt and kills itself in the middle of that; a new one goes on from there."""
    with tempfile.TemporaryDirectory() as folder:
        store_and_die(gate.source, gate.tokens, folder)
        began = time.perf_counter()
        rows, reused, nbytes = reload_elsewhere(gate.source, gate.tokens, folder, gate.decoded)
        seconds = time.perf_counter() - began
    difference = compare(gate.expected, gate.everything(*rows))
    return Result("disk, after kill -9", False, reused, nbytes, difference, seconds)


def _killed(name: str, stores: Callable, gate: ColdRun) -> Result:
    """The store dies when it has given too few pages for a hit, even by a replay; at most a third."""
    line = f"{name} killed mid-load"
    try:
        with stores() as (store, kill):
            size = gate.engine.geometry.page_size
            pages = len(gate.tokens) // size
            useless = min(pages // 3, replay_length(gate.config, pages * size) // size)
            with _stored(gate, _Dying(store, kill, max(1, useless))) as cache:
                result, request = _served(gate, cache, line)
                reasons = cache.mover.metrics.to_json()["fallbacks"]
    except MissingExtra as error:
        return Result.skip(line, str(error))
    cold = request.plan is None and reasons
    note = ", ".join(reasons) if cold else "the kill did not show"
    return replace(result, note=note, difference=result.difference if cold else None, nbytes=0)


class _Dying(Wrapper):
    """A store that is killed as soon as the reading of one object more than so many begins."""

    def __init__(self, inner: Store, kill: Kill, reads: int) -> None:
        super().__init__(inner)
        self._kill, self._left, self._lock = kill, reads, threading.Lock()

    def get_into(self, address: Address, buffer: np.ndarray) -> Head:
        with self._lock:
            if self._left == 0:
                self._kill()
            self._left -= 1
        return super().get_into(address, buffer)


class _Counted(Wrapper):
    """Counts the bytes of the payloads that it gives."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.nbytes, self._lock = 0, threading.Lock()

    def get(self, address: Address) -> Item:
        item = super().get(address)
        with self._lock:
            self.nbytes += len(item.payload)
        return item
