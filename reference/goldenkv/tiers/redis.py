"""Objects on a server of the Redis protocol: Redis, Valkey and their like. One server, no cluster.

An object is one string, head and payload, under the name `prefix:owner:namespace:key` (hexadecimal). SET and
GET are atomic there, so none is ever visible in part. Its time to live is the server's (PX), and in its head.
"""

from __future__ import annotations

import math
import re
import ssl
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import numpy as np

from ..errors import MissingExtra
from .errors import Foreign, Full, Missing, ReadOnly, StoreError, Unavailable
from .objects import Address
from .store import Entry, VerifiedStore
from .whole import unpack

if TYPE_CHECKING:
    import redis

BATCH = 1000
"""Names in one call, so that no call keeps the server from its other clients for long."""


def connect(
    url: str, *, password: str | None = None, ca_file: Path | None = None, timeout: float = 1.0
) -> redis.Redis:
    """A client that fails within its time instead of trying again. It connects when it is first used.

    Args:
        url: "redis://host:port/0", "rediss://..." for TLS, or "unix:///path".
        password: kept out of the URL, which ends up in logs.
        ca_file: PEM with the authorities to trust, for TLS; the system's if None.
        timeout: seconds to wait for a connection, and for the next bytes of an answer.
    """
    try:
        import redis
        from redis.backoff import NoBackoff
        from redis.retry import Retry
    except ImportError:
        raise MissingExtra("tiers", "a store of the Redis protocol") from None
    options: dict[str, Any] = {"password": password} if password is not None else {}
    if ca_file is not None:
        if urlsplit(url).scheme != "rediss":
            raise ValueError("a ca_file is for TLS: the URL must begin with rediss://")
        options["ssl_ca_certs"] = str(ca_file)
    return redis.Redis.from_url(
        url, socket_timeout=timeout, socket_connect_timeout=timeout, protocol=2,
        # Named, as the answer to that says at once whether a password is wanted: in the middle of a large
        # command the server would just hang up.
        retry=Retry(NoBackoff(), 0), socket_read_size=1 << 18, client_name="goldenkv", **options,
    )  # fmt: skip


class RedisStore(VerifiedStore):
    """A store over a `redis.Redis`, which other stores and threads may share.

    The server never holds a part of an object, but a `put` that was not answered in time may still happen
    there, as a whole. Timeouts, and retries of all but `put`, are the client's: see `connect`.

    Args:
        client: with `decode_responses=False`. `close` closes it.
        prefix: of all names; stores with different ones do not see each other.
        clock, verify: see `VerifiedStore`.
    """

    name = "redis"
    persistent = True

    def __init__(
        self,
        client: redis.Redis,
        prefix: bytes = b"gkv1",
        clock: Callable[[], float] = time.time,
        verify: bool = True,
    ) -> None:
        super().__init__(clock, verify)
        if client.get_encoder().decode_responses:
            raise ValueError("the client must have decode_responses=False: objects are bytes, not text")
        self._client: Any = client  # its types allow for text
        self._prefix = prefix + b":"

    def _name(self, address: Address) -> bytes:
        return self._prefix + address.path(":").encode()

    def _write(self, address: Address, head: bytes, payload: np.ndarray, expires: float | None) -> None:
        # Relative, so that the server's clock need not be ours.
        left = None if expires is None else max(1, math.ceil((expires - self.now()) * 1000))
        # SET by its parts: the client would need head and payload in one piece, and copying costs a third.
        option = [] if left is None else [b"PX", b"%d" % left]
        words = (3 + len(option), _word(b"SET"), _word(self._name(address)), len(head) + len(payload))
        before, after = b"*%d\r\n%s%s$%d\r\n" % words, b"\r\n" + b"".join(map(_word, option))
        with _named_errors():
            connection = self._client.connection_pool.get_connection()
            try:
                connection.send_packed_command([before + head, payload.data, after])
                connection.read_response()
            finally:
                self._client.connection_pool.release(connection)

    def _read(self, address: Address, allot: Callable[[bytes], np.ndarray]) -> None:
        with _named_errors():
            value = self._client.get(self._name(address))
        if value is None:
            raise Missing("nothing is there")
        unpack(memoryview(value), allot)

    def exists(self, addresses: Sequence[Address]) -> list[bool]:
        return [size > 0 for size in self._ask("strlen", map(self._name, addresses))]

    def delete(self, addresses: Sequence[Address]) -> int:
        names = [self._name(address) for address in addresses]
        with _named_errors():
            return sum(self._client.unlink(*names[at : at + BATCH]) for at in range(0, len(names), BATCH))

    def scan(self, owner: bytes | None = None, namespace: bytes | None = None) -> Iterator[Entry]:
        """See `Store.scan`. `Entry.expires` is what the server says is left, by our clock."""
        parts = (b"*" if part is None else part.hex().encode() for part in (owner, namespace))
        pattern = re.sub(rb"[*?\[\]\\^]", rb"\\\g<0>", self._prefix) + b":".join((*parts, b"*"))
        seen: set[Address] = set()  # SCAN may name one twice
        cursor: int | None = None
        while cursor != 0:
            with _named_errors():
                cursor, names = self._client.scan(cursor or 0, pattern, BATCH)
            sizes, left = self._ask("strlen", names), self._ask("pttl", names)
            for name, size, milliseconds in zip(names, sizes, left, strict=True):
                try:
                    address = Address.parse(name.removeprefix(self._prefix).decode(), ":")
                except ValueError:
                    continue
                if size > 0 and address not in seen:
                    seen.add(address)
                    expires = self.now() + milliseconds / 1000 if milliseconds >= 0 else None
                    yield Entry(address, size, expires)

    def close(self) -> None:
        self._client.close()

    def _ask(self, command: str, names: Iterable[bytes]) -> list[int]:
        """One number about each name, in one round trip; 0 where something else than a string is there."""
        pipeline = self._client.pipeline(transaction=False)
        for name in names:
            getattr(pipeline, command)(name)
        with _named_errors():
            return [_number(answer) for answer in pipeline.execute(raise_on_error=False)]


def _word(text: bytes) -> bytes:
    """As the protocol sends one."""
    return b"$%d\r\n%s\r\n" % (len(text), text)


def _number(answer: int | Exception) -> int:
    if isinstance(answer, Exception):
        if str(answer).startswith("WRONGTYPE"):
            return 0
        raise answer
    return answer


@contextmanager
def _named_errors() -> Iterator[None]:
    """Turns the client's errors into ours. Their texts are not kept: a server puts names into some."""
    from redis import RedisError

    try:
        yield
    except RedisError as error:
        raise _named(error) from None


def _named(error: Exception) -> StoreError:
    from redis import exceptions as of

    code = str(error).partition(" ")[0]
    match error:
        case of.OutOfMemoryError():
            return Full("the server is at its memory limit")
        case of.ReadOnlyError():
            return ReadOnly("the server is a replica that takes no writes")
        case of.NoPermissionError():
            return Unavailable("the server does not let this user do that")
        case of.AuthenticationError():
            return Unavailable("the server wants a password, or another one")
        case of.TimeoutError():
            return Unavailable("the server does not answer in time")
        case of.BusyLoadingError():
            return Unavailable("the server is still loading its data")
        case of.ConnectionError() if isinstance(error.__context__, ssl.SSLError):
            return Unavailable("no TLS with the server: it speaks none, or its certificate is not trusted")
        case of.ConnectionError():
            return Unavailable("no connection to the server, or it was lost")
        case of.ResponseError() if code == "WRONGTYPE":
            return Foreign("what is there is no string")
        case of.ResponseError() if code in ("MISCONF", "NOREPLICAS"):
            return ReadOnly("the server takes no writes, since it cannot make them safe")
    return Unavailable(f"the server refused or was not understood ({type(error).__name__})")
