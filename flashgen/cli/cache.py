"""flashgen cache list, and flashgen cache clear."""

from __future__ import annotations

from typing import Annotated

import typer


def list_cache() -> None:
    """List the modules in the cache."""
    from flashgen.cache import cache_folder, cached_modules
    from flashgen.console import cache_table, make_console

    folder = cache_folder()
    entries = cached_modules(folder)
    if not entries:
        typer.echo(f"no modules in {folder}")
        return
    make_console().print(cache_table(entries))
    typer.echo(f"in {folder}")


def clear(
    measured: Annotated[
        bool, typer.Option("--measured", help="Remove measured results as well.")
    ] = False,
) -> None:
    """Remove the modules from the cache; measured results stay."""
    from flashgen.cache import cache_folder, clear_cache

    folder = cache_folder()
    count = clear_cache(folder, measured=measured)
    typer.echo(f"removed {count} {'module' if count == 1 else 'modules'} from {folder}")
