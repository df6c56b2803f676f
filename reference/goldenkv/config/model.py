"""What a model is.

`ModelConfig` keeps the key names of the published DeepSeek-V4 `config.json`, so a reader of one knows the
other. `compress_ratios` alone decides the kind of every layer.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CSA_RATIO = 4
"""The published code overlaps blocks and runs the indexer exactly where the ratio is 4."""


class LayerKind(enum.Enum):
    """What a layer attends to besides its sliding window; the values are the names in `layer_types`."""

    WINDOW = "sliding_attention"
    CSA = "compressed_sparse_attention"
    HCA = "heavily_compressed_attention"
    MTP = "multi_token_prediction"  # a window-only layer one token behind the others; never in `layer_types`


class ConfigError(ValueError):
    """A configuration that is incomplete, contradicts itself, or asks for what V4 does not have."""


@dataclass(frozen=True, slots=True)
class Yarn:
    """YaRN scaling of rotary frequencies (arXiv 2309.00071); cos and sin stay unscaled in V4."""

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0

    def __post_init__(self) -> None:
        _check_fields(self)


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shape and constants of a DeepSeek-V4 model, under the key names of its published `config.json`.

    `compress_ratios` has an entry for each of the `num_hidden_layers` layers: 0 is a window-only layer, 4 is
    CSA, anything else is HCA with that ratio. Then follow zeros, one for each MTP layer and, in later
    checkpoints, for other draft layers. `extra` keeps every key of the file that this class does not read,
    as sorted (key, JSON text) pairs.
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    compress_ratios: tuple[int, ...]
    num_attention_heads: int
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    n_routed_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    num_hash_layers: int
    routed_scaling_factor: float
    sliding_window: int = 128
    n_shared_experts: int = 1
    num_nextn_predict_layers: int = 0
    norm_topk_prob: bool = True
    swiglu_limit: float = 10.0
    hc_mult: int = 4
    hc_sinkhorn_iters: int = 20
    hc_eps: float = 1e-6
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    compress_rope_theta: float = 160000.0
    yarn: Yarn | None = None
    max_position_embeddings: int = 1048576
    extra: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        _check_fields(self)
        _check(self)

    @staticmethod
    def from_json(source: str | os.PathLike[str] | Mapping[str, Any]) -> ModelConfig:
        """Reads a published `config.json`: a path, or the mapping already parsed.

        Raises:
            ConfigError: a needed key is missing, keys contradict each other, or a value is outside V4.
        """
        if isinstance(source, Mapping):
            raw = dict(source)
        else:
            try:
                raw = json.loads(Path(source).read_text())
            except (json.JSONDecodeError, UnicodeDecodeError) as error:
                raise ConfigError(f"{os.fspath(source)!r} is not JSON: {error}") from None
            if not isinstance(raw, dict):
                raise ConfigError(f"{os.fspath(source)!r} must hold a JSON object, got {type(raw).__name__}")
        return _from_published(raw)

    @staticmethod
    def load(directory: str | os.PathLike[str]) -> ModelConfig:
        """Reads `config.json` of a checkpoint folder."""
        return ModelConfig.from_json(Path(directory) / "config.json")

    def to_json(self) -> dict[str, Any]:
        """The published keys and the kept unknown ones; `from_json` of it gives an equal configuration."""
        out: dict[str, Any] = {key: json.loads(text) for key, text in self.extra} | _FIXED
        for field in dataclasses.fields(self):
            if field.name not in ("yarn", "extra"):
                out[field.name] = getattr(self, field.name)
        out["compress_ratios"] = list(self.compress_ratios)
        out["rope_scaling"] = None if self.yarn is None else {"type": "yarn", **dataclasses.asdict(self.yarn)}
        return out

    def kind(self, layer: int) -> LayerKind:
        """The kind of a layer, the MTP layer included: it follows the main ones."""
        ratio = self.compress_ratios[layer]
        if layer >= self.num_hidden_layers:
            return LayerKind.MTP
        if ratio == 0:
            return LayerKind.WINDOW
        return LayerKind.CSA if ratio == CSA_RATIO else LayerKind.HCA

    @property
    def layers(self) -> range:
        """The indices of the main layers (the MTP layer not counted)."""
        return range(self.num_hidden_layers)

    @property
    def state_layers(self) -> range:
        """The indices of all layers that remember something: the main ones, then the MTP layer if any."""
        return range(self.num_hidden_layers + self.num_nextn_predict_layers)

    @property
    def alignment(self) -> int:
        """Tokens after which every layer's blocks end together: the least common multiple of the ratios."""
        return math.lcm(*(ratio for ratio in self.compress_ratios if ratio), 1)


_FIXED = {
    "model_type": "deepseek_v4",
    "num_key_value_heads": 1,
    "scoring_func": "sqrtsoftplus",
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "attention_bias": False,
}
"""Keys that have one value in every V4."""

_MAY_BE_ZERO = ("num_nextn_predict_layers", "num_hash_layers", "n_shared_experts")


def _check_fields(c: ModelConfig | Yarn) -> None:
    """Raises ConfigError at a value of the wrong type or range.

    Numbers become floats and lists tuples where the field says so: equal configurations have equal JSON,
    and so equal fingerprints.
    """
    for field in dataclasses.fields(c):
        value, said = getattr(c, field.name), f"{field.name}={getattr(c, field.name)!r}"
        match field.type:
            case "int":
                low = 0 if field.name in _MAY_BE_ZERO else 1
                if type(value) is not int or value < low:
                    raise ConfigError(f"{said} must be an integer >= {low}")
            case "float":
                if type(value) not in (int, float) or not 0 < value < math.inf:
                    raise ConfigError(f"{said} must be a positive number")
                object.__setattr__(c, field.name, float(value))
            case "bool":
                if type(value) is not bool:
                    raise ConfigError(f"{said} must be true or false")
            case "tuple[int, ...]":
                if not isinstance(value, list | tuple) or not all(type(r) is int and r >= 0 for r in value):
                    raise ConfigError(f"{said} must be a list of integers >= 0")
                object.__setattr__(c, field.name, tuple(value))


def _check(c: ModelConfig) -> None:
    """Raises ConfigError at the first rule between fields that `c` breaks."""
    fields = {field.name: f"{field.name}={getattr(c, field.name)!r}" for field in dataclasses.fields(c)}

    def need(ok: bool, rule: str) -> None:
        if not ok:
            raise ConfigError(rule.format_map(fields))

    count, mtp = len(c.compress_ratios), c.compress_ratios[c.num_hidden_layers :]
    need(
        count >= c.num_hidden_layers + c.num_nextn_predict_layers,  # later checkpoints add draft layers
        f"compress_ratios has {count} entries for {{num_hidden_layers}} and {{num_nextn_predict_layers}}",
    )
    need(c.num_nextn_predict_layers <= 1, "{num_nextn_predict_layers} must be 0 or 1: V4 has one MTP layer")
    need(not any(mtp), f"the MTP entries of compress_ratios must be 0 (window only), got {mtp}")
    hca = {r for r in c.compress_ratios if r not in (0, CSA_RATIO)}
    need(
        len(hca) <= 1 and all(r % CSA_RATIO == 0 for r in hca),
        f"the HCA ratios {sorted(hca)} in compress_ratios must be one multiple of {CSA_RATIO}",
    )
    need(c.qk_rope_head_dim % 2 == 0, "{qk_rope_head_dim} must be even")
    need(c.qk_rope_head_dim < c.head_dim, "{qk_rope_head_dim} must be smaller than {head_dim}")
    need(c.qk_rope_head_dim <= c.index_head_dim, "{qk_rope_head_dim} must fit into {index_head_dim}")
    need(c.index_head_dim.bit_count() == 1, "{index_head_dim} must be a power of two (Hadamard transform)")
    need(c.num_attention_heads % c.o_groups == 0, "{num_attention_heads} must be a multiple of {o_groups}")
    need(c.num_experts_per_tok <= c.n_routed_experts, "{num_experts_per_tok} exceeds {n_routed_experts}")
    need(c.num_hash_layers <= c.num_hidden_layers, "{num_hash_layers} exceeds {num_hidden_layers}")


def _from_published(raw: dict[str, Any]) -> ModelConfig:
    for key, only in _FIXED.items():
        if key in raw and raw[key] != only:
            raise ConfigError(f"{key}={raw[key]!r} is not supported: DeepSeek-V4 has {only!r}")
    if "compress_ratios" not in raw:
        raise ConfigError("compress_ratios is missing: it decides the kind of every layer, no default does")
    if "rope_parameters" in raw:
        raise ConfigError(
            "rope_parameters is not read: expected rope_theta, compress_rope_theta, rope_scaling"
        )
    fields = {f.name: f for f in dataclasses.fields(ModelConfig) if f.name not in ("yarn", "extra")}
    needed = (name for name, field in fields.items() if field.default is dataclasses.MISSING)
    missing = sorted(name for name in needed if name not in raw)
    if missing:
        raise ConfigError(f"config.json lacks {', '.join(missing)}")
    read = {*fields, *_FIXED, "rope_scaling"}
    extra = tuple(sorted((key, json.dumps(raw[key], sort_keys=True)) for key in raw if key not in read))
    values = {key: raw[key] for key in fields if key in raw}
    config = ModelConfig(**values, yarn=_yarn(raw.get("rope_scaling")), extra=extra)
    _check_layer_types(config, raw.get("layer_types"))
    return config


def _yarn(scaling: Any) -> Yarn | None:
    if scaling is None:
        return None
    if not isinstance(scaling, Mapping):
        raise ConfigError(f"rope_scaling={scaling!r} must be an object or null")
    names = [field.name for field in dataclasses.fields(Yarn)]
    kind = scaling.get("type", scaling.get("rope_type"))
    if kind != "yarn":
        raise ConfigError(f"rope_scaling type {kind!r} is not supported: expected 'yarn' or no rope_scaling")
    unknown = sorted(set(scaling) - {*names, "type", "rope_type"})
    if unknown:
        raise ConfigError(f"rope_scaling has {', '.join(unknown)}: V4 has no such scaling")
    missing = [name for name in names[:2] if name not in scaling]
    if missing:
        raise ConfigError(f"rope_scaling lacks {', '.join(missing)}")
    return Yarn(**{name: scaling[name] for name in names if name in scaling})


def _check_layer_types(config: ModelConfig, layer_types: Any) -> None:
    """`layer_types`, where a file has both, must say the same as `compress_ratios`."""
    if layer_types is None:
        return
    if not isinstance(layer_types, list | tuple):
        raise ConfigError(f"layer_types={layer_types!r} must be a list of names")
    for layer in config.layers:
        said = layer_types[layer] if layer < len(layer_types) else "nothing"
        if said != config.kind(layer).value:
            raise ConfigError(
                f"layer_types and compress_ratios contradict each other at layer {layer}: "
                f"{said!r} against ratio {config.compress_ratios[layer]}"
            )
