"""A prefix cache whose state outlives the device: it goes down to tiers, and comes back from them.

A request that finds anything missing, late, damaged or not its own recomputes. Tokens count as reused from a
tier once their bytes were verified, and the request stands on them; what was loaded in vain does not count.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Several

import numpy as np

from ..prefix import Evicted, Inserted, Match, Namespace, PageKeys, Public, Strategy, Tenant, owner_of
from ..tiers.mover import Mover
from ..tiers.objects import Kind
from ..tiers.transfer import Copy
from .cache import PrefixCache
from .engine import Engine
from .fetch import Fetch, tail_name
from .offload import Name, Offload
from .policies import Plan, ReloadPolicy
from .request import Request
from .sampling import checked_tokens


class TieredCache(PrefixCache):
    """A prefix cache over tiers.

    Args:
        engine, policy, strategy: as `PrefixCache`. Boundary states come up into slots of the engine: with
            none, only what can be replayed is brought up.
        mover: to the tiers. The caller closes it.
        deadline: seconds that a prompt waits for the tiers, given the tokens that it would not have to
            compute: what computing them takes, or less. One second by default.
        copy: copies components on their way down and up; a seam.

    Raises:
        ValueError: the policy does not fit the page size, or the mover has another one.
    """

    def __init__(
        self,
        engine: Engine,
        mover: Mover,
        policy: ReloadPolicy | None = None,
        strategy: Strategy | None = None,
        *,
        deadline: Callable[[int], float] = lambda tokens: 1.0,
        copy: Copy | None = None,
    ) -> None:
        if mover.page_size != engine.geometry.page_size:
            raise ValueError(
                f"the mover has pages of {mover.page_size} tokens, the engine of {engine.geometry.page_size}"
            )
        super().__init__(engine, policy, strategy)
        self.mover, self._deadline = mover, deadline
        self._offload = Offload(engine, mover, copy)
        self._origins: dict[int, str] = {}  # of pages that came up and were not used yet
        self._namespaces: dict[bytes, set[Namespace]] = {}  # by owner

    # Requests ------------------------------------------------------------------------------------------

    def begin(self, namespace: Namespace, prompt: Several[int] | np.ndarray) -> Request:
        request = super().begin(namespace, prompt)
        if request.plan is not None:
            self._count(request.plan, request.seq.pages)
        return request

    def run(self, request: Request, count: int | None = None) -> np.ndarray:
        before = request.remaining
        logits = super().run(request, count)
        self._source("computed", before - request.remaining)
        return logits

    def cancel(self, request: Request) -> None:
        super().cancel(request)
        self._source("cancelled", request.remaining)

    def prefetch(self, namespace: Namespace, prompt: Several[int] | np.ndarray) -> None:
        """Lets the tiers copy up, in the background, what they have of a prompt that is to come.

        Raises:
            ForeignNamespace, ValueError: as `begin`.
        """
        self._check(namespace)
        ids = checked_tokens(prompt, self.engine.config.vocab_size)
        keys, size = PageKeys(namespace, ids), self.engine.geometry.page_size
        held = self.tree.match(namespace.digest(), ids).length // size
        names = []
        for index in range(held, len(keys.pages)):
            position = (index + 1) * size
            names.append(Name(namespace, keys.pages[index], Kind.PAGE, position))
            names.append(Name(namespace, keys.boundary(position), Kind.BOUNDARY, position))
        self.mover.up.prefetch([self._offload.label(name) for name in names])

    def flush(self) -> None:
        """Copies down all that is cached here and on no tier, and waits until it is there."""
        self._offload.flush()

    # Deleting ------------------------------------------------------------------------------------------

    def forget(self, namespace: Namespace) -> None:
        """Drops everything of a namespace, on the device and on every tier.

        Raises:
            NamespaceInUse: a running request reuses some of it. Nothing was changed.
            Unavailable: some tier may still have some of it: call again.
        """
        self._forget_here(namespace)
        self.mover.forget(namespace.owner(), namespace.digest())

    def forget_owner(self, domain: Tenant | Public) -> None:
        """Drops everything of a tenant or of a public domain, under whatever namespaces, on every tier.

        Raises:
            NamespaceInUse, Unavailable: as `forget`; some namespaces may be gone already.
        """
        owner = owner_of(domain)
        for namespace in tuple(self._namespaces.get(owner, ())):
            self._forget_here(namespace)
        self.mover.forget(owner)

    def _forget_here(self, namespace: Namespace) -> None:
        evicted = self.tree.forget(namespace.digest())
        self._offload.leaving(evicted.pages, evicted.boundaries, keep=False)
        super()._drop(evicted)
        self._namespaces.get(namespace.owner(), set()).discard(namespace)

    # What the cache does on the device -----------------------------------------------------------------

    def _match(self, namespace: Namespace, keys: PageKeys, ids: np.ndarray) -> Match:
        """What is on the device of these tokens, once the tiers have brought up what they can."""
        match = super()._match(namespace, keys, ids)
        self._offload.poll()
        if not self.engine.free_slots:
            return match
        lock = self.tree.lock(match, match.length if match.tail is None else match.tail.position)
        try:
            found = Fetch(
                self._offload, namespace, keys, len(ids), match, self.policy,
                self._room_for_boundary, self._deadline,
            ).run()  # fmt: skip
        finally:
            self.tree.unlock(lock)
        if found is None:
            return match
        pages = [*match.pages.tolist(), *found.pages]
        boundaries = dict([found.boundary] if found.boundary else [])
        tokens = ids[: found.length]
        inserted = self.tree.insert(namespace.digest(), tokens, pages, boundaries)
        self._adopt(namespace, keys, found.length, pages, boundaries, inserted)
        self._origins |= {page: found.tiers[page] for page in inserted.adopted}
        self.engine.drop_pages(found.pages)
        return super()._match(namespace, keys, ids)

    def _adopt(
        self,
        namespace: Namespace,
        keys: PageKeys,
        length: int,
        pages: list[int],
        boundaries: dict[int, int],
        inserted: Inserted,
    ) -> None:
        super()._adopt(namespace, keys, length, pages, boundaries, inserted)
        self._namespaces.setdefault(namespace.owner(), set()).add(namespace)
        adopted, refused = set(inserted.adopted), set(inserted.boundaries_refused)
        size, names, states = self.engine.geometry.page_size, {}, {}
        for index, page in enumerate(pages):
            if page in adopted:
                end = (index + 1) * size
                whole = end <= length
                names[page] = (
                    Name(namespace, keys.pages[index], Kind.PAGE, end)
                    if whole
                    else tail_name(namespace, keys, length)
                )
        for position, handle in boundaries.items():
            if handle not in refused:
                states[handle] = Name(namespace, keys.boundary(position), Kind.BOUNDARY, position)
        self._offload.published(names, states)

    def _drop(self, evicted: Evicted) -> None:
        self._offload.leaving(evicted.pages, evicted.boundaries, keep=True)
        for page in evicted.pages:
            self._origins.pop(page, None)
        self.mover.metrics.evicted("device", len(evicted.pages) + len(evicted.boundaries))
        super()._drop(evicted)

    # Counting ------------------------------------------------------------------------------------------

    def _count(self, plan: Plan, pages: list[int]) -> None:
        """Where the tokens that are not run came from, page by page."""
        size = self.engine.geometry.page_size
        for index, page in enumerate(pages):
            origin = self._origins.pop(page, "device")
            self._source(origin, max(0, min(plan.start, (index + 1) * size) - index * size))
        self._source("replayed", plan.length - plan.start)

    def _source(self, name: str, tokens: int) -> None:
        if tokens:
            self.mover.metrics.source(name, tokens)
