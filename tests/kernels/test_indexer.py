"""The indexer's kernels against `ops.index`: scores over pages, and a top-k with the op's rule for ties."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jax.export import DisabledSafetyCheck, export

from goldenkv.ops import index
from goldenkv_kernels.indexer import IndexerConfig, default_config, index_scores, select
from goldenkv_kernels.topk import TopKConfig, top_k_ids

SCORE = 1e-6
"""Relative to the largest score: float32 sums of d products, then of h heads, in another order."""

BOTH = pytest.mark.parametrize("implementation", ["pallas", "xla"])
SMALL = IndexerConfig(keys=16, xla_keys=16, queries=2, top_k=TopKConfig(chunk=8, ranked=2, against=4))
"""Several blocks of everything at the sizes below."""

BATCH, TOKENS, HEADS, DIM = 2, 3, 16, 16
ROWS, PAGES, COUNT = 4, 5, 20
EDGES = [0, 1, ROWS - 1, ROWS, ROWS + 1, 15, 16, 17, COUNT - 1, COUNT]
VALUES = np.array([np.nan, -np.nan, -np.inf, -2.5, -1.0, -0.0, 0.0, 1.0, 2.5, np.inf], np.float32)


def case(seed: int, counts=None, *, whole: bool = False, dtype="float32", shape=(BATCH, TOKENS, HEADS, DIM)):
    """Arguments of the kernels. Whatever nobody sees is NaN, and the table behind it leads nowhere."""
    rng = np.random.default_rng(seed)
    batch, tokens, heads, dim = shape

    def numbers(*shape: int) -> np.ndarray:
        found = rng.integers(-1, 2, shape) if whole else rng.standard_normal(shape)
        return found.astype(np.float32)

    counts = np.asarray(rng.choice(EDGES, (batch, tokens)) if counts is None else counts, np.int32)
    table = rng.permutation(batch * PAGES + 3)[: batch * PAGES].reshape(batch, PAGES).astype(np.int32)
    pages = np.full((batch * PAGES + 3, ROWS, dim), np.nan, np.float32)
    for i in range(batch):
        most = counts[i].max(initial=0)
        at = np.arange(most)
        pages[table[i, at // ROWS], at % ROWS] = numbers(most, dim)
        table[i, -(-most // ROWS) :] = rng.choice([-7, 10**6])
    q, pages = (jnp.asarray(a, dtype) for a in (numbers(batch, tokens, heads, dim), pages))
    return q, pages, jnp.asarray(table), jnp.asarray(numbers(batch, tokens, heads)), jnp.asarray(counts)


def keys_of(pages, table, sequence: int) -> jax.Array:
    """The entries of a sequence [n, d], 0 where there is none."""
    found = pages[jnp.clip(table[sequence], 0, len(pages) - 1)].reshape(-1, pages.shape[-1])
    return jnp.nan_to_num(found)


def op_scores(q, pages, table, weight, counts) -> np.ndarray:
    score = jax.jit(index.index_scores)
    every = [score(q[i], keys_of(pages, table, i), weight[i]) for i in range(len(q))]
    seen = np.arange(every[0].shape[1]) < np.asarray(counts)[:, :, None]
    return np.where(seen, np.asarray(every), -np.inf)


def op_ids(scores, top_k: int) -> np.ndarray:
    choose = jax.jit(index.top_k_entries, static_argnums=2)
    scores = jnp.asarray(scores)
    return np.stack([choose(row, jnp.ones(row.shape, bool), top_k) for row in scores])


def bits(array) -> np.ndarray:
    return np.asarray(array).view(np.uint32)


def assert_close(got, want) -> None:
    got, seen = np.asarray(got), np.isfinite(want)
    np.testing.assert_array_equal(got[~seen], want[~seen])
    np.testing.assert_allclose(got[seen], want[seen], rtol=0, atol=SCORE * np.abs(want[seen]).max(initial=1))


# Scores -----------------------------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@settings(max_examples=15)
@given(seed=st.integers(0, 2**32 - 1))
def test_scores_are_those_of_the_op(dtype: str, implementation: str, seed: int) -> None:
    arguments = case(seed, dtype=dtype)
    got = index_scores(*arguments, implementation=implementation, config=SMALL)
    assert_close(got, op_scores(*arguments))


@BOTH
def test_what_is_not_seen_would_show(implementation: str) -> None:
    """The control of the NaN above: a query that sees one entry too many has a score of NaN, and no other."""
    q, pages, table, weight, counts = case(1, [[5, 3, 5], [9, 2, 1]])
    counts = counts.at[0, 1].set(6)
    got = index_scores(q, pages, table, weight, counts, implementation=implementation, config=SMALL)
    np.testing.assert_array_equal(np.argwhere(np.isnan(got)), [[0, 1, 5]])


@BOTH
def test_no_score_is_minus_zero(implementation: str) -> None:
    q, pages, table, weight, counts = case(2, np.full((BATCH, TOKENS), COUNT))
    got = index_scores(
        -jnp.abs(q), jnp.abs(pages), table, -jnp.abs(weight), counts, implementation=implementation
    )
    np.testing.assert_array_equal(bits(got), 0)


@BOTH
def test_flash_scores(implementation: str) -> None:
    rng = np.random.default_rng(3)
    q, pages, weight = (
        jnp.asarray(rng.standard_normal(shape), dtype)
        for shape, dtype in [
            ((1, 2, 64, 128), "bfloat16"),
            ((4, 64, 128), "bfloat16"),
            ((1, 2, 64), "float32"),
        ]
    )
    arguments = q, pages, jnp.asarray([[2, 0, 3]]), weight, jnp.asarray([[129, 191]])
    assert_close(index_scores(*arguments, implementation=implementation), op_scores(*arguments))


# Top-k ------------------------------------------------------------------------------------------------------


def sorted_ids(scores: np.ndarray, top_k: int, *, highest: bool = False) -> np.ndarray:
    """A stable sort, row by row: independent of every top-k."""
    ids = np.full((*scores.shape[:-1], top_k), -1, np.int32)
    for row in np.ndindex(scores.shape[:-1]):
        usable = np.flatnonzero(scores[row] > -np.inf)
        usable = usable[::-1] if highest else usable
        best = usable[np.argsort(-scores[row][usable], kind="stable")][:top_k]
        ids[row][: len(best)] = best
    return ids


@BOTH
@pytest.mark.parametrize(("count", "top_k"), [(1, 3), (9, 1), (37, 5), (37, 37)])
@settings(max_examples=15)
@given(seed=st.integers(0, 2**32 - 1))
def test_top_k_is_a_stable_sort(count: int, top_k: int, implementation: str, seed: int) -> None:
    scores = np.random.default_rng(seed).choice(VALUES, (1, 2, count))
    got = top_k_ids(jnp.asarray(scores), top_k=top_k, implementation=implementation, config=SMALL.top_k)
    np.testing.assert_array_equal(got, sorted_ids(scores, top_k))


@BOTH
@pytest.mark.parametrize(("count", "top_k"), [(5000, 512), (65536, 1024)])
def test_flash_top_k(count: int, top_k: int, implementation: str) -> None:
    """Ties across chunks and levels, at the largest context of a quarter of a million tokens."""
    rng = np.random.default_rng(4)
    scores = np.round(rng.standard_normal((1, 2, count)) * 8).astype(np.float32)
    scores[0, 0, rng.permutation(count)[: count - top_k + 9]] = -np.inf  # fewer than k are left
    got = np.asarray(top_k_ids(jnp.asarray(scores), top_k=top_k, implementation=implementation))
    np.testing.assert_array_equal(got, sorted_ids(scores, top_k))
    assert (got[0, 0] == -1).sum() == 9
    assert (got != sorted_ids(scores, top_k, highest=True)).any()  # the control: ties decide


@BOTH
def test_negative_nan_is_never_chosen(implementation: str) -> None:
    """openxla/xla#48119: XLA's kernel for k <= 16 and n >= 1024 corrupts its output on -NaN."""
    scores = np.random.default_rng(5).standard_normal((1, 4, 2048)).astype(np.float32)
    scores[:, :, ::3] = -np.nan
    scores[:, :, 1::3] = np.nan
    got = top_k_ids(jnp.asarray(scores), top_k=16, implementation=implementation)
    np.testing.assert_array_equal(got, sorted_ids(scores, 16))
    if jax.default_backend() == "cpu":  # the control: of floats as they are, NaN comes first
        assert (jax.lax.top_k(scores[0], 16)[1] % 3 == 1).all()


@BOTH
@pytest.mark.parametrize("top_k", [1, 4, COUNT + 3])
@settings(max_examples=10)
@given(seed=st.integers(0, 2**32 - 1))
def test_select_is_the_rule_of_the_op(top_k: int, implementation: str, seed: int) -> None:
    """Whole numbers: scores are exact in any order of sums, and many are equal."""
    arguments = case(seed, whole=True)
    got = select(*arguments, top_k=top_k, implementation=implementation, config=SMALL)
    np.testing.assert_array_equal(got, op_ids(op_scores(*arguments), top_k))


# Batch invariance -------------------------------------------------------------------------------------------


def one_query(function, seed: int, *, others: bool) -> np.ndarray:
    """Bits of the scores that query 1 of sequence 1 gives its 13 entries, alone or among others."""
    q, pages, table, weight, counts = case(seed, [[20, 4, 7], [2, 13, 0]])
    if others:
        found = function(q, pages, table, weight, counts)[1, 1]
    else:  # without the other queries, in a smaller pool, its pages elsewhere, its table shorter
        own = jnp.concatenate([pages[table[1, :4]], pages[:1]])[::-1]
        elsewhere = jnp.asarray([[4, 3, 2, 1]])
        found = function(q[1:, 1:2], own, elsewhere, weight[1:, 1:2], counts[1:, 1:2])[0, 0]
    return bits(found)[:13]


@settings(max_examples=10)
@given(seed=st.integers(0, 2**32 - 1))
def test_a_query_does_not_depend_on_others(seed: int) -> None:
    scores = partial(index_scores, config=SMALL)
    np.testing.assert_array_equal(one_query(scores, seed, others=True), one_query(scores, seed, others=False))


def test_an_order_of_heads_that_follows_the_batch_would_show() -> None:
    def mutant(q, pages, table, weight, counts):
        order = -1 if len(q) > 1 else 1
        return index_scores(q[:, :, ::order], pages, table, weight[:, :, ::order], counts, config=SMALL)

    assert (one_query(mutant, 6, others=True) != one_query(mutant, 6, others=False)).any()


def test_config_changes_no_id() -> None:
    arguments = case(7, whole=True)
    want = select(*arguments, top_k=4, config=SMALL)
    np.testing.assert_array_equal(select(*arguments, top_k=4), want)


# Edges, errors, lowering ------------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("shape", [(0, 3, 16, 16), (2, 0, 16, 16), (2, 3, 0, 16)])
def test_nothing_to_score(shape: tuple[int, ...], implementation: str) -> None:
    batch, tokens, heads, _ = shape
    arguments = (
        jnp.zeros(shape), jnp.zeros((3, ROWS, 16)), jnp.zeros((batch, 2), jnp.int32),
        jnp.zeros((batch, tokens, heads)), jnp.zeros((batch, tokens), jnp.int32),
    )  # fmt: skip
    assert (index_scores(*arguments, implementation=implementation) == -jnp.inf).all()
    assert (select(*arguments, top_k=2, implementation=implementation) == -1).all()


@BOTH
def test_a_table_or_pool_of_no_page(implementation: str) -> None:
    q, pages, table, weight, counts = case(8)
    for pool, pages_of in ((pages, table[:, :0]), (pages[:0], table)):
        got = select(q, pool, pages_of, weight, counts, top_k=2, implementation=implementation)
        np.testing.assert_array_equal(got, -1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"q": jnp.zeros((2, 3, 16))},
            r"q must be float32 or bfloat16 \[b, t, h, d\], got float32 \[2, 3, 16\]",
        ),
        ({"pages": jnp.zeros((3, 4, 8))}, r"pages must be .* \[pages, rows, 16\], got float32 \[3, 4, 8\]"),
        ({"pages": jnp.zeros((3, 4, 16), jnp.uint8)}, "pages must be float32 or bfloat16"),
        ({"table": jnp.zeros((3, 5), jnp.int32)}, r"table must be int32 \[2, max\]"),
        ({"weight": jnp.zeros((2, 3, 16), jnp.bfloat16)}, "weight must be float32"),
        ({"counts": jnp.zeros((2, 4), jnp.int32)}, r"counts must be int32 \[2, 3\], got int32 \[2, 4\]"),
        ({"top_k": 0}, "top_k=0 must be at least 1"),
        ({"implementation": "cuda"}, "implementation='cuda' must be 'pallas' or 'xla'"),
    ],
)
def test_bad_input_is_named(change: dict, message: str) -> None:
    names = ("q", "pages", "table", "weight", "counts")
    arguments = dict(zip(names, case(9), strict=True)) | {"top_k": 2} | change
    with pytest.raises(ValueError, match=message):
        select(**arguments)


def lower(function, *shapes):
    unknown = [DisabledSafetyCheck.custom_call("__gpu$xla.gpu.triton")]
    exported = export(jax.jit(function), platforms=["cuda"], disabled_checks=unknown)(*shapes)
    return exported.mlir_module().count("__gpu$xla.gpu.triton")


@pytest.mark.parametrize(
    ("tokens", "heads", "dim", "rows", "table", "top_k", "dtype", "kernels"),
    [
        (1, 64, 128, 64, 1024, 512, "bfloat16", 5),
        (32, 64, 128, 64, 1024, 1024, "float32", 5),
        (8, 16, 16, 4, 16, 2, "float32", 3),
    ],
)
def test_lowers_for_a_gpu(tokens, heads, dim, rows, table, top_k, dtype, kernels) -> None:
    shape = jax.ShapeDtypeStruct
    arguments = (
        shape((2, tokens, heads, dim), dtype), shape((99, rows, dim), dtype), shape((2, table), jnp.int32),
        shape((2, tokens, heads), jnp.float32), shape((2, tokens), jnp.int32),
    )  # fmt: skip
    assert lower(partial(select, top_k=top_k, interpret=False), *arguments) == kernels


def test_lowering_can_fail() -> None:
    """The control: no kernel can call XLA's top-k, nor take a block of 96."""

    def kernel(scores, out) -> None:
        out[...] = jax.lax.top_k(scores[...], 4)[1]

    call = pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((4,), jnp.int32),
        compiler_params=plt.CompilerParams(num_warps=4),
    )
    with pytest.raises(NotImplementedError, match="top_k"):
        lower(call, jax.ShapeDtypeStruct((64,), jnp.float32))
    with pytest.raises(ValueError, match="keys=96 must be a power of two"):
        IndexerConfig(keys=96)
    with pytest.raises(ValueError, match="chunk=0 must be a power of two"):
        TopKConfig(chunk=0)


def test_a_dtype_may_be_given_by_name() -> None:
    named = [default_config(dtype, "bfloat16") for dtype in ("bfloat16", jnp.bfloat16, jnp.dtype("bfloat16"))]
    assert len(set(named)) == 1
    assert named[0] != default_config("float32", "bfloat16") == default_config(jnp.float32, jnp.bfloat16)
