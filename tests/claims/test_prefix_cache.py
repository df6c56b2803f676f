"""Claim: whatever happens to the requests of a prefix cache, each has the bits of a cold run, or an error.

The model of the state machine only recomputes: what it knows of a request is its tokens. Prompts share what
they can, and there are too few slots, pages and boundary slots for all of them. After every step all running
requests are compared with cold runs and every holder of every page is counted; at the end also what is cached
is compared.

Controls: faults put into the implementation, each found within the default number of examples. Two faults of
the tree are harmless as long as keys are verified: they are refused and counted.
"""

from __future__ import annotations

import functools
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from goldenkv.config import Numerics, micro, with_mtp
from goldenkv.engine import (
    CapacityError,
    EndPoints,
    Engine,
    Full,
    OneWindow,
    Periodic,
    PrefixCache,
    ReloadPolicy,
    Request,
    Sequence,
    Zero,
    cache,
    policies,
    slots,
)
from goldenkv.model.weights import Model
from goldenkv.prefix import (
    Lock,
    Match,
    Namespace,
    NamespaceInUse,
    PageKeys,
    Public,
    PublicDomains,
    RadixTree,
    Tenant,
    TensorParallel,
    identity,
    radix,
)
from goldenkv.prefix.tree import node
from goldenkv.state import Rows, cells, compare
from goldenkv.state import pool as pools
from goldenkv.state.pages import Pages

CONFIG, NUMERICS = with_mtp(micro()), Numerics(tile=8, index_block=8, key_block=8)
P, LONGEST, SLOTS, PAGES, BOUNDARIES = 16, 96, 4, 9, 4
POLICIES = [Full(), Periodic(2 * P), EndPoints(), EndPoints(), Zero(), OneWindow(), OneWindow()]
DOMAINS = [Tenant("a", None), Tenant("b", None), Public("docs", PublicDomains(frozenset({"docs"})))]
EXAMPLES = max(settings.default.max_examples * 2 // 5, 80)
ENOUGH = 200
"""Examples within which a fault must be found."""


@functools.cache
def model() -> Model:
    return Model(CONFIG, NUMERICS)


@functools.cache
def cold_engine() -> Engine:
    return Engine(model(), CONFIG, NUMERICS, max_length=LONGEST)


def new_engine() -> Engine:
    sizes = dict(slots=SLOTS, max_length=LONGEST, page_size=P, pages=PAGES, boundaries=BOUNDARIES)
    return Engine(model(), CONFIG, NUMERICS, **sizes, fill=np.nan, poison=True)


def namespace(domain: Tenant | Public) -> Namespace:
    return Namespace(
        domain=domain,
        model=cold_engine().fingerprint,
        tokenizer=None,
        chat_template=None,
        layout="rows",
        page_size=P,
        dtype="float32",
        tensor_parallel=TensorParallel(1, 0, "none"),
        adapter=None,
        media=(),
        salt=None,
    )


@functools.lru_cache(maxsize=4096)
def cold(tokens: tuple[int, ...]) -> Rows:
    """The state after these tokens, and the logits that follow."""
    e = cold_engine()
    seq = e.open()
    logits = e.prefill(seq, tokens)
    found = e.rows(seq) | {"logits": logits[None]}
    e.close(seq)
    return found


def differing(found: Rows, tokens: list[int]) -> set[str]:
    """Which of these rows are not those of a cold run of the tokens."""
    expected = cold(tuple(tokens))
    return {n for n, ok in compare(found, {n: expected[n] for n in found}).by_name.items() if not ok.all()}


def stems() -> list[list[int]]:
    """Five pages each. The second parts from the first after a page, the third has another first token."""
    pages = np.random.default_rng(0).integers(0, 64, (6, P)).tolist()
    first = [token for page in pages[:5] for token in page]
    return [first, pages[0] + pages[5] + first[2 * P :], [(first[0] + 1) % 64, *first[1:]]]


LENGTHS = [1, 15, 16, 17, 32, 33, 40, 47, 48, 49, 64, 65, 70, 79, 80]
prompts = st.builds(
    lambda stem, length, branch, count: stem[:length] + [branch] * count,
    st.sampled_from(stems()),
    st.sampled_from(LENGTHS),
    st.sampled_from([1, 2]),
    st.sampled_from([0, 0, 1, 9]),
)
domains = st.sampled_from([0, 0, 0, 0, 1, 2])
tokens = st.sampled_from([1, 2])
which = st.integers(0, SLOTS - 1)
counts = st.sampled_from([0, 1, 5, 8, 16, 23, LONGEST, LONGEST])
numbers = st.integers(0, 5)


@dataclass(eq=False)
class Live:
    """A running request, and all that the model knows of it."""

    request: Request
    domain: int
    prompt: list[int]
    tokens: list[int]
    exact: bool

    @property
    def left(self) -> int:
        return max(0, len(self.prompt) - len(self.tokens))


class CacheMachine(RuleBasedStateMachine):
    """Requests come, run, fork, end, and what they left is found, evicted, forgotten."""

    reached: ClassVar[Counter[str]] = Counter()
    refusals = False
    """Whether hits may be refused: not unless something is wrong with the tree."""

    @initialize(policy=st.sampled_from(POLICIES), first=st.lists(prompts, min_size=1, max_size=3))
    def start(self, policy: ReloadPolicy, first: list[list[int]]) -> None:
        self.engine = new_engine()
        self.cache = PrefixCache(self.engine, policy)
        self.namespaces = [namespace(domain) for domain in DOMAINS]
        self.live: list[Live] = []
        self.published: list[set[tuple[int, ...]]] = [set() for _ in DOMAINS]
        self.prompt = self.ran = 0
        self.counters: dict[str, int] = asdict(self.cache.metrics)
        for prompt in first:
            self.ask(0, prompt, [1])

    def turn(self, domain: int, prompt: list[int], number: int) -> list[int]:
        """This prompt, the next turn of a conversation that was published, or another turn from its middle.
        Makes room for it, mostly."""
        if number and len(self.live) == SLOTS:
            self.finish(number)
        known = sorted(self.published[domain])
        if number < 2 or not known:
            return prompt
        told = list(known[number % len(known)])
        return [*told, 1, 2][:LONGEST] if number < 4 else [*told[: len(told) // P // 2 * P], 1, 2]

    # Requests -----------------------------------------------------------------------------------------------

    @rule(domain=domains, prompt=prompts, number=numbers, count=counts)
    def come(self, domain: int, prompt: list[int], number: int, count: int) -> None:
        running = len(self.live)
        self.begin(domain, self.turn(domain, prompt, number))
        if len(self.live) > running:
            self.answers_are_cold()
            self.run(running, count)

    def begin(self, domain: int, prompt: list[int]) -> None:
        try:
            request = self.cache.begin(self.namespaces[domain], prompt)
        except CapacityError:
            self.reached["no slot"] += 1
            assert len(self.live) == SLOTS or isinstance(self.cache.policy, OneWindow), "there is a slot"
            return
        plan, length = request.plan, request.seq.length
        assert length < len(prompt), "nothing is left to run"
        if plan is not None:
            known = any(
                each[: plan.length] == tuple(prompt[: plan.length]) for each in self.published[domain]
            )
            assert known, "found what nobody of this namespace has published"
            self.reached["boundary" if plan.boundary is not None else "replay"] += 1
            self.reached["tail"] += length % P > 0
            self.reached["approximate"] += not plan.exact
        self.prompt += len(prompt)
        self.ran += length
        exact = plan is None or plan.exact
        self.live.append(Live(request, domain, prompt, prompt[:length], exact))

    def attempt(self, live: Live, call: Callable[[], np.ndarray], fresh: list[int]) -> None:
        """Something that appends tokens, or finds no room and then changes nothing of the request."""
        request = live.request
        before = list(request.seq.pages), self.cache.metrics.computed
        try:
            logits = call()
        except CapacityError:
            self.reached["no page"] += 1
            assert (request.seq.pages, self.cache.metrics.computed) == before, "half-done"
            assert not self.cache.tree.evict(pages=1).pages, "there was room to be made"
            return
        live.tokens += fresh
        if live.exact:
            assert not differing({"logits": logits[None]}, live.tokens), "other logits than cold"

    @precondition(lambda self: self.live)
    @rule(number=which, count=counts)
    def run(self, number: int, count: int) -> None:
        live = self.live[number % len(self.live)]
        count = min(count, live.left)
        if not count:
            return
        fresh = live.prompt[len(live.tokens) :][:count]
        length = len(live.tokens)
        self.attempt(live, lambda: self.cache.run(live.request, count), fresh)
        self.ran += len(live.tokens) - length
        if not live.left and live.exact:
            self.published[live.domain].add(tuple(live.tokens))

    @precondition(lambda self: self.live)
    @rule(number=which, fresh=st.lists(tokens, min_size=1, max_size=3))
    def decode(self, number: int, fresh: list[int]) -> None:
        live = self.live[number % len(self.live)]
        for token in fresh if not live.left else []:
            if len(live.tokens) < LONGEST:
                self.attempt(live, lambda token=token: self.cache.decode(live.request, token), [token])

    @precondition(lambda self: self.live)
    @rule(number=which, token=tokens, count=st.integers(0, 4))
    def draft(self, number: int, token: int, count: int) -> None:
        """Guesses that are all rejected, beside the cache: it has no drafts of its own."""
        live = self.live[number % len(self.live)]
        if live.tokens and len(live.tokens) + count < LONGEST:
            seq = live.request.seq
            try:
                self.engine.prefill(seq, [token, *self.engine.draft(seq, token, count)])
            except CapacityError:
                return
            self.engine.rollback(seq, len(live.tokens))

    @precondition(lambda self: self.live)
    @rule(number=which)
    def fork(self, number: int) -> None:
        live = self.live[number % len(self.live)]
        try:
            request = self.cache.fork(live.request)
        except CapacityError:
            assert len(self.live) == SLOTS, "there is a slot"
            return
        self.prompt += live.left
        self.live.append(replace(live, request=request, tokens=list(live.tokens)))

    @precondition(lambda self: self.live)
    @rule(number=which)
    def finish(self, number: int) -> None:
        live = self.live.pop(number % len(self.live))
        self.cache.finish(live.request)
        if live.exact:
            self.published[live.domain].add(tuple(live.tokens))

    @precondition(lambda self: self.live)
    @rule(number=which)
    def cancel(self, number: int) -> None:
        self.cache.cancel(self.live.pop(number % len(self.live)).request)

    @rule(domain=domains, prompt=prompts, number=numbers, fresh=st.lists(tokens, max_size=3))
    def come_and_go(self, domain: int, prompt: list[int], number: int, fresh: list[int]) -> None:
        self.ask(domain, self.turn(domain, prompt, number), fresh)

    def ask(self, domain: int, prompt: list[int], fresh: list[int]) -> None:
        """A request from its beginning to its end."""
        running = len(self.live)
        self.begin(domain, prompt)
        if len(self.live) > running:
            self.answers_are_cold()
            self.run(running, LONGEST)
            self.everything_has_its_owners()
            self.decode(running, fresh)
            self.answers_are_cold()
            self.finish(running)

    # The cache ----------------------------------------------------------------------------------------------

    @rule(pages=st.integers(0, 2), boundaries=st.integers(0, 2))
    def evict(self, pages: int, boundaries: int) -> None:
        self.cache.evict(pages=pages, boundaries=boundaries)

    @rule(policy=st.sampled_from(POLICIES))
    def switch(self, policy: ReloadPolicy) -> None:
        self.cache.policy = policy

    @rule(domain=domains)
    def forget(self, domain: int) -> None:
        used = {live.domain for live in self.live if live.request.lock is not None}
        try:
            self.cache.forget(self.namespaces[domain])
        except NamespaceInUse:
            assert domain in used or self.refusals, "nobody reuses any of it"
            return
        assert domain not in used or self.refusals, "forgot what a request reuses"
        self.published[domain] = set()

    # Always -------------------------------------------------------------------------------------------------

    @invariant()
    def answers_are_cold(self) -> None:
        for live in getattr(self, "live", []):
            request = live.request
            assert request.tokens == live.tokens and request.seq.length == len(live.tokens), (
                "stands elsewhere"
            )
            if live.exact and live.tokens:
                wrong = differing(self.engine.rows(request.seq), live.tokens)
                assert not wrong, f"other bits than cold: {sorted(wrong)}"

    @invariant()
    def everything_has_its_owners(self) -> None:
        if not hasattr(self, "live"):
            return
        self.cache.tree.check()
        cached, kept = self.cache.tree.holdings.pages.all(), self.cache.tree.holdings.handles.all()
        holders = Counter(page for live in self.live for page in set(live.request.seq.pages)) + Counter(
            cached
        )
        found = [self.engine.holders(page) for page in range(PAGES)]
        assert found == [holders[page] for page in range(PAGES)], "holders of a page"
        assert self.engine.free_pages == found.count(0), "free pages"
        assert self.engine.free_slots == SLOTS - len(self.live), "free slots"
        own = [handle for live in self.live for handle in live.request.boundaries.values()]
        assert len({*own, *kept}) == len(own) + len(kept), "two owners of a boundary state"
        assert self.engine.free_boundaries == BOUNDARIES - len(own) - len(kept), "free boundary slots"
        assert (self.cache._keys.keys(), self.cache._boundary_keys.keys()) == (cached, kept), "keys"

    @invariant()
    def metrics_count_what_ran(self) -> None:
        if not hasattr(self, "live"):
            return
        m = self.cache.metrics
        assert m.reused + m.replayed + m.computed == self.ran, "prompt tokens that ran"
        assert m.prompt == self.prompt, "prompt tokens"
        counters = asdict(m)
        assert all(counters[name] >= count for name, count in self.counters.items()), "a counter fell"
        assert self.refusals or not m.refused, "a hit was refused"
        self.reached["refused"] += m.refused - self.counters["refused"]
        self.reached["evicted"] += m.evicted_pages - self.counters["evicted_pages"]
        self.counters = counters

    def teardown(self) -> None:
        """All that is cached is compared with cold runs; then it is forgotten, and nothing may remain."""
        if not hasattr(self, "live") or sys.exception() is not None:
            return
        for number, live in enumerate(self.live):
            (self.cache.finish if number % 2 else self.cache.cancel)(live.request)
        self.live = []
        self.everything_has_its_owners()
        for root in self.cache.tree.shape.roots.values():
            self.audit(root, [], [])
        for each in self.namespaces:
            self.cache.forget(each)
        self.everything_has_its_owners()
        assert (self.engine.free_slots, self.engine.free_pages) == (SLOTS, PAGES), "slots or pages remain"
        assert self.engine.free_boundaries == BOUNDARIES, "boundary states remain"
        assert not self.cache.tree.shape.roots, "a namespace remains"

    def audit(self, each: node.Node, tokens: list[int], pages: list[int]) -> None:
        """Entries of every page below a node, and every boundary state, against cold runs."""
        tokens = tokens + np.frombuffer(each.run, np.int32).tolist()
        pages = pages + each.pages.tolist()
        for boundary in each.sorted_boundaries():
            position = min(len(tokens), (each.start + boundary.end) * P)
            self.compare_cached(tokens[:position], pages, boundary.handle)
        if tokens and not each.children:
            self.compare_cached(tokens, pages, None)
        for child in (each.children or {}).values():
            self.audit(child, tokens, pages)

    def compare_cached(self, tokens: list[int], pages: list[int], handle: int | None) -> None:
        length = len(tokens)
        seq = self.engine.adopt(pages[: -(-length // P)], length, boundary=handle, since=length)
        rows = self.engine.rows(seq)
        if handle is None:
            rows = {cell.name: rows[cell.name] for cell in cells(CONFIG) if cell.component.paged}
        self.engine.close(seq)
        wrong = differing(rows, tokens)
        assert not wrong, f"cached with other bits than cold: {sorted(wrong)}"
        self.reached["audited"] += 1


class Tolerant(CacheMachine):
    """The same, where hits may be refused."""

    refusals = True


def play(machine: type[CacheMachine], *phases: Phase, **options: Any) -> Counter[str]:
    """Runs the machine; returns what it came across."""
    machine.reached = Counter()
    base = settings(
        phases=[Phase.generate, *phases],
        max_examples=EXAMPLES,
        stateful_step_count=50,
        database=None,
        derandomize=True,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(machine, settings=settings(base, **options))
    return machine.reached


def test_every_answer_is_cold() -> None:
    reached = play(CacheMachine, Phase.shrink)
    everything = {"boundary", "replay", "tail", "approximate", "no slot", "no page", "evicted", "audited"}
    assert {name for name, count in reached.items() if count} == everything, reached


# Controls ---------------------------------------------------------------------------------------------------


def without(component: str) -> Callable[[pytest.MonkeyPatch], None]:
    """No row of a component is loaded with a boundary state: the slot keeps what it had."""
    real = pools.boundary_counts

    def counts(config: Any, length: int) -> dict[str, np.int32]:
        return {n: c * np.int32(not n.endswith(component)) for n, c in real(config, length).items()}

    return lambda patch: patch.setattr(pools, "boundary_counts", counts)


def replay_writes(self: Engine, seq: Sequence, tokens: Any, *, exact: bool = True) -> None:
    kept, seq.kept = seq.kept, 0
    if len(tokens):
        self.prefill(seq, tokens)
    assert seq.length == kept
    seq.restored, seq.exact = kept, exact


def dropped_by_one_is_free(self: Pages, pages: Any) -> list[int]:
    freed = [page for page in pages if self._holders[page]]
    for page in freed:
        self._holders[page] = 0
        self._free.append(page)
    return freed


def leaking_rollback(real: Callable[..., list[int]]) -> Callable[..., list[int]]:
    def rollback(self: slots.Slots, seq: Sequence, length: int) -> list[int]:
        self.pages.hold(seq.pages[-(-length // P) :])
        return real(self, seq, length)

    return rollback


def page_by_page(real: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    """Room is made page by page, so that a failure comes halfway."""

    def extend(self: PrefixCache, request: Request, ids: np.ndarray) -> np.ndarray:
        while len(ids) > (count := P - request.seq.length % P):
            real(self, request, ids[:count])
            ids = ids[count:]
        return real(self, request, ids)

    return extend


def always_exact(real: Callable[..., None]) -> Callable[..., None]:
    return lambda self, seq, tokens, *, exact=True: real(self, seq, tokens)


def no_domain(real: Callable[[object], object]) -> Callable[[object], object]:
    return lambda value: () if isinstance(value, (Tenant, Public)) else real(value)


Fault = Callable[[pytest.MonkeyPatch], None]
FAULTS: dict[str, tuple[Fault, str]] = {
    "a write without the copy": (
        lambda p: p.setattr(slots.Slots, "_shared", lambda self, seq, length: []),
        "than cold|held elsewhere",
    ),
    "a copy that copies nothing": (
        lambda p: p.setattr(pools, "copy_page", lambda pool, source, target, config: pool),
        "than cold",
    ),
    "a boundary state without its overlap": (without("overlap_kv"), "than cold.*overlap_kv"),
    "a stale window": (without("window"), "than cold.*window"),
    "a replay that is one token short": (
        lambda p: p.setattr(
            policies, "replay_length", lambda c, n, real=policies.replay_length: max(0, real(c, n) - 1)
        ),
        "than cold",
    ),
    "a replay that writes entries": (
        lambda p: p.setattr(Engine, "replay", replay_writes),
        "than cold.*entries",
    ),
    "approximate state is published": (
        lambda p: p.setattr(Engine, "replay", always_exact(Engine.replay)),
        "nobody of this namespace|other bits than cold",
    ),
    "a namespace without its domain": (
        lambda p: p.setattr(identity, "_plain", no_domain(identity._plain)),
        "nobody of this namespace|nobody reuses|forgot what",
    ),
    "a split leaves out the locks": (
        lambda p: p.setattr(node, "move_locks", lambda *_: None),
        "locks, not|reuses any of it|forgot what",
    ),
    "cached pages have no holder": (
        lambda p: p.setattr(Engine, "hold_pages", lambda self, pages: None),
        "holders of a page",
    ),
    "a page is free although others hold it": (
        lambda p: p.setattr(Pages, "drop", dropped_by_one_is_free),
        "holders of a page|held elsewhere|is free",
    ),
    "a rollback that keeps its pages": (
        lambda p: p.setattr(slots.Slots, "rollback", leaking_rollback(slots.Slots.rollback)),
        "holders of a page",
    ),
    "a rollback to another length": (
        lambda p: p.setattr(
            Engine, "rollback", lambda self, seq, n, real=Engine.rollback: real(self, seq, n + 1)
        ),
        "stands elsewhere",
    ),
    "room is made page by page": (
        lambda p: p.setattr(PrefixCache, "_extend", page_by_page(PrefixCache._extend)),
        "half-done",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first counterexample is enough, so it is not made small."""
    put, expected = FAULTS[fault]
    put(monkeypatch)
    with pytest.raises((AssertionError, ValueError), match=expected):
        play(CacheMachine, max_examples=ENOUGH, report_multiple_bugs=False)


class ByContent(RadixTree):
    """Finds pages by number and content, whatever stands before them: a table without chained keys."""

    def match(self, namespace: bytes, tokens: np.ndarray) -> Match:
        found = super().match(namespace, tokens)
        table, ids, size = {}, found.pages.tolist(), self.shape.page_bytes
        root = self.shape.roots.get(namespace)
        for each in root.below() if root is not None else []:
            for i, page in enumerate(each.pages if not each.partial else []):
                table[each.start + i, each.run[i * size : (i + 1) * size]] = page
        while (key := (len(ids), found.data[len(ids) * size :][:size])) in table:
            ids.append(table[key])
        if len(ids) == len(found.pages):
            return found
        return replace(found, length=len(ids) * P, pages=np.array(ids, np.int32), tail=None)

    def lock(self, match: Match, length: int) -> Lock:
        return super().lock(*self._real(match, length))

    def touch(self, match: Match, length: int) -> None:
        super().touch(*self._real(match, length))

    def _real(self, match: Match, length: int) -> tuple[Match, int]:
        found = super().match(match.namespace, np.frombuffer(match.data, np.int32))
        return found, length if match.tail is not None else min(length, found.length)


def unchained(self: PageKeys, tag: bytes, index: int, count: int) -> bytes:
    begin = 4 * index * self.page_size
    return self._key(tag, self.namespace, index, self._tokens[begin : begin + 4 * count])


TREE_FAULTS: dict[str, Fault] = {
    "a tree that ignores namespaces": lambda p: p.setattr(radix, "checked_namespace", lambda _: b"all"),
    "a tree that ignores prefixes": lambda p: p.setattr(cache, "RadixTree", ByContent),
}
GAPS: dict[str, tuple[str, Fault, str]] = {
    "namespaces, keys not verified": (
        "a tree that ignores namespaces",
        lambda p: p.setattr(PrefixCache, "_verified", lambda *_: True),
        "nobody of this namespace",
    ),
    "prefixes, keys not verified": (
        "a tree that ignores prefixes",
        lambda p: p.setattr(PrefixCache, "_verified", lambda *_: True),
        "nobody of this namespace",
    ),
    "prefixes, keys not chained": (
        "a tree that ignores prefixes",
        lambda p: p.setattr(PageKeys, "_span", unchained),
        "nobody of this namespace",
    ),
}


@pytest.mark.parametrize("fault", TREE_FAULTS)
def test_what_keys_refuse_is_counted_and_computed(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    TREE_FAULTS[fault](monkeypatch)
    assert play(Tolerant, max_examples=EXAMPLES // 2)["refused"] > 0


@pytest.mark.parametrize("gap", GAPS)
def test_control_without_the_keys_it_is_found(gap: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fault, put, expected = GAPS[gap]
    TREE_FAULTS[fault](monkeypatch)
    put(monkeypatch)
    with pytest.raises(AssertionError, match=expected):
        play(Tolerant, max_examples=ENOUGH, report_multiple_bugs=False)
