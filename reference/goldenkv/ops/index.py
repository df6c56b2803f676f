"""The lightning indexer: which compressed entries a CSA query attends to.

Report section 2.3.1, equations 13-17.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int32

from .linear import contract
from .typed import typed


@typed
def index_scores(
    q: Float[Array, "t h d"], keys: Float[Array, "n d"], head_weight: Float32[Array, "t h"]
) -> Float32[Array, "t n"]:
    """Equation 16: score[t, n] = sum over heads of head_weight[t, h] * ReLU(q[t, h] . keys[n]), float32.

    Args:
        q: index queries after RoPE and the Hadamard transform.
        keys: index keys, one an entry. A row that no query may see must be finite.
        head_weight: x W_w * d^-1/2 * h^-1/2.

    Returns:
        Scores with -0 replaced by +0, so that ties do not depend on a sign of zero.
    """
    dots = contract("thd,nd->thn", q, keys)
    score = jnp.sum(jnp.maximum(dots, 0.0) * head_weight[:, :, None], axis=1)
    return jnp.where(score == 0.0, 0.0, score)


@typed
def no_selection(rows: int, top_k: int) -> tuple[Float32[Array, "rows k"], Int32[Array, "rows k"]]:
    """An empty selection to start `merge_top_k` from: scores -inf, ids -1."""
    return jnp.full((rows, top_k), -jnp.inf, jnp.float32), jnp.full((rows, top_k), -1, jnp.int32)


@typed
def merge_top_k(
    best: tuple[Float32[Array, "t k"], Int32[Array, "t k"]],
    scores: Float32[Array, "t n"],
    ids: Int32[Array, " n"],
    visible: Bool[Array, "t n"],
) -> tuple[Float32[Array, "t k"], Int32[Array, "t k"]]:
    """The k best of a running selection and n further candidates with higher ids (equation 17).

    Ties go to the lowest id; NaN and invisible candidates are never chosen; where fewer than k candidates
    are visible the rest is -1. The choice depends on the candidates alone, not on how they were split.

    Args:
        best: (scores, ids) so far, from `no_selection` or an earlier call.
        scores, ids, visible: the candidates; ids ascend and are above all ids in `best`.

    Returns:
        (scores, ids), best first.
    """
    usable = visible & (scores > -jnp.inf)  # a comparison with NaN is false
    candidates = jnp.concatenate([best[0], jnp.where(usable, scores, -jnp.inf)], axis=1)
    all_ids = jnp.concatenate([best[1], jnp.where(usable, ids, -1)], axis=1)
    values, order = lax.top_k(candidates, best[0].shape[1])
    return values, jnp.take_along_axis(all_ids, order, axis=1)


@typed
def top_k_entries(
    scores: Float32[Array, "t n"], visible: Bool[Array, "t n"], top_k: int
) -> Int32[Array, "t {top_k}"]:
    """The ids of the `top_k` best visible entries a query, best first, -1 where there are fewer."""
    start = no_selection(scores.shape[0], top_k)
    ids = jnp.arange(scores.shape[1], dtype=jnp.int32)
    return merge_top_k(start, scores, ids, visible)[1]
