"""Bytes on their way: staging memory, and rows to objects and back."""

from __future__ import annotations

from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest

from goldenkv.state import Rows, compare
from goldenkv.tiers.errors import Corrupt
from goldenkv.tiers.objects import Address, Item, Kind, Label, Tensor
from goldenkv.tiers.staging import Staging
from goldenkv.tiers.transfer import pack, unpack

P = 16
ADDRESS = Address(b"o" * 32, b"n" * 32, b"k" * 32)

# Staging ----------------------------------------------------------------------------------------------------


def same_memory(one: np.ndarray, other: np.ndarray) -> bool:
    return one.ctypes.data == other.ctypes.data and len(one) == len(other)


def test_memory_is_used_again_by_size() -> None:
    staging = Staging()
    buffer = staging.take(100)
    assert (buffer.dtype, buffer.shape) == (np.uint8, (100,))
    assert not same_memory(staging.take(100), buffer)  # it is still out
    staging.give(buffer)
    assert not same_memory(staging.take(99), buffer)
    assert same_memory(staging.take(100), buffer)
    assert not same_memory(staging.take(100), buffer)


def test_shared_memory_comes_back_with_the_last() -> None:
    staging = Staging()
    buffer = staging.take(10)
    staging.share(buffer)
    staging.share(buffer)
    for _ in range(2):
        staging.give(buffer)
        assert not same_memory(staging.take(10), buffer)
    staging.give(buffer)
    assert same_memory(staging.take(10), buffer)


def test_no_more_is_kept_than_said() -> None:
    staging = Staging(most=25)
    buffers = [staging.take(10) for _ in range(3)]
    for buffer in buffers:
        staging.give(buffer)
    again = [staging.take(10) for _ in range(3)]
    assert [any(same_memory(a, b) for b in buffers) for a in again] == [True, True, False]
    nothing = staging.take(0)
    staging.give(nothing)
    assert len(staging.take(0)) == 0


# Objects ----------------------------------------------------------------------------------------------------

NANS = np.array([0x7F800001, 0x7FC12345, 0xFFFFFFFF, 0x80000000], np.uint32).view(np.float32).reshape(2, 2)
"""Signalling and quiet NaN with payloads, and a negative zero."""


def rows() -> Rows:
    return {
        "floats": NANS,
        "halves": np.array([[0x7F81, 0xFFC1, 0x8000]], np.uint16).view(ml_dtypes.bfloat16),
        "none": np.zeros((0, 7), np.float32),
        "bytes": np.arange(6, dtype=np.uint8).reshape(2, 3)[:, ::-1],  # not contiguous
    }


def label(of: Rows) -> Label:
    tensors = tuple(Tensor(n, a.dtype.name, a.shape) for n, a in of.items())
    return Label(ADDRESS, Kind.PAGE, P, "layout", tensors)


def plain(name: str, to: np.ndarray, source: np.ndarray) -> None:
    assert to.dtype == source.dtype == np.uint8 and to.shape == source.shape and to.ndim == 1
    to[:] = source


@pytest.mark.parametrize("copy", [None, plain], ids=["own", "given"])
def test_pack_and_unpack_keep_every_bit(copy: Callable | None) -> None:
    item = pack(label(rows()), rows(), copy)
    assert compare(unpack(item, copy), rows()).same
    item.payload[5] ^= 1
    assert compare(unpack(item, copy), rows()).first == ("floats", 0)


def test_only_live_rows_are_packed() -> None:
    longer = {name: np.concatenate([a, np.full((3, *a.shape[1:]), 7, a.dtype)]) for name, a in rows().items()}
    assert pack(label(rows()), longer).payload.tobytes() == pack(label(rows()), rows()).payload.tobytes()


@pytest.mark.parametrize("way", ["pack", "unpack"])
@pytest.mark.parametrize("name", ["floats", "none", "bytes"])
def test_a_component_that_fails_fails_the_object(way: str, name: str) -> None:
    """Every component passes the seam, empty ones too; the error of one is that of the whole."""
    item, seen = pack(label(rows()), rows()), []

    def copy(component: str, to: np.ndarray, source: np.ndarray) -> None:
        seen.append(component)
        if component == name:
            raise Corrupt("on purpose")
        plain(component, to, source)

    with pytest.raises(Corrupt, match="on purpose"):
        pack(item.label, rows(), copy) if way == "pack" else unpack(item, copy)
    assert seen == list(rows())[: len(seen)] and seen[-1] == name


def test_what_is_unpacked_with_a_copy_is_its_own() -> None:
    item = pack(label(rows()), rows())
    mine, views = unpack(item, plain), unpack(item)
    item.payload[:] = 0
    assert compare(mine, rows()).same and not compare(views, rows()).same


def test_rows_of_another_shape_or_dtype_are_a_mistake_of_ours() -> None:
    with pytest.raises(AssertionError, match="floats"):
        pack(label(rows()), rows() | {"floats": NANS[:1]})
    with pytest.raises(AssertionError, match="floats"):
        pack(label(rows()), rows() | {"floats": NANS.view(np.int32)})


def test_an_item_is_checked_when_it_is_made() -> None:
    with pytest.raises(ValueError, match=r"the payload must be uint8\[16\]"):
        Item(label({"a": NANS}), np.zeros(15, np.uint8))
