"""What the disk store does when it is opened: it makes the index say what the files are.

No payload is read, so it takes as long as a listing of the files. A file whose mark is that of its row is
left alone; of every other one the head is read and verified. Payloads are verified when they are asked for.

Each namespace is one transaction, so other processes can work on the same folder meanwhile, and a crash here
leaves nothing that the next opening does not mend.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass

from .disk_files import SUFFIX, Places, Step, dead_writers, inspect, mark
from .disk_index import Index, Row, Unusable
from .errors import StoreError, Unavailable
from .objects import DIGEST_BYTES, Address


@dataclass(slots=True)
class Recovered:
    """What was found when a store was opened. All zero where it was closed, and nobody touched its files.

    Attributes:
        temporaries: what dead processes were writing, or had thrown away: removed.
        orphans: whole objects whose row was missing, or of another file: they have their row now.
        dropped: rows without a file: deleted.
        corrupt: files under the name of an object that are not that object, or not whole: removed.
        unreadable: files that the system does not let us read: left alone, and not listed.
        foreign: all else within `objects`, folders and links too: moved to `foreign`.
        rebuilt: whether the index was damaged or of another version, and was made anew from the files.
    """

    temporaries: int = 0
    orphans: int = 0
    dropped: int = 0
    corrupt: int = 0
    unreadable: int = 0
    foreign: int = 0
    rebuilt: bool = False


class Recovery:
    """Opens a folder that can be written. For who holds `disk_files.opening`.

    Args:
        places: the folder.
        at: is told of every step.
    """

    def __init__(self, places: Places, at: Callable[[Step], None]) -> None:
        self.places, self._at = places, at
        self.found = Recovered()

    def remove_dead(self, mine: str | None = None) -> bool:
        """Removes what dead processes left. Returns whether another one than `mine` is alive."""
        dead, alive = dead_writers(self.places, mine)
        for folder in dead:
            for name in sorted(set(os.listdir(folder)) - {"lock"}):
                path = f"{folder}/{name}"
                shutil.rmtree(path) if os.path.isdir(path) else os.unlink(path)
                self.found.temporaries += 1
                self._at(Step.LEFTOVER_REMOVED)
            shutil.rmtree(folder)
            self._at(Step.WRITER_REMOVED)
        return alive

    def open_index(self, alive: bool, timeout: float) -> Index:
        """The index, made anew where it cannot be used; `mend` fills it.

        Args:
            alive: whether other processes may have it open.
            timeout: seconds to wait for them.

        Raises:
            Unavailable: it cannot be used, and they do.
        """
        try:
            return Index(self.places.index, timeout)
        except Unusable as error:
            if alive:
                raise Unavailable(f"{error}; it can be made anew once no other process uses it") from error
        # The log first: the new index must not take it for its own.
        for end in ("-wal", "-shm", ""):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.places.index + end)
                self._at(Step.INDEX_REMOVED)
        self.found.rebuilt = True
        return Index(self.places.index, timeout)

    def mend(self, index: Index, now: Callable[[], float]) -> None:
        """Makes the index say what the files are. `now`: seconds since 1970."""
        with index.locked():
            pairs = {
                (owner, namespace)
                for owner in self._digests(self.places.objects)
                for namespace in self._digests(self.places.owner(owner))
            }
        for owner, namespace in sorted(pairs | index.namespaces()):
            with index.locked():
                self._mend_namespace(index, owner, namespace)
                index.commit(now())
            self._at(Step.NAMESPACE_COMMITTED)
        self._at(Step.RECOVERED)

    def _mend_namespace(self, index: Index, owner: bytes, namespace: bytes) -> None:
        """Compares the files of one namespace with their rows. The index is locked."""
        rows = index.rows(owner, namespace)
        for entry in _listing(self.places.namespace(owner, namespace)):
            key = _digest(entry.name.removesuffix(SUFFIX)) if entry.name.endswith(SUFFIX) else None
            if key is None or not entry.is_file(follow_symlinks=False):
                self._set_aside(entry.path)
            elif key in rows and rows[key].mark == mark(entry.stat(follow_symlinks=False)):
                del rows[key]
            elif row := self._read_row(entry.path, Address(owner, namespace, key)):
                index.put(row)
                rows.pop(key, None)
                self.found.orphans += 1
                self._at(Step.ROW_MENDED)
        if rows:
            index.remove(row.address for row in rows.values())
            self.found.dropped += len(rows)
            self._at(Step.ROWS_DROPPED)

    def _read_row(self, path: str, address: Address) -> Row | None:
        """The row of a file. None where it is not that object; it is gone then."""
        try:
            head, nbytes, found = inspect(path, address)
        except (OSError, Unavailable):
            self.found.unreadable += 1
        except StoreError:
            os.unlink(path)
            self.found.corrupt += 1
            self._at(Step.BAD_REMOVED)
        else:
            return Row(address, nbytes, head.expires, found)
        return None

    def _digests(self, folder: str) -> list[bytes]:
        """The digests that name the folders in a folder. All else is moved away."""
        digests = []
        for entry in _listing(folder):
            digest = _digest(entry.name)
            if digest is not None and entry.is_dir(follow_symlinks=False):
                digests.append(digest)
            else:
                self._set_aside(entry.path)
        return digests

    def _set_aside(self, path: str) -> None:
        self.places.set_aside(path)
        self.found.foreign += 1
        self._at(Step.SET_ASIDE)


def _listing(folder: str) -> list[os.DirEntry]:
    try:
        with os.scandir(folder) as entries:
            return sorted(entries, key=lambda entry: entry.name)
    except FileNotFoundError:
        return []


def _digest(name: str) -> bytes | None:
    """The digest of which this is the name, as `Address.path` writes it."""
    try:
        digest = bytes.fromhex(name)
    except ValueError:
        return None
    return digest if len(digest) == DIGEST_BYTES and digest.hex() == name else None
