"""Weights to begin training from: calmer than those of tests, which are drawn so that every term shows."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from ..config import ModelConfig
from ..model import weights as w


def calm(model: w.Model, config: ModelConfig) -> None:
    """Changes a fresh model in place.

    Norms pass everything, biases and sinks are zero, the streams of mHC begin nearly apart (each keeps
    itself) and equally weighed, and blocks add little to them, so that gradients reach every layer.
    """
    streams, depth = config.hc_mult, (2 * config.num_hidden_layers) ** -0.5
    apart = jnp.where(jnp.eye(streams, dtype=bool), 2.0, -2.0).reshape(-1)
    even = jnp.full(streams, -jnp.log(streams - 1.0) if streams > 1 else 4.0)
    for layer in model.layers:
        for mixing in (layer.attention_mixing, layer.moe_mixing):
            _scale(mixing.weight, 0.1)
            _set(mixing.base, jnp.concatenate([even, jnp.zeros(streams), apart]))
            _set(mixing.scale, 1.0)
        for norm in (layer.attention_norm, layer.moe_norm, layer.attention.q_norm, layer.attention.kv_norm):
            _set(norm, 1.0)
        _set(layer.attention.sinks, 0.0)
        for part in (layer.attention.out, layer.moe.down, layer.moe.shared_down):
            _scale(part, depth)
        if layer.moe.bias is not None:
            _set(layer.moe.bias, 0.0)
        _scale(layer.moe.router, 0.5)
        for compressor in _compressors(layer.attention):
            _set(compressor.norm, 1.0)
            _set(compressor.position_bias, 0.0)
    _scale(model.head_mixing.weight, 0.1)
    _set(model.head_mixing.base, even)
    _set(model.head_mixing.scale, 1.0)
    _set(model.norm, 1.0)
    _scale(model.head, 0.5)


def _compressors(attention: w.Attention) -> list[w.Compressor]:
    found = [attention.compressor] if attention.compressor is not None else []
    return found + ([attention.indexer.compressor] if attention.indexer is not None else [])


def _set(parameter: nnx.Param, value: float | jax.Array) -> None:
    parameter.set_value(jnp.broadcast_to(jnp.asarray(value, jnp.float32), parameter.shape))


def _scale(parameter: nnx.Param, factor: float) -> None:
    parameter.set_value(parameter[...] * factor)
