"""What the kernels share: block sizes, how they are launched, and the check of their arguments."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import triton as plt
from jaxtyping import Array

Implementation = Literal["pallas", "xla"]

Ref: TypeAlias = Any
"""A Pallas reference to an array, in a kernel."""


def power_of_two(size: int, least: int = 1) -> int:
    """The smallest power of two that is not below `size` or `least`: Triton has no other block sizes."""
    return 1 << (max(size, least) - 1).bit_length()


def blocks(size: int, block: int) -> int:
    """Blocks that cover `size`; the last can be ragged, so every load and store is masked."""
    return -(-size // block)


def split(numbers: Array, size: int) -> tuple[Array, Array]:
    """Quotient and remainder of int32 numbers that are not negative."""
    divisor = jnp.full_like(numbers, size)
    return lax.div(numbers, divisor), lax.rem(numbers, divisor)


def powers_of_two(**sizes: int) -> None:
    """Raises ValueError unless every size is a power of two: interpret mode would take any."""
    for name, size in sizes.items():
        if size < 1 or size & (size - 1):
            raise ValueError(f"{name}={size} must be a power of two")


def triton(num_warps: int, num_stages: int = 1) -> plt.CompilerParams:
    """Compiler parameters that choose Pallas's Triton backend, whichever is the default."""
    return plt.CompilerParams(num_warps=num_warps, num_stages=num_stages)


def interpreted(interpret: bool | None) -> bool:
    """None means: interpret wherever the default backend is no GPU."""
    return jax.default_backend() != "gpu" if interpret is None else interpret


def uses_pallas(implementation: str) -> bool:
    """True for "pallas", False for "xla", ValueError for anything else."""
    if implementation not in ("pallas", "xla"):
        raise ValueError(f"{implementation=} must be 'pallas' or 'xla'")
    return implementation == "pallas"


def addressable(name: str, array: Array | jax.ShapeDtypeStruct) -> None:
    """Raises ValueError for an array of bytes of 2 to 4 GiB: Triton's lowering would wrap its offsets.

    Up to 4 GiB it counts elements in 32 bits with a sign, beyond in 64.
    """
    if array.dtype.itemsize == 1 and 2**31 < array.size <= 2**32:
        raise ValueError(
            f"{name} of {array.size} bytes must have at most 2^31 or more than 2^32 of them for a kernel: "
            "split it, or use implementation='xla'"
        )


def expect(name: str, array: Array, shape: tuple[int | str, ...], *dtypes: str) -> None:
    """Raises ValueError unless `array` has one of the dtypes and this shape; a word stands for any size."""
    fits = len(shape) == array.ndim and all(
        isinstance(want, str) or want == size for want, size in zip(shape, array.shape, strict=True)
    )
    if not fits or array.dtype.name not in dtypes:
        wanted = f"{' or '.join(dtypes)} [{', '.join(map(str, shape))}]"
        raise ValueError(f"{name} must be {wanted}, got {array.dtype.name} {list(array.shape)}")
