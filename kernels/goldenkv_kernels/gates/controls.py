"""Kernels that are wrong on purpose. A gate that lets its control pass proves nothing.

What the bounds gate must catch here passes in interpret mode and is lowered without a word.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from .case import Case, Tolerance
from .inputs import Arrays

ROWS, CHANNELS, BLOCK = 10, 8, 4
SUM = Tolerance("float32 sum", "ten float32 numbers in another order", 1e-5)


@dataclass(frozen=True, slots=True)
class Control:
    """A case that one gate must refuse: "numerics", "lowering", "bounds" or "compiling"."""

    gate: str
    case: Case


def _launch(kernel: Callable, shape: tuple, grid: int, x: Any, interpret: bool, **options: Any) -> Any:
    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct(shape, x.dtype),
        grid=(grid,),
        interpret=interpret,
        compiler_params=plt.CompilerParams(num_warps=4),  # which chooses Triton
        **options,
    )(x)


def _sum(x_ref: Any, out_ref: Any, *, first: int, stop: int, how: str) -> None:
    """The sum of the rows 0 .. stop - 1, going through them in blocks from `first` on."""
    channels = jnp.arange(CHANNELS, dtype=jnp.int32)[None, :]

    def add(block: jax.Array, total: jax.Array) -> jax.Array:
        row = first + block * BLOCK + jnp.arange(BLOCK, dtype=jnp.int32)[:, None]
        wanted = (row >= 0) & (row < stop)
        if how == "masked":
            rows = plt.load(x_ref.at[row, channels], mask=wanted, other=0.0)
        elif how == "masked too late":
            rows = jnp.where(wanted, plt.load(x_ref.at[row, channels]), 0.0)
        else:
            rows = plt.load(x_ref.at[row, channels], mask=wanted) * wanted.astype(jnp.float32)
        return total + jnp.sum(rows, axis=0)

    blocks = pl.cdiv(stop - first, BLOCK)
    nothing = jnp.zeros((CHANNELS,), jnp.float32)
    out_ref[pl.program_id(0), :] = jax.lax.fori_loop(0, blocks, add, nothing)


def sum_rows(
    x: Any, *, first: int = 0, stop: int = ROWS, how: str = "masked", interpret: bool, **_: Any
) -> Any:
    """Each of two programs sums the rows of `x`: a sound kernel as it stands."""
    return _launch(partial(_sum, first=first, stop=stop, how=how), (2, CHANNELS), 2, x, interpret)


def _double(x_ref: Any, out_ref: Any) -> None:
    out_ref[...] = x_ref[...] * 2


def double(x: Any, *, block: int = BLOCK, one_place: bool = False, interpret: bool, **_: Any) -> Any:
    """Twice `x` by blocks of rows; with `one_place` every program writes to the first block."""
    rows = BLOCK if one_place else x.shape[0]
    specs = {
        "in_specs": [pl.BlockSpec((block, CHANNELS), lambda i: (i, 0))],
        "out_specs": pl.BlockSpec((block, CHANNELS), lambda i: (0 if one_place else i, 0)),
    }
    return _launch(_double, (rows, CHANNELS), pl.cdiv(x.shape[0], block), x, interpret, **specs)


def _spill(x_ref: Any, out_ref: Any) -> None:
    tile = x_ref[...]
    out_ref[...] = tile * jax.nn.softmax(tile, axis=0) + jax.nn.softmax(tile, axis=1)


def whole_tile(x: Any, *, interpret: bool, **_: Any) -> Any:
    """Softmaxes over a tile of 128 x 256 numbers in four warps: 256 a thread, which has 255 registers."""
    return _launch(_spill, x.shape, 1, x, interpret)


def sums(x: np.ndarray) -> np.ndarray:
    """What `sum_rows` gives."""
    return np.broadcast_to(x.astype(np.float64).sum(axis=0), (2, CHANNELS))


def doubled(x: np.ndarray) -> np.ndarray:
    """What `double` gives."""
    return 2.0 * x


def _control(
    gate: str,
    name: str,
    function: Callable,
    expected: Callable,
    rows: int = ROWS,
    columns: int = CHANNELS,
    **options: Any,
) -> Control:
    def make(rng: np.random.Generator) -> Arrays:
        return {"x": rng.normal(size=(rows, columns)).astype(np.float32)}

    return Control(gate, Case("control", name, function, make, expected, SUM, options))


CONTROLS = (
    _control("numerics", "leaves a row out", sum_rows, sums, stop=ROWS - 1),
    _control("lowering", "a block of 5 rows", double, doubled, block=5),
    _control("bounds", "reads rows behind the last", sum_rows, sums, how="masked too late"),
    _control("bounds", "reads row -1", sum_rows, sums, 8, first=-1, stop=8, how="masked too late"),
    _control("bounds", "counts on masked lanes", sum_rows, sums, how="times 0"),
    _control("bounds", "a ragged block", double, doubled),
    _control("bounds", "two write one block", double, lambda x: 2.0 * x[BLOCK:], 2 * BLOCK, one_place=True),
    _control("compiling", "256 numbers a thread", whole_tile, doubled, 128, 256),
)

CASES = tuple(control.case for control in CONTROLS)
"""Where `child` looks for those that are to be compiled."""
