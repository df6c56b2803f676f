"""Replays of selections on a device that holds fewer pages than the context has.

A device that holds fewer pages than the context has must fetch what a query selects and is not there.
Attention gathers page after page, so a replay is one sequence of references; the indexer has chosen before
that, so no page leaves that is still to be gathered in the same step, unless nothing else is there. New pages
come into being on the device.
The strategies are those of `prefix`; Belady's rule, which knows the future, is the best that any policy
can do which fetches a page only when it is needed.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from ..prefix import SpeculativePrefetch, Strategy, Victim
from .record import Recording, RecordingError


@dataclass(frozen=True, slots=True)
class Step:
    """One query: pages that come into being before it, and pages that it needs, the most selected first."""

    created: tuple[int, ...]
    needed: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Residency:
    """What a replay counted.

    Attributes:
        needed: pages that queries needed.
        hits: of these, on the device already.
        moved: pages fetched, on demand or ahead of it.
    """

    needed: int
    hits: int
    moved: int

    @property
    def hit_rate(self) -> float:
        return self.hits / self.needed if self.needed else 0.0


def page_steps(recording: Recording, page_tokens: int, since: int = 0) -> list[Step]:
    """The pages that each query needs, in any CSA layer: a page holds the entries of all layers.

    Args:
        recording: of one sequence.
        page_tokens: a multiple of the recording's ratio.
        since: the first query; pages from before it are created in its step.

    Raises:
        RecordingError: a page size or a first query that does not fit.
    """
    per_page, rest = divmod(page_tokens, recording.ratio)
    if page_tokens < 1 or rest:
        raise RecordingError(
            f"{page_tokens=} must be a positive multiple of {recording.ratio} (tokens an entry)"
        )
    if not 0 <= since < len(recording.tokens):
        raise RecordingError(f"{since=} must lie in 0 .. {len(recording.tokens) - 1} (queries)")

    steps, made = [], 0
    for query in range(since, len(recording.tokens)):
        pages = -(-int(recording.visible[query]) // per_page)
        ids = recording.ids[:, query]
        found, counts = np.unique(ids[ids >= 0] // per_page, return_counts=True)
        needed = found[np.argsort(-counts, kind="stable")]
        steps.append(Step(tuple(range(made, pages)), tuple(needed.tolist())))
        made = max(made, pages)
    return steps


class Policy(Protocol):
    """Which page leaves. Pages that are told of are resident unless `victim` gave them up."""

    def ahead(self, step: int) -> int:
        """Before a step: pages that it fetches ahead, kept beside the resident ones. How many moved."""

    def has(self, page: int) -> bool:
        """Whether a page that is not resident was fetched ahead."""

    def inserted(self, page: int, step: int, place: int) -> None:
        """It became resident: created or fetched. `place` counts references over the whole replay."""

    def used(self, page: int, step: int, place: int) -> None:
        """A query used it; it is resident."""

    def stepped(self, step: int, needed: Sequence[int]) -> None:
        """A step has ended."""

    def victim(self, resident: Sequence[int]) -> int:
        """One of them leaves: those that may."""


def replay(steps: Sequence[Step], capacity: int, policy: Policy, *, since: int = 0) -> Residency:
    """Runs the references through a device of so many resident pages.

    Args:
        steps: of `page_steps`.
        capacity: at least 1 page.
        policy: fresh.
        since: the first step that is counted.
    """
    if capacity < 1:
        raise RecordingError(f"{capacity=} must be at least 1 page")
    resident: dict[int, None] = {}  # in the order of arrival
    needed = hits = moved = place = 0

    def bring(page: int, number: int, coming: Collection[int]) -> None:
        if len(resident) >= capacity:
            free = [other for other in resident if other not in coming]
            del resident[policy.victim(free or list(resident))]
        resident[page] = None
        policy.inserted(page, number, place)

    for number, step in enumerate(steps):
        counts = number >= since
        moved += policy.ahead(number) * counts
        for page in step.created:
            bring(page, number, ())
            place += 1
        coming = set(step.needed)
        for page in step.needed:
            coming.discard(page)
            found = page in resident
            early = not found and policy.has(page)
            needed += counts
            hits += (found or early) * counts
            moved += (not found and not early) * counts
            if not found:
                bring(page, number, coming)
            policy.used(page, number, place)
            place += 1
        policy.stepped(number, step.needed)
    return Residency(needed, hits, moved)


class _Demand:
    """Fetches nothing ahead."""

    def ahead(self, step: int) -> int:
        return 0

    def has(self, page: int) -> bool:
        return False

    def inserted(self, page: int, step: int, place: int) -> None:
        pass

    def used(self, page: int, step: int, place: int) -> None:
        pass

    def stepped(self, step: int, needed: Sequence[int]) -> None:
        pass


class RandomPage(_Demand):
    """Any page leaves."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.rng = rng

    def victim(self, resident: Sequence[int]) -> int:
        return resident[int(self.rng.integers(len(resident)))]


class Belady(_Demand):
    """The page that is needed again last leaves."""

    def __init__(self, steps: Sequence[Step]) -> None:
        self._places: dict[int, list[int]] = {}
        self._now = -1
        place = 0
        for step in steps:
            place += len(step.created)
            for page in step.needed:
                self._places.setdefault(page, []).append(place)
                place += 1

    def inserted(self, page: int, step: int, place: int) -> None:
        self._now = place

    def used(self, page: int, step: int, place: int) -> None:
        self._now = place

    def victim(self, resident: Sequence[int]) -> int:
        return max(resident, key=self._next)

    def _next(self, page: int) -> float:
        places = self._places.get(page, [])
        at = bisect_right(places, self._now)
        return places[at] if at < len(places) else math.inf


class ByStrategy(_Demand):
    """A strategy of `prefix`, told what the tree would tell it.

    Args:
        strategy: a fresh one.
        fed: also told what was selected. Without it a strategy knows of a running request only when its
            pages were made or fetched.
    """

    def __init__(self, strategy: Strategy, *, fed: bool) -> None:
        self.strategy, self.fed = strategy, fed
        self._arrived: dict[int, int] = {}

    def inserted(self, page: int, step: int, place: int) -> None:
        self._arrived[page] = step + 1  # 0 is "never"
        self.strategy.inserted(np.array([page]), step + 1)

    def used(self, page: int, step: int, place: int) -> None:
        if self.fed:
            self.strategy.selected(np.array([page]), step + 1)

    def victim(self, resident: Sequence[int]) -> int:
        def score(page: int) -> tuple[float, ...]:
            one = Victim(page, page, False, self._arrived[page], 0, 1)
            return tuple(float(part) for part in self.strategy.score(one))

        return min(resident, key=score)


class Speculative(ByStrategy):
    """`SpeculativePrefetch`: observes each step, and before the next fetches so many pages ahead.

    They stand beside the resident ones: give both together the capacity that the others have.

    Args:
        prefetch: a fresh one.
        room: pages fetched ahead.
    """

    def __init__(self, prefetch: SpeculativePrefetch, room: int) -> None:
        super().__init__(prefetch, fed=True)
        self.prefetch, self.room = prefetch, room
        self._prompt: dict[int, None] = {}
        self._resident: set[int] = set()
        self._early: set[int] = set()

    def ahead(self, step: int) -> int:
        missing = [page for page in self._prompt if page not in self._resident]
        chosen: set[Any] = set(self.prefetch.propose(list(self._prompt), missing, self.room, now=step))
        new = len(chosen - self._early)
        self._early = chosen
        return new

    def has(self, page: int) -> bool:
        return page in self._early

    def inserted(self, page: int, step: int, place: int) -> None:
        super().inserted(page, step, place)
        self._prompt[page] = None
        self._resident.add(page)
        self._early.discard(page)

    def victim(self, resident: Sequence[int]) -> int:
        page = super().victim(resident)
        self._resident.discard(page)
        return page

    def stepped(self, step: int, needed: Sequence[int]) -> None:
        self.prefetch.observe([needed], step)
