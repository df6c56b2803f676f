"""The radix tree: worked examples, bad input, granularity, order of eviction, cost."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from goldenkv.prefix import (
    BadBoundary,
    BadLength,
    BadPages,
    BadTokens,
    NamespaceInUse,
    NotLocked,
    NotWritten,
    RadixError,
    RadixTree,
    StaleMatch,
)
from goldenkv.prefix.tree import checks, node
from goldenkv.prefix.tree.node import MERGE_AFTER, MOST_PAGES

NS = b"namespace"


def tokens(*pages: int, size: int = 4, rest: int = 0) -> np.ndarray:
    """Pages by number, each of `size` equal tokens, and `rest` tokens more."""
    return np.array([page for page in pages for _ in range(size)] + [99] * rest, np.int32)


def filled(*sequences: tuple[int, ...], size: int = 4) -> RadixTree:
    """A tree with these sequences; page ids count up from 0 in the order of insertion."""
    tree, ids = RadixTree(size), itertools.count()
    for pages in sequences:
        known = tree.match(NS, tokens(*pages, size=size)).pages.tolist()
        tree.insert(NS, tokens(*pages, size=size), known + [next(ids) for _ in pages[len(known) :]])
    tree.check()
    return tree


def runs(tree: RadixTree) -> list[int]:
    """Pages of each node, in the order of the nodes below."""
    return [each.count for root in tree.shape.roots.values() for each in root.below() if each is not root]


# Worked examples ------------------------------------------------------------------------------------------


def test_what_one_sequence_leaves() -> None:
    """Ten tokens in pages of four: two whole pages and a partial one, states at 8 and at 10."""
    tree = RadixTree(4)
    done = tree.insert(NS, tokens(1, 2, rest=2), [5, 6, 7], {8: 0, 10: 1})
    assert (done.adopted, done.duplicates, done.boundaries_refused) == ([5, 6, 7], {}, [])
    found = tree.match(NS, tokens(1, 2, rest=9))
    assert (found.length, found.pages.tolist(), found.boundaries) == (8, [5, 6], [(8, 0), (10, 1)])
    assert (found.tail.position, found.tail.page, found.tail.handle) == (10, 7, 1)
    assert tree.match(NS, tokens(1, 2, rest=1)).tail is None
    assert tree.match(NS, tokens(1, 3)).boundaries == []
    assert tree.match(b"other", tokens(1, 2)).length == 0
    again = tree.insert(NS, tokens(1, 2, rest=2), [5, 8, 9], {8: 0, 10: 3})
    assert (again.adopted, again.duplicates) == ([], {0: 5, 1: 6, 2: 7})
    assert again.boundaries_refused == [3]  # its own handle 0 at 8 is no duplicate that could be freed


def test_the_longest_partial_page_is_found() -> None:
    tree = RadixTree(4)
    for count, page in ((1, 10), (3, 11), (2, 12)):
        tree.insert(NS, tokens(1, rest=count), [1, page], {4 + count: page})
    assert tree.match(NS, tokens(1, rest=8)).tail.page == 11
    assert tree.match(NS, tokens(1, rest=2)).tail.page == 12
    assert tree.stats().pages == 4


def test_whole_pages_are_compared_token_by_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three first pages with one hash: each is found, and what is like none of them is not.

    The control trusts the hash.
    """
    for module in (node, checks):
        monkeypatch.setattr(module, "page_key", lambda page: 7)
    tree = filled((1, 2), (3, 4), (5, 6))
    wanted = {(1, 2): [0, 1], (3, 4): [2, 3], (5, 6): [4, 5], (7, 8): []}
    for pages, ids in wanted.items():
        assert tree.match(NS, tokens(*pages)).pages.tolist() == ids
    monkeypatch.setattr("goldenkv.prefix.tree.shape.find_child", lambda at, page: (at.children or {}).get(7))
    assert any(tree.match(NS, tokens(*pages)).pages.tolist() != ids for pages, ids in wanted.items())


@pytest.mark.parametrize("where", range(8))
def test_one_token_that_differs(where: int) -> None:
    tree = filled((1, 2))
    other = tokens(1, 2)
    other[where] += 1
    assert tree.match(NS, other).length == where // 4 * 4


# Bad input ------------------------------------------------------------------------------------------------

BAD: dict[str, tuple[type[RadixError], Callable[[RadixTree], Any]]] = {
    "tokens as a list": (BadTokens, lambda t: t.match(NS, [1, 2])),
    "int64": (BadTokens, lambda t: t.match(NS, np.zeros(4, np.int64))),
    "two dimensions": (BadTokens, lambda t: t.insert(NS, np.zeros((2, 4), np.int32), [7, 8])),
    "no namespace": (RadixError, lambda t: t.match(b"", tokens(1))),
    "a namespace that is text": (RadixError, lambda t: t.match("namespace", tokens(1))),
    "too few pages": (BadPages, lambda t: t.insert(NS, tokens(1, 2, 3), [0, 1])),
    "a page without its boundary": (BadPages, lambda t: t.insert(NS, tokens(1, rest=2), [0, 9])),
    "a boundary without its page": (BadPages, lambda t: t.insert(NS, tokens(1, rest=2), [0], {6: 0})),
    "a negative id": (BadPages, lambda t: t.insert(NS, tokens(8), [-1])),
    "an id that is no integer": (BadPages, lambda t: t.insert(NS, tokens(8), [1.5])),
    "an id twice": (BadPages, lambda t: t.insert(NS, tokens(8, 9), [7, 7])),
    "an id of another prefix": (BadPages, lambda t: t.insert(NS, tokens(8), [0])),
    "a boundary at 0": (BadBoundary, lambda t: t.insert(NS, tokens(1), [0], {0: 1})),
    "a boundary past the end": (BadBoundary, lambda t: t.insert(NS, tokens(1), [0], {8: 1})),
    "a boundary within a page": (BadBoundary, lambda t: t.insert(NS, tokens(1), [0], {2: 1})),
    "a negative handle": (BadBoundary, lambda t: t.insert(NS, tokens(1), [0], {4: -1})),
    "a handle twice": (BadBoundary, lambda t: t.insert(NS, tokens(1, 2), [0, 1], {4: 5, 8: 5})),
    "a length within a page": (BadLength, lambda t: t.lock(t.match(NS, tokens(1, 2)), 6)),
    "a length past the match": (BadLength, lambda t: t.touch(t.match(NS, tokens(1)), 8)),
    "a write of what is not there": (NotWritten, lambda t: t.begin_write(NS, tokens(1, 5))),
    "a write within a page": (BadLength, lambda t: t.begin_write(NS, tokens(1, 2), 2)),
    "a write without what comes before": (NotWritten, lambda t: t.begin_write(NS, tokens(1, 2), 4)),
    "a lock of another tree": (
        NotLocked,
        lambda t: t.unlock(filled((1,)).lock(filled((1,)).match(NS, tokens(1)), 4)),
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_changes_nothing(case: str) -> None:
    error, ask = BAD[case]
    tree = filled((1, 2, 3), (1, 4))
    before = tree.stats()
    with pytest.raises(error):
        ask(tree)
    assert tree.stats() == before
    tree.check()


@pytest.mark.parametrize("size", [0, -1, 1.5, True])
def test_page_sizes_that_cannot_be(size: int) -> None:
    with pytest.raises(RadixError, match="page_size"):
        RadixTree(size)


def test_what_ends_ends_once() -> None:
    tree = filled((1, 2))
    lock, write = tree.lock(tree.match(NS, tokens(1)), 4), tree.begin_write(NS, tokens(1, 2))
    with pytest.raises(NamespaceInUse):
        tree.forget(NS)
    tree.unlock(lock)
    tree.end_write(write, ok=True)
    with pytest.raises(NotLocked):
        tree.unlock(lock)
    with pytest.raises(NotWritten):
        tree.end_write(write, ok=True)
    assert tree.forget(NS).pages and tree.stats().nodes == 0


def test_a_match_is_no_promise() -> None:
    """What was matched can leave before it is locked; splits and merges in between do no harm."""
    tree = filled((1, 2, 3, 4))
    found = tree.match(NS, tokens(1, 2, 3, 4))
    tree.insert(NS, tokens(1, 9), [0, 9])
    lock = tree.lock(found, 8)
    tree.check()
    tree.evict(pages=10)
    with pytest.raises(StaleMatch):
        tree.touch(found, 12)
    tree.touch(found, 8)
    tree.unlock(lock)


def test_a_clock_that_falls() -> None:
    readings = iter([5, 4])
    tree = RadixTree(4, clock=lambda: next(readings))
    tree.insert(NS, tokens(1), [0])
    with pytest.raises(RadixError, match="clock"):
        tree.insert(NS, tokens(2), [1])


# Granularity ----------------------------------------------------------------------------------------------


def test_nodes_are_fine_where_sequences_part_and_coarse_elsewhere() -> None:
    """A branch splits at its page; growth by turns merges once use shows that it is taken whole."""
    tree = filled((1, 2, 3, 4), (1, 2, 5))
    assert sorted(runs(tree)) == [1, 2, 2]
    tree = filled((1,), (1, 2), (1, 2, 3))
    for _ in range(MERGE_AFTER):
        tree.touch(tree.match(NS, tokens(1, 2, 3)), 12)
    assert runs(tree) == [3]
    tree.touch(tree.match(NS, tokens(1, 2, 3)), 4)
    assert runs(tree) == [1, 2]
    for _ in range(4):  # now the use alternates, so they stay apart
        tree.touch(tree.match(NS, tokens(1, 2, 3)), 4)
        tree.touch(tree.match(NS, tokens(1, 2, 3)), 12)
        assert runs(tree) == [1, 2]
    tree.check()


def test_no_node_is_larger_than_what_a_split_may_copy() -> None:
    tree = filled(tuple(range(3 * MOST_PAGES + 1)))
    for _ in range(5):
        tree.touch(tree.match(NS, tokens(*range(3 * MOST_PAGES + 1))), 4 * (3 * MOST_PAGES + 1))
    assert runs(tree) == [MOST_PAGES] * 3 + [1]


# Eviction -------------------------------------------------------------------------------------------------


def oldest_first(uses: list[tuple[tuple[int, ...], int]], count: int) -> list[int]:
    """Plain LRU page by page, with no tree: the page not used for longest that has none behind it."""
    last: dict[tuple[int, ...], int] = {}
    ids: dict[tuple[int, ...], int] = {}
    for now, (pages, length) in enumerate(uses):
        for end in range(1, length + 1):
            ids.setdefault(pages[:end], len(ids))
            last[pages[:end]] = now
    order = []
    while len(order) < count:
        ends = [p for p in last if not any(q[:-1] == p for q in last)]
        order.append(min(ends, key=lambda p: (last[p], -len(p))))
        del last[order[-1]]
    return [ids[p] for p in order]


def grown(seed: int, use: bool) -> tuple[RadixTree, list[tuple[tuple[int, ...], int]], int]:
    """A tree after 25 inserts and uses, what was used, and how many pages there are."""
    rng, tree = np.random.default_rng(seed), RadixTree(4)
    uses: list[tuple[tuple[int, ...], int]] = []
    for _ in range(25):
        pages = tuple(rng.integers(0, 2, rng.integers(1, 6)).tolist())
        known = tree.match(NS, tokens(*pages)).pages.tolist()
        fresh = range(len(tree.holdings.pages), len(tree.holdings.pages) + len(pages) - len(known))
        tree.insert(NS, tokens(*pages), [*known, *fresh])
        uses.append((pages, len(pages)))
        pages = uses[rng.integers(len(uses))][0]
        length = int(rng.integers(1, len(pages) + 1))
        uses.append((pages, length))
        if use:
            tree.touch(tree.match(NS, tokens(*pages)), 4 * length)
    tree.check()
    return tree, uses, len(tree.holdings.pages)


def test_plain_lru_page_by_page() -> None:
    """Against a list of pages and times. The control inserts without using: another page is the oldest."""
    others = 0
    for seed in range(20):
        tree, uses, count = grown(seed, use=True)
        expected = oldest_first(uses, count)
        assert tree.evict(pages=count).pages == expected
        others += grown(seed, use=False)[0].evict(pages=count).pages != expected
    assert others >= 15


def test_a_boundary_and_its_page_are_separate_facts() -> None:
    tree = RadixTree(4)
    tree.insert(NS, tokens(1, 2, 3), [0, 1, 2], {4: 10, 8: 11, 12: 12})
    tree.touch(tree.match(NS, tokens(1, 2, 3)), 4)  # a hit at 4 uses the boundary at 4 alone
    assert tree.evict(boundaries=2).boundaries == [11, 12]
    found = tree.match(NS, tokens(1, 2, 3))
    assert (found.length, found.boundaries) == (12, [(4, 10)])
    assert tree.insert(NS, tokens(1, 2, 3), [0, 1, 2], {8: 13}).boundaries_refused == []
    freed = tree.evict(pages=2)
    assert (freed.pages, freed.boundaries) == ([2, 1], [13])  # a boundary whose page is nowhere goes along


def test_a_partial_page_goes_with_its_boundary() -> None:
    tree = RadixTree(4)
    tree.insert(NS, tokens(1, rest=1), [0, 1], {5: 10})
    freed = tree.evict(boundaries=1)
    assert (freed.pages, freed.boundaries) == ([1], [10])
    assert tree.match(NS, tokens(1, rest=1)).tail is None


def test_what_the_lower_tier_has_stays_known() -> None:
    tree = RadixTree(4)
    tree.insert(NS, tokens(1, 2, rest=1), [0, 1, 2], {8: 10, 9: 11})
    write = tree.begin_write(NS, tokens(1, 2, rest=1))
    assert (write.pages, write.boundaries) == ([(0, 0), (1, 1), (2, 2)], [(2, 10), (3, 11)])
    assert tree.evict(5, 5).pages == []  # not while it is being copied
    tree.end_write(write, ok=True)
    freed = tree.evict(5, 5)
    assert (freed.pages, sorted(freed.boundaries)) == ([2, 1, 0], [10, 11])
    found = tree.match(NS, tokens(1, 2, rest=1))
    assert (found.length, found.stored_length, found.stored_boundaries) == (0, 8, [8, 9])
    tree.insert(NS, tokens(1, 2), [7, 8], {8: 20})
    found = tree.match(NS, tokens(1, 2))
    assert (found.pages.tolist(), found.boundaries) == ([7, 8], [(8, 20)])
    tree.unstore(NS, tokens(1, 2, rest=1))
    assert tree.match(NS, tokens(1, 2, rest=1)).stored_length == 8  # on the device
    tree.evict(5)
    assert tree.stats().nodes == 0


# Cost -----------------------------------------------------------------------------------------------------


def test_a_split_copies_one_node() -> None:
    """And a match, or a use of what was just matched, changes nothing but the node in which it ends."""
    pages = tuple(range(5 * MOST_PAGES))
    tree = filled(pages)
    before = {id(each): each.run for root in tree.shape.roots.values() for each in root.below()}
    tree.touch(tree.match(NS, tokens(*pages[:100])), 400)
    changed = [
        each
        for root in tree.shape.roots.values()
        for each in root.below()
        if before.get(id(each)) is not each.run
    ]
    assert [each.start for each in changed] == [64, 100]


def test_the_order_of_eviction_keeps_no_rubbish() -> None:
    """Entries of what was forgotten do not pile up."""
    tree = RadixTree(4)
    for round_ in range(200):
        for page in range(10):
            tree.insert(b"%d" % round_, tokens(page), [page])
        tree.forget(b"%d" % round_)
    assert len(tree.holdings.page_order) < 100
