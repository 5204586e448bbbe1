"""flashgen export."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flashgen.cli.options import Out, modules
from flashgen.errors import FlashgenError
from flashgen.paths import LICENSE


def export(
    names: Annotated[
        list[str],
        typer.Argument(help="Names of modules.", metavar="names", autocompletion=modules),
    ],
    name: Annotated[str, typer.Option("--name", help="The name of the package.")],
    version: Annotated[
        str, typer.Option("--version", help="Its version; a whole number for --hub.")
    ] = "1",
    license_id: Annotated[
        str, typer.Option("--license", help="Its license, an identifier of SPDX.")
    ] = LICENSE,
    hub: Annotated[
        Path | None,
        typer.Option("--hub", help="Write a kernel of Hugging Face's format to this folder."),
    ] = None,
    wheel: Annotated[
        Path | None, typer.Option("--wheel", help="Write a wheel to this folder.")
    ] = None,
    out: Out = Path("generated"),
) -> None:
    """Pack modules for users who have torch and triton.

    They do not need flashgen.
    """
    from flashgen.export import Package, export_hub, export_wheel

    if hub is None and wheel is None:
        raise FlashgenError("export: nowhere to; pass --hub DIR, --wheel DIR, or both")
    package = Package(names, out, name, version, license_id)
    for write, folder in ((export_hub, hub), (export_wheel, wheel)):
        if folder is not None:
            typer.echo(write(package, folder))
