"""The tables of README.md and docs/, made from committed files of results.

    python -m benchmarks.table FILE.json    prints them
    python -m benchmarks.table --write      puts the newest tables into the documents

In a document, a table goes between <!-- benchmark: NAME -->, with a name of `TABLES` or `JOINED`,
and <!-- /benchmark -->.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from benchmarks.account_tables import counters_table, picks_table
from benchmarks.cache import cache_table
from benchmarks.call_tables import decoding_table, launch_table
from benchmarks.drawn_tables import drawn_table
from benchmarks.figures import (
    FA4,
    OWN,
    RIVAL,
    TIMINGS,
    Document,
    Row,
    best_fa4,
    best_peer,
    caption,
    geometric_mean,
    is_own,
    newest_results,
    of_causal,
    of_normal,
    peers_of,
    rate,
    rates,
    ratio,
    timings,
)
from benchmarks.headline import headline_table
from benchmarks.linear_tables import linear_full_table, linear_table
from benchmarks.markdown import header, line
from benchmarks.model_tables import models_table
from benchmarks.serving import serve_table
from benchmarks.tile_tables import tiles_table
from benchmarks.varlen import varlen_table
from benchmarks.worst import (
    inputs_table,
    worst_columns,
    worst_fields,
    worst_line,
)

ROOT = Path(__file__).parent.parent
DOCUMENTS = (ROOT / "README.md", ROOT / "docs" / "performance.md", ROOT / "docs" / "figures.md")

_BLOCK = re.compile(r"(<!-- benchmark: (\w+) -->\n).*?(<!-- /benchmark -->)", re.DOTALL)


def summary_table(document: Document) -> str:
    """The grid: a row for each head dim and mask, with a figure for each sequence length."""
    rows = [row for row in document["cells"] if row["in_grid"]]
    peers, by = peers_of(rows), timings(rows)
    lengths = " / ".join(str(length) for length in sorted({row["seq_len"] for row in rows}))
    against = [f"to the best, {TIMINGS[timing]}" for timing in by]
    lines = [
        f"{_rate_of(document)} at sequence lengths {lengths}, and {OWN}'s ratio to the best peer; "
        f"{caption(document)}.",
        "",
        *header(["head_dim", "mask", *peers, *against, *worst_columns(document)], left=2),
    ]
    for (head_dim, mask), group in groupby(rows, lambda row: (row["head_dim"][0], row["mask"])):
        cells = list(group)
        shown = [" / ".join(_whole(rate(row, peer)) for row in cells) for peer in peers]
        ratios = [" / ".join(_times(_to_best(row, t)) for row in cells) for t in by]
        worst = worst_fields(document, cells)
        lines.append(line([str(head_dim), mask, *shown, *ratios, *worst]))
    summaries = (_summary(rows, timing) for timing in by)
    return "\n".join([*lines, "", *summaries, *worst_line(document, rows)])


def _summary(rows: Sequence[Row], timing: str) -> str:
    """A line with the geometric means of the ratios over the grid, and the least ratios."""
    best = {row["cell"]: value for row in rows if (value := _to_best(row, timing))}
    if not best:
        return f"- By {TIMINGS[timing]}: no peer."
    least = min(best, key=lambda cell: best[cell])
    means = []
    for peer in peers_of(rows):
        ratios = [value for row in rows if not is_own(peer) and (value := ratio(row, peer, timing))]
        if ratios:
            missing = f" in {len(ratios)} of them" if len(ratios) < len(rows) else ""
            means.append(f"{peer} {geometric_mean(ratios):.2f}{missing}")
    return (
        f"- By {TIMINGS[timing]}, geometric mean over {len(best)} cells: "
        f"{geometric_mean(list(best.values())):.3f} times the best peer of each cell "
        f"(least {best[least]:.2f}, {least}); of each peer: {', '.join(means)}."
    )


def full_table(document: Document) -> str:
    """All cells: the figure of each repetition, the errors, and the cost of a BlockMask."""
    rows = document["cells"]
    parts = [f"{caption(document)}. TFLOP/s, the repetitions one after the other."]
    for timing in timings(rows):
        parts += [f"By {TIMINGS[timing]}:", _rates_table(rows, timing)]
    if any(row["in_grid"] for row in rows):
        grid = [row for row in rows if row["in_grid"]]
        parts.append("\n".join(_summary(grid, timing) for timing in timings(grid)))
    if others := inputs_table(document):
        parts += ["With other inputs:", others]
    parts += [
        "Error relative to float64 (Frobenius norm over two heads):",
        _error_table(rows),
        f"What making {RIVAL}'s BlockMask costs before the call, what {OWN}'s module takes beside "
        f"its {'gradients' if document['benchmark'] == 'backward' else 'output'}, and what it "
        "ships:",
        _cost_table(rows),
        *_refusals(rows),
    ]
    return "\n\n".join(parts)


def variants_table(document: Document) -> str:
    """A row for each variant: rates over the visible elements, and three ratios.

    FlashAttention 4 has the figure of the faster of its ways; the full table has all peers.
    """
    rows, by = document["cells"], timings(document["cells"])
    has_fa4 = any(peer.startswith(FA4) for peer in peers_of(rows))
    over = [RIVAL, *([FA4] if has_fa4 else []), "own causal"]
    columns = ["attention", "visible", OWN, *over[:-1], *(f"to {name}" for name in over)]
    lines = [
        f"{_rate_of(document)} on visible elements: head_dim {rows[0]['head_dim'][0]}, "
        f"{rows[0]['num_heads']} heads, {rows[0]['seq_len']} tokens, {rows[0]['dtype']}; "
        f"{caption(document)}. Ratios are {OWN}'s, by {' / '.join(TIMINGS[t] for t in by)}.",
        "",
        *header([*columns, *worst_columns(document)]),
    ]
    for row in rows:
        visible = f"{100 * row['visible_pairs'] / row['seq_len'] ** 2:.1f}%"
        shown = [_whole(rate(row, peer)) for peer in (OWN, RIVAL)]
        ratios = [[ratio(row, RIVAL, timing) for timing in by]]
        if has_fa4:
            shown.append(_whole(rate(row, best_fa4(row))))
            ratios.append([ratio(row, best_fa4(row, timing), timing) for timing in by])
        ratios.append([of_causal(row, rows, timing) for timing in by])
        joined = [" / ".join(map(_times, values)) if any(values) else "-" for values in ratios]
        worst = worst_fields(document, [row])
        lines.append(line([row["title"] or row["mask"], visible, *shown, *joined, *worst]))
    return "\n".join(lines)


def backward_table(document: Document) -> str:
    """The grid of the backward pass, and the variants beside full and causal attention.

    Only one of the two tables if a run has no cells for the other.
    """
    rows = document["cells"]
    tables = []
    if any(row["in_grid"] for row in rows):
        tables.append(summary_table(document))
    if variants := [row for row in rows if not row["in_grid"]]:
        size = ("seq_len", "head_dim", "dtype")
        alike = [all(row[key] == variants[0][key] for key in size) for row in rows]
        beside = [row for row, is_alike in zip(rows, alike, strict=True) if is_alike]
        tables.append(variants_table({**document, "cells": beside}))
    return "\n\n".join(tables)


def backward_summary(document: Document) -> str:
    """The summary beneath the picture of the backward pass."""
    alt = "Bars: backward TFLOP/s of flashgen and its peers, full and causal"
    return f"![{alt}](pictures/backward.svg)\n\n{backward_table(document)}"


#: By name: the benchmark of a table, and the function that makes it.
TABLES: dict[str, tuple[str, Callable[[Document], str]]] = {
    "summary": ("forward", summary_table),
    "full": ("forward", full_table),
    "variants": ("variants", variants_table),
    "variants_full": ("variants", full_table),
    "backward": ("backward", backward_summary),
    "backward_full": ("backward", full_table),
    "launch": ("launch", launch_table),
    "decoding": ("decoding", decoding_table),
    "cache": ("cache", cache_table),
    "varlen": ("varlen", varlen_table),
    "tiles": ("tiles", tiles_table),
    "linear": ("linear", linear_table),
    "linear_full": ("linear", linear_full_table),
    "serve": ("serve", serve_table),
    "models": ("models", models_table),
    "counters": ("counters", counters_table),
    "picks": ("picks", picks_table),
    "anywhere": ("anywhere", drawn_table),
    "anywhere_backward": ("anywhere-backward", drawn_table),
}

#: Tables of several benchmarks, from the results of each by name; empty if some are missing.
JOINED: dict[str, Callable[[Mapping[str, Document]], str]] = {"headline": headline_table}


def fill(text: str, results: Mapping[str, Document]) -> str:
    """``text`` with the tables of these results between its marks; nothing without results."""

    def block(match: re.Match[str]) -> str:
        name = match[2]
        if name in JOINED:
            shown = JOINED[name](results)
        else:
            benchmark, table = TABLES[name]
            shown = table(results[benchmark]) if benchmark in results else ""
        return f"{match[1]}{shown}\n{match[3]}" if shown else f"{match[1]}{match[3]}"

    return _BLOCK.sub(block, text)


def _rate_of(document: Document) -> str:
    return f"{'Backward' if document['benchmark'] == 'backward' else 'Forward'} TFLOP/s"


def _whole(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}"


def _times(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _to_best(row: Row, timing: str) -> float | None:
    return ratio(row, best_peer(row, timing), timing)


def _rates_table(rows: Sequence[Row], timing: str) -> str:
    peers = peers_of(rows)
    lines = header(["cell", "dtype", *peers, "best peer", f"{OWN} / best"], left=2)
    for row in rows:
        shown = [" ".join(f"{r:.0f}" for r in rates(row, peer, timing)) or "-" for peer in peers]
        best = best_peer(row, timing)
        lines.append(
            line([row["cell"], row["dtype"], *shown, best or "-", _times(_to_best(row, timing))])
        )
    return "\n".join(lines)


def _error_table(rows: Sequence[Row]) -> str:
    peers = peers_of(rows)
    lines = header(["cell", *peers])
    for row in rows:
        errors = [f"{row['error'][peer]:.2e}" if peer in row["error"] else "-" for peer in peers]
        lines.append(line([row["cell"], *errors]))
    return "\n".join(lines)


def _cost_table(rows: Sequence[Row]) -> str:
    lines = header(["cell", "BlockMask ms", "BlockMask peak MiB", "extra KiB", "configuration"])
    for row in rows:
        cost = row.get("block_mask")
        made = (f"{cost['ms']:.2f}", f"{cost['peak_mib']:.0f}") if cost else ("-", "-")
        extra = f"{row['extra_bytes'] / 1024:.0f}" if "extra_bytes" in row else "-"
        config = _configuration(row["config"] or {})
        if row.get("form") in ("hopper", "hopper_backward"):
            config = f"Gluon: {config}"
        lines.append(line([row["cell"], *made, extra, config or "-"]))
    return "\n".join(lines)


def _configuration(config: Mapping[str, Any]) -> str:
    """The numbers of a configuration, or of each of several kernels."""
    if any(isinstance(value, Mapping) for value in config.values()):
        return "; ".join(f"{name}: {_configuration(of or {})}" for name, of in config.items())
    return ", ".join(f"{key}={value}" for key, value in config.items())


def _refusals(rows: Sequence[Row]) -> Iterator[str]:
    refusals = [
        f"- {row['cell']}, {peer}: {reason}"
        for row in rows
        for peer, reason in row["unavailable"].items()
    ]
    if refusals:
        yield "Not available:"
        yield "\n".join(refusals)


def main() -> None:
    """Prints the tables of a file of results, or puts the newest results' into the documents."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.table", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("file", type=Path, nargs="?", help="results to print the tables of")
    what.add_argument("--write", action="store_true", help="update README.md and docs/")
    options = parser.parse_args()
    if options.write:
        for path in DOCUMENTS:
            path.write_text(fill(path.read_text(), newest_results()))
        return
    document = of_normal(json.loads(options.file.read_text()))
    tables = [table(document) for name, table in TABLES.values() if name == document["benchmark"]]
    sys.stdout.write("\n\n".join(tables) + "\n")


if __name__ == "__main__":
    main()
