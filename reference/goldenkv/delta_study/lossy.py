"""Lossy baselines over rows as float32, all channels alike, rotated ones included.

==========  ==================================================================================================
INT4        as `precision.py`: nibbles, and a float32 scale for 32 channels of a row
quantiser   each channel with a step of its own, range-coded: no neighbour is looked at
anchors     as CacheGen describes it: groups of ten rows, the first in 8 bits, the others as differences to
            it, with a step that depends on the layer; the same quantiser and range coder
transform   as KVTC: principal components fitted on other text, one step for all, range-coded. What varies
            less than the step costs next to nothing: that is the allocation of bits
==========  ==================================================================================================

A stream holds its row count, its scales (float16, one a channel) and the coded integers; all count. What a
transform shares between streams (basis, mean, scales) is counted apart, as `shared_nbytes`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .streams import decode_laplace, encode_laplace, join_parts, split_parts

GROUP = 10
"""Rows that share an anchor, as CacheGen has it."""


@dataclass(frozen=True, slots=True)
class Int4:
    """Symmetric INT4: scale = amax / 7 over a block of channels of one row, a shorter last block alone."""

    channels: int
    block: int = 32
    lossless: bool = False

    @property
    def name(self) -> str:
        return f"INT4, scale a {self.block}"

    def encode(self, rows: np.ndarray) -> bytes:
        padded = np.pad(rows, [(0, 0), (0, self._padded - self.channels)])
        blocks = padded.reshape(len(rows), self._padded // self.block, self.block)
        scales = np.abs(blocks).max(axis=-1) / np.float32(7)
        scales[scales == 0] = 1
        integers = np.round(blocks / scales[..., None]).astype(np.int8).reshape(padded.shape)
        nibbles = integers[:, : self._stored].view(np.uint8) & 0xF
        return join_parts([scales.tobytes(), (nibbles[:, 0::2] | nibbles[:, 1::2] << 4).tobytes()])

    def decode(self, stream: bytes) -> np.ndarray:
        scales, packed = split_parts(stream, 2)
        data = np.frombuffer(packed, np.uint8).reshape(-1, self._stored // 2)
        nibbles = np.stack([data & 0xF, data >> 4], axis=-1).reshape(len(data), self._stored)
        integers = (nibbles.view(np.int8) ^ 8) - 8  # four bits with a sign
        factors = np.frombuffer(scales, np.float32).reshape(len(data), self._padded // self.block)
        wide = np.repeat(factors, self.block, axis=1)
        return integers[:, : self.channels] * wide[:, : self.channels]

    @property
    def _padded(self) -> int:
        """Channels up to the end of the last block."""
        return -(-self.channels // self.block) * self.block

    @property
    def _stored(self) -> int:
        """Channels, made even: two share a byte."""
        return self.channels + self.channels % 2


@dataclass(frozen=True, slots=True)
class Quantiser:
    """value = mean + integer * step, step = `step` standard deviations of the channel.

    Attributes:
        step: in standard deviations of a channel.
    """

    step: float
    lossless: bool = False

    @property
    def name(self) -> str:
        return f"quantiser, step {self.step:g}"

    def encode(self, rows: np.ndarray) -> bytes:
        mean = _half(rows.mean(axis=0) if len(rows) else np.zeros(rows.shape[1]))
        spread = _spread(rows - _wide(mean))
        integers = np.round((rows - _wide(mean)) / _steps(spread, self.step)).astype(np.int32)
        coded = encode_laplace(integers, _laplace_scale(self.step, rows.shape[1]))
        return join_parts([len(rows).to_bytes(4, "little"), mean, spread, coded])

    def decode(self, stream: bytes) -> np.ndarray:
        count, mean, spread, coded = split_parts(stream, 4)
        rows = int.from_bytes(count, "little")
        integers = decode_laplace(coded, rows, _laplace_scale(self.step, len(mean) // 2))
        return (integers * _steps(spread, self.step) + _wide(mean)).astype(np.float32)


@dataclass(frozen=True, slots=True)
class Anchors:
    """The first of ten rows in 8 bits, and each other row as its difference to it.

    Attributes:
        step: of a difference, in standard deviations of the channel's differences.
        depth: of the layer, 0 the first and 1 the last: earlier layers are kept finer, as CacheGen does, with
            a half of the step in the first third and one and a half in the last.
    """

    step: float
    depth: float = 0.5
    lossless: bool = False

    @property
    def name(self) -> str:
        return f"anchors, step {self.step:g}"

    def encode(self, rows: np.ndarray) -> bytes:
        n, channels = rows.shape
        anchors = rows[::GROUP]
        largest = _half(np.abs(anchors).max(axis=0, initial=0))
        integers = np.round(anchors / self._anchor_steps(largest)).clip(-127, 127).astype(np.int32)
        scales = _half(np.abs(integers).mean(axis=0) if n else np.zeros(channels))
        differences = rows - self._anchored(integers, largest, n)
        others = np.arange(n) % GROUP > 0
        spread = _spread(differences[others])
        coded = np.round(differences[others] / _steps(spread, self.effective_step)).astype(np.int32)
        head = [n.to_bytes(4, "little"), largest, scales, spread]
        fine = _laplace_scale(self.effective_step, channels)
        return join_parts([*head, encode_laplace(integers, _wide(scales)), encode_laplace(coded, fine)])

    def decode(self, stream: bytes) -> np.ndarray:
        count, largest, scales, spread, first, second = split_parts(stream, 6)
        n, channels = int.from_bytes(count, "little"), len(largest) // 2
        others = np.arange(n) % GROUP > 0
        out = self._anchored(decode_laplace(first, -(-n // GROUP), _wide(scales)), largest, n)
        fine = _laplace_scale(self.effective_step, channels)
        out[others] += decode_laplace(second, int(others.sum()), fine) * _steps(spread, self.effective_step)
        return out

    @property
    def effective_step(self) -> float:
        """The step in this layer."""
        return self.step * (0.5, 1.0, 1.5)[min(2, int(3 * self.depth))]

    def _anchored(self, integers: np.ndarray, largest: bytes, n: int) -> np.ndarray:
        anchors = (integers * self._anchor_steps(largest)).astype(np.float32)
        return np.repeat(anchors, GROUP, axis=0)[:n]

    def _anchor_steps(self, largest: bytes) -> np.ndarray:
        return np.maximum(_wide(largest), np.float32(1e-6)) / np.float32(127)


@dataclass(frozen=True, slots=True)
class Transform:
    """Principal components of other text; every component with the same step. Made by `fit`.

    Attributes:
        step: in root mean squares of a channel's deviation from its mean, over all channels.
        mean, basis, spread: float16, as both sides hold them: [channels], [channels, channels], [channels].
    """

    step: float
    mean: np.ndarray
    basis: np.ndarray
    spread: np.ndarray
    lossless: bool = False

    @staticmethod
    def fit(rows: np.ndarray, step: float) -> Transform:
        """Learns mean, basis and spread from rows [n, channels] that it will not be measured on."""
        mean = rows.mean(axis=0).astype(np.float16)
        centred = rows.astype(np.float64) - mean
        variances, basis = np.linalg.eigh(centred.T @ centred / max(1, len(rows)))
        spread = np.sqrt(variances[::-1].clip(0)).astype(np.float16)
        # What a single row, or rows that are all the same, cannot tell must not become an endless precision.
        least = np.float16(np.sqrt(np.mean(rows.astype(np.float64) ** 2)) / 100)
        return Transform(step, mean, basis[:, ::-1].astype(np.float16), np.maximum(spread, least))

    @property
    def name(self) -> str:
        return f"transform, step {self.step:g}"

    @property
    def shared_nbytes(self) -> int:
        """What both sides hold besides the streams."""
        return self.mean.nbytes + self.basis.nbytes + self.spread.nbytes

    def encode(self, rows: np.ndarray) -> bytes:
        components = (rows - self.mean.astype(np.float32)) @ self.basis.astype(np.float32)
        integers = np.round(components / self._step).astype(np.int32)
        return join_parts([len(rows).to_bytes(4, "little"), encode_laplace(integers, self._scales)])

    def decode(self, stream: bytes) -> np.ndarray:
        count, coded = split_parts(stream, 2)
        integers = decode_laplace(coded, int.from_bytes(count, "little"), self._scales)
        components = (integers * self._step).astype(np.float32)
        return components @ self.basis.astype(np.float32).T + self.mean.astype(np.float32)

    @property
    def _step(self) -> np.float32:
        return np.float32(self.step * max(1e-6, float(np.sqrt(np.mean(self.spread.astype(np.float64) ** 2)))))

    @property
    def _scales(self) -> np.ndarray:
        return self.spread.astype(np.float64) / float(self._step) / np.sqrt(2)


def _spread(differences: np.ndarray) -> bytes:
    """Root mean squares of channels, so that no integer exceeds the root of the number of rows by much."""
    count = max(1, len(differences))
    return _half(np.sqrt(np.sum(differences.astype(np.float64) ** 2, axis=0) / count))


def _steps(spread: bytes, step: float) -> np.ndarray:
    """Of the integers of each channel."""
    return np.maximum(_wide(spread), np.float32(1e-6)) * np.float32(step)


def _laplace_scale(step: float, channels: int) -> np.ndarray:
    """Of integers whose standard deviation is 1 / step."""
    return np.full(channels, 1 / step / np.sqrt(2))


def _half(values: np.ndarray) -> bytes:
    return values.astype("<f2").tobytes()


def _wide(data: bytes) -> np.ndarray:
    return np.frombuffer(data, "<f2").astype(np.float32)
