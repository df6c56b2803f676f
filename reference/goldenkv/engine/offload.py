"""From a prefix cache down to the tiers: which objects its pages and boundary states are.

What is published, or what leaves the device, is gathered on the device at once and copied by the mover. So it
leaves with the bytes that it had then, and nothing has to wait.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from ..config import ModelConfig, Numerics
from ..prefix import Namespace
from ..state import Rows, cells
from ..state.moving import paged_shape
from ..state.pool import PAGES_A_CALL
from ..tiers.mover import Mover
from ..tiers.objects import Address, Kind, Label, Tensor
from ..tiers.saver import Source
from ..tiers.transfer import Copy, pack
from .sequences import Sequences


@dataclass(frozen=True, slots=True)
class Name:
    """What an object holds: a key under a namespace, and the tokens at its end."""

    namespace: Namespace
    key: bytes
    kind: Kind
    position: int


class Offload:
    """What one engine's cache holds, by the names under which tiers have it.

    Args:
        engine: whose pages and boundary states they are.
        mover: to the tiers.
        copy: copies components between rows and objects.
    """

    def __init__(self, engine: Sequences, mover: Mover, copy: Copy | None = None) -> None:
        self.engine, self.mover, self.copy = engine, mover, copy
        self._pages: dict[int, Name] = {}
        self._boundaries: dict[int, Name] = {}
        self._held: set[Address] = set()  # on the device
        self._saved: set[Address] = set()  # of those, what a tier has

    # Names ---------------------------------------------------------------------------------------------

    def label(self, name: Name) -> Label:
        """How its object must be labelled."""
        size = self.engine.geometry.page_size
        position = size if name.kind is Kind.PAGE else name.position  # whole pages are alike
        tensors = _tensors(self.engine.config, self.engine.numerics, name.kind, position, size)
        return Label(self.address(name), name.kind, name.position, name.namespace.layout, tensors)

    @staticmethod
    def address(name: Name) -> Address:
        """Where its object is."""
        return Address(*_scope(name.namespace), name.key)

    # Down ----------------------------------------------------------------------------------------------

    def published(self, pages: Mapping[int, Name], boundaries: Mapping[int, Name]) -> None:
        """The cache holds these pages and handles now. They are written through, if a tier is."""
        self._pages |= pages
        self._boundaries |= boundaries
        self._held |= {self.address(name) for name in [*pages.values(), *boundaries.values()]}
        if self.mover.down.writes_through:
            self._save(pages, boundaries, leaving=False)

    def leaving(self, pages: Iterable[int], boundaries: Iterable[int], *, keep: bool) -> None:
        """They leave the device. Called before anybody else can get them.

        Args:
            pages, boundaries: page numbers and handles.
            keep: False where nobody wants them any more.
        """
        gone = {page: self._pages.pop(page) for page in pages}
        gone_boundaries = {handle: self._boundaries.pop(handle) for handle in boundaries}
        if keep:
            self._save(gone, gone_boundaries, leaving=True)
        addresses = {self.address(name) for name in [*gone.values(), *gone_boundaries.values()]}
        self._held -= addresses
        self._saved -= addresses

    def flush(self) -> None:
        """Copies down all that is on the device and on no tier, and waits for it.

        Tiers are asked, as they can have lost what they once took. What is gathered for it takes memory of
        the device, so it goes in batches.
        """
        self.poll()  # what it tells is of the past too
        self._saved.clear()
        for pages in _batches(self._pages):
            self._save(pages, {}, leaving=True, must=True)
        for boundaries in _batches(self._boundaries):
            self._save({}, boundaries, leaving=True, must=True)
        self.mover.drain()

    def poll(self) -> None:
        """Learns what has become of what was sent, and what tiers have lost."""
        self._saved -= set(self.mover.poll())

    def came_up(self, names: Iterable[Name]) -> None:
        """These were loaded from a tier: it need not get them again."""
        self._saved |= {self.address(name) for name in names}

    def _save(
        self,
        pages: Mapping[int, Name],
        boundaries: Mapping[int, Name],
        *,
        leaving: bool,
        must: bool = False,
    ) -> None:
        """In the order of positions: if not all of it arrives, what does arrive is of use."""
        self.poll()
        unsaved = {page: name for page, name in pages.items() if self.address(name) not in self._saved}
        gathered = self.engine.gather_pages(list(unsaved))
        ways: list[tuple[Name, Callable[[], Rows]]] = [
            (name, functools.partial(gathered.rows, i)) for i, name in enumerate(unsaved.values())
        ]
        for handle, name in boundaries.items():
            if self.address(name) not in self._saved:
                ways.append((name, self.engine.gather_boundary(handle).rows))
        for name, rows in sorted(ways, key=lambda way: way[0].position):
            self._send(name, rows, leaving, must)

    def _send(self, name: Name, rows: Callable[[], Rows], leaving: bool, must: bool) -> None:
        label = self.label(name)

        def done(ok: bool) -> None:
            if ok and label.address in self._held:
                self._saved.add(label.address)

        source = Source(label, lambda: pack(label, rows(), self.copy))
        self.mover.down.save(source, done, leaving=leaving, must=must)


def _batches(held: Mapping[int, Name]) -> Iterator[dict[int, Name]]:
    """As many at once as one call gathers, in the order of positions."""
    ordered = sorted(held.items(), key=lambda each: each[1].position)
    for begin in range(0, len(ordered), PAGES_A_CALL):
        yield dict(ordered[begin : begin + PAGES_A_CALL])


@functools.lru_cache(maxsize=4096)
def _tensors(
    config: ModelConfig, numerics: Numerics, kind: Kind, position: int, page_size: int
) -> tuple[Tensor, ...]:
    """The rows that an object has: those of paged components, or those of the others."""
    found = []
    for cell in cells(config):
        if cell.component.paged is (kind is Kind.BOUNDARY):
            continue
        start = (position - 1) // page_size * page_size
        shape = (
            paged_shape(config, cell, page_size, start, position)
            if cell.component.paged
            else cell.shape(config, position)
        )
        found.append(Tensor(cell.name, cell.component.dtype(numerics), shape))
    return tuple(found)


@functools.lru_cache(maxsize=4096)
def _scope(namespace: Namespace) -> tuple[bytes, bytes]:
    """Owner and digest."""
    return namespace.owner(), namespace.digest()
