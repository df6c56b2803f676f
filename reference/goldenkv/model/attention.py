"""One attention layer over one tile, of any kind (report section 2.3), reading and writing device state.

Everything that grows with the context is a loop over fixed blocks; how many depends on where the tile stands,
never on how many of its rows are live.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int32

from ..config import LayerKind, ModelConfig, Numerics
from ..ops import attend, compress, quant
from ..ops.linear import grouped_output, project
from ..ops.norm import rms_norm
from ..ops.rope import frequencies, rotate
from ..state import pool as pools
from . import weights as w
from .core import Core, core_of

Buffers = dict[str, Array]
"""The device state of one layer, by buffer name."""


class Tile(NamedTuple):
    """Where a tile stands: rows first .. first + T - 1, of which begin .. end - 1 are live.

    `since` and `kept` are those of `run_tile`.
    """

    slot: Int32[Array, ""]
    table: Int32[Array, " max"]
    first: Int32[Array, ""]
    begin: Int32[Array, ""]
    end: Int32[Array, ""]
    positions: Int32[Array, " t"]
    live: Bool[Array, " t"]
    since: Int32[Array, ""]
    kept: Int32[Array, ""]
    aligned: bool

    @property
    def stop(self) -> Array:
        """One past the last row, live or not: loop counts depend on it, never on `end`."""
        return self.first + self.positions.shape[0]

    def exist(self, positions: Int32[Array, " n"]) -> Bool[Array, " n"]:
        """Which positions have rows, in this tile or before it."""
        return (positions >= self.since) & (positions < self.end)


@dataclass(frozen=True, slots=True)
class Place:
    """A layer of a configuration, met with a tile and the numerics to compute it in."""

    tile: Tile
    config: ModelConfig
    numerics: Numerics
    layer: int

    @property
    def kind(self) -> LayerKind:
        return self.config.kind(self.layer)

    @property
    def ratio(self) -> int:
        return self.config.compress_ratios[self.layer]

    @property
    def frequency(self) -> np.ndarray:
        return layer_frequencies(self.config, self.layer)

    @property
    def core(self) -> Core:
        """What computes the parts that a kernel can stand for."""
        return core_of(self.numerics)

    @property
    def seen(self) -> Array:
        """Entries that the tile's last row could see, live or not."""
        return self.tile.stop // self.ratio

    @property
    def written(self) -> Array:
        """Entries that there are."""
        return self.tile.end // self.ratio


class Selection(NamedTuple):
    """What the indexer of a CSA layer chose, and from what."""

    ids: Int32[Array, "t k"]
    q: Float[Array, "t h d"]
    weight: Float[Array, "t h"]


def attention(
    a: w.Attention, x: Float[Array, "t i"], buffers: Buffers, at: Place
) -> tuple[Float[Array, "t i"], Buffers, Selection | None]:
    """The layer's output for its normalised inputs `x`, and its new state.

    Window rows first, then, under the same softmax, the selected entries (CSA) or all entries (HCA).
    """
    config, tile, eps = at.config, at.tile, at.config.rms_norm_eps
    buffers = dict(buffers)

    q_latent = rms_norm(project(x, a.q_down[...]), a.q_norm[...], eps)
    q = project(q_latent, a.q_up[...]).reshape(-1, config.num_attention_heads, config.head_dim)
    q = rotate(rms_norm(q, None, eps), tile.positions, at.frequency)
    kv = rotate(rms_norm(project(x, a.kv[...]), a.kv_norm[...], eps), tile.positions, at.frequency)
    window, visible = _window(_quantise_kv(kv, at), buffers, at)

    selection, sinks = None, a.sinks[...]
    if a.compressor is None:
        heads = at.core.window_attention(q, window, visible, sinks)
    else:
        _write_entries(a.compressor, x, buffers, "rows", "entries", _quantise_kv, at)
        counts = jnp.where(tile.live, compress.visible_entries(tile.positions, at.ratio), 0)
        pages, table = buffers["entries"], tile.table
        if a.indexer is not None:
            selection = _select(a.indexer, x, q_latent, buffers, counts, at)
            heads = at.core.sparse_attention(q, window, visible, pages, table, selection.ids, sinks)
        else:
            heads = at.core.dense_attention(
                q, window, visible, pages, table, counts, sinks, seen=at.seen, written=at.written
            )
    heads = rotate(heads, tile.positions, at.frequency, inverse=True)
    return grouped_output(heads.astype(x.dtype), a.out_group[...], a.out[...]), buffers, selection


def _window(
    kv: Float[Array, "t d"], buffers: Buffers, at: Place
) -> tuple[Float[Array, "w d"], Bool[Array, "t w"]]:
    """Writes the tile's KV rows to the ring. Returns rows W before the tile to its end, and who sees them."""
    tile, window = at.tile, at.config.sliding_window
    buffers["window"] = pools.write_ring(buffers["window"], tile.slot, tile.positions, tile.live, kv)
    positions = tile.first - window + jnp.arange(window + len(kv), dtype=jnp.int32)
    exists = tile.exist(positions)
    keys = pools.read_ring(buffers["window"], tile.slot, positions, exists)
    return keys, attend.window_visible(tile.positions, positions, window) & exists & tile.live[:, None]


def _write_entries(
    compressor: w.Compressor,
    x: Float[Array, "t i"],
    buffers: Buffers,
    rows_name: str,
    entries_name: str,
    quantise: Callable[[Array, Place], Array],
    at: Place,
) -> None:
    """Adds the tile's compressor rows to `buffers`, and the entries of blocks that its live rows finish."""
    tile, ratio = at.tile, at.ratio
    overlap = at.kind is LayerKind.CSA
    rows = compress.compressor_rows(
        x, compressor.kv[...], compressor.gate[...], compressor.position_bias[...], tile.positions
    )
    count = pools.entries_in_tile(len(x), ratio, tile.aligned)
    ids = tile.first // ratio + jnp.arange(count, dtype=jnp.int32)
    blocks = count + (1 if overlap else 0)  # with overlap the first entry needs the block before its own
    positions = (ids[-1] + 1 - blocks) * ratio + jnp.arange(blocks * ratio, dtype=jnp.int32)
    exists = tile.exist(positions)
    raw = []
    for name, fresh, absent in zip(("kv", "score"), rows, (0.0, -jnp.inf), strict=True):
        ring = pools.write_ring(buffers[f"{rows_name}_{name}"], tile.slot, tile.positions, tile.live, fresh)
        buffers[f"{rows_name}_{name}"] = ring
        found = pools.read_ring(ring, tile.slot, positions, exists)
        raw.append(jnp.where(exists[:, None], found, absent).reshape(blocks, ratio, -1))
    kv, score = raw
    norm, eps = compressor.norm[...], at.config.rms_norm_eps
    entries = at.core.entries(kv, score, norm, ids * ratio, at.frequency, overlap=overlap, eps=eps)
    pages, ends = buffers[entries_name], (ids + 1) * ratio
    done = (ends > jnp.maximum(tile.begin, tile.kept)) & (ends <= tile.end)
    entries = quantise(entries.astype(pages.dtype), at)
    buffers[entries_name] = pools.write_entries(pages, tile.table, ids, done, entries)


def _select(
    indexer: w.Indexer,
    x: Float[Array, "t i"],
    q_latent: Float[Array, "t r"],
    buffers: Buffers,
    counts: Int32[Array, " t"],
    at: Place,
) -> Selection:
    """The entries that each query attends to, by blocks of index keys (equations 14-17)."""
    tile, config = at.tile, at.config
    _write_entries(indexer.compressor, x, buffers, "index_rows", "index_keys", _quantise_index, at)
    heads, dim = config.index_n_heads, config.index_head_dim
    q = project(q_latent, indexer.q[...]).reshape(-1, heads, dim)
    q = _quantise_index(rotate(q, tile.positions, at.frequency), at)
    weight = project(x, indexer.head_weight[...]).astype(jnp.float32) * (dim**-0.5 * heads**-0.5)
    keys, top_k = buffers["index_keys"], config.index_topk
    ids = at.core.select(q, keys, tile.table, weight, counts, top_k, seen=at.seen, written=at.written)
    return Selection(ids, q, weight)


def layer_frequencies(config: ModelConfig, layer: int) -> np.ndarray:
    """RoPE frequencies of a layer: window-only layers, MTP too, have a theta of their own and no YaRN."""
    if not config.compress_ratios[layer]:
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


def _quantise_kv(kv: Float[Array, "n d"], at: Place) -> Float[Array, "n d"]:
    """With fake quantisation: E4M3 on the channels that are not rotated."""
    if not at.numerics.fake_quantisation:
        return kv
    plain = kv.shape[-1] - at.config.qk_rope_head_dim
    return jnp.concatenate([quant.fake_quantise_e4m3(kv[..., :plain]), kv[..., plain:]], axis=-1)


def _quantise_index(x: Float[Array, "*n d"], at: Place) -> Float[Array, "*n d"]:
    """The Hadamard transform, and with fake quantisation E2M1."""
    x = quant.hadamard(x)
    return quant.fake_quantise_e2m1(x) if at.numerics.fake_quantisation else x
