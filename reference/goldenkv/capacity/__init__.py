"""How many bytes a model keeps for a sequence, from its published configuration."""

from .formats import FORMATS
from .pages import METADATA_BYTES, PAGE_SIZES, PageSize, page_size, page_table
from .parts import CapacityError, Group, Model, Part
from .read import BUILT_IN, read_model
from .real import allocate, pool_rows
from .report import Load, Report, SnapshotSize
from .tables import notes, size, tables
from .v4 import snapshot_bytes

__all__ = [
    "BUILT_IN",
    "FORMATS",
    "METADATA_BYTES",
    "PAGE_SIZES",
    "CapacityError",
    "Group",
    "Load",
    "Model",
    "PageSize",
    "Part",
    "Report",
    "SnapshotSize",
    "allocate",
    "notes",
    "page_size",
    "page_table",
    "pool_rows",
    "read_model",
    "size",
    "snapshot_bytes",
    "tables",
]
