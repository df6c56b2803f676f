"""The disk store and kill -9: a process is killed after every step of put, delete, delete_owner and open.

What the next process finds is checked in full: every object has bits that were put under its address, old or
new, never a mix; nothing that was there before is lost; what was deleted stays deleted; the index lists what
is there, no more and no less, and adds it up; no temporary file remains. Each rule has a built-in fault that
breaks it, and the same checks find it.

kill -9 loses no page of the operating system's cache, so these tests cannot show that an fsync is missing:
`test_the_order_of_calls` in `test_disk.py` holds where they are.

The processes are forks of one helper (this file run as a script), which has imported everything already.
"""

import contextlib
import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from goldenkv.tiers.disk import DiskStore
from goldenkv.tiers.disk_changes import Changes
from goldenkv.tiers.disk_files import Places, Step
from goldenkv.tiers.disk_recovery import Recovered, Recovery
from goldenkv.tiers.errors import Missing, StoreError, Unavailable
from goldenkv.tiers.objects import Address, Item, Kind

SIZES = (3000, 5001, 3000, 1, 0)
"""Bytes of the versions of an object. The first and the third have one size and other bits."""


def address(owner: int, namespace: int, key: int) -> Address:
    return Address(bytes([owner]) * 32, bytes([namespace]) * 32, bytes([key]) * 32)


A, A2, A3, B, OLD = (address(*n) for n in [(1, 1, 1), (1, 1, 2), (1, 2, 1), (2, 1, 1), (2, 1, 9)])
NEW, NEW2 = address(3, 1, 1), address(1, 1, 8)
BASE = [A, A2, A3, B]
ALL = [*BASE, OLD, NEW, NEW2]
NAMES = {A: "A", A2: "A2", A3: "A3", B: "B", OLD: "OLD", NEW: "NEW", NEW2: "NEW2"}


def payload(where: Address, version: int) -> np.ndarray:
    seed = [*(part[0] for part in where), version]
    return np.random.default_rng(seed).integers(0, 256, SIZES[version]).astype(np.uint8)


def item(where: Address, version: int) -> Item:
    return Item.of(where, Kind.PAGE, 16, "test", {"layers.2.entries": payload(where, version)})


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


# What is done, and what may be found afterwards -------------------------------------------------------------


def damage(folder: str) -> None:
    """Leaves one of everything that opening has to mend, besides what a killed process leaves by itself."""
    places = Places(folder)
    os.unlink(places.object(A2))  # a row without file
    with contextlib.closing(sqlite3.connect(places.index)) as index, index:
        index.execute("DELETE FROM objects WHERE namespace = ?", (A3.namespace,))  # a file without row
    for where, size in ((NEW, 0), (NEW2, 2000)):  # empty; torn
        os.makedirs(os.path.dirname(places.object(where)), exist_ok=True)
        whole = Path(places.object(B)).read_bytes()
        Path(places.object(where)).write_bytes(whole[:size])
    os.makedirs(f"{places.writers}/77/1.tmp/x")  # an owner's folder on its way out
    Path(f"{places.writers}/77/2.tmp").write_bytes(b"half")
    Path(f"{places.objects}/readme.txt").write_text("not ours")
    os.makedirs(f"{places.namespace(B.owner, B.namespace)}/{'ab' * 32}.safetensors/x")


def close(store: DiskStore, clock: Clock) -> None:
    store.close()


def close_damaged(store: DiskStore, clock: Clock) -> None:
    store.close()
    damage(store.places.folder)


def close_without_index(store: DiskStore, clock: Clock) -> None:
    store.close()
    Path(store.places.index).write_bytes(b"this is no database. " * 500)


def pass_time(store: DiskStore, clock: Clock) -> None:
    clock.now += 100


def nothing(store: DiskStore, clock: Clock) -> None: ...


def reopen(store: DiskStore, clock: Clock) -> None:
    DiskStore(store.places.folder, clock=clock, at=store._at)


Act = Callable[[DiskStore, Clock], object]
ACTIONS: dict[str, tuple[Act, Act]] = {
    "put_new": (nothing, lambda store, clock: store.put(item(NEW, 0))),
    "put_beside": (nothing, lambda store, clock: store.put(item(NEW2, 0))),
    "overwrite": (nothing, lambda store, clock: store.put(item(A, 1))),
    "overwrite_same_size": (nothing, lambda store, clock: store.put(item(A, 2))),
    "put_after_expiry": (pass_time, lambda store, clock: store.put(item(NEW, 0))),
    "delete": (nothing, lambda store, clock: store.delete([A, A3])),
    "delete_owner": (nothing, lambda store, clock: store.delete_owner(A.owner)),
    "open_clean": (close, reopen),
    "open_damaged": (close_damaged, reopen),
    "open_without_index": (close_without_index, reopen),
}
"""What comes before, and what is killed."""
BEFORE: dict[Address, int | None] = {where: 0 for where in [*BASE, OLD]} | {NEW: None, NEW2: None}
AFTER: dict[str, dict[Address, int | None]] = {
    "put_new": {NEW: 0},
    "put_beside": {NEW2: 0},
    "overwrite": {A: 1},
    "overwrite_same_size": {A: 2},
    "put_after_expiry": {NEW: 0, OLD: None},
    "delete": {A: None, A3: None},
    "delete_owner": {A: None, A2: None, A3: None},
    "open_clean": {},
    "open_damaged": {A2: None},
    "open_without_index": {},
}
LAST = {Step.PUT_COMMITTED, Step.OWNER_COMMITTED, Step.OWNER_REMOVED}
"""After these the call has nothing left to do that could be seen."""

EXPIRED = {"put_after_expiry": 100.0}
"""Seconds that have passed on the clock of the next process too."""


# Built-in faults --------------------------------------------------------------------------------------------


def row_first(self: Changes, temporary: str, row: Any, check_room: Callable[[], None]) -> None:
    path = self.places.object(row.address)
    with self.index.locked():
        self.index.put(row)
        self.index.commit(self._now())
    self._at(Step.PUT_COMMITTED)
    self.places.make_way(row.address)
    os.rename(temporary, path)
    self._at(Step.RENAMED)


def in_place(self: Changes, path: str, head: bytes, data: np.ndarray) -> str:
    """As if there were no temporary file: the old one is overwritten."""
    where = self.places.object(A)
    with open(where, "wb") as file:
        file.write(head)
        file.flush()
        self._at(Step.HEAD_WRITTEN)
        file.write(data.data)
    return WRITE(self, path, head, data)


WRITE = Changes.write_temporary


def rows_first(self: Changes, addresses: list[Address]) -> int:
    self.index.remove(addresses)
    self.index.commit(self._now())
    self._at(Step.DELETE_COMMITTED)
    for where in addresses:
        os.unlink(self.places.object(where))
        self._at(Step.UNLINKED)
    return len(addresses)


def one_by_one(self: Changes, owner: bytes, away: str) -> int:
    with self.index.locked():
        return self.take_out([row.address for row in self.index.scan(owner, None)])


def trust(self: Recovery, index: Any, now: Any) -> None:
    pass


def keep(self: Recovery, mine: str | None = None) -> bool:
    return False


FAULTS: dict[str, tuple[type, str, Any]] = {
    "the row before the file": (Changes, "publish", row_first),
    "no temporary file": (Changes, "write_temporary", in_place),
    "the row deleted before the file": (Changes, "take_out", rows_first),
    "an owner one by one": (Changes, "take_out_owner", one_by_one),
    "rows are trusted": (Recovery, "mend", trust),
    "temporaries are kept": (Recovery, "remove_dead", keep),
}


# The helper -------------------------------------------------------------------------------------------------


def act(folder: str, action: str, kill: int, stop: bool = False, fault: str | None = None) -> list[str]:
    """Fills a store, does something, and is killed (or stopped) after step number `kill`; -1: never."""
    steps: list[str] = []
    armed = False

    def at(step: Step) -> None:
        if armed:
            steps.append(step.name)
            if len(steps) == kill + 1:
                os.kill(os.getpid(), signal.SIGSTOP if stop else signal.SIGKILL)

    clock = Clock()
    if action == "only_open":
        armed = True
        DiskStore(folder, clock=clock, at=at)
        return steps
    store = DiskStore(folder, clock=clock, at=at)
    for where in BASE:
        store.put(item(where, 0))
    store.put(item(OLD, 0), ttl=50)
    prepare, do = ACTIONS[action]
    prepare(store, clock)
    armed = True
    if fault:
        setattr(*FAULTS[fault])
    do(store, clock)
    return steps


def work(folder: str, seed: int, rounds: int) -> list[str]:
    """Puts, gets and deletes at random; every hit must have bits of its address."""
    rng = random.Random(seed)
    store = DiskStore(folder)
    counts = {"hit": 0, "miss": 0}
    for _ in range(rounds):
        where, what = rng.choice(ALL), rng.random()
        if what < 0.45:
            store.put(item(where, rng.randrange(len(SIZES))))
        elif what < 0.85:
            counts["miss" if version(store, where) is None else "hit"] += 1
            store.exists(ALL)
        elif what < 0.95:
            store.delete([where])
        elif what < 0.97:
            store.delete_owner(where.owner)
        else:
            store.close()
            store = DiskStore(folder)
    store.close()
    assert counts["hit"] and counts["miss"], counts
    return []


def serve() -> None:
    """Forks a child for each line of standard input, and tells how it ended."""
    print("ready", flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        if "wait" in request:
            _, status = os.waitpid(request["wait"], os.WUNTRACED)
            print(json.dumps(status), flush=True)
            continue
        pid = os.fork()
        if not pid:
            try:
                steps = {"act": act, "work": work}[request.pop("do")](**request.pop("arguments"))
                Path(request["report"]).write_text(json.dumps(steps))
                os._exit(0)
            except BaseException:
                traceback.print_exc()
                os._exit(3)
        print(json.dumps(pid), flush=True)


class Helper:
    def __init__(self, folder: Path) -> None:
        self.report = folder / "report"
        self.process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout and self.process.stdout.readline() == "ready\n"

    def start(self, do: str, **arguments: Any) -> int:
        return self._ask({"do": do, "arguments": arguments, "report": str(self.report)})

    def wait(self, pid: int) -> int:
        """The status that it ended, or was stopped, with."""
        return self._ask({"wait": pid})

    def act(self, folder: Path, action: str, kill: int = -1, fault: str | None = None) -> list[Step] | None:
        """The steps of an action, or None: it was killed."""
        status = self.wait(self.start("act", folder=str(folder), action=action, kill=kill, fault=fault))
        if os.WIFSIGNALED(status):
            assert os.WTERMSIG(status) == signal.SIGKILL
            return None
        assert status == 0
        return [Step[name] for name in json.loads(self.report.read_text())]

    def _ask(self, request: Any) -> int:
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder in memory where there is one: thousands of fsyncs, none of which kill -9 could show."""
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        yield Path(folder)


@pytest.fixture(scope="module")
def helper(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Helper]:
    made = Helper(tmp_path_factory.mktemp("helper"))
    yield made
    assert made.process.stdin
    made.process.stdin.close()
    assert made.process.wait(10) == 0


# What is checked --------------------------------------------------------------------------------------------


def version(store: DiskStore, where: Address) -> int | None:
    """Which version is there, by all of its bits; None: missing. Everything else is a failure."""
    try:
        found = store.get(where).payload
    except Missing:
        return None
    except StoreError as error:
        raise AssertionError(f"{NAMES[where]} cannot be read: {error!r}") from error
    same = [n for n in range(len(SIZES)) if np.array_equal(found, payload(where, n))]
    assert len(same) == 1, f"the bits under {NAMES[where]} were never put there"
    return same[0]


def files(folder: Path) -> dict[Address, int]:
    """All files of objects, and their bytes."""
    root = Path(Places(str(folder)).objects)
    paths = [path for path in root.glob("*/*/*.safetensors") if path.is_file()]
    return {
        Address.parse(str(p.relative_to(root)).removesuffix(".safetensors")): p.stat().st_size for p in paths
    }


def rows(folder: Path) -> set[Address]:
    """What the index lists, before anybody mends it."""
    with contextlib.closing(sqlite3.connect(Places(str(folder)).index)) as index:
        return {Address(*row) for row in index.execute("SELECT owner, namespace, key FROM objects")}


def temporaries(folder: Path) -> list[str]:
    root = Path(Places(str(folder)).writers)
    return [str(path) for path in root.rglob("*") if path.name != "lock" and path.parent != root]


def check_sums(store: DiskStore, folder: Path) -> dict[Address, int]:
    """The index is a list of the files, and its sums are theirs."""
    listed = {entry.address: entry.nbytes for entry in store.scan()}
    assert listed == files(folder), "the index does not list what is there"
    for owner in [None, *{where.owner for where in ALL}]:
        own = [n for where, n in listed.items() if owner in (None, where.owner)]
        stats = store.stats(owner)
        assert (stats.objects, stats.nbytes) == (len(own), sum(own)), "the sums are wrong"
    return listed


def check(folder: Path, action: str, done: bool) -> None:
    """All rules, in a new process' place. `done`: the action was over, as far as anybody can tell."""
    clock = Clock()
    clock.now += EXPIRED.get(action, 0)
    after = BEFORE | AFTER[action]
    if "open" not in action:
        listed, there = rows(folder), set(files(folder))
        if "put" in action or "overwrite" in action:
            assert listed <= there | {OLD}, "listed before it was there"
        gone = {where for where in ALL if after[where] is None} - listed
    else:
        gone = set()
    store = DiskStore(folder, clock=clock)
    with contextlib.closing(store):
        found = {where: version(store, where) for where in ALL}
        assert not any(found[where] is not None for where in gone), "a deletion was undone"
        for where in ALL:
            may = {after[where]} if done else {BEFORE[where], after[where]}
            assert found[where] in may, f"{NAMES[where]}: version {found[where]}, expected one of {may}"
        if action == "delete_owner":
            assert len({found[where] is None for where in (A, A2, A3)}) == 1, "an owner was deleted in part"
        assert store.exists(ALL) == [n is not None for n in found.values()], "exists and get differ"
        listed = check_sums(store, folder)
        assert set(listed) == {where for where in ALL if found[where] is not None}
        assert temporaries(folder) == [], "temporary files remain"
        for where in ALL:
            store.put(item(where, 3))
            assert version(store, where) == 3
    with contextlib.closing(DiskStore(folder, clock=clock)) as store:
        assert store.recovered == Recovered()
        assert [version(store, where) for where in ALL] == [3] * len(ALL)


def all_crashes(helper: Helper, place: Path, action: str, fault: str | None = None) -> list[Step]:
    """Kills an action after every one of its steps, and checks. Returns the steps."""
    steps = helper.act(place / "whole", action, fault=fault)
    assert steps is not None
    check(place / "whole", action, done=True)
    for number, step in enumerate(steps):
        folder = place / f"{number}"
        assert helper.act(folder, action, number, fault) is None
        last = step in LAST or (step is Step.DELETE_COMMITTED and action == "delete")
        try:
            check(folder, action, done=last)
        except AssertionError as error:
            raise AssertionError(f"killed after {step}: {error}") from error
    return steps


# Tests ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("action", AFTER)
def test_killed_after_every_step(helper: Helper, place: Path, action: str) -> None:
    """kvcache-ai/Mooncake#2827: an entry that was listed before it was there stayed a phantom."""
    assert len(all_crashes(helper, place, action)) >= 5


def test_every_step_is_tried(helper: Helper, place: Path) -> None:
    tried = {step for action in AFTER for step in helper.act(place / action, action) or []}
    assert tried == set(Step)


@pytest.mark.parametrize("action", ["put_new", "overwrite", "delete", "delete_owner"])
def test_killed_again_in_every_step_of_recovery(helper: Helper, place: Path, action: str) -> None:
    """After each crash, recovery is killed after its first step, then after its second, until it ends."""
    steps = helper.act(place / "whole", action)
    assert steps is not None
    for number, step in enumerate(steps):
        folder = place / f"{number}"
        helper.act(folder, action, number)
        kills = 0
        while helper.act(folder, "only_open", kills) is None:
            kills += 1
        assert kills >= 4
        last = step in LAST or step is Step.DELETE_COMMITTED
        check(folder, action, done=last)


@pytest.mark.parametrize(
    "fault, action, says",
    [
        ("the row before the file", "put_new", "listed before it was there"),
        ("no temporary file", "overwrite", "A: version None"),
        ("the row deleted before the file", "delete", "a deletion was undone"),
        ("an owner one by one", "delete_owner", "deleted in part"),
        ("rows are trusted", "delete", "does not list what is there"),
        ("rows are trusted", "put_new", "exists and get differ"),
        ("temporaries are kept", "overwrite", "temporary files remain"),
    ],
)
def test_a_fault_is_found(
    helper: Helper, place: Path, monkeypatch: pytest.MonkeyPatch, fault: str, action: str, says: str
) -> None:
    """The checks above can fail: each of these stores breaks a rule, at some step."""
    if FAULTS[fault][0] is Recovery:  # it is this process that recovers
        monkeypatch.setattr(*FAULTS[fault])
    with pytest.raises(AssertionError, match=f"killed after .*({says})"):
        all_crashes(helper, place, action, fault)


# Several processes ------------------------------------------------------------------------------------------


def test_three_processes_on_one_folder(helper: Helper, place: Path) -> None:
    """And a fourth that is killed at a random time, four times. Every hit of every one is exact."""
    workers = [helper.start("work", folder=str(place / "s"), seed=n, rounds=150) for n in range(3)]
    rng = random.Random(0)
    for number in range(4):
        victim = helper.start("act", folder=str(place / "s"), action="overwrite", kill=rng.randrange(7))
        assert os.WIFSIGNALED(helper.wait(victim)), number
    assert [helper.wait(worker) for worker in workers] == [0, 0, 0]
    with contextlib.closing(DiskStore(place / "s")) as store:
        for where in ALL:
            assert store.exists([where]) == [version(store, where) is not None]
        check_sums(store, place / "s")
        assert temporaries(place / "s") == []


def stopped(helper: Helper, folder: Path, action: str, step: Step) -> int:
    """A process that stands still right after a step."""
    steps = helper.act(folder.with_name("steps"), action)
    assert steps is not None
    pid = helper.start("act", folder=str(folder), action=action, kill=steps.index(step), stop=True)
    assert os.WIFSTOPPED(helper.wait(pid))
    return pid


def test_what_a_living_process_writes_is_left_alone(helper: Helper, place: Path) -> None:
    folder = place / "s"
    pid = stopped(helper, folder, "overwrite", Step.PAYLOAD_SYNCED)
    with contextlib.closing(DiskStore(folder, clock=Clock())) as store:
        assert store.recovered == Recovered()
        assert len(temporaries(folder)) == 1
        store.put(item(A, 3))
        assert version(store, A) == 3
        os.kill(pid, signal.SIGCONT)
        assert helper.wait(pid) == 0
        assert version(store, A) == 1
        check_sums(store, folder)


def test_what_a_dead_process_wrote_is_removed(helper: Helper, place: Path) -> None:
    folder = place / "s"
    pid = stopped(helper, folder, "overwrite", Step.PAYLOAD_SYNCED)
    with contextlib.closing(DiskStore(folder, clock=Clock())) as store:
        os.kill(pid, signal.SIGKILL)
        helper.wait(pid)
        assert len(temporaries(folder)) == 1
        store.delete_owner(B.owner)  # it may have been of this owner
        assert temporaries(folder) == []
        assert version(store, A) == 0 and version(store, B) is None


@pytest.mark.parametrize("step", [Step.RENAMED, Step.ROW_WRITTEN])
def test_a_process_that_holds_the_index(helper: Helper, place: Path, step: Step) -> None:
    """Changes give up after `timeout`; gets and questions do not wait at all."""
    folder = place / "s"
    store = DiskStore(folder, clock=Clock(), timeout=0.1)
    pid = stopped(helper, folder, "overwrite", step)
    with contextlib.closing(store):
        for change in (
            lambda: store.put(item(B, 1)),
            lambda: store.delete([B]),
            lambda: store.delete_owner(B.owner),
            lambda: DiskStore(folder, clock=Clock(), timeout=0.1),
        ):
            with pytest.raises(Unavailable, match="locked"):
                change()
        assert version(store, B) == 0 and version(store, A) == 1
        assert store.exists([A, B, NEW]) == [
            False,
            True,
            False,
        ]  # of A, the row is still that of the old file
        assert store.stats(B.owner).objects == 2
        os.kill(pid, signal.SIGCONT)
        assert helper.wait(pid) == 0
        assert store.exists([A, B]) == [True, True]
        store.put(item(B, 1))
        assert version(store, B) == 1
        check_sums(store, folder)
        assert temporaries(folder) == []


def test_a_store_that_is_closed_meanwhile(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its folder goes after somebody who opens has seen it, and before they ask whether it is alive."""
    other, listdir = DiskStore(place), os.listdir

    def listing(path: str) -> list[str]:
        names = listdir(path)
        if path == other.places.writers:
            assert names == ["0"]
            other.close()
        return names

    with monkeypatch.context() as patch:
        patch.setattr(os, "listdir", listing)
        store = DiskStore(place)
    with contextlib.closing(store):
        assert store.recovered == Recovered() and temporaries(place) == []


def test_two_openings_wait_for_each_other(helper: Helper, place: Path) -> None:
    folder = place / "s"
    pid = stopped(helper, folder, "open_clean", Step.OPEN_LOCKED)
    with pytest.raises(Unavailable, match="opening"):
        DiskStore(folder, timeout=0.05)
    os.kill(pid, signal.SIGCONT)
    assert helper.wait(pid) == 0
    check(folder, "open_clean", done=True)


if __name__ == "__main__":
    serve()
