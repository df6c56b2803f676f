"""What a store holds: objects, and how one looks as bytes.

The bytes are a safetensors file: 8 bytes with the size of a JSON header, the header, the tensors. So anyone's
tools can read a stored page. safetensors has no checksums and no names of its own; they are in the header's
`__metadata__`:

==================  ============================================================================
format, version     "goldenkv-object", "1"
owner, namespace    whose it is, and everything besides the tokens that must not be mixed
key                 of the page or boundary state, chained over the tokens before it
kind, position      what it is, and the tokens at its end
layout, table       how the bytes are arranged, and the version of the component table
payload, xxh3       bytes of all tensors together, and XXH3-128 of them
expires             milliseconds since 1970 after which it must not be used, or ""
extra               what a wrapper adds, for example which key encrypted it
header_xxh3         XXH3-128 of the header without these 32 digits; it stands first
==================  ============================================================================

The two parts are called *head* (size and header) and *payload* (the tensors, without gaps, in order).
"""

from __future__ import annotations

import enum
import functools
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import ml_dtypes
import numpy as np
import xxhash

from ..prefix import Namespace
from ..state import table_version
from .errors import Corrupt, Foreign, Truncated

FORMAT, FORMAT_VERSION = "goldenkv-object", "1"
DIGEST_BYTES = 32
LARGEST_HEAD = 1 << 20
"""Bytes. A longer head is taken for damage, so that a flipped bit in its size allots no memory."""

_START, _HEX = b'{"__metadata__":{"header_xxh3":"', 32
_OPENED = len(_START) + _HEX + len(b'",')
"""Bytes of the header before what its checksum covers in one piece."""
_CODES = {"uint8": "U8", "float32": "F32", "bfloat16": "BF16"}
_NAMES = {code: name for name, code in _CODES.items()}
_DTYPES = {name: np.dtype(getattr(ml_dtypes, name, name)) for name in _CODES}


class Kind(enum.Enum):
    """What an object is."""

    PAGE = "page"
    TAIL = "tail"
    """A page that its tokens do not fill."""
    BOUNDARY = "boundary"
    """The boundary state at one position."""


class Address(NamedTuple):
    """Where an object is: three digests of 32 bytes each. Nothing of one owner or namespace is another's."""

    owner: bytes
    namespace: bytes
    key: bytes

    @staticmethod
    def of(namespace: Namespace, key: bytes) -> Address:
        """The address of a key made by `PageKeys` under a namespace."""
        return Address(namespace.owner(), namespace.digest(), key)

    def path(self, separator: str = "/") -> str:
        """owner, namespace and key in hexadecimal: a name for stores that have names."""
        return separator.join(part.hex() for part in self)

    @staticmethod
    def parse(path: str, separator: str = "/") -> Address:
        """The inverse of `path`.

        Raises:
            ValueError: something else.
        """
        parts = [bytes.fromhex(part) for part in path.split(separator)]
        if len(parts) != 3 or any(len(part) != DIGEST_BYTES for part in parts):
            raise ValueError(
                f"{path!r} must be three digests of {DIGEST_BYTES} bytes, joined by {separator!r}"
            )
        return Address(*parts)


class Tensor(NamedTuple):
    """One tensor of a payload: its name, dtype ("float32", "bfloat16", "uint8") and shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return math.prod(self.shape) * _DTYPES[self.dtype].itemsize


@dataclass(frozen=True, slots=True)
class Label:
    """All that is known of an object besides its bytes.

    Attributes:
        address: where it is.
        kind, position: what it is, and the tokens at its end.
        layout: how the bytes are arranged; that of the namespace.
        tensors: in the order of the payload.
        table: version of the component table.
        extra: what a wrapper adds, for example which key encrypted it.
    """

    address: Address
    kind: Kind
    position: int
    layout: str
    tensors: tuple[Tensor, ...]
    table: str = field(default_factory=table_version)
    extra: tuple[tuple[str, str], ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of the payload."""
        return sum(tensor.nbytes for tensor in self.tensors)


@dataclass(frozen=True, slots=True, eq=False)
class Item:
    """An object.

    Attributes:
        label: all that is known of it.
        payload: [bytes] uint8, contiguous.
        xxh3: XXH3-128 of the payload. It is made once, from the bytes that come from the device, and goes
            along from store to store: made anew on the way it would vouch for whatever had become of them.
    """

    label: Label
    payload: np.ndarray
    xxh3: str = ""

    def __post_init__(self) -> None:
        if self.payload.dtype != np.uint8 or self.payload.shape != (self.label.nbytes,):
            raise ValueError(
                f"the payload must be uint8[{self.label.nbytes}], as the tensors say, "
                f"got {self.payload.dtype}{list(self.payload.shape)}"
            )
        if not self.payload.flags.c_contiguous:
            raise ValueError("the payload must be contiguous")
        if not self.xxh3:
            object.__setattr__(self, "xxh3", xxhash.xxh3_128_hexdigest(self.payload.data))

    @staticmethod
    def of(
        address: Address, kind: Kind, position: int, layout: str, arrays: Mapping[str, np.ndarray]
    ) -> Item:
        """Packs arrays, by name, into one payload of its own."""
        tensors = tuple(Tensor(n, a.dtype.name, a.shape) for n, a in arrays.items())
        unknown = sorted({t.dtype for t in tensors} - _CODES.keys())
        if unknown:
            raise ValueError(f"dtypes must be among {sorted(_CODES)}, got {unknown}")
        label = Label(address, kind, position, layout, tensors)
        payload = np.empty(label.nbytes, np.uint8)
        for name, view in views(tensors, payload).items():
            view[...] = arrays[name]  # of one dtype: bits are kept, byte order is made little-endian
        return Item(label, payload)

    def check(self) -> None:
        """Raises Corrupt if the payload is not that of the checksum any more."""
        if xxhash.xxh3_128_hexdigest(self.payload.data) != self.xxh3:
            raise Corrupt("the payload does not match its checksum")

    def arrays(self) -> dict[str, np.ndarray]:
        """Views of the tensors, by name."""
        return views(self.label.tensors, self.payload)


@dataclass(frozen=True, slots=True)
class Head:
    """What the head of an object says.

    Attributes:
        label: of the object.
        payload: bytes of its payload.
        xxh3: of the payload.
        expires: seconds since 1970, or None.
    """

    label: Label
    payload: int
    xxh3: str
    expires: float | None


def views(tensors: tuple[Tensor, ...], payload: np.ndarray) -> dict[str, np.ndarray]:
    """Views into a payload by name; where one would not be aligned, numpy reads it as it is."""
    found, at = {}, 0
    for name, dtype, shape in tensors:
        size = math.prod(shape) * _DTYPES[dtype].itemsize
        found[name] = payload[at : at + size].view(_DTYPES[dtype]).reshape(shape)
        at += size
    return found


def make_head(item: Item, expires: float | None) -> bytes:
    """The head that goes before a payload."""
    label = item.label
    owner, namespace, key = label.address
    until = "" if expires is None else str(math.ceil(expires * 1000))
    extra = json.dumps(json.dumps(label.extra)) if label.extra else '"[]"'
    # Written out: for a small payload json.dumps of a mapping takes longer than XXH3.
    metadata = (
        f'"format":"{FORMAT}","version":"{FORMAT_VERSION}",'
        f'"owner":"{owner.hex()}","namespace":"{namespace.hex()}","key":"{key.hex()}",'
        f'"kind":"{label.kind.value}","position":"{label.position}",'
        f'"layout":{_quoted(label.layout)},"table":{_quoted(label.table)},'
        f'"payload":"{len(item.payload)}","xxh3":"{item.xxh3}","expires":"{until}",'
        f'"extra":{extra}}}'
    )
    rest = metadata.encode() + _described(label.tensors)
    rest += b" " * (-(_OPENED + len(rest)) % 8)
    digits = xxhash.xxh3_128_hexdigest(_START + b'",' + rest).encode()
    return (_OPENED + len(rest)).to_bytes(8, "little") + _START + digits + b'",' + rest


@functools.lru_cache(maxsize=256)
def _quoted(text: str) -> str:
    """Text as JSON: a layout or a table, the same for all pages of a model."""
    return json.dumps(text)


@functools.lru_cache(maxsize=256)
def _described(tensors: tuple[Tensor, ...]) -> bytes:
    """What follows the metadata in the header: the same for all pages of a model."""
    text, at = "", 0
    for name, dtype, shape in tensors:
        end = at + Tensor(name, dtype, shape).nbytes
        entry = {"dtype": _CODES[dtype], "shape": shape, "data_offsets": [at, end]}
        text += f",{json.dumps(name)}:{json.dumps(entry, separators=(',', ':'))}"
        at = end
    return f"{text}}}".encode()


def head_size(start: bytes | memoryview, total: int) -> int:
    """Bytes of the head, from the first 8 bytes of an object of `total` bytes.

    Raises:
        Truncated: there is no whole head.
        Corrupt: its size makes no sense.
    """
    if total < 8 or len(start) < 8:
        raise Truncated(f"an object of {total} bytes has no head")
    size = 8 + int.from_bytes(start[:8], "little")
    if size > LARGEST_HEAD:
        raise Corrupt(f"a head of {size} bytes, more than {LARGEST_HEAD}")
    if size > total:
        raise Truncated(f"{total} bytes end within a head of {size}")
    return size


def read_head(head: bytes | memoryview) -> Head:
    """Reads and verifies a head.

    Raises:
        Corrupt: it does not match its checksum, or is none.
        Foreign: another format, or a version that this code does not read.
    """
    return _read_head(bytes(head))


@functools.lru_cache(maxsize=4096)
def _read_head(head: bytes) -> Head:
    """The same bytes say the same: a store in memory need not parse them at every read."""
    header = head[8:]
    if int.from_bytes(head[:8], "little") != len(header):
        raise Corrupt("the header has another size than is said before it")
    if not header.startswith(_START):
        raise Foreign(f"not a file of format {FORMAT!r}")
    at = len(_START)
    if header[at : at + _HEX] != _header_xxh3(header).encode():
        raise Corrupt("the header does not match its checksum")
    try:
        text = header.decode()
        metadata, end = json.JSONDecoder().raw_decode(text, len('{"__metadata__":'))
        if (metadata["format"], metadata["version"]) != (FORMAT, FORMAT_VERSION):
            raise Foreign(f"version {metadata['version']!r} of the format, expected {FORMAT_VERSION!r}")
        tensors = _parsed(text[end:])
        address = Address(*(bytes.fromhex(metadata[name]) for name in ("owner", "namespace", "key")))
        extra = tuple((name, value) for name, value in json.loads(metadata["extra"]))
        label = Label(
            address, Kind(metadata["kind"]), int(metadata["position"]), metadata["layout"], tensors,
            metadata["table"], extra,
        )  # fmt: skip
        expires = int(metadata["expires"]) / 1000 if metadata["expires"] else None
        found = Head(label, int(metadata["payload"]), metadata["xxh3"], expires)
        if found.payload != label.nbytes:
            raise Corrupt(f"a payload of {found.payload} bytes, tensors of {label.nbytes}")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise Corrupt(f"unreadable header: {type(error).__name__}") from None
    return found


@functools.lru_cache(maxsize=256)
def _parsed(rest: str) -> tuple[Tensor, ...]:
    """The inverse of `_described`, padding included."""
    entries = json.loads("{" + rest.removeprefix(","))
    return tuple(Tensor(name, _NAMES[e["dtype"]], tuple(e["shape"])) for name, e in entries.items())


def _header_xxh3(header: bytes) -> str:
    """Of a header without the 32 digits of its own checksum, which stand at a fixed place."""
    at = len(_START)
    return xxhash.xxh3_128_hexdigest(header[:at] + header[at + _HEX :])
