"""The component table: everything that a sequence remembers, declared once.

Pools, snapshots, checksums, byte counts and comparisons iterate over this table; none names a component in
an `if`. At length L, with window W and compression ratio m, a layer needs exactly (and no more):

==================  ==========  ==========================================  =========
component           layers      rows                                        kept in
==================  ==========  ==========================================  =========
window              all         tokens L - W + 1 .. L - 1                   ring
entries             CSA, HCA    entries 0 .. L // m - 1                     pages
rows_kv, _score     CSA, HCA    tokens of the unfinished block (L mod m)    ring
overlap_kv, _score  CSA         tokens of the last finished block           ring
index_keys          CSA         entries 0 .. L // m - 1                     pages
index_rows_*        CSA         as rows_*, of the indexer's compressor      ring
index_overlap_*     CSA         as overlap_*, of the indexer's compressor   ring
==================  ==========  ==========================================  =========

A *paged* component needs all of its pages for a hit; a *boundary* component needs only the state at the one
position. Overlap rows keep the first half of their channels: the second half is already in an entry.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from ..config import LayerKind, ModelConfig, Numerics

_ALL = frozenset(LayerKind)
_COMPRESSED = frozenset({LayerKind.CSA, LayerKind.HCA})
_CSA = frozenset({LayerKind.CSA})


class Span(enum.Enum):
    """Which rows of a component are live at a given length."""

    WINDOW = "the last W - 1 tokens"
    ENTRIES = "all finished entries"
    UNFINISHED = "the tokens of the unfinished block"
    LAST_BLOCK = "the tokens of the last finished block"


class Width(enum.Enum):
    """How many channels a row has: those of an attention or of an index key."""

    HEAD = "head_dim"
    INDEX = "index_head_dim"


@dataclass(frozen=True, slots=True)
class Component:
    """One kind of state.

    Attributes:
        name: its name in snapshots.
        buffer: the device array that holds it; two components can be parts of one array.
        kinds: the layers that have it.
        span: its live rows.
        width: its channels; CSA compressor rows have twice as many (see `channels`).
        wide: a CSA compressor row, with channels for the next block, then for its own.
        float32: kept in float32 whatever the compute dtype.
    """

    name: str
    buffer: str
    kinds: frozenset[LayerKind]
    span: Span
    width: Width
    wide: bool = False
    float32: bool = False

    @property
    def paged(self) -> bool:
        """True where each page holds its own rows, False for boundary state."""
        return self.span is Span.ENTRIES

    def channels(self, config: ModelConfig, layer: int) -> int:
        """Channels of a row."""
        width = int(getattr(config, self.width.value))
        return 2 * width if self.wide and config.kind(layer) is LayerKind.CSA else width

    def dtype(self, numerics: Numerics) -> str:
        """Element type of a row."""
        return "float32" if self.float32 else numerics.dtype

    def live(self, config: ModelConfig, layer: int, length: int) -> range:
        """Absolute row numbers (tokens, or entries where paged) that a sequence of `length` needs."""
        ratio = config.compress_ratios[layer]
        match self.span:
            case Span.WINDOW:
                return range(max(0, length - config.sliding_window + 1), length)
            case Span.ENTRIES:
                return range(length // ratio)
            case Span.UNFINISHED:
                return range(length - length % ratio, length)
            case Span.LAST_BLOCK:
                finished = length - length % ratio
                return range(max(0, finished - ratio), finished)

    def most_rows(self, config: ModelConfig, layer: int) -> int:
        """The most live rows of a boundary component at any length."""
        return config.sliding_window - 1 if self.span is Span.WINDOW else config.compress_ratios[layer]


COMPONENTS: tuple[Component, ...] = (
    Component("window", "window", _ALL, Span.WINDOW, Width.HEAD),
    Component("entries", "entries", _COMPRESSED, Span.ENTRIES, Width.HEAD),
    Component("rows_kv", "rows_kv", _COMPRESSED, Span.UNFINISHED, Width.HEAD, wide=True, float32=True),
    Component("rows_score", "rows_score", _COMPRESSED, Span.UNFINISHED, Width.HEAD, wide=True, float32=True),
    Component("overlap_kv", "rows_kv", _CSA, Span.LAST_BLOCK, Width.HEAD, float32=True),
    Component("overlap_score", "rows_score", _CSA, Span.LAST_BLOCK, Width.HEAD, float32=True),
    Component("index_keys", "index_keys", _CSA, Span.ENTRIES, Width.INDEX),
    Component("index_rows_kv", "index_rows_kv", _CSA, Span.UNFINISHED, Width.INDEX, wide=True, float32=True),
    Component(
        "index_rows_score", "index_rows_score", _CSA, Span.UNFINISHED, Width.INDEX, wide=True, float32=True
    ),
    Component("index_overlap_kv", "index_rows_kv", _CSA, Span.LAST_BLOCK, Width.INDEX, float32=True),
    Component("index_overlap_score", "index_rows_score", _CSA, Span.LAST_BLOCK, Width.INDEX, float32=True),
)


@dataclass(frozen=True, slots=True)
class Cell:
    """A component of one layer: a row of the table met with a layer."""

    layer: int
    component: Component

    @property
    def name(self) -> str:
        """Its name in snapshots, for example `layers.2.overlap_kv`."""
        return f"layers.{self.layer}.{self.component.name}"

    def live(self, config: ModelConfig, length: int) -> range:
        """Absolute row numbers that a sequence of `length` needs."""
        return self.component.live(config, self.layer, length)

    def shape(self, config: ModelConfig, length: int) -> tuple[int, int]:
        """(rows, channels) of its state at `length`."""
        return len(self.live(config, length)), self.component.channels(config, self.layer)


def cells(config: ModelConfig) -> tuple[Cell, ...]:
    """Every component of every layer, in the order of layers and of the table."""
    return tuple(Cell(i, c) for i in config.layers for c in COMPONENTS if config.kind(i) in c.kinds)
