"""Entropy coders: what makes segments of bytes shorter.

A codec cuts a group into *segments*, bytes of one kind: the high bytes of its keyframe, say. Segment i of
every group is of kind i. `fit` sees all of a kind and may leave a *model* in the stream; then every group is
coded alone.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from ..errors import MissingExtra
from .codec import DamagedStream

Segments = Sequence[np.ndarray]
"""uint8 [bytes] each."""


class Coder(Protocol):
    """An entropy coder with its model."""

    def encode(self, segments: Segments) -> bytes:
        """The segments of a group."""

    def decode(self, data: memoryview, sizes: Sequence[int]) -> list[np.ndarray]:
        """Segments of these sizes; nothing is allotted beyond them.

        Raises:
            DamagedStream: these bytes are not such segments.
        """


class Entropy(Protocol):
    """A kind of entropy coder."""

    @property
    def name(self) -> str:
        """For the names of codecs."""

    def fit(self, kinds: Segments) -> bytes:
        """The model, from all bytes of every kind."""

    def coder(self, model: bytes | memoryview) -> Coder:
        """The coder of a stream.

        Raises:
            DamagedStream: that is no model.
        """


@dataclass(frozen=True, slots=True)
class Zstd:
    """Each segment as a zstd frame of its own, so that it has tables of its own. There is no model.

    Raises:
        MissingExtra: `zstandard` is not installed.
    """

    level: int = 3

    def __post_init__(self) -> None:
        _zstandard()

    @property
    def name(self) -> str:
        return f"zstd{self.level}"

    def fit(self, kinds: Segments) -> bytes:
        return b""

    def coder(self, model: bytes | memoryview) -> Coder:
        if len(model):
            raise DamagedStream("a model, zstd has none")
        return _ZstdCoder(self.level)


class _ZstdCoder:
    """Segments one after the other, those without bytes left out. Each is a size in LEB128, then so many
    bytes of a zstd frame without its magic number. Sizes that no frame has mean something else: after 0 the
    segment follows as it is, after 1 the one byte that all of it is."""

    _MAGIC = b"\x28\xb5\x2f\xfd"

    def __init__(self, level: int) -> None:
        self._zstd = _zstandard()
        flags = dict.fromkeys(("write_content_size", "write_checksum", "write_dict_id"), False)
        parameters = self._zstd.ZstdCompressionParameters.from_level(level, **flags)
        self._compress = self._zstd.ZstdCompressor(compression_params=parameters).compress
        self._decompress = self._zstd.ZstdDecompressor().decompress

    def encode(self, segments: Segments) -> bytes:
        parts = []
        for segment in segments:
            if not len(segment):
                continue
            if (segment == segment[0]).all():
                parts += [b"\1", segment[:1].tobytes()]
                continue
            frame = self._compress(np.ascontiguousarray(segment).data)[len(self._MAGIC) :]
            coded = len(frame) < len(segment)
            parts += [leb128(len(frame)), frame] if coded else [b"\0", segment.tobytes()]
        return b"".join(parts)

    def decode(self, data: memoryview, sizes: Sequence[int]) -> list[np.ndarray]:
        found, at = [], 0
        for size in sizes:
            if not size:
                found.append(np.empty(0, np.uint8))
                continue
            coded, at = read_leb128(data, at)
            piece = bytes(data[at : at + (coded or size)])
            at += coded or size
            if coded > 1:
                piece = self._opened(piece, size)
            elif coded:
                piece = piece * size
            if len(piece) != size:
                raise DamagedStream(f"a segment of {len(piece)} bytes, {size} were expected")
            found.append(np.frombuffer(piece, np.uint8))
        if at != len(data):
            raise DamagedStream(f"a group of {len(data)} bytes, its segments take {at}")
        return found

    def _opened(self, piece: bytes, size: int) -> bytes:
        frame = self._MAGIC + piece
        try:
            # A frame that names its size would have that much allotted.
            if self._zstd.get_frame_parameters(frame).content_size != self._zstd.CONTENTSIZE_UNKNOWN:
                raise DamagedStream("a zstd frame that names its size")
            opened: bytes = self._decompress(frame, max_output_size=size)
        except self._zstd.ZstdError as error:
            raise DamagedStream(f"zstd: {error}") from None
        return opened


def leb128(number: int) -> bytes:
    """7 bits in a byte, the lowest first; the last byte has its highest bit clear."""
    found = []
    while number > 127:
        found.append(number & 127 | 128)
        number >>= 7
    return bytes([*found, number])


def read_leb128(data: memoryview, at: int) -> tuple[int, int]:
    """The number there, and where it ends.

    Raises:
        DamagedStream: the data end before, or it is longer than any that is written.
    """
    number = 0
    for place in range(5):
        if at + place >= len(data):
            break
        number |= (data[at + place] & 127) << 7 * place
        if data[at + place] < 128:
            return number, at + place + 1
    raise DamagedStream("a group ends within a number")


@dataclass(frozen=True, slots=True)
class Range:
    """A range coder with a fixed table of frequencies for each kind of segment: the model of the stream.

    Raises:
        MissingExtra: `constriction` is not installed.
    """

    def __post_init__(self) -> None:
        _constriction()

    @property
    def name(self) -> str:
        return "range"

    def fit(self, kinds: Segments) -> bytes:
        tables = [_table(np.bincount(kind, minlength=256)) for kind in kinds]
        return zlib.compress(np.array(tables, np.uint8).tobytes(), 9)

    def coder(self, model: bytes | memoryview) -> Coder:
        opened = zlib.decompressobj()
        try:
            tables = opened.decompress(model, _TABLES * 256)
        except zlib.error as error:
            raise DamagedStream(f"the model: {error}") from None
        if not opened.eof or opened.unused_data or len(tables) % 256:
            raise DamagedStream("the model is not one of tables with 256 frequencies")
        codes = np.frombuffer(tables, np.uint8).reshape(-1, 256)
        if codes.size and codes.max() >= _CODES:
            raise DamagedStream("the model has a frequency that no table has")
        return _RangeCoder(_frequencies(codes))


_TABLES, _CODES = 16, 240
"""At most so many tables, and so many values of an entry."""


def _table(counts: np.ndarray) -> np.ndarray:
    """The table of a kind of segment: all ones where one of its own would take more than it saves."""
    total, there = counts.sum(), counts[counts > 0]
    saved = 8 * total - (there * np.log2(total / there)).sum()
    return _rounded(counts) if saved > 8 * len(there) else np.ones(256, np.uint8)


def _rounded(counts: np.ndarray) -> np.ndarray:
    """Counts as numbers of a byte: 0 for none, or an exponent and 3 bits of mantissa."""
    exponent = np.maximum(np.frexp(counts.astype(np.float64))[1] - 4, 0)
    mantissa = counts >> exponent  # below 16; from 8 on where the exponent is not 0
    return np.where(exponent, (exponent + 1) * 8 + mantissa - 8, mantissa).astype(np.uint8)


def _frequencies(codes: np.ndarray) -> np.ndarray:
    """The inverse of `_rounded`, as float64: exact."""
    exponent = np.maximum(codes.astype(np.int64) // 8 - 1, 0)
    return np.ldexp(np.where(codes < 16, codes, codes % 8 + 8).astype(np.float64), exponent)


class _RangeCoder:
    """All segments of a group through one coder, so that a group ends but once."""

    def __init__(self, tables: np.ndarray) -> None:
        stream = _constriction().stream
        self._queue = stream.queue
        # A frequency of 0 gets the smallest probability there is: it can be coded, at 24 bits.
        self._models = [
            stream.model.Categorical(table / table.sum(), perfect=False) for table in tables if table.any()
        ]
        if len(self._models) != len(tables):
            raise DamagedStream("the model has a table without a frequency")

    def encode(self, segments: Segments) -> bytes:
        encoder = self._queue.RangeEncoder()
        for segment, model in zip(segments, self._models, strict=True):
            if len(segment):
                encoder.encode(segment.astype(np.int32), model)
        words: np.ndarray = encoder.get_compressed()
        return words.astype("<u4").tobytes()

    def decode(self, data: memoryview, sizes: Sequence[int]) -> list[np.ndarray]:
        if len(data) % 4 or len(sizes) != len(self._models):
            raise DamagedStream(f"{len(data)} bytes and {len(self._models)} tables are no range-coded group")
        decoder = self._queue.RangeDecoder(np.frombuffer(data, "<u4").astype(np.uint32))
        found = []
        for size, model in zip(sizes, self._models, strict=True):
            try:
                segment = decoder.decode(model, size) if size else np.empty(0)
            except AssertionError as error:  # constriction's way to say so
                raise DamagedStream(f"range coder: {error}") from None
            found.append(segment.astype(np.uint8))
        if not decoder.maybe_exhausted():
            raise DamagedStream("a range-coded group that goes on")
        return found


def _zstandard() -> Any:
    try:
        import zstandard
    except ImportError as error:
        raise MissingExtra("delta", "the zstd back end of delta codecs") from error
    return zstandard


def _constriction() -> Any:
    try:
        import constriction
    except ImportError as error:
        raise MissingExtra("delta", "the range coder of delta codecs") from error
    return constriction
