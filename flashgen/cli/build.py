"""flashgen build."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flashgen.cli.lines import width_of_terminal, wrapped
from flashgen.cli.options import Forms, Out, PackageName, Specs, Targets
from flashgen.stamp import Request, up_to_date, why_not

if TYPE_CHECKING:
    from flashgen.build import Built, Options


def build(
    paths: Specs,
    target: Targets = None,
    form: Forms = None,
    out: Out = Path("generated"),
    package: PackageName = None,
    no_tune: Annotated[
        bool, typer.Option("--no-tune", help="Do not measure, even on a machine with a GPU.")
    ] = False,
    tune_seconds: Annotated[
        float,
        typer.Option(
            "--tune-seconds",
            min=0,
            help="Time to measure a forward kernel for; each backward kernel gets half of it.",
        ),
    ] = 60.0,
    force: Annotated[
        bool, typer.Option("--force", help="Build and measure again what is up to date.")
    ] = False,
    verbose: Annotated[
        bool,
        typer.Option("-v", "--verbose", help="Report each step, kernel and rejected candidate."),
    ] = False,
) -> None:
    """Build the modules of these specs. Those that are up to date are left alone."""
    request = Request(
        tuple(paths),
        out,
        tuple(target or ()),
        tuple(form or ()),
        tune=not no_tune,
        package=package,
    )
    current = None if force else up_to_date(request)
    if current is not None:
        _report_current(current)
        return

    from flashgen.build import Options
    from flashgen.build import build as run_build
    from flashgen.console import ProgressBar, make_console

    options = Options(
        out=out,
        targets=tuple(target or ()),
        forms=tuple(form or ()),
        tune=not no_tune,
        tune_seconds=tune_seconds,
        force=force,
        package=package,
    )
    results: list[Built] = []
    interrupted = False
    try:
        with ProgressBar(make_console(stderr=True), verbose=verbose) as progress:
            for built in run_build(paths, options, progress):
                results.append(built)
    except KeyboardInterrupt:
        interrupted = True
    finally:
        _report(results, options, verbose)
    if verbose and (reason := why_not(request)):
        typer.echo(f"run again at each build, as more may count than its text: {reason}")
    if interrupted:
        typer.echo("interrupted: what is listed is published, the rest was not built", err=True)
        raise typer.Exit(130)


def _report(results: list[Built], options: Options, verbose: bool) -> None:
    """Shows what was built, where it is and how to import it, also where a later variant failed."""
    from flashgen.console import (
        build_tables,
        make_console,
        module_line,
        rejection_lines,
        where_lines,
    )

    width = make_console().width
    built = [result for result in results if result.chosen]
    current = [result.variant for result in results if not result.chosen]
    if verbose:
        for result in built:
            for line in rejection_lines(result):
                typer.echo(wrapped(line, width))
            if result.algorithm:
                typer.echo(wrapped(f"{result.variant}: {result.algorithm}", width))
        for table in build_tables(built, width) if built else ():
            make_console().print(table)
    for result in built:
        typer.echo(module_line(result))
        for note in result.diagnostics:
            typer.echo(wrapped(f"note: {result.variant}: {note}", width))
    if current:
        _report_current(current)
    for line in where_lines(built, options.out, options.package):
        typer.echo(line)


def _report_current(names: Sequence[str]) -> None:
    line = f"up to date, nothing to do: {', '.join(names)}"
    width = width_of_terminal()
    typer.echo(line if width is None else wrapped(line, width))
