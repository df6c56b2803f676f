"""The compressor in plain XLA: the ops themselves, an entry after the other, so bits hold for any number."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int32

from goldenkv.ops import compress, quant


class Finish(NamedTuple):
    """What becomes of a pooled block, see `compressor.compress_blocks`."""

    eps: float
    quantise: str | None
    dtype: str


def compress_blocks(
    kv: Float32[Array, "n m c"],
    score: Float32[Array, "n m c"],
    norm_weight: Float[Array, " d"],
    positions: Int32[Array, " n"],
    frequency: Float32[Array, " half"],
    *,
    overlap: bool,
    finish: Finish,
) -> Float32[Array, "entries d"]:
    """`compressor.compress_blocks` on arguments that it has checked."""
    first = 1 if overlap else 0
    plain = norm_weight.shape[0] - 2 * frequency.shape[0]

    def entry(i: Array) -> Float32[Array, " d"]:
        rows = [lax.dynamic_slice_in_dim(array, i, 1 + first) for array in (kv, score)]
        values, scores = compress.overlap_blocks(*rows) if overlap else rows
        pooled = compress.pool_rows(jnp.where(scores == -jnp.inf, 0.0, values), scores)
        at = lax.dynamic_slice_in_dim(positions, i + first, 1)
        row = compress.finish_entries(pooled, norm_weight, at, frequency, finish.eps).astype(finish.dtype)
        if finish.quantise == "e4m3":
            row = jnp.concatenate([quant.fake_quantise_e4m3(row[:, :plain]), row[:, plain:]], axis=1)
        if finish.quantise == "hadamard_e2m1":
            row = quant.fake_quantise_e2m1(quant.hadamard(row))
        return row[0].astype(jnp.float32)

    return lax.map(entry, jnp.arange(kv.shape[0] - first, dtype=jnp.int32))
