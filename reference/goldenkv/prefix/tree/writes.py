"""Pending writes to a lower tier, as nodes know them.

A page counts as stored only when the lower tier has every page before it. A write may begin while that of the
pages before it still runs; if it ends first, its pages wait, and if the earlier one fails, they fail with it.
"""

from __future__ import annotations

from dataclasses import dataclass

from .node import Boundary, Node, Write


@dataclass(frozen=True, slots=True)
class Written:
    """What the end of a write changed.

    Attributes:
        stored: (page number, page id) of pages that the lower tier now has, also of writes that waited.
        refused: the same of pages that do not count: the lower tier can drop them.
        waiting: these were copied, but the write of the pages before them still runs.
        nodes: that are no longer part of any write.
    """

    stored: list[tuple[int, int]]
    refused: list[tuple[int, int]]
    waiting: list[tuple[int, int]]
    nodes: list[Node]


def unsaved(node: Node) -> bool:
    """Whether a node has pages or boundaries on the device of which the lower tier has no copy."""
    return node.stored < len(node.pages) or any(
        b.handle >= 0 and not b.stored for b in (node.boundaries or {}).values()
    )


def coming(node: Node, number: int) -> bool:
    """Whether a page of a node is being copied."""
    return node.write is not None and number in node.write.numbers


def start_write(nodes: list[Node]) -> Write:
    """Makes a write of what these nodes, parents first, have that the lower tier has not."""
    write = Write()
    for node in nodes:
        node.write = write
        write.nodes.append(node)
        write.pages += [(node.start + i, node.pages[i]) for i in range(node.stored, len(node.pages))]
        for boundary in node.sorted_boundaries():
            if boundary.handle >= 0 and not boundary.stored:
                write.copied.append(boundary)
                write.boundaries.append((node.start + boundary.end, boundary.handle))
    write.numbers.update(number for number, _ in write.pages)
    return write


def finish_write(write: Write, ok: bool) -> Written:
    """Ends a write. All its nodes succeed or fail together, as far as those before them allow."""
    write.ended = True
    result = Written([], [], [], [])
    for node in write.nodes:
        if node.write is write and not node.waiting:  # those further up may have settled it already
            _settle(node, ok, result)
    return result


def _settle(node: Node, ok: bool, result: Written) -> None:
    """What one node's acknowledgement or failure means for it, and for those that waited for it."""
    unsettled = [(node, ok)]
    while unsettled:
        node, ok = unsettled.pop()
        parent, write = node.parent, node.write
        assert parent is not None and write is not None
        numbered = [(node.start + i, node.pages[i]) for i in range(node.stored, len(node.pages))]
        copied = [(number, page) for number, page in numbered if number in write.numbers]
        if ok and parent.stored < parent.count and coming(parent, node.start - 1):
            node.waiting = True
            result.waiting.extend(copied)
            continue
        ok = ok and parent.stored == parent.count
        if ok and copied == numbered:  # otherwise the lower tier lost, meanwhile, what came before
            node.stored = node.count
            result.stored.extend(copied)
        else:
            result.refused.extend(copied)
        for boundary in write.copied if ok else ():
            if boundary.node is node and boundary.end <= node.stored:
                boundary.stored = True
        node.write, node.waiting = None, False
        result.nodes.append(node)
        unsettled += [(child, True) for child in (node.children or {}).values() if child.waiting]


def lose_stored(node: Node) -> list[Node]:
    """The lower tier lost a node's pages, and so all below them.

    Returns:
        the nodes that changed, children first: some may have nothing left.
    """
    changed = list(node.below())
    for each in changed:
        each.stored = 0
        for boundary in each.sorted_boundaries():
            boundary.stored = False
        if each.waiting:
            each.write, each.waiting = None, False
    return changed[::-1]


def nowhere(boundary: Boundary) -> bool:
    """Whether neither tier has a boundary, or neither has the page that it ends."""
    node = boundary.node
    return (boundary.handle < 0 and not boundary.stored) or boundary.end > max(len(node.pages), node.stored)
