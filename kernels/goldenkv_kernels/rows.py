"""How the attention kernels read rows: as tiles of channels, from plain pages or from native FP8 pages.

A row is cut into *pieces*, each a tile whose width is a power of two, as Triton wants it: scores are sums
over pieces, and outputs are made piece by piece. A native row (584 bytes: 448 E4M3 values, 64 rotated
channels in BF16, 7 UE8M0 scales, padding; `goldenkv.state.formats.fp8`) has one piece a scale, then one for
the rotated channels; its scales stand behind the data of all rows of the page.

The `load` methods run inside a Pallas kernel. They read no byte of a row that is not visible: it is 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental.pallas import triton as plt
from jax.typing import DTypeLike

from goldenkv.state.layouts import PageLayout

from .blocks import expect, power_of_two

SHORTEST = 16
"""No side of a matrix product in Triton is shorter."""

WIDEST = 64
"""Channels of a piece. At 64 a thread holds the addresses of 2 rows, at 512 those of 16: registers spill."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Channels start .. start + count - 1 of a row."""

    start: int
    count: int

    @property
    def width(self) -> int:
        """Of its tile. What lies beyond `count` is 0, or NaN where the row's scale is."""
        return tile_side(self.count)

    @property
    def steps(self) -> Array:
        """0 .. width - 1."""
        return jnp.arange(self.width, dtype=jnp.int32)

    @property
    def channels(self) -> Array:
        """int32 [width]: the channel numbers, running on past the piece."""
        return self.start + self.steps

    def within(self, rows: Array) -> Array:
        """bool [n, width]: which elements of the tile exist, given which rows bool [n] do."""
        there = jnp.broadcast_to(rows[:, None], (len(rows), self.width))
        return there if self.count == self.width else there & (self.steps < self.count)[None, :]


def cut(start: int, count: int, width: int) -> tuple[Piece, ...]:
    """Channels start .. start + count - 1 in pieces of `width`, the last one shorter."""
    return tuple(Piece(start + a, b - a) for a, b in pairwise([*range(0, count, width), count]))


def tile_side(count: int) -> int:
    """The side of a tile that holds `count`: the next power of two, at least `SHORTEST`."""
    return power_of_two(count, SHORTEST)


@dataclass(frozen=True, slots=True)
class PlainRows:
    """Pages [pages, rows, channels] of one float type."""

    rows: int
    channels: int

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """Runs of `WIDEST` channels and what is left."""
        return cut(0, self.channels, WIDEST)

    def load(
        self, pages: Any, page: Array, row: Array, visible: Array, dtype: DTypeLike
    ) -> tuple[Array, ...]:
        """The visible rows as `dtype`, a tile [n, width] a piece; 0 for the others.

        Args:
            pages: the reference to the pages.
            page, row: int32 [n], a page and a row within it; valid also where not visible.
            visible: bool [n].
        """
        return tuple(
            load_tile(pages, page, row, piece.channels, there=piece.within(visible)).astype(dtype)
            for piece in self.pieces
        )


@dataclass(frozen=True, slots=True)
class NativeRows:
    """Pages uint8 [pages, bytes] of a layout `page_layout("fp8", rows, channels, rope)`."""

    layout: PageLayout

    @property
    def rows(self) -> int:
        """Of a page."""
        return self.layout.rows

    @property
    def channels(self) -> int:
        """Of a row."""
        return self.layout.form.channels

    @property
    def values(self) -> tuple[Piece, ...]:
        """The channels under each scale."""
        count, scaling = self.layout.form.field("values").count, self.layout.form.scaling
        assert scaling is not None
        return cut(0, count, scaling.block)

    @property
    def rope(self) -> Piece:
        """The rotated channels; there may be none."""
        count = self.layout.form.field("rope").count
        return Piece(self.channels - count, count)

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """One a scale, then the rotated channels, if there are any."""
        return (*self.values, self.rope) if self.rope.count else self.values

    @property
    def data_bytes(self) -> int:
        """Bytes of a row's values and rotated channels."""
        return sum(field.nbytes for field in self.layout.sections[0])

    @property
    def scale_bytes(self) -> int:
        """Bytes of a row's scales and their padding."""
        return sum(field.nbytes for field in self.layout.sections[1])

    def load(
        self, pages: Any, page: Array, row: Array, visible: Array, dtype: DTypeLike
    ) -> tuple[Array, ...]:
        """The visible rows decoded to `dtype`; arguments and result as in `PlainRows.load`."""
        data = row * self.data_bytes
        codes = self.rows * self.data_bytes + row * self.scale_bytes
        tiles = []
        for block, piece in enumerate(self.values):
            at, there = data[:, None] + piece.channels[None, :], piece.within(visible)
            values = load_tile(pages, page, at, there=there)
            code = plt.load(pages.at[page, codes + block], mask=visible, other=0)
            tiles.append(decode_e4m3(values, code[:, None], dtype))
        if self.rope.count:
            step = jnp.arange(2 * self.rope.width, dtype=jnp.int32)
            at, there = data[:, None] + (self.rope.start + step)[None, :], step < 2 * self.rope.count
            pairs = load_tile(pages, page, at, there=visible[:, None] & there[None, :])
            tiles.append(decode_bfloat16(pairs.reshape(len(row), self.rope.width, 2)).astype(dtype))
        return tuple(tiles)


Rows = PlainRows | NativeRows


def rows_of(pages: Array, layout: PageLayout | None) -> Rows:
    """How to read these pages.

    Raises:
        ValueError: they are neither plain float pages nor native pages of that layout.
    """
    if layout is None:
        expect("pages without a layout", pages, ("pages", "rows", "d"), "float32", "bfloat16")
        return PlainRows(pages.shape[1], pages.shape[2])
    if layout.form.name != "fp8" or not layout.scales_last or layout.run:
        raise ValueError(
            f"layout must be page_layout('fp8', rows, channels, rope), got format {layout.form.name!r} "
            f"with scales_last={layout.scales_last} and run={layout.run}"
        )
    expect(f"pages of {layout.rows} native rows", pages, ("pages", layout.nbytes), "uint8")
    return NativeRows(layout)


def load_tile(ref: Any, *index: Array, there: Array) -> Array:
    """Elements of `ref` as a tile [n, width]; 0 where not `there`, and not read.

    Args:
        index: one for each axis of `ref`: a scalar, [n], or [n, width]; the last one [width] or [n, width].
    """
    *lead, last = index
    columns = [i[:, None] if i.ndim == 1 else i for i in lead]
    return plt.load(
        ref.at[(*columns, last[None, :] if last.ndim == 1 else last)],
        mask=there,
        other=jnp.zeros((), ref.dtype),
    )


def decode_e4m3(values: Array, codes: Array, dtype: DTypeLike) -> Array:
    """E4M3 bytes times their scales 2^(code - 127), in float32 or bfloat16; NaN where the code is 255.

    Exact in both wherever the product is a normal number. The scale comes as two factors, both normal for
    every code: 2^-127 itself would be flushed to 0.
    """
    code = codes.astype(jnp.int32)
    half = code >> 1
    first, second = _power_of_two(half - 63), _power_of_two(code - half - 64)
    second = jnp.where(code == 255, jnp.nan, second)
    wide = lax.bitcast_convert_type(values, jnp.float8_e4m3fn).astype(dtype)
    return wide * first.astype(dtype) * second.astype(dtype)


def decode_bfloat16(pairs: Array) -> Array:
    """uint8 [..., 2], the low and the high byte of each number, as bfloat16 [...]."""
    low, high = jnp.unstack(pairs.astype(jnp.uint16), axis=-1)
    return lax.bitcast_convert_type(low | (high << 8), jnp.bfloat16)


def _power_of_two(exponent: Array) -> Array:
    return lax.bitcast_convert_type((exponent + 127) << 23, jnp.float32)
