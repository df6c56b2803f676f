"""The component table against the formulas it stands for, and the pools against a dictionary."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jaxtyping import TypeCheckError

from goldenkv.config import LayerKind, ModelConfig, Numerics, flash, micro, pro, tiny
from goldenkv.state import pool as pools
from goldenkv.state.components import COMPONENTS, Cell, cells
from goldenkv.state.pool import Geometry, Pool, Rows

EDGES = [0, 1, 3, 4, 5, 7, 8, 9, 15, 16, 17, 40]
"""Lengths around the blocks and the window of `micro`."""


def bits(x) -> np.ndarray:
    x = np.asarray(x)
    return np.ascontiguousarray(x).view(f"u{x.dtype.itemsize}")


# The table --------------------------------------------------------------------------------------------------


def needed(config: ModelConfig, layer: int, length: int) -> dict[str, tuple[list[int], int, str]]:
    """What the tokens from `length` on read of those before: rows, channels, dtype, by component.

    Token t reads the window rows t - W + 1 .. t. The block that `length` falls into needs its own rows, and
    with CSA the first half of the rows of the block before; every earlier block is in an entry.
    """
    ratio, head, index = config.compress_ratios[layer], config.head_dim, config.index_head_dim
    before = range(length)
    out = {"window": ([t for t in before if length - t < config.sliding_window], head, "bfloat16")}
    if ratio == 0:
        return out
    entries = [w for w in before if (w + 1) * ratio <= length]
    unfinished = [t for t in before if t // ratio == length // ratio]
    last = [t for t in before if t // ratio == length // ratio - 1]
    out["entries"] = (entries, head, "bfloat16")
    wide = 2 if ratio == 4 else 1
    for name in ("kv", "score"):
        out[f"rows_{name}"] = (unfinished, wide * head, "float32")
    if ratio == 4:
        out["index_keys"] = (entries, index, "bfloat16")
        for name in ("kv", "score"):
            out[f"overlap_{name}"] = (last, head, "float32")
            out[f"index_rows_{name}"] = (unfinished, 2 * index, "float32")
            out[f"index_overlap_{name}"] = (last, index, "float32")
    return out


@pytest.mark.parametrize("config", [tiny(), micro()], ids=["tiny", "micro"])
def test_live_rows_at_every_length(config: ModelConfig) -> None:
    numerics = Numerics(dtype="bfloat16")
    for length in range(301):
        expected = {
            f"layers.{layer}.{name}": row
            for layer in config.layers
            for name, row in needed(config, layer, length).items()
        }
        found = {
            c.name: (
                list(c.live(config, length)),
                c.component.channels(config, c.layer),
                c.component.dtype(numerics),
            )
            for c in cells(config)
        }
        assert found == expected, length
        for c in cells(config):
            assert c.shape(config, length) == (len(found[c.name][0]), found[c.name][1])


@pytest.mark.parametrize("config", [tiny(), micro()], ids=["tiny", "micro"])
def test_most_rows_is_reached_and_never_exceeded(config: ModelConfig) -> None:
    for cell in cells(config):
        if not cell.component.paged:
            most = max(len(cell.live(config, length)) for length in range(301))
            limit = cell.component.most_rows(config, cell.layer)
            # An unfinished block holds at most ratio - 1 rows; its transfer has room for one more.
            assert most in (limit, limit - 1), cell.name


def test_at_a_multiple_of_128_only_window_overlap_and_pages_are_left() -> None:
    config = tiny()
    left = {c.name for c in cells(config) if len(c.live(config, 256))}
    overlap = {f"layers.1.{i}overlap_{n}" for i in ("", "index_") for n in ("kv", "score")}
    windows = {f"layers.{layer}.window" for layer in range(3)}
    assert left == windows | overlap | {"layers.1.entries", "layers.1.index_keys", "layers.2.entries"}


def test_names_are_unique_and_paged_means_entries() -> None:
    assert len({c.name for c in COMPONENTS}) == len(COMPONENTS)
    assert {c.name for c in COMPONENTS if c.paged} == {"entries", "index_keys"}
    assert {c.name for c in COMPONENTS if LayerKind.WINDOW in c.kinds} == {"window"}


def boundary_bytes(config: ModelConfig, length: int, *, window: bool) -> int:
    """Bytes of the boundary cells, either of window rows or of all others."""
    sizes = {"bfloat16": 2, "float32": 4}
    total = 0
    for cell in cells(config):
        name = cell.component.name
        if not cell.component.paged and not name.startswith("draft") and (name == "window") is window:
            rows, channels = cell.shape(config, length)
            total += rows * channels * sizes[cell.component.dtype(Numerics(dtype="bfloat16"))]
    return total


@pytest.mark.parametrize(
    ("config", "layers", "csa", "hca", "published", "bytes_a_token"),
    [(flash(), 43, 21, 20, 3_644_416, 6_880), (pro(), 61, 30, 31, 5_174_272, 9_848)],
    ids=["flash", "pro"],
)
def test_bytes_of_the_published_models(
    config: ModelConfig, layers: int, csa: int, hca: int, published: int, bytes_a_token: int
) -> None:
    """At a multiple of 128, and a token of long context, in bfloat16.

    Published sizes count 128 window rows of 584 bytes in an FP8 format; exact restoring needs 127, which
    here are 1024 bytes each. What stands beside the window rows, the CSA overlap, is the same.
    """
    overlap = csa * 4 * (512 + 128) * 2 * 4  # rows, channels of both compressors, kv and score, float32
    for length in (128, 1024, 128 * 777):
        assert boundary_bytes(config, length, window=True) == layers * 127 * 512 * 2
        assert boundary_bytes(config, length, window=False) == overlap
    assert overlap + layers * 128 * 584 == published
    # One token later: a row of each compressor, CSA rows being wide.
    one_more = csa * 2 * (512 + 128) * 2 * 4 + hca * 512 * 2 * 4
    assert boundary_bytes(config, 1025, window=False) == overlap + one_more

    def paged(length: int) -> int:
        return sum(2 * int(np.prod(c.shape(config, length))) for c in cells(config) if c.component.paged)

    assert (paged(2 * 128 * 100) - paged(128 * 100)) / (128 * 100) == bytes_a_token


# Rings ------------------------------------------------------------------------------------------------------

SLOTS, RING, CHANNELS, TILE = 3, 24, 5, 8
read_ring, write_ring = jax.jit(pools.read_ring), jax.jit(pools.write_ring)
read_entries, write_entries = jax.jit(pools.read_entries), jax.jit(pools.write_entries)
SEEDS = st.integers(0, 2**32 - 1)


def int32(*values) -> np.ndarray:
    return np.array(values, np.int32)


@given(SEEDS)
def test_a_ring_is_a_dictionary_of_slot_and_position(seed: int) -> None:
    """Tiles of any sequences in any order; a position is found until RING later ones have been written."""
    rng = np.random.default_rng(seed)
    ring = jnp.full((SLOTS, RING, CHANNELS), jnp.nan)
    model: dict[tuple[int, int], np.ndarray] = {}
    for _ in range(6):
        slot, first = np.int32(rng.integers(SLOTS)), rng.integers(0, 12) * TILE
        positions = (first + np.arange(TILE)).astype(np.int32)
        live = rng.random(TILE) < 0.6
        rows = rng.standard_normal((TILE, CHANNELS)).astype(np.float32)
        ring = write_ring(ring, slot, positions, live, rows)
        for t in np.flatnonzero(live):
            place = positions[t] % RING
            model = {k: v for k, v in model.items() if k[0] != slot or k[1] % RING != place}
            model[int(slot), int(positions[t])] = rows[t]
    for slot in range(SLOTS):
        positions = rng.integers(0, 12 * TILE, 16).astype(np.int32)
        held = np.array([(slot, int(p)) in model for p in positions])
        expected = [model.get((slot, int(p)), np.zeros(CHANNELS, np.float32)) for p in positions]
        # Unwritten rows hold NaN, and what is not valid comes back as 0 whatever stands there.
        np.testing.assert_array_equal(bits(read_ring(ring, np.int32(slot), positions, held)), bits(expected))
        nothing = read_ring(ring, np.int32(slot), positions, np.zeros(16, bool))
        np.testing.assert_array_equal(bits(nothing), 0)


@given(SEEDS, st.integers(0, TILE))
def test_rows_that_are_not_live_change_nothing(seed: int, count: int) -> None:
    """Every other element of the ring keeps its bits, NaN payloads included."""
    rng = np.random.default_rng(seed)
    before = rng.integers(0, 2**32, (SLOTS, RING, CHANNELS), np.uint32).view(np.float32)
    slot, positions = (
        np.int32(rng.integers(SLOTS)),
        (rng.integers(0, 12) * TILE + np.arange(TILE)).astype(np.int32),
    )
    live = np.arange(TILE) < count
    rows = np.full((TILE, CHANNELS), 7.0, np.float32)
    expected = before.copy()
    expected[slot, positions[live] % RING] = 7.0
    after = write_ring(jnp.asarray(before), slot, positions, live, rows)
    np.testing.assert_array_equal(bits(after), bits(expected))


# Pages ------------------------------------------------------------------------------------------------------

PAGES, PAGE_ROWS, TABLE = 9, 4, 4


@given(SEEDS)
def test_pages_are_a_dictionary_of_sequence_and_entry(seed: int) -> None:
    """Two sequences with pages in any places, written in pieces; unowned table places hold garbage."""
    rng = np.random.default_rng(seed)
    pages = jnp.full((PAGES, PAGE_ROWS, CHANNELS), jnp.nan)
    places = rng.permutation(PAGES)
    owned = {0: 4, 1: 3}
    tables = {s: int32(*[-1] * TABLE) for s in owned}
    tables[0][:], tables[1][:3] = places[:4], places[4:7]
    model: dict[tuple[int, int], np.ndarray] = {}
    for _ in range(6):
        s = int(rng.integers(2))
        ids = (rng.integers(0, owned[s] * PAGE_ROWS) + np.arange(3)).astype(np.int32)
        done = (rng.random(3) < 0.7) & (ids < owned[s] * PAGE_ROWS)
        rows = rng.standard_normal((3, CHANNELS)).astype(np.float32)
        pages = write_entries(pages, tables[s], ids, done, rows)
        for i in np.flatnonzero(done):
            model[s, int(ids[i])] = rows[i]
    for s in owned:
        ids = rng.permutation(TABLE * PAGE_ROWS).astype(np.int32)
        held = np.array([(s, int(i)) in model for i in ids])
        expected = [model.get((s, int(i)), np.zeros(CHANNELS, np.float32)) for i in ids]
        np.testing.assert_array_equal(bits(read_entries(pages, tables[s], ids, held)), bits(expected))
    # Pages that nobody owns, and rows that nobody wrote, still hold what they held.
    written = {(int(tables[s][i // PAGE_ROWS]), i % PAGE_ROWS) for s, i in model}
    untouched = [p for p in np.ndindex(PAGES, PAGE_ROWS) if p not in written]
    assert all(np.isnan(pages[p]).all() for p in untouched)


def test_minus_one_is_no_entry() -> None:
    """As ids it reads 0 where not valid; where done is False it writes nowhere, not into the last row."""
    pages = jnp.full((PAGES, PAGE_ROWS, CHANNELS), jnp.nan)
    table, ids = int32(8, 7, -1, -1), int32(-1, -1, -1)
    np.testing.assert_array_equal(bits(read_entries(pages, table, ids, np.zeros(3, bool))), 0)
    ones = np.ones((3, CHANNELS), np.float32)
    after = write_entries(pages, table, ids, np.zeros(3, bool), ones)
    np.testing.assert_array_equal(bits(after), bits(pages))


def test_entries_of_two_axes_are_read_alike() -> None:
    """The entries selected for each query: ids [t, k]."""
    rng = np.random.default_rng(0)
    pages = jnp.asarray(rng.standard_normal((PAGES, PAGE_ROWS, CHANNELS)), jnp.float32)
    table, ids = int32(3, 1, 8, 0), rng.integers(-1, 16, (5, 6)).astype(np.int32)
    got = np.asarray(read_entries(pages, table, ids, ids >= 0))
    for (t, k), i in np.ndenumerate(ids):
        expected = np.zeros(CHANNELS) if i < 0 else np.asarray(pages)[table[i // PAGE_ROWS], i % PAGE_ROWS]
        np.testing.assert_array_equal(got[t, k], expected)


# Whole pools ------------------------------------------------------------------------------------------------

SMALL = Geometry(slots=2, pages=12, page_size=8, tile=8)
OTHER = Geometry(slots=3, pages=7, page_size=24, tile=16)


def filled(config: ModelConfig, geometry: Geometry, seed: int, dtype: str = "float32") -> Pool:
    """A pool of random bits: NaN payloads, infinities, subnormals and -0 among them."""
    rng = np.random.default_rng(seed)

    def random(array: jax.Array) -> jax.Array:
        size = array.dtype.itemsize
        return jnp.asarray(rng.integers(0, 2 ** (8 * size), array.shape, f"u{size}").view(array.dtype))

    return jax.tree.map(random, pools.create_pool(config, Numerics(dtype=dtype), geometry))


def place(config: ModelConfig, pool: Pool, cell: Cell, slot: int, pages: list[int], row: int) -> tuple:
    """Where an absolute row lies: (slot or page, row, channels)."""
    buffer = pool[cell.layer][cell.component.buffer]
    channels = slice(cell.component.channels(config, cell.layer))
    if cell.component.paged:
        return pages[row // buffer.shape[1]], row % buffer.shape[1], channels
    return slot, row % buffer.shape[1], channels


def by_hand(config: ModelConfig, pool: Pool, slot: int, pages: list[int], length: int) -> Rows:
    host = jax.tree.map(np.asarray, pool)
    out = {}
    for cell in cells(config):
        buffer = host[cell.layer][cell.component.buffer]
        found = [buffer[place(config, pool, cell, slot, pages, row)] for row in cell.live(config, length)]
        out[cell.name] = np.array(found, buffer.dtype).reshape(cell.shape(config, length))
    return out


def assert_same(left: Rows, right: Rows) -> None:
    assert left.keys() == right.keys()
    for name in left:
        assert left[name].dtype == right[name].dtype and left[name].shape == right[name].shape, name
        np.testing.assert_array_equal(bits(left[name]), bits(right[name]), err_msg=name)


@pytest.mark.parametrize("length", EDGES)
def test_rows_move_between_pools_of_different_geometry(length: int) -> None:
    """Bit for bit, from any slot and pages to any others; nothing else in the target moves."""
    config, rng = micro(), np.random.default_rng(length)
    source, target = filled(config, SMALL, 1), filled(config, OTHER, 2)
    from_pages = [int(p) for p in rng.permutation(SMALL.pages)[: -(-length // SMALL.page_size)]]
    to_pages = [int(p) for p in rng.permutation(OTHER.pages)[: -(-length // OTHER.page_size)]]
    rows = pools.read_rows(config, source, 1, from_pages, length)
    assert_same(rows, by_hand(config, source, 1, from_pages, length))

    before = jax.tree.map(lambda a: np.array(a), target)
    after = pools.write_rows(config, target, 2, to_pages, length, rows)
    assert_same(pools.read_rows(config, after, 2, to_pages, length), rows)
    host = jax.tree.map(lambda a: np.array(a), after)
    for cell in cells(config):  # put the old values back where the sequence lives: then all is as before
        old, new = (p[cell.layer][cell.component.buffer] for p in (before, host))
        owned = to_pages if cell.component.paged else []
        new[owned] = old[owned]
        for row in [] if cell.component.paged else cell.live(config, length):
            where = place(config, after, cell, 2, to_pages, row)
            new[where] = old[where]
    for layer_before, layer_after in zip(before, host, strict=True):
        for name in layer_before:
            np.testing.assert_array_equal(bits(layer_after[name]), bits(layer_before[name]), err_msg=name)


@pytest.mark.parametrize("count", [1, 15, 16, 17, 33])
def test_more_pages_than_one_call_moves(count: int) -> None:
    config = micro()
    geometry = Geometry(slots=1, pages=40, page_size=8, tile=8)
    rng = np.random.default_rng(count)
    source = filled(config, geometry, 3)
    pages, others = ([int(p) for p in rng.permutation(40)[:count]] for _ in range(2))
    length = count * 8 - 3
    rows = pools.read_rows(config, source, 0, pages, length)
    assert_same(rows, by_hand(config, source, 0, pages, length))
    after = pools.write_rows(config, filled(config, geometry, 4), 0, others, length, rows)
    assert_same(pools.read_rows(config, after, 0, others, length), rows)


@pytest.mark.parametrize("length", [127, 128, 129, 300])
def test_published_window_and_ratios(length: int) -> None:
    config = tiny()
    source = filled(config, Geometry(slots=2, pages=4, page_size=128, tile=32), 5)
    pages = [3, 0, 2][: -(-length // 128)]
    rows = pools.read_rows(config, source, 1, pages, length)
    assert_same(rows, by_hand(config, source, 1, pages, length))
    target = filled(config, Geometry(slots=1, pages=2, page_size=256, tile=128), 6)
    after = pools.write_rows(config, target, 0, [1, 0][: -(-length // 256)], length, rows)
    assert_same(pools.read_rows(config, after, 0, [1, 0][: -(-length // 256)], length), rows)


def test_bfloat16_pools() -> None:
    """Every bit pattern, NaN payloads included."""
    config = micro()
    source = filled(config, SMALL, 7, "bfloat16")
    rows = pools.read_rows(config, source, 0, [5, 2, 9], 21)
    assert_same(rows, by_hand(config, source, 0, [5, 2, 9], 21))
    assert {r.dtype.name for n, r in rows.items() if n.endswith((".window", "entries", "keys"))} == {
        "bfloat16"
    }
    assert {r.dtype.name for n, r in rows.items() if "_kv" in n or "_score" in n} == {"float32"}
    after = pools.write_rows(config, filled(config, OTHER, 8, "bfloat16"), 1, [4], 21, rows)
    assert_same(pools.read_rows(config, after, 1, [4], 21), rows)


def test_rows_on_the_host_do_not_change_with_the_pool() -> None:
    config = micro()
    pool = filled(config, SMALL, 9)
    rows = pools.read_rows(config, pool, 0, [0, 1], 13)
    kept = {name: value.copy() for name, value in rows.items()}
    zeros = {name: np.zeros_like(value) for name, value in rows.items()}
    pools.write_rows(config, pool, 0, [0, 1], 13, zeros)
    assert_same(rows, kept)


def test_a_swap_of_two_pages_shows() -> None:
    """The control of the moves above."""
    config = micro()
    source = filled(config, SMALL, 10)
    right, wrong = (pools.read_rows(config, source, 0, pages, 16) for pages in ([3, 4], [4, 3]))
    assert not np.array_equal(bits(right["layers.1.entries"]), bits(wrong["layers.1.entries"]))
    np.testing.assert_array_equal(bits(right["layers.1.window"]), bits(wrong["layers.1.window"]))


@pytest.mark.parametrize("fill", [0.0, 3.5, float("nan")])
def test_a_new_pool_has_the_stated_sizes(fill: float) -> None:
    config = tiny()
    geometry = Geometry(slots=3, pages=5, page_size=256, tile=32)
    pool = pools.create_pool(config, Numerics(dtype="bfloat16"), geometry, fill)
    shapes = [{name: (a.shape, a.dtype.name) for name, a in buffers.items()} for buffers in pool]
    window = {"window": ((3, 128 + 32, 32), "bfloat16")}
    csa = {  # a ring holds what one tile reads: its own eight blocks and the one before
        "entries": ((5, 64, 32), "bfloat16"),
        "rows_kv": ((3, 36, 64), "float32"),
        "rows_score": ((3, 36, 64), "float32"),
        "index_keys": ((5, 64, 16), "bfloat16"),
        "index_rows_kv": ((3, 36, 32), "float32"),
        "index_rows_score": ((3, 36, 32), "float32"),
    }
    hca = {
        "entries": ((5, 2, 32), "bfloat16"),
        "rows_kv": ((3, 256, 32), "float32"),
        "rows_score": ((3, 256, 32), "float32"),
    }
    assert shapes == [window, window | csa, window | hca]
    for buffers in pool:
        for array in buffers.values():
            np.testing.assert_array_equal(np.asarray(array, np.float32), np.float32(fill))


@pytest.mark.parametrize(
    ("geometry", "message"),
    [
        (Geometry(slots=1, pages=1, page_size=12, tile=8), "page_size=12 must be a positive multiple of 8"),
        (Geometry(slots=1, pages=1, page_size=0, tile=8), "page_size=0"),
        (Geometry(slots=0, pages=1, page_size=8, tile=8), "slots=0"),
        (Geometry(slots=1, pages=0, page_size=8, tile=8), "pages=0"),
    ],
)
def test_sizes_that_do_not_fit_are_named(geometry: Geometry, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pools.create_pool(micro(), Numerics(tile=8), geometry)


def test_wrong_shapes_are_refused() -> None:
    ring, positions, live = jnp.zeros((1, 8, 4)), jnp.arange(3, dtype=jnp.int32), jnp.ones(3, bool)
    with pytest.raises(TypeCheckError, match="'rows'"):
        pools.write_ring(ring, jnp.int32(0), positions, live, jnp.zeros((3, 5)))
    with pytest.raises(TypeCheckError, match="'valid'"):
        pools.read_ring(ring, jnp.int32(0), positions, live[:2])
    with pytest.raises(TypeCheckError, match="'ids'"):
        pools.read_entries(ring, positions, live, live)
