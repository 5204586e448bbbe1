"""A step of decoding as text, in colour in a terminal or plain in a pipe."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from rich.console import Console, RenderableType
from rich.text import Text

from flashgen.explain.cached import CacheAccount
from flashgen.explain.terminal import print_sections, runs_of_keys, simple_table, visible_keys
from flashgen.explain.words import bytes_text, call_text, time_text


def print_cached(console: Console, account: CacheAccount) -> None:
    """Prints an account, section by section."""
    print_sections(console, _sections(account))


def _sections(account: CacheAccount) -> Iterator[tuple[str, Iterable[RenderableType]]]:
    said = [call_text(account), *(f"{name}: {value}" for name, value in account.call.params)]
    yield f"{account.variant}, cache, on {account.target} ({account.gpu})", map(Text, said)
    yield f"Mask: {account.label}", _mask(account)
    yield f"Cache kernel: {account.config}, by model", map(Text, _kernel(account))
    yield "Splits", map(Text, _splits(account))
    if account.pages is not None:
        yield "Pages", map(Text, _pages(account))
    yield "Traffic and arithmetic", _traffic(account)
    if account.remarks:
        yield "Not in this account", map(Text, account.remarks)


def _mask(account: CacheAccount) -> Iterator[RenderableType]:
    yield from visible_keys(account.conditions)
    yield from runs_of_keys(account.runs)
    if account.decided:
        yield Text(
            "Of these tiles of keys each call visits those that some query sees: a kernel decides "
            "which. What follows counts all of them."
        )


def _kernel(account: CacheAccount) -> Iterator[str]:
    yield f"{account.shared:,} bytes of shared memory of {account.limit:,}"
    yield f"{bytes_text(account.ahead)} of keys and values on their way to an SM at any time"


def _splits(account: CacheAccount) -> Iterator[str]:
    splits, call = account.splits, account.call
    busy = "" if splits.busy == splits.programs else f", {splits.busy:,} of them with keys to read"
    yield (
        f"{splits.programs:,} programs{busy}: {splits.sms} SMs, {splits.programs_of_an_sm} on each "
        "at once"
    )
    visits = f"{splits.tiles_of_keys[0]:,}"
    if len(set(splits.tiles_of_keys)) > 1:
        visits = f"{min(splits.tiles_of_keys):,} to {max(splits.tiles_of_keys):,}"
    tiles = splits.tiles_of_queries
    yield (
        f"{call.batch * call.num_kv_heads * tiles:,} tiles of queries: {call.batch} sequences x "
        f"{call.num_kv_heads} key heads x {tiles}; each visits {visits} tiles of keys"
    )
    if splits.most == 1:
        yield "each is computed by one program, and nothing is merged"
    else:
        each = f"{splits.least} to {splits.most}" if splits.least < splits.most else splits.most
        yield f"each is computed by {each} programs; the parts of {splits.merged:,} are merged"
    yield f"the busiest program has {splits.busiest:.2f} times the mean of all"


def _pages(account: CacheAccount) -> Iterator[str]:
    assert account.pages is not None
    size, held, read = account.pages.size, account.pages.held, account.pages.read
    keys = "key" if size == 1 else "keys"
    yield f"{held:,} pages of {size} {keys} for each sequence, of which {read:,} are read"
    if read < held:
        yield f"{held - read:,} hold no key that a query sees, and can be given back"


def _traffic(account: CacheAccount) -> Iterator[RenderableType]:
    table = simple_table("", "L2", "DRAM", right=("L2", "DRAM"))
    rows = (
        ("keys and values", account.keys_l2, account.keys_dram),
        ("queries, outputs, lengths and pages", account.others, account.others),
        ("partial results, written and read", account.partial, 0),
    )
    for name, l2, dram in rows:
        table.add_row(name, bytes_text(l2), bytes_text(dram))
    yield table
    yield Text()
    units = ", ".join(f"{unit} {time_text(s)}" for unit, s in account.seconds.items())
    yield Text(f"At the peak rates of the target, each unit by itself: {units}.")
    rate = account.keys_dram / account.roofline / 1e12
    yield Text(
        f"The limit is {account.bound}: {time_text(account.roofline)}, or {rate:.2f} TB/s of keys "
        "and values."
    )
