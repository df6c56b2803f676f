"""Fingerprints: under which model and numerics a state was made. State under another is a miss."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable

import jax
import numpy as np

from ..config import ModelConfig, Numerics


def weights_digest(leaves: Iterable[jax.Array]) -> str:
    """BLAKE2b-256 over every weight in order: shapes, dtypes and bytes. 64 hexadecimal digits."""
    digest = hashlib.blake2b(digest_size=32)
    for leaf in leaves:
        array = np.ascontiguousarray(np.asarray(leaf))
        _add(digest, f"{array.dtype.name}{array.shape}".encode())
        _add(digest, array.view(np.uint8).reshape(-1).data)
    return digest.hexdigest()


def fingerprint(config: ModelConfig, numerics: Numerics, weights: str) -> str:
    """SHA-256 over configuration, weights digest and numerics, each length-prefixed. Hexadecimal.

    Slots, pages, pool size and maximum length are not part of it: engines of different sizes exchange state.
    """
    digest = hashlib.sha256()
    for field in (config.to_json(), weights, numerics.identity()):
        _add(digest, json.dumps(field, sort_keys=True).encode())
    return digest.hexdigest()


def _add(digest: hashlib._Hash | hashlib.blake2b, field: bytes | memoryview) -> None:
    """Adds a field after its length, so that no two lists of fields give the same bytes."""
    digest.update(len(field).to_bytes(8, "little"))
    digest.update(field)
