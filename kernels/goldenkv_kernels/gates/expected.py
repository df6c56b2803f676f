"""What the kernels must give, in float64 NumPy, one query or block at a time, written from the equations.

Nothing here is shared with the kernels or with `goldenkv.ops`, except the published layout of native pages.
"""

from __future__ import annotations

from collections.abc import Mapping

import ml_dtypes
import numpy as np

E4M3_BLOCK, E4M3_LARGEST, E4M3_FLOOR = 64, 448.0, 1e-4
E2M1_BLOCK, E2M1_LARGEST, E2M1_FLOOR = 32, 6.0, 6 * 2.0**-126


def attention(
    q: np.ndarray,
    window: np.ndarray,
    window_visible: np.ndarray,
    pages: np.ndarray,
    table: np.ndarray,
    sinks: np.ndarray,
    *,
    ids: np.ndarray | None = None,
    counts: np.ndarray | None = None,
    native: tuple[int, int, int] | None = None,
) -> np.ndarray:
    """`sparse_attention` with `ids`, `dense_attention` with `counts`; `native` = (rows, channels, rope)."""
    rows = pages.astype(np.float64) if native is None else native_rows(pages, *native)
    out = np.zeros(q.shape)
    for b, t in np.ndindex(*q.shape[:2]):
        chosen = np.asarray(ids)[b, t] if counts is None else np.arange(int(counts[b, t]))
        chosen = chosen[chosen >= 0]
        entries = rows[table[b, chosen // rows.shape[1]], chosen % rows.shape[1]]
        keys = np.concatenate([window[b][window_visible[b, t]].astype(np.float64), entries])
        scores = q[b, t].astype(np.float64) @ keys.T * q.shape[-1] ** -0.5
        peak = np.maximum(scores.max(axis=1, initial=-np.inf), sinks)
        peak = np.where(np.isinf(peak), 0.0, peak)
        weight = np.exp(scores - peak[:, None])
        total = weight.sum(axis=1) + np.exp(sinks - peak)
        out[b, t] = weight @ keys / np.where(total == 0, 1, total)[:, None]
    return out


def native_rows(pages: np.ndarray, rows: int, channels: int, rope: int) -> np.ndarray:
    """uint8 [pages, bytes] -> float64 [pages, rows, channels]: all rows' data, then all rows' scales."""
    plain = channels - rope
    blocks = -(-plain // E4M3_BLOCK)
    width = plain + 2 * rope
    data = pages[:, : rows * width].reshape(len(pages), rows, width)
    behind = pages[:, rows * width :][:, : rows * (blocks + -blocks % 8)]
    codes = behind.reshape(len(pages), rows, -1)[:, :, :blocks].astype(np.int32)
    scale = np.where(codes == 255, np.nan, np.ldexp(1.0, codes - 127))
    values = np.ascontiguousarray(data[:, :, :plain]).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    values = values * np.repeat(scale, E4M3_BLOCK, axis=2)[:, :, :plain]
    rotated = np.ascontiguousarray(data[:, :, plain:]).view(ml_dtypes.bfloat16).astype(np.float64)
    return np.concatenate([values, rotated], axis=2)


def index_scores(
    q: np.ndarray, pages: np.ndarray, table: np.ndarray, weight: np.ndarray, counts: np.ndarray
) -> np.ndarray:
    """`index_scores`: -inf where an entry is not visible."""
    rows = pages.shape[1]
    out = np.full((*counts.shape, table.shape[1] * rows), -np.inf)
    for b, t in np.ndindex(*counts.shape):
        entries = np.arange(int(counts[b, t]))
        keys = pages[table[b, entries // rows], entries % rows].astype(np.float64)
        dots = np.maximum(q[b, t].astype(np.float64) @ keys.T, 0)
        out[b, t, entries] = weight[b, t].astype(np.float64) @ dots
    return out


def select(
    q: np.ndarray, pages: np.ndarray, table: np.ndarray, weight: np.ndarray, counts: np.ndarray, *, top_k: int
) -> np.ndarray:
    """`select`: the best first, ties to the lowest id, -1 where there are fewer."""
    scores = index_scores(q, pages, table, weight, counts)
    out = np.full((*counts.shape, top_k), -1, np.int32)
    for b, t in np.ndindex(*counts.shape):
        best = np.argsort(-scores[b, t, : counts[b, t]], kind="stable")[:top_k]
        out[b, t, : len(best)] = best
    return out


def compress(
    kv: np.ndarray,
    score: np.ndarray,
    norm_weight: np.ndarray,
    positions: np.ndarray,
    frequency: np.ndarray,
    *,
    overlap: bool,
    eps: float,
    quantise: str | None,
) -> np.ndarray:
    """`compress_blocks`: pool, norm, rotate, and round to a format's grid."""
    kv, score = kv.astype(np.float64), score.astype(np.float64)
    if overlap:
        half, positions = kv.shape[2] // 2, positions[1:]
        kv, score = (np.concatenate([x[:-1, :, :half], x[1:, :, half:]], axis=1) for x in (kv, score))
    peak = score.max(axis=1, keepdims=True)
    weight = np.exp(score - np.where(np.isinf(peak), 0.0, peak))
    total = weight.sum(axis=1)
    pooled = (weight * kv).sum(axis=1) / np.where(total == 0, 1, total)
    rows = pooled / np.sqrt((pooled**2).mean(axis=1, keepdims=True) + eps) * norm_weight.astype(np.float64)
    # The angle is a float32 product, as published: at position 10^6 its rounding is no longer small.
    angle = (positions.astype(np.float32)[:, None] * frequency.astype(np.float32)).astype(np.float64)
    first = rows.shape[1] - 2 * angle.shape[1]
    even, odd = rows[:, first::2].copy(), rows[:, first + 1 :: 2].copy()
    rows[:, first::2] = even * np.cos(angle) - odd * np.sin(angle)
    rows[:, first + 1 :: 2] = odd * np.cos(angle) + even * np.sin(angle)
    if quantise == "e4m3":
        rows[:, :first] = _rounded(rows[:, :first], E4M3_BLOCK, E4M3_LARGEST, E4M3_FLOOR, 3, -6)
    elif quantise == "hadamard_e2m1":
        rows = _rounded(_hadamard(rows), E2M1_BLOCK, E2M1_LARGEST, E2M1_FLOOR, 1, 0)
    return rows


def gather(pool: Mapping[str, np.ndarray], pages: np.ndarray) -> dict[str, np.ndarray]:
    """`gather_pages`: zeros for pages out of range."""
    out = {}
    for name, array in pool.items():
        inside = (pages >= 0) & (pages < len(array))
        out[name] = np.zeros((len(pages), *array.shape[1:]), array.dtype)
        out[name][inside] = array[pages[inside]]
    return out


def scatter(
    pool: Mapping[str, np.ndarray], pages: np.ndarray, rows: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """`scatter_pages`: pages out of range are left out."""
    out = {}
    for name, array in pool.items():
        inside = (pages >= 0) & (pages < len(array))
        out[name] = array.copy()
        out[name][pages[inside]] = rows[name][inside]
    return out


def _hadamard(rows: np.ndarray) -> np.ndarray:
    matrix = np.ones((1, 1))
    while len(matrix) < rows.shape[1]:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return rows @ matrix / np.sqrt(len(matrix))


def _rounded(
    rows: np.ndarray, block: int, largest: float, floor: float, mantissa_bits: int, least_exponent: int
) -> np.ndarray:
    """Rounded to the grid of a format, under a power-of-two scale for each block."""
    out = rows.copy()
    for start in range(0, rows.shape[1], block):
        part = rows[:, start : start + block]
        peak = np.maximum(np.abs(part).max(axis=1, keepdims=True), floor)
        scale = np.exp2(np.ceil(np.log2(peak / largest)))
        scaled = np.clip(part / scale, -largest, largest)
        exponent = np.frexp(np.where(scaled == 0, 1, np.abs(scaled)))[1] - 1
        step = np.exp2(np.maximum(exponent, least_exponent) - mantissa_bits)
        out[:, start : start + block] = np.round(scaled / step) * step * scale
    return out
