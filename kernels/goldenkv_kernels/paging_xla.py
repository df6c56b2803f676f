"""Moving pages in plain XLA, on unsigned integers [pages, elements]."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Int32


def gather_pages(pool: Array, pages: Int32[Array, " n"]) -> Array:
    """[n, elements]; zeros for numbers out of range."""
    exists = (pages >= 0) & (pages < pool.shape[0])
    return jnp.where(exists[:, None], pool[jnp.where(exists, pages, 0)], 0)


def scatter_pages(pool: Array, pages: Int32[Array, " n"], rows: Array) -> Array:
    """The pool with the rows of the numbers in range; a negative index would count from the end."""
    target = jnp.where(pages < 0, pool.shape[0], pages)
    return pool.at[target].set(rows, mode="drop")
