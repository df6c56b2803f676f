"""The formats that a user can ask for: which row format each kind of row gets, family by family.

A name says KV rows + index keys (`fp8+fp4`); one word (`bf16`, `fp8`) says both, or that there are no index
keys. Rows of running sums (compressors) are float32 in every format, as in the published code.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from ..state.formats import ROW_FORMATS, RowFormat, plain
from .parts import CapacityError

MakeRow = Callable[[int, int], RowFormat]
"""(channels, how many of them are rotated) -> the row."""


@dataclass(frozen=True, slots=True)
class RowPair:
    """How the two kinds of rows are stored; `index` is None in a family without index keys."""

    kv: MakeRow
    index: MakeRow | None = None


_BF16, _INDEX_FP8, _INDEX_FP4 = (ROW_FORMATS[name] for name in ("bfloat16", "index_fp8", "index_fp4"))
_V4, _V32 = ROW_FORMATS["fp8"], ROW_FORMATS["fp8_v32"]

_ONE_SCALE = RowPair(plain("float8_e4m3fn"))
"""FP8 K and V of ordinary attention: one scale for a whole tensor, which takes no bytes in a row."""

FORMATS: Mapping[str, Mapping[str, RowPair]] = MappingProxyType(
    {
        "V4": {
            "fp8+fp4": RowPair(_V4, _INDEX_FP4),
            "fp8+fp8": RowPair(_V4, _INDEX_FP8),
            "bf16+fp8": RowPair(_BF16, _INDEX_FP8),
            "bf16": RowPair(_BF16, _BF16),
        },
        "MLA with index keys": {
            "fp8+fp8": RowPair(_V32, _INDEX_FP8),
            "bf16+fp8": RowPair(_BF16, _INDEX_FP8),
            "bf16": RowPair(_BF16, _BF16),
        },
        "MLA": {"bf16": RowPair(_BF16), "fp8": RowPair(_V32)},
        "GQA": {"bf16": RowPair(_BF16), "fp8": _ONE_SCALE},
        "MHA": {"bf16": RowPair(_BF16), "fp8": _ONE_SCALE},
        "MQA": {"bf16": RowPair(_BF16), "fp8": _ONE_SCALE},
    }
)
"""Family -> format -> rows. The first format of a family is its native one: what engines use by default."""


def choose(family: str, name: str | None) -> tuple[str, RowPair]:
    """The format of a name, or the native one for None.

    Raises:
        CapacityError: no such format, or none that this family has.
    """
    known = FORMATS[family]
    if name is None:
        name = next(iter(known))
    if name not in known:
        everywhere = dict.fromkeys(n for formats in FORMATS.values() for n in formats)
        what = f"does not fit {family}" if name in everywhere else "is unknown"
        raise CapacityError(f"format {name!r} {what}: {family} has {', '.join(known)}")
    return name, known[name]
