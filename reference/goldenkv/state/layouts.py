"""Page layouts: how rows lie in a page, one description for each, and the bytes of a page as named rows.

>>> read_page(page, layout="fp8", rows=64, channels=512, rope=64)["rows"]        # float32 [64, 512]

FlashMLA, vLLM, SGLang and TensorRT-LLM put the scales of native rows behind the data of all rows of a page,
and those of index keys likewise (FlashMLA `tests/quant.py`, vLLM `fused_compress_quant_cache.py`,
TensorRT-LLM `footer_scale_kv.py` and `sparse/dsa`); rows of V3.2 and plain rows stand one after the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from .formats import ROW_FORMATS, Field, RowFormat, row_format
from .packing import decode, encode, field_bytes, field_values

FLASHMLA_ALIGNMENT = 576
"""FlashMLA, vLLM and SGLang pad a page of native rows to a multiple of this: a row without its scales."""

ARRANGEMENTS: dict[str, tuple[bool, int]] = {
    "fp8": (True, FLASHMLA_ALIGNMENT),
    "fp8_fnuz": (True, FLASHMLA_ALIGNMENT),
    "index_fp8": (True, 1),
    "index_fp4": (True, 1),
}
"""Row format -> (scales behind all data, alignment of a page). The others: row by row, no padding."""


class PageSizeError(ValueError):
    """A page of another length than its layout has."""


@dataclass(frozen=True, slots=True)
class PageLayout:
    """Where the rows of a page lie.

    Attributes:
        form: of a row.
        rows: of a page.
        parts: names and channels of what lies side by side in a row.
        scales_last: the scales and padding of rows stand behind the data of all rows.
        run: so many rows are followed by their scales; 0 for all rows of the page.
        alignment: a page is padded to a multiple of this.
    """

    form: RowFormat
    rows: int
    parts: tuple[tuple[str, int], ...]
    scales_last: bool = False
    run: int = 0
    alignment: int = 1

    def __post_init__(self) -> None:
        if self.rows < 1 or self.rows % (self.run or self.rows):
            raise ValueError(f"rows={self.rows} must be a positive multiple of run={self.run}")
        if sum(channels for _, channels in self.parts) != self.form.channels:
            raise ValueError(f"parts={self.parts} must have {self.form.channels} channels together")
        if len(self.parts) > 1 and self.form.scaling is not None:
            raise ValueError(
                f"rows of format {self.form.name!r} cannot hold {len(self.parts)} parts side by side"
            )

    @property
    def nbytes(self) -> int:
        """Bytes of a page."""
        return -(-self.rows * self.form.nbytes // self.alignment) * self.alignment

    @property
    def sections(self) -> tuple[tuple[Field, ...], ...]:
        """Fields that lie together: all, or the data and then the scales."""
        if not self.scales_last:
            return (self.form.fields,)
        behind = ("scales", "padding")
        data = tuple(field for field in self.form.fields if field.name not in behind)
        return data, tuple(field for field in self.form.fields if field.name in behind)

    def offset(self, part: str) -> int:
        """The channel at which a part begins.

        Raises:
            ValueError: no such part.
        """
        names = [name for name, _ in self.parts]
        if part not in names:
            raise ValueError(f"{part!r} is not in this page: it holds {', '.join(names)}")
        return sum(channels for _, channels in self.parts[: names.index(part)])


def page_layout(
    form: str,
    rows: int,
    channels: int,
    rope: int = 0,
    *,
    parts: tuple[tuple[str, int], ...] | None = None,
    run: int = 0,
    alignment: int | None = None,
) -> PageLayout:
    """A page of so many rows in a row format.

    Args:
        form: a key of `ROW_FORMATS`.
        rows: of a page.
        channels, rope: of a row, see `row_format`.
        parts: see `PageLayout`; by default one, named "rows".
        run: see `PageLayout`.
        alignment: instead of the one of `ARRANGEMENTS`.

    Raises:
        ValueError: sizes that do not fit.
    """
    scales_last, usual = ARRANGEMENTS.get(form, (False, 1))
    alignment = usual if alignment is None else alignment
    parts = (("rows", channels),) if parts is None else parts
    return PageLayout(row_format(form, channels, rope), rows, parts, scales_last, run, alignment)


def read_page(
    data: bytes | bytearray | memoryview | np.ndarray,
    layout: PageLayout | str,
    *,
    rows: int | None = None,
    channels: int | None = None,
    rope: int = 0,
    dtype: str = "float32",
) -> dict[str, np.ndarray]:
    """The raw bytes of one page as named rows.

    Args:
        data: the page, as an engine holds it, with its padding.
        layout: from `page_layout` or a grouping; or the name of a row format, with `rows` and `channels` (and
            `rope` where it keeps rotated channels apart).
        rows, channels, rope: only with a name.
        dtype: "float32" or "bfloat16", of what is returned; see `packing.decode` on rounding.

    Returns:
        For each part its rows [layout.rows, channels]; those that were never written hold whatever is there.

    Raises:
        PageSizeError: the page has another length.
        ValueError: an unknown format, or sizes missing.
    """
    if isinstance(layout, str):
        if rows is None or channels is None:
            raise ValueError(f"layout={layout!r} needs rows and channels, got {rows=} and {channels=}")
        layout = page_layout(layout, rows, channels, rope)
    page = checked_page(data, layout)
    everything = take_rows(page, layout, np.arange(layout.rows), dtype)
    return {
        name: everything[:, layout.offset(name) : layout.offset(name) + width] for name, width in layout.parts
    }


def pack_page(
    rows: np.ndarray | Mapping[str, np.ndarray], layout: PageLayout, *, quantise: bool = False, fill: int = 0
) -> bytes:
    """A page with these rows first.

    Args:
        rows: float32 or bfloat16 [at most layout.rows, channels], by part where there are several.
        layout: of the page.
        quantise: see `packing.encode`.
        fill: the byte wherever no row lies: unused rows and padding.

    Raises:
        NotRepresentable, ValueError: see `packing.encode`; too many rows, or not the parts of the layout.
    """
    named = rows if isinstance(rows, Mapping) else {layout.parts[0][0]: rows}
    if set(named) != {name for name, _ in layout.parts}:
        raise ValueError(f"expected rows of {', '.join(n for n, _ in layout.parts)}, got {', '.join(named)}")
    page = np.full(layout.nbytes, fill, np.uint8)
    for name, part in named.items():
        if len(part) > layout.rows:
            raise ValueError(f"{len(part)} rows of {name} do not fit into a page of {layout.rows}")
        put_rows(page, layout, np.arange(len(part)), part, layout.offset(name), quantise=quantise)
    return page.tobytes()


# Rows within a page -----------------------------------------------------------------------------------------


def put_rows(
    page: np.ndarray,
    layout: PageLayout,
    at: np.ndarray,
    rows: np.ndarray,
    offset: int = 0,
    *,
    quantise: bool = False,
    where: str = "",
) -> None:
    """Writes rows into a page, uint8 [layout.nbytes], at these row numbers; errors as `packing.encode`.

    `rows` can be narrower than a row of the page if its format is plain: then they begin at channel `offset`.
    Nothing is written where an error is raised.
    """
    form = _narrow(layout.form, rows.shape[1])
    fields = encode(rows, form, quantise=quantise, where=where)
    for field, view, start in _views(page, layout, form, offset):
        if field.name != "padding":
            run = view.shape[1]
            stop = start + field.nbytes
            view[at // run, at % run, start:stop] = field_bytes(fields[field.name], field)


def take_rows(
    page: np.ndarray,
    layout: PageLayout,
    at: np.ndarray,
    dtype: str = "float32",
    offset: int = 0,
    channels: int | None = None,
) -> np.ndarray:
    """Rows [len(at), channels] of a page by their numbers; `offset` and `channels` as in `put_rows`."""
    form = _narrow(layout.form, layout.form.channels if channels is None else channels)
    fields = {}
    for field, view, start in _views(page, layout, form, offset):
        run = view.shape[1]
        fields[field.name] = field_values(view[at // run, at % run, start : start + field.nbytes], field)
    return decode(fields, form, dtype)


def checked_page(data: bytes | bytearray | memoryview | np.ndarray, layout: PageLayout) -> np.ndarray:
    """The page as uint8 [layout.nbytes], without a copy.

    Raises:
        PageSizeError: it has another length; the message names layouts that would fit.
    """
    if isinstance(data, np.ndarray):
        page = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
    else:
        page = np.frombuffer(data, np.uint8)
    if len(page) != layout.nbytes:
        form = layout.form
        others = _fitting(len(page), form)
        padded = f", padded to a multiple of {layout.alignment}" if layout.alignment > 1 else ""
        raise PageSizeError(
            f"a page of {layout.rows} rows of format {form.name!r} ({form.channels} channels, "
            f"{form.nbytes} bytes a row{padded}) has {layout.nbytes} bytes, got {len(page)}"
            + (f", as have {' or '.join(others[:3])}" if others else "")
        )
    return page


def _narrow(form: RowFormat, channels: int) -> RowFormat:
    if channels == form.channels:
        return form
    if form.scaling is not None:
        raise ValueError(f"rows of format {form.name!r} have {form.channels} channels, got {channels}")
    return row_format(form.name, channels)


def _views(
    page: np.ndarray, layout: PageLayout, form: RowFormat, offset: int
) -> list[tuple[Field, np.ndarray, int]]:
    """For each field of `form`: the rows that hold it [runs, rows a run, bytes], and its first byte there."""
    run = layout.run or layout.rows
    runs = page[: layout.rows * layout.form.nbytes].reshape(layout.rows // run, run * layout.form.nbytes)
    found, begin = [], 0
    for section in layout.sections:
        width = sum(field.nbytes for field in section)
        view = runs[:, begin : begin + run * width].reshape(len(runs), run, width)
        begin += run * width
        start = 0
        for field in section:
            own = form.field(field.name)
            skipped = offset * (own.nbytes // own.count) if offset else 0
            found.append((own, view, start + skipped))
            start += field.nbytes
    return found


def _fitting(nbytes: int, form: RowFormat) -> list[str]:
    """Layouts of these channels that have so many bytes."""
    rope = next((field.count for field in form.fields if field.name == "rope"), 0)
    found = []
    for name in ROW_FORMATS:
        for rows in (2**i for i in range(9)):
            for alignment in sorted({1, ARRANGEMENTS.get(name, (False, 1))[1]}):
                layout = page_layout(name, rows, form.channels, rope, alignment=alignment)
                if layout.nbytes == nbytes:
                    padding = f"padded to {alignment}" if alignment > 1 else "without padding"
                    found.append(f"{rows} rows of {name!r} {padding}")
    return found
