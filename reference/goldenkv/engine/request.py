"""What a request of a prefix cache is, and what is counted of all of them."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from ..prefix import Lock, Namespace, PageKeys
from .policies import Plan
from .slots import Sequence


@dataclass(slots=True)
class Metrics:
    """What was counted. Once all requests have ended, the four sources of prompt tokens sum to `prompt`.

    Attributes:
        requests: begun.
        prompt: tokens of their prompts; of a fork those that are left.
        reused: prompt tokens that were not run: their state was verified, and used.
        replayed: prompt tokens run again although their entries were there.
        computed: prompt tokens run for the first time.
        cancelled: prompt tokens that had not run when their request was cancelled.
        refused: hits whose keys were not those of the request. They were computed.
        evicted_pages, evicted_boundaries: dropped to make room.
    """

    requests: int = 0
    prompt: int = 0
    reused: int = 0
    replayed: int = 0
    computed: int = 0
    cancelled: int = 0
    refused: int = 0
    evicted_pages: int = 0
    evicted_boundaries: int = 0


@dataclass(eq=False, slots=True)
class Request:
    """One running request. Made by `PrefixCache.begin` and `fork`, ended by `finish` or `cancel`.

    Attributes:
        namespace: of all its state.
        prompt: its token ids.
        seq: its sequence; `seq.length` tokens have run.
        plan: what it reuses, or None.
    """

    namespace: Namespace
    prompt: np.ndarray
    seq: Sequence
    plan: Plan | None
    keys: PageKeys
    lock: Lock | None
    tokens: list[int]
    boundaries: dict[int, int] = field(default_factory=dict)
    open: bool = True

    @property
    def remaining(self) -> int:
        """Prompt tokens that have not run."""
        return max(0, len(self.prompt) - self.seq.length)
