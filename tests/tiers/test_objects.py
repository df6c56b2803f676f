"""Objects as bytes, and what our stores do with them: all bits come back, or an error with a name."""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from unittest import mock

import ml_dtypes
import numpy as np
import pytest
import safetensors
import safetensors.numpy
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from goldenkv.state import table_version
from goldenkv.tiers import objects as module
from goldenkv.tiers.errors import Corrupt, Expired, Foreign, Missing, StoreError, Truncated
from goldenkv.tiers.objects import (
    FORMAT,
    FORMAT_VERSION,
    LARGEST_HEAD,
    Address,
    Head,
    Item,
    Kind,
    Label,
    Tensor,
    head_size,
    make_head,
    read_head,
    views,
)
from goldenkv.tiers.store import LARGEST, Entry, VerifiedStore
from goldenkv.tiers.whole import unpack

ADDRESS = Address(b"o" * 32, b"n" * 32, b"k" * 32)

digests = st.binary(min_size=32, max_size=32)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
tensors = st.builds(
    Tensor,
    name=texts.filter(lambda name: name != "__metadata__"),
    dtype=st.sampled_from(["uint8", "float32", "bfloat16"]),
    shape=st.lists(st.sampled_from([0, 1, 2, 3, 7]), max_size=3).map(tuple),
)
labels = st.builds(
    Label,
    address=st.builds(Address, digests, digests, digests),
    kind=st.sampled_from(Kind),
    position=st.sampled_from([0, 1, 127, 128, 129, 2**31 - 1]),
    layout=texts,
    tensors=st.lists(tensors, max_size=4, unique_by=lambda tensor: tensor.name).map(tuple),
    table=texts | st.just(table_version()),
    extra=st.lists(st.tuples(texts, texts), max_size=3).map(tuple),
)
times = st.none() | st.sampled_from([0.0, 0.001, 1000.0, 1e9 + 0.123]) | st.floats(0, 1e10)


def filled(label: Label, seed: int = 0) -> Item:
    return Item(label, np.random.default_rng(seed).integers(0, 256, label.nbytes, np.uint8))


def packed(item: Item, expires: float | None = None) -> bytes:
    return make_head(item, expires) + item.payload.tobytes()


def small(**changes: object) -> Item:
    """Few bytes, so that every bit can be tried."""
    made = Item.of(ADDRESS, Kind.PAGE, 256, "plain", {"a": np.arange(3, dtype=np.float32)})
    return Item(replace(made.label, **changes), made.payload)  # type: ignore[arg-type]


class Shelf(VerifiedStore):
    """A dictionary of bytes: the store itself does nothing, what is tested is `VerifiedStore`."""

    def __init__(self, clock: Callable[[], float] = lambda: 1000.0, verify: bool = True) -> None:
        super().__init__(clock, verify)
        self.raw: dict[Address, bytes] = {}

    def _write(self, address: Address, head: bytes, payload: np.ndarray, expires: float | None) -> None:
        self.raw[address] = head + payload.tobytes()

    def _read(self, address: Address, allot: Callable[[bytes], np.ndarray]) -> None:
        if address not in self.raw:
            raise Missing("nothing there")
        unpack(memoryview(self.raw[address]), allot)

    def exists(self, addresses: Sequence[Address]) -> list[bool]:
        return [address in self.raw for address in addresses]

    def delete(self, addresses: Sequence[Address]) -> int:
        return sum(self.raw.pop(address, None) is not None for address in addresses)

    def scan(self, owner: bytes | None = None, namespace: bytes | None = None) -> Iterator[Entry]:
        for address, raw in list(self.raw.items()):
            if owner in (None, address.owner) and namespace in (None, address.namespace):
                yield Entry(address, len(raw))


# Heads ----------------------------------------------------------------------------------------------------


@given(labels, times)
def test_a_head_says_what_was_put_into_it(label: Label, expires: float | None) -> None:
    item = filled(label)
    raw = packed(item, expires)
    size = head_size(raw[:8], len(raw))
    assert size == len(make_head(item, expires)) and size % 8 == 0
    found = read_head(raw[:size])
    assert found.label == label and found.payload == label.nbytes == len(raw) - size
    assert found.xxh3 == xxhash.xxh3_128_hexdigest(item.payload.data)
    if expires is None:
        assert found.expires is None
    else:  # never earlier, and less than a millisecond later
        assert found.expires is not None and 0 <= found.expires - expires < 0.001 + 1e-5


@given(labels, times)
def test_the_header_is_that_json(label: Label, expires: float | None) -> None:
    """It is written without a JSON encoder; here is what that would make of the same."""
    item = filled(label)
    raw = make_head(item, expires)
    metadata = {
        "header_xxh3": "",
        "format": FORMAT,
        "version": FORMAT_VERSION,
        "owner": label.address.owner.hex(),
        "namespace": label.address.namespace.hex(),
        "key": label.address.key.hex(),
        "kind": label.kind.value,
        "position": str(label.position),
        "layout": label.layout,
        "table": label.table,
        "payload": str(label.nbytes),
        "xxh3": item.xxh3,
        "expires": "" if expires is None else str(math.ceil(expires * 1000)),
        "extra": json.dumps(label.extra),
    }
    entries: dict[str, object] = {"__metadata__": metadata}
    codes, at = {"uint8": "U8", "float32": "F32", "bfloat16": "BF16"}, 0
    for tensor in label.tensors:
        end = at + tensor.nbytes
        entries[tensor.name] = {
            "dtype": codes[tensor.dtype],
            "shape": tensor.shape,
            "data_offsets": [at, end],
        }
        at = end
    text = json.dumps(entries, separators=(",", ":"))
    without = raw[8:].replace(json.loads(raw[8:])["__metadata__"]["header_xxh3"].encode(), b"", 1)
    assert without.rstrip(b" ") == text.encode()
    digits = raw[8 : 8 + len('{"__metadata__":{"header_xxh3":"') + 32].decode()[-32:]
    assert digits == xxhash.xxh3_128_hexdigest(without)


def read(raw: bytes, verify: bool = True) -> tuple[Label, bytes]:
    shelf = Shelf(verify=verify)
    shelf.raw[ADDRESS] = raw
    found = shelf.get(ADDRESS)
    return found.label, found.payload.tobytes()


def test_every_flipped_bit_is_found() -> None:
    """In the size, header, checksums and payload. vllm#57912, mesh-llm#1228"""
    item = small()
    raw = packed(item)
    assert read(raw) == (item.label, item.payload.tobytes())
    kinds = set()
    for place in range(len(raw) * 8):
        changed = bytearray(raw)
        changed[place // 8] ^= 1 << place % 8
        with pytest.raises((Corrupt, Foreign, Truncated)) as raised:
            read(bytes(changed))
        kinds.add(raised.type)
        with pytest.raises((Corrupt, Foreign, Truncated)):
            head = bytes(changed[: len(raw) - 12])
            read_head(head)  # as a store does that keeps heads by themselves
            assert place // 8 >= len(head)
            raise Corrupt("in the payload")
    assert kinds == {Corrupt, Foreign, Truncated}


def test_without_the_checksum_of_the_header_flips_go_through() -> None:
    """The control: a label changes and is believed. mesh-llm#1228"""
    raw = packed(small(layout="aaaa"))
    place = raw.index(b'"layout":"aaaa"') + 10
    changed = raw[:place] + b"b" + raw[place + 1 :]
    with pytest.raises(Corrupt, match="header"):
        read(changed)
    stored = json.loads(raw[8:-12])["__metadata__"]["header_xxh3"]
    with mock.patch.object(module, "_header_xxh3", lambda header: stored):
        assert read(changed)[0].layout == "baaa"


def test_without_verification_a_flipped_payload_is_served() -> None:
    """The control."""
    raw = packed(small())
    changed = raw[:-1] + bytes([raw[-1] ^ 1])
    with pytest.raises(Corrupt, match="payload"):
        read(changed)
    assert read(changed, verify=False)[1] == changed[-12:]


def test_every_length_is_found() -> None:
    """Mooncake#3465: an empty value is no object."""
    raw = packed(small())
    for size in range(len(raw)):
        with pytest.raises(Truncated):
            read(raw[:size])
    for more in (b"\0", raw):
        with pytest.raises(Corrupt):
            read(raw + more)


def test_a_size_that_makes_no_sense_takes_no_memory() -> None:
    for size in (LARGEST_HEAD - 7, 2**63, 2**64 - 1):
        with pytest.raises(Corrupt, match="a head of"):
            head_size(size.to_bytes(8, "little"), 2**64)
    assert head_size((LARGEST_HEAD - 8).to_bytes(8, "little"), LARGEST_HEAD) == LARGEST_HEAD
    with pytest.raises(Truncated):
        head_size((LARGEST_HEAD - 8).to_bytes(8, "little"), LARGEST_HEAD - 1)


def forged(change: Callable[[dict], object]) -> bytes:
    """A head with another content, and the checksum that belongs to it."""
    raw = make_head(small(), None)
    content = json.loads(raw[8:])
    change(content)
    content["__metadata__"]["header_xxh3"] = "0" * 32
    header = json.dumps(content, separators=(",", ":")).encode()
    at = header.index(b"0" * 32)
    digits = xxhash.xxh3_128_hexdigest(header[:at] + header[at + 32 :]).encode()
    header = header[:at] + digits + header[at + 32 :]
    return len(header).to_bytes(8, "little") + header


SENSELESS: dict[str, tuple[Callable[[dict], object], type[StoreError]]] = {
    "format": (lambda c: c["__metadata__"].update(format="other"), Foreign),
    "version": (lambda c: c["__metadata__"].update(version="2"), Foreign),
    "no owner": (lambda c: c["__metadata__"].pop("owner"), Corrupt),
    "owner": (lambda c: c["__metadata__"].update(owner="xy"), Corrupt),
    "kind": (lambda c: c["__metadata__"].update(kind="sponge"), Corrupt),
    "position": (lambda c: c["__metadata__"].update(position="one"), Corrupt),
    "expires": (lambda c: c["__metadata__"].update(expires="soon"), Corrupt),
    "extra": (lambda c: c["__metadata__"].update(extra="[1]"), Corrupt),
    "payload": (lambda c: c["__metadata__"].update(payload="13"), Corrupt),
    "dtype": (lambda c: c["a"].update(dtype="F64"), Corrupt),
    "shape": (lambda c: c["a"].update(shape=[4]), Corrupt),
    "no shape": (lambda c: c["a"].pop("shape"), Corrupt),
    "not a number": (lambda c: c["a"].update(shape=["3"]), Corrupt),
    "no tensor": (lambda c: c.pop("a"), Corrupt),
}


@pytest.mark.parametrize("what", SENSELESS)
def test_a_head_that_makes_no_sense_is_refused(what: str) -> None:
    """Although its checksum is right."""
    change, error = SENSELESS[what]
    assert read_head(forged(lambda content: None)).label == small().label
    with pytest.raises(error):
        read_head(forged(change))


def test_other_files_are_foreign() -> None:
    theirs = safetensors.numpy.save({"a": np.zeros(3, np.float32)}, metadata={"format": "pt"})
    with pytest.raises(Foreign):
        read(theirs)


# A public format ------------------------------------------------------------------------------------------


def test_anyones_tools_read_it() -> None:
    arrays = {
        "layers.0.window_kv": np.random.default_rng(0).standard_normal((5, 7)).astype(np.float32),
        'a "name" with ü and \\': np.arange(13, dtype=np.uint8),
        "nothing": np.zeros((0, 4), np.float32),
    }
    item = Item.of(ADDRESS, Kind.BOUNDARY, 128, "plain", arrays)
    found = safetensors.numpy.load(packed(item))
    assert found.keys() == arrays.keys()
    for name, array in arrays.items():
        assert found[name].dtype == array.dtype and np.array_equal(found[name], array)


def test_anyones_tools_read_bfloat16() -> None:
    rows = np.arange(12, dtype=np.uint16).view(ml_dtypes.bfloat16).reshape(3, 4)
    ((name, found),) = safetensors.deserialize(
        packed(Item.of(ADDRESS, Kind.PAGE, 1, "plain", {"rows": rows}))
    )
    assert name == "rows" and found["dtype"] == "BF16" and found["shape"] == [3, 4]
    assert bytes(found["data"]) == rows.tobytes()


def test_metadata_is_for_anyone(tmp_path: object) -> None:
    path = f"{tmp_path}/object.safetensors"
    with open(path, "wb") as file:
        file.write(packed(small()))
    with safetensors.safe_open(path, "np") as opened:
        metadata = opened.metadata()
    assert metadata["format"] == FORMAT and metadata["key"] == ADDRESS.key.hex()


# Bits -----------------------------------------------------------------------------------------------------

BITS = {
    "float32": np.array(
        [0x7FC00001, 0xFFFFFFFF, 0x7F800001, 0x80000000, 0, 1, 0xFF800000], np.uint32
    ).view(np.float32),
    "bfloat16": np.array([0x7FC1, 0xFFFF, 0x7F81, 0x8000, 0, 1, 0xFF80], np.uint16).view(ml_dtypes.bfloat16),
    "uint8": np.arange(256, dtype=np.uint8),
}  # fmt: skip


@pytest.mark.parametrize("first", [0, 1, 2, 3])
def test_bits_that_arithmetic_would_lose_come_back(first: int) -> None:
    """NaN payloads, both zeros, denormals; also where a tensor begins at an odd byte."""
    arrays = {"odd": np.arange(first, dtype=np.uint8), **BITS}
    shelf = Shelf()
    shelf.put(Item.of(ADDRESS, Kind.PAGE, 1, "plain", arrays))
    found = shelf.get(ADDRESS).arrays()
    assert list(found) == list(arrays)
    for name, array in arrays.items():
        assert found[name].dtype == array.dtype and found[name].tobytes() == array.tobytes()
    assert found["float32"].flags.aligned == (first % 4 == 0)


@pytest.mark.parametrize("how", ["transposed", "strided", "big-endian", "scalar"])
def test_arrays_of_any_memory_order(how: str) -> None:
    base = np.arange(24, dtype=np.float32).reshape(4, 6)
    array = {
        "transposed": base.T,
        "strided": base[::2, ::-3],
        "big-endian": base.astype(">f4"),
        "scalar": np.float32(1.5).reshape(()),
    }[how]
    found = Item.of(ADDRESS, Kind.PAGE, 1, "plain", {"a": array}).arrays()["a"]
    assert found.shape == array.shape and np.array_equal(found, array) and found.dtype == np.float32


@pytest.mark.parametrize("shapes", [[], [(0,)], [(0, 3), (2, 0)], [(0,), (1,), (0,)]])
def test_empty_payloads_and_tensors(shapes: list[tuple[int, ...]]) -> None:
    shelf = Shelf()
    item = Item.of(
        ADDRESS, Kind.PAGE, 0, "plain", {str(i): np.ones(s, np.uint8) for i, s in enumerate(shapes)}
    )
    shelf.put(item)
    found = shelf.get(ADDRESS)
    assert found.label == item.label and found.payload.tobytes() == item.payload.tobytes()
    assert [array.shape for array in found.arrays().values()] == shapes
    buffer = np.zeros(item.label.nbytes, np.uint8)
    assert shelf.get_into(ADDRESS, buffer).label == item.label


def test_views_are_views() -> None:
    item = small()
    views(item.label.tensors, item.payload)["a"][1] = 7
    assert item.payload.view(np.float32).tolist() == [0, 7, 2]


NOT_PAYLOADS = {
    "short": np.zeros(11, np.uint8),
    "long": np.zeros(13, np.uint8),
    "2-d": np.zeros((1, 12), np.uint8),
    "int8": np.zeros(12, np.int8),
    "strided": np.zeros(24, np.uint8)[::2],
}


@pytest.mark.parametrize("bad", NOT_PAYLOADS)
def test_payloads_that_are_none_are_refused(bad: str) -> None:
    with pytest.raises(ValueError, match="the payload must be"):
        Item(small().label, NOT_PAYLOADS[bad])


def test_other_dtypes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"dtypes must be among .* got \['float64', 'int32'\]"):
        Item.of(ADDRESS, Kind.PAGE, 1, "plain", {"a": np.zeros(1), "b": np.zeros(1, np.int32)})


def test_an_item_vouches_for_the_bytes_it_was_made_of() -> None:
    """Bytes that change on the way are found at the next store, not covered by a new checksum."""
    item, shelf = small(), Shelf()
    item.check()
    item.payload[0] ^= 1
    with pytest.raises(Corrupt):
        item.check()
    shelf.put(item)
    with pytest.raises(Corrupt, match="payload"):
        shelf.get(ADDRESS)
    shelf.put(Item(item.label, item.payload))  # the control: made anew, the checksum covers them
    assert shelf.get(ADDRESS).payload[0] == item.payload[0]


@given(st.builds(Address, digests, digests, digests), st.sampled_from(["/", ":", "_"]))
def test_paths_of_addresses(address: Address, separator: str) -> None:
    assert Address.parse(address.path(separator), separator) == address


@pytest.mark.parametrize(
    "path", ["", "a/b", "ab" * 32, "/".join(["ab" * 32] * 4), "/".join(["ab" * 31] * 3), "x/y/z"]
)
def test_other_paths_are_refused(path: str) -> None:
    with pytest.raises(ValueError):
        Address.parse(path)


# VerifiedStore --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("field", ["owner", "namespace", "key"])
def test_an_object_of_another_address_is_foreign(field: str) -> None:
    """LMCache#4385: a whole and sound object, in the wrong place."""
    other = ADDRESS._replace(**{field: b"x" * 32})
    shelf = Shelf()
    shelf.raw[ADDRESS] = shelf.raw[other] = packed(small(address=other))
    for take in (lambda: shelf.get(ADDRESS), lambda: shelf.get_into(ADDRESS, np.zeros(12, np.uint8))):
        with pytest.raises(Foreign, match="another address"):
            take()
    assert shelf.get(other).label.address == other
    shelf.verify = False
    assert shelf.get(ADDRESS).label.address == other, "the control"


def test_an_object_of_another_component_table_is_foreign() -> None:
    shelf = Shelf()
    shelf.put(small(table="another"))
    with pytest.raises(Foreign, match="component table 'another'"):
        shelf.get(ADDRESS)


@pytest.mark.parametrize("nbytes", [0, 11, 13, 24])
def test_a_buffer_of_another_size(nbytes: int) -> None:
    shelf = Shelf()
    shelf.put(small())
    with pytest.raises(Foreign, match=f"12 bytes, {nbytes} were expected"):
        shelf.get_into(ADDRESS, np.zeros(nbytes, np.uint8))


@pytest.mark.parametrize("bad", ["int8", "2-d", "strided", "read only"])
def test_buffers_that_cannot_be_filled(bad: str) -> None:
    shelf = Shelf()
    shelf.put(small())
    buffer = {
        "int8": np.zeros(12, np.int8),
        "2-d": np.zeros((1, 12), np.uint8),
        "strided": np.zeros(24, np.uint8)[::2],
        "read only": np.frombuffer(bytes(12), np.uint8),
    }[bad]
    with pytest.raises(ValueError, match="the buffer must be"):
        shelf.get_into(ADDRESS, buffer)


@pytest.mark.parametrize("ttl", [0, -1, -0.001, math.nan, math.inf, -math.inf])
def test_times_to_live_that_are_none(ttl: float) -> None:
    shelf = Shelf()
    with pytest.raises(ValueError, match="ttl="):
        shelf.put(small(), ttl)
    assert shelf.raw == {}


@pytest.mark.parametrize("ttl", [0.001, 1, 50.5, 1e9])
def test_a_time_to_live_ends_when_it_should(ttl: float) -> None:
    now = [1000.0]
    shelf = Shelf(lambda: now[0])
    shelf.put(small(), ttl)
    now[0] = 1000.0 + ttl - 0.0005
    assert shelf.get(ADDRESS).label == small().label
    assert shelf.get_into(ADDRESS, np.zeros(12, np.uint8)).expires == pytest.approx(1000 + ttl, abs=0.001)
    now[0] = 1000.0 + ttl + 0.001
    with pytest.raises(Expired):
        shelf.get(ADDRESS)


def test_a_clock_that_goes_back_revives_nothing() -> None:
    now = [1000.0]
    shelf = Shelf(lambda: now[0])
    shelf.put(small(), ttl=10)
    now[0] = 1010.0
    with pytest.raises(Expired):
        shelf.get(ADDRESS)
    for now[0] in (1009.0, 0.0):
        with pytest.raises(Expired):
            shelf.get(ADDRESS)
        assert shelf.now() == 1010.0
    shelf.put(small(), ttl=1)  # counted from the latest time that was seen
    assert shelf.get_into(ADDRESS, np.zeros(12, np.uint8)).expires == 1011.0
    with mock.patch.object(Shelf, "now", lambda self: now[0]):  # the control
        shelf.put(small(), ttl=10)
        now[0] = -100.0
        assert shelf.get(ADDRESS).label == small().label


@pytest.mark.parametrize("over", [-1, 0, 1])
def test_the_largest_payload(over: int) -> None:
    item = filled(replace(small().label, tensors=(Tensor("a", "uint8", (LARGEST + over,)),)))
    shelf = Shelf()
    if over > 0:
        with pytest.raises(ValueError, match=f"{LARGEST + 1} bytes, at most {LARGEST}"):
            shelf.put(item)
        assert shelf.raw == {}
    else:
        assert shelf.put(item) == len(shelf.raw[ADDRESS])
        assert shelf.get(ADDRESS).payload.tobytes() == item.payload.tobytes()


def test_heads_read_twice_are_the_same() -> None:
    """What is remembered of a head is remembered by all of its bytes."""
    raws = [make_head(small(position=position), None) for position in range(3)]
    for _ in range(2):
        assert [read_head(raw).label.position for raw in raws] == [0, 1, 2]
        assert read_head(bytearray(raws[1])).label.position == 1  # type: ignore[arg-type]
    assert isinstance(read_head(memoryview(raws[0])), Head)
