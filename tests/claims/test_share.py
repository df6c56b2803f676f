"""Claim: sharing changes no bit of anybody.

Forks, and sequences over the pages of others, copy before they write.

Controls: a write without the copy, and a fork that leaves its ring rows behind.
"""

import functools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from goldenkv.config import Numerics, micro, with_mtp
from goldenkv.engine import Engine, Sequence
from goldenkv.model.weights import Model
from goldenkv.state import Rows, compare

SMALL = Numerics(tile=8, index_block=8, key_block=8)
SETUPS = {
    "float32": (micro(), SMALL),
    "quantised bfloat16": (with_mtp(micro()), replace(SMALL, dtype="bfloat16", fake_quantisation=True)),
}
LENGTHS = [1, 3, 4, 7, 8, 9, 11, 12, 15, 16, 17, 23, 24, 25, 31, 32, 33, 40]


@functools.cache
def engine(name: str) -> Engine:
    config, numerics = SETUPS[name]
    sizes = dict(slots=6, max_length=96, page_size=16, pages=40, boundaries=6)
    return Engine(Model(config, numerics), config, numerics, **sizes, fill=np.nan, poison=True)


def tokens_of(length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 64, length)


def differing(found: Rows, expected: Rows) -> set[str]:
    return {name for name, ok in compare(found, expected).by_name.items() if not ok.all()}


@functools.lru_cache(maxsize=512)
def cold_of(name: str, tokens: tuple[int, ...]) -> Rows:
    e = engine(name)
    seq = e.open()
    logits = e.prefill(seq, list(tokens))
    found = e.rows(seq) | {"logits": logits[None]}
    e.close(seq)
    return found


def cold(name: str, tokens: list[int]) -> Rows:
    return cold_of(name, tuple(int(t) for t in tokens))


def wrong(name: str, seq: Sequence, tokens: list[int]) -> set[str]:
    """What differs from the cold run of the same tokens: state now, and logits after one more."""
    e = engine(name)
    found = differing(e.rows(seq), {n: r for n, r in cold(name, tokens).items() if n != "logits"})
    twin = e.fork(seq)
    logits = {"logits": e.decode(twin, 5)[None]}
    e.close(twin)
    return found | differing(logits, {"logits": cold(name, [*tokens, 5])["logits"]})


def family(name: str, length: int, branches: list[tuple[int, int]]) -> set[str]:
    """Forks of forks that go on with tokens of their own; what differs in any of them at the end."""
    e = engine(name)
    ids = [int(t) for t in tokens_of(length)]
    seq = e.open()
    e.prefill(seq, ids)
    members = [(seq, ids)]
    for number, (parent, count) in enumerate(branches):
        seq, ids = members[parent % len(members)]
        fresh = [int(t) for t in tokens_of(count, seed=100 + number)]
        twin = e.fork(seq)
        members.append((twin, ids + fresh))
        if count:
            e.prefill(twin, fresh)
    found = set[str]().union(*(wrong(name, seq, ids) for seq, ids in members))
    for seq, _ in members:
        e.close(seq)
    return found


@pytest.mark.parametrize("name", SETUPS)
@settings(max_examples=60)
@given(
    length=st.sampled_from(LENGTHS),
    branches=st.lists(st.tuples(st.integers(0, 4), st.sampled_from([0, 1, 2, 5, 8, 9, 17])), max_size=4),
)
def test_forks_are_cold(name: str, length: int, branches: list[tuple[int, int]]) -> None:
    assert not family(name, length, branches)
    assert engine(name).free_slots == 6 and engine(name).free_pages == 40


@pytest.mark.parametrize("name", SETUPS)
@settings(max_examples=40)
@given(length=st.sampled_from(LENGTHS), more=st.sampled_from([1, 2, 8, 17]), saved=st.integers(0, 3))
def test_pages_of_others_with_a_boundary_state(name: str, length: int, more: int, saved: int) -> None:
    """Adopted at its end or before it; both go on; whoever comes later finds everything as it was."""
    e = engine(name)
    ids = [int(t) for t in tokens_of(length)]
    at = max(1, length - saved * 5)
    donor = e.open()
    e.prefill(donor, ids[:at])
    handle = e.save_boundary(donor)
    if at < length:
        e.prefill(donor, ids[at:])
    pages = list(donor.pages)
    e.hold_pages(pages)
    mine, theirs = tokens_of(more, seed=1).tolist(), tokens_of(more, seed=2).tolist()
    first = e.adopt(pages, length, boundary=handle)
    e.replay(first, ids[at:])
    assert not wrong(name, first, ids)
    e.prefill(first, mine)
    e.prefill(donor, theirs)
    assert not wrong(name, first, ids + mine) and not wrong(name, donor, ids + theirs)
    e.close(donor)
    e.close(first)
    later = e.adopt(pages, length, boundary=handle)
    e.replay(later, ids[at:])
    assert not wrong(name, later, ids)
    e.close(later)
    e.drop_boundary(handle)
    e.drop_pages(pages)
    assert (e.free_slots, e.free_pages, e.free_boundaries) == (6, 40, 6)


def test_a_batch_of_forks_that_share_a_page() -> None:
    """Both would write the same page in one call: one gets a copy, the other keeps it."""
    e = engine("float32")
    ids = tokens_of(20).tolist()
    seq = e.open()
    e.prefill(seq, ids)
    twin = e.fork(seq)
    assert e.holders(seq.pages[1]) == 2
    e.prefill_batch([(seq, [1] * 9), (twin, [2] * 9)])
    assert seq.pages[0] == twin.pages[0] and seq.pages[1] != twin.pages[1]
    assert not wrong("float32", seq, ids + [1] * 9) and not wrong("float32", twin, ids + [2] * 9)
    e.close(seq)
    e.close(twin)
    assert e.free_pages == 40


def test_a_rollback_into_a_shared_page_copies_before_it_writes() -> None:
    e = engine("float32")
    ids = tokens_of(18).tolist()
    seq = e.open()
    e.prefill(seq, ids)
    twin = e.fork(seq)
    e.rollback(twin, 13)
    e.prefill(twin, [9] * 6)
    assert not wrong("float32", seq, ids) and not wrong("float32", twin, ids[:13] + [9] * 6)
    e.close(seq)
    e.close(twin)


def test_a_copy_that_finds_no_page_changes_nothing() -> None:
    config, numerics = SETUPS["float32"]
    e = Engine(Model(config, numerics), config, numerics, slots=2, max_length=32, page_size=16, pages=1)
    seq = e.open()
    e.prefill(seq, tokens_of(5))
    twin = e.fork(seq)
    with pytest.raises(RuntimeError, match="1 pages needed, 0 free of 1"):
        e.prefill(twin, [1])
    assert (twin.length, twin.pages, e.holders(0)) == (5, seq.pages, 2)
    e.close(seq)
    e.prefill(twin, [1])  # alone, it needs no copy


# Controls ---------------------------------------------------------------------------------------------------

BRANCHES = [(0, 5), (0, 9), (1, 4)]


def test_control_a_write_without_the_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    e = engine("float32")
    assert not family("float32", 20, BRANCHES)
    monkeypatch.setattr(e._slots, "_shared", lambda seq, length: [])
    assert "layers.1.entries" in family("float32", 20, BRANCHES)


def test_control_a_copy_that_copies_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    from goldenkv.engine import sequences

    monkeypatch.setattr(sequences.pools, "copy_page", lambda pool, source, target, config: pool)
    assert "layers.1.entries" in family("float32", 20, BRANCHES)


def test_control_a_fork_without_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    from goldenkv.engine import sequences

    e = engine("float32")
    strangers = [e.open() for _ in range(6)]
    for seq in strangers:  # whose rows the forks then find in their slots
        e.prefill(seq, tokens_of(30, seed=7))
    for seq in strangers:
        e.close(seq)
    monkeypatch.setattr(sequences.pools, "copy_slot", lambda pool, source, target, config: pool)
    assert {"layers.0.window", "layers.1.overlap_kv", "logits"} <= family("float32", 20, BRANCHES)
