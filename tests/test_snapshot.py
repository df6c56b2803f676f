"""Snapshots as bytes: exact round trips, a named error for each way to be unusable, nothing half-loaded."""

import functools
import json
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import safetensors
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st

from goldenkv.config import Numerics, micro
from goldenkv.engine import CapacityError, Engine
from goldenkv.model.weights import Model
from goldenkv.state import (
    CorruptSnapshot,
    ForeignSnapshot,
    IncompleteSnapshot,
    NotASnapshot,
    Snapshot,
    SnapshotError,
    TruncatedSnapshot,
    cells,
    compare,
)
from goldenkv.state import snapshot as module

CONFIG = micro()
SMALL = Numerics(tile=8, index_block=8, key_block=8)
DTYPES = {"float32": SMALL, "bfloat16": replace(SMALL, dtype="bfloat16")}
SIZES = dict(slots=3, max_length=512, pages=200, fill=np.nan)


@functools.cache
def engine(dtype: str = "float32") -> Engine:
    return Engine(Model(CONFIG, DTYPES[dtype]), CONFIG, DTYPES[dtype], **SIZES)


@functools.cache
def snapshot(length: int = 45, dtype: str = "float32") -> Snapshot:
    seq = engine(dtype).open()
    if length:
        engine(dtype).prefill(seq, np.random.default_rng(0).integers(0, 64, length))
    taken = engine(dtype).snapshot(seq)
    engine(dtype).close(seq)
    return taken


@functools.cache
def data(length: int = 45, dtype: str = "float32") -> bytes:
    return snapshot(length, dtype).to_bytes(CONFIG)


def header_size(file: bytes) -> int:
    """Where the header ends."""
    return 8 + int.from_bytes(file[:8], "little")


def same(found: Snapshot, expected: Snapshot) -> bool:
    about = found.fingerprint == expected.fingerprint and found.length == expected.length
    return about and found.rows.keys() == expected.rows.keys() and compare(found.rows, expected.rows).same


# Round trips ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", [0, 1, 7, 8, 45, 129])
def test_round_trip(dtype: str, length: int) -> None:
    taken = snapshot(length, dtype)
    read = Snapshot.from_bytes(data(length, dtype))
    assert same(read, taken)
    assert {n: (r.dtype, r.shape) for n, r in read.rows.items()} == {
        n: (r.dtype, r.shape) for n, r in taken.rows.items()
    }
    assert read.nbytes == taken.nbytes == sum(r.nbytes for r in taken.rows.values())
    assert len(data(length, dtype)) == header_size(data(length, dtype)) + taken.nbytes


def test_bits_that_arithmetic_would_lose() -> None:
    """NaN payloads, both zeros, infinities and denormals, in both dtypes."""
    odd32 = np.array([0x7FC00001, 0xFFFFFFFF, 0x7F800001, 0x80000000, 0x00000001, 0xFF800000], np.uint32)
    odd16 = np.array([0x7FC1, 0xFFFF, 0x7F81, 0x8000, 0x0001, 0xFF80], np.uint16)
    rows = {}
    for name, value in snapshot(45, "bfloat16").rows.items():
        odd = odd32.view(np.float32) if value.dtype == np.float32 else odd16.view(ml_dtypes.bfloat16)
        rows[name] = np.resize(odd, value.shape)
    made = replace(snapshot(45, "bfloat16"), rows=rows)
    assert same(Snapshot.from_bytes(made.to_bytes(CONFIG)), made)


def test_rows_in_any_memory_order() -> None:
    taken = snapshot()
    strided = {name: np.asfortranarray(rows) for name, rows in taken.rows.items()}
    assert same(Snapshot.from_bytes(replace(taken, rows=strided).to_bytes(CONFIG)), taken)


def test_plain_safetensors_readers_open_it(tmp_path: Path) -> None:
    assert compare(safetensors.numpy.load(data()), snapshot().rows).same
    for dtype in DTYPES:
        path = tmp_path / f"{dtype}.safetensors"
        snapshot(45, dtype).save(path, CONFIG)
        with safetensors.safe_open(path, "numpy") as file:
            assert set(file.keys()) == {cell.name for cell in cells(CONFIG)}
            stored = {cell.name: file.get_tensor(cell.name) for cell in cells(CONFIG)}
            about = file.metadata()
        assert compare(stored, snapshot(45, dtype).rows).same
        assert (about["format"], about["version"], about["length"]) == ("goldenkv-snapshot", "1", "45")
        assert about["fingerprint"] == engine(dtype).fingerprint
        for cell in cells(CONFIG):
            described = json.loads(about["components"])[cell.name]
            assert described["position"] == cell.live(CONFIG, 45).start
            assert tuple(described["shape"]) == cell.shape(CONFIG, 45)
            assert described["dtype"] == cell.component.dtype(DTYPES[dtype])


def test_equal_states_are_equal_bytes() -> None:
    assert len({snapshot().to_bytes(CONFIG) for _ in range(8)}) == 1


# Files that are something else ----------------------------------------------------------------------------


def rewritten(change: Callable[[dict], None], *, sign: bool = False) -> bytes:
    """The file with another header; `sign` makes its checksum right again."""
    file = data()
    end = header_size(file)
    header = json.loads(file[8:end])
    change(header)
    if sign:
        header["__metadata__"]["header_xxh3"] = module._header_xxh3(header["__metadata__"])
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + file[end:]


def about(**fields: str) -> Callable[[dict], None]:
    return lambda header: header["__metadata__"].update(fields)


@pytest.mark.parametrize(
    "file",
    [
        b"\x89PNG\r\n\x1a\n" + bytes(100),
        b"just a text file, and no snapshot",
        np.arange(64).tobytes(),
        safetensors.numpy.save({"x": np.zeros(3, np.float32)}),
        safetensors.numpy.save({"x": np.zeros(3, np.float32)}, metadata={"format": "pt"}),
    ],
    ids=["image", "text", "array", "plain safetensors", "other safetensors"],
)
def test_not_a_snapshot(file: bytes) -> None:
    with pytest.raises(NotASnapshot):
        Snapshot.from_bytes(file)


@pytest.mark.parametrize("fields", [{"format": "other"}, {"version": "2"}, {"version": "1.0"}])
@pytest.mark.parametrize("sign", [False, True])
def test_another_format_or_version(fields: dict[str, str], sign: bool) -> None:
    """Named before its checksum is: a later version may compute that in another way."""
    with pytest.raises(NotASnapshot, match=next(iter(fields.values()))):
        Snapshot.from_bytes(rewritten(about(**fields), sign=sign))


def test_truncated_anywhere() -> None:
    """Also where the cut falls between two tensors or right behind the header."""
    file = data()
    for length in [*range(64), *range(64, len(file), 13), header_size(file), len(file) - 1]:
        with pytest.raises(TruncatedSnapshot):
            Snapshot.from_bytes(file[:length])


def test_bytes_after_the_end() -> None:
    with pytest.raises(CorruptSnapshot, match="1 bytes after the end"):
        Snapshot.from_bytes(data() + b"\0")


# Damage ---------------------------------------------------------------------------------------------------


def flipped(file: bytes, bit: int) -> bytes:
    changed = bytearray(file)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cell", [cell.name for cell in cells(CONFIG)])
def test_a_flipped_bit_of_a_component(cell: str, dtype: str) -> None:
    """The error names the component. Unverified, the flip gets through: the comparison has to find it."""
    file, taken = data(45, dtype), snapshot(45, dtype)
    end = header_size(file)
    start, stop = json.loads(file[8:end])[cell]["data_offsets"]
    for byte, bit in ((start, 0), ((start + stop) // 2, 5), (stop - 1, 7)):
        bad = flipped(file, 8 * (end + byte) + bit)
        with pytest.raises(CorruptSnapshot, match=cell):
            Snapshot.from_bytes(bad)
        unverified = Snapshot.from_bytes(bad, verify=False)
        difference = compare(unverified.rows, taken.rows)
        assert difference.rows - difference.equal == 1
        assert difference.first is not None and difference.first[0] == cell


def test_every_bit_of_a_file() -> None:
    """No flip of one bit, in the payload, the header or its length, gives another state."""
    file = data(9)
    for bit in range(8 * len(file)):
        try:
            read = Snapshot.from_bytes(flipped(file, bit))
        except SnapshotError:
            continue
        assert same(read, snapshot(9)), f"bit {bit}"


@given(
    damage=st.lists(
        st.tuples(st.floats(0, 1, exclude_max=True), st.integers(1, 255)), min_size=1, max_size=4
    ),
    moved=st.tuples(st.floats(0, 1), st.floats(0, 1), st.integers(0, 64)),
    dtype=st.sampled_from(list(DTYPES)),
)
def test_wider_damage(damage: list[tuple[float, int]], moved: tuple[float, float, int], dtype: str) -> None:
    """Several bytes changed, and a stretch of the file copied over another."""
    file = data(45, dtype)
    changed = bytearray(file)
    for where, mask in damage:
        changed[int(where * len(file))] ^= mask
    source, target = (int(where * (len(file) - moved[2])) for where in moved[:2])
    changed[target : target + moved[2]] = file[source : source + moved[2]]
    try:
        read = Snapshot.from_bytes(bytes(changed))
    except SnapshotError:
        return
    assert same(read, snapshot(45, dtype))


def test_payloads_of_two_components_exchanged() -> None:
    """Same sizes, whole checksums, wrong places."""
    file = bytearray(data())
    end = header_size(file)
    spans = json.loads(file[8:end])
    (a, b), (c, d) = (spans[f"layers.1.overlap_{name}"]["data_offsets"] for name in ("kv", "score"))
    file[end + a : end + b], file[end + c : end + d] = file[end + c : end + d], file[end + a : end + b]
    with pytest.raises(CorruptSnapshot, match=r"in layers\.1\.overlap_\w+, layers\.1\.overlap_\w+:"):
        Snapshot.from_bytes(bytes(file))


def described(**fields: object) -> Callable[[dict], None]:
    """Changes the description of one component, as a repair by hand or another writer would."""

    def change(header: dict) -> None:
        components = json.loads(header["__metadata__"]["components"])
        components["layers.1.entries"].update(fields)
        header["__metadata__"]["components"] = json.dumps(components)

    return change


@pytest.mark.parametrize(
    "change",
    [
        about(length="44"),
        about(fingerprint="0" * 64),
        described(position=8),
        described(shape=[22, 8]),
        described(dtype="int32"),
        described(xxh3="0" * 16),
        lambda header: header["__metadata__"].pop("header_xxh3"),
        lambda header: header.pop("layers.1.entries"),
        lambda header: header.update({"layers.9.entries": header.pop("layers.1.entries")}),
    ],
    ids=["length", "fingerprint", "position", "shape", "dtype", "sum", "no sum", "one less", "renamed"],
)
def test_a_header_that_was_edited(change: Callable[[dict], None]) -> None:
    with pytest.raises(CorruptSnapshot):
        Snapshot.from_bytes(rewritten(change))


def lacks(field: str) -> Callable[[dict], None]:
    def change(header: dict) -> None:
        components = json.loads(header["__metadata__"]["components"])
        del components["layers.1.entries"][field]
        header["__metadata__"]["components"] = json.dumps(components)

    return change


@pytest.mark.parametrize(
    "change",
    [
        about(components="[]"),
        about(components="{"),
        about(length="many"),
        about(length="-8"),
        about(fingerprint=8),
        described(shape=[11, 15]),
        described(shape=[22, 8]),
        described(dtype="float64"),
        described(dtype="bfloat16"),
        described(xxh3="0" * 16),
        lacks("shape"),
        lacks("dtype"),
        lacks("xxh3"),
        lambda header: header["layers.1.entries"].update(dtype="I32"),
        lambda header: header["layers.1.entries"].update(data_offsets=[0, 10**12]),
        lambda header: header["layers.1.entries"].update(data_offsets=[0, 1]),
        lambda header: header["layers.1.entries"].update(data_offsets=[0.0, 1.0]),
        lambda header: header.pop("layers.1.entries"),
    ],
)
def test_a_signed_header_that_contradicts_itself(change: Callable[[dict], None]) -> None:
    """Written with a right checksum, as by faulty code: still a SnapshotError and nothing else."""
    with pytest.raises(SnapshotError):
        Snapshot.from_bytes(rewritten(change, sign=True))


def test_a_header_nested_without_end() -> None:
    header = b'{"a":' + b"[" * 100_000
    with pytest.raises(SnapshotError):
        Snapshot.from_bytes(len(header).to_bytes(8, "little") + header)


# Restores that must fail ----------------------------------------------------------------------------------


def free(e: Engine) -> tuple[int, int]:
    return e.free_slots, e.free_pages


def refused(bad: Snapshot, error: type[Exception], match: str, dtype: str = "float32") -> None:
    """The restore fails as named; nothing is taken, and a good restore then works."""
    e = engine(dtype)
    before = free(e)
    with pytest.raises(error, match=match):
        e.restore(bad)
    assert free(e) == before
    seq = e.restore(Snapshot.from_bytes(data(45, dtype)))
    assert compare(e.rows(seq), snapshot(45, dtype).rows).same
    e.close(seq)
    assert free(e) == before


def test_another_fingerprint() -> None:
    """Other weights, another tile, another dtype, quantisation, another configuration: each is a miss."""
    model = Model(CONFIG, SMALL)
    others = {
        "weights": Engine(Model(CONFIG, SMALL, seed=1), CONFIG, SMALL),
        "tile": Engine(model, CONFIG, replace(SMALL, tile=16)),
        "index block": Engine(model, CONFIG, replace(SMALL, index_block=16)),
        "key block": Engine(model, CONFIG, replace(SMALL, key_block=16)),
        "quantisation": Engine(model, CONFIG, replace(SMALL, fake_quantisation=True)),
        "dtype": engine("bfloat16"),
        "constants": Engine(model, replace(CONFIG, rope_theta=10001.0), SMALL),
        "top-k": Engine(model, replace(CONFIG, index_topk=3), SMALL),
    }
    prints = {name: other.fingerprint for name, other in others.items()}
    assert len(set(prints.values()) | {engine().fingerprint}) == len(others) + 1
    for fingerprint in prints.values():
        refused(replace(snapshot(), fingerprint=fingerprint), ForeignSnapshot, fingerprint[:16])
    before = free(others["weights"])
    with pytest.raises(ForeignSnapshot):
        others["weights"].restore(snapshot())
    assert free(others["weights"]) == before


def test_pool_sizes_are_no_part_of_the_fingerprint() -> None:
    other = Engine(Model(CONFIG, SMALL), CONFIG, SMALL, slots=7, max_length=1024, page_size=24, pages=99)
    assert other.fingerprint == engine().fingerprint


@pytest.mark.parametrize("cell", [cell.name for cell in cells(CONFIG)])
def test_a_component_is_missing_or_does_not_fit(cell: str) -> None:
    rows = dict(snapshot().rows)
    value = rows.pop(cell)
    refused(replace(snapshot(), rows=rows), IncompleteSnapshot, f"{cell} is missing")
    for wrong in (value[:-1], np.concatenate([value, value[:1]]), value[:, :-1], value.astype(np.float64)):
        refused(replace(snapshot(), rows=rows | {cell: wrong}), IncompleteSnapshot, cell)
    read = Snapshot.from_bytes(replace(snapshot(), rows=rows).to_bytes(CONFIG))
    refused(read, IncompleteSnapshot, f"{cell} is missing")


def test_components_of_another_length_or_layer() -> None:
    refused(replace(snapshot(), length=44), IncompleteSnapshot, "at length 44")
    rows = snapshot().rows | {"layers.3.window": snapshot().rows["layers.2.window"]}
    refused(replace(snapshot(), rows=rows), IncompleteSnapshot, "layers.3.window .* expected none")


def test_too_long_or_no_room() -> None:
    small = Engine(Model(CONFIG, SMALL), CONFIG, SMALL, slots=2, max_length=64, pages=11)
    before = free(small)
    with pytest.raises(CapacityError, match="65 tokens exceed"):
        small.restore(snapshot(65))
    assert free(small) == before
    first = small.restore(snapshot())
    taken = free(small)
    with pytest.raises(CapacityError, match="6 pages needed, 5 free of 11"):
        small.restore(snapshot())
    assert free(small) == taken
    second = small.restore(snapshot(9))
    with pytest.raises(CapacityError, match="all 2 slots are taken"):
        small.restore(snapshot(0))
    assert compare(small.rows(first), snapshot().rows).same
    assert compare(small.rows(second), snapshot(9).rows).same


# Files ----------------------------------------------------------------------------------------------------


def test_save_and_load(tmp_path: Path) -> None:
    path = tmp_path / "state.safetensors"
    assert snapshot().save(path, CONFIG) == path.stat().st_size
    assert same(Snapshot.load(path), snapshot())
    assert same(Snapshot.load(str(path)), snapshot())
    assert [p.name for p in tmp_path.iterdir()] == ["state.safetensors"]
    with pytest.raises(FileNotFoundError):
        Snapshot.load(tmp_path / "nothing")


def test_a_save_that_dies_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At every step: while writing, before the sync, before the rename. What it leaves is not read."""
    path = tmp_path / "state.safetensors"
    snapshot(9).save(path, CONFIG)

    class Died(Exception):
        pass

    def die(*_: object) -> None:
        raise Died

    for step in ("fsync", "replace"):
        with monkeypatch.context() as patch, pytest.raises(Died):
            patch.setattr(module.os, step, die)
            snapshot().save(path, CONFIG)
        assert same(Snapshot.load(path), snapshot(9))
    path.with_name(path.name + ".tmp").write_bytes(data()[:100])  # half a file, from a crash
    assert same(Snapshot.load(path), snapshot(9))
    snapshot().save(path, CONFIG)
    assert same(Snapshot.load(path), snapshot())
    assert [p.name for p in tmp_path.iterdir()] == ["state.safetensors"]
