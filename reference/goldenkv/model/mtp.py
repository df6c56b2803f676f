"""The MTP layer: predicts the token after the next, so it can draft (report section 2.1, published code).

Its row for token i is made of the streams that the main layers left at i and of the id of token i + 1; its
logits predict token i + 2. So it runs one token behind: `follow` brings it up with every tile, from exact
streams alone. `draft` guesses tokens from there and writes nothing: a rejected guess leaves no trace in it.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

from ..config import ModelConfig, Numerics
from ..ops.linear import project
from ..ops.norm import rms_norm
from ..state import pool as pools
from . import weights as w
from .attention import Buffers, Place, Tile
from .layer import output_logits, run_layer


def follow(
    model: w.Model, streams: Float[Array, "t s d"], buffers: Buffers, tokens: Int32[Array, " t"], at: Place
) -> tuple[Buffers, Float[Array, "t v"]]:
    """Adds the MTP rows that a tile completes: for its live tokens t those of t - 1.

    Args:
        model: its `mtp` is not None.
        streams: what the main layers left for the tile's tokens.
        buffers: device state of the MTP layer.
        tokens: the tile's token ids.
        at: the MTP layer, met with the tile of the main layers.

    Returns:
        The new buffers, and float32 logits: row t predicts token t + 1. Row 0 of a sequence means nothing.
    """
    tile, buffers = at.tile, dict(buffers)
    flat = streams.reshape(len(streams), -1)
    ring = pools.write_ring(buffers["streams"], tile.slot, tile.positions, tile.live, flat)
    before = tile.positions - 1
    has_one = (before >= tile.since) & tile.live
    # All of them through the ring, so that a row of an earlier tile and one of this tile are the same bits.
    flat = pools.read_ring(ring, tile.slot, before, has_one)
    first, begin, end = tile.first - 1, tile.begin - 1, tile.end - 1
    behind = tile._replace(first=first, begin=begin, end=end, positions=before, live=has_one)
    at = Place(behind, at.config, at.numerics, at.layer)
    streams, buffers = _layer(model, flat.reshape(streams.shape), buffers, jnp.where(has_one, tokens, 0), at)
    buffers["streams"] = ring
    return buffers, _logits(model, streams, at.config)


@partial(jax.jit, static_argnames=("structure", "config", "numerics", "most"))
def draft(
    leaves: tuple[Array, ...],
    buffers: Buffers,
    token: Int32[Array, ""],
    length: Int32[Array, ""],
    slot: Int32[Array, ""],
    count: Int32[Array, ""],
    *,
    structure: jax.tree_util.PyTreeDef,
    config: ModelConfig,
    numerics: Numerics,
    most: int,
) -> Int32[Array, " most"]:
    """Guesses the `count` tokens that follow `token`, each the greedy choice of the MTP layer.

    The first guess follows from exact streams. For the others the layer's own output stands in for the
    streams that the main layers have not computed yet.

    Args:
        leaves, structure: the model, from `jax.tree.flatten`; it has an MTP layer.
        buffers: device state of the MTP layer; not changed.
        token: the next token, not yet in the sequence.
        length: tokens of the sequence, at least 1.
        slot: what the sequence owns in the rings.
        count: guesses, at most `most`.

    Returns:
        [most] token ids, meaningful up to `count`.
    """
    model: w.Model = jax.tree.unflatten(structure, leaves)
    own = {name: ring[slot][None] for name, ring in buffers.items()}
    zero, table = jnp.int32(0), jnp.zeros(1, jnp.int32)
    last = pools.read_ring(own["streams"], zero, length[None] - 1, jnp.ones(1, bool))
    streams = last.reshape(1, config.hc_mult, config.hidden_size)

    def step(k: Array, carry: tuple[Array, Array, Buffers, Array]) -> tuple[Array, Array, Buffers, Array]:
        guesses, token, own, streams = carry
        row = length - 1 + k
        tile = Tile(zero, table, row, row, row + 1, row[None], jnp.ones(1, bool), zero, zero, aligned=True)
        at = Place(tile, config, numerics, config.num_hidden_layers)
        streams, own = _layer(model, streams, own, token[None], at)
        token = jnp.argmax(_logits(model, streams, config)[0]).astype(jnp.int32)
        return guesses.at[k].set(token), token, own, streams

    start = (jnp.zeros(most, jnp.int32), token, own, streams)
    return lax.fori_loop(0, count, step, start)[0]


def _layer(
    model: w.Model, streams: Float[Array, "t s d"], buffers: Buffers, tokens: Int32[Array, " t"], at: Place
) -> tuple[Float[Array, "t s d"], Buffers]:
    """The layer over rows made of streams and of the ids of the tokens after them."""
    mtp, eps = model.mtp, at.config.rms_norm_eps
    assert mtp is not None
    token = project(rms_norm(model.embed[...][tokens], mtp.embed_norm[...], eps), mtp.embed_proj[...])
    hidden = project(rms_norm(streams, mtp.streams_norm[...], eps), mtp.streams_proj[...])
    streams, buffers, _ = run_layer(mtp.layer, token[:, None, :] + hidden, buffers, tokens, at)
    return streams, buffers


def _logits(model: w.Model, streams: Float[Array, "t s d"], config: ModelConfig) -> Float[Array, "t v"]:
    assert model.mtp is not None
    return output_logits(model.mtp.head_mixing, model.mtp.norm[...], model.head[...], streams, config)
