"""Objects in Mooncake Store: a cluster whose machines lend memory, led by a master.

An object is one value, head and payload, under the name `prefix/owner/namespace/key` (hexadecimal). The
engine knows no time to live of ours: what has expired is refused when it is read. It evicts without a word
when it is full, and its calls can take many seconds when a machine is gone, so each has a deadline here. It
listens on all interfaces of a machine, whatever address it is given, and encrypts nothing: it needs a network
of its own.
"""

from __future__ import annotations

import socket
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, TimeoutError
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from ..errors import MissingExtra
from .errors import Full, Missing, Unavailable
from .objects import Address
from .store import Entry, VerifiedStore
from .whole import unpack

WORKERS = 16
"""Calls at the same time. One that hangs keeps its worker until it ends."""

_NO_SPACE, _NOT_FOUND = -200, -704


def connect(
    *,
    host: str,
    metadata: str,
    master: str,
    segment: int = 0,
    buffer: int = 64 << 20,
    timeout: float = 1.0,
) -> Any:  # MooncakeDistributedStore
    """An engine that speaks TCP with its cluster.

    Args:
        host: address of this machine, as the others reach it.
        metadata: "http://host:port/metadata", of the master's metadata server.
        master: "host:port".
        segment: bytes of memory that this process lends to the cluster. They go when it ends.
        buffer: bytes for transfers: all objects that are read at the same time must fit.
        timeout: seconds within which the two must take a connection.

    Raises:
        MissingExtra: the package, or a library that it needs, is not installed.
        Unavailable: the cluster does not take us.
    """
    try:
        from mooncake.store import MooncakeDistributedStore
    except ImportError:
        needed = "Mooncake Store (with libibverbs1 and librdmacm1 of the system)"
        raise MissingExtra("mooncake", needed) from None
    for place in (urlsplit(metadata).netloc, master):  # the engine would try for a minute and a half
        name, _, port = place.rpartition(":")
        try:
            socket.create_connection((name, int(port)), timeout).close()
        except OSError:
            raise Unavailable("the cluster's master or metadata server does not answer") from None
    engine = MooncakeDistributedStore()
    code = engine.setup(host, metadata, segment, buffer, "tcp", "", master)
    if code:
        raise Unavailable(f"the cluster cannot be joined (code {code})")
    return engine


class MooncakeStore(VerifiedStore):
    """A store over an engine that has joined a cluster, see `connect`. `close` closes it.

    A `put` that was not done in time may still happen, as a whole.

    Args:
        engine: a `MooncakeDistributedStore`.
        admin: "http://host:port" of the master's metrics: only there it tells what it has.
        prefix: of all names; stores with different ones do not see each other.
        timeout: seconds for one call.
        clock, verify: see `VerifiedStore`.
    """

    name = "mooncake"
    persistent = True

    def __init__(
        self,
        engine: Any,
        admin: str,
        prefix: str = "gkv1",
        timeout: float = 1.0,
        clock: Callable[[], float] = time.time,
        verify: bool = True,
    ) -> None:
        super().__init__(clock, verify)
        self._engine, self._admin, self._timeout = engine, admin, timeout
        self._prefix = prefix + "/"
        self._pool = ThreadPoolExecutor(WORKERS, "mooncake")

    def _name(self, address: Address) -> str:
        return self._prefix + address.path()

    def _call(self, function: Callable[..., Any], *arguments: object) -> Any:
        """In time, or Unavailable. It may go on then, so nothing of the caller's memory may be in it."""
        future = self._pool.submit(function, *arguments)
        try:
            return future.result(self._timeout)
        except TimeoutError:
            future.cancel()
            raise Unavailable("the cluster does not answer in time") from None

    def _write(self, address: Address, head: bytes, payload: np.ndarray, expires: float | None) -> None:
        value = b"".join((head, payload.data))
        code = self._call(self._engine.upsert, self._name(address), value)
        if code == _NO_SPACE:
            raise Full("the cluster has no room")
        _check(code)

    def _read(self, address: Address, allot: Callable[[bytes], np.ndarray]) -> None:
        value = self._call(self._engine.get_buffer, self._name(address))
        if value is None:  # not there, or no answer: the engine says the same
            if self.exists([address])[0]:
                raise Unavailable("the cluster does not give what it has")
            raise Missing("nothing is there")
        unpack(memoryview(value), allot)

    def exists(self, addresses: Sequence[Address]) -> list[bool]:
        names = [self._name(address) for address in addresses]
        codes = self._call(self._engine.batch_is_exist, names) if names else []
        for code in codes:
            _check(min(code, 0))
        return [code == 1 for code in codes]

    def delete(self, addresses: Sequence[Address]) -> int:
        names = list(dict.fromkeys(map(self._name, addresses)))
        # Forced: it would otherwise keep for a while what was read lately.
        codes = self._call(self._engine.batch_remove, names, True) if names else []
        for code in codes:
            _check(0 if code == _NOT_FOUND else code)
        return codes.count(0)

    def scan(self, owner: bytes | None = None, namespace: bytes | None = None) -> Iterator[Entry]:
        """See `Store.scan`. `Entry.expires` is not known without reading, and None."""
        try:
            with urllib.request.urlopen(f"{self._admin}/get_all_keys", timeout=self._timeout) as answer:
                names = answer.read().decode().split()
        except (OSError, ValueError):
            raise Unavailable("the master does not tell what it has") from None
        for name in names:
            if not name.startswith(self._prefix):
                continue
            try:
                address = Address.parse(name.removeprefix(self._prefix))
            except ValueError:
                continue
            if owner in (None, address.owner) and namespace in (None, address.namespace):
                size = self._call(self._engine.get_size, name)
                if size > 0:
                    yield Entry(address, size)

    def close(self) -> None:
        self._pool.shutdown()
        self._engine.close()


def _check(code: int) -> None:
    if code:
        raise Unavailable(f"the cluster failed (code {code})")
