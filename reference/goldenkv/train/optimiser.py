"""The optimiser: Muon for matrices of attention and experts, Adam for the rest (report, section 2.4)."""

from __future__ import annotations

from typing import Any

import jax

from ..errors import MissingExtra
from .recipe import Recipe

_MUON = (
    "attention.q_down", "attention.q_up", "attention.kv", "attention.out_group", "attention.out",
    "compressor.kv", "compressor.gate", "indexer.q",
    "moe.gate", "moe.up", "moe.down", "moe.shared_gate", "moe.shared_up", "moe.shared_down",
)  # fmt: skip
"""Ends of the names of what Muon trains: the matrices of attention and experts. Adam trains the rest."""


def optimiser(recipe: Recipe, params: dict[str, jax.Array]) -> Any:
    """An optax transformation for parameters by name.

    Raises:
        MissingExtra: optax is not installed.
    """
    try:
        import optax
        from optax.contrib import MuonDimensionNumbers, muon
    except ImportError:
        raise MissingExtra("train", "training") from None
    steps = recipe.steps
    rise, fall = round(recipe.warm_up * steps), round(recipe.decay * steps)
    rate = optax.join_schedules(
        [
            optax.linear_schedule(0.0, recipe.rate, max(rise, 1)),
            optax.constant_schedule(recipe.rate),
            optax.linear_schedule(recipe.rate, 0.0, max(fall, 1)),
        ],
        [rise, steps - fall],
    )

    # Which axes of a matrix are inputs and outputs; further ones in front are matrices of their own.
    axes = {name: (leaf.ndim - 2, leaf.ndim - 1) for name, leaf in params.items() if name.endswith(_MUON)}

    def numbers(tree: Any) -> dict[str, Any]:
        return {name: MuonDimensionNumbers(*axes[name]) if name in axes else None for name in tree}

    return optax.chain(
        optax.clip_by_global_norm(1.0),
        muon(
            rate,
            weight_decay=recipe.weight_decay,
            adam_b2=0.98,
            consistent_rms=0.2,
            muon_weight_dimension_numbers=numbers,
        ),
    )
