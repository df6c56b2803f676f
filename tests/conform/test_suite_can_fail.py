"""Stores with one fault each, and the test of the suite that finds it. Every test of the suite finds one.

The base is a dictionary of bytes behind `VerifiedStore`, sound as it is: the whole suite passes on it here.
"""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import math
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import xxhash
from hypothesis import Phase, settings

from goldenkv.conform import Clock, StoreSuite
from goldenkv.tiers.errors import Full, Missing, StoreError
from goldenkv.tiers.objects import Address, Head, Item, Kind, Label, head_size, make_head
from goldenkv.tiers.store import LARGEST, Entry, Stats, Store, VerifiedStore


class Kept(NamedTuple):
    raw: bytes
    expires: float | None


Place = dict[Address, Kept]


class Dictionary(VerifiedStore):
    """A sound store, of which the mutants change one thing each."""

    verified = True

    def __init__(self, place: Place, clock: Callable[[], float], capacity: int | None) -> None:
        super().__init__(clock, verify=self.verified)
        self.place, self.capacity, self.lock = place, capacity, threading.RLock()

    def _write(self, address: Address, head: bytes, payload: np.ndarray, expires: float | None) -> None:
        raw = head + payload.tobytes()
        with self.lock:
            others = sum(len(kept.raw) for known, kept in self.place.items() if known != address)
            if self.capacity is not None and others + len(raw) > self.capacity:
                raise Full(f"{others} bytes of {self.capacity} are taken, {len(raw)} do not fit")
            self.keep(address, Kept(raw, expires))

    def keep(self, address: Address, kept: Kept) -> None:
        self.place[address] = kept

    def find(self, address: Address) -> bytes:
        with self.lock:
            if address not in self.place:
                raise Missing("nothing there")
            return self.place[address].raw

    def _read(self, address: Address, allot: Callable[[bytes], np.ndarray]) -> None:
        raw = self.find(address)
        size = head_size(raw[:8], len(raw))
        payload = allot(raw[:size])
        if len(raw) - size != len(payload):
            raise StoreErrorOfSize("another size than the head says")
        payload[:] = np.frombuffer(raw, np.uint8, offset=size) if len(payload) else 0

    def live(self) -> Place:
        with self.lock:
            now = self.now()
            return {a: k for a, k in self.place.items() if k.expires is None or k.expires > now}

    def exists(self, addresses: Sequence[Address]) -> list[bool]:
        live = self.live()
        return [address in live for address in addresses]

    def delete(self, addresses: Sequence[Address]) -> int:
        with self.lock:
            return sum(self.place.pop(address, None) is not None for address in addresses)

    def scan(self, owner: bytes | None = None, namespace: bytes | None = None) -> Iterator[Entry]:
        for address, kept in self.live().items():
            if owner in (None, address.owner) and namespace in (None, address.namespace):
                yield Entry(address, len(kept.raw), kept.expires)

    def stats(self, owner: bytes | None = None) -> Stats:
        return dataclasses.replace(super().stats(owner), capacity=self.capacity)


class StoreErrorOfSize(StoreError):
    pass


# Mutants: one object ----------------------------------------------------------------------------------------


class DropsTheEnd(Dictionary):
    """Reads whole blocks of 4096 bytes alone."""

    verified = False

    def _read(self, address: Address, allot: Callable[[bytes], np.ndarray]) -> None:
        def cut(head: bytes) -> np.ndarray:
            payload.append(allot(head))
            return payload[0]

        payload: list[np.ndarray] = []
        super()._read(address, cut)
        if len(payload[0]) % 4096:
            payload[0][len(payload[0]) // 4096 * 4096 :] = 0


class TakesPayloadsForNumbers(Dictionary):
    """One NaN is as good as another."""

    def put(self, item: Item, ttl: float | None = None) -> int:
        item = Item(item.label, item.payload.copy())
        for view in item.arrays().values():
            if view.dtype == np.float32:
                view[np.isnan(view)] = np.nan
        return super().put(item, ttl)


class ForgetsTheKind(Dictionary):
    """All are pages."""

    def put(self, item: Item, ttl: float | None = None) -> int:
        return super().put(Item(dataclasses.replace(item.label, kind=Kind.PAGE), item.payload), ttl)


class FillsWhatFits(Dictionary):
    """A buffer of another size gets as much as it takes."""

    def get_into(self, address: Address, buffer: np.ndarray) -> Head:
        found = np.empty(self.get(address).label.nbytes, np.uint8)
        head = super().get_into(address, found)
        size = min(len(found), len(buffer))
        buffer[:size] = found[:size]
        return head


class FillsACopy(Dictionary):
    """Any memory will do."""

    def get_into(self, address: Address, buffer: np.ndarray) -> Head:
        if buffer.dtype == np.uint8 and buffer.flags.c_contiguous and buffer.flags.writeable:
            return super().get_into(address, buffer.reshape(-1))
        return super().get_into(address, np.zeros(buffer.size, np.uint8))


class KeepsTheCallersMemory(Dictionary):
    """Keeps the payload that it was given, and copies it when it is read."""

    def put(self, item: Item, ttl: float | None = None) -> int:
        self.items: dict[Address, Item] = getattr(self, "items", {})
        self.items[item.label.address] = item
        return super().put(item, ttl)

    def get(self, address: Address) -> Item:
        super().get(address)
        return Item(self.items[address].label, self.items[address].payload.copy())


class HandsOutItsMemory(Dictionary):
    """All who read get the same array."""

    def get(self, address: Address) -> Item:
        self.items: dict[bytes, Item] = getattr(self, "items", {})
        return self.items.setdefault(self.find(address), super().get(address))


class KeepsTheFirst(Dictionary):
    """What is there is not written again."""

    def keep(self, address: Address, kept: Kept) -> None:
        self.place.setdefault(address, kept)


class InventsObjects(Dictionary):
    """What is not there is empty."""

    def find(self, address: Address) -> bytes:
        nothing = Label(address, Kind.PAGE, 0, "", ())
        return self.place.get(address, Kept(make_head(Item(nothing, np.zeros(0, np.uint8)), None), None)).raw


class CutsWhatIsTooLarge(Dictionary):
    """Keeps as much as is allowed."""

    def put(self, item: Item, ttl: float | None = None) -> int:
        if len(item.payload) > LARGEST:
            (tensor,) = item.label.tensors
            label = dataclasses.replace(item.label, tensors=(tensor._replace(shape=(LARGEST,)),))
            item = Item(label, item.payload[:LARGEST])
        return super().put(item, ttl)


class CountsPayloadsAlone(Dictionary):
    """Heads are for nothing."""

    def put(self, item: Item, ttl: float | None = None) -> int:
        super().put(item, ttl)
        return len(item.payload)


# Mutants: what is there -------------------------------------------------------------------------------------


class VouchesForWhatItGot(Dictionary):
    """Makes a checksum of its own."""

    def put(self, item: Item, ttl: float | None = None) -> int:
        return super().put(Item(item.label, item.payload), ttl)


class AsksOnceForEach(Dictionary):
    """Asks for unique addresses, and answers as many."""

    def exists(self, addresses: Sequence[Address]) -> list[bool]:
        return super().exists(list(dict.fromkeys(addresses)))


class TakesEmptyForNothing(Dictionary):
    """Goes by the bytes of the payload."""

    def exists(self, addresses: Sequence[Address]) -> list[bool]:
        there = super().exists(addresses)
        return [t and self.get(a).label.nbytes > 0 for t, a in zip(there, addresses, strict=True)]


class DeletesTheNameAlone(Dictionary):
    """Takes an object from its lists, and still serves it."""

    def delete(self, addresses: Sequence[Address]) -> int:
        self.gone: Place = getattr(self, "gone", {})
        self.gone.update({a: self.place[a] for a in addresses if a in self.place})
        return super().delete(addresses)

    def find(self, address: Address) -> bytes:
        gone: Place = getattr(self, "gone", {})
        return gone[address].raw if address in gone else super().find(address)


class CountsRequests(Dictionary):
    """Says how many it was asked to delete."""

    def delete(self, addresses: Sequence[Address]) -> int:
        super().delete(addresses)
        return len(addresses)


class NamesByPart(Dictionary):
    """One part of the address is not in the name that objects have."""

    verified = False
    part: dict[str, bytes]

    def named(self, address: Address) -> Address:
        return address._replace(**self.part)

    def keep(self, address: Address, kept: Kept) -> None:
        super().keep(self.named(address), kept)

    def find(self, address: Address) -> bytes:
        return super().find(self.named(address))

    def exists(self, addresses: Sequence[Address]) -> list[bool]:
        return super().exists([self.named(address) for address in addresses])

    def delete(self, addresses: Sequence[Address]) -> int:
        return super().delete([self.named(address) for address in addresses])


class IgnoresTheOwner(NamesByPart):
    """Whose it is does not matter."""

    part = {"owner": bytes(32)}  # noqa: RUF012


class IgnoresTheNamespace(NamesByPart):
    """Of which model it is does not matter."""

    part = {"namespace": bytes(32)}  # noqa: RUF012


class ListsOnePage(Dictionary):
    """The first ten."""

    def scan(self, owner: bytes | None = None, namespace: bytes | None = None) -> Iterator[Entry]:
        return itertools.islice(super().scan(owner, namespace), 10)


class ListsAllNamespaces(Dictionary):
    """Which namespace was asked for does not matter."""

    def scan(self, owner: bytes | None = None, namespace: bytes | None = None) -> Iterator[Entry]:
        return super().scan(owner)


class MixesTotals(Dictionary):
    """Everybody has everything."""

    def stats(self, owner: bytes | None = None) -> Stats:
        return super().stats()


class CountDrifts(Dictionary):
    """Counts as it goes; what was put twice and is deleted is taken off twice."""

    def __init__(self, place: Place, clock: Callable[[], float], capacity: int | None) -> None:
        super().__init__(place, clock, capacity)
        self.puts: Counter[Address] = Counter()
        self.less: Counter[bytes | None] = Counter()

    def keep(self, address: Address, kept: Kept) -> None:
        self.puts[address] += 1
        super().keep(address, kept)

    def delete(self, addresses: Sequence[Address]) -> int:
        for address in set(addresses) & self.place.keys():
            more = max(0, self.puts.pop(address, 0) - 1)
            self.less.update({address.owner: more, None: more})
        return super().delete(addresses)

    def stats(self, owner: bytes | None = None) -> Stats:
        found = super().stats(owner)
        return dataclasses.replace(found, objects=found.objects - self.less[owner])


class DeletesNeighbours(Dictionary):
    """Goes by the first 31 bytes of an owner."""

    def delete_owner(self, owner: bytes) -> int:
        return self.delete([address for address in self.place if address.owner[:31] == owner[:31]])


class TellsTheKey(Dictionary):
    """Says what it did not find."""

    def find(self, address: Address) -> bytes:
        if address not in self.place:
            raise Missing(f"nothing at {address.path()}")
        return super().find(address)


class TellsTheKeyBehind(Dictionary):
    """The error behind its error says it."""

    def find(self, address: Address) -> bytes:
        try:
            return self.place[address].raw
        except KeyError as error:
            raise Missing("nothing there") from error


# Mutants: how long ------------------------------------------------------------------------------------------


class NothingExpires(Dictionary):
    """A time to live is not kept."""

    def put(self, item: Item, ttl: float | None = None) -> int:
        super().put(item, ttl)
        return super().put(item)


class ExistsAfterItsTime(Dictionary):
    """Get refuses it, a look-up does not."""

    def exists(self, addresses: Sequence[Address]) -> list[bool]:
        return [address in self.place for address in addresses]


class ListsAnotherTime(Dictionary):
    """Milliseconds for seconds."""

    def scan(self, owner: bytes | None = None, namespace: bytes | None = None) -> Iterator[Entry]:
        for entry in super().scan(owner, namespace):
            yield dataclasses.replace(entry, expires=entry.expires and entry.expires * 1000)


class BelievesTheClock(Dictionary):
    """The time is what the clock says now."""

    def now(self) -> float:
        return self._clock()


class TimesOutlive(Dictionary):
    """The time of what was there is that of what comes in its place."""

    def keep(self, address: Address, kept: Kept) -> None:
        self.times: dict[Address, float] = getattr(self, "times", {})
        self.times.setdefault(address, kept.expires or math.inf)
        super().keep(address, kept)

    def find(self, address: Address) -> bytes:
        raw = super().find(address)
        if self.times[address] <= self.now():
            raise Missing("its time is over")
        return raw


class TakesAnyTime(Dictionary):
    """A time to live that is none is for ever."""

    def put(self, item: Item, ttl: float | None = None) -> int:
        return super().put(item, ttl if ttl and 0 < ttl < math.inf else None)


class KeepsHalf(Dictionary):
    """What found no room is there as far as it went."""

    def _write(self, address: Address, head: bytes, payload: np.ndarray, expires: float | None) -> None:
        try:
            super()._write(address, head, payload, expires)
        except Full:
            self.place[address] = Kept(head + payload[: len(payload) // 2].tobytes(), expires)
            raise


class LosesRoom(Dictionary):
    """The room of what is replaced stays taken."""

    def keep(self, address: Address, kept: Kept) -> None:
        if self.capacity is not None and address in self.place:
            self.capacity -= len(self.place[address].raw)
        super().keep(address, kept)


class ForgetsAtRestart(Dictionary):
    """Its lists are in memory."""

    def __init__(self, place: Place, clock: Callable[[], float], capacity: int | None) -> None:
        super().__init__({}, clock, capacity)


class RevivesAtRestart(Dictionary):
    """Its deletions are in memory."""

    def __init__(self, place: Place, clock: Callable[[], float], capacity: int | None) -> None:
        self.disk = place
        super().__init__(dict(place), clock, capacity)

    def keep(self, address: Address, kept: Kept) -> None:
        self.disk[address] = kept
        super().keep(address, kept)


# Mutants: damage --------------------------------------------------------------------------------------------


class VerifiesNothing(Dictionary):
    """What is there is good."""

    verified = False


class BelievesHeads(Dictionary):
    """Only payloads are verified: a head gets the checksum that it should have."""

    def find(self, address: Address) -> bytes:
        raw = bytearray(super().find(address))
        size, at = int.from_bytes(raw[:8], "little"), 8 + len('{"__metadata__":{"header_xxh3":"')
        digest = xxhash.xxh3_128_hexdigest(bytes(raw[8:at] + raw[at + 32 : 8 + size]))
        raw[at : at + 32] = digest.encode()
        return bytes(raw)


class FillsUp(Dictionary):
    """What is missing is zero."""

    verified = False

    def find(self, address: Address) -> bytes:
        raw = super().find(address)
        size = head_size(raw[:8], len(raw))
        return raw.ljust(size + 5000, b"\0")


class StopsReading(Dictionary):
    """What follows is not looked at."""

    def find(self, address: Address) -> bytes:
        raw = super().find(address)
        return raw[: head_size(raw[:8], len(raw)) + 5000]


class BelievesItsNames(Dictionary):
    """Whatever is whole is what its name says."""

    def _check(self, head: Head, address: Address) -> None:
        pass


class PassesOverPuts(Dictionary):
    """What it has put is not written again."""

    def keep(self, address: Address, kept: Kept) -> None:
        self.known: dict[Address, Kept] = getattr(self, "known", {})
        if address not in self.place or self.known.get(address) != kept:
            super().keep(address, kept)
        self.known[address] = kept


# Mutants: threads -------------------------------------------------------------------------------------------


class WritesInPlace(Dictionary):
    """The first half is visible before the second half is."""

    verified = False

    def keep(self, address: Address, kept: Kept) -> None:
        old = self.place.get(address, kept).raw
        if len(old) == len(kept.raw):
            self.place[address] = Kept(kept.raw[: len(old) // 2] + old[len(old) // 2 :], kept.expires)
            self.lock.release()
            time.sleep(0.001)
            self.lock.acquire()
        super().keep(address, kept)


class ListsTooEarly(Dictionary):
    """An object is announced, then written."""

    def keep(self, address: Address, kept: Kept) -> None:
        super().keep(address, Kept(b"", kept.expires))
        self.lock.release()
        time.sleep(0.001)
        self.lock.acquire()
        super().keep(address, kept)


class LosesUpdates(Dictionary):
    """Writes back what it has read a moment ago."""

    def keep(self, address: Address, kept: Kept) -> None:
        before = dict(self.place)
        self.lock.release()
        time.sleep(0.001)
        self.lock.acquire()
        self.place.clear()
        self.place.update(before)
        super().keep(address, kept)


FOUND_BY: dict[type[Dictionary], tuple[str, ...]] = {
    DropsTheEnd: ("test_bits_come_back",),
    TakesPayloadsForNumbers: ("test_all_bit_patterns_come_back",),
    ForgetsTheKind: ("test_labels_come_back",),
    FillsWhatFits: ("test_a_buffer_of_another_size_is_refused",),
    FillsACopy: ("test_memory_that_cannot_be_filled_is_refused",),
    KeepsTheCallersMemory: ("test_what_was_put_is_not_aliased",),
    HandsOutItsMemory: ("test_what_was_read_is_not_aliased",),
    KeepsTheFirst: ("test_the_last_put_counts", "test_a_damaged_object_can_be_put_again"),
    InventsObjects: ("test_what_was_never_put_is_missing",),
    CutsWhatIsTooLarge: ("test_what_is_too_large",),
    CountsPayloadsAlone: ("test_put_counts_what_it_takes", "test_stats_are_those_of_the_owner"),
    VouchesForWhatItGot: ("test_the_checksum_goes_along",),
    AsksOnceForEach: ("test_exists_answers_in_order",),
    TakesEmptyForNothing: ("test_empty_payloads_exist",),
    DeletesTheNameAlone: ("test_what_is_deleted_is_missing",),
    CountsRequests: ("test_deletions_are_counted_by_what_was_there",),
    IgnoresTheOwner: ("test_an_owner_who_guesses_a_key_finds_nothing", "test_any_sequence_of_operations"),
    IgnoresTheNamespace: ("test_a_namespace_is_part_of_the_address", "test_any_sequence_of_operations"),
    ListsOnePage: ("test_scan_lists_what_is_asked_for",),
    ListsAllNamespaces: ("test_scan_lists_what_is_asked_for", "test_any_sequence_of_operations"),
    MixesTotals: ("test_stats_are_those_of_the_owner", "test_any_sequence_of_operations"),
    CountDrifts: ("test_any_sequence_of_operations",),
    DeletesNeighbours: ("test_deleting_an_owner_leaves_the_others",),
    TellsTheKey: ("test_errors_say_nothing_of_what_is_stored",),
    TellsTheKeyBehind: ("test_errors_say_nothing_of_what_is_stored",),
    NothingExpires: ("test_time_to_live_ends", "test_any_sequence_of_operations"),
    ExistsAfterItsTime: ("test_what_has_expired_is_not_there",),
    ListsAnotherTime: ("test_scan_says_until_when",),
    BelievesTheClock: ("test_a_clock_that_goes_back_revives_nothing",),
    TimesOutlive: ("test_each_put_has_its_own_time",),
    TakesAnyTime: ("test_a_time_to_live_must_be_one",),
    KeepsHalf: ("test_what_finds_no_room_is_not_there",),
    LosesRoom: ("test_room_comes_back",),
    ForgetsAtRestart: ("test_a_restart_changes_nothing",),
    RevivesAtRestart: ("test_a_restart_changes_nothing", "test_any_sequence_of_operations"),
    VerifiesNothing: ("test_a_flipped_bit_is_found", "test_the_payload_of_another_object_is_found"),
    BelievesHeads: ("test_a_flipped_bit_is_found",),
    FillsUp: ("test_a_cut_object_is_found",),
    StopsReading: ("test_what_is_too_long_is_found",),
    BelievesItsNames: ("test_another_object_in_its_place_is_found",),
    PassesOverPuts: ("test_a_damaged_object_can_be_put_again",),
    WritesInPlace: ("test_what_is_read_is_one_version",),
    ListsTooEarly: ("test_what_is_listed_can_be_read",),
    LosesUpdates: ("test_nothing_is_lost_among_writers",),
}


class TestDictionary(StoreSuite):
    """The suite on the sound store, and with another `kind` on a mutant."""

    supports_restart = True
    supports_capacity = True
    supports_damage = True
    kind: type[Dictionary] = Dictionary

    def open_store(self, folder: Path, clock: Callable[[], float], capacity: int | None) -> Store:
        self.places: dict[Path, Place] = getattr(self, "places", {})
        return self.kind(self.places.setdefault(folder, {}), clock, capacity)

    def read_raw(self, store: Store, address: Address) -> bytes:
        assert isinstance(store, Dictionary)
        return store.place[address].raw

    def write_raw(self, store: Store, address: Address, raw: bytes) -> None:
        assert isinstance(store, Dictionary)
        store.place[address] = Kept(raw, None)


class TestAmongOthers(TestDictionary):
    """The same store while somebody else writes to it, under the same namespaces and keys."""

    alone = False

    def open_store(self, folder: Path, clock: Callable[[], float], capacity: int | None) -> Store:
        store = super().open_store(folder, clock, capacity)
        assert isinstance(store, Dictionary)
        if capacity is None:
            return Visited(store.place, clock, capacity)
        return store


class Visited(Dictionary):
    """With each object that is kept, another owner's appears."""

    def keep(self, address: Address, kept: Kept) -> None:
        super().keep(address, kept)
        super().keep(address._replace(owner=bytes(32)), kept)


FOUND = (AssertionError, StoreError, pytest.fail.Exception)
"""How a test says no. Any other error is a mutant that does not work."""


def run(name: str, kind: type[Dictionary], folder: Path) -> None:
    """Calls a test of the suite as pytest would: a new suite and store for each of its parameters."""
    method = getattr(StoreSuite, name)
    marks = [mark for mark in getattr(method, "pytestmark", []) if mark.name == "parametrize"]
    parameter, values = marks[0].args if marks else ("", [None])
    for number, value in enumerate(values):
        suite, clock = TestDictionary(), Clock()
        suite.kind = kind
        suite.supports_processes = True
        path = folder / str(number)
        path.mkdir()
        with suite.opened(path / "store", clock) as store:
            given = {"store": store, "clock": clock, "tmp_path": path, parameter: value}
            getattr(suite, name)(**{n: given[n] for n in list(inspect.signature(method).parameters)[1:]})


@pytest.fixture
def no_shrinking() -> Iterator[None]:
    """That a sequence is found is enough."""
    before = settings.get_current_profile_name()
    settings.register_profile(
        "found", settings.get_profile(before), phases=[Phase.generate], report_multiple_bugs=False
    )
    settings.load_profile("found")
    yield
    settings.load_profile(before)


@pytest.mark.parametrize(
    ("kind", "name"),
    [(kind, name) for kind, names in FOUND_BY.items() for name in names],
    ids=lambda part: part if isinstance(part, str) else part.__name__,
)
@pytest.mark.usefixtures("no_shrinking")
def test_a_broken_store_is_found(kind: type[Dictionary], name: str, tmp_path: Path) -> None:
    with pytest.raises(FOUND):
        run(name, kind, tmp_path)


def test_the_memory_of_one_process_is_no_store_of_two(tmp_path: Path) -> None:
    """The dictionary is sound for one process; a store of several passes in `test_stores.py`."""
    with pytest.raises(FOUND):
        run("test_processes_see_each_other", Dictionary, tmp_path)


def test_a_mix_is_found_where_errors_are_allowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without `supports_reads_while_replaced`, what is served must still be one version."""
    monkeypatch.setattr(TestDictionary, "supports_reads_while_replaced", False)
    with pytest.raises(AssertionError, match="a mix of versions"):
        run("test_what_is_read_is_one_version", WritesInPlace, tmp_path)


def test_every_test_of_the_suite_finds_something() -> None:
    tests = {name for name in dir(StoreSuite) if name.startswith("test_")}
    found = {name for names in FOUND_BY.values() for name in names}
    assert found | {"test_processes_see_each_other"} == tests


def test_the_runner_passes_a_sound_store(tmp_path: Path) -> None:
    """So the mutants above are found for their fault."""
    for name in ("test_bits_come_back", "test_a_time_to_live_must_be_one", "test_a_restart_changes_nothing"):
        (tmp_path / name).mkdir()
        run(name, Dictionary, tmp_path / name)


@pytest.mark.parametrize("lacking", ["pytest", "hypothesis"])
def test_what_the_suite_needs_is_named(lacking: str) -> None:
    code = f"""
import sys
sys.modules["{lacking}"] = None
import goldenkv.errors
try:
    import goldenkv.conform
except goldenkv.errors.MissingExtra as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "goldenkv[test]" in done.stdout, done.stderr
