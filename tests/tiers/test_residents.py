"""What a tier holds, and in which order it leaves: against a model that sorts everything each time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import Phase, find, given, settings
from hypothesis import strategies as st

from goldenkv.prefix import LRU, Composite, SelectionDriven, Strategy, Victim
from goldenkv.tiers.objects import Address
from goldenkv.tiers.residents import Residents

OWNER, SPACE = b"o" * 32, b"n" * 32


def at(number: int, owner: bytes = OWNER, namespace: bytes = SPACE) -> Address:
    return Address(owner, namespace, number.to_bytes(32, "little"))


def filled(count: int, strategy: Strategy | None = None, nbytes: int = 10) -> Residents:
    residents = Residents(strategy)
    for i in range(count):
        residents.add(at(i), nbytes, page=i)
    return residents


EVERYTHING = 1 << 40


def order(residents: Residents) -> list[int]:
    """In which order all would leave; they stay."""
    chosen = residents.victims(EVERYTHING)
    residents.stay(chosen)
    return [int.from_bytes(address.key, "little") for address in chosen]


# One thing each ---------------------------------------------------------------------------------------------


def test_least_recently_used_first() -> None:
    residents = filled(5)
    residents.use(at(1))
    residents.add(at(0), 10)  # it came again
    residents.use(at(9))  # unknown
    assert order(residents) == [2, 3, 4, 1, 0]
    assert order(residents) == [2, 3, 4, 1, 0]  # as those that stay are where they were
    residents.remove(at(3))
    residents.remove(at(3))
    assert order(residents) == [2, 4, 1, 0]
    assert at(3) not in residents and at(4) in residents and len(residents) == 4


def test_nothing_and_nobody() -> None:
    assert Residents().victims(1) == Residents().victims(0) == []
    residents = filled(3)
    assert residents.victims(0) == residents.victims(-5) == []
    assert order(residents) == [0, 1, 2]


@pytest.mark.parametrize(
    "nbytes, count", [(1, 1), (9, 1), (10, 1), (11, 2), (20, 2), (21, 3), (29, 3), (99, 3)]
)
def test_no_more_than_is_needed(nbytes: int, count: int) -> None:
    assert filled(3).victims(nbytes) == [at(i) for i in range(count)]


def test_sinks_leave_last_but_leave() -> None:
    residents = Residents(LRU(sinks=1))
    residents.add(at(0), 10, page=0)
    residents.add(at(1), 10, page=0, boundary=True)  # of the first page, but no sink
    residents.add(at(2), 10, page=1)
    assert order(residents) == [1, 2, 0]


def test_what_is_exempt_goes_last_but_goes() -> None:
    """The last two ticks are exempt: what was used or came then goes after all others, in its order."""
    residents = filled(4, LRU(recent=2))
    residents.use(at(0))
    assert order(residents) == [1, 2, 3, 0]
    residents.use(at(2))
    assert order(residents) == [1, 3, 0, 2]
    assert residents.victims(10) == [at(1)] and residents.victims(20) == [at(3), at(0)]


def test_a_pinned_object_stays_until_the_last_pin_ends() -> None:
    residents = Residents()
    residents.pin(at(0))  # before it is there
    for i in range(3):
        residents.add(at(i), 10)
    residents.pin(at(0))
    assert residents.victims(10) == [at(1)]
    residents.unpin(at(0))
    assert residents.victims(EVERYTHING) == [at(2)]
    residents.unpin(at(0))
    assert residents.victims(EVERYTHING) == [at(0)]
    with pytest.raises(AssertionError, match="more often than pinned"):
        residents.unpin(at(0))


def test_a_score_that_rose_is_looked_at_again() -> None:
    """With hits weighed, an object that came first leaves after one that came long behind it."""
    residents = filled(4, Composite(hit_ticks=100))
    residents.use(at(0))
    residents.use(at(1))
    residents.use(at(1))
    assert order(residents) == [2, 3, 0, 1]


def test_selected_pages_stay() -> None:
    """The strategy is told the numbers under which objects came."""
    strategy = SelectionDriven()
    residents = filled(3, strategy)
    strategy.selected([1, 2], now=50)  # the first two
    assert order(residents) == [2, 0, 1]


def test_all_of_an_owner_or_namespace_is_forgotten() -> None:
    other, space = b"p" * 32, b"m" * 32
    residents = Residents()
    for address in (at(0), at(1, namespace=space), at(2, other), at(3, other, space)):
        residents.add(address, 10)
    residents.forget(other, space)
    assert order(residents) == [0, 1, 2]
    residents.forget(OWNER, None)
    assert order(residents) == [2]


def test_the_queue_does_not_grow_with_time() -> None:
    """Objects come again and again, and nothing ever has to leave."""
    residents = filled(3)
    for _ in range(1000):
        residents.add(at(1), 10)
    assert len(residents._queue) <= 100
    assert order(residents) == [0, 2, 1]


def test_one_that_stays_is_there_once() -> None:
    """It was chosen, came again meanwhile, and did not leave: it does not count twice."""
    residents = filled(2)
    chosen = residents.victims(10)
    residents.add(at(0), 10)
    residents.stay(chosen)
    assert residents.victims(EVERYTHING) == [at(1), at(0)]


# Any operations against a model -----------------------------------------------------------------------------


class Model:
    """The same, by sorting: what is known of an object, in the order in which it came."""

    def __init__(self, strategy: Strategy) -> None:
        self.strategy, self.now, self.came = strategy, 0, 0
        self.known: dict[Address, tuple[int, Victim]] = {}
        self.pins: Counter[Address] = Counter()

    def add(self, address: Address, nbytes: int, page: int, boundary: bool) -> None:
        self.now += 1
        self.came += 1
        self.known[address] = nbytes, Victim(self.came, page, boundary, self.now, 0, 1)

    def use(self, address: Address) -> None:
        if address in self.known:
            self.now += 1
            nbytes, victim = self.known[address]
            self.known[address] = nbytes, victim._replace(last_use=self.now, hits=victim.hits + 1)

    def victims(self, nbytes: int) -> list[Address]:
        free = [(address, *found) for address, found in self.known.items() if not self.pins[address]]
        free.sort(
            key=lambda each: (
                self.strategy.exempt(each[2], self.now),
                self.strategy.score(each[2]),
                each[2].page,
            )
        )
        chosen: list[Address] = []
        for address, size, _ in free:
            if nbytes <= 0:
                break
            chosen.append(address)
            nbytes -= size
        return chosen


Step = tuple[str, int, int, int]
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["add", "add", "use", "use", "remove", "pin", "unpin", "take", "look"]),
        st.integers(0, 5),
        st.sampled_from([0, 1, 10, 25, 1000]),
        st.integers(0, 2),
    ),
    max_size=40,
)
STRATEGIES: dict[str, Callable[[], Strategy]] = {
    "plain": Strategy,
    "sinks and recent": lambda: LRU(sinks=1, recent=3),
    "composite": lambda: Composite(5, 5),
}


def first_difference(residents: Residents, steps: list[Step]) -> tuple[int, Any, Any] | None:
    """The first step at which other objects would leave than by the model."""
    model = Model(residents.strategy)
    for number, (what, key, nbytes, page) in enumerate(steps):
        address = at(key)
        if what == "add":
            residents.add(address, nbytes, page, boundary=key == 5)
            model.add(address, nbytes, page, boundary=key == 5)
        elif what == "use":
            residents.use(address)
            model.use(address)
        elif what == "remove":
            residents.remove(address)
            model.known.pop(address, None)
        elif what == "pin":
            residents.pin(address)
            model.pins[address] += 1
        elif what == "unpin" and model.pins[address]:
            residents.unpin(address)
            model.pins[address] -= 1
        elif what in ("take", "look"):
            found, expected = residents.victims(nbytes), model.victims(nbytes)
            if found != expected:
                return number, found, expected
            if what == "look":
                residents.stay(found)
            else:
                for chosen in found:
                    residents.remove(chosen)
                    del model.known[chosen]
        if {a for a in map(at, range(6)) if a in residents} != model.known.keys():
            return number, residents._known, model.known
    return None


@pytest.mark.parametrize("strategy", STRATEGIES)
@given(steps=STEPS)
def test_as_the_model(strategy: str, steps: list[Step]) -> None:
    assert first_difference(Residents(STRATEGIES[strategy]()), steps) is None


class ForgetsPins(Residents):
    def victims(self, nbytes: int) -> list[Address]:
        self._pins.clear()
        return super().victims(nbytes)

    def unpin(self, address: Address) -> None: ...


class FirstInFirstOut(Residents):
    def use(self, address: Address) -> None: ...


class OneTooMany(Residents):
    def victims(self, nbytes: int) -> list[Address]:
        return super().victims(nbytes + 1)


class LosesThoseThatStay(Residents):
    def stay(self, addresses: Any) -> None: ...


class ForgetsExemption(Residents):
    def victims(self, nbytes: int) -> list[Address]:
        recent, self.strategy.recent = self.strategy.recent, 0
        chosen = super().victims(nbytes)
        self.strategy.recent = recent
        return chosen


class KeepsTheGone(Residents):
    def remove(self, address: Address) -> None: ...


@pytest.mark.parametrize(
    "fault", [ForgetsPins, FirstInFirstOut, OneTooMany, LosesThoseThatStay, ForgetsExemption, KeepsTheGone]
)
def test_the_model_finds_faults(fault: type[Residents]) -> None:
    quick = settings(phases=[Phase.generate], max_examples=2000, database=None)
    make = STRATEGIES["sinks and recent"]
    find(STEPS, lambda steps: first_difference(fault(make()), steps) is not None, settings=quick)
