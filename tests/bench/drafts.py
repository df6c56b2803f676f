"""Drafts: what a verified pass costs and saves against decoding one token at a time."""

from __future__ import annotations

import statistics

import numpy as np
from measure import seconds

from goldenkv.config import bench, with_mtp
from goldenkv.engine import Engine, Sequence, generate, speculate
from goldenkv.model.weights import Model

CONTEXT, STEPS = 1024, 48
COUNTS = (1, 3, 5)


def drafts(repeat: int) -> dict:
    """Times of plain decoding over those with drafts, all of them right, all wrong, or of the MTP layer.

    Weights are random, so the guesses of the MTP layer are rarely right: its line is what drafting costs.
    """
    config = with_mtp(bench())
    engine = Engine(Model(config), config, slots=1, max_length=CONTEXT + STEPS)
    seq = engine.open()
    logits = engine.prefill(seq, np.random.default_rng(0).integers(0, config.vocab_size, CONTEXT))
    state = engine.snapshot(seq)
    truth, _ = generate(engine, seq, logits, STEPS)
    engine.close(seq)

    def guesses(off: int) -> list[int]:
        return [(token + off) % config.vocab_size for token in truth]

    def source(off: int) -> object:
        ahead = guesses(off)
        return lambda seq, token, count: ahead[seq.length + 1 - CONTEXT :][:count]

    def timed(count: int, propose: object) -> float:
        seq: Sequence = engine.restore(state)
        if count:
            taken = seconds(lambda: speculate(engine, seq, logits, STEPS, count, propose=propose))
        else:
            taken = seconds(lambda: generate(engine, seq, logits, STEPS))
        engine.close(seq)
        return taken

    lines = {"right": source(0), "wrong": source(1), "of the MTP layer": None}
    runs = {f"{count} {name}": (count, propose) for name, propose in lines.items() for count in COUNTS}
    ratios: dict[str, list[float]] = {name: [] for name in runs}
    timed(5, None)  # compiles
    for _ in range(repeat):
        for name, (count, propose) in runs.items():
            plain = timed(0, None)
            ratios[name].append(plain / timed(count, propose))
    return {f"times as fast, drafts {name}": statistics.median(r) for name, r in ratios.items()}
