"""The reload gate: state survives every way of being kept, bit for bit, and damage does not go unseen.

A cold run computes a prompt, keeps its state, and decodes. Then each *path* gets to the same state in another
way and decodes the same tokens: other chunk plans, a batch with strangers, restored from host memory, from
disk, from disk in a new process, with drafts of which most are rolled back. Every component and every logit must have the same bits. Then each *control*
damages the state in one way that real systems did; a control passes the gate only if the damage is caught.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from .config import ModelConfig
from .engine import Engine, FreeShapeEngine, Sequence, generate, speculate
from .gate_process import ModelSource, restore_elsewhere
from .gate_report import Report, Result
from .model.weights import Model
from .state import CorruptSnapshot, Rows, Snapshot, compare

__all__ = ["Gate", "ModelSource", "Report", "Result"]

_AT_PROMPT = "prompt: "


class Gate:
    """Runs the paths and controls over one prompt.

    Args:
        source: the weights.
        tokens: the prompt, at least 97 tokens, so that the two free-shape plans differ.
        steps: decode steps compared after every path.
        seed: of chunk plans and strangers.
        loaded: what `source.load()` returned, if it was called before.
    """

    plans = 5

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
        self.engine = Engine(self.model, self.config, source.numerics, slots=3, max_length=longest)
        self._warm_up()
        self._cold()

    @property
    def names(self) -> list[str]:
        """The lines, in the order in which to run them."""
        return list(self._lines())

    @property
    def about(self) -> dict:
        """What was run."""
        return {
            "model": self.source.checkpoint or f"bench preset, random weights of seed {self.source.seed}",
            "tokens": len(self.tokens),
            "steps": self.steps,
            "fingerprint": self.engine.fingerprint,
            "numerics": self.source.numerics.identity(),
        }

    def run_line(self, name: str) -> Result:
        """Runs one of `names`."""
        return self._lines()[name]()

    def run(self) -> Report:
        """Runs every line."""
        return Report(self.about, [self.run_line(name) for name in self.names])

    def _lines(self) -> dict[str, Callable[[], Result]]:
        lines: dict[str, Callable[[], Result]] = {"cold, once more": self._cold_again}
        for n in range(1, self.plans + 1):
            lines[f"chunk plan {n}"] = partial(self._chunk_plan, n)
        lines |= {
            "batch with 2 strangers": self._batch,
            "restore: host memory": self._host,
            "restore: disk": self._disk,
            "restore: new process": self._new_process,
            "drafts rolled back": self._drafts,
        }
        for name, damage, applies in (
            ("overlap dropped", _drop_overlap, any("overlap" in n for n in self.snapshot.rows)),
            ("stale window rows", self._stale_window, True),
            ("two entries swapped", _swap_entries, self._entries is not None),
        ):
            if applies:  # a model without CSA layers has no overlap, a short prompt may have no entries
                lines[name] = partial(self._damaged, name, damage)
        return lines | {
            "bit flipped": self._flipped_bit,
            "bit flipped, unverified": self._flipped_bit_unverified,
            "free-shape chunks": self._free_shape,
        }

    # The cold run --------------------------------------------------------------------------------------

    def _warm_up(self) -> None:
        """Compiles every program, so that no line's time is the compiler's."""
        seq = self.engine.open()
        self.engine.prefill(seq, self.tokens[:8])
        again = self.engine.restore(self.engine.snapshot(seq))
        self.engine.close(seq)
        self.engine.close(again)

    def _cold(self) -> None:
        seq = self.engine.open()
        began = time.perf_counter()
        logits = self.engine.prefill(seq, self.tokens)
        self.cold_seconds = time.perf_counter() - began
        self.snapshot = self.engine.snapshot(seq)
        self.logits = logits
        self.decoded, after = generate(self.engine, seq, logits, self.steps)
        self.expected = self._everything(self.snapshot.rows, self.engine.rows(seq), after)
        self.engine.close(seq)

    def _everything(self, at_prompt: Rows, at_end: Rows, logits: np.ndarray) -> Rows:
        """All that is compared: state after the prompt, state after the decode steps, logits a step."""
        prompt = {_AT_PROMPT + name: rows for name, rows in at_prompt.items()}
        return prompt | at_end | {"logits": logits}

    @property
    def _entries(self) -> str | None:
        """The first cell with two entries to swap."""
        return next((n for n, r in self.snapshot.rows.items() if n.endswith(".entries") and len(r) > 1), None)

    # Paths ---------------------------------------------------------------------------------------------

    def _finish(self, seq: Sequence) -> Rows:
        """Compares-to-be: decodes the cold run's tokens and closes the sequence."""
        at_prompt = self.engine.rows(seq)
        logits = np.array([self.engine.decode(seq, token) for token in self.decoded])
        found = self._everything(at_prompt, self.engine.rows(seq), logits)
        self.engine.close(seq)
        return found

    def _path(self, name: str, seq: Sequence, seconds: float, *, reused: int = 0) -> Result:
        difference = compare(self.expected, self._finish(seq))
        nbytes = self.snapshot.nbytes if reused else 0
        speedup = self.cold_seconds / seconds if reused else None
        return Result(name, False, reused, nbytes, difference, seconds, speedup=speedup)

    def _cold_again(self) -> Result:
        seq = self.engine.open()
        began = time.perf_counter()
        self.engine.prefill(seq, self.tokens)
        return self._path("cold, once more", seq, time.perf_counter() - began)

    def _chunk_plan(self, number: int) -> Result:
        left, plan = len(self.tokens), []
        while left:
            plan.append(min(left, int(self.rng.integers(1, max(2, len(self.tokens) // 5)))))
            left -= plan[-1]
        seq = self.engine.open()
        began = time.perf_counter()
        self.engine.prefill(seq, self.tokens, plan)
        seconds = time.perf_counter() - began
        return self._path(f"chunk plan {number}: {len(plan)} chunks", seq, seconds)

    def _batch(self) -> Result:
        """Two strangers of other lengths run in the same batch, while prefilling and while decoding."""
        strangers = [self._stranger(len(self.tokens) // 2 + 1), self._stranger(len(self.tokens) // 3 + 1)]
        seqs = [self.engine.open() for _ in range(3)]
        began = time.perf_counter()
        self.engine.prefill_batch(list(zip(seqs, [strangers[0], self.tokens, strangers[1]], strict=True)))
        seconds = time.perf_counter() - began
        at_prompt, logits = self.engine.rows(seqs[1]), []
        for token in self.decoded:
            step = [(seqs[0], self._stranger(1)[0]), (seqs[1], token), (seqs[2], self._stranger(1)[0])]
            logits.append(self.engine.decode_batch(step)[1])
        found = self._everything(at_prompt, self.engine.rows(seqs[1]), np.array(logits))
        for seq in seqs:
            self.engine.close(seq)
        return Result("batch with 2 strangers", False, 0, 0, compare(self.expected, found), seconds)

    def _stranger(self, length: int) -> np.ndarray:
        return self.rng.integers(0, self.config.vocab_size, length).astype(np.int32)

    def _host(self) -> Result:
        self._soil()
        began = time.perf_counter()
        seq = self.engine.restore(self.snapshot)
        return self._path("restore: host memory", seq, self._ready(began), reused=self.snapshot.length)

    def _disk(self) -> Result:
        self._soil()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "state.safetensors"
            self.snapshot.save(path, self.config)
            began = time.perf_counter()
            seq = self.engine.restore(Snapshot.load(path))
            return self._path("restore: disk", seq, self._ready(began), reused=self.snapshot.length)

    def _soil(self) -> None:
        """A stranger uses and leaves the slots, so that stale rows are there to be read."""
        for _ in range(3):
            seq = self.engine.open()
            self.engine.prefill(seq, self._stranger(len(self.tokens) // 2 + 1))
            self.engine.close(seq)

    def _ready(self, began: float) -> float:
        self.engine.wait()
        return time.perf_counter() - began

    def _new_process(self) -> Result:
        """A fresh interpreter reads the file, restores it in an engine of another size, and decodes."""
        began = time.perf_counter()
        found = restore_elsewhere(self.source, self.snapshot, self.config, self.decoded)
        seconds = time.perf_counter() - began
        difference = compare(self.expected, self._everything(*found))
        length, nbytes = self.snapshot.length, self.snapshot.nbytes
        return Result("restore: new process", False, length, nbytes, difference, seconds)

    def _drafts(self) -> Result:
        """Guesses with every pass, some of them right: the model verifies them, and takes the others back."""
        seq = self.engine.restore(self.snapshot)
        at_prompt = self.engine.rows(seq)
        began = time.perf_counter()
        found = speculate(self.engine, seq, self.logits, self.steps, 5, propose=self._guesses)
        seconds = time.perf_counter() - began
        rows = self._everything(at_prompt, self.engine.rows(seq), found.logits)
        self.engine.close(seq)
        name = f"drafts: {found.accepted} of {found.drafted} kept"
        return Result(name, False, 0, 0, compare(self.expected, rows), seconds)

    def _guesses(self, seq: Sequence, token: int, count: int) -> list[int]:
        """The coming tokens up to a random place, other tokens from there on."""
        ahead = self.decoded[seq.length + 1 - len(self.tokens) :][:count]
        right = self.rng.integers(0, count)
        return [t if i < right else (t + 1) % self.config.vocab_size for i, t in enumerate(ahead)]

    # Controls ------------------------------------------------------------------------------------------

    def _damaged(self, name: str, damage: Callable[[ModelConfig, Rows], Rows]) -> Result:
        rows = damage(self.config, dict(self.snapshot.rows))
        return self._control(name, replace(self.snapshot, rows=rows))

    def _control(self, name: str, snapshot: Snapshot) -> Result:
        """What damage at the prompt's end does later: the damaged rows are not compared before decoding."""
        began = time.perf_counter()
        seq = self.engine.restore(snapshot)
        seconds = self._ready(began)
        found = self._finish(seq)
        later = {name: rows for name, rows in self.expected.items() if not name.startswith(_AT_PROMPT)}
        difference = compare(later, {name: found[name] for name in later})
        wrong = np.flatnonzero(~difference.by_name["logits"])
        if difference.same:
            caught = ""
        elif len(wrong):
            caught = f"logits: from decode step {wrong[0] + 1}"
        else:
            caught = "state: no logits differ yet"
        return Result(name, True, snapshot.length, snapshot.nbytes, difference, seconds, caught)

    def _stale_window(self, config: ModelConfig, rows: Rows) -> Rows:
        """The window of a stranger of the same length: a slot's ring that was not restored."""
        seq = self.engine.open()
        self.engine.prefill(seq, self._stranger(self.snapshot.length))
        stale = self.engine.rows(seq)
        self.engine.close(seq)
        return rows | {name: stale[name] for name in rows if name.endswith(".window")}

    def _flipped_file(self) -> bytes:
        """The snapshot's file with one bit flipped: the lowest of the newest entry, or window row if none."""
        data = bytearray(self.snapshot.to_bytes(self.config))
        name = self._entries or next(n for n in self.snapshot.rows if n.endswith(".window"))
        rows = self.snapshot.rows[name]
        data[data.index(rows.tobytes()) + rows[:-1].nbytes] ^= 1
        return bytes(data)

    def _flipped_bit(self) -> Result:
        began = time.perf_counter()
        caught = ""
        try:
            Snapshot.from_bytes(self._flipped_file())
        except CorruptSnapshot as error:
            caught = f"checksum: {error}"
        seconds = time.perf_counter() - began
        length, nbytes = self.snapshot.length, self.snapshot.nbytes
        return Result("bit flipped", True, length, nbytes, None, seconds, caught)

    def _flipped_bit_unverified(self) -> Result:
        snapshot = Snapshot.from_bytes(self._flipped_file(), verify=False)
        return self._control("bit flipped, unverified", snapshot)

    def _free_shape(self) -> Result:
        """The same prompt in two chunk plans, each chunk computed in its own shape."""
        tokens = self.tokens[:576]
        engine = FreeShapeEngine(self.model, self.config, self.source.numerics, max_length=len(tokens))
        found = []
        began = time.perf_counter()
        for size in (64, 96):
            plan = [min(size, len(tokens) - done) for done in range(0, len(tokens), size)]
            seq = engine.open()
            logits = engine.prefill(seq, tokens, plan)
            found.append(engine.rows(seq) | {"logits": logits[None]})
            engine.close(seq)
        seconds = time.perf_counter() - began
        difference = compare(*found)
        caught = "" if difference.same else "comparison: two chunk plans differ"
        return Result("free-shape chunks", True, 0, 0, difference, seconds, caught)


def _drop_overlap(config: ModelConfig, rows: Rows) -> Rows:
    """The first half of the last finished block's rows, which looks empty at a block boundary."""
    return rows | {name: np.zeros_like(r) for name, r in rows.items() if "overlap" in name}


def _swap_entries(config: ModelConfig, rows: Rows) -> Rows:
    """The first two entries of the first layer that has two."""
    name = next(n for n, r in rows.items() if n.endswith(".entries") and len(r) > 1)
    order = np.arange(len(rows[name]))
    order[:2] = 1, 0
    return rows | {name: rows[name][order]}
