"""The disk store where nothing breaks: what comes back, what is listed, and until when; order and cost."""

import contextlib
import os
import sqlite3
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import safetensors
from hypothesis import given, settings
from hypothesis import strategies as st

from goldenkv.tiers import disk_changes, disk_files
from goldenkv.tiers.disk import DiskStore
from goldenkv.tiers.disk_files import Places, Step
from goldenkv.tiers.disk_index import Index
from goldenkv.tiers.disk_recovery import Recovered
from goldenkv.tiers.errors import Expired, Full, Missing
from goldenkv.tiers.objects import Address, Item, Kind, make_head
from goldenkv.tiers.store import Entry


def address(owner: int = 1, namespace: int = 1, key: int = 1) -> Address:
    return Address(bytes([owner]) * 32, bytes([namespace]) * 32, bytes([key]) * 32)


def item(where: Address, size: int = 100, seed: int = 0) -> Item:
    data = np.random.default_rng([size, seed]).integers(0, 256, size).astype(np.uint8)
    return Item.of(where, Kind.PAGE, 16, "test", {"layers.2.entries": data})


class Clock:
    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def open_store(tmp_path: Path) -> Iterator[Callable[..., DiskStore]]:
    """Opens the same folder as often as one likes; all are closed at the end."""
    with contextlib.ExitStack() as end:

        def opened(**options: object) -> DiskStore:
            store = DiskStore(tmp_path / "store", **options)  # type: ignore[arg-type]
            end.callback(store.close)
            return store

        yield opened


Open = Callable[..., DiskStore]


def same(store: DiskStore, expected: Item) -> bool:
    found = store.get(expected.label.address)
    return found.label == expected.label and np.array_equal(found.payload, expected.payload)


def missing(store: DiskStore, where: Address) -> bool:
    try:
        store.get(where)
    except Missing:
        return not store.exists([where])[0]
    return False


def total(store: DiskStore) -> tuple[int, int]:
    return store.stats().objects, store.stats().nbytes


# Round trips ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 1, 511, 512, 513, (1 << 20) - 1, 1 << 20, 4 << 20])
def test_round_trip(open_store: Open, size: int) -> None:
    put = item(address(), size)
    nbytes = open_store().put(put)
    store = open_store()
    assert same(store, put)
    buffer = np.full(size, 7, np.uint8)
    assert store.get_into(address(), buffer).label == put.label
    assert np.array_equal(buffer, put.payload)
    assert list(store.scan()) == [Entry(address(), nbytes)]
    assert total(store) == (1, nbytes)


def many(tensors: int) -> Item:
    arrays = {f"layers.{n}.{'entries' * 12}": np.full(3, n % 256, np.uint8) for n in range(tensors)}
    return Item.of(address(), Kind.BOUNDARY, 5, "test", arrays)


@pytest.mark.parametrize("tensors", [0, 1, 90, 400])
def test_round_trip_of_heads(open_store: Open, tensors: int) -> None:
    """A head can be shorter or longer than what is read at once."""
    store = open_store()
    store.put(many(tensors))
    assert same(store, many(tensors))


def test_the_heads_above_lie_on_both_sides() -> None:
    assert len(make_head(many(90), None)) < 16 << 10 < len(make_head(many(400), None))


def test_others_can_read_the_files(open_store: Open) -> None:
    """They are plain safetensors files."""
    arrays = {
        "layers.2.entries": np.arange(12, dtype=np.float32).reshape(3, 4),
        "layers.2.scale": np.arange(6).astype(ml_dtypes.bfloat16).reshape(2, 3),
    }
    store = open_store()
    store.put(Item.of(address(), Kind.PAGE, 16, "test", arrays))
    with safetensors.safe_open(store.places.object(address()), "numpy") as file:
        assert set(file.keys()) == arrays.keys()
        assert np.array_equal(file.get_tensor("layers.2.entries"), arrays["layers.2.entries"])
        assert file.metadata()["key"] == address().key.hex()


def test_the_caller_may_change_what_was_put(open_store: Open) -> None:
    store, put = open_store(), item(address())
    store.put(put)
    expected = item(address())
    put.payload[:] = 0
    assert same(store, expected)


def test_addresses_do_not_mix(open_store: Open) -> None:
    store = open_store()
    put = [
        item(address(*where), seed=n) for n, where in enumerate([(1, 1, 1), (1, 1, 2), (1, 2, 1), (2, 1, 1)])
    ]
    for one in put:
        store.put(one)
    assert all(same(store, one) for one in put)
    assert {e.address for e in store.scan(address().owner)} == {one.label.address for one in put[:3]}
    assert {e.address for e in store.scan(None, address(namespace=2).namespace)} == {address(1, 2, 1)}
    assert store.stats(address(2).owner).objects == 1 and store.stats(address(9).owner).objects == 0
    assert store.delete([address(1, 1, 2), address(9), address(1, 1, 2)]) == 1
    assert missing(store, address(1, 1, 2)) and same(store, put[0])
    assert store.delete_owner(address().owner) == 2
    assert [e.address for e in store.scan()] == [address(2, 1, 1)] and same(store, put[3])
    assert store.delete_owner(address().owner) == 0


def test_a_scan_goes_on_while_things_change(open_store: Open) -> None:
    """Also over more rows than are read at once."""
    store = open_store()
    with store._index.locked():
        for n in range(600):
            where = Address(b"o" * 32, b"n" * 32, n.to_bytes(32))
            store._index.put(disk_changes.Row(where, 1, None, ""))
        store._index.commit(0)
    seen = []
    for entry in store.scan(b"o" * 32):
        seen.append(int.from_bytes(entry.address.key))
        store.delete([Address(b"o" * 32, b"n" * 32, (599 - seen[-1]).to_bytes(32))])
    assert seen == list(range(600 - 256)), "a batch of 256, and what was left of the rest"
    assert total(store) == (256, 256)


@pytest.mark.parametrize("part", [b"", b"x" * 31, b"x" * 33])
def test_bad_names(open_store: Open, part: bytes) -> None:
    """An empty one, as a path, would be the folder above."""
    store = open_store()
    store.put(item(address()))
    for where in (address()._replace(owner=part), address()._replace(key=part)):
        for call in (
            lambda w=where: store.get(w),
            lambda w=where: store.delete([address(), w]),
            lambda w=where: store.put(item(w)),
        ):
            with pytest.raises(ValueError, match="32 bytes"):
                call()
    with pytest.raises(ValueError, match="32 bytes"):
        store.delete_owner(part)
    assert same(store, item(address()))


@pytest.mark.parametrize("capacity", [0, -1])
def test_bad_capacity(tmp_path: Path, capacity: int) -> None:
    with pytest.raises(ValueError, match="capacity"):
        DiskStore(tmp_path, capacity)


def test_closed_twice(open_store: Open) -> None:
    store = open_store()
    store.close()
    store.close()
    assert os.listdir(store.places.writers) == []


# Capacity ---------------------------------------------------------------------------------------------------


def test_capacity_is_exact(open_store: Open) -> None:
    size = open_store().put(item(address()))
    store = open_store(capacity=2 * size)
    store.put(item(address(key=2)))
    assert total(store) == (2, 2 * size) and store.stats().capacity == 2 * size
    with pytest.raises(Full, match=" 0 are free"):
        store.put(item(address(key=3)))
    assert missing(store, address(key=3)) and os.listdir(store._writer.folder) == ["lock"]
    store.put(item(address(), seed=1))  # in the place of an old one of the same size
    assert same(store, item(address(), seed=1))
    with pytest.raises(Full):
        store.put(item(address(), 101))
    assert same(store, item(address(), seed=1)), "what is there stays where the new one is refused"
    store.put(item(address(), 99))
    store.delete([address(key=2)])
    store.put(item(address(key=3)))
    assert total(store)[0] == 2


def test_capacity_holds_between_stores(open_store: Open) -> None:
    """Both think that there is room when they begin; only one of them is right."""
    size = open_store().put(item(address()))
    other = open_store(capacity=2 * size)

    def at(step: Step) -> None:
        if step is Step.PAYLOAD_SYNCED:
            other.put(item(address(key=3)))

    with pytest.raises(Full):
        open_store(capacity=2 * size, at=at).put(item(address(key=2)))
    assert total(other) == (2, 2 * size) and missing(other, address(key=2))


def test_what_has_expired_makes_room(open_store: Open) -> None:
    clock = Clock()
    size = open_store(clock=clock).put(item(address()), ttl=10)
    store = open_store(capacity=size, clock=clock)
    with pytest.raises(Full):
        store.put(item(address(key=2)), ttl=10)
    clock.now += 10
    store.put(item(address(key=2)), ttl=10)
    assert total(store) == (1, size)


# Time -------------------------------------------------------------------------------------------------------


def test_expiry(open_store: Open) -> None:
    clock = Clock()
    store = open_store(clock=clock)
    store.put(item(address()), ttl=10)
    clock.now = 1009.999
    assert same(store, item(address())) and store.exists([address()]) == [True]
    (entry,) = store.scan()
    assert entry.expires == 1010.0
    clock.now = 1010.0
    with pytest.raises(Expired):
        store.get(address())
    assert store.exists([address()]) == [False] and not list(store.scan()) and total(store) == (0, 0)
    assert not os.path.exists(store.places.object(address()))


ASK: dict[str, Callable[[DiskStore], object]] = {
    "get": lambda store: missing(store, address()),
    "exists": lambda store: store.exists([address()]),
    "scan": lambda store: list(store.scan()),
    "stats": lambda store: store.stats(),
    "put": lambda store: store.put(item(address(key=2))),
    "delete": lambda store: store.delete([address(key=2)]),
    "delete owner": lambda store: store.delete_owner(address(2).owner),
    "close": lambda store: store.close(),
    "open": lambda store: DiskStore(store.places.folder, clock=store._clock).close(),
}


@pytest.mark.parametrize("ask", ASK)
@pytest.mark.parametrize("orphan", [False, True])
def test_a_clock_that_goes_back_revives_nothing(open_store: Open, ask: str, orphan: bool) -> None:
    """Not even after a restart, once anybody was told a later time; also of a file without row."""
    clock = Clock()
    store = open_store(clock=clock)
    store.put(item(address()), ttl=10)
    if orphan:
        with store._index.locked():
            store._index.remove([address()])
            store._index.commit(0)
    clock.now = 1010.0
    if orphan and ask in ("exists", "scan", "stats"):
        store.put(item(address(key=3)))  # these do not see it
    ASK[ask](store)
    clock.now = 900.0
    again = open_store(clock=clock)
    assert missing(again, address())
    assert total(again)[0] == len(list(again.scan()))


def test_without_its_memory_it_would(open_store: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests above can fail."""
    monkeypatch.setattr(Index, "latest", lambda self: 0.0)
    clock = Clock()
    store = open_store(clock=clock)
    store.put(item(address()), ttl=10)
    clock.now = 1010.0
    store.close()
    clock.now = 900.0
    assert same(open_store(clock=clock), item(address()))


# Restart ----------------------------------------------------------------------------------------------------


def test_restart(open_store: Open) -> None:
    """LMCache/LMCache#4778: the index was in memory only, and the files stayed for ever."""
    store = open_store()
    put = [item(address(1, n % 2, n), size=n, seed=n) for n in range(5)]
    for one in put:
        store.put(one)
    before = total(store)
    store.close()
    again = open_store()
    assert again.recovered == Recovered() and total(again) == before
    assert all(same(again, one) for one in put)


@pytest.mark.parametrize("ends", [["", "-wal", "-shm"], [""]])
def test_restart_without_index(open_store: Open, ends: list[str]) -> None:
    """The files are enough."""
    store = open_store(clock=Clock())
    store.put(item(address()), ttl=10)
    store.put(item(address(key=2)))
    before, entries = total(store), list(store.scan())
    store.close()
    for end in ends:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(store.places.index + end)
    again = open_store(clock=Clock())
    assert again.recovered == Recovered(orphans=2)
    assert total(again) == before and list(again.scan()) == entries and same(again, item(address()))


def test_opening_reads_no_payload(open_store: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor heads, of files that are as they were."""
    store = open_store()
    for key in range(5):
        store.put(item(address(key=key), 1 << 20))
    store.close()
    read: list[int] = []
    pread = os.pread
    monkeypatch.setattr(disk_files.os, "pread", lambda fd, n, at: read.append(n) or pread(fd, n, at))
    monkeypatch.setattr(disk_files.os, "preadv", lambda *a: pytest.fail("a payload was read"))
    open_store().close()
    assert read == []
    os.unlink(store.places.index)
    assert open_store().recovered.orphans == 5
    assert sum(read) <= 5 * (16 << 10)


# Order and cost ---------------------------------------------------------------------------------------------


def calls(monkeypatch: pytest.MonkeyPatch, do: Callable[[], object]) -> list[str]:
    """What is asked of the system, and what the index commits, in order."""
    seen: list[str] = []
    real = {name: getattr(os, name) for name in ("fsync", "rename", "unlink")}
    commit = Index.commit

    def kind(fd: int) -> str:
        return "folder" if os.path.isdir(f"/proc/self/fd/{fd}") else "file"

    def committed(self: Index, now: float) -> None:
        commit(self, now)
        seen.append("commit")

    monkeypatch.setattr(os, "fsync", lambda fd: (seen.append(f"fsync {kind(fd)}"), real["fsync"](fd))[1])
    for name in ("rename", "unlink"):
        monkeypatch.setattr(os, name, lambda *a, n=name, **k: (seen.append(n), real[n](*a, **k))[1])
    monkeypatch.setattr(Index, "commit", committed)
    do()
    return seen


def test_the_order_of_calls(open_store: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """What no kill -9 can show: what is durable before what. New folders are durable, too."""
    store = open_store()
    store.put(item(address()))
    with monkeypatch.context() as patch:
        done = calls(patch, lambda: store.put(item(address(key=2))))
        assert done == ["fsync file", "rename", "fsync folder", "commit"]
    with monkeypatch.context() as patch:
        done = calls(patch, lambda: store.put(item(address(2))))
        assert done == [
            "fsync file",
            "rename",
            "fsync folder",
            "fsync folder",
            "rename",
            "fsync folder",
            "commit",
        ]
    with monkeypatch.context() as patch:
        done = calls(patch, lambda: store.delete([address(), address(2)]))
        assert done == ["unlink", "unlink", "fsync folder", "fsync folder", "commit"]
    with monkeypatch.context() as patch:
        done = calls(patch, lambda: store.delete_owner(address().owner))
        assert done[:3] == ["rename", "fsync folder", "commit"]


def test_a_get_asks_the_file_alone(open_store: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store()
    store.put(item(address()))
    with monkeypatch.context() as patch:
        patch.delattr(store, "_index")
        assert same(store, item(address()))
        with pytest.raises(Missing):
            store.get(address(key=2))


def test_stats_do_not_count(open_store: Open) -> None:
    """Totals are kept per owner: SQLite looks one row up, however many objects there are."""
    store = open_store()
    plan = store._index._ask("EXPLAIN QUERY PLAN SELECT objects, nbytes FROM totals WHERE owner = ?", b"x")
    assert [row[3] for row in plan] == ["SEARCH totals USING PRIMARY KEY (owner=?)"]


def test_threads(open_store: Open) -> None:
    """Eight at once on six addresses: every hit has bits of its own address; sums are right at the end."""
    store = open_store()
    wheres = [address(1 + n % 2, 1, n) for n in range(6)]
    wrong: list[object] = []

    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        try:
            for _ in range(25):
                n = int(rng.integers(6))
                match int(rng.integers(4)):
                    case 0 | 1:
                        store.put(item(wheres[n], 200 + n, int(rng.integers(2))))
                    case 2:
                        with contextlib.suppress(Missing):
                            found = store.get(wheres[n]).payload
                            if not any(
                                np.array_equal(found, item(wheres[n], 200 + n, s).payload) for s in (0, 1)
                            ):
                                wrong.append(n)
                        store.exists(wheres)
                    case 3:
                        store.delete([wheres[n]])
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    entries = list(store.scan())
    assert total(store) == (len(entries), sum(entry.nbytes for entry in entries))
    assert [entry.address in {e.address for e in entries} for entry in entries] == store.exists(
        [entry.address for entry in entries]
    )


# Against a dictionary ---------------------------------------------------------------------------------------

KEYS = [address(1, 1, 1), address(1, 2, 1), address(2, 1, 1)]
OPERATIONS = st.one_of(
    st.tuples(
        st.just("put"),
        st.sampled_from(KEYS),
        st.sampled_from([0, 1, 100, 300]),
        st.sampled_from([None, 5, 50]),
    ),
    st.tuples(st.just("delete"), st.lists(st.sampled_from(KEYS), max_size=3)),
    st.tuples(st.just("owner"), st.sampled_from([KEYS[0].owner, KEYS[2].owner])),
    st.tuples(st.just("clock"), st.sampled_from([-20.0, 4.999, 5.0, 100.0])),
    st.tuples(st.just("reopen")),
    st.tuples(st.just("crash")),
)


def behaves(folder: Path, operations: list[tuple]) -> None:
    """Does the same to a store and to a dictionary, and compares all that can be asked."""
    clock, capacity, latest = Clock(), 3000, 1000.0
    store = DiskStore(folder, capacity, clock=clock)
    model: dict[Address, tuple[Item, int, float | None]] = {}
    for number, (name, *values) in enumerate(operations):
        if name == "put":
            put = item(values[0], values[1], number)
            until = None if values[2] is None else latest + values[2]
            nbytes = len(make_head(put, until)) + values[1]
            used = sum(n for where, (_, n, _) in model.items() if where != values[0])
            try:
                assert store.put(put, values[2]) == nbytes
                assert used + nbytes <= capacity
                model[values[0]] = put, nbytes, until
            except Full:
                assert used + nbytes > capacity
        elif name == "delete":
            assert store.delete(values[0]) == len(model.keys() & set(values[0]))
            model = {where: kept for where, kept in model.items() if where not in values[0]}
        elif name == "owner":
            assert store.delete_owner(values[0]) == sum(where.owner == values[0] for where in model)
            model = {where: kept for where, kept in model.items() if where.owner != values[0]}
        elif name == "clock":
            clock.now += values[0]
            latest = max(latest, clock.now)
        else:
            if name == "reopen":
                store.close()
            store = DiskStore(folder, capacity, clock=clock)
        model = {where: kept for where, kept in model.items() if kept[2] is None or kept[2] > latest}
        assert store.exists(KEYS) == [where in model for where in KEYS]
        assert list(store.scan()) == [Entry(w, n, until) for w, (_, n, until) in sorted(model.items())]
        for owner in (None, KEYS[0].owner, KEYS[2].owner):
            sizes = [n for where, (_, n, _) in model.items() if owner in (None, where.owner)]
            stats = store.stats(owner)
            assert (stats.objects, stats.nbytes) == (len(sizes), sum(sizes))
        for where in KEYS:
            assert same(store, model[where][0]) if where in model else missing(store, where)
    store.close()


MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
"""A folder in memory, where there is one: thousands of fsyncs, and none of them matters here."""


@settings(max_examples=max(1, settings().max_examples // 2))
@given(operations=st.lists(OPERATIONS, max_size=12))
def test_it_behaves_as_a_dictionary(operations: list[tuple]) -> None:
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        behaves(Path(folder), operations)


SCRIPT = [
    ("put", KEYS[0], 100, None), ("put", KEYS[1], 1, 5), ("put", KEYS[0], 300, None),
    ("clock", 5.0), ("clock", -20.0), ("crash",),
    ("put", KEYS[2], 100, 50), ("delete", [KEYS[0]]), ("put", KEYS[0], 1, None), ("reopen",),
    ("owner", KEYS[0].owner),
]  # fmt: skip
WRONG: dict[str, tuple[type, str, Callable]] = {
    "deletes the file alone": (Index, "remove", lambda self, addresses: None),
    "deletes an owner's files alone": (Index, "remove_owner", lambda self, owner: None),
    "never sweeps": (Index, "expired", lambda self, now, most=-1: []),
    "forgets the time": (Index, "latest", lambda self: 0.0),
}


def test_the_script_is_right(tmp_path: Path) -> None:
    behaves(tmp_path, SCRIPT)


@pytest.mark.parametrize("name", WRONG)
def test_the_dictionary_finds_faults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(*WRONG[name])
    with pytest.raises(AssertionError):
        behaves(tmp_path, SCRIPT)


def test_totals_cannot_drift(open_store: Open) -> None:
    """They are kept by the index itself: without its triggers they would be wrong."""
    store = open_store()
    store.put(item(address()))
    right = total(store)
    with contextlib.closing(sqlite3.connect(Places(store.places.folder).index)) as index:
        index.execute("DROP TRIGGER added")
    store.put(item(address(key=2)))
    assert total(store) == right and len(list(store.scan())) == 2
