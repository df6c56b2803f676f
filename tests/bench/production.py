"""One layer in the shapes of V4-Flash on this machine: how fast, and in how much memory."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from dataclasses import replace

import jax
import numpy as np
from measure import forget_peak, matrix_speed, multiplications, peak_memory, seconds

from goldenkv.config import ModelConfig, Numerics, flash
from goldenkv.engine import Engine
from goldenkv.model.weights import Model

TOKENS, STEPS = 2048, 16
RATIOS = {"CSA": 4, "HCA": 128}
TILES = (32, 128)


def one_layer(kind: str) -> ModelConfig:
    """V4-Flash with one layer of a kind, 8 of 256 routed experts and a small vocabulary.

    A token still passes through 6 routed experts; 256 of them take 26 GB in float32.
    """
    return replace(
        flash(), num_hidden_layers=1, compress_ratios=(RATIOS[kind],), num_nextn_predict_layers=0,
        n_routed_experts=8, num_hash_layers=0, vocab_size=512,
    )  # fmt: skip


def production(repeat: int) -> dict:
    """Each kind and tile in a process of its own, so that its peak memory is its own."""
    return {f"{kind}, tile {tile}": _in_process(kind, tile, repeat) for kind in RATIOS for tile in TILES}


def _in_process(*arguments: object) -> dict:
    command = [sys.executable, __file__, *map(str, arguments)]
    return json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)


def measure(kind: str, tile: int, repeat: int) -> dict:
    """Prefill of 2,048 random tokens and decode after them.

    The floor is the multiply-adds of the equations at the speed of a plain product of a tile: once with
    matrices that stay in the cache, once with some of the size of a layer, which come from memory.
    """
    config = one_layer(kind)
    model = Model(config)
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(model))
    forget_peak()  # of drawing the weights
    engine = Engine(model, config, Numerics(tile=tile), max_length=TOKENS + STEPS)
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, TOKENS + STEPS)

    def run(length: int, steps: int) -> tuple[float, float]:
        seq = engine.open()
        prefill = seconds(lambda: engine.prefill(seq, tokens[:length]))
        decode = seconds(lambda: [engine.decode(seq, token) for token in tokens[length : length + steps]])
        engine.close(seq)
        return length / prefill, 1e3 * decode / max(steps, 1)

    run(tile, 1)  # compiles
    rates, decodes = zip(*(run(TOKENS, STEPS) for _ in range(repeat)), strict=True)
    peak, rate = peak_memory(), statistics.median(rates)
    adds = multiplications(config, TOKENS // 2)
    return {
        "prefill_tokens_per_s": rate,
        "decode_ms": statistics.median(decodes),
        "weights_gb": weights / 1e9,
        "peak_memory_gb": peak / 1e9,
        "multiply_adds_a_token": adds,
        "prefill_share_of_floor": rate * adds / matrix_speed(tile),
        "prefill_share_of_floor_from_memory": rate * adds / matrix_speed(tile, 4096, 8192),
    }


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))))
