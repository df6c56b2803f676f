"""What an attention is given, checked: the same for the kernels and for plain XLA."""

from __future__ import annotations

from typing import NamedTuple

from jax import Array

from goldenkv.state.layouts import PageLayout

from .blocks import expect
from .rows import Rows, rows_of


class Call(NamedTuple):
    """The arrays of `sparse_attention`, or without ids of `dense_attention`, and how the pages are read.

    A query sees the first `counts` int32 [b, t] of its ids, or of all entries.
    """

    q: Array
    window: Array
    window_visible: Array
    pages: Array
    table: Array
    ids: Array | None
    counts: Array
    sinks: Array
    rows: Rows


def check(
    q: Array,
    window: Array,
    window_visible: Array,
    pages: Array,
    table: Array,
    sinks: Array,
    layout: PageLayout | None,
) -> Rows:
    """How the pages are read. Raises ValueError for what does not fit together."""
    rows = rows_of(pages, layout)
    expect("q", q, ("b", "t", "h", rows.channels), "float32", "bfloat16")
    b, t, heads, channels = q.shape
    if not heads or not channels or not rows.rows or not len(pages):
        raise ValueError(
            f"expected at least one head, one channel and one page of one row, "
            f"got q {list(q.shape)} and pages {list(pages.shape)}"
        )
    if layout is None:
        expect("pages", pages, ("pages", "rows", channels), q.dtype.name)
    expect("window", window, (b, "w", channels), q.dtype.name)
    expect("window_visible", window_visible, (b, t, window.shape[1]), "bool")
    expect("table", table, (b, "n"), "int32")
    expect("sinks", sinks, (heads,), "float32")
    return rows
