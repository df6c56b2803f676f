"""What coarser formats of the KV rows cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from ..precision import Cost
from .base import pyplot

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Curve = tuple[Sequence[float], Sequence[float]]
"""x and y."""


def rounding_figure(by_size: Mapping[str, Curve], by_outlier: Mapping[str, Curve]) -> Figure:
    """The error of a rounded value: against its own size, and against the size of an outlier beside it.

    Args:
        by_size: format -> (size of a value over the largest of its block, its relative error).
        by_outlier: format -> (factor of one channel, relative error of the other channels).
    """
    figure, (left, right) = pyplot().subplots(1, 2, figsize=(10, 3.8), layout="constrained")
    _curves(left, by_size, "size of a value / largest value of its block of 64", "median error / its size")
    _curves(right, by_outlier, "one channel in 32 multiplied by", "error of the other channels / their size")
    left.set_title("a value and its own size", fontsize=10, loc="left")
    right.set_title("an outlier and its neighbours", fontsize=10, loc="left")
    left.legend(frameon=False, fontsize=8)
    return figure


def precision_figure(costs: Mapping[str, Cost], spread: float) -> Figure:
    """The error of rows against the bits they take, and the error of logits, token by token.

    Args:
        costs: of `precision.measure`.
        spread: standard deviation of the logits, for scale.
    """
    figure, (rows, logits) = pyplot().subplots(
        1, 2, figsize=(10, 4.2), layout="constrained", width_ratios=[2, 3]
    )
    for i, (name, cost) in enumerate(costs.items()):
        error = 100 * cost.logit_error / spread
        rows.plot([cost.bits], [100 * cost.row_error], "o", color=f"C{i}", markersize=9, label=name)
        logits.plot(np.arange(1, len(error) + 1), error, "o-", color=f"C{i}", linewidth=0.7, markersize=3)
        logits.axhline(float(np.median(error)), color=f"C{i}", linewidth=1.5, linestyle="--")
    rows.set_xlim(0, 1.2 * max(cost.bits for cost in costs.values()))
    rows.set_ylim(0, 115 * max(cost.row_error for cost in costs.values()))
    rows.set_xlabel("bits a channel, scales included", fontsize=9)
    rows.set_title("error of the rounded channels, % of their size", fontsize=10, loc="left")
    logits.set_yscale("log")
    logits.yaxis.set_major_formatter("{x:g}")
    logits.set_xlabel("token after the reload", fontsize=9)
    logits.set_title("mean error of the logits, % of their spread; dashed: median", fontsize=10, loc="left")
    figure.legend(loc="outside lower center", ncols=len(costs), frameon=False, fontsize=9)
    for axes in (rows, logits):
        _plain(axes)
    return figure


def _curves(axes: Axes, curves: Mapping[str, Curve], x: str, y: str) -> None:
    for name, (xs, ys) in curves.items():
        axes.plot(xs, 100 * np.asarray(ys), "o-", linewidth=1.5, markersize=4, label=name)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}%")
    axes.set_xlabel(x, fontsize=9)
    axes.set_ylabel(y, fontsize=9)
    _plain(axes)


def _plain(axes: Axes) -> None:
    axes.tick_params(labelsize=8)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
