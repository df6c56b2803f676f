"""Rounding to E4M3 and E2M1 in integers: the same bits in a kernel, under XLA, and in `ops.quant`.

A code is the exponent and mantissa of a format, without the sign. Scales are UE8M0 codes, as in `ops.quant`.
Integers, because Triton's division is approximate, its maximum drops NaN, and it has no rounding.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float32, Int32

from goldenkv.ops.quant import E2M1_FLOOR, E2M1_MAX, E4M3_FLOOR, E4M3_MAX, INDEX_BLOCK, KV_BLOCK, NAN_CODE

INFINITY = 0x7F800000
"""Bits of +inf; those of NaN without its sign are above."""

SIGN = -(2**31)


class Grid(NamedTuple):
    """A small float format, and how a block of channels chooses its scale.

    Attributes:
        mantissa, least: bits of the mantissa, and the exponent of the smallest normal number.
        last: code of the largest number, which is `largest`.
        floor: the least amax of a block.
        block: channels that share a scale; a shorter last block stands alone.
    """

    mantissa: int
    least: int
    last: int
    largest: float
    floor: float
    block: int


E4M3 = Grid(3, -6, 0x7E, E4M3_MAX, E4M3_FLOOR, KV_BLOCK)
E2M1 = Grid(1, 0, 7, E2M1_MAX, E2M1_FLOOR, INDEX_BLOCK)


def bits(x: Float32[Array, "*n"]) -> Int32[Array, "*n"]:
    """The bits of float32 numbers."""
    return lax.bitcast_convert_type(x, jnp.int32)


def floats(x: Int32[Array, "*n"]) -> Float32[Array, "*n"]:
    """The float32 numbers of bits."""
    return lax.bitcast_convert_type(x, jnp.float32)


def bits_of(number: float) -> int:
    """The bits of a constant: Triton's lowering knows no bitcast of one."""
    return int(np.float32(number).view(np.int32))


def scale_codes(x: Float32[Array, "*n block"], grid: Grid) -> Int32[Array, "*n"]:
    """The scale of each block: 2^ceil(log2(max(amax, floor) / largest)); 255 where a block is not finite.

    The largest magnitude is that of the bits: NaN is above infinity, and that above all numbers.
    """
    peak = jnp.max(bits(x) & ~SIGN, axis=-1)
    peak = jnp.maximum(peak, bits_of(grid.floor))
    quotient = bits(floats(peak) * jnp.float32(1 / grid.largest)) & ~SIGN
    code = (quotient >> 23) + ((quotient & 0x7FFFFF) != 0).astype(jnp.int32)
    return jnp.minimum(code, NAN_CODE)


def power_of_two(code: Int32[Array, "*n"]) -> Float32[Array, "*n"]:
    """2^(code - 127) for codes 1 to 254."""
    return floats(code << 23)


def codes(x: Float32[Array, "*n"], scale: Int32[Array, "*n"], grid: Grid) -> Int32[Array, "*n"]:
    """The code nearest to |x| / scale, ties to even, at most `grid.last`; undefined for a scale of 255."""
    size = floats(bits(x * power_of_two(254 - scale)) & ~SIGN)
    # Below the smallest normal number steps are equal: a sum with 2^23 steps rounds to one, ties to even.
    steps = 2.0 ** (23 + grid.least - grid.mantissa)
    small = bits(size + jnp.float32(steps)) - bits_of(steps)
    shift = 23 - grid.mantissa
    pattern = bits(size)
    rounded = (pattern + ((1 << (shift - 1)) - 1) + ((pattern >> shift) & 1)) >> shift
    normal = rounded - ((grid.least + 126) << grid.mantissa)
    return jnp.minimum(jnp.where(size < 2.0**grid.least, small, normal), grid.last)


def values(code: Int32[Array, "*n"], grid: Grid) -> Float32[Array, "*n"]:
    """The number of a code; those beyond `grid.last` follow the same rule."""
    normal = floats((code + ((grid.least + 126) << grid.mantissa)) << (23 - grid.mantissa))
    small = code.astype(jnp.float32) * jnp.float32(2.0 ** (grid.least - grid.mantissa))
    return jnp.where(code < 1 << grid.mantissa, small, normal)


def fake(x: Float32[Array, "*n"], scale: Int32[Array, "*n"], grid: Grid) -> Float32[Array, "*n"]:
    """`ops.quant.dequantise` of `ops.quant._quantise`: what the grid leaves of x under that scale."""
    size = values(codes(x, scale, grid), grid) * power_of_two(scale)
    kept = floats(bits(size) | (bits(x) & SIGN))
    return jnp.where(scale == NAN_CODE, jnp.nan, kept)


def to_bfloat16(pattern: Int32[Array, "*n"]) -> Int32[Array, "*n"]:
    """float32 bits rounded to bfloat16 bits, 0 .. 65535, ties to even; what needs no rounding is kept.

    NaN whose payload does not fit becomes the quiet one of its sign.
    """
    rounded = (pattern + 0x7FFF + ((pattern >> 16) & 1)) >> 16
    nan = (pattern & ~SIGN) > INFINITY
    rounded = jnp.where(nan, (pattern >> 16) & 0x8000 | 0x7FC0, rounded)
    return jnp.where((pattern & 0xFFFF) == 0, pattern >> 16, rounded) & 0xFFFF


def as_bfloat16(x: Float32[Array, "*n"]) -> Float32[Array, "*n"]:
    """x rounded to bfloat16, in float32. A pair of casts would say so too, but compilers may remove it."""
    return floats(to_bfloat16(bits(x)) << 16)
