"""One engine: prefill, decode, batches, snapshots."""

from .engine import Engine
from .free_shape import FreeShapeEngine
from .sampling import greedy, sample
from .slots import CapacityError, Sequence

__all__ = ["CapacityError", "Engine", "FreeShapeEngine", "Sequence", "greedy", "sample"]
