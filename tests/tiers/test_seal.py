"""Encryption at rest: what is stored shows nothing, fits nowhere else, and ends with its key."""

import base64
import json
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from goldenkv.conform import StoreSuite
from goldenkv.errors import MissingExtra
from goldenkv.prefix import Namespace, Public, PublicDomains, Tenant, TensorParallel
from goldenkv.tiers import keyring
from goldenkv.tiers import seal as module
from goldenkv.tiers.errors import Corrupt, Foreign, Missing, StoreError, Unreadable
from goldenkv.tiers.host import HostStore
from goldenkv.tiers.keyring import BadKeyFile, KeyRing, KeyUsedUp, OpenKeyFile
from goldenkv.tiers.objects import Address, Item, Kind, head_size
from goldenkv.tiers.parts import Parts
from goldenkv.tiers.seal import OVERHEAD, Resealed, Sealed
from goldenkv.tiers.store import LARGEST, Store

ALICE, BOB = b"a" * 32, b"b" * 32
REFUSED = (Unreadable, Foreign, Corrupt)


def address(key: int = 0, owner: bytes = ALICE) -> Address:
    return Address(owner, b"n" * 32, key.to_bytes(32, "big"))


def item(key: int = 0, owner: bytes = ALICE, seed: int = 0, nbytes: int = 1000) -> Item:
    generator = np.random.default_rng(seed)
    arrays = {
        "layers.0.window_kv": generator.integers(0, 256, nbytes, np.uint8),
        "layers.1.overlap_kv": generator.standard_normal((3, 5)).astype(np.float32),
        "layers.1.index_k": generator.standard_normal(7).astype(ml_dtypes.bfloat16),
    }
    made = Item.of(address(key, owner), Kind.PAGE, 256, "plain", arrays)
    return Item(replace(made.label, extra=(("who", "another wrapper"),)), made.payload)


def same(found: Item, expected: Item) -> bool:
    return found.label == expected.label and np.array_equal(found.payload, expected.payload)


def host(**options: object) -> HostStore:
    return HostStore(1 << 20, block=64, **options)  # type: ignore[arg-type]


def sealed(inner: Store | None = None, ring: KeyRing | None = None) -> Sealed:
    return Sealed(host() if inner is None else inner, KeyRing() if ring is None else ring)


def chain(error: BaseException | None) -> Iterator[str]:
    """All that an error could show, with those that led to it."""
    while error is not None:
        yield "".join(traceback.format_exception(error)) + repr(error) + repr(vars(error))
        yield str(getattr(error, "doc", ""))
        error = error.__cause__ or error.__context__


class TestSealed(StoreSuite):
    supports_capacity = True
    supports_damage = True
    largest: int | None = LARGEST - OVERHEAD
    examples = 10

    def open_store(self, folder: Path, clock: Callable[[], float], capacity: int | None) -> Store:
        return Sealed(HostStore(capacity or 50 << 20, block=256, clock=clock), KeyRing())

    def read_raw(self, store: Store, address: Address) -> bytes:
        inner = store.inner  # type: ignore[attr-defined]
        held = inner._lease(address)
        payload = np.empty(held.payload, np.uint8)
        inner._copy_out(held, payload)
        inner._release(held)
        return held.head + payload.tobytes()

    def write_raw(self, store: Store, address: Address, raw: bytes) -> None:
        try:
            size = head_size(raw, len(raw))
        except StoreError:
            size = len(raw)
        inner = store.inner  # type: ignore[attr-defined]
        inner._write(address, raw[:size], np.frombuffer(raw[size:], np.uint8), None)


class TestSealedInParts(TestSealed):
    """Parts of what is encrypted, and no limit to its size."""

    supports_damage = False
    largest = None

    def open_store(self, folder: Path, clock: Callable[[], float], capacity: int | None) -> Store:
        return Sealed(Parts(HostStore(capacity or 50 << 20, block=256, clock=clock)), KeyRing())


# What is stored -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nbytes", [0, 1, 15, 16, 17, 100_000])
def test_round_trip(nbytes: int) -> None:
    store, expected = sealed(), item(nbytes=nbytes)
    store.put(expected)
    assert same(store.get(address()), expected)
    buffer = np.zeros(expected.label.nbytes, np.uint8)
    head = store.get_into(address(), buffer)
    assert np.array_equal(buffer, expected.payload)
    plain = host()
    plain.put(expected)
    assert head == plain.get_into(address(), buffer)


def test_the_time_to_live_is_that_of_the_store() -> None:
    store = sealed(host(clock=lambda: 1000.0))
    store.put(item(), ttl=50)
    assert store.get_into(address(), np.zeros(item().label.nbytes, np.uint8)).expires == 1050


def shows(store: Store, inner: Store) -> list[str]:
    """What of an item can be read below."""
    expected = item()
    store.put(expected)
    below = inner.get(address())
    text = repr(below.label).encode() + below.payload.tobytes()
    text += b"".join(base64.b64decode(v) for n, v in below.label.extra if n == "inside")
    secrets = {
        "payload": expected.payload[:16].tobytes(),
        "name": b"window_kv",
        "dtype": b"bfloat16",
        "extra": b"another wrapper",
    }
    return [name for name, secret in secrets.items() if secret in text]


def test_nothing_of_an_object_shows_below() -> None:
    inner = host()
    assert shows(sealed(inner), inner) == []
    assert shows(inner, inner) == ["payload", "name", "dtype", "extra"]  # the control


def test_what_stays_in_the_clear() -> None:
    inner = host()
    sealed(inner).put(item())
    label = inner.get(address()).label
    expected = item().label
    for name in ("address", "kind", "position", "layout", "table"):
        assert getattr(label, name) == getattr(expected, name)
    assert [tensor.name for tensor in label.tensors] == ["sealed"]
    assert label.nbytes == expected.nbytes + OVERHEAD


# Moved, relabelled, altered: all with checksums that are right --------------------------------------------

MOVES = {
    "owner": {"address": address()._replace(owner=BOB)},
    "namespace": {"address": address()._replace(namespace=b"m" * 32)},
    "key": {"address": address(1)},
    "kind": {"kind": Kind.BOUNDARY},
    "position": {"position": 257},
    "layout": {"layout": "other"},
    "table": {"table": "another"},
    "nothing": {},
}


def moved(change: dict[str, object]) -> Item:
    """What is read of a sealed object after it was put again with another label."""
    inner = host(verify=False)  # so that another table is not refused by the store already
    store = sealed(inner)
    store.put(item())
    store.put(item(owner=BOB))
    below = inner.get(address())
    label = replace(below.label, **change)  # type: ignore[arg-type]
    inner.put(Item(label, below.payload))
    return store.get(label.address)


@pytest.mark.parametrize("what", MOVES)
def test_a_label_is_bound_to_the_content(what: str) -> None:
    if what == "nothing":
        assert same(moved(MOVES[what]), item())
        return
    with pytest.raises(Unreadable):
        moved(MOVES[what])


@pytest.mark.parametrize("what", [what for what in MOVES if what != "owner"])
def test_without_associated_data_it_could_be_moved(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control. To another owner it could not be moved even so: the key is another one."""
    monkeypatch.setattr(module, "_bound", lambda label, key: b"")
    assert np.array_equal(moved(MOVES[what]).payload, item().payload)
    with pytest.raises(Unreadable):
        moved(MOVES["owner"])


def test_a_key_of_the_same_name_is_another_one() -> None:
    """Two rings whose keys have one name: the second's cannot read what the first's wrote."""
    numbers = count()
    rings = [KeyRing(random=lambda n: bytes(n) if n == 8 else next(numbers).to_bytes(n, "big")) for _ in "12"]
    inner = host()
    sealed(inner, rings[0]).put(item())
    rings[1].rotate(ALICE)
    assert rings[0].names(ALICE) == rings[1].names(ALICE)
    with pytest.raises(Unreadable, match="does not decrypt"):
        sealed(inner, rings[1]).get(address())


def flips(data: bytes) -> Iterator[bytes]:
    for place in range(len(data)):
        yield data[:place] + bytes([data[place] ^ 1 << place % 8]) + data[place + 1 :]


def test_every_changed_byte_is_found() -> None:
    """In nonce, text and tag, of payload and description; checksums are made anew, as an attacker would."""
    inner = host()
    store = sealed(inner)
    store.put(item(nbytes=20))
    below = inner.get(address())
    extra = dict(below.label.extra)
    buffer = np.zeros(item(nbytes=20).label.nbytes, np.uint8)
    for changed in flips(below.payload.tobytes()):
        inner.put(Item(below.label, np.frombuffer(changed, np.uint8)))
        for read in (lambda: store.get(address()), lambda: store.get_into(address(), buffer)):
            with pytest.raises(Unreadable):
                read()
    for changed in flips(base64.b64decode(extra["inside"])):
        inside = base64.b64encode(changed).decode()
        label = replace(below.label, extra=(("key", extra["key"]), ("inside", inside)))
        inner.put(Item(label, below.payload))
        with pytest.raises(Unreadable):
            store.get(address())
    inner.put(below)
    assert same(store.get(address()), item(nbytes=20))


def test_two_versions_cannot_be_put_together() -> None:
    """The description of one, with its tensors of other dtypes, and the payload of another of equal size."""
    inner = host()
    store = sealed(inner)
    versions = []
    for dtype in (np.uint8, np.float32):
        rows = np.arange(100, dtype=np.uint8).view(dtype)
        store.put(Item.of(address(), Kind.PAGE, 256, "plain", {"rows": rows}))
        versions.append(inner.get(address()))
    inner.put(Item(versions[0].label, versions[1].payload))
    with pytest.raises(Unreadable):
        store.get(address())


def test_what_was_wrong_before_it_was_encrypted_is_found() -> None:
    """Its checksum is of the bytes that left the device; encryption does not vouch for what they became."""
    expected = item()
    expected.payload[500] ^= 1
    store = sealed()
    store.put(expected)
    for read in (
        lambda: store.get(address()),
        lambda: store.get_into(address(), np.zeros(expected.label.nbytes, np.uint8)),
    ):
        with pytest.raises(Corrupt, match="checksum"):
            read()


@pytest.mark.parametrize("what", ["plain", "no key", "no description", "not base64", "short", "empty"])
def test_what_was_never_sealed_is_refused(what: str) -> None:
    inner = host()
    store = sealed(inner)
    store.put(item())
    below = inner.get(address())
    extra = dict(below.label.extra)
    if what == "plain":
        inner.put(item())
    elif what in ("short", "empty"):
        size = 10 if what == "short" else 0
        tensors = (below.label.tensors[0]._replace(shape=(size,)),)
        inner.put(Item(replace(below.label, tensors=tensors), below.payload[:size]))
    else:
        changed = {"no key": {"inside": extra["inside"]}, "no description": {"key": extra["key"]}}
        new = changed.get(what, {**extra, "inside": "%"})
        inner.put(Item(replace(below.label, extra=tuple(new.items())), below.payload))
    with pytest.raises(REFUSED):
        store.get(address())
    with pytest.raises(REFUSED):
        store.get_into(address(), np.zeros(item().label.nbytes, np.uint8))


def test_a_tenant_who_guesses_an_address_finds_nothing() -> None:
    store = sealed()
    store.put(item())
    with pytest.raises(Missing):
        store.get(address(owner=BOB))


# Nonces ---------------------------------------------------------------------------------------------------


def test_nonces_are_fresh() -> None:
    drawn = []

    def random(size: int) -> bytes:
        drawn.append(os.urandom(size))
        return drawn[-1]

    inner = host()
    store = Sealed(inner, KeyRing(), random)
    stored = []
    for _ in range(20):
        store.put(item())
        stored.append(inner.get(address()).payload[:12].tobytes())
    assert len(drawn) == len(set(drawn)) == 40 and set(stored) < set(drawn)
    assert {len(nonce) for nonce in drawn} == {12}


def test_the_same_nonce_would_show_what_is_equal() -> None:
    """The control: the nonce is what makes two texts of one payload differ."""
    found = []
    for random in (os.urandom, bytes):
        inner = host()
        store = Sealed(inner, KeyRing(), random)
        payloads = []
        for _ in range(2):
            store.put(item())
            payloads.append(inner.get(address()).payload.tobytes())
        found.append(payloads[0] == payloads[1])
    assert found == [False, True]


def test_a_short_nonce_is_refused() -> None:
    """AES-GCM would take it."""
    store = Sealed(host(), KeyRing(), lambda size: os.urandom(8))
    with pytest.raises(ValueError, match="gave 8 bytes"):
        store.put(item())
    assert store.exists([address()]) == [False]


# Keys -----------------------------------------------------------------------------------------------------


@pytest.fixture(params=["memory", "file"])
def ring(request: pytest.FixtureRequest, tmp_path: Path) -> KeyRing:
    return KeyRing(tmp_path / "keys" if request.param == "file" else None)


def test_keys_are_of_one_owner(ring: KeyRing) -> None:
    ids = {owner: ring.take(owner) for owner in (ALICE, BOB)}
    assert ids[ALICE].id != ids[BOB].id and ids[ALICE].secret != ids[BOB].secret
    assert ring.find(ALICE, ids[ALICE].id).secret == ids[ALICE].secret
    with pytest.raises(Unreadable):
        ring.find(BOB, ids[ALICE].id)
    with pytest.raises(Unreadable):
        ring.find(b"c" * 32, ids[ALICE].id)


def test_public_state_has_a_key_of_its_own() -> None:
    """Of public domains too nothing lies open, and nobody else's key reads it."""
    domains = [Public("docs", PublicDomains(frozenset({"docs"}))), Tenant("docs", None)]
    rest = dict(
        model="0" * 64, tokenizer=None, chat_template=None, layout="plain", page_size=256, dtype="float32",
        tensor_parallel=TensorParallel(1, 0, "none"), adapter=None, media=(), salt=None,
    )  # fmt: skip
    ring = KeyRing()
    keys = [ring.take(Namespace(domain=domain, **rest).owner()) for domain in domains]  # type: ignore
    assert keys[0].secret != keys[1].secret


def test_rotated_and_destroyed(ring: KeyRing) -> None:
    store = sealed(ring=ring)
    store.put(item(0))
    store.put(item(0, owner=BOB))
    (old,) = ring.names(ALICE)
    new = ring.rotate(ALICE)
    store.put(item(1))
    assert ring.names(ALICE) == [old, new]
    assert [dict(store.inner.get(address(key)).label.extra)["key"] for key in (0, 1)] == [old, new]
    assert same(store.get(address(0)), item(0)) and same(store.get(address(1)), item(1))

    assert ring.destroy(ALICE, before=new) == 1 and ring.names(ALICE) == [new]
    with pytest.raises(Unreadable, match="destroyed"):
        store.get(address(0))
    assert same(store.get(address(1)), item(1))

    assert ring.destroy(ALICE) == 1 and ring.names(ALICE) == []
    for key in (0, 1):
        with pytest.raises(Unreadable):
            store.get(address(key))
    assert same(store.get(address(0, BOB)), item(0, owner=BOB))
    assert ring.destroy(ALICE) == 0

    store.put(item(1))  # a tenant who comes back gets another key
    assert same(store.get(address(1)), item(1))
    with pytest.raises(Unreadable):
        store.get(address(0))


def test_a_key_that_is_not_there_cannot_be_the_oldest_that_stays(ring: KeyRing) -> None:
    name = ring.rotate(ALICE)
    with pytest.raises(ValueError, match="before='other' must be a key of this owner"):
        ring.destroy(ALICE, before="other")
    assert ring.names(ALICE) == [name] and ring.destroy(ALICE, before=name) == 0


def test_a_destroyed_tenant_is_unreadable_everywhere(tmp_path: Path) -> None:
    """Also for who has a copy of the store, and for a process that has the keys in memory."""
    path = tmp_path / "keys"
    here, there = KeyRing(path), KeyRing(path)
    store, backup = sealed(ring=here), sealed(ring=there)
    for owner in (ALICE, BOB):
        store.put(item(owner=owner))
        backup.inner.put(store.inner.get(address(owner=owner)))
        assert same(backup.get(address(owner=owner)), item(owner=owner))
    here.destroy(ALICE)
    for reader in (store, backup, sealed(backup.inner, KeyRing(path))):
        with pytest.raises(Unreadable):
            reader.get(address())
        assert same(reader.get(address(owner=BOB)), item(owner=BOB))


def test_keys_survive_a_restart(tmp_path: Path) -> None:
    inner = host()
    for start in range(3):
        store = sealed(inner, KeyRing(tmp_path / "keys"))
        store.put(item(start))
        assert all(same(store.get(address(key)), item(key)) for key in range(start + 1))
        store.ring.rotate(ALICE)


def test_a_key_encrypts_so_many_objects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted over restarts; what a process had set aside is not used again."""
    monkeypatch.setattr(keyring, "RESERVED", 2)
    inner = host()
    for key, restart in enumerate([False, False, False, True]):  # 2, and 1 of 2: the rest is lost
        if restart or not key:
            store = sealed(inner, KeyRing(tmp_path / "keys", most=5))
        store.put(item(key))
    for ring in (store.ring, KeyRing(tmp_path / "keys", most=5)):
        with pytest.raises(KeyUsedUp, match="rotate"):
            sealed(inner, ring).put(item(0, seed=1))
    assert same(store.get(address()), item()), "what was there stays"
    store.put(item(9, owner=BOB))
    store.ring.rotate(ALICE)
    store.put(item(0, seed=1))
    assert same(store.get(address()), item(0, seed=1)) and same(store.get(address(3)), item(3))


@pytest.mark.parametrize("most", [0, keyring.MOST_OBJECTS + 1])
def test_a_key_may_not_encrypt_more(most: int) -> None:
    with pytest.raises(ValueError, match="most="):
        KeyRing(most=most)


# Sealing anew ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrap", [lambda store: store, lambda store: Parts(store, 300)], ids=["plain", "parts"]
)
def test_rewrap(wrap: Callable[[Store], Store]) -> None:
    now = [1000.0]
    store = sealed(wrap(host(clock=lambda: now[0])))
    for key in range(3):
        store.put(item(key), ttl=100 if key == 1 else None)
    store.put(item(0, owner=BOB))
    new = store.ring.rotate(ALICE)
    store.put(item(3))
    now[0] = 1040.0
    assert store.rewrap(ALICE, clock=lambda: now[0]) == Resealed(3, 1, ())
    assert store.rewrap(ALICE, clock=lambda: now[0]) == Resealed(0, 4, ())
    store.ring.destroy(ALICE, before=new)
    assert all(same(store.get(address(key)), item(key)) for key in range(4))
    assert same(store.get(address(owner=BOB)), item(owner=BOB))
    assert [e.expires for e in store.scan() if e.address == address(1)] == [1100.0]
    now[0] = 1100.0
    with pytest.raises(Missing):
        store.get(address(1))


def test_rewrap_lists_what_it_cannot_read() -> None:
    inner = host()
    store = sealed(inner)
    store.put(item(0))
    store.put(item(1))
    below = inner.get(address(0))
    inner.put(Item(below.label, below.payload ^ 1))
    store.ring.rotate(ALICE)
    done = store.rewrap(ALICE)
    assert (done.anew, done.kept) == (1, 0)
    ((where, error),) = done.failed
    assert where == address(0) and isinstance(error, Unreadable)
    assert store.exists([address(0)]) == [True]


# The file -------------------------------------------------------------------------------------------------


def test_the_file_is_for_its_owner_alone(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        ring = KeyRing(tmp_path / "keys")
        ring.rotate(ALICE)
    finally:
        os.umask(old)
    assert {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {
        "keys": 0o600, "keys.lock": 0o600,
    }  # fmt: skip
    for mode in (0o640, 0o604, 0o620, 0o602, 0o610, 0o666):
        os.chmod(tmp_path / "keys", mode)
        for use in (lambda: KeyRing(tmp_path / "keys"), lambda: ring.take(ALICE), lambda: ring.rotate(ALICE)):
            with pytest.raises(OpenKeyFile, match=f"mode {mode:o} .*expected 600"):
                use()
    os.chmod(tmp_path / "keys", 0o400)
    assert KeyRing(tmp_path / "keys").names(ALICE) == ring.names(ALICE)


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    """Every changed character, every length; nothing of the keys is in the error."""
    path = tmp_path / "keys"
    ring = KeyRing(path)
    secrets = [ring.take(owner).secret.hex() for owner in (ALICE, BOB)]
    whole = path.read_bytes()
    foreign = [b"", b"{}", b"[]", b"null", b"1", b"\xff", b"[" * 100_000, whole * 2]
    for data in [*flips(whole), *(whole[:size] for size in range(0, len(whole), 7)), *foreign]:
        path.write_bytes(data)
        with pytest.raises(BadKeyFile) as raised:
            KeyRing(path)
        shown = "".join(chain(raised.value))
        assert not any(secret[:8] in shown for secret in secrets)
    path.write_bytes(whole)
    assert KeyRing(path).names(ALICE) == ring.names(ALICE)


@pytest.mark.parametrize("change", [{"version": 2}, {"format": "other"}])
def test_another_format_is_refused(tmp_path: Path, change: dict[str, object]) -> None:
    path = tmp_path / "keys"
    KeyRing(path)
    content = json.loads(path.read_text()) | change
    del content["sha256"]
    path.write_text(json.dumps({**content, "sha256": keyring._sha256(content)}))
    with pytest.raises(BadKeyFile, match=r"version .* of format"):
        KeyRing(path)


def test_a_file_that_goes_away_is_not_made_anew(tmp_path: Path) -> None:
    """Else everything of everybody would be lost without a word."""
    path = tmp_path / "keys"
    store = sealed(ring=KeyRing(path))
    store.put(item())
    path.rename(tmp_path / "elsewhere")
    for use in (lambda: store.get(address()), lambda: store.put(item(1)), lambda: store.ring.rotate(ALICE)):
        with pytest.raises(BadKeyFile, match="No such file"):
            use()
    (tmp_path / "elsewhere").rename(path)
    assert same(store.get(address()), item())
    with pytest.raises(BadKeyFile, match="No such file"):
        KeyRing(tmp_path / "no folder" / "keys")


def test_a_key_that_could_not_be_written_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ring = KeyRing(tmp_path / "keys")
    (before,) = [ring.rotate(ALICE)]

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    for call in ("fsync", "replace"):
        with monkeypatch.context() as patch:
            patch.setattr(keyring.os, call, fail)
            with pytest.raises(BadKeyFile, match="No space left"):
                ring.rotate(ALICE)
            with pytest.raises(BadKeyFile, match="No space left"):
                ring.take(BOB)
        assert ring.names(ALICE) == KeyRing(tmp_path / "keys").names(ALICE) == [before]
        assert ring.names(BOB) == []
    assert ring.rotate(ALICE) != before


def test_keys_show_nowhere(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    ring = KeyRing(tmp_path / "keys")
    store = sealed(ring=ring)
    store.put(item())
    key = ring.find(ALICE, ring.names(ALICE)[0])
    texts = [repr(ring), str(ring), repr(key), str(key), f"{[key]}", repr(vars(ring)), repr(vars(store))]
    ring.destroy(ALICE)
    try:
        store.get(address())
    except Unreadable as error:
        texts += chain(error)
    texts += capfd.readouterr()
    for text in texts:
        assert key.secret.hex() not in text and repr(key.secret)[2:-1] not in text
    assert key.id in repr(key)


# Processes ------------------------------------------------------------------------------------------------

ROTATE = """
import sys
from goldenkv.tiers.keyring import KeyRing
ring = KeyRing(sys.argv[1])
for number in range(int(sys.argv[3])):
    print(ring.rotate(bytes.fromhex(sys.argv[2])), flush=True)
"""


def rotating(path: Path, owner: bytes, times: int) -> subprocess.Popen[str]:
    arguments = [sys.executable, "-c", ROTATE, str(path), owner.hex(), str(times)]
    return subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True)


def outputs(processes: Sequence[subprocess.Popen[str]]) -> list[list[str]]:
    return [process.communicate(timeout=60)[0].split() for process in processes]


def test_processes_take_no_keys_from_each_other(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    owners = [ALICE, BOB, ALICE]
    first, second, third = outputs([rotating(path, owner, 15) for owner in owners])
    ring = KeyRing(path)
    assert ring.names(BOB) == second and len(second) == 15
    assert sorted(ring.names(ALICE)) == sorted(first + third) and len(first + third) == 30
    assert [name for name in ring.names(ALICE) if name in first] == first


def test_without_reading_again_a_key_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: two rings of one file, of which one does not see what the other wrote."""
    for blind in (False, True):
        path = tmp_path / f"keys {blind}"
        one, other = KeyRing(path), KeyRing(path)
        with monkeypatch.context() as patch:
            if blind:
                patch.setattr(other, "_refresh", lambda: None)
            name = one.rotate(ALICE)
            other.rotate(BOB)
        assert KeyRing(path).names(ALICE) == ([] if blind else [name])


@pytest.mark.parametrize("after", [1, 2, 5, 9])
def test_a_killed_process_loses_no_key(tmp_path: Path, after: int) -> None:
    """Whatever a process was told of is in the file, and the file is whole."""
    path = tmp_path / "keys"
    process = rotating(path, ALICE, 1_000_000)
    assert process.stdout is not None
    told = [process.stdout.readline().strip() for _ in range(after)]
    process.send_signal(signal.SIGKILL)
    told += process.stdout.read().split()
    assert process.wait(60) == -signal.SIGKILL
    names = KeyRing(path).names(ALICE)
    assert names[: len(told)] == told and len(names) <= len(told) + 1
    KeyRing(path).rotate(ALICE)


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.ciphers.aead", None)
    with pytest.raises(MissingExtra, match=r"goldenkv\[tiers\]"):
        sealed()
