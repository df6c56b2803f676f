"""Eviction strategies and prefetch: each by the smallest case where it departs from plain LRU."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest

from goldenkv.prefix import (
    LRU,
    Composite,
    FadingSelection,
    RadixTree,
    SelectionDriven,
    SpeculativePrefetch,
    Strategy,
    StrategyError,
    Victim,
)
from goldenkv.prefix.tree.order import EvictionOrder

NS = b"namespace"


def tokens(*pages: int) -> np.ndarray:
    return np.repeat(np.array(pages, np.int32), 2)


def tree_of(strategy: Strategy, *sequences: tuple[int, ...]) -> RadixTree:
    """Pages are named by their content, which must not repeat; time counts from 1."""
    tree = RadixTree(2, strategy)
    for pages in sequences:
        tree.insert(NS, tokens(*pages), pages)
    return tree


def use(tree: RadixTree, *pages: int) -> None:
    tree.touch(tree.match(NS, tokens(*pages)), 2 * len(pages))


def order(tree: RadixTree) -> list[int]:
    tree.check()
    return tree.evict(pages=100).pages


def victim(**what: int) -> Victim:
    return Victim(
        **{"page": 0, "number": 0, "boundary": False, "last_use": 1, "hits": 0, "references": 1} | what
    )


# LRU ------------------------------------------------------------------------------------------------------


def test_sinks_stay_longer() -> None:
    """First pages go after all others, the least recently used first; plain LRU takes them in turn."""
    sequences = ((1, 2), (3, 4), (5, 6))
    assert order(tree_of(LRU(), *sequences)) == [2, 1, 4, 3, 6, 5]
    assert order(tree_of(LRU(sinks=1), *sequences)) == [2, 4, 6, 1, 3, 5]
    assert order(tree_of(LRU(sinks=2), *sequences)) == order(tree_of(Strategy(), *sequences))


def test_the_recent_window_goes_last() -> None:
    """What the last two uses took stays longer than sinks; without the window only sinks would."""
    sequences = ((1, 2), (3, 4), (5, 6))
    assert order(tree_of(LRU(sinks=1, recent=2), *sequences)) == [2, 1, 4, 6, 3, 5]
    tree = tree_of(LRU(sinks=1, recent=1), *sequences)
    use(tree, 1, 2)
    assert order(tree) == [4, 6, 3, 5, 2, 1]


def test_exemption_does_not_lock_up() -> None:
    tree = tree_of(LRU(sinks=9, recent=99), (1, 2), (3,))
    assert len(tree.evict(pages=1).pages) == 1
    assert len(order(tree)) == 2


def test_what_was_spared_is_found_again() -> None:
    tree = tree_of(LRU(recent=2), (1,), (2,), (3,))
    assert tree.evict(pages=1).pages == [1]
    use(tree, 2)
    assert order(tree) == [3, 2]


# Selection ------------------------------------------------------------------------------------------------


def test_pages_not_selected_lately_go_first() -> None:
    """The oldest pages are those that attention still selects: LRU drops them, this does not."""
    for strategy, expected in ((SelectionDriven(), [3, 4, 1, 2]), (LRU(), [1, 2, 3, 4])):
        tree = tree_of(strategy, (1,), (2,), (3,), (4,))
        strategy.selected(np.array([1, 2, -1]), 10)
        strategy.selected(np.array([2]), 11)
        assert order(tree) == expected


def test_a_page_that_is_selected_holds_those_before_it() -> None:
    """Only the end of a path can leave; within one node each page has its own score."""
    strategy = SelectionDriven()
    tree = tree_of(strategy, (1, 2, 3, 4), (5,))
    strategy.selected(np.array([2]), 10)
    assert order(tree) == [4, 3, 5, 2, 1]


def test_an_id_that_names_another_page_starts_anew() -> None:
    strategy = SelectionDriven()
    tree = tree_of(strategy, (1,), (2,))
    strategy.selected(np.array([1]), 50)
    tree.evict(pages=2)
    tree.insert(NS, tokens(8), [1])
    assert strategy.last_selected(1) == 3


# Composite ------------------------------------------------------------------------------------------------


def test_hits_and_sharing_count_as_later_uses() -> None:
    """Pages 1 and 3 are the oldest; 1 was hit three times, 3 was inserted by four sequences."""

    def build(strategy: Strategy) -> RadixTree:
        tree = tree_of(strategy, (1,), *[(3,)] * 4, (5,), (7,))
        for _ in range(3):
            use(tree, 1)
        for page in (3, 5, 7):
            use(tree, page)
        return tree

    assert order(build(Composite(0, 0))) == [1, 3, 5, 7]
    assert order(build(Composite(10, 0))) == [3, 5, 7, 1]
    assert order(build(Composite(0, 10))) == [1, 5, 7, 3]
    assert Composite(10, 5).score(victim(last_use=7, hits=3, references=4)) == (7 + 10 * 2 + 5 * 2,)


def test_fame_fades() -> None:
    """A page hit 1,023 times is worth 10 doublings; behind by more than that it goes all the same."""
    strategy = Composite(hit_ticks=4, reference_ticks=0)
    famous = victim(hits=1023, last_use=100)
    assert strategy.score(famous) > strategy.score(victim(last_use=139))
    assert strategy.score(famous) < strategy.score(victim(last_use=141))


# What all of them promise ---------------------------------------------------------------------------------


ALL = [
    Strategy,
    LRU,
    lambda: LRU(1, 1),
    SelectionDriven,
    lambda: FadingSelection(4),
    Composite,
    SpeculativePrefetch,
]


@pytest.mark.parametrize("make", ALL)
def test_scores_rise_with_use(make: Callable[[], Strategy]) -> None:
    """What the lazy order of eviction rests on."""
    strategy = make()
    for boundary in (False, True):
        scores = [
            strategy.score(victim(last_use=n, hits=n, references=n, boundary=boundary)) for n in range(1, 9)
        ]
        assert scores == sorted(scores) and len({*scores}) == len(scores)


@pytest.mark.parametrize("make", ALL)
def test_everything_can_leave(make: Callable[[], Strategy]) -> None:
    tree = tree_of(make(), (1, 2, 3), (4, 5), (6,))
    tree.insert(NS, tokens(1, 2, 3), (1, 2, 3), {2: 0, 6: 1})
    freed = tree.evict(pages=6)
    assert sorted(freed.pages) == [1, 2, 3, 4, 5, 6] and sorted(freed.boundaries) == [0, 1]


def test_strategies_are_told() -> None:
    """Page ids and times of inserts, uses and frees, as they happen."""
    heard: list[tuple] = []

    class Listener(Strategy):
        def inserted(self, pages: np.ndarray, now: int) -> None:
            heard.append(("inserted", pages.tolist(), now))

        def used(self, pages: np.ndarray, now: int) -> None:
            heard.append(("used", pages.tolist(), now))

        def freed(self, pages: list[int]) -> None:
            heard.append(("freed", list(pages)))

    clock = itertools.count(100, 100)
    tree = RadixTree(2, Listener(), lambda: next(clock))
    tree.insert(NS, tokens(1, 2), (1, 2))
    tree.insert(NS, tokens(1, 2, 3), (1, 2, 3))
    use(tree, 1, 2)
    tree.evict(pages=1)
    assert heard == [
        ("inserted", [1, 2], 100),
        ("inserted", [3], 200),
        ("used", [1, 2], 300),
        ("freed", [3]),
    ]


def test_the_order_is_that_of_a_sort() -> None:
    """Scores that rise at random while things wait, against sorting anew each time.

    The control never looks at a score again.
    """

    class Thing:
        def __init__(self, score: int) -> None:
            self.score, self.queued = score, 0

    def drained(look_again: bool) -> tuple[list[int], list[int]]:
        rng = np.random.default_rng(0)
        things = [Thing(int(score)) for score in rng.permutation(50)]
        first = {id(thing): thing.score for thing in things}
        order: EvictionOrder[Thing] = EvictionOrder(
            lambda t: (t.score if look_again else first[id(t)],), lambda t: True, lambda t: False
        )
        for thing in things:
            order.push(thing)
        out, expected = [], []
        for thing in order.drain():
            expected.append(min(t.score for t in [thing, *things] if t.queued or t is thing))
            out.append(thing.score)
            for other in rng.choice(things, 5):
                other.score += int(rng.integers(0, 30)) if other.queued else 0
        return out, expected

    out, expected = drained(look_again=True)
    assert out == expected and len(out) == 50
    out, expected = drained(look_again=False)
    assert out != expected


# Prefetch -------------------------------------------------------------------------------------------------


def test_prompt_structure() -> None:
    """With nothing seen yet: the first page, where parts begin, the last; then in order of the prompt."""
    prefetch, prompt = SpeculativePrefetch(), list("abcdefgh")
    assert prefetch.propose(prompt, prompt, 4, starts=[3]) == ["a", "d", "h", "b"]
    assert SpeculativePrefetch(structure=0).propose(prompt, prompt, 4, starts=[3]) == ["a", "b", "c", "d"]


def test_selection_history() -> None:
    """Pages selected in more of the recent steps first; an old favourite falls behind."""
    prefetch, prompt = SpeculativePrefetch(structure=0, correlation=0, half_life=2), list("abcd")
    for now in range(10):
        prefetch.observe([["b"]], now)
    prefetch.observe([["b", "c"]], 10)
    assert prefetch.propose(prompt, prompt, 2, now=10) == ["b", "c"]
    for now in range(11, 20):
        prefetch.observe([["c"]], now)
    assert prefetch.propose(prompt, prompt, 2, now=20) == ["c", "b"]
    assert prefetch.value("c", 1, 4, (), 20) > 0.9 > 0.2 > prefetch.value("b", 1, 4, (), 20) > 0


def test_batch_correlation() -> None:
    """c was selected together with a, d with b. While the batch selects a, c comes first; with b, d.

    Two requests of one step that select different pages do not correlate them.
    """
    prefetch, prompt = SpeculativePrefetch(structure=0, history=0), list("cd")
    for now in range(5):
        prefetch.observe([["a", "c"], ["b", "d"]], now)
    prefetch.observe([["a"]], 5)
    assert prefetch.propose(prompt, prompt, 1) == ["c"]
    assert prefetch.value("c", 0, 2, (), 5) == 5 / 6 and prefetch.value("d", 1, 2, (), 5) == 0
    prefetch.observe([["b"]], 6)
    assert prefetch.propose(prompt, prompt, 1) == ["d"]
    none = SpeculativePrefetch(structure=0, history=0, correlation=0)
    for _ in range(2):
        none.observe([["b", "d"]], 0)
    assert none.propose(prompt, prompt, 1) == ["c"]


def test_only_what_is_missing_and_only_so_much() -> None:
    prefetch, prompt = SpeculativePrefetch(), ["a", "b", "c"]
    assert prefetch.propose(prompt, ["c", "b", "elsewhere"], 9) == ["c", "b"]
    assert prefetch.propose(prompt, prompt, 0) == []
    with pytest.raises(StrategyError):
        prefetch.propose(prompt, prompt, -1)


def test_prefetch_forgets() -> None:
    """Memory is bounded in pages and in partners, however much goes by."""
    prefetch = SpeculativePrefetch(names=10, partners=3)
    rng = np.random.default_rng(0)
    for now in range(300):
        prefetch.observe([rng.integers(0, 1000, 20).tolist(), [1, 2]], now)
    assert len(prefetch._seen) == 10
    assert max(len(seen.partners) for seen in prefetch._seen.values()) <= 3
    assert prefetch.value(1, 5, 9, (), 299) > 1  # what is always there is still known


def test_fading_between_last_use_and_frequency() -> None:
    def order(strategy: Strategy) -> list[int]:
        strategy.inserted(np.array([0, 1]), 1)
        for now in range(2, 6):
            strategy.selected(np.array([0, -1]), now)
        strategy.selected(np.array([1]), 6)
        return sorted((0, 1), key=lambda page: strategy.score(Victim(page, page, False, 1, 0, 1)))

    assert order(SelectionDriven()) == order(FadingSelection(0.25)) == [0, 1]
    assert order(FadingSelection(100)) == [1, 0]
    strategy = FadingSelection(8)
    scores = []
    for now in range(1, 3000, 300):  # far beyond the range of 2 ** (now / half_life)
        strategy.selected(np.array([3]), now)
        scores.append(strategy.score(Victim(3, 0, False, 0, 0, 1)))
    assert scores == sorted(scores) and np.isfinite(scores).all()
    strategy.freed([3])
    assert strategy.score(Victim(3, 0, False, 7, 0, 1)) == (-np.inf, 7)
    assert strategy.score(Victim(3, 0, True, 7, 0, 1)) == (7,)


@pytest.mark.parametrize(
    "make",
    [
        lambda: FadingSelection(0),
        lambda: LRU(sinks=-1),
        lambda: LRU(recent=-1),
        lambda: Composite(hit_ticks=-1),
        lambda: Composite(reference_ticks=float("inf")),
        lambda: Composite(hit_ticks=float("nan")),
        lambda: SelectionDriven().selected(np.array([0.5]), 1),
        lambda: SpeculativePrefetch(history=-1),
        lambda: SpeculativePrefetch(half_life=0),
        lambda: SpeculativePrefetch(names=0),
    ],
)
def test_parameters_that_cannot_be(make: Callable[[], object]) -> None:
    with pytest.raises(StrategyError):
        make()
