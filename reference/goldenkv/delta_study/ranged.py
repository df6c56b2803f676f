"""Range coding with a table for each channel, of rows as they are or of what is left after a prediction.

Here nothing but the prediction differs: the same coder, the same freedom, once for the rows themselves and
once for their differences to other rows. So the comparison says what delta encoding gives, and what entropy
coding gives without it. There is no index of groups, no checksum and no random access, which codecs that are
used need (`goldenkv.delta`): that is to the advantage of short distances between keyframes.

Lossless means differences of bits, not of values. The grid of FP8 becomes finer towards 0, so that two small
values of different sign are many codes apart, and differences of codes save less than those of values would.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..delta import Frames
from ..delta.frames import Step
from ..delta.lossless import ordered
from ..state import RowFormat
from ..state.formats import Field, element_type
from .baselines import elements, together
from .streams import decode_tables, encode_tables, join_parts, split_parts

PIECES: dict[str, tuple[tuple[int, ...], ...]] = {
    "float8_e4m3fn": ((8,), (5, 3)),
    "float8_e8m0fnu": ((8,),),
    "uint8": ((8,),),
    "float4_e2m1fn": ((4,),),
    "bfloat16": ((9, 7), (8, 8)),
    "float32": ((9, 8, 8, 7), (8, 8, 8, 8)),
}
"""Ways to cut an element into pieces, from its sign down; each piece has a table. The shortest is kept."""


@dataclass(frozen=True, slots=True)
class RangeCoded:
    """Native rows through the range coder.

    Attributes:
        form: of the rows.
        frames: which row is predicted from which; None for no prediction.
        residual: "difference" of the bits in the order of their values, or "xor".
    """

    form: RowFormat
    frames: Frames | None = None
    residual: str = "difference"
    lossless: bool = True

    @property
    def name(self) -> str:
        if self.frames is None:
            return "range coder"
        return f"range coder, {self.residual} {self.frames.name}"

    def encode(self, rows: np.ndarray) -> bytes:
        parts = [len(rows).to_bytes(4, "little")]
        for field, bits in zip(self.form.fields, elements(rows, self.form), strict=True):
            keys = self._keys(len(rows))
            residuals = self._residuals(bits, field)
            parts += [_shortest(residuals[keys], field), _shortest(residuals[~keys], field)]
        return join_parts(parts)

    def decode(self, stream: bytes) -> np.ndarray:
        count, *parts = split_parts(stream, 1 + 2 * len(self.form.fields))
        rows = int.from_bytes(count, "little")
        keys, fields = self._keys(rows), []
        for i, field in enumerate(self.form.fields):
            residuals = np.zeros((rows, field.count), f"u{element_type(field.dtype).itemsize}")
            residuals[keys] = _opened(parts[2 * i], int(keys.sum()), field)
            residuals[~keys] = _opened(parts[2 * i + 1], int((~keys).sum()), field)
            fields.append(self._restored(residuals, field))
        return together(fields, self.form)

    def _keys(self, rows: int) -> np.ndarray:
        """Which rows are keyframes: their values have other tables than differences."""
        return np.arange(rows) % self.frames.distance == 0 if self.frames else np.ones(rows, bool)

    def _residuals(self, bits: np.ndarray, field: Field) -> np.ndarray:
        if self.frames is None:
            return bits
        mapped, out = self._mapped(bits, field), np.empty_like(bits)
        for block, target in zip(self.frames.blocks(mapped), self.frames.blocks(out), strict=True):
            for step in self.frames.steps(block.shape[1]):
                expected = _expected(block, step)
                found = block[:, step.rows]
                target[:, step.rows] = found ^ expected if self.residual == "xor" else found - expected
        return out & _mask(field, bits.dtype)

    def _restored(self, residuals: np.ndarray, field: Field) -> np.ndarray:
        if self.frames is None:
            return residuals
        mask = _mask(field, residuals.dtype)
        for block in self.frames.blocks(residuals):
            for step in self.frames.steps(block.shape[1]):
                expected = _expected(block, step)
                left = block[:, step.rows]
                block[:, step.rows] = (left ^ expected if self.residual == "xor" else left + expected) & mask
        return self._mapped(residuals, field, back=True)

    def _mapped(self, bits: np.ndarray, field: Field, back: bool = False) -> np.ndarray:
        return bits if self.residual == "xor" else ordered(bits, element_type(field.dtype), back)


def _expected(block: np.ndarray, step: Step) -> np.ndarray:
    """What the frames of a step are predicted as, from rows of a block [groups, rows, channels]."""
    if step.before is None:
        return np.zeros((len(block), len(step.rows), block.shape[2]), block.dtype)
    before = block[:, step.before]
    if step.after is None:
        return before
    after = block[:, step.after]
    return (before & after) + ((before ^ after) >> 1)  # the mean, without overflow


def _mask(field: Field, dtype: np.dtype) -> np.unsignedinteger:
    """The bits of an element: four of a FP4 code, else all."""
    return dtype.type(0xF if field.dtype == "float4_e2m1fn" else np.iinfo(dtype).max)


def _shortest(bits: np.ndarray, field: Field) -> bytes:
    """Elements [n, count], cut in the way that makes them shortest. The first byte says which."""
    ways = []
    for way, pieces in enumerate(PIECES[field.dtype]):
        parts, low = [], sum(pieces)
        for piece in pieces:
            low -= piece
            parts.append(encode_tables(bits.astype(np.int64) >> low & (1 << piece) - 1, 1 << piece))
        ways.append(bytes([way]) + join_parts(parts))
    return min(ways, key=len)


def _opened(data: bytes, rows: int, field: Field) -> np.ndarray:
    pieces = PIECES[field.dtype][data[0]]
    out = np.zeros((rows, field.count), np.int64)
    for piece, part in zip(pieces, split_parts(data[1:], len(pieces)), strict=True):
        out = out << piece | decode_tables(part, rows, field.count, 1 << piece)
    return out
