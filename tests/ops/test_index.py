"""The indexer: scores against float64, and a top-k that depends on the candidates alone."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jaxtyping import TypeCheckError

from goldenkv.ops import index

SCORE = 1e-6
"""Relative to the largest score: float32 sums of 16 products, then of 16 heads."""

ROWS, TOP_K = 3, 4
SIZES = [0, 1, TOP_K - 1, TOP_K, TOP_K + 1, 12]
VALUES = [-np.inf, -2.5, -1.0, -0.0, 0.0, 1.0, 2.5, np.inf, np.nan]
"""Few values, so that ties are common."""

merge = jax.jit(index.merge_top_k)
choose = jax.jit(index.top_k_entries, static_argnums=2)


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def score_reference(q, keys, head_weight, *, relu: bool = True) -> np.ndarray:
    q, keys, head_weight = (np.asarray(x).astype(np.float64) for x in (q, keys, head_weight))
    out = np.zeros((q.shape[0], keys.shape[0]))
    for t, n, h in itertools.product(range(q.shape[0]), range(keys.shape[0]), range(q.shape[1])):
        dot = q[t, h] @ keys[n]
        out[t, n] += head_weight[t, h] * (max(dot, 0.0) if relu else dot)
    return out


def select_reference(scores, visible, top_k: int, *, tie=lambda i: i) -> list[list[int]]:
    """Sorts the visible candidates of each row by score, then by id."""
    out = []
    for row, seen in zip(np.asarray(scores), np.asarray(visible), strict=True):
        usable = [i for i in range(len(row)) if seen[i] and row[i] > -np.inf]
        best = sorted(usable, key=lambda i: (-row[i], tie(i)))[:top_k]
        out.append(best + [-1] * (top_k - len(best)))
    return out


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("count", [0, 1, 17])
def test_scores_equal_float64(count: int, dtype: str) -> None:
    q, keys = jnp.asarray(normal(1, 5, 16, 16), dtype), jnp.asarray(normal(2, count, 16), dtype)
    weight = jnp.asarray(normal(3, 5, 16))
    got = np.asarray(index.index_scores(q, keys, weight))
    assert got.shape == (5, count) and got.dtype == np.float32
    if count:
        size = np.max(np.abs(got))
        np.testing.assert_allclose(got, score_reference(q, keys, weight), rtol=0, atol=SCORE * size)
        mutant = score_reference(q, keys, weight, relu=False)
        assert np.max(np.abs(mutant - got)) > 1000 * SCORE * size


@pytest.mark.parametrize("heads", [1, 16])
def test_no_score_is_minus_zero(heads: int) -> None:
    """ReLU leaves 0 where no head looks the key's way, and a negative head weight makes -0 of it."""
    q, keys = -np.abs(normal(4, 5, heads, 8)), np.abs(normal(5, 12, 8))
    weight = -np.abs(normal(6, 5, heads))
    got = np.asarray(jax.jit(index.index_scores)(jnp.asarray(q), jnp.asarray(keys), jnp.asarray(weight)))
    np.testing.assert_array_equal(got.view(np.uint32), np.zeros((5, 12), np.uint32))


def test_the_sign_of_zero_would_decide() -> None:
    """Why the rule is needed: XLA's top-k puts +0 above -0, and a sum over one head keeps the sign."""
    assert jax.lax.top_k(jnp.array([-0.0, 0.0]), 2)[1].tolist() == [1, 0]
    plain = jax.jit(lambda dots, weight: jnp.sum(jnp.maximum(dots, 0.0) * weight[:, :, None], axis=1))
    assert np.signbit(plain(jnp.full((1, 1, 3), -1.0), jnp.full((1, 1), -1.0))).all()


def candidates(draw, count: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    scores = rng.choice(np.float32(VALUES), (ROWS, count))
    scores = np.where(scores == 0, np.float32(0), scores)  # as `index_scores` returns them
    return scores, rng.random((ROWS, count)) < draw(st.sampled_from([0.0, 0.3, 0.9, 1.0]))


@given(st.data(), st.sampled_from(SIZES))
def test_chooses_what_sorting_chooses(data: st.DataObject, count: int) -> None:
    scores, visible = candidates(data.draw, count)
    assert np.asarray(choose(scores, visible, TOP_K)).tolist() == select_reference(scores, visible, TOP_K)


@given(st.data(), st.lists(st.integers(0, 12), max_size=5).map(sorted))
def test_any_split_into_blocks_chooses_the_same(data: st.DataObject, cuts: list[int]) -> None:
    """Bit for bit: the running scores too, empty blocks included."""
    scores, visible = candidates(data.draw, 12)
    ids = np.cumsum(1 + np.random.default_rng(0).integers(0, 3, 12)).astype(np.int32)  # ascending, with gaps

    def run(edges: list[int]) -> tuple[np.ndarray, np.ndarray]:
        best = index.no_selection(ROWS, TOP_K)
        for begin, end in itertools.pairwise([0, *edges, 12]):
            best = merge(best, scores[:, begin:end], ids[begin:end], visible[:, begin:end])
        return np.asarray(best[0]).view(np.uint32), np.asarray(best[1])

    whole, parts = run([]), run(cuts)
    np.testing.assert_array_equal(whole[0], parts[0])
    np.testing.assert_array_equal(whole[1], parts[1])
    expected = [[-1 if i < 0 else ids[i] for i in row] for row in select_reference(scores, visible, TOP_K)]
    assert parts[1].tolist() == expected


def test_ties_go_to_the_lowest_id() -> None:
    scores, visible = np.zeros((1, 12), np.float32), np.ones((1, 12), bool)
    scores[0, [3, 9]] = 1
    got = np.asarray(choose(scores, visible, TOP_K)).tolist()
    assert got == [[3, 9, 0, 1]]
    assert got != select_reference(scores, visible, TOP_K, tie=lambda i: -i)  # the check can fail


def test_nan_and_invisible_are_never_chosen() -> None:
    scores = np.float32([[np.nan, 5, np.nan, -np.nan, 7, 1]])
    visible = np.array([[True, True, False, True, False, True]])
    assert np.asarray(choose(scores, visible, 4)).tolist() == [[1, 5, -1, -1]]
    # XLA's own top-k takes NaN first.
    assert jax.lax.top_k(jnp.asarray(scores), 1)[1].tolist() == [[0]]


@pytest.mark.parametrize("seen", range(TOP_K + 2))
def test_fewer_visible_than_asked_for_leaves_minus_one(seen: int) -> None:
    scores = np.arange(8, dtype=np.float32)[None].repeat(ROWS, 0)
    visible = np.arange(8)[None].repeat(ROWS, 0) < seen
    got = np.asarray(choose(scores, visible, TOP_K))
    chosen = list(range(seen))[::-1][:TOP_K]
    assert got.tolist() == [chosen + [-1] * (TOP_K - len(chosen))] * ROWS


def test_the_selection_starts_empty() -> None:
    scores, ids = index.no_selection(2, 3)
    assert np.isneginf(scores).all() and (np.asarray(ids) == -1).all() and ids.dtype == jnp.int32


def test_wrong_shapes_are_refused() -> None:
    with pytest.raises(TypeCheckError, match="'keys'"):
        index.index_scores(jnp.ones((2, 4, 16)), jnp.ones((3, 8)), jnp.ones((2, 4)))
    with pytest.raises(TypeCheckError, match="'ids'"):
        index.merge_top_k(
            index.no_selection(2, 4), jnp.ones((2, 3)), jnp.arange(4, dtype=jnp.int32), jnp.ones((2, 3), bool)
        )
