"""The files of a checkpoint folder: one safetensors file, or shards and an index."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"


class CheckpointError(ValueError):
    """A folder that does not hold a complete checkpoint of the configured model."""


def open_tensors(folder: Path, stack: contextlib.ExitStack, *, skip: str) -> dict[str, Any]:
    """A lazy tensor for every name that does not begin with `skip`; `stack` closes the files.

    Raises:
        CheckpointError: a file is missing or broken, or lacks a tensor that the index says it holds.
    """
    single = (folder / WEIGHTS).is_file()
    tensors: dict[str, Any] = {}
    for file, names in ({WEIGHTS: []} if single else _read_index(folder)).items():
        try:
            opened = stack.enter_context(safe_open(folder / file, "numpy"))
        except FileNotFoundError:
            raise CheckpointError(f"{INDEX} names {file!r}, which is not in {os.fspath(folder)!r}") from None
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{os.fspath(folder / file)!r} cannot be read: {error}") from None
        held = set(opened.keys())
        lost = sorted(set(names) - held)
        if lost:
            raise CheckpointError(f"{file!r} lacks tensors that {INDEX} says it holds: {listed(lost)}")
        tensors |= {n: opened.get_slice(n) for n in names or held if not n.startswith(skip)}
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
