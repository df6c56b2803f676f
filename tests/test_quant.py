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
    fake: Callable
    quantise: Callable
    round_grid: Callable
    dtype: type
    block: int
    largest: float


E4M3 = Format(
    quant.fake_quantise_e4m3, quant.quantise_e4m3, quant.round_e4m3, ml_dtypes.float8_e4m3fn, 64, 448.0
)
E2M1 = Format(
    quant.fake_quantise_e2m1, quant.quantise_e2m1, quant.round_e2m1, ml_dtypes.float4_e2m1fn, 32, 6.0
)
each_format = pytest.mark.parametrize("form", [E4M3, E2M1], ids=["e4m3", "e2m1"])


def bits(x) -> np.ndarray:
    return np.asarray(x, np.float32).view(np.uint32)


def codes_of(dtype) -> np.ndarray:
    """Every value of a small float format, as float32."""
    count = 16 if dtype == ml_dtypes.float4_e2m1fn else 256
    return np.arange(count, dtype=np.uint8).view(dtype).astype(np.float32)


@pytest.fixture(scope="module")
def published(golden_dir: Path) -> dict[str, np.ndarray]:
    return load_file(golden_dir.parent / "quantisers.safetensors")


@each_format
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "jit"])
def test_equals_the_published_definition(published, form: Format, compiled: bool) -> None:
    key = {"e4m3": "fp8_block64", "e2m1": "fp4_block32"}[name]
    x = jnp.asarray(published["x"])
    if compiled:
        fake, quantise = jax.jit(fake), jax.jit(quantise)
    np.testing.assert_array_equal(bits(fake(x)), bits(published[f"{key}.dequantised"]))
    np.testing.assert_array_equal(np.asarray(quantise(x)[1]), published[f"{key}.scale_code"])


@each_format
def test_every_code_is_a_fixed_point(form: Format) -> None:
    values = codes_of(dtype)
    np.testing.assert_array_equal(bits(round_grid(jnp.asarray(values[np.isfinite(values)]))), bits(values[np.isfinite(values)]))
    assert np.isnan(np.asarray(round_grid(jnp.asarray(values)))).sum() == np.isnan(values).sum()


@each_format
def test_rounding_equals_a_cast(form: Format) -> None:
    """Every tie of the grid, and one float32 step to either side of it, and numbers in between."""
    grid = np.unique(np.abs(codes_of(dtype)[np.isfinite(codes_of(dtype))]))
    ties = ((grid[1:].astype(np.float64) + grid[:-1]) / 2).astype(np.float32)
    rng = np.random.default_rng(0)
    x = np.concatenate(
        [ties, np.nextafter(ties, np.float32(0)), np.nextafter(ties, np.float32(np.inf))]
        + [rng.uniform(0, largest, 2000).astype(np.float32), np.float32([0, 1e-40, 1e-30])]
    )
    x = np.concatenate([x, -x])
    np.testing.assert_array_equal(bits(round_grid(jnp.asarray(x))), bits(x.astype(dtype).astype(np.float32)))


@each_format
def test_clamps(form: Format) -> None:
    x = jnp.array([largest * 1.2, -largest * 1e9, np.inf, -np.inf], jnp.float32)
    np.testing.assert_array_equal(np.asarray(round_grid(x)), np.float32([largest, -largest, largest, -largest]))


@each_format
def test_zeros_keep_their_sign(form: Format) -> None:
    x = np.zeros((2, block), np.float32)
    x[:, 1::2] = -0.0
    x[1, 0] = 3.0
    np.testing.assert_array_equal(bits(fake(jnp.asarray(x))), bits(x))


@each_format
@pytest.mark.parametrize("broken", [np.nan, -np.nan, np.inf, -np.inf])
def test_a_broken_block_is_nan_and_the_others_are_not_touched(form: Format, broken: float) -> None:
    x = np.random.default_rng(1).standard_normal((3, 2 * block)).astype(np.float32)
    clean = np.asarray(fake(jnp.asarray(x)))
    x[1, 5] = broken
    got = np.asarray(fake(jnp.asarray(x)))
    assert np.isnan(got[1, :block]).all()
    got[1, :block] = clean[1, :block]
    np.testing.assert_array_equal(bits(got), bits(clean))
    assert int(quantise(jnp.asarray(x))[1][1, 0]) == quant.NAN_CODE


@each_format
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_twice_is_once_and_jit_is_eager(form: Format, dtype: str) -> None:
    rng = np.random.default_rng(2)
    scale = 2.0 ** rng.uniform(-30, 30, (64, 1))
    x = jnp.asarray(rng.standard_normal((64, 3 * block)) * scale, jnp.dtype(dtype))
    once = fake(x)
    assert once.dtype == x.dtype
    np.testing.assert_array_equal(bits(fake(once)), bits(once))
    np.testing.assert_array_equal(bits(jax.jit(fake)(x)), bits(once))


@each_format
def test_a_shorter_last_block_stands_alone(form: Format) -> None:
    x = np.random.default_rng(3).standard_normal((4, block + 8)).astype(np.float32)
    x[:, block:] *= 1000
    got = np.asarray(fake(jnp.asarray(x)))
    parts = [np.asarray(fake(jnp.asarray(part))) for part in (x[:, :block], x[:, block:])]
    np.testing.assert_array_equal(bits(got), bits(np.concatenate(parts, axis=1)))
    assert quantise(jnp.asarray(x))[1].shape == (4, 2)


@pytest.mark.parametrize("largest", [448, 6])
def test_a_division_gives_the_same_code(largest: int) -> None:
    """Over every mantissa: reciprocal, division and exact arithmetic agree (powers of two only shift them)."""
    peak = (np.arange(1 << 23, dtype=np.int32) | (127 << 23)).view(np.float32)
    by_reciprocal = np.asarray(quant.ceil_exponent(jnp.asarray(peak * np.float32(1 / largest))))
    by_division = np.asarray(quant.ceil_exponent(jnp.asarray(peak / np.float32(largest))))
    exponent = int(np.floor(np.log2(largest)))
    exact = np.where(peak > largest / 2**exponent, 1, 0) + 127 - exponent
    np.testing.assert_array_equal(by_reciprocal, exact)
    np.testing.assert_array_equal(by_division, exact)


def test_powers_of_two_are_exact() -> None:
    codes = np.arange(1, 255, dtype=np.int32)
    got = np.asarray(quant.power_of_two(jnp.asarray(codes)))
    np.testing.assert_array_equal(got.astype(np.float64), 2.0 ** (codes.astype(np.float64) - 127))
    np.testing.assert_array_equal(np.asarray(quant.ceil_exponent(jnp.asarray(got))), codes)
    above = np.nextafter(got[:-1], np.float32(np.inf))
    np.testing.assert_array_equal(np.asarray(quant.ceil_exponent(jnp.asarray(above))), codes[:-1] + 1)
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
        np.testing.assert_array_equal(bits(transform(x[:rows])), bits(transform(x))[:rows])


def test_hadamard_wants_a_power_of_two() -> None:
    with pytest.raises(ValueError, match="d=12 must be a power of two"):
        quant.hadamard(jnp.zeros((2, 12)))
