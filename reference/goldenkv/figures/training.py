"""How a model was trained, and what it learned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from .base import pyplot

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def curve_figure(curves: Mapping[str, Sequence[Mapping[str, Any]]], levels: Mapping[str, float]) -> Figure:
    """Losses against tokens, with horizontal lines for what needs no training.

    Args:
        curves: model -> rows of `train.loop.run`: tokens, loss (of training) and held_out, nats a token.
        levels: name -> held-out loss.
    """
    figure, axes = pyplot().subplots(figsize=(9, 4.4), layout="constrained")
    for i, (name, rows) in enumerate(curves.items()):
        tokens = [row["tokens"] / 1e6 for row in rows]
        axes.plot(tokens, [row["held_out"] for row in rows], color=f"C{i}", label=f"{name}, held out")
        axes.plot(
            tokens, [row["loss"] for row in rows], color=f"C{i}", linewidth=0.8, alpha=0.6,
            label=f"{name}, training text",
        )  # fmt: skip
    last = max(row["tokens"] for rows in curves.values() for row in rows) / 1e6
    for name, level in levels.items():
        axes.axhline(level, color="#888888", linewidth=0.8, linestyle=":")
        axes.text(last, level, f" {name}", fontsize=8, va="center", color="#444444")
    axes.set_xlabel("million tokens trained on", fontsize=9)
    axes.set_ylabel("loss, nats a token", fontsize=9)
    axes.set_xlim(0, last)
    axes.legend(frameon=False, fontsize=9)
    _plain(axes)
    return figure


def position_figure(edges: Sequence[int], losses: Mapping[str, Sequence[float]]) -> Figure:
    """Mean loss by how much context a token has.

    Args:
        edges: of the intervals of positions, one more than there are losses.
        losses: model -> mean loss in each interval.
    """
    figure, axes = pyplot().subplots(figsize=(9, 3.6), layout="constrained")
    places = np.arange(len(edges) - 1)
    for i, (name, values) in enumerate(losses.items()):
        axes.plot(places, values, "o-", color=f"C{i}", label=name)
    axes.set_xticks(places, [f"{low:,} to {high - 1:,}" for low, high in pairwise(edges)])
    axes.set_xlabel("position of the token", fontsize=9)
    axes.set_ylabel("held-out loss, nats a token", fontsize=9)
    axes.legend(frameon=False, fontsize=9)
    _plain(axes)
    return figure


def _plain(axes: Axes) -> None:
    axes.tick_params(labelsize=8)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
