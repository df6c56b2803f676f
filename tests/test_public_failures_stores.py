"""Faults that public trackers report of other implementations: state in a store that outlives the process.

The disk tier under a cache. As in `test_public_failures.py`, each test states the right value for the whole
kind of fault, and builds the fault in, to show that the test would find it. "= cold": every bit of every
component and of the logits is that of an engine without a cache.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from goldenkv.config import Numerics, micro
from goldenkv.engine import Engine, Full, PrefixCache, Request
from goldenkv.engine.tiered import TieredCache
from goldenkv.model.weights import Model
from goldenkv.prefix import Namespace, PageKeys, Tenant, TensorParallel
from goldenkv.state import Rows, compare
from goldenkv.tiers.disk import DiskStore
from goldenkv.tiers.disk_files import Step
from goldenkv.tiers.disk_index import Row
from goldenkv.tiers.disk_recovery import Recovery
from goldenkv.tiers.errors import Full as StoreFull
from goldenkv.tiers.errors import Truncated
from goldenkv.tiers.host import HostStore
from goldenkv.tiers.loader import Loader
from goldenkv.tiers.mover import Mover
from goldenkv.tiers.objects import Address, Item, Kind, Label, Tensor, head_size, make_head, read_head
from goldenkv.tiers.shelf import Tier
from goldenkv.tiers.store import Store, VerifiedStore

P = 16
SMALL = Numerics(tile=8, index_block=8, key_block=8)


@functools.cache
def model() -> Model:
    return Model(micro(), SMALL)


def fresh() -> Engine:
    sizes = dict(slots=4, max_length=128, page_size=P, pages=24, boundaries=12)
    return Engine(model(), micro(), SMALL, **sizes, fill=np.nan, poison=True)


def tokens_of(length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(1, 64, length)


@functools.lru_cache(maxsize=64)
def cold_of(tokens: bytes) -> Rows:
    e = fresh()
    seq = e.open()
    logits = e.prefill(seq, np.frombuffer(tokens, np.int64), all_logits=True)
    return {**e.rows(seq), "logits": logits}


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


class Inline(Executor):
    """Runs tasks at once, in the caller's thread."""

    def submit(self, fn: Callable, /, *args: Any, **kwargs: Any) -> Future:
        future: Future = Future()
        try:
            future.set_result(fn(*args))
        except BaseException as error:
            future.set_exception(error)
        return future


def over(store: Store, **options: Any) -> TieredCache:
    """A cache on a new device."""
    mover = Mover([Tier(store=store)], P, workers=Inline(), **options)
    return TieredCache(fresh(), mover, Full(), deadline=lambda tokens: 1e6)


def begin(c: PrefixCache, prompt: np.ndarray) -> Request:
    return c.begin(space(c.engine), prompt)


PROMPT = tokens_of(60)
"""Three whole pages and twelve tokens: with three states, six objects."""
NAMES = [(kind, at) for at in (16, 32, 48) for kind in (Kind.PAGE, Kind.BOUNDARY)]


def wrong(c: TieredCache) -> set[str]:
    """Serves the prompt; what is not cold of the state that came up, the state at the end, or the logits."""
    request = begin(c, PROMPT)
    found = set[str]()
    if length := request.seq.length:
        before = cold_of(PROMPT[:length].astype(np.int64).tobytes())
        found = differing(c.engine.rows(request.seq), before) - {"logits"}
    logits = c.run(request)
    expected = cold_of(PROMPT.astype(np.int64).tobytes())
    rows = {**c.engine.rows(request.seq), "logits": logits[None]}
    found |= differing(rows, {**expected, "logits": expected["logits"][-1:]})
    c.finish(request)
    return found


def served(store: Store, **options: Any) -> int:
    """The prompt, on a new device, = cold. Returns how many of its tokens did not run."""
    c = over(store, **options)
    assert not wrong(c)
    return c.metrics.reused


def failures(c: TieredCache) -> set[str]:
    """Reasons of gets that failed."""
    return set(c.mover.metrics.to_json()["failures"].get("disk", {}).get("get", {}))


def address_of(kind: Kind, position: int) -> Address:
    namespace = space(fresh())
    keys = PageKeys(namespace, PROMPT)
    return Address.of(
        namespace, keys.pages[position // P - 1] if kind is Kind.PAGE else keys.boundary(position)
    )


NEEDED = [(Kind.PAGE, 32), (Kind.PAGE, 48), (Kind.BOUNDARY, 48)]
"""What a hit of all three pages needs, among others. Without it the hit ends a page earlier."""
needed = pytest.mark.parametrize("name", NEEDED, ids=lambda name: f"{name[0].value} {name[1]}")


@pytest.fixture(scope="module")
def items() -> list[Item]:
    """The objects of the prompt."""
    store = HostStore(1 << 20, block=8)
    assert served(store) == 0
    return [store.get(address_of(*name)) for name in NAMES]


@contextlib.contextmanager
def filled(folder: Path, items: list[Item], **options: Any) -> Iterator[DiskStore]:
    """A store with them."""
    store = DiskStore(folder, **options)
    for item in items:
        store.put(item)
    yield store
    store.close()


def rewrite(store: DiskStore, address: Address, change: Callable[[bytearray], bytes | bytearray]) -> None:
    """Other bytes in a file. Nothing else about it is other: a disk does not tell what it has forgotten."""
    path = store.places.object(address)
    before = os.stat(path)
    data = change(bytearray(Path(path).read_bytes()))
    with open(path, "r+b") as file:
        file.truncate(len(data))
        file.write(data)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


# Failed and half-done puts ----------------------------------------------------------------------------------

PUT = [step for step in Step if step.value.startswith("put:")]


@pytest.mark.parametrize("step", PUT, ids=lambda step: step.name)
def test_row_54_a_store_that_failed_is_not_there(
    step: Step, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LMCache/LMCache#4991: a store that had failed remained visible, and later hits were gibberish.

    The disk is full in the middle of a put, at each of its steps: a look-up misses, and a later put works.
    """
    number = 1 if step is Step.FOLDERS_MADE else 3
    lost = (Kind.PAGE, 16) if number == 1 else (Kind.PAGE, 32)
    reached: list[Step] = []

    def at(now: Step) -> None:
        reached.append(now)
        if now is step and reached.count(step) == number:
            raise OSError(errno.ENOSPC, "no space")

    def check(folder: Path) -> None:
        reached.clear()
        store = DiskStore(folder, at=at)
        c = over(store)
        assert not wrong(c)
        assert {e.address for e in store.scan()} == {address_of(*name) for name in NAMES if name != lost}
        assert len(list((folder / "objects").rglob("*.safetensors"))) == 5
        assert c.mover.up.find([address_of(*lost)]) == [False]
        assert served(store) == lost[1] - P and served(store) == 48  # it was put again
        store.close()

    check(tmp_path / "right")

    def in_place(self: DiskStore, address: Address, head: bytes, payload: np.ndarray, expires: Any) -> None:
        path = self.places.object(address)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with self._index.locked():
            Path(path).write_bytes(head + payload.tobytes()[:9])
            self._index.put(Row(address, len(head) + len(payload), expires, ""))
            self._index.commit(self.now())
            try:
                at(step)
            except OSError as error:
                raise StoreFull("no space") from error
            Path(path).write_bytes(head + payload.tobytes())

    monkeypatch.setattr(DiskStore, "_write", in_place)
    with pytest.raises(AssertionError):
        check(tmp_path / "in place")


CHILD = """
import os, pickle, signal, sys
from goldenkv.tiers.disk import DiskStore

items, runs = pickle.load(sys.stdin.buffer)
for folder, step, number in runs:
    if os.fork() == 0:
        seen = 0
        def at(reached):
            global seen
            seen += reached.name == step
            if reached.name == step and seen == number:
                os.kill(os.getpid(), signal.SIGKILL)
        store = DiskStore(folder, at=at)
        for count, item in enumerate(items):
            store.put(item)
            with open(folder + ".done", "w") as file:
                file.write(str(count + 1))
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.wait()[1]))
"""


def test_row_57_an_entry_is_there_once_it_is_committed(
    tmp_path: Path, items: list[Item], monkeypatch: pytest.MonkeyPatch
) -> None:
    """kvcache-ai/Mooncake#2827: an entry was reported before it was committed, and stayed a phantom for ever.

    A process is killed at every step of a put. Every entry that the next process lists can be read, with its
    bits; every put that had returned is listed; a hit is as long as what is listed, = cold.
    """
    steps = [(step.name, n) for step in PUT for n in ((1,) if step is Step.FOLDERS_MADE else (1, 4))]
    runs = [(str(tmp_path / f"{name} {n}"), name, n) for name, n in steps]
    done = subprocess.run(
        [sys.executable, "-c", CHILD],
        input=pickle.dumps((items, runs)),
        capture_output=True,
        timeout=120,
        check=True,
    )
    assert done.stdout.split() == [str(-signal.SIGKILL).encode()] * len(runs)

    def phantoms(folder: str) -> int:
        mark = Path(folder + ".done")
        committed = int(mark.read_text()) if mark.exists() else 0
        store = DiskStore(folder)
        listed = {entry.address for entry in store.scan()}
        bad = 0
        for number, item in enumerate(items):
            there = item.label.address in listed
            assert there or number >= committed, "a committed object is lost"
            try:
                assert not there or store.get(item.label.address).payload.tobytes() == item.payload.tobytes()
            except Truncated:
                bad += 1
        hits = 0
        while hits < 6 and items[hits].label.address in listed:
            hits += 1
        reused = served(store)
        assert bad or reused == hits // 2 * P  # page and state of each
        store.close()
        return bad

    for folder, _, _ in runs:
        assert phantoms(folder) == 0, folder
    monkeypatch.setattr(Recovery, "mend", lambda self, index, now: None)
    folder = str(tmp_path / "reported")
    with filled(Path(folder), items[:1]) as store:
        store.put(items[1])
        rewrite(store, items[1].label.address, lambda data: data[:-1])
    assert phantoms(folder) == 1


def listed(self: DiskStore, addresses: Sequence[Address]) -> list[bool]:
    """Says that everything is there which the index lists, whatever has become of its file."""
    return [row is not None for row in self._index.find(addresses)]


# What is read back ------------------------------------------------------------------------------------------


def spots(store: DiskStore, address: Address) -> dict[str, int]:
    """Places in a file, by what is there; of every component the middle."""
    data = Path(store.places.object(address)).read_bytes()
    size = head_size(data[:8], len(data))
    header = json.loads(data[8:size])
    found = {
        "size": 0,
        "checksum": data.index(b'"header_xxh3":"') + 20,
        "head": size // 2,
        "last of head": size - 1,
    }
    found |= {"first": size, "last": len(data) - 1}
    for name, entry in header.items():
        if name != "__metadata__" and entry["data_offsets"][1] > entry["data_offsets"][0]:
            found[name] = size + sum(entry["data_offsets"]) // 2
    return found


def flip(place: int) -> Callable[[bytearray], bytearray]:
    """Another bit in the byte at a place."""

    def change(data: bytearray) -> bytearray:
        data[place] ^= 16
        return data

    return change


@needed
def test_row_55_a_bit_that_is_another_one(name: tuple[Kind, int], tmp_path: Path, items: list[Item]) -> None:
    """vllm-project/vllm#57912: truncated files were found, but not those of the right size.

    One bit is another one, of the head, of its checksum, of each component: the object is not used, what can
    still be reused is, and afterwards there is a whole one in its place.
    """
    with filled(tmp_path / "store", items) as store:
        address = address_of(*name)
        for what, place in spots(store, address).items():
            rewrite(store, address, flip(place))
            c = over(store)
            assert not wrong(c), what
            assert failures(c) and failures(c) <= {"corrupt", "truncated", "foreign"}, what
            assert c.metrics.reused == name[1] - P, what
            if name[0] is Kind.BOUNDARY:  # what runs again over a hit keeps no state
                store.put(next(item for item in items if item.label.address == address))
            assert served(store) == 48, what  # a page was computed, and put again

    with filled(tmp_path / "unverified", items, verify=False) as store:
        for what, place in spots(store, address).items():
            if what.startswith("layers"):
                rewrite(store, address, flip(place))
        assert wrong(over(store, verify=False))


@needed
def test_row_58_a_key_without_a_value(
    name: tuple[Kind, int], tmp_path: Path, items: list[Item], monkeypatch: pytest.MonkeyPatch
) -> None:
    """kvcache-ai/Mooncake#3465: the key was listed, and its value was empty.

    A file that is empty, or ends anywhere: a miss, and a later put works.
    """
    address = address_of(*name)
    with filled(tmp_path / "store", items) as store:
        whole = Path(store.places.object(address)).read_bytes()
        size = head_size(whole[:8], len(whole))
        for length in (0, 1, 7, 8, 9, size - 1, size, size + 1, len(whole) - 1):
            rewrite(store, address, lambda data, length=length: data[:length])
            assert served(store) == name[1] - P, length
            store.put(next(i for i in items if i.label.address == address))
            assert served(store) == 48, length
            rewrite(store, address, lambda data, length=length: data[:length])
            store.close()
            store = DiskStore(store.places.folder)  # and after a restart
            assert store.exists([address]) == [False] and served(store) == name[1] - P, length
            store.put(next(i for i in items if i.label.address == address))

        real = VerifiedStore._get

        def empty(self: VerifiedStore, at: Address, buffer: np.ndarray | None) -> Any:
            """The fault: an empty file is an object without bytes."""
            try:
                return real(self, at, buffer)
            except Truncated:
                assert buffer is not None
                buffer[:] = 0
                item = next(item for item in items if item.label.address == at)
                return read_head(make_head(item, None)), buffer

        monkeypatch.setattr(VerifiedStore, "_get", empty)
        monkeypatch.setattr(DiskStore, "exists", listed)
        rewrite(store, address, lambda data: data[:0])
        assert wrong(over(store, verify=False))


def test_row_59_the_index_outlives_the_process(
    tmp_path: Path, items: list[Item], monkeypatch: pytest.MonkeyPatch
) -> None:
    """LMCache/LMCache#4778: the index was only in memory: after a restart nothing hit, and the files stayed.

    A new process hits, = cold: after the store was closed, after its process was killed, without an index.
    """
    folder = tmp_path / "killed"
    subprocess.run(
        [sys.executable, "-c", CHILD],
        input=pickle.dumps((items, [(str(folder), "PUT_COMMITTED", 6)])),
        timeout=120,
        check=True,
    )

    def after_a_restart(folder: Path, index: bool) -> int:
        if not index:
            for file in folder.glob("goldenkv-index*"):
                file.unlink()
        store = DiskStore(folder)
        hits, files = served(store), len(list(folder.rglob("*.safetensors")))
        assert hits or not files, "files that nobody finds"
        store.close()
        return hits

    with filled(tmp_path / "closed", items):
        pass
    for place in (folder, tmp_path / "closed"):
        assert after_a_restart(place, index=True) == after_a_restart(place, index=False) == 48

    monkeypatch.setattr(Recovery, "mend", lambda self, index, now: None)
    with pytest.raises(AssertionError, match="files that nobody finds"):
        assert after_a_restart(folder, index=False) == 48


def edits(label: Label) -> dict[str, Label]:
    """The same bytes, described otherwise."""
    first, *rest = label.tensors
    names = [t.name.split(".", 2) for t in label.tensors]
    layers = tuple(
        t._replace(name=f"layers.{int(n[1]) + 1}.{n[2]}") for t, n in zip(label.tensors, names, strict=True)
    )
    halves = first._replace(dtype="bfloat16", shape=(*first.shape[:-1], first.shape[-1] * 2))
    found = {
        "layer range": replace(label, tensors=layers),
        "dtype": replace(label, tensors=(halves, *rest)),
        "shape": replace(label, tensors=(first._replace(shape=first.shape[::-1]), *rest)),
        "order": replace(label, tensors=label.tensors[::-1]),
        "position": replace(label, position=label.position + P),
        "kind": replace(label, kind=Kind.TAIL),
        "layout": replace(label, layout="rows"),
        "table": replace(label, table="another"),
        "extra": replace(label, extra=(("sealed", "by nobody"),)),
        "key": replace(label, address=label.address._replace(key=bytes(32))),
        "owner": replace(label, address=label.address._replace(owner=bytes(32))),
        "namespace": replace(label, address=label.address._replace(namespace=bytes(32))),
    }
    return {what: edited for what, edited in found.items() if edited != label}


@needed
@pytest.mark.parametrize("sealed", [True, False], ids=["new checksum", "old checksum"])
def test_row_60_a_description_that_was_edited(
    name: tuple[Kind, int], sealed: bool, tmp_path: Path, items: list[Item], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mesh-LLM/mesh-llm#1228: the payload had a checksum, its descriptor had none.

    Each field of the description is edited, with and without a checksum that fits: it is refused, = cold.
    """
    address = address_of(*name)
    item = next(i for i in items if i.label.address == address)

    def described(label: Label) -> Callable[[bytearray], bytes]:
        def change(data: bytearray) -> bytes:
            head = bytearray(make_head(Item(label, item.payload, item.xxh3), None))
            if not sealed:
                begin = head.index(b'"header_xxh3":"') + 15
                old = data.index(b'"header_xxh3":"') + 15
                head[begin : begin + 32] = data[old : old + 32]
            return bytes(head) + item.payload.tobytes()

        return change

    monkeypatch.setattr(DiskStore, "exists", listed)
    with filled(tmp_path / "store", items) as store:
        for what, label in edits(item.label).items():
            rewrite(store, address, described(label))
            c = over(store)
            assert not wrong(c) and c.metrics.reused == name[1] - P, what
            assert failures(c) and failures(c) <= {"foreign", "corrupt"}, what
            store.put(item)
            assert served(store) == 48

        swapped = swap(item.label)
        rewrite(store, address, described(swapped))
        monkeypatch.setattr(Loader, "_got", believes)
        if sealed:
            assert wrong(over(store))
        else:
            assert not wrong(over(store))  # the checksum alone


def swap(label: Label) -> Label:
    """Two tensors of one shape under each other's names."""
    tensors = list(label.tensors)
    one, other = next(
        (i, j)
        for j, b in enumerate(tensors)
        for i, a in enumerate(tensors[:j])
        if a.shape == b.shape and a.dtype == b.dtype and a.nbytes
    )
    tensors[one], tensors[other] = (
        Tensor(tensors[other].name, *tensors[one][1:]),
        Tensor(tensors[one].name, *tensors[other][1:]),
    )
    return replace(label, tensors=tuple(tensors))


def believes(self: Loader, shelf: Any, label: Label, buffer: np.ndarray) -> Item:
    """The fault: what is there is taken to be what was asked for, as it describes itself."""
    head = shelf.get_into(label.address, buffer)
    return Item(head.label, buffer, head.xxh3)
