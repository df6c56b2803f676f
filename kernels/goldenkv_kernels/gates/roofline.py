"""The least time that a kernel can take on an H200: bytes that must move, and operations that must be done.

Bytes count each array element that must be read or written once, whatever a kernel reads again. An operation
is a multiplication or an addition of a matrix product; what else a kernel computes is not counted.
"""

from __future__ import annotations

from dataclasses import dataclass

BYTES_A_SECOND = 4.3e12
"""Of an H200, read plus written, as a copy within the device was measured to do."""

OPERATIONS_A_SECOND = 790e12
"""Of an H200, bfloat16 matrix products summed in float32, as measured."""

NATIVE_ROW, HEADS, CHANNELS, WINDOW, SELECTED = 584, 64, 512, 128, 512
INDEX_HEADS, INDEX_CHANNELS = 64, 128
CSA, HCA = 4, 128
"""Flash: bytes of a native row, attention's sizes, the indexer's, and tokens an entry."""


@dataclass(frozen=True, slots=True)
class Work:
    """What one call must do."""

    nbytes: float
    operations: float

    @property
    def intensity(self) -> float:
        """Operations a byte; above 184 the matrix units are the floor, below it memory."""
        return self.operations / self.nbytes

    @property
    def seconds(self) -> float:
        """The floor: the larger of the two times."""
        return max(self.nbytes / BYTES_A_SECOND, self.operations / OPERATIONS_A_SECOND)

    @property
    def bound(self) -> str:
        """Which of the two it is."""
        memory = self.nbytes / BYTES_A_SECOND >= self.operations / OPERATIONS_A_SECOND
        return "bytes" if memory else "operations"


def attention(batch: int, entries: int, *, native: bool) -> Work:
    """One query a sequence over the window and so many entries (those selected, or all), bfloat16 q."""
    rows = WINDOW * 2 * CHANNELS + entries * (NATIVE_ROW if native else 2 * CHANNELS)
    own = HEADS * CHANNELS * (2 + 4)  # q in, float32 out
    return Work(batch * (rows + own), batch * 4.0 * HEADS * CHANNELS * (WINDOW + entries))


def index_scores(batch: int, entries: int) -> Work:
    """One query a sequence over bfloat16 keys; the scores are written."""
    rows = entries * (2 * INDEX_CHANNELS + 4)
    own = INDEX_HEADS * (2 * INDEX_CHANNELS + 4)
    return Work(batch * (rows + own), batch * 2.0 * INDEX_HEADS * INDEX_CHANNELS * entries)


def select(batch: int, entries: int) -> Work:
    """Like `index_scores`, but only ids come out: the floor of a kernel that keeps scores to itself."""
    rows = entries * 2 * INDEX_CHANNELS
    own = INDEX_HEADS * (2 * INDEX_CHANNELS + 4) + 4 * SELECTED
    return Work(batch * (rows + own), batch * 2.0 * INDEX_HEADS * INDEX_CHANNELS * entries)


def compress(tokens: int, rate: int, channels: int, *, overlap: bool) -> Work:
    """Two float32 rows a token, of twice the channels with overlap; one float32 entry for `rate` tokens."""
    return Work(tokens * 8.0 * channels * (1 + overlap) + tokens // rate * 4.0 * channels, 0.0)


def move(pages: int, nbytes: int) -> Work:
    """Pages read in one place and written in another."""
    return Work(2.0 * pages * nbytes, 0.0)


def pack(rows: int) -> Work:
    """float32 rows to native rows, or back."""
    return Work(rows * (4.0 * CHANNELS + NATIVE_ROW), 0.0)
