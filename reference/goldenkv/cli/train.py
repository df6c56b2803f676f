"""`goldenkv train`."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated, Any

import typer

from .shared import out


def train(
    folder: Annotated[Path, typer.Argument(help="Where the checkpoint goes, and what is needed to go on.")],
    text: Annotated[
        Path | None,
        typer.Option(help="A folder of text; Python's standard library by default."),
    ] = None,
    pattern: Annotated[str, typer.Option(help="Which files below --text.")] = "*.py",
    steps: Annotated[int, typer.Option(min=1, help="Optimiser steps of about 4,352 tokens.")] = 2200,
    window_only: Annotated[
        bool, typer.Option("--window-only", help="The same size without compressed entries, to compare with.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Of weights and batches.")] = 0,
) -> None:
    """Trains the small model, on two cores in about an hour. Run it again to go on where it stopped.

    The folder gets a checkpoint under the published names, the tokenizer, held-out text, and training.json:
    recipe, data, curve, and losses on held-out text beside n-grams.
    """
    from ..train import Recipe, Trainer, read_corpus, small, stdlib_files
    from ..train import window_only as without_entries
    from ..train.corpus import folder_files
    from ..train.export import export, rounded
    from ..train.loop import run
    from ..train.shapes import count
    from ..train.study import measured, ngrams

    corpus, tokenizer = read_corpus(stdlib_files() if text is None else folder_files(text, pattern))
    config = without_entries(small()) if window_only else small()
    recipe = Recipe(steps, seed=seed)
    trainer = Trainer(config, recipe, corpus.train)
    work = folder / "training"  # a checkpoint folder holds no other tensors than its own
    work.mkdir(parents=True, exist_ok=True)
    curve_file, state = work / "curve.jsonl", work / "state.safetensors"

    def report(row: dict[str, Any]) -> None:
        with curve_file.open("a") as file:
            file.write(json.dumps(row) + "\n")
        out.print(
            f"step {row['step']:>5}  {row['tokens']:>10,} tokens  loss {row['loss']:.3f}  "
            f"held out {row['held_out']:.3f}",
            highlight=False,
        )

    run(trainer, corpus.held_out, report, keep=state)
    bytes_a_token = corpus.held_out_bytes / len(corpus.held_out)
    model = rounded(trainer.model, config)
    export(
        trainer.model, config, folder, tokenizer=tokenizer, held_out=corpus.held_out,
        training={
            "parameters": count(config),
            "recipe": dataclasses.asdict(recipe),
            "corpus": corpus.about,
            "curve": [json.loads(line) for line in curve_file.read_text().splitlines()],
            "measured": measured(model, config, corpus.held_out, bytes_a_token),
            "ngrams": ngrams(corpus.train, corpus.held_out, config.vocab_size),
        },
    )  # fmt: skip
