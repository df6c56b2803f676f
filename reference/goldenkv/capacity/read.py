"""From a published `config.json`, a mapping or a built-in name to what the model keeps.

Keys are those of Hugging Face configurations. V4 is read by `ModelConfig`; elsewhere `kv_lora_rank` means
MLA, and anything else is ordinary attention with `num_key_value_heads`. A file that has recurrent layers, or
shapes that these keys do not tell, is refused: a wrong number of bytes is worse than none.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..config import ConfigError, ModelConfig, flash, pro
from .formats import choose
from .parts import Group, Model, Part
from .v4 import v4_model

Raw = Mapping[str, Any]

BUILT_IN: dict[str, ModelConfig | Raw] = {
    "flash": flash(),
    "pro": pro(),
    "v3": {
        "num_hidden_layers": 61, "kv_lora_rank": 512, "qk_rope_head_dim": 64,
        "num_nextn_predict_layers": 1, "max_position_embeddings": 163840,
    },
    "v3.2": {
        "num_hidden_layers": 61, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "index_head_dim": 128,
        "num_nextn_predict_layers": 1, "max_position_embeddings": 163840,
    },
    "llama-3.1-8b": {
        "num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
    },
    "gpt-oss-20b": {
        "num_hidden_layers": 24, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64,
        "sliding_window": 128, "layer_types": ["sliding_attention", "full_attention"] * 12,
        "max_position_embeddings": 131072,
    },
}  # fmt: skip
"""Models that need no file: DeepSeek V4 Flash and Pro, V3, V3.2, and two with ordinary attention."""

_NOT_READ = {
    "is_encoder_decoder": "an encoder's keys are kept too",
    "num_kv_heads": "expected num_key_value_heads",
    "multi_query": "expected num_key_value_heads",
    "multi_query_group_num": "expected num_key_value_heads",
    "num_kv_shared_layers": "some layers keep nothing",
    "num_global_key_value_heads": "layers differ in their KV heads",
    "swa_num_key_value_heads": "layers differ in their KV heads",
    "global_head_dim": "layers differ in their head dimension",
    "attention_chunk_size": "attention in chunks is not described",
    "attn_type_list": "recurrent layers are not described",
    "full_attention_interval": "recurrent layers are not described",
    "hybrid_override_pattern": "recurrent layers are not described",
    "layers_block_type": "recurrent layers are not described",
    "linear_attn_config": "recurrent layers are not described",
    "mamba_d_state": "recurrent layers are not described",
}
"""Keys that, where set, change the bytes in a way that is not counted here."""

_SLIDE_EVERYWHERE = ("mistral", "mixtral", "phi3", "starcoder2")
"""Model types in which `sliding_window` alone means every layer."""


def read_model(
    source: str | os.PathLike[str] | Raw | ModelConfig, form: str | None = None, *, name: str | None = None
) -> Model:
    """What a model keeps for a sequence.

    Args:
        source: a built-in name, the path of a `config.json` or of a folder with one, its mapping, or a V4's
            configuration.
        form: a name in `formats.FORMATS`; the family's native format by default.
        name: what to call the model; by default the built-in name or what the path suggests.

    Raises:
        ConfigError: no such file, not JSON, a key missing or contradicting another, or a kind of model that
            is not described here. The message says what was expected.
        CapacityError: `form` does not fit the model.
    """
    if isinstance(source, str | os.PathLike):
        label, found = name or _label(source), _open(source)
    else:
        label, found = name or "model", source
    try:
        if isinstance(found, ModelConfig):
            return v4_model(found, label, form)
        return _from_mapping(found, label, form)
    except ConfigError as error:
        raise ConfigError(f"{label}: {error}") from None


def _open(source: str | os.PathLike[str]) -> ModelConfig | Raw:
    text = os.fspath(source)
    if text in BUILT_IN:
        return BUILT_IN[text]
    path = Path(source)
    if path.is_dir():
        path = path / "config.json"
    if not path.is_file():
        raise ConfigError(f"{text!r} is neither a file nor a built-in model ({', '.join(BUILT_IN)})")
    try:
        raw = json.loads(path.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{text!r} is not JSON: {error}") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"{text!r} must hold a JSON object, got {type(raw).__name__}")
    return raw


def _label(source: str | os.PathLike[str]) -> str:
    """`folder/config.json` is called by its folder, any other file by its stem."""
    text = os.fspath(source)
    if text in BUILT_IN:
        return text
    path = Path(source)
    if path.is_dir():
        return path.resolve().name
    return path.resolve().parent.name if path.stem == "config" else path.stem


def _from_mapping(raw: Raw, name: str, form: str | None) -> Model:
    if "num_hidden_layers" not in raw and isinstance(raw.get("text_config"), Mapping):
        raw = raw["text_config"]  # models that see pictures keep their language model there
    if "compress_ratios" in raw or raw.get("model_type") == "deepseek_v4":
        return v4_model(ModelConfig.from_json(raw), name, form)
    for key, why in _NOT_READ.items():
        if raw.get(key):
            raise ConfigError(f"{key}={raw[key]!r} is not read: {why}")
    if raw.get("kv_lora_rank") is not None:
        return _latent(raw, name, form)
    if raw.get("index_head_dim") is not None:
        raise ConfigError("index_head_dim needs kv_lora_rank (MLA) or compress_ratios (V4) beside it")
    return _ordinary(raw, name, form)


def _latent(raw: Raw, name: str, form: str | None) -> Model:
    """MLA: one latent and one rotated key, shared by all heads, and in V3.2 an index key."""
    rank, rope = _integer(raw, "kv_lora_rank"), _integer(raw, "qk_rope_head_dim")
    indexed = raw.get("index_head_dim") is not None
    family = "MLA with index keys" if indexed else "MLA"
    form, rows = choose(family, form)
    parts = [Part("latent", rows.kv(rank + rope, rope))]
    if rows.index is not None:
        parts.append(Part("index_keys", rows.index(_integer(raw, "index_head_dim"), 0)))
    groups = [Group("MLA", _integer(raw, "num_hidden_layers"), tuple(parts))]
    if raw.get("num_nextn_predict_layers"):
        groups.append(Group("MTP", _integer(raw, "num_nextn_predict_layers"), tuple(parts), draft=True))
    return Model(name, family, form, tuple(groups), _context(raw))


def _ordinary(raw: Raw, name: str, form: str | None) -> Model:
    """MHA, GQA, MQA: K and V of every KV head, in all tokens or in a sliding window."""
    queries = _integer(raw, "num_attention_heads")
    heads = _integer(raw, "num_key_value_heads", queries)
    if queries % heads:
        raise ConfigError(f"num_attention_heads={queries} must be a multiple of num_key_value_heads={heads}")
    family = "MHA" if heads == queries else "MQA" if heads == 1 else "GQA"
    form, rows = choose(family, form)
    dim = _head_dim(raw, queries)
    row = rows.kv(dim + _integer(raw, "v_head_dim", dim), 0)
    layers, sliding = _integer(raw, "num_hidden_layers"), _sliding_layers(raw)
    groups = []
    if layers > sliding:
        groups.append(Group("full", layers - sliding, (Part("K and V", row, heads=heads),)))
    if sliding:
        window = Part("K and V", row, heads=heads, most_rows=_integer(raw, "sliding_window"))
        groups.append(Group("sliding", sliding, (window,)))
    return Model(name, family, form, tuple(groups), _context(raw))


def _head_dim(raw: Raw, queries: int) -> int:
    if raw.get("head_dim") is not None:
        return _integer(raw, "head_dim")
    hidden = _integer(raw, "hidden_size")
    if hidden % queries:
        raise ConfigError(
            f"hidden_size={hidden} is no multiple of num_attention_heads={queries}: give head_dim"
        )
    return hidden // queries


def _sliding_layers(raw: Raw) -> int:
    """How many layers keep a window alone."""
    layers, types = _integer(raw, "num_hidden_layers"), raw.get("layer_types")
    if types is not None:
        if not isinstance(types, list | tuple) or len(types) != layers:
            raise ConfigError(f"layer_types must be a list of num_hidden_layers={layers} names")
        unknown = sorted({str(kind) for kind in types} - {"full_attention", "sliding_attention"})
        if unknown:
            raise ConfigError(
                f"layer_types has {', '.join(unknown)}: expected full_attention or sliding_attention"
            )
        return sum(kind == "sliding_attention" for kind in types)
    if raw.get("sliding_window") is None or raw.get("use_sliding_window") is False:
        return 0
    if raw.get("sliding_window_pattern") is not None:  # every so many layers one sees all tokens
        return layers - layers // _integer(raw, "sliding_window_pattern")
    if raw.get("use_sliding_window") and raw.get("max_window_layers") is not None:
        return max(0, layers - _integer(raw, "max_window_layers"))
    if raw.get("model_type") in _SLIDE_EVERYWHERE:
        return layers
    raise ConfigError("sliding_window is set, but nothing says in which layers: expected layer_types")


def _context(raw: Raw) -> int | None:
    return (
        _integer(raw, "max_position_embeddings") if raw.get("max_position_embeddings") is not None else None
    )


def _integer(raw: Raw, key: str, default: int | None = None) -> int:
    """A positive integer; null stands for an absent key, as in published files."""
    value = raw.get(key)
    if value is None:
        if default is None:
            raise ConfigError(
                f"{key} is missing: expected the config.json of a V4, MLA or ordinary attention"
            )
        return default
    if type(value) is not int or value < 1:
        raise ConfigError(f"{key}={value!r} must be an integer >= 1")
    return value
