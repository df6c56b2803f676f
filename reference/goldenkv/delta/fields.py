"""Packed rows, field by field: values, rotated channels and scales have nothing in common but their bytes.

A stream is "GKVF"; in a byte each the version, 1, and the number of fields; XXH3 of the codec's name (4
bytes); rows (8); how many bytes the stream of each field has (4 each); XXH3 of all that (8); the streams.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import xxhash

from ..state.formats import Field, RowFormat
from ..state.packing import from_bytes, to_bytes
from .codec import (
    Codec,
    CodecError,
    DamagedStream,
    ForeignStream,
    Touched,
    TruncatedStream,
    UnsupportedRows,
    element_type,
)
from .stream import check_start, tag, wanted

MAGIC, VERSION = b"GKVF", 1
_FIXED = struct.Struct("<4sBBIQ")


@dataclass(frozen=True, slots=True)
class FieldCodec:
    """Rows of a format, uint8 [n, form.nbytes], as a stream of each field.

    Attributes:
        form: the format.
        codec: of the fields that have none of their own.
        fields: the codecs of some fields, by name.
    """

    form: RowFormat
    codec: Codec
    fields: Mapping[str, Codec] = field(default_factory=dict)

    def __post_init__(self) -> None:
        unknown = sorted(self.fields.keys() - {f.name for f in self.form.fields})
        if unknown:
            raise ValueError(f"the format {self.form.name!r} has no field {', '.join(unknown)}")

    @property
    def name(self) -> str:
        own = "".join(f", {name}: {codec.name}" for name, codec in sorted(self.fields.items()))
        return f"{self.form.name}[{self.form.nbytes}] {self.codec.name}{own}"

    @property
    def lossless(self) -> bool:
        """Whether the codecs of all fields are."""
        return all(self.of(f).lossless for f in self._kept)

    def of(self, which: Field) -> Codec:
        """The codec of a field."""
        return self.fields.get(which.name, self.codec)

    def encode(self, rows: np.ndarray) -> bytes:
        """See `Codec.encode`; rows are uint8 [n, form.nbytes]."""
        try:
            fields = from_bytes(rows, self.form)
        except ValueError as error:
            raise UnsupportedRows(str(error)) from None
        streams = [self.of(f).encode(fields[f.name]) for f in self._kept]
        sizes = b"".join(struct.pack("<I", len(stream)) for stream in streams)
        header = _FIXED.pack(MAGIC, VERSION, len(streams), tag(self.name), len(rows)) + sizes
        return b"".join([header, xxhash.xxh3_64_intdigest(header).to_bytes(8, "little"), *streams])

    def decode(self, stream: bytes | memoryview, rows: range | None = None) -> np.ndarray:
        """See `Codec.decode`."""
        count, streams = self._read(stream)
        asked = wanted(rows, count)
        fields = {}
        for f in self.form.fields:
            if f.count == 0:
                fields[f.name] = np.empty((len(asked), 0), np.uint8)
                continue
            fields[f.name] = self._field(f, streams[f.name], asked)
        return to_bytes(fields, self.form)

    def touched(self, stream: bytes | memoryview, rows: range | None = None) -> Touched:
        """See `Codec.touched`: the groups of all fields."""
        count, streams = self._read(stream)
        found = [self.of(f).touched(streams[f.name], wanted(rows, count)) for f in self._kept]
        header = len(memoryview(stream).cast("B")) - sum(len(s) for s in streams.values())
        return Touched(sum(t.groups for t in found), header + sum(t.nbytes for t in found))

    def _field(self, which: Field, stream: memoryview, rows: range) -> np.ndarray:
        """Rows of one field, which are what the format says."""
        try:
            found = self.of(which).decode(stream, rows)
        except CodecError:
            raise
        except ValueError:
            raise DamagedStream(f"the field {which.name!r} has fewer rows than the header says") from None
        if found.dtype != element_type(which.dtype) or found.shape[1] != which.count:
            raise DamagedStream(f"the field {which.name!r} holds {found.dtype.name} {list(found.shape)}")
        return found

    @property
    def _kept(self) -> list[Field]:
        """The fields that have bytes."""
        return [f for f in self.form.fields if f.count]

    def _read(self, stream: bytes | memoryview) -> tuple[int, dict[str, memoryview]]:
        """The rows, and the stream of each field."""
        view = memoryview(stream).cast("B")
        check_start(view, MAGIC, VERSION, _FIXED.size)
        _, _, number, name, count = _FIXED.unpack(view[: _FIXED.size])
        end = _FIXED.size + 4 * number
        at = end + 8
        if len(view) < at:
            raise TruncatedStream(f"{len(view)} bytes end within a header of {at}")
        if xxhash.xxh3_64_intdigest(view[:end]) != int.from_bytes(view[end:at], "little"):
            raise DamagedStream("the header does not match its checksum")
        if name != tag(self.name):
            raise ForeignStream(f"the stream of another codec than {self.name!r}")
        sizes = struct.unpack(f"<{number}I", view[_FIXED.size : end])
        total = at + sum(sizes)
        if len(view) < total:
            raise TruncatedStream(f"{len(view)} bytes, {total} were expected")
        if len(view) > total or number != len(self._kept):
            raise DamagedStream(f"{len(view)} bytes and {number} fields, the header says {total}")
        streams = {}
        for f, size in zip(self._kept, sizes, strict=True):
            streams[f.name] = view[at : at + size]
            at += size
        return count, streams
