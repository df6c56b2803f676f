"""Writing what was trained as a checkpoint folder that needs nothing else."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors.numpy import save_file

from ..config import ModelConfig, Numerics
from ..model.checkpoint import save_checkpoint
from ..model.weights import Model

HELD_OUT = 32768
"""Tokens of held-out text that go with a checkpoint."""


def rounded(model: Model, config: ModelConfig) -> Model:
    """The model in the dtypes of a BF16 checkpoint: matrices in bfloat16, the rest in float32."""
    shapes, structure = jax.tree.flatten(Model(config, Numerics(dtype="bfloat16"), seed=None))
    values = [leaf.astype(shape.dtype) for leaf, shape in zip(jax.tree.leaves(model), shapes, strict=True)]
    return jax.tree.unflatten(structure, values)


def export(
    model: Model,
    config: ModelConfig,
    folder: str | os.PathLike[str],
    *,
    tokenizer: Any,
    held_out: np.ndarray,
    training: dict[str, Any],
) -> None:
    """Writes the weights under their published names, the tokenizer, held-out tokens and how it was trained.

    Weights that are there are replaced.

    Args:
        held_out: tokens of text that was not trained on; the first `HELD_OUT` are kept.
        training: goes to `training.json`.
    """
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    for old in path.glob("model*.safetensors*"):
        old.unlink()
    (path / "held_out.safetensors").unlink(missing_ok=True)
    save_checkpoint(rounded(model, config), config, path)
    tokenizer.save(str(path / "tokenizer.json"))
    save_file({"tokens": held_out[:HELD_OUT].astype(np.uint16)}, path / "held_out.safetensors")
    (path / "training.json").write_text(json.dumps(training, indent=1) + "\n")
