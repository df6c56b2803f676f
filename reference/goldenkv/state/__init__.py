"""What a sequence remembers: the component table, device pools, snapshots, fingerprints, bit comparison."""

from .compare import Difference, compare
from .components import COMPONENTS, Cell, Component, cells
from .fingerprint import fingerprint, weights_digest
from .pool import Geometry, Rows
from .snapshot import (
    CorruptSnapshot,
    ForeignSnapshot,
    IncompleteSnapshot,
    NotASnapshot,
    Snapshot,
    SnapshotError,
    TruncatedSnapshot,
)

__all__ = [
    "COMPONENTS",
    "Cell",
    "Component",
    "CorruptSnapshot",
    "Difference",
    "ForeignSnapshot",
    "Geometry",
    "IncompleteSnapshot",
    "NotASnapshot",
    "Rows",
    "Snapshot",
    "SnapshotError",
    "TruncatedSnapshot",
    "cells",
    "compare",
    "fingerprint",
    "weights_digest",
]
