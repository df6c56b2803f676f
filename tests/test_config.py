"""Configurations: the published files, the presets, every contradiction by name, and numerics."""

import dataclasses
import json
import platform
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import jaxlib
import pytest

from goldenkv.config import (
    ConfigError,
    LayerKind,
    ModelConfig,
    Numerics,
    Yarn,
    bench,
    flash,
    micro,
    numerics,
    pro,
    tiny,
)
from goldenkv.state.fingerprint import fingerprint

BOTH = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "attention_bias": False,
    "compress_rope_theta": 160000,
    "expert_dtype": "fp4",
    "hc_eps": 1e-06,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "head_dim": 512,
    "hidden_act": "silu",
    "index_head_dim": 128,
    "index_n_heads": 64,
    "max_position_embeddings": 1048576,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_experts_per_tok": 6,
    "num_hash_layers": 3,
    "num_key_value_heads": 1,
    "num_nextn_predict_layers": 1,
    "o_lora_rank": 1024,
    "qk_rope_head_dim": 64,
    "quantization_config": {"quant_method": "fp8", "scale_fmt": "ue8m0", "weight_block_size": [128, 128]},
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 16,
        "original_max_position_embeddings": 65536,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "scoring_func": "sqrtsoftplus",
    "sliding_window": 128,
    "swiglu_limit": 10.0,
    "tie_word_embeddings": False,
    "topk_method": "noaux_tc",
    "vocab_size": 129280,
}
FLASH = BOTH | {
    "compress_ratios": [0, 0, *[4, 128] * 20, 4, 0],
    "hidden_size": 4096,
    "index_topk": 512,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "num_attention_heads": 64,
    "num_hidden_layers": 43,
    "o_groups": 8,
    "q_lora_rank": 1024,
    "routed_scaling_factor": 1.5,
}
PRO = BOTH | {
    "compress_ratios": [128, 128, *[4, 128] * 29, 4, 0],
    "hidden_size": 7168,
    "index_topk": 1024,
    "moe_intermediate_size": 3072,
    "n_routed_experts": 384,
    "num_attention_heads": 128,
    "num_hidden_layers": 61,
    "o_groups": 16,
    "q_lora_rank": 1536,
    "routed_scaling_factor": 2.5,
}
PUBLISHED = pytest.mark.parametrize(("raw", "preset"), [(FLASH, flash()), (PRO, pro())], ids=["flash", "pro"])


def without(*keys: str) -> dict[str, Any]:
    return {key: value for key, value in FLASH.items() if key not in keys}


# Published files --------------------------------------------------------------------------------------------


@PUBLISHED
def test_a_published_file_is_the_preset(raw: dict[str, Any], preset: ModelConfig, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(raw))
    for config in (ModelConfig.from_json(raw), ModelConfig.from_json(path), ModelConfig.load(tmp_path)):
        assert dataclasses.replace(config, extra=()) == preset
        assert hash(config) == hash(ModelConfig.from_json(raw))


@PUBLISHED
def test_unknown_keys_are_kept(raw: dict[str, Any], preset: ModelConfig) -> None:
    config = ModelConfig.from_json(raw)
    kept = {key: json.loads(text) for key, text in config.extra}
    assert kept == {
        key: raw[key] for key in ("architectures", "expert_dtype", "quantization_config", "topk_method")
    }
    written = config.to_json()
    assert raw.items() <= {**written, "rope_scaling": raw["rope_scaling"]}.items()
    assert written["rope_scaling"] == raw["rope_scaling"]
    assert ModelConfig.from_json(json.loads(json.dumps(written))) == config


@pytest.mark.parametrize("preset", [flash, pro, bench, tiny, micro])
def test_presets_round_trip(preset) -> None:
    config = preset()
    assert ModelConfig.from_json(config.to_json()) == config
    plain = dataclasses.replace(config, yarn=None)
    assert ModelConfig.from_json(plain.to_json()) == plain
    assert plain != config


def test_equal_configurations_have_equal_fingerprints() -> None:
    """A file may write 10000 where another writes 10000.0."""
    whole, fraction = FLASH | {"rope_theta": 10000}, FLASH | {"rope_theta": 10000.0}
    first, second = (ModelConfig.from_json(raw) for raw in (whole, fraction))
    assert first == second
    assert fingerprint(first, Numerics(), "w") == fingerprint(second, Numerics(), "w")
    given = dataclasses.replace(flash(), rope_theta=10000, compress_ratios=list(flash().compress_ratios))
    assert given == flash() and hash(given) == hash(flash())
    assert json.dumps(given.to_json()) == json.dumps(flash().to_json())


def test_the_golden_file_loads(golden_dir: Path) -> None:
    config = ModelConfig.load(golden_dir)
    assert config.compress_ratios == (0, 0, 4, 128, 4, 128, 0)
    assert (config.hidden_size, config.head_dim, config.vocab_size) == (128, 128, 512)
    assert config.yarn == Yarn(factor=16, original_max_position_embeddings=256)
    assert ModelConfig.from_json(config.to_json()) == config


def test_layer_types_that_agree_are_accepted() -> None:
    names = {0: "sliding_attention", 4: "compressed_sparse_attention", 128: "heavily_compressed_attention"}
    types = [names[ratio] for ratio in FLASH["compress_ratios"]]
    for given in (types, types[:-1]):  # with and without the MTP layer
        config = ModelConfig.from_json(FLASH | {"layer_types": given})
        assert dataclasses.replace(config, extra=()) == flash()


# Presets ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "csa", "hca", "window"),
    [(flash(), 21, 20, 2), (pro(), 30, 31, 0), (bench(), 2, 2, 2), (tiny(), 1, 1, 1), (micro(), 1, 1, 1)],
    ids=["flash", "pro", "bench", "tiny", "micro"],
)
def test_layers_of_each_kind(config: ModelConfig, csa: int, hca: int, window: int) -> None:
    count = Counter(config.kind(layer) for layer in config.layers)
    assert (count[LayerKind.CSA], count[LayerKind.HCA], count[LayerKind.WINDOW]) == (csa, hca, window)
    assert len(config.layers) == config.num_hidden_layers


def test_blocks_end_together_at_the_alignment() -> None:
    assert [c().alignment for c in (flash, pro, bench, tiny, micro)] == [128, 128, 128, 128, 8]
    assert dataclasses.replace(micro(), compress_ratios=(0, 0, 0)).alignment == 1


def test_numbers_that_both_published_models_share() -> None:
    for config in (flash(), pro()):
        assert (config.sliding_window, config.num_hash_layers, config.swiglu_limit) == (128, 3, 10.0)
        assert (config.hc_mult, config.hc_sinkhorn_iters, config.hc_eps, config.rms_norm_eps) == (
            4,
            20,
            1e-6,
            1e-6,
        )
        assert (config.rope_theta, config.compress_rope_theta) == (10000.0, 160000.0)
        assert config.yarn == Yarn(16.0, 65536, 32.0, 1.0)
        assert (config.num_nextn_predict_layers, config.n_shared_experts) == (1, 1)
        assert (config.vocab_size, config.max_position_embeddings) == (129280, 1048576)


def test_a_configuration_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        flash().hidden_size = 1


# Contradictions ---------------------------------------------------------------------------------------------

RATIOS = FLASH["compress_ratios"]
YARN = FLASH["rope_scaling"]
BAD = {
    "a layer too few": (
        {"compress_ratios": RATIOS[1:]},
        ["compress_ratios", "43", "num_nextn_predict_layers=1"],
    ),
    "no MTP entry": ({"compress_ratios": RATIOS[:-1]}, ["compress_ratios", "num_hidden_layers=43"]),
    "a compressed MTP layer": ({"compress_ratios": [*RATIOS[:-1], 4]}, ["compress_ratios", "MTP"]),
    "a negative ratio": ({"compress_ratios": [-4, *RATIOS[1:]]}, ["compress_ratios", "-4"]),
    "a ratio that is no integer": ({"compress_ratios": [4.0, *RATIOS[1:]]}, ["compress_ratios", "4.0"]),
    "a ratio that is a truth value": ({"compress_ratios": [True, *RATIOS[1:]]}, ["compress_ratios", "True"]),
    "ratios that are no list": ({"compress_ratios": 4}, ["compress_ratios=4"]),
    "two HCA ratios": ({"compress_ratios": [64, *RATIOS[1:]]}, ["HCA", "compress_ratios", "64, 128"]),
    "an HCA ratio between CSA blocks": (
        {"compress_ratios": [6 if r == 128 else r for r in RATIOS]},
        ["compress_ratios", "6"],
    ),
    "other layer types": (
        {"layer_types": ["sliding_attention"] * 43},
        ["layer_types", "compress_ratios", "layer 2"],
    ),
    "too few layer types": (
        {"layer_types": ["sliding_attention"] * 2},
        ["layer_types", "layer 2", "nothing"],
    ),
    "layer types that are no list": ({"layer_types": 7}, ["layer_types=7"]),
    "layer types that are no names": ({"layer_types": [0] * 43}, ["layer_types", "layer 0"]),
    "heads that do not fill groups": ({"o_groups": 7}, ["num_attention_heads=64", "o_groups=7"]),
    "another scoring function": ({"scoring_func": "sigmoid"}, ["scoring_func='sigmoid'", "sqrtsoftplus"]),
    "two KV heads": ({"num_key_value_heads": 2}, ["num_key_value_heads=2"]),
    "tied embeddings": ({"tie_word_embeddings": True}, ["tie_word_embeddings=True"]),
    "another activation": ({"hidden_act": "gelu"}, ["hidden_act='gelu'"]),
    "a bias in attention": ({"attention_bias": True}, ["attention_bias=True"]),
    "another model": ({"model_type": "deepseek_v3"}, ["model_type='deepseek_v3'"]),
    "more active experts than there are": (
        {"num_experts_per_tok": 257},
        ["num_experts_per_tok=257", "n_routed_experts=256"],
    ),
    "more hash layers than layers": ({"num_hash_layers": 44}, ["num_hash_layers=44", "num_hidden_layers=43"]),
    "an index width that is no power of two": ({"index_head_dim": 96}, ["index_head_dim=96"]),
    "an index width below the rotated": (
        {"index_head_dim": 32},
        ["index_head_dim=32", "qk_rope_head_dim=64"],
    ),
    "an odd rotated width": ({"qk_rope_head_dim": 63}, ["qk_rope_head_dim=63"]),
    "nothing left to not rotate": ({"qk_rope_head_dim": 512}, ["qk_rope_head_dim=512", "head_dim=512"]),
    "a text for a number": ({"hidden_size": "4096"}, ["hidden_size='4096'"]),
    "a truth value for a number": ({"vocab_size": True}, ["vocab_size=True"]),
    "a fraction for a count": ({"index_topk": 512.0}, ["index_topk=512.0"]),
    "a count of zero": ({"index_topk": 0}, ["index_topk=0"]),
    "a negative count": ({"num_hash_layers": -1}, ["num_hash_layers=-1"]),
    "a null for a number": ({"swiglu_limit": None}, ["swiglu_limit=None"]),
    "a text for a fraction": ({"rope_theta": "10000"}, ["rope_theta='10000'"]),
    "a negative epsilon": ({"rms_norm_eps": -1e-6}, ["rms_norm_eps=-1e-06"]),
    "no number": ({"hc_eps": float("nan")}, ["hc_eps=nan"]),
    "an infinite number": ({"routed_scaling_factor": float("inf")}, ["routed_scaling_factor=inf"]),
    "a number for a truth value": ({"norm_topk_prob": 1}, ["norm_topk_prob=1"]),
    "another scaling": ({"rope_scaling": YARN | {"type": "linear"}}, ["rope_scaling", "'linear'", "yarn"]),
    "scaling without a type": ({"rope_scaling": {"factor": 16}}, ["rope_scaling", "None"]),
    "scaling that is no object": ({"rope_scaling": "yarn"}, ["rope_scaling='yarn'"]),
    "scaling without a factor": (
        {"rope_scaling": {"type": "yarn", "original_max_position_embeddings": 65536}},
        ["rope_scaling", "factor"],
    ),
    "scaling of cos and sin": ({"rope_scaling": YARN | {"mscale": 0.7}}, ["rope_scaling", "mscale"]),
    "a scaling factor of text": ({"rope_scaling": YARN | {"factor": "16"}}, ["factor='16'"]),
    "an original length of zero": (
        {"rope_scaling": YARN | {"original_max_position_embeddings": 0}},
        ["original_max_position_embeddings=0"],
    ),
    "rope parameters of another library": (
        {"rope_parameters": {"rope_theta": 1e4}},
        ["rope_parameters", "rope_scaling"],
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_a_contradiction_is_an_error_that_names_its_keys(case: str) -> None:
    changes, words = BAD[case]
    with pytest.raises(ConfigError) as error:
        ModelConfig.from_json(FLASH | changes)
    for word in words:
        assert word in str(error.value)


def test_the_cases_above_stand_on_a_file_that_loads() -> None:
    ModelConfig.from_json(FLASH)


def test_missing_keys_are_named() -> None:
    with pytest.raises(ConfigError, match="lacks hidden_size, vocab_size"):
        ModelConfig.from_json(without("vocab_size", "hidden_size"))
    with pytest.raises(ConfigError, match="compress_ratios is missing"):
        ModelConfig.from_json(without("compress_ratios", "vocab_size"))


def test_keys_with_a_published_default_may_be_missing() -> None:
    short = without("sliding_window", "hc_mult", "hc_eps", "swiglu_limit", "scoring_func", "model_type")
    assert dataclasses.replace(ModelConfig.from_json(short), extra=()) == flash()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "is not JSON"),
        (b"", "is not JSON"),
        (b"\xff\xfe{", "is not JSON"),
        (b"[1]", "JSON object, got list"),
        (b"3", "got int"),
    ],
)
def test_files_that_are_no_configuration(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=message) as error:
        ModelConfig.from_json(path)
    assert "config.json" in str(error.value)


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        ModelConfig.load(tmp_path)


# Numerics ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "bad",
    [
        {"dtype": "float16"},
        {"dtype": "bf16"},
        {"dtype": 32},
        {"tile": 0},
        {"tile": -4},
        {"tile": 6},
        {"tile": 32.0},
        {"tile": "32"},
        {"index_block": 0},
        {"index_block": 130},
        {"key_block": 2},
        {"fake_quantisation": 1},
    ],
    ids=str,
)
def test_bad_numerics_are_named(bad: dict[str, Any]) -> None:
    (name, value), *_ = bad.items()
    with pytest.raises(ValueError, match=f"{name}={value!r} must be"):
        Numerics(**bad)


@pytest.mark.parametrize("tile", [4, 8, 16, 32, 64, 128, 256, 384])
def test_tiles_that_fit(tile: int) -> None:
    for config in (flash(), pro(), tiny()):
        Numerics(tile=tile).check(config)


@pytest.mark.parametrize("tile", [12, 24, 96, 192])
def test_tiles_across_blocks_are_refused(tile: int) -> None:
    with pytest.raises(ValueError, match=f"tile={tile} must divide the compression ratio 128"):
        Numerics(tile=tile).check(flash())
    Numerics(tile=tile).check(dataclasses.replace(micro(), compress_ratios=(0, 4, 4)))


def test_a_window_only_model_takes_any_tile() -> None:
    Numerics(tile=20).check(dataclasses.replace(micro(), compress_ratios=(0, 0, 0)))


def test_more_draft_layers_than_mtp_layers() -> None:
    """A later Flash checkpoint is reported to have three zeros after its layers and one MTP layer."""
    config = ModelConfig.from_json(FLASH | {"compress_ratios": [*RATIOS, 0, 0]})
    assert list(map(config.kind, config.layers)) == list(map(flash().kind, flash().layers))


def test_identity_holds_every_field_and_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    jax.devices()  # XLA reads its flags now, not the ones of this test
    monkeypatch.setenv("XLA_FLAGS", "--xla_b=2  --xla_a=1")
    found = Numerics().identity()
    machine = {"arithmetic", "jaxlib", "xla_flags", "platform", "device_kind", "isa"}
    assert set(found) == {field.name for field in dataclasses.fields(Numerics)} | machine
    assert all(type(value) is str for value in found.values())
    assert found["jaxlib"] == jaxlib.__version__
    assert found["platform"] == jax.devices()[0].platform
    assert found["isa"].startswith(platform.machine())
    assert found["xla_flags"] == "--xla_a=1 --xla_b=2"


def test_each_field_and_the_flags_change_the_identity(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    others = [
        Numerics(dtype="bfloat16"),
        Numerics(tile=64),
        Numerics(index_block=128),
        Numerics(key_block=64),
        Numerics(fake_quantisation=True),
        Numerics(implementation="other"),
    ]
    assert len(others) == len(dataclasses.fields(Numerics))
    identities = [n.identity() for n in (Numerics(), *others)]
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_max_isa=SSE4_2")
    identities.append(Numerics().identity())
    monkeypatch.setattr(numerics, "ARITHMETIC", numerics.ARITHMETIC + 1)
    identities.append(Numerics().identity())
    assert len({json.dumps(i, sort_keys=True) for i in identities}) == len(identities)
