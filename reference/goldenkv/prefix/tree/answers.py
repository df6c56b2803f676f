"""What the radix tree takes and answers, and its errors."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from .node import Node


class RadixError(ValueError):
    """The tree cannot do what was asked; nothing was changed."""


class BadTokens(RadixError):
    """Token ids that are not a one-dimensional int32 array."""


class BadPages(RadixError):
    """Page ids that do not fit the tokens, or that the tree holds already elsewhere."""


class BadBoundary(RadixError):
    """A boundary where none can be, or whose handle the tree holds already elsewhere."""


class BadLength(RadixError):
    """A length at which a match cannot be used."""


class StaleMatch(RadixError):
    """What was matched has left the tree since."""


class NotLocked(RadixError):
    """A lock that is not open: unlocked twice, or of another tree."""


class NotWritten(RadixError):
    """A write that cannot begin or that has ended already."""


class NamespaceInUse(RadixError):
    """A namespace in which something is locked or being written."""


@dataclass(frozen=True, slots=True)
class Tail:
    """A partial last page: `position` tokens end within it, and it holds state for exactly those."""

    position: int
    page: int
    handle: int


@dataclass(frozen=True, slots=True, eq=False)
class Match:
    """What the tree has of a prompt. Nothing is held by it: `lock` does that.

    Attributes:
        length: tokens from 0 on whose whole pages are all on the device.
        pages: their page ids, int32.
        boundaries: (position, handle), ascending, on the device at positions up to `length`, and at `tail`.
        tail: the longest partial page behind `length` that the prompt continues through.
        stored_length: as `length`, where pages that only the lower tier has count too.
        stored_boundaries: positions up to there whose boundaries the lower tier has.
        namespace, data: what was asked, the token ids as bytes.
        path: the nodes that the prompt runs through.
        version: of the tree: with another one the path may have changed.
    """

    length: int
    pages: np.ndarray
    boundaries: list[tuple[int, int]]
    tail: Tail | None
    stored_length: int
    stored_boundaries: list[int]
    namespace: bytes = field(repr=False)
    data: bytes = field(repr=False)
    path: list[Node] = field(repr=False)
    version: int = field(repr=False)


@dataclass(frozen=True, slots=True)
class Inserted:
    """What became of inserted pages.

    Attributes:
        adopted: page ids that the tree now holds.
        duplicates: index of a page -> the tree's own page id; the caller keeps its reference to its own.
        boundaries_refused: handles at positions that had a boundary; the caller frees them.
    """

    adopted: list[int]
    duplicates: dict[int, int]
    boundaries_refused: list[int]


@dataclass(frozen=True, slots=True)
class Evicted:
    """Page ids and boundary handles that the tree holds no longer, each once."""

    pages: list[int]
    boundaries: list[int]


@dataclass(slots=True, eq=False)
class Lock:
    """Holds pages and boundaries up to `length` tokens.

    Attributes:
        length: in tokens.
        node: where the locked path ends; None for a lock of nothing.
    """

    length: int
    node: Node | None
