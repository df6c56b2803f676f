"""A request while something breaks: what it still reuses, what it computes, the reason, and its bits."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..engine import Engine, Periodic, TieredCache
from ..prefix import Namespace
from ..tiers.errors import StoreError
from ..tiers.mover import Mover
from ..tiers.objects import Address, Head, Item, Kind
from ..tiers.shelf import Tier
from ..tiers.store import Store, Wrapper
from .runs import Cold, Inline

Hurt = Callable[[Any, Address], None]
"""Does something to a store, given the address of one page."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a request while something broke.

    Attributes:
        reused, replayed, computed: tokens of its prompt: not run; run again over pages that came; run for the
            first time.
        reasons: why less was reused than had been stored, as counted; empty where it was just not found.
        equal: logits and state have the bits of a cold run.
        logit_error: the largest absolute difference of a logit.
    """

    reused: int
    replayed: int
    computed: int
    reasons: tuple[str, ...]
    equal: bool
    logit_error: float


def drill(
    engine: Engine,
    namespace: Namespace,
    prompt: np.ndarray,
    expected: Cold,
    store: Store,
    *,
    stored: int,
    page: int,
    before: Hurt | None = None,
    during: Hurt | None = None,
    comes: int | None = None,
    verify: bool = True,
) -> Outcome:
    """Stores the start of a prompt, lets the device forget it, breaks something, and asks for the prompt.

    Args:
        engine: holds nothing of a cache.
        namespace, prompt, expected: what is asked for, and its cold run.
        store: the tier, empty. It is closed.
        stored: tokens that are stored, whole pages. At the end of every second page is a boundary state.
        page: the number of the page that `before` and `during` are told of.
        before: is done before the request.
        during: is done when that page is about to be read, so after it was found.
        comes: after the look-up only so many objects come, then nothing more; the deadline passes.
        verify: whether the mover verifies what comes. Whether the store does was said when it was made.
    """
    size, workers = engine.geometry.page_size, Inline()
    meddling = _Meddling(store)
    mover = Mover([Tier(store=meddling)], size, workers=workers, verify=verify)
    seconds = 60.0 if comes is None else 0.05
    cache = TieredCache(engine, mover, Periodic(2 * size), deadline=lambda tokens: seconds)
    try:
        request = cache.begin(namespace, prompt[:stored])
        cache.run(request)
        cache.finish(request)
        _empty(cache)
        mover.drain()
        counted = mover.metrics.sources()
        address = meddling.pages[(page + 1) * size]
        if before is not None:
            before(store, address)
        meddling.during = None if during is None else (address, during)
        workers.left = None if comes is None else 1 + comes
        request = cache.begin(namespace, prompt)
        workers.left = None
        logits = cache.run(request)
        same = expected.same(logits, engine.rows(request.seq))
        cache.cancel(request)
    finally:
        _empty(cache)
        with suppress(StoreError):  # a store that is broken cannot always be closed
            mover.close()
    metrics = mover.metrics.to_json()
    tokens = {name: n - counted.get(name, 0) for name, n in metrics["prompt_tokens"].items()}
    unasked = metrics["failures"].get(store.name, {}).get("exists", {})
    replayed, computed = tokens.get("replayed", 0), tokens["computed"]
    return Outcome(
        sum(tokens.values()) - replayed - computed,
        replayed,
        computed,
        tuple(sorted({*metrics["fallbacks"], *unasked})),
        same,
        float(np.abs(logits - expected.logits).max()),
    )


def _empty(cache: TieredCache) -> None:
    """The device forgets, the tier does not."""
    cache.evict(pages=cache.engine.geometry.pages, boundaries=cache.engine.geometry.boundaries)


class _Meddling(Wrapper):
    """A store that is hurt when one page of it is about to be read, once."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.pages: dict[int, Address] = {}  # by the tokens at their end
        self.during: tuple[Address, Hurt] | None = None

    def put(self, item: Item, ttl: float | None = None) -> int:
        if item.label.kind is Kind.PAGE:
            self.pages[item.label.position] = item.label.address
        return super().put(item, ttl)

    def get_into(self, address: Address, buffer: np.ndarray) -> Head:
        if self.during is not None and self.during[0] == address:
            (_, hurt), self.during = self.during, None
            hurt(self.inner, address)
        return super().get_into(address, buffer)
