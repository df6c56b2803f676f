"""Residuals of frames as segments of bytes, and whole streams of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from .entropy import Entropy


def cut(block: np.ndarray) -> Iterator[list[np.ndarray]]:
    """For each group the segments of its residuals: the bytes of each place in an element, for keyframes
    and then for the other frames.

    Args:
        block: unsigned [groups, rows, channels].
    """
    groups, rows, channels = block.shape
    size = block.dtype.itemsize
    data = np.ascontiguousarray(block).view(np.uint8).reshape(groups, rows, channels, size)
    planes = np.ascontiguousarray(data.transpose(0, 3, 1, 2))
    for group in planes:
        yield [p[:1].ravel() for p in group] + [p[1:].ravel() for p in group]


def sizes(rows: int, channels: int, itemsize: int) -> list[int]:
    """Bytes of the segments that `cut` makes of a group."""
    keys = min(rows, 1)
    return [keys * channels] * itemsize + [(rows - keys) * channels] * itemsize


def join(segments: list[np.ndarray], rows: int, channels: int, dtype: np.dtype) -> np.ndarray:
    """The inverse of `cut` for one group: residuals [rows, channels] of an unsigned type."""
    size = dtype.itemsize
    planes = np.empty((rows, channels, size), np.uint8)
    for place in range(size):
        planes[:1, :, place] = segments[place].reshape(-1, channels) if channels else 0
        planes[1:, :, place] = segments[size + place].reshape(-1, channels) if channels else 0
    return planes.reshape(rows, channels * size).view(dtype)


def coded(groups: Iterable[list[np.ndarray]], entropy: Entropy) -> tuple[bytes, list[bytes]]:
    """The model, and every group coded with it."""
    found = list(groups)
    kinds = [np.concatenate(kind) for kind in zip(*found, strict=True)]
    model = entropy.fit(kinds)
    coder = entropy.coder(model)
    return model, [coder.encode(group) for group in found]
