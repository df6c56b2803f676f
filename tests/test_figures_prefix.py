"""Pictures of pages, trees and replays show what they are given, each thing at its place."""

import numpy as np
import pytest

pytest.importorskip("matplotlib")

from matplotlib.colors import to_hex

from goldenkv import figures
from goldenkv.config import micro, with_mtp
from goldenkv.conversation import Turn
from goldenkv.figures.base import DIFFERENT, ENTRY, EQUAL, WINDOW
from goldenkv.prefix import LRU, RadixTree
from goldenkv.replay_study import ReplayError

SIZE = 4
HERE, THERE = b"a" * 32, b"b" * 32


@pytest.fixture(autouse=True)
def _closed():
    yield
    figures.pyplot().close("all")


def tokens(text: str) -> np.ndarray:
    return np.frombuffer(text.encode(), np.uint8).astype(np.int32)


def grown_tree() -> tuple[RadixTree, list[figures.TreeFrame]]:
    """aaaabbbb, then aaaacccc, then a lock on the first, then an eviction."""
    tree = RadixTree(SIZE, LRU())
    frames = []
    tree.insert(HERE, tokens("aaaabbbb"), [10, 11], {8: 0})
    frames.append(figures.tree_frame("one", tree))
    tree.insert(HERE, tokens("aaaaccccdd"), [20, 12, 13], {10: 1})
    tree.lock(tree.match(HERE, tokens("aaaabbbb")), 8)
    frames.append(figures.tree_frame("two", tree))
    tree.evict(pages=2)
    frames.append(figures.tree_frame("three", tree))
    return tree, frames


def boxes(axes) -> dict[tuple[float, float, float], list[str]]:
    """(x, width, lane) of the filled boxes -> their colours."""
    found: dict[tuple[float, float, float], list[str]] = {}
    for patch in axes.patches:
        if patch.get_fill():
            place = patch.get_x(), patch.get_width(), round(patch.get_y() + patch.get_height() / 2)
            found.setdefault(place, []).append(to_hex(patch.get_facecolor()))
    return found


def said(axes) -> dict[tuple[float, int], str]:
    return {(t.get_position()[0], round(t.get_position()[1])): t.get_text() for t in axes.texts}


def test_a_frame_has_every_page_and_no_other():
    tree, frames = grown_tree()
    assert [sorted(leaf.page for leaf in f.pages.values()) for f in frames] == [
        [10, 11],
        [10, 11, 12, 13],
        [10, 11],
    ]
    two = {leaf.page: leaf for leaf in frames[1].pages.values()}
    assert {p: (leaf.start, leaf.stop) for p, leaf in two.items()} == {
        10: (0, 4), 11: (4, 8), 12: (4, 8), 13: (8, 10)
    }  # fmt: skip
    assert {p: leaf.boundary for p, leaf in two.items()} == {10: False, 11: True, 12: False, 13: True}
    assert {p: leaf.locks for p, leaf in two.items()} == {10: 1, 11: 1, 12: 0, 13: 0}
    assert len({two[p].node for p in (10, 11, 12, 13)}) == 4  # a partial page is a node of its own
    assert len({leaf.node for leaf in frames[0].pages.values()}) == 1
    assert len(frames[1].pages) == tree.stats().pages + 2


def test_a_tree_is_drawn_at_its_tokens_and_keeps_its_places():
    _, frames = grown_tree()
    one, two, three = figures.trees_figure(frames).axes
    new, old, gone = ENTRY, "#e9e9e9", "#ffffff"
    assert boxes(one) == {(0, 4, 0): [new], (4, 4, 0): [new]}
    assert boxes(two) == {(0, 4, 0): [old], (4, 4, 0): [old], (4, 4, 1): [new], (8, 2, 1): [new]}
    assert boxes(three) == {(0, 4, 0): [old], (4, 4, 0): [old], (4, 4, 1): [gone], (8, 2, 1): [gone]}
    assert said(two) == {(2, 0): "10", (6, 0): "11", (6, 1): "12", (9, 1): "13"}
    assert said(three) == {(2, 0): "10", (6, 0): "11"}


def test_locks_and_boundaries_are_drawn():
    _, frames = grown_tree()
    one, two, _ = figures.trees_figure(frames).axes
    red = [
        [
            round(p.get_x())
            for p in axes.patches
            if not p.get_fill() and to_hex(p.get_edgecolor()) == DIFFERENT
        ]
        for axes in (one, two)
    ]
    assert red == [[], [0, 4]]
    bars = [
        sorted((round(line.get_xdata()[0]), round(np.mean(line.get_ydata()))) for line in axes.lines
               if line.get_color() == WINDOW)
        for axes in (one, two)
    ]  # fmt: skip
    assert bars == [[(7, 0)], [(7, 0), (9, 1)]]


def test_namespaces_have_lanes_of_their_own():
    tree = RadixTree(SIZE)
    tree.insert(HERE, tokens("aaaa"), [0])
    tree.insert(THERE, tokens("aaaa"), [1])
    frame = figures.tree_frame("both", tree)
    axes = figures.trees_figure([frame], namespaces={HERE: "here", THERE: "there"}, texts=True).axes[0]
    assert boxes(axes) == {(0, 4, 0): [ENTRY], (0, 4, 1): [ENTRY]}
    labels = dict(zip(axes.get_yticks(), (t.get_text() for t in axes.get_yticklabels()), strict=True))
    assert labels == {0: "here", 1: "there"}
    assert [t.get_text() for t in axes.texts] == ["0", "aaaa", "1", "aaaa"]


def test_the_order_of_eviction_is_written_on_the_pages():
    tree = RadixTree(SIZE)
    tree.insert(HERE, tokens("aaaabbbb"), [0, 1])
    tree.insert(HERE, tokens("cccc"), [2])
    frames = [figures.tree_frame("", tree)]
    for _ in range(2):
        tree.evict(pages=1)
        frames.append(figures.tree_frame("", tree))
    axes = figures.eviction_figure({"LRU": frames}).axes[0]
    assert [t.get_text() for t in axes.texts][::2] == ["2", "1", "stays"]
    assert [t.get_text() for t in axes.texts][1::2] == ["aaaa", "bbbb", "cccc"]


def test_holders_of_pages():
    frames = [
        figures.Holding("a", {"A": [2, 0]}, [1, 0, 1]),
        figures.Holding("b", {"A": [2, 0], "B": [2]}, [1, 0, 2]),
    ]
    first, second = figures.pages_figure(frames).axes[:2]
    assert said(first) == {(2, 0): "0", (0, 0): "1", (0, 2): "1", (1, 2): "free", (2, 2): "1"}
    assert said(second) == said(first) | {(2, 1): "0", (2, 2): "2"}
    colours = {(round(x + w / 2), lane): c for (x, w, lane), (c,) in boxes(second).items()}
    assert (colours[2, 0], colours[2, 1], colours[0, 0]) == (ENTRY, ENTRY, WINDOW)


# Replays ----------------------------------------------------------------------------------------------------

CONFIG = micro()


def test_errors_end_where_bits_are_equal():
    made = [
        ReplayError(1, (3, 3, 3), (1.0, 2.0, 4.0), 0.5, False),
        ReplayError(2, (0, 3, 3), (0.0, 1.0, 2.0), 0.25, False),
        ReplayError(3, (0, 0, 3), (0.0, 0.0, 1.0), 0.0, True),
        ReplayError(4, (0, 0, 0), (0.0, 0.0, 0.0), 0.0, True),
    ]
    axes = figures.replay_error_figure(CONFIG, made).axes[0]
    curves = {line.get_label(): list(zip(*line.get_data(), strict=True)) for line in axes.lines}
    assert curves["layer 0"] == [(1, 1.0)]
    assert curves["layer 2"] == [(1, 4.0), (2, 2.0), (3, 1.0)]
    assert curves["logits that follow"] == [(1, 0.5), (2, 0.25)]
    dots = [line.get_xdata()[0] for line in axes.lines if line.get_marker() == "o"]
    assert dots == [2, 3, 4]
    assert [t.get_text() for t in axes.texts if t.get_text().isdigit()] == ["2", "3", "4"]
    marks = {t.xy[0]: t.get_text() for t in axes.texts if not t.get_text().isdigit()}
    assert marks == {8: "one window:\napproximate", 21: "L (W - 1)\n= 21"}


def test_rows_of_a_replay_end_at_the_hit():
    long, short = np.ones((4, 6), bool), np.zeros((4, 2), bool)
    long[2, :5], short[0] = False, True
    figure = figures.exact_rows_figure(with_mtp(CONFIG), {"long": long, "short": short})
    above, below = (axes.images[0].get_array() for axes in figure.axes)
    assert above[2].tolist() == [1] * 5 + [0] and (above[[0, 1, 3]] == 0).all()
    assert (below[:, :4] == 2).all() and below[0, 4:].tolist() == [0, 0] and (below[1:, 4:] == 1).all()
    assert [t.get_text() for t in figure.axes[0].get_yticklabels()] == [
        "layer 0",
        "layer 1",
        "layer 2",
        "MTP",
    ]


def test_a_turn_is_cut_into_its_parts():
    turns = [Turn(10, 0, 0, 10, (8,), True), Turn(20, 8, 4, 8, (8, 16), True)]
    axes = figures.conversation_figure({"a": turns, "b": turns}).axes[0]
    bars = [(p.get_x(), p.get_width(), to_hex(p.get_facecolor())) for p in axes.patches if p.get_width()]
    assert bars == [(0, 10, WINDOW), (0, 8, EQUAL), (8, 4, ENTRY), (12, 8, WINDOW)]
    dots = [list(zip(*line.get_data(), strict=True)) for line in axes.lines]
    assert dots == [[], [(8, 1)]]  # those of the turn before
    assert axes.get_title(loc="left") == "a: 4 tokens run again, 2 states kept"


def test_costs_of_policies():
    costs = {
        "full": figures.Cost(1000, 4000, [0, 0], True),
        "one": figures.Cost(1000, 0, [128, 100], False),
    }
    kept, rerun = figures.policy_cost_figure(costs).axes
    assert [(p.get_x(), p.get_width()) for p in kept.patches] == [
        (0, 1000),
        (1000, 4000),
        (0, 1000),
        (1000, 0),
    ]
    assert [t.get_text() for t in kept.texts] == ["4 kB of states", "no states"]
    assert [p.get_width() for p in rerun.patches] == [0, 114]
    assert [t.get_text() for t in rerun.texts] == [" 0", " 114, at most 128: approximate"]
