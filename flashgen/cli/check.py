"""flashgen check."""

from __future__ import annotations

from pathlib import Path

import typer

from flashgen.cli.options import Forms, Out, PackageName, Specs, Targets


def check(
    paths: Specs = [Path("specs")],  # noqa: B006  (typer reads the default, nobody changes it)
    target: Targets = None,
    form: Forms = None,
    out: Out = Path("generated"),
    package: PackageName = None,
) -> None:
    """List the modules that are not what their specs render to. Exit with 1 if there are any."""
    from flashgen.check import check as run_check
    from flashgen.check import names_all
    from flashgen.console import ProgressBar, make_console

    with ProgressBar(make_console(stderr=True), verbose=False) as progress:
        differences = run_check(
            paths, out, tuple(target or ()), tuple(form or ()), progress, package
        )
    for line in differences:
        typer.echo(line)
    if differences:
        raise typer.Exit(1)
    checked = "every module" if names_all(paths) else "what was asked for"
    typer.echo(f"{checked} in {out} is what its spec renders to")
