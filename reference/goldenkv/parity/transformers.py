"""Parity with transformers' `DeepseekV4ForCausalLM` on seeded random weights, in float32."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import numpy as np

from ..config import LayerKind, ModelConfig, Yarn
from ..engine.engine import Engine
from ..errors import MissingExtra
from ..model.checkpoint import state_dict
from ..model.weights import Model
from .report import ParityReport, compare_arrays


def transformers_configs() -> dict[str, ModelConfig]:
    """Three small models in the layouts of Flash and Pro, and with HCA alone."""

    def small(ratios: tuple[int, ...], hash_layers: int, scale: float) -> ModelConfig:
        return ModelConfig(
            vocab_size=256, hidden_size=96, num_hidden_layers=len(ratios), compress_ratios=ratios,
            num_attention_heads=4, head_dim=64, qk_rope_head_dim=16, q_lora_rank=48,
            o_groups=2, o_lora_rank=32, index_n_heads=16, index_head_dim=32, index_topk=8,
            n_routed_experts=8, num_experts_per_tok=2, moe_intermediate_size=48, num_hash_layers=hash_layers,
            routed_scaling_factor=scale, yarn=Yarn(factor=16.0, original_max_position_embeddings=256),
            max_position_embeddings=4096,
        )  # fmt: skip

    return {
        "Flash-like": small((0, 0, 4, 128, 4, 128), 3, 1.5),
        "Pro-like": small((128, 128, 4, 128, 4), 3, 2.5),
        "HCA only": small((128, 128), 0, 1.5),
    }


def compare_transformers(
    configs: Mapping[str, ModelConfig] | None = None,
    seed: int = 0,
    tolerance: float = 1e-4,
    length: int = 420,
    prefix: int = 260,
) -> list[ParityReport]:
    """Compares logits with transformers' `DeepseekV4ForCausalLM` on seeded random weights, in float32.

    Args:
        configs: by name; `transformers_configs` by default.
        seed: of weights and tokens.
        tolerance: largest absolute difference of logits.
        length: tokens of the sequence.
        prefix: tokens that are prefilled before the rest is decoded one by one.

    Raises:
        MissingExtra: torch or transformers is not installed.
    """
    reports = []
    for name, config in (transformers_configs() if configs is None else configs).items():
        model = Model(config, seed=seed)
        tokens = np.random.default_rng(seed).integers(0, config.vocab_size, length)
        theirs = transformers_logits(model, config, tokens, prefix)
        reports.append(transformers_report(model, config, tokens, prefix, theirs, tolerance, name))
    return reports


def transformers_report(
    model: Model,
    config: ModelConfig,
    tokens: np.ndarray,
    prefix: int,
    theirs: Mapping[str, np.ndarray],
    tolerance: float = 1e-4,
    name: str = "transformers",
) -> ParityReport:
    """Compares a model in memory with what `transformers_logits` returned."""
    engine = Engine(model, config, slots=2, max_length=len(tokens))
    whole = engine.prefill(engine.open(), tokens, all_logits=True)
    sequence = engine.open()
    start = engine.prefill(sequence, tokens[:prefix], all_logits=True)
    stepped = np.concatenate([start, *(engine.decode(sequence, int(t))[None] for t in tokens[prefix:])])
    rows = (
        compare_arrays("logits, one prefill", whole, theirs["prefill"], tolerance),
        compare_arrays(f"logits, decode after {prefix}", stepped, theirs["decode"], tolerance),
    )
    return ParityReport(f"transformers, {name}", rows)


def transformers_model(model: Model, config: ModelConfig) -> Any:
    """The same weights as a `DeepseekV4ForCausalLM`: float32, eager attention.

    Raises:
        MissingExtra: torch or transformers is not installed.
    """
    try:
        import torch
        from transformers import DeepseekV4Config, DeepseekV4ForCausalLM
    except ImportError:
        raise MissingExtra("parity", "the comparison with transformers") from None
    theirs = DeepseekV4ForCausalLM(DeepseekV4Config(**_transformers_config(config))).float().eval()
    weights = {name: torch.from_numpy(value) for name, value in state_dict(model, "transformers").items()}
    theirs.load_state_dict(weights, strict=True)
    return theirs


def transformers_logits(
    model: Model, config: ModelConfig, tokens: np.ndarray, prefix: int
) -> dict[str, np.ndarray]:
    """Logits of the same weights in transformers: "prefill" in one call, "decode" one by one after `prefix`.

    Torch runs on one thread meanwhile: the matrices are small.
    """
    theirs = transformers_model(model, config)
    import torch
    from transformers import DynamicCache

    ids = torch.from_numpy(np.asarray(tokens, np.int64))[None]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.no_grad():
            whole = theirs(ids, use_cache=False).logits[0]
            cache = DynamicCache(config=theirs.config)
            parts = [theirs(ids[:, :prefix], cache=cache, use_cache=True).logits[0]]
            for t in range(prefix, ids.shape[1]):
                parts.append(theirs(ids[:, t : t + 1], cache=cache, use_cache=True).logits[0])
    finally:
        torch.set_num_threads(threads)
    return {"prefill": whole.numpy(), "decode": torch.cat(parts).numpy()}


def _transformers_config(config: ModelConfig) -> dict[str, Any]:
    """The arguments of transformers' configuration class, layer types included: its default fits no V4."""
    same = (
        "vocab_size", "hidden_size", "moe_intermediate_size", "num_hidden_layers", "num_attention_heads",
        "head_dim", "q_lora_rank", "num_experts_per_tok", "n_routed_experts", "n_shared_experts",
        "norm_topk_prob", "routed_scaling_factor", "max_position_embeddings", "rope_theta",
        "compress_rope_theta", "hc_mult", "hc_sinkhorn_iters", "hc_eps", "swiglu_limit", "sliding_window",
        "o_groups", "o_lora_rank", "index_n_heads", "index_head_dim", "index_topk", "rms_norm_eps",
    )  # fmt: skip
    kinds = {
        LayerKind.WINDOW: "sliding_attention",
        LayerKind.CSA: "compressed_sparse_attention",
        LayerKind.HCA: "heavily_compressed_attention",
    }
    used = {kinds[config.kind(layer)]: config.compress_ratios[layer] for layer in config.layers}
    partial = config.qk_rope_head_dim / config.head_dim
    plain = {"rope_type": "default", "rope_theta": config.rope_theta, "partial_rotary_factor": partial}
    scaled = plain | {"rope_theta": config.compress_rope_theta}
    if config.yarn is not None:
        scaled |= {"rope_type": "yarn", "attention_factor": 1.0, **asdict(config.yarn)}
    hashed = config.num_hash_layers
    return {key: getattr(config, key) for key in same} | {
        "layer_types": [kinds[config.kind(layer)] for layer in config.layers],
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128} | used,
        "mlp_layer_types": ["hash_moe" if layer < hashed else "moe" for layer in config.layers],
        "partial_rotary_factor": partial,
        "rope_parameters": {"main": plain, "compress": scaled},
        "attn_implementation": "eager",
    }
