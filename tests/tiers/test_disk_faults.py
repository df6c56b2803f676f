"""The disk store and what goes wrong around it: damaged and foreign files, full and read-only disks.

In each case an error says what it is, no wrong bit is returned, nothing that is whole is lost, and a later
put works.
"""

import contextlib
import errno
import json
import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from goldenkv.tiers.disk import DiskStore
from goldenkv.tiers.disk_files import Places, Step
from goldenkv.tiers.disk_index import VERSION, Index
from goldenkv.tiers.disk_recovery import Recovered
from goldenkv.tiers.errors import (
    Corrupt,
    Foreign,
    Full,
    Missing,
    ReadOnly,
    StoreError,
    Truncated,
    Unavailable,
)
from goldenkv.tiers.objects import Address, Item, Kind, Label


def address(owner: int = 1, namespace: int = 1, key: int = 1) -> Address:
    return Address(bytes([owner]) * 32, bytes([namespace]) * 32, bytes([key]) * 32)


A, B = address(), address(key=2)


def item(where: Address = A, size: int = 12, seed: int = 0) -> Item:
    """Rows and their scales, as quantised entries have them."""
    rng = np.random.default_rng([size, seed])
    arrays = {
        "layers.2.entries": rng.integers(0, 256, size).astype(np.uint8),
        "layers.2.scale": rng.standard_normal(4).astype(ml_dtypes.bfloat16),
    }
    return Item.of(where, Kind.PAGE, 16, "test", arrays)


def same(store: DiskStore, expected: Item) -> bool:
    found = store.get(expected.label.address)
    return found.label == expected.label and np.array_equal(found.payload, expected.payload)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[DiskStore]:
    """With two small objects, A and B."""
    with contextlib.closing(DiskStore(tmp_path / "store")) as made:
        made.put(item(A))
        made.put(item(B))
        yield made


def file_of(store: DiskStore, where: Address = A) -> Path:
    return Path(store.places.object(where))


def check(store: DiskStore, gone: Address | None = None) -> None:
    """What is listed is there; B is whole; `gone` is missing, and can be put again."""
    listed = {entry.address: entry.nbytes for entry in store.scan()}
    found = {where: file_of(store, where).stat().st_size for where in listed}
    stats = store.stats()
    assert listed == found and (stats.objects, stats.nbytes) == (len(found), sum(found.values()))
    assert os.listdir(store._writer.folder) == ["lock"]
    if gone is not None:
        assert store.exists([gone]) == [False] and gone not in listed
        assert not os.path.lexists(store.places.object(gone))
        with pytest.raises(Missing):
            store.get(gone)
        store.put(item(gone))
        assert same(store, item(gone)) and store.exists([gone]) == [True]
    assert same(store, item(B))


# Damage -----------------------------------------------------------------------------------------------------


def test_every_byte_counts(store: DiskStore) -> None:
    """vllm-project/vllm#57912: a change that keeps the size went unseen. Size, header, rows and scales."""
    path = file_of(store)
    whole = path.read_bytes()
    for at in range(len(whole)):
        bad = bytearray(whole)
        bad[at] ^= 1 << at % 8
        path.write_bytes(bad)
        with pytest.raises((Corrupt, Foreign)):
            store.get(A)
        assert not path.exists(), at
    check(store, A)


@pytest.mark.parametrize("tensor", ["layers.2.entries", "layers.2.scale"])
def test_without_verification_wrong_bits_would_be_served(store: DiskStore, tensor: str) -> None:
    """So it is the checksum that finds them, not the size or the system."""
    bad = item(A)
    bad.arrays()[tensor].view(np.uint8)[3] ^= 16
    path = file_of(store)
    path.write_bytes(path.read_bytes()[: -len(bad.payload)] + bad.payload.tobytes())
    with contextlib.closing(DiskStore(store.places.folder, verify=False)) as believing:
        assert not np.array_equal(believing.get(A).payload, item(A).payload)
    with pytest.raises(Corrupt, match="payload"):
        store.get(A)
    check(store, A)


EDITS = {
    "layer": (b"layers.2.entries", b"layers.3.entries"),
    "dtype": (b'"dtype":"BF16"', b'"dtype":"BF61"'),
    "another dtype": (b'"dtype":"U8","shape":[12]', b'"dtype":"F32","shape":[3]'),
    "shape": (b'"shape":[12]', b'"shape":[21]'),
    "offsets": (b'"data_offsets":[0,12]', b'"data_offsets":[8,20]'),
    "position": (b'"position":"16"', b'"position":"32"'),
    "key": (b'"key":"01', b'"key":"02'),
    "owner": (b'"owner":"01', b'"owner":"02'),
    "expires": (b'"expires":""', b'"expires":"9"'),
}


@pytest.mark.parametrize("edit", EDITS)
def test_an_edited_header(store: DiskStore, edit: str) -> None:
    """Mesh-LLM/mesh-llm#1228: the payload had a checksum, and what describes it had none."""
    path, (old, new) = file_of(store), EDITS[edit]
    whole = path.read_bytes()
    size = 8 + int.from_bytes(whole[:8], "little")
    assert whole[:size].count(old) == 1
    header = whole[8:size].replace(old, new)
    path.write_bytes(len(header).to_bytes(8, "little") + header + whole[size:])
    with pytest.raises(Corrupt, match="header"):
        store.get(A)
    check(store, A)


LENGTHS = ["0", "1", "7", "8", "9", "head-1", "head", "head+1", "rows-1", "rows", "rows+1", "end-1", "end+1"]


@pytest.mark.parametrize("opening", [False, True], ids=["get", "open"])
@pytest.mark.parametrize("length", LENGTHS)
def test_cut_off(store: DiskStore, length: str, opening: bool) -> None:
    """kvcache-ai/Mooncake#3465: the key was listed, and its value was empty. Found by get, or at opening."""
    path = file_of(store)
    whole = path.read_bytes()
    head = 8 + int.from_bytes(whole[:8], "little")
    ends = {"head": head, "rows": head + 12, "end": len(whole)}
    name, sign, number = length.partition("+") if "+" in length else length.partition("-")
    size = int(length) if length.isdigit() else ends[name] + int(f"{sign}{number or 0}")
    path.write_bytes((whole + b"\0")[:size])
    assert store.exists([A]) == [False]
    if opening:
        with contextlib.closing(DiskStore(store.places.folder)) as again:
            assert again.recovered == Recovered(corrupt=1, dropped=1)
            check(again, A)
        return
    with pytest.raises(Truncated if size < len(whole) else Corrupt):
        store.get(A)
    check(store, A)


def test_damage_of_the_same_size_at_opening(store: DiskStore) -> None:
    """The head is read again where the file is not the one of the row. The payload waits for a get."""
    for where, at in ((A, 300), (B, -1)):
        whole = bytearray(file_of(store, where).read_bytes())
        whole[at] ^= 1
        file_of(store, where).unlink()
        file_of(store, where).write_bytes(whole)
    with contextlib.closing(DiskStore(store.places.folder)) as again:
        assert again.recovered == Recovered(corrupt=1, dropped=1, orphans=1)
        assert again.exists([A, B]) == [False, True]
        with pytest.raises(Corrupt):
            again.get(B)
        again.put(item(B))
        check(again, A)


def test_a_file_that_cannot_be_read_now(store: DiskStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """A broken disk, or too many open files: that is no reason to remove it."""
    store.close()
    Path(store.places.index).unlink()
    pread = os.pread

    def broken(fd: int, size: int, at: int) -> bytes:
        if os.readlink(f"/proc/self/fd/{fd}") == store.places.object(A):
            raise OSError(errno.EIO, "broken")
        return pread(fd, size, at)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pread", broken)
        with contextlib.closing(DiskStore(store.places.folder)) as again:
            assert again.recovered == Recovered(orphans=1, unreadable=1)
            assert again.exists([A, B]) == [False, True]
            with pytest.raises(Unavailable, match="broken"):
                again.get(A)
    with contextlib.closing(DiskStore(store.places.folder)) as again:
        assert again.recovered == Recovered(orphans=1) and same(again, item(A))
        check(again)


def test_a_vanished_file(store: DiskStore) -> None:
    file_of(store).unlink()
    assert store.exists([A, B]) == [False, True]
    with pytest.raises(Missing):
        store.get(A)
    assert store.delete([A]) == 0
    check(store, A)


@pytest.mark.parametrize("opening", [False, True], ids=["get", "open"])
def test_an_object_under_another_name(store: DiskStore, opening: bool) -> None:
    """LMCache/LMCache#4385: what is read carries its own address."""
    shutil.copy(file_of(store, B), file_of(store, A))
    if opening:
        with contextlib.closing(DiskStore(store.places.folder)) as again:
            assert again.recovered == Recovered(corrupt=1, dropped=1)
            check(again, A)
        return
    with contextlib.closing(DiskStore(store.places.folder + "2", verify=False)) as believing:
        believing.put(item(A))
        shutil.copy(file_of(store, B), file_of(believing, A))
        assert believing.get(A).label.address == B
    with pytest.raises(Foreign, match="another address"):
        store.get(A)
    check(store, A)


def test_a_buffer_of_another_size_harms_nothing(store: DiskStore) -> None:
    for size in (0, 19, 21):
        with pytest.raises(Foreign, match=f"{size} were expected"):
            store.get_into(A, np.empty(size, np.uint8))
    assert same(store, item(A)) and store.exists([A]) == [True]


def test_another_component_table(store: DiskStore) -> None:
    old = item(A)
    label = Label(A, Kind.PAGE, 16, "test", old.label.tensors, table="before")
    store.put(Item(label, old.payload))
    with pytest.raises(Foreign, match="component table"):
        store.get(A)
    check(store, A)


def test_a_put_that_mends_is_not_taken_out(store: DiskStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """A get finds damage; before it has removed the file, somebody has put a whole one."""
    file_of(store).write_bytes(b"")
    discard = DiskStore._discard

    def late(self: DiskStore, where: Address) -> None:
        self.put(item(where))
        discard(self, where)

    monkeypatch.setattr(DiskStore, "_discard", late)
    with pytest.raises(Truncated):
        store.get(A)
    assert same(store, item(A)) and store.exists([A]) == [True]


# Foreign things ---------------------------------------------------------------------------------------------


def make_folder(path: Path) -> None:
    path.mkdir(parents=True)
    (path / "theirs").write_text("keep me")


def make_link(path: Path) -> None:
    path.symlink_to("/etc/hostname")


MAKE: dict[str, Callable[[Path], None]] = {
    "folder": make_folder,
    "link": make_link,
    "pipe": lambda path: os.mkfifo(path),
    "text": lambda path: path.write_text("not an object " * 100) and None,  # type: ignore[func-returns-value]
}


@pytest.mark.parametrize("how", ["get", "put", "delete", "open"])
@pytest.mark.parametrize("what", MAKE)
def test_something_else_in_the_place_of_an_object(store: DiskStore, what: str, how: str) -> None:
    """A get says so and is not held up; a put takes the place. Folders, that may hold something, are kept."""
    path = file_of(store)
    path.unlink()
    MAKE[what](path)
    assert store.exists([A]) == [False]
    if how == "get":
        with pytest.raises((Foreign, Corrupt)):
            store.get(A)
    elif how == "put":
        store.put(item(A))
        assert same(store, item(A)) and store.delete([A]) == 1
    elif how == "delete":
        store.delete([A])
    else:
        with contextlib.closing(DiskStore(store.places.folder)) as again:
            assert again.recovered.foreign == (what != "text") and again.recovered.corrupt == (what == "text")
    kept = list(Path(store.places.foreign).rglob("theirs"))
    assert [p.read_text() for p in kept] == (["keep me"] if what == "folder" else [])
    check(store, A)


@pytest.mark.parametrize("level", ["owner", "namespace"])
@pytest.mark.parametrize("how", ["put", "open"])
@pytest.mark.parametrize("what", ["link", "pipe", "text"])
def test_something_else_in_the_place_of_a_folder(store: DiskStore, what: str, level: str, how: str) -> None:
    where = address(7, 7, 7)
    folder = file_of(store, where).parent
    folder = folder.parent if level == "owner" else folder
    folder.parent.mkdir(exist_ok=True)
    MAKE[what](folder)
    with pytest.raises(Missing):
        store.get(where)
    assert store.delete([where]) == 0 and store.delete_owner(where.owner) == 0
    if level == "namespace":
        return  # gone with its owner
    if how == "open":
        with contextlib.closing(DiskStore(store.places.folder)) as again:
            assert again.recovered == Recovered(foreign=1)
    store.put(item(where))
    assert same(store, item(where)) and len(os.listdir(store.places.foreign)) == 1
    check(store)


def test_foreign_files_are_moved_away_at_opening(store: DiskStore) -> None:
    root = Path(store.places.objects)
    made = [root / "readme", root / A.owner.hex() / "readme", file_of(store).parent / "readme"]
    made += [file_of(store).parent / f"{A.key.hex().upper()}x.safetensors"]
    for path in made:
        path.write_text("keep me")
    Path(store.places.folder, "notes.txt").write_text("nobody minds")
    with contextlib.closing(DiskStore(store.places.folder)) as again:
        assert again.recovered == Recovered(foreign=4)
        kept = [path.read_text() for path in Path(store.places.foreign).iterdir()]
        assert kept == ["keep me"] * 4 and not any(path.exists() for path in made)
        check(again)


# The index --------------------------------------------------------------------------------------------------


def garbage(path: Path) -> None:
    path.write_bytes(b"this is no database. " * 500)


def holes(path: Path) -> None:
    """A page in the middle is zero."""
    data = bytearray(path.read_bytes())
    data[4096:-4096] = bytes(len(data) - 8192)
    path.write_bytes(data)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:5000])


def another_version(path: Path) -> None:
    with contextlib.closing(sqlite3.connect(path)) as index:
        index.execute(f"PRAGMA user_version = {VERSION + 1}")


def another_database(path: Path) -> None:
    path.unlink()
    with contextlib.closing(sqlite3.connect(path)) as index:
        index.execute("CREATE TABLE theirs (x)")


def emptied(path: Path) -> None:
    path.write_bytes(b"")


SPOIL = [garbage, holes, cut, another_version, another_database, emptied]


@pytest.mark.parametrize("spoil", SPOIL, ids=lambda f: f.__name__)
def test_an_index_that_cannot_be_used(store: DiskStore, spoil: Callable[[Path], None]) -> None:
    """It is made anew: the files are the truth."""
    store.close()
    spoil(Path(store.places.index))
    with contextlib.closing(DiskStore(store.places.folder)) as again:
        assert again.recovered == Recovered(orphans=2, rebuilt=spoil is not emptied)
        assert same(again, item(A)) and again.exists([A, B]) == [True, True]
        check(again)
    with contextlib.closing(DiskStore(store.places.folder)) as again:
        assert again.recovered == Recovered()


def test_an_index_of_a_living_process_is_not_made_anew(store: DiskStore) -> None:
    """Its process would go on with a file that has no name."""
    another_version(Path(store.places.index))
    with pytest.raises(Unavailable, match=r"version 2.*no other process"):
        DiskStore(store.places.folder)
    assert same(store, item(A))
    store.close()
    with contextlib.closing(DiskStore(store.places.folder)) as again:
        assert again.recovered.rebuilt
        check(again)


def test_an_index_that_breaks_while_it_is_open(store: DiskStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gets go on; everything else says that it cannot."""

    def broken(self: Index, *args: object) -> object:
        raise sqlite3.DatabaseError("database disk image is malformed")

    with monkeypatch.context() as patch:
        patch.setattr(Index, "_ask", broken)
        assert same(store, item(A))
        for call in (
            lambda: store.put(item(B, seed=1)),
            lambda: store.delete([B]),
            lambda: store.delete_owner(B.owner),
            lambda: store.exists([B]),
            lambda: list(store.scan()),
            lambda: store.stats(),
        ):
            with pytest.raises(Unavailable, match="malformed"):
                call()
    check(store)


# A put that fails -------------------------------------------------------------------------------------------

PUT_STEPS = [
    Step.TEMPORARY_CREATED,
    Step.HEAD_WRITTEN,
    Step.PAYLOAD_WRITTEN,
    Step.PAYLOAD_SYNCED,
    Step.PUT_LOCKED,
    Step.FOLDERS_MADE,
    Step.RENAMED,
    Step.RENAME_SYNCED,
    Step.ROW_WRITTEN,
    Step.PUT_COMMITTED,
]
ERRORS: dict[str, tuple[BaseException, type[BaseException]]] = {
    "ENOSPC": (OSError(errno.ENOSPC, "no space"), Full),
    "EDQUOT": (OSError(errno.EDQUOT, "quota"), Full),
    "EROFS": (OSError(errno.EROFS, "read-only"), ReadOnly),
    "EIO": (OSError(errno.EIO, "broken"), Unavailable),
    "sqlite": (sqlite3.OperationalError("disk I/O error"), Unavailable),
    "interrupted": (KeyboardInterrupt(), KeyboardInterrupt),
}


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("step", PUT_STEPS, ids=lambda step: step.name)
def test_a_failed_put_leaves_nothing(tmp_path: Path, step: Step, error: str) -> None:
    """LMCache/LMCache#4991: a failed store stayed visible, and later hits were gibberish."""
    failing, seen = True, []
    raised, named = ERRORS[error]

    def at(reached: Step) -> None:
        if failing and reached is step:
            seen.append(step)
            raise raised

    failing = False
    with contextlib.closing(DiskStore(tmp_path, at=at)) as store:
        store.put(item(B))
        where = address(3)
        failing = True
        with pytest.raises(named):
            store.put(item(where))
        assert seen == [step]
        failing = False
        check(store, where)
        # In the place of an old one: that may be gone, but nothing of the new one is there.
        failing, seen = True, []
        if step is not Step.FOLDERS_MADE:
            with pytest.raises(named):
                store.put(item(where, seed=1))
            failing = False
            if PUT_STEPS.index(step) < PUT_STEPS.index(Step.RENAMED):
                assert same(store, item(where))
                check(store)
            else:
                check(store, where)


def test_without_taking_back_it_would_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above can fail."""

    def at(step: Step) -> None:
        if step is Step.RENAMED:
            raise OSError(errno.ENOSPC, "no space")

    with contextlib.closing(DiskStore(tmp_path, at=at)) as store:
        monkeypatch.setattr(store._changes, "take_back", lambda row: None)
        with pytest.raises(Full):
            store.put(item(A))
        assert same(store, item(A))


def test_a_failed_put_does_not_take_out_the_next_one(tmp_path: Path) -> None:
    """Between its failure and its cleaning up, another process has put under the same address."""
    other = DiskStore(tmp_path)

    def at(step: Step) -> None:
        if step is Step.PUT_COMMITTED:
            other.put(item(A, seed=1))
            raise OSError(errno.EIO, "broken")

    with contextlib.closing(other), contextlib.closing(DiskStore(tmp_path, at=at)) as store:
        with pytest.raises(Unavailable):
            store.put(item(A))
        assert same(store, item(A, seed=1)) and other.exists([A]) == [True]


@pytest.mark.parametrize("step", [Step.DELETE_LOCKED, Step.UNLINKED, Step.UNLINK_SYNCED, Step.ROWS_DELETED])
def test_a_failed_delete_can_be_repeated(tmp_path: Path, step: Step) -> None:
    failing = False

    def at(reached: Step) -> None:
        if failing and reached is step:
            raise OSError(errno.EIO, "broken")

    with contextlib.closing(DiskStore(tmp_path, at=at)) as store:
        store.put(item(A))
        store.put(item(B))
        failing = True
        with pytest.raises(Unavailable):
            store.delete([A])
        failing = False
        assert store.exists([A]) == [step is Step.DELETE_LOCKED]
        store.delete([A])
        check(store, A)


@pytest.mark.parametrize("step", [step for step in Step if step.name.startswith("OWNER")])
def test_a_failed_delete_of_an_owner_can_be_repeated(tmp_path: Path, step: Step) -> None:
    failing = False

    def at(reached: Step) -> None:
        if failing and reached is step:
            raise OSError(errno.EIO, "broken")

    with contextlib.closing(DiskStore(tmp_path, at=at)) as store:
        store.put(item(address(3)))
        store.put(item(B))
        failing = True
        with pytest.raises(Unavailable):
            store.delete_owner(address(3).owner)
        failing = False
        assert store.exists([address(3)]) == [step is Step.OWNER_LOCKED]
        store.delete_owner(address(3).owner)
        check(store, address(3))


@pytest.mark.parametrize("step", [Step.OPEN_LOCKED, Step.WRITER_CREATED, Step.INDEX_OPENED, Step.RECOVERED])
def test_a_failed_opening_holds_nothing(tmp_path: Path, step: Step) -> None:
    def at(reached: Step) -> None:
        if reached is step:
            raise OSError(errno.ENOSPC, "no space")

    open_files = len(os.listdir("/proc/self/fd"))
    with pytest.raises(Full):
        DiskStore(tmp_path, at=at)
    assert len(os.listdir("/proc/self/fd")) == open_files
    with contextlib.closing(DiskStore(tmp_path, timeout=0)) as store:
        assert store.recovered == Recovered()


# Full and read-only disks -----------------------------------------------------------------------------------


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Path]:
    """A file system in memory, of 4 MiB."""
    folder = tmp_path / "mounted"
    folder.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", folder], capture_output=True, text=True
    )
    if done.returncode:
        pytest.skip(f"cannot mount a file system: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", folder], check=True)


def fill(store: DiskStore, size: int) -> int:
    """Puts until the disk is full; returns how many it has kept."""
    for number in range(1000):
        try:
            store.put(item(address(2, 1, number), size, number))
        except Full:
            assert store.exists([address(2, 1, number)]) == [False]
            with pytest.raises(Missing):
                store.get(address(2, 1, number))
            return number
    raise AssertionError("it was never full")


@pytest.mark.parametrize("size", [100, 5000, 300_000])
def test_a_full_disk(mounted: Path, size: int) -> None:
    """The last bytes are taken by others, so that the index finds no room either. A delete makes some.

    Of small objects it takes several: the rows need some 32 KiB.
    """
    with contextlib.closing(DiskStore(mounted / "store")) as store:
        store.put(item(B))
        if size < 300_000:
            (mounted / "others").write_bytes(bytes(3 << 20))
        kept = fill(store, size)
        assert kept >= 2
        with open(mounted / "rest", "wb", buffering=0) as rest, contextlib.suppress(OSError):
            while True:
                rest.write(bytes(4096))
        for number in (1, 2):
            with pytest.raises(Full):
                store.put(item(address(4, number), size))
            assert store.exists([address(4, number)]) == [False]
        check(store)
        assert all(same(store, item(address(2, 1, n), size, n)) for n in range(kept))
        some = [address(2, 1, n) for n in range(min(8, kept - 1))]
        assert store.delete(some) == len(some)
        check(store)
        assert store.delete_owner(address(2).owner) == kept - len(some)
        store.put(item(A, size))
        check(store)
    with contextlib.closing(DiskStore(mounted / "store")) as store:
        assert store.recovered == Recovered() and same(store, item(A, size))


@pytest.mark.parametrize("deletes", ["objects", "an owner"])
def test_an_index_that_finds_no_room_to_delete(
    store: DiskStore, monkeypatch: pytest.MonkeyPatch, deletes: str
) -> None:
    """By then the files are gone, and have made room: it tries once more, and then says so."""
    commit, left = Index.commit, [1]

    def full(self: Index, now: float) -> None:
        if left[0]:
            left[0] -= 1
            limit = self._writer.execute("PRAGMA max_page_count").fetchone()[0]
            self._writer.execute("PRAGMA max_page_count = 1")
            try:
                self._writer.execute("CREATE TABLE large AS SELECT zeroblob(100000)")
            finally:
                self._writer.execute(f"PRAGMA max_page_count = {limit}")
        commit(self, now)

    def delete() -> int:
        return store.delete([A]) if deletes == "objects" else store.delete_owner(A.owner)

    monkeypatch.setattr(Index, "commit", full)
    assert delete() == (1 if deletes == "objects" else 2)
    store.put(item(B))
    check(store, A)
    left[0] = 2
    with pytest.raises(Unavailable, match="full"):
        delete()
    assert store.exists([A]) == [False]
    delete()
    store.put(item(B))
    check(store, A)


@pytest.mark.parametrize("unclean", [False, True])
def test_a_read_only_disk(mounted: Path, unclean: bool) -> None:
    """It can be read: by the index that a clean end has left, and after a crash by index and log."""
    now = [1000.0]
    writer = DiskStore(mounted / "store", clock=lambda: now[0])
    writer.put(item(A), ttl=10)
    writer.put(item(B))
    if unclean:
        shutil.copytree(mounted / "store", mounted / "copy")
        writer.close()
        shutil.rmtree(mounted / "store")
        os.rename(mounted / "copy", mounted / "store")
        # Copies are other files to the index, so say which they are, as a process that dies now would have.
        with contextlib.closing(sqlite3.connect(mounted / "store" / "goldenkv-index.sqlite")) as index, index:
            places = Places(str(mounted / "store"))
            for where in (A, B):
                found = os.stat(places.object(where))
                mark = f"{found.st_ino}:{found.st_mtime_ns}:{found.st_size}"
                index.execute("UPDATE objects SET mark = ? WHERE key = ?", (mark, where.key))
    else:
        writer.close()
    subprocess.run(["mount", "-o", "remount,ro", mounted], check=True)
    store = DiskStore(mounted / "store", clock=lambda: now[0])
    assert store.read_only and same(store, item(A)) and same(store, item(B))
    assert store.exists([A, B, address(9)]) == [True, True, False]
    assert {entry.address for entry in store.scan()} == {A, B} and store.stats().objects == 2
    for change in (
        lambda: store.put(item(address(9))),
        lambda: store.delete([A]),
        lambda: store.delete_owner(A.owner),
    ):
        with pytest.raises(ReadOnly):
            change()
    now[0] = 1010.0
    assert store.exists([A, B]) == [False, True] and [entry.address for entry in store.scan()] == [B]
    with pytest.raises(Missing):
        store.get(A)
    store.close()
    with pytest.raises(ReadOnly, match="no index"):
        DiskStore(mounted / "none")
    subprocess.run(["mount", "-o", "remount,rw", mounted], check=True)


def test_a_disk_that_becomes_read_only(mounted: Path) -> None:
    """While the store is open. That of the index cannot be: it has files open for writing."""
    with contextlib.closing(DiskStore(mounted / "store")) as store:
        store.put(item(B))
        objects = Path(store.places.objects)
        writers = Path(store.places.writers)
        for folder in (objects, writers):
            subprocess.run(["mount", "--bind", folder, folder], check=True)
            subprocess.run(["mount", "-o", "remount,ro,bind", folder], check=True)
        try:
            for change in (lambda: store.put(item(A)), lambda: store.delete([B])):
                with pytest.raises(ReadOnly):
                    change()
            assert same(store, item(B)) and store.exists([A, B]) == [False, True]
        finally:
            for folder in (objects, writers):
                subprocess.run(["umount", folder], check=True)
        check(store, A)


CHILD = """
import contextlib, json, os, resource, sys
sys.path.insert(0, {tests!r})
from test_disk_faults import A, B, DiskStore, Missing, StoreError, check, item, same

def attempt(call):
    try:
        return repr(call())
    except StoreError as error:
        return type(error).__name__

told = []
{body}
print(json.dumps(told))
"""


def in_child(body: str) -> list[str]:
    """Runs lines in a process of their own, which append to `told`."""
    code = CHILD.format(tests=str(Path(__file__).parent), body=body)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_limit_on_the_size_of_files(tmp_path: Path) -> None:
    told = in_child(f"""
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 18, 1 << 18))
with contextlib.closing(DiskStore({str(tmp_path)!r})) as store:
    store.put(item(B))
    told.append(attempt(lambda: store.put(item(A, 1 << 19))))
    told.append(attempt(lambda: store.get(A)))
    told.append(str(store.exists([A])))
    check(store, A)
""")
    assert told == ["Full", "Missing", "[False]"]
    with contextlib.closing(DiskStore(tmp_path)) as store:
        assert store.recovered == Recovered() and same(store, item(A))


def test_a_folder_of_somebody_else() -> None:
    """Another user, who may read and not write. With an index it can be read, also while its owner writes."""
    if os.getuid():
        pytest.skip("only root can become somebody else")
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        with contextlib.closing(DiskStore(f"{folder}/store")) as store:
            store.put(item(A))
            store.put(item(B))
        os.mkdir(f"{folder}/empty")
        open_too = DiskStore(f"{folder}/open")
        open_too.put(item(A))
        with contextlib.closing(open_too):
            told = in_child(f"""
folder = {folder!r}
os.setgroups([])
os.setresgid(65534, 65534, 65534)
os.setresuid(65534, 65534, 65534)
for name in ("store", "open"):
    store = DiskStore(f"{{folder}}/{{name}}")
    told += [store.read_only, same(store, item(A)), store.exists([A]), store.stats().objects]
    told += [attempt(lambda: store.put(item(B))), attempt(lambda: store.delete([A]))]
    store.close()
told.append(attempt(lambda: DiskStore(f"{{folder}}/empty")))
told.append(attempt(lambda: DiskStore(f"{{folder}}/none")))
""")
    assert told == [
        *[True, True, [True], 2, "ReadOnly", "ReadOnly"],
        *[True, True, [True], 1, "ReadOnly", "ReadOnly"],
        *["ReadOnly", "ReadOnly"],
    ]


@pytest.mark.parametrize("what", ["file", "file above"])
def test_a_file_in_the_place_of_the_folder(tmp_path: Path, what: str) -> None:
    (tmp_path / "file").write_text("keep me")
    with pytest.raises(Unavailable, match="opening"):
        DiskStore(tmp_path / "file" if what == "file" else tmp_path / "file" / "store")
    assert (tmp_path / "file").read_text() == "keep me"


def test_errors_are_those_of_the_protocol() -> None:
    """Whoever catches `StoreError` misses none of the above."""
    assert all(
        issubclass(named, StoreError) for _, named in ERRORS.values() if named is not KeyboardInterrupt
    )
