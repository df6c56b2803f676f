"""Bytes that models keep: a row, a page, a token, a sequence, and what a page adds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from ..capacity import PAGE_SIZES, Model, Report
from ..capacity.tables import number, percent, size
from ..state.formats import RowFormat
from ..state.layouts import PageLayout
from .base import ABSENT, DIFFERENT, ENTRY, SINK, WINDOW, categories, legend, pyplot

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_POINTS = 2 ** np.arange(7, 21)
"""Contexts of the curves, in tokens."""

_FIELDS = {"values": ENTRY, "rope": WINDOW, "scales": DIFFERENT, "padding": "#e4e4e4"}
_FIELD_NAMES = {"values": "values", "rope": "rotated channels", "scales": "scales", "padding": "padding"}
_TYPES = {
    "float8_e4m3fn": "E4M3", "float8_e4m3fnuz": "E4M3 FNUZ", "float8_e8m0fnu": "UE8M0",
    "float4_e2m1fn": "E2M1", "bfloat16": "BF16", "float32": "FP32",
}  # fmt: skip


def row_figure(formats: Mapping[str, RowFormat]) -> Figure:
    """A bar a row format, as long as its bytes and cut into fields.

    Args:
        formats: label -> format.
    """
    figure, axes = pyplot().subplots(figsize=(9, 0.5 * len(formats) + 1.0), layout="constrained")
    most = max(form.nbytes for form in formats.values())
    for line, form in enumerate(formats.values()):
        left, said = 0, []
        for field in form.fields:
            axes.barh(line, field.nbytes, left=left, height=0.7, color=_FIELDS[field.name])
            if field.nbytes:
                said.append(f"{field.count} {'padding' if field.name == 'padding' else _TYPES[field.dtype]}")
            left += field.nbytes
        axes.text(left + most * 0.01, line, f"{left} bytes: {', '.join(said)}", va="center", fontsize=9)
    axes.set_yticks(range(len(formats)), list(formats))
    axes.invert_yaxis()
    axes.set_xlim(0, most * 1.45)
    axes.set_xticks(range(0, most + 1, 128))
    axes.set_xlabel("byte of the row", fontsize=9)
    _plain(axes)
    used = {field.name for form in formats.values() for field in form.fields if field.nbytes}
    legend(figure, {_FIELD_NAMES[name]: colour for name, colour in _FIELDS.items() if name in used})
    return figure


def page_figure(layout: PageLayout) -> Figure:
    """Every byte of a page by what it holds, in lines as long as a row's data; the last line enlarged."""
    codes = page_codes(layout)
    width = sum(field.nbytes for field in layout.sections[0])
    lines = -(-len(codes) // width)
    beyond = len(_FIELDS)
    picture = np.pad(codes, (0, lines * width - len(codes)), constant_values=beyond).reshape(lines, width)
    figure, (whole, last) = pyplot().subplots(
        2, 1, figsize=(9, 4.2), layout="constrained", height_ratios=[5, 1]
    )
    for axes, part in ((whole, picture), (last, picture[-1:])):
        categories(axes, part, [*_FIELDS.values(), ABSENT])
        axes.set_xticks([0, *range(63, width, 64)], [1, *range(64, width + 1, 64)])
    whole.set_yticks([0, *range(15, lines, 16)], [1, *range(16, lines + 1, 16)])
    whole.set_ylabel(f"line of {width} bytes", fontsize=9)
    whole.set_title(
        f"a page of {layout.rows} rows: {layout.nbytes:,} bytes in {lines} lines", fontsize=10, loc="left"
    )
    last.set_yticks([0], [lines])
    last.set_xlabel("byte of the line", fontsize=9)
    last.set_title("the last line, enlarged", fontsize=10, loc="left")
    legend(figure, {_FIELD_NAMES[name]: colour for name, colour in _FIELDS.items()})
    return figure


def page_codes(layout: PageLayout) -> np.ndarray:
    """[layout.nbytes]: what each byte of a page holds; 0 values, 1 rotated channels, 2 scales, 3 padding."""
    names = list(_FIELDS)
    run = layout.run or layout.rows
    one_run = [
        np.tile(
            np.repeat([names.index(field.name) for field in section], [field.nbytes for field in section]),
            run,
        )
        for section in layout.sections
    ]
    rows = np.tile(np.concatenate(one_run), layout.rows // run)
    return np.pad(rows, (0, layout.nbytes - len(rows)), constant_values=names.index("padding"))


def claims_figure(claims: Mapping[str, tuple[float, float]], who: str) -> Figure:
    """Two sizes side by side on a logarithmic axis, with their labels.

    Args:
        claims: what is counted -> (bytes that someone else gives, bytes that we count).
        who: gives the first number.
    """
    figure, axes = pyplot().subplots(figsize=(9, 0.42 * len(claims) + 1.2), layout="constrained")
    for line, (theirs, ours) in enumerate(claims.values()):
        axes.plot([theirs, ours], [line, line], color=SINK, linewidth=1, zorder=1)
        for value, colour, side in ((theirs, SINK, -1), (ours, DIFFERENT, 1)):
            axes.plot([value], [line], "o", color=colour, markersize=7)
            axes.annotate(
                decimal_size(value), (value, line), (10 * side, 0), textcoords="offset points",
                ha="left" if side > 0 else "right", va="center", fontsize=9,
            )  # fmt: skip
    values = np.array(list(claims.values()))
    axes.set_xscale("log")
    axes.set_xlim(values.min() / 50, values.max() * 50)
    ticks = [10**p for p in range(0, 15, 3) if values.min() / 50 <= 10**p <= values.max() * 50]
    axes.set_xticks(ticks, [decimal_size(tick) for tick in ticks])
    axes.set_yticks(range(len(claims)), list(claims))
    axes.set_ylim(len(claims) - 0.4, -0.6)
    axes.grid(axis="x", alpha=0.3)
    axes.tick_params(which="minor", length=0)
    _plain(axes)
    legend(figure, {who: SINK, "counted here": DIFFERENT})
    return figure


def decimal_size(nbytes: float) -> str:
    """A size in powers of 1000, as networks and articles count, to three digits: 6.3 B, 1.12 GB, 912 kB."""
    units = (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3))
    unit, step = next((found for found in units if nbytes >= found[1]), ("B", 1.0))
    value = nbytes / step
    text = f"{value:,.{2 if value < 10 else 1 if value < 100 else 0}f}"
    return f"{text.rstrip('0').rstrip('.') if '.' in text else text} {unit}"


def capacity_figure(report: Report) -> Figure:
    """Three pictures: bytes a token by part, a sequence against its length, padding and metadata of pages.

    Everything is of one tensor-parallel rank; a colour is a part in the first picture and a model in the
    others.
    """
    heights = [_height(report), 3.4, 3.0]
    figure, (token, sequence, page) = pyplot().subplots(
        3, 1, figsize=(8, sum(heights) + 1.6), layout="constrained", height_ratios=heights
    )
    _a_token(token, report)
    _a_sequence(sequence, report)
    _pages(page, report)
    if report.load.tensor_parallel > 1:
        figure.suptitle(f"one of {report.load.tensor_parallel} tensor-parallel ranks", fontsize=10)
    return figure


def _a_token(axes: Axes, report: Report) -> None:
    """A bar a model, cut into parts, with its sum and its share."""
    ranks = report.load.tensor_parallel
    colours: dict[str, Any] = {}
    palette = pyplot().get_cmap("Set2").colors  # not the colours of models, below
    most = max(model.bytes_a_token(ranks) for model in report.models)
    for line, model in enumerate(report.models):
        left = 0.0
        for group, part in model.parts():
            if part.grows:
                width, label = group.layers * part.bytes_a_token(ranks), f"{group.kind} {part.name}"
                new = label not in colours
                colour = colours.setdefault(label, palette[len(colours) % len(palette)])
                axes.barh(line, width, left=left, height=0.66, color=colour, label=label if new else None)
                left += width
        share = report.share(model)
        compared = share is not None and model is not report.reference
        of = f"  ({percent(share or 0)} of {report.reference.name})" if compared else ""
        axes.text(left + most * 0.01, line, number(left) + of, va="center", fontsize=9)
    axes.set_yticks(range(len(report.models)), [_name(model) for model in report.models])
    axes.invert_yaxis()
    axes.set_xlim(0, most * 1.36 or 1)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.set_title("bytes a token, long context", fontsize=10, loc="left")
    if colours:
        axes.legend(
            frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(0, -0.3 / _height(report)), ncols=4
        )
    _plain(axes)


def _a_sequence(axes: Axes, report: Report) -> None:
    """Growing and fixed bytes together; dotted what is fixed."""
    ranks = report.load.tensor_parallel
    for i, model in enumerate(report.models):
        bounded = np.array([model.bounded_bytes(int(n), ranks) for n in _POINTS])
        growing = np.array([model.growing_bytes(int(n), ranks) for n in _POINTS])
        axes.plot(_POINTS, growing + bounded, color=f"C{i}", linewidth=1.8, label=_name(model))
        if bounded.any():
            axes.plot(_POINTS, bounded, color=f"C{i}", linewidth=1.0, linestyle=":")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xticks(_POINTS[::2], [f"{n:,}" for n in _POINTS[::2]])
    low, high = (int(np.log2(y)) for y in axes.get_ylim())
    ticks = [2**p for p in range(low, high + 1) if p % 3 == 0]
    axes.set_yticks(ticks, [_power(tick) for tick in ticks])
    axes.set_xlabel("tokens", fontsize=9)
    axes.set_title("bytes of one sequence; dotted: the fixed part", fontsize=10, loc="left")
    axes.legend(frameon=False, fontsize=8)
    axes.grid(alpha=0.3)
    _plain(axes)


def _pages(axes: Axes, report: Report) -> None:
    """Shares of the rows by page size: padding solid, metadata dashed."""
    for i, model in enumerate(report.models):
        pages = report.pages(model)
        sizes = [page.tokens for page in pages]
        if any(page.padding for page in pages):
            axes.plot(sizes, [page.padding for page in pages], "o-", color=f"C{i}", markersize=4)
        if any(page.metadata for page in pages):
            axes.plot(sizes, [page.metadata for page in pages], "o--", color=f"C{i}", markersize=4)
    axes.set_xscale("log", base=2)
    axes.set_xticks(PAGE_SIZES, [f"{n:,}" for n in PAGE_SIZES])
    if axes.lines:
        axes.set_yscale("log")
    axes.yaxis.set_major_formatter(lambda y, _: f"{100 * y:.6g}%")
    axes.set_xlabel("tokens a page", fontsize=9)
    axes.set_title("what pages add, as a share of the rows; colours as above", fontsize=10, loc="left")
    styles = {"padding": "-", f"metadata, {report.load.metadata} bytes a page": "--"}
    handles = [pyplot().Line2D([], [], color="black", linestyle=s, label=name) for name, s in styles.items()]
    axes.legend(handles=handles, frameon=False, fontsize=8)
    axes.grid(alpha=0.3)
    _plain(axes)


def _height(report: Report) -> float:
    """Inches of the bars."""
    return 0.4 * len(report.models) + 0.3


def _name(model: Model) -> str:
    return f"{model.name}, {model.format}"


def _power(nbytes: int) -> str:
    """A power of two without decimals."""
    return size(nbytes).replace(".00", "").replace(".0", "")


def _plain(axes: Axes) -> None:
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
