"""What a model keeps for a sequence, as a list of parts: rows of so many bytes, and how many of them.

A *growing* part has a row for every `tokens_a_row` tokens; a *bounded* part (a window, a compressor's rows)
never has more than `most_rows`. Every figure of the calculator is a sum over parts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from ..config import ModelConfig
from ..state.formats import RowFormat


class CapacityError(ValueError):
    """A question that does not fit the model: a format, a length, a number of ranks."""


@dataclass(frozen=True, slots=True)
class Part:
    """One kind of row that a layer keeps for a sequence.

    Attributes:
        name: what the rows are.
        row: the bytes of a row; in ordinary attention a row is K and V of one head.
        tokens_a_row: tokens that a row stands for.
        heads: KV heads, each with rows of its own.
        most_rows: where the part is bounded, the most rows of a head; None where it grows.
    """

    name: str
    row: RowFormat
    tokens_a_row: int = 1
    heads: int = 1
    most_rows: int | None = None

    @property
    def grows(self) -> bool:
        """True where bytes grow with the length without end."""
        return self.most_rows is None

    def heads_a_rank(self, ranks: int) -> int:
        """KV heads on each tensor-parallel rank; with more ranks than heads every head is kept several times.

        Raises:
            CapacityError: heads and ranks do not divide.
        """
        if self.heads % ranks and ranks % self.heads:
            raise CapacityError(
                f"tensor_parallel={ranks} must divide the {self.heads} KV heads or be a multiple"
            )
        return max(1, self.heads // ranks)

    def bytes_a_token(self, ranks: int = 1) -> float:
        """Bytes that a token adds on one rank, in the mean over a long context."""
        return self.heads_a_rank(ranks) * self.row.nbytes / self.tokens_a_row if self.grows else 0.0

    def nbytes(self, length: int, ranks: int = 1) -> int:
        """Bytes on one rank at `length` tokens."""
        rows = length // self.tokens_a_row
        if self.most_rows is not None:
            rows = min(rows, self.most_rows)
        return self.heads_a_rank(ranks) * self.row.nbytes * rows


@dataclass(frozen=True, slots=True)
class Group:
    """Layers of one kind, with the parts that each of them has.

    Attributes:
        draft: the layers only draft tokens. Published totals leave them out, and so do the totals here.
    """

    kind: str
    layers: int
    parts: tuple[Part, ...]
    draft: bool = False


@dataclass(frozen=True, slots=True)
class Model:
    """What a model keeps for a sequence.

    Attributes:
        name: what the reader calls it.
        family: "V4", "MLA with index keys", "MLA", "GQA", "MHA" or "MQA".
        format: how rows are stored, one of the names in `formats`.
        max_context: positions that it was made for, where the file says so.
        v4: its configuration, if it is a V4: then snapshots can be counted too.
    """

    name: str
    family: str
    format: str
    groups: tuple[Group, ...]
    max_context: int | None = None
    v4: ModelConfig | None = None

    def parts(self, *, draft: bool = False) -> Iterator[tuple[Group, Part]]:
        """Every part of the main layers, or of the draft layers."""
        return ((group, part) for group in self.groups if group.draft is draft for part in group.parts)

    def bytes_a_token(self, ranks: int = 1, *, draft: bool = False) -> float:
        """Bytes that a token adds on one rank, in the mean over a long context."""
        return sum(group.layers * part.bytes_a_token(ranks) for group, part in self.parts(draft=draft))

    def growing_bytes(self, length: int, ranks: int = 1, *, draft: bool = False) -> int:
        """Bytes of the growing parts of one sequence on one rank."""
        return self._nbytes(length, ranks, grows=True, draft=draft)

    def bounded_bytes(self, length: int, ranks: int = 1, *, draft: bool = False) -> int:
        """Bytes of the bounded parts of one sequence on one rank."""
        return self._nbytes(length, ranks, grows=False, draft=draft)

    def _nbytes(self, length: int, ranks: int, *, grows: bool, draft: bool) -> int:
        parts = self.parts(draft=draft)
        return sum(g.layers * part.nbytes(length, ranks) for g, part in parts if part.grows is grows)

    @property
    def layers(self) -> int:
        """Main layers."""
        return sum(group.layers for group in self.groups if not group.draft)

    @property
    def alignment(self) -> int:
        """Tokens after which the rows of every growing part end together."""
        return math.lcm(*(part.tokens_a_row for _, part in self.parts()))
