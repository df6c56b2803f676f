"""A deterministic top-k inside kernels: the ids of the k best scores, ties to the lowest id.

Two kernels. `_narrow` takes a chunk of a row and keeps its k best in the order of their ids: it finds the
k-th best key bit by bit (32 counts over keys that stay in registers), then compacts by a running count. It is
run again on what is left until one chunk is. `_rank` sorts the last k: the place of a candidate is the number
of those that come before it. Both work on integers and write every element once, so the result depends on
nothing but the scores.

Cost: a score is read once and compared 32 times, a candidate of the last k with all k. 65,536 scores and
k = 512 are narrowed in three launches of 16, 2 and 1 programs, then ranked by 16.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float32, Int32

from .blocks import (
    Implementation,
    Ref,
    blocks,
    expect,
    interpreted,
    power_of_two,
    powers_of_two,
    triton,
    uses_pallas,
)
from .grids import INFINITY

UNUSABLE = -(2**31)
"""The key of what is never chosen: below that of every finite score."""


@dataclass(frozen=True, slots=True)
class TopKConfig:
    """Block sizes of the top-k, powers of two. No choice changes the result.

    Attributes:
        chunk: scores that one program narrows to k; at least twice k is taken. 4,096 in 8 warps are 16
            registers a thread. Beyond k = 2,048 a chunk no longer fits into registers.
        ranked, against: candidates that a program ranks, and with how many it compares them at a time.
        num_warps: of the narrowing kernel; ranking takes 4.
    """

    chunk: int = 4096
    ranked: int = 32
    against: int = 128
    num_warps: int = 8

    def __post_init__(self) -> None:
        powers_of_two(chunk=self.chunk, ranked=self.ranked, against=self.against, num_warps=self.num_warps)


@partial(jax.jit, static_argnames=("top_k", "implementation", "config", "interpret"))
def top_k_ids(
    scores: Float32[Array, "b t n"],
    *,
    top_k: int,
    implementation: Implementation = "pallas",
    config: TopKConfig | None = None,
    interpret: bool | None = None,
) -> Int32[Array, "b t {top_k}"]:
    """`ops.index.merge_top_k` on whole rows: ids of the best scores, best first, -1 where there are fewer.

    Ties go to the lowest id; -0 and +0 tie; NaN and -inf are never chosen. Any n, k above n included.
    Floor: 4 bytes a score. Each narrowing writes, and the next reads, 8 k bytes for each `chunk`.

    Raises:
        ValueError: scores that are no float32 [b, t, n], or a `top_k` below 1.
    """
    expect("scores", scores, ("b", "t", "n"), "float32")
    if top_k < 1:
        raise ValueError(f"{top_k=} must be at least 1")
    batch, queries, count = scores.shape
    keep = min(top_k, count)
    rows = scores.reshape(batch * queries, count)
    if not rows.size:
        return jnp.full((batch, queries, top_k), -1, jnp.int32)
    if uses_pallas(implementation):
        ids = _top_k_pallas(rows, keep, config or TopKConfig(), interpreted(interpret))
    else:
        keys, found = lax.top_k(order_keys(rows), keep)
        ids = jnp.where(keys == UNUSABLE, -1, found)
    return jnp.pad(ids, [(0, 0), (0, top_k - keep)], constant_values=-1).reshape(batch, queries, top_k)


def order_keys(scores: Float32[Array, "*n"]) -> Int32[Array, "*n"]:
    """Integers in the order of the scores, 0 for both zeros, `UNUSABLE` for NaN and -inf."""
    bits = lax.bitcast_convert_type(scores, jnp.int32)
    magnitude = bits & 0x7FFFFFFF
    keys = jnp.where(bits < 0, -magnitude, magnitude)
    return jnp.where((magnitude > INFINITY) | (keys == -INFINITY), UNUSABLE, keys)


def _top_k_pallas(scores: Array, keep: int, config: TopKConfig, interpret: bool) -> Array:
    """int32 [rows, keep] of float32 [rows, n], n at least keep and both at least 1."""
    rows, count = scores.shape
    arrays: tuple[Array, ...] = (scores,)  # the first time, ids are places
    while count > keep:
        chunk = min(power_of_two(config.chunk, 2 * keep), power_of_two(count))
        parts = blocks(count, chunk)
        shape = (rows, parts * keep)
        arrays = pl.pallas_call(
            partial(_narrow, count=count, chunk=chunk, keep=keep),
            grid=(rows, parts),
            out_shape=(jax.ShapeDtypeStruct(shape, jnp.float32), jax.ShapeDtypeStruct(shape, jnp.int32)),
            compiler_params=triton(config.num_warps),
            interpret=interpret,
            name="top_k_narrow",
        )(*arrays)
        count = parts * keep
    ranked, against = (min(size, power_of_two(keep)) for size in (config.ranked, config.against))
    return pl.pallas_call(
        partial(_rank, count=keep, ranked=ranked, against=against),
        grid=(rows, blocks(keep, ranked)),
        out_shape=jax.ShapeDtypeStruct((rows, keep), jnp.int32),
        compiler_params=triton(4),
        interpret=interpret,
        name="top_k_rank",
    )(*arrays)


def _narrow(scores_ref: Ref, *refs: Ref, count: int, chunk: int, keep: int) -> None:
    """The `keep` best of a chunk, in the order of their ids, with what is unusable where there are fewer."""
    *ids_ref, out_scores_ref, out_ids_ref = refs
    row, part = pl.program_id(0), pl.program_id(1)
    at = part * chunk + jnp.arange(chunk, dtype=jnp.int32)
    inside = at < count
    scores = plt.load(scores_ref.at[row, at], mask=inside, other=-jnp.inf)
    keys = order_keys(scores)
    ids = plt.load(ids_ref[0].at[row, at], mask=inside, other=-1) if ids_ref else at

    def settle_bit(step: Array, threshold: Array) -> Array:
        """Keys are signed: the highest bit is set in `UNUSABLE` and raises it when cleared."""
        higher = threshold ^ lax.shift_left(jnp.int32(1), jnp.int32(31) - step)
        return jnp.where(_count(keys >= higher) >= keep, higher, threshold)

    threshold = lax.fori_loop(jnp.int32(0), jnp.int32(32), settle_bit, jnp.int32(UNUSABLE))
    above, equal = keys > threshold, keys == threshold
    taken = above | (equal & (jnp.cumsum(equal.astype(jnp.int32)) <= keep - _count(above)))
    place = part * keep + jnp.cumsum(taken.astype(jnp.int32)) - 1
    place = jnp.where(taken, place, pl.num_programs(1) * keep)  # no lane that is masked off shares a place
    plt.store(out_scores_ref.at[row, place], scores, mask=taken)
    plt.store(out_ids_ref.at[row, place], jnp.where(keys == UNUSABLE, -1, ids), mask=taken)


def _rank(scores_ref: Ref, *refs: Ref, count: int, ranked: int, against: int) -> None:
    """Puts each candidate where the number of those before it says: higher keys, then lower ids."""
    *ids_ref, out_ref = refs
    row = pl.program_id(0)

    def load(at: Array) -> Array:
        return order_keys(plt.load(scores_ref.at[row, at], mask=at < count, other=-jnp.inf))

    at = pl.program_id(1) * ranked + jnp.arange(ranked, dtype=jnp.int32)
    keys = load(at)
    ids = plt.load(ids_ref[0].at[row, at], mask=at < count, other=-1) if ids_ref else at

    def compare(step: Array, before: Array) -> Array:
        other = step * against + jnp.arange(against, dtype=jnp.int32)
        others = load(other)
        first = (others[None, :] == keys[:, None]) & (other[None, :] < at[:, None])
        return before + jnp.sum(((others[None, :] > keys[:, None]) | first).astype(jnp.int32), axis=1)

    place = lax.fori_loop(0, blocks(count, against), compare, jnp.zeros((ranked,), jnp.int32))
    place = jnp.where(at < count, place, count)
    plt.store(out_ref.at[row, place], jnp.where(keys == UNUSABLE, -1, ids), mask=at < count)


def _count(flags: Array) -> Array:
    return jnp.sum(flags.astype(jnp.int32))
