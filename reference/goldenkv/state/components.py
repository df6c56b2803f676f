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
draft_window        MTP         tokens L - W .. L - 2                       ring
draft_streams       MTP         token L - 1                                 ring
==================  ==========  ==========================================  =========

A *paged* component needs all of its pages for a hit; a *boundary* component needs only the state at the one
position. Overlap rows keep the first half of their channels: the second half is already in an entry.

The MTP layer is one token behind: its row for token i needs the streams of token i and the id of token i + 1.
So it keeps the streams of the last token, from which the next row will be made.
"""

from __future__ import annotations

import enum
import functools
import hashlib
from dataclasses import dataclass

from ..config import LayerKind, ModelConfig, Numerics

_MAIN = frozenset(LayerKind) - {LayerKind.MTP}
_COMPRESSED = frozenset({LayerKind.CSA, LayerKind.HCA})
_CSA = frozenset({LayerKind.CSA})
_MTP = frozenset({LayerKind.MTP})


class Span(enum.Enum):
    """Which rows of a component are live at a given length."""

    WINDOW = "the last W - 1 tokens"
    ENTRIES = "all finished entries"
    UNFINISHED = "the tokens of the unfinished block"
    LAST_BLOCK = "the tokens of the last finished block"
    LATE_WINDOW = "the last W - 1 tokens but one"
    LAST_TOKEN = "the last token"


class Width(enum.Enum):
    """How many channels a row has."""

    HEAD = "an attention key"
    INDEX = "an index key"
    STREAMS = "all residual streams"

    def of(self, config: ModelConfig) -> int:
        """Channels under a configuration."""
        match self:
            case Width.HEAD:
                return config.head_dim
            case Width.INDEX:
                return config.index_head_dim
            case Width.STREAMS:
                return config.hc_mult * config.hidden_size


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
        width = self.width.of(config)
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
            case Span.LATE_WINDOW:
                return range(max(0, length - config.sliding_window), max(0, length - 1))
            case Span.LAST_TOKEN:
                return range(max(0, length - 1), length)

    def made_by(self, config: ModelConfig, layer: int, row: int) -> int:
        """The token with which a row comes into being: an entry with the last of its block."""
        match self.span:
            case Span.ENTRIES:
                return (row + 1) * config.compress_ratios[layer] - 1
            case Span.LATE_WINDOW:
                return row + 1
        return row

    def most_rows(self, config: ModelConfig, layer: int) -> int:
        """The most live rows of a boundary component at any length."""
        match self.span:
            case Span.WINDOW | Span.LATE_WINDOW:
                return config.sliding_window - 1
            case Span.LAST_TOKEN:
                return 1
        return config.compress_ratios[layer]


COMPONENTS: tuple[Component, ...] = (
    Component("window", "window", _MAIN, Span.WINDOW, Width.HEAD),
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
    Component("draft_window", "window", _MTP, Span.LATE_WINDOW, Width.HEAD),
    Component("draft_streams", "streams", _MTP, Span.LAST_TOKEN, Width.STREAMS),
)


@functools.cache
def table_version() -> str:
    """A digest of what the table says, 16 hexadecimal digits. State kept under another one is a miss."""
    rows = [
        (c.name, sorted(k.name for k in c.kinds), c.span.name, c.width.name, c.wide, c.float32)
        for c in COMPONENTS
    ]
    return hashlib.blake2b(repr(rows).encode(), digest_size=8).hexdigest()


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
    return tuple(Cell(i, c) for i in config.state_layers for c in COMPONENTS if config.kind(i) in c.kinds)
