"""Controls of `test_tiers`: faults put into the implementation, each found within `ENOUGH` examples.

Some are harmless by design, which was tried for all but the rows of a tail page, and so are no controls:

- The loader does not compare labels: each store of ours has done so. The fault here takes both away.
- Rows behind the last token of a tail page: no query reads them, and they are written before they count.
- Leases of pages are not checked: pages are written by the thread that leased them, before it does anything
  else. The check is for callers who write later.
- Leases of host memory are not heeded: what is then torn differs from its checksum, which is a miss.
- Pins are not heeded: that costs a hit and no bit. See `test_mover` and `test_public_failures_tiers`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from test_prefix_cache import ENOUGH, P, namespace, play
from test_tiers import TierMachine, step

from goldenkv.engine import offload
from goldenkv.engine.fetch import Fetch
from goldenkv.engine.offload import Name, Offload
from goldenkv.engine.sequences import Sequences
from goldenkv.prefix import PageKeys, Public, PublicDomains
from goldenkv.state.moving import GatheredPages
from goldenkv.tiers import transfer
from goldenkv.tiers.epochs import Epochs
from goldenkv.tiers.errors import Late, StoreError
from goldenkv.tiers.faults import Fail, Flip
from goldenkv.tiers.loader import Loaded, Loader
from goldenkv.tiers.mover import Mover
from goldenkv.tiers.objects import Item, Label
from goldenkv.tiers.residents import Residents
from goldenkv.tiers.saver import Saver
from goldenkv.tiers.shelf import Write
from goldenkv.tiers.staging import Staging
from goldenkv.tiers.store import VerifiedStore


@pytest.fixture(autouse=True)
def _stepped(monkeypatch: pytest.MonkeyPatch) -> None:
    step(monkeypatch)


def gathers_late(self: Sequences, pages: Any) -> Any:
    """In place of a copy made now: the pages as they are when the copy runs."""

    class Late:
        def rows(late, index: int) -> Any:
            return GatheredPages(self.config, self._pool, [list(pages)[index]]).rows(0)

    return Late()


def passes_over_gaps(real: Callable[..., Any]) -> Callable[..., Any]:
    """Of what is missing the next page is used that is there."""

    def find(self: Fetch) -> tuple[int, list[int]]:
        last = self._length // self._size
        pages = [self._page(i) for i in range(self._held, last)]
        there = [name for name, has in zip(pages, self._ask(pages), strict=True) if has]
        states = real(self)[1]
        ends = {name.key: (self._held + i + 1) * P for i, name in enumerate(there)}
        bring = self._bring
        self._page = lambda index: there[index - self._held]
        self._bring = lambda names: [replace(n, position=ends.get(n.key, n.position)) for n in bring(names)]
        return self._held + len(there), states

    return find


def of_another_position(real: Callable[..., None]) -> Callable[..., None]:
    """Boundary states are saved under each other's names."""

    def published(self: Offload, pages: Any, boundaries: dict[int, Name]) -> None:
        ends = [handle for handle, name in boundaries.items() if name.position % P == 0]
        names = [boundaries[handle] for handle in ends]
        real(self, pages, boundaries | dict(zip(ends, reversed(names), strict=True)))

    return published


def counts_what_is_loaded(real: Callable[..., list[Name]]) -> Callable[..., list[Name]]:
    def bring(self: Fetch, names: list[Name]) -> list[Name]:
        failed = real(self, names)
        self._mover.metrics.source("host", P * (len(names) - len(failed)))
        return failed

    return bring


def takes_what_is_late(real: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    """What has not come by its deadline is used as it is."""

    def load(self: Loader, labels: list[Label], deadline: float | None = None) -> list[Any]:
        found = real(self, labels, deadline)
        return [
            Loaded(Item(label, empty(self._staging.take(label.nbytes))), "host")
            if isinstance(each, Late)
            else each
            for label, each in zip(labels, found, strict=True)
        ]

    return load


def empty(buffer: np.ndarray) -> np.ndarray:
    buffer[...] = 255
    return buffer


def passes_over_components(real: Callable[..., None]) -> Callable[..., None]:
    def copy(*args: Any) -> None:
        with suppress(StoreError):
            real(*args)

    return copy


def always_done(self: Saver) -> None:
    for address, (future, _, done) in list(self._saving.items()):
        if future.done():
            del self._saving[address]
            done(True)


def store_believes_all(patch: pytest.MonkeyPatch) -> None:
    never = property(lambda self: False, lambda self, value: None)
    patch.setattr(VerifiedStore, "verify", never, raising=False)


def any_label(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(VerifiedStore, "_check", lambda self, head, address: None)
    patch.setattr(Label, "__eq__", lambda self, other: True)


def without_namespace(patch: pytest.MonkeyPatch) -> None:
    real, same = PageKeys.__init__, namespace(Public("docs", PublicDomains(frozenset({"docs"}))))
    patch.setattr(offload, "_scope", lambda each: (bytes(32), bytes(32)))
    patch.setattr(PageKeys, "__init__", lambda self, each, tokens=(): real(self, same, tokens))


Mutant = Callable[[pytest.MonkeyPatch], None]
FAULTS: dict[str, tuple[Mutant, str]] = {
    "a store verifies nothing": (store_believes_all, "than cold|another object"),
    "what comes up is not verified": (lambda p: p.setattr(Item, "check", lambda self: None), "than cold"),
    "no label is compared": (any_label, "than cold|another"),
    "late writes are not refused": (
        lambda p: p.setattr(Epochs, "of", lambda self, address: (0, 0)),
        "a tier has what was forgotten",
    ),
    "no namespace in keys and addresses": (
        without_namespace,
        "nobody of this|nobody published",
    ),
    "a page is read when its copy runs": (
        lambda p: p.setattr(Sequences, "gather_pages", gathers_late),
        "than cold",
    ),
    "a gap is passed over": (
        lambda p: p.setattr(Fetch, "_find", passes_over_gaps(Fetch._find)),
        "than cold",
    ),
    "a state of another position": (
        lambda p: p.setattr(Offload, "published", of_another_position(Offload.published)),
        "than cold",
    ),
    "loaded is counted as used": (
        lambda p: p.setattr(Fetch, "_bring", counts_what_is_loaded(Fetch._bring)),
        "tokens that are reused",
    ),
    "late is as good as in time": (
        lambda p: p.setattr(Loader, "load", takes_what_is_late(Loader.load)),
        "than cold",
    ),
    "a component that fails is passed over": (
        lambda p: p.setattr(transfer, "_copy", passes_over_components(transfer._copy)),
        "than cold",
    ),
    "completed is as good as succeeded": (
        lambda p: p.setattr(Saver, "poll", always_done),
        "on no tier",
    ),
    "memory is given back while it is copied": (
        lambda p: p.setattr(Staging, "share", lambda self, buffer: None),
        "given back twice|given to two",
    ),
    "pins stay": (
        lambda p: p.setattr(Residents, "unpin", lambda self, address: None),
        "pinned for ever",
    ),
    "what has left keeps its name": (
        lambda p: p.setattr(Offload, "leaving", lambda self, pages, boundaries, *, keep: None),
        "with names|saved",
    ),
    "forgotten on the device alone": (
        lambda p: p.setattr(Mover, "forget", lambda *_: 0),
        "nobody of this namespace|a tier has what was forgotten|objects remain",
    ),
}


class Focused(TierMachine):
    """Whole requests of one process, and what befalls the stores."""

    come = fork = cancel = evict = another_process = wait = None

    def run(self, number: int, count: int) -> None:
        super().run(number, count)

    def decode(self, number: int, fresh: list[int]) -> None:
        super().decode(number, fresh)

    def finish(self, number: int) -> None:
        super().finish(number)


FOCUS: dict[str, dict[str, Any]] = {
    "a store verifies nothing": dict(troubles=["damage"]),
    "what comes up is not verified": dict(troubles=[Flip(bit=300)]),
    "no label is compared": dict(troubles=["swap"]),
    "late writes are not refused": dict(
        fixed=dict(upper=Write.THROUGH, paused=True, in_flight=1 << 20),
        troubles=["a component"],
        delay=None,
        meanwhile=None,
    ),
    "late is as good as in time": dict(troubles=["late"]),
    "a gap is passed over": dict(troubles=["damage"]),
    "memory is given back while it is copied": dict(
        fixed=dict(upper=Write.BACK, promote=True, room=96 << 10)
    ),
    "a component that fails is passed over": dict(troubles=["a component"]),
    "completed is as good as succeeded": dict(troubles=["down", Fail("put")], fixed=dict(ttl=None)),
}
"""Where a fault shows soonest."""


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    put, expected = FAULTS[fault]
    put(monkeypatch)
    machine = type("Machine", (Focused,), FOCUS[fault]) if fault in FOCUS else TierMachine
    with pytest.raises(AssertionError, match=expected):
        play(machine, max_examples=ENOUGH, report_multiple_bugs=False)
