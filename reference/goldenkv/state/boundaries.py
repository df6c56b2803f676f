"""Boundary states on the device: what a sequence holds besides its pages at one position, in own slots.

Saving and loading copies between a ring slot and a boundary slot and never leaves the device. Rows are moved
as bits.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from ..config import ModelConfig, Numerics
from . import pool as pools
from .components import cells
from .moving import GatheredBoundary
from .page_moves import set_bits
from .pages import CapacityError
from .pool import Pool, Rows


class Boundaries:
    """A fixed number of slots, each with the boundary rows of one position.

    Args:
        config, numerics: shapes and dtypes.
        count: slots.
        poison: fill a slot with NaN when it is freed, so that a use after that shows.
    """

    def __init__(self, config: ModelConfig, numerics: Numerics, count: int, *, poison: bool = False) -> None:
        self._config, self._poison = config, poison
        self._store = {
            cell.name: jnp.zeros(
                (
                    count,
                    cell.component.most_rows(config, cell.layer),
                    cell.component.channels(config, cell.layer),
                ),
                cell.component.dtype(numerics),
            )
            for cell in cells(config)
            if not cell.component.paged
        }
        self._count = count
        self._free = list(range(count - 1, -1, -1))
        self._lengths: dict[int, int] = {}

    @property
    def free(self) -> int:
        """Slots that hold nothing."""
        return len(self._free)

    @property
    def nbytes(self) -> int:
        """Bytes of all slots."""
        return sum(array.nbytes for array in self._store.values())

    def length(self, handle: int) -> int:
        """The position of a saved state, in tokens.

        Raises:
            ValueError: nothing is saved under that handle.
        """
        if handle not in self._lengths:
            raise ValueError(f"boundary {handle} holds nothing")
        return self._lengths[handle]

    def save(self, pool: Pool, slot: int, length: int) -> int:
        """Copies the boundary rows of a ring slot at `length` tokens. Returns the handle.

        Raises:
            CapacityError: no slot is free.
        """
        handle = self._take()
        starts = pools.boundary_starts(self._config, length)
        rows = pools.gather_boundary(pool, np.int32(slot), starts, config=self._config)
        self._store = _put(self._store, np.int32(handle), rows)
        self._lengths[handle] = length
        return handle

    def gather(self, handle: int) -> GatheredBoundary:
        """A copy of a saved state, made now, that can be fetched to the host later."""
        length = self.length(handle)
        return GatheredBoundary(self._config, _get(self._store, np.int32(handle)), length)

    def put(self, length: int, rows: Rows) -> int:
        """Keeps rows that `GatheredBoundary.rows` returned. Returns the handle.

        Raises:
            CapacityError: no slot is free.
        """
        handle = self._take()
        grown = {}
        for name, array in self._store.items():
            grown[name] = np.zeros(array.shape[1:], array.dtype)
            grown[name][: len(rows[name])] = rows[name]
        self._store = _put(self._store, np.int32(handle), grown)
        self._lengths[handle] = length
        return handle

    def _take(self) -> int:
        if not self._free:
            raise CapacityError(f"all {self._count} boundary slots are taken")
        return self._free.pop()

    def load(self, pool: Pool, handle: int, slot: int) -> Pool:
        """Writes a saved state into a ring slot. Donates `pool`."""
        length = self.length(handle)
        starts = pools.boundary_starts(self._config, length)
        counts = pools.boundary_counts(self._config, length)
        rows = _get(self._store, np.int32(handle))
        return pools.scatter_boundary(pool, np.int32(slot), starts, counts, rows, config=self._config)

    def drop(self, handle: int) -> None:
        """Frees a slot.

        Raises:
            ValueError: nothing is saved there.
        """
        self.length(handle)
        del self._lengths[handle]
        self._free.append(handle)
        if self._poison:
            rows = {
                name: jnp.full(array.shape[1:], jnp.nan, array.dtype) for name, array in self._store.items()
            }
            self._store = _put(self._store, np.int32(handle), rows)


@partial(jax.jit, donate_argnames="store")
def _put(store: dict[str, jax.Array], handle: jax.Array, rows: dict[str, jax.Array]) -> dict[str, jax.Array]:
    return {name: set_bits(store[name], (handle,), rows[name]) for name in store}


@jax.jit
def _get(store: dict[str, jax.Array], handle: jax.Array) -> dict[str, jax.Array]:
    return {name: array[handle] for name, array in store.items()}
