"""The calculator's answer to one question, as plain values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .pages import METADATA_BYTES, PageSize, page_table
from .parts import CapacityError, Model, Part
from .v4 import snapshot_bytes


@dataclass(frozen=True, slots=True)
class Load:
    """What is asked.

    Attributes:
        context: tokens of a sequence.
        requests: sequences held at once.
        tensor_parallel: ranks over which KV heads are split, or on which they are repeated.
        metadata: bytes of metadata a page.
    """

    context: int = 131072
    requests: int = 1
    tensor_parallel: int = 1
    metadata: int = METADATA_BYTES

    def __post_init__(self) -> None:
        for name, low in (("context", 1), ("requests", 1), ("tensor_parallel", 1), ("metadata", 0)):
            value = getattr(self, name)
            if type(value) is not int or value < low:
                raise CapacityError(f"{name}={value!r} must be an integer >= {low}")


@dataclass(frozen=True, slots=True)
class SnapshotSize:
    """What a reload of one V4 sequence needs besides pages.

    Attributes:
        length: tokens, the context or the last multiple of the alignment before it.
        nbytes: with whole windows of W rows, as engines keep them.
        exact: with the W - 1 rows that an exact reload reads.
        pages: bytes of the growing rows at `length`.
    """

    length: int
    nbytes: int
    exact: int
    pages: int


@dataclass(frozen=True, slots=True)
class Report:
    """Models under one load, the first or DeepSeek-V3.2 being what the others are compared with."""

    models: tuple[Model, ...]
    load: Load

    def __post_init__(self) -> None:
        if not self.models:
            raise CapacityError("no model to count: expected at least one")
        for model in self.models:  # heads and ranks must divide, of every part
            model.growing_bytes(1, self.load.tensor_parallel)

    @property
    def reference(self) -> Model:
        """Shares are shares of this model: the one with MLA and index keys (V3.2), else the first."""
        return next((m for m in self.models if m.family == "MLA with index keys"), self.models[0])

    def share(self, model: Model) -> float | None:
        """Bytes a token as a share of the reference's, over all ranks; None where that has none."""
        base = self.all_ranks(self.reference)
        return self.all_ranks(model) / base if base else None

    def all_ranks(self, model: Model) -> float:
        """Bytes a token, summed over the ranks."""
        ranks = self.load.tensor_parallel
        return ranks * model.bytes_a_token(ranks)

    def growing(self, model: Model) -> int:
        """Bytes of all requests on one rank that grow with their length."""
        return self.load.requests * model.growing_bytes(self.load.context, self.load.tensor_parallel)

    def bounded(self, model: Model) -> int:
        """Bytes of all requests on one rank that do not."""
        return self.load.requests * model.bounded_bytes(self.load.context, self.load.tensor_parallel)

    def pages(self, model: Model) -> list[PageSize]:
        """The table of page sizes on one rank."""
        return page_table(model, self.load.context, self.load.metadata, self.load.tensor_parallel)

    def snapshots(self, model: Model) -> list[SnapshotSize]:
        """Of a V4: at the last boundary where all blocks end, and at the context where that is another."""
        if model.v4 is None:
            return []
        lengths = dict.fromkeys((self.load.context // model.alignment * model.alignment, self.load.context))
        return [
            SnapshotSize(
                length,
                snapshot_bytes(model.v4, model.format, length),
                snapshot_bytes(model.v4, model.format, length, exact=True),
                model.growing_bytes(length),
            )
            for length in lengths
            if length
        ]

    def too_long(self, model: Model) -> bool:
        """True where the model was made for fewer tokens."""
        return model.max_context is not None and self.load.context > model.max_context

    def to_json(self) -> dict[str, Any]:
        """Everything, as plain values; sizes in bytes, on one rank unless the name says otherwise."""
        load = self.load
        return {
            "context": load.context,
            "requests": load.requests,
            "tensor_parallel": load.tensor_parallel,
            "metadata_bytes_a_page": load.metadata,
            "share_of": self.reference.name,
            "models": [self._model_json(model) for model in self.models],
        }

    def _model_json(self, model: Model) -> dict[str, Any]:
        ranks, growing, bounded = self.load.tensor_parallel, self.growing(model), self.bounded(model)
        out: dict[str, Any] = {key: getattr(model, key) for key in ("name", "family", "format", "layers")}
        out |= {
            "max_context": model.max_context,
            "bytes_a_token": model.bytes_a_token(ranks),
            "bytes_a_token_all_ranks": self.all_ranks(model),
            "share": self.share(model),
            "growing_bytes": growing,
            "bounded_bytes": bounded,
            "bytes": growing + bounded,
            "bytes_all_ranks": ranks * (growing + bounded),
            "draft": {
                "bytes_a_token": model.bytes_a_token(ranks, draft=True),
                "bounded_bytes": model.bounded_bytes(self.load.context, ranks, draft=True),
            },
            "groups": [
                {
                    "kind": group.kind,
                    "layers": group.layers,
                    "draft": group.draft,
                    "parts": [self._part_json(part) for part in group.parts],
                }
                for group in model.groups
            ],
            "snapshots": [
                {"length": s.length, "bytes": s.nbytes, "bytes_exact": s.exact, "bytes_of_pages": s.pages}
                for s in self.snapshots(model)
            ],
            "pages": [
                {
                    "tokens": page.tokens,
                    "bytes": page.nbytes,
                    "padding": page.padding,
                    "metadata": page.metadata,
                    "pages": page.pages,
                    "pages_apart": page.apart,
                }
                for page in self.pages(model)
            ],
        }
        return out

    def _part_json(self, part: Part) -> dict[str, Any]:
        ranks = self.load.tensor_parallel
        return {
            "name": part.name,
            "row_format": part.row.name,
            "row_bytes": part.row.nbytes,
            "tokens_a_row": part.tokens_a_row,
            "heads_a_rank": part.heads_a_rank(ranks),
            "most_rows": part.most_rows,
            "bytes_a_token_a_layer": part.bytes_a_token(ranks),
            "bytes_a_layer": part.nbytes(self.load.context, ranks),
        }
