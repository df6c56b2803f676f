"""Lossless delta frames: what is coded is the difference of stored bits, so that every pattern comes back.

The bits of a float are its sign, then its magnitude. `ordered` maps them to integers in the order of the
values, so that the difference of two close values is small also across zero; the map is one to one on all
patterns, those of NaN included.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from .codec import Touched, check_rows
from .entropy import Entropy, Zstd
from .frames import Frames, Step, predict
from .planes import coded, cut, join, sizes
from .stream import Stream, wanted


def xor(rows: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """The bits that differ. Its own inverse."""
    return rows ^ expected


def difference(rows: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """rows - expected, modulo 2^bits."""
    return rows - expected


def difference_undone(residual: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """residual + expected, modulo 2^bits."""
    return residual + expected


RESIDUALS: dict[str, tuple[Callable, Callable]] = {
    "xor": (xor, xor),
    "difference": (difference, difference_undone),
}
"""Name -> what is coded of (rows, expected), and what gives the rows back of (residual, expected)."""


@dataclass(frozen=True, slots=True)
class DeltaCodec:
    """Rows as frames of residuals of their bits.

    Attributes:
        frames: which row is predicted from which.
        residual: "xor" or "difference".
        ordered: floats are mapped to integers in the order of their values first.
        entropy: what codes the residuals.
    """

    frames: Frames = field(default_factory=Frames)
    residual: str = "xor"
    ordered: bool = False
    entropy: Entropy = field(default_factory=Zstd)

    lossless = True

    def __post_init__(self) -> None:
        if self.residual not in RESIDUALS:
            raise ValueError(f"residual={self.residual!r} is not one of {', '.join(RESIDUALS)}")

    @property
    def name(self) -> str:
        mapped = " ordered" if self.ordered else ""
        return f"delta {self.residual}{mapped} {self.frames.name} {self.entropy.name}"

    def encode(self, rows: np.ndarray) -> bytes:
        """See `Codec.encode`."""
        rows = check_rows(rows)
        forward, _ = RESIDUALS[self.residual]
        bits = self._mapped(rows.view(f"u{rows.dtype.itemsize}"), rows.dtype)
        groups: list[list[np.ndarray]] = []
        for block in self.frames.blocks(bits):
            residuals = np.empty_like(block)
            for step in self.frames.steps(block.shape[1]):
                residuals[:, step.rows] = forward(block[:, step.rows], _expected(block, step))
            groups += cut(residuals)
        return Stream.write(self.name, rows, self.frames.distance, *coded(groups, self.entropy))

    def decode(self, stream: bytes | memoryview, rows: range | None = None) -> np.ndarray:
        """See `Codec.decode`."""
        found = Stream.read(self.name, self.frames.distance, stream)
        asked = wanted(rows, found.rows)
        numbers = found.groups(asked)
        _, backward = RESIDUALS[self.residual]
        bits = self._residuals(found, numbers)
        for block in self.frames.blocks(bits):
            for step in self.frames.steps(block.shape[1]):
                block[:, step.rows] = backward(block[:, step.rows], _expected(block, step))
        bits = bits[asked.start - numbers.start * found.distance :][: len(asked)]
        return self._mapped(np.ascontiguousarray(bits), found.dtype, back=True).view(found.dtype)

    def touched(self, stream: bytes | memoryview, rows: range | None = None) -> Touched:
        """See `Codec.touched`."""
        return Stream.read(self.name, self.frames.distance, stream).touched(rows)

    def _residuals(self, stream: Stream, numbers: range) -> np.ndarray:
        """Those of these groups, [rows, channels] unsigned."""
        unsigned, channels = np.dtype(f"u{stream.dtype.itemsize}"), stream.channels
        coder, parts = self.entropy.coder(stream.model), [np.empty((0, channels), unsigned)]
        for number in numbers:
            count = stream.group_rows(number)
            segments = coder.decode(stream.group(number), sizes(count, channels, unsigned.itemsize))
            parts.append(join(segments, count, channels, unsigned))
        return np.concatenate(parts)

    def _mapped(self, bits: np.ndarray, dtype: np.dtype, back: bool = False) -> np.ndarray:
        return ordered(bits, dtype, back) if self.ordered else bits


def _expected(block: np.ndarray, step: Step) -> np.ndarray:
    return predict(block, step, lambda rows: rows, _mean)


def _mean(one: np.ndarray, two: np.ndarray) -> np.ndarray:
    """The mean of two unsigned integers, rounded down, without overflow."""
    return (one & two) + ((one ^ two) >> 1)


def ordered(bits: np.ndarray, dtype: np.dtype, back: bool = False) -> np.ndarray:
    """Bits of floats as unsigned integers in the order of the values, or `back`.

    Integers and UE8M0 are in order as they are. Of a FP4 code the high half of its byte stays as it is.
    """
    if dtype.kind == "u" or dtype.name == "float8_e8m0fnu":
        return bits
    width = 4 if dtype.name == "float4_e2m1fn" else 8 * dtype.itemsize
    sign, every = bits.dtype.type(1 << (width - 1)), bits.dtype.type((1 << width) - 1)
    negative = (bits & sign == 0) if back else (bits & sign != 0)
    return np.where(negative, bits ^ every, bits ^ sign)
