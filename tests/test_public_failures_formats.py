"""Faults that public trackers report of other implementations: number formats and their scales.

As in `test_public_failures.py`, each test states the right value for the whole kind of fault, and builds the
fault in where that is cheap, to show that the test would find it.
"""

from dataclasses import replace

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from goldenkv.ops import quant
from goldenkv.state import pack, row_format, unpack
from goldenkv.state import packing as packings
from goldenkv.state.formats import element_type

F32 = np.float32


def bits(rows: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(rows).view(np.dtype(f"u{rows.dtype.itemsize}"))


def codes_of(name: str, rows: np.ndarray) -> np.ndarray:
    """UE8M0 codes of rows [n, channels] that are quantised without rotated channels."""
    form = row_format(name, rows.shape[1])
    return packings.encode(rows, form, quantise=True)["scales"].view(np.uint8)


def as_one_row(value: float, channels: int = 64) -> np.ndarray:
    row = np.zeros((1, channels), F32)
    row[0, 0] = value
    return row


# (exponent bias, codes of NaN, largest value, whether there is a -0)
GRIDS = {
    "float8_e4m3fn": (7, {0x7F, 0xFF}, 448.0, True),
    "float8_e4m3fnuz": (8, {0x80}, 240.0, False),
    "float4_e2m1fn": (1, set(), 6.0, True),
}


def by_definition(code: int, dtype: str) -> float:
    bias, nan, _, _ = GRIDS[dtype]
    mantissa_bits, size = (1, 4) if dtype == "float4_e2m1fn" else (3, 8)
    if code in nan:
        return np.nan
    mantissa = (code & (1 << mantissa_bits) - 1) / (1 << mantissa_bits)
    exponent = code >> mantissa_bits & (1 << size - 1 - mantissa_bits) - 1
    magnitude = mantissa * 2.0 ** (1 - bias) if exponent == 0 else (1 + mantissa) * 2.0 ** (exponent - bias)
    return -magnitude if code >> size - 1 else magnitude


@pytest.mark.parametrize("name", ["fp8", "fp8_fnuz", "index_fp4"])
def test_row_61_every_code_of_every_format(name: str) -> None:
    """sgl-project/sglang#28455: 0x80 is -0 in E4M3 but NaN in the fnuz variant, whose largest value differs.

    Every code reads as its definition says, and every value is written as its code; -1e-9 never becomes NaN.
    """
    dtype = row_format(name, 64).field("values").dtype
    _, nan, largest, signed_zero = GRIDS[dtype]
    count = 16 if dtype == "float4_e2m1fn" else 256
    form = row_format(name, count)
    fields = packings.encode(np.zeros((1, count), F32), form)
    fields["values"] = np.arange(count, dtype=np.uint8).view(element_type(dtype))[None]
    fields["scales"] = np.ones_like(fields["scales"])
    rows = packings.decode(fields, form)
    expected = F32([[by_definition(code, dtype) for code in range(count)]])
    np.testing.assert_array_equal(rows, expected)
    finite = ~np.isnan(expected)
    assert (bits(rows)[finite] == bits(expected)[finite]).all()
    assert set(np.flatnonzero(~finite)) == nan and expected[finite].max() == largest

    # Back to the same codes, under the same scale: the largest value of each block must stay what it is.
    again = packings.encode(rows, form)
    back = packings.decode(again, form)
    assert (bits(back) == bits(rows)).all()

    for tiny in (-1e-9, -1e-30, -(2.0**-149), -0.0):
        row = as_one_row(tiny)
        got = unpack(pack(row, row_format(name, 64), quantise=True), row_format(name, 64))
        assert np.isfinite(got).all()
        # Half a step of E4M3 under the scale of the floor, or half of one of E2M1, whose floor is far lower.
        assert abs(got[0, 0] - tiny) <= max(2.0**-32, 0.25 * -tiny)
        assert np.signbit(got[0, 0]) == (got[0, 0] < 0 or signed_zero)

    if name == "fp8_fnuz":  # the fault: the sign bit put beside a magnitude of 0, and 448 taken as the limit
        assert np.isnan(np.uint8([0x80 | 0]).view(ml_dtypes.float8_e4m3fnuz).astype(F32)[0])
        assert np.isnan(F32([448.0]).astype(ml_dtypes.float8_e4m3fnuz).astype(F32)[0])
        full = unpack(pack(np.full((1, 64), -448.0, F32), form := row_format(name, 64), quantise=True), form)
        assert (full == -448.0).all()


@pytest.mark.parametrize("name", ["fp8", "fp8_fnuz", "fp8_v32", "index_fp8", "index_fp4"])
def test_row_62_a_block_of_zeros_has_a_finite_scale(name: str) -> None:
    """ROCm/aiter#4195: a block of zeros, or of padding, had a bad UE8M0 scale.

    Zeros of both signs, values below the floor, a short last block: finite scales, and zeros stay zeros.
    """
    channels = 160
    form = row_format(name, channels)
    rows = np.zeros((4, channels), F32)
    rows[1] = -0.0 if name != "fp8_fnuz" else 0.0
    rows[2, :32] = 1.0  # zeros beside a block that has values, and in the last, short block
    rows[3] = 2.0**-149
    fields = packings.encode(rows, form, quantise=True)
    scales = fields["scales"].astype(F32)
    assert np.isfinite(scales).all() and (scales > 0).all()
    got = packings.decode(fields, form)
    assert np.isfinite(got).all() and (got[3] == 0).all()
    assert (bits(got)[:3] == bits(rows)[:3]).all()
    assert (bits(unpack(pack(rows[:3], form), form)) == bits(rows[:3])).all()

    # The fault: without a floor the scale is 0, which UE8M0 does not have: a cast makes it NaN.
    no_floor = replace(form, scaling=replace(form.scaling, floor=0.0, power_of_two=False))
    broken = packings.encode(rows, no_floor, quantise=True)
    assert not (broken["scales"].astype(F32)[0] > 0).any()


def test_row_64_the_clamp_is_ours() -> None:
    """jax-ml/ml_dtypes#400: a cast to E4M3 takes 464 to 448 but 465 to NaN, where other formats saturate.

    Everything beyond the largest value is clamped to it, whatever a cast does.
    """
    cast = F32([448, 464, 465, 1000, -1000, np.inf]).astype(ml_dtypes.float8_e4m3fn).astype(F32)
    assert cast[:2].tolist() == [448, 448] and np.isnan(cast[2:]).all()  # the fault, in the library itself
    values = F32([448, 464, 465, 1000, -1000, 3e38, -3e38])
    expected = np.clip(values, -448, 448)
    assert (np.asarray(quant.round_e4m3(jnp.asarray(values))) == expected).all()
    for name in ("fp8", "fp8_fnuz", "index_fp4"):
        stored = element_type(row_format(name, 64).field("values").dtype)
        largest = GRIDS[stored.name][2]
        kept = packings._quotients(values[None, None], np.ones((1, 1, 1), F32), stored)
        assert (kept.astype(F32)[0, 0] == np.clip(values, -largest, largest)).all()
    # A scale that is no power of two can leave a quotient just above 448: it is 448, not NaN.
    form = row_format("fp8_v32", 128)
    rng = np.random.default_rng(0)
    rows = rng.uniform(0.5, 2, (2000, 1)).astype(F32) * np.ones((1, 128), F32)
    quotients = rows[:, :1] / packings.encode(rows, form, quantise=True)["scales"]
    assert (quotients > 448).any()
    assert (packings.encode(rows, form, quantise=True)["values"].astype(F32) == 448).all()


@pytest.mark.parametrize("exponent", [-12, -3, 0, 1, 9, 100])
@pytest.mark.parametrize("name, largest", [("fp8", 448.0), ("index_fp4", 6.0)])
def test_row_65_scales_come_straight_from_float32(name: str, largest: float, exponent: int) -> None:
    """pytorch/ao#4725: rounding amax to bfloat16 before the scale is taken moves the scale.

    One float32 step above 448 * 2^n the scale doubles, one below it does not; so here and in `ops.quant`.
    """
    edge = F32(largest * 2.0**exponent)
    peaks = [np.nextafter(edge, F32(0)), edge, np.nextafter(edge, F32(np.inf))]
    rows = np.concatenate([as_one_row(sign * peak) for sign in (1, -1) for peak in peaks])
    expected = np.array([exponent, exponent, exponent + 1] * 2) + 127
    assert (codes_of(name, rows)[:, 0] == expected).all()
    ours = quant.quantise_e4m3 if name == "fp8" else quant.quantise_e2m1
    assert (np.asarray(ours(jnp.asarray(rows))[1])[:, 0] == expected).all()

    rounded = rows.astype(ml_dtypes.bfloat16).astype(F32)  # the fault
    assert (codes_of(name, rounded)[:, 0] != expected).any()
    # And the mirror image: what was bfloat16 from the start is not moved by going through float32.
    assert (codes_of(name, rounded) == codes_of(name, rounded.astype(ml_dtypes.bfloat16))).all()
