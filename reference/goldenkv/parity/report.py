"""What a comparison found: rows with the largest difference and its place, and a report of them."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table


@dataclass(frozen=True, slots=True)
class ParityRow:
    """One comparison.

    Attributes:
        name: what was compared.
        difference: the largest absolute difference, or what `note` says; None where nothing was compared.
        index: where it is.
        scale: the largest absolute value of the other implementation.
        tolerance: the largest difference that passes; None for information only.
        ok: False for a difference above the tolerance, for NaN and for other shapes.
        note: what a reader needs to know.
    """

    name: str
    difference: float | None
    index: tuple[int, ...] = ()
    scale: float | None = None
    tolerance: float | None = None
    ok: bool = True
    note: str = ""


@dataclass(frozen=True, slots=True)
class ParityReport:
    """All comparisons with one other run."""

    name: str
    rows: tuple[ParityRow, ...]

    @property
    def ok(self) -> bool:
        """True where something was compared and everything passed."""
        return any(row.tolerance is not None for row in self.rows) and all(row.ok for row in self.rows)

    def to_json(self) -> dict[str, Any]:
        """Plain values; NaN and infinities as text, which JSON lacks."""

        def plain(value: Any) -> Any:
            return str(value) if isinstance(value, float) and not math.isfinite(value) else value

        rows = [{key: plain(value) for key, value in asdict(row).items()} for row in self.rows]
        return {"name": self.name, "ok": self.ok, "rows": rows}


def compare_arrays(
    name: str, ours: np.ndarray, theirs: np.ndarray, tolerance: float | None, note: str = ""
) -> ParityRow:
    """The row for two arrays. Equal infinities differ by 0; a NaN on either side never passes."""
    if ours.shape != theirs.shape:
        return ParityRow(
            name, None, tolerance=tolerance, ok=False, note=f"shapes {ours.shape} and {theirs.shape} differ"
        )
    if not ours.size:
        return ParityRow(name, None, note="no rows at this length")
    left, right = ours.astype(np.float64), theirs.astype(np.float64)
    with np.errstate(invalid="ignore"):
        difference = np.where(left == right, 0.0, np.abs(left - right))
    index = tuple(int(i) for i in np.unravel_index(np.argmax(difference), difference.shape))
    worst = float(difference[index])  # argmax finds a NaN first
    ok = not math.isnan(worst) if tolerance is None else worst <= tolerance
    return ParityRow(name, worst, index, float(np.max(np.abs(right))), tolerance, ok, note)


def render(report: ParityReport, console: Console) -> None:
    """Prints a report as a table, and each note below it with the rows that it belongs to."""
    table = Table(title=report.name, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for header in ("compared", "difference", "at", "scale", "tolerance", ""):
        table.add_column(header, no_wrap=True)
    notes: dict[str, list[str]] = {}
    for row in report.rows:
        number = ["" if v is None else f"{v:.3g}" for v in (row.difference, row.scale, row.tolerance)]
        verdict = "" if row.ok and row.tolerance is None else "[green]ok" if row.ok else "[red]DIFFERS"
        at = ", ".join(map(str, row.index))
        table.add_row(row.name, number[0], at, number[1], number[2], verdict)
        if row.note:
            notes.setdefault(row.note, []).append(row.name)
    console.print(table)
    for note, names in notes.items():
        console.print(f"{', '.join(names)}: {note}", highlight=False, markup=False)
