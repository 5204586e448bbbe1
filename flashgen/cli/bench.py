"""flashgen bench."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flashgen.cli.options import STDOUT, Out, for_json_alone, modules, write_json


def bench(
    name: Annotated[str, typer.Argument(help="The name of a variant.", autocompletion=modules)],
    specs: Annotated[Path, typer.Option("--specs", help="The folder or file of its spec.")] = Path(
        "specs"
    ),
    out: Out = Path("generated"),
    json: Annotated[
        Path | None,
        typer.Option(
            "--json", help="Write the figures here; - writes them, and nothing else, to stdout."
        ),
    ] = None,
) -> None:
    """Time a module beside SDPA and FlexAttention. It takes a GPU."""
    from flashgen.bench import bench as run_bench
    from flashgen.bench import to_json
    from flashgen.console import bench_table, make_console

    with for_json_alone(json):
        rows = run_bench(name, specs, out)
    if json != STDOUT:
        make_console().print(bench_table(rows))
    if json is not None:
        write_json(json, to_json(rows))
