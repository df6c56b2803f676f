"""Matrix products against float64, with the textbook error bound of a float32 sum."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import TypeCheckError

from goldenkv.ops.linear import contract, grouped_output, project

UNIT = 2.0**-24
"""Half an ulp of float32: a sum of n products is off by at most n of these times the sum of magnitudes."""

BFLOAT16 = 2.0**-8 * 1.01
"""Relative. Half an ulp of the result's 8 significant bits, and 1 % for the float32 value that is rounded."""

PRODUCTS = [
    ("ti,io->to", (5, 64), (64, 24), 64),
    ("thd,nd->thn", (3, 4, 16), (9, 16), 16),
    ("thn,nd->thd", (3, 4, 130), (130, 16), 130),
    ("tef,efi->ti", (3, 4, 32), (4, 32, 8), 4 * 32),
    ("...i,io->...o", (2, 3, 8), (8, 5), 8),
]


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def wide(x) -> np.ndarray:
    return np.asarray(x).astype(np.float64)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("equation", "left", "right", "terms"), PRODUCTS, ids=[p[0] for p in PRODUCTS])
def test_contract_keeps_the_bound_of_a_float32_sum(equation, left, right, terms: int, dtype: str) -> None:
    a, b = (jnp.asarray(normal(seed, *shape), dtype) for seed, shape in ((1, left), (2, right)))
    got = contract(equation, a, b)
    assert got.dtype == jnp.float32
    error = np.abs(wide(got) - np.einsum(equation, wide(a), wide(b)))
    bound = (terms + 1) * UNIT * np.einsum(equation, np.abs(wide(a)), np.abs(wide(b)))
    assert np.all(error <= bound)
    control = np.einsum(equation, wide(a), wide(b)).astype(jnp.bfloat16)  # a result kept in bfloat16
    assert np.any(np.abs(wide(control) - np.einsum(equation, wide(a), wide(b))) > bound)


def test_contract_states_its_precision() -> None:
    """On an accelerator float32 products default to fewer bits; here only the program text can show it."""
    x = jnp.ones((2, 4), jnp.bfloat16)
    text = str(jax.make_jaxpr(lambda a, b: contract("ti,io->to", a, b))(x, x.T))
    assert "Precision.HIGHEST" in text
    assert "preferred_element_type=float32" in text


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-6), ("bfloat16", BFLOAT16)])
def test_project_returns_the_dtype_of_its_input(dtype: str, tolerance: float) -> None:
    x, weight = jnp.asarray(np.abs(normal(3, 2, 3, 16)), dtype), jnp.asarray(np.abs(normal(4, 16, 5)), dtype)
    got = project(x, weight)
    assert got.dtype == x.dtype and got.shape == (2, 3, 5)
    np.testing.assert_allclose(wide(got), wide(x) @ wide(weight), rtol=tolerance, atol=0)


def grouped_reference(heads, group_weight, out_weight, *, consecutive: bool = True) -> np.ndarray:
    """Head by head: group g holds heads g * h / groups and the following ones."""
    heads, group_weight, out_weight = wide(heads), wide(group_weight), wide(out_weight)
    rows, count, dim = heads.shape
    groups, _, rank = group_weight.shape
    size = count // groups
    low = np.zeros((rows, groups, rank))
    for h in range(count):
        g, place = (h // size, h % size) if consecutive else (h % groups, h // groups)
        low[:, g] += heads[:, h] @ group_weight[g, place * dim : (place + 1) * dim]
    return low.reshape(rows, groups * rank) @ out_weight


@pytest.mark.parametrize(("heads", "groups", "rank"), [(4, 2, 8), (8, 1, 5), (6, 6, 3), (8, 4, 4)])
def test_grouped_output_takes_consecutive_heads(heads: int, groups: int, rank: int) -> None:
    x, group_weight = normal(5, 3, heads, 16), normal(6, groups, heads // groups * 16, rank)
    out_weight = normal(7, groups * rank, 12)
    got = grouped_output(jnp.asarray(x), jnp.asarray(group_weight), jnp.asarray(out_weight))
    size = 1e-6 * np.max(np.abs(got))  # two float32 sums of at most 128 terms, relative to the largest
    np.testing.assert_allclose(got, grouped_reference(x, group_weight, out_weight), rtol=0, atol=size)
    if 1 < groups < heads:
        mutant = grouped_reference(x, group_weight, out_weight, consecutive=False)
        assert np.max(np.abs(mutant - np.asarray(got))) > 1000 * size


def test_wrong_shapes_are_refused() -> None:
    with pytest.raises(TypeCheckError, match="'weight'"):
        project(jnp.ones((2, 8)), jnp.ones((4, 3)))
    with pytest.raises(TypeCheckError, match="'operands'"):
        contract("ti,io->to", jnp.ones((2, 8)), np.ones((8, 3)).tolist())
