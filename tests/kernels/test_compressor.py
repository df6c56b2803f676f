"""The compressor's kernels against `ops.compress` and `ops.quant`, and rounding in integers bit for bit."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.export import DisabledSafetyCheck, export

from goldenkv.ops import compress, quant
from goldenkv.ops.rope import frequencies
from goldenkv_kernels.compressor import CompressorConfig, compress_blocks, fake_blocks, hadamard
from goldenkv_kernels.grids import E2M1, E4M3, as_bfloat16

ENTRY = 4e-6
"""Absolute, entries have size 1: float32 sums over rows and channels in another order, exp and rsqrt."""

BOTH = pytest.mark.parametrize("implementation", ["pallas", "xla"])

SIZES = {
    "csa": (4, 16, 2, True),
    "hca": (8, 16, 2, False),
    "index": (4, 16, 8, True),
    "odd": (3, 40, 3, True),
    "flash csa": (4, 512, 32, True),
    "flash hca": (128, 512, 32, False),
    "flash index": (4, 128, 32, True),
}
"""Rows a block, channels, rotated pairs, overlap."""


def case(seed: int, size: str, blocks: int = 3, first: int = 0):
    """Raw rows of `blocks` finished blocks of a sequence, from block `first` on, and the rest of a call."""
    rng = np.random.default_rng(seed)
    rate, width, half, overlap = SIZES[size]
    count = blocks + (1 if overlap else 0)
    shape = (count, rate, width * (2 if overlap else 1))
    kv = rng.standard_normal(shape).astype(np.float32)
    score = 3 * rng.standard_normal(shape).astype(np.float32)
    if overlap and not first:
        kv[0], score[0] = 0, -np.inf
    positions = (first + np.arange(count) - (count - blocks)) * rate
    norm = (1 + 0.1 * rng.standard_normal(width)).astype(np.float32)
    frequency = frequencies(2 * half, 160000.0)
    return tuple(jnp.asarray(a) for a in (kv, score, norm, positions.astype(np.int32), frequency))


@partial(jax.jit, static_argnames="overlap")
def op_on_blocks(kv, score, norm, positions, frequency, *, overlap: bool) -> jax.Array:
    pooled = compress.pool_rows(*(compress.overlap_blocks(kv, score) if overlap else (kv, score)))
    return compress.finish_entries(pooled, norm, positions[1 if overlap else 0 :], frequency)


def op(*arguments, size: str) -> np.ndarray:
    """The op, given whole blocks."""
    return np.asarray(op_on_blocks(*arguments, overlap=SIZES[size][3]))


def quantise_of(size: str) -> str:
    return "hadamard_e2m1" if "index" in size else "e4m3"


@partial(jax.jit, static_argnames="size")
def quantised(entries: jax.Array, *, size: str) -> jax.Array:
    """As the model does it, in the dtype of the entries."""
    if quantise_of(size) == "hadamard_e2m1":
        return quant.fake_quantise_e2m1(quant.hadamard(entries))
    plain = SIZES[size][1] - 2 * SIZES[size][2]
    return jnp.concatenate([quant.fake_quantise_e4m3(entries[:, :plain]), entries[:, plain:]], axis=1)


def run(arguments, size: str, **options) -> np.ndarray:
    return np.asarray(compress_blocks(*arguments, overlap=SIZES[size][3], **options))


# Entries ----------------------------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("size", SIZES)
def test_entries_are_those_of_the_op(size: str, implementation: str) -> None:
    for seed in range(3):
        arguments = case(seed, size)
        got = run(arguments, size, implementation=implementation)
        np.testing.assert_allclose(got, op(*arguments, size=size), rtol=0, atol=ENTRY)


@BOTH
@pytest.mark.parametrize("size", ["csa", "hca"])
def test_a_whole_sequence(size: str, implementation: str) -> None:
    """`ops.compress.compress` from position 0 on, where the block before the first is empty."""
    rate, _, _, overlap = SIZES[size]
    arguments = case(4, size)
    tail = [a[1 if overlap else 0 :].reshape(-1, a.shape[-1]) for a in arguments[:2]]
    want = compress.compress(*tail, arguments[2], arguments[4], compress_rate=rate, overlap=overlap)
    np.testing.assert_allclose(run(arguments, size, implementation=implementation), want, rtol=0, atol=ENTRY)


@BOTH
@pytest.mark.parametrize("first", [65535, 262143])
def test_far_positions(first: int, implementation: str) -> None:
    """Angles of a million radians: one position off would show."""
    arguments = case(5, "csa", first=first)
    got = run(arguments, "csa", implementation=implementation)
    np.testing.assert_allclose(got, op(*arguments, size="csa"), rtol=0, atol=ENTRY)
    shifted = (*arguments[:3], arguments[3] + 1, arguments[4])
    assert np.abs(got - op(*shifted, size="csa")).max() > 1000 * ENTRY


@BOTH
def test_what_belongs_to_other_entries_is_not_read(implementation: str) -> None:
    """NaN in the predecessor's last channels, in the last block's first ones, and where scores are -inf."""
    kv, score, *rest = case(6, "csa")
    width = SIZES["csa"][1]
    score = score.at[1, 2].set(-jnp.inf)
    want = run((kv, score, *rest), "csa", implementation=implementation)
    poisoned = kv.at[0, :, width:].set(jnp.nan).at[-1, :, :width].set(jnp.nan).at[1, 2].set(jnp.nan)
    got = run((poisoned, score, *rest), "csa", implementation=implementation)
    np.testing.assert_array_equal(got.view(np.uint32), want.view(np.uint32))

    poisoned = kv.at[1, 0, 3].set(jnp.nan)  # the control: the first channels of block 1 belong to entry 1
    got = run((poisoned, score, *rest), "csa", implementation=implementation)
    np.testing.assert_array_equal(np.isnan(got).any(axis=1), [False, True, False])


@BOTH
def test_an_empty_block_is_zero(implementation: str) -> None:
    kv, score, *rest = case(7, "hca")
    got = run((kv, score.at[1].set(-jnp.inf), *rest), "hca", implementation=implementation)
    np.testing.assert_array_equal(got[1], 0)
    assert got[0].any() and got[2].any()


@BOTH
@pytest.mark.parametrize("size", ["csa", "hca"])
def test_no_entry(size: str, implementation: str) -> None:
    kv, score, norm, positions, frequency = case(8, size, blocks=1)
    count = 1 if SIZES[size][3] else 0  # a lone predecessor, or nothing
    got = run((kv[:count], score[:count], norm, positions[:count], frequency), size)
    assert got.shape == (0, 16) and got.dtype == np.float32


# Batch invariance -------------------------------------------------------------------------------------------


def last_entry(function, seed: int, *, others: bool) -> np.ndarray:
    arguments = case(seed, "csa", first=7)
    kv, score, norm, positions, frequency = arguments
    if not others:
        kv, score, positions = kv[-2:], score[-2:], positions[-2:]
    return np.asarray(function(kv, score, norm, positions, frequency, overlap=True))[-1].view(np.uint32)


@BOTH
@settings(max_examples=10)
@given(seed=st.integers(0, 2**32 - 1))
def test_an_entry_does_not_depend_on_others(implementation: str, seed: int) -> None:
    function = partial(compress_blocks, implementation=implementation)
    np.testing.assert_array_equal(
        last_entry(function, seed, others=True), last_entry(function, seed, others=False)
    )


def test_an_order_of_rows_that_follows_the_number_would_show() -> None:
    def mutant(kv, score, *rest, **options):
        order = -1 if len(kv) > 2 else 1
        return compress_blocks(kv[:, ::order], score[:, ::order], *rest, **options)

    pairs = [[last_entry(mutant, seed, others=others) for others in (True, False)] for seed in range(5)]
    assert any((one != other).any() for one, other in pairs)


# Quantisation -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "dtype"), [("csa", "float32"), ("odd", "bfloat16"), ("index", "bfloat16")])
def test_quantised_entries(size: str, dtype: str) -> None:
    """The op's quantisation of the kernel's own entries, bit for bit."""
    arguments = case(9, size)
    entries = run(arguments, size, dtype=dtype)
    got = run(arguments, size, quantise=quantise_of(size), dtype=dtype)
    want = quantised(jnp.asarray(entries, dtype), size=size)
    np.testing.assert_array_equal(got, np.asarray(want, np.float32))
    assert (got != entries).any()  # the control: it does something


@BOTH
@pytest.mark.parametrize("size", ["flash csa", "flash hca", "flash index"])
def test_flash_quantised(size: str, implementation: str) -> None:
    """Against the op: the same, but for values that lie within `ENTRY` of a boundary between two steps."""
    arguments = case(10, size)
    options = dict(quantise=quantise_of(size), dtype="bfloat16", implementation=implementation)
    got = run(arguments, size, **options)
    entries = jnp.asarray(op(*arguments, size=size), jnp.bfloat16)
    want = np.asarray(quantised(entries, size=size), np.float32)
    assert (got != want).mean() < 0.002
    assert (got != np.asarray(entries, np.float32)).mean() > 0.1  # the control


SPECIAL = [0, -0.0, np.nan, -np.nan, np.inf, -np.inf, 1e-4, 1e-38, -1e-40, 3e38, 448, 464, 5, 2.5, 2**-10]
"""Zeros, what is not finite, the floor of E4M3, almost and really subnormal, large, ties."""


@settings(max_examples=150)
@given(
    seed=st.integers(0, 2**32 - 1),
    exponent=st.sampled_from([-130, -126, -40, -14, -1, 0, 1, 20, 120]),
    special=st.sampled_from([0.0, 0.02, 0.3]),
)
def test_rounding_is_that_of_the_ops(seed: int, exponent: int, special: float) -> None:
    """Rows of every size, with NaN, infinities, zeros, ties, subnormal numbers."""
    rng = np.random.default_rng(seed)
    row = np.ldexp(rng.choice([1, 1.0625, 1.25, 1.5, 1.7], 128) * rng.choice([-1, 1, 0.5, 3], 128), exponent)
    row = np.where(rng.random(128) < special, rng.choice(np.array(SPECIAL, np.float32), 128), row).astype(
        np.float32
    )
    for mine, theirs in ROUNDINGS:
        got, want = (np.asarray(function(jnp.asarray(row))) for function in (mine, theirs))
        np.testing.assert_array_equal(got, want)
        known = ~np.isnan(want)
        np.testing.assert_array_equal(np.signbit(got)[known], np.signbit(want)[known])


ROUNDINGS = [
    (jax.jit(partial(fake_blocks, grid=E4M3)), jax.jit(quant.fake_quantise_e4m3)),
    (jax.jit(partial(fake_blocks, grid=E2M1)), jax.jit(quant.fake_quantise_e2m1)),
    (jax.jit(as_bfloat16), lambda x: np.asarray(x.astype(jnp.bfloat16)).astype(np.float32)),
]


def test_ties_are_met_and_decide() -> None:
    """The control: halves from 8 to 16, where steps are 1, round elsewhere when moved by a millionth."""
    row = jnp.asarray(8 + np.arange(64) / 8, jnp.float32)
    moved = jax.jit(lambda x: fake_blocks(x * jnp.float32(1 + 2**-20), E4M3))(row)
    assert (np.asarray(moved) != np.asarray(quant.fake_quantise_e4m3(row))).sum() == 4


@pytest.mark.parametrize("width", [1, 2, 16, 128])
def test_hadamard_is_that_of_the_op(width: int) -> None:
    rows = jnp.asarray(np.random.default_rng(12).standard_normal((20, width)), jnp.float32)
    got = np.asarray(jax.jit(jax.vmap(hadamard))(rows))
    np.testing.assert_array_equal(got.view(np.uint32), np.asarray(quant.hadamard(rows)).view(np.uint32))


# Errors and lowering ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kv": jnp.zeros((4, 4, 16))}, r"kv must be float32 \[n, m, 32\], got float32 \[4, 4, 16\]"),
        ({"score": jnp.zeros((4, 3, 32))}, r"score must be float32 \[4, 4, 32\]"),
        ({"positions": jnp.zeros(3, jnp.int32)}, r"positions must be int32 \[4\]"),
        ({"frequency": jnp.zeros(9)}, "half=9 at most half of it"),
        ({"quantise": "int4"}, "quantise='int4' must be"),
        ({"dtype": "float16"}, "dtype='float16' must be"),
        ({"implementation": "triton"}, "must be 'pallas' or 'xla'"),
    ],
)
def test_bad_input_is_named(change: dict, message: str) -> None:
    names = ("kv", "score", "norm_weight", "positions", "frequency")
    arguments = dict(zip(names, case(13, "csa"), strict=True)) | change
    with pytest.raises(ValueError, match=message):
        compress_blocks(**arguments, overlap=True)


def test_the_hadamard_transform_needs_a_power_of_two() -> None:
    with pytest.raises(ValueError, match="d=40 must be a power of two"):
        run(case(14, "odd"), "odd", quantise="hadamard_e2m1")


def lower(size: str, **options) -> int:
    rate, width, half, overlap = SIZES[size]
    shape, float32 = jax.ShapeDtypeStruct, jnp.float32
    raw = shape((9, rate, width * (2 if overlap else 1)), float32)
    unknown = [DisabledSafetyCheck.custom_call("__gpu$xla.gpu.triton")]
    function = jax.jit(partial(compress_blocks, overlap=overlap, interpret=False, **options))
    exported = export(function, platforms=["cuda"], disabled_checks=unknown)(
        raw, raw, shape((width,), float32), shape((9,), jnp.int32), shape((half,), float32)
    )
    return exported.mlir_module().count("__gpu$xla.gpu.triton")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("size", SIZES)
def test_lowers_for_a_gpu(size: str, dtype: str) -> None:
    """One kernel, or two where the rows of a block do not fit into registers."""
    assert lower(size, quantise=quantise_of(size), dtype=dtype) == (2 if size == "flash hca" else 1)


def test_a_tile_is_a_power_of_two() -> None:
    with pytest.raises(ValueError, match="tile=12800 must be a power of two"):
        CompressorConfig(tile=12800)
