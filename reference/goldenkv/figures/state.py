"""What a sequence keeps: live rows of the component table, and bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from ..config import LayerKind, ModelConfig
from ..state import Cell, cells
from .base import DIFFERENT, ENTRY, WINDOW, pyplot

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_PAGED, _BOUNDARY = ENTRY, WINDOW


def live_rows_figure(config: ModelConfig, length: int, *, zoom: int = 16) -> Figure:
    """Which tokens stand behind the live rows of every component, for one layer of each kind.

    Args:
        config: the model.
        length: tokens of the sequence.
        zoom: how many of the last tokens the right half shows.
    """
    lines = _one_layer_each(config)
    figure, (whole, last) = pyplot().subplots(
        1, 2, figsize=(11, 0.27 * len(lines) + 1.6), layout="constrained", sharey=True, width_ratios=[3, 2]
    )
    for number, cell in enumerate(lines):
        first, end, count = _tokens(config, cell, length)
        colour = _PAGED if cell.component.paged else _BOUNDARY
        for axes in (whole, last):
            axes.barh(number, end - first, left=first, height=0.72, color=colour)
        last.text(length + 0.4, number, f"{count}", va="center", fontsize=8)
    kinds = [config.kind(cell.layer) for cell in lines]
    for axes in (whole, last):
        for line in range(1, len(lines)):
            if kinds[line] is not kinds[line - 1]:
                axes.axhline(line - 0.5, color="black", linewidth=0.8)
        axes.tick_params(labelsize=8)
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_xlabel("token", fontsize=9)
    for edge in range(0, length + 1, config.alignment):
        whole.axvline(edge, color="black", linewidth=0.5, alpha=0.3)
    for edge in range(0, length + 1, 4):
        last.axvline(edge, color="black", linewidth=0.5, alpha=0.3)
    whole.set_yticks(
        range(len(lines)), [f"{k.name} {c.component.name}" for k, c in zip(kinds, lines, strict=True)]
    )
    whole.invert_yaxis()
    whole.set_xlim(0, length)
    whole.set_xticks(range(0, length + 1, config.alignment))
    last.set_xlim(length - zoom, length)
    last.set_xticks(range(-(-(length - zoom) // 4) * 4, length + 1, 4))
    whole.set_title(f"length {length}: orange lies in pages, blue at the boundary", fontsize=10)
    last.set_title(f"the last {zoom} tokens; number of live rows", fontsize=10)
    return figure


def live_counts_figure(config: ModelConfig, lengths: Sequence[int]) -> Figure:
    """How many rows of every boundary component are live at each length, for one layer of each kind."""
    lines: dict[tuple[int, ...], list[Cell]] = {}  # equal lines are drawn once
    for cell in _one_layer_each(config):
        if not cell.component.paged:
            counts = tuple(len(cell.live(config, length)) for length in lengths)
            lines.setdefault(counts, []).append(cell)
    figure, grid = pyplot().subplots(
        len(lines), 1, figsize=(9, 1.1 * len(lines) + 0.5), layout="constrained", sharex=True
    )
    for axes, (counts, found) in zip(grid, lines.items(), strict=True):
        axes.fill_between(lengths, counts, step="mid", color=_BOUNDARY)
        empty = [length for length, count in zip(lengths, counts, strict=True) if count == 0]
        axes.plot(empty, np.zeros(len(empty)), ".", color=DIFFERENT, markersize=4)
        _plain(axes)
        names = dict.fromkeys(cell.component.name for cell in found)
        kinds = dict.fromkeys(config.kind(cell.layer).name for cell in found)
        axes.set_title(f"{', '.join(names)} ({', '.join(kinds)})", fontsize=9, loc="left")
        axes.set_ylim(-0.06 * max(counts), 1.06 * max(counts))
        axes.set_yticks([0, max(counts)])
    grid[-1].set_xlim(lengths[0], lengths[-1])
    grid[-1].set_xticks(range(lengths[0], lengths[-1] + 1, 32))
    grid[-1].set_xlabel("length of the sequence (red dots: nothing is live)", fontsize=9)
    figure.supylabel("live rows", fontsize=9)
    return figure


def state_bytes_figure(lengths: Sequence[int], curves: Mapping[str, Sequence[float]]) -> Figure:
    """Bytes of a whole sequence against its length, on logarithmic axes."""
    figure, axes = pyplot().subplots(figsize=(7, 3.8), layout="constrained")
    for label, values in curves.items():
        axes.plot(lengths, values, linewidth=1.8, label=label)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_yticks([2**p for p in (20, 25, 30, 35, 40)], ["1 MiB", "32 MiB", "1 GiB", "32 GiB", "1 TiB"])
    axes.set_xticks([2**p for p in range(7, 21, 3)], [f"{2**p:,}" for p in range(7, 21, 3)])
    _plain(axes)
    axes.grid(alpha=0.3)
    axes.set_xlabel("tokens", fontsize=9)
    axes.set_title("state of one sequence", fontsize=10)
    axes.legend(frameon=False, fontsize=9)
    return figure


def _plain(axes: Axes) -> None:
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)


def _one_layer_each(config: ModelConfig) -> list[Cell]:
    """The cells of the first layer of each kind, in the order of kinds."""
    firsts = {kind: next((i for i in config.layers if config.kind(i) is kind), None) for kind in LayerKind}
    return [cell for layer in firsts.values() for cell in cells(config) if cell.layer == layer]


def _tokens(config: ModelConfig, cell: Cell, length: int) -> tuple[int, int, int]:
    """(first token, one past the last, live rows) of a component."""
    rows = cell.live(config, length)
    size = config.compress_ratios[cell.layer] if cell.component.paged else 1
    return rows.start * size, rows.stop * size, len(rows)
