"""The whole experiment on one model: correlation, lossless, distances of keyframes, lossy, and its report."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import numpy as np

from ..config import ModelConfig
from ..delta import Frames
from ..engine import Engine
from ..state import Cell
from .baselines import Codec
from .corpus import GROWING, KEYS, NAMES, Series, collect, join
from .correlation import needed_correlation, pooled_correlation
from .effect import Continuation
from .measure import Clock, Measured, measure
from .methods import DELTA, LOSSLESS, PLAIN, Lossless, Lossy, lossy_methods
from .ranged import RangeCoded
from .rates import Rate, bits_at, rate

HOPED = (5.0, 13.0)
"""By how much an article hopes that delta encoding shrinks what V4 keeps in FP8."""

DISTANCES = (1, 2, 4, 8, 16, 32, 64)
STEPS = (0.125, 0.25, 0.5, 1.0, 2.0)


@dataclass(frozen=True, slots=True)
class Correlation:
    """Of neighbouring rows of a component, the mean over layers.

    Attributes:
        near, far: of the values as stored, at lag 1 and at the distance of keyframes.
        unrotated: at lag 1 with the rotary part undone; NaN where there is none.
    """

    component: str
    near: float
    far: float
    unrotated: float


@dataclass(frozen=True, slots=True)
class Study:
    """Everything that was measured on one model.

    Attributes:
        about: what was run on, in words and numbers.
        growing: components whose bytes grow with the context; the finding is about them.
        correlations: a component each.
        lossless: a component and codec each.
        sweep: component -> kind of frames -> native bytes over coded, for each of `DISTANCES`.
        lossy: a method each.
    """

    about: Mapping[str, Any]
    growing: tuple[str, ...]
    correlations: list[Correlation]
    lossless: list[Measured]
    sweep: dict[str, dict[str, list[float]]]
    lossy: list[Rate] = field(default_factory=list)

    def of(self, codec: str, components: Sequence[str] | None = None) -> list[Measured]:
        """Rows of one codec, of these components or of those that grow."""
        wanted = self.growing if components is None else components
        return [m for m in self.lossless if m.codec == codec and m.component in wanted]

    def ratio(self, codec: str, components: Sequence[str] | None = None) -> float:
        """Native bytes over coded ones, components together."""
        found = self.of(codec, components)
        return sum(m.native_nbytes for m in found) / sum(m.nbytes for m in found)

    @property
    def best_plain(self) -> str:
        """The codec without frames that makes what grows smallest."""
        return max(PLAIN, key=self.ratio)

    @property
    def best_delta(self) -> str:
        """The codec with frames that makes what grows smallest."""
        return max(DELTA, key=self.ratio)

    @property
    def largest(self) -> str:
        """The component that takes most of what grows."""
        raw = self.of("raw native")
        return max(raw, key=lambda m: m.nbytes).component

    def finding(self) -> str:
        """The result in three sentences."""
        delta, plain = self.ratio(self.best_delta), self.ratio(self.best_plain)
        (near,) = (c.near for c in self.correlations if c.component == self.largest)
        reached = "reaches" if delta >= HOPED[0] else "does not reach"
        beats = "more" if delta > plain else "no more"
        needed = needed_correlation(HOPED[0], 8)
        return (
            f"Delta encoding {reached} the hoped-for {HOPED[0]:g} to {HOPED[1]:g} times against native "
            f"bytes: losslessly {delta:.2f} times at best ({self.best_delta}). "
            f"That is {beats} than entropy coding without any neighbour gives: "
            f"{plain:.2f} times ({self.best_plain}). Neighbours of {self.largest} correlate by {near:.2f}; "
            f"{HOPED[0]:g} times would need {needed:.5f}."
        )

    def lossy_finding(self) -> str:
        """What lossy families need for the effect that INT4 has on the logits; empty without INT4."""
        int4 = next((r for r in self.lossy if r.family.startswith("INT4")), None)
        if int4 is None:
            return ""
        bits = {
            f: bits_at(self.lossy, f, int4.effect.kl) for f in dict.fromkeys(r.family for r in self.lossy)
        }
        bits = {
            f: b for f, b in sorted(bits.items(), key=lambda item: item[1]) if b == b and f != int4.family
        }
        return (
            f"Lossy, at the effect of INT4 (KL {int4.effect.kl:.2g} nats at {int4.bits:.2f} bits a channel): "
            + ", ".join(f"{family} {b:.2f}" for family, b in bits.items())
            + " bits."
        )

    def to_json(self) -> dict[str, Any]:
        """Plain numbers and names."""
        rows = [
            asdict(m) | {n: getattr(m, n) for n in ("ratio", "ratio_bf16", "encode_mb_s", "decode_mb_s")}
            for m in self.lossless
        ]
        return {
            "about": dict(self.about),
            "growing": list(self.growing),
            "correlations": [_numbers(asdict(c)) for c in self.correlations],
            "lossless": rows,
            "distances": list(DISTANCES),
            "sweep": self.sweep,
            "lossy": [asdict(r) for r in self.lossy],
            "finding": self.finding(),
            "lossy_finding": self.lossy_finding(),
        }


def _numbers(row: dict[str, Any]) -> dict[str, Any]:
    """JSON has no NaN: None."""
    return {key: None if value != value else value for key, value in row.items()}


Note = Callable[[str], None]
"""Told what is being done."""


def study_rows(
    rows: Sequence[Series],
    growing: Sequence[str],
    about: Mapping[str, Any],
    *,
    distance: int = 16,
    repeats: int = 1,
    sweep: Sequence[str] = (),
    clock: Clock = time.process_time,
    note: Note = lambda text: None,
) -> Study:
    """Correlation and lossless codecs on rows of any model.

    Args:
        rows: of all components.
        growing: those whose bytes grow with the context.
        about: goes into the report.
        distance: of keyframes.
        repeats: runs of which the median time counts.
        sweep: components on which every distance is tried, with the range coder.
        clock: seconds; those of the processor by default, so that a busy machine changes little.
        note: told what is being done.
    """
    by_component: dict[str, list[Series]] = {}
    for s in rows:
        by_component.setdefault(s.component, []).append(s)
    correlations, lossless = [], []
    for component, series in by_component.items():
        correlations.append(_correlation(component, series, distance))
        for name, make in LOSSLESS.items():
            note(f"{component}: {name}")
            found = partial(_lossless, make, distance)
            lossless.append(measure(name, series, found, repeats=repeats, clock=clock))
    ratios_of: dict[str, dict[str, list[float]]] = {}
    for component in sweep:
        for kind in ("P", "B"):
            ratios = []
            for far in DISTANCES:
                note(f"{component}: {kind} frames, distance {far}")
                ratios.append(measure(kind, by_component[component], _framed(Frames(far, kind))).ratio)
            ratios_of.setdefault(component, {})[kind] = ratios
    return Study(about, tuple(growing), correlations, lossless, ratios_of)


def _lossless(make: Lossless, distance: int, s: Series) -> Codec:
    return make(s.form, distance)


def _framed(frames: Frames) -> Callable[[Series], Codec]:
    return lambda s: RangeCoded(s.form, frames)


def _correlation(component: str, series: Sequence[Series], distance: int) -> Correlation:
    stored = [(s.wide, s.numbers) for s in series]
    turned = [(s.unrotated, s.numbers) for s in series if s.unrotated is not None]
    return Correlation(
        component,
        pooled_correlation(stored),
        pooled_correlation(stored, distance),
        pooled_correlation(turned) if turned else float("nan"),
    )


def study_lossy(
    rows: Sequence[Series],
    calibration: Sequence[Series],
    continuation: Continuation,
    config: ModelConfig,
    methods: Sequence[Lossy],
    note: Note = lambda text: None,
) -> list[Rate]:
    """Lossy methods on the attention keys.

    Args:
        rows: what bytes and errors are measured on.
        calibration: rows of other text, which bases are fitted on.
        continuation: of further text, for the effect on logits.
        config: of the model.
        methods: which.
        note: told what is being done.
    """
    keys = [s for s in rows if s.component in KEYS]
    fitted_on = [s for s in calibration if s.component in KEYS]
    out = []
    for method in methods:
        note(f"lossy: {method.name}")
        codecs = method.codecs(fitted_on, config.num_hidden_layers)

        def of_cell(cell: Cell, codecs: dict[tuple[str, int], Codec] = codecs) -> Codec:
            return codecs[NAMES[cell.component.name, config.kind(cell.layer)], cell.layer]

        out.append(rate(method, codecs, keys, continuation.effect(of_cell)))
    return out


def study_model(
    engine: Engine,
    texts: Sequence[np.ndarray],
    about: Mapping[str, Any],
    *,
    distance: int = 16,
    repeats: int = 1,
    steps: Sequence[float] = STEPS,
    following: int = 128,
    note: Note = lambda text: None,
) -> Study:
    """Everything on one model.

    Args:
        engine: as `corpus.collect` wants it, with a free slot.
        texts: at least three: bases are fitted on the first, rows are measured on those between, and the last
            is cut in two for the effect on logits.
        about: goes into the report.
        distance, repeats, note: as `study_rows`.
        steps: of the lossy quantisers.
        following: tokens of the second part of the last text.

    Raises:
        ValueError: fewer than three texts, or a model of windows alone.
    """
    if len(texts) < 3:
        raise ValueError(f"{len(texts)} texts, at least three are needed: to fit, to measure, to continue")
    note("running the model")
    calibration = collect(engine, texts[0])
    rows = join(collect(engine, text) for text in texts[1:-1])
    growing = [c for c in GROWING if c in {s.component for s in rows}]
    if not growing:
        raise ValueError("the model has no compressed layers, or the texts no whole block: nothing grows")
    continuation = Continuation(engine, texts[-1], len(texts[-1]) - following)
    found = study_rows(
        rows, growing, about, distance=distance, repeats=repeats,
        sweep=[c for c in growing if c != "HCA entries"] + ["window"], note=note,
    )  # fmt: skip
    methods = lossy_methods(steps, distance)
    lossy = study_lossy(rows, calibration, continuation, engine.config, methods, note)
    return Study(found.about, found.growing, found.correlations, found.lossless, found.sweep, lossy)
