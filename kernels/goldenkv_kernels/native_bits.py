"""The native FP8 page: where things lie, and its bytes from float bits and back, for Pallas and XLA alike."""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Int32

from goldenkv.ops.quant import NAN_CODE
from goldenkv.state.layouts import page_layout

from .blocks import blocks
from .grids import E4M3, INFINITY, SIGN, bits, codes, floats, to_bfloat16, values

QUIET = 0x7FC00000
"""The NaN that every NaN of a value unpacks to, with its sign."""


@dataclass(frozen=True, slots=True)
class NativePage:
    """Where things lie in a page of native rows.

    Attributes:
        rows: of a page.
        plain, rope: channels of a row in E4M3, and those that are rotated.
    """

    rows: int
    plain: int
    rope: int

    @property
    def channels(self) -> int:
        """Of a row."""
        return self.plain + self.rope

    @property
    def data(self) -> int:
        """Bytes of a row without its scales."""
        return self.plain + 2 * self.rope

    @property
    def scales(self) -> int:
        """Scales of a row that mean something."""
        return blocks(self.plain, E4M3.block)

    @property
    def scale_bytes(self) -> int:
        """Bytes of the scales of a row."""
        return blocks(self.scales, 8) * 8

    @property
    def nbytes(self) -> int:
        """Of a page."""
        return page_layout("fp8", self.rows, self.channels, self.rope).nbytes


def native_page(rows: int, channels: int, rope: int) -> NativePage:
    """The page of so many rows; ValueError for sizes that it cannot have."""
    if rows < 1 or not 0 < rope < channels:
        raise ValueError(f"{rows=} must be at least 1, and {rope=} in 1 .. {channels - 1} ({channels=})")
    return NativePage(rows, channels - rope, rope)


def row_bits(unsigned: Array) -> Int32[Array, "*n"]:
    """float32 bits, int32, of the bits of float32 or bfloat16."""
    if unsigned.dtype == jnp.uint16:
        return unsigned.astype(jnp.int32) << 16
    return lax.bitcast_convert_type(unsigned, jnp.int32)


def value_bytes(pattern: Int32[Array, "*n"], scale: Int32[Array, "*n"]) -> Int32[Array, "*n"]:
    """E4M3 bytes of float32 bits under a scale: NaN throughout a broken block, with the sign of NaN alone."""
    broken = scale == NAN_CODE
    nan = (pattern & ~SIGN) > INFINITY
    code = jnp.where(broken, 0x7F, codes(floats(pattern), scale, E4M3))
    return code | jnp.where(broken & ~nan, 0, (pattern >> 24) & 0x80)


def value_bits(byte: Int32[Array, "*n"], scale: Int32[Array, "*n"]) -> Int32[Array, "*n"]:
    """float32 bits of E4M3 bytes times 2^(scale - 127), exact for all bytes and scales, subnormals too.

    In integers: a product that is subnormal would be 0 where the hardware flushes it.
    """
    code = byte & 0x7F
    number = bits(values(code, E4M3))
    exponent = (number >> 23) + scale - 127
    fraction = number & 0x7FFFFF
    subnormal = (fraction | 0x800000) >> jnp.clip(1 - exponent, 0, 31)
    found = jnp.where(exponent > 0, (exponent << 23) | fraction, subnormal)
    found = jnp.where(exponent > 254, INFINITY, found)
    found = jnp.where(code == 0, 0, found)
    found = jnp.where((code == 0x7F) | (scale == NAN_CODE), QUIET, found)
    return found | ((byte & 0x80) << 24)


def narrowed(pattern: Int32[Array, "*n"], unsigned: DTypeLike) -> Array:
    """float32 bits as uint32, or rounded to bfloat16 as uint16."""
    if unsigned == jnp.uint16:
        return to_bfloat16(pattern).astype(jnp.uint16)
    return lax.bitcast_convert_type(pattern, jnp.uint32)
