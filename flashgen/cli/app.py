"""The application that commands belong to, and its entry point."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from flashgen.errors import FlashgenError
from flashgen.version import __version__

app = typer.Typer(
    help="Compile attention variants, declared in a few lines, to tuned Triton modules.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # rich's help shows a type beside each flag
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs a command and exits; what the user has to fix goes to stderr, a line each."""
    try:
        app(args=arguments, prog_name="flashgen")
    except FlashgenError as error:
        colour = None if os.environ.get("NO_COLOR") else "red"
        for line in str(error).splitlines():
            typer.secho(f"error: {line}", err=True, fg=colour)
        sys.exit(error.status)


@app.callback(invoke_without_command=True)
def _options(
    version: Annotated[bool, typer.Option("--version", help="Print the version and stop.")] = False,
) -> None:
    if version:
        typer.echo(f"flashgen {__version__}")
        raise typer.Exit
