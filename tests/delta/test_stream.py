"""Streams: some rows from a part of the bytes, and headers that claim what is not there."""

from __future__ import annotations

import struct
import tracemalloc

import numpy as np
import pytest
import xxhash

from goldenkv.delta import (
    BoundedCodec,
    Codec,
    CodecError,
    DamagedStream,
    DeltaCodec,
    FieldCodec,
    ForeignStream,
    Frames,
    Range,
    TruncatedStream,
    UnsupportedRows,
)
from goldenkv.delta.codec import LARGEST
from goldenkv.delta.stream import tag
from goldenkv.state.formats import row_format

pytest.importorskip("zstandard", reason="the extra 'delta' is not installed")
pytest.importorskip("constriction", reason="the extra 'delta' is not installed")

FORM = row_format("fp8", 20, 4)
CODECS: dict[str, Codec] = {
    "zstd": DeltaCodec(Frames(8)),
    "range": DeltaCodec(Frames(8, "B"), "difference", True, Range()),
    "bounded": BoundedCodec(0.01, True, Frames(8)),
    "fields": FieldCodec(FORM, DeltaCodec(Frames(8))),
}


def rows_for(name: str, n: int) -> np.ndarray:
    if name == "fields":
        return np.random.default_rng(0).integers(0, 256, (n, FORM.nbytes), np.uint8)
    return np.cumsum(np.random.default_rng(0).normal(size=(n, 5)), axis=0).astype(np.float32)


@pytest.mark.parametrize("name", CODECS)
def test_only_the_groups_that_hold_the_rows_are_read(name: str) -> None:
    """All other groups are overwritten: nothing of them can have been looked at."""
    codec, rows = CODECS[name], rows_for(name, 100)
    stream = codec.encode(rows)
    whole, fields = codec.decode(stream), len(FORM.fields) if name == "fields" else 1
    everything = codec.touched(stream)
    assert everything == (13 * fields, len(stream))
    for some, groups in ((range(0, 1), 1), (range(7, 9), 2), (range(40, 64), 3), (range(96, 100), 1)):
        expected = codec.touched(stream, some)
        assert expected.groups == groups * fields and expected.nbytes < len(stream)
        if name == "fields":
            continue
        header = codec.touched(stream, range(0)).nbytes
        starts = [codec.touched(stream, range(0, end)).nbytes for end in range(8, 101, 8)]
        first = ([header, *starts])[some.start // 8]
        soiled = bytearray(b"\xa5" * len(stream))
        soiled[:header] = stream[:header]
        end = first + expected.nbytes - header
        soiled[first:end] = stream[first:end]
        assert np.array_equal(codec.decode(bytes(soiled), some), whole[some.start : some.stop])
        outside = range(some.stop + 8, some.stop + 9) if some.stop < 90 else range(0, 1)
        with pytest.raises(DamagedStream, match="does not match its checksum"):
            codec.decode(bytes(soiled), outside)


@pytest.mark.parametrize("name", CODECS)
def test_any_range_of_rows(name: str) -> None:
    codec = CODECS[name]
    for n in (0, 1, 8, 9, 17):
        stream = codec.encode(rows_for(name, n))
        whole = codec.decode(memoryview(bytearray(stream)))
        for start in range(n + 1):
            for stop in range(start, n + 1):
                assert np.array_equal(codec.decode(stream, range(start, stop)), whole[start:stop])
        for bad in (range(0, n + 1), range(-1, n), range(1, 0), range(0, n, 2), range(n, -1, -1)):
            with pytest.raises(ValueError, match="must be a range of step 1 within"):
                codec.decode(stream, bad)
            with pytest.raises(ValueError, match="must be a range of step 1 within"):
                codec.touched(stream, bad)


@pytest.mark.parametrize("name", CODECS)
def test_rows_that_are_none(name: str) -> None:
    for bad in (
        np.zeros(5, np.float32), np.zeros((1, 2, 3), np.float32), np.zeros((2, 2), np.int32),
        np.zeros((2, 2)), np.zeros((2, 2), np.complex64), np.zeros((2, 2), bool), np.zeros((2, 2), object),
    ):  # fmt: skip
        with pytest.raises(UnsupportedRows, match="expected"):
            CODECS[name].encode(bad)


def test_more_rows_than_a_stream_holds() -> None:
    """The zeros take no memory here: they are one row."""
    wide = np.broadcast_to(np.zeros((1, 1 << 20), np.uint8), (LARGEST // (1 << 20) + 1, 1 << 20))
    with pytest.raises(UnsupportedRows, match=f"at most {LARGEST}"):
        CODECS["zstd"].encode(wide)


def test_rows_in_any_memory_order() -> None:
    rows = rows_for("zstd", 20)
    for view in (np.asfortranarray(rows), rows[::-1], rows[:, ::2], rows.astype(">f4")):
        back = CODECS["zstd"].decode(CODECS["zstd"].encode(view))
        assert back.dtype == np.float32 and np.array_equal(back, view)


# Headers ----------------------------------------------------------------------------------------------------


def header(
    codec: Codec, kind: int = 0, channels: int = 5, rows: int = 8, distance: int = 8, model: bytes = b"",
    groups: tuple[bytes, ...] = (b"x",), sizes: tuple[int, ...] | None = None, index: int | None = None,
) -> bytes:  # fmt: skip
    """A stream whose checksums are right, whatever it says."""
    fixed = struct.pack("<4sBBIIQII", b"GKVD", 1, kind, tag(codec.name), channels, rows, distance, len(model))
    entries = b"".join(
        struct.pack("<II", size, xxhash.xxh3_64_intdigest(group) & 0xFFFFFFFF)
        for group, size in zip(groups, sizes or [len(group) for group in groups], strict=True)
    )
    start = fixed + model + entries + bytes(index or 0)
    return start + xxhash.xxh3_64_intdigest(start).to_bytes(8, "little") + b"".join(groups)


LIES: dict[str, tuple[dict, type[CodecError]]] = {
    "rows without end": ({"rows": 2**63}, TruncatedStream),
    "rows of 4 GiB": ({"channels": 2**32 - 1}, DamagedStream),
    "rows beyond the limit": ({"channels": LARGEST // 32 + 1}, DamagedStream),
    "a group without end": ({"sizes": (2**32 - 1,)}, TruncatedStream),
    "groups of no rows": ({"distance": 0}, DamagedStream),
    "groups of other rows": ({"distance": 2**32 - 1}, DamagedStream),
    "no such type": ({"kind": 12}, DamagedStream),
    "too few groups": ({"rows": 9}, TruncatedStream),
    "too many groups": ({"rows": 0}, DamagedStream),
    "an empty group": ({"groups": (b"",)}, DamagedStream),
    "a group of something else": ({}, DamagedStream),
    "a model of something else": ({"model": b"\1x"}, DamagedStream),
    "rows at the limit of nothing": ({"channels": LARGEST // 32}, DamagedStream),
}


@pytest.mark.parametrize("lie", LIES)
@pytest.mark.parametrize("name", ["zstd", "range", "bounded"])
def test_a_header_is_believed_as_far_as_its_bytes_go(name: str, lie: str) -> None:
    said, error = LIES[lie]
    stream = header(CODECS[name], **said)
    tracemalloc.start()
    try:
        with pytest.raises(error):
            CODECS[name].decode(stream)
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


def test_the_forged_header_is_otherwise_right() -> None:
    """So that the lies above fail for what they say."""
    codec = DeltaCodec(Frames(8))
    good = codec.encode(rows_for("zstd", 8))
    start = codec.touched(good, range(0)).nbytes
    assert header(codec, groups=(good[start:],)) == good


def test_another_codec_is_foreign() -> None:
    stream = DeltaCodec(Frames(8)).encode(rows_for("zstd", 8))
    for other in (DeltaCodec(Frames(8, "B")), DeltaCodec(Frames(8), "difference"), DeltaCodec(Frames(9))):
        with pytest.raises(ForeignStream, match="another codec than 'delta"):
            other.decode(stream)
