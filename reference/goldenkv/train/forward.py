"""The whole-sequence forward pass that gradients go through.

The tile program is made for bits: loops over fixed blocks, pools, rings. This one is made for gradients: one
sequence from position 0, every row at once, no state. It computes the same function with the same ops, up to
the order of float32 sums; a test holds the two together.

The top-k choice of the indexer has no gradient. As in V3.2 (arXiv 2512.02556, section 2.1) the indexer learns
from a loss of its own: the Kullback-Leibler divergence from its softmax to the distribution of the main
attention over the same entries, summed over heads. Its inputs are cut off from the rest of the model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int32

from ..config import LayerKind, ModelConfig
from ..model import weights as w
from ..model.attention import layer_frequencies
from ..model.layer import mixing_of
from ..ops import attend, compress, index, mhc, moe
from ..ops.norm import rms_norm
from ..ops.rope import rotate


class Forward(NamedTuple):
    """What one sequence gives.

    Attributes:
        logits: of every position.
        index_loss: of the indexers, mean over CSA layers and over queries that see anything.
        load: tokens each expert was chosen for, a row a layer.
    """

    logits: Float32[Array, "t v"]
    index_loss: Float32[Array, ""]
    load: Float32[Array, "layers experts"]


@dataclass(frozen=True, slots=True)
class Pass:
    """How a sequence is run.

    Attributes:
        config: the shapes.
        dense: CSA layers attend to all visible entries, and the indexers learn from all of them: how training
            begins, before the indexers know anything.
        index_stride: the indexers' loss is that of every so-manieth query: they learn from few as well.
        dtype: of both operands of every large product. A CPU with bfloat16 instructions multiplies more than
            twice as fast in it. Everything else is float32.
    """

    config: ModelConfig
    dense: bool = False
    index_stride: int = 1
    dtype: str = "float32"

    def __call__(self, model: w.Model, tokens: Int32[Array, " t"]) -> Forward:
        """Runs one sequence from position 0. The weights are float32.

        Raises:
            ValueError: the length is no multiple of the window.
        """
        c = self.config
        if len(tokens) % c.sliding_window:
            raise ValueError(f"{len(tokens)} tokens are no multiple of the window {c.sliding_window}")
        streams = jnp.repeat(model.embed[...][tokens][:, None, :], c.hc_mult, axis=1)
        losses, loads = [], []
        for number, layer in enumerate(model.layers):
            pre, post, comb = mixing_of(layer.attention_mixing, streams, c)
            x = rms_norm(mhc.collapse(streams, pre), layer.attention_norm[...], c.rms_norm_eps)
            output, loss = self._attention(layer.attention, x, number)
            streams = mhc.expand(streams, output, post, comb)
            losses += [] if loss is None else [loss]

            pre, post, comb = mixing_of(layer.moe_mixing, streams, c)
            x = rms_norm(mhc.collapse(streams, pre), layer.moe_norm[...], c.rms_norm_eps)
            output, load = self._moe(layer.moe, x, tokens)
            streams = mhc.expand(streams, output, post, comb)
            loads.append(load)
        m = model.head_mixing
        row = mhc.head_collapse(
            streams, m.weight[...], m.base[...], m.scale[...], eps=c.hc_eps, norm_eps=c.rms_norm_eps
        )
        logits = self._product("ti,iv->tv", rms_norm(row, model.norm[...], c.rms_norm_eps), model.head[...])
        return Forward(logits, sum(losses, jnp.float32(0)) / max(len(losses), 1), jnp.stack(loads))

    def _product(self, equation: str, a: Array, b: Array) -> Float32[Array, "..."]:
        return jnp.einsum(equation, a.astype(self.dtype), b.astype(self.dtype)).astype(jnp.float32)

    def _attention(
        self, a: w.Attention, x: Float[Array, "t i"], layer: int
    ) -> tuple[Float[Array, "t i"], Array | None]:
        """Output of an attention layer, and the loss of its indexer."""
        c, eps, positions = self.config, self.config.rms_norm_eps, jnp.arange(len(x), dtype=jnp.int32)
        frequency, ratio = layer_frequencies(c, layer), c.compress_ratios[layer]
        latent = rms_norm(self._product("ti,ir->tr", x, a.q_down[...]), a.q_norm[...], eps)
        q = self._product("tr,ro->to", latent, a.q_up[...]).reshape(-1, c.num_attention_heads, c.head_dim)
        q = rotate(rms_norm(q, None, eps), positions, frequency) * c.head_dim**-0.5
        kv = rms_norm(self._product("ti,id->td", x, a.kv[...]), a.kv_norm[...], eps)

        near, keys = self._window_scores(q, rotate(kv, positions, frequency))
        sink = jnp.broadcast_to(a.sinks[...][:, None], (*q.shape[:2], 1))
        scores, entries, loss = [near, sink], None, None
        if a.compressor is not None:
            entries = self._entries(a.compressor, x, layer)
            seen = jnp.arange(len(entries))[None, :] < compress.visible_entries(positions, ratio)[:, None]
            far = self._product("thd,nd->thn", q, entries)
            if a.indexer is not None:
                if not self.dense:
                    guess = self._index_scores(a.indexer, x, latent, layer, slice(None))
                    seen = _chosen(jax.lax.stop_gradient(guess), seen, c.index_topk)
                some = slice(self.index_stride // 2, None, self.index_stride)
                guess = self._index_scores(a.indexer, x, latent, layer, some)
                loss = _index_loss(guess, far[some], seen[some])
            scores.append(jnp.where(seen[:, None, :], far, -jnp.inf))
        # One softmax over the window, the sink (which has no value) and the entries.
        weight = jax.nn.softmax(jnp.concatenate(scores, axis=-1), axis=-1)
        heads = self._window_values(weight[:, :, : near.shape[-1]], keys)
        if entries is not None:
            heads = heads + self._product("thn,nd->thd", weight[:, :, near.shape[-1] + 1 :], entries)
        heads = rotate(heads, positions, frequency, inverse=True).reshape(len(x), c.o_groups, -1)
        low_rank = self._product("tgi,gir->tgr", heads, a.out_group[...]).reshape(len(x), -1)
        return self._product("tr,ro->to", low_rank, a.out[...]), loss

    def _window_scores(self, q: Float[Array, "t h d"], kv: Float[Array, "t d"]) -> tuple[Array, Array]:
        """Scores [t, h, 2 w] against a query's own block of w rows and the block before it; those keys."""
        window = self.config.sliding_window
        blocks = kv.reshape(-1, window, kv.shape[-1])
        keys = jnp.concatenate([jnp.concatenate([jnp.zeros_like(blocks[:1]), blocks[:-1]]), blocks], axis=1)
        row, column = jnp.arange(window, dtype=jnp.int32), jnp.arange(2 * window, dtype=jnp.int32)
        visible = attend.window_visible(row + window, column, window)
        first = visible & (column >= window)  # nothing stands before the first block
        visible = jnp.concatenate([first[None], jnp.broadcast_to(visible, (len(keys) - 1, *visible.shape))])
        scores = self._product("bqhd,bkd->bqhk", q.reshape(-1, window, *q.shape[1:]), keys)
        scores = jnp.where(visible[:, :, None, :], scores, -jnp.inf)
        return scores.reshape(*q.shape[:2], 2 * window), keys

    def _window_values(
        self, weight: Float[Array, "t h w2"], keys: Float[Array, "b w2 d"]
    ) -> Float[Array, "t h d"]:
        blocked = weight.reshape(len(keys), -1, *weight.shape[1:])
        return self._product("bqhk,bkd->bqhd", blocked, keys).reshape(*weight.shape[:2], -1)

    def _entries(self, m: w.Compressor, x: Array, layer: int) -> Float[Array, "n d"]:
        c, ratio = self.config, self.config.compress_ratios[layer]
        bias = m.position_bias[...][jnp.arange(len(x)) % ratio]
        return compress.compress(
            self._product("ti,ic->tc", x, m.kv[...]),
            self._product("ti,ic->tc", x, m.gate[...]) + bias,
            m.norm[...], layer_frequencies(c, layer),
            compress_rate=ratio, overlap=c.kind(layer) is LayerKind.CSA, eps=c.rms_norm_eps,
        )  # fmt: skip

    def _index_scores(
        self, m: w.Indexer, x: Array, latent: Array, layer: int, queries: slice
    ) -> Float32[Array, "q n"]:
        """Without the Hadamard transform, which leaves products as they are."""
        c, (x, latent) = self.config, jax.lax.stop_gradient((x, latent))
        positions, frequency = jnp.arange(len(x), dtype=jnp.int32)[queries], layer_frequencies(c, layer)
        q = self._product("tr,ro->to", latent[queries], m.q[...])
        q = rotate(q.reshape(-1, c.index_n_heads, c.index_head_dim), positions, frequency)
        weight = self._product("ti,ih->th", x[queries], m.head_weight[...])
        weight = weight * (c.index_head_dim**-0.5 * c.index_n_heads**-0.5)
        dots = self._product("thd,nd->thn", q, self._entries(m.compressor, x, layer))
        return jnp.sum(jnp.maximum(dots, 0.0) * weight[:, :, None], axis=1)

    def _moe(
        self, m: w.Moe, x: Float[Array, "t i"], tokens: Int32[Array, " t"]
    ) -> tuple[Float[Array, "t i"], Float[Array, " experts"]]:
        """Every expert runs on every token and counts where it was chosen: few experts, plain gradients."""
        c = self.config
        scores = moe.router_scores(x, m.router[...])
        if m.table is not None:
            chosen = moe.hash_routing(tokens, m.table[...])
        else:
            assert m.bias is not None
            chosen = moe.learned_routing(jax.lax.stop_gradient(scores), m.bias[...], c.num_experts_per_tok)
        weights = moe.routing_weights(scores, chosen, c.routed_scaling_factor, normalise=c.norm_topk_prob)
        routed = self._swiglu(x, m.gate[...], m.up[...]) * weights[:, :, None]
        shared = self._swiglu(x, m.shared_gate[...][None], m.shared_up[...][None])
        output = self._product("tef,efo->to", routed, m.down[...])
        output = output + self._product("tf,fo->to", shared[:, 0], m.shared_down[...])
        return output, jnp.sum(weights > 0, axis=0).astype(jnp.float32)

    def _swiglu(self, x: Array, gate: Float[Array, "e i f"], up: Float[Array, "e i f"]) -> Array:
        limit = self.config.swiglu_limit
        g = jnp.minimum(self._product("ti,eif->tef", x, gate), limit)
        return jax.nn.silu(g) * jnp.clip(self._product("ti,eif->tef", x, up), -limit, limit)


def _chosen(scores: Float[Array, "t n"], seen: Bool[Array, "t n"], top_k: int) -> Bool[Array, "t n"]:
    """Which entries are among the top-k of each query."""
    if scores.shape[1] <= top_k:
        return seen
    ids = index.top_k_entries(scores, seen, top_k)
    rows = jnp.arange(len(ids))[:, None]
    return jnp.zeros_like(seen).at[rows, jnp.where(ids < 0, seen.shape[1], ids)].set(True, mode="drop")


def _index_loss(
    guess: Float[Array, "t n"], scores: Float[Array, "t h n"], seen: Bool[Array, "t n"]
) -> Float32[Array, ""]:
    """KL divergence from the indexer's softmax to the attention over the entries, both over `seen` alone."""
    some = jnp.any(seen, axis=1)
    mask = seen | ~some[:, None]  # a row that sees nothing must not be 0 / 0, not even in a gradient
    wanted = jax.nn.softmax(jnp.where(mask[:, None, :], scores, -jnp.inf), axis=-1).mean(axis=1)
    wanted = jax.lax.stop_gradient(wanted)
    log_guess = jax.nn.log_softmax(jnp.where(mask, guess, -jnp.inf), axis=-1)
    log_wanted = jnp.log(jnp.maximum(wanted, 1e-30))
    terms = jnp.where(mask, wanted * (log_wanted - jnp.where(mask, log_guess, 0.0)), 0.0)
    return jnp.sum(jnp.where(some, terms.sum(axis=1), 0.0)) / jnp.maximum(some.sum(), 1)
