"""Core attention: one softmax in float64, however many blocks; what no query sees does not exist."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import TypeCheckError

from goldenkv.ops import attend

OUTPUT = 3e-6
"""Absolute, for values of size 1: scores of 16 products and a softmax over at most 60 keys, in float32."""

T, HEADS, D = 5, 4, 16


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def mask(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).random(shape) < 0.6


def bits(x) -> np.ndarray:
    return np.asarray(x, np.float32).view(np.uint32)


def reference(q, keys, visible, sinks) -> np.ndarray:
    """One softmax a query and head over the keys it sees; `keys` is [n, d] or, for each query, [t, n, d]."""
    q, keys, sinks = (np.asarray(x).astype(np.float64) for x in (q, keys, sinks))
    out = np.zeros(q.shape)
    for t, h in itertools.product(range(q.shape[0]), range(q.shape[1])):
        seen = (keys[t] if keys.ndim == 3 else keys)[np.asarray(visible)[t]]
        weight = np.exp(seen @ q[t, h] * q.shape[2] ** -0.5)
        out[t, h] = weight @ seen / (weight.sum() + np.exp(sinks[h]))
    return out


def inputs(seed: int, window: int = 24, entries: int = 36) -> dict[str, np.ndarray]:
    return {
        "q": 2 * normal(seed, T, HEADS, D),
        "window": normal(seed + 1, window, D),
        "window_visible": mask(seed + 2, T, window),
        "entries": normal(seed + 3, entries, D),
        "entries_visible": mask(seed + 4, T, entries),
        "sinks": normal(seed + 5, HEADS),
    }


def device(x: dict[str, np.ndarray]) -> dict[str, jax.Array]:
    return {name: jnp.asarray(value) for name, value in x.items()}


def everything(x: dict[str, np.ndarray]) -> np.ndarray:
    keys = np.concatenate([x["window"], x["entries"]])
    return reference(
        x["q"], keys, np.concatenate([x["window_visible"], x["entries_visible"]], axis=1), x["sinks"]
    )


@pytest.mark.parametrize("key_block", [1, 5, 32, 64])
def test_hca_is_one_softmax_however_it_is_blocked(key_block: int) -> None:
    x = inputs(1)
    got = attend.hca_attention(**device(x), key_block=key_block)
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, everything(x), rtol=0, atol=OUTPUT)


def test_mutants_differ() -> None:
    """Each plausible misreading is far outside the tolerance."""
    x = inputs(2)
    got, expected = np.asarray(attend.hca_attention(**device(x))), everything(x)
    np.testing.assert_allclose(got, expected, rtol=0, atol=OUTPUT)
    alone = reference(x["q"], x["window"], x["window_visible"], x["sinks"])
    compressed = reference(x["q"], x["entries"], x["entries_visible"], x["sinks"])
    mutants = {
        "two softmaxes added": alone + compressed,
        "no sinks": everything(x | {"sinks": np.full(HEADS, -np.inf)}),
        "no scale": everything(x | {"q": x["q"] * D**0.5}),
        "one sink for all heads": everything(x | {"sinks": np.roll(x["sinks"], 1)}),
        "one key more": everything(x | {"entries_visible": x["entries_visible"] | (np.arange(36) == 7)}),
    }
    for name, mutant in mutants.items():
        assert np.max(np.abs(mutant - got)) > 1000 * OUTPUT, name


@pytest.mark.parametrize("cuts", [[], [1], [7, 8, 30], [10, 20, 30, 40, 50]], ids=str)
def test_online_softmax_in_any_blocks(cuts: list[int]) -> None:
    q, keys, visible, sinks = 2 * normal(3, T, HEADS, D), normal(4, 60, D), mask(5, T, 60), normal(6, HEADS)
    visible[1, :30] = visible[2, 30:] = False  # nothing to see in early or in late blocks
    state = attend.start(T, HEADS, D)
    for begin, end in itertools.pairwise([0, *cuts, 60]):
        state = attend.absorb(
            state, jnp.asarray(q), jnp.asarray(keys[begin:end]), jnp.asarray(visible[:, begin:end])
        )
    got = attend.finish(state, jnp.asarray(sinks))
    np.testing.assert_allclose(got, reference(q, keys, visible, sinks), rtol=0, atol=OUTPUT)


def test_scores_of_any_size_stay_finite() -> None:
    q, keys, visible = 300 * normal(7, T, HEADS, D), normal(8, 40, D), np.ones((T, 40), bool)
    state = attend.start(T, HEADS, D)
    for begin in (0, 20):
        state = attend.absorb(
            state, jnp.asarray(q), jnp.asarray(keys[begin : begin + 20]), jnp.asarray(visible[:, :20])
        )
    got = np.asarray(attend.finish(state, jnp.zeros(HEADS)))
    scores = np.einsum("thd,nd->thn", q.astype(np.float64), keys) / 4
    best = keys[np.argmax(scores, axis=-1)]
    clear = np.diff(np.sort(scores, axis=-1)[..., -2:]).squeeze(-1) > 30  # one key far ahead takes all
    assert np.isfinite(got).all() and clear.any()
    np.testing.assert_allclose(got[clear], best[clear], rtol=0, atol=OUTPUT)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bfloat16_inputs_are_attended_in_float32(dtype: str) -> None:
    x = {name: jnp.asarray(v, None if v.dtype == bool else dtype) for name, v in inputs(9).items()}
    got = attend.hca_attention(**x)
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, everything({n: np.asarray(v) for n, v in x.items()}), rtol=0, atol=OUTPUT)


def test_sinks_add_to_the_denominator_alone() -> None:
    """With a sink s the output is the one without it times total / (total + exp(s))."""
    x = inputs(10)
    x["window_visible"][:, 0] = True
    arguments = [jnp.asarray(x[name]) for name in ("q", "window", "window_visible")]
    without = np.asarray(attend.window_attention(*arguments, jnp.full(HEADS, -jnp.inf)), np.float64)
    scores = np.einsum("thd,nd->thn", x["q"].astype(np.float64), x["window"]) * D**-0.5
    total = np.sum(np.exp(scores) * x["window_visible"][:, None, :], axis=-1)
    for sinks in (x["sinks"], np.full(HEADS, 4.0, np.float32), np.full(HEADS, 200.0, np.float32)):
        got = attend.window_attention(*arguments, jnp.asarray(sinks))
        share = total / (total + np.exp(sinks.astype(np.float64)))
        np.testing.assert_allclose(got, without * share[:, :, None], rtol=0, atol=OUTPUT)


def test_a_query_that_sees_nothing_returns_zero() -> None:
    x = inputs(11)
    x["window_visible"][2] = x["entries_visible"][2] = False
    got = np.asarray(attend.hca_attention(**device(x)))
    np.testing.assert_array_equal(bits(got[2]), np.zeros((HEADS, D), np.uint32))
    assert np.isfinite(got).all()
    for sink in (-np.inf, -1e9, 0.0, 300.0):
        empty = attend.finish(attend.start(T, HEADS, D), jnp.full(HEADS, sink))
        np.testing.assert_array_equal(bits(empty), np.zeros((T, HEADS, D), np.uint32))


@pytest.mark.parametrize("garbage", [np.nan, np.inf, -np.inf, 3e38])
def test_keys_that_no_query_sees_may_hold_anything(garbage: float) -> None:
    x = inputs(12)
    x["window_visible"][:, [0, 11, 23]] = False
    x["entries_visible"][:, [5, 35]] = False

    def with_keys(value: float) -> jax.Array:
        x["window"][[0, 11, 23]] = value
        x["entries"][[5, 35]] = value
        return attend.hca_attention(**device(x), key_block=16)

    np.testing.assert_array_equal(bits(with_keys(garbage)), bits(with_keys(0.0)))
    x["entries_visible"][0, 5] = True  # and a key that is seen does matter
    assert not np.isfinite(with_keys(garbage)).all() or garbage == 3e38


def selected_ids(seed: int, entries: int, top_k: int) -> np.ndarray:
    """Different ids in random order, with some -1 at the end of each row."""
    rng = np.random.default_rng(seed)
    ids = np.array([rng.permutation(entries)[:top_k] for _ in range(T)], np.int32)
    return np.where(np.arange(top_k) < rng.integers(0, top_k + 1, (T, 1)), ids, -1).astype(np.int32)


def csa(x: dict[str, np.ndarray], selected: np.ndarray) -> np.ndarray:
    given = {name: value for name, value in device(x).items() if name != "entries_visible"}
    return np.asarray(attend.csa_attention(**given, selected=jnp.asarray(selected)))


@pytest.mark.parametrize("seed", range(3))
def test_csa_attends_to_the_window_and_the_selected_entries(seed: int) -> None:
    x, selected = inputs(20 + seed), selected_ids(seed, 36, 8)
    chosen = np.array([[n in row for n in range(36)] for row in selected])
    expected = everything(x | {"entries_visible": chosen})
    np.testing.assert_allclose(csa(x, selected), expected, rtol=0, atol=OUTPUT)
    shifted = np.where(selected >= 0, (selected + 1) % 36, -1).astype(np.int32)
    assert np.max(np.abs(csa(x, shifted) - expected)) > 1000 * OUTPUT


def test_csa_with_every_entry_selected_is_hca() -> None:
    x = inputs(30)
    x["entries_visible"][:] = True
    order = np.array([np.random.default_rng(t).permutation(36) for t in range(T)], np.int32)
    np.testing.assert_allclose(csa(x, order), attend.hca_attention(**device(x)), rtol=0, atol=OUTPUT)


def test_minus_one_is_never_read() -> None:
    """-1 would wrap to the last entry, and a clamped index to the first: both hold NaN."""
    x, selected = inputs(31), selected_ids(4, 34, 8)
    selected = np.where(selected >= 0, selected + 1, -1).astype(np.int32)  # 1 .. 34 of 0 .. 35
    assert (selected == -1).any()
    clean = csa(x, selected)
    x["entries"][[0, 35]] = np.nan
    np.testing.assert_array_equal(bits(csa(x, selected)), bits(clean))
    selected[0, 0] = 35
    assert np.isnan(csa(x, selected)).any()  # the check can fail


def test_without_entries_only_the_window_is_left() -> None:
    x = inputs(32, entries=0)
    window = attend.window_attention(*(jnp.asarray(x[n]) for n in ("q", "window", "window_visible", "sinks")))
    np.testing.assert_array_equal(bits(attend.hca_attention(**device(x))), bits(window))
    np.testing.assert_array_equal(bits(csa(x, np.full((T, 8), -1, np.int32))), bits(window))
    all_minus_one = csa(inputs(32), np.full((T, 8), -1, np.int32))
    np.testing.assert_allclose(all_minus_one, window, rtol=0, atol=OUTPUT)


def test_the_window_is_the_last_w_tokens() -> None:
    keys = np.array([-3, 0, 1, 120, 127, 128, 129, 300])
    queries = np.array([0, 1, 127, 128, 129, 255, 256])
    got = np.asarray(
        attend.window_visible(jnp.asarray(queries, jnp.int32), jnp.asarray(keys, jnp.int32), 128)
    )
    expected = [[k >= 0 and t - 127 <= k <= t for k in keys] for t in queries]
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("window", [8, 128])
def test_a_key_at_distance_w_is_gone_and_at_w_minus_1_is_not(window: int) -> None:
    query, keys = window + 10, normal(40, window + 20, D)
    positions = np.arange(window + 20, dtype=np.int32)
    visible = attend.window_visible(jnp.asarray([query], jnp.int32), jnp.asarray(positions), window)
    q, sinks = jnp.asarray(normal(41, 1, HEADS, D)), jnp.zeros(HEADS)

    def run(moved: int | None) -> np.ndarray:
        rows = keys.copy()
        if moved is not None:
            rows[moved] += 1
        return bits(attend.window_attention(q, jnp.asarray(rows), visible, sinks))

    before = run(None)
    for distance, same in ((window, True), (window - 1, False), (0, False), (-1, True)):
        assert np.array_equal(run(query - distance), before) is same, distance


def test_a_query_does_not_depend_on_the_others() -> None:
    """In one compiled shape: the other queries' values and what they see change no bit of this one."""
    x = inputs(42)
    other = inputs(43)
    for name in ("q", "window_visible", "entries_visible"):
        other[name][3] = x[name][3]
    x["window_visible"][0] = other["window_visible"][0] = True  # every key is seen by some query
    x["entries_visible"][0] = other["entries_visible"][0] = True
    mixed = x | {name: other[name] for name in ("q", "window_visible", "entries_visible")}
    run = jax.jit(attend.hca_attention)
    np.testing.assert_array_equal(bits(run(**device(x))[3]), bits(run(**device(mixed))[3]))


def test_wrong_shapes_are_refused() -> None:
    x = device(inputs(50))
    with pytest.raises(TypeCheckError, match="'window_visible'"):
        attend.hca_attention(**x | {"window_visible": x["window_visible"][:, :3]})
    with pytest.raises(TypeCheckError, match="'sinks'"):
        attend.hca_attention(**x | {"sinks": x["sinks"][:2]})
