"""The command line: ``flashgen build | check | explain | list | clean | bench | cache | export``.

Exit status: 0 done; 1 `check` found something; 2 the user has to fix something; 130 interrupted.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flashgen.budget.targets import TARGETS
from flashgen.config import FORMS, LONGEST
from flashgen.errors import FlashgenError
from flashgen.paths import LICENSE
from flashgen.stamp import Request, up_to_date, why_not
from flashgen.version import __version__

if TYPE_CHECKING:
    from flashgen.build import Built, Options
    from flashgen.explain.cached import Place
    from flashgen.explain.call import Asked

# Commands import what they run: what sympy takes to import, a build with nothing to do has not.

#: What names stdout in place of a file.
STDOUT = Path("-")

app = typer.Typer(
    help="Compile attention variants, declared in a few lines, to tuned Triton modules.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # rich's help shows a type beside each flag
)


def _starting(names: Iterable[str]) -> Callable[[str], list[str]]:
    """Completes a word that a shell is about to take for one of these names."""
    return lambda incomplete: [name for name in names if name.startswith(incomplete)]


def _modules(context: typer.Context, incomplete: str) -> list[str]:
    """Completes a word to the modules of the folder that ``--out`` names."""
    found = Path(context.params.get("out") or "generated").glob(f"{incomplete}*.py")
    return sorted(path.stem for path in found if not path.stem.startswith("_"))


Out = Annotated[Path, typer.Option("--out", help="Folder of the generated modules.")]
Specs = Annotated[list[Path], typer.Argument(help="Spec files, or folders of them.")]
Targets = Annotated[
    list[str] | None,
    typer.Option(
        "--target",
        help=f"GPU target instead of the spec's: {', '.join(TARGETS)}. Repeatable.",
        autocompletion=_starting(TARGETS),
    ),
]
Forms = Annotated[
    list[str] | None,
    typer.Option(
        "--form",
        help=f"Form to add to the spec's: {', '.join(FORMS[1:])}. Repeatable.",
        autocompletion=_starting(FORMS[1:]),
    ),
]

PackageName = Annotated[
    str | None,
    typer.Option(
        "--package", help="What the folder is imported as, as in mine.kernels; by default its name."
    ),
]


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


@app.command()
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

    built = [result for result in results if result.chosen]
    current = [result.variant for result in results if not result.chosen]
    if verbose:
        for result in built:
            for line in rejection_lines(result):
                typer.echo(line)
        console = make_console()
        for table in build_tables(built, console.width) if built else ():
            console.print(table)
    for result in built:
        typer.echo(module_line(result))
        for note in result.diagnostics:
            typer.echo(f"note: {result.variant}: {note}")
    if current:
        _report_current(current)
    for line in where_lines(built, options.out, options.package):
        typer.echo(line)


def _report_current(names: Sequence[str]) -> None:
    typer.echo(f"up to date, nothing to do: {', '.join(names)}")


@app.command()
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


@app.command()
def explain(
    paths: Specs,
    q_len: Annotated[
        int | None,
        typer.Option(
            "--q-len",
            help=f"Queries, at most {LONGEST}; by default 16384, or what constants allow.",
        ),
    ] = None,
    kv_len: Annotated[
        int | None,
        typer.Option("--kv-len", help=f"Keys, at most {LONGEST}; by default as many as queries."),
    ] = None,
    batch: Annotated[
        int | None,
        typer.Option("--batch", help="Batch entries; by default as many as make 16384 tokens."),
    ] = None,
    heads: Annotated[
        int | None,
        typer.Option(
            "--heads", help="Query heads; by default 2048 // head_dim, or what constants are for."
        ),
    ] = None,
    kv_heads: Annotated[
        int | None,
        typer.Option(
            "--kv-heads", help="Heads of keys and values; by default as many as of queries."
        ),
    ] = None,
    param: Annotated[
        list[str] | None,
        typer.Option("--param", help="The value of an Int or a Float, as in left=512. Repeatable."),
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(
            "--target",
            help="GPU target; by default sm_90, or the spec's first if sm_90 is not one.",
            autocompletion=_starting(TARGETS),
        ),
    ] = None,
    form: Annotated[
        str, typer.Option("--form", help="What to explain: dense, or cache for a step of decoding.")
    ] = "dense",
    page_size: Annotated[
        int | None,
        typer.Option("--page-size", help="Keys of a cache's page, 0 for rows; by default 64."),
    ] = None,
    num_splits: Annotated[
        int | None,
        typer.Option("--num-splits", help="Programs that share a sequence's keys, for cache."),
    ] = None,
    sms: Annotated[
        int | None,
        typer.Option("--sms", help="SMs of the GPU, for cache; by default the target's."),
    ] = None,
    out: Out = Path("generated"),
    json: Annotated[
        Path | None,
        typer.Option(
            "--json", help="Write the account here; - writes it, and nothing else, to stdout."
        ),
    ] = None,
    html: Annotated[
        Path | None,
        typer.Option("--html", help="Write a page here, with a slider over sequence lengths."),
    ] = None,
    svg: Annotated[
        Path | None, typer.Option("--svg", help="Write the picture of the mask here, as SVG.")
    ] = None,
    png: Annotated[
        Path | None, typer.Option("--png", help="Write the picture of the mask here, as PNG.")
    ] = None,
) -> None:
    """Show a variant's mask, bounds, memory, traffic and roofline. No GPU is needed.

    With --form cache: of a step of decoding with a cache, usually of 16 sequences with a query
    each, the splits of the keys and the pages, too.
    """
    from flashgen.console import make_console
    from flashgen.explain.cached import Place
    from flashgen.explain.call import Asked, named_values
    from flashgen.explain.document import to_json
    from flashgen.explain.lengths import explain_lengths
    from flashgen.explain.page import write_page
    from flashgen.explain.png import write_png
    from flashgen.explain.svg import write_svg
    from flashgen.explain.terminal import print_account
    from flashgen.explain.variant import explain as run_explain

    for option, file in (("--html", html), ("--svg", svg), ("--png", png)):
        if file == STDOUT:
            raise FlashgenError(f"{option}=-: only --json writes to stdout; name a file")
    asked = Asked(q_len, kv_len, batch, heads, kv_heads, named_values(param or ()))
    place = Place(page_size, num_splits, sms)
    if form == "cache":
        _refuse("explains the form dense", {"html": html, "svg": svg, "png": png})
        _explain_cached(paths, target, asked, place, json)
        return
    if form != "dense":
        raise FlashgenError(f"--form={form}: nothing to explain; write dense or cache")
    of_cache = {"page-size": page_size, "num-splits": num_splits, "sms": sms}
    _refuse("is for --form cache", of_cache)
    if _explained_linear(paths, target, asked, {"html": html, "svg": svg, "png": png}, json):
        return
    with _for_json_alone(json):
        if html is None:
            accounts = list(run_explain(paths, target, asked, out))
        else:
            series = explain_lengths(paths, target, asked, out)
            accounts = [one.asked for one in series]
            write_page(html, series)
    if svg is not None:
        write_svg(svg, accounts)
    if png is not None:
        write_png(png, accounts)
    if json is not None:
        _write_json(json, to_json(accounts))
    if json != STDOUT:
        console = make_console()
        for account in accounts:
            print_account(console, account)


def _explained_linear(
    paths: list[Path],
    target: str | None,
    asked: Asked,
    pictures: dict[str, Path | None],
    json: Path | None,
) -> bool:
    """Whether the specs are of linear attention, whose accounts are then shown."""
    from flashgen.console import make_console
    from flashgen.explain.document import to_json
    from flashgen.explain.linear import explain_linear, of_linear_attention
    from flashgen.explain.linear_terminal import print_linear
    from flashgen.explain.variant import all_variants

    with _for_json_alone(json):
        variants = of_linear_attention(all_variants(paths, target))
        _refuse("linear attention has no tiles of scores to show", pictures if variants else {})
        accounts = list(explain_linear(variants, target, asked))
    if json is not None and accounts:
        _write_json(json, to_json(accounts, "linear"))
    if json != STDOUT:
        console = make_console()
        for account in accounts:
            print_linear(console, account)
    return bool(variants)


def _refuse(why: str, options: Mapping[str, object]) -> None:
    """Raises for an option that was given, though it has no place here."""
    for option, value in options.items():
        if value is not None:
            raise FlashgenError(f"--{option}={value}: {why}; leave it out")


def _explain_cached(
    paths: list[Path], target: str | None, asked: Asked, place: Place, json: Path | None
) -> None:
    from flashgen.console import make_console
    from flashgen.explain.cached import explain_cached
    from flashgen.explain.cached_terminal import print_cached
    from flashgen.explain.document import to_json

    with _for_json_alone(json):
        accounts = list(explain_cached(paths, target, asked, place))
    if json is not None:
        _write_json(json, to_json(accounts, "cache"))
    if json != STDOUT:
        console = make_console()
        for account in accounts:
            print_cached(console, account)


@app.command("list")
def list_(out: Out = Path("generated")) -> None:
    """List the generated modules."""
    from flashgen.console import list_table, make_console
    from flashgen.inventory import list_modules

    modules = list_modules(out)
    if not modules:
        typer.echo(f"no generated modules in {out}")
        return
    make_console().print(list_table(modules))


@app.command()
def clean(out: Out = Path("generated")) -> None:
    """Remove the generated modules; measured results, in tuning/, stay."""
    from flashgen.inventory import remove_modules

    removed = remove_modules(out)
    modules = "module" if len(removed) == 1 else "modules"
    typer.echo(f"removed {len(removed)} {modules} from {out}")


cache_app = typer.Typer(
    help="The modules that flashgen.compile keeps.", no_args_is_help=True, rich_markup_mode=None
)
app.add_typer(cache_app, name="cache")


@cache_app.command("list")
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


@cache_app.command()
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


@app.command()
def bench(
    name: Annotated[str, typer.Argument(help="The name of a variant.", autocompletion=_modules)],
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

    with _for_json_alone(json):
        rows = run_bench(name, specs, out)
    if json != STDOUT:
        make_console().print(bench_table(rows))
    if json is not None:
        _write_json(json, to_json(rows))


@app.command()
def export(
    names: Annotated[
        list[str],
        typer.Argument(help="Names of modules.", metavar="MODULES...", autocompletion=_modules),
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
    """Pack modules for others, who need torch and triton but not flashgen."""
    from flashgen.export import Package, export_hub, export_wheel

    if hub is None and wheel is None:
        raise FlashgenError("export: nowhere to; pass --hub DIR, --wheel DIR, or both")
    package = Package(names, out, name, version, license_id)
    for write, folder in ((export_hub, hub), (export_wheel, wheel)):
        if folder is not None:
            typer.echo(write(package, folder))


def _for_json_alone(json: Path | None) -> AbstractContextManager[Any]:
    """Where stdout is for JSON, what specs print goes to stderr."""
    return redirect_stdout(sys.stderr) if json == STDOUT else nullcontext()


def _write_json(path: Path, text: str) -> None:
    """Writes the data that a command was asked for, to stdout or to a file."""
    if path == STDOUT:
        typer.echo(text, nl=False)
    else:
        from flashgen.files import write_atomically

        write_atomically(path, text, "choose another place with --json")
