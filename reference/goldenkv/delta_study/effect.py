"""What lossy rows do to the logits: the state is restored decoded, and the same text goes on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from ..engine import Engine
from ..state import Cell, Rows, Snapshot, cells
from .baselines import Codec
from .corpus import KEYS, NAMES

CodecOf = Callable[[Cell], Codec]
"""The codec for the rows of a cell."""


@dataclass(frozen=True, slots=True)
class Effect:
    """How predictions differ from those of the exact state.

    Attributes:
        kl: mean divergence KL(exact | decoded) a token, in nats.
        same_choice: share of tokens whose most likely successor is the same.
        loss: mean loss of the text that follows, minus that with the exact state, in nats.
    """

    kl: float
    same_choice: float
    loss: float


def compare_logits(exact: np.ndarray, found: np.ndarray, targets: np.ndarray) -> Effect:
    """Logits [n, vocabulary] of the exact and the decoded state, and the tokens [n] that came next."""
    p, q = _log_softmax(exact), _log_softmax(found)
    kl = float(np.mean(np.sum(np.exp(p) * (p - q), axis=1)))
    same = float(np.mean(exact.argmax(axis=1) == found.argmax(axis=1)))
    at = np.arange(len(targets))
    return Effect(max(0.0, kl), same, float(np.mean(p[at, targets] - q[at, targets])))


class Continuation:
    """A text cut in two: the state after the first part, and the logits of the second with the exact state.

    Args:
        engine: has a free slot.
        tokens: the whole text.
        length: of the first part; at least two tokens follow.
    """

    def __init__(self, engine: Engine, tokens: np.ndarray, length: int) -> None:
        if not 0 < length <= len(tokens) - 2:
            raise ValueError(f"{length=} must leave at least two of {len(tokens)} tokens")
        self.engine, self.following = engine, tokens[length:]
        seq = engine.open()
        engine.prefill(seq, tokens[:length])
        self.snapshot = engine.snapshot(seq)
        engine.close(seq)
        self._exact = self._logits(self.snapshot)

    def effect(self, codec_of: CodecOf) -> Effect:
        """Restores the attention keys (window rows and entries) as they come back from a codec.

        Index keys and compressor rows stay exact: the first have four bits already, the second are kept in
        float32 because errors in them would go into every later entry.
        """
        found = self._logits(replace(self.snapshot, rows=self.decoded(codec_of)))
        return compare_logits(self._exact[:-1], found[:-1], self.following[1:])

    def decoded(self, codec_of: CodecOf) -> Rows:
        """The rows of the snapshot after a codec."""
        rows = dict(self.snapshot.rows)
        for cell in cells(self.engine.config):
            name = NAMES.get((cell.component.name, self.engine.config.kind(cell.layer)))
            if name in KEYS and len(rows[cell.name]):
                before = rows[cell.name]
                codec = codec_of(cell)
                rows[cell.name] = codec.decode(codec.encode(before.astype(np.float32))).astype(before.dtype)
        return rows

    def _logits(self, snapshot: Snapshot) -> np.ndarray:
        seq = self.engine.restore(snapshot)
        try:
            return self.engine.prefill(seq, self.following, all_logits=True)
        finally:
            self.engine.close(seq)


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    wide = logits.astype(np.float64)
    shifted = wide - wide.max(axis=1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
