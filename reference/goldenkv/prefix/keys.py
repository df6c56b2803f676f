"""Keys: names of stored objects. They are chained, so that a key stands for its whole prefix.

    key(tag, parent, number, rest) = BLAKE2b-256(key = chain key of the namespace, personalisation = tag,
        parent | number | bytes of rest | rest)

    object         tag               parent                                     number    rest
    page i         "gkv1.page"       page i - 1, or the namespace's digest      i         its tokens
    tail           "gkv1.tail"       the same                                   i         its tokens
    boundary at p  "gkv1.boundary"   the page or tail that ends at p            p         nothing
    component      "gkv1.component"  any of these                               0         its name in UTF-8

A tail is an unfinished page, a boundary the state after p tokens. Numbers have 8 bytes, tokens 4, all
little-endian. The digit in a tag is the version of all this.

Every key is made with the chain key. With a tenant's secret in it, somebody who knows the tokens of a prompt
and all of its keys still cannot make the key of the next page, or of another prompt.
"""

from __future__ import annotations

import enum
import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .identity import DIGEST_BYTES, LARGEST_TOKEN, IdentityError, Namespace, check_text

_PAGE, _TAIL, _BOUNDARY, _COMPONENT = b"gkv1.page", b"gkv1.tail", b"gkv1.boundary", b"gkv1.component"
_HEAD = struct.Struct("<QQ")


class Change(enum.Enum):
    """What happened to a stored object."""

    STORED = "stored"
    REMOVED = "removed"


@dataclass(frozen=True, slots=True)
class Event:
    """News of exactly one stored object.

    Attributes:
        change: what happened.
        key: of the object.
        namespace: digest of the namespace that the key belongs to.
    """

    change: Change
    key: bytes
    namespace: bytes


class PageKeys:
    """The keys of one sequence, made as its tokens come. How they are cut into calls does not matter."""

    def __init__(self, namespace: Namespace, tokens: Sequence[int] | np.ndarray = ()) -> None:
        """Begins with these tokens; see `extend`."""
        self.namespace = namespace.digest()
        self.page_size = namespace.page_size
        self._tokens = bytearray()
        self._pages: list[bytes] = []
        key = namespace.chain_key()
        self._states = {
            tag: hashlib.blake2b(digest_size=DIGEST_BYTES, key=key, person=tag)
            for tag in (_PAGE, _TAIL, _BOUNDARY, _COMPONENT)
        }
        self.extend(tokens)

    @property
    def length(self) -> int:
        """Tokens so far."""
        return len(self._tokens) // 4

    @property
    def pages(self) -> Sequence[bytes]:
        """The keys of all whole pages, in order; it grows with `extend`."""
        return self._pages

    def extend(self, tokens: Sequence[int] | np.ndarray) -> None:
        """Takes the next tokens, integers [n].

        Raises:
            IdentityError: they are not integers in 0 .. 2^31 - 1 in one dimension; none is taken.
        """
        self._tokens += _token_bytes(tokens)
        for index in range(len(self._pages), self.length // self.page_size):
            self._pages.append(self._span(_PAGE, index, self.page_size))

    def tail(self) -> bytes | None:
        """The key of the unfinished page at the end; None where there is none."""
        return self._tail(self.length)

    def boundary(self, position: int) -> bytes:
        """The key of the state after `position` tokens.

        Raises:
            IdentityError: not one of 1 .. `length`.
        """
        if type(position) is not int or not 1 <= position <= self.length:
            raise IdentityError(f"{position=} must be an integer in 1 .. {self.length} (tokens so far)")
        parent = self._tail(position) or self._pages[position // self.page_size - 1]
        return self._key(_BOUNDARY, parent, position)

    def component(self, key: bytes, name: str) -> bytes:
        """The key of one component, for example "layers.2.entries", of what `key` names.

        Raises:
            IdentityError: not a key, or no name.
        """
        if type(key) is not bytes or len(key) != DIGEST_BYTES:
            raise IdentityError(f"a key has {DIGEST_BYTES} bytes, got {key!r}")
        check_text("a component's name", name)
        return self._key(_COMPONENT, key, 0, name.encode())

    def events(self, change: Change, pages: range) -> list[Event]:
        """An event for each of these pages, however many of them an engine moves together.

        Raises:
            IdentityError: a page that is not whole.
        """
        if pages and not 0 <= min(pages) <= max(pages) < len(self._pages):
            raise IdentityError(f"{pages=} must lie within 0 .. {len(self._pages) - 1}, the whole pages")
        return [Event(change, self._pages[index], self.namespace) for index in pages]

    def _tail(self, position: int) -> bytes | None:
        index, count = divmod(position, self.page_size)
        return self._span(_TAIL, index, count) if count else None

    def _span(self, tag: bytes, index: int, count: int) -> bytes:
        """The key of the first `count` tokens of page `index`."""
        parent = self._pages[index - 1] if index else self.namespace
        begin = 4 * index * self.page_size
        return self._key(tag, parent, index, self._tokens[begin : begin + 4 * count])

    def _key(self, tag: bytes, parent: bytes, number: int, rest: bytes | bytearray = b"") -> bytes:
        state = self._states[tag].copy()
        state.update(parent + _HEAD.pack(number, len(rest)))
        state.update(rest)
        return state.digest()


def _token_bytes(tokens: Sequence[int] | np.ndarray) -> bytes:
    try:
        array = np.asarray(tokens if len(tokens) else np.zeros(0, np.int32))
    except (TypeError, ValueError) as error:
        raise IdentityError(f"tokens must be integers in one dimension: {error}") from None
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise IdentityError(f"tokens must be integers in one dimension, got {array.dtype}{array.shape}")
    if array.size and not 0 <= array.min() <= array.max() <= LARGEST_TOKEN:
        raise IdentityError(f"tokens must lie in 0 .. {LARGEST_TOKEN}, got {array.min()} .. {array.max()}")
    return array.astype("<i4").tobytes()
