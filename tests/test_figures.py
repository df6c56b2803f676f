"""Pictures must show what they are given: no different row may vanish, no equal one turn red."""

import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("matplotlib")

from goldenkv import figures
from goldenkv.config import bench, micro
from goldenkv.figures.capacity import page_codes
from goldenkv.gate import Result
from goldenkv.knockout import Damage
from goldenkv.ops.quant import fake_quantise_e4m3
from goldenkv.precision import Cost
from goldenkv.state import PageLayout, compare, pack_page, page_layout, row_format


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


def test_a_page_is_coloured_by_what_its_bytes_hold():
    """Each field is changed alone: the bytes that follow are those that the picture has in its colour."""
    config = dict(channels=512, rope=64)
    rng = np.random.default_rng(0)
    plain = np.asarray(fake_quantise_e4m3(jnp.asarray(rng.standard_normal((128, 448)) + 3.0, jnp.float32)))
    rotated = np.full((128, 64), 1.5, np.float32)
    layouts = [
        page_layout("fp8", 128, **config),
        page_layout("fp8", 128, **config, run=64, alignment=1),
        PageLayout(row_format("fp8", 512, 64), 128, (("rows", 512),)),
    ]
    for layout in layouts:
        pages = [
            np.frombuffer(pack_page(np.concatenate(rows, axis=1), layout, fill=fill), np.uint8)
            for *rows, fill in (
                (plain, rotated, 0),
                (plain, rotated, 1),
                (-plain, rotated, 0),
                (2 * plain, rotated, 0),
                (plain, np.full_like(rotated, -3.140625), 0),
            )
        ]
        padding, values, scales, rope = (page != pages[0] for page in pages[1:])
        found = np.select([values, rope, scales, padding], [0, 1, 2, 3], default=-1)
        assert (page_codes(layout) == found).all()
        others = [other for other in layouts if other is not layout]
        assert all(len(page_codes(o)) != len(found) or (page_codes(o) != found).any() for o in others)


def test_a_page_is_drawn_whole():
    layout = page_layout("fp8", 64, 512, 64)
    whole, last = (axes.images[0].get_array() for axes in figures.page_figure(layout).axes)
    assert whole.shape == (65, 576) and (whole[-1] == last[0]).all()
    assert (np.asarray(whole).ravel() == page_codes(layout)).all()
    layout = page_layout("index_fp8", 3, 128)  # its last line is not full
    whole = figures.page_figure(layout).axes[0].images[0].get_array()
    assert whole.shape == (4, 128) and (whole[-1] == [2] * 12 + [4] * 116).all()


def test_rows_are_as_long_as_their_bytes():
    forms = {
        "a": row_format("fp8", 512, 64),
        "b": row_format("index_fp4", 128),
        "c": row_format("fp8_v32", 576, 64),
    }
    axes = figures.row_figure(forms).axes[0]
    for line, (form, text) in enumerate(zip(forms.values(), axes.texts, strict=True)):
        bars = [bar for bar in axes.patches if round(bar.get_y() + bar.get_height() / 2) == line]
        assert [bar.get_width() for bar in bars] == [field.nbytes for field in form.fields]
        assert text.get_text().startswith(f"{form.nbytes} bytes: ")


def test_claims_stand_where_their_numbers_are():
    axes = figures.claims_figure({"a token": (6.3, 3514.25), "a page": (1.6e3, 912_192)}, "article").axes[0]
    dots = [line.get_xdata()[0] for line in axes.lines if line.get_marker() == "o"]
    assert dots == [6.3, 3514.25, 1600, 912_192]
    assert [text.get_text() for text in axes.texts] == ["6.3 B", "3.51 kB", "1.6 kB", "912 kB"]


def test_sizes_in_powers_of_1000():
    given = (0, 1, 999, 1000, 20_160, 3_644_416, 1.12456e9, 351.4e9, 100e9, 999_900, 2e12)
    expected = "0 B, 1 B, 999 B, 1 kB, 20.2 kB, 3.64 MB, 1.12 GB, 351 GB, 100 GB, 1,000 kB, 2 TB"
    assert ", ".join(map(figures.decimal_size, given)) == expected


def test_pictures_of_precision_show_the_costs():
    costs = {
        "a": Cost(8.125, 0.03, np.array([0.5, 1.0, 1.5]), 1.0),
        "b": Cost(4.5, 0.1, np.array([2.0, 4.0, 3.0]), 0.5),
    }
    rows, logits = figures.precision_figure(costs, spread=2.0).axes
    assert [(line.get_xdata()[0], line.get_ydata()[0]) for line in rows.lines] == [(8.125, 3.0), (4.5, 10.0)]
    drawn = [list(line.get_ydata()) for line in logits.lines]
    assert drawn == [[25.0, 50.0, 75.0], [50.0, 50.0], [100.0, 200.0, 150.0], [150.0, 150.0]]
    curves = {"a": ([0.25, 0.5], [1.0, 0.5])}
    left, right = figures.rounding_figure(curves, {"a": ([1.0, 2.0], [0.1, 0.2])}).axes
    assert [list(axes.lines[0].get_ydata()) for axes in (left, right)] == [[100.0, 50.0], [10.0, 20.0]]
