"""Objects as JAX arrays, in every memory kind of the device: copies, whole, and where they should be."""

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

from goldenkv.conform import StoreSuite
from goldenkv.tiers import device as module
from goldenkv.tiers.device import DeviceStore
from goldenkv.tiers.errors import Full, Missing, StoreError, Unavailable
from goldenkv.tiers.memory import Held
from goldenkv.tiers.objects import Address, Item, Kind, Label, Tensor, head_size
from goldenkv.tiers.store import Store

KINDS = sorted(memory.kind for memory in jax.devices()[0].addressable_memories())
ALIGNMENT = 64
"""Bytes: what JAX on the CPU can use in place."""


def address(key: int = 0) -> Address:
    return Address(b"o" * 32, b"n" * 32, key.to_bytes(32, "big"))


def wrap(payload: np.ndarray, key: int = 0) -> Item:
    """An item that holds this very array."""
    return Item(
        Label(address(key), Kind.PAGE, 256, "plain", (Tensor("rows", "uint8", payload.shape),)), payload
    )


def rows(nbytes: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, nbytes]).integers(0, 256, nbytes, np.uint8)


class TestDeviceStore(StoreSuite):
    supports_capacity = True
    supports_damage = True
    kind = "device"

    def open_store(self, folder: Path, clock: Callable[[], float], capacity: int | None) -> DeviceStore:
        return DeviceStore(1 << 30 if capacity is None else capacity, self.kind, clock=clock)

    def read_raw(self, store: Store, address: Address) -> bytes:
        assert isinstance(store, DeviceStore)
        held = store._lease(address)
        payload = np.empty(held.payload, np.uint8)
        store._copy_out(held, payload)
        store._release(held)
        return held.head + payload.tobytes()

    def write_raw(self, store: Store, address: Address, raw: bytes) -> None:
        assert isinstance(store, DeviceStore)
        try:
            size = head_size(raw, len(raw))
        except StoreError:
            size = len(raw)
        store._write(address, raw[:size], np.frombuffer(raw[size:], np.uint8), None)


if "pinned_host" in KINDS:

    class TestPinnedHost(TestDeviceStore):
        kind = "pinned_host"


if "unpinned_host" in KINDS:

    class TestUnpinnedHost(TestDeviceStore):
        kind = "unpinned_host"


# Where ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_it_lies_where_it_should(kind: str) -> None:
    store = DeviceStore(1 << 20, kind)
    store.put(wrap(rows(1000)))
    (held,) = store._entries.values()
    assert held.memory.sharding.memory_kind == kind == store.name
    assert held.memory.dtype == np.uint8 and held.memory.shape == (1000,)
    store.delete([address()])
    assert held.memory.is_deleted()


def test_another_kind_of_memory_is_refused() -> None:
    with pytest.raises(ValueError, match=r"kind='tape' must be among \['device'"):
        DeviceStore(1 << 20, "tape")


def test_on_another_device() -> None:
    """State is handed over to a device that has none of the first one's arrays."""
    code = """
import jax, numpy as np
from goldenkv.tiers.device import DeviceStore
from goldenkv.tiers.objects import Address, Item, Kind
where = Address(b"o" * 32, b"n" * 32, b"k" * 32)
item = Item.of(where, Kind.PAGE, 256, "plain", {"rows": np.arange(1000, dtype=np.float32)})
stores = [DeviceStore(1 << 20, device=device) for device in jax.devices()]
stores[0].put(item)
stores[1].put(stores[0].get(where))
stores[0].close()
assert stores[0].exists([where]) == [False]
assert np.array_equal(stores[1].get(where).payload, item.payload)
(held,) = stores[1]._entries.values()
print(held.memory.devices() == {jax.devices()[1]})
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120,
        env={**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=2"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["True"]


# Copies ---------------------------------------------------------------------------------------------------

SIZES = [1, 63, 64, 65, 4096, 65536, 1 << 20]


def changed(put: Callable[[np.ndarray], Callable[[], np.ndarray]]) -> list[tuple[int, int]]:
    """(Size, offset from an aligned address) at which what was put changes with the array it was put from.

    Args:
        put: takes an array and returns what reads it back.
    """
    found = []
    for size in SIZES:
        for offset in (0, 1, 8, 16, 32, 63):
            raw = np.zeros(size + 2 * ALIGNMENT, np.uint8)
            begin = -raw.ctypes.data % ALIGNMENT + offset
            source = raw[begin : begin + size]
            source[:] = rows(size)
            read = put(source)
            source[:] ^= 0xFF
            if not np.array_equal(read(), rows(size)):
                found.append((size, offset))
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_put_is_a_copy(kind: str) -> None:
    """jax#37830, at every alignment."""

    def put(source: np.ndarray) -> Callable[[], np.ndarray]:
        store = DeviceStore(1 << 30, kind, verify=False)
        store.put(wrap(source))
        return lambda: store.get(address()).payload

    assert changed(put) == []


@pytest.mark.skipif(jax.devices()[0].platform != "cpu", reason="an accelerator has memory of its own")
@pytest.mark.parametrize("may_alias", [None, False], ids=["default", "may_alias=False"])
@pytest.mark.parametrize("kind", KINDS)
def test_device_put_alone_would_alias(kind: str, may_alias: bool | None) -> None:
    """The control: of an aligned array, whatever it is told."""

    def put(source: np.ndarray) -> Callable[[], np.ndarray]:
        sharding = SingleDeviceSharding(jax.devices()[0], memory_kind=kind)
        array = jax.device_put(source, sharding, may_alias=may_alias).block_until_ready()
        return lambda: np.asarray(array)

    assert {offset for _, offset in changed(put)} == {0}


@pytest.mark.parametrize("how", ["deleted", "donated"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_source_can_go(kind: str, how: str) -> None:
    """jax#24521: an array that shares memory with a donated one is invalid."""
    source = jax.device_put(rows(1 << 16), SingleDeviceSharding(jax.devices()[0])).block_until_ready()
    store = DeviceStore(1 << 20, kind)
    store.put(wrap(np.asarray(source)))
    if how == "deleted":
        source.delete()
    else:
        jax.jit(lambda x: x ^ 0xFF, donate_argnums=0)(source).block_until_ready()
    assert source.is_deleted()
    others = [jax.device_put(rows(1 << 16, seed)).block_until_ready() for seed in range(1, 8)]
    assert np.array_equal(store.get(address()).payload, rows(1 << 16))
    assert len(others) == 7


@pytest.mark.parametrize("kind", KINDS)
def test_objects_are_whole_arrays(kind: str) -> None:
    """openxla/xla#34565: no part of an array is ever written, every put makes another one."""
    store = DeviceStore(1 << 20, kind)
    store.put(wrap(rows(1000)))
    (first,) = store._entries.values()
    store.put(wrap(rows(1000, seed=1)))
    (second,) = store._entries.values()
    assert second.memory is not first.memory and first.memory.is_deleted()
    assert np.array_equal(store.get(address()).payload, rows(1000, seed=1))


# Leases and failures --------------------------------------------------------------------------------------


class Paused(DeviceStore):
    """Stops before it copies out."""

    def __init__(self) -> None:
        super().__init__(1 << 20)
        self.reached, self.go = threading.Event(), threading.Event()

    def _copy_out(self, entry: Held, buffer: np.ndarray) -> None:
        self.reached.set()
        assert self.go.wait(30)
        super()._copy_out(entry, buffer)


class NoLeases(Paused):
    """The control: device memory goes back at once, whoever reads it."""

    def _lease(self, address: Address) -> Held:
        entry = super()._lease(address)
        entry.readers = 0
        return entry

    def _release(self, entry: Held) -> None:
        pass


def read_while_deleted(store: Paused) -> np.ndarray:
    store.put(wrap(rows(1000)))
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(store.get, address())
        try:
            assert store.reached.wait(30)
            assert store.delete([address()]) == 1 and store.exists([address()]) == [False]
        finally:
            store.go.set()
        return reading.result().payload


def test_what_goes_while_it_is_read_is_read_whole() -> None:
    """sglang#31427"""
    store = Paused()
    assert np.array_equal(read_while_deleted(store), rows(1000))
    with pytest.raises(Missing):
        store.get(address())


def test_without_leases_the_array_is_gone() -> None:
    with pytest.raises(RuntimeError, match="deleted"):
        read_while_deleted(NoLeases())


@pytest.mark.parametrize(
    ("message", "error"), [("RESOURCE_EXHAUSTED: out of memory", Full), ("INTERNAL: lost", Unavailable)]
)
def test_a_device_that_fails(monkeypatch: pytest.MonkeyPatch, message: str, error: type[StoreError]) -> None:
    """Nothing is kept, and what was there stays."""
    store = DeviceStore(1 << 20)
    before = store.put(wrap(rows(1000)))

    def fail(*_: object) -> None:
        raise jax.errors.JaxRuntimeError(message)

    with monkeypatch.context() as patch:
        patch.setattr(module.jax, "device_put", fail)
        for key in (0, 1):
            with pytest.raises(error) as raised:
                store.put(wrap(rows(500), key))
            assert type(raised.value) is error
    assert store.stats().nbytes == before and store.exists([address(1)]) == [False]
    assert np.array_equal(store.get(address()).payload, rows(1000))
