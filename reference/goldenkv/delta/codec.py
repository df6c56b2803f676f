"""What a codec of rows is, and every way in which a stream cannot be read."""

from __future__ import annotations

from typing import NamedTuple, Protocol, runtime_checkable

import ml_dtypes
import numpy as np

DTYPES = (
    "float32", "bfloat16", "float16", "uint8", "uint16", "uint32",
    "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn",
)  # fmt: skip
"""Element types of rows; a stream has the place in this list. A FP4 code takes a byte, as in ml_dtypes."""

LARGEST = 1 << 27
"""Bytes of the rows of one stream, at most: what a stream may claim before anything is allotted for it."""


class CodecError(ValueError):
    """Rows or a stream that a codec does not take. Each kind has a class of its own."""


class ForeignStream(CodecError):
    """Something else, another version of the format, or the stream of another codec."""


class TruncatedStream(CodecError):
    """It ends before it says it does."""


class DamagedStream(CodecError):
    """Bytes differ from their checksum, or do not make a stream at all."""


class UnsupportedRows(CodecError):
    """Rows of a shape, size or element type that the codec does not take."""


class Touched(NamedTuple):
    """The parts of a stream that are read for some rows: groups, and bytes (header and index included)."""

    groups: int
    nbytes: int


@runtime_checkable
class Codec(Protocol):
    """Rows to a stream and back.

    Attributes:
        name: unique and printable; it holds the parameters. A stream is read by a codec of the same name.
        lossless: whether `decode` returns the bits that `encode` got, for every bit pattern.
    """

    @property
    def name(self) -> str: ...

    @property
    def lossless(self) -> bool: ...

    def encode(self, rows: np.ndarray) -> bytes:
        """Rows as one stream, which says by itself what its rows are.

        Args:
            rows: [n, channels] of an element type in `DTYPES`, any n and channels from 0 on.

        Raises:
            UnsupportedRows: another shape or type, or more than `LARGEST` bytes.
        """

    def decode(self, stream: bytes | memoryview, rows: range | None = None) -> np.ndarray:
        """All rows, or those: only the groups that hold them are read.

        Args:
            stream: of a codec of this name.
            rows: a range of step 1 within the stream.

        Raises:
            ForeignStream, TruncatedStream, DamagedStream: it cannot be read.
            ValueError: rows that the stream does not have.
        """

    def touched(self, stream: bytes | memoryview, rows: range | None = None) -> Touched:
        """What `decode` reads for these arguments. Errors as there, of the header and index alone."""


def element_type(name: str) -> np.dtype:
    """The NumPy dtype of a name in `DTYPES`."""
    return np.dtype(getattr(ml_dtypes, name, name))


def check_rows(rows: np.ndarray) -> np.ndarray:
    """The rows, contiguous.

    Raises:
        UnsupportedRows: not [n, channels] of a type in `DTYPES`, or more than `LARGEST` bytes.
    """
    if rows.ndim != 2 or rows.dtype.name not in DTYPES:
        raise UnsupportedRows(
            f"expected [rows, channels] of {', '.join(DTYPES)}, got {rows.dtype.name} {list(rows.shape)}"
        )
    if rows.nbytes > LARGEST:
        raise UnsupportedRows(
            f"rows of {rows.nbytes} bytes, at most {LARGEST} in a stream: encode them in parts"
        )
    return np.ascontiguousarray(rows, rows.dtype.newbyteorder("="))
