"""What the reload gate found: its lines, and how they read on a terminal."""

from __future__ import annotations

from dataclasses import dataclass, field

from rich import box
from rich.markup import escape
from rich.table import Table

from ..state import Difference


@dataclass(frozen=True, slots=True)
class Result:
    """One line of the gate.

    Attributes:
        name: the path or the control.
        control: True where a difference is what must be found.
        reused: tokens whose state was not computed again.
        nbytes: bytes of the state that was moved.
        difference: from the cold run, over components and logits; None where an error stopped the reload.
        caught: for controls, how the damage was caught; empty where it was not.
        seconds: to get to the end of the prompt.
        speedup: of that over the cold run, where something was reused.
        note: how it went, where that is not plain from the rest.
        skipped: why it could not run; empty where it did.
    """

    name: str
    control: bool
    reused: int
    nbytes: int
    difference: Difference | None
    seconds: float
    caught: str = ""
    speedup: float | None = None
    note: str = ""
    skipped: str = ""

    @staticmethod
    def skip(name: str, why: str) -> Result:
        """A path that cannot run here."""
        return Result(name, False, 0, 0, None, 0.0, skipped=why)

    @property
    def ok(self) -> bool:
        """A path must be bit-equal; a control must be caught. What cannot run here does not fail."""
        if self.skipped:
            return True
        if self.control:
            return bool(self.caught)
        return self.difference is not None and self.difference.same

    def to_json(self) -> dict:
        """Plain values; the row masks as counts of different rows by name."""
        out = {key: getattr(self, key) for key in ("name", "control", "ok", "reused", "nbytes", "seconds")}
        out |= {"speedup": self.speedup, "caught": self.caught, "note": self.note, "skipped": self.skipped}
        out |= {"rows": None, "equal": None}
        if self.difference is not None:
            d = self.difference
            out |= {"rows": d.rows, "equal": d.equal, "first_difference": list(d.first) if d.first else None}
            out["different_rows"] = {n: int((~ok).sum()) for n, ok in d.by_name.items() if not ok.all()}
        return out


@dataclass(frozen=True, slots=True)
class Report:
    """All lines, and what was run."""

    about: dict
    results: list[Result] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Every path is bit-equal and every control was caught."""
        return all(result.ok for result in self.results)

    def to_json(self) -> dict:
        return {"ok": self.ok, "about": self.about, "results": [r.to_json() for r in self.results]}


def tables(report: Report) -> list[Table]:
    """Paths, then controls; each fits a terminal of 80 columns."""
    about = report.about
    rows = max((r.difference.rows for r in report.results if r.difference and not r.control), default=0)
    paths = _table(
        f"{about['model']}\n"
        f"{about['tokens']:,} tokens, then {about['steps']} decode steps; {rows:,} rows are compared"
    )
    for name in ("reused", "bytes", "seconds", "faster"):
        paths.add_column(name, justify="right", no_wrap=True)
    paths.add_column("")
    controls = _table("Controls: damage that must be caught")
    controls.add_column("equal rows", justify="right")
    controls.add_column("first difference")
    controls.add_column("caught by")
    for r in report.results:
        if r.skipped:
            paths.add_row(r.name, *[""] * 4, f"[yellow]skipped:[/] {escape(r.skipped)}")
            continue
        if r.control:
            equal = "" if r.difference is None else _count(r.difference)
            verdict = f"[green]{_short(r.caught)}[/]" if r.ok else "[bold red]NOT CAUGHT[/]"
            controls.add_row(r.name, equal, _place(r), verdict)
            continue
        paths.add_row(
            r.name,
            f"{r.reused:,}" if r.reused else "",
            f"{r.nbytes:,}" if r.nbytes else "",
            f"{r.seconds:.3f}",
            "" if r.speedup is None else f"{r.speedup:,.0f}x",
            _verdict(r),
        )
    return [paths, controls]


def _verdict(result: Result) -> str:
    note = f": {result.note}" if result.note else ""
    if result.ok:
        return f"[green]equal[/]{note}"
    if result.difference is None:
        return f"[bold red]FAILED[/]{note}"
    return f"[bold red]DIFFERS[/]: {_count(result.difference)}, from {_place(result)}"


def _count(difference: Difference) -> str:
    return f"all {difference.rows:,}" if difference.same else f"{difference.equal:,}/{difference.rows:,}"


def _place(result: Result) -> str:
    if result.difference is None or result.difference.first is None:
        return ""
    return "{}[{}]".format(*result.difference.first)


def _short(caught: str) -> str:
    """`logits: from decode step 5` becomes `logits, step 5`; of other texts the first word stays."""
    kind, _, more = caught.partition(": ")
    return f"{kind}, step {more.split()[-1]}" if kind == "logits" else kind


def _table(title: str) -> Table:
    table = Table(
        title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0)
    )
    table.add_column("", no_wrap=True)
    return table
