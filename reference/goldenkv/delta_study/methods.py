"""The codecs of the study, by the names of its tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from ..delta import BoundedCodec, DeltaCodec, FieldCodec, Frames, Range, Zstd
from ..state import RowFormat
from .baselines import Blosc2, Codec, Pcodec, Raw, ZstdPlanes
from .corpus import Series
from .lossy import Anchors, Int4, Quantiser, Transform
from .ranged import RangeCoded

Lossless = Callable[[RowFormat, int], Codec]
"""From the native format of rows and the distance of keyframes to a codec."""

PLAIN: Mapping[str, Lossless] = {
    "raw native": lambda form, distance: Raw(form),
    "zstd, byte planes": lambda form, distance: ZstdPlanes(form),
    "blosc2, shuffle": lambda form, distance: Blosc2(form, "shuffle"),
    "blosc2, bitshuffle": lambda form, distance: Blosc2(form, "bitshuffle"),
    "pcodec": lambda form, distance: Pcodec(form),
    "range coder": lambda form, distance: RangeCoded(form),
}
"""No frames. (pcodec may use differences of its own accord.)"""

DELTA: Mapping[str, Lossless] = {
    "range coder, P": lambda form, distance: RangeCoded(form, Frames(distance, "P")),
    "range coder, P xor": lambda form, distance: RangeCoded(form, Frames(distance, "P"), "xor"),
    "range coder, B": lambda form, distance: RangeCoded(form, Frames(distance, "B")),
    "delta P xor, zstd": lambda form, distance: FieldCodec(
        form, DeltaCodec(Frames(distance, "P"), "xor", entropy=Zstd())
    ),
    "delta P, range": lambda form, distance: FieldCodec(
        form, DeltaCodec(Frames(distance, "P"), "difference", ordered=True, entropy=Range())
    ),
    "delta B, range": lambda form, distance: FieldCodec(
        form, DeltaCodec(Frames(distance, "B"), "difference", ordered=True, entropy=Range())
    ),
}
"""With frames. The first three are "range coder" and nothing else but a prediction; the others are the codecs
of `goldenkv.delta`, with checksums and random access by group, whose bytes count."""

LOSSLESS: Mapping[str, Lossless] = {**PLAIN, **DELTA}


@dataclass(frozen=True, slots=True)
class Lossy:
    """A lossy method: a codec for each layer of each component.

    Attributes:
        family: what is one curve in a picture.
        step: its parameter; 0 if it has none.
        make: from rows of other text [n, channels] and the depth of the layer (0 to 1) to a codec.
    """

    family: str
    step: float
    make: Callable[[np.ndarray, float], Codec]

    @property
    def name(self) -> str:
        return f"{self.family}, {self.step:g}" if self.step else self.family

    def codecs(self, calibration: Sequence[Series], layers: int) -> dict[tuple[str, int], Codec]:
        """The codec for each component and layer.

        Args:
            calibration: rows of other text.
            layers: of the model.
        """
        return {(s.component, s.layer): self.make(s.wide, s.layer / max(1, layers - 1)) for s in calibration}


def lossy_methods(steps: Sequence[float], distance: int) -> list[Lossy]:
    """All lossy methods: INT4, and the others at every step.

    Args:
        steps: of the quantisers, in standard deviations of what each quantises.
        distance: of keyframes.
    """
    found = [Lossy("INT4, scale a 32", 0, lambda rows, depth: Int4(rows.shape[1]))]
    for step in steps:
        found += [
            Lossy("quantiser", step, partial(_quantiser, step)),
            Lossy("anchors", step, partial(_anchors, step)),
            Lossy("transform", step, partial(_transform, step)),
            Lossy("bounded P", step, partial(_bounded, step, distance)),
        ]
    return found


def _quantiser(step: float, rows: np.ndarray, depth: float) -> Codec:
    return Quantiser(step)


def _anchors(step: float, rows: np.ndarray, depth: float) -> Codec:
    return Anchors(step, depth)


def _transform(step: float, rows: np.ndarray, depth: float) -> Codec:
    return Transform.fit(rows, step)


def _bounded(step: float, distance: int, rows: np.ndarray, depth: float) -> Codec:
    """The bound is half a step."""
    return BoundedCodec(step / 2, True, Frames(distance), Range())
