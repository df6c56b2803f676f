"""Compressors: entry by entry against float64, which raw rows an entry takes, and when it exists."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import TypeCheckError

from goldenkv.ops import compress
from goldenkv.ops.rope import frequencies

ENTRY = 2e-6
"""Absolute. Entries have size 1 after the norm: a float32 softmax over at most 256 rows and a rotation."""

ROWS = 1e-6
"""Relative to the largest value: float32 sums of 24 products."""

D = 16
FREQUENCY = frequencies(8, 160000.0, factor=16.0, original_length=4096)
GAIN = (1 + 0.1 * np.random.default_rng(0).standard_normal(D)).astype(np.float32)


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def bits(x) -> np.ndarray:
    return np.asarray(x, np.float32).view(np.uint32)


def raw(seed: int, length: int, overlap: bool) -> tuple[np.ndarray, np.ndarray]:
    channels = 2 * D if overlap else D
    return normal(seed, length, channels), 3 * normal(seed + 100, length, channels)


@partial(jax.jit, static_argnames=("rate", "overlap"))
def ours(kv, score, *, rate: int, overlap: bool) -> jax.Array:
    return compress.compress(kv, score, jnp.asarray(GAIN), FREQUENCY, compress_rate=rate, overlap=overlap)


def softmax_sum(kv: np.ndarray, score: np.ndarray) -> np.ndarray:
    """Over rows, channel by channel."""
    weight = np.exp(score - score.max(axis=0))
    return (weight * kv).sum(axis=0) / weight.sum(axis=0)


def reference(kv, score, rate: int, overlap: bool, *, position_of=lambda w, rate: w * rate) -> np.ndarray:
    kv, score = np.asarray(kv, np.float64), np.asarray(score, np.float64)
    entries = []
    for w in range(len(kv) // rate):
        own = range(w * rate, (w + 1) * rate)
        if not overlap:
            pooled = softmax_sum(kv[own], score[own])
        else:
            values = [kv[t, D:] for t in own]
            scores = [score[t, D:] for t in own]
            for t in range((w - 1) * rate, w * rate):
                values.append(kv[t, :D] if t >= 0 else np.zeros(D))
                scores.append(score[t, :D] if t >= 0 else np.full(D, -np.inf))
            pooled = softmax_sum(np.array(values), np.array(scores))
        entry = pooled / np.sqrt(np.mean(pooled**2) + 1e-6) * GAIN
        angle = position_of(w, rate) * FREQUENCY.astype(np.float64)
        pairs = (entry[-8::2] + 1j * entry[-7::2]) * np.exp(1j * angle)
        entry[-8::2], entry[-7::2] = pairs.real, pairs.imag
        entries.append(entry)
    return np.array(entries).reshape(-1, D)


CASES = [
    (rate, overlap, length)
    for rate, overlap in ((4, True), (8, False), (128, False))
    for length in (0, 1, rate - 1, rate, rate + 1, 2 * rate, 3 * rate - 1)
]


@pytest.mark.parametrize(("rate", "overlap", "length"), CASES)
def test_equals_float64_at_every_edge(rate: int, overlap: bool, length: int) -> None:
    kv, score = raw(length, length, overlap)
    got = ours(kv, score, rate=rate, overlap=overlap)
    assert got.shape == (length // rate, D)  # an unfinished block has no entry
    np.testing.assert_allclose(got, reference(kv, score, rate, overlap), rtol=0, atol=ENTRY)


def test_mutants_differ() -> None:
    """Each plausible misreading of the equations is far outside the tolerance."""
    kv, score = raw(1, 24, True)
    got = ours(kv, score, rate=4, overlap=True)
    swapped = [np.concatenate([x[:, D:], x[:, :D]], axis=1) for x in (kv, score)]
    no_overlap = [x[:, D:] for x in (kv, score)]
    zero_not_inf = np.concatenate([np.zeros((4, 2 * D), np.float32), score])  # score 0 before block 0
    mutants = {
        "halves swapped": reference(*swapped, 4, True),
        "no overlap": reference(*no_overlap, 4, False),
        "position of the last token": reference(kv, score, 4, True, position_of=lambda w, m: w * m + m - 1),
        "position w": reference(kv, score, 4, True, position_of=lambda w, m: w),
        "first block sees rows with score 0": reference(
            np.concatenate([np.zeros((4, 2 * D), np.float32), kv]), zero_not_inf, 4, True
        )[1:],
    }
    for name, mutant in mutants.items():
        assert np.max(np.abs(mutant - got)) > 1000 * ENTRY, name


def changed(before: np.ndarray, after: np.ndarray) -> set[int]:
    return set(np.flatnonzero((bits(before) != bits(after)).any(axis=1)).tolist())


@pytest.mark.parametrize("which", ["kv", "score"])
def test_csa_a_row_reaches_its_own_entry_and_the_next(which: str) -> None:
    """Its second half goes into its own block's entry, its first half into the next one's, and no further."""
    rate, length = 4, 22  # five entries and two rows of an unfinished block
    rows = dict(zip(("kv", "score"), raw(2, length, True), strict=True))
    before = ours(**rows, rate=rate, overlap=True)
    for t in range(length):
        own, following = {t // rate} & set(range(5)), {t // rate + 1} & set(range(5))
        for half, reached in (
            (slice(0, D), following),
            (slice(D, 2 * D), own),
            (slice(None), own | following),
        ):
            moved = {name: values.copy() for name, values in rows.items()}
            moved[which][t, half] += 1.0
            assert changed(before, ours(**moved, rate=rate, overlap=True)) == reached, (t, half)


@pytest.mark.parametrize("which", ["kv", "score"])
def test_hca_a_row_reaches_its_own_entry_alone(which: str) -> None:
    rate, length = 8, 29
    rows = dict(zip(("kv", "score"), raw(3, length, False), strict=True))
    before = ours(**rows, rate=rate, overlap=False)
    for t in range(length):
        moved = {name: values.copy() for name, values in rows.items()}
        moved[which][t] += 1.0
        expected = {t // rate} & set(range(3))
        assert changed(before, ours(**moved, rate=rate, overlap=False)) == expected


def test_overlap_blocks_takes_the_stated_halves() -> None:
    kv, score = normal(4, 4, 4, 2 * D), normal(5, 4, 4, 2 * D)
    for got, rows in zip(
        compress.overlap_blocks(jnp.asarray(kv), jnp.asarray(score)), (kv, score), strict=True
    ):
        assert got.shape == (3, 8, D)
        for w in range(1, 4):
            np.testing.assert_array_equal(got[w - 1, :4], rows[w - 1, :, :D])
            np.testing.assert_array_equal(got[w - 1, 4:], rows[w, :, D:])


def test_rows_before_the_first_block_have_no_weight() -> None:
    """What stands in the kv of a row with score -inf cannot matter, as long as it is finite."""
    kv, score = normal(6, 2, 8, D), normal(7, 2, 8, D)
    score[0, :4] = -np.inf
    got = compress.pool_rows(jnp.asarray(kv), jnp.asarray(score))
    np.testing.assert_allclose(got[0], softmax_sum(kv[0, 4:].astype(float), score[0, 4:]), rtol=0, atol=ENTRY)
    kv[0, :4] = 1e30
    np.testing.assert_array_equal(bits(compress.pool_rows(jnp.asarray(kv), jnp.asarray(score))), bits(got))


def test_a_block_without_rows_is_zero() -> None:
    got = compress.pool_rows(jnp.ones((1, 8, D)), jnp.full((1, 8, D), -jnp.inf))
    np.testing.assert_array_equal(np.asarray(got), np.zeros((1, D)))


def test_large_scores_do_not_overflow() -> None:
    kv, score = normal(8, 3, 8, D), 1e4 * normal(9, 3, 8, D)
    got = np.asarray(compress.pool_rows(jnp.asarray(kv), jnp.asarray(score)))
    expected = [
        softmax_sum(a.astype(np.float64), b.astype(np.float64)) for a, b in zip(kv, score, strict=True)
    ]
    np.testing.assert_allclose(got, expected, rtol=0, atol=ENTRY)


@pytest.mark.parametrize("first", [0, 1, 3, 126])
def test_position_bias_goes_by_position_within_the_block(first: int) -> None:
    x, weights, bias = normal(10, 10, 24), normal(11, 2, 24, D), normal(12, 4, D)
    positions = first + np.arange(10)
    kv, score = compress.compressor_rows(
        jnp.asarray(x), *jnp.asarray(weights), jnp.asarray(bias), jnp.asarray(positions, jnp.int32)
    )
    products = np.einsum("ti,jic->jtc", x.astype(np.float64), weights.astype(np.float64))
    expected = products[1] + [bias[t % 4] for t in positions]
    size = np.max(np.abs(expected))
    np.testing.assert_allclose(kv, products[0], rtol=0, atol=ROWS * size)
    np.testing.assert_allclose(score, expected, rtol=0, atol=ROWS * size)
    one_late = products[1] + [bias[(t + 1) % 4] for t in positions]
    assert np.max(np.abs(one_late - np.asarray(score))) > 1000 * ROWS * size


def test_bfloat16_inputs_are_computed_in_float32() -> None:
    x, weights = jnp.asarray(normal(13, 6, 24), jnp.bfloat16), jnp.asarray(normal(14, 2, 24, D))
    got = compress.compressor_rows(x, *weights, jnp.zeros((4, D)), jnp.arange(6, dtype=jnp.int32))
    expected = np.einsum("ti,jic->jtc", np.asarray(x, np.float64), np.asarray(weights, np.float64))
    np.testing.assert_allclose(got, expected, rtol=0, atol=ROWS * np.max(np.abs(expected)))


@pytest.mark.parametrize("rate", [4, 8, 128])
def test_a_query_sees_the_entries_whose_blocks_have_ended(rate: int) -> None:
    positions = np.arange(301)
    got = np.asarray(compress.visible_entries(jnp.asarray(positions, jnp.int32), rate))
    for t in positions:
        by_rule = [w for w in range(400) if w < (t + 1) // rate]
        by_last_token = [w for w in range(400) if (w + 1) * rate - 1 <= t]
        assert by_rule == by_last_token == list(range(got[t]))


def test_wrong_shapes_are_refused() -> None:
    kv = jnp.zeros((8, 2 * D))
    with pytest.raises(ValueError, match=r"kv.shape\[1\]=32 must be 16 for overlap=False"):
        compress.compress(kv, kv, jnp.asarray(GAIN), FREQUENCY, compress_rate=4, overlap=False)
    with pytest.raises(TypeCheckError, match="'score'"):
        compress.compress(kv, kv[:4], jnp.asarray(GAIN), FREQUENCY, compress_rate=4, overlap=True)
    with pytest.raises(TypeCheckError, match="'score'"):
        compress.pool_rows(jnp.zeros((2, 4, D)), jnp.zeros((2, 4, D), jnp.bfloat16))


def test_eager_equals_compiled_within_the_tolerance() -> None:
    kv, score = raw(15, 24, True)
    arrays = (jnp.asarray(x) for x in (kv, score, GAIN))
    eager = compress.compress(*arrays, FREQUENCY, compress_rate=4, overlap=True)
    np.testing.assert_allclose(eager, ours(kv, score, rate=4, overlap=True), rtol=0, atol=ENTRY)
