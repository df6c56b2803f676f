"""How a model is computed."""

from __future__ import annotations

import dataclasses
import os
import platform
from dataclasses import dataclass
from pathlib import Path

import jax
import jaxlib

from .model import ModelConfig

ARITHMETIC = 1
"""Revision of this project's own sums. Raise it with any change of operations, their order or blocks."""


@dataclass(frozen=True, slots=True)
class Numerics:
    """Everything besides weights and tokens that decides the bits of a result.

    State made under one numerics is a miss under another: `identity` goes into every fingerprint.
    Reductions that grow with the context run over fixed blocks in a fixed order, so the maximum length,
    the batch and the size of a pool are not part of it.

    Attributes:
        dtype: of activations and cached rows, "float32" or "bfloat16". Compressors, mHC, routers, softmax
            and the head always compute in float32, as the published code does.
        tile: tokens in a tile; every program runs in this one shape.
        index_block: compressed entries scored at a time by the indexer.
        key_block: compressed entries at a time in HCA attention.
        fake_quantisation: round KV to E4M3 and indexer queries and keys to E2M1, as the published code does.
        implementation: "xla", the reference, or the name of an installed package of kernels: "pallas".
    """

    dtype: str = "float32"
    tile: int = 32
    index_block: int = 256
    key_block: int = 32
    fake_quantisation: bool = False
    implementation: str = "xla"

    def __post_init__(self) -> None:
        if self.dtype not in ("float32", "bfloat16"):
            raise ValueError(f"dtype={self.dtype!r} must be 'float32' or 'bfloat16'")
        for name in ("tile", "index_block", "key_block"):
            value = getattr(self, name)
            if type(value) is not int or value < 4 or value % 4:
                raise ValueError(f"{name}={value!r} must be a positive multiple of 4")
        if type(self.fake_quantisation) is not bool:
            raise ValueError(f"fake_quantisation={self.fake_quantisation!r} must be True or False")

    def check(self, config: ModelConfig) -> None:
        """Raises ValueError where the tile does not fit the compression ratios of `config`."""
        for ratio in set(config.compress_ratios) - {0}:
            if self.tile % ratio and ratio % self.tile:
                raise ValueError(
                    f"tile={self.tile} must divide the compression ratio {ratio} or be a multiple"
                )

    def identity(self) -> dict[str, str]:
        """The numerics and the machine facts on which bits were found to depend, as text."""
        device = jax.devices()[0]
        ours = {field.name: str(getattr(self, field.name)) for field in dataclasses.fields(self)}
        return ours | {
            "arithmetic": str(ARITHMETIC),
            "jaxlib": jaxlib.__version__,
            "xla_flags": " ".join(sorted(os.environ.get("XLA_FLAGS", "").split())),
            "platform": device.platform,
            "device_kind": device.device_kind,
            "isa": _instruction_set(),
        }


def _instruction_set() -> str:
    """The processor family, and whether it has AVX2: bits were found to differ below it and not above."""
    try:
        has_avx2 = " avx2 " in Path("/proc/cpuinfo").read_text()
    except OSError:
        has_avx2 = False
    return platform.machine() + ("+avx2" if has_avx2 else "")
