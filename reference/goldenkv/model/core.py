"""The parts of attention that a kernel can stand for, over paged entries; and the reference for them.

A package of kernels offers another `Core` under the entry point group "goldenkv.implementations"; the engine
takes it by name (`Numerics.implementation`). The reference needs and names none. Bits of one implementation
are not those of another, so the name is part of every fingerprint.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Protocol

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int32

from ..config import Numerics
from ..ops import attend, compress, index
from ..state import pool as pools
from ..state.page_moves import PageMoves, XlaMoves

GROUP = "goldenkv.implementations"
REFERENCE = "xla"


class Core(PageMoves, Protocol):
    """What an attention layer asks for, and what moves pages.

    One sequence, t queries; all rows are after norm and RoPE.
    Entries are read through a page table: entry e is row e % r of page table[e // r], r rows a page. `seen`
    is how many entries the last query of the tile could see at most, `written` how many there are.
    """

    def window_attention(
        self,
        q: Float[Array, "t h d"],
        window: Float[Array, "w d"],
        visible: Bool[Array, "t w"],
        sinks: Float[Array, " h"],
    ) -> Float32[Array, "t h d"]:
        """`ops.attend.window_attention`."""

    def sparse_attention(
        self,
        q: Float[Array, "t h d"],
        window: Float[Array, "w d"],
        visible: Bool[Array, "t w"],
        pages: Float[Array, "pages r d"],
        table: Int32[Array, " max"],
        ids: Int32[Array, "t k"],
        sinks: Float[Array, " h"],
    ) -> Float32[Array, "t h d"]:
        """`ops.attend.csa_attention`; an id of -1 is no entry."""

    def dense_attention(
        self,
        q: Float[Array, "t h d"],
        window: Float[Array, "w d"],
        visible: Bool[Array, "t w"],
        pages: Float[Array, "pages r d"],
        table: Int32[Array, " max"],
        counts: Int32[Array, " t"],
        sinks: Float[Array, " h"],
        *,
        seen: Int32[Array, ""],
        written: Int32[Array, ""],
    ) -> Float32[Array, "t h d"]:
        """`ops.attend.hca_attention`; query t sees entries 0 .. counts[t] - 1."""

    def select(
        self,
        q: Float[Array, "t h d"],
        pages: Float[Array, "pages r d"],
        table: Int32[Array, " max"],
        weight: Float32[Array, "t h"],
        counts: Int32[Array, " t"],
        top_k: int,
        *,
        seen: Int32[Array, ""],
        written: Int32[Array, ""],
    ) -> Int32[Array, "t k"]:
        """`ops.index.index_scores`, then its `top_k_entries` among entries 0 .. counts[t] - 1."""

    def entries(
        self,
        kv: Float32[Array, "n m c"],
        score: Float32[Array, "n m c"],
        norm: Float[Array, " d"],
        positions: Int32[Array, " e"],
        frequency: np.ndarray,
        *,
        overlap: bool,
        eps: float,
    ) -> Float32[Array, "e d"]:
        """`ops.compress`: pooled, normalised, rotated. With overlap the first block is only a predecessor."""


@dataclass(frozen=True, slots=True)
class Reference(XlaMoves):
    """The reference: loops over fixed blocks in a fixed order."""

    numerics: Numerics

    def window_attention(self, q: Array, window: Array, visible: Array, sinks: Array) -> Array:
        return attend.finish(self._window(q, window, visible), sinks)

    def sparse_attention(
        self, q: Array, window: Array, visible: Array, pages: Array, table: Array, ids: Array, sinks: Array
    ) -> Array:
        state, chosen = self._window(q, window, visible), ids >= 0
        entries = pools.read_entries(pages, table, ids, chosen)
        return attend.finish(attend.absorb_selected(state, q, entries, chosen), sinks)

    def dense_attention(
        self,
        q: Array,
        window: Array,
        visible: Array,
        pages: Array,
        table: Array,
        counts: Array,
        sinks: Array,
        *,
        seen: Array,
        written: Array,
    ) -> Array:
        block = self.numerics.key_block

        def step(i: Array, state: attend.Softmax) -> attend.Softmax:
            ids = i * block + jnp.arange(block, dtype=jnp.int32)
            entries = pools.read_entries(pages, table, ids, ids < written)
            return attend.absorb(state, q, entries, ids[None, :] < counts[:, None])

        blocks = (seen + block - 1) // block
        return attend.finish(lax.fori_loop(0, blocks, step, self._window(q, window, visible)), sinks)

    def select(
        self,
        q: Array,
        pages: Array,
        table: Array,
        weight: Array,
        counts: Array,
        top_k: int,
        *,
        seen: Array,
        written: Array,
    ) -> Array:
        block = self.numerics.index_block

        def step(i: Array, best: tuple[Array, Array]) -> tuple[Array, Array]:
            ids = i * block + jnp.arange(block, dtype=jnp.int32)
            keys = pools.read_entries(pages, table, ids, ids < written)
            scores = index.index_scores(q, keys, weight)
            return index.merge_top_k(best, scores, ids, ids[None, :] < counts[:, None])

        blocks = (seen + block - 1) // block
        return lax.fori_loop(0, blocks, step, index.no_selection(len(q), top_k))[1]

    def entries(
        self,
        kv: Array,
        score: Array,
        norm: Array,
        positions: Array,
        frequency: np.ndarray,
        *,
        overlap: bool,
        eps: float,
    ) -> Array:
        pooled = compress.pool_rows(*(compress.overlap_blocks(kv, score) if overlap else (kv, score)))
        return compress.finish_entries(pooled, norm, positions, frequency, eps)

    def _window(self, q: Array, window: Array, visible: Array) -> attend.Softmax:
        return attend.absorb(attend.start(*q.shape), q, window, visible)


@functools.cache
def core_of(numerics: Numerics) -> Core:
    """The implementation that a numerics names.

    Raises:
        ValueError: nothing that is installed offers it.
    """
    if numerics.implementation == REFERENCE:
        return Reference(numerics)
    offered = {point.name: point for point in entry_points(group=GROUP)}
    if numerics.implementation not in offered:
        known = ", ".join([repr(REFERENCE), *(repr(name) for name in sorted(offered))])
        raise ValueError(f"implementation={numerics.implementation!r} is not installed; there is {known}")
    return offered[numerics.implementation].load()(numerics)
