"""The suite on every store of ours, alone and wrapped. What a machine lacks is skipped, with the reason."""

from __future__ import annotations

import socket
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import pytest
from hypothesis import settings

from goldenkv.conform import StoreSuite
from goldenkv.errors import MissingExtra
from goldenkv.tiers.device import DeviceStore
from goldenkv.tiers.disk import DiskStore
from goldenkv.tiers.faults import Faulty
from goldenkv.tiers.host import HostStore
from goldenkv.tiers.keyring import KeyRing
from goldenkv.tiers.mooncake import MooncakeStore
from goldenkv.tiers.mooncake import connect as connect_mooncake
from goldenkv.tiers.objects import Address
from goldenkv.tiers.objectstore import ObjectStore
from goldenkv.tiers.parts import Parts
from goldenkv.tiers.quota import Quota
from goldenkv.tiers.redis import RedisStore, connect
from goldenkv.tiers.seal import OVERHEAD, Sealed
from goldenkv.tiers.server import RedisServer
from goldenkv.tiers.store import LARGEST, Store, Wrapper

ROOM, PIECE = 16 << 20, 128 << 10
SEGMENT = 256 << 20
ClockLike = Callable[[], float]


class Ours(StoreSuite):
    """More sequences where more examples are asked for."""

    examples = max(1, settings().max_examples // 5)


class TestHost(Ours):
    supports_capacity = True

    def open_store(self, folder: Path, clock: ClockLike, capacity: int | None) -> Store:
        return HostStore(ROOM if capacity is None else capacity, clock=clock)


class DeviceSuite(Ours):
    supports_capacity = True
    kind: str

    def open_store(self, folder: Path, clock: ClockLike, capacity: int | None) -> Store:
        kinds = [memory.kind for memory in jax.devices()[0].addressable_memories()]
        if self.kind not in kinds:
            pytest.skip(f"{jax.devices()[0]} has no memory {self.kind!r}, only {kinds}")
        return DeviceStore(ROOM if capacity is None else capacity, self.kind, clock=clock)


class TestDevice(DeviceSuite):
    kind = "device"


class TestPinnedHost(DeviceSuite):
    kind = "pinned_host"


class TestUnpinnedHost(DeviceSuite):
    kind = "unpinned_host"


class TestDisk(Ours):
    supports_restart = supports_processes = supports_capacity = supports_damage = True

    def open_store(self, folder: Path, clock: ClockLike, capacity: int | None) -> Store:
        return DiskStore(folder / "disk", capacity, clock=clock)

    def disk(self, store: Store) -> DiskStore:
        assert isinstance(store, DiskStore)
        return store

    def read_raw(self, store: Store, address: Address) -> bytes:
        return Path(self.disk(store).places.object(address)).read_bytes()

    def write_raw(self, store: Store, address: Address, raw: bytes) -> None:
        Path(self.disk(store).places.object(address)).write_bytes(raw)


@pytest.fixture(scope="module")
def redis_server() -> Iterator[RedisServer]:
    try:
        server = RedisServer()
    except MissingExtra as error:
        pytest.skip(str(error))
    with server:
        yield server


class TestRedis(Ours):
    supports_restart = supports_processes = supports_damage = True
    supports_expiry_in_lists = False  # its server has a clock of its own

    @pytest.fixture(autouse=True)
    def use_server(self, redis_server: RedisServer) -> None:
        self.url = redis_server.url

    def open_store(self, folder: Path, clock: ClockLike, capacity: int | None) -> Store:
        return RedisStore(connect(self.url, timeout=10), str(folder).encode(), clock)

    def name(self, store: Store, address: Address) -> bytes:
        (name,) = connect(self.url).keys(b"*" + address.path(":").encode())
        return name

    def read_raw(self, store: Store, address: Address) -> bytes:
        return connect(self.url).get(self.name(store, address))

    def write_raw(self, store: Store, address: Address, raw: bytes) -> None:
        connect(self.url).set(self.name(store, address), raw)


class Cluster:
    """A Mooncake cluster, and an engine that has joined it. Sent to another process, it joins anew there."""

    def __init__(self, master: str, metadata: str, admin: str, segment: int) -> None:
        self.master, self.metadata, self.admin = master, metadata, admin
        self.engine = Engine(
            connect_mooncake(host="127.0.0.1", metadata=metadata, master=master, segment=segment)
        )

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        return Cluster, (self.master, self.metadata, self.admin, 0)


class Engine:
    """Other stores go on using it after one is closed."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def close(self) -> None:
        pass


@pytest.fixture(scope="module")
def mooncake_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A master, and an engine that lends it memory until the end."""
    store = pytest.importorskip("mooncake.store", reason="Mooncake is not installed", exc_type=ImportError)
    program = Path(store.__file__).parent / "mooncake_master"
    program.chmod(0o755)  # a wheel does not say that it can be run
    rpc, metadata, admin = (free_port() for _ in range(3))
    with open(tmp_path_factory.mktemp("mooncake") / "log", "wb") as log:
        process = subprocess.Popen(
            [program, "--rpc_address=127.0.0.1", f"--rpc_port={rpc}", "--metrics_host=127.0.0.1",
             f"--metrics_port={admin}", "--enable_http_metadata_server=true",
             "--http_metadata_server_host=127.0.0.1", f"--http_metadata_server_port={metadata}"],
            stdout=log, stderr=log,
        )  # fmt: skip
    addresses = f"127.0.0.1:{rpc}", f"http://127.0.0.1:{metadata}/metadata", f"http://127.0.0.1:{admin}"
    try:
        wait_for(f"{addresses[2]}/get_all_keys")
        cluster = Cluster(*addresses, SEGMENT)
        yield cluster
        cluster.engine.engine.close()
    finally:
        process.kill()
        process.wait()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return found.getsockname()[1]


def wait_for(url: str) -> None:
    """Until it answers."""
    end = time.monotonic() + 20
    while True:
        try:
            urllib.request.urlopen(url, timeout=1).close()
            return
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.05)


class TestMooncake(Ours):
    """All stores share one engine, as it takes seconds to join a cluster; the other process has its own."""

    supports_restart = supports_processes = supports_damage = True
    supports_expiry_in_lists = False  # it knows no time to live
    supports_reads_while_replaced = False  # its readers meet memory that is written anew

    @pytest.fixture(autouse=True)
    def use_cluster(self, mooncake_cluster: Cluster) -> None:
        self.cluster = mooncake_cluster

    def open_store(self, folder: Path, clock: ClockLike, capacity: int | None) -> Store:
        self.prefix = str(folder)
        return MooncakeStore(self.cluster.engine, self.cluster.admin, self.prefix, 10, clock)

    def read_raw(self, store: Store, address: Address) -> bytes:
        return self.cluster.engine.get(f"{self.prefix}/{address.path()}")

    def write_raw(self, store: Store, address: Address, raw: bytes) -> None:
        name = f"{self.prefix}/{address.path()}"
        if raw:
            assert self.cluster.engine.upsert(name, raw) == 0
        else:  # it takes no empty values
            self.cluster.engine.remove(name, True)


class BucketSuite(Ours):
    supports_restart = supports_damage = True
    supports_expiry_in_lists = False  # a bucket knows no time to live ...
    supports_counted_deletions = False  # ... and does not say what it deleted

    def bucket(self, folder: Path) -> Any:
        raise NotImplementedError

    def open_store(self, folder: Path, clock: ClockLike, capacity: int | None) -> Store:
        self.folder = folder
        return ObjectStore(self.bucket(folder), "objects", clock)

    def read_raw(self, store: Store, address: Address) -> bytes:
        return bytes(self.bucket(self.folder).get(f"objects/{address.path()}").bytes())

    def write_raw(self, store: Store, address: Address, raw: bytes) -> None:
        self.bucket(self.folder).put(f"objects/{address.path()}", raw)


class TestBucketInAFolder(BucketSuite):
    supports_processes = True

    def bucket(self, folder: Path) -> Any:
        return pytest.importorskip("obstore.store", reason="obstore is not installed").LocalStore(folder)


class TestBucketInMemory(BucketSuite):
    def bucket(self, folder: Path) -> Any:
        obstore = pytest.importorskip("obstore.store", reason="obstore is not installed")
        self.buckets: dict[Path, Any] = getattr(self, "buckets", {})
        return self.buckets.setdefault(folder, obstore.MemoryStore())


class TestQuota(Ours):
    supports_capacity = True

    def open_store(self, folder: Path, clock: ClockLike, capacity: int | None) -> Store:
        return Quota(HostStore(ROOM if capacity is None else capacity, clock=clock), ROOM)


class TestParts(Ours):
    supports_capacity = True
    largest = None

    def open_store(self, folder: Path, clock: ClockLike, capacity: int | None) -> Store:
        return Parts(HostStore(ROOM if capacity is None else capacity, clock=clock), PIECE)


class TestSealed(Ours):
    supports_capacity = True
    largest = LARGEST - OVERHEAD

    def open_store(self, folder: Path, clock: ClockLike, capacity: int | None) -> Store:
        try:
            return Sealed(HostStore(ROOM if capacity is None else capacity, clock=clock), KeyRing())
        except MissingExtra as error:
            pytest.skip(str(error))


class TestSealedParts(TestParts):
    def open_store(self, folder: Path, clock: ClockLike, capacity: int | None) -> Store:
        try:
            sealed = Sealed(HostStore(ROOM if capacity is None else capacity, clock=clock), KeyRing())
        except MissingExtra as error:
            pytest.skip(str(error))
        return Parts(sealed, PIECE)


class TestSealedPartsOnDisk(TestDisk):
    """As a server would have it: damage is found below the seal, restarts and processes share the keys."""

    largest = None
    examples = max(1, Ours.examples // 4)

    def open_store(self, folder: Path, clock: ClockLike, capacity: int | None) -> Store:
        try:
            sealed = Sealed(super().open_store(folder, clock, capacity), KeyRing(folder / "keys"))
        except MissingExtra as error:
            pytest.skip(str(error))
        return Parts(Quota(sealed, ROOM), PIECE)

    def disk(self, store: Store) -> DiskStore:
        while isinstance(store, Wrapper):
            store = store.inner
        return super().disk(store)


class TestFaulty(TestHost):
    """Without faults it is the store inside."""

    def open_store(self, folder: Path, clock: ClockLike, capacity: int | None) -> Store:
        return Faulty(super().open_store(folder, clock, capacity))
