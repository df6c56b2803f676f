"""The forward pass of one tile: T consecutive positions from an absolute multiple of T.

Prefill, decode and replay all run this one program; a decode step is a tile with one live row. Rows that are
not live hold padding that no live row can see, and write nothing. Whatever grows with the context is a loop
over fixed blocks whose count depends on the tile's position alone. So the bits of a token depend on the
tokens before it and on nothing else.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from ..config import ModelConfig, Numerics
from ..ops import mhc, moe
from ..ops.linear import project
from ..ops.norm import rms_norm
from ..state.pool import Pool
from . import weights as w
from .attention import Buffers, Place, Selection, Tile, attention


class Probe(NamedTuple):
    """What a tile computed on the way, for comparison and drawing; one element a layer where a tuple.

    `index_q` and `index_weight` (queries and head weights of the indexer) and `selected` (entry ids, best
    first, -1 for none) are None for layers that are not CSA.
    """

    streams: tuple[Array, ...]
    selected: tuple[Array | None, ...]
    index_q: tuple[Array | None, ...]
    index_weight: tuple[Array | None, ...]


@partial(
    jax.jit,
    static_argnames=("structure", "config", "numerics", "aligned", "probe"),
    donate_argnames="pool",
)
def run_tile(
    leaves: tuple[Array, ...],
    pool: Pool,
    tokens: Int32[Array, " t"],
    begin: Int32[Array, ""],
    end: Int32[Array, ""],
    slot: Int32[Array, ""],
    table: Int32[Array, " max"],
    *,
    structure: jax.tree_util.PyTreeDef,
    config: ModelConfig,
    numerics: Numerics,
    aligned: bool = True,
    probe: bool = False,
) -> tuple[Pool, Float[Array, "t v"], Probe | None]:
    """Runs the tile that holds positions begin .. end - 1.

    Args:
        leaves, structure: the model, from `jax.tree.flatten`.
        pool: device state, donated.
        tokens: the tile's T token ids; ids of rows that are not live are not used.
        begin, end: live positions, within one tile.
        slot, table: what the sequence owns in the pool.
        aligned: False starts the tile at `begin` instead of a multiple of T: what most engines do, kept as
            the control that must fail.
        probe: also return intermediate values.

    Returns:
        The new pool, float32 logits [T, vocabulary] (meaningful for live rows only), and the probe or None.
    """
    model: w.Model = jax.tree.unflatten(structure, leaves)
    rows = tokens.shape[0]
    first = begin // rows * rows if aligned else begin
    positions = first + jnp.arange(rows, dtype=jnp.int32)
    live = (positions >= begin) & (positions < end)
    tile = Tile(slot, table, first, begin, end, positions, live, aligned)

    hidden = model.embed[...][jnp.where(live, tokens, 0)]
    streams = jnp.repeat(hidden[:, None, :], config.hc_mult, axis=1)
    new_pool, seen_streams, selections = [], [], []
    for number, (layer, buffers) in enumerate(zip(model.layers, pool, strict=True)):
        at = Place(tile, config, numerics, number)
        streams, buffers, selection = _layer(layer, streams, buffers, tokens, at)
        new_pool.append(buffers)
        seen_streams.append(streams)
        selections.append(selection)
    logits = _head(model, streams, config)
    seen = None
    if probe:
        parts = zip(*(s or (None, None, None) for s in selections), strict=True)
        seen = Probe(tuple(seen_streams), *parts)
    return tuple(new_pool), logits, seen


def _layer(
    layer: w.Layer, streams: Float[Array, "t s d"], buffers: Buffers, tokens: Int32[Array, " t"], at: Place
) -> tuple[Float[Array, "t s d"], Buffers, Selection | None]:
    """Attention, then MoE, each reading and writing the residual streams through mHC."""
    eps = at.config.rms_norm_eps
    pre, post, comb = _mixing(layer.attention_mixing, streams, at.config)
    x = rms_norm(mhc.collapse(streams, pre), layer.attention_norm[...], eps)
    output, buffers, selection = attention(layer.attention, x, buffers, at)
    streams = mhc.expand(streams, output, post, comb)

    pre, post, comb = _mixing(layer.moe_mixing, streams, at.config)
    x = rms_norm(mhc.collapse(streams, pre), layer.moe_norm[...], eps)
    return mhc.expand(streams, _moe(layer.moe, x, tokens, at), post, comb), buffers, selection


def _mixing(
    mixing: w.StreamMixing, streams: Float[Array, "t s d"], config: ModelConfig
) -> tuple[Array, Array, Array]:
    return mhc.stream_mixing(
        streams,
        mixing.weight[...],
        mixing.base[...],
        mixing.scale[...],
        iterations=config.hc_sinkhorn_iters,
        eps=config.hc_eps,
        norm_eps=config.rms_norm_eps,
    )


def _moe(m: w.Moe, x: Float[Array, "t i"], tokens: Int32[Array, " t"], at: Place) -> Float[Array, "t i"]:
    """Routed experts plus the shared expert."""
    config = at.config
    scores = moe.router_scores(x, m.router[...])
    if m.table is not None:
        chosen = moe.hash_routing(jnp.where(at.tile.live, tokens, 0), m.table[...])
    else:
        assert m.bias is not None
        chosen = moe.learned_routing(scores, m.bias[...], config.num_experts_per_tok)
    scale, normalise = config.routed_scaling_factor, config.norm_topk_prob
    weights = moe.routing_weights(scores, chosen, scale, normalise=normalise)
    weights = jnp.where(at.tile.live[:, None], weights, 0.0)  # no expert runs for padding alone
    routed = moe.experts(x, weights, m.gate[...], m.up[...], m.down[...], config.swiglu_limit)
    shared = (m.shared_gate[...], m.shared_up[...], m.shared_down[...])
    ones = jnp.ones(len(x), jnp.float32)
    return (routed + moe.expert(x, ones, *shared, config.swiglu_limit)).astype(x.dtype)


def _head(model: w.Model, streams: Float[Array, "t s d"], config: ModelConfig) -> Float[Array, "t v"]:
    """Logits in float32."""
    head, eps = model.head_mixing, config.rms_norm_eps
    row = mhc.head_collapse(
        streams, head.weight[...], head.base[...], head.scale[...], eps=config.hc_eps, norm_eps=eps
    )
    return project(rms_norm(row.astype(jnp.float32), model.norm[...], eps), model.head[...])
