"""One engine: prefill, decode, batches, snapshots, drafts, shared prefixes."""

from .cache import ForeignNamespace, PrefixCache
from .engine import Engine
from .free_shape import FreeShapeEngine
from .generate import Speculation, generate, speculate
from .policies import EndPoints, Full, OneWindow, Periodic, ReloadPolicy, Zero, replay_length
from .request import Metrics, Request
from .sampling import greedy, sample
from .sequences import ApproximateState
from .slots import CapacityError, Sequence
from .tiered import TieredCache

__all__ = [
    "ApproximateState",
    "CapacityError",
    "EndPoints",
    "Engine",
    "ForeignNamespace",
    "FreeShapeEngine",
    "Full",
    "Metrics",
    "OneWindow",
    "Periodic",
    "PrefixCache",
    "ReloadPolicy",
    "Request",
    "Sequence",
    "Speculation",
    "TieredCache",
    "Zero",
    "generate",
    "greedy",
    "replay_length",
    "sample",
    "speculate",
]
