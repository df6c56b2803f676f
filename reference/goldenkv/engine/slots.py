"""Who owns what: slots and page tables of live sequences."""

from __future__ import annotations

from collections.abc import Sequence as Several
from dataclasses import dataclass, field

from ..state.pages import CapacityError, Pages
from ..state.pool import Geometry

__all__ = ["CapacityError", "Sequence", "Slots"]


@dataclass(eq=False, slots=True)
class Sequence:
    """What one live sequence owns. Made and ended by an engine.

    Attributes:
        owner, slot, pages, open: where it lives; `pages` is its page table.
        length: tokens.
        longest: the most tokens it ever had.
        restored: the length with which it began. What lies before that, or was overwritten since, cannot be
            rolled back to.
        since: positions before it have no rows: 0 but after a replay without a boundary state.
        kept: entries of the first so many tokens were there before it, and are not written again.
        exact: False after a replay too short to be exact.
    """

    owner: Slots
    slot: int
    length: int = 0
    longest: int = 0
    restored: int = 0
    since: int = 0
    kept: int = 0
    exact: bool = True
    pages: list[int] = field(default_factory=list)
    open: bool = True


class Slots:
    """The slots of a pool, and the page tables of the sequences in them.

    Args:
        geometry: of the pool.
        max_length: the most tokens of a sequence.
    """

    def __init__(self, geometry: Geometry, max_length: int) -> None:
        self._geometry, self._max_length = geometry, max_length
        self.free_slots = list(range(geometry.slots))
        self.open_sequences: list[Sequence] = []
        self.pages = Pages(geometry.pages)

    def open(self) -> Sequence:
        """A sequence with a slot and no pages yet."""
        if not self.free_slots:
            raise CapacityError(f"all {self._geometry.slots} slots are taken; close a sequence first")
        seq = Sequence(owner=self, slot=self.free_slots.pop(0))
        self.open_sequences.append(seq)
        return seq

    def check(self, seq: Sequence) -> None:
        """Raises ValueError for a sequence that was closed, or that another engine made."""
        if seq.owner is not self:
            raise ValueError("the sequence belongs to another engine")
        if not seq.open:
            raise ValueError("the sequence is closed")

    def close(self, seq: Sequence) -> list[int]:
        """Takes everything back; returns the pages that are free now. A second call does nothing."""
        if seq.owner is not self:
            raise ValueError("the sequence belongs to another engine")
        if not seq.open:
            return []
        self.open_sequences.remove(seq)
        self.free_slots.append(seq.slot)
        pages, seq.open, seq.pages = seq.pages, False, []
        return self.pages.drop(pages)

    def become(self, twin: Sequence, seq: Sequence) -> None:
        """A new sequence takes over where another stands, page table included; the caller holds the pages."""
        for name in ("length", "longest", "restored", "since", "kept", "exact"):
            setattr(twin, name, getattr(seq, name))
        twin.pages = list(seq.pages)

    def _shared(self, seq: Sequence, length: int) -> list[int]:
        """Places in the page table that growing to `length` will write and that others hold too."""
        if length <= seq.kept:
            return []  # a replay writes no entry
        size = self._geometry.page_size
        first = max(seq.length, seq.kept) // size
        last = min(len(seq.pages), -(-length // size))
        return [i for i in range(first, last) if self.pages.holders(seq.pages[i]) > 1]

    def missing(self, wanted: Several[tuple[Sequence, int]]) -> int:
        """Pages that must be free so that each sequence can grow to its length in tokens.

        Raises:
            ValueError: a sequence is closed.
            CapacityError: a length exceeds the maximum.
        """
        count = 0
        for seq, length in wanted:
            self.check(seq)
            if length > self._max_length:
                raise CapacityError(f"{length} tokens exceed max_length={self._max_length}")
            new = -(-length // self._geometry.page_size) - len(seq.pages)
            count += max(0, new) + len(self._shared(seq, length))
        return count

    def reserve(self, wanted: Several[tuple[Sequence, int]]) -> list[tuple[int, int]]:
        """Gives each sequence the pages for its length, of its own where it will write; for all or for none.

        Returns:
            (source, target) of every page whose content the caller must copy before anything is written.

        Raises:
            ValueError, CapacityError: as `missing`, and where too few pages are free.
        """
        taken = self.pages.take(self.missing(wanted))
        copies = []
        for seq, length in wanted:
            for i in self._shared(seq, length):
                target = taken.pop(0)
                copies.append((seq.pages[i], target))
                self.pages.drop([seq.pages[i]])
                seq.pages[i] = target
            new = max(0, -(-length // self._geometry.page_size) - len(seq.pages))
            seq.pages += taken[:new]
            del taken[:new]
        self.pages.drop(taken)
        return copies

    def advance(self, seq: Sequence, length: int, *, restored: bool = False) -> None:
        """The sequence now has `length` tokens; `restored` if they came from a kept state."""
        seq.length = length
        seq.longest = max(seq.longest, length)
        if restored:
            seq.restored = length

    def rollback(self, seq: Sequence, length: int) -> list[int]:
        """Shortens a sequence; returns the pages that are free now.

        Raises:
            ValueError: the sequence is closed, or its state at `length` is not there any more.
        """
        self.check(seq)
        lowest = max(seq.restored, seq.longest - self._geometry.rollback)
        if not lowest <= length <= seq.length:
            raise ValueError(
                f"a rollback to {length} tokens must stay within {lowest} .. {seq.length}: rows before may "
                f"be gone (rollback={self._geometry.rollback}, restored at {seq.restored})"
            )
        pages_kept = -(-length // self._geometry.page_size)
        dropped = seq.pages[pages_kept:]
        del seq.pages[pages_kept:]
        seq.length = length
        seq.kept = min(seq.kept, length)  # what follows may be other tokens
        return self.pages.drop(dropped)
