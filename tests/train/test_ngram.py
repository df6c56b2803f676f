"""Kneser-Ney by sorting against the same written down with dictionaries."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from goldenkv.train import ngram
from goldenkv.train.ngram import KneserNey

VOCAB = 5


def text(count: int = 400, seed: int = 0) -> np.ndarray:
    """Tokens with habits: each is likely to follow from the two before it."""
    rng, out = np.random.default_rng(seed), [0, 1]
    while len(out) < count:
        out.append(int(rng.integers(VOCAB)) if rng.random() < 0.3 else (out[-1] + 2 * out[-2] + 1) % VOCAB)
    return np.array(out, np.int32)


def plainly(train: np.ndarray, order: int, continuation: bool = True):
    """p(word | context) by the definition, one dictionary an order."""
    tables: list[Counter] = []
    for n in range(1, order + 1):
        grams = [tuple(train[i : i + n]) for i in range(len(train) - n + 1)]
        if n == order or not continuation:
            tables.append(Counter(grams))
        else:
            longer = {tuple(train[i : i + n + 1]) for i in range(len(train) - n)}
            tables.append(Counter(gram[1:] for gram in longer))

    def p(word: int, context: tuple[int, ...]) -> float:
        lower = p(word, context[1:]) if context else 1 / VOCAB
        table = tables[len(context)]
        values = list(table.values())
        once, twice = values.count(1), values.count(2)
        discount = once / (once + 2 * twice) if once else 0.5
        followers = {g: c for g, c in table.items() if g[:-1] == context}
        if not followers:
            return lower
        count = table[(*context, word)]
        return (max(count - discount, 0) + discount * len(followers) * lower) / sum(followers.values())

    return p


@pytest.mark.parametrize("order", [1, 2, 3, 4])
def test_it_is_the_definition(order: int) -> None:
    train, seen = text(), text(60, seed=1)
    p = plainly(train, order)
    expected = [
        -np.log(p(int(seen[i]), tuple(int(t) for t in seen[i - order + 1 : i])))
        for i in range(order - 1, len(seen))
    ]
    found = KneserNey(train, VOCAB, order).losses(seen)
    assert np.allclose(found, expected, rtol=1e-12, atol=0)
    if order > 1:  # counts in place of contexts are another model
        q = plainly(train, order, continuation=False)
        other = [
            -np.log(q(int(seen[i]), tuple(map(int, seen[i - order + 1 : i])))) for i in range(order - 1, 60)
        ]
        assert not np.allclose(found, other, rtol=1e-3)


def test_probabilities_add_up() -> None:
    """Over all words, after contexts that are known, partly known, and unknown."""
    model = KneserNey(text(50), VOCAB, 3)
    for context in ((0, 1), (4, 4), (3, 0)):
        rows = [np.array([*context, word], np.int32) for word in range(VOCAB)]
        assert np.isclose(sum(np.exp(-model.losses(row)[-1]) for row in rows), 1.0)


def test_the_order_that_a_text_has_helps() -> None:
    train, seen = text(4000), text(1000, seed=1)
    losses = [KneserNey(train, VOCAB, order).losses(seen).mean() for order in (1, 2, 3)]
    # A token follows from the *two* before it: from one of them nothing follows.
    assert abs(losses[0] - losses[1]) < 0.01 and losses[2] < losses[1] - 0.5
    noise = np.random.default_rng(0).integers(0, VOCAB, 4000).astype(np.int32)
    assert abs(KneserNey(noise, VOCAB, 1).losses(noise).mean() - np.log(VOCAB)) < 0.01


@pytest.mark.parametrize(
    ("tokens", "vocab", "order", "said"),
    [
        ([0, 1], 5, 0, "order=0 must be from 1 to 21"),
        ([0, 1], 2048, 6, "order=6 must be from 1 to 5"),
        ([0, 5], 5, 1, "tokens from 0 to 5 do not fit vocab_size=5"),
        ([-1, 1], 5, 1, "tokens from -1 to 1"),
        ([0], 5, 2, "1 tokens are too few for order=2"),
    ],
)
def test_bad_input(tokens: list[int], vocab: int, order: int, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        KneserNey(np.array(tokens), vocab, order)


def test_one_token_and_the_largest_keys() -> None:
    # What was seen once is discounted by all that it counts, if nothing was seen twice.
    assert np.isclose(KneserNey(np.array([3]), 5, 1).losses(np.array([3]))[0], np.log(5))
    top = np.full(12, 2047)
    assert ngram.KneserNey(top, 2048, 5).losses(top).max() < 1  # five digits of 11 bits do not overflow
