"""How a wrapper that stores other bytes keeps what an object was: its tensors, its `extra`, its XXH3."""

from __future__ import annotations

import json
from dataclasses import replace

from .errors import Corrupt
from .objects import Head, Item, Label, Tensor


def describe(item: Item) -> str:
    """What of an item is lost if its payload and `extra` are replaced."""
    return json.dumps([item.label.tensors, item.label.extra, item.xxh3], separators=(",", ":"))


def restore(description: str | bytes, outer: Label, expires: float | None) -> Head:
    """The head of the item that was described; `outer` is the label of what was stored in its place.

    Raises:
        Corrupt: that is no description.
    """
    try:
        tensors, extra, xxh3 = json.loads(description)
        label = replace(
            outer,
            tensors=tuple(Tensor(name, dtype, tuple(shape)) for name, dtype, shape in tensors),
            extra=tuple((name, value) for name, value in extra),
        )
        return Head(label, label.nbytes, xxh3, expires)
    except (ValueError, KeyError, TypeError) as error:
        raise Corrupt(f"unreadable description: {type(error).__name__}") from None
