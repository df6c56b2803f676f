"""Delta encoding: bytes by codec, correlation, distance of keyframes, and what lossy rates do to the logits.

The pictures are drawn from what `goldenkv delta --json` writes, so that measured files can be drawn again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from .base import DIFFERENT, ENTRY, SINK, WINDOW, pyplot

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Results = Mapping[str, Any]
"""One model's results, as `Study.to_json` gives them."""


def codec_figure(results: Results, codecs: Sequence[str] | None = None) -> Figure:
    """Coded bytes as a share of native ones, by component and codec; those with frames in another colour.

    Args:
        results: of a model.
        codecs: which, in this order; all by default.
    """
    figure, axes = pyplot().subplots(figsize=(10, 4.6), layout="constrained")
    _codecs(axes, results, codecs)
    figure.legend(loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    return figure


def correlation_figure(models: Mapping[str, Results]) -> Figure:
    """Correlation of neighbouring rows by component; the line is what five times would need."""
    figure, axes = pyplot().subplots(figsize=(10, 3.6), layout="constrained")
    _correlations(axes, models)
    return figure


def keyframe_figure(models: Mapping[str, Results]) -> Figure:
    """Native over coded bytes against the distance of keyframes: at 1 no neighbour is looked at."""
    figure, axes = pyplot().subplots(figsize=(10, 4), layout="constrained")
    _sweep(axes, models)
    return figure


def rate_figure(models: Mapping[str, Results]) -> Figure:
    """What lossy methods do to the logits, against the bits that a channel takes."""
    figure, grid = pyplot().subplots(
        1, len(models), figsize=(10, 4.2), layout="constrained", squeeze=False
    )  # fmt: skip
    for axes, (name, results) in zip(grid[0], models.items(), strict=True):
        _rates(axes, results)
        axes.set_title(name, fontsize=10, loc="left")
    return figure


def delta_figure(models: Mapping[str, Results]) -> Figure:
    """All four pictures on one page; codecs and rates of the first model."""
    figure, grid = pyplot().subplots(2, 2, figsize=(15, 10), layout="constrained")
    first = next(iter(models.values()))
    _codecs(grid[0, 0], first, None)
    grid[0, 0].legend(fontsize=6, frameon=False, ncols=2)
    _correlations(grid[0, 1], models)
    _sweep(grid[1, 0], models)
    _rates(grid[1, 1], first)
    return figure


def _codecs(axes: Axes, results: Results, codecs: Sequence[str] | None) -> None:
    rows = {(r["component"], r["codec"]): r for r in results["lossless"]}
    names = list(dict.fromkeys(r["component"] for r in results["lossless"]))
    shown = list(codecs or dict.fromkeys(r["codec"] for r in results["lossless"] if r["ratio"] != 1))
    delta = [" P" in name or " B" in name for name in shown]
    plain_shades = pyplot().get_cmap("Blues")(np.linspace(0.35, 0.9, max(1, delta.count(False))))
    delta_shades = pyplot().get_cmap("Oranges")(np.linspace(0.35, 0.9, max(1, delta.count(True))))
    width = 0.84 / len(shown)
    for i, (codec, framed) in enumerate(zip(shown, delta, strict=True)):
        colour = (delta_shades if framed else plain_shades)[delta[:i].count(framed)]
        shares = [100 / rows[name, codec]["ratio"] for name in names]
        axes.bar(
            np.arange(len(names)) + (i - len(shown) / 2 + 0.5) * width,
            shares,
            width,
            color=colour,
            label=codec,
        )
    axes.axhline(100, color="#777777", linewidth=1, linestyle="--")
    axes.axhline(20, color=DIFFERENT, linewidth=1, linestyle="--")
    axes.text(
        len(names) - 0.5, 20, "what 5 times would be", fontsize=8, ha="right", va="center", color=DIFFERENT,
        bbox=dict(facecolor="white", edgecolor="none", pad=1.5),
    )  # fmt: skip
    axes.set_xticks(range(len(names)), names)
    axes.set_ylim(0, 130 / min(r["ratio"] for r in results["lossless"]))
    _plain(axes, "", "% of the native bytes")
    axes.set_title("lossless: without neighbours (blue), with frames (orange)", fontsize=10, loc="left")


def _correlations(axes: Axes, models: Mapping[str, Results]) -> None:
    found = [(name, c) for name, results in models.items() for c in results["correlations"]]
    at = np.arange(len(found))
    series = {
        "near": ("lag 1", WINDOW),
        "far": ("lag of the keyframes", SINK),
        "unrotated": ("lag 1, unrotated", ENTRY),
    }
    for i, (key, (label, colour)) in enumerate(series.items()):
        values = [np.nan if c[key] is None else c[key] for _, c in found]
        axes.bar(at + 0.27 * (i - 1), values, 0.27, color=colour, label=label)
    axes.axhline(1, color=DIFFERENT, linewidth=1, linestyle="--")
    axes.axhline(0.5, color="#777777", linewidth=1, linestyle=":")
    axes.annotate("five times would need 0.99993", (0, 1), (0, -3), textcoords="offset points", fontsize=8,
                  va="top", color=DIFFERENT)  # fmt: skip
    axes.annotate("below one half a difference is larger than the row", (0, 0.5), (0, 3),
                  textcoords="offset points", fontsize=8, color="#555555")  # fmt: skip
    several = len(models) > 1
    axes.set_xticks(at, [f"{c['component']}\n{name}" if several else c["component"] for name, c in found])
    _plain(axes, "", "correlation")
    axes.legend(frameon=False, fontsize=8, loc="center right", bbox_to_anchor=(1, 0.72))
    axes.set_title("how alike neighbouring rows are", fontsize=10, loc="left")


def _sweep(axes: Axes, models: Mapping[str, Results]) -> None:
    colours = iter(pyplot().get_cmap("tab10").colors)
    for name, results in models.items():
        for component, kinds in results["sweep"].items():
            colour = next(colours)
            for kind, ratios in kinds.items():
                axes.plot(
                    results["distances"], ratios, "o-" if kind == "P" else "s--", color=colour, markersize=4,
                    linewidth=1.3, label=f"{component}, {kind} ({name})",
                )  # fmt: skip
    axes.axhline(1, color="#777777", linewidth=1)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:g}")
    _plain(axes, "rows from keyframe to keyframe", "times smaller than native")
    axes.legend(frameon=False, fontsize=7, ncols=2)
    axes.set_title(
        "the same range coder, with a prediction from neighbours and without (1)", fontsize=10, loc="left"
    )


def _rates(axes: Axes, results: Results) -> None:
    families = dict.fromkeys(r["family"] for r in results["lossy"])
    for i, family in enumerate(families):
        points = sorted((r["bits"], r["effect"]["kl"]) for r in results["lossy"] if r["family"] == family)
        bits, kl = zip(*points, strict=True)
        axes.plot(bits, np.maximum(kl, 1e-7), "o-", color=f"C{i}", markersize=5, linewidth=1.3, label=family)
    axes.set_yscale("log")
    _plain(axes, "bits a channel", "KL, nats a token")
    axes.legend(frameon=False, fontsize=8)
    axes.set_title("lossy attention keys: rate and effect", fontsize=10, loc="left")


def _plain(axes: Axes, x: str, y: str) -> None:
    axes.set_xlabel(x, fontsize=9)
    axes.set_ylabel(y, fontsize=9)
    axes.tick_params(labelsize=8)
    axes.grid(alpha=0.3, axis="y")
    axes.spines[["top", "right"]].set_visible(False)
