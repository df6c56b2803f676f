"""What selections look like: stable or not, shared or not, and where. Each number beside two baselines.

A selection of k out of n visible entries overlaps with anything by chance. So every measure stands beside
what it is for *random* (k visible entries, drawn anew each time) and for *recent* (the k latest entries).
Only queries that see more than k entries count: the others had no choice.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from .mass import Mass
from .record import Recording, RecordingError


@dataclass(frozen=True, slots=True)
class Stability:
    """How much of a selection is still selected some queries later; all arrays are [lags].

    Attributes:
        lags: queries apart.
        overlap: common entries / k, the mean over queries.
        jaccard: common entries / entries of either.
        random, recent: the overlap of the two baselines, exact.
    """

    lags: np.ndarray
    overlap: np.ndarray
    jaccard: np.ndarray
    random: np.ndarray
    recent: np.ndarray

    def lines(self) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """For `figures.stability_figure`."""
        named = {"selected": self.overlap, "random": self.random, "recent": self.recent}
        return {name: (self.lags, values) for name, values in named.items()}


def stability(recording: Recording, layer: int, lags: Sequence[int]) -> Stability:
    """Overlap of the sets that queries t and t + lag selected.

    Args:
        recording: of one sequence.
        layer: counts the CSA layers from 0, here and below.
        lags: each at least 1, and less than the number of queries that have a choice.
    """
    start, k, visible = recording.first_choice, recording.top_k, recording.visible
    queries = len(recording.tokens) - start
    if not lags or min(lags) < 1 or max(lags) >= queries:
        raise RecordingError(f"lags must lie in 1 .. {queries - 1} ({queries} queries have a choice): {lags}")
    mask, rows = recording.mask(layer)[start:], []
    for lag in lags:
        common = (mask[:-lag] & mask[lag:]).sum(axis=1)
        before, after = visible[start:-lag], visible[start + lag :]
        rows.append(
            (
                np.mean(common / k),
                np.mean(common / (2 * k - common)),
                np.mean(k / after),
                np.mean(np.maximum(0, k - (after - before)) / k),
            )
        )
    overlap, jaccard, random, recent = np.array(rows, np.float64).T
    return Stability(np.array(lags), overlap, jaccard, random, recent)


class Zone(enum.Enum):
    """Classes of entries, hottest first, as they are commonly claimed."""

    SINK = "P0 first entries"
    RECENT = "P1 recent window"
    SHARED = "P2 shared prefix"
    MIDDLE = "P3 own middle"


def zones(visible: int, sinks: int, recent: int, prefix: int) -> np.ndarray:
    """[visible] the class of each entry, as its place in `Zone`; the first class that fits.

    Args:
        visible: entries that a query sees.
        sinks, recent: how many entries at the start, and at the end, are P0 and P1.
        prefix: how many at the start belong to a prefix that other requests share.
    """
    ids = np.arange(visible)
    return np.select([ids < sinks, ids >= visible - recent, ids < prefix], [0, 1, 2], 3)


@dataclass(frozen=True, slots=True)
class Heat:
    """How hot one class is in one layer. The shares of the four classes add up to 1.

    Attributes:
        zone: the class.
        entries: visible entries in it, the mean over queries.
        share, random, recent: of all selections, and of those of the baselines.
        mass: of the attention on tokens and entries (the learned sink is not part of it); None where it was
            not measured. Window rows count for the class that their token's entry would be in.
    """

    zone: Zone
    entries: float
    share: float
    random: float
    recent: float
    mass: float | None = None

    @property
    def lift(self) -> float:
        """How many times as often an entry of it is selected as one drawn at random; 0 without entries.

        Not the plain rate: a class that is there only when many entries are visible would look cold, whatever
        is selected.
        """
        return self.share / self.random if self.random else 0.0

    @property
    def mass_lift(self) -> float:
        """The same of the attention mass; 0 where it was not measured."""
        return (self.mass or 0.0) / self.random if self.random else 0.0


def hotness(
    recording: Recording,
    layer: int,
    *,
    sinks: int,
    recent: int,
    prefix: int = 0,
    mass: Mass | None = None,
) -> list[Heat]:
    """Each class's part of the selections, and of the attention mass if that layer's is given."""
    start, k = recording.first_choice, recording.top_k
    mask = recording.mask(layer)
    count, queries = len(Zone), range(start, len(recording.tokens))
    if not len(queries):
        raise RecordingError(f"{len(recording.tokens)} queries: none sees more than {k} entries")
    sizes, chosen, latest, weight = (np.zeros(count) for _ in range(4))
    random = np.zeros(count)
    for query in queries:
        visible = int(recording.visible[query])
        zone = zones(visible, sinks, recent, prefix)
        size = np.bincount(zone, minlength=count)
        selected = mask[query, :visible]
        taken = int(selected.sum())  # the baselines take as many
        sizes += size
        random += size / visible * taken
        chosen += np.bincount(zone[selected], minlength=count)
        latest += np.bincount(zone[visible - taken :], minlength=count)
        if mass is not None:
            by_token = np.minimum(np.arange(query + 1) // recording.ratio, visible - 1)
            weight += np.bincount(zone, weights=mass.entries[query, :visible], minlength=count)
            weight += np.bincount(zone[by_token], weights=mass.tokens[query, : query + 1], minlength=count)
    total = max(1.0, float(chosen.sum()))
    return [
        Heat(
            zone,
            float(sizes[i] / len(queries)),
            float(chosen[i] / total),
            float(random[i] / total),
            float(latest[i] / total),
            None if mass is None else float(weight[i] / weight.sum()),
        )
        for i, zone in enumerate(Zone)
    ]


def in_order(heats: Sequence[Heat]) -> bool:
    """Whether P0, P1, P2, P3 is the order of their lifts; classes without entries are left out."""
    lifts = [heat.lift for heat in heats if heat.entries]
    return all(left >= right for left, right in pairwise(lifts))


@dataclass(frozen=True, slots=True)
class Reuse:
    """How many of the selections fall on entries that somebody selected before.

    Attributes:
        share: of the selections.
        random: the share that any other entries, as many, would have on average.
        kept: how many entries these are, the mean over queries.
    """

    share: float
    random: float
    kept: float


def batch_reuse(left: Recording, right: Recording, layer: int, memory: int = 1) -> Reuse:
    """Two requests that share a prefix, step by step: does one select what the other selected just now?

    Only selections of shared entries count, and only queries behind the shared tokens.

    Args:
        left, right: their first tokens are the same.
        layer: of both.
        memory: steps of `left` up to the same step whose selections count together.

    Raises:
        RecordingError: no common entry, or nothing behind the common tokens.
    """
    most = min(len(left.tokens), len(right.tokens))
    same = left.tokens[:most] == right.tokens[:most]
    common = most if same.all() else int(np.argmin(same))
    shared = common // left.ratio
    if not shared or common >= most:
        raise RecordingError(f"{common} of {most} tokens are common: expected some, and others behind them")
    ours, theirs = left.mask(layer)[:, :shared], right.mask(layer)[:, :shared]
    found = total = 0
    kept, chance = [], []
    for query in range(common, most):
        union = ours[max(common, query - memory + 1) : query + 1].any(axis=0)
        found += int((union & theirs[query]).sum())
        chosen = int(theirs[query].sum())
        total += chosen
        kept.append(union.sum())
        chance.append(union.sum() / shared * chosen)
    return Reuse(found / max(total, 1), float(np.sum(chance)) / max(total, 1), float(np.mean(kept)))


def turn_reuse(recording: Recording, layer: int, turns: Sequence[range], budget: int) -> list[Reuse]:
    """For each turn but the first: its selections of older entries, among those the last turn selected most.

    Args:
        recording, turns: from `record_turns`.
        layer: of it.
        budget: entries that are kept between two turns.
    """
    mask, out = recording.mask(layer), []
    for before, turn in pairwise(turns):
        old = turn.start // recording.ratio
        counts = mask[before.start : before.stop, :old].sum(axis=0)
        kept = np.argsort(-counts, kind="stable")[:budget]
        selected = mask[turn.start : turn.stop, :old]
        total = int(selected.sum())
        share = float(selected[:, kept].sum()) / max(total, 1)
        out.append(Reuse(share, min(1.0, len(kept) / max(old, 1)), float(len(kept))))
    return out
