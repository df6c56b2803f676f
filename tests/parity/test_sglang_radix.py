"""The radix tree against SGLang's radix cache, an independent implementation of plain LRU over prefixes.

What it needs to run is said in `sglang_tree.py`; without it these tests are skipped.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from sglang_tree import NoSGLang, SGLangTree, modules

from goldenkv.prefix import RadixTree, Strategy, Victim
from goldenkv.prefix.strategies import Score

P = 4
NS = b"namespace"
OPERATIONS = 120


@pytest.fixture(scope="module", autouse=True)
def _sglang() -> None:
    try:
        modules()
    except NoSGLang as missing:
        pytest.skip(str(missing))


class FirstIn(Strategy):
    """A control: what is used does not count."""

    def score(self, victim: Victim) -> Score:
        return (victim.page,)


def anywhere(rng: np.random.Generator) -> np.ndarray:
    """Up to eight pages of two kinds: prompts part anywhere, within nodes too."""
    return np.repeat(rng.integers(0, 2, rng.integers(1, 9)), P).astype(np.int32)


def by_turns(rng: np.random.Generator) -> np.ndarray:
    """Conversations of up to four turns of two pages, each one of three: prompts part between turns."""
    return np.repeat(rng.integers(0, 3, rng.integers(1, 5)), 2 * P).astype(np.int32)


class Both:
    """The two trees side by side, each given the same work."""

    def __init__(self, strategy: Strategy | None = None, refresh_rest: bool = True) -> None:
        self.theirs, self.ours = SGLangTree(P), RadixTree(P, strategy)
        self.refresh_rest = refresh_rest
        self.issued = 0

    def hit(self, tokens: np.ndarray) -> tuple[int, int]:
        """The length that each finds, and uses."""
        self._rest(tokens)
        found = self.ours.match(NS, tokens)
        self.ours.touch(found, found.length)
        return found.length, self.theirs.match(self.theirs.key(tokens))

    def insert(self, tokens: np.ndarray) -> tuple[int, int]:
        """Publishes a prompt; the length that each had of it."""
        import torch

        self._rest(tokens)
        there = self.ours.match(NS, tokens)
        fresh = range(self.issued, self.issued + len(tokens) // P - len(there.pages))
        self.issued += len(fresh)
        self.ours.insert(NS, tokens, [*there.pages.tolist(), *fresh])
        slots = torch.arange(len(tokens))
        return there.length, self.theirs.insert(self.theirs.key(tokens), slots)

    def evict(self, pages: int) -> tuple[int, int]:
        """They free whole leaves, so ours is asked for as many pages as that was."""
        freed = self.theirs.evict(pages * P)
        return len(self.ours.evict(pages=freed // P).pages) * P, freed

    def _rest(self, tokens: np.ndarray) -> None:
        """A difference, made up for: SGLang refreshes all of a node that it splits, the unused part too."""
        if self.refresh_rest:
            found = self.ours.match(NS, self.theirs.rest_of(tokens))
            self.ours.touch(found, found.length)


def differences(both: Both, prompt: Callable[[np.random.Generator], np.ndarray], seed: int) -> int:
    """Runs one seeded sequence of inserts, hits and evictions; how many answers differ."""
    rng, answers = np.random.default_rng(seed), []
    for _ in range(OPERATIONS):
        work: list[Callable[[], Any]] = [
            lambda: both.insert(prompt(rng)),
            lambda: both.hit(prompt(rng)),
            lambda: both.evict(int(rng.integers(1, 5))),
        ]
        answers.append(work[rng.integers(3)]())
    both.ours.check()
    assert any(ours for ours, _ in answers)
    return sum(ours != theirs for ours, theirs in answers)


@pytest.mark.parametrize("seed", range(10))
def test_hit_lengths_are_the_same(seed: int) -> None:
    assert differences(Both(), anywhere, seed) == 0


@pytest.mark.parametrize("seed", range(10))
def test_without_splits_nothing_is_made_up_for(seed: int) -> None:
    """Where prompts part at the ends of turns, whole turns are used, and inserted one by one."""
    both = Both(refresh_rest=False)
    rng, answers = np.random.default_rng(seed), []
    for _ in range(OPERATIONS):
        tokens = by_turns(rng)
        turns = range(2 * P, len(tokens) + 1, 2 * P)
        if rng.integers(3):
            answers += [both.insert(tokens[:end]) for end in turns]
        else:
            answers.append(both.evict(int(rng.integers(1, 9))))
        answers.append(both.hit(tokens))
    assert all(ours == theirs for ours, theirs in answers)


def test_controls_differ() -> None:
    """Another order of eviction, and the one difference not made up for, each show in most sequences."""
    assert sum(differences(Both(FirstIn()), anywhere, seed) > 0 for seed in range(10)) >= 8
    assert sum(differences(Both(refresh_rest=False), anywhere, seed) > 0 for seed in range(10)) >= 5
