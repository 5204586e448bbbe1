"""The worst of the inputs: speed in tables if q and k are not standard normal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from benchmarks.figures import (
    OF_NORMAL,
    OTHERS,
    OWN,
    TIMINGS,
    Document,
    Row,
    best_peer,
    inputs_of,
    rates,
    ratio,
    timings,
)
from benchmarks.markdown import header, line


def worst_columns(document: Document) -> list[str]:
    """The names of the columns for the worst of the inputs; none without other inputs."""
    named = ["worst inputs, of normal", "worst inputs, to the best"]
    return named if document.get(OTHERS) else []


def worst_fields(document: Document, rows: Iterable[Row]) -> list[str]:
    """The entries of these columns for cells that share a line, by medians."""
    if not document.get(OTHERS):
        return []
    shown: list[list[str]] = [[], []]
    for row in rows:
        others = [other for other in document[OTHERS] if other["cell"] == row["cell"]]
        for column, values in zip(shown, (_to_normal(others), _to_best(others)), strict=True):
            column.append(f"{min(values.values()):.2f}" if values else "-")
    return [" / ".join(column) for column in shown]


def worst_line(document: Document, rows: Iterable[Row]) -> list[str]:
    """A line for a list: the least ratio over these cells, and its cell; none without others."""
    cells = {row["cell"] for row in rows}
    others = [row for row in document.get(OTHERS, ()) if row["cell"] in cells]
    said = []
    for values, what in (
        (_to_normal(others), "of the rate with normal ones"),
        (_to_best(others), "times the best peer"),
    ):
        if values:
            least = min(values, key=lambda at: values[at])
            said.append(f"{values[least]:.2f} {what} ({', '.join(least)})")
    names = ", ".join(dict.fromkeys(inputs_of(row) for row in others))
    return [f"- With other inputs ({names}), by medians, at least {' and '.join(said)}."] * bool(
        said
    )


def inputs_table(document: Document) -> str:
    """All cells with all other inputs; nothing without other inputs."""
    rows: Sequence[Row] = document.get(OTHERS, ())
    if not rows:
        return ""
    by = timings(rows)
    columns = [f"{OWN}, {TIMINGS[t]}" for t in by] + [f"of normal, {TIMINGS[t]}" for t in by]
    columns += ["best peer, medians", *(f"{OWN} / best, {TIMINGS[t]}" for t in by), "error"]
    lines = header(["cell", "inputs", *columns], left=2)
    for row in rows:
        shown = [" ".join(f"{x:.0f}" for x in rates(row, OWN, t)) or "-" for t in by]
        shown += [_times(row[OF_NORMAL].get(t)) for t in by]
        shown.append(best_peer(row) or "-")
        shown += [_times(ratio(row, best_peer(row, t), t)) for t in by]
        error = f"{row['error'][OWN]:.2e}" if OWN in row["error"] else "-"
        lines.append(line([row["cell"], inputs_of(row), *shown, error]))
    return "\n".join(lines)


def _to_normal(others: Iterable[Row]) -> dict[tuple[str, str], float]:
    """By cell and inputs."""
    return {
        (row["cell"], inputs_of(row)): row[OF_NORMAL]["ms"]
        for row in others
        if "ms" in row[OF_NORMAL]
    }


def _to_best(others: Iterable[Row]) -> dict[tuple[str, str], float]:
    """By cell and inputs."""
    found = {(row["cell"], inputs_of(row)): ratio(row, best_peer(row)) for row in others}
    return {at: value for at, value in found.items() if value is not None}


def _times(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
