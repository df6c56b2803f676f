"""Pictures of the kernels show what they are given, each thing at its place."""

import pytest

pytest.importorskip("matplotlib")

from matplotlib.colors import to_hex

from goldenkv.figures.base import BOTH, PAST, pyplot
from goldenkv_kernels import figures
from goldenkv_kernels.gates.compilation import Kernel
from goldenkv_kernels.gates.measured import Timed
from goldenkv_kernels.gates.roofline import Work

LOW, HIGH, NONE = Work(1e6, 50e6), Work(1e6, 400e6), Work(1e6, 0.0)
LINES = {"low": {"4k": LOW, "8k": LOW}, "high": {"4k": HIGH}, "none": {"4k": NONE}}


@pytest.fixture(autouse=True)
def _closed():
    yield
    pyplot().close("all")


def dots(axes):
    """Where single markers stand."""
    found = [
        line.get_data() for line in axes.lines if line.get_marker() == "o" and len(line.get_xdata()) == 1
    ]
    return [(x[0], y[0]) for x, y in found]


def test_kernels_stand_below_the_roof_and_on_it():
    top, strip = figures.roofline_figure(LINES).axes
    assert dots(strip) == [(50, 0), (50, 0), (400, 1)]  # none for the one without matrix products
    assert dots(top) == [(50, 215), (50, 215), (400, 790)]
    assert [label.get_text() for label in strip.get_yticklabels()] == ["low", "high", "none"]
    assert [text.get_text() for text in strip.texts] == ["0: no matrix product"]
    assert round(figures.RIDGE, 1) == 183.7


def test_without_measured_points_the_picture_says_so():
    said = [text.get_text() for text in figures.roofline_figure(LINES).axes[0].texts]
    assert any("no kernel has run on a GPU" in text for text in said)


def test_measured_points_are_drawn_under_the_roof():
    timed = [
        Timed("low", "8k", "pallas", True, 50.0, 1e-6, 0.5),
        Timed("low", "8k", "xla", True, 50.0, 1e-6, 0.1),
        Timed("none", "8k", "xla", True, 0.0, 1e-6, 0.9),
    ]
    top = figures.roofline_figure(LINES, timed).axes[0]
    found = {
        line.get_label(): (line.get_xdata()[0], line.get_ydata()[0])
        for line in top.lines
        if "," in line.get_label()
    }
    assert found == {"low, pallas": (50, pytest.approx(107.5)), "low, xla": (50, pytest.approx(21.5))}
    assert not any("no kernel has run" in text.get_text() for text in top.texts)
    assert top.get_ylim()[0] < 21.5  # none lies outside the picture


def test_floors_are_drawn_in_microseconds():
    works = {"f": {1024: Work(4.3e6, 0.0), 2048: Work(8.6e6, 0.0)}}
    axes = figures.floors_figure({"a": ("tokens", works), "b": ("tokens", works)}).axes
    for one in axes:
        assert list(one.lines[0].get_xdata()) == [1024, 2048]
        assert list(one.lines[0].get_ydata()) == pytest.approx([1, 2])
        assert [label.get_text() for label in one.get_xticklabels()] == ["1k", "2k"]
    assert [one.get_title() for one in axes] == ["a", "b"]


def test_a_bar_is_as_long_as_what_a_kernel_takes():
    left, right = figures.budget_figure(
        {"a": Kernel("a", 255, 0, 131_072, 256), "b": Kernel("b", 32, 0, 0, 128)}
    ).axes
    assert [bar.get_width() for bar in left.patches] == [255, 32]
    assert [bar.get_width() for bar in right.patches] == [128, 0]
    assert [text.get_text() for text in right.texts][:2] == ["1", "16"]


def test_programs_stand_against_processors():
    axes = figures.programs_figure({"f": {1: 1, 4: 4}, "g": {1: 3, 4: 12}}).axes[0]
    assert [list(line.get_ydata()) for line in axes.lines] == [[1, 4], [3, 12], [132, 132]]


def test_a_refusal_has_its_colour_and_its_dot():
    rows = {"bad": {"one": True, "two": False}, "good": {"one": False, "two": False}}
    axes = figures.gates_figure(rows, {"bad": "one"}).axes[0]
    image = axes.images[0]
    colours = [[to_hex(image.cmap(image.norm(code))) for code in row] for row in image.get_array()]
    assert colours == [[BOTH, PAST], [PAST, PAST]]
    assert dots(axes) == [(0, 0)]
