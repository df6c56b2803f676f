"""The small model that comes with the package: trained on real text, so that its state is worth measuring.

`README.md` in this folder is its model card. Made by `goldenkv train`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from ..config import ModelConfig, Numerics
from ..model.checkpoint import load_checkpoint
from ..model.weights import Model
from ..text import tokenizer_bytes

FOLDER = Path(__file__).parent
"""A checkpoint folder, with `tokenizer.json`, `held_out.safetensors` and `training.json`."""


def load(numerics: Numerics | None = None) -> tuple[ModelConfig, Model]:
    """Configuration and weights."""
    return load_checkpoint(FOLDER, numerics=numerics)


def held_out() -> np.ndarray:
    """Tokens of text that the model was not trained on, int32: Python source, one file after another."""
    return load_file(FOLDER / "held_out.safetensors")["tokens"].astype(np.int32)


def decode(tokens: Iterable[int]) -> str:
    """The text of tokens; broken characters at its ends become U+FFFD."""
    words = tokenizer_bytes(FOLDER / "tokenizer.json")
    return b"".join(words[int(token)] for token in tokens).decode(errors="replace")


def training() -> dict[str, Any]:
    """The recipe, the data, and the curves of this model and of the one that it is compared with."""
    return json.loads((FOLDER / "training.json").read_text())
