"""Keys of owners, to encrypt what they store: new ones, old ones, destroyed ones.

A destroyed key makes all that was encrypted with it unreadable, on every tier and in every backup. So the
file with the keys must not lie where those backups are, nor be in a backup of its own for longer than it may
take to forget a tenant. Erasing the blocks in which a disk held it is up to the disk.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import stat
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from .errors import StoreError, Unreadable

FORMAT, FORMAT_VERSION = "goldenkv-keys", 1
KEY_BYTES, ID_BYTES = 32, 8
MOST_OBJECTS = 1 << 31
"""Objects that one key encrypts. Each takes two nonces of 96 random bits, and AES-GCM allows a key 2^32."""

RESERVED = 1 << 16
"""Objects counted in the file at a time. A process that ends early leaves the rest of them unused."""


class BadKeyFile(StoreError):
    """The file with the keys is damaged, gone, none, or cannot be written."""

    reason = "bad key file"


class OpenKeyFile(BadKeyFile):
    """Others than its owner may read or write the file with the keys."""

    reason = "open key file"


class KeyUsedUp(StoreError):
    """A key has encrypted as much as it may. `rotate` makes another one."""

    reason = "key used up"


@dataclass(frozen=True, slots=True)
class Key:
    """One key: its name, and its secret, which no text of it shows. `used` objects are counted for it."""

    id: str
    secret: bytes = field(repr=False)
    used: int = 0


Keys = dict[bytes, tuple[Key, ...]]
"""Of every owner, from the oldest to the newest."""


class KeyRing:
    """The keys of all owners, in a file or in memory. An owner gets its first key when it first stores.

    Several threads, and several processes with the same file, can use and change it at once: every change is
    made on what the file says at that time, and seen by the others at their next use of a key.

    Args:
        path: of the file, which is made if there is none; None keeps all in memory.
        random: so many random bytes; for keys and their names.
        most: objects that a key may encrypt, at most `MOST_OBJECTS`.

    Raises:
        BadKeyFile, OpenKeyFile: from the beginning, or whenever the file is read again.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        random: Callable[[int], bytes] = os.urandom,
        most: int = MOST_OBJECTS,
    ) -> None:
        if not 1 <= most <= MOST_OBJECTS:
            raise ValueError(f"{most=} must be in 1 .. {MOST_OBJECTS}")
        self._path = None if path is None else Path(path)
        self._random, self._most = random, most
        self._lock = threading.Lock()
        self._keys: Keys = {}
        self._left: dict[str, int] = {}
        """Objects that this process may encrypt with a key before it counts more of them in the file."""
        self._seen: tuple[int, ...] = ()
        if self._path is not None:
            with self._file_lock(self._path):
                if self._path.exists():
                    self._refresh()
                else:
                    self._save(self._path, {})

    def __repr__(self) -> str:
        return (
            f"KeyRing({'in memory' if self._path is None else str(self._path)!r}, {len(self._keys)} owners)"
        )

    def take(self, owner: bytes) -> Key:
        """An owner's newest key, to encrypt one object with.

        Raises:
            KeyUsedUp: it has encrypted as many as it may.
        """
        with self._lock:
            self._refresh()
            keys = self._keys.get(owner, ())
            if not keys or not self._left.get(keys[-1].id):
                batch = 0

                def reserve(keys: tuple[Key, ...]) -> tuple[Key, ...]:
                    nonlocal batch
                    *older, key = keys or (self._new(),)
                    batch = min(RESERVED, self._most - key.used)
                    if batch < 1:
                        raise KeyUsedUp(f"key {key.id} has encrypted {key.used} objects: rotate it")
                    return (*older, replace(key, used=key.used + batch))

                keys = self._change(owner, reserve)
                self._left[keys[-1].id] = batch
            self._left[keys[-1].id] -= 1
            return keys[-1]

    def find(self, owner: bytes, key: str) -> Key:
        """An owner's key by its name, to decrypt.

        Raises:
            Unreadable: this owner has no such key, or no more.
        """
        with self._lock:
            self._refresh()
            for found in self._keys.get(owner, ()):
                if found.id == key:
                    return found
        raise Unreadable("its key is destroyed, or was never in this ring")

    def names(self, owner: bytes) -> list[str]:
        """The names of an owner's keys, from the oldest to the newest."""
        with self._lock:
            self._refresh()
            return [key.id for key in self._keys.get(owner, ())]

    def rotate(self, owner: bytes) -> str:
        """A new key for what an owner stores from now on; the old ones still decrypt. Returns its name."""
        with self._lock:
            return self._change(owner, lambda keys: (*keys, self._new()))[-1].id

    def destroy(self, owner: bytes, before: str | None = None) -> int:
        """Forgets an owner's keys: what they encrypted can never be read again. Returns how many.

        Args:
            owner: whose.
            before: the name of the oldest key that stays; None forgets all. Who stores again gets a new one.

        Raises:
            ValueError: the owner has no key `before`.
        """
        gone = 0

        def change(keys: tuple[Key, ...]) -> tuple[Key, ...]:
            nonlocal gone
            names = [key.id for key in keys]
            if before is not None and before not in names:
                raise ValueError(f"{before=} must be a key of this owner, which has {names}")
            gone = len(keys) if before is None else names.index(before)
            return keys[gone:]

        with self._lock:
            self._change(owner, change)
        return gone

    def _new(self) -> Key:
        return Key(self._random(ID_BYTES).hex(), self._random(KEY_BYTES))

    # The file. All of this is called under the lock --------------------------------------------------------

    def _change(self, owner: bytes, change: Callable[[tuple[Key, ...]], tuple[Key, ...]]) -> tuple[Key, ...]:
        """Changes an owner's keys, in the file first: no key is used that a crash could take away."""
        with contextlib.nullcontext() if self._path is None else self._file_lock(self._path):
            self._refresh()
            keys = change(self._keys.get(owner, ()))
            changed = {name: of for name, of in {**self._keys, owner: keys}.items() if of}
            if self._path is not None:
                self._save(self._path, changed)
            self._keys = changed
        return keys

    @staticmethod
    @contextlib.contextmanager
    def _file_lock(path: Path) -> Iterator[None]:
        """One process at a time. The lock is a file beside, as the one with the keys is replaced."""
        try:
            with open(os.open(path.with_name(path.name + ".lock"), os.O_RDWR | os.O_CREAT, 0o600)) as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                yield
        except OSError as error:
            raise BadKeyFile(f"{path}: {error.strerror}") from None

    def _refresh(self) -> None:
        """Reads the file again if it is another one than was last seen."""
        if self._path is None:
            return
        try:
            if self._seen != _identity(os.stat(self._path)):
                with open(self._path, "rb") as file:
                    status = os.fstat(file.fileno())
                    if stat.S_IMODE(status.st_mode) & 0o077:
                        raise OpenKeyFile(
                            f"mode {stat.S_IMODE(status.st_mode):o} of {self._path}, expected 600"
                        )
                    self._keys, self._seen = _parse(file.read()), _identity(status)
        except OSError as error:
            raise BadKeyFile(f"{self._path}: {error.strerror}") from None

    def _save(self, path: Path, keys: Keys) -> None:
        temporary = path.with_name(path.name + ".tmp")
        temporary.unlink(missing_ok=True)  # of a process that was killed
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(descriptor, "wb") as file:
            file.write(_text(keys))
            file.flush()
            os.fsync(file.fileno())
            seen = _identity(os.fstat(file.fileno()))
        os.replace(temporary, path)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
        self._seen = seen


def _identity(status: os.stat_result) -> tuple[int, ...]:
    return status.st_ino, status.st_mtime_ns, status.st_size, status.st_mode


def _text(keys: Keys) -> bytes:
    owners = {
        owner.hex(): [{"id": key.id, "key": key.secret.hex(), "used": key.used} for key in of]
        for owner, of in keys.items()
    }
    content = {"format": FORMAT, "version": FORMAT_VERSION, "owners": owners}
    return json.dumps({"sha256": _sha256(content), **content}).encode()


def _parse(text: bytes) -> Keys:
    """The inverse of `_text`. Raised where no other error is being handled: that one would hold the text."""
    problem, keys = "", {}
    try:
        content = json.loads(text)
        if content.pop("sha256") != _sha256(content):
            problem = "it does not match its checksum"
        elif (content["format"], content["version"]) != (FORMAT, FORMAT_VERSION):
            problem = f"version {content['version']!r} of format {content['format']!r}"
        keys = {
            bytes.fromhex(owner): tuple(Key(k["id"], bytes.fromhex(k["key"]), k["used"]) for k in of)
            for owner, of in content["owners"].items()
        }
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        problem = problem or "it cannot be read"
    if problem:
        raise BadKeyFile(f"not a whole file of keys: {problem}")
    return keys


def _sha256(content: object) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
