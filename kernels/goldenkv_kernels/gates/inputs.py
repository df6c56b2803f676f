"""Inputs for the gates, from a seed, with poison wherever nothing may be read.

Poison is NaN in floats, 0xFF in bytes (NaN both as E4M3 and as UE8M0), and page numbers far outside the
pool. It stands in the first and the last page of every pool, in rows behind a sequence's last entry, in
entries that no query of the sequence sees, in window rows likewise, and in the table behind a sequence's last
page.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

Arrays = dict[str, np.ndarray]

NO_PAGE = 2**30
"""In a table where a sequence has no page."""


@dataclass(frozen=True, slots=True)
class Attention:
    """Sizes of one call of an attention kernel.

    Attributes:
        entries: compressed entries of the longest sequence; sequence b has about entries * (b + 1) / batch.
        selected: ids a query, or None for dense attention over all entries that it sees.
        native: pages of native rows; `rope` is used for those alone.
    """

    batch: int
    queries: int
    heads: int
    channels: int
    rope: int
    window: int
    entries: int
    rows: int
    selected: int | None = None
    dtype: str = "bfloat16"
    native: bool = False


def attention(rng: np.random.Generator, size: Attention) -> Arrays:
    """Arguments of `sparse_attention` or `dense_attention`.

    If there are several queries, the last one of the batch sees nothing at all. The first sparse query has a
    -1 between its ids; later ones have fewer ids than there is room for.
    """
    b, t, d = size.batch, size.queries, size.channels
    held = [max(1, size.entries * (i + 1) // b) for i in range(b)]
    columns = np.arange(size.window)
    visible = np.broadcast_to(
        (columns > np.arange(t)[:, None] - 1) & (columns < size.window - t + 1 + np.arange(t)[:, None]),
        (b, t, size.window),
    ).copy()
    counts = np.array([[max(n - t + 1 + i, 0) for i in range(t)] for n in held], np.int32)
    if t > 1:
        visible[-1, -1] = False
        counts[-1, -1] = 0
    arrays: Arrays = {
        "q": _normal(rng, (b, t, size.heads, d), size.dtype),
        "window": _normal(rng, (b, size.window, d), size.dtype),
        "window_visible": visible,
    }
    arrays["window"][~visible.any(axis=1)] = np.nan
    wanted = [np.arange(counts[i].max()) for i in range(b)]
    if size.selected is not None:
        arrays["ids"] = ids = np.full((b, t, size.selected), -1, np.int32)
        for i, j in np.ndindex(b, t):
            chosen = rng.permutation(counts[i, j])[: max(size.selected - i - j, 0)]
            ids[i, j, : len(chosen)] = chosen
        if size.selected > 2:
            ids[0, 0, 1] = -1
        wanted = [np.unique(ids[i][ids[i] >= 0]) for i in range(b)]
    else:
        arrays["counts"] = counts
    arrays["table"], page, row = _table(rng, held, wanted, size.rows)
    pages = int(arrays["table"][arrays["table"] != NO_PAGE].max()) + 2
    if size.native:
        arrays["pages"] = _native(rng, pages, size.rows, d, size.rope, page, row)
    else:
        arrays["pages"] = _plain(rng, (pages, size.rows, d), size.dtype, page, row)
    arrays["sinks"] = rng.normal(size=size.heads).astype(np.float32)
    arrays["sinks"][0] = -np.inf
    return arrays


@dataclass(frozen=True, slots=True)
class Index:
    """Sizes of one call of the indexer. `whole_numbers`: scores are exact, with many ties."""

    batch: int
    queries: int
    heads: int
    channels: int
    entries: int
    rows: int
    dtype: str = "bfloat16"
    whole_numbers: bool = False


def index(rng: np.random.Generator, size: Index) -> Arrays:
    """Arguments of `index_scores` and `select`; the last query of several sees no entry."""
    b, t = size.batch, size.queries
    held = [max(1, size.entries * (i + 1) // b) for i in range(b)]
    counts = np.array([[max(n - t + 1 + i, 0) for i in range(t)] for n in held], np.int32)
    if t > 1:
        counts[-1, -1] = 0
    table, page, row = _table(rng, held, [np.arange(counts[i].max()) for i in range(b)], size.rows)
    shape = (int(table[table != NO_PAGE].max()) + 2, size.rows, size.channels)
    arrays = {
        "q": _normal(rng, (b, t, size.heads, size.channels), size.dtype),
        "pages": _plain(rng, shape, size.dtype, page, row),
        "table": table,
        "weight": rng.normal(size=(b, t, size.heads)).astype(np.float32),
        "counts": counts,
    }
    if size.whole_numbers:
        for name in ("q", "pages", "weight"):
            arrays[name] = np.round(arrays[name].astype(np.float32)).astype(arrays[name].dtype)
    return arrays


@dataclass(frozen=True, slots=True)
class Compress:
    """Sizes of one call of the compressor: so many blocks of `rate` tokens, entries of `channels`."""

    blocks: int
    rate: int
    channels: int
    rope: int
    overlap: bool


def compress(rng: np.random.Generator, size: Compress) -> Arrays:
    """Arguments of `compress_blocks`. With overlap the first block stands before position 0: score -inf."""
    wide = size.channels * (2 if size.overlap else 1)
    shape = (size.blocks, size.rate, wide)
    kv, score = (rng.normal(size=shape).astype(np.float32) for _ in range(2))
    if size.overlap:
        kv[0], score[0] = 0, -np.inf
        # Of the predecessor only the first half counts, of the last block only the second.
        kv[0, :, size.channels :] = np.nan
        score[0, :, size.channels :] = np.nan
        kv[-1, :, : size.channels] = np.nan
        score[-1, :, : size.channels] = np.nan
    half = np.arange(size.rope // 2, dtype=np.float32)
    return {
        "kv": kv,
        "score": score,
        "norm_weight": rng.uniform(0.5, 1.5, size.channels).astype(np.float32),
        "positions": ((np.arange(size.blocks) - size.overlap) * size.rate).astype(np.int32),
        "frequency": (160000.0 ** (-2 * half / size.rope)).astype(np.float32),
    }


@dataclass(frozen=True, slots=True)
class Pages:
    """A pool of two arrays, as the offload engine moves them: native rows in bytes, index keys in bfloat16.

    Attributes:
        pages: of the pool; `moved` of them go.
        nbytes: of a page of native rows.
        keys: rows and channels of a page of index keys.
    """

    pages: int
    moved: int
    nbytes: int
    keys: tuple[int, int]


def gather(rng: np.random.Generator, size: Pages) -> dict[str, Any]:
    """Arguments of `gather_pages`: any bits, and three page numbers out of range."""
    numbers = rng.permutation(size.pages)[: size.moved].astype(np.int32)
    return {
        "pool": _pool(rng, size.pages, size),
        "pages": np.append(numbers, [-1, size.pages, NO_PAGE]).astype(np.int32),
    }


def scatter(rng: np.random.Generator, size: Pages) -> dict[str, Any]:
    """Arguments of `scatter_pages`."""
    arrays = gather(rng, size)
    return arrays | {"rows": _pool(rng, len(arrays["pages"]), size)}


def _pool(rng: np.random.Generator, count: int, size: Pages) -> dict[str, np.ndarray]:
    """Random bits, so NaN of every payload too."""
    keys = rng.integers(0, 2**16, (count, *size.keys)).astype(np.uint16).view(ml_dtypes.bfloat16)
    return {"native": rng.integers(0, 256, (count, size.nbytes)).astype(np.uint8), "keys": keys}


def native_pages(rng: np.random.Generator, pages: int, rows: int, channels: int, rope: int) -> np.ndarray:
    """uint8 [pages, bytes]: native pages, full of finite values, each row's codes between 2^-6 and 2^1."""
    everything = np.indices((pages, rows)).reshape(2, -1)
    return _native(rng, pages, rows, channels, rope, *everything)


def _normal(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    return rng.normal(size=shape).astype(getattr(ml_dtypes, dtype, dtype))


def _table(
    rng: np.random.Generator, held: list[int], wanted: list[np.ndarray], rows: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A table with one column too many, pages scattered over a pool; pages and rows of all wanted entries."""
    need = [-(-n // rows) for n in held]
    scattered = list(1 + rng.permutation(sum(need)))
    table = np.full((len(held), max(need) + 1), NO_PAGE, np.int32)
    page, row = [], []
    for b, count in enumerate(need):
        table[b, :count] = [scattered.pop() for _ in range(count)]
        page.append(table[b, wanted[b] // rows])
        row.append(wanted[b] % rows)
    return table, np.concatenate(page), np.concatenate(row)


def _plain(
    rng: np.random.Generator, shape: tuple[int, int, int], dtype: str, page: np.ndarray, row: np.ndarray
) -> np.ndarray:
    pool = np.full(shape, np.nan).astype(getattr(ml_dtypes, dtype, dtype))
    pool[page, row] = _normal(rng, (len(page), shape[2]), dtype)
    return pool


def _native(
    rng: np.random.Generator,
    pages: int,
    rows: int,
    channels: int,
    rope: int,
    page: np.ndarray,
    row: np.ndarray,
) -> np.ndarray:
    plain = channels - rope
    blocks = -(-plain // 64)
    width, behind = plain + 2 * rope, blocks + -blocks % 8
    pool = np.full((pages, -(-rows * (width + behind) // 576) * 576), 0xFF, np.uint8)
    data = np.empty((len(page), width), np.uint8)
    values = rng.normal(size=(len(page), plain)).astype(ml_dtypes.float8_e4m3fn)
    data[:, :plain] = values.view(np.uint8)
    data[:, plain:] = rng.normal(size=(len(page), rope)).astype(ml_dtypes.bfloat16).view(np.uint8)
    pool[page[:, None], row[:, None] * width + np.arange(width)] = data
    codes = rng.integers(121, 129, (len(page), blocks)).astype(np.uint8)
    pool[page[:, None], rows * width + row[:, None] * behind + np.arange(blocks)] = codes
    return pool
