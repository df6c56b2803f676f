"""The bodies of the attention kernels: an online softmax over blocks of keys, and the sum of partial ones.

One program computes a block of heads of one query. It folds in the window's blocks of keys, then those of the
entries, always in that order, as `goldenkv.ops.attend` does. With a split over keys, split 0 holds the window
and split i > 0 the entries (i - 1) * keys_per_split .. i * keys_per_split - 1; `merge_kernel` adds them up
from 0 on.

A block in which the query sees nothing changes no bit, so blocks beyond its reach are left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from .rows import Piece, Rows, load_tile, tile_side


@dataclass(frozen=True, slots=True)
class Plan:
    """What is known of a call when its kernel is compiled.

    Attributes:
        rows: how pages are read.
        head_block: heads a program.
        key_block: keys folded in at a time.
        keys_per_split: entries a split, or None for one program over all keys.
    """

    rows: Rows
    head_block: int
    key_block: int
    keys_per_split: int | None


Softmax = tuple[Array, Array, tuple[Array, ...]]
"""Peak and total [heads], outputs [heads, width] by piece, all float32: see `goldenkv.ops.attend.Softmax`."""


def attend_kernel(
    q_ref: Any,
    window_ref: Any,
    visible_ref: Any,
    pages_ref: Any,
    table_ref: Any,
    reach_ref: Any,
    sinks_ref: Any,
    *refs: Any,
    plan: Plan,
    sparse: bool,
) -> None:
    """One block of heads of one query, over the keys of one split: grid (b, t, head blocks, splits).

    Args:
        q_ref: [b, t, h, d]. window_ref: [b, w, d]. visible_ref: int32 [b, t, w], 0 or 1.
        pages_ref, table_ref: as in `sparse_attention`. sinks_ref: [h].
        reach_ref: int32 [b, t, 3]: the first block of the window that the query sees, one past the last one,
            and one past the last of its entries.
        refs: with `sparse`, ids int32 [b, t, k]; then the outputs: the result [b, t, h, d], or with a split
            over keys what `merge_kernel` takes.
    """
    ids_ref, out_refs = (refs[0], refs[1:]) if sparse else (None, refs)
    b, t, split = pl.program_id(0), pl.program_id(1), pl.program_id(3)
    heads = pl.program_id(2) * plan.head_block + jnp.arange(plan.head_block, dtype=jnp.int32)
    pieces, real = plan.rows.pieces, heads < q_ref.shape[2]
    q = tuple(load_tile(q_ref, b, t, heads, p.channels, there=p.within(real)) for p in pieces)
    dtype, scale = q_ref.dtype, q_ref.shape[3] ** -0.5

    def window_step(i: Array, state: Softmax) -> Softmax:
        at = _block(i, plan.key_block)
        visible = plt.load(visible_ref.at[b, t, at], mask=at < visible_ref.shape[2], other=0) != 0
        keys = tuple(load_tile(window_ref, b, at, p.channels, there=p.within(visible)) for p in pieces)
        return absorb(state, q, keys, visible, scale)

    def entries_step(i: Array, state: Softmax) -> Softmax:
        at = _block(i, plan.key_block)
        ids = at
        if ids_ref is not None:
            ids = plt.load(ids_ref.at[b, t, at], mask=at < ids_ref.shape[2], other=-1)
        page, row, visible = locate(
            ids, (at < reach) & (ids >= 0), table_ref, b, pages_ref.shape[0], plan.rows
        )
        return absorb(state, q, plan.rows.load(pages_ref, page, row, visible, dtype), visible, scale)

    first, stop, reach = (reach_ref[b, t, i] for i in range(3))
    begin, end = jnp.int32(0), pl.cdiv(reach, plan.key_block)
    if plan.keys_per_split is not None:
        blocks = plan.keys_per_split // plan.key_block
        stop = jnp.where(split == 0, stop, first)
        begin = jnp.maximum(split - 1, 0) * blocks
        end = jnp.minimum(end, split * blocks)
    state = lax.fori_loop(first, stop, window_step, start(plan.head_block, pieces))
    state = lax.fori_loop(begin, end, entries_step, state)

    if plan.keys_per_split is None:
        sinks = plt.load(sinks_ref.at[heads], mask=real, other=-jnp.inf)
        _store(out_refs[0], (b, t, heads), pieces, real, finish(state, sinks))
        return

    @pl.when(split <= pl.cdiv(reach, plan.keys_per_split))  # the others are never read
    def store_partial_sums() -> None:
        peak_ref, total_ref, output_ref = out_refs
        peak, total, outputs = state
        plt.store(peak_ref.at[b, t, split, heads], peak, mask=real)
        plt.store(total_ref.at[b, t, split, heads], total, mask=real)
        _store(output_ref, (b, t, split, heads), pieces, real, outputs)


def merge_kernel(
    peak_ref: Any,
    total_ref: Any,
    output_ref: Any,
    reach_ref: Any,
    sinks_ref: Any,
    out_ref: Any,
    *,
    keys_per_split: int,
) -> None:
    """Adds up the splits of one head of one query, in their order: grid (b, t, h).

    Args:
        peak_ref, total_ref: float32 [b, t, splits, h]. output_ref: float32 [b, t, splits, h, d].
        reach_ref, sinks_ref: as in `attend_kernel`.
        out_ref: float32 [b, t, h, d].
    """
    b, t, head = (pl.program_id(axis) for axis in range(3))
    channels = jnp.arange(tile_side(out_ref.shape[3]), dtype=jnp.int32)
    real = channels < out_ref.shape[3]

    def step(i: Array, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        peak, total, output = state
        new_peak, new_total = peak_ref[b, t, i, head], total_ref[b, t, i, head]
        new = plt.load(output_ref.at[b, t, i, head, channels], mask=real, other=0.0)
        highest = jnp.maximum(peak, new_peak)
        shrink, new_shrink = _shrink(peak, highest), _shrink(new_peak, highest)
        return highest, total * shrink + new_total * new_shrink, output * shrink + new * new_shrink

    nothing = (jnp.float32(-jnp.inf), jnp.float32(0), jnp.zeros(channels.shape, jnp.float32))
    used = 1 + pl.cdiv(reach_ref[b, t, 2], keys_per_split)
    peak, total, output = lax.fori_loop(0, used, step, nothing)
    plt.store(out_ref.at[b, t, head, channels], output * _share(peak, total, sinks_ref[head]), mask=real)


def start(heads: int, pieces: tuple[Piece, ...]) -> Softmax:
    """No key seen yet."""
    outputs = tuple(jnp.zeros((heads, piece.width), jnp.float32) for piece in pieces)
    return jnp.full((heads,), -jnp.inf, jnp.float32), jnp.zeros((heads,), jnp.float32), outputs


def absorb(
    state: Softmax, q: tuple[Array, ...], keys: tuple[Array, ...], visible: Array, scale: float
) -> Softmax:
    """Adds a block of keys, [keys, width] a piece: `goldenkv.ops.attend.absorb_selected` for one query.

    Products take their factors as they are stored and sum in float32; weights are rounded to the keys' dtype.
    """
    peak, total, outputs = state
    scores = dot(q[0], keys[0].T)
    for a, k in zip(q[1:], keys[1:], strict=True):
        scores += dot(a, k.T)
    scores = jnp.where(visible[None, :], scores * scale, -jnp.inf)
    highest = jnp.maximum(peak, jnp.max(scores, axis=1))
    shrink, weight = _shrink(peak, highest), _shrink(scores, highest[:, None])
    values = weight.astype(keys[0].dtype)
    return (
        highest,
        total * shrink + jnp.sum(weight, axis=1),
        tuple(o * shrink[:, None] + dot(values, k) for o, k in zip(outputs, keys, strict=True)),
    )


def finish(state: Softmax, sinks: Array) -> tuple[Array, ...]:
    """Divides by the denominator with its sinks: `goldenkv.ops.attend.finish`."""
    peak, total, outputs = state
    share = _share(peak, total, sinks)
    return tuple(output * share[:, None] for output in outputs)


def dot(a: Array, b: Array) -> Array:
    """A matrix product summed in float32. The precision keeps float32 factors from becoming TF32."""
    return jnp.dot(a, b, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)


def locate(
    ids: Array, visible: Array, table_ref: Any, b: Array, pages: int, rows: Rows
) -> tuple[Array, Array, Array]:
    """Page, row and visibility of entries; what is not visible or in no page gets page 0, row 0."""
    entry = jnp.where(visible, ids, 0)
    number = lax.div(entry, jnp.int32(rows.rows))
    visible &= number < table_ref.shape[1]
    page = plt.load(table_ref.at[b, number], mask=visible, other=-1)
    visible &= (page >= 0) & (page < pages)
    return jnp.where(visible, page, 0), jnp.where(visible, entry - number * rows.rows, 0), visible


def _shrink(x: Array, peak: Array) -> Array:
    """exp(x - peak), where a peak of -inf means that x is -inf too."""
    return jnp.exp(x - jnp.where(peak == -jnp.inf, 0.0, peak))


def _share(peak: Array, total: Array, sinks: Array) -> Array:
    """What the output is multiplied by: 1 / denominator, or nothing where no key was seen."""
    highest = jnp.maximum(peak, sinks)
    shrink = _shrink(peak, highest)
    total = total * shrink + _shrink(sinks, highest)
    return shrink / jnp.where(total == 0.0, 1.0, total)


def _block(i: Array, size: int) -> Array:
    return i * size + jnp.arange(size, dtype=jnp.int32)


def _store(ref: Any, index: tuple, pieces: tuple[Piece, ...], real: Array, tiles: tuple[Array, ...]) -> None:
    """Writes a tile [heads, width] a piece to ref[*index], where `index` ends in the heads."""
    *lead, heads = index
    for piece, tile in zip(pieces, tiles, strict=True):
        plt.store(ref.at[(*lead, heads[:, None], piece.channels[None, :])], tile, mask=piece.within(real))
