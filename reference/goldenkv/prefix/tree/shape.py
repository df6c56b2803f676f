"""The shape of the tree: roots, paths, where nodes are cut and when they become one again."""

from __future__ import annotations

from itertools import pairwise

from .node import (
    MERGE_AFTER,
    TOKEN_BYTES,
    Node,
    Root,
    attach,
    common_pages,
    detach,
    find_child,
    merge,
    mergeable,
    split,
)

Path = list[Node]
"""Nodes from a child of a root downwards."""


class Shape:
    """Nodes and their runs, without regard to where pages are.

    Attributes:
        roots: by namespace; a root without children is taken out.
        nodes: how many, without roots.
        version: changes whenever a path may have changed.
    """

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.page_bytes = page_size * TOKEN_BYTES
        self.roots: dict[bytes, Root] = {}
        self.nodes = self.version = 0

    def root(self, namespace: bytes) -> Root:
        """The root of a namespace, made if there is none."""
        if namespace not in self.roots:
            self.roots[namespace] = Root(self.page_bytes, namespace)
        return self.roots[namespace]

    def walk(self, namespace: bytes, data: bytes) -> tuple[Path, int]:
        """The nodes that token ids run through, and how many whole pages they cover.

        The last node may cover more. Partial pages are not on the path: see `tails`.
        """
        node: Node | None = self.roots.get(namespace)
        path: Path = []
        at = 0
        while node is not None:
            child = find_child(node, data[at : at + self.page_bytes])
            if child is None:
                break
            path.append(child)
            if not data.startswith(child.run, at):
                return path, child.start + common_pages(child, data, at)
            at += len(child.run)
            node = child
        return path, at // self.page_bytes

    def end(self, namespace: bytes, path: Path, pages: int) -> Node | None:
        """The node that ends with so many pages: the path's last, or the root. None if none does."""
        last = path[-1] if path else self.roots.get(namespace)
        return last if last is not None and last.start + last.count == pages else None

    def tail(self, namespace: bytes, path: Path, pages: int, data: bytes) -> list[Node]:
        """The partial page with exactly the token ids behind so many pages: a list of it, or of none."""
        end = self.end(namespace, path, pages)
        rest = data[pages * self.page_bytes :]
        tail = (end.children or {}).get(rest) if end is not None and 0 < len(rest) < self.page_bytes else None
        return [] if tail is None else [tail]

    def cut(self, path: Path, pages: int) -> Node | None:
        """Makes a node of the path end behind so many pages, by a split where none does.

        Returns:
            the node with the first part of what was split, or None.
        """
        for i in range(len(path) - 1, -1, -1):
            if path[i].start < pages:
                if pages < path[i].start + path[i].count:
                    upper = split(path[i], pages - path[i].start)
                    path.insert(i, upper)
                    self.nodes += 1
                    self.version += 1
                    return upper
                break
        return None

    def append(self, parent: Node, run: bytes) -> Node:
        """A new node below another."""
        child = Node(self.page_bytes, run, parent.start + parent.count)
        attach(parent, child)
        self.nodes += 1
        self.version += 1
        return child

    def remove(self, node: Node) -> None:
        """Takes out a node without children, and its root if that has no others."""
        parent = detach(node)
        self.nodes -= 1
        self.version += 1
        if isinstance(parent, Root) and parent.children is None:
            del self.roots[parent.namespace]

    def coarsen(self, path: Path) -> list[Node]:
        """A use took this path whole: nodes that are always used together become one.

        Returns:
            nodes that are no longer in the tree.
        """
        gone = []
        for upper, node in pairwise(path):
            node.together += 1
            if node.together >= MERGE_AFTER and mergeable(upper, node):
                merge(upper, node)
                self.nodes -= 1
                self.version += 1
                gone.append(upper)
        if path and path[-1].children is not None:
            for child in path[-1].children.values():
                child.together = 0
        return gone
