"""Pages and boundary states on their way between a pool and a store: rows by cell name, on the host.

Gathering is a device computation like any other: it waits for what was dispatched before it, and later writes
do not change what it returns. So the bytes are those of the moment in which it was asked for, whenever they
are fetched.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np

from ..config import ModelConfig
from . import pool as pools
from .components import Cell, cells
from .page_moves import XLA, PageMoves
from .pool import PAGES_A_CALL, Pool, Rows


def paged_shape(config: ModelConfig, cell: Cell, page_size: int, start: int, length: int) -> tuple[int, int]:
    """Rows and channels that the page of tokens start .. start + page_size - 1 has, of `length` tokens."""
    ratio = config.compress_ratios[cell.layer]
    end = min(length, start + page_size)
    return (end // ratio - start // ratio, cell.component.channels(config, cell.layer))


class GatheredPages:
    """Copies of pages on the device, made now.

    Args:
        config: of the pool.
        pool: holds the pages.
        pages: their numbers.
        moves: what copies them.
    """

    def __init__(self, config: ModelConfig, pool: Pool, pages: Sequence[int], moves: PageMoves = XLA) -> None:
        self._calls = [
            pools.gather_pages(pool, pools.padded(pages[i : i + PAGES_A_CALL], 0), config=config, moves=moves)
            for i in range(0, len(pages), PAGES_A_CALL)
        ]

    def rows(self, index: int) -> Rows:
        """The rows of the page at a place in the list, [rows, channels] each. Waits for the device."""
        call, place = divmod(index, PAGES_A_CALL)
        return {name: np.asarray(array)[place] for name, array in self._calls[call].items()}


class GatheredBoundary:
    """A copy of a boundary state on the device, made now.

    Args:
        config: of the pool.
        arrays: rows by cell name, each as many as it can have at any length.
        length: the position of the state.
    """

    def __init__(self, config: ModelConfig, arrays: dict[str, jax.Array], length: int) -> None:
        self._arrays, self._counts = arrays, pools.boundary_counts(config, length)

    def rows(self) -> Rows:
        """The live rows. Waits for the device."""
        return {name: np.asarray(array)[: self._counts[name]] for name, array in self._arrays.items()}


def write_pages(
    config: ModelConfig,
    pool: Pool,
    pages: Sequence[int],
    rows: Sequence[Rows],
    moves: PageMoves = XLA,
) -> Pool:
    """Writes rows into pages; a page with fewer rows than it can hold has zeros behind them. Donates `pool`.

    Args:
        pages: their numbers.
        rows: for each page, what `GatheredPages.rows` returned, or the first rows of it.
        moves: what copies them.
    """
    paged = [cell for cell in cells(config) if cell.component.paged]
    for i in range(0, len(pages), PAGES_A_CALL):
        call = {}
        for cell in paged:
            buffer = pool[cell.layer][cell.component.buffer]
            call[cell.name] = np.zeros((PAGES_A_CALL, *buffer.shape[1:]), buffer.dtype)
            for place, page_rows in enumerate(rows[i : i + PAGES_A_CALL]):
                found = page_rows[cell.name]
                call[cell.name][place, : len(found)] = found
        targets = pools.padded(pages[i : i + PAGES_A_CALL], np.iinfo(np.int32).max)
        pool = pools.scatter_pages(pool, targets, call, config=config, moves=moves)
    return pool
