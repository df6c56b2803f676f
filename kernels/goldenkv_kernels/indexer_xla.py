"""The indexer over pages in plain XLA: the op itself, a sequence after the other, by blocks of keys."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int32

from goldenkv.ops import index
from goldenkv.state.pool import read_entries

from .blocks import blocks


def index_scores(
    q: Float[Array, "b t h d"],
    pages: Float[Array, "pages rows d"],
    table: Int32[Array, "b max"],
    weight: Float32[Array, "b t h"],
    counts: Int32[Array, "b t"],
    *,
    key_block: int,
) -> Float32[Array, "b t n"]:
    """`indexer.index_scores` on arguments that it has checked.

    Blocks that no query of a sequence sees are skipped. The t queries of a sequence go through one product,
    so, as in the reference, bits hold for one t.
    """
    tokens, rows = q.shape[1], pages.shape[1]
    count = table.shape[1] * rows
    if not q.size or not count or not pages.shape[0]:
        return jnp.full((*q.shape[:2], count), -jnp.inf, jnp.float32)
    padded = blocks(count, key_block) * key_block

    def score_sequence(arguments: tuple[Array, ...]) -> Float32[Array, "t n"]:
        q, table, weight, counts = arguments

        def step(i: Array, scores: Array) -> Array:
            ids = i * key_block + jnp.arange(key_block, dtype=jnp.int32)
            exists = _exists(table, ids, count, rows, pages.shape[0])
            keys = read_entries(pages, table, ids, exists & (ids < jnp.max(counts)))
            found = index.index_scores(q, keys, weight)
            found = jnp.where(exists & (ids < counts[:, None]), found, -jnp.inf)
            return lax.dynamic_update_slice(scores, found, (0, i * key_block))

        most = jnp.minimum(jnp.max(counts), count)
        scores = jnp.full((tokens, padded), -jnp.inf, jnp.float32)
        return lax.fori_loop(0, (most + key_block - 1) // key_block, step, scores)[:, :count]

    return lax.map(score_sequence, (q, table, weight, counts))


def _exists(table: Array, ids: Array, count: int, rows: int, pages: int) -> Bool[Array, " n"]:
    """Which entries the table has a page for."""
    inside = ids < count
    page = table[jnp.where(inside, ids, 0) // rows]
    return inside & (page >= 0) & (page < pages)
