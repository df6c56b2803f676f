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
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int32

from ..config import LayerKind, ModelConfig, Numerics
from ..ops import attend, compress, index, mhc, moe, quant
from ..ops.linear import grouped_output, project
from ..ops.norm import rms_norm
from ..ops.rope import frequencies, rotate
from ..state import pool as pools
from ..state.pool import Pool
from . import weights as w


class Probe(NamedTuple):
    """What a tile computed on the way, for comparison and drawing; one element a layer where a tuple.

    `index_q` and `index_weight` (queries and head weights of the indexer) and `selected` (entry ids, best
    first, -1 for none) are None for layers that are not CSA.
    """

    streams: tuple[Array, ...]
    selected: tuple[Array | None, ...]
    index_q: tuple[Array | None, ...]
    index_weight: tuple[Array | None, ...]


class _Selection(NamedTuple):
    ids: Int32[Array, "t k"]
    q: Float[Array, "t h d"]
    weight: Float[Array, "t h"]


class _Tile(NamedTuple):
    """Where the tile stands: rows first .. first + T - 1, of which begin .. end - 1 are live."""

    slot: Int32[Array, ""]
    table: Int32[Array, " max"]
    first: Int32[Array, ""]
    begin: Int32[Array, ""]
    end: Int32[Array, ""]
    positions: Int32[Array, " t"]
    live: Bool[Array, " t"]
    aligned: bool

    @property
    def stop(self) -> Array:
        """One past the last row, live or not: loop counts depend on it, never on `end`."""
        return self.first + self.positions.shape[0]


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
    tile = _Tile(slot, table, first, begin, end, positions, live, aligned)

    hidden = model.embed[...][jnp.where(live, tokens, 0)]
    streams = jnp.repeat(hidden[:, None, :], config.hc_mult, axis=1)
    new_pool, seen_streams, selections = [], [], []
    for number, layer in enumerate(model.layers):
        streams, buffers, selection = _layer(layer, number, streams, pool[number], tokens, tile, config, numerics)
        new_pool.append(buffers)
        seen_streams.append(streams)
        selections.append(selection)
    head = model.head_mixing
    row = mhc.head_collapse(
        streams, head.weight[...], head.base[...], head.scale[...], eps=config.hc_eps, norm_eps=config.rms_norm_eps
    )
    row = rms_norm(row.astype(jnp.float32), model.norm[...], config.rms_norm_eps)
    logits = project(row, model.head[...])
    seen = None
    if probe:
        seen = Probe(
            tuple(seen_streams),
            *(tuple(None if s is None else s[i] for s in selections) for i in range(3)),
        )
    return tuple(new_pool), logits, seen


def _layer(
    layer: w.Layer,
    number: int,
    streams: Float[Array, "t s d"],
    buffers: dict[str, Array],
    tokens: Int32[Array, " t"],
    tile: _Tile,
    config: ModelConfig,
    numerics: Numerics,
) -> tuple[Float[Array, "t s d"], dict[str, Array], _Selection | None]:
    """Attention, then MoE, each reading and writing the residual streams through mHC."""

    def mixing(m: w.StreamMixing, streams: Array) -> tuple[Array, Array, Array]:
        return mhc.stream_mixing(
            streams,
            m.weight[...],
            m.base[...],
            m.scale[...],
            iterations=config.hc_sinkhorn_iters,
            eps=config.hc_eps,
            norm_eps=config.rms_norm_eps,
        )

    pre, post, comb = mixing(layer.attention_mixing, streams)
    x = rms_norm(mhc.collapse(streams, pre), layer.attention_norm[...], config.rms_norm_eps)
    output, buffers, selection = _attention(layer.attention, number, x, buffers, tile, config, numerics)
    streams = mhc.expand(streams, output, post, comb)

    pre, post, comb = mixing(layer.moe_mixing, streams)
    x = rms_norm(mhc.collapse(streams, pre), layer.moe_norm[...], config.rms_norm_eps)
    return mhc.expand(streams, _moe(layer.moe, x, tokens, tile, config), post, comb), buffers, selection


def _attention(
    a: w.Attention,
    number: int,
    x: Float[Array, "t i"],
    buffers: dict[str, Array],
    tile: _Tile,
    config: ModelConfig,
    numerics: Numerics,
) -> tuple[Float[Array, "t i"], dict[str, Array], _Selection | None]:
    """One attention layer of any kind (report section 2.3)."""
    kind, eps, rows = config.kind(number), config.rms_norm_eps, x.shape[0]
    frequency = layer_frequencies(config, number)
    buffers = dict(buffers)

    q_latent = rms_norm(project(x, a.q_down[...]), a.q_norm[...], eps)
    q = project(q_latent, a.q_up[...]).reshape(rows, config.num_attention_heads, config.head_dim)
    q = rotate(rms_norm(q, None, eps), tile.positions, frequency)
    kv = rotate(rms_norm(project(x, a.kv[...]), a.kv_norm[...], eps), tile.positions, frequency)
    kv = _quantise_kv(kv, config, numerics)

    buffers["window"] = pools.write_ring(buffers["window"], tile.slot, tile.positions, tile.live, kv)
    window_positions = tile.first - config.sliding_window + jnp.arange(config.sliding_window + rows, dtype=jnp.int32)
    exists = (window_positions >= 0) & (window_positions < tile.end)
    window = pools.read_ring(buffers["window"], tile.slot, window_positions, exists)
    visible = attend.window_visible(tile.positions, window_positions, config.sliding_window)
    visible &= exists & tile.live[:, None]
    state = attend.absorb(attend.start(*q.shape), q, window, visible)

    selection = None
    if kind is not LayerKind.WINDOW:
        finish = partial(_quantise_kv, config=config, numerics=numerics)
        _write_compressed(a.compressor, x, buffers, "rows", "entries", tile, config, number, finish)
        counts = jnp.where(tile.live, compress.visible_entries(tile.positions, config.compress_ratios[number]), 0)
        if kind is LayerKind.CSA:
            selection = _select(a.indexer, x, q_latent, buffers, counts, tile, config, numerics, number)
            chosen = selection.ids >= 0
            entries = pools.read_entries(buffers["entries"], tile.table, selection.ids, chosen)
            state = attend.absorb_selected(state, q, entries, chosen)
        else:
            state = _absorb_all_entries(state, q, buffers["entries"], counts, tile, config, numerics, number)

    heads = rotate(attend.finish(state, a.sinks[...]), tile.positions, frequency, inverse=True)
    return grouped_output(heads.astype(x.dtype), a.out_group[...], a.out[...]), buffers, selection


def _write_compressed(
    compressor: w.Compressor,
    x: Float[Array, "t i"],
    buffers: dict[str, Array],
    rows_name: str,
    entries_name: str,
    tile: _Tile,
    config: ModelConfig,
    number: int,
    finish,
) -> None:
    """Adds the tile's compressor rows to `buffers` and the entries of blocks that its live rows finish."""
    kind, ratio = config.kind(number), config.compress_ratios[number]
    overlap = kind is LayerKind.CSA
    kv, score = compress.compressor_rows(
        x, compressor.kv[...], compressor.gate[...], compressor.position_bias[...], tile.positions
    )
    count = pools.entries_in_tile(x.shape[0], ratio, tile.aligned)
    ids = tile.first // ratio + jnp.arange(count, dtype=jnp.int32)
    blocks = count + (1 if overlap else 0)
    positions = (ids[-1] + 1 - blocks) * ratio + jnp.arange(blocks * ratio, dtype=jnp.int32)
    exists = (positions >= 0) & (positions < tile.end)
    raw = []
    for name, rows, absent in ((f"{rows_name}_kv", kv, 0.0), (f"{rows_name}_score", score, -jnp.inf)):
        buffers[name] = pools.write_ring(buffers[name], tile.slot, tile.positions, tile.live, rows)
        found = pools.read_ring(buffers[name], tile.slot, positions, exists)
        raw.append(jnp.where(exists[:, None], found, absent).reshape(blocks, ratio, -1))
    pooled = compress.pool_rows(*(compress.overlap_blocks(*raw) if overlap else raw))
    frequency = layer_frequencies(config, number)
    entries = compress.finish_entries(pooled, compressor.norm[...], ids * ratio, frequency, config.rms_norm_eps)
    ends = (ids + 1) * ratio
    done = (ends > tile.begin) & (ends <= tile.end)
    entries = finish(entries.astype(buffers[entries_name].dtype))
    buffers[entries_name] = pools.write_entries(buffers[entries_name], tile.table, ids, done, entries)


def _select(
    indexer: w.Indexer,
    x: Float[Array, "t i"],
    q_latent: Float[Array, "t r"],
    buffers: dict[str, Array],
    counts: Int32[Array, " t"],
    tile: _Tile,
    config: ModelConfig,
    numerics: Numerics,
    number: int,
) -> _Selection:
    """The entries that each query attends to, by blocks of index keys (equations 13-17)."""
    finish = partial(_quantise_index, numerics=numerics)
    _write_compressed(indexer.compressor, x, buffers, "index_rows", "index_keys", tile, config, number, finish)
    heads, dim = config.index_n_heads, config.index_head_dim
    q = project(q_latent, indexer.q[...]).reshape(x.shape[0], heads, dim)
    q = _quantise_index(rotate(q, tile.positions, layer_frequencies(config, number)), numerics)
    weight = project(x, indexer.head_weight[...]).astype(jnp.float32) * (dim**-0.5 * heads**-0.5)

    block, ratio = numerics.index_block, config.compress_ratios[number]

    def step(i: Array, best: tuple[Array, Array]) -> tuple[Array, Array]:
        ids = i * block + jnp.arange(block, dtype=jnp.int32)
        keys = pools.read_entries(buffers["index_keys"], tile.table, ids, ids < tile.end // ratio)
        scores = index.index_scores(q, keys, weight)
        return index.merge_top_k(best, scores, ids, ids[None, :] < counts[:, None])

    best = index.no_selection(x.shape[0], config.index_topk)
    best = lax.fori_loop(0, _blocks(tile.stop // ratio, block), step, best)
    return _Selection(best[1], q, weight)


def _absorb_all_entries(
    state: attend.Softmax,
    q: Float[Array, "t h d"],
    pages: Array,
    counts: Int32[Array, " t"],
    tile: _Tile,
    config: ModelConfig,
    numerics: Numerics,
    number: int,
) -> attend.Softmax:
    """HCA: every visible entry, in blocks of `key_block`."""
    block, ratio = numerics.key_block, config.compress_ratios[number]

    def step(i: Array, state: attend.Softmax) -> attend.Softmax:
        ids = i * block + jnp.arange(block, dtype=jnp.int32)
        entries = pools.read_entries(pages, tile.table, ids, ids < tile.end // ratio)
        return attend.absorb(state, q, entries, ids[None, :] < counts[:, None])

    return lax.fori_loop(0, _blocks(tile.stop // ratio, block), step, state)


def _blocks(count: Array, block: int) -> Array:
    return (count + block - 1) // block


def _moe(
    m: w.Moe, x: Float[Array, "t i"], tokens: Int32[Array, " t"], tile: _Tile, config: ModelConfig
) -> Float[Array, "t i"]:
    scores = moe.router_scores(x, m.router[...])
    if m.table is None:
        chosen = moe.learned_routing(scores, m.bias[...], config.num_experts_per_tok)
    else:
        chosen = moe.hash_routing(jnp.where(tile.live, tokens, 0), m.table[...])
    weights = moe.routing_weights(scores, chosen, config.routed_scaling_factor, normalise=config.norm_topk_prob)
    routed = moe.experts(x, weights, m.gate[...], m.up[...], m.down[...], config.swiglu_limit)
    shared = (m.shared_gate[...][None], m.shared_up[...][None], m.shared_down[...][None])
    ones = jnp.ones((x.shape[0], 1), jnp.float32)
    return (routed + moe.experts(x, ones, *shared, config.swiglu_limit)).astype(x.dtype)


def layer_frequencies(config: ModelConfig, number: int) -> np.ndarray:
    """RoPE frequencies of a layer: theta 10000 for window-only layers, the compressed theta with YaRN else."""
    if config.kind(number) is LayerKind.WINDOW:
        return frequencies(config.qk_rope_head_dim, config.rope_theta)
    if config.yarn is None:
        return frequencies(config.qk_rope_head_dim, config.compress_rope_theta)
    return frequencies(
        config.qk_rope_head_dim,
        config.compress_rope_theta,
        factor=config.yarn.factor,
        original_length=config.yarn.original_max_position_embeddings,
        beta_fast=config.yarn.beta_fast,
        beta_slow=config.yarn.beta_slow,
    )


def _quantise_kv(kv: Float[Array, "n d"], config: ModelConfig, numerics: Numerics) -> Float[Array, "n d"]:
    """With fake quantisation: E4M3 on the channels that are not rotated."""
    if not numerics.fake_quantisation:
        return kv
    plain = kv.shape[-1] - config.qk_rope_head_dim
    return jnp.concatenate([quant.fake_quantise_e4m3(kv[..., :plain]), kv[..., plain:]], axis=-1)


def _quantise_index(x: Float[Array, "*n d"], numerics: Numerics) -> Float[Array, "*n d"]:
    """The Hadamard transform, and with fake quantisation E2M1."""
    x = quant.hadamard(x)
    return quant.fake_quantise_e2m1(x) if numerics.fake_quantisation else x
