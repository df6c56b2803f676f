"""The same bytes out of real arrays: make what an engine would hold, and let NumPy count.

Nothing here uses the calculator's sums: rows come from the component table, and the production packers turn
them into bytes.
"""

from __future__ import annotations

import numpy as np

from ..config import ModelConfig, Numerics
from ..state.components import Cell, cells
from ..state.layouts import pack_page
from ..state.packing import pack
from ..state.pool import Geometry, Rows, create_pool, read_rows
from .formats import choose
from .pages import layer_page
from .v4 import cell_row, held_rows


def allocate(config: ModelConfig, form: str | None, length: int, page_size: int) -> Rows:
    """What holds one sequence of a V4 in production, as arrays of bytes by cell name.

    Args:
        form: a format of V4; the native one by default.
        length: tokens of the sequence.
        page_size: tokens a page, a multiple of `config.alignment`.

    Returns:
        Pages [pages, bytes of a page] with their padding; bounded rows [rows, bytes of a row], where
        components that share a buffer are one array under the first one's name.

    Raises:
        ValueError: the pages do not hold whole entries of every layer.
    """
    pages = -(-length // page_size)
    Geometry(slots=1, pages=max(1, pages), page_size=page_size, tile=4).check(config)
    _, rows = choose("V4", form)
    arrays: Rows = {}
    buffers: dict[tuple[int, str], list[Cell]] = {}
    for cell in cells(config):
        if cell.component.paged:
            entries = page_size // config.compress_ratios[cell.layer]
            row = cell_row(config, rows, cell)
            page = pack_page(
                np.zeros((entries, row.channels), np.float32), layer_page(row, entries), quantise=True
            )
            arrays[cell.name] = np.tile(np.frombuffer(page, np.uint8), (pages, 1))
        else:
            buffers.setdefault((cell.layer, cell.component.buffer), []).append(cell)
    for found in buffers.values():
        row = max((cell_row(config, rows, cell) for cell in found), key=lambda r: r.nbytes)
        count = sum(held_rows(config, cell) for cell in found)
        arrays[found[0].name] = pack(np.zeros((count, row.channels), np.float32), row, quantise=True)
    return arrays


def pool_rows(config: ModelConfig, dtype: str, length: int, page_size: int) -> Rows:
    """The minimal exact state that this project's own pool gives for a sequence of `length` tokens."""
    pages = -(-length // page_size)
    geometry = Geometry(slots=1, pages=max(1, pages), page_size=page_size, tile=4)
    pool = create_pool(config, Numerics(dtype, tile=4), geometry)
    return read_rows(config, pool, 0, list(range(pages)), length)
