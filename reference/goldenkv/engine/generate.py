"""Decoding many tokens: one at a time, or with drafts that are verified several at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from .engine import Engine
from .sampling import greedy
from .slots import Sequence

Choose = Callable[[np.ndarray, int], int]
"""From logits and the position of the token to choose, to a token."""

Propose = Callable[[Sequence, int, int], list[int]]
"""From a sequence, its next token and a count, to at most that many guesses of what follows the token."""


def greedily(logits: np.ndarray, position: int) -> int:
    """The token with the highest logit, at every position."""
    return greedy(logits)


def generate(
    engine: Engine, seq: Sequence, logits: np.ndarray, steps: int, choose: Choose = greedily
) -> tuple[list[int], np.ndarray]:
    """Decodes `steps` tokens, each chosen from the logits before it.

    Args:
        engine, seq: the sequence, whose next token is to be chosen from `logits`.
        logits: what the last `prefill` or `decode` returned.
        choose: greedy by default. For seeded sampling pass
            `lambda logits, position: sample(logits, seed, position)`.

    Returns:
        The tokens, and the logits after each, float32 [steps, vocabulary].
    """
    tokens, rows = [], []
    for _ in range(steps):
        token = choose(logits, seq.length)
        logits = engine.decode(seq, token)
        tokens.append(token)
        rows.append(logits)
    return tokens, np.array(rows, np.float32).reshape(steps, engine.config.vocab_size)


@dataclass(frozen=True, slots=True)
class Speculation:
    """What `speculate` decoded, and how well the drafts did.

    Attributes:
        tokens, logits: exactly those of `generate`.
        drafted: guesses that were verified.
        accepted: guesses that were right.
        passes: runs of the main model.
    """

    tokens: list[int]
    logits: np.ndarray
    drafted: int
    accepted: int
    passes: int


def speculate(
    engine: Engine,
    seq: Sequence,
    logits: np.ndarray,
    steps: int,
    drafts: int = 1,
    *,
    choose: Choose = greedily,
    propose: Propose | None = None,
) -> Speculation:
    """As `generate`, with guesses of the next tokens that the model verifies in one pass.

    A guess is kept if `choose` takes it from the logits of the pass; the first wrong one and all after it
    are rolled back. A token's bits do not depend on what runs beside it in its tile, and a rollback leaves
    nothing behind: tokens, logits and state have the bits of a run that never drafted.

    Args:
        engine, seq, logits, steps, choose: as in `generate`.
        drafts: guesses a pass, at least 1 and at most the `rollback` of the engine.
        propose: where guesses come from; the MTP layer (`Engine.draft`) by default.

    Raises:
        ValueError: `drafts` is out of range, `propose` gave too many, or there is no MTP layer to draft with.
    """
    most = engine.geometry.rollback
    if not 1 <= drafts <= most:
        raise ValueError(f"{drafts=} must lie in 1 .. {most} (what the engine can roll back)")
    propose = propose or engine.draft
    tokens: list[int] = []
    rows: list[np.ndarray] = []
    drafted = passes = 0
    while len(tokens) < steps:
        token, start = choose(logits, seq.length), seq.length
        room = min(drafts, steps - len(tokens) - 1, engine.max_length - start - 1)
        guesses = propose(seq, token, room) if room > 0 else []
        if len(guesses) > max(room, 0):
            raise ValueError(f"propose gave {len(guesses)} guesses, at most {room} were asked for")
        found = engine.prefill(seq, [token, *guesses], all_logits=True)
        kept = 1 + _right(guesses, found, start + 1, choose)
        engine.rollback(seq, start + kept)
        tokens += [token, *guesses][:kept]
        rows += list(found[:kept])
        logits, drafted, passes = found[kept - 1], drafted + len(guesses), passes + 1
    all_rows = np.array(rows, np.float32).reshape(steps, engine.config.vocab_size)
    return Speculation(tokens, all_rows, drafted, len(tokens) - passes, passes)


def _right(guesses: list[int], logits: np.ndarray, position: int, choose: Choose) -> int:
    """How many guesses from the first on are what the logits before them choose."""
    for i, guess in enumerate(guesses):
        if choose(logits[i], position + i) != guess:
            return i
    return len(guesses)
