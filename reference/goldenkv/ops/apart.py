"""Keeping a computation out of the ones that use it."""

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

T = TypeVar("T")


def apart(when: Bool[Array, ""], compute: Callable[[], T]) -> T:
    """What `compute` returns, compiled as a computation of its own; zeros where `when` is false.

    XLA fuses a producer into the arithmetic that consumes it, but never across a branch. Where that matters:
    a gather from a pool, fused, compiles the pool's size into sums and changes their bits; a cosine, fused,
    is computed again for every head.

    Args:
        when: true wherever the result is used. It must depend on an input, or the branch is compiled away.
        compute: a function of nothing that returns arrays.
    """
    shapes = jax.eval_shape(compute)
    return jax.lax.cond(when, compute, lambda: jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes))
