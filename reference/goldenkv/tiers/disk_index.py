"""The index of the disk store: a SQLite file that lists the objects, and adds them up per owner.

Its lock is the lock of the whole store: whoever renames or unlinks an object does so within a transaction.

`synchronous=NORMAL` does not wait for the disk at a commit. After a power failure the last rows may be old,
and that is enough: a row that was lost is read again from its file, and one that came back finds no file.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple
from urllib.parse import quote

from .objects import Address

VERSION = 1

_SCHEMA = (
    """
    CREATE TABLE objects (
        owner BLOB, namespace BLOB, key BLOB,
        nbytes INTEGER NOT NULL,  -- of the file
        expires REAL,             -- seconds since 1970
        mark TEXT NOT NULL,       -- of the file, see disk_files.mark
        PRIMARY KEY (owner, namespace, key)
    ) WITHOUT ROWID
    """,
    "CREATE INDEX by_expiry ON objects (expires) WHERE expires IS NOT NULL",
    # Of each owner, and under 'all' of all: text, so it is nobody's digest.
    "CREATE TABLE totals (owner PRIMARY KEY, objects INTEGER, nbytes INTEGER) WITHOUT ROWID",
    """
    CREATE TRIGGER added AFTER INSERT ON objects BEGIN
        INSERT INTO totals VALUES (NEW.owner, 1, NEW.nbytes), ('all', 1, NEW.nbytes)
            ON CONFLICT DO UPDATE SET objects = objects + 1, nbytes = nbytes + excluded.nbytes;
    END
    """,
    """
    CREATE TRIGGER changed AFTER UPDATE ON objects BEGIN
        UPDATE totals SET nbytes = nbytes - OLD.nbytes + NEW.nbytes WHERE owner IN (OLD.owner, 'all');
    END
    """,
    """
    CREATE TRIGGER removed AFTER DELETE ON objects BEGIN
        UPDATE totals SET objects = objects - 1, nbytes = nbytes - OLD.nbytes
            WHERE owner IN (OLD.owner, 'all');
        DELETE FROM totals WHERE owner IN (OLD.owner, 'all') AND objects = 0;
    END
    """,
    "CREATE TABLE clock (latest REAL NOT NULL)",
    "INSERT INTO clock VALUES (0)",
    f"PRAGMA user_version = {VERSION}",
)
_COLUMNS = "owner, namespace, key, nbytes, expires, mark"
_ONE = "owner = ? AND namespace = ? AND key = ?"
_BATCH = 256


class Unusable(Exception):
    """A damaged index, or one of another version. The files are the truth: make a new one."""


class Row(NamedTuple):
    """An object: its address, the bytes of its file, seconds since 1970 or None, the mark of its file."""

    address: Address
    nbytes: int
    expires: float | None
    mark: str


class Index:
    """One connection for changes and one for questions, so that these do not wait for a put.

    Every method may raise `sqlite3.Error`.
    """

    def __init__(self, path: str, timeout: float, writable: bool = True) -> None:
        """Opens, and makes if need be.

        Args:
            path: of the file.
            timeout: seconds to wait for other processes.
            writable: False opens what is there, in a folder that cannot be written.

        Raises:
            Unusable: see there.
        """
        self._writing, self._reading = threading.RLock(), threading.Lock()
        uri = f"file:{quote(os.path.abspath(path))}"
        if not writable:
            # Where no log stands beside it, nobody has it open, and SQLite need not try to make one.
            uri += "?mode=ro" if os.path.exists(f"{path}-wal") else "?immutable=1"

        def connect() -> sqlite3.Connection:
            return sqlite3.connect(
                uri, timeout=timeout, isolation_level=None, check_same_thread=False, uri=True
            )

        self._reader = connect()
        self._writer = connect() if writable else self._reader
        try:
            if writable:
                self._writer.execute("PRAGMA journal_mode = WAL")
                self._writer.execute("PRAGMA synchronous = NORMAL")
                self._make()
            self._check()
        except BaseException as error:
            self.close()
            code = getattr(error, "sqlite_errorcode", 0) & 0xFF
            if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
                raise Unusable(f"the index is damaged: {error}") from error
            raise

    def _make(self) -> None:
        with self.locked():
            if not self._writer.execute("SELECT count(*) FROM sqlite_schema").fetchone()[0]:
                for statement in _SCHEMA:
                    self._writer.execute(statement)
                self._writer.execute("COMMIT")

    def _check(self) -> None:
        (version,) = self._reader.execute("PRAGMA user_version").fetchone()
        if version != VERSION:
            raise Unusable(f"an index of version {version}, this code reads {VERSION}")
        (found,) = self._reader.execute("PRAGMA quick_check(1)").fetchone()
        if found != "ok":
            raise Unusable(f"the index is damaged: {found}")

    # Changes ------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Nobody else, in any process, changes the store meanwhile. What is not committed is undone."""
        with self._writing:
            self._writer.execute("BEGIN IMMEDIATE")
            try:
                yield
            finally:
                if self._writer.in_transaction:
                    self._writer.execute("ROLLBACK")

    def put(self, row: Row) -> None:
        """Writes a row, in place of one with its address."""
        self._writer.execute(
            f"INSERT INTO objects ({_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT DO UPDATE"
            " SET nbytes = excluded.nbytes, expires = excluded.expires, mark = excluded.mark",
            (*row.address, *row[1:]),
        )

    def remove(self, addresses: Iterable[Address]) -> None:
        """Deletes rows, where they are."""
        self._writer.executemany(f"DELETE FROM objects WHERE {_ONE}", addresses)

    def remove_owner(self, owner: bytes) -> None:
        """Deletes all rows of an owner."""
        self._writer.execute("DELETE FROM objects WHERE owner = ?", (owner,))

    def commit(self, now: float) -> None:
        """Ends what `locked` began, and keeps the time, seconds since 1970, if it is later than before."""
        self._writer.execute("UPDATE clock SET latest = ?1 WHERE latest < ?1", (now,))
        self._writer.execute("COMMIT")

    def make_room(self) -> None:
        """After a change that found no room: undoes it, and lets the next one reuse the room of the log."""
        if self._writer.in_transaction:
            self._writer.execute("ROLLBACK")
        self._writer.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()

    # Questions ----------------------------------------------------------------------------------------------

    def find(self, addresses: Sequence[Address]) -> list[Row | None]:
        """The rows of these addresses."""
        with self._reading:
            query = f"SELECT {_COLUMNS} FROM objects WHERE {_ONE}"
            found = [self._reader.execute(query, address).fetchall() for address in addresses]
        return [_row(*rows[0]) if rows else None for rows in found]

    def rows(self, owner: bytes, namespace: bytes) -> dict[bytes, Row]:
        """All rows of a namespace, by key."""
        query = f"SELECT {_COLUMNS} FROM objects WHERE owner = ? AND namespace = ?"
        return {row[2]: _row(*row) for row in self._ask(query, owner, namespace)}

    def namespaces(self) -> set[tuple[bytes, bytes]]:
        """All (owner, namespace) that have rows."""
        return set(self._ask("SELECT DISTINCT owner, namespace FROM objects"))

    def scan(self, owner: bytes | None, namespace: bytes | None) -> Iterator[Row]:
        """All rows, of an owner, of a namespace, in the order of addresses. Changes can come between."""
        after = (b"" if owner is None else owner, b"", b"")
        only = {"owner": owner, "namespace": namespace}
        given = [value for value in only.values() if value is not None]
        query = (
            f"SELECT {_COLUMNS} FROM objects WHERE (owner, namespace, key) > (?, ?, ?)"
            + "".join(f" AND {name} = ?" for name, value in only.items() if value is not None)
            + f" ORDER BY owner, namespace, key LIMIT {_BATCH}"
        )
        while rows := self._ask(query, *after, *given):
            yield from (_row(*row) for row in rows)
            after = rows[-1][:3]

    def expired(self, now: float, most: int = -1) -> list[Address]:
        """What has expired at `now`, seconds since 1970; -1: all of it."""
        query = "SELECT owner, namespace, key FROM objects WHERE expires <= ? LIMIT ?"
        return [Address(*row) for row in self._ask(query, now, most)]

    def totals(self, owner: bytes | None) -> tuple[int, int]:
        """Objects and bytes of an owner, or of all."""
        query = "SELECT objects, nbytes FROM totals WHERE owner = ?"
        rows = self._ask(query, "all" if owner is None else owner)
        return rows[0] if rows else (0, 0)

    def latest(self) -> float:
        """The latest time at which anything was committed."""
        return self._ask("SELECT latest FROM clock")[0][0]

    def close(self) -> None:
        """Ends both connections."""
        self._writer.close()
        self._reader.close()

    def _ask(self, query: str, *values: object) -> list:
        with self._reading:
            return self._reader.execute(query, values).fetchall()


def _row(owner: bytes, namespace: bytes, key: bytes, nbytes: int, expires: float | None, mark: str) -> Row:
    return Row(Address(owner, namespace, key), nbytes, expires, mark)
