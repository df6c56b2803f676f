"""Core attention: one softmax over the sliding window and compressed entries, with sinks.

Report section 2.3.1, equation 19 (CSA), section 2.3.2, equation 26 (HCA), section 2.3.3 (sliding window, and
attention sink, equation 27). One KV head serves all query heads, and K = V. Scores are scaled by d^-1/2.

The softmax is built block by block, so that a growing context is a loop over fixed blocks in a fixed order:
`start`, then `absorb` or `absorb_selected` for each block of keys, then `finish`. `window_attention`,
`csa_attention` and `hca_attention` are that sequence written out on whole arrays.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int32

from .linear import contract
from .typed import typed


class Softmax(NamedTuple):
    """A softmax in the making, all float32: sums are relative to exp(peak)."""

    peak: Float32[Array, "t h"]
    total: Float32[Array, "t h"]
    output: Float32[Array, "t h d"]


@typed
def start(rows: int, heads: int, head_dim: int) -> Softmax:
    """No key seen yet."""
    return Softmax(
        peak=jnp.full((rows, heads), -jnp.inf, jnp.float32),
        total=jnp.zeros((rows, heads), jnp.float32),
        output=jnp.zeros((rows, heads, head_dim), jnp.float32),
    )


@typed
def absorb(
    state: Softmax, q: Float[Array, "t h d"], keys: Float[Array, "n d"], visible: Bool[Array, "t n"]
) -> Softmax:
    """Adds n keys that all queries share.

    Args:
        state: the softmax so far.
        q: queries, after norm and RoPE.
        keys: rows that are both key and value. A row that no query sees may hold anything, NaN included.
        visible: which query sees which key.
    """
    keys = jnp.where(jnp.any(visible, axis=0)[:, None], keys, 0)
    scores = contract("thd,nd->thn", q, keys)

    def values(weight: Float32[Array, "t h n"]) -> Float32[Array, "t h d"]:
        return contract("thn,nd->thd", weight, keys)

    return _fold(state, scores, visible, values)


@typed
def absorb_selected(
    state: Softmax, q: Float[Array, "t h d"], keys: Float[Array, "t k d"], visible: Bool[Array, "t k"]
) -> Softmax:
    """Adds k keys of its own to each query: the entries that the indexer selected for it."""
    keys = jnp.where(visible[:, :, None], keys, 0)
    scores = contract("thd,tkd->thk", q, keys)

    def values(weight: Float32[Array, "t h k"]) -> Float32[Array, "t h d"]:
        return contract("thk,tkd->thd", weight, keys)

    return _fold(state, scores, visible, values)


def _fold(
    state: Softmax,
    scores: Float32[Array, "t h n"],
    visible: Bool[Array, "t n"],
    values: Callable[[Float32[Array, "t h n"]], Float32[Array, "t h d"]],
) -> Softmax:
    """Online softmax: rescales the sums to the new peak and adds the new keys."""
    scores = scores * state.output.shape[-1] ** -0.5
    scores = jnp.where(visible[:, None, :], scores, -jnp.inf)
    peak = jnp.maximum(state.peak, jnp.max(scores, axis=-1))
    finite_peak = jnp.where(peak == -jnp.inf, 0.0, peak)
    shrink = jnp.exp(state.peak - finite_peak)
    weight = jnp.exp(scores - finite_peak[:, :, None])
    return Softmax(
        peak=peak,
        total=state.total * shrink + jnp.sum(weight, axis=-1),
        output=state.output * shrink[:, :, None] + values(weight),
    )


@typed
def finish(state: Softmax, sinks: Float[Array, " h"]) -> Float32[Array, "t h d"]:
    """Divides by the denominator, to which each head's sink adds exp(sink) and nothing else.

    A query that saw no key returns 0. A sink of -inf is no sink.
    """
    sinks = sinks.astype(jnp.float32)
    peak = jnp.maximum(state.peak, sinks)
    peak = jnp.where(peak == -jnp.inf, 0.0, peak)
    shrink = jnp.exp(state.peak - peak)
    total = state.total * shrink + jnp.exp(sinks - peak)
    return state.output * (shrink / jnp.where(total == 0.0, 1.0, total))[:, :, None]


@typed
def window_attention(
    q: Float[Array, "t h d"],
    window: Float[Array, "w d"],
    window_visible: Bool[Array, "t w"],
    sinks: Float[Array, " h"],
) -> Float32[Array, "t h d"]:
    """Attention of a window-only layer: [t, h, d] float32, still rotated (see `rope.rotate`, inverse).

    Args:
        q: queries after norm and RoPE.
        window: KV rows after norm and RoPE, both key and value.
        window_visible: query t sees rows t - W + 1 .. t (`window_visible`).
        sinks: one logit a head, added to the denominator only.
    """
    return finish(absorb(start(*q.shape), q, window, window_visible), sinks)


@typed
def csa_attention(
    q: Float[Array, "t h d"],
    window: Float[Array, "w d"],
    window_visible: Bool[Array, "t w"],
    entries: Float[Array, "n d"],
    selected: Int32[Array, "t k"],
    sinks: Float[Array, " h"],
) -> Float32[Array, "t h d"]:
    """Attention of a CSA layer: window rows and the selected entries under one softmax.

    Args:
        q, window, window_visible, sinks: as in `window_attention`.
        entries: compressed entries, both key and value.
        selected: ids into `entries` (`index.top_k_entries`); -1 is no entry and is never read.
    """
    state = absorb(start(*q.shape), q, window, window_visible)
    if entries.shape[0]:
        keys = entries[jnp.maximum(selected, 0)]
        state = absorb_selected(state, q, keys, selected >= 0)
    return finish(state, sinks)


@typed
def hca_attention(
    q: Float[Array, "t h d"],
    window: Float[Array, "w d"],
    window_visible: Bool[Array, "t w"],
    entries: Float[Array, "n d"],
    entries_visible: Bool[Array, "t n"],
    sinks: Float[Array, " h"],
    *,
    key_block: int = 32,
) -> Float32[Array, "t h d"]:
    """Attention of an HCA layer: window rows and all visible entries under one softmax.

    Args:
        q, window, window_visible, sinks: as in `window_attention`.
        entries, entries_visible: compressed entries and which query sees which.
        key_block: entries folded in at a time.
    """
    state = absorb(start(*q.shape), q, window, window_visible)
    for first in range(0, entries.shape[0], key_block):
        block = slice(first, first + key_block)
        state = absorb(state, q, entries[block], entries_visible[:, block])
    return finish(state, sinks)


@typed
def window_visible(
    query_positions: Int32[Array, " t"], key_positions: Int32[Array, " n"], window: int
) -> Bool[Array, "t n"]:
    """Query t sees positions t - window + 1 .. t; a negative key position is no key."""
    distance = query_positions[:, None] - key_positions[None, :]
    return (distance >= 0) & (distance < window) & (key_positions >= 0)
