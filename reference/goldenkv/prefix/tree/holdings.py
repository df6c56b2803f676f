"""What the tree holds, and how it leaves again: every id comes in once and goes out once."""

from __future__ import annotations

from contextlib import closing

import numpy as np

from ..strategies import Score, Strategy, Victim
from .answers import Evicted
from .node import Boundary, Node, place
from .order import EvictionOrder
from .owned import Owned
from .shape import Path, Shape
from .writes import nowhere


def page_may_leave(node: Node) -> bool:
    """Whether the last page of a node can go: nothing behind it, no lock, no pending write."""
    return bool(node.pages) and not node.held_children and not node.locks and node.write is None


def boundary_may_leave(boundary: Boundary) -> bool:
    """Whether a boundary can go: it is on the device, its node neither locked nor being written."""
    return boundary.handle >= 0 and not boundary.node.locks and boundary.node.write is None


def page_victim(node: Node, before: int = 0) -> Victim:
    """What a strategy is told of a node's last page on the device, or of one so many before it."""
    index = len(node.pages) - 1 - before
    return Victim(node.pages[index], node.start + index, False, node.last_use, node.hits, node.references)


def boundary_victim(boundary: Boundary) -> Victim:
    """What a strategy is told of a boundary."""
    node, index = boundary.node, boundary.end - 1
    page = node.pages[index] if index < len(node.pages) else -1
    return Victim(page, node.start + index, True, boundary.last_use, boundary.hits, node.references)


class Holdings:
    """Ids and the orders of eviction.

    Attributes:
        pages, handles: all that are held.
        now: the time of the last use or insert.
    """

    def __init__(self, shape: Shape, strategy: Strategy) -> None:
        self.shape, self.strategy = shape, strategy
        self.pages, self.handles = Owned(), Owned()
        self.now = 0
        self.page_order: EvictionOrder[Node] = EvictionOrder(
            self._page_score,
            lambda node: page_may_leave(node),
            lambda node: strategy.exempt(page_victim(node), self.now),
        )
        self.boundary_order: EvictionOrder[Boundary] = EvictionOrder(
            lambda boundary: strategy.score(boundary_victim(boundary)),
            lambda boundary: boundary_may_leave(boundary),
            lambda boundary: strategy.exempt(boundary_victim(boundary), self.now),
        )

    # In -----------------------------------------------------------------------------------------------------

    def adopt(self, node: Node, ids: np.ndarray) -> None:
        """Takes pages, which are in `pages` already, behind those of a node. `offer` it afterwards."""
        if not len(ids):
            return
        if not node.pages and node.parent is not None:
            node.parent.held_children += 1
        node.pages.frombytes(ids.tobytes())
        self.page_order.discard(node)  # its last page is another one

    def adopt_boundary(self, node: Node, end: int, handle: int) -> None:
        """Takes a boundary at a place that has none on the device."""
        known = (node.boundaries or {}).get(end)
        if known is None:
            place(Boundary(node, end, handle, self.now), node, end)
        else:
            known.handle, known.last_use = handle, self.now
        self.handles.add(np.array([handle]))
        self.offer(node)

    def offer(self, node: Node) -> None:
        """Enters a node and its boundaries in the orders of eviction, as far as they may leave."""
        if not node.queued and page_may_leave(node):
            self.page_order.push(node)
        for boundary in (node.boundaries or {}).values():
            if not boundary.queued and boundary_may_leave(boundary):
                self.boundary_order.push(boundary)

    # Where nodes end ----------------------------------------------------------------------------------------

    def cut(self, path: Path, pages: int) -> None:
        """As `Shape.cut`. If the second part has nothing on the device, the first may now leave."""
        upper = self.shape.cut(path, pages)
        if upper is not None:
            self.offer(upper)

    def coarsen(self, path: Path) -> None:
        """As `Shape.coarsen`."""
        for node in self.shape.coarsen(path):
            self.page_order.discard(node)

    # Out ----------------------------------------------------------------------------------------------------

    def evict(self, pages: int, boundaries: int) -> Evicted:
        """See `RadixTree.evict`."""
        freed = Evicted([], [])
        with closing(self.page_order.drain()) as leaving:
            while len(freed.pages) < pages and (node := next(leaving, None)) is not None:
                self.release(node, self._alike(node, pages - len(freed.pages)), freed)
        with closing(self.boundary_order.drain()) as going:
            while len(freed.boundaries) < boundaries and (boundary := next(going, None)) is not None:
                self._evict_boundary(boundary, freed)
        return freed

    def release(self, node: Node, count: int, freed: Evicted) -> None:
        """Frees the last `count` pages that a node has on the device."""
        keep = len(node.pages) - count
        ids = node.pages[keep:].tolist()[::-1]
        del node.pages[keep:]
        if count and not keep and node.parent is not None:
            node.parent.held_children -= 1
        self.pages.remove(ids)
        self.strategy.freed(ids)
        freed.pages.extend(ids)
        self.prune(node, freed)

    def prune(self, node: Node, freed: Evicted) -> None:
        """Cuts off what is on no tier; a node of which nothing is left goes, and so does an empty root."""
        for boundary in node.sorted_boundaries():
            if nowhere(boundary):
                self.drop(boundary, freed)
        parent, count = node.parent, max(len(node.pages), node.stored)
        assert parent is not None
        if not count:
            self.page_order.discard(node)
            self.shape.remove(node)
        elif count < node.count:
            node.run = node.run[: count * node.page_bytes]
            self.shape.version += 1
        self.offer(parent)
        if count:
            self.offer(node)

    def drop(self, boundary: Boundary, freed: Evicted) -> None:
        """Takes a boundary out of its node."""
        node = boundary.node
        assert node.boundaries is not None
        del node.boundaries[boundary.end]
        node.boundaries = node.boundaries or None
        self._leave_device(boundary, freed)

    def _leave_device(self, boundary: Boundary, freed: Evicted) -> None:
        self.boundary_order.discard(boundary)
        if boundary.handle >= 0:
            self.handles.remove([boundary.handle])
            freed.boundaries.append(boundary.handle)
            boundary.handle = -1

    def _evict_boundary(self, boundary: Boundary, freed: Evicted) -> None:
        """A partial page without its boundary is of no use, so it goes along."""
        node = boundary.node
        self._leave_device(boundary, freed)
        if node.partial and node.pages and not boundary.stored:
            self.release(node, 1, freed)
        else:
            self.prune(node, freed)

    def _page_score(self, node: Node, before: int = 0) -> Score:
        return self.strategy.score(page_victim(node, before))

    def _alike(self, node: Node, most: int) -> int:
        """How many pages at the end of a node have the score of the last: they go together."""
        score, count = self._page_score(node), 1
        while count < min(most, len(node.pages)) and self._page_score(node, count) == score:
            count += 1
        return count
