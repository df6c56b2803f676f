"""Who holds which page of a pool."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from .base import ENTRY, WINDOW, bare, legend, pyplot

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_HELD, _FREE = "#e9e9e9", "#ffffff"


class Holding(NamedTuple):
    """Who holds which pages at one moment: holder -> its page table, and the counts of the pool."""

    title: str
    tables: Mapping[str, Sequence[int]]
    counts: Sequence[int]


def pages_figure(frames: Sequence[Holding]) -> Figure:
    """Pages of a pool from left to right, holders from top to bottom, one picture a moment.

    A number in a cell is the place that the page has in the holder's page table.
    """
    columns, lines = 2, -(-len(frames) // 2)
    holders = list(dict.fromkeys(name for frame in frames for name in frame.tables))
    figure, grid = pyplot().subplots(
        lines, columns, figsize=(11, (0.34 * len(holders) + 0.75) * lines + 0.4), layout="constrained",
        squeeze=False, sharex=True, sharey=True,
    )  # fmt: skip
    for axes in grid.flat[len(frames) :]:
        axes.set_visible(False)
    for axes, frame in zip(grid.flat, frames, strict=False):
        for name, table in frame.tables.items():
            for place, page in enumerate(table):
                colour = ENTRY if frame.counts[page] > 1 else WINDOW
                _cell(axes, page, holders.index(name), colour, f"{place}")
        for page, count in enumerate(frame.counts):
            _cell(axes, page, len(holders), _HELD if count else _FREE, f"{count}" if count else "free")
        axes.set_xlim(-0.6, len(frame.counts) - 0.4)
        axes.set_ylim(len(holders) + 0.55, -0.55)
        axes.set_yticks(range(len(holders) + 1), [*holders, "holders"])
        axes.set_xticks(range(len(frame.counts)))
        axes.set_title(frame.title, fontsize=10, loc="left")
        bare(axes)
    for axes in grid[-1]:
        axes.set_xlabel("page of the pool", fontsize=9)
    legend(figure, {"held by one": WINDOW, "shared": ENTRY})
    return figure


def _cell(axes: Axes, x: int, y: int, colour: str, text: str) -> None:
    box = pyplot().Rectangle((x - 0.46, y - 0.42), 0.92, 0.84, facecolor=colour, edgecolor=_HELD)
    axes.add_patch(box)
    axes.text(x, y, text, ha="center", va="center", fontsize=8)
