"""A prefix cache over one engine: requests reuse what others with the same prefix computed.

The path of a request: match its tokens in the tree of its namespace, restore or replay as the policy says,
run the rest, publish pages and boundary states. Every page and every boundary state carries the key of what
it holds; a hit counts once the keys of the request equal those, and not before.
"""

from __future__ import annotations

from collections.abc import Sequence as Several

import numpy as np

from ..prefix import Evicted, Inserted, Lock, Match, Namespace, PageKeys, RadixTree, Strategy
from .engine import Engine
from .policies import End, Full, Plan, ReloadPolicy
from .request import Metrics, Request
from .sampling import checked_tokens
from .slots import Sequence


class ForeignNamespace(ValueError):
    """A namespace whose state this engine does not make."""


class PrefixCache:
    """Requests that share one engine and one tree.

    Args:
        engine: nothing else may use its `reclaim`.
        policy: which boundary states are kept, and how a hit is restored.
        strategy: what goes first when there is no room; least recently used by default.

    Raises:
        ValueError: the policy does not fit the page size.
    """

    def __init__(
        self, engine: Engine, policy: ReloadPolicy | None = None, strategy: Strategy | None = None
    ) -> None:
        self.engine, self.policy = engine, policy or Full()
        self.policy.check(engine.geometry.page_size)
        self.tree = RadixTree(engine.geometry.page_size, strategy)
        self.metrics = Metrics()
        self._keys: dict[int, bytes] = {}  # of cached pages
        self._boundary_keys: dict[int, bytes] = {}
        engine.reclaim = self._reclaim

    # Requests ------------------------------------------------------------------------------------------

    def begin(self, namespace: Namespace, prompt: Several[int] | np.ndarray) -> Request:
        """A request whose sequence stands where the cache ends. At least the last token is left to run.

        Raises:
            ForeignNamespace: another model, numerics or page size than the engine's.
            ValueError: bad tokens.
            CapacityError: no slot is free. Nothing has changed.
        """
        self._check(namespace)
        ids = checked_tokens(prompt, self.engine.config.vocab_size)
        keys = PageKeys(namespace, ids)
        match = self._match(namespace, keys, ids[:-1])
        plan, pages = self._plan(match)
        refused = plan is not None and not self._verified(keys, plan, pages)
        if plan is None or refused:
            plan = None
            request = Request(namespace, ids, self.engine.open(), None, keys, None, [])
        else:
            seq, lock = self._reload(ids, match, plan, pages)
            request = Request(namespace, ids, seq, plan, keys, lock, ids[: plan.length].tolist())
        self.metrics.refused += refused
        self.metrics.requests += 1
        self.metrics.prompt += len(ids)
        if plan is not None:
            self.metrics.reused += plan.start
            self.metrics.replayed += plan.length - plan.start
        return request

    def _reload(self, ids: np.ndarray, match: Match, plan: Plan, pages: list[int]) -> tuple[Sequence, Lock]:
        since = plan.start if plan.boundary is None else 0
        seq = self.engine.adopt(pages, plan.length, boundary=plan.boundary, since=since)
        lock = self.tree.lock(match, plan.length)
        self.engine.replay(seq, ids[plan.start : plan.length], exact=plan.exact)  # it needs no room
        self.tree.touch(match, plan.length)
        return seq, lock

    def run(self, request: Request, count: int | None = None) -> np.ndarray:
        """Runs the next prompt tokens, all that are left by default. Returns the last logits.

        Raises:
            ValueError: the request has ended, or fewer than `count` tokens are left.
            CapacityError: no room, even after eviction. The request stands where it stood.
        """
        self._check_open(request)
        count = request.remaining if count is None else count
        if not 1 <= count <= request.remaining:
            raise ValueError(f"{count=} must lie in 1 .. {request.remaining} (prompt tokens left)")
        ids = request.prompt[request.seq.length :][:count]
        logits = self._extend(request, ids)
        self.metrics.computed += count
        if not request.remaining and request.seq.exact:
            self.publish(request)
        return logits

    def decode(self, request: Request, token: int) -> np.ndarray:
        """Appends one token after the prompt; the logits that follow it. Errors as `run`."""
        self._check_open(request)
        if request.remaining:
            raise ValueError(f"{request.remaining} prompt tokens have not run yet")
        ids = checked_tokens([token], self.engine.config.vocab_size)
        logits = self._extend(request, ids)
        request.keys.extend(ids)
        return logits

    def fork(self, request: Request) -> Request:
        """A second request that stands where this one does; they share pages until one of them writes."""
        self._check_open(request)
        twin = self.engine.fork(request.seq)
        tokens = list(request.tokens)
        known = np.concatenate([request.prompt, np.array(tokens[len(request.prompt) :], np.int32)])
        keys = PageKeys(request.namespace, known)
        self.metrics.requests += 1
        self.metrics.prompt += request.remaining
        return Request(request.namespace, request.prompt, twin, None, keys, None, tokens)

    def finish(self, request: Request) -> None:
        """Ends a request and publishes what is exact."""
        self._check_open(request)
        if request.seq.exact and request.seq.length:
            self._keep(request, frozenset({End.OUTPUT}))
            self.publish(request)
        self._end(request)

    def cancel(self, request: Request) -> None:
        """Ends a request wherever it stands; what was not published is dropped."""
        self._check_open(request)
        self.metrics.cancelled += request.remaining
        self._end(request)

    def _end(self, request: Request) -> None:
        for handle in request.boundaries.values():
            self.engine.drop_boundary(handle)
        if request.lock is not None:
            self.tree.unlock(request.lock)
        self.engine.close(request.seq)
        request.open = False

    # Running -------------------------------------------------------------------------------------------

    def _extend(self, request: Request, ids: np.ndarray) -> np.ndarray:
        """Runs tokens, stopping where a boundary state is to be kept. It changes no bit where it stops."""
        seq, size = request.seq, self.engine.geometry.page_size
        self.engine.reserve([(seq, seq.length + len(ids))])  # all of it or nothing
        logits, done = None, 0
        while done < len(ids):
            stop = min(len(ids), done + size - seq.length % size)
            logits = self.engine.prefill(seq, ids[done:stop])
            request.tokens += ids[done:stop].tolist()
            done = stop
            ends = {End.PAGE} if seq.length % size == 0 else set()
            if seq.length == len(request.prompt):
                ends.add(End.PROMPT)
            if ends and seq.exact:
                self._keep(request, frozenset(ends))
        assert logits is not None
        return logits

    def _keep(self, request: Request, ends: frozenset[End]) -> None:
        """Saves the boundary state here if the policy wants it and there is room for it."""
        position = request.seq.length
        if position % self.engine.geometry.page_size == 0:
            ends |= {End.PAGE}
        if position in request.boundaries or not self.policy.keeps(position, ends):
            return
        if self._room_for_boundary():
            request.boundaries[position] = self.engine.save_boundary(request.seq)

    def publish(self, request: Request) -> None:
        """Puts the whole pages of a request, and its boundary states, into the tree.

        Raises:
            ApproximateState: the request was reloaded approximately: nothing of it may be shared.
        """
        self._check_open(request)
        self.engine.check_exact(request.seq)
        seq, size, keys = request.seq, self.engine.geometry.page_size, request.keys
        whole = seq.length // size * size
        length = seq.length if seq.length in request.boundaries else whole
        if not length:
            return
        pages = seq.pages[: -(-length // size)]
        boundaries = {p: h for p, h in request.boundaries.items() if p % size == 0 or p == length}
        tokens = np.array(request.tokens[:length], np.int32)
        inserted = self.tree.insert(request.namespace.digest(), tokens, pages, boundaries)
        for position in boundaries:
            del request.boundaries[position]
        self._adopt(request.namespace, keys, length, pages, boundaries, inserted)

    def _adopt(
        self,
        namespace: Namespace,
        keys: PageKeys,
        length: int,
        pages: list[int],
        boundaries: dict[int, int],
        inserted: Inserted,
    ) -> None:
        """What the tree adopted of a sequence is held and gets its key; a state that it refused is freed."""
        whole = length // self.engine.geometry.page_size
        self.engine.hold_pages(inserted.adopted)
        adopted = set(inserted.adopted)
        for index, page in enumerate(pages):
            if page in adopted:
                self._keys[page] = keys.pages[index] if index < whole else keys.boundary(length)
        refused = set(inserted.boundaries_refused)
        for position, handle in boundaries.items():
            if handle in refused:
                self.engine.drop_boundary(handle)
            else:
                self._boundary_keys[handle] = keys.boundary(position)

    # Hits ----------------------------------------------------------------------------------------------

    def _match(self, namespace: Namespace, keys: PageKeys, ids: np.ndarray) -> Match:
        """What is on the device of these tokens."""
        return self.tree.match(namespace.digest(), ids)

    def _plan(self, match: Match) -> tuple[Plan | None, list[int]]:
        """What the policy makes of a match, and the pages that it reuses."""
        length, pages, boundaries = match.length, match.pages.tolist(), list(match.boundaries)
        if match.tail is not None:
            length, pages = match.tail.position, [*pages, match.tail.page]
        plan = self.policy.plan(self.engine.config, length, boundaries)
        return plan, pages

    def _verified(self, keys: PageKeys, plan: Plan, pages: list[int]) -> bool:
        """Whether pages and boundary state hold what this request's tokens and namespace would have made."""
        size = self.engine.geometry.page_size
        for index, page in enumerate(pages):
            whole = (index + 1) * size <= plan.length
            expected = keys.pages[index] if whole else keys.boundary(plan.length)
            if self._keys.get(page) != expected:
                return False
        return plan.boundary is None or self._boundary_keys.get(plan.boundary) == keys.boundary(plan.start)

    # Room ----------------------------------------------------------------------------------------------

    def _reclaim(self, missing: int) -> None:
        """Evicts until so many pages more are free, or nothing is left that could go.

        A page that a running request holds too does not become free by it; but the request may then write
        into it without a copy.
        """
        wanted = self.engine.free_pages + missing
        while self.engine.free_pages < wanted:
            evicted = self.tree.evict(pages=wanted - self.engine.free_pages)
            if not evicted.pages:
                return
            self._drop(evicted)

    def _room_for_boundary(self) -> bool:
        """Evicts a boundary state if all slots are taken. Whether one is free then."""
        if not self.engine.free_boundaries:
            self._drop(self.tree.evict(boundaries=1))
        return self.engine.free_boundaries > 0

    def _drop(self, evicted: Evicted) -> None:
        """Frees what the tree holds no longer."""
        for page in evicted.pages:
            del self._keys[page]
        self.engine.drop_pages(evicted.pages)
        for handle in evicted.boundaries:
            del self._boundary_keys[handle]
            self.engine.drop_boundary(handle)
        self.metrics.evicted_pages += len(evicted.pages)
        self.metrics.evicted_boundaries += len(evicted.boundaries)

    def evict(self, *, pages: int = 0, boundaries: int = 0) -> None:
        """Drops at least so many cached pages and boundary states, if so many can go."""
        self._drop(self.tree.evict(pages=pages, boundaries=boundaries))

    def forget(self, namespace: Namespace) -> None:
        """Drops everything of a namespace. A request of it that still runs can publish again.

        Raises:
            NamespaceInUse: a running request reuses some of it. Nothing was changed.
        """
        self._drop(self.tree.forget(namespace.digest()))

    def _check(self, namespace: Namespace) -> None:
        mine = self.engine.fingerprint, self.engine.geometry.page_size
        if (namespace.model, namespace.page_size) != mine:
            raise ForeignNamespace(
                f"the namespace is of model {namespace.model[:16]}… with pages of {namespace.page_size}, "
                f"this engine has {mine[0][:16]}… with pages of {mine[1]} tokens"
            )

    @staticmethod
    def _check_open(request: Request) -> None:
        if not request.open:
            raise ValueError("the request has ended")
