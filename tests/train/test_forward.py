"""The forward pass that is trained: the same function as the engine's, with gradients that are right."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from goldenkv.config import ModelConfig, Numerics, micro
from goldenkv.engine import Engine
from goldenkv.model.weights import Model
from goldenkv.train import forward as module
from goldenkv.train.forward import Pass
from goldenkv.train.loop import next_token_losses, path_name
from goldenkv.train.shapes import count, small, window_only

TOLERANCE = 2e-5
"""Of logits of size 1: float32 sums in another order, through three to five layers."""

LENGTHS = (1, 3, 8, 17, 40)
"""One token; within a block; a whole window; past windows and blocks; with more entries than top-k."""

CONFIGS = {
    "micro": micro(),
    "learned routing": replace(micro(), num_hash_layers=0),
    "two CSA layers": replace(micro(), num_hidden_layers=4, compress_ratios=(0, 4, 8, 4)),
    "window only": replace(micro(), compress_ratios=(0, 0, 0)),
    "one stream": replace(micro(), hc_mult=1),
}


def tokens_of(config: ModelConfig, count: int = 40) -> np.ndarray:
    return np.random.default_rng(7).integers(0, config.vocab_size, count).astype(np.int32)


def furthest(config: ModelConfig, run: Pass) -> float:
    """The largest difference from the engine's logits at any of the lengths."""
    model, tokens = Model(config, Numerics()), tokens_of(config)
    logits = np.asarray(jax.jit(partial(run, model))(jnp.asarray(tokens)).logits)
    engine = Engine(model, config, Numerics(), slots=len(LENGTHS), max_length=len(tokens))
    expected = {length: engine.prefill(engine.open(), tokens[:length]) for length in LENGTHS}
    return max(float(np.abs(logits[length - 1] - row).max()) for length, row in expected.items())


@pytest.mark.parametrize("name", CONFIGS)
def test_it_is_the_engines_function(name: str) -> None:
    assert furthest(CONFIGS[name], Pass(CONFIGS[name])) < TOLERANCE


def test_a_run_that_differs_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """All entries instead of the chosen ones, products in bfloat16, and a choice of the worst entries."""
    assert furthest(micro(), Pass(micro(), dense=True)) > 100 * TOLERANCE
    assert furthest(micro(), Pass(micro(), dtype="bfloat16")) > 100 * TOLERANCE
    chosen = module._chosen
    monkeypatch.setattr(module, "_chosen", lambda scores, seen, k: chosen(-scores, seen, k))
    assert furthest(micro(), Pass(micro())) > 100 * TOLERANCE


def test_dense_and_sparse_agree_where_every_entry_is_chosen() -> None:
    config = replace(micro(), index_topk=16)
    model, tokens = Model(config), jnp.asarray(tokens_of(config))
    sparse, dense = (Pass(config, dense=dense)(model, tokens) for dense in (False, True))
    assert np.array_equal(sparse.logits, dense.logits) and sparse.index_loss == dense.index_loss


def test_a_length_that_is_no_multiple_of_the_window() -> None:
    with pytest.raises(ValueError, match="39 tokens are no multiple of the window 8"):
        Pass(micro())(Model(micro()), jnp.zeros(39, jnp.int32))


def test_load_counts_each_choice() -> None:
    config = micro()
    load = Pass(config)(Model(config), jnp.asarray(tokens_of(config))).load
    assert load.shape == (3, 4) and (load.sum(axis=1) == 40 * config.num_experts_per_tok).all()


# Gradients --------------------------------------------------------------------------------------------------


def split(config: ModelConfig) -> tuple[dict[str, jax.Array], object]:
    """Float weights by path, and what makes a loss of them: (next-token loss, indexers' loss)."""
    paths, structure = jax.tree_util.tree_flatten_with_path(Model(config))
    names = [path_name(path) for path, _ in paths]
    leaves = dict(zip(names, (leaf for _, leaf in paths), strict=True))
    tokens = jnp.asarray(tokens_of(config))

    def losses(params: dict[str, jax.Array], dense: bool = True) -> tuple[jax.Array, jax.Array]:
        model = jax.tree.unflatten(structure, list((leaves | params).values()))
        out = Pass(config, dense)(model, tokens)
        return next_token_losses(out.logits, tokens).mean(), out.index_loss

    return {n: leaf for n, leaf in leaves.items() if leaf.dtype.kind == "f"}, losses


def slope(value, params: dict[str, jax.Array], direction: dict[str, jax.Array], step: float) -> float:
    """By differences: what the gradient says of a direction without any differentiation."""
    there, back = (
        {name: params[name] + sign * step * direction[name] for name in params} for sign in (1.0, -1.0)
    )
    return float((value(there) - value(back)) / (2 * step))


@pytest.mark.parametrize("which", [0, 1], ids=["next token", "indexer"])
def test_compiled_gradients_are_the_slopes(which: int) -> None:
    params, losses = split(micro())
    value = jax.jit(lambda p: losses(p)[which])
    gradient = jax.jit(jax.grad(lambda p: losses(p)[which]))(params)
    # Along the gradient the slope is steep enough to be measured in float32. The indexers' loss is measured
    # along weights of indexers alone: the targets move with all others, which its gradient must not see.
    seen = [n for n in params if which == 0 or "indexer" in n]
    norm = jnp.sqrt(sum(jnp.sum(gradient[name] ** 2) for name in seen))
    direction = {n: gradient[n] / norm if n in seen else jnp.zeros_like(params[n]) for n in params}
    measured = slope(value, params, direction, 2e-3)
    assert abs(measured - norm) < 0.02 * norm
    wrong = {n: g.at[...].multiply(1.1) for n, g in gradient.items()}
    expected = sum(float(jnp.vdot(wrong[n], direction[n])) for n in seen)
    assert abs(measured - expected) > 0.02 * norm  # a tenth too much does show


def test_indexers_learn_from_their_own_loss_alone() -> None:
    params, losses = split(micro())
    next_token = jax.grad(lambda p: losses(p, dense=False)[0])(params)
    indexer = jax.grad(lambda p: losses(p, dense=False)[1])(params)
    for name in params:
        mine = "indexer" in name
        assert not (np.any(next_token[name]) if mine else np.any(indexer[name])), name
    assert any(np.any(g) for n, g in indexer.items() if "indexer" in n)
    assert np.any(next_token["layers.1.attention.compressor.kv"])


def test_rows_that_see_no_entry_leave_gradients_finite() -> None:
    """Before the first block ends a query sees none: 0 / 0 in a softmax would reach every weight."""
    params, losses = split(micro())
    for dense in (True, False):
        gradient = jax.grad(lambda p, dense=dense: sum(losses(p, dense)))(params)
        assert all(np.isfinite(g).all() for g in gradient.values())


# Shapes -----------------------------------------------------------------------------------------------------


def test_the_model_to_compare_with_has_the_same_size() -> None:
    ours, plain = small(), window_only(small())
    assert 2e6 <= count(ours) <= 6e6
    assert abs(count(plain) / count(ours) - 1) < 0.005
    assert set(plain.compress_ratios) == {0} and plain.sliding_window == ours.sliding_window == 128
    assert set(ours.compress_ratios) == {0, 4, 128}
