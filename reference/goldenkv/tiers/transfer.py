"""Rows of the device to an object and back, component by component.

One component that fails fails the object: there is no way to keep or to use the rest.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ..state import Rows
from .objects import Item, Label, views

Copy = Callable[[str, np.ndarray, np.ndarray], None]
"""Copies a component: its name, to, from; both uint8, of one size. If it raises a StoreError, the object
has failed. A seam: for tests, and for other ways of copying."""


def pack(label: Label, rows: Rows, copy: Copy | None = None) -> Item:
    """An object of rows that have the names and dtypes of the label's tensors, and at least their rows."""
    payload = np.empty(label.nbytes, np.uint8)
    for name, view in views(label.tensors, payload).items():
        live = rows[name][: len(view)]
        assert (live.dtype, live.shape) == (view.dtype, view.shape), name
        _copy(copy, name, view, live)
    return Item(label, payload)


def unpack(item: Item, copy: Copy | None = None) -> Rows:
    """The rows of an object: views of its payload, or copies where a way of copying is given."""
    rows = item.arrays()
    if copy is not None:
        for name, view in rows.items():
            rows[name] = np.empty(view.shape, view.dtype)
            _copy(copy, name, rows[name], view)
    return rows


def _copy(copy: Copy | None, name: str, to: np.ndarray, source: np.ndarray) -> None:
    target, data = (array.reshape(-1).view(np.uint8) for array in (to, np.ascontiguousarray(source)))
    if copy is None:
        np.copyto(target, data)
    else:
        copy(name, target, data)
