"""What a coarser format of the KV rows costs: in the rows themselves, and in the logits that follow.

The state of a run is rounded to a format, restored, and the run goes on. Only attention keys (window rows and
entries) are rounded, and only their channels that are not rotated, as in the native format.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from .config import ModelConfig
from .engine import Engine
from .ops import quant
from .state import Rows, Snapshot, cells
from .state.components import Width

Round = Callable[[jax.Array], jax.Array]

FORMATS: Mapping[str, tuple[Round, float]] = {
    "E4M3, scale a 64": (quant.fake_quantise_e4m3, 8 + 8 / 64),
    "INT4, scale a 32": (partial(quant.fake_quantise_int4, block=32), 4 + 32 / 32),
    "INT4, scale a 64": (quant.fake_quantise_int4, 4 + 32 / 64),
    "E2M1, scale a 32": (quant.fake_quantise_e2m1, 4 + 8 / 32),
}
"""Name -> how to round, and bits a channel with its share of the scales (UE8M0: 8 bits, INT4: a float32)."""


@dataclass(frozen=True, slots=True)
class Cost:
    """What rounding the state to a format changed.

    Attributes:
        bits: a rounded channel, scales included.
        row_error: root mean square error of the rounded channels over their root mean square.
        logit_error: [steps] mean absolute difference of the logits after each further token.
        same_choice: share of the steps whose greedy choice is unchanged.
    """

    bits: float
    row_error: float
    logit_error: np.ndarray
    same_choice: float


def rounded(config: ModelConfig, rows: Rows, round_: Round) -> tuple[Rows, float]:
    """The state with its attention keys rounded, and the relative error of what was rounded."""
    plain = config.head_dim - config.qk_rope_head_dim
    out, lost, held = dict(rows), 0.0, 0.0
    for cell in cells(config):
        if cell.component.width is Width.HEAD and not cell.component.float32 and len(rows[cell.name]):
            before = rows[cell.name]
            after = np.array(before)
            after[:, :plain] = np.asarray(round_(jnp.asarray(before[:, :plain])))
            out[cell.name] = after
            lost += float(np.sum((after.astype(np.float64) - before) ** 2))
            held += float(np.sum(before[:, :plain].astype(np.float64) ** 2))
    return out, (lost / held) ** 0.5 if held else 0.0


def measure(
    engine: Engine,
    snapshot: Snapshot,
    tokens: Collection[int],
    formats: Mapping[str, tuple[Round, float]] = FORMATS,
) -> dict[str, Cost]:
    """Restores `snapshot` rounded to each format, runs `tokens`, and compares with the exact run.

    Args:
        engine: has a free slot; without fake quantisation, or there is nothing left to lose.
        snapshot: of this engine.
        tokens: what follows, at least one.
        formats: as `FORMATS`.

    Raises:
        ValueError: the engine rounds already.
    """
    if engine.numerics.fake_quantisation:
        raise ValueError("the engine has fake_quantisation on: its state is rounded already")
    exact = _logits(engine, snapshot, tokens)
    out = {}
    for name, (round_, bits) in formats.items():
        rows, error = rounded(engine.config, snapshot.rows, round_)
        found = _logits(engine, replace(snapshot, rows=rows), tokens)
        difference = np.abs(found - exact).mean(axis=1)
        same = float(np.mean(found.argmax(axis=1) == exact.argmax(axis=1)))
        out[name] = Cost(bits, error, difference, same)
    return out


def _logits(engine: Engine, snapshot: Snapshot, tokens: Collection[int]) -> np.ndarray:
    seq = engine.restore(snapshot)
    try:
        return engine.prefill(seq, list(tokens), all_logits=True)
    finally:
        engine.close(seq)
