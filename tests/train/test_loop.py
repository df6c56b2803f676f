"""Training is seeded and resumes bit for bit; what it writes is a checkpoint."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from goldenkv.config import Numerics, micro
from goldenkv.model.checkpoint import load_checkpoint
from goldenkv.train import Recipe, Trainer, held_out_losses, train_tokenizer
from goldenkv.train.export import export, rounded
from goldenkv.train.loop import run
from goldenkv.train.optimiser import optimiser
from goldenkv.train.study import by_position

pytest.importorskip("optax", reason="the extra 'train' is not installed")

CONFIG = replace(micro(), num_hidden_layers=2, compress_ratios=(4, 8), hc_mult=2, hc_sinkhorn_iters=2)
RECIPE = Recipe(steps=8, batch_tokens=64, lengths=((0.5, 16), (0.5, 32)), dense=0.25, rate=1e-2)
TEXT = np.tile(np.arange(24, dtype=np.int32), 40)


def bits(params: dict[str, jax.Array]) -> dict[str, bytes]:
    return {name: np.asarray(leaf).tobytes() for name, leaf in params.items()}


def trainer(recipe: Recipe = RECIPE) -> Trainer:
    return Trainer(CONFIG, recipe, TEXT)


@pytest.fixture(scope="module")
def trained() -> Trainer:
    made = trainer()
    while made.step < RECIPE.steps:
        made.advance()
    return made


def test_the_same_seed_gives_the_same_bits(trained: Trainer) -> None:
    again = trainer()
    while again.step < RECIPE.steps:
        again.advance()
    assert bits(again.params) == bits(trained.params)
    other = trainer(replace(RECIPE, seed=1))
    assert bits(other.params) != bits(trainer().params)


@pytest.mark.parametrize("stop", [1, 4, 7])
def test_a_run_that_stops_and_resumes_ends_with_the_same_bits(
    stop: int, trained: Trainer, tmp_path: Path
) -> None:
    """In the dense part, at the change of lengths, and before the last step."""
    first, second = trainer(), trainer()
    while first.step < stop:
        first.advance()
    first.save(tmp_path / "state.safetensors")
    second.resume(tmp_path / "state.safetensors")
    assert second.step == stop
    while second.step < RECIPE.steps:
        second.advance()
    assert bits(second.params) == bits(trained.params)


def test_resuming_without_the_optimisers_state_is_seen(trained: Trainer) -> None:
    """The control of the test above."""
    first, second = trainer(), trainer()
    for _ in range(4):
        first.advance()
    second.params, second.step = first.params, first.step
    while second.step < RECIPE.steps:
        second.advance()
    assert bits(second.params) != bits(trained.params)


def test_a_state_of_another_run_is_refused(tmp_path: Path) -> None:
    made = trainer()
    made.save(tmp_path / "state.safetensors")
    with pytest.raises(ValueError, match="saved under another recipe"):
        trainer(replace(RECIPE, rate=1e-3)).resume(tmp_path / "state.safetensors")
    wider = Trainer(replace(CONFIG, moe_intermediate_size=24), RECIPE, TEXT)
    with pytest.raises(ValueError, match="saved for another model"):
        wider.resume(tmp_path / "state.safetensors")
    assert bits(wider.params) == bits(Trainer(wider.config, RECIPE, TEXT).params)  # nothing half-done


def test_batches_follow_from_seed_and_step() -> None:
    made = trainer()
    assert [made.batch(step).shape for step in (0, 3, 4, 7)] == [(4, 16), (4, 16), (2, 32), (2, 32)]
    assert np.array_equal(made.batch(3), trainer().batch(3))
    assert not np.array_equal(made.batch(3), made.batch(2))
    assert RECIPE.tokens(8) == sum(made.batch(step).size for step in range(8))


def test_every_weight_is_trained_as_the_report_says() -> None:
    """By Muon the matrices of attention and experts. A name that fits nothing would go to Adam unseen."""
    made = trainer()
    gradients = {name: jax.random.normal(jax.random.key(1), leaf.shape) for name, leaf in made.params.items()}
    method = optimiser(replace(RECIPE, warm_up=0.0, weight_decay=0.0), made.params)
    updates, _ = method.update(gradients, method.init(made.params), made.params)
    sizes = {name: np.abs(np.asarray(update)) for name, update in updates.items()}
    # In its first step Adam moves every element by the same amount.
    found = {name for name, size in sizes.items() if size.max() > 1.01 * size.min()}
    others = ("position_bias", "router", "head_weight")
    matrices = {n for n, leaf in made.params.items() if leaf.ndim >= 2 and ("attention." in n or "moe." in n)}
    assert found == {n for n in matrices if not n.endswith(others)} and len(found) > 15
    assert {n for n in made.params if n.endswith("moe.bias")} == {"layers.1.moe.bias"}


def test_it_learns(trained: Trainer) -> None:
    fresh = trainer()
    before, after = (held_out_losses(made.model, CONFIG, TEXT, 32, 2).mean() for made in (fresh, trained))
    assert after < 0.8 * before
    assert np.any(trained.params["layers.1.moe.bias"] != fresh.params["layers.1.moe.bias"])  # of the load
    tables = [np.asarray(made.model.layers[0].moe.table[...]) for made in (fresh, trained)]
    assert np.array_equal(*tables)


def test_reports_and_resumes(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = []
    held_out = TEXT[:128]
    run(trainer(), held_out, rows.append, every=3, keep=tmp_path / "state.safetensors")
    assert [row["step"] for row in rows] == [3, 6, 8]
    assert rows[-1]["tokens"] == RECIPE.tokens(8) and all(np.isfinite(row["held_out"]) for row in rows)
    run(trainer(), held_out, rows.append, keep=tmp_path / "state.safetensors")
    assert len(rows) == 3  # it was done


def test_losses_by_position() -> None:
    losses = np.arange(1.0, 8.0)[None, :]  # of the tokens at positions 1 to 7
    assert by_position(losses, (0, 2, 4, 8)) == [1.0, 2.5, 5.5]
    made = trainer()
    found = held_out_losses(made.model, CONFIG, TEXT, 16, 3)
    assert found.shape == (3, 15) and np.isfinite(found).all()


def test_what_is_written_is_a_checkpoint(trained: Trainer, tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers", reason="the extra 'train' is not installed")
    assert tokenizers
    about = {"recipe": dataclasses.asdict(RECIPE)}
    for _ in range(2):  # the second replaces the first
        export(
            trained.model,
            CONFIG,
            tmp_path,
            tokenizer=train_tokenizer(["abc"], 257),
            held_out=TEXT,
            training=about,
        )
    config, model = load_checkpoint(tmp_path, numerics=Numerics())
    assert config == CONFIG
    expected = rounded(trained.model, CONFIG)
    for found, leaf in zip(jax.tree.leaves(model), jax.tree.leaves(expected), strict=True):
        assert np.array_equal(np.asarray(found), np.asarray(leaf.astype(found.dtype)))
    assert any(
        not np.array_equal(np.asarray(a), np.asarray(b))
        for a, b in zip(jax.tree.leaves(model), jax.tree.leaves(trained.model), strict=True)
    )  # it was rounded to bfloat16
    assert json.loads((tmp_path / "training.json").read_text())["recipe"]["steps"] == 8


def test_a_text_that_is_too_short() -> None:
    with pytest.raises(ValueError, match="32 tokens are too few for sequences of 32"):
        Trainer(CONFIG, RECIPE, TEXT[:32])
