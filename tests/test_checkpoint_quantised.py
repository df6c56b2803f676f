"""Quantised checkpoints: FP8 and packed FP4 are read exactly, written as released, loaded in little memory.

The references here share no code with what is tested: grids from the definition of the formats, float64, one
block at a time.
"""

import itertools
import json
import math
import re
import subprocess
import sys
import textwrap
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from goldenkv.config import ModelConfig, Numerics, flash, micro, pro, tiny
from goldenkv.model import checkpoint_quantised as formats
from goldenkv.model.checkpoint import CheckpointError, layout, load_checkpoint, save_checkpoint, state_dict
from goldenkv.model.weights import Model

SINGLE = "model.safetensors"
EXAMPLES = settings.default.max_examples

# Blocks of 128 x 128 and of 32 with rests in both axes; groups of the output projection end inside a block.
CONFIG = replace(
    tiny(), hidden_size=160, moe_intermediate_size=144, o_lora_rank=80,
    num_hidden_layers=2, compress_ratios=(4, 128, 0), num_nextn_predict_layers=1,
)  # fmt: skip

# The formats, from their definitions ----------------------------------------------------------------------

E4M3 = [math.ldexp(m / 8 if e == 0 else 1 + m / 8, max(e, 1) - 7) for e in range(16) for m in range(8)]
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0]
GRIDS = {"F8_E4M3": (np.array(E4M3), 448.0, (128, 128)), "I8": (np.array(E2M1), 6.0, (1, 32))}
"""Values in the order of their codes and one beyond the largest, the largest, the block."""


def to_grid(x: np.ndarray, grid: np.ndarray) -> np.ndarray:
    """The nearest values; halfway the one with the even code, which has the even digit."""
    above = np.clip(np.searchsorted(grid, np.abs(x)), 1, len(grid) - 1)
    low, high = grid[above - 1], grid[above]
    middle = (low + high) / 2
    up = (np.abs(x) > middle) | ((np.abs(x) == middle) & (above % 2 == 0))
    return np.copysign(np.where(up, high, low), x)


def rounded(x: np.ndarray, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """What quantising leaves of a matrix, and the scale codes."""
    grid, largest, (height, width) = GRIDS[dtype]
    out, codes = np.zeros(x.shape), []
    for row, column in itertools.product(range(0, x.shape[0], height), range(0, x.shape[1], width)):
        block = x[row : row + height, column : column + width].astype(np.float64)
        code, peak = 127, np.abs(block).max()
        if peak:
            code = int(np.log2(peak / largest)) + 124  # surely too small
            while to_grid(peak / 2.0 ** (code - 127), grid) > largest:
                code += 1
        scale = 2.0 ** (code - 127)
        out[row : row + height, column : column + width] = to_grid(block / scale, grid) * scale
        codes.append(code)
    return out, np.array(codes, np.uint8).reshape(-(-x.shape[0] // height), -1)


# The tensors of the released Flash: a CSA layer with hash routing, an HCA layer with learned routing --------

FP8, FP4, SCALE = "F8_E4M3", "I8", "F8_E8M0"
LISTING = {
    "embed.weight": ("BF16", (129280, 4096)),
    "head.weight": ("BF16", (129280, 4096)),
    "hc_head_base": ("F32", (4,)),
    "hc_head_fn": ("F32", (4, 16384)),
    "hc_head_scale": ("F32", (1,)),
    "norm.weight": ("BF16", (4096,)),
    "layers.2.attn.attn_sink": ("F32", (64,)),
    "layers.2.attn.kv_norm.weight": ("BF16", (512,)),
    "layers.2.attn.q_norm.weight": ("BF16", (1024,)),
    "layers.2.attn.wkv.weight": (FP8, (512, 4096)),
    "layers.2.attn.wkv.scale": (SCALE, (4, 32)),
    "layers.2.attn.wo_a.weight": (FP8, (8192, 4096)),
    "layers.2.attn.wo_a.scale": (SCALE, (64, 32)),
    "layers.2.attn.wo_b.weight": (FP8, (4096, 8192)),
    "layers.2.attn.wo_b.scale": (SCALE, (32, 64)),
    "layers.2.attn.wq_a.weight": (FP8, (1024, 4096)),
    "layers.2.attn.wq_a.scale": (SCALE, (8, 32)),
    "layers.2.attn.wq_b.weight": (FP8, (32768, 1024)),
    "layers.2.attn.wq_b.scale": (SCALE, (256, 8)),
    "layers.2.attn_norm.weight": ("BF16", (4096,)),
    "layers.2.ffn.experts.255.w1.weight": (FP4, (2048, 2048)),
    "layers.2.ffn.experts.255.w1.scale": (SCALE, (2048, 128)),
    "layers.2.ffn.experts.255.w2.weight": (FP4, (4096, 1024)),
    "layers.2.ffn.experts.255.w2.scale": (SCALE, (4096, 64)),
    "layers.2.ffn.experts.255.w3.weight": (FP4, (2048, 2048)),
    "layers.2.ffn.experts.255.w3.scale": (SCALE, (2048, 128)),
    "layers.2.ffn.gate.weight": ("BF16", (256, 4096)),
    "layers.2.ffn.gate.tid2eid": ("I64", (129280, 6)),
    "layers.3.ffn.gate.bias": ("F32", (256,)),
    "layers.2.ffn.shared_experts.w1.weight": (FP8, (2048, 4096)),
    "layers.2.ffn.shared_experts.w1.scale": (SCALE, (16, 32)),
    "layers.2.ffn.shared_experts.w2.weight": (FP8, (4096, 2048)),
    "layers.2.ffn.shared_experts.w2.scale": (SCALE, (32, 16)),
    "layers.2.ffn.shared_experts.w3.weight": (FP8, (2048, 4096)),
    "layers.2.ffn.shared_experts.w3.scale": (SCALE, (16, 32)),
    "layers.2.ffn_norm.weight": ("BF16", (4096,)),
    "layers.2.hc_attn_base": ("F32", (24,)),
    "layers.2.hc_attn_fn": ("F32", (24, 16384)),
    "layers.2.hc_attn_scale": ("F32", (3,)),
    "layers.2.hc_ffn_base": ("F32", (24,)),
    "layers.2.hc_ffn_fn": ("F32", (24, 16384)),
    "layers.2.hc_ffn_scale": ("F32", (3,)),
    "layers.2.attn.compressor.ape": ("F32", (4, 1024)),
    "layers.2.attn.compressor.norm.weight": ("BF16", (512,)),
    "layers.2.attn.compressor.wgate.weight": ("BF16", (1024, 4096)),
    "layers.2.attn.compressor.wkv.weight": ("BF16", (1024, 4096)),
    "layers.3.attn.compressor.ape": ("F32", (128, 512)),
    "layers.3.attn.compressor.wgate.weight": ("BF16", (512, 4096)),
    "layers.3.attn.compressor.wkv.weight": ("BF16", (512, 4096)),
    "layers.2.attn.indexer.compressor.ape": ("F32", (4, 256)),
    "layers.2.attn.indexer.compressor.norm.weight": ("BF16", (128,)),
    "layers.2.attn.indexer.compressor.wgate.weight": ("BF16", (256, 4096)),
    "layers.2.attn.indexer.compressor.wkv.weight": ("BF16", (256, 4096)),
    "layers.2.attn.indexer.weights_proj.weight": ("BF16", (64, 4096)),
    "layers.2.attn.indexer.wq_b.weight": (FP8, (8192, 1024)),
    "layers.2.attn.indexer.wq_b.scale": (SCALE, (64, 8)),
    "mtp.0.e_proj.weight": (FP8, (4096, 4096)),
    "mtp.0.e_proj.scale": (SCALE, (32, 32)),
    "mtp.0.enorm.weight": ("BF16", (4096,)),
    "mtp.0.h_proj.weight": (FP8, (4096, 4096)),
    "mtp.0.h_proj.scale": (SCALE, (32, 32)),
    "mtp.0.hnorm.weight": ("BF16", (4096,)),
    "mtp.0.hc_head_base": ("F32", (4,)),
    "mtp.0.hc_head_fn": ("F32", (4, 16384)),
    "mtp.0.hc_head_scale": ("F32", (1,)),
    "mtp.0.norm.weight": ("BF16", (4096,)),
    "mtp.0.ffn.experts.0.w1.weight": (FP4, (2048, 2048)),
    "mtp.0.ffn.gate.bias": ("F32", (256,)),
}
TOTALS = {  # tensors and bytes of each dtype in the whole release, the MTP layer included
    "BF16": (433, 2_830_518_528),
    "F32": (417, 144_672_072),
    FP8: (375, 6_023_020_544),
    SCALE: (34_167, 8_858_737_664),
    FP4: (33_792, 141_733_920_768),
    "I64": (3, 18_616_320),
}
IN_FILE = {
    "bfloat16": "BF16", "float32": "F32", "float8_e4m3fn": FP8, "float8_e8m0fnu": SCALE,
    "int8": FP4, "int64": "I64",
}  # fmt: skip


def released(name: str) -> str:
    """The dtype that the release gives a tensor of this kind, by the listing."""
    by_kind = {re.sub(r"\d+", "", listed): dtype for listed, (dtype, _) in LISTING.items()}
    kind = re.sub(r"\d+", "", name)
    return by_kind.get(kind) or by_kind[re.sub("^mtp", "layers", kind)]


def test_flash_is_written_with_the_tensors_of_its_release() -> None:
    """Names, dtypes and shapes; the model has no values, so nothing of its 1.1 TB is allocated."""
    found = layout(Model(flash(), seed=None), quantised=True)
    assert {name: (IN_FILE[found[name][0].name], found[name][1]) for name in LISTING} == LISTING
    count, size = Counter(), Counter()
    for dtype, shape in found.values():
        count[IN_FILE[dtype.name]] += 1
        size[IN_FILE[dtype.name]] += dtype.itemsize * math.prod(shape)
    assert {dtype: (count[dtype], size[dtype]) for dtype in count} == TOTALS
    assert len(layout(Model(pro(), seed=None), quantised=True)) == 145_116


# Raw files ------------------------------------------------------------------------------------------------

Raw = dict[str, tuple[str, list[int], bytes]]


def read_raw(path: Path) -> Raw:
    """Name -> dtype, shape, bytes: the format by its own definition."""
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    header.pop("__metadata__", None)
    data = content[8 + size :]
    return {n: (e["dtype"], e["shape"], data[slice(*e["data_offsets"])]) for n, e in header.items()}


def edit(folder: Path, change: Callable[[Raw], object]) -> None:
    """Rewrites the single file of a folder."""
    raw = read_raw(folder / SINGLE)
    change(raw)
    header, at = {}, 0
    for name, (dtype, shape, data) in raw.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(header).encode()
    parts = [len(text).to_bytes(8, "little"), text, *(data for _, _, data in raw.values())]
    (folder / SINGLE).write_bytes(b"".join(parts))


def decode(raw: Raw, name: str) -> np.ndarray:
    """A quantised matrix in float64, by the definitions above."""
    dtype, shape, data = raw[name]
    grid, _, (height, width) = GRIDS[dtype]
    code = np.frombuffer(data, np.uint8).reshape(shape)
    if dtype == FP4:
        code = np.stack([code & 15, code >> 4], axis=-1).reshape(shape[0], -1)
    sign = len(grid) // 2 * 2 if dtype == FP8 else 8
    values = np.where(code >= sign, -1.0, 1.0) * grid[code % sign]
    _, scale_shape, scales = raw[name.replace(".weight", ".scale")]
    exponent = np.frombuffer(scales, np.uint8).reshape(scale_shape).astype(int) - 127
    spread = np.repeat(np.repeat(exponent, height, axis=0), width, axis=1)
    return values * 2.0 ** spread[: values.shape[0], : values.shape[1]]


# Models ---------------------------------------------------------------------------------------------------


def uneven(config: ModelConfig, numerics: Numerics | None = None, seed: int = 0) -> Model:
    """A model whose matrices differ in size from block to block, with a block of zeros and some -0."""
    model, rng = Model(config, numerics, seed=seed), np.random.default_rng(seed)
    for _, node in nnx.iter_graph(model):
        if isinstance(node, nnx.Variable) and node.ndim > 1 and np.issubdtype(node.dtype, np.floating):
            values = np.array(node[...], np.float32) * np.exp(2 * rng.standard_normal(node.shape, np.float32))
            values[..., :32, :1] = 0
            values[..., -1:, -1:] = -0.0
            node.set_value(jax.numpy.array(values.astype(node.dtype)))
    return model


@pytest.fixture(scope="module")
def model() -> Model:
    return uneven(CONFIG)


@pytest.fixture
def folder(model: Model, tmp_path: Path) -> Path:
    save_checkpoint(model, CONFIG, tmp_path / "quantised", quantised=True)
    return tmp_path / "quantised"


def bits(model: Model) -> dict[str, bytes]:
    return {name: value.tobytes() for name, value in state_dict(model).items()}


@pytest.mark.parametrize(("dtype", "shard_bytes"), [("float32", None), ("bfloat16", 40_000)])
def test_loading_what_was_saved_gives_the_rounded_weights(
    tmp_path: Path, dtype: str, shard_bytes: int | None
) -> None:
    """Every bit, zeros and their signs included; the rounding is the float64 one above."""
    numerics = Numerics(dtype=dtype)
    model = uneven(CONFIG, numerics)
    save_checkpoint(model, CONFIG, tmp_path, quantised=True, shard_bytes=shard_bytes)
    _, loaded = load_checkpoint(tmp_path, numerics=numerics)
    before, after = state_dict(model), state_dict(loaded)
    assert before.keys() == after.keys()
    changed = 0
    for name, old in before.items():
        new, kind = after[name], released(name)
        if kind in GRIDS:
            want = rounded(old, kind)[0].astype(np.float32).astype(old.dtype)
            changed += int(np.sum(want != old))
        else:
            want = old.astype(np.dtype(ml_dtypes.bfloat16) if kind == "BF16" else old.dtype).astype(old.dtype)
        assert new.tobytes() == want.tobytes(), name
    assert changed > 100_000  # the comparison is not of weights that were on the grid before


def test_scales_are_the_smallest_that_hold_their_block(folder: Path, model: Model) -> None:
    raw, before = read_raw(folder / SINGLE), state_dict(model)
    for name in ("layers.1.attn.wo_a.weight", "layers.1.ffn.shared_experts.w2.weight", "mtp.0.e_proj.weight",
                 "layers.0.ffn.experts.3.w1.weight", "layers.0.ffn.experts.0.w2.weight"):  # fmt: skip
        dtype, _, scales = raw[name.replace(".weight", ".scale")]
        want = rounded(before[name], raw[name][0])[1]
        assert (dtype, scales) == (SCALE, want.tobytes())
        assert len(np.unique(want)) > 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_saving_what_was_loaded_gives_the_same_bytes(tmp_path: Path, folder: Path, dtype: str) -> None:
    config, loaded = load_checkpoint(folder, numerics=Numerics(dtype=dtype))
    save_checkpoint(loaded, config, tmp_path / "again", quantised=True)
    for file in (SINGLE, "config.json"):
        assert (tmp_path / "again" / file).read_bytes() == (folder / file).read_bytes()


@settings(max_examples=max(EXAMPLES // 10, 5))
@given(seed=st.integers(0, 2**16))
def test_any_quantised_file_is_read_exactly_and_saved_without_loss(
    tmp_path_factory: pytest.TempPathFactory, seed: int
) -> None:
    """Random codes and scales, also such as `save_checkpoint` would not choose, against the definitions."""
    folder, rng = tmp_path_factory.mktemp("random"), np.random.default_rng(seed)
    config = micro()
    save_checkpoint(Model(config), config, folder / "a", quantised=True)

    def randomise(raw: Raw) -> None:
        for name, (dtype, shape, data) in raw.items():
            code = rng.integers(0, 256, len(data), np.uint8)
            if dtype == FP8:
                code[code & 127 == 127] = 0  # NaN
            elif dtype == SCALE:
                code = rng.integers(0, 247, len(data), np.uint8)
            if dtype in (FP8, FP4, SCALE):
                raw[name] = (dtype, shape, code.tobytes())

    edit(folder / "a", randomise)
    _, loaded = load_checkpoint(folder / "a")
    raw, found = read_raw(folder / "a" / SINGLE), state_dict(loaded)
    for name in (name for name, (dtype, _, _) in raw.items() if dtype in GRIDS):
        want = decode(raw, name)
        assert (want.astype(np.float32) == want).all()  # float32 holds it
        assert found[name].tobytes() == want.astype(np.float32).tobytes(), name
    save_checkpoint(loaded, config, folder / "b", quantised=True)
    assert bits(load_checkpoint(folder / "b")[1]) == bits(loaded)


def test_every_fp8_value_under_every_scale() -> None:
    """256 bytes under 255 codes: exact products, and an error for each that float32 cannot hold."""
    byte = np.arange(256, dtype=np.uint8)[None]
    value = np.where(byte >= 128, -1.0, 1.0) * GRIDS[FP8][0][byte % 128]
    for code in range(255):
        want = value[0] * 2.0 ** (code - 127)
        fits = (byte[0] & 127 != 127) & (np.abs(want) < 2.0**128)
        scale = formats.power_of_two(np.full((1, 2), code, np.uint8))
        got = formats.dequantise("x", byte[:, fits], formats.FP8, scale, first=0, inputs=int(fits.sum()))
        assert got.astype(np.float64).tobytes() == want[fits][None].tobytes(), code
        for bad in np.flatnonzero(~fits):
            with pytest.raises(CheckpointError, match=r"x is NaN or too large for float32 at \[0, 0\]"):
                formats.dequantise("x", byte[:, bad : bad + 1], formats.FP8, scale, first=0, inputs=1)


def test_a_block_is_not_its_neighbour(folder: Path) -> None:
    """Control: with scales taken from the next block, or the halves of a byte swapped, weights differ."""
    raw = read_raw(folder / SINGLE)
    for name in ("layers.1.ffn.shared_experts.w2.weight", "layers.0.ffn.experts.3.w1.weight"):
        scale, right = name.replace(".weight", ".scale"), decode(raw, name)
        dtype, shape, data = raw[scale]
        moved = np.roll(np.frombuffer(data, np.uint8).reshape(shape), 1, axis=1)
        assert not np.array_equal(decode({**raw, scale: (dtype, shape, moved.tobytes())}, name), right)
    dtype, shape, data = raw[name]
    swapped = np.frombuffer(data, np.uint8)
    swapped = (swapped << 4 | swapped >> 4).tobytes()
    assert not np.array_equal(decode({**raw, name: (dtype, shape, swapped)}, name), right)


def test_some_tensors_may_be_quantised_and_others_not(folder: Path) -> None:
    """A projection and an expert in plain float32, and an expert in FP8 with float32 scales."""
    raw, before = read_raw(folder / SINGLE), bits(load_checkpoint(folder)[1])
    plain = ["layers.1.attn.wq_a.weight", "layers.1.ffn.experts.2.w1.weight"]
    other = "layers.0.ffn.experts.1.w2.weight"  # [160, 144]

    def change(raw: Raw) -> None:
        for name in plain:
            values = decode(raw, name).astype(np.float32)
            raw[name] = ("F32", list(values.shape), values.tobytes())
            del raw[name.replace(".weight", ".scale")]
        code = np.arange(160 * 144, dtype=np.uint8).reshape(160, 144) % 127
        scale = np.array([[0.75, 3.0], [1e-3, 2.0]], np.float32)
        raw[other] = (FP8, [160, 144], code.tobytes())
        raw[other.replace(".weight", ".scale")] = ("F32", [2, 2], scale.tobytes())

    edit(folder, change)
    after = bits(load_checkpoint(folder)[1])
    assert {name for name in before if before[name] != after[name]} == {other}
    value = GRIDS[FP8][0][np.arange(160 * 144).reshape(160, 144) % 256 % 127].astype(np.float32)
    value[:128, :128] *= np.float32(0.75)
    value[:128, 128:] *= np.float32(3)
    value[128:, :128] *= np.float32(1e-3)  # a product that is rounded, once
    value[128:, 128:] *= np.float32(2)
    assert after[other] == value.tobytes()
    assert raw[plain[0]][0] == FP8 and raw[plain[1]][0] == FP4


def test_the_configuration_says_that_the_file_is_quantised(folder: Path, tmp_path: Path) -> None:
    said = json.loads((folder / "config.json").read_text())
    assert said["quantization_config"]["weight_block_size"] == [128, 128]
    assert (said["quantization_config"]["scale_fmt"], said["expert_dtype"]) == ("ue8m0", "fp4")
    config, loaded = load_checkpoint(folder)
    save_checkpoint(loaded, config, tmp_path / "plain")
    assert json.loads((tmp_path / "plain" / "config.json").read_text()) == CONFIG.to_json()
    assert bits(load_checkpoint(tmp_path / "plain")[1]) == bits(loaded)


# What does not fit ----------------------------------------------------------------------------------------

NAME, EXPERT = "layers.1.attn.wkv.weight", "layers.1.ffn.experts.2.w1.weight"  # [32, 160], [144, 160]


def refused(folder: Path, *parts: str) -> None:
    """Loading raises one error that names every part."""
    with pytest.raises(CheckpointError) as error:
        load_checkpoint(folder)
    for part in parts:
        assert part in str(error.value)


def put(name: str, dtype: str, shape: list[int], fill: bytes = b"\1") -> Callable[[Raw], object]:
    return lambda raw: raw.update({name: (dtype, shape, fill * math.prod(shape))})


@pytest.mark.parametrize("name", [NAME, EXPERT])
def test_a_missing_scale(folder: Path, name: str) -> None:
    scale = name.replace(".weight", ".scale")
    edit(folder, lambda raw: raw.pop(scale))
    refused(folder, f"quantised without its scale: {scale}")


@pytest.mark.parametrize(("name", "want"), [(NAME, [1, 2]), (EXPERT, [144, 5])])
def test_scales_of_another_shape(folder: Path, name: str, want: list[int]) -> None:
    scale = name.replace(".weight", ".scale")
    edit(folder, put(scale, SCALE, want[::-1]))
    refused(folder, f"other shape: {scale} expected {want}, found {want[::-1]}")


def test_a_scale_without_a_quantised_weight(folder: Path) -> None:
    edit(folder, put(NAME, "F32", [32, 160], bytes(4)))
    refused(folder, "scale of no quantised weight: layers.1.attn.wkv.scale")
    edit(folder, lambda raw: raw.pop(NAME))
    refused(folder, f"missing: {NAME} [32, 160]", "scale of no quantised weight: layers.1.attn.wkv.scale")
    edit(folder, put("layers.1.attn.what.scale", SCALE, [1, 1]))
    refused(folder, "unknown: layers.1.attn.what.scale [1, 1]")


def test_a_packed_width_that_does_not_fit(folder: Path) -> None:
    edit(folder, put(EXPERT, FP4, [144, 160]))
    refused(folder, f"other shape: {EXPERT} expected [144, 80], found [144, 160]")


@pytest.mark.parametrize("name", [NAME, EXPERT])
def test_the_scale_code_of_nan(folder: Path, name: str) -> None:
    scale = name.replace(".weight", ".scale")

    def spoil(raw: Raw) -> None:
        dtype, shape, data = raw[scale]
        raw[scale] = (dtype, shape, data[:1] + b"\xff" + data[2:])

    edit(folder, spoil)
    refused(folder, f"{scale} is NaN (code 255) or infinite at [0, 1]")


def test_a_weight_of_nan(folder: Path) -> None:
    """At its own row, although rows are read from the middle of a matrix and by group."""
    name = "layers.1.attn.wo_a.weight"  # 2 groups of 80 rows, 64 inputs

    def spoil(raw: Raw) -> None:
        dtype, shape, data = raw[name]
        at = 90 * 64 + 3
        raw[name] = (dtype, shape, data[:at] + b"\x7f" + data[at + 1 :])

    edit(folder, spoil)
    refused(folder, f"{name} is NaN or too large for float32 at [90, 3]")


@pytest.mark.parametrize("dtype", ["U8", "F8_E5M2", "F8_E8M0", "BOOL"])
def test_an_unknown_dtype(folder: Path, dtype: str) -> None:
    edit(folder, put(NAME, dtype, [32, 160]))
    refused(folder, f"other dtype: {NAME} expected float32, found {dtype}")


@pytest.mark.parametrize("dtype", ["BF16", "U8"])
def test_scales_of_an_unknown_dtype(folder: Path, dtype: str) -> None:
    edit(folder, put("layers.1.attn.wkv.scale", dtype, [1, 2], b"\1\1" if dtype == "BF16" else b"\1"))
    refused(folder, f"other dtype: layers.1.attn.wkv.scale expected F8_E8M0 or F32, found {dtype}")


@pytest.mark.parametrize("name", ["layers.1.attn_norm.weight", "layers.0.ffn.gate.tid2eid"])
def test_only_matrices_are_quantised(folder: Path, name: str) -> None:
    edit(folder, lambda raw: raw.update({name: (FP8, raw[name][1], bytes(math.prod(raw[name][1])))}))
    refused(folder, f"other dtype: {name}", f"found {FP8}")


def test_what_cannot_be_written(model: Model, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="quantised=True needs names='published', got names='transformers'"):
        save_checkpoint(Model(tiny()), tiny(), tmp_path / "new", names="transformers", quantised=True)
    assert not (tmp_path / "new").exists()
    broken = uneven(CONFIG)
    broken.layers[1].moe.up[...] = broken.layers[1].moe.up[...].at[2, 5, 7].set(np.inf)
    with pytest.raises(
        CheckpointError, match=r"layers\.1\.ffn\.experts\.2\.w3\.weight holds NaN or infinities"
    ):
        save_checkpoint(broken, CONFIG, tmp_path / "new", quantised=True)


# Memory ---------------------------------------------------------------------------------------------------

LARGE = replace(
    CONFIG, vocab_size=4096, hidden_size=1024, n_routed_experts=32, moe_intermediate_size=512,
    num_hidden_layers=1, compress_ratios=(4,), num_hash_layers=0, num_nextn_predict_layers=0,
)  # fmt: skip
"""A parameter is much larger than the largest tensor: 32 experts of [512, 1024] against [4096, 1024]."""

CHILD = """
    import contextlib, json, sys
    from pathlib import Path
    import jax, jax.numpy as jnp, numpy as np
    from goldenkv.model import checkpoint, checkpoint_files, checkpoint_quantised as q

    def kilobytes(key):
        return int(next(x for x in open("/proc/self/status") if x.startswith(key)).split()[1])

    warm, folder, how = sys.argv[1:]
    checkpoint.load_checkpoint(warm)
    before = kilobytes("VmRSS")
    if how == "copy":  # every parameter once more
        checkpoint.jax = type("copying", (), {"device_put": staticmethod(jnp.array)})
    everything = {}
    if how == "everything":  # all tensors in float32, then the model
        with contextlib.ExitStack() as stack:
            tensors = checkpoint_files.open_tensors(Path(folder), stack, skip=())
            for name, tensor in tensors.items():
                values = tensor.read()
                if tensor.dtype in q.FORMATS:
                    form, scale = q.FORMATS[tensor.dtype], name.replace(".weight", ".scale")
                    inputs = tensor.shape[1] * form.packed
                    scales = q.read_scale(scale, tensors[scale])
                    values = q.dequantise(name, values, form, scales, first=0, inputs=inputs)
                everything[name] = values.astype(np.float32)
    config, model = checkpoint.load_checkpoint(folder)
    jax.block_until_ready(jax.tree.leaves(model))
    print(json.dumps({"grown": 1024 * (kilobytes("VmHWM") - before)}))
"""


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("large")
    save_checkpoint(Model(LARGE, seed=1), LARGE, folder / "large", quantised=True)
    save_checkpoint(Model(micro(), seed=1), micro(), folder / "warm", quantised=True)
    return folder


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from /proc")
@pytest.mark.parametrize("how", ["plain", "copy", "everything"])
def test_peak_memory(large: Path, how: str) -> None:
    """Loading grows a process by less than the model in float32 and its largest tensor; two controls by more.

    The start is what the process holds after loading a tiny checkpoint: interpreter, JAX and its caches.
    """
    shapes = layout(Model(LARGE, seed=None))
    sizes = [4 * math.prod(shape) for _, shape in shapes.values()]
    command = [sys.executable, "-c", textwrap.dedent(CHILD), large / "warm", large / "large", how]
    out = subprocess.run(command, capture_output=True, text=True)
    assert out.returncode == 0, out.stderr
    grown, limit = json.loads(out.stdout)["grown"], sum(sizes) + max(sizes)
    print(f"{how}: {grown / 1e6:.1f} MB, limit {limit / 1e6:.1f} MB, model {sum(sizes) / 1e6:.1f} MB")
    assert (grown < limit) == (how == "plain"), (grown, sum(sizes), max(sizes))
    assert grown > 0.9 * sum(sizes)  # the model is in the measurement
