"""Moving pages between a pool and a buffer that can leave the device, bit for bit.

Floor of every function here: the bytes it reads plus those it writes. Plain XLA is an honest rival, see
`implementation="xla"`: what Pallas adds is that no index is computed for each element.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Int32

from . import paging_xla
from .blocks import (
    Implementation,
    Ref,
    addressable,
    blocks,
    expect,
    interpreted,
    power_of_two,
    powers_of_two,
    triton,
    uses_pallas,
)
from .native import NativeConfig, pack_rows, unpack_rows

__all__ = ["NativeConfig", "PagingConfig", "gather_pages", "pack_rows", "scatter_pages", "unpack_rows"]

Arrays = TypeVar("Arrays")
"""An array [pages, ...], or a tree of arrays that the same page numbers address."""


@dataclass(frozen=True, slots=True)
class PagingConfig:
    """Block sizes of the copies, powers of two.

    Attributes:
        nbytes: that a program copies at a time.
        num_warps: of each kernel.
    """

    nbytes: int = 16384
    num_warps: int = 4

    def __post_init__(self) -> None:
        powers_of_two(nbytes=self.nbytes, num_warps=self.num_warps)


@partial(jax.jit, static_argnames=("implementation", "config", "interpret"))
def gather_pages(
    pool: Arrays,
    pages: Int32[Array, " n"],
    *,
    implementation: Implementation = "pallas",
    config: PagingConfig | None = None,
    interpret: bool | None = None,
) -> Arrays:
    """Whole pages as contiguous buffers [n, ...], one an array of `pool`; zeros for numbers out of range.

    Any dtype of 1, 2 or 4 bytes moves as unsigned integers, so that payloads of NaN stay.

    Raises:
        ValueError: page numbers that are no int32 [n], or an array that cannot be moved.
    """
    expect("pages", pages, ("n",), "int32")
    pallas, config = uses_pallas(implementation), config or PagingConfig()

    def gather(array: Array) -> Array:
        source = _flat(array)
        if not pages.size or not source.size:
            return jnp.zeros((pages.shape[0], *array.shape[1:]), array.dtype)
        if not pallas:
            found = paging_xla.gather_pages(source, pages)
        else:
            found = _copy(_gather, (pages, source), (pages.shape[0], source.shape[1]), config, interpret)
        return _shaped(found, array)

    return jax.tree.map(gather, pool)


@partial(jax.jit, static_argnames=("implementation", "config", "interpret"), donate_argnames=("pool",))
def scatter_pages(
    pool: Arrays,
    pages: Int32[Array, " n"],
    rows: Arrays,
    *,
    implementation: Implementation = "pallas",
    config: PagingConfig | None = None,
    interpret: bool | None = None,
) -> Arrays:
    """The pool with what `gather_pages` returned written back to these pages, in place. Donates `pool`.

    Numbers out of range are left out, negative ones too. Those in range must differ: of two, either can win.

    Raises:
        ValueError: as in `gather_pages`, or `rows` that are not n pages of the pool.
    """
    expect("pages", pages, ("n",), "int32")
    pallas, config = uses_pallas(implementation), config or PagingConfig()

    def scatter(array: Array, new: Array) -> Array:
        expect("rows", new, (pages.shape[0], *array.shape[1:]), array.dtype.name)
        target, source = _flat(array), _flat(new)
        if not source.size or not target.size:
            return array
        if not pallas:
            written = paging_xla.scatter_pages(target, pages, source)
        else:
            written = _copy(_scatter, (pages, source, target), target.shape, config, interpret, alias={2: 0})
        return _shaped(written, array)

    return jax.tree.map(scatter, pool, rows)


def _flat(array: Array) -> Array:
    """[pages, elements], unsigned: both are views, not copies, on a GPU."""
    if array.ndim < 1 or array.dtype.itemsize not in (1, 2, 4) or array.dtype == jnp.bool_:
        raise ValueError(
            "a pool must be [pages, ...] of a dtype of 1, 2 or 4 bytes, "
            f"got {array.dtype.name} {list(array.shape)}"
        )
    unsigned = lax.bitcast_convert_type(array, jnp.dtype(f"uint{8 * array.dtype.itemsize}"))
    return unsigned.reshape(array.shape[0], math.prod(array.shape[1:]))


def _shaped(flat: Array, like: Array) -> Array:
    """The inverse of `_flat`, for any number of pages."""
    return lax.bitcast_convert_type(flat.reshape(flat.shape[0], *like.shape[1:]), like.dtype)


def _copy(
    kernel: Callable[..., None], arrays: tuple[Array, ...], shape: tuple[int, ...], config: PagingConfig,
    interpret: bool | None, alias: dict[int, int] | None = None,
) -> Array:  # fmt: skip
    pages, source = arrays[:2]
    width, itemsize = source.shape[1], source.dtype.itemsize
    for array in arrays:
        addressable("an array", array)
    block = min(config.nbytes // itemsize, power_of_two(width))
    return pl.pallas_call(
        partial(kernel, block=block),
        grid=(pages.shape[0], blocks(width, block)),
        out_shape=jax.ShapeDtypeStruct(shape, source.dtype),
        input_output_aliases=alias or {},
        compiler_params=triton(config.num_warps),
        interpret=interpreted(interpret),
        name=kernel.__name__.strip("_") + "_pages",
    )(*arrays)


def _gather(pages_ref: Ref, pool_ref: Ref, out_ref: Ref, *, block: int) -> None:
    place, at = pl.program_id(0), pl.program_id(1) * block + jnp.arange(block, dtype=jnp.int32)
    page, inside = pages_ref[place], at < pool_ref.shape[1]
    exists = (page >= 0) & (page < pool_ref.shape[0])
    found = plt.load(pool_ref.at[page, at], mask=inside & exists, other=0)
    plt.store(out_ref.at[place, at], found, mask=inside)


def _scatter(pages_ref: Ref, rows_ref: Ref, _: Ref, out_ref: Ref, *, block: int) -> None:
    place, at = pl.program_id(0), pl.program_id(1) * block + jnp.arange(block, dtype=jnp.int32)
    page, inside = pages_ref[place], at < out_ref.shape[1]
    exists = (page >= 0) & (page < out_ref.shape[0])
    rows = plt.load(rows_ref.at[place, at], mask=inside & exists, other=0)
    plt.store(out_ref.at[page, at], rows, mask=inside & exists)
