"""Benchmarks: `make bench`. Every figure is a ratio to something measured in the same run.

    python tests/bench/run.py [--only NAME ...] [--json FILE] [--repeat N]

speed       prefill and decode against transformers on the same weights, and prefill against its floor: the
            multiply-adds of the equations at the speed of a plain matrix product of a tile
restore     a restore from disk against recomputing the same tokens
growth      tokens/s of prefill at growing context, and the peak memory of the process at the longest
drafts      decoding with drafts, right and wrong ones, against decoding without
production  one CSA and one HCA layer in the shapes of V4-Flash: speed, memory, and the same floor
tiers       every store against the bare device, and a reload against recomputing: see tiers.py
radix       the prefix tree by its size, and against SGLang's where that can be imported: see radix.py
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
from drafts import drafts
from measure import matrix_speed, multiplications, peak_memory, seconds
from production import production
from radix import radix
from tiers import tiers

from goldenkv.config import ModelConfig, Numerics, bench
from goldenkv.engine import Engine
from goldenkv.model.weights import Model
from goldenkv.state import Snapshot
from goldenkv.text import byte_tokens, default_text

TOKENS = 2048
CONTEXTS = (1024, 4096, 16384, 32768)
TILES = (16, 32, 64)


def prompt(config: ModelConfig, length: int) -> np.ndarray:
    """Real text as bytes."""
    return byte_tokens(default_text(), config.vocab_size)[:length]


def speed(repeat: int) -> dict:
    """Prefill of 2,048 tokens and decode after them, tile sizes and transformers in turn."""
    from goldenkv.parity import transformers_model

    config, steps = bench(), 16
    model = Model(config)
    tokens = prompt(config, TOKENS + steps)
    theirs = transformers_model(model, config)

    def ours_once(engine: Engine) -> tuple[float, float]:
        seq = engine.open()
        prefill = seconds(lambda: engine.prefill(seq, tokens[:TOKENS]))
        decode = seconds(lambda: [engine.decode(seq, token) for token in tokens[TOKENS:]]) / steps
        engine.close(seq)
        return prefill, decode

    def theirs_once() -> tuple[float, float]:
        import torch
        from transformers import DynamicCache

        cache = DynamicCache(config=theirs.config)
        with torch.no_grad():
            ids = torch.from_numpy(tokens.astype(np.int64))[None]
            prefill = seconds(lambda: theirs(ids[:, :TOKENS], cache=cache, use_cache=True))
            decode = seconds(
                lambda: [
                    theirs(ids[:, i : i + 1], cache=cache, use_cache=True) for i in range(TOKENS, len(tokens))
                ]
            )
        return prefill, decode / steps

    runs: dict[str, Callable[[], tuple[float, float]]] = {"transformers": theirs_once}
    for tile in TILES:
        engine = Engine(model, config, Numerics(tile=tile), max_length=TOKENS + steps)
        ours_once(engine)
        runs[f"tile {tile}"] = lambda engine=engine: ours_once(engine)
    taken = {name: [] for name in runs}
    for _ in range(repeat):
        for name, run in runs.items():
            taken[name].append(run())
    base = np.array(taken["transformers"])
    rate = {tile: matrix_speed(tile) / multiplications(config, TOKENS // 2) for tile in TILES}
    out: dict = {"multiply_adds_a_token": multiplications(config, TOKENS // 2)}
    for name, times in taken.items():
        prefill, decode = np.median(times, axis=0)
        out[name] = {"prefill_tokens_per_s": TOKENS / prefill, "decode_ms": decode * 1e3}
        if name != "transformers":
            ratio = np.median(base / np.array(times), axis=0)
            floor = rate[int(name.split()[1])]
            out[name] |= {
                "prefill_times_transformers": ratio[0],
                "decode_share_of_transformers": 1 / ratio[1],
                "prefill_share_of_floor": TOKENS / prefill / floor,
            }
    return out


def restore(repeat: int) -> dict:
    """Restoring 2,048 tokens from a file, verified, against recomputing them."""
    config = bench()
    engine = Engine(Model(config), config, max_length=TOKENS, slots=2)
    tokens = prompt(config, TOKENS)

    def recompute() -> None:
        seq = engine.open()
        engine.prefill(seq, tokens)
        engine.wait()
        engine.close(seq)

    def reload(path: Path) -> None:
        seq = engine.restore(Snapshot.load(path))
        engine.wait()
        engine.close(seq)

    seq = engine.open()
    engine.prefill(seq, tokens)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "state.safetensors"
        size = engine.snapshot(seq).save(path, config)
        engine.close(seq)
        reload(path)
        recompute()
        pairs = [(seconds(recompute), seconds(lambda: reload(path))) for _ in range(3 * repeat)]
        copied = np.frombuffer(path.read_bytes(), np.uint8)
        copy = min(seconds(copied.copy) for _ in range(9))
    return {
        "recompute_ms": statistics.median(a for a, _ in pairs) * 1e3,
        "restore_ms": statistics.median(b for _, b in pairs) * 1e3,
        "restore_times_faster": statistics.median(a / b for a, b in pairs),
        "bytes": size,
        "restore_times_one_copy": statistics.median(b for _, b in pairs) / copy,
    }


def growth(repeat: int) -> dict:
    """Prefill at growing context, the longest in a process of its own so that its peak memory is its own."""
    del repeat
    out = subprocess.run([sys.executable, __file__, "--grow"], capture_output=True, text=True, check=True)
    return json.loads(out.stdout)


def grow() -> dict:
    """Tokens/s of the 1,024 tokens that end at each context, in one run up to the longest."""
    config, last = bench(), 1024
    engine = Engine(Model(config), config, max_length=CONTEXTS[-1])
    tokens = prompt(config, CONTEXTS[-1])
    warm = engine.open()
    engine.prefill(warm, tokens[:64])
    engine.close(warm)
    seq, speeds = engine.open(), {}
    for context in CONTEXTS:
        if seq.length < context - last:
            engine.prefill(seq, tokens[seq.length : context - last])
        speeds[str(context)] = last / seconds(
            lambda: engine.prefill(seq, tokens[seq.length : seq.length + last])
        )
    return {
        "tokens_per_s_at": speeds,
        "peak_memory_gb": peak_memory() / 1e9,
    }


BENCHMARKS = {
    "speed": speed,
    "restore": restore,
    "growth": growth,
    "drafts": drafts,
    "production": production,
    "tiers": tiers,
    "radix": radix,
}


def main() -> None:
    """Runs the chosen benchmarks and prints JSON."""
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument("--only", nargs="*", choices=BENCHMARKS, default=list(BENCHMARKS))
    arguments.add_argument("--repeat", type=int, default=3)
    arguments.add_argument("--json", type=Path, help="also write the results here")
    arguments.add_argument("--grow", action="store_true", help=argparse.SUPPRESS)
    chosen = arguments.parse_args()
    if chosen.grow:
        print(json.dumps(grow()))
        return
    results: dict = {
        "machine": {
            "processor": platform.machine(),
            "jax": jax.__version__,
            "numerics": Numerics().identity(),
        }
    }
    for name in chosen.only:
        results[name] = BENCHMARKS[name](chosen.repeat)
        print(json.dumps({name: results[name]}, indent=1), flush=True)
    if chosen.json:
        chosen.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
