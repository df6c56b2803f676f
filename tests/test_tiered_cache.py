"""A prefix cache over tiers: what comes up again is what a cold run makes, bit for bit, or it is recomputed.

"= cold": every bit of every component and of the logits is that of an engine without a cache. Freed pages and
boundary states are NaN, and so is what was never written. Workers run at once, or step by step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from goldenkv.config import Numerics, micro
from goldenkv.engine import (
    CapacityError,
    EndPoints,
    Engine,
    ForeignNamespace,
    Full,
    OneWindow,
    Periodic,
    PrefixCache,
    ReloadPolicy,
    Request,
    Zero,
    replay_length,
)
from goldenkv.engine.offload import Offload
from goldenkv.engine.tiered import TieredCache
from goldenkv.model.weights import Model
from goldenkv.prefix import (
    Namespace,
    NamespaceInUse,
    Public,
    PublicDomains,
    RadixTree,
    Tenant,
    TensorParallel,
)
from goldenkv.state import Rows, compare
from goldenkv.tiers.errors import Corrupt, Unavailable
from goldenkv.tiers.faults import Delay, Fail, Faulty
from goldenkv.tiers.host import HostStore
from goldenkv.tiers.mover import Mover
from goldenkv.tiers.saver import Saver
from goldenkv.tiers.shelf import Tier, Write
from goldenkv.tiers.store import Store

P = 16
SMALL = Numerics(tile=8, index_block=8, key_block=8)
EXACT = (Full(), Periodic(2 * P), EndPoints(), Zero())
BOTH = pytest.mark.parametrize("write", [Write.THROUGH, Write.BACK], ids=lambda write: write.name)


@functools.cache
def model() -> Model:
    return Model(micro(), SMALL)


def fresh(**sizes: Any) -> Engine:
    base = dict(slots=4, max_length=128, page_size=P, pages=24, boundaries=12, fill=np.nan, poison=True)
    return Engine(model(), micro(), SMALL, **base | sizes)


def tokens_of(length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(1, 64, length)


def join(*parts: np.ndarray) -> np.ndarray:
    return np.concatenate(parts)


@functools.lru_cache(maxsize=64)
def cold_of(tokens: bytes) -> Rows:
    e = fresh()
    seq = e.open()
    logits = e.prefill(seq, np.frombuffer(tokens, np.int64), all_logits=True)
    return {**e.rows(seq), "logits": logits}


def cold(prompt: np.ndarray, answer: np.ndarray) -> Rows:
    found = cold_of(join(prompt, answer).astype(np.int64).tobytes())
    return {**found, "logits": found["logits"][len(prompt) - 1 :]}


ALICE = Tenant("alice", None)


def space(e: Engine, domain: Tenant | Public = ALICE, **changes: Any) -> Namespace:
    fields: dict[str, Any] = dict(
        domain=domain,
        model=e.fingerprint,
        tokenizer=None,
        chat_template=None,
        layout="pool",
        page_size=e.geometry.page_size,
        dtype="float32",
        tensor_parallel=TensorParallel(1, 0, "none"),
        adapter=None,
        media=(),
        salt=None,
    )
    return Namespace(**fields | changes)


class Workers(Executor):
    """Runs tasks at once; those for which `later` says so wait for `step`."""

    def __init__(self, later: Callable[[str], bool] = lambda name: False) -> None:
        self.later, self.waiting = later, list[tuple[Future, Callable, tuple]]()

    def submit(self, fn: Callable, /, *args: Any, **kwargs: Any) -> Future:
        future: Future = Future()
        self.waiting.append((future, fn, args))
        if not self.later(fn.__name__):
            self.step(self.waiting.pop())
        return future

    def step(self, *tasks: tuple[Future, Callable, tuple]) -> None:
        if not tasks:
            tasks, self.waiting = tuple(self.waiting), []
        for future, fn, args in tasks:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(fn(*args))
                except BaseException as error:
                    future.set_exception(error)


def host(nbytes: int = 1 << 20, name: str = "host") -> Faulty:
    store = Faulty(HostStore(nbytes, block=8))
    store.name = name
    return store


def mover(
    *stores: Store, write: Write = Write.THROUGH, workers: Executor | None = None, **options: Any
) -> Mover:
    return Mover([Tier(store=s, write=write) for s in stores], P, workers=workers or Workers(), **options)


def cache(
    m: Mover, policy: ReloadPolicy | None = None, e: Engine | None = None, **options: Any
) -> TieredCache:
    return TieredCache(e or fresh(), m, policy or Full(), **{"deadline": lambda tokens: 1e6} | options)


def begin(c: PrefixCache, prompt: np.ndarray, *domain: Tenant | Public) -> Request:
    return c.begin(space(c.engine, *domain), prompt)


ANSWER = tokens_of(12, 2)


def answered(c: PrefixCache, request: Request, answer: np.ndarray = ANSWER) -> Rows:
    """Runs what is left of the prompt and decodes an answer: the state then, and the logits on the way."""
    logits = [c.run(request), *(c.decode(request, int(token)) for token in answer)]
    return {**c.engine.rows(request.seq), "logits": np.array(logits)}


def serve(c: PrefixCache, prompt: np.ndarray, answer: np.ndarray = ANSWER, *domain: Tenant | Public) -> int:
    """A whole request, = cold. Returns how many tokens of its prompt did not run."""
    request = begin(c, prompt, *domain)
    start = 0 if request.plan is None else request.plan.start
    assert compare(answered(c, request, answer), cold(prompt, answer)).first is None
    c.finish(request)
    return start


def place(request: Request) -> tuple[int, int]:
    """Tokens whose entries are reused, and those that do not run."""
    return (request.plan.length, request.plan.start) if request.plan is not None else (0, 0)


def clear(c: TieredCache) -> None:
    """All leaves the device."""
    c.evict(pages=100, boundaries=100)
    assert c.engine.free_pages == 24


def sources(c: TieredCache) -> dict[str, int]:
    return c.mover.metrics.sources()


def counted(c: TieredCache, metric: str) -> dict[str, Any]:
    return c.mover.metrics.to_json()[metric]


# Down and up again ------------------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("policy", EXACT, ids=lambda policy: type(policy).__name__)
def test_what_comes_up_is_what_the_device_would_have_had(write: Write, policy: ReloadPolicy) -> None:
    """Sequences that end at and around a page's end and inside pages, in a new engine: same plan, = cold."""
    store, hits = host(), 0
    for length in (15, 16, 17, 31, 32, 40, 47):
        prompt, answer = tokens_of(length, seed=length), tokens_of(2, 3)
        there, here = PrefixCache(fresh(), policy), cache(mover(store, write=write), policy)
        for c in (there, here):
            serve(c, prompt, answer)
        clear(here)
        longer = join(prompt, answer, tokens_of(9, 4))
        expected, again = begin(there, longer), begin(cache(mover(store, write=write), policy), longer)
        assert place(again) == place(expected), length
        assert serve(cache(mover(store, write=write), policy), longer) == place(again)[1]
        hits += place(again)[1] > 0
    assert hits >= 3


def test_a_component_that_comes_up_wrong_is_found() -> None:
    """Each component alone is another one on its way up, behind all checks: the state is not that of cold."""
    store, prompt = host(), tokens_of(40)
    serve(cache(mover(store)), prompt)
    seen: set[str] = set()

    def wrong(component: str) -> set[str]:
        def copy(name: str, to: np.ndarray, source: np.ndarray) -> None:
            seen.add(name)
            to[:] = source
            if name == component and len(to):
                to[-1] ^= 1

        c = cache(mover(store), copy=copy)
        request = begin(c, prompt)
        assert place(request) == (32, 32)
        found, expected = c.engine.rows(request.seq), cold_of(prompt[:32].astype(np.int64).tobytes())
        return {name for name, same in compare(found, expected).by_name.items() if not same.all()} - {
            "logits"
        }

    assert wrong("") == set()
    empty = {name for name in seen if not len(cold_of(prompt[:32].astype(np.int64).tobytes())[name])}
    assert all(wrong(component) == {component} for component in sorted(seen - empty))
    assert len(seen - empty) >= 6


@pytest.mark.parametrize("here", range(6))
def test_partly_on_the_device(here: int) -> None:
    """So many pages are still here, the others come up; the tokens of each are counted where they were."""
    c, prompt = cache(mover(host())), tokens_of(90)
    request = begin(c, prompt)
    c.run(request)
    c.finish(request)
    c.evict(pages=5 - here)
    before = sources(c)
    assert serve(c, prompt) == 80
    after = sources(c)
    came = {name: after.get(name, 0) - before.get(name, 0) for name in ("device", "host", "computed")}
    assert came == {"device": here * P, "host": 80 - here * P, "computed": 10}


def test_states_come_up_for_pages_that_are_here() -> None:
    c, prompt = cache(mover(host())), tokens_of(90)
    serve(c, prompt)
    c.evict(boundaries=12)
    assert c.engine.free_boundaries == 12
    assert serve(c, prompt) == 80 and sources(c)["device"] == 80


def test_without_slots_for_states_the_pages_come_up() -> None:
    store, prompt = host(), tokens_of(90)
    serve(cache(mover(store)), prompt)
    c = cache(mover(store), e=fresh(boundaries=0))
    assert serve(c, prompt) == 80 - replay_length(micro(), 80)
    assert counted(c, "fallbacks") == {"no room": 1}


@pytest.mark.parametrize("room", [0, 1, 3, 5])
def test_with_too_few_pages_the_hit_is_shorter(room: int) -> None:
    store, prompt = host(), tokens_of(90)
    serve(cache(mover(store)), prompt)
    c = cache(mover(store))
    c.engine.take_pages(24 - room)
    request = begin(c, prompt)
    assert (0 if request.plan is None else request.plan.length) == room * P
    expected = cold_of(prompt[: room * P].astype(np.int64).tobytes()) if room else {}
    found = c.engine.rows(request.seq) if room else {}
    assert compare(found, {n: a for n, a in expected.items() if n != "logits"}).same
    assert counted(c, "fallbacks") == ({} if room == 5 else {"no room": 1})
    with pytest.raises(CapacityError):
        c.run(request)
    c.cancel(request)
    assert c.engine.free_pages + len(c._keys) == room  # nothing is lost by it


def test_two_engines_over_one_store() -> None:
    """Turns of a conversation go to one and the other: each finds what the other one has left."""
    store, said = host(), tokens_of(20)
    ones = [cache(mover(store), EndPoints()) for _ in range(2)]
    for turn in range(4):
        prompt, answer = join(said, tokens_of(5, 10 + turn)), tokens_of(3, 20 + turn)
        assert serve(ones[turn % 2], prompt, answer) == (len(said) if turn else 0)
        said = join(prompt, answer)


def test_an_approximate_sequence_leaves_nothing_behind() -> None:
    store, prompt = host(), tokens_of(60)
    serve(cache(mover(store), Zero()), prompt)
    before = set(store.scan())
    c = cache(mover(store), OneWindow())
    request = begin(c, join(prompt, ANSWER, tokens_of(30, 5)))
    assert request.plan is not None and not request.plan.exact
    c.run(request)
    c.finish(request)
    c.flush()
    assert set(store.scan()) == before


# Whose it is ------------------------------------------------------------------------------------------------


def test_nothing_is_found_under_another_name() -> None:
    """Another tenant, secret, salt or adapter, with the same tokens: nothing is asked that would be there."""
    store, prompt = host(), tokens_of(40)
    serve(cache(mover(store)), prompt)
    c = cache(mover(store))
    others: list[dict[str, Any]] = [
        dict(domain=Tenant("bob", None)),
        dict(domain=Tenant("alice", b"s" * 32)),
        dict(domain=Public("alice", PublicDomains(frozenset({"alice"})))),
        dict(salt=""),
        dict(adapter="0" * 64),
        dict(layout="rows"),
    ]
    for changes in others:
        request = c.begin(space(c.engine, **changes), prompt)
        assert request.plan is None, changes
        c.cancel(request)
    assert store.calls["get"] == 0 and not counted(c, "failures")
    assert serve(c, prompt) == 32


def test_of_another_model_or_page_size() -> None:
    m = mover(host())
    c = cache(m)
    for changes in (dict(model="0" * 64), dict(page_size=32)):
        for call in (c.begin, c.prefetch):
            with pytest.raises(ForeignNamespace):
                call(space(c.engine, **changes), tokens_of(20))
    with pytest.raises(ValueError, match="the mover has pages of 16 tokens, the engine of 32"):
        cache(m, e=fresh(page_size=32))
    with pytest.raises(ValueError):
        c.prefetch(space(c.engine), [1, -1])


def test_forget() -> None:
    """One namespace of an owner, then all of another owner's, on the device and below."""
    store, prompt, bob = host(), tokens_of(40), Tenant("bob", None)
    c = cache(mover(store))
    serve(c, prompt)
    for salt in ("x", "y"):
        request = c.begin(space(c.engine, bob, salt=salt), prompt)
        c.run(request)
        c.finish(request)
    total = store.stats().objects
    c.forget(space(c.engine))
    assert store.stats(space(c.engine).owner()).objects == 0 and store.stats().objects == total - 6
    assert serve(c, prompt) == 0 and serve(c, prompt) == 32
    c.forget_owner(bob)
    assert store.stats(space(c.engine, bob).owner()).objects == 0 and serve(c, prompt) == 32
    c.forget_owner(ALICE)
    assert store.stats().objects == 0 and c.engine.free_pages == 24 and c.engine.free_boundaries == 12
    assert not c._offload._held and not c._offload._saved


def test_forgetting_what_is_in_use_changes_nothing() -> None:
    store, prompt = host(), tokens_of(40)
    c = cache(mover(store))
    serve(c, prompt)
    request, before = begin(c, prompt), set(store.scan())
    for forget in (lambda: c.forget(space(c.engine)), lambda: c.forget_owner(ALICE)):
        with pytest.raises(NamespaceInUse):
            forget()
    assert set(store.scan()) == before
    c.cancel(request)
    assert serve(c, prompt) == 32


def test_forgetting_is_called_again_where_a_tier_failed() -> None:
    store, prompt = host(), tokens_of(40)
    c = cache(mover(store))
    serve(c, prompt)
    store.add(Fail("delete", Unavailable))
    with pytest.raises(Unavailable):
        c.forget(space(c.engine))
    c.forget(space(c.engine))
    assert store.stats().objects == 0 and serve(c, prompt) == 0


# When -------------------------------------------------------------------------------------------------------


def test_flush() -> None:
    """What is only on the device goes down, however little may be on its way at once; and once is enough."""

    def flushed() -> None:
        store, prompt = host(), tokens_of(90)
        store.add(Delay("put", 0.002), times=None)
        with ThreadPoolExecutor(2) as pool:
            c = cache(mover(store, write=Write.BACK, workers=pool, in_flight=1))
            serve(c, prompt)
            assert store.stats().objects == 0
            c.flush()
            assert serve(cache(mover(store)), prompt) == 80
            puts = store.calls["put"]
            c.flush()
            clear(c)
            c.mover.drain()
        assert store.calls["put"] == puts

    flushed()
    real = Saver.save
    with pytest.MonkeyPatch.context() as patch, pytest.raises(AssertionError):
        patch.setattr(Saver, "save", lambda *args, must, **options: real(*args, **options))
        flushed()


def test_what_a_tier_has_lost_goes_down_again() -> None:
    """A page is on the device and on a tier; the tier loses it; then it leaves the device."""

    def lost() -> int:
        store, prompt = host(9000), tokens_of(65)
        c = cache(mover(store), Zero())
        serve(c, prompt, ANSWER[:0])
        serve(c, tokens_of(65, 1), ANSWER[:0])  # it pushes the first one out of the store
        c.cancel(begin(c, tokens_of(20, 2)))  # which is noticed here, or nowhere
        clear(c)
        return serve(c, prompt)

    assert lost() > 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Offload, "poll", lambda self: self.mover.poll() and None)
        assert lost() == 0


def test_what_left_before_it_was_told_to_be_there() -> None:
    """Of what has left the device nothing is remembered: else it would never go down again."""
    workers = Workers(lambda name: name == "_save")
    c = cache(mover(host(), workers=workers), Zero())
    request = begin(c, tokens_of(40))
    c.run(request)
    c.finish(request)
    clear(c)
    workers.step()
    c.mover.poll()
    assert not c._offload._saved and not c._offload._held


def test_prefetch() -> None:
    """What lies far down is copied up before anybody asks for it; what is on the device is left alone."""
    upper, lower, prompt = host(name="upper"), host(name="lower"), tokens_of(90)
    serve(cache(mover(lower)), prompt, ANSWER[:0])
    c = cache(mover(upper, lower))
    c.prefetch(space(c.engine), prompt)
    assert upper.stats().objects == 10 and sources(c) == {}
    lower.down()
    assert serve(c, prompt) == 80 and sources(c)["upper"] == 80
    asked = upper.calls["exists"]
    c.prefetch(space(c.engine), prompt)
    c.prefetch(space(c.engine), prompt[:15])
    assert upper.calls["exists"] - asked <= 1


@pytest.mark.parametrize("slow", ["exists", "_load"])
def test_what_is_late_is_computed(slow: str) -> None:
    """The tier takes longer than computing would, to say what it has or to give it: cold, with the reason."""
    store, prompt = host(), tokens_of(90)
    serve(cache(mover(store)), prompt)
    workers = Workers(lambda name: name == slow)
    c = cache(mover(store, workers=workers), deadline=lambda tokens: 0.0)
    assert serve(c, prompt) == 0 and sources(c) == {"computed": 90}
    if slow == "_load":
        assert set(counted(c, "fallbacks")) == {"late"}
    else:
        assert counted(c, "failures") == {"host": {"exists": {"late": 1}}}
    workers.step()
    c.mover.drain()
    assert store.calls["get"] == 0 and not any(s._residents._pins for s in c.mover._shelves)


def test_the_deadline_goes_by_what_would_be_spared() -> None:
    asked: list[int] = []
    store, prompt = host(), tokens_of(90)
    c = cache(mover(store), deadline=lambda tokens: asked.append(tokens) or 1e6)
    serve(c, prompt)
    serve(c, join(prompt, tokens_of(3)))
    assert asked == [89, 92 - 80]


def test_what_is_matched_makes_no_room() -> None:
    """The only slot has a state of the hit: a better one below does not push it out."""

    def hit() -> tuple[int, int]:
        full, store, prompt = host(), host(), tokens_of(90)
        serve(cache(mover(full)), prompt)
        c = cache(mover(store), Periodic(4 * P), fresh(boundaries=1))
        serve(c, prompt[:81], ANSWER[:0])  # all pages are here, and the state at 64
        for address in {e.address for e in full.scan()} - {e.address for e in store.scan()}:
            store.put(full.get(address))
        store.add(Fail("get", Corrupt))
        return serve(c, prompt), c.metrics.refused

    assert hit() == (64, 0)
    real = RadixTree.lock
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RadixTree, "lock", lambda tree, match, length: real(tree, match, 0))
        assert hit() == (0, 1)


# Counting ---------------------------------------------------------------------------------------------------


def test_sources_sum_to_the_prompts() -> None:
    """Hits, replays, forks, cancelled requests, reloads: every prompt token is counted once."""
    store = host(60_000)
    for policy in EXACT:
        c = cache(mover(store), policy)
        asked = 0
        for seed in (0, 1, 0, 2, 1, 0):
            prompt = tokens_of(70 + 9 * seed, seed)
            request = begin(c, prompt)
            asked += len(prompt)
            c.run(request, 3)
            twin = c.fork(request)
            asked += twin.remaining
            c.cancel(twin)
            c.run(request)
            c.finish(request)
            clear(c)
        assert sum(sources(c).values()) == asked == c.metrics.prompt
        assert min(sources(c).values()) > 0
        assert sources(c)["computed"] == c.metrics.computed
        tiers = sources(c).get("host", 0) + sources(c).get("device", 0)
        assert tiers == c.metrics.reused and sources(c).get("replayed", 0) == c.metrics.replayed
        assert sources(c)["cancelled"] == c.metrics.cancelled
