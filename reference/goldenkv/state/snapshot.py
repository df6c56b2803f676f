"""Snapshots: the minimal exact state of one sequence, in host memory or in a safetensors file.

The file is plain safetensors: one tensor a cell (`layers.2.overlap_kv`), and metadata with the format
version, the fingerprint, the length, for every cell its dtype, shape, first position and xxh3 of its bytes,
and an xxh3 over all of that. Reading checks everything before anything is used; each way to be unusable has
an error of its own, and the caller recomputes.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np
import safetensors.numpy
import xxhash

from ..config import ModelConfig, Numerics
from .components import cells
from .pool import Rows

FORMAT = "goldenkv-snapshot"
FORMAT_VERSION = 1
_CODES = {"float32": "F32", "bfloat16": "BF16"}
_DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}


class SnapshotError(ValueError):
    """A snapshot that cannot be used; recompute instead."""


class NotASnapshot(SnapshotError):
    """Not a file of this format, or of a version that this code does not read."""


class TruncatedSnapshot(SnapshotError):
    """The file ends before its header says it does."""


class CorruptSnapshot(SnapshotError):
    """Bytes differ from their checksum."""


class ForeignSnapshot(SnapshotError):
    """Made under another model or other numerics."""


class IncompleteSnapshot(SnapshotError):
    """A component is missing, or has another shape or dtype than its length needs."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state of one sequence after `length` tokens.

    Attributes:
        fingerprint: of the model and numerics that made it.
        length: tokens.
        rows: live rows of every cell, [rows, channels].
    """

    fingerprint: str
    length: int
    rows: Rows

    @property
    def nbytes(self) -> int:
        """Bytes of all rows."""
        return sum(rows.nbytes for rows in self.rows.values())

    def check(self, config: ModelConfig, numerics: Numerics, fingerprint: str) -> None:
        """Raises ForeignSnapshot or IncompleteSnapshot unless an engine of that kind can restore it."""
        if self.length < 0:
            raise IncompleteSnapshot(f"length={self.length} must not be negative")
        if self.fingerprint != fingerprint:
            raise ForeignSnapshot(
                f"the snapshot was made under fingerprint {self.fingerprint[:16]}…, "
                f"this engine has {fingerprint[:16]}… (another model, dtype, tile, jaxlib or machine)"
            )
        expected = {
            c.name: (c.shape(config, self.length), c.component.dtype(numerics)) for c in cells(config)
        }
        found = {name: (rows.shape, rows.dtype.name) for name, rows in self.rows.items()}
        if found != expected:
            wrong = sorted(n for n in expected | found if expected.get(n) != found.get(n))
            first = wrong[0]
            raise IncompleteSnapshot(
                f"at length {self.length} {len(wrong)} components do not fit: {', '.join(wrong[:6])}; "
                f"{first} is {found.get(first, 'missing')}, expected {expected.get(first, 'none')}"
            )

    def to_bytes(self, config: ModelConfig) -> bytes:
        """The file as bytes. `config` gives the first position of each cell's rows."""
        start = {cell.name: cell.live(config, self.length).start for cell in cells(config)}
        described = {
            name: {
                "dtype": rows.dtype.name,
                "shape": list(rows.shape),
                "position": start[name],
                "xxh3": _xxh3(rows),
            }
            for name, rows in self.rows.items()
        }
        header = {
            "format": FORMAT,
            "version": str(FORMAT_VERSION),
            "fingerprint": self.fingerprint,
            "length": str(self.length),
            "components": json.dumps(described, sort_keys=True),
        }
        header["header_xxh3"] = _header_xxh3(header)
        rows = {name: np.ascontiguousarray(r) for name, r in self.rows.items()}  # the writer ignores strides
        return _header_sorted(safetensors.numpy.save(rows, metadata=header))

    @staticmethod
    def from_bytes(data: bytes, *, verify: bool = True) -> Snapshot:
        """Reads a file's bytes.

        Args:
            data: what `to_bytes` returned.
            verify: compare every checksum. False is for showing what an unverified reload would do.

        Raises:
            NotASnapshot, TruncatedSnapshot, CorruptSnapshot: see there.
        """
        tensors, header = _parse(data)
        if verify and header.get("header_xxh3") != _header_xxh3(header):
            raise CorruptSnapshot("the header does not match its checksum")
        try:
            described = json.loads(header["components"])
            length = int(header["length"])
            rows = {
                name: np.frombuffer(raw, _DTYPES[described[name]["dtype"]]).reshape(described[name]["shape"])
                for name, (raw, _) in tensors.items()
            }
            fingerprint = header["fingerprint"]
            if length < 0 or not isinstance(fingerprint, str):
                raise ValueError(f"{length=}, {fingerprint=}")
        except (KeyError, ValueError, TypeError) as error:
            raise CorruptSnapshot(f"the header does not describe the tensors: {error!r}") from None
        if verify:
            for name, (_, tensor) in tensors.items():
                if [described[name]["shape"], _CODES[described[name]["dtype"]]] != tensor:
                    raise CorruptSnapshot(f"{name} is stored as {tensor}, its description says otherwise")
            if described.keys() != rows.keys():
                raise CorruptSnapshot(f"described but not stored: {sorted(described.keys() - rows.keys())}")
            bad = [name for name, value in rows.items() if described[name].get("xxh3") != _xxh3(value)]
            if bad:
                raise CorruptSnapshot(f"wrong bytes in {', '.join(bad)}: they differ from their checksum")
        return Snapshot(fingerprint, length, rows)

    def save(self, path: str | os.PathLike[str], config: ModelConfig) -> int:
        """Writes the file whole or not at all (temporary name, fsync, rename). Returns its bytes."""
        path = Path(path)
        data = self.to_bytes(config)
        temporary = path.with_name(path.name + ".tmp")
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        return len(data)

    @staticmethod
    def load(path: str | os.PathLike[str], *, verify: bool = True) -> Snapshot:
        """Reads a file; errors as `from_bytes`, and FileNotFoundError."""
        return Snapshot.from_bytes(Path(path).read_bytes(), verify=verify)


def _parse(data: bytes) -> tuple[dict[str, tuple[bytes, list]], dict[str, str]]:
    """Tensors (raw bytes, [shape, dtype code]) and metadata of a safetensors file."""
    size = int.from_bytes(data[:8], "little")
    if len(data) >= 9 and (data[8:9] != b"{" or size > 100_000_000):
        raise NotASnapshot("not a safetensors file")
    if len(data) < 8 + size or size == 0:
        raise TruncatedSnapshot(f"{len(data)} bytes end within the header")
    try:
        entries = json.loads(data[8 : 8 + size])
        header = entries.pop("__metadata__", {})
        if header.get("format") != FORMAT:
            raise NotASnapshot(f"a safetensors file of format {header.get('format')!r}, expected {FORMAT!r}")
        if header.get("version") != str(FORMAT_VERSION):
            raise NotASnapshot(
                f"snapshot version {header.get('version')!r}, this code reads {FORMAT_VERSION}"
            )
        spans = {
            name: (entry["data_offsets"], [entry["shape"], entry["dtype"]]) for name, entry in entries.items()
        }
        if not all(type(offset) is int for offsets, _ in spans.values() for offset in offsets):
            raise ValueError("data_offsets are not integers")
        end = 8 + size + max((stop for (_, stop), _ in spans.values()), default=0)
    except NotASnapshot:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptSnapshot(f"unreadable header: {error!r}") from None
    if len(data) < end:
        raise TruncatedSnapshot(f"{len(data)} bytes of {end}")
    if len(data) > end:
        raise CorruptSnapshot(f"{len(data) - end} bytes after the end")
    return {n: (data[8 + size + a : 8 + size + b], info) for n, ((a, b), info) in spans.items()}, header


def _header_sorted(file: bytes) -> bytes:
    """The same safetensors file with its header in order: the writer shuffles the metadata at every call."""
    size = int.from_bytes(file[:8], "little")
    header = json.dumps(json.loads(file[8 : 8 + size]), sort_keys=True, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header + file[8 + size :]


def _xxh3(rows: np.ndarray) -> str:
    return xxhash.xxh3_64_hexdigest(np.ascontiguousarray(rows).view(np.uint8).data)


def _header_xxh3(header: dict[str, str]) -> str:
    covered = {key: value for key, value in header.items() if key != "header_xxh3"}
    return xxhash.xxh3_64_hexdigest(json.dumps(covered, sort_keys=True).encode())
