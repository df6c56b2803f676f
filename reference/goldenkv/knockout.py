"""What a missing piece of state corrupts: zero it in a snapshot, restore, run on, and compare bit by bit.

Zeros are what a pool holds where nothing was written, so a zeroed cell is a piece that a cache left out. The
damaged run is fed the tokens of the undamaged one: what differs is the damage, not another choice of token.
The tokens run in one call, which gives the bits that single decode steps give.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from .config import ModelConfig
from .engine import Engine
from .state import Rows, Snapshot, cells
from .state.compare import equal_rows


@dataclass(frozen=True, slots=True)
class Damage:
    """How a run without some rows differs from the undamaged one, layer by layer and step by step.

    Attributes:
        lost: rows that were zeroed; 0 where the state had none of them at this length.
        token_rows: [layers, steps] True where a row that the layer made of this step's token (window or
            compressor row) has other bits: the layer's input was wrong.
        entries: [layers, steps] True where an entry or index key that this step finished has other bits.
        logits: [steps] True where the logits have other bits.
        error: [steps] the largest absolute difference of a logit.
    """

    lost: int
    token_rows: np.ndarray
    entries: np.ndarray
    logits: np.ndarray
    error: np.ndarray

    @property
    def same(self) -> bool:
        """True where nothing that came after the restore differs."""
        return not (self.token_rows.any() or self.entries.any() or self.logits.any())


def each_cell(config: ModelConfig) -> dict[str, list[str]]:
    """Every component of every layer alone."""
    return {cell.name: [cell.name] for cell in cells(config)}


def each_component(config: ModelConfig) -> dict[str, list[str]]:
    """Every component in all of its layers together."""
    out: dict[str, list[str]] = {}
    for cell in cells(config):
        out.setdefault(cell.component.name, []).append(cell.name)
    return out


def knock_out(
    engine: Engine, snapshot: Snapshot, tokens: Collection[int], groups: dict[str, list[str]]
) -> dict[str, Damage]:
    """Restores `snapshot` without each group of cells in turn and runs `tokens`.

    Args:
        engine: has a free slot.
        snapshot: undamaged, of this engine.
        tokens: what follows the snapshot, at most W - 1 tokens, so that the window still holds all of them.
        groups: label -> cell names, for example from `each_cell`.

    Returns:
        label -> what differed.

    Raises:
        ValueError: too many tokens, or a name that the snapshot has not.
    """
    config, steps = engine.config, len(tokens)
    if not 0 < steps < config.sliding_window:
        raise ValueError(f"the number of tokens must lie in 1 .. {config.sliding_window - 1}, got {steps}")
    unknown = sorted({name for names in groups.values() for name in names} - snapshot.rows.keys())
    if unknown:
        raise ValueError(f"the snapshot has no {', '.join(unknown)}")
    expected = _run_on(engine, snapshot, tokens)
    out = {}
    for label, names in groups.items():
        zeroed = {name: np.zeros_like(snapshot.rows[name]) for name in names}
        found = _run_on(engine, replace(snapshot, rows=snapshot.rows | zeroed), tokens)
        lost = sum(len(rows) for rows in zeroed.values())
        out[label] = _damage(config, snapshot.length, expected, found, lost)
    return out


class _Run(NamedTuple):
    """State after the tokens, and the logits of each."""

    rows: Rows
    logits: np.ndarray


def _run_on(engine: Engine, snapshot: Snapshot, tokens: Collection[int]) -> _Run:
    seq = engine.restore(snapshot)
    try:
        logits = engine.prefill(seq, list(tokens), all_logits=True)
        return _Run(engine.rows(seq), logits)
    finally:
        engine.close(seq)


def _damage(config: ModelConfig, length: int, expected: _Run, found: _Run, lost: int) -> Damage:
    """Files every different row under the layer that holds it and the step that made it.

    Rows from before the restore are left out: they are the damage itself.
    """
    steps = len(expected.logits)
    token_rows = np.zeros((len(config.state_layers), steps), bool)
    entries = np.zeros_like(token_rows)
    for cell in cells(config):
        rows = cell.live(config, length + steps)
        paged = cell.component.paged
        made_at = np.array([cell.component.made_by(config, cell.layer, row) for row in rows], int)
        wrong = ~equal_rows(expected.rows[cell.name], found.rows[cell.name]) & (made_at >= length)
        (entries if paged else token_rows)[cell.layer, made_at[wrong] - length] = True
    return Damage(
        lost=lost,
        token_rows=token_rows,
        entries=entries,
        logits=~equal_rows(expected.logits, found.logits),
        error=np.abs(expected.logits - found.logits).max(axis=1),
    )
