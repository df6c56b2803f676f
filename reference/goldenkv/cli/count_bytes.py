"""`goldenkv bytes`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from .shared import check_folders, out


def count_bytes(
    configs: Annotated[
        list[str],
        typer.Argument(
            metavar="CONFIG...",
            help="Files config.json, folders with one, or built-in models: "
            "flash, pro, v3, v3.2, llama-3.1-8b, gpt-oss-20b.",
            show_default=False,
        ),
    ],
    context: Annotated[int, typer.Option(min=1, help="Tokens of a sequence.")] = 131072,
    requests: Annotated[int, typer.Option(min=1, help="Sequences held at once.")] = 1,
    form: Annotated[
        list[str] | None,
        typer.Option(
            "--format",
            metavar="NAME",
            help="How rows are stored: fp8+fp4, fp8+fp8, bf16+fp8 (KV + index keys), bf16, fp8. Once for all "
            "models, or once for each in order; native by default.",
            show_default=False,
        ),
    ] = None,
    tensor_parallel: Annotated[
        int, typer.Option(min=1, help="Ranks that share the KV heads, or repeat them.")
    ] = 1,
    metadata: Annotated[
        int,
        typer.Option(min=0, help="Bytes of metadata a page: by default a key of 32, parent 8, location 8."),
    ] = 48,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write everything to this file.")] = None,
    figure: Annotated[Path | None, typer.Option(help="Draw it (needs the extra 'explore').")] = None,
) -> None:
    """What models keep for a sequence: bytes a token, fixed state, pages, and the total.

    Reads published configurations of DeepSeek-V4, of MLA (V2, V3, V3.2) and of ordinary attention (MHA, GQA,
    MQA, sliding windows).
    """
    from .. import capacity

    check_folders(json_file, figure)
    if figure is not None:
        from ..figures import capacity_figure, pyplot, save_figure

        pyplot()
    forms: list[str | None] = [*form] if form else [None]
    if len(forms) not in (1, len(configs)):
        raise ValueError(f"--format was given {len(forms)} times: expected once, or {len(configs)} times")
    if len(forms) == 1:
        forms *= len(configs)
    models = tuple(capacity.read_model(c, f) for c, f in zip(configs, forms, strict=True))
    report = capacity.Report(models, capacity.Load(context, requests, tensor_parallel, metadata))
    for table in capacity.tables(report):
        out.print(table)
    for note in capacity.notes(report):
        out.print(f"[yellow]note:[/] {note}", highlight=False)
    if json_file is not None:
        json_file.write_text(json.dumps(report.to_json(), indent=1) + "\n")
    if figure is not None:
        save_figure(capacity_figure(report), figure)
