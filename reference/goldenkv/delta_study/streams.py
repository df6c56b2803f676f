"""What the baselines' streams are made of: parts with lengths, and symbols through a range coder.

The range coder is that of the package constriction (extra `delta`). Its models take integers; what they need
to know besides is written into the stream and counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..errors import MissingExtra

LARGEST = 1 << 20
"""Of the integers of a Laplace model: beyond, the coder has no probability left for each."""


class BrokenStream(ValueError):
    """Bytes that are no stream of this codec: cut off, or with something after the end."""


def join_parts(parts: Sequence[bytes]) -> bytes:
    """Parts behind one another, each after its length in four bytes."""
    return b"".join(len(part).to_bytes(4, "little") + part for part in parts)


def split_parts(stream: bytes, count: int) -> list[bytes]:
    """What `join_parts` joined.

    Raises:
        BrokenStream: not exactly so many parts.
    """
    parts, at = [], 0
    for _ in range(count):
        size = int.from_bytes(stream[at : at + 4], "little")
        at += 4
        if at + size > len(stream):
            raise BrokenStream(f"{len(stream)} bytes end within a part that ends at {at + size}")
        parts.append(stream[at : at + size])
        at += size
    if at != len(stream):
        raise BrokenStream(f"{len(stream) - at} bytes after the end")
    return parts


def coder() -> Any:
    """The module `constriction.stream`.

    Raises:
        MissingExtra: it is not installed.
    """
    try:
        import constriction
    except ImportError:
        raise MissingExtra("delta", "range coding") from None
    return constriction.stream


def encode_tables(symbols: np.ndarray, alphabet: int) -> bytes:
    """Each column with the distribution that it has: a range coder with one table a column.

    A column whose table would take more than it saves is coded as uniform.

    Args:
        symbols: integers 0 .. alphabet - 1, [n, columns].
        alphabet: how many there are.

    Returns:
        The tables (a byte a symbol, packed by zstd) and the coded symbols.
    """
    stream = coder()
    tables = np.stack([_rounded(np.bincount(column, minlength=alphabet)) for column in symbols.T])
    encoder = stream.queue.RangeEncoder()
    for column, table in zip(symbols.T, tables, strict=True):
        if np.count_nonzero(table) != 1 and len(symbols):  # what is constant is known from its table
            encoder.encode(np.ascontiguousarray(column, np.int32), _model(stream, table))
    return join_parts([squeeze(tables.T.tobytes()), encoder.get_compressed().astype("<u4").tobytes()])


def decode_tables(data: bytes, rows: int, columns: int, alphabet: int) -> np.ndarray:
    """What `encode_tables` coded: int64 [rows, columns]."""
    stream = coder()
    packed, coded = split_parts(data, 2)
    tables = np.frombuffer(expand(packed), np.uint8).reshape(alphabet, columns).T
    decoder = stream.queue.RangeDecoder(np.frombuffer(coded, "<u4").astype(np.uint32))
    out = np.zeros((rows, columns), np.int64)
    for i, table in enumerate(tables):
        if np.count_nonzero(table) == 1:
            out[:, i] = int(table.argmax())
        elif rows:
            out[:, i] = decoder.decode(_model(stream, table), rows)
    return out


def _rounded(counts: np.ndarray) -> np.ndarray:
    """Counts to a quarter of an octave, one byte each, 0 for none; all zero where no table pays."""
    there, total = counts[counts > 0], counts.sum()
    saved = total * np.log2(len(counts)) - (there * np.log2(total / there)).sum()
    if saved <= 8 * len(there):
        return np.zeros(len(counts), np.uint8)
    codes = np.round(4 * np.log2(np.maximum(counts, 1))) + 1
    return np.where(counts > 0, codes, 0).astype(np.uint8)


def _model(stream: Any, table: np.ndarray) -> Any:
    weights = np.where(table > 0, 2.0 ** ((table.astype(np.float64) - 1) / 4), 0 if table.any() else 1)
    return stream.model.Categorical((weights / weights.sum()).astype(np.float32), perfect=False)


def encode_laplace(symbols: np.ndarray, scales: np.ndarray) -> bytes:
    """Integers of any sign [n, columns], each column as Laplace-distributed about 0 with a known scale.

    Raises:
        ValueError: an integer beyond `LARGEST`.
    """
    stream = coder()
    most = int(np.abs(symbols).max(initial=0))
    if most > LARGEST:
        raise ValueError(f"integers up to {most}, at most {LARGEST} can be coded: the step is too small")
    if most == 0:
        return (0).to_bytes(4, "little")
    encoder = stream.queue.RangeEncoder()
    flat = np.ascontiguousarray(symbols, np.int32).ravel()
    encoder.encode(flat, *_laplace(stream, most, scales, len(symbols)))
    return most.to_bytes(4, "little") + encoder.get_compressed().astype("<u4").tobytes()


def decode_laplace(data: bytes, rows: int, scales: np.ndarray) -> np.ndarray:
    """What `encode_laplace` coded: int32 [rows, columns]."""
    most = int.from_bytes(data[:4], "little")
    if most == 0:
        return np.zeros((rows, len(scales)), np.int32)
    stream = coder()
    decoder = stream.queue.RangeDecoder(np.frombuffer(data[4:], "<u4").astype(np.uint32))
    return np.asarray(decoder.decode(*_laplace(stream, most, scales, rows))).reshape(rows, len(scales))


def _laplace(stream: Any, most: int, scales: np.ndarray, rows: int) -> tuple[Any, np.ndarray, np.ndarray]:
    wide = np.tile(np.maximum(scales.astype(np.float64), 1e-2), rows)
    return stream.model.QuantizedLaplace(-most, most), np.zeros_like(wide), wide


def squeeze(data: bytes, level: int = 9) -> bytes:
    """zstd.

    Raises:
        MissingExtra: the package zstandard is not installed.
    """
    return bytes(_zstandard().ZstdCompressor(level=level).compress(data))


def expand(data: bytes) -> bytes:
    """What `squeeze` packed.

    Raises:
        BrokenStream: it did not.
    """
    module = _zstandard()
    try:
        return bytes(module.ZstdDecompressor().decompress(data))
    except module.ZstdError as error:
        raise BrokenStream(f"not a zstd stream: {error}") from None


def _zstandard() -> Any:
    try:
        import zstandard
    except ImportError:
        raise MissingExtra("delta", "zstd") from None
    return zstandard
