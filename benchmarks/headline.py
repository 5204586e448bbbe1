"""The one table of speed in README.md: each attention at the longest sequence, both passes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from statistics import mean

from benchmarks.figures import OWN, RIVAL, Document, Row, is_own, machine, rate, ratio
from benchmarks.markdown import header, line

PASSES = ("forward", "backward")


def headline_table(results: Mapping[str, Document]) -> str:
    """A row for each attention, with the rate and two ratios of times for each pass, by medians.

    Empty if the forward pass, the variants or the backward pass have no results.
    """
    if not {"forward", "variants", "backward"} <= results.keys():
        return ""
    grid = _longest(results["forward"])
    variants = [
        row for row in results["variants"]["cells"] if row["mask"] not in ("full", "causal")
    ]
    backward = {row["cell"]: row for row in results["backward"]["cells"]}
    columns = [name for of in PASSES for name in (f"{of} TFLOP/s", "vs Flex", "vs best other")]
    lines = header(["attention", *columns])
    for title, row in (*_named(grid), *((row["title"], row) for row in variants)):
        figures = [*_figures(row), *_figures(backward.get(row["cell"]))]
        lines.append(line([title, *figures]))
    said = (
        f"Rates are TFLOP/s on visible elements; ratios say how many times as fast as "
        f"{RIVAL} (Flex), and as the best other library, {OWN} is. {grid[0]['seq_len']} tokens, "
        f"{grid[0]['dtype']}, medians; head_dim {variants[0]['head_dim'][0]} where none is named. "
        f"{_machines(results)}."
    )
    return "\n".join([*lines, "", said])


def _machines(results: Mapping[str, Document]) -> str:
    """The machines of the passes, named once if they differ in the date only."""
    said: dict[str, list[str]] = {}
    for of in PASSES:
        where, _, date = machine(results[of]).rpartition(", ")
        said.setdefault(where, []).append(f"{of} {date}")
    return "; ".join(f"{where}, {', '.join(dates)}" for where, dates in said.items())


def _longest(document: Document) -> list[Row]:
    """The cells of the grid with the longest sequences."""
    rows = [row for row in document["cells"] if row["in_grid"]]
    longest = max(row["seq_len"] for row in rows)
    return [row for row in rows if row["seq_len"] == longest]


def _named(rows: list[Row]) -> Iterator[tuple[str, Row]]:
    for row in rows:
        yield f"{row['mask']}, head_dim {row['head_dim'][0]}", row


def _figures(row: Row | None) -> list[str]:
    if row is None:
        return ["-"] * 3
    own = rate(row, OWN)
    times = [ratio(row, RIVAL), ratio(row, best_other(row))]
    return [f"{own:.0f}" if own else "-", *(f"{x:.2f}" if x else "-" for x in times)]


def best_other(row: Row) -> str | None:
    """The fastest library besides FlexAttention; None without one."""
    others = {
        peer: mean(ms)
        for peer, ms in row["ms"].items()
        if ms and peer != RIVAL and not is_own(peer)
    }
    return min(others, key=lambda peer: others[peer]) if others else None
