"""The radix tree against a dictionary: any sequence of operations, every invariant after each.

The model knows whole prefixes only: namespace and token ids -> page id, handle, stored or not. It has no
nodes, so nothing in it can be split, merged or miscounted. Mutants of the tree show that faults are found.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
    run_state_machine_as_test,
)

from goldenkv.prefix import (
    LRU,
    Composite,
    FadingSelection,
    NamespaceInUse,
    NotWritten,
    RadixError,
    RadixTree,
    SelectionDriven,
    Strategy,
    radix,
)
from goldenkv.prefix.tree import checks, holdings, insertion, node, shape, writes
from goldenkv.prefix.tree.holdings import Holdings

P = 3
NAMESPACES = (b"a", b"b")
namespaces = st.sampled_from([b"a", b"a", b"a", b"b"])
STRATEGIES = (
    Strategy,
    lambda: LRU(sinks=1, recent=2),
    SelectionDriven,
    lambda: FadingSelection(4),
    Composite,
)
Key = tuple[bytes, tuple[int, ...]]
"""A page, or the boundary at its end: the namespace and all tokens up to there."""


def corpus() -> list[list[int]]:
    """Prompts that share what they can: one trunk, branches at every page, partial pages behind them."""
    trunk, other = [0] * P, [0] * (P - 1) + [1]
    found: list[list[int]] = [[]]
    for pages in range(1, 5):
        found += [trunk * pages] * 2
        found += [trunk * at + other * (pages - at) for at in range(pages)]
    return found + [
        known + tail for known in (trunk, trunk * 3, trunk + other) for tail in ([0], [0, 0], [1])
    ]


prompts = st.sampled_from(corpus())


def array(tokens: list[int] | tuple[int, ...]) -> np.ndarray:
    return np.array(tokens, np.int32)


def keys_of(ns: bytes, tokens: list[int] | tuple[int, ...]) -> list[Key]:
    """Of the whole pages of a sequence, then of its partial page."""
    ends = [*range(P, len(tokens) + 1, P), *([len(tokens)] if len(tokens) % P else [])]
    return [(ns, tuple(tokens[:end])) for end in ends]


def behind(key: Key, other: Key) -> bool:
    """Whether a page can only be reached through another, or is the other."""
    return key == other or (
        len(other[1]) % P == 0 and key[0] == other[0] and key[1][: len(other[1])] == other[1]
    )


def before(key: Key) -> Key:
    return key[0], key[1][: (len(key[1]) - 1) // P * P]


@dataclass
class Pending:
    """A write: what it copies, and all that it may keep on the device."""

    write: Any
    pages: list[Key]
    boundaries: list[Key]
    reach: list[Key]
    acknowledged: bool = False


class TreeMachine(RuleBasedStateMachine):
    """Sequences come, are found, held, written to a lower tier, and go."""

    locks, writing = Bundle("locks"), Bundle("writing")

    @initialize(strategy=st.sampled_from(STRATEGIES))
    def start(self, strategy: Callable[[], Strategy]) -> None:
        self.tree = RadixTree(P, strategy())
        self.pages: dict[Key, int] = {}
        self.handles: dict[Key, int] = {}
        self.stored: set[Key] = set()
        self.stored_boundaries: set[Key] = set()
        self.locked: list[tuple[Any, Key]] = []
        self.pending: list[Pending] = []
        self.issued = 0
        self.gone: list[int] = []

    # Coming and being found ---------------------------------------------------------------------------------

    def new_id(self) -> int:
        self.issued += 1
        return self.issued

    @rule(ns=namespaces, tokens=prompts, data=st.data())
    def insert(self, ns: bytes, tokens: list[int], data: st.DataObject) -> None:
        keys = keys_of(ns, tokens)
        ends = data.draw(st.sets(st.sampled_from(keys))) if keys else set()
        if len(tokens) % P and keys[-1] not in ends:
            keys.pop()
        ids = [self.new_id() for _ in keys]
        boundaries = {len(key[1]): self.new_id() for key in ends}
        done = self.tree.insert(ns, array(tokens), ids, boundaries)
        new = [i for i, key in enumerate(keys) if key not in self.pages]
        assert done.adopted == [ids[i] for i in new]
        assert done.duplicates == {i: self.pages[k] for i, k in enumerate(keys) if i not in new}
        assert sorted(done.boundaries_refused) == sorted(
            boundaries[len(k[1])] for k in ends & {*self.handles}
        )
        self.pages |= {keys[i]: ids[i] for i in new}
        self.handles |= {key: boundaries[len(key[1])] for key in ends - {*self.handles}}
        again = self.tree.insert(ns, array(tokens), ids, boundaries)
        assert (again.adopted, again.boundaries_refused) == ([], done.boundaries_refused)

    @rule(ns=namespaces, tokens=prompts)
    def match(self, ns: bytes, tokens: list[int]) -> None:
        found = self.tree.match(ns, array(tokens))
        whole = [key for key in keys_of(ns, tokens) if len(key[1]) % P == 0]
        here = [k for k in whole if k in self.pages]
        anywhere = [k for k in whole if k in self.pages or k in self.stored]
        assert (found.length, found.stored_length) == (P * len(here), P * len(anywhere))
        assert found.pages.tolist() == [self.pages[key] for key in here]
        running = [(ns, tuple(tokens[:n])) for n in range(1, len(tokens) + 1)]
        tails = [
            k for k in running[len(here) * P :] if len(k[1]) % P and k in self.pages and k in self.handles
        ]
        if tails:
            tail = found.tail
            assert (tail.position, tail.page, tail.handle) == (
                len(tails[-1][1]),
                self.pages[tails[-1]],
                self.handles[tails[-1]],
            )
        assert (found.tail is None) == (not tails)
        ends = [k for k in here if k in self.handles] + tails[-1:]
        assert found.boundaries == [(len(k[1]), self.handles[k]) for k in ends]
        assert found.stored_boundaries == [len(k[1]) for k in running if k in self.stored_boundaries]

    def lengths(self, found: Any) -> list[int]:
        """Where a match can be used."""
        return [*range(0, found.length + 1, P), *([found.tail.position] if found.tail else [])]

    def draw_known(self, data: st.DataObject) -> Key:
        """A sequence that is there."""
        return data.draw(st.sampled_from(sorted(self.pages)))

    @precondition(lambda self: self.pages)
    @rule(data=st.data(), other=st.booleans())
    def touch(self, data: st.DataObject, other: bool) -> None:
        """A use; now and then another one comes between the match and the use, and changes the nodes."""
        ns, tokens = self.draw_known(data)
        found = self.tree.match(ns, array(tokens))
        if other:
            self.tree.touch(self.tree.match(ns, array(tokens)), found.length // P // 2 * P)
        self.tree.touch(found, data.draw(st.sampled_from(self.lengths(found))))

    # Being held ---------------------------------------------------------------------------------------------

    @precondition(lambda self: self.pages)
    @rule(target=locks, data=st.data())
    def lock(self, data: st.DataObject) -> Any:
        ns, tokens = self.draw_known(data)
        found = self.tree.match(ns, array(tokens))
        length = data.draw(st.sampled_from(self.lengths(found)[-2:]))
        self.locked.append((self.tree.lock(found, length), (ns, tuple(tokens[:length]))))
        return self.locked[-1]

    @rule(held=consumes(locks))
    def unlock(self, held: Any) -> None:
        self.tree.unlock(held[0])
        self.locked.remove(held)

    def pinned(self, key: Key, widely: bool = False) -> bool:
        """Locked or being copied; widely: or perhaps in one node with what is being copied."""
        return any(held[1] and behind(held, key) for _, held in self.locked) or any(
            key in (each.reach if widely else each.pages + each.boundaries) for each in self.pending
        )

    def free(self, widely: bool) -> set[Key]:
        """Pages that can leave, after those behind them."""
        pinned = [key for key in self.pages if self.pinned(key, widely)]
        return {key for key in self.pages if not any(behind(other, key) for other in pinned)}

    # Being written ------------------------------------------------------------------------------------------

    @precondition(lambda self: self.pages)
    @rule(target=writing, data=st.data())
    def begin_write(self, data: st.DataObject) -> Any:
        ns, tokens = self.draw_known(data)
        length = len(tokens)
        first = data.draw(st.sampled_from([0, 0, *range(length // P + 1)]))
        keys, busy = keys_of(ns, tokens), {key for each in self.pending for key in each.pages}
        left = {key for each in self.pending for key in each.reach}
        if first and keys[first - 1] not in self.stored | busy:
            with pytest.raises(NotWritten):
                self.tree.begin_write(ns, array(tokens), first * P)
            return multiple()
        write = self.tree.begin_write(ns, array(tokens), first * P)
        pages, ends = [keys[i] for i, _ in write.pages], [keys[end - 1] for end, _ in write.boundaries]
        assert write.pages == [(keys.index(k), self.pages[k]) for k in pages]
        assert write.boundaries == [(keys.index(k) + 1, self.handles[k]) for k in ends]
        assert {*keys[first:]} - self.stored - left <= {*pages} <= {*keys[first:]} - self.stored - busy
        assert {*ends} <= {*keys[first:]} & {*self.handles} - self.stored_boundaries
        assert {*pages} & ({*self.handles} - self.stored_boundaries) <= {*ends}
        self.pending.append(Pending(write, pages, ends, keys[first:]))
        return write

    @rule(write=consumes(writing), ok=st.booleans())
    def end_write(self, write: Any, ok: bool) -> None:
        done = self.tree.end_write(write, ok)
        entry = next(each for each in self.pending if each.write is write)
        entry.acknowledged = True
        stored, refused = self.settle(entry if not ok else None)
        assert sorted(page for _, page in done.stored) == sorted(self.pages[key] for key in stored)
        assert sorted(page for _, page in done.refused) == sorted(self.pages[key] for key in refused)
        assert sorted(page for _, page in done.waiting) == sorted(self.pages[key] for key in entry.pages)

    def settle(self, failed: Pending | None = None) -> tuple[list[Key], list[Key]]:
        """Page by page until nothing changes: stored if the page before is, refused if it never will be."""
        stored, refused = [], []
        moved = True
        while moved:
            moved = False
            for entry in [each for each in self.pending if each.acknowledged]:
                for key in [*entry.pages]:
                    ready = not before(key)[1] or before(key) in self.stored
                    if (
                        entry is not failed
                        and not ready
                        and any(before(key) in e.pages for e in self.pending)
                    ):
                        continue
                    entry.pages.remove(key)
                    (stored if ready and entry is not failed else refused).append(key)
                    self.stored |= {*stored}
                    moved = True
        for entry in [each for each in self.pending if each.acknowledged]:
            settled = [k for k in entry.boundaries if k not in entry.pages]
            if entry is not failed:
                self.stored_boundaries |= {key for key in settled if key in self.stored}
            entry.boundaries = [k for k in entry.boundaries if k in entry.pages]
        self.pending = [e for e in self.pending if not e.acknowledged or e.pages]
        return stored, refused

    # Going --------------------------------------------------------------------------------------------------

    @rule(pages=st.integers(0, 4), boundaries=st.integers(0, 2))
    def evict(self, pages: int, boundaries: int) -> None:
        may, must = self.free(widely=False), self.free(widely=True)
        loose = [key for key in self.handles if not self.pinned(key, widely=True)]
        freed = self.tree.evict(pages, boundaries)
        assert {*freed.pages} <= {self.pages[key] for key in may}, "a page left that is held"
        assert len(freed.pages) >= min(pages, len(must))
        assert len(freed.pages) <= pages or boundaries
        assert len(freed.boundaries) >= min(boundaries, len(loose))
        for handle in freed.boundaries:
            key = next(key for key, known in self.handles.items() if known == handle)
            assert not self.pinned(key), "a boundary left that is held"
        self.take_out(freed)

    @rule(ns=namespaces, tokens=prompts, data=st.data())
    def unstore(self, ns: bytes, tokens: list[int], data: st.DataObject) -> None:
        """The lower tier loses a page, and so all behind it."""
        first = data.draw(st.integers(0, len(tokens) // P))
        lost = keys_of(ns, tokens)[first : first + 1]
        freed = self.tree.unstore(ns, array(tokens), first * P)
        assert not freed.pages
        if lost:
            self.stored = {key for key in self.stored if not behind(key, lost[0])}
            self.stored_boundaries = {key for key in self.stored_boundaries if not behind(key, lost[0])}
            for entry in [each for each in self.pending if each.acknowledged]:
                entry.pages = [key for key in entry.pages if not behind(key, lost[0])]
            self.settle()
        self.take_out(freed)

    @rule(ns=namespaces)
    def forget(self, ns: bytes) -> None:
        used = any(held[0] == ns and held[1] for _, held in self.locked) or any(
            key[0] == ns for each in self.pending for key in each.pages + each.boundaries
        )
        if used:
            with pytest.raises(NamespaceInUse):
                self.tree.forget(ns)
            return
        freed = self.tree.forget(ns)
        assert {*freed.pages} == {page for key, page in self.pages.items() if key[0] == ns}
        self.stored = {key for key in self.stored if key[0] != ns}
        self.stored_boundaries = {key for key in self.stored_boundaries if key[0] != ns}
        self.take_out(freed)

    def take_out(self, freed: Any) -> None:
        """What was freed was held until now, and was not freed before."""
        self.gone += freed.pages + freed.boundaries
        assert len({*self.gone}) == len(self.gone), "an id was freed twice"
        for table, ids in ((self.pages, freed.pages), (self.handles, freed.boundaries)):
            assert {*ids} <= {*table.values()}, "an id was freed that was not held"
            for key in [key for key, known in table.items() if known in ids]:
                del table[key]

    # Always -------------------------------------------------------------------------------------------------

    @invariant()
    def sound(self) -> None:
        if not hasattr(self, "tree"):
            return
        self.tree.check()
        stats = self.tree.stats()
        assert (stats.pages, stats.boundaries) == (len(self.pages), len(self.handles))
        assert (stats.stored_pages, stats.locks) == (len(self.stored), len(self.locked))
        for key in self.pages:
            assert not before(key)[1] or before(key) in self.pages, "a page behind one that is gone"
        for key in self.stored:
            assert not before(key)[1] or before(key) in self.stored, "a stored page behind one that is not"
        for key in self.handles:
            assert key in self.pages or key in self.stored, "a boundary whose page is nowhere"

    def teardown(self) -> None:
        """All counts end at zero, and every id comes back once."""
        if not hasattr(self, "tree"):
            return
        for lock, _ in self.locked:
            self.tree.unlock(lock)
        for entry in [*self.pending]:
            if not entry.acknowledged:
                self.end_write(entry.write, ok=False)
        assert not self.pending
        self.locked = []
        self.evict(len(self.pages), 0)
        assert not self.pages
        for ns in NAMESPACES:
            self.forget(ns)
        self.sound()
        stats = self.tree.stats()
        assert (stats.namespaces, stats.nodes, stats.locks, stats.writes) == (0, 0, 0, 0)


TestTree = TreeMachine.TestCase
TestTree.settings = settings(stateful_step_count=50, suppress_health_check=[HealthCheck.too_slow])


def run(**options: Any) -> None:
    run_state_machine_as_test(TreeMachine, settings=settings(TestTree.settings, database=None, **options))


@pytest.mark.parametrize("case", ["one hash for all pages", "two pages a node"])
def test_it_holds_where(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No hash decides what is equal, and it does not matter how runs are cut into nodes."""
    for module in (node, checks) if case == "one hash for all pages" else ():
        monkeypatch.setattr(module, "page_key", lambda page: 0)
    for module in (node, insertion, checks) if case == "two pages a node" else ():
        monkeypatch.setattr(module, "MOST_PAGES", 2)
    run(max_examples=50)


# Mutants ----------------------------------------------------------------------------------------------------


def boundary_in_the_wrong_half(upper: node.Node, lower: node.Node, at: int) -> None:
    moved, lower.boundaries = lower.boundaries or {}, None
    for boundary in moved.values():
        if boundary.end < at:  # <=
            node.place(boundary, upper, boundary.end)
        else:
            node.place(boundary, lower, boundary.end - at)


def one_page_too_many(found: Callable[..., int]) -> Callable[..., int]:
    return lambda child, data, at: min(found(child, data, at) + 1, child.count)


def freed_twice(release: Callable[..., None]) -> Callable[..., None]:
    def twice(self: Holdings, each: node.Node, count: int, freed: Any) -> None:
        release(self, each, count, freed)
        freed.pages.extend(freed.pages[-1:])

    return twice


def whatever_the_page_before(settle: Callable[..., None]) -> Callable[..., None]:
    def always(each: node.Node, ok: bool, result: Any) -> None:
        each.stored = max(each.stored, each.count * ok)
        settle(each, ok, result)

    return always


MUTANTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "a split leaves out the pending write": lambda m: m.setattr(node, "move_write", lambda *_: None),
    "a split leaves out the locks": lambda m: m.setattr(node, "move_locks", lambda *_: None),
    "a boundary at a split stays with the second part": lambda m: m.setattr(
        node, "move_boundaries", boundary_in_the_wrong_half
    ),
    "a locked page leaves": lambda m: m.setattr(
        holdings, "page_may_leave", lambda n: bool(n.pages) and not n.held_children and n.write is None
    ),
    "a page leaves before those behind it": lambda m: m.setattr(
        holdings, "page_may_leave", lambda n: bool(n.pages) and not n.locks and n.write is None
    ),
    "a page leaves while it is written": lambda m: m.setattr(
        holdings, "page_may_leave", lambda n: bool(n.pages) and not n.held_children and not n.locks
    ),
    "a locked boundary leaves": lambda m: m.setattr(
        holdings, "boundary_may_leave", lambda b: b.handle >= 0 and b.node.write is None
    ),
    "an id is freed twice": lambda m: m.setattr(Holdings, "release", freed_twice(Holdings.release)),
    "the namespace is ignored": lambda m: m.setattr(radix, "checked_namespace", lambda _: b"all"),
    "a partial match is one page too long": lambda m: m.setattr(
        shape, "common_pages", one_page_too_many(shape.common_pages)
    ),
    "a merge across the end of a lock": lambda m: m.setattr(
        shape,
        "mergeable",
        lambda upper, child: (
            upper.parent is not None
            and len(upper.children) == 1
            and not child.partial
            and upper.write is child.write is None
            and len(upper.pages) == upper.count
            and not upper.stored
        ),
    ),
    "stored although the page before is not": lambda m: m.setattr(
        writes, "_settle", whatever_the_page_before(writes._settle)
    ),
    "a boundary outlives its page": lambda m: m.setattr(holdings, "nowhere", lambda b: False),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutants_are_found(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within the default number of examples; the first counterexample is enough, so it is not made small."""
    MUTANTS[mutant](monkeypatch)
    with pytest.raises((AssertionError, RadixError, LookupError, AttributeError)):
        run(phases=[Phase.generate], report_multiple_bugs=False)
