"""Replays and reload policies: how wrong, which rows, and what a conversation keeps and runs again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..config import LayerKind, ModelConfig
from ..conversation import Turn
from ..replay_study import ReplayError
from .base import DIFFERENT, ENTRY, EQUAL, WINDOW, bare, categories, legend, pyplot
from .capacity import decimal_size

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


class Cost(NamedTuple):
    """What a policy costs: bytes of pages and of boundary states, tokens that each turn runs again."""

    pages: int
    boundaries: int
    rerun: Sequence[int]
    exact: bool


def replay_error_figure(config: ModelConfig, errors: Sequence[ReplayError]) -> Figure:
    """The error of every layer's state, and of the logits, against the tokens that ran again.

    A curve ends where all bits are equal; a dot below marks that place. Lines mark the replay of one window,
    and the receptive field.

    Args:
        config: the model.
        errors: of `replay_study.replay_errors`, with counts that ascend.
    """
    figure, axes = pyplot().subplots(figsize=(10, 4.6), layout="constrained")
    counts = [error.count for error in errors]
    shades = pyplot().get_cmap("viridis_r")(np.linspace(0.15, 1, len(config.layers)))
    lowest = min(e for error in errors for e in (*error.state_error, error.logit_error) if e > 0)
    floor = lowest / 4
    for layer in config.state_layers:
        draft = config.kind(layer) is LayerKind.MTP
        label = "the MTP layer" if draft else f"layer {layer}"
        colour = ENTRY if draft else shades[layer]
        wrong = [error.wrong_rows[layer] > 0 for error in errors]
        _curve(axes, counts, [error.state_error[layer] for error in errors], wrong, colour, label, floor)
    wrong = [not error.logits_equal for error in errors]
    logits = [error.logit_error for error in errors]
    _curve(axes, counts, logits, wrong, DIFFERENT, "logits that follow", None)
    reach = config.num_hidden_layers * (config.sliding_window - 1)
    marks = {config.sliding_window: "one window:\napproximate", reach: f"L (W - 1)\n= {reach}"}
    if config.num_nextn_predict_layers:
        marks[reach + config.sliding_window] = f"L (W - 1) + W\n= {reach + config.sliding_window}"
    for count, text in marks.items():
        axes.axvline(count, color="#777777", linewidth=1, linestyle="--")
        axes.annotate(
            text, (count, 1), (4, -2), xycoords=("data", "axes fraction"), textcoords="offset points",
            fontsize=8, va="top",
        )  # fmt: skip
    axes.set_yscale("log")
    axes.set_ylim(floor / 4, None)
    axes.set_xlim(0, counts[-1] + 1)
    axes.set_xlabel("tokens that ran again", fontsize=9)
    axes.set_ylabel("largest error", fontsize=9)
    axes.set_title(
        "error of each layer's state; a dot: the number of tokens from which on all its bits are equal",
        fontsize=10, loc="left",
    )  # fmt: skip
    axes.legend(
        edgecolor="none", framealpha=1, fontsize=8, ncols=2, loc="lower left", bbox_to_anchor=(0, 0.14)
    )
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def exact_rows_figure(config: ModelConfig, panels: Mapping[str, np.ndarray]) -> Figure:
    """Which window rows of a replay are exact: layers from top to bottom, replayed tokens from left to right.

    The box is round the rows that the hit needs.

    Args:
        config: the model.
        panels: title -> [layers, tokens], of `replay_study.exact_rows`.
    """
    most, layers = max(rows.shape[1] for rows in panels.values()), len(config.state_layers)
    figure, grid = pyplot().subplots(
        len(panels), 1, figsize=(10, (0.26 * layers + 0.75) * len(panels) + 0.5), layout="constrained",
        squeeze=False,
    )  # fmt: skip
    for axes, (title, rows) in zip(grid[:, 0], panels.items(), strict=True):
        count = rows.shape[1]
        codes = np.full((layers, most), 2)
        codes[:, most - count :] = np.where(rows, 0, 1)
        categories(axes, codes, [EQUAL, DIFFERENT, "#ffffff"])
        for x in range(most - count, most + 1):
            axes.axvline(x - 0.5, color="white", linewidth=0.6)
        for line in range(1, layers):
            axes.axhline(line - 0.5, color="white", linewidth=1.5)
        needed = config.sliding_window - 1
        box = pyplot().Rectangle(
            (most - needed - 0.5, -0.5), needed, layers, fill=False, edgecolor="black", linewidth=1.6,
            clip_on=False, zorder=3,
        )  # fmt: skip
        axes.add_patch(box)
        names = ["MTP" if config.kind(i) is LayerKind.MTP else f"layer {i}" for i in config.state_layers]
        axes.set_yticks(range(layers), names)
        ticks = [x for x in range(most) if x >= most - count and (most - x) % 7 == 1]
        axes.set_xticks(ticks, [f"{x - most}" for x in ticks])
        axes.set_title(title, fontsize=10, loc="left")
    grid[-1, 0].set_xlabel("token, counted back from the hit", fontsize=9)
    said = {"row has the bits of a cold run": EQUAL, "other bits": DIFFERENT, "did not run": "#ffffff"}
    legend(figure, said)
    return figure


def conversation_figure(policies: Mapping[str, Sequence[Turn]]) -> Figure:
    """What each turn's prompt reuses, runs again and computes; dots are the states kept before that turn."""
    columns = 2
    lines = -(-len(policies) // columns)
    turns = len(next(iter(policies.values())))
    figure, grid = pyplot().subplots(
        lines, columns, figsize=(11, (0.28 * turns + 0.75) * lines + 0.4), layout="constrained", sharex=True,
        squeeze=False,
    )  # fmt: skip
    for axes in grid.flat[len(policies) :]:
        axes.set_visible(False)
    for axes, (name, found) in zip(grid.flat, policies.items(), strict=False):
        kept: Sequence[int] = ()
        for line, turn in enumerate(found):
            left = 0
            parts = ((turn.reused, EQUAL), (turn.replayed, ENTRY), (turn.computed, WINDOW))
            for width, colour in parts:
                axes.barh(line, width, left=left, height=0.62, color=colour)
                left += width
            axes.plot(kept, [line] * len(kept), ".", color="black", markersize=4)
            kept = turn.kept
        again = sum(turn.replayed for turn in found)
        axes.set_title(f"{name}: {again} tokens run again, {len(kept)} states kept", fontsize=9.5, loc="left")
        axes.set_yticks(range(turns), [f"turn {line + 1}" for line in range(turns)])
        axes.invert_yaxis()
        axes.set_xlim(0, None)
        bare(axes)
    for axes in grid[-1]:
        axes.set_xlabel("token of the prompt", fontsize=9)
    names = {"reused": EQUAL, "run again": ENTRY, "computed": WINDOW}
    legend(figure, names, dot="a boundary state that was kept before this turn")
    return figure


def policy_cost_figure(costs: Mapping[str, Cost]) -> Figure:
    """Bytes that each policy keeps, beside the tokens that it runs again in a turn."""
    figure, (kept, rerun) = pyplot().subplots(
        1, 2, figsize=(11, 0.42 * len(costs) + 1.3), layout="constrained", sharey=True
    )
    most = max(cost.pages + cost.boundaries for cost in costs.values())
    for line, cost in enumerate(costs.values()):
        kept.barh(line, cost.pages, height=0.62, color=EQUAL)
        kept.barh(line, cost.boundaries, left=cost.pages, height=0.62, color=WINDOW)
        text = f"{decimal_size(cost.boundaries)} of states" if cost.boundaries else "no states"
        kept.text(cost.pages + cost.boundaries + 0.01 * most, line, text, va="center", fontsize=8)
        mean = float(np.mean(cost.rerun))
        rerun.barh(line, mean, height=0.62, color=ENTRY if cost.exact else DIFFERENT)
        text = f"{mean:,.0f}, at most {max(cost.rerun):,}" if max(cost.rerun) else "0"
        rerun.text(mean, line, f" {text}" + ("" if cost.exact else ": approximate"), va="center", fontsize=8)
    kept.set_yticks(range(len(costs)), list(costs))
    kept.invert_yaxis()
    kept.set_xlim(0, 1.3 * most)
    kept.xaxis.set_major_formatter(lambda value, _: decimal_size(value))
    rerun.set_xlim(0, 1.45 * max(float(np.mean(cost.rerun)) for cost in costs.values()) or 1)
    rerun.xaxis.set_major_formatter("{x:,.0f}")
    kept.set_title("bytes kept: pages (green) and boundary states (blue)", fontsize=10, loc="left")
    rerun.set_title("tokens run again a turn, mean", fontsize=10, loc="left")
    for axes in (kept, rerun):
        axes.tick_params(labelsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def _curve(
    axes: Axes,
    counts: Sequence[int],
    values: Sequence[float],
    wrong: Sequence[bool],
    colour: object,
    label: str,
    floor: float | None,
) -> None:
    """The errors as far as bits differ, and the first count at which none does."""
    shown = [(count, value) for count, value, bad in zip(counts, values, wrong, strict=True) if bad and value]
    style: dict[str, Any] = dict(linewidth=1.6) if floor is not None else dict(linewidth=2.2, linestyle=":")
    axes.plot([c for c, _ in shown], [v for _, v in shown], color=colour, label=label, **style)
    last = max((i for i, bad in enumerate(wrong) if bad), default=-1)
    if floor is not None and last + 1 < len(counts):
        axes.plot([counts[last + 1]], [floor], "o", color=colour, markersize=5)
        axes.annotate(
            f"{counts[last + 1]}", (counts[last + 1], floor), (0, -13), textcoords="offset points",
            ha="center", fontsize=8, color=colour, bbox=dict(facecolor="white", edgecolor="none", pad=0.6),
        )  # fmt: skip
