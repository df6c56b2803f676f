"""What all pictures share: how matplotlib is reached, colours, and how a figure becomes a file."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from ..errors import MissingExtra

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

EQUAL, DIFFERENT, ABSENT = "#d8e6dc", "#b3261e", "#ffffff"
WINDOW, ENTRY, BOTH, SINK = "#6fa8dc", "#f0a830", "#4a7f3f", "#9a9a9a"
"""Reached by the window, by an entry, by both; the sink."""
PAST, FUTURE = "#e9e9e9", "#ffffff"


def pyplot() -> Any:
    """`matplotlib.pyplot`, with a backend that opens no window unless another is chosen already.

    Raises:
        MissingExtra: matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError:
        raise MissingExtra("explore", "drawing a figure") from None
    if matplotlib.get_backend(auto_select=False) is None:
        matplotlib.use("agg")
    from matplotlib import pyplot

    return pyplot


def save_figure(figure: Figure, path: str | os.PathLike[str]) -> None:
    """Writes a picture without the date and version that would change its bytes."""
    figure.savefig(path, dpi=150, metadata={"Software": None} if str(path).endswith(".png") else None)


def categories(
    axes: Axes, codes: Any, colours: Sequence[str], *, aspect: Literal["auto", "equal"] = "auto"
) -> None:
    """Draws a matrix of small integers: code i in `colours[i]`, without ticks and frame."""
    from matplotlib.colors import ListedColormap

    axes.imshow(
        codes,
        aspect=aspect,
        cmap=ListedColormap(list(colours)),
        vmin=-0.5,
        vmax=len(colours) - 0.5,
        interpolation="nearest",
    )
    bare(axes)


def bare(axes: Axes) -> None:
    """No frame and no tick marks; tick labels stay."""
    axes.tick_params(length=0, labelsize=8)
    for side in axes.spines.values():
        side.set_visible(False)


def legend(figure: Figure, colours: dict[str, str], dot: str | None = None) -> None:
    """A legend of coloured squares below the picture, and of the black dot where there is one."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: list[Any] = [
        Patch(facecolor=colour, edgecolor="#888888", linewidth=0.5, label=name)
        for name, colour in colours.items()
    ]
    if dot is not None:
        handles.append(Line2D([], [], linestyle="", marker="o", color="black", markersize=5, label=dot))
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False, fontsize=9)
