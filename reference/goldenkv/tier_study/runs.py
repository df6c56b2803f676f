"""A list of requests through a device and tiers of some size: where the state of their tokens came from.

Nothing depends on timing, and every answer is compared with that of a run from nothing, bit by bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..engine import Engine, Periodic, PrefixCache, TieredCache
from ..prefix import Namespace
from ..state import Rows, compare
from ..tiers.mover import Mover
from ..tiers.shelf import Tier


class Inline(Executor):
    """Runs a copy as soon as it is asked for, in the caller's thread: nothing depends on timing.

    Attributes:
        left: copies that still run; what is asked for afterwards never ends, as on a network that hangs.
            None for all.
    """

    def __init__(self) -> None:
        self.left: int | None = None

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        if self.left is not None:
            self.left -= 1
            if self.left < 0:
                return future
        try:
            future.set_result(fn(*args, **kwargs))
        except BaseException as error:  # as every executor: it belongs to who asks for the result
            future.set_exception(error)
        return future


@dataclass(frozen=True, slots=True, eq=False)
class Cold:
    """A prompt run from nothing: the logits after it [vocabulary], and its state."""

    logits: np.ndarray
    rows: Rows

    def same(self, logits: np.ndarray, rows: Rows) -> bool:
        """Whether these have the same bits."""
        return compare(rows | {"logits": logits[None]}, self.rows | {"logits": self.logits[None]}).same


def cold(engine: Engine, prompt: np.ndarray) -> Cold:
    """Runs a prompt from nothing."""
    seq = engine.open()
    found = Cold(engine.prefill(seq, prompt), engine.rows(seq))
    engine.close(seq)
    return found


@dataclass(frozen=True, slots=True)
class Served:
    """What became of a list of requests.

    Attributes:
        sources: tokens of their prompts by where their state came from: "device", the tiers by name,
            "replayed", "computed".
        requests, hits: how many there were, and how many of them reused any token at all.
        equal: answers with the bits of a cold run.
    """

    sources: dict[str, int]
    requests: int
    hits: int
    equal: int

    @property
    def tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(self.sources.values())

    @property
    def reused(self) -> int:
        """Tokens that did not run."""
        return self.tokens - self.sources.get("replayed", 0) - self.sources.get("computed", 0)


def serve(
    engine: Engine,
    namespace: Namespace,
    prompts: Sequence[np.ndarray],
    expected: Sequence[Cold],
    tiers: Sequence[Tier] = (),
    *,
    pages: int,
    period: int,
) -> Served:
    """Asks all prompts in turn, through a cache that has nothing at first.

    Args:
        engine: holds nothing of a cache.
        namespace: of all prompts.
        prompts, expected: what is asked, and the cold run of each.
        tiers: below the device, the fastest first; new and empty. They are closed. None for the device alone.
        pages: of the device that may be used, at most as many as the engine has.
        period: tokens between two boundary states that are kept.
    """
    hits = equal = 0
    with _limited(engine, pages):
        mover = Mover(tiers, engine.geometry.page_size, workers=Inline()) if tiers else None
        policy = Periodic(period)
        cache = (
            TieredCache(engine, mover, policy, deadline=lambda tokens: 60.0)
            if mover is not None
            else PrefixCache(engine, policy)
        )
        for prompt, answer in zip(prompts, expected, strict=True):
            request = cache.begin(namespace, prompt)
            hits += request.plan is not None
            logits = cache.run(request)
            equal += answer.same(logits, engine.rows(request.seq))
            cache.finish(request)
        cache.forget(namespace)
    if mover is None:
        counted = cache.metrics
        sources = {"device": counted.reused, "replayed": counted.replayed, "computed": counted.computed}
    else:
        mover.close()
        sources = mover.metrics.sources()
    return Served(sources, len(prompts), hits, equal)


@contextmanager
def _limited(engine: Engine, pages: int) -> Iterator[None]:
    """The engine has only so many pages; the others are held by nobody who uses them."""
    held = engine.take_pages(engine.geometry.pages - pages)
    try:
        yield
    finally:
        engine.drop_pages([lease.page for lease in held])
