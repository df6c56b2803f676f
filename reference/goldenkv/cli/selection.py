"""`goldenkv selection`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from .shared import check_folders, out, prompt


def selection(
    checkpoint: Annotated[
        Path | None,
        typer.Option(help="A folder with config.json and weights; the trained model by default."),
    ] = None,
    text: Annotated[
        Path | None, typer.Option(help="The text to run; held-out text of the trained model by default.")
    ] = None,
    tokenizer: Annotated[
        Path | None,
        typer.Option(help="A tokenizer.json for --text; by default the trained model's, or bytes."),
    ] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Of a document; two of them run.")] = 1536,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the results to this file.")] = None,
    figure: Annotated[
        Path | None, typer.Option(help="Draw the last CSA layer (needs the extra 'explore').")
    ] = None,
) -> None:
    """Which CSA entries are selected, and what that is worth.

    Stability from token to token, hot and cold entries, predictors of the next selection, eviction and
    prefetch on recorded selections, and what a page is behind another prefix: each beside its baselines.
    """
    from .. import trained
    from ..config import Numerics
    from ..engine import Engine
    from ..model.checkpoint import load_checkpoint
    from ..selection.report import finding, tables, to_json
    from ..selection.study import REPLY, study

    check_folders(json_file, figure)
    if figure is not None:
        from ..figures import pyplot, save_figure
        from ..figures.selection import overview_figure

        pyplot()  # a missing extra must show before the run, not after it
    config, model = load_checkpoint(checkpoint or trained.FOLDER, numerics=Numerics())
    ids, _ = prompt(text, tokenizer, config.vocab_size, ours=checkpoint is None)
    engine = Engine(model, config, Numerics(), slots=2, max_length=tokens + 3 * REPLY)
    found = study(engine, model, ids, tokens)
    out.print(finding(found), highlight=False)
    for table in tables(found):
        out.print(table)
    if json_file is not None:
        json_file.write_text(json.dumps(to_json(found), indent=1) + "\n")
    if figure is not None:
        last = found.layers[-1]
        save_figure(
            overview_figure(
                found.recording.mask(len(found.layers) - 1),
                found.recording.ratio,
                config.sliding_window,
                last.stability.lines(),
                {name: (curve.shares, curve.recall) for name, curve in last.curves.items()},
                {heat.zone.value: (heat.lift, heat.mass_lift) for heat in last.heats},
            ),
            figure,
        )
