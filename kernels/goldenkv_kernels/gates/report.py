"""How the gates' results read on a terminal of 80 columns."""

from __future__ import annotations

from rich import box
from rich.table import Table

from .run import Report, Row


def summary(report: Report) -> Table:
    """One line a case: how far from float64, and what each gate says."""
    table = Table(box=box.SIMPLE, pad_edge=False, caption=_caption(report), caption_justify="left")
    table.add_column("function, case")
    for name in ("error", "allowed", "lowered", "regs", "spill", "shared"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("bounds", justify="right", no_wrap=True)
    previous = ""
    for row in report.rows:
        if row.case.kernel != previous:
            previous = row.case.kernel
            table.add_row(f"[bold]{previous}[/]")
        table.add_row(f"  {row.case.name}", *_numbers(row), _verdict(row, "bounds"))
    return table


def _caption(report: Report) -> str:
    """What the columns mean that do not say it."""
    said = "error: the farthest from float64, of Pallas (interpreted) and XLA"
    if report.compiled:
        said += (
            f"\nregs, spill, shared: registers of a thread, bytes spilled, bytes of a program; sm_90a by "
            f"jax {report.compiled.jax}, ptxas {report.compiled.ptxas}"
        )
    return said


def _numbers(row: Row) -> list[str]:
    worst = max(row.numerics.values(), key=lambda d: (bool(d.problem), d.error - d.allowed), default=None)
    error, allowed = "", ""
    if worst is not None:
        error = _short(worst.error)
        allowed = "exact" if row.case.tolerance.exact else _short(worst.allowed)
    if row.problems.keys() & {"pallas", "xla"}:
        error = f"[bold red]{error or 'failed'}[/]"
    most = max((k.registers for k in row.compiled), default=0)
    cost = [""] * 3
    if most:
        spill, shared = sum(k.spill for k in row.compiled), max(k.shared for k in row.compiled)
        cost = [str(most), f"{spill:,}", f"{shared:,}"]
    if "compiling" in row.problems:
        cost = [f"[bold red]{text or '-'}[/]" for text in cost]
    return [error, allowed, _verdict(row, "lowering"), *cost]


def _short(number: float) -> str:
    return f"{number:.0e}".replace("e-0", "e-") if number else "0"


def _verdict(row: Row, gate: str) -> str:
    return "[bold red]failed[/]" if gate in row.problems else "[green]ok[/]"


def lines(report: Report) -> list[tuple[str, str]]:
    """What failed and what was skipped: ("failed" or "skipped", text)."""
    found = [("failed", problem) for problem in report.problems]
    for trial in report.controls:
        if not trial.caught:
            found.append(("failed", f"a wrong kernel passed {trial.control.gate}: {trial.control.case.name}"))
    for row in report.rows:
        for gate, problems in row.problems.items():
            found += [("failed", f"{row.case.id}, {gate}: {problem}") for problem in problems[:3]]
    return found + [("skipped", reason) for reason in report.skipped]
