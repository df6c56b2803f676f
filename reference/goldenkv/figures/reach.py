"""Who reaches what: which tokens a query sees, which tokens an entry pools, which rows a step computes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from .base import BOTH, ENTRY, FUTURE, PAST, WINDOW, categories, legend, pyplot

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


class Reach(NamedTuple):
    """What the queries of one layer reach: [queries, tokens] masks, and the tokens of a block (0: none)."""

    title: str
    window: np.ndarray
    entries: np.ndarray
    block: int = 0


class Pooled(NamedTuple):
    """Which tokens the entries of one compressor pool: [entries, tokens] masks.

    `earlier` through the first half of the channels (CSA only), `own` through the rest; `positions` is the
    token whose position the entry's RoPE takes.
    """

    title: str
    earlier: np.ndarray
    own: np.ndarray
    positions: np.ndarray


def cache_figure(labels: Sequence[str]) -> Figure:
    """Which KV rows each step computes without a cache and with one.

    Args:
        labels: the tokens.
    """
    steps = len(labels)
    past = np.tri(steps, dtype=bool)
    figure, both = pyplot().subplots(1, 2, figsize=(8.5, 3.6), layout="constrained")
    for axes, title, fresh in (
        (both[0], "without a cache", past),
        (both[1], "with a cache", np.eye(steps, dtype=bool)),
    ):
        categories(axes, np.where(fresh, 2, np.where(past, 1, 0)), [FUTURE, WINDOW, ENTRY], aspect="equal")
        _token_ticks(axes, labels, steps)
        axes.set_xlabel("KV row of token", fontsize=9)
        axes.set_ylabel("step", fontsize=9)
        axes.set_title(f"{title}: {int(fresh.sum())} rows computed", fontsize=10)
    legend(figure, {"computed in this step": ENTRY, "read from the cache": WINDOW, "not there yet": FUTURE})
    return figure


def reach_figure(panels: Sequence[Reach], labels: Sequence[str] | None = None) -> Figure:
    """For every query (line) which earlier tokens (columns) it reaches, and through what.

    Args:
        panels: one picture each.
        labels: the tokens, where they are few enough to be written.
    """
    size = 4.8 if len(panels) < 3 else 3.9
    figure, grid = pyplot().subplots(
        1, len(panels), figsize=(size * len(panels), size + 0.6), layout="constrained", squeeze=False
    )
    for axes, panel in zip(grid[0], panels, strict=True):
        queries, tokens = panel.window.shape
        code = np.where(_past(panel), 1, 0)
        code[panel.window] = 2
        code[panel.entries] = 3
        code[panel.window & panel.entries] = 4
        categories(axes, code, [FUTURE, PAST, WINDOW, ENTRY, BOTH], aspect="equal")
        if panel.block:
            for edge in range(panel.block, tokens, panel.block):
                axes.axvline(edge - 0.5, color="black", linewidth=0.6, alpha=0.5)
        if labels is not None:
            _token_ticks(axes, labels, queries)
        axes.set_xlabel("token", fontsize=9)
        axes.set_ylabel("query", fontsize=9)
        axes.set_title(panel.title, fontsize=10)
    names = {"window": WINDOW}
    if any(panel.entries.any() for panel in panels):
        names |= {"entry": ENTRY, "window and entry": BOTH}
    if any((_past(panel) & ~panel.window & ~panel.entries).any() for panel in panels):
        names |= {"past, not reached": PAST}
    legend(figure, names | {"future": FUTURE})
    return figure


def pooled_figure(panels: Sequence[Pooled]) -> Figure:
    """For every entry (line) which tokens (columns) it pools; a dot marks the position of its RoPE."""
    figure, grid = pyplot().subplots(
        1, len(panels), figsize=(5.4 * len(panels), 3.4), layout="constrained", squeeze=False
    )
    for axes, panel in zip(grid[0], panels, strict=True):
        code = np.where(panel.own, 2, np.where(panel.earlier, 1, 0))
        categories(axes, code, [PAST, WINDOW, ENTRY])
        entries, tokens = code.shape
        for edge in range(1, entries):
            axes.axhline(edge - 0.5, color="white", linewidth=1.5)
        axes.plot(panel.positions, range(entries), "o", color="black", markersize=5)
        axes.set_xlim(-0.02 * tokens - 0.5, tokens - 0.5)
        axes.set_xticks(panel.positions)
        axes.set_yticks(range(entries))
        axes.set_xlabel("token", fontsize=9)
        axes.set_ylabel("entry", fontsize=9)
        axes.set_title(panel.title, fontsize=10)
    names = {
        "as the earlier block (first half of the channels)": WINDOW,
        "as the own block": ENTRY,
    }
    legend(figure, names, dot="position of the entry's RoPE")
    return figure


def _past(panel: Reach) -> np.ndarray:
    queries, tokens = panel.window.shape
    return np.tri(queries, tokens, tokens - queries, dtype=bool)


def _token_ticks(axes: Axes, labels: Sequence[str], queries: int) -> None:
    """Writes each token under its column, and the queries beside their lines; ␣ is a space."""
    shown = [label.replace(" ", "␣").replace("\n", "↵") for label in labels]
    axes.set_xticks(range(len(shown)), shown)
    axes.set_yticks(range(queries), [f"{t}: {c}" for t, c in enumerate(shown)][-queries:])
