"""The compressor: raw rows of finished blocks become entries, with norm, RoPE and quantisation.

Stands for `ops.compress` (report section 2.3.1, equations 9 to 12, and 2.3.2, equations 20 to 23) and for
`ops.quant` after it. A small block is one program: all its rows and channels at once. A large one (128 rows
of 512 channels do not fit into registers) is pooled by columns, and a second kernel finishes the row, which
the norm needs whole.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float, Float32, Int32

from . import compressor_xla
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
from .compressor_xla import Finish
from .grids import E2M1, E4M3, Grid, as_bfloat16, fake, scale_codes


@dataclass(frozen=True, slots=True)
class CompressorConfig:
    """Block sizes of the compressor, powers of two.

    Attributes:
        tile: elements of a block that one program pools at a time: it takes all columns if they fit, or else
            so many that do.
        num_warps: of each kernel.
    """

    tile: int = 4096
    num_warps: int = 4

    def __post_init__(self) -> None:
        powers_of_two(tile=self.tile, num_warps=self.num_warps)


@partial(
    jax.jit,
    static_argnames=("overlap", "eps", "quantise", "dtype", "implementation", "config", "interpret"),
)
def compress_blocks(
    kv: Float32[Array, "n m c"],
    score: Float32[Array, "n m c"],
    norm_weight: Float[Array, " d"],
    positions: Int32[Array, " n"],
    frequency: Float32[Array, " half"],
    *,
    overlap: bool,
    eps: float = 1e-6,
    quantise: Literal["e4m3", "hadamard_e2m1"] | None = None,
    dtype: Literal["float32", "bfloat16"] = "float32",
    implementation: Implementation = "pallas",
    config: CompressorConfig | None = None,
    interpret: bool | None = None,
) -> Float32[Array, "entries d"]:
    """softmax(score) * kv summed over the rows of a block, RMSNorm, RoPE, then quantisation: an entry each.

    Without overlap (HCA) c = d and there are n entries. With overlap (CSA) c = 2 d and there are n - 1: each
    pools the first d channels of the block before and the last d of its own; the first block given is only a
    predecessor (kv 0 and score -inf before block 0). A row with score -inf is not looked at.

    Cosine and sine are computed outside the kernel, by the expression of `ops.rope`: angles reach 10^6, and
    what a kernel makes of such a cosine need not be what XLA does.

    Floor, an entry: 8 m c bytes read, each raw value once, and 4 d written; some 5 operations a value.

    Args:
        kv, score: raw rows, from `ops.compress.compressor_rows`.
        norm_weight: of RMSNorm.
        positions: of the first token of each block given.
        frequency: from `ops.rope.frequencies`; the last 2 * half channels are rotated.
        quantise: "e4m3" rounds the channels that are not rotated, "hadamard_e2m1" transforms and rounds all.
        dtype: what the state is kept in. With "bfloat16" entries are rounded to it before and after the
            Hadamard transform, as in the model; they come back as float32 either way.

    Raises:
        ValueError: shapes or dtypes that do not fit, `d` odd, or no power of two for the Hadamard transform.
    """
    _check(kv, score, norm_weight, positions, frequency, overlap, quantise, dtype)
    first = 1 if overlap else 0
    entries, width = kv.shape[0] - first, norm_weight.shape[0]
    if entries < 1:
        return jnp.zeros((0, width), jnp.float32)
    finish = Finish(eps, quantise, dtype)
    if not uses_pallas(implementation):
        arrays = kv, score, norm_weight, positions, frequency
        return compressor_xla.compress_blocks(*arrays, overlap=overlap, finish=finish)

    config = config or CompressorConfig()
    angle = positions[first:].astype(jnp.float32)[:, None] * frequency
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    rows, padded = kv.shape[1] * (1 + first), power_of_two(width)
    columns = min(padded, max(1, config.tile // power_of_two(rows)))

    def launch(name: str, kernel: Callable[..., None], grid: tuple[int, ...], *arrays: Array) -> Array:
        return pl.pallas_call(
            kernel,
            grid=grid,
            out_shape=jax.ShapeDtypeStruct((entries, width), jnp.float32),
            compiler_params=triton(config.num_warps),
            interpret=interpreted(interpret),
            name=name,
        )(*arrays)

    if columns == padded:
        kernel = partial(_compress, overlap=overlap, columns=columns, finish=finish)
        return launch("compress", kernel, (entries,), kv, score, norm_weight, cos, sin)
    kernel = partial(_pool_columns, overlap=overlap, columns=columns)
    pooled = launch("compress_pool", kernel, (entries, blocks(width, columns)), kv, score)
    kernel = partial(_finish_row, finish=finish)
    return launch("compress_finish", kernel, (entries,), pooled, norm_weight, cos, sin)


def _check(
    kv: Array, score: Array, norm_weight: Array, positions: Array, frequency: Array,
    overlap: bool, quantise: str | None, dtype: str,
) -> None:  # fmt: skip
    expect("norm_weight", norm_weight, ("d",), "float32", "bfloat16")
    width = norm_weight.shape[0]
    channels = width * (2 if overlap else 1)
    expect("kv", kv, ("n", "m", channels), "float32")
    expect("score", score, kv.shape, "float32")
    expect("positions", positions, (kv.shape[0],), "int32")
    expect("frequency", frequency, ("half",), "float32")
    half = frequency.shape[0]
    if width % 2 or not 0 < 2 * half <= width or not kv.shape[1]:
        raise ValueError(f"d={width} must be even, {half=} at most half of it, m={kv.shape[1]} at least 1")
    if quantise not in (None, "e4m3", "hadamard_e2m1"):
        raise ValueError(f"{quantise=} must be None, 'e4m3' or 'hadamard_e2m1'")
    if quantise == "hadamard_e2m1" and width & (width - 1):
        raise ValueError(f"d={width} must be a power of two for {quantise=}")
    if dtype not in ("float32", "bfloat16"):
        raise ValueError(f"{dtype=} must be 'float32' or 'bfloat16'")


def _compress(
    kv_ref: Ref, score_ref: Ref, norm_ref: Ref, cos_ref: Ref, sin_ref: Ref, out_ref: Ref,
    *, overlap: bool, columns: int, finish: Finish,
) -> None:  # fmt: skip
    pooled = _pool(kv_ref, score_ref, jnp.arange(columns, dtype=jnp.int32), overlap, out_ref.shape[1])
    _finish(pooled, norm_ref, cos_ref, sin_ref, out_ref, finish)


def _pool_columns(kv_ref: Ref, score_ref: Ref, out_ref: Ref, *, overlap: bool, columns: int) -> None:
    channel = pl.program_id(1) * columns + jnp.arange(columns, dtype=jnp.int32)
    pooled = _pool(kv_ref, score_ref, channel, overlap, out_ref.shape[1])
    plt.store(out_ref.at[pl.program_id(0), channel], pooled, mask=channel < out_ref.shape[1])


def _finish_row(
    pooled_ref: Ref, norm_ref: Ref, cos_ref: Ref, sin_ref: Ref, out_ref: Ref, *, finish: Finish
) -> None:
    channel = jnp.arange(power_of_two(out_ref.shape[1]), dtype=jnp.int32)
    mask = channel < out_ref.shape[1]
    pooled = plt.load(pooled_ref.at[pl.program_id(0), channel], mask=mask, other=0.0)
    _finish(pooled, norm_ref, cos_ref, sin_ref, out_ref, finish)


def _pool(kv_ref: Ref, score_ref: Ref, channel: Array, overlap: bool, width: int) -> Array:
    """These channels of the entry of this program, float32; 0 beyond the last one."""
    rate = kv_ref.shape[1]
    rows = rate * (2 if overlap else 1)
    row = jnp.arange(power_of_two(rows), dtype=jnp.int32)[:, None]
    own = ((row >= rate) & overlap).astype(jnp.int32)  # 1 in the entry's own block, 0 in the one before
    at = (pl.program_id(0) + own, row - rate * own, channel[None, :] + width * own)
    inside = (row < rows) & (channel < width)[None, :]
    score = plt.load(score_ref.at[at], mask=inside, other=-jnp.inf)
    kv = plt.load(kv_ref.at[at], mask=inside, other=0.0)
    peak = jnp.max(score, axis=0, keepdims=True)
    weight = jnp.exp(score - jnp.where(peak == -jnp.inf, 0.0, peak))
    total = jnp.sum(weight, axis=0)
    kv = jnp.where(score == -jnp.inf, 0.0, kv)
    return jnp.sum(weight * kv, axis=0) / jnp.where(total == 0.0, 1.0, total)


def _finish(pooled: Array, norm_ref: Ref, cos_ref: Ref, sin_ref: Ref, out_ref: Ref, finish: Finish) -> None:
    """RMSNorm, RoPE, rounding, of a row whose padding is 0."""
    entry, width = pl.program_id(0), out_ref.shape[1]
    channel = jnp.arange(pooled.shape[0], dtype=jnp.int32)
    weight = plt.load(norm_ref.at[channel], mask=channel < width, other=0.0)
    square = jnp.sum(pooled * pooled, axis=0) / width
    row = pooled * lax.rsqrt(square + finish.eps) * weight.astype(jnp.float32)
    plain = width - 2 * cos_ref.shape[1]
    row = _rotate(row, cos_ref, sin_ref, plain, width)
    if finish.dtype == "bfloat16":
        row = as_bfloat16(row)
    if finish.quantise == "e4m3":
        row = jnp.where(channel < plain, fake_blocks(jnp.where(channel < plain, row, 0.0), E4M3), row)
    if finish.quantise == "hadamard_e2m1":
        row = hadamard(row)
        row = fake_blocks(as_bfloat16(row) if finish.dtype == "bfloat16" else row, E2M1)
    plt.store(out_ref.at[entry, channel], row, mask=channel < width)


def _rotate(row: Array, cos_ref: Ref, sin_ref: Ref, plain: int, width: int) -> Array:
    """RoPE on the channels from `plain` on, by pairs."""
    pair = jnp.arange(row.shape[0] // 2, dtype=jnp.int32)
    rotated = (pair >= plain // 2) & (pair < width // 2)
    at = jnp.where(rotated, pair - plain // 2, 0)
    cos = plt.load(cos_ref.at[pl.program_id(0), at], mask=rotated, other=1.0)
    sin = plt.load(sin_ref.at[pl.program_id(0), at], mask=rotated, other=0.0)
    even, odd = jnp.unstack(row.reshape(-1, 2), axis=1)
    turned = even * cos - odd * sin, odd * cos + even * sin
    # Not by cos = 1 and sin = 0: 0 * inf is NaN.
    kept = (jnp.where(rotated, turn, old) for turn, old in zip(turned, (even, odd), strict=True))
    return jnp.stack(tuple(kept), axis=1).reshape(row.shape)


def fake_blocks(row: Float32[Array, " d"], grid: Grid) -> Float32[Array, " d"]:
    """Fake quantisation of a row, block by block; d a power of two. The bits of `ops.quant`."""
    inner = row.reshape(-1, min(grid.block, row.shape[0]))
    scale = jnp.broadcast_to(scale_codes(inner, grid)[:, None], inner.shape)
    return fake(inner, scale, grid).reshape(row.shape)


def hadamard(row: Float32[Array, " d"]) -> Float32[Array, " d"]:
    """`ops.quant.hadamard` of one row, the same sums in the same order."""
    width = row.shape[0]
    for _ in range(width.bit_length() - 1):
        first, second = jnp.unstack(row.reshape(2, -1).T, axis=1)
        row = jnp.stack((first + second, first - second), axis=1).reshape(width)
    return row * jnp.float32(width**-0.5)
