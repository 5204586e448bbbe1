"""Packed sequences as text, in colour in a terminal or plain in a pipe."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from rich.console import Console, RenderableType
from rich.text import Text

from flashgen.explain.packed import PackedAccount
from flashgen.explain.terminal import print_sections, runs_of_keys, simple_table, visible_keys
from flashgen.explain.words import bytes_text, heads_text, time_text


def print_packed(console: Console, account: PackedAccount) -> None:
    """Prints an account, section by section."""
    print_sections(console, _sections(account))


def _sections(account: PackedAccount) -> Iterator[tuple[str, Iterable[RenderableType]]]:
    said = [*_call(account), *(f"{name}: {value}" for name, value in account.call.params)]
    yield f"{account.variant}, varlen, on {account.target} ({account.gpu})", map(Text, said)
    yield f"Mask: {account.label}", _mask(account)
    kernel = "Gluon" if account.kernel == "hopper" else "Portable"
    yield f"{kernel} kernel: {account.config}", map(Text, _kernel(account))
    yield "Tiles", map(Text, _tiles(account))
    yield "Traffic and arithmetic", _traffic(account)


def _call(account: PackedAccount) -> Iterator[str]:
    sequences = account.sequences
    if sequences.shortest == sequences.longest:
        each = f"{sequences.longest:,} queries"
    else:
        each = f"{sequences.shortest:,} to {sequences.longest:,} queries"
    keys = "" if sequences.keys == sequences.queries else f" and {sequences.keys:,} keys"
    count = "1 sequence" if sequences.count == 1 else f"{sequences.count:,} sequences"
    yield f"{count} of {each}: {sequences.queries:,} queries{keys}"
    yield heads_text(account)


def _mask(account: PackedAccount) -> Iterator[RenderableType]:
    yield from visible_keys(account.conditions)
    yield from runs_of_keys(account.runs)


def _kernel(account: PackedAccount) -> Iterator[str]:
    if account.without:
        yield f"Without the Gluon kernel: {account.without}"
    programs, busiest = account.balance.programs, account.balance.busiest
    yield f"{programs} programs; the busiest visits {busiest:.2f} times the mean of all"


def _tiles(account: PackedAccount) -> Iterator[str]:
    tiles, config = account.tiles, account.config
    visited = tiles.unmasked + tiles.masked
    yield (
        f"{tiles.of_queries:,} tiles of {config.BLOCK_M} queries for each head; "
        f"{tiles.empty_rows:.1%} of their rows are empty"
    )
    yield (
        f"all heads visit {visited:,} tiles of {config.BLOCK_N} keys, {tiles.unmasked:,} of them "
        "without a mask"
    )
    if visited:
        yield (
            f"padded to the longest, a dense call visits {tiles.padded:,}: "
            f"{tiles.padded / visited:.2f} times as many"
        )


def _traffic(account: PackedAccount) -> Iterator[RenderableType]:
    columns = ("GFLOP", "10^9 exponentials", "L2", "DRAM")
    table = simple_table(*columns, right=columns)
    table.add_row(
        f"{account.flops / 1e9:,.1f}",
        f"{account.exponentials / 1e9:,.2f}",
        bytes_text(account.l2),
        bytes_text(account.dram),
    )
    yield table
    yield Text()
    units = ", ".join(f"{unit} {time_text(s)}" for unit, s in account.seconds.items())
    yield Text(f"At the peak rates of the target, each unit by itself: {units}.")
    least, busiest = account.roofline, account.balance.busiest
    uneven = account.bound in ("compute", "exponentials") and busiest >= 1.005
    more = f", and {time_text(least * busiest)} for the busiest program" if uneven else ""
    yield Text(f"The limit is {account.bound}: {time_text(least)}{more}.")
