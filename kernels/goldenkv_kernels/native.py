"""Native FP8 pages: float rows packed into the 584-byte format and back, with the bits of `state.packing`.

A page holds the data of all rows (E4M3 values, then rotated channels in bfloat16), then the scales of all
rows (UE8M0, one for 64 values, padded to a multiple of 8), then padding to a multiple of 576 bytes; see
`state.layouts`. Floor: the bytes of the float rows plus those of the pages.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jax.typing import DTypeLike
from jaxtyping import Array, Float, UInt8

from . import native_xla
from .blocks import (
    Implementation,
    Ref,
    addressable,
    blocks,
    expect,
    interpreted,
    power_of_two,
    powers_of_two,
    split,
    triton,
    uses_pallas,
)
from .grids import E4M3, floats, scale_codes, to_bfloat16
from .native_bits import NativePage, narrowed, native_page, row_bits, value_bits, value_bytes


@dataclass(frozen=True, slots=True)
class NativeConfig:
    """Powers of two: rows of a page that a program takes, and its warps."""

    rows: int = 8
    num_warps: int = 4

    def __post_init__(self) -> None:
        powers_of_two(rows=self.rows, num_warps=self.num_warps)


@partial(jax.jit, static_argnames=("rope", "implementation", "config", "interpret"))
def pack_rows(
    rows: Float[Array, "n rows channels"],
    *,
    rope: int,
    implementation: Implementation = "pallas",
    config: NativeConfig | None = None,
    interpret: bool | None = None,
) -> UInt8[Array, "n nbytes"]:
    """Pages of native rows: `state.layouts.pack_page(..., quantise=True)` for each of n pages.

    Values are rounded to the scale that the engine chooses; what fake quantisation left behind comes back bit
    for bit. A kernel refuses nothing: check with `state.packing` where a row could be off the grid.

    Args:
        rows: float32 or bfloat16; all rows of each page.
        rope: how many channels, the last ones, are rotated and kept in bfloat16.

    Raises:
        ValueError: another dtype or rank, no row, or a `rope` that leaves no channel.
    """
    expect("rows", rows, ("n", "rows", "channels"), "float32", "bfloat16")
    page = native_page(rows.shape[1], rows.shape[2], rope)
    if not rows.shape[0]:
        return jnp.zeros((0, page.nbytes), jnp.uint8)
    unsigned = lax.bitcast_convert_type(rows, jnp.uint32 if rows.dtype == jnp.float32 else jnp.uint16)
    if not uses_pallas(implementation):
        return native_xla.pack_rows(unsigned, page)
    kernel = partial(_pack, page=page)
    return _launch(kernel, unsigned, (page.nbytes,), jnp.uint8, page, config, interpret, "pack_rows")


@partial(
    jax.jit, static_argnames=("rows", "channels", "rope", "dtype", "implementation", "config", "interpret")
)
def unpack_rows(
    pages: UInt8[Array, "n nbytes"],
    *,
    rows: int,
    channels: int,
    rope: int,
    dtype: Literal["float32", "bfloat16"] = "float32",
    implementation: Implementation = "pallas",
    config: NativeConfig | None = None,
    interpret: bool | None = None,
) -> Float[Array, "n rows channels"]:
    """The rows of native pages: `state.layouts.read_page` for each of n pages, whatever bytes they hold.

    Args:
        pages: with their padding.
        rows, channels, rope: of a page and of its rows.
        dtype: of the result. bfloat16 rounds nothing but products below 2^-126.

    Raises:
        ValueError: pages of another size, or sizes that no page has.
    """
    page = native_page(rows, channels, rope)
    expect("pages", pages, ("n", page.nbytes), "uint8")
    if dtype not in ("float32", "bfloat16"):
        raise ValueError(f"{dtype=} must be 'float32' or 'bfloat16'")
    if not pages.shape[0]:
        return jnp.zeros((0, rows, channels), dtype)
    unsigned = jnp.uint32 if dtype == "float32" else jnp.uint16
    if not uses_pallas(implementation):
        found = native_xla.unpack_rows(pages, page, unsigned)
    else:
        kernel = partial(_unpack, page=page)
        found = _launch(kernel, pages, (rows, channels), unsigned, page, config, interpret, "unpack_rows")
    return lax.bitcast_convert_type(found, jnp.dtype(dtype))


def _launch(
    kernel: Callable[..., None], array: Array, shape: tuple[int, ...], dtype: DTypeLike, page: NativePage,
    config: NativeConfig | None, interpret: bool | None, name: str,
) -> Array:  # fmt: skip
    config = config or NativeConfig()
    for moved in (array, jax.ShapeDtypeStruct((array.shape[0], *shape), dtype)):
        addressable("an array", moved)
    block = min(config.rows, power_of_two(page.rows))
    return pl.pallas_call(
        partial(kernel, block=block),
        grid=(array.shape[0], blocks(page.rows, block)),
        out_shape=jax.ShapeDtypeStruct((array.shape[0], *shape), dtype),
        compiler_params=triton(config.num_warps),
        interpret=interpreted(interpret),
        name=name,
    )(array)


def _pack(rows_ref: Ref, out_ref: Ref, *, page: NativePage, block: int) -> None:
    number, row, channel = _tile(page, block)
    here, plain = row < page.rows, channel < page.plain
    inside = here & (channel < page.channels)
    pattern = row_bits(plt.load(rows_ref.at[number, row, channel], mask=inside, other=0))

    inner = min(E4M3.block, pattern.shape[1])
    blocked = jnp.where(plain, pattern, 0).reshape(block, -1, inner)
    scale = scale_codes(floats(blocked), E4M3)
    spread = jnp.broadcast_to(scale[:, :, None], blocked.shape).reshape(pattern.shape)
    _store(out_ref, number, row * page.data + channel, value_bytes(pattern, spread), here & plain)

    rope = to_bfloat16(pattern)
    at = row * page.data + page.plain + 2 * (channel - page.plain)
    _store(out_ref, number, at, rope, inside & ~plain)
    _store(out_ref, number, at + 1, rope >> 8, inside & ~plain)

    at = page.rows * page.data + row * page.scale_bytes
    which = jnp.arange(scale.shape[1], dtype=jnp.int32)[None, :]
    _store(out_ref, number, at + which, scale, here & (which < page.scales))
    which = jnp.arange(power_of_two(page.scale_bytes), dtype=jnp.int32)[None, :]
    unused = here & (which >= page.scales) & (which < page.scale_bytes)
    _store(out_ref, number, at + which, jnp.zeros(unused.shape, jnp.int32), unused)

    begin = page.rows * (page.data + page.scale_bytes)
    if begin < page.nbytes:
        at = begin + jnp.arange(power_of_two(page.nbytes - begin), dtype=jnp.int32)
        first = pl.program_id(1) == 0
        _store(out_ref, number, at, jnp.zeros(at.shape, jnp.int32), (at < page.nbytes) & first)


def _unpack(pages_ref: Ref, out_ref: Ref, *, page: NativePage, block: int) -> None:
    number, row, channel = _tile(page, block)
    here, plain = row < page.rows, channel < page.plain
    inside = here & (channel < page.channels)

    def load(at: Array, mask: Array) -> Array:
        return plt.load(pages_ref.at[number, at], mask=mask, other=0).astype(jnp.int32)

    at = page.rows * page.data + row * page.scale_bytes + split(channel, E4M3.block)[0]
    value = value_bits(load(row * page.data + channel, here & plain), load(at, here & plain))
    at = row * page.data + page.plain + 2 * (channel - page.plain)
    rope = load(at, inside & ~plain) | load(at + 1, inside & ~plain) << 8
    pattern = jnp.where(plain, value, rope << 16)
    plt.store(out_ref.at[number, row, channel], narrowed(pattern, out_ref.dtype), mask=inside)


def _tile(page: NativePage, block: int) -> tuple[Array, Array, Array]:
    """The page, rows [block, 1] and channels [1, channels] of this program."""
    row = pl.program_id(1) * block + jnp.arange(block, dtype=jnp.int32)
    channel = jnp.arange(power_of_two(page.channels), dtype=jnp.int32)
    return pl.program_id(0), row[:, None], channel[None, :]


def _store(out_ref: Ref, number: Array, at: Array, byte: Array, mask: Array) -> None:
    at = jnp.where(
        mask, at, out_ref.shape[1]
    )  # no lane that is masked off shares a byte with one that is not
    plt.store(out_ref.at[number, at], (byte & 0xFF).astype(jnp.uint8), mask=mask)
