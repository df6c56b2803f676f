"""Reload policies: which boundary states are kept, and how a hit becomes an exact sequence again.

Pages hold entries, which are exact wherever they are. What they lack is boundary state: window rows,
compressor rows, overlap. A policy keeps it at some positions, or replays tokens to make it again. Report
section 3.5.2 names full, periodic and zero; production kept it at the ends of prompts and outputs.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import ClassVar

from ..config import ModelConfig
from ..state.components import cells


class End(enum.Enum):
    """What ends at a position."""

    PAGE = "a page"
    PROMPT = "the prompt"
    OUTPUT = "the output"


@dataclass(frozen=True, slots=True)
class Plan:
    """How to reuse the entries of `length` tokens.

    Attributes:
        length: tokens whose entries are reused.
        boundary: the handle of the boundary state to start from, or None.
        start: the first token to run again; `length` if none is.
        exact: whether the state at `length` then has the bits of a cold run.
    """

    length: int
    boundary: int | None
    start: int
    exact: bool = True


class ReloadPolicy:
    """What to keep, and what to do with what was kept. Each policy but one is exact."""

    between_pages: ClassVar[bool] = False
    """Whether states are kept at positions that are no page's end."""

    def check(self, page_size: int) -> None:
        """Raises ValueError where the policy does not fit pages of that many tokens."""

    def keeps(self, position: int, ends: frozenset[End]) -> bool:
        """Whether the boundary state at a position, where `ends` end, is kept."""
        return False

    def plan(self, config: ModelConfig, length: int, boundaries: list[tuple[int, int]]) -> Plan | None:
        """How to reuse a match: the exact plan that runs the fewest tokens again, from the last state kept or
        by a replay without one. None where every token would run.

        Args:
            config: the model.
            length: tokens whose entries were found, from position 0.
            boundaries: (position, handle) of the states found, ascending, none past `length`.
        """
        start, handle = length - replay_length(config, length), None
        if boundaries and boundaries[-1][0] >= start:
            start, handle = boundaries[-1]
        return Plan(length, handle, start) if start > 0 else None


@dataclass(frozen=True, slots=True)
class Full(ReloadPolicy):
    """Kept at the end of every page: nothing found is run again."""

    def keeps(self, position: int, ends: frozenset[End]) -> bool:
        return End.PAGE in ends


@dataclass(frozen=True, slots=True)
class Periodic(ReloadPolicy):
    """Kept every `period` tokens, a multiple of the page size: up to a period is run again."""

    period: int

    def check(self, page_size: int) -> None:
        if self.period < 1 or self.period % page_size:
            raise ValueError(f"period={self.period} must be a positive multiple of {page_size=}")

    def keeps(self, position: int, ends: frozenset[End]) -> bool:
        return End.PAGE in ends and position % self.period == 0


@dataclass(frozen=True, slots=True)
class EndPoints(ReloadPolicy):
    """Kept where a prompt or an output ends: for the next turn of the same conversation."""

    between_pages: ClassVar[bool] = True

    def keeps(self, position: int, ends: frozenset[End]) -> bool:
        return bool(ends & {End.PROMPT, End.OUTPUT})


@dataclass(frozen=True, slots=True)
class Zero(ReloadPolicy):
    """Nothing is kept: the receptive field of the boundary state is replayed."""


@dataclass(frozen=True, slots=True)
class OneWindow(ReloadPolicy):
    """Nothing is kept, and only the last window is replayed, as V4.1 does: APPROXIMATE, for comparison.

    Its sequences are marked: their state is refused wherever exact state is kept.
    """

    def plan(self, config: ModelConfig, length: int, boundaries: list[tuple[int, int]]) -> Plan | None:
        """Replays the last window, and says whether that happens to be enough."""
        start = length - config.sliding_window
        exact = config.sliding_window >= replay_length(config, length)
        return Plan(length, None, start, exact) if start > 0 else None


def replay_length(config: ModelConfig, length: int) -> int:
    """Tokens that must run again so that the boundary state at `length` is exact, with all entries at hand.

    Entries carry no error on, so only windows do: the input of layer l at a position is exact if l (W - 1)
    tokens before it ran. Each layer needs that for the oldest row it keeps. At the end of whole blocks the
    last layer's window decides: L (W - 1) tokens. The MTP layer, one token behind, needs W more.
    """
    reach = config.sliding_window - 1
    oldest = (
        cell.layer * reach + length - rows.start
        for cell in cells(config)
        if not cell.component.paged and (rows := cell.live(config, length))
    )
    return max(oldest, default=0)
