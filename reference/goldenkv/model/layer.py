"""One transformer layer over one tile, and the output head."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from ..config import ModelConfig
from ..ops import mhc, moe
from ..ops.linear import project
from ..ops.norm import rms_norm
from . import weights as w
from .attention import Buffers, Place, Selection, attention


def run_layer(
    layer: w.Layer, streams: Float[Array, "t s d"], buffers: Buffers, tokens: Int32[Array, " t"], at: Place
) -> tuple[Float[Array, "t s d"], Buffers, Selection | None]:
    """Attention, then MoE, each reading and writing the residual streams through mHC."""
    eps = at.config.rms_norm_eps
    pre, post, comb = mixing_of(layer.attention_mixing, streams, at.config)
    x = rms_norm(mhc.collapse(streams, pre), layer.attention_norm[...], eps)
    output, buffers, selection = attention(layer.attention, x, buffers, at)
    streams = mhc.expand(streams, output, post, comb)

    pre, post, comb = mixing_of(layer.moe_mixing, streams, at.config)
    x = rms_norm(mhc.collapse(streams, pre), layer.moe_norm[...], eps)
    return mhc.expand(streams, _moe(layer.moe, x, tokens, at), post, comb), buffers, selection


def mixing_of(
    mixing: w.StreamMixing, streams: Float[Array, "t s d"], config: ModelConfig
) -> tuple[Array, Array, Array]:
    """`ops.mhc.stream_mixing` with the weights of a block: how it reads and writes the streams."""
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


def output_logits(
    mixing: w.HeadMixing,
    norm: Float[Array, " d"],
    head: Float[Array, "d v"],
    streams: Float[Array, "t s d"],
    config: ModelConfig,
) -> Float[Array, "t v"]:
    """Collapses the streams, normalises, and projects to the vocabulary: float32 logits."""
    eps = config.rms_norm_eps
    row = mhc.head_collapse(
        streams, mixing.weight[...], mixing.base[...], mixing.scale[...], eps=config.hc_eps, norm_eps=eps
    )
    return project(rms_norm(row.astype(jnp.float32), norm, eps), head)
