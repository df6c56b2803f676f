"""I, P and B frames over rows, as in video codecs: which row is predicted from which.

Rows are cut into *groups* of `distance` rows. The first of each is a keyframe (I): it is predicted from
nothing, so that a group can be decoded alone. The others are predicted from rows of their group that were
decoded before:

* P: each from the row before it.
* B: the last from the first; then the middle of every gap from both of its ends, until no gap is left.

With a distance of 1 every row is a keyframe.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

FARTHEST = 1 << 16
"""Rows of a group, at most."""


_BATCH = 1 << 18
"""Values that are worked on at once, so that what they take besides stays small."""


class Batch(NamedTuple):
    """Groups of the same size: the number of the first, how many, and rows of each."""

    first: int
    groups: int
    rows: int


class Step(NamedTuple):
    """Frames that are coded at once: indices within the group, [frames] each.

    Attributes:
        rows: which.
        before, after: what they are predicted from; `before` is None for a keyframe, `after` unless B.
    """

    rows: np.ndarray
    before: np.ndarray | None = None
    after: np.ndarray | None = None


@dataclass(frozen=True, slots=True)
class Frames:
    """How rows become frames.

    Attributes:
        distance: of keyframes, in rows: 1 .. `FARTHEST`.
        kind: of the frames between them, "P" or "B".
    """

    distance: int = 16
    kind: str = "P"

    def __post_init__(self) -> None:
        if not 1 <= self.distance <= FARTHEST:
            raise ValueError(f"distance={self.distance} must lie in 1 .. {FARTHEST}")
        if self.kind not in ("P", "B"):
            raise ValueError(f"kind={self.kind!r} must be 'P' or 'B'")

    @property
    def name(self) -> str:
        """For the names of codecs."""
        return f"{self.kind if self.distance > 1 else 'I'} G={self.distance}"

    def batches(self, rows: int, channels: int) -> Iterator[Batch]:
        """Groups that are coded together, in order; the one that is not full is alone."""
        full = rows // self.distance
        most = max(1, _BATCH // max(1, self.distance * channels))
        for first in range(0, full, most):
            yield Batch(first, min(most, full - first), self.distance)
        if rows % self.distance:
            yield Batch(full, 1, rows % self.distance)

    def blocks(self, rows: np.ndarray) -> Iterator[np.ndarray]:
        """The batches of rows [rows, channels], as views [groups, rows of each, channels]."""
        channels = rows.shape[1]
        for first, groups, each in self.batches(len(rows), channels):
            start = first * self.distance
            yield rows[start : start + groups * each].reshape(groups, each, channels)

    def steps(self, rows: int) -> tuple[Step, ...]:
        """The order in which the frames of a group of so many rows are coded."""
        return _steps(rows, self.kind)


@lru_cache(maxsize=256)
def _steps(rows: int, kind: str) -> tuple[Step, ...]:
    found = [Step(np.arange(min(rows, 1)))]
    if kind == "P":
        indices = np.arange(rows)
        found += [Step(indices[i : i + 1], indices[i - 1 : i]) for i in range(1, rows)]
    elif rows > 1:
        found.append(Step(np.array([rows - 1]), np.array([0])))
        gaps = [(0, rows - 1)]
        while gaps := [(low, high) for low, high in gaps if high - low > 1]:
            middles = [(low + high) // 2 for low, high in gaps]
            lows, highs = zip(*gaps, strict=True)
            found.append(Step(np.array(middles), np.array(lows), np.array(highs)))
            gaps = [gap for (a, b), m in zip(gaps, middles, strict=True) for gap in ((a, m), (m, b))]
    return tuple(found)


def predict(
    block: np.ndarray,
    step: Step,
    widen: Callable[[np.ndarray], np.ndarray],
    mean: Callable[[np.ndarray, np.ndarray], np.ndarray],
) -> np.ndarray:
    """What the frames of a step are expected to be, [groups, frames, channels].

    Args:
        block: [groups, rows, channels], of which the rows that the step refers to are there.
        step: which frames.
        widen: rows to the arithmetic of the codec.
        mean: of two such rows.
    """
    if step.before is None:
        return widen(np.zeros((len(block), len(step.rows), block.shape[2]), block.dtype))
    before = widen(block[:, step.before])
    return before if step.after is None else mean(before, widen(block[:, step.after]))
