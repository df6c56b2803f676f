"""Bit equality: unsigned views, never a tolerance."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .pool import Rows


@dataclass(frozen=True, slots=True)
class Difference:
    """How two states differ, over all names.

    Attributes:
        rows: rows compared.
        equal: rows with the same bits.
        first: the first name and row that differ, or None.
        by_name: for each name a mask of its rows, True where the bits are equal.
    """

    rows: int
    equal: int
    first: tuple[str, int] | None
    by_name: dict[str, np.ndarray]

    @property
    def same(self) -> bool:
        """True where every bit is equal."""
        return self.rows == self.equal


def unsigned(array: np.ndarray) -> np.ndarray:
    """The array's bits as unsigned integers of the same size."""
    return np.ascontiguousarray(array).view(np.dtype(f"u{array.dtype.itemsize}"))


def equal_rows(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """For each row of the first axis whether its bits are equal; other shapes or dtypes never are."""
    if left.shape != right.shape or left.dtype != right.dtype:
        return np.zeros(max(len(left), len(right)), bool)
    same = unsigned(left) == unsigned(right)
    return same.all(axis=tuple(range(1, same.ndim)))


def compare(left: Rows, right: Rows) -> Difference:
    """Compares two sets of named rows bit by bit. A name that only one has differs in every row."""
    by_name = {}
    for name in [*left, *(n for n in right if n not in left)]:
        if name in left and name in right:
            by_name[name] = equal_rows(left[name], right[name])
        else:
            by_name[name] = np.zeros(max(len((left if name in left else right)[name]), 1), bool)
    first = next(((n, int(np.argmin(ok))) for n, ok in by_name.items() if not ok.all()), None)
    return Difference(
        rows=sum(len(ok) for ok in by_name.values()),
        equal=int(sum(ok.sum() for ok in by_name.values())),
        first=first,
        by_name=by_name,
    )
