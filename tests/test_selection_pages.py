"""Pages: replays against brute force, what strategies are told, and a page behind another prefix.

Controls: Belady's rule turned round loses; a cache that is not fed evicts the wrong document; equal prefixes
make no difference, and one wrong row shows.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from itertools import combinations

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from goldenkv.config import Numerics, micro
from goldenkv.engine import Engine, PrefixCache
from goldenkv.model.attention import layer_frequencies
from goldenkv.model.weights import Model
from goldenkv.ops.linear import project
from goldenkv.ops.norm import rms_norm
from goldenkv.ops.quant import hadamard
from goldenkv.ops.rope import rotate
from goldenkv.prefix import (
    LRU,
    Namespace,
    SelectionDriven,
    SpeculativePrefetch,
    Tenant,
    TensorParallel,
)
from goldenkv.selection import (
    Recording,
    RecordingError,
    SpliceError,
    Splicer,
    Step,
    attend_to,
    compare_policies,
    decided_by_id,
    feed,
    page_steps,
    replay,
    row_differences,
    shadow,
    tune,
)
from goldenkv.selection.mass import layer_input, query_and_row
from goldenkv.selection.residency import Belady, ByStrategy, RandomPage, Speculative
from goldenkv.state import compare
from goldenkv.state import pool as pools

NUMERICS = Numerics(tile=8, index_block=8, key_block=8)
CONFIG = replace(micro(), num_hidden_layers=4, compress_ratios=(0, 0, 4, 8))
W, PAGE = CONFIG.sliding_window, 16
TOKENS = np.random.default_rng(0).integers(0, 64, 400).astype(np.int32)


@functools.cache
def model() -> Model:
    return Model(CONFIG, NUMERICS)


@functools.cache
def engine() -> Engine:
    return new_engine()


def new_engine() -> Engine:
    """All have one shape, so that programs are compiled once."""
    sizes = dict(slots=3, max_length=160, page_size=PAGE, pages=30, boundaries=4)
    return Engine(model(), CONFIG, NUMERICS, **sizes)


# Replays ----------------------------------------------------------------------------------------------------


def recording(*needs: tuple[int, ...]) -> Recording:
    """One layer with an entry a token, so that each query sees all entries up to its own."""
    ids = np.full((1, len(needs), max(len(n) for n in needs)), -1)
    for query, chosen in enumerate(needs):
        ids[0, query, : len(chosen)] = chosen
    return Recording(np.zeros(len(needs), np.int32), (0,), 1, ids)


def test_pages_of_a_recording():
    r = recording((0,), (1, 0), (2, 1, 0), (3, 2, 0))
    assert page_steps(r, 2) == [Step((0,), (0,)), Step((), (0,)), Step((1,), (0, 1)), Step((), (1, 0))]
    assert page_steps(r, 1, since=2) == [Step((0, 1, 2), (0, 1, 2)), Step((3,), (0, 2, 3))]
    for page_tokens, since in ((0, 0), (2, 4), (2, -1)):
        with pytest.raises(RecordingError):
            page_steps(r, page_tokens, since)


def test_all_layers_count_together():
    both = Recording(np.zeros(1, np.int32), (0, 1), 1, np.zeros((2, 1, 1), int))
    assert page_steps(both, 1) == [Step((0,), (0,))]


step = st.builds(
    Step,
    st.just(()),
    st.lists(st.integers(0, 3), min_size=1, max_size=3, unique=True).map(tuple),
)


def best_hits(steps: list[Step], capacity: int) -> int:
    """Every way to evict, tried."""
    states = {frozenset(): 0}
    for page in [page for one in steps for page in one.needed]:
        after: dict[frozenset, int] = {}
        for held, hits in states.items():
            if page in held:
                options = {held: hits + 1}
            elif len(held) < capacity:
                options = {held | {page}: hits}
            else:
                options = {frozenset(kept) | {page}: hits for kept in combinations(held, capacity - 1)}
            for option, count in options.items():
                after[option] = max(after.get(option, -1), count)
        states = after
    return max(states.values())


@settings(max_examples=120)
@given(st.lists(step, min_size=1, max_size=6), st.integers(1, 4))
def test_belady_is_the_best_there_is(steps, capacity):
    found = replay(steps, capacity, Belady(steps))
    assert found.hits == best_hits(steps, capacity)
    for policy in (RandomPage(np.random.default_rng(0)), ByStrategy(LRU(), fed=False)):
        other = replay(steps, capacity, policy)
        assert other.hits <= found.hits and other.needed == found.needed == sum(len(s.needed) for s in steps)
        assert other.moved == other.needed - other.hits


def test_control_the_rule_turned_round_is_not():
    class Wrong(Belady):
        def victim(self, resident):
            return min(resident, key=self._next)

    steps = [Step((), (page,)) for page in (0, 1, 2, 0, 1, 2, 0)]
    assert replay(steps, 2, Belady(steps)).hits == best_hits(steps, 2) == 2
    assert replay(steps, 2, Wrong(steps)).hits < 2


def test_what_is_made_on_the_device_need_not_come():
    steps = [Step((0, 1), (0,)), Step((), (1,)), Step((), (1, 0))]
    for name, (found,) in compare_policies(steps, [2], since=0).items():
        if name != "speculative":  # it keeps one of the two places aside
            assert (found.needed, found.hits, found.moved) == (4, 4, 0), name
    assert replay(steps, 1, Belady(steps), since=2).needed == 2


def test_no_page_leaves_that_is_still_to_be_gathered():
    """0 was used last, yet 1 is still to come."""
    steps = [Step((1,), (1,)), Step((0,), (0,)), Step((), (2, 1)), Step((), (1,))]
    assert replay(steps, 2, ByStrategy(SelectionDriven(), fed=True)).hits == 4
    with pytest.raises(RecordingError, match="at least 1 page"):
        replay(steps, 0, RandomPage(np.random.default_rng(0)))


def test_feeding_a_strategy_pays_where_a_page_is_needed_again_and_again():
    steps = [Step((0, 1), (0,))] + [Step((page,), (0,)) for page in range(2, 12)]
    fed = replay(steps, 3, ByStrategy(SelectionDriven(), fed=True))
    blind = replay(steps, 3, ByStrategy(LRU(), fed=False))
    assert fed.hits == fed.needed == 11 and blind.hits < 11
    assert replay(steps, 3, ByStrategy(LRU(sinks=1), fed=False)).hits == 11  # and page 0 is a sink


def test_prefetch_fetches_what_it_expects():
    """Pages 1 and 2 go together; only one of them has a place. The prefetcher brings the other one."""
    steps = [Step((0, 1, 2), (1, 2))] + [Step((), (1, 2))] * 9
    prefetch = SpeculativePrefetch(structure=0)
    found = replay(steps, 1, Speculative(prefetch, 1), since=2)
    demand = replay(steps, 2, ByStrategy(SelectionDriven(), fed=True), since=2)
    assert demand.hits == 16 and found.needed == 16
    assert found.hits == 8 and found.moved == 16  # each step one fetched ahead, one on demand
    assert set(tune(steps, 2, since=2)) > {"as it is", "structure only", "history only"}


# Feeding a cache --------------------------------------------------------------------------------------------


def cache() -> tuple[PrefixCache, Namespace]:
    c = PrefixCache(new_engine(), strategy=SelectionDriven())
    return c, Namespace(
        domain=Tenant("a", None),
        model=c.engine.fingerprint,
        tokenizer=None,
        chat_template=None,
        layout="rows",
        page_size=PAGE,
        dtype=NUMERICS.dtype,
        tensor_parallel=TensorParallel(size=1, rank=0, split="none"),
        adapter=None,
        media=(),
        salt=None,
    )


@pytest.mark.parametrize("fed", [True, False], ids=["fed", "control_not_fed"])
def test_a_fed_cache_keeps_what_was_selected(fed):
    c, space = cache()
    old = c.begin(space, TOKENS[:48])
    c.run(old)
    new = c.begin(space, TOKENS[100:148])
    c.run(new)
    before = c.engine.rows(old.seq)
    ids = shadow(c, old, TOKENS[48:56])
    assert ids.shape == (1, 8, 2) and (ids >= 0).all()
    assert compare(before, c.engine.rows(old.seq)).same and old.seq.length == 48 and c.engine.free_slots == 1
    if fed:
        feed(c, old, np.arange(12))  # all of its entries
    for request in (old, new):
        c.cancel(request)
    c.evict(pages=3)
    lengths = [c.tree.match(space.digest(), TOKENS[at : at + 48]).length for at in (0, 100)]
    assert lengths == ([48, 0] if fed else [0, 48])


def test_ids_become_the_pages_of_the_request():
    c, space = cache()
    request = c.begin(space, TOKENS[:48])
    c.run(request)
    told = []
    c.tree.strategy.selected = lambda pages, now: told.append((pages.tolist(), now > c.tree.holdings.now))
    feed(c, request, np.array([[0, -1], [3, 11]]))
    feed(c, request, np.array([-1]))
    assert told == [([request.seq.pages[0], request.seq.pages[2]], True), ([], True)]
    with pytest.raises(ValueError, match="entry 12 was selected, but the pages of this request hold 12"):
        feed(c, request, np.array([12]))
    c.cancel(request)
    with pytest.raises(ValueError, match="has ended"):
        feed(c, request, np.array([0]))


# Attention mass ---------------------------------------------------------------------------------------------


def test_shares_add_up_and_go_where_they_may():
    found = attend_to(engine(), model(), TOKENS[:100])
    at = np.arange(100)
    for layer, mass in enumerate(found.mass):
        total = mass.sink + mass.tokens.sum(axis=1) + mass.entries.sum(axis=1)
        assert total == pytest.approx(1, abs=1e-5)
        distance = at[:, None] - at
        assert ((mass.tokens > 0) == ((distance >= 0) & (distance < W))).all()
        ratio = CONFIG.compress_ratios[layer]
        assert mass.entries.shape == (100, 100 // ratio if ratio else 0)
    assert ((found.mass[2].entries > 0) == found.recording.mask(0)).all()
    visible = np.arange(12) < ((at + 1) // 8)[:, None]
    assert ((found.mass[3].entries > 0) == visible).all()


def test_the_recomputed_inputs_are_those_of_the_engine():
    """Index queries follow from the layer's input, window rows from its input and weights."""
    seq = engine().open()
    _, probe = engine().prefill_probed(seq, TOKENS[:100])
    rows = engine().rows(seq)
    engine().close(seq)
    for number in CONFIG.layers:
        layer = model().layers[number]
        x = layer_input(engine(), model(), TOKENS[:100], probe, number)
        _, row = query_and_row(engine(), layer, x, number)
        assert np.asarray(row)[-(W - 1) :] == pytest.approx(rows[f"layers.{number}.window"], abs=1e-5)
        if probe.index_q[number] is not None:
            a = layer.attention
            latent = rms_norm(project(x, a.q_down[...]), a.q_norm[...], CONFIG.rms_norm_eps)
            q = project(latent, a.indexer.q[...]).reshape(100, CONFIG.index_n_heads, -1)
            q = hadamard(rotate(q, jnp.arange(100), layer_frequencies(CONFIG, number)))
            assert np.asarray(q) == pytest.approx(probe.index_q[number], abs=1e-5)


def test_ties_are_told_from_choices():
    scores = np.array([[0, 0, 0, 3.0], [0, 5, 4, 3], [0, 0, 4, 3], [0, -1, 2, 0], [0, 0, 0, 0]])
    ids = np.array([[3, 0], [1, 2], [2, 0], [2, 0], [-1, -1]])
    visible = np.array([4, 4, 3, 3, 0])
    # One of two for its id; none; one (entry 1 ties, 3 is not visible); none (no other has 0); nothing.
    by_id = decided_by_id(scores, visible, ids)
    assert by_id.tolist() == [[False, True], [False] * 2, [False, True], [False] * 2, [False] * 2]


@pytest.mark.parametrize("dead", [False, True], ids=["alive", "control_dead"])
def test_an_indexer_that_does_not_respond_is_seen(dead):
    m = Model(CONFIG, NUMERICS)
    if dead:
        weight = m.layers[2].attention.indexer.head_weight
        weight[...] = jnp.zeros_like(weight[...])
    sizes = dict(slots=3, max_length=160, page_size=PAGE, pages=30, boundaries=4)
    found = attend_to(Engine(m, CONFIG, NUMERICS, **sizes), m, TOKENS[:100])
    choices = found.scored.mask(0)[found.recording.first_choice :]
    assert found.share_by_id(0) == 1 and not choices.any() if dead else found.share_by_id(0) < 0.1
    assert (found.recording.ids[0, -1].tolist() == [0, 1]) == dead


def test_rounded_rows_are_refused():
    numerics = replace(NUMERICS, fake_quantisation=True)
    e = Engine(Model(CONFIG, numerics), CONFIG, numerics, max_length=32, page_size=PAGE)
    with pytest.raises(ValueError, match="fake_quantisation must be off"):
        attend_to(e, model(), TOKENS[:16])


# Another prefix ---------------------------------------------------------------------------------------------

LEFT, RIGHT, BLOCK, AFTER = TOKENS[:32], TOKENS[32:64], TOKENS[64:112], TOKENS[112:136]


def differences(left, right):
    return {(d.layer, d.kind): d for d in row_differences(engine(), left, right, BLOCK)}


def test_rows_are_equal_as_far_as_windows_reach_and_no_further():
    found = differences(LEFT, RIGHT)
    assert [found[layer, "window"].first_equal for layer in CONFIG.layers] == [0, W - 1, 2 * (W - 1), None]
    # Layer 2 is the first with entries. Its inputs are exact from token 14 on; block 4 is 16 .. 19, and an
    # entry also takes the block before it: so from entry 5 on.
    assert found[2, "entries"].first_equal == found[2, "index_keys"].first_equal == 5
    # In layer 3 a row is right only where all that its query selected in layer 2 is.
    assert found[3, "window"].equal.mean() < 0.1 and not found[3, "entries"].equal.any()
    for difference in found.values():
        assert ((difference.relative == 0) | ~difference.equal).all()
        assert len(difference.equal) == 48 // (
            1 if difference.kind == "window" else 4 if difference.layer == 2 else 8
        )
    means = [found[layer, "window"].relative.mean() for layer in CONFIG.layers]
    assert means == sorted(means) and means[0] == 0 < means[1]


def test_equal_prefixes_make_no_difference():
    assert all(d.equal.all() and not d.relative.any() for d in differences(LEFT, LEFT).values())
    exact = Splicer(engine(), LEFT, BLOCK, AFTER).splice(LEFT)
    assert exact.equal and exact.divergence == 0 and exact.agreement == 1 and exact.loss == exact.exact_loss


def test_control_one_wrong_row_shows(monkeypatch):
    read, calls = pools.read_rows, []

    def damaged(*args):
        rows = read(*args)
        calls.append(1)
        if len(calls) == 3:
            rows["layers.2.entries"][-1, 0] += 1
        return rows

    monkeypatch.setattr(pools, "read_rows", damaged)
    wrong = [name for name, d in differences(LEFT, LEFT).items() if not d.equal.all()]
    assert wrong == [(2, "entries")]


def test_shifted_rows_are_turned_to_their_place():
    """Layer 0 knows nothing of a prefix: turned, its rows are the others, but not to the bit."""
    found = differences(TOKENS[:16], RIGHT)
    assert found[0, "window"].relative.max() < 1e-5 and not found[0, "window"].equal.all()
    assert found[1, "window"].relative[W - 1 :].max() < 1e-4
    assert found[2, "entries"].relative[5:].max() < 1e-4 and found[2, "index_keys"].relative[5:].max() < 1e-4
    assert found[3, "window"].relative.mean() > 0.01 and found[3, "entries"].relative.min() > 1e-4


def test_a_splice_is_not_exact():
    splicer = Splicer(engine(), RIGHT, BLOCK, AFTER)
    other = splicer.splice(LEFT)
    assert not other.equal and other.divergence > 0 and other.exact_loss > 0
    one = splicer.splice(LEFT, layers=[3])
    assert not one.equal and one.divergence != other.divergence
    assert splicer.splice(LEFT, layers=[0]).equal  # it has no pages
    wrong = splicer.splice(RIGHT, block=TOKENS[200:248])
    assert wrong.divergence > other.divergence
    assert engine().free_slots == 3 and engine().free_pages == 30


def test_what_cannot_be_spliced():
    splicer = Splicer(engine(), RIGHT, BLOCK, AFTER)
    with pytest.raises(SpliceError, match="must have 32 tokens, got 16"):
        splicer.splice(LEFT[:16])
    with pytest.raises(SpliceError, match="must have 48 tokens, got 47"):
        splicer.splice(LEFT, block=BLOCK[1:])
    with pytest.raises(SpliceError, match="whole pages of 16 tokens"):
        row_differences(engine(), LEFT[1:], RIGHT, BLOCK)
    with pytest.raises(SpliceError, match="2 tokens must follow"):
        Splicer(engine(), RIGHT, BLOCK, AFTER[:1])
