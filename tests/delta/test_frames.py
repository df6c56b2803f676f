"""Which row is predicted from which: every row once, and only from rows that are there."""

import numpy as np
import pytest

from goldenkv.delta import Frames
from goldenkv.delta.frames import FARTHEST

LENGTHS = [0, 1, 2, 3, 4, 5, 8, 9, 16, 17, 100]


@pytest.mark.parametrize("kind", ["P", "B"])
@pytest.mark.parametrize("rows", LENGTHS)
def test_every_row_once_and_from_rows_before_it(kind: str, rows: int) -> None:
    known: set[int] = set()
    for number, step in enumerate(Frames(100, kind).steps(rows)):
        assert (step.before is None) == (number == 0), "the first frame alone is a keyframe"
        for references in (step.before, step.after):
            if references is not None:
                assert len(references) == len(step.rows)
                assert set(references.tolist()) <= known, "predicted from what is not decoded yet"
        assert not known & set(step.rows.tolist())
        known |= set(step.rows.tolist())
    assert known == set(range(rows))


def test_p_frames_follow_the_row_before() -> None:
    for step in Frames(16).steps(16)[1:]:
        assert step.before is not None and step.after is None
        assert step.before.tolist() == [step.rows[0] - 1]


def test_b_frames_lie_in_the_middle_of_gaps_that_halve() -> None:
    steps = Frames(17, "B").steps(17)
    assert [step.rows.tolist() for step in steps] == [
        [0], [16], [8], [4, 12], [2, 6, 10, 14], [1, 3, 5, 7, 9, 11, 13, 15],
    ]  # fmt: skip
    for step in steps[2:]:
        assert step.before is not None and step.after is not None
        assert np.array_equal(step.rows - step.before, step.after - step.rows)


@pytest.mark.parametrize("rows", [0, 1, 15, 16, 17, 5000])
@pytest.mark.parametrize("channels", [0, 1, 3, 1 << 17])
def test_batches_make_the_whole(rows: int, channels: int) -> None:
    """Full groups, then what is left; no batch works on more than a few groups of wide rows."""
    frames = Frames(16)
    at = 0
    for batch in frames.batches(rows, channels):
        assert batch.first * 16 == at and (batch.rows == 16 or batch.groups == 1)
        assert batch.groups == 1 or batch.groups * batch.rows * channels <= 1 << 18
        at += batch.groups * batch.rows
    assert at == rows


def test_blocks_are_the_rows() -> None:
    rows = np.arange(35 * 3).reshape(35, 3)
    blocks = list(Frames(16).blocks(rows))
    assert [block.shape for block in blocks] == [(2, 16, 3), (1, 3, 3)]
    assert all(np.shares_memory(block, rows) for block in blocks)
    assert np.array_equal(np.concatenate([block.reshape(-1, 3) for block in blocks]), rows)


def test_names() -> None:
    assert [Frames(g, k).name for g, k in ((16, "P"), (8, "B"), (1, "P"), (1, "B"))] == [
        "P G=16", "B G=8", "I G=1", "I G=1",
    ]  # fmt: skip


def test_what_they_cannot_be() -> None:
    for distance in (0, -1, FARTHEST + 1):
        with pytest.raises(ValueError, match=f"distance={distance} must lie in 1"):
            Frames(distance)
    with pytest.raises(ValueError, match="kind='I' must be 'P' or 'B'"):
        Frames(1, "I")
