"""Faults that public trackers report of other implementations: state on its way between device and tiers.

As in `test_public_failures.py`, each test states the right value for the whole kind of fault, and builds the
fault in, to show that the test would find it. "= cold": every bit of every component and of the logits is
that of an engine without a cache. Freed pages and boundary states are NaN, and so is what was never written.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import SingleDeviceSharding

from goldenkv.config import Numerics, micro
from goldenkv.engine import Engine, Full, PrefixCache, ReloadPolicy, Request, Zero, replay_length, sequences
from goldenkv.engine import fetch as fetches
from goldenkv.engine.tiered import TieredCache
from goldenkv.model.weights import Model
from goldenkv.prefix import Namespace, PageKeys, Tenant, TensorParallel
from goldenkv.state import Rows, compare, moving
from goldenkv.state.moving import GatheredPages
from goldenkv.tiers.device import DeviceStore
from goldenkv.tiers.disk import DiskStore
from goldenkv.tiers.errors import Corrupt, StoreError, Unavailable
from goldenkv.tiers.errors import Full as StoreFull
from goldenkv.tiers.faults import Fail, Faulty
from goldenkv.tiers.host import HostStore
from goldenkv.tiers.loader import Loaded, Loader
from goldenkv.tiers.memory import Held, MemoryStore
from goldenkv.tiers.mover import Mover
from goldenkv.tiers.objects import Address, Head, Item, Kind, Label, Tensor
from goldenkv.tiers.shelf import Tier, Write
from goldenkv.tiers.store import Store, Wrapper

P = 16
SMALL = Numerics(tile=8, index_block=8, key_block=8)


@functools.cache
def model() -> Model:
    return Model(micro(), SMALL)


SIZES = dict(slots=4, max_length=128, page_size=P, pages=24, boundaries=12, fill=np.nan, poison=True)


def fresh(kind: type[Engine] = Engine) -> Engine:
    return kind(model(), micro(), SMALL, **SIZES)


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


def differing(found: Rows, expected: Rows) -> set[str]:
    return {name for name, ok in compare(found, expected).by_name.items() if not ok.all()}


def space(e: Engine) -> Namespace:
    return Namespace(
        domain=Tenant("acme", None),
        model=e.fingerprint,
        tokenizer=None,
        chat_template=None,
        layout="pool",
        page_size=P,
        dtype="float32",
        tensor_parallel=TensorParallel(1, 0, "none"),
        adapter=None,
        media=(),
        salt=None,
    )


class Workers(Executor):
    """Runs tasks at once: all in one thread. Those that are `held` by name wait for `step`."""

    def __init__(self, held: str = "") -> None:
        self.held, self.waiting = held, list[tuple[Future, Callable, tuple]]()

    def submit(self, fn: Callable, /, *args: Any, **kwargs: Any) -> Future:
        self.waiting.append((Future(), fn, args))
        future = self.waiting[-1][0]
        if fn.__name__ != self.held:
            self.step(len(self.waiting) - 1)
        return future

    def step(self, first: int = 0) -> None:
        tasks, self.waiting = self.waiting[first:], self.waiting[:first]
        for future, fn, args in tasks:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(fn(*args))
                except BaseException as error:
                    future.set_exception(error)


def over(
    *tiers: Store | Tier, policy: ReloadPolicy | None = None, e: Engine | None = None, **options: Any
) -> TieredCache:
    """A cache on a new device, whose mover does all in the caller's thread."""
    copy = options.pop("copy", None)
    options = {"workers": Workers()} | options
    m = Mover([tier if isinstance(tier, Tier) else Tier(store=tier) for tier in tiers], P, **options)
    return TieredCache(e or fresh(), m, policy or Full(), deadline=lambda tokens: 1e6, copy=copy)


def begin(c: PrefixCache, prompt: np.ndarray) -> Request:
    return c.begin(space(c.engine), prompt)


ANSWER = tokens_of(5, 2)


def served(c: TieredCache, prompt: np.ndarray, answer: np.ndarray = ANSWER) -> set[str]:
    """Serves a whole request; what of it is not as cold."""
    request = begin(c, prompt)
    logits = [c.run(request), *(c.decode(request, int(token)) for token in answer)]
    found = {**c.engine.rows(request.seq), "logits": np.array(logits)}
    c.finish(request)
    return differing(found, cold(prompt, answer))


def hit(c: TieredCache, prompt: np.ndarray) -> int:
    """Tokens that do not run. The state there is compared with cold, all of it."""
    request = begin(c, prompt)
    length = request.seq.length
    start = 0 if request.plan is None else request.plan.start
    if length:
        expected = cold_of(prompt[:length].astype(np.int64).tobytes())
        assert not differing(c.engine.rows(request.seq), expected) - {"logits"}
    c.cancel(request)
    return start


def clear(c: TieredCache) -> None:
    c.evict(pages=100, boundaries=100)
    assert c.engine.free_pages == 24


def counted(c: TieredCache, metric: str) -> dict[str, Any]:
    return c.mover.metrics.to_json()[metric]


def host(nbytes: int = 1 << 20, name: str = "host", **options: Any) -> HostStore:
    store = HostStore(nbytes, block=8, **options)
    store.name = name
    return store


PROMPT = tokens_of(90)
"""Five whole pages and ten tokens."""
PAGE = 1400
"""Bytes of one page's object, or a few less."""


def address_of(kind: Kind, position: int, prompt: np.ndarray = PROMPT) -> Address:
    """Where a page that ends at a position is, or the state there."""
    namespace = space(fresh())
    keys = PageKeys(namespace, prompt)
    return Address.of(
        namespace, keys.pages[position // P - 1] if kind is Kind.PAGE else keys.boundary(position)
    )


# Races between device and tiers -----------------------------------------------------------------------------


class Delayed(Engine):
    """What a call writes is there only after a long computation, which nothing waits for."""

    def prefill(self, *args: Any, **options: Any) -> np.ndarray:
        self.stale = jax.tree.map(jnp.copy, self._pool)
        logits = super().prefill(*args, **options)
        self._pool = later(self._pool, self.stale, jnp.eye(256))
        return logits


@jax.jit
def later(new: Any, old: Any, x: jax.Array) -> Any:
    done = lax.fori_loop(0, 400, lambda i, y: jnp.cos(y @ y), x).sum() < jnp.inf
    return jax.tree.map(lambda n, o: jnp.where(done, n, o), new, old)


def test_row_22_a_store_waits_for_what_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    """vllm-project/vllm#45704: the store copied KV before the kernel that writes it had ended.

    What writes takes long, and the store begins at once: its bytes are the final ones.
    """
    pending: list[bool] = []

    def gathered(stale: bool) -> Callable[..., GatheredPages]:
        def gather(config: Any, pool: Any, pages: Sequence[int], moves: Any) -> GatheredPages:
            pending.append(not jax.tree.leaves(e._pool)[0].is_ready())
            return GatheredPages(config, e.stale if stale else pool, pages, moves)

        return gather

    for stale in (False, True):
        store, pending[:] = host(), []
        e = fresh(Delayed)
        monkeypatch.setattr(sequences, "GatheredPages", gathered(stale))
        c = over(store, e=e)
        c.run(begin(c, PROMPT[:32]))
        assert any(pending)
        monkeypatch.undo()
        if stale:
            with pytest.raises(AssertionError):
                hit(over(store), PROMPT[:33])
        else:
            assert hit(over(store), PROMPT[:33]) == 32


def test_row_23_what_is_still_coming_is_nobodys(monkeypatch: pytest.MonkeyPatch) -> None:
    """vllm-project/vllm#35092: blocks that another connector was still receiving were stored.

    While pages are being loaded, in the middle of each component, they cannot be matched, have no key, are
    not saved, and do not leave.
    """
    store = Faulty(host())
    served(over(store), PROMPT)

    def seen(fault: bool) -> set[str]:
        found: set[str] = set()
        inside: list[str] = []

        def copy(name: str, to: np.ndarray, source: np.ndarray) -> None:
            if inside:  # what is stored by `flush` goes the same way
                to[:] = source
                return
            inside.append(name)
            to[: len(to) // 2] = source[: len(to) // 2]
            coming = {page for page in range(24) if c.engine.holders(page)}
            puts = store.calls["put"]
            if c.tree.match(space(c.engine).digest(), PROMPT.astype(np.int32)).length:
                found.add("matched")
            if coming & (c._keys.keys() | c._offload._pages.keys()):
                found.add("keyed")
            c.flush()
            c.evict(pages=24)
            if store.calls["put"] != puts:
                found.add("stored")
            if len(coming) != 5 or any(not c.engine.holders(page) for page in coming):
                found.add("left")
            to[:] = source
            inside.clear()

        c = over(store, copy=copy)
        if fault:
            publishes_early(c)
            begin(c, PROMPT)
        else:
            assert not served(c, PROMPT) and c.metrics.reused == 80
        return found

    def publishes_early(c: TieredCache) -> None:
        real = fetches.Fetch._leases

        def published(self: Any, count: int) -> list:
            leases, namespace = real(self, 5), space(c.engine)
            pages, ids = [lease.page for lease in leases], PROMPT[:80].astype(np.int32)
            inserted = c.tree.insert(namespace.digest(), ids, pages)
            c._adopt(namespace, PageKeys(namespace, ids), 80, pages, {}, inserted)
            return leases

        monkeypatch.setattr(fetches.Fetch, "_leases", published)

    assert seen(fault=False) == set()
    assert {"matched", "keyed"} <= seen(fault=True)


def test_row_24_a_page_that_is_used_again_before_it_is_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    """vllm-project/vllm#46951: blocks were given to others while their store was waiting.

    A's pages and states are published, but the store waits; they leave and B gets them; then the store goes
    on. What lies under A's keys is A's.
    """
    other = tokens_of(90, 1)

    def stored() -> TieredCache:
        workers, store = Workers(held="_save"), host()
        c = over(store, workers=workers)
        pages = []
        for prompt in (PROMPT, other):
            request = begin(c, prompt)
            c.run(request)
            pages.append(request.seq.pages[:5])
            c.finish(request)
            clear(c)
        assert pages[0] == pages[1]
        workers.step()
        return over(store)

    again = stored()
    assert not served(again, PROMPT) and not served(again, other) and again.metrics.reused == 160

    class Lazy:
        """The fault: the page is read when it is stored."""

        def __init__(self, e: Engine, pages: Sequence[int]) -> None:
            self.e, self.pages = e, pages

        def rows(self, index: int) -> Rows:
            return GatheredPages(self.e.config, self.e._pool, [self.pages[index]]).rows(0)

    monkeypatch.setattr(Engine, "gather_pages", lambda e, pages: Lazy(e, pages))
    assert "logits" in served(stored(), PROMPT)


def test_row_25_a_page_that_is_evicted_while_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """sgl-project/sglang#31427, bytedance-iaas/sglang#638: a host page was overwritten during load-back.

    A host store of two pages. Half of one is copied out when somebody else evicts both and puts others there.
    The reader gets the bytes of then, or nothing: it never gets a mix.
    """

    def served_then(verify: bool) -> set[str]:
        store = host(2 * PAGE, verify=verify)
        prompt = PROMPT[:33]
        served(over(store, policy=Zero()), prompt, ANSWER[:0])
        assert store.stats().objects == 2
        other, reads, there = over(store, policy=Zero()), list[bool](), list[bool]()
        theirs = [address_of(Kind.PAGE, at, tokens_of(33, 1)) for at in (P, 2 * P)]

        def copy(to: np.ndarray, source: np.ndarray) -> None:
            half = len(to) // 2
            to[:half] = source[:half]
            reads.append(not np.shares_memory(to, store._arena))
            if reads == [True, True]:  # the second page
                served(other, tokens_of(33, 1), ANSWER[:0])
                there.extend(store.exists([address_of(Kind.PAGE, 2 * P), *theirs]))
            to[half:] = source[half:]

        store._copy = copy
        found = served(over(store, policy=Zero(), verify=verify), prompt, ANSWER[:0])
        store._copy = np.copyto
        assert there[0] is False and any(there)  # it was evicted, and something else came
        return found

    for verify in (True, False):
        assert not served_then(verify)

    def frees_at_once(self: MemoryStore, address: Address) -> bool:
        entry = self._entries.pop(address, None)
        if entry is not None:
            self._used -= entry.nbytes
            self._free(entry)
        return entry is not None

    monkeypatch.setattr(MemoryStore, "_remove", frees_at_once)
    assert not served_then(verify=True)  # checksums are a second line
    assert served_then(verify=False)


def test_row_26_a_load_that_pushes_out_its_own_source(monkeypatch: pytest.MonkeyPatch) -> None:
    """sgl-project/sglang#27631: a load evicted pages, their backup evicted what was to be loaded.

    Device and host are both full, the host is written back, all in one thread. What was found comes up.
    """

    def reused() -> int:
        store = host(6 * PAGE)
        c = over(Tier(store=store, write=Write.BACK, low=1.0), policy=Zero())
        request = begin(c, PROMPT)
        c.run(request)
        c.finish(request)
        clear(c)
        assert store.stats().objects == 5
        for seed in (1, 2, 3):
            served(c, tokens_of(97, seed), ANSWER[:0])
        served(c, tokens_of(65, 4), ANSWER[:0])
        assert c.engine.free_pages == 2
        assert store.stats().objects == 5  # and the next page that leaves the device fills it
        request = begin(c, PROMPT)
        logits = c.run(request)
        assert not differing({"logits": logits[None]}, {"logits": cold(PROMPT, ANSWER[:0])["logits"]})
        return 0 if request.plan is None else request.plan.length

    assert reused() == 80
    monkeypatch.setattr(Loader, "pin", lambda self, addresses: None)
    monkeypatch.setattr(Loader, "unpin", lambda self, addresses: None)
    assert reused() < 80


def test_row_27_a_backup_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """sgl-project/sglang#27108: the backup failed, and the node was taken to be on the host all the same.

    The host has no room, or fails in the middle of a copy. The page is gone then, and nothing says otherwise;
    once there is room again it works.
    """

    def listed(why: type[StoreError]) -> int:
        def copy(to: np.ndarray, source: np.ndarray) -> None:
            to[: len(to) // 2] = source[: len(to) // 2]
            if np.shares_memory(to, store._arena) and failing:
                raise why("on purpose")
            np.copyto(to, source)

        store, failing = host(copy=copy), [True]
        c = over(Tier(store=store, write=Write.BACK))
        for _ in range(2):
            assert not served(c, PROMPT) and c.metrics.reused == 0
            clear(c)
        found = store.stats().objects + sum(c.mover.up.find([address_of(Kind.PAGE, P)]))
        assert not c._offload._saved and not c._offload._held
        failing.clear()
        if not found:
            c = over(Tier(store=store, write=Write.BACK))
            for _ in range(2):
                assert not served(c, PROMPT)
                clear(c)
            assert c.metrics.reused == 80
        return found

    assert listed(StoreFull) == listed(Unavailable) == 0

    def visible_first(
        self: MemoryStore, address: Address, head: bytes, payload: np.ndarray, expires: Any
    ) -> None:
        entry = Held(head, len(payload), expires)
        self._make_room(address, entry)
        self._remove(address)
        self._used += entry.nbytes
        self._take(entry)
        self._entries[address] = entry
        self._copy_in(entry, payload)

    monkeypatch.setattr(MemoryStore, "_write", visible_first)
    assert listed(Unavailable) > 0


class Mixes(Wrapper):
    """The fault: for every second page that is asked for, that of another session is returned."""

    asked = 0

    def get_into(self, address: Address, buffer: np.ndarray) -> Head:
        self.asked += 1
        alike = [
            entry.address
            for entry in self.inner.scan()
            if entry.address != address and self.inner.get(entry.address).label.nbytes == len(buffer)
        ]
        return self.inner.get_into(
            alike[self.asked % len(alike)] if self.asked % 2 and alike else address, buffer
        )


def test_row_29_pages_of_other_sessions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """LMCache/LMCache#4385: with more sessions than fit into memory the disk returned the KV of others.

    Six sessions in turns over a host store for two of them, above a disk. Every object carries its own key,
    so that one of another session is refused, whoever mixed them up.
    """

    def sessions(folder: str, wrong: Callable[[Store], Store]) -> tuple[set[str], TieredCache]:
        disk = wrong(DiskStore(tmp_path / folder))
        upper = Tier(store=host(10 * PAGE))
        c = over(upper, Tier(store=disk, write=Write.BACK), policy=Zero())
        said = [tokens_of(49, seed) for seed in range(6)]
        found: set[str] = set()
        for turn in range(3):
            for number, prompt in enumerate(said):
                found |= served(c, prompt)
                said[number] = join(prompt, ANSWER, tokens_of(4, 10 * turn + number))
            clear(c)
        disk.close()
        return found, c

    found, c = sessions("right", lambda store: store)
    assert not found and c.mover.metrics.sources()["disk"] > 300 and not counted(c, "failures")
    found, c = sessions("mixed", Mixes)
    assert not found and counted(c, "failures")["disk"]["get"]["foreign"] > 0

    def believes(self: Loader, shelf: Any, label: Label, buffer: np.ndarray) -> Item:
        shelf.get_into(label.address, buffer)
        return Item(label, buffer)

    monkeypatch.setattr(Loader, "_got", believes)
    assert "logits" in sessions("believed", Mixes)[0]


class Loses(Wrapper):
    """Objects are evicted right after the store has said that they are there."""

    def __init__(self, inner: Store, *lost: Address) -> None:
        super().__init__(inner)
        self.lost = lost

    def exists(self, addresses: Sequence[Address]) -> list[bool]:
        found = self.inner.exists(addresses)
        self.inner.delete(self.lost)
        return found


def test_row_30_less_comes_than_was_promised(monkeypatch: pytest.MonkeyPatch) -> None:
    """LMCache/LMCache#4133: the lookup promised 768 tokens, 651 came.

    Any page or state is evicted in between: the hit is as long as what did come, and the rest is computed.
    """
    lost = [(Kind.PAGE, at, {"computed": 90 - at + P, "host": at - P}) for at in range(P, 81, P)]
    lost += [(Kind.BOUNDARY, 80, {"computed": 10, "host": 64, "replayed": 16})]
    lost += [(Kind.BOUNDARY, 64, {"computed": 10, "host": 80})]  # it was not needed
    for kind, position, sources in lost:
        store = host()
        served(over(store), PROMPT, ANSWER[:0])
        c = over(Loses(store, address_of(kind, position)))
        assert not served(c, PROMPT), (kind, position)
        assert c.mover.metrics.sources() == {name: n for name, n in sources.items() if n}, (kind, position)
        assert counted(c, "fallbacks") == ({} if sources.get("host") == 80 else {"missing": 1})

    real = Loader.load

    def pretends(self: Loader, labels: Sequence[Label], deadline: float | None = None) -> list:
        found = real(self, labels, deadline)
        blank = [Loaded(Item(label, np.zeros(label.nbytes, np.uint8)), "host") for label in labels]
        return [b if isinstance(f, StoreError) else f for f, b in zip(found, blank, strict=True)]

    monkeypatch.setattr(Loader, "load", pretends)
    store = host()
    served(over(store), PROMPT, ANSWER[:0])
    assert "logits" in served(over(Loses(store, address_of(Kind.PAGE, 32))), PROMPT)


HOPS = ["pack", "put", "demote", "exists", "get", "get below", "promote", "unpack"]


@pytest.mark.parametrize("hop", HOPS)
def test_row_31_completed_is_not_succeeded(hop: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """ai-dynamo/dynamo#15079: a transfer that failed counted as completed, and stale KV was served.

    Every hop on the way down and up fails, at one of its calls, or always. What is served is cold; once
    nothing fails any more there are hits again.
    """
    unpack, prompts = fetches.unpack, (PROMPT, tokens_of(65, 1))

    def fails(at: int | None, swallow: bool = False) -> int:
        """With the `at`-th call of the hop failing, or all of them. Returns how many there were."""
        upper, lower = Faulty(host(6 * PAGE, "upper")), Faulty(host(name="lower"))
        failing, calls = [at], [0]

        def copy(name: str, to: np.ndarray, source: np.ndarray) -> None:
            to[:] = source
            calls[0] += 1
            if failing[0] in (calls[0], None):
                to[:] = 7
                if not swallow:
                    raise Unavailable("on purpose")

        monkeypatch.setattr(
            fetches, "unpack", lambda item, _: unpack(item, copy if hop == "unpack" else None)
        )

        def device() -> TieredCache:
            below = Tier(store=lower, write=Write.BACK, cool_down=0.0)
            return over(upper, below, policy=Zero(), copy=copy if hop == "pack" else None)

        store = lower if hop in ("demote", "get below") else upper
        call = {"demote": "put", "promote": "put", "get below": "get"}.get(hop, hop)
        c = device()
        for way in (("put", "demote"), ("exists", "get", "get below", "promote")):
            if hop in way and at != 0:
                store.add(Fail(call), at or 1, 1 if at else None)
            before = store.calls[call]
            for prompt in prompts:
                assert not served(c, prompt), at
            if hop in way:
                calls[0] = store.calls[call] - before
            c = device()
        upper.clear()
        lower.clear()
        failing[0] = 0
        for _ in range(2):
            c = device()
            assert not served(c, PROMPT), at
        assert c.metrics.reused > 0
        return calls[0]

    count = fails(0)
    assert count > 0
    for at in {*range(1, count + 1, max(1, count // 8)), None}:
        fails(at)
    if "pack" in hop:
        with pytest.raises(AssertionError, match=r"layers|logits"):
            fails(None, swallow=True)


# JAX --------------------------------------------------------------------------------------------------------


def aligned(payload: np.ndarray) -> np.ndarray:
    """A copy at an address that JAX would rather use than copy."""
    memory = np.empty(len(payload) + 128, np.uint8)
    start = -memory.ctypes.data % 64
    memory[start : start + len(payload)] = payload
    return memory[start : start + len(payload)]


def plain_item(seed: int, nbytes: int = 4096) -> Item:
    payload = aligned(np.random.default_rng(seed).integers(0, 256, nbytes).astype(np.uint8))
    label = Label(
        Address(b"o" * 32, b"n" * 32, bytes([seed]) * 32),
        Kind.PAGE,
        P,
        "pool",
        (Tensor("t", "uint8", (nbytes,)),),
    )
    return Item(label, payload)


KINDS = sorted(memory.kind for memory in jax.devices()[0].addressable_memories())


@pytest.mark.parametrize("kind", [*KINDS, "numpy"])
def test_row_74_what_is_put_is_not_the_callers_memory(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """jax-ml/jax#37830: `device_put` aliases numpy memory that can be written.

    Put an object, overwrite the memory it came from: what is in the store stays as it is.
    """

    def kept() -> bool:
        store: MemoryStore = host() if kind == "numpy" else DeviceStore(1 << 20, kind)
        item = plain_item(1)
        store.put(item)
        item.payload[:] = 0
        buffer = aligned(np.zeros(4096, np.uint8))
        try:
            store.get_into(item.label.address, buffer)
        except Corrupt:
            return False
        first = buffer.copy()
        buffer[:] = 0
        store.get_into(item.label.address, buffer)
        return first.tobytes() == buffer.tobytes() == plain_item(1).payload.tobytes()

    assert kept()

    def aliases(self: Any, entry: Held, payload: np.ndarray) -> None:
        entry.memory = jax.device_put(payload, self._sharding)

    if kind in ("device", "pinned_host", "unpinned_host"):
        monkeypatch.setattr(DeviceStore, "_copy_in", aliases)
        if jax.default_backend() == "cpu" and kind == jax.devices()[0].default_memory().kind:
            assert not kept()


def test_row_74_pages_and_states_on_their_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same for what is written into the pool, and read out of it: they share no memory."""
    e = fresh()
    seq = e.open()
    e.prefill(seq, PROMPT[:33])
    handle = e.save_boundary(seq)
    rows, state = e.gather_pages(seq.pages[:2]), e.gather_boundary(handle)
    before = [*(rows.rows(i) for i in range(2)), state.rows()]
    copies = [{name: array.copy() for name, array in each.items()} for each in before]

    mine = [
        {
            name: aligned(a.reshape(-1).view(np.uint8)).view(a.dtype).reshape(a.shape)
            for name, a in each.items()
        }
        for each in copies
    ]
    leases = e.take_pages(2)
    e.write_pages(leases, mine[:2])
    other = e.put_boundary(33, mine[2])
    for each in mine:  # at once, whether the device has read it or not
        for array in each.values():
            array.view(np.uint8)[...] = 255
    found = e.gather_pages([lease.page for lease in leases])
    for i in range(2):
        assert not differing(found.rows(i), copies[i])
    assert not differing(e.gather_boundary(other).rows(), copies[2])

    e.close(seq)  # and the pages are poisoned
    e.drop_boundary(handle)
    again = e.open()
    e.prefill(again, tokens_of(128, 3))
    for each, copy in zip(before, copies, strict=True):
        assert not differing(each, copy)

    handed: list[np.ndarray] = []
    real = moving.pools.scatter_pages

    def looks(pool: Any, pages: Any, rows: Rows, **options: Any) -> Any:
        handed.extend(rows.values())
        return real(pool, pages, rows, **options)

    def shared() -> bool:
        handed.clear()
        e.write_pages(leases, mine[:2])
        return any(np.shares_memory(a, b) for a in handed for each in mine for b in each.values())

    monkeypatch.setattr(moving.pools, "scatter_pages", looks)
    assert not shared() and handed
    wide = {name: np.zeros((16, *array.shape), array.dtype) for name, array in mine[0].items()}
    mine[0] = {name: array[0] for name, array in wide.items()}
    buffers = iter(wide.values())
    own = SimpleNamespace(zeros=lambda shape, dtype: next(buffers), iinfo=np.iinfo, int32=np.int32)
    monkeypatch.setattr(moving, "np", own)  # the fault: memory of the caller
    assert shared()


@pytest.mark.parametrize("kind", KINDS)
def test_row_78_whole_objects_and_copies_that_outlive_their_source(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """openxla/xla#34565, jax-ml/jax#24521: a scatter on `pinned_host` aborts; a donated source is invalid.

    Objects are put and replaced whole; a source is deleted at once, and the copy can still be read; one that
    is deleted while somebody reads it lives until that reader is done.
    """
    source = jnp.arange(1024, dtype=jnp.float32)
    expected = np.array(source)
    copy = jax.device_put(source, SingleDeviceSharding(jax.devices()[0], memory_kind=kind), may_alias=False)
    source.delete()
    assert np.asarray(copy).tobytes() == expected.tobytes()

    store = DeviceStore(1 << 20, kind)
    item = plain_item(1)
    store.put(item)
    address = item.label.address
    first = store._entries[address].memory
    again = Item(item.label, aligned(item.payload[::-1]))
    store.put(again)
    assert first.is_deleted() and store.get(address).payload.tobytes() == again.payload.tobytes()

    real = DeviceStore._copy_out

    def deleted_meanwhile(self: DeviceStore, entry: Held, buffer: np.ndarray) -> None:
        self.delete([address])
        real(self, entry, buffer)

    monkeypatch.setattr(DeviceStore, "_copy_out", deleted_meanwhile)
    memory = store._entries[address].memory
    assert store.get(address).payload.tobytes() == again.payload.tobytes()
    assert memory.is_deleted() and store.stats().objects == 0
    store.put(again)
    monkeypatch.setattr(DeviceStore, "_release", lambda self, entry: None)
    monkeypatch.setattr(MemoryStore, "_lease", lambda self, address: self._entries[address])
    with pytest.raises(RuntimeError, match="deleted"):
        store.get(address)


# Metrics ----------------------------------------------------------------------------------------------------


def test_row_79_a_hit_is_what_was_verified_and_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """vllm-project/vllm#30522: queries counted twice, and loads that failed afterwards counted as hits.

    Of a prompt asked again, page k cannot be read, or is damaged, or the only state: what counts as a hit of
    the tier is what is before it, the rest counts as computed, and all of it is the prompt.
    """

    def counts(damage: Callable[[HostStore], None], policy: ReloadPolicy) -> tuple[dict[str, int], int]:
        store = host()
        served(over(store, policy=policy), PROMPT, ANSWER[:0])
        damage(store)
        c = over(store, policy=policy)
        assert not served(c, PROMPT)
        return c.mover.metrics.sources(), c.metrics.reused

    def flip(kind: Kind, position: int) -> Callable[[HostStore], None]:
        def damage(store: HostStore) -> None:
            entry = store._entries[address_of(kind, position)]
            store._arena[entry.memory[0] * 8] ^= 1

        return damage

    assert counts(lambda store: None, Full()) == ({"computed": 10, "host": 80}, 80)
    for k in range(5):
        sources, reused = counts(flip(Kind.PAGE, (k + 1) * P), Full())
        assert sources == {"computed": 90 - k * P} | ({"host": k * P} if k else {}) and reused == k * P
    assert counts(flip(Kind.BOUNDARY, 80), Full()) == ({"computed": 10, "host": 64, "replayed": 16}, 64)
    start = 80 - replay_length(micro(), 80)
    assert counts(lambda store: None, Zero()) == (
        {"computed": 10, "host": start, "replayed": 80 - start},
        start,
    )

    real = fetches.Fetch._bring

    def counts_promises(self: Any, names: list) -> list:
        for name in names:
            if name.kind is Kind.PAGE:
                self._mover.metrics.source("host", P)
        return real(self, names)

    monkeypatch.setattr(fetches.Fetch, "_bring", counts_promises)
    assert sum(counts(flip(Kind.PAGE, 2 * P), Full())[0].values()) != 90
