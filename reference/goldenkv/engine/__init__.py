"""One engine: prefill, decode, batches, snapshots."""

from .engine import CapacityError, Engine, Sequence
from .free_shape import FreeShapeEngine
from .sampling import greedy, sample

__all__ = ["CapacityError", "Engine", "FreeShapeEngine", "Sequence", "greedy", "sample"]
