"""Tiers: where the tokens of prompts came from, and from which length on a reload beats computing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from ..tier_study import Served, crossover
from .base import BOTH, ENTRY, EQUAL, SINK, WINDOW, bare, legend, pyplot

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COLOURS = {"device": BOTH, "host": "#92bd86", "disk": EQUAL, "replayed": ENTRY, "computed": WINDOW}
_NAMES = {
    "device": "on the device", "host": "from the host", "disk": "from disk", "replayed": "run again",
    "computed": "computed",
}  # fmt: skip
_LINES = {"host": ("#92bd86", "o"), "disk": ("#5c8a7a", "s"), "redis": (SINK, "^")}


def sources_figure(runs: Mapping[str, Served]) -> Figure:
    """Each run's prompt tokens as a bar, cut by where their state came from; beside it both hit rates.

    Args:
        runs: capacities -> what became of the same requests.
    """
    figure, axes = pyplot().subplots(figsize=(11, 0.4 * len(runs) + 1.1), layout="constrained")
    most = max(run.tokens for run in runs.values())
    for line, run in enumerate(runs.values()):
        left = 0
        for name, colour in _COLOURS.items():
            axes.barh(line, run.sources.get(name, 0), left=left, height=0.66, color=colour)
            left += run.sources.get(name, 0)
        for x, rate in ((1.08, run.reused / run.tokens), (1.2, run.hits / run.requests)):
            axes.text(x * most, line, f"{rate:.0%}", va="center", ha="right", fontsize=9)
    for x, what in ((1.08, "tokens"), (1.2, "requests")):
        axes.text(x * most, -0.55, f"{what}\nfound", ha="right", fontsize=8)
    axes.set_yticks(range(len(runs)), list(runs))
    axes.invert_yaxis()
    axes.set_xlim(0, 1.21 * most)
    ticks = [int(tick) for tick in axes.get_xticks() if tick <= most]
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axes.set_xlabel("prompt tokens", fontsize=9)
    bare(axes)
    legend(figure, {_NAMES[name]: colour for name, colour in _COLOURS.items()})
    return figure


def crossover_figure(
    tokens: Sequence[int], recompute: Sequence[float], reloads: Mapping[str, Sequence[float]]
) -> Figure:
    """Seconds to have the state of a prompt: computed, and reloaded from each tier. A ring: where they cross.

    Args:
        tokens: lengths of the prompt.
        recompute: seconds at each of them.
        reloads: tier -> the same.
    """
    figure, axes = pyplot().subplots(figsize=(9, 4.4), layout="constrained")
    axes.plot(tokens, recompute, "-", color=WINDOW, linewidth=2.6, label="computed")
    for name, seconds in reloads.items():
        colour, marker = _LINES[name]
        at = crossover(tokens, seconds, recompute)
        if at is None:
            said = f"faster nowhere up to {tokens[-1]:,} tokens"
        elif at == tokens[0]:
            said = f"faster from {tokens[0]:,} tokens on, the shortest"
        else:
            said = f"faster from {at:,.0f} tokens on"
        axes.plot(tokens, seconds, marker=marker, color=colour, markersize=5, label=f"from {name}: {said}")
        if at is not None and at != tokens[0]:
            axes.plot(
                [at], [_between(tokens, seconds, at)], "o", color="black", markersize=11, fillstyle="none"
            )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(tokens, [f"{n:,}" for n in tokens])
    axes.set_xlabel("tokens of the prompt", fontsize=9)
    axes.set_ylabel("seconds until its state is there", fontsize=9)
    axes.legend(frameon=False, fontsize=9)
    axes.grid(alpha=0.3)
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def _between(tokens: Sequence[int], seconds: Sequence[float], at: float) -> float:
    """Seconds at a length between two, on the line that is drawn."""
    return float(np.exp(np.interp(np.log(at), np.log(tokens), np.log(seconds))))
