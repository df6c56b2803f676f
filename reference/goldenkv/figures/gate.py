"""The picture of a reload gate."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from ..gate import Result
from .base import ABSENT, DIFFERENT, EQUAL, categories, pyplot

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_GAP = 2
"""Empty cells between two groups."""


def gate_figure(results: Sequence[Result], *, bins: int = 700) -> Figure:
    """Which rows of state and logits differ from the cold run: a line a path, a column a group of rows.

    Columns are grouped by component, over all layers. A single different row is drawn wide enough to be seen.

    Args:
        results: of a gate; lines without a comparison are left out.
        bins: columns to draw.
    """
    drawn = [r for r in results if r.difference is not None and r.name != "cold"]
    groups = _groups(drawn)
    widths = np.array([size for _, size in groups], float)
    columns = np.maximum((widths / widths.sum() * bins).astype(int), 30)
    starts = np.concatenate([[0], np.cumsum(columns + _GAP)])
    picture = np.full((len(drawn), starts[-1] - _GAP), 2)
    for line, result in enumerate(drawn):
        masks = _by_group(result)
        for (name, _), low, count in zip(groups, starts, columns, strict=False):
            if name in masks and len(masks[name]):
                picture[line, low : low + count] = _binned(~masks[name], count)

    figure, axes = pyplot().subplots(figsize=(11, 0.34 * len(drawn) + 1.9), layout="constrained")
    categories(axes, picture, [EQUAL, DIFFERENT, ABSENT])
    for line in range(1, len(drawn)):
        axes.axhline(line - 0.5, color="white", linewidth=1.5)
    axes.set_xticks(
        starts[:-1] + (columns - 1) / 2,
        [name for name, _ in groups],
        rotation=45,
        ha="right",
        rotation_mode="anchor",
    )
    axes.set_yticks(range(len(drawn)), [("control: " if r.control else "") + r.name for r in drawn])
    axes.set_title(
        "Rows that differ from the cold run (red) after the prompt and the decode steps", fontsize=10
    )
    return figure


def _by_group(result: Result) -> dict[str, np.ndarray]:
    """Row masks joined over layers: `prompt: layers.2.entries` and `layers.2.entries` belong to `entries`."""
    assert result.difference is not None
    joined: dict[str, list[np.ndarray]] = {}
    for name, mask in result.difference.by_name.items():
        joined.setdefault(name.rsplit(".", 1)[-1], []).append(mask)
    return {name: np.concatenate(masks) for name, masks in joined.items()}


def _groups(results: Sequence[Result]) -> list[tuple[str, int]]:
    sizes: dict[str, int] = {}
    for result in results:
        for name, mask in _by_group(result).items():
            sizes[name] = max(sizes.get(name, 0), len(mask))
    return [(name, size) for name, size in sizes.items() if size]


def _binned(different: np.ndarray, count: int) -> np.ndarray:
    """`count` cells: 1 where a row of the cell or of one beside it differs, so that no row is too thin."""
    row = np.arange(len(different))
    first, last = row * count // len(different), -(-(row + 1) * count // len(different))
    cells = np.zeros(count, int)
    for low, high in zip(first[different], last[different], strict=True):
        cells[max(low - 1, 0) : high + 1] = 1
    return cells
