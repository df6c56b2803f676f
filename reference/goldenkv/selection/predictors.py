"""How well the next selection can be foreseen: simple predictors, and the recall of what they would keep.

A predictor is asked before each step to rank the visible entries, and told after it what was selected. It
knows nothing else. `recall` holds to that order: whoever sees the future would win against the oracle.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from .record import Recording, RecordingError


class Predictor(Protocol):
    """One layer of one sequence, step by step."""

    def rank(self, visible: int) -> np.ndarray:
        """Entries 0 .. visible - 1, the likeliest first: [visible] int."""

    def tell(self, selected: np.ndarray) -> None:
        """What this step selected."""


class _Scored:
    """Ranks by a score an entry; equal ones by place, the latest first."""

    def __init__(self) -> None:
        self._score = np.zeros(0)

    def rank(self, visible: int) -> np.ndarray:
        self._grow(visible)
        return visible - 1 - np.argsort(-self._score[:visible][::-1], kind="stable")

    def _grow(self, count: int) -> None:
        if count > len(self._score):
            self._score = np.concatenate([self._score, np.zeros(max(count, 64))])


class Recency:
    """The latest entries: no memory at all."""

    def rank(self, visible: int) -> np.ndarray:
        return np.arange(visible - 1, -1, -1)

    def tell(self, selected: np.ndarray) -> None:
        pass


class LastSteps(_Scored):
    """What the last N steps selected, the most recently selected first; then the latest entries.

    Args:
        steps: N, at least 1.
    """

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.steps, self._now = steps, 0

    def rank(self, visible: int) -> np.ndarray:
        self._grow(visible)
        self._score[self._score <= self._now - self.steps] = 0  # too long ago
        return super().rank(visible)

    def tell(self, selected: np.ndarray) -> None:
        self._now += 1
        self._grow(int(selected.max(initial=-1)) + 1)
        self._score[selected] = self._now


class Frequency(_Scored):
    """How often an entry was selected, older steps counting less.

    Args:
        half_life: steps after which a selection counts half; None for never.
    """

    def __init__(self, half_life: float | None = None) -> None:
        super().__init__()
        self.keep = 1.0 if half_life is None else 0.5 ** (1 / half_life)

    def tell(self, selected: np.ndarray) -> None:
        self._grow(int(selected.max(initial=-1)) + 1)
        self._score *= self.keep
        self._score[selected] += 1


class HeavyAndRecent:
    """Half of any budget for the most frequent entries, half for the latest: H2O with counts for weights."""

    def __init__(self) -> None:
        self._frequency = Frequency()

    def rank(self, visible: int) -> np.ndarray:
        heavy, latest = self._frequency.rank(visible), np.arange(visible - 1, -1, -1)
        both = np.stack([latest, heavy], axis=1).ravel()
        _, first = np.unique(both, return_index=True)
        return both[np.sort(first)]

    def tell(self, selected: np.ndarray) -> None:
        self._frequency.tell(selected)


class Table:
    """How often entries so far back, and the first ones, were selected in other documents. It learns nothing.

    Args:
        by_age: [ages] rate of an entry that is so many entries before the latest one.
        by_start: [first entries] rate of the first entries, which have no age.
    """

    def __init__(self, by_age: np.ndarray, by_start: np.ndarray) -> None:
        self.by_age, self.by_start = by_age, by_start

    @staticmethod
    def fit(recordings: Sequence[Recording], layer: int, starts: int = 16) -> Table:
        """Counts over recordings; ages that none of them has get the rate of the oldest."""
        ages = max(recording.entries for recording in recordings)
        seen, chosen = np.zeros((2, ages))
        start_seen, start_chosen = np.zeros((2, starts))
        for recording in recordings:
            mask = recording.mask(layer)
            for query in range(recording.first_choice, len(mask)):
                visible = int(recording.visible[query])
                row = mask[query, :visible]
                start_seen[: min(starts, visible)] += 1
                start_chosen[: min(starts, visible)] += row[:starts]
                aged = row[starts:][::-1]
                seen[: len(aged)] += 1
                chosen[: len(aged)] += aged
        if not seen.any():
            raise RecordingError("no recording has a query with a choice: nothing to fit")
        known = int(np.flatnonzero(seen).max())
        rates = chosen / np.maximum(seen, 1)
        rates[known + 1 :] = rates[known]
        return Table(rates, start_chosen / np.maximum(start_seen, 1))

    def rank(self, visible: int) -> np.ndarray:
        ages = np.minimum(np.arange(visible - 1, -1, -1), len(self.by_age) - 1)
        score = self.by_age[ages]
        count = min(len(self.by_start), visible)
        score[:count] = self.by_start[:count]
        return visible - 1 - np.argsort(-score[::-1], kind="stable")

    def tell(self, selected: np.ndarray) -> None:
        pass


@dataclass(frozen=True, slots=True)
class Curve:
    """Recall against budget.

    Attributes:
        shares: [budgets] of the visible entries that are kept.
        recall: [budgets] share of the selected entries among them, the mean over steps.
    """

    shares: np.ndarray
    recall: np.ndarray


def recall(recording: Recording, layer: int, predictor: Predictor, shares: Sequence[float]) -> Curve:
    """Asks, scores, tells, for each query that has a choice; queries before these are only told.

    Raises:
        RecordingError: shares that are none, or no query that chose anything.
    """
    _check_shares(recording, shares)
    budgets = np.array(shares)
    ids, found = recording.ids[layer], []
    for query, visible in enumerate(recording.visible):
        selected = ids[query][ids[query] >= 0]
        if query >= recording.first_choice and len(selected):
            ranking = predictor.rank(int(visible))
            place = np.empty(visible, np.int64)
            place[ranking] = np.arange(visible)
            kept = np.rint(budgets * visible)
            found.append((place[selected][None, :] < kept[:, None]).mean(axis=1))
        predictor.tell(selected)
    if not found:
        raise RecordingError("no query with a choice has selected anything: there is no recall")
    return Curve(budgets, np.mean(found, axis=0))


def oracle(recording: Recording, layer: int, shares: Sequence[float]) -> Curve:
    """The best that a budget allows: it keeps nothing but what will be selected."""
    _check_shares(recording, shares)
    start = recording.first_choice
    count = (recording.ids[layer, start:] >= 0).sum(axis=1)
    if not count.any():
        raise RecordingError("no query with a choice has selected anything: there is no recall")
    kept = np.rint(np.array(shares)[:, None] * recording.visible[start:][count > 0])
    return Curve(np.array(shares), np.minimum(1.0, kept / count[count > 0]).mean(axis=1))


def chance(recording: Recording, shares: Sequence[float]) -> Curve:
    """What entries drawn at random have: their share."""
    _check_shares(recording, shares)
    visible = recording.visible[recording.first_choice :]
    return Curve(np.array(shares), (np.rint(np.array(shares)[:, None] * visible) / visible).mean(axis=1))


def predictors(table: Table) -> Mapping[str, Callable[[], Predictor]]:
    """Those that the studies compare, by name; each call makes one that knows nothing yet."""
    return {
        "the step before": lambda: LastSteps(1),
        "last 16 steps": lambda: LastSteps(16),
        "frequency": Frequency,
        "fading frequency": lambda: Frequency(32),
        "heavy and recent": HeavyAndRecent,
        "recency": Recency,
        "table": lambda: table,
    }


def _check_shares(recording: Recording, shares: Sequence[float]) -> None:
    if not shares or not all(0 <= share <= 1 for share in shares):
        raise RecordingError(f"shares must lie in 0 .. 1, at least one: {list(shares)}")
    if recording.first_choice >= len(recording.tokens):
        raise RecordingError(
            f"{len(recording.tokens)} queries: none sees more than {recording.top_k} entries"
        )
