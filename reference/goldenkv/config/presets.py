"""Ready configurations: the two published models, and small ones for work on two cores."""

from __future__ import annotations

import dataclasses

from .model import ModelConfig, Yarn


def flash() -> ModelConfig:
    """DeepSeek-V4-Flash as published."""
    return ModelConfig(
        vocab_size=129280, hidden_size=4096, num_hidden_layers=43,
        compress_ratios=(0, 0, *(4, 128) * 20, 4, 0), num_nextn_predict_layers=1,
        num_attention_heads=64, head_dim=512, qk_rope_head_dim=64, q_lora_rank=1024,
        o_groups=8, o_lora_rank=1024, index_n_heads=64, index_head_dim=128, index_topk=512,
        n_routed_experts=256, num_experts_per_tok=6, moe_intermediate_size=2048, num_hash_layers=3,
        routed_scaling_factor=1.5, yarn=Yarn(factor=16.0, original_max_position_embeddings=65536),
    )  # fmt: skip


def pro() -> ModelConfig:
    """DeepSeek-V4-Pro as published."""
    return dataclasses.replace(
        flash(), hidden_size=7168, num_hidden_layers=61, compress_ratios=(128, 128, *(4, 128) * 29, 4, 0),
        num_attention_heads=128, q_lora_rank=1536, o_groups=16, index_topk=1024,
        n_routed_experts=384, moe_intermediate_size=3072, routed_scaling_factor=2.5,
    )  # fmt: skip


def tiny() -> ModelConfig:
    """The smallest model with every layer kind at the published window and ratios."""
    return ModelConfig(
        vocab_size=256, hidden_size=64, num_hidden_layers=3, compress_ratios=(0, 4, 128),
        num_attention_heads=4, head_dim=32, qk_rope_head_dim=8, q_lora_rank=32,
        o_groups=2, o_lora_rank=16, index_n_heads=16, index_head_dim=16, index_topk=8,
        n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, num_hash_layers=1,
        routed_scaling_factor=1.5, yarn=Yarn(factor=16.0, original_max_position_embeddings=4096),
        max_position_embeddings=65536,
    )  # fmt: skip


def bench() -> ModelConfig:
    """Six layers of width 256, large enough to time and small enough for two cores."""
    return dataclasses.replace(
        tiny(), vocab_size=512, hidden_size=256, num_hidden_layers=6, compress_ratios=(0, 0, 4, 128, 4, 128),
        num_attention_heads=8, head_dim=64, qk_rope_head_dim=16, q_lora_rank=128, o_lora_rank=64,
        index_head_dim=64, index_topk=64, n_routed_experts=8, moe_intermediate_size=128, num_hash_layers=3,
    )  # fmt: skip


def micro() -> ModelConfig:
    """For property tests: window 8, ratios 4 and 8 (8 stands for 128), top-k 2."""
    return dataclasses.replace(
        tiny(), vocab_size=64, hidden_size=32, compress_ratios=(0, 4, 8), sliding_window=8,
        head_dim=16, q_lora_rank=16, o_lora_rank=8, index_topk=2, moe_intermediate_size=16,
        yarn=Yarn(factor=16.0, original_max_position_embeddings=64), max_position_embeddings=4096,
    )  # fmt: skip


def with_mtp(config: ModelConfig) -> ModelConfig:
    """The same model with an MTP layer, which drafts tokens."""
    ratios = (*config.compress_ratios[: config.num_hidden_layers], 0)
    return dataclasses.replace(config, num_nextn_predict_layers=1, compress_ratios=ratios)
