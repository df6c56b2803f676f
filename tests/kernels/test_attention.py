"""The attention kernels against `ops.attend`, sequence by sequence; whatever a query does not see is NaN."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.export import DisabledSafetyCheck, export

from goldenkv.ops import attend
from goldenkv.state.formats import element_type
from goldenkv.state.layouts import PageLayout, pack_page, page_layout, read_page
from goldenkv_kernels.attention import AttentionConfig, default_config, dense_attention, sparse_attention

SUMS = 3e-6
"""Absolute, for outputs of size 1: float32 products and sums in another order."""

LONG_SUMS = 1e-5
"""The same with 512 channels and 600 keys, where the op itself is 5e-6 off the answer in float64."""

HALF_ULP = 2.0**-8
"""What rounding to bfloat16 changes of a weight, at most."""

KINDS = ["float32", "bfloat16", "fp8 in float32", "fp8 in bfloat16"]
BOTH = pytest.mark.parametrize("implementation", ["pallas", "xla"])
WHOLE = AttentionConfig(head_block=16, key_block=16, stages=1)
SPLIT = replace(WHOLE, keys_per_split=16)
"""Several blocks and several splits at the sizes below."""

BATCH, TOKENS, HEADS, DIM, ROPE, WINDOW, TOP_K, ROWS, PAGES = 2, 3, 3, 24, 8, 19, 37, 4, 11
COUNT = ROWS * PAGES
EDGES = [0, 1, ROWS - 1, ROWS, ROWS + 1, 15, 16, 17, 31, 32, 33, COUNT - 1, COUNT]


Arrays = dict[str, np.ndarray]


def normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


def case(
    seed: int,
    kind: str = "float32",
    counts=None,
    *,
    batch: int = BATCH,
    tokens: int = TOKENS,
    heads: int = HEADS,
    dim: int = DIM,
    rope: int = ROPE,
    window: int = WINDOW,
    top_k: int = TOP_K,
    rows: int = ROWS,
    pages: int = PAGES,
) -> tuple[Arrays, PageLayout | None]:
    """Arguments of both kernels by name, `ids` and `counts` among them, and the layout of native pages.

    Poison stands in window rows that no query sees, in entries beyond every count, in pages that nobody owns,
    and in the table behind a sequence's last page. All in NumPy: each eager step of JAX would compile.
    """
    rng = np.random.default_rng(seed)
    native, dtype = kind.startswith("fp8"), kind.split()[-1]
    capacity = rows * pages
    counts = rng.choice([n for n in EDGES if n <= capacity], (batch, tokens)) if counts is None else counts
    counts = np.broadcast_to(counts, (batch, tokens)).astype(np.int32)
    visible = rng.random((batch, tokens, window)) < 0.4
    ids = np.full((batch, tokens, top_k), -1, np.int32)
    for b, t in np.ndindex(batch, tokens):
        chosen = rng.permutation(counts[b, t])[:top_k]
        ids[b, t, np.sort(rng.permutation(top_k)[: len(chosen)])] = chosen
    keys = np.where(visible.any(axis=1)[:, :, None], normal(rng, batch, window, dim), np.nan)

    pool = batch * pages + 2
    table = rng.permutation(pool)[: batch * pages].reshape(batch, pages).astype(np.int32)
    layout = page_layout("fp8", rows, dim, rope) if native else None
    if layout is None:
        stored = np.full((pool, rows, dim), np.nan, np.float32)
    else:
        stored = np.full((pool, layout.nbytes), 0xFF, np.uint8)
    for b in range(batch):
        most = counts[b].max(initial=0)
        for i in range(-(-most // rows)):
            part = normal(rng, min(rows, most - i * rows), dim)
            if layout is None:
                stored[table[b, i], : len(part)] = part
            else:
                page = pack_page(part, layout, quantise=True, fill=0xFF)
                stored[table[b, i]] = np.frombuffer(page, np.uint8)
        table[b, -(-most // rows) :] = rng.choice([-9, 10**6])
    arrays = {
        "q": (2 * normal(rng, batch, tokens, heads, dim)).astype(element_type(dtype)),
        "window": keys.astype(element_type(dtype)),
        "window_visible": visible,
        "pages": stored if native else stored.astype(element_type(dtype)),
        "table": table,
        "sinks": normal(rng, heads),
        "ids": ids,
        "counts": counts,
    }
    return arrays, layout


def sparse(x, layout=None, implementation="pallas", config=None) -> np.ndarray:
    """`sparse_attention` of a case, with the same keywords every time: others would compile again."""
    given = {name: value for name, value in x.items() if name != "counts"}
    return np.asarray(sparse_attention(**given, layout=layout, implementation=implementation, config=config))


def dense(x, layout=None, implementation="pallas", config=None) -> np.ndarray:
    given = {name: value for name, value in x.items() if name != "ids"}
    return np.asarray(dense_attention(**given, layout=layout, implementation=implementation, config=config))


RUNS = {"sparse": sparse, "dense": dense}
CONFIG = {"sparse": SPLIT, "dense": WHOLE}
"""Each way of cutting with each kernel would compile too long; float32 tries both against the ops."""

EACH = pytest.mark.parametrize("which", RUNS)
CSA, HCA = jax.jit(attend.csa_attention), jax.jit(partial(attend.hca_attention, key_block=1024))


def entries_of(x: Arrays, layout: PageLayout | None, sequence: int) -> np.ndarray:
    """Every entry of a sequence [n, d], as they are read back; those of pages that do not exist are NaN."""
    pages, table = x["pages"], x["table"][sequence]
    if layout is not None:
        pages = np.stack([read_page(page, layout)["rows"] for page in pages])
    held = (table >= 0) & (table < len(pages))
    rows = pages[np.where(held, table, 0)].astype(np.float32)
    return np.where(held[:, None, None], rows, np.float32(np.nan)).reshape(-1, rows.shape[-1])


def by_ops(x: Arrays, layout: PageLayout | None, which: str) -> np.ndarray:
    """The op, one sequence after the other."""
    out = []
    for b in range(len(x["q"])):
        entries = entries_of(x, layout, b)
        shared = (x["q"][b], x["window"][b], x["window_visible"][b], entries)
        if which == "sparse":
            out.append(CSA(*shared, x["ids"][b], x["sinks"]))
        else:
            out.append(HCA(*shared, np.arange(len(entries)) < x["counts"][b][:, None], x["sinks"]))
    return np.stack([np.asarray(heads) for heads in out])


def tolerance(x: Arrays, layout: PageLayout | None, which: str, sums: float = SUMS) -> np.ndarray:
    """[b, t, h, d]: in bfloat16 HALF_ULP times the sum of weight * |key|, and `sums` in any case."""
    out = np.zeros(x["q"].shape)
    if x["q"].dtype == jnp.float32:
        return out + sums
    for b, t in np.ndindex(*out.shape[:2]):
        entries, ids = entries_of(x, layout, b), x["ids"][b, t]
        chosen = entries[ids[ids >= 0]] if which == "sparse" else entries[: x["counts"][b, t]]
        keys = np.concatenate([x["window"][b][x["window_visible"][b, t]], chosen]).astype(np.float64)
        weight = np.exp(x["q"][b, t].astype(np.float64) @ keys.T * out.shape[-1] ** -0.5)
        total = weight.sum(axis=1) + np.exp(x["sinks"].astype(np.float64))
        out[b, t] = weight @ np.abs(keys) / total[:, None]
    return sums + HALF_ULP * out


def close(got, expected, bound) -> bool:
    """Whether everything is within its bound; says by how much it is not."""
    share = np.max(np.abs(got - expected) / bound, initial=0)
    print(f"{share:.3f} of the tolerance")
    return bool(share <= 1)


def finite(array: np.ndarray) -> np.ndarray:
    """0 for every NaN."""
    return np.where(np.isnan(array), np.zeros((), array.dtype), array)


def put(array: np.ndarray, at, value) -> np.ndarray:
    """A copy with `value` there."""
    copy = array.copy()
    copy[at] = value
    return copy


def bits(x) -> np.ndarray:
    return np.asarray(x, np.float32).view(np.uint32)


def equal(got, expected) -> bool:
    return np.array_equal(bits(got), bits(expected))


def one(x: Arrays, b: int, t: int) -> dict[str, jax.Array]:
    """The same arguments with one query of one sequence alone."""
    alone = {name: x[name][b : b + 1, t : t + 1] for name in ("q", "window_visible", "ids", "counts")}
    return x | alone | {name: x[name][b : b + 1] for name in ("window", "table")}


# Against the ops --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@BOTH
@settings(max_examples=8)
@given(seed=st.integers(0, 999), edges=st.lists(st.sampled_from(EDGES), min_size=3, max_size=3))
def test_the_kernels_are_the_ops(implementation: str, kind: str, seed: int, edges: list[int]) -> None:
    x, layout = case(seed, kind, [edges, edges[::-1]])
    for which, run in RUNS.items():
        expected, bound = by_ops(x, layout, which), tolerance(x, layout, which)
        both = implementation == "pallas" and kind == "float32"
        for config in [WHOLE, SPLIT] if both else [CONFIG[which]]:
            got = run(x, layout, implementation=implementation, config=config)
            assert got.dtype == np.float32 and close(got, expected, bound)


@pytest.mark.parametrize("kind", KINDS)
@EACH
def test_mutants_are_far_outside_the_tolerance(which: str, kind: str) -> None:
    x, layout = case(1, kind, COUNT - 1)
    x["window"] = finite(x["window"])
    expected, bound = by_ops(x, layout, which), tolerance(x, layout, which)
    mutants = {
        "no sinks": {"sinks": np.full(HEADS, -np.inf, np.float32)},
        "another scale": {"q": x["q"] + x["q"]},
        "entries less": {"ids": put(x["ids"], np.s_[:, :, ::9], -1), "counts": x["counts"] - 1},
        "another page": {"table": put(x["table"], np.s_[:, 0], x["table"][:, 1])},
        "another window row": {"window_visible": ~x["window_visible"]},
    }
    for name, change in mutants.items():
        got = RUNS[which](x | change, layout, config=CONFIG[which])
        assert not close(got, expected, 5 * bound), name


@pytest.mark.parametrize(
    "which, kind",
    [
        ("sparse", "fp8 in bfloat16"),
        ("sparse", "float32"),
        ("dense", "bfloat16"),
    ],
)
def test_flash_shapes(which: str, kind: str) -> None:
    """64 heads of 512 channels, window 128, top-k 512, in the default blocks."""
    flash = {"heads": 64, "dim": 512, "rope": 64, "window": 128, "top_k": 512, "rows": 64, "pages": 9}
    x, layout = case(2, kind, [[530, 77]], batch=1, tokens=2, **flash)
    expected, bound = by_ops(x, layout, which), tolerance(x, layout, which, LONG_SUMS)
    for implementation in ("pallas", "xla"):
        assert close(RUNS[which](x, layout, implementation=implementation), expected, bound)
    assert not close(RUNS[which](x | {"q": x["q"] + x["q"]}, layout), expected, 2 * bound)


@BOTH
def test_inside_a_jitted_program(implementation: str) -> None:
    """As the model calls them: one sequence, a tile of queries, the defaults, arguments all traced."""
    x, _ = case(3, counts=[[0, 1, 5, 8]], batch=1, tokens=4, heads=2, dim=16, window=12, top_k=2, pages=2)

    @jax.jit
    def program(x):
        how = {"implementation": implementation}
        return (
            sparse_attention(**{n: v for n, v in x.items() if n != "counts"}, **how),
            dense_attention(**{n: v for n, v in x.items() if n != "ids"}, **how),
        )

    for got, which in zip(program(x), RUNS, strict=True):
        np.testing.assert_allclose(got, by_ops(x, None, which), rtol=0, atol=SUMS)


# Edges ------------------------------------------------------------------------------------------------------


@BOTH
@EACH
def test_a_query_that_sees_nothing_returns_zero(which: str, implementation: str) -> None:
    run = partial(RUNS[which], implementation=implementation, config=CONFIG[which])
    x, _ = case(4, counts=[[0, 5, 0], [0, 0, 0]])
    x["window_visible"][0, 0] = x["window_visible"][1] = False
    x["window"][~x["window_visible"].any(axis=1)] = np.nan
    got = run(x)
    assert not bits(got[0, 0]).any() and not bits(got[1]).any()
    assert np.isfinite(got).all() and got[0, 1].any()
    without = run(x | {"sinks": np.full(HEADS, -np.inf, np.float32)})
    assert not bits(without[0, 0]).any() and np.isfinite(without).all()


@BOTH
def test_empty_arrays(implementation: str) -> None:
    how = {"implementation": implementation, "config": WHOLE}
    x, _ = case(5, counts=0)
    nothing = x | {"ids": x["ids"][:, :, :0], "table": x["table"][:, :0]}
    for name, run in RUNS.items():
        np.testing.assert_allclose(run(nothing, **how), by_ops(x, None, name), rtol=0, atol=SUMS)

    x, _ = case(6)
    x["window_visible"][:] = False
    expected = by_ops(x, None, "sparse")
    x |= {"window": x["window"][:, :0], "window_visible": x["window_visible"][:, :, :0]}
    np.testing.assert_allclose(sparse(x, **how), expected, rtol=0, atol=SUMS)
    for name in ("q", "window_visible", "ids", "counts"):
        x[name] = x[name][:, :0]
    assert sparse(x, **how).shape == dense(x, **how).shape == (BATCH, 0, HEADS, DIM)
    assert sparse({n: v if n in ("pages", "sinks") else v[:0] for n, v in x.items()}, **how).size == 0


@BOTH
@EACH
def test_what_is_not_held_counts_as_none(which: str, implementation: str) -> None:
    """Ids and counts beyond the table, pages beyond the pool, negative numbers: as -1, and never read."""
    run = partial(RUNS[which], implementation=implementation, config=CONFIG[which])
    x, _ = case(7, counts=COUNT)
    x["window"] = finite(x["window"])
    x["ids"][:, :, ::5] = -1
    expected = run(x)
    odd = x | {
        "ids": np.where(x["ids"] < 0, np.int32([-7, COUNT, 2**31 - 1] * 12 + [-1]), x["ids"]),
        "counts": x["counts"] + 1000,
    }
    assert equal(run(odd), expected)
    for page in (-1, len(x["pages"]), 2**31 - 1):
        lost = x | {"table": put(x["table"], np.s_[:, 2], page)}
        less = lost | {"ids": np.where(x["ids"] // ROWS == 2, np.int32(-1), x["ids"])}
        assert equal(run(lost), run(less))
        assert not equal(run(lost), expected)


@BOTH
@EACH
@pytest.mark.parametrize("kind", KINDS)
def test_what_no_query_sees_may_hold_anything(which: str, kind: str, implementation: str) -> None:
    """`case` puts NaN everywhere there; here it is 0 instead, and the bits are the same."""
    x, layout = case(8, kind, 17)
    x["ids"][x["ids"] == 3] = -1
    clean = x | {"window": finite(x["window"]), "pages": without_poison(x, layout)}
    if which == "sparse":  # nobody selected entry 3
        x["pages"] = put(x["pages"], entry(x, layout, 3), np.nan if layout is None else 0xFF)
    run = partial(RUNS[which], layout=layout, implementation=implementation, config=CONFIG[which])
    got = run(x)
    assert equal(got, run(clean)) and np.isfinite(got).all()
    for name, at, poison in (
        ("window", (0, x["window_visible"][0, 0].argmax()), np.nan),
        ("pages", entry(x, layout, 5), np.nan if layout is None else 0xFF),
    ):
        assert np.isnan(run(x | {name: put(x[name], at, poison)})[0, 0]).any()  # the check can fail


def entry(x: Arrays, layout: PageLayout | None, number: int) -> tuple:
    """Where an entry of every sequence lies in the pages: its row, or what of a native one is no scale."""
    page, row = x["table"][:, number // ROWS], number % ROWS
    if layout is None:
        return page, row
    width = sum(field.nbytes for field in layout.sections[0])
    return page, slice(row * width, (row + 1) * width)


def without_poison(x: Arrays, layout: PageLayout | None) -> np.ndarray:
    """Pages in which everything is 0 but the rows of a sequence."""
    if layout is None:
        return finite(x["pages"])
    clean = np.zeros_like(x["pages"])
    for table, counts in zip(x["table"], x["counts"], strict=True):
        for i, page in enumerate(table[: -(-counts.max() // layout.rows)]):
            rows = read_page(x["pages"][page], layout)["rows"][: counts.max() - i * layout.rows]
            clean[page] = np.frombuffer(pack_page(rows, layout), np.uint8)
    return clean


@EACH
def test_a_row_that_another_query_sees_does_not_matter_either(which: str) -> None:
    """Stricter than the ops: NaN in a row reaches the queries that see it, and no others."""
    run = partial(RUNS[which], config=CONFIG[which])
    x, _ = case(9, counts=[[4, 20, 20], [4, 20, 20]])
    x["window"] = finite(x["window"])
    got = run(x)
    x["pages"][x["table"][:, 2]] = np.nan  # entries 8 .. 11
    poisoned = run(x)
    assert equal(poisoned[:, 0], got[:, 0]) and np.isnan(poisoned[:, 1:]).any()


def test_all_ones_give_one() -> None:
    """openxla/xla#19780: chained products of ones, whose answer is exact: 19 rows and 13 entries, 32 keys."""
    x, _ = case(10, "bfloat16", COUNT)
    ones = x | {name: np.ones_like(x[name]) for name in ("q", "window", "pages", "window_visible")}
    ones |= {"sinks": np.full_like(x["sinks"], -np.inf), "counts": np.full_like(x["counts"], 13)}
    ones["ids"] = put(x["ids"], np.s_[:, :, 13:], -1)
    for which, run in RUNS.items():
        np.testing.assert_array_equal(run(ones, config=CONFIG[which]), 1)
        ones["window"][:, 4] = 2
        np.testing.assert_array_equal(run(ones | {"q": 0 * x["q"]}, config=CONFIG[which]), 33 / 32)
        ones["window"][:, 4] = 1


# Batch invariance -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "which, config, kind",
    [
        ("sparse", SPLIT, "bfloat16"),
        ("dense", WHOLE, "float32"),
        ("dense", SPLIT, "fp8 in bfloat16"),
    ],
    ids=["sparse split", "dense", "dense split"],
)
def test_bits_depend_on_nothing_else(which: str, config: AttentionConfig, kind: str) -> None:
    x, layout = case(11, kind, [[33, 5, 44], [17, 44, 1]])
    x["window"] = finite(x["window"])
    run = partial(RUNS[which], layout=layout, config=config)
    got = run(x)
    for b, t in ((0, 0), (1, 1)):
        assert equal(run(one(x, b, t))[0, 0], got[b, t]), "alone or in a batch"
    other, _ = case(12, kind, 9)
    mixed = x | {n: put(x[n], 0, other[n][0]) for n in ("q", "window_visible", "ids", "counts")}
    assert equal(run(mixed)[1], got[1]), "whatever the other sequence does"

    order = np.random.default_rng(0).permutation(3 * len(x["pages"]))[: len(x["pages"])]
    larger = np.full((3 * len(order), *x["pages"].shape[1:]), 0xFF if layout else np.nan, x["pages"].dtype)
    held = (x["table"] >= 0) & (x["table"] < len(order))
    table = np.where(held, order[np.where(held, x["table"], 0)], -1).astype(np.int32)
    moved = x | {
        "pages": put(larger, order, x["pages"]),
        "table": np.pad(table, ((0, 0), (0, 30)), constant_values=order[0]),
        "ids": np.pad(x["ids"], ((0, 0), (0, 0), (0, 30)), constant_values=-1),
    }
    assert equal(run(moved), got), "wherever its pages lie, whatever there could have been"


def test_a_split_that_follows_the_batch_would_change_bits() -> None:
    """The control of the test above, and why `keys_per_split` is part of the config."""
    x, _ = case(11, counts=44)
    x["window"] = finite(x["window"])
    got = dense(x, config=SPLIT)
    follows = dense(one(x, 0, 0), config=replace(SPLIT, keys_per_split=32))
    assert not equal(follows[0, 0], got[0, 0])
    np.testing.assert_allclose(follows[0, 0], got[0, 0], rtol=0, atol=SUMS)


# Arguments --------------------------------------------------------------------------------------------------


def test_what_does_not_fit_is_refused() -> None:
    x, _ = case(13)
    changes = [
        ("q", x["q"][..., :-1], r"q must be float32 or bfloat16 \[b, t, h, 24\]"),
        ("window", x["window"].astype(jnp.bfloat16), r"window must be float32 \[2, w, 24\], got bfloat16"),
        ("window_visible", x["window_visible"][:, :, 1:], r"window_visible must be bool \[2, 3, 19\]"),
        ("pages", x["pages"].astype(jnp.bfloat16), r"pages must be float32 \[pages, rows, 24\]"),
        ("pages", x["pages"][:0], "at least one head, one channel and one page"),
        ("table", x["table"].astype(jnp.float32), r"table must be int32 \[2, n\], got float32"),
        ("ids", x["ids"][:, 1:], r"ids must be int32 \[2, 3, k\]"),
        ("sinks", x["sinks"][1:], r"sinks must be float32 \[3\]"),
    ]
    for name, value, message in changes:
        with pytest.raises(ValueError, match=message):
            sparse(x | {name: value})
    with pytest.raises(ValueError, match=r"counts must be int32 \[2, 3\]"):
        dense(x | {"counts": x["counts"][0]})
    with pytest.raises(ValueError, match="implementation='triton' must be 'pallas' or 'xla'"):
        sparse(x, implementation="triton")
    for fields, message in (
        ({"head_block": 8}, "head_block=8 must be a power of two, 16 or more"),
        ({"key_block": 48}, "key_block=48 must be"),
        ({"keys_per_split": 24}, "keys_per_split=24 must be a positive multiple of"),
        ({"keys_per_split": 0}, "keys_per_split=0 must be"),
    ):
        with pytest.raises(ValueError, match=message):
            replace(WHOLE, **fields)


# Lowering for CUDA ------------------------------------------------------------------------------------------


def shapes(
    kind: str, *, tokens=2, heads=64, dim=512, rope=64, window=128, top_k=512, rows=64, pages=8, pool=32
):
    """What the kernels take, as shapes."""
    dtype, layout = kind.split()[-1], None
    stored = jax.ShapeDtypeStruct((pool, rows, dim), dtype)
    if kind.startswith("fp8"):
        layout = page_layout("fp8", rows, dim, rope)
        stored = jax.ShapeDtypeStruct((pool, layout.nbytes), "uint8")
    x = {
        "q": jax.ShapeDtypeStruct((2, tokens, heads, dim), dtype),
        "window": jax.ShapeDtypeStruct((2, window, dim), dtype),
        "window_visible": jax.ShapeDtypeStruct((2, tokens, window), "bool"),
        "pages": stored,
        "table": jax.ShapeDtypeStruct((2, pages), "int32"),
        "sinks": jax.ShapeDtypeStruct((heads,), "float32"),
    }
    return (
        x | {"ids": jax.ShapeDtypeStruct((2, tokens, top_k), "int32")},
        x | {"counts": jax.ShapeDtypeStruct((2, tokens), "int32")},
        layout,
    )


def lowered(function, x, **how) -> str:
    """The program for CUDA, made without one."""
    check = DisabledSafetyCheck.custom_call("__gpu$xla.gpu.triton")
    program = jax.jit(partial(function, interpret=False, **how))
    return export(program, platforms=["cuda"], disabled_checks=[check])(**x).mlir_module()


MICRO = {"heads": 3, "dim": 16, "rope": 4, "window": 8, "top_k": 2, "rows": 4, "pages": 3}


@pytest.mark.parametrize(
    "kind, size",
    [(kind, "flash") for kind in KINDS[:2] + KINDS[3:]] + [(kind, "micro") for kind in KINDS[::2]],
)
def test_lowering_for_cuda(kind: str, size: str) -> None:
    selected, counted, layout = shapes(kind, **(MICRO if size == "micro" else {}))
    for split in (None, 64):
        config = default_config(kind.split()[-1], layout is not None)
        how = {"layout": layout, "config": replace(config, keys_per_split=split)}
        for text, name in (
            (lowered(sparse_attention, selected, **how), "sparse_attention"),
            (lowered(dense_attention, counted, **how), "dense_attention"),
        ):
            assert text.count("__gpu$xla.gpu.triton") == (1 if split is None else 2)
            assert name in text and ("merge_attention" in text) == (split is not None)
    assert "triton" not in lowered(sparse_attention, selected, layout=layout, implementation="xla")


@pytest.mark.parametrize("native", [False, True])
def test_a_dtype_may_be_given_by_name(native: bool) -> None:
    named = [default_config(dtype, native) for dtype in ("bfloat16", jnp.bfloat16, jnp.dtype("bfloat16"))]
    assert len(set(named)) == 1
    assert named[0] != default_config("float32", native) == default_config(jnp.float32, native)


def test_products_of_float32_are_no_tf32() -> None:
    """A GPU would take TF32 for a float32 product that states no precision; a CPU would not show it."""

    def stated(function, *arguments) -> bool:
        text = str(jax.make_jaxpr(function)(*arguments))
        products = text.count("dot_general[")
        assert products
        return text.count("precision=(Precision.HIGHEST, Precision.HIGHEST)") == products

    selected, counted, _ = shapes("float32", **MICRO)
    assert stated(lambda x: sparse_attention(**x), selected)
    assert stated(lambda x: dense_attention(**x), counted)
    assert not stated(jnp.dot, np.ones((2, 2)), np.ones((2, 2)))  # the check can fail


def test_native_pages_of_two_to_four_gib_are_refused() -> None:
    """Pallas would address their bytes with signed 32-bit offsets. Plain XLA does not, nor beyond 4 GiB."""
    for gib, refused in ((1.9, False), (2.1, True), (3.9, True), (4.1, False)):
        selected, _, layout = shapes("fp8 in bfloat16", pool=int(gib * 2**30 / 37440))
        for implementation in ("pallas", "xla"):
            how = {"layout": layout, "implementation": implementation}
            if refused and implementation == "pallas":
                with pytest.raises(ValueError, match=r"pages of .* bytes must have at most 2\^31"):
                    lowered(sparse_attention, selected, **how)
            else:
                lowered(sparse_attention, selected, **how)
