"""What the engine of the reference calls when its numerics say `implementation="pallas"`.

It finds this class by its entry point, see `goldenkv.model.core`, and calls it for one sequence at a time. On
a machine without a GPU the kernels are interpreted: right, and slow.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import Array

from goldenkv.config import Numerics

from .attention import dense_attention, sparse_attention
from .compressor import compress_blocks
from .indexer import select
from .paging import gather_pages, scatter_pages


class Pallas:
    """A `goldenkv.model.core.Core` of kernels. Their block sizes do not depend on the context."""

    def __init__(self, numerics: Numerics) -> None:
        """For any numerics: the kernels' block sizes are their own defaults."""

    def gather_pages(self, buffer: Array, pages: Array) -> Array:
        """See `PageMoves`."""
        return gather_pages(buffer, pages)

    def scatter_pages(self, buffer: Array, pages: Array, rows: Array) -> Array:
        """See `PageMoves`."""
        return scatter_pages(buffer, pages, rows)

    def window_attention(self, q: Array, window: Array, visible: Array, sinks: Array) -> Array:
        """See `Core`. There are no entries: of a pool of one page none is selected."""
        pages = jnp.zeros((1, 1, q.shape[-1]), q.dtype)
        table, ids = jnp.zeros(1, jnp.int32), jnp.zeros((len(q), 0), jnp.int32)
        return self.sparse_attention(q, window, visible, pages, table, ids, sinks)

    def sparse_attention(
        self, q: Array, window: Array, visible: Array, pages: Array, table: Array, ids: Array, sinks: Array
    ) -> Array:
        """See `Core`."""
        batched = [array[None] for array in (q, window, visible)]
        return sparse_attention(*batched, pages, table[None], ids[None], sinks)[0]

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
        """See `Core`."""
        batched = [array[None] for array in (q, window, visible)]
        return dense_attention(*batched, pages, table[None], counts[None], sinks)[0]

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
        """See `Core`."""
        return select(q[None], pages, table[None], weight[None], counts[None], top_k=top_k)[0]

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
        """See `Core`. A position for every block is asked for, of which that of a predecessor is not used."""
        if overlap:
            positions = jnp.concatenate([positions[:1], positions])
        return compress_blocks(
            kv, score, norm.astype(jnp.float32), positions, jnp.asarray(frequency), overlap=overlap, eps=eps
        )
