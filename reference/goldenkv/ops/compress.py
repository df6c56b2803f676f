"""Compressors: m tokens become one entry. CSA with overlap, HCA without.

Report section 2.3.1, equations 9-12 (CSA), and section 2.3.2, equations 20-23 (HCA). A compressor row is
the raw pair (kv, score) of one token, float32: kv = x W_kv and score = x W_gate + position bias. An entry is
the sum of its rows' kv, weighted a channel by the softmax of their scores; RMSNorm and RoPE follow.
"""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int

from .linear import contract
from .norm import rms_norm
from .rope import rotate
from .typed import typed


@typed
def compressor_rows(
    x: Float[Array, "t i"],
    kv_weight: Float[Array, "i c"],
    gate_weight: Float[Array, "i c"],
    position_bias: Float32[Array, "m c"],
    positions: Int[Array, " t"],
) -> tuple[Float32[Array, "t c"], Float32[Array, "t c"]]:
    """The raw rows of tokens: (kv, score), equations 9-10 and 20-21, with the bias of 11 and 22, in float32.

    Args:
        x: normalised layer inputs.
        kv_weight, gate_weight: c = 2 d columns for CSA (first half for the next block, second for the own
            block), c = d for HCA.
        position_bias: added to the score by the position within the block, t mod m.
        positions: absolute positions from 0.
    """
    kv = contract("ti,ic->tc", x, kv_weight)
    gate = contract("ti,ic->tc", x, gate_weight)
    return kv, gate + position_bias[positions % position_bias.shape[0]]


@typed
def pool_rows(kv: Float32[Array, "n m d"], score: Float32[Array, "n m d"]) -> Float32[Array, "n d"]:
    """Sum over the m rows of a block of softmax(score) * kv, channel by channel (equations 11-12, 22-23).

    A row with score -inf has no weight; a block with no other rows gives 0.
    """
    peak = jnp.max(score, axis=1, keepdims=True)
    weight = jnp.exp(score - jnp.where(peak == -jnp.inf, 0.0, peak))
    total = jnp.sum(weight, axis=1)
    return jnp.sum(weight * kv, axis=1) / jnp.where(total == 0.0, 1.0, total)


@typed
def overlap_blocks(
    kv: Float32[Array, "n1 m c"], score: Float32[Array, "n1 m c"]
) -> tuple[Float32[Array, "n m2 d"], Float32[Array, "n m2 d"]]:
    """The 2 m rows that each CSA entry pools, from n + 1 consecutive blocks of raw rows.

    Entry w takes the m rows of block w - 1 through their first d = c / 2 channels, then the m rows of block w
    through their second d channels. The first block given is only the predecessor of the second; before
    block 0 stand rows with kv 0 and score -inf.
    """
    half = kv.shape[-1] // 2

    def join(rows: Float32[Array, "n1 m c"]) -> Float32[Array, "n m2 d"]:
        return jnp.concatenate([rows[:-1, :, :half], rows[1:, :, half:]], axis=1)

    return join(kv), join(score)


@typed
def finish_entries(
    pooled: Float32[Array, "n d"],
    norm_weight: Float[Array, " d"],
    positions: Int[Array, " n"],
    frequency: Float32[np.ndarray | Array, " half"],
    eps: float = 1e-6,
) -> Float32[Array, "n d"]:
    """RMSNorm, then RoPE at the position of each block's first token."""
    return rotate(rms_norm(pooled, norm_weight, eps), positions, frequency)


@typed
def compress(
    kv: Float32[Array, "t c"],
    score: Float32[Array, "t c"],
    norm_weight: Float[Array, " d"],
    frequency: Float32[np.ndarray | Array, " half"],
    *,
    compress_rate: int,
    overlap: bool,
    eps: float = 1e-6,
) -> Float32[Array, "n d"]:
    """All finished entries of a sequence that starts at position 0: n = t // compress_rate.

    Args:
        kv, score: from `compressor_rows`; c = 2 d with overlap (CSA), c = d without (HCA).
        norm_weight, frequency, eps: as in `finish_entries`.
        compress_rate: tokens a block.
        overlap: True for CSA, False for HCA.

    Raises:
        ValueError: the channels of `kv` do not fit `overlap`.
    """
    channels = norm_weight.shape[0] * (2 if overlap else 1)
    if kv.shape[1] != channels:
        raise ValueError(f"{kv.shape[1]=} must be {channels} for {overlap=} and d={norm_weight.shape[0]}")
    count = kv.shape[0] // compress_rate
    kv = kv[: count * compress_rate].reshape(count, compress_rate, channels)
    score = score[: count * compress_rate].reshape(count, compress_rate, channels)
    if overlap:
        before = (1, compress_rate, channels)
        kv = jnp.concatenate([jnp.zeros(before, kv.dtype), kv])
        score = jnp.concatenate([jnp.full(before, -jnp.inf, score.dtype), score])
        kv, score = overlap_blocks(kv, score)
    positions = jnp.arange(count, dtype=jnp.int32) * compress_rate
    return finish_entries(pool_rows(kv, score), norm_weight, positions, frequency, eps)


@typed
def visible_entries(positions: Int[Array, " t"], compress_rate: int) -> Int[Array, " t"]:
    """How many entries a query sees: entry w iff w < (position + 1) // compress_rate."""
    return (positions + 1) // compress_rate
