"""The lightning indexer over pages: scores of every entry that a query sees, and the ids of the best.

Stands for `ops.index` (report section 2.3.1, equations 16 and 17) on a batch of sequences.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Int32

from . import indexer_xla
from .blocks import (
    Implementation,
    Ref,
    blocks,
    expect,
    interpreted,
    power_of_two,
    powers_of_two,
    split,
    triton,
    uses_pallas,
)
from .topk import TopKConfig, top_k_ids

ROWS = ("float32", "bfloat16")
LEAST = 16
"""Triton multiplies no matrices that are narrower."""


@dataclass(frozen=True, slots=True)
class IndexerConfig:
    """Block sizes of the indexer, powers of two. Nothing is summed over entries, so no score depends on them.

    Attributes:
        keys: entries that a program scores.
        xla_keys: entries that XLA's version scores at a time.
        queries: of one sequence, that a program scores them for, one after the other, against the same keys.
        num_warps, num_stages: of the scoring kernel.
        top_k: block sizes of the selection.
    """

    keys: int = 128
    xla_keys: int = 256
    queries: int = 8
    num_warps: int = 4
    num_stages: int = 2
    top_k: TopKConfig = field(default_factory=TopKConfig)

    def __post_init__(self) -> None:
        powers_of_two(keys=self.keys, queries=self.queries, num_warps=self.num_warps)


def default_config(*dtypes: DTypeLike) -> IndexerConfig:
    """Blocks that compile for sm_90a without spilling registers, at 64 heads of 128 channels.

    float32 has no tensor cores at full precision: its products are made in registers, so blocks are small.
    """
    if all(jnp.dtype(dtype) == jnp.bfloat16 for dtype in dtypes):
        return IndexerConfig()
    return IndexerConfig(keys=16, num_warps=8)


@partial(jax.jit, static_argnames=("implementation", "config", "interpret"))
def index_scores(
    q: Float[Array, "b t h d"],
    pages: Float[Array, "pages rows d"],
    table: Int32[Array, "b max"],
    weight: Float32[Array, "b t h"],
    counts: Int32[Array, "b t"],
    *,
    implementation: Implementation = "pallas",
    config: IndexerConfig | None = None,
    interpret: bool | None = None,
) -> Float32[Array, "b t n"]:
    """score[b, t, i] = sum over heads of weight[b, t, h] * ReLU(q[b, t, h] . key i), -inf where not visible.

    Entry i of a sequence lies in row i % rows of page table[b, i // rows]; query t sees those below
    counts[b, t] whose page exists. What it does not see influences nothing, NaN included; -0 is +0;
    n = max * rows. Two bfloat16 operands are multiplied as such, with float32 sums;
    otherwise both are float32, at full precision.

    Floor, a query: bytes of the keys it sees (256 each in bfloat16 with d = 128) and 4 n written; 2 h d
    operations a key.

    Raises:
        ValueError: shapes or dtypes that do not fit.
    """
    _check(q, pages, table, weight, counts)
    config = config or default_config(q.dtype, pages.dtype)
    if not uses_pallas(implementation):
        return indexer_xla.index_scores(q, pages, table, weight, counts, key_block=config.xla_keys)
    batch, tokens, heads, dim = q.shape
    count = table.shape[1] * pages.shape[1]
    if not q.size or not count or not pages.shape[0]:
        return jnp.full((batch, tokens, count), -jnp.inf, jnp.float32)
    kernel = partial(
        _scores, count=count, queries=config.queries, keys=config.keys,
        padded_heads=power_of_two(heads, LEAST), padded_dim=power_of_two(dim, LEAST),
    )  # fmt: skip
    return pl.pallas_call(
        kernel,
        grid=(blocks(count, config.keys), blocks(tokens, config.queries), batch),
        out_shape=jax.ShapeDtypeStruct((batch, tokens, count), jnp.float32),
        compiler_params=triton(config.num_warps, config.num_stages),
        interpret=interpreted(interpret),
        name="index_scores",
    )(q, pages, table, weight, counts)


@partial(jax.jit, static_argnames=("top_k", "implementation", "config", "interpret"))
def select(
    q: Float[Array, "b t h d"],
    pages: Float[Array, "pages rows d"],
    table: Int32[Array, "b max"],
    weight: Float32[Array, "b t h"],
    counts: Int32[Array, "b t"],
    *,
    top_k: int,
    implementation: Implementation = "pallas",
    config: IndexerConfig | None = None,
    interpret: bool | None = None,
) -> Int32[Array, "b t {top_k}"]:
    """The ids of the `top_k` best entries that each query sees: `index_scores`, then `top_k_ids`.

    Best first, ties to the lowest id, NaN never, -1 where fewer are visible. The scores go through memory:
    4 bytes a key, next to the 256 of the key itself.

    Raises:
        ValueError: shapes or dtypes that do not fit, or a `top_k` below 1.
    """
    scores = index_scores(
        q, pages, table, weight, counts, implementation=implementation, config=config, interpret=interpret
    )
    return top_k_ids(
        scores,
        top_k=top_k,
        implementation=implementation,
        config=config and config.top_k,
        interpret=interpret,
    )


def _check(q: Array, pages: Array, table: Array, weight: Array, counts: Array) -> None:
    expect("q", q, ("b", "t", "h", "d"), *ROWS)
    batch, tokens, heads, dim = q.shape
    expect("pages", pages, ("pages", "rows", dim), *ROWS)
    expect("table", table, (batch, "max"), "int32")
    expect("weight", weight, (batch, tokens, heads), "float32")
    expect("counts", counts, (batch, tokens), "int32")


def _scores(
    q_ref: Ref, pages_ref: Ref, table_ref: Ref, weight_ref: Ref, counts_ref: Ref, out_ref: Ref,
    *, count: int, queries: int, keys: int, padded_heads: int, padded_dim: int,
) -> None:  # fmt: skip
    """A block of keys, read once, against a block of queries, one after the other."""
    _, tokens, heads, dim = q_ref.shape
    sequence = pl.program_id(2)
    first = pl.program_id(1) * queries
    last = jnp.minimum(first + queries, tokens)  # a bound that is not known: the same loop for any tokens
    start = pl.program_id(0) * keys
    entry = start + jnp.arange(keys, dtype=jnp.int32)
    own = first + jnp.arange(queries, dtype=jnp.int32)
    most = jnp.max(plt.load(counts_ref.at[sequence, own], mask=own < tokens, other=0))

    def store(query: Array, score: Array) -> None:
        plt.store(out_ref.at[sequence, query, entry], score, mask=entry < count)

    @pl.when(start >= most)
    def nothing_seen() -> None:
        nothing = jnp.full((keys,), -jnp.inf, jnp.float32)
        lax.fori_loop(first, last, lambda query, _: store(query, nothing), None)

    @pl.when(start < most)
    def score_block() -> None:
        head = jnp.arange(padded_heads, dtype=jnp.int32)
        channel = jnp.arange(padded_dim, dtype=jnp.int32)[None, :]
        place, row = split(entry, pages_ref.shape[1])
        page = plt.load(table_ref.at[sequence, place], mask=entry < jnp.minimum(most, count), other=-1)
        exists = (page >= 0) & (page < pages_ref.shape[0])
        inside = exists[:, None] & (channel < dim)
        block = plt.load(pages_ref.at[page[:, None], row[:, None], channel], mask=inside, other=0.0)

        def score_query(query: Array, _: None) -> None:
            inside = (head < heads)[:, None] & (channel < dim)
            q = plt.load(q_ref.at[sequence, query, head[:, None], channel], mask=inside, other=0.0)
            weight = plt.load(weight_ref.at[sequence, query, head], mask=head < heads, other=0.0)
            dots = _products(q, block)
            # Not a maximum: on a GPU that of NaN and 0 is 0.
            parts = jnp.where(dots < 0.0, 0.0, dots) * weight[:, None]
            score = jnp.sum(jnp.where((head < heads)[:, None], parts, 0.0), axis=0)
            score = jnp.where(score == 0.0, 0.0, score)  # a sum of -0 is -0 in Triton, +0 in XLA
            store(query, jnp.where(exists & (entry < counts_ref[sequence, query]), score, -jnp.inf))

        lax.fori_loop(first, last, score_query, None)


def _products(q: Array, keys: Array) -> Array:
    """float32 [heads, keys]."""
    same = q.dtype == keys.dtype == jnp.bfloat16
    if not same:
        q, keys = q.astype(jnp.float32), keys.astype(jnp.float32)
    return lax.dot_general(
        q, keys, (((1,), (1,)), ((), ())),
        precision=None if same else lax.Precision.HIGHEST,  # by default Triton rounds float32 to TF32
        preferred_element_type=jnp.float32,
    )  # fmt: skip
