"""From the tiers up to the device: of one prompt, the pages and the boundary state that can be used.

Pages must come without a gap, and of the boundary states one must come that the reload policy can start from.
What does not come in time, or cannot be used, makes the hit shorter, or starts it further back, as far as
what did come allows. Nothing is written on the device before all that a plan needs has come.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..prefix import Match, Namespace, PageKeys
from ..state import Rows
from ..state.pages import CapacityError, Lease
from ..tiers.errors import StoreError
from ..tiers.loader import Loaded
from ..tiers.objects import Address, Kind
from ..tiers.transfer import unpack
from .offload import Name, Offload
from .policies import Plan, ReloadPolicy

REMOTE = -1
"""In place of the handle of a boundary state that is on no device yet."""


@dataclass(slots=True)
class Fetched:
    """What came up for a prompt, written to the device.

    Attributes:
        length: tokens whose pages are there now, those that were there before included.
        pages: what came, in order, behind the pages that were there. They are held once, for the caller.
        boundary: position and handle of a boundary state that came, or None.
        tiers: page -> where it was found.
    """

    length: int
    pages: list[int]
    boundary: tuple[int, int] | None
    tiers: dict[int, str]


class Fetch:
    """One prompt on its way up.

    Args:
        offload: the way to the tiers.
        namespace, keys: of the prompt.
        length: tokens of it that may be reused.
        match: what is on the device. The caller has locked it.
        policy: says which boundary state to start from.
        room_for_boundary: makes room for a boundary state if it can, and says whether there is any.
        seconds: how long it may take, given the tokens that would not be computed.
    """

    def __init__(
        self,
        offload: Offload,
        namespace: Namespace,
        keys: PageKeys,
        length: int,
        match: Match,
        policy: ReloadPolicy,
        room_for_boundary: Callable[[], bool],
        seconds: Callable[[int], float],
    ) -> None:
        self._offload, self._engine, self._mover = offload, offload.engine, offload.mover
        self._namespace, self._keys, self._length, self._match = namespace, keys, length, match
        self._policy, self._room_for_boundary = policy, room_for_boundary
        self._deadline = self._mover.now() + seconds(length - match.length)
        self._size = self._engine.geometry.page_size
        self._held = match.length // self._size
        self._here = dict(match.boundaries)
        end = match.length if match.tail is None else match.tail.position
        self._best = self._plan(end, self._here)
        self._pinned: list[Address] = []
        self._rows: dict[bytes, Rows] = {}  # by key
        self._loaded: dict[bytes, Loaded] = {}

    def run(self) -> Fetched | None:
        """Brings up what the policy can use and the device lacks; None if that is nothing.

        Every failure is counted with its reason.
        """
        leases: list[Lease] = []
        found = None
        try:
            reach, states = self._find()
            tails = self._find_tails(reach) if self._policy.between_pages else []
            leases = self._leases(reach - self._held + bool(tails))
            plan = self._load(min(reach, self._held + len(leases)), states, tails, len(leases))
            found = None if plan is None else self._write(plan, leases)
        finally:
            self._mover.up.unpin(self._pinned)
            self._mover.up.release(list(self._loaded.values()))
            used = 0 if found is None else len(found.pages)
            self._engine.drop_pages([lease.page for lease in leases[used:]])
        return found

    # Names ---------------------------------------------------------------------------------------------

    def _page(self, index: int) -> Name:
        return Name(self._namespace, self._keys.pages[index], Kind.PAGE, (index + 1) * self._size)

    def _state(self, position: int) -> Name:
        return Name(self._namespace, self._keys.boundary(position), Kind.BOUNDARY, position)

    def _tail(self, position: int) -> Name:
        return tail_name(self._namespace, self._keys, position)

    # Looking -------------------------------------------------------------------------------------------

    def _plan(self, length: int, boundaries: dict[int, int]) -> Plan | None:
        usable = sorted((p, handle) for p, handle in boundaries.items() if p <= length)
        return self._policy.plan(self._engine.config, length, usable)

    def _find(self) -> tuple[int, list[int]]:
        """How many pages there are in all, without a gap, and at which of their ends a boundary state is."""
        last = self._length // self._size
        known = max((p for p in self._here if p <= self._match.length), default=0) // self._size
        pages = [self._page(i) for i in range(self._held, last)]
        states = [self._state(i * self._size) for i in range(known + 1, last + 1)]
        there = self._ask([*pages, *states])
        reach = self._held
        while reach < last and there[reach - self._held]:
            reach += 1
        found = [
            name.position
            for name, has in zip(states, there[len(pages) :], strict=True)
            if has and name.position <= reach * self._size
        ]
        return reach, found

    def _find_tails(self, reach: int) -> list[int]:
        """Positions within the page behind the last whole one at which a sequence ended."""
        begin = reach * self._size
        states = [self._state(p) for p in range(begin + 1, min(self._length, begin + self._size - 1) + 1)]
        found = [name.position for name, has in zip(states, self._ask(states), strict=True) if has]
        self._pin([self._tail(position) for position in found])
        return found

    def _ask(self, names: list[Name]) -> list[bool]:
        return self._mover.up.find(self._pin(names), self._deadline)

    def _pin(self, names: list[Name]) -> list[Address]:
        """They stay where they are until the end: room on the device is made by pushing others down."""
        addresses = [self._offload.address(name) for name in names]
        self._mover.up.pin(addresses)
        self._pinned += addresses
        return addresses

    def _leases(self, count: int) -> list[Lease]:
        """Pages to load into; fewer if there is no room for all."""
        try:
            return self._engine.take_pages(count)
        except CapacityError:
            self._mover.metrics.fell_back("no room")
            return self._engine.take_pages(self._engine.free_pages)

    # Loading -------------------------------------------------------------------------------------------

    def _load(self, reach: int, states: list[int], tails: list[int], room: int) -> Plan | None:
        """Loads what a plan needs; without what failed there may be another plan."""
        states, tails = [*states], [*tails]
        while True:
            length, remote = reach * self._size, dict.fromkeys(states, REMOTE)
            if tails and reach - self._held < room:
                length = tails[-1]
                remote[length] = REMOTE
            plan = self._plan(length, remote | self._here)
            if plan is None or (self._best is not None and plan.start <= self._best.start):
                return None  # it would spare nothing
            wanted = self._needs(plan)
            if plan.boundary == REMOTE and not self._room_for_boundary():
                self._mover.metrics.fell_back("no room")
                states, tails = [], []
                continue
            missing = [name for name in wanted if name.key not in self._rows]
            if not missing:
                return plan
            failed = self._bring(missing)
            lost = {name.position for name in failed if name.kind is not Kind.PAGE}
            gaps = [name.position // self._size - 1 for name in failed if name.kind is Kind.PAGE]
            reach = min([reach, *gaps])
            states = [p for p in states if p not in lost and p <= reach * self._size]
            tails = [p for p in tails if p not in lost and p // self._size == reach]

    def _needs(self, plan: Plan) -> list[Name]:
        """What must come for a plan."""
        names = [self._page(i) for i in range(self._held, plan.length // self._size)]
        if plan.length % self._size:
            names.append(self._tail(plan.length))
        if plan.boundary == REMOTE:
            names.append(self._state(plan.start))
        return names

    def _bring(self, names: list[Name]) -> list[Name]:
        """Loads objects; returns those that did not come."""
        failed = []
        found = self._mover.up.load([self._offload.label(name) for name in names], self._deadline)
        for name, loaded in zip(names, found, strict=True):
            try:
                if isinstance(loaded, StoreError):
                    raise loaded
                self._loaded[name.key] = loaded
                self._rows[name.key] = unpack(loaded.item, self._offload.copy)
            except StoreError as error:
                self._mover.metrics.fell_back(error.reason)
                failed.append(name)
        return failed

    def _write(self, plan: Plan, leases: list[Lease]) -> Fetched:
        """Writes what a plan needs to the device."""
        names = self._needs(plan)
        boundary = names.pop() if plan.boundary == REMOTE else None
        used = leases[: len(names)]
        self._engine.write_pages(used, [self._rows[name.key] for name in names])
        state = None
        if boundary is not None:
            state = boundary.position, self._engine.put_boundary(boundary.position, self._rows[boundary.key])
        self._offload.came_up([*names, *([boundary] if boundary else [])])
        pages = [lease.page for lease in used]
        tiers = {page: self._loaded[name.key].tier for page, name in zip(pages, names, strict=True)}
        return Fetched(max(plan.length, self._match.length), pages, state, tiers)


def tail_name(namespace: Namespace, keys: PageKeys, position: int) -> Name:
    """Of the partial page that ends at a position, as it was then."""
    key = keys.component(keys.boundary(position), "tail")
    return Name(namespace, key, Kind.TAIL, position)
