"""The attention kernels' contract in plain XLA: rows gathered, one softmax over all of them.

It is not blocked, so its bits depend on the shapes that it is compiled for. It is what the kernels are
measured against, and what runs where they cannot.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from .attention_call import Call
from .rows import NativeRows, Rows, decode_bfloat16, decode_e4m3


def attend(call: Call) -> Array:
    """The result of `sparse_attention` or `dense_attention`.

    A row that some queries of a sequence see, and that holds NaN, makes NaN of the others too, as in the ops.
    """
    q, window, window_visible, pages, table, ids, counts, sinks, rows = call
    if ids is None:
        entries = jnp.arange(table.shape[1] * rows.rows, dtype=jnp.int32)
        seen = entries < counts[:, :, None]
        page, row, held = locate(jnp.broadcast_to(entries, (len(table), len(entries))), table, pages, rows)
        keys = read(pages, page, row, held & jnp.any(seen, axis=1), rows, q.dtype)
        axes = "bnd"
        seen &= held[:, None, :]
    else:
        page, row, seen = locate(ids, table, pages, rows)
        keys = read(pages, page, row, seen, rows, q.dtype)
        axes = "btnd"
    window = jnp.where(jnp.any(window_visible, axis=1)[:, :, None], window, 0)

    scores = [_product("bthd,bnd->bthn", q, window), _product(f"bthd,{axes}->bthn", q, keys)]
    visible = jnp.concatenate([window_visible, seen], axis=2)[:, :, None, :]
    score = jnp.where(visible, jnp.concatenate(scores, axis=3) * q.shape[3] ** -0.5, -jnp.inf)
    peak = jnp.maximum(jnp.max(score, axis=3, initial=-jnp.inf), sinks)[..., None]
    peak = jnp.where(peak == -jnp.inf, 0.0, peak)
    weight = jnp.exp(score - peak)
    total = jnp.sum(weight, axis=3, keepdims=True) + jnp.exp(sinks[:, None] - peak)
    first, rest = jnp.split(weight.astype(q.dtype), [window.shape[1]], axis=3)
    output = _product("bthn,bnd->bthd", first, window) + _product(f"bthn,{axes}->bthd", rest, keys)
    return output / jnp.where(total == 0.0, 1.0, total)


def locate(ids: Array, table: Array, pages: Array, rows: Rows) -> tuple[Array, Array, Array]:
    """Page, row and existence [b, ...] of entries int32 [b, ...]; page 0, row 0 for what does not exist."""
    exists = (ids >= 0) & (ids < table.shape[1] * rows.rows)
    entry = jnp.where(exists, ids, 0)
    if not table.shape[1]:
        return entry, entry, exists
    sequence = jnp.arange(len(table)).reshape(-1, *(1,) * (ids.ndim - 1))
    page = table[sequence, entry // rows.rows]
    exists &= (page >= 0) & (page < len(pages))
    return jnp.where(exists, page, 0), jnp.where(exists, entry % rows.rows, 0), exists


def read(pages: Array, page: Array, row: Array, visible: Array, rows: Rows, dtype: DTypeLike) -> Array:
    """Rows [..., d] of pages in `dtype` or native; 0 where not visible."""
    if not isinstance(rows, NativeRows):
        return jnp.where(visible[..., None], pages[page, row], 0)

    def cut(start: Array, size: int) -> Array:
        return pages[page[..., None], start[..., None] + jnp.arange(size)]

    channels = rows.channels - rows.rope.count
    data = cut(row * rows.data_bytes, rows.data_bytes)
    codes = cut(rows.rows * rows.data_bytes + row * rows.scale_bytes, len(rows.values))
    block = rows.values[0].count
    values = decode_e4m3(data[..., :channels], jnp.repeat(codes, block, axis=-1)[..., :channels], dtype)
    rope = decode_bfloat16(data[..., channels:].reshape(*visible.shape, rows.rope.count, 2)).astype(dtype)
    return jnp.where(visible[..., None], jnp.concatenate([values, rope], axis=-1), 0)


def _product(equation: str, a: Array, b: Array) -> Array:
    return jnp.einsum(equation, a, b, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)
