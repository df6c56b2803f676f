"""Any sequence of operations against a dictionary; every total and list is compared after each."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from ..tiers.errors import Missing
from ..tiers.objects import Address, Item
from ..tiers.store import Entry
from .hooks import Clock, Hooks, make_item
from .objects import check_same

OWNERS, NAMESPACES, KEYS = 2, 2, 2
PLACES = list(itertools.product(range(OWNERS), range(NAMESPACES), range(KEYS)))
places = st.sampled_from([*PLACES, *PLACES[:1] * 4, *PLACES[-1:] * 2])
"""Owner, namespace and key of an address. All owners have equal namespaces, and all of those equal keys.

Some are drawn more often, so that they are put, replaced and deleted in one short sequence.
"""
sizes, seeds = st.sampled_from([0, 1, 2, 4095, 4096, 4097]), st.integers(0, 3)
times = st.sampled_from([None, None, 100, 1000])
"""Seconds to live: far more than an example takes, as servers have clocks of their own."""
Place = tuple[int, int, int]


@dataclass
class Known:
    """What the dictionary has for an address."""

    item: Item
    nbytes: int
    ends: float | None


class StoreMachine(RuleBasedStateMachine):
    """The store under test beside a dictionary."""

    def __init__(self, suite: Hooks, folder: Path) -> None:
        super().__init__()
        self.suite, self.clock = suite, Clock()
        self.folder = Path(tempfile.mkdtemp(dir=folder))
        self.store = suite.open_store(self.folder, self.clock, None)
        self.model: dict[Address, Known] = {}

    @initialize()
    def name(self) -> None:
        """New names in every example, as the server may be shared."""
        self.owners = [self.suite.owner() for _ in range(OWNERS)]
        others = [self.suite.address(self.owners[0]) for _ in range(max(NAMESPACES, KEYS))]
        self.addresses = {
            (owner, namespace, key): Address(self.owners[owner], others[namespace].namespace, others[key].key)
            for owner, namespace, key in PLACES
        }

    @rule(batch=st.lists(st.tuples(places, sizes, seeds, times), min_size=1, max_size=6))
    def put(self, batch: list[tuple[Place, int, int, int | None]]) -> None:
        for place, nbytes, seed, ttl in batch:
            if not self.suite.supports_ttl:
                ttl = None
            item = make_item(self.addresses[place], nbytes, seed)
            ends = None if ttl is None else self.clock.now + ttl
            self.model[self.addresses[place]] = Known(item, self.store.put(item, ttl), ends)

    @rule(place=places)
    def get(self, place: Place) -> None:
        known = self.model.get(self.addresses[place])
        if known is None:
            with pytest.raises(Missing):
                self.store.get(self.addresses[place])
            with pytest.raises(Missing):
                self.store.get_into(self.addresses[place], np.zeros(4096, np.uint8))
        else:
            check_same(self.store, known.item)

    @rule(batch=st.lists(places, max_size=6))
    def exists(self, batch: list[Place]) -> None:
        addresses = [self.addresses[place] for place in batch]
        assert self.store.exists(addresses) == [address in self.model for address in addresses]

    @rule(batch=st.lists(places, max_size=3))
    def delete(self, batch: list[Place]) -> None:
        addresses = {self.addresses[place] for place in batch}
        there = sum(address in self.model for address in addresses)
        assert self.store.delete([self.addresses[place] for place in batch]) == there
        for address in addresses:
            self.model.pop(address, None)

    @rule(owner=st.integers(0, OWNERS - 1))
    def delete_owner(self, owner: int) -> None:
        gone = [address for address in self.model if address.owner == self.owners[owner]]
        assert self.store.delete_owner(self.owners[owner]) == len(gone)
        for address in gone:
            del self.model[address]

    @precondition(lambda self: self.suite.supports_ttl)
    @rule(seconds=st.sampled_from([99, 100, 1000]))
    def wait(self, seconds: int) -> None:
        """What expires is missing. Whether it still takes room is the store's business, so it is deleted."""
        self.clock.now += seconds
        for address, known in list(self.model.items()):
            if known.ends is not None and known.ends <= self.clock.now:
                with pytest.raises(Missing):
                    self.store.get(address)
                self.store.delete([address])
                del self.model[address]

    @precondition(lambda self: self.suite.supports_restart)
    @rule()
    def restart(self) -> None:
        self.store.close()
        self.store = self.suite.open_store(self.folder, self.clock, None)

    @invariant()
    def everything_is_listed_once(self) -> None:
        entries = [
            entry for entry in self.store.scan() if self.suite.alone or entry.address.owner in self.owners
        ]
        self.check_listed(entries, self.model)

    @invariant()
    def totals_are_right(self) -> None:
        for owner in self.owners:
            of_owner = [known for address, known in self.model.items() if address.owner == owner]
            stats = self.store.stats(owner)
            assert (stats.objects, stats.nbytes) == (len(of_owner), sum(k.nbytes for k in of_owner))
        if self.suite.alone:
            stats = self.store.stats()
            assert stats.objects == len(self.model)
            assert stats.nbytes == sum(known.nbytes for known in self.model.values())

    @rule()
    def scan(self) -> None:
        names = [None, *{address.namespace for address in self.model}]
        for owner, namespace in itertools.product(self.owners, names):
            within = [a for a in self.model if a.owner == owner and namespace in (None, a.namespace)]
            self.check_listed(self.store.scan(owner, namespace), within)

    def check_listed(self, entries: Iterable[Entry], addresses: Iterable[Address]) -> None:
        found = [(entry.address, entry.nbytes) for entry in entries]
        assert len(found) == len(set(found)), "an object is listed twice"
        assert set(found) == {(address, self.model[address].nbytes) for address in addresses}

    def teardown(self) -> None:
        with closing(self.store):
            try:
                for known in self.model.values():
                    check_same(self.store, known.item)
            finally:
                for owner in self.owners:
                    self.store.delete_owner(owner)


class Machine(Hooks):
    """The state machine as one test."""

    def test_any_sequence_of_operations(self, tmp_path: Path) -> None:
        """Finds what no single operation shows: counts that drift, names that collide."""
        run_state_machine_as_test(
            lambda: StoreMachine(self, tmp_path),  # type: ignore[arg-type] # a function will do
            settings=settings(
                max_examples=self.examples,
                stateful_step_count=30,
                deadline=None,
                suppress_health_check=list(HealthCheck),
            ),
        )
