"""Mixture of experts: the dense sum against a loop over each token's own experts in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import TypeCheckError

from goldenkv.ops import moe

SUM = 2e-6
"""Relative to the largest output: float32 sums of 16 products, then of 6 experts times 24 channels."""

SCORE = 2e-6
"""Relative: a sum of 16 products, softplus and a square root in float32."""

T, HIDDEN, EXPERTS, INNER, TOP_K = 7, 16, 6, 24, 2
LIMIT = 1.5
"""Low, so that both clamps act on random inputs."""


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def bits(x) -> np.ndarray:
    return np.asarray(x, np.float32).view(np.uint32)


def wide(*arrays) -> list[np.ndarray]:
    return [np.asarray(x).astype(np.float64) for x in arrays]


def silu(x):
    return x / (1 + np.exp(-x))


def expert_weights(seed: int) -> list[np.ndarray]:
    return [
        normal(seed, EXPERTS, HIDDEN, INNER) * 0.5,
        normal(seed + 1, EXPERTS, HIDDEN, INNER) * 0.5,
        normal(seed + 2, EXPERTS, INNER, HIDDEN),
    ]


def loop_over_chosen(x, scores, chosen, gate, up, down, scale, *, clamp_gate=lambda g: np.minimum(g, LIMIT),
                     clamp_up=lambda u: np.clip(u, -LIMIT, LIMIT), bias=0.0) -> np.ndarray:  # fmt: skip
    """Token by token, over the experts that it chose; `bias` here is the mistake of weighing with it."""
    x, scores, gate, up, down = wide(x, scores, gate, up, down)
    scores = scores + bias
    out = np.zeros(x.shape)
    for t, row in enumerate(np.asarray(chosen)):
        for e in row:
            hidden = silu(clamp_gate(x[t] @ gate[e])) * clamp_up(x[t] @ up[e])
            out[t] += scores[t, e] / scores[t, row].sum() * scale * hidden @ down[e]
    return out


def test_router_scores() -> None:
    x, weight = normal(1, T, HIDDEN), normal(2, HIDDEN, EXPERTS)
    got = moe.router_scores(jnp.asarray(x), jnp.asarray(weight))
    logits = x.astype(np.float64) @ weight
    np.testing.assert_allclose(got, np.sqrt(np.log1p(np.exp(logits))), rtol=SCORE)
    for mutant in (1 / (1 + np.exp(-logits)), np.log1p(np.exp(logits))):  # sigmoid, softplus without the root
        assert np.max(np.abs(mutant - np.asarray(got))) > 1000 * SCORE


def test_router_scores_at_the_ends() -> None:
    logits = np.float32([-80, -20, 0, 20, 90, 1e4])
    got = moe.router_scores(jnp.asarray(logits)[:, None], jnp.ones((1, 1)))[:, 0]
    np.testing.assert_allclose(got, np.sqrt(np.logaddexp(0, logits.astype(np.float64))), rtol=SCORE)


def test_router_scores_are_float32_whatever_the_input() -> None:
    x, weight = jnp.asarray(normal(3, T, HIDDEN), jnp.bfloat16), normal(4, HIDDEN, EXPERTS)
    got = moe.router_scores(x, jnp.asarray(weight))
    assert got.dtype == jnp.float32
    expected = np.sqrt(np.log1p(np.exp(wide(x)[0] @ weight)))
    np.testing.assert_allclose(got, expected, rtol=SCORE)


def test_the_bias_chooses() -> None:
    scores, bias = np.abs(normal(5, 200, EXPERTS)), normal(6, EXPERTS)
    got = np.asarray(moe.learned_routing(jnp.asarray(scores), jnp.asarray(bias), TOP_K))
    assert got.dtype == np.int32
    biased = scores + bias
    expected = [sorted(range(EXPERTS), key=lambda e: (-row[e], e))[:TOP_K] for row in biased]
    assert got.tolist() == expected
    assert got.tolist() != [sorted(range(EXPERTS), key=lambda e: (-row[e], e))[:TOP_K] for row in scores]


def test_ties_go_to_the_lowest_expert() -> None:
    scores = jnp.asarray(np.float32([[1, 2, 2, 1, 2, 0], [0, 0, 0, 0, 0, 0]]))
    assert moe.learned_routing(scores, jnp.zeros(EXPERTS), 2).tolist() == [[1, 2], [0, 1]]


def test_hash_routing_reads_the_table() -> None:
    table = np.random.default_rng(7).integers(0, EXPERTS, (50, TOP_K)).astype(np.int32)
    tokens = np.array([0, 49, 7, 7, 31], np.int32)
    np.testing.assert_array_equal(moe.hash_routing(jnp.asarray(tokens), jnp.asarray(table)), table[tokens])


@pytest.mark.parametrize("normalise", [True, False])
def test_weights_of_the_chosen_experts(normalise: bool) -> None:
    scores = np.abs(normal(8, T, EXPERTS)) + np.float32(0.1)
    chosen = np.array([np.random.default_rng(t).permutation(EXPERTS)[:TOP_K] for t in range(T)], np.int32)
    got = moe.routing_weights(jnp.asarray(scores), jnp.asarray(chosen), 2.5, normalise=normalise)
    expected = np.zeros((T, EXPERTS))
    for t, row in enumerate(chosen):
        for e in row:
            expected[t, e] = scores[t, e] * 2.5 / (scores[t, row].astype(float).sum() if normalise else 1)
    np.testing.assert_allclose(got, expected, rtol=1e-6)
    if normalise:
        np.testing.assert_allclose(np.sum(got, axis=1), 2.5, rtol=1e-6)
    is_chosen = np.array([[e in row for e in range(EXPERTS)] for row in chosen])
    np.testing.assert_array_equal(bits(got)[~is_chosen], 0)  # exactly +0


def test_an_expert_that_a_table_names_twice_counts_twice() -> None:
    scores = jnp.asarray(np.float32([[1, 3, 4], [1, 3, 4]]))
    chosen = jnp.asarray(np.int32([[1, 1], [2, 0]]))
    got = moe.routing_weights(scores, chosen, 1.5)
    np.testing.assert_allclose(got, [[0, 1.5, 0], [1.5 / 5, 0, 1.5 * 4 / 5]], rtol=1e-6)
    plain = moe.routing_weights(scores, chosen, 1.5, normalise=False)
    np.testing.assert_allclose(plain, [[0, 9, 0], [1.5, 0, 6]], rtol=1e-6)


def test_scores_of_zero_give_weights_of_zero() -> None:
    got = moe.routing_weights(jnp.zeros((1, EXPERTS)), jnp.asarray(np.int32([[0, 1]])), 2.5)
    np.testing.assert_array_equal(np.asarray(got), np.zeros((1, EXPERTS)))


def test_experts_equal_a_loop_over_the_chosen_ones() -> None:
    x, (gate, up, down) = normal(9, T, HIDDEN), expert_weights(10)
    scores, bias = np.abs(normal(13, T, EXPERTS)) + np.float32(0.1), normal(14, EXPERTS)
    chosen = moe.learned_routing(jnp.asarray(scores), jnp.asarray(bias), TOP_K)
    weights = moe.routing_weights(jnp.asarray(scores), chosen, 2.5)
    matrices = [jnp.asarray(m) for m in (gate, up, down)]
    got = np.asarray(moe.experts(jnp.asarray(x), weights, *matrices, LIMIT))
    inputs = (x, scores, chosen, gate, up, down, 2.5)
    expected, size = loop_over_chosen(*inputs), SUM * np.max(np.abs(got))
    np.testing.assert_allclose(got, expected, rtol=0, atol=size)
    mutants = {
        "the bias weighs": loop_over_chosen(*inputs, bias=np.abs(bias)),
        "no clamp of the gate": loop_over_chosen(*inputs, clamp_gate=lambda g: g),
        "the gate clamped below": loop_over_chosen(*inputs, clamp_gate=lambda g: np.clip(g, -LIMIT, LIMIT)),
        "no clamp of the linear part": loop_over_chosen(*inputs, clamp_up=lambda u: u),
        "the linear part clamped above alone": loop_over_chosen(
            *inputs, clamp_up=lambda u: np.minimum(u, LIMIT)
        ),
        "experts by score alone": loop_over_chosen(
            x, scores, np.argsort(-scores, axis=1)[:, :TOP_K], gate, up, down, 2.5
        ),
    }
    for name, mutant in mutants.items():
        assert np.max(np.abs(mutant - got)) > 1000 * size, name


@pytest.mark.parametrize("limit", [10.0, 0.5])
def test_the_clamps_act_at_the_limit(limit: float) -> None:
    """One expert of one channel: the gate is clamped above, the linear part on both sides."""
    steps = np.float32([-4, -1.001, -1, -0.999, 0, 0.999, 1, 1.001, 4]) * np.float32(limit)
    gates, linears = np.meshgrid(steps, steps)
    x = jnp.asarray(np.stack([gates.ravel(), linears.ravel()], axis=1))
    first, second = (jnp.asarray(np.float32([[a], [b]])) for a, b in ((1, 0), (0, 1)))
    got = moe.expert(x, jnp.ones(len(x)), first, second, jnp.ones((1, 2)), limit)[:, 0]
    g, u = np.minimum(gates.astype(float), limit), np.clip(linears.astype(float), -limit, limit)
    np.testing.assert_allclose(got, (silu(g) * u).ravel(), rtol=1e-6, atol=1e-30)


def test_the_shared_expert_is_one_expert_of_weight_one() -> None:
    x, (gate, up, down) = normal(20, T, HIDDEN), expert_weights(21)
    got = moe.expert(jnp.asarray(x), jnp.ones(T), *(jnp.asarray(m[0]) for m in (gate, up, down)), LIMIT)
    expected = loop_over_chosen(x, np.ones((T, 1)), np.zeros((T, 1), int), gate, up, down, 1.0)
    np.testing.assert_allclose(got, expected, rtol=0, atol=SUM * np.max(np.abs(got)))


def test_bfloat16_rounds_the_hidden_channels_once() -> None:
    """Its only rounding besides the float32 sums is that of the hidden channels: 2^-8 of each product."""
    x, matrices = jnp.asarray(normal(30, T, HIDDEN), jnp.bfloat16), expert_weights(31)
    matrices = [jnp.asarray(m, jnp.bfloat16) for m in matrices]
    weights = jnp.full((T, EXPERTS), 0.25)
    got = moe.experts(x, weights, *matrices, LIMIT)
    assert got.dtype == jnp.float32
    wide_x, gate, up, down = wide(x, *matrices)
    hidden = silu(np.minimum(np.einsum("ti,eif->tef", wide_x, gate), LIMIT))
    hidden *= np.clip(np.einsum("ti,eif->tef", wide_x, up), -LIMIT, LIMIT) * 0.25
    error = np.abs(np.asarray(got) - np.einsum("tef,efi->ti", hidden, down))
    bound = 2.0**-8 * 1.01 * np.einsum("tef,efi->ti", np.abs(hidden), np.abs(down))
    assert np.all(error <= bound)


def test_a_row_does_not_depend_on_the_others() -> None:
    """In one compiled shape, whatever the other rows hold and choose."""
    x, matrices = normal(40, T, HIDDEN), [jnp.asarray(m) for m in expert_weights(41)]
    scores = np.abs(normal(44, T, EXPERTS))

    @jax.jit
    def run(x, scores):
        chosen = moe.learned_routing(scores, jnp.zeros(EXPERTS), TOP_K)
        return moe.experts(x, moe.routing_weights(scores, chosen, 1.5), *matrices, LIMIT)

    before = bits(run(x, scores))
    others = np.arange(T) != 3
    x[others], scores[others] = 100 * normal(45, T - 1, HIDDEN), np.abs(normal(46, T - 1, EXPERTS))
    np.testing.assert_array_equal(bits(run(x, scores))[3], before[3])


def test_skipping_an_expert_changes_no_bit() -> None:
    """A row's bits are those it has where other rows make every expert run."""
    x, matrices = jnp.asarray(normal(50, T, HIDDEN)), [jnp.asarray(m) for m in expert_weights(51)]
    run = jax.jit(lambda weights: moe.experts(x, weights, *matrices, LIMIT))
    alone = np.zeros((T, EXPERTS), np.float32)
    alone[2, :2] = 0.75, 0.5
    crowded = alone + np.float32(np.arange(T) != 2)[:, None]
    np.testing.assert_array_equal(bits(run(alone))[2], bits(run(crowded))[2])
    assert not np.any(np.asarray(run(alone))[np.arange(T) != 2])


def test_wrong_shapes_are_refused() -> None:
    with pytest.raises(TypeCheckError, match="'bias'"):
        moe.learned_routing(jnp.ones((2, 4)), jnp.ones(3), 2)
    with pytest.raises(TypeCheckError, match="'down'"):
        moe.experts(jnp.ones((2, 8)), jnp.ones((2, 4)), *[jnp.ones((8, 4, 6))] * 3, 10.0)
