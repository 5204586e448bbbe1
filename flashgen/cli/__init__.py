"""The command line: ``flashgen build | check | explain | list | clean | bench | cache | export``.

Exit status: 0 done; 1 `check` found something; 2 the user has to fix something; 130 interrupted.

Commands import what they run: what sympy takes to import, a build with nothing to do has not.
"""

from __future__ import annotations

import typer

from flashgen.cli.app import app, main
from flashgen.cli.bench import bench
from flashgen.cli.build import build
from flashgen.cli.cache import clear, list_cache
from flashgen.cli.check import check
from flashgen.cli.explain import explain
from flashgen.cli.export import export
from flashgen.cli.modules import clean, list_

__all__ = ["app", "main"]

app.command()(build)
app.command()(check)
app.command()(explain)
app.command("list")(list_)
app.command()(clean)
app.command()(bench)
app.command()(export)

cache_app = typer.Typer(
    help="The modules that flashgen.compile keeps.", no_args_is_help=True, rich_markup_mode=None
)
app.add_typer(cache_app, name="cache")

cache_app.command("list")(list_cache)
cache_app.command()(clear)
