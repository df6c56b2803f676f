"""Paths: every way to the same state. Each must give the bits of the cold run."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import numpy as np

from ..engine import EndPoints, Full, Periodic, PrefixCache, ReloadPolicy, Request, Sequence, Zero, speculate
from ..state import Snapshot, compare
from .cold import ColdRun
from .process import namespace_of, restore_elsewhere
from .report import Result


def cold_again(gate: ColdRun) -> Result:
    """The same once more."""
    seq = gate.engine.open()
    began = time.perf_counter()
    gate.engine.prefill(seq, gate.tokens)
    seconds = time.perf_counter() - began
    return gate.result("cold, once more", gate.finish(seq), seconds)


def chunk_plan(number: int, gate: ColdRun) -> Result:
    """The prompt in random chunks."""
    left, plan = len(gate.tokens), []
    while left:
        plan.append(min(left, int(gate.rng.integers(1, max(2, len(gate.tokens) // 5)))))
        left -= plan[-1]
    seq = gate.engine.open()
    began = time.perf_counter()
    gate.engine.prefill(seq, gate.tokens, plan)
    seconds = time.perf_counter() - began
    return gate.result(f"chunk plan {number}: {len(plan)} chunks", gate.finish(seq), seconds)


def batch(gate: ColdRun) -> Result:
    """Two strangers of other lengths run in the same batch, while prefilling and while decoding."""
    engine = gate.engine
    strangers = [gate.stranger(len(gate.tokens) // 2 + 1), gate.stranger(len(gate.tokens) // 3 + 1)]
    seqs = [engine.open() for _ in range(3)]
    began = time.perf_counter()
    engine.prefill_batch(list(zip(seqs, [strangers[0], gate.tokens, strangers[1]], strict=True)))
    seconds = time.perf_counter() - began

    def decode(token: int) -> np.ndarray:
        step = [(seqs[0], gate.stranger(1)[0]), (seqs[1], token), (seqs[2], gate.stranger(1)[0])]
        return engine.decode_batch(step)[1]

    found = gate.finish(seqs[1], decode)
    engine.close_all()
    return gate.result("batch with 2 strangers", found, seconds)


def fork(gate: ColdRun) -> Result:
    """A fork of a fork goes on, while parent and grandparent write tokens of their own into shared pages."""
    engine, half = gate.engine, len(gate.tokens) // 2
    first = engine.open()
    began = time.perf_counter()
    engine.prefill(first, gate.tokens[:half])
    second = engine.fork(first)
    engine.prefill(first, gate.stranger(len(gate.tokens) // 4))
    third = engine.fork(second)
    engine.prefill(second, gate.stranger(len(gate.tokens) // 4))
    engine.prefill(third, gate.tokens[half:])
    seconds = time.perf_counter() - began
    found = gate.finish(third)
    engine.close_all()
    return gate.result("fork of a fork", found, seconds)


def drafts(gate: ColdRun) -> Result:
    """Guesses with every pass, some of them right: the model verifies them, and takes the others back."""
    seq = gate.engine.restore(gate.snapshot)
    at_prompt = gate.engine.rows(seq)

    def propose(seq: Sequence, token: int, count: int) -> list[int]:
        """The coming tokens up to a random place, other tokens from there on."""
        ahead = gate.decoded[seq.length + 1 - len(gate.tokens) :][:count]
        right = gate.rng.integers(0, count)
        return [t if i < right else (t + 1) % gate.config.vocab_size for i, t in enumerate(ahead)]

    began = time.perf_counter()
    done = speculate(gate.engine, seq, gate.logits, gate.steps, 5, propose=propose)
    seconds = time.perf_counter() - began
    found = gate.everything(at_prompt, gate.engine.rows(seq), done.logits)
    gate.engine.close(seq)
    return gate.result(f"drafts: {done.accepted} of {done.drafted} kept", found, seconds)


def host(gate: ColdRun) -> Result:
    """From a snapshot in host memory."""
    gate.soil()
    began = time.perf_counter()
    seq = gate.engine.restore(gate.snapshot)
    return _restored(gate, "restore: host memory", seq, gate.ready(began))


def disk(gate: ColdRun) -> Result:
    """From a file."""
    gate.soil()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "state.safetensors"
        gate.snapshot.save(path, gate.config)
        began = time.perf_counter()
        seq = gate.engine.restore(Snapshot.load(path))
        return _restored(gate, "restore: disk", seq, gate.ready(began))


def _restored(gate: ColdRun, name: str, seq: Sequence, seconds: float) -> Result:
    found = gate.finish(seq)
    return gate.result(name, found, seconds, reused=gate.snapshot.length, nbytes=gate.snapshot.nbytes)


def new_process(gate: ColdRun) -> Result:
    """A fresh interpreter reads the file, restores it in an engine of another size, and decodes."""
    began = time.perf_counter()
    found = restore_elsewhere(gate.source, gate.snapshot, gate.config, gate.decoded)
    seconds = time.perf_counter() - began
    difference = compare(gate.expected, gate.everything(*found))
    length, nbytes = gate.snapshot.length, gate.snapshot.nbytes
    return Result("restore: new process", False, length, nbytes, difference, seconds)


POLICIES: Mapping[str, Callable[[int], ReloadPolicy]] = {
    "full": lambda page: Full(),
    "periodic": lambda page: Periodic(4 * page),
    "end points": lambda page: EndPoints(),
    "zero": lambda page: Zero(),
}
"""The exact reload policies, for pages of so many tokens."""


def policy(name: str, gate: ColdRun) -> Result:
    """A request is served and leaves; the next turn of its conversation finds what the policy kept."""
    cache = PrefixCache(gate.engine, POLICIES[name](gate.engine.geometry.page_size))
    again, seconds = served_again(gate, cache, len(gate.tokens) - len(gate.tokens) // 10)
    reused = 0 if again.plan is None else again.plan.start
    found = gate.finish(again.seq, partial(cache.decode, again), close=False)
    cache.finish(again)
    cache.forget(again.namespace)
    return gate.result(f"policy: {name}", found, seconds, reused=reused)


def served_again(gate: ColdRun, cache: PrefixCache, first: int) -> tuple[Request, float]:
    """A request of the first tokens ends, strangers use the slots, and one of the whole prompt runs.

    Returns:
        The second request, and the seconds it took.
    """
    namespace = namespace_of(gate.engine)
    before = cache.begin(namespace, gate.tokens[:first])
    cache.run(before)
    cache.finish(before)
    gate.soil()
    began = time.perf_counter()
    again = cache.begin(namespace, gate.tokens)
    cache.run(again)
    return again, gate.ready(began)
