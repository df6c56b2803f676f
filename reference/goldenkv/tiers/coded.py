"""Objects as delta frames: every tensor is a stream of a lossless codec, its rows are the frames.

What a store under `Coded` gets keeps its label, but for tensors and `extra`:

==================  ===================================================================================
tensors             of the same names, uint8: the stream of each. One that would be no shorter than the
                    tensor is the tensor itself, so an object never takes more than without a codec,
                    but for its head
extra "codec"       the name of the codec
extra "whole"       what the object was: see `wrapped`
extra "until"       when its time is over, in seconds since 1970, or ""
==================  ===================================================================================

The store has a checksum of the streams. That of the payload goes along, and what was decoded must match it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import xxhash

from ..delta import Codec, CodecError, TruncatedStream
from .errors import Corrupt, Foreign, Truncated
from .objects import Address, Head, Item, Tensor
from .store import Store, Wrapper, check_buffer
from .wrapped import describe, restore


class LossyCodec(ValueError):
    """A store must return the bits that were put: a codec that does not has no place in one."""


class Coded(Wrapper):
    """Objects of `inner`, their tensors as streams of a codec.

    Rows lie along the first axis of a tensor; one of fewer than two axes is a single row. What is read must
    have been written with a codec of the same name.

    Args:
        inner: gets the streams.
        codec: for all tensors.
        clock: that of `inner`; tells how long an object that is read will be good.

    Raises:
        LossyCodec: the codec is not lossless.
    """

    def __init__(self, inner: Store, codec: Codec, clock: Callable[[], float] = time.time) -> None:
        super().__init__(inner)
        if not codec.lossless:
            raise LossyCodec(f"the codec {codec.name!r} is lossy, a store needs a lossless one")
        self.codec, self._clock = codec, clock

    def put(self, item: Item, ttl: float | None = None) -> int:
        """As `Store.put`. The bytes are those of the streams."""
        streams = [self._encoded(array) for array in item.arrays().values()]
        payload = np.concatenate([*streams, np.empty(0, np.uint8)])
        tensors = zip(item.label.tensors, streams, strict=True)
        label = replace(
            item.label,
            tensors=tuple(Tensor(tensor.name, "uint8", stream.shape) for tensor, stream in tensors),
            extra=(
                ("codec", self.codec.name),
                ("whole", describe(item)),
                ("until", "" if ttl is None else repr(self._clock() + ttl)),
            ),
        )
        return self.inner.put(Item(label, payload), ttl)

    def get_into(self, address: Address, buffer: np.ndarray) -> Head:
        check_buffer(buffer)
        head, parts = self._decoded(self.inner.get(address))
        if head.payload != len(buffer):
            raise Foreign(f"a payload of {head.payload} bytes, {len(buffer)} were expected")
        np.concatenate(parts, out=buffer)
        return _checked(head, buffer)

    def get(self, address: Address) -> Item:
        head, parts = self._decoded(self.inner.get(address))
        payload = np.concatenate(parts)
        return Item(_checked(head, payload).label, payload, head.xxh3)

    def _encoded(self, array: np.ndarray) -> np.ndarray:
        """The stream of a tensor, or its bytes, whichever is shorter."""
        raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        if not len(raw):
            return raw
        stream = self.codec.encode(array.reshape(_rows(array.shape)))
        return np.frombuffer(stream, np.uint8) if len(stream) < len(raw) else raw

    def _decoded(self, outer: Item) -> tuple[Head, list[np.ndarray]]:
        """The head of the object that was put, and the bytes of its tensors."""
        extra = dict(outer.label.extra)
        if not {"codec", "whole", "until"} <= extra.keys():
            raise Foreign("the object there is not coded")
        if extra["codec"] != self.codec.name:
            raise Foreign(f"coded by {extra['codec']!r}, expected {self.codec.name!r}")
        try:
            head = restore(extra["whole"], outer.label, float(extra["until"]) if extra["until"] else None)
            wholes = zip(head.label.tensors, outer.arrays().values(), strict=True)
        except ValueError:
            raise Corrupt("it does not say what it was") from None
        return head, [*(self._opened(*pair) for pair in wholes), np.empty(0, np.uint8)]

    def _opened(self, tensor: Tensor, stored: np.ndarray) -> np.ndarray:
        """The bytes of a tensor."""
        if stored.nbytes == tensor.nbytes:
            return stored.reshape(-1)
        try:
            rows = self.codec.decode(stored.data)
        except TruncatedStream as error:
            raise Truncated(f"the stream of {tensor.name}: {error}") from None
        except CodecError as error:
            raise Corrupt(f"the stream of {tensor.name}: {error}") from None
        if rows.dtype.name != tensor.dtype or rows.shape != _rows(tensor.shape):
            raise Corrupt(f"the stream of {tensor.name} holds {rows.dtype.name}{list(rows.shape)}")
        return rows.reshape(-1).view(np.uint8)


def _rows(shape: tuple[int, ...]) -> tuple[int, int]:
    """How a tensor that is not empty lies before a codec: rows, channels."""
    count = int(np.prod(shape))
    rows = shape[0] if len(shape) > 1 else 1
    return rows, count // rows


def _checked(head: Head, payload: np.ndarray) -> Head:
    """The head, if that is its payload."""
    if xxhash.xxh3_128_hexdigest(payload.data) != head.xxh3:
        raise Corrupt("the payload does not match its checksum")
    return head
