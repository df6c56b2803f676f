"""Hyper-connections against float64, and what the Sinkhorn steps guarantee."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import TypeCheckError

from goldenkv.ops import mhc

MIX = 2e-6
"""Absolute, for weights of at most 2: a float32 sum of 128 products, exp, and 39 normalisations that each
pull back towards sum 1, so that rounding does not add up."""

STREAM = 3e-6
"""Relative to the largest value: float32 sums over 4 streams."""

T, S, D = 6, 4, 32
EPS = 1e-6


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def parameters(seed: int) -> dict[str, np.ndarray]:
    outputs = 2 * S + S * S
    return {
        "weight": normal(seed, S * D, outputs) * np.float32((S * D) ** -0.5),
        "base": normal(seed + 1, outputs) * np.float32(0.5),
        "scale": 1 + normal(seed + 2, 3) * np.float32(0.1),
    }


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def sinkhorn_reference(m: np.ndarray, iterations: int, eps: float) -> np.ndarray:
    """Columns once, then rows and columns `iterations` - 1 times; m[i, j] is row i, column j."""
    m = m / (m.sum(axis=-2, keepdims=True) + eps)
    for _ in range(iterations - 1):
        m = m / (m.sum(axis=-1, keepdims=True) + eps)
        m = m / (m.sum(axis=-2, keepdims=True) + eps)
    return m


def mixing_reference(streams, weight, base, scale, *, iterations: int = 20) -> tuple[np.ndarray, ...]:
    streams, weight, base, scale = (np.asarray(x, np.float64) for x in (streams, weight, base, scale))
    pre, post, comb = np.zeros((T, S)), np.zeros((T, S)), np.zeros((T, S, S))
    for t in range(T):
        flat = streams[t].ravel()
        mixes = flat / np.sqrt(np.mean(flat**2) + EPS) @ weight
        pre[t] = sigmoid(mixes[:S] * scale[0] + base[:S]) + EPS
        post[t] = 2 * sigmoid(mixes[S : 2 * S] * scale[1] + base[S : 2 * S])
        logits = (mixes[2 * S :] * scale[2] + base[2 * S :]).reshape(S, S)
        softmax = np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True)
        comb[t] = sinkhorn_reference(softmax + EPS, iterations, EPS)
    return pre, post, comb


def ours(streams, parameters: dict[str, np.ndarray], iterations: int = 20) -> tuple[np.ndarray, ...]:
    given = {name: jnp.asarray(value) for name, value in parameters.items()}
    mixed = mhc.stream_mixing(jnp.asarray(streams), **given, iterations=iterations, eps=EPS, norm_eps=EPS)
    return tuple(np.asarray(x) for x in mixed)


@pytest.mark.parametrize("iterations", [1, 2, 20])
def test_mixing_equals_float64(iterations: int) -> None:
    streams, given = normal(1, T, S, D), parameters(2)
    expected = mixing_reference(streams, **given, iterations=iterations)
    for got, wanted in zip(ours(streams, given, iterations), expected, strict=True):
        assert got.dtype == np.float32
        np.testing.assert_allclose(got, wanted, rtol=0, atol=MIX)


def test_mutants_differ() -> None:
    """Outputs lie in the order pre, post, comb; each has its scale; comb is normalised by column last."""
    streams, given = normal(5, T, S, D), parameters(6)
    pre, post, comb = ours(streams, given, iterations=2)
    swapped = {**given, "scale": given["scale"][::-1]}
    other = mixing_reference(streams, **swapped, iterations=2)
    rows_last = np.swapaxes(sinkhorn_reference(np.swapaxes(comb.astype(float), 1, 2), 1, EPS), 1, 2)
    mutants = {
        "post without its factor 2": (post / 2, post),
        "pre and post exchanged": (post / 2 + EPS, pre),
        "another scale for pre": (other[0], pre),
        "another scale for comb": (other[2], comb),
        "comb transposed": (np.swapaxes(comb, 1, 2), comb),
        "one iteration more": (mixing_reference(streams, **given, iterations=3)[2], comb),
        "rows normalised last": (rows_last, comb),
    }
    for name, (mutant, got) in mutants.items():
        assert np.max(np.abs(mutant - got)) > 100 * MIX, name


def test_pre_and_post_stay_in_their_ranges() -> None:
    pre, post, _ = ours(100 * normal(7, T, S, D), {**parameters(8), "scale": np.float32([50, 50, 1])})
    assert np.all((pre >= EPS) & (pre <= 1 + 2 * EPS)) and np.all((post >= 0) & (post <= 2))


@pytest.mark.parametrize(("sharp", "row_error"), [(1.0, 1e-5), (5.0, 0.1)])
def test_columns_of_comb_sum_to_one(sharp: float, row_error: float) -> None:
    """The last step divides a column by its sum + eps, so 1 is missed by eps over that sum, which the steps
    before keep near 1, and by 4 ulp of float32. Rows are as near as 20 steps bring them: with logits of size
    1 to 1e-5, with logits of size 5 to a few percent."""
    given = parameters(9)
    given["scale"] = np.float32([1, 1, sharp])
    _, _, comb = ours(normal(12, T, S, D), given)
    columns, rows = comb.astype(np.float64).sum(axis=1), comb.astype(np.float64).sum(axis=2)
    assert np.max(np.abs(columns - 1)) <= 1.5 * EPS + 4 * 2.0**-23
    assert np.max(np.abs(rows - 1)) <= row_error
    assert np.all(comb > 0)
    _, _, once = ours(normal(12, T, S, D), given, iterations=1)
    assert np.max(np.abs(once.sum(axis=2) - 1)) > row_error  # the check can fail


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_collapse_is_a_weighted_sum_of_streams(dtype: str) -> None:
    streams, pre = jnp.asarray(normal(15, T, S, D), dtype), np.abs(normal(16, T, S))
    got = mhc.collapse(streams, jnp.asarray(pre))
    assert got.dtype == streams.dtype
    expected = np.einsum("ts,tsd->td", pre.astype(np.float64), np.asarray(streams, np.float64))
    tolerance = {"float32": STREAM, "bfloat16": 2.0**-8}[dtype] * np.max(np.abs(expected))
    np.testing.assert_allclose(np.asarray(got, np.float64), expected, rtol=0, atol=tolerance)


def expand_reference(streams, output, post, comb) -> np.ndarray:
    """Stream j takes post[j] * output, and comb[i, j] of every stream i."""
    streams, output, post, comb = (np.asarray(x).astype(np.float64) for x in (streams, output, post, comb))
    out = np.zeros(streams.shape)
    for t in range(len(streams)):
        for j in range(streams.shape[1]):
            out[t, j] = post[t, j] * output[t]
            for i in range(streams.shape[1]):
                out[t, j] += comb[t, i, j] * streams[t, i]
    return out


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_expand_sends_stream_i_to_stream_j_by_comb_ij(dtype: str) -> None:
    streams, output = jnp.asarray(normal(17, T, S, D), dtype), jnp.asarray(normal(18, T, D), dtype)
    post, comb = np.abs(normal(19, T, S)), np.abs(normal(20, T, S, S))
    got = mhc.expand(streams, output, jnp.asarray(post), jnp.asarray(comb))
    assert got.dtype == streams.dtype
    expected = expand_reference(streams, output, post, comb)
    tolerance = {"float32": STREAM, "bfloat16": 2.0**-8}[dtype] * np.max(np.abs(expected))
    np.testing.assert_allclose(np.asarray(got, np.float64), expected, rtol=0, atol=tolerance)
    transposed = expand_reference(streams, output, post, np.swapaxes(comb, 1, 2))
    assert np.max(np.abs(transposed - np.asarray(got, np.float64))) > 100 * tolerance


def test_the_sum_of_streams_is_kept() -> None:
    """Rows of comb sum to 1, so mixing moves what the streams hold between them and loses nothing."""
    streams = normal(21, T, S, D)
    _, _, comb = ours(streams, parameters(22))
    got = mhc.expand(jnp.asarray(streams), jnp.zeros((T, D)), jnp.zeros((T, S)), jnp.asarray(comb))
    np.testing.assert_allclose(np.sum(got, axis=1), streams.sum(axis=1), rtol=0, atol=1e-4)


def test_head_collapse_equals_float64() -> None:
    streams, eps = normal(23, T, S, D), 0.01  # large, so that leaving it out shows
    weight, base, scale = normal(24, S * D, S) * np.float32(0.1), normal(25, S), np.float32([1.3])
    given = (jnp.asarray(x) for x in (streams, weight, base, scale))
    got = mhc.head_collapse(*given, eps=eps, norm_eps=EPS)
    wide = streams.astype(np.float64)
    flat = wide.reshape(T, -1)
    mixes = flat / np.sqrt(np.mean(flat**2, axis=1, keepdims=True) + EPS) @ weight
    shares = sigmoid(mixes * 1.3 + base) + eps
    expected = np.einsum("ts,tsd->td", shares, wide)
    np.testing.assert_allclose(got, expected, rtol=0, atol=STREAM * np.max(np.abs(expected)))
    for mutant in (wide.mean(axis=1), np.einsum("ts,tsd->td", shares - eps, wide)):
        assert np.max(np.abs(mutant - np.asarray(got))) > 1000 * STREAM * np.max(np.abs(expected))


def test_a_token_does_not_depend_on_the_others() -> None:
    streams, given = normal(26, T, S, D), {n: jnp.asarray(v) for n, v in parameters(27).items()}
    mix = jax.jit(lambda x: mhc.stream_mixing(x, **given, iterations=20, eps=EPS, norm_eps=EPS))
    before = [np.asarray(x)[2] for x in mix(streams)]
    streams[np.arange(T) != 2] = 50 * normal(28, T - 1, S, D)
    for old, new in zip(before, mix(streams), strict=True):
        np.testing.assert_array_equal(np.asarray(new)[2].view(np.uint32), old.view(np.uint32))


def test_wrong_shapes_are_refused() -> None:
    given = {name: jnp.asarray(value) for name, value in parameters(29).items()}
    with pytest.raises(TypeCheckError, match="'base'"):
        mhc.stream_mixing(
            jnp.ones((T, S, D)), **given | {"base": jnp.ones(3)}, iterations=2, eps=EPS, norm_eps=EPS
        )
    with pytest.raises(TypeCheckError, match="'comb'"):
        mhc.expand(jnp.ones((T, S, D)), jnp.ones((T, D)), jnp.ones((T, S)), jnp.ones((T, S, 3)))
