"""The state of a sequence as the pages of an engine's pools, and back: `pack_state`, `unpack_state`.

Only live rows are read: bytes of unused rows, of padding and of channels that nobody needs can hold anything.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from ..config import ModelConfig, Numerics
from .components import Cell
from .formats import element_type
from .groupings import Grouping, Place
from .layouts import PageSizeError, put_rows, take_rows
from .pool import Rows
from .snapshot import IncompleteSnapshot

EnginePages = dict[str, dict[int, bytes]]
"""Pool name -> page number -> the parts of all its layers, one after the other, in the order of `places`.

Engines hold the parts of different layers apart; one part is what `read_page` reads, with its place's layout.
"""


class MissingPage(ValueError):
    """A page that the state at this length needs is not there."""


def pack_state(
    rows: Rows, config: ModelConfig, length: int, grouping: Grouping, *, fill: int = 0
) -> EnginePages:
    """The state of a sequence as pages.

    Args:
        rows: live rows of every cell, as `Engine.rows` returns them.
        config, length: what they are the state of.
        grouping: of the engine whose pages to make.
        fill: the byte wherever nothing lives.

    Raises:
        NotRepresentable: a row that its format cannot hold bit for bit; the message names the cell.
        IncompleteSnapshot: a cell is missing, or has another shape than its length needs.
    """
    for place in grouping.places(config):
        for cell in place.cells:
            shape, found = cell.shape(config, length), rows.get(cell.name)
            if found is None or found.shape != shape:
                has = "missing" if found is None else f"of shape {found.shape}"
                raise IncompleteSnapshot(f"{cell.name} is {has}, expected {shape} at {length=}")
    sizes = grouping.page_bytes(config)
    pages = {
        name: {number: np.full(sizes[name], fill, np.uint8) for number in numbers}
        for name, numbers in grouping.pages(config, length).items()
    }
    for place, start in _starts(grouping, config):
        for cell in place.cells:
            offset = place.layout.offset(cell.component.buffer)
            for number, at, part in _parts(place, cell, config, length):
                page = pages[place.pool.name][number][start : start + place.layout.nbytes]
                where = f"{cell.name} from its row {part.start} on"
                put_rows(page, place.layout, at, rows[cell.name][part], offset, where=where)
    return {name: {n: page.tobytes() for n, page in numbered.items()} for name, numbered in pages.items()}


def unpack_state(
    pages: Mapping[str, Mapping[int, bytes]],
    config: ModelConfig,
    length: int,
    grouping: Grouping,
    numerics: Numerics,
) -> Rows:
    """The live rows that these pages hold: cell name -> [rows, channels].

    What the grouping does not keep is not in it.

    Raises:
        MissingPage: a page is not there.
        PageSizeError: a page has another length.
    """
    for pool, size in grouping.page_bytes(config).items():
        for number in grouping.pages(config, length)[pool]:
            if number not in pages.get(pool, {}):
                raise MissingPage(f"{grouping.name}: page {number} of pool {pool!r} is missing at {length=}")
            if len(pages[pool][number]) != size:
                raise PageSizeError(
                    f"{grouping.name}: page {number} of pool {pool!r} must have {size} bytes (all layers), "
                    f"got {len(pages[pool][number])}"
                )
    rows: Rows = {}
    for place, start in _starts(grouping, config):
        for cell in place.cells:
            dtype, channels = cell.component.dtype(numerics), cell.component.channels(config, cell.layer)
            offset = place.layout.offset(cell.component.buffer)
            found = [np.zeros((0, channels), element_type(dtype))]
            for number, at, _ in _parts(place, cell, config, length):
                data = np.frombuffer(pages[place.pool.name][number], np.uint8)
                page = data[start : start + place.layout.nbytes]
                found.append(take_rows(page, place.layout, at, dtype, offset, channels))
            rows[cell.name] = np.concatenate(found)
    return rows


def _starts(grouping: Grouping, config: ModelConfig) -> Iterator[tuple[Place, int]]:
    """Every place and the byte of its pool's page at which it begins."""
    begin: dict[str, int] = {}
    for place in grouping.places(config):
        start = begin.get(place.pool.name, 0)
        yield place, start
        begin[place.pool.name] = start + place.layout.nbytes


def _parts(
    place: Place, cell: Cell, config: ModelConfig, length: int
) -> Iterator[tuple[int, np.ndarray, slice]]:
    """For each page with live rows of a cell: its number, rows in it, and which of the live rows they are."""
    live = cell.live(config, length)
    for number in range(live.start // place.numbers, -(-live.stop // place.numbers)):
        first = max(live.start, number * place.numbers)
        last = min(live.stop, (number + 1) * place.numbers)
        if first < last:
            at = np.arange(first, last) % place.numbers % place.layout.rows
            yield number, at, slice(first - live.start, last - live.start)
