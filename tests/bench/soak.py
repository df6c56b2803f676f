"""A soak: random requests over tiers while everything breaks. `make soak`, or

    python tests/bench/soak.py [--seconds 1200] [--seed 0]

Host memory, a disk folder and a Redis server are below a small device. Puts and gets fail, are lost, come
late or damaged by chance; the server is killed and comes back; engine and cache are thrown away and begin
again over the same stores. Every answer must have the bits of a cold run, token sources must sum to the
prompts, and at the end nothing may have leaked: pages, slots, pins, bytes under way, threads, files, memory.
All that is stored then must be readable.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import os
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

import numpy as np

from goldenkv.config import ModelConfig, Numerics, micro, with_mtp
from goldenkv.engine import EndPoints, Engine, Full, Periodic, TieredCache, Zero
from goldenkv.model.weights import Model
from goldenkv.prefix import Namespace, Tenant, TensorParallel
from goldenkv.state import Rows, compare
from goldenkv.tiers.disk import DiskStore
from goldenkv.tiers.errors import Full as NoRoom
from goldenkv.tiers.errors import StoreError, Unavailable
from goldenkv.tiers.faults import Delay, Fail, Faulty, Flip, Lose, Plan
from goldenkv.tiers.host import HostStore
from goldenkv.tiers.mover import Mover
from goldenkv.tiers.redis import RedisStore
from goldenkv.tiers.server import RedisServer
from goldenkv.tiers.shelf import Tier, Write

CONFIG: ModelConfig = with_mtp(micro())
NUMERICS = Numerics(tile=8, index_block=8, key_block=8)
PAGE, LONGEST = 16, 160
FAULTS = {
    Fail("put", Unavailable): 0.02,
    Fail("put", NoRoom): 0.02,
    Fail("get", Unavailable): 0.02,
    Delay("get", 0.02): 0.02,
    Delay("put", 0.02): 0.02,
    Lose(): 0.02,
    Flip(): 0.02,
    Fail("exists", Unavailable): 0.01,
}


@functools.cache
def model() -> Model:
    """Random weights."""
    return Model(CONFIG, NUMERICS)


def new_engine() -> Engine:
    """What is freed is NaN."""
    return Engine(
        model(), CONFIG, NUMERICS, slots=3, max_length=LONGEST, page_size=PAGE, pages=26, boundaries=6,
        fill=np.nan, poison=True,
    )  # fmt: skip


class Soak:
    """One run; `step` until the time is over, then `end`."""

    def __init__(self, seed: int, folder: str, server: RedisServer) -> None:
        self.rng = np.random.default_rng(seed)
        self.seed, self.folder, self.server = seed, folder, server
        self.cold_engine = Engine(model(), CONFIG, NUMERICS, max_length=LONGEST)
        stems = self.rng.integers(1, CONFIG.vocab_size, (6, LONGEST)).tolist()
        self.prompts = [stem[: int(self.rng.integers(20, 140))] for stem in stems for _ in range(8)]
        self.known: dict[tuple[int, ...], Rows] = {}
        self.counts: Counter[str] = Counter()
        self.restarts = 0
        self.begin()

    def namespace(self, tenant: str) -> Namespace:
        """Of one of two tenants."""
        return Namespace(
            domain=Tenant(tenant, tenant.encode() * 16), model=self.cold_engine.fingerprint, tokenizer=None,
            chat_template=None, layout="pool", page_size=PAGE, dtype="float32",
            tensor_parallel=TensorParallel(1, 0, "none"), adapter=None, media=(), salt=None,
        )  # fmt: skip

    def begin(self) -> None:
        """A new engine and a new cache over what the stores have."""
        self.restarts += 1
        plan = [Plan(self.seed + 100 * self.restarts + n, FAULTS) for n in range(3)]
        self.host = HostStore(96 << 10, block=1024)
        self.disk = DiskStore(self.folder, capacity=512 << 10)
        self.redis = RedisStore(self.server.client(timeout=0.5))
        tiers = [
            Tier(store=Faulty(self.host, plan[0]), write=Write.THROUGH, cool_down=0.05),
            Tier(store=Faulty(self.disk, plan[1]), write=Write.BACK, cool_down=0.05),
            Tier(store=Faulty(self.redis, plan[2]), ttl=30.0, promote=False, cool_down=0.05),
        ]
        self.mover = Mover(tiers, PAGE, in_flight=128 << 10)
        policy = [Full(), Periodic(2 * PAGE), EndPoints(), Zero()][self.rng.integers(4)]
        self.engine = new_engine()
        self.cache = TieredCache(self.engine, self.mover, policy, deadline=lambda tokens: 0.25)
        self.asked = 0

    def step(self) -> None:
        """One thing happens; mostly a request comes and goes."""
        match self.rng.integers(100):
            case 0:
                self.restart()
            case 1:
                self.server.restart()
                self.counts["server killed"] += 1
            case 2:
                self.forget()
            case 3 | 4:
                self.cache.evict(pages=int(self.rng.integers(30)), boundaries=int(self.rng.integers(8)))
            case 5:
                self.cache.flush()
            case 6 | 7:
                self.cache.prefetch(self.namespace("a"), self.prompt())
            case _:
                self.request()

    def prompt(self) -> list[int]:
        """One that others begin like."""
        return self.prompts[self.rng.integers(len(self.prompts))]

    def request(self) -> None:
        """Runs a prompt and some further tokens, and compares all of it."""
        namespace, prompt = self.namespace("ab"[self.rng.integers(2)]), self.prompt()
        request = self.cache.begin(namespace, prompt)
        self.asked += len(prompt)
        if self.rng.random() < 0.1:
            self.cache.cancel(request)
            return
        logits = self.cache.run(request)
        self.check(prompt, self.engine.rows(request.seq) | {"logits": logits[None]})
        for _ in range(int(self.rng.integers(4))):
            self.cache.decode(request, int(self.rng.integers(1, CONFIG.vocab_size)))
        self.cache.finish(request)
        self.counts["requests"] += 1
        self.counts["reused"] += request.plan is not None

    def check(self, tokens: list[int], found: Rows) -> None:
        """Every bit of state and logits against a run without any cache."""
        key = tuple(tokens)
        if key not in self.known:
            seq = self.cold_engine.open()
            logits = self.cold_engine.prefill(seq, tokens)
            self.known[key] = self.cold_engine.rows(seq) | {"logits": logits[None]}
            self.cold_engine.close(seq)
        difference = compare(self.known[key], found)
        assert difference.same, f"other bits than cold: {difference.first}"

    def forget(self) -> None:
        """A tenant's namespace goes; a store that is down may keep some of it, and says so."""
        try:
            self.cache.forget(self.namespace("b"))
            self.counts["forgotten"] += 1
        except Unavailable:
            self.counts["not wholly forgotten"] += 1

    def restart(self) -> None:
        """Ends everything of this process but the disk and the server, after the books were checked."""
        self.audit()
        self.mover.close()
        self.begin()
        self.counts["restarts"] += 1

    def audit(self) -> None:
        """Sources sum to the prompts; nothing is held that nobody uses; all that is stored can be read."""
        assert self.mover.drain(60.0), "copies that do not end"
        sources = self.mover.metrics.sources()
        assert sum(sources.values()) == self.asked, (sources, self.asked)
        for name, tokens in sources.items():
            self.counts[f"tokens: {name}"] += tokens
        for reason, count in self.mover.metrics.to_json()["fallbacks"].items():
            self.counts[f"fallback: {reason}"] += count
        self.cache.tree.check()
        assert self.engine.free_slots == 3, "a slot leaked"
        while self.engine.free_pages < 26:
            before = self.engine.free_pages
            self.cache.evict(pages=26, boundaries=6)
            assert self.engine.free_pages > before, "a page leaked"
        assert self.engine.free_boundaries == 6, "a boundary slot leaked"
        assert self.mover.drain(60.0), "copies that do not end"
        for store in (self.host, self.disk, self.redis):
            self.read_all(store)

    def read_all(self, store: HostStore | DiskStore | RedisStore) -> None:
        """Every object is whole."""
        for entry in list(store.scan()):
            try:
                store.get(entry.address)
                self.counts[f"objects read: {store.name}"] += 1
            except StoreError as error:
                assert error.reason in ("missing", "expired"), f"{store.name}: {error}"


def held() -> dict[str, float]:
    """Threads, open files and resident memory of this process."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    files = len(os.listdir("/proc/self/fd"))
    return {
        "threads": threading.active_count(),
        "files": files,
        "mb": pages * os.sysconf("SC_PAGESIZE") / 1e6,
    }


def main() -> None:
    """Runs it and prints what happened as JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=1200.0)
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, RedisServer() as server:
        soak = Soak(chosen.seed, folder, server)
        end = time.monotonic() + chosen.seconds
        warm = time.monotonic() + min(60.0, chosen.seconds / 4)
        before: dict[str, float] | None = None
        while time.monotonic() < end:
            soak.step()
            if before is None and time.monotonic() > warm:
                soak.restart()
                before = held()
        soak.restart()
        after = held()
        assert before is not None
        soak.mover.close()
    assert after["threads"] <= before["threads"], f"threads leaked: {before} -> {after}"
    assert after["files"] <= before["files"] + 2, f"files leaked: {before} -> {after}"
    assert after["mb"] <= 1.25 * before["mb"] + 50, f"memory leaked: {before} -> {after}"
    found = {"seconds": chosen.seconds, "before": before, "after": after, **dict(sorted(soak.counts.items()))}
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
