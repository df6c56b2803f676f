"""The weights, as flax nnx modules, and their seeded initialisation.

Matrices are stored [inputs, outputs], so that a row of activations is multiplied from the left. Names of
checkpoint tensors appear only in `checkpoint_names.py`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from ..config import LayerKind, ModelConfig, Numerics

_FLOAT32 = jnp.dtype("float32")


class _Maker:
    """Makes parameters: matrices in the compute dtype, everything else in float32.

    NumPy draws the values: the same seed gives the same weights on every platform, and nothing compiles.
    Without a seed parameters have a shape and a dtype and no values.
    """

    def __init__(self, config: ModelConfig, numerics: Numerics, seed: int | None) -> None:
        self.config = config
        self.dtype = jnp.dtype(numerics.dtype)
        self.rng = None if seed is None else np.random.default_rng(seed)

    def normal(self, *shape: int, scale: float, mean: float = 0.0, dtype: jnp.dtype = _FLOAT32) -> nnx.Param:
        if self.rng is None:
            return nnx.Param(jax.ShapeDtypeStruct(shape, dtype))
        values = self.rng.standard_normal(shape, np.float32)
        values *= np.float32(scale)  # in place: a model of production shape fills most of a small machine
        values += np.float32(mean)
        return nnx.Param(jnp.array(values.astype(dtype, copy=False)))

    def matrix(self, *shape: int, dtype: jnp.dtype | None = None) -> nnx.Param:
        """Products keep the size of their inputs, which are the last axis but one."""
        return self.normal(*shape, scale=shape[-2] ** -0.5, dtype=dtype or self.dtype)

    def gain(self, size: int) -> nnx.Param:
        return self.normal(size, scale=0.1, mean=1.0)

    def table(self, rows: int, top_k: int, choices: int) -> nnx.Param:
        """For each row `top_k` different choices."""
        if self.rng is None:
            return nnx.Param(jax.ShapeDtypeStruct((rows, top_k), jnp.int32))
        order = np.argsort(self.rng.random((rows, choices)), axis=1)
        return nnx.Param(jnp.array(order[:, :top_k].astype(np.int32)))


class Compressor(nnx.Module):
    """`channels` is 2 d for CSA (next block's half, then own half), d for HCA. Float32 as published."""

    def __init__(self, make: _Maker, ratio: int, width: int, overlap: bool) -> None:
        hidden, channels = make.config.hidden_size, 2 * width if overlap else width
        self.kv = make.matrix(hidden, channels, dtype=_FLOAT32)
        self.gate = make.matrix(hidden, channels, dtype=_FLOAT32)
        self.position_bias = make.normal(ratio, channels, scale=0.5)
        self.norm = make.gain(width)


class Indexer(nnx.Module):
    """The lightning indexer of a CSA layer, with a compressor of its own."""

    def __init__(self, make: _Maker, ratio: int) -> None:
        c = make.config
        self.q = make.matrix(c.q_lora_rank, c.index_n_heads * c.index_head_dim)
        self.head_weight = make.matrix(c.hidden_size, c.index_n_heads)
        self.compressor = Compressor(make, ratio, c.index_head_dim, overlap=True)


class Attention(nnx.Module):
    """Projections of one attention layer; `compressor` and `indexer` are None where the kind has none."""

    def __init__(self, make: _Maker, layer: int) -> None:
        c, kind, ratio = make.config, make.config.kind(layer), make.config.compress_ratios[layer]
        self.q_down = make.matrix(c.hidden_size, c.q_lora_rank)
        self.q_norm = make.gain(c.q_lora_rank)
        self.q_up = make.matrix(c.q_lora_rank, c.num_attention_heads * c.head_dim)
        self.kv = make.matrix(c.hidden_size, c.head_dim)
        self.kv_norm = make.gain(c.head_dim)
        self.sinks = make.normal(c.num_attention_heads, scale=1.0)
        self.out_group = make.matrix(
            c.o_groups, c.num_attention_heads // c.o_groups * c.head_dim, c.o_lora_rank
        )
        self.out = make.matrix(c.o_groups * c.o_lora_rank, c.hidden_size)
        self.compressor = nnx.data(
            Compressor(make, ratio, c.head_dim, kind is LayerKind.CSA) if ratio else None
        )
        self.indexer = nnx.data(Indexer(make, ratio) if kind is LayerKind.CSA else None)


class Moe(nnx.Module):
    """Routed experts and the shared one; a hash layer has `table`, a learned one `bias`."""

    def __init__(self, make: _Maker, layer: int) -> None:
        c = make.config
        hashed = layer < c.num_hash_layers
        self.router = make.matrix(c.hidden_size, c.n_routed_experts, dtype=_FLOAT32)
        self.bias = nnx.data(None if hashed else make.normal(c.n_routed_experts, scale=0.1))
        table = make.table(c.vocab_size, c.num_experts_per_tok, c.n_routed_experts) if hashed else None
        self.table = nnx.data(table)
        self.gate = make.matrix(c.n_routed_experts, c.hidden_size, c.moe_intermediate_size)
        self.up = make.matrix(c.n_routed_experts, c.hidden_size, c.moe_intermediate_size)
        self.down = make.matrix(c.n_routed_experts, c.moe_intermediate_size, c.hidden_size)
        shared = c.n_shared_experts * c.moe_intermediate_size
        self.shared_gate = make.matrix(c.hidden_size, shared)
        self.shared_up = make.matrix(c.hidden_size, shared)
        self.shared_down = make.matrix(shared, c.hidden_size)


class StreamMixing(nnx.Module):
    """The mHC projection before one block: s pre, s post and s * s comb outputs."""

    def __init__(self, make: _Maker) -> None:
        streams = make.config.hc_mult
        outputs = (2 + streams) * streams
        self.weight = make.matrix(streams * make.config.hidden_size, outputs, dtype=_FLOAT32)
        self.base = make.normal(outputs, scale=0.5)
        self.scale = make.normal(3, scale=0.1, mean=1.0)


class HeadMixing(nnx.Module):
    """The projection that weighs the streams before the output norm."""

    def __init__(self, make: _Maker) -> None:
        streams = make.config.hc_mult
        self.weight = make.matrix(streams * make.config.hidden_size, streams, dtype=_FLOAT32)
        self.base = make.normal(streams, scale=0.5)
        self.scale = make.normal(1, scale=0.1, mean=1.0)


class Layer(nnx.Module):
    """One transformer layer: attention and MoE, each behind a norm and an mHC mixing."""

    def __init__(self, make: _Maker, layer: int) -> None:
        self.attention_mixing = StreamMixing(make)
        self.attention_norm = make.gain(make.config.hidden_size)
        self.attention = Attention(make, layer)
        self.moe_mixing = StreamMixing(make)
        self.moe_norm = make.gain(make.config.hidden_size)
        self.moe = Moe(make, layer)


class Mtp(nnx.Module):
    """The multi-token prediction layer: a window-only layer with a learned router, and what leads into it."""

    def __init__(self, make: _Maker) -> None:
        hidden = make.config.hidden_size
        self.embed_norm = make.gain(hidden)
        self.embed_proj = make.matrix(hidden, hidden)
        self.streams_norm = make.gain(hidden)
        self.streams_proj = make.matrix(hidden, hidden)
        self.layer = Layer(make, make.config.num_hidden_layers)
        self.head_mixing = HeadMixing(make)
        self.norm = make.gain(hidden)


class Model(nnx.Module):
    """All weights of a model; `mtp` is None where the configuration has no MTP layer.

    Args:
        config: the shapes.
        numerics: `dtype` is the dtype of the matrices; norms, biases, sinks, compressors, mHC, routers and
            the head are float32, as in the published code.
        seed: of the random initial values. Sinks, position biases and router biases are not zero, so that
            dropping one of them shows. None makes shapes without values, for a loader to fill.
    """

    def __init__(self, config: ModelConfig, numerics: Numerics | None = None, seed: int | None = 0) -> None:
        make = _Maker(config, numerics or Numerics(), seed)
        self.embed = make.normal(config.vocab_size, config.hidden_size, scale=1.0, dtype=make.dtype)
        self.layers = nnx.List([Layer(make, layer) for layer in config.layers])
        self.head_mixing = HeadMixing(make)
        self.norm = make.gain(config.hidden_size)
        self.head = make.matrix(config.hidden_size, config.vocab_size, dtype=_FLOAT32)
        # Drawn last: the other weights of a seed do not depend on it.
        self.mtp = nnx.data(Mtp(make) if config.num_nextn_predict_layers else None)
