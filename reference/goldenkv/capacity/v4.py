"""V4 from its component table: parts of every layer kind, and the bytes of a snapshot."""

from __future__ import annotations

from itertools import groupby

from ..config import ModelConfig, Numerics
from ..state.components import Cell, Span, Width, cells
from ..state.formats import ROW_FORMATS, RowFormat
from .formats import RowPair, choose
from .parts import Group, Model, Part

_WINDOWS = (Span.WINDOW, Span.LATE_WINDOW)


def v4_model(config: ModelConfig, name: str, form: str | None = None) -> Model:
    """The parts of a V4, the draft layer apart.

    Bounded parts are the buffers of the published code: a window of W rows, and compressor rows in float32.

    Raises:
        CapacityError: `form` is not a format of V4.
    """
    form, rows = choose("V4", form)
    by_layer = [list(found) for _, found in groupby(cells(config), key=lambda cell: cell.layer)]
    of_kind: dict[str, list[list[Cell]]] = {}
    for found in by_layer:
        of_kind.setdefault(config.kind(found[0].layer).name, []).append(found)
    groups = tuple(
        Group(
            kind, len(layers), _parts(config, rows, layers[0]), draft=layers[0][0].layer not in config.layers
        )
        for kind, layers in of_kind.items()
    )
    return Model(name, "V4", form, groups, config.max_position_embeddings, config)


def snapshot_bytes(config: ModelConfig, form: str | None, length: int, *, exact: bool = False) -> int:
    """Boundary state of one sequence at `length`: what a reload needs besides pages, main layers only.

    Args:
        exact: count the W - 1 window rows that an exact reload reads, instead of the whole window of W rows
            that engines keep.
    """
    _, rows = choose("V4", form)
    total = 0
    for cell in cells(config):
        if cell.component.paged or cell.layer not in config.layers:
            continue
        count = len(cell.live(config, length))
        if cell.component.span in _WINDOWS and not exact:
            count = min(length, config.sliding_window)
        total += count * cell_row(config, rows, cell).nbytes
    return total


def cell_row(config: ModelConfig, rows: RowPair, cell: Cell) -> RowFormat:
    """The row format of a component of a layer."""
    component, channels = cell.component, cell.component.channels(config, cell.layer)
    stored = {Width.HEAD: rows.kv, Width.INDEX: rows.index}.get(component.width)
    if component.float32 or stored is None:
        stored = ROW_FORMATS[component.dtype(Numerics("bfloat16"))]
    return stored(channels, config.qk_rope_head_dim)


def held_rows(config: ModelConfig, cell: Cell) -> int:
    """Rows of a bounded component in the published buffers: a window has room for the current token too."""
    return cell.component.most_rows(config, cell.layer) + (cell.component.span in _WINDOWS)


def _parts(config: ModelConfig, rows: RowPair, layer: list[Cell]) -> tuple[Part, ...]:
    """Parts of a layer; components that lie in one buffer are one part, as wide as the widest."""
    parts = []
    buffers: dict[str, list[Cell]] = {}
    for cell in layer:
        buffers.setdefault(cell.component.buffer, []).append(cell)
    for name, found in buffers.items():
        row = max((cell_row(config, rows, cell) for cell in found), key=lambda r: r.nbytes)
        if found[0].component.paged:
            parts.append(Part(name, row, tokens_a_row=config.compress_ratios[found[0].layer]))
        else:
            parts.append(Part(name, row, most_rows=sum(held_rows(config, cell) for cell in found)))
    return tuple(parts)
