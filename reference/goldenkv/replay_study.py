"""How wrong a replay of too few tokens is: against a cold run, bit by bit.

A replay runs tokens again whose entries are in the pages already, so that windows and compressor rows come
back. How many it needs is `engine.replay_length`; here every number of tokens can be tried.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from .config import ModelConfig
from .engine import Engine
from .engine import Sequence as EngineSequence
from .state import Cell, Rows, cells, compare


@dataclass(frozen=True, slots=True)
class ReplayError:
    """How a sequence differs from a cold run after a replay.

    Attributes:
        count: tokens that ran again.
        wrong_rows: boundary rows with other bits, for each layer.
        state_error: [layers] the largest absolute difference of a value in them.
        logit_error: the same of the logits of the tokens that follow.
        logits_equal: these have the same bits.
    """

    count: int
    wrong_rows: tuple[int, ...]
    state_error: tuple[float, ...]
    logit_error: float
    logits_equal: bool

    @property
    def exact(self) -> bool:
        """Every bit of state and logits is equal."""
        return self.logits_equal and not any(self.wrong_rows)


def replay_errors(
    engine: Engine, tokens: np.ndarray, length: int, counts: Sequence[int]
) -> list[ReplayError]:
    """Replays the last tokens of a prompt, as many as each count says, and compares with the cold run.

    Rows of tokens that did not run count as zeros, whatever the slot held before.

    Args:
        engine: has a free slot, and pages for `tokens` twice.
        tokens: [n] ids; those from `length` on run after the replay.
        length: of the prompt, less than n.
        counts: each 1 .. length.
    """
    out = []
    with _cold(engine, tokens, length) as (pages, rows, logits):
        for count in counts:
            with _replaying(engine, pages, length, count) as seq:
                engine.replay(seq, tokens[length - count : length])
                found = _boundary(engine, seq, length - count)
                following = engine.prefill(seq, tokens[length:], all_logits=True)
            same, names = compare(found, rows).by_name, _by_layer(engine.config)
            out.append(
                ReplayError(
                    count,
                    tuple(sum(int((~same[name]).sum()) for name in layer) for layer in names),
                    tuple(max(_largest(found[name], rows[name]) for name in layer) for layer in names),
                    _largest(following, logits),
                    compare({"": following}, {"": logits}).same,
                )
            )
    return out


def exact_rows(engine: Engine, tokens: np.ndarray, length: int, count: int) -> np.ndarray:
    """Which window rows a replay makes with the bits of the cold run.

    Args:
        engine, tokens, length: as `replay_errors`.
        count: tokens that run again.

    Returns:
        [layers, count] bool, for the row that a layer made when that token ran; False if it made none. The
        MTP layer is one token behind: its row is that of the token before.
    """
    start = length - count
    seq = engine.open()
    expected = _window_rows(engine, seq, tokens[:length])
    engine.close(seq)
    with (
        _cold(engine, tokens, length) as (pages, _, _),
        _replaying(engine, pages, length, count) as seq,
    ):
        found = _window_rows(engine, seq, tokens[start:length])
    out = np.zeros((len(engine.config.state_layers), count), bool)
    for cell in _windows(engine.config):
        for number, row in found[cell.layer].items():
            if number >= start:
                at = cell.component.made_by(engine.config, cell.layer, number) - start
                out[cell.layer, at] = compare({"": row[None]}, {"": expected[cell.layer][number][None]}).same
    return out


@contextmanager
def _cold(engine: Engine, tokens: np.ndarray, length: int) -> Iterator[tuple[list[int], Rows, np.ndarray]]:
    """Pages of a prompt that ran cold, its boundary rows, and the logits of what follows."""
    seq = engine.open()
    engine.prefill(seq, tokens[:length])
    pages, rows = list(seq.pages), _boundary(engine, seq)
    engine.hold_pages(pages)
    logits = engine.prefill(seq, tokens[length:], all_logits=True)
    engine.close(seq)
    try:
        yield pages, rows, logits
    finally:
        engine.drop_pages(pages)


@contextmanager
def _replaying(engine: Engine, pages: list[int], length: int, count: int) -> Iterator[EngineSequence]:
    """A sequence over these pages that stands so many tokens before their end."""
    seq = engine.adopt(pages, length, since=length - count)
    try:
        yield seq
    finally:
        engine.close(seq)


def _by_layer(config: ModelConfig) -> list[list[str]]:
    """Names of the boundary cells of each layer."""
    boundary = [cell for cell in cells(config) if not cell.component.paged]
    return [[cell.name for cell in boundary if cell.layer == layer] for layer in config.state_layers]


def _boundary(engine: Engine, seq: EngineSequence, since: int = 0) -> Rows:
    """The boundary rows of a sequence; zeros for tokens before `since`."""
    rows, found = engine.rows(seq), {}
    for cell in cells(engine.config):
        if not cell.component.paged:
            found[cell.name] = np.array(rows[cell.name])
            found[cell.name][: max(0, since - cell.live(engine.config, seq.length).start)] = 0
    return found


def _windows(config: ModelConfig) -> list[Cell]:
    return [cell for cell in cells(config) if cell.component.buffer == "window"]


def _window_rows(engine: Engine, seq: EngineSequence, tokens: np.ndarray) -> list[dict[int, np.ndarray]]:
    """Runs tokens; of each layer its window rows by number. A window at a time, so that none is missed."""
    config, step = engine.config, engine.config.sliding_window - 1
    found: list[dict[int, np.ndarray]] = [{} for _ in config.state_layers]
    for at in range(0, len(tokens), step):
        engine.prefill(seq, tokens[at : at + step])
        rows = engine.rows(seq)
        for cell in _windows(config):
            found[cell.layer] |= zip(cell.live(config, seq.length), rows[cell.name], strict=True)
    return found


def _largest(found: np.ndarray, expected: np.ndarray) -> float:
    """The largest absolute difference of two arrays of one shape; 0 where they are empty."""
    difference = np.abs(found.astype(np.float64) - expected.astype(np.float64))
    return float(difference.max(initial=0.0))
