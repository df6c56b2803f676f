"""One engine: prefill, decode, batches, snapshots."""

from .engine import CapacityError, Engine, Sequence
from .sampling import greedy, sample

__all__ = ["CapacityError", "Engine", "Sequence", "greedy", "sample"]
