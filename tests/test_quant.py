"""Fake quantisation and the Hadamard transform: bit for bit against the published definition."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from goldenkv.ops import quant


class Format(NamedTuple):
    """A grid, and the key of the golden file that holds it."""

    fake: Callable
    quantise: Callable
    round_grid: Callable
    dtype: type
    block: int
    largest: float
    golden: str

    def values(self) -> np.ndarray:
        """Every value of the format, as float32."""
        codes = np.arange(16 if self.dtype == ml_dtypes.float4_e2m1fn else 256, dtype=np.uint8)
        return codes.view(self.dtype).astype(np.float32)


E4M3 = Format(
    quant.fake_quantise_e4m3, quant.quantise_e4m3, quant.round_e4m3,
    ml_dtypes.float8_e4m3fn, 64, 448.0, "fp8_block64",
)  # fmt: skip
E2M1 = Format(
    quant.fake_quantise_e2m1, quant.quantise_e2m1, quant.round_e2m1,
    ml_dtypes.float4_e2m1fn, 32, 6.0, "fp4_block32",
)  # fmt: skip
each_format = pytest.mark.parametrize("form", [E4M3, E2M1], ids=["e4m3", "e2m1"])


def bits(x) -> np.ndarray:
    return np.asarray(x, np.float32).view(np.uint32)


def assert_same_bits(left, right) -> None:
    np.testing.assert_array_equal(bits(left), bits(right))


@pytest.fixture(scope="module")
def published(golden_dir: Path) -> dict[str, np.ndarray]:
    return load_file(golden_dir.parent / "quantisers.safetensors")


@each_format
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "jit"])
def test_equals_the_published_definition(published, form: Format, compiled: bool) -> None:
    fake, quantise = (jax.jit(f) if compiled else f for f in (form.fake, form.quantise))
    x = jnp.asarray(published["x"])
    assert_same_bits(fake(x), published[f"{form.golden}.dequantised"])
    np.testing.assert_array_equal(np.asarray(quantise(x)[1]), published[f"{form.golden}.scale_code"])


@each_format
def test_every_code_is_a_fixed_point(form: Format) -> None:
    """All 256 E4M3 and all 16 E2M1 codes: -0 stays -0, and the two NaN codes of E4M3 stay NaN."""
    values = form.values()
    rounded = np.asarray(form.round_grid(jnp.asarray(values)))
    finite = np.isfinite(values)
    assert_same_bits(rounded[finite], values[finite])
    assert np.isnan(rounded[~finite]).all()


@each_format
def test_rounding_equals_a_cast(form: Format) -> None:
    """Every tie of the grid, one float32 step to either side of it, and numbers in between."""
    values = form.values()
    grid = np.unique(np.abs(values[np.isfinite(values)])).astype(np.float64)
    ties = ((grid[1:] + grid[:-1]) / 2).astype(np.float32)
    between = np.random.default_rng(0).uniform(0, form.largest, 2000).astype(np.float32)
    around = [ties, np.nextafter(ties, np.float32(0)), np.nextafter(ties, np.float32(np.inf))]
    x = np.concatenate([*around, between, np.float32([0, 1e-40, 1e-30])])
    x = np.concatenate([x, -x])
    assert_same_bits(form.round_grid(jnp.asarray(x)), x.astype(form.dtype).astype(np.float32))


@each_format
def test_no_rows(form: Format) -> None:
    values, codes = form.quantise(jnp.zeros((0, 2 * form.block)))
    assert values.shape == (0, 2 * form.block) and codes.shape == (0, 2)
    assert form.fake(jnp.zeros((3, 0, form.block))).shape == (3, 0, form.block)


@each_format
def test_clamps(form: Format) -> None:
    x = np.float32([form.largest * 1.2, -form.largest * 1e9, np.inf, -np.inf])
    assert_same_bits(form.round_grid(jnp.asarray(x)), np.copysign(np.float32(form.largest), x))


@each_format
def test_zeros_keep_their_sign(form: Format) -> None:
    x = np.zeros((2, form.block), np.float32)
    x[:, 1::2] = -0.0
    x[1, 0] = 3.0
    assert_same_bits(form.fake(jnp.asarray(x)), x)


@each_format
@pytest.mark.parametrize("broken", [np.nan, -np.nan, np.inf, -np.inf])
def test_a_broken_block_is_nan_and_its_neighbours_are_not_touched(form: Format, broken: float) -> None:
    x = np.random.default_rng(1).standard_normal((3, 2 * form.block)).astype(np.float32)
    clean = np.asarray(form.fake(jnp.asarray(x)))
    x[1, 5] = broken
    got = np.array(form.fake(jnp.asarray(x)))
    assert np.isnan(got[1, : form.block]).all()
    got[1, : form.block] = clean[1, : form.block]
    assert_same_bits(got, clean)
    assert int(form.quantise(jnp.asarray(x))[1][1, 0]) == quant.NAN_CODE


@each_format
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_twice_is_once_and_jit_is_eager(form: Format, dtype: str) -> None:
    rng = np.random.default_rng(2)
    scale = 2.0 ** rng.uniform(-30, 30, (64, 1))
    x = jnp.asarray(rng.standard_normal((64, 3 * form.block)) * scale, jnp.dtype(dtype))
    once = form.fake(x)
    assert once.dtype == x.dtype
    assert_same_bits(form.fake(once), once)
    assert_same_bits(jax.jit(form.fake)(x), once)


@each_format
def test_a_shorter_last_block_stands_alone(form: Format) -> None:
    x = np.random.default_rng(3).standard_normal((4, form.block + 8)).astype(np.float32)
    x[:, form.block :] *= 1000
    parts = [form.fake(jnp.asarray(part)) for part in np.split(x, [form.block], axis=1)]
    assert_same_bits(form.fake(jnp.asarray(x)), np.concatenate(parts, axis=1))
    assert form.quantise(jnp.asarray(x))[1].shape == (4, 2)


@pytest.mark.parametrize("largest", [448, 6])
def test_a_division_gives_the_same_code(largest: int) -> None:
    """Over every mantissa: reciprocal, division and exact arithmetic agree. Powers of two only shift them."""
    peak = (np.arange(1 << 23, dtype=np.int32) | (127 << 23)).view(np.float32)
    exponent = int(np.floor(np.log2(largest)))
    exact = np.where(peak > largest / 2**exponent, 1, 0) + 127 - exponent
    for quotient in (peak * np.float32(1 / largest), peak / np.float32(largest)):
        np.testing.assert_array_equal(np.asarray(quant.ceil_exponent(jnp.asarray(quotient))), exact)


def test_powers_of_two_are_exact() -> None:
    codes = np.arange(1, 255, dtype=np.int32)
    got = np.asarray(quant.power_of_two(jnp.asarray(codes)))
    np.testing.assert_array_equal(got.astype(np.float64), 2.0 ** (codes.astype(np.float64) - 127))
    np.testing.assert_array_equal(np.asarray(quant.ceil_exponent(jnp.asarray(got))), codes)
    above = np.nextafter(got, np.float32(np.inf))
    np.testing.assert_array_equal(np.asarray(quant.ceil_exponent(jnp.asarray(above))), codes + 1)
    assert np.isnan(quant.power_of_two(jnp.asarray([quant.NAN_CODE], jnp.int32))[0])


@pytest.mark.parametrize("size", [64, 128])
def test_hadamard_equals_float64(published, size: int) -> None:
    got = quant.hadamard(jnp.asarray(published[f"hadamard{size}.x"]))
    np.testing.assert_allclose(np.asarray(got), published[f"hadamard{size}.y_float64"], rtol=0, atol=1e-6)


@pytest.mark.parametrize("size", [1, 2, 8, 128])
def test_hadamard_is_sylvester_and_its_own_inverse(size: int) -> None:
    matrix = np.ones((1, 1))
    while len(matrix) < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    x = np.random.default_rng(4).standard_normal((5, size)).astype(np.float32)
    got = quant.hadamard(jnp.asarray(x))
    np.testing.assert_allclose(np.asarray(got), x.astype(np.float64) @ matrix * size**-0.5, rtol=0, atol=1e-6)
    np.testing.assert_allclose(np.asarray(quant.hadamard(got)), x, rtol=0, atol=2e-6)


def test_hadamard_of_a_row_does_not_depend_on_other_rows() -> None:
    x = jnp.asarray(np.random.default_rng(5).standard_normal((33, 64)), jnp.float32)
    transform = jax.jit(quant.hadamard)
    for rows in (1, 2, 7, 32):
        assert_same_bits(transform(x[:rows]), transform(x)[:rows])


@pytest.mark.parametrize("size", [0, 12])
def test_hadamard_wants_a_power_of_two(size: int) -> None:
    with pytest.raises(ValueError, match=f"d={size} must be a power of two"):
        quant.hadamard(jnp.zeros((2, size)))


# INT4, for comparison ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", [32, 64])
def test_int4_equals_float64(block: int) -> None:
    """The nearest of the 15 levels of each block, to one rounding of the product."""
    x = np.random.default_rng(6).standard_normal((20, 2 * block)).astype(np.float32)
    x[3, :block] = 0
    got = np.asarray(quant.fake_quantise_int4(jnp.asarray(x), block)).reshape(-1, block)
    wide = x.astype(np.float64).reshape(-1, block)
    peak = np.abs(wide).max(axis=1, keepdims=True)
    scale = np.where(peak == 0, 1, peak) / 7
    np.testing.assert_allclose(got, np.round(wide / scale) * scale, rtol=2e-7, atol=0)
    assert all(len(np.unique(row)) <= 15 for row in got)
    assert (np.abs(got - wide) <= scale / 2 * (1 + 1e-6)).all()


def test_int4_edges() -> None:
    x = np.zeros((4, 64), np.float32)
    x[0, 3], x[1, 5], x[2, :2] = -0.0, np.inf, (1e-36, -1e-36)
    x[3, :3] = 7.0, 0.5, -0.1
    got = np.asarray(quant.fake_quantise_int4(jnp.asarray(x)))
    assert not got[0].view(np.uint32).any() and np.isnan(got[1]).all()
    assert got[2, 0] == -got[2, 1] != 0
    assert not np.asarray(quant.fake_quantise_int4(jnp.full((1, 64), 1e-38))).any()
    assert got[3, :3].tolist() == [7.0, 0.0, 0.0] and not np.signbit(got[3, 2])


def test_int4_is_coarser_than_e4m3_for_values_of_many_sizes() -> None:
    """An even grid loses the small values of a block; one with exponents keeps them."""
    x = jnp.asarray(np.exp(np.random.default_rng(7).standard_normal((64, 64)) * 2), jnp.float32)
    e4m3, int4 = (
        float(jnp.mean(jnp.abs(f(x) - x) / x)) for f in (quant.fake_quantise_e4m3, quant.fake_quantise_int4)
    )
    assert e4m3 < 0.04 and int4 > 0.3
