"""Pages and boundary slots: reference counts against a dictionary, copies, poison, bad input."""

import functools
from collections import Counter

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from goldenkv.config import Numerics, micro, with_mtp
from goldenkv.engine import CapacityError, Engine
from goldenkv.model.weights import Model
from goldenkv.state import Rows, compare
from goldenkv.state.pages import Pages

CONFIG = with_mtp(micro())
SMALL = Numerics(tile=8, index_block=8, key_block=8)


@functools.cache
def model() -> Model:
    return Model(CONFIG, SMALL)


def engine(**sizes: int) -> Engine:
    return Engine(
        model(),
        CONFIG,
        SMALL,
        **(dict(slots=4, max_length=64, boundaries=2) | sizes),
        fill=np.nan,
        poison=True,
    )


def tokens_of(length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 64, length)


def cold(ids: np.ndarray) -> Rows:
    e = engine()
    seq = e.open()
    logits = e.prefill(seq, ids)
    return e.rows(seq) | {"logits": logits[None]}


def differing(found: Rows, expected: Rows) -> set[str]:
    return {name for name, ok in compare(found, expected).by_name.items() if not ok.all()}


# Reference counts -------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.sampled_from(["take", "hold", "drop"]), st.integers(0, 5)), max_size=60))
def test_counts_are_those_of_a_dictionary(steps: list[tuple[str, int]]) -> None:
    pages, held = Pages(6), Counter[int]()
    for what, n in steps:
        if what == "take":
            if n > 6 - len(+held):
                with pytest.raises(CapacityError, match=f"{n} pages needed, {6 - len(+held)} free of 6"):
                    pages.take(n)
            else:
                taken = pages.take(n)
                assert len(set(taken)) == n and not set(taken) & set(+held)
                held.update(taken)
        elif held[n] < 1:
            with pytest.raises(ValueError, match="free"):
                (pages.hold if what == "hold" else pages.drop)([n])
        elif what == "hold":
            pages.hold([n])
            held[n] += 1
        else:
            held[n] -= 1
            assert pages.drop([n]) == ([] if held[n] else [n])
        assert [pages.holders(i) for i in range(6)] == [held[i] for i in range(6)]
        assert pages.free == 6 - len(+held)


def test_a_call_that_fails_changes_nothing() -> None:
    pages = Pages(3)
    taken = pages.take(2)
    with pytest.raises(ValueError, match="page 2 is free and cannot be shared"):
        pages.hold([taken[0], 2])
    with pytest.raises(ValueError, match="page 2 is free already"):
        pages.drop([taken[0], 2])
    assert [pages.holders(i) for i in range(3)] == [1, 1, 0]


# Geometry ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [8, 16, 24, 64])
def test_any_multiple_of_the_alignment_is_a_page(size: int) -> None:
    e = engine(page_size=size)
    seq = e.open()
    logits = e.prefill(seq, tokens_of(30))
    assert not differing(e.rows(seq) | {"logits": logits[None]}, cold(tokens_of(30)))


@pytest.mark.parametrize("size", [0, -8, 4, 12, 20])
def test_other_page_sizes_are_refused_with_the_reason(size: int) -> None:
    with pytest.raises(ValueError, match=f"page_size={size} must be a positive multiple of 8.*end together"):
        engine(page_size=size)


# Poison -----------------------------------------------------------------------------------------------------


def nan_pages(e: Engine) -> set[int]:
    """Pages that hold nothing but NaN in every paged buffer."""
    paged = [b for layer in e._pool for name, b in layer.items() if name in ("entries", "index_keys")]
    poisoned = [np.isnan(np.asarray(buffer, np.float32)).all(axis=(1, 2)) for buffer in paged]
    return set(np.flatnonzero(np.logical_and.reduce(poisoned)))


def test_freed_pages_are_poisoned() -> None:
    e = engine()
    seq = e.open()
    e.prefill(seq, tokens_of(40))
    owned = set(seq.pages)
    assert not owned & nan_pages(e)
    e.close(seq)
    assert owned <= nan_pages(e)


def test_a_freed_boundary_is_poisoned_and_cannot_be_loaded() -> None:
    e = engine()
    seq = e.open()
    e.prefill(seq, tokens_of(16))
    handle = e.save_boundary(seq)
    e.drop_boundary(handle)
    assert all(bool(jnp.isnan(a[handle]).all()) for a in e._boundaries._store.values())
    with pytest.raises(ValueError, match=f"boundary {handle} holds nothing"):
        e.adopt(seq.pages, 16, boundary=handle)
    with pytest.raises(ValueError, match="holds nothing"):
        e.drop_boundary(handle)


def test_boundary_slots_run_out() -> None:
    e = engine()
    seq = e.open()
    e.prefill(seq, tokens_of(9))
    handles = [e.save_boundary(seq) for _ in range(2)]
    with pytest.raises(CapacityError, match="all 2 boundary slots are taken"):
        e.save_boundary(seq)
    assert len(set(handles)) == 2 and e.free_boundaries == 0


# Adoption: bad input leaves nothing behind ------------------------------------------------------------------


def test_adoption_that_does_not_fit() -> None:
    e = engine()
    seq = e.open()
    e.prefill(seq, tokens_of(24))
    late = e.save_boundary(seq)
    before = e.free_slots, e.free_pages, [e.holders(page) for page in seq.pages]
    free = next(page for page in range(e.geometry.pages) if not e.holders(page))
    for pages, length, options, error in (
        (seq.pages[:2], 24, {}, "2 pages of 8 tokens"),
        (seq.pages, 16, {}, "3 pages of 8 tokens"),
        (seq.pages[:2], 16, {"boundary": late}, "starting at 24"),
        (seq.pages[:2], 16, {"since": 17}, "starting at 17"),
        (seq.pages[:2], 16, {"since": -1}, "starting at -1"),
        ([seq.pages[0], free], 16, {}, "is free"),
    ):
        with pytest.raises(ValueError, match=error):
            e.adopt(pages, length, **options)
        assert (e.free_slots, e.free_pages, [e.holders(page) for page in seq.pages]) == before
    with pytest.raises(CapacityError, match="exceed max_length"):
        e.adopt([0] * 9, 72)


def test_a_replay_must_end_where_the_pages_end() -> None:
    e = engine()
    seq = e.open()
    e.prefill(seq, tokens_of(24))
    again = e.adopt(seq.pages, 24, since=8)
    for count in (0, 15, 17):
        with pytest.raises(ValueError, match=f"{count} tokens from 8 on do not end at 24"):
            e.replay(again, tokens_of(24)[8:][:count] if count < 17 else tokens_of(17))
    e.replay(again, tokens_of(24)[8:])
    assert again.length == 24 and again.pages == seq.pages
