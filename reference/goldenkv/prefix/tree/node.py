"""Nodes of the radix tree: runs of pages that are shared together, and where those pages are.

Along every path from a root, pages on the device come first, and so do pages that a lower tier has: neither
kind has a gap. A node therefore needs two counts, not a state a page. A page of a node is on the device
(`pages`), on the lower tier (the first `stored`), or on both; a page that is on neither is cut off. A page
that only the lower tier has is a tombstone of its device page.

Token ids are kept as raw bytes and compared as such: equal means equal ids, no hash decides.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator

import numpy as np

TOKEN_BYTES = 4
"""An int32 token id."""

MOST_PAGES = 64
"""Pages a node, at most: bounds what a split copies, so that its cost does not grow with the sequence."""

MERGE_AFTER = 2
"""Uses in a row that took a node together with its only child, after which the two become one."""


class Boundary:
    """The state of a sequence at one position: on the device (`handle`), on the lower tier, or on both.

    Attributes:
        node, end: it belongs behind the first `end` pages of that node.
        handle: of the device's copy, -1 for none.
        stored: the lower tier has a copy.
        last_use, hits: of hits that ended exactly here; a hit needs no other boundary.
        queued: see `EvictionOrder`.
    """

    __slots__ = ("end", "handle", "hits", "last_use", "node", "queued", "stored")

    def __init__(self, node: Node, end: int, handle: int, now: int) -> None:
        self.node, self.end, self.handle, self.last_use = node, end, handle, now
        self.stored, self.hits, self.queued = False, 0, 0


class Write:
    """Pages and boundaries on their way to the lower tier.

    Attributes:
        pages: (number of the page in its sequence, page id), to be copied.
        numbers: of these pages.
        boundaries: (position in pages, handle), to be copied; a partial page counts as one.
        nodes: all nodes that are part of it, from the root down; a split adds one.
        copied: the boundaries as the tree knows them.
        ended: it was acknowledged or failed.
    """

    __slots__ = ("boundaries", "copied", "ended", "nodes", "numbers", "pages")

    def __init__(self) -> None:
        self.pages: list[tuple[int, int]] = []
        self.numbers: set[int] = set()
        self.boundaries: list[tuple[int, int]] = []
        self.nodes: list[Node] = []
        self.copied: list[Boundary] = []
        self.ended = False


class Node:
    """A run of pages below a parent. A root has an empty run; a partial page is a node of its own.

    Attributes:
        page_bytes: bytes of the token ids of a page.
        start: number of its first page in the sequence.
        run: the token ids of its pages.
        pages: ids of those that are on the device: the first ones.
        stored: how many the lower tier has: the first ones.
        parent: None for a root, and for a node that is no longer in the tree.
        children: by a hash of their first page, or by its bytes where two have one hash, or for a partial
            page. None for none.
        tails: how many partial pages of each length in bytes are among the children. None for none.
        held_children: children with pages on the device.
        locks: open locks that reach it.
        write, waiting: the write that it is part of; acknowledged already, but that of its parent is not.
        boundaries: by `Boundary.end`. None for none.
        last_use, hits, references: the last use or insert, uses, and sequences that inserted it.
        together: uses in a row that took it with its parent.
        queued: see `EvictionOrder`.
    """

    __slots__ = (
        "boundaries",
        "children",
        "held_children",
        "hits",
        "last_use",
        "locks",
        "page_bytes",
        "pages",
        "parent",
        "queued",
        "references",
        "run",
        "start",
        "stored",
        "tails",
        "together",
        "waiting",
        "write",
    )

    def __init__(self, page_bytes: int, run: bytes = b"", start: int = 0) -> None:
        self.page_bytes, self.run, self.start = page_bytes, run, start
        self.pages = array("i")
        self.parent: Node | None = None
        self.children: dict[int | bytes, Node] | None = None
        self.tails: dict[int, int] | None = None
        self.boundaries: dict[int, Boundary] | None = None
        self.write: Write | None = None
        self.waiting = False
        self.stored = self.locks = self.held_children = self.queued = 0
        self.last_use = self.hits = self.references = self.together = 0

    @property
    def count(self) -> int:
        """Its pages, a partial one included."""
        return -(-len(self.run) // self.page_bytes)

    @property
    def partial(self) -> bool:
        """One page that its tokens do not fill."""
        return 0 < len(self.run) < self.page_bytes

    @property
    def first_page(self) -> bytes:
        """The token ids of its first page."""
        return self.run[: self.page_bytes]

    def below(self) -> Iterator[Node]:
        """Itself and all nodes below it, parents first."""
        waiting = [self]
        while waiting:
            node = waiting.pop()
            yield node
            waiting.extend((node.children or {}).values())

    def sorted_boundaries(self) -> list[Boundary]:
        """By position."""
        return [self.boundaries[end] for end in sorted(self.boundaries)] if self.boundaries else []


class Root(Node):
    """The empty run that a namespace's sequences start from."""

    __slots__ = ("namespace",)

    def __init__(self, page_bytes: int, namespace: bytes) -> None:
        super().__init__(page_bytes)
        self.namespace = namespace


def page_key(page: bytes) -> int:
    """A hash of a page's token ids. It only says where to look: the ids are compared."""
    return hash(page)


def find_child(node: Node, page: bytes) -> Node | None:
    """The child whose first page has exactly these token ids."""
    if node.children is None or len(page) < node.page_bytes:
        return None
    child = node.children.get(page_key(page))
    if child is not None and child.run.startswith(page):
        return child
    return node.children.get(page)


def tails_along(node: Node, data: bytes, at: int) -> list[Node]:
    """The partial pages that the token ids run through from byte `at` on, the longest first."""
    if node.tails is None or node.children is None:
        return []
    found = (node.children.get(data[at : at + size]) for size in sorted(node.tails, reverse=True))
    return [tail for tail in found if tail is not None]


def common_pages(node: Node, data: bytes, at: int) -> int:
    """How many whole pages of a node the token ids from byte `at` on begin with."""
    size = min(len(node.run), (len(data) - at) // node.page_bytes * node.page_bytes) // TOKEN_BYTES
    differ = np.frombuffer(node.run, np.int32, size) != np.frombuffer(data, np.int32, size, at)
    same = int(differ.argmax()) if differ.any() else size
    return same * TOKEN_BYTES // node.page_bytes


def attach(parent: Node, child: Node) -> None:
    """Makes a node a child of another."""
    if parent.children is None:
        parent.children = {}
    first = child.first_page
    if child.partial:
        parent.children[first] = child
        parent.tails = parent.tails or {}
        parent.tails[len(first)] = parent.tails.get(len(first), 0) + 1
    else:
        key = page_key(first)
        parent.children[first if key in parent.children else key] = child
    child.parent = parent
    parent.held_children += bool(child.pages)


def detach(child: Node) -> Node:
    """Takes a node out of the tree; returns what was its parent."""
    parent, first = child.parent, child.first_page
    assert parent is not None and parent.children is not None
    del parent.children[_key_of(parent, child)]
    if child.partial:
        assert parent.tails is not None
        parent.tails[len(first)] -= 1
        if not parent.tails[len(first)]:
            del parent.tails[len(first)]
        parent.tails = parent.tails or None
    parent.children = parent.children or None
    parent.held_children -= bool(child.pages)
    child.parent = None
    return parent


def split(node: Node, at: int) -> Node:
    """Cuts a node after `at` of its pages and returns the new node, which has the first part.

    The object stays with the second part: whoever holds it, a lock or a write, still holds the end of the
    same path.
    """
    parent = node.parent
    assert parent is not None and parent.children is not None and 0 < at < node.count
    key = _key_of(parent, node)
    upper = Node(node.page_bytes, node.run[: at * node.page_bytes], node.start)
    upper.parent, parent.children[key] = parent, upper
    node.run, node.start = node.run[at * node.page_bytes :], node.start + at
    upper.pages, node.pages = node.pages[:at], node.pages[at:]
    upper.stored, node.stored = min(node.stored, at), max(node.stored - at, 0)
    upper.last_use, upper.hits, upper.references = node.last_use, node.hits, node.references
    upper.together, node.together = node.together, 0
    attach(upper, node)
    move_locks(upper, node)
    move_write(upper, node)
    move_boundaries(upper, node, at)
    return upper


def move_locks(upper: Node, node: Node) -> None:
    """After a split: a lock that reaches the second part reaches the first."""
    upper.locks = node.locks


def move_write(upper: Node, node: Node) -> None:
    """After a split: both parts stay pending until the one acknowledgement."""
    upper.write, upper.waiting = node.write, node.waiting
    if node.write is not None:
        node.write.nodes.insert(node.write.nodes.index(node), upper)


def move_boundaries(upper: Node, node: Node, at: int) -> None:
    """After a split behind page `at`: a boundary at the cut is the end of the first part."""
    moved, node.boundaries = node.boundaries or {}, None
    for boundary in moved.values():
        if boundary.end <= at:
            place(boundary, upper, boundary.end)
        else:
            place(boundary, node, boundary.end - at)


def place(boundary: Boundary, node: Node, end: int) -> None:
    """Makes it the boundary behind the first `end` pages of a node."""
    boundary.node, boundary.end = node, end
    if node.boundaries is None:
        node.boundaries = {}
    node.boundaries[end] = boundary


def mergeable(upper: Node, node: Node) -> bool:
    """Whether the two can be one: nothing ends between them, and counts of first pages still say it all."""
    return (
        upper.parent is not None
        and upper.children is not None
        and len(upper.children) == 1
        and not node.partial
        and upper.count + node.count <= MOST_PAGES
        and upper.locks == node.locks
        and upper.write is None
        and node.write is None
        and (len(upper.pages) == upper.count or not node.pages)
        and (upper.stored == upper.count or not node.stored)
    )


def merge(upper: Node, node: Node) -> None:
    """Puts a node's run before that of its only child; the child's object stays, as in `split`."""
    parent = upper.parent
    assert parent is not None and parent.children is not None
    parent.children[_key_of(parent, upper)] = node
    node.parent, upper.parent = parent, None
    count = upper.count
    below, node.boundaries = node.boundaries or {}, None
    for boundary in (upper.boundaries or {}).values():
        place(boundary, node, boundary.end)
    for boundary in below.values():
        place(boundary, node, boundary.end + count)
    node.run, node.start = upper.run + node.run, upper.start
    node.pages, node.stored = upper.pages + node.pages, upper.stored + node.stored
    node.together = upper.together
    parent.held_children += bool(node.pages) - bool(upper.pages)


def _key_of(parent: Node, child: Node) -> int | bytes:
    """Under which key a node has a child."""
    assert parent.children is not None
    key = page_key(child.first_page)
    return key if parent.children.get(key) is child else child.first_page
