"""Attention over paged entries and the window: `sparse_attention` (CSA) and `dense_attention` (HCA).

Both stand for the ops of `goldenkv.ops.attend` on a leading batch axis: one softmax over the window's rows
and the entries of a sequence, with sinks, scale d^-1/2 (report sections 2.3.1 to 2.3.3, equations 19, 26 and
27).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Float32, Int32, UInt8

from goldenkv.state.layouts import PageLayout

from .attention_call import Call, check
from .attention_kernel import Plan, attend_kernel, merge_kernel
from .attention_xla import attend
from .blocks import Implementation, addressable, blocks, expect, interpreted, triton, uses_pallas
from .rows import NativeRows, tile_side


@dataclass(frozen=True, slots=True)
class AttentionConfig:
    """How the kernels cut their work. Every field but warps and stages decides bits.

    Attributes:
        head_block: heads a program, a power of two from 16 on; fewer heads get the power of two above them.
        key_block: keys folded in at a time, a power of two from 16 on.
        keys_per_split: entries that one program folds in, a multiple of `key_block`; a second kernel adds up
            the splits of a query. None: one program over all keys of a query.
        warps: of a program, 32 threads each.
        stages: blocks of keys in flight, the one in use included.

    `keys_per_split` must not follow the batch, or bits would follow it too. None is the default: the engine
    runs whole tiles of queries, enough programs for a GPU, and every split writes and reads h * d float32
    sums (128 KiB for 64 heads of 512), as much as 128 bfloat16 keys each time. Whoever decodes few sequences
    at a time (below some 64, on 132 processors) sets it for all calls: say 128 for CSA, 512 for HCA. Neither
    was timed.
    """

    head_block: int
    key_block: int
    keys_per_split: int | None = None
    warps: int = 8
    stages: int = 2

    def __post_init__(self) -> None:
        for name in ("head_block", "key_block"):
            value = getattr(self, name)
            if value != tile_side(value):
                raise ValueError(f"{name}={value} must be a power of two, 16 or more")
        if self.keys_per_split is not None and (
            self.keys_per_split < 1 or self.keys_per_split % self.key_block
        ):
            raise ValueError(
                f"keys_per_split={self.keys_per_split} must be a positive multiple of {self.key_block=}"
            )


def default_config(dtype: DTypeLike, native: bool = False) -> AttentionConfig:
    """Blocks that compile for sm_90a without spilling registers, at 64 heads of 512 channels.

    Decoding native rows costs registers, so that only half as many heads fit.

    Args:
        dtype: of the queries.
        native: the pages are native.
    """
    if jnp.dtype(dtype) != jnp.bfloat16:
        return AttentionConfig(head_block=16, key_block=16, stages=1)
    if native:
        return AttentionConfig(head_block=32, key_block=16)
    return AttentionConfig(head_block=64, key_block=32, stages=3)


@partial(jax.jit, static_argnames=("layout", "implementation", "config", "interpret"))
def sparse_attention(
    q: Float[Array, "b t h d"],
    window: Float[Array, "b w d"],
    window_visible: Bool[Array, "b t w"],
    pages: Float[Array, "pages rows d"] | UInt8[Array, "pages nbytes"],
    table: Int32[Array, "b n"],
    ids: Int32[Array, "b t k"],
    sinks: Float32[Array, " h"],
    *,
    layout: PageLayout | None = None,
    implementation: Implementation = "pallas",
    config: AttentionConfig | None = None,
    interpret: bool | None = None,
) -> Float32[Array, "b t h d"]:
    """Attention to the window and the selected entries: `goldenkv.ops.attend.csa_attention` on pages.

    A query's bits depend on what it sees, on the places of its rows in `window` and of its ids in `ids`, and
    on `config`; not on other queries, the batch, the pool, or the pages that hold its entries. (In plain XLA
    they may.) bfloat16 factors are multiplied as they are and summed in float32, and the softmax's weights
    are rounded to bfloat16 for the second product, as production kernels do; float32 is never rounded.

    Floor: a query reads its visible window rows and its entries, each once for every `head_block` heads, and
    takes 4 h d operations a row.

    Args:
        q: float32 or bfloat16, after norm and RoPE.
        window: in the dtype of `q`. Rows that no query sees may hold anything.
        window_visible: which query sees which row.
        pages: in the dtype of `q`, or native pages with their layout.
        table: page i of a sequence holds its entries i * rows .. (i + 1) * rows - 1.
        ids: entries of the sequence. -1 is none, and so is what the table or the pool does not hold: it is
            never read.
        sinks: added to the denominator only; -inf is no sink.
        layout: of native pages, `page_layout("fp8", rows, d, rope)`.
        implementation: "pallas", or "xla" for the same in plain XLA.
        config: None for `default_config`.
        interpret: run the kernel without a GPU. None: wherever the default backend is no GPU.

    Returns:
        Still rotated. 0 where a query sees nothing.

    Raises:
        ValueError: arguments that do not fit together, or native pages of over 2 and up to 4 GiB.
    """
    rows = check(q, window, window_visible, pages, table, sinks, layout)
    expect("ids", ids, (*q.shape[:2], "k"), "int32")
    order = jnp.arange(1, ids.shape[2] + 1, dtype=jnp.int32)
    counts = jnp.max(jnp.where(ids >= 0, order, 0), axis=2, initial=0)
    call = Call(q, window, window_visible, pages, table, ids, counts, sinks, rows)
    return _launch(call, config, interpret) if uses_pallas(implementation) else attend(call)


@partial(jax.jit, static_argnames=("layout", "implementation", "config", "interpret"))
def dense_attention(
    q: Float[Array, "b t h d"],
    window: Float[Array, "b w d"],
    window_visible: Bool[Array, "b t w"],
    pages: Float[Array, "pages rows d"] | UInt8[Array, "pages nbytes"],
    table: Int32[Array, "b n"],
    counts: Int32[Array, "b t"],
    sinks: Float32[Array, " h"],
    *,
    layout: PageLayout | None = None,
    implementation: Implementation = "pallas",
    config: AttentionConfig | None = None,
    interpret: bool | None = None,
) -> Float32[Array, "b t h d"]:
    """Attention to the window and all visible entries: `goldenkv.ops.attend.hca_attention` on pages.

    Everything but `counts` is as in `sparse_attention`. A query's bits do not depend on entries that it does
    not see, or on the length of the table.

    Args:
        counts: a query sees the entries 0 .. counts - 1. A negative count is 0; entries that the table or the
            pool does not hold are not seen.

    Raises:
        ValueError: as `sparse_attention`.
    """
    rows = check(q, window, window_visible, pages, table, sinks, layout)
    expect("counts", counts, q.shape[:2], "int32")
    counts = jnp.clip(counts, 0, table.shape[1] * rows.rows)
    call = Call(q, window, window_visible, pages, table, None, counts, sinks, rows)
    return _launch(call, config, interpret) if uses_pallas(implementation) else attend(call)


def _launch(call: Call, config: AttentionConfig | None, interpret: bool | None) -> Array:
    """Runs the kernels."""
    addressable("pages", call.pages)
    b, t, h, d = call.q.shape
    result = jax.ShapeDtypeStruct(call.q.shape, jnp.float32)
    if not b or not t:
        return jnp.zeros(result.shape, result.dtype)
    config = config or default_config(call.q.dtype, isinstance(call.rows, NativeRows))
    plan = Plan(call.rows, min(config.head_block, tile_side(h)), config.key_block, config.keys_per_split)
    visible = _not_empty(call.window_visible, 2).astype(jnp.int32)
    table = _not_empty(call.table, 1, fill=-1)
    reach = _reach(visible, call.counts, config.key_block)
    operands = [call.q, _not_empty(call.window, 1), visible, call.pages, table, reach, call.sinks]
    entries = table.shape[1] * call.rows.rows
    if call.ids is not None:
        operands.append(_not_empty(call.ids, 2, fill=-1))
        entries = operands[-1].shape[2]

    splits, out = 1, [result]
    if config.keys_per_split is not None:
        splits = 1 + blocks(entries, config.keys_per_split)
        shapes = ((b, t, splits, h), (b, t, splits, h), (b, t, splits, h, d))
        out = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    found = pl.pallas_call(
        partial(attend_kernel, plan=plan, sparse=call.ids is not None),
        out_shape=out,
        grid=(b, t, blocks(h, plan.head_block), splits),
        interpret=interpreted(interpret),
        compiler_params=triton(config.warps, config.stages),
        name="dense_attention" if call.ids is None else "sparse_attention",
    )(*operands)
    if config.keys_per_split is None:
        return found[0]
    return pl.pallas_call(
        partial(merge_kernel, keys_per_split=config.keys_per_split),
        out_shape=result,
        grid=(b, t, h),
        interpret=interpreted(interpret),
        compiler_params=triton(num_warps=4),
        name="merge_attention",
    )(*found, reach, call.sinks)


def _reach(visible: Array, counts: Array, key_block: int) -> Array:
    """int32 [b, t, 3]: what each query reaches, see `attend_kernel`."""
    rows = jnp.arange(visible.shape[2], dtype=jnp.int32)
    first = jnp.min(jnp.where(visible != 0, rows, len(rows)), axis=2)
    stop = jnp.max(jnp.where(visible != 0, rows + 1, 0), axis=2)
    return jnp.stack([first // key_block, pl.cdiv(stop, key_block), counts], axis=2)


def _not_empty(x: Array, axis: int, fill: int = 0) -> Array:
    """`x`, or one element of `fill` along an axis that has none: a kernel takes no empty array."""
    if x.shape[axis]:
        return x
    return jnp.pad(x, [(0, int(i == axis)) for i in range(x.ndim)], constant_values=fill)
