"""Choosing the next token from logits."""

from __future__ import annotations

import numpy as np


def greedy(logits: np.ndarray) -> int:
    """The token with the highest logit; ties go to the lowest id."""
    return int(np.argmax(logits))


def sample(logits: np.ndarray, seed: int, position: int, temperature: float = 1.0) -> int:
    """Draws a token with probability softmax(logits / temperature).

    The draw is a function of (seed, position) and of the bits of `logits`, so equal logits give equal tokens
    whatever was sampled before.

    Raises:
        ValueError: the temperature is not above 0.
    """
    if not temperature > 0:
        raise ValueError(f"{temperature=} must be above 0; use greedy for the limit 0")
    noise = np.random.default_rng([seed, position]).gumbel(size=logits.shape[-1])
    return int(np.argmax(logits.astype(np.float64) / temperature + noise))
