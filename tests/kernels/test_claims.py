"""The claims of the reference, with the kernels in its engine: interpreted here, where no GPU is needed.

Tile invariance, restore and sharing are claims about bits within one implementation. Against the reference
there is a tolerance: sums over keys run in other blocks.
"""

from __future__ import annotations

import functools
import re

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import Array
from typer.testing import CliRunner

from goldenkv import cli
from goldenkv.config import Numerics, micro, with_mtp
from goldenkv.engine import Engine, Full, PrefixCache
from goldenkv.model.weights import Model
from goldenkv.prefix import Namespace, Tenant, TensorParallel
from goldenkv.state import ForeignSnapshot, Rows, Snapshot, cells, compare
from goldenkv.state.moving import paged_shape
from goldenkv_kernels import implementation

CONFIG = with_mtp(micro())
NUMERICS = Numerics(tile=8, index_block=8, key_block=8, implementation="pallas")
REFERENCE = Numerics(tile=8, index_block=8, key_block=8)
LONGEST = 96
SUMS = 1e-4
"""Largest difference from the reference: float32 sums of some hundred terms in another order, times the few
layers through which they go."""


@functools.cache
def engine(numerics: Numerics = NUMERICS) -> Engine:
    """One for all tests: to compile interpreted kernels takes seconds."""
    sizes = dict(slots=3, max_length=LONGEST, page_size=16, pages=30, boundaries=4)
    return Engine(Model(CONFIG, REFERENCE), CONFIG, numerics, **sizes, fill=np.nan, poison=True)


def tokens_of(seed: int, length: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, CONFIG.vocab_size, length)


def everything(e: Engine, tokens: np.ndarray, plan: list[int] | None = None) -> Rows:
    """Every component and the logits of every token."""
    seq = e.open()
    logits = e.prefill(seq, tokens, plan, all_logits=True)
    found = e.rows(seq) | {"logits": logits}
    e.close(seq)
    return found


lengths = st.sampled_from([1, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 33, 63, 64, 65, 90])


@settings(max_examples=25)
@given(
    seed=st.integers(0, 3),
    length=lengths,
    cuts=st.lists(st.integers(1, 89), max_size=6),
    strangers=st.booleans(),
)
def test_tile_invariance(seed: int, length: int, cuts: list[int], strangers: bool) -> None:
    """Any chunks, any slot, any pages: the same bits."""
    e, tokens = engine(), tokens_of(seed, length)
    ends = sorted({cut for cut in cuts if cut < length} | {length})
    plan = np.diff([0, *ends]).tolist()
    expected = everything(e, tokens)
    others = [e.open() for _ in range(2 if strangers else 0)]
    for number, other in enumerate(others):  # they take the first slots and pages
        e.prefill(other, tokens_of(100 + number, 20))
    found = everything(e, tokens, plan)
    for other in others:
        e.close(other)
    assert compare(found, expected).same


def moved(e: Engine) -> bool:
    """Whether random bits, NaN among them, come back from the pages that they were written to."""
    paged, rng = [cell for cell in cells(CONFIG) if cell.component.paged], np.random.default_rng(0)
    rows: list[Rows] = []
    for _ in range(5):
        shapes = {
            c.name: paged_shape(CONFIG, c, e.geometry.page_size, 0, e.geometry.page_size) for c in paged
        }
        bits = {name: rng.integers(0, 1 << 32, shape, np.uint32) for name, shape in shapes.items()}
        rows.append({name: values.view(np.float32) for name, values in bits.items()})
    leases = e.take_pages(5)
    e.write_pages(leases[::-1], rows[::-1])
    found = e.gather_pages([lease.page for lease in leases])
    same = [compare(found.rows(i), rows[i]).same for i in range(5)]
    e.drop_pages([lease.page for lease in leases])
    return all(same)


def test_pages_move_through_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    assert moved(engine())
    real, calls = implementation.scatter_pages, []

    def first_alone(buffer: Array, pages: Array, rows: Array) -> Array:
        """A kernel that writes one page too few."""
        calls.append(rows.shape)
        return real(buffer, pages.at[0].set(np.iinfo(np.int32).max), rows)

    monkeypatch.setattr(implementation, "scatter_pages", first_alone)
    jax.clear_caches()
    assert not moved(engine()) and len(calls) == len([c for c in cells(CONFIG) if c.component.paged])
    assert moved(engine(REFERENCE))  # which calls no kernel
    jax.clear_caches()


@settings(max_examples=15)
@given(seed=st.integers(0, 3), length=lengths)
def test_restore(seed: int, length: int) -> None:
    """Through a file's bytes, then six more tokens."""
    e, tokens = engine(), tokens_of(seed, length + 6)
    seq = e.open()
    e.prefill(seq, tokens[:length])
    kept = e.snapshot(seq).to_bytes(CONFIG)
    expected = [e.decode(seq, int(token)) for token in tokens[length:]], e.rows(seq)
    e.close(seq)
    again = e.restore(Snapshot.from_bytes(kept))
    found = [e.decode(again, int(token)) for token in tokens[length:]], e.rows(again)
    e.close(again)
    assert (np.array(found[0]).view(np.uint32) == np.array(expected[0]).view(np.uint32)).all()
    assert compare(found[1], expected[1]).same


def test_a_shared_prefix() -> None:
    e = engine()
    namespace = Namespace(
        domain=Tenant("a", None), model=e.fingerprint, tokenizer=None, chat_template=None, layout="pool",
        page_size=16, dtype="float32", tensor_parallel=TensorParallel(1, 0, "none"), adapter=None, media=(),
        salt=None,
    )  # fmt: skip
    cache, prompt = PrefixCache(e, Full()), tokens_of(5, 60)
    first = cache.begin(namespace, prompt)
    logits = cache.run(first)
    cache.finish(first)
    again = cache.begin(namespace, prompt)
    assert again.plan is not None and again.plan.length == 48
    assert (cache.run(again).view(np.uint32) == logits.view(np.uint32)).all()
    cache.finish(again)
    cache.forget(namespace)


@pytest.mark.parametrize("length", [1, 5, 90])
def test_it_agrees_with_the_reference(length: int) -> None:
    tokens = tokens_of(7, length)
    found, expected = everything(engine(), tokens), everything(engine(REFERENCE), tokens)
    assert found.keys() == expected.keys()
    for name in found:
        np.testing.assert_allclose(found[name], expected[name], rtol=0, atol=SUMS, err_msg=name)


def test_control_bits_are_not_those_of_the_reference() -> None:
    """Otherwise the name in the fingerprint, and this file, would test nothing."""
    tokens = tokens_of(7, 90)
    assert not compare(everything(engine(), tokens), everything(engine(REFERENCE), tokens)).same


def test_state_of_another_implementation_is_a_miss() -> None:
    seq = engine().open()
    engine().prefill(seq, tokens_of(1, 9))
    snapshot = engine().snapshot(seq)
    engine().close(seq)
    with pytest.raises(ForeignSnapshot):
        engine(REFERENCE).restore(snapshot)


def test_a_name_that_nothing_offers() -> None:
    with pytest.raises(ValueError, match=r"implementation='cuda' is not installed; there is 'xla', 'pallas'"):
        Engine(Model(CONFIG, REFERENCE), CONFIG, Numerics(tile=8, implementation="cuda"), max_length=8)


def test_the_command_line_lists_what_this_package_offers() -> None:
    shown = CliRunner().invoke(cli.app, ["--help"], env={"COLUMNS": "80"}).output
    assert re.search(r"^\W*kernels +GPU kernels", shown, flags=re.MULTILINE), shown
