"""`goldenkv parity`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal

import typer

from .shared import check_folders, out


def parity(
    directory: Annotated[
        Path | None, typer.Argument(help="A folder of golden vectors (config, weights, expected values).")
    ] = None,
    which: Annotated[Literal["plain", "quantised"], typer.Option(help="Which expected values.")] = "plain",
    transformers: Annotated[
        bool,
        typer.Option(
            "--transformers",
            help="Compare seeded random weights with transformers (needs the extra 'parity').",
        ),
    ] = False,
    tolerance: Annotated[float, typer.Option(help="Largest difference allowed, float32.")] = 1e-4,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the results to this file.")] = None,
) -> None:
    """Compares the model with independent implementations, tensor by tensor, within a tolerance.

    The exit code is 1 if any tensor is further away than allowed.
    """
    from .. import parity as compare

    check_folders(json_file)
    if (directory is None) != transformers:
        raise typer.BadParameter("give either a folder of golden vectors or --transformers")
    if directory is not None:
        reports = [compare.compare_golden(directory, which=which, tolerance=tolerance)]
    else:
        reports = compare.compare_transformers(tolerance=tolerance)
    for report in reports:
        compare.render(report, out)
    if json_file is not None:
        json_file.write_text(json.dumps([report.to_json() for report in reports], indent=1) + "\n")
    if not all(report.ok for report in reports):
        raise typer.Exit(1)
