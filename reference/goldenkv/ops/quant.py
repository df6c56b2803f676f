"""Fake quantisation: round to a format's grid and come back, so that float state carries quantised values.

Published `kernel.py`; report section 2.3.4. A block of channels shares one scale, a power of two that a
UE8M0 code (one exponent byte) names. Exponents are taken from the bits of a float32: compiled `exp2` and
`log2` are not exact.

A block that holds NaN or an infinity has the code 255, which is NaN in UE8M0, and comes back as NaN
throughout: broken input never turns into plausible values. Subnormal float32 numbers count as 0: XLA flushes
them on a CPU.
"""

from collections.abc import Callable

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int32

from .typed import typed

E4M3_MAX = 448.0
E2M1_MAX = 6.0
KV_BLOCK = 64
INDEX_BLOCK = 32
INT4_MAX = 7.0
E4M3_FLOOR = 1e-4
E2M1_FLOOR = 6 * 2.0**-126
NAN_CODE = 255


@typed
def ceil_exponent(x: Float32[Array, "*n"]) -> Int32[Array, "*n"]:
    """The UE8M0 code of the smallest power of two not below x: ceil(log2(x)) + 127 for normal x > 0.

    255 where x is NaN or infinite.
    """
    bits = lax.bitcast_convert_type(x, jnp.int32)
    return jnp.minimum((bits >> 23) + ((bits & 0x7FFFFF) != 0), NAN_CODE)


@typed
def power_of_two(code: Int32[Array, "*n"]) -> Float32[Array, "*n"]:
    """2^(code - 127) for UE8M0 codes 1 to 254, exactly; NaN for 255."""
    return jnp.where(code == NAN_CODE, jnp.nan, lax.bitcast_convert_type(code << 23, jnp.float32))


@typed
def round_e4m3(x: Float[Array, "*n"]) -> Float[Array, "*n"]:
    """The nearest E4M3 value, ties to even, clamped to +-448. NaN stays NaN."""
    return _round_to_grid(jnp.clip(x, -E4M3_MAX, E4M3_MAX), mantissa_bits=3, min_exponent=-6)


@typed
def round_e2m1(x: Float[Array, "*n"]) -> Float[Array, "*n"]:
    """The nearest E2M1 value (0, 0.5, 1, 1.5, 2, 3, 4, 6 and negatives), ties to even, clamped to +-6.

    NaN stays NaN, which the format itself cannot hold.
    """
    return _round_to_grid(jnp.clip(x, -E2M1_MAX, E2M1_MAX), mantissa_bits=1, min_exponent=0)


def _round_to_grid(x: Array, mantissa_bits: int, min_exponent: int) -> Array:
    """Rounds to multiples of the grid's step at x, which is a power of two, so both products are exact."""
    wide = x.astype(jnp.float32)
    exponent = (lax.bitcast_convert_type(jnp.abs(wide), jnp.int32) >> 23) - 127
    step_code = jnp.maximum(exponent, min_exponent) - mantissa_bits + 127
    steps = jnp.round(wide * power_of_two(254 - step_code))  # jnp.round: ties to even
    return (steps * power_of_two(step_code)).astype(x.dtype)


@typed
def quantise_e4m3(x: Float[Array, "*rows d"]) -> tuple[Float32[Array, "*rows d"], Int32[Array, "*rows n"]]:
    """E4M3 values, and a UE8M0 code for every 64 channels (a shorter last block stands alone).

    scale = 2^ceil(log2(max(amax, 1e-4) * float32(1 / 448))); value = E4M3(x / scale).

    Returns:
        Values on the grid, as float32, and codes [..., n] with n = ceil(d / 64).
    """
    return _quantise(x, KV_BLOCK, E4M3_MAX, E4M3_FLOOR, round_e4m3)


@typed
def quantise_e2m1(x: Float[Array, "*rows d"]) -> tuple[Float32[Array, "*rows d"], Int32[Array, "*rows n"]]:
    """E2M1 values, and a UE8M0 code for every 32 channels (a shorter last block stands alone).

    scale = 2^ceil(log2(max(amax, 6 * 2^-126) * float32(1 / 6))); value = E2M1(x / scale).

    Returns:
        Values on the grid, as float32, and codes [..., n] with n = ceil(d / 32).
    """
    return _quantise(x, INDEX_BLOCK, E2M1_MAX, E2M1_FLOOR, round_e2m1)


def _quantise(
    x: Array, block: int, grid_max: float, floor: float, round_grid: Callable[[Array], Array]
) -> tuple[Array, Array]:
    wide = _in_blocks(x, block)
    peak = jnp.maximum(jnp.max(jnp.abs(wide), axis=-1), jnp.float32(floor))
    # The published kernel multiplies by the reciprocal. A division gives the same code for every float32.
    code = ceil_exponent(peak * jnp.float32(1 / grid_max))
    values = round_grid(wide / power_of_two(code)[..., None])
    return _from_blocks(values, x.shape[-1]), code


def _in_blocks(x: Array, block: int) -> Array:
    """[..., d] -> float32 [..., ceil(d / block), block], padded with 0."""
    *rows, channels = x.shape
    wide = jnp.pad(x.astype(jnp.float32), [(0, 0)] * len(rows) + [(0, -channels % block)])
    return wide.reshape(*rows, wide.shape[-1] // block, block)


def _from_blocks(blocks: Array, channels: int) -> Array:
    """The inverse of `_in_blocks`."""
    *rows, count, block = blocks.shape
    return blocks.reshape(*rows, count * block)[..., :channels]


@typed
def dequantise(
    values: Float32[Array, "*rows d"], code: Int32[Array, "*rows n"], block: int
) -> Float32[Array, "*rows d"]:
    """values * scale, block by block."""
    scale = jnp.repeat(power_of_two(code), block, axis=-1)
    return values * scale[..., : values.shape[-1]]


@typed
def fake_quantise_e4m3(x: Float[Array, "*rows d"]) -> Float[Array, "*rows d"]:
    """What is left of x after `quantise_e4m3`, in the dtype of x. Doing it twice changes nothing more."""
    return dequantise(*quantise_e4m3(x), KV_BLOCK).astype(x.dtype)


@typed
def fake_quantise_e2m1(x: Float[Array, "*rows d"]) -> Float[Array, "*rows d"]:
    """What is left of x after `quantise_e2m1`, in the dtype of x. Doing it twice changes nothing more."""
    return dequantise(*quantise_e2m1(x), INDEX_BLOCK).astype(x.dtype)


@typed
def fake_quantise_int4(x: Float[Array, "*rows d"], block: int = KV_BLOCK) -> Float[Array, "*rows d"]:
    """What is left of x after symmetric INT4, in the dtype of x: for comparison, V4 does not use it.

    A block of channels shares scale = amax / 7, a float32; value = round(x / scale), an integer from -7 to 7,
    ties to even. Integers have no -0. A block that holds NaN or an infinity comes back as NaN.
    """
    wide = _in_blocks(x, block)
    peak = jnp.max(jnp.abs(wide), axis=-1, keepdims=True)
    scale = jnp.where(jnp.isfinite(peak), peak / INT4_MAX, jnp.nan)
    scale = jnp.where(scale == 0.0, 1.0, scale)  # all zero, or so small that a seventh is
    steps = jnp.round(wide / scale)
    values = jnp.where(steps == 0.0, 0.0, steps) * scale
    return _from_blocks(values, x.shape[-1]).astype(x.dtype)


@typed
def hadamard(x: Float[Array, "*rows d"]) -> Float[Array, "*rows d"]:
    """Normalised Hadamard transform over the last axis, in natural (Sylvester) order: x H / sqrt(d).

    Sums and differences of pairs, log2(d) times, in float32: a row's bits depend on that row alone, and the
    error is a quarter of that of a matrix product.

    Raises:
        ValueError: d is no power of two.
    """
    d = x.shape[-1]
    if d < 1 or d & (d - 1):
        raise ValueError(f"{d=} must be a power of two")
    sums = x.astype(jnp.float32)
    for _ in range(d.bit_length() - 1):
        # Takes the highest bit of the channel number and puts it last; after all bits the order is as before.
        first, second = jnp.split(sums, 2, axis=-1)
        sums = jnp.stack([first + second, first - second], axis=-1).reshape(x.shape)
    return (sums * jnp.float32(d**-0.5)).astype(x.dtype)
