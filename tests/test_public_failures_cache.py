"""Faults that public trackers report of other implementations: engine and prefix cache together.

As in `test_public_failures.py`, each test states the right value for the whole kind of fault, and builds the
fault in, to show that the test would find it. "= cold": every bit of every component and of the logits is
that of an engine without a cache. Freed pages and boundary states are NaN, and so is what was never written.
"""

import functools
from collections.abc import Callable, Iterator
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from goldenkv import engine as engines
from goldenkv.config import ModelConfig, Numerics, micro, with_mtp
from goldenkv.engine import (
    CapacityError,
    EndPoints,
    Engine,
    ForeignNamespace,
    Full,
    Metrics,
    Periodic,
    PrefixCache,
    ReloadPolicy,
    Request,
    Sequence,
    Zero,
    replay_length,
)
from goldenkv.model.tile import run_tile
from goldenkv.model.weights import Model
from goldenkv.ops import attend
from goldenkv.prefix import Namespace, RadixTree, Tenant, TensorParallel
from goldenkv.prefix.tree.node import Boundary, Node
from goldenkv.state import Geometry, Rows, compare
from goldenkv.state import pool as pools
from goldenkv.state.boundaries import Boundaries

P = 16
SMALL = Numerics(tile=8, index_block=8, key_block=8)
SIZES = dict(slots=4, max_length=128, page_size=P, pages=24, boundaries=12, fill=np.nan, poison=True)
EXACT = (Full(), Periodic(2 * P), EndPoints(), Zero())
SETUPS: dict[str, tuple[ModelConfig, dict[str, int]]] = {
    "micro": (micro(), {}),
    "many entries": (replace(micro(), index_topk=16), {}),
    "MTP, pages of 8": (with_mtp(micro()), dict(page_size=8, rollback=0)),
    "window 5, pages of 24": (replace(micro(), sliding_window=5), dict(page_size=24)),
    "window 13, pages of 64": (replace(micro(), sliding_window=13), dict(page_size=64, max_length=224)),
}


@functools.cache
def model(name: str) -> Model:
    return Model(SETUPS[name][0], SMALL)


def fresh(name: str = "micro", **sizes: int) -> Engine:
    """An engine in which nothing was written. Those of equal sizes share their compiled programs."""
    config, own = SETUPS[name]
    return Engine(model(name), config, SMALL, **SIZES | own | sizes)


def tokens_of(length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(1, 64, length)


def join(*parts: np.ndarray) -> np.ndarray:
    return np.concatenate(parts)


def everything(e: Engine, tokens: np.ndarray, plan: list[int] | None = None) -> Rows:
    """Every component and the logits of every token."""
    seq = e.open()
    try:
        logits = e.prefill(seq, tokens, plan, all_logits=True)
        return {**e.rows(seq), "logits": logits}
    finally:
        e.close(seq)


@functools.lru_cache(maxsize=64)
def cold_of(tokens: bytes, name: str) -> Rows:
    return everything(fresh(name), np.frombuffer(tokens, np.int64))


def cold(prompt: np.ndarray, answer: np.ndarray, name: str = "micro") -> Rows:
    """What `answered` must return."""
    found = cold_of(join(prompt, answer).astype(np.int64).tobytes(), name)
    return {**found, "logits": found["logits"][len(prompt) - 1 :]}


def differing(found: Rows, expected: Rows) -> set[str]:
    return {name for name, ok in compare(found, expected).by_name.items() if not ok.all()}


def space(e: Engine, **changes: int) -> Namespace:
    fields = dict(
        domain=Tenant("acme", None),
        model=e.fingerprint,
        tokenizer=None,
        chat_template=None,
        layout="rows",
        page_size=e.geometry.page_size,
        dtype="float32",
        tensor_parallel=TensorParallel(1, 0, "none"),
        adapter=None,
        media=(),
        salt=None,
    )
    return Namespace(**fields | changes)


def begin(c: PrefixCache, prompt: np.ndarray) -> Request:
    return c.begin(space(c.engine), prompt)


def answered(c: PrefixCache, request: Request, answer: np.ndarray) -> Rows:
    """Runs what is left of the prompt and decodes an answer: the state then, and the logits on the way."""
    logits = [c.run(request), *(c.decode(request, int(token)) for token in answer)]
    return {**c.engine.rows(request.seq), "logits": np.array(logits)}


ANSWER = tokens_of(12, 2)


def wrong(c: PrefixCache, prompt: np.ndarray, answer: np.ndarray = ANSWER) -> set[str]:
    """Serves a whole request; what of it is not as cold."""
    request = begin(c, prompt)
    found = answered(c, request, answer)
    c.finish(request)
    return differing(found, cold(prompt, answer))


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Replaces a function of the compiled program: engines made from then on compile it anew."""

    def build(module: object, function: str, fault: Callable) -> None:
        @functools.wraps(run_tile.__wrapped__)
        def again(*args, **options):  # a function of its own, so that nothing traced before is used
            return run_tile.__wrapped__(*args, **options)

        static = ("structure", "config", "numerics", "aligned", "probe")
        monkeypatch.setattr(engines.engine, "run_tile", jax.jit(again, static_argnames=static))
        monkeypatch.setattr(module, function, fault)

    return build


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Live rows of every tile that any engine runs: what was really computed."""
    counts: list[int] = []
    real = engines.engine.run_tile

    def counting(leaves, pool, tokens, start, end, *args, **options):
        counts.append(int(end) - int(start))
        return real(leaves, pool, tokens, start, end, *args, **options)

    monkeypatch.setattr(engines.engine, "run_tile", counting)
    yield counts


# State left out of the cache --------------------------------------------------------------------------------


def test_row_01_a_hit_in_a_used_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    """ROCm/ATOM#1417: window rows were no part of the cache, so a hit read the ring of another request.

    A, then an unrelated B in the same slot, then A and one token more, under every policy.
    """
    a, b = tokens_of(33), tokens_of(40, 1)

    def after_a_stranger(policy: ReloadPolicy) -> set[str]:
        c = PrefixCache(fresh(), policy)
        others = [c.engine.open() for _ in range(c.engine.free_slots - 1)]
        assert not wrong(c, a[:32]) and not wrong(c, b)
        request = begin(c, a)
        assert request.plan is not None and request.seq.slot == len(others)
        return differing(answered(c, request, ANSWER), cold(a, ANSWER))

    for policy in EXACT:
        assert not after_a_stranger(policy), policy
    monkeypatch.setattr(Boundaries, "load", lambda self, pool, handle, slot: pool)
    assert "logits" in after_a_stranger(Full()) and "logits" in after_a_stranger(EndPoints())


def test_row_02_rows_that_only_the_compressor_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    """ggml-org/llama.cpp#26063: the saver skipped rows that the window masks, and reset the ring's head to 0.

    Stopped around the end of 1, 2 and 4 HCA blocks, kept, and loaded again for 16 more tokens: as a snapshot,
    and as a boundary state of the cache.
    """
    lengths, answer = [8 * n + off for n in (1, 2, 4) for off in (-1, 0, 1, 2)], tokens_of(15, 3)

    def lost(length: int) -> set[str]:
        c, ids = PrefixCache(fresh(), EndPoints()), tokens_of(length + 1)
        assert not wrong(c, ids[:length], ids[:0]) and not wrong(c, tokens_of(40, 1))
        found = wrong(c, ids, answer)
        assert c.metrics.reused == length  # by the last request: the others met nothing
        return found

    for length in lengths:
        assert not lost(length)
        e, ids = fresh(), tokens_of(length + 16)
        seq = e.open()
        e.prefill(seq, ids[:length])
        kept = e.snapshot(seq)
        e.close(seq)
        everything(e, tokens_of(40, 1))  # in other slots and the same pages
        seq = e.restore(kept)
        logits = e.prefill(seq, ids[length:], [1] * 16, all_logits=True)
        assert not differing({**e.rows(seq), "logits": logits}, cold(ids[: length + 1], ids[length + 1 :]))

    counts, starts = pools.boundary_counts, pools.boundary_starts

    def window_only(config: ModelConfig, length: int) -> dict[str, np.int32]:
        return {n: count * ("window" in n) for n, count in counts(config, length).items()}

    monkeypatch.setattr(pools, "boundary_counts", window_only)
    assert all(lost(length) for length in lengths)
    monkeypatch.setattr(pools, "boundary_counts", counts)

    load = Boundaries.load

    def from_the_head(self, pool, handle, slot):
        with monkeypatch.context() as here:
            here.setattr(pools, "boundary_starts", lambda *at: {n: s * 0 for n, s in starts(*at).items()})
            return load(self, pool, handle, slot)

    monkeypatch.setattr(Boundaries, "load", from_the_head)
    assert all(lost(length) for length in lengths)


def bytes_of(e: Engine, seq: Sequence) -> list[bytes]:
    """All of a sequence's ring slots and pages, used or not."""
    return [
        np.asarray(buffer)[seq.pages if name in ("entries", "index_keys") else seq.slot].tobytes()
        for buffers in e._pool
        for name, buffer in sorted(buffers.items())
    ]


def test_row_03_nobody_else_is_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    """ggml-org/llama.cpp#26790: loading one slot cleared the compressed rows of all sequences.

    Beside live sequences of 40 and 24 tokens one is restored, hit, replayed, forked, run, saved, closed. Not
    a byte of their slots and pages changes, and both go on = cold.
    """

    def touched() -> set[str]:
        c = PrefixCache(fresh(), EndPoints())
        e, kept, found = c.engine, tokens_of(20, 5), set[str]()
        assert not wrong(c, kept, tokens_of(20, 6))
        live = [begin(c, tokens_of(n, seed=n)) for n in (40, 24)]
        for request in live:
            c.run(request)
        before = [bytes_of(e, request.seq) for request in live]

        def look(after: str) -> None:
            if [bytes_of(e, request.seq) for request in live] != before:
                found.add(after)

        restored = e.restore(e.snapshot(live[1].seq))
        look("restore")
        e.close(restored)
        look("close")
        hit = begin(c, join(kept, tokens_of(20, 6), tokens_of(3)))
        assert hit.plan is not None and hit.plan.start == 40
        look("hit")
        twin = c.fork(hit)
        look("fork")
        c.run(twin)
        c.cancel(twin)
        look("run")
        c.run(hit)
        c.finish(hit)
        look("publish")
        replayed = begin(c, join(kept, tokens_of(12, 6), tokens_of(9)))
        assert replayed.plan is not None and replayed.plan.start < replayed.plan.length
        look("replay")
        c.cancel(replayed)
        c.evict(pages=24, boundaries=12)
        look("evict")
        for request, n in zip(live, (40, 24), strict=True):
            logits = [c.decode(request, int(token)) for token in tokens_of(9)]
            state = {**e.rows(request.seq), "logits": np.array(logits)}
            expected = cold(tokens_of(n, seed=n), tokens_of(9))
            found |= differing(state, {**expected, "logits": expected["logits"][1:]})
        return found

    assert not touched()
    scatter = pools.scatter_boundary

    def clears_entries(*args, **options):
        pool = scatter(*args, **options)
        return tuple({n: b * 0 if n == "entries" else b for n, b in layer.items()} for layer in pool)

    monkeypatch.setattr(pools, "scatter_boundary", clears_entries)
    assert {"restore", "hit", "logits"} <= touched()


def kept_boundary(c: PrefixCache, ids: np.ndarray, position: int) -> tuple[Boundary, Node]:
    """The tree's record of the state at a page's end, and the node with that page."""
    path = c.tree.match(space(c.engine).digest(), ids.astype(np.int32)).path
    here = ((b, node) for node in path for b in node.sorted_boundaries())
    return next((b, node) for b, node in here if (node.start + b.end) * P == position)


def test_row_05_a_state_of_another_position_or_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """sgl-project/sglang#33656: a window slot held the rows of a wrong position; cause unknown.

    Every page and every boundary state carries the chained key of its tokens and position, and is read only
    where the request's own key is the same. At each page multiple: untouched it is used; after any mix-up the
    hit is refused, counted, and computed = cold. Without the check other bits come out.
    """
    a, b = tokens_of(65), tokens_of(65, 1)

    def served() -> PrefixCache:
        c = PrefixCache(fresh(), Full())
        for ids in (a, b):
            assert not wrong(c, ids, ids[:0])
        return c

    def swap_states(c: PrefixCache, at: int) -> None:
        one, other = kept_boundary(c, a, at)[0], kept_boundary(c, b, at)[0]
        one.handle, other.handle = other.handle, one.handle

    def swap_positions(c: PrefixCache, at: int) -> None:
        one, other = kept_boundary(c, a, at)[0], kept_boundary(c, a, at % 64 + P)[0]
        one.handle, other.handle = other.handle, one.handle

    def swap_pages(c: PrefixCache, at: int) -> None:
        (end, one), (_, other) = kept_boundary(c, a, at), kept_boundary(c, b, at)
        i = end.end - 1
        one.pages[i], other.pages[i] = other.pages[i], one.pages[i]

    def spoil_record(c: PrefixCache, at: int) -> None:
        handle = kept_boundary(c, a, at)[0].handle
        c._boundary_keys[handle] = bytes(byte ^ 1 for byte in c._boundary_keys[handle])

    def spoil_page_record(c: PrefixCache, at: int) -> None:
        end, node = kept_boundary(c, a, at)
        c._keys[node.pages[end.end - 1]] = c._keys[node.pages[0]][::-1]

    c = served()
    for at in range(P, 65, P):
        assert not wrong(c, a[: at + 1]) and c.metrics.refused == 0
    assert c.metrics.reused == sum(range(P, 65, P))
    for mix_up in (swap_states, swap_positions, swap_pages, spoil_record, spoil_page_record):
        for at in range(P, 65, P):
            c = served()
            mix_up(c, at)
            assert not wrong(c, a[: at + 1]), (mix_up, at)
            assert (c.metrics.refused, c.metrics.reused) == (1, 0)

    monkeypatch.setattr(PrefixCache, "_verified", lambda *args: True)
    for mix_up in (swap_states, swap_pages):
        for at in range(P, 65, P):
            c = served()
            mix_up(c, at)
            assert "logits" in wrong(c, a[: at + 1])
    for at in range(P, 65, P):
        c = served()
        swap_positions(c, at)
        with pytest.raises(ValueError, match=r"do not (fit|end at)"):  # the engine looks at positions too
            begin(c, a[: at + 1])


# Padding, and slots of a selection that name nothing --------------------------------------------------------


def test_row_08_padding_is_in_no_entry(faulty: Callable[..., None]) -> None:
    """huggingface/transformers#45938: padding was pooled into compressed entries.

    Rows of a tile before the first live one and after the last hold anything: here every dead row starts as
    the embedding of token 0, which no prompt has, so random or NaN weights there change dead rows alone.
    """

    def padded(row: np.ndarray, length: int, plan: list[int]) -> Rows:
        other = Model(micro(), SMALL)
        other.embed[...] = other.embed[...].at[0].set(row)
        return everything(Engine(other, micro(), SMALL, **SIZES), tokens_of(length), plan)

    rows = [np.random.default_rng(1).standard_normal(32), np.full(32, 1e30), np.full(32, np.nan)]

    def plans() -> Iterator[tuple[int, list[int]]]:
        for left in (0, 1, 2, 3):
            for right in (0, 1, 2, 3):
                count = 8 - left - right
                yield left + count, [left, count] if left else [count]
        yield 19, [5, 1, 1, 1, 11]

    for length, plan in plans():
        expected = everything(fresh(), tokens_of(length))
        for row in rows:
            found = padded(row, length, plan)
            assert not differing(found, expected), (row[0], plan)
            assert len(found["layers.1.entries"]) == length // 4

    real = pools.write_ring
    faulty(pools, "write_ring", lambda ring, slot, at, live, new: real(ring, slot, at, live | True, new))
    found = differing(padded(rows[0], 19, [5, 1, 1, 1, 11]), cold(tokens_of(1), tokens_of(19)[1:]))
    assert {"layers.1.entries", "layers.1.index_keys", "layers.2.entries"} <= found


def test_row_69_no_entry_is_no_row(faulty: Callable[..., None]) -> None:
    """NVIDIA/cudnn-frontend#785: slots of a selection without an entry, -1, were given weight.

    -1 wraps to a last row in JAX: of the page, of the pool, of the page table. With a top-k of 16 most slots
    are -1. All that is not a live entry is poisoned, before a run and after a hit, and nothing changes.
    """
    rng = np.random.default_rng(0)
    q, keys = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in ((5, 2, 8), (5, 8)))
    one = jnp.asarray([[3, -1, -1]] * 5, jnp.int32)
    sees, sinks = jnp.eye(5, dtype=bool), jnp.zeros(2)
    outputs = [
        attend.csa_attention(q, keys, sees, keys.at[4].set(last), chosen, sinks)
        for chosen in (one, one[:, ::-1])
        for last in (0.0, np.nan)
    ]
    for clean, spoiled in (outputs[:2], outputs[2:]):
        assert not differing({"output": np.asarray(clean)}, {"output": np.asarray(spoiled)})

    def poisoned(value: float, length: int) -> Rows:
        """A hit of all whole pages, or none; then the value wherever no live entry is."""
        c = PrefixCache(fresh("many entries"), Full())
        ids = tokens_of(length + 12)
        c.run(donor := begin(c, ids[:length]))
        c.finish(donor)
        request = begin(c, ids[: length + 1])
        pages, count = request.seq.pages, request.seq.length
        for layer, ratio in ((1, 4), (2, 8)):
            for name in {"entries", "index_keys"} & c.engine._pool[layer].keys():
                buffer = np.asarray(c.engine._pool[layer][name]).copy()
                dead = np.ones(buffer.shape[:2], bool)
                for number in range(count // ratio):
                    dead[pages[number * ratio // P], number % (P // ratio)] = False
                buffer[dead] = value
                c.engine._pool[layer][name] = jnp.array(buffer)
        return answered(c, request, ids[length + 1 :])

    for length in (1, 4, 15, 16, 33):
        ids = tokens_of(length + 12)
        expected = cold(ids[: length + 1], ids[length + 1 :], "many entries")
        for value in (1e30, -np.inf, np.nan):
            assert not differing(poisoned(value, length), expected), (value, length)

    def wrapping(pages, table, ids, valid):
        return pages[table[ids // pages.shape[1]], ids % pages.shape[1]]

    real = attend.absorb_selected
    faulty(pools, "read_entries", wrapping)
    faulty(attend, "absorb_selected", lambda state, q, keys, seen: real(state, q, keys, seen | True))
    assert {"layers.2.window", "layers.2.entries", "logits"} <= differing(poisoned(1.0, 1), poisoned(2.0, 1))


# Metrics ----------------------------------------------------------------------------------------------------


def books(m: Metrics, ran: list[int], *, left: int = 0, decoded: int = 0) -> list[str]:
    """What does not add up: counters, prompts, and the rows that really ran."""
    checks = {
        "a counter below 0": min(m.reused, m.replayed, m.computed, m.refused) < 0,
        "sources are not the prompts": m.reused + m.replayed + m.computed + left != m.prompt,
        "more or less ran": m.replayed + m.computed + decoded != sum(ran),
    }
    return [what for what, found in checks.items() if found]


def preempted(c: PrefixCache, prompt: np.ndarray, stops: list[int]) -> int:
    """Begins a prompt, preempted after so many tokens, again and again; all tokens that were left then."""
    left = 0
    for stop in stops:
        request = begin(c, prompt)
        c.run(request, min(stop, request.remaining - 1))
        left += request.remaining
        c.cancel(request)
    return left


def stands(c: PrefixCache, length: int, seed: int) -> Request:
    """A request of its own that has run so many tokens and has one left."""
    request = begin(c, tokens_of(length + 1, seed))
    c.run(request, length)
    return request


class ComputesTheDifference(PrefixCache):
    """The fault: what was computed is taken to be the prompt without all hits so far."""

    def run(self, request: Request, count: int | None = None) -> np.ndarray:
        before = self.metrics.computed
        logits = super().run(request, count)
        self.metrics.computed = before + len(request.prompt) - self.metrics.reused
        return logits


def test_row_80_sources_of_a_preempted_prompt(ran: list[int]) -> None:
    """LMCache/LMCache#3269: a request was preempted, came back, and had 768 - 8448 = -7680 tokens computed.

    Preempted at any point and begun again: no counter is negative, the sources of prompts that ran to their
    end sum to them, and what was replayed and computed is what really ran.
    """

    def counted(kind: type[PrefixCache], policy: ReloadPolicy) -> list[str]:
        ran.clear()
        c, shared, left = kind(fresh(), policy), tokens_of(48), 0
        for prompt in (shared, join(shared, tokens_of(24, 1)), join(shared, tokens_of(30, 2))):
            left += preempted(c, prompt, [1, 8, 9, 17, 23])
            answered(c, request := begin(c, prompt), tokens_of(5))
            c.finish(request)
        assert c.metrics.reused > 0
        return books(c.metrics, ran, left=left, decoded=15)

    for policy in EXACT:
        assert not counted(PrefixCache, policy), policy
    assert "a counter below 0" in counted(ComputesTheDifference, Full())


class RunsInParts(PrefixCache):
    """The fault: a run takes pages as it goes, and stops in the middle where there are no more."""

    def _extend(self, request: Request, ids: np.ndarray) -> np.ndarray:
        parts = [super(RunsInParts, self)._extend(request, ids[at : at + P]) for at in range(0, len(ids), P)]
        return parts[-1]


def crowded(kind: type[PrefixCache]) -> tuple[PrefixCache, list[Request]]:
    """22 of 24 pages and three of four slots are taken by requests that run."""
    c = kind(fresh(), Zero())
    return c, [stands(c, 127, seed=1), stands(c, 127, seed=2), stands(c, 95, seed=3)]


def test_row_80_out_of_room_and_forks(ran: list[int]) -> None:
    """As above where pages run out: the request stands where it stood, another is preempted, and it goes on.

    What it then publishes is found under the right keys. The faults: a token that did not run is in its keys,
    and a run that stops in the middle. A fork runs the rest of the prompt as well, and that counts for both.
    """
    prompt, answer = tokens_of(48), tokens_of(16, 9)

    def next_turn(fault: bool) -> Metrics:
        ran.clear()
        c, live = crowded(PrefixCache)
        request = begin(c, prompt)
        with pytest.raises(CapacityError):
            c.run(request)
        left = sum(other.remaining for other in live)
        assert request.seq.length == 0 and not books(c.metrics, ran, left=left + 48)
        c.cancel(live[2])
        c.run(request)
        live[2] = stands(c, 79, seed=4)
        with pytest.raises(CapacityError):
            c.decode(request, 7)
        assert request.seq.length == 48 and not books(c.metrics, ran, left=left + 1)
        if fault:
            request.keys.extend([7])
        c.cancel(live[2])
        for token in answer:
            c.decode(request, int(token))
        c.finish(request)
        assert not wrong(c, join(prompt, answer, tokens_of(5)))
        return c.metrics

    metrics = next_turn(fault=False)
    assert (metrics.refused, metrics.reused) == (0, 64 - replay_length(micro(), 64))
    metrics = next_turn(fault=True)
    assert (metrics.refused, metrics.reused) == (1, 0)

    ran.clear()
    c, live = crowded(RunsInParts)
    with pytest.raises(CapacityError):
        c.run(request := begin(c, prompt))
    assert books(c.metrics, ran, left=sum(each.remaining for each in (*live, request)))

    ran.clear()
    c = PrefixCache(fresh(), Full())
    request = begin(c, prompt)
    c.run(request, 20)
    twin = c.fork(request)
    assert c.run(request).tobytes() == c.run(twin).tobytes()
    assert not books(c.metrics, ran) and c.metrics.computed == 48 + 28


class PublishesThePreempted(PrefixCache):
    """The fault: what a preempted request had run counts as a hit when it comes back."""

    def cancel(self, request: Request) -> None:
        self.publish(request)
        super().cancel(request)


def test_row_81_no_hits_of_ones_own(ran: list[int]) -> None:
    """vllm-project/vllm#25787: preemption was reported as 30 % hits, where 0.2 % was true.

    Prompts that have nothing in common, each preempted three times while its prompt runs: 0 hits.
    """

    def hits(kind: type[PrefixCache], policy: ReloadPolicy) -> int:
        ran.clear()
        c, left = kind(fresh(), policy), 0
        for seed in range(4):
            left += preempted(c, tokens_of(60, seed), [5, 20, 53])
            request = begin(c, tokens_of(60, seed))
            c.run(request)
            c.finish(request)
        assert not books(c.metrics, ran, left=left)
        return c.metrics.reused + c.metrics.replayed

    assert all(hits(PrefixCache, policy) == 0 for policy in EXACT)
    assert hits(PublishesThePreempted, Full()) > 0


def test_row_82_restored_means_that_only_the_tail_runs(
    ran: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """ggml-org/llama.cpp#26676: "n_restored = 1108", and then the whole prompt was computed.

    The next turn of a conversation runs exactly the tokens that its policy has to, and no more.
    """
    said = join(tokens_of(40), tokens_of(9, 1))
    prompt = join(said, tokens_of(5, 2))

    def turn(policy: ReloadPolicy) -> tuple[int, int]:
        """Tokens that were claimed to be reused, and that ran."""
        c = PrefixCache(fresh(), policy)
        assert not wrong(c, said[:40], said[40:])
        before = replace(c.metrics)
        ran.clear()
        c.run(request := begin(c, prompt))
        found = sum(ran)
        c.cancel(request)
        return c.metrics.reused - before.reused, found

    replay = replay_length(micro(), 48)
    expected = (48, 6), (32, 22), (49, 5), (48 - replay, replay + 6)
    assert tuple(turn(policy) for policy in EXACT) == expected and replay == 21

    def forgets(self, ids, match, plan, pages):
        return self.engine.open(), self.tree.lock(match, plan.length)

    monkeypatch.setattr(PrefixCache, "_reload", forgets)
    assert turn(Full()) == (48, 54)


# Geometry ---------------------------------------------------------------------------------------------------


def reused(c: PrefixCache, prompt: np.ndarray, name: str) -> int:
    """Tokens of a prompt that did not have to run. All of the request is checked against cold."""
    before, answer = c.metrics.reused, tokens_of(2, 7)
    request = begin(c, prompt)
    assert not differing(answered(c, request, answer), cold(prompt, answer, name))
    c.finish(request)
    return c.metrics.reused - before


class NeverMeets(Full):
    """The fault: states are kept at odd pages and looked for at even ones."""

    def keeps(self, position, ends):
        return super().keeps(position, ends) and position // P % 2 == 1

    def plan(self, config, length, boundaries):
        even = [(position, handle) for position, handle in boundaries if position // P % 2 == 0]
        return super().plan(config, length, even) if even else None


def test_row_12_the_same_prompt_hits() -> None:
    """vllm-project/vllm#42948, 1CatAI/1Cat-vLLM#205: what was kept and what was looked for never met.

    For page sizes and windows, with and without MTP and rollback, and every policy: the same prompt again
    reuses all whole pages before its last token, less what its policy says it replays.
    """
    for name, (config, sizes) in SETUPS.items():
        page = sizes.get("page_size", P)
        kept_every = {Full(): page, Periodic(2 * page): 2 * page, EndPoints(): 4096, Zero(): 4096}
        for policy, every in kept_every.items():
            for length in (page, page + 1, 3 * page + 5):
                c, ids = PrefixCache(fresh(name), policy), tokens_of(length)
                assert reused(c, ids, name) == 0
                whole = (length - 1) // page * page
                most = max(whole - replay_length(config, whole), whole // every * every, 0)
                assert reused(c, ids, name) == most, (name, policy, length)
                assert c.metrics.refused == 0
    never = PrefixCache(fresh(), NeverMeets())
    assert [reused(never, tokens_of(17 + 32 * n), "micro") for n in (0, 0, 1, 1)] == [0, 0, 0, 0]


def test_row_14_short_prompts_with_long_pages() -> None:
    """vllm-project/vllm-ascend#16270: with pages of 4096 no shorter prompt was cached, and nothing said so.

    With pages of 64 a prompt asked again reuses whole pages, none below 65 tokens. Where the ends of prompts
    are kept, what goes on from one reuses all of it, at any length.
    """
    name = "window 13, pages of 64"
    for length in (16, 40, 63, 64, 65, 100, 128, 129, 190):
        c, ids = PrefixCache(fresh(name), Full()), tokens_of(length + 1)
        reused(c, ids[:-1], name)
        assert reused(c, ids[:-1], name) == (length - 1) // 64 * 64
        c = PrefixCache(fresh(name), EndPoints())
        reused(c, ids[:-1], name)
        assert reused(c, ids, name) == length


def test_row_15_pairs_of_sizes_are_refused_before_anything_runs() -> None:
    """vllm-project/vllm#56396: a block smaller than the unit of hashing passed, and failed with a request."""
    for page in (8, 16, 24, 32):
        c = PrefixCache(fresh(page_size=page))
        for unit in (4, 8, 16, 24, 32, 64):
            if unit == page:
                c.cancel(c.begin(space(c.engine), tokens_of(9)))
                continue
            with pytest.raises(ForeignNamespace, match=f"pages of {unit}, .* pages of {page} tokens"):
                c.begin(space(c.engine, page_size=unit), tokens_of(9))
        assert (c.metrics.requests, c.engine.free_slots, c.engine.free_pages) == (1, 4, 24)
        for period in (-page, 0, 4, page // 2, page + 4, 2 * page - 1):
            with pytest.raises(
                ValueError, match=f"{period=} must be a positive multiple of page_size={page}"
            ):
                PrefixCache(c.engine, Periodic(period))


def test_row_17_pages_end_with_every_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """sgl-project/sglang#27294: rows of an unfinished HCA block were not stored; pages just happened to fit.

    A page that does not end with a block of every layer is refused. If it were not, entries would be lost.
    """
    for page in (1, 4, 12, 20, 31):
        with pytest.raises(ValueError, match=f"page_size={page} must be a positive multiple of 8"):
            fresh(page_size=page)
    monkeypatch.setattr(Geometry, "check", lambda self, config: None)
    lost = differing(everything(fresh(page_size=12), tokens_of(40)), everything(fresh(), tokens_of(40)))
    assert "layers.2.entries" in lost


# Pages that leave -------------------------------------------------------------------------------------------


def test_row_44_a_hit_keeps_what_it_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """taco-project/FlexKV#195: a hit did not refresh the age of its window, and left empty nodes behind.

    A, B, then A again. Under pressure B goes: pages, and boundary states. At the end nothing is held.
    """
    a, b = tokens_of(49), tokens_of(49, 1)

    def after_pressure(policy: ReloadPolicy, *strangers: int) -> tuple[int, int]:
        """Tokens of A and B that are run again, or for the first time."""
        c = PrefixCache(fresh(), policy)
        for ids in (a[:48], b[:48]):
            wrong(c, ids, ids[:0])
        c.cancel(begin(c, a))
        live = [stands(c, length, seed=10 + length) for length in strangers]
        for other in live:
            c.cancel(other)
        fell = []
        for ids in (a, b):
            before = c.metrics.reused
            assert not wrong(c, ids)
            fell.append(49 - (c.metrics.reused - before))
        c.evict(pages=24, boundaries=12)
        c.tree.check()
        assert (c.tree.stats().nodes, c.engine.free_pages, c.engine.free_boundaries) == (0, 24, 12)
        return fell[0], fell[1]

    # Six pages of A and B, 21 of others: three go. Six states of A and B, 11 of others: five go.
    assert after_pressure(Zero(), 127, 127, 79) == (22, 49)
    assert after_pressure(Full(), 127, 79) == (1, 22)
    monkeypatch.setattr(RadixTree, "touch", lambda *args: None)
    assert after_pressure(Zero(), 127, 127, 79) == (49, 22)
    assert after_pressure(Full(), 127, 79) == (22, 1)


def test_row_45_pages_in_use_are_not_given_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """vllm-project/vllm#42273: block tables named blocks that had been evicted and belonged to others.

    One request that has published and one that hit its pages still run. The cache drops all it can, strangers
    fill what is free, and both answer = cold. The fault: the cache holds no pages, and so frees theirs.
    """
    prompts = tokens_of(48), tokens_of(53)

    def broken(both: bool) -> set[str]:
        c = PrefixCache(fresh(), Full())
        live = [begin(c, prompts[0])]
        logits = [[c.run(live[0])]]
        live.append(begin(c, prompts[1]))
        assert live[1].plan is not None and live[1].seq.pages == live[0].seq.pages
        logits.append([c.run(live[1])])
        if not both:
            c.cancel(live.pop())
        c.evict(pages=24, boundaries=12)
        assert c.tree.stats().pages == (3 if both else 0)  # a lock keeps what is in use
        for seed in (5, 6):
            stands(c, 127, seed)
        found = set[str]()
        for request, rows, prompt in zip(live, logits, prompts, strict=False):
            rows += [c.decode(request, int(token)) for token in ANSWER]
            state = {**c.engine.rows(request.seq), "logits": np.array(rows)}
            found |= differing(state, cold(prompt, ANSWER))
        return found

    assert not broken(both=True) and not broken(both=False)
    monkeypatch.setattr(Engine, "hold_pages", lambda self, pages: None)
    assert "logits" in broken(both=False)
