"""Faults that public trackers report of other implementations: prefix trees, hit lengths and page geometry.

As in `test_public_failures.py`, each test states the right value for the whole kind of fault, and builds the
fault in where that is cheap, to show that the test would find it. Here a page holds the hash of all tokens up
to its end: that says whose page it is.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Callable

import numpy as np
import pytest

from goldenkv.config import micro
from goldenkv.prefix import BadBoundary, BadPages, Match, RadixTree, StaleMatch
from goldenkv.prefix.tree import holdings, node
from goldenkv.state import COMPONENTS, Geometry, Grouping, GroupingError, HitPolicy
from goldenkv.state.groupings import Pool, Slot

NS = b"namespace"
PAGED = tuple(c.name for c in COMPONENTS if c.paged)
BOUNDARY = tuple(c.name for c in COMPONENTS if not c.paged)


def prompt(length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 64, length).astype(np.int32)


def branch(base: np.ndarray, at: int, length: int, seed: int = 1) -> np.ndarray:
    """The same up to `at`, then something else."""
    other = np.concatenate([base[:at], prompt(length - at, seed)])
    if at < min(length, len(base)):
        other[at] = (base[at] + 1) % 64
    return other


def content(tokens: np.ndarray) -> str:
    return hashlib.sha256(tokens.tobytes()).hexdigest()


def usable(found: Match) -> int:
    """The longest hit with pages and a boundary on some tier."""
    here = [position for position, _ in found.boundaries]
    return max(here + found.stored_boundaries, default=0)


class Device:
    """A small pool of pages and boundary slots under a tree, recycled as soon as they are free."""

    def __init__(self, page_size: int, pages: int, slots: int) -> None:
        self.tree, self.size = RadixTree(page_size), page_size
        self.pages: list[str | None] = [None] * pages
        self.slots: list[str | None] = [None] * slots
        self.free_pages, self.free_slots = [*range(pages)], [*range(slots)]
        self.host: dict[str, str] = {}

    def run(self, tokens: np.ndarray) -> int:
        """Finds a prompt, checks what the hit names, computes the rest, publishes it. The hit's length."""
        found = self.tree.match(NS, tokens)
        for i, page in enumerate(found.pages):
            assert self.pages[page] == content(tokens[: (i + 1) * self.size]), "a page of something else"
        for position, slot in found.boundaries:
            assert self.slots[slot] == content(tokens[:position]), "a boundary of something else"
        lock = self.tree.lock(found, found.length)
        self.tree.touch(found, found.length)
        whole = len(tokens) // self.size
        wanted = whole - len(found.pages)
        self.make_room(wanted, 1)
        fresh = [self.free_pages.pop() for _ in range(min(wanted, len(self.free_pages)))]
        length = (len(found.pages) + len(fresh)) * self.size
        for i, page in enumerate(fresh, start=len(found.pages)):
            self.pages[page] = content(tokens[: (i + 1) * self.size])
        boundaries = {}
        if length and self.free_slots:
            boundaries[length] = self.free_slots.pop()
            self.slots[boundaries[length]] = content(tokens[:length])
        done = self.tree.insert(NS, tokens[:length], [*found.pages.tolist(), *fresh], boundaries)
        assert done.adopted == fresh
        self.free_slots += done.boundaries_refused
        self.tree.unlock(lock)
        self.owners()
        return found.length

    def make_room(self, pages: int, slots: int) -> None:
        freed = self.tree.evict(pages - len(self.free_pages), slots - len(self.free_slots))
        for page in freed.pages:
            self.pages[page] = None
        for slot in freed.boundaries:
            self.slots[slot] = None
        self.free_pages += freed.pages
        self.free_slots += freed.boundaries

    def owners(self) -> None:
        """Every page and slot is either free or the tree's, never both, never lost."""
        self.tree.check()
        for free, held, pool in (
            (self.free_pages, self.tree.holdings.pages, self.pages),
            (self.free_slots, self.tree.holdings.handles, self.slots),
        ):
            assert sorted([*free, *held.all()]) == [*range(len(pool))], "a slot with two owners, or none"


# Partial hits -----------------------------------------------------------------------------------------------


def two_groups(paged: int, boundary: int) -> Grouping:
    """Pages of different sizes for what a hit needs all of, and for what it needs at its end."""
    pools = (
        Pool("A", paged, HitPolicy.ALL_PAGES, tuple(Slot((name,), "float32") for name in PAGED)),
        Pool("B", boundary, HitPolicy.TRAILING_PAGES, tuple(Slot((name,), "float32") for name in BOUNDARY)),
    )
    return Grouping("two groups", pools)


def test_row_11_a_length_that_every_group_can_load() -> None:
    """vllm-project/vllm#50359: A has keys at 32 and 64, B at 32 and 48; the answer 48 is no block of A.

    Hash unit 16, block 32: the right length is 32. A tree with blocks of 32 takes no boundary at 48 of 64.
    """
    grouping, config = two_groups(32, 16), micro()
    present = {"A": {0, 1}, "B": set(grouping.pages(config, 32)["B"]) | set(grouping.pages(config, 48)["B"])}
    assert grouping.usable_prefix(config, present, 64) == 32
    alone = [  # the fault: the shortest of what each group reaches in its own steps
        max(end for end in range(size, 65, size) if {*grouping.pages(config, end)[name]} <= present[name])
        for name, size in (("A", 32), ("B", 16))
    ]
    assert alone == [64, 48] and 48 % 32

    tree = RadixTree(32)
    with pytest.raises(BadBoundary):
        tree.insert(NS, prompt(64), [0, 1], {32: 0, 48: 1})
    tree.insert(NS, prompt(64), [0, 1], {32: 0})
    tree.insert(NS, prompt(48), [0, 2], {48: 1})  # where a sequence ends, in a page of its own
    assert tree.match(NS, prompt(64)[:49]).boundaries == [(32, 0), (48, 1)]
    assert usable(tree.match(NS, branch(prompt(64), 40, 64))) == 32


def saved(grouping: Grouping, length: int, drop: int) -> dict[str, set[int]]:
    """The pages that exist after a prompt, if the state is kept wherever a hit may end; less the last few."""
    found: dict[str, set[int]] = {pool.name: set() for pool in grouping.pools}
    for end in range(grouping.step, length + 1, grouping.step):
        for name, pages in grouping.pages(micro(), end).items():
            found[name] |= {*pages}
    return {name: {p for p in pages if p < max(pages) + 1 - drop} for name, pages in found.items() if pages}


def test_row_12_no_geometry_that_never_hits() -> None:
    """vllm-project/vllm#42948, 1CatAI/1Cat-vLLM#205: 0 % hits, as what was written was never looked for.

    For any page sizes, any windows and with the last page dropped for speculation, the same prompt again hits
    up to the last point where all groups end, or to the one before. And in a tree of any page size, exactly.
    """
    sizes = (8, 16, 24, 32, 64)
    for paged, boundary, drop in itertools.product(sizes, sizes, (0, 1)):
        grouping = two_groups(paged, boundary)
        for length in (grouping.step, 2 * grouping.step, 3 * grouping.step + 5):
            hit = grouping.usable_prefix(micro(), saved(grouping, length, drop), length)
            whole = length // grouping.step
            assert hit == max(whole - drop, 0) * grouping.step
    # The fault: a state is kept wherever its own group ends, but not where both do.
    grouping = two_groups(32, 24)
    kept = saved(grouping, 200, 0)
    assert grouping.usable_prefix(micro(), kept, 200) == 192
    ends = [end for end in range(24, 200, 24) if end % 96]
    kept["B"] = {page for end in ends for page in grouping.pages(micro(), end)["B"]}
    assert kept["B"] and grouping.usable_prefix(micro(), kept, 200) == 0

    for size in (1, 2, 3, 7, 8, 16, 33):
        for length in range(1, 70, 3):
            tree = RadixTree(size)
            tree.insert(NS, prompt(length), [*range(math.ceil(length / size))], {length: 0})
            assert usable(tree.match(NS, prompt(length))) == length
            assert usable(tree.match(NS, np.append(prompt(length), np.int32(1)))) == length


def test_row_14_short_prompts_are_cached_or_said_not_to_be() -> None:
    """vllm-project/vllm-ascend#16270: pages of 2 and 4096 end together at 4096; shorter prompts never hit.

    Groups with pages of 2, 8 and 64: below 64 tokens `step` says that no hit can end there, from 64 on each
    prompt hits. A tree hits at every length: the last page may be partial.
    """
    window = ("window", "draft_window")
    rest = tuple(name for name in BOUNDARY if name not in window)
    pools = (
        Pool("windows", 2, HitPolicy.TRAILING_PAGES, (Slot(window, "float32"),)),
        Pool("rows", 8, HitPolicy.TRAILING_PAGES, tuple(Slot((name,), "float32") for name in rest)),
        Pool("entries", 64, HitPolicy.ALL_PAGES, tuple(Slot((name,), "float32") for name in PAGED)),
    )
    grouping = Grouping("three groups", pools)
    assert grouping.step == 64
    for length in range(16, 201):
        hit = grouping.usable_prefix(micro(), saved(grouping, length, 0), length)
        uncacheable = length < grouping.step
        assert (hit == 0) if uncacheable else (hit == length // 64 * 64 > 0)
        tree = RadixTree(64)
        tree.insert(NS, prompt(length), [*range(math.ceil(length / 64))], {length: 0})
        assert usable(tree.match(NS, prompt(length))) == length


def test_row_15_pairs_of_sizes_are_taken_or_refused_at_once() -> None:
    """vllm-project/vllm#56396: block 8 below hash unit 32 was accepted, and failed with the first request.

    Every pair is refused with its reason when it is configured, or serves its first request.
    """
    taken = 0
    for paged, boundary in itertools.product(range(1, 41), (1, 2, 7, 8, 32)):
        grouping = two_groups(paged, boundary)
        if paged % 8:  # a block of the HCA layer would lie in two pages
            with pytest.raises(GroupingError, match=f"tokens={paged} must be a multiple of"):
                grouping.places(micro())
            continue
        grouping.places(micro())
        step = math.lcm(paged, boundary)
        assert grouping.step == step
        assert grouping.usable_prefix(micro(), saved(grouping, step, 0), step) == step
        taken += 1
    assert taken == 5 * 5


def test_row_17_a_tail_is_kept_or_the_page_size_refused() -> None:
    """sgl-project/sglang#27294: rows of an unfinished HCA block were not stored, as pages end with blocks.

    A device pool refuses pages that do not end with every block. The tree takes a boundary at any length, and
    gives it back at exactly that one, so no page size can make a tail be lost.
    """
    for size in range(1, 40):
        geometry = Geometry(slots=1, pages=4, page_size=size, tile=8)
        if size % micro().alignment:
            with pytest.raises(ValueError, match="positive multiple of 8"):
                geometry.check(micro())
        else:
            geometry.check(micro())
        for length in range(1, 2 * size + 2):
            tree = RadixTree(size)
            tree.insert(NS, prompt(length), [*range(math.ceil(length / size))], {length: 5})
            longer = np.append(prompt(length), np.int32(1))
            assert tree.match(NS, longer).boundaries == [(length, 5)]
            assert tree.match(NS, prompt(length)[:-1]).boundaries == []


# The tree ---------------------------------------------------------------------------------------------------


def copied(tree: RadixTree, tokens: np.ndarray, write: node.Write) -> dict[str, int]:
    """What a lower tier has after copying the pages of a write."""
    return {content(tokens[: (number + 1) * tree.page_size]): page for number, page in write.pages}


def split_while_writing() -> tuple[int, int]:
    """24 tokens in pages of 8 are being written when another prompt parts at 16. Then the device is emptied.

    Returns:
        what the tree says is stored, and how much of that the lower tier has.
    """
    tree, tokens = RadixTree(8), prompt(24)
    tree.insert(NS, tokens, [0, 1, 2], {24: 0})
    write = tree.begin_write(NS, tokens)
    host = copied(tree, tokens, write)
    tree.insert(NS, branch(tokens, 16, 24), [0, 1, 3])
    tree.end_write(write, ok=True)
    assert {*tree.evict(pages=9).pages} == {0, 1, 2, 3}
    found = tree.match(NS, tokens[:16])
    stored = [end for end in (8, 16, 24) if content(tokens[:end]) in host]
    tree.check()
    return found.stored_length, max(stored, default=0)


def test_row_38_a_split_while_a_write_is_pending(monkeypatch: pytest.MonkeyPatch) -> None:
    """sgl-project/sglang#16946: a node split during its write was marked backed up, never written."""
    stored, there = split_while_writing()
    assert stored == 16 and there == 24
    monkeypatch.setattr(node, "move_write", lambda upper, lower: None)
    with pytest.raises(AssertionError):
        assert split_while_writing() == (16, 24)


def test_row_39_a_stored_page_has_all_before_it_stored() -> None:
    """sgl-project/sglang#25065: a split left the parent without a copy; the child's was skipped, then lost.

    Three turns are written one after the other, acknowledged in any order, any of them failing, with a split
    in the first or second while they run: what counts as stored is a prefix, and as long as it can be.
    """
    tokens = prompt(48)
    for order, oks, at in itertools.product(
        itertools.permutations(range(3)), itertools.product((True, False), repeat=3), (None, 8, 24)
    ):
        tree, writes, host = RadixTree(8), [], {}
        for turn in range(3):
            length = 16 * (turn + 1)
            tree.insert(NS, tokens[:length], [*range(length // 8)])
            writes.append(tree.begin_write(NS, tokens[:length], 16 * turn))
            assert [page for _, page in writes[turn].pages] == [2 * turn, 2 * turn + 1]
        if at is not None:
            tree.insert(NS, branch(tokens, at, at + 8), [*range(at // 8), 9])
        for turn in order:
            done = tree.end_write(writes[turn], oks[turn])
            tree.check()
            host |= copied(tree, tokens, writes[turn]) if oks[turn] else {}
            for number, _ in done.refused:
                host.pop(content(tokens[: 8 * (number + 1)]), None)
        good = next((turn for turn in range(3) if not oks[turn]), 3)
        tree.evict(pages=9)
        assert tree.match(NS, tokens).stored_length == 16 * good
        assert {*host} == {content(tokens[:end]) for end in range(8, 16 * good + 1, 8)}


def locks_in_any_order(tree: RadixTree, steps: tuple[int, ...]) -> None:
    """Two requests share 24 tokens; in between a node is split, a boundary evicted, nodes merge."""
    tokens, held = prompt(32), []
    tree.insert(NS, tokens, [0, 1, 2, 3], {8: 0, 16: 1, 32: 2})

    def lock(length: int) -> Callable[[], None]:
        return lambda: held.append(tree.lock(tree.match(NS, tokens), length))

    def touch() -> None:
        for _ in range(3):
            tree.touch(tree.match(NS, tokens), 32)

    work: list[Callable[[], object]] = [
        lock(24),
        lock(16),
        lambda: tree.insert(NS, branch(tokens, 8, 16), [0, 7]),
        lambda: tree.evict(boundaries=3),
        touch,
        lambda: held and tree.unlock(held.pop(0)),
    ]
    for step in steps:
        work[step]()
        tree.check()
    while held:
        tree.unlock(held.pop())
        tree.check()
    pages = tree.stats().pages
    assert pages >= 4 and len(tree.evict(pages=9).pages) == pages
    assert tree.stats().nodes == tree.stats().locks == 0


def test_row_40_counts_of_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    """sgl-project/sglang#24153: unlocking met a count of 0, after a split or a tombstone in a shared prefix.

    In every order of locks, splits, evictions, merges and unlocks no count falls below 0, and all end at 0.
    """
    for steps in itertools.permutations(range(6)):
        locks_in_any_order(RadixTree(8), steps)
    monkeypatch.setattr(node, "move_locks", lambda upper, lower: None)
    with pytest.raises(AssertionError):
        locks_in_any_order(RadixTree(8), (0, 2, 1, 3, 4, 5))


def churn(seed: int) -> int:
    """Prompts that share beginnings, through six pages and three slots; tokens that were hits."""
    rng, device = np.random.default_rng(seed), Device(4, pages=6, slots=3)
    base = prompt(16)
    prompts = [base, *(branch(base, at, 16, seed=at) for at in (0, 4, 8, 12))]
    return sum(device.run(prompts[i][: rng.integers(4, 17)]) for i in rng.integers(0, 5, 60))


def test_row_41_every_slot_has_one_owner(monkeypatch: pytest.MonkeyPatch) -> None:
    """sgl-project/sglang#27586, #25805: a page was given away while a map still led from it to a window slot.

    Through a pool that is too small, so that every id soon names something else: each is free or held, never
    both. The tree takes no id that it holds. The fault: a boundary stays when its page goes.
    """
    assert sum(churn(seed) for seed in range(10)) > 0
    tree = RadixTree(4)
    tree.insert(NS, prompt(8), [0, 1], {8: 0})
    with pytest.raises(BadPages):
        tree.insert(NS, prompt(8, seed=1), [2, 1])
    with pytest.raises(BadBoundary):
        tree.insert(NS, prompt(8, seed=1), [2, 3], {8: 0})
    assert (tree.evict(pages=1).pages, tree.match(NS, prompt(8)).boundaries) == ([1], [])
    tree.insert(NS, prompt(8, seed=1), [2, 1], {8: 0})  # both ids belong to another prefix now
    tree.evict(pages=9)
    assert tree.stats().pages == tree.stats().boundaries == 0

    monkeypatch.setattr(holdings, "nowhere", lambda boundary: False)
    with pytest.raises(AssertionError):
        for seed in range(10):
            churn(seed)


def test_row_43_a_boundary_is_copied_before_it_leaves() -> None:
    """sgl-project/sglang#29204: the window of an inner node was dropped before it was backed up.

    While the write runs no boundary leaves. After it all are restorable; after a failed one the hit is
    shorter, and says so.
    """
    for ok in (True, False):
        tree, tokens = RadixTree(8), prompt(24)
        tree.insert(NS, tokens, [0, 1, 2], {8: 0, 16: 1, 24: 2})
        write = tree.begin_write(NS, tokens)
        assert write.boundaries == [(1, 0), (2, 1), (3, 2)]
        assert tree.evict(boundaries=3).boundaries == []
        tree.end_write(write, ok)
        assert sorted(tree.evict(boundaries=2).boundaries) == [0, 1]  # the inner ones, never used since
        found = tree.match(NS, tokens[:20])
        assert (found.length, usable(found)) == (16, 16 if ok else 0)
        assert usable(tree.match(NS, tokens)) == 24


def test_row_44_a_hit_refreshes_and_no_tombstone_is_left() -> None:
    """taco-project/FlexKV#195: a window hit did not refresh its age; full eviction left empty leaves.

    A is used, so under pressure B's boundary and B's pages go first. Unused, A's would. At the end no node is
    left that has neither pages nor children.
    """
    for used in (True, False):
        tree, a, b = RadixTree(8), prompt(16), prompt(16, seed=1)
        tree.insert(NS, a, [0, 1], {16: 0})
        tree.insert(NS, b, [2, 3], {16: 1})
        if used:
            tree.touch(tree.match(NS, a), 16)
        assert tree.evict(boundaries=1).boundaries == [1 if used else 0]
        assert tree.evict(pages=2).pages == ([3, 2] if used else [1, 0])
        assert tree.stats().nodes == 1
        tree.evict(pages=2)
        assert tree.stats().nodes == tree.stats().namespaces == 0


def test_row_45_what_was_matched_is_there_or_refused() -> None:
    """vllm-project/vllm#42273: a block table kept entries of blocks that had been evicted and reused.

    A match is not kept: used after its pages left it is refused, and a lock in time keeps them. Every page
    that a hit names holds the prompt's own content, however often the pool was recycled.
    """
    device = Device(4, pages=4, slots=2)
    tokens = prompt(16)
    device.run(tokens)
    stale = device.tree.match(NS, tokens)
    device.run(prompt(16, seed=1))
    assert [device.pages[page] for page in stale.pages] != [
        content(tokens[:end]) for end in range(4, 17, 4)
    ]  # what would be read
    with pytest.raises(StaleMatch):
        device.tree.lock(stale, 16)

    device = Device(4, pages=4, slots=2)
    device.run(tokens)
    lock = device.tree.lock(device.tree.match(NS, tokens), 16)
    device.run(prompt(16, seed=1))
    assert device.run(tokens) == 16
    device.tree.unlock(lock)
    assert sum(churn(seed) for seed in range(10, 20)) > 0
