"""A case: one kernel at one size, how to call it, what it must give, and how far off it may be."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import numpy as np

from .inputs import Arrays


@dataclass(frozen=True, slots=True)
class Tolerance:
    """How far a result may be from its float64 reference: absolute + relative * |reference|.

    Attributes:
        name: what it is for.
        reason: why not less.
        absolute, relative: 0 for both means the same bits.
        share: the part of all elements that may be further off: values so close to a boundary between two
            roundings that float32 falls to the other side.
    """

    name: str
    reason: str
    absolute: float = 0.0
    relative: float = 0.0
    share: float = 0.0

    @property
    def exact(self) -> bool:
        """Results must have the bits of the reference."""
        return not self.absolute and not self.relative


@dataclass(frozen=True, slots=True)
class Case:
    """One kernel at one size.

    Attributes:
        kernel: the public function's name.
        name: of the case, unique for the kernel.
        function: takes the arrays by name, `options`, and `implementation` and `interpret`.
        inputs: makes the arrays.
        expected: takes the arrays by name and returns what `function` does: in float64, or with exact bits.
        tolerance: how far apart the two may be.
        options: arguments that are not arrays.
        compiled: whether this size is one that is compiled for a GPU and has a row in the table.
    """

    kernel: str
    name: str
    function: Callable[..., Any]
    inputs: Callable[[np.random.Generator], Arrays]
    expected: Callable[..., Any]
    tolerance: Tolerance
    options: Mapping[str, Any] = field(default_factory=dict)
    compiled: bool = False

    @property
    def id(self) -> str:
        """Kernel and name."""
        return f"{self.kernel}: {self.name}"

    def arrays(self, seed: int = 0) -> Arrays:
        """Inputs that the seed decides."""
        return self.inputs(np.random.default_rng(seed))

    def bound(self, implementation: str = "pallas", interpret: bool | None = None) -> Callable[[Arrays], Any]:
        """The function of the arrays alone."""
        call = partial(self.function, **self.options, implementation=implementation, interpret=interpret)
        return lambda arrays: call(**arrays)


@dataclass(frozen=True, slots=True)
class Distance:
    """How far a result is from its reference.

    Attributes:
        error: the largest absolute difference, of elements that count: see `Tolerance.share`.
        allowed: at that element.
        problem: what is wrong; empty if nothing is.
    """

    error: float
    allowed: float
    problem: str = ""


def distance(got: Any, want: Any, tolerance: Tolerance) -> Distance:
    """Compares trees of arrays; the worst array counts."""
    results, references = jax.tree.leaves(got), jax.tree.leaves(want)
    if len(results) != len(references):
        return Distance(np.inf, 0.0, f"{len(results)} arrays, expected {len(references)}")
    found = [
        _distance(np.asarray(g), np.asarray(w), tolerance) for g, w in zip(results, references, strict=True)
    ]
    return max(found, key=lambda d: (bool(d.problem), d.error - d.allowed))


def _distance(got: np.ndarray, want: np.ndarray, tolerance: Tolerance) -> Distance:
    if got.shape != want.shape:
        return Distance(np.inf, 0.0, f"shape {list(got.shape)}, expected {list(want.shape)}")
    if not want.size:
        return Distance(0.0, 0.0)
    if tolerance.exact:
        if got.dtype != want.dtype:
            return Distance(np.inf, 0.0, f"dtype {got.dtype.name}, expected {want.dtype.name}")
        wrong = (_bytes(got) != _bytes(want)).any(axis=-1)
        return Distance(0.0, 0.0, _first(got, want, wrong) if wrong.any() else "")
    wide, want = got.astype(np.float64), want.astype(np.float64)
    finite = np.isfinite(want)
    same = (wide == want) | (np.isnan(wide) & np.isnan(want))
    broken = ~same & ~(finite & np.isfinite(wide))
    if broken.any():
        return Distance(np.inf, 0.0, _first(wide, want, broken))
    size = np.where(finite, want, 0.0)
    error = np.where(same, 0.0, np.abs(np.where(finite, wide, 0.0) - size))
    allowed = tolerance.absolute + tolerance.relative * np.abs(size)
    over = error > allowed
    problem = _first(wide, want, over) if over.mean() > tolerance.share else ""
    counted = error - allowed if problem else np.where(over, -np.inf, error - allowed)
    worst = np.unravel_index(np.argmax(counted), counted.shape)
    return Distance(float(error[worst]), float(allowed[worst]), problem)


def _bytes(x: np.ndarray) -> np.ndarray:
    """uint8 [*shape, itemsize]."""
    return np.ascontiguousarray(x).reshape(-1).view(np.uint8).reshape(*x.shape, x.dtype.itemsize)


def _first(got: np.ndarray, want: np.ndarray, wrong: np.ndarray) -> str:
    at = tuple(int(i) for i in np.argwhere(wrong)[0])
    return f"{int(wrong.sum())} of {wrong.size} elements, the first at {list(at)}: {got[at]} for {want[at]}"
