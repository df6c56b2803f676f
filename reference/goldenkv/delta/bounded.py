"""Lossy frames with a bound: no finite value comes back farther than that from what it was.

A row is predicted from rows as the *decoder* has them (closed loop), so that errors do not add up along the
frames of a group. The difference is rounded to a multiple of twice the bound. Each value is then rebuilt just
as the decoder will, in float64 and rounded to the element type, and compared: one that is too far off, for
whatever reason, is *exact*, carried with its own bits. So are NaN and infinities, payloads included; as
neighbours they count as 0. The sign of a zero may be lost.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from .codec import DamagedStream, Touched, check_rows
from .entropy import Coder, Entropy, Zstd, leb128, read_leb128
from .frames import Frames, Step, predict
from .planes import coded, cut, join, sizes
from .stream import Stream, wanted

_BOUND = struct.Struct("<f")
"""What a group begins with; how many exact values it has follows, in LEB128."""
_MOST = (1 << 30) - 1
"""The largest multiple that is coded; what is farther off is exact."""


class _Coded(NamedTuple):
    """Groups of the same size, as they are coded.

    Attributes:
        multiples: int32 [groups, rows, channels], of twice the bound.
        exact: bool, the same shape.
        bits: unsigned, the same shape; what the exact values are.
        bounds: float64 [groups].
    """

    multiples: np.ndarray
    exact: np.ndarray
    bits: np.ndarray
    bounds: np.ndarray


@dataclass(frozen=True, slots=True)
class BoundedCodec:
    """Rows as frames of quantised differences of their values.

    Attributes:
        bound: that no error exceeds.
        relative: it is not absolute, but times the root mean square of the finite values of a group.
        frames: which row is predicted from which.
        entropy: what codes the differences.
    """

    bound: float
    relative: bool = False
    frames: Frames = field(default_factory=Frames)
    entropy: Entropy = field(default_factory=Zstd)

    lossless = False

    def __post_init__(self) -> None:
        if not 0 <= self.bound < math.inf:
            raise ValueError(f"bound={self.bound} must be finite, 0 or more")

    @property
    def name(self) -> str:
        unit = " rms" if self.relative else ""
        return f"bounded {self.bound!r}{unit} {self.frames.name} {self.entropy.name}"

    def bounds(self, block: np.ndarray) -> np.ndarray:
        """What no error in a block [groups, rows, channels] exceeds, float64 [groups].

        As the stream has them: rounded down to float32.
        """
        return _rounded_down(self._bounds(block))

    def _bounds(self, block: np.ndarray) -> np.ndarray:
        if not self.relative:
            return np.full(len(block), float(self.bound))
        values, count = _finite(block), np.isfinite(_wide(block)).sum(axis=(1, 2))
        return self.bound * np.sqrt((values * values).sum(axis=(1, 2)) / np.maximum(count, 1))

    def encode(self, rows: np.ndarray) -> bytes:
        """See `Codec.encode`."""
        rows = check_rows(rows)
        found = [self._quantised(block) for block in self.frames.blocks(rows)]
        # 0, -1, 1, -2 ... become 0, 1, 2, 3 ...
        zigzag = [(q.multiples << 1) ^ (q.multiples >> 31) for q in found]
        largest = max((int(z.max(initial=0)) for z in zigzag), default=0)
        width = next(width for width in (1, 2, 4) if largest < 1 << 8 * width)
        starts, groups = [], []
        for block, differences in zip(found, zigzag, strict=True):
            segments = cut(differences.astype(f"u{width}"))
            for planes, exact, bits, bound in zip(
                segments, block.exact, block.bits, block.bounds, strict=True
            ):
                count = int(exact.sum())
                mask = np.packbits(exact) if count else np.empty(0, np.uint8)
                groups.append([*planes, mask, bits[exact].view(np.uint8)])
                starts.append(_BOUND.pack(bound) + leb128(count))
        model, parts = coded(groups, self.entropy)
        parts = [start + part for start, part in zip(starts, parts, strict=True)]
        return Stream.write(self.name, rows, self.frames.distance, bytes([width]) + model, parts)

    def decode(self, stream: bytes | memoryview, rows: range | None = None) -> np.ndarray:
        """See `Codec.decode`."""
        found = Stream.read(self.name, self.frames.distance, stream)
        asked = wanted(rows, found.rows)
        numbers = found.groups(asked)
        before = numbers.start * found.distance
        count = sum(found.group_rows(number) for number in numbers)
        parts = [np.empty((0, found.channels), found.dtype)]
        for first, groups, each in self.frames.batches(count, found.channels):
            block = self._rebuilt(self._read(found, numbers[first : first + groups]), found.dtype)
            parts.append(block.reshape(groups * each, found.channels))
        return np.concatenate(parts)[asked.start - before :][: len(asked)]

    def touched(self, stream: bytes | memoryview, rows: range | None = None) -> Touched:
        """See `Codec.touched`."""
        return Stream.read(self.name, self.frames.distance, stream).touched(rows)

    # Values -------------------------------------------------------------------------------------------------

    def _quantised(self, block: np.ndarray) -> _Coded:
        """A block [groups, rows, channels]; every step of it is decoded as soon as it is coded."""
        bits, bounds = block.view(f"u{block.dtype.itemsize}"), self.bounds(block)
        multiples, exact = np.zeros(block.shape, np.int32), np.zeros(block.shape, bool)
        decoded, originals = np.zeros_like(block), _wide(block)
        unit = 2 * bounds[:, None, None]
        for step in self.frames.steps(block.shape[1]):
            expected = self._expected(block, decoded, step)
            original = originals[:, step.rows]
            with np.errstate(all="ignore"):
                quotient = (original - expected) / unit
            # Neither NaN nor the infinities pass; without a unit nothing does.
            nearest = np.rint(np.where(np.abs(quotient) <= _MOST, quotient, 0)).astype(np.int32)
            new = _sum(expected, nearest, unit, block.dtype)
            far = _too_far(new, original, bounds[:, None, None])
            multiples[:, step.rows] = np.where(far, 0, nearest)
            exact[:, step.rows] = far
            new_bits = np.where(far, bits[:, step.rows], new.view(bits.dtype))
            decoded.view(bits.dtype)[:, step.rows] = new_bits
        return _Coded(multiples, exact, bits, bounds)

    def _rebuilt(self, groups: _Coded, dtype: np.dtype) -> np.ndarray:
        """The inverse of `_quantised`."""
        decoded = np.zeros(groups.bits.shape, dtype)
        unit = 2 * groups.bounds[:, None, None]
        for step in self.frames.steps(decoded.shape[1]):
            new = _sum(_expected(decoded, step), groups.multiples[:, step.rows], unit, dtype)
            exact, bits = groups.exact[:, step.rows], groups.bits[:, step.rows]
            decoded.view(bits.dtype)[:, step.rows] = np.where(exact, bits, new.view(bits.dtype))
        return decoded

    def _expected(self, originals: np.ndarray, decoded: np.ndarray, step: Step) -> np.ndarray:
        """What the encoder predicts from: what the decoder has, never the originals."""
        return _expected(decoded, step)

    # Bytes --------------------------------------------------------------------------------------------------

    def _read(self, stream: Stream, numbers: range) -> _Coded:
        """Groups of the same size."""
        if not len(stream.model) or stream.model[0] not in (1, 2, 4):
            raise DamagedStream("multiples of no known size")
        width, coder = stream.model[0], self.entropy.coder(stream.model[1:])
        shape = stream.group_rows(numbers[0]), stream.channels
        found = [self._read_group(stream.group(n), coder, width, shape, stream.dtype) for n in numbers]
        return _Coded(*(np.stack(parts) for parts in zip(*found, strict=True)))

    def _read_group(
        self, data: memoryview, coder: Coder, width: int, shape: tuple[int, int], dtype: np.dtype
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        if len(data) < _BOUND.size:
            raise DamagedStream(f"a group of {len(data)} bytes, it begins with {_BOUND.size}")
        (bound,) = _BOUND.unpack(data[: _BOUND.size])
        count, start = read_leb128(data, _BOUND.size)
        values = math.prod(shape)
        if not 0 <= bound < math.inf or count > values:
            raise DamagedStream(f"a bound of {bound} and {count} of {values} values exact")
        expected = [*sizes(*shape, width), -(-values // 8) if count else 0, count * dtype.itemsize]
        *planes, mask, exact_bits = coder.decode(data[start:], expected)
        exact = np.zeros(shape, bool)
        if count:
            exact = np.unpackbits(mask, count=values).astype(bool).reshape(shape)
            if exact.sum() != count:
                raise DamagedStream(f"{exact.sum()} values are marked as exact, {count} were expected")
        bits = np.zeros(shape, f"u{dtype.itemsize}")
        bits[exact] = exact_bits.view(bits.dtype)
        zigzag = join(planes, *shape, np.dtype(f"u{width}")).astype(np.int64)
        return (zigzag >> 1) ^ -(zigzag & 1), exact, bits, np.array(bound)


def _wide(rows: np.ndarray) -> np.ndarray:
    """float64: exact, but for the payloads of NaN."""
    with np.errstate(all="ignore"):
        return rows.astype(np.float64)


def _finite(rows: np.ndarray) -> np.ndarray:
    """float64; 0 for what is not finite."""
    wide = _wide(rows)
    return np.where(np.isfinite(wide), wide, 0)


def _rounded_down(bounds: np.ndarray) -> np.ndarray:
    """Positive float64 as the next float32 that is no larger, in float64."""
    found = np.minimum(bounds, np.finfo(np.float32).max).astype(np.float32)
    return np.where(found > bounds, np.nextafter(found, np.float32(0)), found).astype(np.float64)


def _too_far(new: np.ndarray, original: np.ndarray, bounds: np.ndarray) -> np.ndarray:
    """Where the error exceeds the bound, and where it is no number: NaN and infinities are exact."""
    with np.errstate(all="ignore"):
        error = np.abs(_wide(new) - original)
    # What float64 makes of a difference may be low by half a unit of its last place.
    return ~((error <= np.nextafter(bounds, 0)) | (error == 0))


def _expected(block: np.ndarray, step: Step) -> np.ndarray:
    return predict(block, step, _finite, lambda one, two: (one + two) / 2)


def _sum(expected: np.ndarray, multiples: np.ndarray, unit: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """expected + multiples * unit in the element type."""
    with np.errstate(all="ignore"):
        value = expected + multiples * unit
        if dtype.kind == "u":
            value = np.clip(np.rint(value), 0, np.iinfo(dtype).max)
        return value.astype(dtype)
