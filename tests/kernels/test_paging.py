"""Moving pages bit for bit, and native rows with the bits of `state.packing`."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.export import DisabledSafetyCheck, export

from goldenkv.state.formats import element_type, row_format
from goldenkv.state.layouts import pack_page, page_layout, read_page
from goldenkv.state.packing import decode, from_bytes
from goldenkv_kernels.gates import machine
from goldenkv_kernels.native_bits import value_bits
from goldenkv_kernels.paging import (
    NativeConfig,
    PagingConfig,
    gather_pages,
    pack_rows,
    scatter_pages,
    unpack_rows,
)

BOTH = pytest.mark.parametrize("implementation", ["pallas", "xla"])
SMALL = PagingConfig(nbytes=16)
"""Several blocks a page, the last one ragged."""

POOL = 5
DTYPES = ["float32", "bfloat16", "uint8", "float8_e4m3fn", "int32"]
PAGES = [0, 1, POOL - 1, POOL, -1, 2**31 - 1, -(2**31)]
"""Page numbers in range and not."""


def random_bits(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Any bits, payloads of NaN included."""
    kind = element_type(dtype)
    return rng.integers(0, 256, (*shape[:-1], shape[-1] * kind.itemsize), np.uint8).view(kind)


def bits(array) -> np.ndarray:
    found = np.asarray(array)
    return found.view(f"uint{8 * found.itemsize}")


def chosen(rng: np.random.Generator, count: int) -> np.ndarray:
    """Page numbers, of which those in range differ."""
    return rng.permutation(PAGES)[:count].astype(np.int32)


def gather_reference(pool: np.ndarray, pages: np.ndarray) -> np.ndarray:
    out = np.zeros((len(pages), *pool.shape[1:]), bits(pool).dtype)
    for place, page in enumerate(pages):
        if 0 <= page < len(pool):
            out[place] = bits(pool)[page]
    return out


def scatter_reference(pool: np.ndarray, pages: np.ndarray, rows: np.ndarray) -> np.ndarray:
    out = bits(pool).copy()
    for place, page in enumerate(pages):
        if 0 <= page < len(pool):
            out[page] = bits(rows)[place]
    return out


# Whole pages ------------------------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=10)
@given(seed=st.integers(0, 2**32 - 1))
def test_pages_move_bit_for_bit(dtype: str, implementation: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    pool, rows = random_bits(rng, (POOL, 3, 7), dtype), random_bits(rng, (4, 3, 7), dtype)
    pages = chosen(rng, 4)
    options = dict(implementation=implementation, config=SMALL)
    got = gather_pages(jnp.asarray(pool), jnp.asarray(pages), **options)
    np.testing.assert_array_equal(bits(got), gather_reference(pool, pages))
    # A copy: on a CPU the device may share the memory of a NumPy array, and the pool is donated.
    got = scatter_pages(jnp.array(pool), jnp.asarray(pages), jnp.asarray(rows), **options)
    np.testing.assert_array_equal(bits(got), scatter_reference(pool, pages, rows))


def test_floats_that_are_set_as_floats_would_not_keep_their_bits() -> None:
    """The control: payloads of bfloat16 NaN are lost, so the test above met some."""
    rng = np.random.default_rng(0)
    pool, rows = (random_bits(rng, (n, 3, 7), "bfloat16") for n in (POOL, 4))
    rows.view(np.uint16)[...] |= 0x7F81  # NaN throughout
    pages = np.array([3, 0, 2, 1], np.int32)
    mutant = jax.jit(lambda pool, pages, rows: pool.at[pages].set(rows))(pool, pages, rows)
    assert (bits(mutant) != scatter_reference(pool, pages, rows)).any()


@BOTH
def test_there_and_back_in_a_tree(implementation: str) -> None:
    """Arrays of several dtypes and shapes that the same page numbers address; what is not named stays."""
    rng = np.random.default_rng(1)
    kinds = {"entries": ((4, 16), "bfloat16"), "keys": ((2, 3), "uint8"), "flat": ((1,), "int32")}
    pool = {name: random_bits(rng, (POOL, *shape), dtype) for name, (shape, dtype) in kinds.items()}
    pages = jnp.asarray([4, 1], jnp.int32)
    buffer = gather_pages(jax.tree.map(jnp.asarray, pool), pages, implementation=implementation)
    empty = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), pool)
    back = scatter_pages(empty, pages, buffer, implementation=implementation)
    for name, array in pool.items():
        np.testing.assert_array_equal(bits(back[name])[[4, 1]], bits(array)[[4, 1]])
        assert not bits(back[name])[[0, 2, 3]].any()


def test_the_pool_is_donated_and_an_operand_that_is_not_read_does_no_harm() -> None:
    """jax#39744: an operand that a kernel does not use made copies return zeros. Here it is the pool."""
    pool = jnp.arange(35, dtype=jnp.float32).reshape(POOL, 7)
    want = np.array(pool)
    got = scatter_pages(pool, jnp.asarray([2], jnp.int32), -jnp.ones((1, 7)))
    want[2] = -1
    np.testing.assert_array_equal(got, want)
    assert pool.is_deleted()


@BOTH
@pytest.mark.parametrize(("pool", "pages"), [((0, 4), 2), ((3, 0), 2), ((3, 4), 0)])
def test_nothing_to_move(pool: tuple[int, int], pages: int, implementation: str) -> None:
    array, numbers = jnp.ones(pool), jnp.zeros(pages, jnp.int32)
    found = gather_pages(array, numbers, implementation=implementation)
    assert found.shape == (pages, pool[1]) and (pool[0] or not found.any())
    back = scatter_pages(jnp.ones(pool), numbers, found, implementation=implementation)
    np.testing.assert_array_equal(back, np.ones(pool))


# Native rows ------------------------------------------------------------------------------------------------

NATIVE = [(3, 16, 4, "float32"), (4, 80, 10, "bfloat16"), (9, 130, 2, "float32"), (64, 512, 64, "bfloat16")]
"""Rows a page, channels, of which rotated, dtype: one short block; a short last one; more bytes; Flash."""

SPECIAL = [np.nan, -np.nan, np.inf, -np.inf, -0.0, 0.0, 1e-39, 3e38]
sizes = pytest.mark.parametrize(("rows", "channels", "rope", "dtype"), NATIVE)


def float_rows(seed: int, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Rows of very different size, with what is not finite here and there."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape) * np.exp(rng.uniform(-30, 30, (*shape[:-1], 1)))
    x = np.where(rng.random(shape) < 0.02, rng.choice(SPECIAL, shape), x).astype(np.float32)
    x[0, 0] = -0.0
    return x.astype(element_type(dtype))


@BOTH
@sizes
@settings(max_examples=5)
@given(seed=st.integers(0, 2**32 - 1))
def test_packed_pages_are_those_of_the_layout(rows, channels, rope, dtype, implementation, seed) -> None:
    x = float_rows(seed, (2, rows, channels), dtype)
    layout = page_layout("fp8", rows, channels, rope)
    want = np.stack([np.frombuffer(pack_page(page, layout, quantise=True), np.uint8) for page in x])
    got = pack_rows(jnp.asarray(x), rope=rope, implementation=implementation)
    np.testing.assert_array_equal(got, want)


@BOTH
@sizes
@settings(max_examples=5)
@given(seed=st.integers(0, 2**32 - 1))
def test_any_bytes_unpack_as_the_layout_says(rows, channels, rope, dtype, implementation, seed) -> None:
    layout = page_layout("fp8", rows, channels, rope)
    pages = np.random.default_rng(seed).integers(0, 256, (2, layout.nbytes), np.uint8)
    want = np.stack([read_page(page, layout, dtype=dtype)["rows"] for page in pages])
    got = unpack_rows(
        jnp.asarray(pages),
        rows=rows,
        channels=channels,
        rope=rope,
        dtype=dtype,
        implementation=implementation,
    )
    np.testing.assert_array_equal(bits(got), bits(want))


def test_every_value_under_every_scale() -> None:
    """All 65,536 pairs of a byte and a scale, subnormal and infinite products included."""
    value, scale = (x.ravel() for x in np.meshgrid(np.arange(256), np.arange(256)))
    fields = np.zeros((len(value), row_format("fp8", 2, 1).nbytes), np.uint8)
    fields[:, 0], fields[:, 3] = value, scale
    form = row_format("fp8", 2, 1)
    want = decode(from_bytes(fields, form), form)[:, 0]
    got = jax.jit(value_bits)(jnp.asarray(value, jnp.int32), jnp.asarray(scale, jnp.int32))
    np.testing.assert_array_equal(bits(got), bits(want))
    product = jax.jit(jnp.multiply)(
        value.astype(np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32),
        scale.astype(np.uint8).view(ml_dtypes.float8_e8m0fnu).astype(np.float32),
    )
    assert (bits(product) != bits(want)).any()  # the control: floats on the device lose subnormal numbers


def test_a_bare_cast_would_show() -> None:
    """The control: without the clamp and the exact scale, 465 / 1 is NaN and 448 / 2 another code."""
    x = jnp.full((1, 1, 16), 465.0).at[0, 0, 1].set(3.0)
    got = np.asarray(pack_rows(x, rope=4))[0, :12]
    mutant = np.asarray(x[0, 0, :12].astype(jnp.float8_e4m3fn)).view(np.uint8)
    assert (got != mutant).all()


@pytest.mark.parametrize("config", [NativeConfig(rows=1), NativeConfig(rows=16, num_warps=8)])
def test_config_changes_no_byte(config: NativeConfig) -> None:
    x = jnp.asarray(float_rows(2, (2, 3, 16), "float32"))
    np.testing.assert_array_equal(pack_rows(x, rope=4, config=config), pack_rows(x, rope=4))


@BOTH
def test_no_page(implementation: str) -> None:
    pages = pack_rows(jnp.zeros((0, 4, 16)), rope=4, implementation=implementation)
    assert pages.shape == (0, page_layout("fp8", 4, 16, 4).nbytes)
    assert unpack_rows(pages, rows=4, channels=16, rope=4, implementation=implementation).shape == (0, 4, 16)


# Memory, errors, lowering -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", ["gather", "scatter", "pack", "unpack"])
def test_nothing_outside_is_touched(kernel: str) -> None:
    """Address by address, as on a GPU: interpret mode clamps what lies outside."""
    rng = np.random.default_rng(3)
    pool, pages = random_bits(rng, (POOL, 3, 7), "int32"), chosen(rng, 7)
    rows = random_bits(rng, (7, 3, 7), "int32")
    x = float_rows(4, (2, 3, 17), "float32")
    packed = np.asarray(pack_rows(jnp.asarray(x), rope=5))
    function, arguments, want = {
        "gather": (partial(gather_pages, config=SMALL), (pool, pages), gather_reference(pool, pages)),
        "scatter": (
            partial(scatter_pages, config=SMALL), (pool, pages, rows), scatter_reference(pool, pages, rows),
        ),
        "pack": (partial(pack_rows, rope=5), (x,), packed),
        "unpack": (
            partial(unpack_rows, rows=3, channels=17, rope=5), (packed,),
            bits(unpack_rows(jnp.asarray(packed), rows=3, channels=17, rope=5)),
        ),
    }[kernel]  # fmt: skip
    found = machine.run(partial(function, interpret=False), *arguments)
    assert found.problems == ()
    np.testing.assert_array_equal(bits(found.outputs), want)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: gather_pages(jnp.zeros((3, 4)), jnp.zeros(2)), r"pages must be int32 \[n\], got float32"),
        (lambda: gather_pages(jnp.zeros((3, 4), bool), jnp.zeros(2, jnp.int32)), "1, 2 or 4 bytes, got bool"),
        (lambda: gather_pages(jnp.zeros(()), jnp.zeros(2, jnp.int32)), r"a pool must be \[pages, ...\]"),
        (
            lambda: scatter_pages(jnp.zeros((3, 4)), jnp.zeros(2, jnp.int32), jnp.zeros((2, 4), jnp.int32)),
            r"rows must be float32 \[2, 4\], got int32",
        ),
        (lambda: pack_rows(jnp.zeros((3, 4)), rope=2), r"rows must be .* \[n, rows, channels\]"),
        (lambda: pack_rows(jnp.zeros((3, 4, 8)), rope=8), r"rope=8 in 1 .. 7 \(channels=8\)"),
        (lambda: pack_rows(jnp.zeros((3, 0, 8)), rope=2), "rows=0 must be at least 1"),
        (
            lambda: unpack_rows(jnp.zeros((2, 100), jnp.uint8), rows=2, channels=16, rope=4),
            r"pages must be uint8 \[n, 576\], got uint8 \[2, 100\]",
        ),
        (
            lambda: unpack_rows(jnp.zeros((2, 576), jnp.uint8), rows=2, channels=16, rope=4, dtype="float16"),
            "dtype='float16' must be",
        ),
        (
            lambda: gather_pages(jnp.zeros((3, 4)), jnp.zeros(2, jnp.int32), implementation="copy"),
            "must be 'pallas' or 'xla'",
        ),
    ],
)
def test_bad_input_is_named(call, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(
    ("nbytes", "fits"), [(2**31, True), (2**31 + 32, False), (2**32, False), (2**32 + 32, True)]
)
def test_bytes_that_a_kernel_could_not_address(nbytes: int, fits: bool) -> None:
    """Triton's lowering counts the elements of an array of up to 4 GiB in 32 bits with a sign."""
    shapes = jax.ShapeDtypeStruct((nbytes // 32, 32), jnp.uint8), jax.ShapeDtypeStruct((4,), jnp.int32)
    gather = partial(gather_pages, interpret=False)
    if fits:
        assert jax.eval_shape(gather, *shapes).shape == (4, 32)
        return
    with pytest.raises(ValueError, match=rf"{nbytes} bytes must have at most 2\^31"):
        jax.eval_shape(gather, *shapes)
    assert jax.eval_shape(partial(gather, implementation="xla"), *shapes).shape == (4, 32)


def lower(function, *shapes) -> int:
    unknown = [DisabledSafetyCheck.custom_call("__gpu$xla.gpu.triton")]
    exported = export(jax.jit(function), platforms=["cuda"], disabled_checks=unknown)(*shapes)
    return exported.mlir_module().count("__gpu$xla.gpu.triton")


@pytest.mark.parametrize(
    ("page", "dtype"),
    [
        ((64, 512), "bfloat16"),
        ((37440,), "uint8"),
        ((64, 128), "bfloat16"),
        ((4, 16), "float32"),
        ((3, 7), "int8"),
    ],
)
def test_page_copies_lower_for_a_gpu(page: tuple[int, ...], dtype: str) -> None:
    shape = jax.ShapeDtypeStruct
    pool, pages, rows = shape((99, *page), dtype), shape((16,), jnp.int32), shape((16, *page), dtype)
    assert lower(partial(gather_pages, interpret=False), pool, pages) == 1
    assert lower(partial(scatter_pages, interpret=False), pool, pages, rows) == 1


@sizes
def test_native_pages_lower_for_a_gpu(rows: int, channels: int, rope: int, dtype: str) -> None:
    nbytes = page_layout("fp8", rows, channels, rope).nbytes
    x, pages = jax.ShapeDtypeStruct((5, rows, channels), dtype), jax.ShapeDtypeStruct((5, nbytes), jnp.uint8)
    assert lower(partial(pack_rows, rope=rope, interpret=False), x) == 1
    unpack = partial(unpack_rows, rows=rows, channels=channels, rope=rope, dtype=dtype, interpret=False)
    assert lower(unpack, pages) == 1


@pytest.mark.parametrize("config", [PagingConfig, NativeConfig])
def test_block_sizes_are_powers_of_two(config) -> None:
    with pytest.raises(ValueError, match="num_warps=3 must be a power of two"):
        config(num_warps=3)
