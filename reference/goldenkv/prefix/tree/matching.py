"""Finding what the tree has of a prompt."""

from __future__ import annotations

import numpy as np

from .answers import Match, Tail
from .node import TOKEN_BYTES, Node, tails_along
from .shape import Path, Shape


def find(shape: Shape, namespace: bytes, data: bytes) -> Match:
    """See `RadixTree.match`; the token ids come as bytes."""
    path, count = shape.walk(namespace, data)
    size = shape.page_size
    pages = path_ids(path)[:count]
    held = len(pages)
    stored = max(held, min(sum(node.stored for node in path), count))
    ends = [(node.start + b.end, b) for node in path for b in node.sorted_boundaries()]
    boundaries = [(end * size, b.handle) for end, b in ends if end <= held and b.handle >= 0]
    lower = [end * size for end, b in ends if end <= stored and b.stored]

    last = shape.end(namespace, path, count)
    tails = tails_along(last, data, count * shape.page_bytes) if last is not None else []
    here = [(node, b) for node in tails for b in node.sorted_boundaries()]
    on_device = next(((n, b) for n, b in here if n.pages and b.handle >= 0), None) if held == count else None
    tail = None
    if on_device is not None:
        tail = Tail(_position(on_device[0], size), on_device[0].pages[0], on_device[1].handle)
        boundaries.append((tail.position, tail.handle))
    if stored == count:
        lower += [_position(node, size) for node, b in reversed(here) if b.stored]
    return Match(
        length=held * size,
        pages=pages,
        boundaries=boundaries,
        tail=tail,
        stored_length=stored * size,
        stored_boundaries=lower,
        namespace=namespace,
        data=data,
        path=path,
        version=shape.version,
    )


def path_ids(path: Path) -> np.ndarray:
    """Ids of all pages that a path has on the device, in order, int32."""
    return np.frombuffer(b"".join([node.pages for node in path]), np.int32)


def _position(tail: Node, page_size: int) -> int:
    """Where a partial page ends, in tokens."""
    return tail.start * page_size + len(tail.run) // TOKEN_BYTES
