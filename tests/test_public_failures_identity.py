"""Faults that public trackers report of other implementations: under which names state is stored and found.

As in `test_public_failures.py`, each test states the right value for the whole kind of fault, and builds the
fault in where that is cheap, to show that the test would find it.
"""

import hashlib
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from goldenkv.config import Numerics, micro
from goldenkv.prefix import (
    Change,
    Event,
    IdentityError,
    Namespace,
    PageKeys,
    Tenant,
    TensorParallel,
    content_digest,
)
from goldenkv.state import PageLayout, fingerprint, pack_page, page_layout, read_page, weights_digest

P = 16
TOKENS = np.random.default_rng(0).integers(0, 512, 5 * P + 3)
SMALL = Numerics(tile=8, index_block=8, key_block=8)
SPACE = Namespace(
    domain=Tenant("acme", None),
    model=content_digest(b"model"),
    tokenizer=content_digest(b"tokenizer"),
    chat_template=None,
    layout="rows",
    page_size=P,
    dtype="float32",
    tensor_parallel=TensorParallel(1, 0, "none"),
    adapter=None,
    media=(),
    salt=None,
)


def keys_of(space: Namespace) -> list[bytes]:
    """Of whole pages, of the tail, of the state at its end, and of one component of that."""
    keys = PageKeys(space, TOKENS)
    end = keys.boundary(keys.length)
    return [*keys.pages, keys.tail() or b"", end, keys.component(end, "layers.0.window")]


KEYS = """
import json, sys
from goldenkv.prefix import Namespace, PageKeys, Public, PublicDomains, Tenant, TensorParallel

domains = {
    "tenant": Tenant("acme", b"sixteen bytes ok"),
    "public": Public("docs", PublicDomains(frozenset({"docs", "manuals", "help"}))),
}
found = {}
for name, domain in domains.items():
    space = Namespace(
        domain=domain, model="ab" * 32, tokenizer=None, chat_template=None, layout="rows", page_size=16,
        dtype="fp8", tensor_parallel=TensorParallel(2, 1, "heads"), adapter=None, media=(), salt=None,
    )
    keys = PageKeys(space, range(40))
    end = keys.boundary(40)
    all_keys = [keys.namespace, *keys.pages, keys.tail(), end, keys.component(end, "window")]
    found[name] = [key.hex() for key in all_keys]
json.dump({"keys": found, "hash": hash(("salt", None))}, sys.stdout)
"""

GOLDEN = {
    "tenant": "3d0a304c382bbb919cde1bfbde3f8e9a3ab74b9bb5b3b95303c9c3ca5aa249c2",
    "public": "1ef7dc8a01d34c424a8445932e07d653c292d9ad873902f4476bf6942321faff",
}
"""BLAKE2b-256 over all of a domain's keys."""


def test_row_32_every_process_makes_the_same_keys() -> None:
    """LMCache/LMCache#2136, LMCache/LMCache#1139, vllm-project/vllm#51875: each process made its own keys.

    They came from `hash`, which differs for text and None, or from a random seed. Here two processes that
    hash in their own ways make the very keys that are written down above, also where fields are None.
    """
    made = []
    for seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", KEYS],
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        made.append(json.loads(done.stdout))
    for name, keys in made[0]["keys"].items():
        assert len(set(keys)) == 6 and keys == made[1]["keys"][name]
        assert hashlib.blake2b("".join(keys).encode(), digest_size=32).hexdigest() == GOLDEN[name]
    assert made[0]["hash"] != made[1]["hash"]  # the fault


def model_of(weights: str = "w", config: object = None, numerics: Numerics = SMALL) -> str:
    return fingerprint(config or micro(), numerics, weights)


def test_row_33_no_field_is_left_out() -> None:
    """vllm-project/vllm#44250, vllm-project/vllm#54342: keys without the adapter, the image or the salt.

    State of another adapter is a hit then. Here a change of any one thing is a miss, and no two of the
    changed namespaces share a key of any sort.
    """
    base = replace(SPACE, model=model_of())
    image = np.zeros((2, 8, 3), np.uint8)
    low_rank = [jnp.zeros((4, 2)), jnp.zeros((2, 4))]
    changed = {
        "adapter": replace(base, adapter=weights_digest(low_rank)),
        "adapter, other weights": replace(base, adapter=weights_digest([low_rank[0] + 1, low_rank[1]])),
        "salt": replace(base, salt="a"),
        "salt, empty": replace(base, salt=""),
        "image": replace(base, media=(content_digest(image),)),
        "image, another shape": replace(base, media=(content_digest(image.reshape(8, 2, 3)),)),
        "image, twice": replace(base, media=(content_digest(image),) * 2),
        "weights": replace(base, model=model_of(weights="v")),
        "constants": replace(base, model=model_of(config=replace(micro(), rope_theta=10001.0))),
        "compute dtype": replace(base, model=model_of(numerics=replace(SMALL, dtype="bfloat16"))),
        "tile": replace(base, model=model_of(numerics=replace(SMALL, tile=16))),
        "stored dtype": replace(base, dtype="fp8"),
        "layout": replace(base, layout="scales last"),
        "TP": replace(base, tensor_parallel=TensorParallel(2, 0, "none")),
        "TP, rank": replace(base, tensor_parallel=TensorParallel(2, 1, "none")),
        "page": replace(base, page_size=P // 2),
        "tokenizer": replace(base, tokenizer=content_digest(b"other")),
        "chat template": replace(base, chat_template=content_digest(b"{{ messages }}")),
        "tenant": replace(base, domain=Tenant("other", None)),
    }
    store = dict.fromkeys(keys_of(base))
    for name, space in changed.items():
        found = keys_of(space)
        assert store.keys().isdisjoint(found), name
        store |= dict.fromkeys(found)

    def without(space: Namespace) -> bytes:
        """The fault: the model's name and the tokens, as if that were all."""
        return hashlib.sha256(b"v4" + TOKENS[: space.page_size].tobytes()).digest()

    assert sum(without(space) == without(base) for space in changed.values()) == len(changed) - 1


@pytest.mark.parametrize("cut", [slice(-4, None), slice(0, 4)], ids=["low", "high"])
def test_row_35_media_digests_are_whole(cut: slice) -> None:
    """LMCache/LMCache#4086: digests of images cut to 16 bits, so that one image passed for another.

    Two images whose digests share these 16 bits have no key in common, and a cut digest is refused.
    """
    seen: dict[str, str] = {}
    for number in range(5000):  # after about 300 images two share 16 bits
        digest = content_digest(np.full((2, 2), number, np.uint16))
        if digest[cut] in seen:
            break
        seen[digest[cut]] = digest
    one, two = seen[digest[cut]], digest
    assert one != two and one[cut] == two[cut]
    found = keys_of(replace(SPACE, media=(one,))), keys_of(replace(SPACE, media=(two,)))
    assert set(found[0]).isdisjoint(found[1])
    for short in (one[cut], one[:-1]):
        with pytest.raises(IdentityError, match="media must be a whole digest"):
            replace(SPACE, media=(short,))
    cut_ones = [replace(SPACE, media=(digest[cut].zfill(64),)) for digest in (one, two)]  # the fault
    assert keys_of(cut_ones[0]) == keys_of(cut_ones[1])


class Files:
    """A folder with a file an object."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def put(self, key: bytes, data: bytes) -> None:
        (self.folder / key.hex()).write_bytes(data)

    def get(self, key: bytes) -> bytes | None:
        path = self.folder / key.hex()
        return path.read_bytes() if path.exists() else None


def shards(rows: np.ndarray, size: int) -> list[np.ndarray]:
    """What each rank holds of rows [n, channels], where channels are divided."""
    return np.split(rows, size, axis=1)


def test_row_36_another_shard_is_a_miss(tmp_path: Path) -> None:
    """vllm-project/vllm#55191, vllm-project/vllm#55904: files of TP1 read at TP2, or in another layout.

    Sizes are equal, so nothing else notices: heads come out wrong. Here they are other objects.
    """
    rng = np.random.default_rng(1)
    rows = rng.standard_normal((P, 32)).astype(np.float32)
    store = Files(tmp_path)
    key = PageKeys(SPACE, TOKENS).pages[0]
    store.put(key, rows.tobytes())
    assert store.get(PageKeys(SPACE, TOKENS).pages[0]) == rows.tobytes()  # at TP1 it is found
    ranks = [replace(SPACE, tensor_parallel=TensorParallel(2, rank, "channels")) for rank in (0, 1)]
    at_two = [PageKeys(space, TOKENS) for space in ranks]
    assert [store.get(keys.pages[0]) for keys in at_two] == [None, None]
    for keys, part in zip(at_two, shards(rows, 2), strict=True):
        store.put(keys.pages[0], part.tobytes())
    for keys, part in zip(at_two, shards(rows, 2), strict=True):
        assert store.get(keys.pages[0]) == part.tobytes()
    assert store.get(key) == rows.tobytes() and len(list(tmp_path.iterdir())) == 3

    # The fault: one object for both, as large, read as the shards of two ranks one after the other.
    together = b"".join(part.tobytes() for part in shards(rows, 2))
    misread = np.frombuffer(rows.tobytes(), np.float32).reshape(2, P, 16)
    assert len(together) == rows.nbytes and (misread[0] != shards(rows, 2)[0]).mean() > 0.9


def test_row_36_another_layout_is_a_miss(tmp_path: Path) -> None:
    """The other half: scales behind all rows, or each behind its own, in pages of equal size."""
    rows = np.random.default_rng(2).standard_normal((P, 64)).astype(np.float32)
    one: PageLayout = page_layout("fp8", P, 64, rope=16, alignment=1)
    two = replace(one, scales_last=not one.scales_last)
    pages = {layout: pack_page(rows, layout, quantise=True) for layout in (one, two)}
    spaces = {layout: replace(SPACE, dtype="fp8", layout=repr(layout)) for layout in (one, two)}
    store, values = Files(tmp_path), read_page(pages[one], one)["rows"]
    store.put(PageKeys(spaces[one], TOKENS).pages[0], pages[one])
    assert store.get(PageKeys(spaces[two], TOKENS).pages[0]) is None
    store.put(PageKeys(spaces[two], TOKENS).pages[0], pages[two])
    for layout, space in spaces.items():
        data = store.get(PageKeys(space, TOKENS).pages[0])
        assert data is not None and (read_page(data, layout)["rows"] == values).all()
    assert len(pages[one]) == len(pages[two])  # the fault
    assert (read_page(pages[one], two)["rows"] != values).mean() > 0.5


UNITS = 2
"""Pages, each with a key of its own, that a block of the engine has."""


def stored_by(events: Sequence[Event]) -> Counter[tuple[bytes, bytes]]:
    """What a subscriber believes to be stored."""
    found: Counter[tuple[bytes, bytes]] = Counter()
    for event in events:
        found[event.namespace, event.key] += 1 if event.change is Change.STORED else -1
    return +found


def test_row_37_an_event_names_one_object() -> None:
    """vllm-project/vllm#44103, sgl-project/sglang#24579: events with another unit's hash, or no salt.

    The engine moves blocks of two pages, of the same tokens under two salts. Each event names exactly one
    stored object, each object has one event, and the removal of a block takes back its own two.
    """
    by_salt = {salt: PageKeys(replace(SPACE, salt=salt), TOKENS[: 4 * P]) for salt in ("a", "b")}
    blocks = [range(block * UNITS, (block + 1) * UNITS) for block in range(2)]
    store, log, wrong_unit, no_salt = {}, [], [], []
    for salt, keys in by_salt.items():
        for number, pages in enumerate(blocks):
            store |= {keys.pages[page]: (salt, page) for page in pages}
            log += keys.events(Change.STORED, pages)
            wrong_unit.append(Event(Change.STORED, keys.pages[number], keys.namespace))
            no_salt += PageKeys(SPACE, TOKENS[: 4 * P]).events(Change.STORED, pages)

    def faithful(events: Sequence[Event]) -> bool:
        told = stored_by(events)
        return set(told.values()) == {1} and Counter(key for _, key in told) == Counter(list(store))

    assert len(log) == len(store) == 2 * 2 * UNITS and faithful(log)
    assert {(event.namespace, store[event.key][0]) for event in log} == {
        (keys.namespace, salt) for salt, keys in by_salt.items()
    }
    assert not faithful(wrong_unit) and not faithful(no_salt)  # the faults

    removed = by_salt["a"].events(Change.REMOVED, blocks[1])
    assert [store.pop(event.key) for event in removed] == [("a", 2), ("a", 3)]
    assert faithful([*log, *removed])
