"""What needs a GPU to be shown; and failures that others had with kernels on GPUs, run on any device.

On a CPU the kernels are interpreted: that shows that a test is right, not that a GPU is.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from goldenkv.ops.attend import window_visible
from goldenkv_kernels.attention import dense_attention
from goldenkv_kernels.gates.case import Case, distance
from goldenkv_kernels.gates.cases import CASES
from goldenkv_kernels.topk import top_k_ids

IMPLEMENTATIONS = ("pallas", "xla")
BATCHED = ("sparse_attention", "dense_attention", "index_scores", "select")
HAS_GPU = jax.default_backend() == "gpu"
needs_gpu = pytest.mark.skipif(not HAS_GPU, reason="no GPU: the compiled kernels cannot run")
each_case = pytest.mark.parametrize("case", CASES, ids=lambda c: c.id.replace(": ", "-"))


def bits(tree: Any) -> list[bytes]:
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


# On a GPU ---------------------------------------------------------------------------------------------------


@needs_gpu
@each_case
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_compiled_it_is_as_near_to_float64_as_interpreted(case: Case, implementation: str) -> None:
    arrays = case.arrays(seed=2)
    found = distance(case.bound(implementation)(arrays), case.expected(**arrays), case.tolerance)
    assert not found.problem, found


@needs_gpu
@each_case
def test_a_kernel_gives_the_same_bits_again(case: Case) -> None:
    arrays = case.arrays(seed=3)
    first = bits(case.bound()(arrays))
    assert all(bits(case.bound()(arrays)) == first for _ in range(5))


@needs_gpu
@pytest.mark.parametrize("case", [c for c in CASES if c.kernel in BATCHED], ids=lambda c: c.id)
def test_a_sequence_alone_has_the_bits_that_it_has_in_a_batch(case: Case) -> None:
    arrays = case.arrays(seed=4)
    whole = np.asarray(case.bound()(arrays))
    for b in range(len(arrays["table"])):
        shared = {"pages", "sinks"}
        alone = {name: a if name in shared else a[b : b + 1] for name, a in arrays.items()}
        assert bits(case.bound()(alone)) == bits(whole[b : b + 1])


# Failures that others had -----------------------------------------------------------------------------------


def negative_nan(n: int, k: int) -> np.ndarray:
    """float32 [1, 3, n]: NaN of both signs among few values that tie, infinities, and zeros of both signs."""
    rng = np.random.default_rng(n + k)
    scores = rng.integers(-3, 4, (1, 3, n)).astype(np.float32)
    scores[rng.random(scores.shape) < 0.1] = np.nan
    scores.view(np.uint32)[rng.random(scores.shape) < 0.1] = 0xFFC00000
    scores[rng.random(scores.shape) < 0.1] = -np.inf
    scores[0, 0, n // 2] = np.inf
    scores[(scores == 0) & (rng.random(scores.shape) < 0.5)] = -0.0
    scores[0, 2, :] = np.float32(-np.nan)
    return scores


def stable_best(scores: np.ndarray, k: int) -> np.ndarray:
    """By a stable sort: best first, ties to the lowest id, -1 where nothing is left that is above -inf."""
    out = np.full((*scores.shape[:2], k), -1, np.int32)
    for place in np.ndindex(*scores.shape[:2]):
        row = scores[place]
        usable = np.flatnonzero(row > -np.inf)
        best = usable[np.argsort(-row[usable], kind="stable")][:k]
        out[place][: len(best)] = best
    return out


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(("n", "k"), [(1024, 1), (1024, 16), (1025, 16), (4097, 8), (1023, 16), (1024, 17)])
def test_negative_nan_does_not_corrupt_a_top_k(n: int, k: int, implementation: str) -> None:
    """openxla/xla#48119: a GPU's top-k of k <= 16 of n >= 1024 fails on NaN with its sign set."""
    scores = negative_nan(n, k)
    found = np.asarray(top_k_ids(jnp.asarray(scores), top_k=k, implementation=implementation))
    assert np.array_equal(found, stable_best(scores, k))


def test_the_stable_order_is_not_that_of_numbers_with_nan() -> None:
    """The control: without leaving NaN out, another selection."""
    scores = negative_nan(1024, 16)
    plain = np.argsort(-scores, axis=-1, kind="stable")[..., :16]
    unguarded = np.asarray(lax.top_k(jnp.asarray(scores), 16)[1])
    assert not np.array_equal(plain, stable_best(scores, 16))
    assert not np.array_equal(unguarded, stable_best(scores, 16))


@pytest.mark.parametrize("queries", [1, 31, 32, 33, 128])
def test_a_mask_of_window_and_entries_is_joined_right(queries: int) -> None:
    """jax-ml/jax#40588: a GPU fusion reads the wrong places of masks that are joined, and joined again."""
    window, rate, entries, first = 128, 4, 96, 200

    @jax.jit
    def joined(positions: jax.Array, own: jax.Array, draft: jax.Array) -> jax.Array:
        near = window_visible(positions, own, window)
        far = jnp.arange(entries) < ((positions + 1) // rate)[:, None]
        inner = jnp.concatenate([near, far], axis=1)
        outer = jnp.concatenate([inner, draft[None, :] <= positions[:, None]], axis=1)
        return jnp.where(outer, 1.0, -jnp.inf)

    positions = np.arange(first, first + queries, dtype=np.int32)
    own = np.arange(first - window, first + queries, dtype=np.int32)
    draft = np.arange(first, first + 5, dtype=np.int32)
    distances = positions[:, None] - own[None, :]
    near = (distances >= 0) & (distances < window)
    far = np.arange(entries)[None, :] < ((positions + 1) // rate)[:, None]
    want = np.concatenate([near, far, draft[None, :] <= positions[:, None]], axis=1)
    found = np.asarray(joined(*map(jnp.asarray, (positions, own, draft))))
    assert np.array_equal(found, np.where(want, np.float32(1), -np.inf))
    assert not np.array_equal(found > 0, np.roll(want, 1, axis=1))  # the control: one place off


def chained(a_ref: Any, b_ref: Any, c_ref: Any, out_ref: Any) -> None:
    """(a b) c with the first product kept on chip, and rounded on the way."""
    first = jnp.dot(a_ref[...], b_ref[...], preferred_element_type=jnp.float32)
    second = jnp.dot(first.astype(c_ref.dtype), c_ref[...], preferred_element_type=jnp.float32)
    out_ref[...] = second


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32], ids=["bf16", "f32"])
@pytest.mark.parametrize(("warps", "stages"), [(4, 1), (4, 2), (8, 2), (8, 3)])
def test_chained_products_of_ones_are_exact(dtype: Any, warps: int, stages: int) -> None:
    """openxla/xla#19780: two matrix products in one kernel are wrong on an H100. All numbers are exact."""
    side = 64
    ones = jnp.ones((side, side), dtype)
    found = pl.pallas_call(
        chained,
        out_shape=jax.ShapeDtypeStruct((side, side), jnp.float32),
        compiler_params=plt.CompilerParams(num_warps=warps, num_stages=stages),
        interpret=not HAS_GPU,
    )(ones, ones, ones)
    assert np.array_equal(found, np.full((side, side), side * side, np.float32))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("entries", [0, 128, 384])
def test_attention_over_ones_is_exact(entries: int, implementation: str) -> None:
    """openxla/xla#19780 in our own chain of two products: equal weights of equal rows, 2^n of them."""
    heads, channels, window, rows = 64, 512, 128, 2
    pages = max(entries // rows, 1)
    out = dense_attention(
        jnp.ones((1, 1, heads, channels), jnp.bfloat16),
        jnp.ones((1, window, channels), jnp.bfloat16),
        jnp.ones((1, 1, window), bool),
        jnp.ones((pages, rows, channels), jnp.bfloat16),
        jnp.arange(pages, dtype=jnp.int32)[None],
        jnp.full((1, 1), entries, jnp.int32),
        jnp.full((heads,), -jnp.inf),
        implementation=implementation,
    )
    assert np.array_equal(out, np.ones(out.shape, np.float32))


def test_an_operand_that_is_not_used_changes_nothing() -> None:
    """jax-ml/jax#39744: with an operand that a kernel never reads, its copies return zeros."""

    def doubled(x_ref: Any, out_ref: Any) -> None:
        out_ref[...] = x_ref[...] * 2

    def with_unused(before_ref: Any, x_ref: Any, behind_ref: Any, out_ref: Any) -> None:
        doubled(x_ref, out_ref)

    x = jnp.asarray(np.random.default_rng(0).normal(size=(32, 64)), jnp.float32)
    block = pl.BlockSpec((8, 64), lambda i: (i, 0))
    options = {
        "out_shape": jax.ShapeDtypeStruct(x.shape, x.dtype),
        "grid": (4,),
        "out_specs": block,
        "compiler_params": plt.CompilerParams(num_warps=4),
        "interpret": not HAS_GPU,
    }
    plain = pl.pallas_call(doubled, in_specs=[block], **options)(x)
    nan = x * jnp.nan
    unused = pl.pallas_call(with_unused, in_specs=[block, block, block], **options)(nan, x, nan)
    assert bits(plain) == bits(unused) == bits(x * 2)
