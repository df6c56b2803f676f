"""Device state: rings for boundary rows, pages for entries, and how a tile reads and writes them.

A pool serves many sequences. A sequence owns one *slot* of every ring and any pages that its *page table*
names; page i of the table holds the entries of tokens i * page_size .. (i + 1) * page_size - 1. Rows are
addressed by absolute position everywhere, so slot, pages and pool size change no value that is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int32

from ..config import ModelConfig, Numerics
from ..ops.apart import apart
from ..ops.typed import typed
from .components import Cell, Span, cells
from .page_moves import XLA, PageMoves, set_bits

Pool = tuple[dict[str, jax.Array], ...]
"""A dictionary a layer, by buffer name: rings [slots, ring, channels] and pages [pages, rows, channels]."""

Rows = dict[str, np.ndarray]
"""Live rows of one sequence by cell name, each [rows, channels]."""


@dataclass(frozen=True, slots=True)
class Geometry:
    """The sizes of a pool.

    Attributes:
        slots: sequences that can live at once.
        pages: pages that they share.
        page_size: tokens a page, a multiple of the configuration's alignment.
        tile: the most tokens that one program runs over.
        rollback: tokens that can be taken back: so many rows more are kept from being overwritten.
        boundaries: boundary states that can be kept on the device besides those of live sequences.
        aligned: tiles start at multiples of their size. False only for the free-shape control.
    """

    slots: int
    pages: int
    page_size: int
    tile: int
    rollback: int = 0
    boundaries: int = 0
    aligned: bool = True

    def check(self, config: ModelConfig) -> None:
        """Raises ValueError where pages would not hold whole blocks of every layer."""
        if self.page_size < 1 or self.page_size % config.alignment:
            raise ValueError(
                f"page_size={self.page_size} must be a positive multiple of {config.alignment}, the tokens "
                "after which the blocks of every layer end together"
            )
        if self.slots < 1 or self.pages < 1:
            raise ValueError(f"slots={self.slots} and pages={self.pages} must be at least 1")
        if self.rollback < 0 or self.boundaries < 0:
            raise ValueError(
                f"rollback={self.rollback} and boundaries={self.boundaries} must not be negative"
            )


def entries_in_tile(tile: int, ratio: int, aligned: bool = True) -> int:
    """The most entries that one tile can finish; a tile that starts anywhere can meet one more."""
    return max(1, tile // ratio) if aligned else tile // ratio + 1


def ring_rows(config: ModelConfig, geometry: Geometry, cell: Cell) -> int:
    """Rows of a ring: enough that nothing is overwritten which a tile, or a rolled back sequence, reads."""
    ahead = max(geometry.tile, geometry.rollback)
    match cell.component.span:
        case Span.WINDOW | Span.LATE_WINDOW:
            return config.sliding_window + ahead
        case Span.LAST_TOKEN:
            return 1 + ahead
    ratio = config.compress_ratios[cell.layer]
    in_tile = entries_in_tile(geometry.tile, ratio, geometry.aligned) * ratio
    return ratio + max(in_tile, ratio + geometry.rollback)


def create_pool(config: ModelConfig, numerics: Numerics, geometry: Geometry, fill: float = 0.0) -> Pool:
    """A pool whose every element is `fill`; no row is read before it is written, so `fill` never shows."""
    geometry.check(config)
    pool: Pool = tuple({} for _ in config.state_layers)
    for cell in cells(config):
        component, buffers = cell.component, pool[cell.layer]
        channels = component.channels(config, cell.layer)
        if component.paged:
            shape = (geometry.pages, geometry.page_size // config.compress_ratios[cell.layer], channels)
        else:
            shape = (geometry.slots, ring_rows(config, geometry, cell), channels)
        if component.buffer not in buffers:  # the widest component of a buffer stands first in the table
            buffers[component.buffer] = jnp.full(shape, fill, component.dtype(numerics))
    return pool


@typed
def read_ring(
    ring: Float[Array, "slots ring c"],
    slot: Int32[Array, ""],
    positions: Int32[Array, " n"],
    valid: Bool[Array, " n"],
) -> Float[Array, "n c"]:
    """Rows at absolute positions, in the order given; 0 where not valid."""
    rows = apart(jnp.any(valid), lambda: ring[slot, positions % ring.shape[1]])
    return jnp.where(valid[:, None], rows, 0)


@typed
def write_ring(
    ring: Float[Array, "slots ring c"],
    slot: Int32[Array, ""],
    positions: Int32[Array, " n"],
    live: Bool[Array, " n"],
    rows: Float[Array, "n c"],
) -> Float[Array, "slots ring c"]:
    """Writes the live rows at their absolute positions."""
    index = jnp.where(live, positions % ring.shape[1], ring.shape[1])
    return ring.at[slot, index].set(rows.astype(ring.dtype), mode="drop")


@typed
def read_entries(
    pages: Float[Array, "pages rows c"],
    table: Int32[Array, " max"],
    ids: Int32[Array, "*n"],
    valid: Bool[Array, "*n"],
) -> Float[Array, "*n c"]:
    """Entries by absolute number, through the page table; 0 where not valid."""
    safe = jnp.where(valid, ids, 0)
    rows = apart(jnp.any(valid), lambda: pages[table[safe // pages.shape[1]], safe % pages.shape[1]])
    return jnp.where(valid[..., None], rows, 0)


@typed
def write_entries(
    pages: Float[Array, "pages rows c"],
    table: Int32[Array, " max"],
    ids: Int32[Array, " n"],
    done: Bool[Array, " n"],
    entries: Float[Array, "n c"],
) -> Float[Array, "pages rows c"]:
    """Writes the entries that are done, through the page table."""
    safe = jnp.where(done, ids, 0)
    page = jnp.where(done, table[safe // pages.shape[1]], pages.shape[0])
    return pages.at[page, safe % pages.shape[1]].set(entries.astype(pages.dtype), mode="drop")


PAGES_A_CALL = 16
"""Pages moved by one compiled call; the last call of a move is padded."""


@partial(jax.jit, static_argnames=("config", "moves"))
def gather_pages(
    pool: Pool, pages: jax.Array, *, config: ModelConfig, moves: PageMoves = XLA
) -> dict[str, jax.Array]:
    """Rows of pages by cell name, [pages, rows, channels]."""
    return {
        cell.name: moves.gather_pages(pool[cell.layer][cell.component.buffer], pages)
        for cell in cells(config)
        if cell.component.paged
    }


@partial(jax.jit, static_argnames=("config", "moves"), donate_argnames="pool")
def scatter_pages(
    pool: Pool,
    pages: jax.Array,
    rows: dict[str, jax.Array],
    *,
    config: ModelConfig,
    moves: PageMoves = XLA,
) -> Pool:
    """Writes what `gather_pages` returned; pages out of range are left out. Donates `pool`."""
    out = tuple(dict(buffers) for buffers in pool)
    for cell in cells(config):
        if cell.component.paged:
            buffer = out[cell.layer][cell.component.buffer]
            out[cell.layer][cell.component.buffer] = moves.scatter_pages(buffer, pages, rows[cell.name])
    return out


@partial(jax.jit, static_argnames="config")
def gather_boundary(
    pool: Pool, slot: jax.Array, starts: dict[str, jax.Array], *, config: ModelConfig
) -> dict[str, jax.Array]:
    """Boundary rows of a slot by cell name, from `starts` on, each as many as it can have at any length."""
    out = {}
    for cell in cells(config):
        if not cell.component.paged:
            ring = pool[cell.layer][cell.component.buffer]
            at = starts[cell.name] + jnp.arange(cell.component.most_rows(config, cell.layer), dtype=jnp.int32)
            out[cell.name] = ring[slot, at % ring.shape[1], : cell.component.channels(config, cell.layer)]
    return out


@partial(jax.jit, static_argnames="config", donate_argnames="pool")
def scatter_boundary(
    pool: Pool,
    slot: jax.Array,
    starts: dict[str, jax.Array],
    counts: dict[str, jax.Array],
    rows: dict[str, jax.Array],
    *,
    config: ModelConfig,
) -> Pool:
    """Writes the first `counts` of the rows that `gather_boundary` returned. Donates `pool`."""
    out = tuple(dict(buffers) for buffers in pool)
    for cell in cells(config):
        if not cell.component.paged:
            ring = out[cell.layer][cell.component.buffer]
            step = jnp.arange(cell.component.most_rows(config, cell.layer), dtype=jnp.int32)
            at = jnp.where(
                step < counts[cell.name], (starts[cell.name] + step) % ring.shape[1], ring.shape[1]
            )
            width = cell.component.channels(config, cell.layer)
            index = (slot, at, slice(width))
            out[cell.layer][cell.component.buffer] = set_bits(ring, index, rows[cell.name])
    return out


@partial(jax.jit, static_argnames="config", donate_argnames="pool")
def copy_page(pool: Pool, source: jax.Array, target: jax.Array, *, config: ModelConfig) -> Pool:
    """Copies one page of every paged component. Donates `pool`."""
    return scatter_pages(pool, target[None], gather_pages(pool, source[None], config=config), config=config)


@partial(jax.jit, static_argnames="config", donate_argnames="pool")
def poison_page(pool: Pool, page: jax.Array, *, config: ModelConfig) -> Pool:
    """Fills one page of every paged component with NaN, so that a use after freeing shows. Donates `pool`."""
    rows = jax.tree.map(
        lambda found: jnp.full_like(found, jnp.nan), gather_pages(pool, page[None], config=config)
    )
    return scatter_pages(pool, page[None], rows, config=config)


@partial(jax.jit, static_argnames="config", donate_argnames="pool")
def copy_slot(pool: Pool, source: jax.Array, target: jax.Array, *, config: ModelConfig) -> Pool:
    """Copies one slot of every ring, rows that could be rolled back to included. Donates `pool`."""
    out = tuple(dict(buffers) for buffers in pool)
    for layer, name in {(c.layer, c.component.buffer) for c in cells(config) if not c.component.paged}:
        ring = pool[layer][name]
        out[layer][name] = set_bits(ring, (target,), ring[source])
    return out


def boundary_starts(config: ModelConfig, length: int) -> dict[str, np.int32]:
    """The first live row of every cell."""
    return {c.name: np.int32(c.live(config, length).start) for c in cells(config)}


def boundary_counts(config: ModelConfig, length: int) -> dict[str, np.int32]:
    """The number of live rows of every cell."""
    return {c.name: np.int32(len(c.live(config, length))) for c in cells(config)}


def read_rows(config: ModelConfig, pool: Pool, slot: int, pages: list[int], length: int) -> Rows:
    """Copies the minimal exact state of a sequence to the host.

    Args:
        slot, pages: what the sequence owns; `pages` in the order of its tokens.
        length: tokens it holds.
    """
    starts = boundary_starts(config, length)
    boundary = gather_boundary(pool, np.int32(slot), starts, config=config)
    calls = [
        gather_pages(pool, padded(pages[i : i + PAGES_A_CALL], fill=0), config=config)
        for i in range(0, len(pages), PAGES_A_CALL)
    ]
    rows: Rows = {}
    for cell in cells(config):
        count, channels = cell.shape(config, length)
        if not cell.component.paged:
            found = np.asarray(boundary[cell.name])
        elif calls:
            found = np.concatenate([np.asarray(call[cell.name]).reshape(-1, channels) for call in calls])
        else:
            found = np.zeros((0, channels), pool[cell.layer][cell.component.buffer].dtype)
        rows[cell.name] = found[:count].copy()  # a copy: the device buffer can be reused at any time
    return rows


def write_rows(config: ModelConfig, pool: Pool, slot: int, pages: list[int], length: int, rows: Rows) -> Pool:
    """Writes what `read_rows` returned into a slot and pages, of this pool or another. Donates `pool`."""
    everything = cells(config)
    starts, counts = boundary_starts(config, length), boundary_counts(config, length)
    boundary = {
        c.name: _grown(rows[c.name], c.component.most_rows(config, c.layer))
        for c in everything
        if not c.component.paged
    }
    pool = scatter_boundary(pool, np.int32(slot), starts, counts, boundary, config=config)
    for i in range(0, len(pages), PAGES_A_CALL):
        call = {}
        for cell in everything:
            if cell.component.paged:
                buffer = pool[cell.layer][cell.component.buffer]
                part = rows[cell.name][i * buffer.shape[1] : (i + PAGES_A_CALL) * buffer.shape[1]]
                grown = _grown(part, PAGES_A_CALL * buffer.shape[1])
                call[cell.name] = grown.reshape(PAGES_A_CALL, *buffer.shape[1:])
        targets = padded(pages[i : i + PAGES_A_CALL], fill=np.iinfo(np.int32).max)
        pool = scatter_pages(pool, targets, call, config=config)
    return pool


def padded(pages: Sequence[int], fill: int) -> np.ndarray:
    """The numbers of at most `PAGES_A_CALL` pages, filled up to so many."""
    return np.array([*pages] + [fill] * (PAGES_A_CALL - len(pages)), np.int32)


def _grown(rows: np.ndarray, count: int) -> np.ndarray:
    """`rows` followed by zeros up to `count` rows, always in memory of its own."""
    out = np.zeros((count, rows.shape[1]), rows.dtype)
    out[: len(rows)] = rows
    return out
