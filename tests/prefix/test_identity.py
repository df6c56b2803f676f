"""Namespaces and keys: what they are made of, and that nothing can be left out, joined or guessed."""

import dataclasses
import hashlib
import itertools
import random
import struct
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import find, given
from hypothesis import strategies as st

from goldenkv.prefix import (
    Change,
    Event,
    IdentityError,
    Namespace,
    PageKeys,
    Public,
    PublicDomains,
    Tenant,
    TensorParallel,
    UndeclaredDomain,
    content_digest,
)
from goldenkv.prefix import identity as identities

SECRET = bytes(range(16))
A, B = "0a" * 32, "0b" * 32
DECLARED = PublicDomains(frozenset({"docs", "acme"}))
BASE = Namespace(
    domain=Tenant("acme", SECRET),
    model=A,
    tokenizer=A,
    chat_template=A,
    layout="rows",
    page_size=4,
    dtype="bfloat16",
    tensor_parallel=TensorParallel(2, 0, "heads"),
    adapter=A,
    media=(A,),
    salt="s",
)

FLIPS: dict[str, list[Any]] = {
    "domain.name": ["acmE", "acme ", "docs"],
    "domain.secret": [None, SECRET + b"\0", bytes(16)],
    "model": [B],
    "tokenizer": [B, None],
    "chat_template": [B, None],
    "layout": ["rows ", "Rows"],
    "page_size": [1, 3, 8],
    "dtype": ["float16", "bfloat16 "],
    "tensor_parallel.size": [1, 4],
    "tensor_parallel.rank": [1],
    "tensor_parallel.split": ["none"],
    "adapter": [B, None],
    "media": [(), (B,), (A, A), (A, B), (B, A)],
    "salt": [None, "", "S", "s\0"],
}
"""Other values of every field. A field without some fails `test_every_field_has_a_case`."""


def flip(space: Namespace, path: str, value: object) -> Namespace:
    head, _, inner = path.partition(".")
    return replace(space, **{head: replace(getattr(space, head), **{inner: value}) if inner else value})


def paths(value: Any) -> Iterator[str]:
    for field in dataclasses.fields(value):
        inner = getattr(value, field.name)
        found = paths(inner) if dataclasses.is_dataclass(inner) else ()
        yield from [f"{field.name}.{path}" for path in found] or [field.name]


# By definition: written once more, from the documentation alone --------------------------------------------


def piece(kind: bytes, content: bytes) -> bytes:
    return kind + struct.pack("<Q", len(content)) + content


def text(value: str | None) -> bytes:
    return piece(b"N", b"") if value is None else piece(b"S", value.encode("utf-8"))


def number(value: int) -> bytes:
    return piece(b"I", struct.pack("<q", value))


def parts(space: Namespace) -> dict[str, dict[str, bytes]]:
    """Field -> its pieces by path; a field of one piece has it under its own name."""
    shard, domain = space.tensor_parallel, space.domain
    kind, name = ("tenant", domain.name) if isinstance(domain, Tenant) else ("public", domain.label)
    return {
        "domain": {"domain.kind": text(kind), "domain.name": text(name)},
        "model": {"model": text(space.model)},
        "tokenizer": {"tokenizer": text(space.tokenizer)},
        "chat_template": {"chat_template": text(space.chat_template)},
        "layout": {"layout": text(space.layout)},
        "page_size": {"page_size": number(space.page_size)},
        "dtype": {"dtype": text(space.dtype)},
        "tensor_parallel": {
            "tensor_parallel.size": number(shard.size),
            "tensor_parallel.rank": number(shard.rank),
            "tensor_parallel.split": text(shard.split),
        },
        "adapter": {"adapter": text(space.adapter)},
        "media": {"media": piece(b"T", b"".join(text(medium) for medium in space.media))},
        "salt": {"salt": text(space.salt)},
    }


def by_definition(space: Namespace, tag: bytes = b"gkv1.namespace", without: str = "") -> bytes:
    """The digest of a namespace, or of one whose field at the path `without` was forgotten."""
    encoded = b""
    for name, pieces in parts(space).items():
        value = b"".join(content for path, content in pieces.items() if path != without)
        if len(pieces) > 1:
            value = piece(b"T", value)
        encoded += piece(b"T", text(name) + value)
    secret = b""
    if isinstance(space.domain, Tenant) and without != "domain.secret":
        secret = space.domain.secret or b""
    return hashlib.blake2b(piece(b"T", encoded), digest_size=32, key=secret, person=tag).digest()


def joined(space: Namespace) -> bytes:
    """A fault: what the fields hold, one after the other, without types and lengths."""

    def flat(value: Any) -> str:
        if isinstance(value, tuple):
            return "".join(map(flat, value))
        return "" if value is None else str(value)

    return hashlib.sha256(flat(dataclasses.astuple(space)).encode()).digest()


def key_by_definition(space: Namespace, tag: str, parent: bytes, index: int, rest: bytes) -> bytes:
    state = hashlib.blake2b(
        digest_size=32, key=by_definition(space, b"gkv1.chain"), person=b"gkv1." + tag.encode()
    )
    for content in (parent, struct.pack("<QQ", index, len(rest)), rest):
        state.update(content)
    return state.digest()


def all_by_definition(space: Namespace, tokens: list[int]) -> tuple[list[bytes], bytes | None, list[bytes]]:
    """Page keys, the tail's key, the boundary keys at 1 .. len(tokens)."""
    size, pages, boundaries, tail = space.page_size, [], [], None
    for position in range(1, len(tokens) + 1):
        index = (position - 1) // size
        parent = pages[index - 1] if index else by_definition(space)
        span = struct.pack(f"<{position - index * size}i", *tokens[index * size : position])
        if position % size:
            tail = last = key_by_definition(space, "tail", parent, index, span)
        else:
            last, tail = key_by_definition(space, "page", parent, index, span), None
            pages.append(last)
        boundaries.append(key_by_definition(space, "boundary", last, position, b""))
    return pages, tail, boundaries


def made(keys: PageKeys) -> tuple[list[bytes], bytes | None, list[bytes]]:
    return list(keys.pages), keys.tail(), [keys.boundary(p + 1) for p in range(keys.length)]


def names(space: Namespace) -> set[bytes]:
    """Keys of every sort for one and the same prompt."""
    keys = PageKeys(space, range(21))
    ends = [keys.pages[0], keys.tail() or keys.pages[-1], keys.boundary(8), keys.boundary(21)]
    return {space.digest(), space.chain_key(), *keys.pages, *ends, *(keys.component(k, "x") for k in ends)}


# Namespaces -------------------------------------------------------------------------------------------------


def test_every_field_has_a_case() -> None:
    assert set(FLIPS) == set(paths(BASE))
    assert set(parts(BASE)) == {field.name for field in dataclasses.fields(Namespace)}
    assert not any(
        field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING
        for owner in (Namespace, Tenant, Public, TensorParallel)
        for field in dataclasses.fields(owner)
    )


def missed(digest: Callable[[Namespace], bytes]) -> set[str]:
    """The fields that can change without a change of the digest."""
    found = {
        path for path, values in FLIPS.items() for v in values if digest(flip(BASE, path, v)) == digest(BASE)
    }
    public = replace(BASE, domain=Tenant("docs", None)), replace(BASE, domain=Public("docs", DECLARED))
    return found | ({"domain.kind"} if digest(public[0]) == digest(public[1]) else set())


def test_every_field_changes_every_key() -> None:
    """One flip at a time; no two of all those namespaces share a digest or a key of any sort."""
    spaces = [BASE, *(flip(BASE, path, value) for path, values in FLIPS.items() for value in values)]
    spaces += [replace(BASE, domain=Public(label, DECLARED)) for label in ("docs", "acme")]
    found = [names(space) for space in spaces]
    assert len(set().union(*found)) == sum(map(len, found))
    assert not missed(Namespace.digest) and not missed(Namespace.chain_key)


@pytest.mark.parametrize("path", [*FLIPS, "domain.kind"])
def test_a_forgotten_field_is_found(path: str) -> None:
    """The control of the test above."""
    assert missed(lambda space: by_definition(space, without=path)) == {path}


digests = st.sampled_from([A, B])
spaces = st.builds(
    Namespace,
    domain=st.builds(Tenant, st.text("ab", min_size=1, max_size=2), st.sampled_from([None, SECRET]))
    | st.builds(Public, st.sampled_from(["docs", "acme"]), st.just(DECLARED)),
    model=digests,
    tokenizer=st.none() | digests,
    chat_template=st.none() | digests,
    layout=st.text(min_size=1, max_size=2),
    page_size=st.integers(1, 9),
    dtype=st.sampled_from(["fp8", "bfloat16"]),
    tensor_parallel=st.builds(TensorParallel, st.just(2), st.integers(0, 1), st.text(min_size=1, max_size=2)),
    adapter=st.none() | digests,
    media=st.lists(digests, max_size=2).map(tuple),
    salt=st.none() | st.text(max_size=2),
)
alike = st.builds(
    replace,
    st.just(BASE),
    tokenizer=st.none() | digests,
    chat_template=st.none() | digests,
    adapter=st.none() | digests,
    media=st.lists(digests, max_size=2).map(tuple),
    salt=st.sampled_from([None, "", A]),
)


@given(spaces, spaces)
def test_digests_are_as_defined(one: Namespace, other: Namespace) -> None:
    assert one.digest() == by_definition(one)
    assert one.chain_key() == by_definition(one, b"gkv1.chain") != one.digest()
    assert (one.digest() == other.digest()) == (one == other)


@given(alike, alike)
def test_no_two_lists_of_fields_are_encoded_alike(one: Namespace, other: Namespace) -> None:
    assert (one.digest() == other.digest()) == (one == other)


def test_joined_fields_are_found() -> None:
    """The control: without types and lengths an image passes for an adapter, and no salt for the salt ""."""
    find(
        st.tuples(alike, alike),
        lambda pair: pair[0] != pair[1] and joined(pair[0]) == joined(pair[1]),
        random=random.Random(0),
    )
    swapped = replace(BASE, adapter=None, media=(A, A))
    assert joined(swapped) == joined(BASE) and swapped.digest() != BASE.digest()


leaves = st.none() | st.binary(max_size=2) | st.text(max_size=2) | st.integers(-(2**63), 2**63 - 1)


@given(st.recursive(leaves, lambda inner: st.lists(inner, max_size=3).map(tuple)))
def test_encodings_are_read_back(value: object) -> None:
    """So no two values have the same one."""

    def read(data: bytes) -> tuple[object, bytes]:
        count = int.from_bytes(data[1:9], "little")
        content, rest = data[9 : 9 + count], data[9 + count :]
        match data[:1]:
            case b"N":
                return None, rest
            case b"B":
                return content, rest
            case b"S":
                return content.decode(), rest
            case b"I":
                return int.from_bytes(content, "little", signed=True), rest
        found = []
        while content:
            inner, content = read(content)
            found.append(inner)
        return tuple(found), rest

    assert read(identities._encode(value)) == (value, b"")


def test_only_declared_domains_are_public() -> None:
    """A tenant's name, or any text of a user, that equals a public label stays what it is."""
    shared = replace(BASE, domain=Public("docs", DECLARED))
    assert names(shared).isdisjoint(names(replace(BASE, domain=Tenant("docs", None))))
    more = PublicDomains(DECLARED.labels | {"more"})
    assert names(replace(BASE, domain=Public("docs", more))) == names(shared)
    for declared in (PublicDomains(frozenset()), DECLARED):
        with pytest.raises(UndeclaredDomain, match="'mine' is not declared public"):
            Public("mine", declared)
    with pytest.raises(ValueError, match="declared"):
        replace(Public("docs", DECLARED), label="mine")
    with pytest.raises(IdentityError, match="must be a Tenant or a Public domain"):
        replace(BASE, domain="docs")


# Keys -------------------------------------------------------------------------------------------------------

GOLDEN = {
    "digest": "67d9073494540ac83cb2c9a0881fcf3f72e2ab8c3f5116b0ff45e025641bff7e",
    "page 0": "c53959738ccb447d861c0c94991c1099a2c93a2c8ca3e5b1ac796be720c23f2d",
    "page 1": "bf54dbe6721d6ea046c5f76adaf2d3054f40ea037a5c8700bdff49a673c9c2d0",
    "tail": "a942869d90e7883045a4f866265c0309035fddf4024ded0569a884cd6841bc5b",
    "boundary 8": "15e102914ddef3b1cab7a6d309162b3eefd556c382ccb8b6b65757131a818390",
    "boundary 10": "f507130e170aded304d526fe4af476935168ff1f1b15ad4e6469ff05df0022b5",
    "component": "cc402447f0ef85fce03c530444d7146302e7d6fad2a5067f74650abbe9946f97",
    "public page 1": "77e17e73c688c87b46f431ab5c1a801043c57e222c3f86717145c4b9fd079ebb",
}


def test_golden_keys() -> None:
    """Bytes that other processes and later versions must find again: they change with a new "gkv2." only."""
    tokens = [0, 1, 2, 3, 129279, 2**31 - 1, 7, 7, 7, 8]
    keys = PageKeys(BASE, tokens)
    public = PageKeys(replace(BASE, domain=Public("docs", DECLARED)), tokens)
    found = {
        "digest": keys.namespace,
        "page 0": keys.pages[0],
        "page 1": keys.pages[1],
        "tail": keys.tail(),
        "boundary 8": keys.boundary(8),
        "boundary 10": keys.boundary(10),
        "component": keys.component(keys.pages[1], "layers.2.entries"),
        "public page 1": public.pages[1],
    }
    assert {name: key.hex() for name, key in found.items()} == GOLDEN
    for one, space in ((keys, BASE), (public, replace(BASE, domain=Public("docs", DECLARED)))):
        assert made(one) == all_by_definition(space, tokens)
    component = key_by_definition(BASE, "component", keys.pages[1], 0, b"layers.2.entries")
    assert component == found["component"]


# Few different tokens, so that pages repeat, and the ends of the range.
tokens = st.lists(st.sampled_from([0, 1, 2**31 - 1]) | st.integers(0, 2**31 - 1), max_size=24)
sizes = st.sampled_from([1, 2, 5, 8])


@given(tokens, sizes, st.lists(st.integers(0, 24), max_size=5))
def test_cuts_do_not_matter(ids: list[int], size: int, cuts: list[int]) -> None:
    """Nor whether tokens come as a list or as an array."""
    space = replace(BASE, page_size=size)
    expected = all_by_definition(space, ids)
    assert made(PageKeys(space, ids)) == made(PageKeys(space, np.array(ids, np.int32))) == expected
    keys, ends = PageKeys(space), [0, *sorted(min(cut, len(ids)) for cut in cuts), len(ids)]
    for begin, end in itertools.pairwise(ends):
        keys.extend(ids[begin:end])
        assert made(keys) == made(PageKeys(space, ids[:end]))
    assert keys.length == len(ids) and made(keys) == expected


@given(tokens, tokens, tokens, sizes)
def test_a_key_stands_for_its_whole_prefix(start: list[int], a: list[int], b: list[int], size: int) -> None:
    """Two prompts have the same key exactly where they have the same tokens from the first on."""
    space = replace(BASE, page_size=size)
    one, two = start + a, start + b
    found, other = PageKeys(space, one), PageKeys(space, two)
    for index, (x, y) in enumerate(zip(found.pages, other.pages, strict=False)):
        end = (index + 1) * size
        assert (x == y) == (one[:end] == two[:end])
    for p in range(1, min(len(one), len(two)) + 1):
        assert (found.boundary(p) == other.boundary(p)) == (one[:p] == two[:p])
    assert (found.tail() == other.tail()) == (one == two) or found.tail() is other.tail() is None


def unchained(ids: list[int], size: int) -> list[str]:
    """A fault: each page named by its own tokens."""
    return [content_digest(np.array(ids[i : i + size])) for i in range(0, len(ids) - size + 1, size)]


def test_a_page_under_another_prefix_is_another_page() -> None:
    """The control: without the chain it is not, and pages of a prompt that repeats itself are all one."""
    same = [5, 6, 7, 8]
    one, two = PageKeys(BASE, [1, 2, 3, 4, *same]).pages, PageKeys(BASE, [1, 2, 3, 9, *same]).pages
    assert one[1] != two[1] and set(one).isdisjoint(two)
    assert unchained([1, 2, 3, 4, *same], 4)[1] == unchained([1, 2, 3, 9, *same], 4)[1]
    assert len(set(PageKeys(BASE, same * 3).pages)) == 3 and len(set(unchained(same * 3, 4))) == 1


@pytest.mark.parametrize("size", [1, 4, 7])
def test_every_object_of_a_sequence_has_a_key_of_its_own(size: int) -> None:
    """Pages, tails and boundaries at every length, and two components of each; all tokens are the same."""
    space, count = replace(BASE, page_size=size), 23
    keys, found = PageKeys(space), []
    for _ in range(count):
        keys.extend([0])
        found += [keys.tail() or keys.pages[-1], keys.boundary(keys.length)]
    found += [keys.component(key, name) for key in found for name in ("entries", "index_keys")]
    assert len(found) == len(set(found)) == 6 * count
    assert {len(key) for key in found} == {32}
    # The control: an unfinished page that is filled up with the padding token.
    padded = [bytes(4 * n).ljust(4 * size, b"\0") for n in range(1, size + 1)]
    assert len({key_by_definition(space, "page", BASE.digest(), 0, rest) for rest in padded}) == 1


def test_without_the_secret_no_key_can_be_made() -> None:
    """Someone knows the tenant's name, every other field, the tokens, and all keys but the next one."""
    ids = list(range(12))
    keys = PageKeys(BASE, ids)
    secrets = [None, bytes(16), SECRET[:-1] + b"\0", SECRET + b"\0", SECRET[::-1]]
    for secret in secrets:
        assert names(replace(BASE, domain=Tenant("acme", secret))).isdisjoint(names(BASE))
    rest = struct.pack("<4i", *ids[8:])
    known = [b"", bytes(32), keys.namespace, *keys.pages[:2], PageKeys(BASE, ids[:8]).boundary(8)]
    known += [replace(BASE, domain=Tenant("acme", secret)).chain_key() for secret in secrets]

    def extended(key: bytes) -> bytes:
        state = hashlib.blake2b(digest_size=32, key=key, person=b"gkv1.page")
        state.update(keys.pages[1] + struct.pack("<QQ", 2, len(rest)) + rest)
        return state.digest()

    assert keys.pages[2] not in {extended(key) for key in known}
    assert keys.pages[2] == extended(BASE.chain_key())
    # The control: with the secret in the first key alone, the second one and the tokens give the third.
    rooted = [hashlib.sha256(SECRET).digest()]
    for page in (ids[:4], ids[4:8], ids[8:]):
        rooted.append(hashlib.sha256(rooted[-1] + struct.pack("<4i", *page)).digest())
    assert hashlib.sha256(rooted[2] + rest).digest() == rooted[3]


def test_secrets_are_not_shown() -> None:
    for shown in (repr(BASE), str(BASE.domain), repr(PageKeys(BASE))):
        assert repr(SECRET)[2:-1] not in shown and SECRET.hex() not in shown
    with pytest.raises(IdentityError) as error:
        Tenant("acme", b"hunter2")
    assert "hunter2" not in str(error.value)


# Contents ---------------------------------------------------------------------------------------------------


def test_contents_are_more_than_their_bytes() -> None:
    """An array counts with its shape, dtype and byte order; the bytes alone would be one and the same."""
    zeros = np.zeros((2, 8), np.uint8)
    arrays = [zeros, zeros.reshape(4, 4), zeros.reshape(16), zeros.view(np.int8), zeros.view(np.float32)]
    arrays += [zeros.view(">f4"), zeros.view(np.float16), zeros.view(ml_dtypes.bfloat16)]
    arrays += [zeros.view(ml_dtypes.float8_e4m3fn), zeros.view(ml_dtypes.float8_e5m2)]
    found = [*map(content_digest, arrays), content_digest(zeros.tobytes()), content_digest(b"")]
    assert len(set(found)) == len(found) == 12 and {len(digest) for digest in found} == {64}
    assert len({array.tobytes() for array in arrays}) == 1  # the control
    grid = np.arange(6).reshape(2, 3)
    assert content_digest(grid.T) == content_digest(grid.T.copy()) != content_digest(grid)


# Bad input --------------------------------------------------------------------------------------------------

BAD = [
    (lambda: Tenant("", None), "a tenant's name must be non-empty text"),
    (lambda: Tenant(None, None), "a tenant's name must be"),
    (lambda: Tenant("\ud800", None), "UTF-8"),
    (lambda: Tenant("acme", bytes(15)), "16 to 64 bytes"),
    (lambda: Tenant("acme", bytes(65)), "16 to 64 bytes"),
    (lambda: Tenant("acme", "0123456789abcdef"), "16 to 64 bytes"),
    (lambda: Public("", DECLARED), "a public label must be"),
    (lambda: Public("docs", {"docs"}), "declared must be PublicDomains"),
    (lambda: PublicDomains({"docs"}), "must be a frozenset"),
    (lambda: PublicDomains(frozenset({""})), "a public label must be"),
    (lambda: TensorParallel(0, 0, "heads"), "size=0 must be an integer >= 1"),
    (lambda: TensorParallel(True, 0, "heads"), "size=True"),
    (lambda: TensorParallel(2, 2, "heads"), r"rank=2 must be an integer in 0 \.\. 1"),
    (lambda: TensorParallel(2, -1, "heads"), "rank=-1"),
    (lambda: TensorParallel(2, 0, ""), "split must be"),
    (lambda: replace(BASE, tensor_parallel=(2, 0, "heads")), "must be a TensorParallel"),
    (lambda: replace(BASE, page_size=0), "page_size=0 must be an integer >= 1"),
    (lambda: replace(BASE, page_size=-4), "page_size=-4"),
    (lambda: replace(BASE, page_size=4.0), "page_size=4.0"),
    (lambda: replace(BASE, page_size=True), "page_size=True"),
    (lambda: replace(BASE, page_size=2**31), "page_size="),
    (lambda: replace(BASE, model="v4"), "model must be a whole digest"),
    (lambda: replace(BASE, model=None), "model must be a whole digest"),
    (lambda: replace(BASE, model=A.upper()), "model must be a whole digest"),
    (lambda: replace(BASE, adapter="/adapters/a"), "adapter must be a whole digest"),
    (lambda: replace(BASE, tokenizer=""), "tokenizer must be a whole digest"),
    (lambda: replace(BASE, chat_template=A + "\n"), "chat_template must be a whole digest"),
    (lambda: replace(BASE, media=[A]), "media must be a tuple"),
    (lambda: replace(BASE, media=A), "media must be a tuple"),
    (lambda: replace(BASE, media=(A, None)), "media must be a whole digest"),
    (lambda: replace(BASE, layout=""), "layout must be"),
    (lambda: replace(BASE, dtype=np.dtype("float32")), "dtype must be"),
    (lambda: replace(BASE, salt=b"s"), "salt must be text"),
    (lambda: content_digest("text"), "content must be bytes"),
    (lambda: content_digest(5), "content must be bytes"),
    (lambda: content_digest(np.array([{}])), "content must be bytes or an array of numbers"),
]


@pytest.mark.parametrize("make, message", BAD, ids=[message for _, message in BAD])
def test_bad_fields(make: Callable[[], object], message: str) -> None:
    with pytest.raises(IdentityError, match=message):
        make()


@pytest.mark.parametrize(
    "bad",
    [
        [1, 2, -1],
        [1, 2, 2**31],
        [2**80],
        np.array([2**32 - 1], np.uint32),
        np.array([-1], np.int8),
        [1.0],
        [True],
        ["1"],
        [None],
        [[1]],
        [[1], [1, 2]],
        np.zeros((2, 0), np.int32),
        5,
        None,
        np.int32(5),
    ],
    ids=str,
)
def test_bad_tokens_change_nothing(bad: Any) -> None:
    keys = PageKeys(BASE, range(10))
    before = made(keys)
    with pytest.raises(IdentityError, match="tokens must"):
        keys.extend(bad)
    with pytest.raises(IdentityError, match="tokens must"):
        PageKeys(BASE, bad)
    assert made(keys) == before and keys.length == 10


def test_keys_of_nothing() -> None:
    keys = PageKeys(BASE)
    for empty in ([], (), np.zeros(0), range(0)):
        keys.extend(empty)
    assert keys.length == 0 and made(keys) == ([], None, [])
    assert keys.events(Change.STORED, range(0)) == []


@pytest.mark.parametrize("position", [0, -1, 11, 2.0, True, None])
def test_boundaries_need_tokens(position: Any) -> None:
    with pytest.raises(IdentityError, match=r"must be an integer in 1 \.\. 10"):
        PageKeys(BASE, range(10)).boundary(position)


def test_components_and_events_need_keys() -> None:
    keys = PageKeys(BASE, range(10))
    for key in (b"", keys.pages[0][:2], keys.pages[0].hex(), None):
        with pytest.raises(IdentityError, match="a key has 32 bytes"):
            keys.component(key, "entries")
    with pytest.raises(IdentityError, match="a component's name"):
        keys.component(keys.pages[0], "")
    for pages in (range(3), range(-1, 1), range(2, 3)):  # the third is not whole
        with pytest.raises(IdentityError, match="the whole pages"):
            keys.events(Change.STORED, pages)
    expected = [Event(Change.REMOVED, key, BASE.digest()) for key in keys.pages]
    assert keys.events(Change.REMOVED, range(2)) == expected
