"""Who owns what: slots and pages handed out to live sequences."""

from __future__ import annotations

from collections.abc import Sequence as Several
from dataclasses import dataclass, field

from ..state.pool import Geometry


class CapacityError(RuntimeError):
    """No free slot, too few free pages, or a sequence past the maximum length. Nothing has changed."""


@dataclass(eq=False, slots=True)
class Sequence:
    """What one live sequence owns. Made by `Engine.open` and `Engine.restore`, ended by `Engine.close`.

    `longest` is the most tokens it ever had, `restored` the length with which it began: what lies before that
    or was overwritten since cannot be rolled back to.
    """

    owner: Slots
    slot: int
    length: int = 0
    longest: int = 0
    restored: int = 0
    pages: list[int] = field(default_factory=list)
    open: bool = True


class Slots:
    """The free slots and pages of a pool.

    Args:
        geometry: of the pool.
        max_length: the most tokens of a sequence.
    """

    def __init__(self, geometry: Geometry, max_length: int) -> None:
        self._geometry, self._max_length = geometry, max_length
        self.free_slots = list(range(geometry.slots))
        self.free_pages = list(range(geometry.pages))

    def open(self) -> Sequence:
        """A sequence with a slot and no pages yet."""
        if not self.free_slots:
            raise CapacityError(f"all {self._geometry.slots} slots are taken; close a sequence first")
        return Sequence(owner=self, slot=self.free_slots.pop(0))

    def check(self, seq: Sequence) -> None:
        """Raises ValueError for a sequence that was closed, or that another engine made."""
        if seq.owner is not self:
            raise ValueError("the sequence belongs to another engine")
        if not seq.open:
            raise ValueError("the sequence is closed")

    def close(self, seq: Sequence) -> None:
        """Takes everything back; a second call does nothing."""
        if seq.owner is not self:
            raise ValueError("the sequence belongs to another engine")
        if seq.open:
            self.free_slots.append(seq.slot)
            self.free_pages.extend(seq.pages)
            seq.open, seq.pages = False, []

    def reserve(self, wanted: Several[tuple[Sequence, int]]) -> None:
        """Gives each sequence the pages for its length in tokens; for all of them, or for none.

        Raises:
            ValueError: a sequence is closed.
            CapacityError: a length exceeds the maximum, or there are too few free pages.
        """
        missing = []
        for seq, length in wanted:
            self.check(seq)
            if length > self._max_length:
                raise CapacityError(f"{length} tokens exceed max_length={self._max_length}")
            missing.append(max(0, -(-length // self._geometry.page_size) - len(seq.pages)))
        if sum(missing) > len(self.free_pages):
            raise CapacityError(
                f"{sum(missing)} pages needed, {len(self.free_pages)} free of {self._geometry.pages}"
            )
        for (seq, _), count in zip(wanted, missing, strict=True):
            seq.pages += self.free_pages[:count]
            del self.free_pages[:count]

    def advance(self, seq: Sequence, length: int, *, restored: bool = False) -> None:
        """The sequence now has `length` tokens; `restored` if they came from a snapshot."""
        seq.length = length
        seq.longest = max(seq.longest, length)
        if restored:
            seq.restored = length

    def rollback(self, seq: Sequence, length: int) -> None:
        """Shortens a sequence and frees the pages that it needs no more.

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
        kept = -(-length // self._geometry.page_size)
        self.free_pages.extend(seq.pages[kept:])
        del seq.pages[kept:]
        seq.length = length
