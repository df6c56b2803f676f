"""Pages and boundary states on their way between a pool and the host, and leases against late writes."""

import functools

import numpy as np
import pytest

from goldenkv.config import Numerics, micro
from goldenkv.engine import Engine
from goldenkv.model.weights import Model
from goldenkv.state import Rows, cells, compare, moving
from goldenkv.state.moving import paged_shape
from goldenkv.state.pages import CapacityError, Lease, Pages, StaleLease
from goldenkv.state.pool import PAGES_A_CALL

P = 16
SMALL = Numerics(tile=8, index_block=8, key_block=8)
CONFIG = micro()

# Pages of a pool --------------------------------------------------------------------------------------------


@functools.cache
def model() -> Model:
    return Model(CONFIG, SMALL)


def engine(pages: int = 24) -> Engine:
    sizes = dict(slots=4, max_length=128, page_size=P, pages=pages, boundaries=12)
    return Engine(model(), CONFIG, SMALL, **sizes, fill=np.nan, poison=True)


def tokens_of(length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(1, 64, length)


PAGED = [cell for cell in cells(CONFIG) if cell.component.paged]


def random_rows(seed: int, tokens: int = P) -> Rows:
    """Random bits, NaN among them, as a page of so many tokens has."""
    rng, found = np.random.default_rng(seed), {}
    for cell in PAGED:
        shape = paged_shape(CONFIG, cell, P, 0, tokens)
        found[cell.name] = rng.integers(0, 1 << 32, shape, np.uint32).view(np.float32)
    return found


@pytest.mark.parametrize("count", [0, 1, PAGES_A_CALL - 1, PAGES_A_CALL, PAGES_A_CALL + 1, 24])
def test_written_pages_are_gathered_bit_for_bit(count: int) -> None:
    """In any order, and no other page changes; none at all is no page either."""
    e = engine()
    taken = e.take_pages(24)
    leases = [taken[i] for i in np.random.default_rng(0).permutation(24)]
    e.write_pages(leases, [random_rows(i) for i in range(24)])
    e.write_pages(leases[:count], [random_rows(100 + i) for i in range(count)])
    found = e.gather_pages([lease.page for lease in leases])
    for i in range(24):
        assert compare(found.rows(i), random_rows(100 + i if i < count else i)).same, i


def test_rows_in_the_wrong_page_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    real = moving.pools.padded
    monkeypatch.setattr(moving.pools, "padded", lambda pages, fill: real(list(pages)[::-1], fill))
    with pytest.raises(AssertionError):
        test_written_pages_are_gathered_bit_for_bit(PAGES_A_CALL + 1)


def test_a_number_that_wraps_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls are filled up to a fixed size: with -1 there the last page of the pool is overwritten."""
    real = moving.pools.padded
    monkeypatch.setattr(moving.pools, "padded", lambda pages, fill: real(pages, -1 if fill else 0))
    with pytest.raises(AssertionError):
        test_written_pages_are_gathered_bit_for_bit(1)


@pytest.mark.parametrize("tokens", [1, 3, 4, 7, 8, 15])
def test_a_tail_page_has_its_rows_and_zeros_behind(tokens: int) -> None:
    e = engine()
    (lease,) = e.take_pages(1)
    e.write_pages([lease], [random_rows(0, tokens)])
    found = e.gather_pages([lease.page]).rows(0)
    for cell in PAGED:
        rows, live = found[cell.name], paged_shape(CONFIG, cell, P, 0, tokens)[0]
        assert live == tokens // CONFIG.compress_ratios[cell.layer]
        assert compare({"live": rows[:live]}, {"live": random_rows(0, tokens)[cell.name]}).same
        assert rows[live:].tobytes() == bytes(rows[live:].nbytes)  # and no NaN from before


def test_what_was_gathered_is_of_then() -> None:
    """Later writes, freed and poisoned pages change nothing; and nobody can write into it."""
    e = engine()
    leases = e.take_pages(2)
    e.write_pages(leases, [random_rows(0), random_rows(1)])
    found = e.gather_pages([lease.page for lease in leases])
    e.write_pages(leases, [random_rows(2), random_rows(3)])
    e.drop_pages([lease.page for lease in leases])
    assert compare(found.rows(0), random_rows(0)).same and compare(found.rows(1), random_rows(1)).same
    assert not any(array.flags.writeable for array in found.rows(0).values())


@pytest.mark.parametrize("length", [1, 7, 8, 9, 16, 31])
def test_boundary_states_come_back_bit_for_bit(length: int) -> None:
    """Through rows on the host, into another slot; what was gathered is of then."""
    e = engine()
    seq = e.open()
    e.prefill(seq, tokens_of(length))
    before = e.rows(seq)
    handle = e.save_boundary(seq)
    gathered = e.gather_boundary(handle)
    e.drop_boundary(handle)
    rows = gathered.rows()
    assert {n: a.shape for n, a in rows.items()} == {
        cell.name: cell.shape(CONFIG, length) for cell in cells(CONFIG) if not cell.component.paged
    }
    again = e.adopt(seq.pages, length, boundary=e.put_boundary(length, rows))
    assert compare(e.rows(again), before).same
    with pytest.raises(CapacityError, match="boundary slots"):
        for _ in range(12):
            e.put_boundary(length, rows)


# Leases -----------------------------------------------------------------------------------------------------


def test_a_late_write_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A page that was freed since it was leased is not written, nor is any other of the same call."""

    def check() -> None:
        e = engine(pages=3)
        stale, fresh = e.take_pages(2)
        e.write_pages([stale, fresh], [random_rows(0), random_rows(1)])
        e.drop_pages([stale.page])
        (again,) = e.take_pages(1)
        assert again.page == stale.page and again != stale
        e.write_pages([again], [random_rows(2)])
        with pytest.raises(StaleLease, match=rf"pages \[{stale.page}\] were freed"):
            e.write_pages([fresh, stale], [random_rows(3), random_rows(4)])
        found = e.gather_pages([again.page, fresh.page])
        assert compare(found.rows(0), random_rows(2)).same and compare(found.rows(1), random_rows(1)).same

    check()
    monkeypatch.setattr(Pages, "check", lambda self, leases: None)
    with pytest.raises(pytest.fail.Exception):
        check()


def test_leases_of_pages_nobody_holds() -> None:
    pages = Pages(2)
    with pytest.raises(ValueError, match="is free and cannot be leased"):
        pages.lease(0)
    (page,) = pages.take(1)
    lease = pages.lease(page)
    pages.hold([page])
    pages.drop([page])
    pages.check([lease])  # somebody still holds it
    pages.drop([page])
    with pytest.raises(StaleLease):
        pages.check([lease])
    assert Lease(page, 0) == lease


def test_taking_more_pages_than_there_are_takes_none() -> None:
    e = engine(pages=3)
    assert len(e.take_pages(2)) == 2
    with pytest.raises(CapacityError, match="2 pages needed, 1 free"):
        e.take_pages(2)
    assert e.free_pages == 1 and e.take_pages(0) == []
