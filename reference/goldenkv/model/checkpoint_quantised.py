"""Quantised tensors of the published checkpoints: FP8 and packed FP4, exactly to float32 and back.

A matrix `X.weight` [outputs, inputs] is stored beside `X.scale`, a UE8M0 code for each block of it: an
exponent byte c that stands for 2^(c - 127), 255 being NaN. Blocks at the edges can be smaller.

| | dtype of the weight | its shape | block | which |
|---|---|---|---|---|
| FP8 | F8_E4M3 | [outputs, inputs] | 128 x 128 | attention and indexer projections, shared expert |
| FP4 | I8, two E2M1 values a byte, the first in the low half | [outputs, inputs / 2] | 1 x 32 | experts |

Sources: listings of the tensors of the released V4-Flash and V4-Pro (names, dtypes, shapes); the release's
`inference/convert.py` (order of the halves); `Fp8Dequantize` of transformers (value times scale).
V4-Flash-Base has float32 scales and FP8 experts by a report (NVIDIA-NeMo/Automodel, issue 2034): such scales
are read too. `convert.py` takes the FP4 code 8 for +0; here it is the -0 of E2M1, which changes only the sign
of a zero. Not confirmed: a file of the release itself, and how its scales were chosen (see `quantise`).
"""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np

from .checkpoint_files import CheckpointError, StoredTensor

SCALE_DTYPES = ("F8_E8M0", "F32")
_BIAS = 127


@dataclass(frozen=True, slots=True)
class Format:
    """A quantised matrix in a file.

    Attributes:
        element: type of one value.
        packed: values in a byte.
        block: outputs and inputs that share a scale.
        top: exponent of the power of two above the largest value.
        limit: the largest float32 that rounds to the largest value rather than beyond it.
    """

    element: np.dtype
    packed: int
    block: tuple[int, int]
    top: int
    limit: np.float32

    def stored_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape in the file of a matrix [outputs, inputs]."""
        return (shape[0], -(-shape[1] // self.packed))

    def scale_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of the scales of a matrix [outputs, inputs]."""
        return (-(-shape[0] // self.block[0]), -(-shape[1] // self.block[1]))

    def spread(self, scale: np.ndarray, rows: range, inputs: int) -> np.ndarray:
        """The scale of every element of some rows: [rows, inputs]."""
        of_rows = scale[np.arange(rows.start, rows.stop) // self.block[0]]
        return np.repeat(of_rows, self.block[1], axis=1)[:, :inputs]


# 464 lies between 448 and the 480 that E4M3 does not have and rounds to the even 448; 7 would round to 8.
FP8 = Format(np.dtype(ml_dtypes.float8_e4m3fn), 1, (128, 128), 9, np.float32(464))
FP4 = Format(np.dtype(ml_dtypes.float4_e2m1fn), 2, (1, 32), 3, np.nextafter(np.float32(7), np.float32(0)))
FORMATS = {"F8_E4M3": FP8, "I8": FP4}
"""By the safetensors dtype of the weight."""


def _tables() -> dict[Format, np.ndarray]:
    """Byte -> the float32 values that it holds."""
    byte = np.arange(256, dtype=np.uint8)
    halves = np.stack([byte & 15, byte >> 4], axis=1)
    return {f: (byte[:, None] if f is FP8 else halves).view(f.element).astype(np.float32) for f in (FP8, FP4)}


_VALUES = _tables()


def read_scale(name: str, scale: StoredTensor) -> np.ndarray:
    """All scales of a tensor as float32; those of codes are exact.

    Raises:
        CheckpointError: a scale is NaN or infinite.
    """
    stored = scale.read()
    if scale.dtype == "F8_E8M0":
        stored = power_of_two(stored)
    if not np.isfinite(stored).all():
        at = np.argwhere(~np.isfinite(stored))[0].tolist()
        raise CheckpointError(f"{name} is NaN (code 255) or infinite at {at}")
    return stored


def power_of_two(codes: np.ndarray) -> np.ndarray:
    """2^(code - 127) as float32, exact for codes 0 to 254; infinite for 255, which means NaN."""
    with np.errstate(over="ignore"):
        return np.ldexp(np.float32(1), codes.astype(np.int32) - _BIAS)


def dequantise(
    name: str, stored: np.ndarray, form: Format, scale: np.ndarray, *, first: int, inputs: int
) -> np.ndarray:
    """Rows of a quantised matrix, each value times its scale.

    Exact for power-of-two scales: a product has the few digits of its value and no smaller one than 2^-136.

    Args:
        name: for the message.
        stored: bytes [rows, inputs / packed].
        form: what they hold.
        scale: float32, of the whole matrix.
        first: number of the first row within the matrix.
        inputs: of the matrix.

    Returns:
        Float32 [rows, inputs].

    Raises:
        CheckpointError: a value is NaN, or larger than float32 can hold.
    """
    values = _VALUES[form][stored].reshape(len(stored), -1)[:, :inputs]
    with np.errstate(over="ignore"):
        values *= form.spread(scale, range(first, first + len(stored)), inputs)
    if not np.isfinite(values).all():
        row, column = np.argwhere(~np.isfinite(values))[0].tolist()
        raise CheckpointError(f"{name} is NaN or too large for float32 at {[first + row, column]}")
    return values


def quantise(name: str, values: np.ndarray, form: Format) -> tuple[np.ndarray, np.ndarray]:
    """The nearest values of a format, ties to even, and their scales.

    A block's scale is the smallest power of two under which no value rounds beyond the largest. What was
    loaded from such a tensor gives the same bytes again, and what was loaded from any other loses nothing.

    Args:
        name: for the message.
        values: [outputs, inputs], finite.

    Returns:
        The weight as its file holds it (float8_e4m3fn, or int8), and the scales as float8_e8m0fnu.
    """
    wide = values.astype(np.float32)
    if not np.isfinite(wide).all():
        raise CheckpointError(f"{name} holds NaN or infinities, which cannot be quantised")
    rows, columns = (np.arange(0, size, step) for size, step in zip(wide.shape, form.block, strict=True))
    peak = np.maximum.reduceat(np.maximum.reduceat(np.abs(wide), rows, axis=0), columns, axis=1)
    exponent = np.frexp(peak)[1] - form.top  # peak / 2^exponent lies in the upper half of 0 .. 2^top
    exponent += np.ldexp(peak, -exponent) > form.limit
    codes = np.where(peak == 0, _BIAS, np.maximum(exponent + _BIAS, 0)).astype(np.uint8)
    wide /= form.spread(power_of_two(codes), range(len(wide)), wide.shape[1])
    stored = wide.astype(form.element)
    if form.packed == 2:
        nibbles = np.pad(stored.view(np.uint8) & 15, ((0, 0), (0, wide.shape[1] % 2)))
        stored = (nibbles[:, 0::2] | nibbles[:, 1::2] << 4).view(np.int8)
    return stored, codes.view(ml_dtypes.float8_e8m0fnu)
