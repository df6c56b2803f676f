"""Pictures of selections show what they are given, each thing at its place."""

import numpy as np
import pytest

pytest.importorskip("matplotlib")

from matplotlib.colors import to_hex

from goldenkv.figures import pyplot
from goldenkv.figures.base import DIFFERENT, ENTRY, FUTURE, PAST, SINK, WINDOW
from goldenkv.figures.selection import (
    hit_rate_figure,
    hotness_figure,
    overview_figure,
    recall_figure,
    selection_map_figure,
    splice_figure,
    stability_figure,
)

LINES = {
    "selected": (np.array([1, 2]), np.array([0.5, 0.25])),
    "random": (np.array([1, 2]), np.array([0.1, 0.1])),
}
HEAT = {"P0": (2.0, 4.0), "P1": (0.5, 0.25), "P2": (0.0, 0.0)}
MASK = np.array([[False, False], [True, False], [True, False], [False, True]])


@pytest.fixture(autouse=True)
def _closed():
    yield
    pyplot().close("all")


def test_the_map_tells_selected_visible_and_future_apart():
    [axes] = selection_map_figure({"layer 2": MASK}, ratio=2, window=2).axes
    image = axes.images[0]
    colours = [[to_hex(image.cmap(int(code))) for code in row] for row in image.get_array()]
    assert colours == [[FUTURE, FUTURE], [ENTRY, FUTURE], [ENTRY, FUTURE], [PAST, ENTRY]]
    assert axes.lines[0].get_xdata().tolist() == [0, 0.5] and axes.lines[0].get_ydata().tolist() == [2, 3]
    assert axes.get_title(loc="left") == "layer 2"


@pytest.mark.parametrize("draw", [stability_figure, recall_figure, hit_rate_figure])
def test_lines_and_baselines(draw):
    left, right = draw({"a": LINES, "b": LINES}).axes
    assert [line.get_label() for line in left.lines] == ["selected", "random"]
    assert left.lines[0].get_ydata().tolist() == [0.5, 0.25]
    assert left.lines[1].get_linestyle() == ":" and left.lines[0].get_linestyle() == "-"
    assert right.get_ylim() == (0, 1.02)


def test_hot_to_the_right_cold_to_the_left():
    [axes] = hotness_figure({"layer 2": HEAT}).axes
    bars = [(p.get_x(), p.get_width(), to_hex(p.get_facecolor())) for p in axes.patches]
    assert bars == [(1, 1, ENTRY), (1, 3, WINDOW), (1, -0.5, ENTRY), (1, -0.75, WINDOW)]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["P0", "P1"]  # P2 has no entries


def test_a_dot_where_rows_become_equal():
    at = np.arange(4)
    rows = {0: (at, np.zeros(4)), 1: (at, np.array([0.5, 0.2, 0, 0])), 2: (at, np.full(4, 0.1))}
    left, right = splice_figure(rows, {"same": 0.0, "other": 0.3}).axes
    dots = [line.get_xdata()[0] for line in left.lines if line.get_marker() == "o"]
    assert dots == [0, 2]
    assert [to_hex(p.get_facecolor()) for p in right.patches] == [SINK, DIFFERENT]
    assert [p.get_width() for p in right.patches] == [0, 0.3]


def test_the_overview_holds_all_four():
    figure = overview_figure(MASK, 2, 2, LINES, LINES, HEAT)
    assert [axes.get_title(loc="left") for axes in figure.axes] == [
        "selected entries",
        "stability",
        "recall",
        "hotness",
    ]
