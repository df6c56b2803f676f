"""The cases: every kernel at Flash's sizes, which are compiled for a GPU, and at small ragged ones."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np

from goldenkv.state import page_layout
from goldenkv.state.layouts import pack_page

from ..attention import default_config, dense_attention, sparse_attention
from ..compressor import compress_blocks
from ..indexer import index_scores, select
from ..native import pack_rows, unpack_rows
from ..paging import gather_pages, scatter_pages
from . import expected, inputs
from .case import Case, Tolerance
from .inputs import Attention, Compress, Index, Pages

SUMS = Tolerance("float32 sums", "float32 sums in another order, and exp of float32", 2e-6, 2e-6)
WEIGHTS = Tolerance(
    "bfloat16 weights",
    "the softmax's weights are rounded to 8 bits for the second product, as production kernels do: each is "
    "off by up to 2^-9 of itself, and values have a mean size of about 0.8",
    2.0**-9,
)
SCORES = Tolerance(
    "float32 dots", "float32 sums of 64 x 128 products in another order, each up to about 100", 1e-4
)
ENTRIES = Tolerance("float32 pooling", "float32 sums, exp, rsqrt and cosines, in another order", 2e-6, 2e-6)
ROUNDED = Tolerance(
    "float32 before rounding",
    "float32 falls to the other side of a boundary between two values of the format now and then",
    2e-6,
    2e-6,
    share=1e-3,
)
EXACT = Tolerance("exact", "nothing is rounded")

PAGE = page_layout("fp8", 64, 512, 64).nbytes


def _attention(
    name: str,
    size: Attention,
    tolerance: Tolerance,
    compiled: bool = False,
    keys_per_split: int | None = None,
) -> Case:
    dense = size.selected is None
    native = (size.rows, size.channels, size.rope)
    layout = page_layout("fp8", *native) if size.native else None
    config = default_config(jnp.dtype(size.dtype), size.native)
    config = replace(config, keys_per_split=keys_per_split)
    return Case(
        "dense_attention" if dense else "sparse_attention",
        name,
        dense_attention if dense else sparse_attention,
        partial(inputs.attention, size=size),
        partial(expected.attention, native=native if size.native else None),
        tolerance,
        {"layout": layout, "config": config},
        compiled,
    )


def _index(name: str, size: Index, tolerance: Tolerance, compiled: bool = False) -> Case:
    make = partial(inputs.index, size=size)
    return Case("index_scores", name, index_scores, make, expected.index_scores, tolerance, {}, compiled)


def _select(name: str, size: Index, top_k: int, compiled: bool = False) -> Case:
    """Scores are whole numbers, so that both sides agree on every tie."""
    make, want = partial(inputs.index, size=size), partial(expected.select, top_k=top_k)
    return Case("select", name, select, make, want, EXACT, {"top_k": top_k}, compiled)


def _compress(name: str, size: Compress, quantise: str | None, compiled: bool = False) -> Case:
    options: dict[str, Any] = {"overlap": size.overlap, "eps": 1e-6, "quantise": quantise}
    make, want = partial(inputs.compress, size=size), partial(expected.compress, **options)
    tolerance = ENTRIES if quantise is None else ROUNDED
    return Case("compress_blocks", name, compress_blocks, make, want, tolerance, options, compiled)


def _gather(name: str, size: Pages, compiled: bool = False) -> Case:
    make = partial(inputs.gather, size=size)
    return Case("gather_pages", name, gather_pages, make, expected.gather, EXACT, {}, compiled)


def _scatter(name: str, size: Pages, compiled: bool = False) -> Case:
    make = partial(inputs.scatter, size=size)
    return Case("scatter_pages", name, scatter_pages, make, expected.scatter, EXACT, {}, compiled)


def _pack(name: str, count: int, rows: int, channels: int, rope: int, compiled: bool = False) -> Case:
    """Against the reference's packing, which is NumPy and has tests of its own."""
    layout = page_layout("fp8", rows, channels, rope)

    def make(rng: np.random.Generator) -> inputs.Arrays:
        return {"rows": rng.normal(size=(count, rows, channels)).astype(np.float32)}

    def want(rows: np.ndarray) -> np.ndarray:
        return np.stack([np.frombuffer(pack_page(page, layout, quantise=True), np.uint8) for page in rows])

    return Case("pack_rows", name, pack_rows, make, want, EXACT, {"rope": rope}, compiled)


def _unpack(name: str, count: int, rows: int, channels: int, rope: int, compiled: bool = False) -> Case:
    size = {"rows": rows, "channels": channels, "rope": rope}

    def make(rng: np.random.Generator) -> inputs.Arrays:
        return {"pages": inputs.native_pages(rng, count, **size)}

    def want(pages: np.ndarray) -> np.ndarray:
        return expected.native_rows(pages, **size).astype(np.float32)

    return Case("unpack_rows", name, unpack_rows, make, want, EXACT, size, compiled)


CASES: tuple[Case, ...] = (
    _attention("flash bf16", Attention(2, 1, 64, 512, 64, 128, 700, 64, 512), WEIGHTS, True),
    _attention("flash split", Attention(2, 1, 64, 512, 64, 128, 700, 64, 512), WEIGHTS, True, 256),
    _attention("flash fp8", Attention(2, 1, 64, 512, 64, 128, 700, 64, 512, native=True), WEIGHTS, True),
    _attention("flash f32", Attention(2, 1, 64, 512, 64, 128, 700, 64, 512, "float32"), SUMS, True),
    _attention("small f32", Attention(2, 3, 5, 40, 8, 9, 11, 4, 7, "float32"), SUMS),
    _attention("small split", Attention(2, 3, 5, 40, 8, 9, 41, 4, 37, "float32"), SUMS, False, 16),
    _attention("small fp8", Attention(2, 2, 5, 80, 16, 9, 11, 4, 7, "float32", True), SUMS),
    _attention("flash bf16", Attention(2, 1, 64, 512, 64, 128, 150, 2), WEIGHTS, True),
    _attention("flash fp8", Attention(2, 1, 64, 512, 64, 128, 150, 2, native=True), WEIGHTS, True),
    _attention("small f32", Attention(2, 3, 5, 40, 8, 9, 11, 4, None, "float32"), SUMS),
    _index("flash bf16", Index(2, 2, 64, 128, 700, 64), SCORES, compiled=True),
    _index("small f32", Index(2, 3, 3, 20, 11, 4, "float32"), SCORES),
    _select("flash bf16", Index(2, 2, 64, 128, 5000, 64, whole_numbers=True), 512, compiled=True),
    _select("small f32", Index(2, 3, 3, 20, 11, 4, "float32", whole_numbers=True), 7),
    _select("k above n", Index(2, 3, 3, 20, 11, 4, "float32", whole_numbers=True), 20),
    _compress("flash CSA", Compress(9, 4, 512, 64, True), "e4m3", compiled=True),
    _compress("flash index", Compress(9, 4, 128, 64, True), "hadamard_e2m1", compiled=True),
    _compress("flash HCA", Compress(3, 128, 512, 64, False), "e4m3", compiled=True),
    _compress("small CSA", Compress(4, 3, 40, 6, True), None),
    _compress("small HCA", Compress(3, 5, 40, 8, False), None),
    _gather("flash", Pages(9, 4, PAGE, (64, 128)), compiled=True),
    _gather("small", Pages(5, 3, 23, (3, 5))),
    _scatter("flash", Pages(9, 4, PAGE, (64, 128)), compiled=True),
    _scatter("small", Pages(5, 3, 23, (3, 5))),
    _pack("flash", 3, 64, 512, 64, compiled=True),
    _pack("small", 2, 3, 80, 10),
    _unpack("flash", 3, 64, 512, 64, compiled=True),
    _unpack("small", 2, 3, 80, 10),
)
