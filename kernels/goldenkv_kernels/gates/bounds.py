"""The fourth gate: no kernel reads or writes what it must not, though interpret mode would not show it.

The case's inputs have poison wherever nothing may be read (`inputs`), the kernel runs address by address on
arrays that know their length (`machine`), and what a GPU leaves undefined is poison as well. So it fails if
an address lies outside an array, if programs race, or if any poison reaches the result.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .case import Case, distance
from .machine import run


@dataclass(frozen=True, slots=True)
class Bounds:
    """What was found: problems, one line each, and the kernels that ran."""

    problems: tuple[str, ...]
    kernels: tuple[str, ...]


def check(case: Case, arrays: Any, want: Any) -> Bounds:
    """Runs one case; `want` is its reference."""
    findings = run(case.bound(interpret=False), arrays)
    off = distance(findings.outputs, want, case.tolerance)
    wrong = (f"poison reached the result, or it is wrong: {off.problem}",) if off.problem else ()
    return Bounds((*findings.problems, *wrong), findings.kernels)
