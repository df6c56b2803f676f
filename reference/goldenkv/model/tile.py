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
from ..state.pool import Pool
from . import mtp
from . import weights as w
from .attention import Place, Tile
from .layer import output_logits, run_layer


class Probe(NamedTuple):
    """What a tile computed on the way, for comparison and drawing; one element a main layer where a tuple.

    `draft_logits` are those of the MTP layer, which is one token behind: row t follows from the streams of
    token t - 1 and the id of token t, and predicts token t + 1. Row 0 means nothing. None without MTP.
    `index_q` and `index_weight` (queries and head weights of the indexer) and `selected` (entry ids, best
    first, -1 for none) are None for layers that are not CSA.
    """

    streams: tuple[Array, ...]
    selected: tuple[Array | None, ...]
    index_q: tuple[Array | None, ...]
    index_weight: tuple[Array | None, ...]
    draft_logits: Array | None


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
    since: Int32[Array, ""],
    kept: Int32[Array, ""],
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
        since: rows of positions before it do not exist; 0 but in a replay without window rows.
        kept: entries whose block ends at or before it are not written: a replay must not spoil cached ones.
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
    tile = Tile(slot, table, first, begin, end, positions, live, since, kept, aligned)

    hidden = model.embed[...][jnp.where(live, tokens, 0)]
    streams = jnp.repeat(hidden[:, None, :], config.hc_mult, axis=1)
    new_pool, seen_streams, selections = [], [], []
    for number, (layer, buffers) in enumerate(zip(model.layers, pool[: len(model.layers)], strict=True)):
        at = Place(tile, config, numerics, number)
        streams, buffers, selection = run_layer(layer, streams, buffers, tokens, at)
        new_pool.append(buffers)
        seen_streams.append(streams)
        selections.append(selection)
    logits = output_logits(model.head_mixing, model.norm[...], model.head[...], streams, config)
    draft_logits = None
    if model.mtp is not None:
        at = Place(tile, config, numerics, config.num_hidden_layers)
        buffers, draft_logits = mtp.follow(model, streams, pool[-1], tokens, at)
        new_pool.append(buffers)
    seen = None
    if probe:
        ids, q, weight = zip(*(s or (None, None, None) for s in selections), strict=True)
        seen = Probe(tuple(seen_streams), ids, q, weight, draft_logits)
    return tuple(new_pool), logits, seen
