"""What is timed on a GPU: every function at Flash's sizes, with inputs made on the device.

A point is timed as a loop. Each turn takes other pages of a pool that is larger than the L2 cache, so that it
is memory that is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from goldenkv.state import page_layout

from .. import attention, compressor, indexer, native, paging
from . import roofline

TURNS = 24
"""Of a loop."""

POOL = 512 * 2**20
"""Bytes that a loop walks through: ten times the L2 cache, or 4 copies of a turn's pages if less."""

ROWS, ROPE = 64, 64
LAYOUT = page_layout("fp8", ROWS, roofline.CHANNELS, ROPE)
PALLAS, XLA, SPLIT = "pallas", "xla", "pallas, 256 keys a program"

Arrays = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Point:
    """One function at one size.

    Attributes:
        name: of the function, and the format.
        size: what varies.
        usual: whether it is the size for which a target is set.
        work: what one turn must do.
        make: makes the arrays from a random key.
        call: of an implementation and the arrays of one turn.
        turning: arrays with a leading axis of turns; the others are the same in each.
        carried: an array that the result replaces, for functions that write in place.
        implementations: that are timed.
    """

    name: str
    size: str
    usual: bool
    work: roofline.Work
    make: Callable[[jax.Array], Arrays]
    call: Callable[[str, Arrays], Any]
    turning: tuple[str, ...] = ()
    carried: str = ""
    implementations: tuple[str, ...] = (PALLAS, XLA)

    def loop(self, implementation: str, turns: int) -> Callable[[Any, Arrays], Any]:
        """So many turns, as one function of what is carried and the other arrays; see `split`."""

        def run(carried: Any, arrays: Arrays) -> Any:
            def turn(i: jax.Array, before: Any) -> Any:
                now = {n: a[i % len(a)] if n in self.turning else a for n, a in arrays.items()}
                now, _ = lax.optimization_barrier((now, i))  # or XLA moves the call out of the loop
                return self.call(implementation, now | ({self.carried: before} if self.carried else {}))

            if not self.carried:
                shapes = jax.eval_shape(turn, 0, None)
                carried = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
            return lax.fori_loop(0, turns, turn, carried)

        return run

    def split(self, key: jax.Array) -> tuple[Any, Arrays]:
        """The arguments of a loop: the carried array or None, and the others."""
        arrays = self.make(key)
        return arrays.pop(self.carried, None), arrays


def points(batches: tuple[int, ...], contexts: tuple[int, ...], pages: tuple[int, ...]) -> Iterator[Point]:
    """Every point. The first of each argument is the usual one; one thing varies at a time."""
    sizes = [(batches[0], contexts[0])]
    sizes += [(b, contexts[0]) for b in batches[1:]] + [(batches[0], c) for c in contexts[1:]]
    for n, (batch, context) in enumerate(sizes):
        for fp8 in (False, True):
            yield replace(_attention(batch, context, dense=False, fp8=fp8), usual=not n)
            yield replace(_attention(batch, context, dense=True, fp8=fp8), usual=not n)
        for top_k in (0, roofline.SELECTED):
            yield replace(_index(batch, context, top_k), usual=not n)
    for n, count in enumerate(pages):
        for point in _pages(count):
            yield replace(point, usual=not n)
    for n, tokens in enumerate(contexts):
        yield replace(_compress("CSA", tokens, roofline.CSA, roofline.CHANNELS), usual=not n)
        yield replace(_compress("index", tokens, roofline.CSA, roofline.INDEX_CHANNELS), usual=not n)
        yield replace(_compress("HCA", tokens, roofline.HCA, roofline.CHANNELS), usual=not n)


def copy(nbytes: int) -> Point:
    """What XLA reaches reading and writing one large array: how much of the floor this device gives."""
    return Point(
        "copy",
        f"{nbytes} bytes",
        True,
        roofline.Work(2.0 * nbytes, 0.0),
        lambda key: {"x": jnp.zeros(nbytes // 4, jnp.uint32)},
        lambda implementation, a: a["x"] + 1,
        carried="x",
        implementations=(XLA,),
    )


def _attention(batch: int, context: int, *, dense: bool, fp8: bool) -> Point:
    entries = context // (roofline.HCA if dense else roofline.CSA)
    seen = entries if dense else min(roofline.SELECTED, entries)
    name = "dense_attention" if dense else "sparse_attention"
    function = getattr(attention, name)
    row = LAYOUT.nbytes // ROWS if fp8 else 2 * roofline.CHANNELS

    def make(key: jax.Array) -> Arrays:
        keys = jax.random.split(key, 6)
        tables, count = _tables(keys[0], batch, entries, row)
        arrays = {
            "q": _normal(keys[1], batch, 1, roofline.HEADS, roofline.CHANNELS),
            "window": _normal(keys[2], batch, roofline.WINDOW, roofline.CHANNELS),
            "window_visible": jnp.ones((batch, 1, roofline.WINDOW), bool),
            "pages": _bytes(keys[3], count) if fp8 else _normal(keys[3], count, ROWS, roofline.CHANNELS),
            "table": tables,
            "sinks": jax.random.normal(keys[4], (roofline.HEADS,)),
        }
        if dense:
            return arrays | {"counts": jnp.full((batch, 1), entries, jnp.int32)}
        return arrays | {"ids": jax.random.randint(keys[5], (TURNS, batch, 1, seen), 0, entries)}

    def call(implementation: str, arrays: Arrays) -> Any:
        config = None
        if implementation == SPLIT:
            config = replace(attention.default_config(jnp.bfloat16, native=fp8), keys_per_split=256)
        layout = LAYOUT if fp8 else None
        which = implementation.partition(",")[0]
        return function(**arrays, layout=layout, config=config, implementation=which)

    return Point(
        f"{name} {'fp8' if fp8 else 'bf16'}",
        f"batch {batch}, context {context}",
        False,
        roofline.attention(batch, seen, native=fp8),
        make,
        call,
        ("table",) if dense else ("table", "ids"),
        implementations=(PALLAS, SPLIT, XLA),
    )


def _index(batch: int, context: int, top_k: int) -> Point:
    entries = context // roofline.CSA

    def make(key: jax.Array) -> Arrays:
        keys = jax.random.split(key, 4)
        tables, count = _tables(keys[0], batch, entries, 2 * roofline.INDEX_CHANNELS)
        return {
            "q": _normal(keys[1], batch, 1, roofline.INDEX_HEADS, roofline.INDEX_CHANNELS),
            "pages": _normal(keys[2], count, ROWS, roofline.INDEX_CHANNELS),
            "table": tables,
            "weight": jax.random.normal(keys[3], (batch, 1, roofline.INDEX_HEADS)),
            "counts": jnp.full((batch, 1), entries, jnp.int32),
        }

    def call(implementation: str, arrays: Arrays) -> Any:
        if top_k:
            return indexer.select(**arrays, top_k=top_k, implementation=implementation)
        return indexer.index_scores(**arrays, implementation=implementation)

    name, work = ("select", roofline.select) if top_k else ("index_scores", roofline.index_scores)
    size = f"batch {batch}, context {context}"
    return Point(name, size, False, work(batch, entries), make, call, ("table",))


def _compress(kind: str, tokens: int, rate: int, channels: int) -> Point:
    overlap = rate == roofline.CSA
    shape = (tokens // rate + overlap, rate, channels * (1 + overlap))

    def make(key: jax.Array) -> Arrays:
        keys = jax.random.split(key, 2)
        return {
            "kv": jax.random.normal(keys[0], shape),
            "score": jax.random.normal(keys[1], shape),
            "norm_weight": jnp.ones(channels),
            "positions": jnp.arange(shape[0], dtype=jnp.int32) * rate,
            "frequency": 160000.0 ** -jnp.linspace(0, 1, ROPE // 2),
        }

    def call(implementation: str, arrays: Arrays) -> Any:
        quantise = "hadamard_e2m1" if kind == "index" else "e4m3"
        return compressor.compress_blocks(
            **arrays, overlap=overlap, quantise=quantise, implementation=implementation
        )

    work = roofline.compress(tokens, rate, channels, overlap=overlap)
    return Point(f"compress_blocks {kind}", f"{tokens} tokens", False, work, make, call)


def _pages(count: int) -> Iterator[Point]:
    """Copies of native pages, and their packing."""
    size, moving = f"{count} pages", roofline.move(count, LAYOUT.nbytes)
    tables = lambda key: _tables(key, 1, count * ROWS, LAYOUT.nbytes // ROWS)  # noqa: E731

    def pool(key: jax.Array) -> Arrays:
        numbers, total = tables(key)
        return {"pool": _bytes(key, total), "pages": numbers[:, 0]}

    def gather(implementation: str, arrays: Arrays) -> Any:
        return paging.gather_pages(**arrays, implementation=implementation)

    def scatter(implementation: str, arrays: Arrays) -> Any:
        return paging.scatter_pages(**arrays, implementation=implementation)

    def pack(implementation: str, arrays: Arrays) -> Any:
        return native.pack_rows(**arrays, rope=ROPE, implementation=implementation)

    def unpack(implementation: str, arrays: Arrays) -> Any:
        sizes = {"rows": ROWS, "channels": roofline.CHANNELS, "rope": ROPE}
        return native.unpack_rows(**arrays, **sizes, implementation=implementation)

    def floats(key: jax.Array) -> Arrays:
        return {"rows": jax.random.normal(key, (count, ROWS, roofline.CHANNELS))}

    yield Point("gather_pages", size, False, moving, pool, gather, ("pages",))
    yield Point(
        "scatter_pages", size, False, moving,
        lambda key: pool(key) | {"rows": _bytes(key, count)}, scatter, ("pages",), "pool",
    )  # fmt: skip
    work = roofline.pack(count * ROWS)
    yield Point("pack_rows", size, False, work, floats, pack)
    yield Point("unpack_rows", size, False, work, lambda key: {"pages": _bytes(key, count)}, unpack)


def _tables(key: jax.Array, batch: int, entries: int, row: int) -> tuple[jax.Array, int]:
    """A table for every turn, int32 [TURNS, batch, pages], and how many pages the pool has."""
    pages = batch * -(-entries // ROWS)
    copies = max(1, min(4, POOL // (pages * ROWS * row)))
    numbers = jax.random.permutation(key, pages * copies).reshape(copies, batch, -1)
    return numbers[jnp.arange(TURNS) % copies].astype(jnp.int32), pages * copies


def _normal(key: jax.Array, *shape: int) -> jax.Array:
    return jax.random.normal(key, shape, jnp.bfloat16)


def _bytes(key: jax.Array, pages: int) -> jax.Array:
    """Native pages of numbers that are finite, read as E4M3, bfloat16 or scales."""
    return jax.random.bits(key, (pages, LAYOUT.nbytes), jnp.uint8) & 0x6F
