"""Pictures of tiers show what they are given, each thing at its place."""

import pytest

pytest.importorskip("matplotlib")

from matplotlib.colors import to_hex

from goldenkv import figures
from goldenkv.figures.base import BOTH, ENTRY, EQUAL, WINDOW
from goldenkv.tier_study import Served

RUNS = {
    "large": Served({"device": 60, "replayed": 10, "computed": 30}, 4, 3, 4),
    "small": Served({"device": 10, "host": 20, "disk": 30, "computed": 40}, 4, 4, 4),
}


@pytest.fixture(autouse=True)
def _closed():
    yield
    figures.pyplot().close("all")


def test_a_bar_is_cut_by_source_and_ends_at_all_tokens():
    axes = figures.sources_figure(RUNS).axes[0]
    bars = [
        (round(p.get_y() + p.get_height() / 2), p.get_x(), p.get_width(), to_hex(p.get_facecolor()))
        for p in axes.patches
        if p.get_width()
    ]
    host = bars[4][3]
    assert bars == [
        (0, 0, 60, BOTH),
        (0, 60, 10, ENTRY),
        (0, 70, 30, WINDOW),
        (1, 0, 10, BOTH),
        (1, 10, 20, host),
        (1, 30, 30, EQUAL),
        (1, 60, 40, WINDOW),
    ]
    assert host not in {BOTH, EQUAL, ENTRY, WINDOW}
    assert [label.get_text() for label in axes.get_yticklabels()] == ["large", "small"]


def test_both_rates_are_written():
    axes = figures.sources_figure(RUNS).axes[0]
    rates = [text.get_text() for text in axes.texts if text.get_text().endswith("%")]
    assert rates == ["60%", "75%", "60%", "100%"]
    assert [t.get_text() for t in axes.texts if "found" in t.get_text()] == [
        "tokens\nfound", "requests\nfound"
    ]  # fmt: skip


def test_a_ring_is_drawn_where_curves_cross():
    tokens, computed = [100, 200, 400], [2.0, 4.0, 8.0]
    axes = figures.crossover_figure(
        tokens, computed, {"host": [1.0, 1.0, 1.0], "disk": [3.0, 3.0, 3.0], "redis": [9.0, 9.0, 9.0]}
    ).axes[0]
    curves = {
        line.get_label().split(":")[0]: list(zip(*line.get_data(), strict=True))
        for line in axes.lines
        if len(line.get_xdata()) > 1
    }
    assert curves == {
        "computed": list(zip(tokens, computed, strict=True)),
        "from host": [(100, 1), (200, 1), (400, 1)],
        "from disk": [(100, 3), (200, 3), (400, 3)],
        "from redis": [(100, 9), (200, 9), (400, 9)],
    }
    (ring,) = [line for line in axes.lines if len(line.get_xdata()) == 1]
    assert (ring.get_xdata()[0], ring.get_ydata()[0]) == (pytest.approx(150), pytest.approx(3))
    said = [text.get_text() for text in axes.get_legend().get_texts()]
    assert said == [
        "computed",
        "from host: faster from 100 tokens on, the shortest",
        "from disk: faster from 150 tokens on",
        "from redis: faster nowhere up to 400 tokens",
    ]
    assert axes.get_xscale() == axes.get_yscale() == "log"
