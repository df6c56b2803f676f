"""What callers hand to the tree, checked before anything is changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from .answers import BadBoundary, BadPages, BadTokens, RadixError
from .owned import Owned


def checked_namespace(namespace: bytes) -> bytes:
    """Raises RadixError unless it is non-empty bytes."""
    if type(namespace) is not bytes or not namespace:
        raise RadixError(f"a namespace must be non-empty bytes, got {namespace!r}")
    return namespace


def token_bytes(tokens: np.ndarray) -> bytes:
    """Token ids as raw bytes. Raises BadTokens unless they are a one-dimensional int32 array."""
    if not isinstance(tokens, np.ndarray) or tokens.dtype != np.int32 or tokens.ndim != 1:
        raise BadTokens(
            "tokens must be a one-dimensional int32 array, got "
            + (f"{tokens.dtype} {tokens.shape}" if isinstance(tokens, np.ndarray) else type(tokens).__name__)
        )
    return tokens.tobytes()


def checked_ids(pages: Sequence[int] | np.ndarray, expected: int, why: str) -> np.ndarray:
    """Page ids as int32. Raises BadPages for a wrong number of them, and for what is no id."""
    ids = np.asarray(pages) if len(pages) else np.zeros(0, np.int32)
    if ids.shape != (expected,):
        raise BadPages(f"expected {expected} page ids, {why}, got {ids.size}")
    if not np.issubdtype(ids.dtype, np.integer) or (ids < 0).any() or (ids >= 2**31).any():
        raise BadPages("page ids must be integers from 0 to 2**31 - 1")
    return ids.astype(np.int32)


def checked_positions(boundaries: Mapping[int, int], length: int, page_size: int) -> list[tuple[int, int]]:
    """(position, handle), ascending. Raises BadBoundary for positions and handles that cannot be."""
    for position, handle in boundaries.items():
        if not 0 < position <= length:
            raise BadBoundary(f"a boundary at {position} must lie at 1 to {length}, the number of tokens")
        if position % page_size and position != length:
            raise BadBoundary(
                f"a boundary at {position} must lie at a multiple of {page_size} or at the end, {length}"
            )
        if isinstance(handle, bool) or not isinstance(handle, (int, np.integer)) or handle < 0:
            raise BadBoundary(f"a handle must be an integer from 0 on, got {handle!r} at {position}")
    return [(int(position), int(boundaries[position])) for position in sorted(boundaries)]


def check_new_pages(fresh: np.ndarray, held: Owned) -> None:
    """Raises BadPages where ids to be adopted are not the tree's to adopt: a page has one place."""
    twice = held.held(fresh)
    if len(twice) or len(np.unique(fresh)) != len(fresh):
        raise BadPages(
            f"a page has one place: {twice[:4].tolist()} are held elsewhere already"
            if len(twice)
            else "a page has one place: ids to be adopted repeat"
        )


def check_new_handles(fresh: list[int], held: Owned) -> None:
    """As `check_new_pages` for the handles of boundaries."""
    twice = held.held(np.array(fresh, np.int64))
    if len(twice) or len(set(fresh)) != len(fresh):
        raise BadBoundary(f"a handle has one place: got {fresh}, {twice.tolist()} are held already")
