"""`goldenkv reload`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from .shared import check_folders, err, out, prompt

_SHOWN = 64
"""Tokens of the prompt that are printed, before those that follow."""


def reload(
    text: Annotated[
        Path | None,
        typer.Option(
            help="The text to run; by default one that the trained model has not seen, or, with other "
            "weights, the help topics that ship with Python."
        ),
    ] = None,
    tokens: Annotated[int, typer.Option(min=97, help="How many tokens of it.")] = 2085,
    steps: Annotated[int, typer.Option(min=1, help="Decode steps compared after every path.")] = 32,
    checkpoint: Annotated[
        Path | None,
        typer.Option(help="A folder with config.json and weights; by default the small trained model."),
    ] = None,
    random_weights: Annotated[
        bool, typer.Option("--random-weights", help="The bench preset with random weights instead.")
    ] = False,
    tokenizer: Annotated[
        Path | None,
        typer.Option(help="A tokenizer.json; by default the trained model's, or bytes with other weights."),
    ] = None,
    dtype: Annotated[
        Literal["float32", "bfloat16"], typer.Option(help="Of activations and cached rows.")
    ] = "float32",
    fake_quantisation: Annotated[
        bool,
        typer.Option("--fake-quantisation", help="Round KV to FP8 and index keys to FP4, as published."),
    ] = False,
    seed: Annotated[int, typer.Option(help="Of the random weights, chunk plans and strangers.")] = 0,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the results to this file.")] = None,
    figure: Annotated[
        Path | None, typer.Option(help="Draw which rows differ, path by path (needs the extra 'explore').")
    ] = None,
) -> None:
    """The reload gate: state survives every way of being kept, bit for bit, and damage does not go unseen.

    A cold run is compared with other chunk plans, a batch with strangers, and restores from host memory, from
    disk and from disk in a new process: every component and every logit, by unsigned views. Then each control
    damages the state and must be caught. The exit code is 1 if a path differs or a control is not caught.
    """
    from .. import trained
    from ..config import Numerics
    from ..gate import Gate, ModelSource, Report, tables

    check_folders(json_file, figure)
    if figure is not None:
        from ..figures import gate_figure, pyplot, save_figure

        pyplot()  # a missing extra must show before the run, not after it
    if checkpoint is not None and random_weights:
        raise ValueError("give --checkpoint or --random-weights, not both")
    ours = checkpoint is None and not random_weights
    folder = trained.FOLDER if ours else checkpoint
    numerics = Numerics(dtype=dtype, fake_quantisation=fake_quantisation)
    source = ModelSource(numerics, None if folder is None else str(folder.resolve()), seed)
    results = []
    with _progress() as progress:
        task = progress.add_task("loading the model", total=None)
        config, _ = loaded = source.load()
        ids, name = prompt(text, tokenizer, config.vocab_size, ours=ours)
        if len(ids) < tokens:
            raise ValueError(f"the text has {len(ids)} tokens, {tokens} were asked for (--tokens)")
        progress.update(task, description="cold run")
        gate = Gate(source, ids[:tokens], steps=steps, seed=seed, loaded=loaded)
        progress.update(task, total=len(gate.names))
        for line in gate.names:
            progress.update(task, description=line)
            results.append(gate.run_line(line))
            progress.advance(task)
    about = gate.about | {"text": name} | ({"model": "the trained model of goldenkv"} if ours else {})
    report = Report(about, results)
    for table in tables(report):
        out.print(table)
    if ours and tokenizer is None:
        before, after = trained.decode(ids[tokens - _SHOWN : tokens]), trained.decode(gate.decoded)
        out.print(Panel(Text.assemble((before, "dim"), after), title="The text, and how every path goes on"))
    if json_file is not None:
        json_file.write_text(json.dumps(report.to_json(), indent=1) + "\n")
    if figure is not None:
        save_figure(gate_figure(results), figure)
    if not report.ok:
        bad = [r.name for r in results if not r.ok]
        out.print(f"[bold red]FAILED:[/] {', '.join(bad)}", highlight=False)
        raise typer.Exit(1)
    paths = sum(not r.control for r in results)
    out.print(
        f"[bold green]passed:[/] {paths} paths are bit-equal to the cold run, "
        f"{len(results) - paths} controls were caught",
        highlight=False,
    )


def _progress() -> Progress:
    return Progress(
        TextColumn("{task.description:<32}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=err,
        transient=True,
    )
