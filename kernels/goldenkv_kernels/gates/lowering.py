"""The second gate: every kernel is lowered for CUDA, which needs no GPU and no CUDA.

It finds block sizes that are no power of two and primitives that the Triton lowering lacks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax import export

from .h200 import absent_device

TRITON_CALL = "__gpu$xla.gpu.triton"
"""The custom call that a Pallas kernel becomes."""


def lowered(function: Callable, *args: Any) -> int:
    """Lowers `function` for CUDA and counts the kernels in it.

    Args:
        function: it must not ask for interpret mode.
        args: arrays, shapes with dtypes, or trees of them.

    Raises:
        Exception: whatever the lowering says of a kernel that it cannot lower.
        ValueError: there is no kernel in it.
    """
    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), args)
    allowed = [export.DisabledSafetyCheck.custom_call(TRITON_CALL)]
    with absent_device():
        exported = export.export(jax.jit(function), platforms=["cuda"], disabled_checks=allowed)(*shapes)
    count = exported.mlir_module().count(TRITON_CALL)
    if not count:
        raise ValueError("lowered for CUDA, but it holds no Triton kernel")
    return count
