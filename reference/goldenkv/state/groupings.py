"""How an engine groups state into pools of pages: a description over the component table.

A pool covers so many tokens a page; a hit needs all of its pages, or only those that hold the state at the
end of the prefix. A page of a pool holds one part for every layer that has its components. Nothing here moves
a byte: `paged_state` does.

Every component of every layer kind is in exactly one pool, or said not to be kept. `Grouping` refuses all
else, so that a new row of the component table needs a place here.
"""

from __future__ import annotations

import enum
import functools
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from ..config import LayerKind, ModelConfig
from .components import COMPONENTS, Cell, Component, Width, cells
from .layouts import PageLayout, page_layout


class GroupingError(ValueError):
    """A component without a place or with two, or pages that do not fit a configuration."""


class HitPolicy(enum.Enum):
    """Which pages of a pool a hit needs; the names are SGLang's."""

    ALL_PAGES = "every page of the prefix"
    TRAILING_PAGES = "the pages that hold the state at its end"


@dataclass(frozen=True, slots=True)
class Slot:
    """What lies side by side in the rows of one page of one layer.

    Attributes:
        components: names; those that share a buffer share channels, buffers lie in the order of their first.
        form: the row format.
        alignment, run: see `PageLayout`; alignment None for what the format usually has.
    """

    components: tuple[str, ...]
    form: str
    alignment: int | None = None
    run: int = 0


@dataclass(frozen=True, slots=True)
class Pool:
    """Pages that are allocated and found together.

    Attributes:
        name: the engine's, or what it is where the engine only numbers its groups.
        tokens: that a page covers.
        policy: which of its pages a hit needs.
        slots: what a page of a layer holds.
        kinds: only layers of these kinds; None for all.
        kept_blocks: boundary rows of the last so many compression blocks of a page are kept, in a ring; 0 for
            the rows of all its tokens.
    """

    name: str
    tokens: int
    policy: HitPolicy
    slots: tuple[Slot, ...]
    kinds: frozenset[LayerKind] | None = None
    kept_blocks: int = 0

    def slots_of(self, component: Component, kind: LayerKind) -> list[Slot]:
        """The slots that hold this component in layers of that kind."""
        if self.kinds is not None and kind not in self.kinds:
            return []
        return [slot for slot in self.slots if component.name in slot.components]


@dataclass(frozen=True, slots=True)
class Place:
    """One layer's part of a page.

    Attributes:
        pool, layer: where it belongs.
        layout: of this part.
        cells: what lies in it.
        numbers: absolute row numbers (tokens or entries) that a page covers.
    """

    pool: Pool
    layer: int
    layout: PageLayout
    cells: tuple[Cell, ...]
    numbers: int


@dataclass(frozen=True, slots=True)
class Grouping:
    """The pools of an engine.

    Attributes:
        name: the engine.
        pools: its pools.
        not_kept: components that no pool keeps, and what follows from it.
    """

    name: str
    pools: tuple[Pool, ...]
    not_kept: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        absent = [name for name, _ in self.not_kept]
        for component in COMPONENTS:
            for kind in component.kinds:
                found = [pool.name for pool in self.pools for _ in pool.slots_of(component, kind)]
                found += ["not_kept"] * absent.count(component.name)
                if len(found) != 1:
                    raise GroupingError(
                        f"{self.name}: {component.name} of {kind.value} layers must be in one pool or not "
                        f"kept; it is in {' and '.join(found) or 'none'}"
                    )

    def places(self, config: ModelConfig) -> tuple[Place, ...]:
        """Every layer's part of every pool, in the order of pools, layers and slots.

        Raises:
            GroupingError: pages would not hold whole compression blocks of this configuration.
        """
        return tuple(place for pool in self.pools for place in _places(pool, config))

    def page_bytes(self, config: ModelConfig) -> dict[str, int]:
        """Bytes of a page of each pool, all layers together."""
        return {pool.name: sum(place.layout.nbytes for place in _places(pool, config)) for pool in self.pools}

    def pages(self, config: ModelConfig, length: int) -> dict[str, range]:
        """The pages of each pool that hold the state of a sequence of `length` tokens."""
        return {pool.name: _pages(pool, config, length) for pool in self.pools}

    def usable_prefix(self, config: ModelConfig, present: Mapping[str, Collection[int]], length: int) -> int:
        """The longest reusable prefix, in tokens, of a sequence of `length` tokens: a multiple of `step`.

        Every pool says how far it reaches and the least counts. A pool that needs only trailing pages may
        have none at that point, so all are asked again until they agree. One round, as in SGLang's file
        backend, is enough where all such pools are saved at the same points.

        Args:
            config: the model.
            present: for each pool the numbers of the pages that exist. A pool not named has none.
            length: of the sequence.
        """
        bound = length // self.step * self.step
        while bound:
            reached = min(
                self.pool_prefix(config, pool, present.get(pool.name, ()), bound) for pool in self.pools
            )
            if reached == bound:
                break
            bound = reached
        return bound

    def pool_prefix(self, config: ModelConfig, pool: Pool, present: Collection[int], bound: int) -> int:
        """The longest prefix of at most `bound` tokens for which this pool alone has what a hit needs."""
        exists = frozenset(present)
        leading = next(i for i in range(len(exists) + 1) if i not in exists)
        for end in range(bound // self.step * self.step, 0, -self.step):
            needed = _pages(pool, config, end)
            everything = pool.policy is HitPolicy.ALL_PAGES
            if needed.stop <= leading if everything else exists.issuperset(needed):
                return end
        return 0

    @property
    def step(self) -> int:
        """Tokens after which the pages of all pools end together: where a hit can end."""
        return math.lcm(*(pool.tokens for pool in self.pools))


@functools.lru_cache(maxsize=256)
def _places(pool: Pool, config: ModelConfig) -> tuple[Place, ...]:
    """The parts of a page of one pool."""
    held: dict[tuple[int, Slot], list[Cell]] = {}
    for cell in cells(config):
        for slot in pool.slots_of(cell.component, config.kind(cell.layer)):
            held.setdefault((cell.layer, slot), []).append(cell)
    order = sorted(held, key=lambda key: (key[0], pool.slots.index(key[1])))
    return tuple(_place(config, pool, slot, layer, tuple(held[layer, slot])) for layer, slot in order)


def _place(config: ModelConfig, pool: Pool, slot: Slot, layer: int, held: tuple[Cell, ...]) -> Place:
    first, ratio = held[0].component, config.compress_ratios[layer]
    if pool.kept_blocks and not ratio:
        raise GroupingError(
            f"pool {pool.name!r}: layer {layer} has no blocks of which a ring could keep some"
        )
    if (first.paged or pool.kept_blocks) and pool.tokens % ratio:
        raise GroupingError(f"pool {pool.name!r}: tokens={pool.tokens} must be a multiple of {ratio=}")
    numbers = pool.tokens // ratio if first.paged else pool.tokens
    rows = pool.kept_blocks * ratio or numbers
    widths: dict[str, int] = {}
    live: dict[str, int] = {}
    for cell in sorted(held, key=lambda c: slot.components.index(c.component.name)):
        buffer = cell.component.buffer
        widths[buffer] = max(widths.get(buffer, 0), cell.component.channels(config, layer))
        if pool.kept_blocks:
            live[buffer] = live.get(buffer, 0) + cell.component.most_rows(config, layer)
    if max(live.values(), default=0) > rows:
        raise GroupingError(
            f"pool {pool.name!r}: a ring of {rows} rows cannot hold {max(live.values())} live ones"
        )
    rope = config.qk_rope_head_dim if first.width is Width.HEAD else 0
    layout = page_layout(
        slot.form,
        rows,
        sum(widths.values()),
        rope,
        parts=tuple(widths.items()),
        run=min(slot.run, rows),
        alignment=slot.alignment,
    )
    return Place(pool, layer, layout, held, numbers)


def _pages(pool: Pool, config: ModelConfig, length: int) -> range:
    """The pages of one pool that hold live rows."""
    spans = [
        (live.start // place.numbers, (live.stop - 1) // place.numbers + 1)
        for place in _places(pool, config)
        for live in (cell.live(config, length) for cell in place.cells)
        if live
    ]
    return range(min((a for a, _ in spans), default=0), max((b for _, b in spans), default=0))
