"""The files of a checkpoint folder: one safetensors file, or shards and an index."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"

_IN_MEMORY = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I8": np.dtype(np.uint8),  # quantised tensors stay bytes
    "F8_E4M3": np.dtype(np.uint8),
    "F8_E8M0": np.dtype(np.uint8),
}


class CheckpointError(ValueError):
    """A folder that does not hold a complete checkpoint of the configured model."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor that lies in an open file.

    The safetensors package checks the file, but its NumPy side cannot return FP8, and its memory map would
    count as memory of this process: bytes are read here.

    Attributes:
        file: open for reading.
        dtype: by its safetensors name.
        shape: as the file says.
        offset: of the first byte in the file.
    """

    file: FileIO
    dtype: str
    shape: tuple[int, ...]
    offset: int

    def read(self, first: int = 0, last: int | None = None) -> np.ndarray:
        """Rows `first` to `last` of the tensor as a matrix with its last axis; of a vector, elements.

        Raises:
            CheckpointError: the file has become shorter.
        """
        dtype, row = _IN_MEMORY[self.dtype], self.shape[-1:] if len(self.shape) > 1 else ()
        last = int(np.prod(self.shape[: len(self.shape) - len(row)])) if last is None else last
        width = int(np.prod(row)) * dtype.itemsize
        self.file.seek(self.offset + first * width)
        found = np.fromfile(self.file, np.uint8, (last - first) * width)
        if len(found) < (last - first) * width:
            raise CheckpointError(f"{os.fspath(self.file.name)!r} has become shorter while it was read")
        return found.view(dtype).reshape(last - first, *row)


def open_tensors(
    folder: Path, stack: contextlib.ExitStack, *, skip: tuple[str, ...]
) -> dict[str, StoredTensor]:
    """Every tensor whose name does not begin with one of `skip`; `stack` closes the files.

    Raises:
        CheckpointError: a file is missing or broken, or lacks a tensor that the index says it holds.
    """
    single = (folder / WEIGHTS).is_file()
    tensors: dict[str, StoredTensor] = {}
    for file, names in ({WEIGHTS: []} if single else _read_index(folder)).items():
        try:
            with safe_open(folder / file, "numpy") as checked:  # the header, and that all bytes are there
                held = set(checked.keys())
            opened = stack.enter_context(FileIO(folder / file))
        except FileNotFoundError:
            raise CheckpointError(f"{INDEX} names {file!r}, which is not in {os.fspath(folder)!r}") from None
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{os.fspath(folder / file)!r} cannot be read: {error}") from None
        lost = sorted(set(names) - held)
        if lost:
            raise CheckpointError(f"{file!r} lacks tensors that {INDEX} says it holds: {listed(lost)}")
        size = int.from_bytes(opened.read(8), "little")
        header = json.loads(opened.read(size))
        for name in names or held:
            if not name.startswith(skip):
                entry = header[name]
                start = 8 + size + entry["data_offsets"][0]
                tensors[name] = StoredTensor(opened, entry["dtype"], tuple(entry["shape"]), start)
    return tensors


def _read_index(folder: Path) -> dict[str, list[str]]:
    """File name -> names of its tensors."""
    path = folder / INDEX
    if not path.is_file():
        raise CheckpointError(f"{os.fspath(folder)!r} holds neither {WEIGHTS} nor {INDEX}")
    try:
        weight_map = json.loads(path.read_text())["weight_map"]
        files: dict[str, list[str]] = {}
        for name, file in weight_map.items():
            if not isinstance(file, str) or Path(file).name != file:
                raise CheckpointError(f"{INDEX}: {file!r} for {name!r} is not the name of a file beside it")
            files.setdefault(file, []).append(name)
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f'{os.fspath(path)!r} must be JSON with a "weight_map" of tensor names to files: {error!r}'
        ) from None
    return files


def listed(items: Sequence[str], most: int = 20) -> str:
    """Joins items for a message; what is beyond `most` is counted."""
    return ", ".join(items[:most]) + (f" and {len(items) - most} more" if len(items) > most else "")
