"""RMSNorm against float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import TypeCheckError

from goldenkv.ops.norm import rms_norm

FLOAT32 = 1e-6
"""Relative. A mean, an inverse root and two products, each off by an ulp (1.2e-7) or two."""

BFLOAT16 = 2.0**-8 * 1.01
"""Relative. Half an ulp of the result's 8 significant bits, and 1 % for the float32 value that is rounded."""

SHAPES = [(1, 8), (5, 64), (3, 4, 16), (2, 4096)]


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def reference(x, weight=None, eps: float = 1e-6) -> np.ndarray:
    x = np.asarray(x).astype(np.float64)
    out = np.empty_like(x)
    for row in np.ndindex(x.shape[:-1]):
        out[row] = x[row] / np.sqrt(np.mean(x[row] ** 2) + eps)
    return out if weight is None else out * np.asarray(weight, np.float64)


@pytest.mark.parametrize("weighted", [True, False], ids=["weight", "no_weight"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equals_float64(shape: tuple[int, ...], weighted: bool) -> None:
    x, gain = normal(1, *shape), normal(2, shape[-1]) if weighted else None
    got = rms_norm(jnp.asarray(x), None if gain is None else jnp.asarray(gain))
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, reference(x, gain), rtol=FLOAT32, atol=0)


@pytest.mark.parametrize("shape", SHAPES[1:], ids=str)
def test_bfloat16_is_rounded_once(shape: tuple[int, ...]) -> None:
    """A mean square kept in bfloat16 would miss this by far; the control shows it."""
    x, gain = jnp.asarray(normal(3, *shape), jnp.bfloat16), normal(4, shape[-1])
    got = rms_norm(x, jnp.asarray(gain))
    assert got.dtype == jnp.bfloat16
    expected = reference(x, gain)
    np.testing.assert_allclose(np.asarray(got, np.float64), expected, rtol=BFLOAT16, atol=0)
    root = jnp.sqrt(jnp.mean((x * x).astype(jnp.bfloat16), axis=-1, keepdims=True, dtype=jnp.bfloat16))
    control = (x / root * jnp.asarray(gain, jnp.bfloat16)).astype(jnp.bfloat16)
    assert np.max(np.abs(np.asarray(control, np.float64) / expected - 1)) > BFLOAT16


def test_eps_is_added_to_the_mean_square() -> None:
    x = normal(5, 4, 64) * np.float32(1e-3)  # mean squares near eps
    got = np.asarray(rms_norm(jnp.asarray(x), eps=1e-6))
    np.testing.assert_allclose(got, reference(x, eps=1e-6), rtol=FLOAT32, atol=0)
    root = np.sqrt(np.mean(x.astype(np.float64) ** 2, -1, keepdims=True))
    for mutant in (x / (root + 1e-6), x / np.maximum(root, 1e-6), reference(x, eps=1e-5)):
        assert np.max(np.abs(mutant / got - 1)) > 1e-3


def test_a_row_of_zeros_stays_zero() -> None:
    np.testing.assert_array_equal(np.asarray(rms_norm(jnp.zeros((2, 8)))), np.zeros((2, 8)))


def test_a_row_does_not_depend_on_the_others() -> None:
    x = normal(6, 7, 32)
    other = np.where(np.arange(7)[:, None] == 3, x, np.nan)
    norm = jax.jit(rms_norm)
    np.testing.assert_array_equal(norm(jnp.asarray(x))[3], norm(jnp.asarray(other))[3])


def test_a_weight_of_another_width_is_refused() -> None:
    with pytest.raises(TypeCheckError, match="'weight'"):
        rms_norm(jnp.ones((2, 8)), jnp.ones(4))
