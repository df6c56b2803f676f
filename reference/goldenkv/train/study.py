"""What a trained model is measured by: loss on held-out text, beside n-grams and a window-only model."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from ..config import ModelConfig
from ..model.weights import Model
from .loop import held_out_losses, sequence_starts
from .ngram import KneserNey

POSITIONS = (0, 128, 256, 512, 1024, 2048)
"""Edges between which losses are averaged: the window ends at the second one."""


def by_position(losses: np.ndarray, edges: Sequence[int] = POSITIONS) -> list[float]:
    """Mean loss of the tokens at positions edge .. next edge - 1; the first token has none.

    Args:
        losses: [sequences, t - 1], of the tokens at positions 1 .. t - 1.
    """
    return [float(losses[:, max(low - 1, 0) : high - 1].mean()) for low, high in pairwise(edges)]


def measured(
    model: Model, config: ModelConfig, tokens: np.ndarray, bytes_a_token: float, *, sequences: int = 32
) -> dict[str, Any]:
    """Loss on a held-out text, nats a token and bits a byte, and by position.

    Args:
        tokens: the text.
        bytes_a_token: of it, UTF-8.
        sequences: of 2,048 tokens, evenly spaced.
    """
    losses = held_out_losses(model, config, tokens, POSITIONS[-1], sequences)
    loss = float(losses.mean())
    return {
        "loss": loss,
        "bits_a_byte": loss / np.log(2) / bytes_a_token,
        "by_position": by_position(losses),
        "starts": sequence_starts(len(tokens), POSITIONS[-1], sequences).tolist(),
        "sequence_losses": [float(row.mean()) for row in losses],
    }


def ngrams(train: np.ndarray, held_out: np.ndarray, vocab_size: int, longest: int = 5) -> dict[str, float]:
    """Held-out loss of Kneser-Ney models of order 1 to `longest`, nats a token."""
    return {
        str(order): float(KneserNey(train, vocab_size, order).losses(held_out).mean())
        for order in range(1, longest + 1)
    }
