"""Sequences in a pool: what each owns, and every way in which state moves without being computed.

Slots hold boundary rows and belong to one sequence. Pages hold entries and can be shared, by forks and by a
cache. A page that is about to be written by one of several holders is copied first (copy-on-write).
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Several

import jax
import numpy as np

from ..config import ModelConfig, Numerics
from ..model.core import core_of
from ..state import pool as pools
from ..state.boundaries import Boundaries
from ..state.moving import GatheredBoundary, GatheredPages, write_pages
from ..state.pages import CapacityError, Lease
from ..state.pool import Geometry, Rows
from .slots import Sequence, Slots


class ApproximateState(ValueError):
    """State that was replayed too short to be exact; it stays with its sequence."""


class Sequences:
    """The sequences of one pool.

    Args:
        config, numerics: shapes and dtypes.
        geometry: sizes of the pool.
        max_length: the most tokens of a sequence.
        fill: what the pool holds before anything is written. No bit of any result depends on it.
        poison: fill freed pages and boundary slots with NaN: a debug switch that shows a use after freeing.
    """

    reclaim: Callable[[int], None] | None = None
    """Called with the number of missing pages before a call fails for lack of them: a cache can free some."""

    def __init__(
        self,
        config: ModelConfig,
        numerics: Numerics,
        geometry: Geometry,
        max_length: int,
        *,
        fill: float = 0.0,
        poison: bool = False,
    ) -> None:
        self.config, self.numerics, self.geometry, self.max_length = config, numerics, geometry, max_length
        self._poison, self._moves = poison, core_of(numerics)
        self._pool = pools.create_pool(config, numerics, geometry, fill)
        self._slots = Slots(geometry, max_length)
        self._pages = self._slots.pages
        self._boundaries = Boundaries(config, numerics, geometry.boundaries, poison=poison)

    # Owning --------------------------------------------------------------------------------------------

    def open(self) -> Sequence:
        """A new empty sequence.

        Raises:
            CapacityError: all slots are taken.
        """
        return self._slots.open()

    def close(self, seq: Sequence) -> None:
        """Frees the slot, and the pages that nobody else holds; a second call does nothing."""
        self._freed(self._slots.close(seq))

    def close_all(self) -> None:
        """Closes every sequence that is open."""
        for seq in list(self._slots.open_sequences):
            self.close(seq)

    @property
    def free_slots(self) -> int:
        """Sequences that can still be opened."""
        return len(self._slots.free_slots)

    @property
    def free_pages(self) -> int:
        """Pages that nobody holds."""
        return self._pages.free

    def holders(self, page: int) -> int:
        """How many sequences and caches hold a page."""
        return self._pages.holders(page)

    def hold_pages(self, pages: Several[int]) -> None:
        """One more holder of each page: they stay as they are until `drop_pages`."""
        self._pages.hold(pages)

    def drop_pages(self, pages: Several[int]) -> None:
        """One holder of each page less."""
        self._freed(self._pages.drop(pages))

    def _freed(self, pages: Several[int]) -> None:
        if self._poison:
            for page in pages:
                self._pool = pools.poison_page(self._pool, np.int32(page), config=self.config)

    def reserve(self, wanted: Several[tuple[Sequence, int]]) -> None:
        """Room for each sequence up to its length in tokens: pages of its own where it will write.

        For all of them or for none. A page that others hold too is replaced by a copy.

        Raises:
            ValueError: a sequence is closed or not of this engine.
            CapacityError: too long, or too few pages even after `reclaim`.
        """
        if self.reclaim is not None and (short := self._slots.missing(wanted) - self._pages.free) > 0:
            self.reclaim(short)
        for source, target in self._slots.reserve(wanted):
            self._pool = pools.copy_page(self._pool, np.int32(source), np.int32(target), config=self.config)

    def rollback(self, seq: Sequence, length: int) -> None:
        """Takes the last tokens of a sequence back: it is then as if they had never been there.

        Args:
            seq: the sequence.
            length: of the sequence afterwards. At most `rollback` tokens below the most that it ever had, and
                not below the length at which it was restored: what was overwritten cannot come back.

        Raises:
            ValueError: another length. The sequence is unchanged.
        """
        self._freed(self._slots.rollback(seq, length))

    # Sharing -------------------------------------------------------------------------------------------

    def fork(self, seq: Sequence) -> Sequence:
        """A second sequence with the same state. They share pages until one of them writes.

        Raises:
            CapacityError: no slot is free.
        """
        self._slots.check(seq)
        twin = self._slots.open()
        source, target = np.int32(seq.slot), np.int32(twin.slot)
        self._pool = pools.copy_slot(self._pool, source, target, config=self.config)
        self._pages.hold(seq.pages)
        self._slots.become(twin, seq)
        return twin

    def save_boundary(self, seq: Sequence) -> int:
        """Keeps the boundary state of a sequence in a slot of its own on the device. Returns its handle.

        Raises:
            ApproximateState: the sequence was replayed too short.
            CapacityError: all boundary slots are taken.
        """
        self._slots.check(seq)
        self.check_exact(seq)
        return self._boundaries.save(self._pool, seq.slot, seq.length)

    def drop_boundary(self, handle: int) -> None:
        """Frees what `save_boundary` kept."""
        self._boundaries.drop(handle)

    # Moving pages and boundary states -----------------------------------------------------------------

    def take_pages(self, count: int) -> list[Lease]:
        """Pages that nobody held, each now held once, until `drop_pages`.

        Raises:
            CapacityError: fewer are free, even after `reclaim`. None was taken.
        """
        if self.reclaim is not None and count > self._pages.free:
            self.reclaim(count - self._pages.free)
        return [self._pages.lease(page) for page in self._pages.take(count)]

    def gather_pages(self, pages: Several[int]) -> GatheredPages:
        """A copy of pages as they are once all that was called before is done."""
        return GatheredPages(self.config, self._pool, pages, self._moves)

    def write_pages(self, leases: Several[Lease], rows: Several[Rows]) -> None:
        """Writes the rows of whole pages that were gathered here or elsewhere.

        Raises:
            StaleLease: a page was freed since it was leased: a late write. Nothing was written.
        """
        self._pages.check(leases)
        pages = [lease.page for lease in leases]
        self._pool = write_pages(self.config, self._pool, pages, rows, self._moves)

    def gather_boundary(self, handle: int) -> GatheredBoundary:
        """A copy of what `save_boundary` kept."""
        return self._boundaries.gather(handle)

    def put_boundary(self, length: int, rows: Rows) -> int:
        """Keeps a boundary state that was gathered here or elsewhere. Returns its handle.

        Raises:
            CapacityError: all boundary slots are taken.
        """
        return self._boundaries.put(length, rows)

    @property
    def free_boundaries(self) -> int:
        """Boundary states that can still be saved."""
        return self._boundaries.free

    def adopt(
        self, pages: Several[int], length: int, *, boundary: int | None = None, since: int = 0
    ) -> Sequence:
        """A new sequence over pages that others computed. It holds them, and copies before it writes.

        It stands at the boundary state, or at `since` without one, and must then run the same tokens as those
        of the pages up to `length`: it does not write their entries again.

        Args:
            pages: those of the first `length` tokens, in order.
            length: tokens whose entries are in the pages.
            boundary: a state saved at or before `length`.
            since: without a boundary state: the position before which there are no rows.

        Raises:
            ValueError: too few or too many pages, a free page, or a position past `length`.
            CapacityError: no slot is free. Nothing has changed.
        """
        at = since if boundary is None else self._boundaries.length(boundary)
        if len(pages) != -(-length // self.geometry.page_size) or not 0 <= at <= length:
            raise ValueError(
                f"{len(pages)} pages of {self.geometry.page_size} tokens, starting at {at}, do not fit "
                f"{length} tokens"
            )
        if length > self.max_length:
            raise CapacityError(f"{length} tokens exceed max_length={self.max_length}")
        seq = self._slots.open()
        try:
            self._pages.hold(pages)
        except ValueError:
            self._slots.close(seq)
            raise
        if boundary is not None:
            self._pool = self._boundaries.load(self._pool, boundary, seq.slot)
        seq.pages, seq.kept, seq.since = list(pages), length, since if boundary is None else 0
        self._slots.advance(seq, at, restored=True)
        return seq

    @staticmethod
    def check_exact(seq: Sequence) -> None:
        """Raises ApproximateState for a sequence that was replayed too short."""
        if not seq.exact:
            raise ApproximateState(
                "this sequence was replayed over too few tokens: its state is approximate and stays with it"
            )

    # Copies on the host --------------------------------------------------------------------------------

    def rows(self, seq: Sequence) -> Rows:
        """The minimal exact state of a sequence, copied to the host: cell name -> [rows, channels]."""
        self._slots.check(seq)
        return pools.read_rows(self.config, self._pool, seq.slot, seq.pages, seq.length)

    def _write_rows(self, length: int, rows: Rows) -> Sequence:
        """A new sequence with the rows that `rows` once returned.

        Raises:
            CapacityError: no slot, no pages, or longer than `max_length`. Nothing was written.
        """
        seq = self.open()
        try:
            self.reserve([(seq, length)])
        except CapacityError:
            self.close(seq)
            raise
        self._pool = pools.write_rows(self.config, self._pool, seq.slot, seq.pages, length, rows)
        self._slots.advance(seq, length, restored=True)
        return seq

    def wait(self) -> None:
        """Returns when all device work is done; calls return before that. For timing."""
        jax.block_until_ready(self._pool)
