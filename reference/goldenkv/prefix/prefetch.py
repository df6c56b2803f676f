"""Speculative prefetch: which pages of a lower tier to bring up before attention asks for them.

Three things speak for a page: where it stands in the prompt, how often its entries were selected, and whether
they were selected in the same steps as pages that the batch is selecting now. Pages go by names here, any
hashable that stays the same on every tier; a device's page id would mean another page after an eviction.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Collection, Hashable, Sequence

from .strategies import SelectionDriven, StrategyError

Name = Hashable


class SpeculativePrefetch(SelectionDriven):
    """Proposes pages, the likeliest first; eviction is selection-driven.

    The value of a page is a sum, each term between 0 and 1 times its weight:

    - structure: 1 for the first page, the last one, and pages in which a part of the prompt (a message, a
      document) begins;
    - history: the share of recent steps that selected it, which halves every `half_life` ticks;
    - correlation: over the pages that the batch selected last, the largest share of their steps in which a
      request selected both. Any request counts: a batch that reads one document warms it for the next.

    Args:
        structure, history, correlation: weights.
        half_life: ticks after which a step counts half.
        names: at most so many pages are remembered; those not selected for longest are forgotten.
        partners: at most so many other pages are remembered for each, and each meets so many a step.

    Raises:
        StrategyError: a weight that is negative or not finite, or a limit below 1.
    """

    def __init__(
        self,
        structure: float = 1.0,
        history: float = 1.0,
        correlation: float = 1.0,
        half_life: float = 64,
        names: int = 65536,
        partners: int = 8,
    ) -> None:
        super().__init__()
        for weight in (structure, history, correlation):
            if not 0 <= weight < math.inf:
                raise StrategyError(f"a weight must be finite and not negative, got {weight}")
        if not half_life > 0 or names < 1 or partners < 1:
            raise StrategyError(f"{half_life=}, {names=} and {partners=} must be positive")
        self.structure, self.history, self.correlation = structure, history, correlation
        self.half_life, self.names, self.partners = half_life, names, partners
        self._seen: OrderedDict[Name, _Seen] = OrderedDict()
        self._steps = _Seen()
        self._latest: list[Name] = []

    def observe(self, batch: Sequence[Sequence[Name]], now: int) -> None:
        """One step of a batch: the pages that each request selected entries of, the most selected first."""
        met: dict[Name, dict[Name, None]] = {}
        for request in batch:
            for name in request:
                others = [other for other in request[: self.partners + 1] if other != name][: self.partners]
                met.setdefault(name, {}).update(dict.fromkeys(others))
        self._steps.add(now, self.half_life)
        for name, partners in met.items():
            seen = self._seen.setdefault(name, _Seen())
            self._seen.move_to_end(name)
            seen.add(now, self.half_life)
            seen.meet(list(partners)[: self.partners], self.partners)
        while len(self._seen) > self.names:
            self._seen.popitem(last=False)
        self._latest = list(met)

    def propose(
        self,
        prompt: Sequence[Name],
        missing: Collection[Name],
        limit: int,
        starts: Collection[int] = (),
        now: int = 0,
    ) -> list[Name]:
        """At most `limit` of the missing pages, most valuable first; equal ones by their place in the prompt.

        Args:
            prompt: names of all its pages, in order.
            missing: those that are not on the device. Others are never proposed.
            limit: pages that there is room for.
            starts: numbers of pages in which a part of the prompt begins.
            now: the time.

        Raises:
            StrategyError: a negative limit.
        """
        if limit < 0:
            raise StrategyError(f"{limit=} must not be negative")
        wanted = set(missing)
        values = {
            name: self.value(name, number, len(prompt), starts, now)
            for number, name in enumerate(prompt)
            if name in wanted
        }
        return sorted(values, key=lambda name: -values[name])[:limit]

    def value(self, name: Name, number: int, count: int, starts: Collection[int], now: int) -> float:
        """Of one page, the `number`-th of a prompt of `count`; see the class."""
        prominent = number in (0, count - 1) or number in starts
        seen = self._seen.get(name)
        share = seen.at(now, self.half_life) / self._steps.at(now, self.half_life) if seen else 0.0
        related = max((self._seen[p].share_with(name) for p in self._latest if p in self._seen), default=0.0)
        return self.structure * prominent + self.history * share + self.correlation * related


class _Seen:
    """How often, and with whom."""

    __slots__ = ("last", "partners", "steps", "weight")

    def __init__(self) -> None:
        self.weight, self.last, self.steps = 0.0, 0, 0
        self.partners: dict[Name, int] = {}

    def at(self, now: int, half_life: float) -> float:
        """Steps so far, older ones counting less."""
        return self.weight * 0.5 ** ((now - self.last) / half_life)

    def add(self, now: int, half_life: float) -> None:
        """One step more."""
        self.weight, self.last, self.steps = self.at(now, half_life) + 1, now, self.steps + 1

    def meet(self, others: Collection[Name], most: int) -> None:
        """These were selected in the same step. A newcomer takes the place of the rarest partner."""
        for other in others:
            if other not in self.partners and len(self.partners) >= most:
                del self.partners[min(self.partners, key=lambda name: self.partners[name])]
            self.partners[other] = self.partners.get(other, 0) + 1

    def share_with(self, other: Name) -> float:
        """The share of its steps in which that page was selected as well."""
        return self.partners.get(other, 0) / self.steps
