"""Native FP8 pages in plain XLA, on unsigned integers."""

from __future__ import annotations

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, UInt8

from .grids import E4M3, floats, scale_codes, to_bfloat16
from .native_bits import NativePage, narrowed, row_bits, value_bits, value_bytes


def pack_rows(unsigned: Array, page: NativePage) -> UInt8[Array, "n nbytes"]:
    """Pages of rows given as bits, [n, rows, channels]."""
    pattern = row_bits(unsigned)
    value, rope = pattern[..., : page.plain], to_bfloat16(pattern[..., page.plain :])
    filled = _padded(value, page.scales * E4M3.block)
    scale = scale_codes(floats(filled).reshape(*value.shape[:2], page.scales, E4M3.block), E4M3)
    spread = jnp.repeat(scale, E4M3.block, axis=-1)[..., : page.plain]
    halves = jnp.stack([rope & 0xFF, rope >> 8], axis=-1).reshape(*rope.shape[:2], 2 * page.rope)
    sections = (
        jnp.concatenate([value_bytes(value, spread), halves], axis=-1),
        _padded(scale, page.scale_bytes),
    )
    whole = jnp.concatenate([section.reshape(len(pattern), -1) for section in sections], axis=1)
    return _padded(whole, page.nbytes).astype(jnp.uint8)


def unpack_rows(pages: UInt8[Array, "n nbytes"], page: NativePage, unsigned: DTypeLike) -> Array:
    """The rows of pages as bits, [n, rows, channels]."""
    begin = page.rows * page.data
    data = pages[:, :begin].reshape(-1, page.rows, page.data).astype(jnp.int32)
    scale = pages[:, begin : begin + page.rows * page.scale_bytes].reshape(-1, page.rows, page.scale_bytes)
    spread = jnp.repeat(scale.astype(jnp.int32), E4M3.block, axis=-1)[..., : page.plain]
    value = value_bits(data[..., : page.plain], spread)
    rope = data[..., page.plain :: 2] | data[..., page.plain + 1 :: 2] << 8
    return narrowed(jnp.concatenate([value, rope << 16], axis=-1), unsigned)


def _padded(array: Array, width: int) -> Array:
    """Zeros behind the last axis, up to `width`."""
    return jnp.pad(array, [(0, 0)] * (array.ndim - 1) + [(0, width - array.shape[-1])])
