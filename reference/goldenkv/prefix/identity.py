"""Namespaces: everything besides the tokens that must not be mixed. State under another one is a miss.

A namespace has two digests: its public name, and the chain key that `keys` makes keys of stored objects with.
Each is BLAKE2b-256 over the encoding of the fields, personalised "gkv1.namespace" or "gkv1.chain", and keyed
with the tenant's secret if there is one. Nothing else goes in: every process gets the same bytes.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
from dataclasses import InitVar, dataclass, field

import numpy as np

DIGEST_BYTES = 32
"""Bytes of every digest and key. None is ever cut."""

LARGEST_TOKEN = 2**31 - 1


class IdentityError(ValueError):
    """What was given cannot name anything."""


class UndeclaredDomain(IdentityError):
    """A domain that the server did not declare public."""


@dataclass(frozen=True, slots=True)
class Tenant:
    """Whose state it is.

    Attributes:
        name: of the tenant.
        secret: 16 to 64 bytes that only this tenant's processes hold, or None. With another one, everything
            stored before is a miss.
    """

    name: str
    secret: bytes | None = field(repr=False)

    def __post_init__(self) -> None:
        check_text("a tenant's name", self.name)
        if self.secret is not None and (type(self.secret) is not bytes or not 16 <= len(self.secret) <= 64):
            raise IdentityError("a tenant's secret must be 16 to 64 bytes, or None")


@dataclass(frozen=True, slots=True)
class PublicDomains:
    """The domains that the server declares public: configuration, never made from what a user sent."""

    labels: frozenset[str]

    def __post_init__(self) -> None:
        if type(self.labels) is not frozenset:
            raise IdentityError(f"labels must be a frozenset, got {type(self.labels).__name__}")
        for label in self.labels:
            check_text("a public label", label)


@dataclass(frozen=True, slots=True)
class Public:
    """State that all tenants share, of prompts that hold nothing of any of them.

    Raises:
        UndeclaredDomain: the label is not among the `declared` ones. Those are no part of the identity.
    """

    label: str
    declared: InitVar[PublicDomains]

    def __post_init__(self, declared: PublicDomains) -> None:
        check_text("a public label", self.label)
        if type(declared) is not PublicDomains:
            raise IdentityError(f"declared must be PublicDomains, got {type(declared).__name__}")
        if self.label not in declared.labels:
            known = ", ".join(sorted(declared.labels)) or "none"
            raise UndeclaredDomain(f"{self.label!r} is not declared public; declared are: {known}")


@dataclass(frozen=True, slots=True)
class TensorParallel:
    """Which shard of the state a process holds.

    The size counts even where every rank holds all of the state: a sum over ranks has bits of its own.

    Attributes:
        size: ranks.
        rank: whose shard it is, from 0.
        split: what is divided among them, for example "heads"; or "none".
    """

    size: int
    rank: int
    split: str

    def __post_init__(self) -> None:
        if type(self.size) is not int or not 1 <= self.size <= LARGEST_TOKEN:
            raise IdentityError(f"size={self.size!r} must be an integer >= 1")
        if type(self.rank) is not int or not 0 <= self.rank < self.size:
            raise IdentityError(f"rank={self.rank!r} must be an integer in 0 .. {self.size - 1}")
        check_text("split", self.split)


@dataclass(frozen=True, slots=True, kw_only=True)
class Namespace:
    """What a piece of state is, and who may have it. No field has a default: no adapter is `adapter=None`.

    Digests are 64 hexadecimal digits, see `content_digest` and `state.weights_digest`.

    Attributes:
        domain: a tenant, or what is declared public.
        model: `state.fingerprint`, which is over configuration, weights and numerics.
        tokenizer: its digest; None where callers bring token ids.
        chat_template: its digest, or None.
        layout: names how the bytes of a page are arranged.
        page_size: tokens in a page, which is what one page key covers.
        dtype: names the element type or row format of what is stored.
        tensor_parallel: the shard.
        adapter: digest of its weights (not its path), or None.
        media: digests of what else the model is given, in the order of their places in the prompt.
        salt: the caller's own, or None.
    """

    domain: Tenant | Public
    model: str
    tokenizer: str | None
    chat_template: str | None
    layout: str
    page_size: int
    dtype: str
    tensor_parallel: TensorParallel
    adapter: str | None
    media: tuple[str, ...]
    salt: str | None

    def __post_init__(self) -> None:
        if type(self.domain) not in (Tenant, Public):
            raise IdentityError(f"domain={self.domain!r} must be a Tenant or a Public domain")
        if type(self.tensor_parallel) is not TensorParallel:
            raise IdentityError(f"tensor_parallel={self.tensor_parallel!r} must be a TensorParallel")
        if type(self.page_size) is not int or not 1 <= self.page_size <= LARGEST_TOKEN:
            raise IdentityError(f"page_size={self.page_size!r} must be an integer >= 1")
        if type(self.media) is not tuple:
            raise IdentityError(f"media must be a tuple of digests, got {type(self.media).__name__}")
        check_text("layout", self.layout)
        check_text("dtype", self.dtype)
        _check_digest("model", self.model)
        for name in ("tokenizer", "chat_template", "adapter"):
            if getattr(self, name) is not None:
                _check_digest(name, getattr(self, name))
        for medium in self.media:
            _check_digest("media", medium)
        if self.salt is not None:
            check_text("salt", self.salt, may_be_empty=True)

    def owner(self) -> bytes:
        """Whose state it is, see `owner_of`."""
        return owner_of(self.domain)

    def digest(self) -> bytes:
        """Its name, 32 bytes. It can be published."""
        return self._hash(b"gkv1.namespace")

    def chain_key(self) -> bytes:
        """What keys are made with, 32 bytes. As secret as the tenant's secret, if there is one."""
        return self._hash(b"gkv1.chain")

    def _hash(self, tag: bytes) -> bytes:
        secret = self.domain.secret if isinstance(self.domain, Tenant) else None
        fields = tuple((f.name, _plain(getattr(self, f.name))) for f in dataclasses.fields(self))
        encoded = _encode(fields)
        return hashlib.blake2b(encoded, digest_size=DIGEST_BYTES, key=secret or b"", person=tag).digest()


def owner_of(domain: Tenant | Public) -> bytes:
    """Names a tenant or a public domain, 32 bytes. Quotas and deletion go by it.

    No secret is in it: who deletes a tenant need not hold the tenant's secret.
    """
    encoded = _encode(_plain(domain))
    return hashlib.blake2b(encoded, digest_size=DIGEST_BYTES, person=b"gkv1.owner").digest()


def content_digest(content: bytes | np.ndarray) -> str:
    """The whole BLAKE2b-256 of a file's bytes, or of an array's dtype, shape and elements. Hexadecimal.

    An array is not its bytes alone: images of other shapes can have equal ones.

    Raises:
        IdentityError: neither bytes nor an array of numbers.
    """
    if isinstance(content, np.ndarray) and not content.dtype.hasobject:
        # The name tells the types of ml_dtypes apart, the other text the byte orders.
        encoded = _encode((content.dtype.name, content.dtype.str, content.shape, content.tobytes()))
    elif type(content) is bytes:
        encoded = _encode(content)
    else:
        raise IdentityError(f"content must be bytes or an array of numbers, got {type(content).__name__}")
    return hashlib.blake2b(encoded, digest_size=DIGEST_BYTES).hexdigest()


def check_text(what: str, value: object, *, may_be_empty: bool = False) -> None:
    """Raises IdentityError where `value` is not text that UTF-8 can hold."""
    if type(value) is not str or not (value or may_be_empty):
        raise IdentityError(f"{what} must be {'' if may_be_empty else 'non-empty '}text, got {value!r}")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise IdentityError(f"{what} must be text that UTF-8 can hold, got {value!r}") from None


def _check_digest(what: str, value: object) -> None:
    if type(value) is not str or not re.fullmatch("[0-9a-f]{64}", value):
        raise IdentityError(f"{what} must be a whole digest, 64 hexadecimal digits, got {value!r}")


def _plain(value: object) -> object:
    """Domains and shards as tuples. A secret is not in them: it keys the hash instead."""
    match value:
        case Tenant():
            return ("tenant", value.name)
        case Public():
            return ("public", value.label)
        case TensorParallel():
            return (value.size, value.rank, value.split)
    return value


def _encode(value: object) -> bytes:
    """Type, length in 8 bytes, content: values that differ never give the same bytes."""
    match value:
        case None:
            kind, content = b"N", b""
        case bytes():
            kind, content = b"B", value
        case str():
            kind, content = b"S", value.encode()
        case int():
            kind, content = b"I", value.to_bytes(8, "little", signed=True)
        case tuple():
            kind, content = b"T", b"".join(map(_encode, value))
        case _:
            raise AssertionError(f"no encoding for {type(value).__name__}")
    return kind + len(content).to_bytes(8, "little") + content
