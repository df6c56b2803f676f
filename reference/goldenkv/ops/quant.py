"""Fake quantisation: round to a format's grid and come back, so that float state carries quantised values.

Published `kernel.py`; report section 2.3.4. Scales are powers of two (UE8M0: one exponent byte). Exponents
are taken from the bits of a float32: compiled `exp2` and `log2` are not exact.
"""

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Float32, Int32

from .typed import typed

E4M3_MAX = 448.0
E2M1_MAX = 6.0
KV_BLOCK = 64
INDEX_BLOCK = 32


@typed
def ceil_exponent(x: Float32[Array, "*n"]) -> Int32[Array, "*n"]:
    """The UE8M0 code of the smallest power of two not below x: ceil(log2(x)) + 127, for normal x > 0."""
    bits = lax.bitcast_convert_type(x, jnp.int32)
    return (bits >> 23) + ((bits & 0x7FFFFF) != 0)


@typed
def power_of_two(code: Int32[Array, "*n"]) -> Float32[Array, "*n"]:
    """2^(code - 127) for codes 1 to 254, exactly."""
    return lax.bitcast_convert_type(code << 23, jnp.float32)


@typed
def round_e4m3(x: Float[Array, "*n"]) -> Float[Array, "*n"]:
    """The nearest E4M3 value, ties to even, clamped to +-448."""
    return _round_to_grid(jnp.clip(x, -E4M3_MAX, E4M3_MAX), mantissa_bits=3, min_exponent=-6)


@typed
def round_e2m1(x: Float[Array, "*n"]) -> Float[Array, "*n"]:
    """The nearest E2M1 value (0, 0.5, 1, 1.5, 2, 3, 4, 6 and negatives), ties to even, clamped to +-6."""
    return _round_to_grid(jnp.clip(x, -E2M1_MAX, E2M1_MAX), mantissa_bits=1, min_exponent=0)


def _round_to_grid(x: Array, mantissa_bits: int, min_exponent: int) -> Array:
    """Rounds to multiples of the grid's step at x, which is a power of two, so both products are exact."""
    wide = x.astype(jnp.float32)
    exponent = (lax.bitcast_convert_type(jnp.abs(wide), jnp.int32) >> 23) - 127
    step_code = jnp.maximum(exponent, min_exponent) - mantissa_bits + 127
    steps = jnp.round(wide * power_of_two(254 - step_code))  # jnp.round: ties to even
    return (steps * power_of_two(step_code)).astype(x.dtype)


def _fake_quantise(x: Array, block: int, grid_max: float, floor: float, by_reciprocal: bool, round_grid) -> Array:
    *rows, channels = x.shape
    padded = -channels % block
    wide = jnp.pad(x.astype(jnp.float32), [(0, 0)] * len(rows) + [(0, padded)])
    wide = wide.reshape(*rows, -1, block)
    peak = jnp.maximum(jnp.max(jnp.abs(wide), axis=-1, keepdims=True), jnp.float32(floor))
    ratio = peak * jnp.float32(1 / grid_max) if by_reciprocal else peak / jnp.float32(grid_max)
    code = ceil_exponent(ratio)
    scale, inverse = power_of_two(code), power_of_two(254 - code)
    rounded = round_grid(wide * inverse) * scale
    return rounded.reshape(*rows, -1)[..., :channels].astype(x.dtype)


@typed
def fake_quantise_e4m3(x: Float[Array, "*rows d"]) -> Float[Array, "*rows d"]:
    """E4M3 values with one UE8M0 scale for every 64 channels (a shorter last block stands alone).

    scale = 2^ceil(log2(max(amax, 1e-4) * float32(1 / 448))); the published kernel multiplies by the reciprocal.
    """
    return _fake_quantise(x, KV_BLOCK, E4M3_MAX, 1e-4, True, round_e4m3)


@typed
def fake_quantise_e2m1(x: Float[Array, "*rows d"]) -> Float[Array, "*rows d"]:
    """E2M1 values with one UE8M0 scale for every 32 channels (a shorter last block stands alone).

    scale = 2^ceil(log2(max(amax, 6 * 2^-126) / 6)).
    """
    return _fake_quantise(x, INDEX_BLOCK, E2M1_MAX, 6 * 2.0**-126, True, round_e2m1)


@typed
def hadamard(x: Float[Array, "*rows d"]) -> Float[Array, "*rows d"]:
    """Normalised Hadamard transform over the last axis, in natural (Sylvester) order: x H / sqrt(d).

    Raises:
        ValueError: d is no power of two.
    """
    d = x.shape[-1]
    if d & (d - 1):
        raise ValueError(f"{d=} must be a power of two")
    matrix = np.ones((1, 1), np.float32)
    while matrix.shape[0] < d:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    matrix = jnp.asarray(matrix * np.float32(d**-0.5))
    return jnp.matmul(x.astype(jnp.float32), matrix, precision="highest").astype(x.dtype)
