"""Objects in a bucket, through obstore: S3 and its like, Google's and Azure's stores, a local folder.

An object is one file `prefix/owner/namespace/key` (hexadecimal), put in one request: it is a safetensors file
as it stands. A bucket knows no time to live. What has expired is refused when it is read, and stays until it
is deleted; a rule of the bucket's own should collect it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import MissingExtra
from .errors import Full, Missing, ReadOnly, StoreError, Unavailable
from .objects import Address
from .store import Entry, VerifiedStore
from .whole import unpack

if TYPE_CHECKING:
    from obstore.store import ObjectStore as Bucket

REQUESTS = 16
"""At the same time, where one cannot ask for many objects at once."""


def connect(url: str, *, timeout: float = 1.0, **config: Any) -> Bucket:
    """A bucket whose requests fail within their time instead of being tried again for minutes.

    Args:
        url: "s3://bucket/folder", "gs://...", "az://account/container/...".
        timeout: seconds for a request, all of its bytes included.
        config: as obstore has it, for example endpoint, access_key_id, secret_access_key, region.
    """
    try:
        from obstore.store import from_url
    except ImportError:
        raise MissingExtra("s3", "a store in a bucket") from None
    plain = str(config.get("endpoint", "")).startswith("http://")
    seconds = f"{timeout}s"
    return from_url(
        url, config=config, retry_config={"max_retries": 0},
        client_options={"timeout": seconds, "connect_timeout": seconds, "allow_http": plain},
    )  # type: ignore[call-overload]  # fmt: skip


class ObjectStore(VerifiedStore):
    """A store over any store of obstore's; timeouts and retries are its own, see `connect`.

    A `put` that was not answered in time may still happen, as a whole. A local folder is atomic, but not
    safe from a power failure: obstore does not fsync.

    Args:
        bucket: of obstore: S3Store, LocalStore, MemoryStore, ...
        prefix: a folder in it; stores with different ones do not see each other.
        clock, verify: see `VerifiedStore`.
    """

    name = "bucket"
    persistent = True

    def __init__(
        self,
        bucket: Bucket,
        prefix: str = "gkv1",
        clock: Callable[[], float] = time.time,
        verify: bool = True,
    ) -> None:
        super().__init__(clock, verify)
        self._bucket: Any = bucket
        self._prefix = prefix + "/"
        self._pool = ThreadPoolExecutor(REQUESTS, "bucket")

    def _path(self, address: Address) -> str:
        return self._prefix + address.path()

    def _write(self, address: Address, head: bytes, payload: np.ndarray, expires: float | None) -> None:
        # Joined, as a MemoryStore keeps the very memory that it is given: that must not be the caller's.
        value = b"".join((head, payload.data))
        with _named_errors():
            self._bucket.put(self._path(address), value, use_multipart=False)

    def _read(self, address: Address, allot: Callable[[bytes], np.ndarray]) -> None:
        with _named_errors():
            value = self._bucket.get(self._path(address)).bytes()
        unpack(memoryview(value), allot)

    def exists(self, addresses: Sequence[Address]) -> list[bool]:
        return list(self._pool.map(self._there, addresses))

    def _there(self, address: Address) -> bool:
        try:
            with _named_errors():
                return bool(self._bucket.head(self._path(address))["size"])
        except Missing:
            return False

    def delete(self, addresses: Sequence[Address]) -> int:
        wanted = list(dict.fromkeys(addresses))
        # Some buckets answer with an error where nothing was, and none says how many there were.
        there = [address for address, found in zip(wanted, self.exists(wanted), strict=True) if found]
        if there:
            try:
                with _named_errors():
                    self._bucket.delete([self._path(address) for address in there])
            except Missing:
                # Somebody else deletes too, and the call may have stopped there.
                list(self._pool.map(self._drop, there))
        return len(there)

    def _drop(self, address: Address) -> None:
        with suppress(Missing), _named_errors():
            self._bucket.delete(self._path(address))

    def scan(self, owner: bytes | None = None, namespace: bytes | None = None) -> Iterator[Entry]:
        """See `Store.scan`. `Entry.expires` is not known without reading, and None."""
        folder = self._prefix + ("" if owner is None else owner.hex() + "/")
        if owner is not None and namespace is not None:
            folder += namespace.hex() + "/"
        with _named_errors():
            for page in self._bucket.list(folder):
                for found in page:
                    try:
                        address = Address.parse(found["path"].removeprefix(self._prefix))
                    except ValueError:
                        continue
                    if found["size"] and namespace in (None, address.namespace):
                        yield Entry(address, found["size"])

    def close(self) -> None:
        self._pool.shutdown()


@contextmanager
def _named_errors() -> Iterator[None]:
    """Turns obstore's errors into ours. Their texts are not kept: the name of the object is in them."""
    from obstore.exceptions import BaseError

    try:
        yield
    except (BaseError, OSError) as error:
        raise _named(error) from None


def _named(error: Exception) -> StoreError:
    from obstore import exceptions as of

    text = str(error)
    if isinstance(error, FileNotFoundError):
        return Missing("nothing is there")
    if isinstance(error, of.UnauthenticatedError | of.PermissionDeniedError):
        return Unavailable("the bucket does not let this user do that")
    # obstore gives no number of its own for these.
    if "(os error 28)" in text or "(os error 122)" in text:
        return Full("no space is left")
    if "(os error 30)" in text or "(os error 13)" in text:
        return ReadOnly("the folder cannot be written")
    return Unavailable(f"the bucket does not answer, or refused ({type(error).__name__})")
