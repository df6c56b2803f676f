"""Lossless baselines over native rows: what is won without looking at a neighbour.

Each takes rows as bytes, uint8 [n, form.nbytes], and gives them back bit for bit. What a stream needs to be
read (row count, tables, lengths) is in it and counts; the row format is known to both sides.

=================  =========================================================================================
raw                the rows themselves
zstd, byte planes  byte k of all rows, then byte k + 1: zstd sees what belongs together
blosc2             the same transposition by its shuffle, or by bits, then zstd
pcodec             each field as integers; it picks a mode and an order of deltas by itself
=================  =========================================================================================
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np

from ..errors import MissingExtra
from ..state import RowFormat
from ..state.compare import unsigned
from ..state.formats import Field, element_type
from ..state.packing import from_bytes, to_bytes
from .streams import BrokenStream, expand, join_parts, split_parts, squeeze


class Codec(Protocol):
    """What the study asks of a codec; those of `goldenkv.delta` have it too."""

    @property
    def name(self) -> str:
        """As in tables."""

    @property
    def lossless(self) -> bool:
        """Every bit comes back."""

    def encode(self, rows: np.ndarray) -> bytes:
        """Rows [n, channels or bytes] as a stream."""

    def decode(self, stream: bytes) -> np.ndarray:
        """The rows of a stream."""


@dataclass(frozen=True, slots=True)
class Raw:
    """The native rows as they are."""

    form: RowFormat
    name: str = "raw native"
    lossless: bool = True

    def encode(self, rows: np.ndarray) -> bytes:
        return rows.tobytes()

    def decode(self, stream: bytes) -> np.ndarray:
        return _rows(stream, self.form)


@dataclass(frozen=True, slots=True)
class ZstdPlanes:
    """zstd over byte planes."""

    form: RowFormat
    level: int = 9
    name: str = "zstd, byte planes"
    lossless: bool = True

    def encode(self, rows: np.ndarray) -> bytes:
        return squeeze(np.ascontiguousarray(rows.T).tobytes(), self.level)

    def decode(self, stream: bytes) -> np.ndarray:
        return _rows(expand(stream), self.form, transposed=True)


@dataclass(frozen=True, slots=True)
class Blosc2:
    """blosc2 with its own transposition, of bytes or of bits, and zstd."""

    form: RowFormat
    how: Literal["shuffle", "bitshuffle"] = "shuffle"
    lossless: bool = True

    @property
    def name(self) -> str:
        return f"blosc2, {self.how}"

    def encode(self, rows: np.ndarray) -> bytes:
        blosc2 = _package("blosc2")
        if not len(rows):
            return b""
        # Its elements have at most 255 bytes: wider rows go in transposed, byte by byte.
        size = self.form.nbytes if self.form.nbytes <= 255 else 1
        data = rows if size > 1 else rows.T
        filters = [blosc2.Filter.SHUFFLE if self.how == "shuffle" else blosc2.Filter.BITSHUFFLE]
        return bytes(
            blosc2.compress2(
                np.ascontiguousarray(data).tobytes(),
                typesize=size, filters=filters, codec=blosc2.Codec.ZSTD, clevel=9, nthreads=1,
            )
        )  # fmt: skip

    def decode(self, stream: bytes) -> np.ndarray:
        blosc2 = _package("blosc2")
        data = bytes(blosc2.decompress2(stream, nthreads=1)) if stream else b""
        return _rows(data, self.form, transposed=self.form.nbytes > 255)


@dataclass(frozen=True, slots=True)
class Pcodec:
    """pcodec over each field as unsigned integers, channel after channel."""

    form: RowFormat
    name: str = "pcodec"
    lossless: bool = True

    def encode(self, rows: np.ndarray) -> bytes:
        pco = _package("pcodec")
        config = pco.ChunkConfig(compression_level=8, enable_8_bit=True)
        fields = elements(rows, self.form)
        parts = [
            bytes(pco.standalone.simple_compress(f.T.ravel(), config)) if f.size else b"" for f in fields
        ]
        return join_parts([len(rows).to_bytes(4, "little"), *parts])

    def decode(self, stream: bytes) -> np.ndarray:
        pco = _package("pcodec")
        count, *parts = split_parts(stream, 1 + len(self.form.fields))
        rows = int.from_bytes(count, "little")
        fields = []
        for field, part in zip(self.form.fields, parts, strict=True):
            flat = pco.standalone.simple_decompress(part) if part else np.zeros(0, _integers(field))
            fields.append(np.asarray(flat).reshape(field.count, rows).T)
        return together(fields, self.form)


def lossless_baselines(form: RowFormat) -> list[Codec]:
    """All of them for rows of one format."""
    return [
        Raw(form),
        ZstdPlanes(form),
        Blosc2(form, "shuffle"),
        Blosc2(form, "bitshuffle"),
        Pcodec(form),
    ]


def _package(name: str) -> Any:
    try:
        return __import__(name)
    except ImportError:
        raise MissingExtra("delta", f"the baseline {name}") from None


def _rows(data: bytes, form: RowFormat, *, transposed: bool = False) -> np.ndarray:
    """uint8 [n, form.nbytes]."""
    if len(data) % form.nbytes:
        raise BrokenStream(f"{len(data)} bytes are no rows of {form.nbytes}")
    flat = np.frombuffer(data, np.uint8)
    return flat.reshape(form.nbytes, -1).T if transposed else flat.reshape(-1, form.nbytes)


def _integers(field: Field) -> np.dtype:
    """The unsigned type that holds an element."""
    return np.dtype(f"u{element_type(field.dtype).itemsize}")


def elements(rows: np.ndarray, form: RowFormat) -> list[np.ndarray]:
    """The bits of each field's elements, unsigned [n, count]."""
    fields = from_bytes(rows, form)
    return [unsigned(fields[field.name]) for field in form.fields]


def together(bits: list[np.ndarray], form: RowFormat) -> np.ndarray:
    """The inverse of `elements`."""
    fields = {
        field.name: np.ascontiguousarray(b.astype(_integers(field))).view(element_type(field.dtype))
        for field, b in zip(form.fields, bits, strict=True)
    }
    return to_bytes(fields, form)
