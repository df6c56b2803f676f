"""What tiers cost: each store against the bare device in the same run, and a reload against recomputing.

A bare device does the same with the same bytes and nothing else: copies between touched arrays for host
memory; write, fsync, rename and fsync of the folder for a put on disk, and one read into touched memory for a
warm get; the bare client for Redis; AES-GCM alone for encryption.
"""

from __future__ import annotations

import functools
import os
import statistics
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
from measure import seconds

from goldenkv.config import bench
from goldenkv.engine import Engine, Periodic, TieredCache
from goldenkv.model.weights import Model
from goldenkv.prefix import Namespace, Tenant, TensorParallel
from goldenkv.text import byte_tokens, default_text
from goldenkv.tiers.disk import DiskStore
from goldenkv.tiers.host import HostStore
from goldenkv.tiers.keyring import KeyRing
from goldenkv.tiers.mover import Mover
from goldenkv.tiers.objects import Address, Item, Kind, Label, Tensor
from goldenkv.tiers.redis import RedisStore
from goldenkv.tiers.seal import Sealed
from goldenkv.tiers.server import RedisServer
from goldenkv.tiers.shelf import Tier
from goldenkv.tiers.store import Store

SIZES = (256 << 10, 1 << 20, 4 << 20)
WORKING_SET = 64 << 20
"""Bytes that go around, so that caches of the processor hold little of them."""

LENGTHS = (128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
PERIOD = 128


def tiers(repeat: int) -> dict:
    """Both parts."""
    return {"stores": stores(repeat), "reload": reload(repeat)}


# Stores -----------------------------------------------------------------------------------------------------

Operation = Callable[[int], object]
"""Does something with the object of a number."""


def items(size: int) -> list[Item]:
    """Objects of one size, enough for the working set; each with random bytes."""
    rng = np.random.default_rng(0)
    found = []
    for number in range(max(8, WORKING_SET // size)):
        address = Address(b"o" * 32, b"n" * 32, number.to_bytes(32, "little"))
        label = Label(address, Kind.PAGE, 128, "pool", (Tensor("rows", "uint8", (size,)),))
        found.append(Item(label, rng.integers(0, 256, size, np.uint8)))
    return found


def stores(repeat: int) -> dict:
    """Put and get of every store: MB/s, and the ratio to the bare device."""
    out: dict = {}
    for size in SIZES:
        objects = items(size)
        for name, kind in (("host", _host), ("host, sealed", _sealed), ("disk", _disk), ("redis", _redis)):
            with kind(objects) as (store, bare_put, bare_get):
                found = out.setdefault(name, {}).setdefault(f"{size >> 10} KiB", {})
                buffer = np.zeros(size, np.uint8)

                def put(number: int, store: Store = store, objects: list[Item] = objects) -> None:
                    store.put(objects[number])

                def get(
                    number: int,
                    store: Store = store,
                    objects: list[Item] = objects,
                    buffer: np.ndarray = buffer,
                ) -> None:
                    store.get_into(objects[number].label.address, buffer)

                for operation, ours, bare in (("put", put, bare_put), ("get", get, bare_get)):
                    found[operation] = against(ours, bare, len(objects), size, repeat)
    return out


def against(ours: Operation, bare: Operation, count: int, size: int, repeat: int) -> dict:
    """Both in turn over all objects; the medians of rates, and of the ratio of neighbouring rounds."""
    for number in range(count):
        ours(number)
        bare(number)
    pairs = []
    for _ in range(3 * repeat):
        mine = seconds(lambda: [ours(number) for number in range(count)])
        theirs = seconds(lambda: [bare(number) for number in range(count)])
        pairs.append((mine, theirs))
    total = count * size / 1e6
    return {
        "mb_per_s": total / statistics.median(a for a, _ in pairs),
        "bare_mb_per_s": total / statistics.median(b for _, b in pairs),
        "ratio": statistics.median(b / a for a, b in pairs),
    }


@contextmanager
def _host(objects: list[Item]) -> Iterator[tuple[Store, Operation, Operation]]:
    size = len(objects[0].payload)
    memory, buffer = np.zeros((len(objects), size), np.uint8), np.zeros(size, np.uint8)
    yield (
        HostStore(2 * WORKING_SET + (64 << 20)),
        lambda n: np.copyto(memory[n], objects[n].payload),
        lambda n: np.copyto(buffer, memory[n]),
    )


@contextmanager
def _sealed(objects: list[Item]) -> Iterator[tuple[Store, Operation, Operation]]:
    """A payload of `LARGEST` would not fit with its nonce and tag: a little less is encrypted then."""
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    cipher, nonce = AESGCM(bytes(32)), bytes(12)
    sealed = [cipher.encrypt(nonce, item.payload.data, None) for item in objects]
    store = HostStore(2 * WORKING_SET + (64 << 20))
    store.largest = None
    ring = KeyRing()
    ring.rotate(objects[0].label.address.owner)
    yield (
        Sealed(store, ring),
        lambda n: cipher.encrypt(nonce, objects[n].payload.data, None),
        lambda n: cipher.decrypt(nonce, sealed[n], None),
    )


@contextmanager
def _disk(objects: list[Item]) -> Iterator[tuple[Store, Operation, Operation]]:
    buffer = np.zeros(len(objects[0].payload), np.uint8)
    with tempfile.TemporaryDirectory() as folder:
        bare = Path(folder, "bare")
        bare.mkdir()

        def put(number: int) -> None:
            temporary = bare / "temporary"
            with open(temporary, "wb", buffering=0) as file:
                file.write(objects[number].payload.data)
                os.fsync(file.fileno())
            os.replace(temporary, bare / str(number))
            opened = os.open(bare, os.O_RDONLY)
            os.fsync(opened)
            os.close(opened)

        def get(number: int) -> None:
            with open(bare / str(number), "rb", buffering=0) as file:
                file.readinto(buffer.data)

        store = DiskStore(Path(folder, "store"))
        yield store, put, get
        store.close()


@contextmanager
def _redis(objects: list[Item]) -> Iterator[tuple[Store, Operation, Operation]]:
    with RedisServer() as server:
        client = server.client()
        store = RedisStore(server.client())
        payloads = [item.payload.tobytes() for item in objects]
        yield store, lambda n: client.set(f"bare{n}", payloads[n]), lambda n: client.get(f"bare{n}")
        store.close()
        client.close()


# Reload against recompute -----------------------------------------------------------------------------------


def reload(repeat: int) -> dict:
    """Seconds to have the state of a prompt, computed and from each tier, verified."""
    config = bench()
    longest = LENGTHS[-1] + 1
    model = Model(config)
    tokens = byte_tokens(default_text(), config.vocab_size)[:longest]
    engine = Engine(model, config, max_length=longest, slots=1, boundaries=longest // PERIOD + 1)
    namespace = Namespace(
        domain=Tenant("bench", None), model=engine.fingerprint, tokenizer=None, chat_template=None,
        layout="pool", page_size=engine.geometry.page_size, dtype="float32",
        tensor_parallel=TensorParallel(1, 0, "none"), adapter=None, media=(), salt=None,
    )  # fmt: skip
    out: dict = {"tokens": list(LENGTHS), "recompute_s": recomputed(engine, tokens)}
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        server = stack.enter_context(RedisServer())
        kinds = {
            "host": lambda: HostStore(1 << 30),
            "disk": lambda: DiskStore(Path(folder, "tier")),
            "redis": lambda: RedisStore(server.client()),
        }
        for name, make in kinds.items():
            mover = Mover([Tier(store=make())], engine.geometry.page_size, in_flight=1 << 30)
            cache = TieredCache(engine, mover, Periodic(PERIOD), deadline=lambda tokens: 60.0)
            request = cache.begin(namespace, tokens)
            cache.run(request)
            cache.finish(request)
            mover.drain()
            times, moved = [], []
            for length in LENGTHS:
                once = functools.partial(reloaded, cache, namespace, tokens[: length + 1])
                once()
                taken = [once() for _ in range(repeat)]
                times.append(statistics.median(t for t, _ in taken))
                moved.append(taken[0][1])
            out[f"{name}_s"], out["bytes"] = times, moved
            cache.forget(namespace)
            mover.close()
    return out


def recomputed(engine: Engine, tokens: np.ndarray) -> list[float]:
    """In one run up to the longest: the seconds until each length."""
    engine.prefill(warm := engine.open(), tokens[:64])
    engine.close(warm)
    seq, times, total = engine.open(), [], 0.0
    for length in LENGTHS:

        def run(length: int = length) -> None:
            engine.prefill(seq, tokens[seq.length : length])
            engine.wait()

        total += seconds(run)
        times.append(total)
    engine.close(seq)
    return times


def reloaded(cache: TieredCache, namespace: Namespace, prompt: np.ndarray) -> tuple[float, int]:
    """Seconds until a request stands at the end of its prompt but one token, and the bytes that came up."""
    engine = cache.engine
    cache.evict(pages=engine.geometry.pages, boundaries=engine.geometry.boundaries)
    cache.mover.drain()
    before = bytes_got(cache)

    def begin() -> None:
        nonlocal request
        request = cache.begin(namespace, prompt)
        engine.wait()

    request = None
    taken = seconds(begin)
    assert request is not None and request.plan is not None and request.remaining == 1, "it was not reloaded"
    cache.cancel(request)
    return taken, bytes_got(cache) - before


def bytes_got(cache: TieredCache) -> int:
    """Payload bytes that came out of the tier so far."""
    return cache.mover.metrics.to_json()["moved_bytes"].get(cache.mover.names[0], {}).get("get", 0)
