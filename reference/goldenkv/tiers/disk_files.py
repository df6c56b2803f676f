"""The folder of a disk store: what is where, the steps that change it, and who is changing it.

    folder/
      objects/<owner>/<namespace>/<key>.safetensors    an object each; all names are hexadecimal digests
      goldenkv-index.sqlite (-wal, -shm)               what there is, see `disk_index`
      writers/<number>/                                of one open store each: what it writes or throws away
      foreign/                                         what was found within `objects` and is not ours
      opening                                          locked while somebody opens the store

The files are the truth and the index is a list of them. A process holds a lock on `writers/<number>/lock` for
as long as it lives: the kernel gives it back when the process ends, however it ends.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import fcntl
import itertools
import os
import shutil
import stat
import time
from collections.abc import Iterator

import numpy as np

from .errors import Corrupt, Foreign, Missing, Truncated, Unavailable
from .objects import Address, Head, head_size, read_head

SUFFIX = ".safetensors"
_AT_ONCE = 16 << 10
"""Bytes read at the start of an object: more than most heads."""


class Step(enum.Enum):
    """All that happens to the folder, in order. A process can end after any of these."""

    TEMPORARY_CREATED = "put: temporary file created"
    HEAD_WRITTEN = "put: head written"
    PAYLOAD_WRITTEN = "put: payload written"
    PAYLOAD_SYNCED = "put: file durable"
    PUT_LOCKED = "put: index locked"
    FOLDERS_MADE = "put: folders made"
    RENAMED = "put: file renamed"
    RENAME_SYNCED = "put: name durable"
    ROW_WRITTEN = "put: row written"
    PUT_COMMITTED = "put: row committed"

    DELETE_LOCKED = "delete: index locked"
    UNLINKED = "delete: a file unlinked"
    UNLINK_SYNCED = "delete: a folder durable"
    ROWS_DELETED = "delete: rows deleted"
    DELETE_COMMITTED = "delete: rows committed"

    OWNER_LOCKED = "delete owner: index locked"
    OWNER_MOVED = "delete owner: folder moved away"
    OWNER_SYNCED = "delete owner: move durable"
    OWNER_ROWS_DELETED = "delete owner: rows deleted"
    OWNER_COMMITTED = "delete owner: rows committed"
    OWNER_REMOVED = "delete owner: files removed"

    OPEN_LOCKED = "open: alone"
    LEFTOVER_REMOVED = "open: a file of a dead process removed"
    WRITER_REMOVED = "open: folder of a dead process removed"
    WRITER_CREATED = "open: own folder made"
    INDEX_REMOVED = "open: a file of an unusable index removed"
    INDEX_OPENED = "open: index opened"
    SET_ASIDE = "open: something foreign moved away"
    BAD_REMOVED = "open: a damaged file removed"
    ROW_MENDED = "open: row of a file written"
    ROWS_DROPPED = "open: rows without file deleted"
    NAMESPACE_COMMITTED = "open: a namespace committed"
    RECOVERED = "open: index mended"
    OPENED = "open: done"


class Places:
    """Paths within the folder."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.objects = os.path.join(folder, "objects")
        self.index = os.path.join(folder, "goldenkv-index.sqlite")
        self.writers = os.path.join(folder, "writers")
        self.foreign = os.path.join(folder, "foreign")
        self.opening = os.path.join(folder, "opening")

    def owner(self, owner: bytes) -> str:
        """The folder of an owner."""
        return f"{self.objects}/{owner.hex()}"

    def namespace(self, owner: bytes, namespace: bytes) -> str:
        """The folder of a namespace."""
        return f"{self.objects}/{owner.hex()}/{namespace.hex()}"

    def object(self, address: Address) -> str:
        """The file of an object."""
        return f"{self.objects}/{address.path()}{SUFFIX}"

    def make_way(self, address: Address) -> None:
        """Makes the folders of an object durably, and moves away whatever stands in the place of one."""
        parent = self.objects
        for folder in (self.owner(address.owner), self.namespace(address.owner, address.namespace)):
            if not is_folder(folder):
                self.set_aside(folder)
                os.mkdir(folder)
                sync_folder(parent)
            parent = folder
        if is_folder(self.object(address)):
            self.set_aside(self.object(address))

    def set_aside(self, path: str) -> None:
        """Moves what is not ours out of the way, if it is there. Not deleted: it may be somebody's."""
        if os.path.lexists(path):
            os.makedirs(self.foreign, exist_ok=True)
            names = (f"{self.foreign}/{n}-{os.path.basename(path)}" for n in itertools.count())
            os.rename(path, next(name for name in names if not os.path.lexists(name)))


def is_folder(path: str) -> bool:
    """Whether a folder is there, and no link to one."""
    return os.path.isdir(path) and not os.path.islink(path)


def sync_folder(path: str) -> None:
    """Makes the names in a folder durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def mark(found: os.stat_result) -> str:
    """What tells a file from every other one that had its name. A rename does not change it."""
    return f"{found.st_ino}:{found.st_mtime_ns}:{found.st_size}"


def mark_at(path: str) -> str | None:
    """The mark of what stands there, or None."""
    try:
        return mark(os.lstat(path))
    except (FileNotFoundError, NotADirectoryError):
        return None


def write_all(fd: int, data: bytes | memoryview) -> None:
    """Writes all of it."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def open_object(path: str) -> tuple[int, os.stat_result]:
    """Opens a file of objects for reading.

    Raises:
        Missing: there is none.
        Foreign: something else is there, for example a folder or a link.
        Unavailable: it cannot be opened.
    """
    try:
        # Neither follow a link, nor wait for the other end of a pipe.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except (FileNotFoundError, NotADirectoryError):
        raise Missing("no such file") from None
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):
            raise Foreign("not a regular file") from None
        raise Unavailable(f"cannot open the file: {error.strerror}") from error
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode):
        os.close(fd)
        raise Foreign("not a regular file")
    return fd, found


def raw_head(fd: int, total: int) -> bytes:
    """The head of an open object of `total` bytes, not yet verified. Errors as `objects.head_size`."""
    start = os.pread(fd, _AT_ONCE, 0)
    size = head_size(start, total)
    return start[:size] if size <= len(start) else os.pread(fd, size, 0)


def read_payload(fd: int, buffer: np.ndarray, at: int) -> None:
    """Fills a buffer with what follows byte `at`.

    Raises:
        Truncated: the file ends before.
    """
    view = buffer.data
    while view:
        count = os.preadv(fd, [view], at)
        if not count:
            raise Truncated(f"{len(view)} bytes are missing at the end")
        view, at = view[count:], at + count


def inspect(path: str, address: Address) -> tuple[Head, int, str]:
    """Verifies all of a file but its payload. Returns its head, its bytes and its mark.

    Raises:
        Missing, Corrupt, Truncated, Foreign: it is no object of this address.
        OSError: it cannot be read.
    """
    fd, found = open_object(path)
    try:
        raw = raw_head(fd, found.st_size)
    finally:
        os.close(fd)
    head = read_head(raw)
    check_size(found.st_size, len(raw) + head.payload)
    if head.label.address != address:
        raise Foreign("the object there carries another address")
    return head, found.st_size, mark(found)


def check_size(found: int, expected: int) -> None:
    """Raises Truncated or Corrupt unless a file has as many bytes as its head says."""
    if found < expected:
        raise Truncated(f"{found} bytes of {expected}")
    if found > expected:
        raise Corrupt(f"{found - expected} bytes after the end")


class Writer:
    """The folder of one open store under `writers`. Its files are taken away when its process is dead.

    It is made, and removed by others, only by who holds `opening`.
    """

    def __init__(self, places: Places) -> None:
        for number in itertools.count():
            self.folder = f"{places.writers}/{number}"
            with contextlib.suppress(FileExistsError):
                os.mkdir(self.folder)
                break
        self._lock = os.open(f"{self.folder}/lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self._numbers = itertools.count()

    def temporary(self) -> str:
        """A path that nobody else uses."""
        return f"{self.folder}/{next(self._numbers)}.tmp"

    def close(self) -> None:
        """Removes the folder and all in it."""
        shutil.rmtree(self.folder, ignore_errors=True)
        os.close(self._lock)


@contextlib.contextmanager
def opening(places: Places, timeout: float) -> Iterator[None]:
    """Alone among those who open this store.

    Raises:
        Unavailable: somebody else has been at it for `timeout` seconds.
    """
    with _locked(places.opening, timeout) as alone:
        if not alone:
            raise Unavailable(f"another process has been opening the store for {timeout} seconds")
        yield


def dead_writers(places: Places, mine: str | None = None) -> tuple[list[str], bool]:
    """Folders of dead processes, and whether another one than `mine` is alive. For who holds `opening`."""
    dead, alive = [], False
    for name in sorted(os.listdir(places.writers)):
        folder = f"{places.writers}/{name}"
        if folder == mine or not is_folder(folder):
            continue
        with contextlib.suppress(FileNotFoundError), _locked(f"{folder}/lock", 0) as free:  # or just closed
            if free:
                dead.append(folder)
            alive |= not free
    return dead, alive


@contextlib.contextmanager
def _locked(path: str, timeout: float) -> Iterator[bool]:
    """Tries to lock a file; says whether it has."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        until = time.monotonic() + timeout
        while not (locked := _try_lock(fd)) and time.monotonic() < until:
            time.sleep(0.005)
        yield locked
    finally:
        os.close(fd)


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
