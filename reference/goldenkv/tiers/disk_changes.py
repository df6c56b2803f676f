"""The order of things in a disk store: how an object comes into the folder, and how it goes.

Coming, the file is first and its row last: nothing is listed that is not there. Going, too, the file is first
and the row last: what is no longer listed cannot come back from its file. `Step` names each of these steps.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
from collections.abc import Callable, Sequence

import numpy as np

from .disk_files import SUFFIX, Places, Step, is_folder, mark, mark_at, sync_folder, write_all
from .disk_index import Index, Row
from .objects import Address


class Changes:
    """What changes files and index together. Raises what the system and SQLite raise.

    Args:
        places, index: of the store.
        now: seconds since 1970; it is kept with every change.
        at: is called after each step.
    """

    def __init__(
        self, places: Places, index: Index, now: Callable[[], float], at: Callable[[Step], None]
    ) -> None:
        self.places, self.index, self._now, self._at = places, index, now, at

    def write_temporary(self, path: str, head: bytes, payload: np.ndarray) -> str:
        """Writes a durable file that nobody looks for. Returns its mark."""
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            self._at(Step.TEMPORARY_CREATED)
            write_all(fd, head)
            self._at(Step.HEAD_WRITTEN)
            write_all(fd, payload.data)
            self._at(Step.PAYLOAD_WRITTEN)
            os.fsync(fd)
            self._at(Step.PAYLOAD_SYNCED)
            return mark(os.fstat(fd))
        finally:
            os.close(fd)

    def publish(self, temporary: str, row: Row, check_room: Callable[[], None]) -> None:
        """Gives a durable file its name, and then its row. `check_room` can refuse it."""
        path = self.places.object(row.address)
        with self.index.locked():
            self._at(Step.PUT_LOCKED)
            check_room()
            try:
                os.rename(temporary, path)
            except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
                self.places.make_way(row.address)
                self._at(Step.FOLDERS_MADE)
                os.rename(temporary, path)
            self._at(Step.RENAMED)
            sync_folder(os.path.dirname(path))
            self._at(Step.RENAME_SYNCED)
            self.index.put(row)
            self._at(Step.ROW_WRITTEN)
            self.index.commit(self._now())
        self._at(Step.PUT_COMMITTED)

    def take_back(self, row: Row) -> None:
        """After a `publish` that failed: nothing of its object stays, listed or not."""
        path = self.places.object(row.address)

        def unlink() -> bool:
            if mark_at(path) != row.mark:  # what was there before, or has come since
                return False
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            return True

        try:
            with self.index.locked():
                if unlink():
                    self.index.remove([row.address])
                    self.index.commit(self._now())
        except sqlite3.Error:
            unlink()  # the file is what counts

    def take_out(self, addresses: Sequence[Address]) -> int:
        """Unlinks files, and then commits that their rows are gone. For who holds `index.locked()`.

        Returns:
            How many files there were.
        """
        count, folders = 0, set()
        for address in addresses:
            path = self.places.object(address)
            try:
                os.unlink(path)
            except (FileNotFoundError, NotADirectoryError):
                continue
            except IsADirectoryError:
                self.places.set_aside(path)
                continue
            count += 1
            folders.add(os.path.dirname(path))
            self._at(Step.UNLINKED)
        for folder in sorted(folders):
            sync_folder(folder)
            self._at(Step.UNLINK_SYNCED)
        try:
            self.index.remove(addresses)
            self._at(Step.ROWS_DELETED)
            self.index.commit(self._now())
        except sqlite3.OperationalError as error:
            self._forget(addresses, error)
        self._at(Step.DELETE_COMMITTED)
        return count

    def _forget(self, addresses: Sequence[Address], error: sqlite3.OperationalError) -> None:
        """Tries once more where the disk was too full for a row to go: the files that went have made room."""
        if getattr(error, "sqlite_errorcode", 0) != sqlite3.SQLITE_FULL:
            raise error
        self.index.make_room()
        with self.index.locked():
            self.index.remove([a for a in addresses if mark_at(self.places.object(a)) is None])
            self.index.commit(self._now())

    def take_out_owner(self, owner: bytes, away: str) -> int:
        """Moves the folder of an owner to `away`, in one step that no crash can leave half done; removes it.

        Returns:
            How many files there were.
        """
        folder, count = self.places.owner(owner), 0
        try:
            with self.index.locked():
                self._at(Step.OWNER_LOCKED)
                if is_folder(folder):
                    os.rename(folder, away)
                    self._at(Step.OWNER_MOVED)
                    sync_folder(self.places.objects)
                    self._at(Step.OWNER_SYNCED)
                try:
                    self.index.remove_owner(owner)
                    self._at(Step.OWNER_ROWS_DELETED)
                    self.index.commit(self._now())
                except sqlite3.OperationalError as error:
                    count = _remove_folder(away)
                    self._forget([row.address for row in self.index.scan(owner, None)], error)
            self._at(Step.OWNER_COMMITTED)
        finally:
            count += _remove_folder(away)
        self._at(Step.OWNER_REMOVED)
        return count


def _remove_folder(path: str) -> int:
    """Removes a folder where it is. Returns how many objects were in it."""
    if not is_folder(path):
        return 0
    count = sum(name.endswith(SUFFIX) for _, _, names in os.walk(path) for name in names)
    shutil.rmtree(path)
    return count
