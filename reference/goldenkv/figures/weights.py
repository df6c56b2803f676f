"""How much: pooling weights, index scores, and the shares of one softmax."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from .base import ENTRY, SINK, WINDOW, bare, legend, pyplot

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def pooling_weights_figure(panels: Sequence[tuple[str, np.ndarray, np.ndarray]]) -> Figure:
    """The weight of every row in an entry, channel by channel; each column of a panel sums to 1.

    Args:
        panels: (title, weights [rows, channels], positions of the rows).
    """
    from matplotlib.colors import PowerNorm

    figure, grid = pyplot().subplots(
        1, len(panels), figsize=(3.6 * len(panels), 3.9), layout="constrained", squeeze=False
    )
    for axes, (title, weights, positions) in zip(grid[0], panels, strict=True):
        scale = PowerNorm(0.5, vmin=0, vmax=weights.max())  # small weights stay visible
        picture = axes.imshow(weights, aspect="auto", cmap="magma", norm=scale, interpolation="nearest")
        bare(axes)
        step = 1 if len(positions) <= 8 else 16
        axes.set_yticks(range(0, len(positions), step), [str(p) for p in positions[::step]])
        axes.set_xlabel("channel", fontsize=9)
        axes.set_ylabel("token", fontsize=9)
        axes.set_title(title, fontsize=10)
        if len(positions) <= 8:  # two blocks
            axes.axhline(len(positions) / 2 - 0.5, color="white", linewidth=1.5)
        bar = figure.colorbar(picture, ax=axes, shrink=0.8)
        bar.ax.tick_params(labelsize=8)
    return figure


def index_figure(scores: np.ndarray, chosen: np.ndarray, visible: np.ndarray, query: int) -> Figure:
    """What the indexer scores and what it selects, for all queries and for one.

    Args:
        scores: [queries, entries].
        chosen, visible: masks of the same shape.
        query: the one that is drawn below.
    """
    figure = pyplot().figure(figsize=(10, 7), layout="constrained")
    parts = figure.subplot_mosaic([["scores", "chosen"], ["one", "one"]], height_ratios=[3, 2])
    shown = np.where(visible, scores, np.nan)
    picture = parts["scores"].imshow(shown, aspect="auto", cmap="viridis", interpolation="nearest")
    bar = figure.colorbar(picture, ax=parts["scores"])
    bar.ax.tick_params(labelsize=8)
    parts["chosen"].imshow(
        np.where(chosen, 1.0, np.where(visible, 0.15, 0.0)), aspect="auto", cmap="Greys", vmax=1
    )
    titles = {"scores": "index score of every visible entry", "chosen": "selected entries (black)"}
    for name, title in titles.items():
        bare(parts[name])
        parts[name].axhline(query, color="#d62728", linewidth=1, linestyle="--")
        parts[name].set_xlabel("entry", fontsize=9)
        parts[name].set_ylabel("query", fontsize=9)
        parts[name].set_title(title, fontsize=10)
    axes, seen = parts["one"], np.flatnonzero(visible[query])
    picked = chosen[query, seen]
    axes.bar(seen, scores[query, seen], color=np.where(picked, ENTRY, "#c4c4c4"), width=0.85)
    lowest = scores[query, seen][picked].min()
    axes.axhline(lowest, color="black", linewidth=0.8, linestyle=":")
    axes.axhline(0, color="black", linewidth=0.5)
    axes.set_xlim(seen[0] - 1, seen[-1] + 1)
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel("entry", fontsize=9)
    axes.set_ylabel("index score", fontsize=9)
    axes.set_title(
        f"query {query} (dashed line above): {picked.sum()} of {len(seen)} entries selected (orange); "
        "dotted: the lowest selected score",
        fontsize=10,
    )
    return figure


def shares_figure(shares: Mapping[str, np.ndarray]) -> Figure:
    """How one softmax divides its weight between window, entries and sink.

    Args:
        shares: title -> [queries, heads, 3] (window, entries, sink); the last axis sums to 1.
    """
    figure, grid = pyplot().subplots(
        2, len(shares), figsize=(3.5 * len(shares), 5.6), layout="constrained", sharey=True, squeeze=False
    )
    colours = {"window": WINDOW, "entries": ENTRY, "sink": SINK}
    for column, (title, share) in enumerate(shares.items()):
        queries, heads, _ = share.shape
        above, below = grid[0, column], grid[1, column]
        base = np.zeros(heads)
        for part, colour in enumerate(colours.values()):
            above.bar(range(heads), share[-1, :, part], bottom=base, color=colour, width=0.8)
            base = base + share[-1, :, part]
        above.set_title(title, fontsize=10)
        above.set_xticks(range(heads))
        above.set_xlabel(f"head (query {queries - 1})", fontsize=9)
        below.stackplot(
            np.arange(1, queries + 1), share.mean(axis=1).T, colors=list(colours.values()), linewidth=0
        )
        below.set_xscale("log")
        below.set_xlim(1, queries)
        below.set_xlabel("tokens so far (mean over heads)", fontsize=9)
        for axes in (above, below):
            axes.set_ylim(0, 1)
            axes.tick_params(labelsize=8)
            axes.spines[["top", "right"]].set_visible(False)
    for line in grid:
        line[0].set_ylabel("share of the weight", fontsize=9)
    legend(figure, colours)
    return figure
