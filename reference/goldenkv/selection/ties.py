"""Selections that no score decided: where scores are equal, the lowest id wins.

An index score is a weighted sum of ReLUs, so it is exactly 0 where no head responds. If fewer than k entries
have more, the rest of the selection is filled with the *first* entries that have 0. That looks like an
attention sink, as stable as one, and means nothing.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from ..model.tile import Probe
from ..ops.index import index_scores
from ..state import Rows


def scores_of(probe: Probe, rows: Rows, layer: int) -> np.ndarray:
    """[queries, entries] index scores of a CSA layer, recomputed: zeros exactly, others to rounding."""
    q, weight = probe.index_q[layer], probe.index_weight[layer]
    keys = rows[f"layers.{layer}.index_keys"]
    return np.asarray(index_scores(jnp.asarray(q), jnp.asarray(keys), jnp.asarray(weight)))


def decided_by_id(scores: np.ndarray, visible: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """Which selected entries were taken for their ids alone.

    That is: one has score 0, and so has a visible entry that was not selected.

    Args:
        scores: [queries, entries].
        visible: [queries] how many entries each query sees.
        ids: [queries, k] what it selected, -1 for none.

    Returns:
        [queries, k] bool.
    """
    each = np.arange(len(ids))[:, None]
    zero = np.zeros((len(scores), scores.shape[1] + 1), bool)  # the last column takes the -1
    zero[:, :-1] = (scores == 0) & (np.arange(scores.shape[1]) < visible[:, None])
    left_out = zero.copy()
    left_out[each, ids] = False
    return zero[each, ids] & left_out.any(axis=1, keepdims=True)
