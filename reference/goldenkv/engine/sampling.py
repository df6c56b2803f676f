"""Token ids: checked on the way in, chosen from logits on the way out."""

from __future__ import annotations

from collections.abc import Sequence

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


def checked_tokens(tokens: Sequence[int] | np.ndarray, vocabulary: int) -> np.ndarray:
    """The token ids as int32 [tokens].

    Raises:
        ValueError: none, not integers, or one outside 0 .. vocabulary - 1.
    """
    ids = np.asarray(tokens)
    if ids.ndim != 1 or ids.size == 0 or not np.issubdtype(ids.dtype, np.integer):
        raise ValueError(f"tokens must be a non-empty list of integers, got shape {ids.shape} of {ids.dtype}")
    if ids.min() < 0 or ids.max() >= vocabulary:
        bad = int(np.argmax((ids < 0) | (ids >= vocabulary)))
        raise ValueError(f"token {ids[bad]} at index {bad} is outside the vocabulary 0 .. {vocabulary - 1}")
    return ids.astype(np.int32)
