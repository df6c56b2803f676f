"""What a sequence remembers: the component table, device pools, snapshots, fingerprints, bit comparison.

And how production engines lay it out: row formats, pages, and the pools of vLLM, SGLang and TensorRT-LLM.
"""

from .compare import Difference, compare
from .components import COMPONENTS, Cell, Component, cells, table_version
from .fingerprint import fingerprint, weights_digest
from .formats import ROW_FORMATS, RowFormat, row_format
from .groupings import Grouping, GroupingError, HitPolicy
from .layouts import PageLayout, PageSizeError, pack_page, page_layout, read_page
from .packing import NotRepresentable, pack, unpack
from .paged_state import MissingPage, pack_state, unpack_state
from .pool import Geometry, Rows
from .production import sglang, tensorrt_llm, vllm
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
    "ROW_FORMATS",
    "Cell",
    "Component",
    "CorruptSnapshot",
    "Difference",
    "ForeignSnapshot",
    "Geometry",
    "Grouping",
    "GroupingError",
    "HitPolicy",
    "IncompleteSnapshot",
    "MissingPage",
    "NotASnapshot",
    "NotRepresentable",
    "PageLayout",
    "PageSizeError",
    "RowFormat",
    "Rows",
    "Snapshot",
    "SnapshotError",
    "TruncatedSnapshot",
    "cells",
    "compare",
    "fingerprint",
    "pack",
    "pack_page",
    "pack_state",
    "page_layout",
    "read_page",
    "row_format",
    "sglang",
    "table_version",
    "tensorrt_llm",
    "unpack",
    "unpack_state",
    "vllm",
    "weights_digest",
]
