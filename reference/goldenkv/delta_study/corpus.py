"""Real state of a model, row by row: what codecs are measured on.

A snapshot has only the last W - 1 window rows and the rows of one unfinished block. So a sequence is run in
steps, and after each step the rows that are new are appended. The engine rounds as it computes
(`fake_quantisation`), so its rows are exactly those that a production engine stores; they are packed in the
native format of their component, with nothing lost.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import jax.numpy as jnp
import numpy as np

from ..config import LayerKind, ModelConfig
from ..engine import Engine
from ..model.attention import layer_frequencies
from ..ops.rope import rotate
from ..state import Cell, RowFormat, cells, pack, row_format
from ..state.components import Width


@dataclass(frozen=True, slots=True)
class Series:
    """Rows of one component of one layer, in the order in which they came to be.

    Attributes:
        component: a name of `NAMES`, or that of another model's part.
        layer: the layer.
        numbers: [n] absolute row numbers. Rows are neighbours where the number grows by one.
        values: float32 or bfloat16 [n, channels].
        native: uint8 [n, form.nbytes], the same rows as stored.
        form: the native format.
        unrotated: float32 [n, channels], with the rotary part undone; None where there is none to undo.
    """

    component: str
    layer: int
    numbers: np.ndarray
    values: np.ndarray
    native: np.ndarray
    form: RowFormat
    unrotated: np.ndarray | None = None

    @property
    def wide(self) -> np.ndarray:
        """The values as float32, which holds them exactly."""
        return self.values.astype(np.float32)


NAMES: Mapping[tuple[str, LayerKind], str] = {
    ("window", LayerKind.WINDOW): "window",
    ("window", LayerKind.CSA): "window",
    ("window", LayerKind.HCA): "window",
    ("entries", LayerKind.CSA): "CSA entries",
    ("entries", LayerKind.HCA): "HCA entries",
    ("index_keys", LayerKind.CSA): "index keys",
    ("overlap_kv", LayerKind.CSA): "CSA rows",
    ("overlap_score", LayerKind.CSA): "CSA rows",
    ("index_overlap_kv", LayerKind.CSA): "index rows",
    ("index_overlap_score", LayerKind.CSA): "index rows",
    ("rows_kv", LayerKind.HCA): "HCA rows",
    ("rows_score", LayerKind.HCA): "HCA rows",
}
"""Component and kind of layer -> name in the study. Of the CSA compressors the overlap stands for all rows:
those of an unfinished block are the same, and never more than three."""


KEYS = ("window", "CSA entries", "HCA entries")
"""Attention keys: what lossy methods are tried on."""

GROWING = ("CSA entries", "HCA entries", "index keys")
"""What a page holds: its bytes grow with the context."""


def native_form(config: ModelConfig, cell: Cell) -> RowFormat:
    """How production stores a row: FP8 with BF16 rotated channels, FP4 index keys, float32 compressor rows.

    Without padding: it would be a gain for free.
    """
    channels = cell.component.channels(config, cell.layer)
    if cell.component.float32:
        return row_format("float32", channels)
    if cell.component.width is Width.INDEX:
        return row_format("index_fp4", channels)
    return without_padding(row_format("fp8", channels, config.qk_rope_head_dim))


def without_padding(form: RowFormat) -> RowFormat:
    """The same format without the bytes that hold nothing."""
    return replace(form, fields=tuple(f for f in form.fields if f.count and f.name != "padding"))


def collect(engine: Engine, tokens: np.ndarray, consecutive: int = 256) -> list[Series]:
    """Runs tokens and gathers the rows of every component and layer.

    Args:
        engine: with fake quantisation and bfloat16 rows, and a free slot.
        tokens: at least one.
        consecutive: over so many tokens at the end, the rows of CSA compressors are gathered block by block.

    Raises:
        ValueError: the engine keeps rows that no production format holds.
    """
    numerics, config = engine.numerics, engine.config
    if not numerics.fake_quantisation or numerics.dtype != "bfloat16":
        raise ValueError(
            "the engine must store native rows: Numerics(dtype='bfloat16', fake_quantisation=True), "
            f"got dtype={numerics.dtype!r}, fake_quantisation={numerics.fake_quantisation}"
        )
    named = [c for c in cells(config) if (c.component.name, config.kind(c.layer)) in NAMES]
    found: dict[str, dict[int, np.ndarray]] = {cell.name: {} for cell in named}
    seq = engine.open()
    try:
        for stop in _stops(config, len(tokens), consecutive):
            engine.prefill(seq, tokens[seq.length : stop])
            rows = engine.rows(seq)
            for cell in named:
                found[cell.name] |= zip(cell.live(config, stop), rows[cell.name], strict=True)
    finally:
        engine.close(seq)
    return [_series(config, cell, found[cell.name]) for cell in named if found[cell.name]]


def join(parts: Iterable[list[Series]]) -> list[Series]:
    """Several runs of one model as one: the rows of each component one run after the other."""
    by_cell: dict[tuple[str, int, int], list[Series]] = {}
    for part in parts:
        seen: dict[tuple[str, int], int] = {}
        for s in part:
            count = seen[s.component, s.layer] = seen.get((s.component, s.layer), 0) + 1
            by_cell.setdefault((s.component, s.layer, count), []).append(s)
    return [
        replace(
            several[0],
            numbers=np.concatenate([s.numbers for s in several]),
            values=np.concatenate([s.values for s in several]),
            native=np.concatenate([s.native for s in several]),
            unrotated=None
            if several[0].unrotated is None
            else np.concatenate([s.unrotated for s in several if s.unrotated is not None]),
        )
        for several in by_cell.values()
    ]


def _stops(config: ModelConfig, length: int, consecutive: int) -> list[int]:
    """Lengths at which to look, so that no window row and no row of an HCA block is missed."""
    stops = {length, *range(config.sliding_window - 1, length, config.sliding_window - 1)}
    for layer in config.layers:
        ratio = config.compress_ratios[layer]
        if config.kind(layer) is LayerKind.HCA:  # just before a block ends
            stops |= set(range(ratio - 1, length, ratio))
        elif config.kind(layer) is LayerKind.CSA:
            stops |= {stop for stop in range(ratio, length, ratio) if stop > length - consecutive}
    return sorted(stops)


def _series(config: ModelConfig, cell: Cell, rows: dict[int, np.ndarray]) -> Series:
    numbers = np.array(sorted(rows))
    values = np.stack([rows[number] for number in numbers])
    form = native_form(config, cell)
    unrotated = None
    if any(field.name == "rope" for field in form.fields):
        ratio = config.compress_ratios[cell.layer] if cell.component.paged else 1
        positions = jnp.asarray(numbers * ratio, jnp.int32)
        turned = jnp.asarray(values.astype(np.float32))
        frequency = layer_frequencies(config, cell.layer)
        unrotated = np.asarray(rotate(turned, positions, frequency, inverse=True))
    component = NAMES[cell.component.name, config.kind(cell.layer)]
    return Series(component, cell.layer, numbers, values, pack(values, form), form, unrotated)
