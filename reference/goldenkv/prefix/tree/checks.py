"""Counts of a tree, and a check of everything that must hold in it. Both look at every node."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from .answers import Lock
from .holdings import Holdings, boundary_may_leave, page_may_leave
from .node import MOST_PAGES, Boundary, Node, Write, find_child, page_key
from .shape import Shape


@dataclass(frozen=True, slots=True)
class Stats:
    """Counts of a tree.

    Attributes:
        namespaces, nodes: how many; roots are not nodes.
        pages, boundaries: on the device.
        stored_pages: on the lower tier.
        locks, writes: open ones.
        host_bytes: of nodes, token ids, page ids, children and boundaries, by `sys.getsizeof`: without what
            the orders of eviction, the strategy and the allocator add.
    """

    namespaces: int
    nodes: int
    pages: int
    boundaries: int
    stored_pages: int
    locks: int
    writes: int
    host_bytes: int


def count(shape: Shape, holdings: Holdings, locks: Collection[Lock], writes: Collection[Write]) -> Stats:
    """Counts a tree."""
    everything = list(_nodes(shape))
    return Stats(
        namespaces=len(shape.roots),
        nodes=shape.nodes,
        pages=len(holdings.pages),
        boundaries=len(holdings.handles),
        stored_pages=sum(node.stored for node in everything),
        locks=len(locks),
        writes=len(writes),
        host_bytes=sum(_bytes(node) for node in (*everything, *shape.roots.values())),
    )


def check(shape: Shape, holdings: Holdings, locks: Collection[Lock], writes: Collection[Write]) -> None:
    """Verifies every invariant of a tree. Raises AssertionError with what does not hold."""
    everything = list(_nodes(shape))
    assert len(everything) == shape.nodes, "the number of nodes is wrong"
    for namespace, root in shape.roots.items():
        assert root.namespace == namespace and root.parent is None and not root.run, "a root is wrong"
        assert root.children and not root.pages and not root.boundaries and not root.locks, "an empty root"
    for node in everything:
        _check_run(node)
        _check_places(node)
    for parent in (*everything, *shape.roots.values()):
        _check_children(parent)
    _check_ids(holdings, everything)
    _check_locks(locks, everything)
    _check_writes(writes, everything)
    _check_orders(everything)


def _nodes(shape: Shape) -> Iterator[Node]:
    for root in shape.roots.values():
        yield from (node for node in root.below() if node is not root)


def _boundaries(nodes: list[Node]) -> list[Boundary]:
    return [boundary for node in nodes for boundary in node.sorted_boundaries()]


def _check_run(node: Node) -> None:
    """Its tokens are whole pages, or one partial page without children."""
    parent = node.parent
    assert parent is not None and node.start == parent.start + parent.count, "a gap before a node"
    assert 0 < node.count <= MOST_PAGES, f"{node.count} pages in a node"
    assert not parent.partial, "something follows a partial page"
    assert node.partial or len(node.run) % node.page_bytes == 0, "a run of whole pages and a partial one"


def _check_places(node: Node) -> None:
    """Every page is on a tier, without gaps along the path; every boundary belongs to such a page."""
    parent, held, stored = node.parent, len(node.pages), node.stored
    assert parent is not None
    assert max(held, stored) == node.count, f"{held} and {stored} pages of {node.count} are on a tier"
    assert not held or len(parent.pages) == parent.count, "a page on the device behind one that is not"
    assert not stored or parent.stored == parent.count, "a stored page behind one that is not"
    for end, boundary in (node.boundaries or {}).items():
        assert boundary.node is node and boundary.end == end, "a boundary does not know its place"
        assert 0 < end <= node.count, f"a boundary behind page {end} of {node.count}"
        assert boundary.handle >= 0 or boundary.stored, "a boundary on no tier"
        assert not boundary.stored or end <= stored, "a stored boundary of a page that is not"
    assert node.boundaries is None or node.boundaries, "an empty dictionary"
    assert not node.partial or node.boundaries, "a partial page without its boundary"


def _check_children(parent: Node) -> None:
    """Each child is found by its first page, and by nothing else."""
    children = parent.children or {}
    assert parent.children is None or children, "an empty dictionary"
    for key, child in children.items():
        first = child.first_page
        assert child.parent is parent, "a child has another parent"
        assert key == first or (not child.partial and key == page_key(first)), "a child under another key"
        assert child.partial or find_child(parent, first) is child, "a child cannot be found"
    assert len({child.first_page for child in children.values()}) == len(children), "two equal children"
    lengths = Counter(len(child.run) for child in children.values() if child.partial)
    assert (parent.tails or {}) == lengths, "the lengths of partial pages are wrong"
    held = sum(bool(child.pages) for child in children.values())
    assert parent.held_children == held, f"{parent.held_children} children with pages, not {held}"


def _check_ids(holdings: Holdings, everything: list[Node]) -> None:
    """Every id is in one place."""
    pages = [page for node in everything for page in node.pages]
    handles = [b.handle for b in _boundaries(everything) if b.handle >= 0]
    for found, owned, what in (
        (pages, holdings.pages, "page"),
        (handles, holdings.handles, "handle"),
    ):
        assert len(set(found)) == len(found) == len(owned), f"a {what} in two places"
        assert set(found) == owned.all(), f"the set of {what}s is wrong"


def _check_locks(open_locks: Collection[Lock], everything: list[Node]) -> None:
    """Every node is locked as often as open locks reach it."""
    reached: Counter[int] = Counter()
    for lock in open_locks:
        node = lock.node
        while node is not None and node.parent is not None:
            reached[id(node)] += 1
            node = node.parent
    for node in everything:
        assert node.locks == reached[id(node)], f"{node.locks} locks, not {reached[id(node)]}"
        assert not node.locks or len(node.pages) == node.count, "a locked page is not on the device"


def _check_writes(open_writes: Collection[Write], everything: list[Node]) -> None:
    """Nodes and writes know each other, and what is being written stays."""
    for node in everything:
        if node.write is not None:
            assert node in node.write.nodes and node.write.ended == node.waiting, "a write forgot a node"
            assert node.waiting or node.write in open_writes, "a write that is not open"
            assert len(node.pages) == node.count, "a page left while it was being written"
    for write in open_writes:
        assert all(node.write is write for node in write.nodes), "a node forgot its write"


def _check_orders(everything: list[Node]) -> None:
    """All that may leave is found when something has to."""
    for node in everything:
        assert node.queued or not page_may_leave(node), "a page that may leave is not queued"
    for boundary in _boundaries(everything):
        assert boundary.queued or not boundary_may_leave(boundary), "a boundary that may leave is not queued"


def _bytes(node: Node) -> int:
    """Of one node and what it alone refers to."""
    size = sys.getsizeof(node) + sys.getsizeof(node.run) + sys.getsizeof(node.pages)
    for table in (node.children, node.tails, node.boundaries):
        if table is not None:
            size += sys.getsizeof(table) + sum(sys.getsizeof(key) for key in table)
    return size + sum(sys.getsizeof(boundary) for boundary in node.sorted_boundaries())
