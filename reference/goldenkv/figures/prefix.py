"""What a prefix tree holds, step after step, and in which order it lets go."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from ..prefix import RadixTree
from ..prefix.tree.node import TOKEN_BYTES, Node
from .base import DIFFERENT, ENTRY, WINDOW, bare, pyplot

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_STILL, _LEFT, _EDGE = "#e9e9e9", "#a0a0a0", "#777777"
_HALF = 0.32
"""Half the height of a page in a picture of a tree, in lanes."""
_GAP = 0.3
"""Between a node and the end of its tokens, in tokens."""


@dataclass(frozen=True, slots=True)
class Leaf:
    """One page of a tree on the device.

    Attributes:
        start, stop: its tokens.
        page: its id.
        node: which node of its frame it belongs to.
        boundary: a boundary state is kept at its end.
        locks: requests that hold it.
        ids: its token ids, as bytes.
    """

    start: int
    stop: int
    page: int
    node: int
    boundary: bool
    locks: int
    ids: bytes


Key = tuple[bytes, bytes]
"""What names a page in a picture: its namespace, and all token ids up to its end."""


class TreeFrame(NamedTuple):
    """What a tree held at one moment."""

    title: str
    pages: Mapping[Key, Leaf]


def tree_frame(title: str, tree: RadixTree) -> TreeFrame:
    """Takes down what a tree holds on the device now."""
    size, pages = tree.page_size, {}
    for root in tree.shape.roots.values():
        waiting: list[tuple[Node, bytes]] = [(root, b"")]
        number = 0
        while waiting:
            node, before = waiting.pop()
            number += 1
            for i, page in enumerate(node.pages):
                end = (i + 1) * node.page_bytes
                ids = node.run[i * node.page_bytes : end]
                start = (node.start + i) * size
                boundary = (node.boundaries or {}).get(i + 1)
                held = boundary is not None and boundary.handle >= 0
                leaf = Leaf(start, start + len(ids) // TOKEN_BYTES, page, number, held, node.locks, ids)
                pages[root.namespace, before + node.run[:end]] = leaf
            children = list((node.children or {}).values())
            waiting += [(child, before + node.run) for child in reversed(children)]
    return TreeFrame(title, pages)


def trees_figure(
    frames: Sequence[TreeFrame],
    *,
    namespaces: Mapping[bytes, str] | None = None,
    texts: bool = False,
) -> Figure:
    """A tree at several moments: what came, what stayed, what left.

    A page stands at its tokens, in the same place in every picture; a branch goes on in a lane of its own.

    Args:
        frames: one after the other, of one tree.
        namespaces: digest -> name, where the pictures show more than one.
        texts: write the tokens of each page, which are then bytes of text.
    """
    lanes = _lanes(frames)
    figure, grid = _grid(len(frames), max(lanes.values()) + 1, texts)
    longest, size = _sizes(frames)
    before: Mapping[Key, Leaf] = {}
    for axes, frame in zip(grid, frames, strict=True):
        for key, leaf in {**before, **frame.pages}.items():
            here = key in frame.pages
            colour = (_STILL if key in before else ENTRY) if here else "#ffffff"
            _page(axes, leaf, lanes[key], colour, here, texts)
            parent = _parent(key, leaf)
            if parent[1] and lanes[parent] != lanes[key]:
                _branch(axes, leaf.start, lanes[parent], lanes[key], here)
        _nodes(axes, frame, lanes)
        _finish(axes, frame.title, longest, size, lanes, namespaces)
        before = frame.pages
    _tree_legend(figure)
    return figure


def eviction_figure(runs: Mapping[str, Sequence[TreeFrame]]) -> Figure:
    """In which order pages left: 1 was the first. A run's frames are taken before and after each eviction."""
    every = [frame for frames in runs.values() for frame in frames]
    lanes = _lanes(every)
    figure, grid = _grid(len(runs), max(lanes.values()) + 1, True)
    longest, size = _sizes(every)
    for axes, (title, frames) in zip(grid, runs.items(), strict=True):
        shades = pyplot().get_cmap("YlOrRd_r")
        for key, leaf in frames[0].pages.items():
            order = next((i for i, frame in enumerate(frames) if key not in frame.pages), None)
            colour = _STILL if order is None else shades(0.15 + 0.75 * order / len(frames))
            lane = lanes[key]
            _box(axes, leaf, lane, facecolor=colour, edgecolor=_EDGE, linewidth=0.8)
            middle = (leaf.start + leaf.stop) / 2
            axes.text(
                middle, lane - 0.12, "stays" if order is None else f"{order}", ha="center", va="center",
                fontsize=9, fontweight="normal" if order is None else "bold",
            )  # fmt: skip
            _write(axes, leaf, lane)
            parent = _parent(key, leaf)
            if parent[1] and lanes[parent] != lane:
                _branch(axes, leaf.start, lanes[parent], lane, True)
        _finish(axes, title, longest, size, lanes, None)
    return figure


# Places -----------------------------------------------------------------------------------------------------


def _sizes(frames: Sequence[TreeFrame]) -> tuple[int, int]:
    """The most tokens of a sequence, and those of a page."""
    leaves = [leaf for frame in frames for leaf in frame.pages.values()]
    return max(leaf.stop for leaf in leaves), max(leaf.stop - leaf.start for leaf in leaves)


def _parent(key: Key, leaf: Leaf) -> Key:
    return key[0], key[1][: len(key[1]) - len(leaf.ids)]


def _lanes(frames: Sequence[TreeFrame]) -> dict[Key, int]:
    """A lane for every page of any frame: the first whole page behind another stays in its lane."""
    everything: dict[Key, Leaf] = {}
    for frame in frames:
        everything |= {key: leaf for key, leaf in frame.pages.items() if key not in everything}
    children: dict[Key, list[Key]] = {}
    for key, leaf in everything.items():
        children.setdefault(_parent(key, leaf), []).append(key)
    whole = max(leaf.stop - leaf.start for leaf in everything.values())
    for found in children.values():  # partial pages leave the lane to those that go on
        found.sort(key=lambda key: everything[key].stop - everything[key].start < whole)
    lanes: dict[Key, int] = {}
    free = 0
    for root in dict.fromkeys((namespace, b"") for namespace, _ in everything):
        waiting: list[tuple[Key, int | None]] = [(key, None) for key in reversed(children[root])]
        while waiting:
            key, lane = waiting.pop()
            if lane is None:
                lane, free = free, free + 1
            lanes[key] = lane
            behind = children.get(key, [])
            waiting += [(other, None) for other in reversed(behind[1:])]
            waiting += [(other, lane) for other in behind[:1]]
    return lanes


def _runs(frame: TreeFrame, lanes: Mapping[Key, int]) -> Iterator[tuple[int, list[Leaf]]]:
    """Pages of a node that lie in one lane, side by side."""
    found: dict[tuple[bytes, int, int], list[Leaf]] = {}
    for key, leaf in frame.pages.items():
        found.setdefault((key[0], leaf.node, lanes[key]), []).append(leaf)
    return ((lane, leaves) for (_, _, lane), leaves in found.items())


# Drawing ----------------------------------------------------------------------------------------------------


def _grid(count: int, lanes: int, texts: bool) -> tuple[Figure, list[Axes]]:
    height = (0.42 if texts else 0.34) * lanes + 0.42
    figure, grid = pyplot().subplots(
        count, 1, figsize=(11, height * count + 0.5), layout="constrained", squeeze=False, sharex=True
    )
    grid[-1, 0].set_xlabel("token", fontsize=9)
    return figure, list(grid[:, 0])


def _page(axes: Axes, leaf: Leaf, lane: int, colour: str, here: bool, texts: bool) -> None:
    if here:
        _box(axes, leaf, lane, facecolor=colour, edgecolor="#ffffff", linewidth=0.8)
        middle = (leaf.start + leaf.stop) / 2
        up = 0.13 if texts else 0.0
        axes.text(middle, lane - up, f"{leaf.page}", ha="center", va="center", fontsize=8)
        if texts:
            _write(axes, leaf, lane)
    else:
        _box(axes, leaf, lane, facecolor=colour, edgecolor=_LEFT, linewidth=1.0, linestyle=":")
    if leaf.boundary and here:
        x = leaf.stop - 3 * _GAP
        axes.plot([x, x], [lane - 0.8 * _HALF, lane + 0.8 * _HALF], color=WINDOW, linewidth=4, zorder=5)


def _write(axes: Axes, leaf: Leaf, lane: int) -> None:
    """The tokens of a page as text; ␣ is a space."""
    text = bytes(leaf.ids[::TOKEN_BYTES]).decode("ascii", "replace").replace(" ", "␣").replace("\n", "↵")
    axes.text(
        (leaf.start + leaf.stop) / 2, lane + 0.14, text, ha="center", va="center", fontsize=6.2,
        family="monospace",
    )  # fmt: skip


def _nodes(axes: Axes, frame: TreeFrame, lanes: Mapping[Key, int]) -> None:
    """A frame round the pages of each node, with a gap between nodes; a red one where requests hold it."""
    for lane, leaves in _runs(frame, lanes):
        locked = leaves[0].locks > 0
        start, stop = leaves[0].start, leaves[-1].stop
        for x in (start, stop):
            axes.plot([x, x], [lane - _HALF, lane + _HALF], color="white", linewidth=5, zorder=3)
        width = stop - start - 2 * _GAP
        axes.add_patch(
            pyplot().Rectangle(
                (start + _GAP, lane - _HALF), width, 2 * _HALF, fill=False, zorder=4,
                edgecolor=DIFFERENT if locked else _EDGE, linewidth=2.0 if locked else 1.0,
            )
        )  # fmt: skip


def _box(axes: Axes, leaf: Leaf, lane: int, **style: Any) -> None:
    shape = (leaf.start, lane - _HALF), leaf.stop - leaf.start, 2 * _HALF
    axes.add_patch(pyplot().Rectangle(*shape, **style))


def _branch(axes: Axes, x: int, upper: int, lower: int, here: bool) -> None:
    colour, style = (_EDGE, "-") if here else (_LEFT, ":")
    axes.plot([x, x], [upper, lower], style, color=colour, linewidth=1.2, zorder=6)


def _finish(
    axes: Axes,
    title: str,
    longest: int,
    size: int,
    lanes: Mapping[Key, int],
    namespaces: Mapping[bytes, str] | None,
) -> None:
    """Title, ticks at page ends, and a name at the first lane of each namespace."""
    axes.set_xlim(-0.01 * longest, 1.01 * longest)
    axes.set_ylim(max(lanes.values()) + 0.6, -0.6)
    axes.set_xticks(range(0, longest + 1, size))
    names = namespaces or {}
    firsts: dict[str, int] = {}
    for (namespace, _), lane in lanes.items():
        if namespace in names:
            firsts[names[namespace]] = min(lane, firsts.get(names[namespace], lane))
    axes.set_yticks(list(firsts.values()), list(firsts))
    axes.set_title(title, fontsize=10, loc="left")
    bare(axes)


def _tree_legend(figure: Figure) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    left = Patch(facecolor="#ffffff", edgecolor=_LEFT, linestyle=":", label="page that left")
    handles: list[Any] = [
        Patch(facecolor=ENTRY, label="new page (with its id)"),
        Patch(facecolor=_STILL, label="was there before"),
        left,
        Patch(facecolor="#ffffff", edgecolor=_EDGE, label="a node"),
        Patch(facecolor="#ffffff", edgecolor=DIFFERENT, linewidth=2, label="locked"),
        Line2D([], [], color=WINDOW, linewidth=4, label="boundary state"),
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False, fontsize=9)
