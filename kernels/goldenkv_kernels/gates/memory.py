"""Arrays on a GPU as a checker sees them: they know their length, and who wrote and who read each element.

What a GPU leaves undefined is poison here: lanes masked off without `other`, loads out of bounds, elements of
an output that nothing wrote. Floats are NaN, integers the largest of their type, flags True.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

NOBODY, MANY = -1, -2
"""Instead of the number of a program."""

Report = Callable[[str], None]


def poison(shape: Sequence[int], dtype: Any) -> np.ndarray:
    """An array that no correct result can come from."""
    dtype = np.dtype(dtype)
    if dtype == np.bool_:
        return np.ones(shape, dtype)
    return np.full(shape, jnp.nan if jnp.issubdtype(dtype, jnp.inexact) else jnp.iinfo(dtype).max, dtype)


class Memory:
    """One array.

    Attributes:
        name: as it is reported.
        values: its elements.
        writer, reader: for arrays that a kernel may write, the number of the program that wrote or read each
            element, NOBODY or MANY; None for inputs.
    """

    def __init__(self, name: str, values: np.ndarray) -> None:
        self.name = name
        self.values = values
        self.writer: np.ndarray | None = None
        self.reader: np.ndarray | None = None

    def watch(self) -> None:
        """A new kernel may write to it."""
        self.writer = np.full(self.values.shape, NOBODY, np.int64)
        self.reader = np.full(self.values.shape, NOBODY, np.int64)

    def __str__(self) -> str:
        return f"{self.name} {list(self.values.shape)}"


@dataclass(frozen=True, slots=True)
class Block:
    """What a kernel calls a ref: an array, and where the block of one program lies in it.

    Attributes:
        memory: the whole array.
        starts: the first element on each axis of the array.
        axes: those that the kernel sees; the others are squeezed.
        shape: of the block as the kernel sees it.
        program: the number of the program.
        report: called with each fault.
    """

    memory: Memory
    starts: tuple[int, ...]
    axes: tuple[int, ...]
    shape: tuple[int, ...]
    program: int
    report: Report

    def load(self, transforms: Sequence, mask: Any = None, other: Any = None) -> np.ndarray:
        """The elements of the indexed block."""
        at, shape = self._locate(transforms)
        touched = self._touched(at, shape, mask, "reads")
        memory = self.memory
        if memory.writer is not None and memory.reader is not None:
            places = _places(at, shape, touched)
            if self._is_foreign(memory.writer[places]):
                self.report(f"reads elements of {memory} that another program writes")
            before = memory.reader[places]
            own = (before == NOBODY) | (before == self.program)
            memory.reader[places] = np.where(own, self.program, MANY)
        values = poison(shape, memory.values.dtype)
        if mask is not None and other is not None:
            off = ~np.broadcast_to(np.asarray(mask), shape)
            values = np.where(off, np.asarray(other).astype(values.dtype), values)
        values[touched] = memory.values[_places(at, shape, touched)]
        return values

    def store(self, transforms: Sequence, value: Any, mask: Any = None) -> None:
        """Writes to the indexed block."""
        at, shape = self._locate(transforms)
        touched = self._touched(at, shape, mask, "writes")
        memory = self.memory
        if memory.writer is None or memory.reader is None:
            self.report(f"writes to {memory}, which is an input")
            return
        places = _places(at, shape, touched)
        if self._is_foreign(memory.writer[places]):
            self.report(f"writes elements of {memory} that another program writes too")
        if self._is_foreign(memory.reader[places]):
            self.report(f"writes elements of {memory} that another program reads")
        flat = np.ravel_multi_index(places, memory.values.shape) if shape else np.zeros(1)
        if len(np.unique(flat)) < len(flat):
            self.report(f"writes an element of {memory} twice at once")
        memory.writer[places] = self.program
        memory.values[places] = np.broadcast_to(np.asarray(value), shape)[touched]

    def _is_foreign(self, programs: np.ndarray) -> bool:
        return bool(np.any((programs != NOBODY) & (programs != self.program)))

    def _touched(self, at: Sequence[np.ndarray], shape: tuple, mask: Any, verb: str) -> np.ndarray:
        """The lanes that touch the array: not masked off, and inside. Those outside are reported."""
        live = np.broadcast_to(np.asarray(True if mask is None else mask), shape)
        inside = np.ones(shape, bool)
        for axis, (place, size) in enumerate(zip(at, self.memory.values.shape, strict=True)):
            fits = (place >= 0) & (place < size)
            wrong = live & ~fits
            if wrong.any():
                first = int(np.broadcast_to(place, shape)[wrong][0])
                self.report(
                    f"{verb} {int(wrong.sum())} elements outside {self.memory}, "
                    f"the first at {first} of axis {axis}"
                )
            inside &= fits
        return live & inside

    def _locate(self, transforms: Sequence) -> tuple[list[np.ndarray], tuple[int, ...]]:
        """For each axis of the array the place of every lane (to broadcast), and the shape of the lanes."""
        if len(transforms) > 1 or not all(hasattr(t, "int_indexer_shape") for t in transforms):
            raise NotImplementedError(f"the Triton lowering takes one index of a ref, got {transforms}")
        at = [np.asarray(start, np.int64) for start in self.starts]
        if not transforms:  # ref[...]
            for n, axis in enumerate(self.axes):
                at[axis] = at[axis] + _along(np.arange(self.shape[n]), n, len(self.shape))
            return at, self.shape
        index = transforms[0]
        is_slice = [hasattr(i, "stride") for i in index.indices]
        shape = tuple(int(n) for n in index.get_indexer_shape())
        width = len(index.int_indexer_shape)  # axes of the integer arrays, which come first
        if width and is_slice != sorted(is_slice):
            raise NotImplementedError(
                f"{self.memory} is indexed by an array behind a slice: the Triton lowering moves the axes"
            )
        place = width
        for axis, i, sliced in zip(self.axes, index.indices, is_slice, strict=True):
            if sliced:
                along = int(i.start) + int(i.stride) * np.arange(int(i.size))
                at[axis] = at[axis] + _along(along, place, len(shape))
                place += 1
            else:
                along = np.asarray(i).astype(np.int64)
                at[axis] = at[axis] + along.reshape(list(along.shape) + [1] * (len(shape) - width))
        return at, shape


def _along(values: np.ndarray, axis: int, rank: int) -> np.ndarray:
    """A vector along one axis of a higher rank."""
    return values.reshape([-1 if n == axis else 1 for n in range(rank)])


def _places(at: Sequence[np.ndarray], shape: tuple, lanes: np.ndarray) -> tuple[np.ndarray, ...]:
    """The places of some lanes, to index an array with."""
    return tuple(np.broadcast_to(place, shape)[lanes] for place in at)
