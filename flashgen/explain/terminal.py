"""An account as text, in colour in a terminal or plain in a pipe."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal

from rich import box
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from flashgen.explain.account import Account, Kernel, MaskAccount, Run, Work
from flashgen.explain.picture import MASKED, SKIPPED, UNMASKED, Picture
from flashgen.explain.words import (
    by_reason,
    bytes_text,
    call_text,
    first_of_each,
    time_text,
    training_text,
)

#: The most letters of a picture's row; a letter is about twice as high as wide.
COLUMNS = 64

_BAR, _INDENT = 24, 2

#: The letters of cells, for consoles with more than ASCII and for others, and their colours.
_CELLS: Mapping[str, tuple[str, str, str]] = {
    SKIPPED: ("·", ".", "bright_black"),
    MASKED: ("▒", "x", "yellow"),
    UNMASKED: ("█", "#", "blue"),
}
_BLOCKS = ("█", "·"), ("#", ".")


def print_account(console: Console, account: Account) -> None:
    """Prints an account, section by section."""
    plain = not console.encoding.lower().startswith("utf")
    print_sections(console, _sections(account, console.width - _INDENT, plain))


def print_sections(
    console: Console, sections: Iterable[tuple[str, Iterable[RenderableType]]]
) -> None:
    """Prints titles, each with what is below it."""
    with console.capture() as captured:
        for title, body in sections:
            console.print(Text(title, style="bold"))
            console.print(Padding(Group(*body), (0, 0, 1, _INDENT), expand=False))
    # rich fills lines up with spaces, which are useless in a pipe.
    for line in captured.get().splitlines():
        console.file.write(line.rstrip() + "\n")


def _sections(
    account: Account, width: int, plain: bool
) -> Iterator[tuple[str, Iterable[RenderableType]]]:
    said = [
        call_text(account),
        *([f"weights: {account.weights}"] if account.weights else []),
        *(f"{name}: {value}" for name, value in account.call.params),
    ]
    yield f"{account.variant} on {account.target} ({account.gpu})", map(Text, said)
    yield f"Mask: {account.mask.label}", _mask(account.mask, max(1, min(COLUMNS, width)), plain)
    for kernel in account.kernels:
        yield _heading(kernel), _kernel(kernel, plain)
    if account.without:
        yield "No Gluon kernel", [Text(account.without)]
    yield "Traffic and arithmetic", _traffic(account, width)
    if account.measured:
        yield "Measured", _measured(account, width)
    if account.remarks:
        yield "Not in this account", map(Text, account.remarks)


def _mask(mask: MaskAccount, columns: int, plain: bool) -> Iterator[RenderableType]:
    yield from visible_keys(mask.conditions)
    if mask.listed:
        seen, full = mask.listed
        yield Text("Tiles are listed once a call, by the table of blocks:")
        yield Text(f"    visited where {seen}")
        yield Text(f"    unmasked where {full}")
    elif mask.decided:
        seen, full = mask.decided
        yield Text("Tiles are decided once a call, by their elements where this leaves them open:")
        yield Text(f"    not visited unless {seen}")
        yield Text(f"    unmasked where {full}")
    else:
        yield Text("The queries q_first to q_last of a tile:")
    for run in mask.runs:
        when = f", where {run.condition}" if run.condition else ""
        yield Text(f"    some see the keys from {run.begin} to before {run.end}{when}")
        yield Text(f"    all see those from {run.full_begin} to before {run.full_end}")
    yield from (Text(f"{table}.") for table in mask.tables)
    if mask.rows_can_be_empty:
        yield Text("A query may be left without a key: the kernel has a guard.")
    yield from (Text(said) for said in _notes(mask))
    yield Text()
    small = mask.picture.scaled(max(1, columns // 2), columns)
    yield from _picture(small, columns, plain)
    yield Text()
    yield _legend(mask, small, plain)
    yield Text(_visible(mask))


def _notes(mask: MaskAccount) -> Iterator[str]:
    """What bounds leave out, or what decides tiles in their place."""
    for note in mask.notes:
        yield f"{note[0].upper()}{note[1:]}."


def visible_keys(conditions: tuple[str, ...]) -> Iterator[Text]:
    """Which keys a query sees."""
    if conditions:
        yield Text("A query sees the keys where")
        yield from (Text(f"    {condition}") for condition in conditions)
    else:
        yield Text("A query sees every key.")


def runs_of_keys(runs: Iterable[Run]) -> Iterator[Text]:
    """Which keys a tile of queries visits."""
    yield Text("The queries q_first to q_last of a tile:")
    for run in runs:
        when = f", where {run.condition}" if run.condition else ""
        yield Text(f"    visit the keys from {run.begin} to before {run.end}{when}")


def _picture(picture: Picture, columns: int, plain: bool) -> Iterator[Text]:
    """Two letters for each cell where there is room: a cell is about as high as wide then."""
    letters = 2 if 2 * len(picture.rows[0]) <= columns else 1
    for row in picture.rows:
        line = Text()
        for kind in row:
            symbol, ascii_symbol, colour = _CELLS[kind]
            line.append((ascii_symbol if plain else symbol) * letters, colour)
        yield line


def _legend(mask: MaskAccount, shown: Picture, plain: bool) -> Text:
    line = Text()
    for kind, name in ((UNMASKED, "unmasked"), (MASKED, "masked"), (SKIPPED, "skipped")):
        symbol, ascii_symbol, colour = _CELLS[kind]
        line.append(ascii_symbol if plain else symbol, colour)
        line.append(f" {name}  ")
    line.append(f"queries down, keys across; a cell is {shown.block_m} x {shown.block_n}")
    return line


def _visible(mask: MaskAccount) -> str:
    total = sum(mask.tiles.values())
    visited = total - mask.tiles["skipped"]
    about = "" if mask.rows_counted is None else f" (counted over {mask.rows_counted:,} queries)"
    return (
        f"visible: {mask.share:.3%} of the elements{about}; "
        f"visited: {visited / total:.3%} of {total:,} tiles of a head, "
        f"{mask.tiles['unmasked']:,} unmasked and {mask.tiles['masked']:,} masked"
    )


def _heading(kernel: Kernel) -> str:
    return f"Shared memory, {kernel.form} kernel: {kernel.config}, {kernel.chosen}"


def _kernel(kernel: Kernel, plain: bool) -> Iterator[RenderableType]:
    table = simple_table("buffer", "", "bytes", "formula", right=("bytes",))
    for buffer in kernel.buffers:
        bar = _bar(buffer.bytes / kernel.limit, plain)
        table.add_row(buffer.name, bar, f"{buffer.bytes:,}", buffer.formula)
    used = _bar(kernel.shared / kernel.limit, plain)
    table.add_row("total", used, f"{kernel.shared:,}", f"of {kernel.limit:,} that a block gets")
    yield table
    yield Text()
    if kernel.seconds is not None:
        waits = f", waiting for {kernel.waits_for}" if kernel.waits_for else ""
        yield Text(f"The model that ranks candidates expects {time_text(kernel.seconds)}{waits}.")
    yield Text(
        f"{kernel.looked_at} configurations looked at, {kernel.candidates} left to choose from, "
        f"{len(kernel.rejected)} rejected{':' if kernel.rejected else '.'}"
    )
    for reason, configs in by_reason(kernel):
        yield Text(f"    {reason}", style="bright_black")
        yield Text(f"        {', '.join(configs)}", style="bright_black")


def _bar(share: float, plain: bool) -> str:
    full, rest = _BLOCKS[plain]
    length = min(_BAR, round(share * _BAR))
    return full * length + rest * (_BAR - length)


def _traffic(account: Account, width: int) -> Iterator[RenderableType]:
    yield Text("At the peak rates of the target, each unit by itself:")
    yield from _units(account.works, width)
    yield Text()
    yield Text(f"Bytes; products take longer than DRAM from {account.crossover:,.0f} FLOP/B on:")
    yield from _moved(account.works, width)
    yield Text()
    for work in first_of_each(account.works):
        problem = f"; {work.problem}" if work.problem else ""
        yield Text(f"{work.name}: {work.said}{problem}")
    steps = training_text(account)
    yield Text(f"Both passes, between SMs and memory: {steps}.")


def _units(works: tuple[Work, ...], width: int) -> Iterator[RenderableType]:
    """The time of each unit for each way to compute the call; the longest is the roofline."""
    units = tuple(works[0].seconds)
    rows: list[list[str | Text]] = []
    for work in works:
        times = [
            Text(time_text(seconds), style="bold" if unit == work.bound else "")
            for unit, seconds in work.seconds.items()
        ]
        bound = "does not fit" if work.problem else work.bound
        rows.append([work.name, work.tile, f"{work.flops / 1e9:,.1f}", *times, bound])
    columns = ["", "tile", "GFLOP", *units, "bound by"]
    return _tables(columns, rows, width, right=("GFLOP", *units))


def _moved(works: Iterable[Work], width: int) -> Iterator[RenderableType]:
    """The bytes that each way to compute the call reads and writes."""
    columns = ["L2 read", "L2 written", "DRAM read", "DRAM written", "FLOP/B of DRAM"]
    rows: list[list[str | Text]] = []
    for work in works:
        numbers = (work.l2_read, work.l2_written, work.dram_read, work.dram_written)
        rows.append([work.name, *map(bytes_text, numbers), f"{work.intensity:,.0f}"])
    return _tables(["", *columns], rows, width, right=columns)


def _measured(account: Account, width: int) -> Iterator[RenderableType]:
    right = ("ms", "TFLOP/s", "roofline, ms", "reached")
    rows: list[list[str | Text]] = [
        [
            m.form,
            f"{m.batch} x {m.heads} heads, {m.length:,}",
            f"{m.ms:.3g}",
            f"{m.tflops:.0f}",
            f"{m.roofline_ms:.3g}",
            m.bound,
            f"{m.share:.0%}",
            f"{m.gpu}, Triton {m.triton}",
        ]
        for m in account.measured
    ]
    columns = ["kernel", "call", *right[:3], "bound by", "reached", "on"]
    return _tables(columns, rows, width, right=right)


def _tables(
    columns: Sequence[str],
    rows: Sequence[Sequence[str | Text]],
    width: int,
    right: Iterable[str] = (),
) -> Iterator[RenderableType]:
    """A table, or, where it is too wide, several of some columns each beside the first."""
    widths = [
        max(len(column), *(len(row[i]) for row in rows)) + 1 for i, column in enumerate(columns)
    ]
    groups = _groups(widths, width)
    # As many tables, and as narrow as so many can be.
    groups = next(of for w in range(width + 1) if len(of := _groups(widths, w)) == len(groups))
    for number, group in enumerate(groups):
        table = simple_table(*(columns[i] for i in (0, *group)), right=right)
        for row in rows:
            table.add_row(*(row[i] for i in (0, *group)))
        if number:
            yield Text()
        yield table


def _groups(widths: Sequence[int], width: int) -> list[list[int]]:
    """The columns but the first, in groups that fit beside it."""
    groups: list[list[int]] = [[]]
    for i in range(1, len(widths)):
        if groups[-1] and sum(widths[j] + 1 for j in (0, *groups[-1], i)) > width:
            groups.append([])
        groups[-1].append(i)
    return groups


def simple_table(*columns: str, right: Iterable[str] = ()) -> Table:
    """A table whose columns stand apart; those in `right` are numbers."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    for column in columns:
        justify: Literal["left", "right"] = "right" if column in right else "left"
        table.add_column(column, justify=justify, no_wrap=column not in ("formula", "on"))
    return table
