"""Claim: whatever happens in the tiers, a request has the bits of a cold run, or an error; and what was
forgotten stays so, nothing leaks, every token is counted once.

The state machine of `test_prefix_cache`, over a small host store and a second one below it. Copies run when
the test says so, in any order, late, or while another one is half done. Stores fail, lose, damage and swap
what they hold; engines restart, and two share the stores. At the end all objects of all stores are read and
compared with cold runs.

Controls: what the machine has found is put back, one by one. Other faults are in `test_tiers_faults`.
"""

from __future__ import annotations

import concurrent.futures
import functools
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import Phase
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, rule
from test_prefix_cache import (
    BOUNDARIES,
    CONFIG,
    DOMAINS,
    EXAMPLES,
    LONGEST,
    PAGES,
    CacheMachine,
    P,
    cold,
    domains,
    namespace,
    new_engine,
    numbers,
    play,
    prompts,
    stems,
)

from goldenkv.engine import EndPoints, Full, OneWindow, Periodic, ReloadPolicy, Zero
from goldenkv.engine.fetch import tail_name
from goldenkv.engine.offload import Offload
from goldenkv.engine.tiered import TieredCache
from goldenkv.prefix import Namespace, NamespaceInUse, PageKeys
from goldenkv.state import cells, compare
from goldenkv.tiers import mover as movers
from goldenkv.tiers import saver as savers
from goldenkv.tiers.disk import DiskStore
from goldenkv.tiers.epochs import Epochs
from goldenkv.tiers.errors import Corrupt, Expired, Foreign, Unavailable
from goldenkv.tiers.errors import Full as NoRoom
from goldenkv.tiers.faults import Fail, Fault, Faulty, Flip, Lose
from goldenkv.tiers.host import HostStore
from goldenkv.tiers.mover import Mover
from goldenkv.tiers.objects import Address, Head, Item, Kind
from goldenkv.tiers.shelf import Tier, Write
from goldenkv.tiers.staging import Staging
from goldenkv.tiers.store import Store, Wrapper

# Copies that run when the test says so ----------------------------------------------------------------------


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Job(Future):
    """A copy. It runs when somebody waits for it, or when the test says so."""

    def __init__(self, steps: Steps, call: Callable[[], Any]) -> None:
        super().__init__()
        self.steps, self.call, self.begun = steps, call, False

    def begin(self) -> bool:
        """It cannot be cancelled any more, if it was not before."""
        self.begun = self.begun or self.set_running_or_notify_cancel()
        return self.begun

    def result(self, timeout: float | None = None) -> Any:
        self.steps.wait_for(self, timeout)
        return super().result(0)


class Steps(Executor):
    """Workers of one process, stepped.

    Attributes:
        jobs: have not run.
        delays: how long the next ones take that somebody waits for, and whether they begin at once.
    """

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.jobs: list[Job] = []
        self.running: list[Job] = []
        self.delays: list[tuple[float, bool]] = []

    def submit(self, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Job:
        self.jobs.append(Job(self, functools.partial(call, *args, **kwargs)))
        return self.jobs[-1]

    def wait_for(self, job: Job, timeout: float | None) -> None:
        """The time passes that the job takes, or the timeout."""
        if job.done():
            return
        seconds, begins = self.delays.pop(0) if self.delays else (0.0, False)
        if job in self.running or (timeout is not None and seconds > timeout):
            assert timeout is not None, "waits for itself"
            self.clock.now += timeout
            if begins:
                job.begin()
            return
        self.clock.now += seconds
        self.run(job)

    def run(self, job: Job) -> None:
        """What a job raises ends the test."""
        self.jobs.remove(job)
        if job.begin():
            self.running.append(job)
            job.set_result(job.call())
            self.running.remove(job)

    def run_one(self, number: int) -> bool:
        """Runs any one that waits, if one does."""
        if not self.jobs:
            return False
        self.run(self.jobs[number % len(self.jobs)])
        return True

    def run_all(self) -> None:
        while self.jobs:
            self.run(self.jobs[0])


def stepped_wait(jobs: list[Job], timeout: float | None = None, return_when: str = "ALL_COMPLETED") -> Any:
    """In place of `concurrent.futures.wait`."""
    for job in jobs:
        job.steps.wait_for(job, timeout)
        if return_when == "FIRST_COMPLETED" and job.done():
            break
    return concurrent.futures.wait(jobs, 0, return_when)


class Crossed(Wrapper):
    """A store with moments before and after each call, in which something else can happen."""

    def __init__(self, inner: Store, crossed: Callable[[], None]) -> None:
        super().__init__(inner)
        self.crossed = crossed

    @contextmanager
    def _moments(self) -> Iterator[None]:
        self.crossed()
        yield
        self.crossed()

    def put(self, item: Item, ttl: float | None = None) -> int:
        with self._moments():
            return super().put(item, ttl)

    def get_into(self, address: Address, buffer: np.ndarray) -> Head:
        with self._moments():
            return super().get_into(address, buffer)

    def get(self, address: Address) -> Item:
        with self._moments():
            return super().get(address)

    def delete(self, addresses: Any) -> int:
        with self._moments():
            return super().delete(addresses)


class CheckedStaging(Staging):
    """Knows what was taken and not given back."""

    def __init__(self) -> None:
        super().__init__()
        self.out: dict[int, np.ndarray] = {}

    def take(self, nbytes: int) -> np.ndarray:
        buffer = super().take(nbytes)
        assert id(buffer) not in self.out, "memory was given to two"
        self.out[id(buffer)] = buffer
        return buffer

    def give(self, buffer: np.ndarray) -> None:
        if id(buffer) not in self._shares:
            assert self.out.pop(id(buffer), None) is not None, "memory was given back twice"
        super().give(buffer)


class Low(HostStore):
    name = "low"


# The machine ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Setup:
    """Tiers of an example. Objects have 1 to 6 KiB."""

    upper: Write
    lower: Write
    promote: bool
    on_disk: bool
    room: int
    in_flight: int
    patience: float
    paused: bool
    ttl: float | None


setups = st.builds(
    Setup,
    upper=st.sampled_from(Write),
    lower=st.sampled_from([Write.THROUGH, Write.BACK]),
    promote=st.booleans(),
    on_disk=st.booleans(),
    room=st.sampled_from([0, 16 << 10, 32 << 10, 32 << 10, 96 << 10]),
    in_flight=st.sampled_from([3 << 10, 1 << 20, 1 << 20, 1 << 20]),
    patience=st.sampled_from([0.0, 1.0, 1.0]),
    paused=st.booleans(),
    ttl=st.sampled_from([None, None, None, 30.0]),
)
MEMORY = "/dev/shm" if os.path.isdir("/dev/shm") else None
"""A folder that does not wait for a disk: what outlives a crash is tested elsewhere."""
PROCESS = ("engine", "cache", "mover", "steps", "live", "prompt", "ran", "counters")
RELOADS = [Full(), Full(), Periodic(2 * P), *[EndPoints()] * 3, Zero(), OneWindow(), OneWindow()]
MEANWHILE = ["copy", "forget", "evict", "ask"]
TROUBLE: list[Fault | str] = [
    Fail("put", Unavailable),
    Fail("put", NoRoom),
    *[Fail("get", Unavailable)] * 3,
    Fail("exists", Unavailable),
    Fail("delete", Unavailable),
    Lose(),
    Flip(bit=300),
    "down",
    *["damage"] * 4,
    *["swap"] * 3,
    "emptied",
    *["a component"] * 2,
    *["late"] * 2,
]
PLACES = [0, 8, 60, 200, 700, 1000, -2, -1]
"""Bytes of an object in which a bit may change: of its head those before 700."""
COMPONENTS = sorted({cell.component.name for cell in cells(CONFIG)})
CELLS = {cell.name: cell for cell in cells(CONFIG)}
kinds = st.integers(0, len(TROUBLE) - 1)
stores = st.sampled_from([[0], [1], [0, 1]])
places = st.integers(0, 7)


class TierMachine(CacheMachine):
    """What `CacheMachine` does, in one of two processes over the same stores, and what befalls the stores."""

    fixed: ClassVar[dict[str, Any]] = {}
    """Of the setup."""
    troubles: ClassVar[list[Fault | str]] = TROUBLE

    @initialize(
        policy=st.sampled_from(RELOADS), first=st.lists(prompts, min_size=1, max_size=2), setup=setups
    )
    def start(self, policy: ReloadPolicy, first: list[list[int]], setup: Setup) -> None:
        self.setup = setup = replace(setup, **self.fixed)
        self.clock, self.folder = Clock(), tempfile.TemporaryDirectory(dir=MEMORY)
        upper = HostStore(setup.room, block=512, copy=self.copy_in_halves, clock=self.clock)
        self.faulty = [Faulty(upper), Faulty(self.open_lower())]
        a, _, docs = (namespace(domain) for domain in DOMAINS)
        self.namespaces = [a, replace(a, layout="other rows"), docs]  # the first two have one owner
        self.published: list[set[tuple[int, ...]]] = [set() for _ in self.namespaces]
        self.ever: list[set[tuple[int, ...]]] = [set() for _ in self.namespaces]
        self.other: dict[str, Any] | None = None
        self.workers_alone = self.broken = self.late = False
        self.paused = setup.paused
        self.damaged = self.forgotten = 0
        self.meddled = setup.ttl is not None  # stores may have lost what they took
        self.failing: list[str] = []  # components whose next copies fail
        self.pending: list[tuple[int, Callable[[], bool]]] = []
        self.boot(policy)
        for prompt in first:
            self.ask(0, prompt, [1])

    draft = switch = None  # drafts never meet a tier; other policies come with other processes

    def open_lower(self) -> Store:
        if self.setup.on_disk:
            return DiskStore(self.folder.name, 48 << 10, clock=self.clock)
        return Low(48 << 10, block=512, copy=self.copy_in_halves, clock=self.clock)

    def boot(self, policy: ReloadPolicy) -> None:
        """A new process over the stores."""
        setup = self.setup
        self.engine, self.steps = new_engine(), Steps(self.clock)
        upper, lower = (Crossed(store, self.crossed) for store in self.faulty)
        self.mover = Mover(
            [
                Tier(store=upper, write=setup.upper, promote=setup.promote, ttl=setup.ttl),
                Tier(store=lower, write=setup.lower, ttl=setup.ttl),
            ],
            P,
            workers=self.steps,
            in_flight=setup.in_flight,
            patience=setup.patience,
            clock=self.clock,
        )
        self.mover.up._staging = CheckedStaging()
        self.cache = TieredCache(
            self.engine, self.mover, policy, deadline=lambda tokens: 1.0, copy=self.copy_component
        )
        self.live = []
        self.prompt = self.ran = 0
        self.counters = asdict(self.cache.metrics)

    # Seams --------------------------------------------------------------------------------------------------

    def copy_in_halves(self, to: np.ndarray, source: np.ndarray) -> None:
        half = len(to) // 2
        to[:half] = source[:half]
        self.crossed()
        to[half:] = source[half:]

    def copy_component(self, name: str, to: np.ndarray, source: np.ndarray) -> None:
        if self.failing and len(to) and name.endswith(f".{self.failing[0]}"):
            self.failing.pop(0)
            self.reached["a component failed"] += 1
            to[: len(to) // 2] = source[: len(to) // 2]
            raise Corrupt("one component alone did not arrive")
        np.copyto(to, source)

    def crossed(self) -> None:
        """A moment within a copy: what is to happen meanwhile may happen now."""
        if self.pending and self.steps.running:
            (after, action), *later = self.pending
            if after:
                self.pending[0] = (after - 1, action)
                return
            self.pending = []
            self.pending = later if action() else [(0, action), *later]

    # Time ---------------------------------------------------------------------------------------------------

    @rule(number=places, count=st.integers(1, 4))
    def work(self, number: int, count: int) -> None:
        """Some copies run, in any order, while nobody waits."""
        self.workers_alone = True
        for _ in range(count):
            self.steps.run_one(number)
        self.workers_alone = False

    def all_copies_run(self) -> None:
        self.workers_alone = True
        self.steps.run_all()
        self.workers_alone = False

    @rule(seconds=st.sampled_from([0.5, 2.0, 40.0]), paused=st.booleans(), mended=st.booleans())
    def wait(self, seconds: float, paused: bool, mended: bool) -> None:
        """From then on copies wait until somebody needs them; or they run as soon as they can."""
        self.clock.now += seconds
        self.paused = paused
        if mended:
            self.mend()

    @rule(after=places, seconds=st.sampled_from([0.4, 1.5, 11.0]), begins=st.booleans())
    def delay(self, after: int, seconds: float, begins: bool) -> None:
        """One of the next copies that somebody waits for takes long."""
        self.steps.delays = [*[(0.0, False)] * after, (seconds, begins)]

    @rule(after=places, what=st.sampled_from(MEANWHILE), number=places, domain=domains, prompt=prompts)
    def meanwhile(self, after: int, what: str, number: int, domain: int, prompt: list[int]) -> None:
        """In the middle of a copy another one runs, or something happens to the cache."""

        def action() -> bool:
            """Whether it could happen."""
            if what == "copy":
                ran = self.steps.run_one(number)
                self.reached["copy within a copy"] += ran
                return ran
            if not self.workers_alone:
                return False  # the cache is waiting
            self.reached[f"{what} within a copy"] += 1
            self.workers_alone = False
            if what == "forget":
                self.forget(domain, number % 2 == 0)
            elif what == "evict":
                self.cache.evict(pages=PAGES, boundaries=BOUNDARIES)
            else:
                self.ask(domain, self.turn(domain, prompt, number), [1])
            self.workers_alone = True
            return True

        self.pending.append((after, action))

    # Requests -----------------------------------------------------------------------------------------------

    @rule(
        domain=domains,
        prompt=prompts,
        number=places,
        stores=stores,
        kind=kinds,
        nth=places,
    )
    def come_back(
        self, domain: int, prompt: list[int], number: int, stores: list[int], kind: int, nth: int
    ) -> None:
        """A request whose prefix has left the device; something may happen to it meanwhile."""
        if number:  # mostly all works well until now
            self.mend()
        self.clear()
        if nth in (1, 2, 3):
            self.trouble(stores, kind, nth, number)
        known = sorted(self.published[domain], key=len)[-3:]
        if known:
            told = known[number % len(known)]
            prompt = [*told[: len(told) // P * P if nth % 2 else LONGEST - 2], 1, 2]
        self.ask(domain, prompt, [2])

    and_again = come_back

    @rule(domain=domains, prompt=prompts, number=numbers)
    def prepare(self, domain: int, prompt: list[int], number: int) -> None:
        """What will be asked for comes up, or all that is here goes down."""
        if number > 1:
            self.cache.prefetch(self.namespaces[domain], self.turn(domain, prompt, number))
        else:
            self.mend()
            self.flush()

    def flush(self) -> None:
        """Afterwards all is on some tier, unless a tier was full."""
        self.late_copies_end()
        before = self.tier_counters()
        self.cache.flush()
        if before == self.tier_counters():
            assert self.on_tiers(self.held()), "flushed, and on no tier"
            self.reached["flushed"] += 1

    def clear(self) -> None:
        """All leaves the device, and gets onto some tier, unless one was full or lost what it took."""
        self.late_copies_end()  # a copy that is refused stands in the way of the next one
        held, before = self.held(), self.tier_counters()
        self.cache.evict(pages=PAGES, boundaries=BOUNDARIES)
        self.all_copies_run()
        if before == self.tier_counters() and not self.broken and not self.meddled:
            left = [address for address in held if address not in self.cache._offload._held]
            assert self.on_tiers(left), "left the device, and is on no tier"
            self.reached["cleared"] += bool(left)

    def held(self) -> list[Address]:
        """What is on the device."""
        names = [*self.cache._offload._pages.values(), *self.cache._offload._boundaries.values()]
        return [Offload.address(name) for name in names]

    def on_tiers(self, addresses: list[Address]) -> bool:
        there = [store.inner.exists(addresses) for store in self.faulty]
        return all(map(any, zip(*there, strict=True)))

    def tier_counters(self) -> list[Any]:
        """What tells that a tier was full, that a copy was too late, or that something was forgotten."""
        found = self.mover.metrics.to_json()
        evicted = {name: count for name, count in found["evicted_objects"].items() if name != "device"}
        return [evicted, found["failures"], found["dropped_stores"], self.forgotten]

    # Forgetting ---------------------------------------------------------------------------------------------

    @rule(domain=domains, owner=st.booleans(), slow=st.booleans())
    def forget(self, domain: int, owner: bool, slow: bool = False) -> None:
        """Of an owner or of a namespace, while the copies under way take longer than is waited for them."""
        if slow:
            self.steps.delays = [(11.0, True)] * len(self.steps.jobs)
        if owner:
            both = [2] if domain == 2 else [0, 1]
            self.forget_all(both, lambda: self.cache.forget_owner(self.namespaces[domain].domain))
        else:
            self.forget_all([domain], lambda: self.cache.forget(self.namespaces[domain]))

    def forget_all(self, those: list[int], forget: Callable[[], None]) -> None:
        used = {live.domain for live in self.live if live.request.lock is not None} & {*those}
        broken = self.broken
        self.forgotten += 1
        try:
            forget()
        except NamespaceInUse:
            assert used or self.refusals, "nobody reuses any of it"
            return
        except Unavailable as error:
            self.reached["forgotten while a copy is under way"] += not broken
            assert broken or "(copies under way)" in str(error), "all stores did it"
            if broken:
                return
            self.late = True  # its copies are refused when they come
        assert not used or self.refusals, "forgot what a request reuses"
        if self.other is None:  # the other process may still have it, and bring it down again
            for domain in those:
                self.ever[domain] |= self.published[domain]
                self.published[domain] = set()

    # What befalls stores ------------------------------------------------------------------------------------

    @rule(stores=stores, kind=kinds, nth=st.integers(1, 3), number=places)
    def trouble(self, stores: list[int], kind: int, nth: int, number: int) -> None:
        self.late_copies_end()
        what = self.troubles[kind % len(self.troubles)]
        self.meddled = self.meddled or what in ("damage", "swap", "emptied", Lose())
        self.broken = self.broken or what == "down" or isinstance(what, Fault)
        if what == "late":  # not the look-ups, but one of the loads
            self.steps.delays = [*[(0.0, False)] * (1 + nth), (1.5, number % 2 == 0)]
        if what == "a component":
            self.failing = [COMPONENTS[number % len(COMPONENTS)]] * nth
        for store in (self.faulty[store] for store in stores):
            if isinstance(what, Fault):
                store.add(what, nth)
            elif what == "down":
                store.down()
            entries = sorted(store.inner.scan(), key=lambda entry: entry.nbytes)
            there = [entry.address for entry in entries]
            if what == "emptied":
                store.inner.delete(there)
            self.damaged += what in ("damage", "swap")
            for place in range(number % max(1, len(there)), len(there), 3):
                if what == "damage":
                    damage(store.inner, there[place], PLACES[number])
                elif what == "swap":
                    swap(store.inner, there[place], there[place - 1])

    def late_copies_end(self) -> None:
        """What is refused can only be taken out again while the stores work."""
        if self.late:
            self.all_copies_run()
        self.late = False

    def mend(self) -> None:
        for store in self.faulty:
            store.clear()
            store.up()
        self.broken, self.failing = False, []
        self.clock.now += 2.0  # until they are asked again

    # Processes ----------------------------------------------------------------------------------------------

    @rule(policy=st.sampled_from(RELOADS), ends=st.booleans())
    def another_process(self, policy: ReloadPolicy, ends: bool) -> None:
        """The next steps are those of another process; this one waits, or it ends wherever it stands."""
        self.late_copies_end()
        other, self.other = self.other, None
        if ends:
            self.note()
            self.reached["ended"] += 1
        else:
            self.other = {name: getattr(self, name) for name in PROCESS}
            self.meddled = True
        if other is not None:
            vars(self).update(other)
            return
        if ends and self.setup.on_disk:
            self.faulty[1].inner.close()
            self.faulty[1].inner = self.open_lower()
        self.boot(policy)

    # Always -------------------------------------------------------------------------------------------------

    @invariant()
    def copies_leave_nothing_behind(self) -> None:
        if not hasattr(self, "live"):
            return
        if not self.paused:
            self.all_copies_run()
        if self.paused or self.steps.jobs:
            return
        self.late = False
        self.cache._offload.poll()
        assert not self.mover.down.futures() and not self.mover.up.futures(), "copies under way"
        assert not self.mover.up._staging.out, "memory that nobody gave back"
        for shelf in self.mover._shelves:
            assert not shelf._residents._pins, "pinned for ever"
        for store in self.faulty:
            if isinstance(store.inner, HostStore):
                blocks = [b for held in store.inner._entries.values() for b in held.memory]
                total = len(store.inner._arena) // store.inner._block
                assert sorted(blocks + store.inner._blocks) == list(range(total)), "blocks"

    @invariant()
    def what_is_forgotten_stays_so(self) -> None:
        if not hasattr(self, "live") or self.steps.jobs or self.other is not None:
            return
        for each, known in zip(self.namespaces, self.published, strict=True):
            for store in self.faulty:
                if not known:
                    found = list(store.inner.scan(each.owner(), each.digest()))
                    assert not found, "a tier has what was forgotten"

    @invariant()
    def sources_add_up(self) -> None:
        if not hasattr(self, "live"):
            return
        m, sources = self.cache.metrics, self.mover.metrics.sources()
        for name in ("computed", "replayed", "cancelled"):
            assert sources.pop(name, 0) == getattr(m, name), f"tokens that are {name}"
        assert sum(sources.values()) == m.reused, "tokens that are reused"
        assert {*sources} <= {"device", *self.mover.names}, "sources"

    @invariant()
    def what_is_cached_has_its_name(self) -> None:
        if hasattr(self, "live"):
            offload, holdings = self.cache._offload, self.cache.tree.holdings
            assert offload._pages.keys() == holdings.pages.all(), "pages with names"
            assert offload._boundaries.keys() == holdings.handles.all(), "states with names"
            names = [*offload._pages.values(), *offload._boundaries.values()]
            assert offload._saved <= offload._held == {Offload.address(name) for name in names}, "saved"

    # The end ------------------------------------------------------------------------------------------------

    def teardown(self) -> None:
        """All that tiers hold is compared with cold runs; then all is forgotten, and nothing may remain."""
        if not hasattr(self, "live"):
            return
        try:
            if sys.exception() is None:
                self.end()
        finally:
            self.faulty[1].inner.close()
            self.folder.cleanup()

    def end(self) -> None:
        self.mend()
        self.paused, self.pending = False, []
        for each in range(2 if self.other else 1):
            if each:
                self.another_process(Full(), False)
            self.steps.delays = []
            self.copies_leave_nothing_behind()
        self.audit_tiers()
        self.note()
        super().teardown()
        if self.other:
            self.another_process(Full(), False)
            self.note()
            super().teardown()
        for store in self.faulty:
            assert not list(store.inner.scan()), "objects remain"

    def note(self) -> None:
        """What has happened, so that it can be seen that everything does."""
        found = self.mover.metrics.to_json()
        for reason, count in found["fallbacks"].items():
            self.reached[f"fell back: {reason}"] += count
        for place, name in enumerate(self.mover.names):
            for what in ("promotions", "demotions", "evicted_objects", "prompt_tokens"):
                self.reached[f"{what}, tier {place}"] += found[what].get(name, 0)
        self.reached["dropped"] += sum(found["dropped_stores"].values())

    def audit_tiers(self) -> None:
        known: dict[Address, tuple[Kind, tuple[int, ...]]] = {}
        for each, now, before in zip(self.namespaces, self.published, self.ever, strict=True):
            for told in now | before:
                known |= objects_of(each, told)
        for store in self.faulty:
            for entry in list(store.inner.scan()):
                try:
                    item = store.inner.get(entry.address)
                except (Expired, Corrupt, Foreign) as error:
                    assert self.damaged or isinstance(error, Expired), "an object cannot be read"
                    continue
                label = item.label
                assert entry.address in known, "an object that nobody published"
                made = known[entry.address]
                assert label.address == entry.address, "another object's label"
                assert (label.kind, label.position) == (made[0], len(made[1])), "another label"
                wrong = self.differing_object(item, made[1])
                assert not wrong, f"stored with other bits than cold: {sorted(wrong)}"
                self.reached["audited objects"] += 1

    def differing_object(self, item: Item, told: tuple[int, ...]) -> set[str]:
        """Which rows of an object are not those of a cold run."""
        expected, start = cold(told), (len(told) - 1) // P * P
        rows = {}
        for name in item.arrays():
            first = (
                0 if item.label.kind is Kind.BOUNDARY else start // CONFIG.compress_ratios[CELLS[name].layer]
            )
            rows[name] = expected[name][first:]
        same = compare(item.arrays(), rows).by_name
        return {name for name, ok in same.items() if not ok.all()}


@functools.lru_cache(maxsize=4096)
def objects_of(namespace: Namespace, told: tuple[int, ...]) -> dict[Address, tuple[Kind, tuple[int, ...]]]:
    """Kind and tokens of every object that a sequence can leave."""
    keys, scope = PageKeys(namespace, told), (namespace.owner(), namespace.digest())
    found = {}
    for position in range(1, len(told) + 1):
        known = told[:position]
        found[Address(*scope, keys.boundary(position))] = Kind.BOUNDARY, known
        if position % P:
            found[Address(*scope, tail_name(namespace, keys, position).key)] = Kind.TAIL, known
        else:
            found[Address(*scope, keys.pages[position // P - 1])] = Kind.PAGE, known
    return found


def damage(store: Store, address: Address, at: int) -> None:
    """A bit of what is stored changes, in the head or in the payload."""
    if isinstance(store, HostStore):
        entry = store._entries[address]
        pieces = store._pieces(entry)
        if 0 <= at < 700 or not entry.payload:
            entry.head = flipped(entry.head, at)
        else:
            pieces[0][at % len(pieces[0])] ^= 1
    else:
        path = Path(store.places.object(address))
        path.write_bytes(flipped(path.read_bytes(), at))


def flipped(content: bytes, at: int) -> bytes:
    changed = bytearray(content)
    changed[at % len(changed)] ^= 1
    return bytes(changed)


def swap(store: Store, one: Address, two: Address) -> None:
    """Two stored objects change places."""
    if isinstance(store, HostStore):
        entries = store._entries
        entries[one], entries[two] = entries[two], entries[one]
    else:
        paths = [Path(store.places.object(address)) for address in (one, two)]
        contents = [path.read_bytes() for path in paths]
        for path, content in zip(paths, reversed(contents), strict=True):
            path.write_bytes(content)


def step(patch: pytest.MonkeyPatch) -> None:
    """Whoever waits for a copy makes it run."""
    for module in (movers, savers):
        patch.setattr(module, "wait", stepped_wait)


@pytest.fixture(autouse=True)
def _stepped(monkeypatch: pytest.MonkeyPatch) -> None:
    step(monkeypatch)


EVERYTHING = {
    *("boundary", "replay", "tail", "evicted", "audited", "audited objects", "ended", "flushed", "cleared"),
    *("prompt_tokens, tier 0", "prompt_tokens, tier 1", "promotions, tier 0"),
    *("evicted_objects, tier 0", "evicted_objects, tier 1", "copy within a copy", "ask within a copy"),
    *("forget within a copy", "forgotten while a copy is under way"),
}
"""What must have happened. That the rest happens too is seen by the faults that are found by it."""


def test_every_answer_is_cold() -> None:
    reached = play(TierMachine, Phase.shrink, max_examples=EXAMPLES * 3 // 2)
    assert not {name for name in EVERYTHING if not reached[name]}, reached
    reasons = {name for name, count in reached.items() if count and name.startswith("fell back")}
    assert len(reasons) >= 3, reached


# What the machine has found ---------------------------------------------------------------------------------


def played(**setup: Any) -> TierMachine:
    """A machine whose steps are written down, with one sequence of two pages on the device."""
    base = dict(upper=Write.THROUGH, lower=Write.BACK, promote=True, on_disk=False, room=96 << 10)
    more = dict(in_flight=1 << 20, patience=0.0, paused=True, ttl=None)
    machine = TierMachine()
    machine.start(Full(), [stems()[0][: 2 * P]], Setup(**base | more | setup))
    machine.all_copies_run()
    return machine


def forgets_while_loads_wait() -> None:
    """A load that runs while it is waited for reads what is deleted next, and begins a promotion of it."""
    machine = played(upper=Write.BACK, lower=Write.THROUGH)
    machine.cache.evict(pages=PAGES, boundaries=BOUNDARIES)
    machine.cache.prefetch(machine.namespaces[0], stems()[0][: 2 * P])
    machine.steps.run_one(0)
    machine.forget(0, False)
    machine.all_copies_run()
    machine.what_is_forgotten_stays_so()
    machine.teardown()


def forgets_at_every_moment() -> None:
    """Copies make room, so that objects of another namespace move down; within them that is forgotten."""
    forgotten = 0
    for moment in range(30):
        machine = played(room=9 << 10)
        machine.begin(2, stems()[2][: P + 1])
        machine.run(0, LONGEST)
        machine.meanwhile(moment, "forget", 1, 0, [])
        machine.all_copies_run()
        forgotten += machine.forgotten
        machine.what_is_forgotten_stays_so()
        machine.teardown()
    assert forgotten > 8, "the copies have no moments"


def flushes_what_others_took_out() -> None:
    """That a tier took something is not to say that it has it."""
    machine = played()
    for store in machine.faulty:
        store.inner.delete([entry.address for entry in store.inner.scan()])
    machine.flush()
    machine.teardown()


def believing_flush(self: Offload) -> None:
    self._save(self._pages, self._boundaries, leaving=True, must=True)
    self.mover.drain()


def waits_once(self: Mover, timeout: float | None = None) -> bool:
    """Not for what the copies begin."""
    return not stepped_wait([*self.down.futures(), *self.up.futures()], timeout).not_done


def test_loads_that_are_waited_for_bring_nothing_back(monkeypatch: pytest.MonkeyPatch) -> None:
    forgets_while_loads_wait()
    monkeypatch.setattr(Mover, "drain", waits_once)
    forgets_while_loads_wait()  # either of two is enough
    monkeypatch.setattr(Epochs, "late", lambda *_: False)
    with pytest.raises(AssertionError, match="a tier has what was forgotten"):
        forgets_while_loads_wait()


def test_what_moves_down_brings_nothing_back(monkeypatch: pytest.MonkeyPatch) -> None:
    forgets_at_every_moment()
    monkeypatch.setattr(Epochs, "late", lambda *_: False)
    with pytest.raises(AssertionError, match="a tier has what was forgotten"):
        forgets_at_every_moment()


def test_a_flush_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    flushes_what_others_took_out()
    monkeypatch.setattr(Offload, "flush", believing_flush)
    with pytest.raises(AssertionError, match="flushed, and on no tier"):
        flushes_what_others_took_out()
