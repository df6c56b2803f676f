"""Delta frames in stores: the whole suite, what is stored, and what damage becomes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from goldenkv.conform import StoreSuite
from goldenkv.delta import BoundedCodec, Codec, DeltaCodec, FieldCodec, Frames, Range, Touched
from goldenkv.errors import MissingExtra
from goldenkv.state.formats import row_format
from goldenkv.tiers.coded import Coded, LossyCodec
from goldenkv.tiers.disk import DiskStore
from goldenkv.tiers.errors import Corrupt, Foreign, StoreError, Truncated
from goldenkv.tiers.host import HostStore
from goldenkv.tiers.keyring import KeyRing
from goldenkv.tiers.mover import Mover
from goldenkv.tiers.objects import Address, Item, Kind, Tensor
from goldenkv.tiers.parts import Parts
from goldenkv.tiers.redis import RedisStore
from goldenkv.tiers.seal import Sealed
from goldenkv.tiers.server import RedisServer
from goldenkv.tiers.shelf import Tier
from goldenkv.tiers.store import LARGEST, Store

pytest.importorskip("zstandard", reason="the extra 'delta' is not installed")

ROOM = 16 << 20
OVERHEAD = len(DeltaCodec().encode(np.arange(100, dtype=np.uint8)[None])) - 100
"""Bytes by which one row grows that has no structure."""


class AlwaysStreams(Coded):
    """Also where a stream is longer than its tensor, so that the suite's random bytes are streams too."""

    def _encoded(self, array: np.ndarray) -> np.ndarray:
        if not array.nbytes:
            return super()._encoded(array)
        rows = array.reshape(1, -1) if array.ndim < 2 else array.reshape(len(array), -1)
        return np.frombuffer(self.codec.encode(rows), np.uint8)


class TestCodedHost(StoreSuite):
    supports_capacity = True
    examples = 10

    def open_store(self, folder: Path, clock: Callable[[], float], capacity: int | None) -> Store:
        return Coded(HostStore(ROOM if capacity is None else capacity, clock=clock), DeltaCodec(), clock)


class TestCodedDisk(StoreSuite):
    supports_restart = supports_processes = supports_capacity = supports_damage = True
    examples = 5
    wrapper: type[Coded] = Coded

    def open_store(self, folder: Path, clock: Callable[[], float], capacity: int | None) -> Store:
        return self.wrapper(DiskStore(folder / "disk", capacity, clock=clock), DeltaCodec(), clock)

    def path(self, store: Store, address: Address) -> Path:
        return Path(store.inner.places.object(address))  # type: ignore[attr-defined]

    def read_raw(self, store: Store, address: Address) -> bytes:
        return self.path(store, address).read_bytes()

    def write_raw(self, store: Store, address: Address, raw: bytes) -> None:
        self.path(store, address).write_bytes(raw)


class TestStreamsOnDisk(TestCodedDisk):
    wrapper = AlwaysStreams
    largest = LARGEST - OVERHEAD


# What is stored ---------------------------------------------------------------------------------------------


def address(key: int = 0) -> Address:
    return Address(b"a" * 32, b"n" * 32, key.to_bytes(32, "big"))


def page(key: int = 0) -> Item:
    """Rows that are like their neighbours, and some of no use to a codec."""
    generator = np.random.default_rng(key)
    walk = np.cumsum(generator.normal(size=(64, 32)), axis=0) * 0.01 + 1
    made = Item.of(
        address(key), Kind.PAGE, 256, "plain",
        {
            "layers.0.window_kv": walk.astype(np.float32).astype(ml_dtypes.bfloat16),
            "layers.1.entries": walk.astype(np.float32),
            "layers.1.index_k": generator.integers(0, 256, (16, 68), np.uint8),
            "layers.1.none": np.zeros((0, 32), np.float32),
            "layers.1.one": np.array(-0.0, np.float32),
            "layers.2.cube": np.ones((4, 8, 32), np.float32),
        },
    )  # fmt: skip
    return Item(replace(made.label, extra=(("who", "another wrapper"),)), made.payload)


def host(**options: bool) -> HostStore:
    return HostStore(1 << 20, block=64, **options)


def check_same(store: Store, expected: Item) -> None:
    found = store.get(expected.label.address)
    assert found.label == expected.label and found.xxh3 == expected.xxh3
    assert np.array_equal(found.payload, expected.payload)
    buffer = np.zeros(len(expected.payload), np.uint8)
    head = store.get_into(expected.label.address, buffer)
    assert head.label == expected.label and np.array_equal(buffer, expected.payload)


def codecs() -> list[Codec]:
    found: list[Codec] = [
        DeltaCodec(),
        DeltaCodec(Frames(5)),
        DeltaCodec(Frames(64, "B"), "difference", True),
    ]
    try:
        return [*found, DeltaCodec(entropy=Range())]
    except ImportError:
        return found


@pytest.mark.parametrize("codec", codecs(), ids=lambda codec: codec.name)
def test_tensors_are_streams_where_that_is_shorter(codec: Codec) -> None:
    inner = host()
    item = page()
    taken = Coded(inner, codec).put(item)
    outer = inner.get(address())
    assert taken == next(inner.scan()).nbytes
    stored, whole = outer.arrays(), item.arrays()
    for name in ("layers.0.window_kv", "layers.1.entries", "layers.2.cube"):
        assert stored[name].nbytes < whole[name].nbytes
        rows = codec.decode(stored[name].data)
        assert rows.dtype == whole[name].dtype and rows.tobytes() == whole[name].tobytes(), name
    for name in ("layers.1.index_k", "layers.1.none", "layers.1.one"):
        assert stored[name].tobytes() == whole[name].tobytes(), name
    assert (outer.label.kind, outer.label.position) == (item.label.kind, item.label.position)
    assert dict(outer.label.extra)["codec"] == codec.name
    check_same(Coded(inner, codec), item)


def test_frames_of_a_stored_page_are_read_alone() -> None:
    """Random access by group, from what lies in a tier."""
    inner, codec = host(), DeltaCodec(Frames(8))
    item = page()
    Coded(inner, codec).put(item)
    stream = inner.get(address()).arrays()["layers.1.entries"].data
    some = codec.decode(stream, range(20, 30))
    assert some.tobytes() == item.arrays()["layers.1.entries"][20:30].tobytes()
    touched = codec.touched(stream, range(20, 30))
    assert isinstance(touched, Touched) and touched.groups == 2 and touched.nbytes < len(stream) / 2


def test_native_rows_field_by_field() -> None:
    form = row_format("fp8", 96, 16)
    rows = np.random.default_rng(0).integers(0, 40, (64, form.nbytes), np.uint8)
    item = Item.of(address(), Kind.PAGE, 256, "fp8", {"layers.0.window_kv": rows})
    store = Coded(host(), FieldCodec(form, DeltaCodec()))
    assert store.put(item) < rows.nbytes
    check_same(store, item)


def test_time_to_live() -> None:
    now = 1000.0
    store = Coded(HostStore(1 << 20, clock=lambda: now), DeltaCodec(), lambda: now)
    store.put(page(), ttl=10)
    store.put(page(1))
    buffer = np.zeros(len(page().payload), np.uint8)
    assert store.get_into(address(), buffer).expires == 1010
    assert store.get_into(address(1), buffer).expires is None


@pytest.mark.parametrize("order", ["parts outside", "parts inside", "sealed inside"])
def test_other_wrappers(order: str) -> None:
    item = page()
    store: Store = {
        "parts outside": lambda: Parts(Coded(host(), DeltaCodec()), 1000),
        "parts inside": lambda: Coded(Parts(host(), 1000), DeltaCodec()),
        "sealed inside": lambda: Coded(Sealed(host(), KeyRing()), DeltaCodec()),
    }[order]()
    store.put(item)
    check_same(store, item)


def test_over_a_network() -> None:
    """Dtypes and shapes come back from a store that knows bytes alone. LMCache#2787"""
    try:
        server = RedisServer()
    except MissingExtra as error:
        pytest.skip(str(error))
    with server:
        store = Coded(RedisStore(server.client()), DeltaCodec())
        store.put(page())
        check_same(store, page())
        store.close()


# What is refused --------------------------------------------------------------------------------------------


def test_a_lossy_codec_has_no_place_in_a_store() -> None:
    """One that is chosen as a serialisation changes what models answer. LMCache#717"""
    fields = FieldCodec(row_format("fp8", 96, 16), DeltaCodec(), {"rope": BoundedCodec(0.1)})
    for codec in (BoundedCodec(0.1), BoundedCodec(0.0), fields):
        with pytest.raises(LossyCodec, match="is lossy, a store needs a lossless one"):
            Coded(host(), codec)


def test_what_another_codec_wrote_is_foreign() -> None:
    inner = host()
    inner.put(page(1))
    Coded(inner, DeltaCodec(Frames(8))).put(page())
    with pytest.raises(Foreign, match="coded by 'delta xor P G=8 zstd3', expected 'delta xor P G=16 zstd3'"):
        Coded(inner, DeltaCodec()).get(address())
    with pytest.raises(Foreign, match="not coded"):
        Coded(inner, DeltaCodec()).get(address(1))


Change = Callable[[Item], Item]


def in_stream(at: int) -> Change:
    """A bit of the first stream, under the right checksum of the store."""

    def change(outer: Item) -> Item:
        payload = outer.payload.copy()
        payload[at] ^= 1
        return Item(outer.label, payload)

    return change


def cut(outer: Item) -> Item:
    """The first stream ends early."""
    first, *others = outer.label.tensors
    tensors = (Tensor(first.name, "uint8", (first.shape[0] - 1,)), *others)
    return Item(replace(outer.label, tensors=tensors), np.delete(outer.payload, first.shape[0] - 1))


def without(key: str) -> Change:
    """Says less of what it was."""
    return lambda outer: Item(
        replace(outer.label, extra=tuple(pair for pair in outer.label.extra if pair[0] != key)), outer.payload
    )


def saying(key: str, value: str) -> Change:
    return lambda outer: Item(
        replace(outer.label, extra=tuple((k, value if k == key else v) for k, v in outer.label.extra)),
        outer.payload,
    )


DAMAGE: dict[str, tuple[Change, type[StoreError], str]] = {
    "bit in the header": (in_stream(12), Corrupt, "corrupt"),
    "bit in a group": (in_stream(500), Corrupt, "corrupt"),
    "another magic number": (in_stream(0), Corrupt, "corrupt"),
    "cut": (cut, Truncated, "truncated"),
    "no description": (without("whole"), Foreign, "foreign"),
    "another description": (saying("whole", "[]"), Corrupt, "corrupt"),
    "no time": (saying("until", "soon"), Corrupt, "corrupt"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_a_miss_that_says_why(damage: str) -> None:
    """Below the codec all is well: the store's own checksum vouches for the damaged bytes."""
    change, error, reason = DAMAGE[damage]
    inner, item = host(), page()
    store = Coded(inner, DeltaCodec())
    store.put(item)
    inner.put(change(inner.get(address())))
    for read in (store.get, lambda a: store.get_into(a, np.zeros(len(item.payload), np.uint8))):
        with pytest.raises(error) as refused:
            read(address())
        assert refused.value.reason == reason
    mover = Mover([Tier(store=store)], 128)
    try:
        (found,) = mover.up.load([item.label])
        assert isinstance(found, error)
    finally:
        mover.close()


@dataclass(frozen=True)
class WrongBits(DeltaCodec):
    """Returns the rows that it got, but for one bit."""

    def decode(self, stream: bytes | memoryview, rows: range | None = None) -> np.ndarray:
        found = super().decode(stream, rows)
        found.view(np.uint8)[0, 0] ^= 1
        return found


def test_control_a_codec_that_returns_other_bits_is_found() -> None:
    """By the checksum of the payload, which goes along from the device on."""
    store = Coded(host(), WrongBits())
    store.put(page())
    with pytest.raises(Corrupt, match="the payload does not match its checksum"):
        store.get(address())
    with pytest.raises(Corrupt, match="the payload does not match its checksum"):
        store.get_into(address(), np.zeros(len(page().payload), np.uint8))


def test_streams_of_other_rows_are_found() -> None:
    """A whole stream of the same bytes in another shape."""
    inner = host()
    store = Coded(inner, DeltaCodec())
    rows = np.zeros((64, 32), np.float32)
    store.put(Item.of(address(), Kind.PAGE, 256, "plain", {"a": rows}))
    outer = inner.get(address())
    other = np.frombuffer(store.codec.encode(rows.reshape(32, 64)), np.uint8)
    label = replace(outer.label, tensors=(Tensor("a", "uint8", other.shape),))
    inner.put(Item(label, other))
    with pytest.raises(Corrupt, match=r"the stream of a holds float32\[32, 64\]"):
        store.get(address())
