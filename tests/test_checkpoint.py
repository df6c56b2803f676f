"""Checkpoints: what is written comes back bit for bit, and what does not fit is refused by name."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from goldenkv.config import Numerics, micro
from goldenkv.model.checkpoint import CheckpointError, load_checkpoint, save_checkpoint, state_dict
from goldenkv.model.weights import Model

CONFIG = micro()
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
SHARD_BYTES = 20_000


@pytest.fixture(scope="module")
def model() -> Model:
    return Model(CONFIG, seed=3)


@pytest.fixture
def folder(model: Model, tmp_path: Path) -> Path:
    save_checkpoint(model, CONFIG, tmp_path / "single")
    return tmp_path / "single"


@pytest.fixture
def sharded(model: Model, tmp_path: Path) -> Path:
    save_checkpoint(model, CONFIG, tmp_path / "sharded", shard_bytes=SHARD_BYTES)
    return tmp_path / "sharded"


def edit(folder: Path, change: Callable[[dict[str, np.ndarray]], object]) -> None:
    """Rewrites the single file of a folder."""
    tensors = load_file(folder / SINGLE)
    change(tensors)
    save_file(tensors, folder / SINGLE)


def assert_same(left: Model, right: Model) -> None:
    one, two = (nnx.to_flat_state(nnx.state(model)) for model in (left, right))
    assert [path for path, _ in one] == [path for path, _ in two]
    for (path, a), (_, b) in zip(one, two, strict=True):
        a, b = np.asarray(a[...]), np.asarray(b[...])
        assert (a.dtype, a.shape) == (b.dtype, b.shape), path
        assert a.tobytes() == b.tobytes(), path


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shard_bytes", [None, SHARD_BYTES, 1])
@pytest.mark.parametrize("names", ["published", "transformers"])
def test_round_trip(tmp_path: Path, names: str, shard_bytes: int | None, dtype: str) -> None:
    numerics = Numerics(dtype=dtype)
    model = Model(CONFIG, numerics, seed=5)
    save_checkpoint(model, CONFIG, tmp_path, names=names, shard_bytes=shard_bytes)
    config, loaded = load_checkpoint(tmp_path, numerics=numerics)
    assert config.to_json() == CONFIG.to_json()
    assert_same(loaded, model)


def test_shards_keep_their_limit(sharded: Path) -> None:
    index = json.loads((sharded / INDEX).read_text())
    files = sorted(set(index["weight_map"].values()))
    assert len(files) > 2
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    total = 0
    for file in files:
        sizes = [tensor.nbytes for tensor in load_file(sharded / file).values()]
        assert sum(sizes) <= SHARD_BYTES or len(sizes) == 1
        total += sum(sizes)
    assert index["metadata"]["total_size"] == total


def test_names_and_shapes_are_those_of_the_published_file(golden_dir: Path) -> None:
    _, model = load_checkpoint(golden_dir)
    ours = state_dict(model, "published")
    with safe_open(golden_dir / SINGLE, "numpy") as file:
        names = set(file.keys())
        assert set(ours) == names and "mtp.0.attn.wkv.weight" in names
        for name in names:
            np.testing.assert_array_equal(ours[name], file.get_tensor(name))


def test_the_two_schemes_hold_the_same_numbers(model: Model) -> None:
    published, transformers = state_dict(model, "published"), state_dict(model, "transformers")
    size = CONFIG.moe_intermediate_size
    fused = transformers["model.layers.1.mlp.experts.gate_up_proj"]
    np.testing.assert_array_equal(fused[2, :size], published["layers.1.ffn.experts.2.w1.weight"])
    np.testing.assert_array_equal(fused[2, size:], published["layers.1.ffn.experts.2.w3.weight"])
    down = transformers["model.layers.1.mlp.experts.down_proj"]
    np.testing.assert_array_equal(down[1], published["layers.1.ffn.experts.1.w2.weight"])
    assert sum(v.size for v in published.values()) == sum(v.size for v in transformers.values())


def test_every_array_is_contiguous(model: Model) -> None:
    """safetensors writes memory as it lies, so a transposed view would be stored untransposed."""
    assert all(value.flags.c_contiguous for value in state_dict(model, "published").values())


@pytest.mark.parametrize("wanted", ["float32", "bfloat16"])
@pytest.mark.parametrize("stored", ["float32", "bfloat16", "float16"])
def test_tensors_are_cast_to_the_dtype_of_the_parameter(
    folder: Path, model: Model, stored: str, wanted: str
) -> None:
    def cast(tensors: dict[str, np.ndarray]) -> None:
        for name, value in tensors.items():
            if value.dtype == np.float32:
                tensors[name] = value.astype(np.dtype(stored))

    edit(folder, cast)
    _, loaded = load_checkpoint(folder, numerics=Numerics(dtype=wanted))
    want = np.asarray(model.layers[1].attention.q_down[...]).astype(np.dtype(stored)).astype(np.dtype(wanted))
    got = np.asarray(loaded.layers[1].attention.q_down[...])
    assert got.dtype == want.dtype
    assert got.tobytes() == want.tobytes()
    assert loaded.layers[1].attention.sinks.dtype == jnp.float32


def test_tables_may_be_64_bit(folder: Path, model: Model) -> None:
    edit(folder, lambda t: t.update({n: v.astype(np.int64) for n, v in t.items() if n.endswith("tid2eid")}))
    assert_same(load_checkpoint(folder)[1], model)


def test_mtp_tensors_are_skipped(folder: Path, model: Model) -> None:
    edit(folder, lambda t: t.update({"mtp.0.norm.weight": np.ones(3, np.float32)}))
    assert_same(load_checkpoint(folder)[1], model)


def test_a_given_configuration_replaces_the_file(folder: Path, model: Model) -> None:
    (folder / "config.json").unlink()
    config, loaded = load_checkpoint(folder, config=CONFIG)
    assert config is CONFIG
    assert_same(loaded, model)


def test_loaded_weights_do_not_share_memory_with_the_file(folder: Path, model: Model) -> None:
    _, loaded = load_checkpoint(folder)
    (folder / SINGLE).write_bytes(b"\0" * (folder / SINGLE).stat().st_size)
    assert_same(loaded, model)


# What does not fit ---------------------------------------------------------------------------------------


def refused(folder: Path, *parts: str) -> None:
    """Loading raises one error that names every part."""
    with pytest.raises(CheckpointError) as error:
        load_checkpoint(folder)
    for part in parts:
        assert part in str(error.value)


def test_missing_tensors_are_listed(folder: Path) -> None:
    gone = ["norm.weight", "layers.1.attn.indexer.compressor.ape", "layers.2.ffn.experts.3.w2.weight"]
    edit(folder, lambda t: [t.pop(name) for name in gone])
    refused(folder, "missing: ", *gone, "[4, 32]")


def test_unknown_tensors_are_listed(folder: Path) -> None:
    extra = {"layers.0.attn.compressor.ape": np.ones((4, 8), np.float32), "what": np.ones(2, np.float32)}
    edit(folder, lambda t: t.update(extra))
    refused(folder, "unknown: layers.0.attn.compressor.ape [4, 8], what [2]")


def test_other_shapes_are_listed(folder: Path) -> None:
    name = "layers.0.attn.wq_a.weight"
    edit(folder, lambda t: t.update({name: np.ascontiguousarray(t[name].T)}))
    refused(folder, f"{name} expected [16, 32], found [32, 16]")


def test_all_kinds_of_problems_come_at_once(folder: Path) -> None:
    def spoil(tensors: dict[str, np.ndarray]) -> None:
        tensors.pop("head.weight")
        tensors["what"] = np.ones(1, np.float32)
        tensors["embed.weight"] = tensors["embed.weight"][:5]
        tensors["norm.weight"] = np.ones(CONFIG.hidden_size, np.int32)

    edit(folder, spoil)
    refused(
        folder, "head.weight", "what", "embed.weight expected [64, 32], found [5, 32]", "norm.weight", "I32"
    )


def test_another_configuration_does_not_load(folder: Path) -> None:
    with pytest.raises(CheckpointError, match=r"layers\.2\.attn\.compressor\.ape expected"):
        load_checkpoint(folder, config=replace(CONFIG, compress_ratios=(0, 4, 16)))


@pytest.mark.parametrize(
    ("dtype", "said"),
    [(ml_dtypes.float8_e4m3fn, "quantised without its scale: layers.1.attn.wkv.scale"),
     (np.int8, "quantised without its scale: layers.1.attn.wkv.scale"),
     (ml_dtypes.float8_e5m2, "found F8_E5M2"), (np.uint8, "found U8")],
)  # fmt: skip
def test_values_that_only_a_scale_gives_a_meaning(folder: Path, dtype: type, said: str) -> None:
    edit(folder, lambda t: t.update({"layers.1.attn.wkv.weight": np.ones((16, 32), dtype)}))
    refused(folder, said)


@pytest.mark.parametrize("bad", [-1, CONFIG.n_routed_experts])
def test_an_expert_that_does_not_exist_is_refused(folder: Path, bad: int) -> None:
    edit(folder, lambda t: t["layers.0.ffn.gate.tid2eid"].__setitem__((7, 1), bad))
    refused(folder, "layers.0.ffn.gate.tid2eid", "expected 0 to 3")


def test_long_lists_are_cut(folder: Path) -> None:
    edit(folder, lambda t: [t.pop(name) for name in list(t) if "experts" in name])
    refused(folder, "and 25 more")


def test_missing_files(folder: Path, tmp_path: Path) -> None:
    (folder / SINGLE).unlink()
    refused(folder, SINGLE, INDEX)
    (folder / "config.json").unlink()
    refused(folder, "config.json")
    refused(tmp_path / "nothing", "config.json")


@pytest.mark.parametrize("content", [b"", b"garbage", b"\xff" * 100])
def test_a_file_that_is_no_safetensors(folder: Path, content: bytes) -> None:
    (folder / SINGLE).write_bytes(content)
    refused(folder, SINGLE, "cannot be read")


def test_a_file_that_was_cut_off(folder: Path) -> None:
    content = (folder / SINGLE).read_bytes()
    (folder / SINGLE).write_bytes(content[:-1])
    refused(folder, SINGLE, "cannot be read")


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"norm.weight": 4}}',
     '{"weight_map": {"norm.weight": "../model.safetensors"}}'],
)  # fmt: skip
def test_a_broken_index(sharded: Path, content: str) -> None:
    (sharded / INDEX).write_text(content)
    refused(sharded, INDEX)


def test_a_missing_shard(sharded: Path) -> None:
    files = sorted(sharded.glob("*.safetensors"))
    files[-1].unlink()
    refused(sharded, files[-1].name)


def test_a_shard_that_lacks_a_tensor(sharded: Path) -> None:
    weight_map = json.loads((sharded / INDEX).read_text())["weight_map"]
    file = weight_map["norm.weight"]
    tensors = load_file(sharded / file)
    tensors.pop("norm.weight")
    save_file(tensors, sharded / file)
    refused(sharded, file, "norm.weight")


def test_an_index_that_lacks_a_tensor(sharded: Path) -> None:
    index = json.loads((sharded / INDEX).read_text())
    del index["weight_map"]["norm.weight"]
    (sharded / INDEX).write_text(json.dumps(index))
    refused(sharded, "missing: norm.weight")


def test_saving_never_mixes_with_old_files(model: Model, folder: Path, sharded: Path) -> None:
    for used in (folder, sharded):
        before = {path: path.read_bytes() for path in used.iterdir()}
        with pytest.raises(CheckpointError, match="already holds"):
            save_checkpoint(model, CONFIG, used, shard_bytes=SHARD_BYTES)
        assert before == {path: path.read_bytes() for path in used.iterdir()}


def test_wrong_arguments(model: Model, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="names='other' must be one of"):
        save_checkpoint(model, CONFIG, tmp_path / "new", names="other")
    with pytest.raises(ValueError, match="shard_bytes=0"):
        save_checkpoint(model, CONFIG, tmp_path / "new", shard_bytes=0)
    assert not (tmp_path / "new").exists()


def test_the_loaded_model_is_an_ordinary_pytree(folder: Path, model: Model) -> None:
    _, loaded = load_checkpoint(folder)
    assert jax.tree.structure(loaded) == jax.tree.structure(model)
