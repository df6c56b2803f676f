"""The cold run, and what every line of the gate does with it."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import numpy as np

from ..config import ModelConfig
from ..engine import Engine, Sequence, generate
from ..model.weights import Model
from ..state import Rows, compare
from .process import ModelSource
from .report import Result

AT_PROMPT = "prompt: "
"""Stands before the names of rows right after the prompt; the others are those after the decode steps."""


class ColdRun:
    """A prompt computed in one go, its state, and the tokens that follow it.

    Args:
        source: the weights.
        tokens: the prompt, at least 97 tokens, so that the two free-shape plans differ.
        steps: decode steps compared after every path.
        seed: of chunk plans, guesses and strangers.
        loaded: what `source.load()` returned, if it was called before.

    Attributes:
        engine: with room for two more sequences than the one compared, and for a prefix cache.
        snapshot, logits: right after the prompt.
        decoded: the further tokens.
        expected: all that is compared.
        cold_seconds: how long the prompt took.
    """

    def __init__(
        self,
        source: ModelSource,
        tokens: np.ndarray,
        *,
        steps: int = 32,
        seed: int = 0,
        loaded: tuple[ModelConfig, Model] | None = None,
    ) -> None:
        self.source, self.tokens, self.steps = source, tokens, steps
        self.config, self.model = loaded or source.load()
        if len(tokens) < 97:
            raise ValueError(f"the gate needs at least 97 tokens, got {len(tokens)}")
        self.rng = np.random.default_rng(seed)
        longest = len(tokens) + steps
        pages = -(-longest // self.config.alignment)
        self.engine = Engine(
            self.model, self.config, source.numerics,
            slots=3, max_length=longest, pages=4 * pages + 4, boundaries=pages + 2,
        )  # fmt: skip
        self._warm_up()
        self._cold()

    def _warm_up(self) -> None:
        """Compiles every program, so that no line's time is the compiler's."""
        seq = self.engine.open()
        self.engine.prefill(seq, self.tokens[:8])
        self.engine.prefill(self.engine.fork(seq), self.tokens[:8])
        again = self.engine.restore(self.engine.snapshot(seq))
        handle = self.engine.save_boundary(again)
        self.engine.close(again)
        self.engine.adopt(seq.pages, 8, boundary=handle)
        state = self.engine.gather_boundary(handle).rows()
        self.engine.drop_boundary(handle)
        self.engine.drop_boundary(self.engine.put_boundary(8, state))
        leases = self.engine.take_pages(1)
        page = self.engine.gather_pages([leases[0].page]).rows(0)
        self.engine.write_pages(leases, [page])
        self.engine.drop_pages([leases[0].page])
        self.engine.close_all()

    def _cold(self) -> None:
        seq = self.engine.open()
        began = time.perf_counter()
        self.logits = self.engine.prefill(seq, self.tokens)
        self.cold_seconds = time.perf_counter() - began
        self.snapshot = self.engine.snapshot(seq)
        self.decoded, after = generate(self.engine, seq, self.logits, self.steps)
        self.expected = self.everything(self.snapshot.rows, self.engine.rows(seq), after)
        self.engine.close(seq)

    # For paths and controls ----------------------------------------------------------------------------

    def everything(self, at_prompt: Rows, at_end: Rows, logits: np.ndarray) -> Rows:
        """All that is compared: state after the prompt, state after the decode steps, logits a step."""
        prompt = {AT_PROMPT + name: rows for name, rows in at_prompt.items()}
        return prompt | at_end | {"logits": logits}

    def finish(
        self, seq: Sequence, decode: Callable[[int], np.ndarray] | None = None, *, close: bool = True
    ) -> Rows:
        """Compares-to-be of a sequence at the prompt's end: decodes the cold run's tokens and closes it."""
        decode = decode or partial(self.engine.decode, seq)
        at_prompt = self.engine.rows(seq)
        logits = np.array([decode(token) for token in self.decoded])
        found = self.everything(at_prompt, self.engine.rows(seq), logits)
        if close:
            self.engine.close(seq)
        return found

    def result(self, name: str, found: Rows, seconds: float, *, reused: int = 0, nbytes: int = 0) -> Result:
        """The line of a path."""
        speedup = self.cold_seconds / seconds if reused else None
        return Result(name, False, reused, nbytes, compare(self.expected, found), seconds, speedup=speedup)

    def stranger(self, length: int) -> np.ndarray:
        """Random tokens."""
        return self.rng.integers(0, self.config.vocab_size, length).astype(np.int32)

    def soil(self) -> None:
        """Strangers use and leave the slots, so that stale rows are there to be read."""
        for _ in range(3):
            seq = self.engine.open()
            self.engine.prefill(seq, self.stranger(len(self.tokens) // 2 + 1))
            self.engine.close(seq)

    def ready(self, began: float) -> float:
        """Seconds since `began`, once the device is done."""
        self.engine.wait()
        return time.perf_counter() - began
