"""Selections: the map, stability, recall, hotness, hit rates, errors of a splice. All from plain arrays."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from .base import DIFFERENT, ENTRY, FUTURE, PAST, SINK, WINDOW, categories, pyplot

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Lines = Mapping[str, tuple[np.ndarray, np.ndarray]]
"""Name -> (x, y). Names in `BASELINES` are drawn as such."""

BASELINES = {"random": ":", "recent": "--", "oracle": "-.", "Belady": "-."}
"""Line styles of what the others are compared with; drawn in grey."""


def selection_map_figure(maps: Mapping[str, np.ndarray], ratio: int, window: int) -> Figure:
    """Which query selected which entry. Orange: selected; grey: visible; the line: where the window begins.

    Args:
        maps: title -> [queries, entries] bool.
        ratio: tokens an entry.
        window: of attention, tokens.
    """
    figure, grid = pyplot().subplots(
        1, len(maps), figsize=(5.5 * len(maps), 4.8), layout="constrained", squeeze=False
    )
    for axes, (title, mask) in zip(grid[0], maps.items(), strict=True):
        _map(axes, mask, ratio, window)
        axes.set_title(title, fontsize=10, loc="left")
    return figure


def stability_figure(panels: Mapping[str, Lines]) -> Figure:
    """Share of a selection that is selected again, against the lag in tokens (logarithmic)."""
    return _panels(panels, "tokens later", "selected again", log=True)


def recall_figure(panels: Mapping[str, Lines]) -> Figure:
    """Share of the next selection among the entries kept, against the share of entries kept."""
    return _panels(panels, "entries kept", "of the next selection", log=False)


def hit_rate_figure(panels: Mapping[str, Lines]) -> Figure:
    """Hit rate of the pages that a step needs, against pages on the device as a share of all."""
    return _panels(panels, "pages kept", "needed pages that are there", log=False)


def hotness_figure(panels: Mapping[str, Mapping[str, tuple[float, float]]]) -> Figure:
    """How hot each class is: its share of selections and of attention mass over its share of the entries.

    Args:
        panels: title -> class -> (lift of selections, lift of attention mass); logarithmic, 1 is random. A
            class without entries is left out.
    """
    figure, grid = pyplot().subplots(
        1, len(panels), figsize=(5.2 * len(panels), 2.8), layout="constrained", squeeze=False, sharex=True
    )
    for axes, (title, classes) in zip(grid[0], panels.items(), strict=True):
        _hotness(axes, classes)
        axes.set_title(title, fontsize=10, loc="left")
    return figure


def splice_figure(rows: Mapping[int, tuple[np.ndarray, np.ndarray]], costs: Mapping[str, float]) -> Figure:
    """How different rows are behind another prefix, and what it costs to use them.

    Args:
        rows: layer -> (tokens into the block, relative difference there). Drawn are means over a 64th of
            them; nothing where they are 0. A dot marks the first token from which on it stays 0.
        costs: label -> KL in nats.
    """
    figure, (left, right) = pyplot().subplots(
        1, 2, figsize=(11, 3.8), layout="constrained", width_ratios=(3, 2)
    )
    shades = pyplot().get_cmap("viridis_r")(np.linspace(0.15, 1, len(rows)))
    sizes = [values[values > 0] for _, values in rows.values()]
    floor = min((float(v.min()) for v in sizes if len(v)), default=1e-3) / 2
    for colour, (layer, (at, values)) in zip(shades, rows.items(), strict=True):
        step = max(1, len(values) // 64)  # single tokens would be noise
        steps = range(0, len(values), step)
        means = np.array([values[i : i + step].mean() for i in steps])
        left.plot(at[::step], np.where(means > 0, means, np.nan), color=colour, label=f"layer {layer}")
        wrong = np.flatnonzero(values > 0)
        after = int(wrong[-1]) + 1 if len(wrong) else 0
        if after < len(values):
            left.plot([at[after]], [floor], "o", color=colour, markersize=6, clip_on=False)
    left.set_yscale("log")
    left.set_xlabel("token of the block", fontsize=9)
    left.set_title("difference of rows (a dot: from here on the same bits)", fontsize=10, loc="left")
    left.legend(frameon=False, fontsize=8, ncols=2, loc="upper right")
    for line, (_, cost) in enumerate(costs.items()):
        right.barh(line, cost, height=0.62, color=DIFFERENT if cost else SINK)
        right.text(cost, line, f" {cost:.2g}", va="center", fontsize=8)
    right.set_yticks(range(len(costs)), list(costs))
    right.invert_yaxis()
    right.set_xlim(0, 1.3 * max([*costs.values(), 1e-12]))
    right.set_title("KL of the tokens that follow, nats", fontsize=10, loc="left")
    for axes in (left, right):
        _bare(axes)
    return figure


def overview_figure(
    mask: np.ndarray,
    ratio: int,
    window: int,
    stability: Lines,
    recall: Lines,
    hotness: Mapping[str, tuple[float, float]],
) -> Figure:
    """One layer on one page: the map, stability, recall and hotness, as in the figures above."""
    figure, grid = pyplot().subplots(2, 2, figsize=(12, 9), layout="constrained")
    _map(grid[0, 0], mask, ratio, window)
    _lines(grid[0, 1], stability, "tokens later", "selected again", log=True)
    _lines(grid[1, 0], recall, "entries kept", "of the next selection", log=False)
    _hotness(grid[1, 1], hotness)
    for axes, title in zip(grid.flat, ("selected entries", "stability", "recall", "hotness"), strict=True):
        axes.set_title(title, fontsize=10, loc="left")
    return figure


def _map(axes: Axes, mask: np.ndarray, ratio: int, window: int) -> None:
    queries, entries = mask.shape
    visible = np.arange(entries) < ((np.arange(queries) + 1) // ratio)[:, None]
    categories(axes, np.where(mask, 2, np.where(visible, 1, 0)), [FUTURE, PAST, ENTRY])
    line = np.arange(window, queries)
    axes.plot((line - window) / ratio, line, color=WINDOW, linewidth=1)
    axes.set_xlabel("entry", fontsize=9)
    axes.set_ylabel("query", fontsize=9)


def _panels(panels: Mapping[str, Lines], x: str, y: str, *, log: bool) -> Figure:
    figure, grid = pyplot().subplots(
        1, len(panels), figsize=(5.5 * len(panels), 3.8), layout="constrained", squeeze=False, sharey=True
    )
    for axes, (title, lines) in zip(grid[0], panels.items(), strict=True):
        _lines(axes, lines, x, y, log=log)
        axes.set_title(title, fontsize=10, loc="left")
    return figure


def _lines(axes: Axes, lines: Lines, x: str, y: str, *, log: bool) -> None:
    for name, (at, values) in lines.items():
        if name in BASELINES:
            axes.plot(at, values, color="#777777", linestyle=BASELINES[name], linewidth=1.4, label=name)
        else:
            axes.plot(at, values, marker=".", linewidth=1.6, label=name)
    if log:
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:.0f}")
    else:
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axes.set_ylim(0, 1.02)
    axes.set_xlabel(x, fontsize=9)
    axes.set_ylabel(y, fontsize=9)
    axes.legend(frameon=False, fontsize=8, loc="lower right")
    _bare(axes)


def _hotness(axes: Axes, classes: Mapping[str, tuple[float, float]]) -> None:
    shown = {name: lifts for name, lifts in classes.items() if any(lifts)}
    for line, lifts in enumerate(shown.values()):
        for offset, value, colour in zip((-0.18, 0.18), lifts, (ENTRY, WINDOW), strict=True):
            if value > 0:
                axes.barh(line + offset, value - 1, left=1, height=0.34, color=colour)
                side = "left" if value >= 1 else "right"
                axes.text(value, line + offset, f" {value:.2g} ", ha=side, va="center", fontsize=8)
    axes.axvline(1, color="#777777", linewidth=1, linestyle=":")
    axes.set_yticks(range(len(shown)), list(shown))
    axes.invert_yaxis()
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.margins(x=0.2)
    axes.set_xlabel("times random: selections (orange), attention mass (blue)", fontsize=9)
    _bare(axes)


def _bare(axes: Axes) -> None:
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
