"""The command line: `goldenkv reload`, `goldenkv parity` and `goldenkv bytes`."""

from __future__ import annotations

import json
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from typer.core import TyperGroup

from . import __version__


class _Commands(TyperGroup):
    """Ours, and those that other packages offer under the entry point group "goldenkv.commands"."""

    def list_commands(self, ctx: Any) -> list[str]:
        return [*super().list_commands(ctx), *sorted(_offered())]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        found = super().get_command(ctx, cmd_name)
        if found is None and cmd_name in _offered():  # imported when it is asked for, not before
            found = typer.main.get_group(_offered()[cmd_name].load())
            found.name = cmd_name
        return found


def _offered() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group="goldenkv.commands")}


app = typer.Typer(
    cls=_Commands,
    help="A golden reference of DeepSeek-V4's CSA+HCA attention whose state reloads bit for bit.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)
_out = Console()
_err = Console(stderr=True)


def main() -> None:
    """Entry point. Errors that a user can cause end in one line and exit code 2."""
    from .errors import MissingExtra

    try:
        app()
    except (ValueError, OSError, MissingExtra) as error:
        _err.print(f"[bold red]error:[/] {escape(str(error))}", highlight=False, soft_wrap=True)
        raise SystemExit(2) from None


def _version(wanted: bool) -> None:
    if wanted:
        _out.print(__version__, highlight=False)
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    pass


@app.command()
def reload(
    text: Annotated[
        Path | None, typer.Option(help="The text to run; the help topics that ship with Python by default.")
    ] = None,
    tokens: Annotated[int, typer.Option(min=97, help="How many tokens of it.")] = 2085,
    steps: Annotated[int, typer.Option(min=1, help="Decode steps compared after every path.")] = 32,
    checkpoint: Annotated[
        Path | None,
        typer.Option(
            help="A folder with config.json and weights; random weights of the bench preset by default."
        ),
    ] = None,
    tokenizer: Annotated[
        Path | None, typer.Option(help="A tokenizer.json; bytes are tokens by default.")
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
    from .config import Numerics
    from .gate import Gate, ModelSource, Report, tables
    from .text import byte_tokens, default_text, tokenizer_tokens

    _check_folders(json_file, figure)
    if figure is not None:
        from .figures import gate_figure, pyplot, save_figure

        pyplot()  # a missing extra must show before the run, not after it
    words = default_text() if text is None else text.read_text()
    source = ModelSource(
        Numerics(dtype=dtype, fake_quantisation=fake_quantisation),
        None if checkpoint is None else str(checkpoint.resolve()),
        seed,
    )
    results = []
    with _progress() as progress:
        task = progress.add_task("loading the model", total=None)
        config, _ = loaded = source.load()
        ids = tokenizer_tokens(words, tokenizer) if tokenizer else byte_tokens(words, config.vocab_size)
        if len(ids) < tokens:
            raise ValueError(f"the text has {len(ids)} tokens, {tokens} were asked for (--tokens)")
        progress.update(task, description="cold run")
        gate = Gate(source, ids[:tokens], steps=steps, seed=seed, loaded=loaded)
        names = gate.names
        progress.update(task, total=len(names))
        for name in names:
            progress.update(task, description=name)
            results.append(gate.run_line(name))
            progress.advance(task)
    report = Report(gate.about | {"text": str(text) if text else "pydoc_data.topics"}, results)
    for table in tables(report):
        _out.print(table)
    if json_file is not None:
        json_file.write_text(json.dumps(report.to_json(), indent=1) + "\n")
    if figure is not None:
        save_figure(gate_figure(results), figure)
    if not report.ok:
        bad = [r.name for r in results if not r.ok]
        _out.print(f"[bold red]FAILED:[/] {', '.join(bad)}", highlight=False)
        raise typer.Exit(1)
    paths = sum(not r.control for r in results)
    _out.print(
        f"[bold green]passed:[/] {paths} paths are bit-equal to the cold run, "
        f"{len(results) - paths} controls were caught",
        highlight=False,
    )


def _check_folders(*files: Path | None) -> None:
    """Before a run, that its results can be written after it."""
    for file in files:
        if file is not None and not file.parent.is_dir():
            raise ValueError(f"{str(file)!r} cannot be written: there is no folder {str(file.parent)!r}")


def _progress() -> Progress:
    return Progress(
        TextColumn("{task.description:<32}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=_err,
        transient=True,
    )


@app.command()
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
    from . import parity as compare

    _check_folders(json_file)
    if (directory is None) != transformers:
        raise typer.BadParameter("give either a folder of golden vectors or --transformers")
    if directory is not None:
        reports = [compare.compare_golden(directory, which=which, tolerance=tolerance)]
    else:
        reports = compare.compare_transformers(tolerance=tolerance)
    for report in reports:
        compare.render(report, _out)
    if json_file is not None:
        json_file.write_text(json.dumps([report.to_json() for report in reports], indent=1) + "\n")
    if not all(report.ok for report in reports):
        raise typer.Exit(1)


@app.command("bytes")
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
    from . import capacity

    _check_folders(json_file, figure)
    if figure is not None:
        from .figures import capacity_figure, pyplot, save_figure

        pyplot()
    forms: list[str | None] = [*form] if form else [None]
    if len(forms) not in (1, len(configs)):
        raise ValueError(f"--format was given {len(forms)} times: expected once, or {len(configs)} times")
    if len(forms) == 1:
        forms *= len(configs)
    models = tuple(capacity.read_model(c, f) for c, f in zip(configs, forms, strict=True))
    report = capacity.Report(models, capacity.Load(context, requests, tensor_parallel, metadata))
    for table in capacity.tables(report):
        _out.print(table)
    for note in capacity.notes(report):
        _out.print(f"[yellow]note:[/] {note}", highlight=False)
    if json_file is not None:
        json_file.write_text(json.dumps(report.to_json(), indent=1) + "\n")
    if figure is not None:
        save_figure(capacity_figure(report), figure)
