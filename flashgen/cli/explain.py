"""flashgen explain."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flashgen.budget.targets import TARGETS
from flashgen.cli.options import STDOUT, Out, Specs, for_json_alone, starting, write_json
from flashgen.config import LONGEST
from flashgen.errors import FlashgenError

if TYPE_CHECKING:
    from rich.console import Console

    from flashgen.explain.cached import Place
    from flashgen.explain.call import Asked
    from flashgen.explain.packed import Packing


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
            autocompletion=starting(TARGETS),
        ),
    ] = None,
    form: Annotated[
        str,
        typer.Option(
            "--form",
            help="What to explain: dense, varlen (packed sequences) or cache (a step of decoding).",
        ),
    ] = "dense",
    lengths: Annotated[
        str | None,
        typer.Option("--lengths", help="Queries of each sequence, as in 4096,16x256, for varlen."),
    ] = None,
    kv_lengths: Annotated[
        str | None,
        typer.Option("--kv-lengths", help="Keys of each sequence; by default as many as queries."),
    ] = None,
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
        typer.Option("--sms", help="SMs of the GPU, for both forms; by default the target's."),
    ] = None,
    ranks: Annotated[
        int | None,
        typer.Option("--ranks", help="GPUs that share a sequence: what each computes and gets."),
    ] = None,
    ranks_per_host: Annotated[
        int | None,
        typer.Option("--ranks-per-host", help="Ranks that NVLink joins; by default 8."),
    ] = None,
    strategy: Annotated[
        str | None,
        typer.Option(
            "--strategy",
            help="Of --ranks: all-to-all, all-gather, ring or ulysses; by default the fastest.",
        ),
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

    With --form varlen: of packed sequences, the tiles of all and how evenly programs share them.
    With --form cache: of a step of decoding with a cache, usually of 16 sequences with a query
    each, the splits of the keys and the pages, too.
    With --ranks: of one sequence on several GPUs, what each computes and what travels.
    """
    from flashgen.console import make_console
    from flashgen.explain.cached import Place
    from flashgen.explain.call import Asked, named_values
    from flashgen.explain.document import to_json
    from flashgen.explain.lengths import explain_lengths
    from flashgen.explain.packed import Packing
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
    if form not in ("dense", "varlen", "cache"):
        raise FlashgenError(f"--form={form}: nothing to explain; write dense, varlen or cache")
    if ranks is not None:
        _refuse("--ranks has no such file", {"html": html, "svg": svg, "png": png})
        _refuse("is for --form varlen and --form cache", {"sms": sms})
        _refuse("--ranks explains the form mesh", {"form": form if form != "dense" else None})
        _explain_ranks(paths, target, asked, ranks, ranks_per_host, strategy, json)
        return
    _refuse("is for --ranks", {"ranks-per-host": ranks_per_host, "strategy": strategy})
    if form != "dense":
        _refuse("explains the form dense", {"html": html, "svg": svg, "png": png})
    else:
        _refuse("is for --form varlen and --form cache", {"sms": sms})
    if form != "cache":
        _refuse("is for --form cache", {"page-size": page_size, "num-splits": num_splits})
    if form != "varlen":
        _refuse("is for --form varlen", {"lengths": lengths, "kv-lengths": kv_lengths})
    else:
        sizes = {"q-len": q_len, "kv-len": kv_len, "batch": batch}
        _refuse("--form varlen has --lengths", sizes)
        _explain_packed(paths, target, asked, Packing(lengths, kv_lengths, sms), out, json)
        return
    if form == "cache":
        _explain_cached(paths, target, asked, place, json)
        return
    pictures = {"html": html, "svg": svg, "png": png}
    if _explained_linear(paths, target, asked, out, pictures, json):
        return
    with for_json_alone(json):
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
        write_json(json, to_json(accounts))
    if json != STDOUT:
        console = make_console()
        for account in accounts:
            print_account(console, account)


def _refuse(why: str, options: Mapping[str, object]) -> None:
    """Raises for an option that was given, though it has no place here."""
    for option, value in options.items():
        if value is not None:
            raise FlashgenError(f"--{option}={value}: {why}; leave it out")


def _explain_cached(
    paths: list[Path], target: str | None, asked: Asked, place: Place, json: Path | None
) -> None:
    from flashgen.explain.cached import explain_cached
    from flashgen.explain.cached_terminal import print_cached

    with for_json_alone(json):
        accounts = list(explain_cached(paths, target, asked, place))
    _show(json, accounts, "cache", print_cached)


def _explained_linear(
    paths: list[Path],
    target: str | None,
    asked: Asked,
    out: Path,
    pictures: dict[str, Path | None],
    json: Path | None,
    packing: Packing | None = None,
) -> bool:
    """Whether the specs are of linear attention, whose accounts are then shown."""
    from flashgen.explain.linear import explain_linear, of_linear_attention
    from flashgen.explain.linear_terminal import print_linear
    from flashgen.explain.variant import all_variants

    with for_json_alone(json):
        variants = of_linear_attention(all_variants(paths, target))
        _refuse("linear attention has no tiles of scores to show", pictures if variants else {})
        accounts = list(explain_linear(variants, target, asked, packing, out))
    if variants:
        _show(json, accounts, "linear", print_linear)
    return bool(variants)


def _explain_packed(
    paths: list[Path],
    target: str | None,
    asked: Asked,
    packing: Packing,
    out: Path,
    json: Path | None,
) -> None:
    from flashgen.explain.packed import explain_packed
    from flashgen.explain.packed_terminal import print_packed

    if _explained_linear(paths, target, asked, out, {}, json, packing):
        return
    with for_json_alone(json):
        accounts = list(explain_packed(paths, target, asked, packing, out))
    _show(json, accounts, "varlen", print_packed)


def _explain_ranks(
    paths: list[Path],
    target: str | None,
    asked: Asked,
    ranks: int,
    ranks_per_host: int | None,
    strategy: str | None,
    json: Path | None,
) -> None:
    from flashgen.distributed.costs import STRATEGIES, Machine
    from flashgen.explain.document import to_json
    from flashgen.ranks import explain_ranks, text_of

    if strategy not in (None, "auto", *STRATEGIES):
        raise FlashgenError(f"--strategy={strategy}: unknown; write one of {', '.join(STRATEGIES)}")
    if ranks_per_host is not None and ranks_per_host < 1:
        raise FlashgenError(f"--ranks-per-host={ranks_per_host}: write a whole number from 1 on")
    machine = Machine(ranks_per_host=ranks_per_host or Machine.ranks_per_host)
    with for_json_alone(json):
        found = list(explain_ranks(paths, target, asked, ranks, machine, strategy or "auto"))
    if json is not None:
        write_json(json, to_json([account for account, _ in found], "mesh"))
    if json != STDOUT:
        for account, text in found:
            typer.echo(text_of(account, text))


def _show(
    json: Path | None, accounts: list[Any], form: str, show: Callable[[Console, Any], None]
) -> None:
    """Writes accounts as JSON where asked to, and to the terminal."""
    from flashgen.console import make_console
    from flashgen.explain.document import to_json

    if json is not None:
        write_json(json, to_json(accounts, form))
    if json != STDOUT:
        console = make_console()
        for account in accounts:
            show(console, account)
