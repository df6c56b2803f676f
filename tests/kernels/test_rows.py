"""Rows as the attention kernels read them: every byte of native pages, and nothing that is not visible."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.experimental import pallas as pl

from goldenkv.state.layouts import page_layout, read_page
from goldenkv.state.packing import widened
from goldenkv_kernels.attention_xla import read
from goldenkv_kernels.rows import (
    NativeRows,
    Piece,
    PlainRows,
    cut,
    decode_bfloat16,
    decode_e4m3,
    rows_of,
    tile_side,
)

DTYPES = pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
SIZES = pytest.mark.parametrize("rows, channels, rope", [(64, 512, 64), (4, 16, 4), (3, 144, 16), (5, 80, 0)])


def same(got, expected) -> None:
    """The same float32 bits; any NaN is as good as another."""
    got, expected = (widened(np.asarray(x)) for x in (got, expected))
    np.testing.assert_array_equal(np.isnan(got), np.isnan(expected))
    bits = [np.where(np.isnan(x), 0, x).astype(np.float32).view(np.uint32) for x in (got, expected)]
    np.testing.assert_array_equal(*bits)


def load(pages, at: np.ndarray, visible: np.ndarray, rows, dtype: str) -> np.ndarray:
    """Rows [len(at), d] through a kernel; `at` holds pages and rows [n, 2]."""
    pieces = rows.pieces

    def kernel(pages_ref, at_ref, visible_ref, *out_refs) -> None:
        n = jnp.arange(len(at))
        tiles = rows.load(pages_ref, at_ref[n, 0], at_ref[n, 1], visible_ref[n] != 0, jnp.dtype(dtype))
        for out_ref, tile in zip(out_refs, tiles, strict=True):
            out_ref[...] = tile

    shapes = [jax.ShapeDtypeStruct((len(at), piece.width), dtype) for piece in pieces]
    call = pl.pallas_call(kernel, out_shape=shapes, interpret=True)
    tiles = jax.jit(call)(jnp.asarray(pages), jnp.asarray(at, jnp.int32), jnp.asarray(visible, jnp.int32))
    for piece, tile in zip(pieces, tiles, strict=True):
        whole = np.asarray(tile, np.float32)
        beyond = whole[~np.isnan(whole[:, : piece.count]).all(axis=1), piece.count :]
        assert not beyond.any(), "0 beyond a piece"
    return np.concatenate(
        [np.asarray(tile)[:, : p.count] for p, tile in zip(pieces, tiles, strict=True)], axis=1
    )


def native_pages(seed: int, count: int, layout) -> np.ndarray:
    """Pages of any bytes whatever, but for scales that keep every product a normal float32 or NaN."""
    rng = np.random.default_rng(seed)
    pages = rng.integers(0, 256, (count, layout.nbytes), np.uint8)
    behind = sum(field.nbytes for field in layout.sections[0]) * layout.rows
    scales = rng.choice(np.array([10, 11, 126, 127, 128, 245, 255], np.uint8), pages.shape)
    pages[:, behind:] = scales[:, behind:]
    return pages


@DTYPES
def test_every_value_under_every_scale(dtype: str) -> None:
    """65,536 products against NumPy's. Below 2^-126 XLA flushes to 0 on a CPU."""
    values, codes = np.meshgrid(np.arange(256, dtype=np.uint8), np.arange(256, dtype=np.uint8))
    got = jax.jit(partial(decode_e4m3, dtype=jnp.dtype(dtype)))(jnp.asarray(values), jnp.asarray(codes))
    assert got.dtype == dtype
    with np.errstate(all="ignore"):
        scales = codes.view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
        expected = values.view(ml_dtypes.float8_e4m3fn).astype(np.float32) * scales
    small = np.abs(expected) < 2.0**-126
    assert small.mean() < 0.05 and (codes[~small] == 0).any(), "the smallest scale is tried too"
    same(np.where(small, 0, np.asarray(got)), np.where(small, 0, expected))


def test_a_scale_as_one_factor_would_be_lost() -> None:
    """Why there are two: code 0 is 2^-127, which is 0 once flushed, and 448 * 2^-127 is not."""
    value, code = jnp.asarray([0x7E], jnp.uint8), jnp.asarray([0], jnp.uint8)
    one_factor = jax.lax.bitcast_convert_type(code.astype(jnp.int32) << 23, jnp.float32) * 448
    assert float(decode_e4m3(value, code, jnp.float32)[0]) == 448 * 2.0**-127 != float(one_factor[0])


def test_every_bfloat16() -> None:
    pattern = np.arange(2**16, dtype=np.uint16)
    got = jax.jit(decode_bfloat16)(jnp.asarray(pattern.view(np.uint8).reshape(-1, 2)))
    np.testing.assert_array_equal(np.asarray(got).view(np.uint16), pattern)


@DTYPES
@SIZES
def test_native_rows_are_those_of_the_layout(rows: int, channels: int, rope: int, dtype: str) -> None:
    layout = page_layout("fp8", rows, channels, rope)
    pages = native_pages(rows, 3, layout)
    expected = np.stack([read_page(page, layout, dtype=dtype)["rows"] for page in pages])
    at = np.stack(np.meshgrid(np.arange(3), np.arange(rows), indexing="ij"), axis=-1).reshape(-1, 2)
    at = np.random.default_rng(0).permutation(at)[: min(len(at), 32)]
    at = np.resize(at, (32, 2))
    got = load(pages, at, np.ones(32, bool), rows_of(jnp.asarray(pages), layout), dtype)
    same(got, expected[at[:, 0], at[:, 1]])
    seen = jnp.ones(32, bool)
    page, row = jnp.asarray(at).T
    plain = jax.jit(partial(read, rows=NativeRows(layout), dtype=jnp.dtype(dtype)))
    same(plain(jnp.asarray(pages), page, row, seen), expected[at[:, 0], at[:, 1]])

    broken = pages.copy()
    broken[at[0, 0], at[0, 1] * NativeRows(layout).data_bytes] ^= 1  # one bit of the first row
    assert not np.array_equal(
        load(broken, at, np.ones(32, bool), NativeRows(layout), dtype)[0].view(np.uint8),
        got[0].view(np.uint8),
    )


@DTYPES
@pytest.mark.parametrize("channels", [16, 24, 64, 80, 512])
def test_plain_rows(channels: int, dtype: str) -> None:
    pages = np.random.default_rng(1).standard_normal((4, 3, channels)).astype(dtype)
    at = np.random.default_rng(2).integers(0, [4, 3], (16, 2))
    got = load(pages, at, np.ones(16, bool), PlainRows(3, channels), dtype)
    same(got, pages[at[:, 0], at[:, 1]])


@pytest.mark.parametrize("native", [False, True])
def test_what_is_not_visible_is_zero(native: bool) -> None:
    layout = page_layout("fp8", 4, 80, 16)
    pages = np.full((2, layout.nbytes), 0xFF, np.uint8) if native else np.full((2, 4, 80), np.nan, np.float32)
    visible = np.arange(16) == 5
    rows = rows_of(jnp.asarray(pages), layout if native else None)
    got = load(pages, np.zeros((16, 2), int), visible, rows, "float32")
    assert not got[~visible].view(np.uint32).any()
    assert np.isnan(got[visible]).all()  # the check can fail


def test_pieces_cover_a_row_once() -> None:
    for rows in (PlainRows(4, 100), NativeRows(page_layout("fp8", 4, 512, 64))):
        channels = [c for piece in rows.pieces for c in range(piece.start, piece.start + piece.count)]
        assert channels == list(range(rows.channels))
    assert cut(3, 130, 64) == (Piece(3, 64), Piece(67, 64), Piece(131, 2))
    assert cut(3, 0, 64) == ()
    assert [tile_side(n) for n in (1, 15, 16, 17, 64, 65)] == [16, 16, 16, 32, 64, 128]
    flash = NativeRows(page_layout("fp8", 64, 512, 64))
    assert (flash.data_bytes, flash.scale_bytes, [p.width for p in flash.pieces]) == (576, 8, [64] * 8)


def test_other_pages_are_refused() -> None:
    layout = page_layout("fp8", 64, 512, 64)
    with pytest.raises(ValueError, match="pages without a layout must be float32 or bfloat16"):
        rows_of(jnp.zeros((2, layout.nbytes), jnp.uint8), None)
    with pytest.raises(
        ValueError, match=rf"pages of 64 native rows must be uint8 \[pages, {layout.nbytes}\]"
    ):
        rows_of(jnp.zeros((2, 584), jnp.uint8), layout)
    with pytest.raises(ValueError, match=r"must be page_layout.*got format 'fp8_fnuz'"):
        rows_of(jnp.zeros((2, layout.nbytes), jnp.uint8), page_layout("fp8_fnuz", 64, 512, 64))
    with pytest.raises(ValueError, match="run=16"):
        rows_of(jnp.zeros((2, layout.nbytes), jnp.uint8), page_layout("fp8", 64, 512, 64, run=16))
