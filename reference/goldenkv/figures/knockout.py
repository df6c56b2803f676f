"""What each missing component corrupts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from ..config import ModelConfig
from ..knockout import Damage
from .base import DIFFERENT, ENTRY, EQUAL, categories, legend, pyplot

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_EMPTY = "#ffffff"


def damage_figure(config: ModelConfig, damages: Mapping[str, Damage], title: str) -> Figure:
    """Every lost cell (line) against every layer and step (columns): what came out with other bits.

    Args:
        config: the model.
        damages: of `knockout.knock_out`.
        title: of the picture.
    """
    lines = [np.concatenate([_codes(d).reshape(-1), np.where(d.logits, 1, 0)]) for d in damages.values()]
    picture = np.array(lines)
    for line, damage in enumerate(damages.values()):
        if not damage.lost:
            picture[line] = 3
    steps = len(next(iter(damages.values())).logits)
    groups = [f"layer {i}\n({config.kind(i).name})" for i in config.state_layers] + ["logits"]
    figure, axes = pyplot().subplots(figsize=(11.5, 0.21 * len(lines) + 1.7), layout="constrained")
    categories(axes, picture, [EQUAL, DIFFERENT, ENTRY, _EMPTY])
    for group in range(1, len(groups)):
        axes.axvline(group * steps - 0.5, color="black", linewidth=0.8)
    axes.set_xticks([group * steps + (steps - 1) / 2 for group in range(len(groups))], groups)
    axes.xaxis.tick_top()
    axes.set_xlabel(f"in each group: steps 1 to {steps} after the restore", fontsize=9)
    _cell_ticks(axes, damages, "black")
    axes.set_title(title, fontsize=10)
    names = {
        "equal": EQUAL,
        "rows of this token differ (so did the layer's input), or the logits": DIFFERENT,
        "only an entry or index key that this step made": ENTRY,
        "nothing was lost (empty)": _EMPTY,
    }
    legend(figure, names)
    return figure


def error_figure(panels: Mapping[str, Mapping[str, Damage]]) -> Figure:
    """The largest logit error at each step (columns) for every lost cell (line), on a logarithmic scale.

    Args:
        panels: title -> damages, all with the same labels.
    """
    from matplotlib.colors import LogNorm

    labels = next(iter(panels.values()))
    figure, grid = pyplot().subplots(
        1,
        len(panels),
        figsize=(11, 0.21 * len(labels) + 1.2),
        layout="constrained",
        sharey=True,
        squeeze=False,
    )
    errors = {title: np.array([d.error for d in damages.values()]) for title, damages in panels.items()}
    highest = max(e.max() for e in errors.values())
    for axes, (title, error) in zip(grid[0], errors.items(), strict=True):
        empty = [[0 if damage.lost else 1] * error.shape[1] for damage in panels[title].values()]
        categories(axes, empty, [EQUAL, _EMPTY])
        picture = axes.imshow(
            np.ma.masked_equal(error, 0),
            aspect="auto",
            cmap="inferno_r",
            norm=LogNorm(highest * 1e-5, highest),
            interpolation="nearest",
        )
        steps = error.shape[1]
        axes.set_xticks(range(0, steps, 2), [str(step + 1) for step in range(0, steps, 2)])
        axes.set_xlabel("step after the restore", fontsize=9)
        axes.set_title(title, fontsize=10)
    for axes in grid[0]:
        _cell_ticks(axes, labels, "white")
    for axes in grid[0, 1:]:
        axes.set_ylabel("")
    bar = figure.colorbar(picture, ax=grid[0].tolist(), shrink=0.8)
    bar.set_label("largest logit error (green: equal bits; white: nothing was lost)", fontsize=9)
    bar.ax.tick_params(labelsize=8)
    return figure


def _codes(damage: Damage) -> np.ndarray:
    """[layers, steps]: 1 where the layer's input differed, 2 where only an entry did, else 0."""
    return np.where(damage.token_rows, 1, np.where(damage.entries, 2, 0))


def _cell_ticks(axes: Axes, damages: Mapping[str, Damage], colour: str) -> None:
    """Labels the lines with the cells, and draws a line between layers."""
    names = [name.removeprefix("layers.") for name in damages]
    axes.set_yticks(range(len(names)), names)
    for line in range(1, len(names)):
        if names[line].split(".")[0] != names[line - 1].split(".")[0]:
            axes.axhline(line - 0.5, color=colour, linewidth=1.2)
    axes.set_ylabel("lost: layer.component", fontsize=9)
