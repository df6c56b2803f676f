"""Rotary embedding: against complex numbers in float64, and the properties that attention relies on."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import TypeCheckError

from goldenkv.ops.rope import frequencies, rotate

TURN = 2e-6
"""Absolute, for channels of size 1: cos, sin, two products and a sum in float32, plus half an ulp of the
angle, which stays below 16 radians where it is used."""

DOT = 2e-5
"""Absolute, for dot products of 16 channels of size 1 at positions below 512: an angle of up to 512 radians
carries half an ulp of 3e-5 / 2, and the errors of 8 pairs add up at random."""


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def reference(x, positions, frequency, *, inverse: bool = False, angles=np.float64) -> np.ndarray:
    """Pair i is the complex number x[2i] + j x[2i + 1], turned by position * frequency[i]."""
    x = np.asarray(x).astype(np.float64)
    out = x.copy()
    plain = x.shape[-1] - 2 * len(frequency)
    for row, position in enumerate(positions):
        angle = (angles(position) * np.asarray(frequency, angles)).astype(np.float64)
        for i, turn in enumerate(np.exp(1j * (-angle if inverse else angle))):
            real, imaginary = plain + 2 * i, plain + 2 * i + 1
            pair = (x[row, ..., real] + 1j * x[row, ..., imaginary]) * turn
            out[row, ..., real], out[row, ..., imaginary] = pair.real, pair.imag
    return out


def positions_of(*numbers: int) -> jax.Array:
    return jnp.asarray(numbers, jnp.int32)


@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("shape", [(6, 16), (6, 3, 24), (6, 2, 2, 8)], ids=str)
def test_equals_complex_multiplication(shape: tuple[int, ...], inverse: bool) -> None:
    x, frequency = normal(1, *shape), frequencies(8, 10000.0)
    numbers = [0, 1, 2, 7, 10, 15]
    got = rotate(jnp.asarray(x), positions_of(*numbers), frequency, inverse=inverse)
    np.testing.assert_allclose(
        got, reference(x, numbers, frequency, inverse=inverse), rtol=0, atol=TURN * np.abs(x).max()
    )


def test_pairs_are_interleaved_neighbours_on_the_trailing_channels() -> None:
    """The other common layouts must differ: pairs (i, i + half), and rotation of the leading channels."""
    x, frequency = normal(2, 1, 16), frequencies(8, 10000.0)
    got = np.asarray(rotate(jnp.asarray(x), positions_of(3), frequency))
    halves = np.concatenate([np.arange(8), 8 + np.arange(8).reshape(4, 2).T.ravel()])
    for order in (halves, np.roll(np.arange(16), 8)):
        back = np.argsort(order)
        mutant = reference(x[:, back], [3], frequency)[:, order]
        assert np.max(np.abs(mutant - got)) > 0.1


def test_large_positions_use_the_float32_angle() -> None:
    """The published code multiplies position and frequency in float32; at 2^20 that is up to 0.03 radians
    away from the exact product, and so part of the definition."""
    numbers = [0, 127, 4095, 65535, 524287, 1048575]
    x, frequency = np.ones((6, 64), np.float32), frequencies(64, 160000.0)
    got = np.asarray(rotate(jnp.asarray(x), positions_of(*numbers), frequency))
    np.testing.assert_allclose(got, reference(x, numbers, frequency, angles=np.float32), rtol=0, atol=TURN)
    exact = reference(x, numbers, frequency)
    assert 1e-3 < np.max(np.abs(exact - got)) < 0.1


@pytest.mark.parametrize("distance", [0, 1, 17, 127])
def test_scores_depend_on_the_distance_alone(distance: int) -> None:
    q, k = normal(3, 16), normal(4, 16)
    frequency = frequencies(16, 10000.0)
    starts = np.arange(0, 512 - distance, 37)

    def dots(d: int) -> np.ndarray:
        rows = jnp.broadcast_to(jnp.asarray(q), (len(starts), 16))
        turned_q = rotate(rows, jnp.asarray(starts + d, jnp.int32), frequency)
        keys = jnp.broadcast_to(jnp.asarray(k), (len(starts), 16))
        turned_k = rotate(keys, jnp.asarray(starts, jnp.int32), frequency)
        return np.sum(np.asarray(turned_q, np.float64) * np.asarray(turned_k, np.float64), axis=1)

    at_zero = np.sum(reference(q[None], [distance], frequency)[0] * k)
    np.testing.assert_allclose(dots(distance), at_zero, rtol=0, atol=DOT)
    assert np.max(np.abs(dots(distance + 1) - at_zero)) > 0.01  # another distance is another score


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_inverse_undoes(dtype: str) -> None:
    x = jnp.asarray(normal(5, 5, 3, 16), dtype)
    numbers, frequency = positions_of(0, 1, 127, 128, 5000), frequencies(8, 160000.0)
    back = rotate(rotate(x, numbers, frequency), numbers, frequency, inverse=True)
    assert back.dtype == x.dtype
    # Both turns use the same cos and sin, so only rounding is left: twice half an ulp of a pair's length.
    tolerance = {"float32": 4 * 2.0**-24, "bfloat16": 4 * 2.0**-8}[dtype] * float(jnp.max(jnp.abs(x))) * 1.5
    np.testing.assert_allclose(
        np.asarray(back, np.float64), np.asarray(x, np.float64), rtol=0, atol=tolerance
    )
    twice = rotate(rotate(x, numbers, frequency), numbers, frequency)
    assert np.max(np.abs(np.asarray(twice, np.float64) - np.asarray(x, np.float64))) > 0.1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("inverse", [False, True])
def test_leading_channels_pass_bit_for_bit(dtype: str, inverse: bool) -> None:
    x = normal(6, 4, 2, 24)
    x[0, 0, :8] = [np.nan, np.inf, -np.inf, -0.0, 0.0, 1e-38, 3e38, -1e-30]
    x = jnp.asarray(x, dtype)
    got = rotate(x, positions_of(0, 3, 128, 9999), frequencies(8, 10000.0), inverse=inverse)
    as_bits = np.dtype(f"u{x.dtype.itemsize}")
    np.testing.assert_array_equal(
        np.asarray(got)[..., :16].view(as_bits), np.asarray(x)[..., :16].view(as_bits)
    )
    assert got.dtype == x.dtype


def test_position_zero_changes_nothing() -> None:
    x = normal(7, 1, 3, 16)
    np.testing.assert_array_equal(rotate(jnp.asarray(x), positions_of(0), frequencies(8, 10000.0)), x)


def test_plain_frequencies() -> None:
    got = frequencies(64, 10000.0)
    assert got.dtype == np.float32 and got.shape == (32,)
    np.testing.assert_allclose(got, 10000.0 ** (-np.arange(32) / 32), rtol=1e-6)
    np.testing.assert_array_equal(got, frequencies(64, 10000.0, factor=1.0, original_length=65536))


def test_yarn_at_the_published_numbers() -> None:
    """64 rope channels, theta 160000, factor 16, original length 65536, beta 32 and 1.

    Pair i turns 65536 * f / (2 pi) times within the original length. That is 32 at i = 15.45 and 1 at
    i = 24.71, so the ramp runs from pair 15 to pair 25.
    """
    got = frequencies(64, 160000.0, factor=16.0, original_length=65536)
    pair = np.arange(32)
    plain = 160000.0 ** (-pair / 32)
    turns = 65536 * plain / (2 * math.pi)
    assert turns[15] > 32 > turns[16] and turns[24] > 1 > turns[25]
    slowed = np.clip((pair - 15) / 10, 0, 1)
    np.testing.assert_allclose(got, plain * (1 - slowed) + plain / 16 * slowed, rtol=2e-6)
    np.testing.assert_allclose(got[:16], plain[:16], rtol=1e-6)
    np.testing.assert_allclose(got[25:], plain[25:] / 16, rtol=1e-6)
    assert np.all(np.diff(got) < 0)
    for low, high in ((16, 25), (15, 24)):  # a ramp one pair off
        ramp = np.clip((pair - low) / (high - low), 0, 1)
        assert np.max(np.abs((plain * (1 - ramp) + plain / 16 * ramp) / got - 1)) > 0.01


def test_yarn_of_a_short_original_length_stays_in_range() -> None:
    """Turns below beta_fast at every pair: the ramp starts at pair 0, not before."""
    got = frequencies(8, 160000.0, factor=16.0, original_length=64)
    plain = 160000.0 ** (-np.arange(4) / 4)
    np.testing.assert_allclose(got, plain / np.array([1, 16, 16, 16]), rtol=1e-6)


def test_wrong_shapes_are_refused() -> None:
    with pytest.raises(TypeCheckError, match="'positions'"):
        rotate(jnp.ones((3, 16)), positions_of(0, 1), frequencies(8, 10000.0))
    with pytest.raises(TypeCheckError, match="'positions'"):
        rotate(jnp.ones((2, 16)), jnp.ones(2), frequencies(8, 10000.0))
