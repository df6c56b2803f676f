"""Mixture of experts: hash and learned routing, and the SwiGLU experts.

Report section 2.1 ("designs inherited from DeepSeek-V3", with sqrt(softplus) scores and hash routing in the
first layers). An expert runs over the rows that chose it, in blocks of one shape; what else fills a block
has weight 0. Row by row it is the same arithmetic, whatever the other rows chose.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

from .linear import contract, project
from .typed import typed


@typed
def router_scores(x: Float[Array, "t i"], weight: Float[Array, "i e"]) -> Float32[Array, "t e"]:
    """sqrt(softplus(x W)), float32."""
    return jnp.sqrt(jax.nn.softplus(project(x.astype(jnp.float32), weight)))


@typed
def learned_routing(
    scores: Float32[Array, "t e"], bias: Float32[Array, " e"], top_k: int
) -> Int32[Array, "t {top_k}"]:
    """The `top_k` experts with the highest score + bias; ties go to the lowest index."""
    return jax.lax.top_k(scores + bias, top_k)[1].astype(jnp.int32)


@typed
def hash_routing(tokens: Int32[Array, " t"], table: Int32[Array, "v k"]) -> Int32[Array, "t k"]:
    """The experts that a fixed table gives each token id."""
    return table[tokens]


@typed
def routing_weights(
    scores: Float32[Array, "t e"], experts: Int32[Array, "t k"], scale: float, *, normalise: bool = True
) -> Float32[Array, "t e"]:
    """Weight of every expert a row: score / sum of the chosen scores * scale, 0 for experts not chosen.

    The router's bias chooses experts but does not weigh them.
    """
    chosen = jnp.take_along_axis(scores, experts, axis=1)
    if normalise:
        chosen = chosen / (jnp.sum(chosen, axis=1, keepdims=True) + 1e-20)
    is_chosen = experts[:, :, None] == jnp.arange(scores.shape[1])
    return jnp.sum(jnp.where(is_chosen, (chosen * scale)[:, :, None], 0.0), axis=1)


@typed
def experts(
    x: Float[Array, "t i"],
    weights: Float32[Array, "t e"],
    gate: Float[Array, "e i f"],
    up: Float[Array, "e i f"],
    down: Float[Array, "e f i"],
    limit: float,
    *,
    row_block: int = 8,
) -> Float32[Array, "t i"]:
    """Sum over experts e of down_e(weights[t, e] * silu(min(g, limit)) * clip(u, -limit, limit)).

    Experts are added in order, each over the rows that chose it, `row_block` rows at a time. Every product
    has that one shape, so a row's bits depend neither on the rows in its block nor on how many there are.

    Args:
        x: normalised layer inputs.
        weights: from `routing_weights`, 0 for experts not chosen.
        gate, up, down: expert matrices, i hidden and f intermediate channels.
        limit: clamp of the gate (above) and of the linear part (both sides).
        row_block: rows computed at a time.
    """
    count, size = len(x), min(row_block, len(x))
    x, weights = (jnp.pad(a, ((0, -count % size), (0, 0))) for a in (x, weights))  # to whole blocks
    chosen = weights != 0.0
    blocks = (jnp.count_nonzero(chosen, axis=0) + size - 1) // size
    rows_first = jnp.argsort(~chosen, axis=0)  # for each expert the rows that chose it, then the others

    def add_expert(e: Array, total: Array) -> Array:
        matrices = gate[e], up[e], down[e]

        def add_block(b: Array, total: Array) -> Array:
            rows = jax.lax.dynamic_slice(rows_first, (b * size, e), (size, 1))[:, 0]
            return total.at[rows].add(
                expert(x[rows], weights[rows, e], *matrices, limit), unique_indices=True
            )

        return jax.lax.fori_loop(0, blocks[e], add_block, total)

    def step(e: Array, total: Array) -> Array:
        return jax.lax.cond(blocks[e] > 0, add_expert, lambda _, total: total, e, total)

    return jax.lax.fori_loop(0, gate.shape[0], step, jnp.zeros(x.shape, jnp.float32))[:count]


@typed
def expert(
    x: Float[Array, "t i"],
    weight: Float32[Array, " t"],
    gate: Float[Array, "i f"],
    up: Float[Array, "i f"],
    down: Float[Array, "f i"],
    limit: float,
) -> Float32[Array, "t i"]:
    """One SwiGLU expert, its routing weight applied before `down`; ones for the shared expert."""
    g = jnp.minimum(contract("ti,if->tf", x, gate), limit)
    u = jnp.clip(contract("ti,if->tf", x, up), -limit, limit)
    h = jax.nn.silu(g) * u * weight[:, None]
    return contract("tf,fi->ti", h.astype(x.dtype), down)
