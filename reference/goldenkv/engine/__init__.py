"""One engine: prefill, decode, batches, snapshots, drafts."""

from .engine import Engine
from .free_shape import FreeShapeEngine
from .generate import Speculation, generate, speculate
from .sampling import greedy, sample
from .sequences import ApproximateState
from .slots import CapacityError, Sequence

__all__ = [
    "ApproximateState",
    "CapacityError",
    "Engine",
    "FreeShapeEngine",
    "Sequence",
    "Speculation",
    "generate",
    "greedy",
    "sample",
    "speculate",
]
