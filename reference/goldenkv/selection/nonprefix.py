"""What a page's state is under another prefix, and what comes of splicing such a page in.

A block of text runs behind two prefixes. Its rows are then compared: window rows, entries and index keys, a
layer at a time, by bits and by size. Then a run is restored whose paged rows of the block are those that the
block had behind the *other* prefix, and what follows is compared with the exact run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import jax.numpy as jnp
import numpy as np

from ..config import ModelConfig
from ..engine import Engine
from ..model.attention import layer_frequencies
from ..ops.quant import hadamard
from ..ops.rope import rotate
from ..state import Rows, Snapshot, cells
from ..state.compare import equal_rows

KINDS = ("window", "entries", "index_keys")
"""The components that are compared: what attention and the indexer read."""


class SpliceError(ValueError):
    """Prefixes or a block that cannot be compared."""


@dataclass(frozen=True, slots=True)
class RowDifference:
    """Rows of one component of one layer, behind two prefixes.

    Attributes:
        layer, kind: which.
        relative: [rows] |left - right| / |right|, Euclidean.
        equal: [rows] the same bits.
    """

    layer: int
    kind: str
    relative: np.ndarray
    equal: np.ndarray

    @property
    def first_equal(self) -> int | None:
        """The row from which on all have the same bits; None where the last one differs."""
        wrong = np.flatnonzero(~self.equal)
        if not len(wrong):
            return 0
        return int(wrong[-1]) + 1 if wrong[-1] + 1 < len(self.equal) else None


def row_differences(
    engine: Engine, left: np.ndarray, right: np.ndarray, block: np.ndarray
) -> list[RowDifference]:
    """Rows of `block` behind `left` and behind `right`, layer by layer.

    Where the prefixes differ in length the rows on the left are turned to the positions on the right, as far
    as a rotation can do that; bits are then not the same even where numbers nearly are.

    Args:
        engine: has a free slot; as in `splice`, page by page.
        left, right: prefixes, whole pages each.
        block: whole pages.
    """
    config = engine.config
    _check_pages(engine, left, right, block)
    found, expected = (_block_rows(engine, prefix, block) for prefix in (left, right))
    shift = len(right) - len(left)
    out = []
    for layer in config.layers:
        for kind in KINDS:
            if (layer, kind) in expected:
                there, ours = expected[layer, kind], found[layer, kind]
                if shift:
                    ours = _turned(config, layer, kind, ours, shift)
                size = np.linalg.norm(there.astype(np.float64), axis=1)
                gap = np.linalg.norm(ours.astype(np.float64) - there.astype(np.float64), axis=1)
                out.append(RowDifference(layer, kind, gap / np.maximum(size, 1e-30), equal_rows(ours, there)))
    return out


def _check_pages(engine: Engine, *parts: np.ndarray) -> None:
    size = engine.geometry.page_size
    lengths = [len(part) for part in parts]
    if any(length % size or not length for length in lengths):
        raise SpliceError(f"prefixes and block must be whole pages of {size} tokens, got {lengths}")


def _block_rows(engine: Engine, prefix: np.ndarray, block: np.ndarray) -> dict[tuple[int, str], np.ndarray]:
    """All rows of a block, window rows included: these are read a window at a time, before they are lost."""
    config, step = engine.config, engine.config.sliding_window - 1
    compared = [cell for cell in cells(config) if cell.component.name in KINDS]
    parts: dict[tuple[int, str], list[np.ndarray]] = {}
    seq = engine.open()
    try:
        engine.prefill(seq, prefix)
        for at in range(0, len(block), step):
            before = seq.length
            engine.prefill(seq, block[at : at + step])
            rows = engine.rows(seq)
            for cell in compared:
                known = cell.live(config, seq.length)
                if cell.component.paged:
                    fresh = range(before // config.compress_ratios[cell.layer], known.stop)
                else:
                    fresh = range(before, known.stop)
                part = rows[cell.name][fresh.start - known.start :]
                parts.setdefault((cell.layer, cell.component.name), []).append(part)
    finally:
        engine.close(seq)
    return {name: np.concatenate(part) for name, part in parts.items()}


def _turned(config: ModelConfig, layer: int, kind: str, rows: np.ndarray, shift: int) -> np.ndarray:
    """Rows rotated on by so many positions; backwards if negative."""
    # Index keys were mixed by the Hadamard transform after their rotation; it is its own inverse.
    mixed = hadamard if kind == "index_keys" else lambda x: x
    positions = jnp.full(len(rows), abs(shift), jnp.int32)
    frequency = layer_frequencies(config, layer)
    return np.asarray(mixed(rotate(mixed(jnp.asarray(rows)), positions, frequency, inverse=shift < 0)))


@dataclass(frozen=True, slots=True)
class Splice:
    """What follows a spliced block, against the exact run.

    Attributes:
        divergence: KL(exact || spliced) of the next token, nats, the mean over tokens.
        loss: of the spliced run, nats a token.
        exact_loss: of the exact run.
        agreement: how often both would choose the same token.
        equal: all logits have the same bits.
    """

    divergence: float
    loss: float
    exact_loss: float
    agreement: float
    equal: bool


class Splicer:
    """One exact run: prefix, block, and what follows; blocks of other runs can be spliced in.

    Args:
        engine: has a free slot.
        prefix, block: whole pages.
        following: tokens that run after the splice; the first is not scored, at least two.
    """

    def __init__(self, engine: Engine, prefix: np.ndarray, block: np.ndarray, following: np.ndarray) -> None:
        _check_pages(engine, prefix, block)
        if len(following) < 2:
            raise SpliceError(f"at least 2 tokens must follow, got {len(following)}")
        self.engine, self.start, self.block, self.following = engine, len(prefix), block, following
        self.snapshot = _snapshot(engine, np.concatenate([prefix, block]))
        self._exact = self._run(self.snapshot)

    def splice(
        self, prefix: np.ndarray, *, layers: Sequence[int] | None = None, block: np.ndarray | None = None
    ) -> Splice:
        """Takes the block's pages from a run behind another prefix. Windows and compressor rows stay exact.

        Args:
            prefix: of the other run, as long as ours.
            layers: only their pages; all by default.
            block: another block than ours, as long: pages of the wrong text.
        """
        if len(prefix) != self.start:
            raise SpliceError(f"the other prefix must have {self.start} tokens, got {len(prefix)}")
        block = self.block if block is None else block
        if len(block) != len(self.block):
            raise SpliceError(f"the other block must have {len(self.block)} tokens, got {len(block)}")
        other = _snapshot(self.engine, np.concatenate([prefix, block]))
        config = self.engine.config
        rows: Rows = dict(self.snapshot.rows)
        for cell in cells(config):
            if cell.component.paged and (layers is None or cell.layer in layers):
                first = self.start // config.compress_ratios[cell.layer]
                rows[cell.name] = np.concatenate([rows[cell.name][:first], other.rows[cell.name][first:]])
        return self._compare(self._run(replace(self.snapshot, rows=rows)))

    def _run(self, snapshot: Snapshot) -> np.ndarray:
        seq = self.engine.restore(snapshot)
        try:
            return self.engine.prefill(seq, self.following, all_logits=True)
        finally:
            self.engine.close(seq)

    def _compare(self, found: np.ndarray) -> Splice:
        exact, spliced = (_log_softmax(logits[:-1]) for logits in (self._exact, found))
        targets = self.following[1:]
        each = np.arange(len(targets))
        return Splice(
            float(np.mean(np.sum(np.exp(exact) * (exact - spliced), axis=1))),
            float(-np.mean(spliced[each, targets])),
            float(-np.mean(exact[each, targets])),
            float(np.mean(exact.argmax(axis=1) == spliced.argmax(axis=1))),
            bool(equal_rows(self._exact, found).all()),
        )


def _snapshot(engine: Engine, tokens: np.ndarray) -> Snapshot:
    seq = engine.open()
    try:
        engine.prefill(seq, tokens)
        return engine.snapshot(seq)
    finally:
        engine.close(seq)


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    wide = logits.astype(np.float64)
    wide = wide - wide.max(axis=1, keepdims=True)
    return wide - np.log(np.exp(wide).sum(axis=1, keepdims=True))
