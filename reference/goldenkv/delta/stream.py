"""The form of a stream: a header, an index of groups, the groups. All numbers are little-endian.

=====  ==================================================================================
bytes  meaning
=====  ==================================================================================
4      "GKVD"
1      version, 1
1      element type, its place in `codec.DTYPES`
4      XXH3 of the codec's name, the lower half
4      channels
8      rows
4      rows of a group
4      bytes of the model
...    the model, which the entropy coder of all groups shares
8 g    of every group: its bytes (4), their XXH3, the lower half (4)
8      XXH3 of all of the above
...    the groups
=====  ==================================================================================

So a reader of some rows verifies what it reads without reading the rest. A header is believed only as far as
the bytes that are there go: `codec.LARGEST` bounds what is allotted for it.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import xxhash

from .codec import DTYPES, LARGEST, DamagedStream, ForeignStream, Touched, TruncatedStream, element_type

MAGIC, VERSION = b"GKVD", 1
_FIXED = struct.Struct("<4sBBIIQII")
_ENTRY = np.dtype([("nbytes", "<u4"), ("xxh3", "<u4")])
_SUM = 8


def tag(name: str) -> int:
    """What a stream keeps of the name of its codec."""
    return _half(name.encode())


def _half(data: bytes | memoryview) -> int:
    """The lower half of XXH3-64: groups are small, and many."""
    return xxhash.xxh3_64_intdigest(data) & 0xFFFFFFFF


def check_start(stream: memoryview, magic: bytes, version: int, fixed: int) -> None:
    """Raises ForeignStream or TruncatedStream unless a fixed header of this format begins the stream."""
    start = bytes(stream[:4])
    if start != magic[: len(start)]:
        raise ForeignStream(f"expected a stream that begins with {magic!r}, got {start!r}")
    if len(stream) > 4 and stream[4] != version:
        raise ForeignStream(f"version {stream[4]} of the format, expected {version}")
    if len(stream) < fixed:
        raise TruncatedStream(f"{len(stream)} bytes end within a header of {fixed}")


def wanted(rows: range | None, count: int) -> range:
    """The rows that are asked for, all for None.

    Raises:
        ValueError: not a range of step 1 within the count.
    """
    found = range(count) if rows is None else rows
    if found.step != 1 or not 0 <= found.start <= found.stop <= count:
        raise ValueError(f"{rows=} must be a range of step 1 within the stream's 0 .. {count}")
    return found


@dataclass(frozen=True, slots=True)
class Stream:
    """A stream whose header and index were verified.

    Attributes:
        dtype, channels, rows: of what it holds.
        distance: rows of a group; the last may have fewer.
        model: of the entropy coder.
        header: bytes before the groups.
    """

    dtype: np.dtype
    channels: int
    rows: int
    distance: int
    model: memoryview
    header: int
    _index: np.ndarray
    _data: memoryview

    @staticmethod
    def write(codec: str, rows: np.ndarray, distance: int, model: bytes, groups: Sequence[bytes]) -> bytes:
        """The stream of groups that a codec of this name made from rows."""
        fixed = _FIXED.pack(
            MAGIC, VERSION, DTYPES.index(rows.dtype.name), tag(codec), rows.shape[1], len(rows), distance,
            len(model),
        )  # fmt: skip
        entries = [(len(group), _half(group)) for group in groups]
        header = fixed + model + np.array(entries, _ENTRY).tobytes()
        return b"".join([header, xxhash.xxh3_64_intdigest(header).to_bytes(_SUM, "little"), *groups])

    @staticmethod
    def read(codec: str, expected: int, data: bytes | memoryview) -> Stream:
        """Reads header and index.

        Args:
            codec: the name of the codec that wrote it.
            expected: the rows of its groups.
            data: the stream.

        Raises:
            ForeignStream, TruncatedStream, DamagedStream: what the bytes are instead.
        """
        view = memoryview(data).cast("B")
        check_start(view, MAGIC, VERSION, _FIXED.size)
        _, _, kind, name, channels, rows, distance, model = _FIXED.unpack(view[: _FIXED.size])
        if distance == 0:
            raise DamagedStream("groups of no rows")
        index = _FIXED.size + model
        end = index + -(-rows // distance) * _ENTRY.itemsize
        header = end + _SUM
        if len(view) < header:
            raise TruncatedStream(f"{len(view)} bytes end within a header of {header}")
        if xxhash.xxh3_64_intdigest(view[:end]) != int.from_bytes(view[end:header], "little"):
            raise DamagedStream("header and index do not match their checksum")
        if name != tag(codec):
            raise ForeignStream(f"the stream of another codec than {codec!r}")
        if distance != expected:
            raise DamagedStream(f"groups of {distance} rows, expected {expected}")
        if kind >= len(DTYPES) or rows * channels * element_type(DTYPES[kind]).itemsize > LARGEST:
            raise DamagedStream(f"element type {kind}, {rows} rows of {channels}: not what a stream can hold")
        entries = np.frombuffer(view[index:end], _ENTRY)
        total = header + int(entries["nbytes"].sum(dtype=np.uint64))
        if len(view) < total:
            raise TruncatedStream(f"{len(view)} bytes, {total} were expected")
        if len(view) > total:
            raise DamagedStream(f"{len(view)} bytes, {len(view) - total} more than the index says")
        ends = np.cumsum(entries["nbytes"], dtype=np.int64)
        starts = header + np.concatenate([[0], ends])
        return Stream(
            element_type(DTYPES[kind]), channels, rows, distance, view[_FIXED.size : index], header,
            starts, view,
        )  # fmt: skip

    def groups(self, rows: range) -> range:
        """The groups that hold these rows."""
        if not rows:
            return range(rows.start // self.distance, rows.start // self.distance)
        return range(rows.start // self.distance, (rows.stop - 1) // self.distance + 1)

    def group(self, number: int) -> memoryview:
        """The bytes of one group.

        Raises:
            DamagedStream: they differ from their checksum.
        """
        data = self._data[self._index[number] : self._index[number + 1]]
        at = self.header - _SUM - (len(self._index) - 1 - number) * _ENTRY.itemsize
        if _half(data) != int.from_bytes(self._data[at + 4 : at + 8], "little"):
            raise DamagedStream(f"group {number} does not match its checksum")
        return data

    def group_rows(self, number: int) -> int:
        """Rows of a group."""
        return min(self.distance, self.rows - number * self.distance)

    def touched(self, rows: range | None) -> Touched:
        """See `Codec.touched`."""
        found = self.groups(wanted(rows, self.rows))
        nbytes = int(self._index[found.stop] - self._index[found.start]) if found else 0
        return Touched(len(found), self.header + nbytes)
