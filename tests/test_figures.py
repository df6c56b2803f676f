"""Pictures must show what they are given: no different row may vanish, no equal one turn red."""

import numpy as np
import pytest

pytest.importorskip("matplotlib")

from goldenkv import figures
from goldenkv.config import bench, micro
from goldenkv.gate import Result
from goldenkv.knockout import Damage
from goldenkv.state import compare


def result(damage: dict[str, list[int]]) -> Result:
    """A path with these rows different, of two components in two layers and the logits."""
    sizes = {"layers.0.window": 127, "layers.1.window": 127, "layers.1.entries": 5000, "logits": 8}
    rows = {name: np.zeros((size, 2), np.float32) for name, size in sizes.items()}
    found = {name: value.copy() for name, value in rows.items()}
    for name, numbers in damage.items():
        found[name][numbers] = 1
    return Result("a path", False, 0, 0, compare(rows, found), 0.0)


def red_groups(damage: dict[str, list[int]]) -> set[str]:
    """Names of the groups in which the picture has a red cell."""
    figure = figures.gate_figure([result(damage)])
    axes = figure.axes[0]
    line = axes.images[0].get_array()[0]
    names = [label.get_text() for label in axes.get_xticklabels()]
    group = np.cumsum(np.diff(line == 2, prepend=False) & (line == 2))  # the gaps so far
    return {names[group[x]] for x in np.flatnonzero(line == 1)}


@pytest.mark.parametrize("row", [0, 1, 2499, 4998, 4999])
def test_one_different_row_of_many_is_seen(row):
    assert red_groups({"layers.1.entries": [row]}) == {"entries"}


def test_only_what_differs_is_red():
    assert red_groups({}) == set()
    assert red_groups({"layers.0.window": [126]}) == {"window"}
    assert red_groups({"layers.1.window": [0], "logits": [7]}) == {"window", "logits"}


def test_a_picture_of_damage_tells_empty_from_equal():
    config, steps = micro(), 4
    token_rows = np.zeros((3, steps), bool)
    entries = np.zeros((3, steps), bool)
    token_rows[2, 1:], entries[1, 1] = True, True
    late = np.array([False, True, True, True])
    found = Damage(8, token_rows, entries, late, late * 0.5)
    empty = Damage(
        0, np.zeros_like(token_rows), np.zeros_like(entries), np.zeros(steps, bool), np.zeros(steps)
    )
    figure = figures.damage_figure(
        config, {"layers.1.overlap_kv": found, "layers.1.rows_kv": empty}, "a title"
    )
    lines = figure.axes[0].images[0].get_array().reshape(2, 4, steps)
    assert lines[0].tolist() == [[0, 0, 0, 0], [0, 2, 0, 0], [0, 1, 1, 1], [0, 1, 1, 1]]
    assert (lines[1] == 3).all()


def test_live_rows_are_labelled_with_their_number():
    figure = figures.live_rows_figure(bench(), 634)
    whole, last = figure.axes
    numbers = dict(
        zip((t.get_text() for t in whole.get_yticklabels()), (t.get_text() for t in last.texts), strict=True)
    )
    assert numbers["CSA entries"] == str(634 // 4)
    assert numbers["HCA rows_kv"] == str(634 % 128)
    assert numbers["CSA overlap_kv"] == "4"
