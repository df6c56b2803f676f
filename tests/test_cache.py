"""The prefix cache: what is reused at every edge, what is counted, and errors that leave nothing behind."""

from __future__ import annotations

import functools
from dataclasses import replace

import numpy as np
import pytest

from goldenkv.config import Numerics, micro, with_mtp
from goldenkv.engine import (
    CapacityError,
    EndPoints,
    Engine,
    ForeignNamespace,
    Full,
    Metrics,
    OneWindow,
    Periodic,
    PrefixCache,
    ReloadPolicy,
    Request,
    Zero,
    replay_length,
)
from goldenkv.model.weights import Model
from goldenkv.prefix import Namespace, NamespaceInUse, PageKeys, Tenant, TensorParallel
from goldenkv.state import Rows, compare

CONFIG, NUMERICS = with_mtp(micro()), Numerics(tile=8, index_block=8, key_block=8)
P = 16
REPLAY = replay_length(CONFIG, 5 * P)
POLICIES = [Full(), Periodic(2 * P), EndPoints(), Zero()]
named = functools.partial(pytest.mark.parametrize, ids=lambda p: type(p).__name__)


@functools.cache
def model() -> Model:
    return Model(CONFIG, NUMERICS)


def new(policy: ReloadPolicy | None = None, pages: int = 24, boundaries: int = 8) -> PrefixCache:
    """A cache over an engine of its own. All have one shape: pages that it does not get are taken."""
    sizes = dict(slots=4, max_length=96, page_size=P, pages=24, boundaries=boundaries)
    engine = Engine(model(), CONFIG, NUMERICS, **sizes, fill=np.nan, poison=True)
    engine._pages.take(24 - pages)
    return PrefixCache(engine, policy)


@functools.cache
def digest() -> str:
    return Engine(model(), CONFIG, NUMERICS, max_length=8).fingerprint


def space(tenant: str = "a") -> Namespace:
    return Namespace(
        domain=Tenant(tenant, None),
        model=digest(),
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


def tokens_of(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, 64, length).tolist()


@functools.lru_cache(maxsize=256)
def cold_of(tokens: tuple[int, ...]) -> Rows:
    e = new().engine
    seq = e.open()
    logits = e.prefill(seq, tokens)
    return e.rows(seq) | {"logits": logits[None]}


def is_cold(cache: PrefixCache, request: Request, logits: np.ndarray) -> bool:
    """State and last logits have the bits of a cold run of the request's tokens."""
    found = cache.engine.rows(request.seq) | {"logits": logits[None]}
    return all(ok.all() for ok in compare(found, cold_of(tuple(request.tokens))).by_name.values())


def ask(cache: PrefixCache, prompt: list[int], tenant: str = "a", more: tuple[int, ...] = ()) -> Request:
    """A whole request, compared with a cold run."""
    request = cache.begin(space(tenant), prompt)
    logits = cache.run(request)
    assert is_cold(cache, request, logits)
    for token in more:
        logits = cache.decode(request, token)
    assert is_cold(cache, request, logits)
    cache.finish(request)
    return request


def is_empty(cache: PrefixCache, pages: int = 24) -> bool:
    e = cache.engine
    return (e.free_slots, e.free_pages, e.free_boundaries, cache.tree.stats().nodes) == (4, pages, 8, 0)


# What is reused ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 2, P - 1, P, P + 1, 2 * P, 5 * P, 6 * P])
@named("policy", POLICIES)
def test_a_prompt_asked_again_runs_no_more_than_it_must(policy: ReloadPolicy, length: int) -> None:
    """The last token always runs, for its logits; what the first time finished no page is not there."""
    cache = new(policy)
    prompt = tokens_of(length)
    assert ask(cache, prompt).plan is None
    found = ask(cache, prompt)
    entries = (length - 1) // P * P
    if isinstance(policy, Full):
        start = entries
    elif isinstance(policy, Periodic):
        start = max(entries // (2 * P) * 2 * P, entries - REPLAY)
    else:  # the state kept where the prompt ended is one token too far
        start = max(0, entries - REPLAY)
    assert (0 if found.plan is None else found.plan.start) == start
    replayed = 0 if found.plan is None else entries - start
    assert cache.metrics == Metrics(
        requests=2, prompt=2 * length, reused=start, replayed=replayed, computed=2 * length - start - replayed
    )
    cache.forget(space())
    assert is_empty(cache)


@pytest.mark.parametrize("length", [1, P - 1, P, P + 1, 40])
def test_the_next_turn_begins_where_the_last_one_ended(length: int) -> None:
    """In the middle of a page too: end-points keep the state, and the unfinished page with it."""
    cache = new(EndPoints())
    turn = ask(cache, tokens_of(length), more=(1, 2, 3))
    found = ask(cache, [*turn.tokens, 4, 5])
    assert found.plan is not None and found.plan.start == found.plan.length == length + 3
    assert (cache.metrics.reused, cache.metrics.computed) == (length + 3, length + 2)
    edited = ask(cache, [*turn.tokens[:-1], 60, 61])
    if length == P - 1:  # its end lies within a page that is now whole, and has no state at its end
        assert edited.plan is None
    else:  # from the end of the prompt on
        assert edited.plan is not None and edited.plan.start == edited.plan.length == length


def test_a_prefix_of_what_is_cached() -> None:
    cache = new()
    long = tokens_of(80)
    ask(cache, long)
    for length, start in [(79, 64), (64, 48), (49, 48), (48, 32), (17, 16), (16, 0), (3, 0)]:
        plan = ask(cache, long[:length]).plan
        assert (0 if plan is None else plan.start) == start
    branch = ask(cache, [*long[:40], *tokens_of(30, seed=5)])
    assert branch.plan is not None and branch.plan.length == 32


def test_equal_prompts_at_once_are_kept_once() -> None:
    cache = new()
    prompt = tokens_of(48)
    both = [cache.begin(space(), prompt) for _ in range(2)]
    logits = [cache.run(each) for each in both]
    assert cache.tree.stats().pages == 3 and cache.engine.free_pages == 24 - 6
    assert all(is_cold(cache, each, row) for each, row in zip(both, logits, strict=True))
    for each in both:
        cache.finish(each)
    assert (cache.engine.free_pages, cache.engine.free_boundaries) == (24 - 3, 8 - 3)
    ask(cache, prompt)
    assert cache.metrics.refused == 0


@named("policy", POLICIES)
def test_without_room_for_boundary_states(policy: ReloadPolicy) -> None:
    cache = new(policy, boundaries=0)
    ask(cache, tokens_of(64))
    found = ask(cache, tokens_of(80))
    assert found.plan is not None and found.plan.boundary is None
    assert (found.plan.length, found.plan.start) == (64, 64 - REPLAY)


def test_another_tenant_finds_nothing() -> None:
    cache = new()
    ask(cache, tokens_of(64))
    assert ask(cache, tokens_of(64), "b").plan is None
    assert cache.tree.stats().namespaces == 2 and cache.engine.free_pages == 24 - 8
    cache.forget(space("a"))
    assert ask(cache, tokens_of(64), "a").plan is None
    assert ask(cache, tokens_of(64), "b").plan is not None


# Room -------------------------------------------------------------------------------------------------------


@named("policy", POLICIES)
def test_what_a_running_request_reuses_stays(policy: ReloadPolicy) -> None:
    """Its pages and the state it began with; all else goes."""
    cache = new(policy)
    ask(cache, tokens_of(64))
    ask(cache, tokens_of(64, seed=1))
    request = cache.begin(space(), tokens_of(70))
    cache.evict(pages=99, boundaries=99)
    assert sorted(cache.tree.holdings.pages.all()) == sorted(request.seq.pages)
    twin = cache.begin(space(), tokens_of(70))
    assert twin.plan is not None and twin.plan.length == 64
    with pytest.raises(NamespaceInUse):
        cache.forget(space())
    for each in (request, twin):
        assert is_cold(cache, each, cache.run(each))
        cache.cancel(each)
    cache.evict(pages=99, boundaries=99)
    assert is_empty(cache)


def test_what_was_used_last_stays() -> None:
    cache = new()
    ask(cache, tokens_of(64))
    ask(cache, tokens_of(64, seed=1))
    cache.cancel(cache.begin(space(), tokens_of(65)))  # a use, and nothing is published
    cache.evict(pages=4)
    found = [cache.begin(space(), tokens_of(65, seed)).plan for seed in (0, 1)]
    assert found[0] is not None and found[0].start == 64 and found[1] is None


def test_pages_are_evicted_while_a_request_is_reloaded() -> None:
    """It takes the room of others, least recently used first, and none of its own."""
    cache = new(Zero(), pages=8)
    ask(cache, tokens_of(64))
    ask(cache, tokens_of(64, seed=1))
    assert cache.engine.free_pages == 0
    found = ask(cache, [*tokens_of(64), *tokens_of(30, seed=2)])
    assert found.plan is not None and found.plan.length == 64
    assert cache.metrics.evicted_pages == 2
    assert ask(cache, tokens_of(64, seed=1)).plan is not None  # two of its pages were left


def test_no_page_is_left() -> None:
    """The request stands where it stood, at the start of the prompt, within it and behind it."""
    cache = new(pages=5)
    first, second = (cache.begin(space(), tokens_of(48, seed)) for seed in (0, 1))
    with pytest.raises(CapacityError, match="6 pages needed"):
        cache.run(cache.begin(space(), tokens_of(81)))
    cache.run(first)
    for count in (None, 33):
        with pytest.raises(CapacityError, match="3 pages needed, 2 free of 24"):
            cache.run(second, count)
        assert (second.seq.length, second.seq.pages, second.tokens) == (0, [], [])
    assert cache.metrics.computed == 48
    assert is_cold(cache, second, cache.run(second, 32))
    with pytest.raises(CapacityError, match="1 pages needed, 0 free of 24"):
        cache.decode(first, 3)
    cache.cancel(second)
    assert is_cold(cache, first, cache.decode(first, 4))
    assert first.keys.pages == PageKeys(space(), first.tokens).pages


def test_a_token_that_found_no_room_is_in_no_key() -> None:
    """Otherwise all pages behind it would be published under keys of other tokens, and never be used."""
    cache = new(pages=4)
    other, request = cache.begin(space("b"), tokens_of(P)), cache.begin(space(), tokens_of(2 * P))
    cache.run(other)
    cache.run(request)
    fork = cache.fork(request)
    cache.decode(fork, 1)
    with pytest.raises(CapacityError):
        cache.decode(request, 1)
    cache.cancel(fork)
    for token in tokens_of(P, seed=3):
        logits = cache.decode(request, token)
    assert is_cold(cache, request, logits)
    cache.finish(request)
    found = cache.begin(space(), [*request.tokens, 5])
    assert found.plan is not None and found.plan.length == 3 * P and not cache.metrics.refused


def test_a_reload_needs_no_page_and_what_follows_does() -> None:
    """A replay writes no entry, so not even an unfinished page is copied for it; the next token's page is.

    No page can go meanwhile: the request reuses them all.
    """
    cache = new(EndPoints(), pages=3)
    ask(cache, tokens_of(40))
    cache.policy = OneWindow()
    request = cache.begin(space(), tokens_of(45))
    assert request.seq.length == 40 and cache.engine.free_pages == 0
    with pytest.raises(CapacityError, match="1 pages needed, 0 free of 24"):
        cache.run(request)
    assert (request.remaining, cache.metrics.evicted_pages, cache.tree.stats().pages) == (5, 0, 3)
    cache.cancel(request)
    assert cache.metrics.cancelled == 5 and cache.engine.free_slots == 4
    cache.forget(space())
    assert is_empty(cache, pages=3)


def test_no_slot_is_left() -> None:
    cache = new()
    ask(cache, tokens_of(48))
    running = [cache.begin(space(), tokens_of(48)) for _ in range(4)]
    before = replace(cache.metrics)
    for prompt in (tokens_of(48), tokens_of(48, seed=1)):  # a hit and a miss
        with pytest.raises(CapacityError, match="all 4 slots"):
            cache.begin(space(), prompt)
    with pytest.raises(CapacityError, match="all 4 slots"):
        cache.fork(running[0])
    assert cache.metrics == before and cache.tree.stats().locks == 4
    for each in running:
        cache.cancel(each)
    cache.forget(space())
    assert is_empty(cache)


# Requests ---------------------------------------------------------------------------------------------------


def test_forks_go_their_own_ways() -> None:
    cache = new(EndPoints())
    ask(cache, tokens_of(40))
    request = cache.begin(space(), tokens_of(60))
    cache.run(request, 5)
    fork = cache.fork(request)
    assert fork.remaining == request.remaining == 15
    assert is_cold(cache, request, cache.run(request))
    assert is_cold(cache, request, cache.decode(request, 7))
    cache.finish(request)
    assert is_cold(cache, fork, cache.run(fork, 15))
    assert is_cold(cache, fork, cache.decode(fork, 8))
    cache.finish(fork)
    m = cache.metrics
    assert m.prompt == m.reused + m.replayed + m.computed == 40 + 60 + 15


def test_a_cancelled_request_leaves_nothing() -> None:
    cache = new()
    for count in (1, P, 2 * P + 3):
        request = cache.begin(space(), tokens_of(48))
        cache.run(request, count)
        cache.cancel(request)
        assert is_empty(cache)


def test_what_a_prompt_that_ended_early_left() -> None:
    cache = new(EndPoints())
    request = cache.begin(space(), tokens_of(48))
    cache.run(request, 20)
    cache.finish(request)
    found = ask(cache, tokens_of(48))
    assert found.plan is not None and found.plan.start == 20
    unused = cache.begin(space("b"), tokens_of(48))
    cache.finish(unused)
    assert cache.tree.stats().namespaces == 1


# Bad input --------------------------------------------------------------------------------------------------


def test_ended_requests() -> None:
    cache = new()
    request = ask(cache, tokens_of(20))
    calls = (cache.run, cache.fork, cache.finish, cache.cancel, cache.publish)
    for call in (*calls, lambda r: cache.decode(r, 1)):
        with pytest.raises(ValueError, match="the request has ended"):
            call(request)
    assert cache.engine.free_slots == 4


def test_too_early_and_too_much() -> None:
    cache = new()
    request = cache.begin(space(), tokens_of(20))
    for count in (0, -1, 21):
        with pytest.raises(ValueError, match=rf"count={count} must lie in 1 \.\. 20"):
            cache.run(request, count)
    cache.run(request, 18)
    with pytest.raises(ValueError, match="2 prompt tokens have not run yet"):
        cache.decode(request, 1)
    cache.run(request)
    with pytest.raises(ValueError, match=r"must lie in 1 \.\. 0"):
        cache.run(request)
    for token in (-1, 64):
        with pytest.raises(ValueError, match="outside the vocabulary"):
            cache.decode(request, token)
    assert is_cold(cache, request, cache.decode(request, 63))


@pytest.mark.parametrize("prompt", [[], [64], [-1], [[1]], [1.5]], ids=str)
def test_bad_prompts(prompt: list) -> None:
    cache = new()
    with pytest.raises(ValueError, match=r"non-empty list of integers|outside the vocabulary"):
        cache.begin(space(), prompt)
    assert is_empty(cache) and cache.metrics == Metrics()


@pytest.mark.parametrize("change", [{"model": "0a" * 32}, {"page_size": 32}], ids=str)
def test_a_namespace_of_another_engine(change: dict) -> None:
    cache = new()
    with pytest.raises(ForeignNamespace, match=r"this engine has .* pages of 16 tokens"):
        cache.begin(replace(space(), **change), [1, 2])
    assert is_empty(cache) and cache.metrics == Metrics()


def test_a_policy_that_does_not_fit() -> None:
    for period in (0, -P, 24):
        with pytest.raises(ValueError, match=f"period={period} must be a positive multiple of page_size=16"):
            new(Periodic(period))
