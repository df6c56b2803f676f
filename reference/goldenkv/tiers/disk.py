"""Objects on a local disk, in files that anyone's tools can read. They outlive the process, however it ends.

A put writes a temporary file, makes it durable, renames it, makes the name durable, and commits a row of the
index. A delete unlinks, makes that durable, and commits. Whoever dies in between leaves at most a temporary
file, a file without row, or a row without file; the next one to open the folder mends that. Several processes
can have the same folder open.

A get asks the file alone: its name follows from the address, and its head says until when it is good. What
turns out to be damaged, or another object, is removed, so that the next put and `exists` are right.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from .disk_changes import Changes
from .disk_files import (
    Places,
    Step,
    Writer,
    check_size,
    mark_at,
    open_object,
    opening,
    raw_head,
    read_payload,
    sync_folder,
)
from .disk_index import Index, Row, Unusable
from .disk_recovery import Recovered, Recovery
from .errors import Corrupt, Expired, Foreign, Full, ReadOnly, StoreError, Unavailable
from .objects import DIGEST_BYTES, Address, Head
from .store import Entry, Stats, VerifiedStore

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_READ_ONLY = {errno.EROFS, errno.EACCES, errno.EPERM}


def _nothing(step: Step) -> None: ...


class DiskStore(VerifiedStore):
    """A store in a folder of a local file system.

    A folder that cannot be written, but has an index, can be read: `read_only` is then true.

    Attributes:
        recovered: what was found and mended when it was opened.

    Args:
        folder: is made if need be.
        capacity: bytes of all objects together, or None. A put that goes beyond raises Full: none is evicted.
        clock, verify: see VerifiedStore. The latest time is kept in the index.
        timeout: seconds to wait for another process that is changing the same folder.
        at: is called after every step of a change. It can raise: the change then fails there.

    Raises:
        ReadOnly: it can neither be written nor read.
        Full, Unavailable: it cannot be opened.
    """

    name, persistent = "disk", True

    def __init__(
        self,
        folder: str | os.PathLike[str],
        capacity: int | None = None,
        *,
        clock: Callable[[], float] = time.time,
        verify: bool = True,
        timeout: float = 10.0,
        at: Callable[[Step], None] = _nothing,
    ) -> None:
        super().__init__(clock, verify)
        if capacity is not None and capacity < 1:
            raise ValueError(f"{capacity=} must be positive bytes, or None")
        self.capacity, self.timeout, self._at = capacity, timeout, at
        self.places, self.recovered, self.read_only = Places(os.fspath(folder)), Recovered(), False
        self._end = contextlib.ExitStack()
        try:
            with _named_errors("opening the disk store", full=Full):
                self._open()
        except ReadOnly as error:
            self._open_read_only(error)

    def _open(self) -> None:
        for folder in (self.places.objects, self.places.writers):
            os.makedirs(folder, exist_ok=True)
        sync_folder(self.places.folder)
        with opening(self.places, self.timeout), contextlib.ExitStack() as undo:
            self._at(Step.OPEN_LOCKED)
            recovery = Recovery(self.places, self._at)
            self.recovered = recovery.found
            alive = recovery.remove_dead()
            self._writer = Writer(self.places)
            undo.callback(self._writer.close)
            self._at(Step.WRITER_CREATED)
            self._index = recovery.open_index(alive, self.timeout)
            undo.callback(self._index.close)
            self._at(Step.INDEX_OPENED)
            self._latest = self._index.latest()
            self._changes = Changes(self.places, self._index, self.now, self._at)
            recovery.mend(self._index, self.now)
            self._sweep()
            self._at(Step.OPENED)
            undo.callback(self._keep_time)
            self._end = undo.pop_all()

    def _open_read_only(self, error: ReadOnly) -> None:
        try:
            self._index = Index(self.places.index, self.timeout, writable=False)
            self._end.callback(self._index.close)
            self._latest = self._index.latest()
        except (sqlite3.Error, Unusable) as cause:
            raise ReadOnly(f"{error}; and there is no index to read by: {cause}") from error
        self.read_only = True

    def close(self) -> None:
        with _named_errors("closing the disk store"):
            self._end.close()

    def _keep_time(self) -> None:
        with self._index.locked():
            self._index.commit(self.now())

    # Put ----------------------------------------------------------------------------------------------------

    def _write(self, address: Address, head: bytes, payload: np.ndarray, expires: float | None) -> None:
        _check_address(address)
        nbytes = len(head) + len(payload)

        def check_room() -> None:
            self._check_room(address, nbytes)

        with self._change("put", full=Full):
            check_room()  # before the work, and again when nobody else can take it
            temporary = self._writer.temporary()
            try:
                mark = self._changes.write_temporary(temporary, head, payload)
                # Milliseconds, as the head has it.
                until = None if expires is None else math.ceil(expires * 1000) / 1000
                row = Row(address, nbytes, until, mark)
                try:
                    self._changes.publish(temporary, row, check_room)
                except BaseException:
                    self._changes.take_back(row)
                    raise
            except BaseException:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(temporary)
                raise

    def _check_room(self, address: Address, nbytes: int) -> None:
        if self.capacity is not None:
            (old,) = self._index.find([address])
            free = self.capacity - self._index.totals(None)[1] + (old.nbytes if old else 0)
            if nbytes > free:
                raise Full(f"{nbytes} bytes, of {self.capacity} {max(0, free)} are free")

    # Get and ask --------------------------------------------------------------------------------------------

    def _get(self, address: Address, buffer: np.ndarray | None) -> tuple[Head, np.ndarray]:
        try:
            return super()._get(address, buffer)
        except (Corrupt, Foreign, Expired):
            if not self.read_only:
                with contextlib.suppress(StoreError, OSError, sqlite3.Error):
                    self._discard(address)
            raise

    def _discard(self, address: Address) -> None:
        """Takes out what nobody can get from this address, unless a put has mended it meanwhile."""
        with self._index.locked():
            try:
                super()._get(address, None)
            except (Corrupt, Foreign, Expired):
                self._changes.take_out([address])

    def _read(self, address: Address, allot: Callable[[bytes], np.ndarray]) -> None:
        _check_address(address)
        fd, found = open_object(self.places.object(address))
        try:
            head = raw_head(fd, found.st_size)
            buffer = allot(head)
            check_size(found.st_size, len(head) + len(buffer))
            read_payload(fd, buffer, len(head))
        except OSError as error:
            raise Unavailable(f"cannot read the file: {error.strerror}") from error
        finally:
            os.close(fd)

    def exists(self, addresses: Sequence[Address]) -> list[bool]:
        with _named_errors("exists"):
            self._sweep()
            now = self.now()
            return [
                row is not None
                and (row.expires is None or row.expires > now)
                and mark_at(self.places.object(row.address)) == row.mark
                for row in self._index.find(addresses)
            ]

    def scan(self, owner: bytes | None = None, namespace: bytes | None = None) -> Iterator[Entry]:
        with _named_errors("scan"):
            self._sweep()
            for row in self._index.scan(owner, namespace):
                if row.expires is None or row.expires > self.now():
                    yield Entry(row.address, row.nbytes, row.expires)

    def stats(self, owner: bytes | None = None) -> Stats:
        with _named_errors("stats"):
            self._sweep()
            return Stats(*self._index.totals(owner), self.capacity)

    # Delete -------------------------------------------------------------------------------------------------

    def delete(self, addresses: Sequence[Address]) -> int:
        for address in addresses:
            _check_address(address)
        with self._change("delete"), self._index.locked():
            self._at(Step.DELETE_LOCKED)
            return self._changes.take_out(addresses)

    def delete_owner(self, owner: bytes) -> int:
        _check_digest(owner)
        with self._change("delete_owner"):
            count = self._changes.take_out_owner(owner, self._writer.temporary())
            with opening(self.places, self.timeout):  # what a dead process was writing may be this owner's
                Recovery(self.places, self._at).remove_dead(self._writer.folder)
        return count

    @contextlib.contextmanager
    def _change(self, doing: str, full: type[StoreError] = Unavailable) -> Iterator[None]:
        if self.read_only:
            raise ReadOnly(f"{doing}: the folder cannot be written")
        with _named_errors(doing, full):
            self._sweep()
            yield

    def _sweep(self) -> None:
        """Takes out what has expired. Once told to be gone it does not come back, whatever the clock does."""
        if not self.read_only and self._index.expired(self.now(), most=1):
            with self._index.locked():
                self._changes.take_out(self._index.expired(self.now()))


def _check_address(address: Address) -> None:
    for part in address:
        _check_digest(part)


def _check_digest(part: bytes) -> None:
    if len(part) != DIGEST_BYTES:
        raise ValueError(f"each part of an address must have {DIGEST_BYTES} bytes, got {len(part)}")


@contextlib.contextmanager
def _named_errors(doing: str, full: type[StoreError] = Unavailable) -> Iterator[None]:
    """Turns what the system and SQLite say into errors of the store; `full` is that for a full disk."""
    try:
        yield
    except OSError as error:
        kind = full if error.errno in _FULL else ReadOnly if error.errno in _READ_ONLY else Unavailable
        raise kind(f"{doing}: {error.strerror}") from error
    except sqlite3.Error as error:
        kinds = {sqlite3.SQLITE_FULL: full, sqlite3.SQLITE_READONLY: ReadOnly}
        kind = kinds.get(getattr(error, "sqlite_errorcode", 0) & 0xFF, Unavailable)
        raise kind(f"{doing}: the index says: {error}") from error
