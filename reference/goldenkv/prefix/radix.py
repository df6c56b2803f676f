"""The radix tree: which pages and boundaries are there for a prefix, shared by all sequences that have it.

It holds integers, ids of pages and handles of boundaries, and knows no arrays. Each namespace has a root of
its own, so nothing is compared across namespaces; below it token ids themselves are compared.

Page i of a sequence holds tokens i * page_size .. (i + 1) * page_size - 1. A hit needs ALL pages up to its
length, but of the boundaries only the TRAILING one, at its end. So the two are separate facts: a boundary can
leave while its page stays. A page cannot leave before those behind it, which would be of no use without it.

Nodes are coarse where sequences are shared whole and fine where they part: a use or an insert that ends
within a node splits it there, and a node that is always used together with its only child merges with it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from .strategies import Strategy
from .tree.answers import (
    BadLength,
    Evicted,
    Inserted,
    Lock,
    Match,
    NamespaceInUse,
    NotLocked,
    NotWritten,
    RadixError,
    StaleMatch,
)
from .tree.checks import Stats, check, count
from .tree.holdings import Holdings
from .tree.insertion import carry_out, plan_insert
from .tree.matching import find, path_ids
from .tree.node import TOKEN_BYTES, Write
from .tree.requests import checked_namespace, token_bytes
from .tree.shape import Path, Shape
from .tree.writes import Written, coming, finish_write, lose_stored, start_write, unsaved


class RadixTree:
    """Pages and boundaries by prefix.

    Args:
        page_size: tokens a page.
        strategy: the order of eviction; None for plain LRU.
        clock: a counter that is read once a use and insert and never falls; None counts these.

    Raises:
        RadixError: a page size below 1.
    """

    def __init__(
        self, page_size: int, strategy: Strategy | None = None, clock: Callable[[], int] | None = None
    ) -> None:
        if isinstance(page_size, bool) or not isinstance(page_size, int) or page_size < 1:
            raise RadixError(f"{page_size=} must be an integer of at least 1 token")
        self.page_size = page_size
        self.strategy = strategy or Strategy()
        self.shape = Shape(page_size)
        self.holdings = Holdings(self.shape, self.strategy)
        self.locks: set[Lock] = set()
        self.writes: set[Write] = set()
        self._clock = clock or itertools.count(1).__next__

    # Finding ------------------------------------------------------------------------------------------------

    def match(self, namespace: bytes, tokens: np.ndarray) -> Match:
        """What is there of a prompt. Changes nothing: a match is not yet a use, and holds nothing.

        Args:
            namespace: of the sequence.
            tokens: [n] int32.

        Raises:
            BadTokens: other tokens.
        """
        return find(self.shape, checked_namespace(namespace), token_bytes(tokens))

    def touch(self, match: Match, length: int) -> None:
        """A hit of `length` tokens was used: its pages, and of its boundaries the one at its end.

        Raises:
            BadLength: neither a multiple of the page size up to the match's length nor its tail.
            StaleMatch: pages of it have left since.
        """
        path = self._path(match, length)
        if not path:
            return
        now = self._tick()
        for node in path:
            node.last_use = now
            node.hits += 1
        boundary = (path[-1].boundaries or {}).get(path[-1].count)
        if boundary is not None:
            boundary.last_use = now
            boundary.hits += 1
        self.strategy.used(path_ids(path), now)
        self.holdings.coarsen(path)

    def lock(self, match: Match, length: int) -> Lock:
        """Keeps pages and boundaries up to `length` on the device until `unlock`.

        Raises:
            BadLength, StaleMatch: as `touch`.
        """
        path = self._path(match, length)
        for node in path:
            node.locks += 1
        lock = Lock(length, path[-1] if path else None)
        self.locks.add(lock)
        return lock

    def unlock(self, lock: Lock) -> None:
        """Ends a lock.

        Raises:
            NotLocked: it is not open here: unlocked before, or of another tree.
        """
        if lock not in self.locks:
            raise NotLocked(f"the lock of {lock.length} tokens is not open in this tree")
        self.locks.remove(lock)
        node = lock.node
        while node is not None and node.parent is not None:
            node.locks -= 1
            assert node.locks >= 0, "a lock count fell below 0"
            self.holdings.offer(node)
            node = node.parent

    # Coming and going ---------------------------------------------------------------------------------------

    def insert(
        self,
        namespace: bytes,
        tokens: np.ndarray,
        pages: Sequence[int],
        boundaries: Mapping[int, int] | None = None,
    ) -> Inserted:
        """Publishes a sequence. What is there already stays; the same again changes nothing.

        Args:
            namespace: of the sequence.
            tokens: [n] int32.
            pages: an id for every whole page, and one for the partial last page if a boundary is at n.
            boundaries: position -> handle, at multiples of the page size or at n.

        Raises:
            BadTokens, BadPages, BadBoundary: what does not fit together. Nothing was changed.
        """
        namespace = checked_namespace(namespace)
        plan = plan_insert(self.shape, self.holdings, namespace, tokens, pages, boundaries or {})
        self.strategy.inserted(plan.fresh, self._tick())  # first, so that the pages' scores count from now
        carry_out(plan, self.shape, self.holdings)
        return plan.result

    def evict(self, pages: int = 0, boundaries: int = 0) -> Evicted:
        """Frees so many pages and boundaries, or all that may leave, in the strategy's order.

        A boundary goes along with a page that is on no tier then. Of a partial page both go together.
        """
        return self.holdings.evict(pages, boundaries)

    def forget(self, namespace: bytes) -> Evicted:
        """Takes out all of a namespace: afterwards nothing of it can be found.

        Raises:
            NamespaceInUse: something of it is locked or being written. Nothing was changed.
        """
        root = self.shape.roots.get(checked_namespace(namespace))
        freed = Evicted([], [])
        if root is None:
            return freed
        below = list(root.below())[1:]
        used = [node for node in below if node.locks or node.write is not None]
        if used:
            raise NamespaceInUse(f"{len(used)} nodes of this namespace are locked or being written")
        for node in reversed(below):
            node.stored = 0
            self.holdings.release(node, len(node.pages), freed)
        return freed

    # The lower tier -----------------------------------------------------------------------------------------

    def begin_write(self, namespace: bytes, tokens: np.ndarray, start: int = 0) -> Write:
        """Pages and boundaries of tokens start .. n are being copied to a lower tier.

        They cannot leave the device until `end_write`. What the lower tier has, or what is being written, is
        left out: see the attributes of the write for what to copy.

        Args:
            namespace: of the sequence.
            tokens: [n] int32; n is a multiple of the page size, or ends with a partial page of the tree.
            start: a multiple of the page size.

        Raises:
            NotWritten: not all of it is on the device, or pages before `start` are neither stored nor being
                written.
            BadLength: another `start`.
        """
        namespace, data = checked_namespace(namespace), token_bytes(tokens)
        first = self._page_number(start, len(tokens))
        path = self._held_path(namespace, data)
        if path is None:
            raise NotWritten(f"not all pages of these {len(tokens)} tokens are on the device")
        before = next((n for n in reversed(path) if n.start < first), None)
        if before is not None and before.stored < first - before.start and not coming(before, first - 1):
            raise NotWritten(f"pages before {start=} are neither stored nor being written")
        path = self._end_at(path, len(data))
        self.holdings.cut(path, first)
        write = start_write([n for n in path if n.start >= first and n.write is None and unsaved(n)])
        self.writes.add(write)
        return write

    def end_write(self, write: Write, ok: bool) -> Written:
        """The lower tier acknowledged a write, or it failed.

        Raises:
            NotWritten: it is not open here.
        """
        if write not in self.writes:
            raise NotWritten("this write is not open in this tree: it ended before, or is another tree's")
        self.writes.remove(write)
        written = finish_write(write, ok)
        for node in written.nodes:
            self.holdings.offer(node)
        return written

    def unstore(self, namespace: bytes, tokens: np.ndarray, start: int = 0) -> Evicted:
        """The lower tier no longer has the pages of these tokens from `start` on, nor any behind them.

        Returns:
            handles of boundaries whose pages are now nowhere.

        Raises:
            BadLength: `start` is no multiple of the page size up to the number of tokens.
        """
        namespace, data = checked_namespace(namespace), token_bytes(tokens)
        first = self._page_number(start, len(tokens))
        path, reach = self.shape.walk(namespace, data)
        if first < reach:
            self.holdings.cut(path, first)
            lost = [node for node in path if node.start == first]
        else:
            lost = self.shape.tail(namespace, path, first, data)
        freed = Evicted([], [])
        for node in lost:
            for changed in lose_stored(node):
                self.holdings.prune(changed, freed)
        return freed

    # Looking at it ------------------------------------------------------------------------------------------

    def stats(self) -> Stats:
        """Counts, in time of the order of all nodes."""
        return count(self.shape, self.holdings, self.locks, self.writes)

    def check(self) -> None:
        """Verifies every invariant, in time of the order of all pages. Raises AssertionError."""
        check(self.shape, self.holdings, self.locks, self.writes)

    # Inside -------------------------------------------------------------------------------------------------

    def _path(self, match: Match, length: int) -> Path:
        """The nodes that hold the first `length` tokens of a match; the last one ends there."""
        on_tail = match.tail is not None and length == match.tail.position
        if not on_tail and (length % self.page_size or not 0 <= length <= match.length):
            raise BadLength(
                f"{length=} must be a multiple of {self.page_size} up to {match.length}, what was matched"
                + (f", or {match.tail.position}" if match.tail is not None else "")
            )
        path = self._held_path(match.namespace, match.data[: TOKEN_BYTES * length], match)
        if path is None:
            raise StaleMatch(f"{length} tokens were matched, but not all of that is there any more")
        return self._end_at(path, TOKEN_BYTES * length)

    def _held_path(self, namespace: bytes, data: bytes, match: Match | None = None) -> Path | None:
        """The nodes that hold these tokens, if all are on the device; or None. The last may hold more.

        Args:
            namespace, data: the sequence.
            match: a match of a longer one, whose path can be used if nothing has changed since.
        """
        whole = len(data) // self.shape.page_bytes
        if match is not None and match.version == self.shape.version:
            path, reach = [node for node in match.path if node.start < whole], whole
        else:
            path, reach = self.shape.walk(namespace, data)
        if reach < whole or sum(len(node.pages) for node in path) < whole:
            return None
        tail = self.shape.tail(namespace, path, whole, data)
        if len(data) > whole * self.shape.page_bytes and not (tail and tail[0].pages):
            return None
        return path + tail

    def _end_at(self, path: Path, size: int) -> Path:
        """The path up to where so many bytes of token ids end, split there if need be."""
        self.holdings.cut(path, -(-size // self.shape.page_bytes))
        return [node for node in path if node.start * self.shape.page_bytes < size]

    def _page_number(self, start: int, length: int) -> int:
        """Of the first page from a position on."""
        if start % self.page_size or not 0 <= start <= length:
            raise BadLength(f"{start=} must be a multiple of {self.page_size} up to {length}")
        return start // self.page_size

    def _tick(self) -> int:
        """Reads the clock."""
        now = self._clock()
        if now < self.holdings.now:
            raise RadixError(f"the clock fell from {self.holdings.now} to {now}")
        self.holdings.now = now
        return now
