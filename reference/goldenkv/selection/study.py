"""One run of everything that the command shows: two documents, one model."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from ..config import LayerKind
from ..engine import Engine
from ..model.weights import Model
from .mass import Attended, Mass, attend_to
from .nonprefix import RowDifference, Splice, Splicer, row_differences
from .patterns import Heat, Reuse, Stability, batch_reuse, hotness, stability, turn_reuse
from .predictors import Curve, Table, chance, oracle, predictors, recall
from .record import Recording, record, record_turns
from .residency import Residency, page_steps
from .worth import compare_policies

LAGS = (1, 2, 4, 8, 16, 32, 64)
SHARES = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 3 / 4, 1.0)
SINK_TOKENS = 64
"""What counts as the first entries: those of so many tokens."""
COUNTED, WARM = 128, 128
"""Steps of a replay of pages that count, and steps before them."""
REPLY = 32
"""Greedy tokens at the end of each turn."""


@dataclass(frozen=True, slots=True)
class LayerFindings:
    """What was measured of one CSA layer.

    `by_id` is the share of the selections that no score decided (see `ties`), `scored_heats` are those of the
    others alone; `curves` are by predictor, with "random" and "oracle"; `scored_curves` as `scored_heats`.
    """

    layer: int
    by_id: float
    stability: Stability
    heats: list[Heat]
    scored_heats: list[Heat]
    curves: dict[str, Curve]
    scored_curves: dict[str, Curve]
    batch: Reuse
    turns: list[Reuse]

    def best(self, share: float, *, scored: bool = False) -> tuple[str, float]:
        """The predictor with the highest recall at a budget, and that recall."""
        curves = self.scored_curves if scored else self.curves
        found = {
            name: float(curve.recall[np.flatnonzero(curve.shares == share)[0]])
            for name, curve in curves.items()
            if name not in ("random", "oracle")
        }
        name = max(found, key=lambda n: found[n])
        return name, found[name]


@dataclass(frozen=True, slots=True)
class Paged:
    """Pages of one size: how many a step needs, and what each policy hits at each capacity."""

    page_tokens: int
    pages: int
    needed: float
    capacities: tuple[int, ...]
    results: dict[str, list[Residency]]


@dataclass(frozen=True, slots=True)
class Spliced:
    """A block behind another prefix.

    Attributes:
        rows: how its rows differ.
        exact: the same prefix: what an error must not show.
        other: all pages from behind the other prefix.
        by_layer: those of one layer only.
        wrong: pages of another text, for scale.
    """

    rows: list[RowDifference]
    exact: Splice
    other: Splice
    by_layer: dict[int, Splice]
    wrong: Splice


@dataclass(frozen=True, slots=True)
class Study:
    """All of it; `sink_mass` is the share of the attention on the learned sink, for each layer."""

    about: dict[str, Any]
    recording: Recording
    layers: list[LayerFindings]
    sink_mass: dict[int, float]
    paged: list[Paged]
    spliced: Spliced


def study(engine: Engine, model: Model, text: np.ndarray, tokens: int) -> Study:
    """Measures a model on the first 2 * `tokens` tokens of a text.

    Args:
        engine: of this model, with a free slot and room for `tokens` + 3 * 32.
        model: its weights.
        text: ids.
        tokens: of one document; whole pages, and enough for selections to be a choice.

    Raises:
        ValueError: the text is too short, or the documents are.
        RecordingError: the model has no CSA layer.
    """
    size = engine.geometry.page_size
    least = least_tokens(engine)
    if tokens % (4 * size) or tokens < least:
        raise ValueError(f"{tokens=} must be a multiple of {4 * size} (four pages), at least {least}")
    if len(text) < 2 * tokens:
        raise ValueError(
            f"the text has {len(text)} tokens, {2 * tokens} are needed: two documents of {tokens=}"
        )
    first, second = text[:tokens], text[tokens : 2 * tokens]
    attended = attend_to(engine, model, first)
    recording, other = attended.recording, record(engine, second)
    half = tokens // 2
    branch = record(engine, np.concatenate([first[:half], second[half:]]))
    talk, turns = record_turns(engine, np.split(first, [half, half + tokens // 4]), REPLY)
    layers = [
        _layer(attended, other, branch, talk, turns, attended.mass[layer], number, engine)
        for number, layer in enumerate(recording.layers)
    ]
    return Study(
        about={"tokens": tokens, "top_k": recording.top_k, "ratio": recording.ratio, "page": size},
        recording=recording,
        layers=layers,
        sink_mass={i: float(mass.sink.mean()) for i, mass in enumerate(attended.mass)},
        paged=[_paged(recording, page, tokens) for page in dict.fromkeys((16, size))],
        spliced=_spliced(engine, first, second, tokens),
    )


def least_tokens(engine: Engine) -> int:
    """The shortest document: half of it must leave the indexer a choice, and replays need steps."""
    needed = max(2 * (engine.config.index_topk + 1) * 4, 2 * (COUNTED + WARM), 2 * max(LAGS))
    unit = 4 * engine.geometry.page_size
    return -(-needed // unit) * unit


def _layer(
    attended: Attended,
    other: Recording,
    branch: Recording,
    talk: Recording,
    turns: tuple[range, ...],
    mass: Mass,
    number: int,
    engine: Engine,
) -> LayerFindings:
    recording, table = attended.recording, Table.fit([other], number)
    scored = attended.scored
    heats = partial(
        hotness,
        layer=number,
        sinks=SINK_TOKENS // recording.ratio,
        recent=engine.config.sliding_window // recording.ratio,
        prefix=len(recording.tokens) // 2 // recording.ratio,
    )
    return LayerFindings(
        recording.layers[number],
        attended.share_by_id(number),
        stability(recording, number, LAGS),
        heats(recording, mass=mass),
        heats(scored),
        _curves(recording, number, table),
        _curves(scored, number, table) if scored.mask(number)[scored.first_choice :].any() else {},
        batch_reuse(recording, branch, number),
        turn_reuse(talk, number, turns, 2 * recording.top_k),
    )


def _curves(recording: Recording, number: int, table: Table) -> dict[str, Curve]:
    curves = {name: recall(recording, number, make(), SHARES) for name, make in predictors(table).items()}
    return curves | {"random": chance(recording, SHARES), "oracle": oracle(recording, number, SHARES)}


def _paged(recording: Recording, page_tokens: int, tokens: int) -> Paged:
    steps = page_steps(recording, page_tokens, since=tokens - COUNTED - WARM)
    pages = tokens // page_tokens
    capacities = tuple(max(2, round(share * pages)) for share in (1 / 4, 1 / 2, 3 / 4))
    needed = float(np.mean([len(step.needed) for step in steps[-COUNTED:]]))
    results = compare_policies(steps, capacities, since=WARM)
    return Paged(page_tokens, pages, needed, capacities, results)


def _spliced(engine: Engine, first: np.ndarray, second: np.ndarray, tokens: int) -> Spliced:
    size, quarter = engine.geometry.page_size, tokens // 4
    prefix, other = first[:quarter], second[:quarter]
    block, following = first[quarter : 3 * quarter], first[3 * quarter :][: 2 * size]
    splicer = Splicer(engine, prefix, block, following)
    paged = [i for i in engine.config.layers if engine.config.kind(i) is not LayerKind.WINDOW]
    return Spliced(
        row_differences(engine, other, prefix, block),
        splicer.splice(prefix),
        splicer.splice(other),
        {layer: splicer.splice(other, layers=[layer]) for layer in paged},
        splicer.splice(prefix, block=second[quarter : 3 * quarter]),
    )
