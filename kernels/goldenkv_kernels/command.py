"""`goldenkv kernels`: the gates of the GPU kernels on the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

app = typer.Typer(
    help="GPU kernels: what can be checked of them here.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
_out = Console()
_err = Console(stderr=True)


@app.callback()
def _group() -> None:
    pass


@app.command()
def check(
    function: Annotated[
        list[str] | None,
        typer.Argument(help="Only these functions, as sparse_attention; all by default.", show_default=False),
    ] = None,
    install: Annotated[
        bool,
        typer.Option(
            "--install", help="Make the environment that compiles for a GPU (a download of 250 MB)."
        ),
    ] = False,
    compiling: Annotated[bool, typer.Option("--compile/--no-compile", help="Compile for a GPU.")] = True,
    update: Annotated[
        bool, typer.Option("--update", help="Write registers and shared memory as the new table.")
    ] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the results to this file.")] = None,
) -> None:
    """Numerics, lowering for CUDA, compilation for sm_90a and reads out of bounds, all without a GPU.

    Every function runs interpreted against float64, is lowered, is compiled where that can be had, and is
    executed address by address. The exit code is 1 if anything fails.
    """
    from .gates.cases import CASES
    from .gates.report import lines, summary
    from .gates.run import run_gates

    if json_file is not None and not json_file.parent.is_dir():
        raise typer.BadParameter(f"there is no folder {str(json_file.parent)!r}", param_hint="--json")
    unknown = set(function or ()) - {case.kernel for case in CASES}
    if unknown:
        known = ", ".join(dict.fromkeys(case.kernel for case in CASES))
        raise typer.BadParameter(f"{', '.join(sorted(unknown))}: expected {known}")
    if update and (function or not compiling):
        raise typer.BadParameter("the table is written for all functions, compiled", param_hint="--update")
    chosen = [case for case in CASES if not function or case.kernel in function]
    with _err.status("") as status:
        report = run_gates(
            chosen,
            install=install,
            update=update,
            compiling=compiling,
            progress=lambda name: status.update(name),
        )
    _out.print(summary(report))
    colours = {"failed": "bold red", "skipped": "yellow"}
    for kind, text in lines(report):
        _out.print(f"[{colours[kind]}]{kind}:[/] {escape(text)}", highlight=False)
    if json_file is not None:
        json_file.write_text(json.dumps(report.to_json(), indent=1) + "\n")
    if not report.ok:
        raise typer.Exit(1)
    _out.print(
        f"[bold green]passed:[/] {len(report.rows)} cases; {len(report.controls)} kernels that are wrong on "
        "purpose were refused; no speed was measured",
        highlight=False,
    )


if __name__ == "__main__":
    app()
