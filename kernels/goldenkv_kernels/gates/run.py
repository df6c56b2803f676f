"""Runs all gates on all cases."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from . import bounds, environment, lowering, table
from .case import Case, Distance, distance
from .cases import CASES
from .compilation import Compiled, CompilingFailed, Kernel, compile_cases
from .controls import CONTROLS, Control

ROOT = Path(__file__).resolve().parents[3]
TABLE = ROOT / "kernels" / "table.json"
MEASURED = ROOT / "kernels" / "measured.json"
"""Of a run of the benchmark on a GPU; not there as long as there was none."""

ENVIRONMENT = ROOT / ".cache" / "kernels-venv"


@dataclass(slots=True)
class Row:
    """One case.

    Attributes:
        case: what ran.
        numerics: by implementation, the distance from the reference.
        kernels: in the module that was lowered for CUDA.
        compiled: what the compiled kernels take; empty where it was not compiled.
        problems: what failed, by gate.
    """

    case: Case
    numerics: dict[str, Distance] = field(default_factory=dict)
    kernels: int = 0
    compiled: tuple[Kernel, ...] = ()
    problems: dict[str, list[str]] = field(default_factory=dict)


@dataclass(slots=True)
class Trial:
    """A control, and how its gate caught it; empty if it did not."""

    control: Control
    caught: str = ""


@dataclass(slots=True)
class Report:
    """All cases and controls; problems that belong to none; and what could not run, with the reason."""

    rows: list[Row]
    controls: list[Trial]
    problems: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    compiled: Compiled | None = None

    @property
    def ok(self) -> bool:
        """Every gate that ran passed, and caught its controls."""
        bad = any(row.problems for row in self.rows) or not all(trial.caught for trial in self.controls)
        return not self.problems and not bad

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "ok": self.ok,
            "problems": self.problems,
            "skipped": self.skipped,
            "versions": {"jax": self.compiled.jax, "ptxas": self.compiled.ptxas} if self.compiled else None,
            "controls": [
                {"gate": t.control.gate, "name": t.control.case.name, "caught": t.caught}
                for t in self.controls
            ],
            "cases": [
                {
                    "kernel": row.case.kernel,
                    "case": row.case.name,
                    "tolerance": row.case.tolerance.name,
                    "numerics": {name: asdict(d) for name, d in row.numerics.items()},
                    "lowered": row.kernels,
                    "compiled": [asdict(k) for k in row.compiled],
                    "problems": row.problems,
                }
                for row in self.rows
            ],
        }


def run_gates(
    cases: Sequence[Case] = CASES,
    *,
    install: bool = False,
    update: bool = False,
    compiling: bool = True,
    progress: Callable[[str], None] = lambda name: None,
) -> Report:
    """Runs every gate that this machine allows.

    Args:
        cases: of which those marked `compiled` are compiled.
        install: make the environment of the third gate if it is not there.
        update: write what was compiled without spilling as the new table.
        compiling: whether to run the third gate.
        progress: called with the name of each step before it.
    """
    report = Report([Row(case) for case in cases], [Trial(control) for control in CONTROLS])
    for row in report.rows:
        progress(row.case.id)
        check(row)
    progress("controls")
    for trial in report.controls:
        _try(trial)
    if compiling:
        progress("compiling for sm_90a")
        _compile(report, install=install, update=update)
    else:
        report.skipped.append("compiling for sm_90a: not asked for")
        report.controls = [trial for trial in report.controls if trial.control.gate != "compiling"]
    return report


def check(row: Row) -> None:
    """Runs the gates that need nothing but this process, and notes in `row` what they find."""
    case = row.case
    arrays = case.arrays()
    want = case.expected(**arrays)
    for implementation in ("pallas", "xla"):
        with _noting(row, implementation):
            result = case.bound(implementation, interpret=True)(arrays)
            found = row.numerics[implementation] = distance(result, want, case.tolerance)
            if found.problem:
                row.problems[implementation] = [found.problem]
    with _noting(row, "lowering"):
        row.kernels = lowering.lowered(case.bound(interpret=False), arrays)
    with _noting(row, "bounds"):
        outside = bounds.check(case, arrays, want).problems
        if outside:
            row.problems["bounds"] = list(outside)


def _try(trial: Trial) -> None:
    """Runs the gate of a control, if it runs in this process."""
    case = trial.control.case
    row = Row(case)
    if trial.control.gate != "compiling":
        check(row)
    found = row.problems.get({"numerics": "pallas"}.get(trial.control.gate, trial.control.gate))
    trial.caught = found[0] if found else ""


@contextmanager
def _noting(row: Row, gate: str) -> Iterator[None]:
    """Whatever goes wrong inside is a problem of that gate, and the next gate runs."""
    try:
        yield
    except Exception as error:
        row.problems[gate] = [f"{type(error).__name__}: {error}"[:500]]


def _compile(report: Report, *, install: bool, update: bool) -> None:
    """The gate that needs another environment."""
    wanted = [row.case.id for row in report.rows if row.case.compiled]
    trials = [trial for trial in report.controls if trial.control.gate == "compiling"]
    try:
        if not (ROOT / "pyproject.toml").exists():
            raise environment.Unavailable("this needs a checkout, as the table is not in the package")
        place = environment.find(ENVIRONMENT, install=install)
        made = compile_cases(place, [*wanted, *(trial.control.case.id for trial in trials)])
    except (environment.Unavailable, CompilingFailed) as error:
        if isinstance(error, CompilingFailed):
            report.problems.append(str(error))
        else:
            report.skipped.append(f"compiling for sm_90a: {error}")
        report.controls = [trial for trial in report.controls if trial not in trials]  # they did not run
        return
    for trial in trials:
        trial.caught = "; ".join(table.problems_alone(made, trial.control.case.id))
        del made.cases[trial.control.case.id]
    report.compiled = made
    if update:
        table.write_table(TABLE, made)
    try:
        committed = table.read_table(TABLE)
    except ValueError as error:
        report.problems.append(str(error))
        return
    for row in report.rows:
        if row.case.compiled:
            kernels = made.cases[row.case.id]
            row.compiled = () if isinstance(kernels, str) else kernels
            wrong = table.problems(made, committed, row.case.id)
            if wrong:
                row.problems["compiling"] = wrong
    if len(wanted) == sum(case.compiled for case in CASES):
        report.problems += table.missing(made, committed)
