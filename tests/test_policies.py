"""Reload policies: what they keep and plan at every edge, and that approximate state is never shared."""

from __future__ import annotations

import functools

import numpy as np
import pytest

from goldenkv.config import Numerics, micro, with_mtp
from goldenkv.engine import (
    ApproximateState,
    EndPoints,
    Engine,
    Full,
    OneWindow,
    Periodic,
    PrefixCache,
    ReloadPolicy,
    Zero,
    replay_length,
)
from goldenkv.engine.policies import End, Plan
from goldenkv.model.weights import Model
from goldenkv.prefix import Namespace, Tenant, TensorParallel

CONFIG, NUMERICS = with_mtp(micro()), Numerics(tile=8, index_block=8, key_block=8)
WINDOW, P = CONFIG.sliding_window, 16
EXACT: list[ReloadPolicy] = [Full(), Periodic(2 * P), EndPoints(), Zero()]
PAGE, PROMPT, OUTPUT = (frozenset({end}) for end in End)


@pytest.mark.parametrize(
    ("policy", "kept"),
    [
        (Full(), {(16, PAGE), (32, PAGE), (32, PAGE | PROMPT)}),
        (Periodic(P), {(16, PAGE), (32, PAGE), (32, PAGE | PROMPT)}),
        (Periodic(2 * P), {(32, PAGE), (32, PAGE | PROMPT)}),
        (EndPoints(), {(20, PROMPT), (21, OUTPUT), (32, PAGE | PROMPT), (1, PROMPT | OUTPUT)}),
        (Zero(), set()),
        (OneWindow(), set()),
    ],
    ids=["full", "every page", "every second page", "end points", "zero", "one window"],
)
def test_what_is_kept(policy: ReloadPolicy, kept: set) -> None:
    asked = {(16, PAGE), (20, PROMPT), (21, OUTPUT), (32, PAGE), (32, PAGE | PROMPT), (1, PROMPT | OUTPUT)}
    assert {each for each in asked if policy.keeps(*each)} == kept


@pytest.mark.parametrize("policy", EXACT, ids=str)
def test_the_plan_that_runs_the_fewest_tokens(policy: ReloadPolicy) -> None:
    """What was kept decides, not which policy kept it: the last state, unless a replay needs no more."""
    reach = replay_length(CONFIG, 96)
    assert reach == 29
    for length, boundaries, expected in [
        (0, [], None),
        (reach, [], None),  # every token would run
        (reach + 1, [], Plan(reach + 1, None, 1)),
        (96, [], Plan(96, None, 96 - reach)),
        (96, [(96, 5)], Plan(96, 5, 96)),
        (96, [(32, 4), (80, 5)], Plan(96, 5, 80)),
        (96, [(96 - reach, 5)], Plan(96, 5, 96 - reach)),
        (96, [(96 - reach - 1, 5)], Plan(96, None, 96 - reach)),
        (1, [(1, 0)], Plan(1, 0, 1)),
        (16, [(16, 0)], Plan(16, 0, 16)),
        (20, [(16, 7), (20, 0)], Plan(20, 0, 20)),
    ]:
        assert policy.plan(CONFIG, length, boundaries) == expected, (length, boundaries)


def test_one_window_says_what_it_is() -> None:
    for length, expected in [
        (WINDOW, None),
        (WINDOW + 1, Plan(WINDOW + 1, None, 1, exact=False)),
        (96, Plan(96, None, 96 - WINDOW, exact=False)),
    ]:
        assert OneWindow().plan(CONFIG, length, [(length, 3)]) == expected


def test_a_period_of_whole_pages() -> None:
    Periodic(48).check(16)
    for period, page_size in [(0, 16), (-16, 16), (24, 16), (16, 32)]:
        with pytest.raises(ValueError, match=rf"{period=} must be a positive multiple of page_size"):
            Periodic(period).check(page_size)
    for policy in (Full(), EndPoints(), Zero(), OneWindow()):
        policy.check(16)


# Approximate state ------------------------------------------------------------------------------------------


@functools.cache
def model() -> Model:
    return Model(CONFIG, NUMERICS)


def approximate() -> tuple[PrefixCache, Namespace]:
    """A cache with 64 tokens in it, whose policy has just become approximate."""
    sizes = dict(slots=4, max_length=96, page_size=P, pages=24, boundaries=8)
    engine = Engine(model(), CONFIG, NUMERICS, **sizes, fill=np.nan, poison=True)
    cache = PrefixCache(engine, Full())
    shard = TensorParallel(1, 0, "none")
    names = dict.fromkeys(("tokenizer", "chat_template", "adapter", "salt"))
    space = Namespace(
        domain=Tenant("a", None),
        model=engine.fingerprint,
        layout="rows",
        page_size=P,
        dtype="float32",
        tensor_parallel=shard,
        media=(),
        **names,
    )
    request = cache.begin(space, PROMPT_TOKENS[:64])
    cache.run(request)
    cache.finish(request)
    cache.policy = OneWindow()
    return cache, space


PROMPT_TOKENS = np.random.default_rng(0).integers(0, 64, 90).tolist()


def test_approximate_state_is_published_nowhere() -> None:
    cache, space = approximate()
    before = cache.tree.stats()
    assert (before.pages, before.boundaries) == (4, 4)
    request = cache.begin(space, PROMPT_TOKENS)
    assert request.plan == Plan(64, None, 64 - WINDOW, exact=False)
    cache.policy = Full()  # what it keeps now must not be of that request
    cache.run(request)
    fork = cache.fork(request)
    for each in (request, fork):
        for _ in range(6):
            cache.decode(each, 1)
        for keep in (
            lambda each=each: cache.publish(each),
            lambda each=each: cache.engine.save_boundary(each.seq),
            lambda each=each: cache.engine.snapshot(each.seq),
        ):
            with pytest.raises(ApproximateState, match="approximate and stays with it"):
                keep()
        assert each.seq.length == 96 and not each.boundaries
        cache.finish(each)
    after = cache.tree.stats()
    assert (after.pages, after.boundaries) == (4, 4)
    assert (cache.engine.free_slots, cache.engine.free_pages, cache.engine.free_boundaries) == (4, 20, 4)
    exact = cache.begin(space, PROMPT_TOKENS)
    assert exact.plan == Plan(64, exact.plan.boundary, 64) and exact.seq.exact


def test_control_it_is_approximate() -> None:
    """The same requests with an exact policy end in other bits, and are published."""
    cache, space = approximate()
    short = cache.begin(space, PROMPT_TOKENS)
    cache.policy = Zero()
    whole = cache.begin(space, PROMPT_TOKENS)
    assert whole.plan is not None and whole.plan.exact and not short.seq.exact
    assert cache.run(short).tobytes() != cache.run(whole).tobytes()
    cache.finish(short)
    cache.finish(whole)
    assert cache.tree.stats().pages == 5
