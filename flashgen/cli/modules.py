"""flashgen list, and flashgen clean."""

from __future__ import annotations

from pathlib import Path

import typer

from flashgen.cli.options import Out


def list_(out: Out = Path("generated")) -> None:
    """List the generated modules."""
    from flashgen.console import list_table, make_console
    from flashgen.inventory import list_modules

    modules = list_modules(out)
    if not modules:
        typer.echo(f"no generated modules in {out}")
        return
    make_console().print(list_table(modules))


def clean(out: Out = Path("generated")) -> None:
    """Remove the generated modules; measured results, in tuning/, stay."""
    from flashgen.inventory import remove_modules

    removed = remove_modules(out)
    modules = "module" if len(removed) == 1 else "modules"
    typer.echo(f"removed {len(removed)} {modules} from {out}")
