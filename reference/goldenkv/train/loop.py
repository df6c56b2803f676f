"""The training loop: seeded, and resumable at any step with the same result."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import load_file, save_file

from ..config import ModelConfig, Numerics
from ..model.weights import Model
from .forward import Forward, Pass
from .initial import calm
from .optimiser import optimiser
from .recipe import Recipe

Params = dict[str, jax.Array]
_BALANCE = 0.01
"""How far a step moves the bias of an expert that gets too many or too few tokens."""


@dataclass(frozen=True, slots=True)
class _Shape:
    """How a model is put together from its parameters by name."""

    names: tuple[str, ...]
    structure: Any

    def build(self, leaves: Params) -> Model:
        return jax.tree.unflatten(self.structure, [leaves[name] for name in self.names])


class Trainer:
    """Weights, optimiser state and the step they have reached.

    Args:
        config: the shapes.
        recipe: how to train.
        tokens: the training text, int32.

    Raises:
        MissingExtra: optax is not installed.
        ValueError: the text is shorter than a sequence.
    """

    def __init__(self, config: ModelConfig, recipe: Recipe, tokens: np.ndarray) -> None:
        longest = max(length for _, length in recipe.lengths)
        if len(tokens) <= longest:
            raise ValueError(f"{len(tokens)} tokens are too few for sequences of {longest}")
        self.config, self.recipe, self.tokens, self.step = config, recipe, tokens, 0
        model = Model(config, Numerics(), seed=recipe.seed)
        calm(model, config)
        paths, structure = jax.tree_util.tree_flatten_with_path(model)
        leaves = {path_name(path): leaf for path, leaf in paths}
        self._shape = _Shape(tuple(leaves), structure)
        self._fixed = {name: leaf for name, leaf in leaves.items() if leaf.dtype.kind != "f"}
        self.params: Params = {name: leaf for name, leaf in leaves.items() if name not in self._fixed}
        learned = _learned(self.params)
        self._state = optimiser(recipe, learned).init(learned)

    @property
    def model(self) -> Model:
        """The model as it is now."""
        return self._shape.build(self.params | self._fixed)

    def batch(self, step: int) -> np.ndarray:
        """The sequences of a step, int32 [sequences, tokens]; a function of seed and step alone."""
        length, count = self.recipe.length(step), self.recipe.sequences(step)
        starts = np.random.default_rng([self.recipe.seed, step]).integers(0, len(self.tokens) - length, count)
        return np.stack([self.tokens[start : start + length] for start in starts])

    def advance(self) -> dict[str, float]:
        """One step. Returns its losses (nats a token)."""
        dense = self.recipe.is_dense(self.step)
        tokens = jnp.asarray(self.batch(self.step))
        self.params, self._state, seen = _update(
            self.params, self._state, self._fixed, tokens,
            shape=self._shape, config=self.config, recipe=self.recipe, dense=dense,
        )  # fmt: skip
        self.step += 1
        return {name: float(value) for name, value in seen.items()}

    # Keeping it ----------------------------------------------------------------------------------------

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes all that is needed to go on: in place of what is there only once it is whole."""
        arrays = {f"params.{name}": np.asarray(leaf) for name, leaf in self.params.items()}
        arrays |= {f"state.{n}": np.asarray(leaf) for n, leaf in enumerate(jax.tree.leaves(self._state))}
        about = {"step": str(self.step), "recipe": json.dumps(dataclasses.asdict(self.recipe))}
        partial_path = Path(path).with_suffix(".partial")
        save_file(arrays, partial_path, metadata=about)
        os.replace(partial_path, path)

    def resume(self, path: str | os.PathLike[str]) -> None:
        """Goes on where `save` left off.

        Raises:
            ValueError: the file was saved under another recipe or for another shape.
        """
        from safetensors import safe_open

        with safe_open(path, "numpy") as file:
            about = file.metadata()
        wanted = json.dumps(dataclasses.asdict(self.recipe))
        if about.get("recipe") != wanted:
            raise ValueError(f"{os.fspath(path)!r} was saved under another recipe: {about.get('recipe')}")
        arrays = load_file(path)
        leaves, structure = jax.tree.flatten(self._state)
        params = {name: arrays.get(f"params.{name}") for name in self.params}
        state = [arrays.get(f"state.{n}") for n in range(len(leaves))]
        for found, had in zip([*params.values(), *state], [*self.params.values(), *leaves], strict=True):
            if found is None or found.shape != had.shape:
                raise ValueError(f"{os.fspath(path)!r} was saved for another model")
        self.params = {name: jnp.asarray(value) for name, value in params.items()}
        self._state = jax.tree.unflatten(structure, [jnp.asarray(value) for value in state])
        self.step = int(about["step"])


@partial(jax.jit, static_argnames=("shape", "config", "recipe", "dense"), donate_argnames=("params", "state"))
def _update(
    params: Params,
    state: Any,
    fixed: Params,
    tokens: jax.Array,
    *,
    shape: _Shape,
    config: ModelConfig,
    recipe: Recipe,
    dense: bool,
) -> tuple[Params, Any, dict[str, jax.Array]]:
    """New parameters and optimiser state, and the losses."""
    import optax

    learned = _learned(params)

    def objective(learned: Params) -> tuple[jax.Array, tuple[jax.Array, Forward]]:
        run_one = partial(
            Pass(config, dense, recipe.index_stride, recipe.dtype), shape.build(params | learned | fixed)
        )
        out = jax.vmap(run_one)(tokens)
        loss = next_token_losses(out.logits, tokens).mean()
        return loss + recipe.index_weight * out.index_loss.mean(), (loss, out)

    gradients, (loss, out) = jax.grad(objective, has_aux=True)(learned)
    updates, state = optimiser(recipe, learned).update(gradients, state, learned)
    new = params | optax.apply_updates(learned, updates)
    load = out.load.sum(axis=0)
    for name in filter(_is_bias, params):
        mine = load[int(name.split(".")[1])]
        new[name] = params[name] + _BALANCE * jnp.sign(mine.mean() - mine)
    return new, state, {"loss": loss, "index_loss": out.index_loss.mean()}


def _learned(params: Params) -> Params:
    """Without the routers' biases, which follow the load, not a gradient."""
    return {name: leaf for name, leaf in params.items() if not _is_bias(name)}


def path_name(path: Any) -> str:
    """Where a parameter is in a model, such as "layers.1.attention.kv"."""
    return jax.tree_util.keystr(path, simple=True, separator=".").removesuffix(".value")


def next_token_losses(logits: jax.Array, tokens: jax.Array) -> jax.Array:
    """-log p of each token but the first, nats: [..., t - 1]."""
    log_p = jax.nn.log_softmax(logits[..., :-1, :], axis=-1)
    return -jnp.take_along_axis(log_p, tokens[..., 1:, None], axis=-1)[..., 0]


def held_out_losses(
    model: Model, config: ModelConfig, tokens: np.ndarray, length: int, sequences: int
) -> np.ndarray:
    """Losses [sequences, length - 1] on evenly spaced sequences of a text, nats a token."""
    starts = sequence_starts(len(tokens), length, sequences)
    leaves, structure = jax.tree.flatten(model)
    return np.stack(
        [np.asarray(_losses(leaves, jnp.asarray(tokens[s : s + length]), structure, config)) for s in starts]
    )


def sequence_starts(tokens: int, length: int, sequences: int) -> np.ndarray:
    """Where evenly spaced sequences of a text begin: the first at 0, the last at its end."""
    return np.linspace(0, tokens - length, sequences).astype(int)


@partial(jax.jit, static_argnames=("structure", "config"))
def _losses(leaves: list[jax.Array], tokens: jax.Array, structure: Any, config: ModelConfig) -> jax.Array:
    return next_token_losses(Pass(config)(jax.tree.unflatten(structure, leaves), tokens).logits, tokens)


def _is_bias(name: str) -> bool:
    return name.endswith("moe.bias")


def run(
    trainer: Trainer,
    held_out: np.ndarray,
    report: Callable[[dict[str, Any]], None],
    *,
    every: int = 100,
    keep: str | os.PathLike[str] | None = None,
) -> None:
    """Trains to the end of the recipe.

    Args:
        held_out: text that is not trained on.
        report: gets a row of the curve every `every` steps: step, tokens so far, mean training loss since the
            last row, the indexers' loss, and the held-out loss.
        keep: where to save at each row; resumed from if it is there.
    """
    if keep is not None and Path(keep).exists():
        trainer.resume(keep)
    recipe, since = trainer.recipe, []
    while trainer.step < recipe.steps:
        since.append(trainer.advance())
        if trainer.step % every == 0 or trainer.step == recipe.steps:
            length = recipe.lengths[-1][1]
            losses = held_out_losses(trainer.model, trainer.config, held_out, length, 8)
            report(
                {
                    "step": trainer.step,
                    "tokens": recipe.tokens(trainer.step),
                    "loss": float(np.mean([row["loss"] for row in since])),
                    "index_loss": float(np.mean([row["index_loss"] for row in since])),
                    "held_out": float(losses.mean()),
                }
            )
            since = []
            if keep is not None:
                trainer.save(keep)
