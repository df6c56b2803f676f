"""How much of an H200 a kernel fills: programs that a processor holds at a time, and programs a call starts.

Nothing runs for it. What a processor holds follows from what the assembler says of a kernel, and what a call
starts from its grid.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import jax

from .compilation import Kernel
from .h200 import PROGRAMS, REGISTERS, RESERVED, SHARED, THREADS
from .machine import inner_jaxprs, kernel_name

WARP, QUARTERS = 32, 4
"""Threads of a warp, and parts of a processor, each with registers of its own."""

REGISTER_PIECE, SHARED_PIECE = 256, 128
"""Registers come to a warp in such pieces, and bytes of shared memory to a program."""


def held(kernel: Kernel) -> int:
    """Programs of a kernel that one processor holds at a time; 0 if it cannot hold one.

    Registers, shared memory, threads and the number of programs each set a limit; the least counts.
    """
    warps = _pieces(kernel.threads, WARP)
    registers = _pieces(kernel.registers * WARP, REGISTER_PIECE) * REGISTER_PIECE
    shared = _pieces(kernel.shared + RESERVED, SHARED_PIECE) * SHARED_PIECE
    by_registers = REGISTERS // QUARTERS // registers * QUARTERS // warps
    return min(PROGRAMS, THREADS // (warps * WARP), by_registers, SHARED // shared)


def programs(function: Callable, *args: Any) -> list[tuple[str, int]]:
    """The Pallas kernels of a call, in order, and how many programs each starts.

    Args:
        function: it is traced and not called.
        args: arrays, shapes with dtypes, or trees of them.
    """
    calls = pallas_calls(jax.make_jaxpr(function)(*args).jaxpr)
    return [(kernel_name(call), math.prod(call.params["grid_mapping"].grid)) for call in calls]


def pallas_calls(jaxpr: Any) -> Iterator[Any]:
    """The equations of a traced function that launch a kernel, those within loops and branches too."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "pallas_call":
            yield equation
        else:
            for inner in inner_jaxprs(equation):
                yield from pallas_calls(inner)


def _pieces(size: int, piece: int) -> int:
    return -(-size // piece)
