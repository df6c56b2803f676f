"""Row formats: which bytes hold one row of state, and what each of them is.

A format is a list of fields, nothing else; how rows are put into pages is `layouts`. The names in
`ROW_FORMATS` are those that users write.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import ml_dtypes
import numpy as np

FP8_BLOCK = 64
"""Channels that share a scale in the native row."""

FP8_BLOCK_V32 = 128
"""Channels that share a scale in the row of V3.2."""

FP4_BLOCK = 32
"""Channels that share a scale in an FP4 index key."""


@dataclass(frozen=True, slots=True)
class Field:
    """Consecutive bytes of a row that hold one thing.

    Attributes:
        name: "values", "rope", "scales" or "padding".
        dtype: a name that NumPy or ml_dtypes knows; two "float4_e2m1fn" share a byte, the first in the low
            half.
        count: elements.
    """

    name: str
    dtype: str
    count: int

    @property
    def nbytes(self) -> int:
        """Bytes of the field."""
        if self.dtype == "float4_e2m1fn":
            return self.count // 2
        return self.count * element_type(self.dtype).itemsize


@dataclass(frozen=True, slots=True)
class RowFormat:
    """The fields of one row, in their order in memory."""

    name: str
    fields: tuple[Field, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of a row."""
        return sum(field.nbytes for field in self.fields)


def element_type(name: str) -> np.dtype:
    """The NumPy dtype of a name, those of ml_dtypes included."""
    return np.dtype(getattr(ml_dtypes, name, name))


def plain(dtype: str) -> Callable[[int, int], RowFormat]:
    """Every channel in one element type."""
    return lambda channels, rope: RowFormat(dtype, (Field("values", dtype, channels),))


def fp8(channels: int, rope: int, values: str = "float8_e4m3fn") -> RowFormat:
    """The native row: E4M3 values, rotated channels in BF16, a UE8M0 scale for 64 values, padded to 8 scales.

    584 bytes for 512 channels of which 64 are rotated.
    """
    blocks = -(-(channels - rope) // FP8_BLOCK)
    fields = [Field("values", values, channels - rope), Field("rope", "bfloat16", rope)]
    fields += [Field("scales", "float8_e8m0fnu", blocks), Field("padding", "uint8", -blocks % 8)]
    return RowFormat("fp8" if values == "float8_e4m3fn" else "fp8_fnuz", tuple(fields))


def fp8_fnuz(channels: int, rope: int) -> RowFormat:
    """The native row in the E4M3 variant of some AMD devices: one NaN (0x80), no -0, largest value 240."""
    return fp8(channels, rope, "float8_e4m3fnuz")


def fp8_v32(channels: int, rope: int) -> RowFormat:
    """The row of V3.2: E4M3 values, a float32 scale for 128 values, then rotated channels in BF16.

    656 bytes for 576 channels of which 64 are rotated.
    """
    blocks = -(-(channels - rope) // FP8_BLOCK_V32)
    fields = (Field("values", "float8_e4m3fn", channels - rope), Field("scales", "float32", blocks))
    return RowFormat("fp8_v32", (*fields, Field("rope", "bfloat16", rope)))


def index_fp8(channels: int, rope: int = 0) -> RowFormat:
    """An index key in E4M3 with one float32 scale: 132 bytes for 128 channels."""
    return RowFormat("index_fp8", (Field("values", "float8_e4m3fn", channels), Field("scales", "float32", 1)))


def index_fp4(channels: int, rope: int = 0) -> RowFormat:
    """An index key in E2M1 with a UE8M0 scale for 32 values: 68 bytes for 128 channels."""
    blocks = -(-channels // FP4_BLOCK)
    fields = (Field("values", "float4_e2m1fn", channels), Field("scales", "float8_e8m0fnu", blocks))
    return RowFormat("index_fp4", fields)


ROW_FORMATS: dict[str, Callable[[int, int], RowFormat]] = {
    "float32": plain("float32"),
    "bfloat16": plain("bfloat16"),
    "fp8": fp8,
    "fp8_fnuz": fp8_fnuz,
    "fp8_v32": fp8_v32,
    "index_fp8": index_fp8,
    "index_fp4": index_fp4,
}
"""Name -> the format for (channels, how many of them are rotated)."""
