"""Lossy methods: what the rows take, how wrong they come back, what that does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from .baselines import Codec
from .corpus import Series
from .effect import Effect
from .measure import measure
from .methods import Lossy


@dataclass(frozen=True, slots=True)
class Rate:
    """A lossy method on all attention keys of a model.

    Attributes:
        name, family, step: of the method.
        bits: a channel, all streams over all values.
        ratio: native bytes over coded ones.
        error: root mean square error over root mean square of the values.
        shared_nbytes: what both sides hold besides the streams; not in `bits`.
        effect: on the logits.
    """

    name: str
    family: str
    step: float
    bits: float
    ratio: float
    error: float
    shared_nbytes: int
    effect: Effect


def rate(
    method: Lossy, codecs: Mapping[tuple[str, int], Codec], rows: Sequence[Series], effect: Effect
) -> Rate:
    """Encodes and decodes rows with the codec of their component and layer."""
    nbytes = values = native = shared = 0
    lost = held = 0.0
    for s in rows:
        found = measure(method.name, [s], lambda s: codecs[s.component, s.layer])
        energy = float(np.sum(s.wide.astype(np.float64) ** 2))
        nbytes, values = nbytes + found.nbytes, values + s.values.size
        native, shared = native + found.native_nbytes, shared + found.shared_nbytes
        lost, held = lost + energy * found.error**2, held + energy
    error = (lost / held) ** 0.5 if held else 0.0
    return Rate(
        method.name, method.family, method.step, 8 * nbytes / values, native / nbytes, error, shared, effect
    )


def bits_at(rates: Sequence[Rate], family: str, kl: float) -> float:
    """Bits a channel that a family of methods needs for a divergence, between its measured steps.

    Linear in bits and in the logarithm of the divergence. NaN where the divergence is out of range.
    """
    found = sorted((r for r in rates if r.family == family), key=lambda r: -r.bits)
    effects = np.maximum.accumulate([max(r.effect.kl, 1e-12) for r in found])
    if not found or not effects[0] <= kl <= effects[-1]:
        return float("nan")
    return float(np.interp(np.log(kl), np.log(effects), [r.bits for r in found]))
