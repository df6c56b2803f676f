"""Whole pages of one buffer into a contiguous array and back: what a kernel can stand for."""

from __future__ import annotations

from typing import Protocol

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32


class PageMoves(Protocol):
    """How pages move. It is an argument of compiled functions, so equal ones must have equal hashes."""

    def gather_pages(
        self, buffer: Float[Array, "pages rows c"], pages: Int32[Array, " n"]
    ) -> Float[Array, "n rows c"]:
        """The pages of these numbers, all in range, bit for bit."""

    def scatter_pages(
        self, buffer: Float[Array, "pages rows c"], pages: Int32[Array, " n"], rows: Float[Array, "n rows c"]
    ) -> Float[Array, "pages rows c"]:
        """The buffer with these pages replaced, bit for bit; numbers out of range are left out."""


class XlaMoves:
    """The reference: plain indexing."""

    def gather_pages(self, buffer: Array, pages: Array) -> Array:
        """See `PageMoves`."""
        return buffer[pages]

    def scatter_pages(self, buffer: Array, pages: Array, rows: Array) -> Array:
        """See `PageMoves`."""
        return set_bits(buffer, (pages,), rows)


XLA = XlaMoves()


def set_bits(buffer: Array, index: tuple, rows: Array) -> Array:
    """Sets rows and keeps their bits, dropping those out of range.

    Setting bfloat16 rewrites payloads of NaN, so it is done in unsigned integers; XLA then copies the buffer.
    Float32 keeps its bits, and is set in place.
    """
    if buffer.dtype == jnp.float32:
        return buffer.at[index].set(rows, mode="drop")
    unsigned = jnp.dtype(f"uint{8 * buffer.dtype.itemsize}")
    bits, new = (lax.bitcast_convert_type(array, unsigned) for array in (buffer, rows))
    return lax.bitcast_convert_type(bits.at[index].set(new, mode="drop"), buffer.dtype)
