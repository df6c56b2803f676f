"""The command line. A command is a module with a function of its name, imported when it is asked for."""

from __future__ import annotations

import importlib
from importlib.metadata import EntryPoint, entry_points
from typing import Annotated, Any

import typer
from rich.markup import escape
from typer.core import TyperGroup

from .. import __version__
from .shared import err, out

_OURS = {
    "reload": "reload",
    "parity": "parity",
    "bytes": "count_bytes",
    "delta": "delta",
    "selection": "selection",
    "train": "train",
}
"""Command -> its module here, which has a function of that name."""


class _Commands(TyperGroup):
    """Ours, and those that other packages offer under the entry point group "goldenkv.commands"."""

    def list_commands(self, ctx: Any) -> list[str]:
        return [*_OURS, *sorted(_offered())]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name in _OURS:
            name = _OURS[cmd_name]
            one = typer.Typer(add_completion=False, rich_markup_mode="markdown")
            one.command()(getattr(importlib.import_module(f".{name}", __name__), name))
            found: Any = typer.main.get_command(one)
        elif cmd_name in _offered():
            found = typer.main.get_group(_offered()[cmd_name].load())
        else:
            return None
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


def main() -> None:
    """Entry point. Errors that a user can cause end in one line and exit code 2."""
    from ..errors import MissingExtra

    try:
        app()
    except (ValueError, OSError, MissingExtra) as error:
        err.print(f"[bold red]error:[/] {escape(str(error))}", highlight=False, soft_wrap=True)
        raise SystemExit(2) from None


def _version(wanted: bool) -> None:
    if wanted:
        out.print(__version__, highlight=False)
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    pass
