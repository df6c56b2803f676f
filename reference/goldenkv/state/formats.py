"""Row formats: which bytes hold one row of state, and what each of them is.

A format is a list of fields and, where values share scales, the rule by which engines choose one. `packing`
turns rows into bytes and back, `layouts` puts them into pages. The names in `ROW_FORMATS` are those that
users write. Sources, as of 2026: FlashMLA (`README.md`, `tests/quant.py`), vLLM
(`csrc/libtorch_stable/cache_kernels.cu`, `vllm/models/deepseek_v4/common/ops`), SGLang
(`mem_cache/deepseek_v4_memory_pool.py`), TensorRT-LLM (`sparse/deepseek_v4/footer_scale_kv.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from ..ops.quant import E2M1_FLOOR, E2M1_MAX, E4M3_FLOOR, E4M3_MAX, INDEX_BLOCK, KV_BLOCK

FP8_BLOCK_V32 = 128
"""Channels that share a scale in the row of V3.2."""


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
class Scaling:
    """How an engine chooses the scale of a block: max(amax, floor) / largest, then rounded up or not.

    Attributes:
        block: channels that share a scale; a shorter last block stands alone.
        largest: what a block's largest value becomes at most.
        floor: the least amax, so that an empty block has a scale too.
        power_of_two: the scale is rounded up to one.
    """

    block: int
    largest: float
    floor: float
    power_of_two: bool = True


@dataclass(frozen=True, slots=True)
class RowFormat:
    """The fields of one row, in their order in memory, and how its values are scaled, if they are."""

    name: str
    fields: tuple[Field, ...]
    scaling: Scaling | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of a row."""
        return sum(field.nbytes for field in self.fields)

    @property
    def channels(self) -> int:
        """Channels of a row."""
        return sum(field.count for field in self.fields if field.name in ("values", "rope"))

    def field(self, name: str) -> Field:
        """The field of that name."""
        return next(field for field in self.fields if field.name == name)


def element_type(name: str) -> np.dtype:
    """The NumPy dtype of a name, those of ml_dtypes included."""
    return np.dtype(getattr(ml_dtypes, name, name))


def plain(dtype: str) -> Callable[[int, int], RowFormat]:
    """Every channel in one element type."""
    return lambda channels, rope: RowFormat(dtype, (Field("values", dtype, channels),))


def fp8(channels: int, rope: int) -> RowFormat:
    """The native row: E4M3 values, rotated channels in BF16, a UE8M0 scale for 64 values, padded to 8 scales.

    584 bytes for 512 channels of which 64 are rotated. Scale 2^ceil(log2(max(amax, 1e-4) / 448)) as in the
    published model and vLLM. TensorRT-LLM's floor is 1e-8, and FlashMLA's test code keeps the quotient at
    1e-4 or above: small blocks have other scales there, which unpack just as well.
    """
    return _native("fp8", "float8_e4m3fn", E4M3_MAX, channels, rope)


def fp8_fnuz(channels: int, rope: int) -> RowFormat:
    """The native row in the E4M3 variant of some AMD devices: one NaN (0x80), no -0, largest value 240.

    vLLM scales to 224 there. It writes this variant for window rows only; compressed rows are `fp8` even on
    those devices.
    """
    return _native("fp8_fnuz", "float8_e4m3fnuz", 224.0, channels, rope)


def _native(name: str, values: str, largest: float, channels: int, rope: int) -> RowFormat:
    blocks = -(-(channels - rope) // KV_BLOCK)
    fields = [Field("values", values, channels - rope), Field("rope", "bfloat16", rope)]
    fields += [Field("scales", "float8_e8m0fnu", blocks), Field("padding", "uint8", -blocks % 8)]
    return RowFormat(name, tuple(fields), Scaling(KV_BLOCK, largest, E4M3_FLOOR))


def fp8_v32(channels: int, rope: int) -> RowFormat:
    """The row of V3.2: E4M3 values, a float32 scale for 128 values, then rotated channels in BF16.

    656 bytes for 576 channels of which 64 are rotated. vLLM stores max(amax / 448, 2^-126) as it is;
    FlashMLA's test code rounds it up to a power of two.
    """
    blocks = -(-(channels - rope) // FP8_BLOCK_V32)
    fields = (Field("values", "float8_e4m3fn", channels - rope), Field("scales", "float32", blocks))
    scaling = Scaling(FP8_BLOCK_V32, E4M3_MAX, E4M3_MAX * 2.0**-126, power_of_two=False)
    return RowFormat("fp8_v32", (*fields, Field("rope", "bfloat16", rope)), scaling)


def index_fp8(channels: int, rope: int = 0) -> RowFormat:
    """An index key in E4M3 with one float32 scale: 132 bytes for 128 channels.

    vLLM's V4 kernel rounds the scale up to a power of two; its V3.2 kernel can store max(amax, 1e-4) / 448.
    """
    fields = (Field("values", "float8_e4m3fn", channels), Field("scales", "float32", 1))
    return RowFormat("index_fp8", fields, Scaling(channels, E4M3_MAX, E4M3_FLOOR))


def index_fp4(channels: int, rope: int = 0) -> RowFormat:
    """An index key in E2M1 with a UE8M0 scale for 32 values: 68 bytes for 128 channels."""
    if channels % 2:
        raise ValueError(f"{channels=} must be even: two FP4 values share a byte")
    blocks = -(-channels // INDEX_BLOCK)
    fields = (Field("values", "float4_e2m1fn", channels), Field("scales", "float8_e8m0fnu", blocks))
    return RowFormat("index_fp4", fields, Scaling(INDEX_BLOCK, E2M1_MAX, E2M1_FLOOR))


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


def row_format(name: str, channels: int, rope: int = 0) -> RowFormat:
    """The format of that name.

    Args:
        name: a key of `ROW_FORMATS`.
        channels: of a row.
        rope: how many of them, the last ones, are rotated. Only the formats that keep them apart look at it.

    Raises:
        ValueError: no such format, or sizes that it cannot have.
    """
    if name not in ROW_FORMATS:
        raise ValueError(f"row format {name!r} is not one of {', '.join(ROW_FORMATS)}")
    if not 0 <= rope < channels:
        raise ValueError(f"{rope=} must lie in 0 .. {channels - 1} ({channels=})")
    return ROW_FORMATS[name](channels, rope)
