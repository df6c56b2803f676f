"""The store over Mooncake, on a real master on this machine; skipped without the package or its libraries."""

import hashlib
import itertools
import socket
import subprocess
import sys
import time
import urllib.request
import uuid
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import numpy as np
import pytest

from goldenkv.errors import MissingExtra
from goldenkv.tiers.errors import Corrupt, Expired, Foreign, Full, Missing, Truncated, Unavailable
from goldenkv.tiers.mooncake import MooncakeStore, connect
from goldenkv.tiers.objects import Address, Item, Kind, Label, Tensor, make_head
from goldenkv.tiers.store import LARGEST

SEGMENT = 64 << 20


class Master(NamedTuple):
    process: subprocess.Popen[bytes]
    metadata: str
    address: str
    admin: str


def start_master(folder: Path) -> Master:
    engine = pytest.importorskip("mooncake.store", exc_type=ImportError)
    program = Path(engine.__file__).parent / "mooncake_master"
    program.chmod(0o755)
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(3)]
    rpc, metadata, admin = (free.getsockname()[1] for free in sockets)
    for free in sockets:
        free.close()
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [program, "--rpc_address=127.0.0.1", f"--rpc_port={rpc}", "--metrics_host=127.0.0.1",
             f"--metrics_port={admin}", "--enable_http_metadata_server=true",
             "--http_metadata_server_host=127.0.0.1", f"--http_metadata_server_port={metadata}"],
            stdout=log, stderr=log,
        )  # fmt: skip
    master = Master(
        process,
        f"http://127.0.0.1:{metadata}/metadata",
        f"127.0.0.1:{rpc}",
        f"http://127.0.0.1:{admin}",
    )
    deadline = time.monotonic() + 20
    while True:
        try:
            urllib.request.urlopen(f"{master.admin}/get_all_keys", timeout=1).close()
            socket.create_connection(("127.0.0.1", rpc), timeout=1).close()
            return master
        except OSError:
            assert process.poll() is None and time.monotonic() < deadline, (folder / "log").read_text()
            time.sleep(0.05)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Master, Any]]:
    """A master, and an engine in this process that lends it memory."""
    master = start_master(tmp_path_factory.mktemp("mooncake"))
    try:
        engine = connect(
            host="127.0.0.1", metadata=master.metadata, master=master.address, segment=SEGMENT, buffer=SEGMENT
        )
        yield master, engine
        engine.close()
    finally:
        master.process.kill()
        master.process.wait()


@pytest.fixture
def store(cluster: tuple[Master, Any]) -> Iterator[MooncakeStore]:
    master, engine = cluster
    store = MooncakeStore(engine, master.admin, uuid.uuid4().hex, timeout=10)
    yield store
    store.delete([entry.address for entry in store.scan()])


def digest(*parts: object) -> bytes:
    return hashlib.blake2b(repr(parts).encode(), digest_size=32).digest()


def address(number: int = 0, owner: str = "acme", namespace: str = "n") -> Address:
    return Address(digest("owner", owner), digest("namespace", namespace), digest("key", number))


def item(where: Address, size: int = 1000, seed: int = 0) -> Item:
    payload = np.frombuffer(Random(seed).randbytes(size), np.uint8)
    return Item(Label(where, Kind.PAGE, 16, "rows", (Tensor("rows", "uint8", (size,)),)), payload)


def whole(put: Item) -> bytes:
    return make_head(put, None) + put.payload.tobytes()


def same(got: Item, expected: Item) -> None:
    assert got.label == expected.label
    np.testing.assert_array_equal(got.payload, expected.payload)


def name(store: MooncakeStore, where: Address) -> str:
    return store._prefix + "/".join(part.hex() for part in where)


@pytest.mark.parametrize("size", [0, 1, 255, (256 << 10) + 1, 1 << 20, LARGEST])
def test_bits_come_back(store: MooncakeStore, cluster: tuple[Master, Any], size: int) -> None:
    put = item(address(), size)
    assert store.put(put) == cluster[1].get_size(name(store, address()))
    same(store.get(address()), put)
    around = np.full(size + 2, 255, np.uint8)
    assert store.get_into(address(), around[1:-1]).label == put.label
    np.testing.assert_array_equal(around, np.concatenate([[255], put.payload, [255]]))
    assert cluster[1].get(name(store, address())) == whole(put)


def test_a_put_is_a_copy_and_replaces(store: MooncakeStore) -> None:
    """The engine's own `put` keeps what is there, and says that it did what was asked."""
    put = item(address(), 5000)
    changing = Item(put.label, put.payload.copy())
    store.put(changing)
    changing.payload[:] = 0
    same(store.get(address()), put)
    store.put(item(address(), 10, seed=1))
    same(store.get(address()), item(address(), 10, seed=1))


def test_deleted_is_missing(store: MooncakeStore) -> None:
    for number in range(3):
        store.put(item(address(number)))
    same(store.get(address(2)), item(address(2)))  # what was just read goes as well
    assert store.exists([]) == [] and store.delete([]) == 0
    assert store.exists([address(n) for n in (5, 2, 0, 2)]) == [False, True, True, True]
    assert store.delete([address(n) for n in (0, 0, 5, 2)]) == 2
    assert store.exists([address(n) for n in range(3)]) == [False, True, False]
    for number in (0, 2, 5):
        with pytest.raises(Missing):
            store.get(address(number))
    same(store.get(address(1)), item(address(1)))


def test_expired_is_refused(cluster: tuple[Master, Any]) -> None:
    now = [1000.0]
    store = MooncakeStore(cluster[1], cluster[0].admin, uuid.uuid4().hex, 10, clock=lambda: now[0])
    store.put(item(address()), ttl=60)
    now[0] = 1059.999
    same(store.get(address()), item(address()))
    for now[0] in (1060.0, 1000.0):
        with pytest.raises(Expired):
            store.get(address())


def test_damage(store: MooncakeStore, cluster: tuple[Master, Any]) -> None:
    engine, value = cluster[1], whole(item(address(), 100))
    head = len(value) - 100
    for end in [1, 8, head - 1, head, len(value) - 1]:
        engine.upsert(name(store, address()), value[:end])
        with pytest.raises(Truncated):
            store.get(address())
    for at in [0, 1, 7, 8, 40, head // 2, head - 1, head, len(value) - 1]:
        flipped = bytearray(value)
        flipped[at] ^= 1
        engine.upsert(name(store, address()), bytes(flipped))
        with pytest.raises((Corrupt, Foreign)):
            store.get(address())
    engine.upsert(name(store, address()), value)
    same(store.get(address()), item(address(), 100))


def test_a_payload_carries_its_address(store: MooncakeStore, cluster: tuple[Master, Any]) -> None:
    """LMCache#4385."""
    other = item(address(1), seed=1)
    store.put(other)
    for where in (address(0), address(1, owner="globex"), address(1, namespace="m")):
        with pytest.raises(Missing):
            store.get(where)
        cluster[1].upsert(name(store, where), whole(other))
        with pytest.raises(Foreign, match="another address"):
            store.get(where)


def test_scan_and_delete_by_owner(store: MooncakeStore, cluster: tuple[Master, Any]) -> None:
    sizes = {}
    for owner, namespace, number in itertools.product(("a", "b"), ("n", "m"), range(3)):
        where = address(number, owner, namespace)
        sizes[where] = store.put(item(where, number * 100))
    cluster[1].upsert(store._prefix + "something", b"x")
    cluster[1].upsert(address().path(), b"x")  # no prefix
    assert {entry.address: entry.nbytes for entry in store.scan()} == sizes
    owner, namespace = digest("owner", "a"), digest("namespace", "m")
    for wanted in ((owner, None), (None, namespace), (owner, namespace)):
        assert {entry.address for entry in store.scan(*wanted)} == {
            where
            for where in sizes
            if all(part in (None, of) for part, of in zip(wanted, where, strict=False))
        }
    assert store.delete_owner(owner) == 6
    assert {entry.address for entry in store.scan()} == {w for w in sizes if w.owner != owner}
    cluster[1].remove(address().path(), True)


def test_more_than_it_holds(store: MooncakeStore) -> None:
    """It evicts without a word, or has no room: the right bits, or a named error."""
    kept = lost = 0
    for number in range(30):
        try:
            store.put(item(address(number), LARGEST, seed=number))
        except Full:
            assert store.exists([address(number)]) == [False]
    for number in range(30):
        try:
            same(store.get(address(number)), item(address(number), LARGEST, seed=number))
            kept += 1
        except Missing:
            lost += 1
    assert kept > 0 and lost > 0


def test_a_master_that_is_gone_or_hangs(tmp_path: Path) -> None:
    """Every call ends within its time. In another process: the engine itself takes much longer to end."""
    master = start_master(tmp_path)
    code = """if True:
        import os, signal, sys, time, traceback
        import numpy as np
        from goldenkv.tiers.errors import Unavailable
        from goldenkv.tiers.mooncake import MooncakeStore, connect
        from goldenkv.tiers.objects import Address, Item, Kind
        metadata, address, admin, process = sys.argv[1:]
        where = Address(b"o" * 32, b"n" * 32, b"k" * 32)
        item = Item.of(where, Kind.PAGE, 1, "rows", {"x": np.arange(1000, dtype=np.uint8)})
        engine = connect(host="127.0.0.1", metadata=metadata, master=address, segment=64 << 20)
        store = MooncakeStore(engine, admin, timeout=0.5)
        store.put(item)
        assert (store.get(where).payload == item.payload).all()
        for number in (signal.SIGSTOP, signal.SIGKILL):
            os.kill(int(process), number)
            for operation in (
                lambda: store.get(where), lambda: store.put(item), lambda: store.exists([where]),
                lambda: store.delete([where]), lambda: list(store.scan()),
            ):
                began = time.monotonic()
                try:
                    operation()
                except Unavailable as error:
                    assert where.key.hex() not in "".join(traceback.format_exception(error))
                    took = time.monotonic() - began
                    assert took < 3, took
                else:
                    raise AssertionError("no error")
        print("all named", flush=True)
        os._exit(0)
    """
    try:
        done = subprocess.run(
            [sys.executable, "-c", code, *master[1:], str(master.process.pid)],
            capture_output=True, text=True, timeout=60,
        )  # fmt: skip
    finally:
        master.process.kill()
        master.process.wait()
    assert done.stdout.endswith("all named\n"), done.stderr[-3000:]


@pytest.mark.parametrize("gone", ["master", "metadata"])
def test_a_cluster_that_is_not_there(cluster: tuple[Master, Any], gone: str) -> None:
    """The engine itself tries for a minute and a half."""
    there = {"master": cluster[0].address, "metadata": cluster[0].metadata}
    nobody = {"master": "127.0.0.1:1", "metadata": "http://127.0.0.1:1/metadata"}
    began = time.monotonic()
    with pytest.raises(Unavailable, match="not answer"):
        connect(host="127.0.0.1", **(there | {gone: nobody[gone]}))
    assert time.monotonic() - began < 5


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mooncake.store", None)
    with pytest.raises(MissingExtra, match="libibverbs1"):
        connect(host="127.0.0.1", metadata="http://127.0.0.1:1/metadata", master="127.0.0.1:1")
