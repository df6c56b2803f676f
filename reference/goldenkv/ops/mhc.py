"""Manifold-constrained hyper-connections (mHC): several residual streams, mixed before and after each block.

Report section 2.2. Everything is a function of one token; nothing is cached. Float32.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

from .linear import contract
from .norm import rms_norm
from .typed import typed


@typed
def stream_mixing(
    streams: Float[Array, "t s d"],
    weight: Float[Array, "sd c"],
    base: Float32[Array, " c"],
    scale: Float32[Array, " 3"],
    *,
    iterations: int,
    eps: float,
    norm_eps: float,
) -> tuple[Float32[Array, "t s"], Float32[Array, "t s"], Float32[Array, "t s s"]]:
    """How a block reads and writes the s streams: (pre, post, comb).

    Args:
        streams: the residual streams of each token.
        weight: s * d inputs, c = s + s + s * s outputs, in the order pre, post, comb.
        base: added to the outputs.
        scale: one factor each for pre, post and comb.
        iterations: of Sinkhorn normalisation; the first normalises columns only.
        eps: added to sigmoid, softmax and each normaliser.
        norm_eps: of the RMSNorm without a weight over all s * d channels.

    Returns:
        pre: sigmoid + eps, the weight of each stream in the block's input.
        post: 2 sigmoid, how much of the block's output each stream takes.
        comb: doubly stochastic up to `eps`; stream j receives sum over i of comb[i, j] * stream i.
    """
    rows, count, _ = streams.shape
    flat = rms_norm(streams.astype(jnp.float32).reshape(rows, -1), eps=norm_eps)
    mixes = contract("ti,io->to", flat, weight)
    pre = jax.nn.sigmoid(mixes[:, :count] * scale[0] + base[:count]) + eps
    post = 2.0 * jax.nn.sigmoid(mixes[:, count : 2 * count] * scale[1] + base[count : 2 * count])
    comb = (mixes[:, 2 * count :] * scale[2] + base[2 * count :]).reshape(rows, count, count)
    return pre, post, sinkhorn(jax.nn.softmax(comb, axis=-1) + eps, iterations=iterations, eps=eps)


@typed
def sinkhorn(matrix: Float32[Array, "t s s"], *, iterations: int, eps: float) -> Float32[Array, "t s s"]:
    """Sinkhorn-Knopp: normalises columns, then `iterations` - 1 times rows and columns."""

    def normalise(m: Array, axis: int) -> Array:
        return m / (jnp.sum(m, axis=axis, keepdims=True) + eps)

    def rows_then_columns(_: int, m: Array) -> Array:
        return normalise(normalise(m, -1), -2)

    return jax.lax.fori_loop(0, iterations - 1, rows_then_columns, normalise(matrix, -2))


@typed
def collapse(streams: Float[Array, "t s d"], pre: Float32[Array, "t s"]) -> Float[Array, "t d"]:
    """The block's input: sum over streams of pre * stream."""
    return jnp.sum(pre[:, :, None] * streams.astype(jnp.float32), axis=1).astype(streams.dtype)


@typed
def expand(
    streams: Float[Array, "t s d"],
    output: Float[Array, "t d"],
    post: Float32[Array, "t s"],
    comb: Float32[Array, "t s s"],
) -> Float[Array, "t s d"]:
    """The new streams: post * output + comb^T streams."""
    wide = streams.astype(jnp.float32)
    mixed = post[:, :, None] * output.astype(jnp.float32)[:, None, :]
    for i in range(streams.shape[1]):  # a few terms: written out they compile to one pass over the streams
        mixed = mixed + comb[:, i, :, None] * wide[:, i, None, :]
    return mixed.astype(streams.dtype)


@typed
def head_collapse(
    streams: Float[Array, "t s d"],
    weight: Float[Array, "sd s"],
    base: Float32[Array, " s"],
    scale: Float32[Array, " 1"],
    *,
    eps: float,
    norm_eps: float,
) -> Float[Array, "t d"]:
    """The model's output row: streams weighted by sigmoid + eps of their own projection."""
    flat = rms_norm(streams.astype(jnp.float32).reshape(streams.shape[0], -1), eps=norm_eps)
    mixes = contract("ti,io->to", flat, weight)
    return collapse(streams, jax.nn.sigmoid(mixes * scale + base) + eps)
