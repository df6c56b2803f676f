"""Pages: what one holds, what padding and metadata add, and how many a context takes.

A page of P tokens holds the rows of all growing parts of all main layers. Where P is no multiple of a part's
`tokens_a_row`, a page would hold a piece of a row: that part then has pages of its own, of the fewest
tokens after which pages and rows end together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ..state.formats import RowFormat
from ..state.layouts import ARRANGEMENTS, PageLayout
from .parts import Model

PAGE_SIZES = (16, 32, 64, 128, 256, 512, 1024)

METADATA_BYTES = 32 + 8 + 8
"""Of a page on one tier: a chained key of 256 bits, its parent and references, its place on the tier."""


@dataclass(frozen=True, slots=True)
class PageSize:
    """A page size, for one model on one tensor-parallel rank.

    Attributes:
        tokens: of a page.
        nbytes: of a page, padding included, without the parts in `apart`.
        padding: bytes of padding a byte of rows, over all pages.
        metadata: bytes of metadata a byte of rows, over all pages.
        pages: at the context, those of `apart` included.
        apart: layer kind -> tokens of a page, where such layers need pages of their own.
    """

    tokens: int
    nbytes: int
    padding: float
    metadata: float
    pages: int
    apart: dict[str, int]


def layer_page(row: RowFormat, rows: int) -> PageLayout:
    """The page of one layer with so many rows, in the layout that engines use for the format."""
    scales_last, alignment = ARRANGEMENTS.get(row.name, (False, 1))
    return PageLayout(row, rows, (("rows", row.channels),), scales_last, alignment=alignment)


def page_size(model: Model, tokens: int, context: int, metadata: int, ranks: int = 1) -> PageSize:
    """What pages of `tokens` tokens mean for a model at a context, with so many bytes of metadata a page."""
    data: dict[int, int] = {}  # tokens that a page covers -> bytes of rows in it
    held: dict[int, int] = {}
    apart = {}
    for group, part in model.parts():
        if not part.grows:
            continue
        covers = math.lcm(tokens, part.tokens_a_row)
        rows, arrays = covers // part.tokens_a_row, group.layers * part.heads_a_rank(ranks)
        data[covers] = data.get(covers, 0) + arrays * rows * part.row.nbytes
        held[covers] = held.get(covers, 0) + arrays * layer_page(part.row, rows).nbytes
        if covers != tokens:
            apart[group.kind] = covers
    span = math.lcm(*data)  # after so many tokens all pages end together
    all_rows = sum(n * (span // covers) for covers, n in data.items())
    all_held = sum(n * (span // covers) for covers, n in held.items())
    return PageSize(
        tokens=tokens,
        nbytes=held.get(tokens, 0),
        padding=all_held / all_rows - 1,
        metadata=metadata * sum(span // covers for covers in data) / all_rows,
        pages=sum(-(-context // covers) for covers in data),
        apart=apart,
    )


def page_table(
    model: Model, context: int, metadata: int, ranks: int = 1, sizes: Sequence[int] = PAGE_SIZES
) -> list[PageSize]:
    """`page_size` for every size; none where no part grows, as with sliding windows alone."""
    if not model.bytes_a_token():
        return []
    return [page_size(model, tokens, context, metadata, ranks) for tokens in sizes]
