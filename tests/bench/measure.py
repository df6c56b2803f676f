"""What benchmarks share: clocks, peak memory, and the least work that the equations need."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp

from goldenkv.config import ModelConfig


def seconds(work: Callable[[], object]) -> float:
    """Wall time of one call."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def multiplications(config: ModelConfig, context: int) -> int:
    """Multiply-adds a token that the equations need at a context length."""
    c, hidden, heads = config, config.hidden_size, config.num_attention_heads * config.head_dim
    streams = c.hc_mult * hidden
    total = hidden * c.vocab_size + streams * c.hc_mult
    for layer in c.layers:
        ratio = c.compress_ratios[layer]
        total += hidden * (c.q_lora_rank + c.head_dim) + c.q_lora_rank * heads
        total += heads * c.o_lora_rank + c.o_groups * c.o_lora_rank * hidden
        keys = c.sliding_window
        if ratio == 4:
            index = c.index_n_heads * c.index_head_dim
            total += (
                4 * hidden * (c.head_dim + c.index_head_dim)
                + c.q_lora_rank * index
                + hidden * c.index_n_heads
            )
            total += context // ratio * index
            keys += min(c.index_topk, context // ratio)
        elif ratio:
            total += 2 * hidden * c.head_dim
            keys += context // ratio
        total += 2 * keys * heads
        total += 3 * hidden * c.moe_intermediate_size * (c.num_experts_per_tok + c.n_shared_experts)
        total += hidden * c.n_routed_experts + 2 * streams * (2 + c.hc_mult) * c.hc_mult
    return total


def matrix_speed(rows: int, narrow: int = 256, wide: int = 1024) -> float:
    """Multiply-adds a second of a plain matrix product: [rows, narrow] @ [narrow, wide] and back.

    With the sizes given the matrices stay in the cache: this machine's best case for a tile of so many rows.
    """
    left, up, down = jnp.ones((rows, narrow)), jnp.full((narrow, wide), 1e-3), jnp.full((wide, narrow), 1e-3)
    steps = max(2, 50 * 256 * 1024 // (narrow * wide))
    product = jax.jit(lambda x, up, down: jax.lax.fori_loop(0, steps, lambda _, x: (x @ up) @ down, x))
    jax.block_until_ready(product(left, up, down))
    best = min(seconds(lambda: jax.block_until_ready(product(left, up, down))) for _ in range(5))
    return 2 * steps * rows * narrow * wide / best


def peak_memory() -> int:
    """Bytes of this process at its largest. `ru_maxrss` would count the parent that started it."""
    status = Path("/proc/self/status")
    if status.exists():
        return (
            int(next(x for x in status.read_text().splitlines() if x.startswith("VmHWM")).split()[1]) * 1024
        )
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # bytes on macOS


def forget_peak() -> None:
    """Lets `peak_memory` start again from what the process holds now, on Linux; elsewhere does nothing."""
    if Path("/proc/self/clear_refs").exists():
        Path("/proc/self/clear_refs").write_text("5")
