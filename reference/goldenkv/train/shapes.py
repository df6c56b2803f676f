"""The shape of the small model, and of the model it is compared with."""

from __future__ import annotations

import dataclasses

import jax

from ..config import ModelConfig, presets
from ..config.numerics import Numerics
from ..model.weights import Model


def small(vocab_size: int = 2048) -> ModelConfig:
    """2.9 M parameters: a window-only layer, then CSA and HCA twice, at the published window and ratios."""
    return dataclasses.replace(
        presets.bench(), vocab_size=vocab_size, hidden_size=192, hc_mult=2, hc_sinkhorn_iters=4,
        num_hidden_layers=5, compress_ratios=(0, 4, 128, 4, 128),
        num_attention_heads=3, head_dim=64, qk_rope_head_dim=16, q_lora_rank=96, o_groups=3, o_lora_rank=48,
        index_n_heads=4, index_head_dim=32, index_topk=64,
        n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=96, num_hash_layers=1,
        yarn=None, max_position_embeddings=4096,
    )  # fmt: skip


def window_only(config: ModelConfig) -> ModelConfig:
    """The same model without compressed entries, its experts widened until it has as many parameters."""
    plain = dataclasses.replace(config, compress_ratios=(0,) * len(config.compress_ratios))
    wanted, width = count(config), config.moe_intermediate_size
    widths = range(width, 2 * width + 1)
    return min(
        (dataclasses.replace(plain, moe_intermediate_size=w) for w in widths),
        key=lambda c: abs(count(c) - wanted),
    )


def count(config: ModelConfig) -> int:
    """Parameters; tables of hash routing are none."""
    leaves = jax.tree.leaves(Model(config, Numerics(), seed=None))
    return sum(leaf.size for leaf in leaves if leaf.dtype.kind == "f")
