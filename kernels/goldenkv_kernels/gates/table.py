"""The committed table of what compiled kernels take, and the check that they take no more.

A kernel may not spill, and may not grow beyond its committed numbers and a slack: `REGISTERS` a thread and
`SHARED` bytes. A new kernel, and one that is gone, is an error until the table is written anew
(`goldenkv kernels check --update`), so that its cost is seen in review. One that spills is never written.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from pathlib import Path

from .compilation import Compiled, Kernel
from .occupancy import held

REGISTERS, SHARED = 8, 1024
"""Slack: other versions of the assembler allocate a little differently."""

BEGIN, END = "<!-- table: begin -->", "<!-- table: end -->"


def read_table(path: Path) -> Compiled:
    """The committed table.

    Raises:
        ValueError: there is none, or it is no table.
    """
    try:
        data = json.loads(path.read_text())
        cases: dict[str, tuple[Kernel, ...] | str] = {
            name: tuple(Kernel(**kernel) for kernel in kernels) for name, kernels in data["cases"].items()
        }
        return Compiled(data["jax"], data["ptxas"], cases)
    except (OSError, KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path.name} is no table of kernels ({error!r}); write it with --update") from error


def write_table(path: Path, compiled: Compiled) -> None:
    """Writes the cases that are sound as the table, and as its copy in a README.md beside it."""
    sound = {name: kernels for name, kernels in compiled.cases.items() if not problems_alone(compiled, name)}
    compiled = Compiled(compiled.jax, compiled.ptxas, sound)
    lines = []
    for name, kernels in compiled.cases.items():
        rows = ",\n".join(f"   {json.dumps(asdict(k))}" for k in kernels if isinstance(k, Kernel))
        lines.append(f"  {json.dumps(name)}: [\n{rows}\n  ]")
    head = f' "jax": {json.dumps(compiled.jax)},\n "ptxas": {json.dumps(compiled.ptxas)},\n'
    path.write_text("{\n" + head + ' "cases": {\n' + ",\n".join(lines) + "\n }\n}\n")
    readme = path.with_name("README.md")
    if readme.exists():
        readme.write_text(with_table(readme.read_text(), compiled))


def problems(measured: Compiled, committed: Compiled, case: str) -> list[str]:
    """What is wrong with one case, measured against the committed table."""
    alone = problems_alone(measured, case)
    if alone:
        return alone
    now = {k.name: k for k in measured.cases[case] if isinstance(k, Kernel)}
    before = {k.name: k for k in committed.cases.get(case, ()) if isinstance(k, Kernel)}
    found = [
        f"{n} is not in the table: look at its numbers and write them with --update"
        for n in now
        if n not in before
    ]
    found += [
        f"{n} is in the table and no longer compiled: write it anew with --update"
        for n in before
        if n not in now
    ]
    for name in now.keys() & before.keys():
        had, has = before[name].threads, now[name].threads
        if has != had:
            found.append(f"{name} has {has:,} threads and {had:,} in the table: write it anew with --update")
        for what, slack in (("registers", REGISTERS), ("shared", SHARED)):
            had, has = getattr(before[name], what), getattr(now[name], what)
            if has > had + slack:
                found.append(f"{name} grew from {had:,} to {has:,} {what}, {slack:,} more are allowed")
    return sorted(found)


def problems_alone(measured: Compiled, case: str) -> list[str]:
    """What is wrong with one case whatever the table says: it does not compile, or spills."""
    kernels = measured.cases[case]
    if isinstance(kernels, str):
        return [kernels]
    return [f"{k.name} spills {k.spill:,} bytes" for k in kernels if k.spill]


def missing(measured: Compiled, committed: Compiled) -> list[str]:
    """Cases of the table that are no longer compiled."""
    return [
        f"{name} is in the table and not a case any more"
        for name in committed.cases
        if name not in measured.cases
    ]


def with_table(text: str, compiled: Compiled) -> str:
    """A README with its table made anew.

    Raises:
        ValueError: the two marks between which it stands are not there.
    """
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        raise ValueError(f"README.md must have one line {BEGIN} and one {END}")
    new = f"{BEGIN}\n{markdown(compiled)}\n{END}"
    return re.sub(f"{re.escape(BEGIN)}.*{re.escape(END)}", lambda _: new, text, flags=re.DOTALL)


def markdown(compiled: Compiled) -> str:
    """The table for reading."""
    rows = [
        f"sm_90a, jax {compiled.jax}, ptxas {compiled.ptxas}. None of these spills.",
        "",
        "| function | case | kernel | threads | registers | shared memory, bytes | on a processor |",
        "|---|---|---|---:|---:|---:|---:|",
    ]
    for name, kernels in compiled.cases.items():
        function, case = name.split(": ", 1)
        rows += [
            f"| {function} | {case} | {k.name} | {k.threads} | {k.registers} | {k.shared:,} | {held(k)} |"
            for k in kernels
            if isinstance(k, Kernel)
        ]
    return "\n".join(rows)
