"""Codecs on rows: bytes, speed and error.

Nothing is reported that was not decoded and compared: a codec that calls itself lossless and changes a bit,
or exceeds the bound that it states, is an error and no row of a table.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ..delta import BoundedCodec
from .baselines import Codec
from .corpus import Series

Clock = Callable[[], float]


class BrokenCodec(ValueError):
    """A codec that does not give back what it promises."""


@dataclass(frozen=True, slots=True)
class Measured:
    """A codec on all layers of a component.

    Attributes:
        component, codec, lossless: what it is.
        rows, channels: how many rows, and channels of one.
        nbytes: of all streams, everything in them counted.
        native_nbytes: of the rows as production stores them.
        shared_nbytes: what both sides hold besides, once for any number of streams.
        encode_seconds, decode_seconds: of all layers, each the median of some runs.
        error: root mean square error over root mean square of the values; 0 where lossless.
    """

    component: str
    codec: str
    lossless: bool
    rows: int
    channels: int
    nbytes: int
    native_nbytes: int
    shared_nbytes: int
    encode_seconds: float
    decode_seconds: float
    error: float

    @property
    def bytes_a_row(self) -> float:
        """Bytes a token or entry, and layer."""
        return self.nbytes / self.rows

    @property
    def ratio(self) -> float:
        """How many times smaller than native."""
        return self.native_nbytes / self.nbytes

    @property
    def ratio_bf16(self) -> float:
        """How many times smaller than two bytes a channel."""
        return 2 * self.rows * self.channels / self.nbytes

    @property
    def bits_a_channel(self) -> float:
        """Bits a value."""
        return 8 * self.nbytes / (self.rows * self.channels)

    @property
    def encode_mb_s(self) -> float:
        """10^6 native bytes a second, one core."""
        return self.native_nbytes / 1e6 / self.encode_seconds

    @property
    def decode_mb_s(self) -> float:
        """10^6 native bytes a second, one core."""
        return self.native_nbytes / 1e6 / self.decode_seconds


def measure(
    name: str,
    series: Sequence[Series],
    codec_of: Callable[[Series], Codec],
    *,
    repeats: int = 1,
    clock: Clock = time.process_time,
) -> Measured:
    """One codec on the layers of one component: each layer is a stream of its own.

    Lossless codecs get the native bytes, lossy ones the values in float32.

    Args:
        name: of the codec, as in tables.
        series: of one component, at least one row.
        codec_of: the codec for a layer.
        repeats: runs of which the median time counts.
        clock: seconds; those of the processor by default, so that a busy machine changes little.

    Raises:
        BrokenCodec: what came back is not what was promised.
    """
    nbytes = shared = 0
    encode_seconds = decode_seconds = lost = held = 0.0
    for s in series:
        codec = codec_of(s)
        rows = s.native if codec.lossless else s.wide
        encode_times, decode_times = [], []
        for _ in range(repeats):
            start = clock()
            stream = codec.encode(rows)
            middle = clock()
            back = codec.decode(stream)
            decode_times.append(clock() - middle)
            encode_times.append(middle - start)
        check(codec, rows, back, s.component)
        nbytes += len(stream)
        shared += int(getattr(codec, "shared_nbytes", 0))
        encode_seconds += statistics.median(encode_times)
        decode_seconds += statistics.median(decode_times)
        if not codec.lossless:
            lost += float(np.sum((back.astype(np.float64) - rows) ** 2))
            held += float(np.sum(rows.astype(np.float64) ** 2))
    return Measured(
        series[0].component, name, codec.lossless, sum(len(s.values) for s in series),
        series[0].values.shape[1], nbytes, sum(s.native.nbytes for s in series), shared,
        encode_seconds, decode_seconds, (lost / held) ** 0.5 if held else 0.0,
    )  # fmt: skip


def check(codec: Codec, rows: np.ndarray, back: np.ndarray, what: str) -> None:
    """Raises BrokenCodec where decoded rows are not what the codec promises."""
    if back.shape != rows.shape:
        raise BrokenCodec(
            f"{codec.name} on {what}: {list(back.shape)} came back, expected {list(rows.shape)}"
        )
    if codec.lossless:
        wrong = np.argwhere((back != rows).any(axis=1))
        if back.dtype != rows.dtype or len(wrong):
            where = f"row {int(wrong[0, 0])}" if len(wrong) else f"dtype {back.dtype.name}"
            raise BrokenCodec(f"{codec.name} on {what} calls itself lossless: {where} came back different")
    elif not np.isfinite(back).all():
        raise BrokenCodec(f"{codec.name} on {what}: values came back that are not finite")
    if isinstance(codec, BoundedCodec):
        for before, after in zip(codec.frames.blocks(rows), codec.frames.blocks(back), strict=True):
            error = np.abs(after.astype(np.float64) - before).max(axis=(1, 2), initial=0)
            over = np.flatnonzero(error > codec.bounds(before))
            if len(over):
                raise BrokenCodec(f"{codec.name} on {what}: an error of {error[over[0]]:g} exceeds its bound")
