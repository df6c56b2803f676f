"""Inserting a sequence: first everything is looked up and checked, then carried out."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from .answers import Inserted
from .holdings import Holdings
from .matching import path_ids
from .node import MOST_PAGES, Boundary, Node
from .requests import check_new_handles, check_new_pages, checked_ids, checked_positions, token_bytes
from .shape import Path, Shape


@dataclass(frozen=True, slots=True)
class Plan:
    """What an insert will do.

    Attributes:
        namespace, data: the sequence, as bytes.
        ids: a page id for every whole page, and for the partial one if that is published.
        whole: whole pages.
        path, count: where the tree has the first so many pages of it.
        tail: the partial page that is there.
        fresh: page ids to be adopted.
        ends: (position in pages, handle) to be placed; a partial page counts as one.
        result: for the caller.
    """

    namespace: bytes
    data: bytes
    ids: np.ndarray
    whole: int
    path: Path
    count: int
    tail: Node | None
    fresh: np.ndarray
    ends: list[tuple[int, int]]
    result: Inserted


def plan_insert(
    shape: Shape,
    holdings: Holdings,
    namespace: bytes,
    tokens: np.ndarray,
    pages: Sequence[int],
    boundaries: Mapping[int, int],
) -> Plan:
    """Checks an insert against the tree. Errors: see `RadixTree.insert`."""
    data = token_bytes(tokens)
    whole, rest = divmod(len(tokens), shape.page_size)
    positions = checked_positions(boundaries, len(tokens), shape.page_size)
    partial = rest > 0 and len(tokens) in boundaries
    why = f"one for each whole page of {len(tokens)} tokens" + " and one for the partial page" * partial
    ids = checked_ids(pages, whole + partial, why)

    path, count = shape.walk(namespace, data)
    tail = next(iter(shape.tail(namespace, path, whole, data)), None) if partial else None
    there = path_ids(path)[:count].tolist()
    duplicates = dict(enumerate(there))
    fresh = ids[len(there) :]
    if tail is not None and tail.pages:
        duplicates[whole] = tail.pages[0]
        fresh = fresh[:-1]
    check_new_pages(fresh, holdings.pages)

    ends, refused = [], []
    for position, handle in positions:
        place = -(-position // shape.page_size)
        known = _boundary_at(path, tail, count, place)
        if known is None or known.handle < 0:
            ends.append((place, handle))
        elif known.handle != handle:
            refused.append(handle)
    check_new_handles([handle for _, handle in ends] + refused, holdings.handles)
    result = Inserted(fresh.tolist(), duplicates, refused)
    return Plan(namespace, data, ids, whole, path, count, tail, fresh, ends, result)


def carry_out(plan: Plan, shape: Shape, holdings: Holdings) -> None:
    """Does what was planned, at the time `holdings.now`."""
    if not len(plan.ids):
        return
    holdings.cut(plan.path, plan.count)
    path = [node for node in plan.path if node.start < plan.count]
    parent = path[-1] if path else shape.root(plan.namespace)
    for first in range(plan.count, plan.whole, MOST_PAGES):
        last = min(first + MOST_PAGES, plan.whole)
        parent = shape.append(parent, plan.data[first * shape.page_bytes : last * shape.page_bytes])
        path.append(parent)
    touched = list(path)
    if len(plan.ids) > plan.whole:
        rest = plan.data[plan.whole * shape.page_bytes :]
        touched.append(plan.tail or shape.append(parent, rest))
    holdings.pages.add(plan.fresh)
    for node in touched:
        node.last_use = holdings.now
        node.references += 1
        holdings.adopt(node, plan.ids[node.start + len(node.pages) : node.start + node.count])
    for node in touched:  # now that those with pages behind them are known: they may not leave
        holdings.offer(node)
    starts = [node.start for node in touched]
    for place, handle in plan.ends:
        node = touched[bisect_left(starts, place) - 1]
        holdings.adopt_boundary(node, place - node.start, handle)
    holdings.coarsen(path)


def _boundary_at(path: Path, tail: Node | None, count: int, place: int) -> Boundary | None:
    """The boundary behind so many pages, where the tree has one."""
    inner = place <= count
    node = path[bisect_left([each.start for each in path], place) - 1] if inner else tail
    return (node.boundaries or {}).get(place - node.start) if node is not None else None
