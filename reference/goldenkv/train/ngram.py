"""Interpolated Kneser-Ney n-grams: what counting alone achieves on the same tokens.

Chen and Goodman, "An empirical study of smoothing techniques for language modeling" (1999), section 4.1.6,
with one discount an order, D = n1 / (n1 + 2 n2). An n-gram is one integer, a token a digit of it, so that
counting is sorting.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class _Order:
    """Counts of one order. Grams and contexts are sorted, so that a lookup is a binary search."""

    grams: np.ndarray
    counts: np.ndarray
    contexts: np.ndarray
    totals: np.ndarray
    followers: np.ndarray
    discount: float


class KneserNey:
    """A model of the given order.

    Args:
        tokens: the training text, integers from 0 to below `vocab_size`.
        vocab_size: how many tokens there are.
        order: tokens a gram, at least 1.

    Raises:
        ValueError: an order below 1 or too high for 63 bits, tokens outside the vocabulary, or too few.
    """

    def __init__(self, tokens: np.ndarray, vocab_size: int, order: int) -> None:
        self._bits = max(1, (vocab_size - 1).bit_length())
        if not 1 <= order <= 63 // self._bits:
            raise ValueError(f"{order=} must be from 1 to {63 // self._bits} for {vocab_size=}")
        self._check(tokens, vocab_size, order)
        self.vocab_size, self.order = vocab_size, order
        grams, counts = np.unique(self._grams(tokens, order), return_counts=True)
        orders = [self._count(grams, counts)]
        for shorter in range(order - 1, 0, -1):
            # Lower orders count in how many different contexts a gram stands, not how often.
            grams, counts = np.unique(grams & ((1 << self._bits * shorter) - 1), return_counts=True)
            orders.append(self._count(grams, counts))
        self._orders = orders[::-1]

    def losses(self, tokens: np.ndarray) -> np.ndarray:
        """-log p of each token but the first `order - 1`, nats: each from the tokens before it.

        Raises:
            ValueError: fewer tokens than the order, or tokens outside the vocabulary.
        """
        self._check(tokens, self.vocab_size, self.order)
        p = np.full(len(tokens) - self.order + 1, 1 / self.vocab_size)
        longest = self._grams(tokens, self.order)
        for n, counted in enumerate(self._orders, start=1):
            grams = longest & ((1 << self._bits * n) - 1)
            count = _look_up(counted.grams, counted.counts, grams)
            total = _look_up(counted.contexts, counted.totals, grams >> self._bits)
            followers = _look_up(counted.contexts, counted.followers, grams >> self._bits)
            known = total > 0
            mine = np.maximum(count - counted.discount, 0) + counted.discount * followers * p
            p = np.where(known, mine / np.where(known, total, 1), p)
        return -np.log(p)

    @staticmethod
    def _check(tokens: np.ndarray, vocab_size: int, order: int) -> None:
        if len(tokens) < order:
            raise ValueError(f"{len(tokens)} tokens are too few for {order=}")
        if tokens.min() < 0 or tokens.max() >= vocab_size:
            raise ValueError(f"tokens from {tokens.min()} to {tokens.max()} do not fit {vocab_size=}")

    def _grams(self, tokens: np.ndarray, n: int) -> np.ndarray:
        grams = np.zeros(len(tokens) - n + 1, np.int64)
        for i in range(n):
            grams = grams << self._bits | tokens[i : len(tokens) - n + 1 + i]
        return grams

    def _count(self, grams: np.ndarray, counts: np.ndarray) -> _Order:
        contexts, first = np.unique(grams >> self._bits, return_index=True)
        once, twice = np.count_nonzero(counts == 1), np.count_nonzero(counts == 2)
        discount = once / (once + 2 * twice) if once else 0.5
        followers = np.diff([*first, len(grams)])
        return _Order(grams, counts, contexts, np.add.reduceat(counts, first), followers, discount)


def _look_up(keys: np.ndarray, values: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """The values of the wanted keys, 0 for those that are not there."""
    at = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[at] == wanted, values[at], 0)
