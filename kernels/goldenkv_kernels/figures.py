"""Pictures of the kernels: the roofline, floors, what they take of a processor, and which gate sees what."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from goldenkv.figures.base import BOTH, DIFFERENT, ENTRY, PAST, SINK, WINDOW, bare, categories, legend, pyplot

from .gates.compilation import Kernel
from .gates.h200 import PROCESSORS, RESERVED, SHARED
from .gates.measured import Timed
from .gates.occupancy import held
from .gates.roofline import BYTES_A_SECOND, OPERATIONS_A_SECOND, Work

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

RIDGE = OPERATIONS_A_SECOND / BYTES_A_SECOND
"""Operations a byte at which both floors take the same time."""

MOST_REGISTERS = 255
_NARROW, _WIDE = 24, 512  # operations a byte, where the picture begins and ends
_COLOURS = (WINDOW, BOTH, ENTRY, SINK, "#7a5ea8", DIFFERENT, "#5c8a7a")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")


def roofline_figure(lines: Mapping[str, Mapping[str, Work]], timed: Sequence[Timed] = ()) -> Figure:
    """The two floors as a roof, and below it where each kernel stands on the same axis.

    Args:
        lines: kernel -> size -> what a call must do. One without matrix products stands at 0, beyond the left
            edge.
        timed: drawn under the roof, those with matrix products.
    """
    plots = pyplot()
    figure, (top, strip) = plots.subplots(
        2, 1, sharex=True, figsize=(9, 3.2 + 0.3 * len(lines)), layout="constrained",
        height_ratios=(3, 0.36 * len(lines)),
    )  # fmt: skip
    _roof_panel(top, [point for point in timed if point.intensity])
    sizes = list(dict.fromkeys(size for works in lines.values() for size in works))
    shades = dict(zip(sizes, plots.get_cmap("Blues")(np.linspace(0.3, 0.95, len(sizes))), strict=True))
    for line, works in enumerate(lines.values()):
        found = [(work.intensity, shades[size]) for size, work in works.items() if work.intensity]
        for intensity, shade in found:
            dot = {"color": shade, "markeredgecolor": "black", "markeredgewidth": 0.5}
            strip.plot(intensity, line, "o", markersize=7, **dot)
            top.plot(intensity, roof(intensity), "o", markersize=5, **dot)
        if not found:
            strip.annotate(
                "0: no matrix product", (_NARROW, line), (_NARROW * 1.35, line), fontsize=8, va="center",
                arrowprops={"arrowstyle": "->", "linewidth": 0.8},
            )  # fmt: skip
    for axes in (top, strip):
        axes.axvline(RIDGE, color="black", linewidth=0.8, linestyle=":")
        axes.axvspan(_NARROW, RIDGE, color=PAST, alpha=0.45, linewidth=0, zorder=0)
        _quiet(axes)
    strip.set_yticks(range(len(lines)), list(lines))
    strip.set_ylim(len(lines) - 0.5, -0.5)
    strip.set_xscale("log")
    strip.set_xlim(_NARROW, _WIDE)
    ticks = [32, 64, 128, round(RIDGE), 256, 512]
    strip.set_xticks(ticks, [str(tick) for tick in ticks])
    strip.set_xticks([], minor=True)
    strip.set_xlabel("operations a byte", fontsize=9)
    legend(figure, {f"context {size}": _hex(shade) for size, shade in shades.items()})
    return figure


def _roof_panel(axes: Axes, timed: Sequence[Timed]) -> None:
    """The two floors, and what was measured: a colour for each function, a marker for each implementation."""
    x = np.geomspace(_NARROW, _WIDE, 200)
    axes.plot(x, roof(x), color="black", linewidth=2, zorder=1)
    for at, y, text, side in (
        (1.06 * _NARROW, 2 * roof(_NARROW), f"bytes: {BYTES_A_SECOND / 1e12:g} TB/s", "left"),
        (_WIDE / 1.04, roof(_WIDE) / 1.3, f"operations: {OPERATIONS_A_SECOND / 1e12:g} TFLOP/s", "right"),
    ):
        axes.text(at, y, text, fontsize=9, ha=side)
    axes.text(RIDGE / 1.03, 1100, "memory is the floor", fontsize=8, ha="right")
    axes.text(RIDGE * 1.03, 1100, "matrix units are the floor", fontsize=8)
    names = list(dict.fromkeys(point.name for point in timed))
    ways = list(dict.fromkeys(point.implementation for point in timed))
    for name, way in dict.fromkeys((point.name, point.implementation) for point in timed):
        same = [point for point in timed if (point.name, point.implementation) == (name, way)]
        axes.plot(
            [point.intensity for point in same], [point.operations_a_second / 1e12 for point in same],
            linestyle="", marker=_MARKERS[ways.index(way) % len(_MARKERS)], markersize=6,
            color=_COLOURS[names.index(name) % len(_COLOURS)], label=f"{name}, {way}",
        )  # fmt: skip
    least = 80.0
    if timed:
        least = min(point.operations_a_second / 1e12 for point in timed)
        axes.legend(frameon=False, fontsize=7, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    else:
        axes.text(1.06 * _NARROW, 50, "no measured points: no kernel has run on a GPU", fontsize=9)
    axes.set_yscale("log")
    axes.set_ylim(least / 2, 1500)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.set_ylabel("TFLOP/s", fontsize=9)


def roof(intensity: Any) -> Any:
    """The most TFLOP/s that the two floors allow at so many operations a byte."""
    return np.minimum(intensity * BYTES_A_SECOND, OPERATIONS_A_SECOND) / 1e12


def floors_figure(panels: Mapping[str, tuple[str, Mapping[str, Mapping[int, Work]]]]) -> Figure:
    """The least time of a call, in microseconds, on logarithmic axes.

    Args:
        panels: title -> what varies, and kernel -> its values -> what a call must do.
    """
    figure, grid = pyplot().subplots(
        1, len(panels), sharey=True, figsize=(4.6 * len(panels), 4.2), layout="constrained", squeeze=False
    )
    for axes, (title, (varies, lines)) in zip(grid[0], panels.items(), strict=True):
        for number, (name, works) in enumerate(lines.items()):
            _line(axes, number, name, {value: 1e6 * work.seconds for value, work in works.items()})
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        _doubling(axes, sorted({value for works in lines.values() for value in works}))
        axes.set_xlabel(varies, fontsize=9)
        axes.set_title(title, fontsize=10)
    grid[0][0].set_ylabel("floor of a call, microseconds", fontsize=9)
    grid[0][0].legend(frameon=False, fontsize=8)
    return figure


def budget_figure(kernels: Mapping[str, Kernel]) -> Figure:
    """What each compiled kernel takes: registers a thread and shared memory a program, of what there is."""
    figure, (left, right) = pyplot().subplots(
        1, 2, sharey=True, figsize=(10, 0.24 * len(kernels) + 1.0), layout="constrained"
    )
    lines = range(len(kernels))
    most = (SHARED - RESERVED) / 1024
    left.barh(lines, [k.registers for k in kernels.values()], height=0.7, color=WINDOW)
    right.barh(lines, [k.shared / 1024 for k in kernels.values()], height=0.7, color=ENTRY)
    for axes, limit, what in (
        (left, MOST_REGISTERS, f"registers a thread, of {MOST_REGISTERS}"),
        (right, most, f"KiB of shared memory a program, of {most:.0f}"),
    ):
        axes.axvline(limit, color="black", linewidth=1)
        axes.set_xticks(range(0, int(limit), 50))
        axes.set_xlabel(what, fontsize=9)
        bare(axes)
    for line, kernel in zip(lines, kernels.values(), strict=True):
        right.text(1.2 * most, line, str(held(kernel)), va="center", ha="right", fontsize=8)
    right.text(1.2 * most, -1, "programs on\na processor", ha="right", fontsize=8)
    right.set_xlim(0, 1.21 * most)
    left.set_yticks(lines, list(kernels))
    left.set_ylim(len(kernels) - 0.4, -0.6)
    return figure


def programs_figure(lines: Mapping[str, Mapping[int, int]]) -> Figure:
    """How many programs a call starts, against the processors that there are.

    Args:
        lines: kernel -> batch -> programs.
    """
    figure, axes = pyplot().subplots(figsize=(9, 4.2), layout="constrained")
    for number, (name, counts) in enumerate(lines.items()):
        _line(axes, number, name, counts)
    first = min(batch for counts in lines.values() for batch in counts)
    axes.axhline(PROCESSORS, color="black", linewidth=1)
    axes.text(
        1.2 * first, PROCESSORS / 1.15, f"{PROCESSORS} processors; below, some have nothing to do",
        fontsize=8, va="top",
    )  # fmt: skip
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    _doubling(axes, sorted({batch for counts in lines.values() for batch in counts}))
    axes.set_xlabel("sequences in the batch", fontsize=9)
    axes.set_ylabel("programs of a call", fontsize=9)
    axes.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return figure


def gates_figure(refused: Mapping[str, Mapping[str, bool]], meant: Mapping[str, str]) -> Figure:
    """Which gate refuses which kernel; a dot marks the gate that a wrong kernel is made for.

    Args:
        refused: kernel -> gate -> whether it refuses it.
        meant: kernel -> gate, for kernels that are wrong on purpose.
    """
    gates = list(next(iter(refused.values())))
    codes = np.array([[row[gate] for gate in gates] for row in refused.values()], int)
    figure, axes = pyplot().subplots(
        figsize=(1.3 * len(gates) + 3, 0.36 * len(refused) + 1.2), layout="constrained"
    )
    categories(axes, codes, [PAST, BOTH])
    names = list(refused)
    for name, gate in meant.items():
        axes.plot(gates.index(gate), names.index(name), "o", color="black", markersize=5)
    for line in range(1, len(names)):
        axes.axhline(line - 0.5, color="white", linewidth=1.5)
    for column in range(1, len(gates)):
        axes.axvline(column - 0.5, color="white", linewidth=1.5)
    axes.set_xticks(range(len(gates)), gates)
    axes.xaxis.tick_top()
    axes.set_yticks(range(len(names)), names)
    legend(figure, {"refused": BOTH, "let pass": PAST}, dot="must refuse it")
    return figure


def _line(axes: Axes, number: int, name: str, values: Mapping[int, float]) -> None:
    style: Any = {"color": _COLOURS[number % len(_COLOURS)], "marker": _MARKERS[number % len(_MARKERS)]}
    axes.plot(list(values), list(values.values()), markersize=5, label=name, **style)


def _doubling(axes: Axes, values: Sequence[int]) -> None:
    """A logarithmic axis with a tick at each value."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(values, [f"{value // 1024}k" if value >= 1024 else str(value) for value in values])
    _quiet(axes)


def _quiet(axes: Axes) -> None:
    axes.grid(alpha=0.3)
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)


def _hex(colour: Any) -> str:
    from matplotlib.colors import to_hex

    return to_hex(colour)
