"""Tables of a run over drawn cells: shares, groups, and the worst cells."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from benchmarks.figures import Document, Row, geometric_mean, machine
from benchmarks.markdown import header, line

WORST = 10

#: The lines of the table of groups; a cell may be in several.
GROUPED: dict[str, Callable[[Row], bool]] = {
    "S up to 512": lambda row: row["seq_len"] <= 512,
    "S 777 to 2048": lambda row: 512 < row["seq_len"] <= 2048,
    "S from 3000": lambda row: row["seq_len"] > 2048,
    "fp16": lambda row: row["dtype"] == "float16",
    "d=192": lambda row: row["head_dim"][0] == 192,
    "windows": lambda row: row["kind"] == "window",
    "softcap, ALiBi, packed": lambda row: row["kind"] in ("softcap", "alibi", "packed"),
    "grouped heads": lambda row: row["num_heads"] > row["num_kv_heads"],
    "normal inputs": lambda row: row["inputs"] == "normal",
    "q x3": lambda row: row["inputs"] == "scaled:3",
    "q x8": lambda row: row["inputs"] == "scaled:8",
    "spike": lambda row: row["inputs"] == "spike",
}


def drawn_table(document: Document) -> str:
    """The tables of a run."""
    rows = document["cells"]
    measured = [row for row in rows if row["ratio"] is not None]
    seeds = ", ".join(dict.fromkeys(str(row["seed"]) for row in rows))
    which = "Backward" if document.get("benchmark") == "anywhere-backward" else "Forward"
    said = f"{which}, cells drawn at random (seed {seeds}), {len(measured)} of {document['drawn']}"
    parts = [
        f"{said} measured; flashgen beside the quickest of its peers in each, medians of turns; "
        f"{machine(document)}."
    ]
    if measured:
        parts += ["\n".join(_shares(rows)), _groups_table(rows), _worst_table(measured)]
    parts += list(_exceptions(document))
    return "\n\n".join(parts)


def joined(documents: Sequence[Document]) -> Document:
    """Joins runs over several seeds, or parts of a run; for each cell the last row counts.

    The environment is that of the last document.

    Raises:
        ValueError: the runs are of different passes.
    """
    if len({one.get("benchmark") for one in documents}) > 1:
        raise ValueError("a run of the forward pass and one of the backward pass are two tables")
    rows = {(row["seed"], row["number"]): row for one in documents for row in one["cells"]}
    drawn: dict[str, int] = {}
    for one in documents:
        for seed, count in one["seeds"].items():
            drawn[seed] = max(count, drawn.get(seed, 0))
    cells = [rows[at] for at in sorted(rows)]
    total = sum(drawn.values())
    left = total - len(cells)
    return {**documents[-1], "seeds": drawn, "drawn": total, "left": left, "cells": cells}


def _shares(rows: Iterable[Row]) -> list[str]:
    """Shares of all cells that can be compared; a cell that is wrong, or fails, is behind."""
    compared = [row for row in rows if _counts(row)]
    ratios = {row["cell"]: row["ratio"] for row in compared if row["ratio"] is not None}
    least = min(ratios, key=lambda cell: ratios[cell])
    lines = [
        f"- at {limit:.2f} or more: {found} of {len(compared)} ({found / len(compared):.0%})"
        for limit in (1.00, 0.95)
        for found in [sum(ratio >= limit for ratio in ratios.values())]
    ]
    return [
        *lines,
        f"- geometric mean {geometric_mean(list(ratios.values())):.3f}",
        f"- least {ratios[least]:.3f} ({least})",
    ]


def _counts(row: Row) -> bool:
    return row["ratio"] is not None or bool(row["wrong"])


def _groups_table(rows: Sequence[Row]) -> str:
    lines = header(["", "geometric mean", "least", "ahead"])
    for name, belongs in GROUPED.items():
        group = [row for row in rows if _counts(row) and belongs(row)]
        ratios = [row["ratio"] for row in group if row["ratio"] is not None]
        if ratios:
            ahead = sum(ratio >= 1 for ratio in ratios)
            mean = f"{geometric_mean(ratios):.2f}"
            lines.append(line([name, mean, f"{min(ratios):.2f}", f"{ahead} of {len(group)}"]))
    return "\n".join(lines)


def _worst_table(measured: Sequence[Row]) -> str:
    lines = header(["the worst", "seed", "flashgen ms", "best peer", "its ms", "ratio"])
    for row in sorted(measured, key=lambda row: row["ratio"])[:WORST]:
        own, peer = row["median_ms"]["flashgen"], row["median_ms"][row["best"]]
        shown = [str(row["seed"]), f"{own:.4g}", row["best"], f"{peer:.4g}", f"{row['ratio']:.3f}"]
        lines.append(line([row["cell"], *shown]))
    return "\n".join(lines)


def _unavailable(rows: Iterable[Row]) -> dict[tuple[str, str], tuple[int, str]]:
    """The number of cells that each peer cannot run, by reason, and an example."""
    found: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        for why in row["unavailable"].items():
            found.setdefault(why, []).append(row["cell"])
    return {why: (len(cells), cells[0]) for why, cells in found.items()}


def _exceptions(document: Document) -> Iterable[str]:
    rows = document["cells"]
    for title, lines in {
        "WRONG, and not timed:": [
            f"- {row['cell']}: {row['wrong']}" for row in rows if row["wrong"]
        ],
        "No peer has them:": [
            f"- {row['cell']}" for row in rows if row["ratio"] is None and not row["wrong"]
        ],
        "Peers that cannot:": [
            f"- {peer}, {reason}: {cells} cell{'s' * (cells > 1)}, such as {example}"
            for (peer, reason), (cells, example) in _unavailable(rows).items()
        ],
    }.items():
        if lines:
            yield title
            yield "\n".join(lines)
    if document["left"]:
        yield f"{document['left']} cells of the draw were left: not asked for, or out of time."
